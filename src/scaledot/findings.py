"""What a finding is, and the heads and layers it is about, in numbers that checks read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from scaledot.heads import SATURATED, HeadStats
from scaledot.numerals import counted, ranges
from scaledot.precision import FLOAT16_MAX
from scaledot.profiles import Profile, profiles
from scaledot.scales import Configured, of_call

if TYPE_CHECKING:
    from scaledot.mask_check import MaskFacts

POSITIONS = ("first", "previous", "current", "next")

SHOWN = 5
"""Heads that a finding names before it says how many more."""


@dataclass(frozen=True)
class Head:
    """The numbers of one head that tables and findings read; NaN where undefined.

    before, after: variance of all visible scores without and with the scale. within: mean variance
    within a row. row_shift: variance between rows. keys: exp(mean entropy). saturated: share of
    rows whose top_margin is at least 6.24 nats. gradient: mean Σp(1−p). largest: largest scaled
    score. bound: ‖q‖·‖k‖ bound of a raw score. first … next: mean weight on that key. profile: the
    rest, in parts. prefix_matching: (score, chance) on repeated random tokens, where tried.
    """

    layer: int
    head: int
    kv_head: int
    scale: float
    before: float
    after: float
    within: float
    row_shift: float
    keys: float
    entropy: float
    normalised_entropy: float
    saturated: float
    gradient: float
    largest: float
    margin_median: float
    margin_max: float
    bound: float
    first: float
    previous: float
    current: float
    next: float
    chance: dict[str, float]
    rows: dict[str, int]
    profile: Profile
    prefix_matching: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"

    @property
    def room(self) -> float:
        """How many times larger raw scores could be in float16."""
        return FLOAT16_MAX / self.bound if self.bound > 0 else math.nan

    @property
    def attends(self) -> tuple[str, float, float] | None:
        """(what, mass, chance) of the heaviest of first, previous, itself and next."""
        masses = [
            (getattr(self, name), self.chance[name], name)
            for name in POSITIONS
            if not math.isnan(getattr(self, name))
        ]
        if not masses:
            return None
        mass, chance, name = max(masses)
        return ("itself" if name == "current" else name), mass, chance


def heads_of(stats: HeadStats, layer: int) -> list[Head]:
    """Read the numbers of one module's heads from its statistics."""

    def mean(name: str) -> list[float]:
        m = stats.measures.get(name)
        return m.average.tolist() if m is not None else [math.nan] * stats.heads

    margin, top = stats.measures["top_margin"], stats.measures["max_score"].maximum
    entropy = mean("entropy")
    columns = {
        "before": stats.raw.var.tolist(),
        "after": stats.scaled.var.tolist(),
        "within": mean("score_var"),
        "row_shift": stats.scaled.row_shift.tolist(),
        "keys": [math.exp(nats) for nats in entropy],
        "entropy": entropy,
        "normalised_entropy": mean("normalised_entropy"),
        "saturated": stats.share_at_least("top_margin", SATURATED["bfloat16"]).tolist(),
        "gradient": mean("jacobian_trace"),
        "largest": _finite(top.tolist()),
        "margin_median": stats.quantile("top_margin", 0.5)[0].tolist(),
        "margin_max": _finite(margin.maximum.tolist()),
        "bound": _finite(stats.score_bound.tolist()),
    } | {name: mean(name) for name in POSITIONS}
    chances = {name: mean(f"chance.{name}") for name in POSITIONS}
    group, found = stats.heads // stats.kv_heads, profiles(stats)
    return [
        Head(
            layer=layer,
            head=h,
            kv_head=h // group,
            scale=stats.scale[0] if stats.scale[0] == stats.scale[1] else math.nan,
            chance={name: column[h] for name, column in chances.items()},
            rows={name: int(column[h]) for name, column in stats.counts.items()},
            profile=found[h],
            **{name: column[h] for name, column in columns.items()},
        )
        for h in range(stats.heads)
    ]


def _finite(values: list[float]) -> list[float]:
    return [x if math.isfinite(x) else math.nan for x in values]


@dataclass(frozen=True)
class Layer:
    """One observed module (or one call of a shared one): where its heads stand and what it does.

    configured: the factor that the configuration gives. own: the one that the module keeps, and in
    which attribute. own_sinks: it keeps sinks.
    """

    index: int
    path: str
    kind: str
    causal: bool
    d_k: int
    heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    sinks: bool
    window: Any
    configured: Configured | None
    own: tuple[float, str] | None = None
    own_sinks: bool = False


def layers_of(calls: Mapping[str, Any], stats: Mapping[str, HeadStats], model: Any) -> list[Layer]:
    """Every observed call in order, with the scale that the configuration gives it."""
    depth: dict[tuple[str, bool], int] = {}
    result = []
    for index, path in enumerate(stats):
        call = calls[path]
        stack = (call.kind, call.causal)
        within = depth.get(stack, 0)
        depth[stack] = within + 1
        given, own = of_call(model, call.path, call.d_k, within)
        result.append(
            Layer(
                index, path, call.kind, call.causal, call.d_k, call.heads, call.kv_heads,
                call.scale, call.softcap, call.sinks, call.window,
                given, own, _keeps_sinks(model, call.path),
            )
        )  # fmt: skip
    return result


def _keeps_sinks(model: Any, path: str) -> bool:
    """Whether a module has learned sinks, as gpt-oss's attentions do."""
    module = dict(model.named_modules()).get(path)
    return isinstance(getattr(module, "sinks", None), Tensor)


def architecture_of(model: Any, layers: Sequence[Layer], masks: Mapping[str, MaskFacts]) -> str:
    """ "GPT-2 decoder", "BERT encoder": the family as its configuration names it, and its shape."""
    kind = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
    known = {"gpt2": "GPT-2", "llama": "Llama", "t5": "T5", "distilbert": "DistilBERT",
             "roberta": "RoBERTa", "mistral": "Mistral", "gemma": "Gemma", "gemma2": "Gemma 2",
             "gemma3_text": "Gemma 3", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt_oss": "gpt-oss",
             "gpt_neox": "GPT-NeoX", "whisper": "Whisper"}  # fmt: skip
    name = known.get(kind) or (kind.upper() if len(kind) <= 6 else kind)
    if any(x.kind == "cross" for x in layers):
        return f"{name} encoder-decoder"
    meant = [masks[x.path].causal for x in layers if x.path in masks]
    return f"{name} {'decoder' if all(x.causal for x in layers) or any(meant) else 'encoder'}"


@dataclass(frozen=True)
class Finding:
    """One kind of observation. `next` is a command in which {audit} and {trace} stand for the
    user's own; heads are (layer, head)."""

    id: str
    kind: Literal["wrong", "look", "note"]
    title: str
    where: str
    seen: str
    means: str
    next: str
    source: str
    heads: tuple[tuple[int, int], ...]


Result = Finding | tuple[str, str] | None
"""What a check gives: a finding, or its name and what it saw; None if there is nothing to see."""


# How findings name heads and layers


def ids(heads: Iterable[Head]) -> tuple[tuple[int, int], ...]:
    return tuple((h.layer, h.head) for h in heads)


def names(heads: Sequence[Head]) -> str:
    return ", ".join(h.name for h in heads[:SHOWN]) + more(heads)


def more(heads: Sequence[Head]) -> str:
    return f" and {len(heads) - SHOWN} more" if len(heads) > SHOWN else ""


def whereabouts(heads: Sequence[Head]) -> str:
    return names(heads) if len(heads) <= SHOWN else in_layers(h.layer for h in heads)


def in_layers(indices: Iterable[int]) -> str:
    """ "layer 3" or "layers 0–3, 7"."""
    order = sorted(set(indices))
    return f"{'layer' if len(order) == 1 else 'layers'} {ranges(order)}"


def out_of(count: int, total: int, noun: str) -> str:
    return f"{count} of {counted(total, noun)}"


def hold(count: int, total: int) -> str:
    return f"{out_of(count, total, 'head')} {'holds' if count == 1 else 'hold'}"

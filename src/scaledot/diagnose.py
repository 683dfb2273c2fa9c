"""Head statistics → findings: what, where, how much, what it means, what to look at next.

A finding describes; it accuses only where a computation is not the one configured. Saturated heads,
sinks and wide scores are how trained models work, so they are `look` or `note`. Thresholds and
their sources: docs/maths.md#findings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scaledot.heads import SATURATED, HeadStats
from scaledot.numerals import counted, number, ranges, share, weight, whole
from scaledot.scales import Configured, Rule, rule

UNIT = (0.5, 2.0)
"""Within-row variance in this range counts as the unit variance of the theory."""
UNIFORM = 0.01
"""Within-row variance below this (standard deviation 0.1) costs under .005 nat of entropy."""
SATURATED_ROWS = 0.25
"""A head with at least this share of saturated rows is named."""
SINK = 0.3
"""A head whose first key holds more than this on average is a sink head (Gu et al. 2024)."""
FP16_MAX = 65504.0
POSITIONS = ("first", "previous", "current", "next")

SHOWN = 5
"""Heads that a finding names before it says how many more."""


@dataclass(frozen=True)
class Head:
    """The numbers of one head that tables and findings read; NaN where undefined.

    before, after: variance of all visible scores without and with the scale. within: mean variance
    within a row. row_shift: variance between rows. keys: exp(mean entropy). saturated: share of
    rows whose top_margin is at least 6.24 nats. gradient: mean Σp(1−p). largest: largest scaled
    score. bound: ‖q‖·‖k‖ bound of a raw score. first … next: mean weight on that key.
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

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"

    @property
    def room(self) -> float:
        """How many times larger raw scores could be in float16."""
        return FP16_MAX / self.bound if self.bound > 0 else math.nan

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
    group = stats.heads // stats.kv_heads
    return [
        Head(
            layer=layer,
            head=h,
            kv_head=h // group,
            scale=stats.scale[0] if stats.scale[0] == stats.scale[1] else math.nan,
            chance={name: column[h] for name, column in chances.items()},
            rows={name: int(column[h]) for name, column in stats.counts.items()},
            **{name: column[h] for name, column in columns.items()},
        )
        for h in range(stats.heads)
    ]


def _finite(values: list[float]) -> list[float]:
    return [x if math.isfinite(x) else math.nan for x in values]


@dataclass(frozen=True)
class Layer:
    """One observed module (or one call of a shared one): where its heads stand and what it does."""

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


def findings(
    heads: Sequence[Head], layers: Sequence[Layer], d_model: int | None
) -> tuple[list[Finding], list[tuple[str, str]]]:
    """(findings, most serious first; what was checked and found nothing, with its numbers)."""
    found: list[Finding] = []
    clear: list[tuple[str, str]] = []
    checks = (_nonfinite, _empty, _variance, _saturation, _sinks, _uniform, _range)
    for result in (_scale(heads, layers, d_model), *(check(heads) for check in checks)):
        if isinstance(result, Finding):
            found.append(result)
        elif result is not None:
            clear.append(result)
    order = ("wrong", "look", "note")
    return sorted(found, key=lambda f: order.index(f.kind)), clear


_Result = Finding | tuple[str, str] | None


def _scale(heads: Sequence[Head], layers: Sequence[Layer], d_model: int | None) -> _Result:
    """The factor applied against the configuration's; variance has no say in it."""
    known = [x for x in layers if x.configured and math.isfinite(x.scale)]
    wrong = [x for x in known if _is_other(x, known, d_model)]
    if not wrong:
        if not known:
            return None
        return "scale", f"as configured in {_of(len(known), len(layers), 'layer')}"
    first = wrong[0]
    assert first.configured is not None
    applied, meant = (rule(s, first.d_k, d_model) for s in (first.scale, first.configured.scale))
    ratio = first.scale / first.configured.scale
    direction = "wider" if ratio > 1 else "narrower"
    known_as = ""
    if applied is not None:
        known_as = f"{number(first.scale)} is {applied.name}. "
    return Finding(
        "scale",
        "wrong",
        f"A scale other than the configuration's is applied in {_layers(x.index for x in wrong)}",
        _layers(x.index for x in wrong),
        f"× {number(first.scale)}{_equals(applied)}; config gives "
        f"{number(first.configured.scale)}{_equals(meant)} ({first.configured.source}).",
        f"{known_as}Scores are {number(max(ratio, 1 / ratio))} times {direction}.",
        f"{{audit}} --layers {first.index}",
        "docs/maths.md#scales",
        tuple((h.layer, h.head) for h in heads if h.layer in {x.index for x in wrong}),
    )


def _is_other(layer: Layer, known: Sequence[Layer], d_model: int | None) -> bool:
    """Whether a layer's factor is certainly not the one configured."""
    assert layer.configured is not None
    if math.isclose(layer.scale, layer.configured.scale, rel_tol=1e-3):
        return False
    return layer.configured.explicit or _unlike_siblings(layer, known) or _is_width(layer, d_model)


def _unlike_siblings(layer: Layer, known: Sequence[Layer]) -> bool:
    """A layer whose scale is not the one most layers of its kind and size apply."""
    peers = [x.scale for x in known if x.kind == layer.kind and x.d_k == layer.d_k]
    common = statistics.mode(round(s, 6) for s in peers)
    return len(peers) > 2 and not math.isclose(layer.scale, common, rel_tol=1e-3)


def _is_width(layer: Layer, d_model: int | None) -> bool:
    """1/√d_model where heads are narrower: the commonest mistake, and no family's rule."""
    return bool(d_model and d_model != layer.d_k) and math.isclose(
        layer.scale, (d_model or 1) ** -0.5, rel_tol=1e-3
    )


def _nonfinite(heads: Sequence[Head]) -> _Result:
    bad = [h for h in heads if h.rows["nonfinite"]]
    if not bad:
        return "non-finite rows", "none"
    count, total = (sum(h.rows[n] for h in bad) for n in ("nonfinite", "rows"))
    return Finding(
        "nonfinite",
        "wrong",
        f"{_hold(len(bad), len(heads))} NaN or infinite scores",
        _where(bad),
        f"{count:,} of {total:,} rows; first in {bad[0].name}. They enter no average.",
        "A query or a visible key is not a number, or their product overflows.",
        f"{{audit}} --head {bad[0].name}",
        "docs/maths.md#edges",
        _ids(bad),
    )


def _empty(heads: Sequence[Head]) -> _Result:
    bad = [h for h in heads if h.rows["empty"]]
    if not bad:
        return "empty rows", "none"
    count, total = (sum(h.rows[n] for h in bad) for n in ("empty", "rows"))
    return Finding(
        "empty",
        "look",
        f"{_hold(len(bad), len(heads))} queries that see no key",
        _where(bad),
        f"{count:,} of {total:,} rows are fully masked. They enter no average.",
        "Their output is 0, or the mean of all values where the mask is a large negative number.",
        f"{{audit}} --head {bad[0].name}",
        "docs/maths.md#edges",
        _ids(bad),
    )


def _variance(heads: Sequence[Head]) -> _Result:
    there = [h for h in heads if not math.isnan(h.within)]
    if not there:
        return None
    wide = [h for h in there if h.within > UNIT[1]]
    narrow = [h for h in there if h.within < UNIT[0]]
    low, high = min(there, key=lambda h: h.within), max(there, key=lambda h: h.within)
    if not wide and not narrow:
        return (
            "score variance",
            f"within rows {number(low.within)} to {number(high.within)}, theory 1",
        )
    wider = len(wide) >= len(narrow)
    some = wide if wider else narrow
    word, bound = ("wider", "above 2") if wider else ("narrower", "below ½")
    where = f"within-row variance {bound}"
    if len(some) == len(there):
        where += f", {_layers(h.layer for h in some)}"
    else:
        unit = len(there) - len(wide) - len(narrow)
        other = narrow if wider else wide
        where += f"; ½ to 2 in {counted(unit, 'head')}" if unit else ""
        if other:
            side, end = ("below", "½") if wider else ("above", "2")
            where += (
                f", {side} in {_names(other)}" if unit else f"; {side} {end} in {_names(other)}"
            )
    least, most = min(h.after for h in there), max(h.after for h in there)
    middle, overall = (statistics.median(getattr(h, n) for h in there) for n in ("within", "after"))
    extreme = high if wider else low
    return Finding(
        "variance",
        "look",
        f"Scores are {word} than theory in {_of(len(some), len(heads), 'head')}",
        where,
        f"Within rows, all that softmax sees: {number(low.within)} ({low.name}) to "
        f"{number(high.within)} ({high.name}), median {number(middle)}; theory 1. Over all pairs, "
        f"as above: {number(least)} to {number(most)}, median {number(overall)}.",
        "The theory assumes independent components of unit variance; training leaves that. "
        + ("Wider scores make sharper rows." if wider else "Narrower scores make flatter rows."),
        f"{{trace}} --layer {extreme.layer} --head {extreme.head}",
        "docs/maths.md#variance",
        _ids(some),
    )


def _saturation(heads: Sequence[Head]) -> _Result:
    there = [h for h in heads if not math.isnan(h.saturated)]
    if not there:
        return None
    bad = sorted((h for h in there if h.saturated >= SATURATED_ROWS), key=lambda h: -h.saturated)
    top = max(there, key=lambda h: h.saturated)
    if not bad:
        if not top.saturated:
            return "saturated rows", "none: no key leads by 6.24 nats"
        return "saturated rows", f"at most {share(top.saturated)} ({top.name})"
    some = [h for h in there if 0 < h.saturated < SATURATED_ROWS]
    if len(bad) == 1:
        rows = "every row" if top.saturated == 1 else f"{share(top.saturated)} of its rows"
        title = f"Head {top.name} saturates {rows}"
    else:
        least = share(SATURATED_ROWS)
        title = f"{_of(len(bad), len(heads), 'head')} saturate {least} of their rows or more"
    where = top.name
    if len(bad) > 1:
        where = ", ".join(f"{h.name} {share(h.saturated)}" for h in bad[:SHOWN]) + _more(bad)
    if some:
        where += f"; under {share(SATURATED_ROWS)} in {counted(len(some), 'other head')}"
    onto_first = [h for h in bad if (a := h.attends) and a[0] == "first" and a[1] > SINK]
    means = (
        "Such rows pass almost no gradient to q and k; v still learns. Heads that copy one "
        "position look like this: a description, not a fault."
    )
    if len(onto_first) == len(bad) > 1:
        means = (
            "bfloat16 stores such rows as exactly one-hot. "
            f"All {len(bad)} heads look at the first token."
        )
    return Finding(
        "saturation",
        "note",
        title,
        where,
        f"The top key leads by {number(top.margin_median)} nats at the median ({top.name}), "
        f"{number(top.margin_max)} at most; bfloat16 rounds to one-hot from 6.24 on.",
        means,
        f"{{trace}} --layer {top.layer} --head {top.head}",
        "docs/maths.md#saturation",
        _ids(bad),
    )


def _sinks(heads: Sequence[Head]) -> _Result:
    there = [h for h in heads if not math.isnan(h.first)]
    if not there:
        return None
    chance = statistics.fmean(h.chance["first"] for h in there)
    bad = [h for h in there if h.first > SINK]
    top = max(there, key=lambda h: h.first)
    if not bad or chance > SINK:
        # In very short texts equal weights already exceed the threshold: nothing can be said.
        return "first-token sink", f"none: {weight(top.first)} at most, chance {weight(chance)}"
    strong = [h for h in bad if h.first > 0.8]
    where = _layers(h.layer for h in bad)
    if strong and len(strong) < len(bad):
        where += (
            f"; more than .8 in {counted(len(strong), 'head')}, {_layers(h.layer for h in strong)}"
        )
    return Finding(
        "sink",
        "note",
        f"The first token holds more than .3 of the weight in {_of(len(bad), len(heads), 'head')}",
        where,
        f"Mean over queries after the first; all keys alike would give {weight(chance)}. "
        f"Most: {weight(top.first)} ({top.name}).",
        "Known as an attention sink, common in trained decoders: described, not judged.",
        "{audit} --show first",
        "Gu et al. 2024 (threshold .3), arXiv:2410.10781",
        _ids(bad),
    )


def _uniform(heads: Sequence[Head]) -> _Result:
    there = [h for h in heads if not math.isnan(h.within)]
    bad = [h for h in there if h.within < UNIFORM]
    if not bad:
        return "near-uniform head", "none"
    low = min(bad, key=lambda h: h.within)
    return Finding(
        "uniform",
        "note",
        f"{_hold(len(bad), len(heads))} nearly equal weights",
        _where(bad),
        f"Within-row variance {number(low.within)} in {low.name}; below .01 a row differs from "
        "equal weights by less than .005 nat.",
        "The head averages the values it sees.",
        f"{{audit}} --head {low.name}",
        "docs/maths.md#findings",
        _ids(bad),
    )


def _range(heads: Sequence[Head]) -> _Result:
    there = [h for h in heads if not math.isnan(h.bound)]
    if not there:
        return None
    top = max(there, key=lambda h: h.bound)
    bad = [h for h in there if h.bound > FP16_MAX]
    if not bad:
        return "fp16 range", f"raw scores at most {whole(top.bound)} (bound ‖q‖·‖k‖) of 65,504"
    return Finding(
        "range",
        "look",
        f"Raw scores may exceed float16's 65,504 in {_of(len(bad), len(heads), 'head')}",
        _where(bad),
        f"‖q‖·‖k‖ reaches {whole(top.bound)} ({top.name}); the largest scaled score is "
        f"{number(top.largest)}.",
        "An upper bound, for scores of either sign, masked ones too. A kernel that forms q·k in "
        "float16 before scaling could overflow; one that accumulates in float32 does not.",
        f"{{audit}} --head {top.name}",
        "docs/maths.md#precision",
        _ids(bad),
    )


def _ids(heads: Iterable[Head]) -> tuple[tuple[int, int], ...]:
    return tuple((h.layer, h.head) for h in heads)


def _names(heads: Sequence[Head]) -> str:
    return ", ".join(h.name for h in heads[:SHOWN]) + _more(heads)


def _more(heads: Sequence[Head]) -> str:
    return f" and {len(heads) - SHOWN} more" if len(heads) > SHOWN else ""


def _where(heads: Sequence[Head]) -> str:
    return _names(heads) if len(heads) <= SHOWN else _layers(h.layer for h in heads)


def _layers(indices: Iterable[int]) -> str:
    """ "layer 3" or "layers 0–3, 7"."""
    order = sorted(set(indices))
    return f"{'layer' if len(order) == 1 else 'layers'} {ranges(order)}"


def _of(count: int, total: int, noun: str) -> str:
    return f"{count} of {counted(total, noun)}"


def _hold(count: int, total: int) -> str:
    return f"{_of(count, total, 'head')} {'holds' if count == 1 else 'hold'}"


def _equals(known: Rule | None) -> str:
    return f" = {known.value}" if known is not None else ""

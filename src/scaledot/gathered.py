"""What windows of text gave, and the audit that follows from it.

`Subject` is what is said of a model, `Gathered` what its windows add up to: either can be written
down (state.py) and read without the model, and two `Gathered` of other windows merge exactly.
`conclude` makes of them the audit that people read.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaledot import ScaledotError, mask_check
from scaledot import heads as head_stats
from scaledot.diagnose import findings
from scaledot.findings import Finding, Head, Layer, architecture_of, heads_of, layers_of
from scaledot.heads import SATURATED, HeadStats
from scaledot.mask_check import MaskFacts
from scaledot.parts import NOT_IN_PARTS
from scaledot.trials import Trials
from scaledot.windows import config_number, made_for

if TYPE_CHECKING:
    from scaledot.exploring import Reading

SEED = 20260714
"""Of the simulated scores of `Theory`."""


@dataclass(frozen=True)
class Subject:
    """A model as an audit speaks of it.

    context: tokens of a window at most. made_for: tokens that it was made for. Either None where
    nobody says. chunk: tokens of a part, None where windows run whole. threads: None off the CPU.
    """

    name: str
    architecture: str
    d_model: int | None
    context: int | None
    made_for: int | None
    chunk: int | None
    unobserved: tuple[str, ...]
    layers: tuple[Layer, ...]
    trials: Trials
    kernel: str
    dtype: str
    device: str
    threads: int | None
    torch: str
    transformers: str | None


@dataclass(frozen=True, eq=False)
class Gathered:
    """What windows gave: statistics and mask facts by module path, and how much text it was.

    pairs: the sum of squared lengths. longest: tokens of the longest window. seconds: that the
    forwards took, of all processes together.
    """

    stats: Mapping[str, HeadStats]
    masks: Mapping[str, MaskFacts]
    texts: int = 0
    windows: int = 0
    tokens: int = 0
    pairs: int = 0
    longest: int = 0
    seconds: float = 0.0


def merge(a: Gathered, b: Gathered) -> Gathered:
    """What the windows of both gave. Raises: ValueError if they are of different models."""

    def both(join: Any, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        return {
            path: join(one[path], other[path])
            if path in one and path in other
            else (one if path in one else other)[path]
            for path in [*one, *(x for x in other if x not in one)]
        }

    return Gathered(
        both(head_stats.merge, a.stats, b.stats),
        both(mask_check.merge, a.masks, b.masks),
        a.texts + b.texts,
        a.windows + b.windows,
        a.tokens + b.tokens,
        a.pairs + b.pairs,
        max(a.longest, b.longest),
        a.seconds + b.seconds,
    )


@dataclass(frozen=True)
class Theory:
    """What independent N(0, 1) scores would give under the same masks: a seeded simulation.

    keys exp(mean entropy); saturated share of rows; gradient mean Σp(1−p); largest the expected
    maximum of all scores. uniform_keys and uniform_gradient are those of equal weights.
    """

    keys: float
    saturated: float
    gradient: float
    largest: float
    uniform_keys: float
    uniform_gradient: float


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. `heads` has a `Head` a head, `findings` what they say, `stats` the sums
    behind them; `complete` is False if it was stopped early, and the numbers are then exact for
    what was done. Printing it gives the terminal's table."""

    model: Mapping[str, Any]
    text: Mapping[str, Any]
    run: Mapping[str, Any]
    theory: Theory | None
    layers: tuple[Layer, ...]
    heads: tuple[Head, ...]
    findings: tuple[Finding, ...]
    checked: tuple[tuple[str, str], ...]
    stats: Mapping[str, HeadStats] = field(repr=False)
    complete: bool = True
    example: Reading | None = field(default=None, repr=False)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the audit as JSON, or as a page where the path ends in .html; whole or not at all.
        Return its size in bytes.

        Raises: ScaledotError if the file cannot be written.
        """
        if os.fspath(path).lower().endswith((".html", ".htm")):
            return self.to_html(path)
        from scaledot.document import audit_document, dump

        again = {"audit": f"scaledot audit {shlex.quote(os.fspath(path))}"}
        data = dump(audit_document(self, again))
        head_stats.write(path, data)
        return len(data)

    def to_html(self, path: str | os.PathLike[str]) -> int:
        """Write the audit as one page that needs nothing else, and return its size in bytes.

        Raises: ScaledotError if the file cannot be written, or the audit has no example.
        """
        from scaledot.page_document import report_document
        from scaledot.report import page

        data = page(report_document(self)).encode()
        head_stats.write(path, data)
        return len(data)

    def _repr_html_(self) -> str:
        from scaledot.page_document import FRAMED, report_document
        from scaledot.report import frame

        document = report_document(self, budget=FRAMED)
        return frame(document, f"scaledot: audit of {self.model['name']}")

    def __str__(self) -> str:
        from scaledot.document import audit_document
        from scaledot.terminal import audit_text

        return audit_text(audit_document(self))

    def __repr__(self) -> str:
        found = len(self.findings)
        return f"<Audit of {self.model['name']}: {len(self.heads)} heads, {found} findings>"


def subject_of(
    model: Any,
    calls: Mapping[str, Any],
    stats: Mapping[str, HeadStats],
    masks: Mapping[str, MaskFacts],
    trials: Trials,
    *,
    name: str | None,
    context: int | None,
    chunk: int | None,
    unobserved: Sequence[str],
) -> Subject:
    """A model as it was seen in an observation; calls, stats and masks by module path."""
    config = getattr(model, "config", None)
    places = layers_of(calls, stats, model)
    first = next(model.parameters(), torch.empty(0))
    return Subject(
        name or name_of(model),
        architecture_of(model, places, masks),
        config_number(config, "hidden_size", "d_model", "n_embd"),
        context,
        made_for(model),
        chunk,
        tuple(unobserved),
        tuple(places),
        trials,
        next(iter(calls.values())).kernel,
        str(first.dtype).removeprefix("torch."),
        str(first.device),
        torch.get_num_threads() if first.device.type == "cpu" else None,
        torch.__version__,
        _version("transformers"),
    )


def layers_among(there: tuple[Layer, ...], wanted: Collection[int] | None) -> tuple[Layer, ...]:
    """Those layers whose index is wanted, all for None. Raises: ScaledotError for one not there."""
    if wanted is None:
        return there
    if absent := set(wanted) - {x.index for x in there}:
        raise ScaledotError(f"no layer {min(absent)}: this model has layers 0 to {len(there) - 1}")
    return tuple(x for x in there if x.index in wanted)


def conclude(
    subject: Subject,
    gathered: Gathered,
    *,
    layers: Collection[int] | None = None,
    planned: int | None = None,
    complete: bool = True,
    skipped: int = 0,
    example: Reading | None = None,
) -> Audit:
    """The audit of what was gathered.

    layers: those that it keeps, None for all. planned: windows that there are, where that is known.
    skipped: texts left out because they could not be read.

    Raises: ScaledotError for a layer that is not there.
    """
    places, trials = layers_among(subject.layers, layers), subject.trials
    stats = {x.path: gathered.stats[x.path] for x in places}
    heads = [
        replace(h, prefix_matching=trials.matched.get(x.path, {}).get(h.head))
        for x in places
        for h in heads_of(stats[x.path], x.index)
    ]
    found, clear = findings(heads, places, subject.d_model, gathered.masks, trials.leaks)
    scores = int(stats[places[0].path].scaled.count.max())
    made, chunk = subject.made_for, subject.chunk
    return Audit(
        model={
            "name": subject.name,
            "architecture": subject.architecture,
            "layers": len(places),
            "heads": places[0].heads,
            "kv_heads": places[0].kv_heads,
            "d_k": places[0].d_k,
            "d_model": subject.d_model,
            "shares_weights": any("[" in x.path for x in places),
            "context": subject.context,
            "unobserved": list(subject.unobserved),
        },
        text={
            "texts": gathered.texts,
            "windows": gathered.windows,
            "tokens": gathered.tokens,
            "context": subject.context,
            "longest": gathered.longest,
            "beyond": made if made is not None and gathered.longest > made else None,
            "chunk": chunk,
            "left_out": [] if chunk is None else list(NOT_IN_PARTS),
            "attention": _attention_kind(places, scores, gathered.pairs),
            "scores": scores,
            "planned": gathered.windows if planned is None else planned,
            "skipped": skipped,
        },
        run={
            name: getattr(subject, name)
            for name in ("kernel", "dtype", "device", "threads", "torch", "transformers")
        }
        | {"seconds": gathered.seconds},
        theory=_theory(list(stats.values())),
        layers=places,
        heads=tuple(heads),
        findings=tuple(found),
        checked=tuple(clear + list(trials.untried)),
        stats=stats,
        complete=complete,
        example=example,
    )


def _attention_kind(layers: Sequence[Layer], scores: int, pairs: int) -> str:
    """What the first layer's queries see: "full" only if nothing is hidden."""
    kinds = {x.causal for x in layers}
    if len(kinds) > 1:
        return "mixed"
    if kinds.pop():
        return "causal"
    return "full" if scores >= pairs else "masked"


def name_of(model: Any) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return os.path.basename(os.path.normpath(path)) if path else type(model).__name__


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _theory(stats: Sequence[HeadStats]) -> Theory | None:
    """Simulate N(0, 1) scores for rows that see as many keys as the model's rows did."""
    lengths = _lengths(stats)
    if not lengths:
        return None
    rows = sum(lengths.values())
    generator = torch.Generator().manual_seed(SEED)
    entropy = gradient = saturated = uniform_entropy = inverse = 0.0
    several = sum(c for n, c in lengths.items() if n > 1)
    for n, count in lengths.items():
        weight = count / rows
        uniform_entropy += weight * math.log(n)
        inverse += weight / n
        if n == 1:
            continue
        trials = min(max(2**21 // n, 16), max(64, round(2**14 * weight)))
        scores = torch.randn(trials, n, generator=generator)
        p = scores.softmax(-1)
        top = scores.amax(-1)
        rest = (scores - top[:, None]).exp().sum(-1) - 1
        entropy += weight * float((scores.logsumexp(-1) - (p * scores).sum(-1)).mean())
        gradient += weight * float((1 - p.square().sum(-1)).mean())
        saturated += (
            count / several * float((rest <= math.exp(-SATURATED["bfloat16"])).float().mean())
        )
    pairs = max(int(s.scaled.count.max()) for s in stats)
    return Theory(
        math.exp(entropy), saturated, gradient, _expected_maximum(pairs),
        math.exp(uniform_entropy), 1 - inverse,
    )  # fmt: skip


def _lengths(stats: Sequence[HeadStats]) -> dict[int, int]:
    """How many rows saw how many keys, to the resolution of the histogram (exact up to 64)."""
    histogram = sum(s.measures["visible"].histogram.sum(0) for s in stats)
    assert isinstance(histogram, Tensor)
    edges = head_stats.EDGES["visible"]
    result: dict[int, int] = {}
    for i in histogram.nonzero()[:, 0].tolist():
        low, high = edges[i - 1], edges[i] if i < len(edges) else edges[-1]
        n = int(low) if low < 64 else round(float((low + high) / 2))
        result[n] = result.get(n, 0) + int(histogram[i])
    return result


def _expected_maximum(count: int) -> float:
    """E max of `count` independent N(0, 1) draws, by the quantiles of the maximum."""
    u = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    # 1 − u^(1/count), without rounding to 0 for large counts.
    upper = -torch.expm1(u.log() / max(count, 1))
    return float(-torch.special.ndtri(upper).mean())

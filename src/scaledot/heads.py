"""One summary per head, from many rows: sums that merge over texts, batches, devices, machines.

A measure (entropy, top_margin, …) keeps its count, mean, sum of squared deviations, extremes and a
histogram on fixed edges, each with a leading axis of heads; pairs keep the mean and variance of all
scores, split into what softmax sees (within rows) and what it cannot (between rows). `merge` is
associative and commutative with `HeadStats.identity`: integers and extremes exactly, moments to
1e-12. Source: Chan, Golub & LeVeque 1979 for the moments; docs/maths.md#heads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot import ScaledotError
from scaledot.files import read, write
from scaledot.rows import RowStats

FORMAT = "scaledot/heads 1"

SATURATED = {"bfloat16": 9 * math.log(2), "float16": 12 * math.log(2), "float32": 25 * math.log(2)}
"""top_margin in nats from which a dtype stores the heaviest weight as exactly 1: 1 − p is then
below half a unit in the last place, 2⁻⁹, 2⁻¹², 2⁻²⁵ (docs/maths.md#saturation)."""

COUNTS = ("rows", "empty", "nonfinite", "padding", "single")
DEAD = 1e-3
"""A row that transmits less passes a thousandth of what equal weights would."""
_TOGETHER = 1 << 17
"""Numbers that are sorted together."""
ROWS = (
    "visible", "score_mean", "score_var", "max_score", "lse", "entropy", "top_margin", "collision",
    "jacobian_trace", "sink_mass",
)  # fmt: skip
"""Measures that are row statistics as they are."""
WATCHED = ("max_score", "entropy", "score_var", "top_margin", "jacobian_trace")
"""Those of them that a training run is watched by."""
TWO_KEYS = ("score_var", "normalised_entropy", "top_margin", "key_bias", "key_spread")
"""Measures that say nothing of a row that sees one key, and leave it out."""


def _linear(low: float, high: float, steps: int) -> Tensor:
    return torch.linspace(low, high, steps + 1, dtype=torch.float64)


def _octaves(low: int, high: int, per_octave: int) -> Tensor:
    exponents = torch.arange(low * per_octave, high * per_octave + 1, dtype=torch.float64)
    return torch.exp2(exponents / per_octave)


def _signed(edges: Tensor) -> Tensor:
    return torch.cat([-edges.flip(0), torch.zeros(1, dtype=torch.float64), edges])


def _decades(low: int, high: int, per_decade: int) -> Tensor:
    steps = range(low * per_decade, high * per_decade + 1)
    return torch.tensor([10.0 ** (i / per_decade) for i in steps], dtype=torch.float64)


_SHARE = _linear(0, 1, 128)
_MARGIN = torch.arange(-24 * 8, 126 * 8 + 1, dtype=torch.float64) * (math.log(2) / 8)
_SWEPT_MARGIN = torch.arange(-12 * 4, 28 * 4 + 1, dtype=torch.float64) * (math.log(2) / 4)
SWEPT = range(-8, 9)
"""Octaves of the scale that whatif.sweep may name."""
EDGES: Mapping[str, Tensor] = {
    "visible": torch.cat([torch.arange(1.0, 64, dtype=torch.float64), _octaves(6, 24, 8)]),
    "score_mean": _signed(_octaves(-6, 16, 4)),
    "score_var": _octaves(-20, 20, 4),
    "max_score": _signed(_octaves(-6, 16, 4)),
    "lse": _signed(_octaves(-6, 16, 4)),
    "entropy": _linear(0, 16, 256),
    "normalised_entropy": _SHARE,
    "top_margin": _MARGIN,
    "collision": _SHARE,
    "jacobian_trace": _octaves(-60, 0, 4),
    "sink_mass": _SHARE,
    "query_norm": _octaves(-12, 16, 4),
    "key_norm": _octaves(-12, 16, 4),
    "key_bias": _octaves(-20, 20, 4),
    "key_spread": _octaves(-24, 32, 2),
    "first": _SHARE,
    "previous": _SHARE,
    "current": _SHARE,
    "next": _SHARE,
    "transmission": _decades(-12, 6, 16),
    "gradient_norm": _decades(-30, 6, 4),
    "local.4": _SHARE,
    "local.16": _SHARE,
    "local.64": _SHARE,
    "distance": _octaves(-6, 24, 4),
    "delimiter": _SHARE,
    "duplicate": _SHARE,
    "induction": _SHARE,
    "value_spread": _octaves(-40, 24, 2),
    "relative_value_spread": _octaves(-24, 8, 4),
    "bf16_cost": _octaves(-24, 0, 4),
    "bf16_cost_centred": _octaves(-24, 0, 4),
    "excess_entropy": _linear(-12, 12, 192),
    "relative_width": _octaves(-12, 12, 4),
} | {f"whatif.top_margin.{e}": _SWEPT_MARGIN for e in SWEPT}
"""Histogram edges of each measure: bin i counts edges[i−1] ≤ x < edges[i], the outer two are open.
The edges of both kinds of top_margin include every value of SATURATED. A measure not named here
has none."""


@dataclass(frozen=True, eq=False)
class Measure:
    """Sums of one measure over rows, for each head; mean is 0 and extremes ±inf for no rows."""

    count: Int[Tensor, " heads"]
    mean: Float[Tensor, " heads"]
    m2: Float[Tensor, " heads"]
    minimum: Float[Tensor, " heads"]
    maximum: Float[Tensor, " heads"]
    histogram: Int[Tensor, "heads bins"]

    @staticmethod
    def of(name: str, values: Float[Tensor, "heads rows"]) -> Measure:
        """Summarise values, NaN meaning "not measured in this row"."""
        return _summed({name: values.cpu().to(torch.float64).numpy()})[name]

    @property
    def var(self) -> Float[Tensor, " heads"]:
        """Population variance over rows, NaN for no rows."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp(min=1), math.nan)

    @property
    def average(self) -> Float[Tensor, " heads"]:
        """Mean over rows, NaN for no rows."""
        return torch.where(self.count > 0, self.mean, math.nan)

    def of_head(self, head: int) -> float:
        """`average` of one head."""
        return float(self.mean[head]) if self.count[head] else math.nan


def _summed(named: Mapping[str, np.ndarray]) -> dict[str, Measure]:
    """`Measure.of` for several of the same shape together: of few rows that is faster."""
    result: dict[str, Measure] = {}
    for dtype in {x.dtype for x in named.values()}:
        names = [name for name, x in named.items() if x.dtype == dtype]
        names.sort(key=TWO_KEYS.__contains__)  # side by side, as they leave out the same rows
        step = max(1, _TOGETHER // max(1, named[names[0]].size))
        for start in range(0, len(names), step):
            result |= _together({name: named[name] for name in names[start : start + step]})
    return {name: result[name] for name in named}


def _together(named: Mapping[str, np.ndarray]) -> dict[str, Measure]:
    # Sorted, NaN last, a head's values give extremes and histogram at once: numpy's sort is faster
    # than a search of the edges for each value, and of float32 faster than of float64.
    ordered = np.concatenate(list(named.values()))
    ordered.sort(axis=-1)
    flat = ordered.astype(np.float64, copy=False)
    counts = np.full(len(flat), flat.shape[1])
    for row in np.isnan(flat[:, -1:].ravel()).nonzero()[0]:
        counts[row] = flat[row].searchsorted(math.nan)
    mean, m2 = np.zeros(len(flat)), np.zeros(len(flat))
    low, high = np.full(len(flat), math.inf), np.full(len(flat), -math.inf)
    for n in set(counts[counts > 0].tolist()):
        of = (counts == n).nonzero()[0]
        start, stop = int(of[0]), int(of[-1]) + 1
        core = flat[start:stop, :n] if stop - start == len(of) else flat[of, :n]
        low[of], high[of] = core[:, 0], core[:, -1]
        with np.errstate(invalid="ignore"):  # ∞ − ∞ is NaN, as it should be
            middle = core.mean(-1, keepdims=True)
            mean[of] = middle[:, 0]
            apart = core - middle
            m2[of] = np.square(apart, out=apart).sum(-1)
    heads = len(flat) // len(named)
    parts = [torch.from_numpy(x).split(heads) for x in (counts, mean, m2, low, high)]
    result = {}
    for at, name in enumerate(named):
        of = slice(at * heads, (at + 1) * heads)
        histogram = _histogram(flat[of], counts[of], low[of], high[of], EDGES.get(name))
        result[name] = Measure(*(*(x[at] for x in parts), torch.from_numpy(histogram)))
    return result


def _histogram(
    ordered: np.ndarray, counts: np.ndarray, low: np.ndarray, high: np.ndarray,
    edges: Tensor | None,
) -> np.ndarray:  # fmt: skip
    if edges is None:
        return np.zeros((len(counts), 0), dtype=np.int64)
    at = edges.numpy()
    below = np.zeros((len(counts), len(at) + 2), dtype=np.int64)
    # Below the edges up to the smallest lies nothing, below those above the largest all.
    first = at.searchsorted(low, side="right").tolist()
    last = at.searchsorted(high, side="right").tolist()
    for head, n in enumerate(counts.tolist()):
        if n:
            start, stop, row = first[head], last[head], below[head]
            row[start + 1 : stop + 1] = ordered[head, :n].searchsorted(at[start:stop])
            row[stop + 1 :] = n
    return below[:, 1:] - below[:, :-1]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Mean and variance over all visible (query, key) pairs of each head.

    within is Σ nᵢ·varᵢ, what softmax sees; between is Σ nᵢ·(meanᵢ − mean)², which it cannot.
    """

    count: Int[Tensor, " heads"]
    mean: Float[Tensor, " heads"]
    within: Float[Tensor, " heads"]
    between: Float[Tensor, " heads"]

    @staticmethod
    def of(
        visible: Int[Tensor, "heads rows"],
        mean: Float[Tensor, "heads rows"],
        var: Float[Tensor, "heads rows"],
    ) -> Pairs:
        """Summarise rows; one that sees nothing (or is NaN) must come with visible 0."""
        there, weight = visible > 0, visible.to(torch.float64)
        mean, var = (x.to(torch.float64).masked_fill(~there, 0.0) for x in (mean, var))
        count = visible.sum(1, dtype=torch.int64)
        grand = (weight * mean).sum(1) / count.clamp(min=1)
        between = (weight * (mean - grand[:, None]).square()).sum(1)
        return Pairs(count, grand, (weight * var).sum(1), between)

    def times(self, factor: float) -> Pairs:
        """The same of scores `factor` times as large."""
        square = factor**2
        return Pairs(self.count, self.mean * factor, self.within * square, self.between * square)

    @property
    def var(self) -> Float[Tensor, " heads"]:
        """Population variance over all pairs, NaN for none."""
        return self._per_pair(self.within + self.between)

    @property
    def var_within(self) -> Float[Tensor, " heads"]:
        """Its part within rows, each row weighted by the keys it sees."""
        return self._per_pair(self.within)

    @property
    def row_shift(self) -> Float[Tensor, " heads"]:
        """Its part between rows, which softmax cannot see."""
        return self._per_pair(self.between)

    def _per_pair(self, total: Tensor) -> Tensor:
        return torch.where(self.count > 0, total / self.count.clamp(min=1), math.nan)


@dataclass(frozen=True, eq=False)
class HeadStats:
    """Everything known of one attention module's heads.

    measures: by name, see `EDGES`; each with a leading axis of heads (key_norm: of kv heads).
    scaled, raw: all pairs, with and without the scale.
    counts: rows (real ones), and of them empty, nonfinite, single (one visible key); padding rows
        are counted apart and enter nothing.
    scale: smallest and largest factor applied to QKᵀ; d_k; kv_heads.
    """

    kv_heads: int
    d_k: int
    scale: tuple[float, float]
    counts: Mapping[str, Int[Tensor, " heads"]]
    scaled: Pairs
    raw: Pairs
    measures: Mapping[str, Measure]

    @property
    def heads(self) -> int:
        return len(self.counts["rows"])

    @staticmethod
    def identity(heads: int, kv_heads: int, d_k: int) -> HeadStats:
        """The summary of nothing: merging it changes nothing."""
        zero, none = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.int64)
        pairs = Pairs(none, zero, zero, zero)
        scale = (math.inf, -math.inf)
        return HeadStats(kv_heads, d_k, scale, dict.fromkeys(COUNTS, none), pairs, pairs, {})

    @staticmethod
    def of(
        rows: RowStats,
        *,
        scale: float,
        d_k: int,
        kv_heads: int,
        real: Bool[Tensor, "batch queries"] | None = None,
        extra: Mapping[str, Float[Tensor, "batch heads queries"]] | None = None,
        key_norm: Float[Tensor, "batch kv_heads keys"] | None = None,
        names: Sequence[str] | None = None,
    ) -> HeadStats:
        """Summarise the rows of one call, each (batch, heads, queries).

        names: of `ROWS`, these alone; None for all, and normalised_entropy.
        real is False for padding. extra adds measures of the same shape, NaN where a row has none.
        key_norm is ‖k‖, NaN for a key that nobody sees.
        """
        batch, _, queries = rows.visible.shape
        visible = _by_head(rows.visible).numpy()
        padded = np.zeros((1, batch * queries), dtype=bool)
        if real is not None:
            padded = ~real.cpu().numpy().reshape(1, batch * queries)
        bad = _by_head(rows.nonfinite).numpy() & ~padded
        empty, single = (visible == 0) & ~padded, (visible == 1) & ~padded & ~bad
        out = padded | bad | empty
        counts = {
            "rows": ~np.broadcast_to(padded, visible.shape),
            "empty": empty,
            "nonfinite": bad,
            "padding": np.broadcast_to(padded, visible.shape),
            "single": single,
        }
        named = {
            name: _by_head(getattr(rows, name))
            for name in names or ROWS
            if getattr(rows, name) is not None
        }
        if names is None:
            # The sink is an outcome too, and entropy counts it.
            outcomes = np.maximum(visible, 1) + float(rows.sink_mass is not None)
            named["normalised_entropy"] = named["entropy"] / torch.from_numpy(np.log(outcomes))
        named |= {name: _by_head(x) for name, x in (extra or {}).items()}
        hidden = {False: out, True: out | single}
        any_hidden = {two: bool(where.any()) for two, where in hidden.items()}
        values = {}
        for name, x in named.items():
            of = x.numpy()
            two = name in TWO_KEYS
            values[name] = np.where(hidden[two], math.nan, of) if any_hidden[two] else of
        apart: dict[str, np.ndarray] = {}
        if key_norm is not None:
            norms = _by_head(key_norm).numpy()
            # A sum of few rows costs its calls: as many keys as queries go with them.
            (values if norms.shape == visible.shape else apart)["key_norm"] = norms
        measures = _summed(values) | _summed(apart)
        counted = torch.from_numpy(np.where(out, 0, visible))
        scaled = Pairs.of(counted, _by_head(rows.score_mean), _by_head(rows.score_var))
        return HeadStats(
            kv_heads,
            d_k,
            (scale, scale),
            {name: torch.from_numpy(np.count_nonzero(x, axis=1)) for name, x in counts.items()},
            scaled,
            scaled.times(1 / scale if scale else math.nan),
            measures,
        )

    def share_at_least(self, name: str, edge: float) -> Float[Tensor, " heads"]:
        """Share of a measure's rows at or above one of its edges, exactly; NaN for no rows.

        Raises: ValueError if `edge` is not one of `EDGES[name]`.
        """
        wanted = torch.tensor(edge, dtype=torch.float64)
        at = torch.isclose(EDGES[name], wanted, rtol=1e-12, atol=0).nonzero()
        if len(at) != 1:
            raise ValueError(f"{edge:g} is not an edge of {name}: only there is a share exact")
        m = self.measures[name]
        above = m.histogram[:, int(at) + 1 :].sum(1).to(torch.float64)
        return torch.where(m.count > 0, above / m.count.clamp(min=1), math.nan)

    def quantile(
        self, name: str, q: float
    ) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
        """(estimate, half-width): a measure's quantile over rows, from its histogram.

        The true quantile lies within estimate ± half-width, half the bin it falls in, cut to the
        exact extremes. NaN for no rows.
        """
        m = self.measures[name]
        edges = EDGES[name]
        # q·count may round up past a whole number, as 0.7·10 does.
        rank = (q * m.count.to(torch.float64) * (1 - 1e-12)).ceil().clamp(min=1)
        bins = (m.histogram.cumsum(1) < rank[:, None]).sum(1)
        low = torch.cat([edges.new_full((1,), -math.inf), edges])[bins.clamp(max=len(edges))]
        high = torch.cat([edges, edges.new_full((1,), math.inf)])[bins.clamp(max=len(edges))]
        low, high = torch.maximum(low, m.minimum), torch.minimum(high, m.maximum)
        middle, half = (low + high) / 2, (high - low) / 2
        there = m.count > 0
        return torch.where(there, middle, math.nan), torch.where(there, half, math.nan)

    @property
    def score_bound(self) -> Float[Tensor, " heads"]:
        """max‖q‖·max‖k‖: no raw score ⟨q,k⟩ of either sign, masked or not, is larger in size."""
        q, k = self.measures["query_norm"].maximum, self.measures["key_norm"].maximum
        return q * k.repeat_interleave(len(q) // len(k))


@dataclass(frozen=True, eq=False)
class Transmission:
    """How much of the output's gradient the rows of each head pass on to its scores.

    Relative to equal weights: 1 as they do, 0 dead, at most half the visible keys. median, p10: of
    rows, each with the half-width of its histogram bin. rms: root of the mean square. dead: share
    of rows below `DEAD`, exactly. All four, because they part: a few rows may carry all of the
    mean square while the typical one passes nothing. NaN for no rows.
    """

    median: Float[Tensor, " heads"]
    median_error: Float[Tensor, " heads"]
    p10: Float[Tensor, " heads"]
    p10_error: Float[Tensor, " heads"]
    rms: Float[Tensor, " heads"]
    dead: Float[Tensor, " heads"]


def transmission_of(stats: HeadStats) -> Transmission | None:
    """A module's gradient health; None where no backward was observed.

    Source: docs/maths.md#gradients.

    >>> transmission_of(HeadStats.identity(heads=2, kv_heads=1, d_k=8)) is None
    True
    """
    measure = stats.measures.get("transmission")
    if measure is None:
        return None
    return Transmission(
        *stats.quantile("transmission", 0.5),
        *stats.quantile("transmission", 0.1),
        (measure.average.square() + measure.var).sqrt(),
        1 - stats.share_at_least("transmission", DEAD),
    )


def joined(
    stats: HeadStats,
    rows: Mapping[str, Float[Tensor, "batch heads queries"]],
    real: Bool[Tensor, "batch queries"] | None,
) -> HeadStats:
    """stats with row measures added that came later; NaN where a row has none, real as in `of`."""
    measures = {}
    for name, x in rows.items():
        x = x if real is None else x.masked_fill(~real[:, None], math.nan)
        measures[name] = Measure.of(name, _by_head(x))
    nothing = HeadStats.identity(stats.heads, stats.kv_heads, stats.d_k)
    return merge(stats, replace(nothing, measures=measures))


def _by_head(x: Tensor) -> Tensor:
    """(batch, heads, rows) as (heads, batch · rows), on the CPU."""
    return x.detach().transpose(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2]).cpu()


def merge(a: HeadStats, b: HeadStats) -> HeadStats:
    """The summary of both. Raises ValueError if they are of different heads."""
    for name in ("heads", "kv_heads", "d_k"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            raise ValueError(f"cannot merge: {name} is {one} in one, {other} in the other")
    names = [*a.measures, *(n for n in b.measures if n not in a.measures)]
    return HeadStats(
        a.kv_heads,
        a.d_k,
        (min(a.scale[0], b.scale[0]), max(a.scale[1], b.scale[1])),
        {name: a.counts[name] + b.counts[name] for name in COUNTS},
        _merge_pairs(a.scaled, b.scaled),
        _merge_pairs(a.raw, b.raw),
        {name: _merge_measure(a.measures.get(name), b.measures.get(name)) for name in names},
    )


def _merge_measure(a: Measure | None, b: Measure | None) -> Measure:
    if a is None or b is None:
        both = a or b
        assert both is not None
        return both
    count = a.count + b.count
    weight = b.count.double() / count.clamp(min=1)
    gap = b.mean - a.mean
    return Measure(
        count,
        a.mean + gap * weight,
        a.m2 + b.m2 + gap.square() * a.count * weight,
        torch.minimum(a.minimum, b.minimum),
        torch.maximum(a.maximum, b.maximum),
        a.histogram + b.histogram,
    )


def _merge_pairs(a: Pairs, b: Pairs) -> Pairs:
    count = a.count + b.count
    weight = b.count.double() / count.clamp(min=1)
    gap = b.mean - a.mean
    return Pairs(
        count,
        a.mean + gap * weight,
        a.within + b.within,
        a.between + b.between + gap.square() * a.count * weight,
    )


def packed(
    modules: Mapping[str, HeadStats],
    also: Mapping[str, Tensor] | None = None,
    meta: Mapping[str, str] | None = None,
) -> bytes:
    """The statistics of several modules as the bytes of a safetensors file, which may hold other
    tensors and metadata also."""
    from safetensors.torch import save as dump

    tensors: dict[str, Tensor] = dict(also or {})
    about = {}
    for module, s in modules.items():
        about[module] = {"kv_heads": s.kv_heads, "d_k": s.d_k, "scale": [repr(x) for x in s.scale]}
        for name, x in s.counts.items():
            tensors[f"{module}|counts|{name}"] = x
        for kind, pairs in (("scaled", s.scaled), ("raw", s.raw)):
            for name, x in vars(pairs).items():
                tensors[f"{module}|{kind}|{name}"] = x
        for measure, m in s.measures.items():
            for name, x in vars(m).items():
                tensors[f"{module}|measure|{measure}|{name}"] = x
    # safetensors wants memory of its own for each tensor.
    tensors = {name: x.clone().contiguous() for name, x in tensors.items()}
    return dump(tensors, {"format": FORMAT, "modules": json.dumps(about), **(meta or {})})


def parsed(data: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file. Raises: ScaledotError where it is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load as parse

    try:
        tensors = parse(data)
        size = int.from_bytes(data[:8], "little")
        return tensors, json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError) as error:
        raise ScaledotError(f"cannot read {name}: {error}") from None


def unpacked(data: bytes, name: str = "this") -> dict[str, HeadStats]:
    """What `packed` packed, bit for bit; `name` is what errors call it.

    Raises: ScaledotError for anything else.
    """
    return modules_of(*parsed(data, name), name)


def modules_of(
    tensors: Mapping[str, Tensor], meta: Mapping[str, str], name: str
) -> dict[str, HeadStats]:
    """`unpacked` of what `parsed` gave. Raises: ScaledotError where it is something else."""
    if meta.get("format") != FORMAT:
        raise ScaledotError(f"{name} holds no head statistics of this version")
    of: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        module, bar, rest = key.partition("|")
        if bar:  # or it is something that came also
            of.setdefault(module, {})[rest] = x
    try:
        return {
            module: _module(about, of.get(module, {}))
            for module, about in json.loads(meta["modules"]).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ScaledotError(f"{name} is damaged: some of its head statistics are missing") from None


def save(path: str | os.PathLike[str], modules: Mapping[str, HeadStats]) -> None:
    """Write the statistics of several modules to a safetensors file, whole or not at all."""
    write(path, packed(modules))


def load(path: str | os.PathLike[str]) -> dict[str, HeadStats]:
    """Read what `save` wrote, bit for bit. Raises ScaledotError for anything else."""
    return unpacked(read(path), os.fspath(path))


def _module(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HeadStats:
    parts: dict[str, dict[str, Tensor]] = {"counts": {}, "scaled": {}, "raw": {}}
    measures: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        *kind, name = key.split("|")
        if kind[0] == "measure":
            measures.setdefault(kind[1], {})[name] = x
        else:
            parts[kind[0]][name] = x
    low, high = map(float, about["scale"])
    return HeadStats(
        about["kv_heads"],
        about["d_k"],
        (low, high),
        {name: parts["counts"][name] for name in COUNTS},
        Pairs(**parts["scaled"]),
        Pairs(**parts["raw"]),
        {name: Measure(**measures[name]) for name in sorted(measures)},
    )

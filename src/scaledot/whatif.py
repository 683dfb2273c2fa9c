"""What would another scale do? Every head's entropy and saturation as functions of the scale.

One more pass over q and k gives each row at octaves of the scale that was applied: the scores are
formed once, and e^(2βz) is the square of e^(βz). `sweep` gives the rows, which `HeadStats` sums up
like any other measure; `table` reads one head's curve from there.
Formulas and what may be concluded: docs/maths.md#what-if.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scaledot import operators
from scaledot.checks import Problem
from scaledot.heads import SATURATED, SWEPT, HeadStats
from scaledot.kernels import Terms
from scaledot.masks import Visibility
from scaledot.rows import RowStats

CAVEAT = (
    "This holds for fixed q and k only: a model trained at another scale would have other q and k."
)
FACTORS = tuple(2.0**e for e in range(-3, 4))
"""Multiples of the applied scale that are always swept: about 1/√d_k, "none" (√d_k) and 1/d_k
(1/√d_k) lie among them up to d_k 64."""
SHARP = math.log(9)
"""top_margin in nats from which the heaviest weight is .9 or more."""
COLLAPSED = 0.1
"""Normalised entropy below this leaves no choice of keys to speak of."""


def exponents(d_k: int, scale: float) -> range:
    """The octaves that `sweep` looks at: those of `FACTORS`, more where a usual scale lies outside.

    A head without a scale has 1/d_k at 2⁻⁶ for d_k 64. Never beyond `heads.SWEPT`.
    """
    low, high = (round(math.log2(x)) for x in (FACTORS[0], FACTORS[-1]))
    for factor in _marks(d_k, scale).values():
        low, high = min(low, math.floor(math.log2(factor))), max(high, math.ceil(math.log2(factor)))
    return range(max(low, SWEPT.start), min(high + 1, SWEPT.stop))


def _marks(d_k: int, scale: float) -> dict[str, float]:
    if not scale:
        return {}
    usual = {"none": 1.0, "1/√d_k": d_k**-0.5, "1/d_k": 1 / d_k}
    return {name: value / abs(scale) for name, value in usual.items()}


def sweep(
    problem: Problem,
    seen: Visibility,
    rows: RowStats,
    known: Mapping[int, RowStats] | None = None,
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """What every row would be at octaves of the applied scale, as row measures.

    "whatif.entropy.e", "whatif.normalised_entropy.e" and "whatif.top_margin.e" for each e of
    `exponents`, at the scale · 2^e; e = 0 is `rows` itself. Nats, shares and nats as in `RowStats`;
    the sink counts as an outcome, as there. NaN for empty and non-finite rows, and but for entropy
    for rows that see one key. It holds for fixed q and k only. known: rows of octaves that another
    pass has found.

    The factor multiplies ⟨q,k⟩·scale before any soft-cap; sinks and additive masks stay as they
    are. Exact in every case. Cost: two statistics-only passes of the kernel of `rows` (one takes 4
    doublings), up to four where a usual scale lies far away; with a soft-cap or an additive mask,
    which do not grow with the scale, the native kernel runs once an octave. Memory O(n).

    Merges over rows, batches and texts as `HeadStats` does, at one scale.
    Source: docs/maths.md#what-if.

    >>> q, k = torch.randn(2, 1, 4, 8, 16).unbind()
    >>> problem = checks.problem(q, k, None)
    >>> found = sweep(problem, masks.resolve(problem), row_stats(q, k))
    >>> found["whatif.entropy.-3"].shape
    torch.Size([1, 4, 8])
    """
    return _sweep(problem, seen, rows, None, known or {})[0]


def sweep_and_weigh(
    problem: Problem,
    seen: Visibility,
    rows: RowStats,
    columns: Float[Tensor, "#batch kv_or_1 keys c"],
) -> tuple[dict[str, Float[Tensor, "batch heads queries"]], Float[Tensor, "batch heads queries c"]]:
    """(`sweep`, `roles.weighted` of these columns), in the passes of the first alone."""
    found, means = _sweep(problem, seen, rows, columns, {})
    assert means is not None  # there are columns
    return found, means


@torch.no_grad()
def _sweep(
    problem: Problem, seen: Visibility, rows: RowStats, columns: Tensor | None,
    known: Mapping[int, RowStats],
) -> tuple[dict[str, Tensor], Tensor | None]:  # fmt: skip
    octaves = exponents(problem.query.shape[-1], problem.scale)
    # At e = 0 the rows are known, and only formed again where columns ride along.
    wanted = [e for e in octaves if e not in known and (e or columns is not None)]
    terms = Terms(problem.scale, problem.softcap, problem.sinks, 0.0, 0)
    value = None
    if columns is not None:
        value = columns.expand(*problem.key.shape[:3], columns.shape[3])
    with torch.autocast(problem.query.device.type, enabled=False):
        swept, means = operators.implementation(rows.kernel).sweep(
            problem.query, problem.key, seen, terms, [2.0**e for e in wanted], value
        )
    at_octave = {**known, **dict(zip(wanted, swept, strict=True)), 0: rows}
    result = {}
    for e in octaves:
        at = at_octave[e]
        choice = at.visible > 1
        outcomes = at.visible.clamp(min=1).to(at.entropy.dtype) + (at.sink_mass is not None)
        normalised = torch.where(choice, at.entropy / outcomes.log(), math.nan)
        result[f"whatif.entropy.{e}"] = at.entropy
        result[f"whatif.normalised_entropy.{e}"] = normalised
        result[f"whatif.top_margin.{e}"] = torch.where(choice, at.top_margin, math.nan)
    return result, means


@dataclass(frozen=True)
class WhatIf:
    """One head's rows as functions of the scale, for the q and k that it has; NaN for no rows.

    Sequences have an entry for each of factors, octaves in rising order:
      factors             multiples of the applied scale
      scales              what would be applied, factor · scale; NaN where calls had several
      entropy             mean over rows, nats          keys   exp of it, effective keys
      normalised_entropy  mean over rows of H ÷ ln(outcomes), 0 … 1
      saturated           share of rows whose heaviest weight bfloat16 stores as 1
      margin              median top_margin, nats, ± margin_error
      headroom            6.24 − margin: nats left before the median row saturates bfloat16
    marks: the factor at which no scale, 1/√d_k or 1/d_k would be applied; between octaves mostly,
    and empty where calls had several scales.
    largest: the largest factor at which the median heaviest weight is below .9, ± largest_error
    octaves from the histogram's bins; linear in log₂ between octaves. inf if every swept factor
    stays below, 0 if none does. largest_by_entropy: likewise while normalised entropy is ≥ .1.
    """

    head: int
    factors: tuple[float, ...]
    scales: tuple[float, ...]
    entropy: tuple[float, ...]
    keys: tuple[float, ...]
    normalised_entropy: tuple[float, ...]
    saturated: tuple[float, ...]
    margin: tuple[float, ...]
    margin_error: tuple[float, ...]
    headroom: tuple[float, ...]
    marks: dict[str, float]
    largest: float
    largest_error: float
    largest_by_entropy: float


def table(stats: HeadStats, head: int) -> WhatIf:
    """One head's curve from what `sweep` added to its statistics. See `WhatIf`, `CAVEAT`.

    It holds for fixed q and k only: a model trained at another scale would have other q and k.

    Raises: ValueError if the statistics hold no sweep, IndexError for a head that is not there.
    Source: docs/maths.md#what-if.
    """
    if not 0 <= head < stats.heads:
        raise IndexError(f"head {head} of {stats.heads} does not exist")
    swept = [e for e in SWEPT if f"whatif.entropy.{e}" in stats.measures]
    if not swept:
        raise ValueError("these statistics hold no sweep of the scale: add those of whatif.sweep")

    def mean(name: str) -> tuple[float, ...]:
        measures = (stats.measures[f"whatif.{name}.{e}"] for e in swept)
        return tuple(m.of_head(head) for m in measures)

    margins = [f"whatif.top_margin.{e}" for e in swept]
    medians = [stats.quantile(name, 0.5) for name in margins]
    margin = tuple(float(middle[head]) for middle, _ in medians)
    error = tuple(float(half[head]) for _, half in medians)
    shares = (stats.share_at_least(name, SATURATED["bfloat16"]) for name in margins)
    low, high = stats.scale
    scale = low if low == high else math.nan
    entropy, normalised = mean("entropy"), mean("normalised_entropy")
    early, largest, late = (
        _crossing(swept, [SHARP - m + sign * half for m, half in zip(margin, error, strict=True)])
        for sign in (-1, 0, 1)
    )
    inside = 0 < largest < math.inf
    return WhatIf(
        head,
        factors=tuple(2.0**e for e in swept),
        scales=tuple(scale * 2.0**e for e in swept),
        entropy=entropy,
        keys=tuple(math.exp(nats) for nats in entropy),
        normalised_entropy=normalised,
        saturated=tuple(float(share[head]) for share in shares),
        margin=margin,
        margin_error=error,
        headroom=tuple(SATURATED["bfloat16"] - m for m in margin),
        marks=_marks(stats.d_k, scale) if math.isfinite(scale) else {},
        largest=largest,
        largest_error=_octaves(early, late) / 2 if inside else math.nan,
        largest_by_entropy=_crossing(swept, [h - COLLAPSED for h in normalised]),
    )


def _octaves(early: float, late: float) -> float:
    return math.log2(late / early) if early > 0 else math.inf


def _crossing(octaves: Sequence[int], room: Sequence[float]) -> float:
    """The largest factor with room left, linear in log₂ between octaves; inf, 0 or NaN as there."""
    if any(math.isnan(x) for x in room):
        return math.nan
    last = max((i for i, x in enumerate(room) if x > 0), default=-1)
    if last < 0:
        return 0.0
    if last == len(octaves) - 1:
        return math.inf
    part = room[last] / (room[last] - room[last + 1])
    return float(2 ** (octaves[last] + part * (octaves[last + 1] - octaves[last])))

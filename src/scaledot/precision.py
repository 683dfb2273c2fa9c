"""What low precision costs a row: scores stored in bfloat16, and the nats left to a dtype's limit.

Rounding moves a score by up to half the spacing of bfloat16 at its size, and the size of scores is
mostly what softmax cannot see: their common part. Centring K takes it away for nothing.
Derivations and errors: docs/maths.md#precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scaledot.checks import Problem
from scaledot.heads import SATURATED, HeadStats
from scaledot.masks import Visibility
from scaledot.rows import RowStats

FLOAT16_MAX = 65504.0
"""The largest number of float16."""


def storage(
    problem: Problem, seen: Visibility, rows: RowStats
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """What storing scores in bfloat16 would cost each row, as row measures.

    "bf16_cost": the expected total-variation distance, 0 … 1, between the row's weights and those
    of its scores rounded to bfloat16 (8 bits of significand) before softmax.
    "bf16_cost_centred": the same had K been centred, k_j − k̄ with k̄ the mean real key: the same
    weights, smaller scores. NaN with a soft-cap, which is not blind to a shift.

    (1 − Σp²)·u·(3 + min(1, 2Σp²))/24, u the spacing at the size of the row's scores,
    √(m² + variance/4), m = lse − entropy their weighted mean: exact for two keys and for many equal
    ones of one size.
    With a sink, of the weights among keys, NaN where it holds nearly all. A row that sees one key
    has cost 0; NaN for empty and non-finite rows. Flash kernels keep scores in float32: there it is
    what eager would cost.

    Error: a head's mean over rows within a factor of 2 of real rounding, and most within 1.3
    (tests/test_precision.py, tests/test_real_figures.py); one row's is as uncertain as its
    rounding, which may be anything up to half a spacing. It overstates where most scores are equal,
    as at a soft-cap that they reach, and round alike.
    Cost O(n·d). Merges as `HeadStats` does. Source: docs/maths.md#precision.

    >>> q, k = torch.randn(2, 1, 4, 8, 16).unbind()
    >>> problem = checks.problem(q, k, None)
    >>> storage(problem, masks.resolve(problem), row_stats(q, k))["bf16_cost"].shape
    torch.Size([1, 4, 8])
    """
    mean, collision, change = rows.lse - rows.entropy, rows.collision, rows.jacobian_trace
    if problem.sinks is not None and rows.sink_mass is not None:
        sink = rows.sink_mass
        # What is left cancels as the sink takes all: below this it is not known.
        left = torch.where(1 - sink > 1e4 * torch.finfo(sink.dtype).eps, 1 - sink, math.nan)
        logit = problem.sinks.to(mean.dtype)[:, None]
        # A sink of −∞ is none, and 0·∞ no number.
        mean = (mean - torch.where(sink > 0, sink * logit, 0.0)) / left
        collision = ((collision - sink.square()) / left.square()).clamp(0, 1)
        change = ((change - 2 * sink * left) / left.square()).clamp(min=0)
    change = change * (3 + (2 * collision).clamp(max=1)) / 24
    variance = rows.score_var
    if problem.softcap is not None:
        variance = variance.clamp(max=problem.softcap**2)
    result = {"bf16_cost": _cost(mean, variance, change)}
    if problem.softcap is not None:
        result["bf16_cost_centred"] = torch.full_like(mean, math.nan)
    else:
        common = _common(problem, seen).to(mean.dtype)
        result["bf16_cost_centred"] = _cost(mean - common, variance, change)
    return result


def _cost(mean: Tensor, variance: Tensor, change: Tensor) -> Tensor:
    size = (mean.square() + variance / 4).sqrt()
    # frexp: size = f·2ᵉ with f from ½ to 1, so the spacing is 2^(e − 8)
    spacing = torch.ldexp(torch.ones_like(size), size.nan_to_num().frexp().exponent - 8)
    spacing = torch.where(size == 0, 0.0, spacing)  # 0 is stored as it is
    return torch.where(size.isnan(), math.nan, (spacing * change).clamp(max=1.0))


def _common(problem: Problem, seen: Visibility) -> Float[Tensor, "batch heads queries"]:
    """α⟨q_i, k̄⟩, what centring K takes from every score of a row."""
    key, dtype = problem.key, torch.promote_types(problem.key.dtype, torch.float32)
    real = key.isfinite().all(-1, keepdim=True)
    if seen.keep is not None:
        real = real & seen.keep[:, None, :, None]
    count = real.sum(2, keepdim=True).clamp(min=1)
    mean = torch.where(real, key, 0.0).sum(2, keepdim=True, dtype=dtype) / count
    query = problem.query.unflatten(1, (key.shape[1], -1)) if key.shape[1] else problem.query
    with torch.autocast(query.device.type, enabled=False):
        product = query.to(dtype) @ mean[:, :, None].mT
    return problem.scale * product[..., 0].flatten(1, 2)


@dataclass(frozen=True)
class Headroom:
    """How far one head is from what a dtype can hold; NaN for no rows.

    nats: {dtype: (at the median row, at the 99th percentile)}, the limit in `SATURATED` less the
    row's top_margin: what scores may still grow, as a log-odds, before the heaviest weight is
    stored as 1. Below 0 it is. error: half-widths of the two quantiles, nats.
    largest: the largest raw score ⟨q,k⟩ of a visible pair; exact, of the positive side.
    bound: max‖q‖·max‖k‖, which no raw score of either sign passes. Above 65,504 float16 overflows
    before any scaling; overflows says that it does, may_overflow that it cannot be excluded.
    """

    nats: dict[str, tuple[float, float]]
    error: tuple[float, float]
    largest: float
    bound: float

    @property
    def overflows(self) -> bool:
        return self.largest > FLOAT16_MAX

    @property
    def may_overflow(self) -> bool:
        return self.bound > FLOAT16_MAX


def headroom(stats: HeadStats, head: int) -> Headroom:
    """Nats that a head has left in bfloat16, float16 and float32, and its largest raw scores.

    largest is NaN where calls had several scales or one that is not positive; bound needs the
    measures query_norm and key_norm. See `Headroom`.

    Raises: IndexError for a head that is not there. Source: docs/maths.md#saturation.
    """
    if not 0 <= head < stats.heads:
        raise IndexError(f"head {head} of {stats.heads} does not exist")
    (median, half), (high, high_half) = (
        (float(x[head]) for x in stats.quantile("top_margin", q)) for q in (0.5, 0.99)
    )
    low, scale = stats.scale
    top = float(stats.measures["max_score"].maximum[head])
    known = low == scale > 0 and math.isfinite(top)
    bound = float(stats.score_bound[head]) if "key_norm" in stats.measures else math.nan
    return Headroom(
        {name: (limit - median, limit - high) for name, limit in SATURATED.items()},
        (half, high_half),
        top / scale if known else math.nan,
        bound if math.isfinite(bound) else math.nan,
    )

"""What a row could pass back to q and k, from a forward pass alone: the spread of attended values.

For an incoming gradient dO ~ N(0, I), the mean of Var_p(dP) over dO is E_p‖v‖² − ‖o‖²: a head whose
attended values coincide passes nothing back, however soft its weights are. One more column of V
gives E_p‖v‖². Both terms can be far larger than their difference, so values are taken from a common
centre. Derivation: docs/maths.md#value-spread.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from scaledot.checks import Problem
from scaledot.masks import Visibility
from scaledot.moments import row_spread
from scaledot.rows import RowStats


def centre(problem: Problem, seen: Visibility) -> Float[Tensor, "batch kv_heads 1 value_dim"]:
    """The mean real value of each kv head, in float32 or better: what `value_spread` subtracts."""
    assert problem.value is not None
    real = problem.value.isfinite().all(-1, keepdim=True)
    if seen.keep is not None:
        real = real & seen.keep[:, None, :, None]
    dtype = torch.promote_types(problem.value.dtype, torch.float32)
    total = torch.where(real, problem.value, 0.0).sum(2, keepdim=True, dtype=dtype)
    return total / real.sum(2, keepdim=True).clamp(min=1)


def squares(problem: Problem, middle: Tensor) -> Float[Tensor, "batch kv_heads keys"]:
    """‖v_j − centre‖², the column of V whose attention-weighted mean is the second moment."""
    assert problem.value is not None
    return (problem.value.to(middle.dtype) - middle).square().sum(-1)


def value_spread(
    problem: Problem,
    seen: Visibility,
    rows: RowStats,
    output: Float[Tensor, "batch heads queries value_dim"],
    second_moment: Float[Tensor, "batch heads queries"],
    middle: Float[Tensor, "batch kv_heads 1 value_dim"],
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """How far the values that a row attends to lie apart, as row measures.

    "value_spread": E_p‖v − o‖², in units of v². A sink counts as one more value, 0.
    "relative_value_spread": divided by what equal weights over the row's visible keys would give: 1
    for uniform attention, 0 for one key or equal values, above 1 where it attends to outliers.
    NaN where those values do not differ by more than rounding (one visible key).

    output is the row's output before any rounding to bfloat16; second_moment the attention-weighted
    mean of `squares(problem, middle)`, one more column of V; middle is `centre(problem, seen)`.
    NaN for empty and non-finite rows. Cost O(n·d_v), but n²·d_v under a mask that is a tensor of no
    known form. Merges as `HeadStats` does.

    Error: relative to ‖o − centre‖², of which it is a difference, a few roundings.
    Source: docs/maths.md#value-spread.

    >>> q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()
    >>> p = checks.problem(q, k, v)
    >>> seen, out, rows = masks.resolve(p), *attention(q, k, v, return_stats=True)
    >>> second = attention(q, k, squares(p, centre(p, seen))[..., None])[..., 0]
    >>> value_spread(p, seen, rows, out, second, centre(p, seen))["value_spread"].shape
    torch.Size([1, 4, 8])
    """
    group = problem.group
    own = middle.repeat_interleave(group, 1)
    found = second_moment - (output.to(middle.dtype) - own).square().sum(-1)
    if rows.sink_mass is not None:
        found = found + rows.sink_mass * own.square().sum(-1)
    nothing = rows.empty | rows.nonfinite
    found = torch.where(nothing, math.nan, found.clamp(min=0))
    assert problem.value is not None
    uniform = row_spread(problem.value, seen).to(found.dtype)
    # Equal values leave rounding, on either side.
    rounding = 8 * torch.finfo(found.dtype).eps * second_moment
    alike = (uniform <= rounding) | (rows.visible < 2)
    return {
        "value_spread": found,
        "relative_value_spread": torch.where(alike, math.nan, found / uniform),
    }

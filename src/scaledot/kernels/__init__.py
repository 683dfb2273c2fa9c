"""What a kernel is: `forward` and `backward` of one attention, each in a module of its own.

A kernel imports rows and masks, never another kernel; dispatch.py picks one and ties it to
autograd, operators.py to torch.compile.

    forward(query, key, value, seen, terms, *, statistics=True) → (output, rows, top, log_mass)

query (batch, heads, queries, dim), key (batch, kv_heads, keys, dim), value (batch, kv_heads, keys,
value_dim) or None for statistics alone: any strides, grouped heads un-repeated. seen: what each
query may see (masks.py). output: (batch, heads, queries, value_dim) in the accumulator's dtype,
None without a value, the same to the bit with and without `statistics`. rows: `RowStats`; without
`statistics` only visible, lse and nonfinite need be right. top, log_mass: (batch, heads, queries),
for `backward`: the weight of a key is exp(logit − top − log_mass).

    output(query, key, value, seen, terms) → output alone, where nobody asks for more

    sweep(query, key, seen, terms, factors, value=None) → (rows at scale·factor, for each factor;
                                                           output at the scale itself, or None)

    backward(query, key, value, seen, terms, top, log_mass, entropy, counted, out,
             d_out, d_lse, d_entropy, bias_gradient, rows=False) → Gradients

entropy, out: from `forward`. counted: False for empty rows, whose lse and entropy pass nothing.
d_out, d_lse, d_entropy: None for zero. bias_gradient: whether the additive mask wants one. rows:
whether to sum up what each row passes on, too (`RowGradients`); the gradients are the same bits
with and without. `fold` and `row_gradients` are the parts that every kernel shares.

native also says, in one line, why it cannot compute something: `reason`, and `available`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scaledot.rows import EXP_ZERO


@dataclass(frozen=True)
class Terms:
    """What turns ⟨q,k⟩ into weights, beside the mask."""

    scale: float
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    dropout_p: float
    seed: int


@dataclass(frozen=True)
class Gradients:
    """Gradients of the inputs, in the accumulator's dtype; bias and sinks only where asked."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    rows: RowGradients | None


@dataclass(frozen=True)
class RowGradients:
    """What each row passes on of the output's gradient; every tensor is (batch, heads, queries).

    dS is the gradient with respect to what enters softmax that comes from d_out alone, dP the one
    with respect to the weights (with dropout's factors, where there is dropout). A sink is one more
    outcome, of dP 0.
      norm          ‖dS_i‖, ≥ 0
      variance      Σ dS_ij·dP_ij = Var_p(dP_i), ≥ 0
      transmission  n_i·‖dS_i‖ ÷ √Σ(dP_ij − mean)²: 0 dead, 1 for equal weights, at most n_i/2
    NaN for empty rows and for those that hold a NaN; transmission also where fewer than two keys
    are visible, and where dP is the same for all of them to rounding (dO = 0, equal values).
    Source: docs/maths.md#gradients.
    """

    norm: Float[Tensor, "batch heads queries"]
    variance: Float[Tensor, "batch heads queries"]
    transmission: Float[Tensor, "batch heads queries"]


@dataclass(frozen=True)
class Folded:
    """dS = p·(dP − level − d_entropy·ln p), row by row; delta: level of d_out's part alone.

    d_entropy: None for zero. log_sink: ln p of the sink, where there is one.
    """

    delta: Tensor
    level: Tensor
    d_entropy: Tensor | None
    log_sink: Tensor | None
    d_sinks: Tensor | None


def fold(
    terms: Terms, top: Tensor, log_mass: Tensor, entropy: Tensor, counted: Tensor, out: Tensor,
    d_out: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None,
) -> Folded:  # fmt: skip
    """The gradients of output, lse and entropy as row constants; and the sinks' own gradient."""
    level = delta = (d_out * out).sum(-1)
    if d_lse is not None:
        level = level - torch.where(counted, d_lse.to(out.dtype), 0.0)
    if d_entropy is not None:
        d_entropy = torch.where(counted, d_entropy.to(out.dtype), 0.0)
        level = level + torch.where(counted, d_entropy * entropy, 0.0)
    log_sink = d_sinks = None
    if terms.sinks is not None:
        log_sink = terms.sinks.to(out.dtype)[:, None] - torch.where(top == -math.inf, 0.0, top)
        log_sink = log_sink - log_mass
        slope = -level
        if d_entropy is not None:
            slope = slope - d_entropy * log_sink.clamp(min=EXP_ZERO)
        d_sinks = torch.where(counted, log_sink.exp() * slope, 0.0).sum((0, 2))
    return Folded(delta, level, d_entropy, log_sink, d_sinks)


HEAVY = 0.75
"""A weight above this is its row's only one. Its dS would be the difference of nearly equal terms;
it is minus the sum of the others' instead. The limit that the weights, computed again, are held
against is 0.5: while logits stay below 1e6 no rounding takes one from side to side."""

SUMS = ("number", "mean", "spread", "total", "squares", "moment")
"""What a kernel adds up of each row, over its visible keys: their number; the mean of t and
Σ(t − mean)², t = unit·(dP − δ); and of x = lift·p·t over the keys whose weight is at most `limit`,
Σx, Σx² and Σx·t."""


def row_constants(
    folded: Folded, log_mass: Tensor, d_out: Tensor
) -> Float[Tensor, "4 batch heads queries"]:
    """unit, unit·δ, lift and limit of each row, for `SUMS`.

    unit makes the largest |dO| of a row 1, and lift its light weights: else the squares of small
    gradients and of weights past 43 nats would be 0 in float32.
    """
    largest = d_out.abs().amax(-1)
    unit = torch.where(largest == 0, 1.0, 1 / largest.clamp(min=torch.finfo(d_out.dtype).tiny))
    heavy = (-log_mass).exp() > HEAVY
    lift = torch.where(heavy, -1 / torch.expm1(-log_mass), log_mass.exp())
    limit = torch.where(heavy, 0.5, 2.0)
    return torch.stack([unit, folded.delta * unit, lift.clamp(max=_LIFT), limit])


_LIFT = 1e37
"""Where a float32 ends; what weighs less than its inverse is 0 there."""


def row_gradients(
    sums: Float[Tensor, "6 batch heads queries"],
    constants: Float[Tensor, "4 batch heads queries"],
    folded: Folded,
    log_mass: Tensor,
    counted: Bool[Tensor, "batch heads queries"],
) -> RowGradients:
    """What rows pass on, from their sums."""
    number, mean, spread, total, squares, moment = sums.unbind()
    unit, delta, lift, limit = constants.unbind()
    there = number >= 2
    heavy, largest = limit < 1, (-log_mass).exp()
    if folded.log_sink is not None:
        share = folded.log_sink.exp()
        heaviest = share > HEAVY
        x = torch.where(heaviest, 0.0, lift * share) * -delta
        total, squares, moment = total + x, squares + x.square(), moment - x * delta
        heavy, largest = heavy | heaviest, torch.where(heaviest, share, largest)
        gap = -delta - mean
        spread = spread + gap.square() * number / (number + 1)
        mean, number = mean + gap / (number + 1), number + 1
    own = torch.where(heavy, total, 0.0)
    size = (squares + own.square()).sqrt()
    variance = (moment + own.square() / lift / largest) / lift
    # Where all dP are one number, what is left of them is rounding.
    eps = 8 * torch.finfo(sums.dtype).eps
    told_apart = (spread / number).sqrt() > eps * (mean + delta).abs()

    def defined(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, math.nan)

    return RowGradients(
        defined(size / lift / unit, counted),
        defined(variance / unit.square(), counted),
        defined(number * size / spread.sqrt() / lift, counted & there & told_apart),
    )

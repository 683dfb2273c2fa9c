"""One summary per query: what a row of attention did, without the row.

Softmax over a row is a monoid over blocks of keys: `RowState` is the summary of some keys, `merge`
joins the summaries of two blocks, `RowState.identity` is the summary of none. That is the online
softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) with three differences: the heaviest key is
kept apart from the others' mass, so that 1 − p_max, the entropy and Σp² do not cancel; every sum
that the statistics need rides along; and the mean and variance of the scores merge by Chan,
Golub & LeVeque (1979). `finish` turns a state into `RowStats`. Formulas: docs/maths.md#rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MARGIN_LIMIT = 87.0
"""top_margin is clamped here, about where float32's exp underflows; one visible key gets it too."""

EXP_ZERO = -1000.0
"""exp of this is 0 even in float64. Logarithms stop here, so that what a mask of finfo.min hides,
or a block without keys, gives 0·(a number) and never 0·∞."""


@dataclass(frozen=True, eq=False)
class RowStats:
    """One summary per query; every tensor is (…, heads, queries), float32 or better.

    Of the scaled stage α⟨q,k⟩, over visible keys:
      score_mean, score_var (population), max_score.
    Of what enters softmax (after soft-cap, bias and mask):
      lse            log-sum-exp, nats, with the sink if there is one. Differentiable.
      entropy        −Σ p ln p, nats, 0 … ln(visible). Differentiable.
      top_key        index of the heaviest key, −1 if none; the first of equals.
      top_margin     −ln(mass of all other outcomes ÷ mass of the heaviest key), nats, at most 87.
      collision      Σp², 1/visible … 1.
      jacobian_trace 1 − Σp² = Σp(1−p), 0 … 1, without cancellation.
      mean_key       attention-weighted key position.
      sink_mass      probability of the sink, where there is one; entropy, top_margin, collision
                     and jacobian_trace then count it as one more outcome.
    visible is the number of visible keys. An empty row has visible 0, lse −inf (or the sink) and
    NaN elsewhere. A row with a visible non-finite score is NaN throughout and True in nonfinite.
    kernel names the implementation that ran.

    Source: docs/maths.md#rows.
    """

    visible: Int[Tensor, "*rows"]
    score_mean: Float[Tensor, "*rows"]
    score_var: Float[Tensor, "*rows"]
    max_score: Float[Tensor, "*rows"]
    lse: Float[Tensor, "*rows"]
    entropy: Float[Tensor, "*rows"]
    top_key: Int[Tensor, "*rows"]
    top_margin: Float[Tensor, "*rows"]
    collision: Float[Tensor, "*rows"]
    jacobian_trace: Float[Tensor, "*rows"]
    mean_key: Float[Tensor, "*rows"]
    nonfinite: Bool[Tensor, "*rows"]
    sink_mass: Float[Tensor, "*rows"] | None
    kernel: str

    @property
    def empty(self) -> Bool[Tensor, "*rows"]:
        """Rows that see no key."""
        return self.visible == 0

    def map(self, change) -> RowStats:
        """The same with `change` applied to every tensor (a reshape, an index, a move)."""
        return RowStats(
            **{
                f.name: change(x) if isinstance(x := getattr(self, f.name), Tensor) else x
                for f in fields(self)
            }
        )


@dataclass(frozen=True, eq=False)
class RowState:
    """The summary of some keys of each row; e is exp(logit − top), sums over all keys but `key`.

    top      largest logit, −inf for none       key      its index, −1 for none, the first of equals
    rest     Σ e                                rest_sq  Σ e²
    rest_log Σ e·(logit − top), ≤ 0             rest_pos Σ e·index
    count    visible keys                       peak     largest scaled score
    mean     of the scaled scores               m2       Σ (score − mean)²
    """

    top: Float[Tensor, "*rows"]
    key: Int[Tensor, "*rows"]
    rest: Float[Tensor, "*rows"]
    rest_sq: Float[Tensor, "*rows"]
    rest_log: Float[Tensor, "*rows"]
    rest_pos: Float[Tensor, "*rows"]
    count: Int[Tensor, "*rows"]
    peak: Float[Tensor, "*rows"]
    mean: Float[Tensor, "*rows"]
    m2: Float[Tensor, "*rows"]

    @staticmethod
    def identity(shape: tuple[int, ...], like: Tensor) -> RowState:
        """The summary of no keys: merging it changes nothing."""
        zero = like.new_zeros(shape)
        low = like.new_full(shape, float("-inf"))
        none = torch.full(shape, -1, dtype=torch.int64, device=like.device)
        return RowState(low, none, zero, zero, zero, zero, none + 1, low, zero, zero)

    @staticmethod
    def of(
        scaled: Float[Tensor, "*rows keys"],
        logits: Float[Tensor, "*rows keys"],
        hidden: Bool[Tensor, "*#rows #keys"] | None,
        uncounted: Bool[Tensor, "*#rows #keys"] | None,
        first: int,
    ) -> tuple[RowState, Float[Tensor, "*rows keys"]]:
        """Summarise a block of keys that starts at index `first`; also e with the top key's 1.

        `hidden` keys have logit −inf. `uncounted` (a superset of `hidden`, or None for the same)
        enter no score statistic: a finfo.min mask hides a key without removing it.
        """
        out = hidden if uncounted is None else uncounted
        top, key = logits.max(-1, keepdim=True)
        z = logits - torch.where(top == float("-inf"), 0.0, top)
        if hidden is not None:
            # A hidden key's −inf would make 0·(−inf) below; its e is 0 whatever z is.
            e = z.exp()
            z = z.masked_fill(hidden, 0.0)
        else:
            e = z.exp()
        e = e.scatter(-1, key, 0.0)
        index = torch.arange(first, first + e.shape[-1], device=e.device, dtype=e.dtype)
        if out is None:
            count = torch.full_like(key, e.shape[-1]).squeeze(-1)
            m2, mean = torch.var_mean(scaled, -1, correction=0)
            m2, peak = m2 * e.shape[-1], scaled.amax(-1)
        else:
            out = out.expand_as(scaled)
            count = (~out).sum(-1)
            seen = count.clamp(min=1).to(e.dtype)
            mean = scaled.masked_fill(out, 0.0).sum(-1) / seen
            m2 = (scaled - mean[..., None]).masked_fill(out, 0.0).square().sum(-1)
            peak = scaled.masked_fill(out, float("-inf")).amax(-1)
        none = top.squeeze(-1) == float("-inf")
        state = RowState(
            top.squeeze(-1),
            torch.where(none, -1, key.squeeze(-1) + first),
            e.sum(-1),
            e.square().sum(-1),
            (e * z).sum(-1),
            e @ index,
            count,
            peak,
            mean,
            m2,
        )
        return state, e.scatter(-1, key, torch.where(none, 0.0, 1.0)[..., None].to(e.dtype))


def merge(a: RowState, b: RowState) -> tuple[RowState, Tensor, Tensor]:
    """Join the summaries of two blocks of keys; also the factors that rescale each one's e.

    Associative and commutative up to rounding, with `RowState.identity`; a tie of the largest
    logit goes to the lower index.
    """
    a_first = (a.top > b.top) | ((a.top == b.top) & (b.key < 0)) | (
        (a.top == b.top) & (a.key >= 0) & (a.key < b.key)
    )  # fmt: skip
    # NaN tops lose every comparison; their row is NaN in the end whichever side is kept.
    top = torch.maximum(a.top, b.top)
    base = torch.where(top == float("-inf"), 0.0, top)
    shift_a, shift_b = ((x.top - base).clamp(min=EXP_ZERO) for x in (a, b))
    fa, fb = shift_a.exp(), shift_b.exp()
    # The side that loses the top gives its own top key, mass 1, to the rest.
    own_a = (~a_first & (a.key >= 0)).to(fa.dtype)
    own_b = (a_first & (b.key >= 0)).to(fb.dtype)
    la, lb = a.rest + own_a, b.rest + own_b
    count = a.count + b.count
    weight = b.count.to(fa.dtype) / count.clamp(min=1)
    gap = b.mean - a.mean
    state = RowState(
        top,
        torch.where(a_first, a.key, b.key),
        la * fa + lb * fb,
        (a.rest_sq + own_a) * fa.square() + (b.rest_sq + own_b) * fb.square(),
        fa * (a.rest_log + shift_a * la) + fb * (b.rest_log + shift_b * lb),
        fa * (a.rest_pos + own_a * a.key) + fb * (b.rest_pos + own_b * b.key),
        count,
        torch.maximum(a.peak, b.peak),
        a.mean + gap * weight,
        a.m2 + b.m2 + gap.square() * (a.count * weight),
    )
    return state, fa, fb


def finish(
    state: RowState, sinks: Float[Tensor, "*rows"] | None, kernel: str
) -> tuple[RowStats, Float[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Row statistics from a finished state; also (top, log_mass): p = exp(logit − top − log_mass).

    The state holds no sink; it joins here as one more outcome of logit `sinks`. log_mass is
    ln Σ exp(logit − top), the sink included, 0 for a row without keys (whose top is −inf).
    """
    whole = state
    if sinks is not None:
        zero = torch.zeros_like(state.top)
        nowhere = torch.full_like(state.key, torch.iinfo(torch.int64).max)
        count, low = torch.zeros_like(state.count), torch.full_like(state.top, float("-inf"))
        sinks = sinks.expand_as(state.top)
        sink = RowState(sinks, nowhere, zero, zero, zero, zero, count, low, zero, zero)
        whole, _, _ = merge(state, sink)
    total = 1 + whole.rest
    lse = whole.top + torch.log1p(whole.rest)
    # log_mass is not lse − top, which would round at the size of the logits.
    log_rest, log_mass, log_sink = state.rest.log(), torch.log1p(state.rest), None
    if sinks is not None:
        gap = sinks - state.top
        log_rest, log_mass = torch.logaddexp(log_rest, gap), torch.logaddexp(log_mass, gap)
        log_sink = gap - log_mass
    log_mass = torch.where(state.key < 0, 0.0, log_mass)

    empty = state.count == 0
    bad = ~empty & ~(lse.isfinite() & state.mean.isfinite() & state.peak.isfinite())
    nothing = empty | bad

    def undefined(x: Tensor) -> Tensor:
        return torch.where(nothing, float("nan"), x)

    stats = RowStats(
        visible=state.count.to(torch.int32),
        score_mean=undefined(state.mean),
        score_var=undefined(state.m2 / state.count.clamp(min=1)),
        max_score=undefined(state.peak),
        lse=torch.where(
            empty,
            float("-inf") if sinks is None else sinks,
            torch.where(bad, float("nan"), lse),
        ),
        # Both terms are ≥ 0, so nothing cancels; likewise below.
        entropy=undefined(torch.log1p(whole.rest) - whole.rest_log / total),
        top_key=torch.where(nothing, -1, state.key).to(torch.int32),
        top_margin=undefined((-log_rest).clamp(max=MARGIN_LIMIT)),
        collision=undefined((1 + whole.rest_sq) / total.square()),
        jacobian_trace=undefined(
            (2 * whole.rest + whole.rest.square() - whole.rest_sq) / total.square()
        ),
        mean_key=undefined((state.key + state.rest_pos) / (1 + state.rest)),
        nonfinite=bad,
        sink_mass=None if log_sink is None else undefined(log_sink.exp()),
        kernel=kernel,
    )
    return stats, state.top, log_mass

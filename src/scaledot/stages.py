"""The definition: scaled dot-product attention, one stage after the other.

    scores   S = Q Kᵀ                       raw, ⟨q,k⟩
    scaled   α S                            α = 1/√d_k unless given
    capped   c · tanh(αS / c)               only with a soft-cap
    masked   + bias, −inf where hidden
    weights  softmax over keys              (and the sink, an outcome with no value)
    dropped  weights after dropout          only with dropout
    output   weights · V

Everything n×n is there to be looked at, so this is for small inputs; every kernel is tested against
it, in float64. Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; edge rules are in
docs/maths.md#edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scaledot import checks
from scaledot.masks import Mask, Visibility, resolve
from scaledot.rows import MARGIN_LIMIT, RowStats


@dataclass(frozen=True, eq=False)
class Trace:
    """Every stage of one attention; matrices are (…, heads, queries, keys).

    scores, scaled, capped (None without a soft-cap), masked, weights, dropped (None without
    dropout), output (…, heads, queries, value_dim; None if there was no value). visible is True
    where a query may attend. scale is the factor applied. tokens labels queries and keys. value is
    what was given, None for none.
    """

    query: Float[Tensor, "*batch queries dim"]
    key: Float[Tensor, "*kv_batch keys dim"]
    scores: Float[Tensor, "*batch queries keys"]
    scaled: Float[Tensor, "*batch queries keys"]
    capped: Float[Tensor, "*batch queries keys"] | None
    masked: Float[Tensor, "*batch queries keys"]
    weights: Float[Tensor, "*batch queries keys"]
    dropped: Float[Tensor, "*batch queries keys"] | None
    output: Float[Tensor, "*batch queries value_dim"] | None
    visible: Bool[Tensor, "*batch queries keys"]
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    tokens: tuple[str, ...] | None = None
    value: Float[Tensor, "*kv_batch keys value_dim"] | None = None

    def label(self, tokens: Iterable[str]) -> Trace:
        """The same with a label for each token, shown when it prints. Raises ValueError when the
        number of labels is not the number of keys."""
        tokens = tuple(map(str, tokens))
        if len(tokens) != self.scores.shape[-1]:
            raise ValueError(
                f"tokens has {len(tokens)} labels: expected {self.scores.shape[-1]}, one a key"
            )
        return replace(self, tokens=tokens)

    @property
    def rows(self) -> RowStats:
        """The statistics of every row by their definitions: what each kernel must return."""
        return _rows(self)

    def __repr__(self) -> str:
        if 0 in self.scores.shape[:-2]:
            return f"<Trace of shape {tuple(self.scores.shape)}>"
        from scaledot.document import trace_document
        from scaledot.terminal import trace_text

        return trace_text(trace_document(self))

    def _repr_html_(self) -> str:
        from scaledot.exploring import of_trace

        if (found := of_trace(self)) is not None:
            from scaledot.page_document import frame_document
            from scaledot.report import frame

            return frame(frame_document(*found), "scaledot: the stages of an attention")
        from scaledot.document import trace_document
        from scaledot.terminal import trace_html

        return trace_html(trace_document(self))


def trace(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tokens: Iterable[str] | None = None,
) -> Trace:
    """Every stage of softmax(QKᵀ·scale + mask)·V, in the inputs' own dtype.

    query is (…, heads, queries, d_k), key (…, kv_heads, keys, d_k), value (…, kv_heads, keys,
    d_v) or None; the other parameters are those of `scaledot.attention`. A boolean mask's True
    means "may attend". An empty row has weights and output 0; a row with a visible non-finite
    score is NaN; what is masked out never matters.

    Raises: ValueError and TypeError as `scaledot.attention`, and for a mask whose values say that
    it was meant otherwise: a float mask of 0 and 1, a causal mask inverted.
    Source: Vaswani et al. 2017, section 3.2.1; docs/maths.md#edges.

    >>> q = k = v = torch.eye(2)
    >>> trace(q, k, v, scale=1.0).weights.round(decimals=3)
    tensor([[0.7310, 0.2690],
            [0.2690, 0.7310]])
    """
    p = checks.problem(
        query, key, value, scale=scale, enable_gqa=enable_gqa, softcap=softcap, sinks=sinks
    )
    dropout_p = checks.dropout(dropout_p)
    seen = resolve(p, attn_mask, is_causal, window)
    checks.mask_values(seen.allowed, seen.bias)

    k = p.key.repeat_interleave(p.group, 1)
    v = p.value.repeat_interleave(p.group, 1) if p.value is not None else None
    scores = p.query @ k.mT
    scaled = scores * p.scale
    capped = p.softcap * torch.tanh(scaled / p.softcap) if p.softcap else None
    logits = scaled if capped is None else capped
    visible, attended, bias = _visible(seen, scores.device)
    if bias is not None:
        # What a finfo.min mask hides must not matter, even if it is not a number.
        logits = torch.where(visible | logits.isfinite(), logits, 0.0) + bias
    masked = logits.masked_fill(~(visible | attended), float("-inf"))
    weights = _softmax(masked, attended, p.sinks).to(scores.dtype)
    # A visible score that is not a number spoils its row, even where tanh would tame it.
    bad = (visible & ~scaled.isfinite()).any(-1, keepdim=True)
    weights = torch.where(bad & attended, float("nan"), weights)
    dropped = torch.dropout(weights, dropout_p, train=True) if dropout_p else None
    output = None if v is None else _apply(weights if dropped is None else dropped, v, attended)

    give = p.restore
    result = Trace(
        give(p.query), give(p.key), give(scores), give(scaled),
        None if capped is None else give(capped), give(masked), give(weights),
        None if dropped is None else give(dropped), None if output is None else give(output),
        give(visible), p.scale, p.softcap, p.sinks, None,
        None if p.value is None else give(p.value),
    )  # fmt: skip
    return result if tokens is None else result.label(tokens)


def _visible(seen: Visibility, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """(visible, attended, bias): attended is visible, save in a row that sees nothing: there it is
    what a finfo.min mask hides without removing it, and torch's softmax then attends to."""
    queries, keys = seen.shape[2:]
    hidden, bias = seen.block(0, queries, 0, keys)
    none = torch.zeros((), dtype=torch.bool, device=device)
    kept = ~(none if hidden is None else hidden).expand(seen.shape)
    visible = kept if bias is None else kept & ~(bias <= seen.floor)
    return visible, torch.where(visible.any(-1, keepdim=True), visible, kept), bias


def _softmax(masked: Tensor, attended: Tensor, sinks: Tensor | None) -> Tensor:
    """exp(masked) over its sum along the keys attended to, 0 elsewhere and in an empty row."""
    if masked.shape[-1] == 0:
        return masked
    masked = masked.masked_fill(~attended, float("-inf"))
    top = masked.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(masked.dtype)[:, None, None]
        top = torch.maximum(top, sink)
    e = (masked - torch.where(top == float("-inf"), 0.0, top)).exp()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - top).exp()
    # A row of NaN is NaN where it attends only.
    return (e / torch.where(total == 0, 1.0, total)).masked_fill(~attended, 0.0)


def _apply(weights: Tensor, v: Tensor, attended: Tensor) -> Tensor:
    """weights · V, where a value that is not a number matters only to queries that see its key."""
    finite = v.isfinite()
    output = weights.nan_to_num(nan=0.0) @ torch.where(finite, v, 0.0)
    spoilt = weights.isnan().any(-1, keepdim=True)
    if not finite.all():
        spoilt = spoilt | (attended.to(v.dtype) @ (~finite).to(v.dtype) > 0)
    return torch.where(spoilt, float("nan"), output)


def _rows(t: Trace) -> RowStats:
    """RowStats by definition, from the stages."""
    dtype = torch.promote_types(t.scaled.dtype, torch.float32)
    scaled, masked, visible = t.scaled.to(dtype), t.masked.to(dtype), t.visible
    count = visible.sum(-1)
    if scaled.shape[-1] == 0:
        scaled, masked = (x.new_full((*x.shape[:-1], 1), -math.inf) for x in (scaled, masked))
        visible = torch.zeros_like(scaled, dtype=torch.bool)
    sink = None
    if t.sinks is not None:
        sink = t.sinks.to(dtype).view(-1, *(1,) * min(scaled.dim() - 1, 2))
        sink = sink.expand(*scaled.shape[:-1], 1)
    empty = count == 0
    bad = (visible & ~(scaled.isfinite() & masked.isfinite())).any(-1)
    if sink is not None:
        bad = bad | (~empty & ~(sink < math.inf).squeeze(-1))
    nothing = empty | bad
    seen = scaled.masked_fill(~visible, 0.0)
    mean = seen.sum(-1) / count.clamp(min=1)
    var = (scaled - mean[..., None]).masked_fill(~visible, 0.0).square().sum(-1)
    logits = masked.masked_fill(~visible, -math.inf)
    top_key = logits.argmax(-1)
    outcomes = logits if sink is None else torch.cat([logits, sink], -1)
    # Everything is measured from the heaviest outcome: 1 − p_max and its like are sums of the
    # others' masses, never differences.
    heaviest = outcomes.argmax(-1, keepdim=True)
    most = outcomes.gather(-1, heaviest)
    away = outcomes - torch.where(most.isfinite(), most, 0.0)
    log_total = away.exp().scatter(-1, heaviest, 0.0).sum(-1, keepdim=True).log1p()
    lse = (most + log_total).squeeze(-1)
    log_p = away - log_total
    p = log_p.exp()
    rest = p.scatter(-1, heaviest, 0.0)
    gini = rest.sum(-1) * (1 + p.gather(-1, heaviest).squeeze(-1)) - rest.square().sum(-1)
    top = logits.gather(-1, top_key[..., None])
    others = (outcomes - top).scatter(-1, top_key[..., None], -math.inf).logsumexp(-1)
    position = torch.arange(logits.shape[-1], device=p.device, dtype=dtype)

    def undefined(x: Tensor) -> Tensor:
        return torch.where(nothing, math.nan, x)

    return RowStats(
        visible=count.to(torch.int32),
        score_mean=undefined(mean),
        score_var=undefined(var / count.clamp(min=1)),
        max_score=undefined(scaled.masked_fill(~visible, -math.inf).amax(-1)),
        lse=torch.where(bad, math.nan, lse),
        entropy=undefined(-(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)),
        top_key=torch.where(nothing, -1, top_key).to(torch.int32),
        top_margin=undefined((-others).clamp(max=MARGIN_LIMIT)),
        collision=undefined(p.square().sum(-1)),
        jacobian_trace=undefined(gini),
        mean_key=undefined((logits.softmax(-1) * position).sum(-1)),
        nonfinite=bad,
        sink_mass=None if sink is None else undefined(p[..., -1]),
        kernel="trace",
    )

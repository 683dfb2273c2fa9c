"""How much attention every key received: the column sums of the weights, without the weights.

With lse known, p_ij = exp(logit_ij − lse_i), so a column's sum is the exp of a log-sum-exp over
queries, of logits shifted by −lse_i: the same kernel with the roles of queries and keys swapped.
Sources: Zhang et al. 2023 (H2O, arXiv:2306.14048) for what it is used for; docs/maths.md#received.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from scaledot import checks, operators
from scaledot.dispatch import autocast_inputs, pick, row_stats
from scaledot.kernels import Terms
from scaledot.masks import Mask, Visibility, resolve

KEYS = 512
"""Keys whose part of a dense mask is held transposed at once."""


@torch.no_grad()
def attention_received(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask | Tensor | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    lse: Tensor | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """Σ_i p_ij of every key j: (…, heads, keys), 0 … queries, one for each query head.

    Arguments as `scaledot.attention`. lse: `rows.lse` of the same call, where it is known; one
    pass over q and k is then saved. queries: (…, queries), False for queries (padding) whose
    attention does not count.

    Summed over keys it is the number of queries that see something, less the sinks' mass. A key
    that no query sees, or that padding hides, gets 0; empty rows give nothing. A non-finite row
    makes the keys that it sees NaN. No gradient.

    What pruning of a KV cache adds up over time (H2O's accumulated score) is this, for the queries
    so far; received / queries that see the key is the share of attention that it got from each,
    fair to late keys under causality; for grouped heads H2O prunes a kv head by the sum over its
    group, `received.unflatten(-2, (kv_heads, -1)).sum(-2)`. Adds up over queries and texts that
    share their keys.

    Cost: two statistics-only passes, one with lse; memory O(n), and O(512·queries) a head for a
    dense mask, whose rows and columns are swapped a part at a time.
    Error: as `lse`, whose rounding at large logits, |lse|·2⁻²⁴ in float32, is one of p.
    Raises: as `attention`; ValueError for a shape of lse or queries that does not fit.
    Source: docs/maths.md#received.

    >>> q, k = torch.randn(2, 2, 4, 8, 16).unbind()
    >>> attention_received(q, k, is_causal=True).sum(-1)[0]
    tensor([8.0000, 8.0000, 8.0000, 8.0000])
    """
    query, key = autocast_inputs(query, key)
    p = checks.problem(
        query, key, None, scale=scale, enable_gqa=enable_gqa, softcap=softcap, sinks=sinks
    )
    seen = resolve(p, attn_mask, is_causal, window)
    picked = pick(kernel, p.query, 0.0)
    if lse is None:
        with torch.autocast(query.device.type, enabled=False):
            lse = row_stats(
                query, key, attn_mask, is_causal, scale, enable_gqa,
                window=window, softcap=softcap, sinks=sinks, kernel=picked,
            ).lse  # fmt: skip
    given = (*p.batch_shape, *p.query.shape[1:3]) if p.has_heads else p.query.shape[2:3]
    if lse.shape != given:
        raise ValueError(f"lse has shape {tuple(lse.shape)}: expected {tuple(given)}, rows.lse's")
    real = None
    if queries is not None:
        if queries.dtype != torch.bool:
            raise TypeError(f"queries is {queries.dtype}: expected bool, True for what counts")
        counted = (*p.batch_shape, p.query.shape[2]) if p.has_heads else p.query.shape[2:3]
        try:
            real = queries.expand(counted).reshape(-1, p.query.shape[2])
        except RuntimeError:
            raise ValueError(
                f"queries has shape {tuple(queries.shape)}: expected {tuple(counted)}"
            ) from None
    result = received_by(p, seen, lse.reshape(p.query.shape[:3]), picked, real)
    return p.restore(result)


@torch.no_grad()
def received_by(
    problem: checks.Problem, seen: Visibility, lse: Tensor, kernel: str, real: Tensor | None
) -> Float[Tensor, "batch heads keys"]:
    """`attention_received` of a problem whose lse is known; real (batch, queries): which count."""
    # An empty row has lse −∞, or the sink's logit: either way no key is visible to it.
    shift = -lse
    shift = shift.masked_fill(shift == math.inf, -math.inf)
    if real is not None:
        shift = shift.masked_fill(~real[:, None], -math.inf)
    terms = Terms(problem.scale, problem.softcap, None, 0.0, 0)
    result = shift.new_zeros(*problem.query.shape[:2], problem.key.shape[2])
    # Heads of a group share keys, which are queries here: one of each group at a time.
    for member in range(problem.group):
        heads = slice(member, None, problem.group)
        result[:, heads] = _sums(
            kernel, problem.query[:, heads], problem.key, _heads(seen, heads), terms,
            shift[:, heads],
        )  # fmt: skip
    if seen.keep is not None:
        result = result.masked_fill(~seen.keep[:, None], 0.0)
    return result


def _heads(seen: Visibility, heads: slice) -> Visibility:
    """What some heads, a step apart, may see."""

    def part(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[1] == 1 else x[:, heads]

    some = len(range(seen.shape[1])[heads])
    shape = (seen.shape[0], some, *seen.shape[2:])
    return replace(seen, shape=shape, allowed=part(seen.allowed), bias=part(seen.bias))


def _sums(
    kernel: str, query: Tensor, key: Tensor, seen: Visibility, terms: Terms, shift: Tensor
) -> Tensor:
    """exp of the log-sum-exp over queries of logit + shift, for each key; no heads are grouped."""
    batch, heads, queries, keys = seen.shape
    dense = seen.allowed is not None or seen.bias is not None
    step = KEYS if dense else max(keys, 1)
    result = shift.new_zeros(batch, heads, keys)
    for k0 in range(0, keys, step):
        k1 = min(k0 + step, keys)
        segments = seen.segments
        if segments is not None:
            segments = segments[1][:, k0:k1], segments[0]
        # Query i sees key j where i + offset − left ≤ j ≤ i + offset + right; solve for i.
        swapped = Visibility(
            (batch, heads, k1 - k0, queries),
            k0 - seen.offset,
            seen.right,
            seen.left,
            segments=segments,
            bias=_shifted(seen, k0, k1, shift) if dense else shift[:, :, None],
            device=seen.device,
        )
        with torch.autocast(query.device.type, enabled=False):
            rows = operators.implementation(kernel).forward(
                key[:, :, k0:k1], query, None, swapped, terms
            )[1]
        result[..., k0:k1] = rows.lse.exp()
    return result


def _shifted(seen: Visibility, k0: int, k1: int, shift: Tensor) -> Tensor:
    """Some columns of a dense mask as rows, with the shift added and −∞ where it hides."""

    def columns(x: Tensor) -> Tensor:
        # Contiguous, as a kernel reads it: the results below take this layout.
        return (x[..., k0:k1] if x.shape[3] > 1 else x).mT.contiguous()

    out = shift[:, :, None].expand(-1, -1, k1 - k0, -1)
    if seen.bias is not None:
        bias = columns(seen.bias)
        out = torch.where(bias <= seen.floor, -math.inf, out + bias.to(out.dtype))
    if seen.allowed is not None:
        out = torch.where(columns(seen.allowed), out, -math.inf)
    return out

"""What a head looks at, in O(n·d): the weight of one chosen key a query, from lse alone.

Once lse is known, p = exp(logit − lse) costs one dot product, so no n×n pass is needed. Each mass
comes with its chance level, what equal weights over the visible keys would give.
Source: Clark et al. 2019 (arXiv:1906.04341) for the positions, Xiao et al. 2023 (arXiv:2309.17453)
for sinks; docs/maths.md#roles.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot.checks import Problem
from scaledot.masks import Visibility
from scaledot.rows import RowStats

ROWS = 512
"""Queries whose products are held at once."""

OFFSETS = {"previous": -1, "current": 0, "next": 1}


def weight_at(
    problem: Problem,
    seen: Visibility,
    lse: Float[Tensor, "batch heads queries"],
    index: Int[Tensor, "#batch queries"],
) -> tuple[Float[Tensor, "batch heads queries"], Bool[Tensor, "batch heads queries"]]:
    """(weight, visible) of one key a query, whose position is in `index`; 0 where not visible."""
    batch, heads, queries, dim = problem.query.shape
    keys, kv_heads = problem.key.shape[2], problem.key.shape[1]
    inside = (index >= 0) & (index < keys)
    at = index.clamp(0, max(keys - 1, 0)).expand(batch, queries)
    q = problem.query.unflatten(1, (kv_heads, -1))
    logit = torch.empty((*q.shape[:3], queries), dtype=lse.dtype, device=lse.device)
    # Some queries at a time: all of q·k before its sum would be as large as q itself.
    for q0 in range(0, queries, ROWS):
        q1 = min(q0 + ROWS, queries)
        chosen = at[:, None, q0:q1, None].expand(batch, kv_heads, q1 - q0, dim)
        k = problem.key.gather(2, chosen).to(lse.dtype)
        logit[..., q0:q1] = (q[..., q0:q1, :].to(lse.dtype) * k[:, :, None]).sum(-1)
    logit = logit.flatten(1, 2) * problem.scale
    if problem.softcap is not None:
        logit = problem.softcap * torch.tanh(logit / problem.softcap)
    visible, bias = seen.at(at)
    visible = (visible & inside[:, None]).expand(batch, heads, queries)
    if bias is not None:
        logit = logit + bias.to(logit.dtype)
    # Where lse is large its rounding may take a weight past 1.
    return torch.where(visible, (logit - lse).exp().clamp(max=1.0), 0.0), visible


def positions(
    problem: Problem, seen: Visibility, rows: RowStats, *, self_attention: bool
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """Weight on the first key, and in self-attention on the previous, own and next one.

    Each (batch, heads, queries), 0 … 1, NaN where the key is not visible or is the only one that
    is; "first" is the first real key of the query's own text and is measured on later queries only.
    "chance.first" and so on is 1 ÷ visible keys on the same rows. Cost O(n·d).
    """
    queries, keys = seen.shape[2:]
    if keys == 0:
        return {}
    own = torch.arange(queries, device=rows.lse.device)[None] + seen.diagonal
    first = seen.first()
    chosen = {"first": first}
    if self_attention:
        chosen |= {name: own + offset for name, offset in OFFSETS.items()}
    result = {}
    chance = 1 / rows.visible.clamp(min=1)
    for name, index in chosen.items():
        weight, visible = weight_at(problem, seen, rows.lse, index)
        measured = visible & (rows.visible > 1)
        if name == "first" and self_attention:
            measured = measured & (own > first)[:, None]
        result[name] = torch.where(measured, weight, float("nan"))
        result[f"chance.{name}"] = torch.where(measured, chance, float("nan"))
    return result

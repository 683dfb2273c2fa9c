"""QK-Clip: make W_Q and W_K of a head smaller once its largest score was too large.

Source: Kimi K2 (Moonshot AI 2025, arXiv 2507.20534), section 2.1. A head whose largest score S
exceeded the threshold τ gets γ = τ/S: √γ on its rows of W_Q and √γ on those of W_K, biases too, so
that the same input would give γ·S = τ. Heads that share a key take the γ of the largest among them,
since W_K cannot be made smaller for one of them alone. In multi-head latent attention the rotary
key is shared by all heads and stays as it is: the rotary part of W_Q takes the whole γ. Scores are
bilinear in q and k, and rotary embedding turns them without changing a length, so the clip is
exact: docs/maths.md#qk-clip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from scaledot import ScaledotError
from scaledot.heads import HeadStats
from scaledot.observation import itself, own_path

PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("to_q", "to_k"))
"""Names that libraries give W_Q and W_K where they are modules of their own."""
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "qk_norm",
         "query_layernorm", "key_layernorm")  # fmt: skip
"""Names that they give what normalises q and k behind it."""
IN_ORDER = {
    "GPT2Attention": "c_attn",
    "ImageGPTAttention": "c_attn",
    "DecisionTransformerGPT2Attention": "c_attn",
    "GPTBigCodeAttention": "c_attn",
    "Phi3Attention": "qkv_proj",
}
"""Classes that keep them in one matrix with W_V, one after the other."""
BY_KEY = ("GPTNeoXAttention", "FalconAttention")
"""Classes that do so key by key: the queries that share it, the key, the value."""
FUSED = (*IN_ORDER, *BY_KEY, "nn.MultiheadAttention")
"""Where they are one matrix with W_V."""


@dataclass(frozen=True)
class Clipped:
    """What `qk_clip` did: (path, head, γ) of every head whose scores it made smaller, 0 < γ < 1."""

    heads: tuple[tuple[str, int, float], ...]

    def __len__(self) -> int:
        return len(self.heads)


@torch.no_grad()
def qk_clip(model: nn.Module, stats: Mapping[str, HeadStats], threshold: float = 100.0) -> Clipped:
    """Rescale W_Q and W_K of every head whose largest score exceeded the threshold, in place.

    stats: by module path, as `observe(model)` and the look of a `Monitor` give them; what counts is
    the largest scaled score before soft-cap and mask bias, signed, of the rows since the last step.
    A module that is called several times takes the largest of its calls. Call it after the
    optimizer's step. Its moments are not touched: they belong to gradients of weights that were
    larger, and fade as they do in any case. The same batch then reaches the threshold to the
    rounding of the weights: in bfloat16 it may be over by 2⁻⁸ of it.

    Raises: ValueError for a threshold that is not above 0; ScaledotError, before anything is
    changed, for a module whose W_Q and W_K are not found, and for one that normalises q and k,
    where their size has no effect on scores.

    >>> with observe(model) as seen:          # doctest: +SKIP
    ...     model(**batch).loss.backward()    # doctest: +SKIP
    >>> optimizer.step()                      # doctest: +SKIP
    >>> len(qk_clip(model, seen.heads))       # doctest: +SKIP
    2
    """
    if isinstance(threshold, bool) or not (isinstance(threshold, int | float) and threshold > 0):
        raise ValueError(f"threshold is {threshold!r}: pass a number above 0")
    modules = {own_path(name): module for name, module in itself(model).named_modules()}
    largest: dict[str, tuple[HeadStats, Tensor]] = {}
    for path, one in stats.items():
        if "max_score" not in one.measures:
            raise ScaledotError(f"the statistics of {path} hold no max_score")
        base = re.sub(r"\[\d+\]$", "", path)
        score = one.measures["max_score"].maximum.nan_to_num(-math.inf, math.inf, -math.inf)
        if bool(score.isposinf().any()):
            raise ScaledotError(
                f"{path} has a score that is not finite: no factor makes it smaller"
            )
        if base in largest:
            score = torch.maximum(score, largest[base][1])
        largest[base] = one, score
    plans: dict[int, _Plan] = {}
    for path, (one, score) in largest.items():
        if path not in modules:
            raise ScaledotError(f"the model has no module {path!r}: pass its own statistics")
        keys = _own_keys(modules[path], one)
        plan = _Plan(
            [path], _factors(score, keys, threshold), _parts(path, modules[path], one, keys)
        )
        # Modules may share their weights: those are made smaller once, for the worst of them.
        first = plans.setdefault(id(plan.parts[0].weight), plan)
        if first is not plan:
            first.paths.append(path)
            first.factor = torch.minimum(first.factor, plan.factor)
    clipped = []
    for plan in plans.values():
        if bool((plan.factor < 1).any()):
            for part in plan.parts:
                part.multiply(plan.factor)
            each = list(enumerate(plan.factor.tolist()))
            clipped += [(path, h, x) for path in plan.paths for h, x in each if x < 1]
    return Clipped(tuple(clipped))


def _own_keys(module: nn.Module, stats: HeadStats) -> int:
    """How many heads' keys W_K makes. Falcon hands each query head a copy of the one it shares."""
    if type(module).__name__ != "FalconAttention":
        return stats.kv_heads
    grouped: Any = module
    if grouped.new_decoder_architecture:
        return grouped.num_kv_heads
    return 1 if grouped.multi_query else stats.heads


def _factors(largest: Tensor, kv_heads: int, threshold: float) -> Tensor:
    """γ of each head, (heads,), equal within a group of heads that share a key; 1 leaves it."""
    grouped = largest.view(kv_heads, -1).amax(-1, keepdim=True)
    factor = torch.where(grouped > threshold, threshold / grouped, 1.0)
    return factor.expand(-1, len(largest) // kv_heads).reshape(-1)


@dataclass(frozen=True)
class _Part:
    """Rows of one weight, by head: what a head's rows are multiplied by is its γ to a power.

    axis: of the weight, which the rows lie along: 1 for one that is applied from the right.
    """

    weight: Tensor
    bias: Tensor | None
    axis: int
    rows: Int[Tensor, "heads rows"]
    power: float = 0.5

    def multiply(self, factor: Tensor) -> None:
        of_head = factor.view(len(self.rows), -1)[:, 0] ** self.power
        each = torch.ones(self.weight.shape[self.axis], dtype=torch.float64)
        each[self.rows] = of_head[:, None].expand(self.rows.shape)
        shape = (-1, 1) if self.axis == 0 else (1, -1)
        _multiply(self.weight, each.view(shape))
        if self.bias is not None:
            _multiply(self.bias, each)


def _multiply(x: Any, by: Tensor) -> None:
    """In place, also where each process holds a part of x."""
    by = by.to(x.device, x.dtype)
    if hasattr(x, "placements"):  # a DTensor: torch's FSDP2 and tensor parallelism
        from torch.distributed.tensor import distribute_tensor

        by = distribute_tensor(by.expand(x.shape).contiguous(), x.device_mesh, x.placements)
    x.mul_(by)


@dataclass
class _Plan:
    """What is to be done to one module's weights, or to those that several share."""

    paths: list[str]
    factor: Tensor
    parts: list[_Part]


def _parts(path: str, module: nn.Module, stats: HeadStats, kv_heads: int) -> list[_Part]:
    """Where the W_Q and W_K of a module's heads lie.

    Raises: ScaledotError where they are not known, or where their size has no effect.
    """
    kind = type(module).__name__
    for name in NORMS:
        if isinstance(getattr(module, name, None), nn.Module):
            raise ScaledotError(
                f"{path} ({kind}) normalises q and k ({name}): the size of W_Q and W_K has no "
                "effect on its scores, so there is nothing to clip"
            )
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        raise ScaledotError(
            f"{path} ({kind}) clamps q and k (clip_qkv): its scores do not follow the size of W_Q "
            "and W_K"
        )
    sizes = stats.heads, kv_heads, stats.d_k
    found = _latent(module, *sizes) or _separate(module, *sizes) or _fused(module, *sizes)
    if found is None:
        names = ", ".join(f"{q} and {k}" for q, k in PAIRS)
        raise ScaledotError(
            f"{path} ({kind}) keeps W_Q and W_K where they are not known, for {stats.heads} heads "
            f"of {stats.d_k}: qk_clip knows {names}; {', '.join(FUSED)}; and multi-head latent "
            "attention"
        )
    return found


def _by_head(first: int, heads: int, each: int, step: int | None = None) -> Tensor:
    """Indices of rows, (heads, each): `each` of them every `step` from `first` on."""
    starts = first + torch.arange(heads) * (each if step is None else step)
    return starts[:, None] + torch.arange(each)


def _part(module: Any, rows: Tensor, size: int, power: float = 0.5) -> _Part | None:
    """Rows of a linear module with `size` outputs; None for anything else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    axis = 1 if type(module).__name__ == "Conv1D" else 0
    if weight.shape[axis] != size:
        return None
    return _Part(weight, getattr(module, "bias", None), axis, rows, power)


def _separate(module: nn.Module, heads: int, kv_heads: int, d: int) -> list[_Part] | None:
    """W_Q and W_K as modules of their own."""
    for query, key in PAIRS:
        parts = [
            _part(getattr(module, query, None), _by_head(0, heads, d), heads * d),
            _part(getattr(module, key, None), _by_head(0, kv_heads, d), kv_heads * d),
        ]
        if None not in parts:
            return [part for part in parts if part is not None]
    return None


def _fused(module: nn.Module, heads: int, kv_heads: int, d: int) -> list[_Part] | None:
    """W_Q, W_K and W_V in one matrix: one after the other, or key by key."""
    size = (heads + 2 * kv_heads) * d
    query, key = _by_head(0, heads, d), _by_head(heads * d, kv_heads, d)
    kind = type(module).__name__
    weight = getattr(module, "in_proj_weight", None)
    if isinstance(weight, Tensor) and weight.shape[0] == size:
        bias = getattr(module, "in_proj_bias", None)
        return [_Part(weight, bias, 0, rows) for rows in (query, key)]
    apart = [getattr(module, f"{x}_proj_weight", None) for x in "qk"]
    if isinstance(apart[0], Tensor) and isinstance(apart[1], Tensor):
        bias = getattr(module, "in_proj_bias", None)
        parts = [
            _Part(apart[0], None, 0, query),
            _Part(apart[1], None, 0, _by_head(0, kv_heads, d)),
        ]
        return parts + ([] if bias is None else [_Part(bias[:, None], None, 0, x)
                                                 for x in (query, key)])  # fmt: skip
    # The same names stand for other orders elsewhere (CodeGen), so the class must be known.
    name = IN_ORDER.get(kind)
    if name is not None and (kind != "GPTBigCodeAttention" or kv_heads == 1):
        part = _part(getattr(module, name, None), query, size)
        return None if part is None else [part, replace(part, rows=key)]
    if kind in BY_KEY:
        group = heads // kv_heads
        each = (group + 2) * d
        starts = torch.arange(kv_heads)[:, None] * each + torch.arange(group) * d
        query = starts.reshape(-1, 1) + torch.arange(d)
        part = _part(getattr(module, "query_key_value", None), query, size)
        if part is not None:
            return [part, replace(part, rows=_by_head(group * d, kv_heads, d, each))]
    return None


def _latent(module: nn.Module, heads: int, kv_heads: int, d: int) -> list[_Part] | None:
    """Multi-head latent attention: the rotary key is every head's, so W_Q's rotary rows take γ."""
    inner, rotary, wide = (
        getattr(module, name, None)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    up = getattr(module, "kv_b_proj", None)
    if up is None or inner is None or rotary is None or wide is None or inner + rotary != d:
        return None
    if heads != kv_heads:  # each head has a key of its own, made of a latent one
        return None
    query = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    parts = [
        _part(query, _by_head(0, heads, inner, d), heads * d),
        _part(query, _by_head(inner, heads, rotary, d), heads * d, 1.0),
        _part(up, _by_head(0, heads, inner, inner + wide), heads * (inner + wide)),
    ]
    return None if None in parts else [part for part in parts if part is not None]

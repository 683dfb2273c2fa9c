"""`attention`: check, pick a kernel, run it, differentiate it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from scaledot import checks
from scaledot.kernels import tiled
from scaledot.masks import Mask, Visibility, resolve
from scaledot.rows import RowStats

KERNELS = ("tiled",)

ERROR_FACTOR, ERROR_ULPS = 2, 4
"""A fast path's error is at most 2 × that of `trace` in the same dtype + 4 × eps × the largest
reference value, the reference being `trace` on float64 copies."""

MASS_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Relative error of a ratio of weights, while logits are sums of terms that stay below 32 in size;
beyond, it grows in proportion, as the rounding of a logit does. 1e-5 is 84 roundings of a weight,
2.6 of a logit of 32."""


def error_bound(reference: Tensor, plain: Tensor) -> float:
    """Largest error allowed of a fast path in float32 or less: `ERROR_FACTOR`, `ERROR_ULPS`.

    reference is from `trace` on float64 copies, plain from `trace` in the dtype of the result.
    """
    there = reference.isfinite() & plain.isfinite()
    plain_error = (plain - reference)[there].abs().amax() if there.any() else 0.0
    largest = reference[reference.isfinite()].abs().amax() if reference.isfinite().any() else 0.0
    eps = torch.finfo(plain.dtype).eps
    return float(ERROR_FACTOR * plain_error + ERROR_ULPS * eps * largest)


def mass_bound(dtype: torch.dtype, size: float) -> float:
    """Relative error allowed of a ratio of weights: of jacobian_trace, of exp(−top_margin), and in
    float64 of everything. size bounds the terms of a logit: scale·‖q‖·‖k‖ + |bias|."""
    return MASS_ERROR[dtype] * max(1.0, size / 32)


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask | Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool | str = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, window: int | tuple[int, int] | None = ...,
    softcap: float | None = ..., sinks: Tensor | None = ..., kernel: str = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask | Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool | str = ..., scale: float | None = ...,
    enable_gqa: bool = ..., *, window: int | tuple[int, int] | None = ...,
    softcap: float | None = ..., sinks: Tensor | None = ..., kernel: str = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, RowStats]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStats]:
    """softmax(QKᵀ·scale + mask)·V in O(n) memory, with exact statistics of every row on request.

    `F.scaled_dot_product_attention`'s parameters, order and result.
    query (…, heads, queries, d_k), key (…, kv_heads, keys, d_k), value (…, kv_heads, keys, d_v)
    → output (…, heads, queries, d_v) in their dtype; with return_stats also `RowStats`, each
    (…, heads, queries). Batch and head axes of length 1 broadcast.

    attn_mask: bool, True means "may attend", or float, added to the scores, or `scaledot.Mask`.
    is_causal: True needs equal lengths; else "top_left" or "bottom_right". Applies with attn_mask.
    scale: multiplies QKᵀ, 1/√d_k unless given.
    enable_gqa: query head h reads kv head h // (heads // kv_heads).
    window: W keys with the query's own, causal; or (left, right) keys besides it, −1 unbounded.
    softcap: c turns scores s into c·tanh(s/c), before the mask.
    sinks: (heads,) one more logit a head, in the denominator only.
    kernel: "auto" or "tiled"; what ran is in `rows.kernel`.

    An empty row gives 0. A visible NaN or inf gives NaN; a masked one never matters. Gradients
    flow to query, key, value, a float mask, sinks, and from `rows.lse` and `rows.entropy`; double
    backward raises. Statistics change nothing: the output is the same with and without.

    Error: `error_bound`, `mass_bound` (tests/test_tiled.py).
    Raises: ValueError or TypeError that names the argument, what came and what to pass.
    Source: Vaswani et al. 2017, section 3.2.1; docs/maths.md.

    >>> q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    >>> out, rows = attention(q, k, v, is_causal=True, return_stats=True)
    >>> out.shape, rows.entropy.shape
    (torch.Size([2, 4, 8, 16]), torch.Size([2, 4, 8]))
    """
    query, key, value = autocast_inputs(query, key, value)
    checks.tensor("value", value)
    p = checks.problem(
        query, key, value, scale=scale, enable_gqa=enable_gqa, softcap=softcap, sinks=sinks
    )
    seen = resolve(p, attn_mask, is_causal, window)
    dropout_p = checks.dropout(dropout_p)
    _pick(kernel)
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    terms = tiled.Terms(p.scale, p.softcap, p.sinks, dropout_p, seed)
    bias = seen.bias
    assert p.value is not None  # checked above
    tracked = (p.query, p.key, p.value, bias, p.sinks)
    with torch.autocast(p.query.device.type, enabled=False):
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tracked):
            out, *rest = _Attention.apply(seen, terms, *tracked)
            rows = RowStats(**dict(zip(_FIELDS, rest, strict=True)), kernel="tiled")
        else:
            out, rows, _, _ = tiled.forward(p.query, p.key, p.value, seen, terms)
            assert out is not None  # there was a value
            out = out.to(p.query.dtype)
    if not return_stats:
        return p.restore(out)
    return p.restore(out), rows.map(p.restore)


_FIELDS = tuple(f.name for f in fields(RowStats) if f.name != "kernel")


class _Attention(torch.autograd.Function):
    """Ties a kernel's forward and backward together for autograd."""

    @staticmethod
    def forward(
        ctx: Any, seen: Visibility, terms: tiled.Terms, query: Tensor, key: Tensor, value: Tensor,
        bias: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        out, rows, top, log_mass = tiled.forward(query, key, value, seen, terms)
        assert out is not None
        ctx.seen, ctx.terms = replace(seen, bias=None), replace(terms, sinks=None)
        # The gradient of the softmax needs O as computed: rounded to bfloat16 it would drown dS.
        ctx.save_for_backward(
            query, key, value, bias, sinks, top, log_mass, rows.entropy, rows.visible, out
        )
        ctx.set_materialize_grads(False)
        stats = [getattr(rows, name) for name in _FIELDS]
        ctx.mark_non_differentiable(
            *(x for n, x in zip(_FIELDS, stats, strict=True)
              if x is not None and n not in ("lse", "entropy"))
        )  # fmt: skip
        return out.to(query.dtype, copy=True), *stats

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, *d_stats: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                once = _Attention.backward(ctx, d_out, *d_stats)
            return _Once.apply(*(g if g is None else g.requires_grad_() for g in once))
        query, key, value, bias, sinks, top, log_mass, entropy, visible, out = ctx.saved_tensors
        by_name = dict(zip(_FIELDS, d_stats, strict=True))
        with torch.autocast(query.device.type, enabled=False):
            grads = tiled.backward(
                query, key, value, replace(ctx.seen, bias=bias), replace(ctx.terms, sinks=sinks),
                top, log_mass, entropy, visible > 0, out, d_out, by_name["lse"],
                by_name["entropy"], bias_gradient=ctx.needs_input_grad[5],
            )  # fmt: skip

        def like(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
            return None if grad is None or x is None else grad.to(x.dtype)

        return (
            None, None, like(grads.query, query), like(grads.key, key), like(grads.value, value),
            like(grads.bias, bias), like(grads.sinks, sinks),
        )  # fmt: skip


class _Once(torch.autograd.Function):
    """Gradients whose own gradient is an error, where it would be 0 without a word."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return tuple(g if g is None else g.clone() for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError("attention cannot be differentiated twice")


def _pick(kernel: str) -> str:
    """The kernel that runs: "auto" takes the first of KERNELS that can."""
    if kernel == "auto":
        return KERNELS[0]
    if kernel not in KERNELS:
        raise ValueError(f'kernel is {kernel!r}: pass "auto" or one of {", ".join(KERNELS)}')
    return kernel


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the inputs in its dtype, as `F.scaled_dot_product_attention` does."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )

"""`attention` and `row_stats`: check, pick a kernel, run it, differentiate it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _is_torch_function_mode_enabled, _pop_mode_temporarily

from scaledot import checks, operators
from scaledot.kernels import Gradients, Terms
from scaledot.masks import Mask, Visibility, resolve
from scaledot.rows import RowStats

KERNELS = ("native", "tiled")
"""What kernel= may name; "auto" takes the first that can compute the problem: native on a CPU for
float32, bfloat16 and float16 without dropout where it was compiled, else tiled."""

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
    (…, heads, queries). Batch and head axes of length 1 broadcast, as do batch axes that one lacks.

    attn_mask: bool, True means "may attend", or float, added to the scores, or `scaledot.Mask`.
    is_causal: True needs equal lengths; else "top_left" or "bottom_right". Applies with attn_mask.
    scale: multiplies QKᵀ, 1/√d_k unless given.
    enable_gqa: query head h reads kv head h // (heads // kv_heads).
    window: W keys with the query's own, causal; or (left, right) keys besides it, −1 unbounded.
    softcap: c turns scores s into c·tanh(s/c), before the mask.
    sinks: (heads,) one more logit a head, in the denominator only.
    kernel: "native" or "tiled" runs that one or raises with the reason; "auto" takes native on a
    CPU for float32, bfloat16 and float16 without dropout, where it was compiled, else tiled. What
    ran is in `rows.kernel`.

    An empty row gives 0. A visible NaN or inf gives NaN; a masked one never matters. Gradients
    flow to query, key, value, a float mask, sinks, and from `rows.lse` and `rows.entropy`; double
    backward and forward mode raise. Statistics change nothing: the output is the same with and
    without.

    Error: `error_bound`, `mass_bound` (tests/test_tiled.py).
    Raises: ValueError or TypeError that names the argument, what came and what to pass.
    Source: Vaswani et al. 2017, section 3.2.1; docs/maths.md.

    >>> q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    >>> out, rows = attention(q, k, v, is_causal=True, return_stats=True)
    >>> out.shape, rows.entropy.shape
    (torch.Size([2, 4, 8, 16]), torch.Size([2, 4, 8]))
    """
    if _is_torch_function_mode_enabled():
        return handed_over(
            attention, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            window=window, softcap=softcap, sinks=sinks, kernel=kernel, return_stats=return_stats,
        )  # fmt: skip
    if (
        attn_mask is None
        and sinks is None
        and window is None
        and softcap is None
        and scale is None
        and not dropout_p
        and checks.same_axes(query, key, value)
        and not _autocast(query)
        and not torch.compiler.is_compiling()
    ):
        kernel = pick(kernel, query, 0.0)
        simple = _simple(query.shape, key.shape[2], is_causal, query.device)
        out, rows = _run(kernel, query, key, value, *simple, return_stats)
        return out if rows is None else (out, rows)
    out, rows = compute(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window=window,
        softcap=softcap, sinks=sinks, kernel=kernel, return_stats=return_stats,
    )  # fmt: skip
    return out if rows is None else (out, rows)


def handed_over(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the active TorchFunctionMode makes of a call of `function`: a mode may take attention
    over, as it may torch's own attention functions. An observation does."""
    # torch's handle_torch_function, as far as dynamo can follow it.
    with _pop_mode_temporarily() as mode:
        return mode.__torch_function__(function, (), args, kwargs)


def compute(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Mask | Tensor | None, dropout_p: float,
    is_causal: bool | str, scale: float | None, enable_gqa: bool, *,
    window: int | tuple[int, int] | None = None, softcap: float | None, sinks: Tensor | None,
    kernel: str, return_stats: bool, watch: Callable[[Gradients], None] | None = None,
) -> tuple[Tensor, RowStats | None]:  # fmt: skip
    """(output, statistics where asked for): `attention` that no mode takes over.

    watch: each backward calls it with the gradients in the accumulator's dtype and what each row
    passes on (`Gradients.rows`), axes as `checks.problem` makes them; not where no gradient came by
    way of the output. The result and its gradients are the same bits.
    """
    query, key, value = autocast_inputs(query, key, value)
    checks.tensor("value", value)
    p = checks.problem(
        query, key, value, scale=scale, enable_gqa=enable_gqa, softcap=softcap, sinks=sinks
    )
    seen = resolve(p, attn_mask, is_causal, window)
    dropout_p = checks.dropout(dropout_p) if dropout_p else 0.0
    kernel = pick(kernel, p.query, dropout_p)
    assert p.value is not None  # checked above
    terms = Terms(p.scale, p.softcap, p.sinks, dropout_p, 0)
    out, rows = _run(kernel, p.query, p.key, p.value, seen, terms, return_stats, watch)
    if not p.plain:
        out, rows = p.restore(out), None if rows is None else rows.map(p.restore)
    return out, rows


def row_stats(
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
    factors: Sequence[float] | None = None,
) -> RowStats:
    """The statistics of every row of softmax(QKᵀ·scale + mask), without values or output.

    Arguments, edge rules and errors as `attention`; each tensor is (…, heads, queries). Gradients
    flow from lse and entropy.

    factors: what the rows would be were the scale factor × as large, for each factor; every tensor
    then has a leading axis of factors and no gradient. It answers for these queries and keys, not
    for a model trained at that scale. The factor multiplies the scores before any soft-cap, and
    neither mask nor sinks. "auto" picks as without factors: both form QKᵀ once for all, native
    where factors are an octave apart (and there is no soft-cap or additive mask).

    Raises: ValueError or TypeError that names the argument, what came and what to pass.
    Source: docs/maths.md#rows.

    >>> q, k = torch.randn(2, 2, 4, 8, 16).unbind()
    >>> row_stats(q, k, is_causal=True).entropy.shape
    torch.Size([2, 4, 8])
    >>> row_stats(q, k, is_causal=True, factors=(0.5, 1, 2)).entropy.shape
    torch.Size([3, 2, 4, 8])
    """
    query, key = autocast_inputs(query, key)
    checks.tensor("key", key)
    p = checks.problem(
        query, key, None, scale=scale, enable_gqa=enable_gqa, softcap=softcap, sinks=sinks
    )
    seen = resolve(p, attn_mask, is_causal, window)
    kernel = pick(kernel, p.query, 0.0)
    terms = Terms(p.scale, p.softcap, p.sinks, 0.0, 0)
    if factors is None:
        rows = _rows_alone(kernel, p.query, p.key, seen, terms)
        return rows if p.plain else rows.map(p.restore)
    scaled = checks.factors(factors)
    with torch.no_grad():
        if _traced(p.query):
            sweep = [
                _rows_alone(kernel, p.query, p.key, seen, replace(terms, scale=terms.scale * x))
                for x in scaled
            ]
        else:
            with torch.autocast(p.query.device.type, enabled=False):
                run = operators.implementation(kernel).sweep
                sweep, _ = run(p.query, p.key, seen, terms, scaled)
    if not p.plain:
        sweep = [rows.map(p.restore) for rows in sweep]
    stacked: dict[str, Any] = dict.fromkeys(_FIELDS)
    for name in _FIELDS:
        if getattr(sweep[0], name) is not None:
            stacked[name] = torch.stack([getattr(rows, name) for rows in sweep])
    return RowStats(**stacked, kernel=kernel)


def _rows_alone(
    kernel: str, query: Tensor, key: Tensor, seen: Visibility, terms: Terms
) -> RowStats:
    inputs = (query, key, seen.bias, terms.sinks)
    _reverse_mode(*inputs)
    wanted = any(x is not None and x.requires_grad for x in inputs)
    if _traced(query) or (torch.is_grad_enabled() and wanted):
        # Autograd goes by way of an output: the narrowest there is.
        value = key.new_zeros(()).expand(*key.shape[:3], 1)
        rows = _run(kernel, query, key, value, seen, terms, True)[1]
        assert rows is not None  # asked for
        return rows
    with torch.autocast(query.device.type, enabled=False):
        return operators.implementation(kernel).forward(query, key, None, seen, terms)[1]


def _traced(x: Tensor) -> bool:
    """Whether a graph is being made, a function transformed or only shapes are known: then
    operators stand for kernels."""
    return torch.compiler.is_compiling() or x.is_meta or torch._C._are_functorch_transforms_active()


def _autocast(x: Tensor) -> bool:
    """Whether autocast is on where x is; torch has none for meta tensors and raises."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


@lru_cache(maxsize=256)
def _simple(
    shape: torch.Size, keys: int, is_causal: bool | str, device: torch.device
) -> tuple[Visibility, Terms]:
    """The mask and terms of a problem that has no more than a causality."""
    batch, heads, queries, dim = shape
    right = offset = None
    if causal := checks.causal(is_causal, queries, keys):
        right, offset = 0, keys - queries if causal == "bottom_right" else 0
    seen = Visibility((batch, heads, queries, keys), offset or 0, None, right, device=device)
    return seen, Terms(1 / math.sqrt(dim), None, None, 0.0, 0)


def _run(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, seen: Visibility, terms: Terms,
    statistics: bool, watch: Callable[[Gradients], None] | None = None,
) -> tuple[Tensor, RowStats | None]:  # fmt: skip
    """(output, row statistics if wanted), by the cheapest way that the moment allows."""
    _reverse_mode(query, key, value, seen.bias, terms.sinks)
    dropout = terms.dropout_p > 0
    if _traced(query):
        if watch is not None:
            raise checks.ScaledotError(
                "gradients inside torch.func or a graph are not seen: call backward() outside of it"
            )
        seed = torch.randint(1 << 62, ()) if dropout else None
        return operators.attend(query, key, value, seen, terms, seed, kernel, statistics)
    if _autocast(query):
        with torch.autocast(query.device.type, enabled=False):
            return _run(kernel, query, key, value, seen, terms, statistics, watch)
    if dropout:
        terms = replace(terms, seed=int(torch.randint(1 << 62, ())))
    bias, sinks = seen.bias, terms.sinks
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):  # fmt: skip
        out, *rest = _Attention.apply(
            kernel, seen, terms, statistics, watch, query, key, value, bias, sinks
        )
        if not statistics:
            return out, None
        return out, RowStats(**dict(zip(_FIELDS, rest, strict=True)), kernel=kernel)
    module = operators.implementation(kernel)
    if not statistics:
        out, rows = module.output(query, key, value, seen, terms), None
    else:
        out, rows, _, _ = module.forward(query, key, value, seen, terms)
    return out if out.dtype == query.dtype else out.to(query.dtype), rows


def _reverse_mode(*tensors: Tensor | None) -> None:
    """Refuse what a kernel has no derivative for, by the exception of torch's fused kernels: a
    forward-mode derivative would come out as 0."""
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None
    ):
        raise NotImplementedError(
            "attention has no forward-mode derivative: use backward() or torch.autograd.grad"
        )


_FIELDS = tuple(f.name for f in fields(RowStats) if f.name != "kernel")


class _Attention(torch.autograd.Function):
    """Ties a kernel's forward and backward together for autograd."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, seen: Visibility, terms: Terms, statistics: bool,
        watch: Callable[[Gradients], None] | None, query: Tensor, key: Tensor, value: Tensor,
        bias: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        out, rows, top, log_mass = operators.implementation(kernel).forward(
            query, key, value, seen, terms, statistics=statistics
        )
        # What may want a gradient is saved below and put back in `backward`.
        ctx.kernel, ctx.watch = kernel, watch
        ctx.seen = seen if bias is None else replace(seen, bias=None)
        ctx.terms = terms if sinks is None else replace(terms, sinks=None)
        # The gradient of the softmax needs O as computed: rounded to bfloat16 it would drown dS.
        ctx.save_for_backward(
            query, key, value, bias, sinks, top, log_mass, rows.entropy, rows.visible, out
        )
        ctx.set_materialize_grads(False)
        result = out.to(query.dtype, copy=True)
        if not statistics:
            return (result,)
        stats = [getattr(rows, name) for name in _FIELDS]
        ctx.mark_non_differentiable(
            *(x for n, x in zip(_FIELDS, stats, strict=True)
              if x is not None and n not in ("lse", "entropy"))
        )  # fmt: skip
        return result, *stats

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, *d_stats: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                once = _Attention.backward(ctx, d_out, *d_stats)
            return _Once.apply(once, d_out, *d_stats, *ctx.saved_tensors[:5])
        query, key, value, bias, sinks, top, log_mass, entropy, visible, out = ctx.saved_tensors
        d_lse, d_entropy = (d_stats[_LSE], d_stats[_ENTROPY]) if d_stats else (None, None)
        seen = ctx.seen if bias is None else replace(ctx.seen, bias=bias)
        terms = ctx.terms if sinks is None else replace(ctx.terms, sinks=sinks)
        with torch.autocast(query.device.type, enabled=False):
            grads = operators.implementation(ctx.kernel).backward(
                query, key, value, seen, terms, top, log_mass, entropy, visible > 0, out,
                d_out, d_lse, d_entropy, bias_gradient=ctx.needs_input_grad[8],
                rows=ctx.watch is not None and d_out is not None,
            )  # fmt: skip
            if grads.rows is not None:
                ctx.watch(grads)

        def like(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
            return None if grad is None or x is None else grad.to(x.dtype)

        return (
            None, None, None, None, None,
            like(grads.query, query), like(grads.key, key), like(grads.value, value),
            like(grads.bias, bias), like(grads.sinks, sinks),
        )  # fmt: skip


_LSE, _ENTROPY = _FIELDS.index("lse"), _FIELDS.index("entropy")


class _Once(torch.autograd.Function):
    """Gradients whose own gradient, by whatever they depend on, is an error: it would be 0 without
    a word."""

    @staticmethod
    def forward(
        ctx: Any, grads: tuple[Tensor | None, ...], *depend: Tensor | None  # noqa: ARG004
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError("attention cannot be differentiated twice")


def pick(kernel: str, query: Tensor, dropout_p: float) -> str:
    """The kernel that runs; from here on nothing falls back to another.

    Raises: ValueError for a name that there is not, and with the reason for one that cannot.
    """
    if kernel == "tiled":
        return kernel
    if kernel not in ("auto", "native"):
        raise ValueError(f'kernel is {kernel!r}: pass "auto" or one of {", ".join(KERNELS)}')
    reason = _native_reason(query.device.type, query.dtype, dropout_p > 0)
    if reason is None:
        return "native"
    if kernel == "native":
        raise ValueError(reason)
    return "tiled"


@torch.compiler.assume_constant_result
def _native_reason(device: str, dtype: torch.dtype, dropout: bool) -> str | None:
    """Why the native kernel cannot compute this, None where it can."""
    from scaledot.kernels import native

    return native.reason(device, dtype, dropout)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the inputs in its dtype, as `F.scaled_dot_product_attention` does."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not _autocast(first):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )

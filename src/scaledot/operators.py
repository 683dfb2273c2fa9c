"""`attention` as torch operators, so that torch.compile, fake tensors and torch.func see one node.

    scaledot::attention            output and statistics, whichever kernel is named
    scaledot::attention_backward   its gradients

Eager calls do not come here: an autograd.Function (dispatch.py) costs less. What an operator takes
and gives must be flat, so a `Visibility` and `Terms` travel as their fields, and statistics packed:
outputs may not share memory, the views are taken outside. An operator runs its kernel in plain
Python, where data may decide; the graph around it never sees that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaledot.kernels import Terms, tiled
from scaledot.masks import Visibility
from scaledot.rows import RowStats

PROBLEM = (
    "Tensor? bias, Tensor? sinks, Tensor? keep, Tensor? query_ids, Tensor? key_ids, "
    "Tensor? allowed, SymInt offset, SymInt? left, SymInt? right, "
    "float scale, float? softcap, float dropout_p, Tensor? seed, str kernel"
)
_BIAS, _SINKS = 3, 4
"""Positions of two inputs of scaledot::attention that may want a gradient."""

LIBRARY = torch.library.Library("scaledot", "DEF")
LIBRARY.define(
    f"attention(Tensor query, Tensor key, Tensor value, {PROBLEM}, bool statistics) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "attention_backward(Tensor? d_out, Tensor? d_lse, Tensor? d_entropy, "
    "Tensor query, Tensor key, Tensor value, "
    f"{PROBLEM}, Tensor out, Tensor entropy, Tensor numbers, Tensor whole, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_STATISTICS = (
    "score_mean", "score_var", "max_score", "top_margin", "collision", "jacobian_trace", "mean_key",
)  # fmt: skip
_WHOLE = ("visible", "top_key", "nonfinite")


def implementation(kernel: str) -> Any:
    """The module of a kernel, loaded when it is first wanted."""
    if kernel == "native":
        from scaledot.kernels import native

        return native
    return tiled


def arguments(seen: Visibility, terms: Terms, seed: Tensor | None, kernel: str) -> tuple[Any, ...]:
    """A mask and terms as the operators take them: `PROBLEM`'s fields."""
    query_ids, key_ids = seen.segments or (None, None)
    return (
        seen.bias, terms.sinks, seen.keep, query_ids, key_ids, seen.allowed, seen.offset, seen.left,
        seen.right, terms.scale, terms.softcap, terms.dropout_p, seed, kernel,
    )  # fmt: skip


def understood(
    query: Tensor, key: Tensor, bias: Tensor | None, sinks: Tensor | None, keep: Tensor | None,
    query_ids: Tensor | None, key_ids: Tensor | None, allowed: Tensor | None, offset: int,
    left: int | None, right: int | None, scale: float, softcap: float | None, dropout_p: float,
    seed: Tensor | None,
) -> tuple[Visibility, Terms]:  # fmt: skip
    """What `arguments` flattened."""
    segments = None if query_ids is None or key_ids is None else (query_ids, key_ids)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    seen = Visibility(
        shape, offset, left, right, keep, segments, allowed, bias, query.device
    )  # fmt: skip
    return seen, Terms(scale, softcap, sinks, dropout_p, 0 if seed is None else int(seed))


def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: Visibility, terms: Terms,
    seed: Tensor | None, kernel: str, statistics: bool,
) -> tuple[Tensor, RowStats | None]:  # fmt: skip
    """(output in the query's dtype, row statistics if wanted) through scaledot::attention."""
    flat = arguments(seen, terms, seed, kernel)
    out, lse, entropy, numbers, whole = torch.ops.scaledot.attention(
        query, key, value, *flat, statistics
    )
    if not statistics:
        return out.to(query.dtype), None
    sinks = terms.sinks is not None
    return out.to(query.dtype), unpacked(lse, entropy, numbers, whole, sinks, kernel)


def unpacked(
    lse: Tensor, entropy: Tensor, numbers: Tensor, whole: Tensor, sinks: bool, kernel: str
) -> RowStats:
    """Row statistics from an operator's outputs; lse and entropy stay differentiable."""
    numbers = numbers.detach()
    return RowStats(
        visible=whole[0],
        score_mean=numbers[2],
        score_var=numbers[3],
        max_score=numbers[4],
        lse=lse,
        entropy=entropy,
        top_key=whole[1],
        top_margin=numbers[5],
        collision=numbers[6],
        jacobian_trace=numbers[7],
        mean_key=numbers[8],
        nonfinite=whole[2] != 0,
        sink_mass=numbers[9] if sinks else None,
        kernel=kernel,
    )


# Forward


def _forward(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *flat, kernel, statistics = rest
    seen, terms = understood(query, key, *flat)
    out, rows, top, log_mass = implementation(kernel).forward(
        query, key, value, seen, terms, statistics=statistics
    )
    numbers = [top, log_mass]
    if not statistics:
        whole = rows.visible[None].clone()
        return out, rows.lse.clone(), out.new_empty(0), torch.stack(numbers), whole
    whole = torch.stack([getattr(rows, name).to(torch.int32) for name in _WHOLE])
    numbers += [getattr(rows, name) for name in _STATISTICS]
    if rows.sink_mass is not None:
        numbers.append(rows.sink_mass)
    return out, rows.lse.clone(), rows.entropy.clone(), torch.stack(numbers), whole


def _forward_fake(
    query: Tensor, _: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sinks, statistics = rest[1], rest[-1]
    shape = query.shape[:3]
    like = query.new_empty(0, dtype=_accumulator(query))
    count = (9 if sinks is None else 10) if statistics else 2
    return (
        like.new_empty(*shape, value.shape[3]),
        like.new_empty(shape),
        like.new_empty(shape if statistics else 0),
        like.new_empty(count, *shape),
        like.new_empty(len(_WHOLE) if statistics else 1, *shape, dtype=torch.int32),
    )


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Backward


def _backward(
    d_out: Tensor | None, d_lse: Tensor | None, d_entropy: Tensor | None,
    query: Tensor, key: Tensor, value: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *flat, kernel, out, entropy, numbers, whole, bias_gradient = rest
    seen, terms = understood(query, key, *flat)
    if d_entropy is None:
        entropy = out.new_zeros(())  # without statistics there is none
    grads = implementation(kernel).backward(
        query, key, value, seen, terms, numbers[0], numbers[1], entropy, whole[0] > 0, out,
        d_out, d_lse, d_entropy, bias_gradient=bias_gradient,
    )  # fmt: skip

    def like(grad: Tensor | None, x: Tensor | None) -> Tensor:
        return query.new_empty(0) if grad is None or x is None else grad.to(x.dtype)

    return (
        like(grads.query, query), like(grads.key, key), like(grads.value, value),
        like(grads.bias, seen.bias), like(grads.sinks, terms.sinks),
    )  # fmt: skip


def _backward_fake(
    d_out: Tensor | None, d_lse: Tensor | None, d_entropy: Tensor | None,  # noqa: ARG001
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = (query, key, value, bias if rest[-1] else None, sinks)
    return tuple(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    out, _, entropy, numbers, whole = output
    ctx.save_for_backward(*tensors, out, entropy, numbers, whole)
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.mark_non_differentiable(numbers, whole)


def _differentiate(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, d_entropy: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    *tensors, out, entropy, numbers, whole = ctx.saved_tensors
    inputs = [
        other if x is None else x for x, other in zip(tensors, ctx.others, strict=True)
    ]  # fmt: skip
    *problem, statistics = inputs
    grads = torch.ops.scaledot.attention_backward(
        d_out, d_lse, d_entropy if statistics else None, *problem, out, entropy, numbers, whole,
        ctx.needs_input_grad[_BIAS],
    )  # fmt: skip
    result: list[Any] = [None] * len(inputs)
    for position, grad in zip((0, 1, 2, _BIAS, _SINKS), grads, strict=True):
        if ctx.needs_input_grad[position]:
            result[position] = grad
    return tuple(result)


def _twice(ctx: Any, *grads: Any) -> Any:  # noqa: ARG001
    raise RuntimeError("attention cannot be differentiated twice")


def _mapped(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """torch.func.vmap: the mapped axis is so many more batches."""
    if in_dims[_SINKS] is not None:
        raise RuntimeError("scaledot::attention: sinks cannot be mapped over, they have no batch")
    query, dim = args[0], in_dims[0]
    batch = query.shape[0 if dim is None or dim > 0 else 1]

    def fold(position: int) -> Any:
        x, dim = args[position], in_dims[position]
        if not isinstance(x, Tensor) or position == _SINKS or x.dim() == 0:
            return x
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)

    flat = [fold(position) for position in range(len(args))]
    results = torch.ops.scaledot.attention(*flat)
    packed = (0, 0, 0, 1, 1)  # the batch axis of each output
    unfolded = tuple(
        x.unflatten(d, (info.batch_size, batch)) if x.dim() > 1 else x.expand(info.batch_size, 0)
        for x, d in zip(results, packed, strict=True)
    )
    return unfolded, packed


for _name, _body, _fake in (
    ("attention", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"scaledot::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "scaledot::attention", _differentiate, setup_context=_remember, lib=LIBRARY
)
torch.library.register_autograd("scaledot::attention_backward", _twice, lib=LIBRARY)
torch.library.register_vmap("scaledot::attention", _mapped, lib=LIBRARY)

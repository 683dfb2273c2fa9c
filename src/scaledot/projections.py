"""Each attention's W_O, found by what it is given: what it gives, and what each head adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scaledot.calls import Attended
from scaledot.kernels import Terms
from scaledot.operators import implementation

_WEIGHTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Projection:
    """Where an attention's heads leave it: a module whose input is their outputs side by side, and
    which call of it in a forward that is.

    gram: WWᵀ of each head's part W of the module's matrix, of which ‖x·W‖² = x·WWᵀ·xᵀ needs no
    more than value_dim numbers; float64, on the CPU.
    """

    module: nn.Module
    call: int
    gram: Float[Tensor, "heads value_dim value_dim"]

    @property
    def token_bytes(self) -> int:
        """Bytes of its result, a token."""
        matrix = _matrix(self.module)
        assert matrix is not None
        return matrix.shape[1] * matrix.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Projected:
    """What W_O made of one text. lengths: how long what each head adds to each query is; result:
    the module's own output, x·W_O and, where `biased`, its bias."""

    lengths: Float[Tensor, "queries heads"]
    result: Float[Tensor, "queries d_model"]
    biased: bool


@contextmanager
def inputs_of(model: nn.Module) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """What each linear module is given while the model runs, call by call."""
    inputs: dict[nn.Module, list[Tensor]] = {}

    def listen(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            inputs.setdefault(module, []).append(args[0].detach().clone())

    linear = [m for m in model.modules() if _matrix(m) is not None]
    handles = [m.register_forward_pre_hook(listen) for m in linear]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def projections(
    kept: Mapping[str, Attended], inputs: Mapping[nn.Module, Sequence[Tensor]]
) -> dict[str, Projection]:
    """Each attention's W_O: the linear module that was given its heads' outputs side by side.

    Found by value, not by name, so that what stands between the two (a norm, a gate) is never
    overlooked: such a layer has none.
    """
    left = [(module, call, x) for module, calls in inputs.items() for call, x in enumerate(calls)]
    result: dict[str, Projection] = {}
    for path, attended in kept.items():
        out = _side_by_side(attended)
        found = next((i for i, (_, _, x) in enumerate(left) if _same(x, out)), None)
        if found is not None:
            module, call, _ = left.pop(found)
            heads = attended.problem.query.shape[1]
            result[path] = Projection(module, call, _gram(module, heads))
    return result


def _gram(module: nn.Module, heads: int) -> Tensor:
    matrix = _matrix(module)
    assert matrix is not None  # it was found by it
    parts = matrix.detach().cpu().double().unflatten(0, (heads, -1))
    return parts @ parts.mT


def _side_by_side(attended: Attended) -> Tensor:
    """The outputs of an attention's heads as the model gets them, (batch, queries, heads·value)."""
    p, seen = attended.problem, attended.seen
    assert p.value is not None  # a model's attention has values
    terms = Terms(p.scale, p.softcap, p.sinks, 0.0, 0)
    run = implementation(attended.rows.kernel).forward
    out = run(p.query, p.key, p.value, seen, terms, statistics=False)[0]
    return out.transpose(1, 2).flatten(2)


def _same(x: Tensor, out: Tensor) -> bool:
    if x.shape != out.shape:
        return False
    close = 1e-4 if out.dtype.itemsize >= 4 else 2e-2
    largest = out.abs().amax()
    return bool(largest > 0) and bool((x.to(out.dtype) - out).abs().amax() <= close * largest)


def _matrix(module: nn.Module) -> Tensor | None:
    """The matrix W of a module that computes x·W + b, (inputs, outputs); None for any other."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in _WEIGHTED:
        return None
    if isinstance(module, nn.Linear):
        return weight.mT
    return weight if type(module).__name__ == "Conv1D" else None


@contextmanager
def measured(
    found: Mapping[str, Projection],
) -> Iterator[dict[str, Projected]]:
    """By path, while the model runs: what each W_O made of the first text of the batch."""
    made: dict[str, Projected] = {}
    calls: dict[nn.Module, int] = {}
    places = {(p.module, p.call): (path, p.gram) for path, p in found.items()}

    def measure(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        call = calls[module] = calls.get(module, -1) + 1
        if (module, call) not in places:
            return
        path, gram = places[module, call]
        x = args[0][0].detach().cpu().double().unflatten(-1, (len(gram), -1)).transpose(0, 1)
        lengths = ((x @ gram) * x).sum(-1).clamp(min=0).sqrt().mT.float()
        # A copy: the model may add to its output in place.
        result = out[0].detach().clone()
        made[path] = Projected(lengths, result, getattr(module, "bias", None) is not None)

    handles = [m.register_forward_hook(measure) for m in {m for m, _ in places}]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()

"""observe()'s way through torch.compile: an operator in the graph that hands over what it saw.

Python that runs while a graph is made runs once; what it appends to an observation is lost for
every later call. So inside a graph `attend` ends in scaledot::record, an operator which has a side
effect: torch sees that it adds to a counter, and its body, plain Python at every call, gives the
statistics to each observation that is open then. Outside of one it does nothing, and a graph made
under `observe` is not used outside: another attention function, or no TorchRoute, is what it was
made for.

The hooks on modules are part of the graph too, save those of the module that was compiled, which
run before it. They keep `_FRAMES`, a stack that exists while a graph is made; the module's number,
its padding mask and what else a record needs are then inputs of the operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import checks, observation, operators
from scaledot.calls import Attended
from scaledot.dispatch import compute
from scaledot.frames import Frame
from scaledot.kernels import Terms
from scaledot.masks import Mask, Visibility
from scaledot.rows import RowStats

RECORDED = torch.zeros((), dtype=torch.int64, device="cpu")
"""How many attention calls inside graphs were handed over: what scaledot::record mutates."""

_ROWS = (
    "visible", "score_mean", "score_var", "max_score", "lse", "entropy", "top_key", "top_margin",
    "collision", "jacobian_trace", "mean_key", "nonfinite", "sink_mass",
)  # fmt: skip

operators.LIBRARY.define(
    "record(Tensor(a!) recorded, Tensor query, Tensor key, Tensor value, "
    f"{operators.PROBLEM}, Tensor[] rows, int module, int index, bool cross, bool stops, "
    "Tensor? query_mask, SymInt length, int? window, bool? self_attention, bool uniform) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@dataclass(frozen=True)
class _Frame:
    """A module that runs inside the graph, as `frames.Frame`; calls: the numbers of the modules
    whose attention ran in it, in order."""

    number: int
    calls: list[int]
    cross: bool
    stops: bool
    query_mask: Tensor | None
    length: int
    wants_weights: bool


_FRAMES: list[_Frame] = []
_NUMBERS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_NEXT = count()
OUTERMOST = -1
"""Stands for the module that runs before the graph does."""


def hooks(
    module: nn.Module, enter: Callable[..., None], leave: Callable[..., None],
    parameters: Mapping[str, int],
) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
    """Hooks of a module that do as enter and leave, and keep `_FRAMES` while a graph is made."""
    if module not in _NUMBERS:
        _NUMBERS[module] = next(_NEXT)
        _MODULES[_NUMBERS[module]] = module
    number, positions = _NUMBERS[module], dict(parameters)
    outside = torch.compiler.disable(leave)

    def enter_either(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            enter(module, args, kwargs)
            return
        _FRAMES.append(_Frame(number, [], *observation.said(module, args, kwargs, positions)))

    def leave_either(module: nn.Module, *_: Any) -> None:
        if _FRAMES and _FRAMES[-1].number == number:
            _FRAMES.pop()
        elif torch.compiler.is_compiling():
            outside(module)  # it was entered before a break in the graph
        else:
            leave(module)

    return enter_either, leave_either


def forget() -> None:
    """Empty `_FRAMES` of modules that failed between two breaks of a graph."""
    _FRAMES.clear()


def weights_wanted() -> bool:
    return any(frame.wants_weights for frame in _FRAMES)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, *, is_causal: bool | str,
    scale: float | None, softcap: float | None, sinks: Tensor | None, enable_gqa: bool,
    dropout_p: float, window: int | None, self_attention: bool | None, appended: int, uniform: bool,
    kernel: str,
) -> tuple[Tensor, RowStats]:  # fmt: skip
    """`observation.attend` inside a graph: (output, row statistics), recorded when it runs."""
    out, rows = compute(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa,
        softcap=softcap, sinks=sinks, kernel=kernel, return_stats=True,
    )  # fmt: skip
    assert rows is not None  # asked for
    p, seen = observation.understood(
        query, key, value, mask, is_causal, scale, softcap, sinks, appended
    )
    module, cross, stops, query_mask, length, index = OUTERMOST, False, False, None, 0, 0
    if _FRAMES:
        module, cross = _FRAMES[-1].number, _FRAMES[-1].cross
        index = _FRAMES[0].calls.count(module)
        _FRAMES[0].calls.append(module)
        for frame in _FRAMES:
            if frame.stops:
                stops, query_mask, length = True, frame.query_mask, frame.length
    shape = p.query.shape[:3]
    fields = [getattr(rows, name) for name in _ROWS]
    flat = operators.arguments(
        _detached(seen), Terms(p.scale, p.softcap, _detach(p.sinks), 0.0, 0), None, rows.kernel
    )
    assert p.value is not None  # it was attended
    torch.ops.scaledot.record(
        RECORDED, p.query.detach(), p.key.detach(), p.value.detach(), *flat,
        [x.detach().reshape(shape) for x in fields if x is not None],
        module, index, cross, stops, query_mask, length, window, self_attention, uniform,
    )  # fmt: skip
    return out, rows


def _detach(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _detached(seen: Visibility) -> Visibility:
    return Visibility(
        seen.shape, seen.offset, seen.left, seen.right, seen.keep, seen.segments, seen.allowed,
        _detach(seen.bias), seen.device,
    )  # fmt: skip


def _record(recorded: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> None:
    """scaledot::record: every open observation that knows the module adds the call up."""
    recorded += 1
    *flat, kernel, rows, number, index, cross, stops, query_mask, length, window, own, uniform = (
        rest
    )
    seen, terms = operators.understood(query, key, *flat)
    problem = checks.Problem(
        query, key, value, terms.scale, terms.softcap, terms.sinks, (query.shape[0],), True
    )
    fields = dict(zip(_ROWS, rows, strict=False), kernel=kernel)
    attended = Attended(problem, seen, RowStats(**{"sink_mass": None, **fields}), uniform)
    module = _MODULES.get(number)

    def inside(path: str, module: nn.Module) -> Sequence[Frame]:
        within = Frame(path, module, cross, False, None, 0, False)
        if not stops:
            return (within,)
        return Frame("", module, False, True, query_mask, length, False), within

    observation.record(module, inside, attended, window, own, index)


operators.LIBRARY.impl("record", _record, "CompositeExplicitAutograd")
torch.library.register_fake("scaledot::record", lambda *_: None, lib=operators.LIBRARY)

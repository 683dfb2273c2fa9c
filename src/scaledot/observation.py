"""observe(): run any model unchanged and get the exact statistics of every attention head.

Five routes lead to an attention call, and each ends in `attend`, in a graph of torch.compile too
(graph_route.py):

    transformers' AttentionInterface       huggingface.py, by the module that calls it
    F.scaled_dot_product_attention         torch_route.py, by the module that is running
    F.multi_head_attention_forward         the same (nn.MultiheadAttention, nn.TransformerEncoder …)
    scaledot.attention                     the same
    multihead.attend                       the same (scaledot.MultiheadAttention)

`attend` computes the attention as `scaledot.attention` does and gives the row statistics to every
observation whose model the call belongs to. Hooks on the modules say which one is running, what
padding it was given and when a new forward begins. What computes its own softmax is not seen, and
is named.
"""

from __future__ import annotations

import html
import inspect
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from scaledot import checks, heads, mask_check, stages
from scaledot.calls import (
    Attended,
    Call,
    Ridden,
    describe,
    features_of,
    four_axes,
    kind_of,
    lengthen,
    real_queries,
    ride,
    statistics,
    watched,
    weights,
)
from scaledot.checks import Problem, ScaledotError
from scaledot.dispatch import autocast_inputs, compute, pick
from scaledot.frames import Frame, Where
from scaledot.heads import HeadStats
from scaledot.kernels import Gradients
from scaledot.mask_check import MaskFacts
from scaledot.masks import Mask, Visibility, resolve
from scaledot.parts import PART, Ledger, entered, key_bias
from scaledot.received import received_by
from scaledot.rows import RowStats
from scaledot.stages import Trace

_P = ParamSpec("_P")
_R = TypeVar("_R")

GIB = 1 << 30

TOLERANCE = 8
"""An observed model's output differs from its own by rounding alone: by at most this many eps of
its dtype for each attention call, times the largest output. One attention of ours and one of
torch's are each within 4 eps of the exact one (dispatch.error_bound), and a residual stream adds
up the calls; the largest seen over tests/test_families.py is 1.6 a call."""

_OTHER_INPUTS = ("pixel_values", "input_features", "input_values")
"""A module that takes one of these reads no text, even inside one that does."""

LARGE = 8 << 20
"""Bytes of query, key and value from which a call's freed memory is handed back at once."""

_ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)


def _beside_routes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function with no TorchRoute in the way of its tensors: each call of torch's would pass
    through it, and by now the attention is taken over."""

    @wraps(function)
    def beside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with ExitStack() as popped:
            while getattr(_get_current_function_mode(), "is_route", False):
                popped.enter_context(_pop_mode_temporarily())
            return function(*args, **kwargs)

    return beside


@_beside_routes
def attend(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    enable_gqa: bool = True,
    dropout_p: float = 0.0,
    window: int | None = None,
    self_attention: bool | None = None,
    appended: int = 0,
    earlier: int = 0,
    empty_value: Tensor | None = None,
    want_weights: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, Attended | None]:
    """(output, what was computed), recorded by every observation that looks at the module.

    query (batch, heads, queries, d_k), grouped heads un-repeated. module None: the one running.
    window: what the caller says of a mask that is a plain tensor. appended: keys at the end that
    belong to no token; earlier: keys that a cache has dropped. empty_value: values whose mean is
    the output of a row that sees nothing.
    The second result is None unless somebody looked or want_weights.
    """
    if torch.compiler.is_compiling():
        return _attend_in_a_graph(
            module, query, key, value, mask, is_causal=is_causal, scale=scale, softcap=softcap,
            sinks=sinks, enable_gqa=enable_gqa, dropout_p=dropout_p, window=window,
            self_attention=self_attention, appended=appended, earlier=earlier,
            empty_value=empty_value, want_weights=want_weights, kernel=kernel,
        )  # fmt: skip
    lookers = [
        (seen, where) for seen in tuple(_LOOKING) if (where := seen._locate(module)) is not None
    ]
    places: list[_Place] = []
    if _recomputing():
        # Its rows were counted. If the first forward had no graph, this one has the backward,
        # unless it is inside one more checkpoint.
        if torch.is_grad_enabled():
            recalled = (seen._recall(where.path) for seen, where in lookers)
            places = [place for place in recalled if place is not None]
        lookers = []
    look = bool(lookers) or want_weights
    watch = None
    if torch.is_grad_enabled() and (places or any(seen._gradients for seen, _ in lookers)):
        watch = partial(_receive, places)
    query, key, value = autocast_inputs(query, key, value)
    rows: RowStats | None
    ridden, along = None, None
    if watch is None and not dropout_p and empty_value is None and enable_gqa:
        ridden = _ridden(
            lookers, query, key, value, mask, is_causal, scale, softcap, sinks, appended, kernel
        )
    if ridden is not None:
        problem, visible, out, rows, along = ridden
    else:
        out, rows = compute(
            query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, softcap=softcap,
            sinks=sinks, kernel=kernel, watch=watch,
            return_stats=look or watch is not None or empty_value is not None,
        )  # fmt: skip
    if rows is None:
        return out, None
    if empty_value is not None:
        out = _fill_empty(out, rows, empty_value)
    if not look:
        return out, None
    if ridden is None:
        problem, visible = understood(
            query, key, value, mask, is_causal, scale, softcap, sinks, appended
        )
    exact = out.dtype.itemsize >= 4 and not dropout_p and empty_value is None
    attended = Attended(
        problem, visible, rows, empty_value is not None, earlier, out if exact else None, along
    )
    # What an observation computes is none of the model's own: no route needs to look at it.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for seen, where in lookers:
            place = seen._record(where, attended, window, self_attention)
            if place is None:
                continue
            if watch is not None:
                places.append(place)
            elif seen._running.training:
                seen._postpone(place)
        if attended.bytes > LARGE and not all(seen._light for seen, _ in lookers):
            _give_back()
    return out, attended


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, None with another allocator."""
    import ctypes

    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def _give_back() -> None:
    """Hand free memory back: what an observation keeps, a little from each call, lies between the
    large pieces that the call has freed, and glibc would make the heap longer for the next one."""
    if (trim := _trim()) is not None:
        trim(0)


def _receive(places: Sequence[_Place], gradients: Gradients) -> None:
    """Give what a backward passed on to the observations that saw its forward."""
    assert gradients.rows is not None  # `attend` asked for them
    norm = torch.linalg.vector_norm(gradients.query, dim=-1)
    rows = {
        "transmission": gradients.rows.transmission,
        # Of the rows that enter any measure: not of empty ones, nor of those that hold a NaN.
        "gradient_norm": norm.masked_fill(gradients.rows.norm.isnan(), float("nan")),
    }
    for place in places:
        place.seen._add(place.key, rows, place.real)


def _ridden(
    lookers: Sequence[tuple[Observation, Where]], query: Tensor, key: Tensor, value: Tensor,
    mask: Mask | Tensor | None, is_causal: bool | str, scale: float | None, softcap: float | None,
    sinks: Tensor | None, appended: int, kernel: str,
) -> tuple[Problem, Visibility, Tensor, RowStats, Ridden] | None:  # fmt: skip
    """The attention in one pass with what a full observation asks of it; None where it takes more.

    Where octaves of the scale share no exponential, in other dtypes than float32 and where a
    gradient is wanted, they have passes of their own afterwards.
    """
    full = [(seen, where) for seen, where in lookers if seen._full]
    inputs = (query, key, value, sinks)
    if (
        len(full) != 1
        or softcap is not None
        or any(x is not None and x.dtype != torch.float32 for x in inputs)
        or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs))
        or pick(kernel, query, 0.0) != "native"
    ):
        return None
    problem, visible = understood(
        query, key, value, mask, is_causal, scale, softcap, sinks, appended
    )
    seen, where = full[0]
    if visible.bias is not None:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        features = features_of(problem, visible, where.frames, seen._delimiters)
        if features is None:
            return None
        out, rows, ridden = ride(problem, visible, features, "native")
    if not problem.plain:
        out, rows = problem.restore(out), rows.map(problem.restore)
    return problem, visible, out, rows, ridden


def _attend_in_a_graph(
    module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor,
    mask: Mask | Tensor | None, *, earlier: int, empty_value: Tensor | None, want_weights: bool,
    appended: int, **arguments: Any,
) -> tuple[Tensor, Attended | None]:  # fmt: skip
    from scaledot import graph_route

    if want_weights or graph_route.weights_wanted() or earlier or empty_value is not None:
        # Weights are n×n and looked at outside; the others come with masks that no graph holds.
        return _attend_outside(
            module, query, key, value, mask, earlier=earlier, empty_value=empty_value,
            want_weights=want_weights, appended=appended, **arguments,
        )  # fmt: skip
    query, key, value = autocast_inputs(query, key, value)
    out, _ = graph_route.attend(
        query, key, value, mask, appended=appended, uniform=False, **arguments
    )
    return out, None


@torch.compiler.disable
def _attend_outside(*args: Any, **arguments: Any) -> tuple[Tensor, Attended | None]:
    return attend(*args, **arguments)


def understood(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, is_causal: bool | str,
    scale: float | None, softcap: float | None, sinks: Tensor | None, appended: int,
) -> tuple[Problem, Visibility]:  # fmt: skip
    """The problem of an attention call and what its queries may see."""
    problem = checks.problem(
        query, key, value, scale=scale, enable_gqa=True, softcap=softcap, sinks=sinks
    )
    visible = resolve(problem, mask, is_causal)
    if appended and visible.left is None and visible.right is None:
        # The query's own key is at its own index, not counted from the end.
        visible = replace(visible, offset=0, right=problem.key.shape[2])
    return problem, visible


def record(
    module: nn.Module | None, inside: Callable[[str, nn.Module], Sequence[Frame]],
    attended: Attended, window: int | None, self_attention: bool | None, index: int,
) -> None:  # fmt: skip
    """Give a call inside a graph to the observations that look at its module (None: the one that
    runs). inside: the modules that the graph itself ran, a path and module given; index: which call
    of the module in the graph it is."""
    if _recomputing():
        return
    with torch.no_grad():
        for seen in tuple(_LOOKING):
            if (where := seen._locate(module)) is not None:
                if seen._gradients:
                    raise ScaledotError(
                        f"{where.path} runs inside a graph, where no gradients are seen: "
                        'leave torch.compiler\'s stance at "force_eager"'
                    )
                if module is not None:
                    frames = (*where.frames, *inside(where.path, where.module))
                    where = replace(where, frames=frames)
                if not seen._frames:
                    # The whole model is inside the graph, so no hook has said that a forward began.
                    seen._running.counts[where.path] = index
                seen._record(where, attended, window, self_attention)


def _fill_empty(out: Tensor, rows: RowStats, value: Tensor) -> Tensor:
    """Give rows that see nothing the mean of every value: softmax over finfo.min alone."""
    empty = rows.empty[..., None]
    if not bool(empty.any()):
        return out
    mean = value.mean(2, keepdim=True, dtype=torch.promote_types(value.dtype, torch.float32))
    mean = mean.to(out.dtype).repeat_interleave(out.shape[1] // mean.shape[1], 1)
    return torch.where(empty, mean, out)


def _recomputing() -> bool:
    """Gradient checkpointing runs a forward again inside backward: it was counted already."""
    return torch._C._current_graph_task_id() != -1


_LOOKING: list[Observation] = []
"""Observations whose context is open, outermost first."""


_WAITING = 1024
"""Forwards of a module that wait for their backward under reentrant checkpointing, at most: what a
model runs under no_grad inside a training forward waits for ever."""


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the gradients of a call belong: an observation's key, and which queries are real."""

    seen: Observation
    key: tuple[str, int]
    real: Bool[Tensor, "batch queries"] | None


class Observation:
    """What `observe` saw, readable at any time, also after its context has ended.

    heads: {path: HeadStats} in call order. calls: {path: Call}, masks: {path: MaskFacts}, the same
    keys. A module called several times in one forward has a path for each, `path[0]`, `path[1]` …
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keep: bool = False,
        layers: Sequence[str | int] | None = None,
        last: int | None = None,
        keep_bytes: int = 2 * GIB,
        full: bool = False,
        delimiters: Tensor | None = None,
        gradients: bool = False,
        light: bool = False,
        norms: bool = True,
    ) -> None:
        inner = itself(model)
        names = {m: own_path(name) for name, m in inner.named_modules()}
        self._paths = {
            m: names.get(m) or type(inner).__name__ for m in model.modules() if not _is_wrapper(m)
        }
        self._keep, self._layers, self._last, self._keep_bytes = keep, layers, last, keep_bytes
        self._full, self._delimiters = full, delimiters
        self._gradients = gradients
        self._light, self._norms, self._muted, self.passed_over = light, norms, False, False
        self._checkpointed: dict[str, deque[_Place]] = {}
        self._segment: tuple[Any, set[str]] = (None, set())
        self._stats: dict[tuple[str, int], HeadStats] = {}
        self._calls: dict[tuple[str, int], Call] = {}
        self._masks: dict[tuple[str, int], MaskFacts] = {}
        self._kept: dict[tuple[str, int], list[Attended]] = {}
        self._ledgers: dict[tuple[str, int], Ledger] = {}
        self._running = threading.local()
        self._lock = threading.Lock()
        self._ran = False
        for layer in layers or ():
            self._check_layer(layer)

    @property
    def heads(self) -> dict[str, HeadStats]:
        """Statistics by module path, in call order."""
        return {self._name(k): stats for k, stats in self._stats.items()}

    @property
    def calls(self) -> dict[str, Call]:
        """How each was called, by module path, in call order."""
        repeated = {path for path, index in self._calls if index}
        return {
            self._name(k): replace(call, index=k[1] if k[0] in repeated else None)
            for k, call in self._calls.items()
        }

    @property
    def masks(self) -> dict[str, MaskFacts]:
        """What each one's masks showed, by module path, in call order."""
        return {self._name(k): facts for k, facts in self._masks.items()}

    @property
    def unobserved(self) -> tuple[str, ...]:
        """Paths of modules that look like attention by their class name and were never seen."""
        seen = {path for path, _ in self._stats}

        def related(path: str) -> bool:
            return any(path == s or _inside(s, path) or _inside(path, s) for s in seen)

        return tuple(path for path in self._attention_paths() if not related(path))

    def weights(
        self,
        path: str | int,
        *,
        head: int,
        rows: slice | int = slice(None),
        keys: slice | int = slice(None),
        batch: int = 0,
        call: int = -1,
    ) -> Float[Tensor, "queries keys"]:
        """Exact weights of a tile of one head, (rows, keys), 0 … 1, float32 or better.

        Rebuilt from the query, key and lse that keep="qk" kept; only the tile is formed. Before
        dropout, without the sink's column. path may be a position in `heads`. call counts the
        kept calls of that path, −1 the last.

        Raises: ScaledotError if nothing was kept there, naming what was; IndexError for a head,
        batch or call that does not exist.

        >>> layer = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> with observe(layer, keep="qk") as seen:
        ...     _ = layer(torch.randn(1, 5, 16))
        >>> seen.weights("self_attn", head=1, rows=slice(0, 2)).shape
        torch.Size([2, 5])
        """
        attended = self._find(path, call)
        b, h = self._head(attended, path, batch, head)
        return weights(attended, b, h, _slice(rows), _slice(keys))[0, 0]

    def kept(self, path: str | int, *, call: int = -1) -> Attended:
        """A kept call whole: its inputs, what its queries saw, its row statistics.

        path, call, Raises: as `weights`.
        """
        return self._find(path, call)

    def trace(self, path: str | int, *, head: int, batch: int = 0, call: int = -1) -> Trace:
        """Every stage of one head of a kept call, as `scaledot.trace` gives it.

        Raises: as `weights`; ScaledotError where its n×n stages would pass keep_bytes.
        """
        attended = self._find(path, call)
        b, h = self._head(attended, path, batch, head)
        p = attended.problem
        queries, keys = p.query.shape[2], p.key.shape[2]
        size = 6 * queries * keys * max(p.query.element_size(), 4)
        if size > self._keep_bytes:
            raise ScaledotError(
                f"the stages of {queries} × {keys} scores need about {_size(size)}, keep_bytes is "
                f"{_size(self._keep_bytes)}: seen.weights(…, rows=…, keys=…) gives a tile"
            )
        kv = h.start // p.group
        hidden, bias = attended.seen.part(b, h).block(0, queries, 0, keys)
        mask = Mask() if hidden is None else Mask(dense=~hidden[0, 0])
        mask = mask if bias is None else mask & bias[0, 0].to(p.query.dtype)
        return stages.trace(
            p.query[batch, head], p.key[batch, kv],
            None if p.value is None else p.value[batch, kv],
            mask if mask.dense is None else mask.dense.expand(queries, keys),
            scale=p.scale, softcap=p.softcap, sinks=None if p.sinks is None else p.sinks[h],
        )  # fmt: skip

    def received(
        self, path: str | int, *, batch: int = 0, call: int = -1
    ) -> Float[Tensor, "heads keys"]:
        """How much attention each key of a kept call received, Σ over its queries, for every head.

        As `scaledot.attention_received`, by one more pass over the query and key that were kept.
        Padded queries count too. path, batch, call, Raises: as `weights`.

        >>> layer = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> with observe(layer, keep="qk") as seen:
        ...     _ = layer(torch.randn(1, 5, 16))
        >>> seen.received("self_attn").sum(-1)
        tensor([5.0000, 5.0000])
        """
        attended = self._find(path, call)
        self._head(attended, path, batch, 0)
        p = attended.problem
        found = received_by(p, attended.seen, attended.rows.lse, attended.rows.kernel, None)
        return found[batch]

    def summary(self) -> None:
        """Print a table of every head."""
        from scaledot import terminal
        from scaledot.document import heads_document

        terminal.print_heads(terminal.console(), heads_document(self))

    def _repr_html_(self) -> str:
        from scaledot.exploring import of_observation
        from scaledot.page_document import frame_document
        from scaledot.report import frame

        if not self._stats:
            return f"<p>{html.escape(repr(self))}</p>"
        return frame(frame_document(*of_observation(self)), "scaledot: an observation")

    def __repr__(self) -> str:
        calls = sum(call.calls for call in self._calls.values())
        total = sum(stats.heads for stats in self._stats.values())
        kept = ", query, key and value kept" if self._keep else ""
        return f"<Observation of {len(self._stats)} attentions, {total} heads, {calls} calls{kept}>"

    # Names and places

    def _name(self, key: tuple[str, int]) -> str:
        path, index = key
        return f"{path}[{index}]" if (path, 1) in self._stats else path

    def _attention_paths(self) -> list[str]:
        """Innermost modules whose class is named after attention, in the model's order."""
        named = [p for m, p in self._paths.items() if _ATTENTION_NAME.search(type(m).__name__)]
        return [p for p in named if not any(_inside(other, p) for other in named)]

    def _find(self, path: str | int, call: int) -> Attended:
        names = list(self.heads)
        if isinstance(path, int):
            if not -len(names) <= path < len(names):
                raise ScaledotError(f"no attention {path}: {len(names)} were observed, from 0")
            path = names[path]
        if not self._keep:
            raise ScaledotError('query and key were not kept: observe(model, keep="qk")')
        kept = {self._name(k): calls for k, calls in self._kept.items()}
        if path not in kept:
            what = "was not kept" if path in names else "was not observed"
            raise ScaledotError(f"{path!r} {what}; kept: {_some(list(kept))}")
        calls = kept[path]
        if not -len(calls) <= call < len(calls):
            raise IndexError(f"{path} has {len(calls)} kept calls: call {call} does not exist")
        return calls[call]

    @staticmethod
    def _head(attended: Attended, path: str | int, batch: int, head: int) -> tuple[slice, slice]:
        sizes = attended.problem.query.shape[:2]
        for name, i, n in zip(("batch", "head"), (batch, head), sizes, strict=True):
            if not 0 <= i < n:
                raise IndexError(f"{path} has {name} 0 to {n - 1}: {name} {i} does not exist")
        return slice(batch, batch + 1), slice(head, head + 1)

    # Modules that run

    @property
    def _frames(self) -> list[Frame]:
        if not hasattr(self._running, "frames"):
            self._running.frames, self._running.counts = [], {}
            self._running.training = self._running.counted = False
        return self._running.frames

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frames = self._frames
        frame = _frame(self._paths[module], module, args, kwargs)
        if not frames:
            # Only while a module runs, and in its thread: a backward that recomputes one sees it.
            from scaledot.torch_route import TorchRoute

            self._running.route = TorchRoute()
            self._running.route.__enter__()
            if not _recomputing():
                self._running.counts = {}
                self._running.training = torch.is_grad_enabled()
                self._running.counted = torch.is_grad_enabled() and module.training
        self._ran = True
        frames.append(frame)

    def _leave(self, module: nn.Module) -> None:
        frames = self._frames
        # A module whose own hook failed was never entered; one inside of it that failed never left.
        at = max((i for i, frame in enumerate(frames) if frame.module is module), default=None)
        if at is not None:
            del frames[at:]
            if not frames:
                from scaledot.graph_route import forget

                forget()
                self._running.route.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Forget modules that Ctrl-C stopped: torch runs no hook for it."""
        if self._frames:
            self._frames.clear()
            self._running.route.__exit__(None, None, None)

    def _locate(self, module: nn.Module | None) -> Where | None:
        frames = self._frames
        if self._light and not self._counts(module):
            return None
        if module is not None and module in self._paths:
            return Where(self._paths[module], module, tuple(frames))
        return Where(frames[-1].path, frames[-1].module, tuple(frames)) if frames else None

    def _counts(self, module: nn.Module | None) -> bool:
        """Whether a light observation counts a call: one of a training forward, unless muted."""
        if self._muted:
            return False
        if self._frames:
            counted = self._running.counted
        else:  # a graph of the whole model and more: no hook has said how it was called
            counted = module is not None and module.training
        self.passed_over |= not counted
        return counted

    # What they compute

    def _record(
        self, where: Where, attended: Attended, window: int | None, self_attention: bool | None
    ) -> _Place | None:
        attended = four_axes(attended)
        counts = self._running.counts
        number = counts.get(where.path, 0)
        counts[where.path] = number + 1
        key = (where.path, number)
        kind = kind_of(where, attended.seen, self_attention)
        if self._keep and self._wanted(key):
            self._store(key, attended)
        if self._light:
            stats = watched(
                attended, where.frames, self_attention=kind == "self", norms=self._norms
            )
            self._add_up(key, where, stats)
            return None
        stats = statistics(
            attended, where.frames, self_attention=kind == "self", full=self._full,
            delimiters=self._delimiters,
        )  # fmt: skip
        masks = mask_check.facts(attended, where.frames, where.module, kind=kind, window=window)
        with self._lock:
            before = self._stats.get(key)
            if before is None:
                self._calls[key] = describe(where, attended, kind, window)
                self._stats[key], self._masks[key] = stats, masks
            else:
                self._stats[key] = _merged(where.path, before, stats)
                self._calls[key] = lengthen(self._calls[key], attended)
                self._masks[key] = mask_check.merge(self._masks[key], masks)
        part = PART.get()
        if part is None and not self._gradients:
            return None
        real = real_queries(attended, where.frames, self_attention=kind == "self")
        if part is not None:
            ledger = entered(self._ledgers.pop(key, None), attended, real, part)
            if not part.last:
                self._ledgers[key] = ledger
            elif (bias := key_bias(ledger, attended)) is not None:
                self._add(key, {"key_bias": bias}, ledger.real)
        return _Place(self, key, real) if self._gradients else None

    def _add_up(self, key: tuple[str, int], where: Where, stats: HeadStats) -> None:
        with self._lock:
            before = self._stats.get(key)
            self._stats[key] = stats if before is None else _merged(where.path, before, stats)

    def take(self) -> dict[str, HeadStats]:
        """`heads`, which begin anew."""
        with self._lock:
            taken, self._stats = self.heads, {}
            self._ran = self.passed_over = False
        return taken

    def mute(self, muted: bool) -> None:
        """Count nothing, or again, of an observation that is light: the model runs on in our
        kernel, so that a step which nobody looks at computes the same bits."""
        self._muted = muted

    # What comes back

    def _add(self, key: tuple[str, int], rows: Mapping[str, Tensor], real: Tensor | None) -> None:
        with self._lock:
            self._stats[key] = heads.joined(self._stats[key], rows, real)

    def _postpone(self, place: _Place) -> None:
        """Remember a forward that torch's reentrant checkpoint ran without a graph: what it runs
        again in backward, its last segment first, has the graph and not the padding mask."""
        with self._lock:
            waiting = self._checkpointed.setdefault(place.key[0], deque(maxlen=_WAITING))
            waiting.append(place)

    def _recall(self, path: str) -> _Place | None:
        """The place of a call that is run again, where only this second forward has a graph."""
        with self._lock:
            if not self._checkpointed.get(path):
                return None
            node = torch._C._current_autograd_node()
            if self._segment[0] is not node:
                self._segment = (node, set())
            if path in self._segment[1]:
                raise ScaledotError(
                    f"{path} is called twice in one reentrant checkpoint: which backward is whose "
                    "cannot be told; pass use_reentrant=False"
                )
            self._segment[1].add(path)
            return self._checkpointed[path].pop()

    def _check_layer(self, layer: str | int) -> None:
        if isinstance(layer, int) and not isinstance(layer, bool):
            if layer < 0:
                raise ValueError(f"layers has {layer}: pass a position in `heads`, from 0")
            return
        base = re.sub(r"\[\d+\]$", "", str(layer))
        if not any(path == base or _inside(path, base) for path in self._paths.values()):
            raise ValueError(
                f"layers has {layer!r}, no module of this model; "
                f"attention modules: {_some(self._attention_paths())}"
            )

    def _wanted(self, key: tuple[str, int]) -> bool:
        if self._layers is None:
            return True
        path, index = key
        known = list(self._stats)
        position = known.index(key) if key in known else len(known)
        return any(
            layer == position
            if isinstance(layer, int)
            else path == layer or _inside(path, layer) or layer == f"{path}[{index}]"
            for layer in self._layers
        )

    def _store(self, key: tuple[str, int], attended: Attended) -> None:
        kept = self._kept.setdefault(key, [])
        if self._last is not None:
            del kept[: max(len(kept) + 1 - self._last, 0)]
        held = sum(a.bytes for calls in self._kept.values() for a in calls)
        modules = len(self._layers or self._attention_paths()) or 1
        estimate = max(held + attended.bytes, attended.bytes * modules)
        if estimate > self._keep_bytes:
            raise ScaledotError(
                f"keeping query, key and value needs about {_size(estimate)} or more, "
                f"keep_bytes is {_size(self._keep_bytes)}: narrow it with layers=[…] or last=1, "
                "or raise keep_bytes"
            )
        kept.append(attended.copy())

    def require_something(self) -> None:
        if self._stats:
            return
        if not self._ran:
            raise ScaledotError(
                "nothing was observed: the model did not run inside the context, or it ran in a "
                "graph made of more than the model: compile the model itself, torch.compile(model)"
            )
        raise ScaledotError(
            f"no attention was observed: {_some(self._attention_paths()) or 'this model'} computes "
            "its softmax itself; use a version of it that calls "
            "torch.nn.functional.scaled_dot_product_attention, nn.MultiheadAttention or "
            "transformers' AttentionInterface, or call scaledot.attention in its place"
        )


def _merged(path: str, a: HeadStats, b: HeadStats) -> HeadStats:
    try:
        return heads.merge(a, b)
    except ValueError as error:
        raise ScaledotError(f"{path}: {error}") from None


_PUT_IN = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def own_path(name: str) -> str:
    """A module's path without what torch.compile, FSDP and checkpoint wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _PUT_IN)


def _inside(path: str, parent: str) -> bool:
    return path.startswith(f"{parent}.")


def _some(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown} … ({len(names)} in all)" if len(names) > limit else shown


def _size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / (1 << 20):.1f} MiB"


def _slice(at: slice | int) -> slice:
    if isinstance(at, int):
        return slice(at, at + 1 if at != -1 else None)
    if at.step not in (None, 1):
        raise ValueError(f"a tile's slice has step 1, got {at.step}")
    return at


# Hooks: which module is running

_PLAIN = ("torch.nn.", "transformers.pytorch_utils", "transformers.activations")
"""Where the leaves are (Linear, LayerNorm, Conv1D, activations …) that call no attention."""


@cache
def _parameters(module: type[nn.Module]) -> Mapping[str, int]:
    """Position of each parameter of a module's forward."""
    try:
        names = list(inspect.signature(module.forward).parameters)[1:]
    except (TypeError, ValueError):
        return {}
    return {name: i for i, name in enumerate(names)}


def _frame(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    known = _parameters(type(module))  # type: ignore[arg-type]
    about = said(module, args, kwargs, known)
    _, stops, query_mask, *_ = about
    tokens, documents = _text(args, kwargs, known, stops, query_mask)
    mask = _given(args, kwargs, known, "attention_mask") if stops else None
    own_mask = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() > 2)
    return Frame(path, module, *about, tokens, documents, own_mask)


def _given(
    args: tuple[Any, ...], kwargs: dict[str, Any], known: Mapping[str, int], name: str
) -> Any:
    at = known.get(name, len(args))
    return args[at] if at < len(args) else kwargs.get(name)


def said(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: Mapping[str, int]
) -> tuple[bool, bool, Tensor | None, int, bool]:
    """What a module's arguments say: `Frame`'s fields after the module. known: `_parameters`."""

    cross = any(
        _given(args, kwargs, known, name) is not None
        for name in ("key_value_states", "encoder_hidden_states")
        if name in known
    )
    reads_text = "input_ids" in known or "inputs_embeds" in known
    query_mask, length = None, 0
    if reads_text:
        ids = _given(args, kwargs, known, "input_ids")
        ids = _given(args, kwargs, known, "inputs_embeds") if ids is None else ids
        length = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() > 1 else 0
        mask = _given(args, kwargs, known, "attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            query_mask = mask.bool()
    elif isinstance(padding := _given(args, kwargs, known, "tgt_key_padding_mask"), Tensor):
        query_mask = ~padding if padding.dtype == torch.bool else padding == 0
        query_mask = query_mask.reshape(-1, query_mask.shape[-1])
        length, reads_text = query_mask.shape[1], True
    wants = _given(args, kwargs, known, "output_attentions")
    if wants is None:
        wants = getattr(getattr(module, "config", None), "output_attentions", False)
    stops = reads_text or any(name in known for name in _OTHER_INPUTS)
    return cross, stops, query_mask, length, wants is True


def _text(
    args: tuple[Any, ...], kwargs: dict[str, Any], known: Mapping[str, int], stops: bool,
    real: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(token ids, document numbers) that a module's arguments hold."""
    ids = _integers(_given(args, kwargs, known, "input_ids"), 2) if stops else None
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if (ends := _integers(_given(args, kwargs, known, name), 1)) is not None:
            return ids, _between(ends)
    positions = _integers(_given(args, kwargs, known, "position_ids"), 2) if stops else None
    return ids, None if positions is None else _restarts(positions, real)


def _integers(x: Any, axes: int) -> Tensor | None:
    """x where it is a tensor of integers with so many axes."""
    if not isinstance(x, Tensor) or x.dim() != axes or x.device.type == "meta":
        return None
    return x.detach() if x.dtype in (torch.int64, torch.int32) else None


def _between(ends: Tensor) -> Tensor | None:
    """Document numbers, (1, length), from 0 and the ends of each document; None for one."""
    if len(ends) < 3:
        return None
    return torch.repeat_interleave(ends.diff().clamp(min=0))[None]


def _restarts(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """Document numbers from positions that begin again inside a row; None where none does.

    A document begins where a position is smaller than the one before, or, in such a row, repeats
    its first value: a document of one token. Between real tokens only: padding may have any
    positions.
    """
    before, after = positions[:, :-1], positions[:, 1:]
    begins = after < before
    if real is not None and real.shape == positions.shape:
        begins = begins & real[:, :-1] & real[:, 1:]
    packed = begins.any(-1, keepdim=True)
    if not bool(packed.any()):
        return None
    begins = begins | (packed & (after == before) & (after == positions[:, :1]))
    return F.pad(begins.to(torch.int64), (1, 0)).cumsum(-1)


def gradients_wanted() -> bool:
    """Whether a module runs whose gradients an observation waits for."""
    watching = any(seen._gradients and seen._frames for seen in tuple(_LOOKING))
    return watching and torch.is_grad_enabled()


def weights_wanted() -> bool:
    """Whether a running module that is observed was asked for its attention weights."""
    return any(frame.wants_weights for seen in tuple(_LOOKING) for frame in seen._frames)


@contextmanager
def _hooked(model: nn.Module, seen: Observation) -> Iterator[None]:
    from scaledot import graph_route

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen._enter(module, args, kwargs)

    def leave(module: nn.Module, *_: Any) -> None:
        seen._leave(module)

    outermost = _compiled(model)
    # A hook inside a graph is called always in any case; to say so would have every observation
    # make a graph of its own.
    inside = {m for module in outermost for m in module.modules()} - outermost
    handles = []
    try:
        for module in model.modules():
            if _is_wrapper(module):
                continue
            leaf = not any(True for _ in module.children())
            if leaf and module is not model and type(module).__module__.startswith(_PLAIN):
                continue
            if module in outermost:
                # torch runs these before and after the graph.
                before, after = torch.compiler.disable(enter), torch.compiler.disable(leave)
            else:
                known = _parameters(type(module))  # type: ignore[arg-type]
                before, after = graph_route.hooks(module, enter, leave, known)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=module not in inside))
        yield
    finally:
        for handle in handles:
            handle.remove()
        seen._abandon()


@contextmanager
def _looking(seen: Observation) -> Iterator[None]:
    _LOOKING.append(seen)
    try:
        yield
    finally:
        _LOOKING.remove(seen)


@contextmanager
def observe(
    model: nn.Module,
    *,
    keep: Literal["qk"] | None = None,
    layers: Sequence[str | int] | None = None,
    last: int | None = None,
    keep_bytes: int = 2 * GIB,
    full: bool = False,
    delimiters: Tensor | None = None,
    gradients: bool = False,
) -> Iterator[Observation]:
    """Exact statistics of every attention head, of every forward of `model` inside the context.

    Any Hugging Face model that uses AttentionInterface, and any module that calls
    `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, `nn.TransformerEncoder`/`Decoder`,
    `scaledot.attention` or `scaledot.MultiheadAttention`, training or not. Padded queries and keys,
    empty and non-finite rows are counted and enter no statistic. A forward that gradient
    checkpointing repeats in backward is counted once. The model's settings are its own again
    afterwards, also after an exception; contexts may be nested. Attention weights that the model
    returns (`output_attentions`, `need_weights`) are real.

    keep: "qk" also keeps query, key and value of each call, for `seen.weights` and `seen.trace`.
    layers: keep these only, by module path or by position in `seen.heads`.
    last: keep the last calls of each only.
    keep_bytes: what may be kept.
    full: also measure what takes more work on q and k: other scales (whatif.sweep); local,
    delimiter, duplicate and induction mass (roles.roles); the spread of attended values. It takes
    about the time of another attention.
    delimiters: ids of tokens that divide the text, as `roles.delimiters(tokenizer)` gives them.
    gradients: backward adds the row measures "transmission" (`heads.transmission_of`) and
    "gradient_norm", ‖∂/∂q‖ of the loss as it is scaled, to the statistics of the path whose forward
    it follows; each backward counts. What reaches a query by way of returned weights is in neither.
    Parameters get the same gradients, bit for bit. Nothing is added where no backward comes, as
    after a forward under no_grad or of a frozen part. What is compiled runs uncompiled meanwhile.

    `is_causal=True` inside the model means what it means to torch, top-left. Dropout draws other
    random numbers than unobserved. Forwards of several threads are counted, but nn.Module code
    that calls torch's own attention only in the thread that opened the context.

    A compiled model (torch.compile(model), model.compile() or model.forward = torch.compile(…)) is
    observed inside its graph, which is made anew for the first observation and again used unchanged
    after it. transformers' masks are dense there, n×n. A graph of more than the model, such as a
    compiled training step, is seen where transformers' interface is called, else not. Gradient
    checkpointing inside a graph fails under observation, with torch's own error.

    Error: `TOLERANCE` an attention call, rounding alone, padded positions included
    (tests/test_families.py). With statistics or without, `scaledot.attention` gives the same bits.
    Raises: ScaledotError for an observation that saw nothing, and before more than keep_bytes would
    be kept; ValueError for arguments that do not fit.

    >>> layer = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    >>> with observe(layer) as seen:
    ...     _ = layer(torch.randn(1, 5, 16))
    >>> list(seen.heads), seen.heads["self_attn"].measures["entropy"].count
    (['self_attn'], tensor([5, 5]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"observe needs an nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    if keep not in (None, "qk"):
        raise ValueError(f'keep is {keep!r}: pass "qk" or None')
    if keep is None and (layers is not None or last is not None):
        raise ValueError('layers and last say what to keep: pass keep="qk" with them')
    if last is not None and last < 1:
        raise ValueError(f"last is {last}: pass at least 1 call")
    if delimiters is not None and not full:
        raise ValueError("delimiters are measured with full=True: pass both")
    seen = Observation(
        model, keep=keep is not None, layers=layers, last=last, keep_bytes=keep_bytes,
        full=full, delimiters=delimiters,
        gradients=gradients,
    )  # fmt: skip
    with looking(model, seen):
        yield seen
    seen.require_something()


@contextmanager
def looking(model: nn.Module, seen: Observation) -> Iterator[None]:
    """Every attention of the model goes through `attend`, which gives it to `seen`."""
    from scaledot.torch_route import slow_path

    with ExitStack() as context:
        context.enter_context(_looking(seen))
        if seen._gradients:
            # A graph's backward is a graph too, made with it; nothing in it hands over anything.
            context.enter_context(held("stance", _nothing_compiled))
        context.enter_context(_hooked(model, seen))
        context.enter_context(slow_path())
        if _from_transformers(model):
            from scaledot.huggingface import routed

            context.enter_context(routed(model))
        yield


def _nothing_compiled() -> Callable[[], object]:
    return partial(torch.compiler.set_stance("force_eager").__exit__, None, None, None)


_HELD: dict[object, tuple[Callable[[], object], int]] = {}
_HOLDING = threading.Lock()


@contextmanager
def held(setting: object, begin: Callable[[], Callable[[], object]]) -> Iterator[None]:
    """A setting that several observations need at a time. begin makes it and returns what undoes
    that: the last to end, in whatever order they end, puts back what the first found."""
    with _HOLDING:
        undo = begin()
        first, holders = _HELD.get(setting, (undo, 0))
        _HELD[setting] = first, holders + 1
    try:
        yield
    finally:
        with _HOLDING:
            first, holders = _HELD.pop(setting)
            if holders > 1:
                _HELD[setting] = first, holders - 1
            else:
                first()


def _from_transformers(model: nn.Module) -> bool:
    """Whether a class in the model comes from transformers, so that it is imported already."""
    return any(
        base.__module__.startswith("transformers.")
        for kind in {type(m) for m in model.modules()}
        for base in kind.__mro__
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in its wrapper for data parallelism, so that paths are its own."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        assert isinstance(model.module, nn.Module)
        model = model.module
    return model


def itself(model: nn.Module) -> nn.Module:
    """The model without what data parallelism and torch.compile put around it, in any order."""
    while (inner := _uncompiled(unwrapped(model))) is not model:
        model = inner
    return model


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what torch.compile(module) puts around another."""
    return type(module).__name__ == "OptimizedModule"


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model itself where torch.compile(model) was given."""
    inner = model._orig_mod if _is_wrapper(model) else model
    assert isinstance(inner, nn.Module)
    return inner


def _compiled(model: nn.Module) -> set[nn.Module]:
    """Modules that are compiled whole, in any of torch's three ways."""
    return {
        _uncompiled(m)
        for m in model.modules()
        if _is_wrapper(m)
        or getattr(m, "_compiled_call_impl", None) is not None  # module.compile()
        or hasattr(m.forward, "_torchdynamo_orig_callable")  # m.forward = torch.compile(m.forward)
    }

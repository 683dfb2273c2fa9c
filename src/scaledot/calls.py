"""One attention as a model computed it: its inputs, what each query saw, and what that adds up to.

`Attended` holds a call; `weights` rebuilds any tile of its weights from lse; `statistics` sums it
up by heads, without padding; `ride` computes one together with what a full observation asks of its
pass; `describe` says how the module was called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot import moments, operators, precision, reference, roles, spread, whatif
from scaledot.checks import Problem
from scaledot.frames import Frame, Where, reading
from scaledot.heads import WATCHED, HeadStats
from scaledot.kernels import Terms
from scaledot.masks import Visibility
from scaledot.parts import NOT_IN_PARTS, PART
from scaledot.rows import RowStats

_CROSS_NAME = re.compile(r"cross|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """How one attention module is called.

    kind: "self" or "cross". causal: no query sees a later key. heads, kv_heads, d_k: its shape.
    scale: the factor applied to QKᵀ. softcap: None without. sinks: whether it has any.
    window: W, causal, the query's own key included; or (left, right) besides it; None without.
    kernel: what computed it. module: the class of the module. path: where that is in the model;
    index: which of its calls in one forward, None where there is one. calls: how many were
    recorded; queries, keys: the longest.
    """

    path: str
    index: int | None
    module: str
    kind: Literal["self", "cross"]
    causal: bool
    heads: int
    kv_heads: int
    d_k: int
    scale: float
    softcap: float | None
    sinks: bool
    window: int | tuple[int, int] | None
    kernel: str
    calls: int
    queries: int
    keys: int


@dataclass(frozen=True, eq=False)
class Features:
    """Features of keys whose attention-weighted means are wanted, by name; middle is the common
    value that "squares" are about."""

    names: tuple[str, ...]
    columns: Float[Tensor, "batch kv_heads keys c"]
    middle: Float[Tensor, "batch kv_heads 1 value_dim"] | None


@dataclass(frozen=True, eq=False)
class Ridden:
    """What rode along in an attention's pass: rows by octave of the scale, means of features."""

    octaves: Mapping[int, RowStats]
    features: Features
    means: Float[Tensor, "batch heads queries c"]


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention as it was computed: the inputs, what each query could see, the row statistics.

    uniform: an empty row weighs every key equally, as softmax over finfo.min does, and not 0.
    earlier: keys of the text that the cache has dropped. output: softmax(…)·V without dropout and
    before any rounding to a smaller dtype, (batch, heads, queries, value_dim), where it is at hand.
    ridden: what its pass over q and k has found besides.
    """

    problem: Problem
    seen: Visibility
    rows: RowStats
    uniform: bool = False
    earlier: int = 0
    output: Tensor | None = None
    ridden: Ridden | None = None

    @property
    def bytes(self) -> int:
        p = self.problem
        tensors = [p.query, p.key, self.rows.lse] + ([p.value] if p.value is not None else [])
        return sum(x.numel() * x.element_size() for x in tensors)

    def copy(self) -> Attended:
        """Query, key and value in memory of their own: a cache may overwrite what it lent."""

        def own(x: Tensor) -> Tensor:
            return x.detach().clone()

        p = self.problem
        p = replace(
            p,
            query=own(p.query),
            key=own(p.key),
            value=None if p.value is None else own(p.value),
            sinks=None if p.sinks is None else own(p.sinks),
        )
        return replace(self, problem=p, rows=self.rows.map(Tensor.detach), output=None, ridden=None)


def weights(
    attended: Attended, batch: slice, head: slice, rows: slice, keys: slice
) -> Float[Tensor, "batch heads queries keys"]:
    """softmax(QKᵀ·scale + mask) of one tile, exactly, from lse: nothing else is formed.

    float32, or float64 for float64 inputs. Weights before dropout; a row that sees nothing has
    weight 0, unless its softmax ran over finfo.min.
    """
    p, stats = attended.problem, attended.rows
    lse = stats.lse[batch, head, rows, None]
    logits, hidden = _logits(attended, batch, head, rows, keys)
    result = (logits - torch.where(lse == float("-inf"), 0.0, lse)).exp()
    if hidden is not None:
        result = result.masked_fill(hidden, 0.0)
    empty = stats.visible[batch, head, rows, None] == 0
    if p.sinks is None and bool(empty.any()):
        result = torch.where(empty, _empty_weights(attended, batch, head, rows, keys), result)
    return result


def _logits(
    attended: Attended, batch: slice, head: slice, rows: slice, keys: slice
) -> tuple[Tensor, Tensor | None]:
    """(what enters softmax, what is hidden from it) of one tile."""
    p, seen = attended.problem, attended.seen.part(batch, head)
    dtype = attended.rows.lse.dtype
    kv = torch.arange(p.query.shape[1], device=p.key.device)[head] // p.group
    q, k = p.query[batch, head, rows].to(dtype), p.key[batch, kv, keys].to(dtype)
    logits = (q * p.scale) @ k.mT
    if p.softcap is not None:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    q0, q1, _ = rows.indices(p.query.shape[2])
    k0, k1, _ = keys.indices(p.key.shape[2])
    hidden, bias = seen.block(q0, q1, k0, k1)
    if bias is not None:
        logits = logits + bias.to(dtype).clamp(min=torch.finfo(dtype).min)
    return logits, hidden


def _empty_weights(
    attended: Attended, batch: slice, head: slice, rows: slice, keys: slice
) -> Tensor | float:
    """The weights of rows that see nothing, as the softmax over what a finfo.min mask leaves."""
    if attended.seen.bias is not None:
        logits, hidden = _logits(attended, batch, head, rows, slice(0, None))
        if hidden is not None:
            logits = logits.masked_fill(hidden, float("-inf"))
        return logits.softmax(-1).nan_to_num(0.0)[..., keys]
    return 1 / attended.problem.key.shape[2] if attended.uniform else 0.0


def four_axes(attended: Attended) -> Attended:
    """Row statistics as (batch, heads, queries), whatever batch axes the caller had."""
    shape = attended.problem.query.shape[:3]
    output = attended.output
    if output is not None:
        output = output.detach().reshape(*shape, output.shape[-1])
    return replace(attended, rows=attended.rows.map(lambda x: x.reshape(shape)), output=output)


def statistics(
    attended: Attended,
    frames: Sequence[Frame],
    *,
    self_attention: bool,
    full: bool = False,
    delimiters: Int[Tensor, " ids"] | None = None,
) -> HeadStats:
    """Head statistics of one call: rows, and what needs the keys themselves, in O(n·d); with `full`
    also what needs further passes over them."""
    p, seen, rows = attended.problem, attended.seen, attended.rows
    unmasked = _unmasked_keys(seen)
    seen_keys = _seen_keys(seen, unmasked)
    real = _real(attended, unmasked, frames, self_attention)
    extra = roles.positions(p, seen, rows, self_attention=self_attention)
    if attended.earlier:
        _forget_first(extra, seen)
    extra["query_norm"] = _norm(p.query)
    extra |= moments.row_budget(p, seen, rows, real=real)
    extra |= precision.storage(p, seen, rows)
    extra |= reference.excess(p, rows)
    if full:
        extra |= _further(attended, frames, self_attention, delimiters)
    key_norm = _key_norm(p, seen_keys)
    if PART.get() is not None:
        for name in ("key_bias", *NOT_IN_PARTS):  # the first comes with the last part: `Ledger`
            extra.pop(name, None)
        # Earlier keys were counted with the part that brought them.
        key_norm = key_norm[:, :, key_norm.shape[2] - p.query.shape[2] :]
    return _summed_up(attended, real, extra, key_norm)


def _key_norm(p: Problem, seen_keys: Tensor | None) -> Tensor:
    norm = _norm(p.key)
    return norm if seen_keys is None else norm.masked_fill(~seen_keys[:, None], float("nan"))


def _summed_up(
    attended: Attended, real: Tensor | None, extra: dict[str, Tensor], key_norm: Tensor | None,
    names: Sequence[str] | None = None,
) -> HeadStats:  # fmt: skip
    p = attended.problem
    return HeadStats.of(
        attended.rows,
        scale=p.scale,
        d_k=p.query.shape[3],
        kv_heads=p.key.shape[1],
        real=real,
        extra=extra,
        key_norm=key_norm,
        names=names,
    )


def watched(
    attended: Attended, frames: Sequence[Frame], *, self_attention: bool, norms: bool
) -> HeadStats:
    """Head statistics of one call by the measures of `heads.WATCHED` alone, and the norms of
    queries and keys if asked for: what a training run can afford at every step."""
    p, unmasked = attended.problem, _unmasked_keys(attended.seen)
    real = _real(attended, unmasked, frames, self_attention)
    if not norms:
        return _summed_up(attended, real, {}, None, WATCHED)
    key_norm = _key_norm(p, _seen_keys(attended.seen, unmasked))
    return _summed_up(attended, real, {"query_norm": _norm(p.query)}, key_norm, WATCHED)


def real_queries(
    attended: Attended, frames: Sequence[Frame], *, self_attention: bool
) -> Bool[Tensor, "batch queries"] | None:
    """False for queries that are padding, as `statistics` leaves them out; None for none."""
    return _real(attended, _unmasked_keys(attended.seen), frames, self_attention)


def ride(
    problem: Problem, seen: Visibility, features: Features, kernel: str
) -> tuple[Tensor, RowStats, Ridden]:
    """(output, row statistics, what rode along) of an attention, in one pass of `kernel`.

    The output is the same to the bit as without the features and octaves.
    """
    assert problem.value is not None  # it is attended
    width = problem.value.shape[3]
    octaves = [e for e in whatif.exponents(problem.query.shape[3], problem.scale) if e >= 0]
    swept, both = operators.implementation(kernel).sweep(
        problem.query, problem.key, seen, Terms(problem.scale, None, problem.sinks, 0.0, 0),
        [2.0**e for e in octaves], torch.cat([problem.value, features.columns], -1),
    )  # fmt: skip
    assert both is not None  # values were given
    ridden = Ridden(dict(zip(octaves, swept, strict=True)), features, both[..., width:])
    return both[..., :width], swept[0], ridden


def features_of(
    problem: Problem, seen: Visibility, frames: Sequence[Frame], delimiters: Tensor | None
) -> Features | None:
    """The features of a call's keys, None for none: how far values lie from their mean, and which
    keys are delimiters."""
    columns: dict[str, Tensor] = {}
    middle = None
    if problem.value is not None:
        middle = spread.centre(problem, seen)
        columns["squares"] = spread.squares(problem, middle)
    tokens = _key_tokens(problem, frames)
    if delimiters is not None and tokens is not None:
        columns["delimiter"] = roles.marked(tokens, delimiters)
    if not columns:
        return None
    shape = (*problem.key.shape[:3], len(columns))
    stacked = torch.empty(shape, dtype=_accumulated(problem.key), device=problem.key.device)
    for place, column in enumerate(columns.values()):
        stacked[..., place] = column
    return Features(tuple(columns), stacked, middle)


def _key_tokens(problem: Problem, frames: Sequence[Frame]) -> Int[Tensor, "#batch keys"] | None:
    """The ids of the tokens that the keys are of; None where they are not known."""
    queries, keys = problem.query.shape[2], problem.key.shape[2]
    part = PART.get()
    if part is not None:
        return part.tokens[:, :keys] if keys == part.stop else None
    text = reading(frames)
    tokens = None if text is None else text.tokens
    return tokens if tokens is not None and queries == keys == tokens.shape[1] else None


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _further(
    attended: Attended, frames: Sequence[Frame], self_attention: bool, delimiters: Tensor | None
) -> dict[str, Tensor]:
    """What takes passes of its own: other scales, roles by token and distance, the spread of the
    attended values."""
    p, seen, rows, ridden = attended.problem, attended.seen, attended.rows, attended.ridden
    features = features_of(p, seen, frames, delimiters) if ridden is None else ridden.features
    means: dict[str, Tensor] = {}
    if ridden is not None:
        swept = whatif.sweep(p, seen, rows, ridden.octaves)
        means = dict(zip(ridden.features.names, ridden.means.unbind(-1), strict=True))
    elif features is not None:
        swept, weighed = whatif.sweep_and_weigh(p, seen, rows, features.columns)
        means = dict(zip(features.names, weighed.unbind(-1), strict=True))
    else:
        swept = whatif.sweep(p, seen, rows)
    found = roles.roles(
        p, seen, rows, self_attention=self_attention, tokens=_key_tokens(p, frames),
        delimiters=delimiters, delimiter_mass=means.get("delimiter"),
    )  # fmt: skip
    if features is not None and features.middle is not None:
        second = means["squares"]
        output = _exact_output(attended)
        found |= spread.value_spread(p, seen, rows, output, second, features.middle)
    return found | swept


def _exact_output(attended: Attended) -> Tensor:
    """softmax(…)·V without dropout, in float32 or better."""
    p = attended.problem
    if attended.output is not None:
        return attended.output
    assert p.value is not None  # asked for
    terms = Terms(p.scale, p.softcap, p.sinks, 0.0, 0)
    run = operators.implementation(attended.rows.kernel).forward
    return run(p.query, p.key, p.value, attended.seen, terms, statistics=False)[0]


def _forget_first(extra: dict[str, Tensor], seen: Visibility) -> None:
    """A sliding cache has dropped the first token of texts whose oldest key in it is no padding."""
    gone = torch.ones(1, 1, dtype=torch.bool, device=seen.device)
    if seen.keep is not None and seen.keep.shape[1]:
        gone = seen.keep[:, :1]
    for name in ("first", "chance.first"):
        if name in extra:
            extra[name] = extra[name].masked_fill(gone[:, :, None], float("nan"))


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def _unmasked_keys(seen: Visibility) -> Bool[Tensor, "b keys"] | None:
    """Keys that the padding mask shows, or else the tensor mask to some query; None for all."""
    return seen.shown_to_any() if seen.keep is None else seen.keep


def _seen_keys(seen: Visibility, unmasked: Tensor | None) -> Bool[Tensor, "b keys"] | None:
    """Those of them that causality and window leave to some query."""
    queries, keys = seen.shape[2:]
    low = 0 if seen.left is None else seen.offset - seen.left
    high = keys if seen.right is None else queries + seen.offset + seen.right
    if low <= 0 and high >= keys:
        return unmasked
    index = torch.arange(keys, device=seen.device)
    inside = ((index >= low) & (index < high))[None]
    return inside if unmasked is None else inside & unmasked


def _real(
    attended: Attended, unmasked: Tensor | None, frames: Sequence[Frame], self_attention: bool
) -> Bool[Tensor, "batch queries"] | None:
    """Queries that are not padding: in self-attention some query sees their own key; and the
    padding mask that the model was given says so, where it is about these queries."""
    batch, _, queries, _ = attended.problem.query.shape
    keys = attended.problem.key.shape[2]
    real = None
    if self_attention and unmasked is not None and keys:
        own = torch.arange(queries, device=unmasked.device) + attended.seen.diagonal
        inside = (own >= 0) & (own < keys)
        real = unmasked[:, own.clamp(0, keys - 1)] | ~inside
    for frame in reversed(frames):
        if frame.stops:
            given = frame.query_mask
            if given is not None and frame.length == queries <= given.shape[1]:
                given = given[:, given.shape[1] - queries :].to(attended.problem.query.device)
                if given.shape[0] in (1, batch):
                    real = given if real is None else real & given
            break
    return None if real is None else real.expand(batch, queries)


def kind_of(where: Where, seen: Visibility, given: bool | None) -> Literal["self", "cross"]:
    """Self- or cross-attention: what the caller knows, the module's arguments, its name, shapes."""
    if given is not None:
        return "self" if given else "cross"
    for frame in reversed(where.frames):
        if frame.module is where.module:
            if frame.cross:
                return "cross"
            break
    if _CROSS_NAME.search(where.path.rsplit(".", 2)[-1]):
        return "cross"
    queries, keys = seen.shape[2:]
    return "self" if queries in (keys, 1) or seen.right is not None or queries < keys else "cross"


def describe(
    where: Where, attended: Attended, kind: Literal["self", "cross"], window: int | None
) -> Call:
    p, seen = attended.problem, attended.seen
    causal = seen.right == 0 or _looks_causal(seen)
    shown: int | tuple[int, int] | None = window
    if seen.left is not None:
        shown = seen.left + 1 if seen.right == 0 else (seen.left, _unbounded(seen.right))
    return Call(
        path=where.path,
        index=None,
        module=type(where.module).__name__,
        kind=kind,
        causal=causal,
        heads=p.query.shape[1],
        kv_heads=p.key.shape[1],
        d_k=p.query.shape[3],
        scale=p.scale,
        softcap=p.softcap,
        sinks=p.sinks is not None,
        window=shown,
        kernel=attended.rows.kernel,
        calls=1,
        queries=p.query.shape[2],
        keys=p.key.shape[2],
    )


def _unbounded(side: int | None) -> int:
    return -1 if side is None else side


def lengthen(call: Call, attended: Attended) -> Call:
    queries, keys = attended.problem.query.shape[2], attended.problem.key.shape[2]
    return replace(
        call,
        calls=call.calls + 1,
        queries=max(call.queries, queries),
        keys=max(call.keys, keys),
    )


def _looks_causal(seen: Visibility) -> bool:
    """Whether a tensor mask hides every later key and leaves the query's own visible."""
    queries = seen.shape[2]
    dense = [x for x in (seen.allowed, seen.bias) if x is not None and x.shape[2] > 1]
    if not dense or queries < 2 or dense[0].shape[3] == 1:
        return False
    x = dense[0][:1, :1]
    x = x if x.dtype == torch.bool else x > seen.floor
    tokens = x[..., : queries + seen.diagonal]
    return not bool(tokens.triu(seen.diagonal + 1).any()) and bool(tokens.any())

"""Which query may attend to which key: causal, window, padding, packed documents.

`Mask` says it in symbols, O(n) numbers whatever the lengths. A boolean mask's True means
"may attend", as in `F.scaled_dot_product_attention` (and the opposite of `nn.MultiheadAttention`).

With 3 queries and 5 keys, ■ visible:

    causal="top_left"      causal="bottom_right"     bottom_right, window=2
    ■ · · · ·              ■ ■ ■ · ·                 · ■ ■ · ·
    ■ ■ · · ·              ■ ■ ■ ■ ·                 · · ■ ■ ·
    ■ ■ ■ · ·              ■ ■ ■ ■ ■                 · · · ■ ■

`resolve` fits a mask to a problem's shape; the result, `Visibility`, gives any block of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot import checks

Alignment = Literal["top_left", "bottom_right"]


@dataclass(frozen=True, eq=False)
class Mask:
    """A symbolic attention mask, O(n) in memory; `&` combines, and it is passed as `attn_mask`.

    causal: "top_left" (query i sees keys 0…i) or "bottom_right" (the last query sees every key).
    window: W, causal, W keys with the query's own; or (left, right) keys besides it, −1 unbounded.
    lengths: (batch,) how many keys of each sequence are real, counted from the left.
    keys: bool (batch, keys), True for a real key: padding on any side.
    segments: int (batch, length) document ids: a query sees keys of its own document only.
        A pair (query ids, key ids) where the two differ.
    dense: a bool or additive tensor that applies too, (batch, heads, queries, keys) or axes of 1.

    Raises: TypeError or ValueError naming the field.

    >>> Mask(causal="bottom_right") & Mask(window=512)
    Mask(causal='bottom_right', window=(511, 0))
    """

    causal: Alignment | None = None
    window: int | tuple[int, int] | None = None
    lengths: Int[Tensor, " batch"] | Sequence[int] | None = None
    keys: Bool[Tensor, "batch keys"] | None = None
    segments: Tensor | tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        if self.causal not in (None, "top_left", "bottom_right"):
            raise ValueError(
                f'Mask causal is {self.causal!r}: pass "top_left", "bottom_right" or None'
            )
        left, right = checks.window(self.window)
        if self.window is not None:
            pair = (-1 if left is None else left, -1 if right is None else right)
            object.__setattr__(self, "window", pair)
        if self.lengths is not None and not isinstance(self.lengths, Tensor):
            object.__setattr__(self, "lengths", torch.as_tensor(self.lengths))
        if self.dense is not None:
            checks.mask_dtype(self.dense, "Mask dense")

    def __repr__(self) -> str:
        shown = []
        for name in ("causal", "window", "lengths", "keys", "segments", "dense"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}={tuple(value.shape)}")
            elif value is not None:
                shown.append(f"{name}={value!r}")
        return f"Mask({', '.join(shown)})"

    def __and__(self, other: Mask | Tensor) -> Mask:
        """Visible where both are; additive parts add."""
        if isinstance(other, Tensor):
            other = Mask(dense=other)
        if not isinstance(other, Mask):
            return NotImplemented
        if self.causal and other.causal and self.causal != other.causal:
            raise ValueError("Mask & Mask: one is top_left, the other bottom_right")
        return Mask(
            self.causal or other.causal,
            _tighter(self.window, other.window),
            _both(self.lengths, other.lengths, torch.minimum),
            _both(self.keys, other.keys, torch.logical_and),
            _both(self.segments, other.segments, _pair_ids),
            _both(self.dense, other.dense, _combine_dense),
        )

    __rand__ = __and__


def _tighter(a, b):
    if a is None or b is None:
        return a if b is None else b
    return tuple(y if x == -1 else x if y == -1 else min(x, y) for x, y in zip(a, b, strict=True))


def _both(a, b, join):
    if a is None or b is None:
        return a if b is None else b
    return join(a, b)


def _pair_ids(a, b):
    """Document ids that are equal only where both a's and b's are."""
    (a_query, a_key), _ = _renumber(a)
    (b_query, b_key), span = _renumber(b)
    return a_query * span + b_query, a_key * span + b_key


def _renumber(segments):
    """The same documents with ids from 0, so that two ids fit one integer; and how many there are.

    Ids may be of any size and integer type.
    """
    query, key = segments if isinstance(segments, tuple) else (segments, segments)
    values, place = torch.unique(torch.cat([query.flatten(), key.flatten()]), return_inverse=True)
    place = place.split([query.numel(), key.numel()])
    return (place[0].view(query.shape), place[1].view(key.shape)), len(values)


def _combine_dense(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype != torch.bool and b.dtype != torch.bool:
        if a.dtype != b.dtype:  # one's finfo.min would be an ordinary number in the other's
            raise TypeError(f"Mask & Mask: dense is {a.dtype} in one, {b.dtype} in the other")
        return a + b
    allowed, bias = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(allowed, bias, float("-inf"))


_READ = 64
"""Queries of a tensor mask that are looked at together."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """A mask fitted to (batch, heads, queries, keys): intervals, ids and tensors read in place.

    Query i may see keys i + offset − left … i + offset + right (None: unbounded), minus whatever
    `keep`, `segments` and `allowed` hide. `bias` is added to the scores; an entry at or below
    `floor` (half the most negative number of the bias's dtype) hides its key from the statistics
    but, as in torch, still decides the output of a row that sees nothing else.
    """

    shape: tuple[int, int, int, int]
    offset: int = 0
    left: int | None = None
    right: int | None = None
    keep: Bool[Tensor, "#batch keys"] | None = None
    segments: tuple[Int[Tensor, "#batch queries"], Int[Tensor, "#batch keys"]] | None = None
    allowed: Bool[Tensor, "#batch #heads #queries #keys"] | None = None
    bias: Float[Tensor, "#batch #heads #queries #keys"] | None = None
    device: torch.device | None = None

    @property
    def floor(self) -> float:
        return torch.finfo(self.bias.dtype).min / 2 if self.bias is not None else float("-inf")

    def span(self, q0: int, q1: int) -> tuple[int, int]:
        """The keys [k0, k1) that causality and window leave to queries q0 … q1−1."""
        keys = self.shape[3]
        k0 = 0 if self.left is None else q0 + self.offset - self.left
        k1 = keys if self.right is None else q1 + self.offset + self.right
        k0 = min(max(k0, 0), keys)
        return k0, max(min(k1, keys), k0)

    def part(self, batch: slice, heads: slice) -> Visibility:
        """The same for some batches and heads."""
        rows = range(self.shape[0])[batch], range(self.shape[1])[heads]
        segments = self.segments
        if segments is not None:
            segments = _part(segments[0], batch), _part(segments[1], batch)
        return replace(
            self,
            shape=(len(rows[0]), len(rows[1]), *self.shape[2:]),
            keep=None if self.keep is None else _part(self.keep, batch),
            segments=segments,
            allowed=None if self.allowed is None else _part(self.allowed, batch, heads),
            bias=None if self.bias is None else _part(self.bias, batch, heads),
        )

    def block(
        self, q0: int, q1: int, k0: int, k1: int
    ) -> tuple[
        Bool[Tensor, "#batch #heads #block_q #block_k"] | None,
        Float[Tensor, "#batch #heads #block_q #block_k"] | None,
    ]:
        """Which keys are hidden (True) in a block of queries and keys, and what is added there.

        Either is None when it says nothing; axes that do not matter have length 1. A bias of −inf
        counts as hidden.
        """
        hidden = []
        q_pos = torch.arange(q0, q1, device=self.device)[:, None] + self.offset
        k_pos = torch.arange(k0, k1, device=self.device)[None, :]
        if self.right is not None and k1 - 1 > q0 + self.offset + self.right:
            hidden.append((k_pos > q_pos + self.right)[None, None])
        if self.left is not None and k0 < q1 - 1 + self.offset - self.left:
            hidden.append((k_pos < q_pos - self.left)[None, None])
        if self.keep is not None:
            keep = self.keep[:, None, None, k0:k1]
            if not keep.all():
                hidden.append(~keep)
        if self.segments is not None:
            q_ids, k_ids = self.segments
            differs = q_ids[:, None, q0:q1, None] != k_ids[:, None, None, k0:k1]
            if differs.any():
                hidden.append(differs)
        if self.allowed is not None:
            hidden.append(~_cut(self.allowed, q0, q1, k0, k1))
        bias = _cut(self.bias, q0, q1, k0, k1) if self.bias is not None else None
        if bias is not None:
            removed = bias == float("-inf")
            if removed.any():
                hidden.append(removed)
        return reduce(torch.logical_or, hidden) if hidden else None, bias

    @property
    def diagonal(self) -> int:
        """The key position of query 0 itself: where its own token stands among the keys."""
        if self.left is None and self.right is None:
            return self.shape[3] - self.shape[2]
        return self.offset

    def at(
        self, index: Int[Tensor, "batch queries"]
    ) -> tuple[
        Bool[Tensor, "#batch #heads queries"], Float[Tensor, "#batch #heads queries"] | None
    ]:
        """(visible, bias) of one key a query; invisible too where the bias is at or below floor."""
        position = torch.arange(self.shape[2], device=index.device)[None] + self.offset
        visible = torch.ones_like(index, dtype=torch.bool)
        if self.right is not None:
            visible = visible & (index <= position + self.right)
        if self.left is not None:
            visible = visible & (index >= position - self.left)
        if self.keep is not None:
            visible = visible & self.keep.expand(len(index), -1).gather(1, index)
        if self.segments is not None:
            q_ids, k_ids = self.segments
            visible = visible & (k_ids.expand(len(index), -1).gather(1, index) == q_ids)
        visible = visible[:, None]
        if self.allowed is not None:
            visible = visible & self._pick(self.allowed, index)
        bias = None
        if self.bias is not None:
            bias = self._pick(self.bias, index)
            visible = visible & ~(bias <= self.floor)
        return visible, bias

    def _pick(self, x: Tensor, index: Tensor) -> Tensor:
        """x (b, h, q, k) at one key a query, as (batch, h, queries)."""
        x = x.expand(len(index), -1, index.shape[1], -1)
        if x.shape[3] == 1:
            return x[..., 0]
        at = index[:, None, :, None].expand(-1, x.shape[1], -1, 1)
        return x.gather(3, at)[..., 0]

    def first(self) -> Int[Tensor, "#batch queries"]:
        """The first real key of each query's own text, whatever causality or window hide."""
        queries, keys = self.shape[2:]
        if self.segments is None:
            real = self.keep
            if real is None:
                real = self.shown_to_any()
            if real is None:
                return torch.zeros(1, queries, dtype=torch.int64, device=self.device)
            return real.to(torch.uint8).argmax(-1, keepdim=True).expand(-1, queries)
        q_ids, k_ids = self.segments
        keep = torch.ones_like(k_ids, dtype=torch.bool) if self.keep is None else self.keep
        batch = max(len(q_ids), len(keep))
        q_ids, k_ids, keep = (x.expand(batch, -1) for x in (q_ids, k_ids, keep))
        result = q_ids.new_zeros(batch, queries)
        for b in range(batch):
            values, place = torch.unique(torch.cat([k_ids[b], q_ids[b]]), return_inverse=True)
            first = torch.full_like(values, keys)
            real = keep[b].nonzero()[:, 0]
            first.scatter_reduce_(0, place[real], real, "amin")
            result[b] = first[place[keys:]]
        return result

    def shown_to_any(self) -> Bool[Tensor, "b keys"] | None:
        """Keys that a tensor mask shows to some query of some head; None without one.

        Read some queries at a time: no second tensor of its size is made.
        """
        result = None
        for x in (self.allowed, self.bias):
            if x is None:
                continue
            part = torch.zeros(x.shape[0], x.shape[3], dtype=torch.bool, device=x.device)
            for rows in x.split(_READ, 2):
                part |= (rows if x.dtype == torch.bool else ~(rows <= self.floor)).any(2).any(1)
            part = part.expand(-1, self.shape[3])
            result = part if result is None else result & part
        return result


def _part(x: Tensor, *slices: slice) -> Tensor:
    """x at slices of its leading axes, those of length 1 left whole."""
    return x[tuple(s if n > 1 else slice(None) for s, n in zip(slices, x.shape, strict=False))]


def _cut(x: Tensor, q0: int, q1: int, k0: int, k1: int) -> Tensor:
    if x.shape[2] > 1:
        x = x[:, :, q0:q1]
    return x[..., k0:k1] if x.shape[3] > 1 else x


def resolve(
    problem: checks.Problem,
    attn_mask: Mask | Tensor | None = None,
    is_causal: bool | str = False,
    window: int | tuple[int, int] | None = None,
) -> Visibility:
    """Fit a mask, a causality and a window, all of which apply, to a problem.

    Raises: ValueError where lengths differ and no alignment was named, where a tensor does not
    broadcast, and for the 3-D mask that could be one a head or one a batch.
    """
    batch, heads, queries, _ = problem.query.shape
    keys = problem.key.shape[2]
    shape = (batch, heads, queries, keys)
    causal = checks.causal(is_causal, queries, keys)
    device = problem.query.device
    if attn_mask is None and window is None:
        offset = keys - queries if causal == "bottom_right" else 0
        return Visibility(shape, offset, None, 0 if causal else None, device=device)
    if attn_mask is not None and not isinstance(attn_mask, Mask):
        checks.mask_dtype(attn_mask, "attn_mask")
        attn_mask = Mask(dense=attn_mask)
    mask = attn_mask or Mask()
    if queries == keys and causal and mask.causal:
        mask = replace(mask, causal=causal)  # type: ignore[arg-type]  # equal lengths: both alignments are one
    mask = Mask(causal, window) & mask  # type: ignore[arg-type]

    left, right = checks.window(mask.window)
    if mask.window is not None and mask.causal is None:
        if right == 0:
            checks.alignment(queries, keys, f"window={mask.window}")
        # A two-sided window is FlashAttention's, and so is its alignment.
        offset = keys - queries
    else:
        offset = keys - queries if mask.causal == "bottom_right" else 0
    if mask.causal is not None:
        right = 0

    keep = _keep(mask, batch, keys, device)
    segments = _segments(mask, batch, queries, keys, device)
    allowed = bias = None
    if mask.dense is not None:
        checks.mask_axes(mask.dense, len(problem.batch_shape) + 3, batch, heads)
        dense = _fit(mask.dense, problem, shape)
        allowed, bias = (dense, None) if dense.dtype == torch.bool else (None, dense)
    return Visibility(shape, offset, left, right, keep, segments, allowed, bias, device)


def _table(x: Tensor) -> Tensor:
    """(…, length) as (batch, length)."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def _keep(mask: Mask, batch: int, keys: int, device: torch.device) -> Tensor | None:
    keep = None
    if mask.lengths is not None:
        lengths = torch.as_tensor(mask.lengths, device=device).reshape(-1)
        if lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise TypeError("Mask lengths must be integers")
        if len(lengths) not in (1, batch):
            raise ValueError(
                f"Mask lengths has {len(lengths)} entries: expected {batch}, the batch"
            )
        keep = torch.arange(keys, device=device)[None] < lengths[:, None]
    if mask.keys is not None:
        real = _table(mask.keys.to(device))
        if real.dtype != torch.bool:
            raise TypeError("Mask keys must be bool, True for a real key")
        if real.shape[0] not in (1, batch) or real.shape[1] != keys:
            raise ValueError(
                f"Mask keys has shape {tuple(real.shape)}: expected ({batch}, {keys}), "
                "batch and keys"
            )
        keep = real if keep is None else keep & real
    return keep


def _segments(
    mask: Mask, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if mask.segments is None:
        return None
    given = mask.segments if isinstance(mask.segments, tuple) else (mask.segments, mask.segments)
    ids = []
    for name, x, length in zip(("query", "key"), given, (queries, keys), strict=True):
        x = _table(torch.as_tensor(x, device=device))
        if x.is_floating_point():
            raise TypeError("Mask segments must be integers, one document id a token")
        if x.shape[0] not in (1, batch) or x.shape[1] != length:
            raise ValueError(
                f"Mask segments has shape {tuple(x.shape)} for the {name} axis: "
                f"expected ({batch}, {length})"
            )
        ids.append(x.to(torch.int64))
    return ids[0], ids[1]


def _fit(dense: Tensor, problem: checks.Problem, shape: tuple[int, int, int, int]) -> Tensor:
    """View a tensor mask as (batch|1, heads|1, queries|1, keys|1) without expanding it."""
    if dense.device != problem.query.device:
        raise ValueError(
            f"query is on {problem.query.device}, attn_mask on {dense.device}: move them together"
        )
    full = (*problem.batch_shape, *shape[1:]) if problem.has_heads else shape[2:]
    padded = dense[(None,) * (len(full) - dense.dim())] if dense.dim() <= len(full) else None
    if padded is None or any(n not in (1, m) for n, m in zip(padded.shape, full, strict=True)):
        raise checks.mask_shape(dense, full)
    if not problem.has_heads:
        return padded[None, None]
    lead, rest = padded.shape[:-3], padded.shape[-3:]
    if all(n == 1 for n in lead):
        return padded.reshape(1, *rest)
    return padded.expand(*problem.batch_shape, *rest).reshape(shape[0], *rest)

"""A structured mask as intervals: keys put in an order in which each query sees neighbours.

Each interval is then cut into at most two parts, one that starts where a run of keys starts and one
that ends where one ends, so that sums over a row's keys are prefix sums and nothing is subtracted:

    causal: one run          documents: one run each       window of W: runs of W keys, 2 parts
    ■ · · · · ·              ■ · · · · ·                   ■ · · | · · ·
    ■ ■ · · · ·              ■ ■ · · · ·                   ■ ■ · | · · ·
    ■ ■ ■ · · ·              · · ■ · · ·                   ■ ■ ■ | · · ·
    ■ ■ ■ ■ · ·              · · ■ ■ · ·                   · ■ ■ | ■ · ·
    ■ ■ ■ ■ ■ ·              · · ■ ■ ■ ·                   · · ■ | ■ ■ ·

Both are prefixes, the second with the keys read backwards. docs/maths.md#score-moments
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot.masks import Visibility

_WORK = 1 << 20
"""Numbers in a work tensor of the dense route."""


def structured(seen: Visibility) -> Visibility | None:
    """The same without tensors, where they say only which keys are real; None where they say more.

    What is added to the scores hides keys at or below `seen.floor`, and is left out otherwise.
    """
    seen = _shown(seen)
    if seen.allowed is None:
        return seen
    if seen.allowed.shape[1:3] != (1, 1):
        return None
    keep = seen.allowed[:, 0, 0].expand(-1, seen.shape[3])
    return replace(seen, allowed=None, keep=keep if seen.keep is None else keep & seen.keep)


def recognised(seen: Visibility) -> Visibility | None:
    """`structured`, of tensors too that are causality and padding written out; None for others.

    Every entry is compared, until one differs: n² of them, which is little beside n²·d.
    """
    fit = structured(seen)
    bounded = seen.left is not None or seen.right is not None
    if fit is not None or bounded or seen.segments is not None:
        return fit
    seen = _shown(seen)
    allowed = seen.allowed
    if allowed is None or allowed.shape[1] > 1:
        return None
    batch, _, queries, keys = seen.shape
    keep = allowed.any(2)[:, 0].expand(-1, keys)
    keep = keep if seen.keep is None else keep & seen.keep
    rows = max(1, _WORK // max(1, batch * keys))
    for offset, right in ((keys - queries, 0), (0, 0), (0, None)):
        fit = replace(seen, allowed=None, keep=keep, offset=offset, right=right)
        for q0 in range(0, queries, rows):
            one, other = (x.block(q0, min(q0 + rows, queries), 0, keys)[0] for x in (seen, fit))
            one, other = (keep.new_zeros(1) if x is None else x for x in (one, other))
            if (one != other).any():
                break
        else:
            return fit
    return None


def _shown(seen: Visibility) -> Visibility:
    """The same with what an additive mask hides as a boolean one, and without the rest of it."""
    if seen.bias is None:
        return seen
    allowed = seen.allowed
    if seen.bias.numel() and not seen.bias.amin() > seen.floor:
        shown = ~(seen.bias <= seen.floor)
        allowed = shown if allowed is None else allowed & shown
    return replace(seen, allowed=allowed, bias=None)


@dataclass(frozen=True, eq=False)
class Part:
    """For each query, keys start … stop−1, start being where a run of keys starts.

    Keys are counted in the layout's order, from its end if backwards. runs is where each key's run
    starts, None if they are one.
    """

    start: Int[Tensor, " queries"]
    stop: Int[Tensor, " queries"]
    runs: Int[Tensor, " keys"] | None
    backwards: bool

    def source(self, order: Int[Tensor, " keys"] | None, keys: int) -> Int[Tensor, " keys"] | None:
        """Where each key lies, in the order that this part counts in; None: they lie in it."""
        if not self.backwards:
            return order
        if order is not None:
            return order.flip(0)
        return torch.arange(keys - 1, -1, -1, device=self.start.device)

    @cached_property
    def running(self) -> _Running:
        """How to sum along the keys."""
        return _Running(self.runs)


@dataclass(frozen=True, eq=False)
class Layout:
    """Keys put in an order (None: as they are) in which each query sees low … high−1 of them.

    visible is how many each query sees; columns how many queries see each key, in their own order.
    """

    order: Int[Tensor, " keys"] | None
    low: Int[Tensor, " queries"]
    high: Int[Tensor, " queries"]
    keep: Bool[Tensor, "#batch keys"] | None
    parts: tuple[Part, ...]
    visible: Int[Tensor, "#batch queries"]
    columns: Int[Tensor, "#batch keys"]

    def spoilt(
        self, finite: Bool[Tensor, "batch kv_heads keys"] | None
    ) -> Bool[Tensor, "#batch #kv_heads queries"]:
        """Queries that see a key that is not finite."""
        if finite is None:
            return torch.zeros(1, 1, len(self.low), dtype=torch.bool, device=self.low.device)
        bad = ~finite if self.keep is None else ~finite & self.keep[:, None]
        spoilt = before(bad if self.order is None else bad[..., self.order])
        return spoilt[..., self.high] > spoilt[..., self.low]


def before(x: Tensor) -> Tensor:
    """How many are True before each place, and before the end."""
    return F.pad(x.cumsum(-1), (1, 0))


def layouts(seen: Visibility) -> list[tuple[slice, Layout]]:
    """One layout for all batches, or one each where their documents differ."""
    batch = seen.shape[0]
    if seen.segments is None or max(len(x) for x in seen.segments) == 1 or batch == 0:
        return [(slice(0, batch), _layout(seen))]
    each = (slice(b, b + 1) for b in range(batch))
    return [(at, _layout(seen.part(at, slice(None)))) for at in each]


def _layout(seen: Visibility) -> Layout:
    queries, keys = seen.shape[2:]
    device = seen.device
    position = torch.arange(queries, device=device) + seen.offset
    everything = torch.zeros_like(position), torch.full_like(position, keys)
    low = everything[0] if seen.left is None else (position - seen.left).clamp(0, keys)
    high = everything[1] if seen.right is None else (position + seen.right + 1).clamp(0, keys)
    high = torch.maximum(low, high)

    # Keys by document, then by place: a query's keys are then neighbours.
    places, order = torch.arange(keys, device=device), None
    offset: Tensor | int = 0
    ranked = places
    if seen.segments is not None and len(seen.segments[0]):
        ids = torch.cat([x[0] for x in seen.segments])
        of_query, of_key = torch.unique(ids, return_inverse=True)[1].split([queries, keys])
        ranked, order = (of_key * keys + places).sort()
        offset = of_query * keys
        if torch.equal(order, places):
            order = None

    def find(place: Tensor) -> Tensor:
        """Where a query's first key at or after a place is, among the keys in order."""
        return place if seen.segments is None else torch.searchsorted(ranked, offset + place)

    both = seen.left is not None and seen.right is not None
    run = ranked // max(keys, 1)
    if both:
        assert seen.left is not None
        assert seen.right is not None
        width = seen.left + seen.right + 1
        within = ranked % max(keys, 1)
        run = run * keys + torch.div(within, width, rounding_mode="floor")
        cut = -torch.div(seen.left - position, width, rounding_mode="floor") * width
        middle = find(torch.minimum(torch.maximum(cut, low), high))
    low, high = find(low), find(high)
    parts = []
    if seen.left is None or both:
        start = middle if both else low
        parts.append(Part(start, high, _starts(run), False))
    if seen.left is not None:
        stop = middle if both else high
        parts.append(Part(keys - stop, keys - low, _starts(run.flip(0)), True))

    keep = seen.keep
    kept = keep if keep is None or order is None else keep[:, order]
    if kept is None:
        visible = (high - low)[None]
    else:
        real = before(kept)
        visible = real[:, high] - real[:, low]
    columns = torch.zeros(keys + 1, dtype=torch.int64, device=device)
    columns.scatter_add_(0, low, torch.ones_like(low)).scatter_add_(0, high, -torch.ones_like(high))
    columns = columns.cumsum(0)[:keys]
    if order is not None:
        columns = torch.empty_like(columns).scatter_(0, order, columns)
    columns = columns[None] if keep is None else columns * keep
    return Layout(order, low, high, keep, tuple(parts), visible, columns)


def _starts(run: Tensor) -> Tensor | None:
    """Where each key's run starts; None if there is one run only."""
    new = F.pad(run[1:] != run[:-1], (1, 0)) if len(run) else run.bool()
    if not new.any():
        return None
    return torch.where(new, torch.arange(len(run), device=run.device), 0).cummax(0).values


def spread(
    x: Float[Tensor, "batch heads keys dim"],
    layout: Layout,
    weight: Bool[Tensor, "#batch #heads keys"] | None,
) -> Float[Tensor, "batch heads queries"]:
    """The mean square distance of each query's vectors from their mean, float64; 0 for none.

    x has a vector for each key; heads are the caller's. weight leaves keys out, those that
    `layout.keep` hides among them.

    Cost: O(n·d). In a run, Σ‖x − mean‖² grows with the t-th vector by ‖t·x − Σx‖²/(t(t−1)), which
    is never negative (Youngs & Cramer 1971), and nothing is subtracted.
    """
    parts = [_along(x, layout.order, part, weight) for part in layout.parts]
    count, total, _ = parts[0]
    if len(parts) > 1:
        one, two = (sums() / n.clamp(min=1)[..., None] for n, _, sums in parts)
        more, its_total, _ = parts[1]
        gap = (two - one).square().sum(-1) * (count * more / (count + more).clamp(min=1))
        count, total = count + more, total + its_total + gap
    return total / count.clamp(min=1)


def _along(
    x: Float[Tensor, "batch heads keys dim"],
    order: Int[Tensor, " keys"] | None,
    part: Part,
    weight: Bool[Tensor, "#batch #heads keys"] | None,
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Over each query's keys of one part: their number, Σ‖x − mean‖², and Σx for who wants it."""
    keys = x.shape[2]
    if keys == 0:
        zero = x.new_zeros(*x.shape[:2], len(part.start), dtype=torch.float64)
        return zero, zero, lambda: zero[..., None]
    source = part.source(order, keys)
    if source is not None:
        x = x.index_select(2, source)
        weight = None if weight is None else weight[..., source]
    sums_of = part.running
    if weight is None:
        t = torch.arange(1, keys + 1, device=x.device)
        t = (t if part.runs is None else t - part.runs).to(torch.float64)[None, None]
    else:
        t = sums_of(weight.to(torch.float64), -1)
        x = x.masked_fill(~weight[..., None], 0.0)
    sums = sums_of(x, -2)
    away = torch.addcmul(sums, x, t[..., None], value=-1.0)
    grows = torch.linalg.vector_norm(away, dim=-1).square() / (t * (t - 1)).clamp(min=1)
    if weight is not None:
        grows = grows * weight
    total = sums_of(grows, -1)
    there, last = part.stop > part.start, (part.stop - 1).clamp(min=0)
    return (
        t[..., last] * there,
        total[..., last] * there,
        lambda: sums[..., last, :] * there[:, None],
    )


class _Running:
    """Running sums that start afresh where a run does, without subtracting one from another.

    Runs of about the same length are summed side by side.
    """

    def __init__(self, runs: Int[Tensor, " keys"] | None) -> None:
        self.groups: list[tuple[Tensor, Tensor]] | None = None
        if runs is None:
            return
        self.groups = []
        first, length = runs.unique_consecutive(return_counts=True)
        octave = length.to(torch.float64).log2().floor()
        for some in (octave == o for o in octave.unique()):
            place = torch.arange(int(length[some].amax()), device=runs.device)
            inside = place < length[some, None]
            index = (first[some, None] + place).clamp(max=len(runs) - 1)
            self.groups.append((index, inside))

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        if self.groups is None:
            return x.cumsum(dim)
        dim %= x.dim()
        out = torch.empty_like(x)
        for index, inside in self.groups:
            sums = x.index_select(dim, index.flatten()).unflatten(dim, index.shape)
            sums = sums.cumsum(dim + 1).flatten(dim, dim + 1)
            if inside.all():
                out.index_copy_(dim, index.flatten(), sums)
            else:
                kept = inside.flatten().nonzero()[:, 0]
                out.index_copy_(dim, index.flatten()[kept], sums.index_select(dim, kept))
        return out


def dense_spread(
    x: Float[Tensor, "batch kv_heads #group keys dim"],
    seen: Visibility,
    weight: Bool[Tensor, "#batch #kv_heads keys"] | None,
) -> Float[Tensor, "batch kv_heads #group queries"]:
    """As `spread` for a mask of any form, heads by kv head and group: n²·d, a block at a time.

    The group's axis is that of x, or all of it where a mask tells heads apart.
    """
    batch, kv_heads, group, keys, d = x.shape
    heads = seen.shape[1]
    tensors = [m.shape[1] for m in (seen.allowed, seen.bias) if m is not None]
    whole = heads // max(kv_heads, 1)
    group = whole if max(tensors, default=1) > 1 else group
    out = x.new_zeros(batch, kv_heads, group, seen.shape[2], dtype=torch.float64)
    if 0 in x.shape:
        return out
    for q0, q1, k0, k1 in _tiles(seen, batch * kv_heads * whole, d):
        rows = out[..., q0:q1]
        if k0 == 0:
            count = torch.zeros_like(rows)
            mean = rows.new_zeros(*rows.shape, d)
        hidden, bias = seen.block(q0, q1, k0, k1)
        if bias is not None:
            low = bias <= seen.floor
            hidden = low if hidden is None else hidden | low
        sees = rows.new_ones(1, 1, 1, 1) if hidden is None else (~hidden).to(torch.float64)
        sees = sees.expand(-1, -1, q1 - q0, k1 - k0)
        split = (kv_heads, whole) if sees.shape[1] > 1 else (1, 1)
        sees = sees.unflatten(1, split)  # b kv g i j
        y = x[..., k0:k1, :]
        if weight is not None:
            real = weight[:, :, None, None, k0:k1]
            sees, y = sees * real, y.masked_fill(~real.mT, 0.0)
        centre = y.mean(-2, keepdim=True)
        y = y - centre
        square = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square()
        own = sees @ torch.cat([y, square, torch.ones_like(square)], -1)
        more = own[..., d + 1]
        its_mean = own[..., :d] / more.clamp(min=1)[..., None]
        its_total = (own[..., d] - more * its_mean.square().sum(-1)).clamp(min=0)
        share = more / (count + more).clamp(min=1)
        gap = torch.where((more > 0)[..., None], its_mean + centre - mean, 0.0)
        rows += its_total + gap.square().sum(-1) * (count * share)
        mean = mean + gap * share[..., None]
        count = count + more
        if k1 == keys:
            rows /= count.clamp(min=1)
    return out


def _tiles(seen: Visibility, heads: int, d: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of queries and keys, all keys of some queries before the next queries."""
    queries, keys = seen.shape[2:]
    across = min(keys, 512)
    down = max(1, _WORK // (heads * max(across, d)))
    for q0 in range(0, queries, down):
        for k0 in range(0, keys, across):
            yield q0, min(q0 + down, queries), k0, min(k0 + across, keys)

"""What a head looks at, from lse alone: masses of chosen keys, each beside its chance level.

Once lse is known, p = exp(logit − lse) costs one dot product, so a sparse pattern of keys needs no
n×n pass: `positions` costs O(n·d). `roles` are the others, for when more time may be spent. Chance
is what equal weights over the row's visible keys would give. `roles_of` says what a head is called,
and calls a head at chance nothing.

A measure is NaN in a row where no visible key counts, or every one does: it could not have come out
otherwise, and its row must not pull the mean of those that could.

Sources: Clark et al. 2019 (arXiv:1906.04341) for positions and delimiters, Xiao et al. 2023
(arXiv:2309.17453) and Gu et al. 2024 (arXiv:2410.10781) for sinks, Olsson et al. 2022
(arXiv:2209.11895) for induction, Voita et al. 2019 (arXiv:1905.09418) for what lies beside the
sink; docs/maths.md#roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot import intervals
from scaledot.checks import Problem
from scaledot.heads import HeadStats
from scaledot.kernels import Terms
from scaledot.masks import Visibility
from scaledot.operators import implementation
from scaledot.rows import RowStats

ROWS = 512
"""Queries whose products are held at once."""

BLOCK = 1 << 19
"""Scores held at once where a mask leaves no other way than to look at each."""

OFFSETS = {"previous": -1, "current": 0, "next": 1}

WINDOWS = (4, 16, 64)
"""The W of local.W, the mass on keys less than W places away."""

THRESHOLDS: Mapping[str, float] = {
    **dict.fromkeys(OFFSETS, 0.5),
    "first": 0.3,
    "delimiter": 0.6,
    "duplicate": 0.5,
    "induction": 0.5,
    **{f"local.{w}": 0.75 for w in WINDOWS},
}
"""Mass from which a head has a role, counted from chance = 0 to all = 1. previous, current, next
.5 and delimiter .6: Clark et al.'s notebook; first .3: Gu et al. No source gives a number for the
others: half for duplicate and induction, as for the positions, three quarters for local."""

BY_CHANCE = 1e-5
"""How likely, at most, a head at chance comes as far above it in as many rows."""

BROAD = 3.8 / math.log(128)
"""normalised_entropy above which a head is broad: Clark et al.'s 3.8 nats at 128 tokens, .783."""


def weight_at(
    problem: Problem,
    seen: Visibility,
    lse: Float[Tensor, "batch heads queries"],
    index: Int[Tensor, "#batch queries"],
) -> tuple[Float[Tensor, "batch heads queries"], Bool[Tensor, "batch heads queries"]]:
    """(weight, visible) of one key a query, whose position is in `index`; 0 where not visible."""
    batch, heads, queries, dim = problem.query.shape
    keys, kv_heads = problem.key.shape[2], problem.key.shape[1]
    inside = (index >= 0) & (index < keys)
    at = index.clamp(0, max(keys - 1, 0)).expand(batch, queries)
    q = problem.query.unflatten(1, (kv_heads, -1))
    logit = torch.empty((*q.shape[:3], queries), dtype=lse.dtype, device=lse.device)
    # Some queries at a time: all of q·k before its sum would be as large as q itself.
    for q0 in range(0, queries, ROWS):
        q1 = min(q0 + ROWS, queries)
        chosen = at[:, None, q0:q1, None].expand(batch, kv_heads, q1 - q0, dim)
        k = problem.key.gather(2, chosen).to(lse.dtype)
        logit[..., q0:q1] = (q[..., q0:q1, :].to(lse.dtype) * k[:, :, None]).sum(-1)
    logit = logit.flatten(1, 2) * problem.scale
    if problem.softcap is not None:
        logit = problem.softcap * torch.tanh(logit / problem.softcap)
    visible, bias = seen.at(at)
    visible = (visible & inside[:, None]).expand(batch, heads, queries)
    if bias is not None:
        logit = logit + bias.to(logit.dtype)
    # Where lse is large its rounding may take a weight past 1.
    return torch.where(visible, (logit - lse).exp().clamp(max=1.0), 0.0), visible


def positions(
    problem: Problem, seen: Visibility, rows: RowStats, *, self_attention: bool
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """Weight on the first key, and in self-attention on the previous, own and next one.

    Each (batch, heads, queries), 0 … 1, NaN where the key is not visible or is the only one that
    is; "first" is the first real key of the query's own text and is measured on later queries only.
    "chance.first" and so on is 1 ÷ visible keys on the same rows. Cost O(n·d).
    """
    if 0 in seen.shape:
        return {}
    own = _own(seen)[None]
    first = seen.first()
    chosen = {"first": first}
    if self_attention:
        chosen |= {name: own + offset for name, offset in OFFSETS.items()}
    result = {}
    chance = 1 / rows.visible.clamp(min=1)
    for name, index in chosen.items():
        weight, visible = weight_at(problem, seen, rows.lse, index)
        measured = visible & (rows.visible > 1)
        if name == "first" and self_attention:
            measured = measured & (own > first)[:, None]
        result[name] = torch.where(measured, weight, float("nan"))
        result[f"chance.{name}"] = torch.where(measured, chance, float("nan"))
    return result


@torch.no_grad()
def roles(
    problem: Problem,
    seen: Visibility,
    rows: RowStats,
    *,
    self_attention: bool,
    tokens: Int[Tensor, "#batch length"] | None = None,
    delimiters: Int[Tensor, " ids"] | None = None,
    delimiter_mass: Float[Tensor, "batch heads queries"] | None = None,
) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """What takes passes of its own: masses by distance and by token, and mean distance.

    In self-attention, "local.W": mass of |i − j| < W, for W in `WINDOWS`; "distance": Σ p·|i − j|,
    in places, p over the keys alone where there is a sink. With `tokens`, the ids of these very
    keys: "delimiter", mass on the ids in `delimiters`; "duplicate", on earlier keys of the query's
    own token; "induction", on earlier keys that followed such a token, a real one of the same text.
    Each has "chance.NAME" beside it, on the same rows. Masses are 0 … 1 of all outcomes, a sink's
    included.
    `delimiter_mass` is that mass, where another pass has weighed it.

    NaN where no visible key counts, or every one does; "distance" where one key is visible.
    A padded key never counts. Tokens that are not (batch, keys), as with a cache where only the
    queries' are known: the measures of tokens are left out.

    Cost: delimiter one pass over the keys, none where its mass is given; distance one more unless
    causal; local O(n·W·d); duplicate and induction O(d) a pair of equal tokens, in text about a
    tenth of a pass. A mask that is a tensor is read twice for chance. Source: docs/maths.md#roles.
    """
    if 0 in seen.shape:
        return {}
    batch, _, queries, keys = seen.shape
    seen = _symbolic(seen)
    if tokens is not None:
        known = self_attention and queries <= keys and tokens.shape in ((1, keys), (batch, keys))
        tokens = tokens.expand(batch, -1) if known else None
    result: dict[str, Tensor] = {}
    with torch.autocast(problem.query.device.type, enabled=False):
        if tokens is not None and delimiters is not None:
            result |= _delimiter(problem, seen, rows, tokens, delimiters, delimiter_mass)
        if self_attention:
            for w in WINDOWS:
                result |= _local(problem, seen, rows, w)
            result |= _distance(problem, seen, rows)
        if tokens is not None:
            result |= _repeats(problem, seen, rows, tokens)
    return result


def weighted(
    problem: Problem,
    seen: Visibility,
    columns: Float[Tensor, "#batch kv_or_1 keys c"],
    *,
    kernel: str,
) -> Float[Tensor, "batch heads queries c"]:
    """Σ p·column for features of keys, in one pass of `kernel`; a sink is an outcome of feature 0.

    kernel: that of the rows, `RowStats.kernel`. 0 in an empty row, as the output there; NaN where
    a visible score or feature is no number.
    """
    batch, kv_heads, keys, _ = problem.key.shape
    value = columns.expand(batch, kv_heads, keys, columns.shape[3])
    terms = Terms(problem.scale, problem.softcap, problem.sinks, 0.0, 0)
    return implementation(kernel).output(problem.query, problem.key, value, seen, terms)


def sums(
    seen: Visibility, columns: Float[Tensor, "#batch keys c"]
) -> Float[Tensor, "#batch #heads queries c"]:
    """Sum of each column over the keys that each query sees, in float64; whole numbers exactly.

    From running sums, O(keys), where the mask has a known form; else from every visible pair, some
    at a time.
    """
    columns = columns.to(torch.float64)
    queries, keys = seen.shape[2:]
    fit = intervals.recognised(seen)
    if fit is None:
        heads = max((x.shape[1] for x in (seen.allowed, seen.bias) if x is not None), default=1)
        batch = max(len(columns), seen.shape[0])
        out = columns.new_zeros(batch, heads, queries, columns.shape[2])
        for q0, q1, k0, k1 in _blocks(seen):
            shown = _visible(seen, q0, q1, k0, k1).to(torch.float64)
            out[:, :, q0:q1] = shown @ columns[:, None, k0:k1]
        return out
    seen = fit
    if seen.keep is not None:
        columns = columns * seen.keep[..., None]
    at = torch.arange(queries, device=columns.device) + seen.offset
    low = torch.zeros_like(at) if seen.left is None else (at - seen.left).clamp(0, keys)
    high = torch.full_like(at, keys) if seen.right is None else (at + seen.right + 1).clamp(0, keys)
    high = torch.maximum(low, high)
    low, high = low[None], high[None]
    if seen.segments is not None:
        # In order of document, then place, what a query sees is one run of keys.
        q_ids, k_ids = (x * (keys + 1) for x in _renumbered(*seen.segments))
        batch = max(len(q_ids), len(k_ids), len(columns))
        places = k_ids + torch.arange(keys, device=k_ids.device)
        ranked, order = places.expand(batch, -1).sort(1)
        q_ids = q_ids.expand(batch, -1)
        low, high = (torch.searchsorted(ranked, q_ids + x) for x in (low, high))
        order = order[..., None].expand(batch, -1, columns.shape[2])
        columns = columns.expand(batch, -1, -1).gather(1, order)
    before = torch.cat([columns.new_zeros(len(columns), 1, columns.shape[2]), columns.cumsum(1)], 1)
    batch = max(len(low), len(before))
    before = before.expand(batch, -1, -1)

    def until(x: Tensor) -> Tensor:
        return before.gather(1, x[..., None].expand(batch, -1, before.shape[2]))

    return (until(high) - until(low))[:, None]


def _symbolic(seen: Visibility) -> Visibility:
    """The same with a boolean mask that says only which keys are real as what it is."""
    if seen.allowed is None or seen.allowed.shape[1:3] != (1, 1):
        return seen
    keep = seen.allowed[:, 0, 0].expand(-1, seen.shape[3])
    return replace(seen, allowed=None, keep=keep if seen.keep is None else keep & seen.keep)


def _own(seen: Visibility) -> Int[Tensor, " queries"]:
    """Where each query's own token stands among the keys."""
    return torch.arange(seen.shape[2], device=seen.device) + seen.diagonal


def _renumbered(*ids: Tensor) -> tuple[Tensor, ...]:
    """The same ids counted from 0, so that products of them fit an integer."""
    place = torch.unique(torch.cat([x.flatten() for x in ids]), return_inverse=True)[1]
    parts = place.split([x.numel() for x in ids])
    return tuple(part.view(x.shape) for part, x in zip(parts, ids, strict=True))


def _blocks(seen: Visibility) -> Iterator[tuple[int, int, int, int]]:
    """(q0, q1, k0, k1): all queries in turn, each with every key that it may see."""
    batch, heads, queries, keys = seen.shape
    step = max(1, BLOCK // max(1, batch * heads * keys))
    for q0 in range(0, queries, step):
        q1 = min(q0 + step, queries)
        yield (q0, q1, *seen.span(q0, q1))


def _visible(seen: Visibility, q0: int, q1: int, k0: int, k1: int) -> Tensor:
    """Visible pairs of a block, (#batch, #heads, q1 − q0, k1 − k0)."""
    hidden, bias = seen.block(q0, q1, k0, k1)
    visible = torch.ones(1, 1, q1 - q0, k1 - k0, dtype=torch.bool, device=seen.device)
    if hidden is not None:
        visible = visible & ~hidden
    return visible if bias is None else visible & ~(bias <= seen.floor)


def _alone(
    problem: Problem, seen: Visibility, kernel: str, *, statistics: bool = False
) -> RowStats:
    """Rows over what `seen` shows and no sink; without `statistics` visible and lse alone."""
    terms = Terms(problem.scale, problem.softcap, None, 0.0, 0)
    run = implementation(kernel).forward
    return run(problem.query, problem.key, None, seen, terms, statistics=statistics)[1]


def _share(name: str, mass: Tensor, count: Tensor, rows: RowStats) -> dict[str, Tensor]:
    """A mass on `count` of the row's visible keys, and its chance."""
    count = count.to(mass.dtype)
    could = (count > 0) & (count < rows.visible)
    chance = count / rows.visible.clamp(min=1)
    return {
        name: torch.where(could, mass.clamp(0.0, 1.0), math.nan),
        f"chance.{name}": torch.where(could, chance, math.nan),
    }


def _mass(part: RowStats, rows: RowStats) -> Tensor:
    return (part.lse - rows.lse).exp()


def _delimiter(
    problem: Problem, seen: Visibility, rows: RowStats, tokens: Tensor, delimiters: Tensor,
    mass: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    chosen = marked(tokens, delimiters)
    if mass is None:
        column = chosen[..., None].to(rows.lse.dtype)
        mass = weighted(problem, seen, column, kernel=rows.kernel)[..., 0]
    return _share("delimiter", mass, sums(seen, chosen[:, 0, :, None].double())[..., 0], rows)


def marked(
    tokens: Int[Tensor, "#batch keys"], delimiters: Int[Tensor, " ids"]
) -> Bool[Tensor, "#batch 1 keys"]:
    """Which keys are delimiters, for every head."""
    return torch.isin(tokens, delimiters.to(tokens.device))[:, None]


def _least(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)


def _local(problem: Problem, seen: Visibility, rows: RowStats, w: int) -> dict[str, Tensor]:
    """Mass of keys less than w places away, by a pass over those alone."""
    left, right = _least(seen.left, w - 1), _least(seen.right, w - 1)
    if (left, right) == (seen.left, seen.right) or w >= max(seen.shape[2:]):
        nothing = torch.full_like(rows.lse, math.nan)
        return {f"local.{w}": nothing, f"chance.local.{w}": nothing}
    near = replace(seen, offset=seen.diagonal, left=left, right=right)
    part = _alone(problem, near, rows.kernel)
    return _share(f"local.{w}", _mass(part, rows), part.visible, rows)


def _distance(problem: Problem, seen: Visibility, rows: RowStats) -> dict[str, Tensor]:
    own = _own(seen).to(rows.lse.dtype)
    earlier = replace(seen, offset=seen.diagonal, right=0)
    if seen.right == 0:
        later = None
        distance = own - rows.mean_key
    else:
        # From the next place on. A negative reach to the left would read as none.
        right = None if seen.right is None else seen.right - 1
        later = replace(seen, offset=seen.diagonal + 1, left=0, right=right)
        before = _alone(problem, earlier, rows.kernel, statistics=True)
        after = _alone(problem, later, rows.kernel, statistics=True)
        # Each half's mean distance is ≥ 0, so nothing cancels between them.
        back = (own - before.mean_key).nan_to_num(nan=0.0)
        forth = (after.mean_key - own).nan_to_num(nan=0.0)
        # Of two halves with nothing (an empty row) the share is NaN, as it should be.
        share = torch.sigmoid(before.lse - after.lse)
        distance = share * back + (1 - share) * forth
    index = torch.arange(seen.shape[3], device=seen.device, dtype=torch.float64)
    moments = torch.stack([torch.ones_like(index), index], -1)[None]
    count, place = sums(earlier, moments).unbind(-1)
    chance = count * own - place
    if later is not None:
        count, place = sums(later, moments).unbind(-1)
        chance = chance + place - count * own
    chance = chance / rows.visible.clamp(min=1)
    could = rows.visible > 1
    return {
        "distance": torch.where(could, distance.clamp(min=0.0), math.nan),
        "chance.distance": torch.where(could, chance.to(distance.dtype), math.nan),
    }


def _repeats(
    problem: Problem, seen: Visibility, rows: RowStats, tokens: Int[Tensor, "batch keys"]
) -> dict[str, Tensor]:
    """ "duplicate" and "induction"."""
    after = _follows(seen)
    same = seen.segments is None or (
        seen.segments[0].shape[1] == seen.segments[1].shape[1]
        and torch.equal(*(x.expand(len(tokens), -1) for x in seen.segments))
    )
    queries, keys = seen.shape[2:]
    unbounded = seen.left is None or seen.left >= keys - 1
    plain = unbounded and seen.allowed is None and seen.bias is None
    if plain and same and queries == keys and seen.diagonal == 0:
        found = _sorted_repeats(problem, seen, rows, tokens, after)
    elif plain and seen.segments is None and seen.diagonal == keys - queries:
        found = _continued_repeats(problem, seen, rows, tokens, after)
    else:
        found = _paired_repeats(problem, seen, rows, tokens, after)
    result: dict[str, Tensor] = {}
    for name, (mass, count) in zip(("duplicate", "induction"), found, strict=True):
        result |= _share(name, mass, count, rows)
    return result


def _follows(seen: Visibility) -> Bool[Tensor, "#batch keys"]:
    """Keys whose predecessor is a real key of the same text."""
    real = seen.shown_to_any() if seen.keep is None else seen.keep
    keys = seen.shape[3]
    if real is None:
        real = torch.ones(1, 1, dtype=torch.bool, device=seen.device)
    real = real.expand(-1, keys)
    after = real.roll(1, 1)
    if seen.segments is not None:
        after = after & (seen.segments[1] == seen.segments[1].roll(1, 1))
    after = after.clone()
    after[:, 0] = False
    return after


def _sorted_repeats(
    problem: Problem, seen: Visibility, rows: RowStats, tokens: Tensor, after: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """(mass, count) of both, where every earlier key of a query's text is visible.

    In order of token, then place, the earlier keys of a query's token are the run just before it:
    documents of a packed, strictly causal batch, of which kernels skip what lies between them.
    """
    batch, keys = tokens.shape
    if seen.segments is None:
        ids = tokens
    else:
        token, text = _renumbered(tokens, seen.segments[1])
        ids = token * (text.max() + 1) + text
    order = ids.argsort(dim=1, stable=True)
    place = order.argsort(1)
    run = ids.gather(1, order)
    q = _in_order(problem.query, order)

    def of(index: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        earlier = Visibility(
            seen.shape, offset=-1, right=0, keep=keep, segments=(run, run), device=seen.device
        )
        moved = replace(problem, query=q, key=_in_order(problem.key, index), value=None)
        part = _alone(moved, earlier, rows.kernel)
        back = place[:, None].expand_as(part.lse)
        lse, count = part.lse.gather(2, back), part.visible.gather(2, back)
        return (lse - rows.lse).exp(), count

    keep = None if seen.keep is None else seen.keep.expand(batch, -1)
    duplicate = of(order, None if keep is None else keep.gather(1, order))
    # A key stands where its predecessor would, whose token is what must be the query's.
    follower = (order + 1).clamp(max=keys - 1)
    last = order + 1 == keys
    counts = after.expand(batch, -1) if keep is None else after & keep
    mass, count = of(follower, counts.gather(1, follower) & ~last)
    # The query's own key follows a token like it where one is said twice; it is not earlier.
    own = (counts & (ids == ids.roll(1, 1)))[:, None]
    weight, _ = weight_at(problem, seen, rows.lse, _own(seen)[None])
    return [duplicate, (mass - weight * own, count - own.to(count.dtype))]


def _continued_repeats(
    problem: Problem, seen: Visibility, rows: RowStats, tokens: Tensor, after: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The same where a cache holds keys from before the first query.

    The queries see all of those, so that with both in order of token a mask by token is enough;
    among themselves queries are a text of their own.
    """
    batch, keys = tokens.shape
    queries = seen.shape[2]
    start = keys - queries
    ids = tokens[:, start:]
    keep = seen.keep
    own = replace(
        seen, shape=(*seen.shape[:3], queries), offset=0, right=0,
        keep=None if keep is None else keep[:, start:],
    )  # fmt: skip
    inside = replace(problem, key=problem.key[:, :, start:], value=None)
    found = _sorted_repeats(inside, own, rows, ids, _follows(own))
    order = ids.argsort(dim=1, stable=True)
    back = order.argsort(1)[:, None].expand_as(rows.lse)
    q = _in_order(problem.query, order)

    def before(of: Tensor, first: int, stop: int, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys first … stop − 1 that stand for the tokens `of`."""
        key_order = of.argsort(dim=1, stable=True)
        part = Visibility(
            (*seen.shape[:3], stop - first),
            keep=None if counts is None else counts.expand(batch, -1).gather(1, key_order),
            segments=(ids.gather(1, order), of.gather(1, key_order)),
            device=seen.device,
        )  # fmt: skip
        moved = _in_order(problem.key[:, :, first:stop], key_order)
        some = _alone(replace(problem, query=q, key=moved, value=None), part, rows.kernel)
        lse, count = some.lse.gather(2, back), some.visible.gather(2, back)
        return (lse - rows.lse).exp(), count

    duplicate = before(tokens[:, :start], 0, start, None if keep is None else keep[:, :start])
    # The first query's key may follow a token of before; to that query itself it is not earlier.
    counts = after if keep is None else after & keep
    mass, count = before(tokens[:, :start], 1, start + 1, counts[:, 1 : start + 1])
    mine = (counts[:, start] & (tokens[:, start - 1] == tokens[:, start]))[:, None]
    weight, _ = weight_at(problem, seen, rows.lse, _own(seen)[None])
    mass[..., 0] -= weight[..., 0] * mine
    count[..., 0] -= mine.to(count.dtype)
    earlier = (duplicate, (mass, count))
    return [
        (there + here, n + m)
        for (there, n), (here, m) in zip(earlier, found, strict=True)
    ]  # fmt: skip


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """x (batch, heads, length, dim) with its places in each batch's order."""
    return torch.stack([part.index_select(1, at) for part, at in zip(x, order, strict=True)])


def _paired_repeats(
    problem: Problem, seen: Visibility, rows: RowStats, tokens: Tensor, after: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """(mass, count) of both from each pair of equal tokens, some at a time: for any mask."""
    shape, before = rows.lse.shape, seen.diagonal
    masses = [rows.lse.new_zeros(shape) for _ in range(2)]
    counts = [torch.zeros(shape, dtype=torch.int32, device=rows.lse.device) for _ in range(2)]
    after = after.expand(shape[0], -1)
    for b in range(shape[0]):
        part = seen.part(slice(b, b + 1), slice(None))
        for i, earlier in _equal(tokens[b], BLOCK // (shape[1] * problem.query.shape[3])):
            i, earlier = (x[i >= before] for x in (i, earlier))
            follower = earlier + 1
            follows = (follower < i) & after[b][follower.clamp(max=seen.shape[3] - 1)]
            query = i - before
            pairs = ((query, earlier), (query[follows], follower[follows]))
            for mass, count, (query, key) in zip(masses, counts, pairs, strict=True):
                near = _inside(part, query, key)
                query, key = query[near], key[near]
                weight, visible = _pairs(problem, part, rows.lse, b, query, key)
                mass[b].index_add_(1, query, weight)
                count[b].index_add_(1, query, visible.to(count.dtype).expand_as(weight))
    return list(zip(masses, counts, strict=True))


def _equal(tokens: Int[Tensor, " keys"], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(i, j): the pairs j < i of places with one token, about size at a time."""
    order = tokens.argsort(stable=True)
    run = torch.unique_consecutive(tokens[order], return_counts=True)[1]
    place = torch.arange(len(order), device=order.device)
    # How many places before each, in this order, have its token.
    rank = place - (run.cumsum(0) - run).repeat_interleave(run)
    done = rank.cumsum(0)
    start, total = 0, int(done[-1])
    while start < len(order):
        before = int(done[start - 1]) if start else 0
        stop = int(torch.searchsorted(done, before + max(size, 1), right=True))
        stop = max(stop, start + 1)
        each = rank[start:stop]
        if before < total:
            at = place[start:stop].repeat_interleave(each)
            first = (each.cumsum(0) - each).repeat_interleave(each)
            back = torch.arange(len(at), device=at.device) - first + 1
            yield order[at], order[at - back]
        start = stop


def _pairs(
    problem: Problem, seen: Visibility, lse: Tensor, b: int, query: Tensor, key: Tensor
) -> tuple[Float[Tensor, "heads pairs"], Bool[Tensor, "#heads pairs"]]:
    """(weight, visible) of a list of pairs of batch b, whose part of the mask `seen` is."""
    q = problem.query[b].index_select(1, query).to(lse.dtype)
    k = problem.key[b].index_select(1, key).to(lse.dtype)
    logit = (q.unflatten(0, (len(k), -1)) * k[:, None]).sum(-1).flatten(0, 1) * problem.scale
    if problem.softcap is not None:
        logit = problem.softcap * torch.tanh(logit / problem.softcap)
    visible = _inside(seen, query, key)[None]
    if seen.allowed is not None:
        visible = visible & _picked(seen.allowed, query, key)
    if seen.bias is not None:
        bias = _picked(seen.bias, query, key)
        visible = visible & ~(bias <= seen.floor)
        logit = logit + bias.to(lse.dtype)
    return torch.where(visible, (logit - lse[b].index_select(1, query)).exp(), 0.0), visible


def _inside(seen: Visibility, query: Tensor, key: Tensor) -> Bool[Tensor, " pairs"]:
    """Pairs that window, padding and documents of the one batch of `seen` show."""
    own = query + seen.offset
    visible = torch.ones_like(query, dtype=torch.bool)
    if seen.right is not None:
        visible = visible & (key <= own + seen.right)
    if seen.left is not None:
        visible = visible & (key >= own - seen.left)
    if seen.keep is not None:
        visible = visible & seen.keep[0, key]
    if seen.segments is not None:
        visible = visible & (seen.segments[0][0, query] == seen.segments[1][0, key])
    return visible


def _picked(x: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask of one batch at a list of pairs, (#heads, pairs)."""
    query, key = (
        torch.zeros_like(at) if n == 1 else at
        for n, at in zip(x.shape[2:], (query, key), strict=True)
    )
    return x[0][:, query, key]


@dataclass(frozen=True)
class Role:
    """What a head does: one of `THRESHOLDS`, its mean mass, and the mass that chance gives.

    beside_first: for a position, the mass as a share of what does not go to the first key, where
    more than .3 does; else None. strength: the mass, or that share, from chance = 0 to all = 1.
    """

    name: str
    mass: float
    chance: float
    strength: float
    beside_first: float | None = None


def role_of(
    masses: Mapping[str, float], chances: Mapping[str, float], rows: Mapping[str, int]
) -> tuple[Role, ...]:
    """The roles of a head, strongest first; none for a head at chance.

    masses, chances: means over rows of the measures in `THRESHOLDS`, those that were measured;
    rows: over how many. A head has a role where all of this holds:

    - (mass − chance) ÷ (1 − chance) is above the threshold: in a long text the published one, in a
      short text, where equal weights alone may pass that, so much more;
    - a head at chance, even one that puts all its weight on one key at random, in each row anew,
      would come so far above it less than once in 100,000 times: rows · KL(mass ‖ chance) > 11.5
      (Hoeffding 1963, theorem 1). A few rows prove nothing.

    Where more than .3 goes to the first key, the positions are judged by what is left, which is
    measured on the same rows: mass and chance are divided by 1 − that of the first key, and rows
    multiplied by 1 − first. (The second row, whose previous key is the first, is off by 1 ÷ rows.)
    local names the narrowest window, and none for a head of a position.

    >>> role_of({"previous": 0.8}, {"previous": 0.1}, {"previous": 13})[0].name
    'previous'
    """
    first = masses.get("first", 0.0)
    found: list[Role] = []
    for name, threshold in THRESHOLDS.items():
        if name not in masses:
            continue
        if name.startswith("local.") and any(_is_near(role.name) for role in found):
            continue
        mass, chance, count, beside = masses[name], chances[name], float(rows[name]), None
        if first > THRESHOLDS["first"] and name in OFFSETS:
            left = 1 - first
            mass = beside = min(mass / left, 1.0) if left > 0 else 0.0
            chance, count = min(chance / (1 - chances["first"]), 1.0), count * left
        if mass <= chance:
            continue
        strength = (mass - chance) / (1 - chance)
        if strength > threshold and count * _divergence(mass, chance) > -math.log(BY_CHANCE):
            found.append(Role(name, masses[name], chances[name], strength, beside))
    return tuple(sorted(found, key=lambda role: -role.strength))


def _divergence(p: float, q: float) -> float:
    """KL of a coin of probability p from one of q, nats."""
    if q <= 0:
        return math.inf
    return sum(a * math.log(a / b) if a > 0 else 0.0 for a, b in ((p, q), (1 - p, 1 - q)))


def _is_near(name: str) -> bool:
    return name in OFFSETS or name.startswith("local.")


def roles_of(stats: HeadStats) -> list[tuple[Role, ...]]:
    """`role_of` for each head, from the measures that `positions` and `roles` made."""
    there = [n for n in THRESHOLDS if n in stats.measures]
    result = []
    for head in range(stats.heads):
        rows = {n: int(stats.measures[n].count[head]) for n in there}
        masses, chances = (
            {n: stats.measures[prefix + n].of_head(head) for n in there if rows[n]}
            for prefix in ("", "chance.")
        )
        result.append(role_of(masses, chances, rows))
    return result


def is_broad(normalised_entropy: float) -> bool:
    """Whether weights are spread widely. That is no role: a head at chance is the broadest."""
    return normalised_entropy > BROAD


def delimiters(tokenizer: Any) -> Int[Tensor, " ids"]:
    """Ids of tokens that divide text: special ones, and those of `. , ; : ! ?`, their full-width
    forms, `、 。 …` and line ends alone, spaces aside. For any transformers tokenizer."""
    tokens = tokenizer.get_vocab()
    # Decoding is slow, and no token with a letter or digit is one; <0x0A> is a byte in disguise.
    maybe = [
        i for token, i in tokens.items()
        if token == "<0x0A>" or not any(c.isascii() and c.isalnum() for c in token)
    ]  # fmt: skip
    texts = tokenizer.batch_decode([[i] for i in maybe])
    found = {
        i for i, text in zip(maybe, texts, strict=True)
        if (marks := text.removeprefix("##").replace(" ", "")) and set(marks) <= _MARKS
    }  # fmt: skip
    return torch.tensor(sorted(found | _special(tokenizer)), dtype=torch.int64)


_MARKS = set(".,;:!?、。，．；：！？…\n\r")


def _special(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def vocabulary(tokenizer: Any) -> Int[Tensor, " ids"]:
    """Ids fit for `repeated`: neither added, special nor delimiters, and of those that remain the
    middle half by id. Ids count up from the frequent to the rare in the usual vocabularies, single
    bytes and characters coming first."""
    out = set(getattr(tokenizer, "added_tokens_decoder", {})) | set(delimiters(tokenizer).tolist())
    ids = sorted(set(tokenizer.get_vocab().values()) - out)
    return torch.tensor(ids[len(ids) // 4 : len(ids) - len(ids) // 4], dtype=torch.int64)


def repeated(
    vocabulary_ids: Int[Tensor, " ids"], *, length: int, times: int = 4, seed: int = 0
) -> Int[Tensor, "1 tokens"]:
    """Random tokens, all different, said over and over: (1, length · times) ids.

    Nothing but the repetition can tell what follows, so a head whose "induction" is high on them
    matches prefixes (Olsson et al. 2022). The same for the same seed.
    Raises: ValueError for fewer ids than length, and for fewer than 2 times.

    >>> repeated(torch.arange(100), length=3, times=2, seed=0).shape
    torch.Size([1, 6])
    """
    if times < 2:
        raise ValueError(f"times is {times}: only what is said at least twice repeats")
    if not 0 < length <= len(vocabulary_ids):
        raise ValueError(
            f"length is {length}: expected 1 … {len(vocabulary_ids)}, the ids to draw from"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(vocabulary_ids), generator=generator)[:length]
    return vocabulary_ids.cpu()[drawn].repeat(times)[None]


def prefix_matching(
    stats: HeadStats,
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """(score, chance) of each head, from its statistics on `repeated` ids and on nothing else.

    The score is the mean over the tokens of the second and later repetitions of the mass on the
    keys that followed the same token before, 0 … 1; a first repetition has none. NaN if nothing
    was measured. Source: Olsson et al. 2022, prefix matching.
    """
    return stats.measures["induction"].average, stats.measures["chance.induction"].average

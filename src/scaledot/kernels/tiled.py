"""The kernel in plain torch: any device and float dtype, O(n) memory forward and backward.

Queries and keys are cut into blocks; a block of scores is looked at once and thrown away:

    for each block of queries                     forward          backward
        for each block of keys it may see
            S = α Q Kᵀ, cap, bias, mask           again            again, from (top, log_mass)
            row state ← merge(row state, block)   rows.py          –
            O ← rescaled O + e·V                  online softmax   dQ, dK, dV, dbias added up

Sources: Milakov & Gimelshein 2018 (arXiv:1805.02867), Rabe & Staats 2021 (arXiv:2112.05682), Dao et
al. 2022 (arXiv:2205.14135, algorithm 4 for the backward). What differs: the statistics, and the
gradients of lse and entropy that are folded in (docs/maths.md#backward).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from scaledot.kernels import SUMS, Gradients, Terms, fold, row_constants, row_gradients
from scaledot.masks import Visibility
from scaledot.rows import EXP_ZERO, RowState, RowStats, finish, merge

BLOCK = 1 << 19
"""Scores held at once: large enough to hide torch's call overhead, small enough for the cache."""


@dataclass(frozen=True)
class _Tile:
    """A block of scores: which batches and kv heads, queries and keys."""

    batch: slice
    heads: slice
    queries: tuple[int, int]
    number: int


def output(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    seen: Visibility,
    terms: Terms,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """The output of `forward` alone."""
    out, _, _, _ = forward(query, key, value, seen, terms)
    assert out is not None  # there was a value
    return out


def forward(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"] | None,
    seen: Visibility,
    terms: Terms,
    *,
    statistics: bool = True,  # noqa: ARG001  # they cost little beside torch's own calls
) -> tuple[
    Float[Tensor, "batch heads queries value_dim"] | None,
    RowStats,
    Float[Tensor, "batch heads queries"],
    Float[Tensor, "batch heads queries"],
]:
    """(output, row statistics, top, log_mass); the last two are what `backward` needs.

    Output is float32, or float64 for float64 inputs; None without a value.
    """
    dtype = _accumulator(query)
    batch, _, queries, _ = query.shape
    kv_heads, group = key.shape[1], _group(query, key)
    like = query.new_empty(0, dtype=dtype)
    shape = (batch, kv_heads, group, queries)
    start = RowState.identity(shape, like)
    total = RowState(**{f.name: getattr(start, f.name).clone() for f in fields(RowState)})
    out = None if value is None else like.new_zeros(*shape, value.shape[-1])
    careful = value is not None and not bool(value.isfinite().all())

    for tile in _tiles(query, key):
        q0, q1 = tile.queries
        q = _rows(query, tile, group, dtype) * terms.scale
        part = seen.part(tile.batch, _query_heads(tile, group))
        state = RowState.identity((*q.shape[:3], q1 - q0), like)
        acc: Tensor | float = 0.0
        spoilt = spoilt_empty = q.new_zeros(())
        for number, k0, k1 in _key_blocks(part, tile):
            k = key[tile.batch, tile.heads, k0:k1].to(dtype)
            scaled, logits, hidden, uncounted, _ = _scores(
                q, k, part, (q0, q1, k0, k1), group, terms.softcap
            )
            block, e = RowState.of(scaled, logits, hidden, uncounted, k0)
            state, fa, fb = merge(state, block)
            if value is None:
                continue
            v = value[tile.batch, tile.heads, k0:k1].to(dtype)
            fa, fb = fa[..., None], fb[..., None]
            if careful:
                # A value that is no number spoils the rows that see it, however little it weighs.
                wrong, v = (~v.isfinite()).to(dtype), _safe(v)
                spoilt_empty = spoilt_empty + _seen_times(hidden, wrong, e)
                spoilt = spoilt + _seen_times(hidden if uncounted is None else uncounted, wrong, e)
            if terms.dropout_p:
                e = e * _kept(e, terms, number)
            acc = acc * fa + _times(e, v) * fb
        where = (tile.batch, tile.heads, slice(None), slice(q0, q1))
        for f in fields(RowState):
            getattr(total, f.name)[where] = getattr(state, f.name)
        if out is not None:
            if careful:
                # A row that sees nothing attends to what a finfo.min mask leaves it, as in torch.
                bad = torch.where((state.count == 0)[..., None], spoilt_empty, spoilt) > 0
                acc = torch.where(bad, float("nan"), acc)
            out[where] = acc

    flat = RowState(**{f.name: getattr(total, f.name).flatten(1, 2) for f in fields(RowState)})
    sinks = None if terms.sinks is None else terms.sinks.to(dtype)[:, None].expand_as(flat.top)
    stats, top, log_mass = finish(flat, sinks, "tiled")
    if out is not None:
        out = out.flatten(1, 2) * (-log_mass).exp()[..., None]
        out = torch.where(stats.nonfinite[..., None], float("nan"), out)
    return out, stats, top, log_mass


def sweep(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    seen: Visibility,
    terms: Terms,
    factors: Sequence[float],
    value: Float[Tensor, "batch kv_heads keys value_dim"] | None = None,
) -> tuple[list[RowStats], Float[Tensor, "batch heads queries value_dim"] | None]:
    """(rows at scale·factor for each factor, over one QKᵀ; softmax(…)·value at the scale)."""
    out = None if value is None else output(query, key, value, seen, terms)
    dtype = _accumulator(query)
    batch, _, queries, _ = query.shape
    kv_heads, group = key.shape[1], _group(query, key)
    like = query.new_empty(0, dtype=dtype)
    names = [f.name for f in fields(RowState)]
    start = RowState.identity((len(factors), batch, kv_heads, group, queries), like)
    total = RowState(**{name: getattr(start, name).clone() for name in names})
    for tile in _tiles(query, key):
        q0, q1 = tile.queries
        q = _rows(query, tile, group, dtype) * terms.scale
        part = seen.part(tile.batch, _query_heads(tile, group))
        states = [RowState.identity((*q.shape[:3], q1 - q0), like) for _ in factors]
        for _, k0, k1 in _key_blocks(part, tile):
            k = key[tile.batch, tile.heads, k0:k1].to(dtype)
            scores = _times(q, k.mT)
            for i, factor in enumerate(factors):
                scaled = scores * factor
                logits, hidden, uncounted, _ = _logits(
                    scaled, part, (q0, q1, k0, k1), group, terms.softcap
                )
                block, _ = RowState.of(scaled, logits, hidden, uncounted, k0)
                states[i], _, _ = merge(states[i], block)
        for i, state in enumerate(states):
            for name in names:
                where = (i, tile.batch, tile.heads, slice(None), slice(q0, q1))
                getattr(total, name)[where] = getattr(state, name)
    sinks = None if terms.sinks is None else terms.sinks.to(dtype)[:, None]
    result = []
    for i in range(len(factors)):
        flat = RowState(**{name: getattr(total, name)[i].flatten(1, 2) for name in names})
        own = None if sinks is None else sinks.expand_as(flat.top)
        result.append(finish(flat, own, "tiled")[0])
    return result, out


def backward(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    seen: Visibility,
    terms: Terms,
    top: Float[Tensor, "batch heads queries"],
    log_mass: Float[Tensor, "batch heads queries"],
    entropy: Float[Tensor, "batch heads queries"],
    counted: Tensor,
    out: Float[Tensor, "batch heads queries value_dim"],
    d_out: Float[Tensor, "batch heads queries value_dim"] | None,
    d_lse: Float[Tensor, "batch heads queries"] | None,
    d_entropy: Float[Tensor, "batch heads queries"] | None,
    bias_gradient: bool,
    rows: bool = False,
) -> Gradients:
    """Exact gradients from (top, log_mass), with those of lse and entropy folded in.

    dS = p·(dP − δ + dlse − dH·(ln p + H)), δ = ⟨dO, O⟩. `counted` is False for empty rows, whose
    lse and entropy pass nothing. Source: docs/maths.md#backward.
    """
    dtype = _accumulator(query)
    group, kv_heads = _group(query, key), key.shape[1]
    d_query = torch.zeros_like(query, dtype=dtype).unflatten(1, (kv_heads, group))
    d_key, d_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    d_bias = None
    if bias_gradient and seen.bias is not None:
        d_bias = torch.zeros_like(seen.bias, dtype=dtype)

    d_out = torch.zeros_like(out) if d_out is None else d_out.to(dtype)
    folded = fold(terms, top, log_mass, entropy, counted, out, d_out, d_lse, d_entropy)
    d_entropy = torch.zeros_like(top) if folded.d_entropy is None else folded.d_entropy
    constants = row_constants(folded, log_mass, d_out) if rows else None
    sums = top.new_zeros(len(SUMS), *top.shape) if rows else None
    top = torch.where(top == float("-inf"), 0.0, top)
    # Only where an input holds NaN or inf must 0·NaN be kept out of the products.
    careful = not all(bool(x.isfinite().all()) for x in (query, key, value, d_out))

    for tile in _tiles(query, key):
        q0, q1 = tile.queries
        q = _rows(query, tile, group, dtype) * terms.scale
        heads = _query_heads(tile, group)
        part = seen.part(tile.batch, heads)
        g = _rows(d_out, tile, group, dtype)
        row_top, row_mass, row_level, row_entropy, row_counted = (
            x[tile.batch, heads, q0:q1].unflatten(1, (-1, group))[..., None]
            for x in (top, log_mass, folded.level, d_entropy, counted)
        )
        wrong_rows = (~g.isfinite()).any(-1, keepdim=True) if careful else None
        q_safe, g_safe = (_safe(q), _safe(g)) if careful else (q, g)
        where = (tile.batch, tile.heads, slice(None), slice(q0, q1))
        for number, k0, k1 in _key_blocks(part, tile):
            at = (tile.batch, tile.heads, slice(k0, k1))
            k, v = key[at].to(dtype), value[at].to(dtype)
            _, logits, hidden, uncounted, slope = _scores(
                q, k, part, (q0, q1, k0, k1), group, terms.softcap
            )
            if uncounted is not None:
                # Only a row that sees nothing attends to what a finfo.min mask leaves it.
                hidden = uncounted & (row_counted if hidden is None else row_counted | hidden)
            # In two steps: their sum would round at the size of the logits.
            log_p = logits - row_top - row_mass
            if part.bias is not None:
                log_p = log_p.clamp(min=EXP_ZERO)
            if hidden is not None:
                log_p = log_p.masked_fill(hidden, 0.0)
            p = log_p.exp()
            if wrong_rows is not None:
                p = torch.where(wrong_rows, float("nan"), p)
            if hidden is not None:
                p = p.masked_fill(hidden, 0.0)
            d_p = _times(g, v.mT)
            dropped = p
            if terms.dropout_p:
                kept = _kept(p, terms, number)
                dropped, d_p = p * kept, d_p * kept
            d_value[at] += _fold(dropped).mT @ _fold(g_safe)
            if sums is not None and constants is not None:
                at_rows = (slice(None), tile.batch, heads, slice(q0, q1))
                _add_sums(sums[at_rows], constants[at_rows], p, d_p, hidden, group)
            d_s = p * (d_p - row_level - row_entropy * log_p)
            if hidden is not None:
                d_s = d_s.masked_fill(hidden, 0.0)
            if d_bias is not None:
                _add_bias(d_bias, d_s, tile, group, (q0, q1, k0, k1))
            if slope is not None:
                d_s = d_s * slope
                if hidden is not None:
                    d_s = d_s.masked_fill(hidden, 0.0)
            d_query[where] += _times(d_s, _safe(k) if careful else k)
            d_key[at] += _fold(d_s).mT @ _fold(q_safe)
    passed = None
    if sums is not None and constants is not None:
        passed = row_gradients(sums, constants, folded, log_mass, counted)
    d_query = d_query.flatten(1, 2) * terms.scale
    return Gradients(d_query, d_key, d_value, d_bias, folded.d_sinks, passed)


def _add_sums(
    sums: Tensor, constants: Tensor, p: Tensor, d_p: Tensor, hidden: Tensor | None, group: int
) -> None:
    """Join a block's part to `SUMS` of its rows, in place."""
    unit, delta, lift, limit = constants.unflatten(2, (-1, group))[..., None].unbind()
    t = d_p * unit - delta
    own = torch.full_like(unit[..., 0], t.shape[-1])
    if hidden is not None:
        t = t.masked_fill(hidden, 0.0)
        own = (~hidden).expand_as(t).sum(-1).to(t.dtype)
    own_mean = t.sum(-1) / own.clamp(min=1)
    apart = t - own_mean[..., None]
    if hidden is not None:
        apart = apart.masked_fill(hidden, 0.0)
    x = (p * lift).masked_fill(p > limit, 0.0) * t
    number, mean, spread, total, squares, moment = sums.unflatten(2, (-1, group)).unbind()
    gap, weight = own_mean - mean, own / (number + own).clamp(min=1)
    spread += apart.square().sum(-1) + gap.square() * number * weight
    mean += gap * weight
    number += own
    total += x.sum(-1)
    squares += x.square().sum(-1)
    moment += (x * t).sum(-1)


def _scores(q: Tensor, k: Tensor, seen: Visibility, at: tuple[int, int, int, int], group: int,
            softcap: float | None):  # fmt: skip
    """A block's scaled scores, logits, what is hidden, what is uncounted, the soft-cap's slope."""
    scaled = _times(q, k.mT)
    return scaled, *_logits(scaled, seen, at, group, softcap)


def _logits(scaled: Tensor, seen: Visibility, at: tuple[int, int, int, int], group: int,
            softcap: float | None):  # fmt: skip
    """What enters softmax of a block's scaled scores, what is hidden and uncounted, the slope."""
    logits, slope = scaled, None
    if softcap is not None:
        bounded = torch.tanh(scaled / softcap)
        logits, slope = bounded * softcap, 1 - bounded.square()
    hidden, bias = seen.block(*at)
    hidden = None if hidden is None else _grouped(hidden, group)
    uncounted = None
    if bias is not None:
        bias = _grouped(bias, group)
        low = bias <= seen.floor
        if bool(low.any()):
            uncounted = low if hidden is None else low | hidden
            logits = torch.where(low & ~logits.isfinite(), 0.0, logits)
        bias = bias.to(scaled.dtype).clamp(min=torch.finfo(scaled.dtype).min)
        logits = logits + bias
    if hidden is not None:
        logits = logits.masked_fill(hidden, float("-inf"))
    return logits, hidden, uncounted, slope


def _tiles(query: Tensor, key: Tensor) -> Iterator[_Tile]:
    """Blocks of batches, kv heads and queries, each with at most BLOCK scores a block of keys."""
    batch, _, queries, _ = query.shape
    kv_heads, group = key.shape[1], _group(query, key)
    if 0 in (batch, kv_heads, group, queries):
        return
    keys = min(_keys_at_once(queries), max(key.shape[2], 1))
    rows = max(BLOCK // keys, 1)
    heads_at_once = min(kv_heads, max(rows // (group * min(queries, 64)), 1))
    batch_at_once = min(batch, max(rows // (group * kv_heads * min(queries, 64)), 1))
    queries_at_once = max(rows // (group * heads_at_once * batch_at_once), 1)
    number = 0
    for b in range(0, batch, batch_at_once):
        for h in range(0, kv_heads, heads_at_once):
            for q0 in range(0, queries, queries_at_once):
                q1 = min(q0 + queries_at_once, queries)
                at = slice(b, b + batch_at_once), slice(h, h + heads_at_once)
                yield _Tile(*at, (q0, q1), number)
                number += 1


def _keys_at_once(queries: int) -> int:
    # One query against a long cache is a matrix-vector product: longer blocks, fewer calls.
    return 512 if queries > 16 else 8192


def _key_blocks(seen: Visibility, tile: _Tile) -> Iterator[tuple[int, int, int]]:
    """(number, k0, k1) of each block of keys that a tile may see; no two blocks share a number."""
    queries, keys = seen.shape[2:]
    begin, end = seen.span(*tile.queries)
    step = _keys_at_once(queries)
    blocks = -(-keys // step)
    for block in range(begin // step, -(-end // step)):
        k0, k1 = max(block * step, begin), min((block + 1) * step, end)
        if k0 < k1:
            yield tile.number * blocks + block, k0, k1


def _kept(like: Tensor, terms: Terms, number: int) -> Tensor:
    """The dropout factors of one block, the same whenever it is asked for: 0 or 1/(1−p)."""
    generator = torch.Generator(like.device)
    # The CPU's generator reads 32 bits of its seed, so blocks must differ in those.
    generator.manual_seed((terms.seed + number) & ((1 << 63) - 1))
    draw = torch.rand(like.shape, generator=generator, device=like.device)
    return (draw >= terms.dropout_p).to(like.dtype) / (1 - terms.dropout_p)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _group(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // max(key.shape[1], 1)


def _query_heads(tile: _Tile, group: int) -> slice:
    return slice(tile.heads.start * group, tile.heads.stop * group)


def _rows(x: Tensor, tile: _Tile, group: int, dtype: torch.dtype) -> Tensor:
    """x's rows of a tile as (batch, kv_heads, group, queries, dim)."""
    rows = x[tile.batch, _query_heads(tile, group), tile.queries[0] : tile.queries[1]]
    return rows.to(dtype).unflatten(1, (-1, group))


def _grouped(x: Tensor, group: int) -> Tensor:
    """(b, h, q, k) as (b, kv_heads, group, q, k), whether or not the head axis has length 1."""
    return x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (-1, group))


def _fold(x: Tensor) -> Tensor:
    return x.flatten(2, 3)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a (b, h, group, rows, x) times b (b, h, x, y): the group shares b, nothing is repeated."""
    return (_fold(a) @ b).unflatten(2, a.shape[2:4])


def _seen_times(out: Tensor | None, wrong: Tensor, like: Tensor) -> Tensor:
    """How many wrong values each row sees, `out` being the keys that it does not."""
    seen = torch.ones_like(like) if out is None else (~out).to(like.dtype).expand_as(like)
    return _times(seen, wrong)


def _safe(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _add_bias(d_bias: Tensor, d_s: Tensor, tile: _Tile, group: int, at: tuple[int, ...]) -> None:
    """Add a block's dS to the bias's gradient, summed over the axes that were broadcast."""
    q0, q1, k0, k1 = at
    d_s = d_s.flatten(1, 2)
    b, h, q, k = d_bias.shape
    for axis, n in enumerate((b, h, q, k)):
        if n == 1:
            d_s = d_s.sum(axis, keepdim=True)
    d_bias[
        tile.batch if b > 1 else slice(None),
        _query_heads(tile, group) if h > 1 else slice(None),
        slice(q0, q1) if q > 1 else slice(None),
        slice(k0, k1) if k > 1 else slice(None),
    ] += d_s

"""Head statistics over the processes of torch.distributed: every rank gets what one process gives.

Each field has one declared reduction: counts and histograms add, extremes are the least and the
largest, moments merge by `heads.merge`. Every rank gathers all summaries and merges them in the
order of ranks, so that the result is the same to the bit on each; sums alone would depend on the
order in which a backend adds. Given the same rows as one process, counts, histograms and extremes
are those, and moments to 1e-12.

A summary takes 40 kB a head and layer with every measure, 18 kB with those of a training run, and
each rank receives those of all: docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from scaledot import ScaledotError
from scaledot.heads import HeadStats, merge, packed, unpacked

KINDS = ("same", "shards")


def reduce(
    stats: Mapping[str, HeadStats],
    group: Any = None,
    *,
    heads: Literal["same", "shards"] = "same",
    kv_heads: int | None = None,
) -> dict[str, HeadStats]:
    """Statistics by module path of all ranks of a process group, the same on every rank.

    heads: "same" where each rank saw other rows of the same heads (data parallel), "shards" where
    each holds other heads of a module (tensor parallel): they stand in the order of ranks. With
    both, first over the group that shares rows. A path of "same" that some ranks did not see is
    those others'.
    kv_heads: of "shards", how many key heads a whole module has, where ranks hold copies of them:
    each rank one, that of its neighbours too.

    Every rank of the group must call it. Without a process group the statistics come back as they
    are. Tensors travel on the CPU, with NCCL on its device.

    Raises: ScaledotError on every rank, with the same message, where one fails before it has sent
    its own and where ranks disagree about heads, a path or its measures; on a rank that is not in
    the group; and where a rank does not answer until the group's timeout.
    Source: docs/distributed.md.
    """
    return reduce_taken(lambda: stats, group, heads=heads, kv_heads=kv_heads)


def reduce_taken(
    take: Callable[[], Mapping[str, HeadStats]],
    group: Any = None,
    *,
    heads: Literal["same", "shards"] = "same",
    kv_heads: int | None = None,
) -> dict[str, HeadStats]:
    """`reduce` of what `take` gives on each rank: what it raises on one, all are told."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        _check(heads, kv_heads)
        return dict(take())

    def own() -> bytes:
        _check(heads, kv_heads)
        return packed(take())

    sent = _gathered(own, f"heads={heads!r}, kv_heads={kv_heads!r}", group)
    every = [unpacked(one, f"what rank {rank} sent") for rank, one in enumerate(sent)]
    if heads == "shards":
        _check_paths(every)
    result: dict[str, HeadStats] = {}
    for rank, one in enumerate(every):
        for path, found in one.items():
            if path not in result:
                result[path] = found
                continue
            try:
                _check_measures(result[path], found)
                join = merge if heads == "same" else _beside
                result[path] = join(result[path], found)
            except ValueError as error:
                raise ScaledotError(f"{path} on rank {rank}: {error}") from None
    if heads == "same":
        return result
    return {path: _with_key_heads(path, [x[path] for x in every], one, kv_heads)
            for path, one in result.items()}  # fmt: skip


def _check(heads: str, kv_heads: int | None) -> None:
    if heads not in KINDS:
        raise ValueError(f'heads is {heads!r}: pass "same" or "shards"')
    if kv_heads is not None and heads != "shards":
        raise ValueError('kv_heads is of heads="shards": with "same" each rank holds them all')


def _check_paths(every: Sequence[Mapping[str, HeadStats]]) -> None:
    for rank, one in enumerate(every):
        if absent := every[0].keys() ^ one.keys():
            path, there = min(absent), min(absent) in every[0]
            raise ScaledotError(
                f"{path} was seen on rank {0 if there else rank} and not on rank "
                f"{rank if there else 0}: each holds a part of its heads"
            )


def _check_measures(a: HeadStats, b: HeadStats) -> None:
    """Of what saw rows: the summary of nothing has no measures."""
    if a.measures and b.measures and (other := a.measures.keys() ^ b.measures.keys()):
        raise ValueError(
            f"cannot join: {', '.join(sorted(other))} was not measured on every rank: observe the "
            "same on each"
        )


def _gathered(own: Callable[[], bytes], call: str, group: Any) -> list[bytes]:
    """Everybody's bytes, in the order of ranks, if all were called alike and none failed.

    A line goes before them, the call or "failed", and then the bytes are the text of an error.
    """
    from torch import distributed

    if distributed.get_rank(group) < 0:
        raise ScaledotError("this process is not in the group: only its ranks call reduce")
    cause: Exception | None = None
    try:
        data = call.encode() + b"\n" + own()
    except Exception as error:
        cause, said = error, str(error)
        known = said and isinstance(error, ScaledotError | ValueError)
        data = f"failed\n{said if known else f'{type(error).__name__}: {said}'}".encode()
    backend = distributed.get_backend(group)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(distributed.get_world_size(group))]
    _all_gather(sizes, size, group)
    padded = mine.new_zeros(max(int(x) for x in sizes))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in sizes]
    _all_gather(parts, padded, group)
    calls, every = [], []
    for rank, (part, n) in enumerate(zip(parts, sizes, strict=True)):
        line, _, rest = part[: int(n)].cpu().numpy().tobytes().partition(b"\n")
        if line == b"failed":
            raise ScaledotError(f"rank {rank}: {rest.decode()}") from cause
        calls.append(line.decode())
        every.append(rest)
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise ScaledotError(
                f"rank 0 calls reduce with {calls[0]}, rank {rank} with {other}: call it alike"
            )
    return every


def _all_gather(parts: list[Tensor], own: Tensor, group: Any) -> None:
    from torch import distributed

    try:
        distributed.all_gather(parts, own, group=group)
    except RuntimeError as error:
        raise ScaledotError(
            f"the statistics of {len(parts)} ranks did not all come: one has ended, or does not "
            f"call reduce ({str(error).splitlines()[0]})"
        ) from error


def _beside(a: HeadStats, b: HeadStats) -> HeadStats:
    """The heads of a and then those of b, of one module."""
    if a.d_k != b.d_k:
        raise ValueError(f"cannot join: d_k is {a.d_k} in one, {b.d_k} in the other")
    if a.measures.keys() != b.measures.keys():
        raise ValueError("cannot join: one saw rows and the other none")
    return HeadStats(
        a.kv_heads + b.kv_heads,
        a.d_k,
        (min(a.scale[0], b.scale[0]), max(a.scale[1], b.scale[1])),
        {name: torch.cat([x, b.counts[name]]) for name, x in a.counts.items()},
        _joined(a.scaled, b.scaled),
        _joined(a.raw, b.raw),
        {name: _joined(x, b.measures[name]) for name, x in a.measures.items()},
    )


def _joined(a: Any, b: Any) -> Any:
    """A `Measure` or `Pairs` of the heads of both."""
    parts: dict[str, Tensor] = {
        field.name: torch.cat([getattr(a, field.name), getattr(b, field.name)])
        for field in fields(a)
    }
    return type(a)(**parts)


def _with_key_heads(
    path: str, shards: Sequence[HeadStats], joined: HeadStats, kv_heads: int | None
) -> HeadStats:
    """A module's joined heads, with its key heads where neighbouring ranks hold copies of one."""
    held = joined.kv_heads
    if kv_heads is None:
        for rank, (a, b) in enumerate(pairwise(shards)):
            if a.kv_heads == b.kv_heads == 1 and _same_key(a, b):
                raise ScaledotError(
                    f"{path}: ranks {rank} and {rank + 1} hold the same key head: pass kv_heads=, "
                    f"how many the whole module has ({held} if they only look the same)"
                )
        return joined
    if held == kv_heads:
        return joined
    if kv_heads < 1 or held % kv_heads or any(one.kv_heads != 1 for one in shards):
        raise ScaledotError(
            f"{path}: {len(shards)} ranks hold {held} key heads, which are no copies of {kv_heads}:"
            " where there are copies each rank holds one, and each key head as many ranks"
        )
    if len({one.heads for one in shards}) > 1:
        raise ScaledotError(f"{path}: copies of a key head serve other numbers of heads by rank")
    measures = dict(joined.measures)
    if "key_norm" in measures:  # the only one whose axis is that of key heads
        norm, step = measures["key_norm"], held // kv_heads
        each = {field.name: getattr(norm, field.name)[::step] for field in fields(norm)}
        measures["key_norm"] = type(norm)(**each)
    return replace(joined, kv_heads=kv_heads, measures=measures)


def _same_key(a: HeadStats, b: HeadStats) -> bool:
    """Whether the norms of all keys are the same to the bit."""
    if "key_norm" not in a.measures:
        return False
    one, other = a.measures["key_norm"], b.measures["key_norm"]
    return all(getattr(one, field.name).equal(getattr(other, field.name)) for field in fields(one))

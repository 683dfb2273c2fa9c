"""Head statistics over the processes of torch.distributed: every rank gets what one process gives.

Each field has one declared reduction: counts and histograms add, extremes are the least and the
largest, moments merge by `heads.merge`. Every rank gathers all summaries and merges them in the
order of ranks, so that the result is the same to the bit on each; sums alone would depend on the
order in which a backend adds. Given the same rows as one process, counts, histograms and extremes
are those, and moments to 1e-12.

A summary takes about 10 kB a head and layer with every measure, so gathering costs less than one
layer's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor

from scaledot import ScaledotError
from scaledot.heads import HeadStats, merge, packed, unpacked


def reduce(
    stats: Mapping[str, HeadStats],
    group: Any = None,
    *,
    heads: Literal["same", "shards"] = "same",
) -> dict[str, HeadStats]:
    """Statistics by module path of all ranks of a process group, the same on every rank.

    heads: "same" where each rank saw other rows of the same heads (data parallel), "shards" where
    each holds other heads of a module (tensor parallel): they stand in the order of ranks, a key
    head that several ranks hold once for each. With both, first over the group that shares rows. A
    path of "same" that some ranks did not see is those others'. Without a process group the
    statistics come back as they are.

    Every rank of the group must call it. Tensors travel on the CPU, with NCCL on its device.

    Raises: ScaledotError on every rank where ranks disagree about a path, naming path and rank.
    """
    if heads not in ("same", "shards"):
        raise ValueError(f'heads is {heads!r}: pass "same" or "shards"')
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return dict(stats)
    every = [unpacked(one) for one in _gathered(packed(stats), group)]
    result: dict[str, HeadStats] = {}
    for rank, one in enumerate(every):
        if heads == "shards" and (absent := every[0].keys() ^ one.keys()):
            raise ScaledotError(
                f"{min(absent)} was seen on rank {0 if min(absent) in every[0] else rank} and not "
                f"on rank {rank if min(absent) in every[0] else 0}: each holds a part of its heads"
            )
        for path, found in one.items():
            if path not in result:
                result[path] = found
                continue
            join = merge if heads == "same" else _beside
            try:
                result[path] = join(result[path], found)
            except ValueError as error:
                raise ScaledotError(f"{path} on rank {rank}: {error}") from None
    return result


def _gathered(data: bytes, group: Any) -> list[bytes]:
    """Everybody's bytes, in the order of ranks."""
    from torch import distributed

    backend = distributed.get_backend(group)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    size = torch.tensor([len(own)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, size, group=group)
    longest = max(int(x) for x in sizes)
    padded = own.new_zeros(longest)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(parts, padded, group=group)
    return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]


def _beside(a: HeadStats, b: HeadStats) -> HeadStats:
    """The heads of a and then those of b, of one module."""
    if a.d_k != b.d_k:
        raise ValueError(f"cannot join: d_k is {a.d_k} in one, {b.d_k} in the other")
    if a.measures.keys() != b.measures.keys():
        raise ValueError("cannot join: other measures were taken of its heads")
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

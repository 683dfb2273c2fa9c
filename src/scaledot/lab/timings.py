"""The naive stages of attention with their seconds, and runs that take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Seconds = dict[str, float]
Key = TypeVar("Key", bound=Hashable)


def naive(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False
) -> tuple[dict[str, Tensor], Seconds]:
    """softmax(QKᵀ·scale)·V with everything n × n in memory: scores, weights and output, and the
    seconds of QKᵀ, the scale, softmax (with the mask) and ·V. Scores are scaled and masked in
    place, so two n × n matrices a head are kept at most.

    query, key and value are (…, heads, tokens, width) with as many heads each.
    """
    seconds = {}
    hidden = None
    if causal:
        n = query.shape[-2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=query.device).triu(1)
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[name], start = now - start, now

    scores = query @ key.mT
    lap("scores")
    scores.mul_(scale)
    lap("scale")
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    weights = scores.softmax(-1)
    lap("softmax")
    output = weights @ value
    lap("values")
    return {"scores": scores, "weights": weights, "output": output}, seconds


def least(
    runs: Mapping[Key, Callable[[], Seconds]],
    repeats: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[Key, Seconds]:
    """The least seconds of each part of each run over `repeats` rounds.

    Every round does each run once, so that a slow moment of the machine meets all of them; what
    else runs can only add time, hence the least.
    """
    best: dict[Key, Seconds] = {name: {} for name in runs}
    total = repeats * len(runs)
    for done in range(total):
        name = list(runs)[done % len(runs)]
        for part, seconds in runs[name]().items():
            best[name][part] = min(seconds, best[name].get(part, math.inf))
        if on_progress:
            on_progress(done + 1, total)
    return best


def threads() -> str:
    """On what was timed: ``1 thread``, ``8 threads``."""
    count = torch.get_num_threads()
    return f"{count} threads" if count > 1 else "1 thread"

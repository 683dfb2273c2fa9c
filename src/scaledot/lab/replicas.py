"""The random experiments of the articles run again, number for number: the R article's with R's
stream, the third exercise of "Why √d_k" with torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from scaledot.lab.rstream import RStream
from scaledot.stages import Trace, trace

R_SEED = 20260714
R_SIZES = (4, 16, 64, 256, 1024)
R_TRIALS = 5000
R_LARGE = 1024
"""d_k of the R article's one softmax, over three keys."""

EXERCISE_SEED = 0
EXERCISE_SIZES = (16, 64, 256, 1024)
EXERCISE_TRIALS = 10_000

_LARGEST_TORCH_SEED = 2**64 - 1
_BLOCK = 1 << 19
"""Components of q held at once."""


@dataclass(frozen=True, eq=False)
class RRun:
    """What the R article's code finds: variances (n − 1) of q·k and of q·k/√d_k by `R_SIZES`, and
    every stage of one query over three keys without and with the scale, in float64."""

    variance: tuple[float, ...]
    scaled_variance: tuple[float, ...]
    raw: Trace
    scaled: Trace


def r_run(seed: int = R_SEED, on_progress: Callable[[int, int], None] | None = None) -> RRun:
    """Parts 2 to 4 of the R article from R's set.seed(seed), in its order: per trial q, then k.

    on_progress(done, total) counts trials. Cost: a second, 20 MB.
    Raises: ValueError for a seed that R refuses.
    """
    stream = RStream(seed)
    total = 2 * len(R_SIZES) * R_TRIALS
    done = 0
    variances = []
    for scaled in (False, True):
        for d_k in R_SIZES:
            dots = np.empty(R_TRIALS)
            step = max(_BLOCK // d_k, 1)
            for first in range(0, R_TRIALS, step):
                block = dots[first : first + step]
                pairs = stream.normals(len(block) * 2 * d_k).reshape(-1, 2, d_k)
                block[:] = (pairs[:, 0] * pairs[:, 1]).sum(1)
                done += len(block)
                if on_progress is not None:
                    on_progress(done, total)
            if scaled:
                dots /= math.sqrt(d_k)
            variances.append(float(dots.var(ddof=1)))
    vectors = torch.from_numpy(stream.normals(4 * R_LARGE).reshape(4, R_LARGE))
    query, keys = vectors[:1], vectors[1:]
    count = len(R_SIZES)
    return RRun(
        tuple(variances[:count]), tuple(variances[count:]),
        trace(query, keys, scale=1.0), trace(query, keys),
    )  # fmt: skip


def exercise_dots(seed: int = EXERCISE_SEED) -> dict[int, Float[Tensor, " trials"]]:
    """q·k of 10,000 pairs by d_k, in float32, as torch.manual_seed(seed) gives them on a CPU; from
    a generator of its own, so that torch's state stays as it was.

    Raises: ValueError for a seed that torch refuses. Cost: half a second, 120 MB.
    """
    if seed > _LARGEST_TORCH_SEED:
        raise ValueError(f"seed is {seed}: torch takes at most {_LARGEST_TORCH_SEED}")
    generator = torch.Generator().manual_seed(seed)
    dots = {}
    for d_k in EXERCISE_SIZES:
        q = torch.randn(EXERCISE_TRIALS, d_k, generator=generator, dtype=torch.float32)
        k = torch.randn(EXERCISE_TRIALS, d_k, generator=generator, dtype=torch.float32)
        dots[d_k] = (q * k).sum(dim=1)
    return dots


def variance_error(d_k: int, trials: int) -> float:
    """Standard error of the variance of q·k over so many pairs of independent standard normal
    vectors: σ²√((2 + κ)/trials), where σ² = d_k and the excess kurtosis κ of q·k is 6/d_k.

    >>> round(variance_error(1024, 5000), 2)
    20.51
    """
    return d_k * math.sqrt((2 + 6 / d_k) / trials)


def slopes(weights: Float[Tensor, "*rows keys"]) -> Float[Tensor, "*rows keys"]:
    """p(1 − p) of each weight, where 1 − p is the sum of the others and does not cancel.

    >>> slopes(torch.tensor([1.0, 1e-20]))
    tensor([1.0000e-20, 1.0000e-20])
    """
    count = weights.shape[-1]
    others = torch.ones(count, count, dtype=weights.dtype) - torch.eye(count, dtype=weights.dtype)
    return weights * (weights @ others)

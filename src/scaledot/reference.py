"""The entropy that a row's width alone explains: softmax over independent Gaussian scores.

n scores N(0, σ²) are the random energy model (Derrida 1981). Its mean entropy is exact here, not
simulated: exp(−e^{−y}) shifted by ln Z is a Gumbel's distribution function, so E ln Z is an
integral of φ(y)ⁿ, φ(y) = E exp(−e^{σx − y}), and E H = E ln Z − σ ∂E ln Z/∂σ. φ does not depend on
n, so one sum serves every n. What a real row has more or less is its structure, not its scale.
Derivation and errors: docs/maths.md#reference.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor

from scaledot.checks import Problem
from scaledot.heads import HeadStats
from scaledot.rows import RowStats

LARGEST = 1 << 24
"""Keys up to which the reference is tabulated."""
WIDEST = 127.0
"""σ up to which it is; beyond, the entropy is taken to fall as 1/σ, to within 5e-4 nats."""
ERROR = 1e-4
"""Largest error of `gaussian_entropy` in nats up to there (tests/test_reference.py)."""
FEWEST = 16
"""Visible keys from which a row's own standard deviation says something of its width."""

STEP = 0.5
"""Of the trapezoidal sums: good for 1e-5, as a Gumbel's Fourier transform falls as e^(−π|ω|/2)."""
_PER_OCTAVE = 2
_WIDTH_STEP = 0.04

UNIT = (0.5, 2.0)
"""Within-row variance that counts as the unit variance of the theory."""
FLAT = 0.1
"""Within-row standard deviation below which entropy is within .005 nat of ln n."""


def sigma_c(n: Num[Tensor, "*rows"] | float) -> Float[Tensor, "*rows"]:
    """√(2 ln n): the standard deviation at which n Gaussian scores condense on few keys.

    Source: Derrida 1981, the random energy model; docs/maths.md#reference.

    >>> sigma_c(1024)
    tensor(3.7233, dtype=torch.float64)
    """
    return (2 * torch.as_tensor(n, dtype=torch.float64).log()).sqrt()


def gaussian_entropy(
    n: Num[Tensor, "*#rows"] | float, sigma: Num[Tensor, "*#rows"] | float
) -> Float[Tensor, "*rows"]:
    """Mean entropy, nats, of softmax over n independent N(0, σ²) scores, in float64.

    0 … ln n: about ln n − σ²/2 well below `sigma_c`, falling as 1/σ well above. NaN for NaN, for
    σ < 0 and for n outside 2 … 2²⁴. n and σ broadcast.

    Error: at most `ERROR`, interpolation included (tests/test_reference.py). Cost: a table at
    first, .2 s, then 16 look-ups each.
    Source: docs/maths.md#reference.

    >>> gaussian_entropy(1024, 1.0)
    tensor(6.4333, dtype=torch.float64)
    """
    keys, width = torch.broadcast_tensors(
        torch.as_tensor(n, dtype=torch.float64).cpu(),
        torch.as_tensor(sigma, dtype=torch.float64).cpu(),
    )
    inside = (keys >= 2) & (keys <= LARGEST) & (width >= 0) & width.isfinite()
    table = _table()
    narrow = torch.where(inside, width, 0.0).clamp(max=WIDEST)
    octaves = (torch.where(inside, keys, 2.0).log2() - 1) * _PER_OCTAVE
    i, along_n = _weights(octaves, table.shape[0])
    j, along_sigma = _weights(torch.log1p(narrow) / _WIDTH_STEP, table.shape[1])
    flat = table.flatten()
    result = torch.zeros_like(narrow)
    for a, in_n in enumerate(along_n):
        for b, in_sigma in enumerate(along_sigma):
            result += in_n * in_sigma * flat[(i + a) * table.shape[1] + j + b]
    wider = torch.where(width > WIDEST, width / WIDEST, 1.0)
    return torch.where(inside, result / wider, math.nan)


def _weights(place: Tensor, size: int) -> tuple[Tensor, list[Tensor]]:
    """The first of the four grid points about a place, and each one's weight (Lagrange)."""
    first = (place.floor() - 1).clamp(0, size - 4)
    x = place - first
    weights = []
    for k in range(4):
        others = [m for m in range(4) if m != k]
        weight = torch.ones_like(x)
        for m in others:
            weight = weight * (x - m) / (k - m)
        weights.append(weight)
    return first.long(), weights


@lru_cache(maxsize=1)
def _table() -> Tensor:
    """Entropy at n = 2, 2√2, 4 … (rows) and σ from 0, evenly in ln(1 + σ) (columns)."""
    octaves = math.log2(LARGEST)
    n = 2.0 ** (1 + np.arange((octaves - 1) * _PER_OCTAVE + 1) / _PER_OCTAVE)
    steps = math.ceil(math.log1p(WIDEST) / _WIDTH_STEP)
    sigmas = np.expm1(np.arange(steps + 1) * _WIDTH_STEP)
    columns = [np.log(n), *(exact_entropy(n, s) for s in sigmas[1:])]
    return torch.from_numpy(np.stack(columns, 1))


def exact_entropy(n: np.ndarray, sigma: float) -> np.ndarray:
    """The mean entropy at each n and one σ > 0, by two sums over a lattice.

    E ln Z = ∫ exp(−e^{−y}) − φⁿ dy, whose derivative by σ is −∫ nφⁿ⁻¹ ∂φ/∂σ dy.
    """
    # How far out a Gaussian counts: the largest of n lies near √(2 ln n).
    left, right = 9.0, math.sqrt(2 * math.log(n.max())) + 7
    # With y and σx on one lattice, a mean over x is a convolution.
    gap = STEP / math.ceil(STEP / (sigma * STEP)) if sigma < 1 else STEP
    x = np.arange(-math.ceil(left * sigma / gap), math.ceil(right * sigma / gap) + 1) * gap / sigma
    weight = np.exp(-x * x / 2)
    weight /= weight.sum()
    low = -left * sigma - 4
    high = math.log(n.max()) + min(sigma * sigma / 2, sigma * right) + 24
    first, last = math.floor(low / gap), math.ceil(high / gap)
    y = np.arange(first, last + 1) * gap
    z = np.arange(first - round(x[-1] * sigma / gap), last - round(x[0] * sigma / gap) + 1) * gap
    t = np.exp(-np.maximum(z, -700.0))
    missing = np.convolve(-np.expm1(-t), weight, mode="valid")  # 1 − φ, without cancellation
    slope = np.convolve(t * np.exp(-t), weight * x, mode="valid")  # −∂φ/∂σ
    log_phi = np.log1p(-np.minimum(missing, 1 - 2.0**-53))[:, None]
    gumbel = np.exp(-np.exp(-np.maximum(y, -700.0)))[:, None]
    log_z = (gumbel - np.exp(n * log_phi)).sum(0) * gap
    energy = (n * np.exp((n - 1) * log_phi) * slope[:, None]).sum(0) * gap * sigma
    return log_z - energy


def excess(problem: Problem, rows: RowStats) -> dict[str, Float[Tensor, "batch heads queries"]]:
    """How a row's entropy differs from what its width explains, as row measures.

    "excess_entropy": H − `gaussian_entropy`(visible keys, within-row standard deviation of α⟨q,k⟩),
    nats. Negative: sharper than the width explains (few heavy keys, a bias); positive: flatter (a
    soft-cap, a bounded or two-valued distribution). About 0 for Gaussian scores of any width, which
    entropy alone is not.
    "relative_width": that standard deviation ÷ `sigma_c`, above 1 where even Gaussian scores would
    condense on few keys.
    With a sink, H is that of the weights among keys. NaN for empty and non-finite rows, for those
    that see fewer than `FEWEST` keys, whose own width is not known well enough, and where a sink
    holds nearly all.

    Cost O(n). Merges as `HeadStats` does. Source: docs/maths.md#reference.

    >>> q, k = torch.randn(2, 1, 4, 32, 16).unbind()
    >>> excess(checks.problem(q, k, None), row_stats(q, k))["excess_entropy"].shape
    torch.Size([1, 4, 32])
    """
    n = rows.visible.double()
    width = (rows.score_var.double() * n / (n - 1).clamp(min=1)).sqrt()
    entropy = rows.entropy.double()
    if problem.sinks is not None and rows.sink_mass is not None:
        sink = rows.sink_mass.double()
        # H = h(sink) + (1 − sink)·H among keys
        among = -(torch.special.xlogy(sink, sink) + torch.special.xlogy(1 - sink, 1 - sink))
        # What is left cancels as the sink takes all: below this it is not known.
        known = 1 - sink > 1e4 * torch.finfo(rows.sink_mass.dtype).eps
        entropy = torch.where(known, (entropy - among) / (1 - sink), math.nan)
    enough = (n >= FEWEST) & rows.entropy.isfinite()
    reference = gaussian_entropy(n, width).to(entropy.device)
    dtype = rows.entropy.dtype
    return {
        "excess_entropy": torch.where(enough, entropy - reference, math.nan).to(dtype),
        "relative_width": torch.where(enough, width / sigma_c(n), math.nan).to(dtype),
    }


def verdict(stats: HeadStats, head: int) -> str:
    """What a head's width is for the number of keys that it sees, in one word.

    "condensed": mean standard deviation ÷ √(2 ln n) is 1 or more; "near-uniform": mean within-row
    variance below .01; "unit": it is ½ … 2; else "narrow" or "wide". "unknown" for no rows that
    see `FEWEST` keys. A description: sharp and flat heads are how trained models work.

    Raises: ValueError if the statistics hold no "relative_width". Source: docs/maths.md#reference.
    """
    if "relative_width" not in stats.measures:
        raise ValueError("these statistics hold no relative_width: add those of reference.excess")
    variance = stats.measures["score_var"].of_head(head)
    relative = stats.measures["relative_width"].of_head(head)
    if math.isnan(relative) or math.isnan(variance):
        return "unknown"
    if relative >= 1:
        return "condensed"
    if variance < FLAT**2:
        return "near-uniform"
    if UNIT[0] <= variance <= UNIT[1]:
        return "unit"
    return "narrow" if variance < UNIT[0] else "wide"

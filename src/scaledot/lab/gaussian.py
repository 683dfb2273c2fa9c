"""Rows of attention whose q and k are independent standard normal components: drawn, put through
softmax without cancellation, and the exact means of what softmax makes of them.

A row's scores share their query: given ‖q‖ they are independent N(0, α²‖q‖²), and ‖q‖² is χ² with
d_k degrees. So a row is drawn as ‖q‖ and n normal numbers, exactly and without a single vector, and
a mean is one over ‖q‖ of the random energy model's (Derrida 1981). With Z = Σe^{s_j}, every mean of
a polynomial in the weights is an integral: Z^{−k} = ∫ λ^{k−1} e^{−λZ} dλ / Γ(k), and e^{−λZ} is a
product over keys. Derivation: docs/maths.md#gaussian-rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from scaledot import numerals
from scaledot.lab import arguments
from scaledot.lab.results import Estimate, chance
from scaledot.scales import RULES, factor

ERROR = 1e-5
"""Largest relative error of `exact`; of the entropy, relative to a nat (tests/test_gaussian.py)."""
LARGEST = 1 << 24
"""Keys up to which a row is drawn: it is held whole."""

_WORK = 1 << 17
"""Numbers drawn at a time: what a core's cache holds."""
_STEP = 0.25
"""Of the sums over y: a Gamma function's decay makes the trapezoidal rule good for 1e-9."""
_NODES, _FEW = 20, 16
"""Of the sum over ‖q‖². With fewer components than _FEW ‖q‖ may be near 0, where a large scale
bends every mean: the sum is then one over ln ‖q‖², _APART apart."""
_APART = 0.3
_CARRIERS = 30
"""Rows that must carry a mean for the sample to know its error."""
_NARROW = 0.002
"""Standard deviation of scores below which the first terms in it are enough."""
WIDEST = 4096.0
"""Standard deviation of scores up to which the sums are made."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What softmax made of rows of scores; each (rows,) but the first two.

    weights: (rows, keys). top: (rows, 1), the heaviest key, the first of equals. rest: 1 − p_max.
    lead: ln(p_max/(1 − p_max)), nats, infinite where every other key underflows. entropy: nats.
    trace: Σp(1−p), the trace of softmax's Jacobian.
    """

    weights: Float[np.ndarray, "rows keys"]
    top: np.ndarray
    rest: Float[np.ndarray, " rows"]
    lead: Float[np.ndarray, " rows"]
    entropy: Float[np.ndarray, " rows"]
    trace: Float[np.ndarray, " rows"]


def softmax(scores: Float[np.ndarray, "rows keys"], scale: Float[np.ndarray, "#rows 1"]) -> Rows:
    """Softmax of scale·scores along each row, every number as exact as float64 holds it: the top
    key's complement is the sum of the others, and differences are taken before they are scaled.

    Source: docs/maths.md#rows.

    >>> float(softmax(np.array([[0.0, 40.0]]), np.ones((1, 1))).rest[0])
    4.248354255291589e-18
    """
    if (scale < 0).any():
        scores, scale = np.where(scale < 0, -scores, scores), np.abs(scale)
    top = scores.argmax(-1)[:, None]
    away = (scores - np.take_along_axis(scores, top, -1)) * scale
    others = np.exp(away)
    np.put_along_axis(others, top, 0.0, -1)
    r, squares = others.sum(-1), np.square(others).sum(-1)
    total = 1 + r
    with np.errstate(divide="ignore"):
        lead = -np.log(r)
    entropy = np.log1p(r) - (others * away).sum(-1) / total
    np.put_along_axis(others, top, 1.0, -1)
    return Rows(
        others / total[:, None], top, r / total, lead, entropy,
        (2 * r + r * r - squares) / total**2,
    )  # fmt: skip


def generator(seed: int, *cell: int) -> np.random.Generator:
    """The random stream of one cell of an experiment: the same whatever other cells there are."""
    return np.random.default_rng([seed, *cell])


def asked(rules: Any) -> list[str | float]:
    """Scale rules, one or several, each once and in order.

    Raises: ValueError for none and for one that `scales.factor` does not know.
    """
    alone = isinstance(rules, str) or not isinstance(rules, Iterable)
    several = [rules] if alone else list(rules)
    if not several:
        raise ValueError(f"rules is empty: pass some of {', '.join(RULES)}, or numbers")
    for rule in several:
        factor(rule, 1, d_model=1, keys=2)
    return list(dict.fromkeys(several))


def written(rule: str | float) -> str:
    """A rule as tables write it."""
    return RULES[rule] if isinstance(rule, str) else f"{float(rule):.10g}"


def lengths(keys: int | Iterable[int]) -> tuple[int, ...]:
    """Numbers of keys that can be drawn.

    Raises: TypeError, ValueError.
    """
    found = arguments.sizes("keys", keys, 2)
    if max(found) > LARGEST:
        raise ValueError(f"keys is {max(found):,}: pass at most {LARGEST:,}")
    return found


def agreement(estimates: Iterable[Estimate]) -> str:
    """How far the largest z is from theory's, in words.

    Estimates may share their draws: normal z that do are at most as likely to be as large.
    """
    known = [e for e in estimates if e.theory is not None]
    zs = [abs(e.z) for e in known if e.z is not None]
    without = sum(e.error is None and e.value != e.theory for e in known)
    few = (
        f" {without} have no standard error, as fewer than {_CARRIERS} rows carry the mean: take "
        "more trials." if without else ""
    )  # fmt: skip
    if not zs:
        return "No estimate here has both a theory and a standard error." + few
    odds = chance(max(zs), len(zs))
    often = (
        ("in nearly all runs" if odds >= 0.995 else f"in at most {numerals.share(odds)} of runs")
        if len(zs) > 1
        else (f"in {numerals.share(odds)} of runs")
    )
    return (
        f"z: distance from theory in standard errors. Largest of {len(zs)}: {max(zs):.2f}; chance "
        f"gives one as large {often}. {'Agrees with' if odds > 0.01 else 'Differs from'} theory."
        + few
    )


def chunks(keys: int, trials: int) -> Iterator[int]:
    """How many rows of `keys` to draw at a time, until there are `trials`."""
    most = max(_WORK // keys, 1)
    for first in range(0, trials, most):
        yield min(most, trials - first)


def norms(rng: np.random.Generator, d: int, rows: int) -> Float[np.ndarray, "rows 1"]:
    """The length of `rows` standard normal vectors of d components; 0 for d = 0."""
    return np.sqrt(2 * rng.standard_gamma(d / 2, (rows, 1)))


class Running:
    """Mean and standard error of numbers that come in blocks, in constant memory.

    Blocks merge by Chan, Golub & LeVeque (1979).
    """

    def __init__(self) -> None:
        self.count, self.mean, self._m2 = 0, 0.0, 0.0

    def add(self, values: Float[np.ndarray, " block"]) -> None:
        n, mean = values.size, float(values.mean())
        apart, count = mean - self.mean, self.count + n
        self._m2 += float(np.square(values - mean).sum()) + apart**2 * self.count * n / count
        self.mean += apart * n / count
        self.count = count

    def estimate(self, theory: float | None = None) -> Estimate:
        """The mean, from two numbers on. Its error is at least that of rounding, and None where
        fewer numbers than `_CARRIERS` carry the mean, (Σx)²/Σx²: their spread then says little."""
        total = self.count * self.mean
        if total * total < _CARRIERS * (self._m2 + total * self.mean):
            return Estimate(self.mean, None, theory)
        error = math.sqrt(self._m2 / (self.count - 1) / self.count)
        return Estimate(self.mean, max(error, 2.0**-50 * abs(self.mean)), theory)


def share(hits: int, of: int) -> Estimate:
    """A share with its standard error, taken at (hits + 1)/(of + 2): none or all is not certain."""
    near = (hits + 1) / (of + 2)
    return Estimate(hits / of, math.sqrt(near * (1 - near) / of))


@dataclass(frozen=True)
class Exact:
    """Means over rows of n keys, q and k independent standard normal, J = diag(p) − ppᵀ.

    entropy: nats. trace: E tr J. jacobian: E ‖J‖². by_query: E α²‖q‖²·‖J‖². along: E ‖α J K‖²,
    K the keys, which is what dQ is for unit-variance dO·v.
    """

    entropy: float
    trace: float
    jacobian: float
    by_query: float
    along: float


@lru_cache(maxsize=256)
def exact(keys: int, d_k: int, scale: float) -> Exact:
    """The means that theory gives, not simulated.

    Error: at most `ERROR`, relative. Cost: a few ms for each of up to 100 lengths of q.
    Raises: ValueError where scores are wider than `WIDEST`.
    Source: docs/maths.md#gaussian-rows.

    >>> round(exact(1024, 64, 1 / 8).entropy, 3)
    6.433
    """
    if not abs(scale) * math.sqrt(d_k) <= WIDEST:
        raise ValueError(
            f"scale {scale:g} at d_k {d_k:,} makes scores {abs(scale) * math.sqrt(d_k):.4g} wide: "
            f"pass one that makes them at most {WIDEST:,.0f}"
        )
    total, whole = np.zeros(5), 0.0
    for square, share_of in zip(*_chi_square(d_k), strict=True):
        if share_of > 1e-12:
            whole += share_of
            sigma = abs(scale) * math.sqrt(square)
            entropy, trace, jacobian, parallel = _of_width(keys, sigma)
            # K along q, and across it: given dS, d_k − 1 more independent components.
            along = scale**2 * (parallel + (d_k - 1) * jacobian)
            total += share_of * np.array([entropy, trace, jacobian, sigma**2 * jacobian, along])
    return Exact(*(total / whole).tolist())


def _chi_square(degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights, which add up to 1, for a mean over χ²: Gauss's for generalised Laguerre,
    by the eigenvalues of its recurrence (Golub & Welsch 1969); of few degrees, the trapezoidal
    rule over the logarithm."""
    if degrees < _FEW:
        # To 1e-12 of the mass on the left, and e⁻⁶⁰ on the right.
        places = np.arange(math.floor(-56 / degrees / _APART), math.ceil(4.8 / _APART)) * _APART
        weights = np.exp(degrees / 2 * places - np.exp(places) / 2)
        return np.exp(places), weights / weights.sum()
    a, k = degrees / 2 - 1, np.arange(_NODES)
    off = np.sqrt(k[1:] * (k[1:] + a))
    nodes, vectors = np.linalg.eigh(np.diag(2 * k + 1 + a) + np.diag(off, 1) + np.diag(off, -1))
    return 2 * nodes.clip(min=0), vectors[0] ** 2


def _of_width(n: int, sigma: float) -> tuple[float, float, float, float]:
    """(E H, E tr J, E ‖J‖², E ‖Jx‖²) of n scores σx, x standard normal.

    With t = e^{σx − y}, λ = e^{−y} and A_ka = E x^a t^k e^{−t}, a mean of weights of m keys is
    n(n−1)…(n−m+1) ∫ ∏A φ^{n−m} dy / Γ(sum of the powers).
    """
    if sigma < _NARROW:
        apart = (n - 1) / n**2
        return math.log(n) - sigma**2 * n * apart / 2, 1 - 1 / n - sigma**2 * apart, apart, apart
    left, right = 9.0, math.sqrt(2 * math.log(n)) + 7
    gap = _STEP / math.ceil(1 / sigma) if sigma < 1 else _STEP
    # With y and σx on one lattice, a mean over x is a convolution.
    x = np.arange(-math.ceil(left * sigma / gap), math.ceil(right * sigma / gap) + 1) * gap / sigma
    weight = np.exp(-x * x / 2)
    weight /= weight.sum()
    low = -left * sigma - 4
    high = math.log(n) + min(sigma * sigma / 2, sigma * right) + 24
    first, last = math.floor(low / gap), math.ceil(high / gap)
    y = np.arange(first, last + 1) * gap
    z = np.arange(first - round(x[-1] * sigma / gap), last - round(x[0] * sigma / gap) + 1) * gap
    t = np.exp(-np.maximum(z, -700.0))
    size = 1 << (len(z) + len(x)).bit_length()
    kernels = [np.fft.rfft(weight * x**a, size) for a in range(3)]

    def mean(power: int, a: int) -> np.ndarray:
        kept = t < 700  # beyond, e^{−t} is 0 and t^k must not be ∞
        values = np.where(kept, np.where(kept, t, 0.0) ** power * np.exp(-t), 0.0)
        return _valid(values, kernels[a], size, len(x), len(y))

    missing = _valid(-np.expm1(-t), kernels[0], size, len(x), len(y)).clip(0, 1 - 2.0**-53)
    log_phi = np.log1p(-missing)
    phi = [np.exp((n - m) * log_phi) for m in range(4)]
    ways = [1.0, n, n * (n - 1.0), n * (n - 1.0) * (n - 2.0)]

    def integral(*factors: np.ndarray) -> float:
        product = phi[len(factors)] * ways[len(factors)]
        for one in factors:
            product = product * one
        return float(product.sum()) * gap

    t1x, t2, t2x, t2xx = mean(1, 1), mean(2, 0), mean(2, 1), mean(2, 2)
    t3, t3x, t3xx, t4, t4xx = mean(3, 0), mean(3, 1), mean(3, 2), mean(4, 0), mean(4, 2)
    s2, s3 = integral(t2), integral(t3) / 2
    s2_squared = (integral(t4) + integral(t2, t2)) / 6
    # Σp²(x − x̄)², multiplied out; x̄ = Σpx.
    crossed = integral(t3xx) + integral(t2x, t1x)
    centred = integral(t4xx) + 2 * integral(t3x, t1x) + integral(t2, t2xx)
    parallel = integral(t2xx) - crossed + (centred + integral(t2, t1x, t1x)) / 6
    gumbel = np.exp(-np.exp(-np.maximum(y, -700.0)))
    log_z = float((gumbel - phi[0]).sum()) * gap
    # E Σp·s = σ²(1 − E Σp²), by parts.
    return log_z - sigma**2 * (1 - s2), 1 - s2, s2 - 2 * s3 + s2_squared, parallel


def _valid(
    values: np.ndarray, kernel: np.ndarray, size: int, width: int, length: int
) -> np.ndarray:
    """np.convolve(values, weights, "valid"), by FFT."""
    return np.fft.irfft(np.fft.rfft(values, size) * kernel, size)[width - 1 : width - 1 + length]

"""q·k of random vectors: how it is drawn, and its exact moments.

Trials are drawn in blocks. A block has a random stream of its own, named by the seed, d_k and the
block's number, and its count, mean and sum of squared deviations join those before it in the order
of blocks (Chan, Golub & LeVeque 1979). So memory does not grow with trials or d_k, and neither
threads nor the other sizes asked for change a number. Components are drawn in float32, Student's in
float64; every product is formed and added in float64, where that of two float32 numbers is exact.
docs/maths.md#the-simulated-variance
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch

from scaledot.lab import arguments
from scaledot.lab.results import Estimate

COMPONENTS = ("normal", "uniform", "signs", "student")
"""Laws of a component with mean 0 and variance 1."""
LARGEST_MEAN = 1e6
"""Beyond it, rounding of q·k, which grows with the mean's square, would reach the estimate."""
BLOCK = 1 << 16
"""Components of q, and of k, that are drawn together: what a core's cache holds."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations from it, of numbers seen so far; float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: np.ndarray) -> Moments:
        mean = float(values.mean())
        return Moments(len(values), mean, float(np.square(values - mean).sum()))

    def merge(self, other: Moments) -> Moments:
        """Those of both together."""
        count = self.count + other.count
        if not count:
            return self
        apart, weight = other.mean - self.mean, other.count / count
        joint = apart * apart * self.count * weight
        return Moments(count, self.mean + apart * weight, self.squares + other.squares + joint)

    @property
    def variance(self) -> float:
        """With n − 1 in the denominator, as R's var and torch's."""
        return self.squares / (self.count - 1)


@dataclass(frozen=True)
class Law:
    """How the components of q and k are drawn; q and k are independent.

    Each component is mean + √(1 − correlation)·own + √correlation·common: `own` of each component,
    `common` of each vector, both of the law named, with mean 0 and variance 1.
    """

    components: str = "normal"
    mean: float = 0.0
    correlation: float = 0.0
    degrees: float = 5.0

    @property
    def kurtosis(self) -> float:
        """Fourth moment of the law named, ∞ where there is none."""
        if self.components == "student":
            return 3 + 6 / (self.degrees - 4) if self.degrees > 4 else math.inf
        return {"normal": 3.0, "uniform": 1.8, "signs": 1.0}[self.components]

    def __str__(self) -> str:
        said = {
            "normal": "",
            "uniform": ", uniform components",
            "signs": ", components ±1",
            "student": f", Student's t with {self.degrees:g} degrees of freedom",
        }[self.components]
        said += f", mean {self.mean:g}" if self.mean else ""
        return said + (f", correlation {self.correlation:g}" if self.correlation else "")


def law(components: str, mean: float, correlation: float, degrees: float) -> Law:
    """The law asked for.

    Raises: ValueError for an unknown name, a mean beyond `LARGEST_MEAN`, a correlation outside 0 to
    1, or degrees of Student's t at which it has no variance; TypeError for what is no number.
    """
    found = Law(
        arguments.one_of("components", components, COMPONENTS),
        _real("mean", mean),
        _real("correlation", correlation),
        _real("degrees", degrees),
    )
    if abs(found.mean) > LARGEST_MEAN:
        raise ValueError(f"mean is {mean!r}: pass a number from −1e6 to 1e6")
    if not 0 <= found.correlation <= 1:
        raise ValueError(f"correlation is {correlation!r}: pass a number from 0 to 1")
    if found.components == "student" and found.degrees <= 2:
        raise ValueError(
            f"degrees is {degrees!r}: Student's t has a variance above 2 degrees of freedom only"
        )
    return found


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: pass a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: pass a finite number")
    return float(value)


def theory(law: Law, d: int) -> tuple[float, float]:
    """Variance and fourth central moment of q·k, exact; the latter is ∞ where there is none.

    Given the common parts c and g of the two vectors, q·k is a sum of d independent terms, whose
    moments are polynomials in c and g of degree 4 at most in each. Their mean over three points
    with the law's moments is therefore their mean over the law.
    """
    own, common = 1 - law.correlation, math.sqrt(law.correlation)
    mu, four, others = law.mean, law.kurtosis, (d - 1) * law.correlation
    second = d * (1 + others * law.correlation + 2 * mu * mu * (1 + others))
    if math.isinf(four):
        return second, math.inf
    fourth = 0.0
    points = ((math.sqrt(four), 0.5 / four), (0.0, 1 - 1 / four), (-math.sqrt(four), 0.5 / four))
    for (c, p), (g, r) in itertools.product(points, points):
        a, b = mu + common * c, mu + common * g
        # The terms' own moments, and how far their mean is from the mean of all.
        m2 = own * own + own * (a * a + b * b)
        m3 = 6 * own * own * a * b
        m4 = (own * own * four) ** 2 + 6 * own**3 * four * (a * a + b * b)
        m4 += own * own * (four * (a**4 + b**4) + 6 * (a * b) ** 2)
        off = d * (mu * common * (c + g) + law.correlation * c * g)
        here = off**4 + 6 * off * off * d * m2 + 4 * off * d * m3
        fourth += p * r * (here + d * m4 + 3 * d * (d - 1) * m2 * m2)
    return second, fourth


def estimate(value: float, exact: tuple[float, float], trials: int) -> Estimate:
    """A sample variance, denominator trials − 1, beside the exact one. Its error is exact too, by
    the fourth moment, and None without one."""
    variance, fourth = exact
    if math.isinf(fourth):
        return Estimate(value, None, variance)
    spread = fourth - variance * variance * (trials - 3) / (trials - 1)
    return Estimate(value, math.sqrt(max(spread, 0.0) / trials), variance)


def times(estimate: Estimate, square: float) -> Estimate:
    """The variance of the same draws, multiplied by a factor whose square this is."""
    error = None if estimate.error is None else estimate.error * square
    exact = None if estimate.theory is None else estimate.theory * square
    return Estimate(estimate.value * square, error, exact)


def sampled(values: np.ndarray, trials: int, rng: np.random.Generator) -> Estimate:
    """The variance of so many of the values, drawn with replacement, beside that of all of them."""
    found = Moments()
    for start in range(0, trials, BLOCK):
        at = rng.integers(len(values), size=min(BLOCK, trials - start))
        found = found.merge(Moments.of(values[at]))
    away = np.square(values - values.mean())
    return estimate(found.variance, (float(away.mean()), float(np.square(away).mean())), trials)


def draw(
    law: Law, rng: np.random.Generator, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Components of q and k (rows, columns) of the law named, before correlation and mean."""
    shape = (2, rows, columns)
    if law.components == "normal":
        # Box & Muller (1958): a radius and an angle give two independent normals, one for q and
        # one for k. The uniforms are the middles of 2^24 steps, so that the radius ends at 5.9 and
        # the variance of q·k is 4e-7 too small: the standard error of 10^13 trials.
        radius, angle = rng.random(shape, np.float32)
        np.log(np.add(radius, np.float32(2**-25), out=radius), out=radius)
        np.sqrt(np.multiply(radius, -2, out=radius), out=radius)
        np.multiply(angle, np.float32(2 * math.pi), out=angle)
        q = np.cos(angle)
        np.sin(angle, out=angle)
        return np.multiply(q, radius, out=q), np.multiply(angle, radius, out=angle)
    if law.components == "uniform":
        x = (rng.random(shape, np.float32) - np.float32(0.5)) * np.float32(math.sqrt(12))
    elif law.components == "signs":
        bits = np.frombuffer(rng.bytes(-(-math.prod(shape) // 8)), np.uint8)
        x = np.unpackbits(bits, count=math.prod(shape)).reshape(shape) * np.float32(2) - 1
    else:
        x = rng.standard_t(law.degrees, shape) / math.sqrt(law.degrees / (law.degrees - 2))
    return x[0], x[1]


def products(law: Law, seed: int, d: int, block: int, rows: int) -> np.ndarray:
    """q·k of the trials of one block, float64."""
    sequence = np.random.SeedSequence(seed, spawn_key=(d, block))
    rng = np.random.Generator(np.random.SFC64(sequence))
    own, common = math.sqrt(1 - law.correlation), math.sqrt(law.correlation)
    shift = np.full((2, rows, 1), law.mean)
    if law.correlation:
        shift += common * np.stack(draw(law, rng, rows, 1))
    dots = np.zeros(rows)
    for start in range(0, d, BLOCK):
        q, k = draw(law, rng, rows, min(BLOCK, d - start))
        if law.mean or law.correlation:
            q, k = own * q.astype(np.float64) + shift[0], own * k.astype(np.float64) + shift[1]
        dots += np.einsum("ij,ij->i", q, k, dtype=np.float64)
    return dots


def simulated(
    sizes: Sequence[int],
    trials: int,
    seed: int,
    law: Law,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Moments]:
    """The moments of q·k for each d_k, over blocks that as many threads as torch's share.

    on_progress(products done, in all) is called as blocks end.
    """

    def run(place: int, block: int, rows: int) -> tuple[int, Moments]:
        return place, Moments.of(products(law, seed, sizes[place], block, rows))

    def blocks() -> Iterator[tuple[int, int, int]]:
        for place, d in enumerate(sizes):
            step = max(1, BLOCK // d)
            for block, start in enumerate(range(0, trials, step)):
                yield place, block, min(step, trials - start)

    found = [Moments() for _ in sizes]
    done, total, left = 0, trials * sum(sizes), blocks()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        # Two blocks a thread wait at any time: memory stays, and Ctrl-C ends after as many.
        waiting: deque[Future[tuple[int, Moments]]] = deque(
            pool.submit(run, *one) for one in itertools.islice(left, 2 * threads)
        )
        while waiting:
            place, moments = waiting.popleft().result()
            waiting.extend(pool.submit(run, *one) for one in itertools.islice(left, 1))
            found[place] = found[place].merge(moments)
            done += moments.count * sizes[place]
            if on_progress is not None:
                on_progress(done, total)
    return found

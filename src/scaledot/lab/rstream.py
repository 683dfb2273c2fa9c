"""R's stream of normal numbers without R: `set.seed(n); rnorm(k)` to the last digit or two.

Three steps, each as R 3.6 and later do them by default: the seed is scrambled by the congruential
generator x → 69069·x + 1 into the 624 words of the Mersenne Twister (Matsumoto & Nishimura 1998),
which NumPy runs; a word over 2³² is a uniform number, kept off 0 and 1; and a normal number is the
quantile of one uniform of 53 bits made of two, by Wichura's rational approximations (1988,
algorithm AS 241, PPND16, Applied Statistics 37:477). Source of the order: R, src/main/RNG.c and
src/nmath/snorm.c, "Inversion".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LARGEST_SEED = 2**31 - 1
"""R's set.seed takes an integer of 32 bits."""

_WORDS = 624
_SCRAMBLES = 50
_WORD = 2.3283064365386963e-10  # 2⁻³²
_EDGE = 2.328306437080797e-10  # 1/(2³² − 1): half of it is the smallest uniform
_BIG = 134217728.0  # 2²⁷: how finely the first of two uniforms is cut
_BLOCK = 1 << 16
"""Normals made at once, so that the steps of one block stay in the cache."""


class RStream:
    """What R draws after `set.seed(seed)`, from the first number on.

    Raises: ValueError for a seed that R refuses. Cost: about 50 ns a normal.

    >>> RStream(1).normals(3).round(7)
    array([-0.6264538,  0.1836433, -0.8356286])
    """

    def __init__(self, seed: int) -> None:
        if abs(seed) > LARGEST_SEED:
            raise ValueError(f"seed is {seed}: R takes at most {LARGEST_SEED}")
        words = twister_words(seed)
        twister = np.random.MT19937()
        twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
        self._words = np.random.Generator(twister)

    def uniforms(self, count: int) -> np.ndarray:
        """The next numbers of `runif`, strictly between 0 and 1."""
        # All of uint32's range: NumPy gives the words themselves, and fast.
        words = self._words.integers(0, 2**32, count, dtype=np.uint32)
        u = words * _WORD
        return np.clip(u, 0.5 * _EDGE, 1 - 0.5 * _EDGE, out=u)

    def normals(self, count: int) -> np.ndarray:
        """The next numbers of `rnorm`: two uniforms each."""
        out = np.empty(count)
        for first in range(0, count, _BLOCK):
            block = out[first : first + _BLOCK]
            u = self.uniforms(2 * len(block))
            block[:] = normal_quantile((np.floor(_BIG * u[::2]) + u[1::2]) / _BIG)
        return out


def twister_words(seed: int) -> np.ndarray:
    """The 624 words that R's set.seed puts into the twister, which starts by renewing them all."""
    x = seed % 2**32
    for _ in range(_SCRAMBLES):
        x = (69069 * x + 1) % 2**32
    words = np.empty(_WORDS + 1, dtype=np.uint32)
    for i in range(_WORDS + 1):
        x = (69069 * x + 1) % 2**32
        words[i] = x
    return words[1:]  # the first is where R keeps its place, reset to 624


# Wichura 1988, PPND16: numerators and denominators from the constant up, of r = .180625 − q² where
# |q| = |p − ½| ≤ .425, and beyond of √(−ln min(p, 1 − p)) less 1.6 up to 5 and less 5 above.
_CENTRE = (
    (3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
     45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727),
    (1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077,
     21213.794301586595867, 39307.895800092710610, 28729.085735721942674, 5226.4952788528545610),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550,
     3.64784832476320460504, 1.27045825245236838258, 0.241780725177450611770,
     0.0227238449892691845833, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550,
     0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_FAR_TAIL = (
    (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580,
     0.296560571828504891230, 0.0265321895265761230930, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


def normal_quantile(p: np.ndarray) -> np.ndarray:
    """The z below which a standard normal number falls with probability p; p strictly inside 0, 1.

    Error: about 1e-16 relative (Wichura 1988; tests/test_rstream.py).

    >>> normal_quantile(np.array([0.5, 0.975])).round(6)
    array([0.      , 1.959964])
    """
    q = p - 0.5
    z = q * _ratio(_CENTRE, 0.180625 - q * q)
    outside = np.flatnonzero(np.abs(q) > 0.425)
    side = q[outside]
    r = np.sqrt(-np.log(np.where(side < 0, p[outside], 1 - p[outside])))
    tail = _ratio(_TAIL, r - 1.6)
    far = r > 5
    if far.any():
        tail[far] = _ratio(_FAR_TAIL, r[far] - 5)
    z[outside] = np.copysign(tail, side)
    return z


def _ratio(terms: Sequence[Sequence[float]], r: np.ndarray) -> np.ndarray:
    above, below = (_polynomial(coefficients, r) for coefficients in terms)
    above /= below
    return above


def _polynomial(coefficients: Sequence[float], r: np.ndarray) -> np.ndarray:
    """By Horner's rule, in R's order of operations."""
    *rest, last = coefficients
    total = r * last
    for coefficient in rest[:0:-1]:
        total += coefficient
        total *= r
    total += rest[0]
    return total

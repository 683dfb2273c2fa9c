"""The stream is R's: numbers printed by R 4.2.2 (Debian 12), and the normal law by itself."""

import doctest
import math

import numpy as np
import pytest

from scaledot.lab import rstream
from scaledot.lab.rstream import LARGEST_SEED, RStream, normal_quantile

FIRST = {
    0: [1.262954284880793, -0.326233360705649],
    1: [-0.626453810742332, 0.183643324222082, -0.835628612410047],
    LARGEST_SEED: [0.494907901076881, -0.853235969526475],
}
"""set.seed(n); print(rnorm(k), digits = 15)"""


@pytest.mark.parametrize("seed", FIRST)
def test_normals_are_rs(seed):
    expected = FIRST[seed]
    assert RStream(seed).normals(len(expected)).tolist() == pytest.approx(expected, rel=3e-15)


def test_uniforms_are_rs_for_a_negative_seed_too():
    assert RStream(-5).uniforms(2).tolist() == pytest.approx(
        [0.734594767913222, 0.339692771434784], rel=3e-15
    )


@pytest.mark.parametrize("first", [1, 5, 65535, 65536, 65537])
def test_numbers_do_not_depend_on_how_many_are_asked_for_at_once(first):
    whole = RStream(7).normals(140_000)
    stream = RStream(7)
    parts = np.concatenate([stream.normals(first), stream.normals(140_000 - first)])
    assert (parts == whole).all()


@pytest.mark.parametrize("seed", [LARGEST_SEED + 1, -(2**31)])
def test_a_seed_that_r_refuses_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed is {seed}: R takes at most 2147483647"):
        RStream(seed)


def test_uniforms_stay_off_0_and_1(monkeypatch):
    """R keeps words of 0 and 2³² − 1 off the ends by half of 1/(2³² − 1)."""
    stream = RStream(1)

    class Ends:
        def integers(self, *_, **__):
            return np.array([0, 2**32 - 1], dtype=np.uint32)

    monkeypatch.setattr(stream, "_words", Ends())
    low, high = stream.uniforms(2)
    assert low == pytest.approx(0.5 / (2**32 - 1), rel=1e-14)
    assert high == (2**32 - 1) * 2.0**-32 < 1
    assert np.isfinite(stream.normals(1)).all()


def test_quantiles_are_rs():
    p = np.array([1e-300, 1e-20, 1e-9, 0.075, 0.0749, 0.5, 0.3])
    expected = [
        -37.04709629936120052, -9.26234008979840517, -5.99780701500768654, -1.43953147093845568,
        -1.44023826752796325, 0.0, -0.52440051270804067,
    ]  # fmt: skip
    assert normal_quantile(p).tolist() == pytest.approx(expected, rel=4e-16)


def test_quantiles_invert_the_distribution_function():
    """Φ(z) = erfc(−z/√2)/2, on both sides of every border of the approximation."""
    p = np.concatenate([
        np.logspace(-300, -2, 500), np.linspace(0.01, 0.5, 500),
        [0.0749999, 0.0750001, math.exp(-25) * 0.999, math.exp(-25) * 1.001],
    ])  # fmt: skip
    z = normal_quantile(p)
    back = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in z])
    # A relative error e of z is one of about z²e of p.
    assert (np.abs(back / p - 1) < 1e-15 * (4 + 2 * z**2)).all()
    upper = normal_quantile(1 - p[p > 1e-3])
    assert upper == pytest.approx(-z[p > 1e-3], rel=1e-12)


def test_normals_are_standard_normal():
    x = RStream(3).normals(400_000)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(spread / len(x))
    assert abs((x[:-1] * x[1:]).mean()) < 4 / math.sqrt(len(x))


def test_the_examples_run():
    assert doctest.testmod(rstream).failed == 0

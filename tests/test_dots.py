"""The laws of q·k: exact moments by enumeration, honest errors by many seeds, order and memory."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch

from scaledot.lab import dots
from scaledot.lab.dots import Law, Moments

LAWS = (
    Law(), Law("uniform"), Law("signs"), Law("student", degrees=12.0),
    Law(mean=0.7), Law("signs", mean=-1.5), Law("uniform", mean=3.0), Law(mean=dots.LARGEST_MEAN),
    Law(correlation=0.3), Law("signs", correlation=0.5), Law("uniform", correlation=1.0),
    Law("student", degrees=12.0, correlation=0.2), Law("uniform", mean=-0.5, correlation=0.2),
)  # fmt: skip


def three_points(kurtosis):
    """Values and weights of the law on three points with mean 0, variance 1 and that fourth
    moment: all that the moments of q·k depend on."""
    return np.array([-(kurtosis**0.5), 0.0, kurtosis**0.5]), np.array(
        [0.5 / kurtosis, 1 - 1 / kurtosis, 0.5 / kurtosis]
    )


def vectors(law, d):
    """Every vector that such components can make, and its probability."""
    values, weights = three_points(law.kurtosis)
    places = np.array(list(itertools.product(range(3), repeat=d + 1)))
    own, common = values[places[:, :d]], values[places[:, d:]]
    x = law.mean + (1 - law.correlation) ** 0.5 * own + law.correlation**0.5 * common
    return x, weights[places].prod(1)


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_moments_are_those_of_every_pair_of_vectors_enumerated(law, d):
    x, p = vectors(law, d)
    dot, weight = x @ x.T, np.outer(p, p)
    mean = (weight * dot).sum()
    variance, fourth = dots.theory(law, d)
    assert mean == pytest.approx(d * law.mean**2, rel=1e-9, abs=1e-9)
    assert variance == pytest.approx((weight * (dot - mean) ** 2).sum(), rel=1e-9)
    assert fourth == pytest.approx((weight * (dot - mean) ** 4).sum(), rel=1e-9)


@pytest.mark.parametrize("d", [4, 64, 1024])
def test_known_moments(d):
    """Normal components: kurtosis 3 + 6/d (and 9 for one component, at any correlation of 1)."""
    variance, fourth = dots.theory(Law(), d)
    assert variance == d
    assert fourth / variance**2 == pytest.approx(3 + 6 / d, rel=1e-12)
    variance, fourth = dots.theory(Law(correlation=1.0), d)
    assert (variance, fourth / variance**2) == (d * d, pytest.approx(9, rel=1e-12))
    # Correlated normal components are independent ones along the eigenvectors of Σ.
    eigenvalues = np.linalg.eigvalsh(np.full((d, d), 0.2) + 0.8 * np.eye(d))
    variance, fourth = dots.theory(Law(correlation=0.2), d)
    assert variance == pytest.approx((eigenvalues**2).sum(), rel=1e-9)
    assert fourth == pytest.approx(3 * variance**2 + 6 * (eigenvalues**4).sum(), rel=1e-9)
    assert dots.theory(Law("student", degrees=4.0), d) == (d, math.inf)


def test_the_error_is_that_of_the_sample_variance_enumerated():
    """q·k of two signs is −2, 0 or 2: every sample of 4 trials with its probability."""
    values, weights = np.array([-2.0, 0.0, 2.0]), np.array([0.25, 0.5, 0.25])
    places = np.array(list(itertools.product(range(3), repeat=4)))
    s2, p = values[places].var(1, ddof=1), weights[places].prod(1)
    exact = dots.theory(Law("signs"), 2)
    assert (p * s2).sum() == pytest.approx(2)
    error = math.sqrt((p * (s2 - 2) ** 2).sum())
    assert dots.estimate(2.5, exact, 4).error == pytest.approx(error, rel=1e-12)
    assert dots.estimate(2.5, exact, 4).z == pytest.approx(0.5 / error)
    assert dots.estimate(2.5, (2.0, math.inf), 4).z is None


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_over_200_seeds_z_has_mean_0_and_deviation_1(law):
    sizes, trials = (3, 16), 1500
    zs = np.array([
        [
            dots.estimate(m.variance, dots.theory(law, d), trials).z
            for d, m in zip(sizes, dots.simulated(sizes, trials, seed, law), strict=True)
        ]
        for seed in range(200)
    ])  # fmt: skip
    kurtosis = ((zs - zs.mean()) ** 4).mean() / zs.var() ** 2
    assert abs(zs.mean()) < 3.5 / math.sqrt(zs.size)
    assert abs(zs.std() - 1) < 3.5 * math.sqrt((kurtosis - 1) / (4 * zs.size))
    # The two sizes are drawn independently, and so are the seeds.
    assert abs(np.corrcoef(zs.T)[0, 1]) < 3.5 / math.sqrt(len(zs))
    assert abs(np.corrcoef(zs[:-1, 0], zs[1:, 0])[0, 1]) < 3.5 / math.sqrt(len(zs))


@pytest.mark.parametrize("law", LAWS[:4], ids=str)
def test_components_have_the_moments_of_their_law(law):
    rng, n = np.random.default_rng(4), 400_000
    q, k = (x.astype(np.float64).ravel() for x in dots.draw(law, rng, 400, 1000))
    eighth = {"normal": 105, "uniform": 9, "signs": 1, "student": 2000}[law.components]
    for x in (q, k):
        assert abs(x.mean()) < 4 / n**0.5
        assert abs((x**2).mean() - 1) < 4 * ((law.kurtosis - 1) / n) ** 0.5 + 1e-6
        assert (
            abs((x**4).mean() - law.kurtosis) < 5 * ((eighth - law.kurtosis**2) / n) ** 0.5 + 1e-6
        )
    # q and k do not know each other, in their sizes either: one radius serves both.
    assert abs((q * k).mean()) < 4 / n**0.5
    assert abs((q**2 * k**2).mean() - 1) < 5 * ((law.kurtosis**2 - 1) / n) ** 0.5 + 1e-6


def test_the_grid_of_the_uniforms_hardly_shows_in_the_variance():
    """Every radius that 24 bits can give, exactly weighted: E[r⁴]/8 is E[q²k²], 1 for normals."""
    middles = np.arange(1 << 24, dtype=np.float32) / np.float32(1 << 24) + np.float32(2**-25)
    square = -2 * np.log(middles.astype(np.float64))
    assert square.mean() / 2 == pytest.approx(1, abs=1e-7)
    assert -1e-6 < (square**2).mean() / 8 - 1 < 0


def test_normal_components_follow_the_normal_law():
    """Kolmogorov's distance of 200,000 draws from erf: above 1.95/√n once in a thousand."""
    q, _ = dots.draw(Law(), np.random.default_rng(6), 200, 1000)
    x = np.sort(q.astype(np.float64).ravel())
    exact = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    steps = np.arange(1, len(x) + 1) / len(x)
    assert max((steps - exact).max(), (exact - steps).max() + 1 / len(x)) < 1.95 / len(x) ** 0.5


def test_merging_blocks_is_computing_at_once():
    """Also where the mean is a million deviations away, in any grouping."""
    rng = np.random.default_rng(7)
    for offset in (0.0, 1e6):
        x = rng.standard_normal(10_001) + offset
        whole = Moments.of(x)
        exact_mean = math.fsum(x) / len(x)
        exact = math.fsum((v - exact_mean) ** 2 for v in x)
        parts = [Moments.of(part) for part in np.split(x, [1, 3, 500, 9000])]
        left = Moments()
        for part in parts:
            left = left.merge(part)
        right = Moments()
        for part in reversed(parts):
            right = part.merge(right)
        for found in (whole, left, right):
            assert found.count == len(x)
            assert found.mean == pytest.approx(exact_mean, rel=1e-14, abs=1e-14)
            assert found.squares == pytest.approx(exact, rel=1e-12 if not offset else 1e-9)
            assert found.variance == pytest.approx(exact / (len(x) - 1), rel=1e-9)
    assert Moments().merge(Moments()) == Moments()


@pytest.mark.parametrize("law", [Law(), Law("student", mean=1.0, correlation=0.1)], ids=str)
def test_blocks_are_the_trials_of_one_sample(law):
    """The merged moments are those of all products, computed by NumPy at once."""
    d, trials = 300, 1000
    step = dots.BLOCK // d
    sizes = [min(step, trials - start) for start in range(0, trials, step)]
    assert len(sizes) > 3
    every = np.concatenate([dots.products(law, 11, d, i, n) for i, n in enumerate(sizes)])
    [found] = dots.simulated([d], trials, 11, law)
    assert found.count == trials
    assert found.mean == pytest.approx(every.mean(), rel=1e-12)
    assert found.variance == pytest.approx(every.var(ddof=1), rel=1e-12)


def test_neither_threads_nor_other_sizes_change_a_number():
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(dots.simulated([8, 700, 3], 2000, 3, Law()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert dots.simulated([700], 2000, 3, Law()) == [found[0][1]]
    assert dots.simulated([700], 2000, 4, Law()) != [found[0][1]]


@pytest.mark.parametrize(
    ("sizes", "trials"), [([4096], 400), ([4096], 4000), ([3 * dots.BLOCK + 5], 8), ([1], 500_000)]
)
def test_memory_is_that_of_a_few_blocks(sizes, trials):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    tracemalloc.start()
    try:
        dots.simulated(sizes, trials, 1, Law(correlation=0.1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        torch.set_num_threads(before)
    # Two threads hold uniforms and components in float32, then both in float64 for the shift.
    assert peak < 2 * dots.BLOCK * 8 * 10


def test_a_vector_longer_than_a_block_is_summed_in_pieces():
    d = 2 * dots.BLOCK + 17
    found = dots.simulated([d], 300, 2, Law("signs"))[0]
    assert abs(dots.estimate(found.variance, dots.theory(Law("signs"), d), 300).z) < 4
    [dot] = dots.products(Law("signs"), 2, d, 0, 1)
    assert dot % 2 == d % 2  # a sum of d signs
    assert abs(dot) < 6 * d**0.5


def test_progress_counts_products_to_the_end():
    seen = []
    dots.simulated([1000, 3], 200, 1, Law(), lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [200 * 1003] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 200 * 1003
    assert len(seen) > 3


def test_stopping_ends_the_threads():
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dots.simulated([4096], 10**7, 1, Law(), stop)


def test_over_seeds_z_of_values_drawn_has_mean_0_and_deviation_1():
    rng = np.random.default_rng(8)
    scores = rng.standard_normal(900) ** 3 + 5  # skewed, heavy-tailed, far from 0
    zs = np.array(
        [dots.sampled(scores, 4000, np.random.default_rng(seed)).z for seed in range(400)]
    )
    assert abs(zs.mean()) < 3.5 / math.sqrt(len(zs))
    assert abs(zs.std() - 1) < 3.5 / math.sqrt(2 * len(zs))

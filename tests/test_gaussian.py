"""Rows of Gaussian scores: exact means against other computations, softmax against Decimal."""

import doctest
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from scaledot import reference
from scaledot.lab import gaussian
from scaledot.lab.results import Estimate

NAMES = ("entropy", "trace", "jacobian", "by_query", "along")


def values(exact):
    return np.array([getattr(exact, name) for name in NAMES])


def two_keys(sigma, of):
    """A mean over two N(0, σ²) scores, which depends on their difference, N(0, 2σ²), alone."""
    x = np.linspace(-12, 12, 200_001)
    gap = math.sqrt(2) * sigma * x
    p = 1 / (1 + np.exp(-gap))
    return float((of(p, gap) * np.exp(-x * x / 2)).sum() * (x[1] - x[0]) / math.sqrt(2 * math.pi))


@pytest.mark.parametrize("sigma", [0.001, 0.05, 0.7, 3.0, 40.0])
def test_two_keys_are_one_integral(sigma):
    entropy, trace, jacobian, parallel = gaussian._of_width(2, sigma)
    half = two_keys(sigma, lambda p, s: p * (1 - p))
    whole = two_keys(sigma, lambda p, s: np.logaddexp(0, -s) + (1 - p) * s)
    assert entropy == pytest.approx(whole, abs=gaussian.ERROR)
    assert trace == pytest.approx(2 * half, rel=gaussian.ERROR)
    # J is p(1−p) times (1, −1; −1, 1): ‖J‖ = 2p(1−p), ‖Jx‖² = 2 (p(1−p)(x_1 − x_2))².
    square = two_keys(sigma, lambda p, s: 4 * (p * (1 - p)) ** 2)
    along = two_keys(sigma, lambda p, s: 2 * (p * (1 - p) * s / sigma) ** 2)
    assert jacobian == pytest.approx(square, rel=gaussian.ERROR)
    assert parallel == pytest.approx(along, rel=gaussian.ERROR)


@pytest.mark.parametrize("n", [3, 128, 65536])
@pytest.mark.parametrize("sigma", [0.01, 1.0, 8.0, 64.0])
def test_entropy_is_that_of_the_reference(n, sigma):
    """Another integral, on another lattice, right to 1e-5."""
    found = gaussian._of_width(n, sigma)[0]
    assert found == pytest.approx(
        float(reference.exact_entropy(np.array([n]), sigma)[0]), abs=1e-5
    )  # fmt: skip


@pytest.mark.parametrize("d_k", [1, 3, 64, 4096])
@pytest.mark.parametrize("power", [0.0, -0.5, -1.0])
def test_finer_sums_give_the_same(d_k, power, monkeypatch):
    scale = d_k**power
    found = values(gaussian.exact(100, d_k, scale))
    monkeypatch.setattr(gaussian, "_STEP", 0.1)
    monkeypatch.setattr(gaussian, "_NODES", 40)
    monkeypatch.setattr(gaussian, "_NARROW", 0.0005)
    finer = values(gaussian.exact.__wrapped__(100, d_k, scale))
    assert np.abs(found / finer - 1).max() < gaussian.ERROR


def test_narrow_scores_join_the_sums(monkeypatch):
    near = gaussian._NARROW * (1 - 1e-9)
    short = np.array(gaussian._of_width(37, near))
    monkeypatch.setattr(gaussian, "_NARROW", 0.0)
    assert np.abs(short / np.array(gaussian._of_width(37, near)) - 1).max() < gaussian.ERROR


def test_exact_means_are_those_of_vectors():
    """q, k, v, dO as vectors and autograd's gradients: nothing of the law is used here."""
    d, n, d_v, alpha, trials = 5, 7, 3, 0.9, 20_000
    q, k = torch.randn(trials, 1, d).double(), torch.randn(trials, n, d).double()
    v, d_out = torch.randn(trials, n, d_v).double(), torch.randn(trials, 1, d_v).double()
    q.requires_grad_()
    k.requires_grad_()
    scores = alpha * q @ k.mT
    scores.retain_grad()
    p = scores.softmax(-1)
    (p @ v * d_out).sum().backward()
    exact = gaussian.exact(n, d, alpha)
    found = {
        "entropy": -(p * p.log()).sum((1, 2)),
        "trace": 1 - p.square().sum((1, 2)),
        "jacobian": scores.grad.square().sum((1, 2)) / d_v,
        "along": q.grad.square().sum((1, 2)) / d_v,
        "by_query": k.grad.square().sum((1, 2)) / d_v,
    }
    for name, x in found.items():
        theory = getattr(exact, name)
        z = (x.mean().item() - theory) / (x.std().item() / math.sqrt(trials))
        assert abs(z) < 4, name
        # And the test could tell: the error is far below the mean.
        assert x.std().item() / math.sqrt(trials) < 0.04 * theory, name


def two_keys_of_length(sigma):
    """The means of two N(0, σ²) scores, on a lattice fine enough for any σ, in `NAMES`' order
    with ‖Jx‖² last."""
    x = np.linspace(-12, 12, 4001)
    e = np.exp(-np.abs(gap := math.sqrt(2) * sigma * np.sinh(x) / np.sinh(12) * 12))
    u, step = np.sinh(x) / np.sinh(12) * 12, np.cosh(x) / np.sinh(12) * 12 * (x[1] - x[0])
    weight = np.exp(-u * u / 2) / math.sqrt(2 * math.pi) * step
    slope = e / (1 + e) ** 2
    of = (np.log1p(e) + np.abs(gap) * e / (1 + e), 2 * slope, 4 * slope**2)
    means = [float((each * weight).sum()) for each in of]
    return np.array([*means, sigma**2 * means[2], float((4 * slope**2 * u * u * weight).sum())])


@pytest.mark.parametrize("d_k", [1, 2, 15])
@pytest.mark.parametrize("scale", [1.0, 30.0, 200.0])
def test_few_components_with_a_large_scale(d_k, scale):
    """‖q‖ near 0 then decides: another sum over its length, two keys."""
    logs = np.linspace(-30, math.log(15), 500)
    density = np.exp(d_k * logs - np.exp(2 * logs) / 2)
    means = np.array([two_keys_of_length(scale * math.exp(x)) for x in logs])
    wanted = (means * density[:, None]).sum(0) / density.sum()
    wanted[4] = scale**2 * (wanted[4] + (d_k - 1) * wanted[2])
    found = values(gaussian.exact(2, d_k, scale))
    assert np.abs(found / wanted - 1)[1:].max() < gaussian.ERROR
    assert found[0] == pytest.approx(wanted[0], abs=gaussian.ERROR * min(1, 100 * wanted[0]))


def test_equal_weights_have_their_entropy_to_the_last_digits():
    """Nothing of the sum over ‖q‖ is lost: the standard error there is that of rounding."""
    found = gaussian.exact(1000, 64, 0.0)
    assert found.entropy == pytest.approx(math.log(1000), rel=1e-15)
    assert found.trace == pytest.approx(0.999, rel=1e-15)


def test_a_negative_scale_is_that_of_the_negated_scores():
    scores = np.array([[10.0, 8.0, 6.0], [-900.0, 1000.0, 3.0]])
    found = gaussian.softmax(scores, np.array([[-2.0], [-1.0]]))
    meant = gaussian.softmax(-scores, np.array([[2.0], [1.0]]))
    assert found.top.tolist() == [[2], [0]]
    for name in ("weights", "top", "rest", "lead", "entropy", "trace"):
        assert np.array_equal(getattr(found, name), getattr(meant, name)), name


def test_too_wide_scores_are_refused():
    with pytest.raises(ValueError, match=r"makes scores 8000 wide: pass one .* at most 4,096"):
        gaussian.exact(10, 64, 1000.0)


def decimal_softmax(scores):
    with localcontext() as context:
        context.prec = 400
        e = [Decimal(s).exp() for s in scores]
        p = [x / sum(e) for x in e]
        top = max(range(len(p)), key=lambda j: p[j])
        rest = sum(x for j, x in enumerate(p) if j != top)
        return (
            p,
            rest,
            -(rest / p[top]).ln(),
            -sum(x * x.ln() for x in p),
            sum(x * (1 - x) for x in p),
        )


@pytest.mark.parametrize(
    "scores",
    [
        [10.0, 8.0, 6.0],
        [0.0, 0.0],
        [-20.8786096722578, 16.9441808129877, -28.9176963589432],
        [300.0, 1.0, 2.0, -40.0],
        [5.0, 5.0, 5.0, -700.0],
    ],
)
def test_softmax_keeps_its_digits(scores):
    found = gaussian.softmax(np.array([scores]), np.ones((1, 1)))
    p, rest, lead, entropy, trace = decimal_softmax(scores)
    for mine, exact in [
        *zip(found.weights[0], p, strict=True),
        (found.rest[0], rest),
        (found.entropy[0], entropy),
        (found.trace[0], trace),
    ]:
        assert float(mine) == pytest.approx(float(exact), rel=1e-13, abs=1e-320)
    assert float(found.lead[0]) == pytest.approx(float(lead), rel=1e-13, abs=1e-15)


def test_a_large_common_part_costs_no_digit():
    scores = np.array([[1.0, 0.25, -3.0]])
    half = np.array([[0.3]])
    shifted = gaussian.softmax(scores + 2.0**40, half)
    assert np.array_equal(shifted.weights, gaussian.softmax(scores, half).weights)


def test_nothing_left_is_said_as_such():
    found = gaussian.softmax(np.array([[0.0, -1000.0]]), np.ones((1, 1)))
    assert (found.lead[0], found.rest[0], found.entropy[0]) == (math.inf, 0.0, 0.0)


def test_running_is_mean_and_standard_error_whatever_the_blocks():
    x = np.random.default_rng(1).normal(1e6, 1.0, 1000)
    running = gaussian.Running()
    for block in np.split(x, [1, 10, 600]):
        running.add(block)
    found = running.estimate(1e6)
    assert found.value == pytest.approx(x.mean(), rel=1e-15)
    assert found.error == pytest.approx(x.std(ddof=1) / math.sqrt(1000), rel=1e-9)


def test_a_mean_that_few_numbers_carry_has_no_error():
    """29 ones among zeros, then 31."""
    for ones, known in ((29, False), (31, True)):
        running = gaussian.Running()
        running.add(np.repeat([1.0, 0.0], [ones, 1000 - ones]))
        assert (running.estimate().error is not None) == known
    assert "2 have no standard error, as fewer than 30 rows" in gaussian.agreement(
        [Estimate(1.5, 0.5, 0.0), Estimate(1.0, None, 0.5), Estimate(0.0, None, 1.0),
         Estimate(0.0, None, 0.0), Estimate(2.0)]
    )  # fmt: skip


def test_rounding_is_an_error_too():
    running = gaussian.Running()
    running.add(np.full(40, 0.1))
    assert 0 < running.estimate().error < 1e-15


def test_a_share_of_none_is_not_certain():
    assert gaussian.share(0, 98).error == pytest.approx(math.sqrt(0.01 * 0.99 / 98))
    assert gaussian.share(0, 98).value == 0


def test_chunks_cover_the_trials_and_no_more():
    for keys, trials in ((7, 100_000), (1 << 20, 3), (131_072, 1)):
        assert sum(gaussian.chunks(keys, trials)) == trials
        assert max(gaussian.chunks(keys, trials)) * keys <= max(gaussian._WORK, keys)


def test_lengths_of_normal_vectors():
    rng = gaussian.generator(1)
    squares = np.square(gaussian.norms(rng, 3, 40_000))
    assert abs(squares.mean() - 3) < 4 * math.sqrt(6 / 40_000)
    assert gaussian.norms(rng, 0, 2).tolist() == [[0.0], [0.0]]


def test_a_cell_has_its_own_stream():
    first = gaussian.generator(5, 64, 16).standard_normal()
    assert first == gaussian.generator(5, 64, 16).standard_normal()
    assert len({first, *(gaussian.generator(*c).standard_normal() for c in (
        (5, 16, 64), (6, 64, 16), (5, 64)))}) == 4  # fmt: skip


def test_agreement_says_what_chance_gives():
    says = gaussian.agreement([Estimate(1.5, 0.5, 0.0), Estimate(0.0, 1.0, 0.5), Estimate(1.0)])
    assert says == (
        "z: distance from theory in standard errors. Largest of 2: 3.00; chance gives one as large "
        "in at most 1 % of runs. Differs from theory."
    )
    assert "3.00; chance gives one as large in <1 %" in gaussian.agreement([Estimate(3, 1, 0)])
    assert "Agrees with" in gaussian.agreement([Estimate(0.5, 0.5, 0.0)])
    assert gaussian.agreement([Estimate(1.0)]).startswith("No estimate")


def test_examples_run():
    assert doctest.testmod(gaussian) == (0, 2)

"""The Gaussian reference is what simulation gives, and structure is what differs from it."""

import doctest
import math

import numpy as np
import pytest
import torch

from scaledot import checks, reference
from scaledot.dispatch import row_stats
from scaledot.heads import HeadStats
from scaledot.reference import ERROR, excess, gaussian_entropy, sigma_c, verdict


def simulated(n, sigma, rows):
    """(mean entropy, its standard error) of softmax over n N(0, σ²) scores."""
    found = []
    for _ in range(10):
        scores = torch.randn(rows // 10, n, dtype=torch.float64) * sigma
        p = scores.softmax(-1)
        found.append(torch.special.entr(p).sum(-1))
    entropy = torch.cat(found)
    return float(entropy.mean()), float(entropy.std() / len(entropy) ** 0.5)


@pytest.mark.parametrize(
    ("n", "sigma", "rows"),
    [(2, 0.5, 200_000), (2, 3.0, 200_000), (3, 1.0, 200_000), (8, 6.0, 100_000),
     (64, 0.3, 20_000), (64, 4.0, 40_000), (1024, 2.0, 2_000), (4096, 4.0, 3_000),
     (4096, 16.0, 1_000), (64, 200.0, 40_000)],
)  # fmt: skip
def test_reference_is_what_simulation_gives(n, sigma, rows):
    mean, error = simulated(n, sigma, rows)
    assert abs(float(gaussian_entropy(n, sigma)) - mean) < 4 * error
    assert error < 0.03


def test_published_table_is_within_its_noise():
    """200 simulated rows of 4,096 keys; their standard error is at most .07 nats."""
    table = {1: 7.82, 2: 6.38, 3: 4.41, 4: 2.98, 5: 2.04, 6: 1.65, 8: 0.99, 11.3: 0.68, 16: 0.44}
    for sigma, entropy in table.items():
        assert float(gaussian_entropy(4096, sigma)) == pytest.approx(entropy, abs=0.08)


def test_limits():
    """ln n − σ²/2 · (1 − 1/n) for narrow scores; two keys by quadrature."""
    for n in (2, 16, 1024, 1 << 20):
        assert float(gaussian_entropy(n, 0.0)) == pytest.approx(math.log(n), abs=1e-12)
        narrow = math.log(n) - 0.1**2 / 2 * (1 - 1 / n)
        assert float(gaussian_entropy(n, 0.1)) == pytest.approx(narrow, abs=ERROR)
    # Two keys: their difference is N(0, 2σ²), the entropy that of its logistic function.
    for sigma in (0.3, 1.0, 4.0, 20.0):
        x = np.linspace(-10, 10, 200_001)
        difference = np.abs(x) * sigma * math.sqrt(2)
        rest = np.exp(-difference)
        entropy = np.log1p(rest) + difference * rest / (1 + rest)
        density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        want = float((entropy * density).sum() * (x[1] - x[0]))
        assert float(gaussian_entropy(2, sigma)) == pytest.approx(want, abs=2e-5)
    assert gaussian_entropy(torch.tensor([1, 2, 1 << 25]), 1.0).isnan().tolist() == [1, 0, 1]
    assert gaussian_entropy(8, torch.tensor([math.nan, -1.0, math.inf])).isnan().all()
    assert float(sigma_c(1024)) == pytest.approx(3.7233, abs=1e-4)


def test_interpolation_stays_within_its_error(monkeypatch):
    """Against the same integral on a lattice twice as fine, off the table's grid."""
    monkeypatch.setattr(reference, "STEP", 0.25)
    random = np.random.default_rng(0)
    for sigma in np.exp(random.uniform(math.log(0.01), math.log(60), 60)):
        n = np.unique(np.exp(random.uniform(math.log(2), math.log(1 << 24), 20)).round())
        exact = reference.exact_entropy(n, float(sigma))
        found = gaussian_entropy(torch.from_numpy(n), float(sigma)).numpy()
        assert np.abs(found - exact).max() < ERROR


def rows_of(scores, **arguments):
    """Row statistics of given scores, (rows, keys): one query is a row of the identity."""
    q = scores.double()[None, None]
    k = torch.eye(scores.shape[1], dtype=torch.float64)[None, None]
    return checks.problem(q, k, None, scale=1.0, **arguments), row_stats(
        q, k, scale=1.0, **arguments
    )


@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0, 8.0])
def test_gaussian_rows_have_no_excess_whatever_their_width(sigma):
    """Their own sample's width stands for σ, which costs .05 nats at 16 keys, .01 at 128."""
    for n, bias in ((16, 0.05), (128, 0.02), (512, 0.02)):
        problem, rows = rows_of(torch.randn(1500, n) * sigma + 50)
        found = excess(problem, rows)["excess_entropy"]
        error = float(found.std()) / len(found[0, 0]) ** 0.5
        assert abs(float(found.mean())) < bias + 3 * error


def test_structure_is_told_from_scale():
    scores = torch.randn(300, 256, dtype=torch.float64)
    peaked = scores * 0.1
    peaked[:, 7] = 8.0  # one heavy key among flat ones: sharp, though narrow on the whole
    sharp = excess(*rows_of(peaked))["excess_entropy"]
    assert float(sharp.mean()) < -1
    two = torch.where(scores > 0, 4.0, -4.0)  # as wide as σ = 4, yet half of all keys weigh alike
    flat = excess(*rows_of(two))["excess_entropy"]
    assert float(flat.mean()) > 2
    capped = excess(*rows_of(scores * 4, softcap=2.0))["excess_entropy"]
    assert float(capped.mean()) > 1


def test_excess_counts_keys_among_themselves_and_leaves_out_what_has_none():
    q, k = torch.randn(2, 2, 3, 40, 8).double().unbind()
    plain = excess(checks.problem(q, k, None), row_stats(q, k, is_causal=True))
    sinks = torch.tensor([-2.0, 0.0, 5.0])
    problem = checks.problem(q, k, None, sinks=sinks)
    with_sink = excess(problem, row_stats(q, k, is_causal=True, sinks=sinks.double()))
    for name in plain:
        torch.testing.assert_close(plain[name], with_sink[name], equal_nan=True, atol=1e-9, rtol=0)
        assert plain[name][:, :, :15].isnan().all()
        assert not plain[name][:, :, 15:].isnan().any()
    q[0, 0, 20] = math.nan
    spoilt = excess(checks.problem(q, k, None), row_stats(q, k, is_causal=True))
    assert spoilt["excess_entropy"].isnan().sum() == plain["excess_entropy"].isnan().sum() + 1
    none = excess(checks.problem(q, k[:, :, :0], None), row_stats(q, k[:, :, :0]))
    assert none["excess_entropy"].isnan().all()
    half = excess(checks.problem(q.half(), k.half(), None), row_stats(q.half(), k.half()))
    assert half["relative_width"].dtype == torch.float32


@pytest.mark.parametrize(
    ("sigma", "word"),
    [(0.03, "near-uniform"), (0.4, "narrow"), (1.0, "unit"), (2.0, "wide"), (5.0, "condensed")],
)
def test_verdict_knows_how_many_keys_there_are(sigma, word):
    problem, rows = rows_of(torch.randn(200, 256) * sigma)
    stats = HeadStats.of(rows, scale=1.0, d_k=256, kv_heads=1, extra=excess(problem, rows))
    assert verdict(stats, 0) == word
    # σ = 2 condenses no row of 256 keys, whose limit is 3.3, but one of 7 would.
    assert float(stats.measures["relative_width"].average[0]) == pytest.approx(
        sigma / math.sqrt(2 * math.log(256)), rel=0.02
    )


def test_verdict_says_when_it_cannot_tell():
    problem, rows = rows_of(torch.randn(5, 3))
    stats = HeadStats.of(rows, scale=1.0, d_k=3, kv_heads=1, extra=excess(problem, rows))
    assert verdict(stats, 0) == "unknown"
    bare = HeadStats.of(rows, scale=1.0, d_k=3, kv_heads=1)
    with pytest.raises(ValueError, match="hold no relative_width"):
        verdict(bare, 0)


def test_examples():
    names = {"torch": torch, "checks": checks, "row_stats": row_stats}
    assert doctest.testmod(reference, extraglobs=names) == (0, 4)


def test_a_sink_that_takes_nearly_all_gives_no_wrong_entropy():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, 16)
    want = excess(checks.problem(q, k, None), row_stats(q, k))["excess_entropy"]
    for logit in (5.0, 10.0, 14.0, 18.0):
        sinks = torch.tensor([logit])
        rows = row_stats(q, k, sinks=sinks)
        found = excess(checks.problem(q, k, None, sinks=sinks), rows)["excess_entropy"]
        known = ~found.isnan()
        torch.testing.assert_close(found[known], want[known], rtol=0, atol=0.01)
        assert known.all() or logit > 5

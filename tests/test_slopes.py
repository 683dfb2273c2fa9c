"""gradient: exact arithmetic, autograd, closed forms and honest errors."""

import doctest
import json
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from scaledot.lab import gradient, slopes
from scaledot.lab.slopes import quantile, through


def of(result, name, scale):
    return {r["d_k"]: r for r in result.rows if (r["of"], r["scale"]) == (name, scale)}


# One row


def decimal_through(scores, upstream):
    with localcontext() as context:
        context.prec = 400
        e = [Decimal(s).exp() for s in scores]
        p = [x / sum(e) for x in e]
        mean = sum(a * Decimal(b) for a, b in zip(p, upstream, strict=True))
        slopes = [a * (Decimal(b) - mean) for a, b in zip(p, upstream, strict=True)]
        return [float(x) for x in p], [float(x) for x in slopes]


@pytest.mark.parametrize("gap", [0.0, 3.0, 40.0, 300.0])
def test_no_gradient_is_lost_near_one_hot(gap):
    scores, upstream = [1.5, 1.5 + gap, -2.0, 0.25], [0.7, -1.2, 2.5, 0.1]
    p, exact = decimal_through(scores, upstream)
    top = np.array([[int(np.argmax(p))]])
    found = through(np.array([p]), top, np.array([upstream]))[0]
    assert found == pytest.approx(exact, rel=1e-13)
    if gap == 40.0:  # where the textbook's formula gives nothing at all for the top key
        assert p[1] * (upstream[1] - np.dot(p, upstream)) == 0 != found[1]


def test_gradients_are_autograds_of_real_vectors():
    """Median, percentile and mean square of vectors' gradients, against the drawn law."""
    d, n, d_v, trials = 6, 9, 4, 20_000
    q, k = torch.randn(trials, 1, d).double(), torch.randn(trials, n, d).double()
    v, d_out = torch.randn(trials, n, d_v).double(), torch.randn(trials, 1, d_v).double()
    q.requires_grad_()
    k.requires_grad_()
    scores = q @ k.mT
    scores.retain_grad()
    (scores.softmax(-1) @ v * d_out).sum().backward()
    rows = gradient(d, keys=n, value_dim=d_v, rules="none", trials=trials).rows
    for row, x in zip(rows, (scores.grad, q.grad, k.grad), strict=True):
        length = x.square().sum((1, 2)).sqrt().numpy()
        for key, real in (("median", quantile(length, 0.5)), ("p10", quantile(length, 0.1))):
            error = math.hypot(row[key].error, real.error)
            assert abs(row[key].value - real.value) < 4 * error, (row["of"], key)
            assert error < 0.05 * row[key].value
        squares = np.square(length)
        error = squares.std() / math.sqrt(trials)
        assert abs(squares.mean() - row["rms"].theory ** 2) < 4 * error, row["of"]


def test_quantile_errors_are_what_they_claim():
    rng = np.random.default_rng(2)
    z = []
    for _ in range(400):
        x = rng.exponential(size=500)
        for share in (0.5, 0.1):
            found = quantile(x, share)
            z.append((found.value + math.log1p(-share)) / found.error)
    assert abs(np.mean(z)) < 0.3
    assert abs(np.std(z) - 1) < 0.15


# The experiment


def test_z_values_are_what_they_claim():
    """Over 200 seeds mean 0 and deviation 1, within 4 of their own standard errors."""
    z = np.array([
        [
            row["rms"].z
            for row in gradient(16, keys=64, trials=400, seed=seed, rules=("none", 0.25)).rows
        ]
        for seed in range(200)
    ])  # fmt: skip
    assert z.shape == (200, 6)
    assert np.abs(z.mean(0)).max() < 4 / math.sqrt(200)
    assert np.abs(z.std(0, ddof=1) - 1).max() < 4 / math.sqrt(400)


@pytest.fixture(scope="module")
def default():
    return gradient((16, 64, 256, 1024, 4096))


def test_the_typical_row_vanishes_and_the_mean_square_does_not(default):
    raw, scaled = of(default, "dS", "none"), of(default, "dS", "1/√d_k")
    # d_k 64, the commonest: not smaller than with scaling.
    assert raw[64]["median"].value > 3 * scaled[64]["median"].value
    assert raw[4096]["median"].value < 1e-4
    assert raw[4096]["p10"].value < 1e-14
    medians = [raw[d]["median"].value for d in (16, 64, 256, 1024, 4096)]
    assert medians == sorted(medians, reverse=True)
    assert raw[4096]["rms"].theory > 0.4 * raw[64]["rms"].theory
    query = [r["rms"].theory for r in of(default, "dQ", "none").values()]
    assert query == sorted(query)
    # And with 1/√d_k nothing depends on d_k.
    for key in ("median", "p10"):
        a, b = scaled[64][key], scaled[4096][key]
        assert abs(a.value - b.value) < 0.02
    assert default.says[4] == (
        "Without scale the median row's dS is larger than with 1/√d_k at d_k 16, 64, smaller at "
        "256, 1,024, 4,096."
    )
    assert "Agrees with theory" in default.says[0]
    assert default.says[1].startswith("Unscaled, d_k 16 to 4,096: the median of dS goes from 1.")
    assert "the median of dS stays at 0.39, its 10th" in default.says[2]
    assert {"median", "p10", "rms", "rms.z"} <= set(default.csv().splitlines()[0].split(","))


def test_a_table_of_200_rows_is_one_of_the_draws_of_200_rows(default):
    """Of rms, median and 10th percentile of dS and dQ, and of the median 1 − p_max, unscaled, as a
    table drawn once has them. Few rows carry the mean there, so none is near the exact value: dQ at
    d_k 4096 is 65.0, not 48.7. Were a value of the table no such draw, it would lie outside the 60
    here; one that is does by a chance of 2 in 61."""
    table = {
        ("dS", 16): (2.23, 1.66, 7.9e-1), ("dQ", 16): (8.75, 6.45, 2.7),
        ("dS", 64): (2.47, 1.48, 7.9e-2), ("dQ", 64): (19.5, 11.8, 0.61),
        ("dS", 256): (2.11, 0.405, 4.6e-4), ("dQ", 256): (33.6, 6.36, 7e-3),
        ("dS", 1024): (1.45, 1.1e-2, 2.9e-9), ("dQ", 1024): (46.3, 0.354, 9e-8),
        ("dS", 4096): (0.76, 5e-6, 2e-16), ("dQ", 4096): (48.7, 3.2e-4, 1e-14),
    }  # fmt: skip
    rest = {16: 0.66, 64: 0.29, 256: 0.056, 1024: 1.4e-3, 4096: 1.3e-6}
    draws = {}
    for seed in range(60):
        drawn = gradient((16, 64, 256, 1024, 4096), rules=("none",), trials=200, seed=seed)
        for row in drawn.rows:
            for name in ("rms", "median", "p10"):
                draws.setdefault((row["of"], row["d_k"], name), []).append(row[name].value)
        for row in drawn.tables[1].rows:
            draws.setdefault(row["d_k"], []).append(row["rest"].value)
    for (of_what, d), values in table.items():
        for name, value in zip(("rms", "median", "p10"), values, strict=True):
            found = draws[of_what, d, name]
            assert min(found) < value < max(found), (of_what, d, name)
    for d, value in rest.items():
        assert min(draws[d]) < value < max(draws[d]), d
    assert of(default, "dQ", "none")[4096]["rms"].theory == pytest.approx(65.02, abs=0.01)


def test_closed_forms_are_what_many_keys_tend_to(default):
    assert of(default, "dS", "1/√d_k")[64]["asymptotic"] == pytest.approx(0.4122, abs=1e-4)
    assert of(default, "dQ", "1/d_k")[64]["asymptotic"] == pytest.approx(0.25 / 8)
    for scale in ("1/√d_k", "1/d_k"):
        for name in ("dS", "dQ", "dK"):
            row = of(default, name, scale)[4096]
            assert row["rms"].theory == pytest.approx(row["asymptotic"], rel=0.011)
    # Without scale the approach is slow, in √(2 ln n): from above, and nearer as n grows.
    far = of(default, "dS", "none")[4096]
    assert 1.05 < far["asymptotic"] / far["rms"].theory < 1.15
    long = gradient(4096, keys=1 << 20, rules="none", trials=2).rows[0]
    assert 1 < long["asymptotic"] / long["rms"].theory < far["asymptotic"] / far["rms"].theory
    assert of(gradient(4, trials=2, rules="none"), "dS", "none")[4]["asymptotic"] is None


def test_three_keys_once_are_an_anecdote():
    """The R article's n = 3, d_k = 1024: of 20,000 draws rather than one."""
    row = gradient(1024, keys=3, rules="none", trials=20_000).tables[1].rows[0]
    assert row["trace"].theory == pytest.approx(0.026, abs=0.001)
    assert 1e-10 < row["rest"].value < 1e-9


def test_lengths_of_dK_and_dQ_are_both_there_for_one_component():
    """d_k = 1: nothing lies across q."""
    result = gradient(1, keys=8, trials=4000, rules="none")
    assert all(abs(row["rms"].z) < 4 for row in result.rows)


def test_a_cell_is_the_same_alone_and_in_company():
    alone = gradient(16, keys=8, trials=30, rules="none").rows
    company = gradient((4, 16), keys=8, trials=30).rows
    assert all(row in company for row in alone)
    assert gradient(16, keys=8, trials=30, rules="none", seed=3).rows != alone


def test_settings_repeat_the_result_and_are_json():
    result = gradient((4, 16), keys=8, trials=30, rules=("none", "1/sqrt_d_model", 0.1), d_model=64)
    assert gradient(**json.loads(json.dumps(result.settings))).rows == result.rows


def test_progress_ends_at_the_total():
    seen = []
    gradient((4, 8), keys=70_000, trials=3, rules="none", on_progress=lambda *at: seen.append(at))
    assert seen == [(i, 6) for i in range(1, 7)]


def test_nothing_passes_where_every_other_weight_underflows():
    result = gradient(1 << 20, keys=2, trials=5, rules=1.0)
    row = result.rows[0]
    assert row["median"].value == 0
    assert row["p10"].value == 0


def test_panels_keep_zeros_off_a_logarithmic_axis(default):
    assert [panel.log_y for panel in default.panels] == [True] * 4
    assert all(y > 0 for panel in default.panels for line in panel.lines for y in line.y)
    zero = gradient(1 << 20, keys=2, trials=5, rules=1.0)
    assert zero.panels[0].lines[0].y == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"d_k": 0}, ValueError, "d_k is 0: pass at least 1"),
        ({"d_k": "64"}, TypeError, "d_k is '64': pass a whole number"),
        ({"keys": 1}, ValueError, "keys is 1: pass at least 2"),
        ({"keys": 1 << 25}, ValueError, "keys is 33,554,432: pass at most 16,777,216"),
        ({"value_dim": 0}, ValueError, "value_dim is 0: pass at least 1"),
        ({"trials": 1}, ValueError, "trials is 1: pass at least 2"),
        ({"seed": 1.5}, TypeError, "seed is 1.5: pass a whole number"),
        ({"rules": "sqrt"}, ValueError, "scale is 'sqrt': pass one of 1/sqrt_d_k"),
        ({"rules": ()}, ValueError, "rules is empty: pass some of 1/sqrt_d_k"),
        ({"rules": math.nan}, ValueError, "scale is nan: pass a finite number"),
        ({"rules": "1/sqrt_d_model"}, ValueError, "scale 1/sqrt_d_model needs d_model"),
    ],
)
def test_bad_input_is_one_sentence(arguments, error, message, unannotated):
    with pytest.raises(error, match=message) as caught:
        gradient(**arguments)
    assert "\n" not in str(caught.value)


def test_examples_run():
    assert doctest.testmod(slopes) == (0, 4)

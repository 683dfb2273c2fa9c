"""saturation and scales: the articles' rows, exact arithmetic, honest errors, clear refusals."""

import doctest
import json
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from scaledot.lab import given, saturation, scales, softmaxes
from scaledot.lab.given import frobenius, spectral
from scaledot.scales import RULES

R_SCORES = [-20.8786096722578, 16.9441808129877, -28.9176963589432]


def by_key(result, scale, what, row=0):
    return [entry[f"{what}.{scale}"] for entry in result.tables[1 + row].rows]


# The articles' rows, one call each


def test_the_row_that_is_called_saturated():
    result = saturation([10, 8, 6], d_k=64)
    raw, scaled = result.rows
    assert [round(x, 6) for x in by_key(result, "none", "weight")] == [0.866813, 0.117310, 0.015876]
    assert [round(x, 4) for x in by_key(result, "none", "slope")] == [0.1154, 0.1035, 0.0156]
    assert [round(x, 6) for x in by_key(result, "1/√64", "weight")] == [
        0.419229, 0.326496, 0.254275,
    ]  # fmt: skip
    assert [round(x, 4) for x in by_key(result, "1/√64", "slope")] == [0.2435, 0.2199, 0.1896]
    assert (round(raw["entropy"], 4), round(scaled["entropy"], 4)) == (0.4411, 1.0781)
    assert (round(raw["lead"], 2), round(raw["trace"], 3)) == (1.87, 0.235)
    assert raw["is"] == "not sharp"
    assert (
        "Row 1 unscaled: key 1 leads all others together by 1.87 nats, not sharp" in result.says[0]
    )


def test_the_r_articles_row():
    result = saturation(R_SCORES, d_k=1024)
    assert by_key(result, "none", "weight") == pytest.approx(
        [3.74775163305615e-17, 1, 1.20903762021298e-20], rel=1e-13
    )
    assert by_key(result, "1/√1024", "weight") == pytest.approx(
        [0.198467186145623, 0.647155095127531, 0.154377718726846], rel=1e-14
    )
    slopes = by_key(result, "none", "slope")
    assert f"{slopes[1]:.8e}" == "3.74896067e-17"
    assert slopes == pytest.approx([3.74775e-17, 3.74896e-17, 1.20904e-20], rel=1e-5)
    assert by_key(result, "1/√1024", "slope") == pytest.approx(
        [0.159077962169062, 0.228345377978007, 0.130545238687541], rel=1e-14
    )
    raw, scaled = result.rows
    # The article's table has 6.4913e-17, which is what float64 makes of it: it loses the winner's
    # p(1−p), one of four entries of 3.748e-17.
    assert f"{raw['frobenius']:.4e}" == "7.4961e-17"
    p = np.array(by_key(result, "none", "weight"))
    assert f"{np.linalg.norm(np.diag(p) - np.outer(p, p)):.4e}" == "6.4913e-17"
    assert (round(scaled["frobenius"], 5), round(scaled["spectral"], 5)) == (0.38642, 0.34610)
    assert raw["is"] == "hard"
    assert "Its p(1−p) is 3.7e−17, from the other weights; float64 rounds p to 1" in result.says[0]
    assert (
        "bfloat16, float16, float32 would store its weight as 1: hard saturated." in result.says[0]
    )


def test_a_hundred_against_ninety_one_is_ten_against_one():
    result = saturation([(10, 1, 1, 1), (100, 91, 91, 91)], d_k=64)
    first, second = by_key(result, "none", "weight"), by_key(result, "none", "weight", row=1)
    assert first == second
    assert [round(x, 10) for x in first] == [0.9996299076, *[0.0001233641] * 3]
    assert result.says[0] == (
        "Rows 1 and 2 are the same distribution: softmax sees only differences, and row 2 is row 1 "
        "plus 90."
    )
    # What is sharper is ten times the scores.
    ten = saturation([100, 10, 10, 10], d_k=64)
    assert by_key(ten, "none", "weight")[1] == pytest.approx(8.19e-40, rel=1e-3)


def test_the_exercise_that_divides_the_same_scores():
    result = saturation([12, 9, 6, 3], d_k=(64, 256, 1024))
    assert [row["scale"] for row in result.rows] == ["none", "1/√64", "1/√256", "1/√1024"]
    assert [round(row["p_max"], 4) for row in result.rows] == [0.9502, 0.4025, 0.3240, 0.2862]
    assert [round(x, 4) for x in by_key(result, "none", "weight")] == [
        0.9502,
        0.0473,
        0.0024,
        0.0001,
    ]
    assert [round(x, 4) for x in by_key(result, "1/√64", "weight")] == [
        0.4025, 0.2767, 0.1901, 0.1307,
    ]  # fmt: skip
    # With scores that grow as √d_k the scaled maximum stays, the unscaled one goes to 1.
    grown = saturation([[s * f for s in (12, 9, 6, 3)] for f in (1, 2, 4)], d_k=(64, 256, 1024))
    raw = [row["p_max"] for row in grown.rows if row["scale"] == "none"]
    assert [f"{x:.6f}" for x in raw] == ["0.950219", "0.997521", "0.999994"]
    own = [grown.rows[4 * i + 1 + i]["p_max"] for i in range(3)]
    assert own == pytest.approx([own[0]] * 3, rel=1e-14)


def test_the_largest_weight_of_sixteen_does_not_depend_on_d_k_once_scaled():
    """The articles' check has three digits of some thousand rows; these have 40,000."""
    check = {
        "1/sqrt_d_k": ((0.249, 0.246), (0.847, 0.961)), "1/d_k": ((0.078, 0.066), (0.847, 0.961)),
    }  # fmt: skip
    for scale, (scaled, raw) in check.items():
        rows = saturation(d_k=(64, 1024), keys=16, trials=40_000, scale=scale).rows
        p_max = [1 - row["rest"].value for row in rows]
        assert p_max == pytest.approx([*raw, *scaled], abs=0.005)
    assert abs(p_max[2] - 0.078) < 0.001
    one, other = (
        row["rest"] for row in saturation(d_k=(64, 1024), keys=16, trials=40_000).rows[2:]
    )
    assert abs(one.value - other.value) < 4 * math.hypot(one.error, other.error)


# The Jacobian of one row


def jacobian(p):
    """Norms of diag(p) − ppᵀ in 80 digits, its largest eigenvalue by powers of the matrix."""
    with localcontext() as context:
        context.prec = 80
        n = len(p)
        j = [[(p[a] if a == b else 0) - p[a] * p[b] for b in range(n)] for a in range(n)]
        norm = sum(x * x for row in j for x in row).sqrt()
        power = [[x / norm for x in row] for row in j]
        for _ in range(60):
            power = [
                [sum(power[a][c] * power[c][b] for c in range(n)) for b in range(n)]
                for a in range(n)
            ]
            size = sum(x * x for row in power for x in row).sqrt()
            power = [[x / size for x in row] for row in power]
        # A power of a symmetric matrix is a projection, whose trace with J is λ.
        top = sum(power[a][b] * j[b][a] for a in range(n) for b in range(n))
        return float(norm), float(top / sum(power[a][a] for a in range(n)))


@pytest.mark.parametrize(
    "scores",
    [
        [10, 8, 6],
        [0, 0],
        [1, 1, 1, 1],
        R_SCORES,
        [60, 0, 0],
        [50, 49.999999, -30, 2, 0],
        [3, 3, 1, -80],
        [300, 1, 2, -40],
    ],
)
def test_jacobian_norms_keep_their_digits(scores):
    with localcontext() as context:
        context.prec = 500
        e = [Decimal(s).exp() for s in scores]
        norm, largest = jacobian([x / sum(e) for x in e])
    row = saturation(scores, d_k=1, scale=1.0).rows[0]
    assert row["frobenius"] == pytest.approx(norm, rel=1e-12)
    assert row["spectral"] == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("sharpness", [0.1, 3.0, 12.0])
def test_jacobian_norms_of_long_rows_are_numpys(sharpness):
    s = np.random.default_rng(3).normal(0, sharpness, 60)
    row = saturation(s, d_k=1, scale=1.0).rows[0]
    p = np.exp(s - s.max())
    p /= p.sum()
    j = np.diag(p) - np.outer(p, p)
    assert row["frobenius"] == pytest.approx(np.linalg.norm(j), rel=1e-9)
    assert row["spectral"] == pytest.approx(np.linalg.eigvalsh(j)[-1], rel=1e-9)
    assert row["trace"] == pytest.approx(np.trace(j), rel=1e-9)


def test_norms_of_what_underflows_squared():
    p = np.array([1.0, 1e-200, 3e-201])
    assert frobenius(p, 0) == pytest.approx(
        math.hypot(1.3, 1, 0.3, math.sqrt(2), 0.3 * math.sqrt(2)) * 1e-200
    )  # fmt: skip
    # J is 1e-200 times the Laplacian of a star: weights 1 and .3, to first order.
    star = np.array([[1.3, -1, -0.3], [-1, 1, 0], [-0.3, 0, 0.3]])
    assert spectral(p, 0, 1.3e-200) == pytest.approx(np.linalg.eigvalsh(star)[-1] * 1e-200)
    assert spectral(np.array([1.0, 0.0]), 0, 0.0) == 0


# What is said of given rows


def test_tiers_and_ties():
    tiers = {(2.2, 0): "sharp", (2.19, 0): "not sharp", (6.23, 0): "sharp", (6.24, 0): "saturated",
             (17.4, 0): "hard", (0, 0): "not sharp"}  # fmt: skip
    for scores, tier in tiers.items():
        assert saturation(scores, d_k=1).rows[0]["is"] == tier
    assert saturation((0, 0, -1), d_k=1).rows[0]["top_key"] == 1


def test_what_is_below_every_number_is_said():
    result = saturation([0, -1000], d_k=1)
    assert result.rows[0]["lead"] == math.inf
    assert result.says[0].endswith("The other weights are below float64's range.")


def test_only_rows_that_differ_by_a_constant_are_the_same():
    said = saturation([[1, 2], [2, 3.0000001], [0.1, 0.3], [100.1, 100.3], [1, 2]], d_k=1).says
    same = [line for line in said if "same distribution" in line]
    assert same == [
        "Rows 1 and 5 are the same distribution: softmax sees only differences, and row 5 is row 1 "
        "again.",
        "Rows 3 and 4 are the same distribution: softmax sees only differences, and row 4 is row 3 "
        "plus 100.",
    ]
    assert not saturation([[1, 2], [1, 2, 3]], d_k=1).says[0].startswith("Rows")


def test_scores_come_as_lists_arrays_and_tensors_and_rules_as_any():
    lists = saturation([[1.0, 2.0, 4.0]], d_k=16).rows
    assert saturation(np.array([1.0, 2.0, 4.0]), d_k=16).rows == lists
    assert saturation(torch.tensor([[1.0, 2.0, 4.0]]), d_k=16).rows == lists
    assert saturation(list(torch.tensor([1.0, 2.0, 4.0])), d_k=16).rows == lists
    assert saturation([1, 2, 4], d_k=16, scale=0.25).rows[1]["p_max"] == lists[1]["p_max"]
    assert saturation([1, 2, 4], d_k=16, scale="none").rows == lists[:1]
    two = saturation([1, 2, 4], d_k=(4, 16), scale="1/sqrt_d_model", d_model=16).rows
    assert [row["p_max"] for row in two] == [row["p_max"] for row in lists]


def test_panels_are_a_row_each_up_to_four():
    assert len(saturation([[1, 2]] * 6, d_k=4).panels) == 4
    assert saturation([1, 2, 3], d_k=4).panels[0].lines[1].kind == "bars"
    assert saturation(range(30), d_k=4).panels[0].lines[1].kind == "line"


# Random rows


def test_z_values_are_what_they_claim():
    """Over 200 seeds mean 0 and deviation 1, within 4 of their own standard errors."""
    z = []
    for seed in range(200):
        rows = saturation(d_k=16, keys=16, trials=400, seed=seed).rows
        z.append([row[key].z for row in rows for key in ("entropy", "trace")])
    z = np.array(z)
    assert np.abs(z.mean(0)).max() < 4 / math.sqrt(200)
    assert np.abs(z.std(0, ddof=1) - 1).max() < 4 / math.sqrt(400)


def test_random_rows_are_those_of_real_queries_and_keys():
    """Vectors, torch's softmax and torch's random numbers, against drawn scores."""
    d, n, trials = 8, 12, 20_000
    q, k = torch.randn(trials, 1, d).double(), torch.randn(trials, n, d).double()
    p = (q @ k.mT)[:, 0].softmax(-1)
    row = saturation(d_k=d, keys=n, trials=trials).rows[0]
    for key, real in (
        ("rest", 1 - p.amax(-1)),
        ("saturated", (p.logit().amax(-1) >= 6.2383).double()),
    ):
        error = math.hypot(row[key].error, real.std().item() / math.sqrt(trials))
        assert abs(row[key].value - real.mean().item()) < 4 * error
    assert 0 < row["saturated"].value < 1


def test_the_scaled_entropy_hardly_depends_on_d_k_and_the_unscaled_one_on_n_too():
    result = saturation(keys=(16, 128, 1024), trials=300)
    assert len(result.rows) == 2 * 4 * 3
    theory = {(r["scale"], r["d_k"], r["keys"]): r["entropy"].theory for r in result.rows}
    assert abs(theory["1/√d_k", 16, 1024] - theory["1/√d_k", 1024, 1024]) < 0.001
    # The table of the random energy model: n 1024, σ 1.
    assert theory["1/√d_k", 1024, 1024] == pytest.approx(6.433, abs=0.001)
    assert theory["none", 64, 1024] > 2 * theory["none", 64, 16]
    assert "5.55 at 16 keys, 9.70 at 128 keys, 13.9 at 1,024 keys" in result.says[1]
    assert [c.key for c in result.tables[1].columns][-2:] == ["trace.z", "rest"]
    header = result.csv().splitlines()[0].split(",")
    assert {"entropy.z", "trace.z", "rest.error", "saturated", "effective_keys"} <= set(header)


def test_a_cell_is_the_same_alone_and_in_company():
    alone = saturation(d_k=64, keys=16, trials=50).rows
    company = saturation(d_k=(4, 64), keys=(5, 16), trials=50).rows
    assert alone[0] in company
    assert alone[1] in company
    assert saturation(d_k=64, keys=16, trials=50, seed=1).rows != alone


def test_one_scale_alone_is_one():
    result = saturation(d_k=4, keys=3, trials=20, scale="none")
    assert [row["scale"] for row in result.rows] == ["none"]
    assert len(result.says) == 3
    assert result.says[2].startswith("Unscaled, the top key leads by 6.24 nats")


def test_settings_repeat_the_result_and_are_json():
    result = saturation(d_k=4, keys=3, trials=20, scale=0.3)
    again = saturation(**json.loads(json.dumps(result.settings)))
    assert again.rows == result.rows
    given = saturation([[1, 2]], d_k=(4, 8))
    assert saturation(**json.loads(json.dumps(given.settings))).rows == given.rows
    swept = scales(keys=(8, 16), trials=10, rules=("none", 0.2))
    assert scales(**json.loads(json.dumps(swept.settings))).rows == swept.rows


def test_progress_ends_at_the_total():
    for run in (
        lambda f: saturation(d_k=(4, 8), keys=(3, 9), trials=30, on_progress=f),
        lambda f: scales(keys=(64, 70_000), rules="none", trials=5, on_progress=f),
    ):
        seen = []
        run(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
        assert len({total for _, total in seen}) == 1


# Every rule against the number of keys


def test_scales_z_values_are_what_they_claim():
    z = np.array([
        [row["entropy"].z for row in scales(keys=64, trials=300, seed=seed).rows]
        for seed in range(200)
    ])  # fmt: skip
    assert z.shape == (200, 6)
    assert np.abs(z.mean(0)).max() < 4 / math.sqrt(200)
    assert np.abs(z.std(0, ddof=1) - 1).max() < 4 / math.sqrt(400)


def test_what_each_rule_does_as_keys_are_added():
    result = scales(keys=(64, 1024, 65536), trials=2)
    left = {(r["rule"], r["keys"]): r["entropy"].theory / math.log(r["keys"]) for r in result.rows}
    first, last = 64, 65536
    # At initialisation, of 6.931 nats: 1/d_k is near uniform, the mistake of d_model in between.
    at = {r["rule"]: r["entropy"].theory for r in result.rows if r["keys"] == 1024}
    assert (round(at["1/d_k"], 3), round(at["1/√d_k"], 2)) == (6.924, 6.43)
    assert at["1/√d_k"] < at["1/√d_model"] < at["1/d_k"]
    assert at["none"] < 1
    assert left["1/√d_k", last] > left["1/√d_k", first] + 0.05
    # √log n holds the share of ln n, log n lowers it.
    assert abs(left["√log₅₁₂ n/√d_k", last] - left["√log₅₁₂ n/√d_k", first]) < 0.01
    assert left["log₅₁₂ n/√d_k", last] < left["log₅₁₂ n/√d_k", first] - 0.05
    assert result.says[1].startswith(
        "Entropy as a share of ln n, its largest value, from 64 to 65,"
    )
    assert "with scale 1/√d_k from 83 % to 95 %, with scale 1/d_k it " in result.says[1]
    assert result.says[1].count(" to ") + result.says[1].count(" stays at ") == 1 + len(RULES)


def test_a_temperature_is_a_scale():
    warm = scales(keys=(64, 200), rules="1/sqrt_d_k", temperature=2.0, trials=40)
    scale = scales(keys=(64, 200), rules=1 / 16, trials=40)
    for a, b in zip(warm.rows, scale.rows, strict=True):
        assert a["entropy"] == b["entropy"]
        assert a["temperature"] == 2.0
    assert "temperature of 2 as well: 1/√d_k is then 1/√256" in warm.says[-1]
    found = scales(keys=512, rules=("none", "1/d_k", "log_n/sqrt_d_k"), trials=20)
    assert [row["temperature"] for row in found.rows] == pytest.approx([1 / 8, 8, 1])
    said = found.says[-1].split("at most ")[1].split()[0]
    assert 0 <= float(said.replace("−", "-")) < 1e-13


def test_no_scale_at_all_is_equal_weights():
    row = scales(keys=16, rules=0.0, trials=4).rows[0]
    assert row["temperature"] is None
    assert row["entropy"].value == pytest.approx(math.log(16))
    assert row["p_max"].value == pytest.approx(1 / 16)


# Refusals


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: saturation([]), ValueError, "scores is empty: pass numbers, one row or a list"),
        (lambda: saturation([[1, 2], []]), ValueError, "row 2 of scores has 0: pass at least 2"),
        (lambda: saturation([1]), ValueError, "row 1 of scores has 1: pass at least 2, a score"),
        (lambda: saturation([1, math.inf]), ValueError, "score 2 of row 1 is inf: leave a hidden"),
        (lambda: saturation([1, math.nan]), ValueError, "score 2 of row 1 is nan"),
        (lambda: saturation([1, "a"]), TypeError, "score 2 of row 1 is 'a': pass numbers"),
        (lambda: saturation([[1, 2], 3]), TypeError, "score 1 of row 1 is .1, 2.: pass numbers"),
        (lambda: saturation([True, 1]), TypeError, "score 1 of row 1 is True"),
        (lambda: saturation("10 8"), TypeError, "scores is '10 8': pass numbers"),
        (lambda: saturation([1, 10**400]), ValueError, "score 2 of row 1 is 1000"),
        (lambda: saturation([1e308, -1e308]), ValueError, "row 1 at scale none is wider than a"),
        (lambda: saturation([1, 2], scale=[1]), ValueError, "scale is .1.: pass a finite number"),
        (lambda: saturation(scale=[1]), ValueError, "scale is .1.: pass a finite number"),
        (lambda: scales(rules=None), ValueError, "scale is None: pass a finite number"),
        (lambda: saturation(5), TypeError, "scores is 5: pass numbers"),
        (lambda: saturation(d_k=0), ValueError, "d_k is 0: pass at least 1"),
        (lambda: saturation(d_k=1.5), TypeError, "d_k is 1.5: pass a whole number"),
        (lambda: saturation(keys=1), ValueError, "keys is 1: pass at least 2"),
        (lambda: saturation(keys=1 << 30), ValueError, "keys is 1,073,741,824: pass at most 16,"),
        (lambda: saturation(trials=1), ValueError, "trials is 1: pass at least 2"),
        (lambda: saturation(seed=-1), ValueError, "seed is -1: pass at least 0"),
        (lambda: saturation(scale="sqrt"), ValueError, "scale is 'sqrt': pass one of 1/sqrt_d_k"),
        (lambda: saturation(scale="1/sqrt_d_model"), ValueError, "needs d_model"),
        (lambda: scales(keys=1), ValueError, "keys is 1: pass at least 2"),
        (lambda: scales(d_k=-4), ValueError, "d_k is -4: pass at least 1"),
        (lambda: scales(rules=()), ValueError, "rules is empty: pass some of 1/sqrt_d_k"),
        (lambda: scales(rules="x"), ValueError, "scale is 'x': pass one of 1/sqrt_d_k"),
        (lambda: scales(temperature=0), ValueError, "temperature is 0: pass a finite number above"),
        (lambda: scales(temperature=math.inf), ValueError, "temperature is inf: pass a finite"),
        (lambda: scales(temperature="1"), TypeError, "temperature is '1': pass a number above 0"),
        (lambda: scales(temperature=1e-9), ValueError, "makes scores .* wide: pass one that makes"),
        (lambda: scales(trials=1), ValueError, "trials is 1: pass at least 2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(run, error, message, unannotated):
    with pytest.raises(error, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_examples_run():
    assert doctest.testmod(softmaxes) == (0, 3)
    assert doctest.testmod(given) == (0, 2)


@pytest.mark.parametrize("scale", [0, 1e-9])
def test_a_scale_that_leaves_nothing_but_rounding_agrees(scale):
    found = saturation(d_k=64, keys=(16, 1000), scale=scale, trials=300)
    assert "Agrees with theory." in found.says[0]


def test_saturated_rows_are_not_said_to_differ():
    """Few of the rows, or none, carry the mean: no standard error, and no verdict by it."""
    found = saturation(d_k=10**6, keys=16, scale="none", trials=300)
    assert found.rows[0]["trace"].z is None
    assert "2 have no standard error" in found.says[0]


def test_a_negative_scale_has_its_own_top_key():
    by = {row["scale"]: row for row in saturation([10, 8, 6, -990], scale=-1.0).rows}
    assert by["-1"]["top_key"] == 4
    assert by["-1"]["is"] == "hard"
    assert by["-1"]["spectral"] == by["-1"]["trace"] == 0
    assert by["none"]["top_key"] == 1


def test_rows_so_large_that_rounding_moves_their_weights_are_not_the_same():
    """float64's steps at 1e20 are 16,384 nats."""
    says = saturation([[1e20, 1e20], [1e20, 1e20 + 32768]], d_k=64).says
    assert not any("same distribution" in s for s in says)
    assert "row 2 is row 1 plus 0.5." in saturation([[10.1, 1.3], [10.6, 1.8]], d_k=64).says[0]

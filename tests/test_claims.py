"""Every claim's value against another computation, in NumPy; and verdicts that could be others."""

import math
from decimal import Decimal

import numpy as np
import pytest

from scaledot import lab
from scaledot.lab import replicas
from scaledot.lab.claims import CLAIMS, VERDICTS, Claim
from scaledot.lab.rstream import RStream
from scaledot.reference import exact_entropy


def softmax(*scores):
    e = np.exp(np.array(scores, dtype=float) - max(scores))
    return e / e.sum()


def gini(*scores):
    return 1 - (softmax(*scores) ** 2).sum()


def r_scores():
    """The R article's four vectors, dotted in order with exact sums."""
    stream = RStream(replicas.R_SEED)
    for _ in range(2):
        for d_k in replicas.R_SIZES:
            stream.normals(2 * d_k * replicas.R_TRIALS)
    q, *keys = stream.normals(4096).reshape(4, 1024)
    return [math.fsum(q * k) for k in keys]


RAW = r_scores()
SCALED = [s / 32 for s in RAW]
P = softmax(*SCALED)
SLOPES = P * (1 - P)
TINY = [softmax(*RAW)[0], softmax(*RAW)[0] + softmax(*RAW)[2], softmax(*RAW)[2]]
JACOBIAN = np.diag(P) - np.outer(P, P)
E = math.e
SIZES = lab.models().column("d_k")
EX2 = [12.0, 9.0, 6.0, 3.0]


def largest(divisor, growth=1.0):
    return softmax(*(growth * s / divisor for s in EX2)).max()


def chance(largest_z, of):
    return 1 - math.erf(largest_z / math.sqrt(2)) ** of


R_RAW = [3.94777092909505, 15.5490816414494, 62.5863273941154, 254.483084744768, 1052.8910520166]
R_SCALED = [
    0.96686071646374, 0.985627072465175, 0.965006629873684, 1.00778565468757, 0.998362296515974,
]  # fmt: skip
"""R 4.2.2's own, at 15 digits; the exercise's are torch's at 6."""
EX3 = [15.7990055, 63.5172195, 261.3004456, 1029.3664551]


def binomial_abs_mean(d):
    """E|q·k| of d components ±1, d even: the mean distance of a random walk, in closed form."""
    return d * math.comb(d, d // 2) / 2**d


EXPECTED = {
    "√64": [8],
    "40/8 and −24/8": [5, -3],
    "the smaller of the two after division": [-3],
    "e^1, e^5": [E, E**5],
    "e^10, e^20": [E**10, E**20],
    "e^10 ÷ e^1": [E**9],
    "e^20 ÷ e^10": [E**10],
    "e^8, e^6": [E**8, E**6],
    "e^10 + e^8 + e^6": [E**10 + E**8 + E**6],
    "softmax(10, 8, 6)": softmax(10, 8, 6),
    "its first weight in percent": [100 * softmax(10, 8, 6)[0]],
    "e^1.25, e^1, e^0.75": [E**1.25, E, E**0.75],
    "their sum": [E**1.25 + E + E**0.75],
    "softmax(1.25, 1, 0.75), first and third": softmax(1.25, 1, 0.75)[[0, 2]],
    "softmax(1.25, 1, 0.75), second": softmax(1.25, 1, 0.75)[1:2],
    "(10, 8, 6) sees almost one token": [-math.log(E**-2 + E**-4)],
    "its gradient is nearly 0": [gini(10, 8, 6) / (2 / 3)],
    "variance of q_i k_i, means 0": [1],
    "Var(XY) is the product of variances": [1 * 1 + 1 * 1 + 1 * 1],
    "Var(q·k) at d_k 64": [64, 128, 256, 1024],
    "Var(q·k/√d_k) at d_k 64": [1] * 4,
    "d_k · Var(q·k/d_k)": [1] * 4,
    "÷ d_k makes weights near uniform": exact_entropy(np.array([1024.0]), 1 / 8) / np.log(1024),
    "÷ d_k does not work": [math.exp(1 / 128 - 1 / 2)],
    "table: factor": np.sqrt([64, 128, 256, 1024]),
    "d_k × 16": [4],
    "larger models saturate more": [math.sqrt(2)],
    "√768 and √64": [math.sqrt(768), 8],
    "768/12": [64],
    "absolute size counts": [0],
    "the variance need not be 1": [3],
    "exercise 1": [128, math.sqrt(128)],
    "exercise 2: largest weight": [largest(1)],
    "exercise 2, the same scores": [largest(8) - largest(16), largest(16) - largest(32)],
    "the larger d_k the flatter": [0, 0],
    "unscaled and so grown": [largest(1, g) for g in (1, 2, 4)],
    "exercise 3: variance and deviation": [EX3[1], math.sqrt(EX3[1])],
    "exercise 3: variances are about": [
        chance(
            max(
                abs(v / d - 1) / math.sqrt((2 + 6 / d) / 10_000)
                for v, d in zip(EX3, [16, 64, 256, 1024], strict=True)
            ),
            4,
        )
    ],
    "p near 0 passes no gradient": [1023 / 1024],
    "BERT-base": [768],
    "d_k is the embedding's size": [64],
    "q1·k1": [1, 0, -1],
    "q·k says how aligned": [1 - 3],
    "QKᵀ of the example, q_a": [0.92, 0.28, -1.2],
    "QKᵀ of the example, q_b": [0.1, 0.96, -1],
    **{f"Var(q·k), d_k {d},": [v] for d, v in zip(replicas.R_SIZES, R_RAW, strict=True)},
    **{f"Var(q·k/√d_k), d_k {d},": [v] for d, v in zip(replicas.R_SIZES, R_SCALED, strict=True)},
    "the variances are about d_k": [
        chance(
            max(
                abs(v / d - 1) / math.sqrt((2 + 6 / d) / 5000)
                for v, d in zip(R_RAW, replicas.R_SIZES, strict=True)
            ),
            5,
        )
    ],
    "the scaled ones are about 1": [
        chance(
            max(
                abs(v - 1) / math.sqrt((2 + 6 / d) / 5000)
                for v, d in zip(R_SCALED, replicas.R_SIZES, strict=True)
            ),
            5,
        )
    ],
    "variance in proportion": [256],
    "unscaled scores from": [min(RAW), max(RAW)],
    "unscaled scores": RAW,
    "unscaled softmax": softmax(*RAW),
    "scaled scores from": [min(SCALED), max(SCALED)],
    "scaled scores": SCALED,
    "scaled softmax": P,
    "unscaled p(1 − p), 6 digits": TINY,
    "scaled p(1 − p), in the text": SLOPES,
    "scaled p(1 − p)": SLOPES,
    "unscaled, all gradients": TINY,
    "learning stops completely": [1],
    "p(1 − p) is the gradient's size": [
        np.linalg.norm(np.diagonal(JACOBIAN)) / np.linalg.norm(JACOBIAN)
    ],
    "the other two keep": sorted(P)[:2],
    "scaled gradients from": [SLOPES.min(), SLOPES.max()],
    "unscaled range": [max(RAW) - min(RAW)],
    "scaled range": [(max(RAW) - min(RAW)) / 32],
    "√1024 and": [32, 46 / 32],
    "large d_k saturates": [4 / math.sqrt(2 * math.log(n)) for n in (16, 2**20)],
    "the scores' variance decides": [0],
    "√512": [512**0.5],
    "√4096": [64],
    "d_k is 4096": [128],
    "|q·k| is of the order": [binomial_abs_mean(512) / 512**0.5],
    "e^10, e^1": [E**10, E],
    "e^10 + 3 e^1": [E**10 + 3 * E],
    "softmax(10, 1, 1, 1), first": [1 / (1 + 3 * E**-9)],
    "softmax(10, 1, 1, 1), each other": [1 / (3 + E**9)],
    "e^100": [E**100],
    "e^91": [E**91],
    "softmax(100, 91, 91, 91), first": [1 / (1 + 3 * E**-9)],
    "softmax(100, 91, 91, 91), each other": [1 / (3 + E**9)],
    "(100, 91, 91, 91) is still": [0],
    "very large scores": [1 / 3],
    "÷ √d_k is not too flat": exact_entropy(np.array([1024.0]), 1.0) / np.log(1024),
    "the idea of LayerNorm": [16],
    "it made depth possible": [1],
    "512/8": [64, 512],
    "QKᵀ costs the same": [8 * 64 / 512],
    "cost hardly changes": [8],
    "d_k is mostly 64 to 128": [sum(64 <= d <= 128 for d in SIZES) / len(SIZES)],
    "shapes of S": [5, 5, 5, 2],
    "q·k = |q||k| cos θ": [3 * 4 + 4 * 3],
    "mean and variance": [0, 1],
    "E[q·k] and Var[q·k]": [0, 64],
    "standard deviation at": [8, 128**0.5],
    "variance after the division": [1],
    "the variance is 1": [1 / 3],
    "the same scale at any d_k": [4],
    "absolute values count": [0],
    "a row always sums to 1": [0, 3 / 4],
    "a row's sum otherwise": [1],
    "d_k = d_model/h": [2],
    "n² is the bottleneck": [1024 / (2 * 768)],
    "memory grows as n²": [2],
}
"""By the first words of the claim; of two that fit, the longer."""


def expected(claim):
    fits = [words for words in EXPECTED if claim.claim.startswith(words)]
    return max(fits, key=len)


def test_each_claim_has_its_computation_and_each_computation_its_claim():
    assert sorted(map(expected, CLAIMS)) == sorted(EXPECTED)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.claim)
def test_the_right_value_is_what_another_computation_gives(claim):
    error = 1e-9
    if "entropy" in claim.claim:  # interpolated, to 1e-4 nats
        error = 2e-5
    if claim.claim.startswith(("exercise 3", "the variances")):  # from printed digits
        error = 2e-5
    wanted = EXPECTED[expected(claim)]
    assert list(claim.values) == pytest.approx(list(wanted), rel=error, abs=1e-25)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.claim)
def test_every_verdict_would_be_another_for_other_values(claim):
    """A right one for values beyond the printed digits, a failed one for the values claimed."""
    values = claim.values
    verdict = claim.verdict(values)
    if claim.relation:
        sign, bound = claim.printed.split()
        yes, no = {
            ">": (1, -1), "<": (-1, 1), "≥": (0, -1), "=": (0, 1), "≠": (1, 0),
        }[sign]  # fmt: skip
        others = [float(bound) + (no if verdict == "right" else yes)] * len(values)
    elif verdict == "right":
        place = Decimal(claim.printed.split()[0]).as_tuple().exponent
        step = 10.0 ** (place if claim.place is None else claim.place)
        others = [values[0] + 2 * step, *values[1:]]
    else:
        others = [float(word) for word in claim.printed.split()]
    assert claim.verdict(others) == ("right" if verdict != "right" else claim._failed)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.claim)
def test_what_fails_says_why(claim):
    if claim.verdict(claim.values) != "right":
        assert claim.why.endswith(".")
        assert claim.why[0].isupper() or claim.why[0].isdigit()


@pytest.mark.parametrize(
    ("printed", "value", "loose", "verdict"),
    [
        ("0.327", 0.326496, False, "wrong"), ("0.326", 0.326496, False, "right"),
        ("0.999", 0.99963, False, "rounded"), ("1.000", 0.99963, False, "right"),
        ("22", 22.627, False, "rounded"), ("23", 22.627, False, "right"),
        ("3.4e39", 3.3174e39, False, "wrong"), ("3.3e39", 3.3174e39, False, "right"),
        ("-0.9", -0.9037, False, "right"), ("4096", 128, True, "imprecise"),
        ("0.5", 0.45, False, "right"), ("-20.88", -20.8786, False, "right"),
        ("> 0", 0.0, False, "wrong"), ("> 0", 0.0, True, "imprecise"),
        ("> 0", 1e-300, False, "right"),
        ("≥ 2", 2.0, False, "right"), ("< 2", 2.0, False, "wrong"), ("= 0", 1e-20, False, "wrong"),
        ("≠ 1", 1.0, True, "imprecise"),
    ],
)  # fmt: skip
def test_verdicts(printed, value, loose, verdict):
    claim = Claim("R article", "x", printed, lambda: value, loose=loose)
    assert claim.verdict(claim.values) == verdict


def test_a_claim_of_several_numbers_is_as_good_as_its_worst():
    claim = Claim("R article", "x", "0.9 0.99 1.1", lambda: (0.9, 0.999, 1.3))
    assert claim.verdict((0.9, 0.99, 1.1)) == "right"
    assert claim.verdict((0.9, 0.999, 1.1)) == "rounded"
    assert claim.verdict(claim.values) == "wrong"
    assert VERDICTS == ("right", "rounded", "imprecise", "wrong")


def test_a_claim_needs_as_many_values_as_it_prints():
    with pytest.raises(ValueError, match="x: 2 numbers printed, 1 computed"):
        Claim("R article", "x", "1 2", lambda: 1.0).verdict((1.0,))


def test_claims_of_an_article_differ_and_each_is_of_one_of_the_four():
    assert len({(c.article, c.claim) for c in CLAIMS}) == len(CLAIMS)
    assert {c.article for c in CLAIMS} == {
        "Why √d_k", "R article", "√d_k and multi-head", "Q, K, V",
    }  # fmt: skip

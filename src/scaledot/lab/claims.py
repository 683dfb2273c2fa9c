"""What the four articles say in numbers, or in words that a number can test, and what is so.

Each claim computes its right value when asked; the verdict compares the two as printed, so none is
stated that the computation could not contradict. Articles are cited in short: "Why √d_k" (chapter 7
of a course on GPT-2), "R article", "√d_k and multi-head", "Q, K, V".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from functools import partial
from typing import Literal

from scaledot.lab import replicas
from scaledot.lab.evidence import (
    apart,
    attention_over_projections,
    chance_of,
    diagonal_share,
    doubled,
    exercise_2,
    exercise_3,
    gradient,
    initial_spread,
    jacobian,
    mean_of_dot,
    memory,
    own_key,
    product_variance,
    products,
    r_article,
    r_chance,
    r_range,
    r_row,
    r_spread,
    root,
    row,
    row_sums,
    shapes,
    share_of_sizes,
    similarity,
    split,
    uniformity,
    value_gradient,
    variance,
    weights,
    within_rows,
)  # fmt: skip
from scaledot.reference import sigma_c
from scaledot.scales import factor

WHY = "Why √d_k"
R = "R article"
HEADS = "√d_k and multi-head"
QKV = "Q, K, V"

Verdict = Literal["right", "rounded", "wrong", "imprecise"]
VERDICTS: tuple[Verdict, ...] = ("right", "rounded", "imprecise", "wrong")
"""From the best to the worst: a claim of several numbers is as good as its worst."""

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, "≥": operator.ge, "=": operator.eq, "≠": operator.ne,
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One claim.

    printed: the numbers as the article prints them, or a relation ("> 0") that what it says in
    words comes to. compute: the right values in float64. place: the power of ten of the last digit
    that counts, where the printed form does not show it. loose: the article has a case in mind in
    which it holds and words it as if it held always. why: a sentence for a claim that fails.
    """

    article: str
    claim: str
    printed: str
    compute: Callable[[], float | Sequence[float]]
    why: str = ""
    place: int | None = None
    loose: bool = False

    @property
    def values(self) -> tuple[float, ...]:
        """The right values, computed now."""
        found = self.compute()
        return tuple(found) if isinstance(found, Sequence) else (float(found),)

    def verdict(self, values: Sequence[float]) -> Verdict:
        """right: the values round to what is printed, or are as it says. rounded: they were cut,
        not rounded. imprecise: a loosely worded claim that fails. wrong: any other that fails."""
        if self.relation:
            sign, bound = self.printed.split()
            holds = all(_RELATIONS[sign](value, float(bound)) for value in values)
            return "right" if holds else self._failed
        words = self.printed.split()
        if len(words) != len(values):
            raise ValueError(f"{self.claim}: {len(words)} numbers printed, {len(values)} computed")
        return max(map(self._digits, words, values), key=VERDICTS.index)

    @property
    def relation(self) -> bool:
        """Whether the claim is a relation, not numbers."""
        return self.printed.split()[0] in _RELATIONS

    @property
    def _failed(self) -> Verdict:
        return "imprecise" if self.loose else "wrong"

    def _digits(self, word: str, value: float) -> Verdict:
        said, exact = Decimal(word), Decimal(value)
        place = self.place
        if place is None:
            place = int(said.as_tuple().exponent)
        unit = Decimal(1).scaleb(place)
        if said == exact.quantize(unit, ROUND_HALF_UP):
            return "right"
        return "rounded" if said == exact.quantize(unit, ROUND_DOWN) else self._failed


_SHIFT = "Softmax is unchanged by a constant added to its row: only differences count."
_MODEL = "That is so for independent components of mean 0 and variance 1, not for any model."
_MODELS = "Larger models have more heads and layers; d_k hardly grows."
_TOP_DOWN = "Both rows differ by 9, so they are the same distribution."


def _of_size(which: str, i: int) -> float:
    return getattr(r_article(), which)[i]


def _by_size(claim: str, printed: str, which: str) -> Iterator[Claim]:
    """The R article's Monte-Carlo variances, one claim a size."""
    for i, (d_k, word) in enumerate(zip(replicas.R_SIZES, printed.split(), strict=True)):
        yield Claim(
            R, f"{claim}, d_k {d_k}, {replicas.R_TRIALS:,} trials", word,
            partial(_of_size, which, i),
        )  # fmt: skip


CLAIMS: tuple[Claim, ...] = (
    Claim(WHY, "√64", "8", lambda: root(64)),
    Claim(WHY, "40/8 and −24/8", "5 -3", lambda: [40 / root(64), -24 / root(64)]),
    Claim(
        WHY, "the smaller of the two after division (5のほうが3より大きい)", "3",
        lambda: -24 / root(64), "The score was −24 and became 24; the order is kept either way.",
        loose=True,
    ),
    Claim(WHY, "e^1, e^5", "2.72 148.4", lambda: [math.exp(1), math.exp(5)]),
    Claim(WHY, "e^10, e^20", "22026 485165195", lambda: [math.exp(10), math.exp(20)]),
    Claim(WHY, "e^10 ÷ e^1 (約8000倍)", "8000", lambda: math.exp(10 - 1), place=3),
    Claim(WHY, "e^20 ÷ e^10 (約22000倍)", "22000", lambda: math.exp(20 - 10), place=3),
    Claim(WHY, "e^8, e^6", "2981 403", lambda: [math.exp(8), math.exp(6)]),
    Claim(
        WHY, "e^10 + e^8 + e^6", "25410", lambda: math.exp(row(10, 8, 6).rows.lse.item()),
        "Its rounded terms were added.",
    ),
    Claim(WHY, "softmax(10, 8, 6)", "0.867 0.117 0.016", lambda: weights(10, 8, 6)),
    Claim(WHY, "its first weight in percent", "87", lambda: 100 * weights(10, 8, 6)[0]),
    Claim(
        WHY, "e^1.25, e^1, e^0.75", "3.49 2.72 2.12", lambda: [math.exp(x) for x in (1.25, 1, 0.75)]
    ),
    Claim(WHY, "their sum", "8.33", lambda: sum(math.exp(x) for x in (1.25, 1, 0.75))),
    Claim(
        WHY, "softmax(1.25, 1, 0.75), first and third", "0.419 0.254",
        lambda: weights(10, 8, 6, scale=1 / root(64))[::2],
    ),
    Claim(
        WHY, "softmax(1.25, 1, 0.75), second", "0.327",
        lambda: weights(10, 8, 6, scale=1 / root(64))[1],
        "Rounded numbers were divided, 2.72 by 8.33.",
    ),
    Claim(
        WHY, "(10, 8, 6) sees almost one token (ほぼ集中): its log-odds", "≥ 6.24",
        lambda: row(10, 8, 6).rows.top_margin.item(),
        "It leads by less than a weight of .9 takes, 2.20; at 6.24, 9 ln 2, bfloat16 would store "
        "exactly 1.", loose=True,
    ),
    Claim(
        WHY, "its gradient is nearly 0 (ほぼゼロ): Σp(1 − p) ÷ the largest possible",
        "< 0.1", lambda: jacobian(10, 8, 6) / jacobian(0, 0, 0),
        "More than a tenth of what three equal weights pass back is left: not saturated.",
        loose=True,
    ),
    Claim(WHY, "variance of q_i k_i, means 0", "1", lambda: product_variance(-1, 1)),
    Claim(
        WHY, "Var(XY) is the product of variances (それぞれの分散の積): both 1, means 1", "1",
        lambda: product_variance(0, 2), "With means of 1 the means' products add: "
        "the rule holds where both means are 0.", loose=True,
    ),
    Claim(
        WHY, "Var(q·k) at d_k 64, 128, 256, 1024", "64 128 256 1024",
        lambda: [variance(d) for d in (64, 128, 256, 1024)],
    ),
    Claim(
        WHY, "Var(q·k/√d_k) at d_k 64, 128, 256, 1024", "1 1 1 1",
        lambda: [variance(d, factor("1/sqrt_d_k", d)) for d in (64, 128, 256, 1024)],
    ),
    Claim(
        WHY, "d_k · Var(q·k/d_k) at d_k 64, 128, 256, 1024", "1 1 1 1",
        lambda: [d * variance(d, factor("1/d_k", d)) for d in (64, 128, 256, 1024)],
    ),
    Claim(
        WHY, "÷ d_k makes weights near uniform (均一): entropy ÷ ln n, n = 1,024", "> 0.99",
        lambda: uniformity("1/d_k"),
    ),
    Claim(
        WHY, "÷ d_k does not work (機能しません): the scores' gradient over that with ÷ √d_k",
        "< 0.1",
        lambda: gradient("1/d_k") / gradient("1/sqrt_d_k"),
        "It starts flat and learns: models trained with 1/d_k exist (µP, Granite). To q and k the "
        "factor passes 1/√d_k of it besides, which is a matter of their learning rate.",
        loose=True,
    ),
    Claim(
        WHY, "table: factor at d_k 64, 128, 256, 1024", "8 11.3 16 32",
        lambda: [root(d) for d in (64, 128, 256, 1024)],
    ),
    Claim(WHY, "d_k × 16 makes the spread", "4", lambda: root(1024) / root(64)),
    Claim(
        WHY, "larger models saturate more (大きなモデルほど): spread, GPT-3 ÷ GPT-2 small", "≥ 4",
        lambda: root(12288 // 96) / root(768 // 12),
        _MODELS + " At 16 times the width the spread is far from 4 times.", loose=True,
    ),
    Claim(WHY, "√768 and √64", "27.7 8", lambda: [root(768), root(768 // 12)]),
    Claim(WHY, "768/12", "64", lambda: 768 / 12),
    Claim(
        WHY, "absolute size counts (絶対的な大きさ): change of softmax(10, 8, 6) by + 1000",
        "> 0", lambda: apart(weights(1010, 1008, 1006), weights(10, 8, 6)), _SHIFT, loose=True,
    ),
    Claim(
        WHY, "the variance need not be 1 (つまずき3): Var(XY) for means of 1", "≠ 1",
        lambda: product_variance(0, 2),
    ),
    Claim(WHY, "exercise 1: 4096/32 and its root", "128 11.31", lambda: [4096 / 32, root(128)]),
    Claim(
        WHY, "exercise 2: largest weight of (12, 9, 6, 3) (0.95を超える)", "> 0.95",
        lambda: exercise_2(64, scaled=False),
    ),
    Claim(
        WHY, "exercise 2, the same scores: largest weight falls, d_k 64, 256, 1024", "> 0",
        lambda: [exercise_2(64) - exercise_2(256), exercise_2(256) - exercise_2(1024)],
    ),
    Claim(
        WHY, "the larger d_k the flatter (なだらか): its fall if scores grow as √d_k", "> 0",
        lambda: [
            exercise_2(64, grown=True) - exercise_2(256, grown=True),
            exercise_2(256, grown=True) - exercise_2(1024, grown=True),
        ],
        "Scores grow as √d_k and are divided by √d_k: the weights do not depend on d_k.",
        loose=True,
    ),
    Claim(
        WHY, "unscaled and so grown: largest weight at d_k 64, 256, 1024",
        "> 0.95", lambda: [exercise_2(d, grown=True, scaled=False) for d in (64, 256, 1024)],
    ),
    Claim(
        WHY, "exercise 3: variance and deviation at d_k 64", "64 8",
        lambda: [exercise_3()[64], math.sqrt(exercise_3()[64])],
    ),
    Claim(
        WHY, "exercise 3: variances are about d_k (おおむね): chance of the largest |z|", "> 0.01",
        lambda: chance_of(
            list(exercise_3().values()), replicas.EXERCISE_SIZES, replicas.EXERCISE_TRIALS
        ),
    ),
    Claim(
        WHY, "p near 0 passes no gradient (張り付く): Σp(1 − p) of 1,024 equal weights", "< 0.1",
        lambda: jacobian(*[0.0] * 1024),
        "Each p(1 − p) is small because keys are many; the row passes nearly everything back.",
        loose=True,
    ),
    Claim(R, "BERT-base: size of an embedding", "768", lambda: 12 * 64),
    Claim(
        R, "d_k is the embedding's size (embeddingの次元数): BERT-base", "768", lambda: 768 / 12,
        "One head's size is d_k: the embedding is split among the heads.",
    ),
    Claim(
        R, "q1·k1, q1·k2, q1·k3", "1.00 0.00 -1.00",
        lambda: products([1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]),
    ),
    Claim(
        R, "q·k says how aligned (同じ方向): an aligned key less a longer one at 45°", "> 0",
        lambda: operator.sub(*products([1.0, 0.0], [1.0, 0.0], [3.0, 3.0])),
        "The length of a key counts as much as its direction.", loose=True,
    ),
    Claim(R, "QKᵀ of the example, q_a", "0.92 0.28 -1.2", lambda: similarity()[:3]),
    Claim(R, "QKᵀ of the example, q_b", "0.10 0.96 -1.0", lambda: similarity()[3:]),
    *_by_size("Var(q·k)", "3.947771 15.549082 62.586327 254.483085 1052.891052", "variance"),
    *_by_size(
        "Var(q·k/√d_k)", "0.9668607 0.9856271 0.9650066 1.0077857 0.9983623", "scaled_variance"
    ),
    Claim(
        R, "the variances are about d_k (ほぼ一致): chance of the largest |z|", "> 0.01",
        lambda: r_chance(False),
    ),
    Claim(
        R, "the scaled ones are about 1 (ほぼ1): chance of the largest |z|", "> 0.01",
        lambda: r_chance(True),
    ),
    Claim(
        R, "variance in proportion to d_k: 1024 ÷ 4", "256", lambda: variance(1024) / variance(4)
    ),
    Claim(R, "unscaled scores", "-20.88 16.94 -28.92", lambda: r_row("scores")),
    Claim(R, "unscaled softmax, 4 digits", "0 1 0", lambda: r_row("weights"), place=-4),
    Claim(
        R, "scaled scores", "-0.65 0.53 -0.9", lambda: r_row("scores", scaled=True), place=-2
    ),
    Claim(
        R, "scaled softmax", "0.1985 0.6472 0.1544", lambda: r_row("weights", scaled=True)
    ),
    Claim(R, "unscaled p(1 − p), 6 digits", "0 0 0", lambda: r_row("slopes"), place=-6),
    Claim(
        R, "scaled p(1 − p)", "0.159078 0.228345 0.130545", lambda: r_row("slopes", scaled=True)
    ),
    Claim(
        R, "scaled p(1 − p), in the text", "0.159 0.228 0.131",
        lambda: r_row("slopes", scaled=True),
    ),
    Claim(
        R, "unscaled, all gradients are 0 (勾配が全てゼロ): p(1 − p)", "= 0",
        lambda: r_row("slopes"),
        "They print as 0 to 6 digits, and the winner's 1 − p cancels in float64; none is 0.",
    ),
    Claim(
        R, "learning stops completely (完全に停止): gradient at the winner's value", "= 0",
        value_gradient, "The values, and all behind them, learn as before; only this row's q and "
        "k hardly do.",
    ),
    Claim(
        R, "p(1 − p) is the gradient's size (大きさの目安): norm over the Jacobian's", "= 1",
        lambda: diagonal_share(*r_row("scores", scaled=True)),
        "It is the Jacobian's diagonal; −p_i p_j beside it and the scale on the way to q and k "
        "are left out.", loose=True,
    ),
    Claim(
        R, "the other two keep 0.15 to 0.20", "0.15 0.20",
        lambda: sorted(r_row("weights", scaled=True))[:2],
    ),
    Claim(
        R, "scaled gradients from 0.13 to 0.23", "0.13 0.23",
        lambda: [f(r_row("slopes", scaled=True)) for f in (min, max)],
    ),
    Claim(R, "unscaled scores from −29 to 17", "-29 17", lambda: r_range(False)),
    Claim(R, "unscaled range", "46", lambda: r_spread(False)),
    Claim(
        R, "scaled scores from −0.9 to 0.53", "-0.9 0.53", lambda: r_range(True), place=-2
    ),
    Claim(R, "scaled range", "1.4", lambda: r_spread(True)),
    Claim(R, "√1024 and 46/√1024", "32 1.4", lambda: [root(1024), 46 / root(1024)]),
    Claim(
        R, "large d_k saturates (飽和): √d_k ÷ √(2 ln n), d_k 16, n 16 and 2²⁰", "> 1",
        lambda: [root(16) / sigma_c(n).item() for n in (16, 2**20)],
        "Whether a row condenses on few keys depends on how many there are as well as on d_k.",
        loose=True,
    ),
    Claim(
        R, "the scores' variance decides (ばらつき): within rows if all keys are alike", "1",
        within_rows, "What is constant along a row is in the variance and softmax cannot see it.",
        loose=True,
    ),
    Claim(
        HEADS, "√512", "22", lambda: root(512), "Cut, where it rounds up."
    ),
    Claim(HEADS, "√4096", "64", lambda: root(4096)),
    Claim(
        HEADS, "d_k is 4096 (dk=4096なら): with 32 heads, 4,096 wide", "4096", lambda: 4096 / 32,
        "4,096 is a d_model; d_k is that of one head.", loose=True,
    ),
    Claim(
        HEADS, "|q·k| is of the order of √d_k (オーダー): mean ÷ √d_k, d_k 512", "1",
        lambda: mean_of_dot(512, abs) / root(512), place=0,
    ),
    Claim(HEADS, "e^10, e^1", "22026 2.72", lambda: [math.exp(10), math.exp(1)]),
    Claim(
        HEADS, "e^10 + 3 e^1", "22034", lambda: math.exp(row(10, 1, 1, 1).rows.lse.item()),
        "Cut, where it rounds up.",
    ),
    Claim(
        HEADS, "softmax(10, 1, 1, 1), first", "0.999", lambda: weights(10, 1, 1, 1)[0],
        "Cut: to three digits it is 1.000.",
    ),
    Claim(HEADS, "softmax(10, 1, 1, 1), each other", "0.0001", lambda: weights(10, 1, 1, 1)[1]),
    Claim(HEADS, "e^100", "2.7e43", lambda: math.exp(100)),
    Claim(HEADS, "e^91", "3.4e39", lambda: math.exp(91), "Its second digit is wrong."),
    Claim(
        HEADS, "softmax(100, 91, 91, 91), first", "0.99996", lambda: weights(100, 91, 91, 91)[0],
        _TOP_DOWN + " A slip by a power of ten.",
    ),
    Claim(
        HEADS, "softmax(100, 91, 91, 91), each other", "0.000013",
        lambda: weights(100, 91, 91, 91)[1],
        "A slip by a power of ten.",
    ),
    Claim(
        HEADS, "(100, 91, 91, 91) is still more one-hot (さらに極端に): p_max less the other's",
        "> 0", lambda: max(weights(100, 91, 91, 91)) - max(weights(10, 1, 1, 1)),
        _TOP_DOWN + " Ten times the row, (100, 10, 10, 10), is sharper.",
    ),
    Claim(
        HEADS, "very large scores saturate (極端に大きい): p_max of (1000, 1000, 1000)", "≥ 0.9",
        lambda: max(weights(1000, 1000, 1000)), _SHIFT, loose=True,
    ),
    Claim(
        HEADS, "÷ √d_k is not too flat (鈍すぎない): entropy ÷ ln n, n = 1,024", "< 0.99",
        lambda: uniformity("1/sqrt_d_k"),
    ),
    Claim(
        HEADS, "the idea of LayerNorm (信号の標準化): variance × if q and k double", "1", doubled,
        "A constant cannot normalise: norms of q and k (QK-norm) do.", loose=True,
    ),
    Claim(
        HEADS, "it made depth possible (深層化): unscaled spread, GPT-2 XL ÷ small", "> 1",
        lambda: root(1600 // 25) / root(768 // 12),
        "The scale answers d_k, which 12 and 48 layers share; depth is for residuals and norms.",
        loose=True,
    ),
    Claim(HEADS, "512/8 and 64 · 8", "64 512", lambda: [512 / 8, 64 * 8]),
    Claim(
        HEADS, "QKᵀ costs the same (計算量は同じ): multiply-adds, 8 heads ÷ 1", "1",
        lambda: split(8, lambda t, d_k: t.scores.numel() * d_k),
    ),
    Claim(
        HEADS, "cost hardly changes (ほぼ変わりません): softmax weights, 8 heads ÷ 1", "1",
        lambda: split(8, lambda t, _: t.weights.numel()),
        "Matrix products cost the same; exponentials and n × n matrices grow with the heads.",
        loose=True,
    ),
    Claim(
        HEADS, "d_k is mostly 64 to 128 (64〜128あたりが多く): share of published models", "> 0.5",
        lambda: share_of_sizes(64, 128),
    ),
    Claim(QKV, "shapes of S and of the output, n 5, d_v 2", "5 5 5 2", shapes),
    Claim(
        QKV, "q·k = |q||k| cos θ: (3, 4) and (4, 3)", "24",
        lambda: 5 * 5 * math.cos(math.atan2(4, 3) - math.atan2(3, 4)),
    ),
    Claim(QKV, "mean and variance of q_m k_m", "0 1", lambda: [mean_of_dot(1, float), variance(1)]),
    Claim(
        QKV, "E[q·k] and Var[q·k] at d_k 64", "0 64", lambda: [mean_of_dot(64, float), variance(64)]
    ),
    Claim(QKV, "standard deviation at d_k 64 and 128", "8 11", lambda: [root(64), root(128)]),
    Claim(
        QKV, "variance after the division, d_k 128", "1",
        lambda: variance(128, factor("1/sqrt_d_k", 128)),
    ),
    Claim(
        QKV, "the variance is 1 (1に正規化): deviation at nn.Linear's initialisation", "1",
        initial_spread,
        _MODEL + " Weights' initialisation and the inputs' norm decide as well.", loose=True,
    ),
    Claim(
        QKV, "the same scale at any d_k (一定): score if k = q, d_k 1024 ÷ 64", "1",
        lambda: own_key(1024, "1/sqrt_d_k") / own_key(64, "1/sqrt_d_k"),
        "Where training aligns q and k, q·k grows as d_k: 1/d_k would keep it.", loose=True,
    ),
    Claim(
        QKV, "absolute values count (絶対値): change of softmax(10, 8, 6) by + 1000", "> 0",
        lambda: apart(weights(1010, 1008, 1006), weights(10, 8, 6)), _SHIFT, loose=True,
    ),
    Claim(
        QKV, "a row always sums to 1 (必ず1): all keys masked; beside a sink", "1 1",
        row_sums, "Not in a row that sees no key, nor beside a sink.", loose=True,
    ),
    Claim(QKV, "a row's sum otherwise", "1", lambda: sum(weights(10, 8, 6)), place=-9),
    Claim(
        QKV, "d_k = d_model/h: h · d_k ÷ d_model of Qwen3-0.6B", "1",
        lambda: 16 * 128 / 1024, "A convention that many models break.", loose=True,
    ),
    Claim(
        QKV, "n² is the bottleneck (ボトルネック): QKᵀ and ·V ÷ projections, GPT-2, n = 1,024",
        "> 1",
        lambda: attention_over_projections(1024, 768),
        "It leaves out the projections, which cost more below n = 2·d_model.", loose=True,
    ),
    Claim(
        QKV, "memory grows as n² (二乗): kept for softmax, 64 ÷ 32 tokens", "4",
        lambda: memory(64) / memory(32),
        "Online softmax keeps one number a row and no matrix: time grows as n², memory as n.",
        loose=True,
    ),
)  # fmt: skip

"""The four articles answered: what the R article's code prints, the exercises of "Why √d_k", and
every number that any of them claims.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from scaledot.lab import arguments, replicas
from scaledot.lab.claims import CLAIMS, VERDICTS, Claim
from scaledot.lab.results import Column, Estimate, Line, Panel, Result, Table, Value, chance
from scaledot.lab.rprint import cat, frame, r_round
from scaledot.stages import Trace, trace

ARTICLES = ("r", "exercises", "claims")

_TITLE = "RでTransformerのAttention機構:スケーリング済み内積スコア"
_EXERCISES = "第7章スケーリング：なぜルートd_kで割るのか"
_SOURCE = "docs/maths.md#variance"
_KEYS = ("k1", "k2", "k3")


def article(
    name: str, *, seed: int | None = None, on_progress: Callable[[int, int], None] | None = None
) -> Result:
    """An article's numbers computed again, as `lines` in its own words and as tables.

    "r": every line that the R article's code prints, byte for byte, from R's random stream; beside
    each variance its theory and standard error. "exercises": the answers to the exercises of "Why
    √d_k", as its code prints them with torch's stream. "claims": every number in the four articles,
    the right one, and a verdict.

    seed: the article's own, 20260714 and 0, unless given; claims are about those seeds and take
    none. on_progress(done, total) counts the trials of "r".
    Cost: a second or two. torch's random state stays as it was.
    Raises: TypeError for a seed that is no integer; ValueError for another name, a seed that R or
    torch refuses, and a seed with "claims".
    Source: docs/maths.md#variance.

    >>> print(*article("r").lines[:2], sep="\\n")
    === 内積は「向きの近さ」を表す ===
    q1・k1 (同じ方向)  = 1.00
    """
    name = arguments.one_of("article", name, ARTICLES)
    seed = None if seed is None else arguments.seed(seed)
    if name == "r":
        return _r_article(replicas.R_SEED if seed is None else seed, on_progress)
    if name == "exercises":
        return _exercises(replicas.EXERCISE_SEED if seed is None else seed)
    if seed is not None:
        raise ValueError("claims are about the articles' own seeds: leave seed out")
    return _claims()


# The R article


def _r_article(seed: int, on_progress: Callable[[int, int], None] | None) -> Result:
    run = replicas.r_run(seed, on_progress)
    sizes, trials = replicas.R_SIZES, replicas.R_TRIALS
    errors = [replicas.variance_error(d_k, trials) for d_k in sizes]
    raw = [Estimate(v, e, d) for v, e, d in zip(run.variance, errors, sizes, strict=True)]
    scaled = [
        Estimate(v, e / d, 1.0) for v, e, d in zip(run.scaled_variance, errors, sizes, strict=True)
    ]
    rows: list[dict[str, Value]] = [
        {"d_k": d, "raw": r, "scaled": s} for d, r, s in zip(sizes, raw, scaled, strict=True)
    ]
    raw_slopes, scaled_slopes = (replicas.slopes(t.weights[0]) for t in (run.raw, run.scaled))
    keys: list[dict[str, Value]] = [
        {
            "key": key, "score": run.raw.scaled[0, i].item(),
            "weight": run.raw.weights[0, i].item(), "slope": raw_slopes[i].item(),
            "scaled_score": run.scaled.scaled[0, i].item(),
            "scaled_weight": run.scaled.weights[0, i].item(),
            "scaled_slope": scaled_slopes[i].item(),
        }
        for i, key in enumerate(_KEYS)
    ]  # fmt: skip
    most = 1 - 1 / len(_KEYS)
    return Result(
        "article",
        f"r: {_TITLE}, seed {seed}",
        {"name": "r", "seed": seed},
        (
            Table(
                (
                    Column("d_k", "d_k", "whole"),
                    Column("raw", "q·k"), Column("raw.z", "z"),
                    Column("scaled", "q·k / √d_k"), Column("scaled.z", "z"),
                ),
                tuple(rows),
                f"Variance over {trials:,} pairs",
            ),
            Table(
                (
                    Column("key", "key", "text"),
                    Column("score", "q·k"), Column("weight", "weight", "probability"),
                    Column("slope", "p(1 − p)", "small"),
                    Column("scaled_score", "q·k / √d_k"),
                    Column("scaled_weight", "weight", "probability"),
                    Column("scaled_slope", "p(1 − p)", "small"),
                ),
                tuple(keys),
                f"One query over three keys, d_k {replicas.R_LARGE:,}",
            ),
        ),
        (
            _agreement([*raw, *scaled]),
            f"Σp(1 − p) is {_digits(raw_slopes.sum().item(), 2)} unscaled and "
            f"{_digits(scaled_slopes.sum().item(), 2)} scaled, of at most {most:.2f} for three "
            "keys; a p(1 − p) printed as 0 is rounded to 6 digits, not 0.",
            "They are of one draw: another seed gives another.",
        ),
        _r_panels(run),
        _SOURCE,
        tuple(_r_lines(run)),
    )  # fmt: skip


def _r_lines(run: replicas.RRun) -> list[str]:
    """The standard output of the article's code."""
    ahead = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    around = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    same, across, against = trace(ahead, around).scores[0].tolist()
    query = torch.tensor([[1.0, 0.2, 0.0], [0.0, 1.0, 0.3]], dtype=torch.float64)
    key = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.9, 0.2], [-1.0, -1.0, 0.0]], dtype=torch.float64)
    similar = trace(query, key).scores.T.tolist()
    table = {
        name: [r_round(x, 3) for x in scores]
        for name, scores in zip(("k_x", "k_y", "k_z"), similar, strict=True)
    }
    sizes = list(map(float, replicas.R_SIZES))
    raw, scaled = (t.scaled[0].tolist() for t in (run.raw, run.scaled))
    raw_p, scaled_p = (t.weights[0].tolist() for t in (run.raw, run.scaled))
    raw_slopes, scaled_slopes = (
        replicas.slopes(t.weights[0]).tolist() for t in (run.raw, run.scaled)
    )
    return [
        "=== 内積は「向きの近さ」を表す ===",
        f"q1・k1 (同じ方向)  = {same:.2f}",
        f"q1・k2 (直交)      = {across:.2f}",
        f"q1・k3 (逆方向)    = {against:.2f}",
        "",
        "=== QK^T (Query x Key の類似度一覧表) ===",
        *frame(table, ["q_a", "q_b"]),
        "=== 次元数 d_k と 内積 q・k の分散の関係 ===",
        *frame({"d_k": sizes, "empirical_variance": run.variance, "theoretical_variance": sizes}),
        "=== sqrt(d_k) でスケーリングした後の分散 ===",
        *frame({"d_k": sizes, "scaled_variance": run.scaled_variance}),
        f"=== d_k = {replicas.R_LARGE} のときの、スケーリングの有無による違い ===",
        _cat("生のスコア (スケーリングなし):", raw, 2),
        _cat("  -> softmax:", raw_p, 4),
        "",
        _cat("スケーリング後のスコア:", scaled, 2),
        _cat("  -> softmax:", scaled_p, 4),
        "",
        "=== softmax出力における勾配の大きさの目安 (p * (1-p)) ===",
        _cat("スケーリングなしの場合:", raw_slopes, 6),
        _cat("スケーリングありの場合:", scaled_slopes, 6),
    ]


def _cat(label: str, values: Sequence[float], digits: int) -> str:
    return cat(label, *(r_round(x, digits) for x in values))


def _r_panels(run: replicas.RRun) -> tuple[Panel, ...]:
    sizes = replicas.R_SIZES
    return (
        Panel(
            "Standard deviation of q·k", "d_k", "standard deviation",
            (
                Line("not scaled", sizes, [math.sqrt(v) for v in run.variance]),
                Line("divided by √d_k", sizes, [math.sqrt(v) for v in run.scaled_variance]),
                Line("√d_k", sizes, [math.sqrt(d) for d in sizes], "theory"),
                Line("1", sizes, [1.0] * len(sizes), "theory"),
            ),
            log_x=True,
        ),
        Panel(
            f"Softmax over three keys, d_k {replicas.R_LARGE:,}", "key", "attention weight",
            (
                Line("not scaled", _KEYS, run.raw.weights[0].tolist(), "bars"),
                Line("divided by √d_k", _KEYS, run.scaled.weights[0].tolist(), "bars"),
            ),
        ),
    )  # fmt: skip


# The exercises of "Why √d_k"


_SCORES = (12.0, 9.0, 6.0, 3.0)
_SIZES = (64, 256, 1024)


def _exercises(seed: int) -> Result:
    dots = replicas.exercise_dots(seed)
    trials = replicas.EXERCISE_TRIALS
    estimates = {
        d_k: Estimate(found.double().var().item(), replicas.variance_error(d_k, trials), d_k)
        for d_k, found in dots.items()
    }
    rows: list[dict[str, Value]] = [
        {
            "d_k": d_k, "variance": estimate, "deviation": math.sqrt(estimate.value),
            "root": math.sqrt(d_k),
        }
        for d_k, estimate in estimates.items()
    ]  # fmt: skip
    weights = []
    for d_k in _SIZES:
        grown = [x * math.sqrt(d_k / _SIZES[0]) for x in _SCORES]
        weights.append({
            "d_k": d_k, "root": math.sqrt(d_k),
            "same": _row(_SCORES, 1 / math.sqrt(d_k)).weights.max().item(),
            "grown": _row(grown, 1 / math.sqrt(d_k)).weights.max().item(),
            "unscaled": _row(grown, 1.0).weights.max().item(),
        })  # fmt: skip
    raw = max(_row(_SCORES, 1.0).weights[0].tolist())
    return Result(
        "article",
        f"exercises: {_EXERCISES}, {trials:,} pairs each, seed {seed}",
        {"name": "exercises", "seed": seed},
        (
            Table(
                (
                    Column("d_k", "d_k", "whole"),
                    Column("variance", "variance of q·k"), Column("variance.z", "z"),
                    Column("deviation", "std. dev."), Column("root", "√d_k"),
                ),
                tuple(rows),
                f"Exercise 3: {trials:,} pairs each",
            ),
            Table(
                (
                    Column("d_k", "d_k", "whole"), Column("root", "√d_k"),
                    Column("same", "÷ √d_k", "weight"),
                    Column("grown", "growing, ÷ √d_k", "weight"),
                    Column("unscaled", "growing, unscaled", "weight"),
                ),
                tuple(weights),
                "Exercise 2: largest weight of (12, 9, 6, 3)",
            ),
        ),
        (
            _agreement(list(estimates.values())),
            f"Exercise 2: unscaled, the largest weight is {raw:.6f}: above 0.95 by "
            f"{raw - 0.95:.1g}.",
            "The row flattens as d_k grows because the same scores are divided; scores that grow "
            "as √d_k give the same weights at every d_k.",
        ),
        (
            Panel(
                "Variance of q·k ÷ d_k", "d_k", "variance ÷ d_k",
                (
                    Line(
                        f"{trials:,} pairs", list(dots),
                        [e.value / d for d, e in estimates.items()],
                        "points", [replicas.variance_error(d, trials) / d for d in dots],
                    ),
                    Line("theory", list(dots), [1.0] * len(dots), "theory"),
                ),
                log_x=True,
            ),
            Panel(
                "Largest weight of (12, 9, 6, 3)", "d_k", "attention weight",
                (
                    Line("the same scores ÷ √d_k", _SIZES, [w["same"] for w in weights]),
                    Line("growing as √d_k, ÷ √d_k", _SIZES, [w["grown"] for w in weights]),
                    Line("growing as √d_k, unscaled", _SIZES, [w["unscaled"] for w in weights]),
                ),
                log_x=True,
            ),
        ),
        _SOURCE,
        tuple(_exercise_lines(dots)),
    )  # fmt: skip


def _row(scores: Sequence[float], scale: float, dtype: torch.dtype = torch.float64) -> Trace:
    keys = torch.tensor(scores, dtype=dtype)[:, None]
    return trace(torch.ones(1, 1, dtype=dtype), keys, scale=scale)


def _exercise_lines(dots: dict[int, torch.Tensor]) -> list[str]:
    """What the code of exercises 2 and 3 prints, in its float32; exercise 1 has none."""
    d_model, heads = 4096, 32
    d_k = d_model // heads

    def row(divisor: float) -> tuple[list[float], list[float]]:
        t = _row(_SCORES, 1 / divisor, torch.float32)
        return t.scaled[0].tolist(), t.weights[0].tolist()

    scores, weights = row(1.0)
    scaled, flat = row(math.sqrt(_SIZES[0]))
    lines = [
        f"演習1: {d_model}/{heads} = {d_k}, sqrt({d_k}) = {math.sqrt(d_k):.2f}",
        "",
        "=== スケーリングなし ===",
        f"スコア: {scores}",
        f"確率: {[round(p, 4) for p in weights]}",
        f"最大値: {max(weights):.4f}",
        "",
        f"=== スケーリングあり（d_k={_SIZES[0]}） ===",
        f"スケーリング後のスコア: {[round(s, 4) for s in scaled]}",
        f"確率: {[round(p, 4) for p in flat]}",
        f"最大値: {max(flat):.4f}",
        "",
        "=== 次元数を変えた比較 ===",
    ]
    for d in _SIZES:
        largest = max(row(math.sqrt(d))[1])
        lines.append(f"d_k={d:5d}: 最大確率 {largest:.4f}, スケーリング係数 {math.sqrt(d):.2f}")
    lines.append("")
    for d, found in dots.items():
        lines.append(
            f"d_k={d:5d}: 内積の分散 {found.var().item():8.2f}, "
            f"標準偏差 {found.std().item():6.2f}, sqrt(d_k)={d**0.5:6.2f}"
        )
    return lines


# Every claim


def _claims() -> Result:
    checked = [(claim, values, claim.verdict(values)) for claim in CLAIMS
               for values in [claim.values]]  # fmt: skip
    counts = Counter(verdict for _, _, verdict in checked)
    names = list(dict.fromkeys(claim.article for claim in CLAIMS))
    rows = tuple(
        {
            "article": claim.article, "claim": claim.claim,
            "printed": claim.printed.replace("-", "−"),
            "computed": _computed(claim, values), "verdict": verdict,
        }
        for claim, values, verdict in checked
    )  # fmt: skip
    reasons = tuple(
        f"{verdict.capitalize()}. {claim.article}, {claim.claim}: {_compared(claim, values)}. "
        f"{claim.why}"
        for worst in reversed(VERDICTS[1:])
        for claim, values, verdict in checked
        if verdict == worst
    )
    return Result(
        "article",
        f"claims: {len(CLAIMS)} of {len(names)} articles, each computed again",
        {"name": "claims"},
        (
            Table(
                tuple(
                    Column(key, key, "text")
                    for key in ("article", "claim", "printed", "computed", "verdict")
                ),
                rows,
                by="article",
            ),
        ),
        (
            f"Of {len(CLAIMS)} claims "
            + ", ".join(f"{counts[verdict]} {_IS[verdict]}" for verdict in VERDICTS)
            + ".",
            *reasons,
        ),
        (
            Panel(
                "Claims of the four articles", "article", "claims",
                tuple(
                    Line(
                        verdict, names,
                        [
                            sum(v == verdict and c.article == name for c, _, v in checked)
                            for name in names
                        ],
                        "bars",
                    )
                    for verdict in VERDICTS
                ),
            ),
        ),
    )  # fmt: skip


_IS = {
    "right": "are right",
    "rounded": "are cut where they should be rounded",
    "imprecise": "hold only in the case that the article has in mind",
    "wrong": "are wrong",
}


def _compared(claim: Claim, values: Sequence[float]) -> str:
    said = claim.printed.replace("-", "−")
    found = _computed(claim, values)
    if claim.relation:
        return f"{found}, where the claim needs {said}"
    return f"printed {said}, is {found}"


def _computed(claim: Claim, values: Sequence[float]) -> str:
    """Each with one digit more than printed, four at least."""
    words = [claim.printed] * len(values) if claim.relation else claim.printed.split()
    shown = []
    for word, value in zip(words, values, strict=True):
        mantissa = word.lower().partition("e")[0]
        printed = sum(c.isdigit() for c in mantissa.lstrip("-0."))
        shown.append(_digits(value, max(printed + 1, 4)))
    return " ".join(shown)


def _digits(value: float, digits: int) -> str:
    return f"{value:.{digits}g}".replace("e+", "e").replace("e-0", "e-").replace("-", "−")


def _agreement(estimates: Sequence[Estimate]) -> str:
    """What the distances from theory say together."""
    largest = max(abs(e.z) for e in estimates if e.z is not None)
    often = chance(largest, len(estimates))
    verdict = "Agrees with theory" if often > 0.01 else "Differs from theory"
    return (
        f"{verdict}: the largest |z| of {len(estimates)} is {largest:.2f}; chance gives one as "
        f"large in {100 * often:.2g} % of runs."
    )

"""What softmax makes of a row of scores, with and without a scale: `saturation`, of given scores or
of random ones, and `scales`, every rule against the number of keys.

Only differences within a row matter, and how sharp a row of given width is depends on the number of
keys: unscaled scores, √d_k wide, condense on few of n keys from d_k > 2 ln n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from scaledot.checks import whole
from scaledot.heads import SATURATED
from scaledot.lab import arguments, gaussian, given
from scaledot.lab.gaussian import Running
from scaledot.lab.results import Column, Line, Panel, Result, Table
from scaledot.numerals import count, number, share, small
from scaledot.scales import RULES, factor

Progress = Callable[[int, int], None]


def saturation(
    scores: Iterable[Any] | None = None,
    *,
    d_k: int | Iterable[int] = (16, 64, 256, 1024),
    keys: int | Iterable[int] = (16, 1024),
    trials: int = 2000,
    seed: int = 20260714,
    scale: str | float = "1/sqrt_d_k",
    d_model: int | None = None,
    on_progress: Progress | None = None,
) -> Result:
    """Softmax of scores as they are and scaled: how sharp, and what it passes back.

    scores: one row of raw scores, or several, of two keys or more. The first table has a row for
    each of them without scale and with `scale` at each d_k; the others are by key. "lead" is that
    of the top key over all others together, nats; p(1−p) is the diagonal of the Jacobian J =
    diag(p) − ppᵀ, computed without the cancellation that gives 0 for a weight near 1. "is" says
    sharp for a top weight of .9 or more, saturated from a lead of 6.24 nats on, hard from 17.3 on,
    where float32 stores 1 too. keys, trials and seed then say nothing.

    d_model: for scale 1/sqrt_d_model only.

    Without scores: rows of random q and k, independent standard normal, for every d_k and number of
    keys: the mean entropy and Σp(1−p) beside their exact values, the mean of 1 − p_max, and the
    share of rows whose top key leads by 6.24 nats, where bfloat16 stores its weight as 1. A row is
    drawn as ‖q‖ and normal scores of that width, which is the same law. Memory does not grow with
    trials.

    Raises: TypeError and ValueError for scores that are not finite numbers, sizes below 1, fewer
    than 2 keys or trials, an unknown rule.
    Source: docs/maths.md#saturation, #gaussian-rows.

    >>> [round(row["entropy"], 4) for row in saturation([10, 8, 6], d_k=64).rows]
    [0.4411, 1.0781]
    """
    sizes = arguments.sizes("d_k", d_k)
    if d_model is not None:
        d_model = whole("d_model", d_model)
    if scores is not None:
        return given.saturation_of(given.parsed(scores), sizes, scale, d_model)
    lengths = gaussian.lengths(keys)
    trials, seed = whole("trials", trials, 2), arguments.seed(seed)
    rules = gaussian.asked(("none", scale))
    by_rule: list[list[dict[str, Any]]] = [[] for _ in rules]
    done, total = 0, trials * sum(lengths) * len(sizes)
    for n in lengths:
        for d in sizes:
            cells = [_Cell(factor(rule, d, d_model=d_model, keys=n)) for rule in rules]
            rng = gaussian.generator(seed, d, n)
            for block in gaussian.chunks(n, trials):
                norm, normal = gaussian.norms(rng, d, block), rng.standard_normal((block, n))
                for cell in cells:
                    cell.add(gaussian.softmax(normal, norm * cell.alpha))
                done += block * n
                if on_progress:
                    on_progress(done, total)
            for rows, rule, cell in zip(by_rule, rules, cells, strict=True):
                rows.append(
                    {"scale": gaussian.written(rule), "d_k": d, "keys": n, **cell.row(n, d)}
                )
    rows = [row for of in by_rule for row in of]
    return Result(
        "saturation",
        f"{count(trials)} rows each, seed {seed}",
        {"scores": None, "d_k": list(sizes), "keys": list(lengths), "trials": trials, "seed": seed,
         "scale": scale, "d_model": d_model},
        _random_tables(rows),
        _random_says(rows, sizes, lengths),
        (_by_size(rows, lengths, "entropy", "Entropy", "nats"),
         _by_size(rows, lengths, "rest", "Weight of all keys but the top one", "1 − p_max")),
        "docs/maths.md#gaussian-rows",
    )  # fmt: skip


# Random rows


class _Cell:
    """What is summed over the rows of one scale, d_k and number of keys."""

    def __init__(self, alpha: float) -> None:
        self.alpha, self.hits = alpha, 0
        self.entropy, self.rest, self.trace = Running(), Running(), Running()

    def add(self, found: gaussian.Rows) -> None:
        self.entropy.add(found.entropy)
        self.rest.add(found.rest)
        self.trace.add(found.trace)
        self.hits += int((found.lead >= SATURATED["bfloat16"]).sum())

    def row(self, n: int, d: int) -> dict[str, Any]:
        theory = gaussian.exact(n, d, self.alpha)
        left = self.entropy.estimate(theory.entropy)
        return {
            "entropy": left, "normalised": left.value / math.log(n),
            "effective_keys": math.exp(left.value), "rest": self.rest.estimate(),
            "saturated": gaussian.share(self.hits, self.rest.count),
            "trace": self.trace.estimate(theory.trace),
        }  # fmt: skip


_WHICH = (Column("scale", "scale", "text"), Column("keys", "keys", "exact"),
          Column("d_k", "d_k", "exact"))  # fmt: skip


def _random_tables(rows: Sequence[dict[str, Any]]) -> tuple[Table, Table]:
    left = (
        *_WHICH, Column("entropy", "entropy, nats"), Column("entropy.z", "z"),
        Column("effective_keys", "eff. keys"), Column("saturated", "share saturated"),
    )  # fmt: skip
    passed = (
        *_WHICH, Column("trace", "Σp(1−p)", "small"), Column("trace.z", "z"),
        Column("rest", "1 − p_max", "small"),
    )  # fmt: skip
    same = tuple(rows)
    return (
        Table(left, same, "Entropy: how much is left to choose from"),
        Table(passed, same, "What softmax passes back, and the weight beside the top key's"),
    )


def _random_says(
    rows: Sequence[dict[str, Any]], sizes: Sequence[int], lengths: Sequence[int]
) -> tuple[str, ...]:
    by_scale: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_scale.setdefault(row["scale"], []).append(row)
    says = [gaussian.agreement(row[of] for row in rows for of in ("entropy", "trace"))]
    condensed = ", ".join(f"{number(2 * math.log(n))} at {count(n)} keys" for n in lengths)
    says.append(
        f"Unscaled scores are √d_k wide and condense on few keys from d_k = 2 ln n: {condensed}. "
        "So the number of keys counts as d_k does."
    )
    for scale, of in by_scale.items():
        low, high = (end(of, key=lambda row: row["saturated"].value) for end in (min, max))
        says.append(
            f"{_scaled(scale).capitalize()}, the top key leads by 6.24 nats, where bfloat16 stores "
            f"its weight as 1, in {_where(low)}"
            + ("." if low["saturated"] == high["saturated"] else f" to {_where(high)}.")
        )
    if len(sizes) > 1:
        n = lengths[-1]
        spans = []
        for scale, of in by_scale.items():
            means = [row["entropy"].value for row in of if row["keys"] == n]
            spans.append(f"{_span(min(means), max(means))} nats {_scaled(scale)}")
        says.append(
            f"Over these d_k, at {count(n)} keys, mean entropy is {', '.join(spans)}; equal "
            f"weights have {number(math.log(n))}."
        )
    return tuple(says)


def _scaled(scale: str) -> str:
    return "unscaled" if scale == RULES["none"] else f"with scale {scale}"


def _legend(scale: str) -> str:
    return "no scale" if scale == RULES["none"] else scale


def _span(low: float, high: float) -> str:
    ends = small(low), small(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _where(row: dict[str, Any]) -> str:
    part = row["saturated"].value
    return (
        f"{share(part)} of rows (d_k {count(row['d_k'])}, {count(row['keys'])} keys)"
        if part else "none of the rows drawn"
    )  # fmt: skip


def _by_size(
    rows: Sequence[dict[str, Any]], lengths: Sequence[int], key: str, title: str, y: str
) -> Panel:
    """A statistic against d_k: a line for each scale and number of keys."""
    lines = []
    for scale in dict.fromkeys(row["scale"] for row in rows):
        for n in lengths:
            of = sorted(
                (r for r in rows if r["scale"] == scale and r["keys"] == n), key=lambda r: r["d_k"]
            )
            lines.append(
                Line(
                    f"{_legend(scale)}, {count(n)} keys",
                    [r["d_k"] for r in of],
                    [r[key].value for r in of],
                )
            )
    return Panel(title, "d_k", y, tuple(lines), log_x=True)


# Every rule against the number of keys


def scales(
    keys: int | Iterable[int] = (64, 2048, 65536),
    *,
    d_k: int = 64,
    d_model: int = 512,
    rules: str | float | Iterable[str | float] = tuple(RULES),
    temperature: float = 1.0,
    trials: int = 200,
    seed: int = 20260714,
    on_progress: Progress | None = None,
) -> Result:
    """What each rule of scale does to softmax as keys are added, for random q and k.

    A row for each rule and number of keys: the mean entropy of `trials` rows beside its exact
    value, its share of ln n, exp of it, and the mean of p_max. Every score is divided by
    `temperature` too, which is the same knob: the column "temperature" says at which temperature
    1/√d_k gives the same weights, and the sentences by how much they differ when computed so. All
    rules get the same rows. q and k are independent standard normal; a row is drawn as ‖q‖ and
    normal scores of that width, which is the same law, so 65,536 keys need no key vectors.

    Raises: TypeError and ValueError as `saturation`, and for temperature ≤ 0.
    Source: docs/maths.md#scale-rules, #gaussian-rows.

    >>> result = scales(keys=1024, rules=("none", "1/sqrt_d_k"), trials=50)
    >>> [round(row["entropy"].theory, 2) for row in result.rows]
    [0.92, 6.43]
    """
    lengths, d_k = gaussian.lengths(keys), whole("d_k", d_k)
    d_model = whole("d_model", d_model)
    asked = gaussian.asked(rules)
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature is {temperature!r}: pass a number above 0")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: pass a finite number above 0")
    trials, seed = whole("trials", trials, 2), arguments.seed(seed)
    temperature = float(temperature)
    by_rule: list[list[dict[str, Any]]] = [[] for _ in asked]
    done, total, apart = 0, trials * sum(lengths), 0.0
    for n in lengths:
        alphas = [factor(rule, d_k, d_model=d_model, keys=n) / temperature for rule in asked]
        theory = [gaussian.exact(n, d_k, alpha) for alpha in alphas]
        entropies, tops = [Running() for _ in asked], [Running() for _ in asked]
        rng = gaussian.generator(seed, d_k, n)
        for block in gaussian.chunks(n, trials):
            norm = gaussian.norms(rng, d_k, block)
            scores = rng.standard_normal((block, n)) * norm
            for alpha, entropy, top in zip(alphas, entropies, tops, strict=True):
                found = gaussian.softmax(scores, np.array([[alpha]]))
                entropy.add(found.entropy)
                top.add(np.take_along_axis(found.weights, found.top, -1)[:, 0])
                if entropy.count == block and alpha:
                    apart = max(apart, _by_temperature(scores, alpha, d_k, found.weights))
            done += block * n
            if on_progress:
                on_progress(done, total)
        for i, rule in enumerate(asked):
            left = entropies[i].estimate(theory[i].entropy)
            by_rule[i].append({
                "rule": gaussian.written(rule), "keys": n, "scale": alphas[i],
                "temperature": d_k**-0.5 / alphas[i] if alphas[i] else None, "entropy": left,
                "normalised": left.value / math.log(n), "effective_keys": math.exp(left.value),
                "p_max": tops[i].estimate(),
            })  # fmt: skip
    rows = tuple(row for of in by_rule for row in of)
    which = Column("rule", "rule", "text"), Column("keys", "keys", "exact")
    left = (
        *which, Column("entropy", "entropy, nats"), Column("entropy.z", "z"),
        Column("normalised", "of ln n", "share"), Column("effective_keys", "eff. keys"),
    )  # fmt: skip
    most = (
        *which, Column("scale", "scale", "factor"), Column("temperature", "temperature", "factor"),
        Column("p_max", "p_max", "small"),
    )  # fmt: skip
    panels = (
        _by_length(rows, "Entropy", "share of ln n", lambda row: row["normalised"]),
        _by_length(rows, "Weight of the top key", "p_max", lambda row: row["p_max"].value),
    )
    return Result(
        "scales",
        f"d_k {count(d_k)}, {count(trials)} rows each, seed {seed}",
        {"keys": list(lengths), "d_k": d_k, "d_model": d_model, "rules": asked,
         "temperature": temperature, "trials": trials, "seed": seed},
        (Table(left, rows, "Entropy: how much is left to choose from"),
         Table(most, rows, "The top key's weight")),
        _scale_says(rows, lengths, d_k, temperature, apart),
        panels,
        "docs/maths.md#gaussian-rows",
    )  # fmt: skip


def _by_temperature(scores: np.ndarray, alpha: float, d_k: int, weights: np.ndarray) -> float:
    """Largest difference from the weights of 1/√d_k at the temperature that this factor is."""
    cooled = scores / math.sqrt(d_k) / (d_k**-0.5 / alpha)
    cooled = np.exp(cooled - cooled.max(-1, keepdims=True))
    return float(np.abs(cooled / cooled.sum(-1, keepdims=True) - weights).max())


def _scale_says(
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    d_k: int,
    temperature: float,
    apart: float,
) -> tuple[str, ...]:
    says = [gaussian.agreement(row["entropy"] for row in rows)]
    if len(lengths) > 1:
        first, last = min(lengths), max(lengths)
        moves = []
        for rule in dict.fromkeys(row["rule"] for row in rows):
            of = {row["keys"]: row["normalised"] for row in rows if row["rule"] == rule}
            ends = share(of[first]), share(of[last])
            moves.append(
                f"{_scaled(rule)} " + (
                    f"it stays at {ends[0]}" if ends[0] == ends[1]
                    else f"from {ends[0]} to {ends[1]}"
                )
            )  # fmt: skip
        says.append(
            f"Entropy as a share of ln n, its largest value, from {count(first)} to {count(last)} "
            f"keys: {', '.join(moves)}."
        )
    says.append(
        "A scale is a temperature: the T at which softmax(q·k/√d_k ÷ T) gives the same "
        f"weights. Computed both ways they differ by at most {small(apart)} here."
    )
    if temperature != 1:
        says.append(
            f"All scores were divided by a temperature of {temperature:g} as well: 1/√d_k is then "
            f"1/√{number(d_k * temperature**2)}."
        )
    return tuple(says)


def _by_length(
    rows: Sequence[dict[str, Any]], title: str, y: str, value: Callable[[dict[str, Any]], float]
) -> Panel:
    """A statistic against the number of keys, a line for each rule."""
    lines = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        of = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["keys"])
        lines.append(Line(_legend(rule), [row["keys"] for row in of], [value(row) for row in of]))
    return Panel(title, "keys", y, tuple(lines), log_x=True)

"""Training runs under different scales side by side: their curves, and sentences that say what
those show and no more.

Everything here is made from curves alone, so that stored ones give the same tables, sentences and
figures. Two arms differ only by more than their seeds do (`YARDSTICK`), as a run's loss depends on
its initial numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scaledot.lab.results import Column, Line, Panel, Result, Table
from scaledot.numerals import counted, number, small

VOCABULARY = 64
"""Kinds of tokens in the sequences, all as likely: what chance is."""

HALF_CHANCE = math.log(VOCABULARY) / 2
"""Half the loss of a model that knows nothing; a run that gets below has learned to copy."""

YARDSTICK = 2
"""A difference between arms is called one where it is over so many times the largest gap between
the seeds of either."""


@dataclass(frozen=True)
class Point:
    """A model on the held-out sequences after `step` steps; NaN where its loss is not finite.

    loss: nats a token of the second half. Of the median head: entropy, H ÷ ln n, 0 … 1, and
    variance, of a row's scores after the scale, both the mean of its rows; gradient and tail, the
    median and the tenth percentile over its rows of `RowGradients.transmission`, 1 as equal weights
    pass on, 0 nothing; query, the root mean square over its rows of the gradient's length at q.
    worst: the head of the least gradient, as layer.head, and worst_gradient that.
    """

    step: int
    loss: float
    entropy: float = math.nan
    variance: float = math.nan
    gradient: float = math.nan
    tail: float = math.nan
    query: float = math.nan
    worst: str = ""
    worst_gradient: float = math.nan


@dataclass(frozen=True)
class Arm:
    """The runs of one setting, a seed each."""

    init: str
    d_k: int
    rule: str
    runs: tuple[tuple[Point, ...], ...]

    @property
    def diverged(self) -> int:
        """Runs whose loss stopped being a number."""
        return sum(not math.isfinite(run[-1].loss) for run in self.runs)

    @property
    def final(self) -> float:
        """Mean loss after the last step; NaN if a run diverged."""
        return fmean(run[-1].loss for run in self.runs)

    @property
    def between(self) -> float | None:
        """Largest less smallest final loss over the seeds; None for one seed or a diverged run."""
        return _gap([run[-1].loss for run in self.runs])

    @property
    def reached(self) -> list[int | None]:
        """For each seed the first measured step at half of chance or below."""
        return [
            next((point.step for point in run if point.loss <= HALF_CHANCE), None)
            for run in self.runs
        ]

    def mean(self, name: str, at: int) -> float:
        """Over the seeds, of one number of the points at that place; NaN if one has none."""
        return fmean(getattr(run[at], name) for run in self.runs)


def report(arms: Sequence[Arm], settings: Mapping[str, Any]) -> Result:
    """Tables, verdict and figures, from the curves alone."""
    first = (
        Column("init", "init", "text"),
        Column("d_k", "d_k", "exact"),
        Column("rule", "scale", "text"),
        Column("loss", "final loss", "small"),
        Column("between", "between seeds", "small"),
        Column("reached", "half of chance", "text"),
        Column("entropy_start", "first", "weight", "entropy ÷ ln n"),
        Column("entropy", "last", "weight", "entropy ÷ ln n"),
        Column("variance_start", "first", "small", "within-row variance"),
        Column("variance", "last", "small", "within-row variance"),
        Column("gradient_start", "first", "small", "passed on, median"),
        Column("gradient", "last", "small", "passed on, median"),
        Column("tail_start", "first", "small", "passed on, lowest tenth"),
        Column("tail", "last", "small", "passed on, lowest tenth"),
        Column("query_start", "first", "small", "‖dQ‖"),
        Column("query", "last", "small", "‖dQ‖"),
        Column("worst", "least in head", "text"),
    )
    second = tuple(
        Column(key, key, "text" if key in ("init", "rule", "worst") else "small")
        for key in ("init", "d_k", "rule", "seed", *Point.__dataclass_fields__)
    )
    parts = (len(arms), "arm"), (len(arms[0].runs), "seed")
    runs, steps = " × ".join(counted(*part) for part in parts), counted(settings["steps"], "step")
    return Result(
        experiment="train",
        about=f"{runs}, {steps} each, seed {settings['seed']}",
        settings=settings,
        tables=(
            Table(first, tuple(_row(arm) for arm in arms)),
            Table(second, tuple(_points(arms)), "every measured point", shown=()),
        ),
        says=verdict(arms, settings["learning_rate"]),
        panels=_panels(arms),
        source="Vaswani et al. 2017, section 3.2.1 and footnote 4; docs/train.md",
    )


def _row(arm: Arm) -> dict[str, Any]:
    last = [run[-1] for run in arm.runs]
    weakest = min(last, key=lambda point: _last_if_nan(point.worst_gradient))
    row: dict[str, Any] = {"init": arm.init, "d_k": arm.d_k, "rule": arm.rule}
    row |= {"loss": _defined(arm.final), "between": arm.between, "reached": _reached(arm)}
    for name in ("entropy", "variance", "gradient", "tail", "query"):
        row[f"{name}_start"] = _defined(arm.mean(name, 0))
        row[name] = _defined(arm.mean(name, -1))
    return row | {"worst": weakest.worst}


def _points(arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
    for arm in arms:
        for i, run in enumerate(arm.runs):
            for point in run:
                values = {
                    k: _defined(v) if isinstance(v, float) else v for k, v in vars(point).items()
                }
                yield {"init": arm.init, "d_k": arm.d_k, "rule": arm.rule, "seed": i + 1, **values}


def verdict(arms: Sequence[Arm], learning_rate: float) -> tuple[str, ...]:
    """Sentences that say what these curves show and no more."""
    rules = list(dict.fromkeys(arm.rule for arm in arms))
    plain = "1/√d_k" if "1/√d_k" in rules else rules[0]
    base = {(arm.init, arm.d_k): arm for arm in arms if arm.rule == plain}
    says = [_shares(arms)]
    single = len(arms[0].runs) < 2
    if single:
        says.append(
            "One seed an arm: nothing tells a difference between arms from one between seeds."
        )
    for rule in rules if not single else []:
        others = [arm for arm in arms if arm.rule == rule]
        if rule != plain:
            says.append(_compared(others, base, plain))
    says += _diverged(arms)
    says += _learned(arms)
    if not single and len(rules) > 1:
        says.append(
            "Final losses count as different where their means are further apart than "
            f"{YARDSTICK} × the largest gap between seeds of either arm."
        )
    says.append(
        f"One task, one architecture, one learning rate ({learning_rate:g}, AdamW, which evens out "
        "the size of gradients): the curves show no more than that."
    )
    return tuple(says)


def _compared(others: Sequence[Arm], base: Mapping[tuple[str, int], Arm], plain: str) -> str:
    """One rule against the plain one, wherever both were trained."""
    same = "no difference beyond the seeds' own"
    found: dict[str, list[Arm]] = {"higher": [], "lower": [], same: []}
    gaps: dict[str, list[float]] = {name: [] for name in found}
    for arm in others:
        against = base[arm.init, arm.d_k]
        gap = arm.final - against.final
        if not math.isfinite(gap):
            continue  # said by itself
        noise = YARDSTICK * max(arm.between or 0.0, against.between or 0.0)
        name = same if abs(gap) <= noise else "higher" if gap > 0 else "lower"
        found[name].append(arm)
        gaps[name].append(abs(gap))
    parts = []
    for name, where in found.items():
        if not where:
            continue
        by = f", by {_span(gaps[name])}" if name != same else ""
        parts.append(f"{name} with {_places(where)}{by}")
    who = f"{_scale(others[0].rule)} against {_scale(plain)}"
    if not parts:
        return f"Final loss, {who}: no two arms to compare."
    return f"Final loss, {who}: {'; '.join(parts)}."


def _diverged(arms: Sequence[Arm]) -> list[str]:
    return [
        f"{_name(arm)} diverged in {arm.diverged} of {len(arm.runs)} runs: its loss stopped being "
        f"a number by step {min(r[-1].step for r in arm.runs if not math.isfinite(r[-1].loss))}."
        for arm in arms
        if arm.diverged
    ]


def _shares(arms: Sequence[Arm]) -> str:
    """In how many runs each rule got to half of chance."""
    runs: dict[str, list[int | None]] = {}
    for arm in arms:
        runs.setdefault(_scale(arm.rule), []).extend(arm.reached)
    parts = (
        f"{rule} in {sum(step is not None for step in steps)} of {counted(len(steps), 'run')}"
        for rule, steps in runs.items()
    )
    return f"Half the loss of chance ({HALF_CHANCE:.2f} nats) was reached: {', '.join(parts)}."


def _learned(arms: Sequence[Arm]) -> list[str]:
    """How soon arms got to half of chance, and what told rows apart where some did not."""
    says = []
    learned = [arm for arm in arms if None not in arm.reached]
    failed = [arm for arm in arms if None in arm.reached]
    if len(learned) > 1:
        mean = {id(arm): fmean(s for s in arm.reached if s is not None) for arm in learned}
        quick, slow = min(mean.values()), max(mean.values())
        names = "; ".join(_name(arm) for arm in learned if mean[id(arm)] == quick)
        says.append(
            f"Arms that got there with every seed took {number(quick)} to {number(slow)} steps on "
            f"average; soonest: {names}."
        )
    if failed:
        names = "; ".join(
            f"{_name(arm)} ({sum(step is not None for step in arm.reached)} of {len(arm.runs)})"
            for arm in failed
        )
        says.append(f"Not with every seed: {names}.")
    if failed and learned:
        for at, when in ((0, "Before the first step"), (-1, "After the last")):

            def both(name: str, at: int = at) -> str:
                one, other = (_span([a.mean(name, at) for a in x]) for x in (learned, failed))
                return f"{one} and {other}"

            says.append(
                f"{when}, in the arms that got there with every seed and in the others: entropy "
                f"{both('entropy')} of ln n; gradient that the median row passes on, 1 with equal "
                f"weights, {both('gradient')}; its lowest tenth {both('tail')}; length of the "
                f"gradient at q {both('query')}."
            )
    return says


def _name(arm: Arm) -> str:
    return f"{_scale(arm.rule)}, {arm.init}, d_k {arm.d_k}"


def _scale(rule: str) -> str:
    return "no scale" if rule == "none" else rule


def _places(arms: Iterable[Arm]) -> str:
    """unit at d_k 32, 64; gpt2 at d_k 32"""
    by: dict[str, list[int]] = {}
    for arm in arms:
        by.setdefault(arm.init, []).append(arm.d_k)
    return " and ".join(f"{init} at d_k {', '.join(map(str, at))}" for init, at in by.items())


def _span(values: Sequence[float]) -> str:
    values = [x for x in values if math.isfinite(x)]
    if not values:
        return small(None)
    low, high = small(min(values)), small(max(values))
    return low if low == high else f"{low} to {high}"


def _reached(arm: Arm) -> str:
    """80 · 80–96 · 96 in 1 of 2 · never"""
    steps = [step for step in arm.reached if step is not None]
    if not steps:
        return "never"
    low, high = min(steps), max(steps)
    text = f"{low}" if low == high else f"{low}–{high}"
    return text if len(steps) == len(arm.runs) else f"{text} in {len(steps)} of {len(arm.runs)}"


def _panels(arms: Sequence[Arm]) -> tuple[Panel, ...]:
    shown, note = list(arms), ""
    if len(shown) > 7:
        largest = max(arm.d_k for arm in arms)
        shown, note = [arm for arm in arms if arm.d_k == largest], f", d_k {largest}"

    def panel(name: str, title: str, y: str, log: bool) -> Panel:
        lines = tuple(Line(_label(arm, note), *_curve(arm, name)) for arm in shown)
        return Panel(title + note, "step", y, lines, log_y=log)

    return (
        panel("loss", "Loss", "nats a token", False),
        panel("entropy", "Entropy of the median head", "H ÷ ln n", False),
        panel("variance", "Score variance within rows", "after the scale", True),
        panel("gradient", "Gradient that rows pass on", "1 = equal weights", True),
    )


def _label(arm: Arm, note: str) -> str:
    return f"{_scale(arm.rule)}, {arm.init}" + ("" if note else f", d_k {arm.d_k}")


def _curve(arm: Arm, name: str) -> tuple[list[float], list[float]]:
    """Mean over the seeds, up to where a run diverged."""
    x, y = [], []
    for points in zip(*arm.runs, strict=False):
        value = fmean(getattr(point, name) for point in points)
        if math.isfinite(value):
            x.append(float(points[0].step))
            y.append(value)
    return x, y


def _gap(values: Sequence[float]) -> float | None:
    there = len(values) > 1 and all(map(math.isfinite, values))
    return max(values) - min(values) if there else None


def _defined(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _last_if_nan(x: float) -> float:
    return math.inf if math.isnan(x) else x

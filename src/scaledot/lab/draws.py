"""The variance of q·k by simulation or over a model's heads, beside its exact value and the exact
error of the estimate. docs/maths.md#the-simulated-variance
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch

from scaledot.checks import ScaledotError, whole
from scaledot.lab import arguments, dots
from scaledot.lab.dots import Law
from scaledot.lab.results import Column, Estimate, Line, Panel, Result, Table, Value, chance
from scaledot.numerals import counted, number, share, small
from scaledot.scales import RULES, factor

_D_K = (4, 16, 64, 256, 1024)
_TOKENS = 512
"""Tokens of the text that a model is observed on, at most."""
_EXTREMES = 10
"""Heads of each end that are printed, where there are more than both and as many between."""
_SIGNIFICANT = 0.01
_LARGEST = 1 << 24
"""Components of a vector at most."""
_SOURCE = "docs/maths.md#the-simulated-variance"

Row = dict[str, Value]


def variance(
    d_k: int | Iterable[int] = _D_K,
    trials: int = 5000,
    seed: int = 20260714,
    *,
    components: str = "normal",
    mean: float = 0.0,
    correlation: float = 0.0,
    degrees: float = 5.0,
    scale: str | float = "1/sqrt_d_k",
    d_model: int | None = None,
    keys: int | None = None,
    model: str | None = None,
    text: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Result:
    """The variance of q·k over random q and k of each d_k, raw and multiplied by a scale.

    Rows: d_k, raw and scaled, both an `Estimate` of the same draws, so with one z. The theory and
    the standard error are exact for any d_k and number of trials; the denominator is trials − 1.

    components: "normal", "uniform", "signs" (±1) or "student" (Student's t with `degrees`, divided
        by its standard deviation): each has variance 1. At most 4 degrees give no standard error.
    mean: of every component, at most a million. correlation: of any two components of one vector,
    0 … 1; q and k stay independent. The variance is
        d_k·(1 + (d_k − 1)·correlation² + 2·mean²·(1 + (d_k − 1)·correlation)).
    scale: a name in `scales.RULES`, some of which need d_model or keys, or the factor itself: one
        over a temperature.
    model: "sample", a folder or a hub id: instead of random components, the q and k of its heads on
        `text` (the embedded one unless given; its first window, at most 512 tokens). Trials are
        random pairs of a query and a key that it sees, one row a head, theory the exact variance
        over all such pairs; `independent` is what d_k independent components with the mean and
        variance of all the head's own would give.
    on_progress(products done, in all) is called as blocks end.

    Same arguments, same numbers, whatever the threads; another NumPy or processor may change the
    last digits. Cost: about 4 nanoseconds a product of normal components on one thread; a few
    megabytes.
    Raises: ValueError, TypeError for arguments; ScaledotError for a model.
    Source: docs/maths.md#the-simulated-variance.

    >>> found = variance(64, trials=2000, seed=1)
    >>> [estimate] = found.column("scaled")
    >>> estimate.theory, round(estimate.error, 4), abs(estimate.value - 1) < 0.1
    (1.0, 0.0324, True)
    """
    sizes = arguments.sizes("d_k", d_k)
    if max(sizes) > _LARGEST:
        raise ValueError(f"d_k is {max(sizes):,}: pass at most {_LARGEST:,}")
    trials, seed = whole("trials", trials, 2), arguments.seed(seed)
    law = dots.law(components, mean, correlation, degrees)
    if model is not None and (sizes != _D_K or law != Law()):
        raise ValueError(
            "a model brings its own q and k: leave out d_k, components, mean, correlation, degrees"
        )
    if model is None and text is not None:
        raise ValueError('text is what a model reads: pass model too, "sample" for the embedded')
    for name, words in (("model", model), ("text", text)):
        if words is not None and not isinstance(words, str | PathLike):
            raise TypeError(f"{name} is {words!r}: pass a string")
    if text is not None and not text.strip():
        raise ValueError("the text is empty: pass some words, or none for the embedded text")
    for name, size in (("d_model", d_model), ("keys", keys)):
        if size is not None:
            whole(name, size)
    settings = {
        "d_k": list(sizes), "trials": trials, "seed": seed, "components": components,
        "mean": law.mean, "correlation": law.correlation, "degrees": law.degrees, "scale": scale,
        "d_model": d_model, "keys": keys, "model": model, "text": text,
    }  # fmt: skip
    scales = _Scale(scale, d_model, keys)
    factors = [scales.of(d) for d in sizes]
    if model is not None:
        return _of_heads(model, text, trials, seed, scales, settings, on_progress)
    found = dots.simulated(sizes, trials, seed, law, on_progress)
    rows: list[Row] = []
    for d, times, moments in zip(sizes, factors, found, strict=True):
        raw = dots.estimate(moments.variance, dots.theory(law, d), trials)
        rows.append({"d_k": d, "raw": raw, "scaled": dots.times(raw, times * times)})
    columns = (Column("d_k", "d_k", "exact"), Column("raw", "q·k"), Column("scaled", scales.name))
    return Result(
        experiment="variance",
        about=f"{trials:,} trials each{law}, seed {seed}",
        settings=settings,
        tables=(Table((*columns, *_z_column(rows)), tuple(rows)),),
        says=(*_verdict(rows, "d_k"), *_cautions(rows, law, trials), *_widening(rows, law)),
        panels=_figures(rows, scales),
        source=_SOURCE,
    )


@dataclass(frozen=True)
class _Scale:
    rule: str | float
    d_model: int | None
    keys: int | None

    def of(self, d_k: int) -> float:
        found = factor(self.rule, d_k, d_model=self.d_model, keys=self.keys)
        if math.isinf(found * found):
            raise ValueError(f"scale is {self.rule!r}: its square is no float64 number")
        return found

    @property
    def name(self) -> str:
        """What is scaled, as a column's heading."""
        if not isinstance(self.rule, str):
            return f"q·k × {self.rule:g}"
        rule = RULES[self.rule].replace("none", "1")
        return f"q·k / {rule[2:]}" if rule.startswith("1/") else f"q·k × {rule}"


def _raw(row: Row) -> Estimate:
    found = row["raw"]
    assert isinstance(found, Estimate)
    return found


def _size(row: Row) -> int:
    found = row["d_k"]
    assert isinstance(found, int)
    return found


def _zs(rows: Sequence[Row], name: str) -> list[tuple[Value, float]]:
    found = [(row[name], _raw(row).z) for row in rows]
    return [(label, z) for label, z in found if z is not None]


def _z_column(rows: Sequence[Row]) -> tuple[Column, ...]:
    return (Column("raw.z", "z"),) if _zs(rows, "d_k") else ()


def _verdict(rows: Sequence[Row], name: str, what: str = "theory") -> tuple[str, ...]:
    """What the largest deviation says, and which are beyond two standard errors."""
    zs = _zs(rows, name)
    if not zs:
        return (f"No estimate has a standard error: nothing tells how far from {what} is too far.",)
    largest, of = max(abs(z) for _, z in zs), len(zs)
    by_chance = chance(largest, of)
    agrees = "Agrees with" if by_chance > _SIGNIFICANT else "Differs from"
    which = f"Largest of {of}" if of > 1 else "Its size"
    first = (
        f"z: distance from {what} in standard errors. {which}: {number(largest)}; "
        f"chance gives one as large in {share(by_chance)} of runs. {agrees} {what}."
    )
    beyond = sorted(((label, z) for label, z in zs if abs(z) > 2), key=lambda x: -abs(x[1]))
    if not beyond:
        return first, "Every deviation is within two standard errors of sampling."
    label = "d_k " if name == "d_k" else "head "
    named = ", ".join(
        f"{x:,} ({z:+.2f})" if isinstance(x, int) else f"{x} ({z:+.2f})" for x, z in beyond[:5]
    )
    more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    return first, (
        f"Beyond two standard errors, where chance puts 1 in 22: {len(beyond)} of {of}, "
        f"{label}{named.replace('-', '−')}{more}."
    )


def _cautions(rows: Sequence[Row], law: Law, trials: int) -> Iterator[str]:
    """Where z is not quite what it seems."""
    if law.components == "student" and law.degrees <= 4:
        yield (
            f"Student's t with {law.degrees:g} degrees of freedom has no fourth moment, so that "
            "the variance has no standard error: it takes more than 4."
        )
    elif law.components == "student" and law.degrees <= 8:
        yield (
            f"With {law.degrees:g} degrees of freedom, at most 8, the standard error is right but "
            "rests on rare large trials: z is mostly nearer 0 than chance says, at times far off."
        )
    if any(e.error and e.theory and e.error > e.theory / 10 for e in map(_raw, rows)):
        yield (
            "Where the standard error exceeds a tenth of the variance z is far from normal, and "
            "what chance gives is rough: take more trials."
        )

    if any(e.error and e.theory and e.error * trials < 2 * e.theory for e in map(_raw, rows)):
        # As signs of d_k 1: then the fourth moment is σ⁴, and s² varies by its mean's square alone.
        yield (
            "Where q·k takes two values, or nearly, equally often, z is hardly above 0.71 and at "
            "times far below 0: what chance gives does not hold."
        )


def _widening(rows: Sequence[Row], law: Law) -> Iterator[str]:
    """How far a mean or a correlation takes the variance from d_k."""
    times = [(_raw(row).theory or 0.0) / _size(row) for row in rows]
    if all(x == 1 for x in times):
        return
    size = " to ".join(dict.fromkeys((_times(min(times)), _times(max(times)))))
    what = "all of them" if min(times) == 1 else "it"
    why = " and the ".join(name for name in ("mean", "correlation") if getattr(law, name))
    yield f"By the {why} the variance is {size} times d_k: 1/√d_k does not bring {what} to 1."


def _times(x: float) -> str:
    """A factor of at least 1, whose distance from it does not round away."""
    return f"1 + {small(x - 1)}" if 1 < x < 1.005 else number(x)


def _figures(rows: Sequence[Row], scales: _Scale) -> tuple[Panel, ...]:
    """Figure 1 of the R article, and the estimates against theory."""
    sizes = [float(_size(row)) for row in rows]
    lines = []
    for key, name in (("raw", "q·k"), ("scaled", scales.name)):
        each = [row[key] for row in rows]
        estimates = [e for e in each if isinstance(e, Estimate)]
        deviations = [math.sqrt(e.value) for e in estimates]
        lines.append(Line(name, sizes, deviations, "points"))
        exact = [math.sqrt(e.theory or 0.0) for e in estimates]
        lines.append(Line("theory" if key == "raw" else "", sizes, exact, "theory"))
    return (
        Panel("Standard deviation of q·k against d_k", "d_k", "standard deviation", tuple(lines),
              log_x=True),
        Panel("Variance over theory, ± 2 standard errors", "d_k", "estimate / theory",
              _ratios(sizes, rows), log_x=True),
    )  # fmt: skip


def _ratios(x: Sequence[float], rows: Sequence[Row]) -> tuple[Line, ...]:
    """Each estimate over its theory, with bars; where that is 0 there is no point."""
    each = [(at, e, e.theory) for at, e in zip(x, map(_raw, rows), strict=True) if e.theory]
    errors = [2 * e.error / exact for _, e, exact in each if e.error is not None]
    ratio = [e.value / exact for _, e, exact in each]
    there = [at for at, _, _ in each]
    return (
        Line("estimate", there, ratio, "points", errors or None),
        Line("theory", there, [1.0] * len(there), "theory"),
    )


# The heads of a model


def _of_heads(
    model: str, text: str | None, trials: int, seed: int, scales: _Scale,
    settings: dict[str, Any], on_progress: Callable[[int, int], None] | None,
) -> Result:  # fmt: skip
    from scaledot.loading import load, sample_text
    from scaledot.observation import observe
    from scaledot.windows import arguments as inputs
    from scaledot.windows import context_of, windows_of

    loaded = load(None if model == "sample" else model)
    read = sample_text() if text is None else text
    context = context_of(loaded.model, loaded.tokenizer)
    window = next(windows_of([read], loaded.tokenizer, context, _TOKENS))
    with torch.no_grad(), observe(loaded.model, keep="qk") as seen:
        loaded.model(**inputs(loaded.model, window, torch.device("cpu")))
    places = [(i, path, h) for i, path in enumerate(seen.heads)
              for h in range(seen.heads[path].heads)]  # fmt: skip
    rows: list[Row] = []
    for layer, path, head in places:
        stages = seen.trace(path, head=head)
        rng = np.random.Generator(
            np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(layer, head)))
        )
        pairs = stages.scores[stages.visible].double().numpy()
        if len(pairs) == 0 or not np.isfinite(pairs).all():
            raise ScaledotError(f"head {layer}.{head} has no finite q·k to draw from")
        d = stages.query.shape[-1]
        raw = dots.sampled(pairs, trials, rng)
        rows.append({
            "head": f"{layer}.{head}", "d_k": d, "independent": _independent(stages),
            "raw": raw, "scaled": dots.times(raw, scales.of(d) ** 2),
        })  # fmt: skip
        if on_progress is not None:
            on_progress(len(rows), len(places))
    columns = (
        Column("head", "head", "text"), Column("d_k", "d_k", "exact"),
        Column("independent", "independent", "number"), Column("raw", "q·k"),
        Column("scaled", scales.name),
    )  # fmt: skip
    own = {call.scale for call in seen.calls.values()}
    shown = _extremes(rows)
    tokens = window["input_ids"].shape[-1]
    return Result(
        experiment="variance",
        about=f"{loaded.name}, {counted(tokens, 'token')}, {trials:,} pairs a head, seed {seed}",
        settings=settings,
        tables=(Table((*columns, *_z_column(rows)), tuple(rows), shown=shown),),
        says=(
            *_verdict(rows, "head", "the exact variance over all visible pairs"),
            *_cautions(rows, Law(), trials), *_assumption(rows), *_own_scale(own, scales, rows),
            *_left_out(rows, shown),
        ),
        panels=_head_figures(rows, scales),
        source=_SOURCE,
    )  # fmt: skip


def _independent(stages: Any) -> float:
    """The variance of q·k if the head's components were independent, with the mean and variance
    that all components of its q, and of its k, have."""
    (q, a), (k, b) = (
        (float(x.double().mean()), float(x.double().var(correction=0)))
        for x in (stages.query, stages.key)
    )
    return stages.query.shape[-1] * (a * b + a * k * k + b * q * q)


def _assumption(rows: Sequence[Row]) -> Iterator[str]:
    """By how much the law Var(q·k) = d_k fails, and what components' sizes explain."""
    exact = [float(_raw(row).theory or 0.0) for row in rows]
    independent = [x for row in rows if isinstance(x := row["independent"], float)]
    for said, given in (
        ("d_k, the variance for independent components of mean 0 and variance 1",
         [float(_size(row)) for row in rows]),
        ("independent components of the head's own mean and variance", independent),
    ):  # fmt: skip
        if times := [x / y for x, y in zip(exact, given, strict=True) if y]:
            yield (
                f"Against {said}: {number(min(times))} to {number(max(times))} times, "
                f"median {number(statistics.median(times))}."
            )


def _extremes(rows: Sequence[Row]) -> tuple[int, ...] | None:
    """The places of the heads with the smallest and largest variance of scaled scores, in order of
    the heads; None where all fit."""
    if len(rows) <= 3 * _EXTREMES:
        return None

    def exact(place: int) -> float:
        scaled = rows[place]["scaled"]
        assert isinstance(scaled, Estimate)
        return scaled.theory or 0.0

    ordered = sorted(range(len(rows)), key=exact)
    return tuple(sorted(ordered[:_EXTREMES] + ordered[-_EXTREMES:]))


def _left_out(rows: Sequence[Row], shown: Sequence[int] | None) -> Iterator[str]:
    if shown is not None:
        yield (
            f"Printed are the {_EXTREMES} heads of smallest and the {_EXTREMES} of largest "
            f"variance; rows, JSON and CSV hold all {len(rows)}."
        )


def _own_scale(own: set[float], scales: _Scale, rows: Sequence[Row]) -> Iterator[str]:
    asked = {scales.of(_size(row)) for row in rows}
    if other := sorted(x for x in own if not any(math.isclose(x, y, rel_tol=1e-4) for y in asked)):
        factors = ", ".join(f"{x:.4g}" for x in other)
        yield f"The model itself multiplies q·k by {factors}, not by the scale shown here."


def _head_figures(rows: Sequence[Row], scales: _Scale) -> tuple[Panel, ...]:
    place = [float(i) for i in range(len(rows))]
    scaled = [row["scaled"] for row in rows]
    exact = [float(e.theory or 0.0) for e in scaled if isinstance(e, Estimate)]
    asked = [scales.of(_size(row)) ** 2 * _size(row) for row in rows]
    return (
        Panel(f"Variance of {scales.name}, head by head", "head, in order", "variance", (
            Line("all visible pairs", place, exact, "points"),
            Line("independent unit components", place, asked, "theory"),
        ), log_y=all(x > 0 for x in (*exact, *asked))),
        Panel("Random pairs over all, ± 2 standard errors", "head, in order", "estimate / exact",
              _ratios(place, rows)),
    )  # fmt: skip

"""Rows of scores that are given: what softmax makes of each, unscaled and scaled, and the norms of
its Jacobian, every number as exact as float64 holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from scaledot.heads import SATURATED
from scaledot.lab import gaussian
from scaledot.lab.results import Column, Line, Panel, Result, Table, Value
from scaledot.numerals import number, small
from scaledot.scales import RULES, factor

SHARP = math.log(9)
"""Nats by which the top key leads all others together where its weight is .9."""
_BARS = 24
"""Keys that are drawn as bars."""
_PANELS = 4
_LIMITS = (
    f"Sharp is a weight of .9 or more, which takes a lead of {number(SHARP)} nats; saturated one "
    f"that bfloat16 stores as 1, {number(SATURATED['bfloat16'])}; hard one that float32 stores as "
    f"1, {number(SATURATED['float32'])}."
)
_HARD = {"saturated": "saturated", "hard": "hard saturated"}


def parsed(scores: Iterable[Any]) -> list[list[float]]:
    """Rows of at least two finite numbers, from one row or several.

    Raises: TypeError, ValueError.
    """
    what = "pass numbers, one row or a list of rows"
    given: Any = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"scores is {given!r}: {what}")
    given = [one.tolist() if hasattr(one, "tolist") else one for one in given]
    if not given:
        raise ValueError(f"scores is empty: {what}")
    nested = [isinstance(one, Iterable) and not isinstance(one, str) for one in given]
    rows = [list(one) for one in given] if all(nested) else [given]
    for i, row in enumerate(rows, 1):
        if len(row) < 2:
            raise ValueError(
                f"row {i} of scores has {len(row)}: pass at least 2, a score for each key"
            )
        for j, x in enumerate(row, 1):
            if isinstance(x, bool) or not isinstance(x, Real):
                raise TypeError(f"score {j} of row {i} is {x!r}: {what}")
            if not _finite(x):
                raise ValueError(f"score {j} of row {i} is {x}: leave a hidden key out")
    return [[float(x) for x in row] for row in rows]


def _finite(x: Real) -> bool:
    try:
        return math.isfinite(x)
    except OverflowError:  # a whole number beyond float64
        return False


def saturation_of(
    scores: list[list[float]], sizes: Sequence[int], scale: str | float, d_model: int | None
) -> Result:
    """See `saturation`, of given scores.

    Raises: ValueError where a row is wider than float64 holds, and for an unknown rule.
    """
    summaries: list[dict[str, Value]] = []
    tables, panels, says = [], [], _same(scores)
    for i, row in enumerate(scores, 1):
        by_key: list[dict[str, Value]] = [
            {"key": j, "score": s} for j, s in enumerate(row, 1)
        ]  # fmt: skip
        columns = [Column("key", "key", "exact"), Column("score", "score")]
        lines = []
        for name, alpha in _factors(len(row), sizes, scale, d_model):
            if not math.isfinite((max(row) - min(row)) * alpha):
                raise ValueError(
                    f"row {i} at scale {name} is wider than a float holds: scale it down"
                )
            found = gaussian.softmax(np.array([row]), np.array([[alpha]]))
            p, top, rest = found.weights[0], int(found.top[0, 0]), float(found.rest[0])
            diagonal = p * (1 - p)
            naive, diagonal[top] = diagonal[top], p[top] * rest
            for j, entry in enumerate(by_key):
                entry[f"weight.{name}"] = float(p[j])
                entry[f"slope.{name}"] = float(diagonal[j])
            with_scale = "unscaled" if name == "none" else f"× {name}"
            columns += [
                Column(f"weight.{name}", f"weight, {with_scale}", "probability"),
                Column(f"slope.{name}", "p(1−p)", "small"),
            ]
            x = list(range(1, len(row) + 1))
            kind: Any = "bars" if len(row) <= _BARS else "line"
            lines.append(Line(with_scale, x, p.tolist(), kind))
            lead = float(found.lead[0])
            summaries.append({
                "row": i, "scale": name, "factor": alpha, "top_key": top + 1,
                "p_max": float(p[top]), "rest": rest, "lead": lead,
                "entropy": float(found.entropy[0]),
                "effective_keys": math.exp(float(found.entropy[0])),
                "trace": float(found.trace[0]), "frobenius": frobenius(p, top),
                "spectral": spectral(p, top, rest), "is": _tier(lead),
            })  # fmt: skip
            says.append(_sentence(i, with_scale, top + 1, lead, float(p[top]), rest, naive))
        tables.append(Table(tuple(columns), tuple(by_key), f"Row {i}, by key"))
        panels.append(Panel(f"Row {i}", "key", "weight", tuple(lines)))
    summary = (
        Column("row", "row", "exact"), Column("scale", "scale", "text"),
        Column("p_max", "p_max", "weight"), Column("rest", "1 − p_max", "small"),
        Column("lead", "lead, nats"), Column("entropy", "entropy", "small"),
        Column("effective_keys", "eff. keys"), Column("trace", "Σp(1−p)", "small"),
        Column("frobenius", "‖J‖", "small"), Column("spectral", "‖J‖₂", "small"),
        Column("is", "is", "text"),
    )  # fmt: skip
    return Result(
        "saturation",
        "given scores",
        {"scores": scores, "d_k": list(sizes), "scale": scale, "d_model": d_model},
        (Table(summary, tuple(summaries)), *tables),
        (*says, _LIMITS),
        tuple(panels[:_PANELS]),
        "docs/maths.md#saturation",
    )


def _factors(
    keys: int, sizes: Sequence[int], scale: str | float, d_model: int | None
) -> list[tuple[str, float]]:
    """Each factor once, with its name: none, then the rule at each d_k."""
    found = {1.0: "none"}
    for d in sizes:
        alpha = factor(scale, d, d_model=d_model, keys=keys)
        if not isinstance(scale, str):
            name = f"{alpha:g}"
        elif scale in ("1/sqrt_d_k", "1/d_k"):
            name = RULES[scale].replace("d_k", str(d))
        elif scale in ("none", "1/sqrt_d_model"):
            name = RULES[scale]
        else:
            name = f"{RULES[scale]}, d_k {d}"
        found.setdefault(alpha, name)
    return [(name, alpha) for alpha, name in found.items()]


def _tier(lead: float) -> str:
    if lead >= SATURATED["float32"]:
        return "hard"
    if lead >= SATURATED["bfloat16"]:
        return "saturated"
    return "sharp" if lead >= SHARP else "not sharp"


def _sentence(
    row: int, scale: str, top: int, lead: float, p_max: float, rest: float, naive: float
) -> str:
    """What one row is, by the three tiers."""
    far = f"leads all others together by {number(lead)} nats"
    if lead < 0:
        far = f"falls {number(-lead)} nats short of all others together"
    says = f"Row {row} {scale}: key {top} {far}, "
    if lead >= SATURATED["bfloat16"]:
        stored = [name for name, limit in SATURATED.items() if lead >= limit]
        says += f"so {', '.join(stored)} would store its weight as 1: {_HARD[_tier(lead)]}."
    else:
        says += f"{'sharp, not saturated' if lead >= SHARP else 'not sharp'}."
    if rest == 0:
        says += " The other weights are below float64's range."
    elif naive == 0:
        says += (
            f" Its p(1−p) is {small(p_max * rest)}, from the other weights; float64 rounds p to 1 "
            "and gives 0."
        )
    return says


def _same(scores: Sequence[Sequence[float]]) -> list[str]:
    """Which rows differ by a constant only, to float64's own rounding of them."""
    says, told = [], set()
    for i, a in enumerate(scores):
        alike = [j for j in range(i + 1, len(scores)) if _shift(a, scores[j]) is not None]
        if i in told or not alike:
            continue
        told |= {i, *alike}
        by = ", ".join(f"row {j + 1} is row {i + 1} {_plus(a, scores[j])}" for j in alike)
        says.append(
            f"Rows {_and([i, *alike])} are the same distribution: softmax "
            f"sees only differences, and {by}."
        )
    return says


def _and(rows: Sequence[int]) -> str:
    names = [str(i + 1) for i in rows]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _shift(a: Sequence[float], b: Sequence[float]) -> float | None:
    """b − a where it is one number, to rounding that moves no weight by more than a millionth."""
    if len(a) != len(b):
        return None
    apart = [y - x for x, y in zip(a, b, strict=True)]
    rounding = min(4 * 2.0**-53 * max(map(abs, (*a, *b))), 1e-6)
    return apart[0] if max(apart) - min(apart) <= rounding else None


def _plus(a: Sequence[float], b: Sequence[float]) -> str:
    shift = _shift(a, b)
    if not shift:
        return "again"
    return f"{'plus' if shift > 0 else 'minus'} {abs(shift):.12g}"


def frobenius(p: np.ndarray, top: int) -> float:
    """√Σ J² of J = diag(p) − ppᵀ, 0 … ½ √2, without cancellation: of squares only.

    top: the heaviest key. Source: docs/maths.md#gaussian-rows.

    >>> round(frobenius(np.array([0.5, 0.5]), 0), 4)
    0.5
    """
    others = np.delete(p, top)
    squares = float(np.square(others).sum())
    pairs = max(squares**2 - float((others**4).sum()), 0.0)
    return math.hypot(
        float(p[top]) * float(others.sum()), *(others * (1 - others)).tolist(),
        *(math.sqrt(2) * p[top] * others).tolist(), math.sqrt(pairs),
    )  # fmt: skip


def spectral(p: np.ndarray, top: int, rest: float) -> float:
    """Largest eigenvalue of J = diag(p) − ppᵀ, 0 … ½: how much softmax passes at most.

    It is the root λ between the two heaviest weights of Σ p/(p − λ) = 0, or their value where they
    are equal; found by halving, to float64's precision even where it is 1e-300.
    Source: Golub 1973, Some modified matrix eigenvalue problems; docs/maths.md#gaussian-rows.

    >>> round(spectral(np.array([0.5, 0.5]), 0, 0.5), 4)
    0.5
    """
    first, others = float(p[top]), np.delete(p, top)
    others = others[others > 0]
    second = float(others.max(initial=0.0))
    if second in (0.0, first):
        return second
    low = max(first * rest, second)
    high = min(first, 2 * max(first * rest, float((others * (1 - others)).max())))
    while low < (middle := (low + high) / 2) < high:
        # The function rises from −∞ to ∞ between the two.
        if first / (first - middle) < float((others / (middle - others)).sum()):
            low = middle
        else:
            high = middle
    return high

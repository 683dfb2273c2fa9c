"""The gradient that reaches scores, queries and keys, against d_k: what "it vanishes" means.

Without scale the typical row's gradient vanishes as d_k grows, its median and 10th percentile; the
mean square does not: few rows carry it all, and that on q and k even grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from scaledot.checks import whole
from scaledot.lab import arguments, gaussian
from scaledot.lab.gaussian import Running
from scaledot.lab.results import Column, Estimate, Line, Panel, Result, Table
from scaledot.numerals import count, small
from scaledot.scales import RULES, factor

Progress = Callable[[int, int], None]

_OF = ("dS", "dQ", "dK")
_PANELS = (
    ("dS", "median", "dS of the median row"),
    ("dS", "p10", "dS, 10th percentile"),
    ("dS", "rms", "dS, root mean square"),
    ("dQ", "rms", "dQ, root mean square"),
)


def gradient(
    d_k: int | Iterable[int] = (16, 64, 256, 1024),
    *,
    keys: int = 1024,
    value_dim: int = 64,
    rules: str | float | Iterable[str | float] = ("none", "1/sqrt_d_k", "1/d_k"),
    d_model: int | None = None,
    trials: int = 2000,
    seed: int = 20260714,
    on_progress: Progress | None = None,
) -> Result:
    """Length of the gradients of one query's row, for random q, k, v and dO.

    A row for each of dS, dQ and dK, each rule and each d_k: over `trials` rows the median, the 10th
    percentile and the root mean square of ‖dS‖ (on the scaled scores, after softmax's Jacobian),
    ‖dQ‖ (on the query) and ‖dK‖ (what this query adds to the gradients of all keys). dV = pᵀ dO is
    not among them: it does not vanish. The root mean square stands beside its exact value;
    "asymptotic" is the closed form that it has for many keys, None where there is none. Standard
    errors are of order statistics for median and percentile. Unit-variance normal components, drawn
    by the law of what they enter: ‖q‖, ‖dO‖ and normal numbers, no vectors. dS of the top key is
    minus the sum of the others'. Memory: 72 bytes a trial and d_k.

    Raises: TypeError and ValueError for sizes below 1, keys or trials below 2, an unknown rule.
    Source: docs/maths.md#gaussian-rows.

    >>> rows = gradient(64, trials=200, rules="1/sqrt_d_k").rows
    >>> [(row["of"], round(row["rms"].theory, 3)) for row in rows]
    [('dS', 0.411), ('dQ', 0.414), ('dK', 0.417)]
    """
    sizes = arguments.sizes("d_k", d_k)
    keys = gaussian.lengths(whole("keys", keys, 2))[0]
    value_dim = whole("value_dim", value_dim)
    if d_model is not None:
        d_model = whole("d_model", d_model)
    asked = gaussian.asked(rules)
    trials, seed = whole("trials", trials, 2), arguments.seed(seed)
    lengths: list[dict[str, Any]] = []
    softmaxes: list[dict[str, Any]] = []
    for i, d in enumerate(sizes):
        alphas = [factor(rule, d, d_model=d_model, keys=keys) for rule in asked]
        exact = [gaussian.exact(keys, d, alpha) for alpha in alphas]
        found: list[list[np.ndarray]] = [[] for _ in asked]
        rest: list[list[np.ndarray]] = [[] for _ in asked]
        trace = [Running() for _ in asked]
        rng, done = gaussian.generator(seed, d, keys), 0
        for block in gaussian.chunks(keys, trials):
            norm = gaussian.norms(rng, d, block)
            across = gaussian.norms(rng, d - 1, block)
            normal = rng.standard_normal((block, keys))
            upstream = rng.standard_normal((block, keys))
            upstream *= gaussian.norms(rng, value_dim, block)
            for j, alpha in enumerate(alphas):
                p = gaussian.softmax(normal, norm * alpha)
                rest[j].append(p.rest)
                trace[j].add(p.trace)
                slope = through(p.weights, p.top, upstream)
                found[j].append(_lengths(slope, p.top, normal, norm, across, alpha))
            done += block
            if on_progress:
                on_progress(i * trials + done, len(sizes) * trials)
        for j, rule in enumerate(asked):
            means = (exact[j].jacobian, exact[j].along, exact[j].by_query)
            every = np.concatenate(found[j], 1)
            for name, values, mean in zip(_OF, every, means, strict=True):
                lengths.append({
                    "of": name, "scale": gaussian.written(rule), "d_k": d,
                    "median": quantile(values, 0.5), "p10": quantile(values, 0.1),
                    "rms": _root_mean_square(values, math.sqrt(value_dim * mean)),
                    "asymptotic": _asymptotic(name, rule, d, keys, value_dim),
                })  # fmt: skip
            softmaxes.append({
                "scale": gaussian.written(rule), "d_k": d,
                "trace": trace[j].estimate(exact[j].trace),
                "rest": quantile(np.concatenate(rest[j]), 0.5),
            })  # fmt: skip
    names = [gaussian.written(rule) for rule in asked]
    lengths.sort(key=lambda row: (_OF.index(row["of"]), names.index(row["scale"])))
    softmaxes.sort(key=lambda row: names.index(row["scale"]))
    return Result(
        "gradient",
        f"{count(keys)} keys, value size {value_dim}, {count(trials)} rows each, seed {seed}",
        {"d_k": list(sizes), "keys": keys, "value_dim": value_dim, "rules": asked,
         "d_model": d_model, "trials": trials, "seed": seed},
        (_length_table(lengths), _softmax_table(softmaxes)),
        _says(lengths, softmaxes, names, sizes),
        tuple(_panel(lengths, *of) for of in _PANELS),
        "docs/maths.md#gaussian-rows",
    )  # fmt: skip


def through(
    weights: Float[np.ndarray, "rows keys"],
    top: np.ndarray,
    upstream: Float[np.ndarray, "rows keys"],
) -> Float[np.ndarray, "rows keys"]:
    """dS = p ∘ (dP − Σp dP): the gradient on what entered softmax, from dP on the weights.

    The top key's, top as (rows, 1), is minus the sum of the others', so that nothing cancels where
    its weight is near 1. Source: docs/maths.md#backward, #gaussian-rows.

    >>> through(np.array([[1.0, 1e-30]]), np.array([[0]]), np.array([[1.0, 3.0]]))[0].tolist()
    [-2e-30, 2e-30]
    """
    # From the top key's on: then its weight enters no sum.
    apart = upstream - np.take_along_axis(upstream, top, -1)
    slope = weights * (apart - (weights * apart).sum(-1, keepdims=True))
    np.put_along_axis(slope, top, 0.0, -1)
    np.put_along_axis(slope, top, -slope.sum(-1, keepdims=True), -1)
    return slope


def _lengths(
    slope: Float[np.ndarray, "rows keys"],
    top: np.ndarray,
    normal: Float[np.ndarray, "rows keys"],
    norm: Float[np.ndarray, "rows 1"],
    across: Float[np.ndarray, "rows 1"],
    alpha: float,
) -> Float[np.ndarray, "3 rows"]:
    """‖dS‖, ‖dQ‖ and ‖dK‖ of each row.

    normal: the keys along q. across: the length of d_k − 1 more normal components, which is what
    Σ dS·k is across q in units of ‖dS‖.
    """
    largest = np.abs(slope).max(-1, keepdims=True)
    unit = np.where(largest == 0, 1.0, largest)
    length = largest[:, 0] * np.sqrt(np.square(slope / unit).sum(-1))
    along = (slope * (normal - np.take_along_axis(normal, top, -1))).sum(-1)
    query = abs(alpha) * np.hypot(along, length * across[:, 0])
    return np.stack([length, query, abs(alpha) * length * norm[:, 0]])


def quantile(values: Float[np.ndarray, " rows"], share: float) -> Estimate:
    """A quantile; its standard error is half the distance between the order statistics one
    binomial standard deviation to each side.

    >>> quantile(np.arange(100.0), 0.5)
    Estimate(value=49.5, error=5.0, theory=None)
    """
    ordered = np.sort(values)
    n = len(ordered)
    place, aside = share * (n - 1), math.sqrt(share * (1 - share) * n)
    low, high = max(math.floor(place - aside), 0), min(math.ceil(place + aside), n - 1)
    error = float(ordered[high] - ordered[low]) * aside / (high - low)
    return Estimate(float(np.quantile(ordered, share)), error)


def _root_mean_square(values: Float[np.ndarray, " rows"], theory: float) -> Estimate:
    """With the standard error of the mean square, by the derivative of the root."""
    squares = Running()
    squares.add(np.square(values))
    mean = squares.estimate()
    root = math.sqrt(mean.value)
    return Estimate(root, mean.error / (2 * root) if root and mean.error else None, theory)


def _asymptotic(name: str, rule: str | float, d: int, n: int, value_dim: int) -> float | None:
    """The root mean square for many keys, and without scale for d_k far above 2 ln n too."""
    if rule == "1/sqrt_d_k":
        return math.sqrt(math.e * value_dim / n)
    if rule == "1/d_k":
        return math.sqrt(value_dim / n / (1 if name == "dS" else d))
    lam = math.sqrt(2 * math.log(n) / d)
    if rule == "none" and lam < 1:
        return math.sqrt(lam * value_dim / 3 * (1 if name == "dS" else d))
    return None


def _length_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = (
        Column("of", "gradient", "text"), Column("scale", "scale", "text"),
        Column("d_k", "d_k", "exact"), Column("median", "median", "small"),
        Column("p10", "10th percentile", "small"), Column("rms", "root mean square", "small"),
        Column("rms.z", "z"),
    )  # fmt: skip
    title = "Length of one row's gradient: dS on its scores, dQ on its query, dK on all keys"
    return Table(columns, tuple(rows), title, by="of")


def _softmax_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = (
        Column("scale", "scale", "text"), Column("d_k", "d_k", "exact"),
        Column("trace", "mean Σp(1−p)", "small"), Column("trace.z", "z"),
        Column("rest", "median 1 − p_max", "small"),
    )  # fmt: skip
    return Table(columns, tuple(rows), "What softmax passes back, by the trace of its Jacobian")


def _says(
    rows: Sequence[dict[str, Any]],
    softmaxes: Sequence[dict[str, Any]],
    names: Sequence[str],
    sizes: Sequence[int],
) -> tuple[str, ...]:
    says = [
        gaussian.agreement([row["rms"] for row in rows] + [row["trace"] for row in softmaxes])
    ]  # fmt: skip
    by = {(row["of"], row["scale"], row["d_k"]): row for row in rows}
    first, last = min(sizes), max(sizes)
    if first < last:
        for name in names:
            a, b = by["dS", name, first], by["dS", name, last]
            moves = [
                f"{what} {_moves(a[key].value, b[key].value)}" for key, what in (
                    ("median", "the median of dS"), ("p10", "its 10th percentile"),
                    ("rms", "its root mean square"),
                )
            ]  # fmt: skip
            query = (by["dQ", name, d]["rms"].value for d in (first, last))
            which = "Unscaled" if name == RULES["none"] else f"Scale {name}"
            says.append(
                f"{which}, d_k {count(first)} to {count(last)}: {', '.join(moves)}; that of dQ "
                f"{_moves(*query)}."
            )
    if {"none", RULES["1/sqrt_d_k"]} <= set(names):
        less: list[int] = []
        more: list[int] = []
        for d in sorted(sizes):
            raw, scaled = (by["dS", name, d]["median"] for name in ("none", RULES["1/sqrt_d_k"]))
            clear = 2 * math.hypot(raw.error, scaled.error)
            if abs(raw.value - scaled.value) > clear:
                (less if raw.value < scaled.value else more).append(d)
        if more:
            says.append(
                f"Without scale the median row's dS is larger than with 1/√d_k at d_k {_list(more)}"
                + (f", smaller at {_list(less)}." if less else ".")
            )
        elif less:
            says.append(
                "Without scale the median row's dS is smaller than with 1/√d_k at d_k "
                f"{_list(less)}."
            )
    # Unscaled it needs d_k far above 2 ln n besides.
    known = [(by["dS", name, last]["asymptotic"], name) for name in names if name != RULES["none"]]
    if limits := [f"{small(limit)} with {name}" for limit, name in known if limit is not None]:
        says.append(
            "The closed form that theory has for many keys puts the root mean square of dS at "
            f"{', '.join(limits)}."
        )
    says.append(
        "A median far below the root mean square means that few rows carry the gradient. dV = pᵀdO "
        "reaches the values in every row, whatever the scale."
    )
    return tuple(says)


def _moves(first: float, last: float) -> str:
    ends = small(first), small(last)
    return f"stays at {ends[0]}" if ends[0] == ends[1] else f"goes from {ends[0]} to {ends[1]}"


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(count(d) for d in sizes)


def _panel(rows: Sequence[dict[str, Any]], of: str, key: str, title: str) -> Panel:
    """One statistic against d_k, a line for each rule; what is 0 has no place on the axis."""
    lines = []
    for name in dict.fromkeys(row["scale"] for row in rows):
        label = "no scale" if name == RULES["none"] else name
        at = sorted(
            (row["d_k"], row[key].value) for row in rows
            if row["of"] == of and row["scale"] == name and row[key].value > 0
        )  # fmt: skip
        lines.append(Line(label, [d for d, _ in at], [y for _, y in at]))
    return Panel(title, "d_k", f"‖{of}‖", tuple(lines), log_x=True, log_y=True)

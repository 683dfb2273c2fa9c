"""One head in full: every number that an audit has of it, each next to what to compare it with.

Prints a head entry of a document: its place and row, what it looks at, why its scores are as wide
as they are, what another scale would do, what softmax passes back, what low precision would cost,
and every measure with its histogram. A part that the audit did not measure is left out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scaledot.head_table import print_table
from scaledot.numerals import count, exact, fraction, number, share, weight, whole
from scaledot.screen import Page, Part, point

Doc = Mapping[str, Any]

LABEL = 20  # cells of a line's name
VALUE = 9  # cells of its number
OPEN = 1  # nats: a median less certain comes from a bin without an end
BESIDE = 36  # cells that a sentence needs to stand beside its number, else it goes below


def print_head(page: Page, doc: Doc, head: Doc) -> None:
    """The parts of one head that the audit has, but for the table of its measures."""
    _place(page, doc, head)
    print_table(page, doc, [head])
    for part, show in (
        ("roles", _roles), ("width", _width), ("whatif", _whatif), ("gradients", _gradients),
        ("precision", _precision),
    ):  # fmt: skip
        if head.get(part):
            show(page, head[part])


def _place(page: Page, doc: Doc, head: Doc) -> None:
    layer: Doc = next((one for one in doc["layers"] if one["index"] == head["layer"]), {})
    rows = head["rows"]
    page.field(
        "layer",
        [
            layer.get("path"),
            "causal" if layer.get("causal") else layer.get("kind"),
            f"kv head {head['kv_head']}" if layer.get("kv_heads") != layer.get("heads") else None,
            f"× {layer['scale']:.4g}" if layer.get("scale") else None,
        ],
    )
    named = (("empty", "empty"), ("nonfinite", "non-finite"), ("padding", "padding"))
    page.field(
        "rows",
        [
            count(rows["total"]),
            *(f"{count(rows[key])} {name}" for key, name in named),
            f"{count(rows['single'])} with a single key",
        ],
    )
    page.line()


# The lines of a part


def _title(page: Page, name: str, says: str = "") -> None:
    """A part's name and what it comes to."""
    start: list[Part] = [(name, "bold"), "   "]
    if len(name) + 3 + BESIDE <= page.width:
        page.text(start, says, len(name) + 3)
    else:
        page.line(*start)
        if says:
            page.text(["  "], says, 2)
    page.line()


def _group(page: Page, name: str) -> None:
    page.line((f"  {name}", "bold"))


def _line(page: Page, name: str, value: str, about: str = "") -> None:
    """A number with its name before it and what it means after it."""
    shown = page.say(value)
    cell = shown.rjust(VALUE) if shown.endswith("%") else point(shown, VALUE)
    _about(page, [_label(page, name), cell], 2 + LABEL + VALUE, about)


def _label(page: Page, name: str) -> Part:
    return (f"  {page.say(name):<{LABEL}}", "cyan")


def _about(page: Page, start: Sequence[Part], length: int, about: str) -> None:
    """Cells, and a sentence about them: beside, or below where there is no room."""
    if about and length + 3 + BESIDE <= page.width:
        page.text([*start, "   "], about, length + 3, "dim")
        return
    page.line(*start)
    if about:
        page.text(["    "], about, 4, "dim")


def _note(page: Page, text: str) -> None:
    page.text(["  "], text, 2, "dim")


# What it looks at


def _roles(page: Page, found: Doc) -> None:
    labels = {mass["name"]: mass["label"] for mass in found["masses"]}
    called = ", ".join(f"{labels[role['name']]} {weight(role['mass'])}" for role in found["called"])
    if found["broad"]:
        called = f"{called}; broadly" if called else "many keys broadly"
    if not found["masses"]:
        _title(page, "Looks at", "no row sees two finite scores")
        return
    _title(page, "Looks at", called or "nothing far above chance")
    columns = {"weight": 9, "chance": 9, "rows": 9, "without first": 16}
    if all(mass["without_first"] is None for mass in found["masses"]):
        del columns["without first"]
    for name in ("without first", "rows"):
        if 2 + LABEL + sum(columns.values()) > page.width:
            columns.pop(name, None)
    heading = "".join(name.rjust(width) for name, width in columns.items())
    page.line((f"  {'mean over rows':<{LABEL}}{heading}", "bold"))
    for mass in found["masses"]:
        cells = {
            "weight": point(page.say(weight(mass["mass"])), 9),
            "chance": point(page.say(weight(mass["chance"])), 9),
            "rows": count(mass["rows"]).rjust(9),
            "without first": point(page.say(weight(mass["without_first"])), 16),
        }
        page.line(_label(page, mass["label"]), "".join(cells[name] for name in columns))
    if found.get("prefix_matching"):
        cells = {
            name: point(page.say(weight(x)), 9)
            for name, x in zip(("weight", "chance"), found["prefix_matching"], strict=False)
        }
        _about(
            page, [_label(page, "prefix matching"), "".join(cells.values())], 2 + LABEL + 18,
            "after the same token, on random tokens said four times",
        )  # fmt: skip
    if found["distance"] is not None:
        chance = f"tokens; {number(found['distance_chance'])} if all keys were alike"
        _line(page, "mean distance", number(found["distance"]), chance)
    if "without first" in columns:
        _note(page, "without first: share of the weight that the first token leaves")
    page.line()


# Why the scores are as wide as they are


def _width(page: Page, width: Doc) -> None:
    _title(page, "Why this wide", width["sentence"])
    if width["within"] is None:
        return
    d_k = width["d_k"]
    _group(page, "variance of scaled scores")
    for name, key, about in (
        ("interaction", "interaction", "what depends on query and key together"),
        ("key bias", "key_bias", "the same keys favoured by every query"),
        ("within rows", "within", "the sum of both, all that softmax sees; theory 1"),
        ("row shift", "row_shift", "the same for all keys of a row: softmax cannot see it"),
    ):
        _line(page, name, number(width[key]), about)
    _group(page, "width within rows, theory 1")
    norms = (
        f"‖q‖ {number(width['query_norm'])} × spread of the keys {number(width['key_spread'])} "
        f"÷ {d_k}; in theory both {number(math.sqrt(d_k))}"
    )
    for name, key, about in (
        ("scale", "scale", f"the factor applied, times √{d_k}"),
        ("norms", "norms", norms),
        ("alignment", "alignment", "directions: as if q and k had "
         f"{number(width['effective_d_k'])} independent components, not {d_k}"),
        ("product", "ratio", f"the width; a scale of {_small(width['unit_scale'])} would make it "
         "1"),
    ):  # fmt: skip
        _line(page, name, _times(width[key]), about)
    if width["excess"] is not None:
        _group(page, "against Gaussian scores as wide")
        side = "sharper" if width["excess"] < 0 else "flatter"
        _line(
            page, "entropy beyond", number(width["excess"]),
            f"nats: {side} than width explains",
        )  # fmt: skip
        _line(
            page, "relative width", number(width["relative"]),
            "width ÷ √(2 ln n): from 1 on even those gather on few keys",
        )  # fmt: skip
    page.line()


def _times(x: float | None) -> str:
    """A factor to two digits: ``×2.7``."""
    return "–" if x is None else f"×{x:,.0f}" if x >= 9.95 else f"×{x:#.2g}"


def _small(x: float | None) -> str:
    """A scale: ``0.0221``."""
    return "–" if x is None else f"{x:#.3g}".rstrip(".")


# What another scale would do


_SWEPT = {
    "factor": 8, "scale": 9, "keys": 9, "entropy": 9, "H/ln n": 9, "saturated": 11, "lead": 9,
    "bf16 room": 11,
}  # fmt: skip
# Entropy and room say again what keys and lead do.
_SWEPT_DROP = ("bf16 room", "entropy", "H/ln n", "lead", "saturated", "scale")


def _whatif(page: Page, found: Doc) -> None:
    factors, largest = found["factors"], found["largest"]
    if all(x is None for x in found["margin"]):
        _title(page, "If the scale were another", "no row sees two finite scores")
        return
    if largest is None:
        lead = f"at no factor up to {_factor(factors[-1])} do half the rows give one key .9 or more"
    elif largest == 0:
        lead = f"half the rows give one key .9 or more already at {_factor(factors[0])}"
    else:
        lead = f"half the rows give one key .9 or more from {_factor(largest)} on"
    _title(page, "If the scale were another", lead)
    rows = _swept(found)
    named = max(len(page.say(called)) for _, _, called, _ in rows)
    columns = dict(_SWEPT)
    for name in _SWEPT_DROP:
        if 2 + named + sum(columns.values()) > page.width:
            del columns[name]
    page.line((" " * (2 + named) + "".join(n.rjust(width) for n, width in columns.items()), "bold"))
    tails = {
        "factor": _tail([_factor(factor) for factor, *_ in rows]),
        "scale": _tail([_small(scale) for _, scale, *_ in rows]),
    }
    for factor, scale, called, row in rows:
        cells = {
            "factor": _at_point(_factor(factor), tails["factor"]),
            "scale": _at_point(_small(scale), tails["scale"]),
        }
        if row is not None:
            error = row["margin_error"]
            cells |= {
                "keys": point(page.say(number(row["keys"])), 9),
                "entropy": point(page.say(number(row["entropy"])), 9),
                "H/ln n": point(page.say(fraction(row["normalised_entropy"])), 9),
                "saturated": share(row["saturated"]),
                "lead": point(page.say(_open(row["margin"], error, ">")), 9),
                "bf16 room": point(page.say(_open(row["headroom"], error, "<")), 11),
            }
        shown = (page.say(cells.get(name, "")).rjust(width) for name, width in columns.items())
        label = page.say(called).ljust(named)
        page.line((f"  {label}", "cyan"), ("".join(shown), "bold" if factor == 1 else ""))
    page.line()
    page.text(["  "], found["holds"], 2)
    errors = [e for e in found["margin_error"] if e is not None and e <= OPEN]
    within = f" to ±{number(max(errors))}" if any(errors) else ""
    notes = {
        "lead": f"lead: ln(weight of the top key / of all others), median{within}",
        "bf16 room": "bf16 room: 6.24 less the lead",
    }
    if shown_notes := "; ".join(text for name, text in notes.items() if name in columns):
        _note(page, shown_notes)
    page.line()


def _swept(found: Doc) -> list[tuple[float, float | None, str, Doc | None]]:
    """(factor, scale, what it is called, its row) of each octave, and of usual scales between,
    where nothing was measured."""
    factors, scales = found["factors"], found["scales"]
    names = (
        "keys", "entropy", "normalised_entropy", "saturated", "margin", "margin_error", "headroom",
    )  # fmt: skip
    marks, applied = dict(found["marks"]), None
    rows: list[tuple[float, float | None, str, Doc | None]] = []
    for i, factor in enumerate(factors):
        called = []
        if factor == 1:
            called, applied = ["applied"], scales[i]
        for name, at in found["marks"].items():
            if math.isclose(at, factor, rel_tol=1e-3):
                called.append(name)
                del marks[name]
        rows.append((factor, scales[i], " = ".join(called), {n: found[n][i] for n in names}))
    for name, at in marks.items():
        rows.append((at, None if applied is None else at * applied, name, None))
    return sorted(rows, key=lambda row: row[0])


def _open(x: float | None, error: float | None, side: str) -> str:
    """A median, or, from a bin without an end, the end that it has: ``>19.4``."""
    if x is None or error is None or error <= OPEN:
        return number(x)
    return f"{side}{number(x - error if side == '>' else x + error)}"


def _factor(x: float) -> str:
    """``×2``, ``÷8``, ``×5.66``"""
    sign, times = ("×", x) if x >= 1 else ("÷", 1 / x)
    return f"{sign}{exact(times)}"


def _tail(texts: Sequence[str]) -> int:
    """Cells from the point on of the longest."""
    return max(len(dot + tail) for _, dot, tail in (text.partition(".") for text in texts))


def _at_point(text: str, tail: int) -> str:
    """The text with so many cells from its point on."""
    head, dot, rest = text.partition(".")
    return head + (dot + rest).ljust(tail)


# What passes back


def _gradients(page: Page, found: Doc) -> None:
    _title(page, "What passes back", "to q and k; v learns in any case")
    _line(page, "Σp(1−p)", fraction(found["trace"]), "through softmax, mean over rows; 0 = nothing")
    if found["relative_value_spread"] is not None:
        _line(
            page, "value spread", number(found["relative_value_spread"]),
            "values attended over all that the row sees; 0 = they coincide",
        )  # fmt: skip
    for name, key, about in (
        ("transmission", "median", "median row, measured in the backward; 1 = as equal weights"),
        ("transmission, 10 %", "p10", "a tenth of the rows pass less"),
        ("root mean square", "rms", "a few rows may carry it while the median row passes nothing"),
    ):
        if found[key] is not None:
            _line(page, name, number(found[key]), about)
    if found["dead"] is not None:
        _line(page, "rows below .001", share(found["dead"]), "that pass next to nothing")
    page.line()


# What low precision would cost


def _precision(page: Page, found: Doc) -> None:
    _title(page, "Room in low precision")
    columns = dict.fromkeys(("ends at", "median", "99 %", "past it"), VALUE)
    for name in ("99 %", "ends at"):
        if 2 + LABEL + sum(columns.values()) > page.width:
            columns.pop(name)
    heading = "".join(name.rjust(width) for name, width in columns.items())
    page.line((f"  {'nats of lead left':<{LABEL}}{heading}", "bold"))
    for room in found["rooms"]:
        cells = {
            "ends at": point(page.say(number(room["limit"])), VALUE),
            "median": point(page.say(number(room["median"])), VALUE),
            "99 %": point(page.say(number(room["p99"])), VALUE),
            "past it": share(room["past"]).rjust(VALUE),
        }
        page.line(_label(page, room["dtype"]), "".join(cells[name] for name in columns))
    _line(
        page, "largest raw score", whole(found["largest"]),
        f"unscaled, at most ‖q‖·‖k‖ = {whole(found['bound'])} in size; float16 ends at 65,504",
    )  # fmt: skip
    _line(
        page, "scores in bfloat16", _percent(found["bf16_cost"]),
        "of a row's weight would move, on average, if they were stored so",
    )  # fmt: skip
    if found["bf16_cost_centred"] is not None:
        _line(
            page, "the same, K centred", _percent(found["bf16_cost_centred"]),
            "with the mean key taken off, which changes no weight",
        )  # fmt: skip
    limit = "ends at: lead from which a dtype stores the top weight as exactly 1; "
    _note(page, f"{limit if 'ends at' in columns else ''}past it: share of rows")
    page.line()


def _percent(x: float | None) -> str:
    """A share, a small one with its digits: ``0.48 %``."""
    if x is None or not 0 < x < 0.0995:
        return share(x)
    return "<0.01 %" if x < 0.00005 else f"{number(x * 100)} %"


# Every measure


# Measures from 0 to 1, whose ends are never reached by rounding.
_SHARES = {
    "normalised_entropy", "collision", "jacobian_trace", "sink_mass", "first", "previous",
    "current", "next", "delimiter", "duplicate", "induction", "bf16_cost", "bf16_cost_centred",
}  # fmt: skip


def print_measures(page: Page, doc: Doc, head: Doc) -> None:
    """Every measure over the rows: moments exact, quantiles as fine as the histogram's bins."""
    if not head.get("moments"):
        return
    moments = {name: m for name, m in head["moments"].items() if m["mean"] is not None}
    without = [name for name in head["moments"] if name not in moments]
    columns = dict.fromkeys(("mean", "sd", "min", "max", "5 %", "median", "95 %", "±"), 9)
    spark, named = 14, max(map(len, moments), default=0) + 2
    for name in ("5 %", "95 %", "min", "max", "sd", "±", "spark"):
        if named + sum(columns.values()) + (3 + spark if spark else 0) <= page.width:
            break
        spark = 0 if name == "spark" else spark
        columns.pop(name, None)
    if named + sum(columns.values()) > page.width:
        columns = dict.fromkeys(columns, 8)
        named = min(named, page.width - sum(columns.values()))
    heading = "".join(name.rjust(width) for name, width in columns.items())
    _title(page, "Every measure")
    page.line(
        ("  measure".ljust(named) + heading, "bold"), ("   over rows" if spark else "", "bold")
    )
    for name, found in moments.items():
        histogram = head["histograms"].get(name, {"first": 0, "counts": []})
        quantiles, bars = _quantiles(doc["edges"].get(name, ()), histogram, found)
        values = found | quantiles
        cells = [_full(page, values.get(key), name, width) for key, width in columns.items()]
        drawn = f"   {_spark(bars, spark)}" if spark else ""
        label = page.cut(name, named - 2)
        page.line((f"  {label}".ljust(named), "cyan"), "".join(cells), drawn)
    page.line()
    quantiles_shown = ", ".join(name for name in ("5 %", "median", "95 %") if name in columns)
    right = ", right to ±" if "±" in columns else ""
    note = f"{quantiles_shown}: the middle of a histogram's bin{right}; the rest is exact"
    _note(page, note)
    if without:
        _note(page, f"in no row: {', '.join(without)}")
    page.line()


def _full(page: Page, x: float | None, measure: str, width: int) -> str:
    """A number of a head in full: here small ones are worth their digits, ``1.6e−4``."""
    small = x is not None and 0 < abs(x) < 0.00995
    text = fraction(x) if measure in _SHARES or measure.startswith("local.") else number(x)
    if small:
        text = f"{x:.1e}".replace("e-0", "e−").replace("-", "−")
    return point(page.say(text), width)


def _quantiles(
    edges: Sequence[float | None], histogram: Doc, moments: Doc
) -> tuple[dict[str, float], list[int]]:
    """The quantiles with their largest half bin as ``±``, and the counts."""
    counts, first = histogram["counts"], histogram["first"]
    low = -math.inf if moments["min"] is None else moments["min"]
    high = math.inf if moments["max"] is None else moments["max"]
    total = sum(counts)
    result: dict[str, float] = {}
    for name, q in (("5 %", 0.05), ("median", 0.5), ("95 %", 0.95)):
        seen = 0
        for i, n in enumerate(counts):
            seen += n
            if n and seen >= q * total:
                # Open ends and what no row reached are cut off.
                left, right = (
                    end if edge is None or not math.isfinite(edge) else min(max(edge, low), high)
                    for edge, end in ((edges[first + i], low), (edges[first + i + 1], high))
                )
                result[name] = (left + right) / 2
                result["±"] = max(result.get("±", 0.0), (right - left) / 2)
                break
    return result, counts


def _spark(counts: Sequence[int], width: int) -> str:
    """A histogram of at most that many cells, none so full that it meets the row above."""
    size = max(math.ceil(len(counts) / width), 1)
    sums = [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
    top = max(sums, default=0)
    return "".join(" ▁▂▃▄▅▆▇"[max(round(7 * n / top), 1) if n else 0] for n in sums)

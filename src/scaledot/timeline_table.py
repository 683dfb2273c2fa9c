"""A training run's time line, as lines for the terminal: the worst head of each measure over the
steps, the heads that moved most, the alarms. Reads documents of timeline.py only (plain dicts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from scaledot.numerals import counted, factor, fraction, seconds, size, small
from scaledot.screen import Page, cut
from scaledot.timeline import extremes, number_of

Doc = Mapping[str, Any]

LABELS = {
    "max_score": "largest score",
    "entropy": "entropy",
    "score_var_within": "variance",
    "top_margin": "key's lead",
    "gradient": "gradient",
}
_MEANS = (
    ("variance", "mean over rows of the scaled scores' variance in the row: all softmax sees"),
    ("entropy", "nats, mean over rows; of the worst head the least"),
    ("lead", "of the heaviest key over all others together, nats, mean over rows"),
    ("gradient", "Σp(1−p), mean over rows: what softmax passes back; the least"),
)
_ACTIONS = {
    "stop": "the run was to stop",
    "save": "weights were saved",
    "call": "a function was called",
}
_LEVELS = "▁▂▃▄▅▆▇█"
_WHOLE, _FEW = 76, 56  # columns from which on everything, and first and step, are shown


def print_timeline(console: Console, doc: Doc, *, wrote: tuple[str, int] | None = None) -> None:
    """Prints a time line's document. ``wrote`` is the saved file's (path, bytes)."""
    with Page(console) as page:
        page.title("audit", doc["file"])
        _header(page, doc)
        _measures(page, doc)
        _moved(page, doc)
        _alarms(page, doc)
        if wrote:
            page.line()
            page.text(["Wrote "], f"{wrote[0]} ({size(wrote[1])})", 6)


def _header(page: Page, doc: Doc) -> None:
    layers = doc["layers"]
    heads = sorted({x["heads"] for x in layers})
    shape = f"{counted(len(layers), 'layer')} × {'/'.join(map(str, heads))} heads"
    widths = "/".join(map(str, sorted({x["d_k"] for x in layers})))
    page.field("model", [doc["model"]["name"], shape, f"d_k {widths}"])
    page.field("scale", [f"× {factor(x)}" for x in sorted({number_of(y["scale"]) for y in layers})])
    steps = doc["steps"]
    span = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"
    looked = f"{len(steps):,} looked at, one in {doc['every']:,}"
    page.field("steps", [span, looked, seconds(doc["seconds"]) if len(steps) > 1 else None])
    known = [(n, number_of(x)) for n, x in zip(steps, doc["losses"], strict=True) if x is not None]
    if known:
        ends = f"{small(known[0][1])} first, {small(known[-1][1])} last"
        finite = [x for x in known if math.isfinite(x[1])]
        least = min(finite, key=lambda x: x[1], default=None)
        page.field("loss", [ends, least and f"least {small(least[1])} at step {least[0]:,}"])
    bad = sum(doc["nonfinite"])
    first = next((n for n, x in zip(steps, doc["nonfinite"], strict=True) if x), None)
    since = None if first is None else f"the first at step {first:,}"
    page.field("rows", [counted(bad, "non-finite row") if bad else "none non-finite", since])
    for said in doc["notes"]:
        page.field("note", [said])
    page.line()


def _measures(page: Page, doc: Doc) -> None:
    """Of each measure a row: label, first, last, extreme, its step and head, and the line."""
    columns = [("last", 9), ("extreme", 9), ("head", 7)]
    if page.width >= _FEW:
        columns.insert(0, ("first", 9))
    if page.width >= _WHOLE:
        columns.insert(3, ("at step", 10))
    label = 16 if page.width >= _FEW else 15
    used = label + sum(width for _, width in columns)
    # On a narrow screen the line stands below its numbers.
    below = page.width - used < 16
    room = min(page.width - (label if below else used + 2), 60)
    names = "".join(name.rjust(width) for name, width in columns)
    title = "  worst head".ljust(label)
    page.line((f"{title}{names}" + ("" if below else "  over the steps"), "dim"))
    for x in doc["measures"]:
        name = x["name"]
        cells = {"first": "–", "last": "–", "extreme": "–", "at step": "–", "head": "–"}
        if x["first"] is not None:
            for key in ("first", "last", "extreme"):
                cells[key] = _shown(name, x[key]["value"])
            cells["at step"] = f"{x['extreme']['step']:,}"
            cells["head"] = _head(x["extreme"]["head"])
        row = "".join(page.say(cells[key]).rjust(width) for key, width in columns)
        line = sparkline([number_of(y) for y in x["worst"]], x["low"], room)
        page.line((f"  {LABELS[name]}".ljust(label), "cyan"), row, *([] if below else ["  ", line]))
        if below:
            page.line(" " * label, line)
    page.line()
    page.text(["  "], "Of each step the worst of all heads: the largest, and the least entropy and "
              "gradient. Each line runs from its own least to its own most; ! is not finite. "
              "Extreme, step and head are those of the worst step.", 2, "dim")  # fmt: skip
    page.line()
    for word, meaning in _MEANS:
        page.text([(f"  {word:<11}", "cyan")], meaning, 13)


def sparkline(values: Sequence[float], low: bool, width: int) -> str:
    """A series from its least to its most, each mark the worst of its steps; a space for none.

    >>> sparkline([1, 2, 3, 4, float("inf"), float("nan")], False, 6)
    '▁▃▆█! '
    """
    parts = extremes(values, low, width)
    finite = [x for x in parts if math.isfinite(x)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)

    def mark(x: float) -> str:
        if math.isnan(x):
            return " "
        if math.isinf(x):
            return "!"
        # Halves first: the difference of two large numbers may not be one.
        part = (x / 2 - least / 2) / (most / 2 - least / 2) if most > least else 0.0
        return _LEVELS[round(part * (len(_LEVELS) - 1))]

    return "".join(map(mark, parts))


def _moved(page: Page, doc: Doc) -> None:
    if not doc["moved"]:
        return
    page.line()
    page.line(("Heads that moved most", "bold"))
    page.text(["  "], "by variance, from the first step to the last", 2, "dim")
    page.line()
    wide = page.width >= 60
    title = "  head      first     last     times" + ("   entropy first     last" if wide else "")
    page.line((title, "dim"))
    for x in doc["moved"]:
        first, last = x["score_var_within"]
        cells = _head(x["head"]).rjust(6), small(first), small(last), f"×{small(x['times'])}"
        row = cells[0] + "".join(
            page.say(y).rjust(w) for y, w in zip(cells[1:], (9, 9, 10), strict=True)
        )
        if wide:
            ends = [page.say(small(number_of(y))) for y in x["entropy"]]
            row += ends[0].rjust(16) + ends[1].rjust(9)
        page.line(row)


def _alarms(page: Page, doc: Doc) -> None:
    page.line()
    rules: dict[str, list[Doc]] = {}
    for alarm in doc["alarms"]:
        rules.setdefault(alarm["rule"], []).append(alarm)
    if not rules:
        page.line(("Alarms", "bold"), "   none went off")
        return
    page.line(
        ("Alarms", "bold"),
        f"   {counted(len(rules), 'rule')}, {counted(len(doc['alarms']), 'time')}",
    )
    for i, (rule, found) in enumerate(rules.items(), 1):
        page.line()
        page.text([f"{i:>3} ", ("look ", "yellow")], rule, 9)
        _field(page, "first", _event(found[0]))
        if len(found) > 1:
            low = rule.split(" ")[1:2] == ["below"]
            worst = (min if low else max)(found, key=lambda x: number_of(x["value"]))
            _field(page, "worst", _event(worst))
            _field(
                page, "last", f"step {found[-1]['step']:,}, {counted(len(found), 'time')} in all"
            )
        _field(page, "why", f"{found[0]['why']} (step {found[0]['step']:,})")
        if found[0]["action"] in _ACTIONS:
            _field(page, "then", _ACTIONS[found[0]["action"]])


def _field(page: Page, label: str, text: str) -> None:
    page.text([f"{'':9}", (f"{label:<7}", "cyan")], text, 16)


def _event(x: Doc) -> str:
    more = f", and {counted(x['also'], 'more head')}" if x["also"] else ""
    value = _shown(x["measure"], x["value"])
    return (
        f"step {x['step']:,}: {value} in head {x['layer']}.{x['head']} ({cut(x['path'], 60)}){more}"
    )


def _head(at: Sequence[int]) -> str:
    return f"{at[0]}.{at[1]}"


def _shown(name: str, x: float | str | None) -> str:
    value = number_of(x)
    if name == "nonfinite":
        return f"{value:,.0f}"
    return (
        "NaN"
        if isinstance(x, str) and x == "NaN"
        else (fraction if name == "gradient" else small)(value)
    )

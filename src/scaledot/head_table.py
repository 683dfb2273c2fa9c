"""The table of an audit's heads: a row for each. Prints head entries of documents."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scaledot.numerals import exact, fraction, number, share, weight, whole
from scaledot.screen import WIDE, Page, Part, point

Doc = Mapping[str, Any]


def head_label(head: Doc) -> str:
    return f"{head['layer']}.{head['head']}"


def induction_of(head: Doc) -> Doc:
    masses = (head.get("roles") or {}).get("masses", ())
    return next((mass for mass in masses if mass["name"] == "induction"), {})


def by_layer(heads: Sequence[Doc]) -> dict[int, list[Doc]]:
    layers: dict[int, list[Doc]] = {}
    for head in heads:
        layers.setdefault(head["layer"], []).append(head)
    return layers


def median_of(heads: Sequence[Doc], key: str) -> float | None:
    values = [h[key] for h in heads if isinstance(h.get(key), int | float)]
    return statistics.median(values) if values else None


# The table


@dataclass(frozen=True)
class Column:
    key: str
    top: str  # two lines of heading
    name: str
    width: int
    text: Callable[[Any], str] = number
    aligned: bool = True  # at the decimal point


_COLUMNS = (
    Column("before", "", "before", 9, whole, aligned=False),
    Column("after", "score variance", "after", 8),
    Column("within", "within", "rows", 9),
    Column("bar", "", "", 16),
    Column("keys", "effective", "keys", 10),
    Column("entropy", "entropy", "nats", 9),
    Column("saturated", "saturated", "rows", 10, share, aligned=False),
    Column("margin_median", "top key's", "lead", 10),
    Column("gradient", "gradient", "Σp(1−p)", 9, fraction),
    Column("largest", "largest", "score", 8),
    Column("room", "room in", "fp16", 9, aligned=False),
    Column("attends", "attends", "mostly to", 17),
)
_ONLY_WIDE = {"within", "entropy", "margin_median", "room"}
HEAD_WIDTH = 8


def fit(columns: Sequence[Column], drop: Sequence[str], width: int) -> list[Column]:
    """The columns that fit, the first named in ``drop`` gone first."""
    kept = list(columns)
    for key in drop:
        if sum(column.width for column in kept) > width:
            kept = [column for column in kept if column.key != key]
    return kept


def _table_columns(width: int) -> list[Column]:
    if width >= WIDE:
        columns = [replace(c, width=28) if c.key == "bar" else c for c in _COLUMNS]
    else:
        columns = [c for c in _COLUMNS if c.key not in _ONLY_WIDE]
    drop = ("attends", "bar", "gradient", "largest", "before")
    return fit(columns, drop, width - HEAD_WIDTH)


def print_table(page: Page, doc: Doc, heads: Sequence[Doc]) -> None:
    columns = _table_columns(page.width)
    _table_heading(page, columns)
    _row(page, columns, "theory", theory_of(doc), theory=True)
    page.line()
    spaced = any(h["head"] for h in heads)  # one head a layer needs no gaps
    for i, head in enumerate(heads):
        if spaced and i and head["layer"] != heads[i - 1]["layer"]:
            page.line()
        _row(page, columns, head_label(head), head)
    if len(heads) > 1:
        page.line()
        _row(page, columns, "median", {c.key: median_of(heads, c.key) for c in columns})
    page.line()


def _table_heading(page: Page, columns: Sequence[Column]) -> None:
    """Two lines; a name that is too long reaches over the gap beside it."""
    top = " " * HEAD_WIDTH
    names: list[Part] = [("head".rjust(HEAD_WIDTH), "bold")]
    end = length = HEAD_WIDTH
    for column in columns:
        end += column.width
        name, style = page.say(column.name).rjust(end - length), ""
        if column.key == "attends":
            top += f"   {column.top}"
            name = f"   {column.name}"
        elif column.key == "bar":
            name, style = _bar_scale(page, column.width), "dim"
        else:
            top = top.ljust(end)[: end - len(column.top)] + column.top
        names.append((name, style))
        length += len(name)
    page.line((top, "bold"))
    page.line(*names)


def _row(page: Page, columns: Sequence[Column], label: str, row: Doc, theory: bool = False) -> None:
    parts: list[Part] = [(label.rjust(HEAD_WIDTH), "bold")]
    for column in columns:
        if column.key == "bar":
            parts += _bar(row.get("after"), column.width, theory)
        elif column.key == "attends":
            parts.append(f"   {_attends(row)}")
        else:
            parts.append(cell(page, column, row.get(column.key)))
    page.line(*parts)


def cell(page: Page, column: Column, value: float | None) -> str:
    shown = page.say(column.text(value))
    return point(shown, column.width) if column.aligned else shown.rjust(column.width)


def theory_of(doc: Doc) -> dict[str, Any]:
    """The theory as a row of the table."""
    theory = dict(doc.get("theory") or {"after": 1.0})
    before = {_before(layer) for layer in doc.get("layers", ())}
    keys = theory.get("keys")
    chance = theory.get("chance") or {}
    induction = [
        x for h in doc.get("heads", ()) if (x := induction_of(h).get("chance")) is not None
    ]
    return theory | {
        "induction": statistics.mean(induction) if induction else None,
        "first": chance.get("first"),
        "within": theory.get("within", theory.get("after")),
        "excess": 0.0,
        "before": before.pop() if len(before) == 1 else None,
        "entropy": math.log(keys) if keys else None,
    }


def _before(layer: Doc) -> float | None:
    """The variance of ⟨q,k⟩ in theory: d_k, less what q and k carry of the scale already."""
    carried = (layer.get("configured") or {}).get("carried") or 1.0
    return layer["d_k"] * carried**2 if layer.get("d_k") else None


def _attends(row: Doc) -> str:
    if row.get("attends"):
        return f"{row['attends']['to']} {weight(row['attends']['mass'])}"
    chance = sorted(x for x in (row.get("chance") or {}).values() if x is not None)
    ends = dict.fromkeys(weight(x) for x in (*chance[:1], *chance[-1:]))
    return f"chance {'–'.join(ends)}" if chance else ""


# The bar: variance by octaves, from ⅛ to 512; ┃ stands at 1


def _bar_scale(page: Page, width: int) -> str:
    octave = (width - 4) // 12
    scale = "  " if page.ascii else "  ⅛"  # ASCII has no ⅛ of one cell
    for at, label in ((3, "1"), (6, "8"), (9, "64"), (12, "512")):
        scale = scale.ljust(2 + at * octave) + label
    return scale


def _bar(variance: float | None, width: int, theory: bool) -> list[Part]:
    octave = (width - 4) // 12
    one, last = 3 * octave, 12 * octave
    if theory:
        return ["  ", ("·" * one, "dim"), ("┃", "bold"), ("·" * (last - one), "dim"), " "]
    if variance is None or not variance >= 0:
        return [" " * (2 + one), ("┃", "bold"), " " * (last - one + 1)]
    octaves = math.log2(min(max(variance, 2.0**-9), 2.0**12))
    at = min(max(one + round(octaves * octave), 0), last)
    style = _tone(variance)
    if at < one:
        drawn: list[Part] = [("●" + "─" * (one - at - 1), style), ("┃", "bold")]
    elif at == one:
        drawn = [("●", style)]
    else:
        drawn = [("┃", "bold"), ("─" * (at - one - 1) + "●", style)]
    return [" " * (2 + min(at, one)), *drawn, " " * (last - max(at, one) + 1)]


def _tone(variance: float) -> str:
    """Below theory, as theory, ×2–8, beyond."""
    levels = ((0.5, "cyan"), (2, "green"), (8, "yellow"))
    return next((style for limit, style in levels if variance < limit), "magenta")


def print_legend(page: Page, doc: Doc) -> None:
    shown = {column.key for column in _table_columns(page.width)}
    theory = theory_of(doc)
    after, keys, gradient = (theory.get(k) for k in ("after", "uniform_keys", "uniform_gradient"))
    law = "d_k before scaling"
    if any(_before(layer) != layer.get("d_k") for layer in doc.get("layers", ())):
        law = f"{number(theory['before'])} before the call's factor, as q carries one"
    law += f", {exact(after)} after" if after else ""
    mark = "" if "bar" not in shown else " (┃)" if after == 1 else "; ┃ is 1"
    alike_keys = f", {exact(keys)} = all keys alike" if keys else ""
    alike = f", {weight(gradient)} = all keys alike" if gradient else ""
    for key, label, text in (
        ("after", "theory", f"independent unit-variance q and k: {law}{mark}"),
        ("within", "within", "mean variance within a row, all that softmax sees"),
        ("keys", "keys", f"exp(mean entropy): 1 = a single key{alike_keys}"),
        ("saturated", "saturated", "rows where one key holds over .998: bfloat16 stores exactly 1"),
        ("margin_median", "lead", "ln(weight of the top key / of all others), median"),
        ("gradient", "gradient", f"what softmax passes back: 0 = nothing{alike}"),
        ("room", "room", "65,504, the end of fp16, over the largest ‖q‖·‖k‖"),
    ):
        if key in shown:
            page.text([(f"  {label:<11}", "dim")], text, 13, "dim")
    page.line()

"""What an experiment of the laboratory found, as lines for the terminal: its tables with theory,
estimate and standard error beside each other, then what it says. Reads lab documents only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from scaledot import numerals
from scaledot.screen import Page, pad, printed, wrap

Doc = Mapping[str, Any]

GAP = 2
KIND_STYLE = {"wrong": "red", "imprecise": "yellow", "rounded": "cyan", "right": "green"}
_NARROWEST_TEXT = 10
"""Cells that a column of text keeps, or fewer where it needs no more; longer words are cut."""
_ESTIMATE = ("theory", "estimate", "std. err.")
_FORMS = {
    form: getattr(numerals, form)
    for form in (
        "number",
        "small",
        "exact",
        "whole",
        "weight",
        "share",
        "size",
        "seconds",
        "factor",
        "probability",
    )
}


def print_lab(
    console: Console, doc: Doc, *, wrote: Sequence[str] = (), next_commands: Sequence[str] = ()
) -> None:
    """Prints a lab document: its own lines, its tables, then its sentences. ``wrote`` are the files
    that hold it, ``next_commands`` what to type next."""
    with Page(console) as page:
        _title(page, doc)
        for line in doc["lines"]:
            page.line(f"  {line}" if line else "")
        for i, table in enumerate(t for t in doc["tables"] if t["shown"] != []):
            if i or doc["lines"]:
                page.line()
            if table["title"]:
                page.text(["  "], table["title"], 2, "bold")
                page.line()
            _table(page, table)
        page.line()
        for sentence in doc["says"]:
            page.text(["  "], sentence, 2)
        if doc["source"]:
            page.text([("  source  ", "cyan")], doc["source"], 10)
        if wrote:
            page.line()
            page.text(["Wrote "], ", ".join(wrote), 6)
        if next_commands:
            page.line()
            for i, command in enumerate(next_commands):
                page.line("Next  " if not i else "      ", command)


def lab_text(doc: Doc, width: int = 100) -> str:
    """What :func:`print_lab` prints, without colour."""
    return printed(lambda plain: print_lab(plain, doc), width)


@dataclass
class _Strip:
    """One printed column: its cells, and the heading that it shares with its neighbours. follows:
    it is about the column before, as z is about an estimate."""

    group: str
    heading: str
    text: bool
    whole: bool = False
    cells: list[str] = field(default_factory=list)
    width: int = 0
    follows: bool = False


def _title(page: Page, doc: Doc) -> None:
    name, about = f"scaledot lab {doc['experiment']}", page.say(doc["about"])
    if cell_len(f"{name}   {about}") <= page.width:
        page.line((name, "bold"), f"   {about}")
    else:
        page.line((name, "bold"))
        page.text(["  "], about, 2)
    page.line()


def _table(page: Page, table: Doc) -> None:
    if table["shown"] is not None:
        table = {**table, "rows": [table["rows"][i] for i in table["shown"]]}
    columns = [column for column in table["columns"] if column["key"] != table["by"]]
    strips = [strip for column in columns for strip in _strips(page, column, table)]
    names = _names(strips)
    for strip in strips:
        lines = [line for cell in [strip.heading, *strip.cells] for line in cell.split("\n")]
        strip.width = max(map(cell_len, lines))
    _cover(strips)
    _narrow(strips, page.width - GAP)
    for i, band in enumerate(_bands(names, strips[len(names) :], page.width - GAP)):
        if i:
            page.line()
        _print(page, band, [row.get(table["by"]) for row in table["rows"]])


def _strips(page: Page, column: Doc, table: Doc) -> list[_Strip]:
    key, form = column["key"], column["form"]
    # On other screens Σ is left out where it is not to be had: here p(1−p) is a column of its own.
    heading = page.say(column["heading"].replace("Σ", "sum " if page.ascii else "Σ"))
    values = [row.get(key) for row in table["rows"]]
    if key.endswith(".z"):
        of = [row.get(key.removesuffix(".z")) for row in table["rows"]]
        zs = [v["z"] if isinstance(v, Mapping) else None for v in of]
        cells = [page.say(numerals.signed(z)) for z in zs]
        return [_Strip("", heading, False, cells=cells, follows=True)]
    if any(isinstance(v, Mapping) for v in values):
        none = {"value": None, "error": None, "theory": None}
        parts = [_estimate(v if isinstance(v, Mapping) else none) for v in values]
        strips = [
            _Strip(heading, name, False, cells=[page.say(part[i]) for part in parts])
            for i, name in enumerate(_ESTIMATE)
        ]
        if all(v is None or v["theory"] is None for v in values):
            return strips[1:]
        return strips
    group = page.say(column["group"])
    if form == "text":
        cells = ["" if v is None else page.say(str(v)) for v in values]
        return [_Strip(group, heading, True, cells=cells)]
    cells = [page.say(_written(v, form)) for v in values]
    return [_Strip(group, heading, False, all(isinstance(v, int) for v in values), cells)]


def _estimate(value: Doc) -> tuple[str, str, str]:
    if value["value"] is None:
        return ("–", "–", "–")
    return numerals.estimated(value["value"], value["error"], value["theory"])


def _written(value: Any, form: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    return _FORMS[form](value)


def _cover(strips: Sequence[_Strip]) -> None:
    """Widen what stands under a heading that is longer."""
    for name in dict.fromkeys(strip.group for strip in strips if strip.group):
        under = [strip for strip in strips if strip.group == name]
        under[0].width += max(cell_len(name) - sum(s.width + GAP for s in under) + GAP, 0)


def _narrow(strips: Sequence[_Strip], room: int) -> None:
    """Take what is too much from columns of text, whose cells then wrap: cell by cell where it
    makes fewest lines, first without cutting words, then down to `_NARROWEST_TEXT`."""
    texts = [strip for strip in strips if strip.text]
    tall = {id(strip): _lines(strip, strip.width) for strip in texts}
    excess = sum(strip.width + GAP for strip in strips) - room
    words = {id(s): max(cell_len(w) for c in (s.heading, *s.cells) for w in c.split(" "))
             for s in texts}  # fmt: skip
    for keep in (max(words.values(), default=0), 0):
        while excess > 0:
            tries = []
            for strip in texts:
                least = max(min(keep, words[id(strip)]), _NARROWEST_TEXT, cell_len(strip.heading))
                if strip.width > least:
                    less = _lines(strip, strip.width - 1)
                    rows = zip(*(less if s is strip else tall[id(s)] for s in texts), strict=True)
                    tries.append((sum(map(max, rows)), -strip.width, strip, less))
            if not tries:
                break
            *_, strip, tall[id(strip)] = min(tries, key=lambda one: one[:2])
            strip.width -= 1
            excess -= 1


def _lines(strip: _Strip, width: int) -> list[int]:
    """How many each cell takes at that width."""
    return [1 if cell_len(cell) <= width else len(wrap(cell, width)) for cell in strip.cells]


def _names(strips: Sequence[_Strip]) -> list[_Strip]:
    """The columns from the left that say which row this is: text and whole numbers, until they
    tell every row from the others."""
    names: list[_Strip] = []
    for strip in strips:
        if names and len(set(zip(*(n.cells for n in names), strict=True))) == len(strip.cells):
            break
        if strip.group or not (strip.text or strip.whole):
            break
        names.append(strip)
    return names or list(strips[:1])


def _bands(names: list[_Strip], strips: Sequence[_Strip], room: int) -> list[list[_Strip]]:
    """Columns that fit beside each other; what does not goes below, led by the names."""
    bands = [list(names)]
    groups: list[list[_Strip]] = []
    for strip in strips:
        together = strip.follows or (strip.group and groups and groups[-1][0].group == strip.group)
        if groups and together:
            groups[-1].append(strip)
        else:
            groups.append([strip])
    rest = room - sum(strip.width + GAP for strip in names)
    for group in (
        part
        for whole in groups
        for part in ([whole] if sum(s.width + GAP for s in whole) <= rest else [[s] for s in whole])
    ):
        used = sum(strip.width + GAP for strip in [*bands[-1], *group])
        if used > room and len(bands[-1]) > len(names):
            bands.append(list(names))
        bands[-1] += group
    return bands


def _print(page: Page, band: Sequence[_Strip], by: Sequence[Any]) -> None:
    if any(strip.group for strip in band):
        page.line(*_groups(band))
    page.line(*[(" " * GAP + _cell(strip, strip.heading), "cyan") for strip in band])
    for i in range(len(band[0].cells)):
        if by[i] is not None and (i == 0 or by[i] != by[i - 1]):
            page.line()
            page.text(["  "], str(by[i]), 2, "bold")
        cells = [wrap(text, s.width) if s.text else [text] for s, text in _row(band, i)]
        for parts in zip_longest(*cells, fillvalue=""):
            page.line(
                *[" " * GAP + _cell(strip, part) for strip, part in zip(band, parts, strict=True)]
            )


def _row(band: Sequence[_Strip], i: int) -> Iterator[tuple[_Strip, str]]:
    """The cells of a row; text from the left that stands above already is not said again."""
    repeats = i > 0
    for strip in band:
        repeats = repeats and strip.text and strip.cells[i] == strip.cells[i - 1]
        yield strip, "" if repeats else strip.cells[i]


def _cell(strip: _Strip, text: str) -> str:
    return pad(text, strip.width, right=not strip.text)


def _groups(band: Sequence[_Strip]) -> list[tuple[str, str]]:
    """The headings above the headings, each in the middle of its columns."""
    parts: list[tuple[str, str]] = []
    i = 0
    while i < len(band):
        same = [s for s in band[i:] if s.group == band[i].group] if band[i].group else [band[i]]
        width = sum(s.width + GAP for s in same)
        name = band[i].group
        left = GAP + max((width - GAP - cell_len(name)) // 2, 0)
        parts.append((pad(" " * left + name, width), "cyan"))
        i += len(same)
    return parts

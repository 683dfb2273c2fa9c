"""The statistics of an audit's heads: the table, or, where there are many, a grid of layers × heads
under one statistic and the few heads worth looking at. Prints head entries of documents.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from scaledot.head_table import (
    HEAD_WIDTH,
    Column,
    Doc,
    by_layer,
    cell,
    fit,
    head_label,
    induction_of,
    median_of,
    print_legend,
    print_table,
    theory_of,
)
from scaledot.numerals import count, counted, exact, fraction, number, share, weight, whole
from scaledot.screen import WIDE, Page, Part, wrap

TABLE_HEADS = 40  # up to here every head has a row
PICKS = 8  # heads worth looking at
GRID_LAYERS = 48  # up to here every layer has a row of the grid


class NotHereError(ValueError):
    """A document has no such head or statistic."""


def print_statistics(
    page: Page, doc: Doc, heads: Sequence[Doc], show: str, table: bool, legend: bool
) -> None:
    """A row each for up to 40 heads, or with ``table``; the grid for more or another ``show``.

    Raises: NotHereError if there is no such statistic.
    """
    if show not in STATISTICS:
        raise NotHereError(f"no statistic {show!r}: choose from {', '.join(STATISTICS)}")
    heads = [{**head, **_of_parts(head)} for head in heads]
    if show in IN_PARTS and all(head[show] is None for head in heads):
        raise NotHereError(f"no head has {show!r} here: audit without --quick, or a longer text")
    if table or (len(heads) <= TABLE_HEADS and show == "after"):
        print_table(page, doc, heads)
        if legend:
            print_legend(page, doc)
    elif heads:
        picks = _picks(heads, (doc.get("theory") or {}).get("chance") or {})
        _print_grid(page, doc, heads, show, {head["layer"] for head, _ in picks})
        _print_picks(page, picks, len(heads))


def _of_parts(head: Doc) -> dict[str, float | None]:
    """Statistics that stand deeper in a head's entry, None where the audit lacks them."""
    return {
        "induction": induction_of(head).get("mass"),
        "excess": (head.get("width") or {}).get("excess"),
    }


# The grid: layers × heads, one statistic


@dataclass(frozen=True)
class _Statistic:
    title: str
    theory: tuple[str, str]  # a word, and what in the theory row follows it
    text: Callable[[Any], str]
    thresholds: tuple[float, ...]  # from ▂ upwards
    falling: bool = False  # taller means smaller
    by: str = ""  # what the thresholds compare, if not the value itself
    opposite: tuple[float, str, str] | None = None  # ▽ beyond it; its words, and those for ·


def _percent(x: float | None) -> str:
    return share(x).removesuffix(" %")


_VARIANCE = _Statistic(
    "Score variance after scaling",
    ("theory", "after"),
    number,
    (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    opposite=(0.5, "below ½", "½ to 2"),
)
STATISTICS = {
    "after": _VARIANCE,
    "within": replace(_VARIANCE, title="Score variance within rows"),
    "keys": _Statistic(
        "Effective keys",
        ("all alike", "uniform_keys"),
        number,
        (0.8, 0.6, 0.4, 0.2, 0.1, 0.05),
        falling=True,
        by="normalised_entropy",
    ),
    "saturated": _Statistic(
        "Saturated rows, %",
        ("theory", "saturated"),
        _percent,
        (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
    ),
    "gradient": _Statistic(
        "Gradient Σp(1−p)",
        ("theory", "gradient"),
        weight,
        (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
        falling=True,
    ),
    "largest": _Statistic(
        "Largest score",
        ("theory", "largest"),
        number,
        (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0),
    ),
    "first": _Statistic(
        "Weight on the first token",
        ("chance", "first"),
        weight,
        (0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99),
    ),
    "induction": _Statistic(
        "Weight after the same token",
        ("chance", "induction"),
        weight,
        (0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99),
    ),
    "excess": _Statistic(
        "Entropy beyond width, nats",
        ("theory", "excess"),
        number,
        (-0.2, -0.5, -1.0, -2.0),
        falling=True,
        opposite=(0.2, "above .2", "−.2 to .2"),
    ),
}
IN_PARTS = ("induction", "excess")  # not in every audit
_GLYPHS = "·▂▃▄▅▆▇█"
# By level from −1, the glyph's colour and the number's weight.
_LEVEL_STYLES = (
    ("cyan", ""),
    ("green", "dim"),
    *[("yellow", "")] * 2,
    *[("magenta", "bold")] * 5,
)


def _level(show: str, head: Doc) -> int | None:
    """−1 for ▽, 0 for ·, then one more for each threshold passed; None if undefined."""
    statistic = STATISTICS[show]
    value: float | None = head.get(statistic.by or show)
    if value is None:
        return None
    if statistic.opposite:
        limit, *_ = statistic.opposite
        if value > limit if statistic.falling else value < limit:
            return -1
    if statistic.falling:
        return sum(value < t for t in statistic.thresholds)
    return sum(value >= t for t in statistic.thresholds)


def _mark(level: int | None) -> tuple[str, str]:
    if level is None:
        return " ", ""
    return "▽" if level < 0 else _GLYPHS[level], _LEVEL_STYLES[level + 1][0]


@dataclass(frozen=True)
class _Layout:
    """How wide a grid is drawn."""

    indent: int  # for the layer's number
    number: int  # cells of a number; 0 without numbers
    gap: int  # cells between heads
    median: bool
    merged: int  # neighbouring heads that share a mark


def _layout(
    page: Page, layers: Mapping[int, Sequence[Doc]], show: str, room: int, indent: int
) -> _Layout:
    """The widest layout that fits. Too narrow, the median goes, then a space, then numbers, then
    all spaces, then neighbours merge."""
    heads = max(len(row) for row in layers.values())
    text = STATISTICS[show].text
    width = max(3, *(len(page.say(text(h.get(show)))) for row in layers.values() for h in row))
    width += page.ascii  # there marks are digits: "1 4.09"
    median = 3 + max(width, 6)
    for cells, gap, extra in ((width, 2, median), (width, 2, 0), (width, 1, 0), (0, 1, 0)):
        if indent + heads * (1 + cells + gap) - gap + extra <= room:
            return _Layout(indent, cells, gap, extra > 0 and heads > 1, 1)
    return _Layout(indent, 0, 0, False, math.ceil(heads / (room - indent)))


def _print_grid(
    page: Page, doc: Doc, heads: Sequence[Doc], show: str, named: Collection[int]
) -> None:
    """The grid and its legend; on a wide page a second statistic beside it."""
    layers = by_layer(heads)
    layout = _layout(page, layers, show, page.width, indent=6)
    grid = _grid(page, doc, layers, show, named, layout)
    other = "after" if show == "keys" else "keys"
    room = page.width - max(line.cell_len for line in grid) - 4
    beside = _layout(page, layers, other, max(room, 1), indent=0)
    both = page.width >= WIDE and beside.gap == 2
    page.beside(grid, _grid(page, doc, layers, other, named, beside) if both else [])
    page.line()
    for each in (show, other) if both else (show,):
        _grid_legend(page, each, f"  {each:<11}" if both else "  ")
    notes = [f"--show {other}: another statistic"]
    if layout.merged > 1:
        notes.insert(0, f"each mark is the more extreme of {layout.merged} neighbours")
    elif layout.gap and any(h.get("kv_head", h["head"]) != h["head"] for h in heads):
        notes.insert(0, "│ parts the heads that share one kv head")
    joined = "    ".join(notes)
    for note in [joined] if 2 + len(joined) <= page.width else notes:
        page.text([("  ", "")], note, 2, "dim")
    page.line()


def _grid_legend(page: Page, show: str, start: str) -> None:
    """What the marks mean."""
    statistic = STATISTICS[show]
    percent = statistic.text is _percent
    limits = [
        _percent(t) if percent else f"{t:g}".replace("0.", ".").replace("-", "−")
        for t in statistic.thresholds
    ]
    if statistic.opposite:
        _, beyond, between = statistic.opposite
        parts: list[Part] = [start, _mark(-1), f" {beyond}   ", _mark(0), f" {between}"]
    else:
        of = "H/ln n " if statistic.by else ""
        parts = [start, _mark(0), f" {of}{'from' if statistic.falling else 'under'} {limits[0]}"]
    marks: list[Part] = [_mark(level) for level in range(1, len(limits) + 1)]
    rest = f"{'under' if statistic.falling else 'from'} {', '.join(limits)}"
    if page.compose(*parts, "   ", *marks, " ", rest).cell_len <= page.width:
        page.line(*parts, "   ", *marks, " ", rest)
    else:
        page.line(*parts)
        indent = len(start) + len(marks) + 1
        page.hang([start, *marks, " "], wrap(page.say(rest), page.width - indent), indent)


def _grid(
    page: Page,
    doc: Doc,
    layers: Mapping[int, Sequence[Doc]],
    show: str,
    named: Collection[int],
    layout: _Layout,
) -> list[Text]:
    """Title, heading, and a line for each layer; of a deep model only for the first, the last,
    the named, and a word on those between."""
    statistic = STATISTICS[show]
    word, key = statistic.theory
    theory = theory_of(doc).get(key)
    text = exact if statistic.text is number else statistic.text
    expected = "" if theory is None else f"{word} {text(theory)}"
    title = page.say(("  " if layout.indent else "") + statistic.title)
    gap = "   " if len(title) + 3 + len(expected) <= page.width else " "
    lines = [page.compose((title, "bold"), (gap + expected, "dim"))]
    lines.append(_grid_heading(page, layers, layout))
    between: list[int] = []
    for layer in layers:
        if len(layers) > GRID_LAYERS and layer not in {*named, min(layers), max(layers)}:
            between.append(layer)
            continue
        if between:
            median = median_of([head for one in between for head in layers[one]], show)
            skipped = f"… {counted(len(between), 'layer')}, median {statistic.text(median)}"
            lines.append(page.compose((" " * layout.indent + skipped, "dim")))
            between = []
        lines.append(page.compose(*_grid_row(page, layers, layer, show, layout)))
    return lines


def _grid_heading(page: Page, layers: Mapping[int, Sequence[Doc]], layout: _Layout) -> Text:
    heads = max(len(row) for row in layers.values())
    heading = " " * layout.indent
    if layout.number:
        heading += (" " * layout.gap).join(f"h{i}".rjust(1 + layout.number) for i in range(heads))
        heading += "median".rjust(3 + max(layout.number, 6)) if layout.median else ""
    else:  # every second, fourth … head, so that the names do not touch
        pitch = 1 + layout.gap
        step = next(2**i for i in range(20) if 2**i * pitch > len(f"h{heads}"))
        for mark in range(0, math.ceil(heads / layout.merged), step):
            heading = heading.ljust(layout.indent + mark * pitch) + f"h{mark * layout.merged}"
    return page.compose((heading, "dim"))


def _grid_row(
    page: Page, layers: Mapping[int, Sequence[Doc]], layer: int, show: str, layout: _Layout
) -> list[Part]:
    statistic, heads = STATISTICS[show], layers[layer]
    parts: list[Part] = [(f"{layer:>5} ", "bold")] if layout.indent else []
    grouped = len({head.get("kv_head") for head in heads}) < len(heads)
    for i in range(0, len(heads), layout.merged):
        head = max(heads[i : i + layout.merged], key=lambda h: abs(_level(show, h) or 0))
        if i and layout.gap:
            edge = grouped and head.get("kv_head") != heads[i - 1].get("kv_head")
            parts.append((("│" if edge else " ").rjust(layout.gap), "dim"))
        level = _level(show, head)
        parts.append(_mark(level))
        if layout.number:
            style = "" if level is None else _LEVEL_STYLES[level + 1][1]
            text = page.say(statistic.text(head.get(show)))
            parts.append((text.rjust(layout.number), style))
    if layout.median:
        missing = max(map(len, layers.values())) - len(heads)
        width = missing * (1 + layout.number + layout.gap) + 3 + max(layout.number, 6)
        parts.append((page.say(statistic.text(median_of(heads, show))).rjust(width), "bold"))
    return parts


# The heads worth looking at


def _picks(heads: Sequence[Doc], chance: Doc) -> list[tuple[Doc, str]]:
    """At most eight heads with one reason each, widest first: the widest two, the most saturated
    two, the strongest previous/next/itself (over chance), the strongest induction head and sink,
    the flattest, and the farthest from its layer's median among layers not yet named."""
    picks: list[tuple[Doc, str]] = []

    def new(key: str, least: float = -math.inf) -> list[Doc]:
        """Heads not yet picked that have this value, from the largest."""
        named = [head_label(head) for head, _ in picks]
        found = [h for h in heads if h.get(key) is not None and h[key] >= least]
        return sorted((h for h in found if head_label(h) not in named), key=lambda h: -h[key])

    for head, reason in zip(new("after")[:2], ("widest", "second widest"), strict=False):
        picks.append((head, _with_target(reason, head)))
    saturated = sorted((h for h in heads if h.get("saturated")), key=lambda h: -h["saturated"])[:2]
    known = [head_label(head) for head, _ in picks]
    picks += [
        (h, _with_target("most saturated", h)) for h in saturated if head_label(h) not in known
    ]

    roles = [
        (head[key] / (chance.get(key) or 1), i, head, f"{name} {weight(head[key])}")
        for key, name in (
            ("previous", "previous token"),
            ("next", "next token"),
            ("current", "itself"),
        )
        for i, head in enumerate(new(key, least=0.5))
    ]
    picks += [(head, reason) for *_, head, reason in sorted(roles, key=lambda r: -r[0])[:1]]
    inducing = [
        (role["mass"], head)
        for head in new("after")
        for role in (head.get("roles") or {}).get("called", ())
        if role["name"] == "induction"
    ]
    for mass, head in sorted(inducing, key=lambda found: -found[0])[:1]:
        picks.append((head, f"after the same token {weight(mass)}"))
    # Sinks that read the same to two digits are equally strong: then the wider one.
    sinks = sorted(
        new("first", least=0.3), key=lambda h: (-round(h["first"], 2), -(h["after"] or 0))
    )
    picks += [(head, f"first token {weight(head['first'])}") for head in sinks[:1]]
    picks += [(head, "closest to all alike") for head in new("normalised_entropy")[:1]]

    named = {head["layer"] for head, _ in picks}
    apart: list[tuple[float, Doc, str]] = []
    for layer, row in by_layer(heads).items():
        median = median_of(row, "after")
        for head in row if median and layer not in named else ():
            if head.get("after"):
                ratio = head["after"] / median
                reason = f"{ratio:.2g} × its layer's median"
                apart.append((abs(math.log2(ratio)), head, reason))
    farthest = max(apart, key=lambda found: found[0], default=None)
    if farthest and farthest[0] >= 1 and len(picks) < PICKS:
        picks.append(farthest[1:])
    return sorted(picks, key=lambda pick: -(pick[0].get("after") or 0))


def _with_target(reason: str, head: Doc) -> str:
    """The reason, and for a head that looks at one place, that place."""
    target = head.get("attends")
    if not target or target["mass"] < 0.8:
        return reason
    place = target["to"] if target["to"] == "itself" else f"{target['to']} token"
    shown = f"{place} {weight(target['mass'])}"
    return f"{reason}; {shown}" if reason == "widest" else shown


_PICK_COLUMNS = (
    Column("before", "", "before", 8, whole, aligned=False),
    Column("after", "", "after", 9),
    Column("within", "", "within", 8),
    Column("keys", "", "keys", 7),
    Column("saturated", "", "saturated", 11, share, aligned=False),
    Column("gradient", "", "gradient", 10, fraction),
    Column("largest", "", "largest", 9),
)
_WHY_WIDTH = 24


def _print_picks(page: Page, picks: Sequence[tuple[Doc, str]], total: int) -> None:
    note = f"{len(picks)} of {count(total)}, widest first; all of them: --table"
    page.hang(
        [("Heads worth looking at   ", "bold")], wrap(note, page.text_width - 25), 25, style="dim"
    )
    page.line()
    drop = ("within", "gradient", "largest", "before")
    columns = fit(_PICK_COLUMNS, drop, page.width - HEAD_WIDTH - 3 - _WHY_WIDTH)
    start = HEAD_WIDTH + sum(column.width for column in columns) + 3
    beside = start + _WHY_WIDTH <= page.width
    if not beside:  # the reason goes below
        columns = fit(_PICK_COLUMNS, drop, page.width - HEAD_WIDTH)
    names = "".join(column.name.rjust(column.width) for column in columns)
    page.line((f"  {'head':<6}{names}{'   why' if beside else ''}", "dim"))
    for head, reason in picks:
        row: list[Part] = [(f"  {head_label(head):<6}", "bold")]
        row += [cell(page, column, head.get(column.key)) for column in columns]
        if beside:
            page.hang([*row, "   "], wrap(page.say(reason), page.width - start), start)
        else:
            page.line(*row)
            page.text([" " * HEAD_WIDTH], reason, HEAD_WIDTH)
    page.line()

"""The stages of a trace, one head's matrices with token labels, as lines for the terminal and as
HTML for notebooks. Both draw the same blocks. Reads trace documents only (plain dicts).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from scaledot.numerals import count, counted, exact, number, ranges, weight
from scaledot.screen import WIDE, Page, Part, cut, pad, point, printed, wrap
from scaledot.tokens import safe

Doc = Mapping[str, Any]

_LABEL = 8  # cells of a label
_CELL = 9  # cells of a number and the gap before it
_ROW_LABEL = 2 + _LABEL
_ASIDE = 8  # the column of effective keys
_OUTPUT_COLUMNS = 4
_OUTPUT_ASIDE = 15  # "…" and the row's length
_HTML_KEYS = 24
_PART = re.compile(r"(\S+) (\d+)/(\d+)$")


@dataclass(frozen=True)
class _Cell:
    text: str
    hidden: bool = False  # not visible to this query
    weight: float = 0.0  # drawn as a glyph or a shade


@dataclass(frozen=True)
class _Block:
    """A stage: its title, its notes, and rows of cells under one label a column."""

    name: str
    notes: list[str]
    columns: list[str]
    rows: list[tuple[str, list[_Cell]]]
    asides: tuple[str, list[str]] = ("", [])  # one more column, with its heading
    places: tuple[str, ...] = ()  # each column's position, where not all are shown


@dataclass(frozen=True)
class _Shown:
    """The queries and keys shown; ``note`` says which if not all."""

    queries: list[int]
    keys: list[int]
    outputs: int  # columns of the output
    note: list[str]


def print_trace(
    console: Console,
    doc: Doc,
    *,
    rows: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
) -> None:
    """Prints every stage of a trace document. ``rows`` and ``keys`` choose queries and keys, the
    first and the last from 0; without them, of a trace too long for the width, the last queries
    and their heaviest keys that fit."""
    with Page(console) as page:
        shown = _choose(doc, (page.width - _ROW_LABEL - _ASIDE) // _CELL, rows, keys)
        _header(page, doc, shown)
        _stages(page, _blocks(doc, shown))
        label, terms = _sum(doc, shown)
        if label:
            start = page.cut(label, page.text_width // 2) + "  =  "
            indent = cell_len(start)
            page.hang([start], wrap(page.say(terms), page.text_width - indent), indent)


def _stages(page: Page, blocks: Sequence[_Block]) -> None:
    """One under the other, or on a wide page two and two."""
    drawn = [_lines(page, block, heading=True) for block in blocks]
    at = 0
    while at < len(blocks):
        pair = drawn[at : at + 2]
        widths = [max(line.cell_len for line in lines) for lines in pair]
        if page.width >= WIDE and len(pair) == 2 and sum(widths) + 4 <= page.width:
            page.beside(pair[0], pair[1])
            at += 2
        else:  # only the scores and the weights name their columns again
            heading = at == 0 or blocks[at].asides[0] == "keys" or page.width >= WIDE
            page.lines += _lines(page, blocks[at], heading)
            at += 1
        page.line()


def trace_text(doc: Doc, width: int = 100) -> str:
    """What :func:`print_trace` prints, without colour."""
    return printed(lambda plain: print_trace(plain, doc), width)


def trace_html(doc: Doc) -> str:
    """The same table as an HTML fragment: no script, no link, all text escaped. It takes the
    page's own colours, light or dark."""
    shown = _choose(doc, _HTML_KEYS, None, None)
    parts = ['<div class="scaledot-trace">', f"<style>{_CSS}</style>"]
    parts.append(f"<p><b>{_html(_title(doc))}</b></p>")
    for name, pieces in _fields(doc, shown):
        parts.append(f"<p>{_html(name)}: {_html(' · '.join(pieces))}</p>")
    for block in _blocks(doc, shown):
        caption = f"<b>{_html(block.name)}</b> {_html('   '.join(block.notes))}"
        columns = [*block.columns, *([block.asides[0]] if block.asides[0] else [])]
        parts.append(f"<table><caption>{caption}</caption>")
        if block.rows and block.columns:
            heads = "".join(f'<th scope="col">{_html_label(label)}</th>' for label in columns)
            parts.append(f"<thead><tr><td></td>{heads}</tr></thead>")
        for i, (label, cells) in enumerate(block.rows):
            parts.append(f'<tr><th scope="row">{_html_label(label)}</th>')
            parts += [_td(cell) for cell in cells]
            parts += [f"<td>{_html(aside)}</td>" for aside in block.asides[1][i : i + 1]]
            parts.append("</tr>")
        parts.append("</table>")
    label, terms = _sum(doc, shown)
    parts.append(f"<p>{_html(label)} = {_html(terms)}</p>" if label else "")
    return "".join([*parts, "</div>"])


_CSS = (
    ".scaledot-trace{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    "overflow-x:auto}"
    ".scaledot-trace p{margin:0;white-space:pre-wrap}"
    ".scaledot-trace table{border-collapse:collapse;margin:.8em 0;font:inherit;color:inherit}"
    ".scaledot-trace caption{text-align:left;white-space:pre;color:inherit}"
    ".scaledot-trace th,.scaledot-trace td{border:0;padding:0 .6em;text-align:right;"
    "white-space:pre;font-weight:normal;background:none;color:inherit}"
    ".scaledot-trace tr,.scaledot-trace thead{background:none;border:0}"
    ".scaledot-trace tr th:first-child{text-align:left}"
    ".scaledot-trace .hidden{opacity:.5}"
)


def _html(text: str) -> str:
    return escape(safe(text))


def _html_label(label: str) -> str:
    return escape(cut(label, 2 * _LABEL))


def _td(cell: _Cell) -> str:
    name = ' class="hidden"' if cell.hidden else ""
    # A shade that leaves the text readable on white and on black.
    shade = f' style="background:rgba(14,140,170,{0.5 * cell.weight:.2f})"' if cell.weight else ""
    return f"<td{name}{shade}>{escape(cell.text)}</td>"


# What stands above and below the stages


def _title(doc: Doc) -> str:
    if doc.get("text") is None:
        queries, keys = _shape(doc)
        noun = "query" if queries == 1 else "queries"
        title = f"scaledot.trace  {queries} {noun} × {counted(keys, 'key')}"
        lead = (doc.get("shape") or ())[:-2]
        several = math.prod(lead) > 1
        return title + (f", the first of {' × '.join(map(str, lead))}" if several else "")
    return f'scaledot trace  "{doc["text"]}"{_place(doc)}'


def _place(doc: Doc) -> str:
    return "" if doc.get("layer") is None else f"  layer {doc['layer']}, head {doc['head']}"


def _fields(doc: Doc, shown: _Shown) -> list[tuple[str, list[str]]]:
    model, tokens = doc.get("model"), doc.get("tokens")
    fields: list[tuple[str, list[str]]] = []
    if model:
        pieces = [model["name"]]
        pieces += [f"d_k {model['d_k']}"] if model.get("d_k") else []
        pieces += [f"kv head {doc['kv_head']}"] if doc.get("kv_head") is not None else []
        fields.append(("model", pieces))
    if tokens:
        causal = ["causal"] if doc.get("causal") else []
        fields.append(("text", [counted(len(tokens), "token"), *causal, *_spelling(tokens)]))
    if shown.note:
        fields.append(("shown", shown.note))
    return fields


def _spelling(tokens: Sequence[str]) -> list[str]:
    """What the signs in the labels mean, as far as there are any."""
    signs = (("␣", "␣ is a space"), ("↵", "↵ a newline"), ("⇥", "⇥ a tab"))
    said = [text for sign, text in signs if any(sign in token for token in tokens)]
    for token in tokens:
        if found := _PART.search(token):
            words = {2: "two", 3: "three", 4: "four"}
            parts = words.get(int(found[3]), found[3])
            said.append(f"{found[1].lstrip('␣')} takes {parts} byte tokens")
            break
    return [", ".join(said)] if said else []


def _header(page: Page, doc: Doc, shown: _Shown) -> None:
    if doc.get("text") is None:
        command, _, rest = _title(doc).partition("  ")
        page.line((command, "bold"), f"  {rest}")
    else:
        place = _place(doc)
        room = page.width - len(f'scaledot trace  ""{place}')
        page.line(("scaledot trace", "bold"), f'  "{page.cut(doc["text"], room)}"{place}')
    page.line()
    fields = _fields(doc, shown)
    for name, pieces in fields:
        page.field(name, pieces)
    if fields:
        page.line()


def _sum(doc: Doc, shown: _Shown) -> tuple[str, str]:
    """One query's output as the sum it is: the last with three keys above .1, else the last."""
    stages = {stage["name"]: stage["matrix"] for stage in doc["stages"]}
    matrix = stages.get("dropped") or stages.get("weights") or []
    queries, keys = _labels(doc)
    if not shown.queries or not keys or not matrix:
        return "", ""
    many = [q for q in shown.queries if sum((w or 0) > 0.1 for w in matrix[q]) >= 3]
    query = many[-1] if many else shown.queries[-1]
    heaviest = sorted(((w or 0, -k) for k, w in enumerate(matrix[query])), reverse=True)
    heaviest = [(w, -k) for w, k in heaviest if w > 0]
    if not heaviest:
        return queries[query], "0: no key is visible"
    named = [(w, k) for w, k in heaviest if w > 0.1] or heaviest[:3]
    terms = [f"{weight(w)} v[{keys[k]}]" for w, k in named]
    return queries[query], " + ".join(terms + ["…"] * (len(named) < len(heaviest)))


# Which queries and keys


def _shape(doc: Doc) -> tuple[int, int]:
    shape = doc.get("shape") or doc["stages"][0]["shape"]
    return shape[-2], shape[-1]


def _labels(doc: Doc) -> tuple[list[str], list[str]]:
    queries, keys = _shape(doc)
    tokens = [safe(token) for token in doc.get("tokens") or ()]
    return (
        tokens if len(tokens) == queries else [f"q{i}" for i in range(queries)],
        tokens if len(tokens) == keys else [f"k{i}" for i in range(keys)],
    )


def _choose(
    doc: Doc, fit: int, rows: tuple[int, int] | None, keys: tuple[int, int] | None
) -> _Shown:
    n_queries, n_keys = _shape(doc)
    fit = max(fit, 1)
    outputs = min(max(fit - 1, 1), _OUTPUT_COLUMNS)
    queries, columns = _span(rows, n_queries), _span(keys, n_keys)
    if rows is None and n_keys > fit:
        queries = queries[-fit:]
    which = f"{counted(min(len(columns), fit), 'key')} of {n_keys}"
    if len(columns) > fit and keys is None:
        weights = next(stage["matrix"] for stage in doc["stages"] if stage["name"] == "weights")
        mass = [sum(weights[q][k] or 0 for q in queries) for k in columns]
        columns = sorted(sorted(columns, key=lambda k: -mass[k])[:fit])
        which = f"their {counted(fit, 'heaviest key')}"
    columns = columns[:fit]
    if len(queries) == n_queries and len(columns) == n_keys:
        return _Shown(queries, columns, outputs, [])
    if doc.get("tokens"):  # counted from 1, as people count tokens
        first = f"tokens {ranges([q + 1 for q in queries])} of {n_queries}"
    else:
        first = f"queries {ranges(queries)} of {n_queries}"
    options = ["others: --rows, --keys"] if doc.get("text") is not None else []
    return _Shown(queries, columns, outputs, [first, which, *options])


def _span(ends: tuple[int, int] | None, n: int) -> list[int]:
    return list(range(n) if ends is None else range(max(ends[0], 0), min(ends[1] + 1, n)))


# The blocks


def _blocks(doc: Doc, shown: _Shown) -> list[_Block]:
    blocks: list[_Block] = []
    before: Any = None
    for i, stage in enumerate(doc["stages"], 1):
        name = f"{i} {stage['name']}"
        shape = " × ".join(str(n) for n in stage["shape"][-2:])
        notes = [_says(doc, stage["name"]), shape, *_remarks(doc, stage)]
        if stage["name"] == "output":
            blocks.append(_output(doc, stage, name, notes, shown))
        elif stage["name"] == "masked" and stage["matrix"] == before:
            blocks.append(_Block(name, ["hides nothing here", shape], [], []))
        else:
            blocks.append(_matrix(doc, stage, name, notes, shown))
        before = stage["matrix"]
    return blocks


def _says(doc: Doc, stage: str) -> str:
    scale, value = doc.get("scale"), doc.get("value") or doc.get("rule")
    factor = f"× {scale:.4g}" if scale is not None else "× scale"
    cap = f"{doc['softcap']:g}" if doc.get("softcap") else "c"
    return {
        "scores": "q·k",
        "scaled": f"{factor} = {value}" if value else factor,
        "capped": f"{cap}·tanh(x/{cap})",
        "masked": "later keys become −∞" if doc.get("causal") else "hidden keys become −∞",
        "weights": "softmax: every row adds to 1"
        if doc.get("sink") is None
        else "softmax: every row and its sink add to 1",
        "dropped": "dropout: some become 0, the rest grow",
        "output": "weights · v",
    }.get(stage, "")


def _remarks(doc: Doc, stage: Doc) -> list[str]:
    if stage["name"] == "masked":
        queries, keys = _shape(doc)
        return [f"{count(doc['hidden'])} of {count(queries * keys)} hidden"]
    if stage.get("variance") is None:
        return []
    theory = f", theory {exact(stage['theory'])}" if stage.get("theory") is not None else ""
    return [f"variance {number(stage['variance'])}{theory}"]


def _matrix(doc: Doc, stage: Doc, name: str, notes: list[str], shown: _Shown) -> _Block:
    queries, keys = _labels(doc)
    weights = stage["name"] in ("weights", "dropped")
    visible: Any = doc.get("visible")
    values = {q: {k: _float(stage["matrix"][q][k]) for k in shown.keys} for q in shown.queries}
    seen = [x for q, row in values.items() for k, x in row.items() if not visible or visible[q][k]]
    decimals = _decimals(seen, most=2)
    rows: list[tuple[str, list[_Cell]]] = []
    for q, row in values.items():
        cells = []
        for k, x in row.items():
            text = weight(x) if weights else _fixed(x, decimals)
            mass = x if weights and x is not None and 0 < x <= 1 else 0.0
            cells.append(_Cell(text, bool(visible) and not visible[q][k], mass))
        rows.append((queries[q], cells))
    asides: tuple[str, list[str]] = ("", [])
    if stage["name"] == "weights" and doc.get("keys"):
        asides = ("keys", [number(doc["keys"][q]) for q in shown.queries])
    some = bool(doc.get("tokens")) and len(shown.keys) < len(keys)
    places = tuple(count(k + 1) for k in shown.keys) if some else ()
    return _Block(name, notes, [keys[k] for k in shown.keys], rows, asides, places)


def _output(doc: Doc, stage: Doc, name: str, notes: list[str], shown: _Shown) -> _Block:
    queries, _ = _labels(doc)
    columns, shown_columns = stage["shape"][-1], shown.outputs
    values = [[_float(x) for x in stage["matrix"][q]] for q in shown.queries]
    first = [row[:shown_columns] for row in values]
    decimals = _decimals([x for row in first for x in row], most=3)
    rows = []
    lengths = []
    some = columns > shown_columns
    for q, row, whole in zip(shown.queries, first, values, strict=True):
        rows.append((queries[q], [_Cell(_fixed(x, decimals)) for x in row]))
        known = [x for x in whole if x is not None]
        length = math.hypot(*known) if len(known) == len(whole) else None
        lengths.append(("…" if some else "") + point(number(length), _CELL))
    cut_off = f"{shown_columns} of {columns} columns; " if some else ""
    return _Block(name, [*notes, f"{cut_off}length of each row"], [], rows, ("length", lengths))


def _float(x: Any) -> float | None:
    """A number of the document: infinities are strings there, NaN is null."""
    return None if x is None else float(x)


def _decimals(values: Sequence[float | None], most: int) -> int:
    """Three digits for the largest, the same places for all."""
    finite = [abs(x) for x in values if x is not None and math.isfinite(x)]
    largest = max(finite, default=0.0)
    limits = {3: 0.9995, 2: 9.995, 1: 99.95}
    return next((d for d, limit in limits.items() if d <= most and largest < limit), 0)


def _fixed(x: float | None, decimals: int) -> str:
    if x is None or not math.isfinite(x) or abs(x) >= 999_999.5:
        return number(x)
    text = f"{abs(x):,.{decimals}f}"
    return f"−{text}" if x < 0 and text.strip("0.,") else text


# The blocks as lines


def _lines(page: Page, block: _Block, heading: bool) -> list[Text]:
    name = f"{block.name:<11}"
    notes = [page.say(note) for note in block.notes if note]
    lines: list[Text] = []
    for i, text in enumerate(_spaced(notes, page.text_width - 11)):
        lines.append(page.compose((name if i == 0 else " " * 11, "bold"), text))
    aside, asides = block.asides
    if heading and block.places:
        places = "".join(place.rjust(_CELL) for place in block.places)
        lines.append(page.compose((" " * _ROW_LABEL + places, "dim")))
    if heading and block.columns:
        labels = "".join(pad(_short(page, label), _CELL, right=True) for label in block.columns)
        lines.append(page.compose((" " * _ROW_LABEL + labels, "cyan"), (aside.rjust(_ASIDE), "")))
    for i, (label, cells) in enumerate(block.rows):
        parts: list[Part] = [("  " + pad(_short(page, label), _LABEL), "cyan")]
        parts += [(_drawn(page, cell), "dim" if cell.hidden else "") for cell in cells]
        if asides:
            text = page.say(asides[i])
            parts.append(point(text, _ASIDE) if aside == "keys" else text.rjust(_OUTPUT_ASIDE))
        lines.append(page.compose(*parts))
    return lines


def _spaced(notes: Sequence[str], width: int) -> list[str]:
    """The notes three spaces apart, on as many lines as they need."""
    lines: list[str] = []
    for note in notes:
        if lines and cell_len(lines[-1]) + 3 + cell_len(note) <= width:
            lines[-1] += "   " + note
        else:
            lines += wrap(note, width)
    return lines


def _drawn(page: Page, cell: _Cell) -> str:
    text = page.say(cell.text)
    glyph = " ▁▂▃▄▅▆▇█"[round(8 * cell.weight)]
    if glyph != " ":
        text = page.say(glyph) + text.rjust(4 + page.ascii)  # ASCII glyphs are digits: "7 1.00"
    return pad(text, _CELL, right=True)


def _short(page: Page, label: str) -> str:
    """A label of at most 8 cells that keeps its part number."""
    label = page.say(label)
    if cell_len(label) <= _LABEL or not (part := _PART.search(label)):
        return page.cut(label, _LABEL)
    end = f" {part[2]}/{part[3]}"
    return page.cut(label.removesuffix(end), _LABEL - len(end)) + end

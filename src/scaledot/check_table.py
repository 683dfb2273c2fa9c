"""The verdict on an attention function, as lines for the terminal: what is wrong with the input
that shows it, what differs by convention, what holds. Reads check documents only (plain dicts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from scaledot.numerals import counted, size
from scaledot.screen import Page, Part, pad, printed, wrap

Doc = Mapping[str, Any]

KIND_STYLE = {"wrong": "red", "differs": "yellow", "ok": "green", "skipped": "dim"}

_KIND, _NAME = 9, 18
_NARROW = 60  # below, a property's text stands under its name


def print_check(console: Console, doc: Doc, *, wrote: tuple[str, int] | None = None) -> None:
    """Prints a check document: what is wrong first, each with its smallest input, then what
    differs by convention, what holds, what was not supported or not judged, and the counts.
    ``wrote`` is the saved file's (path, bytes)."""
    with Page(console) as page:
        _title(page, doc)
        by_status: dict[str, list[Doc]] = {}
        for p in doc["properties"]:
            by_status.setdefault(p["status"], []).append(p)
        for p in by_status.get("wrong", ()):
            _property(page, "wrong", p["name"], p["result"])
            _evidence(page, p)
        for status in ("differs", "ok"):
            for p in by_status.get(status, ()):
                _property(page, status, p["name"], p["result"])
        for status, what in (("unsupported", "not supported"), ("unjudged", "not judged")):
            reasons: dict[str, list[str]] = {}
            for p in by_status.get(status, ()):
                reasons.setdefault(p["result"], []).append(p["name"])
            for reason, names in reasons.items():
                _property(page, "skipped", what, f"{reason}: {', '.join(names)}")
        page.line()
        _count(page, {status: len(found) for status, found in by_status.items()})
        if wrote:
            path, length = wrote
            page.line()
            page.text(["Wrote "], f"{path} ({size(length)}: every property and its input)", 6)


def check_text(doc: Doc, width: int = 100) -> str:
    """What :func:`print_check` prints, without colour."""
    return printed(lambda plain: print_check(plain, doc), width)


def _title(page: Page, doc: Doc) -> None:
    layout = "as torch's sdpa"
    if doc["layout"] == "bshd":
        layout += " but (batch, length, heads, dim)"
    about = f"{layout} · {doc['device']} · {doc['dtype']}"
    name = page.say(doc["function"])
    if cell_len(f"scaledot check  {name}   {about}") <= page.width:
        page.title("check", name, f" {about}")
        return
    page.title("check", name)
    page.lines.pop()
    for line in wrap(page.say(about), page.text_width - 2):
        page.line(f"  {line}")
    page.line()


def _columns(page: Page) -> tuple[int, int]:
    """(where a property's name ends, where its text begins)."""
    return (_KIND + 2, _KIND + 2 + _NAME) if page.width >= _NARROW else (_KIND + 2, 4)


def _property(page: Page, kind: str, name: str, result: str) -> None:
    start, indent = _columns(page)
    label = [f"  {pad(kind, _KIND)}", pad(name, _NAME)]
    parts: list[Part] = [(label[0], KIND_STYLE[kind]), label[1]]
    if start > indent:
        page.line(*parts)
        page.text([" " * indent], result, indent)
    else:
        page.text(parts, result, indent)


def _evidence(page: Page, p: Doc) -> None:
    """The input, what was expected, what came, the usual cause."""
    readings = {name: p[name] for name in ("expected", "came") if p[name] is not None}
    values = {name: page.say(r["value"]) for name, r in readings.items()}
    start, indent = _columns(page)
    indent = max(indent, 4)
    width = max((cell_len(values[n]) for n, r in readings.items() if r["how"]), default=0)
    beside = indent + width + 4 + max(
        (cell_len(page.say(r["how"])) for r in readings.values()), default=0
    )  # fmt: skip
    lines = [("input", p["input"])]
    for name, r in readings.items():
        if r["how"] and beside <= page.text_width:
            lines.append((name, f"{pad(values[name], width)}    {r['how']}"))
        else:
            lines.append((name, values[name] + (f" = {r['how']}" if r["how"] else "")))
    lines.append(("usual cause", p["cause"]))
    for name, text in lines:
        if not text:
            continue
        if start > indent:
            page.line((" " * indent + name, "cyan"))
            page.text([" " * (indent + 2)], text, indent + 2)
        else:
            page.text([(" " * (start + 2) + pad(name, _NAME - 2), "cyan")], text, indent)


def _count(page: Page, n: Mapping[str, int]) -> None:
    differ = "differs" if n.get("differs") == 1 else "differ"
    words = {
        "wrong": "wrong", "differs": f"{differ} by convention", "ok": "ok",
        "unsupported": "not supported", "unjudged": "not judged",
    }  # fmt: skip
    parts = [f"{n[status]} {what}" for status, what in words.items() if n.get(status)]
    total = sum(n.values())
    properties = counted(total, "property") if total == 1 else f"{total} properties"
    page.text([""], f"{properties}: {', '.join(parts)}", 0)

"""Whole screens against golden texts, and the rules that hold for every screen.

The documents in ``golden/`` are measured: the unidic imitator on 私は東京でリンゴを食べました。 and
SmolLM2 on "When Mary and John went to the store, John gave a drink to"; their findings are those
of the reference screens. ``python tests/test_terminal.py`` writes the golden texts anew: read the
difference before keeping it.
"""

import copy
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from scaledot import head_grid, head_table, numerals, screen, terminal
from scaledot.screen import Page, Screen

GOLDEN = Path(__file__).parent / "golden"
ANSI = re.compile(r"\x1b\[([\d;]*)m")

Doc = dict[str, Any]


def read(name: str) -> Doc:
    return json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))


def show(
    doc: Doc,
    width: int = 100,
    color: bool = False,
    no_color: bool = False,
    ascii: bool = False,
    **options: Any,
) -> str:
    """What a console of that width is sent."""
    file = io.StringIO()
    console = Screen(
        file=file,
        width=width,
        ascii=ascii,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=no_color,
    )
    if doc["format"] == "scaledot/trace":
        terminal.print_trace(console, doc, **options)
    elif doc["format"] == "scaledot/heads":
        terminal.print_heads(console, doc)
    else:
        terminal.print_audit(console, doc, **options)
    return file.getvalue()


def next_commands(doc: Doc, head: str) -> list[tuple[str, str]]:
    layer, index = head.split(".")
    audit, trace = doc["commands"]["audit"], doc["commands"]["trace"]
    return [
        (f"{audit} --head {head}", "one head in full"),
        (f"{audit} --show keys", "a grid of layers × heads"),
        (f"{trace} --layer {layer} --head {index}", "watch one head work"),
    ]


def small(width: int, **options: Any) -> str:
    doc = read("audit-small")
    commands = next_commands(doc, "0.3")
    return show(doc, width, wrote=("audit.json", 38_123), next_commands=commands, **options)


def big(width: int, **options: Any) -> str:
    doc = read("audit-big")
    commands = next_commands(doc, "18.8")
    return show(doc, width, wrote=("audit.json", 612_345), next_commands=commands, **options)


def many(layers: int, heads: int, kv_heads: int | None = None) -> Doc:
    """The big audit's heads dealt out to another shape of model."""
    doc = read("audit-big")
    kv_heads = kv_heads or heads
    source = doc["heads"]
    doc["heads"] = [
        source[(layer * 37 + head * 11) % len(source)]
        | {"layer": layer, "head": head, "kv_head": head * kv_heads // heads}
        for layer in range(layers)
        for head in range(heads)
    ]
    layer = doc["layers"][0] | {"heads": heads, "kv_heads": kv_heads}
    doc["layers"] = [layer | {"index": index} for index in range(layers)]
    doc["model"] |= {"layers": layers, "heads": heads, "kv_heads": kv_heads}
    doc["findings"] = []
    return doc


SCREENS: dict[str, Callable[[], str]] = {
    "audit-small-80": lambda: small(80),
    "audit-small-100": lambda: small(100),
    "audit-small-160": lambda: small(160),
    "audit-small-40": lambda: small(40),
    "audit-small-ascii": lambda: small(80, ascii=True),
    "audit-small-keys": lambda: small(80, show="keys"),
    "audit-big-80": lambda: big(80),
    "audit-big-100": lambda: big(100),
    "audit-big-160": lambda: big(160),
    "audit-big-head": lambda: big(100, head=(18, 8)),
    "audit-deep": lambda: show(many(60, 32, 8), 100, show="first"),
    "trace-80": lambda: show(read("trace"), 80),
    "trace-160": lambda: show(read("trace"), 160),
    "trace-ascii": lambda: show(read("trace"), 80, ascii=True),
    "trace-long": lambda: show(read("trace-long"), 80),
}


@pytest.mark.parametrize("name", SCREENS)
def test_golden(name: str) -> None:
    assert SCREENS[name]() == (GOLDEN / f"{name}.txt").read_text("utf-8")


# What the specification shows, word for word


SMALL_80 = """\
           score variance                 effective saturated gradient largest
    head   before   after  ⅛  1  8  64 512     keys      rows  Σp(1−p)   score
  theory       29    1.00  ···┃·········      10.0        0 %     0.86    2.79

     0.0    1,245   42.9      ┃────●           1.86       0 %     0.32   27.9
     0.1    2,928  101        ┃──────●         1.60       0 %     0.27   38.3
     0.2    4,627  160        ┃──────●         1.45       0 %     0.21   45.3
     0.3    3,891  134        ┃──────●         1.44      47 %     0.22   48.1
"""

SMALL_LEGEND = """\
  median      861   29.7      ┃────●           1.78       0 %     0.30   27.8

  theory     independent unit-variance q and k: d_k before scaling, 1 after (┃)
  keys       exp(mean entropy): 1 = a single key, 15 = all keys alike
  saturated  rows where one key holds over .998: bfloat16 stores exactly 1
  gradient   what softmax passes back: 0 = nothing, .93 = all keys alike

Findings

  1 look  Scores are wider than theory in 16 of 16 heads
          where   within-row variance above 2, layers 0–3
          seen    Within rows, all that softmax sees: 5.83 (3.0) to 156 (0.2),
                  median 27.1; theory 1. Over all pairs, as above: 6.67 to 160,
                  median 29.7.
          means   The factor applied is 1/√d_k, as configured: the width was
                  learned. Wider scores make sharper rows.
"""

BIG_80 = """\
  Score variance after scaling   theory 1
         h0     h1     h2     h3     h4     h5     h6     h7     h8   median
    0 ·0.98  ·0.71  ·1.29 │·1.89  ·1.46  ·1.41 │·1.13  ·1.34  ▂2.28     1.34
    1 ▃4.09  ▃5.11  ▅19.0 │·1.61  ·0.85  ▂3.06 │▃4.86  ▂2.97  ▂3.54     3.54
    2 ▂2.12  ▄11.0  ▂2.80 │▃5.40  ▄13.5  ▃4.74 │▂3.00  ▂3.94  ▃5.12     4.74
"""

BIG_80_PICKS = """\
  ▽ below ½   · ½ to 2   ▂▃▄▅▆▇█ from 2, 4, 8, 16, 32, 64, 128
  │ parts the heads that share one kv head    --show keys: another statistic

Heads worth looking at   6 of 270, widest first; all of them: --table

  head    before    after   keys  saturated  largest   why
  18.8     5,769    90.1    1.00      100 %     8.64   widest; first token >.99
  18.7     5,036    78.7    1.00      100 %     8.36   first token >.99
  7.7      4,112    64.3    1.59        0 %    13.3    8.5 × its layer's median
  16.0     2,670    41.7    1.72        0 %     4.18   previous token .80
  17.3     2,378    37.2    1.03       38 %     6.94   first token >.99
  1.4         55     0.85   5.08        0 %     5.49   closest to all alike
"""

TRACE = """\
4 weights  softmax: every row adds to 1   6 × 6
                The  ␣猫 1/3   猫 2/3   猫 3/3     ␣sat        .    keys
  The         █1.00        0        0        0        0        0    1.00
  ␣猫 1/3     ▅ .66    ▃ .34        0        0        0        0    1.90
  猫 2/3      ▂ .26    ▁ .09    ▅ .65        0        0        0    2.33
  猫 3/3      ▁ .18      .05    ▃ .37    ▃ .40        0        0    3.29
  ␣sat        ▂ .21      .06    ▂ .30    ▂ .30    ▁ .13        0    4.41
  .            <.01     <.01     <.01     <.01     <.01    █ .99    1.04

5 output   weights · v   6 × 64   4 of 64 columns; length of each row
"""

TRACE_END = """\
  .           0.066    0.022    0.009    0.016     …     0.62

␣sat  =  .30 v[猫 3/3] + .30 v[猫 2/3] + .21 v[The] + .13 v[␣sat] + …
"""


def test_screens_are_those_of_the_specification() -> None:
    assert SMALL_80 in small(80)
    assert SMALL_LEGEND in small(80)
    assert BIG_80 in big(80)
    assert BIG_80_PICKS in big(80)
    assert TRACE in show(read("trace"), 80)
    assert show(read("trace"), 80).endswith(TRACE_END)


# Every width


def lines(text: str) -> list[str]:
    return text.split("\n")


def too_long(text: str, width: int) -> list[str]:
    return [line for line in lines(text) if cell_len(line) > width]


def short_commands(doc: Doc) -> Doc:
    """A word of a command is never broken, so the widest must fit."""
    for finding in doc.get("findings", ()):
        finding["next"] = "scaledot audit audit.json --head 18.8"
    return doc


def with_parts(doc: Doc) -> Doc:
    """The same with a made-up induction mass and entropy beyond width for each head."""
    for i, head in enumerate(doc["heads"]):
        mass = {"name": "induction", "label": "after the same token", "rows": 9,
                "mass": (i * 37 % 100) / 100, "chance": 0.04, "without_first": None}  # fmt: skip
        called = [{"name": "induction", "mass": mass["mass"]}] if mass["mass"] > 0.5 else []
        head["roles"] = {"masses": [mass], "called": called, "broad": False, "distance": None,
                         "distance_chance": None}  # fmt: skip
        head["width"] = None if i % 7 == 0 else {"excess": (i * 53 % 400) / 100 - 3}
    return doc


WIDTHS = st.integers(40, 200)
SMALL, BIG = (short_commands(with_parts(read(f"audit-{name}"))) for name in ("small", "big"))
TRACES = [read("trace"), read("trace-long")]


@settings(max_examples=40)
@given(WIDTHS, st.sampled_from([*terminal.STATISTICS, "table", "head"]), st.booleans())
def test_no_line_is_wider_than_the_terminal(width: int, what: str, ascii: bool) -> None:
    options: Doc = {"table": True} if what == "table" else {"show": what}
    for doc, name, head in ((SMALL, "small", (0, 3)), (BIG, "big", (18, 8))):
        if what == "head":  # of an audit without those parts
            doc, options = short_commands(read(f"audit-{name}")), {"head": head}
        text = show(doc, width, ascii=ascii, **options)
        assert not too_long(text, width)


@settings(max_examples=40)
@given(WIDTHS, st.sampled_from(TRACES), st.booleans())
def test_no_line_of_a_trace_is_wider_than_the_terminal(width: int, doc: Doc, ascii: bool) -> None:
    assert not too_long(show(doc, width, ascii=ascii), width)


@settings(max_examples=40)
@given(WIDTHS, st.integers(1, 130))
def test_no_grid_is_wider_than_the_terminal(width: int, heads: int) -> None:
    assert not too_long(show(many(2, heads), width, show="keys"), width)


def columns(width: int) -> list[str]:
    return [column.key for column in head_table._table_columns(width)]


def test_columns_go_in_the_stated_order() -> None:
    everything = columns(150)
    assert len(everything) == 12
    picture = ["before", "after", "bar", "keys", "saturated", "gradient", "largest", "attends"]
    assert columns(149) == columns(96) == picture
    for width, gone in ((80, "attends"), (77, "bar"), (61, "gradient"), (52, "largest")):
        picture.remove(gone)
        assert columns(width) == picture
    assert columns(44) == columns(40) == ["after", "keys", "saturated"]


def test_a_wide_bar_has_two_cells_an_octave() -> None:
    wide, normal = small(150), small(149)
    assert "┃──────────●" in wide  # 42.9 is 5.4 octaves above 1
    assert "┃────●" in normal


def test_grids_give_way_step_by_step() -> None:
    def row(heads: int, width: int, kv_heads: int | None = None) -> str:
        text = show(many(5, heads, kv_heads), width, show="within")
        return next(line for line in lines(text) if line.startswith("    0 "))

    assert len(row(9, 90)) == 6 + 9 * 7 - 2 + 9  # the median last
    assert re.fullmatch(r"    0( .\d\.\d\d ?| .\d\d\.\d ?)+", row(9, 70))
    assert len(row(12, 80)) <= 80
    assert "▄14.1 ▄10.9" in row(12, 80)  # numbers stay, a space less between them
    assert set(row(32, 80, 8)) <= set("    0 │·▽▂▃▄▅▆▇█")
    assert row(32, 80, 8).count("│") == 7
    assert len(row(32, 60)) == 6 + 32
    assert len(row(128, 80)) == 6 + 64
    assert "more extreme of 2 neighbours" in show(many(5, 128), 80, show="within")


def test_deep_models_are_abridged() -> None:
    text = show(many(60, 8), 100)
    shown = [line.split()[0] for line in lines(text) if re.match(r" {3,4}\d+ .[\d.]", line)]
    named = {line.split(".")[0].strip() for line in lines(text) if re.match(r"  \d+\.\d ", line)}
    assert shown[0] == "0"
    assert shown[-1] == "59"
    assert set(shown) == named | {"0", "59"}
    assert re.search(r"^      … \d+ layers, median [\d.]+$", text, re.M)
    assert "…" not in show(many(48, 8), 100)


# Colour


def painted(text: str) -> Iterator[tuple[str, str]]:
    """(codes in force, text) of ANSI output."""
    codes, at = "", 0
    for found in ANSI.finditer(text):
        if text[at : found.start()]:
            yield codes, text[at : found.start()]
        codes = "" if found[1] in ("", "0") else found[1]
        at = found.end()
    yield codes, text[at:]


def coloured(text: str) -> list[tuple[str, str]]:
    return [(c, part) for c, part in painted(text) if re.search(r"(^|;)3\d", c)]


CYAN, GREEN, YELLOW, MAGENTA, RED = "36", "32", "33", "35", "31"


def test_only_glyphs_labels_and_kinds_are_coloured() -> None:
    glyphs = re.compile(r"[·●─▂▃▄▅▆▇█▽]+")
    words = {"model", "scale", "text", "run", "layer", "rows", "look", "note", "wrong"}
    measures = set(read("audit-small")["heads"][3]["moments"])
    for text in (small(100, color=True), big(160, color=True), small(100, color=True, head=(0, 3))):
        for _, part in coloured(text):
            assert glyphs.fullmatch(part.strip()) or part.strip() in words | measures, part


def test_colours_say_how_far_from_theory() -> None:
    text = small(100, color=True)
    assert ("35", "──────●") in coloured(text)  # 160: beyond ×8
    assert ("33", "──●") not in coloured(text[: text.index("3.0")])
    assert ("33", "─●") not in coloured(text)
    assert ("33", "──●") in coloured(text)  # 6.67
    assert ("1", "┃") in list(painted(text))
    doc = read("audit-small")
    for head, after in zip(doc["heads"], (0.1, 0.49, 0.5, 1.0, 1.99, 2.0, 7.99, 8.0), strict=False):
        head["after"] = after
    dots = [code for code, part in coloured(show(doc, color=True)) if "●" in part]
    assert dots[:8] == [CYAN, CYAN, GREEN, GREEN, GREEN, YELLOW, YELLOW, MAGENTA]


def test_grid_numbers_are_dim_plain_bold() -> None:
    parts = list(painted(big(100, color=True)))
    assert ("2", "0.98") in parts
    assert ("", "2.28") in parts or any(not c and p.startswith("2.28") for c, p in parts)
    assert ("1", "90.1") in parts
    assert (MAGENTA, "▇") in parts
    assert (YELLOW, "▂") in parts
    assert (GREEN, "·") in parts


def test_kinds() -> None:
    doc = read("audit-small")
    doc["findings"][0]["kind"] = "wrong"
    found = {part.strip(): code for code, part in coloured(show(doc, color=True))}
    assert found["wrong"] == RED
    assert found["note"] == CYAN


def test_trace_labels_are_cyan_and_hidden_cells_dim() -> None:
    parts = list(painted(show(read("trace"), 80, color=True)))
    assert any(code == CYAN and "␣猫 1/3" in part for code, part in parts)
    assert any(code == "2" and part.strip() == "−∞" for code, part in parts)
    assert all(not re.search(r"\d\.\d\d", part) for code, part in parts if "3" in code)


def test_without_colour_bold_and_dim_stay() -> None:
    text = small(100, color=True, no_color=True)
    codes = {code for code, _ in painted(text)}
    assert codes == {"", "1", "2"}
    assert ANSI.sub("", text) == small(100)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(
    monkeypatch: pytest.MonkeyPatch, stream: io.TextIOBase, env: dict[str, str], **settings: Any
) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.print_audit(terminal.console(**settings), read("audit-small"))
    if isinstance(stream, io.StringIO):
        return stream.getvalue()
    stream.flush()
    raw: bytes = stream.buffer.getvalue()  # type: ignore[attr-defined]
    return raw.decode(stream.encoding or "")


def test_console_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def codes(stream: io.StringIO, env: dict[str, str], **settings: Any) -> set[str]:
        return {code for code, _ in painted(printed(monkeypatch, stream, env, **settings))} - {""}

    xterm = {"TERM": "xterm-256color", "COLUMNS": "100"}
    assert codes(_Terminal(), xterm) == {"1", "2", CYAN, YELLOW, MAGENTA}
    assert codes(_Terminal(), xterm | {"NO_COLOR": "1"}) == {"1", "2"}
    assert codes(_Terminal(), xterm, color="never") == {"1", "2"}
    assert codes(_Terminal(), {"TERM": "dumb"}) == set()
    assert codes(io.StringIO(), xterm) == set()
    assert MAGENTA in codes(io.StringIO(), {"NO_COLOR": "1"}, color="always")


def test_a_pipe_is_100_wide_or_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = show(read("audit-small"), 100)
    assert printed(monkeypatch, io.StringIO(), {}) == plain
    assert printed(monkeypatch, io.StringIO(), {"COLUMNS": "zero"}) == plain
    assert printed(monkeypatch, io.StringIO(), {}, color="always", width=None) != plain
    narrow = show(read("audit-small"), 77)
    assert printed(monkeypatch, io.StringIO(), {"COLUMNS": "77"}) == narrow
    assert printed(monkeypatch, io.StringIO(), {}, width=77) == narrow


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp932", "cp437"])
def test_output_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    text = printed(monkeypatch, stream, {"COLUMNS": "80"})
    assert "|----o" in text
    assert ("私は" if encoding == "cp932" else r"\u79c1\u306f") in text


def test_ascii_is_ascii_but_for_the_users_text() -> None:
    for text in (small(100, ascii=True), big(160, ascii=True), big(100, ascii=True, head=(18, 8))):
        rest = text.replace("私は東京でリンゴを食べました。", "")
        assert rest.isascii(), {c for c in rest if not c.isascii()}
    assert {c for c in show(read("trace"), ascii=True) if not c.isascii()} == {"猫"}


# Text that is not ours


HOSTILE = "[bold]x[/bold] [link=file:///etc]y[/link] </script>\x1b[31m\u202eevil\r\n:smile: \ud83d"


def test_hostile_text_is_shown_literally() -> None:
    doc = read("audit-small")
    doc["model"]["name"] = HOSTILE
    doc["findings"][0] |= dict.fromkeys(
        ("title", "where", "seen", "means", "next", "source"), HOSTILE
    )
    doc["checked"] = [{"name": HOSTILE, "result": HOSTILE}]
    trace = read("trace")
    trace["tokens"] = [HOSTILE, "[/]", "\x07", "a" * 500, "猫" * 90, "\n"]
    trace["text"] = HOSTILE
    for text in (show(doc, 200, wrote=(HOSTILE, 1)), show(trace, 200)):
        assert "[bold]x[/bold]" in text
        assert "⟨U+001B⟩[31m⟨U+202E⟩evil⟨U+000D⟩↵:smile: ⟨U+D83D⟩" in text
        assert not set(text) & {"\x1b", "\u202e", "\r", "\x07", "\ud83d"}
    for width in (40, 80, 200):
        assert not too_long(show(trace, width), width)
        assert not too_long(show(doc | {"findings": []}, width), width)


def test_labels_are_cut_by_cells_and_keep_their_part() -> None:
    trace = read("trace")
    trace["tokens"] = [
        "internationalization",
        "猫猫猫猫猫",
        "⟨U+202E⟩ 2/3",
        "ab猫 1/2",
        "日本",
        ".",
    ]
    found = [line for line in lines(show(trace, 80)) if line.startswith("  ")]
    heading = next(line for line in found if "intern" in line)
    assert heading.split() == ["interna…", "猫猫猫…", "⟨U+…", "2/3", "ab猫", "1/2", "日本", "."]
    assert cell_len(heading) == 10 + 6 * 9


# Numbers


@pytest.mark.parametrize(
    ("x", "number", "whole", "fraction", "weight", "share"),
    [
        (0.996, "1.00", "1", ">0.99", ">.99", ">99 %"),
        (0.9999, "1.00", "1", ">0.99", ">.99", ">99 %"),
        (0.994, "0.99", "1", "0.99", ".99", "99 %"),
        (0.0004, "≈0", "<1", "<0.01", "<.01", "<1 %"),
        (0.005, "0.01", "<1", "0.01", ".01", "<1 %"),
        (0, "0", "0", "0", "0", "0 %"),
        (1, "1.00", "1", "1.00", "1.00", "100 %"),
        (0.47, "0.47", "<1", "0.47", ".47", "47 %"),
        (None, "–", "–", "–", "–", "–"),
        (math.nan, "–", "–", "–", "–", "–"),
    ],
)
def test_numbers_from_0_to_1(
    x: float | None, number: str, whole: str, fraction: str, weight: str, share: str
) -> None:
    assert numerals.number(x) == number
    assert numerals.whole(x) == whole
    assert numerals.fraction(x) == fraction
    assert numerals.weight(x) == weight
    assert numerals.share(x) == share


@pytest.mark.parametrize(
    ("x", "number", "whole"),
    [
        (6.67, "6.67", "7"),
        (9.994, "9.99", "10"),
        (9.996, "10.0", "10"),
        (42.9, "42.9", "43"),
        (99.94, "99.9", "100"),
        (99.96, "100", "100"),
        (999.6, "1,000", "1,000"),
        (1244.9, "1,245", "1,245"),
        (999_999, "999,999", "999,999"),
        (999_999.5, "1.00e6", "1.00e6"),
        (1e9, "1.00e9", "1.00e9"),
        (2.5e12, "2.50e12", "2.50e12"),
        (-3.14159, "−3.14", "−3"),
        (-0.0004, "≈0", "0"),
        (math.inf, "∞", "∞"),
        (-math.inf, "−∞", "−∞"),
    ],
)
def test_numbers_of_any_size(x: float, number: str, whole: str) -> None:
    assert numerals.number(x) == number
    assert numerals.whole(x) == whole


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_fit_and_say_zero_only_for_zero(x: float) -> None:
    text = numerals.number(x)
    assert len(text) <= 9
    assert "-" not in text
    assert (text in ("0", "−0")) == (x == 0)
    assert len(screen.point(text, 10)) == 10


def test_points_are_aligned() -> None:
    column = [screen.point(numerals.number(x), 8) for x in (1.0, 42.9, 101, 0.0001, None, 123_456)]
    assert column == ["    1.00", "   42.9 ", "  101   ", "      ≈0", "    –   ", " 123,456"]


def test_other_words_for_numbers() -> None:
    assert [numerals.exact(x) for x in (15.0, 6.0459, None, 1)] == ["15", "6.05", "–", "1"]
    assert [numerals.seconds(x) for x in (0.01, 0.123, 12.3, 75)] == [
        "0.1 s",
        "0.1 s",
        "12 s",
        "1 min 15 s",
    ]
    assert [numerals.size(n) for n in (512, 38_123, 1_234_567)] == ["512 B", "38 kB", "1.2 MB"]
    assert numerals.ranges([0, 1, 2, 3, 7, 9, 10]) == "0–3, 7, 9–10"
    assert numerals.counted(1, "text") == "1 text"
    assert numerals.counted(12_288, "token") == "12,288 tokens"


# Text


@given(st.text(st.sampled_from("ab 猫本. 1%"), max_size=60), st.integers(4, 30))
def test_wrap_loses_nothing(text: str, width: int) -> None:
    wrapped = screen.wrap(text, width)
    assert all(cell_len(line) <= width for line in wrapped)
    assert "".join(wrapped).replace(" ", "") == text.replace(" ", "")


def test_wrap_keeps_numbers_with_their_words() -> None:
    assert screen.wrap("the median 27.1 of 47 % is × 0.125 here", 12) == [
        "the", "median 27.1", "of 47 % is", "× 0.125 here",
    ]  # fmt: skip


def test_commands_can_be_copied_from_any_width() -> None:
    command = "scaledot trace 'it'\"'\"'s a \"long\" one' --model some/path --layer 0 --head 12"
    assert screen.wrap_command(command, 200) == [command]
    for width in range(20, 80):
        broken = screen.wrap_command(command, width)
        echo = "\n".join(broken).replace("scaledot", "printf '%s\\n'", 1)
        shell = subprocess.run(["sh", "-c", echo], capture_output=True, text=True, check=True)
        assert shell.stdout.split("\n")[:3] == ["trace", 'it\'s a "long" one', "--model"]
        assert not any(line.rstrip(" \\").endswith("--layer") for line in broken)


# One head, and what may be missing


def test_one_head_in_full() -> None:
    text = big(120, head=(18, 8))
    assert text.startswith("scaledot audit  SmolLM2-135M-Instruct.Q4_1.gguf  head 18.8\n")
    assert "model.layers.18.self_attn · causal · kv head 2 · × 0.125" in text
    assert "14 · 0 empty · 0 non-finite · 0 padding · 1 with a single key" in text
    for measure in read("audit-big")["heads"][18 * 9 + 8]["moments"]:
        assert f"\n  {measure} " in text
    assert "saturate every row" in text
    assert "Checked, nothing found" not in text
    assert text.index("\nFindings") < text.index("\nEvery measure")
    assert "Every measure" not in big(80, head=(0, 0))  # saved without its measures
    with pytest.raises(ValueError, match=r"no head 30\.0: this audit has layers 0–29, heads 0–8"):
        big(100, head=(30, 0))


def test_a_statistic_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no statistic 'kurtosis': choose from after, within"):
        small(100, show="kurtosis")


def test_undefined_numbers_are_dashes() -> None:
    doc = read("audit-small")
    for head in doc["heads"]:
        head |= dict.fromkeys(
            ("before", "after", "within", "keys", "entropy", "normalised_entropy", "saturated",
             "gradient", "largest", "margin_median", "first", "previous", "current", "next",
             "room", "attends")
        )  # fmt: skip
    doc["theory"] = None
    table = show(doc, 160)
    assert re.search(r"^     0\.0 +–    –", table, re.M)
    assert re.search(r"^  theory +29    1\.00", table, re.M)
    for name in terminal.STATISTICS:
        if name not in head_grid.IN_PARTS:
            assert "–" in show(doc, 100, show=name)
    assert "nan" not in table.lower()


def test_statistics_that_not_every_audit_has() -> None:
    for name in head_grid.IN_PARTS:
        with pytest.raises(ValueError, match=f"no head has '{name}' here: audit without --quick"):
            small(100, show=name)
    doc = with_parts(read("audit-small"))
    induction, excess = (show(doc, 100, show=name) for name in head_grid.IN_PARTS)
    assert "  Weight after the same token   chance .04\n" in induction
    assert "\n    0 ·  0  ▄.37  ▆.74  ▂.11      .24\n" in induction
    assert "  · under .1   ▂▃▄▅▆▇█ from .1, .2, .3, .5, .7, .9, .99\n" in induction
    assert "  Entropy beyond width, nats   theory 0\n" in excess
    assert "\n    0      –  ▅−2.47  ▄−1.94  ▄−1.41    −1.94\n" in excess
    assert "  ▽ above .2   · −.2 to .2   ▂▃▄▅ under −.2, −.5, −1, −2\n" in excess
    head = doc["heads"][1]
    for value, level in ((0.3, -1), (0.2, 0), (-0.2, 0), (-0.3, 1), (-0.6, 2), (-1.5, 3), (-3, 4)):
        assert head_grid._level("excess", head | {"excess": value}) == level


def test_no_heads_at_all() -> None:
    doc = read("audit-small") | {"heads": [], "findings": [], "checked": []}
    text = show(doc)
    assert "Findings   none" in text
    assert "Checked, nothing found" in text


def test_heads_alone() -> None:
    """What an observation prints: no text, no theory, perhaps not even d_k."""
    doc = read("audit-big") | {"format": "scaledot/heads"}
    assert "Heads worth looking at" in show(doc)
    few = {"format": "scaledot/heads", "heads": doc["heads"][:9], "layers": [{"index": 0}]}
    text = show(few)
    assert text.count("\n     0.") == 9
    assert "Findings" not in text


def test_layers_narrow_the_heads() -> None:
    text = show(read("audit-big"), layers=[18, 19])
    assert text.count("\n    18.") == 9
    assert "\n     0.0" not in text


def test_an_incomplete_audit_says_so() -> None:
    doc = read("audit-small") | {"complete": False}
    text = show(doc, wrote=("out.json", 9))
    assert "  stopped  before the end of the text · the table is exact for these 15 tokens" in text
    assert 'Wrote out.json ("complete": false)' in text


def test_unlike_scales_are_listed() -> None:
    doc = read("audit-big")
    one = doc["scales"][0]
    doc["scales"] = [
        one | {"layers": list(range(20))},
        one
        | {"scale": 1 / 16, "rule": "1/√256", "layers": list(range(20, 26)), "configured": None},
        one | {"scale": 0.0417, "rule": None, "layers": [26, 28], "configured": 0.125},
    ]
    text = show(doc, 120)
    assert (
        "scale    × 0.125 = 1/√d_k in 20 layers: 0–19 · read from the attention call; config"
        in text
    )
    assert "\n           × 0.0625 = 1/√256 in 6 layers: 20–25 · read" in text
    assert "config says nothing" in text
    assert "× 0.0417 in 2 layers: 26, 28 · read from the attention call; config gives 0.125" in text
    doc["scales"] = [one | {"scale": 0.125 / i, "layers": [i]} for i in range(1, 9)]
    assert "4 more, × 0.01562 to 0.025" in show(doc, 120)


def test_header_says_what_is_special() -> None:
    doc = read("audit-big")
    doc["model"]["unobserved"] = ["transformer.h.0", "transformer.h.1"]
    doc["layers"][0] |= {"window": 512, "softcap": 50.0}
    doc["layers"][1] |= {"kind": "cross", "causal": False}
    doc["text"] |= {"texts": 3, "windows": 40, "attention": "full", "skipped": 1}
    text = show(doc, 120)
    assert "unseen   not observed: transformer.h.0, transformer.h.1" in text
    assert "layers   causal with window 512 0 · cross 1 · causal 2–29" in text
    assert "3 texts · 40 windows · 14 tokens · every token sees its whole window" in text
    assert "1 text skipped" in text
    assert "then soft-cap 50" in text


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12), st.randoms(use_true_random=False))
def test_picks_are_few_different_and_sorted(layers: int, heads: int, random: Any) -> None:
    doc = with_parts(many(layers, heads))
    random.shuffle(doc["heads"])
    picks = head_grid._picks(doc["heads"], doc["theory"]["chance"])
    assert len(picks) <= 8
    assert len({head_table.head_label(head) for head, _ in picks}) == len(picks)
    assert all(reason for _, reason in picks)
    after = [head["after"] for head, _ in picks]
    assert after == sorted(after, reverse=True)
    assert after[0] == max(head["after"] for head in doc["heads"])


def test_the_strongest_induction_head_is_worth_a_look() -> None:
    doc = with_parts(read("audit-small"))
    picks = head_grid._picks(doc["heads"], doc["theory"]["chance"])
    strongest = max(
        (h for h in doc["heads"]), key=lambda h: h["roles"]["masses"][0]["mass"]
    )  # fmt: skip
    reasons = {head_table.head_label(head): reason for head, reason in picks}
    assert reasons[head_table.head_label(strongest)] == "after the same token .96"
    for head in doc["heads"]:
        head["roles"]["called"] = []
    picks = head_grid._picks(doc["heads"], doc["theory"]["chance"])
    assert not any("same token" in reason for _, reason in picks)


# Traces


def python_trace(**more: Any) -> Doc:
    """As ``scaledot.trace`` makes it: no model, no text."""
    weights = [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    scores = [[1.0, 1.0, 3.0], [1.0, 2.0, 4.0]]
    stages = {"scores": scores, "scaled": scores, "masked": [[1.0, 1.0, "-inf"], ["-inf"] * 3]}
    stages |= {"weights": weights, "output": [[0.25, -0.5], [0.0, 0.0]]}
    return {
        "format": "scaledot/trace",
        "version": 1,
        "shape": [2, 4, 2, 3],
        "model": None,
        "text": None,
        "layer": None,
        "head": None,
        "kv_head": None,
        "tokens": None,
        "causal": False,
        "scale": 1.0,
        "rule": None,
        "value": None,
        "softcap": None,
        "sink": None,
        "hidden": 4,
        "stages": [
            {"name": name, "shape": [len(m), len(m[0])], "matrix": m} for name, m in stages.items()
        ],
        "visible": [[True, True, False], [False] * 3],
        "keys": [2.0, None],
    } | more


def test_a_trace_made_in_python() -> None:
    assert (
        terminal.trace_text(python_trace())
        == """\
scaledot.trace  2 queries × 3 keys, the first of 2 × 4

1 scores   q·k   2 × 3
                 k0       k1       k2
  q0           1.00     1.00     3.00
  q1           1.00     2.00     4.00

2 scaled   × 1   2 × 3
  q0           1.00     1.00     3.00
  q1           1.00     2.00     4.00

3 masked   hidden keys become −∞   2 × 3   4 of 6 hidden
  q0           1.00     1.00       −∞
  q1             −∞       −∞       −∞

4 weights  softmax: every row adds to 1   2 × 3
                 k0       k1       k2    keys
  q0          ▄ .50    ▄ .50        0    2.00
  q1              0        0        0    –

5 output   weights · v   2 × 2   length of each row
  q0          0.250   −0.500           0.56
  q1          0.000    0.000           0

q1  =  0: no key is visible"""
    )


def test_stages_that_are_not_always_there() -> None:
    doc = python_trace(softcap=5.0, sink=0.5)
    scores = doc["stages"][0]["matrix"]
    doc["stages"].insert(2, {"name": "capped", "shape": [2, 3], "matrix": scores})
    dropped = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    doc["stages"].insert(5, {"name": "dropped", "shape": [2, 3], "matrix": dropped})
    text = terminal.trace_text(doc)
    assert "3 capped   5·tanh(x/5)" in text
    assert "5 weights  softmax: every row and its sink add to 1" in text
    assert "6 dropped  dropout: some become 0, the rest grow" in text
    nothing_hidden = python_trace(hidden=0, visible=[[True] * 3] * 2)
    nothing_hidden["stages"][2]["matrix"] = scores
    assert "3 masked   hides nothing here   2 × 3\n\n" in terminal.trace_text(nothing_hidden)


def test_empty_traces() -> None:
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        empty = [[1.0] * keys for _ in range(queries)]
        stages = [
            {"name": name, "shape": [queries, keys], "matrix": empty}
            for name in ("scores", "scaled", "weights")
        ]
        doc = python_trace(
            stages=stages, shape=[queries, keys], visible=empty, keys=[None] * queries
        )
        assert f"{queries} × {keys}" in terminal.trace_text(doc)
        assert terminal.trace_html(doc)
    assert terminal.trace_text(python_trace(stages=[], shape=[0, 4, 2, 3]))


def test_long_traces_show_the_last_queries_and_their_heaviest_keys() -> None:
    doc = read("trace-long")
    text = show(doc, 80)
    assert "shown    tokens 29–34 of 34 · their 6 heaviest keys · others: --rows, --keys" in text
    weights = doc["stages"][3]["matrix"]
    mass = [sum(row[k] for row in weights[28:]) for k in range(34)]
    heaviest = sorted(sorted(range(34), key=lambda k: -mass[k])[:6])
    places = next(line for line in lines(text) if re.fullmatch(r"(?: +\d+){6}", line))
    assert [int(place) - 1 for place in places.split()] == heaviest


def test_rows_and_keys_can_be_chosen() -> None:
    doc = read("trace-long")
    text = show(doc, 100, rows=(3, 4), keys=(0, 2))
    assert "shown    tokens 4–5 of 34 · 3 keys of 34 · others: --rows, --keys" in text
    first = text[text.index("1 scores") : text.index("2 scaled")]
    assert [line.split()[0] for line in lines(first)[3:5]] == ["␣the", "␣king"]
    assert "shown    tokens 1–34 of 34 · 9 keys of 34" in show(doc, 100, rows=(0, 99), keys=(0, 33))
    whole = show(read("trace"), 100, rows=(0, 5), keys=(0, 5))
    assert "shown" not in whole


def test_last_line_takes_the_last_query_with_three_keys() -> None:
    trace = read("trace")
    trace["stages"][3]["matrix"][5] = [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]
    assert lines(show(trace, 80))[-2] == (
        ".  =  .20 v[The] + .20 v[␣猫 1/3] + .20 v[猫 2/3] + .20 v[猫 3/3] + …"
    )
    trace["stages"][3]["matrix"] = [[1.0, 0, 0, 0, 0, 0]] * 6
    assert lines(show(trace, 80))[-2] == ".  =  1.00 v[The]"


def test_wide_pages_show_two_stages_side_by_side() -> None:
    text = show(read("trace"), 160)
    assert re.search(r"^1 scores .* 2 scaled ", text, re.M)
    assert re.search(r"^3 masked .* 4 weights ", text, re.M)
    assert re.search(r"^5 output ", text, re.M)


class _Fragment(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        assert not {name for name, _ in attrs} - {"class", "style", "scope"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_a_closed_fragment_without_script_or_link() -> None:
    for doc in (read("trace"), read("trace-long"), python_trace()):
        doc["tokens"] = doc["tokens"] and [
            "</script><img src=x onerror=alert(1)>",
            *doc["tokens"][1:],
        ]
        doc["text"] = doc["text"] and "<b>&\u202e"
        html = terminal.trace_html(doc)
        parsed = _Fragment()
        parsed.feed(html)
        parsed.close()
        assert parsed.open == []
        assert parsed.seen <= {
            "div",
            "style",
            "p",
            "b",
            "table",
            "caption",
            "thead",
            "tr",
            "td",
            "th",
        }
        assert "://" not in html
        assert "\u202e" not in html
        for stage in ("scores", "scaled", "masked", "weights", "output"):
            assert stage in parsed.text


# Progress


def test_progress_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress(terminal.console(stderr=True), after=0.0) as update:
        update(1, 2, 3)
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def test_progress_appears_late_and_vanishes() -> None:
    quick, slow = _Terminal(), _Terminal()
    with terminal.progress(Screen(file=quick, force_terminal=True, width=80)) as update:
        update(1, 2, 3)
    assert quick.getvalue() == ""
    with terminal.progress(Screen(file=slow, force_terminal=True, width=80), after=0.01) as update:
        update(12, 40, 12_288)
        time.sleep(0.4)
    assert "12/40 windows · 12,288 tokens" in ANSI.sub("", slow.getvalue())
    assert slow.getvalue().rstrip("\n").endswith("\x1b[2K")  # the line is wiped


def test_progress_drops_parts_from_the_right() -> None:
    def line(width: int, ascii: bool = False) -> str:
        page = Page(Screen(file=io.StringIO(), width=width, ascii=ascii))
        return screen.progress_line(page, "Auditing", "windows", 12, 40, 12_288, 6.367).plain

    whole = "Auditing  ━━━━╸──────────  12/40 windows · 12,288 tokens · 1,930/s · 0:15 left"
    assert line(100) == whole
    assert line(79) == whole
    assert line(78) == whole.removesuffix(" · 0:15 left")
    assert line(60) == "Auditing  ━━━━╸──────────  12/40 windows · 12,288 tokens"
    assert line(45) == "Auditing  ━━━━╸──────────  12/40 windows"
    assert line(45, ascii=True) == "Auditing  ====-----------  12/40 windows"
    page = Page(Screen(file=io.StringIO(), width=80))
    steps = screen.progress_line(page, "Variance", "", 12_000_000, 40_960_000, 0, 6.0).plain
    assert steps == "Variance  ━━━━╸──────────  29 % · 0:14 left"


def test_terminal_does_not_import_torch() -> None:
    code = "import scaledot.terminal, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_documents_are_only_read() -> None:
    for name in ("audit-small", "audit-big", "trace-long"):
        doc = read(name)
        before = copy.deepcopy(doc)
        show(doc, 160)
        assert doc == before


if __name__ == "__main__":
    for golden, draw in SCREENS.items():
        (GOLDEN / f"{golden}.txt").write_text(draw(), "utf-8")

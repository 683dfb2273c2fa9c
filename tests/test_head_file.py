"""One head in full, against golden texts, and where its audit has less to say.

The documents in ``golden/`` are measured, cut to one head and to the bins that it fills: the
embedded sample on its text (2.1, an induction head), SmolLM2 on "When Mary and John went to the
store, John gave a drink to Mary. …" (18.8, a sink) and the unidic imitator on
私は東京でリンゴを食べました。 (0.3). ``python tests/test_head_file.py`` writes the golden texts
anew: read the difference before keeping it.
"""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from scaledot import head_file, terminal
from scaledot.screen import Screen

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("induction", "sink", "short")
PARTS = ("roles", "width", "whatif", "gradients", "precision")
TITLES = ("Looks at", "Why this wide", "If the scale were another", "What passes back",
          "Room in low precision")  # fmt: skip

Doc = dict[str, Any]


def read(name: str) -> Doc:
    return json.loads((GOLDEN / f"head-{name}.json").read_text("utf-8"))


def show(doc: Doc, width: int = 100, ascii: bool = False, color: bool = False) -> str:
    file = io.StringIO()
    system = "standard" if color else None
    console = Screen(
        file=file, width=width, ascii=ascii, force_terminal=color, color_system=system
    )  # fmt: skip
    head = doc["heads"][0]
    terminal.print_audit(console, doc, head=(head["layer"], head["head"]))
    return file.getvalue()


def part(text: str, title: str) -> str:
    """From one part's title to the next title."""
    start = text.index(f"\n{title}") + 1
    following = [m.start() for m in re.finditer(r"\n\S", text) if m.start() > start]
    return text[start : following[0]]


SCREENS = {
    "head-induction-40": ("induction", 40, False),
    "head-induction-60": ("induction", 60, False),
    "head-induction-100": ("induction", 100, False),
    "head-induction-150": ("induction", 150, False),
    "head-sink-80": ("sink", 80, False),
    "head-short-ascii": ("short", 80, True),
}


def draw(screen: str) -> str:
    name, width, ascii = SCREENS[screen]
    return show(read(name), width, ascii)


@pytest.mark.parametrize("screen", SCREENS)
def test_golden(screen: str) -> None:
    assert draw(screen) == (GOLDEN / f"{screen}.txt").read_text("utf-8")


# Every width


@settings(max_examples=40)
@given(st.integers(40, 200), st.sampled_from(NAMES), st.booleans())
def test_no_line_is_wider_than_the_terminal(width: int, name: str, ascii: bool) -> None:
    doc = read(name) | {"findings": []}
    assert all(cell_len(line) <= width for line in show(doc, width, ascii).split("\n"))


@pytest.mark.parametrize("width", range(40, 201, 8))
def test_every_width_says_every_part_and_name(width: int) -> None:
    for name in NAMES:
        doc = read(name)
        text, head = show(doc, width), doc["heads"][0]
        assert [title for title in (*TITLES, "Findings", "Every measure") if title in text] == [
            *TITLES, "Findings", "Every measure",
        ]  # fmt: skip
        for mass in head["roles"]["masses"]:
            assert f"\n  {mass['label']} " in text
        for measure, moments in head["moments"].items():
            assert (f"\n  {measure} " in text) == (moments["mean"] is not None)
        for mark in ("applied = 1/√d_k", "1/d_k", "none"):
            assert re.search(rf"^  {mark} +[×÷]", text, re.M)


def test_sentences_stand_beside_their_numbers_or_below() -> None:
    beside = part(show(read("induction"), 70), "Why this wide")
    below = part(show(read("induction"), 69), "Why this wide")
    assert "\n  interaction              9.42   what depends on query and key\n" in beside
    assert "\n  interaction              9.42\n    what depends on query and key tog" in below


def test_columns_go_by_what_they_say_again() -> None:
    def headings(width: int) -> list[str]:
        lines = part(show(read("induction"), width), "If the scale were another").split("\n")
        return re.split(r"  +", next(line for line in lines if "factor" in line).strip())

    everything = ["factor", "scale", "keys", "entropy", "H/ln n", "saturated", "lead", "bf16 room"]
    assert headings(93) == everything
    for width, gone in ((92, "bf16 room"), (81, "entropy"), (72, "H/ln n"), (63, "lead"),
                        (54, "saturated"), (43, "scale")):  # fmt: skip
        everything.remove(gone)
        assert headings(width) == everything


def test_points_stand_below_each_other() -> None:
    text = show(read("sink"), 100)
    rows = part(text, "If the scale were another").split("\n")
    scales = {row.index(".", 30, 40) for row in rows if re.match(r".{18} +[×÷]", row)}
    assert len(scales) == 1
    masses = part(text, "Looks at").split("\n")[3:12]
    assert {row.index(".") for row in masses} == {28}


def test_only_names_are_coloured() -> None:
    doc = read("induction")
    labels = {mass["label"] for mass in doc["heads"][0]["roles"]["masses"]}
    known = labels | set(doc["heads"][0]["moments"]) | {
        "model", "scale", "text", "run", "layer", "rows", "look", "note", "interaction",
        "key bias", "within rows", "row shift", "norms", "alignment", "product", "entropy beyond",
        "relative width", "applied = 1/√d_k", "1/d_k", "none", "Σp(1−p)", "value spread",
        "prefix matching", "mean distance", "bfloat16", "float16", "float32", "largest raw score",
        "scores in bfloat16", "the same, K centred",
    }  # fmt: skip
    for found in re.finditer(r"\x1b\[(3\d)m([^\x1b]*)\x1b", show(doc, color=True)):
        assert found[2].strip() in known | {""} or re.fullmatch(r"[·●─]+", found[2].strip()), found[
            2
        ]


def test_ascii_is_ascii_and_aligned() -> None:
    for name in NAMES:
        text = show(read(name), 100, ascii=True)
        assert text.isascii(), {c for c in text if not c.isascii()}
    plain, ascii = (part(show(read("short"), 100, a), "What passes back") for a in (False, True))
    assert [line.find(".") for line in plain.split("\n")[2:4]] == [28, 28]
    assert [line.find(".") for line in ascii.split("\n")[2:4]] == [28, 28]


# What may be missing


@pytest.mark.parametrize("missing", PARTS)
def test_a_part_that_was_not_measured_is_left_out(missing: str) -> None:
    doc = read("induction")
    doc["heads"][0][missing] = None
    text = show(doc)
    left = [title for name, title in zip(PARTS, TITLES, strict=True) if name != missing]
    assert [title for title in TITLES if f"\n{title}" in text] == left


def test_an_audit_from_before_these_parts_prints() -> None:
    doc = read("sink")
    for name in (*PARTS, "prefix_matching"):
        doc["heads"][0].pop(name, None)
    text = show(doc)
    assert not any(title in text for title in TITLES)
    assert "\n  score_var " in text
    del doc["heads"][0]["moments"], doc["heads"][0]["histograms"], doc["edges"]
    assert "Every measure" not in show(doc)


def undefined(x: Any) -> Any:
    """The same with every number undefined but those that say which bin, key or column."""
    if isinstance(x, dict):
        keep = ("count", "rows", "first", "counts", "factors", "d_k", "limit", "marks")
        return {k: v if k in keep else undefined(v) for k, v in x.items()}
    if isinstance(x, list):
        return [undefined(v) for v in x]
    return None if isinstance(x, float) else x


@pytest.mark.parametrize("name", NAMES)
def test_undefined_numbers_are_dashes(name: str) -> None:
    doc = read(name)
    head = doc["heads"][0]
    for key in PARTS:
        head[key] = undefined(head[key])
    head["roles"]["called"] = []
    head["whatif"]["scales"] = [None] * len(head["whatif"]["factors"])
    head["moments"] = {
        measure: dict.fromkeys(("mean", "sd", "min", "max")) | {"count": 0}
        for measure in head["moments"]
    }
    head["histograms"] = {}
    text = show(doc)
    assert "If the scale were another   no row sees two finite scores\n\nWhat" in text
    assert part(text, "Why this wide").count("\n") == 1
    assert "\n  first token              –        –" in text
    assert re.search(r"\n  bfloat16 +6\.24 +– +– +–\n", text)
    assert "\n  largest raw score        –" in text
    assert f"in no row: {', '.join(head['moments'])}"[:60] in text
    assert not re.search(r"\bnan\b|\bNone\b", text)


def test_rows_of_one_key_have_nothing_to_say() -> None:
    doc = read("induction")
    head = doc["heads"][0]
    head["roles"] |= {"masses": [], "called": [], "distance": None}
    text = show(doc)
    assert part(text, "Looks at") == "Looks at   no row sees two finite scores\n"


def test_scales_that_calls_do_not_share_have_no_names() -> None:
    doc = read("induction")
    swept = doc["heads"][0]["whatif"]
    swept |= {"scales": [None] * len(swept["factors"]), "marks": {}}
    rows = part(show(doc), "If the scale were another").split("\n")
    assert sum(bool(re.search(r"[×÷]\d", row)) for row in rows[1:]) == len(swept["factors"])
    applied = next(row for row in rows if "applied" in row)
    assert re.match(r"  applied +×1 +– +6\.07", applied)
    doc["heads"][0]["width"] |= {"scale": None, "ratio": None}
    text = part(show(doc), "Why this wide")
    assert "\n  scale                    –      the factor applied" in text
    assert "\n  product                  –      the width" in text


def test_usual_scales_may_lie_far_away() -> None:
    """As T5 has it: no scale is applied, 1/√d_k is an eighth of it and 1/d_k a 64th."""
    doc = read("induction")
    swept = doc["heads"][0]["whatif"]
    swept["factors"] = [2.0**e for e in range(-6, 4)]
    swept["scales"] = list(swept["factors"])
    for name in ("keys", "entropy", "normalised_entropy", "saturated", "margin", "margin_error",
                 "headroom"):  # fmt: skip
        swept[name] = [swept[name][0]] * 3 + swept[name]
    swept["marks"] = {"none": 1.0, "1/√d_k": 0.125, "1/d_k": 1 / 64}
    rows = part(show(doc), "If the scale were another").split("\n")
    named = [line.split("  ")[1] for line in rows if re.match(r"  \S.*[×÷]\d", line)]
    assert named == ["1/d_k", "1/√d_k", "applied = none"]
    assert "÷64   0.0156 " in next(line for line in rows if line.startswith("  1/d_k"))


@pytest.mark.parametrize(
    ("largest", "says"),
    [
        (2.0, "half the rows give one key .9 or more from ×2 on"),
        (0.25, "half the rows give one key .9 or more from ÷4 on"),
        (1.0, "half the rows give one key .9 or more from ×1 on"),
        (0.0, "half the rows give one key .9 or more already at ÷8"),
        (None, "at no factor up to ×8 do half the rows give one key .9 or more"),
    ],
)
def test_where_rows_become_sharp(largest: float | None, says: str) -> None:
    doc = read("induction")
    doc["heads"][0]["whatif"]["largest"] = largest
    assert f"If the scale were another   {says}\n" in show(doc)


def test_a_median_in_an_open_bin_says_only_its_end() -> None:
    doc = read("short")
    assert doc["heads"][0]["whatif"]["margin_error"][-1] > 30
    rows = part(show(doc), "If the scale were another").split("\n")
    last = next(row for row in rows if "×8" in row)
    assert last.split()[-2:] == [">19.4", "<−13.2"]


def test_gradients_of_a_backward() -> None:
    doc = read("induction")
    assert "transmission" not in show(doc)
    doc["heads"][0]["gradients"] |= {"median": 0.64, "p10": 0.0004, "rms": 1.5, "dead": 0.9999}
    text = part(show(doc), "What passes back")
    assert "\n  transmission             0.64   median row, measured in the backward" in text
    assert "\n  transmission, 10 %         ≈0   a tenth" in text
    assert "\n  root mean square         1.50   a few rows" in text
    assert "\n  rows below .001         >99 %   that pass" in text


def test_a_head_that_looks_nowhere_in_particular() -> None:
    doc = read("sink")
    roles = doc["heads"][0]["roles"]
    assert "Looks at   first token >.99\n" in show(doc)
    roles |= {"called": [], "broad": True}
    assert "Looks at   many keys broadly\n" in show(doc)
    roles["broad"] = False
    assert "Looks at   nothing far above chance\n" in show(doc)


def test_shares_beside_the_first_token() -> None:
    doc = read("induction")
    assert "without first" not in show(doc)
    doc["heads"][0]["roles"]["masses"][1]["without_first"] = 0.25
    text = show(doc)
    assert re.search(r"^  previous token +\.03 +\.02 +1,071 +\.25$", text, re.M)
    assert "without first: share of the weight that the first token leaves" in text
    assert "without first" not in show(doc, 60)


def test_shares_are_never_rounded_to_an_end() -> None:
    for name in NAMES:
        doc = read(name)
        text = show(doc, 150)
        for measure in head_file._SHARES & set(doc["heads"][0]["moments"]):
            moments = doc["heads"][0]["moments"][measure]
            if moments["mean"] is None:
                continue
            line = next(x for x in text.split("\n") if x.startswith(f"  {measure} "))
            for key, cell in zip(("mean", "sd", "min", "max"), line.split()[1:5], strict=True):
                if 0 < moments[key] < 1:
                    assert cell not in ("0", "≈0", "1.00"), (measure, key)


def test_small_costs_keep_two_digits() -> None:
    costs = (None, 0.0, 1e-9, 0.0011, 0.009, 0.03, 0.5, 0.9999, 1.0)
    assert [head_file._percent(x) for x in costs] == [
        "–", "0 %", "<0.01 %", "0.11 %", "0.90 %", "3.00 %", "50 %", ">99 %", "100 %",
    ]  # fmt: skip
    assert [head_file._times(x) for x in (None, 0.31, 1.0, 7.64, 9.96, 1234.0)] == [
        "–", "×0.31", "×1.0", "×7.6", "×10", "×1,234",
    ]  # fmt: skip


# Histograms


def test_quantiles_state_how_fine_they_are() -> None:
    edges = [None, 0.0, 1.0, 2.0, 4.0, None]
    moments = {"min": -3.0, "max": 9.0}
    found, _ = head_file._quantiles(edges, {"first": 0, "counts": [1, 0, 18, 0, 1]}, moments)
    assert found == {"5 %": -1.5, "median": 1.5, "95 %": 1.5, "±": 1.5}
    assert head_file._quantiles([], {"first": 0, "counts": []}, moments) == ({}, [])
    open_end = {"min": 5.0, "max": None}
    infinite, _ = head_file._quantiles(edges, {"first": 4, "counts": [9]}, open_end)
    assert infinite["median"] == math.inf
    text = show(read("induction"))
    assert "median: the middle of a histogram's bin, right to ±; the rest is exact" in text


def test_quantiles_lie_where_the_moments_allow() -> None:
    for name in NAMES:
        doc = read(name)
        head = doc["heads"][0]
        for measure, histogram in head["histograms"].items():
            moments = head["moments"][measure]
            assert sum(histogram["counts"]) == moments["count"]
            found, _ = head_file._quantiles(doc["edges"][measure], histogram, moments)
            assert moments["min"] <= found["5 %"] <= found["median"] <= found["95 %"]
            assert found["95 %"] <= moments["max"]


def test_histograms_are_drawn_to_their_fullest_bin() -> None:
    assert head_file._spark([1, 0, 4, 8], 14) == "▁ ▄▇"
    assert head_file._spark([1] * 30, 14) == "▇" * 10
    assert head_file._spark([], 14) == ""


if __name__ == "__main__":
    for golden in SCREENS:
        (GOLDEN / f"{golden}.txt").write_text(draw(golden), "utf-8")

"""An experiment on the terminal: numbers to the place that their errors allow, columns that fit."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len

from scaledot.document import lab_document
from scaledot.lab.results import Column, Estimate, Table
from scaledot.lab_table import lab_text, print_lab
from scaledot.numerals import estimated, factor, probability, signed
from scaledot.screen import Screen
from test_results import result

SCREEN = """\
scaledot lab variance   5,000 trials each, seed 20260714

                     q·k                      q·k / √d_k
    d_k  theory  estimate  std. err.  theory  estimate  std. err.      z
      4       4      3.85       0.11       1     0.963      0.026  −1.42
     64      64      67.1        1.3       1     1.048      0.020  +2.37
  1,024   1,024     1,015         21       1     0.991      0.020  −0.43

  Largest of 3: 2.37.
  source  docs/maths.md"""


def estimates(*rows):
    table = Table(
        (Column("d_k", "d_k", "exact"), Column("raw", "q·k"), Column("scaled", "q·k / √d_k"),
         Column("scaled.z", "z")),
        tuple(
            {"d_k": d, "raw": Estimate(v, e, d), "scaled": Estimate(v / d, e / d, 1)}
            for d, v, e in rows
        ),
    )  # fmt: skip
    return result(
        tables=(table,), about="5,000 trials each, seed 20260714", says=("Largest of 3: 2.37.",)
    )


THREE = estimates((4, 3.85, 0.10583), (64, 67.1, 1.30966), (1024, 1015.2, 20.51))


def texts(*rows, columns=("a", "b")):
    """A result whose table has two columns of text."""
    of = tuple(Column(key, key, "text") for key in columns)
    return result(tables=(Table(of, tuple(dict(zip(columns, r, strict=True)) for r in rows)),))


def test_the_screen():
    assert lab_text(lab_document(THREE)) == SCREEN
    assert str(THREE) == SCREEN


@pytest.mark.parametrize("width", [40, 55, 72, 100, 160])
def test_no_line_is_wider_than_the_screen(width):
    for shown in (THREE, texts(("分散は次元数に比例する" * 9, "why " * 40), ("b", ""))):
        lines = lab_text(lab_document(shown), width).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_what_does_not_fit_beside_goes_below_led_by_the_first_column():
    lines = lab_text(lab_document(THREE), 50).splitlines()
    assert sum(line.split()[:1] == ["d_k"] for line in lines) == 2
    assert sum(line.split()[:1] == ["1,024"] for line in lines) == 2


def test_text_wraps_in_its_column_and_loses_nothing():
    long = " ".join(f"word{i}" for i in range(60))
    lines = lab_text(lab_document(texts((long, "right"))), 60).splitlines()[2:]
    assert [w for line in lines for w in line.split() if w.startswith("word")] == long.split()
    assert sum("right" in line for line in lines) == 1


def test_columns_of_text_are_as_wide_as_makes_fewest_lines():
    """A long cell among short ones gives way to a column that is long in every row."""
    claim = "a claim of many words, and so in each row"
    doc = lab_document(texts((claim, "0.159 0.228 0.131 1.000"), *[(claim, "8.00 9.00")] * 9))
    assert sum("0.131 1.000" in line for line in lab_text(doc, 60).splitlines()) == 1
    assert lab_text(doc, 60).count(claim) == 1, "what stands above is not said again"
    assert len(lab_text(doc, 60).splitlines()) == len(lab_text(doc, 100).splitlines()) + 1


def test_words_are_cut_only_where_nothing_else_fits():
    doc = lab_document(texts(("abcdefghijklmnop qrst", "abcdefghijklmnop qrst")))
    assert lab_text(doc, 40).count("abcdefghijklmnop") == 2


def test_a_distance_stays_with_its_estimate_and_a_group_too_wide_is_parted():
    for width in (72, 50):
        lines = lab_text(lab_document(THREE), width).splitlines()
        below = [line for line in lines if line.split()[:1] == ["d_k"]]
        assert [line.split()[-1] for line in below] == ["err.", "z"]
    narrow = estimates((4 * 10**9, 3.85e9, 0.10583e9))
    lines = lab_text(lab_document(narrow), 40).splitlines()
    assert max(map(cell_len, lines)) <= 40


def test_a_heading_wider_than_its_columns_has_room():
    rows = ({"x": Estimate(2.0, 0.1), "y": 1.0},)
    columns = (Column("x", "a heading that is wider than both"), Column("y", "y"))
    heads, under = lab_text(lab_document(result(tables=(Table(columns, rows),)))).splitlines()[2:4]
    assert under.index("y") > cell_len(heads)


def test_a_column_without_theory_has_no_column_for_it():
    rows = ({"x": Estimate(2.0, 0.1)}, {"x": None}, {"x": Estimate(3.0)})
    said = lab_text(lab_document(result(tables=(Table((Column("x", "mean"),), rows),))))
    assert said.splitlines()[3].split() == ["estimate", "std.", "err."]
    assert said.splitlines()[4:7] == [
        "      2.00       0.10",
        "         –          –",
        "      3.00          –",
    ]


def test_lines_of_their_own_stand_first_as_they_are():
    said = lab_text(
        lab_document(replace(THREE, lines=("=== 分散 ===", "   d_k  x", "")))
    ).splitlines()
    assert said[2:4] == ["  === 分散 ===", "     d_k  x"]


def test_several_tables_have_their_titles():
    first = THREE.tables[0]
    both = replace(THREE, tables=(first, replace(first, title="Again")))
    said = lab_text(lab_document(both)).splitlines()
    assert said.count("  Again") == 1
    assert said.index("  Again") > said.index(SCREEN.splitlines()[-4])


def test_ascii_and_hostile_text():
    file = io.StringIO()
    doc = lab_document(texts(("\x1b[31mred\u202e", "√d_k ≤ 1")))
    print_lab(Screen(file=file, width=80, ascii=True), doc, wrote=["a.json", "b.csv"])
    said = file.getvalue()
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "sqrt(d_k) <= 1" in said
    assert said.endswith("Wrote a.json, b.csv\n")


@pytest.mark.parametrize(
    ("value", "error", "theory", "shown"),
    [
        (1.0483, 0.0203, 1.0, ("1", "1.048", "0.020")),
        (3.1e-9, 2e-10, None, ("–", "3.10e−9", "2.0e−10")),
        (1015.2, 20.6, 1024, ("1,024", "1,015", "21")),
        (-0.5, 0.0996, -0.4, ("−0.40", "−0.50", "0.10")),
        (52123, 870, 51000, ("51,000", "52,120", "870")),
        (1.23e7, 2.3e4, 1.2e7, ("1.20e7", "1.2300e7", "2.3e4")),
        (5, None, 4, ("4.00", "5.00", "–")),
        (5.5, 0.0, None, ("–", "5.50", "0")),
        (float("nan"), 0.1, 1.0, ("1.00", "–", "0.10")),
    ],
)
def test_an_estimate_is_shown_to_the_place_of_its_error(value, error, theory, shown):
    assert estimated(value, error, theory) == shown


def test_a_distance_always_has_its_sign():
    assert [signed(z) for z in (1.408, -0.4951, 0.001, None, float("nan"))] == [
        "+1.41", "−0.50", "0.00", "–", "–",
    ]  # fmt: skip


def test_a_weight_keeps_its_digits_at_both_ends():
    assert [probability(x) for x in (0.31, 2.1e-7, 1 - 3.7e-4, 0.995, 1, 0, None)] == [
        "0.31", "2.1e−7", "1 − 3.7e−4", "0.99", "1", "0", "–",
    ]  # fmt: skip


def test_a_factor_has_four_digits():
    assert [factor(x) for x in (0.125, 128**-0.5, 512**0.5, 8.0, -0.5, float("nan"))] == [
        "0.125", "0.08839", "22.63", "8", "−0.5", "–",
    ]  # fmt: skip


def test_a_column_can_be_headings_between_the_rows():
    columns = (Column("by", "by", "text"), Column("n", "n", "exact"))
    rows = tuple({"by": by, "n": n} for by, n in (("one", 1), ("one", 2), ("two", 3)))
    said = lab_text(lab_document(result(tables=(Table(columns, rows, by="by"),)))).splitlines()
    assert said[2:9] == ["  n", "", "  one", "  1", "  2", "", "  two"]


def test_names_of_rows_are_said_once_and_lead_every_band():
    columns = (
        Column("scale", "scale", "text"), Column("d_k", "d_k", "exact"),
        Column("a", "a"), Column("b", "b"), Column("c", "c"),
    )  # fmt: skip
    rows = tuple(
        {"scale": s, "d_k": d, "a": 1.0, "b": 123_456.0, "c": 12_345_678.0}
        for s, d in (("none", 4), ("none", 16), ("1/d_k", 4))
    )
    said = lab_text(lab_document(result(about="", tables=(Table(columns, rows),))), 40).splitlines()
    assert said[2:6] == [
        "  scale  d_k     a        b       c",
        "  none     4  1.00  123,456  1.23e7",
        "          16  1.00  123,456  1.23e7",
        "  1/d_k    4  1.00  123,456  1.23e7",
    ]
    wide = tuple(row | {"c": 1.0, "a": 10_000.0} for row in rows)
    columns = (*columns[:2], *(Column(x, x * 12) for x in "abc"))
    said = lab_text(lab_document(result(tables=(Table(columns, wide),))), 40).splitlines()
    assert sum(line.startswith("  scale  d_k") for line in said) == 3
    assert sum(line.startswith("          16") for line in said) == 3


def test_a_table_may_show_some_of_its_rows_and_files_hold_all():
    rows = tuple({"n": n} for n in (1, 22, 333))
    found = result(tables=(Table((Column("n", "n", "exact"),), rows, shown=(0, 2)),))
    said = [line.strip() for line in lab_text(lab_document(found)).splitlines()]
    assert ("1" in said, "22" in said, "333" in said) == (True, False, True)
    assert found.csv() == "n\n1\n22\n333\n"
    assert [row["n"] for row in lab_document(found)["tables"][0]["rows"]] == [1, 22, 333]

"""An experiment's result: columns, files, and what chance gives."""

import csv
import io
import json
import math
import random

import pytest

from scaledot import ScaledotError
from scaledot.lab.results import Column, Estimate, Line, Panel, Result, Table, chance

ROWS = (
    {"d_k": 4, "raw": Estimate(3.85, 0.1, 4.0), "note": "a, b"},
    {"d_k": 16, "raw": Estimate(16.02, None, 16.0), "note": None},
)


def result(**changes):
    fields = {
        "experiment": "variance",
        "about": "5,000 trials each, seed 1",
        "settings": {"seed": 1},
        "tables": (
            Table(
                (Column("d_k", "d_k", "exact"), Column("raw", "q·k"), Column("raw.z", "z"),
                 Column("note", "note", "text")),
                ROWS,
            ),
        ),
        "says": ("Agrees with theory.",),
        "panels": (Panel("title", "d_k", "variance", (Line("raw", [4, 16], [3.85, 16.02]),)),),
        "source": "docs/maths.md",
    }  # fmt: skip
    return Result(**(fields | changes))


def test_z_is_the_distance_in_standard_errors_or_nothing():
    assert Estimate(3.85, 0.1, 4.0).z == pytest.approx(-1.5)
    assert Estimate(3.85, None, 4.0).z is None
    assert Estimate(3.85, 0.1, None).z is None
    assert Estimate(3.85, 0.0, 4.0).z is None


def test_a_column_by_its_key():
    assert result().column("d_k") == [4, 16]
    assert result().column("raw")[0].theory == 4.0
    with pytest.raises(KeyError, match="no column 'x': it has d_k, raw"):
        result().column("x")


def test_csv_holds_every_digit_and_nothing_for_none():
    rows = list(csv.DictReader(io.StringIO(result().csv())))
    assert list(rows[0]) == ["d_k", "raw", "raw.error", "raw.theory", "raw.z", "note"]
    assert float(rows[0]["raw.z"]) == Estimate(3.85, 0.1, 4.0).z
    assert rows[0]["note"] == "a, b"
    assert rows[1]["raw.error"] == rows[1]["raw.z"] == rows[1]["note"] == ""


def test_saved_files_hold_the_result(tmp_path):
    result().save(tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert found["format"] == "scaledot/lab"
    assert found["tables"][0]["rows"][0]["raw"] == {
        "value": 3.85, "error": 0.1, "theory": 4.0, "z": Estimate(3.85, 0.1, 4.0).z,
    }  # fmt: skip
    assert found["panels"][0]["lines"][0]["y"] == [3.85, 16.02]
    assert found["says"] == ["Agrees with theory."]
    result().save(tmp_path / "x.CSV")
    assert (tmp_path / "x.CSV").read_text("utf-8") == result().csv()


def test_a_file_of_another_kind_or_place_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.json or \.csv"):
        result().save(tmp_path / "x.txt")
    with pytest.raises(ScaledotError, match="cannot write"):
        result().save(tmp_path / "no" / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_finite_is_null_in_json(tmp_path):
    rows = ({"d_k": math.nan, "raw": Estimate(math.inf, None, None)},)
    table = Table((Column("d_k", "d_k"), Column("raw", "q·k")), rows)
    result(tables=(table,)).save(tmp_path / "x.json")
    row = json.loads((tmp_path / "x.json").read_text("utf-8"))["tables"][0]["rows"][0]
    assert row["d_k"] is None
    assert row["raw"]["value"] is None


def test_chance_is_how_often_the_largest_is_as_large():
    draws = random.Random(1)
    for largest, of in ((1.0, 1), (2.0, 5), (2.5, 10)):
        hits = sum(max(abs(draws.gauss(0, 1)) for _ in range(of)) >= largest for _ in range(20_000))
        expected = chance(largest, of)
        error = math.sqrt(expected * (1 - expected) / 20_000)
        assert hits / 20_000 == pytest.approx(expected, abs=4 * error)
    assert chance(0.0, 3) == 1
    assert chance(9.0, 2) == pytest.approx(2 * math.erfc(9 / math.sqrt(2)), rel=1e-12)

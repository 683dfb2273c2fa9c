"""Numbers are written as R 4.2.2 writes them: what it printed for the same values."""

import doctest
import math

import pytest

from scaledot.lab import rprint
from scaledot.lab.rprint import cat, column, frame, r_round

CAT = {
    123456.789: "123456.8", 1e5: "1e+05", 123456.0: "123456", 1e8: "1e+08", 0.1 + 0.2: "0.3",
    1e-5: "1e-05", 1234567.8: "1234568", 0.00012345678: "0.0001234568", -1.5e-10: "-1.5e-10",
    1e15: "1e+15", 99999.9999: "1e+05", 99999999.0: "1e+08", 0.0: "0", -3.0: "-3",
    2.3e-05: "2.3e-05", 1e300: "1e+300", 1e-120: "1e-120",
    3.7477516330558585e-17: "3.747752e-17", 0.647155095127531: "0.6471551",
}  # fmt: skip


@pytest.mark.parametrize("value", CAT)
def test_cat(value):
    assert cat("v:", value) == f"v: {CAT[value]} "


ROUNDED = {
    0.15: (0, 0.1, 0.15), 0.25: (0, 0.2, 0.25), 0.35: (0, 0.3, 0.35), 2.675: (3, 2.7, 2.67),
    1.005: (1, 1, 1), -2.5: (-2, -2.5, -2.5), 0.285: (0, 0.3, 0.28),
    -20.878609672257788: (-21, -20.9, -20.88), 5.015: (5, 5, 5.02),
    1234.5675: (1235, 1234.6, 1234.57),
}  # fmt: skip


@pytest.mark.parametrize("value", ROUNDED)
def test_round(value):
    assert tuple(r_round(value, digits) for digits in range(3)) == ROUNDED[value]


@pytest.mark.parametrize("value", [0.0, math.inf, 1e300, 123.25])
def test_round_leaves_what_has_no_more_digits(value):
    assert r_round(value, 14) == value


def test_a_column_has_one_layout():
    assert frame({
        "a": [1e5, 1], "b": [1e-10, 1], "c": [-1.5, 22], "d": [99999999, -99999.9],
    }) == [
        "      a     b    c          d",
        "1 1e+05 1e-10 -1.5 99999999.0",
        "2 1e+00 1e+00 22.0   -99999.9",
    ]  # fmt: skip
    assert column([0.30000001, 123.456789]) == ["  0.3000", "123.4568"]


def test_names_of_rows_stand_left_and_of_columns_right():
    assert frame({"k_x": [0.92, 0.1], "long_name": [-1.2, -1]}, ["q", "q_b"]) == [
        "     k_x long_name",
        "q   0.92      -1.2",
        "q_b 0.10      -1.0",
    ]


def test_the_examples_run():
    assert doctest.testmod(rprint).failed == 0

"""Panels drawn: into whose axes, with which data, into which files."""

import sys
from dataclasses import replace

import pytest

from scaledot import ScaledotError
from scaledot.lab import figures
from scaledot.lab.results import Line, Panel
from test_results import result

LINES = Panel(
    "title", "d_k", "variance",
    (
        Line("estimate", [4, 16], [3.9, 16.1], "points", error=[0.1, 0.4]),
        Line("theory", [4, 16], [4, 16], "theory"),
        Line("drawn", list(range(1, 21)), list(range(1, 21))),
    ),
    log_x=True, log_y=True,
)  # fmt: skip
BARS = Panel(
    "weights", "key", "weight",
    (
        Line("unscaled", ["k1", "k2"], [0.0, 1.0], "bars"),
        Line("scaled", ["k1", "k2"], [0.4, 0.6], "bars"),
    ),
)  # fmt: skip


def test_each_line_is_drawn_with_its_numbers():
    (ax,) = replace(result(), panels=(LINES,)).plot()
    assert (ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()) == (
        "title",
        "d_k",
        "variance",
    )
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    drawn = {line.get_label(): line for line in ax.get_lines()}
    assert list(drawn["theory"].get_ydata()) == [4, 16]
    assert drawn["theory"].get_linestyle() == "--"
    assert list(drawn["drawn"].get_ydata()) == list(range(1, 21))
    low, high = ax.containers[0].lines[2][0].get_segments()[1][:, 1]
    assert (low, high) == pytest.approx((15.7, 16.5))
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["theory", "drawn", "estimate"]


def test_bars_stand_beside_each_other_over_their_names():
    (ax,) = replace(result(), panels=(BARS,)).plot()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["k1", "k2"]
    heights = [[bar.get_height() for bar in group] for group in ax.containers]
    assert heights == [[0.0, 1.0], [0.4, 0.6]]
    first, second = (group[0] for group in ax.containers)
    assert first.get_x() + first.get_width() == pytest.approx(second.get_x())


def test_labels_of_bars_are_left_out_where_they_would_overlap():
    fine = Panel("t", "x", "y", (Line("a", list(range(20)), [0.123456] * 20, "bars"),))
    few = Panel("t", "x", "y", (Line("a", [0, 1], [0.123456, 2], "bars"),))
    (many,) = replace(result(), panels=(fine,)).plot()
    (two,) = replace(result(), panels=(few,)).plot()
    assert [t.get_text() for t in many.texts] == []
    assert [t.get_text() for t in two.texts] == ["0.123", "2"]


@pytest.mark.parametrize(
    ("y", "shown"), [([0.3, 0.7], ["0.3", "0.5", "0.7"]), ([3, 70], ["2", "5", "10", "20", "50"])]
)
def test_a_narrow_logarithmic_axis_is_labelled_in_plain_numbers(y, shown):
    panel = Panel("t", "x", "y", (Line("a", [1, 2], y),), log_y=True)
    (ax,) = replace(result(), panels=(panel,)).plot()
    ax.figure.canvas.draw()
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert set(labels) >= set(shown)
    assert not any("^" in t.get_text() for t in ax.get_yticklabels(minor=True))


def test_axes_that_are_given_are_drawn_into():
    from matplotlib.figure import Figure

    two = replace(result(), panels=(LINES, BARS))
    figure = Figure()
    ax = figure.add_subplot()
    assert result().plot(ax) == [ax]
    assert result().plot(ax=[ax]) == [ax]
    grid = Figure().subplots(1, 2)
    assert two.plot(grid) == list(grid)
    with pytest.raises(ValueError, match="variance has 2 panels: pass as many axes, got 1"):
        two.plot(ax)


@pytest.mark.parametrize("kind", [".png", ".svg", ".pdf"])
def test_a_saved_plot_is_the_same_each_time(kind, tmp_path):
    both = replace(result(), panels=(LINES, BARS))
    for name in ("a", "b"):
        figures.save(both, tmp_path / f"{name}{kind}")
    first, second = ((tmp_path / f"{name}{kind}").read_bytes() for name in ("a", "b"))
    assert first == second
    assert first.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[kind])


def test_what_cannot_be_plotted_says_so(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"plots are saved as \.png, \.svg, \.pdf"):
        figures.checked("x.gif")
    with pytest.raises(ScaledotError, match="cannot write"):
        figures.save(result(), tmp_path / "no" / "x.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for ask in (lambda: figures.checked("x.png"), result().plot):
        with pytest.raises(ScaledotError, match=r'pip install "scaledot\[plot\]"'):
            ask()

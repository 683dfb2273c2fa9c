"""The panels of a result drawn with matplotlib, which loads here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaledot import ScaledotError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scaledot.lab.results import Panel, Result

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart with any colour vision. Source: jfly.uni-koeln.de/color."""
_INSIDE = 4
"""Lines up to which the legend finds room among them."""
_LABELS = 72
"""Characters of all bars' labels up to which they stand beside each other."""
KINDS = (".png", ".svg", ".pdf")


def draw(result: Result, ax: Axes | Sequence[Axes] | None = None) -> list[Axes]:
    """See `Result.plot`."""
    _require()
    count = len(result.panels)
    if ax is None:
        axes = _figure(count).axes
    else:
        axes = list(getattr(ax, "flat", ax if isinstance(ax, Sequence) else [ax]))
    if len(axes) != count:
        raise ValueError(
            f"{result.experiment} has {count} panels: pass as many axes, got {len(axes)}"
        )
    for one, panel in zip(axes, result.panels, strict=True):
        _panel(one, panel)
    return axes


def save(result: Result, path: str | Path) -> None:
    """Draw the panels into a .png, .svg or .pdf file, by the name's end; the same data give the
    same bytes.

    Raises: ValueError for another end; ScaledotError without matplotlib or where the file cannot
    be written.
    """
    kind = checked(path)
    from scaledot.files import write

    write(path, picture(result, kind))


def picture(result: Result, kind: str) -> bytes:
    """The panels as the bytes of a file of one of `KINDS`. Raises ScaledotError without
    matplotlib."""
    _require()
    import io

    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "scaledot"}):
        figure = _figure(len(result.panels))
        draw(result, figure.axes)
        undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        data = io.BytesIO()
        figure.savefig(data, format=kind[1:], metadata=undated.get(kind, {}))
    return data.getvalue()


def checked(path: str | Path) -> str:
    """The kind of file that a plot path asks for, before anything is run.

    Raises: ValueError for another end, ScaledotError without matplotlib.
    """
    kind = Path(path).suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"{path}: plots are saved as {', '.join(KINDS)}")
    _require()
    return kind


def _require() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ScaledotError('plots need matplotlib: pip install "scaledot[plot]"') from None


def _figure(count: int) -> Figure:
    """A figure that no window shows and nobody has to close."""
    from matplotlib.figure import Figure

    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(5.6 * columns, 3.8 * rows), layout="constrained", dpi=120)
    for i in range(count):
        figure.add_subplot(rows, columns, i + 1)
    return figure


def _panel(ax: Axes, panel: Panel) -> None:
    bars = [line for line in panel.lines if line.kind == "bars"]
    colors = cycle(COLORS)
    for line in panel.lines:
        color = "#777777" if line.kind == "theory" else next(colors)
        if line.kind == "bars":
            width = 0.8 / len(bars)
            at = [j + (bars.index(line) - (len(bars) - 1) / 2) * width for j in range(len(line.x))]
            drawn = ax.bar(at, line.y, width, color=color, label=line.label)
            names = [f"{y:.3g}" for y in line.y]
            if max(map(len, names)) * len(line.x) * len(bars) <= _LABELS:
                ax.bar_label(drawn, names, fontsize=7)
        elif line.kind == "theory":
            ax.plot(line.x, line.y, "--", color=color, linewidth=1, label=line.label)
        elif line.kind == "points":
            ax.errorbar(
                line.x, line.y, yerr=line.error, fmt="o", color=color, markersize=4, capsize=3,
                label=line.label,
            )  # fmt: skip
        else:
            mark = "o" if len(line.x) <= 12 else ""
            ax.plot(line.x, line.y, marker=mark, markersize=4, color=color, label=line.label)
    if bars:
        ax.set_xticks(range(len(bars[0].x)), [str(name) for name in bars[0].x])
    elif panel.log_x:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    if panel.log_y:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        if high < 100 * low:
            from matplotlib.ticker import LogLocator, NullFormatter

            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    if len(panel.lines) > _INSIDE:
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    elif len(panel.lines) > 1:
        ax.legend(frameon=False, fontsize=8)

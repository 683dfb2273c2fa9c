"""What an experiment gives: tables of numbers beside theory, sentences, and figures as data.

An experiment fills in a `Result`; printing, files and figures are the same for all of them.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Literal[
    "number",
    "small",
    "exact",
    "whole",
    "weight",
    "probability",
    "share",
    "factor",
    "size",
    "seconds",
    "text",
]


@dataclass(frozen=True)
class Estimate:
    """A simulated number beside the one that theory gives.

    error: its standard error, None where there is none (a distribution without fourth moment).
    theory: None where nothing is known to compare with.
    """

    value: float
    error: float | None = None
    theory: float | None = None

    @property
    def z(self) -> float | None:
        """Distance from theory in standard errors, None without one of them."""
        if self.theory is None or not self.error:
            return None
        return (self.value - self.theory) / self.error


Value = float | str | Estimate | None


@dataclass(frozen=True)
class Column:
    """One column of a table: the key of its values, its heading, and how they are written.

    form: a function of `numerals`, or "text". An `Estimate` is shown as theory, estimate and
    standard error under the one heading, whatever the form; its z has a column of its own where
    the table names one, as the key "NAME.z". group: a heading above the headings of neighbours that
    share it.
    """

    key: str
    heading: str
    form: Form = "number"
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of values by column key. by: a column whose values are printed as headings between the
    rows. shown: the places of the rows that a screen prints, None for all, () for a table that only
    files hold."""

    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    title: str = ""
    by: str = ""
    shown: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Line:
    """One series of a figure. kind: "line", "points" (with `error` bars), "theory" (a thin dashed
    line), or "bars" (x are then names)."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    kind: Literal["line", "points", "theory", "bars"] = "line"
    error: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Result:
    """What an experiment found.

    experiment: the name it was called by. about: how it was run, in one line. settings: the
    arguments that repeat it. tables: numbers. lines: what is printed above them as it stands. says:
    sentences under them, the verdict first. panels: figures as data. source: where theory stands.
    """

    experiment: str
    about: str
    settings: Mapping[str, Any]
    tables: tuple[Table, ...]
    says: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()
    source: str = ""
    lines: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Mapping[str, Value], ...]:
        """Of the first table."""
        return self.tables[0].rows

    def column(self, key: str) -> list[Value]:
        """The values of one column of the first table's rows, from above.

        Raises: KeyError naming the columns there are.
        """
        keys = self._keys()
        if key not in keys:
            raise KeyError(f"no column {key!r}: it has {', '.join(keys)}")
        return [row[key] for row in self.rows]

    def __str__(self) -> str:
        from scaledot.document import lab_document
        from scaledot.terminal import lab_text

        return lab_text(lab_document(self))

    __repr__ = __str__
    """What a prompt or a notebook shows is the table."""

    def _repr_html_(self) -> str:
        """What it prints and, with matplotlib, its figures."""
        from scaledot import ScaledotError
        from scaledot.report import still

        drawn = None
        if self.panels:
            from scaledot.lab import figures

            with contextlib.suppress(ScaledotError):  # without matplotlib there are none
                drawn = figures.picture(self, ".svg")
        return still(f"scaledot lab {self.experiment}", str(self), drawn)

    def _keys(self) -> list[str]:
        """Of the columns of every table that shows the first one's rows."""
        same = [t.columns for t in self.tables if t.rows is self.rows]
        return list(dict.fromkeys(c.key for columns in same for c in columns))

    def csv(self) -> str:
        """The first table, with the columns of those that show more of its rows: an estimate is
        four columns, `NAME`, `NAME.error`, `NAME.theory` and `NAME.z`; numbers with all their
        digits, nothing for None."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        columns = [key for key in self._keys() if not key.endswith(".z")]
        flat = [_flat(row, columns) for row in self.rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        writer.writerow(names)
        writer.writerows([row.get(name, "") for name in names] for row in flat)
        return out.getvalue()

    def save(self, path: str | Path) -> None:
        """Write everything as JSON (`scaledot.document`), or the first table as CSV, by the name's
        end. The file appears whole or not at all.

        Raises: ValueError for another end; OSError.
        """
        from scaledot.document import dump, lab_document
        from scaledot.files import write

        kind = Path(path).suffix.lower()
        if kind not in (".json", ".csv"):
            raise ValueError(f"{path}: results are saved as .json or .csv")
        write(path, dump(lab_document(self)) if kind == ".json" else self.csv().encode())

    def plot(self, ax: Axes | Sequence[Axes] | None = None) -> list[Axes]:
        """Draw the panels and return their axes; into `ax`, or a new figure without one.

        Raises: ScaledotError without matplotlib; ValueError for another number of axes than
        panels.
        """
        from scaledot.lab import figures

        return figures.draw(self, ax)


def _flat(row: Mapping[str, Value], columns: Sequence[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in columns:
        value = row.get(key)
        if isinstance(value, Estimate):
            flat |= {
                key: value.value,
                f"{key}.error": value.error,
                f"{key}.theory": value.theory,
                f"{key}.z": value.z,
            }
        else:
            flat[key] = value
    return {k: "" if v is None else v for k, v in flat.items()}


def chance(largest: float, of: int) -> float:
    """How often the largest |z| of that many independent estimates is as large, if theory holds."""
    one = math.erfc(largest / math.sqrt(2))
    return -math.expm1(of * math.log1p(-one)) if one < 1 else 1.0

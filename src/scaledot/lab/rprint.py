"""Numbers as R writes them: `round`, `cat`, `print` of a matrix and of a data frame, at R's default
of 7 significant digits.

R gives each number as few digits as its first 7 need, and a column one layout: as many decimals as
its neediest number, or powers of ten where that is narrower. Source: R, src/main/format.c
(formatReal) and src/nmath/fround.c, version 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

DIGITS = 7


def r_round(x: float, digits: int) -> float:
    """R's `round(x, digits)`: of the two neighbours with so many decimals the nearer in float64,
    of equally near ones the even.

    >>> r_round(0.15, 1), r_round(2.675, 2), r_round(-28.9177, 2)
    (0.1, 2.67, -28.92)
    """
    if x == 0 or not math.isfinite(x) or digits > 15 - math.floor(math.log10(abs(x))):
        return x
    power = 10.0**digits
    size = abs(x)
    whole = math.floor(power * size)
    below, above = whole / power, math.ceil(power * size) / power
    down, up = size - below, above - size
    nearest = below if down < up or (down == up and whole % 2 == 0) else above
    return math.copysign(nearest, x)


def column(values: Sequence[float]) -> list[str]:
    """Finite numbers in the one layout that R gives a column, all equally wide.

    >>> column([3.947771, 1052.891052]), column([0.92, 0.1]), column([1e5, 1.0])
    (['   3.947771', '1052.891052'], ['0.92', '0.10'], ['1e+05', '1e+00'])
    """
    before, after, significant, powers = 1, 0, 1, []
    negative = int(any(x < 0 for x in values))
    for x in values:
        mantissa, _, exponent = f"{abs(x):.{DIGITS - 1}e}".partition("e")
        power = int(exponent)
        needed = len(mantissa.replace(".", "").rstrip("0")) or 1
        # Seven digits may round up to a power of ten that all digits before the point do not.
        half = 0.5 / 10.0 ** max(DIGITS - power, 0)
        left = power if power > 0 and abs(x) < 10.0**power - half else power + 1
        before = max(before, max(left, 1) + (x < 0))
        after = max(after, needed - power - 1)
        significant = max(significant, needed)
        powers.append(power)
    fixed = before + after + (after > 0)
    mark = 5 if any(abs(power) >= 100 for power in powers) else 4  # e+05, e-100
    scientific = negative + significant + (significant > 1) + mark
    if fixed <= scientific:
        return [f"{x + 0.0:{fixed}.{after}f}" for x in values]
    return [f"{x:{scientific}.{significant - 1}e}" for x in values]


def cat(label: str, *values: float) -> str:
    """A line of `cat(label, values, "\\n")`: each number in a layout of its own, a space behind it.

    >>> cat("x:", 0.647155, 1.0, 2.3e-05)
    'x: 0.647155 1 2.3e-05 '
    """
    return " ".join([label, *(column([x])[0] for x in values), ""])


def frame(columns: Mapping[str, Sequence[float]], names: Sequence[str] | None = None) -> list[str]:
    """The lines of a printed data frame, or of a matrix if its rows have names.

    >>> frame({"k_x": [0.92, 0.1], "k_z": [-1.2, -1.0]}, ["q_a", "q_b"])
    ['     k_x  k_z', 'q_a 0.92 -1.2', 'q_b 0.10 -1.0']
    """
    rows = len(next(iter(columns.values())))
    names = [str(i + 1) for i in range(rows)] if names is None else names
    wide = max(map(len, names))
    cells = [["", *names]]
    cells[0] = [name.ljust(wide) for name in cells[0]]
    for heading, values in columns.items():
        written = column(values)
        width = max(len(heading), len(written[0]))
        cells.append([text.rjust(width) for text in (heading, *written)])
    return [" ".join(row) for row in zip(*cells, strict=True)]

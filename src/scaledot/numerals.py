"""Numbers as people read them: three digits, at most two decimals, and what is not zero never reads
as zero. Findings and every screen use these; they need nothing but the standard library."""

import math
import re
from collections.abc import Sequence


def number(x: float | None) -> str:
    """Any quantity: ``6.67``, ``42.9``, ``160``, ``1,245``, from a million on ``1.23e6``.

    ``≈0`` below 0.005, ``–`` if undefined (None or NaN), ``∞``; minus is U+2212.

    >>> [number(x) for x in (6.67, 9.996, 99.96, 999.6, 0.0004, 1e9, -3, None)]
    ['6.67', '10.0', '100', '1,000', '≈0', '1.00e9', '−3.00', '–']
    """
    if x is None or math.isnan(x):
        return "–"
    size = abs(x)
    if math.isinf(x):
        text = "∞"
    elif size < 0.005:
        return "≈0" if x else "0"
    elif size >= 999_999.5:
        text = f"{size:.2e}".replace("e+0", "e").replace("e+", "e")
    else:
        fits = ((2, 10), (1, 100))
        decimals = next((d for d, limit in fits if round(size, d) < limit), 0)
        text = f"{size:,.{decimals}f}"
    return "−" + text if x < 0 else text


def small(x: float | None) -> str:
    """As :func:`number`, but what is near zero keeps its digits: ``2.1e−7``.

    >>> [small(x) for x in (0.31, 2.1e-7, 0, None)]
    ['0.31', '2.1e−7', '0', '–']
    """
    if x is None or not 0 < abs(x) < 0.005:
        return number(x)
    return f"{x:.1e}".replace("e-0", "e−").replace("-", "−")


def whole(x: float | None) -> str:
    """A large quantity in units: ``1,245``, ``<1`` between 0 and a half; else as :func:`number`.

    >>> [whole(x) for x in (1244.9, 29, 0.4, 0)]
    ['1,245', '29', '<1', '0']
    """
    if x is None or not math.isfinite(x) or abs(x) >= 999_999.5:
        return number(x)
    return "<1" if 0 < x < 0.5 else f"{round(x):,}".replace("-", "−")


def fraction(x: float | None) -> str:
    """A gradient or share from 0 to 1: ``0.32``, never rounded to 0 or 1.

    >>> [fraction(x) for x in (0.32, 0.0004, 0, 0.996, 1)]
    ['0.32', '<0.01', '0', '>0.99', '1.00']
    """
    if x is None or not 0 < x < 1:
        return number(x)
    return "<0.01" if x < 0.005 else ">0.99" if x >= 0.995 else f"{x:.2f}"


def weight(x: float | None) -> str:
    """An attention weight or chance: ``.64``, never rounded to 0 or 1.

    >>> [weight(x) for x in (0.638, 0.0004, 0, 0.9999, 1)]
    ['.64', '<.01', '0', '>.99', '1.00']
    """
    return fraction(x).replace("0.", ".") if x is not None and 0 < x < 1 else number(x)


def probability(x: float | None) -> str:
    """A weight whose digits count at both ends: ``0.31``, ``2.1e−7``, ``1 − 3.7e−4``.

    >>> [probability(x) for x in (0.31, 2.1e-7, 1 - 3.7e-4, 1, None)]
    ['0.31', '2.1e−7', '1 − 3.7e−4', '1', '–']
    """
    if x is not None and 0.995 < x <= 1:
        return f"1 − {small(1 - x)}" if x < 1 else "1"
    return small(x)


def share(x: float | None) -> str:
    """A share in percent: ``47 %``, never rounded to 0 or 100.

    >>> [share(x) for x in (0.4667, 0.0004, 0, 0.9999, 1)]
    ['47 %', '<1 %', '0 %', '>99 %', '100 %']
    """
    if x is None or math.isnan(x):
        return "–"
    small, large = 0 < x <= 0.005, 0.995 <= x < 1
    return "<1 %" if small else ">99 %" if large else f"{x * 100:.0f} %"


def exact(x: float | None) -> str:
    """As :func:`number`, but a whole number has no decimals: ``15``, ``6.05``."""
    return number(x) if x is None or x % 1 else count(int(x))


def factor(x: float | None) -> str:
    """A scale or temperature, to four digits: ``0.125``, ``0.08839``, ``22.63``.

    >>> [factor(x) for x in (0.125, 128**-0.5, 512**0.5, 8.0, None)]
    ['0.125', '0.08839', '22.63', '8', '–']
    """
    return number(x) if x is None or not math.isfinite(x) else f"{x:.4g}".replace("-", "−")


def count(n: int) -> str:
    """``12,288``"""
    return f"{n:,}"


def counted(n: int, noun: str) -> str:
    """``1 text``, ``12,288 tokens``"""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def seconds(x: float) -> str:
    """``0.1 s``, ``12 s``, ``2 min 5 s``"""
    if x >= 60:
        return f"{round(x) // 60} min {round(x) % 60} s"
    return f"{x:.0f} s" if x >= 9.95 else f"{max(x, 0.1):.1f} s"


def size(n: int) -> str:
    """``512 B``, ``38 kB``, ``1.2 MB``, ``4.3 GB``, ``1,100 TB``"""
    for unit, limit in (("B", 1e3), ("kB", 1e6)):
        if n < limit:
            return f"{n * 1000 / limit:.0f} {unit}"
    for unit, one in (("MB", 1e6), ("GB", 1e9)):
        if n < 999.95 * one:
            return f"{n / one:.1f} {unit}"
    return f"{n / 1e12:.1f} TB" if n < 99.95e12 else f"{n / 1e12:,.0f} TB"


def ranges(values: Sequence[int]) -> str:
    """Sorted integers: ``0–3, 7``"""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def estimated(value: float, error: float | None, theory: float | None) -> tuple[str, str, str]:
    """(theory, estimate, standard error): the error to two digits, the estimate to the same place,
    a theory that is a whole number without decimals; ``–`` for what there is not.

    >>> estimated(1.0483, 0.0203, 1.0), estimated(3.1e-9, 2e-10, None)
    (('1', '1.048', '0.020'), ('–', '3.10e−9', '2.0e−10'))
    """
    if not error or not math.isfinite(error) or not math.isfinite(value):
        return small(theory), small(value), number(error)
    place = 1 - math.floor(math.log10(float(f"{error:.1e}")))
    largest = max(abs(value), error)
    if (place > 6 and largest < 1e-3) or largest >= 1e6:
        digits = max(place + math.floor(math.log10(largest)), 0)
        return small(theory), _powers(value, digits), _powers(error, 1)
    if theory is None or math.isnan(theory):
        return "–", _placed(value, place), _placed(error, place)
    shown = _placed(theory, 0 if theory == round(theory) else place)
    return shown, _placed(value, place), _placed(error, place)


def _placed(x: float, place: int) -> str:
    """Rounded to that many decimals, or, for fewer than none, to tens and so on."""
    return f"{round(x, place):,.{max(place, 0)}f}".replace("-", "−")


def _powers(x: float, digits: int) -> str:
    text = f"{x:.{digits}e}" if x else "0"
    return re.sub(r"e([+-])0?", lambda m: "e" + m[1].strip("+"), text).replace("-", "−")


def signed(x: float | None) -> str:
    """A distance in standard errors: ``+1.41``, ``−0.49``; ``–`` if undefined.

    >>> [signed(x) for x in (1.408, -0.49, 0, None)]
    ['+1.41', '−0.49', '0.00', '–']
    """
    if x is None or math.isnan(x):
        return "–"
    return f"{x:+.2f}".replace("-", "−") if round(x, 2) else "0.00"

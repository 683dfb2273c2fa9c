"""What an experiment is asked: each argument checked once, with one clear sentence."""

from __future__ import annotations

from collections.abc import Iterable

from scaledot.checks import whole


def sizes(name: str, values: object, least: int = 1) -> tuple[int, ...]:
    """Whole numbers of at least `least`, one or several; each once, in the order given.

    Raises: TypeError, ValueError; also for none at all.
    """
    several = values if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    found = tuple(dict.fromkeys(whole(name, value, least) for value in several))
    if not found:
        raise ValueError(f"{name} is empty: pass at least one size")
    return found


def seed(value: object) -> int:
    """A seed: a whole number from 0.

    Raises: TypeError, ValueError.
    """
    return whole("seed", value, least=0)


def one_of(name: str, value: object, known: Iterable[str]) -> str:
    """One of the names.

    Raises: ValueError naming them all.
    """
    names = list(known)
    if value not in names:
        raise ValueError(f"{name} is {value!r}: pass one of {', '.join(names)}")
    return str(value)

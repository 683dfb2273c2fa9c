"""A training run as its monitor wrote it: the time-line file, read, checked and summed up.

`Reader` takes the file of `tracking.TimeLine`, also one that is still being written: what it has
read it does not read again. `read` is one reading. `document` is what the terminal prints and
`--json` saves.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scaledot import ScaledotError, __version__
from scaledot.alarms import FACTORS, Event
from scaledot.tracking import FORMAT, LOW_IS_BAD, NAMES, VERSION

MOST_MOVED = 5
NOTES = {
    "torn": "line {line} was cut off while it was written: left out",
    "others": "{n} of {all} steps watched other layers: left out",
}
"""What may be left out of a file, by id."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class UnreadableError(ScaledotError):
    """A file that is no time line that can be read. id: "missing", "foreign", "version", "damaged"
    or "empty", in which no step is; line: of a damaged one, from 1, else 0."""

    def __init__(self, id: str, sentence: str, line: int = 0) -> None:
        super().__init__(sentence)
        self.id, self.line = id, line


@dataclass(frozen=True)
class Layer:
    """A layer that was watched; scale: the largest factor that its scores were given."""

    path: str
    heads: int
    kv_heads: int
    d_k: int
    scale: float


@dataclass(frozen=True)
class Note:
    """What was left out: an id of `NOTES` and the numbers of its sentence, which `str` gives."""

    id: str
    numbers: Mapping[str, int]

    def __str__(self) -> str:
        return NOTES[self.id].format(**self.numbers)


@dataclass(frozen=True, eq=False)
class Run:
    """What a time-line file holds, steps ascending.

    values: by name (steps, heads), the heads of all layers in order; float64, NaN for a head
    without rows or whose value is NaN. seconds: Unix time. losses: None where none was given.
    notes: what was left out.
    """

    model: str
    every: int
    layers: tuple[Layer, ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float | None, ...]
    rows: tuple[int, ...]
    nonfinite: tuple[int, ...]
    values: Mapping[str, np.ndarray]
    alarms: tuple[Event, ...]
    notes: tuple[Note, ...]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of each column of the values."""
        return [(i, h) for i, layer in enumerate(self.layers) for h in range(layer.heads)]

    def worst(self, name: str) -> list[tuple[float, int] | None]:
        """Of each step the worst head's value and its column, None where no head has one."""
        found: list[tuple[float, int] | None] = []
        for row in self.values[name]:
            if np.isnan(row).all():
                found.append(None)
                continue
            at = int(np.nanargmin(row) if name in LOW_IS_BAD else np.nanargmax(row))
            found.append((float(row[at]), at))
        return found


class _Damaged(Exception):
    """A line that is not what a monitor writes: why."""


@dataclass(frozen=True)
class _Head:
    """A first line, checked."""

    model: str
    every: int
    layers: tuple[Layer, ...]

    def same_heads(self, other: _Head) -> bool:
        """The same heads are comparable, whatever their scale was."""
        return self is other or [(x.path, x.heads) for x in self.layers] == [
            (x.path, x.heads) for x in other.layers
        ]


@dataclass(frozen=True)
class _Seen:
    """One step's line, checked; number: how many steps' lines came until it."""

    number: int
    time: float
    loss: float | None
    rows: int
    nonfinite: int
    values: dict[str, np.ndarray]
    alarms: list[Event]
    head: _Head


@dataclass
class _Lines:
    """What the lines so far said. count: how many, empty ones left out. torn: the last one's number
    where it is no whole JSON. life: another for steps that cannot be laid beside those before."""

    life: str = field(default_factory=lambda: secrets.token_hex(4))
    count: int = 0
    numbered: int = 0
    head: _Head | None = None
    steps: dict[int, _Seen] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    torn: int | None = None

    def add(self, line: bytes, path: str | Path) -> None:
        """Raises: UnreadableError for a line that no monitor writes there."""
        if not line.strip():
            return
        self.count += 1
        found = _json(line)
        starts = _is_header(found)
        if self.head is None and not starts:
            raise UnreadableError(
                "foreign",
                f"{path} is no time line: its first line has no format {FORMAT!r}; "
                "pass the file that Monitor(file=…) wrote",
            )
        at = self.count
        try:
            if self.torn is not None:
                # A killed run left it; whoever resumed it wrote a first line.
                if not starts:
                    at = self.torn
                    raise _Damaged("not whole JSON")
                self.notes.append(Note("torn", {"line": self.torn}))
                self.torn = None
            if found is None:
                self.torn = self.count
            elif starts:
                head = _header(found, path)
                self.head = self.head if head == self.head else head
            else:
                self._step(found)
        except _Damaged as why:
            raise UnreadableError(
                "damaged",
                f"{path} is damaged in line {at}: {why}; cut the file before that line to read "
                "what comes before",
                at,
            ) from None

    def _step(self, found: Mapping[str, Any]) -> None:
        assert self.head is not None  # `add` saw to it
        step = _whole(found, "step")
        seen = _step(found, step, self.head, self.numbered + 1)
        if self.steps and self.last.head != self.head:
            self.life = secrets.token_hex(4)
        self.numbered += 1
        self.steps.pop(step, None)
        self.steps[step] = seen

    @property
    def last(self) -> _Seen:
        """The step whose line came last."""
        return next(reversed(self.steps.values()))

    def run(self, after: int) -> Run:
        """The steps whose lines came after so many."""
        head = self.last.head
        kept = {n: x for n, x in self.steps.items() if x.head.same_heads(head)}
        notes = list(self.notes)
        if self.torn is not None:
            notes.append(Note("torn", {"line": self.torn}))
        if left := len(self.steps) - len(kept):
            notes.append(Note("others", {"n": left, "all": len(self.steps)}))
        steps = sorted(n for n, x in kept.items() if x.number > after)
        seen = [kept[n] for n in steps]
        heads = sum(x.heads for x in head.layers)
        return Run(
            head.model, head.every, head.layers, tuple(steps), tuple(x.time for x in seen),
            tuple(x.loss for x in seen), tuple(x.rows for x in seen),
            tuple(x.nonfinite for x in seen),
            {name: np.array([x.values[name] for x in seen]).reshape(-1, heads) for name in NAMES},
            tuple(a for x in seen for a in x.alarms), tuple(notes),
        )  # fmt: skip


class Reader:
    """A time-line file, of a run that is over or goes on.

    A run that was resumed wrote a first line again; a step that comes again replaces the one
    before. A line that a killed run left unfinished is left out, with a note; so are steps in which
    other layers were watched than in the last. A last line without its end counts where it is
    whole, else it is left out until the rest of it came. A file that was replaced or cut is read
    anew.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._anew()

    def _anew(self) -> None:
        self._lines = self._seen = _Lines()
        self._file, self._offset, self._end = (0, 0), 0, b""

    @property
    def mark(self) -> tuple[str, int]:
        """What of the file was read: a name that changes where steps cannot be added to those
        before (another file, other layers), and how many steps' lines."""
        return self._seen.life, self._seen.numbered

    def look(self) -> None:
        """Read what came since the last look.

        Raises: UnreadableError for a file that is missing, no time line, damaged, or without a
        step; the next look reads it from its start.
        """
        try:
            lines = self._fresh().split(b"\n")
            for line in lines[:-1]:
                self._lines.add(line, self.path)
            # The last has no end yet: it may be half a line, and is read again.
            self._seen = self._lines
            if lines[-1].strip():
                now = self._lines
                self._seen = replace(now, steps=dict(now.steps), notes=list(now.notes))
                self._seen.add(lines[-1], self.path)
            if not self._seen.steps:
                raise UnreadableError(
                    "empty", f"{self.path} holds no step yet: wait for the first that is looked at"
                )
        except OSError as error:
            self._anew()
            why = (error.strerror or str(error)).lower()
            raise UnreadableError("missing", f"cannot read {self.path}: {why}") from None
        except ScaledotError:
            self._anew()
            raise

    def _fresh(self) -> bytes:
        """What follows the lines that were read, all of it where they are not there any more."""
        with open(self.path, "rb") as file:
            state = os.fstat(file.fileno())
            file.seek(self._offset - len(self._end))
            if self._file != (state.st_dev, state.st_ino) or file.read(len(self._end)) != self._end:
                self._anew()
                file.seek(0)
            self._file = state.st_dev, state.st_ino
            fresh = file.read()
        whole = fresh.rfind(b"\n") + 1
        if whole:
            self._offset += whole
            self._end = fresh[fresh.rfind(b"\n", 0, whole - 1) + 1 : whole]
        return fresh

    def run(self, after: int = 0) -> Run:
        """The file as it was at the last look, or the steps whose lines came after so many."""
        return self._seen.run(after)


def read(path: str | Path) -> Run:
    """A time-line file as it is now, read by a `Reader`.

    Raises: UnreadableError, a ScaledotError, as `Reader.look`.
    """
    reader = Reader(path)
    reader.look()
    return reader.run()


# One line


def _json(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for one that is none."""
    try:
        found = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_header(found: dict[str, Any] | None) -> bool:
    return found is not None and found.get("format") == FORMAT


def _header(found: Mapping[str, Any], path: str | Path) -> _Head:
    if found.get("version") != VERSION:
        raise UnreadableError(
            "version",
            f"{path} is of version {found.get('version')}, this scaledot reads {VERSION}: "
            "read it with the scaledot that wrote it",
        )
    model, layers = found.get("model"), found.get("layers")
    if not isinstance(model, dict) or not isinstance(layers, list) or not layers:
        raise _Damaged("no model or no layers")
    if missing := set(NAMES).difference(_list(found, "measures")):
        raise _Damaged(f"no measure {min(missing)}")
    return _Head(_text(model, "name"), _whole(found, "every"), tuple(_layer(x) for x in layers))


def _layer(found: Any) -> Layer:
    if not isinstance(found, dict):
        raise _Damaged("a layer is no object")
    heads, kv_heads, d_k = (_whole(found, x) for x in ("heads", "kv_heads", "d_k"))
    if not 0 < heads <= 1 << 16:
        raise _Damaged(f"a layer has {heads} heads")
    return Layer(_text(found, "path"), heads, kv_heads, d_k, _number(found.get("scale"), "scale"))


def _step(found: Mapping[str, Any], step: int, head: _Head, number: int) -> _Seen:
    given, layers = found.get("heads"), head.layers
    if not isinstance(given, dict):
        raise _Damaged("no heads")
    values = {}
    for name in NAMES:
        rows = given.get(name)
        if (
            not isinstance(rows, list)
            or len(rows) != len(layers)
            or any(
                not isinstance(x, list) or len(x) != layer.heads
                for x, layer in zip(rows, layers, strict=True)
            )
        ):
            raise _Damaged(f"{name} is not one number a head of each layer")
        values[name] = np.array(
            [math.nan if x is None else _number(x, name) for layer in rows for x in layer]
        )
    loss = found.get("loss")
    return _Seen(
        number, _number(found.get("time"), "time"), None if loss is None else _number(loss, "loss"),
        _whole(found, "rows"), _whole(found, "nonfinite"), values,
        [_alert(x, step, layers) for x in _list(found, "alarms")], head,
    )  # fmt: skip


def _alert(found: Any, step: int, layers: tuple[Layer, ...]) -> Event:
    if not isinstance(found, dict):
        raise _Damaged("an alarm is no object")
    layer, head = _whole(found, "layer"), _whole(found, "head")
    if layer >= len(layers) or head >= layers[layer].heads:
        raise _Damaged(f"an alarm names head {layer}.{head}, which there is not")
    words = {x: _text(found, x) for x in ("rule", "measure", "path", "why", "action")}
    numbers = {x: _number(found.get(x), x) for x in ("value", "threshold")}
    also = _whole(found, "also") if "also" in found else 0
    cause = _cause(found.get("cause", {}))
    return Event(step=step, layer=layer, head=head, also=also, cause=cause, **words, **numbers)  # type: ignore[arg-type]


def _cause(found: Any) -> dict[str, Any]:
    """What `alarms.causes` tells."""
    if not isinstance(found, dict):
        raise _Damaged("a cause is no object")
    told: dict[str, Any] = {x: _whole(found, x) for x in ("rows", "since") if x in found}
    told |= {x: _finite(found[x], x) for x in ("before", "scale") if x in found}
    for name in ("grown", "now"):
        if name in found:
            if not isinstance(found[name], dict) or not found[name].keys() <= FACTORS.keys():
                raise _Damaged(f"{name} holds other factors than {', '.join(FACTORS)}")
            told[name] = {x: _finite(y, x) for x, y in found[name].items()}
    if "grown" in told and "since" not in told:
        raise _Damaged("grown since no step")
    return told


def _whole(found: Mapping[str, Any], name: str) -> int:
    x = found.get(name)
    if isinstance(x, bool) or not isinstance(x, int) or x < 0:
        raise _Damaged(f"{name} is no whole number")
    return x


def _number(x: Any, name: str) -> float:
    if isinstance(x, str) and x in _NOT_FINITE:
        return _NOT_FINITE[x]
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise _Damaged(f"{name} is no number")
    return float(x)


def _finite(x: Any, name: str) -> float:
    if not math.isfinite(number := _number(x, name)):
        raise _Damaged(f"{name} is not finite")
    return number


def _text(found: Mapping[str, Any], name: str) -> str:
    if not isinstance(x := found.get(name), str):
        raise _Damaged(f"{name} is no text")
    return x


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(x := found.get(name), list):
        raise _Damaged(f"{name} is no list")
    return x


# Documents


def document(run: Run, file: str) -> dict[str, Any]:
    """A run summed up, as JSON values: per measure the worst head of each step and its first, last
    and extreme number; the heads whose scores' variance changed by the largest factor between the
    first and the last step; every alarm. A number that is not finite is None or its name."""
    return {
        "format": "scaledot/timeline-audit",
        "version": 1,
        "scaledot": __version__,
        "file": file,
        "model": {"name": run.model},
        "every": run.every,
        "layers": [vars(x) for x in run.layers],
        "steps": list(run.steps),
        "seconds": run.seconds[-1] - run.seconds[0],
        "losses": [None if x is None else plain(x) for x in run.losses],
        "nonfinite": list(run.nonfinite),
        "measures": [_measure(run, name) for name in NAMES],
        "moved": _moved(run),
        "alarms": [{k: plain(x) for k, x in vars(alert).items()} for alert in run.alarms],
        "notes": [str(x) for x in run.notes],
    }


def _measure(run: Run, name: str) -> dict[str, Any]:
    low = name in LOW_IS_BAD
    known = [(step, *x) for step, x in zip(run.steps, run.worst(name), strict=True) if x]

    def point(step: int, value: float, at: int) -> dict[str, Any]:
        return {"step": step, "value": plain(value), "head": list(run.heads[at])}

    series = {step: value for step, value, _ in known}
    points: dict[str, Any] = {"first": None, "last": None, "extreme": None}
    if known:
        extreme = (min if low else max)(known, key=lambda x: x[1])
        chosen = zip(points, (known[0], known[-1], extreme), strict=True)
        points = {key: point(*x) for key, x in chosen}
    worst = [plain(series[x]) if x in series else None for x in run.steps]
    return {"name": name, "low": low, "worst": worst, **points}


def _moved(run: Run) -> list[dict[str, Any]]:
    wide, entropy = run.values["score_var_within"], run.values["entropy"]
    with np.errstate(divide="ignore", invalid="ignore"):
        by = np.abs(np.log(wide[-1] / wide[0]))
    order = sorted((i for i in range(len(by)) if np.isfinite(by[i])), key=lambda i: -by[i])
    return [
        {
            "head": list(run.heads[i]),
            "times": float(wide[-1, i] / wide[0, i]),
            "score_var_within": [float(wide[0, i]), float(wide[-1, i])],
            "entropy": [plain(float(x)) for x in (entropy[0, i], entropy[-1, i])],
        }
        for i in order[:MOST_MOVED]
        if len(run.steps) > 1
    ]


def plain(x: Any) -> Any:
    """JSON has no NaN and no infinity: their names, as in the file."""
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return next(
        name for name, y in _NOT_FINITE.items() if y == x or (math.isnan(x) and name == "NaN")
    )


def number_of(x: float | str | None) -> float:
    """A number of a document: NaN for None, the one that a name stands for."""
    return math.nan if x is None else _NOT_FINITE[x] if isinstance(x, str) else x


def extremes(values: Sequence[float], low: bool, width: int) -> list[float]:
    """A series in so many parts at most, of each the worst value, NaN for a part without any."""
    width = min(width, len(values))
    parts = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    known = [[x for x in part if not math.isnan(x)] for part in parts]
    return [(min if low else max)(part, default=math.nan) for part in known]

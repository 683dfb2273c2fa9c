"""A training run as its monitor wrote it: the time-line file, read, checked and summed up.

`read` takes the file of `tracking.TimeLine`, also one that is still being written. `document` is
what the terminal prints and `--json` saves, `page_document` what the page draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaledot import ScaledotError, __version__
from scaledot.alarms import Event
from scaledot.page_document import packed_array
from scaledot.tracking import FORMAT, LOW_IS_BAD, NAMES, VERSION

MOST_MOVED = 5
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Layer:
    """A layer that was watched; scale: the largest factor that its scores were given."""

    path: str
    heads: int
    kv_heads: int
    d_k: int
    scale: float


@dataclass(frozen=True, eq=False)
class Run:
    """What a time-line file holds, steps ascending.

    values: by name (steps, heads), the heads of all layers in order; float64, NaN for a head
    without rows or whose value is NaN. seconds: Unix time. losses: None where none was given.
    notes: what was left out, a sentence each.
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
    notes: tuple[str, ...]

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
class _Seen:
    """One step's line, checked."""

    time: float
    loss: float | None
    rows: int
    nonfinite: int
    values: dict[str, list[float]]
    alarms: list[Event]
    layers: tuple[Layer, ...]


def read(path: str | Path) -> Run:
    """Read a time-line file, of a run that is over or goes on.

    A run that was resumed wrote a first line again; a step that comes again replaces the one
    before. A line that a killed run left unfinished is left out, with a note; so are steps in which
    other layers were watched than in the last.

    Raises: ScaledotError for a file that cannot be read, is no time line, or is damaged.
    """
    try:
        lines = [x for x in Path(path).read_bytes().split(b"\n") if x.strip()]
    except OSError as error:
        raise ScaledotError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}"
        ) from None
    notes: list[str] = []
    steps: dict[int, _Seen] = {}
    head: tuple[str, int, tuple[Layer, ...]] | None = None
    given = [_json(x) for x in lines]
    for at, found in enumerate(given, 1):
        if head is None and not _is_header(found):
            raise ScaledotError(
                f"{path} is no time line: its first line has no format {FORMAT!r}; "
                "pass the file that Monitor(file=…) wrote"
            )
        if found is None and (at == len(given) or _is_header(given[at])):
            notes.append(f"line {at} was cut off while it was written: left out")
            continue
        try:
            if found is None:
                raise _Damaged("not whole JSON")
            if _is_header(found):
                head = _header(found, path)
            else:
                assert head is not None
                step = _whole(found, "step")
                steps.pop(step, None)
                steps[step] = _step(found, step, head[2])
        except _Damaged as why:
            raise ScaledotError(
                f"{path} is damaged in line {at}: {why}; cut the file before that line to read "
                "what comes before"
            ) from None
    if head is None or not steps:
        raise ScaledotError(f"{path} holds no step yet: wait for the first that is looked at")
    return _run(head, dict(sorted(steps.items())), notes)


def _run(
    head: tuple[str, int, tuple[Layer, ...]], steps: dict[int, _Seen], notes: list[str]
) -> Run:
    model, every, layers = head
    # The same heads are comparable, whatever their scale was.
    same = [(x.path, x.heads) for x in layers]
    kept = {n: x for n, x in steps.items() if [(y.path, y.heads) for y in x.layers] == same}
    if left := len(steps) - len(kept):
        notes.append(f"{left} of {len(steps)} steps watched other layers: left out")
    seen = list(kept.values())
    return Run(
        model, every, layers, tuple(kept), tuple(x.time for x in seen),
        tuple(x.loss for x in seen), tuple(x.rows for x in seen),
        tuple(x.nonfinite for x in seen),
        {name: np.array([x.values[name] for x in seen], dtype=np.float64) for name in NAMES},
        tuple(a for x in seen for a in x.alarms), tuple(notes),
    )  # fmt: skip


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


def _header(found: Mapping[str, Any], path: str | Path) -> tuple[str, int, tuple[Layer, ...]]:
    if found.get("version") != VERSION:
        raise ScaledotError(
            f"{path} is of version {found.get('version')}, this scaledot reads {VERSION}: "
            "read it with the scaledot that wrote it"
        )
    model, layers = found.get("model"), found.get("layers")
    if not isinstance(model, dict) or not isinstance(layers, list) or not layers:
        raise _Damaged("no model or no layers")
    if missing := set(NAMES).difference(_list(found, "measures")):
        raise _Damaged(f"no measure {min(missing)}")
    return _text(model, "name"), _whole(found, "every"), tuple(_layer(x) for x in layers)


def _layer(found: Any) -> Layer:
    if not isinstance(found, dict):
        raise _Damaged("a layer is no object")
    heads, kv_heads, d_k = (_whole(found, x) for x in ("heads", "kv_heads", "d_k"))
    if not 0 < heads <= 1 << 16:
        raise _Damaged(f"a layer has {heads} heads")
    return Layer(_text(found, "path"), heads, kv_heads, d_k, _number(found.get("scale"), "scale"))


def _step(found: Mapping[str, Any], step: int, layers: tuple[Layer, ...]) -> _Seen:
    given = found.get("heads")
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
        values[name] = [
            math.nan if x is None else _number(x, name) for layer in rows for x in layer
        ]
    loss = found.get("loss")
    return _Seen(
        _number(found.get("time"), "time"), None if loss is None else _number(loss, "loss"),
        _whole(found, "rows"), _whole(found, "nonfinite"), values,
        [_alert(x, step, layers) for x in _list(found, "alarms")], layers,
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
    return Event(step=step, layer=layer, head=head, also=also, **words, **numbers)  # type: ignore[arg-type]


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
        "losses": [None if x is None else _plain(x) for x in run.losses],
        "nonfinite": list(run.nonfinite),
        "measures": [_measure(run, name) for name in NAMES],
        "moved": _moved(run),
        "alarms": [{k: _plain(x) for k, x in vars(alert).items()} for alert in run.alarms],
        "notes": list(run.notes),
    }


def _measure(run: Run, name: str) -> dict[str, Any]:
    low = name in LOW_IS_BAD
    known = [(step, *x) for step, x in zip(run.steps, run.worst(name), strict=True) if x]

    def point(step: int, value: float, at: int) -> dict[str, Any]:
        return {"step": step, "value": _plain(value), "head": list(run.heads[at])}

    series = {step: value for step, value, _ in known}
    points: dict[str, Any] = {"first": None, "last": None, "extreme": None}
    if known:
        extreme = (min if low else max)(known, key=lambda x: x[1])
        chosen = zip(points, (known[0], known[-1], extreme), strict=True)
        points = {key: point(*x) for key, x in chosen}
    worst = [_plain(series[x]) if x in series else None for x in run.steps]
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
            "entropy": [_plain(float(x)) for x in (entropy[0, i], entropy[-1, i])],
        }
        for i in order[:MOST_MOVED]
        if len(run.steps) > 1
    ]


def page_document(run: Run) -> dict[str, Any]:
    """A run for the page: a page document without texts, and "timeline" with every head's value of
    every step as arrays (steps, heads), float32."""
    first = run.layers[0]
    return {
        "format": "scaledot/page",
        "version": 1,
        "scaledot": __version__,
        "model": {
            "name": run.model, "kind": None, "d_model": None, "layers": len(run.layers),
            "heads": max(x.heads for x in run.layers), "kv_heads": first.kv_heads,
            "d_k": first.d_k, "causal": None, "embedded": False, "context": None,
        },
        "texts": [],
        "heads": {},
        "contributions": {},
        "timeline": {
            "every": run.every,
            "measures": [{"name": x, "low": x in LOW_IS_BAD} for x in NAMES],
            "layers": [vars(x) for x in run.layers],
            "steps": list(run.steps),
            "losses": packed_array(
                torch.tensor([[math.nan if x is None else x] for x in run.losses])
            ),
            "nonfinite": list(run.nonfinite),
            "values": {name: packed_array(torch.from_numpy(x)) for name, x in run.values.items()},
            "alarms": [{k: _plain(x) for k, x in vars(alert).items()} for alert in run.alarms],
            "notes": list(run.notes),
        },
    }  # fmt: skip


def _plain(x: Any) -> Any:
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

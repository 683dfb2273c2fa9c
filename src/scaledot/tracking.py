"""What a run's trackers are told of a step: values by head, scalars, histograms and pictures.

`values` turns head statistics into the five numbers of each head; `scalars` says of each the worst
head, the mean and a quantile, under names that stay. `writer` finds out which tracker it was given
(TensorBoard, Weights & Biases, MLflow, trackio, a Lightning logger) by the methods it has.
`TimeLine` writes the file that scaledot reads again, one flushed line a step.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from scaledot import ScaledotError, __version__
from scaledot.heads import EDGES, HeadStats, Measure
from scaledot.picture import heads_picture

if TYPE_CHECKING:
    from scaledot.alarms import Event

FORMAT, VERSION = "scaledot/timeline", 1

NAMES: Mapping[str, tuple[str, str]] = {
    "max_score": ("max_score", "maximum"),
    "entropy": ("entropy", "average"),
    "score_var_within": ("score_var", "average"),
    "top_margin": ("top_margin", "average"),
    "gradient": ("jacobian_trace", "average"),
}
"""The watched values: of which measure, and what of it."""
LOW_IS_BAD = ("entropy", "gradient")
"""Their worst head is the smallest, and their quantile the hundredth part from below."""


def values(stats: HeadStats) -> dict[str, Float[Tensor, " heads"]]:
    """The watched values of each head, float64, NaN for a head without rows.

    max_score: the largest scaled score, before any soft-cap. entropy: mean over rows, nats.
    score_var_within: mean over rows with two visible keys or more of the variance of the scaled
    scores in the row. top_margin: mean over these rows, nats. gradient: mean of Σp(1−p), 0 … 1.

    Source: docs/training.md#names.

    >>> values(HeadStats.identity(heads=2, kv_heads=1, d_k=8))["entropy"]
    tensor([nan, nan], dtype=torch.float64)
    """
    nothing = torch.full((stats.heads,), math.nan, dtype=torch.float64)
    result = {}
    for name, (measure, part) in NAMES.items():
        m = stats.measures.get(measure)
        result[name] = nothing if m is None else torch.where(m.count > 0, getattr(m, part), nothing)
    return result


@dataclass(frozen=True, eq=False)
class Look:
    """One step that was looked at.

    time: Unix seconds. loss: None where none was given. heads: statistics by module path, layers in
    call order. events: alarms that went off.
    """

    step: int
    time: float
    loss: float | None
    heads: Mapping[str, HeadStats]
    events: Sequence[Event] = ()

    @cached_property
    def values(self) -> dict[str, list[Float[Tensor, " heads"]]]:
        """The watched values of each head of each layer."""
        layers = [values(stats) for stats in self.heads.values()]
        return {name: [layer[name] for layer in layers] for name in NAMES}

    @property
    def nonfinite(self) -> int:
        """Rows with a visible score that is no number, over all heads."""
        return sum(int(stats.counts["nonfinite"].sum()) for stats in self.heads.values())

    @property
    def rows(self) -> int:
        """Rows that are no padding, over all heads."""
        return sum(int(stats.counts["rows"].sum()) for stats in self.heads.values())

    def worst(self, name: str) -> tuple[int, int] | None:
        """(layer, head) of the worst head by a value, the first of equals; None without rows."""
        flat = torch.cat(self.values[name])
        if bool(flat.isnan().all()):
            return None
        low = name in LOW_IS_BAD
        at = int(flat.nan_to_num(math.inf).argmin() if low else flat.nan_to_num(-math.inf).argmax())
        for layer, x in enumerate(self.values[name]):
            if at < len(x):
                return layer, at
            at -= len(x)
        raise AssertionError


def scalars(look: Look) -> dict[str, float]:
    """What is logged of a step, by name: of each watched value over all heads of all layers
    attn/NAME/worst, /mean, /p99 (/p01 where low is bad), /layer and /head (where the worst is);
    and attn/nonfinite_rows. Heads without rows are left out, a value without any too."""
    result: dict[str, float] = {}
    for name, layers in look.values.items():
        if (worst := look.worst(name)) is None:
            continue
        layer, head = worst
        flat = torch.cat(layers)
        q, quantile = (0.01, "p01") if name in LOW_IS_BAD else (0.99, "p99")
        result |= {
            f"attn/{name}/worst": float(layers[layer][head]),
            f"attn/{name}/mean": float(flat.nanmean()),
            f"attn/{name}/{quantile}": _quantile(flat[~flat.isnan()], q),
            f"attn/{name}/layer": float(layer),
            f"attn/{name}/head": float(head),
        }
    return result | {"attn/nonfinite_rows": float(look.nonfinite)}


def _quantile(x: Tensor, q: float) -> float:
    """Linear between two neighbours, of which either may be infinite."""
    rank = q * (len(x) - 1)
    ordered = x.sort().values
    low, high = float(ordered[math.floor(rank)]), float(ordered[math.ceil(rank)])
    return low if low == high else low + (rank % 1) * (high - low)


def where(look: Look) -> dict[str, str]:
    """attn/NAME/where: "layer.head" of the worst head, for trackers that take text."""
    found = {name: look.worst(name) for name in look.values}
    return {f"attn/{name}/where": f"{at[0]}.{at[1]}" for name, at in found.items() if at}


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many values lie between finite edges that rise, one count less than edges; their sum and
    the sum of their squares."""

    counts: np.ndarray
    edges: np.ndarray
    sum: float
    squares: float


@dataclass(frozen=True, eq=False)
class Drawn:
    """What is drawn of one watched value: every head's number, the rows of the worst head, and a
    picture, layers downwards and heads to the right."""

    heads: Histogram
    worst_rows: Histogram
    picture: np.ndarray


def drawn(look: Look) -> dict[str, Drawn]:
    """By name, values without rows left out."""
    result = {}
    for name, layers in look.values.items():
        if (at := look.worst(name)) is None:
            continue
        measure = list(look.heads.values())[at[0]].measures[NAMES[name][0]]
        worst = Measure(*(x[at[1] : at[1] + 1] for x in vars(measure).values()))
        flat = torch.cat(layers)
        result[name] = Drawn(
            _heads(flat[~flat.isnan()].numpy()),
            _rows(worst, EDGES[NAMES[name][0]].numpy()),
            heads_picture(name, layers),
        )
    return result


BINS, MOST_BINS = 64, 512
"""Of a histogram of heads, between the smallest and the largest; of any, as Weights & Biases take
no more."""
_LARGEST = sys.float_info.max / 4
"""Stands for infinity, which is no edge: the distance of any two is a number."""


def _heads(values: np.ndarray) -> Histogram:
    # What trackers count by themselves they refuse to where no bin is wide enough: 1e22 on its own.
    inside = values.clip(-_LARGEST, _LARGEST)
    edges = np.unique(np.linspace(*_apart(inside.min(), inside.max()), BINS + 1))
    counts = np.histogram(inside, edges)[0]
    with np.errstate(over="ignore", invalid="ignore"):  # ∞ − ∞ is NaN, as it should be
        return Histogram(counts, edges, float(values.sum()), float(np.square(values).sum()))


def _rows(measure: Measure, edges: np.ndarray) -> Histogram:
    """The bins of one head that hold any rows, neighbours joined so that they are `MOST_BINS` at
    most, the outer two closed by the extremes."""
    counts = measure.histogram[0].numpy()
    used = counts.nonzero()[0]
    first, last = int(used[0]), int(used[-1])
    together = -(-(last + 1 - first) // MOST_BINS)
    counts = np.add.reduceat(counts[first : last + 1], np.arange(0, last + 1 - first, together))
    inner = edges[first:last][together - 1 :: together]
    low, high = (max(min(float(x), _LARGEST), -_LARGEST)
                 for x in (measure.minimum, measure.maximum))  # fmt: skip
    _, high = _apart(inner[-1] if len(inner) else low, high)
    n, mean, m2 = int(measure.count), float(measure.mean), float(measure.m2)
    return Histogram(counts, np.concatenate([[low], inner, [high]]), n * mean, m2 + n * mean * mean)


def _apart(low: float, high: float) -> tuple[float, float]:
    """(low, high), one float up where they are one number: a bin has a width."""
    return low, max(high, float(np.nextafter(low, math.inf)))


# Trackers


Writer = Callable[[Look, bool], None]
"""What is told of every look; the second says whether to draw histograms and pictures too."""


def writer(log: Any) -> Writer:
    """The writer for what a run logs to.

    log: a TensorBoard SummaryWriter, a Weights & Biases run, the mlflow module, a trackio run or
    module, a Lightning logger.
    Raises: TypeError for anything else.
    """
    module = getattr(log, "__name__", None) or type(log).__module__
    if _has(log, "add_scalar", "add_histogram", "add_image"):
        return lambda look, draw: _tensorboard(log, look, draw)
    if _has(log, "log") and module.split(".")[0] == "trackio":
        return lambda look, draw: log.log(_with_media(log, look, draw, "trackio"), step=look.step)
    if _has(log, "log", "define_metric"):
        return _weights_and_biases(log)
    if _has(log, "log_metrics", "log_image", "log_param"):
        return lambda look, draw: _mlflow(log, look, draw)
    if _has(log, "log_metrics", "log_hyperparams"):
        return _lightning(log)
    raise TypeError(
        f"log is {type(log).__name__}: pass a TensorBoard SummaryWriter, a wandb run, the mlflow "
        "module, a trackio run or a Lightning logger"
    )


def _has(log: Any, *names: str) -> bool:
    return all(callable(getattr(log, name, None)) for name in names)


def _tensorboard(log: Any, look: Look, draw: bool) -> None:
    for name, value in scalars(look).items():
        log.add_scalar(name, value, look.step)
    for name, text in where(look).items():
        log.add_text(name, text, look.step)
    if not draw:
        return
    for name, x in drawn(look).items():
        for kind, of in (("heads", x.heads), ("worst_rows", x.worst_rows)):
            log.add_histogram_raw(
                f"attn/{name}/{kind}", min=of.edges[0], max=of.edges[-1], num=int(of.counts.sum()),
                sum=of.sum, sum_squares=of.squares, bucket_limits=of.edges[1:].tolist(),
                bucket_counts=of.counts.tolist(), global_step=look.step,
            )  # fmt: skip
        log.add_image(f"attn/{name}/picture", x.picture, look.step, dataformats="HWC")


def _weights_and_biases(log: Any) -> Writer:
    # The run's own step counts its log calls, whatever they say: ours is an axis of its own.
    log.define_metric("attn/step")
    log.define_metric("attn/*", step_metric="attn/step")

    def write(look: Look, draw: bool) -> None:
        log.log(_with_media(log, look, draw, "wandb") | {"attn/step": look.step})

    return write


def _with_media(log: Any, look: Look, draw: bool, module: str) -> dict[str, Any]:
    """Scalars, texts and, drawn, the media of a module that has Image and Histogram."""
    told: dict[str, Any] = {**scalars(look), **where(look)}
    if draw:
        kinds = log if _has(log, "Image", "Histogram") else sys.modules[module]
        for name, x in drawn(look).items():
            for kind, of in (("heads", x.heads), ("worst_rows", x.worst_rows)):
                counted = kinds.Histogram(np_histogram=(of.counts, of.edges))
                told[f"attn/{name}/{kind}"] = counted
            told[f"attn/{name}/picture"] = kinds.Image(x.picture)
    return told


def _mlflow(log: Any, look: Look, draw: bool) -> None:
    log.log_metrics(scalars(look), step=look.step)
    if draw:
        for name, x in drawn(look).items():
            log.log_image(x.picture, key=f"attn/{name}/picture", step=look.step)


def _lightning(log: Any) -> Writer:
    """A Lightning logger: what it wraps where we know that, scalars alone elsewhere."""
    inner = getattr(log, "experiment", None)
    if _has(inner, "add_scalar", "add_histogram", "add_image") or _has(inner, "define_metric"):
        return writer(inner)
    return lambda look, draw: log.log_metrics(scalars(look), step=look.step)  # noqa: ARG005


# The file


class TimeLine:
    """A file of JSON lines: what was watched, then one line a step, each flushed as it is written.

    Only ever appended to, so that a run which is killed loses no line that was written, and one
    which is resumed goes on in the same file.

    Raises: ScaledotError saying why it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], model: str, every: int) -> None:
        self.path, self._model, self._every = Path(path), model, every
        self._layers: list[dict[str, Any]] | None = None
        try:
            # A line that a killed run left unfinished ends here.
            torn = self.path.exists() and self.path.stat().st_size > 0 and not self._ends()
            # No buffer of ours: what is written is with the system, whatever kills the process.
            self._file = self.path.open("ab", buffering=0)
            if torn:
                self._file.write(b"\n")
        except OSError as error:
            raise self._failed(error) from None

    def _ends(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def write(self, look: Look) -> None:
        """Append a step, after a new first line where other layers ran than before."""
        layers = [_layer(path, stats) for path, stats in look.heads.items()]
        lines = [self._line(look)]
        if layers != self._layers:
            lines.insert(0, self._header(layers))
        left = "".join(json.dumps(x, allow_nan=False) + "\n" for x in lines).encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._failed(error) from None
        self._layers = layers

    def close(self) -> None:
        self._file.close()

    def _failed(self, error: OSError) -> ScaledotError:
        return ScaledotError(f"cannot write {self.path}: {(error.strerror or str(error)).lower()}")

    def _header(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "scaledot": __version__,
            "model": {"name": self._model},
            "every": self._every,
            "measures": list(NAMES),
            "layers": layers,
        }

    @staticmethod
    def _line(look: Look) -> dict[str, Any]:
        return {
            "step": look.step,
            "time": look.time,
            "loss": None if look.loss is None else _number(look.loss),
            "rows": look.rows,
            "nonfinite": look.nonfinite,
            "heads": {
                name: [
                    [
                        _number(x) if n else None
                        for x, n in zip(layer.tolist(), _counts(stats, name), strict=True)
                    ]
                    for layer, stats in zip(layers, look.heads.values(), strict=True)
                ]
                for name, layers in look.values.items()
            },
            "alarms": [event.document() for event in look.events],
        }


def _counts(stats: HeadStats, name: str) -> list[int]:
    measure = stats.measures.get(NAMES[name][0])
    return [0] * stats.heads if measure is None else measure.count.tolist()


def _layer(path: str, stats: HeadStats) -> dict[str, Any]:
    """One layer of the first line; scale: the largest factor that its scores were given."""
    return {
        "path": path,
        "heads": stats.heads,
        "kv_heads": stats.kv_heads,
        "d_k": stats.d_k,
        "scale": _number(stats.scale[1]),
    }


def _number(x: float) -> float | str:
    """JSON has no NaN and no infinity: their names."""
    if math.isnan(x):
        return "NaN"
    return x if math.isfinite(x) else ("Infinity" if x > 0 else "-Infinity")

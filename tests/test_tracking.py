"""What trackers and the file are told."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scaledot
from scaledot.heads import EDGES, HeadStats
from scaledot.tracking import (
    LOW_IS_BAD,
    NAMES,
    Look,
    TimeLine,
    drawn,
    scalars,
    values,
    where,
    writer,
)


def seen(heads: int = 3, rows: int = 7, seed: int = 0) -> HeadStats:
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(heads * 4, heads, batch_first=True)
    x = 3 * torch.randn(2, rows, heads * 4)
    with scaledot.observe(layer) as found:
        layer(x, x, x, need_weights=False)
    return next(iter(found.heads.values()))


def look(step: int = 4, loss: float | None = 1.5) -> Look:
    layers = {"a": seen(3, 7, 1), "b": seen(2, 5, 2), "c": HeadStats.identity(2, 2, 4)}
    return Look(step, 1000.5, loss, layers)


def test_the_measures_of_an_observation_give_the_same_values_as_a_monitor():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 16)
    with scaledot.observe(layer) as full:
        layer(x)
    with scaledot.Monitor(layer) as monitor:
        layer(x)
        light = monitor.step()
    assert light is not None
    a, b = values(full.heads["self_attn"]), values(light.heads["self_attn"])
    assert all(a[name].equal(b[name]) for name in NAMES)
    for name in ("query_norm", "key_norm"):
        a, b = (s.heads["self_attn"].measures[name] for s in (full, light))
        assert a.mean.equal(b.mean)
    assert full.heads["self_attn"].scaled.var.equal(light.heads["self_attn"].scaled.var)


def test_scalars_say_the_worst_head_the_mean_and_a_quantile():
    found, this = look(), look()
    told = scalars(found)
    assert set(told) == {"attn/nonfinite_rows"} | {
        f"attn/{name}/{part}"
        for name in NAMES
        for part in ("worst", "mean", "layer", "head", "p01" if name in LOW_IS_BAD else "p99")
    }
    for name in NAMES:
        flat = np.concatenate([x.numpy() for x in this.values[name][:2]])  # c has no rows
        worst = flat.min() if name in LOW_IS_BAD else flat.max()
        assert told[f"attn/{name}/worst"] == worst
        assert told[f"attn/{name}/mean"] == pytest.approx(flat.mean(), rel=1e-12)
        q, part = (1, "p01") if name in LOW_IS_BAD else (99, "p99")
        assert told[f"attn/{name}/{part}"] == pytest.approx(np.percentile(flat, q), rel=1e-12)
        layer, head = int(told[f"attn/{name}/layer"]), int(told[f"attn/{name}/head"])
        assert this.values[name][layer][head] == worst
        assert where(found)[f"attn/{name}/where"] == f"{layer}.{head}"


def test_a_look_without_any_rows_tells_of_no_value():
    nothing = Look(1, 0.0, None, {"c": HeadStats.identity(2, 2, 4)})
    assert scalars(nothing) == {"attn/nonfinite_rows": 0.0}
    assert where(nothing) == {}
    assert drawn(nothing) == {}


def test_the_rows_of_the_worst_head_are_all_in_its_histogram():
    for name, x in drawn(look()).items():
        assert x.counts.sum() == int(x.worst.count)
        assert len(x.edges) == len(x.counts) + 1
        assert (np.diff(x.edges) > 0).all()
        assert x.edges[0] == float(x.worst.minimum)
        assert set(x.edges[1:-1]) <= set(EDGES[NAMES[name][0]].tolist())
        assert len(x.heads) == 5


# Trackers


def test_tensorboard_has_scalars_text_histograms_and_pictures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(tmp_path)
    this = look()
    writer(board)(this, True)
    board.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    for name, value in scalars(this).items():
        (event,) = found.Scalars(name)
        assert (event.step, event.value) == (4, pytest.approx(value, rel=1e-6))
    (text,) = found.Tensors("attn/entropy/where/text_summary")
    assert text.tensor_proto.string_val[0].decode() == where(this)["attn/entropy/where"]
    for name, x in drawn(this).items():
        (rows,) = found.Histograms(f"attn/{name}/worst_rows")
        assert rows.histogram_value.num == int(x.worst.count)
        assert sum(rows.histogram_value.bucket) == int(x.worst.count)
        (heads,) = found.Histograms(f"attn/{name}/heads")
        assert heads.histogram_value.num == 5
        (image,) = found.Images(f"attn/{name}/picture")
        assert (image.height, image.width) == x.picture.shape[:2]


class Media:
    """The Image and Histogram of a tracker's module, which keep what they were given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


class Recorded:
    """A run of a tracker that takes dictionaries, with the calls that its documentation shows."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def log(self, data: dict[str, Any], **options: Any) -> None:
        self.logged.append((data, options))


def test_weights_and_biases_have_an_axis_of_our_own(monkeypatch):
    class Run(Recorded):
        def __init__(self) -> None:
            super().__init__()
            self.defined: list[Any] = []

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            self.defined.append((name, step_metric))

    module = types.SimpleNamespace(Image=Media, Histogram=Media)
    monkeypatch.setitem(sys.modules, "wandb", module)
    run, this = Run(), look()
    write = writer(run)
    write(this, False)
    write(this, True)
    assert run.defined == [("attn/step", None), ("attn/*", "attn/step")]
    (plain, options), (full, _) = run.logged
    assert plain == {**scalars(this), **where(this), "attn/step": 4}
    assert options == {}
    x = drawn(this)["entropy"]
    assert full["attn/entropy/picture"].args[0].shape == x.picture.shape
    counts, edges = full["attn/entropy/worst_rows"].options["np_histogram"]
    assert (counts.tolist(), edges.tolist()) == (x.counts.tolist(), x.edges.tolist())
    assert full["attn/entropy/heads"].args[0] == x.heads.tolist()


def test_trackio_is_told_the_step(monkeypatch):
    class Run(Recorded):
        pass

    Run.__module__ = "trackio.run"
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(Image=Media, Histogram=Media))
    run, this = Run(), look()
    writer(run)(this, False)
    assert run.logged == [({**scalars(this), **where(this)}, {"step": 4})]


def test_mlflow_is_told_metrics_and_images():
    class Flow:
        __name__ = "mlflow"

        def __init__(self) -> None:
            self.metrics: list[Any] = []
            self.images: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.metrics.append((metrics, step))

        def log_image(self, image: Any, key: str, step: int) -> None:
            self.images.append((key, step, image.shape))

        def log_param(self, key: str, value: Any) -> None: ...

    flow, this = Flow(), look()
    writer(flow)(this, True)
    assert flow.metrics == [(scalars(this), 4)]
    assert flow.images == [
        (f"attn/{name}/picture", 4, x.picture.shape) for name, x in drawn(this).items()
    ]


@pytest.mark.usefixtures("unannotated")
def test_what_is_no_tracker_is_named():
    with pytest.raises(TypeError, match="log is list: pass a TensorBoard SummaryWriter"):
        writer([])


# The file


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_file_holds_every_head_and_says_what_it_holds(tmp_path):
    path, this = tmp_path / "run.jsonl", look()
    file = TimeLine(path, "model", 10)
    file.write(this)
    assert len(lines(path)) == 2  # flushed, before it is closed
    head, line = lines(path)
    assert head == {
        "format": "scaledot/timeline", "version": 1, "scaledot": scaledot.__version__,
        "model": {"name": "model"}, "every": 10, "measures": list(NAMES),
        "layers": [
            {"path": "a", "heads": 3, "kv_heads": 3, "d_k": 4, "scale": 0.5},
            {"path": "b", "heads": 2, "kv_heads": 2, "d_k": 4, "scale": 0.5},
            {"path": "c", "heads": 2, "kv_heads": 2, "d_k": 4, "scale": "-Infinity"},
        ],
    }  # fmt: skip
    assert (line["step"], line["time"], line["loss"]) == (4, 1000.5, 1.5)
    assert (line["rows"], line["nonfinite"], line["alarms"]) == (2 * 7 * 3 + 2 * 5 * 2, 0, [])
    for name, layers in this.values.items():
        assert line["heads"][name] == [*(x.tolist() for x in layers[:2]), [None, None]]
    file.write(look(5, math.nan))
    file.write(look(6, None))
    assert [x.get("loss") for x in lines(path)[2:]] == ["NaN", None]
    file.close()


def test_other_layers_have_a_first_line_of_their_own(tmp_path):
    path, this = tmp_path / "run.jsonl", look()
    file = TimeLine(path, "model", 10)
    file.write(this)
    file.write(Look(5, 0.0, None, {"a": this.heads["a"]}))
    file.write(Look(6, 0.0, None, {"a": this.heads["a"]}))
    assert ["format" in x for x in lines(path)] == [True, False, True, False, False]
    assert [x["path"] for x in lines(path)[2]["layers"]] == ["a"]
    file.close()


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(scaledot.ScaledotError, match=r"cannot write .*: is a directory"):
        TimeLine(tmp_path, "model", 1)
    file = TimeLine(Path("/dev/full"), "model", 1)
    with pytest.raises(scaledot.ScaledotError, match="cannot write /dev/full: no space left"):
        file.write(look())
    file.close()

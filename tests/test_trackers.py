"""The real trackers: what a monitored run logs is read back from what each of them stored.

A tracker that is not installed is skipped, and fails where SCALEDOT_REQUIRE_TRACKERS=1. None of
them needs a network: Weights & Biases runs offline, MLflow and trackio write into folders.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scaledot
from scaledot.tracking import NAMES, Look, drawn, scalars, where


def needed(name: str, pip: str) -> Any:
    """A tracker's module."""
    if importlib.util.find_spec(name) is None:
        message = f"{name} is not installed: pip install {pip}"
        if os.environ.get("SCALEDOT_REQUIRE_TRACKERS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return importlib.import_module(name)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


SIZES = (1.0, 2.0, 3.0, 1e9, 1e11, math.nan)
"""Of the queries and keys of a run that blows up, step by step: at 1e9 the variance of float32
scores is infinite, at 1e11 no bin of width 1 can be made about a score, then nothing is a number.
"""


def trained(log: Any) -> list[Look]:
    """What such a run showed, which was logged, every second step with pictures."""
    model, looks = Attention(), []
    with scaledot.Monitor(model, every=1, log=log, pictures=2) as monitor:
        for size in SIZES:
            model(size * torch.randn(2, 1, 300, 8))
            looks.append(monitor.step())
    assert max(scalars(looks[3]).values()) == math.inf
    assert scalars(looks[4])["attn/max_score/worst"] > 1e22
    assert scalars(looks[5]) == {"attn/nonfinite_rows": 600.0}
    return looks


def told(look: Look) -> dict[str, float | str]:
    """The numbers and texts of a step."""
    return {**scalars(look), **where(look)}


def check_media(stored: Mapping[str, Any], look: Look, folder: Path, file: str) -> None:
    """The histograms and pictures of a look among what was stored of it; `file`: the key of a
    picture's place in the folder."""
    pictures = drawn(look)
    kinds = ("heads", "worst_rows", "picture")
    assert set(stored) == {f"attn/{name}/{kind}" for name in pictures for kind in kinds}
    for name, x in pictures.items():
        for kind, of in (("heads", x.heads), ("worst_rows", x.worst_rows)):
            found = stored[f"attn/{name}/{kind}"]
            assert (found["bins"], found["values"]) == (of.edges.tolist(), of.counts.tolist())
        assert pixels(folder / stored[f"attn/{name}/picture"][file]) == x.picture.tolist()


def pixels(file: Path | BytesIO) -> list[Any]:
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("RGB")).tolist()


def test_tensorboard_stores_every_look_and_where_the_worst_head_is(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as board:
        looks = trained(board)
    found = EventAccumulator(str(tmp_path), {"histograms": 0, "images": 0})  # all of them
    found.Reload()
    at = {look.step: look for look in looks}
    for name in scalars(looks[0]):
        assert [(x.step, x.value) for x in found.Scalars(name)] == [
            (step, float(np.float32(scalars(look)[name])))
            for step, look in at.items() if name in scalars(look)
        ]  # fmt: skip
    for name in where(looks[0]):
        assert [(x.step, x.tensor_proto.string_val[0].decode())
                for x in found.Tensors(f"{name}/text_summary")] == [
            (step, where(look)[name]) for step, look in at.items() if name in where(look)
        ]  # fmt: skip
    seen = {step: drawn(look) for step, look in at.items() if step % 2 == 1}
    for name in NAMES:
        of = {step: x[name] for step, x in seen.items() if name in x}
        for kind in ("heads", "worst_rows"):
            stored = {x.step: x.histogram_value for x in found.Histograms(f"attn/{name}/{kind}")}
            assert stored.keys() == of.keys()
            for step, x in stored.items():
                expected = getattr(of[step], kind)
                assert (x.min, x.max) == (expected.edges[0], expected.edges[-1])
                np.testing.assert_equal(
                    [x.num, x.sum, x.sum_squares],
                    [expected.counts.sum(), expected.sum, expected.squares],
                )
                assert x.bucket_limit == expected.edges[1:].tolist()
                assert x.bucket == expected.counts.tolist()
        images = {x.step: x for x in found.Images(f"attn/{name}/picture")}
        assert images.keys() == of.keys()
        for step, x in images.items():
            assert pixels(BytesIO(x.encoded_image_string)) == of[step].picture.tolist()


# Weights & Biases


@pytest.fixture
def wandb(monkeypatch, tmp_path) -> Any:
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return needed("wandb", "wandb")


def history(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """(the axis of each name, what was logged), of the only run in a folder."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = list(records(path))
    axes = {x.metric.name or x.metric.glob_name: x.metric.step_metric
            for x in found if x.HasField("metric")}  # fmt: skip
    return axes, [line(x.history.item) for x in found if x.HasField("history")]


def records(path: Path) -> Iterator[Any]:
    """What a run's .wandb file holds. The package writes it and has no reader: seven bytes, then
    LevelDB's log format, blocks of 32 KiB with records of checksum, length, kind (whole, first,
    middle, last) and bytes. Source: github.com/google/leveldb, doc/log_format.md."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 0 < (left := -at % 32768) < 7:  # too little for a record's head
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(message)
            message = b""


def line(items: Any) -> dict[str, Any]:
    """What was logged at once; media are stored key by key."""
    result: dict[str, Any] = {}
    for item in items:
        name, *keys = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if keys:
            (key,) = keys
            result.setdefault(name, {})[key] = value
        else:
            result[name] = value
    return result


@pytest.mark.parametrize("kind", ["run", "lightning"])
def test_weights_and_biases_store_every_look_on_an_axis_of_our_own(wandb, tmp_path, kind):
    from lightning.pytorch.loggers import WandbLogger

    settings = wandb.Settings(console="off", x_disable_stats=True)
    with wandb.init(project="p", dir=tmp_path, settings=settings) as run:
        run.log({"mine": 1})  # its own step counts this too
        looks = trained(run if kind == "run" else WandbLogger(experiment=run))
    wandb.teardown()  # waits until all is written
    axes, (first, *lines) = history(tmp_path)
    assert (axes["attn/*"], axes["attn/step"]) == ("attn/step", "")
    assert first["mine"] == 1
    (files,) = tmp_path.glob("wandb/offline-run-*/files")
    for number, (look, stored) in enumerate(zip(looks, lines, strict=True)):
        stored = {name: x for name, x in stored.items() if name.startswith("attn/")}
        assert stored.pop("attn/step") == look.step
        assert {name: stored.pop(name) for name in told(look)} == told(look)
        if number % 2 == 0:
            check_media(stored, look, files, "path")
        else:
            assert not stored


# MLflow


@pytest.fixture
def mlflow(monkeypatch, tmp_path) -> Any:
    # Its database needs the whole of MLflow, a folder the small part.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module = needed("mlflow", "mlflow-skinny")
    module.set_tracking_uri((tmp_path / "mlruns").as_uri())
    return module


def test_mlflow_stores_every_metric_by_step_and_the_pictures(mlflow):
    with mlflow.start_run() as run:
        looks = trained(mlflow)
    client, run = mlflow.MlflowClient(), run.info.run_id
    names = set(client.get_run(run).data.metrics)
    assert names == set(scalars(looks[0]))
    for name in names:
        found = [(x.step, x.value) for x in client.get_metric_history(run, name)]
        of = [(look.step, scalars(look)) for look in looks]
        assert found == [(step, x[name]) for step, x in of if name in x]
    images = [x.path for x in client.list_artifacts(run, "images") if x.path.endswith(".png")]
    assert len(images) == sum(len(drawn(look)) for look in looks[::2])
    for look in looks[::2]:
        for name, x in drawn(look).items():
            (image,) = [p for p in images if f"attn~{name}~picture+step+{look.step}+" in p]
            path = Path(client.download_artifacts(run, image))
            assert pixels(path) == x.picture.tolist()


# trackio


@pytest.fixture(scope="module")
def trackio(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))  # read when it is imported
        module = needed("trackio", "trackio")
    assert Path(module.TRACKIO_DIR) == folder, "trackio was imported before"
    return module


@pytest.mark.parametrize("kind", ["run", "module"])
def test_trackio_stores_every_look_at_its_step(trackio, kind):
    run = trackio.init(project=kind, name="r", auto_log_cpu=False, auto_log_gpu=False)
    looks = trained(run if kind == "run" else trackio)
    trackio.finish()
    folder = Path(trackio.TRACKIO_DIR)
    with sqlite3.connect(folder / f"{kind}.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    assert [step for step, _ in rows] == [look.step for look in looks]
    for number, (look, (_, text)) in enumerate(zip(looks, rows, strict=True)):
        stored = json.loads(text)
        for name, x in told(look).items():
            # JSON has no infinity: it stores the word.
            assert stored.pop(name) == ("Infinity" if x == math.inf else x)
        if number % 2 == 0:
            check_media(stored, look, folder / "media", "file_path")
        else:
            assert not stored

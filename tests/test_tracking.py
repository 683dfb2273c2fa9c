"""What trackers and the file are told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scaledot
from scaledot.heads import EDGES, WATCHED, HeadStats, Measure
from scaledot.tracking import (
    BINS,
    LOW_IS_BAD,
    MOST_BINS,
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
    with scaledot.Monitor(layer, alarms=[scaledot.Alarm("max_score", above=1e9)]) as monitor:
        layer(x)
        light = monitor.step()
    with scaledot.Monitor(layer) as monitor:
        layer(x)
        lightest = monitor.step()
    assert light is not None
    assert lightest is not None
    a, b = values(full.heads["self_attn"]), values(light.heads["self_attn"])
    assert all(a[name].equal(b[name]) for name in NAMES)
    c = values(lightest.heads["self_attn"])
    assert all(a[name].equal(c[name]) for name in NAMES)
    assert lightest.heads["self_attn"].measures.keys() == set(WATCHED)
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


def test_every_head_and_every_row_of_the_worst_is_in_a_histogram():
    this = look()
    for name, x in drawn(this).items():
        layer, head = this.worst(name)
        measure = list(this.heads.values())[layer].measures[NAMES[name][0]]
        assert x.worst_rows.counts.sum() == int(measure.count[head])
        assert x.worst_rows.edges[0] == float(measure.minimum[head])
        assert set(x.worst_rows.edges[1:-1]) <= set(EDGES[NAMES[name][0]].tolist())
        heads = torch.cat(this.values[name][:2]).numpy()  # c has no rows
        assert (x.heads.edges[0], x.heads.edges[-1]) == (heads.min(), heads.max())
        assert x.heads.counts.tolist() == np.histogram(heads, bins=BINS)[0].tolist()
        assert x.heads.sum == pytest.approx(heads.sum(), rel=1e-12)
        assert x.heads.squares == pytest.approx((heads**2).sum(), rel=1e-12)
        for of in (x.heads, x.worst_rows):
            assert len(of.edges) == len(of.counts) + 1
            assert (np.diff(of.edges) > 0).all()


def test_bins_are_joined_where_there_are_more_than_trackers_take():
    """Margins from 0 to their end, an eighth of an octave apart: 1,005 bins, two a piece."""
    margins = torch.linspace(0, 87, 5000, dtype=torch.float64)[None]
    stats = HeadStats.identity(1, 1, 4)
    stats = replace(stats, measures={"top_margin": Measure.of("top_margin", margins)})
    rows = drawn(Look(1, 0.0, None, {"a": stats}))["top_margin"].worst_rows
    assert MOST_BINS / 2 < len(rows.counts) <= MOST_BINS
    assert len(rows.edges) == len(rows.counts) + 1
    assert (np.diff(rows.edges) > 0).all()
    assert (rows.edges[0], rows.edges[-1]) == (0, 87)
    assert rows.counts.tolist() == np.histogram(margins.numpy(), rows.edges)[0].tolist()


# Trackers


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

"""The monitor's file, read again: real runs, resumed, cut off, damaged; what is printed of them.

``golden/calm.timeline.jsonl`` and ``blow.timeline.jsonl`` were written by `Monitor` while three
layers of four heads learnt to copy (Adam): at 0.002 with 1/√d_k, and at 0.03 without it.
``python tests/test_timeline.py`` writes the golden texts anew: read the difference before keeping.
"""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from torch import nn

from scaledot import ScaledotError, timeline, timeline_table
from scaledot.alarms import Alarm
from scaledot.cli import run as command
from scaledot.screen import Screen
from scaledot.training import Monitor

GOLDEN = Path(__file__).parent / "golden"
CALM, BLOW = GOLDEN / "calm.timeline.jsonl", GOLDEN / "blow.timeline.jsonl"


def lines(path=CALM):
    return [json.loads(x) for x in path.read_text("utf-8").splitlines()]


def put(tmp_path, given, tail=""):
    path = tmp_path / "run.timeline.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in given) + tail, "utf-8")
    return path


def show(path, width=100, ascii=False):
    doc = timeline.document(timeline.read(path), path.name)
    file = io.StringIO()
    timeline_table.print_timeline(
        Screen(file=file, width=width, ascii=ascii, color_system=None), doc
    )
    return file.getvalue()


# Reading


@pytest.mark.parametrize("path", [CALM, BLOW])
def test_every_number_of_the_file_is_there(path):
    run, (head, *rest) = timeline.read(path), lines(path)
    assert run.model == "Net"
    assert run.every == 10
    assert run.notes == ()
    assert [vars(x) for x in run.layers] == head["layers"]
    assert list(run.steps) == [x["step"] for x in rest]
    assert list(run.losses) == [x["loss"] for x in rest]
    for name in head["measures"]:
        wanted = [[h for layer in x["heads"][name] for h in layer] for x in rest]
        assert np.array_equal(run.values[name], np.array(wanted))
    assert [a.why for a in run.alarms] == [a["why"] for x in rest for a in x["alarms"]]


def test_the_worst_head_is_the_largest_and_of_entropy_and_gradient_the_least():
    doc = timeline.document(timeline.read(BLOW), "x")
    rest = lines(BLOW)[1:]
    for measure in doc["measures"]:
        pick = min if measure["name"] in ("entropy", "gradient") else max
        each = [
            pick((v, [i, h]) for i, layer in enumerate(x["heads"][measure["name"]])
                 for h, v in enumerate(layer))
            for x in rest
        ]  # fmt: skip
        assert measure["worst"] == [v for v, _ in each]
        value, at = pick(each, key=lambda x: x[0])
        assert (measure["extreme"]["value"], measure["extreme"]["head"]) == (value, at)
        assert measure["first"]["value"] == each[0][0]
        assert measure["last"]["value"] == each[-1][0]


def test_heads_that_moved_most_by_the_factor_of_their_variance():
    moved = timeline.document(timeline.read(BLOW), "x")["moved"]
    first, last = (lines(BLOW)[i]["heads"]["score_var_within"] for i in (1, -1))
    factors = {
        (i, h): last[i][h] / first[i][h] for i in range(len(first)) for h in range(len(first[i]))
    }
    wanted = sorted(factors, key=lambda x: -abs(math.log(factors[x])))[: len(moved)]
    assert [tuple(x["head"]) for x in moved] == wanted
    assert [x["times"] for x in moved] == pytest.approx([factors[x] for x in wanted])


def test_a_step_that_comes_again_replaces_the_one_before(tmp_path):
    head, *rest = lines()
    again = [{**x, "loss": 7.5} for x in rest[3:5]]
    run = timeline.read(put(tmp_path, [head, *rest[:6], head, *again]))
    assert list(run.steps) == [x["step"] for x in rest[:6]]
    assert list(run.losses) == [x["loss"] for x in rest[:3]] + [7.5, 7.5, rest[5]["loss"]]


@pytest.mark.parametrize("kept", [1, 30, 200])
def test_a_line_that_was_cut_off_is_left_out_with_a_note(tmp_path, kept):
    head, *rest = lines()
    torn = json.dumps(rest[2])[:kept]
    run = timeline.read(put(tmp_path, [head, *rest[:2]], torn))
    assert list(run.steps) == [1, 10]
    assert [*map(str, run.notes)] == ["line 4 was cut off while it was written: left out"]
    # Resumed: the writer ends the torn line, and a first line follows.
    more = torn + "\n" + json.dumps(head) + "\n" + json.dumps(rest[2]) + "\n"
    run = timeline.read(put(tmp_path, [head, *rest[:2]], more))
    assert list(run.steps) == [1, 10, 20]
    assert len(run.notes) == 1


def test_a_last_line_without_its_newline_counts_where_it_is_whole(tmp_path):
    head, *rest = lines()
    run = timeline.read(put(tmp_path, [head, rest[0]], json.dumps(rest[1])))
    assert list(run.steps) == [1, 10]
    assert run.notes == ()


def test_steps_that_watched_other_layers_are_left_out_with_a_note(tmp_path):
    head, *rest = lines()
    other = {**head, "layers": head["layers"][:1]}
    one = {**rest[0], "heads": {k: v[:1] for k, v in rest[0]["heads"].items()}}
    run = timeline.read(put(tmp_path, [other, one, head, *rest[1:4]]))
    assert list(run.steps) == [10, 20, 30]
    assert [*map(str, run.notes)] == ["1 of 4 steps watched other layers: left out"]


def test_numbers_that_are_none_and_heads_without_rows(tmp_path):
    head, *rest = lines()
    rest = rest[:3]
    rest[1]["heads"]["max_score"][0] = ["Infinity", "NaN", None, 2.0]
    rest[1]["loss"], rest[1]["nonfinite"] = "NaN", 3
    rest[2]["heads"]["max_score"] = [[None] * 4] * 3
    path = put(tmp_path, [head, *rest])
    worst = timeline.document(timeline.read(path), "x")["measures"][0]
    assert worst["worst"][1:] == ["Infinity", None]
    assert worst["extreme"] == {"step": 10, "value": "Infinity", "head": [0, 0]}
    assert worst["last"]["step"] == 10
    text = show(path)
    assert "3 non-finite rows" in text
    assert "∞" in text
    assert "▁! " not in text


def damaged(change):
    head, *rest = lines()
    change(head, rest)
    return [head, *rest]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h, r: r[1].pop("step"), "line 3: step is no whole number"),
        (lambda h, r: r[1].update(step=True), "line 3: step is no whole number"),
        (lambda h, r: r[1]["heads"]["entropy"].pop(), "line 3: entropy is not one number a head"),
        (lambda h, r: r[0]["heads"]["gradient"][2].pop(), "line 2: gradient is not one number"),
        (lambda h, r: r[0]["heads"]["gradient"][2].__setitem__(0, "x"), "gradient is no number"),
        (lambda h, r: r[4]["alarms"][0].update(head=4), "line 6: an alarm names head 0.4"),
        (lambda h, r: r[4]["alarms"][0].pop("why"), "line 6: why is no text"),
        (lambda h, r: r[0].update(heads=[]), "line 2: no heads"),
        (lambda h, r: h.update(layers=[]), "line 1: no model or no layers"),
        (lambda h, r: h["measures"].remove("entropy"), "line 1: no measure entropy"),
        (lambda h, r: h.update(version=2), "is of version 2, this scaledot reads 1"),
        (lambda h, r: h.update(format="x"), "is no time line"),
        (lambda h, r: r.clear(), "holds no step yet"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_sentence(tmp_path, change, said):
    with pytest.raises(ScaledotError, match=said) as raised:
        timeline.read(put(tmp_path, damaged(change)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\x00\xff\xfe", b"[1]\n", b'{"a": 1}\n', b"{" * 9999]
)
def test_a_foreign_file_is_one_sentence(tmp_path, data):
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(ScaledotError, match=r"no time line|holds no step"):
        timeline.read(path)
    with pytest.raises(ScaledotError, match=r"cannot read .*no such file"):
        timeline.read(tmp_path / "none.jsonl")


def test_a_line_in_the_middle_that_is_not_json_is_damage(tmp_path):
    head, *rest = lines()
    path = put(tmp_path, [head, rest[0]], '{"step": 1\n' + json.dumps(rest[1]) + "\n")
    with pytest.raises(ScaledotError, match="damaged in line 3: not whole JSON"):
        timeline.read(path)


def test_what_a_monitor_writes_is_read_while_it_goes_on(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "run.timeline.jsonl"
    model = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    with Monitor(model, every=2, file=path, alarms=[Alarm("entropy", below=99.0)]) as monitor:
        for i in range(5):
            loss = model(torch.randn(1, 5, 16)).sum()
            look = monitor.step(loss=loss)
            run = timeline.read(path)
            assert list(run.steps) == [1, 2, 4][: 1 + (i + 1) // 2]
            if look is not None:
                assert run.losses[-1] == pytest.approx(float(loss.detach()))
                wanted = torch.cat(look.values["entropy"]).numpy()
                assert np.array_equal(run.values["entropy"][-1], wanted)
    assert [(x.step, x.rule, x.also) for x in run.alarms] == [
        (n, "entropy below 99", 1) for n in (1, 2, 4)
    ]


# Printing


SCREENS = [("blow", 100, False), ("blow", 80, False), ("blow", 40, True), ("calm", 80, False)]


def name_of(which, width, ascii):
    return GOLDEN / f"timeline-{which}-{width}{'-ascii' if ascii else ''}.txt"


@pytest.mark.parametrize(("which", "width", "ascii"), SCREENS)
def test_the_screen_is_the_golden_text(which, width, ascii):
    text = show({"blow": BLOW, "calm": CALM}[which], width, ascii)
    assert text == name_of(which, width, ascii).read_text("utf-8")


@pytest.mark.parametrize("path", [CALM, BLOW])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_the_screen(path, ascii):
    for width in (40, 55, 56, 76, 80, 100, 150):
        text = show(path, width, ascii)
        assert max(map(cell_len, text.splitlines())) <= width
        assert text.isascii() or not ascii


def test_a_sparkline_keeps_the_worst_step_of_each_mark():
    line = timeline_table.sparkline
    spike = [0.0] * 50 + [9.0] + [0.0] * 49
    assert line(spike, False, 10) == "▁▁▁▁▁█▁▁▁▁"
    assert line([-x for x in spike], True, 10) == "█████▁████"
    assert line([math.inf, math.nan, 1.0, 1.0], False, 4) == "! ▁▁"
    assert line([-1.7e308, 1.7e308], False, 2) == "▁█"


def test_the_command_prints_saves_and_makes_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "run.timeline.jsonl"
    copy.write_bytes(BLOW.read_bytes())
    assert command(["audit", copy.name]) == 0
    assert "Heads that moved most" in capsys.readouterr().out
    assert [x.name for x in tmp_path.iterdir()] == [copy.name]  # nothing was saved unasked
    assert command(["audit", copy.name, "--json", "-"]) == 0
    told = capsys.readouterr()
    doc = json.loads(told.out)
    assert doc["format"] == "scaledot/timeline-audit"
    assert len(doc["alarms"]) == 67
    assert "Heads that moved most" in told.err
    assert command(["audit", copy.name, "--json", copy.name]) == 2
    assert "the time line itself" in capsys.readouterr().err
    assert copy.read_bytes() == BLOW.read_bytes()
    assert command(["audit", copy.name, "--html", "x.html"]) == 0
    assert '"timeline":{' in (tmp_path / "x.html").read_text("utf-8")


def test_a_damaged_file_ends_the_command_with_one_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", "audit", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("scaledot: ")
    assert done.stderr.count("\n") == 1


if __name__ == "__main__":
    for screen in SCREENS:
        path = {"blow": BLOW, "calm": CALM}[screen[0]]
        name_of(*screen).write_text(show(path, *screen[1:]), "utf-8")

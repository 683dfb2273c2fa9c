"""A training run as the page gets it: numbers and ids, no sentences, and what came since."""

import base64
import json
import math

import numpy as np
import pytest

from scaledot import timeline
from scaledot.alarms import Alarm, why
from scaledot.timeline import Reader, UnreadableError
from scaledot.timeline_page import page_document, steps_document
from test_timeline import BLOW, CALM, lines, put


def array(packed):
    found = np.frombuffer(base64.b64decode(packed["float32"]), "<f4")
    return found.reshape(packed["shape"])


def with_cause(rest, cause):
    """The fifth look, in which alarms go off, with what the first of them would tell now."""
    rest[4]["alarms"][0]["cause"] = cause
    return rest


def test_every_number_of_every_step_is_there():
    run, rest = timeline.read(BLOW), lines(BLOW)[1:]
    told = page_document(run)["timeline"]
    assert told["steps"] == [x["step"] for x in rest]
    assert array(told["losses"])[:, 0].tolist() == [np.float32(x["loss"]) for x in rest]
    for name, packed in told["values"].items():
        wanted = np.array([[h for layer in x["heads"][name] for h in layer] for x in rest], "<f4")
        assert np.array_equal(array(packed), wanted)
    assert len(told["alarms"]) == sum(len(x["alarms"]) for x in rest)
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Alarm("max_score", above=100), {"above": 100}),
        (Alarm("max_score", above=1e9), {"above": 1e9}),
        (Alarm("entropy", below=0.05), {"below": 0.05}),
        (Alarm("max_score", below=-1.5e-7), {"below": -1.5e-7}),
        (Alarm("max_score", above=math.inf), {"above": "Infinity"}),
        (Alarm("score_var_within", doubles_within=50), {"doubles": 50}),
    ],
)
def test_a_rule_is_a_kind_and_a_number(tmp_path, rule, told):
    head, *rest = lines()
    rest[4]["alarms"][0]["rule"] = rule.rule
    run = timeline.read(put(tmp_path, [head, *rest]))
    assert page_document(run)["timeline"]["alarms"][0]["line"] == told


@pytest.mark.parametrize("rule", ["loss above 3 for 5 steps", "entropy above", "x below 1.2.3", ""])
def test_a_rule_of_another_form_stays_a_text(tmp_path, rule):
    head, *rest = lines()
    rest[4]["alarms"][0]["rule"] = rule
    (alarm, *_) = page_document(timeline.read(put(tmp_path, [head, *rest])))["timeline"]["alarms"]
    assert alarm["line"] is None
    assert alarm["rule"] == rule


def test_a_cause_goes_as_numbers_and_its_sentence_only_where_they_are_missing(tmp_path):
    head, *rest = lines()
    cause = {"scale": 4.0, "since": 1, "grown": {"query": 2.5}, "now": {"query": 5.0, "key": 2.0}}
    run = timeline.read(put(tmp_path, [head, *with_cause(rest, cause)]))
    first, second, *_ = page_document(run)["timeline"]["alarms"]
    assert first["cause"] == cause
    assert "why" not in first
    assert second["cause"] == {}
    assert (
        second["why"] == rest[[bool(x["alarms"]) for x in rest].index(True, 5)]["alarms"][0]["why"]
    )
    assert why(run.alarms[0].cause) == (
        "the scale is 4 times 1/√d_k; since step 1: ‖q‖ 2.5 times; now ‖q‖ 5, ‖k‖ 2"
    )


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ([], "a cause is no object"),
        ({"rows": -1}, "rows is no whole number"),
        ({"scale": "x"}, "scale is no number"),
        ({"scale": "Infinity"}, "scale is not finite"),
        ({"now": {"key": "NaN"}}, "key is not finite"),
        ({"now": {"value": 1.0}}, "now holds other factors than scale, query, key, alignment"),
        ({"grown": 3}, "grown holds other factors"),
        ({"grown": {"key": 1.0}}, "grown since no step"),
    ],
)
def test_a_cause_that_no_monitor_writes_is_damage(tmp_path, cause, said):
    head, *rest = lines()
    with pytest.raises(UnreadableError, match=f"line 6: {said}") as raised:
        timeline.read(put(tmp_path, [head, *with_cause(rest, cause)]))
    assert (raised.value.id, raised.value.line) == ("damaged", 6)


def test_notes_are_ids_and_numbers(tmp_path):
    head, *rest = lines()
    other = {**head, "layers": head["layers"][:1]}
    one = {**rest[0], "heads": {k: v[:1] for k, v in rest[0]["heads"].items()}}
    run = timeline.read(put(tmp_path, [other, one, head, *rest[1:3]], '{"step": 3'))
    assert page_document(run)["timeline"]["notes"] == [
        {"id": "torn", "numbers": {"line": 6}},
        {"id": "others", "numbers": {"n": 1, "all": 3}},
    ]


def test_an_addition_holds_what_came_and_nothing_else(tmp_path):
    head, *rest = lines(CALM)
    path = put(tmp_path, [head, *rest[:4]])
    reader = Reader(path)
    reader.look()
    with path.open("a") as file:
        file.writelines(json.dumps(x) + "\n" for x in rest[4:6])
    reader.look()
    told = steps_document(reader.run(4))
    assert told["steps"] == [x["step"] for x in rest[4:6]]
    assert array(told["losses"]).shape == (2, 1)
    assert {x["step"] for x in told["alarms"]} <= {*told["steps"]}
    for name, packed in told["values"].items():
        assert np.array_equal(array(packed), np.float32(timeline.read(path).values[name][4:]))
    assert array(steps_document(reader.run(6))["values"]["entropy"]).shape == (0, 12)

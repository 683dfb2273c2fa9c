"""An audit is what observing by hand gives, in words and in a file."""

import math

import pytest
import torch
from torch import nn

import scaledot
from scaledot import ScaledotError, auditing, gathered, moments, roles, whatif
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
    assert gathered._expected_maximum(count) == pytest.approx(expected, abs=4e-3)


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


# What an audit measures beside the forward pass, and what it tries


def test_the_full_audit_holds_what_its_parts_give(sample):
    text = sample_text()[:600]
    full = scaledot.audit(sample.model, sample.tokenizer, text)
    ids = sample.tokenizer(text, return_tensors="pt")
    marks = roles.delimiters(sample.tokenizer)
    with scaledot.observe(sample.model, full=True, delimiters=marks) as seen, torch.no_grad():
        sample.model(**{k: v[:, :256] for k, v in ids.items()})
    assert full.text["windows"] == 1
    for layer in full.layers:
        stats = seen.heads[layer.path]
        called, width = roles.roles_of(stats), moments.width_factors(stats)
        for h in (h for h in full.heads if h.layer == layer.index):
            assert h.profile.roles.called == called[h.head]
            assert h.profile.whatif == whatif.table(stats, h.head)
            assert h.profile.width.ratio == float(width.ratio[h.head])
            assert h.profile.width.ratio == pytest.approx(math.sqrt(h.within), rel=1e-6)
            masses = {m.name: m.mass for m in h.profile.roles.masses}
            assert masses["induction"] == float(stats.measures["induction"].average[h.head])
            assert masses["delimiter"] == float(stats.measures["delimiter"].average[h.head])


def test_quick_leaves_out_what_takes_more_than_the_forward_pass(sample, report):
    quick = scaledot.audit(sample.model, sample.tokenizer, TEXT, quick=True)
    assert [h.keys for h in quick.heads] == [h.keys for h in report.heads]
    for h in quick.heads:
        assert h.profile.whatif is None
        assert h.prefix_matching is None
        assert math.isnan(h.profile.gradients.relative_value_spread)
        assert h.profile.width == report.heads[h.layer * 4 + h.head].profile.width
    assert "a token changed" in dict(report.checked)
    assert "a token changed" not in dict(quick.checked)


def test_prefix_matching_finds_the_samples_induction_heads(report):
    """docs/sample.md names five; the score of any other head is near chance."""
    scores = sorted(((h.prefix_matching[0], h.name) for h in report.heads), reverse=True)
    best, rest = scores[:5], scores[5:]
    assert min(best)[0] > 0.3
    assert max(rest)[0] < 0.1


def tiny(kind, **settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=60, **settings)
    return getattr(transformers, f"{kind}Model")(config).eval()


LLAMA = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
OPT = {"hidden_size": 20, "num_hidden_layers": 2, "ffn_dim": 32, "num_attention_heads": 4,
       "max_position_embeddings": 64, "word_embed_proj_dim": 20}  # fmt: skip


def letters(text):
    return {"input_ids": torch.tensor([[ord(c) % 60 for c in text]])}


def test_a_model_that_looks_ahead_is_found_out_by_what_it_does():
    model = tiny("Llama", **LLAMA)
    forward = model.layers[1].forward

    def peeking(hidden, *args, **kwargs):
        out = forward(hidden, *args, **kwargs)
        return out + 0.1 * hidden.mean(1, keepdim=True)  # no attention has any part in it

    model.layers[1].forward = peeking
    found = {f.id: f for f in scaledot.audit(model, letters, TEXT).findings}
    assert found["future_leak"].kind == "wrong"
    assert "a later token is changed" in found["future_leak"].title
    assert "future" not in found


def test_a_model_that_cannot_pack_is_not_accused():
    report = scaledot.audit(tiny("OPT", **OPT), letters, TEXT)
    assert not [f for f in report.findings if f.kind == "wrong"]
    assert dict(report.checked)["a token changed"].endswith("to the bit")


def test_what_a_model_cannot_be_asked_is_said():
    model = tiny("Llama", **LLAMA)
    forward = model.forward

    def stubborn(input_ids=None, position_ids=None, use_cache=False):
        if position_ids is not None:
            raise ValueError("positions are mine")
        return forward(input_ids=input_ids, use_cache=use_cache)

    model.forward = stubborn
    checked = dict(scaledot.audit(model, letters, TEXT).checked)
    assert checked["a document changed"] == "not tried: positions are mine"


def test_sinks_that_the_call_does_not_get_are_missed(monkeypatch):
    """In every call, and in one layer's."""
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss as file

    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
                "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}  # fmt: skip
    model = tiny("GptOss", **settings)
    healthy = scaledot.audit(model, letters, TEXT)
    assert not [f for f in healthy.findings if f.kind == "wrong"]
    assert dict(healthy.checked)["sinks"].startswith("applied in 2 of 2 layers")

    real = file.ALL_ATTENTION_FUNCTIONS

    class Dropping:
        layers = (0, 1)

        def get_interface(self, *names):
            given = real.get_interface(*names)

            def call(module, *args, **rest):
                if module.layer_idx in self.layers:
                    rest["s_aux"] = None
                return given(module, *args, **rest)

            return call

    monkeypatch.setattr(file, "ALL_ATTENTION_FUNCTIONS", Dropping())
    found = {f.id: f for f in scaledot.audit(model, letters, TEXT, quick=True).findings}
    assert found["sinks"].title == "The modules' sinks are missing in layers 0–1"
    Dropping.layers = (1,)
    found = {f.id: f for f in scaledot.audit(model, letters, TEXT, quick=True).findings}
    assert found["sinks"].where == "layer 1"
    assert found["sinks"].seen.startswith("1 of 2 modules with sinks")


def test_a_text_that_is_no_text_says_so(sample):
    with pytest.raises(ScaledotError, match="gave no input_ids"):
        scaledot.audit(sample.model, lambda text: {"pixel_values": torch.ones(1, 3, 4, 4)}, TEXT)
    with pytest.raises(TypeError, match="a function from a text"):
        scaledot.audit(sample.model, object(), TEXT)
    with pytest.raises(ValueError, match="at least 1"):
        scaledot.audit(sample.model, sample.tokenizer, TEXT, max_tokens=0)
    with pytest.raises(ValueError, match="layers is empty"):
        scaledot.audit(sample.model, sample.tokenizer, TEXT, layers=[])


def test_every_module_keeps_its_own_mode(sample):
    sample.model.train()
    sample.model.h[1].eval()
    try:
        scaledot.audit(sample.model, sample.tokenizer, TEXT)
        assert sample.model.training
        assert not sample.model.h[1].training
        assert sample.model.h[0].training
    finally:
        sample.model.eval()


def test_the_longest_window_is_tried(sample):
    report = scaledot.audit(sample.model, sample.tokenizer, ["And", TEXT])
    assert dict(report.checked)["a token changed"].endswith("to the bit")


def test_a_model_of_pictures_says_so():
    vit = {"hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4,
           "intermediate_size": 32, "image_size": 24, "patch_size": 8}  # fmt: skip
    transformers = pytest.importorskip("transformers")
    model = transformers.ViTModel(transformers.ViTConfig(**vit)).eval()
    with pytest.raises(ScaledotError, match=r"\(ViTModel\) reads pixel_values, not text"):
        scaledot.audit(model, letters, TEXT)

"""One text through a model: what is kept, and that it is what the model computed."""

import math

import pytest
import torch
import transformers

import scaledot
from scaledot import ScaledotError, exploring
from scaledot.document import dump
from scaledot.exploring import (
    Sight,
    Stopped,
    bias_of,
    hidden_of,
    mean_largest,
    of_observation,
    of_trace,
    prepare,
    read,
    sight,
)
from scaledot.loading import Loaded, load, sample_text
from scaledot.masks import Mask, resolve
from scaledot.page_document import explore_document, frame_document, head_arrays
from scaledot.windows import encode

TEXT = "In the beginning God created the heaven and the earth."


@pytest.fixture(scope="module")
def sample():
    return prepare(load(predicts=True))


def words(text):
    """A tokenizer that is a function: one token a character."""
    return {"input_ids": torch.tensor([[ord(c) % 61 + 2 for c in text]])}


def small(kind, **options):
    """A model of a family with few random weights."""
    torch.manual_seed(0)
    config = kind(vocab_size=67, hidden_size=36, num_hidden_layers=3, num_attention_heads=6,
                  intermediate_size=34, max_position_embeddings=64, **options)  # fmt: skip
    return transformers.AutoModel.from_config(config).eval()


FAMILIES = {
    "llama": lambda: small(transformers.LlamaConfig, num_key_value_heads=2, head_dim=10),
    "mistral": lambda: small(
        transformers.MistralConfig, num_key_value_heads=3, head_dim=10, sliding_window=5
    ),
    "gemma2": lambda: small(
        transformers.Gemma2Config, num_key_value_heads=3, head_dim=10, sliding_window=5
    ),
    "bert": lambda: small(transformers.BertConfig),
    "albert": lambda: small(transformers.AlbertConfig, embedding_size=14),
    "modernbert": lambda: small(
        transformers.ModernBertConfig, local_attention=6, global_attn_every_n_layers=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    model = FAMILIES[request.param]()
    return request.param, model, prepare(Loaded(model, words, request.param))


# What is kept is what the model computed


def test_arrays_give_the_stages_that_the_model_went_through(family):
    """The page's own way: from query, key, value, scale, soft-cap, and the mask by its name."""
    _, model, explorer = family
    reading = read(explorer, TEXT)
    with torch.no_grad(), scaledot.observe(model, keep="qk") as seen:
        given = {**words(TEXT), "use_cache": False}
        model(**{k: v for k, v in given.items() if k == "input_ids" or _has_cache(model)})
    assert [x.layer.path for x in reading.layers] == list(seen.heads)
    for number, x in enumerate(reading.layers):
        for head in (0, x.layer.heads - 1):
            got = head_arrays(reading, number, head)
            expected = seen.trace(x.layer.path, head=head)
            found = scaledot.trace(
                unpacked(got["query"]), unpacked(got["key"]), unpacked(got["value"]),
                mask_of(x.sight, got, len(TEXT)), scale=x.layer.scale, softcap=x.layer.softcap,
            )  # fmt: skip
            assert torch.equal(found.visible, expected.visible)
            assert torch.allclose(found.weights, expected.weights, atol=1e-6)
            assert torch.allclose(found.output, expected.output, atol=1e-6)
            assert float(x.largest[head]) == pytest.approx(
                float(expected.weights.double().amax(-1).mean()), rel=1e-5
            )


def test_masks_have_the_names_that_they_deserve(family):
    name, _, explorer = family
    kinds = [x.sight for x in read(explorer, TEXT).layers]
    expected = {
        "llama": [Sight("causal")] * 3,
        "mistral": [Sight("window", 5)] * 3,
        "gemma2": [Sight("window", 5), Sight("causal"), Sight("window", 5)],
        "bert": [Sight("none")] * 3,
        "albert": [Sight("none")] * 3,
        # A window on both sides has no name.
        "modernbert": [Sight("none"), Sight("dense"), Sight("none")],
    }
    assert kinds == expected[name]


OUT = {
    "llama": lambda m: [x.self_attn.o_proj for x in m.layers],
    "mistral": lambda m: [x.self_attn.o_proj for x in m.layers],
    "gemma2": lambda m: [x.self_attn.o_proj for x in m.layers],
    "bert": lambda m: [x.attention.output.dense for x in m.encoder.layer],
    "albert": lambda m: [m.encoder.albert_layer_groups[0].albert_layers[0].attention.dense] * 3,
    "modernbert": lambda m: [x.attn.Wo for x in m.layers],
}


def test_the_output_projection_is_found_by_what_it_is_given(family):
    name, model, explorer = family
    found = list(explorer.projections.values())
    assert [p.module for p in found] == OUT[name](model)
    assert [p.call for p in found] == ([0, 1, 2] if name == "albert" else [0, 0, 0])
    reading = read(explorer, TEXT)
    for x, projection in zip(reading.layers, found, strict=True):
        assert x.projected.lengths.shape == (len(TEXT), 6)
        # Heads add up to the projection's output, so no part is longer than the sum of lengths.
        out = scaledot.attention(*_inputs(x), _mask(x), scale=x.layer.scale, enable_gqa=True,
                                 softcap=x.layer.softcap)  # fmt: skip
        whole = projection.module(out.transpose(1, 2).flatten(2))[0]
        assert torch.allclose(x.projected.result, whole, rtol=1e-4, atol=1e-6)
        assert x.projected.biased == (projection.module.bias is not None)
        whole = whole - (0 if projection.module.bias is None else projection.module.bias)
        assert bool((whole.norm(dim=-1) <= x.projected.lengths.sum(-1) * (1 + 1e-5)).all())
        width = out.shape[-1]
        alone = torch.zeros(1, len(TEXT), 6 * width)
        alone[..., width : 2 * width] = out[:, 1]
        part = projection.module(alone)[0]
        part = part - (0 if projection.module.bias is None else projection.module.bias)
        assert torch.allclose(x.projected.lengths[:, 1], part.norm(dim=-1), rtol=1e-3, atol=1e-6)


def test_a_gate_between_heads_and_projection_is_not_overlooked():
    model = FAMILIES["llama"]()
    for layer in model.layers:
        layer.self_attn.o_proj = torch.nn.Sequential(
            torch.nn.LayerNorm(60), torch.nn.Linear(60, 36)
        )
    explorer = prepare(Loaded(model, words, "gated"))
    assert explorer.projections == {}
    reading = read(explorer, TEXT)
    assert all(x.projected is None for x in reading.layers)
    document = explore_document(explorer.about, {"t1": reading}, heads=[("t1", 0, 0)])
    assert document["contributions"] == {}


def test_position_biases_and_the_decoder_of_t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=67, d_model=30, d_kv=10, num_heads=3, num_layers=2, d_ff=34,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5Model(config).eval()
    explorer = prepare(Loaded(model, words, "t5"))
    reading = read(explorer, TEXT)
    encoder, rest = reading.layers[:2], reading.layers[2:]
    assert [x.sight.kind for x in encoder] == ["none", "none"]
    assert all("another text" in x.missing for x in rest if x.layer.kind == "cross")
    got = head_arrays(reading, 1, 2)
    with torch.no_grad(), scaledot.observe(model, keep="qk") as seen:
        model(**words(TEXT), decoder_input_ids=torch.zeros(1, len(TEXT), dtype=torch.int64))
    expected = seen.trace(1, head=2)
    assert got["bias"] is not None
    found = scaledot.trace(
        unpacked(got["query"]), unpacked(got["key"]), unpacked(got["value"]),
        unpacked(got["bias"]), scale=1.0,
    )  # fmt: skip
    assert torch.allclose(found.weights, expected.weights, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "causal", "kind"),
    [
        (None, False, Sight("none")),
        (None, True, Sight("causal")),
        (Mask(window=3), False, Sight("window", 3)),
        (Mask(window=7), False, Sight("causal")),
        (Mask(window=(2, 2)), False, Sight("dense")),
        (Mask(segments=torch.tensor([[0, 0, 0, 1, 1, 1, 1]])), True, Sight("dense")),
        (Mask(lengths=[7]), True, Sight("causal")),
        (torch.ones(7, 7, dtype=torch.bool), False, Sight("none")),
        (torch.ones(7, 7, dtype=torch.bool).tril(), False, Sight("causal")),
        (torch.ones(7, 7, dtype=torch.bool).tril(1), False, Sight("dense")),
        (torch.zeros(7, 7), True, Sight("causal")),
        (torch.full((7, 7), -3e38).triu(1), False, Sight("causal")),
    ],
)
def test_sight_names_a_mask_only_if_it_is_that_mask(mask, causal, kind):
    q = k = v = torch.randn(1, 2, 7, 3, generator=torch.Generator().manual_seed(0))
    seen = resolve(scaledot.checks.problem(q, k, v), mask, causal)
    assert sight(seen) == kind
    visible = scaledot.trace(q, k, v, mask, is_causal=causal).visible
    assert torch.equal(~hidden_of(seen, 1)[0], visible[0, 1])
    assert bias_of(seen, 1) is None


def test_a_bias_is_given_where_it_adds_something():
    q = k = v = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(50.0).reshape(1, 2, 5, 5)
    mask[0, 1, 2, 3] = float("-inf")
    seen = resolve(scaledot.checks.problem(q, k, v), mask)
    assert sight(seen) == Sight("dense")
    assert hidden_of(seen, 1)[0].nonzero().tolist() == [[2, 3]]
    assert not hidden_of(seen, 0).any()
    expected = mask[0, 1].clone()
    expected[2, 3] = 0
    assert torch.equal(bias_of(seen, 1), expected)


# Texts


def test_the_next_token_is_the_model_s_own(sample):
    reading = read(sample, TEXT)
    predictor, tokenizer = sample.loaded.predictor, sample.loaded.tokenizer
    with torch.no_grad():
        logits = predictor(**tokenizer(TEXT, return_tensors="pt")).logits[0, -1]
    p = logits.double().softmax(-1)
    found = reading.following
    assert [x for _, x in found.tokens] == pytest.approx(p.topk(8).values.tolist(), rel=1e-5)
    assert found.others == pytest.approx(1 - sum(x for _, x in found.tokens))
    assert found.tokens[0][0] == tokenizer.decode([int(p.argmax())]).replace(" ", "␣")


def test_a_model_without_a_head_for_it_guesses_nothing():
    assert load().predictor is None
    assert read(prepare(load()), TEXT).following is None


def test_an_observed_model_is_left_as_it_was(sample):
    model = sample.loaded.model
    before = model(**sample.loaded.tokenizer(TEXT, return_tensors="pt"))[0]
    read(sample, TEXT)
    assert torch.equal(model(**sample.loaded.tokenizer(TEXT, return_tensors="pt"))[0], before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_an_empty_text_is_a_sentence(sample, text):
    with pytest.raises(ScaledotError, match="the text is empty"):
        read(sample, text)


def test_a_lone_surrogate_reaches_the_model_as_a_replacement(sample):
    broken, replaced = read(sample, "a\ud800b"), read(sample, "a\ufffdb")
    assert broken.text == "a\ud800b"
    assert broken.tokens == replaced.tokens
    # A pair is one character, and stays.
    assert read(sample, "a\ud83d\ude42b").tokens == read(sample, "a🙂b").tokens


def test_what_exceeds_the_context_is_counted(sample):
    reading = read(sample, sample_text())
    whole = len(sample.loaded.tokenizer(sample_text(), verbose=False)["input_ids"])
    assert (len(reading.tokens), reading.left_out) == (256, whole - 256)
    assert reading.layers[0].attended.problem.query.shape[2] == 256


def test_special_tokens_are_not_counted_as_left_out(sample):
    class Wrapped:
        """A tokenizer that puts two tokens around a text, as BERT's does."""

        eos_token_id = bos_token_id = None

        def __call__(self, text, add_special_tokens=True, return_tensors=None, **_):
            ids = [ord(c) % 61 + 2 for c in text]
            ids = [0, *ids, 1] if add_special_tokens else ids
            return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

        def num_special_tokens_to_add(self):
            return 2

    explorer = prepare(Loaded(FAMILIES["bert"](), Wrapped(), "bert"))
    reading = read(explorer, "x" * 150)
    assert reading.layers[0].attended.problem.query.shape[2] == 64
    assert reading.left_out == 150 - 62


def test_two_thousand_tokens_take_no_square(monkeypatch):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    explorer = prepare(Loaded(model, words, "long"))
    reading = read(explorer, "abcdefghij" * 200)
    assert len(reading.tokens) == 2000
    document = explore_document(explorer.about, {"t1": reading}, heads=[("t1", 1, 1)])
    arrays = document["heads"]["t1/1/1"]
    assert [arrays[name]["shape"] for name in ("query", "key", "value")] == [[2000, 8]] * 3
    assert arrays["hidden"] is None
    heads, results = 2 * 2 * 2000 * (3 * 8 + 1) * 4, 2 * 2000 * 16 * 4
    assert reading.bytes < heads + results + 1
    assert len(dump(document)) < 600_000


def test_a_text_too_large_to_keep_says_how_much_fits(sample, monkeypatch):
    assert sample.kept == pytest.approx(read(sample, TEXT).bytes / 17, rel=0.02)
    monkeypatch.setattr(exploring, "MEMORY", 10 * sample.kept)
    with pytest.raises(ScaledotError, match=r"17 tokens of this model take .*: 10 tokens fit"):
        read(sample, TEXT)


def test_longer_than_all_is_cut_for_a_model_without_a_limit(monkeypatch):
    monkeypatch.setattr(exploring, "LONGEST", 20)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=67, d_model=12, d_kv=4, num_heads=3, num_layers=1, d_ff=8,
        decoder_start_token_id=0,
    )  # fmt: skip
    explorer = prepare(Loaded(transformers.T5EncoderModel(config).eval(), words, "t5"))
    reading = read(explorer, TEXT)
    assert (len(reading.tokens), reading.left_out) == (20, len(TEXT) - 20)


def test_stopping_keeps_the_layers_that_are_done(sample):
    def two(progress):
        if progress.layers == 2:
            raise Stopped

    reading = read(sample, TEXT, on_layer=two)
    assert not reading.complete
    assert [x.layer.index for x in reading.layers] == [0, 1]
    whole = read(sample, TEXT)
    assert reading.heads[3].after == whole.heads[3].after
    assert [path for path, _ in reading.unobserved] == ["h.2.attn", "h.3.attn"]


def test_a_model_of_pictures_is_refused_in_a_sentence():
    config = transformers.ViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2,
                                    intermediate_size=8, image_size=8, patch_size=4)  # fmt: skip
    with pytest.raises(ScaledotError, match="reads pixel_values, not text"):
        prepare(Loaded(transformers.ViTModel(config), words, "vit"))


# What was computed elsewhere


def test_a_trace_shows_its_own_numbers():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 7, generator=g, dtype=torch.float64) for _ in "qkv")
    trace = scaledot.trace(q, k, v, is_causal=True, scale=0.3, tokens="abcde")
    about, reading = of_trace(trace)
    document = frame_document(about, reading)
    (layer,) = document["texts"][0]["layers"]
    assert [t["label"] for t in document["texts"][0]["tokens"]] == list("abcde")
    assert layer["mask"] == {"kind": "causal", "window": None}
    assert layer["scale"] == 0.3
    assert document["included"] == {"heads": 3, "of": 3}
    for head in range(3):
        got = document["heads"][f"t1/0/{head}"]
        again = scaledot.trace(unpacked(got["query"]), unpacked(got["key"]),
                               unpacked(got["value"]), is_causal=True, scale=0.3)  # fmt: skip
        assert torch.allclose(again.output, trace.output[0, head].float(), atol=1e-5)
        # Numbers are over both batches.
        scores = trace.scaled[:, head][trace.visible[:, head]]
        assert layer["heads"][head]["score_var"] == pytest.approx(float(scores.var(correction=0)))


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": torch.tensor([0.5, 1.0])}, {}])
def test_a_trace_with_a_bias_gives_it(options):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 4, 3, generator=g) for _ in "qkv")
    bias = torch.randn(4, 4, generator=g)
    trace = scaledot.trace(q, k, v, bias, **options)
    _, reading = of_trace(trace)
    got = head_arrays(reading, 0, 1)
    assert torch.allclose(unpacked(got["bias"]), bias, atol=1e-5)
    assert got["hidden"] is None
    if "sinks" in options:
        assert got["sink"] == 1.0
    _, plain = of_trace(scaledot.trace(q, k, v, **options))
    assert head_arrays(plain, 0, 1)["bias"] is None


def test_a_trace_that_wants_gradients_or_has_no_square():
    q = torch.randn(2, 4, 3, requires_grad=True)
    assert of_trace(scaledot.trace(q, q, q)) is not None
    assert of_trace(scaledot.trace(q, q)) is not None
    assert of_trace(scaledot.trace(q, torch.randn(2, 5, 3))) is None
    assert of_trace(scaledot.trace(q[:0], q[:0])) is None


def test_an_observation_shows_what_was_kept():
    layer = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    with scaledot.observe(layer, keep="qk") as seen:
        layer(torch.randn(3, 5, 16))
    about, reading = of_observation(seen)
    document = frame_document(about, reading)
    assert document["model"]["heads"] == 2
    assert set(document["heads"]) == {"t1/0/0", "t1/0/1"}
    assert len(document["texts"][0]["tokens"]) == 5
    with scaledot.observe(layer) as seen:
        layer(torch.randn(3, 5, 16))
    document = frame_document(*of_observation(seen))
    (shown,) = document["texts"][0]["layers"]
    assert "were not kept" in shown["observed"]
    assert document["heads"] == {}
    assert shown["heads"][0]["entropy"] is not None


def test_the_mean_largest_weight_of_a_corpus_is_known_to_a_hundredth(sample):
    reading = read(sample, sample_text())
    model, tokenizer = sample.loaded.model, sample.loaded.tokenizer
    window = encode(sample_text(), tokenizer, 256)[0]
    with torch.no_grad(), scaledot.observe(model) as seen:
        model(**window)
    for x in reading.layers:
        found = mean_largest(seen.heads[x.layer.path])
        assert float((found - x.largest).abs().max()) < 0.011


# What they need


def unpacked(packed):
    import base64

    if packed is None:
        return None
    data = bytearray(base64.b64decode(packed["float32"]))
    return torch.frombuffer(data, dtype=torch.float32).reshape(packed["shape"])


def mask_of(view, got, n):
    """A mask from what the page knows of it."""
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    shown = {
        "none": torch.ones(n, n, dtype=torch.bool),
        "causal": j <= i,
        "window": (j <= i) & (j > i - (view.window or 0)),
        "dense": None if got["hidden"] is None else unpacked(got["hidden"]) == 0,
    }[view.kind]
    bias = unpacked(got["bias"])
    return shown if bias is None else bias.masked_fill(~shown, -math.inf)


def _inputs(x):
    p = x.attended.problem
    return p.query, p.key, p.value


def _mask(x):
    return ~hidden_of(x.attended.seen)[None]


def _has_cache(model):
    import inspect

    return "use_cache" in inspect.signature(model.forward).parameters

"""A text in parts over a cache: what adds up to the whole, and who is refused."""

import copy
import json
import re

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, MistralConfig, MistralModel

from scaledot import ScaledotError, audit, observe, prefill
from scaledot.leakage import resting
from scaledot.loading import load, sample_text
from scaledot.parts import NOT_IN_PARTS, PART
from scaledot.roles import delimiters
from scaledot.windows import check_context

CPU = torch.device("cpu")


def extended(model, tokens):
    """The sample with random positions after its own."""
    model = copy.deepcopy(model)
    table = model.wpe.weight
    more = torch.randn(tokens - len(table), table.shape[1], generator=torch.manual_seed(0))
    model.wpe.weight = nn.Parameter(torch.cat([table, more * table.std()]))
    model.config.n_positions = tokens
    return model


@pytest.fixture(scope="module")
def sample():
    loaded = load(None)
    return extended(loaded.model, 512), loaded.tokenizer


def window_of(tokenizer, tokens):
    ids = tokenizer(sample_text(), return_tensors="pt", verbose=False)["input_ids"]
    return {"input_ids": ids.repeat(1, 2)[:, :tokens]}


def run(model, window, chunk, marks=None, full=True):
    with resting(model), observe(model, full=full, delimiters=marks) as seen:
        prefill.forward(model, window, CPU, chunk=chunk)
    return seen


def assert_same(whole, parts, *, moved, mean, spread_mean=None):
    """Every measure of the whole: counts exactly, histograms to `moved` rows of all that there are
    of a measure in a head, moments to `mean` of the measure's size."""
    assert list(whole.heads) == list(parts.heads)
    for path, a in whole.heads.items():
        b = parts.heads[path]
        for name, x in a.counts.items():
            assert torch.equal(x, b.counts[name]), name
        for one, other in ((a.scaled, b.scaled), (a.raw, b.raw)):
            assert torch.equal(one.count, other.count)
            torch.testing.assert_close(one.var, other.var, rtol=mean, atol=0)
            torch.testing.assert_close(one.mean, other.mean, rtol=mean, atol=1e-6)
        assert set(a.measures) - set(b.measures) == set(NOT_IN_PARTS)
        assert set(b.measures) <= set(a.measures)
        for name, x in b.measures.items():
            of = a.measures[name]
            # Rounding of a difference of two moments: relative to those, not to it.
            coarse = "value_spread" in name
            rel = (spread_mean or mean) if coarse else mean
            assert torch.equal(x.count, of.count), name
            shifted = (x.histogram - of.histogram).abs().sum(1) // 2
            limit = 0 if name == "visible" or name.startswith("chance.") else moved
            assert int(shifted.max()) <= (10 * moved + 10 if coarse else limit), (name, shifted)
            size = (of.mean.abs() + (of.m2 / of.count.clamp(min=1)).sqrt()).max() + 1e-6
            assert float((x.mean - of.mean).abs().max()) <= rel * float(size), name
            there = of.count > 0
            for low in ("minimum", "maximum"):
                u, v = getattr(of, low)[there], getattr(x, low)[there]
                assert bool(((u - v).abs() <= 10 * rel * (u.abs() + size)).all()), (name, low)


@pytest.mark.parametrize("chunk", [64, 50, 511])
def test_parts_of_the_sample_add_up_to_the_whole(sample, chunk):
    model, tokenizer = sample
    window, marks = window_of(tokenizer, 512), delimiters(tokenizer)
    whole, parts = (run(model, window, c, marks) for c in (None, chunk))
    assert_same(whole, parts, moved=1, mean=2e-6)
    some = next(iter(parts.heads.values())).measures
    assert {"key_bias", "delimiter", "duplicate", "induction", "value_spread"} <= set(some)


def test_masks_of_parts_show_what_the_whole_shows(sample):
    model, tokenizer = sample
    window = window_of(tokenizer, 512)
    whole, parts = (run(model, window, c, full=False) for c in (None, 64))
    for path, a in whole.masks.items():
        b = parts.masks[path]
        for name in ("rows", "visible_min", "visible_max", "full", "full_min", "full_max"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert torch.equal(a.later.pairs, b.later.pairs)
        assert not b.later.pairs.any()
        assert (a.causal, a.padded, a.documents) == (b.causal, b.padded, b.documents)
        # What differs is what happened: eight calls, seven with keys in a cache.
        assert (b.calls, b.cached, b.alignment) == (8, 7, {"bottom_right"})
        call = parts.calls[path]
        assert (call.causal, call.kind, call.queries, call.keys) == (True, "self", 64, 512)


def test_a_text_in_one_part_leaves_out_what_several_do(sample):
    """Else windows of different lengths would add up to means over some of them."""
    model, tokenizer = sample
    one = run(model, window_of(tokenizer, 40), 64)
    several = run(model, window_of(tokenizer, 200), 64)
    for path, stats in one.heads.items():
        assert set(stats.measures) == set(several.heads[path].measures)
        assert not set(stats.measures) & set(NOT_IN_PARTS)


def test_windows_in_one_observation_do_not_mix(sample):
    """key_bias is about each text's own mean query."""
    model, tokenizer = sample
    ids = window_of(tokenizer, 512)["input_ids"]
    with resting(model), observe(model) as seen:
        for part in (ids[:, :200], ids[:, 200:333]):
            prefill.forward(model, {"input_ids": part}, CPU, chunk=64)
    with resting(model), observe(model) as want:
        for part in (ids[:, :200], ids[:, 200:333]):
            model(input_ids=part, use_cache=False)
    assert_same(want, seen, moved=1, mean=2e-6)


def mistral(**more):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.3,
        **more,
    )  # fmt: skip
    return MistralModel(config).eval()


def test_parts_of_a_sliding_window_add_up_too():
    """Grouped heads, and a window shorter than a part: no key leaves the cache."""
    model = mistral(sliding_window=24)
    window = {"input_ids": torch.randint(64, (1, 150), generator=torch.manual_seed(0))}
    whole, parts = (run(model, window, c, torch.tensor([1, 2])) for c in (None, 32))
    assert next(iter(whole.calls.values())).window == 24
    assert_same(whole, parts, moved=1, mean=1e-5)
    for path, facts in parts.masks.items():
        assert facts.window == 24
        assert torch.equal(facts.full_max, whole.masks[path].full_max)


def test_a_padded_text_in_parts_counts_its_real_tokens():
    model = mistral(sliding_window=None)
    ids = torch.randint(64, (1, 100), generator=torch.manual_seed(0))
    mask = torch.ones(1, 100, dtype=torch.int64)
    mask[:, :37] = 0
    window = {"input_ids": ids, "attention_mask": mask}
    whole, parts = (run(model, window, c) for c in (None, 32))
    assert next(iter(parts.heads.values())).counts["padding"].tolist() == [37] * 4
    assert_same(whole, parts, moved=1, mean=1e-5)


def test_an_exception_leaves_no_part_behind(sample):
    model, tokenizer = sample
    window = window_of(tokenizer, 100)

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.ln_f.register_forward_hook(fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            prefill.forward(model, window, CPU, chunk=32)
    finally:
        handle.remove()
    assert PART.get() is None


def test_who_cannot_run_in_parts_is_refused_and_says_why(sample):
    model, tokenizer = sample
    window = window_of(tokenizer, 200)
    assert prefill.refusal(model, window, CPU) is None
    torch.manual_seed(0)
    bert = BertModel(
        BertConfig(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                   num_attention_heads=2)
    ).eval()  # fmt: skip
    assert "BertModel" in (prefill.refusal(bert, window, CPU) or "")
    with pytest.raises(ValueError, match="chunk is 0: pass at least 1"):
        prefill.forward(model, window, CPU, chunk=0)
    plain = nn.Linear(2, 2)
    with pytest.raises(ScaledotError, match="Linear takes no cache"):
        prefill.forward(plain, window, CPU, chunk=10)


def test_a_model_that_looks_ahead_is_found_out(sample):
    """A cache it has, and parts would be silently wrong."""
    model, tokenizer = copy.deepcopy(sample[0]), sample[1]

    class Ahead(nn.Module):
        def forward(self, x):
            return x + x.mean(1, keepdim=True)

    model.h[1].mlp = Ahead()
    why = prefill.refusal(model, window_of(tokenizer, 200), CPU)
    assert why is not None
    assert "it may look ahead" in why


def test_a_plan_is_whole_where_it_fits_then_parts_then_an_error(sample, monkeypatch):
    monkeypatch.setattr(prefill, "CHUNK", 64)
    model, tokenizer = sample
    window = window_of(tokenizer, 512)
    whole = prefill.activations(model, 512)
    parts = prefill.activations(model, 64) + prefill.cache_bytes(model, 512)
    assert parts < whole
    assert prefill.plan(model, window, CPU, available=whole).chunk is None
    plan = prefill.plan(model, window, CPU, available=parts)
    assert (plan.chunk, plan.need) == (64, parts)
    refused = rf"512 tokens need about {re.escape(prefill.size(whole))} .* are free"
    with pytest.raises(ScaledotError, match=refused):
        prefill.plan(model, window, CPU, available=parts - 1)


def test_the_cache_is_as_large_as_estimated(sample):
    """Two layers more than it holds: one that grows is copied, keys and values."""
    from transformers import DynamicCache

    for model, heads, d_k, layers in ((sample[0], 4, 32, 4), (mistral(), 2, 8, 2)):
        cache = DynamicCache()
        model(input_ids=torch.ones(1, 40, dtype=torch.int64), cache=cache, use_cache=True)
        held = sum(x.keys.numel() + x.values.numel() for x in cache.layers) * 4
        assert held == 2 * layers * heads * d_k * 40 * 4
        assert prefill.cache_bytes(model, 40) == held * (layers + 2) // layers


def test_an_audit_without_memory_runs_in_parts_and_says_so(monkeypatch):
    loaded = load(None)
    monkeypatch.setattr(prefill, "CHUNK", 64)
    small = prefill.activations(loaded.model, 64) + prefill.cache_bytes(loaded.model, 256)
    want = audit(loaded.model, loaded.tokenizer, sample_text(), max_tokens=300, quick=True)
    monkeypatch.setattr(prefill, "free", lambda _: small)
    found = audit(loaded.model, loaded.tokenizer, sample_text(), max_tokens=300, quick=True)
    assert want.text["chunk"] is None
    assert want.text["left_out"] == []
    assert found.text["chunk"] == 64
    assert found.text["left_out"] == list(NOT_IN_PARTS)
    assert "in parts of 64" in str(found)
    for path, stats in want.stats.items():
        assert torch.equal(stats.counts["rows"], found.stats[path].counts["rows"])
        assert not set(found.stats[path].measures) & set(NOT_IN_PARTS)
    monkeypatch.setattr(prefill, "free", lambda _: small // 8)
    with pytest.raises(ScaledotError, match="pass a smaller --context or --max-tokens"):
        audit(loaded.model, loaded.tokenizer, sample_text())


def test_more_tokens_than_the_model_was_made_for_are_said_to_be():
    from scaledot.document import audit_document, dump

    tokenizer = load(None).tokenizer
    model = mistral()
    model.embed_tokens = nn.Embedding(len(tokenizer), 32)
    found = audit(model, tokenizer, sample_text(), context=300, max_tokens=300, quick=True)
    assert (found.text["beyond"], found.text["longest"]) == (256, 300)
    assert "extrapolated past 256" in str(found)
    assert json.loads(dump(audit_document(found, None)))["text"]["beyond"] == 256
    inside = audit(model, tokenizer, sample_text(), context=200, max_tokens=300, quick=True)
    assert inside.text["beyond"] is None
    assert "extrapolated" not in str(inside)


def test_learned_positions_cannot_be_extrapolated():
    loaded = load(None)
    check_context(loaded.model, 256)
    with pytest.raises(ScaledotError, match=r"learned 256 positions .wpe. and no others"):
        audit(loaded.model, loaded.tokenizer, sample_text(), context=257)


def test_a_model_without_a_configuration_runs_whole():
    model = nn.Linear(2, 2)
    window = {"input_ids": torch.zeros(1, 3 * prefill.CHUNK, dtype=torch.int64)}
    assert prefill.plan(model, window, CPU).chunk is None

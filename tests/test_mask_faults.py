"""Masks of whole models: planted faults are found, healthy families are not accused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot
from scaledot.diagnose import findings
from scaledot.findings import Finding, heads_of, layers_of

transformers = pytest.importorskip("transformers", minversion="5")
from transformers import masking_utils as hf  # noqa: E402

from scaledot import huggingface  # noqa: E402
from test_families import FAMILIES, LLAMA, build, inputs  # noqa: E402
from test_real_models import MARY, minilm, smollm2, unidic  # noqa: E402, F401

torch.set_num_threads(1)


def look(model: nn.Module, *runs: dict[str, Any], call: Any = None) -> Any:
    """(findings about masks by id, what was checked) of a model's runs."""
    with torch.no_grad(), scaledot.observe(model) as seen:
        for given in runs:
            (call or model)(**given)
    places = layers_of(seen.calls, seen.heads, model)
    heads = [h for x in places for h in heads_of(seen.heads[x.path], x.index)]
    found, clear = findings(heads, places, None, seen.masks)
    about = {f.id: f for f in found if f.source == "docs/maths.md#masks"}
    return about, dict(clear)


def accused(found: dict[str, Finding]) -> set[str]:
    return {name for name, f in found.items() if f.kind != "note"}


def flipped(given: dict[str, Any]) -> dict[str, Any]:
    """Padded on the other side."""
    return {k: v.flip(1) if k in ("input_ids", "attention_mask") else v for k, v in given.items()}


PACKED = {"gpt_oss", "opt", "bert decoder", "clip"}
"""Families that take positions that begin again, and do not keep the documents apart."""


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_healthy_families_are_not_accused(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    if implementation == "eager":
        model.set_attn_implementation("eager")
    given = inputs(family, config)
    found, clear = look(model, given, flipped(given))
    assert accused(found) == set()
    assert clear["mask form"] == "none inverted, none of 0 and 1"
    if family.inputs != "image":
        assert clear["padding"].startswith("none visible; ")
    if family.causal and family.inputs == "text" and name != "clip":
        assert clear["later keys"] == f"none visible in {family.attentions} of " + (
            "1 layer" if family.attentions == 1 else f"{family.attentions} layers"
        )
        if family.windows != (None,):
            assert clear["window"].startswith("4 keys as configured in ")


GENERATE = [n for n, f in FAMILIES.items() if f.inputs == "seq2seq" or f.causal]


@pytest.mark.parametrize("name", [n for n in GENERATE if n not in ("clip", "whisper")])
def test_generating_with_a_cache_is_not_accused(name: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    given = inputs(family, config)
    given = {k: v for k, v in given.items() if not k.startswith("decoder")}

    def call(**given: Any) -> None:
        model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)

    found, clear = look(model, given, call=call)
    assert accused(found) == set()
    assert clear["cache"].startswith("the last query sees the last key in ")


@pytest.mark.parametrize(
    "how", [{"cache_implementation": "static"}, {"num_beams": 3}, {"prefill_chunk_size": 4}]
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_other_ways_to_generate_are_not_accused(name: str, how: dict[str, Any]) -> None:
    model, config = build(FAMILIES[name])

    def call(**given: Any) -> None:
        model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0, **how)

    found, clear = look(model, inputs(FAMILIES[name], config), call=call)
    assert accused(found) == set()
    assert clear["cache"] == "the last query sees the last key in 2 of 2 layers"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # another name for past_key_values is coming
def test_a_second_turn_after_a_cache_is_not_accused(name: str) -> None:
    model, config = build(FAMILIES[name])

    def turns(input_ids: Tensor, attention_mask: Tensor) -> None:
        first = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True)
        both = F.pad(attention_mask, (0, 5), value=1)
        model(
            input_ids=input_ids[:, :5], attention_mask=both, past_key_values=first.past_key_values
        )

    found, clear = look(model, inputs(FAMILIES[name], config), call=turns)
    assert accused(found) == set()
    assert clear["cache"] == "the last query sees the last key in 2 of 2 layers"
    assert clear["padding"] == "none visible; 8 padding keys a layer"


@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if f.causal and f.inputs == "text"]
)
def test_packed_documents(name: str) -> None:
    model, _ = build(FAMILIES[name])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]])
    given = {"input_ids": torch.randint(4, 61, (1, 11)), "position_ids": positions}
    found, clear = look(model, given | ({} if name == "clip" else {"use_cache": False}))
    if name in PACKED:
        f = found.pop("documents")
        assert f.kind == ("look" if name == "clip" else "wrong")
        assert "3 documents were packed" in f.seen
        leak = scaledot.document_leak(model, [[5, 6, 7, 8, 9, 5], [9, 8, 7], [4, 6]])
        assert leak.found
    else:
        assert clear["other documents"] == "none visible; 3 documents"
        leak = scaledot.document_leak(model, [[5, 6, 7, 8, 9, 5], [9, 8, 7], [4, 6]])
        assert not leak.found
        assert leak.movement <= leak.tolerance
    assert accused(found) == set()


# Planted: in transformers' models


@contextmanager
def masks_made_by(change: Any) -> Iterator[None]:
    """The masks that transformers makes, changed on their way to the attention."""
    table = hf.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    before = {name: table[name] for name in (huggingface.SDPA, huggingface.EAGER)}
    for name, function in before.items():
        table[name] = partial(change, function)
    try:
        yield
    finally:
        table.update(before)


def bidirectional(before: Any, *args: Any, **kwargs: Any) -> Any:
    return before(*args, **{**kwargs, "mask_function": hf.bidirectional_mask_function})


def unpadded(before: Any, *args: Any, **kwargs: Any) -> Any:
    return before(*args, **{**kwargs, "attention_mask": None})


def transposed(before: Any, *args: Any, **kwargs: Any) -> Any:
    mask = before(*args, **kwargs)
    square = mask is not None and mask.shape[2] == mask.shape[3]
    return mask.dense().mT.contiguous() if square else mask


def one_wider(before: Any, *args: Any, **kwargs: Any) -> Any:
    for part in huggingface._conjunction(kwargs["mask_function"]):
        if part.__qualname__.startswith("sliding_window_overlay"):
            wide = hf.sliding_window_causal_mask_function(part.__closure__[0].cell_contents + 1)
            kwargs = {**kwargs, "mask_function": wide}
    return before(*args, **kwargs)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | more))).eval()


def padded_ids(length: int = 9) -> dict[str, Tensor]:
    torch.manual_seed(1)
    real = torch.ones(2, length, dtype=torch.long)
    real[0, :3] = 0
    return {"input_ids": torch.randint(4, 61, (2, length)), "attention_mask": real}


@pytest.mark.parametrize("change", [bidirectional, transposed])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "bert decoder", "bart"])
def test_later_keys_in_a_causal_model_are_wrong(name: str, change: Any) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    with masks_made_by(change):
        found, _ = look(model, inputs(family, config))
    f = found["future"]
    assert f.kind == "wrong"
    layers = {layer for layer, _ in f.heads}
    assert len(layers) == 2
    assert f.title == (f"Queries see later keys in 2 of {'6' if name == 'bart' else '2'} layers")


def test_a_module_that_is_no_longer_causal_is_wrong() -> None:
    """The mask function dropped, and the module's own flag with it: sdpa then hides nothing."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with masks_made_by(lambda *_, **__: None):
        found, _ = look(model, padded_ids())
    assert found["future"].kind == found["padding"].kind == "wrong"


def test_training_goes_on_where_a_fault_is_seen() -> None:
    model, given = llama().train(), padded_ids()
    with masks_made_by(bidirectional), scaledot.observe(model) as seen:
        model(**given).logits.square().mean().backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())
    assert all(bool(facts.later.most.all()) for facts in seen.masks.values())


def test_the_weight_of_later_keys_is_stated() -> None:
    model, given = llama(), padded_ids()
    with masks_made_by(bidirectional), scaledot.observe(model, keep="qk") as seen:
        model(**given)
    path = next(iter(seen.masks))
    shown = seen.masks[path].later
    assert shown is not None
    for head in range(4):
        mass = torch.tensor(0.0)
        for b, first in ((0, 3), (1, 0)):
            weights = seen.weights(path, head=head, batch=b)[first:]
            mass = mass + weights.triu(first + 1).sum()
        assert float(shown.mass[head]) == pytest.approx(float(mass), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mistral", "t5"])
def test_padding_that_is_seen_is_wrong(name: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    with masks_made_by(unpadded):
        found, _ = look(model, inputs(family, config))
    f = found["padding"]
    assert f.kind == "wrong"
    assert "attention_mask calls " in f.seen


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_window_one_wider_is_wrong(name: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    with masks_made_by(one_wider):
        found, _ = look(model, inputs(family, config))
    f = found["window"]
    assert f.kind == "wrong"
    assert f.seen.startswith("5 keys, the query's own included")
    assert f.seen.endswith("; 4 configured.")
    assert "W + 1" in f.means
    assert accused(found) == {"window"}


def test_a_window_that_is_not_applied_is_wrong() -> None:
    model, config = build(FAMILIES["mistral"])

    def whole(before: Any, *args: Any, **kwargs: Any) -> Any:
        return before(*args, **{**kwargs, "mask_function": hf.causal_mask_function})

    with masks_made_by(whole):
        found, _ = look(model, inputs(FAMILIES["mistral"], config))
    assert found["window"].seen.startswith("11 keys")
    assert "does not hold" in found["window"].means


def test_a_width_that_only_other_layers_use_is_no_promise() -> None:
    """Exaone's modules all hold the width; its second layer sees everything, as configured."""
    torch.manual_seed(0)
    config = transformers.Exaone4Config(
        **LLAMA, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    model = transformers.Exaone4ForCausalLM(config).eval()
    assert model.model.layers[1].self_attn.sliding_window == 4
    found, clear = look(model, padded_ids())
    assert accused(found) == set()
    assert clear["window"] == "4 keys as configured in 1 of 2 layers"
    with masks_made_by(one_wider):
        assert look(model, padded_ids())[0]["window"].kind == "wrong"


def test_documents_that_an_attention_mask_joins_are_wrong() -> None:
    """All ones beside positions that begin again: transformers then takes the row for one text."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    given = {"input_ids": torch.randint(4, 61, (1, 9)), "position_ids": positions,
             "use_cache": False}  # fmt: skip
    model = llama()
    assert accused(look(model, given)[0]) == set()
    # With a cache transformers takes the row for one text too.
    assert look(model, given | {"use_cache": True})[0]["documents"].kind == "wrong"
    found, _ = look(model, given | {"attention_mask": torch.ones(1, 9, dtype=torch.long)})
    assert found["documents"].kind == "wrong"
    cut = {"input_ids": given["input_ids"], "cu_seq_lens_q": torch.tensor([0, 4, 9])}
    found, _ = look(model, cut)
    assert found["documents"].kind == "wrong"


def test_a_caller_s_own_mask_is_their_business() -> None:
    model = llama()
    ids = torch.randint(4, 61, (1, 9))
    prefix = torch.ones(9, 9, dtype=torch.bool).tril()
    prefix[:4, :4] = True
    own = torch.zeros(1, 1, 9, 9).masked_fill(~prefix, torch.finfo(torch.float32).min)
    found, clear = look(model, {"input_ids": ids, "attention_mask": own})
    assert accused(found) == set()
    assert "later keys" not in clear


@pytest.mark.parametrize("setting", [{"use_bidirectional_attention": True}])
def test_models_meant_to_look_both_ways_are_not_accused(setting: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **LLAMA, head_dim=10, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"], **setting,
    )  # fmt: skip
    model = transformers.Gemma3TextModel(config).eval()
    found, _ = look(model, padded_ids())
    assert accused(found) == set()


def test_a_prefix_model_is_not_accused() -> None:
    torch.manual_seed(0)
    text = transformers.GemmaConfig(**LLAMA, head_dim=10)
    vision = transformers.SiglipVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=60, projection_dim=24,
        hidden_size=24,
    )  # fmt: skip
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.tensor([[60, 60, 60, 60, 5, 6, 7]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
             "token_type_ids": torch.zeros_like(ids),
             "pixel_values": torch.randn(1, 3, 16, 16)}  # fmt: skip
    found, _ = look(model, given)
    assert accused(found) == set()


# Planted: in plain modules


class Plain(nn.Module):
    """A decoder as a course writes it; `mask` makes what goes to scaled_dot_product_attention."""

    def __init__(self, mask: Any, heads: int = 2) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(32, 16), nn.Linear(16, 48)
        self.mask, self.heads = mask, heads

    def forward(self, input_ids: Tensor, past: Tensor | None = None) -> Tensor:
        x = self.table(input_ids)
        q, k, v = self.read(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
        return F.scaled_dot_product_attention(q, k, v, **self.mask(q, k)).transpose(1, 2).flatten(2)


def plain(mask: Any, ids: Tensor | None = None, **given: Any) -> Any:
    torch.manual_seed(0)
    model = Plain(mask)
    ids = torch.randint(0, 32, (2, 9)) if ids is None else ids
    return look(model.eval(), {"input_ids": ids, **given})


def triangle(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: {"attn_mask": ~triangle(q, k)},
        lambda q, k: {"attn_mask": torch.zeros(9, 9).masked_fill(triangle(q, k), float("-inf"))},
    ],
)
def test_an_inverted_mask_is_wrong(mask: Any) -> None:
    found, _ = plain(mask)
    assert found["inverted"].kind == "wrong"
    assert found["inverted"].title.startswith("A mask shows later keys and never the query's own")


def test_an_inverted_mask_of_multi_head_attention_is_wrong() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    shows = torch.ones(9, 9, dtype=torch.bool).tril()
    found, _ = look(layer, {"src": torch.randn(2, 9, 16), "src_mask": shows})
    assert found["inverted"].kind == "wrong"
    found, _ = look(layer, {"src": torch.randn(2, 9, 16), "src_mask": ~shows})
    assert found == {}


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: {"attn_mask": triangle(q, k).float()},
        lambda q, k: {"attn_mask": triangle(q, k).float().expand(2, 2, -1, -1)},
    ],
)
def test_a_mask_of_zeros_and_ones_is_wrong(mask: Any) -> None:
    found, _ = plain(mask)
    assert found["zero_one"].kind == "wrong"


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (lambda q, k: {"is_causal": True}, "look"),
        (lambda q, k: {"attn_mask": triangle(q, k)}, "look"),
        (lambda q, k: {"attn_mask": triangle(k, k)[-q.shape[2] :]}, None),
    ],
)
def test_top_left_with_a_cache(mask: Any, kind: str | None) -> None:
    past = torch.randn(2, 2, 5, 8)
    found, clear = plain(mask, torch.randint(0, 32, (2, 4)), past=past)
    if kind is None:
        assert "alignment" not in found
        assert clear["cache"] == "the last query sees the last key in 1 of 1 layer"
    else:
        assert found["alignment"].kind == kind
    torch.manual_seed(0)
    model = Plain(mask).eval()
    model.is_causal = True
    found, _ = look(model, {"input_ids": torch.randint(0, 32, (2, 4)), "past": past})
    assert ("alignment" in found) == (kind is not None)
    if kind:
        assert found["alignment"].kind == "wrong"


@pytest.mark.parametrize("kept", [3, 4])
def test_a_plain_module_may_promise_a_window(kept: int) -> None:
    torch.manual_seed(0)
    model = Plain(lambda q, k: {"attn_mask": triangle(q, k).triu(1 - kept)}).eval()
    model.is_causal, model.sliding_window = True, 3
    found, clear = look(model, {"input_ids": torch.randint(0, 32, (2, 9))})
    assert ("window" in found) == (kept == 4)
    assert ("window" in clear) == (kept == 3)


def test_a_finite_mask_is_a_note() -> None:
    found, _ = plain(lambda q, k: {"attn_mask": (~triangle(q, k)).float() * -1e4})
    assert found["finite"].kind == "note"
    assert accused(found) == set()


def test_a_mask_a_text_read_as_one_a_head_is_a_look() -> None:
    def by_text(q: Tensor, k: Tensor) -> dict[str, Tensor]:
        shows = triangle(q, k).expand(2, -1, -1).clone()
        shows[0, :, 2] = False
        return {"attn_mask": shows}

    assert plain(by_text)[0]["axes"].kind == "look"


def test_rows_that_see_nothing_are_counted_nowhere() -> None:
    model = Plain(lambda q, k: {"attn_mask": triangle(q, k) & (torch.arange(9) != 4)[:, None]})
    with torch.no_grad(), scaledot.observe(model) as seen:
        model(torch.randint(0, 32, (2, 9)))
    facts = seen.masks["Plain"]
    assert facts.rows.tolist() == [2 * 8] * 2
    assert facts.visible_min.tolist() == [1, 1]
    assert seen.heads["Plain"].counts["empty"].tolist() == [2, 2]


def test_an_encoder_with_a_bias_is_not_accused() -> None:
    found, _ = plain(lambda q, k: {"attn_mask": torch.randn(1, 2, 9, 9)})
    assert found == {}
    assert plain(lambda q, k: {})[0] == {}


# Real models


def test_faults_planted_in_a_real_decoder(smollm2: tuple[Any, Any]) -> None:  # noqa: F811
    model, tokenizer = smollm2
    given = dict(tokenizer(MARY, return_tensors="pt"))
    found, clear = look(model, given)
    assert found == {}
    assert clear["later keys"] == "none visible in 30 of 30 layers"
    assert not scaledot.future_leak(model, given).found
    with masks_made_by(bidirectional):
        found, _ = look(model, given)
    assert found["future"].kind == "wrong"
    assert found["future"].title == "Queries see later keys in 30 of 30 layers"
    padded = {
        "input_ids": F.pad(given["input_ids"], (4, 0), value=5),
        "attention_mask": F.pad(given["attention_mask"], (4, 0)),
    }
    assert accused(look(model, padded)[0]) == set()
    with masks_made_by(unpadded):
        assert look(model, padded)[0]["padding"].kind == "wrong"
    length = given["input_ids"].shape[1]
    positions = torch.cat([torch.arange(6), torch.arange(length - 6)])[None]
    packed = {"input_ids": given["input_ids"], "position_ids": positions, "use_cache": False}
    assert accused(look(model, packed)[0]) == set()
    joined = packed | {"attention_mask": torch.ones_like(positions)}
    assert look(model, joined)[0]["documents"].kind == "wrong"


def test_real_encoders_are_not_accused(
    minilm: tuple[Any, Any],  # noqa: F811
    unidic: tuple[Any, dict[str, int]],  # noqa: F811
) -> None:
    model, tokenizer = minilm
    given = dict(tokenizer([MARY, "Yes."], return_tensors="pt", padding=True))
    found, clear = look(model, given)
    assert found == {}
    assert clear["padding"].startswith("none visible; ")
    with masks_made_by(unpadded):
        assert look(model, given)[0]["padding"].kind == "wrong"
    model, vocabulary = unidic
    ids = torch.tensor([[vocabulary[c] for c in "私は東京で"] + [0] * 3])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    assert look(model, given)[0] == {}
    with masks_made_by(unpadded):
        assert look(model, given)[0]["padding"].kind == "wrong"

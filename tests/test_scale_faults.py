"""Scales planted wrong are found and named, and no family is accused of its own rule.

A fault is planted in the ways it occurs: the module keeps another factor, the call passes another
than the module keeps, the configuration says another than was built, code of one's own calls
torch's attention with another.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot
from scaledot.diagnose import findings
from scaledot.findings import Finding, Layer, heads_of
from scaledot.scales import of_call
from test_families import (
    BERT,
    FAMILIES,
    LATENT,
    LLAMA,
    MOE,
    T5,
    Family,
    _config,
    build,
    inputs,
    root,
)
from test_real_models import CAFE, MARY, minilm, smollm2, unidic

__all__ = ["minilm", "smollm2", "unidic"]

transformers = pytest.importorskip("transformers", minversion="5")
torch.set_num_threads(1)


@dataclass(frozen=True)
class Seen:
    """What an audit of one forward says of the scale."""

    found: dict[str, Finding]
    clear: dict[str, str]
    layers: list[Layer]

    @property
    def accused(self) -> list[Finding]:
        scale = (f for f in self.found.values() if f.id in ("scale", "softcap"))
        return [f for f in scale if f.kind != "note"]


@torch.no_grad()
def examine(model: nn.Module, **given: Any) -> Seen:
    with scaledot.observe(model) as seen:
        model(**given)
    layers, depth = [], {}
    for index, (path, call) in enumerate(seen.calls.items()):
        within = depth.get((call.kind, call.causal), 0)
        depth[call.kind, call.causal] = within + 1
        configured, own = of_call(model, call.path, call.d_k, within)
        layers.append(
            Layer(
                index, path, call.kind, call.causal, call.d_k, call.heads, call.kv_heads,
                call.scale, call.softcap, call.sinks, call.window, configured, own,
            )
        )  # fmt: skip
    heads = [h for x in layers for h in heads_of(seen.heads[x.path], x.index)]
    found, clear = findings(heads, layers, None)
    return Seen({f.id: f for f in found}, dict(clear), layers)


def attentions(model: nn.Module) -> list[Any]:
    """The modules that keep a factor for their call, in order."""
    return [m for m in model.modules() if isinstance(getattr(m, "scaling", None), float)]


def in_module(monkeypatch: Any, model: Any, scale: float) -> None:
    """Every attention keeps another factor."""
    for m in attentions(model):
        monkeypatch.setattr(m, "scaling", scale)


def in_call(monkeypatch: Any, model: Any, scale: float | None, **changed: Any) -> None:
    """Every attention calls with another factor than it keeps."""
    file = importlib.import_module(type(model).__module__)
    real = file.ALL_ATTENTION_FUNCTIONS

    class Interfaces:
        @staticmethod
        def get_interface(*names: Any) -> Callable[..., Any]:
            function = real.get_interface(*names)

            def call(*args: Any, scaling: float | None = None, **kwargs: Any) -> Any:
                scaling = scaling if scale is None else scale
                return function(*args, scaling=scaling, **(kwargs | changed))

            return call

    monkeypatch.setattr(file, "ALL_ATTENTION_FUNCTIONS", Interfaces)


# Real models


REAL = {
    # What the sentence says of each factor, by its value for (d_k, d_model, heads, kv heads).
    "√d_model": (lambda d, w, h, kv: w**-0.5, "1/√d_model, the model's width in place of a head's"),
    "none": (lambda d, w, h, kv: 1.0, "none: no factor is applied"),
    "twice": (lambda d, w, h, kv: 1 / d, "the configured factor twice, or 1/d_k"),
    "multiplied": (lambda d, w, h, kv: d**0.5, "the configured factor's inverse"),
    "kv heads": (lambda d, w, h, kv: (kv * d) ** -0.5, "1/√(kv_heads·d_k)"),
    "by kv heads": (lambda d, w, h, kv: (w / kv) ** -0.5, "1/√(d_model/kv_heads)"),
}


@pytest.mark.parametrize("plant", [in_module, in_call])
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        *((name, mistake) for name in ("minilm", "unidic") for mistake in list(REAL)[:4]),
        *(("smollm2", mistake) for mistake in ("√d_model", "none", "kv heads", "by kv heads")),
    ],
)
def test_in_trained_models(
    name: str, mistake: str, plant: Any, request: Any, monkeypatch: Any
) -> None:
    model, tokenizer = request.getfixturevalue(name)
    if name == "unidic":
        given = {"input_ids": torch.tensor([[tokenizer[c] for c in CAFE]])}
    else:
        given = tokenizer(MARY, return_tensors="pt")
    config = model.config
    width, heads = config.hidden_size, config.num_attention_heads
    d_k, kv = width // heads, getattr(config, "num_key_value_heads", heads)
    factor, said = REAL[mistake]
    scale = factor(d_k, width, heads, kv)
    plant(monkeypatch, model, scale)
    seen = examine(model, **given)
    assert [f.id for f in seen.accused] == ["scale"]
    f = seen.found["scale"]
    assert f.kind == "wrong"
    last = config.num_hidden_layers - 1
    assert f.title == f"A scale other than the configuration's is applied in layers 0–{last}"
    assert f.means.startswith(f"{scale:.3g} is ")
    assert said in f.means
    assert f.seen.startswith(f"× {scale:.3g}")
    assert f"config gives {d_k**-0.5:.3g} = 1/√{d_k} (head size {d_k})" in f.seen
    assert ("scaling holds it" in f.means) is (plant is in_module)
    assert ("holds the configured one, the call does not" in f.means) is (plant is in_call)


@pytest.mark.parametrize("name", ["minilm", "smollm2", "unidic"])
def test_trained_models_are_as_configured(name: str, request: Any) -> None:
    model, tokenizer = request.getfixturevalue(name)
    if name == "unidic":
        given = {"input_ids": torch.tensor([[tokenizer[c] for c in CAFE]])}
    else:
        given = tokenizer(MARY, return_tensors="pt")
    seen = examine(model, **given)
    assert "scale" not in seen.found
    count = model.config.num_hidden_layers
    assert seen.clear["scale"] == f"as configured in {count} of {count} layers"
    assert all(x.configured.explicit for x in seen.layers)


@pytest.mark.parametrize("layer", [0, 3])
def test_one_layer_of_a_trained_model(layer: int, minilm: Any, monkeypatch: Any) -> None:
    model, tokenizer = minilm
    monkeypatch.setattr(attentions(model)[layer], "scaling", 384**-0.5)
    seen = examine(model, **tokenizer(MARY, return_tensors="pt"))
    assert seen.found["scale"].where == f"layer {layer}"
    assert {layer for layer, _ in seen.found["scale"].heads} == {layer}


# Healthy families


LONG = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16,
        "rope_theta": 1e4, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 20, "n_layer": 3, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GEMMA = LLAMA | {"head_dim": 10}
T5GEMMA = GEMMA | {"query_pre_attn_scalar": 7, "sliding_window": 4, "attn_logit_softcapping": 0.7}
SIDES = {"layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {
    "gpt2 by layer": Family(
        _config("GPT2Config", **GPT2, scale_attn_by_inverse_layer_idx=True), "GPT2LMHeadModel", 3, 1
    ),
    "gpt2 by layer alone": Family(
        _config("GPT2Config", **GPT2, scale_attn_by_inverse_layer_idx=True,
                scale_attn_weights=False),
        "GPT2LMHeadModel", 3, 1,
    ),
    "gpt_bigcode": Family(
        _config("GPTBigCodeConfig", **GPT2, scale_attn_weights=False),
        "GPTBigCodeForCausalLM", 3, 1,
    ),
    "granite of muP": Family(
        _config("GraniteConfig", **LLAMA, attention_multiplier=1 / 6), "GraniteForCausalLM", 2, 1
    ),
    "granite by default": Family(_config("GraniteConfig", **LLAMA), "GraniteForCausalLM", 2, 1),
    "granitemoe": Family(
        _config("GraniteMoeConfig", **LLAMA, num_local_experts=2, num_experts_per_tok=1,
                attention_multiplier=0.0078125),
        "GraniteMoeForCausalLM", 2, 1,
    ),
    "hyperclovax": Family(
        _config("HyperCLOVAXConfig", **LLAMA, attention_multiplier=0.25),
        "HyperCLOVAXForCausalLM", 2, 1,
    ),
    "hyperclovax by default": Family(
        _config("HyperCLOVAXConfig", **LLAMA), "HyperCLOVAXForCausalLM", 2, 1
    ),
    "vaultgemma": Family(
        _config("VaultGemmaConfig", **T5GEMMA), "VaultGemmaForCausalLM", 2, 1
    ),
    "gemma2 as wide as its heads": Family(
        _config("Gemma2Config", **GEMMA, query_pre_attn_scalar=24 // 4, sliding_window=4),
        "Gemma2ForCausalLM", 2, 1,
    ),
    "gemma4": Family(
        _config("Gemma4TextConfig", **GEMMA, global_head_dim=12, hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=61, sliding_window=4, num_kv_shared_layers=0,
                layer_types=["sliding_attention", "full_attention"]),
        "Gemma4ForCausalLM", 2, 1,
    ),
    "yarn": Family(
        _config("LlamaConfig", **LLAMA, rope_parameters=LONG), "LlamaForCausalLM", 2, 1
    ),
    "deepseek of 40 times the context": Family(
        _config("DeepseekV3Config", **(LLAMA | LATENT),
                rope_parameters=LONG | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        "DeepseekV3ForCausalLM", 2, 1,
    ),
    "deepseek_v2": Family(
        _config("DeepseekV2Config", **(LLAMA | LATENT),
                rope_parameters=LONG | {"mscale": 0.7, "mscale_all_dim": 0.7}),
        "DeepseekV2ForCausalLM", 2, 1,
    ),
    "ministral3": Family(
        _config("Ministral3Config", **GEMMA,
                rope_parameters=LONG | {"mscale": 1.0, "mscale_all_dim": 1.0,
                                        "llama_4_scaling_beta": 0.1}),
        "Ministral3ForCausalLM", 2, 1,
    ),
    "mt5": Family(
        _config("MT5Config", **T5), "MT5ForConditionalGeneration", 6, 1, "seq2seq", causal=False
    ),
    "umt5": Family(
        _config("UMT5Config", **T5), "UMT5ForConditionalGeneration", 6, 1, "seq2seq", causal=False
    ),
    "longt5": Family(
        _config("LongT5Config", **T5, local_radius=3), "LongT5ForConditionalGeneration", 4, 1,
        "seq2seq", causal=False,
    ),
    "falcon": Family(
        _config("FalconConfig", vocab_size=61, hidden_size=24, num_hidden_layers=2,
                num_attention_heads=4, bos_token_id=1, eos_token_id=2),
        "FalconForCausalLM", 2, 1,
    ),
    "t5gemma, each side with its own": Family(
        lambda: transformers.T5GemmaConfig(
            encoder=T5GEMMA | SIDES, decoder=T5GEMMA | SIDES | {"query_pre_attn_scalar": 5},
            vocab_size=61, tie_word_embeddings=False,
        ),
        "T5GemmaForConditionalGeneration", 6, 1, "seq2seq", causal=False,
    ),
    "privacy filter": Family(
        _config("OpenAIPrivacyFilterConfig", **GEMMA, **MOE, sliding_window=4),
        "OpenAIPrivacyFilterModel", 2, 1, causal=False,
    ),
    "inkling": Family(_config("InklingTextConfig", **GEMMA), "InklingForCausalLM", 2, 1),
    "gemma3n": Family(
        _config("Gemma3nTextConfig", **GEMMA, **SIDES, num_kv_shared_layers=0, sliding_window=4,
                hidden_size_per_layer_input=4, vocab_size_per_layer_input=61, laurel_rank=4,
                altup_num_inputs=2, activation_sparsity_pattern=[0.0, 0.0]),
        "Gemma3nForCausalLM", 2, 1,
    ),
    "zamba2": Family(
        _config("Zamba2Config", vocab_size=61, hidden_size=24, num_hidden_layers=3,
                num_attention_heads=4, mamba_d_state=4, mamba_headdim=12, n_mamba_heads=4,
                num_mem_blocks=1, hybrid_layer_ids=[1], use_mem_rope=False,
                layers_block_type=["mamba", "hybrid", "mamba"]),
        "Zamba2ForCausalLM", 1, 1,
    ),
    "mistral4": Family(
        _config("Mistral4Config", **(LLAMA | LATENT),
                rope_parameters=LONG | {"mscale": 1.0, "mscale_all_dim": 1.0,
                                        "llama_4_scaling_beta": 0.1}),
        "Mistral4ForCausalLM", 2, 1,
    ),
    "phi3 by LongRoPE": Family(
        _config("Phi3Config", **LLAMA, original_max_position_embeddings=16,
                rope_parameters={"rope_type": "longrope", "long_factor": [1.0] * 3,
                                 "short_factor": [1.0] * 3, "rope_theta": 1e4,
                                 "original_max_position_embeddings": 16}),
        "Phi3ForCausalLM", 2, 1,
    ),
    "falcon_h1": Family(
        _config("FalconH1Config", **GEMMA, key_multiplier=0.3, mamba_d_ssm=24, mamba_n_heads=4,
                mamba_d_head=6, mamba_n_groups=1, mamba_d_state=4),
        "FalconH1ForCausalLM", 2, 1,
    ),
    "bert of one head": Family(
        _config("BertConfig", **(BERT | {"num_attention_heads": 1})), "BertModel", 2, 1,
        causal=False,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["default", "eager"])
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_no_family_is_accused_of_its_own_rule(name: str, implementation: str) -> None:
    family = (FAMILIES | OTHERS)[name]
    model, config = build(family)
    if implementation == "eager":
        model.set_attn_implementation("eager")
    seen = examine(model, **inputs(family, config))
    assert seen.accused == []
    assert not [f for f in seen.found.values() if f.kind == "wrong"]
    assert "scale" not in seen.found
    assert len(seen.layers) == family.attentions
    assert all(x.configured is not None and x.configured.explicit for x in seen.layers)
    assert seen.clear["scale"].startswith(f"as configured in {len(seen.layers)} of")


def test_parts_of_a_model_are_judged_by_their_own_configuration(monkeypatch: Any) -> None:
    """Text and vision have other widths; one of them is changed."""
    text = BERT | {"max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    given = {"input_ids": torch.tensor([[1, 4, 5, 2]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    seen = examine(model, **given)
    assert seen.accused == []
    assert {x.configured.source for x in seen.layers} == {"head size 5", "head size 16"}
    monkeypatch.setattr(model.vision_model.encoder.layers[0].self_attn, "scale", 32**-0.5)
    f = examine(model, **given).found["scale"]
    assert "1/√d_model, the model's width" in f.means
    assert "config gives 0.25 = 1/√16 (head size 16)" in f.seen


# Faults in small models


def small(name: str) -> tuple[Any, dict[str, Any]]:
    family = (FAMILIES | OTHERS)[name]
    model, config = build(family)
    return model, inputs(family, config)


def only(seen: Seen, kind: str = "scale") -> Finding:
    assert [f.id for f in seen.accused] == [kind]
    assert seen.found[kind].kind == "wrong"
    return seen.found[kind]


@pytest.mark.parametrize("way", ["sdpa ignores it", "module", "configuration"])
def test_an_inverse_layer_factor_that_is_ignored(way: str, monkeypatch: Any) -> None:
    model, given = small("gpt2 by layer")
    if way == "sdpa ignores it":
        in_call(monkeypatch, model, root(5))
    elif way == "module":
        in_module(monkeypatch, model, root(5))
    else:
        model, given = small("gpt2")
        model.config.scale_attn_by_inverse_layer_idx = True
    f = only(examine(model, **given))
    # Layer 0 divides by 1 and is as configured.
    assert f.where == ("layers 1–2" if way != "configuration" else "layer 1")
    assert "0.447 is 1/√d_k: the inverse-layer factor is ignored." in f.means
    assert "config gives 0.224 = 1/(√5·2) (scale_attn_by_inverse_layer_idx)" in f.seen
    if way != "configuration":
        assert "Layer 2: × 0.447 = 1/√5; config gives 0.149 = 1/(√5·3)" in f.seen


@pytest.mark.parametrize("way", ["module", "call"])
def test_an_inverse_layer_factor_that_nobody_configured(way: str, monkeypatch: Any) -> None:
    model, given = small("gpt2")
    if way == "module":
        monkeypatch.setattr(model.transformer.h[1].attn, "scaling", root(5) / 2)
    else:
        forward = model.transformer.h[1].attn.forward

        @functools.wraps(forward)
        def by_layer(*args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as inside:
                in_call(inside, model, root(5) / 2)
                return forward(*args, **kwargs)

        monkeypatch.setattr(model.transformer.h[1].attn, "forward", by_layer)
    f = only(examine(model, **given))
    assert f.where == "layer 1"
    assert "divided by the layer's number as well" in f.means


FIELDS = {
    "gemma2": ("query_pre_attn_scalar", 5, root(10), "query_pre_attn_scalar is ignored"),
    "gemma3": ("query_pre_attn_scalar", 5, root(10), "query_pre_attn_scalar is ignored"),
    "vaultgemma": ("query_pre_attn_scalar", 5, root(10), "query_pre_attn_scalar is ignored"),
    "granite": ("attention_multiplier", 0.2, root(6), "attention_multiplier is ignored"),
    "hyperclovax": ("attention_multiplier", 0.2, root(6), "attention_multiplier is ignored"),
    "gpt2 unscaled": ("scale_attn_weights", True, root(5), "scale_attn_weights is ignored"),
    "deepseek of 40 times the context": (None, None, root(10), "YaRN's mscale is ignored"),
    "mistral4": (None, None, root(10), "YaRN's mscale is ignored"),
    "inkling": (None, None, root(128), "in place of this family's rule"),
    "t5": (None, None, root(6), "in place of this family's rule"),
    "zamba2": (None, None, root(12), "the half of d_k is ignored"),
}


@pytest.mark.parametrize("plant", [in_module, in_call])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_ignored(name: str, plant: Any, monkeypatch: Any) -> None:
    model, given = small(name)
    plant(monkeypatch, model, FIELDS[name][2])
    f = only(examine(model, **given))
    assert f"is 1/√d_k: {FIELDS[name][3]}" in f.means or f"1/√d_k {FIELDS[name][3]}" in f.means


@pytest.mark.parametrize("name", [n for n, row in FIELDS.items() if row[0]])
def test_a_model_built_from_another_configuration(name: str) -> None:
    """Gemma 2 9B: the first converter wrote 224, Google's own code says 256."""
    model, given = small(name)
    before = examine(model, **given).layers[0].scale
    setattr(model.config, FIELDS[name][0], FIELDS[name][1])
    f = only(examine(model, **given))
    assert f.seen.startswith(f"× {before:.3g}")


def test_gemma_with_the_width_over_heads() -> None:
    """224 = 3584/16 and not 256, in small: 6 = 24/4 and not 10."""
    model, given = small("gemma2 as wide as its heads")
    model.config.query_pre_attn_scalar = 10
    assert "1/√(d_model/heads), which is not d_k here" in only(examine(model, **given)).means


@pytest.mark.parametrize("plant", [in_module, in_call])
def test_mscale_that_is_not_squared(plant: Any, monkeypatch: Any) -> None:
    model, given = small("deepseek of 40 times the context")
    plant(monkeypatch, model, root(10) * (0.1 * math.log(40) + 1))
    assert "with YaRN's mscale once, not squared" in only(examine(model, **given)).means


@pytest.mark.parametrize("plant", [in_module, in_call])
def test_the_rotary_factor_a_second_time(plant: Any, monkeypatch: Any) -> None:
    model, given = small("yarn")
    plant(monkeypatch, model, root(6) * (0.1 * math.log(40) + 1) ** 2)
    assert "YaRN's factor a second time: q and k carry it" in only(examine(model, **given)).means


@pytest.mark.parametrize("name", ["opt", "whisper", "esm", "privacy filter"])
def test_a_prescaled_query_that_is_scaled_again(name: str, monkeypatch: Any) -> None:
    model, given = small(name)
    d_k = examine(model, **given).layers[0].d_k
    in_call(monkeypatch, model, root(d_k))
    f = only(examine(model, **given))
    assert "is the factor a second time: q carries 1/√d_k already" in f.means
    assert "scales q beforehand" in f.seen


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma", "t5gemma, each side with its own"])
@pytest.mark.parametrize("way", ["module", "call"])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_a_soft_cap_that_is_dropped_or_another(
    name: str, way: str, cap: float | None, monkeypatch: Any
) -> None:
    model, given = small(name)
    assert examine(model, **given).clear["soft-cap"].startswith("0.7, as configured in ")
    if way == "call":
        in_call(monkeypatch, model, None, softcap=cap)
    else:
        for m in attentions(model):
            monkeypatch.setattr(m, "attn_logit_softcapping", cap)
    seen = examine(model, **given)
    f = only(seen, "softcap")
    assert "config gives 0.7 (attn_logit_softcapping)" in f.seen
    if cap is None:
        assert f.title.startswith("The configuration's soft-cap is missing in layers 0–")
        assert f.means == "Scores enter softmax without a bound, in place of ±0.7."
    else:
        assert f.title.startswith("A soft-cap other than the configuration's is applied in layers")
        assert f.means == "Scores enter softmax within ±0.5, in place of ±0.7."


def test_a_soft_cap_that_nobody_configured(monkeypatch: Any) -> None:
    model, given = small("llama")
    in_call(monkeypatch, model, None, softcap=30.0)
    f = only(examine(model, **given), "softcap")
    assert f.seen.startswith("Cap 30; config gives none.")


@pytest.mark.parametrize("scale", [24**-0.5, 1.0, 1 / 6])
def test_a_wrapped_attention_of_torch(scale: float, monkeypatch: Any) -> None:
    """Falcon calls torch's function itself, and so do its wrappers."""
    model, given = small("falcon")
    assert examine(model, **given).accused == []
    real = F.scaled_dot_product_attention

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        return real(*args, **(kwargs | {"scale": scale}))

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapped)
    only(examine(model, **given))


# Code of one's own, with no configuration


class Own(nn.Module):
    """Attention as people write it, with torch's function."""

    def __init__(self, width: int, heads: int, scale: float | None, keep: bool = False) -> None:
        super().__init__()
        self.qkv, self.heads, self.factor = nn.Linear(width, 3 * width), heads, scale
        if keep:
            self.scale = (width // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, scale=self.factor).transpose(1, 2).flatten(2)


def own(*scales: float | None, width: int = 32, heads: int = 4, keep: bool = False) -> Seen:
    torch.manual_seed(0)
    model = nn.Sequential(*(Own(width, heads, scale, keep) for scale in scales))
    return examine(model, input=torch.randn(1, 7, width))


def test_own_code_with_the_usual_factor() -> None:
    seen = own(None, root(8))
    assert "scale" not in seen.found
    assert seen.clear["scale"] == "1/√d_k in 2 of 2 layers; no configuration"


def test_own_code_with_the_width_is_a_look() -> None:
    f = own(root(32), root(32)).found["scale"]
    assert f.kind == "look"
    assert f.title == "A scale other than 1/√d_k is applied in layers 0–1"
    assert f.seen == "× 0.177 = 1/√32; 1/√d_k is 0.354 = 1/√8. No configuration says more."
    assert f.means == (
        "0.177 is 1/√(heads·d_k), the width of all heads in place of one. "
        "Scores are 2.00 times narrower."
    )


def test_own_code_with_one_layer_unlike_the_others_is_a_look() -> None:
    f = own(0.3, None, None, None).found["scale"]
    assert f.kind == "look"
    assert f.title == "A scale unlike the other layers' is applied in layer 0"


@pytest.mark.parametrize("scale", [1.0, 0.3, 1 / 8])
def test_own_code_with_a_factor_of_its_own_is_only_described(scale: float) -> None:
    f = own(scale, scale, scale).found["scale"]
    assert f.kind == "note"
    assert "q or k may carry a factor of their own" in f.means


def test_a_width_that_is_also_another_rule_is_only_described() -> None:
    # d_k 4, 4 heads: 1/√16 is 1/d_k, which μP applies.
    assert own(1 / 4, width=16, heads=4).found["scale"].kind == "note"


def test_a_factor_that_the_module_keeps_and_does_not_apply_is_said() -> None:
    f = own(1.0, keep=True).found["scale"]
    assert f.kind == "note"
    assert "The module's scale holds 0.354." in f.means


def test_torchs_own_layers_are_not_accused() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    seen = examine(nn.TransformerEncoder(layer, 3).eval(), src=torch.randn(1, 6, 32))
    assert "scale" not in seen.found


@pytest.mark.parametrize("way", ["class", "instance"])
def test_a_foreign_attention_inside_a_known_model_is_not_accused(way: str) -> None:
    """Somebody's own forward may scale q beforehand: only described."""
    model, given = small("llama")
    theirs = type(model.model.layers[0].self_attn)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaling = 1.0
        return theirs.forward(self, *args, **kwargs)

    mine = type("Mine", (theirs,), {"forward": forward})
    for layer in model.model.layers:
        if way == "class":
            layer.self_attn.__class__ = mine
        else:
            layer.self_attn.forward = functools.partial(forward, layer.self_attn)
    seen = examine(model, **given)
    assert seen.accused == []
    assert seen.found["scale"].kind == "note"


def test_no_sentence_judges() -> None:
    banned = ("healthy", "dead", "broken", "dangerous", "should", "unscaled", "!")
    model, given = small("gemma2")
    for m in attentions(model):
        m.scaling, m.attn_logit_softcapping = 1.0, None
    for seen in (examine(model, **given), own(root(32)), own(0.3, None, None), own(1.0)):
        for f in seen.found.values():
            text = " ".join((f.title, f.where, f.seen, f.means)).lower()
            assert not any(word in text for word in banned)

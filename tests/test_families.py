"""Looking at a Hugging Face model changes nothing: families with tiny random configurations.

For each family: the output under observation equals the unobserved one, in the model's default
attention and in "eager"; every attention call is seen, with the scale that the module says; and
nothing is left changed. Real models are in test_real_models.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import scaledot
from scaledot.observation import TOLERANCE

transformers = pytest.importorskip("transformers", minversion="5")
torch.set_num_threads(1)

WORDS = 61


@dataclass(frozen=True)
class Family:
    """A tiny model of one family and what must be seen of it."""

    config: Callable[[], Any]
    model: str
    attentions: int
    scale: float
    inputs: str = "text"
    softcap: float | None = None
    sinks: bool = False
    windows: tuple[Any, ...] = (None,)
    kinds: tuple[str, ...] = ("self",)
    causal: bool = True


def _config(kind: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(**settings)


BERT = {"vocab_size": WORDS, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32, "max_position_embeddings": 64}  # fmt: skip
LLAMA = {"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
VIT = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
       "image_size": 24, "patch_size": 8}  # fmt: skip
WHISPER = {"vocab_size": WORDS, "num_mel_bins": 8, "encoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_layers": 2,
           "decoder_attention_heads": 4, "decoder_ffn_dim": 32,
           "encoder_ffn_dim": 32, "d_model": 20, "max_source_positions": 12,
           "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1}  # fmt: skip
BART = {"vocab_size": WORDS, "d_model": 20, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
          "v_head_dim": 7, "num_key_value_heads": 4, "first_k_dense_replace": 2,
          "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
          "num_experts_per_tok": 2}  # fmt: skip
T5 = {"vocab_size": WORDS, "d_model": 20, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4,
      "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
SEQ2SEQ = {"kinds": ("cross", "self"), "causal": False, "inputs": "seq2seq", "attentions": 6}


def root(d: float) -> float:
    return 1 / math.sqrt(d)


FAMILIES = {
    "bert": Family(_config("BertConfig", **BERT), "BertModel", 2, root(5), causal=False),
    "bert decoder": Family(
        _config("BertConfig", **BERT, is_decoder=True), "BertLMHeadModel", 2, root(5)
    ),
    "roberta": Family(_config("RobertaConfig", **BERT), "RobertaModel", 2, root(5), causal=False),
    "electra": Family(
        _config("ElectraConfig", **BERT, embedding_size=12), "ElectraModel", 2, root(5),
        causal=False,
    ),
    "albert": Family(
        _config("AlbertConfig", **BERT, embedding_size=12), "AlbertModel", 2, root(5), causal=False
    ),
    "distilbert": Family(
        _config("DistilBertConfig", vocab_size=WORDS, dim=20, n_heads=4, n_layers=2, hidden_dim=32),
        "DistilBertModel", 2, root(5), causal=False,
    ),
    "esm": Family(
        _config("EsmConfig", **(BERT | {"hidden_size": 24}), pad_token_id=0, mask_token_id=3,
                position_embedding_type="rotary"),
        "EsmModel", 2, 1.0, causal=False,
    ),
    "modernbert": Family(
        _config("ModernBertConfig", **(BERT | {"hidden_size": 24}), pad_token_id=0, cls_token_id=1,
                sep_token_id=2, bos_token_id=1, eos_token_id=2,
                local_attention=6, global_attn_every_n_layers=2),
        "ModernBertModel", 2, root(6), causal=False, windows=(None, (3, 3)),
    ),
    "gpt2": Family(
        _config("GPT2Config", vocab_size=WORDS, n_embd=20, n_layer=2, n_head=4, n_positions=64),
        "GPT2LMHeadModel", 2, root(5),
    ),
    "gpt2 unscaled": Family(
        _config("GPT2Config", vocab_size=WORDS, n_embd=20, n_layer=1, n_head=4, n_positions=64,
                scale_attn_weights=False),
        "GPT2LMHeadModel", 1, 1.0,
    ),
    "gpt_neox": Family(
        _config("GPTNeoXConfig", **BERT), "GPTNeoXForCausalLM", 2, root(5)
    ),
    "opt": Family(
        _config("OPTConfig", vocab_size=WORDS, hidden_size=20, num_hidden_layers=2, ffn_dim=32,
                num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=20),
        "OPTForCausalLM", 2, 1.0,
    ),
    "llama": Family(_config("LlamaConfig", **LLAMA), "LlamaForCausalLM", 2, root(6)),
    "mistral": Family(
        _config("MistralConfig", **LLAMA, sliding_window=4), "MistralForCausalLM", 2, root(6),
        windows=(4,),
    ),
    "mixtral": Family(
        _config("MixtralConfig", **LLAMA, **MOE, sliding_window=None), "MixtralForCausalLM", 2,
        root(6),
    ),
    "qwen2": Family(_config("Qwen2Config", **LLAMA), "Qwen2ForCausalLM", 2, root(6)),
    "qwen3": Family(_config("Qwen3Config", **LLAMA, head_dim=10), "Qwen3ForCausalLM", 2, root(10)),
    "gemma": Family(_config("GemmaConfig", **LLAMA, head_dim=10), "GemmaForCausalLM", 2, root(10)),
    "gemma2": Family(
        _config("Gemma2Config", **LLAMA, head_dim=10, query_pre_attn_scalar=7, sliding_window=4,
                attn_logit_softcapping=0.7),
        "Gemma2ForCausalLM", 2, root(7), softcap=0.7, windows=(4, None),
    ),
    "gemma3": Family(
        _config("Gemma3TextConfig", **LLAMA, head_dim=10, query_pre_attn_scalar=7,
                sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
        "Gemma3ForCausalLM", 2, root(7), windows=(4, None),
    ),
    "phi3": Family(_config("Phi3Config", **LLAMA), "Phi3ForCausalLM", 2, root(6)),
    "olmo2": Family(_config("Olmo2Config", **LLAMA), "Olmo2ForCausalLM", 2, root(6)),
    "granite": Family(
        _config("GraniteConfig", **LLAMA, attention_multiplier=0.3), "GraniteForCausalLM", 2, 0.3
    ),
    "cohere": Family(_config("CohereConfig", **LLAMA), "CohereForCausalLM", 2, root(6)),
    "smollm3": Family(_config("SmolLM3Config", **LLAMA), "SmolLM3ForCausalLM", 2, root(6)),
    "gpt_oss": Family(
        _config("GptOssConfig", **LLAMA, **MOE, head_dim=10, sliding_window=4,
                layer_types=["sliding_attention", "full_attention"]),
        "GptOssForCausalLM", 2, root(10), sinks=True, windows=(4, None),
    ),
    "llama4": Family(
        _config("Llama4TextConfig", **LLAMA, **MOE, head_dim=10, attention_chunk_size=4,
                intermediate_size_mlp=32, no_rope_layers=[1, 0]),
        "Llama4ForCausalLM", 2, root(10),
    ),
    "deepseek_v3": Family(
        _config("DeepseekV3Config", **(LLAMA | LATENT)), "DeepseekV3ForCausalLM", 2, root(10)
    ),
    "t5": Family(
        _config("T5Config", **T5), "T5ForConditionalGeneration", scale=1.0, **SEQ2SEQ
    ),
    "bart": Family(
        _config("BartConfig", **BART), "BartForConditionalGeneration", scale=root(5), **SEQ2SEQ
    ),
    "whisper": Family(
        _config("WhisperConfig", **WHISPER), "WhisperForConditionalGeneration", scale=1.0,
        **(SEQ2SEQ | {"inputs": "sound"}),
    ),
    "vit": Family(_config("ViTConfig", **VIT), "ViTModel", 2, root(5), "image", causal=False),
    "dinov2": Family(_config("Dinov2Config", **VIT), "Dinov2Model", 2, root(5), "image",
                     causal=False),
    "swin": Family(
        _config("SwinConfig", image_size=32, patch_size=4, embed_dim=20, depths=[2, 2],
                num_heads=[4, 8], window_size=4),
        "SwinModel", 4, root(5), "image", causal=False,
    ),
    "clip": Family(
        _config("CLIPTextConfig", **BERT), "CLIPTextModel", 2, root(5)
    ),
}  # fmt: skip


def build(family: Family, seed: int = 0) -> tuple[Any, Any]:
    """(model, its configuration), random weights large enough for attention to be uneven."""
    torch.manual_seed(seed)
    config = family.config()
    model = getattr(transformers, family.model)(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                p.mul_(3)
    return model, config


def inputs(family: Family, config: Any, length: int = 11) -> dict[str, Any]:
    """One padded batch of two."""
    torch.manual_seed(1)
    if family.inputs == "image":
        size = config.image_size
        return {"pixel_values": torch.randn(2, 3, size, size)}
    real = torch.ones(2, length, dtype=torch.long)
    # Decoders are padded on the left, encoders on the right.
    if family.causal:
        real[0, :4] = 0
    else:
        real[0, -4:] = 0
    ids = torch.randint(4, WORDS, (2, length)) * real
    if family.inputs == "text":
        return {"input_ids": ids, "attention_mask": real}
    target = torch.ones(2, 7, dtype=torch.long)
    target[1, -2:] = 0
    given = {
        "decoder_input_ids": torch.randint(4, WORDS, (2, 7)) * target,
        "decoder_attention_mask": target,
    }
    if family.inputs == "sound":
        given["input_features"] = torch.randn(2, 8, 24)
    else:
        given |= {"input_ids": ids, "attention_mask": real}
    return given


def first_output(result: Any) -> torch.Tensor:
    return result.logits if "logits" in result else result.last_hidden_state


def close(looked: torch.Tensor, plain: torch.Tensor, calls: int) -> None:
    limit = TOLERANCE * calls * torch.finfo(plain.dtype).eps * max(float(plain.abs().max()), 1.0)
    assert float((looked - plain).abs().max()) <= limit


@pytest.mark.parametrize("name", FAMILIES)
def test_looking_changes_nothing(name: str) -> None:
    family = FAMILIES[name]
    model, config = build(family)
    given = inputs(family, config)
    for implementation in (None, "eager"):
        if implementation:
            model.set_attn_implementation(implementation)
        named = [
            getattr(m, "config", None) and m.config._attn_implementation for m in model.modules()
        ]
        with torch.no_grad():
            plain = first_output(model(**given))
            with scaledot.observe(model) as seen:
                looked = first_output(model(**given))
        close(looked, plain, family.attentions)
        after = [
            getattr(m, "config", None) and m.config._attn_implementation for m in model.modules()
        ]
        assert after == named
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert torch.backends.mha.get_fastpath_enabled()

        calls = seen.calls
        assert len(calls) == len(seen.heads) == family.attentions
        assert seen.unobserved == ()
        for call in calls.values():
            assert call.scale == pytest.approx(family.scale, rel=1e-6)
        assert {c.softcap for c in calls.values()} == {family.softcap}
        assert {c.sinks for c in calls.values()} == {family.sinks}
        assert {c.window for c in calls.values()} == set(family.windows)
        assert sorted({c.kind for c in calls.values()}) == sorted(family.kinds)
        causal = {c.causal for c in calls.values()}
        assert causal == ({True, False} if "cross" in family.kinds else {family.causal})
        for stats in seen.heads.values():
            assert int(stats.counts["empty"].sum()) == int(stats.counts["nonfinite"].sum()) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_a_model_are_real(name: str) -> None:
    """`output_attentions=True` under observation gives what eager gives."""
    family = FAMILIES[name]
    model, config = build(family)
    given = inputs(family, config)
    with torch.no_grad():
        with scaledot.observe(model):
            looked = model(**given, output_attentions=True)
        model.set_attn_implementation("eager")
        plain = model(**given, output_attentions=True)
    found = 0
    for field_name in (
        "attentions",
        "encoder_attentions",
        "decoder_attentions",
        "cross_attentions",
    ):
        want = getattr(plain, field_name, None)
        if want is None:
            continue
        got = getattr(looked, field_name)
        assert len(got) == len(want)
        found += len(got)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            # What a padded query "sees" differs between the model's own eager and sdpa.
            alive = a.sum(-1) > 0
            torch.testing.assert_close(a[alive], b[alive], atol=2e-5, rtol=0)
    assert found == (2 if name == "swin" else family.attentions)  # Swin returns one a stage

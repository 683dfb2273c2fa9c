"""The table of models, and the sizes of a model that is asked about."""

import math

import pytest
from torch import nn

from scaledot import ScaledotError, lab
from scaledot.lab.published import MODELS, configured, named

BREAKS = {
    "PaLM 540B": 12288, "T5 11B": 16384, "Gemma-1 7B": 4096, "Gemma-2 2B": 2048,
    "Gemma-2 9B": 4096, "Gemma-2 27B": 4096, "Gemma-3 1B": 1024, "Gemma-3 4B": 2048,
    "Gemma-3 12B": 4096, "Gemma-3 27B": 4096, "Qwen3 0.6B": 2048, "Qwen3 4B": 4096,
    "Qwen3 32B": 8192, "Qwen3 30B-A3B": 4096, "Qwen3 235B-A22B": 8192, "Mistral Nemo 12B": 4096,
    "DeepSeek-V3": 24576, "gpt-oss 20B": 4096, "gpt-oss 120B": 4096,
}  # fmt: skip


def test_the_models_that_break_the_convention_are_these():
    rows = lab.models().rows
    assert {r["name"]: r["width"] for r in rows if r["differs"]} == BREAKS
    assert all((r["width"] != r["d_model"]) == bool(r["differs"]) for r in rows)


def test_names_are_unique_and_heads_share_kv_heads_evenly():
    assert len({m.name for m in MODELS}) == len(MODELS)
    assert all(m.heads % m.kv_heads == 0 for m in MODELS)
    assert {m.known for m in MODELS} == {"read", "recalled", "quoted"}


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("BERT base", 1 / 8), ("GPT-3 175B", 1 / math.sqrt(128)), ("PaLM 540B", 1 / 16),
        ("T5 11B", 1.0), ("Gemma-2 27B", 1 / 12), ("Gemma-3 27B", 168**-0.5),
        ("gpt-oss 120B", 1 / 8), ("DeepSeek-V3", 0.1352337788608801),
    ],
)  # fmt: skip
def test_scales(name, scale):
    (row,) = lab.models(name).rows
    assert row["scale"] == pytest.approx(scale, rel=1e-12)


def test_the_sentences_follow_from_the_rows():
    first, second = lab.models().says[:2]
    assert "d_k goes from 32 to 256 (× 8)" in first
    assert "d_model from 128 to 18,432 (× 144)" in first
    assert "5.6 orders of magnitude" in first
    assert second == "h·d_k differs from d_model in 19 of 60."
    # GPT-3's 175B, as Kaplan counts.
    gpt3 = named("gpt-3 175b")
    assert 12 * gpt3.layers * gpt3.d_model**2 == pytest.approx(174e9, rel=0.01)


def test_a_part_of_the_name_chooses():
    r = lab.models("gemma-3")
    assert r.column("name") == ["Gemma-3 1B", "Gemma-3 4B", "Gemma-3 12B", "Gemma-3 27B"]
    assert r.about == "4 of 60 models"
    assert "4 of 4" in r.says[1]
    assert len(r.panels[0].lines[0].x) == 4
    one = lab.models("ViT")
    assert one.says == (
        "h·d_k differs from d_model in 0 of 1.",
        one.says[1],
        "ViT-22B: q and k are normed before the product.",
    )


@pytest.mark.parametrize("name", ["gpt2", "GPT-2", "gpt-2 small", "GPT2small"])
def test_gpt2_is_the_small_one(name):
    assert named(name).name == "GPT-2 small"


def test_names_unknown():
    with pytest.raises(ValueError, match=r"^no model 'gpt2medum' in the table: did you mean GPT-2"):
        named("gpt2medum")
    with pytest.raises(
        ValueError, match=r"^no model 'xyzzy' in the table; `scaledot lab models` shows"
    ):
        named("xyzzy")
    with pytest.raises(ValueError, match=r"^no model of the table has 'lamma' in its name"):
        lab.models("lamma")


def test_a_name_must_be_a_string(unannotated):
    with pytest.raises(TypeError, match=r"^name is 3: pass a part of a model's name$"):
        lab.models(3)


def test_configurations(tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt2 = configured(transformers.GPT2Config())
    assert (gpt2.layers, gpt2.heads, gpt2.kv_heads, gpt2.d_model, gpt2.d_k) == (12, 12, 12, 768, 64)
    mine = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=96, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32,
    )  # fmt: skip
    mine.save_pretrained(tmp_path)
    m = named(tmp_path)
    assert (m.layers, m.heads, m.kv_heads, m.d_model, m.d_k, m.value_dim) == (3, 6, 2, 96, 32, 32)
    deepseek = configured(transformers.DeepseekV3Config())
    table = named("deepseek-v3")
    assert deepseek.queries == table.queries
    assert deepseek.keys_values == table.keys_values
    assert deepseek.output == table.output


def test_the_table_is_what_transformers_has_by_default():
    transformers = pytest.importorskip("transformers")
    for name, config in (
        ("GPT-J 6B", transformers.GPTJConfig()),
        ("BERT base", transformers.BertConfig()),
        ("Mistral 7B", transformers.MistralConfig()),
        ("LLaMA-1 7B", transformers.LlamaConfig()),
        ("gpt-oss 120B", transformers.GptOssConfig()),
    ):
        mine, theirs = named(name), configured(config)
        for size in ("layers", "heads", "kv_heads", "d_model", "d_k", "value_dim"):
            assert getattr(mine, size) == getattr(theirs, size), (name, size)


def test_configurations_that_say_too_little(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"^Linear does not say layers, heads, d_model, d_k: pass"):
        configured(nn.Linear(2, 2))
    with pytest.raises(ScaledotError, match=r"^no configuration to be read in "):
        named(tmp_path)

"""The factor's name and the configuration's word on it."""

from types import SimpleNamespace

import pytest

from scaledot.scales import Configured, configured, head_size, rule


@pytest.mark.parametrize(
    ("scale", "d_k", "d_model", "name", "value"),
    [
        (0.125, 64, 768, "1/√d_k", "1/√64"),
        (29**-0.5, 29, 116, "1/√d_k", "1/√29"),
        (1.0, 64, 512, "none", "1"),
        (1 / 64, 64, 512, "1/d_k", "1/64"),
        (576**-0.5, 64, 576, "1/√d_model", "1/√576"),
        (144**-0.5, 128, 4608, "1/√144", "1/√144"),
    ],
)
def test_a_known_factor_has_a_name(scale, d_k, d_model, name, value):
    found = rule(scale, d_k, d_model)
    assert (found.name, found.value) == (name, value)


def test_the_inverse_layer_rule_is_named_by_its_layer():
    assert rule(0.125 / 3, 64, 768, layer=2).name == "1/(√d_k·(layer + 1))"


def test_an_unknown_factor_has_no_name():
    assert rule(0.1352337, 192) is None
    assert rule(-0.5, 64) is None


def config(**fields):
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("fields", "d_k", "layer", "scale", "explicit"),
    [
        ({"hidden_size": 768, "num_attention_heads": 12}, 64, 0, 0.125, False),
        ({"head_dim": 256, "query_pre_attn_scalar": 144}, 256, 0, 1 / 12, True),
        ({"attention_multiplier": 0.015625, "model_type": "granite"}, 64, 5, 0.015625, True),
        ({"model_type": "t5", "d_model": 512, "num_heads": 8}, 64, 0, 1.0, False),
        ({"model_type": "opt", "hidden_size": 512, "num_attention_heads": 8}, 64, 0, 1.0, False),
        ({"model_type": "gpt2", "scale_attn_weights": False}, 64, 3, 1.0, True),
        (
            {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": True},
            64, 3, 0.125 / 4, True,
        ),
    ],
)  # fmt: skip
def test_the_configuration_gives_the_factor(fields, d_k, layer, scale, explicit):
    found = configured(config(**fields), d_k, layer)
    assert isinstance(found, Configured)
    assert found.scale == pytest.approx(scale)
    assert found.explicit is explicit


def test_a_silent_configuration_is_silent():
    assert configured(None, 64, 0) is None
    assert configured(config(hidden_size=512, num_attention_heads=8), 80, 0) is None


def test_head_size_of_latent_attention_is_not_guessed():
    # DeepSeek's head_dim is the rotary part only; q and k are wider.
    assert head_size(config(head_dim=64, kv_lora_rank=512)) is None
    assert head_size(config(n_embd=4096, n_head=32)) == 128

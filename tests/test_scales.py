"""The factor's name, the configuration's word on it, and whether they agree."""

import importlib
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scaledot import scales
from scaledot.scales import (
    PRESCALED,
    UNSCALED,
    Configured,
    configured,
    head_size,
    module_scale,
    of_call,
    rule,
    softcap_is,
    verdict,
)


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


def test_both_switches_of_gpt2_count():
    found = configured(
        config(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True), 64, 3
    )
    assert found.scale == pytest.approx(1 / 4)


def latent(**rope):
    return config(
        model_type="deepseek_v3", kv_lora_rank=512, head_dim=64, qk_nope_head_dim=128,
        qk_rope_head_dim=64, rope_parameters=rope,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "d_k", "scale", "source"),
    [
        ({"model_type": "zamba2"}, 32, 16**-0.5, "1/√(d_k/2)"),
        ({"model_type": "inkling_text"}, 64, 1 / 64, "inkling_text divides by d_k"),
        ({"attn_config": SimpleNamespace(softmax_scale=0.3)}, 64, 0.3, "softmax_scale 0.3"),
        ({"model_type": "deberta", "pos_att_type": ["c2p", "p2c"]}, 64, 192**-0.5,
         "1/√(d_k·3)"),
        ({"model_type": "deberta-v2", "pos_att_type": ["p2c"]}, 64, 128**-0.5,
         "1/√(d_k·2)"),
        ({"model_type": "sew-d", "pos_att_type": None}, 64, 0.125, "1/√(d_k·1)"),
        ({"query_pre_attn_scalar": 144, "text_config": None, "head_dim": 128}, 128, 1 / 12,
         "query_pre_attn_scalar 144"),
        ({"text_config": config(query_pre_attn_scalar=168, head_dim=128)}, 128, 168**-0.5,
         "query_pre_attn_scalar 168"),
    ],
)  # fmt: skip
def test_each_rule_says_where_it_was_read(fields, d_k, scale, source):
    found = configured(config(**fields), d_k, 0)
    assert found.scale == pytest.approx(scale)
    assert found.source == source


def test_mscale_of_deepseek():
    # 192 dims, factor 40: α = 192^−½ · 1.3689².
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    found = configured(latent(**rope), 192, 0)
    assert found.scale == pytest.approx(0.1352, abs=5e-5)
    assert found.plain == pytest.approx(192**-0.5)
    # Without mscale_all_dim cos and sin carry the factor, and the call's is plain.
    assert configured(latent(rope_type="yarn", factor=40.0), 192, 0).scale == found.plain
    assert configured(latent(rope_type="default", mscale_all_dim=1.0), 192, 0).scale == found.plain


@pytest.mark.parametrize(
    ("rope", "carried"),
    [
        ({"rope_type": "yarn", "factor": 40.0}, (0.1 * math.log(40) + 1) ** 2),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}, 2.25),
        ({"rope_type": "yarn", "factor": 0.5}, 1.0),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096},
         1 + math.log(32) / math.log(4096)),
        ({"rope_type": "linear", "factor": 8.0}, 1.0),
        ({"full_attention": {"rope_type": "yarn", "factor": 8.0}}, 1.0),
    ],
)  # fmt: skip
def test_what_rotary_embeddings_carry_leaves_the_calls_factor_alone(rope, carried):
    found = configured(
        config(head_dim=64, rope_parameters=rope, max_position_embeddings=131072), 64, 0
    )
    assert found.scale == 0.125
    assert found.carried == pytest.approx(carried)


def test_layers_that_differ_are_read_each_from_its_own():
    one, two = config(head_dim=64), config(head_dim=32)
    both = config(is_heterogeneous=True, per_layer_config=[one, two])
    assert configured(both, 64, 0).scale == 0.125
    assert configured(both, 64, 1) is None
    assert configured(both, 32, 1).scale == 32**-0.5


def test_a_configuration_that_is_no_transformers_own_makes_a_head_size_uncertain():
    transformers = pytest.importorskip("transformers", minversion="5")
    known = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert configured(known, 16, 0).explicit
    assert not configured(config(hidden_size=64, num_attention_heads=4), 16, 0).explicit
    # Code of one's own may scale q beforehand, whatever the configuration says.
    assert not configured(known, 16, 0, nn.Linear(2, 2)).explicit
    assert not configured(config(query_pre_attn_scalar=4), 16, 0, nn.Linear(2, 2)).explicit


# transformers' own files


def modelling_files():
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = Path(transformers.__file__).parent / "models"
    return sorted(folder.glob("*/modeling_*.py"))


def model_types(folder):
    texts = [p.read_text(encoding="utf-8") for p in folder.glob("configuration_*.py")]
    return {t for text in texts for t in re.findall(r'^    model_type = "(.+)"', text, re.M)}


STANDARD = {
    "self.head_dim**-0.5", "self.attention_head_size**-0.5", "self.head_size**-0.5",
    "self.qk_head_dim**-0.5", "self.qk_head_dim ** (-0.5)", "1 / math.sqrt(self.head_dim)",
    "1 / math.sqrt(config.head_dim)", "(self.internal_dim // config.num_attention_heads) ** -0.5",
    "expanded_head_dim**-0.5", "self.attention_head_dim**-0.5",
}  # fmt: skip
BY_FIELD = {
    "config.attention_multiplier": "attention_multiplier",
    "config.query_pre_attn_scalar**-0.5": "query_pre_attn_scalar",
    "self.head_dim**-0.5 if config.scale_attn_weights else 1.0": "scale_attn_weights",
}
BEFOREHAND = {  # What q gets before the call, which then applies 1.
    "nn.Parameter(torch.empty((self.head_dim,)))", "_R_SOFTPLUS_0 / (self.head_dim**0.5)",
    "config.head_dim**-0.25",
}  # fmt: skip


def test_every_factor_in_transformers_is_one_of_the_rules():
    """A family with a factor of its own has to be in the tables, or this fails."""
    found, ones = set(), set()
    for path in modelling_files():
        text, folder = path.read_text(encoding="utf-8"), path.parent
        if "ALL_ATTENTION_FUNCTIONS" not in text:
            continue
        kinds = model_types(folder)
        factors = set(re.findall(r"self\.scaling = ([^#\n]+?) *(?:#.*)?$", text, re.M))
        for factor in factors - STANDARD:
            if factor in ("1", "1.0"):
                ones.add(folder.name)
            elif factor.startswith("yarn_apply_mscale("):
                assert kinds & scales._MSCALED, folder.name
            elif factor in BEFOREHAND:
                assert kinds & PRESCALED or folder.name == "videoprism", folder.name
            elif factor in BY_FIELD:
                sources = "".join(
                    p.read_text(encoding="utf-8") for p in folder.glob("configuration_*.py")
                )
                assert BY_FIELD[factor] in sources, folder.name
            elif factor == "(self.head_dim / 2) ** -0.5":
                assert kinds <= {"zamba", "zamba2"}
            elif factor == "1.0 / self.head_dim":
                assert all(k.startswith("inkling") for k in kinds)
            else:
                # Embeddings, not attention: √d_model on the tokens.
                assert factor == "config.hidden_size**0.5", (folder.name, factor)
            found.add(factor)
        if re.search(r"^\s+scaling=1\.0,", text, re.M):
            ones.add(folder.name)
    by_field_or_class = {"gpt2", "decision_transformer", "evolla", "videoprism"}
    for name in ones - by_field_or_class:
        assert model_types(modelling_files()[0].parents[1] / name) & (UNSCALED | PRESCALED), name
    assert {"t5", "opt", "whisper", "esm", "gemma4"} <= ones
    assert set(BY_FIELD) | BEFOREHAND <= found


@pytest.mark.parametrize("kind", sorted(scales._MSCALED - {"sarvam_mla"}))
def test_mscale_is_what_the_familys_own_module_computes(kind):
    # sarvam_mla runs DeepSeek V3's classes.
    pytest.importorskip("transformers", minversion="5")
    folder = kind.removesuffix("_text")
    models = f"transformers.models.{folder}"
    modelling = importlib.import_module(f"{models}.modeling_{folder}")
    configuration = importlib.import_module(f"{models}.configuration_{folder}")
    made = next(c for c in vars(configuration).values() if getattr(c, "model_type", "") == kind)
    given = made(
        rope_parameters={
            "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.9,
            "original_max_position_embeddings": 4096, "rope_theta": 1e4, "beta_fast": 32,
            "beta_slow": 1, "llama_4_scaling_beta": 0.1,
        }
    )  # fmt: skip
    attention = next(
        c
        for c in vars(modelling).values()
        if inspect.isclass(c)
        and c.__module__ == modelling.__name__
        and "yarn_apply_mscale" in inspect.getsource(c)
    )
    with torch.device("meta"):
        module = attention(given, layer_idx=0)
    found = configured(given, module.qk_head_dim, 0, module)
    assert found.scale == pytest.approx(module.scaling, rel=1e-9)
    assert found.scale > found.plain
    assert found.explicit


# Modules and calls


def test_the_factor_that_a_module_keeps():
    def module(**fields):
        made = nn.Linear(2, 2)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    assert module_scale(module(scaling=0.125, scale=3.0)) == (0.125, "scaling")
    assert module_scale(module(scale=1)) == (1.0, "scale")
    assert module_scale(module(softmax_scale=0.1)) == (0.1, "softmax_scale")
    assert module_scale(module(inv_norm_factor=0.2)) == (0.2, "inv_norm_factor")
    # A learned one is no number, a switch neither; Llama 4's attn_scale is not of the call.
    assert module_scale(module(scale=nn.Parameter(torch.ones(3)))) is None
    assert module_scale(module(scale=True, attn_scale=0.1)) is None
    # What OPT's module keeps goes to q.
    assert module_scale(module(scaling=0.125, config=config(model_type="opt"))) is None


def test_a_call_is_read_from_the_nearest_configuration():
    inner = nn.Sequential(nn.Linear(2, 2))
    inner.config = config(model_type="vision", head_dim=16)
    inner[0].layer_idx = 2
    inner[0].scaling = 0.25
    model = nn.ModuleDict({"text": nn.Linear(2, 2), "vision": inner})
    model.config = config(
        model_type="whole", head_dim=64, scale_attn_by_inverse_layer_idx=True, num_heads=1
    )
    given, own = of_call(model, "vision.0[1]", 16, 5)
    assert (given.scale, given.layer, own) == (0.25, 2, (0.25, "scaling"))
    given, own = of_call(model, "text", 64, 3)
    assert (given.scale, given.layer, own) == (0.125 / 4, 3, None)
    # A model that is one attention has no path of its own; torch.compile wraps are passed over.
    assert of_call(model, "ModuleDict", 64, 0)[0].scale == 0.125
    wrapped = nn.Module()
    wrapped._orig_mod = model
    assert of_call(wrapped, "vision.0", 16, 0)[0].layer == 2
    assert of_call(nn.Linear(2, 2), "Linear", 64, 0) == (None, None)


# Verdicts

PLAIN = Configured(0.125, "head size 64", True, 0.125, d_model=768)


def judged(applied, given, **fields):
    return verdict(applied, 64, given, **({"heads": 12, "kv_heads": 12} | fields))


@pytest.mark.parametrize(
    ("applied", "fields", "mistake"),
    [
        (768**-0.5, {}, "1/√d_model, the model's width"),
        (1.0, {}, "none: no factor"),
        (1 / 64, {}, "the configured factor twice, or 1/d_k"),
        (8.0, {}, "the configured factor's inverse"),
        (256**-0.5, {"kv_heads": 4}, "1/√(kv_heads·d_k)"),
        (192**-0.5, {"kv_heads": 4}, "1/√(d_model/kv_heads)"),
        (0.2, {}, None),
    ],
)
def test_each_mistake_has_its_name(applied, fields, mistake):
    found = judged(applied, PLAIN, **fields)
    assert found.kind == "wrong"
    assert found.meant == 0.125
    assert found.mistake is None if mistake is None else mistake in found.mistake


def test_a_projection_wider_than_the_model_has_two_widths():
    wide = Configured(0.125, "head size 64", True, 0.125, d_model=1024)
    assert "1/√d_model" in judged(1024**-0.5, wide).mistake
    assert "1/√(heads·d_k)" in judged(768**-0.5, wide).mistake
    assert judged(1024**-0.5, wide, heads=16).mistake.count("1/√") == 1


@pytest.mark.parametrize("factor", [1.0, 1 / 64, 0.125, 0.3])
def test_the_configured_factor_is_ok_whatever_it_is(factor):
    given = Configured(factor, "attention_multiplier", True, 0.125, "attention_multiplier")
    assert judged(factor, given).kind == "ok"
    assert judged(factor * (1 + 5e-4), given).kind == "ok"
    assert judged(factor * 1.01, given).kind == "wrong"


def test_an_implied_factor_accuses_only_what_is_certain():
    implied = Configured(0.125, "head size 64", False, 0.125, d_model=768)
    assert judged(1.0, implied, peers=[1.0] * 5).kind == "note"
    assert judged(768**-0.5, implied, peers=[768**-0.5] * 5).kind == "wrong"
    assert judged(1.0, implied, peers=[1.0, 0.125, 0.125]).kind == "wrong"
    # Half and half, or two layers, show no rule.
    assert judged(1.0, implied, peers=[1.0, 0.125]).kind == "note"
    assert judged(1.0, implied, peers=[1.0, 1.0, 0.125, 0.125]).kind == "note"
    # d_model = d_k²: 1/√d_model is 1/d_k, which families apply.
    square = Configured(0.125, "head size 64", False, 0.125, d_model=4096)
    assert judged(1 / 64, square, heads=64).kind == "note"


def test_where_the_factor_stands():
    assert judged(1.0, PLAIN, own=(1.0, "scaling")).origin == "the module's scaling holds it"
    assert judged(1.0, PLAIN, own=(0.125, "scaling")).origin == (
        "the module's scaling holds the configured one, the call does not apply it"
    )
    assert judged(1.0, PLAIN, own=(0.3, "scale")).origin == "the module's scale holds 0.3"
    assert judged(1.0, PLAIN).origin is None


def test_one_head_has_no_other_width():
    one = verdict(0.0625, 64, None, heads=1, kv_heads=1, d_model=256)
    assert one.kind == "note"
    assert verdict(0.0625, 64, None, heads=4, kv_heads=4, d_model=256).kind == "look"


@pytest.mark.parametrize("applied", [0.0, -0.125, 1e9])
def test_factors_beyond_reason_are_judged_too(applied):
    assert judged(applied, PLAIN).kind == "wrong"
    nothing = Configured(0.0, "attention_multiplier 0", True, 0.125, "attention_multiplier")
    assert judged(0.125, nothing).kind == "wrong"


@pytest.mark.parametrize(
    ("applied", "cap", "explicit", "said"),
    [
        (50.0, 50.0, True, "ok"), (None, None, True, "ok"), (None, 50.0, True, "wrong"),
        (30.0, 50.0, True, "wrong"), (30.0, None, True, "wrong"), (30.0, None, False, "ok"),
    ],
)  # fmt: skip
def test_the_soft_cap_is_compared_where_it_is_certain(applied, cap, explicit, said):
    assert softcap_is(applied, Configured(0.125, "x", explicit, softcap=cap)) == said
    assert softcap_is(applied, None) == "ok"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("1/sqrt_d_k", 1 / 8), ("1/d_k", 1 / 64), ("none", 1.0), ("1/sqrt_d_model", 512**-0.5),
        ("log_n/sqrt_d_k", math.log(4096) / math.log(512) / 8),
        ("sqrt_log_n/sqrt_d_k", math.sqrt(math.log(4096) / math.log(512)) / 8),
        (0.3, 0.3), (2, 2.0),
    ],
)  # fmt: skip
def test_the_factor_of_a_rule_by_name(rule, expected):
    assert scales.factor(rule, 64, d_model=512, keys=4096) == pytest.approx(expected, rel=1e-15)
    if isinstance(rule, str):
        assert rule in scales.RULES


def test_rules_with_log_n_are_the_usual_one_at_512_keys_and_flat_for_one():
    for name in ("log_n/sqrt_d_k", "sqrt_log_n/sqrt_d_k"):
        assert scales.factor(name, 64, keys=512) == 0.125
        assert scales.factor(name, 64, keys=1) == 0


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("sqrt", "scale is 'sqrt': pass one of 1/sqrt_d_k, 1/d_k, none"),
        (math.nan, "scale is nan: pass a finite number or one of"),
        (True, "scale is True: pass a finite number"),
        (-math.inf, "scale is -inf: pass a finite number"),
        ("1/sqrt_d_model", "needs d_model"),
        ("log_n/sqrt_d_k", "needs the number of keys"),
    ],
)
def test_a_factor_that_cannot_be_had_says_why(rule, said, unannotated):
    with pytest.raises(ValueError, match=re.escape(said)):
        scales.factor(rule, 64)

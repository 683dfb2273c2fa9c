"""The factor applied to QKᵀ: its name, what a model's configuration says it is, and whether the two
agree.

A verdict is about the factor, never about variance: a trained head may have any variance. What a
configuration says is read by the rules of the modelling files of transformers 5.24, each named in
docs/maths.md#scales; tests/test_scales.py reads those files and fails where a family is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

UNSCALED = frozenset({
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "pix2struct", "pix2struct_text_model",
    "pix2struct_vision_model", "pop2piano", "udop", "gpt_neo", "dia", "dia_encoder", "dia_decoder",
    "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_vision", "gemma4_unified",
    "gemma4_unified_text", "diffusion_gemma", "diffusion_gemma_text", "embedding_gemma2",
    "embedding_gemma2_text",
})  # fmt: skip
"""Families that apply no factor: the initialisation or a norm of q and k carries it."""

PRESCALED = frozenset({
    "opt", "whisper", "esm", "qwen2_audio_encoder", "audioflamingo3_encoder", "voxtral_encoder",
    "moss_transcribe_diarize_audio", "kosmos_2_5_text_model", "openai_privacy_filter", "timesfm",
    "timesfm2_5",
})  # fmt: skip
"""Families that scale q (privacy-filter: q and k) before the product, which then gets a factor
of 1."""

_PRESCALED_CLASSES = frozenset({
    "EvollaSaProtSelfAttention", "VideoPrismMultiheadAttentionPoolingHead",
})  # fmt: skip
"""The same for one attention of a family whose others apply 1/√d_k."""

_MSCALED = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "mistral4", "mistral_large4_text", "axk1", "axk2",
    "longcat_flash", "hy_v4", "hy_v4_vl_text", "youtu", "bailing_hybrid", "glm4_moe_lite",
    "minicpm3", "glm_moe_dsa", "sarvam_mla",
})  # fmt: skip
"""Families with latent attention whose factor YaRN's mscale multiplies."""

_MSCALE = "YaRN's mscale"

_SIZELESS = frozenset({"Florence2VisionChannelAttention"})
"""Attentions whose factor depends on the number of tokens, which no configuration holds."""

_OWN_FACTOR = ("scaling", "scale", "softmax_scale", "inv_norm_factor")
"""Attributes under which attention modules keep the factor of their call."""

_CLOSE = 1e-3
"""Factors closer than this, relatively, are one: float32 and rounded fields stay below it."""


# What a factor is called


@dataclass(frozen=True)
class Rule:
    """A factor with its name: `name` in symbols (1/√d_k), `value` with numbers (1/√64)."""

    name: str
    value: str


def rule(
    scale: float, d_k: int, d_model: int | None = None, layer: int | None = None
) -> Rule | None:
    """Name a factor by the rule it equals to 1e-4 relative, None if by none of them."""
    known = [
        (d_k**-0.5, Rule("1/√d_k", f"1/√{d_k}")),
        (1.0, Rule("none", "1")),
        (1 / d_k, Rule("1/d_k", f"1/{d_k}")),
    ]
    if d_model:
        known.append((d_model**-0.5, Rule("1/√d_model", f"1/√{d_model}")))
    if layer:
        inverse = Rule("1/(√d_k·(layer + 1))", f"1/(√{d_k}·{layer + 1})")
        known.append((d_k**-0.5 / (layer + 1), inverse))
    for value, name in known:
        if math.isclose(scale, value, rel_tol=1e-4):
            return name
    square = 1 / scale**2 if scale > 0 else 0
    if 1 < square < 1e6 and abs(square - round(square)) < 1e-3 * square**0.5:
        return Rule(f"1/√{round(square)}", f"1/√{round(square)}")
    return None


RULES = {
    "1/sqrt_d_k": "1/√d_k",
    "1/d_k": "1/d_k",
    "none": "none",
    "1/sqrt_d_model": "1/√d_model",
    "log_n/sqrt_d_k": "log₅₁₂ n/√d_k",
    "sqrt_log_n/sqrt_d_k": "√log₅₁₂ n/√d_k",
}
"""The rules that can be asked for by name, and how each is written."""

_LOG_LENGTH = 512
"""Keys at which a rule with log n is 1/√d_k: the length that models were trained at in Su's."""


def factor(
    rule: str | float, d_k: int, *, d_model: int | None = None, keys: int | None = None
) -> float:
    """The factor that a rule of `RULES` gives, or the number itself.

    keys: how many a query sees, for the rules with log n, which are 1/√d_k at 512 keys: log n
    keeps the leading key's odds against n others (Su 2021), its root what entropy is of ln n for
    Gaussian scores. d_model: for 1/√d_model, the mistake of taking it for d_k.

    Raises: ValueError for another rule, a factor that is not finite, or without the size that a
    rule needs. Source: docs/maths.md#scale-rules.

    >>> factor("1/sqrt_d_k", 64), factor("1/d_k", 64), factor("log_n/sqrt_d_k", 64, keys=512)
    (0.125, 0.015625, 0.125)
    """
    if not isinstance(rule, str):
        if isinstance(rule, bool) or not isinstance(rule, (int, float)) or not math.isfinite(rule):
            raise ValueError(
                f"scale is {rule!r}: pass a finite number or one of {', '.join(RULES)}"
            )
        return float(rule)
    if rule == "none":
        return 1.0
    if rule == "1/sqrt_d_k":
        return d_k**-0.5
    if rule == "1/d_k":
        return 1 / d_k
    if rule == "1/sqrt_d_model":
        if d_model is None:
            raise ValueError("scale 1/sqrt_d_model needs d_model")
        return d_model**-0.5
    if rule in ("log_n/sqrt_d_k", "sqrt_log_n/sqrt_d_k"):
        if keys is None:
            raise ValueError(f"scale {rule} needs the number of keys")
        length = math.log(max(keys, 1)) / math.log(_LOG_LENGTH)
        return (length if rule == "log_n/sqrt_d_k" else length**0.5) * d_k**-0.5
    raise ValueError(f"scale is {rule!r}: pass one of {', '.join(RULES)}, or a number")


# What a configuration says


@dataclass(frozen=True)
class Configured:
    """The factor of an attention call as a configuration gives it.

    source: the field or rule that gives it. explicit: it is certain, by a field or by the family's
    own code; else only implied by the head size. plain: the factor without what `source` adds, and
    twist: what that addition is called. carried: what q and k carry of the scale already, as a
    factor of their product. softcap: the cap configured, None without. d_model, layer: those of the
    same configuration and module.
    """

    scale: float
    source: str
    explicit: bool
    plain: float | None = None
    twist: str = ""
    carried: float = 1.0
    softcap: float | None = None
    d_model: int | None = None
    layer: int | None = None


def configured(config: Any, d_k: int, layer: int, module: Any = None) -> Configured | None:
    """The factor that a Hugging Face configuration gives for one layer, None if it is silent.

    `layer` counts from 0 within its stack. `module` is the attention itself, where there is one: it
    settles families whose attentions differ, and a forward that is not transformers' own makes
    nothing certain, for its code may scale q beforehand. Position-dependent factors (Llama 4,
    Ministral 3, Inkling), learned ones (Mistral Large 4) and YaRN's multiply q or k before the
    call, whose own factor they leave as it is.

    Source: docs/maths.md#scales

    >>> from transformers import GPT2Config                    # doctest: +SKIP
    >>> configured(GPT2Config(scale_attn_by_inverse_layer_idx=True), 64, 3).scale  # doctest: +SKIP
    0.03125
    """
    if config is None:
        return None
    config = _of_layer(_of_text(_of_layer(config, layer)), layer)
    found = _by_rule(config, d_k, layer, "" if module is None else type(module).__name__)
    if found is None:
        found = _by_head_size(config, d_k, module)
    if found is None:
        return None
    certain = found.explicit or _is_transformers(type(config))
    if module is not None:
        certain = certain and _is_transformers(getattr(module, "forward", None))
    cap = None if type(module).__name__ in _PRESCALED_CLASSES else _softcap(config)
    width = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    return replace(found, explicit=certain, softcap=cap, d_model=width, layer=layer)


def _by_rule(config: Any, d_k: int, layer: int, name: str) -> Configured | None:
    """What a family or a field of the configuration says. explicit: a field names the factor."""
    kind = getattr(config, "model_type", "")
    plain = d_k**-0.5
    if name in _PRESCALED_CLASSES:
        return Configured(1.0, f"{name} scales q beforehand", False, plain, carried=plain)
    if kind in UNSCALED:
        return Configured(1.0, f"{kind} applies none", False, plain)
    if kind in PRESCALED:
        return Configured(1.0, f"{kind} scales q beforehand", False, plain, carried=plain)
    if (scalar := getattr(config, "query_pre_attn_scalar", None) or 0) > 0:
        return _field("query_pre_attn_scalar", scalar, float(scalar) ** -0.5, plain)
    if (multiplier := getattr(config, "attention_multiplier", None)) is not None:
        return _field("attention_multiplier", multiplier, float(multiplier), plain)
    if (scale := getattr(getattr(config, "attn_config", None), "softmax_scale", None)) is not None:
        return _field("softmax_scale", scale, float(scale), plain)
    inverse = bool(getattr(config, "scale_attn_by_inverse_layer_idx", False))
    if getattr(config, "scale_attn_weights", True) is False:
        scale, off = (1 / (layer + 1), ", by layer") if inverse else (1.0, "")
        return Configured(scale, f"scale_attn_weights off{off}", True, plain, "scale_attn_weights")
    if inverse:
        return Configured(
            plain / (layer + 1), "scale_attn_by_inverse_layer_idx", True, plain,
            "the inverse-layer factor",
        )  # fmt: skip
    if kind.startswith("inkling") and not kind.startswith("inkling2"):
        return Configured(1 / d_k, f"{kind} divides by d_k", False, plain)
    if kind in ("zamba", "zamba2"):
        return Configured((d_k / 2) ** -0.5, "1/√(d_k/2)", False, plain, "the half of d_k")
    if kind in ("deberta", "deberta-v2", "sew-d"):
        terms = getattr(config, "pos_att_type", None) or ()
        count = 1 + len(terms) if kind == "deberta" else 1 + ("c2p" in terms) + ("p2c" in terms)
        source = f"1/√(d_k·{count})"
        return Configured((d_k * count) ** -0.5, source, False, plain, "the number of terms")
    if size := _latent_size(config):
        return _by_latent_size(config, kind, size)
    return None


def _field(name: str, value: float, scale: float, plain: float) -> Configured:
    return Configured(scale, f"{name} {value:g}", True, plain, name)


def _by_latent_size(config: Any, kind: str, size: int) -> Configured:
    """Multi-head latent attention: the width of q and k is the sum of their two parts, whatever
    head_dim says; YaRN's mscale multiplies the factor in some families."""
    plain, rope = size**-0.5, getattr(config, "rope_parameters", None) or {}
    default = rope.get("rope_type", "default") == "default"
    depth = 0.0 if default else float(rope.get("mscale_all_dim") or 0)
    if kind not in _MSCALED or not depth or rope["factor"] <= 1:
        return Configured(plain, f"head size {size}", False, plain)
    mscale: float = 0.1 * depth * math.log(rope["factor"]) + 1
    return Configured(
        plain * mscale**2, f"mscale {mscale:.4g}² on 1/√{size}", False, plain, _MSCALE
    )


def _by_head_size(config: Any, d_k: int, module: Any) -> Configured | None:
    """1/√d_k, where the configured head size is the one seen, or the code is transformers' own."""
    if type(module).__name__ in _SIZELESS:
        return None
    known = _is_transformers(type(config)) and _is_transformers(getattr(module, "forward", None))
    if d_k != head_size(config) and not known:
        return None
    return Configured(
        d_k**-0.5, f"head size {d_k}", False, d_k**-0.5, carried=_rotary_factor(config) ** 2
    )


def head_size(config: Any) -> int | None:
    """d_k as a configuration gives it, None where it does not.

    In latent attention head_dim means the rotary part only: the two parts of q and k are added.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        return _latent_size(config)
    if size := getattr(config, "head_dim", None):
        return int(size)
    width = _first(config, "hidden_size", "d_model", "n_embd")
    heads = _first(
        config, "num_attention_heads", "n_head", "encoder_attention_heads", "num_heads"
    )  # fmt: skip
    return width // heads if width and heads and width % heads == 0 else None


def _latent_size(config: Any) -> int | None:
    """Width of q and k in latent attention; None for any other."""
    parts = [getattr(config, f"qk_{part}_head_dim", None) for part in ("nope", "rope")]
    if getattr(config, "kv_lora_rank", None) is None or None in parts:
        return None
    return sum(int(part) for part in parts if part is not None)


def _rotary_factor(config: Any) -> float:
    """What YaRN or LongRoPE multiplies cos and sin by, and so q and k alike; 1 without."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in ("yarn", "longrope"):
        return 1.0
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    original = rope.get("original_max_position_embeddings")
    longest = getattr(config, "max_position_embeddings", None)
    factor = rope.get("factor") or (longest / original if longest and original else 1.0)
    if factor <= 1:
        return 1.0
    if rope["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if original else 1.0
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    if not over or not under:
        over, under = 1.0, 0.0
    return float((0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1))


def _softcap(config: Any) -> float | None:
    cap = getattr(config, "attn_logit_softcapping", None)
    return float(cap) if cap else None


def _of_text(config: Any) -> Any:
    """The configuration that holds the attention's fields, where a model nests several."""
    nested = getattr(config, "text_config", None)
    return nested if nested is not None and head_size(config) is None else config


def _of_layer(config: Any, layer: int) -> Any:
    """The configuration of one layer, where layers differ in their fields."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    layers = config.per_layer_config
    return layers[min(layer, len(layers) - 1)]


def _first(config: Any, *names: str) -> int | None:
    """The first of these fields that is a positive whole number."""
    found = (getattr(config, name, None) for name in names)
    return next((int(x) for x in found if isinstance(x, int) and x), None)


def _is_transformers(what: Any) -> bool:
    return (getattr(what, "__module__", "") or "").startswith("transformers.models.")


# Where an observed call belongs


def of_call(
    model: Any, path: str, d_k: int, index: int
) -> tuple[Configured | None, tuple[float, str] | None]:
    """(what the configuration gives an observed call, the factor its own module keeps).

    The nearest configuration counts: that of the module, or of the submodel it stands in (text or
    vision, encoder or decoder). path as in `Observation.calls`; index is its place within its
    stack, for modules that do not know their layer.
    """
    chain = _chain(model, path.split("[")[0])
    module = chain[-1]
    layer = getattr(module, "layer_idx", None)
    configs = (getattr(m, "config", None) for m in reversed(chain))
    config = next((c for c in configs if hasattr(c, "model_type")), None)
    layer = layer if isinstance(layer, int) and layer >= 0 else index
    return configured(config, d_k, layer, module), module_scale(module)


def _chain(model: Any, path: str) -> list[Any]:
    """The modules from the model to the one at path, what torch.compile wraps around them aside."""
    chain = [getattr(model, "_orig_mod", model)]
    for part in path.split("."):
        inner = getattr(chain[-1], part, None)
        if inner is None:
            break
        chain.append(getattr(inner, "_orig_mod", inner))
    return chain


def module_scale(module: Any) -> tuple[float, str] | None:
    """(the factor that an attention module keeps for its call, the attribute's name), or None.

    None too where q gets that factor before the call (OPT, Whisper, ESM …).

    >>> class Attention:
    ...     scaling = 0.125
    >>> module_scale(Attention())
    (0.125, 'scaling')
    """
    kind = getattr(getattr(module, "config", None), "model_type", "")
    if kind in PRESCALED or type(module).__name__ in _PRESCALED_CLASSES:
        return None
    for name in _OWN_FACTOR:
        value = getattr(module, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value), name
    return None


# Whether they agree


@dataclass(frozen=True)
class ScaleVerdict:
    """The factor applied, judged.

    kind: "ok" as configured, or 1/√d_k where nothing is; "wrong" certainly another; "look" a known
    mistake or unlike the model's other layers, with no configuration to tell; "note" some other
    factor that nothing contradicts for certain. meant: the factor expected, None where nothing says
    one. mistake: what the factor is, by name, where it is one of the known mistakes. origin: where
    the factor stands.
    """

    kind: Literal["ok", "wrong", "look", "note"]
    applied: float
    meant: float | None = None
    mistake: str | None = None
    origin: str | None = None


def verdict(
    applied: float,
    d_k: int,
    given: Configured | None,
    *,
    heads: int,
    kv_heads: int,
    d_model: int | None = None,
    peers: Iterable[float] = (),
    own: tuple[float, str] | None = None,
) -> ScaleVerdict:
    """Judge the factor of one call by what the configuration gives, its module and its peers.

    applied: finite. peers: the factors of all layers of the same kind and size, this one's
    included. own: what `module_scale` says. Never by variance.

    >>> verdict(1 / 64, 64, None, heads=8, kv_heads=8).kind  # 1/d_k is a rule of its own (μP)
    'note'
    >>> verdict(512**-0.5, 64, None, heads=8, kv_heads=8).mistake
    '1/√(heads·d_k), the width of all heads in place of one'
    """
    width = (given and given.d_model) or d_model
    meant = given.scale if given is not None else None
    if meant is not None and _same(applied, meant):
        return ScaleVerdict("ok", applied, meant)
    widths = _of_widths(d_k, heads, width)
    named = _matching(applied, widths)
    # 1/d_k, 1/√d_k and 1 are rules of their own, which a width may happen to equal.
    width_alone = bool(named) and not any(_same(applied, x) for x in (1 / d_k, d_k**-0.5, 1.0))
    common = _common(peers)
    odd = common is not None and not _same(applied, common)
    origin = _origin(applied, meant, own)
    if given is None:
        if width_alone or odd:
            mistake = _joined(named) if width_alone else None
            return ScaleVerdict("look", applied, common if odd else d_k**-0.5, mistake, origin)
        plain = _same(applied, d_k**-0.5)
        return ScaleVerdict("ok" if plain else "note", applied, None, None, origin)
    odd = odd and common is not None and _same(common, given.scale)
    mistake = _joined(_matching(applied, _known_mistakes(given, d_k, heads, kv_heads, width)))
    kind: Literal["wrong", "note"] = "wrong" if given.explicit or width_alone or odd else "note"
    return ScaleVerdict(kind, applied, meant, mistake, origin)


def softcap_is(applied: float | None, given: Configured | None) -> Literal["ok", "wrong"]:
    """Whether a call's soft-cap is the configured one; "wrong" only where that is certain."""
    if given is None or not given.explicit:
        return "ok"
    if applied is None or given.softcap is None:
        return "ok" if applied == given.softcap else "wrong"
    return "ok" if _same(applied, given.softcap) else "wrong"


_Named = Sequence[tuple[float, str]]


def _known_mistakes(
    given: Configured, d_k: int, heads: int, kv_heads: int, d_model: int | None
) -> list[tuple[float, str]]:
    """(factor, what it is) of every mistake that is known, for one configuration."""
    meant, plain = given.scale, given.plain or d_k**-0.5
    found: list[tuple[float, str]] = []
    if meant <= 0:
        return found
    if given.carried != 1 and meant == 1:
        found.append((given.carried, "the factor a second time: q carries 1/√d_k already"))
    elif given.carried != 1:
        found.append((meant * given.carried, "YaRN's factor a second time: q and k carry it"))
    elif given.twist:
        found.append((plain, f"1/√d_k: {given.twist} is ignored"))
        if given.twist == _MSCALE:
            found.append(((meant * plain) ** 0.5, f"1/√d_k with {_MSCALE} once, not squared"))
    else:
        found.append((plain, "1/√d_k in place of this family's rule"))
    found.append((1.0, "none: no factor is applied"))
    found.append((meant**2, "the configured factor twice"))
    found.append((1 / meant, "the configured factor's inverse: multiplied in place of divided"))
    found.append((1 / d_k, "1/d_k, d_k in place of √d_k"))
    found += _of_widths(d_k, heads, d_model)
    if heads != kv_heads:
        found.append(((kv_heads * d_k) ** -0.5, "1/√(kv_heads·d_k), the width of all kv heads"))
        width = d_model or heads * d_k
        found.append(
            ((width / kv_heads) ** -0.5, "1/√(d_model/kv_heads), a head's width by the kv heads")
        )
    if d_model and not _same(d_model / heads, d_k):
        found.append(((d_model / heads) ** -0.5, "1/√(d_model/heads), which is not d_k here"))
    if given.layer:
        found.append((meant / (given.layer + 1), "divided by the layer's number as well"))
    return [(value, name) for value, name in found if not _same(value, meant)]


def _of_widths(d_k: int, heads: int, d_model: int | None) -> list[tuple[float, str]]:
    """The commonest mistake: a width of several heads under the root."""
    if heads < 2:
        return []
    found = []
    if d_model and d_model != d_k:
        found.append((d_model**-0.5, "1/√d_model, the model's width in place of a head's"))
    if d_model != heads * d_k:
        every = "1/√(heads·d_k), the width of all heads in place of one"
        found.append(((heads * d_k) ** -0.5, every))
    return found


def _matching(applied: float, known: _Named) -> list[str]:
    return [name for value, name in known if _same(applied, value)]


def _joined(names: Sequence[str]) -> str | None:
    """At most two names: numbers may fit several mistakes at once."""
    return ", or ".join(names[:2]) or None


def _common(peers: Iterable[float]) -> float | None:
    """The factor that more than half of at least three layers share."""
    factors = list(peers)
    for x in factors:
        if len(factors) > 2 and sum(_same(x, y) for y in factors) * 2 > len(factors):
            return x
    return None


def _origin(applied: float, meant: float | None, own: tuple[float, str] | None) -> str | None:
    """Where a factor other than the expected one stands: in the module, or only in the call."""
    if own is None:
        return None
    value, name = own
    if _same(applied, value):
        return f"the module's {name} holds it"
    if meant is not None and _same(value, meant):
        return f"the module's {name} holds the configured one, the call does not apply it"
    return f"the module's {name} holds {value:.3g}"


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE)

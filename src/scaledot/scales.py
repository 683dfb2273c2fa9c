"""The factor applied to QKᵀ: what it is called, and what a model's configuration says it is.

A verdict is about the factor, never about variance: a trained head may have any variance. Source:
the modelling files of transformers 5.24; docs/maths.md#scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

UNSCALED = frozenset({
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "pix2struct", "pop2piano", "udop",
    "gpt_neo", "dia", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
})  # fmt: skip
"""Families that apply no factor: the initialisation or a norm of q and k carries it."""

PRESCALED = frozenset({"opt", "whisper", "esm"})
"""Families that scale q before the product, so that the product itself gets a factor of 1."""


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


@dataclass(frozen=True)
class Configured:
    """The factor a configuration gives, where it says so, and whether a field names it outright."""

    scale: float
    source: str
    explicit: bool


def configured(config: Any, d_k: int, layer: int) -> Configured | None:
    """The factor that a Hugging Face configuration gives for one layer, None if it is silent.

    `layer` counts from 0 within its stack. Only rules that are certain count: a field of the
    configuration, or 1/√d_k where the configured head size is the size seen.
    """
    if config is None:
        return None
    kind = getattr(config, "model_type", "")
    if (scalar := getattr(config, "query_pre_attn_scalar", None)) and kind not in UNSCALED:
        return Configured(float(scalar) ** -0.5, f"query_pre_attn_scalar {scalar:g}", True)
    if (multiplier := getattr(config, "attention_multiplier", None)) is not None:
        return Configured(float(multiplier), f"attention_multiplier {multiplier:g}", True)
    if kind in UNSCALED:
        return Configured(1.0, f"{kind} applies none", False)
    if kind in PRESCALED:
        return Configured(1.0, f"{kind} scales q beforehand", False)
    if getattr(config, "scale_attn_weights", True) is False:
        return Configured(1.0, "scale_attn_weights off", True)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return Configured(d_k**-0.5 / (layer + 1), "scale_attn_by_inverse_layer_idx", True)
    if d_k == head_size(config):
        return Configured(d_k**-0.5, f"head size {d_k}", False)
    return None


def head_size(config: Any) -> int | None:
    """d_k as a configuration gives it; None for latent attention, where head_dim means another."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return None
    if size := getattr(config, "head_dim", None):
        return int(size)
    width = next(
        (w for n in ("hidden_size", "d_model", "n_embd") if (w := getattr(config, n, 0))), 0
    )
    heads = next(
        (
            h
            for n in ("num_attention_heads", "n_head", "encoder_attention_heads", "num_heads")
            if isinstance(h := getattr(config, n, 0), int) and h
        ),
        0,
    )
    return width // heads if width and heads and width % heads == 0 else None

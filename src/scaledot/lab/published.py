"""The sizes of published models: layers, heads, widths and scale, as data.

Only what decides what attention costs and how it is scaled. Each row says where its numbers stand
and whether they were read there: what is second hand or recalled is not sure to the digit.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaledot import ScaledotError, scales
from scaledot.lab.results import Column, Line, Panel, Result, Table


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the ranks of q and of k with v, and the rotary part of a key,
    which all heads share. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    query: int
    key_value: int
    rotary: int


@dataclass(frozen=True)
class Model:
    """One row of the table: sizes of the attention of every layer.

    rule: the scale in symbols, scale its number. known: "read" in the source itself, "recalled" of
    the paper, "quoted" from a source about it. note: what the columns cannot say.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    d_k: int
    value_dim: int
    source: str
    known: str
    rule: str = "1/√d_k"
    scale: float = math.nan
    note: str = ""
    latent: Latent | None = None

    @property
    def width(self) -> int:
        """h · d_k: of all query heads side by side."""
        return self.heads * self.d_k

    @property
    def queries(self) -> list[tuple[int, int]]:
        """The matrices that make queries of X, each (in, out)."""
        if self.latent:
            return [(self.d_model, self.latent.query), (self.latent.query, self.width)]
        return [(self.d_model, self.width)]

    @property
    def keys_values(self) -> list[tuple[int, int]]:
        """The matrices that make keys and values of X."""
        if self.latent:
            rank, rotary = self.latent.key_value, self.latent.rotary
            up = self.heads * (self.d_k - rotary + self.value_dim)
            return [(self.d_model, rank + rotary), (rank, up)]
        return [(self.d_model, self.kv_heads * (self.d_k + self.value_dim))]

    @property
    def output(self) -> tuple[int, int]:
        """W_O."""
        return self.heads * self.value_dim, self.d_model


def sizes(
    name: str, layers: int, heads: int, kv: int | None, d_model: int, d_k: int, source: str,
    known: str = "read", rule: str = "1/√d_k", scale: float | None = None, note: str = "",
    value_dim: int | None = None, latent: Latent | None = None,
) -> Model:  # fmt: skip
    return Model(
        name, layers, heads, kv or heads, d_model, d_k, value_dim or d_k, source, known, rule,
        d_k**-0.5 if scale is None else scale, note, latent,
    )  # fmt: skip


_BOTH = "half the layers are the encoder's, half the decoder's"
_NORMED = "q and k are normed before the product"
_CAP = "scores are capped at 50"
_SINKS = (
    "each head has a sink; every other layer sees 128 keys; YaRN's 0.1·ln 32 + 1 multiplies q and k"
)
_MSCALE = (0.1 * math.log(40) + 1) ** 2

MODELS = (
    sizes("Pythia-14M", 6, 4, None, 128, 32, "litgpt"),
    sizes("Pythia-31M", 6, 8, None, 256, 32, "litgpt"),
    sizes("Transformer base", 12, 8, None, 512, 64, "tensor2tensor", note=_BOTH),
    sizes("Transformer big", 12, 16, None, 1024, 64, "tensor2tensor", note=_BOTH),
    sizes("BERT base", 12, 12, None, 768, 64, "bert"),
    sizes("BERT large", 24, 16, None, 1024, 64, "bert"),
    sizes("GPT-2 small", 12, 12, None, 768, 64, "nanoGPT"),
    sizes("GPT-2 medium", 24, 16, None, 1024, 64, "nanoGPT"),
    sizes("GPT-2 large", 36, 20, None, 1280, 64, "nanoGPT"),
    sizes("GPT-2 xl", 48, 25, None, 1600, 64, "nanoGPT"),
    sizes("GPT-3 175B", 96, 96, None, 12288, 128, "Brown 2020", "quoted",
          note="the paper's row of 13B prints d_model 5140, its 40 heads of 128 make 5120"),
    sizes("GPT-J 6B", 28, 16, None, 4096, 256, "mesh-transformer"),
    sizes("PaLM 540B", 118, 48, 1, 18432, 256, "Chowdhery 2022", "quoted",
          note="also told with h·d_k equal to d_model, which 48 heads of 256 are not"),
    sizes("T5 11B", 48, 128, None, 1024, 128, "t5", "read", "none", 1.0, _BOTH),
    sizes("ViT-22B", 48, 48, None, 6144, 128, "Dehghani 2023", "recalled", note=_NORMED),
    sizes("LLaMA-1 7B", 32, 32, None, 4096, 128, "TransformerLens"),
    sizes("LLaMA-1 13B", 40, 40, None, 5120, 128, "TransformerLens"),
    sizes("LLaMA-1 33B", 60, 52, None, 6656, 128, "TransformerLens"),
    sizes("LLaMA-1 65B", 80, 64, None, 8192, 128, "TransformerLens"),
    sizes("Llama-2 7B", 32, 32, None, 4096, 128, "litgpt"),
    sizes("Llama-2 13B", 40, 40, None, 5120, 128, "litgpt"),
    sizes("CodeLlama 34B", 48, 64, 8, 8192, 128, "litgpt"),
    sizes("Llama-2 70B", 80, 64, 8, 8192, 128, "litgpt"),
    sizes("Llama-3 8B", 32, 32, 8, 4096, 128, "litgpt", note="3.1 has the same sizes"),
    sizes("Llama-3 70B", 80, 64, 8, 8192, 128, "litgpt", note="3.1 has the same sizes"),
    sizes("Llama-3.1 405B", 126, 128, 8, 16384, 128, "litgpt"),
    sizes("Llama-3.2 1B", 16, 32, 8, 2048, 64, "litgpt"),
    sizes("Llama-3.2 3B", 28, 24, 8, 3072, 128, "litgpt"),
    sizes("Gemma-1 2B", 18, 8, 1, 2048, 256, "gemma_pytorch"),
    sizes("Gemma-1 7B", 28, 16, None, 3072, 256, "gemma_pytorch"),
    sizes("Gemma-2 2B", 26, 8, 4, 2304, 256, "gemma_pytorch", note=_CAP),
    sizes("Gemma-2 9B", 42, 16, 8, 3584, 256, "gemma_pytorch", note=_CAP),
    sizes("Gemma-2 27B", 46, 32, 16, 4608, 128, "gemma_pytorch", "read", "1/√144", 144**-0.5,
          _CAP),
    sizes("Gemma-3 1B", 26, 4, 1, 1152, 256, "gemma_pytorch", note=_NORMED),
    sizes("Gemma-3 4B", 34, 8, 4, 2560, 256, "gemma_pytorch", note=_NORMED),
    sizes("Gemma-3 12B", 48, 16, 8, 3840, 256, "gemma_pytorch", note=_NORMED),
    sizes("Gemma-3 27B", 62, 32, 16, 5376, 128, "gemma_pytorch", "read", "1/√168", 168**-0.5,
          _NORMED),
    sizes("Qwen2.5 0.5B", 24, 14, 2, 896, 64, "litgpt"),
    sizes("Qwen2.5 1.5B", 28, 12, 2, 1536, 128, "litgpt"),
    sizes("Qwen2.5 3B", 36, 16, 2, 2048, 128, "litgpt"),
    sizes("Qwen2.5 7B", 28, 28, 4, 3584, 128, "litgpt"),
    sizes("Qwen2.5 14B", 48, 40, 8, 5120, 128, "litgpt"),
    sizes("Qwen2.5 32B", 64, 40, 8, 5120, 128, "litgpt"),
    sizes("Qwen2.5 72B", 80, 64, 8, 8192, 128, "litgpt"),
    sizes("Qwen3 0.6B", 28, 16, 8, 1024, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 1.7B", 28, 16, 8, 2048, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 4B", 36, 32, 8, 2560, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 8B", 36, 32, 8, 4096, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 14B", 40, 40, 8, 5120, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 32B", 64, 64, 8, 5120, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 30B-A3B", 48, 32, 4, 2048, 128, "litgpt", note=_NORMED),
    sizes("Qwen3 235B-A22B", 94, 64, 4, 4096, 128, "litgpt", note=_NORMED),
    sizes("Mistral 7B", 32, 32, 8, 4096, 128, "litgpt"),
    sizes("Mistral Nemo 12B", 40, 32, 8, 5120, 128, "its config.json", "quoted"),
    sizes("Mixtral 8x22B", 56, 48, 8, 6144, 128, "litgpt"),
    sizes("Falcon 7B", 32, 71, 1, 4544, 64, "litgpt"),
    sizes("Falcon3 7B", 28, 12, 4, 3072, 256, "litgpt"),
    sizes("gpt-oss 20B", 24, 64, 8, 2880, 64, "its config.json", "quoted", note=_SINKS),
    sizes("gpt-oss 120B", 36, 64, 8, 2880, 64, "gpt-oss", note=_SINKS),
    sizes("DeepSeek-V3", 61, 128, None, 7168, 192, "DeepSeek-V3", "read", "m²/√d_k",
          192**-0.5 * _MSCALE,
          "latent attention: q of rank 1536, k and v of 512, d_k = 128 + 64 rotary; beyond 4096 "
          "tokens m = 0.1·ln 40 + 1", 128, Latent(1536, 512, 64)),
)  # fmt: skip
"""Sources by name: litgpt 0.5.13 `config.py`; TransformerLens `loading_from_pretrained.py`;
gemma_pytorch `gemma/config.py`; gpt-oss `torch/model.py`; DeepSeek-V3 `inference/model.py` and its
configs; tensor2tensor `models/transformer.py`; bert `README.md`; nanoGPT `model.py`; t5
`gin/models/bi_v1_11B.gin`; mesh-transformer(-jax) `configs/6B_roto_256.json`. Else the paper by
first author and year, or a model's own config.json as others quote it."""


def models(name: str = "") -> Result:
    """The table of published models: layers, heads, kv heads, d_model, d_k, the value width, h·d_k
    and whether it differs from d_model, the scale as a rule, as a number and as what it divides by,
    and where that stands.

    name: only those whose name holds it, whatever the case.
    `known` is "read" (in the source itself), "recalled" (of the paper) or "quoted" (by others).
    Raises: TypeError for a name that is no string, ValueError where no model has it.

    >>> models("gpt-2").column("d_k")
    [64, 64, 64, 64]
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}: pass a part of a model's name")
    shown = [m for m in MODELS if _plain(name) in _plain(m.name)]
    if not shown:
        raise ValueError(f"no model of the table has {name!r} in its name{_near(name)}")
    rows = tuple(
        {
            "name": m.name,
            "layers": m.layers,
            "heads": m.heads,
            "kv_heads": m.kv_heads,
            "d_model": m.d_model,
            "d_k": m.d_k,
            "value_dim": m.value_dim,
            "width": m.width,
            "differs": "≠" if m.width != m.d_model else "",
            "rule": m.rule,
            "scale": m.scale,
            "divisor": round(1 / m.scale, 12),
            "source": m.source,
            "known": m.known,
            "where": m.source if m.known == "read" else f"{m.source}, {m.known}",
        }
        for m in shown
    )
    table = Table(
        (
            Column("name", "model", "text"),
            Column("layers", "layers", "whole"),
            Column("heads", "heads", "whole"),
            Column("kv_heads", "kv", "whole"),
            Column("d_model", "d_model", "whole"),
            Column("d_k", "d_k", "whole"),
            Column("width", "h·d_k", "whole"),
            Column("differs", "", "text"),
            Column("rule", "scale", "text"),
            Column("divisor", "÷", "factor"),
            Column("where", "source", "text"),
        ),
        rows,
    )
    notes: dict[str, list[str]] = {}
    for m in shown:
        if m.note:
            notes.setdefault(m.note, []).append(m.name)
    says = [
        *_spread(shown),
        "kv: heads of keys and values. ÷: what the scale divides q·k by. ≠: h·d_k is not d_model. "
        "A row was read in its source unless it is recalled, or quoted from others.",
        *(f"{', '.join(who)}: {note}." for note, who in notes.items()),
    ]
    plot = Panel(
        "d_k and heads against d_model",
        "d_model",
        "d_k, heads",
        (
            Line("d_k", [m.d_model for m in shown], [m.d_k for m in shown], "points"),
            Line("heads", [m.d_model for m in shown], [m.heads for m in shown], "points"),
        ),
        log_x=True,
        log_y=True,
    )
    about = f"{len(shown)} of {len(MODELS)} models" if name else f"{len(MODELS)} models"
    return Result(
        "models", about, {"name": name}, (table,), tuple(says), (plot,), "docs/maths.md#cost"
    )


def _spread(shown: list[Model]) -> list[str]:
    """What the rows say about d_k, whichever they are."""
    breaks = sum(m.width != m.d_model for m in shown)
    convention = f"h·d_k differs from d_model in {breaks} of {len(shown)}."
    if len(shown) == 1:
        return [convention]

    def grows(what: Callable[[Model], int], name: str) -> tuple[str, float]:
        low, high = min(map(what, shown)), max(map(what, shown))
        return f"{name} from {low:,} to {high:,} (× {high / low:.3g})", high / low

    d_k, by = grows(lambda m: m.d_k, "d_k goes")
    widths, wider = grows(lambda m: m.d_model, "d_model")
    heads, _ = grows(lambda m: m.heads, "heads")
    weights = [12 * m.layers * m.d_model**2 for m in shown]
    much = max(weights) / min(weights)
    first = (
        f"{d_k}, while {widths}, {heads}, and 12·layers·d_model², the weights of a dense "
        f"model of such sizes, over {math.log10(much):.1f} orders of magnitude."
    )
    if by**2 <= wider:
        first += f" Models grow by heads and layers: the divisor √d_k changes × {by**0.5:.3g}."
    return [first, convention]


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum() or c == ".")


def _near(name: str) -> str:
    """The names most like it, as the end of a sentence."""
    names = {_plain(m.name): m.name for m in MODELS}
    inside = [full for plain, full in names.items() if _plain(name) and _plain(name) in plain]
    near = [names[p] for p in difflib.get_close_matches(_plain(name), names, 3, 0.5)]
    found = list(dict.fromkeys([*inside, *near]))[:4]
    return f": did you mean {' or '.join(found)}?" if found else "; `scaledot lab models` shows all"


# The sizes that somebody asks about


def custom(given: dict[str, int]) -> Model:
    d_model, heads = given["d_model"], given.get("heads", 1)
    d_k = given.get("d_k")
    if d_k is None and d_model % heads:
        raise ValueError(f"heads {heads} does not divide d_model {d_model}: pass d_k as well")
    d_k = d_k or d_model // heads
    return sizes(
        "a model of these sizes", given.get("layers", 1), heads, given.get("kv_heads"), d_model,
        d_k, "", value_dim=given.get("value_dim"),
    )  # fmt: skip


_HUB = {"gpt2": "gpt2small"}


def named(name: str | os.PathLike[str]) -> Model:
    plain = _plain(os.fspath(name))
    if not os.fspath(name):
        raise ValueError("the model's name is empty: pass one, as GPT-2 small, or a folder")
    for m in MODELS:
        if _plain(m.name) == _HUB.get(plain, plain):
            return m
    if not Path(name).is_dir():
        raise ValueError(f"no model {os.fspath(name)!r} in the table{_near(os.fspath(name))}")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        line = str(error).splitlines()[0]
        raise ScaledotError(f"no configuration to be read in {os.fspath(name)!r}: {line}") from None
    return configured(config)


def configured(config: Any) -> Model:
    """The sizes that a Hugging Face configuration gives."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    of = {
        name: next((x for x in (getattr(text, f, None) for f in names) if isinstance(x, int)), None)
        for name, names in {
            "layers": ("num_hidden_layers", "num_layers"),
            "heads": ("num_attention_heads", "num_heads"),
            "d_model": ("hidden_size", "d_model"),
        }.items()
    }
    d_k = scales.head_size(text)
    missing = [name for name, value in {**of, "d_k": d_k}.items() if not value]
    if missing:
        raise ValueError(
            f"{type(config).__name__} does not say {', '.join(missing)}: pass the sizes by name"
        )
    layers, heads, d_model = (int(x or 0) for x in of.values())
    kv = getattr(text, "num_key_value_heads", None)
    value_dim = d_k
    latent = None
    if (rank := getattr(text, "kv_lora_rank", None)) is not None:
        kv, value_dim = None, int(text.v_head_dim)
        if text.q_lora_rank is None:
            raise ValueError(
                f"{type(config).__name__} has no q_lora_rank: not a layout counted here"
            )
        latent = Latent(int(text.q_lora_rank), int(rank), int(text.qk_rope_head_dim))
    return sizes(
        getattr(text, "model_type", type(text).__name__), layers, heads, kv, d_model, int(d_k or 0),
        "its configuration", value_dim=value_dim, latent=latent,
    )  # fmt: skip

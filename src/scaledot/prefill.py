"""A text too long for one forward: in parts, the keys and values of what came before in a cache.

A causal model gives a token the same output whether what follows is there or not, so a text may run
in parts: what a layer holds besides its cache, activations and statistics alike, is then O(part)
and not O(text). Every attention statistic is a sum over rows, and a row sees nothing later than
itself, so that sums over the parts are those of the text; `parts.NOT_IN_PARTS` names what is not.
Is the model one of which that is true? `refusal` asks it, on a few tokens. Source: docs/long.md.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaledot import ScaledotError
from scaledot.parts import PART, Part
from scaledot.windows import arguments, config_number

CHUNK = 2048
"""Tokens of a part."""
ASKED = 48
"""Tokens on which a model is asked whether parts give what the whole gives."""
AGREES = 1e-3
"""Difference of the two, as a share of the largest output, that rounding explains in float32."""
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How a text of so many tokens is run: in parts of `chunk` tokens, or whole where that is None.

    need: bytes beside the model, estimated. available: bytes there are, None where the system does
    not say. reason: why in parts, or why not.
    """

    chunk: int | None
    need: int
    available: int | None
    reason: str


@torch.no_grad()
def forward(
    model: Any, window: Mapping[str, Tensor], device: torch.device, *, chunk: int | None
) -> None:
    """Run a model over a window for what is observed of it, in parts of `chunk` tokens or whole.

    window: input_ids (1, tokens) and what else the tokenizer gave. Nothing is returned: an output
    for every token is what the parts avoid. A window of one part leaves out what several would, so
    that windows of any length add up to the same measures.

    Of the whole forward's statistics, counts of rows and keys and the histogram of "visible" come
    out exactly; other histograms, extremes and moments to float32 rounding of the model's own
    products, whose shapes differ: a row changes bins where that carries it over an edge. "key_bias"
    comes with the last part. `parts.NOT_IN_PARTS` are not measured (tests/test_prefill.py).

    Raises: ValueError for a chunk below 1; ScaledotError for a model that has no cache.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: pass at least 1 token, or None for the whole text")
    if chunk is None:
        model(**arguments(model, window, device))
        return
    for _ in _parts(model, window, device, chunk):
        pass


def _parts(model: Any, window: Mapping[str, Tensor], device: torch.device, chunk: int) -> Any:
    """The output of each part, in turn."""
    name = _cache_name(model)
    if name is None:
        raise ScaledotError(f"{type(model).__name__} takes no cache: it runs a text whole only")
    from transformers import DynamicCache

    # Without the configuration: no layer of it drops keys that a window has passed, whose tokens
    # some measures ask for.
    cache = DynamicCache()
    given = arguments(model, window, device)
    tokens = given["input_ids"]
    length = tokens.shape[1]
    given["use_cache"] = True
    # A mask that hides nothing would be made as long as the keys for every part.
    if bool(given.get("attention_mask", torch.ones(1)).all()):
        given.pop("attention_mask", None)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        some = {
            k: v[:, :stop] if k == "attention_mask" else v[:, start:stop]
            if isinstance(v, Tensor) and v.dim() == 2 and v.shape[1] == length else v
            for k, v in given.items()
        }  # fmt: skip
        with _running(Part(tokens, start, stop)):
            yield model(**some, **{name: cache})[0]


@contextmanager
def _running(part: Part) -> Any:
    token = PART.set(part)
    try:
        yield
    finally:
        PART.reset(token)


def _cache_name(model: Any) -> str | None:
    """What the model calls its cache; None for one that has none."""
    accepted = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    if "use_cache" not in accepted or getattr(config, "is_encoder_decoder", False):
        return None
    return next((x for x in ("cache", "past_key_values") if x in accepted), None)


@torch.no_grad()
def refusal(model: Any, window: Mapping[str, Tensor], device: torch.device) -> str | None:
    """Why a model cannot run in parts, None where it can: it is tried on the window's beginning.

    Parts of a text must give the outputs that the whole gives; a model that looks ahead, has no
    cache or keeps another state than keys and values does not.
    """
    if _cache_name(model) is None:
        return f"{type(model).__name__} takes no cache"
    length = window["input_ids"].shape[-1]
    few = {k: v[..., :ASKED] if v.shape[-1] == length else v for k, v in window.items()}
    try:
        whole = model(**arguments(model, few, device))[0]
        parts = torch.cat(list(_parts(model, few, device, ASKED // 3)), 1)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"{type(model).__name__} fails with a cache: {' '.join(str(error).split())[:80]}"
    if whole.shape != parts.shape:
        return f"{type(model).__name__} gives other outputs with a cache"
    rounding = max(AGREES, 16 * torch.finfo(whole.dtype).eps)
    if not (whole - parts).abs().max() <= rounding * whole.abs().max():
        return f"{type(model).__name__} gives other outputs with a cache: it may look ahead"
    return None


def plan(
    model: Any, window: Mapping[str, Tensor], device: torch.device, *,
    available: int | None = None,
) -> Plan:  # fmt: skip
    """Whole where that fits, which leaves nothing out; else in parts of `CHUNK`, if the model can.

    available: bytes that may be used; what the device has left unless given.

    Raises: ScaledotError with the estimates where neither fits, before any memory is taken.
    """
    length, chunk = window["input_ids"].shape[-1], CHUNK
    available = free(device) if available is None else available
    whole = activations(model, length)
    if available is None or whole <= available or length <= chunk:
        return Plan(None, whole, available, "it fits whole")
    need = activations(model, chunk) + cache_bytes(model, length)
    if need <= available:
        why = refusal(model, window, device)
        if why is None:
            return Plan(chunk, need, available, f"whole it would need about {size(whole)}")
    else:
        why = f"in parts of {chunk:,} about {size(need)}, mostly its cache"
    raise ScaledotError(
        f"{length:,} tokens need about {size(whole)} beside the model, {size(available)} are free "
        f"({why}): pass a smaller --context or --max-tokens"
    )


def cache_bytes(model: Any, tokens: int) -> int:
    """Bytes of keys and values of every layer, and once more of the layer that grows."""
    config = getattr(model, "config", None)
    layers = _number(config, 1, "num_hidden_layers", "n_layer")
    heads = _number(config, 1, "num_attention_heads", "n_head")
    width = _number(config, 1, "hidden_size", "n_embd")
    kv = _number(config, heads, "num_key_value_heads")
    d_k = _number(config, width // heads, "head_dim")
    return 2 * (layers + 2) * kv * d_k * tokens * _itemsize(model)


def activations(model: Any, tokens: int) -> int:
    """Bytes that a forward of so many tokens holds at its fullest beside the model, observed in
    full: activations of a layer, and row statistics in float64 (benchmarks/long.py)."""
    config = getattr(model, "config", None)
    width = _number(config, 1, "hidden_size", "n_embd", "d_model")
    heads = _number(config, 1, "num_attention_heads", "n_head", "num_heads")
    inner = _number(config, 4 * width, "intermediate_size", "n_inner", "d_ff")
    return tokens * (_itemsize(model) * (8 * width + 3 * inner) + heads * ROW)


ROW = 3000
"""Bytes of statistics of one row of one head."""


def _itemsize(model: Any) -> int:
    return next((p.element_size() for p in model.parameters()), 4)


def _number(config: Any, otherwise: int, *names: str) -> int:
    return config_number(config, *names) or otherwise


def free(device: torch.device) -> int | None:
    """Bytes that can still be taken there; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    found = [x for x in (_of_system(), _of_group()) if x is not None]
    return min(found) if found else None


def _of_system() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
        return next(int(x.split()[1]) for x in text.splitlines() if "MemAvailable" in x) * 1024
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _of_group() -> int | None:
    """What a container's limit leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int(
            (folder / "memory.current").read_text()
        )  # fmt: skip
    except (OSError, ValueError):
        return None


def size(n: int) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / (1 << 20):.0f} MiB"

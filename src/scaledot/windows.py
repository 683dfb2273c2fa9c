"""Texts → what a model is called with: windows of its context, and only the arguments it takes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import ScaledotError


def context_of(model: Any, tokenizer: Any) -> int | None:
    """Tokens a model takes at once, by its configuration and tokenizer; None if neither says."""
    sizes = [made_for(model), getattr(tokenizer, "model_max_length", None)]
    known = [int(s) for s in sizes if s and 0 < s < 10**9]
    return min(known) if known else None


_POSITIONS = re.compile(r"(^|\.)(wpe|\w*pos\w*)(\.|$)")


def made_for(model: Any) -> int | None:
    """Tokens at once that a model was made for, by its configuration; None if it does not say."""
    config = getattr(model, "config", None)
    return config_number(config, "max_position_embeddings", "n_positions", "max_target_positions")


def check_context(model: Any, context: int) -> None:
    """Raises: ScaledotError for more tokens at once than the model has learned positions."""
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            rows = made_for(model) or module.num_embeddings
            if module.num_embeddings < context:
                raise ScaledotError(
                    f"the context is {context:,}, and this model has learned {rows:,} positions "
                    f"({name}) and no others: pass at most {rows:,}"
                )


def check_reads_text(model: Any, window: Mapping[str, Tensor]) -> None:
    """Raises: ScaledotError for a model whose first input no tokenizer gives."""
    reads = getattr(model, "main_input_name", "input_ids")
    if reads not in window and reads != "input_ids":
        raise ScaledotError(
            f"the model ({type(model).__name__}) reads {reads}, not text: observe(model) takes any "
            "inputs"
        )


def windows_of(
    texts: Sequence[str], tokenizer: Any, context: int | None, max_tokens: int | None
) -> Iterator[dict[str, Tensor]]:
    """Model inputs of batch 1, each within the context, until max_tokens are used up."""
    left = math.inf if max_tokens is None else max_tokens
    for text in texts:
        if not text.strip():
            continue
        for window in encode(text, tokenizer, context):
            if left <= 0:
                return
            length = window["input_ids"].shape[-1]
            if length > left:
                window = {
                    k: v[..., : int(left)] if v.shape[-1] == length else v
                    for k, v in window.items()
                }
            left -= length
            yield window


def encode(text: str, tokenizer: Any, context: int | None) -> list[dict[str, Tensor]]:
    if not hasattr(tokenizer, "num_special_tokens_to_add"):
        given = tokenizer(text)
        ids = given.get("input_ids") if isinstance(given, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise ScaledotError(
                "the tokenizer gave no input_ids, a tensor (1, length): an audit reads text; "
                "observe(model) takes any inputs"
            )
        window = dict(given)
        length = window["input_ids"].shape[-1]
        step = context or length
        return [
            {k: v[..., i : i + step] if v.shape[-1] == length else v for k, v in window.items()}
            for i in range(0, length, step)
        ]
    ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    extra = tokenizer.num_special_tokens_to_add()
    step = max((context or len(ids) + extra) - extra, 1)
    pieces = [ids[i : i + step] for i in range(0, len(ids), step)]
    if len(pieces) <= 1:
        # The whole text goes through the tokenizer's own call, with whatever it adds.
        return [{k: v for k, v in tokenizer(text, return_tensors="pt").items() if _is_input(k)}]
    return [{"input_ids": torch.tensor([_wrap(tokenizer, piece)])} for piece in pieces if piece]


def _is_input(name: str) -> bool:
    return name in ("input_ids", "attention_mask", "token_type_ids")


def _wrap(tokenizer: Any, ids: list[int]) -> list[int]:
    """A window with the special tokens that the tokenizer puts around a text."""
    if not tokenizer.num_special_tokens_to_add():
        return ids
    around = tokenizer("", add_special_tokens=True)["input_ids"]
    prefix = around[: len(around) // 2 or 1]
    # "[CLS] [SEP]" goes around, "<s>" before, "</s>" after.
    if len(around) == 1 and around[0] == tokenizer.eos_token_id != tokenizer.bos_token_id:
        prefix = []
    return prefix + ids + around[len(prefix) :]


def arguments(model: Any, window: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """A window as the model's keyword arguments, without a cache and only what it takes."""
    accepted = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    given: dict[str, Any] = {
        k: v.to(device)
        for k, v in window.items()
        if k in accepted or (anything and k == "input_ids")
    }
    if "use_cache" in accepted:
        given["use_cache"] = False
    if "decoder_input_ids" in accepted and "input_ids" in given:
        ids = given["input_ids"]
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        start = config_number(model.config, *names) or 0
        given["decoder_input_ids"] = torch.cat([ids.new_full((1, 1), start), ids[:, :-1]], 1)
    return given


def has_vocabulary(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "batch_decode")


def config_number(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None

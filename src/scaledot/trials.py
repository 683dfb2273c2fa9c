"""What a causal model does on inputs made for it: does it look ahead, do heads match prefixes?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scaledot import ScaledotError
from scaledot.leakage import Leak, document_leak, future_leak, resting
from scaledot.mask_check import MaskFacts
from scaledot.observation import observe
from scaledot.roles import prefix_matching, repeated, vocabulary
from scaledot.windows import arguments, has_vocabulary

SEED = 20260714
"""Of the random tokens."""
TRIED = 32
"""Tokens of the text in which one is changed."""
REPEATED = 32
"""Random tokens that are said four times."""


@dataclass(frozen=True)
class Trials:
    """What a causal model did on inputs made for it. matched: {path: {head: (score, chance)}}.
    untried: what could not be asked of it, and why."""

    leaks: tuple[Leak, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    matched: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)


def try_out(
    model: Any, tokenizer: Any, window: Mapping[str, Tensor], context: int | None,
    device: torch.device, masks: Mapping[str, MaskFacts],
) -> Trials:  # fmt: skip
    """Does changing a token move what stands before it, or another document? Do heads match
    prefixes? What a model cannot be asked is left out."""
    causal = any(facts.causal for facts in masks.values())
    length = window["input_ids"].shape[-1]
    part = {k: v[..., :TRIED] if v.shape[-1] == length else v for k, v in window.items()}
    given, ids = arguments(model, part, device), part["input_ids"][0].tolist()
    half = len(ids) // 2
    leaks: list[Leak] = []
    untried: list[tuple[str, str]] = []
    tries: list[tuple[str, Callable[[], Leak]]] = []
    if length > 1:
        tries.append(("a token changed", lambda: future_leak(model, given)))
    packs = "position_ids" in inspect.signature(model.forward).parameters
    if causal and packs and half > 1 and "decoder_input_ids" not in given:
        documents = [ids[:half], ids[half:]]
        tries.append(("a document changed", lambda: document_leak(model, documents)))
    for name, ask in tries:
        try:
            leaks.append(ask())
        except (ScaledotError, RuntimeError, ValueError, TypeError, IndexError) as error:
            untried.append((name, f"not tried: {' '.join(str(error).split())[:80]}"))
    matched: dict[str, dict[int, tuple[float, float]]] = {}
    words = vocabulary(tokenizer) if has_vocabulary(tokenizer) else torch.empty(0)
    size = min(REPEATED, (context or 4 * REPEATED) // 4, len(words))
    if causal and size > 1 and "decoder_input_ids" not in given:
        said = repeated(words, length=size, seed=SEED)
        with resting(model), observe(model, full=True) as seen:
            model(**arguments(model, {"input_ids": said}, device))
        for path, stats in seen.heads.items():
            if "induction" in stats.measures:
                each = zip(*(x.tolist() for x in prefix_matching(stats)), strict=True)
                matched[path] = dict(enumerate(each))
    return Trials(tuple(leaks), tuple(untried), matched)

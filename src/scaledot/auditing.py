"""`audit`: texts through a model → every head's numbers, what they mean, and a file.

Each window of text is one forward pass under `observe`; head statistics are kept, nothing n×n is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaledot import ScaledotError, prefill
from scaledot.gathered import Audit, Gathered, conclude, name_of, subject_of
from scaledot.heads import HeadStats
from scaledot.leakage import resting
from scaledot.mask_check import MaskFacts
from scaledot.observation import observe
from scaledot.roles import delimiters
from scaledot.trials import Trials, try_out
from scaledot.windows import (
    arguments,
    check_context,
    check_reads_text,
    context_of,
    encode,
    has_vocabulary,
    windows_of,
)

if TYPE_CHECKING:
    from scaledot.exploring import Reading


def audit(
    model: Any,
    tokenizer: Any,
    texts: str | Iterable[str],
    *,
    max_tokens: int | None = None,
    context: int | None = None,
    layers: Iterable[int] | None = None,
    name: str | None = None,
    quick: bool = False,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Audit:
    """Run texts through a model and measure every attention head.

    tokenizer is a transformers tokenizer, or a function from a text to the model's keyword
    arguments. Texts longer than the context (the model's own unless given) are cut into windows
    that do not see each other; a longer context than the model was made for is extrapolation, and
    `Audit.text` says so. A window too long for memory runs in parts over a cache (prefill.py).
    max_tokens stops after so many tokens; layers keeps some layers.
    quick leaves out what takes more than the forward pass: other scales, roles by distance and
    token, the spread of values, attention received, and the trials, in which a causal model runs
    on up to 32 tokens of the text with one of them changed, and on random tokens said four times.
    on_progress(windows done, windows in all, tokens done) is called after each window.
    Ctrl-C ends early and keeps what is done.

    Raises: ScaledotError for an empty text or a model whose attention cannot be observed.

    >>> report = scaledot.audit(model, tokenizer, "The cat sat.")  # doctest: +SKIP
    >>> report.heads[0].after                                      # doctest: +SKIP
    1.31
    """
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}: pass a transformers tokenizer, or a "
            "function from a text to the model's inputs by name"
        )
    texts = [texts] if isinstance(texts, str) else list(texts)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: pass at least 1")
    if not any(t.strip() for t in texts):
        raise ScaledotError(
            'the text is empty: pass --text "…" or --file PATH (- is standard input)'
        )
    if context is not None:
        check_context(model, context)
    limit = context or context_of(model, tokenizer)
    windows = list(windows_of(texts, tokenizer, limit, max_tokens))
    check_reads_text(model, windows[0])
    wanted = None if layers is None else set(layers)
    if wanted is not None and not wanted:
        raise ValueError("layers is empty: pass None for all of them")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    longest_window = max(windows, key=lambda w: w["input_ids"].shape[-1])
    chunk = prefill.plan(model, longest_window, device).chunk
    started = time.perf_counter()
    done, tokens, complete = 0, 0, True
    kept: dict[str, HeadStats] = {}
    calls: dict[str, Any] = {}
    unobserved: list[str] = []
    masks: dict[str, MaskFacts] = {}
    trials = Trials()
    example = example_of(model, tokenizer, texts, windows[0], name)
    marks = delimiters(tokenizer) if not quick and has_vocabulary(tokenizer) else None
    try:
        with resting(model), observe(model, full=not quick, delimiters=marks) as seen:
            for window in windows:
                prefill.forward(model, window, device, chunk=chunk)
                kept, calls, masks = dict(seen.heads), dict(seen.calls), dict(seen.masks)
                done, tokens = done + 1, tokens + window["input_ids"].numel()
                if on_progress is not None:
                    on_progress(done, len(windows), tokens)
            unobserved = list(seen.unobserved)
        if not quick and any(call.kind == "self" for call in calls.values()):
            window = max(windows, key=lambda w: w["input_ids"].shape[-1])
            trials = try_out(model, tokenizer, window, limit, device, masks)
    except KeyboardInterrupt:
        if not kept:
            raise
        complete = False
        if done == len(windows):
            trials = Trials(untried=(("a token changed", "not tried: stopped before it"),))
    seconds = time.perf_counter() - started
    subject = subject_of(
        model, calls, kept, masks, trials, name=name, context=limit, chunk=chunk,
        unobserved=unobserved,
    )  # fmt: skip
    lengths = [w["input_ids"].shape[-1] for w in windows[:done]]
    gathered = Gathered(
        kept, masks, texts=len([t for t in texts if t.strip()]), windows=done, tokens=tokens,
        pairs=sum(n * n for n in lengths), longest=max(lengths), seconds=seconds,
    )  # fmt: skip
    return conclude(
        subject, gathered, layers=wanted, planned=len(windows), complete=complete, example=example
    )


def example_of(
    model: Any, tokenizer: Any, texts: Sequence[str], window: Mapping[str, Tensor],
    name: str | None,
) -> Reading | None:  # fmt: skip
    """The first tokens of the text as a page shows them; None for a model that cannot be given so
    few."""
    from scaledot.exploring import excerpt, prepare
    from scaledot.loading import Loaded
    from scaledot.page_document import example_length

    loaded = Loaded(model, tokenizer, name or name_of(model))
    try:
        explorer = prepare(loaded, next(t for t in texts if t.strip()))
        return excerpt(explorer, window, example_length(explorer.packed))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def trace_head(
    model: Any,
    tokenizer: Any,
    text: str,
    layer: int,
    head: int,
    *,
    max_tokens: int = 1024,
    name: str | None = None,
) -> dict[str, Any]:
    """The stages of one head of a model on a text, as a document with readable tokens.

    Raises: ScaledotError for an empty text, or a layer or head that is not there.
    """
    from scaledot.document import trace_document
    from scaledot.tokens import label_pieces, labels

    if not text.strip():
        raise ScaledotError(
            "the text is empty: pass a sentence or --file PATH (- is standard input)"
        )
    context = min(context_of(model, tokenizer) or max_tokens, max_tokens)
    windows = encode(text, tokenizer, context)
    window = windows[0]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with observe(model, keep="qk", layers=[layer]) as seen, torch.no_grad():
        model(**arguments(model, window, device))
    paths = list(seen.heads)
    if not 0 <= layer < len(paths):
        raise ScaledotError(f"no layer {layer}: this model has layers 0 to {len(paths) - 1}")
    call = seen.calls[paths[layer]]
    if not 0 <= head < call.heads:
        raise ScaledotError(f"no head {head}: layer {layer} has heads 0 to {call.heads - 1}")
    ids = window["input_ids"][0].tolist()
    known = hasattr(tokenizer, "decode")
    named = labels(tokenizer, ids) if known else label_pieces(list(text))[: len(ids)]
    trace = seen.trace(paths[layer], head=head)
    return trace_document(
        trace,
        model={"name": name or name_of(model), "d_k": call.d_k},
        text=text,
        layer=layer,
        head=head,
        kv_head=head // (call.heads // call.kv_heads) if call.kv_heads != call.heads else None,
        tokens=named if len(named) == trace.scores.shape[-1] else None,
        dropped_tokens=len(windows) - 1,
    )

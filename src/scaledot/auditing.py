"""`audit`: texts through a model → every head's numbers, what they mean, and a file.

Each window of text is one forward pass under `observe`; head statistics are kept, nothing n×n is.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaledot import ScaledotError, prefill
from scaledot import heads as head_stats
from scaledot.diagnose import findings
from scaledot.findings import Finding, Head, Layer, architecture_of, heads_of, layers_of
from scaledot.heads import SATURATED, HeadStats
from scaledot.leakage import resting
from scaledot.mask_check import MaskFacts
from scaledot.observation import observe
from scaledot.parts import NOT_IN_PARTS
from scaledot.roles import delimiters
from scaledot.trials import Trials, try_out
from scaledot.windows import (
    arguments,
    check_context,
    config_number,
    context_of,
    encode,
    has_vocabulary,
    made_for,
    windows_of,
)

if TYPE_CHECKING:
    from scaledot.exploring import Reading

SEED = 20260714


@dataclass(frozen=True)
class Theory:
    """What independent N(0, 1) scores would give under the same masks: a seeded simulation.

    keys exp(mean entropy); saturated share of rows; gradient mean Σp(1−p); largest the expected
    maximum of all scores. uniform_keys and uniform_gradient are those of equal weights.
    """

    keys: float
    saturated: float
    gradient: float
    largest: float
    uniform_keys: float
    uniform_gradient: float


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. `heads` has a `Head` a head, `findings` what they say, `stats` the sums
    behind them; `complete` is False if it was stopped early, and the numbers are then exact for
    what was done. Printing it gives the terminal's table."""

    model: Mapping[str, Any]
    text: Mapping[str, Any]
    run: Mapping[str, Any]
    theory: Theory | None
    layers: tuple[Layer, ...]
    heads: tuple[Head, ...]
    findings: tuple[Finding, ...]
    checked: tuple[tuple[str, str], ...]
    stats: Mapping[str, HeadStats] = field(repr=False)
    complete: bool = True
    example: Reading | None = field(default=None, repr=False)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the audit as JSON, or as a page where the path ends in .html; whole or not at all.
        Return its size in bytes.

        Raises: ScaledotError if the file cannot be written.
        """
        if os.fspath(path).lower().endswith((".html", ".htm")):
            return self.to_html(path)
        from scaledot.document import audit_document, dump

        again = {"audit": f"scaledot audit {shlex.quote(os.fspath(path))}"}
        data = dump(audit_document(self, again))
        head_stats.write(path, data)
        return len(data)

    def to_html(self, path: str | os.PathLike[str]) -> int:
        """Write the audit as one page that needs nothing else, and return its size in bytes.

        Raises: ScaledotError if the file cannot be written, or the audit has no example.
        """
        from scaledot.page_document import report_document
        from scaledot.report import page

        data = page(report_document(self)).encode()
        head_stats.write(path, data)
        return len(data)

    def _repr_html_(self) -> str:
        from scaledot.page_document import FRAMED, report_document
        from scaledot.report import frame

        document = report_document(self, budget=FRAMED)
        return frame(document, f"scaledot: audit of {self.model['name']}")

    def __str__(self) -> str:
        from scaledot.document import audit_document
        from scaledot.terminal import audit_text

        return audit_text(audit_document(self))

    def __repr__(self) -> str:
        found = len(self.findings)
        return f"<Audit of {self.model['name']}: {len(self.heads)} heads, {found} findings>"


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
    reads = getattr(model, "main_input_name", "input_ids")
    if reads not in windows[0] and reads != "input_ids":
        raise ScaledotError(
            f"the model ({type(model).__name__}) reads {reads}, not text: observe(model) takes any "
            "inputs"
        )
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
    example = _example(model, tokenizer, texts, windows[0], name)
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

    config = getattr(model, "config", None)
    places = layers_of(calls, kept, model)
    if wanted is not None:
        absent = wanted - {x.index for x in places}
        if absent:
            raise ScaledotError(
                f"no layer {min(absent)}: this model has layers 0 to {len(places) - 1}"
            )
        places = [x for x in places if x.index in wanted]
    heads = [
        replace(h, prefix_matching=trials.matched.get(x.path, {}).get(h.head))
        for x in places
        for h in heads_of(kept[x.path], x.index)
    ]
    d_model = config_number(config, "hidden_size", "d_model", "n_embd")
    found, clear = findings(heads, places, d_model, masks, trials.leaks)
    clear += trials.untried
    stats = {x.path: kept[x.path] for x in places}
    first = next(iter(calls.values()))
    longest = max(w["input_ids"].shape[-1] for w in windows[:done])
    made = made_for(model)
    return Audit(
        model={
            "name": name or name_of(model),
            "architecture": architecture_of(model, places, masks),
            "layers": len(places),
            "heads": places[0].heads,
            "kv_heads": places[0].kv_heads,
            "d_k": places[0].d_k,
            "d_model": d_model,
            "shares_weights": any("[" in x.path for x in places),
            "context": limit,
            "unobserved": unobserved,
        },
        text={
            "texts": len([t for t in texts if t.strip()]),
            "windows": done,
            "tokens": tokens,
            "context": limit,
            "longest": longest,
            "beyond": made if made is not None and longest > made else None,
            "chunk": chunk,
            "left_out": [] if chunk is None else list(NOT_IN_PARTS),
            "attention": _attention_kind(places, stats[places[0].path], windows[:done]),
            "scores": int(stats[places[0].path].scaled.count.max()),
            "planned": len(windows),
        },
        run={
            "kernel": first.kernel,
            "dtype": str(next((p.dtype for p in model.parameters()), torch.float32)).split(".")[-1],
            "device": str(device),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "seconds": seconds,
            "torch": torch.__version__,
            "transformers": _version("transformers"),
        },
        theory=_theory(list(stats.values())),
        layers=tuple(places),
        heads=tuple(heads),
        findings=tuple(found),
        checked=tuple(clear),
        stats=stats,
        complete=complete,
        example=example,
    )


def _example(
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


def _attention_kind(
    layers: Sequence[Layer], stats: HeadStats, windows: Sequence[Mapping[str, Tensor]]
) -> str:
    """What the first layer's queries see: "full" only if nothing is hidden."""
    kinds = {x.causal for x in layers}
    if len(kinds) > 1:
        return "mixed"
    if kinds.pop():
        return "causal"
    pairs = sum(w["input_ids"].shape[-1] ** 2 for w in windows)
    return "full" if int(stats.scaled.count.max()) >= pairs else "masked"


def name_of(model: Any) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return os.path.basename(os.path.normpath(path)) if path else type(model).__name__


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _theory(stats: Sequence[HeadStats]) -> Theory | None:
    """Simulate N(0, 1) scores for rows that see as many keys as the model's rows did."""
    lengths = _lengths(stats)
    if not lengths:
        return None
    rows = sum(lengths.values())
    generator = torch.Generator().manual_seed(SEED)
    entropy = gradient = saturated = uniform_entropy = inverse = 0.0
    several = sum(c for n, c in lengths.items() if n > 1)
    for n, count in lengths.items():
        weight = count / rows
        uniform_entropy += weight * math.log(n)
        inverse += weight / n
        if n == 1:
            continue
        trials = min(max(2**21 // n, 16), max(64, round(2**14 * weight)))
        scores = torch.randn(trials, n, generator=generator)
        p = scores.softmax(-1)
        top = scores.amax(-1)
        rest = (scores - top[:, None]).exp().sum(-1) - 1
        entropy += weight * float((scores.logsumexp(-1) - (p * scores).sum(-1)).mean())
        gradient += weight * float((1 - p.square().sum(-1)).mean())
        saturated += (
            count / several * float((rest <= math.exp(-SATURATED["bfloat16"])).float().mean())
        )
    pairs = max(int(s.scaled.count.max()) for s in stats)
    return Theory(
        math.exp(entropy), saturated, gradient, _expected_maximum(pairs),
        math.exp(uniform_entropy), 1 - inverse,
    )  # fmt: skip


def _lengths(stats: Sequence[HeadStats]) -> dict[int, int]:
    """How many rows saw how many keys, to the resolution of the histogram (exact up to 64)."""
    histogram = sum(s.measures["visible"].histogram.sum(0) for s in stats)
    assert isinstance(histogram, Tensor)
    edges = head_stats.EDGES["visible"]
    result: dict[int, int] = {}
    for i in histogram.nonzero()[:, 0].tolist():
        low, high = edges[i - 1], edges[i] if i < len(edges) else edges[-1]
        n = int(low) if low < 64 else round(float((low + high) / 2))
        result[n] = result.get(n, 0) + int(histogram[i])
    return result


def _expected_maximum(count: int) -> float:
    """E max of `count` independent N(0, 1) draws, by the quantiles of the maximum."""
    u = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    # 1 − u^(1/count), without rounding to 0 for large counts.
    upper = -torch.expm1(u.log() / max(count, 1))
    return float(-torch.special.ndtri(upper).mean())


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

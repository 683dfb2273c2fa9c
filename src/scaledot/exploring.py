"""One text through a model with everything kept that the page shows: `prepare`, then `read`.

A `Reading` holds query, key and value of every layer, each head's numbers, findings, what each head
adds after W_O, what W_O gives, and what a causal model would say next. Nothing n×n is kept: a page
computes stages from query and key (document.py, web/stages.js).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scaledot import ScaledotError
from scaledot.calls import Attended, four_axes, statistics
from scaledot.checks import problem
from scaledot.diagnose import findings
from scaledot.findings import Finding, Head, Layer, architecture_of, heads_of, layers_of
from scaledot.heads import EDGES, HeadStats
from scaledot.leakage import resting
from scaledot.loading import Loaded
from scaledot.masks import Visibility, resolve
from scaledot.numerals import size
from scaledot.observation import Observation, observe
from scaledot.projections import Projected, Projection, inputs_of, measured, projections
from scaledot.roles import delimiters
from scaledot.stages import Trace
from scaledot.tokens import Token, read_pieces, tokens_of
from scaledot.windows import (
    arguments,
    config_number,
    context_of,
    encode,
    has_vocabulary,
)

LONGEST = 8192
"""Tokens of one text, at most, whatever the model's context."""

MEMORY = 2 << 30
"""Bytes of query, key and value that one text may take."""

GUESSES = 8
"""Next tokens that are named; the others are one number."""

_ANY = "The quick brown fox jumps over the lazy dog."
"""What a model is read with to see its layers: any text of some tokens does."""

_ENOUGH = 16
"""Tokens of it."""


@dataclass(frozen=True, eq=False)
class Explorer:
    """A model that texts are read through: what is the same for every text.

    about: the model in words and numbers. packed: bytes of every head's query, key and value in a
    document, a token; kept: those in memory with W_O's results. context: tokens it takes at once.
    paths: its attentions. projections: each one's W_O by path, where it was found.
    """

    loaded: Loaded
    about: Mapping[str, Any]
    packed: int
    kept: int
    context: int
    paths: tuple[str, ...]
    projections: Mapping[str, Projection]


@dataclass(frozen=True)
class Sight:
    """What queries see: "causal", "none" (no mask), "window" (causal, `window` keys with the
    query's own), or "dense" for all that no name says."""

    kind: Literal["causal", "none", "window", "dense"]
    window: int | None = None


@dataclass(frozen=True, eq=False)
class Seen:
    """One layer on one text. attended: its last call, None where that was not kept. largest: each
    head's mean largest weight. missing: why it has no stages on the page, "" for a layer that has.
    projected: what W_O made of it, None where no W_O was found."""

    layer: Layer
    attended: Attended | None
    sight: Sight
    largest: Float[Tensor, " heads"]
    missing: str
    projected: Projected | None

    @property
    def bytes(self) -> int:
        """Memory that its tensors take."""
        result = 0 if self.projected is None else self.projected.result.nbytes
        return result + (0 if self.attended is None else self.attended.bytes)


@dataclass(frozen=True, eq=False)
class Guess:
    """The most likely next tokens with their probabilities, and the sum of all others."""

    tokens: tuple[tuple[str, float], ...]
    others: float


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model did with one text. left_out: tokens past its context; unobserved: paths of
    attentions without numbers, and why; complete: False if it was stopped before its last layer.
    following: what would come next, None where no such model. Other fields as in `Audit`."""

    text: str
    tokens: tuple[Token, ...]
    left_out: int
    seconds: float
    complete: bool
    layers: tuple[Seen, ...]
    unobserved: tuple[tuple[str, str], ...]
    heads: tuple[Head, ...]
    findings: tuple[Finding, ...]
    following: Guess | None

    @property
    def bytes(self) -> int:
        """Memory that its tensors take."""
        return sum(x.bytes for x in self.layers)


UNSEEN = "it computes its softmax itself, in no call that could be seen"
UNKEPT = 'its query and key were not kept: observe(model, keep="qk")'
UNDONE = "the model was stopped before it"


class Stopped(Exception):
    """Raised by `read`'s on_layer: stop here and keep what is done."""


def prepare(loaded: Loaded, text: str = _ANY) -> Explorer:
    """Find out what is the same for every text. Cost: one forward on a few tokens of `text`.

    Raises: ScaledotError for a model that reads no text or whose attention cannot be observed.
    """
    model = loaded.model
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise ScaledotError(f"the model ({type(model).__name__}) reads {reads}, not text")
    context = min(context_of(model, loaded.tokenizer) or LONGEST, LONGEST)
    window = encode(text, loaded.tokenizer, min(context, _ENOUGH))[0]
    given = arguments(model, window, _device(model))
    with (
        inputs_of(model) as inputs,
        torch.no_grad(),
        resting(model),
        observe(model, keep="qk") as seen,
    ):
        model(**given)
    places = layers_of(seen.calls, seen.heads, model)
    kind = architecture_of(model, places, seen.masks)
    about = _about(loaded.name, kind, places, _width(model)) | {
        "context": context,
        "embedded": loaded.embedded,
    }
    kept = {x.path: seen.kept(x.path) for x in places}
    numbers = sum(
        x.problem.query.shape[1] * (2 * x.problem.query.shape[3] + x.problem.value.shape[3])
        for x in kept.values()
        if x.problem.value is not None
    )
    packed = numbers * 16 // 3  # four bytes each, in base64
    held = sum(x.bytes for x in kept.values()) // given["input_ids"].shape[-1]
    found = projections(kept, inputs)
    held += sum(x.token_bytes for x in found.values())
    return Explorer(loaded, about, packed, held, context, tuple(kept), found)


@dataclass(frozen=True, eq=False)
class Progress:
    """How many layers of the text that runs are measured. since(n): those from the n-th on, as a
    finished reading has them but for findings and W_O, and their heads; only where the model runs,
    in on_layer, may it be called."""

    layers: int
    since: Callable[[int], tuple[list[Seen], list[Head]]]


def read(
    explorer: Explorer, text: str, *, on_layer: Callable[[Progress], None] | None = None
) -> Reading:
    """Read a text through the model; what exceeds its context is left out and counted.

    A lone surrogate, which no tokenizer takes, reaches the model as U+FFFD. on_layer(progress)
    is called while the model runs and may raise `Stopped`: the layers done are then all there is.

    Raises: ScaledotError for an empty text; Stopped where nothing was done yet.
    """
    if not text.strip():
        raise ScaledotError("the text is empty: type a sentence")
    valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    windows = encode(valid, explorer.loaded.tokenizer, explorer.context)
    if not windows or not windows[0]["input_ids"].numel():
        raise ScaledotError("the text has no token: the tokenizer leaves nothing of it")
    special = getattr(explorer.loaded.tokenizer, "num_special_tokens_to_add", lambda: 0)()
    left_out = sum(w["input_ids"].shape[-1] - special for w in windows[1:])
    return read_window(explorer, text, windows[0], left_out=left_out, on_layer=on_layer)


def read_window(
    explorer: Explorer, text: str, window: Mapping[str, Tensor], *, left_out: int = 0,
    on_layer: Callable[[Progress], None] | None = None,
) -> Reading:  # fmt: skip
    """`read` for the model's inputs of one text, (1, tokens) each.

    Raises: ScaledotError for a text of which more than `MEMORY` would be kept.
    """
    loaded = explorer.loaded
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = window["input_ids"][0].tolist()
    if len(ids) * explorer.kept > MEMORY:
        raise ScaledotError(
            f"{len(ids):,} tokens of this model take {size(len(ids) * explorer.kept)} of query, "
            f"key, value and W_O's result: {MEMORY // explorer.kept:,} tokens fit"
        )
    known = has_vocabulary(tokenizer)
    tokens = tokens_of(tokenizer, ids) if known else read_pieces(list(text))[: len(ids)]
    marks = delimiters(tokenizer) if known else None
    started = time.perf_counter()
    given = arguments(model, window, _device(model))
    with ExitStack() as context:
        context.enter_context(torch.no_grad())
        context.enter_context(resting(model))
        made = context.enter_context(measured(explorer.projections))
        seen = context.enter_context(
            observe(model, keep="qk", full=True, delimiters=marks, keep_bytes=2 * MEMORY)
        )
        if on_layer is not None:
            context.enter_context(
                _after_each(model, explorer.paths, lambda: on_layer(_so_far(model, seen, len(ids))))
            )
        following, complete = None, True
        try:
            following = _run(loaded, given)
        except Stopped:
            complete = False
            if not seen.heads:
                raise
    places = layers_of(seen.calls, seen.heads, model)
    heads = [h for x in places for h in heads_of(seen.heads[x.path], x.index)]
    found, _ = findings(heads, places, _width(model), seen.masks)
    unobserved = [(path, UNSEEN) for path in seen.unobserved] if complete else []
    unobserved += [(path, UNDONE) for path in explorer.paths if path not in seen.heads]
    return Reading(
        text=text,
        tokens=tuple(tokens),
        left_out=left_out,
        seconds=time.perf_counter() - started,
        complete=complete,
        layers=tuple(_layer(x, seen.kept(x.path), len(ids), made.get(x.path)) for x in places),
        unobserved=tuple(unobserved),
        heads=tuple(heads),
        findings=tuple(found),
        following=following,
    )


def _so_far(model: nn.Module, seen: Observation, tokens: int) -> Progress:
    def since(first: int) -> tuple[list[Seen], list[Head]]:
        places = layers_of(seen.calls, seen.heads, model)[first:]
        layers = [_layer(x, seen.kept(x.path), tokens, None) for x in places]
        return layers, [h for x in places for h in heads_of(seen.heads[x.path], x.index)]

    return Progress(len(seen.heads), since)


@contextmanager
def _after_each(model: nn.Module, paths: Sequence[str], call: Callable[[], None]) -> Iterator[None]:
    """Call after each module that computes an attention, while the model runs."""
    named = dict(model.named_modules())
    modules = {named[name] for path in paths if (name := path.partition("[")[0]) in named}
    handles = [m.register_forward_hook(lambda *_: call()) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def excerpt(explorer: Explorer, window: Mapping[str, Tensor], tokens: int) -> Reading:
    """The first tokens of a window, read as a text of their own."""
    length = window["input_ids"].shape[-1]
    part = {k: v[..., :tokens] if v.shape[-1] == length else v for k, v in window.items()}
    ids, tokenizer = part["input_ids"][0].tolist(), explorer.loaded.tokenizer
    named = tokens_of(tokenizer, ids) if has_vocabulary(tokenizer) else []
    return read_window(explorer, "".join(token.text for token in named), part)


def _run(loaded: Loaded, given: Mapping[str, Any]) -> Guess | None:
    """Run the model; what would come next, if it can tell."""
    if loaded.predictor is None:
        loaded.model(**given)
        return None
    last = {}
    if "logits_to_keep" in inspect.signature(loaded.predictor.forward).parameters:
        last = {"logits_to_keep": 1}
    return _guess(loaded.predictor(**given, **last).logits[0, -1], loaded.tokenizer)


def _about(
    name: str, architecture: str, places: Sequence[Layer], d_model: int | None
) -> dict[str, Any]:
    first = places[0]
    return {
        "name": name,
        "architecture": architecture,
        "layers": len(places),
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        "d_k": first.d_k,
        "d_model": d_model,
        "causal": all(x.causal for x in places),
        "context": None,
        "embedded": False,
    }


def _layer(place: Layer, attended: Attended, tokens: int, projected: Projected | None) -> Seen:
    queries, keys = attended.problem.query.shape[2], attended.problem.key.shape[2]
    missing = ""
    if place.kind == "cross":
        missing = "it reads another text than its queries: the page shows self-attention"
    elif not queries == keys == tokens:
        missing = f"it has {queries} queries and {keys} keys for {tokens} tokens"
    # r, the mass of all others over the heaviest key's, is e^−margin, so its weight is 1/(1 + r).
    largest = attended.rows.top_margin[0].double().sigmoid().nanmean(-1)
    return Seen(place, attended, sight(attended.seen), largest, missing, projected)


def sight(seen: Visibility) -> Sight:
    """What a mask amounts to; of one that is a tensor, what it shows. Cost: O(1) for a mask in
    symbols, one reading of a tensor."""
    queries, keys = seen.shape[2:]
    if not (seen.keep is None and seen.segments is None and seen.allowed is seen.bias is None):
        hidden = hidden_of(seen)
        later = torch.ones(queries, keys, dtype=torch.bool, device=hidden.device).triu(1)
        if not bool(hidden.any()):
            return Sight("none")
        return Sight("causal" if queries == keys and bool((hidden == later).all()) else "dense")
    if seen.left is None and seen.right is None:
        return Sight("none")
    if seen.right == 0 and seen.offset == 0:
        if seen.left is None or seen.left + 1 >= queries:
            return Sight("causal")
        return Sight("window", seen.left + 1)
    return Sight("dense")


def hidden_of(seen: Visibility, head: int | None = None) -> Tensor:
    """True where a query does not see a key, (heads or 1, queries, keys) of the first batch, of one
    head where it is given: hidden, or so low a bias that it counts as hidden."""
    seen = seen.part(slice(0, 1), slice(None) if head is None else slice(head, head + 1))
    queries, keys = seen.shape[2:]
    hidden, bias = seen.block(0, queries, 0, keys)
    if hidden is None:
        hidden = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=seen.device)
    if bias is not None:
        hidden = hidden | (bias <= seen.floor)
    return hidden[0].expand(-1, queries, keys)


def bias_of(seen: Visibility, head: int) -> Tensor | None:
    """What is added to the scores of one head, (queries, keys), 0 where hidden; None: nothing."""
    part = seen.part(slice(0, 1), slice(head, head + 1))
    queries, keys = part.shape[2:]
    _, bias = part.block(0, queries, 0, keys)
    if bias is None:
        return None
    shown = bias[0, 0].expand(queries, keys).masked_fill(hidden_of(seen, head)[0], 0.0)
    return shown if bool(shown.any()) else None


def _guess(logits: Tensor, tokenizer: Any) -> Guess:
    p = logits.double().softmax(-1)
    top = p.topk(min(GUESSES, len(p)))
    ids = top.indices.tolist()
    # One by one: side by side, halves of a character would be read as one.
    known_words = has_vocabulary(tokenizer)
    named = [tokens_of(tokenizer, [i])[0].label if known_words else f"⟨id:{i}⟩" for i in ids]
    known = tuple(zip(named, top.values.tolist(), strict=True))
    return Guess(known, max(1 - sum(x for _, x in known), 0.0))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _width(model: nn.Module) -> int | None:
    return config_number(getattr(model, "config", None), "hidden_size", "d_model", "n_embd")


# What was computed elsewhere


def of_observation(seen: Observation) -> tuple[dict[str, Any], Reading]:
    """(what is known of the model, what was observed) as a page shows it: each head's numbers over
    all calls, and the stages of the first batch of the last call, where it was kept.

    Its tokens are numbers: an observation knows no text.
    """
    places = layers_of(seen.calls, seen.heads, nn.Module())
    heads = [h for x in places for h in heads_of(seen.heads[x.path], x.index)]
    found, _ = findings(heads, places, None, seen.masks)
    kept = {x.path: _kept(seen, x.path) for x in places}
    sizes = [a.problem.query.shape[2] for a in kept.values() if a is not None]
    length = sizes[0] if sizes else seen.calls[places[0].path].queries
    layers = []
    for place in places:
        attended = kept[place.path]
        if attended is None:
            largest = mean_largest(seen.heads[place.path])
            layers.append(Seen(place, None, Sight("dense"), largest, UNKEPT, None))
        else:
            shown = _layer(place, attended, length, None)
            layers.append(replace(shown, largest=mean_largest(seen.heads[place.path])))
    return _about("observed model", "", places, None), Reading(
        "", _numbered(length), 0, 0.0, True, tuple(layers), (), tuple(heads), tuple(found), None
    )


@torch.no_grad()
def of_trace(trace: Trace) -> tuple[dict[str, Any], Reading] | None:
    """The same for a trace, its first batch; None where a page cannot show it: with other keys than
    queries, or with no head."""
    if 0 in trace.scores.shape[:-2] or trace.scores.shape[-2] != trace.scores.shape[-1]:
        return None
    p = problem(
        trace.query, trace.key, trace.value, scale=trace.scale, enable_gqa=True,
        softcap=trace.softcap, sinks=trace.sinks,
    )  # fmt: skip
    logits = trace.scaled if trace.capped is None else trace.capped
    # What was added to them, but for its rounding.
    added = torch.where(trace.visible, trace.masked - logits, 0.0)
    rounding = 4 * torch.finfo(logits.dtype).eps * logits.abs()
    bias = None if bool((added.abs() <= rounding).all()) else added
    dense = trace.visible if bias is None else bias.masked_fill(~trace.visible, float("-inf"))
    attended = four_axes(Attended(p, resolve(p, dense), trace.rows.map(Tensor.detach)))
    square = attended.problem.query.shape
    stats = statistics(attended, (), self_attention=True)
    view = sight(attended.seen)
    place = Layer(
        0, "trace", "self", view.kind == "causal", square[3], square[1], p.key.shape[1], p.scale,
        p.softcap, p.sinks is not None, None, None,
    )  # fmt: skip
    heads = heads_of(stats, 0)
    found, _ = findings(heads, [place], None)
    tokens = _numbered(square[2])
    if trace.tokens is not None:
        tokens = tuple(read_pieces(list(trace.tokens)))
    layer = _layer(place, attended, square[2], None)
    return _about("trace", "", [place], None), Reading(
        "", tokens, 0, 0.0, True, (layer,), (), tuple(heads), tuple(found), None
    )


def _kept(seen: Observation, path: str) -> Attended | None:
    try:
        return seen.kept(path)
    except ScaledotError:
        return None


def _numbered(length: int) -> tuple[Token, ...]:
    return tuple(Token(str(i), str(i)) for i in range(length))


def mean_largest(stats: HeadStats) -> Float[Tensor, " heads"]:
    """Each head's mean largest weight, from the histogram of the margin −ln r, of which it is
    1/(1 + r). Error: 0.011, a quarter of a bin's width; a row of one key has weight 1."""
    margin, single = stats.measures["top_margin"], stats.counts["single"]
    edges = EDGES["top_margin"]
    half = (edges[1] - edges[0]) / 2
    middle = torch.cat([edges - half, edges[-1:] + half]).sigmoid()
    return ((margin.histogram * middle).sum(-1) + single) / (margin.count + single)

"""What an attention's mask shows and should not: later keys, padding, other documents, a window.

`facts` looks at one call, in O(n·d) whatever the mask's form where nothing forbidden is visible:
counts come from the mask alone. Where something is, its weight follows exactly from two log-sums:
the keys in question alone, over all of them, exp(lse_some − lse), with no subtraction of weights.
docs/maths.md#masks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from scaledot import operators
from scaledot.calls import Attended
from scaledot.frames import Frame, reading
from scaledot.kernels import Terms
from scaledot.masks import Mask, Visibility

FINITE = -1000.0
"""A finite number at or below this in an additive mask means to hide its key: exp(−1000) is 0 even
in float64. It does so only beside scores of ordinary size."""
_GAP = 500.0
"""What is meant to hide stands apart from the rest by this; a bias that grows with distance, as
ALiBi's, does not."""

_BLOCK = 1 << 20
"""Entries of a tensor mask that are looked at together."""

_CAUSAL_MODEL = re.compile(r"(ForCausalLM|LMHeadModel)$")


@dataclass(frozen=True, eq=False)
class Shown:
    """Keys that a mask shows to real queries and should not, by head.

    pairs: how many (query, key). mass: the sum over rows of their weight. most: the largest weight
    in one row, 0 … 1; both exactly 0 where there is no such pair.
    """

    pairs: Int[Tensor, " heads"]
    mass: Float[Tensor, " heads"]
    most: Float[Tensor, " heads"]


@dataclass(frozen=True, eq=False)
class MaskFacts:
    """What the masks of one attention did, over its calls; tensors are by head, on the CPU.

    calls, rows: calls; rows of real queries that see a key.
    causal: whether the model's configuration means that no query sees a later key; None where it
        does not say, or where the caller brought a mask of their own.
    own_mask: the caller gave the model a mask of more axes than (batch, length).
    visible_min, visible_max: the fewest and the most visible keys of such a row; 0 for no rows.
    later: later keys than the query's own; None where nobody promised that there are none.
    padding: keys that the model's own attention_mask calls padding; None where none was given.
    padded: how many padding keys that was.
    across: keys of another packed document; None where no documents are known. documents: how many.
    window: W keys promised, the query's own included, None for no promise. full: rows with W keys
        or more before and at their own; full_min, full_max: how many of them those rows see.
    cached: calls with more keys than queries. alignment: which of them "top_left", "bottom_right"
        or "neither"; the first lines query 0 up with key 0, the second the last with the last.
    inverted: "causal", only later keys are visible and never the own one; "padding", only padding.
    zero_one: an additive mask that holds 0 and 1 and nothing else.
    finite: the lowest finite number at or below −1000 in an additive mask, NaN for none. Looked for
        in the first, middle and last query.
    ambiguous: a boolean mask (heads, queries, keys) that differs between heads and whose first axis
        is the batch's length too: it may have been meant as (batch, queries, keys).

    Merge: `merge`, exact, associative. Cost: O(n) for a mask in symbols, n log n with documents;
    one reading of a tensor mask; two or more passes of the kernel's statistics where something
    forbidden is visible. Source: docs/maths.md#masks.
    """

    calls: int
    rows: Int[Tensor, " heads"]
    causal: bool | None
    own_mask: bool
    visible_min: Int[Tensor, " heads"]
    visible_max: Int[Tensor, " heads"]
    later: Shown | None
    padding: Shown | None
    padded: int
    across: Shown | None
    documents: int
    window: int | None
    full: Int[Tensor, " heads"]
    full_min: Int[Tensor, " heads"]
    full_max: Int[Tensor, " heads"]
    cached: int
    alignment: frozenset[Literal["top_left", "bottom_right", "neither"]]
    inverted: Literal["causal", "padding"] | None
    zero_one: bool
    finite: float
    ambiguous: bool


def facts(
    attended: Attended,
    frames: Sequence[Frame],
    module: nn.Module,
    *,
    kind: Literal["self", "cross"],
    window: int | None,
) -> MaskFacts:
    """What the mask of one call shows; row statistics as (batch, heads, queries).

    window: what the call promises. A count is over real queries: those that the model's own
    attention_mask, or else the call's padding, calls so. Rows that see nothing, or a non-finite
    score, have no weights and count nowhere.

    >>> layer = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    >>> with scaledot.observe(layer) as seen:
    ...     _ = layer(torch.randn(1, 5, 16))
    >>> seen.masks["self_attn"].visible_max
    tensor([5, 5])
    """
    seen, rows = attended.seen, attended.rows
    batch, heads, queries, keys = seen.shape
    text = reading(frames) if kind == "self" else None
    if text is not None and text.length not in (0, queries):
        text = None  # it is about other queries
    own_mask = any(frame.own_mask for frame in frames)
    causal = _meant(module, frames, own_mask) if kind == "self" else False
    real = _real(attended, text)
    there = (rows.visible > 0) & ~rows.nonfinite & real[:, None]
    none = torch.zeros(heads, dtype=torch.int64)

    finite, zero_one = _additive(seen)
    own = seen.diagonal
    after = _from(seen, own + 1)
    later: Shown | None = None
    inverted: Literal["causal", "padding"] | None = None
    ordered = kind == "self" and queries <= keys
    if ordered and (after.right is not None and after.right < 0):
        later = Shown(none, none.double(), none.double()) if causal is not False else None
    elif ordered and causal is not False:
        if causal:
            count = _visible(after)
            later = _shown(attended, count, [after], there)
        else:
            one = slice(0, 1)
            count = _visible(after.part(one, one))
        if math.isnan(finite) and _only(count, rows.visible, there):
            count = _visible(after)
            inverted = "causal" if _only(count, rows.visible, there) else None

    padded, padding = _padded(attended, frames, text, kind), None
    if padded is not None:
        hidden = padded if seen.keep is None else padded & seen.keep
        sub = replace(seen, keep=hidden)
        count = _visible(sub)
        padding = _shown(attended, count, [sub], there)
        if math.isnan(finite) and bool((~padded).any()) and _only(count, rows.visible, there):
            inverted = "padding"

    documents = None if text is None else _documents(text, seen)
    across = None
    if documents is not None:
        across = _across(attended, documents, there)

    visible = _by_head(rows.visible, there)
    promised = _promised(module, frames, window, causal, seen)
    full = full_min = full_max = none
    if promised is not None:
        reach = Visibility(
            (batch, 1, queries, keys), own, None, 0,
            seen.keep if padded is None else ~padded,
            seen.segments if documents is None else (documents, documents),
            device=seen.device,
        )  # fmt: skip
        full, full_min, full_max = _by_head(rows.visible, there & (_visible(reach) >= promised))
    cached = kind == "self" and causal is not False and 0 < queries < keys
    return MaskFacts(
        calls=1,
        rows=visible[0],
        causal=causal,
        own_mask=own_mask,
        visible_min=visible[1],
        visible_max=visible[2],
        later=later,
        padding=padding,
        padded=0 if padded is None else int(padded.expand(batch, keys).sum()),
        across=across,
        documents=0 if documents is None else _how_many(documents),
        window=promised,
        full=full,
        full_min=full_min,
        full_max=full_max,
        cached=int(cached),
        alignment=frozenset([_alignment(attended)] if cached and math.isnan(finite) else []),
        inverted=inverted,
        zero_one=zero_one,
        finite=finite,
        ambiguous=_ambiguous(seen),
    )


def merge(a: MaskFacts, b: MaskFacts) -> MaskFacts:
    """The facts of both; of one attention. A promise that only one of them makes is kept."""
    low = {
        name: torch.where(there_b == 0, x, torch.where(there_a == 0, y, torch.minimum(x, y)))
        for name, there_a, there_b, x, y in (
            ("visible_min", a.rows, b.rows, a.visible_min, b.visible_min),
            ("full_min", a.full, b.full, a.full_min, b.full_min),
        )
    }
    return MaskFacts(
        calls=a.calls + b.calls,
        rows=a.rows + b.rows,
        causal=a.causal if a.causal == b.causal else None,
        own_mask=a.own_mask or b.own_mask,
        visible_max=torch.maximum(a.visible_max, b.visible_max),
        later=_merge_shown(a.later, b.later),
        padding=_merge_shown(a.padding, b.padding),
        padded=a.padded + b.padded,
        across=_merge_shown(a.across, b.across),
        documents=a.documents + b.documents,
        window=a.window if b.window is None else b.window,
        full=a.full + b.full,
        full_max=torch.maximum(a.full_max, b.full_max),
        cached=a.cached + b.cached,
        alignment=a.alignment | b.alignment,
        inverted=a.inverted or b.inverted,
        zero_one=a.zero_one or b.zero_one,
        finite=b.finite if math.isnan(a.finite) or b.finite < a.finite else a.finite,
        ambiguous=a.ambiguous or b.ambiguous,
        **low,
    )


def _merge_shown(a: Shown | None, b: Shown | None) -> Shown | None:
    if a is None or b is None:
        return b if a is None else a
    return Shown(a.pairs + b.pairs, a.mass + b.mass, torch.maximum(a.most, b.most))


# What was promised


def _meant(module: nn.Module, frames: Sequence[Frame], own_mask: bool) -> bool | None:
    """Whether the configuration means causal attention; None where it leaves that open."""
    flag = getattr(module, "is_causal", None)
    configs = [c for m in (module, *(f.module for f in frames)) if (c := _config(m)) is not None]
    decoder = any(
        _CAUSAL_MODEL.search(type(f.module).__name__)
        and getattr(_config(f.module), "is_decoder", True) is not False
        for f in frames
    )
    if flag is not True and not decoder:
        return False if flag is False else None
    open_ = own_mask or any(
        getattr(c, "use_bidirectional_attention", None)
        or getattr(c, "is_causal", None) is False
        or any(getattr(c, x, None) is not None for x in ("vision_config", "audio_config"))
        for c in configs
    )
    return None if open_ else True


def _config(module: nn.Module) -> object | None:
    return getattr(module, "config", None)


def _promised(
    module: nn.Module, frames: Sequence[Frame], window: int | None, causal: bool | None,
    seen: Visibility,
) -> int | None:  # fmt: skip
    """W of a causal window: what the configuration says of this layer, else the call, else a module
    without a configuration; one that has it may hold a width that only other layers use."""
    if causal is False or (causal is None and seen.right != 0):
        return None
    layer = getattr(module, "layer_idx", None)
    for holder in (module, *(frame.module for frame in reversed(frames))):
        kinds = getattr(_config(holder), "layer_types", None)
        if kinds and isinstance(layer, int) and layer < len(kinds):
            if kinds[layer] != "sliding_attention":
                return None
            return _width(window) or _width(getattr(_config(holder), "sliding_window", None))
    if window is None and _config(module) is None:
        window = getattr(module, "sliding_window", None)
    return _width(window)


def _width(x: object) -> int | None:
    return x if isinstance(x, int) and not isinstance(x, bool) and x > 0 else None


def _real(attended: Attended, text: Frame | None) -> Bool[Tensor, "batch queries"]:
    """Queries that are no padding."""
    seen = attended.seen
    batch, _, queries, keys = seen.shape
    real = torch.ones(batch, queries, dtype=torch.bool, device=seen.device)
    given = None if text is None else text.query_mask
    if given is not None and given.shape[1] >= queries and given.shape[0] in (1, batch):
        return real & given[:, given.shape[1] - queries :].to(seen.device)
    if seen.keep is not None and keys and queries <= keys:
        own = torch.arange(queries, device=seen.device) + seen.diagonal
        real = real & (seen.keep[:, own.clamp(0, keys - 1)] | (own >= keys))
    return real


def _padded(
    attended: Attended, frames: Sequence[Frame], text: Frame | None, kind: str
) -> Bool[Tensor, "#batch keys"] | None:
    """Keys that the attention_mask of the text they come from calls padding; None for none."""
    batch, _, _, keys = attended.seen.shape
    if kind == "cross":
        # An encoder-decoder's attention_mask is its encoder's; what its decoder is given is not.
        decoder, given = reading(frames), None
        for frame in frames:
            if decoder is not None and frame.module is decoder.module:
                break
            if getattr(_config(frame.module), "is_encoder_decoder", False) is True:
                given = frame.query_mask if given is None else given
    else:
        given = None if text is None else text.query_mask
    if given is None or given.shape[0] not in (1, batch):
        return None
    if given.shape[1] != attended.earlier + keys:
        return None
    padded = ~given[:, attended.earlier :].to(attended.seen.device)
    return padded if bool(padded.any()) else None


def _documents(text: Frame, seen: Visibility) -> Int[Tensor, "#batch queries"] | None:
    """The documents of both queries and keys, None where they are not those of this call."""
    batch, _, queries, keys = seen.shape
    documents = text.documents
    if documents is None or not queries == keys == documents.shape[1] > 0:
        return None
    known = documents.shape[0] in (1, batch)
    return documents.to(seen.device, torch.int64) if known else None


# What is visible


def _visible(seen: Visibility) -> Int[Tensor, "#batch #heads queries"]:
    """How many keys each query may see, from the mask alone; heads that do not differ are one."""
    queries, keys = seen.shape[2:]
    dense = [x for x in (seen.allowed, seen.bias) if x is not None]
    if any(x.shape[2] > 1 for x in dense):
        return _read(seen)
    device = seen.device
    shown = torch.ones(1, 1, keys, dtype=torch.bool, device=device)
    if seen.keep is not None:
        shown = shown & seen.keep[:, None]
    if seen.allowed is not None:
        shown = shown & seen.allowed[:, :, 0]
    if seen.bias is not None:
        shown = shown & (seen.bias > seen.floor)[:, :, 0]
    position = torch.arange(queries, device=device)[None] + seen.offset
    low = torch.zeros_like(position) if seen.left is None else position - seen.left
    high = position * 0 + keys if seen.right is None else position + seen.right + 1
    low = low.clamp(0, keys)
    high = torch.maximum(high.clamp(0, keys), low)
    if seen.segments is not None:
        # Keys in order of (document, index): those of one document within bounds are neighbours.
        q_ids, k_ids = seen.segments
        rows = max(len(q_ids), len(k_ids), len(shown))
        ids = torch.cat([q_ids.flatten(), k_ids.flatten()])
        _, place = torch.unique(ids, return_inverse=True)
        q_ids, k_ids = place[: q_ids.numel()].view_as(q_ids), place[q_ids.numel() :].view_as(k_ids)
        index = torch.arange(keys, device=device)
        ordered, order = (k_ids * (keys + 1) + index).expand(rows, -1).sort(-1)
        base = (q_ids * (keys + 1)).expand(rows, -1)
        low, high = (
            torch.searchsorted(ordered.contiguous(), (base + x).contiguous()) for x in (low, high)
        )
        shown = shown.expand(rows, -1, -1).gather(2, order[:, None].expand(-1, shown.shape[1], -1))
    before = F.pad(shown.to(torch.int64), (1, 0)).cumsum(-1)
    rows = max(len(before), len(low))
    before = before.expand(rows, -1, -1)
    low, high = (x[:, None].expand(rows, before.shape[1], -1) for x in (low, high))
    return before.gather(2, high) - before.gather(2, low)


def _read(seen: Visibility) -> Int[Tensor, "#batch #heads queries"]:
    """The same of a tensor mask, read once, some queries at a time."""
    queries, keys = seen.shape[2:]
    parts = []
    dense = [x for x in (seen.allowed, seen.bias) if x is not None]
    width = max(x[..., :1, :1].numel() for x in dense) * max(keys, 1)
    step = max(_BLOCK // width, 1)
    for q0 in range(0, queries, step):
        q1 = min(q0 + step, queries)
        k0, k1 = seen.span(q0, q1)
        hidden, bias = seen.block(q0, q1, k0, k1)
        shape = (1, 1, q1 - q0, k1 - k0)
        shown = torch.ones((), dtype=torch.bool, device=seen.device).expand(shape)
        if hidden is not None:
            shown = shown & ~hidden
        if bias is not None:
            shown = shown & (bias > seen.floor)
        parts.append(shown.sum(-1))
    lead = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
    return torch.cat([part.expand(*lead, -1) for part in parts], -1)


def _only(count: Tensor, visible: Tensor, there: Tensor) -> bool:
    """Whether the counted keys are all that real queries see, and there are some."""
    rows, heads = count.shape[:2]
    if rows == 1 != visible.shape[0] or heads == 1 != visible.shape[1]:
        visible, there = visible[:rows], there[:rows]
        visible, there = visible[:, :heads], there[:, :heads]
    same = (count == visible) | ~there
    return bool(same.all() & (there & (count > 0)).any())


def _shown(
    attended: Attended, count: Tensor, subsets: Sequence[Visibility], there: Tensor
) -> Shown:
    """Pairs and weight of the keys in some disjoint parts of a mask, over the rows in `there`."""
    heads = there.shape[1]
    count = count.expand(there.shape).masked_fill(~there, 0)
    pairs = count.sum((0, 2)).cpu()
    zero = torch.zeros(heads, dtype=torch.float64)
    if not bool(pairs.any()):
        return Shown(pairs, zero, zero)
    p, rows = attended.problem, attended.rows
    terms = Terms(p.scale, p.softcap, None, 0.0, 0)
    kernel = operators.implementation(rows.kernel)
    mass = torch.zeros(there.shape, dtype=torch.float64, device=there.device)
    for subset in subsets:
        some = kernel.forward(p.query, p.key, None, subset, terms)[1]
        mass += (some.lse.double() - rows.lse.double()).exp().nan_to_num(0.0)
    # Rounding of two log-sums may pass 1.
    mass = mass.masked_fill(~there | (count == 0), 0.0).clamp(max=1.0)
    return Shown(pairs, mass.sum((0, 2)).cpu(), mass.amax((0, 2)).cpu())


def _across(attended: Attended, documents: Tensor, there: Tensor) -> Shown:
    """Keys of other documents. Two numbers differ in one lowest bit first: by each bit, one part
    of the mask, so that no weights are subtracted."""
    seen = attended.seen
    nothing = torch.zeros_like(there[:1, :1], dtype=torch.int64)
    if seen.segments is not None and _same_runs(documents, seen.segments):
        return _shown(attended, nothing, [], there)
    own = _visible(_within(seen, documents, documents))
    count = attended.rows.visible - own
    subsets = []
    for bit in range(int(documents.max()).bit_length()):
        low = documents & ((1 << bit) - 1)
        here = documents & (1 << bit)
        subsets.append(_within(seen, low + ((1 << bit) - here), low + here))
    return _shown(attended, count, subsets, there)


def _within(seen: Visibility, query: Tensor, key: Tensor) -> Visibility:
    """A mask that also asks for equal numbers of query and key."""
    both = Mask(segments=(query, key))
    if seen.segments is not None:
        both = both & Mask(segments=seen.segments)
    segments = both.segments
    assert isinstance(segments, tuple)
    return replace(seen, segments=segments)


def _same_runs(documents: Tensor, segments: tuple[Tensor, Tensor]) -> bool:
    """Whether segments are the documents, both in rising order."""
    query, key = segments
    if query.shape != documents.shape or key.shape != documents.shape:
        return False
    steps, parts = documents.diff(dim=-1), query.diff(dim=-1)
    return bool(
        (query == key).all() & (steps >= 0).all() & (parts >= 0).all()
         & ((steps > 0) == (parts > 0)).all()
    )  # fmt: skip


def _how_many(documents: Tensor) -> int:
    return int(documents.amax(-1).sum()) + len(documents)


def _by_head(
    visible: Tensor, there: Tensor
) -> tuple[Int[Tensor, " heads"], Int[Tensor, " heads"], Int[Tensor, " heads"]]:
    """(rows, fewest, most) visible keys of the rows in `there`, by head."""
    if 0 in there.shape:
        none = torch.zeros(there.shape[1], dtype=torch.int64)
        return none, none, none
    count = there.sum((0, 2)).cpu()
    low = visible.masked_fill(~there, torch.iinfo(visible.dtype).max).amin((0, 2)).cpu().long()
    high = visible.masked_fill(~there, 0).amax((0, 2)).cpu().long()
    return count, low.masked_fill(count == 0, 0), high


def _from(seen: Visibility, offset: int) -> Visibility:
    """What of a mask stands at key i + offset of query i, or after."""
    right = None if seen.right is None else seen.offset + seen.right - offset
    return replace(seen, offset=offset, left=0, right=right)


def _alignment(attended: Attended) -> Literal["top_left", "bottom_right", "neither"]:
    """How a mask lines fewer queries up with more keys."""
    seen = attended.seen
    last = seen.shape[3] - seen.shape[2]

    def any_from(offset: int) -> bool:
        part = _from(seen, offset)
        return (part.right is None or part.right >= 0) and bool(_visible(part).any())

    if any_from(1):
        return "bottom_right" if any_from(last) and not any_from(last + 1) else "neither"
    # A cache of fixed size is filled from the left, and its empty end is 0.
    empty = not bool(attended.problem.key[:, :, seen.shape[2] :].any())
    return "neither" if empty else "top_left"


def _additive(seen: Visibility) -> tuple[float, bool]:
    """(the lowest number that means to hide and is finite, whether it holds 0 and 1 only)."""
    bias = seen.bias
    if bias is None or not bias.numel():
        return math.nan, False
    rows = sorted({0, bias.shape[2] // 2, bias.shape[2] - 1})
    some = bias[:, :, rows].detach()
    ones = bool(((some == 0) | (some == 1)).all())
    if ones:
        ones = all(bool(((x == 0) | (x == 1)).all()) for x in bias.split(64, 2))
        ones = ones and bool((bias == 1).any()) and bool((bias == 0).any())
    low = (some > seen.floor) & (some <= FINITE)
    if not bool(low.any()):
        return math.nan, ones
    rest = some[(some > FINITE)]
    apart = not len(rest) or float(some[low].max()) + _GAP <= float(rest.min())
    return (float(some[low].min()) if apart else math.nan), ones


def _ambiguous(seen: Visibility) -> bool:
    batch, heads = seen.shape[:2]
    x = seen.allowed
    if x is None or batch != heads or heads < 2 or x.shape[0] != 1 or x.shape[1] != heads:
        return False
    return bool((x != x[:, :1]).any())

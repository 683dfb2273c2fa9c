"""Masks that are not the ones configured, and models that look ahead.

What is certain is `wrong`; what only looks so is `look`. Rules and sources: docs/maths.md#masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from scaledot.findings import SHOWN, Finding, Layer, Result, in_layers, out_of
from scaledot.leakage import Leak
from scaledot.mask_check import MaskFacts, Shown
from scaledot.numerals import counted, number, small, weight

WEIGHS = 1e-6
"""Keys that a mask shows weigh something where one row gives them this; a −10,000 mask gives 0."""


def mask_faults(
    layers: Sequence[Layer], masks: Mapping[str, MaskFacts], leaks: Sequence[Leak]
) -> list[Result]:
    """What each check of the masks gives.

    masks: by path, as `Observation.masks`. leaks: what leakage.py found of the whole model.
    """
    seen = [(x, masks[x.path]) for x in layers if x.path in masks]
    causal = any(facts.causal for _, facts in seen)
    return [*(check(seen) for check in _MASKS), *(_leak(leak, causal) for leak in leaks)]


_Masks = Sequence[tuple[Layer, MaskFacts]]


def _mask_finding(
    id_: str, kind: Literal["wrong", "look", "note"], bad: _Masks, total: int, title: str,
    seen: str, means: str, heads: tuple[tuple[int, int], ...] | None = None,
) -> Finding:  # fmt: skip
    """A finding about masks; title goes before the layers it is about."""
    where = in_layers(x.index for x, _ in bad)
    return Finding(
        id_,
        kind,
        f"{title} in {out_of(len(bad), total, 'layer')}",
        where if heads is None or len(heads) > SHOWN else ", ".join(f"{a}.{b}" for a, b in heads),
        seen,
        means,
        f"{{audit}} --layers {bad[0][0].index}",
        "docs/maths.md#masks",
        tuple((x.index, h) for x, f in bad for h in range(len(f.rows))) if heads is None else heads,
    )


def _weighty(known: Sequence[tuple[Layer, MaskFacts, Shown]]) -> tuple[_Masks, Any, str]:
    """(layers that weigh what they may not see, the heads that do, how much)."""
    bad, heads, pairs, most, mass, rows = [], [], 0, 0.0, 0.0, 0
    for layer, facts, shown in known:
        some = [h for h, x in enumerate(shown.most.tolist()) if x >= WEIGHS]
        if some:
            bad.append((layer, facts))
            heads += [(layer.index, h) for h in some]
            pairs += sum(shown.pairs.tolist()[h] for h in some)
            mass += sum(shown.mass.tolist()[h] for h in some)
            rows += sum(facts.rows.tolist()[h] for h in some)
            most = max(most, *(shown.most.tolist()[h] for h in some))
    said = f"{pairs:,} (query, key) pairs; their weight in a row is {weight(mass / max(rows, 1))} "
    return bad, tuple(heads), f"{said}on average, {weight(most)} at most"


def _weightless(known: Sequence[tuple[Layer, MaskFacts, Shown]], noun: str) -> str:
    pairs = sum(int(shown.pairs.sum()) for _, _, shown in known)
    if not pairs:
        return f"none visible{noun}"
    most = max(float(shown.most.max()) for _, _, shown in known)
    return f"{pairs:,} visible pairs, of weight {'0' if not most else 'under 1e-6'}{noun}"


def _future_keys(masks: _Masks) -> Result:
    known = [(x, f, f.later) for x, f in masks if f.causal and f.later is not None]
    if not known:
        return None
    bad, heads, said = _weighty(known)
    if not bad:
        return "later keys", _weightless(known, f" in {out_of(len(known), len(masks), 'layer')}")
    return _mask_finding(
        "future", "wrong", bad, len(masks), "Queries see later keys", f"{said}; causal gives 0.",
        "The configuration means causal attention. Such a layer reads what the model is to "
        "predict: its loss says nothing about generation.",
        heads,
    )  # fmt: skip


def _padding_keys(masks: _Masks) -> Result:
    known = [(x, f, f.padding) for x, f in masks if f.padding is not None]
    if not known:
        return None
    bad, heads, said = _weighty(known)
    padded = max(f.padded for _, f, _ in known)
    if not bad:
        return "padding", _weightless(known, f"; {counted(padded, 'padding key')} a layer")
    sure = any(f.causal is not None and not f.own_mask for _, f in bad)
    return _mask_finding(
        "padding", "wrong" if sure else "look", bad, len(masks), "Queries see padding",
        f"{said}; attention_mask calls {counted(padded, 'key')} padding.",
        "A text's outputs then depend on what it is batched with.",
        heads,
    )  # fmt: skip


def _other_documents(masks: _Masks) -> Result:
    known = [(x, f, f.across) for x, f in masks if f.across is not None]
    if not known:
        return None
    bad, heads, said = _weighty(known)
    documents = max(f.documents for _, f, _ in known)
    if not bad:
        return "other documents", _weightless(known, f"; {counted(documents, 'document')}")
    sure = any(f.causal for _, f in bad)
    return _mask_finding(
        "documents", "wrong" if sure else "look", bad, len(masks),
        "Queries see keys of other packed documents",
        f"{said}; {counted(documents, 'document')} were packed.",
        "The positions begin again inside a row, so it holds several texts; the mask is of one. "
        "Each then continues the text before it. The loss falls all the same.",
        heads,
    )  # fmt: skip


def _windows(masks: _Masks) -> Result:
    known = [(x, f) for x, f in masks if f.window is not None and math.isnan(f.finite) and f.calls]
    if not known:
        return None
    reached = [(x, f) for x, f in known if bool(f.full.any())]
    bad = [
        (x, f) for x, f in reached if any(n and m != f.window for n, m in zip(
            f.full.tolist(), f.full_max.tolist(), strict=True))
    ]  # fmt: skip
    promised = ", ".join(str(w) for w in sorted({f.window or 0 for _, f in known}))
    if not bad:
        if not reached:
            return "window", f"{promised} keys configured; no text is that long"
        return (
            "window",
            f"{promised} keys as configured in {out_of(len(reached), len(masks), 'layer')}",
        )
    first = bad[0][1]
    kept = int(first.full_max.max())
    fewest = int(first.full_min.min())
    least = f" ({fewest} at least)" if fewest not in (kept, first.window) else ""
    sure = any(f.causal and not f.own_mask for _, f in bad)
    return _mask_finding(
        "window", "wrong" if sure else "look", bad, len(masks),
        "Queries see a window other than the configuration's",
        f"{counted(kept, 'key')}, the query's own included{least}"
        f"; {first.window} configured.",
        "W and W + 1 are confused where one counts the query's own key and the other does not."
        if abs(kept - (first.window or 0)) == 1
        else "The mask does not hold the window of this layer.",
    )  # fmt: skip


def _cache_alignment(masks: _Masks) -> Result:
    known = [(x, f) for x, f in masks if f.cached and f.alignment]
    if not known:
        return None
    bad = [(x, f) for x, f in known if "top_left" in f.alignment]
    if not bad:
        clear = all(f.alignment == {"bottom_right"} for _, f in known)
        ends = "the last query sees the last key" if clear else "no query is held to the first keys"
        return "cache", f"{ends} in {out_of(len(known), len(masks), 'layer')}"
    sure = any(f.causal for _, f in bad)
    return _mask_finding(
        "alignment", "wrong" if sure else "look", bad, len(masks),
        "A causal mask lines new queries up with the oldest keys",
        "Fewer queries than keys, and query i sees keys 0 to i: top-left, as torch's is_causal.",
        "With a cache the queries are the last tokens: bottom-right, the last sees every key.",
    )  # fmt: skip


def _mask_form(masks: _Masks) -> Result:
    if not masks:
        return None
    if bad := [(x, f) for x, f in masks if f.inverted]:
        padding = all(f.inverted == "padding" for _, f in bad)
        what = "padding and no token" if padding else "later keys and never the query's own"
        return _mask_finding(
            "inverted", "wrong", bad, len(masks), f"A mask shows {what}",
            "Nothing else is visible to any query that sees a key.",
            "The mask is inverted: True means \"may attend\" to scaled_dot_product_attention, and "
            "\"hide\" to nn.MultiheadAttention.",
        )  # fmt: skip
    if bad := [(x, f) for x, f in masks if f.zero_one]:
        return _mask_finding(
            "zero_one", "wrong", bad, len(masks), "An additive mask holds only 0 and 1",
            "Added to the scores, 1 against 0 hides nothing.",
            "A boolean mask was cast to float: pass mask.bool().",
        )  # fmt: skip
    return "mask form", "none inverted, none of 0 and 1"


def _finite_mask(masks: _Masks) -> Result:
    bad = [(x, f) for x, f in masks if not math.isnan(f.finite)]
    if not bad:
        return None
    return _mask_finding(
        "finite", "note", bad, len(masks), "A finite number stands for hidden in the mask",
        f"{number(min(f.finite for _, f in bad))} is added where a key is to be hidden.",
        "Beside ordinary scores such a key weighs 0, but it counts as visible here, and a row of "
        "nothing else is not empty.",
    )  # fmt: skip


def _mask_axes(masks: _Masks) -> Result:
    bad = [(x, f) for x, f in masks if f.ambiguous]
    if not bad:
        return None
    return _mask_finding(
        "axes", "look", bad, len(masks), "A mask of three axes could be read two ways",
        "Its first axis is as long as both the batch and the heads; torch reads it as heads.",
        "Were it one mask a text, pass mask[:, None]; one a head, mask[None].",
    )  # fmt: skip


_MASKS = (
    _future_keys, _padding_keys, _other_documents, _windows, _cache_alignment, _mask_form,
    _finite_mask, _mask_axes,
)  # fmt: skip


def _leak(leak: Leak, causal: bool) -> Result:
    """A leak from later tokens is a fault where the model is meant to be causal. Packing by
    positions that begin again was tried, not asked for: not to know it is a note."""
    future = leak.kind == "future"
    name = "a token changed" if future else "a document changed"
    moved = f"by {small(leak.movement)} of the largest output"
    allowed = f"rounding explains {small(leak.tolerance)}"
    if not leak.deterministic:
        return Finding(
            "repeat", "look", "The model gives two outputs for one input", "the whole model",
            f"The same input twice differs by {small(leak.repeat)} of the largest output.",
            "Something draws random numbers in eval mode, so nothing can be said of leaks.",
            "{audit}", "docs/maths.md#masks", (),
        )  # fmt: skip
    if not leak.found:
        what = "earlier outputs" if future else "the others' outputs"
        if not leak.movement:
            return name, f"{what} stay the same to the bit"
        return name, f"{what} move {moved}; {allowed}"
    if future and not causal:
        return name, f"earlier outputs move {moved}: not a causal model"
    if future:
        far = counted(leak.distance or 0, "token")
        return Finding(
            "future_leak", "wrong", "Earlier outputs move when a later token is changed",
            "the whole model",
            f"Token {leak.changed} was changed, and the output {far} before it moved; the largest "
            f"movement is {small(leak.movement)} of the largest output; {allowed}.",
            "A causal model's outputs depend on earlier tokens only.",
            "{audit}", "docs/maths.md#masks", (),
        )  # fmt: skip
    return Finding(
        "document_leak", "note", "Positions that begin again do not keep packed documents apart",
        "the whole model, on two documents in one row",
        f"Document {leak.changed} was changed, and document {leak.first} moved {moved}; {allowed}.",
        "Texts packed into one row would see each other here unless the model is given a mask.",
        "{audit}", "docs/maths.md#masks", (),
    )  # fmt: skip

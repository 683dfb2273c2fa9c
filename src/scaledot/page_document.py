"""The JSON form of what the page shows: a model, texts, and arrays that stages are computed from.

The same document is served piece by piece and inlined whole into a report. Arrays are
{"shape", "float32"}, base64 of little-endian numbers, the only place where NaN may stand.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaledot import ScaledotError, __version__
from scaledot.document import VERSION, clean, command_of
from scaledot.loading import EMBEDDED
from scaledot.scales import rule

if TYPE_CHECKING:
    from scaledot.exploring import Reading, Seen
    from scaledot.findings import Head
    from scaledot.gathered import Audit


def explore_document(
    model: Mapping[str, Any],
    readings: Mapping[str, Reading],
    *,
    commands: Callable[[str], Mapping[str, str] | None] | None = None,
    heads: Iterable[tuple[str, int, int]] = (),
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The page's document: a model, as `Explorer.about`, and texts by id, as `exploring.read` gave
    them, without arrays but for the (text, layer, head) named in `heads`.

    commands: as in `audit_document`, for each text. measured: what the numbers and findings are of,
    as `Audit.text` says it, where it is not the text that is shown.
    """
    document = {
        "format": "scaledot/page",
        "version": VERSION,
        "scaledot": __version__,
        "model": {"kind": model["architecture"]}
        | {k: x for k, x in model.items() if k != "architecture"},
        "texts": [
            _page_text(id, reading, model["d_model"], commands, measured)
            for id, reading in readings.items()
        ],
    }
    document = clean(document)
    wanted = list(heads)
    document["heads"] = {
        f"{text}/{layer}/{head}": head_arrays(readings[text], layer, head)
        for text, layer, head in wanted
    }
    document["contributions"] = {
        f"{text}/{layer}": added
        for text, layer in dict.fromkeys((text, layer) for text, layer, _ in wanted)
        if (added := layer_arrays(readings[text], layer)["contributions"]) is not None
    }
    document["results"] = {}
    return document


BUDGET = 104 << 10
"""Bytes of query, key and value in a report, about."""

FRAMED = 96 << 10
"""The same in a notebook, which keeps every output that it has shown."""


_MEASURED = ("texts", "windows", "tokens", "longest", "beyond", "chunk", "left_out")
"""What a report says of the audit's text."""


def report_document(
    audit: Audit, commands: Mapping[str, str] | None = None, *, budget: int = BUDGET
) -> dict[str, Any]:
    """An `Audit` as the page's document: its numbers and findings, and the stages of its example.

    commands: as in `audit_document`. budget: bytes that query, key and value may take.

    Raises: ScaledotError for an audit without an example.
    """
    example = audit.example
    if example is None:
        raise ScaledotError(
            "this audit has no example to show: its model could not read the text's first tokens"
        )
    from scaledot.exploring import mean_largest

    kept = {x.index for x in audit.layers}
    layers = tuple(
        replace(seen, largest=mean_largest(audit.stats[seen.layer.path]))
        for seen in example.layers
        if seen.layer.index in kept
    )
    reading = replace(
        example, layers=layers, heads=audit.heads, findings=audit.findings, following=None
    )
    model = {
        **{
            k: audit.model[k]
            for k in ("name", "architecture", "layers", "heads", "kv_heads", "d_k", "d_model")
        },
        "causal": all(x.causal for x in audit.layers),
        "context": audit.model["context"],
        "embedded": audit.model["name"] == EMBEDDED,
    }
    return _within(
        model, reading, budget, commands=lambda _: commands,
        measured={k: audit.text[k] for k in _MEASURED},
    )  # fmt: skip


def frame_document(model: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """The page's document of one reading, as small as a notebook wants it."""
    return _within(model, reading, FRAMED)


def _within(
    model: Mapping[str, Any], reading: Reading, budget: int, **options: Any
) -> dict[str, Any]:
    """A document with as many heads as fit: those that findings name first, then the widest; W_O's
    results have what is left. One head is there in any case, unless it alone takes ten times the
    budget."""
    named = [place for f in reading.findings for place in f.heads]
    widest = sorted(reading.heads, key=lambda h: -h.after if math.isfinite(h.after) else 0.0)
    sizes = {x.layer.index: _packed_size(x) for x in reading.layers if not x.missing}
    chosen: list[tuple[int, int]] = []
    left = budget
    for layer, head in dict.fromkeys([*named, *((h.layer, h.head) for h in widest)]):
        size = sizes.get(layer)
        if size is not None and (size <= left or (not chosen and size <= 10 * budget)):
            chosen.append((layer, head))
            left -= size
    document = explore_document(
        model, {"t1": reading}, heads=(("t1", *place) for place in sorted(chosen)), **options
    )
    rows = min(len(reading.tokens), RESULT_ROWS)
    for layer in sorted({layer for layer, _ in chosen}):
        told = result_arrays(reading, layer, 0, rows)
        size = 0 if told["result"] is None else len(told["result"]["float32"])
        if 0 < size <= left:
            document["results"][f"t1/{layer}"] = told
            left -= size
    document["included"] = {"heads": len(chosen), "of": len(reading.heads)}
    return document


def example_length(packed: int) -> int:
    """Tokens of an audit's example: few where each takes many bytes, so that a report holds many
    heads of it. packed: bytes a token, over all heads."""
    return min(max(BUDGET // max(packed, 1), 12), 64)


def _packed_size(seen: Seen) -> int:
    """Bytes that a head of a layer takes in a document."""
    assert seen.attended is not None  # its stages are shown
    p = seen.attended.problem
    queries, keys = p.query.shape[2], p.key.shape[2]
    wide = 0 if p.value is None else p.value.shape[3]
    square = queries * keys * (seen.sight.kind == "dense")
    return (queries * p.query.shape[3] + keys * (p.query.shape[3] + wide) + square) * 16 // 3


def _page_text(
    id: str, reading: Reading, d_model: int | None,
    commands: Callable[[str], Mapping[str, str] | None] | None,
    measured: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    from scaledot.tokens import languages

    of_head: dict[tuple[int, int], list[int]] = {}
    for number, finding in enumerate(reading.findings, 1):
        for place in finding.heads:
            of_head.setdefault(place, []).append(number)
    by_layer: dict[int, list[Head]] = {}
    for head in reading.heads:
        by_layer.setdefault(head.layer, []).append(head)
    spoken = languages([token.char or token.text for token in reading.tokens])
    following = reading.following
    named = None if commands is None else commands(reading.text)
    return {
        "id": id,
        "text": reading.text,
        "left_out": reading.left_out,
        "complete": reading.complete,
        "seconds": reading.seconds,
        "measured": None if measured is None else dict(measured),
        "tokens": [
            {"label": t.label, "text": t.text, "part": t.part, "char": t.char, "lang": lang}
            for t, lang in zip(reading.tokens, spoken, strict=True)
        ],
        "layers": [
            _page_layer(seen, by_layer[seen.layer.index], of_head, d_model)
            for seen in reading.layers
        ]
        + [
            {"index": len(reading.layers) + i, "path": path, "observed": why, "heads": []}
            for i, (path, why) in enumerate(reading.unobserved)
        ],
        "findings": [
            {
                "number": number,
                "id": f.id,
                "kind": f.kind,
                "title": f.title,
                "where": f.where,
                "seen": f.seen,
                "means": f.means,
                "next": command_of(f.next, named),
                "sure": "likely" if f.kind == "look" else "certain",
                "heads": f.heads,
            }
            for number, f in enumerate(reading.findings, 1)
        ],
        "next": following and {"tokens": following.tokens, "others": following.others},
    }


def layers_document(
    layers: Sequence[Seen], heads: Iterable[Head], d_model: int | None
) -> list[dict[str, Any]]:
    """Layers as they stand in the page's document, before any finding."""
    by_layer: dict[int, list[Head]] = {}
    for head in heads:
        by_layer.setdefault(head.layer, []).append(head)
    return clean([_page_layer(x, by_layer[x.layer.index], {}, d_model) for x in layers])


def _page_layer(
    seen: Seen, heads: list[Head], findings: Mapping[tuple[int, int], list[int]],
    d_model: int | None,
) -> dict[str, Any]:  # fmt: skip
    layer = seen.layer
    value = None if seen.attended is None else seen.attended.problem.value
    known = rule(layer.scale, layer.d_k, d_model) if math.isfinite(layer.scale) else None
    return {
        "index": layer.index,
        "path": layer.path,
        "d_k": layer.d_k,
        "value_dim": None if value is None else value.shape[-1],
        "scale": layer.scale,
        "rule": known and {"name": known.name, "value": known.value},
        "softcap": layer.softcap,
        "mask": {"kind": seen.sight.kind, "window": seen.sight.window},
        "observed": seen.missing or True,
        "heads": [
            {
                "index": h.head,
                "kv_head": h.kv_head,
                "score_var": h.after,
                "score_var_raw": h.before,
                "score_var_within": h.within,
                "entropy": h.entropy,
                "normalised_entropy": h.normalised_entropy,
                "effective_keys": h.keys,
                "largest_weight": float(seen.largest[h.head]),
                "gradient": h.gradient,
                "saturated": h.saturated,
                "max_score": h.largest,
                "role": _page_role(h),
                "findings": findings.get((h.layer, h.head), []),
            }
            for h in heads
        ],
    }


_LETTERS = {
    "previous": "P", "next": "N", "first": "S", "induction": "I", "current": "C", "duplicate": "D",
    "delimiter": "M", "local": "L",
}  # fmt: skip
"""Roles as the page's grid shows them: S a sink, C its own token, D the same token earlier, M marks
that divide a text, L near tokens. B is a broad head."""


def _page_role(head: Head) -> dict[str, Any] | None:
    """The strongest role; of a head without one, whether it is broad."""
    roles = head.profile.roles
    if roles.called:
        strongest = roles.called[0]
        letter = _LETTERS[strongest.name.partition(".")[0]]
        return {"letter": letter, "name": strongest.name, "strength": strongest.strength}
    if roles.broad:
        return {"letter": "B", "name": "broad", "strength": head.normalised_entropy}
    return None


def head_arrays(reading: Reading, layer: int, head: int) -> dict[str, Any]:
    """What a head's stages are computed from: query and key as QKᵀ takes them, its kv head's value,
    its sink, and what of mask and bias no name says.

    Raises: LookupError for a layer or head that is not there.
    """
    from scaledot.exploring import bias_of, hidden_of

    seen = _seen(reading, layer)
    if seen.attended is None:
        raise LookupError(f"layer {layer} shows no stages: {seen.missing}")
    p = seen.attended.problem
    if not 0 <= head < p.query.shape[1]:
        raise LookupError(f"layer {layer} has heads 0 to {p.query.shape[1] - 1}")
    kv = head // p.group
    dense = seen.sight.kind == "dense"
    bias = bias_of(seen.attended.seen, head)
    return {
        "query": packed_array(p.query[0, head]),
        "key": packed_array(p.key[0, kv]),
        "value": None if p.value is None else packed_array(p.value[0, kv]),
        "sink": None if p.sinks is None else float(p.sinks[head]),
        "hidden": packed_array(hidden_of(seen.attended.seen, head)[0]) if dense else None,
        "bias": None if bias is None else packed_array(bias),
    }


def layer_arrays(reading: Reading, layer: int) -> dict[str, Any]:
    """What each head of a layer adds to each query; None where no W_O was found.

    Raises: LookupError for a layer that is not there.
    """
    made = _seen(reading, layer).projected
    return {"contributions": None if made is None else packed_array(made.lengths)}


RESULT_ROWS = 128
"""Queries of W_O's result that are given at once."""


def result_arrays(reading: Reading, layer: int, first: int, last: int) -> dict[str, Any]:
    """What W_O gives for the queries first … last − 1 of a layer, None where no W_O was found;
    whether a bias is in it; and the largest magnitude of all queries, for one range of colours.

    Raises: LookupError for a layer or queries that are not there, or too many at once.
    """
    made = _seen(reading, layer).projected
    queries = len(reading.tokens)
    if not 0 <= first < last <= queries or last - first > RESULT_ROWS:
        raise LookupError(f"this text has queries 0 to {queries - 1}, {RESULT_ROWS} at once")
    if made is None:
        return {"result": None, "biased": False, "largest": 0.0}
    largest = float(made.result.abs().nan_to_num(0.0, 0.0).max())
    return {
        "result": packed_array(made.result[first:last]),
        "biased": made.biased,
        "largest": largest,
    }


def _seen(reading: Reading, layer: int) -> Seen:
    for seen in reading.layers:
        if seen.layer.index == layer:
            return seen
    raise LookupError(f"this text has layers 0 to {len(reading.layers) - 1}")


def packed_array(x: Tensor) -> dict[str, Any]:
    """A tensor as its shape and its float32 values, little-endian, in base64."""
    data = x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return {"shape": list(x.shape), "float32": base64.b64encode(data.tobytes()).decode("ascii")}

"""The one versioned JSON form of results: what terminal, page and report read.

Plain dicts of numbers, strings and lists; NaN and ±inf become null, so any JSON reader takes them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaledot import ScaledotError, __version__, heads
from scaledot.lab.results import Estimate
from scaledot.loading import EMBEDDED
from scaledot.scales import rule
from scaledot.whatif import CAVEAT

if TYPE_CHECKING:
    from scaledot.auditing import Audit
    from scaledot.conformance import Report
    from scaledot.exploring import Reading, Seen
    from scaledot.findings import Head, Layer
    from scaledot.heads import HeadStats
    from scaledot.lab.results import Result, Value
    from scaledot.observation import Observation
    from scaledot.stages import Trace

VERSION = 1

_UNWRITTEN = ("chance.", "whatif.")
"""Measures of which a document holds what they add up to, in a head's roles and whatif."""


def audit_document(audit: Audit, commands: Mapping[str, str] | None = None) -> dict[str, Any]:
    """An `Audit` as a document: every head, histogram and finding.

    `commands` are what stands for {audit} and {trace} in a finding's next command; without the
    second the head's file is named in its place, and without either, as for an audit that no
    command line made, nothing.
    """
    by_path = {x.path: audit.stats[x.path] for x in audit.layers}
    place = {x.index: x for x in audit.layers}
    theory = None
    if audit.theory is not None:
        theory = {"after": 1.0, **asdict(audit.theory), "chance": _chance(audit.heads)}
    return _clean(
        {
            "format": "scaledot/audit",
            "version": VERSION,
            "scaledot": __version__,
            "complete": audit.complete,
            "model": dict(audit.model),
            "scales": _scales(audit.layers, audit.model.get("d_model")),
            "text": dict(audit.text),
            "run": dict(audit.run),
            "theory": theory,
            "layers": [_layer(x) for x in audit.layers],
            "heads": [_head(h, by_path[place[h.layer].path]) for h in audit.heads],
            "edges": _edges(audit.stats.values()),
            "findings": [asdict(f) | {"next": _command(f.next, commands)} for f in audit.findings],
            "checked": [{"name": name, "result": result} for name, result in audit.checked],
            "commands": dict(commands or {}),
        }
    )


def _command(form: str, commands: Mapping[str, str] | None) -> str | None:
    """A finding's next command as it can be typed, None where none can."""
    if commands is None:
        return None
    if "{trace}" in form and "trace" not in commands:
        _, _, layer, _, head = form.split()  # {trace} --layer L --head H
        form = f"{{audit}} --head {layer}.{head}"
    return form.format(**commands)


def heads_document(seen: Observation) -> dict[str, Any]:
    """The heads of an `Observation`, in the form of an audit without text or findings."""
    from scaledot.findings import heads_of

    found = [
        _head(h, stats)
        for layer, stats in enumerate(seen.heads.values())
        for h in heads_of(stats, layer)
    ]
    paths = [{"index": i, "path": path} for i, path in enumerate(seen.heads)]
    return _clean({"format": "scaledot/heads", "version": VERSION, "layers": paths, "heads": found})


def trace_document(trace: Trace, **about: Any) -> dict[str, Any]:
    """A `Trace` of one head as a document; of several, the first batch's first head, said so.

    `about` adds model, text, layer, head and kv_head where they are known.

    Raises: ValueError for a trace without batches or heads.
    """
    d_k = trace.query.shape[-1]
    known = rule(trace.scale, d_k)
    lead = trace.scores.shape[:-2]
    first = (0,) * len(lead)
    if 0 in lead:
        raise ValueError(f"nothing to show: the trace has shape {tuple(trace.scores.shape)}")
    visible = trace.visible[first]
    stages = []
    for name in ("scores", "scaled", "capped", "masked", "weights", "dropped", "output"):
        x = getattr(trace, name)
        if x is None:
            continue
        x = x[first].double()
        matrix = x.tolist()
        if name == "masked":
            matrix = [["-inf" if v == -math.inf else v for v in row] for row in matrix]
        stage: dict[str, Any] = {"name": name, "shape": list(x.shape), "matrix": matrix}
        if name in ("scores", "scaled") and visible.any():
            stage["variance"] = float(x[visible].var(correction=0))
            stage["theory"] = float(d_k) if name == "scores" else d_k * trace.scale**2
        stages.append(stage)
    keys = trace.rows.entropy[first].exp().tolist()
    return _clean(
        {
            "format": "scaledot/trace",
            "version": VERSION,
            "shape": list(trace.scores.shape),
            "model": None,
            "text": None,
            "layer": None,
            "head": None,
            "kv_head": None,
            "d_k": d_k,
            "tokens": list(trace.tokens) if trace.tokens is not None else None,
            "causal": _is_causal(visible),
            "scale": trace.scale,
            "rule": known.name if known else None,
            "value": known.value if known else None,
            "softcap": trace.softcap,
            "sink": float(trace.sinks[0]) if trace.sinks is not None and len(trace.sinks) else None,
            "hidden": int((~visible).sum()),
            "stages": stages,
            "visible": visible.tolist(),
            "keys": keys,
            **about,
        }
    )


def check_document(report: Report) -> dict[str, Any]:
    """A `Report` of `check` as a document: every property, ok or not."""
    return _clean(
        {
            "format": "scaledot/check",
            "version": VERSION,
            "scaledot": __version__,
            "function": report.function,
            "layout": report.layout,
            "device": report.device,
            "dtype": report.dtype,
            "ok": report.ok,
            "properties": [asdict(p) for p in report.properties],
        }
    )


def lab_document(result: Result) -> dict[str, Any]:
    """What an experiment of the laboratory found as a document: tables, sentences and figures. An
    estimate becomes its value, error, theory and z."""

    def plain(value: Value) -> Any:
        if isinstance(value, Estimate):
            return asdict(value) | {"z": value.z}
        return value

    return _clean(
        {
            "format": "scaledot/lab",
            "version": VERSION,
            "scaledot": __version__,
            "experiment": result.experiment,
            "about": result.about,
            "settings": dict(result.settings),
            "lines": list(result.lines),
            "tables": [
                {
                    "title": table.title,
                    "by": table.by,
                    "shown": None if table.shown is None else list(table.shown),
                    "columns": [asdict(column) for column in table.columns],
                    "rows": [{k: plain(v) for k, v in row.items()} for row in table.rows],
                }
                for table in result.tables
            ],
            "says": list(result.says),
            "panels": [asdict(panel) for panel in result.panels],
            "source": result.source,
        },
        digits=17,
    )


def explore_document(
    model: Mapping[str, Any],
    readings: Mapping[str, Reading],
    *,
    commands: Callable[[str], Mapping[str, str] | None] | None = None,
    heads: Iterable[tuple[str, int, int]] = (),
    measured: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The page's document: a model, as `Explorer.about`, and texts by id, as `exploring.read` gave
    them, without arrays but for the (text, layer, head) named in `heads`.

    commands: as in `audit_document`, for each text. measured: on how many texts, windows and tokens
    the numbers and findings are, where it is not the text that is shown.
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
    document = _clean(document)
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
        measured={k: audit.text[k] for k in ("texts", "windows", "tokens")},
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
    measured: Mapping[str, int] | None,
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
                "next": _command(f.next, named),
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
    return _clean([_page_layer(x, by_layer[x.layer.index], {}, d_model) for x in layers])


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
        "query": _array(p.query[0, head]),
        "key": _array(p.key[0, kv]),
        "value": None if p.value is None else _array(p.value[0, kv]),
        "sink": None if p.sinks is None else float(p.sinks[head]),
        "hidden": _array(hidden_of(seen.attended.seen, head)[0]) if dense else None,
        "bias": None if bias is None else _array(bias),
    }


def layer_arrays(reading: Reading, layer: int) -> dict[str, Any]:
    """What each head of a layer adds to each query; None where no W_O was found.

    Raises: LookupError for a layer that is not there.
    """
    made = _seen(reading, layer).projected
    return {"contributions": None if made is None else _array(made.lengths)}


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
    return {"result": _array(made.result[first:last]), "biased": made.biased, "largest": largest}


def _seen(reading: Reading, layer: int) -> Seen:
    for seen in reading.layers:
        if seen.layer.index == layer:
            return seen
    raise LookupError(f"this text has layers 0 to {len(reading.layers) - 1}")


def _array(x: Tensor) -> dict[str, Any]:
    """A tensor as its shape and its float32 values, little-endian, in base64."""
    data = x.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return {"shape": list(x.shape), "float32": base64.b64encode(data.tobytes()).decode("ascii")}


def dump(document: Mapping[str, Any]) -> bytes:
    """A document as UTF-8 JSON."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def load(path: str | Path) -> dict[str, Any]:
    """Read a saved audit. Raises ScaledotError if the file is not one of this version."""
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ScaledotError(f"cannot read {path}: {(error.strerror or '').lower()}") from None
    except ValueError:
        raise ScaledotError(f"{path} is not a saved audit: not whole JSON") from None
    kind = document.get("format") if isinstance(document, dict) else None
    if kind != "scaledot/audit":
        raise ScaledotError(f"{path} is not a saved audit: no format 'scaledot/audit'")
    if document.get("version") != VERSION:
        raise ScaledotError(
            f"{path} is of version {document.get('version')}, this scaledot reads {VERSION}: "
            "run the audit again"
        )
    return document


def _head(head: Head, stats: HeadStats) -> dict[str, Any]:
    row = asdict(head)
    chance = row.pop("chance")
    row |= row.pop("profile")
    row["roles"]["prefix_matching"] = row.pop("prefix_matching")
    if row["whatif"] is not None:
        row["whatif"]["holds"] = CAVEAT
    row["rows"] = {"total": row["rows"].pop("rows"), **row["rows"]}
    attends = head.attends
    row["room"] = head.room
    row["chance"] = chance
    row["attends"] = (
        None if attends is None else {"to": attends[0], "mass": attends[1], "chance": attends[2]}
    )
    moments, histograms = {}, {}
    for name, m in stats.measures.items():
        if name.startswith(_UNWRITTEN):
            continue
        h = head.head if len(m.count) == stats.heads else head.kv_head
        moments[name] = {
            "count": int(m.count[h]),
            "mean": float(m.average[h]),
            "sd": float(m.var[h].sqrt()),
            "min": float(m.minimum[h]),
            "max": float(m.maximum[h]),
        }
        bins = m.histogram[h]
        used = bins.nonzero()[:, 0]
        if len(used):
            first, last = int(used[0]), int(used[-1])
            histograms[name] = {"first": first, "counts": bins[first : last + 1].tolist()}
    return {**row, "moments": moments, "histograms": histograms}


def _edges(stats: Iterable[HeadStats]) -> dict[str, Any]:
    """Bin edges of every histogram that is written."""
    written = {name for s in stats for name in s.measures if not name.startswith(_UNWRITTEN)}
    return {
        name: [None, *edges.tolist(), None]
        for name, edges in heads.EDGES.items()
        if name in written
    }


def _layer(layer: Layer) -> dict[str, Any]:
    return asdict(layer)


def _scales(layers: tuple[Layer, ...], d_model: int | None) -> list[dict[str, Any]]:
    """Layers grouped by the factor applied, each with its name and what the configuration gives."""
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for x in layers:
        given = x.configured
        groups.setdefault(
            (x.scale, x.d_k, given and given.scale, given and given.source), []
        ).append(x)
    result = []
    for (scale, d_k, given, source), members in groups.items():
        known = rule(scale, d_k, d_model) if math.isfinite(scale) else None
        result.append(
            {
                "scale": scale,
                "rule": known.name if known else None,
                "value": known.value if known else None,
                "layers": [x.index for x in members],
                "read_from": "attention call",
                "configured": given,
                "configured_from": source,
            }
        )
    return result


def _chance(found: tuple[Head, ...]) -> dict[str, float]:
    """The mean chance level of each position, over heads that have one."""
    result = {}
    for name in ("first", "previous", "current", "next"):
        known = [h.chance[name] for h in found if not math.isnan(h.chance[name])]
        result[name] = sum(known) / len(known) if known else math.nan
    return result


def _is_causal(visible: Any) -> bool:
    """Square, and no query sees a later key."""
    queries, keys = visible.shape
    return bool(queries == keys > 1 and not visible.triu(1).any())


def _clean(x: Any, digits: int = 9) -> Any:
    """The same with NaN and ±inf as null and tuples as lists. Nine digits carry a float32 exactly;
    more would only make the file longer, but for what float64 alone holds, which takes 17."""
    if isinstance(x, dict):
        return {k: _clean(v, digits) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_clean(v, digits) for v in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x

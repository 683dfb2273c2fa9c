"""The one versioned JSON form of results: what terminal, page and report read.

Plain dicts of numbers, strings and lists; NaN and ±inf become null, so any JSON reader takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaledot import ScaledotError, __version__, heads
from scaledot.lab.results import Estimate
from scaledot.scales import rule
from scaledot.whatif import CAVEAT

if TYPE_CHECKING:
    from scaledot.conformance import Report
    from scaledot.findings import Head, Layer
    from scaledot.gathered import Audit
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
    return clean(
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
            "findings": [
                asdict(f) | {"next": command_of(f.next, commands)} for f in audit.findings
            ],
            "checked": [{"name": name, "result": result} for name, result in audit.checked],
            "commands": dict(commands or {}),
        }
    )


def command_of(form: str, commands: Mapping[str, str] | None) -> str | None:
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
    return clean({"format": "scaledot/heads", "version": VERSION, "layers": paths, "heads": found})


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
    return clean(
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
    return clean(
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

    return clean(
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
            "mean": m.of_head(h),
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


def clean(x: Any, digits: int = 9) -> Any:
    """The same with NaN and ±inf as null and tuples as lists. Nine digits carry a float32 exactly;
    more would only make the file longer, but for what float64 alone holds, which takes 17."""
    if isinstance(x, dict):
        return {k: clean(v, digits) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [clean(v, digits) for v in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x

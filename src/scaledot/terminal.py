"""Results as people read them in a terminal. Reads documents only (plain dicts, see ``document``),
so a saved audit prints again without its model.

Here are the screens of an audit: header, one head in full, findings, what to type next. Its table
and grid are in ``head_table``, the stages of a trace in ``trace_table``, what all screens share in
``screen``.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from scaledot.head_table import STATISTICS, head_label, print_statistics, print_table
from scaledot.numerals import count, counted, fraction, number, ranges, seconds, size
from scaledot.screen import Page, Part, console, pad, point, printed, progress, wrap, wrap_command
from scaledot.trace_table import print_trace, trace_html, trace_text

__all__ = [
    "STATISTICS",
    "audit_text",
    "console",
    "print_audit",
    "print_heads",
    "print_trace",
    "progress",
    "trace_html",
    "trace_text",
]

Doc = Mapping[str, Any]

KIND_STYLE = {"wrong": "red", "look": "yellow", "note": "cyan"}


def print_audit(
    console: Console,
    doc: Doc,
    *,
    show: str = "after",
    table: bool = False,
    head: tuple[int, int] | None = None,
    layers: Collection[int] | None = None,
    next_commands: Sequence[Sequence[str]] = (),
    wrote: tuple[str, int] | None = None,
) -> None:
    """Prints an audit document: header, heads, findings, what was checked, what to type next.

    Up to 40 heads, or with ``table``, each has a row; more, or another statistic in ``show`` (one
    of STATISTICS), a grid of layers × heads. ``head`` (layer, head) prints that one in full
    instead. ``layers`` narrows the heads shown. ``next_commands`` are (command, what it shows)
    pairs; ``wrote`` is the saved file's (path, bytes).

    Raises: ValueError if there is no such head or statistic.
    """
    heads = [h for h in doc["heads"] if layers is None or h["layer"] in layers]
    findings: Sequence[Doc] = doc.get("findings", ())
    one = [h for h in doc["heads"] if head and (h["layer"], h["head"]) == tuple(head)]
    if head and not one:
        ends = (ranges(sorted({h[axis] for h in doc["heads"]})) for axis in ("layer", "head"))
        raise ValueError("no head {}.{}: this audit has layers {}, heads {}".format(*head, *ends))
    with Page(console) as page:
        page.title("audit", doc["model"]["name"], f"head {head_label(one[0])}" if one else "")
        _header(page, doc)
        if one:
            _one_head(page, doc, one[0])
            _findings(page, [f for f in findings if list(head or ()) in map(list, f["heads"])])
        else:
            print_statistics(page, doc, heads, show, table, legend=True)
            _findings(page, findings)
            _checked(page, doc.get("checked", ()))
        _footer(page, doc, next_commands, wrote)


def audit_text(doc: Doc, width: int = 100) -> str:
    """What :func:`print_audit` prints, without colour."""
    return printed(lambda plain: print_audit(plain, doc), width)


def print_heads(console: Console, doc: Doc) -> None:
    """Prints only the statistics of the heads: the audit's table, or its grid if there are many.
    The document needs ``heads``; ``layers`` and ``theory`` are used where present."""
    with Page(console) as page:
        print_statistics(page, doc, doc["heads"], "after", table=False, legend=False)


# The header


def _header(page: Page, doc: Doc) -> None:
    text, run = doc["text"], doc["run"]
    page.field("model", _model(doc))
    for i, pieces in enumerate(_scales(doc)):
        page.field("" if i else "scale", pieces)
    kinds = _kinds(doc["layers"])
    if len(kinds) > 1:
        page.field("layers", [f"{kind} {ranges(layers)}" for kind, layers in kinds.items()])
    page.field("text", _text(text))
    threads = f", {counted(run['threads'], 'thread')}" if run.get("threads") else ""
    device = f"{run['device']}{threads}"
    page.field("run", [f"kernel {run['kernel']}", run["dtype"], device, seconds(run["seconds"])])
    if doc["model"].get("unobserved"):
        page.field("unseen", [f"not observed: {', '.join(doc['model']['unobserved'])}"])
    if not doc.get("complete", True):
        done = f"the table is exact for these {count(text['tokens'])} tokens"
        page.field("stopped", ["before the end of the text", done])
    page.line()


def _model(doc: Doc) -> list[str | None]:
    model = doc["model"]
    layers = counted(model["layers"], "layer")
    heads = f"{counted(len(doc['heads']), 'head')} in {layers}"
    if model["heads"]:
        heads = f"{layers} × {counted(model['heads'], 'head')}"
        if model["kv_heads"] and model["kv_heads"] != model["heads"]:
            heads += f" on {counted(model['kv_heads'], 'kv head')}"
    d_k = ", ".join(str(d) for d in sorted({layer["d_k"] for layer in doc["layers"]}))
    return [
        model["architecture"],
        heads,
        f"d_k {d_k}" if d_k else None,
        f"d_model {model['d_model']}" if model["d_model"] else None,
        "layers share weights" if model["shares_weights"] else None,
    ]


def _scales(doc: Doc) -> list[list[str]]:
    """For each scale applied: how large, where, from where it was read, what the config says."""
    scales, lines = doc["scales"], []
    unit = "call" if doc["model"]["shares_weights"] else "layer"
    for scale in scales if len(scales) <= 5 else scales[:4]:
        where = f"every {unit}"
        if len(scales) > 1:
            where = f"{counted(len(scale['layers']), unit)}: {ranges(sorted(scale['layers']))}"
        rule = f" = {scale['rule']}" if scale.get("rule") else ""
        configured = scale.get("configured")
        if configured is None:
            config = "config says nothing"
        elif math.isclose(configured, scale["scale"], rel_tol=1e-3):
            config = "config agrees"
        else:
            config = f"config gives {configured:.4g}"
        read = f"read from the {scale['read_from']}; {config}"
        lines.append([f"× {scale['scale']:.4g}{rule} in {where}", read])
    if len(scales) > 5:
        rest = sorted(scale["scale"] for scale in scales[4:])
        lines.append([f"{len(rest)} more, × {rest[0]:.4g} to {rest[-1]:.4g}"])
    caps = sorted({layer["softcap"] for layer in doc["layers"] if layer.get("softcap")})
    if caps and lines:
        lines[-1].append(f"then soft-cap {', '.join(f'{cap:g}' for cap in caps)}")
    return lines


def _kinds(layers: Sequence[Doc]) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for layer in layers:
        kind = "causal" if layer.get("causal") else layer.get("kind", "self")
        kind += f" with window {layer['window']}" if layer.get("window") else ""
        kinds.setdefault(kind, []).append(layer["index"])
    return kinds


def _text(text: Doc) -> list[str | None]:
    sees = {"causal": "causal", "mixed": "some layers causal"}.get(text["attention"])
    if not sees:
        whole_text = f"all {text['tokens']}" if text["windows"] == 1 else "its whole window"
        sees = f"every token sees {whole_text}"
    return [
        counted(text["texts"], "text"),
        counted(text["windows"], "window") if text["windows"] != text["texts"] else None,
        counted(text["tokens"], "token"),
        sees,
        f"{counted(text['scores'], 'score')} a head",
        f"{counted(text['skipped'], 'text')} skipped" if text.get("skipped") else None,
    ]


# One head


# Measures from 0 to 1, whose ends are never reached by rounding.
_SHARES = {"normalised_entropy", "collision", "jacobian_trace", "sink_mass"}


def _one_head(page: Page, doc: Doc, head: Doc) -> None:
    layer: Doc = next((one for one in doc["layers"] if one["index"] == head["layer"]), {})
    rows = head["rows"]
    page.field(
        "layer",
        [
            layer.get("path"),
            "causal" if layer.get("causal") else layer.get("kind"),
            f"kv head {head['kv_head']}" if layer.get("kv_heads") != layer.get("heads") else None,
            f"× {layer['scale']:.4g}" if layer.get("scale") else None,
        ],
    )
    named = (("empty", "empty"), ("nonfinite", "non-finite"), ("padding", "padding"))
    page.field(
        "rows",
        [
            count(rows["total"]),
            *(f"{count(rows[key])} {name}" for key, name in named),
            f"{count(rows['single'])} with a single key",
        ],
    )
    page.line()
    print_table(page, doc, [head])
    if head.get("moments"):
        _measures(page, doc, head)


def _measures(page: Page, doc: Doc, head: Doc) -> None:
    """Every measure over the rows: moments exact, quantiles as fine as the histogram's bins."""
    widths = {"mean": 9, "sd": 9, "min": 9, "max": 9, "5 %": 9, "median": 9, "95 %": 9, "±": 8}
    spark, name_width = 14, max(map(len, head["moments"])) + 2
    for name in ("5 %", "95 %", "min", "max", "sd", "±", "spark"):
        if name_width + sum(widths.values()) + 3 + spark <= page.width:
            break
        spark = -3 if name == "spark" else spark
        widths.pop(name, None)
    heading = "".join(name.rjust(width) for name, width in widths.items())
    page.line(
        ("  measure".ljust(name_width) + heading, "bold"), "   over rows" if spark > 0 else ""
    )
    for name, moments in head["moments"].items():
        histogram = head["histograms"].get(name, {"first": 0, "counts": []})
        quantiles, bars = _quantiles(doc["edges"].get(name, ()), histogram, moments)
        values = moments | quantiles
        cells = [_full(page, values.get(key), name, width) for key, width in widths.items()]
        drawn = f"   {_spark(bars, spark)}" if spark > 0 else ""
        page.line((f"  {name}".ljust(name_width), "cyan"), "".join(cells), drawn)
    page.line()
    quantiles_shown = ", ".join(name for name in ("5 %", "median", "95 %") if name in widths)
    right = ", right to ±" if "±" in widths else ""
    note = f"{quantiles_shown}: the middle of a histogram's bin{right}; the rest is exact"
    page.text(["  "], note, 2, "dim")
    page.line()


def _full(page: Page, x: float | None, measure: str, width: int) -> str:
    """A number of a head in full: here small ones are worth their digits, ``1.6e−4``."""
    text = fraction(x) if measure in _SHARES else number(x)
    if x is not None and 0 < abs(x) < 0.005:
        text = f"{x:.1e}".replace("e-0", "e−").replace("-", "−")
    return point(page.say(text), width)


def _quantiles(
    edges: Sequence[float | None], histogram: Doc, moments: Doc
) -> tuple[dict[str, float], list[int]]:
    """The quantiles with their largest half bin as ``±``, and the counts."""
    counts, first = histogram["counts"], histogram["first"]
    low = -math.inf if moments["min"] is None else moments["min"]
    high = math.inf if moments["max"] is None else moments["max"]
    total = sum(counts)
    result: dict[str, float] = {}
    for name, q in (("5 %", 0.05), ("median", 0.5), ("95 %", 0.95)):
        seen = 0
        for i, n in enumerate(counts):
            seen += n
            if n and seen >= q * total:
                # Open ends and what no row reached are cut off.
                left, right = (
                    end if edge is None or not math.isfinite(edge) else min(max(edge, low), high)
                    for edge, end in ((edges[first + i], low), (edges[first + i + 1], high))
                )
                result[name] = (left + right) / 2
                result["±"] = max(result.get("±", 0.0), (right - left) / 2)
                break
    return result, counts


def _spark(counts: Sequence[int], width: int) -> str:
    """A histogram of at most that many cells, none so full that it meets the row above."""
    size = max(math.ceil(len(counts) / width), 1)
    sums = [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
    top = max(sums, default=0)
    return "".join(" ▁▂▃▄▅▆▇"[max(round(7 * n / top), 1) if n else 0] for n in sums)


# Findings and what to do next


def _findings(page: Page, findings: Sequence[Doc]) -> None:
    if not findings:
        page.line(("Findings", "bold"), "   none")
        page.line()
        return
    page.line(("Findings", "bold"))
    page.line()
    deep, label = (10, 8) if page.width >= 60 else (4, 8)
    for i, finding in enumerate(findings, 1):
        kind = finding["kind"]
        number_and_kind: list[Part] = [f"{i:>3} ", (f"{kind:<6}", KIND_STYLE.get(kind, ""))]
        page.text(number_and_kind, finding["title"], 10, "bold")
        for name in ("where", "seen", "means", "next", "source"):
            if not finding.get(name):
                continue
            beside: list[Part] = [" " * deep, (f"{name:<{label}}", "dim")]
            if name == "next":
                command = page.say(finding[name])
                room = page.text_width - deep - label
                page.hang(beside, wrap_command(command, room), deep + label, "bold")
            else:
                page.text(beside, finding[name], deep + label)
        page.line()


def _checked(page: Page, checked: Sequence[Doc]) -> None:
    page.line(("Checked, nothing found", "bold"))
    longest = max((cell_len(page.say(check["name"])) for check in checked), default=0)
    width = min(longest, page.text_width // 2) + 3
    for check in checked:
        name = pad(page.cut(check["name"], width - 3), width)
        page.text([f"  {name}"], check["result"], width + 2)
    if not checked:
        page.line("  none: every check found something")
    page.line()


def _footer(
    page: Page,
    doc: Doc,
    next_commands: Sequence[Sequence[str]],
    wrote: tuple[str, int] | None,
) -> None:
    if wrote:
        holds = f"({size(wrote[1])}: every head, histogram and finding)"
        if not doc.get("complete", True):
            holds = '("complete": false)'
        path = page.say(wrote[0])
        if cell_len(f"Wrote {path} {holds}") <= page.width:
            page.line("Wrote ", (path, "bold"), f" {holds}")
        else:
            page.hang(["Wrote "], wrap(path, page.width - 6), 6, "bold")
            page.text(["      "], holds, 6)
    commands = [(page.say(command), page.say(what)) for command, what in next_commands]
    lengths = [(cell_len(command), cell_len(what)) for command, what in commands]
    fitting = [length for length, what in lengths if 6 + length + 3 + what <= page.width]
    column = max(fitting, default=0) + 3
    for i, (command, what) in enumerate(commands):
        start = "Next  " if i == 0 else "      "
        if 6 + column + cell_len(what) <= page.width and cell_len(command) < column:
            page.line(start, (pad(command, column), "bold"), (what, "dim"))
        else:
            page.hang([start], wrap_command(command, page.width - 6), 6, "bold")
            page.text(["        "], what, 8, "dim")

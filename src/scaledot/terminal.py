"""Results as people read them in a terminal. Reads documents only (plain dicts, see ``document``),
so a saved audit prints again without its model.

Here are the screens of an audit: header, one head in full, findings, what to type next. Its table
is in ``head_table``, its grid in ``head_grid``, the stages of a trace in ``trace_table``, the
verdict on a function in ``check_table``, an experiment of the laboratory in ``lab_table``, what all
screens share in ``screen``.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from scaledot.check_table import check_text, print_check
from scaledot.head_file import print_head, print_measures
from scaledot.head_grid import STATISTICS, NotHereError, print_statistics
from scaledot.head_table import head_label
from scaledot.lab_table import lab_text, print_lab
from scaledot.numerals import count, counted, ranges, seconds, size
from scaledot.screen import Page, Part, console, pad, printed, progress, wrap, wrap_command
from scaledot.trace_table import print_trace, trace_html, trace_text

__all__ = [
    "STATISTICS",
    "NotHereError",
    "audit_text",
    "check_text",
    "console",
    "lab_text",
    "print_audit",
    "print_check",
    "print_heads",
    "print_lab",
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

    Raises: NotHereError, a ValueError, if there is no such head or statistic.
    """
    heads = [h for h in doc["heads"] if layers is None or h["layer"] in layers]
    findings: Sequence[Doc] = doc.get("findings", ())
    one = [h for h in doc["heads"] if head and (h["layer"], h["head"]) == tuple(head)]
    if head and not one:
        ends = (ranges(sorted({h[axis] for h in doc["heads"]})) for axis in ("layer", "head"))
        raise NotHereError("no head {}.{}: this audit has layers {}, heads {}".format(*head, *ends))
    with Page(console) as page:
        page.title("audit", doc["model"]["name"], f"head {head_label(one[0])}" if one else "")
        _header(page, doc)
        if one:
            print_head(page, doc, one[0])
            _findings(page, [f for f in findings if list(head or ()) in map(list, f["heads"])])
            print_measures(page, doc, one[0])
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
            if "beforehand" in (scale.get("configured_from") or ""):
                config = "as configured: q carries its scale beforehand"
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
    sees = {
        "causal": "causal",
        "mixed": "some layers causal",
        "masked": "some keys hidden",
    }.get(text["attention"])
    if not sees:
        whole_text = f"all {text['tokens']}" if text["windows"] == 1 else "its whole window"
        sees = f"every token sees {whole_text}"
    return [
        counted(text["texts"], "text"),
        counted(text["windows"], "window") if text["windows"] != text["texts"] else None,
        counted(text["tokens"], "token"),
        f"extrapolated past {text['beyond']:,}" if text.get("beyond") else None,
        f"in parts of {text['chunk']:,}" if text.get("chunk") else None,
        sees,
        f"{counted(text['scores'], 'score')} a head",
        f"{counted(text['skipped'], 'text')} skipped" if text.get("skipped") else None,
    ]


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

"""`scaledot audit`: texts through a model, every head measured, a table and a file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from scaledot import ScaledotError, corpus_options
from scaledot.options import (
    Ascii,
    Color,
    Device,
    Dtype,
    Files,
    InputError,
    Pickle,
    Remote,
    Text,
    Tokenizer,
    bad,
    check_writable,
    commands_of,
    consoles,
    loaded,
    note,
    span,
    texts_of,
)

HELP = """\
Usage: scaledot audit [MODEL] [OPTIONS]
MODEL: folder, hub id, .gguf or saved audit.json; default: the embedded sample;
       or the .jsonl file of a Monitor: a training run, step by step;
       or the .safetensors file of --state: what it has counted so far

Text     --text "…"   --file PATH (- is stdin)   --lines   --max-tokens N
Corpus   --file 'PATTERN'      of .jsonl, .parquet, .txt, also .gz, or a folder
                               that datasets saved
         --field NAME          where the text is [text]
         --state PATH          what is counted, saved every minute: the same
                               command goes on, after a kill too
         --bad-lines stop|skip [stop]
         --engine ray          over a Ray cluster   --workers N
Show     --show after|within|keys|saturated|gradient|largest|first|induction|
                excess [after]
         --table   --head L.H   --layers 0-3,7
Run      --context N           tokens at once, for the model's own number
         --quick               only what comes with the forward pass: no other
                               scales, fewer roles, no trials
         --device cpu   --dtype float32   --tokenizer FOLDER   --threads N
         --allow-pickle        read weights from a pickle, which can run code
         --trust-remote-code   run the code that comes with the model
Output   --json PATH [audit.json]   - is stdout
         --html PATH           also as a page, one file that needs nothing else
         --ascii   --color auto|always|never

Several --text or --file are several documents; --lines makes each line one.
Text longer than the model's context is cut into windows, and that is said.
torchrun -m scaledot audit … shares a corpus among processes; scaledot merge
adds up states of several machines.

Example  scaledot audit gpt2 --file corpus.txt --head 5.2
"""


SHOW = (
    "after", "within", "keys", "saturated", "gradient", "largest", "first", "induction", "excess",
)  # fmt: skip


def audit(
    model: Annotated[str | None, typer.Argument()] = None,
    text: Text = None,
    file: Files = None,
    lines: Annotated[bool, typer.Option("--lines")] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens")] = None,
    context: Annotated[int | None, typer.Option("--context")] = None,
    show: Annotated[str, typer.Option("--show")] = "after",
    table: Annotated[bool, typer.Option("--table")] = False,
    head: Annotated[str | None, typer.Option("--head")] = None,
    layers: Annotated[str | None, typer.Option("--layers")] = None,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    state: Annotated[str | None, typer.Option("--state")] = None,
    field: Annotated[str | None, typer.Option("--field")] = None,
    bad_lines: Annotated[str | None, typer.Option("--bad-lines")] = None,
    engine: Annotated[str | None, typer.Option("--engine")] = None,
    workers: Annotated[int | None, typer.Option("--workers")] = None,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    tokenizer: Tokenizer = None,
    allow_pickle: Pickle = False,
    trust_remote_code: Remote = False,
    json: Annotated[str | None, typer.Option("--json")] = None,
    html: Annotated[str | None, typer.Option("--html")] = None,
    ascii: Ascii = False,
    color: Color = "auto",
) -> int:
    if model is not None and model.endswith(".jsonl") and not Path(model).is_dir():
        return _timeline(model, json, html, ascii, color)
    given, json = json, "audit.json" if json is None else json
    if show not in SHOW:
        raise InputError(f"no statistic {show!r}: pass one of {', '.join(SHOW)}")
    one = _head_option(head)
    some = _layers_option(layers)
    to_stdout = json == "-"
    out, err = consoles(ascii, color, to_stdout)
    from scaledot import document
    from scaledot import state as states

    if model is not None and model.endswith(".json") and not Path(model).is_dir():
        if html is not None:
            raise InputError("--html needs the model: a saved audit holds no query, key and value")
        doc = document.load(model)
        try:
            _print(
                out, doc, show=show, table=table, head=one, layers=some, wrote=None,
                commands=_next(doc, model),
            )  # fmt: skip
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise InputError(f"{model} is damaged: run the audit again") from None
        return 0

    if model is not None and model.endswith(".safetensors") and states.is_state(model):
        if html is not None:
            raise InputError("--html needs the model: a state holds no query, key and value")
        return _counted(model, given, out, show, table, one, some)

    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"--max-tokens is {max_tokens}: pass at least 1")
    if context is not None and context < 1:
        raise InputError(f"--context is {context}: pass at least 1")
    if threads is not None and threads < 1:
        raise InputError(f"--threads is {threads}: pass at least 1")
    corpus = corpus_options.asked(
        text, file, lines, state=state, field=field, bad_lines=bad_lines, engine=engine,
        workers=workers,
    )  # fmt: skip
    if not to_stdout:
        check_writable(Path(json))
    if html == "-":
        raise InputError("--html is -: a page goes into a file, as report.html")
    if html is not None:
        check_writable(Path(html))
    named = {"--json": None if to_stdout else json, "--html": html, "--state": state}
    places = {option: Path(x).resolve() for option, x in named.items() if x is not None}
    for (option, a), (other, b) in combinations(places.items(), 2):
        if a == b:
            raise InputError(f"{option} and {other} are both {named[other]}: pass two files")

    how = {
        "tokenizer": tokenizer, "device": device, "dtype": dtype, "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    if corpus is not None:
        job = {"context": context, "quick": quick, "max_tokens": max_tokens, "threads": threads}
        result = corpus_options.audit(
            err, corpus, model, how, job, layers=some, page=html is not None
        )  # fmt: skip
        if isinstance(result, int):
            return result
        arguments = None
    else:
        result, arguments = _texts(
            err, text, file, lines, model, how, max_tokens=max_tokens, context=context, layers=some,
            quick=quick, threads=threads,
        )  # fmt: skip
    return _show(
        result, out, model, arguments, json, html, show=show, table=table, head=one, layers=some
    )


def _texts(
    err: Any, text: list[str] | None, file: list[str] | None, lines: bool, model: str | None,
    how: dict[str, Any], *, threads: int | None, **what: Any,
) -> tuple[Any, str]:  # fmt: skip
    """(the audit of texts that fit into memory; the options that gave them)."""
    from scaledot import auditing, terminal
    from scaledot.loading import sample_text

    texts, arguments = texts_of(text, file, lines)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    found = loaded(err, model, **how)
    if texts is None:
        texts = [sample_text()]
        if model is not None:
            note("no text given: the embedded text is used; pass --text or --file for your own")
    with terminal.progress(err) as update:
        result = auditing.audit(
            found.model, found.tokenizer, texts, name=found.name, on_progress=update, **what
        )
    return result, arguments


def _show(
    result: Any, out: Any, model: str | None, arguments: str | None, json: str, html: str | None,
    **shown: Any,
) -> int:  # fmt: skip
    """Say what is worth a note, write the files, print the table. arguments: the options that gave
    the text, None for a corpus, of which no command shows one text."""
    from scaledot import document
    from scaledot.files import write

    t = result.text
    if t["beyond"] is not None:
        note(
            f"extrapolation: windows of {t['longest']:,} tokens, and the model was made for "
            f"{t['beyond']:,}"
        )
    if t["chunk"] is not None:
        note(
            f"too long for memory whole: run in parts of {t['chunk']:,} tokens over a cache, "
            f"without {', '.join(t['left_out'])}"
        )
    if not result.complete:
        print(_stopped(t, arguments is None), file=sys.stderr)
    elif t["windows"] > t["texts"]:
        note(
            f"{t['tokens']:,} tokens exceed the context of {t['context']:,}: "
            f"cut into {t['windows']:,} windows"
        )
    if arguments is None:
        commands = {"audit": f"scaledot audit {shlex.quote(json)}"} if json != "-" else {}
    else:
        commands = commands_of(json, model, arguments)
    doc = document.audit_document(result, commands)
    wrote, unsaved = None, None
    try:
        wrote = _write(json, doc)
    except ScaledotError as error:  # a full disk must not take the table, too
        unsaved = error
    _print(out, doc, commands=_next(doc, json), wrote=wrote, **shown)
    if html is not None:
        from scaledot.numerals import size
        from scaledot.page_document import report_document
        from scaledot.report import page

        whole = page(report_document(result, doc["commands"])).encode()
        write(html, whole)
        note(f"wrote {html}, {size(len(whole))}: open it in a browser")
    if unsaved is not None:
        raise unsaved
    return 0 if result.complete else 130


def _stopped(text: Mapping[str, Any], corpus: bool) -> str:
    exact = f"The table is exact for those {text['tokens']:,} tokens."
    if corpus:
        return f"Stopped after {text['windows']:,} windows. {exact}"
    if text["windows"] == text["planned"]:
        return "Stopped during the trials that follow the text. The table is whole."
    return f"Stopped after {text['windows']:,} of {text['planned']:,} windows. {exact}"


def _counted(
    name: str, json: str | None, out: Any, show: str, table: bool, head: tuple[int, int] | None,
    layers: list[int] | None,
) -> int:  # fmt: skip
    """What a state has counted, without its model; saved only where a file is named."""
    from scaledot import document, state
    from scaledot.gathered import conclude
    from scaledot.jobs import parts_of

    if json not in (None, "-"):
        if Path(json).resolve() == Path(name).resolve():
            raise InputError(f"--json is {json}, the state itself: pass another file")
        check_writable(Path(json))
    found = state.load(name)
    if not found.gathered.windows:
        raise InputError(f"{name} has counted nothing yet: run the audit that writes it")
    if parts := len(parts_of(Path(name))):
        have = "process has a part" if parts == 1 else "processes have parts"
        note(f"{parts} more {have} beside it, which the next run takes in")
    result = conclude(found.subject, found.gathered)
    doc = document.audit_document(result, {"audit": f"scaledot audit {shlex.quote(name)}"})
    _print(
        out, doc, show=show, table=table, head=head, layers=layers, commands=_next(doc, name),
        wrote=_write(json, doc),
    )  # fmt: skip
    return 0


def _timeline(file: str, json: str | None, html: str | None, ascii: bool, color: str) -> int:
    """What a Monitor wrote of a training run; saved only where a file is named."""
    from scaledot import timeline
    from scaledot.files import write
    from scaledot.timeline_table import print_timeline

    if html == "-":
        raise InputError("--html is -: a page goes into a file, as report.html")
    paths = [Path(x) for x in (json, html) if x not in (None, "-")]
    for path in paths:
        if path.resolve() == Path(file).resolve():
            raise InputError(f"{path} is the time line itself: pass another file")
        check_writable(path)
    if len({x.resolve() for x in paths}) < len(paths):
        raise InputError(f"--json and --html are both {html}: pass two files")
    out, _ = consoles(ascii, color, json == "-")
    run = timeline.read(file)
    doc = timeline.document(run, file)
    print_timeline(out, doc, wrote=_write(json, doc))
    if html is not None:
        from scaledot.numerals import size
        from scaledot.report import page
        from scaledot.timeline_page import page_document

        whole = page(page_document(run)).encode()
        write(html, whole)
        note(f"wrote {html}, {size(len(whole))}: open it in a browser")
    return 0


def _write(json: str | None, doc: dict[str, Any]) -> tuple[str, int] | None:
    """Save a document, - being standard output; (file, bytes) where a file was written."""
    from scaledot.document import dump
    from scaledot.files import write

    data = dump(doc)
    if json == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    elif json is not None:
        write(json, data)
        return json, len(data)
    return None


def _print(out: Any, doc: dict[str, Any], *, commands: list[tuple[str, str]], **shown: Any) -> None:
    from scaledot import terminal

    try:
        terminal.print_audit(out, doc, next_commands=commands, **shown)
    except terminal.NotHereError as error:
        raise InputError(str(error)) from None


def _next(doc: dict[str, Any], saved: str) -> list[tuple[str, str]]:
    """Three commands worth typing next, about the head that stands out most."""
    commands = doc["commands"]
    if saved != "-":
        commands = commands | {"audit": f"scaledot audit {shlex.quote(saved)}"}
    named = [h for f in doc["findings"] if f["id"] == "saturation" for h in f["heads"]]
    known = [h for h in doc["heads"] if h["after"] is not None]
    if not known:
        return []
    widest = max(known, key=lambda h: h["after"])
    first = named[0] if named else [widest["layer"], widest["head"]]
    found = [
        (f"{commands['audit']} --head {first[0]}.{first[1]}", "one head in full"),
        (f"{commands['audit']} --show keys", "a grid of layers × heads"),
    ]
    if "trace" in commands:
        place = f"--layer {widest['layer']} --head {widest['head']}"
        found.append((f"{commands['trace']} {place}", "watch one head work"))
    return found


def _head_option(head: str | None) -> tuple[int, int] | None:
    if head is None:
        return None
    layer, dot, index = head.partition(".")
    if not (dot and layer.isdecimal() and index.isdecimal()):
        raise InputError(f"--head is {head!r}: pass layer.head, as 5.2")
    return int(layer), int(index)


def _layers_option(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    result: set[int] = set()
    for part in layers.split(","):
        low, high = span("--layers", part.strip()) or bad("--layers", layers)
        result |= set(range(low, high + 1))
    return sorted(result)

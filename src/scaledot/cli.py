"""The command line: each command a few lines over the package, each error one line.

torch and transformers load inside commands only, so that help and mistakes answer at once.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scaledot import ScaledotError, __version__, cli_check, cli_lab
from scaledot.options import (
    Ascii,
    Color,
    Command,
    Device,
    Dtype,
    Files,
    InputError,
    Model,
    Pickle,
    Remote,
    Stopped,
    Text,
    Tokenizer,
    bad,
    check_writable,
    consoles,
    note,
    read,
    span,
)

HELP = """\
scaledot: attention that shows its work
Usage: scaledot COMMAND [OPTIONS]

  audit    every head of a trained model, on your text
  trace    one head on one sentence, stage by stage
  check    is this attention function right?
  lab      seeded experiments, theory beside estimate
  info     versions, kernels, and why one is not there

Start    scaledot audit        embedded model and text, offline
Options  --help --version --ascii --color auto|always|never
"""

AUDIT_HELP = """\
Usage: scaledot audit [MODEL] [OPTIONS]
MODEL: folder, hub id, .gguf or saved audit.json; default: the embedded sample

Text     --text "…"   --file PATH (- is stdin)   --lines   --max-tokens N
Show     --show after|within|keys|saturated|gradient|largest|first|induction|
                excess [after]
         --table   --head L.H   --layers 0-3,7
Run      --quick               only what comes with the forward pass: no other
                               scales, fewer roles, no trials
         --device cpu   --dtype float32   --tokenizer FOLDER
         --allow-pickle        read weights from a pickle, which can run code
         --trust-remote-code   run the code that comes with the model
Output   --json PATH [audit.json]   - is stdout
         --ascii   --color auto|always|never

Several --text or --file are several documents; --lines makes each line one.
Text longer than the model's context is cut into windows, and that is said.

Example  scaledot audit gpt2 --file corpus.txt --head 5.2
"""

TRACE_HELP = """\
Usage: scaledot trace [TEXT] [OPTIONS]
TEXT: a sentence; default: one from the embedded text

Head     --layer N [0]   --head N [0]
Text     --file PATH (- is stdin)   --max-tokens N [1024]
Show     --rows 1-10   --keys 1-10   (tokens count from 1)
Run      --model MODEL (folder, hub id or .gguf; default: the embedded sample)
         --device cpu   --dtype float32   --tokenizer FOLDER
         --allow-pickle        read weights from a pickle, which can run code
         --trust-remote-code   run the code that comes with the model
Output   --ascii   --color auto|always|never

Example  scaledot trace "The cat sat." --layer 0 --head 2
"""

INFO_HELP = """\
Usage: scaledot info
Versions, threads, and the kernels that compute attention here: for each, what it computes, or
why it is not there.

Run      SCALEDOT_ISA=baseline|avx2|avx512 in the environment forces a variant of the native
         kernel
Output   --ascii   --color auto|always|never
"""


class _Group(TyperGroup):
    def get_help(self, ctx: Any) -> str:  # noqa: ARG002
        return HELP.rstrip()


app = typer.Typer(cls=_Group, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(cli_lab.app, name="lab")
app.command("check", cls=Command, help=cli_check.HELP)(cli_check.check)

# typer brings its own copy of click, older ones the real one: take the class from what it exports.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

SHOW = (
    "after", "within", "keys", "saturated", "gradient", "largest", "first", "induction", "excess",
)  # fmt: skip
LONGEST_TRACE = 1024


def run(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code: 0 done, 1 a check failed, 2 bad input, 130
    stopped."""
    args = _screen_options_last(argv)
    if not args:
        print(HELP, end="")
        return 0
    if args == ["lab"]:
        print(cli_lab.LAB_HELP, end="")
        return 0
    if args[0] == "--version":
        print(f"scaledot {__version__}")
        return 0
    try:
        result = app(args=args, prog_name="scaledot", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _UsageError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except (InputError, ScaledotError) as error:
        return _fail(str(error))
    except (typer.Abort, Stopped, KeyboardInterrupt):
        print("stopped: nothing was finished", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone (`| head`): that is no error, and nobody is left to tell.
        sys.stderr.close()
        return 0


def _fail(message: str) -> int:
    line = " ".join(message.split())
    print(f"scaledot: {line[:1].lower() + line[1:]}".rstrip("."), file=sys.stderr)
    return 2


@app.callback()
def _root() -> None:
    """Commands only; what stands before them is read in `run`."""


def _screen_options_last(argv: Sequence[str]) -> list[str]:
    """--ascii and --color mean the same before the command as after it."""
    rest, moved = list(argv), []
    while rest and (rest[0] in ("--ascii", "--color") or rest[0].startswith("--color=")):
        moved += [rest.pop(0) for _ in range(2 if rest[0] == "--color" else 1) if rest]
    return [*rest[:1], *moved, *rest[1:]] if rest else []


@app.command("audit", cls=Command, help=AUDIT_HELP)
def _audit(
    model: Annotated[str | None, typer.Argument()] = None,
    text: Text = None,
    file: Files = None,
    lines: Annotated[bool, typer.Option("--lines")] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens")] = None,
    show: Annotated[str, typer.Option("--show")] = "after",
    table: Annotated[bool, typer.Option("--table")] = False,
    head: Annotated[str | None, typer.Option("--head")] = None,
    layers: Annotated[str | None, typer.Option("--layers")] = None,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    tokenizer: Tokenizer = None,
    allow_pickle: Pickle = False,
    trust_remote_code: Remote = False,
    json: Annotated[str, typer.Option("--json")] = "audit.json",
    ascii: Ascii = False,
    color: Color = "auto",
) -> int:
    if show not in SHOW:
        raise InputError(f"no statistic {show!r}: pass one of {', '.join(SHOW)}")
    one = _head_option(head)
    some = _layers_option(layers)
    to_stdout = json == "-"
    out, err = consoles(ascii, color, to_stdout)
    from scaledot import document, terminal

    if model is not None and model.endswith(".json") and not Path(model).is_dir():
        doc = document.load(model)
        try:
            _print(terminal, out, doc, show, table, one, some, _next(doc, model), None)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise InputError(f"{model} is damaged: run the audit again") from None
        return 0

    texts, arguments = _texts(text, file, lines)
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"--max-tokens is {max_tokens}: pass at least 1")
    if not to_stdout:
        check_writable(Path(json))
    from scaledot.auditing import audit
    from scaledot.loading import load, sample_text

    with err.status("Loading"):
        loaded = load(
            model, tokenizer=tokenizer, device=device, dtype=dtype, allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    for said in loaded.notes:
        note(said)
    if texts is None:
        texts = [sample_text()]
        if model is not None:
            note("no text given: the embedded text is used; pass --text or --file for your own")
    with terminal.progress(err) as update:
        result = audit(
            loaded.model, loaded.tokenizer, texts, max_tokens=max_tokens,
            layers=some, name=loaded.name, quick=quick, on_progress=update,
        )  # fmt: skip
    t = result.text
    if not result.complete:
        said = (
            f"Stopped after {t['windows']:,} of {t['planned']:,} windows. "
            f"The table is exact for those {t['tokens']:,} tokens."
        )
        if t["windows"] == t["planned"]:
            said = "Stopped during the trials that follow the text. The table is whole."
        print(said, file=sys.stderr)
    elif t["windows"] > t["texts"]:
        note(
            f"{t['tokens']:,} tokens exceed the context of {t['context']:,}: "
            f"cut into {t['windows']:,} windows"
        )
    saved = "-" if to_stdout else json
    doc = document.audit_document(result, _commands(saved, model, arguments))
    data = document.dump(doc)
    wrote, unsaved = None, None
    if to_stdout:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        from scaledot.heads import write

        try:
            write(json, data)
            wrote = (json, len(data))
        except ScaledotError as error:  # a full disk must not take the table, too
            unsaved = error
    _print(terminal, out, doc, show, table, one, some, _next(doc, saved), wrote)
    if unsaved is not None:
        raise unsaved
    return 0 if result.complete else 130


@app.command("trace", cls=Command, help=TRACE_HELP)
def _trace(
    text: Annotated[str | None, typer.Argument()] = None,
    layer: Annotated[int, typer.Option("--layer")] = 0,
    head: Annotated[int, typer.Option("--head")] = 0,
    file: Annotated[str | None, typer.Option("--file")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens")] = LONGEST_TRACE,
    rows: Annotated[str | None, typer.Option("--rows")] = None,
    keys: Annotated[str | None, typer.Option("--keys")] = None,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    tokenizer: Tokenizer = None,
    allow_pickle: Pickle = False,
    trust_remote_code: Remote = False,
    ascii: Ascii = False,
    color: Color = "auto",
) -> int:
    chosen_rows, chosen_keys = span("--rows", rows), span("--keys", keys)
    if not 1 <= max_tokens <= LONGEST_TRACE:
        raise InputError(
            f"--max-tokens is {max_tokens}: trace shows every pair, pass 1 to {LONGEST_TRACE}"
        )
    if text is not None and file is not None:
        raise InputError("both TEXT and --file were given: pass one")
    if text is None:
        texts, _ = _texts(None, [file] if file else None, False)
        text = texts[0] if texts else None
    out, err = consoles(ascii, color, False)
    from scaledot import terminal
    from scaledot.auditing import trace_head
    from scaledot.loading import load, sample_text

    if text is None:
        text = _first_sentence(sample_text())
    if not text.strip():
        raise InputError("the text is empty: pass a sentence or --file PATH (- is standard input)")
    with err.status("Loading"):
        loaded = load(
            model, tokenizer=tokenizer, device=device, dtype=dtype, allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    doc = trace_head(
        loaded.model, loaded.tokenizer, text, layer, head, max_tokens=max_tokens, name=loaded.name
    )
    if doc["dropped_tokens"]:
        note(f"the text is longer: its first {doc['shape'][-1]:,} tokens are shown")
    sizes = doc["shape"][-2:]
    parts = {"--rows": chosen_rows, "--keys": chosen_keys}
    for (name, chosen), length in zip(parts.items(), sizes, strict=True):
        if chosen is not None and not 1 <= chosen[0] <= chosen[1] <= length:
            asked = "-".join(str(end) for end in chosen)
            raise InputError(f"{name} is {asked}: the text has tokens 1 to {length}")
    rows_shown, keys_shown = (part and (part[0] - 1, part[1] - 1) for part in parts.values())
    terminal.print_trace(out, doc, rows=rows_shown, keys=keys_shown)
    return 0


@app.command("info", cls=Command, help=INFO_HELP)
def _info(ascii: Ascii = False, color: Color = "auto") -> int:
    out, _ = consoles(ascii, color, False)
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from scaledot.kernels import native

    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        transformers = 'not there: pip install "scaledot[hf]"'
    reason = native.available()
    if reason is None:
        found = native.info()
        kernel = f"{found['isa']}, {found['threads']} threads; CPU, float32 bfloat16 float16"
    else:
        kernel = f"not there: {reason}"
    for name, what in (
        ("scaledot", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("transformers", transformers),
        ("threads", torch.get_num_threads()),
        ("native", kernel),
        ("tiled", "plain torch; any device, any float, dropout"),
        ("auto", "native where it can, else tiled" if reason is None else "tiled"),
    ):
        out.print(f"{name:<12}  {what}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _print(
    terminal: Any, out: Any, doc: dict[str, Any], show: str, table: bool,
    head: tuple[int, int] | None, layers: list[int] | None, commands: list[tuple[str, str]],
    wrote: tuple[str, int] | None,
) -> None:  # fmt: skip
    try:
        terminal.print_audit(
            out, doc, show=show, table=table, head=head, layers=layers, next_commands=commands,
            wrote=wrote,
        )  # fmt: skip
    except terminal.NotHereError as error:
        raise InputError(str(error)) from None


def _texts(
    text: list[str] | None, files: list[str] | None, lines: bool
) -> tuple[list[str] | None, str]:
    """(the documents given, None for none; the options that gave them, to repeat in a command)."""
    documents: list[str] = list(text or [])
    arguments = [f"--text {shlex.quote(t)}" for t in documents]
    for name in files or []:
        documents.append(read(name))
        arguments.append(f"--file {shlex.quote(name)}")
    if text is None and files is None:
        if lines:
            raise InputError("--lines needs --file or --text")
        return None, ""
    if lines:
        documents = [line for d in documents for line in d.splitlines() if line.strip()]
        arguments.append("--lines")
    if not any(d.strip() for d in documents):
        raise InputError('the text is empty: pass --text "…" or --file PATH (- is standard input)')
    return documents, " ".join(arguments)


def _commands(saved: str, model: str | None, text: str) -> dict[str, str]:
    """What `audit` and `trace` of this model and text are called, for findings to point at."""
    named = f" {shlex.quote(model)}" if model else ""
    again = f"scaledot audit {shlex.quote(saved)}"
    if saved == "-":
        again = f"scaledot audit{named}" + (f" {text}" if text else "")
    trace = "scaledot trace"
    if text.startswith("--text ") and "--text" not in text[7:] and "--file" not in text:
        trace += text.removeprefix("--text").removesuffix(" --lines")
    elif text:
        first = next(i for i, w in enumerate(shlex.split(text)) if w in ("--file", "--text"))
        option, value = shlex.split(text)[first : first + 2]
        trace += f" --file {shlex.quote(value)}" if option == "--file" else f" {shlex.quote(value)}"
    return {"audit": again, "trace": trace + (f" --model {shlex.quote(model)}" if model else "")}


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


def _first_sentence(text: str) -> str:
    head = " ".join(text.split())[:120]
    for mark in (". ", "; ", ", "):
        if (end := head.find(mark)) > 20:
            return head[: end + 1]
    return head

"""The command line: each command a few lines over the package, each error one line.

torch and transformers load inside commands only, so that help and mistakes answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scaledot import (
    ScaledotError,
    __version__,
    cli_audit,
    cli_check,
    cli_explore,
    cli_lab,
    cli_merge,
)
from scaledot.options import (
    Ascii,
    Color,
    Command,
    Device,
    Dtype,
    InputError,
    Model,
    Pickle,
    Remote,
    Stopped,
    Tokenizer,
    consoles,
    loaded,
    note,
    span,
    texts_of,
)

HELP = """\
scaledot: attention that shows its work
Usage: scaledot COMMAND [OPTIONS]

  audit    every head of a trained model, on your text
  trace    one head on one sentence, stage by stage
  merge    add up the states of audits of a corpus
  explore  a page of your model and your sentence, every head and stage
  check    is this attention function right?
  lab      seeded experiments, theory beside estimate
  info     versions, kernels, and why one is not there

Start    scaledot audit        embedded model and text, offline
Options  --help --version --ascii --color auto|always|never
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
for name, of in (
    ("audit", cli_audit),
    ("merge", cli_merge),
    ("explore", cli_explore),
    ("check", cli_check),
):
    app.command(name, cls=Command, help=of.HELP)(getattr(of, name))

# typer brings its own copy of click, older ones the real one: take the class from what it exports.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

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
        texts, _ = texts_of(None, [file] if file else None, False)
        text = texts[0] if texts else None
    out, err = consoles(ascii, color, False)
    from scaledot import terminal
    from scaledot.auditing import trace_head
    from scaledot.loading import sample_text

    if text is None:
        text = _first_sentence(sample_text())
    if not text.strip():
        raise InputError("the text is empty: pass a sentence or --file PATH (- is standard input)")
    found = loaded(
        err, model, tokenizer=tokenizer, device=device, dtype=dtype, allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    doc = trace_head(
        found.model, found.tokenizer, text, layer, head, max_tokens=max_tokens, name=found.name
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


def _first_sentence(text: str) -> str:
    head = " ".join(text.split())[:120]
    for mark in (". ", "; ", ", "):
        if (end := head.find(mark)) > 20:
            return head[: end + 1]
    return head

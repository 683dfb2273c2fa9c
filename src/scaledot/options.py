"""What all commands share: options, consoles, files to read and write, and errors of one line."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

Text = Annotated[list[str] | None, typer.Option("--text")]
Files = Annotated[list[str] | None, typer.Option("--file")]
Model = Annotated[str | None, typer.Option("--model")]
Tokenizer = Annotated[str | None, typer.Option("--tokenizer")]
Device = Annotated[str, typer.Option("--device")]
Dtype = Annotated[str, typer.Option("--dtype")]
Pickle = Annotated[bool, typer.Option("--allow-pickle")]
Remote = Annotated[bool, typer.Option("--trust-remote-code")]
Json = Annotated[str | None, typer.Option("--json")]
Ascii = Annotated[bool, typer.Option("--ascii")]
Color = Annotated[str, typer.Option("--color")]


class Stopped(Exception):
    """Ctrl-C, before anything was finished."""


class InputError(Exception):
    """Something the user typed cannot be used; the message is the line they see."""


class Command(TyperCommand):
    """A command whose help is the text it was given, as it stands."""

    def get_help(self, ctx: Any) -> str:  # noqa: ARG002
        return (self.help or "").rstrip()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            for kind, what in (("integer", "a whole number"), ("number", "a number")):
                if f"a valid {kind}" in error.message:
                    error.message = f"pass {what}"
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before typer makes a silent exit of it
            raise Stopped from None
        except BrokenPipeError:
            raise
        except OSError as error:  # a full disk behind standard output
            reason = (error.strerror or str(error)).lower()
            if error.filename is None:
                # What is left in the buffer would fail again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise InputError(f"cannot write {error.filename or 'the output'}: {reason}") from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise InputError("there is not enough memory for these sizes: ask for less") from None


def consoles(ascii: bool, color: str, to_stdout: bool) -> tuple[Any, Any]:
    """(where results go, where progress goes)."""
    from scaledot import terminal

    if color not in ("auto", "always", "never"):
        raise InputError(f"--color is {color!r}: pass auto, always or never")
    err = terminal.console(color=color, ascii=ascii, stderr=True)
    return (err if to_stdout else terminal.console(color=color, ascii=ascii)), err


def read(name: str) -> str:
    """A text file, or standard input for -."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {name}: {(error.strerror or str(error)).lower()}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start:,}): convert it first"
        ) from None


def texts_of(
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
        documents = [line for d in documents for line in re.split("\r?\n", d) if line.strip()]
        arguments.append("--lines")
    if not any(d.strip() for d in documents):
        raise InputError('the text is empty: pass --text "…" or --file PATH (- is standard input)')
    return documents, " ".join(arguments)


def commands_of(saved: str, model: str | None, text: str) -> dict[str, str]:
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


def loaded(err: Any, model: str | None, **how: Any) -> Any:
    """The model that was asked for; what its loader has to say is noted. how: as `loading.load`."""
    from scaledot.loading import load

    with err.status("Loading"):
        found = load(model, **how)
    for said in found.notes:
        note(said)
    return found


def check_writable(path: Path) -> None:
    """Fail before the work, not after it."""
    folder = path.parent
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK) or not (
        os.access(folder, os.W_OK)
        or (path.exists() and not path.is_file())  # a device or a pipe: nothing is renamed over it
    ):
        reason = "permission denied"
    if reason:
        raise InputError(f"cannot write {path}: {reason}; nothing was run")


def span(name: str, text: str | None) -> tuple[int, int] | None:
    """ "3" or "0-9", both ends included."""
    if text is None:
        return None
    low, dash, high = text.partition("-")
    high = high if dash else low
    if not (low.isdecimal() and high.isdecimal()) or int(low) > int(high):
        bad(name, text)
    return int(low), int(high)


def bad(name: str, text: str) -> NoReturn:
    raise InputError(f"{name} is {text!r}: pass a number or a range, as 0-3")


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)

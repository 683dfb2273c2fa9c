"""`scaledot explore`: the page, served for a model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

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
    commands_of,
    consoles,
    loaded,
    texts_of,
)

HELP = """\
Usage: scaledot explore [MODEL] [OPTIONS]
MODEL: folder, hub id or .gguf; default: the embedded sample; or the .jsonl file
       of a Monitor: a training run, which the page follows while it goes on

Text     --text "…"   --file PATH (- is stdin): shown first
         others can be typed on the page
Serve    --port N [a free one]   --host H [127.0.0.1]   --no-open
         A host other than this machine's own: whoever has the printed address
         can send texts, so it holds a token
Run      --device cpu   --dtype float32   --tokenizer FOLDER
         --allow-pickle        read weights from a pickle, which can run code
         --trust-remote-code   run the code that comes with the model
Output   --ascii   --color auto|always|never

Ctrl-C ends it. Nothing that you type leaves this machine.

Example  scaledot explore gpt2 --text "The cat sat."
"""


def explore(
    model: Annotated[str | None, typer.Argument()] = None,
    text: Text = None,
    file: Files = None,
    port: Annotated[int, typer.Option("--port")] = 0,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    tokenizer: Tokenizer = None,
    allow_pickle: Pickle = False,
    trust_remote_code: Remote = False,
    ascii: Ascii = False,
    color: Color = "auto",
) -> int:
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}: pass 1 to 65535, or leave it out for a free one")
    if model is not None and model.endswith(".jsonl") and not Path(model).is_dir():
        return _follow(model, port, host, no_open, ascii, color)
    texts, _ = texts_of(text, file, False)
    out, err = consoles(ascii, color, False)
    from scaledot import server
    from scaledot.exploring import prepare

    server.require()  # before a model is loaded for nothing
    found = loaded(
        err, model, tokenizer=tokenizer, device=device, dtype=dtype, allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code, predicts=True,
    )  # fmt: skip
    shelf = server.Shelf(prepare(found), lambda text: _again(model, text))
    for given in texts or ():
        if given.strip():
            shelf.put(given)

    _serve(shelf, found.name, port, host, no_open, out)
    return 0


def _follow(file: str, port: int, host: str, no_open: bool, ascii: bool, color: str) -> int:
    """A training run's time line."""
    out, _ = consoles(ascii, color, False)
    from scaledot import server

    server.require()
    from scaledot.following import Followed

    _serve(Followed(file), file, port, host, no_open, out)
    return 0


def _serve(shelf: Any, name: str, port: int, host: str, no_open: bool, out: Any) -> None:
    from scaledot import server

    def ready(address: str) -> None:
        out.print(f"Explore {name}:  {address}", highlight=False, markup=False, soft_wrap=True)
        print("Ctrl-C ends it.", file=sys.stderr)
        if not no_open and _has_a_screen():
            import webbrowser

            webbrowser.open(address)

    server.serve(shelf, host=host, port=port, on_ready=ready)


def _has_a_screen() -> bool:
    """Whether a browser would open a window: without one, a text browser takes the terminal."""
    import os

    named = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform in ("win32", "darwin") or any(os.environ.get(x) for x in named)


def _again(model: str | None, text: str) -> dict[str, str] | None:
    """`commands_of` for a text that was typed; None for one that nobody would type again."""
    if len(text) > 200 or not text.isprintable():
        return None
    return commands_of("-", model, f"--text {shlex.quote(text)}")

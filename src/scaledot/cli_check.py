"""`scaledot check`: somebody's attention function, found by name and judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from scaledot.options import (
    Ascii,
    Color,
    Device,
    Dtype,
    InputError,
    Json,
    check_writable,
    consoles,
)

HELP = """\
Usage: scaledot check MODULE:FUNCTION [OPTIONS]
MODULE: from this folder or installed; FUNCTION takes query, key and value, and
as many of attn_mask, dropout_p, is_causal, scale, enable_gqa as it has

Run      --layout bhsd|bshd [bhsd]   (batch, heads, length, dim) or
                                     (batch, length, heads, dim)
         --device cpu   --dtype float32
Output   --json PATH   - is stdout
         --ascii   --color auto|always|never

Importing MODULE and calling FUNCTION runs their code.
Exit: 0 nothing is wrong, 1 something is, 2 the function could not be used.

Example  scaledot check my_attention:attend
"""


def check(
    function: Annotated[str | None, typer.Argument()] = None,
    layout: Annotated[str, typer.Option("--layout")] = "bhsd",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    json: Json = None,
    ascii: Ascii = False,
    color: Color = "auto",
) -> int:
    module, _, name = (function or "").partition(":")
    if not (module and name):
        given = f", got {function!r}" if function else ""
        raise InputError(f"check needs MODULE:FUNCTION{given}: as my_attention:attend")
    to_stdout = json == "-"
    out, _ = consoles(ascii, color, to_stdout)
    if json is not None and not to_stdout:
        check_writable(Path(json))
    import contextlib

    # Loaded before the user's folder is searched: a file there may be called as one of theirs.
    from scaledot import document, terminal
    from scaledot.conformance import check as judge

    with contextlib.redirect_stdout(sys.stderr):  # what their code prints is not the result
        fn = _function(module, name)
        try:
            report = judge(fn, layout=layout, device=device, dtype=dtype, name=function)
        except (TypeError, ValueError) as error:  # of the options or the signature
            raise InputError(str(error)) from None
    doc = document.check_document(report)
    data, wrote = document.dump(doc), None
    if to_stdout:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    elif json is not None:
        from scaledot.files import write

        write(json, data)
        wrote = (json, len(data))
    terminal.print_check(out, doc, wrote=wrote)
    return 0 if report.ok else 1


def _function(module: str, name: str) -> Any:
    """What `module:name` names, looked for as `python -m` does: in this folder, then installed."""
    import importlib
    import os

    if module.endswith(".py") or "/" in module or "\\" in module:
        stem = Path(module).stem
        raise InputError(f"{module} is a file: run it in its folder as {stem}:{name}")
    if sys.path[:1] not in ([""], [os.getcwd()]):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise InputError(
                f"no module {error.name!r}: no such file in this folder, and not installed"
            ) from None
        raise InputError(f"cannot import {module}: {error}") from None
    except (Exception, SystemExit) as error:
        raise InputError(f"cannot import {module}: {type(error).__name__}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            import difflib

            names = [x for x in vars(found) if not x.startswith("_") and callable(vars(found)[x])]
            near = difflib.get_close_matches(part, names, 3, 0.5) or names[:5]
            has = f": it has {', '.join(near)}" if near else ""
            raise InputError(f"{module} has no {part!r}{has}")
        found = getattr(found, part)
    if isinstance(found, type):
        raise InputError(f"{module}:{name} is a class: pass a function, or an instance of it")
    if not callable(found):
        raise InputError(f"{module}:{name} is a {type(found).__name__}: pass a function")
    return found

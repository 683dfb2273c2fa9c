"""`scaledot merge`: states of one model's audits, added up."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from scaledot.corpus_options import new_state
from scaledot.options import InputError, note

HELP = """\
Usage: scaledot merge STATE... -o PATH
Add up states that audits of one model wrote with --state, on any machines; a
document that two of them have counted is an error, and nothing is written.

Output   -o, --output PATH

Example  scaledot merge a.safetensors b.safetensors -o all.safetensors
         scaledot audit all.safetensors
"""


def merge(
    states: Annotated[list[str], typer.Argument()],
    output: Annotated[str | None, typer.Option("--output", "-o")] = None,
) -> int:
    if output is None:
        raise InputError("merge needs -o PATH: where the sum goes")
    from scaledot import state
    from scaledot.numerals import counted

    target = new_state("-o", output)
    if target.exists() and not state.is_state(target):
        raise InputError(f"-o is {output}: that file is there and is no state; pass another")
    known = {Path(x).resolve(): x for x in states}
    if len(known) < len(states):
        raise InputError("one state is given twice: its documents would count twice")
    with ExitStack() as context:
        for name in (known | {target.resolve(): output}).values():
            if Path(name).parent.is_dir():
                context.enter_context(state.locked(name))
        whole = state.together([(name, state.load(name)) for name in states])
        state.save(target, whole)
    if whole.subject.threads is None and whole.subject.device == "cpu":
        note("they ran with other numbers of threads: histograms may differ by rounding")
    g = whole.gathered
    print(
        f"{output}: {counted(g.texts, 'text')}, {counted(g.windows, 'window')}, "
        f"{counted(g.tokens, 'token')} of {counted(len(states), 'state')}"
    )
    return 0

"""A corpus run from its beginning to its end: a state file, several processes, interrupts.

With a file for its state a run writes what it has counted every minute, on an interrupt, on SIGTERM
and at its end; the same command goes on from there. Of several processes the first has that file,
each other one a part beside it until the first has taken it in: docs/corpus.md.
"""

from __future__ import annotations

import glob
import json
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scaledot import ScaledotError, state
from scaledot.corpus import Source, UnreadableError, documents
from scaledot.gathered import layers_among
from scaledot.processes import Processes
from scaledot.state import State
from scaledot.streaming import EVERY, Run, begin, check_goes_on, share_of

TRIED = 8
"""The model is tried on the longest of so many first documents: one word would tell little."""

SHOWN = 3
"""Documents that cannot be read of which is kept why."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is asked for.

    field: of the text. skip: leave out documents that cannot be read; without it the first ends the
    run. path: the state's file. layers: those that the audit is to show, None for all. threads: of
    each process, None for those of the state or torch's. every: seconds between two savings.
    """

    found: Sequence[Source]
    field: str = "text"
    skip: bool = False
    path: Path | None = None
    context: int | None = None
    quick: bool = False
    max_tokens: int | None = None
    layers: Collection[int] | None = None
    threads: int | None = None
    every: float = EVERY


@dataclass(eq=False)
class Outcome:
    """What a run came to; of several processes the first has it, and on the others `state` is None.

    complete: not interrupted. skipped: documents that were left out; unreadable: why, of the first.
    failed: what ended it early.
    """

    state: State | None
    complete: bool = True
    skipped: int = 0
    unreadable: list[str] = field(default_factory=list)
    failed: Exception | None = None

    def leave_out(self, error: ScaledotError) -> None:
        self.skipped += 1
        if len(self.unreadable) < SHOWN:
            self.unreadable.append(str(error))


def run(
    job: Job,
    loaded: Any,
    processes: Processes,
    *,
    runner: Callable[[Any, Any, State], Any] = Run,
    on_progress: Callable[[int, int, int], None] | None = None,
    note: Callable[[str], None] = print,
) -> Outcome:
    """Carry out a job. loaded: model, tokenizer and name. runner: what reads documents, as
    `streaming.Run` does. note is told what is worth a line while it runs.

    Raises: ScaledotError where it cannot begin: no text, a layer that is not there, a state of
    other settings or in use, a file that cannot be written. KeyboardInterrupt before anything was
    counted.
    """
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    own = job.path
    if own is not None and not processes.first:
        own = part_path(own, processes.rank)
    with ExitStack() as context:
        if own is not None and not processes.first:
            context.enter_context(state.locked(own))

        def beginning() -> bytes:
            if own is not None:
                context.enter_context(state.locked(own))
            found = _beginning(job, loaded, processes)
            layers_among(found.subject.layers, job.layers)  # known now, and not after all texts
            return state.packed(found)

        whole = state.unpacked(processes.from_first(beginning))
        if not processes.first:
            check_goes_on(
                whole, loaded.model, loaded.tokenizer, context=job.context, quick=job.quick
            )
        if job.threads is None and whole.subject.threads is not None:
            torch.set_num_threads(whole.subject.threads)
        mine = whole
        if not processes.first:
            mine = State.fresh(whole.settings, whole.subject, part=True)
        reader = runner(loaded.model, loaded.tokenizer, mine)
        outcome = Outcome(mine)
        wanted = share_of(whole.counted, processes.rank, processes.world)
        if job.max_tokens is not None and processes.world > 1:
            # Each process its share of what is left; the first has counted what was there.
            left = max(0, job.max_tokens - whole.gathered.tokens)
            share = -(-left // processes.world)
            job = replace(job, max_tokens=share + (whole.gathered.tokens if processes.first else 0))
        save = None if own is None else _saver(own, note)
        with _interruptible() as deaf:
            try:
                reader.read(
                    documents(
                        job.found, field=job.field, wanted=wanted,
                        on_unreadable=outcome.leave_out if job.skip else None,
                    ),
                    max_tokens=job.max_tokens, save=save, every=job.every, on_progress=on_progress,
                )  # fmt: skip
            except KeyboardInterrupt:
                outcome.complete = False
            except Exception as error:  # whatever it is, what is counted must not be lost
                outcome.failed = error
            deaf()
            outcome.state = reader.state()
            if own is not None:
                state.save(own, outcome.state)
        if processes.world == 1 or not outcome.complete or outcome.failed is not None:
            return outcome
        parts = processes.to_first(state.packed(outcome.state))
        told = [outcome.skipped, outcome.unreadable]
        for skipped, lines in map(json.loads, processes.to_first(json.dumps(told).encode())[1:]):
            outcome.skipped += skipped
            outcome.unreadable += lines

        def ending() -> bytes:
            names = [f"process {rank}" for rank in range(len(parts))]
            outcome.state = state.together(
                list(zip(names, map(state.unpacked, parts), strict=True))
            )
            if own is not None:
                state.save(own, outcome.state)
            return b"taken in"

        processes.from_first(ending)
        if not processes.first:
            outcome = Outcome(None)
            if own is not None:
                own.unlink(missing_ok=True)
        return outcome


def part_path(path: Path, rank: int) -> Path:
    """Where a process keeps its part of a state: run.rank1.safetensors for run.safetensors."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _beginning(job: Job, loaded: Any, processes: Processes) -> State:
    """The state to go on from: a new one, or that of the file, with the parts that an earlier run
    has left."""
    if job.path is None:
        return _new(job, loaded)
    with ExitStack() as context:
        parts = parts_of(job.path)
        for path, rank in parts.items():
            if rank >= processes.world:  # or a process of this run has it
                context.enter_context(state.locked(path))
        if not job.path.exists():
            if parts:
                raise ScaledotError(
                    f"{min(parts)} is part of a run whose state {job.path} is gone: remove it, "
                    "and its documents are read again"
                )
            found = _new(job, loaded)
        else:
            found = _known(job, loaded)
        for path in parts:
            part = state.load(path)
            if part.counted.within(found.counted):  # taken in, and then came the end
                continue
            try:
                found = state.merge(found, part)
            except ScaledotError as error:
                raise ScaledotError(
                    f"{path}, part of an earlier run, does not go with {job.path}: {error}; remove "
                    "it, and its documents are read again"
                ) from None
        state.save(job.path, found)
        for path in parts:
            path.unlink()
    return found


def parts_of(path: Path) -> dict[Path, int]:
    """The parts beside a state, and whose they are."""
    found = {}
    for x in path.parent.glob(f"{glob.escape(path.stem)}.rank*{glob.escape(path.suffix)}"):
        rank = x.name.removeprefix(f"{path.stem}.rank").removesuffix(path.suffix)
        if rank.isdecimal() and state.is_state(x, part=True):
            found[x] = int(rank)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _known(job: Job, loaded: Any) -> State:
    """The state of the file, if this run may go on from it."""
    assert job.path is not None
    try:
        found = state.load(job.path)
    except ScaledotError as error:
        raise ScaledotError(f"{error}; another --state begins anew") from None
    try:
        check_goes_on(found, loaded.model, loaded.tokenizer, context=job.context, quick=job.quick)
    except ScaledotError as error:
        raise ScaledotError(
            f"{job.path} is of another run: {error}; use the same, or another --state"
        ) from None
    if job.threads not in (None, found.subject.threads) and found.subject.device == "cpu":
        found = replace(found, subject=replace(found.subject, threads=None))
    return found


def _new(job: Job, loaded: Any) -> State:
    """A state that has counted nothing."""
    given = documents(
        job.found, field=job.field, on_unreadable=(lambda _: None) if job.skip else None
    )
    longest, unread = "", None
    try:
        for document in islice(given, TRIED):
            longest = max(longest, document.text, key=len)
    except UnreadableError as error:  # told when it is its turn
        unread = error
    if not longest:
        raise unread or ScaledotError(
            "there is no text in what was given: every document is blank or cannot be read"
        )
    return begin(
        loaded.model, loaded.tokenizer, longest, context=job.context, quick=job.quick,
        name=loaded.name,
    )  # fmt: skip


def _saver(path: Path, note: Callable[[str], None]) -> Callable[[State], None]:
    told = False

    def save(found: State) -> None:
        nonlocal told
        try:
            state.save(path, found)
            told = False
        except ScaledotError as error:  # a disk that is full now may not be in a minute
            if not told:
                note(f"{error}: the older state is whole, the run goes on and will try again")
            told = True

    return save


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """SIGTERM, which schedulers send first, is an interrupt inside, and one interrupt is enough: a
    second, as launchers and impatient people send, must not end the saving. What it yields makes
    the process deaf to both before there was one."""
    kinds = (signal.SIGINT, signal.SIGTERM)

    def deaf() -> None:
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)

    def interrupt(*_: object) -> None:
        deaf()
        raise KeyboardInterrupt

    try:
        before = [signal.signal(kind, interrupt) for kind in kinds]
    except ValueError:  # not the main thread, which alone gets signals
        yield lambda: None
        return
    try:
        yield deaf
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)

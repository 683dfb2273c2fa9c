"""A corpus through a model: documents one at a time, sums that can be written down at any moment.

Each window is one forward pass of batch 1 under `observe`, whoever runs it, and threads are fixed:
so one process, several, or one that was killed and went on count the same rows and give the same
histograms. What is counted and what it gave change together, in one assignment: an interrupt
between two windows, or inside one, loses at most that window and counts none twice.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scaledot import gathered, prefill
from scaledot.corpus import Document
from scaledot.gathered import Gathered, subject_of
from scaledot.leakage import resting
from scaledot.observation import Observation, observe
from scaledot.roles import delimiters
from scaledot.state import Counted, Settings, State, check_alike, digest
from scaledot.trials import Trials, try_out
from scaledot.windows import (
    check_context,
    check_reads_text,
    context_of,
    encode,
    has_vocabulary,
)

EVERY = 60.0
"""Seconds between two savings of a state."""


def begin(
    model: Any, tokenizer: Any, text: str, *, context: int | None = None, quick: bool = False,
    name: str | None = None,
) -> State:  # fmt: skip
    """The state of a run that has counted nothing: what it is of, and what can be said of the model
    before it has read anything. text: a document of the corpus, on whose first window the model is
    tried; that counts nowhere.

    Raises: ScaledotError for a context that the model has no positions for, windows that do not fit
    into memory, or a model whose attention cannot be observed.
    """
    if context is not None:
        check_context(model, context)
    limit = context or context_of(model, tokenizer)
    window = encode(text, tokenizer, limit)[0]
    check_reads_text(model, window)
    device = _device(model)
    chunk = None
    if limit is not None:
        # A document may fill the context, so it is the context that must fit.
        ids = window["input_ids"]
        long = {"input_ids": ids.repeat(1, -(-limit // ids.shape[1]))[:, :limit]}
        chunk = prefill.plan(model, long, device).chunk
    with _observing(model, tokenizer, quick) as seen:
        prefill.forward(model, window, device, chunk=chunk)
    calls, masks, trials = dict(seen.calls), dict(seen.masks), Trials()
    if not quick and any(call.kind == "self" for call in calls.values()):
        trials = try_out(model, tokenizer, window, limit, device, masks)
    subject = subject_of(
        model, calls, seen.heads, masks, trials, name=name, context=limit, chunk=chunk,
        unobserved=seen.unobserved,
    )  # fmt: skip
    settings = Settings(digest(model, tokenizer), subject.dtype, limit, chunk, quick)
    return State.fresh(settings, subject)


def check_goes_on(
    state: State, model: Any, tokenizer: Any, *, context: int | None, quick: bool
) -> None:
    """Whether a run may go on from a state with this model, at these settings.

    Raises: ScaledotError naming the first thing that differs.
    """
    asked = Settings(
        digest(model, tokenizer),
        str(next(model.parameters(), torch.empty(0)).dtype).removeprefix("torch."),
        context or context_of(model, tokenizer),
        state.settings.chunk,  # what fits into memory now is not what fitted then
        quick,
    )
    check_alike(state.settings, asked)


class Saver:
    """Calls `save` with a state, at most every so many seconds; never where that is None."""

    def __init__(self, save: Callable[[State], None] | None, every: float) -> None:
        self._save, self._every, self._last = save, every, time.monotonic()

    def __call__(self, state: Callable[[], State]) -> None:
        if self._save is not None and time.monotonic() - self._last >= self._every:
            self._save(state())
            self._last = time.monotonic()


@dataclass(frozen=True)
class _Mark:
    """A document, and how many windows of it are done; None for all."""

    file: str
    index: int
    windows: int | None


class Run:
    """Documents going through a model. `state()` is what it knows after the last whole window."""

    def __init__(self, model: Any, tokenizer: Any, state: State) -> None:
        self.model, self.tokenizer, self._before = model, tokenizer, state
        self._counted = state.counted.copy()
        self._done: tuple[Gathered, _Mark | None] = (Gathered({}, {}), None)

    def state(self) -> State:
        found, mark = self._done
        if mark is not None:  # an interrupt may have come between the two
            self._counted.mark(mark.file, mark.index, mark.windows)
        whole = gathered.merge(self._before.gathered, found)
        return replace(self._before, gathered=whole, counted=self._counted.copy())

    @property
    def tokens(self) -> int:
        return self._before.gathered.tokens + self._done[0].tokens

    def read(
        self,
        documents: Iterable[Document],
        *,
        max_tokens: int | None = None,
        save: Callable[[State], None] | None = None,
        every: float = EVERY,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """Run documents through the model.

        max_tokens: no further window once so many tokens are counted, earlier runs' among them.
        save is given the state every so many seconds, between windows. on_progress(documents,
        0, tokens), of this run, is called after each window.

        Raises: whatever `documents` and `save` raise; KeyboardInterrupt. What is done is kept.
        """
        # A new observation begins: what is known is what was before it.
        self._before, self._done = self.state(), (Gathered({}, {}), None)
        device, limit = _device(self.model), self._before.settings.context
        chunk, quick = self._before.settings.chunk, self._before.settings.quick
        saver = Saver(save, every)
        left = (x for x in documents if (x.file, x.index) not in self._counted)
        first = next(left, None)
        if first is None or (max_tokens is not None and self.tokens >= max_tokens):
            return  # for an observation of nothing is an error
        with _observing(self.model, self.tokenizer, quick) as seen:
            for document in chain([first], left):
                place = (document.file, document.index)
                windows = encode(document.text, self.tokenizer, limit)
                if self._counted.begun.get(place, 0) >= len(windows):
                    self._counted.mark(*place)  # it has become shorter since
                for number in range(self._counted.begun.get(place, 0), len(windows)):
                    if max_tokens is not None and self.tokens >= max_tokens:
                        return
                    window = windows[number]
                    started = time.perf_counter()
                    prefill.forward(self.model, window, device, chunk=chunk)
                    end = number + 1 == len(windows)
                    mark = _Mark(*place, None if end else number + 1)
                    seconds = time.perf_counter() - started
                    found = _after(self._done[0], seen, window, end, seconds)
                    self._done = (found, mark)
                    self._counted.mark(mark.file, mark.index, mark.windows)
                    if on_progress is not None:
                        on_progress(found.texts, 0, found.tokens)
                    saver(self.state)


def share_of(counted: Counted, rank: int = 0, world: int = 1) -> Callable[[str, int], bool]:
    """Which documents a process reads: those not counted yet, of several processes each its share.

    A document's own file and place say whose it is, so that processes which see other files deal
    the rest out alike. One that was begun is the first process's, which has what it gave.
    """
    begun, counted = dict(counted.begun), counted.copy()

    def wanted(file: str, index: int) -> bool:
        if (file, index) in begun:
            return rank == 0
        mine = (zlib.crc32(file.encode()) + index) % world == rank
        return mine and (file, index) not in counted

    return wanted


def _after(
    before: Gathered, seen: Observation, window: Mapping[str, Tensor], end: bool, seconds: float
) -> Gathered:
    """What was gathered, one window later."""
    length = window["input_ids"].shape[-1]
    return Gathered(
        dict(seen.heads),
        dict(seen.masks),
        before.texts + end,
        before.windows + 1,
        before.tokens + window["input_ids"].numel(),
        before.pairs + length**2,
        max(before.longest, length),
        before.seconds + seconds,
    )


@contextmanager
def _observing(model: Any, tokenizer: Any, quick: bool) -> Iterator[Observation]:
    marks = delimiters(tokenizer) if not quick and has_vocabulary(tokenizer) else None
    with resting(model), observe(model, full=not quick, delimiters=marks) as seen:
        yield seen


def _device(model: Any) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))

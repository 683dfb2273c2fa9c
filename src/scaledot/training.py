"""Monitor: the attention of every head, watched while a model is trained, at the price of none.

One core for plain loops, transformers' Trainer and Lightning: it lets the model's attention run in
our kernel for as long as it is open, adds up the statistics of the steps that are looked at, and
tells alarms, trackers and a file what it saw (tracking.py). A step is whatever lies between two
calls of `step`: one forward, or several whose gradients accumulate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import ScaledotError
from scaledot.alarms import Alarm, Event, Watch
from scaledot.distributed import reduce_taken
from scaledot.heads import HeadStats
from scaledot.observation import Observation, looking, unwrapped
from scaledot.tracking import Look, TimeLine, Writer, writer


class Monitor:
    """Watch every attention head of a model while it is trained.

    A context manager: the model's attention runs in scaledot's kernel inside, at every step, so
    that steps which are looked at compute the same bits as the others. Call `step` after each
    `optimizer.step()`. Every training forward since the last call counts, under autocast too; what
    gradient checkpointing runs again does not, nor does a forward of a model in eval mode or under
    no_grad, which runs in the same kernel and leaves no trace. The model may be wrapped in
    DistributedDataParallel, FSDP or torch.compile, before or after; statistics of a process group
    are those of all ranks, rank 0 alone writes.

    every: look at the first step and at each whose number it divides; 1 looks at all.
    log: what the run logs to, a TensorBoard SummaryWriter, a wandb run, the mlflow module, a
    trackio run or a Lightning logger (`tracking.scalars` has the names).
    file: a time line in JSON lines, appended to.
    alarms: rules on what is seen, `scaledot.Alarm(…)`; `stopped` says that one wants the end. With
        any, looks hold the norms of queries and keys too, which their reasons are about.
    pictures: histograms and a layer × head picture at every so many looks, 0 for none.
    snapshots: the folder where alarms save weights, that of `file` unless given.
    start: steps done before, of a run that is resumed.

    Raises: ScaledotError for a step in which no attention was seen, on all ranks of a process group
    where one saw none; TypeError or ValueError for arguments that do not fit.
    Source: docs/training.md.

    >>> model = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    >>> with Monitor(model, every=1) as monitor:
    ...     loss = model(torch.randn(1, 5, 16)).sum()
    ...     loss.backward()
    ...     look = monitor.step(loss=loss)
    >>> look.step, [len(heads) for heads in look.values["entropy"]]
    (1, [2])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        log: Any = None,
        file: str | os.PathLike[str] | None = None,
        alarms: Sequence[Alarm] = (),
        pictures: int = 10,
        snapshots: str | os.PathLike[str] | None = None,
        start: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Monitor needs an nn.Module, got {type(model).__name__}")
        for name, given, least in (("every", every, 1), ("pictures", pictures, 0),
                                   ("start", start, 0)):  # fmt: skip
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                raise ValueError(f"{name} is {given!r}: pass a whole number of at least {least}")
        self.model, self.every, self.steps, self.stopped = model, every, start, False
        self.last: Look | None = None
        self.file = None if file is None else Path(file)
        self.writers: list[Writer] = [] if log is None else [writer(log)]
        self._pictures, self._alarms = pictures, tuple(alarms)
        Watch(self._alarms)  # says what is no alarm
        self._snapshots = None if snapshots is None else Path(snapshots)
        if self._snapshots is None and self.file is not None:
            self._snapshots = self.file.parent
        if self._snapshots is None and any(alarm.then == "save" for alarm in self._alarms):
            raise ValueError("an alarm saves weights, but where is not said: pass snapshots=FOLDER")
        self._context: ExitStack | None = None

    def __enter__(self) -> Monitor:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, *, steps: int | None = None, model: nn.Module | None = None) -> None:
        """What `with` does at its start; for trainers, which know the steps done before and wrap
        the model themselves."""
        if self._context is not None:
            raise ScaledotError("this Monitor is open already: close it, or make another")
        self.model = unwrapped(self.model if model is None else model)
        self.steps, self.stopped = self.steps if steps is None else steps, False
        # What an earlier run showed is no part of this one.
        self.last, self._looks = None, 0
        # One each: a rule's event then says whose action is due.
        self._watches = [(alarm, Watch([alarm])) for alarm in self._alarms]
        with ExitStack() as context:
            # What an alarm says of the reason is of norms: a pass over queries and keys of its own.
            norms = any(alarm.measure != "nonfinite" for alarm in self._alarms)
            self._seen = Observation(self.model, light=True, norms=norms)
            context.enter_context(looking(self.model, self._seen))
            self._line: TimeLine | None = None
            if self.file is not None and _rank() == 0:
                self._line = TimeLine(self.file, _name(self.model), self.every)
                context.callback(self._line.close)
            self._first, self._context = self.steps + 1, context.pop_all()
        self._prepare()

    def close(self) -> None:
        """What `with` does at its end: the model is its own again. Twice is once."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def _prepare(self) -> None:
        """Look at the step that comes, or not."""
        step = self.steps + 1
        self._looking = step == self._first or step % self.every == 0
        self._seen.mute(not self._looking)

    def step(self, loss: float | Tensor | None = None) -> Look | None:
        """End a step; what it showed if it was looked at, else None.

        loss: the step's, for the file; only read in a step that is looked at.
        Raises: ScaledotError where no attention was seen; whatever a tracker or an alarm's function
        raises.
        """
        if self._context is None:
            raise ScaledotError("monitor.step() outside of its context: use `with Monitor(…)`")
        self.steps += 1
        look = self._look(loss) if self._looking else None
        self._prepare()
        return look

    def _look(self, loss: float | Tensor | None) -> Look:
        stats = reduce_taken(self._take)
        found = [(alarm, event) for alarm, watch in self._watches
                 for event in watch.check(self.steps, stats)]  # fmt: skip
        number = (
            None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        )
        look = Look(self.steps, time.time(), number, stats, [event for _, event in found])
        self.last = look
        if _rank() == 0:
            if self._line is not None:
                self._line.write(look)
            draw = self._pictures > 0 and self._looks % self._pictures == 0
            for write in self.writers:
                write(look, draw)
        self._looks += 1
        for alarm, event in found:
            self._act(alarm.then, event)
        return look

    def _take(self) -> dict[str, HeadStats]:
        """What this process saw in the step."""
        if not self._seen.heads:
            if self._seen.passed_over:
                raise ScaledotError(
                    f"step {self.steps} had no training forward, only of a model in eval mode or "
                    "under no_grad: call model.train() before it"
                )
            self._seen.require_something()
        return self._seen.take()

    def _act(self, then: str | Callable[[Event], object], event: Event) -> None:
        if callable(then):
            then(event)
        elif then == "stop":
            self.stopped = True
        elif then == "save":
            assert self._snapshots is not None  # asked for
            from scaledot import snapshots

            tensors = snapshots.weights(self.model)
            if _rank() == 0:
                path = self._snapshots / f"step-{self.steps}.safetensors"
                snapshots.save(path, tensors, event.document())

    def attach(self, trainer: Any) -> Monitor:
        """Have a trainer open this monitor, call `step` and close it: transformers' `Trainer` or
        Lightning's, before its `train()` or `fit(…)`.

        Of transformers' the run's own reports get the scalars, added to its log entries; of
        Lightning's all its loggers. An alarm that stops ends the training after that step.
        Raises: TypeError for another trainer; ScaledotError where it trains another model.
        """
        from scaledot.trainers import attach

        attach(self, trainer)
        return self


def _rank() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if there else 0


def _name(model: nn.Module) -> str:
    """What the model calls itself, without the folder it was in, else its class."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return type(model).__name__
    return Path(name).name if Path(name).is_absolute() else name

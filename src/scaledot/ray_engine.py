"""A corpus run over Ray: actors with a model each, documents dealt out and sums collected.

The driver reads the files (that it alone knows which documents are counted is what lets no document
count twice), sends batches of documents, and merges what comes back. An actor gives the state of
its batch alone: what a lost one had not given back is run again by another, whole.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from scaledot import ScaledotError, state
from scaledot.corpus import Document
from scaledot.state import State
from scaledot.streaming import EVERY, Run, Saver, check_goes_on

LETTERS = 100_000
"""Of a batch, from which on it is sent; a document is never cut."""
MOST = 32
"""Documents of a batch."""
AHEAD = 2
"""Batches that an actor has before it, so that it never waits for the driver."""
TRIES = 3
"""How often a batch whose actor was lost is tried again: it may be what the actor dies of."""


class RayRun:
    """As `streaming.Run`, the documents going through the models of Ray's actors.

    model: what `loading.load` is given, which each actor loads for itself. workers: actors, None
    for as many as the cluster's processors (or GPUs) hold. local: the same run in this process,
    which finishes the documents that an earlier run has begun.
    """

    def __init__(
        self, model: Mapping[str, Any], local: Run, workers: int | None, threads: int
    ) -> None:
        self._model, self._local = dict(model), local
        self._workers, self._threads = workers, threads
        self._state = local.state()

    def state(self) -> State:
        return self._state

    def read(
        self,
        documents: Iterable[Document],
        *,
        max_tokens: int | None = None,
        save: Callable[[State], None] | None = None,
        every: float = EVERY,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """As `Run.read`; max_tokens ends the sending of batches, and those sent count too.

        Raises: ScaledotError for a cluster that is not there or an actor that cannot load its
        model; what an actor raises.
        """
        saver, before = Saver(save, every), self._state.gathered
        batches = _batches(self._begun_apart(documents))
        waiting: dict[Any, Any] = {}
        with _cluster() as ray, self._actors(ray) as actors:
            idle = [actor for _ in range(AHEAD) for actor in actors]
            while True:
                over = max_tokens is not None and self._state.gathered.tokens >= max_tokens
                while idle and not over and (batch := next(batches, None)) is not None:
                    actor = idle.pop()
                    waiting[actor.audit.remote(batch)] = actor
                if not waiting:
                    return
                ready, _ = ray.wait(list(waiting), num_returns=1)
                idle.append(waiting.pop(ready[0]))
                self._state = state.merge(self._state, state.unpacked(_got(ray, ready[0])))
                if on_progress is not None:
                    now = self._state.gathered
                    on_progress(now.texts - before.texts, 0, now.tokens - before.tokens)
                saver(self.state)

    def _begun_apart(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents for the actors; those that were begun are finished here."""
        for document in documents:
            if (document.file, document.index) not in self._state.counted.begun:
                yield document
                continue
            self._local = Run(self._local.model, self._local.tokenizer, self._state)
            self._local.read([document])
            self._state = self._local.state()

    @contextmanager
    def _actors(self, ray: Any) -> Iterator[list[Any]]:
        device = str(self._model.get("device", "cpu"))
        gpus = int(device.startswith("cuda"))
        there = ray.cluster_resources()
        room = int(there.get("GPU", 0)) if gpus else int(there.get("CPU", 0)) // self._threads
        wanted = self._workers or max(1, room)
        if wanted > room:
            what = "GPUs" if gpus else f"processors at {self._threads} a worker"
            raise ScaledotError(
                f"{wanted} workers need more {what} than the cluster's {room}: ask for fewer"
            )
        kind = ray.remote(
            num_cpus=self._threads, num_gpus=gpus, max_restarts=-1, max_task_retries=TRIES
        )(_Auditor)
        blank = state.packed(State.fresh(self._state.settings, self._state.subject))
        actors = [kind.remote(self._model, blank, self._threads) for _ in range(wanted)]
        try:
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)


class _Auditor:
    """One model in a process of Ray."""

    def __init__(self, model: Mapping[str, Any], blank: bytes, threads: int) -> None:
        import torch

        from scaledot.loading import load

        torch.set_num_threads(threads)
        self._loaded, self._blank = load(**model), state.unpacked(blank)
        settings = self._blank.settings
        check_goes_on(
            self._blank, self._loaded.model, self._loaded.tokenizer, context=settings.context,
            quick=settings.quick,
        )  # fmt: skip

    def audit(self, batch: list[Document]) -> bytes:
        """The state of these documents alone."""
        run = Run(self._loaded.model, self._loaded.tokenizer, self._blank)
        run.read(batch)
        return state.packed(run.state())


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    letters = 0
    for document in documents:
        batch.append(document)
        letters += len(document.text)
        if letters >= LETTERS or len(batch) == MOST:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to the cluster of RAY_ADDRESS or of the caller, else to one of this machine's
    own; what runs there for us ends with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ScaledotError(
            'ray is not installed, --engine ray needs it: pip install "scaledot[ray]"'
        ) from None
    if ray.is_initialized():
        yield ray
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
    except Exception as error:  # Ray's own classes, of several modules
        raise ScaledotError(f"no Ray cluster: {_line(error)}") from None
    with suppress(ValueError):  # in another thread nobody has changed it
        signal.signal(signal.SIGTERM, before)  # Ray's own would end this process unsaved
    try:
        yield ray
    finally:
        ray.shutdown()


def _got(ray: Any, task: Any) -> bytes:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ScaledotError):
            raise ScaledotError(str(cause)) from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ScaledotError(
            f"a worker could not start, or was lost {TRIES + 1} times with the same documents: "
            f"{_line(error)}"
        ) from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[-200:]

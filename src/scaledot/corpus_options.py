"""`scaledot audit` of a corpus: what its options ask for, and the run that they start."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaledot.options import InputError, Stopped, check_writable, loaded, note


@dataclass(frozen=True)
class Corpus:
    """The options that make an audit one of a corpus."""

    texts: tuple[str, ...]
    files: tuple[str, ...]
    lines: bool
    state: Path | None
    field: str
    skip: bool
    ray: bool
    workers: int | None


def asked(
    text: list[str] | None, files: list[str] | None, lines: bool, *, state: str | None,
    field: str | None, bad_lines: str | None, engine: str | None, workers: int | None,
) -> Corpus | None:  # fmt: skip
    """The corpus that the options ask for; None where they name a few texts.

    Raises: InputError for options that do not go together.
    """
    from scaledot.corpus import is_corpus
    from scaledot.processes import started

    several = started() > 1
    if bad_lines not in (None, "stop", "skip"):
        raise InputError(f"--bad-lines is {bad_lines!r}: pass stop or skip")
    if engine not in (None, "ray"):
        raise InputError(f"no engine {engine!r}: pass ray, or none")
    if workers is not None and engine is None:
        raise InputError("--workers needs --engine ray")
    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}: pass at least 1")
    if several and engine is not None:
        raise InputError("--engine ray starts its own processes: run it without torchrun")
    if several and "-" in (files or []):
        raise InputError("--file is -: several processes cannot share one standard input")
    documents = any(map(is_corpus, files or []))
    if not (documents or several or state or engine):
        for name, given in (("--field", field), ("--bad-lines", bad_lines)):
            if given is not None:
                raise InputError(f"{name} needs --file with .jsonl or .parquet files")
        return None
    if lines and text is None and files is None:
        raise InputError("--lines needs --file or --text")
    return Corpus(
        tuple(text or ()), tuple(files or ()), lines,
        None if state is None else new_state("--state", state),
        field or "text", bad_lines == "skip", engine == "ray", workers,
    )  # fmt: skip


def new_state(option: str, name: str) -> Path:
    """Where a state goes, by a name under which `audit` knows it again."""
    if not name.endswith(".safetensors"):
        raise InputError(f"{option} is {name}: pass a file that ends in .safetensors")
    check_writable(Path(name))
    return Path(name)


def audit(
    err: Any, corpus: Corpus, model: str | None, how: Mapping[str, Any], job: Mapping[str, Any], *,
    layers: list[int] | None, page: bool,
) -> Any:  # fmt: skip
    """The audit of a corpus; an exit code where this process has nothing to show.

    how: as `loading.load`. job: settings of `jobs.Job`. page: with an example for a page.
    """
    import torch

    from scaledot import jobs, terminal
    from scaledot.auditing import example_of
    from scaledot.corpus import documents, sources
    from scaledot.gathered import conclude
    from scaledot.loading import load, sample_text
    from scaledot.processes import processes
    from scaledot.windows import encode

    texts = list(corpus.texts)
    if not texts and not corpus.files:
        texts = [sample_text()]
        if model is not None:
            note("no text given: the embedded text is used; pass --text or --file for your own")
    found = sources(corpus.files, texts, lines=corpus.lines)
    fresh = corpus.state is None or not corpus.state.exists()
    if corpus.ray and fresh and job["threads"] is None:
        job = {**job, "threads": 1}  # many workers are what Ray is for
    asked_for = jobs.Job(found, corpus.field, corpus.skip, corpus.state, layers=layers, **job)
    with processes() as here:
        how = dict(how)
        if here.world > 1 and how["device"] == "cuda":
            how["device"] = f"cuda:{here.local}"
        got = loaded(err, model, **how) if here.first else load(model, **how)
        runner: Any = jobs.Run
        if corpus.ray:
            from scaledot.ray_engine import RayRun

            def runner(*args: Any) -> RayRun:
                threads = torch.get_num_threads()  # the run's: they are set by now
                return RayRun({"source": model, **how}, jobs.Run(*args), corpus.workers, threads)

        with terminal.progress(err, unit="texts") if here.first else nullcontext() as update:
            outcome = jobs.run(asked_for, got, here, runner=runner, on_progress=update, note=note)
    _say(outcome, corpus, here.rank)
    if outcome.failed is not None:
        raise outcome.failed
    if outcome.state is None or (not outcome.complete and here.world > 1):
        return 0 if outcome.complete else 130
    state = outcome.state
    if not state.gathered.windows:
        raise Stopped  # before the first window
    example = None
    if page:
        given = documents(found, field=corpus.field, on_unreadable=lambda _: None)
        if (first := next(given, None)) is not None:
            window = encode(first.text, got.tokenizer, state.settings.context)[0]
            example = example_of(got.model, got.tokenizer, [first.text], window, got.name)
    return conclude(
        state.subject, state.gathered, layers=layers, complete=outcome.complete,
        skipped=outcome.skipped, example=example,
    )  # fmt: skip


def _say(outcome: Any, corpus: Corpus, rank: int) -> None:
    from scaledot.corpus import UnreadableError
    from scaledot.jobs import part_path

    for line in outcome.unreadable:
        note(f"skipped: {line}")
    if outcome.skipped > len(outcome.unreadable):
        note(f"skipped: {outcome.skipped - len(outcome.unreadable):,} more that cannot be read")
    if corpus.state is None or (outcome.complete and outcome.failed is None):
        return
    if not outcome.state.gathered.windows:
        return
    path = part_path(corpus.state, rank) if rank else corpus.state
    skip = ""
    if isinstance(outcome.failed, UnreadableError):
        skip = "; --bad-lines skip leaves such documents out"
    note(f"what was counted is in {path}: the same command goes on from there{skip}")

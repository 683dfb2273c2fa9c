"""A corpus run on disk: what was gathered, of which documents and model, under what settings.

One safetensors file, written whole or not at all. Head statistics are in the form of heads.py,
which reads them too; a bit a document says which are counted, so that two states merge only if no
document is in both. The model's facts are there, so that an audit needs no model: docs/corpus.md.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaledot import ScaledotError, gathered, heads
from scaledot.files import read, write
from scaledot.findings import Layer
from scaledot.gathered import Gathered, Subject
from scaledot.leakage import Leak
from scaledot.mask_check import MaskFacts, Shown
from scaledot.scales import Configured
from scaledot.trials import Trials

FORMAT = "scaledot/state 1"
_HEAD = 100 << 20
"""Bytes that the head of a safetensors file may have."""
_ABOUT, _BITS = "about", "documents"
"""Tensors of bytes: a JSON text (metadata may hold less than a corpus has files), and a bit a
document, file after file."""


@dataclass
class Counted:
    """Which documents are counted: a bit each, by file. begun: windows done of one not finished."""

    bits: dict[str, bytearray] = field(default_factory=dict)
    begun: dict[tuple[str, int], int] = field(default_factory=dict)

    def __contains__(self, place: tuple[str, int]) -> bool:
        """Whether all of a document is counted."""
        name, index = place
        bits = self.bits.get(name, b"")
        return index >> 3 < len(bits) and bool(bits[index >> 3] >> (index & 7) & 1)

    def mark(self, name: str, index: int, windows: int | None = None) -> None:
        """Count a document, or so many windows of it. Twice is once."""
        if windows is not None:
            self.begun[name, index] = windows
            return
        bits = self.bits.setdefault(name, bytearray())
        bits.extend(bytes(max(0, (index >> 3) + 1 - len(bits))))
        bits[index >> 3] |= 1 << (index & 7)
        self.begun.pop((name, index), None)

    def copy(self) -> Counted:
        return Counted({name: bytearray(x) for name, x in self.bits.items()}, dict(self.begun))

    def shared(self, other: Counted) -> tuple[str, int] | None:
        """A document of which both have counted something, None for none."""
        for name in self.bits.keys() & other.bits.keys():
            both = _number(self.bits[name]) & _number(other.bits[name])
            if both:
                return name, (both & -both).bit_length() - 1
        for one, of in ((self, other), (other, self)):
            for place in one.begun:
                if place in of or place in of.begun:
                    return place
        return None

    def within(self, other: Counted) -> bool:
        """Whether the other has counted all of this."""
        return all(
            not _number(x) & ~_number(other.bits.get(name, b"")) for name, x in self.bits.items()
        ) and all(p in other or other.begun.get(p, 0) >= n for p, n in self.begun.items())


def _number(bits: bytes | bytearray) -> int:
    return int.from_bytes(bits, "little")


@dataclass(frozen=True)
class Settings:
    """What two runs must have in common for their sums to be of one kind.

    model: a digest of weights and tokenizer (`digest`). context: tokens of a window, None without a
    limit. chunk: tokens of a part, None where windows run whole. quick: the forward pass alone.
    """

    model: str
    dtype: str
    context: int | None
    chunk: int | None
    quick: bool


_WORDS = {"model": "the model or its tokenizer", "dtype": "--dtype", "context": "--context",
          "chunk": "the size of parts (memory decides it)", "quick": "--quick"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class State:
    """Everything that a corpus run knows. part: it is one process's, beside the state of the first
    process of its run."""

    settings: Settings
    subject: Subject
    gathered: Gathered
    counted: Counted
    part: bool = False

    @staticmethod
    def fresh(settings: Settings, subject: Subject, *, part: bool = False) -> State:
        """What has counted nothing yet."""
        return State(settings, subject, Gathered({}, {}), Counted(), part)


def check_alike(a: Settings, b: Settings) -> None:
    """Raises: ScaledotError naming the first setting that differs."""
    for name, word in _WORDS.items():
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            said = "" if name == "model" else f" ({one} and {other})"
            raise ScaledotError(f"{word} differs{said}")


def merge(a: State, b: State) -> State:
    """What both have counted.

    Counts, histograms and extremes are exact, moments to 1e-12, in any order. What is said of the
    model is a's; threads are None where the two had other numbers of them.

    Raises: ScaledotError where a document is in both, or a setting differs.
    """
    check_alike(a.settings, b.settings)
    if (place := a.counted.shared(b.counted)) is not None:
        raise ScaledotError(f"document {place[1] + 1:,} of {place[0]} is counted in both")
    counted = a.counted.copy()
    for name, bits in b.counted.bits.items():
        mine = _number(counted.bits.get(name, b""))
        size = max(len(bits), len(counted.bits.get(name, b"")))
        counted.bits[name] = bytearray((mine | _number(bits)).to_bytes(size, "little"))
    counted.begun |= b.counted.begun
    subject = a.subject
    if subject.threads != b.subject.threads:
        subject = replace(subject, threads=None)
    whole = gathered.merge(a.gathered, b.gathered)
    return State(a.settings, subject, whole, counted, a.part and b.part)


def digest(model: Any, tokenizer: Any) -> str:
    """Of a model's weights and configuration, and of what its tokenizer makes of a text."""
    found = hashlib.blake2b(digest_size=16)
    for name, x in model.state_dict().items():
        found.update(f"{name} {tuple(x.shape)}".encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        told = {
            k: v for k, v in config.to_dict().items()
            if not k.startswith("_") and k not in ("transformers_version", "dtype", "torch_dtype")
        }  # fmt: skip
        found.update(json.dumps(told, sort_keys=True, default=str).encode())
    ids = tokenizer("Attention: 3 heads, naïve 猫!\n")["input_ids"]
    found.update(str(ids.tolist() if isinstance(ids, Tensor) else list(ids)).encode())
    return found.hexdigest()


# On disk


def packed(state: State) -> bytes:
    """A state as the bytes of its file."""
    counted = state.counted
    about = {
        "settings": asdict(state.settings),
        "subject": asdict(state.subject),
        "gathered": {
            f.name: getattr(state.gathered, f.name)
            for f in fields(Gathered)
            if f.name not in ("stats", "masks")
        },
        "masks": {path: _of_facts(x) for path, x in state.gathered.masks.items()},
        "files": [[name, len(bits)] for name, bits in counted.bits.items()],
        "begun": [[*place, n] for place, n in counted.begun.items()],
    }
    also = {
        _ABOUT: _bytes(json.dumps(about).encode()), _BITS: _bytes(b"".join(counted.bits.values())),
    }  # fmt: skip
    return heads.packed(
        state.gathered.stats, also, {"state": FORMAT} | ({"part": "yes"} if state.part else {})
    )


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def unpacked(data: bytes, name: str = "this") -> State:
    """What `packed` packed; `name` is what errors call it. Raises: ScaledotError otherwise."""
    tensors, meta = heads.parsed(data, name)
    if meta.get("state") != FORMAT:
        raise ScaledotError(f"{name} is not a state of this version: `audit --state` writes one")
    stats = heads.modules_of(tensors, meta, name)
    try:
        about = json.loads(tensors[_ABOUT].numpy().tobytes())
        bits, at, counted = tensors[_BITS].numpy().tobytes(), 0, Counted()
        for file, size in about["files"]:
            counted.bits[file] = bytearray(bits[at : at + size])
            at += size
        if at != len(bits):
            raise ValueError("bits of other files")
        counted.begun = {(file, index): n for file, index, n in about["begun"]}
        masks = {path: _facts(x) for path, x in about["masks"].items()}
        return State(
            Settings(**about["settings"]),
            _subject(about["subject"]),
            Gathered(stats, masks, **about["gathered"]),
            counted,
            "part" in meta,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ScaledotError(f"{name} is damaged: some of its facts are missing") from None


def load(path: str | os.PathLike[str]) -> State:
    """Read a state. Raises: ScaledotError for anything else, or a damaged one."""
    return unpacked(read(path), os.fspath(path))


def save(path: str | os.PathLike[str], state: State) -> None:
    """Write a state, whole or not at all. Raises: ScaledotError saying why it cannot be."""
    write(path, packed(state))


def is_state(path: str | os.PathLike[str], *, part: bool = False) -> bool:
    """Whether a file is one, or one process's part of one, by its head alone; False for weights,
    and for what is no safetensors file."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            meta = json.loads(file.read(size))["__metadata__"] if size < _HEAD else {}
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return meta.get("state") == FORMAT and (not part or "part" in meta)


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other runs off a state file; a run that is killed lets go of it.

    What a killed run left half written beside it is removed.

    Raises: ScaledotError where another run has it.
    """
    from filelock import FileLock, Timeout

    target = Path(path)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ScaledotError(
            f"{path} is in use by another run: wait, or pass another file"
        ) from None
    except (OSError, NotImplementedError) as error:  # the second where a file system has no locks
        reason = getattr(error, "strerror", None) or str(error)
        raise ScaledotError(f"cannot lock {path}: {reason.lower()}") from None
    try:
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def _of_facts(facts: MaskFacts) -> dict[str, Any]:
    def plain(x: Any) -> Any:
        if isinstance(x, Shown):
            return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
        if isinstance(x, Tensor):
            return x.tolist()
        return sorted(x) if isinstance(x, frozenset) else x

    return {f.name: plain(getattr(facts, f.name)) for f in fields(facts)}


def _facts(x: Mapping[str, Any]) -> MaskFacts:
    def whole(name: str, value: Any) -> Any:
        if name in ("later", "padding", "across") and value is not None:
            return Shown(
                torch.tensor(value["pairs"], dtype=torch.int64),
                torch.tensor(value["mass"], dtype=torch.float64),
                torch.tensor(value["most"], dtype=torch.float64),
            )
        if name == "alignment":
            return frozenset(value)
        return torch.tensor(value, dtype=torch.int64) if isinstance(value, list) else value

    return MaskFacts(**{name: whole(name, value) for name, value in x.items()})


def _subject(x: Mapping[str, Any]) -> Subject:
    trials = x["trials"]
    return Subject(
        **{k: v for k, v in x.items() if k not in ("layers", "trials", "unobserved")},
        unobserved=tuple(x["unobserved"]),
        layers=tuple(_layer(layer) for layer in x["layers"]),
        trials=Trials(
            tuple(Leak(**leak | {"tested": tuple(leak["tested"])}) for leak in trials["leaks"]),
            tuple((name, why) for name, why in trials["untried"]),
            {
                path: {int(head): (score, chance) for head, (score, chance) in found.items()}
                for path, found in trials["matched"].items()
            },
        ),
    )


def _layer(x: Mapping[str, Any]) -> Layer:
    given, own = x["configured"], x["own"]
    return Layer(
        **dict(x)
        | {
            "configured": None if given is None else Configured(**given),
            "own": None if own is None else tuple(own),
            "window": tuple(x["window"]) if isinstance(x["window"], list) else x["window"],
        }
    )


def together(states: Sequence[tuple[str, State]]) -> State:
    """Several states merged in their order; names are for errors."""
    (_, whole), *others = states
    for name, state in others:
        try:
            whole = merge(whole, state)
        except (ScaledotError, ValueError) as error:
            raise ScaledotError(f"cannot merge {name} with {states[0][0]}: {error}") from None
    return whole

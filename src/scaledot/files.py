"""Files read and written whole, with one line that says why one cannot be."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from scaledot import ScaledotError


def read(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes. Raises: ScaledotError saying why it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ScaledotError(f"no file {path}") from None
    except OSError as error:
        raise ScaledotError(f"cannot read {path}: {error}") from None


def is_special(path: Path) -> bool:
    """Whether a path is there and neither file nor folder: a device, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, then rename it into place: a failure never spoils an older file, and neither
    does a power cut, for all of it is on the disk before it has the name.

    What is no file (a pipe, /dev/null) is written to: renamed over, it would be gone.

    Raises: ScaledotError saying why it cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if is_special(target):
            target.write_bytes(data)
            return
        partial.write_bytes(data)
        _settle(partial)
        partial.replace(target)
        with contextlib.suppress(OSError):  # some systems let no folder be opened
            _settle(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ScaledotError(
            f"cannot write {target}: {(error.strerror or str(error)).lower()}"
        ) from None


def _settle(path: Path) -> None:
    """Return once the disk has what is there."""
    file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)

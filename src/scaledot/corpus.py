"""Files → documents, one at a time: text, JSON lines, Parquet, folders that `datasets` saved.

A document is known by its file, as the path was given, and its place there: the line, the row, 0
for a file that is one text. Blank ones are no documents. A line that cannot be read keeps its
place, so that a corrected file goes on where it was (state.py).
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from scaledot import ScaledotError

BATCH = 256
"""Rows of a Parquet file that are read together."""

_JSON = (".jsonl", ".ndjson")
_SAVED = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Document:
    """A text, and where it stands: its file and its place in it, from 0."""

    file: str
    index: int
    text: str


class UnreadableError(ScaledotError):
    """A document that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Source:
    """A file of documents. `name` is what it is known by: the path as it was given."""

    name: str
    kind: Literal["text", "lines", "json", "parquet", "dataset"]
    text: str | None = None
    """Of what is no file: standard input, or a text of the command line."""


def is_corpus(name: str) -> bool:
    """Whether a file's name says that it holds documents, or a pattern that there are several."""
    path = Path(name)
    return (
        path.is_dir() or _kind(path, False) != "text" or _pattern(name)
        or name.lower().endswith(".gz")
    )  # fmt: skip


def _pattern(name: str) -> bool:
    return glob.has_magic(name) and not Path(name).exists()


def sources(
    files: Sequence[str], texts: Sequence[str] = (), *, lines: bool = False
) -> list[Source]:
    """What files, patterns ("shards/*.jsonl"), saved dataset folders and texts hold documents.

    lines: each line of a text is one; - is standard input. A pattern's files come in the order of
    their names.

    Raises: ScaledotError for one that is not there, and for one given twice.
    """
    whole: Literal["lines", "text"] = "lines" if lines else "text"
    found = [Source(f"text {_digest(text)}", whole, text) for text in texts]
    for name in files:
        if name == "-":
            text = _decoded(_stdin(), "standard input")
            found.append(Source(f"- {_digest(text)}", whole, text))
            continue
        names = sorted(glob.glob(name, recursive=True)) if _pattern(name) else [name]
        if not names:
            raise ScaledotError(f"no file matches {name}")
        for one in names:
            path = Path(one)
            if not path.exists():
                raise ScaledotError(f"cannot read {one}: no such file or directory")
            if path.is_dir():
                found += _saved(path)
            else:
                found.append(Source(os.path.normpath(one), _kind(path, lines)))
    known: set[str] = set()
    for source in found:
        try:
            source.name.encode()
        except UnicodeEncodeError:
            raise ScaledotError(f"the name {source.name!r} is not UTF-8: rename the file") from None
        place = source.name if source.text is not None else os.path.realpath(source.name)
        if place in known:
            raise ScaledotError(f"{source.name} is given twice: its documents would count twice")
        known.add(place)
    return found


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _kind(path: Path, lines: bool) -> Literal["text", "lines", "json", "parquet"]:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(_JSON):
        return "json"
    if name.endswith(".parquet"):
        return "parquet"
    return "lines" if lines else "text"


def _saved(folder: Path) -> list[Source]:
    """What `datasets` saved there: a dataset, or one a split."""
    if not any((folder / name).is_file() for name in _SAVED):
        raise ScaledotError(
            f"{folder} is a folder: pass its files, as '{folder}/*.jsonl', or one that "
            "datasets' save_to_disk wrote"
        )
    parts, splits = [folder], folder / "dataset_dict.json"
    if splits.is_file():
        try:
            names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
            parts = [folder / name for name in names]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ScaledotError(f"cannot read {splits}: it is damaged ({error})") from None
    return [Source(os.path.normpath(part), "dataset") for part in parts]


def documents(
    found: Sequence[Source],
    *,
    field: str = "text",
    wanted: Callable[[str, int], bool] = lambda *_: True,
    on_unreadable: Callable[[UnreadableError], None] | None = None,
) -> Iterator[Document]:
    """Every document, in the order of files and places, blank ones left out.

    field: the column or key that holds the text. wanted(file, place) says whether one is read at
    all. on_unreadable is told of those that cannot be read, which are left
    out; without it the first is an error.

    Raises: UnreadableError; ScaledotError where a file cannot be read at all.
    """
    for source in found:
        for index, read in _places(source, field):
            if not wanted(source.name, index):
                continue
            try:
                text = read()
            except UnreadableError as error:
                if on_unreadable is None:
                    raise
                on_unreadable(error)
                continue
            if text.strip():
                yield Document(source.name, index, text)


def _places(source: Source, field: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """(place, what reads the document there) of each place in a file."""
    if source.kind == "parquet":
        yield from _rows_of_parquet(source.name, field)
    elif source.kind == "dataset":
        yield from _rows_of_dataset(source.name, field)
    elif source.kind == "text":
        yield 0, partial(_whole, source)
    else:
        read = partial(_of_json, field=field) if source.kind == "json" else _decoded
        with _opened(source) as file:
            for index, line in enumerate(_guarded(source.name, file)):
                yield (
                    index, partial(read, line.rstrip(b"\r\n"), f"{source.name} line {index + 1:,}")
                )  # fmt: skip


def _guarded(name: str, lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file that may turn out to be damaged, as a compressed one cut short."""
    try:
        yield from lines
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable_file(name, error) from None


def _opened(source: Source) -> Any:
    if source.text is not None:
        return io.BytesIO(source.text.encode("utf-8", "surrogatepass"))
    try:
        return (gzip.open if source.name.lower().endswith(".gz") else open)(source.name, "rb")
    except OSError as error:
        raise _unreadable_file(source.name, error) from None


def _whole(source: Source) -> str:
    with _opened(source) as file:
        return _decoded(b"".join(_guarded(source.name, file)), source.name)


def _stdin() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise _unreadable_file("-", error) from None


def _unreadable_file(name: str, error: Exception) -> ScaledotError:
    reason = getattr(error, "strerror", None) or str(error)
    return ScaledotError(f"cannot read {name}: {reason.lower()}")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"{where} is not UTF-8 text (byte {error.start:,}): convert it first"
        ) from None


def _of_json(data: bytes, where: str, field: str) -> str:
    line = _decoded(data, where).strip()
    if not line:
        return ""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnreadableError(
            f"{where} is not JSON: {error.msg} (column {error.colno:,})"
        ) from None
    except ValueError as error:  # a number of too many digits
        raise UnreadableError(f"{where} is JSON that cannot be read: {error}") from None
    except RecursionError:
        raise UnreadableError(f"{where} is JSON that cannot be read: nested too deep") from None
    if not isinstance(row, dict):
        raise UnreadableError(f"{where} is no object, as {{{json.dumps(field)}: …}}")
    return _text_of(row, field, where)


def _text_of(row: Any, field: str, where: str) -> str:
    if field not in row:
        there = ", ".join(sorted(map(str, row))[:8]) or "none"
        raise UnreadableError(f"{where} has no field {field!r} (fields: {there}): pass --field")
    if not isinstance(row[field], str):
        kind = "null" if row[field] is None else f"a {type(row[field]).__name__}"
        raise UnreadableError(f"{where} has no text in {field!r} but {kind}")
    try:
        row[field].encode()
    except UnicodeEncodeError as error:
        raise UnreadableError(
            f"{where} has half a character in {field!r} (a lone surrogate, {error.start + 1:,}.)"
        ) from None
    return row[field]


def _rows_of_parquet(name: str, field: str) -> Iterator[tuple[int, Callable[[], str]]]:
    try:
        import duckdb
    except ImportError:
        raise ScaledotError(
            'duckdb is not installed, .parquet files need it: pip install "scaledot[table]"'
        ) from None
    with duckdb.connect() as base:
        try:
            pattern = glob.escape(name)  # duckdb takes a path for one
            base.execute("DESCRIBE SELECT * FROM read_parquet(?)", [pattern])
            columns = [row[0] for row in base.fetchall()]
            if field not in columns:
                raise ScaledotError(
                    f"{name} has no column {field!r} (columns: {', '.join(columns[:8])}): "
                    "pass --field"
                )
            column = '"' + field.replace('"', '""') + '"'
            base.execute(
                f"SELECT {column}, file_row_number FROM read_parquet(?, file_row_number = true)",
                [pattern],
            )
            while rows := base.fetchmany(BATCH):
                for text, index in rows:
                    yield (
                        index,
                        partial(_text_of, {field: text}, field, f"{name} row {index + 1:,}"),
                    )
        except duckdb.Error as error:
            raise ScaledotError(
                f"cannot read {name}: {' '.join(str(error).split())[:160]}"
            ) from None


def _rows_of_dataset(name: str, field: str) -> Iterator[tuple[int, Callable[[], str]]]:
    try:
        import datasets
    except ImportError:
        raise ScaledotError(
            f"datasets is not installed, {name} needs it: pip install datasets"
        ) from None
    try:
        rows = datasets.load_from_disk(name)
    except Exception as error:  # whatever a damaged folder makes it trip over
        raise ScaledotError(f"cannot read {name}: {' '.join(str(error).split())[:160]}") from None
    if field not in rows.column_names:
        raise ScaledotError(
            f"{name} has no column {field!r} (columns: {', '.join(rows.column_names[:8])}): "
            "pass --field"
        )
    column = rows.select_columns([field])
    for index in range(len(rows)):
        yield index, partial(_of_row, column, index, field, f"{name} row {index + 1:,}")


def _of_row(rows: Any, index: int, field: str, where: str) -> str:
    return _text_of(rows[index], field, where)

"""Files become documents: every format, and every way in which one can be broken."""

import gzip
import importlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

from scaledot import ScaledotError
from scaledot.corpus import UnreadableError, documents, is_corpus, sources


def needed(package):
    if "SCALEDOT_REQUIRE_CORPUS" in os.environ:
        return importlib.import_module(package)
    return pytest.importorskip(package)


LINES = ['{"text": "One."}', "", '{"text": "  "}', '{"id": 3, "text": "Four\\n猫."}']


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*files, texts=(), lines=False, **how):
    return [(d.file, d.index, d.text) for d in documents(sources(files, texts, lines=lines), **how)]


def refused(*files, **how):
    with pytest.raises(ScaledotError) as error:
        read(*files, **how)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def written(name, data):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return name


def test_json_lines_keep_their_places_and_blank_ones_are_no_documents():
    written("a.jsonl", "\ufeff" + "\n".join(LINES))
    expected = [("a.jsonl", 0, "One."), ("a.jsonl", 3, "Four\n猫.")]
    assert read("a.jsonl") == expected
    Path("b.jsonl.gz").write_bytes(gzip.compress("\n".join(LINES).encode()))
    assert read("b.jsonl.gz") == [("b.jsonl.gz", *rest) for _, *rest in expected]


def test_a_text_is_one_document_or_one_a_line(monkeypatch):
    written("a.txt", "One.\n\nTwo.\n")
    assert read("a.txt") == [("a.txt", 0, "One.\n\nTwo.\n")]
    assert read("a.txt", lines=True) == [("a.txt", 0, "One."), ("a.txt", 2, "Two.")]
    names = set()
    for lines, given, said in (
        (False, b"One.\n\nTwo.\n", ["One.\n\nTwo.\n"]),
        (True, b"One.\r\n\nTwo.", ["One.", "Two."]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        got = read("-", lines=lines)
        assert [text for _, _, text in got] == said
        names |= {name for name, _, _ in got}
    assert len(names) == 2  # what came in is known by what it says, too
    first, second = read(texts=["Same.", "Other."])
    assert first[0] != second[0]
    assert first[0] == read(texts=["Same."])[0][0]  # a text is known by what it says
    assert read(texts=[""]) == []
    with pytest.raises(UnreadableError, match="is not UTF-8"):
        read(texts=["half \udcff"])


def test_a_pattern_is_its_files_in_the_order_of_their_names():
    for name in ("s/10.jsonl", "s/2.jsonl", "s/1.jsonl"):
        written(name, f'{{"text": "{name}"}}')
    assert [text for _, _, text in read("s/*.jsonl")] == ["s/1.jsonl", "s/10.jsonl", "s/2.jsonl"]
    written("s/[a].jsonl", '{"text": "brackets"}')
    assert [text for _, _, text in read("s/[a].jsonl")] == ["brackets"]
    assert refused("s/*.txt") == "no file matches s/*.txt"
    assert "given twice" in refused("s/1.jsonl", "s/../s/1.jsonl")
    assert "given twice" in refused("s/1.jsonl", os.path.abspath("s/1.jsonl"))
    assert refused("s/\udcff*", "s/1.jsonl") == "no file matches s/\udcff*"
    written("s/\udcff.jsonl", "{}")
    assert "is not UTF-8: rename the file" in refused("s/\udcff.jsonl")


def test_parquet_rows_are_documents():
    duckdb = needed("duckdb")
    duckdb.sql("SELECT 'r' || range AS body, range AS id FROM range(600)").write_parquet(
        "a.parquet"
    )
    got = read("a.parquet", field="body")
    assert got == [("a.parquet", i, f"r{i}") for i in range(600)]
    assert read("a.parquet", field="body", wanted=lambda name, index: index == 599) == got[-1:]
    assert refused("a.parquet") == (
        "a.parquet has no column 'text' (columns: body, id): pass --field"
    )
    assert "has no text in 'id' but a int" in refused("a.parquet", field="id")
    written("[a].parquet", "no parquet")  # and a pattern, if it were one, of the file above
    assert refused("[a].parquet", field="body").startswith("cannot read [a].parquet: ")
    data = Path("a.parquet").read_bytes()
    written("b.parquet", data[: len(data) // 2])
    assert refused("b.parquet", field="body").startswith("cannot read b.parquet: ")


def test_what_datasets_saved_is_read():
    datasets = needed("datasets")
    rows = datasets.Dataset.from_dict({"text": ["One.", "", "Three."]})
    rows.save_to_disk("one")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk("two")
    assert read("one") == [("one", 0, "One."), ("one", 2, "Three.")]
    assert read("two") == [
        ("two/train", 0, "One."), ("two/train", 2, "Three."), ("two/test", 0, "One."),
    ]  # fmt: skip
    assert refused("one", field="body") == "one has no column 'body' (columns: text): pass --field"
    next(Path("one").glob("*.arrow")).write_bytes(b"cut")
    assert refused("one").startswith("cannot read one: ")
    written("two/dataset_dict.json", "{}")
    assert refused("two").startswith("cannot read two/dataset_dict.json: it is damaged")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "cut', "is not JSON: Unterminated string starting at (column 10)"),
        ("[" * 100_000, "is JSON that cannot be read: nested too deep"),
        ('{"text": ' + "9" * 5000 + "}", "is JSON that cannot be read: Exceeds the limit"),
        ('["text"]', 'is no object, as {"text": …}'),
        ('{"body": "x", "id": 1}', "has no field 'text' (fields: body, id): pass --field"),
        ('{"text": null}', "has no text in 'text' but null"),
        ('{"text": ["x"]}', "has no text in 'text' but a list"),
        ('{"text": "\\ud83d"}', "has half a character in 'text' (a lone surrogate, 1.)"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0): convert it first"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_left_out_if_asked(line, why):
    line = line if isinstance(line, bytes) else line.encode()
    written("a.jsonl", b'{"text": "One."}\n' + line + b'\n{"text": "Three."}\n')
    assert refused("a.jsonl").startswith(f"a.jsonl line 2 {why}")
    told = []
    got = read("a.jsonl", on_unreadable=told.append)
    assert [index for _, index, _ in got] == [0, 2]
    assert [type(x) for x in told] == [UnreadableError]
    # Whoever does not want it does not stumble over it.
    assert read("a.jsonl", wanted=lambda name, index: index == 2) == got[1:]


def test_a_file_that_cannot_be_read_is_named():
    assert refused("none.jsonl") == "cannot read none.jsonl: no such file or directory"
    Path("folder").mkdir()
    assert refused("folder").startswith("folder is a folder: pass its files, as 'folder/*.jsonl'")
    data = gzip.compress(json.dumps({"text": "long " * 9999}).encode())
    written("cut.jsonl.gz", data[:-20])
    assert refused("cut.jsonl.gz").startswith("cannot read cut.jsonl.gz: ")
    written("cut.txt.gz", b"no gzip")
    assert refused("cut.txt.gz").startswith("cannot read cut.txt.gz: not a gzipped file")
    written("bad.txt", b"a\xff")
    assert refused("bad.txt") == "bad.txt is not UTF-8 text (byte 1): convert it first"


@pytest.mark.parametrize(
    ("package", "name", "says"),
    [("duckdb", "a.parquet", 'pip install "scaledot[table]"'),
     ("datasets", "saved", "pip install datasets")],
)  # fmt: skip
def test_a_reader_that_is_not_installed_is_named(monkeypatch, package, name, says):
    written("a.parquet", "")
    written("saved/dataset_info.json", "{}")
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(name).endswith(f"needs it: {says}") or refused(name).endswith(says)


def test_a_name_says_whether_it_holds_documents():
    for name in ("a.jsonl", "a.NDJSON.gz", "a.txt.gz", "a.parquet", "*.txt", "."):
        assert is_corpus(name), name
    for name in ("a.txt", "-", "a.json", written("odd[1].txt", "x")):
        assert not is_corpus(name), name

"""What is read and written whole: an older file survives, and a failure is one line."""

import os

import pytest

from scaledot import ScaledotError
from scaledot.files import read, write


def one_line(function, *arguments):
    with pytest.raises(ScaledotError) as error:
        function(*arguments)
    text = str(error.value)
    assert len(text.splitlines()) == 1
    return text


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    write(path, b"old")

    def full(self, data):
        with open(self, "wb") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    assert one_line(write, path, b"new") == f"cannot write {path}: no space left on device"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kept"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """Renamed over, /dev/null would become a file, for everybody where root runs this."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, b"new")
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"old")
    below, missing = file / "below", tmp_path / "none" / "below"
    assert one_line(write, below, b"new") == f"cannot write {below}: not a directory"
    assert one_line(write, missing, b"new") == f"cannot write {missing}: no such file or directory"
    assert one_line(write, tmp_path, b"new") == f"cannot write {tmp_path}: is a directory"
    assert os.listdir(tmp_path) == ["file"]
    assert os.listdir(tmp_path.parent).count(f".{tmp_path.name}.{os.getpid()}.part") == 0


def test_what_cannot_be_read_is_one_line(tmp_path):
    write(tmp_path / "file", b"bytes")
    assert read(tmp_path / "file") == b"bytes"
    assert one_line(read, tmp_path / "none") == f"no file {tmp_path / 'none'}"
    assert one_line(read, tmp_path).startswith(f"cannot read {tmp_path}: ")

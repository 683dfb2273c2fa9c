"""The course runs: every block of its chapters gives the output and the figure that stand there.

A `python` block runs in its chapter's one namespace, a `sh` block holds `scaledot` commands; what
they print is the block without a language that follows, where a line `…` stands for any lines. They
run where figures/ is a folder, and write the chapter's figures there. The Japanese chapters have
the same blocks. ``python tests/test_course.py`` writes outputs and figures anew: read the
difference before keeping it.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
COURSE = DOCS / "course"
CHAPTERS = sorted(path.name for path in (COURSE / "en").glob("[1-8]-*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
WIDTH = "88"


def blocks(path):
    return [(language, text) for language, text in BLOCK.findall(path.read_text("utf-8"))]


def printed(language, text, names):
    """What a block prints, run in the present folder."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if language == "python":
            exec(compile(text, "chapter", "exec"), names)
        else:
            from scaledot.cli import run

            for command in text.replace("\\\n", "").splitlines():
                name, *arguments = shlex.split(command)
                assert name == "scaledot", command
                assert run(arguments) == 0, command
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def runs(path):
    """(block, what it prints, what stands below it or None), in order, run as they come."""
    names = {"__name__": "chapter"}
    found = blocks(path)
    for i, (language, text) in enumerate(found):
        if language in ("python", "sh"):
            below = found[i + 1][1] if i + 1 < len(found) and not found[i + 1][0] else None
            yield text, printed(language, text, names), below


def alike(said, below):
    """Whether the output is what stands there; a line … stands for any lines."""
    parts = [re.escape(part) for part in re.split(r"^…\n", below, flags=re.M)]
    return re.fullmatch(r"(?:.*\n)*".join(parts), said) is not None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder like docs/course to write figures in."""
    (tmp_path / "figures").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    return tmp_path


def test_there_are_eight_chapters_in_both_languages():
    assert [name[0] for name in CHAPTERS] == list("12345678")
    assert sorted(path.name for path in (COURSE / "ja").glob("[1-8]-*.md")) == CHAPTERS


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_block_gives_what_stands_below_it(name, folder):
    chapter = COURSE / "en" / name
    ran = list(runs(chapter))
    assert len([below for *_, below in ran if below]) >= 2
    for text, said, below in ran:
        if below is None:
            assert said == "", f"{text}\nprints, and nothing stands below it:\n{said}"
        else:
            assert alike(said, below), f"{text}\ngave:\n{said}\nbut there stands:\n{below}"
    shown = set(re.findall(r"!\[[^\]]*\]\(\.\./figures/([^)]+)\)", chapter.read_text("utf-8")))
    assert shown, "a chapter without a figure"
    drawn = {path.name for path in (folder / "figures").iterdir()}
    assert shown == drawn
    for figure in drawn:
        same_drawing(COURSE / "figures" / figure, folder / "figures" / figure)


def same_drawing(kept, drawn):
    """The same paths to half a pixel, where the same matplotlib drew both."""
    texts = [path.read_text("utf-8") for path in (kept, drawn)]
    versions = [re.search(r"Matplotlib v[\d.]+", text)[0] for text in texts]
    paths = [re.findall(r' d="([^"]*)"', text) for text in texts]
    assert all(paths)
    if versions[0] == versions[1]:
        numbers = [
            [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", " ".join(p))] for p in paths
        ]
        assert numbers[1] == pytest.approx(numbers[0], abs=0.5), f"draw {kept.name} again"


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_japanese_chapter_has_the_same_blocks_and_figures(name):
    english, japanese = COURSE / "en" / name, COURSE / "ja" / name
    assert blocks(japanese) == blocks(english)
    figures = [
        re.findall(r"\(\.\./figures/([^)]+)\)", p.read_text("utf-8")) for p in (english, japanese)
    ]
    assert figures[0] == figures[1]


def test_every_link_of_the_course_leads_somewhere():
    for path in [*COURSE.rglob("*.md"), DOCS.parent / "README.ja.md"]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
            assert link.startswith("https://") or (path.parent / link).exists(), f"{path}: {link}"


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_has_an_exercise_and_its_answer(name):
    for language, words in (("en", ("Exercise", "Answer")), ("ja", ("演習", "解答"))):
        text = (COURSE / language / name).read_text("utf-8")
        for word in words:
            assert word in text, (language, name, word)


def write_anew(path):
    """Put what the blocks print below them; outputs with … are left as they are."""
    text = path.read_text("utf-8")
    for _, said, below in runs(path):
        if below is not None and not alike(said, below):
            if re.search("^…$", below, re.M):
                print(f"{path.name}: look at\n{below}", file=sys.stderr)
            else:
                text = text.replace(f"```\n{below}```", f"```\n{said}```", 1)
    path.write_text(text, "utf-8")


def translate(english, japanese):
    """Put the blocks of one chapter into the other, in order."""
    found = iter(BLOCK.finditer(english.read_text("utf-8")))
    text = BLOCK.sub(lambda _: next(found).group(0), japanese.read_text("utf-8"))
    japanese.write_text(text, "utf-8")


if __name__ == "__main__":
    os.chdir(COURSE)
    os.environ["COLUMNS"] = WIDTH
    for name in sys.argv[1:] or CHAPTERS:
        write_anew(COURSE / "en" / name)
        if (COURSE / "ja" / name).exists():
            translate(COURSE / "en" / name, COURSE / "ja" / name)

"""What is typed for a corpus: the options, the notes, and mistakes of one line."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scaledot import cli, heads, state

SOURCE = Path(__file__).parents[1] / "src"
LINES = [json.dumps({"text": f"And it came to pass, {i} times."}) for i in range(6)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for k in range(2):
        Path(f"s{k}.jsonl").write_text("\n".join(LINES[k::2]) + "\n")
    return tmp_path


def scaledot(capfd, *args):
    code = cli.run(args)
    out, err = capfd.readouterr()
    return code, out, err


def test_a_corpus_its_state_and_the_merge_of_two(capfd):
    code, out, err = scaledot(
        capfd, "audit", "--quick", "--file", "s*.jsonl", "--state", "a.safetensors"
    )
    assert (code, err) == (0, "")
    assert "6 texts" in out
    assert json.loads(Path("audit.json").read_text())["text"]["texts"] == 6
    again = scaledot(capfd, "audit", "a.safetensors")[1]
    # All but the commands, which name the file that there is.
    assert again.replace("a.safetensors", "audit.json").split("\nNext")[0].split("\n\n") == (
        out.split("\nWrote")[0].split("\n\n")
    )
    # The same command again counts nothing again; without the model, a head and a grid.
    assert (
        scaledot(capfd, "audit", "--quick", "--file", "s*.jsonl", "--state", "a.safetensors")[0]
        == 0
    )
    assert state.load("a.safetensors").gathered.texts == 6
    assert scaledot(capfd, "audit", "a.safetensors", "--head", "1.2", "--json", "b.json")[0] == 0
    assert json.loads(Path("b.json").read_text())["heads"]
    state.save("a.rank1.safetensors", replace(state.load("a.safetensors"), part=True))
    assert scaledot(capfd, "audit", "a.safetensors")[2] == (
        "note: 1 more process has a part beside it, which the next run takes in\n"
    )
    for k in range(2):
        scaledot(capfd, "audit", "--quick", "--file", f"s{k}.jsonl", "--state", f"{k}.safetensors")
    code, out, err = scaledot(
        capfd, "merge", "0.safetensors", "1.safetensors", "-o", "all.safetensors"
    )
    assert (code, err) == (0, "")
    assert out == "all.safetensors: 6 texts, 6 windows, 78 tokens of 2 states\n"
    code, out, err = scaledot(
        capfd, "merge", "0.safetensors", "a.safetensors", "-o", "b.safetensors"
    )
    assert (code, out) == (2, "")
    assert err == (
        "scaledot: cannot merge a.safetensors with 0.safetensors: document 1 of s0.jsonl is "
        "counted in both\n"
    )
    assert not Path("b.safetensors").exists()


def test_a_bad_line_stops_or_is_skipped_and_said(capfd):
    Path("s1.jsonl").write_text(LINES[1] + "\nnot json\n" + LINES[3] + "\n")
    asked = ("audit", "--quick", "--file", "s1.jsonl", "--state", "run.safetensors")
    code, out, err = scaledot(capfd, *asked)
    assert (code, out) == (2, "")
    note, error = err.splitlines()
    assert note == (
        "note: what was counted is in run.safetensors: the same command goes on from there; "
        "--bad-lines skip leaves such documents out"
    )
    assert error == "scaledot: s1.jsonl line 2 is not JSON: Expecting value (column 1)"
    code, out, err = scaledot(capfd, *asked, "--bad-lines", "skip")
    assert code == 0
    assert err == "note: skipped: s1.jsonl line 2 is not JSON: Expecting value (column 1)\n"
    assert "2 texts" in out
    assert "1 text skipped" in out


def test_where_nothing_was_counted_nothing_is_said_to_be_saved(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = ("audit", "--quick", "--file", "s0.jsonl", "--state", "run.safetensors")
    assert scaledot(capfd, *asked, "--engine", "ray") == (
        2,
        "",
        'scaledot: ray is not installed, --engine ray needs it: pip install "scaledot[ray]"\n',
    )


def test_a_page_of_a_corpus_has_its_first_document(capfd):
    pytest.importorskip("fastapi")
    asked = ("audit", "--quick", "--file", "s0.jsonl", "--html", "a.html", "--max-tokens", "13")
    code, out, err = scaledot(capfd, *asked)
    assert code == 0
    assert "1 text · 13 tokens" in out  # no further window once 13 tokens are counted
    assert "wrote a.html" in err
    assert "And it came to pass, 0 times." in Path("a.html").read_text()


def test_texts_of_the_command_line_have_a_state_too(capfd):
    asked = ("audit", "--quick", "--text", "One text.", "--state", "run.safetensors")
    assert scaledot(capfd, *asked)[0] == 0
    assert scaledot(capfd, *asked, "--text", "Another.")[0] == 0
    assert state.load("run.safetensors").gathered.texts == 2


MISTAKES = {
    ("--engine", "spark"): "no engine 'spark': pass ray, or none",
    ("--workers", "2"): "--workers needs --engine ray",
    ("--workers", "0", "--engine", "ray"): "--workers is 0: pass at least 1",
    ("--threads", "0"): "--threads is 0: pass at least 1",
    ("--bad-lines", "ask"): "--bad-lines is 'ask': pass stop or skip",
    ("--bad-lines", "skip"): "--bad-lines needs --file with .jsonl or .parquet files",
    ("--field", "body"): "--field needs --file with .jsonl or .parquet files",
    ("--file", "no/*.jsonl"): "no file matches no/*.jsonl",
    ("--file", "s0.jsonl", "--field", "body"): (
        "s0.jsonl line 1 has no field 'body' (fields: text): pass --field"
    ),
    ("--file", "s0.jsonl", "--state", "no/run.safetensors"): (
        "cannot write no/run.safetensors: no folder no; nothing was run"
    ),
    ("--file", "s0.jsonl", "--state", "s1.jsonl"): (
        "--state is s1.jsonl: pass a file that ends in .safetensors"
    ),
    ("--file", "s0.jsonl", "--state", "heads.safetensors"): (
        "heads.safetensors is not a state of this version: `audit --state` writes one; another "
        "--state begins anew"
    ),
    ("--file", "s0.jsonl", "--layers", "9"): "no layer 9: this model has layers 0 to 3",
    ("--lines", "--state", "run.safetensors"): "--lines needs --file or --text",
    ("empty.safetensors",): (
        "empty.safetensors has counted nothing yet: run the audit that writes it"
    ),
    ("run.safetensors", "--json", "./run.safetensors"): (
        "--json is ./run.safetensors, the state itself: pass another file"
    ),
    ("--file", "s0.jsonl", "--state", "a.safetensors", "--json", "a.safetensors"): (
        "--json and --state are both a.safetensors: pass two files"
    ),
    ("run.safetensors", "--html", "a.html"): (
        "--html needs the model: a state holds no query, key and value"
    ),
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line(capfd, sample_state, args):
    for name, found in sample_state.items():
        state.save(name, found)
    heads.save("heads.safetensors", sample_state["run.safetensors"].gathered.stats)
    code, out, err = scaledot(capfd, "audit", "--quick", *args)
    assert (code, out, err) == (2, "", f"scaledot: {MISTAKES[args]}\n")


@pytest.fixture(scope="module")
def sample_state():
    from scaledot.corpus import Document
    from scaledot.loading import load
    from scaledot.streaming import Run, begin

    found = load()
    empty = begin(found.model, found.tokenizer, "One text.", quick=True)
    run = Run(found.model, found.tokenizer, empty)
    run.read([Document("a", 0, "One text.")])
    return {"empty.safetensors": empty, "run.safetensors": run.state()}


def test_mistakes_of_merge(capfd, sample_state):
    state.save("run.safetensors", sample_state["run.safetensors"])
    heads.save("heads.safetensors", sample_state["run.safetensors"].gathered.stats)
    assert scaledot(capfd, "merge", "./run.safetensors", "-o", "run.safetensors")[0] == 0
    for args, says in {
        ("run.safetensors",): "merge needs -o PATH: where the sum goes",
        ("run.safetensors", "./run.safetensors", "-o", "a.safetensors"): "one state is given twice",
        ("none.safetensors", "-o", "a.safetensors"): "no file none.safetensors",
        ("run.safetensors", "s0.jsonl", "-o", "a.safetensors"): "cannot read s0.jsonl: ",
        (
            "run.safetensors",
            "-o",
            "no/a.safetensors",
        ): "cannot write no/a.safetensors: no folder no",
        (
            "run.safetensors",
            "-o",
            "heads.safetensors",
        ): "-o is heads.safetensors: that file is there",
        ("run.safetensors", "-o", "a"): "-o is a: pass a file that ends in .safetensors",
        (): "missing argument",
    }.items():
        code, out, err = scaledot(capfd, "merge", *args)
        assert (code, out) == (2, "")
        assert err.startswith(f"scaledot: {says}"), err
        assert len(err.splitlines()) == 1
    with state.locked("run.safetensors"):
        err = scaledot(capfd, "merge", "run.safetensors", "-o", "a.safetensors")[2]
    assert err == (
        "scaledot: run.safetensors is in use by another run: wait, or pass another file\n"
    )


def test_four_ways_to_run_a_corpus_give_the_same(capfd):
    """One process and a merge; two processes of torchrun's and two workers of Ray's as typed."""
    if "SCALEDOT_REQUIRE_CORPUS" not in os.environ:
        pytest.importorskip("ray")
    asked = ("audit", "--file", "s*.jsonl", "--quick", "--threads", "1", "--json")
    code, out, _ = scaledot(capfd, *asked, "one.json")
    assert (code, out.count("6 texts"), out.count("Wrote one.json")) == (0, 1, 1)
    ways = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
                     "--local-addr=127.0.0.1", "-m", "scaledot", *asked, "torchrun.json"],
        "ray": ["-m", "scaledot", *asked, "ray.json", "--engine", "ray", "--workers", "2"],
    }  # fmt: skip
    for name, command in ways.items():
        done = subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("6 texts") == 1
        assert done.stdout.count(f"Wrote {name}.json") == 1
    assert not list(Path().glob("*.safetensors"))
    for k in range(2):
        scaledot(capfd, "audit", "--quick", "--file", f"s{k}.jsonl", "--state", f"{k}.safetensors")
    scaledot(capfd, "merge", "0.safetensors", "1.safetensors", "-o", "all.safetensors")
    assert scaledot(capfd, "audit", "all.safetensors", "--json", "merged.json")[0] == 0
    one, *others = (json.loads(Path(f"{x}.json").read_text()) for x in ("one", *ways, "merged"))
    for other in others:
        assert other["text"] == one["text"]
        for a, b in zip(one["heads"], other["heads"], strict=True):
            assert (a["rows"], a["histograms"]) == (b["rows"], b["histograms"])
            for name, m in a["moments"].items():
                n = b["moments"][name]
                assert (m["count"], m["min"], m["max"]) == (n["count"], n["min"], n["max"])
                # The document has nine digits.
                if m["count"]:
                    assert m["mean"] == pytest.approx(n["mean"], rel=1.1e-9, abs=1e-300)

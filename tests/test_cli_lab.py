"""`scaledot lab`: each experiment runs, writes what it is asked for, takes mistakes in one line."""

import csv
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaledot import cli_lab, lab
from scaledot.cli import run

SMALL = {
    "variance": ("--d-k", "4,16", "--trials", "100"),
    "saturation": ("--scores", "10,8,6", "--d-k", "64"),
    "gradient": ("--d-k", "16", "--keys", "32", "--trials", "8"),
    "scales": ("--keys", "16,64", "--trials", "4"),
    "multihead": ("--d-model", "32", "--heads", "1,2", "--keys", "16"),
    "cost": ("gpt2-small", "--tokens", "1024"),
    "models": ("gemma",),
    "train": ("--rule", "none", "--steps", "2", "--seeds", "1"),
    "article": ("exercises",),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test in a folder of its own, 100 columns, no colour."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def scaledot(capfd, *args):
    code = run(["lab", *args])
    out, err = capfd.readouterr()
    return code, out, err


def test_lab_alone_lists_what_there_is(capfd):
    for args in ((), ("--help",)):
        code, out, err = scaledot(capfd, *args)
        assert (code, err) == (0, "")
        for experiment in SMALL:
            assert f"\n  {experiment} " in out


@pytest.mark.parametrize("experiment", SMALL)
def test_an_experiment_prints_and_writes_what_it_is_asked_for(capfd, here, experiment):
    code, out, err = scaledot(
        capfd, experiment, *SMALL[experiment],
        "--json", "x.json", "--csv", "x.csv", "--plot", "x.svg",
    )  # fmt: skip
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"scaledot lab {experiment}")
    assert lines[-1] == "Wrote x.json, x.csv, x.svg"
    assert max(map(len, lines)) <= 100
    doc = json.loads((here / "x.json").read_text("utf-8"))
    assert doc["format"] == "scaledot/lab"
    assert doc["experiment"].startswith(experiment)
    rows = list(csv.DictReader(io.StringIO((here / "x.csv").read_text("utf-8"))))
    assert len(rows) == len(doc["tables"][0]["rows"]) > 0
    assert (here / "x.svg").read_text("utf-8").startswith("<?xml")


@pytest.mark.parametrize("experiment", SMALL)
def test_help_lists_every_option(capfd, experiment):
    code, out, _ = scaledot(capfd, experiment, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    both = (getattr(cli_lab, f"_{experiment}"), cli_lab._outputs)
    for name, parameter in (p for f in both for p in inspect.signature(f).parameters.items()):
        option = f"--{name.replace('_', '-')}"
        positional = "Argument" in str(parameter.annotation)
        assert (name.upper() if positional and experiment != "article" else option) in out or (
            experiment == "article" and positional
        ), name


def test_json_or_csv_to_stdout_sends_the_table_to_stderr(capfd):
    _, out, err = scaledot(capfd, "models", "gpt", "--json", "-")
    assert json.loads(out)["experiment"].startswith("models")
    assert err.startswith("scaledot lab models")
    _, out, err = scaledot(capfd, "models", "gpt", "--csv", "-")
    assert len(list(csv.DictReader(io.StringIO(out)))) > 0
    assert err.startswith("scaledot lab models")


MISTAKES = {
    ("nothing",): None,
    ("article",): "article needs a name: r, exercises or claims",
    ("article", "python"): None,
    ("variance", "--d-k", "0"): "d_k is 0: pass at least 1",
    ("variance", "--d-k", "-4"): "d_k is -4: pass at least 1",
    ("variance", "--d-k", "x"): "--d-k is 'x': pass whole numbers with commas, as 4,16,64",
    ("variance", "--trials", "1"): "trials is 1: pass at least 2",
    ("variance", "--trials", "x"): "invalid value for '--trials': pass a whole number",
    ("variance", "--mean", "x"): "invalid value for '--mean': pass a number",
    ("variance", "--d-k", "99999999999"): "d_k is 99,999,999,999: pass at most 16,777,216",
    ("variance", "--seed", "1.5"): None,
    ("variance", "--seed", "-1"): "seed is -1: pass at least 0",
    ("variance", "--components", "gauss"): None,
    ("variance", "--components", "student", "--degrees", "2"): None,
    ("variance", "--scale", "d_k"): None,
    ("variance", "--plot", "x.gif"): "x.gif: plots are saved as .png, .svg, .pdf",
    ("variance", "--plot", "no/x.png"): "cannot write no/x.png: no folder no; nothing was run",
    ("variance", "--csv", "."): "cannot write .: it is a folder; nothing was run",
    ("models", "--json", "-", "--csv", "-"): (
        "--json - and --csv - both write to standard output: pass one of them"
    ),
    ("models", "--json", "a.png", "--plot", "./a.png"): (
        "two results would be written to a.png: pass two names"
    ),
    ("models", "--csv", ""): "the name of a file to write is empty: pass one",
    ("saturation", "--scores", "1,a"): "--scores is '1,a': pass numbers with commas, as 4,16,64",
    ("saturation", "--scores", "1,nan"): None,
    ("gradient", "--keys", "1"): None,
    ("scales", "--rule", "sqrt"): None,
    ("scales", "--temperature", "0"): None,
    ("multihead", "--heads", "3"): None,
    ("multihead", "--keys", "10000000"): (
        "10,000,000 keys, 8 heads and d_model 512 take 5,960,579 GiB: pass sizes for at most 8"
    ),
    ("cost", ""): "the model's name is empty: pass one, as GPT-2 small, or a folder",
    ("cost", "gpt9"): None,
    ("models", "gpt9"): None,
    ("train", "--steps", "0"): None,
    ("train", "--rule", "sqrt"): None,
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_gets_one_line_and_exit_code_2(capfd, here, args):
    code, out, err = scaledot(capfd, *args)
    assert code == 2
    assert out == ""
    assert err.startswith("scaledot: ")
    assert err.count("\n") == 1
    if MISTAKES[args] is not None:
        assert err == f"scaledot: {MISTAKES[args]}\n"
    assert list(here.iterdir()) == []


def test_without_matplotlib_a_plot_names_the_line_that_installs_it(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = scaledot(capfd, "models", "--plot", "x.png")
    assert (code, err) == (2, 'scaledot: plots need matplotlib: pip install "scaledot[plot]"\n')
    assert scaledot(capfd, "models")[0] == 0


def test_an_older_file_survives_what_cannot_be_run(capfd, here):
    (here / "x.json").write_text("old")
    assert scaledot(capfd, "variance", "--trials", "1", "--json", "x.json")[0] == 2
    assert (here / "x.json").read_text() == "old"


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from scaledot.cli import run; "
        "assert run(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    for args in (["lab"], ["lab", "variance", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *args], env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_ctrl_c_leaves_no_file(capfd, here, monkeypatch):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "variance", stop)
    code, out, err = scaledot(capfd, "variance", "--json", "x.json")
    assert (code, out, err) == (130, "", "stopped: nothing was finished\n")
    assert list(here.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_standard_output_is_one_line():
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "scaledot", "lab", "models", "gpt"], stdout=full, check=False,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr == "scaledot: cannot write the output: no space left on device\n"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 1 TB")])
def test_sizes_beyond_memory_are_one_line(capfd, monkeypatch, error):
    def models(name=""):
        raise error

    monkeypatch.setattr(lab, "models", models)
    code, _, err = scaledot(capfd, "models")
    assert (code, err) == (
        2, "scaledot: there is not enough memory for these sizes: ask for less\n"
    )  # fmt: skip

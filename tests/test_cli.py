"""The command line: what is printed where, exit codes, and one line for every mistake."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaledot import ScaledotError
from scaledot.cli import run
from scaledot.loading import SAMPLE, sample_text

TEXT = "And the earth was without form, and void."


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test in a folder of its own, 100 columns, no colour."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path


def scaledot(capfd, *args):
    code = run(args)
    out, err = capfd.readouterr()
    return code, out, err


def test_audit_without_arguments_is_the_main_job(capfd, here):
    code, out, err = scaledot(capfd, "audit")
    assert code == 0
    assert out.startswith("scaledot audit  embedded sample\n")
    for word in (
        "score variance",
        "theory",
        "Findings",
        "Checked, nothing found",
        "Wrote audit.json",
    ):
        assert word in out
    assert "cut into" in err
    doc = json.loads((here / "audit.json").read_text())
    assert doc["complete"] is True
    assert len(doc["heads"]) == 16


def test_a_saved_audit_prints_the_same_without_the_model(capfd):
    _, first, _ = scaledot(capfd, "audit", "--text", TEXT)
    code, again, err = scaledot(capfd, "audit", "audit.json")
    assert code == 0
    assert err == ""
    assert again.splitlines()[:30] == first.splitlines()[:30]
    assert "Wrote" not in again


def test_a_saved_audit_with_holes_is_damaged(capfd, here):
    scaledot(capfd, "audit", "--text", TEXT)
    doc = json.loads((here / "audit.json").read_text())
    for name in ("heads", "model", "text", "findings", "commands"):
        holes = {k: v for k, v in doc.items() if k != name}
        (here / "holes.json").write_text(json.dumps(holes))
        code, _, err = scaledot(capfd, "audit", "holes.json")
        assert (code, err) == (2, "scaledot: holes.json is damaged: run the audit again\n"), name


PARTS = ("width", "whatif", "roles", "gradients", "precision")


def test_an_audit_saved_before_heads_had_parts_prints(capfd, here):
    scaledot(capfd, "audit", "--text", TEXT)
    doc = json.loads((here / "audit.json").read_text())
    for head in doc["heads"]:
        for name in PARTS:
            del head[name]
    (here / "old.json").write_text(json.dumps(doc))
    for args in ((), ("--table",), ("--show", "first"), ("--head", "1.2"), ("--layers", "1")):
        code, out, err = scaledot(capfd, "audit", "old.json", *args)
        assert (code, err) == (0, ""), args
        assert "Why this wide" not in out
    code, out, err = scaledot(capfd, "audit", "old.json", "--show", "induction")
    said = "scaledot: no head has 'induction' here: audit without --quick, or a longer text\n"
    assert (code, out, err) == (2, "", said)


def damaged(value):
    """The same without one thing, each in turn, or with a list cut short or a number spoilt."""
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
    yield ["x"]
    yield 7


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.usefixtures("unannotated")
def test_a_damaged_part_is_one_line(capfd, here, part):
    scaledot(capfd, "audit", "--text", TEXT)
    doc = json.loads((here / "audit.json").read_text())
    whole = doc["heads"][0][part]
    refused = 0
    for holes in damaged(whole):
        doc["heads"][0][part] = holes
        (here / "holes.json").write_text(json.dumps(doc))
        code, out, err = scaledot(capfd, "audit", "holes.json", "--head", "0.0")
        if code:
            assert out == ""
            assert (code, err) == (2, "scaledot: holes.json is damaged: run the audit again\n")
            refused += 1
    assert refused >= len(whole) // 2


@pytest.mark.usefixtures("unannotated")
def test_damaged_numbers_of_a_head_are_one_line(capfd, here):
    scaledot(capfd, "audit", "--text", TEXT)
    text = (here / "audit.json").read_text()

    def spoilt(change):
        doc = json.loads(text)
        change(doc["heads"][0])
        (here / "holes.json").write_text(json.dumps(doc))
        return scaledot(capfd, "audit", "holes.json", "--head", "0.0")

    def shorter(head):
        head["whatif"]["scales"].pop()

    def zero(head):
        head["whatif"]["factors"][0] = 0

    def stranger(head):
        head["roles"]["called"] = [{"name": "oracle", "mass": 1.0}]

    def worded(head):
        head["rows"]["total"] = "many"

    for change in (shorter, zero, stranger, worded):
        code, out, err = spoilt(change)
        said = "scaledot: holes.json is damaged: run the audit again\n"
        assert (code, out, err) == (2, "", said), change.__name__


def test_one_head_is_told_in_full_and_from_its_file_alike(capfd):
    code, first, _ = scaledot(capfd, "audit", "--text", TEXT, "--head", "2.1")
    assert code == 0
    titles = ("Looks at", "Why this wide", "If the scale were another", "What passes back",
              "Room in low precision", "Every measure")  # fmt: skip
    places = [first.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    _, again, _ = scaledot(capfd, "audit", "audit.json", "--head", "2.1")
    assert again[: again.index("\nNext")] == first[: first.index("\nWrote")]


def test_quick_leaves_out_what_takes_longer(capfd):
    code, out, _ = scaledot(capfd, "audit", "--text", TEXT * 3, "--quick", "--head", "2.1")
    assert code == 0
    assert "Why this wide" in out
    assert "If the scale were another" not in out
    assert "after the same token" not in out
    assert scaledot(capfd, "audit", "audit.json", "--show", "excess")[0] == 0
    code, _, err = scaledot(capfd, "audit", "audit.json", "--show", "induction")
    assert code == 2
    assert err.startswith("scaledot: no head has 'induction' here")


def test_statistics_are_those_of_the_screens(capfd):
    from scaledot import cli_audit, terminal

    assert tuple(terminal.STATISTICS) == cli_audit.SHOW
    _, out, _ = scaledot(capfd, "audit", "--help")
    assert "|".join(cli_audit.SHOW) in "".join(out.split())
    scaledot(capfd, "audit")
    for name in cli_audit.SHOW:
        code, out, _ = scaledot(capfd, "audit", "audit.json", "--show", name)
        assert code == 0
        assert terminal.STATISTICS[name].title in out or name == "after"


def test_one_head_and_another_statistic_from_a_saved_audit(capfd):
    scaledot(capfd, "audit", "--text", TEXT)
    code, out, _ = scaledot(capfd, "audit", "audit.json", "--head", "1.2")
    assert code == 0
    assert "1.2" in out.splitlines()[0]
    code, out, _ = scaledot(capfd, "audit", "audit.json", "--show", "keys")
    assert code == 0
    assert "ffective keys" in out


def test_json_to_stdout_sends_the_table_to_stderr(capfd, here):
    code, out, err = scaledot(capfd, "audit", "--text", TEXT, "--json", "-")
    assert code == 0
    assert json.loads(out)["format"] == "scaledot/audit"
    assert "Findings" in err
    assert not list(here.iterdir())


def test_next_commands_run_as_printed(capfd):
    import shlex

    _, out, _ = scaledot(capfd, "audit", "--text", TEXT)
    lines = out[out.index("\nNext") :].replace("\\\n", " ").splitlines()
    commands = [line for line in lines if "scaledot " in line]
    assert len(commands) == 3
    for line in commands:
        command = line[line.index("scaledot ") :]
        words = shlex.split(command.split("   ")[0])
        assert words[0] == "scaledot"
        assert run(words[1:]) == 0, command
    capfd.readouterr()


def test_several_documents_and_lines(capfd, here):
    (here / "a.txt").write_text("first line\n\nsecond line\n", encoding="utf-8")
    _, out, _ = scaledot(capfd, "audit", "--file", "a.txt", "--lines")
    assert "2 texts" in out
    _, out, _ = scaledot(capfd, "audit", "--file", "a.txt", "--text", "third", "--json", "b.json")
    assert "2 texts" in out


def test_standard_input(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    code, out, _ = scaledot(capfd, "audit", "--file", "-")
    assert code == 0
    assert "1 text" in out


def test_trace_prints_every_stage(capfd):
    code, out, _ = scaledot(capfd, "trace", "The 猫 sat.", "--layer", "1", "--head", "2")
    assert code == 0
    for title in ("1 scores", "2 scaled", "3 masked", "4 weights", "5 output"):
        assert f"\n{title}" in out
    assert "猫 1/3" in out


def test_trace_without_text_takes_a_sentence_of_the_sample(capfd):
    code, out, _ = scaledot(capfd, "trace")
    assert code == 0
    assert sample_text().split()[0] in out.splitlines()[0]


def test_hostile_text_is_shown_not_obeyed(capfd):
    code, out, _ = scaledot(capfd, "trace", "[bold]a\x1b[31m </script>\u202e")
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "⟨U+202E⟩" in out


def test_ctrl_c_keeps_what_is_done_and_says_so(capfd, here, monkeypatch):
    from scaledot import auditing

    windows = auditing.windows_of

    def interrupted(*args):
        class Stop(dict):
            def items(self):
                raise KeyboardInterrupt

        found = list(windows(*args))
        return [*found[:2], Stop(found[2])]

    monkeypatch.setattr(auditing, "windows_of", interrupted)
    code, out, err = scaledot(capfd, "audit")
    assert code == 130
    assert "Stopped after 2 of 3 windows. The table is exact for those 512 tokens." in err
    assert "Findings" in out
    assert json.loads((here / "audit.json").read_text())["complete"] is False


def test_an_older_file_survives_a_run_that_fails(capfd, here):
    (here / "audit.json").write_text("precious")
    code, _, _ = scaledot(capfd, "audit", "nowhere/nothing")
    assert code == 2
    assert (here / "audit.json").read_text() == "precious"
    assert [p.name for p in here.iterdir()] == ["audit.json"]


MISTAKES = {
    (
        "audit",
        "--text",
        "",
    ): 'the text is empty: pass --text "…" or --file PATH (- is standard input)',
    ("audit", "--file", "nothing.txt"): "cannot read nothing.txt: no such file or directory",
    ("audit", "--json", "out/x.json"): "cannot write out/x.json: no folder out; nothing was run",
    ("audit", "--json", "."): "cannot write .: it is a folder; nothing was run",
    ("audit", "--html", "-"): "--html is -: a page goes into a file, as report.html",
    ("audit", "--html", "audit.json"): "--json and --html are both audit.json: pass two files",
    ("audit", "modls/gpt2", "--text", "x"): (
        "no model at 'modls/gpt2': no such folder, and not cached as a hub id"
    ),
    ("audit", "modls/gpt2"): (
        "no model at 'modls/gpt2': no such folder, and not cached as a hub id"
    ),
    ("audit", "nothing.json"): "cannot read nothing.json: no such file or directory",
    ("audit", "--head", "x"): "--head is 'x': pass layer.head, as 5.2",
    ("audit", "--layers", "3-"): "--layers is '3-': pass a number or a range, as 0-3",
    ("audit", "--layers", "9", "--text", "abc"): "no layer 9: this model has layers 0 to 3",
    ("audit", "--show", "beauty"): (
        "no statistic 'beauty': pass one of after, within, keys, saturated, gradient, "
        "largest, first, induction, excess"
    ),
    ("audit", "--color", "blue"): "--color is 'blue': pass auto, always or never",
    ("audit", "--max-tokens", "0"): "--max-tokens is 0: pass at least 1",
    ("audit", "--lines"): "--lines needs --file or --text",
    ("audit", "--dtype", "int8", "--text", "x"): (
        "unknown dtype 'int8': pass one of float32, bfloat16, float16, float64"
    ),
    ("trace", ""): "the text is empty: pass a sentence or --file PATH (- is standard input)",
    ("trace", "abc", "--layer", "9"): "no layer 9: this model has layers 0 to 3",
    ("trace", "abc", "--head", "9"): "no head 9: layer 0 has heads 0 to 3",
    ("trace", "abc", "--file", "x"): "both TEXT and --file were given: pass one",
    ("trace", "abc", "--rows", "0-3"): None,
    ("trace", "abc", "--keys", "2-99"): None,
    ("trace", "abc", "--max-tokens", "9999"): (
        "--max-tokens is 9999: trace shows every pair, pass 1 to 1024"
    ),
    ("audit", "--nope"): None,
    ("aufit",): None,
    ("audit", "--max-tokens", "many"): None,
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_gets_one_line_and_exit_code_2(capfd, args):
    code, out, err = scaledot(capfd, *args)
    assert code == 2
    assert out == ""
    assert err.startswith("scaledot: ")
    assert err.count("\n") == 1
    if MISTAKES[args] is not None:
        assert err == f"scaledot: {MISTAKES[args]}\n"


def test_an_unwritable_folder_stops_before_the_work(capfd, here, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, err = scaledot(capfd, "audit")
    assert code == 2
    assert err == "scaledot: cannot write audit.json: permission denied; nothing was run\n"


def test_text_that_is_not_utf8_is_named(capfd, here):
    (here / "sjis.txt").write_bytes("猫が好き".encode("shift_jis"))
    code, _, err = scaledot(capfd, "audit", "--file", "sjis.txt")
    assert code == 2
    assert err == "scaledot: sjis.txt is not UTF-8 text (byte 0): convert it first\n"


def test_a_head_that_is_not_there(capfd):
    scaledot(capfd, "audit", "--text", TEXT)
    code, out, err = scaledot(capfd, "audit", "audit.json", "--head", "9.9")
    assert code == 2
    assert out == ""
    assert err.startswith("scaledot: no head 9.9")


@pytest.mark.parametrize("command", ["audit", "trace", "explore"])
def test_help_lists_every_option(capfd, command):
    import inspect

    from scaledot import cli, cli_audit, cli_explore

    functions = {"audit": cli_audit.audit, "trace": cli._trace, "explore": cli_explore.explore}
    code, out, _ = scaledot(capfd, command, "--help")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    positional = {"audit": ["model"], "trace": ["text"], "explore": ["model"]}[command]
    for name in inspect.signature(functions[command]).parameters:
        shown = name.upper() if name in positional else f"--{name.replace('_', '-')}"
        assert shown in out, name


def test_help_and_version_load_neither_torch_nor_transformers():
    code = (
        "import sys; from scaledot.cli import run; "
        "assert run(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    for args in (["--help"], ["--version"], [], ["audit", "--help"], ["trace", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "caledot" in done.stdout


def test_a_model_folder_is_read_and_named(capfd):
    code, out, _ = scaledot(capfd, "audit", str(SAMPLE), "--text", TEXT)
    assert code == 0
    assert out.startswith("scaledot audit  sample\n")


def test_colour_only_when_asked_or_seen(capfd):
    _, plain, _ = scaledot(capfd, "audit", "--text", TEXT)
    _, coloured, _ = scaledot(capfd, "audit", "--text", TEXT, "--color", "always")
    assert "\x1b[" not in plain
    assert "\x1b[" in coloured


@pytest.mark.parametrize("args", [("--ascii", "audit"), ("audit", "--ascii")])
def test_ascii_is_ascii(capfd, args):
    code, out, _ = scaledot(capfd, *args, "--text", TEXT)
    assert code == 0
    assert out.isascii()


def test_ctrl_c_before_anything_is_done_says_so(monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("scaledot.loading.load", stop)
    assert run(["audit", "--json", "-"]) == 130
    assert capsys.readouterr().err.endswith("stopped: nothing was finished\n")


# The page


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A page of a few lines in place of the real one."""
    from scaledot import report

    folder = tmp_path / "web"
    folder.mkdir()
    lines = (report._CHARSET, report._STYLE, report._SCRIPT)
    (folder / "index.html").write_text("<!doctype html>\n" + "\n".join(lines))
    (folder / "style.css").write_text("body { margin: 0 }")
    (folder / "app.js").write_text("console.log(1);\n")
    for language in ("en", "ja"):
        (folder / f"messages.{language}.json").write_text("{}")
    monkeypatch.setattr(report, "WEB", folder)


@pytest.fixture
def served(monkeypatch):
    """What would be served, and how, without serving it."""
    from scaledot import server

    calls = []

    def serve(shelf, *, host, port, on_ready):
        calls.append((shelf, host, port))
        on_ready(f"http://{host}:{port or 4242}/")

    monkeypatch.setattr(server, "serve", serve)
    return calls


def test_audit_writes_a_page_too(capfd, here, web):
    code, out, err = scaledot(capfd, "audit", "--text", TEXT, "--html", "report.html")
    assert code == 0
    assert "note: wrote report.html, " in err
    assert out.startswith("scaledot audit  embedded sample")
    whole = (here / "report.html").read_text(encoding="utf-8")
    assert '"format":"scaledot/page"' in whole
    assert "scaledot audit audit.json --head" in whole
    assert (here / "audit.json").exists()


def test_a_page_needs_a_model_and_a_place(capfd, here):
    (here / "audit.json").write_text("{}")
    code, _, err = scaledot(capfd, "audit", "audit.json", "--html", "report.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "a saved audit holds no query, key and value" in err
    code, _, err = scaledot(capfd, "audit", "--html", "nowhere/report.html")
    assert code == 2
    assert "no folder nowhere; nothing was run" in err


def test_explore_says_where_it_is_and_opens_it(capfd, served, monkeypatch):
    import webbrowser

    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    code, out, err = scaledot(capfd, "explore", "--text", TEXT, "--text", "Another.")
    assert code == 0
    assert out == "Explore embedded sample:  http://127.0.0.1:4242/\n"
    assert err.endswith("Ctrl-C ends it.\n")
    assert opened == ["http://127.0.0.1:4242/"]
    (shelf, host, port), = served  # fmt: skip
    assert (host, port) == ("127.0.0.1", 0)
    document = shelf.document()
    assert [text["text"] for text in document["texts"]] == [TEXT, "Another."]
    # What a finding says to type next is about the text that it is of.
    following = [f["next"] for text in document["texts"] for f in text["findings"]]
    assert any("Another." in command for command in following)
    assert all(command.startswith("scaledot ") for command in following)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="there always is a screen")
def test_without_a_screen_no_text_browser_takes_the_terminal(capfd, served, monkeypatch):
    import webbrowser

    monkeypatch.setattr(webbrowser, "open", lambda _: pytest.fail("opened"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert scaledot(capfd, "explore")[0] == 0


def test_explore_without_opening(capfd, served, monkeypatch):
    import webbrowser

    monkeypatch.setattr(webbrowser, "open", lambda _: pytest.fail("opened"))
    monkeypatch.setenv("DISPLAY", ":0")
    code, out, _ = scaledot(capfd, "explore", "--no-open", "--port", "8123", "--host", "localhost")
    assert code == 0
    assert "http://localhost:8123/" in out
    (shelf, host, port), = served  # fmt: skip
    assert (host, port) == ("localhost", 8123)
    assert shelf.document()["texts"] == []


@pytest.mark.parametrize("text", ["a\nb", "x" * 201, "\u202e"])
def test_no_command_is_made_of_a_text_that_nobody_types(text):
    from scaledot.cli_explore import _again

    assert _again(None, text) is None
    assert _again("m", "a b") == {
        "audit": "scaledot audit m --text 'a b'", "trace": "scaledot trace 'a b' --model m"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "65536"], "--port is 65536: pass 1 to 65535"),
        (["--port", "-1"], "--port is -1"),
        (["--port", "x"], "--port"),
        (["no/such/model"], "no model at 'no/such/model'"),
        (["--file", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--text", " "], "the text is empty"),
    ],
)
def test_mistakes_of_explore_are_one_line(capfd, served, arguments, says):
    code, out, err = scaledot(capfd, "explore", *arguments)
    assert code == 2
    assert out == ""
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert served == []


def test_explore_without_the_extra_names_the_line_before_it_loads(capfd, monkeypatch):
    from scaledot import loading

    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    code, _, err = scaledot(capfd, "explore")
    assert code == 2
    assert err == 'scaledot: fastapi is not installed: pip install "scaledot[web]"\n'


def test_a_full_disk_does_not_take_the_table(capfd, here, monkeypatch):
    def full(path, _):
        raise ScaledotError(f"cannot write {path}: no space left on device")

    monkeypatch.setattr("scaledot.files.write", full)
    code, out, err = scaledot(capfd, "audit", "--text", TEXT, "--quick")
    assert code == 2
    assert "score variance" in out
    assert "wrote" not in out
    assert err.endswith("scaledot: cannot write audit.json: no space left on device\n")
    assert list(here.iterdir()) == []

"""The README's code runs and prints what it says; the Japanese one shows the same."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)


def test_the_first_example_prints_what_stands_below_it():
    python = [i for i, (language, _) in enumerate(BLOCKS) if language == "python"]
    code, said = BLOCKS[python[0]][1], BLOCKS[python[0] + 1][1]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README", "exec"), {})
    assert out.getvalue() == said


def test_observing_as_the_readme_does(capsys):
    from scaledot.loading import load

    sample = load()
    batch = sample.tokenizer("The cat sat on the mat and looked at the moon.", return_tensors="pt")
    code = [text for language, text in BLOCKS if language == "python"][1]
    import scaledot

    names = {"scaledot": scaledot, "model": sample.model, "batch": batch}
    exec(compile(code, "README", "exec"), names)
    assert names["seen"].weights("h.1.attn", head=2, rows=slice(0, 8)).shape[0] == 8
    assert "0.0" in capsys.readouterr().out
    code = [text for language, text in BLOCKS if language == "python"][2]
    exec(compile(code, "README", "exec"), names)
    transmission = names["seen"].heads["h.1.attn"].measures["transmission"]
    assert (transmission.average > 0).all()
    said = capsys.readouterr().out
    assert "tensor(" in said
    assert said.endswith("False\n")


def test_a_training_is_watched_as_the_readme_does(tmp_path, monkeypatch):
    import json

    import torch

    import scaledot
    from scaledot.loading import load

    monkeypatch.chdir(tmp_path)
    sample = load(predicts=True)
    ids = sample.tokenizer("The cat sat on the mat and looked at the moon.", return_tensors="pt")
    batch = {"input_ids": ids["input_ids"], "labels": ids["input_ids"]}
    model = sample.predictor.train()
    names = {
        "scaledot": scaledot, "model": model, "batches": [batch] * 12,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
    }  # fmt: skip
    code = [text for language, text in BLOCKS if language == "python"][3]
    exec(compile(code, "README", "exec"), names)
    assert not names["monitor"].stopped
    lines = (tmp_path / "run.timeline.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(x)["step"] for x in lines[1:]] == [1, 10]


def test_the_layer_shows_its_steps(capsys):
    import torch

    import scaledot

    code = [text for language, text in BLOCKS if language == "python"][4]
    exec(compile(code, "README", "exec"), {"scaledot": scaledot, "x": torch.randn(1, 5, 512)})
    said = capsys.readouterr().out
    for step in ("split", "scores", "weights", "concat", "output"):
        assert step in said, said


def test_every_file_and_link_named_exists():
    root = Path(__file__).parents[1]
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / link).exists(), link
    for name in re.findall(r"`(\w+\.py|\w+/)`", README):
        assert (root / "src" / "scaledot" / name).exists(), name


def test_the_picture_asks_for_nothing():
    svg = (Path(__file__).parents[1] / "docs" / "audit.svg").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"')\s]+", svg))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "0.0" in svg


def test_the_japanese_readme_has_blocks_of_the_english_one_in_order():
    root = Path(__file__).parents[1]
    japanese = (root / "README.ja.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w*)\n(.*?)```", japanese, re.S)
    assert blocks[:5] == BLOCKS[:5]  # the first screen, its example and what that prints
    rest = iter(BLOCKS)
    for block in blocks:
        assert block in rest, f"not in README.md, or earlier than here:\n{block[1]}"
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", japanese):
        assert (root / link).exists(), link

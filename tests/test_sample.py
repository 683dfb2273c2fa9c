"""The sample model loads anywhere, has learned, and its files keep their promises."""

import json
import logging
import re
import socket
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import scaledot
from scaledot import roles

transformers = pytest.importorskip("transformers")

FOLDER = Path(str(resources.files("scaledot") / "sample"))
SCRIPT = Path(__file__).parents[1] / "examples" / "train_sample.py"
CONTEXT = 256
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def log():
    return json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def windows(tokenizer):
    """text.txt as `scaledot audit` cuts it: consecutive windows of the context's length."""
    text = (FOLDER / "text.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return [window[None] for window in ids.split(CONTEXT)]


@pytest.fixture(scope="module")
def weights(windows):
    """Mean weight of each head on the first and the previous token, over queries 1 and later."""
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    first, previous, queries = 0.0, 0.0, 0
    for ids in windows:
        with torch.no_grad():
            attentions = torch.cat(eager(ids, output_attentions=True).attentions)
        first = first + attentions[..., 1:, 0].sum(-1)
        previous = previous + attentions.diagonal(-1, -2, -1).sum(-1)
        queries += ids.numel() - 1
    return {"first": first / queries, "previous": previous / queries}  # each (layers, heads)


def nats_per_token(model, windows):
    nats = tokens = 0
    for ids in windows:
        with torch.no_grad():
            logprobs = model(ids).logits[:, :-1].log_softmax(-1)
        nats -= logprobs.gather(-1, ids[:, 1:, None]).double().sum().item()
        tokens += ids.numel() - 1
    return nats / tokens


# ---- the folder -----------------------------------------------------------------------------


def test_holds_every_file_and_stays_under_4_mb():
    expected = {
        "LICENSE.txt",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "text.txt",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    files = {path.name: path for path in FOLDER.iterdir() if path.is_file()}
    assert set(files) == expected
    assert sum(path.stat().st_size for path in files.values()) < 4_000_000


def test_names_no_path_of_the_machine_that_made_it():
    for path in FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "_name_or_path" not in text, path.name
        assert not re.search(r'"(/|~/|[A-Za-z]:\\)[\w.-]+[/\\]', text), path.name


def test_is_stored_in_half_precision():
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118 == {torch.float16}


def test_licence_note_names_the_source_and_the_licence():
    note = (FOLDER / "LICENSE.txt").read_text(encoding="utf-8")
    for words in ("bible-kjv-text", "public domain", "Apache License, Version 2.0"):
        assert words in note


def test_sample_text_is_clean_prose_of_three_to_six_windows(windows):
    text = (FOLDER / "text.txt").read_text(encoding="utf-8")
    assert 3 <= len(windows) <= 6
    assert windows[-1].numel() > 1
    assert re.fullmatch(r"[A-Za-z ,.;:?!'()-]+\n", text)


# ---- loading ---------------------------------------------------------------------------------


def test_loads_and_runs_offline_without_a_warning(monkeypatch):
    def refuse(*_):
        raise AssertionError("the sample asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger = logging.getLogger("transformers")  # it does not propagate, so caplog misses it
    logger.addHandler(handler)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
        transformers.AutoModel.from_pretrained(FOLDER, dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        prompt = tokenizer("And it came to pass", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    finally:
        logger.removeHandler(handler)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert [record.getMessage() for record in records] == []


def test_is_a_causal_gpt2_of_4_layers_and_4_heads_with_d_k_32(model, log):
    config = model.config
    assert config.model_type == "gpt2"
    assert (config.n_layer, config.n_head, config.n_embd // config.n_head) == (4, 4, 32)
    assert config.n_positions == CONTEXT
    assert model.num_parameters() == log["parameters"]
    ids = torch.arange(1, 20)[None]
    changed = ids.clone()
    changed[0, -1] = 500
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :-1], after[:, :-1])


def test_runs_in_float32_when_asked(model):
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# ---- tokenizer -------------------------------------------------------------------------------


def test_has_one_end_token_as_bos_eos_and_padding(tokenizer, model):
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == END
    assert tokenizer(END)["input_ids"] == [tokenizer.eos_token_id]
    assert model.config.bos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == CONTEXT


@pytest.mark.parametrize(
    "text",
    [
        "And Ruth said, Intreat me not to leave thee.",
        "私は東京で猫を見ました。",
        "🐈‍⬛ 👩🏽‍🚀 🇯🇵",
        "Съешь же ещё этих мягких французских булок",
        "في البدء خلق الله السماوات والأرض",
        "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
        "e\u0301 ≠ é, \u202eevil\u202c, </script>",
        "  spaces , kept .  \t\r\n\n \x00\x7f",
        "",
    ],
)
def test_gives_back_any_script(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text


def test_splits_unknown_characters_into_their_bytes(tokenizer):
    assert len(tokenizer("猫")["input_ids"]) == 3
    assert len(tokenizer("🐈")["input_ids"]) == 4


# ---- it has learned --------------------------------------------------------------------------


def test_predicts_the_sample_text_as_well_as_recorded(model, windows, log):
    recorded = log["text.txt"]["model"]["nats_per_token"]
    assert nats_per_token(model, windows) == pytest.approx(recorded, abs=1e-4)


def test_beats_the_bigram_baseline_clearly(model, windows, log):
    bigram = log["text.txt"]["bigram"]["nats_per_token"]
    assert nats_per_token(model, windows) < bigram - 0.5
    held_out = log["held_out"]
    assert held_out["model"]["nats_per_token"] < held_out["bigram"]["nats_per_token"] - 0.5
    assert held_out["model"]["nats_per_byte"] < held_out["bigram"]["nats_per_byte"]


def test_half_precision_cost_nothing(log):
    stored = log["held_out"]["model"]["nats_per_token"]
    assert stored == pytest.approx(
        log["held_out"]["before_half_precision"]["nats_per_token"], abs=2e-3
    )


def test_loss_curve_falls_and_covers_every_step(log):
    curve = log["curve"]
    assert [point["step"] for point in curve] == sorted(point["step"] for point in curve)
    assert curve[-1]["step"] == log["steps"]
    assert curve[-1]["tokens"] == log["tokens_seen"]
    assert curve[-1]["held_out"] < curve[0]["held_out"] - 1


def test_some_head_attends_to_the_previous_token(weights, log):
    named = [(h["layer"], h["head"]) for h in log["heads"] if h["role"] == "previous token"]
    assert named
    for layer, head in named:
        assert weights["previous"][layer, head] > 0.5


def test_first_token_draws_more_than_chance_but_no_head_is_a_sink(weights, windows, log):
    queries = [1 / (i + 1) for ids in windows for i in range(1, ids.numel())]
    chance = sum(queries) / len(queries)
    assert weights["first"].max() > 2 * chance
    assert weights["first"].max() < 0.3
    assert "first-token sink" not in {head["role"] for head in log["heads"]}


def test_some_heads_copy_what_followed_the_same_token_before(tokenizer, log):
    named = [(h["layer"], h["head"]) for h in log["heads"] if h["role"] == "induction"]
    assert named
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = (FOLDER / "text.txt").read_text(encoding="utf-8")
    half = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: CONTEXT // 2])
    with torch.no_grad():
        attentions = torch.cat(eager(half.repeat(2)[None], output_attentions=True).attentions)
    copied = attentions.diagonal(1 - len(half), -2, -1)[..., 1:].mean(-1)  # (layers, heads)
    for layer, head in named:
        assert copied[layer, head] > 0.3


# ---- the script ------------------------------------------------------------------------------


def test_training_script_runs_on_any_text_and_repeats_itself(tmp_path):
    story = (FOLDER / "text.txt").read_text(encoding="utf-8").split(". ")
    text = tmp_path / "story.txt"
    text.write_text("\n\n".join(story), encoding="utf-8")
    options = "--steps 2 --batch 2 --vocab-size 300 --held-out-every 4 --held-out-block 1"
    runs = [
        subprocess.Popen(
            [sys.executable, SCRIPT, text, "--out", out, *options.split(), "--sample-starts", ""],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for out in (tmp_path / "a", tmp_path / "b")
    ]
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in "ab"]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "a" / "training.json").read_text())["steps"] == 2


def test_heads_are_called_what_the_log_says(model, tokenizer, log, monkeypatch):
    """scaledot's names on passages said four times agree with the log's, measured with eager."""
    ids = roles.repeated(roles.vocabulary(tokenizer), length=64, times=4, seed=0)
    plain = roles.positions
    monkeypatch.setattr(
        roles, "positions",
        lambda *of, **which: plain(*of, **which) | roles.roles(*of, **which, tokens=ids),
    )  # fmt: skip
    with torch.no_grad(), scaledot.observe(model) as seen:
        model(ids)
    found = [roles.roles_of(stats) for stats in seen.heads.values()]
    scores = torch.stack([roles.prefix_matching(stats)[0] for stats in seen.heads.values()])
    assert float(roles.prefix_matching(next(iter(seen.heads.values())))[1].max()) < 0.02
    assert [role.name for role in found[0][1]] == ["previous"]
    logged = {(h["layer"], h["head"]): h for h in log["heads"]}
    induction = {at for at, h in logged.items() if h["role"] == "induction"}
    assert len(induction) == 5
    strongest = {divmod(int(i), 4) for i in scores.flatten().topk(5).indices}
    assert strongest == induction
    others = [float(scores[at]) for at in logged if at not in induction]
    assert min(float(scores[at]) for at in induction) > 0.35
    assert max(others) < 0.05
    for at in ((1, 3), (2, 1), (3, 0), (3, 3)):
        assert "induction" in [role.name for role in found[at[0]][at[1]]]

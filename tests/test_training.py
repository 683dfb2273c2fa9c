"""Monitor: the same bits, the right numbers, every kind of loop."""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import scaledot
from forked import Forked
from scaledot.alarms import Alarm
from scaledot.huggingface import SDPA
from scaledot.tracking import scalars, values


class Attention(nn.Module):
    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two attentions, in checkpoints if asked."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_positions=24, n_embd=24, n_layer=2, n_head=3, attn_pdrop=0.0,
            resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            initializer_range=0.3, **options,
        )
    )  # fmt: skip


def tokens(step: int) -> torch.Tensor:
    return torch.randint(61, (5, 23), generator=torch.Generator().manual_seed(step))


def train(model: Any, steps: int = 6, after: Any = lambda loss: None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for step in range(steps):
        ids = tokens(step)
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(loss)
    return losses


def plain(
    attention: Attention, x: torch.Tensor, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """The five values of each head by their definitions, from whole matrices in float64 of the
    queries and keys that `dtype` gives."""
    q, k, _ = (y.detach().double() for y in copy.deepcopy(attention).to(dtype).split(x.to(dtype)))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    n = scores.shape[-1]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    p = scores.masked_fill(~seen, -math.inf).softmax(-1)
    logs = torch.where(seen, p.clamp(min=1e-300).log(), 0.0)
    count = seen.sum(-1).double()
    mean = (scores * seen).sum(-1) / count
    variance = ((scores - mean[..., None]).square() * seen).sum(-1) / count
    top = p.amax(-1)
    margin = torch.log(top / (1 - top))[..., 1:]
    return {
        "max_score": scores.masked_fill(~seen, -math.inf).amax((0, 2, 3)),
        "entropy": -(p * logs).sum(-1).mean((0, 2)),
        "score_var_within": variance[..., 1:].mean((0, 2)),
        "top_margin": margin.mean((0, 2)),
        "gradient": (p * (1 - p)).sum(-1).mean((0, 2)),
    }


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rtol: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol, msg=name)


# What it says


def test_values_are_those_of_whole_matrices_by_their_definitions():
    model, x = Model(), torch.randn(2, 7, 12)
    with scaledot.Monitor(model) as monitor:
        model(x).sum().backward()
        look = monitor.step()
    assert list(look.heads) == ["layers.0", "layers.1"]
    close(values(look.heads["layers.0"]), plain(model.layers[0], x))
    second = (x + model.layers[0](x)).detach()
    close(values(look.heads["layers.1"]), plain(model.layers[1], second))
    assert look.rows == 2 * 2 * 3 * 7
    assert look.nonfinite == 0


def test_a_row_that_is_no_number_is_counted():
    model, x = Model(), torch.randn(2, 7, 12)
    x[1, 3] = math.inf
    with scaledot.Monitor(model) as monitor:
        model(x)
        look = monitor.step()
    # Queries 3 … 6 of the second text see key 3, in every head of both layers.
    assert look.nonfinite == 2 * 3 * 4
    assert scalars(look)["attn/nonfinite_rows"] == 24


def test_forwards_whose_gradients_accumulate_are_one_step():
    model, x = Model(), torch.randn(6, 7, 12)
    looks = []
    for parts in ([x], [x[:2], x[2:3], x[3:]]):
        with scaledot.Monitor(model) as monitor:
            for part in parts:
                model(part).sum().backward()
            looks.append(monitor.step())
    assert looks[0].rows == looks[1].rows
    for path in looks[0].heads:
        a, b = (look.heads[path] for look in looks)
        assert a.measures["entropy"].histogram.equal(b.measures["entropy"].histogram)
        assert a.measures["max_score"].maximum.equal(b.measures["max_score"].maximum)
        close(values(a), values(b), rtol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_gradient_checkpointing_runs_again_is_counted_once(reentrant):
    torch.manual_seed(1)
    plainly = Model()
    model = Model(reentrant)
    model.load_state_dict(plainly.state_dict())
    x = torch.randn(2, 7, 12, requires_grad=True)
    found = []
    for each in (plainly, model):
        with scaledot.Monitor(each, every=2) as monitor:
            looks = []
            for _ in range(2):
                each(x).square().sum().backward()
                looks.append(monitor.step())
        found.append(looks)
    assert [look.rows for look in found[1]] == [2 * 2 * 3 * 7] * 2
    for a, b in zip(*found, strict=True):
        for path in a.heads:
            close(values(a.heads[path]), values(b.heads[path]), rtol=0)
    for p, q in zip(plainly.parameters(), model.parameters(), strict=True):
        assert p.grad.equal(q.grad)


def test_forwards_in_eval_mode_and_under_no_grad_leave_no_trace():
    model, x = Model(), torch.randn(2, 7, 12)
    with scaledot.Monitor(model) as monitor:
        model.eval()
        model(1000 * x)
        model.train()
        with torch.no_grad():
            model(1000 * x)
        model(x).sum().backward()
        look = monitor.step()
    close(values(look.heads["layers.0"]), plain(model.layers[0], x))
    assert look.rows == 2 * 2 * 3 * 7


def test_under_autocast_every_row_counts():
    model, x = Model(), torch.randn(2, 7, 12)
    with scaledot.Monitor(model) as monitor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        look = monitor.step(loss=loss)
    assert look.rows == 2 * 2 * 3 * 7
    close(values(look.heads["layers.0"]), plain(model.layers[0], x, torch.bfloat16))


COMPILED = """
import sys, torch, scaledot
from test_training import close, gpt2, tokens, values
model, x = gpt2(), tokens(0)
run = torch.compile(model, backend="aot_eager")
looks = []
for inside, called in ((model, model), (run if sys.argv[1] == "before" else model, run)):
    with scaledot.Monitor(inside, every=2) as monitor:
        for _ in range(4):
            called(x).logits.sum().backward()
            looks.append(monitor.step())
for a, b in zip(looks[:4], looks[4:]):
    assert (a is None) == (b is None)
    if a is not None:
        assert list(a.heads) == list(b.heads) == ["transformer.h.0.attn", "transformer.h.1.attn"]
        assert a.rows == b.rows == 5 * 23 * 2 * 3
        for path in a.heads:
            close(values(a.heads[path]), values(b.heads[path]))
"""


@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_a_compiled_model_is_watched(wrapped):
    # A process of its own: the compiler takes warnings of its own that are errors here for code
    # that it cannot follow, and neither annotations nor other tests' graphs belong in it.
    process = Forked(COMPILED, wrapped)
    _, said = process.communicate()
    assert process.returncode == 0, said


# The same bits


def test_watched_or_not_a_run_has_the_same_losses_bit_for_bit():
    ours = gpt2()
    ours.set_attn_implementation(SDPA)
    unwatched = train(ours)
    for every in (1, 3, 1000):
        model = gpt2()
        with scaledot.Monitor(model, every=every) as monitor:
            assert train(model, after=monitor.step) == unwatched, every
        for a, b in zip(ours.parameters(), model.parameters(), strict=True):
            assert a.equal(b)
        assert model.config._attn_implementation == "sdpa"
    other = gpt2()
    torchs = train(other)
    # Another kernel: else nothing of ours ran.
    assert not all(a.equal(b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))
    np.testing.assert_allclose(torchs[:4], unwatched[:4], rtol=0, atol=1e-5)


def test_steps_looked_at_are_the_first_and_every_so_manieth():
    model, x = Model(), torch.randn(1, 3, 12)
    with scaledot.Monitor(model, every=4, start=5) as monitor:
        steps = []
        for _ in range(9):
            model(x).sum().backward()
            if (look := monitor.step()) is not None:
                steps.append(look.step)
    assert steps == [6, 8, 12]
    assert monitor.steps == 14


# What goes wrong


def test_a_step_that_saw_nothing_says_why():
    model, x = Model(), torch.randn(1, 3, 12)
    with scaledot.Monitor(model, every=1) as monitor:
        with pytest.raises(scaledot.ScaledotError, match="did not run inside the context"):
            monitor.step()
        model.eval()(x)
        with pytest.raises(scaledot.ScaledotError, match=r"call model\.train"):
            monitor.step()
    with scaledot.Monitor(linear := nn.Sequential(nn.Linear(3, 3))) as monitor:
        linear(torch.randn(2, 3))
        with pytest.raises(scaledot.ScaledotError, match="no attention was observed"):
            monitor.step()


def test_a_step_outside_of_the_context_and_a_second_context_are_errors():
    monitor = scaledot.Monitor(Model())
    with pytest.raises(scaledot.ScaledotError, match="outside of its context"):
        monitor.step()
    with monitor, pytest.raises(scaledot.ScaledotError, match="open already"):
        monitor.open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0: pass a whole number of at least 1"),
        ({"pictures": -1}, "pictures is -1"),
        ({"alarms": [Alarm("entropy", below=1, then="save")]}, "pass snapshots=FOLDER"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        scaledot.Monitor(Model(), **options)


@pytest.mark.usefixtures("unannotated")
def test_what_is_no_model_and_no_trainer_is_named():
    with pytest.raises(TypeError, match=r"needs an nn\.Module, got str"):
        scaledot.Monitor("gpt2")
    with pytest.raises(TypeError, match="log is int: pass a TensorBoard SummaryWriter"):
        scaledot.Monitor(Model(), log=3)
    with pytest.raises(TypeError, match="Trainer or Lightning's, got int"):
        scaledot.Monitor(Model()).attach(3)


def test_after_an_exception_the_model_is_its_own_again():
    model = gpt2()
    with pytest.raises(KeyError), scaledot.Monitor(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


# Alarms


def test_alarms_act_and_are_in_the_file(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file

    model, called = gpt2(), []
    alarms = [
        Alarm("max_score", above=0.0, then="stop"),
        Alarm("max_score", above=1e9),
        Alarm("entropy", below=10.0, then="save"),
        Alarm("gradient", below=2.0, then=called.append),
    ]
    file = tmp_path / "run.timeline.jsonl"
    with scaledot.Monitor(model, file=file, alarms=alarms) as monitor:
        assert not monitor.stopped
        model(tokens(0)).logits.sum().backward()
        look = monitor.step()
    assert monitor.stopped
    assert [event.action for event in look.events] == ["stop", "save", "call"]
    assert called == [look.events[2]]
    event = look.events[0]
    assert (event.layer, event.head) == look.worst("max_score")
    line = json.loads(file.read_text().splitlines()[1])
    assert line["alarms"] == [event.document() for event in look.events]
    saved = tmp_path / "step-1.safetensors"
    again = gpt2()
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    again.load_state_dict(load_file(saved))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.equal(b)
    with safe_open(saved, "pt") as opened:
        assert json.loads(opened.metadata()["scaledot"]) == look.events[1].document()
    assert sorted(x.name for x in tmp_path.iterdir()) == [file.name, saved.name]


# A process that is killed

KILLED = """
import sys, torch, scaledot
from torch import nn
model = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
with scaledot.Monitor(model, every=1, file=sys.argv[1]) as monitor:
    while True:
        model(torch.randn(1, 5, 16)).sum().backward()
        monitor.step(loss=0.5)
"""


def test_lines_written_before_a_kill_are_whole_and_a_resumed_run_goes_on(tmp_path):
    file = tmp_path / "run.timeline.jsonl"
    process = Forked(KILLED, str(file))
    deadline = time.monotonic() + 60
    try:
        while not (file.exists() and file.read_bytes().count(b"\n") > 20):
            assert process.returncode is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    written = file.read_bytes()
    whole = written[: written.rindex(b"\n") + 1].splitlines()
    lines = [json.loads(line) for line in whole]
    assert lines[0]["format"] == "scaledot/timeline"
    assert [line["step"] for line in lines[1:]] == list(range(1, len(lines)))
    with file.open("ab") as torn:
        torn.write(b'{"step": 99, "ti')
    model = nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
    with scaledot.Monitor(model, file=file, start=7) as monitor:
        model(torch.randn(1, 5, 16)).sum().backward()
        monitor.step()
    after = file.read_bytes()[len(written) :].splitlines()
    assert after[0].endswith(b'{"step": 99, "ti')
    assert json.loads(after[1])["format"] == "scaledot/timeline"
    assert json.loads(after[2])["step"] == 8


# Trainers


def dataset(n: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(61, (n, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": x, "labels": x} for x in rows]


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "report_to": []}
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True, seed=1,
        **{**settings, **options},
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=dataset(), eval_dataset=dataset(4))


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {file.parent for file in folder.rglob("events.out.tfevents*")}
    found = EventAccumulator(str(place))
    found.Reload()
    return {tag: [(x.step, x.value) for x in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_transformers_trainer_reports_and_writes_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    model = gpt2()
    run = trainer(model, tmp_path, report_to=["tensorboard"])
    file = tmp_path / "run.timeline.jsonl"
    monitor = scaledot.Monitor(model, every=2, file=file).attach(run)
    run.train()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [1, 2, 4, 6]
    # Two forwards of two windows a step, two layers of three heads; evaluation is not counted.
    assert {line["rows"] for line in lines[1:]} == {2 * 2 * 16 * 2 * 3}
    told = {entry["step"]: entry["loss"] for entry in run.state.log_history if "loss" in entry}
    for line in lines[1:]:
        assert line["loss"] == pytest.approx(told[line["step"]], rel=1e-6)
    found = scalars_in(tmp_path / "tensorboard")
    worst = found["train/attn/max_score/worst"]
    assert [step for step, _ in worst] == [1, 2, 4, 6]
    for (_, value), line in zip(worst, lines[1:], strict=True):
        assert value == pytest.approx(max(map(max, line["heads"]["max_score"])), rel=1e-6)
    assert model.config._attn_implementation == "sdpa"
    assert monitor.last.step == 6


def test_an_alarm_ends_a_transformers_training(tmp_path, capsys):
    model = gpt2()
    run = trainer(model, tmp_path)
    alarm = Alarm("max_score", above=-1e9, then="stop")
    scaledot.Monitor(model, every=3, alarms=[alarm]).attach(run)
    run.train()
    assert run.state.global_step == 1


def test_a_training_that_fails_leaves_the_model_its_own(tmp_path):
    model = gpt2()
    run = trainer(model, tmp_path)
    scaledot.Monitor(model).attach(run)
    run.compute_loss = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert model.config._attn_implementation == "sdpa"


def test_a_second_training_after_one_that_failed_begins_anew(tmp_path, monkeypatch, capsys):
    """An alarm's function fails where Trainer tells nobody; what it saw is not the second run's."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    model = gpt2()
    run = trainer(model, tmp_path, report_to=["tensorboard"], max_steps=3, eval_strategy="no")
    told, broken = [], []

    def fail(event: Any) -> None:
        told.append(event.why)
        if not broken:
            broken.append(event)
            raise RuntimeError("mine")

    file = tmp_path / "run.timeline.jsonl"
    alarm = Alarm("max_score", above=-1e9, then=fail)
    monitor = scaledot.Monitor(model, every=2, file=file, alarms=[alarm]).attach(run)
    with pytest.raises(RuntimeError, match="mine"):
        run.train()
    assert model.config._attn_implementation == "sdpa"
    run.train()
    assert model.config._attn_implementation == "sdpa"
    assert monitor.last.step == 2
    # Neither first look has a step before it; the second run's second has its own first.
    assert ["since step" in why for why in told] == [False, False, True]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 1, None, 1, 2]
    logged = {entry["step"]: entry["loss"] for entry in run.state.log_history if "loss" in entry}
    for line in lines[3:]:
        assert line["loss"] == pytest.approx(logged[line["step"]], rel=1e-6)


def test_a_monitor_of_another_model_is_refused(tmp_path):
    with pytest.raises(scaledot.ScaledotError, match="another model"):
        scaledot.Monitor(gpt2()).attach(trainer(gpt2(), tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_to_its_loggers_and_stops(tmp_path):
    import lightning
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(1000 * batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(torch.randn(24, 7, 12))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    module, file = Module(), tmp_path / "run.timeline.jsonl"

    def fit(alarms: list[Alarm], steps: int, loggers: Any) -> Any:
        run = lightning.Trainer(
            max_steps=steps, max_epochs=4, accumulate_grad_batches=3, accelerator="cpu",
            logger=loggers, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, log_every_n_steps=1,
        )  # fmt: skip
        scaledot.Monitor(module, every=2, file=file, pictures=1, alarms=alarms).attach(run)
        run.fit(module, loader, loader)
        return run

    fit([], 5, [TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "csv")])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [1, 2, 4]
    assert {line["rows"] for line in lines[1:]} == {3 * 2 * 7 * 2 * 3}
    assert lines[0]["layers"][0]["path"] == "net.layers.0"
    # Mean squares of about 1 to 2: the step's loss, not a third of it or the last batch's share.
    with torch.no_grad():
        assert 0.5 < lines[1]["loss"] < 3
    found = scalars_in(tmp_path / "board")
    assert [step for step, _ in found["attn/entropy/mean"]] == [1, 2, 4]
    written = next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    assert "attn/entropy/mean" in written.splitlines()[0]
    run = fit([Alarm("max_score", above=-1e9, then="stop")], 100, False)
    assert run.global_step == 1


@pytest.mark.filterwarnings("ignore")
def test_lightning_twice_with_two_optimizers_that_a_module_steps_itself(tmp_path):
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()
            self.automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> dict[str, Any]:
            self.manual_backward(self.net(batch[0]).square().mean())
            if number % 3 == 2:  # the gradients of three batches
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return {}

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in self.net.layers]

    data = torch.utils.data.TensorDataset(torch.randn(12, 7, 12))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    module, file = Module(), tmp_path / "run.timeline.jsonl"
    run = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=TensorBoardLogger(tmp_path / "board"),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    scaledot.Monitor(module, every=1, file=file).attach(run)
    run.fit(module, loader)
    first = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert [(line["step"], line["loss"]) for line in first] == [(1, None), (2, None)]
    assert {line["rows"] for line in first} == {3 * 2 * 7 * 2 * 3}
    run.fit_loop.max_epochs = 2
    run.fit(module, loader)
    steps = [step for step, _ in scalars_in(tmp_path / "board")["attn/entropy/mean"]]
    assert len(steps) == len(set(steps)) == 4  # told once of each, though fit was called twice

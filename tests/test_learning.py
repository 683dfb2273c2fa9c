"""The training experiment: the model is the sample's, arms differ in nothing but what they say,
curves are what the model does, and sentences are what the curves show."""

import csv
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from scaledot import lab, numerals, scales
from scaledot.lab import curves, figures, learning
from scaledot.lab.curves import Arm, Point
from scaledot.lab.learning import Decoder

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "src" / "scaledot" / "sample"
DOCS = ROOT / "docs"


# The model


def test_the_samples_weights_give_the_samples_logits():
    transformers = pytest.importorskip("transformers")
    model = Decoder(1024, 32, 32**-0.5)
    renamed = {"mlp.c_fc": "c_fc", "mlp.c_proj": "mlp_proj", "attn.c_": "c_"}
    state = {}
    for name, p in load_file(SAMPLE / "model.safetensors").items():
        name = name.removeprefix("transformer.")
        for old, new in renamed.items():
            name = name.replace(old, new)
        # GPT-2 keeps its linear maps as (in, out)
        linear = p.ndim == 2 and name.split(".")[0] == "h"
        state[name] = p.float().T if linear else p.float()
    state.pop("lm_head.weight", None)  # the embedding once more
    model.load_state_dict(state)
    ids = torch.randint(1024, (2, 256))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (model(ids) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert sum(p.numel() for p in model.parameters()) == 957_184


# Arms


def start(d_k=32, scale=1.0, init="unit", seed=5):
    return learning.initial(d_k, scale, init, torch.Generator().manual_seed(seed))


def test_arms_start_from_the_same_numbers():
    first = start().state_dict()
    for d_k, scale in ((32, 0.1), (64, 1.0), (128, 0.01), (1, 1.0)):
        other = start(d_k, scale)
        assert [block.heads for block in other.h] == [128 // d_k] * 4
        assert [block.scale for block in other.h] == [scale] * 4
        for name, p in other.state_dict().items():
            assert torch.equal(p, first[name]), name
    assert not torch.equal(start(seed=6).wte.weight, first["wte.weight"])


def test_initialisations_differ_in_the_size_of_query_and_key_weights_alone():
    unit, gpt2 = start().state_dict(), start(init="gpt2").state_dict()
    for name, p in unit.items():
        if name.endswith("c_attn.weight"):
            q_k, other = p[:256], gpt2[name][:256]
            torch.testing.assert_close(q_k * (0.02 * 128**0.5), other)
            # 32,768 normal weights: a standard deviation is known to 1/√65,536
            assert abs(q_k.std() * 128**0.5 - 1) < 4 / 65_536**0.5
            assert torch.equal(p[256:], gpt2[name][256:])
            assert abs(p[256:].std() / 0.08 - 1) < 4 / 32_768**0.5
        else:
            assert torch.equal(p, gpt2[name]), name


@pytest.mark.parametrize("d_k", [32, 128])
@pytest.mark.parametrize("init", ["unit", "gpt2"])
def test_scores_start_as_wide_as_their_weights_say(init, d_k):
    """docs/maths.md#initialisation, for inputs that have nothing in common."""
    model, x = start(d_k, d_k**-0.5, init), F.layer_norm(torch.randn(256, 128), (128,))
    variances = []
    for block in model.h:
        q, k, _ = block.c_attn(x).chunk(3, -1)
        q, k = (y.view(256, -1, d_k).transpose(0, 1) for y in (q, k))
        variances.append((q @ k.mT * block.scale).var((1, 2)))
    # from seed to seed the mean over the heads moves by 1 %
    width = 128 * learning.INITS[init] ** 2
    assert torch.cat(variances).mean().item() == pytest.approx(width**2, rel=0.05)


@pytest.fixture(scope="module")
def tiny():
    return lab.train(("none", 0.5), d_k=(32, 128), steps=1, seeds=2, seed=7)


def test_the_same_arguments_give_the_same_curves_and_touch_nothing_outside():
    arguments = {"rules": "none", "init": "unit", "steps": 3, "seeds": 2, "seed": 7}
    once = lab.train(**arguments)
    state = torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            again = lab.train(**arguments)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert again == once
    losses = {row["loss"] for row in once.tables[1].rows}
    assert len(losses) == 2 * 4
    other = lab.train(**arguments | {"seed": 8, "seeds": 1}).tables[1].rows
    assert other[0]["loss"] not in losses


def test_an_arm_alone_is_the_arm_among_others(tiny):
    alone = lab.train(0.5, d_k=128, init="gpt2", steps=1, seeds=2, seed=7)
    assert alone.rows == tiny.rows[-1:]


def test_every_arm_sees_the_same_sequences(monkeypatch):
    seen, real = [], learning.sequences

    def spied(count, generator):
        seen.append(real(count, generator))
        return seen[-1]

    monkeypatch.setattr(learning, "sequences", spied)
    monkeypatch.setattr(learning, "measure", lambda model, ids, step: Point(step, 1.0))
    lab.train(("none", "1/d_k"), d_k=(32, 64), init="unit", steps=2, seeds=2)
    held_out, *trained = seen
    assert held_out.shape == (16, 64)
    runs = [torch.stack(trained[i : i + 2]) for i in range(0, len(trained), 2)]
    assert len(runs) == 4 * 2
    for i in range(2, 8):
        assert torch.equal(runs[i], runs[i % 2])
    assert not torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0][0], runs[0][1])
    for ids in seen:
        assert torch.equal(ids[:, :32], ids[:, 32:])


def test_tables_and_panels_have_every_arm_and_point(tiny):
    assert tiny.about == "8 arms × 2 seeds, 1 step each, seed 7"
    assert [(row["init"], row["d_k"], row["rule"]) for row in tiny.rows] == [
        (init, d_k, rule)
        for init in ("unit", "gpt2") for d_k in (32, 128) for rule in ("none", "0.5")
    ]  # fmt: skip
    points = tiny.tables[1]
    assert points.shown == ()
    assert [row["step"] for row in points.rows] == [0, 1] * 16
    # over seven arms: those of the largest d_k
    for panel in tiny.panels:
        assert panel.title.endswith(", d_k 128")
        assert [line.label for line in panel.lines] == [
            "no scale, unit", "0.5, unit", "no scale, gpt2", "0.5, gpt2",
        ]  # fmt: skip
    rows = [r for r in points.rows if (r["init"], r["d_k"], r["rule"]) == ("unit", 128, "0.5")]
    drawn = tiny.panels[2].lines[1]
    assert list(drawn.x) == [0, 1]
    for step, mean in zip(drawn.x, drawn.y, strict=True):
        of_step = [r["variance"] for r in rows if r["step"] == step]
        assert len(of_step) == 2
        assert mean == pytest.approx(sum(of_step) / 2)
    few = lab.train("none", init="unit", steps=1, seeds=1)
    assert few.panels[0].title == "Loss"
    assert few.panels[0].lines[0].label == "no scale, unit, d_k 32"


# Curves


def by_hand(model, ids):
    """(loss, entropy, variance, gradient, tail, query) from explicit float64 attention, the last
    five a tuple of heads."""
    state = {k: v.double() for k, v in model.state_dict().items()}
    n, heads = ids.shape[1] - 1, model.h[0].heads
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    count = torch.arange(1, n + 1).double()

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (128,), state[f"{name}.weight"], state[f"{name}.bias"])

    kept = []
    x = (state["wte.weight"][ids[:, :-1]] + state["wpe.weight"][:n]).requires_grad_()
    for i in range(4):
        qkv = linear(f"h.{i}.c_attn", norm(f"h.{i}.ln_1", x)).chunk(3, -1)
        q, k, v = (y.view(len(ids), n, heads, -1).transpose(1, 2) for y in qkv)
        s = (q @ k.mT * model.h[i].scale).masked_fill(~visible, -math.inf)
        p = s.softmax(-1)
        for y in (q, s, p):
            y.retain_grad()
        kept.append((q, s, p))
        x = x + linear(f"h.{i}.c_proj", (p @ v).transpose(1, 2).flatten(2))
        hidden = linear(f"h.{i}.c_fc", norm(f"h.{i}.ln_2", x))
        x = x + linear(f"h.{i}.mlp_proj", F.gelu(hidden, approximate="tanh"))
    logits = norm("ln_f", x) @ state["wte.weight"].T
    right = logits.log_softmax(-1)[:, 31:].gather(-1, ids[:, 32:, None])
    loss = -right.mean()
    loss.backward()
    found = ([], [], [], [], [])
    for q, s, p in kept:
        for head in range(heads):
            scores, weights = s[:, head].detach(), p[:, head].detach()
            logs = weights.log().masked_fill(weights == 0, 0.0)
            entropy = -(weights * logs).sum(-1)[:, 1:] / count[1:].log()
            mean = scores.masked_fill(~visible, 0.0).sum(-1) / count
            off = (scores - mean[..., None]).masked_fill(~visible, 0.0)
            variance = off.square().sum(-1)[:, 1:] / count[1:]
            ds, dp = s.grad[:, head].masked_fill(~visible, 0.0), p.grad[:, head]
            level = dp.masked_fill(~visible, 0.0).sum(-1) / count
            spread = (dp - level[..., None]).masked_fill(~visible, 0.0).norm(dim=-1)
            passed = (count * ds.norm(dim=-1) / spread)[:, 1:]
            passed = passed[spread[:, 1:] > 0]
            found[0].append(entropy.mean())
            found[1].append(variance.mean())
            found[2].append(passed.quantile(0.5))
            found[3].append(passed.quantile(0.1))
            found[4].append(q.grad[:, head].square().sum(-1).mean().sqrt())
    return loss.item(), *(torch.stack(x) for x in found)


@pytest.mark.parametrize(("d_k", "scale"), [(32, 32**-0.5), (64, 1.0), (128, 1 / 128)])
def test_points_are_what_explicit_attention_gives_at_that_step(d_k, scale):
    model, data = start(d_k, scale), torch.Generator().manual_seed(9)
    held_out = learning.sequences(4, torch.Generator().manual_seed(11))
    points, steps = learning.run(model, held_out, 2, 0.003, data, lambda: None), []
    for point in points:  # the run waits here, its model at that step
        loss, *of_heads = by_hand(model, held_out)
        assert point.loss == pytest.approx(loss, rel=1e-5)
        for name, heads in zip(
            ("entropy", "variance", "gradient", "tail", "query"), of_heads, strict=True
        ):
            tolerance = 1e-5 if name in ("entropy", "variance") else 2e-3
            expected = float(heads.quantile(0.5))
            assert getattr(point, name) == pytest.approx(expected, rel=tolerance), name
        gradient = of_heads[2]
        layer, head = map(int, point.worst.split("."))
        assert point.worst_gradient == pytest.approx(float(gradient.min()), rel=2e-3)
        assert gradient[layer * 128 // d_k + head] == pytest.approx(float(gradient.min()), rel=2e-3)
        assert all(p.grad is None for p in model.parameters())
        steps.append(point.step)
    assert steps == [0, 1, 2]


def test_a_loss_that_is_no_number_ends_the_run_and_is_said():
    done = []
    result = lab.train(
        ("none", "1/d_k"), init="unit", steps=12, seeds=2, learning_rate=1e38,
        on_progress=lambda *x: done.append(x),
    )  # fmt: skip
    assert done[-1][1] == 48
    assert all(a[0] < b[0] for a, b in pairwise(done))
    for row in result.rows:
        assert row["loss"] is None
        assert row["reached"] == "never"
    last = {(r["rule"], r["seed"]): r for r in result.tables[1].rows}
    for row in last.values():
        assert row["loss"] is None
        assert row["step"] < 12
    assert sum("diverged in 2 of 2 runs" in s for s in result.says) == 2
    for panel in result.panels:
        assert all(math.isfinite(y) for line in panel.lines for y in line.y)


# What is asked


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rules": "sqrt"}, "scale is 'sqrt': pass one of 1/sqrt_d_k"),
        ({"rules": ()}, "rules is empty: pass at least one"),
        ({"rules": (math.nan,)}, "scale is nan: pass a finite number"),
        ({"rules": None}, "scale is None: pass a finite number"),
        ({"rules": "log_n/sqrt_d_k"}, "needs the number of keys"),
        ({"d_k": 48}, "d_k is 48: pass a divisor of 128, the width that heads share"),
        ({"d_k": 0}, "d_k is 0: pass at least 1"),
        ({"init": "xavier"}, "init is 'xavier': pass one of unit, gpt2"),
        ({"init": ()}, "init is empty: pass at least one"),
        ({"steps": 0}, "steps is 0: pass at least 1"),
        ({"seeds": 0}, "seeds is 0: pass at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0: pass a finite number above 0"),
        ({"learning_rate": True}, "learning_rate is True: pass a number"),
        ({"seed": -1}, "seed is -1: pass at least 0"),
        ({"seed": 1.5}, "seed is 1.5: pass a whole number"),
    ],
)
def test_bad_arguments_are_one_sentence(unannotated, given, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as caught:
        lab.train(**given)
    assert "\n" not in str(caught.value)


def test_stopping_passes_through_and_puts_the_threads_back():
    def stop(done, total):
        assert total == 12 * 5
        if done == 2:
            raise KeyboardInterrupt

    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.train(steps=5, on_progress=stop)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# Sentences, on planted curves


def planted(rule, *finals, init="unit", d_k=32, first=4.5, gradient=1.0, reached=10):
    """Runs that stand at `first` until they fall to their final loss at step `reached`."""
    rest = {"entropy": 0.5, "gradient": gradient, "tail": 0.1, "query": 0.01}
    runs = [
        (Point(0, first, **rest), *(Point(s, final, **rest) for s in (reached, 2 * reached)))
        for final in finals
    ]
    return Arm(init, d_k, rule, tuple(runs))


SAME = "no difference beyond the seeds' own"


def test_equal_curves_are_no_different():
    arms = [planted(rule, 0.1, 0.12) for rule in ("none", "1/√d_k", "1/d_k")]
    says = curves.verdict(arms, 0.003)
    assert says[1] == (
        "Final loss, no scale against 1/√d_k: no difference beyond the seeds' own with unit at "
        "d_k 32."
    )  # fmt: skip
    assert says[2].startswith("Final loss, 1/d_k against 1/√d_k: no difference")
    assert says[0] == (
        "Half the loss of chance (2.08 nats) was reached: no scale in 2 of 2 runs, "
        "1/√d_k in 2 of 2 runs, 1/d_k in 2 of 2 runs."
    )
    assert not any(s.startswith("Not with every seed") for s in says)
    assert not re.search(r"higher|lower", " ".join(says[:3]))


@pytest.mark.parametrize(
    ("gap", "word"),
    [(0.21, "higher"), (0.19, SAME), (-0.19, SAME), (-0.21, "lower")],
)
def test_a_difference_is_one_over_twice_the_gap_between_seeds(gap, word):
    arms = [planted("none", 1.0 + gap, 1.0 + gap), planted("1/√d_k", 0.95, 1.05)]
    says = curves.verdict(arms, 0.003)
    by = "" if word == SAME else ", by 0.21"
    assert says[1] == f"Final loss, no scale against 1/√d_k: {word} with unit at d_k 32{by}."


def test_places_are_told_apart():
    arms = [
        planted("none", 4.0, 4.2, d_k=32), planted("1/√d_k", 0.1, 0.1, d_k=32),
        planted("none", 4.1, 4.2, d_k=64), planted("1/√d_k", 0.1, 0.2, d_k=64),
        planted("none", 0.2, 0.2, init="gpt2"), planted("1/√d_k", 0.5, 0.5, init="gpt2"),
    ]  # fmt: skip
    assert curves.verdict(arms, 0.003)[1] == (
        "Final loss, no scale against 1/√d_k: higher with unit at d_k 32, 64, by 4.00; "
        "lower with gpt2 at d_k 32, by 0.30."
    )


def test_a_diverged_run_is_said_and_compared_with_nothing():
    arms = [planted("none", 0.1, math.nan), planted("1/√d_k", 0.1, 0.1)]
    says = curves.verdict(arms, 0.003)
    assert says[1] == "Final loss, no scale against 1/√d_k: no two arms to compare."
    assert says[2] == (
        "no scale, unit, d_k 32 diverged in 1 of 2 runs: its loss stopped being a number by "
        "step 20."
    )
    assert arms[0].diverged == 1
    assert arms[0].between is None
    row = curves.report(arms, {"steps": 20, "seed": 1, "learning_rate": 0.003}).rows[0]
    assert row["loss"] is None
    assert row["reached"] == "10 in 1 of 2"


def test_without_the_usual_scale_the_first_is_compared_with():
    says = curves.verdict([planted("none", 0.1, 0.1), planted("0.5", 0.3, 0.3)], 0.003)
    assert says[1] == "Final loss, 0.5 against no scale: higher with unit at d_k 32, by 0.20."


def test_one_seed_judges_nothing():
    says = curves.verdict([planted("none", 4.0), planted("1/√d_k", 0.1)], 0.003)
    assert says[1].startswith("One seed an arm")
    assert "Final loss" not in " ".join(says)


def test_what_learned_and_what_did_not_are_set_beside_each_other():
    arms = [
        planted("none", 4.0, 0.1, gradient=0.25),
        planted("1/√d_k", 0.1, 0.1, gradient=1.0),
        planted("1/d_k", 0.1, 0.1, gradient=1.25, reached=40),
    ]
    says = curves.verdict(arms, 0.003)
    assert says[0] == (
        "Half the loss of chance (2.08 nats) was reached: no scale in 1 of 2 runs, "
        "1/√d_k in 2 of 2 runs, 1/d_k in 2 of 2 runs."
    )
    assert says[3] == (
        "Arms that got there with every seed took 10.0 to 40.0 steps on average; soonest: "
        "1/√d_k, unit, d_k 32."
    )
    assert says[4] == "Not with every seed: no scale, unit, d_k 32 (1 of 2)."
    assert says[5].startswith("Before the first step, in the arms that got there with every seed")
    assert "1 with equal weights, 1.00 to 1.25 and 0.25;" in says[5]
    assert says[6].startswith("After the last")
    none = curves.verdict([planted("none", 4.0, 4.0)], 0.003)
    assert none[0] == "Half the loss of chance (2.08 nats) was reached: no scale in 0 of 2 runs."
    assert not any("Before the first step" in s for s in none)


# The run that is shipped


def shipped(name="train.csv"):
    """(arms, settings) of a file of curves."""
    runs = {}
    with (DOCS / name).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = row.pop("init"), int(row.pop("d_k")), row.pop("rule")
            seed, worst = row.pop("seed"), row.pop("worst")
            numbers = {k: float(v) if v else math.nan for k, v in row.items()}
            point = Point(**numbers | {"step": int(row["step"]), "worst": worst})
            runs.setdefault(place, {}).setdefault(seed, []).append(point)
    arms = [Arm(*at, tuple(map(tuple, of.values()))) for at, of in runs.items()]
    steps = max(point.step for arm in arms for run in arm.runs for point in run)
    return arms, {"steps": steps, "seed": 20260714, "learning_rate": 0.003}


SHOWN = (
    "init", "d_k", "rule", "loss", "between", "reached", "entropy_start", "gradient_start",
    "tail_start", "query_start",
)  # fmt: skip


def table_line(result, row):
    """A row of the table in docs/train.md."""
    forms = {column.key: column.form for column in result.tables[0].columns}
    cells = [
        str(row[key]) if forms[key] == "text" else getattr(numerals, forms[key])(row[key])
        for key in SHOWN
    ]
    return f"| {' | '.join(cells)} |"


def test_the_shipped_text_has_the_figures_of_the_shipped_curves():
    arms, settings = shipped()
    result = curves.report(arms, settings)
    text = (DOCS / "train.md").read_text(encoding="utf-8")
    flowing = " ".join(text.replace("\n> ", "\n").split())
    assert result.about in flowing
    for sentence in result.says:
        assert sentence in flowing
    lines = [line for line in text.splitlines() if line.startswith(("| unit", "| gpt2"))]
    assert lines == [table_line(result, row) for row in result.rows]


def long_line():
    """The sentence on docs/train-long.csv in docs/train.md."""
    (arm,), settings = shipped("train-long.csv")
    assert (arm.init, arm.d_k, arm.rule, settings["steps"]) == ("unit", 32, "none", 960)
    losses = ", ".join(numerals.number(run[-1].loss) for run in arm.runs)
    return (
        f"Half of chance was reached at step {', '.join(map(str, arm.reached))} with the three "
        f"seeds; the losses ended at {losses} nats, with entropy {arm.mean('entropy', -1):.2f} of "
        f"ln n and the lowest tenth of rows passing on {numerals.small(arm.mean('tail', -1))}."
    )


def test_the_text_has_the_figures_of_the_longer_run():
    assert long_line() in " ".join((DOCS / "train.md").read_text(encoding="utf-8").split())


def test_the_shipped_picture_is_drawn_from_the_shipped_curves(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    result = curves.report(*shipped())
    stored = (DOCS / "train.svg").read_text(encoding="utf-8")
    for panel in result.panels:
        assert f"<!-- {panel.title} -->" in stored
        for line in panel.lines:
            assert stored.count(f"<!-- {line.label} -->") == len(result.panels)
    figures.save(result, tmp_path / "again.svg")
    again = (tmp_path / "again.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}," in stored:  # others place text otherwise
        assert again == stored


@pytest.mark.parametrize("at", [("unit", 128, "none"), ("gpt2", 32, "1/d_k")])
def test_the_shipped_curves_start_where_this_code_starts(at):
    init, d_k, rule = at
    (arm,) = (a for a in shipped()[0] if (a.init, a.d_k, a.rule) == at)
    result = lab.train(rule, d_k=d_k, init=init, steps=1, seeds=len(arm.runs))
    starts = [row for row in result.tables[1].rows if row["step"] == 0]
    assert len(starts) == len(arm.runs)
    for row, run in zip(starts, arm.runs, strict=True):
        for name in ("loss", "entropy", "variance", "gradient", "tail", "query"):
            assert getattr(run[0], name) == pytest.approx(row[name], rel=1e-3), name
    assert starts[0]["rule"] == scales.RULES[rule]


def test_what_the_text_reads_from_the_curves_is_there():
    arms = {(arm.init, arm.d_k, arm.rule): arm for arm in shipped()[0]}
    sizes, plain = (32, 64, 128), "1/√d_k"

    def soon(*at):
        return sum(arms[at].reached) / 3

    assert len(arms) == 18
    for d_k in sizes:
        assert arms["unit", d_k, "none"].reached == [None] * 3
        for init in ("unit", "gpt2"):
            assert None not in arms[init, d_k, plain].reached
            assert soon(init, d_k, "1/d_k") > soon(init, d_k, plain)
    assert soon("gpt2", 32, "none") <= soon("gpt2", 32, plain)
    for d_k in (64, 128):
        arm = arms["gpt2", d_k, "none"]
        assert arm.reached.count(None) == 2
        assert arm.mean("entropy", 0) > 0.95
        assert arm.mean("tail", 0) > 0.9
        assert arm.mean("entropy", -1) < 0.35
        assert arm.mean("tail", -1) < 0.03
    failed = [arm for arm in arms.values() if None in arm.reached]
    learned = [arm for arm in arms.values() if None not in arm.reached]
    assert min(a.mean("query", 0) for a in failed) > max(a.mean("query", 0) for a in learned)
    assert max(arms["unit", d_k, "none"].mean("entropy", 0) for d_k in sizes) < 0.3
    assert max(arms["unit", d_k, "none"].mean("tail", 0) for d_k in sizes) < 0.1
    assert arms["unit", 128, plain].between == max(
        arm.between for at, arm in arms.items() if at[2] != "none"
    )
    assert arms["gpt2", 32, "none"].mean("entropy", -1) < 0.4

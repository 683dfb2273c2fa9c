"""One head against several: work counted by torch, and the planted task by another way."""

import math
import re

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaledot import lab
from scaledot.lab import splitting
from scaledot.lab.results import Estimate

SMALL = {"d_model": 64, "keys": 24, "measure": False}


def quick(heads, **settings):
    return lab.multihead(heads=heads, **{**SMALL, **settings})


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_flops_are_those_that_torch_counts(heads):
    layer = splitting.Layer.random(64, 24, 0)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (splitting.split(x, heads) for x in layer.project())
        weights = (q @ k.mT).softmax(-1)
        splitting.join(weights @ v) @ layer.output
    row = quick(heads).rows[0]
    assert counter.get_total_flops() == row["projections"] + row["matmuls"]
    assert row["exp"] == weights.numel()
    assert row["scores"] == weights.nbytes
    assert row["lse"] == weights.logsumexp(-1).nbytes


def test_only_softmax_and_scores_grow_with_heads():
    one, eight = lab.multihead(measure=False).rows
    assert one["projections"] == eight["projections"] == 8 * 512 * 512**2
    assert one["matmuls"] == eight["matmuls"] == 4 * 512**2 * 512
    assert eight["exp"] == 8 * one["exp"] == 8 * 512**2
    assert eight["scores"] == 8 * one["scores"]


def test_split_and_join():
    x = torch.randn(5, 12)
    heads = splitting.split(x, 3)
    assert heads.shape == (3, 5, 4)
    assert torch.equal(heads[1], x[:, 4:8])
    assert torch.equal(splitting.join(heads), x)


def test_shapes_of_every_step():
    shapes = quick((1, 8)).tables[1].rows
    assert {row["step"]: row["heads_8"] for row in shapes} == {
        "X": "24 × 64",
        "Q, K, V, each": "24 × 64",
        "split, each": "8 × 24 × 8",
        "scores and weights": "8 × 24 × 24",
        "output of the heads": "8 × 24 × 8",
        "side by side": "24 × 64",
        "times W_O": "24 × 64",
    }
    assert [row["heads_1"] for row in shapes][2:5] == ["1 × 24 × 64", "1 × 24 × 24", "1 × 24 × 64"]


# The planted task


def planted(r):
    return {(row["case"], row["share"]): row for row in r.tables[2].rows}


def test_several_heads_recover_both_and_one_does_not():
    rows = planted(lab.multihead(heads=(1, 2, 8), measure=False))
    for h in (2, 8):
        row = rows[f"{h} heads", None]
        assert 0 <= row["previous"].value < 1e-25
        assert 0 <= row["antecedent"].value < 1e-25
        assert row["previous"].error is None
    for share in (0.5, 0.75, 0.9):
        row = rows["1 head", share]
        for key, value in (("previous", 1 - share), ("antecedent", share)):
            assert row[key].theory == pytest.approx(value**2 / (share**2 + (1 - share) ** 2))
            assert abs(row[key].z) < 4
        assert row["previous"].value + row["antecedent"].value == pytest.approx(1, abs=0.03)


def test_no_linear_readout_does_better_than_theory():
    """The best readout of all the output's columns, fitted to the sequences themselves."""
    task = splitting.Planted.random(32, 4, 5)
    rows = np.arange(64)[:, None]
    content = task.content.numpy()
    u = content[:, np.arange(32) - 1][:, 2:].reshape(-1, 4)
    w = content[rows, task.antecedent.numpy()][:, 2:].reshape(-1, 4)
    for share in (0.5, 0.75):
        mixed = splitting._one_head(task, 64, share)[:, 2:].reshape(-1, 64).numpy()
        total = 0.0
        for meant, expected in zip((u, w), splitting._left(share), strict=True):
            fitted = mixed @ np.linalg.lstsq(mixed, meant, rcond=None)[0]
            error = ((fitted - meant) ** 2).mean()
            assert error == pytest.approx(expected, abs=0.06)
            total += error
        assert total == pytest.approx(1, abs=0.06)


def test_weights_are_where_they_are_planted():
    task = splitting.Planted.random(16, 16, 3)
    value = torch.eye(16, dtype=torch.float64).expand(64, -1, -1)
    weights = splitting._one_head(task, 32, 0.75, value)[..., :16]
    expected = torch.zeros_like(weights)
    for i in range(2, 16):
        expected[:, i, i - 1] = 0.75
        expected[torch.arange(64), i, task.antecedent[:, i]] = 0.25
    torch.testing.assert_close(weights[:, 2:], expected[:, 2:], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("n", [4, 7, 64])
@pytest.mark.parametrize("kinds", [False, True])
def test_an_antecedent_is_before_the_previous_token(n, kinds):
    task = splitting.Planted.random(n, 2, 11, kinds)
    i = torch.arange(n)
    back = (i - task.antecedent)[:, 2:]
    assert (back >= 2).all()
    assert (task.antecedent[:, 2:] >= 0).all()
    if kinds:
        assert (back % 2 == 0).all()
    first = (n - 1) % 2 if kinds else 0
    places = set(range(first, n - 2, 1 + kinds))
    found = set(task.antecedent[:, -1].tolist())
    assert found == places if n < 8 else found < places


def test_one_head_is_enough_where_kinds_have_columns_of_their_own():
    row = planted(quick(1))["1 head, two kinds", 0.5]
    assert 0 <= row["previous"].value < 1e-25
    assert 0 <= row["antecedent"].value < 1e-25


def test_errors_keep_their_distribution_over_seeds():
    """z over 200 seeds has mean 0 and deviation 1: the standard error is right."""
    z = []
    for seed in range(200):
        task = splitting.Planted.random(8, 8, seed)
        mixed = splitting._one_head(task, 16, 0.5)[..., :8]
        for found, theory in zip(task.errors(mixed, mixed), splitting._left(0.5), strict=True):
            z.append((found.value - theory) / found.error)
    first = np.array(z)[::2]
    assert abs(first.mean()) < 4 / math.sqrt(200)
    assert abs(first.std(ddof=1) - 1) < 4 / math.sqrt(2 * 200)


# As a result


def test_the_same_seed_gives_the_same_numbers_on_any_number_of_threads():
    before = torch.get_num_threads()
    first = quick((1, 4))
    try:
        torch.set_num_threads(2)
        second = quick((1, 4))
    finally:
        torch.set_num_threads(before)
    assert first == second
    other = quick((1, 4), seed=1)
    assert other.tables[2].rows != first.tables[2].rows


def test_times_are_there_if_asked():
    steps = []
    r = lab.multihead(
        32, (1, 2), keys=16, repeats=2, on_progress=lambda done, of: steps.append((done, of))
    )
    for row in r.rows:
        assert all(row[k] > 0 for k in row if k.endswith("_ms"))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(r.panels) == 3
    assert [t.title for t in r.tables][3:] == ["Milliseconds on this machine"]
    assert any(line.startswith("Measured: ") for line in r.says)
    plain = quick((1, 2))
    assert all(row[k] is None for row in plain.rows for k in row if k.endswith("_ms"))
    assert [len(plain.panels), len(plain.tables)] == [2, 3]


def test_sentences_compare_only_what_there_is():
    assert not any("From" in line or "Separate heads" in line for line in quick(1).says)
    both = quick((1, 4)).says
    assert any("exponentials × 4, memory of scores × 4" in line for line in both)
    down = quick((4, 1)).says
    assert any("From 4 to 1 heads" in line and "exponentials × 0.25" in line for line in down)


def test_every_estimate_has_what_it_is_compared_with():
    for row in quick((1, 4)).tables[2].rows:
        for value in row.values():
            assert not isinstance(value, Estimate) or value.theory is not None


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"heads": (1, 7)}, "heads 7 does not divide d_model 64: pass a divisor of it"),
        (
            {"heads": 32},
            "heads 32 leaves d_k = 2 of d_model 64: the planted task needs at least 4",
        ),
        ({"heads": ()}, "heads is empty: pass at least one size"),
        ({"heads": 1, "d_model": 0}, "d_model is 0: pass at least 1"),
        ({"heads": 1, "d_model": 4}, "d_model is 4: the planted task needs at least 8"),
        ({"heads": 1, "keys": 0}, "keys is 0: pass at least 1"),
        ({"heads": 1, "seed": -1}, "seed is -1: pass at least 0"),
        (
            {"heads": 1, "seed": 2**64},
            "seed is 18446744073709551616: torch takes at most 18446744073709551615",
        ),
    ],
)
def test_bad_arguments_are_one_clear_line(settings, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        quick(**settings)

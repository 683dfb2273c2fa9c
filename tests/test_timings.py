"""The naive stages give attention, and runs take turns."""

import pytest
import torch
import torch.nn.functional as F

from scaledot.lab import timings


@pytest.mark.parametrize("causal", [False, True])
def test_naive_stages_give_attention(causal):
    q, k, v = torch.randn(3, 2, 7, 5, dtype=torch.float64)
    stages, seconds = timings.naive(q, k, v, 0.3, causal)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(stages["output"], expected, rtol=1e-12, atol=1e-14)
    assert stages["weights"].shape == (2, 7, 7)
    assert list(seconds) == ["scores", "scale", "softmax", "values"]
    assert all(s > 0 for s in seconds.values())


def test_runs_take_turns_and_the_least_counts():
    calls, steps = [], []
    times = {"a": iter([3.0, 1.0, 2.0]), "b": iter([5.0, 6.0, 4.0])}

    def run(name):
        def once():
            calls.append(name)
            return {"all": next(times[name])}

        return once

    best = timings.least(
        {"a": run("a"), "b": run("b")}, 3, lambda done, of: steps.append((done, of))
    )
    assert best == {"a": {"all": 1.0}, "b": {"all": 4.0}}
    assert calls == ["a", "b"] * 3
    assert steps == [(i, 6) for i in range(1, 7)]

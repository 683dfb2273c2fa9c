"""Regularisers against their dense definition in float64; rows that do not count give nothing."""

import re
from pathlib import Path

import pytest
import torch

import scaledot
from scaledot import attention
from scaledot.losses import entropy_loss, z_loss


def dense(q, k, visible):
    """(entropy, lse) of each row in plain torch."""
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1)
    return -(p * (scores - lse[..., None]).masked_fill(~visible, 0.0)).sum(-1), lse


def problem(seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    return [
        (2 * torch.randn(2, 3, 11, 7, generator=generator, dtype=torch.float64)).requires_grad_()
        for _ in range(3)
    ]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("term", ["entropy", "z"])
def test_a_term_and_its_gradient_are_those_of_the_definition(term, padded):
    q, k, v = problem()
    visible = torch.ones(11, 11, dtype=torch.bool).tril()
    real = torch.ones(2, 1, 11, dtype=torch.bool)
    if padded:
        real[1, :, 6:] = False
    _, rows = attention(q, k, v, is_causal=True, return_stats=True)
    mask = real if padded else None
    got = entropy_loss(rows, 1.2, mask) if term == "entropy" else z_loss(rows, mask)
    entropy, lse = dense(q, k, visible)
    each = (1.2 - entropy).relu().square() if term == "entropy" else lse.square()
    wanted = each[real.expand_as(each)].mean()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    for one, other in zip(
        torch.autograd.grad(got, (q, k)), torch.autograd.grad(wanted, (q, k)), strict=True
    ):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("term", [lambda rows: entropy_loss(rows, 9.0), z_loss])
def test_rows_that_see_nothing_or_no_number_give_nothing(term):
    q, k, v = problem(1)
    visible = torch.rand(11, 11, generator=torch.Generator().manual_seed(2)) < 0.6
    visible[:, 0] = True
    visible[4] = False
    _, rows = attention(q, k, v, attn_mask=visible, return_stats=True)
    loss = term(rows)
    gradient = torch.autograd.grad(loss, (q, k))
    assert all(x.isfinite().all() for x in gradient)
    assert not gradient[0][:, :, 4].any()
    keep = [i for i in range(11) if i != 4]
    _, others = attention(q[:, :, keep], k, v, attn_mask=visible[keep], return_stats=True)
    torch.testing.assert_close(loss, term(others), rtol=1e-12, atol=0)
    with torch.no_grad():
        q[0, 1, 7] = torch.inf
    _, rows = attention(q, k, v, attn_mask=visible, return_stats=True)
    assert int(rows.nonfinite.sum()) == 1
    loss = term(rows)
    assert loss.isfinite()
    (left,) = torch.autograd.grad(loss, (k,))
    assert left[1].isfinite().all()  # of the text without it


def test_nothing_at_all_is_0():
    q, k, v = problem(3)
    nothing = torch.zeros(11, 11, dtype=torch.bool)
    _, rows = attention(q, k, v, attn_mask=nothing, return_stats=True)
    assert entropy_loss(rows, 1.0).item() == z_loss(rows).item() == 0.0


def test_a_step_down_a_term_gives_more_entropy_or_a_smaller_lse():
    q, k, v = problem(4)
    for term, measure, side in (
        (lambda rows: entropy_loss(rows, 2.0), lambda rows: rows.entropy.mean(), 1),
        (z_loss, lambda rows: rows.lse.square().mean(), -1),
    ):
        _, rows = attention(q, k, v, return_stats=True)
        (slope,) = torch.autograd.grad(term(rows), (q,))
        _, after = attention(q - 0.1 * slope / slope.norm(), k, v, return_stats=True)
        assert side * (measure(after) - measure(rows)).item() > 0


def test_a_loop_as_the_page_on_training_shows_it():
    """Twenty steps of it leave less to lack than the same steps without the terms."""
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = [x for x in re.findall(r"```python\n(.*?)```", page, re.S) if "losses." in x]
    without = re.sub(r"    loss = loss \+ .*\n", "", code)
    assert without != code
    x = 4 * torch.randn(2, 9, 32)
    lacking = {}
    for name, text in (("with", code), ("without", without)):
        torch.manual_seed(5)
        names = {"batches": [(x, torch.zeros_like(x))] * 20}
        exec(compile(text, "training.md", "exec"), names)
        _, rows = names["attention"](x)
        lacking[name] = scaledot.losses.entropy_loss(rows, 1.0).item()
    assert lacking["with"] < lacking["without"]

"""row_stats() gives attention's statistics without its output, and sweeps the scale."""

import doctest

import pytest
import torch

from oracle import FLOATS, MASKS, assert_as_trace, inputs, masks
from scaledot import dispatch, row_stats
from scaledot.dispatch import attention

SHAPE = {"batch": 2, "heads": 6, "queries": 19, "keys": 37}
FACTORS = (0.25, 0.5, 1, 2.0, 3.0, 8.0)
KERNELS = ("native", "tiled")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_are_attentions(mask, kernel):
    q, k, v = inputs(**SHAPE)
    arguments = {**masks(**SHAPE)[mask], "softcap": 2.0, "enable_gqa": True, "kernel": kernel}
    _, want = attention(q, k, v, **arguments, return_stats=True)
    rows = row_stats(q, k, **arguments)
    assert rows.kernel == kernel
    for name, x in vars(want).items():
        if torch.is_tensor(x):
            torch.testing.assert_close(getattr(rows, name), x, equal_nan=True)


@pytest.mark.parametrize("mask", ["none", "window", "additive", "all at once"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sweep_is_the_oracle_at_each_scale(mask, softcap, sink, kernel):
    q, k, v = inputs(**SHAPE)
    arguments = {**masks(**SHAPE)[mask], "softcap": softcap, "enable_gqa": True}
    arguments["sinks"] = torch.linspace(-1, 1, 6) if sink else None
    sweep = row_stats(q, k, scale=0.4, factors=FACTORS, kernel=kernel, **arguments)
    assert sweep.kernel == kernel
    assert sweep.entropy.shape == (len(FACTORS), 2, 6, 19)

    for i, factor in enumerate(FACTORS):

        def attend(q, k, v, attn_mask, return_stats, i=i, **arguments):
            out = attention(q, k, v, attn_mask, **arguments)
            return out, sweep.map(lambda x: x[i])

        assert_as_trace(q, k, v, attend=attend, scale=0.4 * factor, **arguments)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_any_number_of_axes(axes):
    q, k, _ = (x[(None,) * (axes == 5) + (0,) * (4 - axes)] for x in inputs(heads=3))
    assert row_stats(q, k).lse.shape == q.shape[:-1]
    assert row_stats(q, k, factors=(1, 2)).lse.shape == (2, *q.shape[:-1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_flow_from_lse_and_entropy(kernel):
    grads = []
    q, k, v = inputs(heads=3)
    q, k = q.requires_grad_(), k.requires_grad_()
    rows = row_stats(q, k, kernel=kernel)
    grads.append(torch.autograd.grad(rows.lse.sin().sum() + rows.entropy.sum(), (q, k)))
    rows = attention(q, k, v, kernel=kernel, return_stats=True)[1]
    grads.append(torch.autograd.grad(rows.lse.sin().sum() + rows.entropy.sum(), (q, k)))
    for ours, want in zip(*grads, strict=True):
        torch.testing.assert_close(ours, want)
    assert not row_stats(q, k, factors=(1, 2), kernel=kernel).lse.requires_grad
    assert not rows.top_margin.requires_grad


def test_float64_is_tileds():
    q, k, _ = inputs(heads=3, dtype=torch.float64)
    for factors in (None, (1, 2)):
        rows = row_stats(q, k, factors=factors)
        assert rows.kernel == "tiled"
        assert all(getattr(rows, n) is None or getattr(rows, n).dtype == q.dtype for n in FLOATS)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        ((), ValueError, r"factors is \(\): pass one finite number or more, as \(0.5, 1, 2\)"),
        ((1, float("nan")), ValueError, "pass one finite number"),
        (2.0, TypeError, "factors must be a list of numbers, got float"),
        (("2",), TypeError, "a factor must be a number, got str"),
    ],
)
def test_factors_are_checked(factors, error, message):
    q, k, _ = inputs(heads=3)
    with pytest.raises(error, match=message):
        row_stats(q, k, factors=factors)


def test_its_example_runs():
    found = doctest.DocTestFinder().find(row_stats, "row_stats", globs=vars(dispatch).copy())
    assert doctest.DocTestRunner().run(found[0]).failed == 0

"""attention() is F.scaled_dot_product_attention, with statistics on request."""

import doctest
import importlib
import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from oracle import inputs
from scaledot.dispatch import (
    ERROR_FACTOR,
    ERROR_ULPS,
    KERNELS,
    attention,
    error_bound,
    mass_bound,
    row_stats,
)
from scaledot.masks import Mask
from scaledot.rows import RowStats

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TORCHS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -1.0},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": "bool"},
    "bool mask, one a batch": {"attn_mask": "bool", "at": (slice(None), slice(1), slice(1))},
    "float mask": {"attn_mask": "float"},
    "float mask, one a head": {"attn_mask": "float", "at": (slice(1), slice(None), slice(1))},
    "float mask of two axes": {"attn_mask": "float", "at": (0, 0)},
    "float mask of three axes": {"attn_mask": "float", "at": (0,)},
    "−∞ in the mask": {"attn_mask": "−∞"},
}


@pytest.mark.parametrize("case", TORCHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_every_parameter_means_what_it_means_to_torch(case, dtype, grouped):
    arguments = dict(TORCHS[case])
    q, k, v = inputs(kv_heads=3 if grouped else 6, queries=13, dtype=dtype)
    at = arguments.pop("at", ())
    if "attn_mask" in arguments:
        allowed = torch.rand(2, 6, 13, 13) < 0.6
        allowed[0, 0, 1] = False
        mask = {
            "bool": allowed,
            "float": torch.randn(2, 6, 13, 13).to(dtype),
            "−∞": torch.zeros(2, 6, 13, 13, dtype=dtype).masked_fill(~allowed, -math.inf),
        }[arguments["attn_mask"]]
        arguments["attn_mask"] = mask[at]
    ours = attention(q, k, v, enable_gqa=grouped, **arguments)
    torchs = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **arguments)
    torch.testing.assert_close(ours, torchs)
    assert ours.dtype == torchs.dtype
    exact = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), enable_gqa=grouped,
        **{n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
           for n, x in arguments.items()},
    )  # fmt: skip
    if dtype != torch.float64:
        eps = torch.finfo(dtype).eps
        error, torch_error = ((x.double() - exact).abs().max() for x in (ours, torchs))
        assert error <= ERROR_FACTOR * torch_error + ERROR_ULPS * eps * exact.abs().max()


def test_parameters_have_torchs_names_order_and_defaults():
    names = list(inspect.signature(attention).parameters.values())
    positional = [p for p in names if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    assert F.scaled_dot_product_attention.__doc__.startswith(
        "scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0,\n"
        "        is_causal=False, scale=None, enable_gqa=False)"
    )


@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_any_number_of_axes_as_in_torch(axes):
    q, k, v = (x[(None,) * (axes == 5) + (0,) * (4 - axes)] for x in inputs(heads=3))
    out, rows = attention(q, k, v, return_stats=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    assert all(x.shape == q.shape[:-1] for x in vars(rows).values() if torch.is_tensor(x))


def test_causality_of_unequal_lengths_is_torchs_top_left():
    q, k, v = inputs(heads=3)
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, is_causal="top_left"), torchs)


def test_causality_and_a_mask_both_apply():
    q, k, v = inputs(heads=3, keys=11)
    mask = torch.randn(11, 11)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    torchs = F.scaled_dot_product_attention(q, k, v, mask.masked_fill(~causal, -math.inf))
    for arguments in (
        {"attn_mask": mask, "is_causal": True},
        {"attn_mask": Mask(causal="top_left") & mask},
        {"attn_mask": Mask(causal="bottom_right") & mask, "is_causal": True},
    ):
        torch.testing.assert_close(attention(q, k, v, **arguments), torchs)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_is_torchs(to):
    """Inputs of any float dtype but float64 become autocast's; statistics stay float32."""
    q, k, v = inputs(heads=3)
    with torch.autocast("cpu", to):
        mixed = (q, k.to(to), v.double().float())
        out, rows = attention(*mixed, return_stats=True)
        torchs = F.scaled_dot_product_attention(*mixed)
        assert attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
    assert out.dtype == torchs.dtype == to
    assert rows.entropy.dtype == torch.float32
    torch.testing.assert_close(out, torchs)
    exact = attention(*(x.to(to) for x in (q, k, v)), return_stats=True)[1]
    assert torch.equal(rows.entropy, exact.entropy)
    assert attention(q, k, v).dtype == torch.float32


def test_autocast_gradients_come_back_in_the_inputs_dtype():
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
    out.float().square().sum().backward()
    ours = q.grad.clone()
    q.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        torchs = F.scaled_dot_product_attention(q, k, v)
    torchs.float().square().sum().backward()
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, q.grad, rtol=0.05, atol=0.02)


def test_statistics_come_on_request_and_name_the_kernel():
    q, k, v = inputs(heads=3)
    assert torch.is_tensor(attention(q, k, v))
    out, rows = attention(q, k, v, return_stats=True)
    assert isinstance(rows, RowStats)
    assert rows.kernel in KERNELS
    chosen, same = attention(q, k, v, kernel=rows.kernel, return_stats=True)
    assert torch.equal(out, chosen)
    assert same.kernel == rows.kernel


def test_no_gradient_is_kept_where_none_is_asked():
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    with torch.no_grad():
        out, rows = attention(q, k, v, return_stats=True)
    assert not out.requires_grad
    assert not rows.entropy.requires_grad
    with_gradient, rows = attention(q, k, v, return_stats=True)
    assert torch.equal(out, with_gradient)
    assert rows.entropy.requires_grad


def test_entropy_trains():
    """As a loss it is pushed down by gradient descent, to where the row is sharp."""
    q, k, v = inputs(heads=3)
    q.requires_grad_()
    before = attention(q, k, v, return_stats=True)[1].entropy.mean()
    for _ in range(20):
        entropy = attention(q, k, v, return_stats=True)[1].entropy.mean()
        (grad,) = torch.autograd.grad(entropy, q)
        q = (q - 30 * grad).detach().requires_grad_()
    after = attention(q, k, v, return_stats=True)[1].entropy.mean()
    assert after < 0.5 * before


def test_meta_tensors_give_shapes_and_gradients_as_torchs():
    q, k, v = (x.to("meta").requires_grad_() for x in inputs())
    for arguments in (
        {}, {"is_causal": "bottom_right", "softcap": 2.0}, {"attn_mask": Mask(lengths=[3, 13])},
        {"dropout_p": 0.5, "sinks": torch.empty(6, device="meta")},
    ):  # fmt: skip
        out, rows = attention(q, k, v, enable_gqa=True, return_stats=True, **arguments)
        torchs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert (out.shape, out.dtype, out.device) == (torchs.shape, torchs.dtype, torchs.device)
        assert rows.entropy.shape == rows.visible.shape == (2, 6, 11)
        grads = torch.autograd.grad(out.sum() + rows.lse.sum(), (q, k, v))
        assert [(g.shape, g.device) for g in grads] == [(x.shape, x.device) for x in (q, k, v)]
    assert row_stats(q, k, enable_gqa=True, factors=(1, 2)).lse.shape == (2, 2, 6, 11)


def test_error_bounds_are_their_formulas():
    reference = torch.tensor([2.0, -8.0, math.nan, -math.inf], dtype=torch.float64)
    plain = torch.tensor([2.5, -8.0, math.nan, -math.inf], dtype=torch.bfloat16)
    assert error_bound(reference, plain) == 2 * 0.5 + 4 * 2**-7 * 8
    assert error_bound(reference[2:], plain[2:]) == 0
    assert mass_bound(torch.float32, 5.0) == 1e-5
    assert mass_bound(torch.float64, 64.0) == 2e-12


@pytest.mark.parametrize("module", ["dispatch", "stages", "masks", "rows", "heads", "roles"])
def test_every_example_runs(module):
    result = doctest.testmod(importlib.import_module(f"scaledot.{module}"))
    assert result.failed == 0
    assert result.attempted > 0 or module in ("rows", "heads", "roles")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_mode_raises_and_is_not_0(dtype):
    """What no kernel carries would come out as a derivative of 0."""
    from torch.autograd import forward_ad

    q, k = torch.randn(2, 1, 2, 5, 8, dtype=dtype).unbind()
    calls = (
        lambda x: attention(x, k, k),
        lambda x: attention(q, k, x, is_causal=True, scale=0.3),
        lambda x: row_stats(x, k).lse,
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(call, (q,), (torch.ones_like(q),))
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                call(forward_ad.make_dual(q, torch.ones_like(q)))
            assert call(q).isfinite().all()  # nothing to carry

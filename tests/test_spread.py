"""How far attended values lie apart, against E_p‖v − o‖² itself."""

import doctest
import math

import pytest
import torch

from oracle import MASKS, inputs, masks
from scaledot import checks, spread
from scaledot import masks as masks_module
from scaledot.dispatch import attention
from scaledot.masks import Mask, resolve
from scaledot.spread import centre, squares, value_spread
from scaledot.stages import trace


def measured(q, k, v, attn_mask=None, is_causal=False, window=None, **arguments):
    problem = checks.problem(q, k, v, enable_gqa=True, **arguments)
    seen = resolve(problem, attn_mask, is_causal, window)
    middle = centre(problem, seen)
    column = squares(problem, middle)[..., None]
    out, rows = attention(
        q, k, torch.cat([v.to(column.dtype), column], -1).to(q.dtype), attn_mask,
        is_causal=is_causal, window=window, enable_gqa=True, return_stats=True, **arguments,
    )  # fmt: skip
    second = out[..., -1]
    if rows.sink_mass is not None:
        assert float(rows.sink_mass.nan_to_num().amax()) > 0
    return value_spread(problem, seen, rows, out[..., :-1], second, middle), rows


def definition(q, k, v, **arguments):
    """(E_p‖v − o‖², the same for equal weights) from n×n weights; the sink is one more value, 0."""
    t = trace(q, k, v, enable_gqa=True, **arguments)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    weights = torch.where(t.visible, t.weights, 0.0)
    apart = (values[:, :, None] - t.output[..., None, :]).square().sum(-1)
    found = (weights * apart).sum(-1)
    if t.rows.sink_mass is not None:
        found = found + t.rows.sink_mass * t.output.square().sum(-1)
    equal = t.visible.double() / t.visible.sum(-1, keepdim=True).clamp(min=1)
    mean = equal @ values
    apart = (values[:, :, None] - mean[..., None, :]).square().sum(-1)
    return found.masked_fill(t.rows.visible == 0, math.nan), (equal * apart).sum(-1), t.rows


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", ["plain", "soft-cap and sinks"])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_value_spread_is_its_definition(mask, extra, shift):
    arguments = masks(2, 6, 11, 13)[mask]
    if extra != "plain":
        arguments |= {"softcap": 1.5, "sinks": torch.randn(6).double()}
    q, k, v = inputs(dtype=torch.float64)
    v = v + shift
    found, _ = measured(q, k, v, **arguments)
    want, uniform, rows = definition(q, k, v, **arguments)
    # A difference of ‖o − centre‖², which without a sink is of the size of the spread itself.
    close = 1e-9 if extra == "plain" else 1e-9 * max(1.0, shift)
    torch.testing.assert_close(
        found["value_spread"], want, rtol=close, atol=1e-12 + shift**2 * 1e-14, equal_nan=True
    )
    relative = found["relative_value_spread"]
    several = rows.visible > 1
    assert torch.equal(relative.isnan(), ~several)
    torch.testing.assert_close(relative[several], (want / uniform)[several], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_uniform_attention_is_one_and_equal_values_nothing(causal):
    q, k, v = inputs(queries=13)
    found, rows = measured(q * 0, k, v, is_causal=causal)
    relative = found["relative_value_spread"][rows.visible > 1]
    torch.testing.assert_close(relative, torch.ones_like(relative), rtol=1e-4, atol=1e-4)
    same = torch.full_like(v, 3.7)
    found, rows = measured(q, k, same, is_causal=causal)
    assert float(found["value_spread"].amax()) < 1e-10
    assert found["relative_value_spread"].isnan().all()
    sharp, rows = measured(q * 1e4, k, v, is_causal=causal)
    assert float(sharp["value_spread"].median()) < 1e-6


def test_float32_keeps_a_spread_beside_a_large_common_part():
    q, k, v = inputs(queries=13)
    v = v + 300
    found, _ = measured(q, k, v)
    want, _, _ = definition(q.double(), k.double(), v.double())
    # An output of size 300 is rounded to 1.5e-5, and ‖o − centre‖ is about 1.
    torch.testing.assert_close(found["value_spread"].double(), want, rtol=1e-3, atol=1e-3)


def test_mean_square_gradient_of_random_incoming_ones():
    """E over dO ~ N(0, I) of Var_p(dP) is the value spread: that is why it is looked at."""
    q, k, v = inputs(batch=1, queries=4, dtype=torch.float64)
    t = trace(q, k, v, enable_gqa=True)
    values = v.repeat_interleave(2, 1)
    d_out = torch.randn(20_000, *t.output.shape, dtype=torch.float64)
    d_p = torch.einsum("s...qd,...kd->s...qk", d_out, values)
    mean = (t.weights * d_p).sum(-1, keepdim=True)
    variance = (t.weights * (d_p - mean).square()).sum(-1).mean(0)
    found, _ = measured(q, k, v)
    torch.testing.assert_close(variance, found["value_spread"], rtol=0.06, atol=1e-6)


def test_padding_documents_and_empty_axes():
    q, k, v = inputs(queries=13)
    real = torch.tensor([[False] * 4 + [True] * 9, [True] * 13])
    v[0, :, :4] = math.nan
    k[0, :, :4] = math.nan
    found, _ = measured(q, k, v, attn_mask=Mask(keys=real), is_causal=True)
    alone, _ = measured(q[:1, :, 4:], k[:1, :, 4:], v[:1, :, 4:], is_causal=True)
    for name, x in alone.items():
        torch.testing.assert_close(found[name][:1, :, 4:], x, equal_nan=True, rtol=1e-4, atol=1e-5)
    scattered = torch.tensor([0, 1, 0, 1] * 3 + [0])
    v = v.nan_to_num()
    k = k.nan_to_num()
    found, rows = measured(q, k, v, attn_mask=Mask(segments=scattered))
    exact = (x.double() for x in (q, k, v))
    want, uniform, _ = definition(*exact, attn_mask=Mask(segments=scattered))
    several = rows.visible > 1
    relative = found["relative_value_spread"]
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(relative[several], (want / uniform)[several], **close)
    assert not found["value_spread"].isnan().any()
    others = torch.arange(13) // 5 + 7
    strangers, rows = measured(q, k, v, attn_mask=Mask(segments=(others - 1, others)))
    assert torch.equal(strangers["value_spread"].isnan(), rows.visible == 0)
    none, _ = measured(q, k[:, :, :0], v[:, :, :0])
    assert none["value_spread"].isnan().all()
    none, _ = measured(q[:, :, :0], k, v)
    assert none["relative_value_spread"].shape == (2, 6, 0)


def test_examples():
    names = {"torch": torch, "checks": checks, "masks": masks_module, "attention": attention}
    assert doctest.testmod(spread, extraglobs=names) == (0, 5)


def test_equal_values_of_a_document_have_no_relative_spread():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 60, 16)
    documents = torch.arange(60) // 30
    v = torch.randn(1, 2, 2, 64)[:, :, documents]
    found, _ = measured(q, k, v, attn_mask=Mask(segments=documents), is_causal=True)
    assert found["relative_value_spread"].isnan().all()

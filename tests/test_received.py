"""What each key received is the column sum of the weights of the definition."""

import doctest
import math

import pytest
import torch

import scaledot
from oracle import LOWEST, MASKS, double, inputs, masks
from scaledot import received
from scaledot.dispatch import row_stats
from scaledot.masks import Mask
from scaledot.received import attention_received
from scaledot.stages import trace


def columns(q, k, queries=None, **arguments):
    """Column sums of the n×n weights in float64, empty rows and hidden keys left out."""
    arguments = {name: double(x) if name == "sinks" else x for name, x in arguments.items()}
    t = trace(q.double(), k.double(), enable_gqa=True, **arguments)
    weights = torch.where(t.visible, t.weights, 0.0)
    weights = torch.where(t.rows.nonfinite[..., None] & t.visible, math.nan, weights)
    if queries is not None:
        weights = torch.where(queries[:, None, :, None], weights, 0.0)
    return weights.sum(2), t.rows


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", ["plain", "soft-cap and sinks"])
@pytest.mark.parametrize("queries", [11, 13, 1])
def test_received_is_the_column_sum(mask, extra, queries):
    arguments = masks(2, 6, queries, 13)[mask]
    if extra != "plain":
        arguments |= {"softcap": 1.5, "sinks": torch.randn(6)}
    # float32 rounds an lse of −1e4, and so a weight, by 6e-4.
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 2e-3 if "1e4" in mask else 1e-5)):
        q, k, _ = inputs(queries=queries, dtype=dtype)
        want, rows = columns(q, k, **arguments)
        found = attention_received(q, k, enable_gqa=True, **arguments)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), want, rtol=close, atol=close)
        lse = row_stats(q, k, enable_gqa=True, **arguments).lse
        again = attention_received(q, k, enable_gqa=True, lse=lse, **arguments)
        torch.testing.assert_close(again, found, rtol=0, atol=0)
        # Every row gives away 1, less what its sink takes.
        given = torch.where(rows.visible > 0, 1.0, 0.0).double()
        if rows.sink_mass is not None:
            given = given - rows.sink_mass.nan_to_num()
        torch.testing.assert_close(
            found.double().sum(-1), given.sum(-1), rtol=close, atol=close * 13
        )


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_large_common_parts_of_keys_do_no_harm(shift):
    q, k, _ = inputs(queries=40, keys=40, d_k=16, dtype=torch.float64)
    k = k + shift
    want, _ = columns(q, k, is_causal=True)
    found = attention_received(q, k, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_blocks_of_a_dense_mask_join():
    q, k, _ = inputs(batch=1, queries=70, keys=received.KEYS + 88, dtype=torch.float64)
    bias = torch.randn(1, 6, 70, received.KEYS + 88, dtype=torch.float64)
    bias[..., 3] = LOWEST
    bias[:, :, 5] = -math.inf
    for mask in (bias, bias > 0, Mask(dense=bias[:, :1]) & (bias[:, :, :1] > -1)):
        want, _ = columns(q, k, attn_mask=mask)
        found = attention_received(q, k, mask, enable_gqa=True)
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_queries_can_be_left_out(dtype):
    q, k, _ = inputs(queries=13, dtype=dtype)
    real = torch.tensor([[False] * 4 + [True] * 9, [True] * 13])
    q[0, :, :4] = math.nan
    k[0, :, :4] = math.nan
    mask = Mask(keys=real)
    want, _ = columns(q, k, real, attn_mask=mask, is_causal=True)
    found = attention_received(q, k, mask, True, enable_gqa=True, queries=real)
    assert not found.isnan().any()
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    assert (found[0, :, :4] == 0).all()
    torch.testing.assert_close(found.sum(-1)[0], torch.full((6,), 9.0, dtype=dtype))


def test_a_row_that_is_no_number_spoils_the_keys_it_sees_only():
    for dtype in (torch.float32, torch.float64):
        q, k, _ = inputs(queries=13, dtype=dtype)
        q[1, 2, 5] = math.inf
        want, _ = columns(q, k, is_causal=True)
        found = attention_received(q, k, is_causal=True, enable_gqa=True)
        assert found[1, 2].isnan().tolist() == [True] * 6 + [False] * 7
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_memory_is_linear():
    """A mask or scores of 200,000² would be 40 GB and more."""
    q, k = torch.randn(2, 1, 1, 200_000, 4).unbind()
    ids = torch.arange(200_000) // 1000
    found = attention_received(q, k, Mask(segments=ids), is_causal=True, window=32)
    assert float(found.sum()) == pytest.approx(200_000, rel=1e-5)
    part, _ = columns(q[:, :, :1000], k[:, :, :1000], is_causal=True, window=32)
    torch.testing.assert_close(found[..., :1000].double(), part, rtol=1e-5, atol=1e-6)


def test_leading_axes_and_empty_ones():
    q, k, _ = inputs(queries=13, dtype=torch.float64)
    whole = attention_received(q, k, enable_gqa=True, is_causal=True)
    alone = attention_received(q[1, 3], k[1, 1], is_causal=True)
    torch.testing.assert_close(alone, whole[1, 3])
    many = attention_received(q[:, None], k[:, None], enable_gqa=True, is_causal=True)
    torch.testing.assert_close(many[:, 0], whole)
    assert attention_received(q[:, :, :0], k, enable_gqa=True).eq(0).all()
    assert attention_received(q, k[:, :, :0], enable_gqa=True).shape == (2, 6, 0)


def test_low_precision_is_as_good_as_its_scores():
    q, k, _ = inputs(queries=200, keys=200, d_k=32, dtype=torch.bfloat16)
    want, _ = columns(q, k, is_causal=True)
    found = attention_received(q, k, is_causal=True, enable_gqa=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
def test_autocast_rounds_the_inputs_only(kernel):
    q, k, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_received(q, k, enable_gqa=True, kernel=kernel)
    want = attention_received(q.bfloat16(), k.bfloat16(), enable_gqa=True, kernel=kernel)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_errors_and_examples():
    q, k, _ = inputs()
    with pytest.raises(ValueError, match=r"lse has shape \(2, 6, 5\): expected \(2, 6, 11\)"):
        attention_received(q, k, enable_gqa=True, lse=torch.zeros(2, 6, 5))
    with pytest.raises(ValueError, match=r"queries has shape \(3, 11\): expected \(2, 11\)"):
        attention_received(q, k, enable_gqa=True, queries=torch.ones(3, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match="kernel is 'fast'"):
        attention_received(q, k, enable_gqa=True, kernel="fast")
    assert scaledot.attention_received is attention_received
    assert doctest.testmod(received, extraglobs={"torch": torch}) == (0, 2)

"""The numbers of the four articles, where they concern attention, and what they have wrong."""

import math

import pytest
import torch

from scaledot.dispatch import attention
from scaledot.stages import trace


def row(*scores, scale=1.0):
    """The trace of one query whose scores are given, in float64."""
    keys = torch.tensor(scores, dtype=torch.float64)[:, None]
    return trace(torch.ones(1, 1, dtype=torch.float64), keys, keys, scale=scale)


def weights(*scores, scale=1.0):
    return row(*scores, scale=scale).weights[0].tolist()


def approx(*numbers):
    """To the digits printed."""
    return pytest.approx(list(numbers), abs=5.0e-7)


def test_softmax_of_10_8_6_is_sharp_and_not_saturated():
    raw = row(10.0, 8.0, 6.0)
    assert raw.weights[0].tolist() == approx(0.866813, 0.117310, 0.015876)
    slopes = [p * (1 - p) for p in raw.weights[0].tolist()]
    assert slopes == pytest.approx([0.1154, 0.1035, 0.0156], abs=5e-5)
    assert raw.rows.entropy.item() == pytest.approx(0.4411, abs=5e-5)
    assert raw.rows.jacobian_trace.item() == pytest.approx(sum(slopes), rel=1e-14)


def test_divided_by_8_it_is_flat():
    """The article prints 0.327 for the second, from rounded numbers."""
    scaled = row(10.0, 8.0, 6.0, scale=1 / 8)
    assert scaled.scaled[0].tolist() == [1.25, 1.0, 0.75]
    assert scaled.weights[0].tolist() == approx(0.419229, 0.326496, 0.254275)
    slopes = [p * (1 - p) for p in scaled.weights[0].tolist()]
    assert slopes == pytest.approx([0.2435, 0.2199, 0.1896], abs=5e-5)
    assert scaled.rows.entropy.item() == pytest.approx(1.0781, abs=5e-5)
    assert row(0.0, 0.0, 0.0).rows.entropy.item() == pytest.approx(1.0986, abs=5e-5)


def test_only_the_spread_of_a_row_counts():
    """(10, 1, 1, 1) and (100, 91, 91, 91) are the same distribution; ten times the first is not."""
    small, large = weights(10.0, 1.0, 1.0, 1.0), weights(100.0, 91.0, 91.0, 91.0)
    assert small == large
    assert small == pytest.approx([0.9996299076, *[0.0001233641] * 3], abs=5e-11)
    assert weights(1010.0, 1008.0, 1006.0) == weights(10.0, 8.0, 6.0)
    assert weights(100.0, 10.0, 10.0, 10.0)[1] == pytest.approx(8.19e-40, rel=1e-3)


@pytest.mark.parametrize(
    ("d_model", "heads", "d_k", "root"),
    [(4096, 32, 128, 11.3137), (768, 12, 64, 8.0), (4096, 64, 64, 8.0), (4096, 16, 256, 16.0),
     (1024, 1, 1024, 32.0), (768, 1, 768, 27.7128), (512, 1, 512, 22.6274)],
)  # fmt: skip
def test_the_scale_is_one_over_the_root_of_the_size_of_a_head(d_model, heads, d_k, root):
    x = torch.zeros(1, 3, d_model).unflatten(-1, (heads, -1)).transpose(1, 2)
    assert x.shape[-1] == d_k
    assert 1 / trace(x, x).scale == pytest.approx(root, abs=5e-5)


@pytest.mark.parametrize(
    ("d_k", "scaled", "printed"),
    [
        (1, [12, 9, 6, 3], [0.9502, 0.0473, 0.0024, 0.0001]),
        (64, [1.5, 1.125, 0.75, 0.375], [0.4025, 0.2767, 0.1901, 0.1307]),
        (256, [0.75, 0.5625, 0.375, 0.1875], [0.3240, None, None, None]),
        (1024, [0.375, 0.28125, 0.1875, 0.09375], [0.2862, None, None, None]),
    ],
)
def test_the_second_exercise(d_k, scaled, printed):
    """One set of scores, divided by the root of each d_k."""
    q, k = torch.zeros(1, d_k).double(), torch.zeros(4, d_k).double()
    q[0, 0], k[:, 0] = 1, torch.tensor([12.0, 9.0, 6.0, 3.0])
    t = trace(q, k)
    assert t.scaled[0].tolist() == scaled
    for weight, digits in zip(t.weights[0].tolist(), printed, strict=True):
        assert digits is None or weight == pytest.approx(digits, abs=5e-5)


def test_the_matrix_of_the_r_article():
    q = torch.tensor([[1.0, 0.2, 0.0], [0.0, 1.0, 0.3]]).double()
    k = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.9, 0.2], [-1.0, -1.0, 0.0]]).double()
    expected = torch.tensor([[0.92, 0.28, -1.2], [0.10, 0.96, -1.0]]).double()
    torch.testing.assert_close(trace(q, k).scores, expected, rtol=1e-7, atol=1e-7)
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert trace(q, k).scores.tolist() == [[1, 0, -1]]


RAW = (-20.8786096722578, 16.9441808129877, -28.9176963589432)


def test_the_r_article_unscaled_is_one_hot_but_for_what_it_does_not_print():
    """p(1−p) of the winner is 3.7e-17; as p·(1 − p) float64 gives 0."""
    t = row(*RAW)
    assert t.weights[0].tolist() == pytest.approx(
        [3.74775163305615e-17, 1.0, 1.20903762021298e-20], rel=1e-11
    )
    winner = t.weights[0, 1].item()
    assert winner * (1 - winner) == 0
    others = t.weights[0, 0].item() + t.weights[0, 2].item()
    assert others == pytest.approx(3.74896067e-17, rel=1e-8)
    assert t.rows.jacobian_trace.item() == pytest.approx(2 * others, rel=1e-14)
    assert t.rows.top_margin.item() == pytest.approx(-math.log(others), rel=1e-14)
    assert max(RAW) - min(RAW) == pytest.approx(45.8618771719309, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_does_not_cancel_either(dtype):
    keys = torch.tensor(RAW, dtype=dtype)[:, None]
    rows = attention(torch.ones(1, 1, dtype=dtype), keys, keys, scale=1.0, return_stats=True)[1]
    assert rows.jacobian_trace.item() == pytest.approx(2 * 3.74896067e-17, rel=1e-5)
    assert rows.collision.item() == 1


def test_the_r_article_scaled_still_learns():
    t = row(*RAW, scale=1 / 32)
    assert t.scaled[0].tolist() == pytest.approx(
        [-0.652456552258056, 0.529505650405866, -0.903678011216975], rel=1e-14
    )
    assert t.weights[0].tolist() == pytest.approx(
        [0.198467186145623, 0.647155095127531, 0.154377718726846], rel=1e-13
    )
    slopes = [p * (1 - p) for p in t.weights[0].tolist()]
    assert slopes == pytest.approx(
        [0.159077962169062, 0.228345377978007, 0.130545238687541], rel=1e-13
    )
    assert t.rows.jacobian_trace.item() == pytest.approx(sum(slopes), rel=1e-14)


@pytest.mark.parametrize(
    ("d_k", "variance"), [(16, 15.80), (64, 63.52), (256, 261.30), (1024, 1029.37)]
)
def test_the_third_exercise(d_k, variance):
    """The variance of ⟨q,k⟩ over 10,000 random pairs is d_k; torch.manual_seed(0), in turn."""
    torch.manual_seed(0)
    for size in (16, 64, 256, 1024):
        q, k = torch.randn(10000, size), torch.randn(10000, size)
        if size == d_k:
            break
    scores = trace(q[:, None], k[:, None]).scores.flatten()
    scaled = trace(q[:, None], k[:, None]).scaled.flatten()
    assert scores.var().item() == pytest.approx(variance, abs=0.005)
    assert scaled.var().item() == pytest.approx(variance / d_k, rel=1e-3)


def test_every_row_sums_to_one_save_those_that_see_nothing():
    q = k = torch.randn(5, 7).double()
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    sums = trace(q, k, attn_mask=mask).weights.sum(-1)
    assert sums.tolist() == pytest.approx([1, 1, 0, 1, 1])
    with_sink = trace(q, k, sinks=torch.zeros(1).double()).weights.sum(-1)
    assert (with_sink < 1).all()

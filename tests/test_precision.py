"""What storing scores in bfloat16 costs, against rounding them; what is left to a dtype's limit."""

import doctest
import math

import pytest
import torch

from scaledot import checks, precision
from scaledot import masks as masks_module
from scaledot.dispatch import attention, row_stats
from scaledot.heads import HeadStats, merge
from scaledot.masks import Mask, resolve
from scaledot.precision import headroom, storage
from scaledot.stages import trace


def rounded_cost(logits, visible=None, weights=None):
    """Total-variation distance of each row's softmax from that of its scores in bfloat16."""
    logits = logits.double()
    rounded = logits.to(torch.bfloat16).double()
    if visible is not None:
        logits, rounded = (x.masked_fill(~visible, -math.inf) for x in (logits, rounded))
    return (logits.softmax(-1) - rounded.softmax(-1)).abs().sum(-1) / 2


def cost_of(scores):
    """`storage` of given scores, (rows, keys): a query is a row of scores, a key one of the unit
    matrix."""
    q, k = scores.double()[None, None], torch.eye(scores.shape[1]).double()[None, None]
    problem = checks.problem(q, k, None, scale=1.0)
    return storage(problem, resolve(problem), row_stats(q, k, scale=1.0))["bf16_cost"][0, 0]


@pytest.mark.parametrize(("mean", "percent"), [(20, 1.6), (50, 3.1), (100, 6.2), (200, 12.0)])
def test_offset_of_scores_costs_what_was_published(mean, percent):
    scores = torch.randn(400, 1024, dtype=torch.float64) + mean
    assert 100 * float(rounded_cost(scores).mean()) == pytest.approx(percent, rel=0.05)
    assert 100 * float(cost_of(scores).mean()) == pytest.approx(percent, rel=0.05)


def test_zero_mean_scores_up_to_100_cost_one_percent():
    scores = torch.randn(400, 512, dtype=torch.float64)
    scores = 100 * scores / scores.abs().amax(1, keepdim=True)
    real, found = float(rounded_cost(scores).mean()), float(cost_of(scores).mean())
    assert real == pytest.approx(0.01, abs=0.005)
    assert real / 1.5 < found < real * 1.5


@pytest.mark.parametrize("keys", [2, 3, 8, 64, 1024])
@pytest.mark.parametrize(
    ("mean", "spread"),
    [(0, 0.1), (0, 1), (0, 3), (0, 8), (20, 1), (64, 1), (64, 4), (100, 5), (300, 3), (-150, 1)],
)
def test_cost_is_that_of_rounding_within_a_third(keys, mean, spread):
    scores = torch.randn(max(4000 // keys, 300) * 2, keys, dtype=torch.float64) * spread + mean
    scores = scores + torch.rand(len(scores), 1, dtype=torch.float64)  # off any lattice
    ratio = float(cost_of(scores).mean()) / float(rounded_cost(scores).mean())
    assert 1 / 1.1 < ratio < 1.3


def test_both_limits_are_exact():
    """Two keys: (1 − Σp²)u/6. Many equal keys: u/8. By integrals over uniform rounding errors."""
    u = 2.0**-5  # the spacing between 4 and 8, where all scores are
    x = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000 - 0.5
    for gap in (0.0, 0.3, 0.9):
        scores = torch.tensor([[6.0, 6.0 - gap]], dtype=torch.float64)
        collision = float(scores.softmax(-1).square().sum())
        found = float(cost_of(scores))
        assert found == pytest.approx((1 - collision) * u / 6, rel=1e-9)
        moved = (gap + (x[:, None] - x[None]) * u).sigmoid() - scores.softmax(-1)[0, 0]
        assert found == pytest.approx(float(moved.abs().mean()), rel=1e-3)
    many = float(cost_of(torch.full((1, 4096), 5.0)))
    assert many == pytest.approx(u / 8, rel=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_centring_keys_takes_the_common_part_away(causal):
    q, k = torch.randn(2, 2, 6, 200, 16, dtype=torch.float64).unbind()
    k = k[:, :3]
    k = k + 12 * torch.randn(1, 3, 1, 16, dtype=torch.float64)
    real = torch.arange(200) < torch.tensor([[200], [150]])
    mask = Mask(keys=real)
    problem = checks.problem(q, k, None, enable_gqa=True)
    seen = resolve(problem, mask, causal)
    rows = row_stats(q, k, mask, causal, enable_gqa=True)
    found = storage(problem, seen, rows)
    t = trace(q, k, None, mask, is_causal=causal, enable_gqa=True)
    weight = real[:, None, :, None].double()
    middle = (k * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
    centred = trace(q, k - middle, None, mask, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(centred.weights, t.weights, rtol=1e-9, atol=1e-12)
    for name, x in (("bf16_cost", t), ("bf16_cost_centred", centred)):
        want = rounded_cost(x.scaled, x.visible)
        there = rows.visible > 20
        assert float(found[name][there].mean()) == pytest.approx(
            float(want[there].mean()), rel=0.25
        )
    assert (found["bf16_cost"] / found["bf16_cost_centred"])[rows.visible > 20].mean() > 4
    # Exactly what `storage` says of keys that are centred already.
    problem = checks.problem(q, k - middle, None, enable_gqa=True)
    again = storage(problem, seen, row_stats(q, k - middle, mask, causal, enable_gqa=True))
    torch.testing.assert_close(again["bf16_cost"], found["bf16_cost_centred"], rtol=1e-6, atol=1e-9)


def test_sinks_bias_and_soft_cap():
    q, k = (20 * torch.randn(2, 1, 4, 60, 16, dtype=torch.float64)).unbind()
    q = q / 20 + 1
    sinks = torch.tensor([-2.0, 0.0, 30.0, 1e3], dtype=torch.float64)
    problem = checks.problem(q, k, None, sinks=sinks)
    seen = resolve(problem)
    with_sink = storage(problem, seen, row_stats(q, k, sinks=sinks))
    plain = storage(checks.problem(q, k, None), seen, row_stats(q, k))
    for name in plain:
        for h in range(3):
            torch.testing.assert_close(
                with_sink[name][:, h], plain[name][:, h], rtol=1e-3, atol=1e-9
            )
        assert with_sink[name][:, 3].isnan().all()  # the sink has all: nothing is left to round
    absent = torch.full((4,), -math.inf, dtype=torch.float64)
    problem = checks.problem(q, k, None, sinks=absent)
    without = storage(problem, seen, row_stats(q, k, sinks=absent))
    for name, x in plain.items():
        torch.testing.assert_close(without[name], x, rtol=1e-12, atol=0)
    capped = checks.problem(q, k, None, softcap=20.0)
    found = storage(capped, seen, row_stats(q, k, softcap=20.0))
    assert found["bf16_cost_centred"].isnan().all()
    t = trace(q, k, None, softcap=20.0)
    want = rounded_cost(t.capped)
    assert float(found["bf16_cost"].mean()) == pytest.approx(float(want.mean()), rel=0.5)
    bias = -3.0 * torch.arange(60, dtype=torch.float64)[None, :].expand(60, 60)
    problem = checks.problem(q, k, None)
    seen = resolve(problem, bias)
    found = storage(problem, seen, row_stats(q, k, bias))
    want = rounded_cost(trace(q, k, None, bias).masked)
    assert float(found["bf16_cost"].mean()) == pytest.approx(float(want.mean()), rel=0.5)


def test_rows_without_a_cost():
    q, k = torch.randn(2, 1, 2, 9, 8).unbind()
    q[0, 0, 4] = math.nan
    k[0, 1, 8] = math.inf
    problem = checks.problem(q, k, None)
    seen = resolve(problem, None, True)
    found = storage(problem, seen, row_stats(q, k, is_causal=True))
    for x in found.values():
        assert (x[0, :, 0] == 0).all()  # one key
        assert x.isnan().nonzero().tolist() == [[0, 0, 4], [0, 1, 8]]
    empty = checks.problem(q, k[:, :, :0], None)
    found = storage(empty, resolve(empty), row_stats(q, k[:, :, :0]))
    assert all(x.isnan().all() for x in found.values())
    large = torch.tensor([[1e30, 1e30, 0.0]], dtype=torch.float64)
    assert float(cost_of(large)) == 1.0  # a distance is no more, whatever the first order says


def stats_of(scores, scale=1.0):
    q, k = scores.double()[None, None], torch.eye(scores.shape[1]).double()[None, None]
    rows = row_stats(q, k, scale=scale)
    return HeadStats.of(
        rows, scale=scale, d_k=scores.shape[1], kv_heads=1,
        extra={"query_norm": q.norm(dim=-1)}, key_norm=k.norm(dim=-1),
    )  # fmt: skip


def test_headroom_is_the_limit_less_the_margin():
    scores = torch.zeros(101, 50)
    scores[:, 3] = torch.linspace(0, 10, 101)
    found = headroom(stats_of(scores), 0)
    margin = torch.linspace(0, 10, 101).double() - math.log(49)
    limits = {"bfloat16": 9, "float16": 12, "float32": 25}
    for name, bits in limits.items():
        at = (float(margin[50]), float(margin[99]))
        for actual, m, half in zip(found.nats[name], at, found.error, strict=True):
            assert abs(actual - (bits * math.log(2) - m)) <= half + 1e-9
            assert half < 0.05
    assert found.largest == pytest.approx(10.0)
    assert found.bound == pytest.approx(10.0)
    assert not found.overflows
    assert not found.may_overflow


def test_raw_scores_past_float16_are_seen():
    scores = torch.tensor([[7e4, 0.0], [1.0, 2.0]])
    found = headroom(stats_of(scores, scale=0.125), 0)
    assert found.largest == pytest.approx(7e4)
    assert found.overflows
    negative = headroom(stats_of(-scores), 0)
    assert not negative.overflows
    assert negative.may_overflow
    both = headroom(merge(stats_of(scores), stats_of(scores, scale=0.5)), 0)
    assert math.isnan(both.largest)
    assert both.may_overflow
    none = headroom(stats_of(scores[:0]), 0)
    assert math.isnan(none.largest)
    assert all(map(math.isnan, (none.bound, *none.error, *none.nats["float16"])))
    with pytest.raises(IndexError, match="head 1 of 1 does not exist"):
        headroom(stats_of(scores), 1)


def test_examples():
    names = {"torch": torch, "checks": checks, "masks": masks_module, "row_stats": row_stats,
             "attention": attention}  # fmt: skip
    assert doctest.testmod(precision, extraglobs=names) == (0, 3)


def test_a_sink_that_takes_nearly_all_costs_no_digits_in_float32():
    """What is left for the keys cancels as the sink takes all: NaN before it is wrong."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64, 16)
    plain = storage(checks.problem(q, k, None), *resolved(q, k))["bf16_cost"].mean()
    for logit in (4.0, 8.0, 12.0, 16.0, 18.0):
        sinks = torch.tensor([logit])
        problem = checks.problem(q, k, None, sinks=sinks)
        found = storage(problem, resolve(problem), row_stats(q, k, sinks=sinks))["bf16_cost"]
        known = ~found.isnan()
        assert (found[known] < 10 * plain).all()
        if logit <= 8:
            assert known.all()
            torch.testing.assert_close(found.mean(), plain, rtol=0.02, atol=0)


def resolved(q, k):
    problem = checks.problem(q, k, None)
    return resolve(problem), row_stats(q, k)


def test_scores_that_are_0_cost_nothing():
    q, k = torch.zeros(1, 1, 4, 8), torch.randn(1, 1, 9, 8)
    problem = checks.problem(q, k, None)
    assert (storage(problem, *resolved(q, k))["bf16_cost"] == 0).all()

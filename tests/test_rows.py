"""Row states merge like one pass over the row, in whatever order."""

import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import LOWEST
from scaledot.rows import MARGIN_LIMIT, RowState, RowStats, finish, merge

ROWS = 3


def state_of(logits, scaled, hidden, first, last):
    at = slice(first, last)
    return RowState.of(scaled[:, at], logits[:, at], hidden[:, at], None, first)[0]


def identity(logits):
    return RowState.identity((ROWS,), logits)


def both(a, b):
    return merge(a, b)[0]


def assert_same(a, b):
    """Equal states: integers and extremes exactly, sums to rounding."""
    for f in fields(RowState):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name in ("top", "key", "count", "peak"):
            assert torch.equal(x, y), f.name
        else:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-300, msg=f.name)


@st.composite
def split_rows(draw):
    """Parameters of rows of logits, and where to cut them."""
    keys = draw(st.integers(1, 23))
    cuts = draw(st.sets(st.integers(1, max(keys - 1, 1)), max_size=6))
    return {
        "seed": draw(st.integers(0, 1 << 30)),
        "keys": keys,
        "edges": sorted({0, *(c for c in cuts if c < keys), keys}),
        "stretch": draw(st.sampled_from([0.0, 1.0, 30.0, 900.0])),
        "hide": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "order": draw(st.randoms(use_true_random=False)),
    }


def build(case):
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (ROWS, case["keys"])
    scaled = torch.randn(shape, generator=generator, dtype=torch.float64) * case["stretch"]
    hidden = torch.rand(shape, generator=generator) < case["hide"]
    logits = (scaled + torch.randn(shape, generator=generator).round()).masked_fill(
        hidden, -math.inf
    )
    edges = case["edges"]
    blocks = [state_of(logits, scaled, hidden, *edge) for edge in pairwise(edges)]
    return state_of(logits, scaled, hidden, 0, case["keys"]), blocks, logits


@given(split_rows())
def test_any_merge_order_is_one_pass(case):
    whole, blocks, logits = build(case)
    blocks.append(identity(logits))
    while len(blocks) > 1:
        case["order"].shuffle(blocks)
        blocks.append(both(blocks.pop(), blocks.pop()))
    assert_same(blocks[0], whole)


@given(split_rows())
def test_merge_is_associative_and_commutative_with_identity(case):
    _, blocks, logits = build(case)
    a, b, c = (blocks * 3)[:3] if len(blocks) < 3 else blocks[:3]
    assert_same(both(both(a, b), c), both(a, both(b, c)))
    assert_same(both(both(c, a), b), both(both(a, b), c))
    none = identity(logits)
    for state in (a, none):
        assert_same(both(state, none), state)
        assert_same(both(none, state), state)


def test_a_tie_goes_to_the_lower_index():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0]], dtype=torch.float64)
    shown = torch.zeros_like(logits, dtype=torch.bool)
    low, high = (state_of(logits, logits, shown, *at) for at in ((0, 2), (2, 5)))
    for state in (both(low, high), both(high, low)):
        assert state.key.tolist() == [1]
        assert state.rest.item() == pytest.approx(2 + math.exp(-4) + math.exp(-5), rel=1e-15)


def test_finished_rows_are_the_formulas():
    """p = (1/2, 1/4, 1/4), and the same with a sink that takes half."""
    ln2 = math.log(2)
    logits = torch.tensor([[ln2, 0.0, 0.0]], dtype=torch.float64)
    state, e = RowState.of(logits, logits, None, None, 0)
    assert e.tolist() == [[1.0, 0.5, 0.5]]
    rows, top, log_mass = finish(state, None, "named")
    assert rows.kernel == "named"
    assert rows.entropy.item() == pytest.approx(1.5 * ln2)
    assert (logits - top[:, None] - log_mass[:, None]).exp().tolist() == [[0.5, 0.25, 0.25]]
    sunk, top, log_mass = finish(state, torch.tensor([2 * ln2]).double(), "named")
    assert sunk.sink_mass.item() == pytest.approx(0.5)
    assert sunk.entropy.item() == pytest.approx(1.75 * ln2)
    assert (logits - top[:, None] - log_mass[:, None]).exp()[0].tolist() == pytest.approx(
        [0.25, 0.125, 0.125]
    )


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("sink", [None, -1.0, 0.0, 200.0])
def test_the_mass_of_a_row_is_never_rounded_at_the_size_of_its_logits(size, sink):
    logits = torch.tensor([[size, size - 0.3, size - 1.7]], dtype=torch.float32)
    state, _ = RowState.of(logits, logits, None, None, 0)
    sinks = None if sink is None else torch.tensor([size + sink])
    rows, top, log_mass = finish(state, sinks, "")
    outcomes = (
        logits.double() if sink is None else torch.tensor([[*logits[0], size + sink]]).double()
    )
    exact = outcomes.softmax(-1)
    p = (logits - top[:, None] - log_mass[:, None]).exp()
    torch.testing.assert_close(p.double(), exact[:, :3], rtol=3e-6, atol=1e-38)
    if sink is not None:
        assert rows.sink_mass.item() == pytest.approx(exact[0, 3].item(), rel=3e-6)
        others = 1 / exact[0, 0].item() - 1 if sink < 100 else math.exp(200)
        assert rows.top_margin.item() == pytest.approx(-math.log(others), rel=1e-5, abs=1e-6)


def test_a_row_of_one_key_has_the_largest_margin_and_no_spread():
    logits = torch.tensor([[3.0]])
    rows, _, _ = finish(RowState.of(logits, logits, None, None, 7)[0], None, "")
    assert rows.top_margin.item() == MARGIN_LIMIT
    assert (rows.entropy.item(), rows.collision.item(), rows.jacobian_trace.item()) == (0, 1, 0)
    assert (rows.top_key.item(), rows.mean_key.item(), rows.score_var.item()) == (7, 7, 0)


def test_margins_are_clamped_where_float32_ends():
    logits = torch.tensor([[0.0, -86.0], [0.0, -88.0], [0.0, -1000.0]])
    rows, _, _ = finish(RowState.of(logits, logits, None, None, 0)[0], None, "")
    assert rows.top_margin.tolist() == pytest.approx([86, 87, 87], rel=1e-6)


def test_a_block_that_finfo_min_hides_adds_nothing():
    """Its shift times its mass would overflow to 0·∞."""
    logits = torch.full((ROWS, 600), LOWEST)
    uncounted = torch.ones(ROWS, 600, dtype=torch.bool)
    floored, _ = RowState.of(torch.zeros_like(logits), logits, None, uncounted, 0)
    seen = torch.randn(ROWS, 5)
    plain, _ = RowState.of(seen, seen, None, None, 600)
    for state in (both(floored, plain), both(plain, floored)):
        rows, want = finish(state, None, "")[0], finish(plain, None, "")[0]
        for f in fields(RowStats):
            if f.name not in ("sink_mass", "kernel"):
                assert torch.equal(getattr(rows, f.name), getattr(want, f.name)), f.name


def test_map_changes_every_tensor_and_nothing_else():
    logits = torch.randn(ROWS, 5)
    rows, _, _ = finish(RowState.of(logits, logits, None, None, 0)[0], None, "tiled")
    doubled = rows.map(lambda x: torch.cat([x, x]))
    for f in fields(RowStats):
        x = getattr(doubled, f.name)
        assert x is None or x == "tiled" or x.shape == (2 * ROWS,)

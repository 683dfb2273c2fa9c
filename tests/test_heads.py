"""Head statistics: what enters, what merges, what is kept on disk."""

import math
import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import inputs
from scaledot.dispatch import attention
from scaledot.heads import (
    COUNTS,
    EDGES,
    SATURATED,
    TWO_KEYS,
    HeadStats,
    Measure,
    Pairs,
    load,
    merge,
    save,
)
from scaledot.masks import Mask
from scaledot.stages import trace
from test_files import one_line

ABOUT = {"scale": 0.25, "d_k": 7, "kv_heads": 3}


def rows_of(q, k, attn_mask=None, **arguments):
    return attention(
        q, k, k, attn_mask, scale=0.25, enable_gqa=True, return_stats=True, **arguments
    )[1]


def stats_of(q, k, attn_mask=None, real=None, **arguments):
    rows = rows_of(q, k, attn_mask, **arguments)
    norms = {"query_norm": q.norm(dim=-1)}
    return HeadStats.of(rows, real=real, extra=norms, key_norm=k.norm(dim=-1), **ABOUT)


def assert_same(a, b, tolerance=1e-12):
    """Integers and extremes exactly, moments within tolerance (0: every bit)."""

    def close(x, y):
        if tolerance == 0:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)

    assert (a.kv_heads, a.d_k, a.scale) == (b.kv_heads, b.d_k, b.scale)
    assert all(torch.equal(a.counts[name], b.counts[name]) for name in COUNTS)
    for one, other in ((a.scaled, b.scaled), (a.raw, b.raw)):
        assert torch.equal(one.count, other.count)
        for name in ("mean", "within", "between"):
            close(getattr(one, name), getattr(other, name))
    assert set(a.measures) == set(b.measures)
    for name, one in a.measures.items():
        other = b.measures[name]
        for exact in ("count", "minimum", "maximum", "histogram"):
            assert torch.equal(getattr(one, exact), getattr(other, exact)), (name, exact)
        close(one.mean, other.mean)
        close(one.m2, other.m2)


def test_rows_that_say_nothing_are_counted_and_enter_nothing():
    """An empty row, a row of one key, a row that is no number and padding, in each head."""
    q, k, _ = inputs(batch=1, queries=7)
    k[..., 12, :] = math.nan
    mask = torch.ones(7, 13, dtype=torch.bool)
    mask[:, 12] = False
    mask[0] = False
    mask[1, 1:] = False
    mask[2, 12] = True
    real = torch.arange(7)[None] < 6
    rows = rows_of(q, k, mask)
    stats = HeadStats.of(rows, real=real, **ABOUT)
    expected = {"rows": 6, "empty": 1, "nonfinite": 1, "padding": 1, "single": 1}
    assert {name: x.tolist() for name, x in stats.counts.items()} == {
        name: [n] * 6 for name, n in expected.items()
    }
    for name, measure in stats.measures.items():
        kept = slice(3, 6) if name in TWO_KEYS else [1, 3, 4, 5]
        assert (measure.count == (3 if name in TWO_KEYS else 4)).all(), name
        if name != "normalised_entropy":
            values = getattr(rows, name)[0, :, kept].double()
            torch.testing.assert_close(measure.average, values.mean(1), rtol=1e-13, atol=0)
            torch.testing.assert_close(
                measure.var, values.var(1, correction=0), rtol=1e-10, atol=1e-14
            )
            assert torch.equal(measure.minimum, values.amin(1))
            assert torch.equal(measure.maximum, values.amax(1))
    assert (stats.scaled.count == 1 + 3 * 12).all()


def test_pairs_are_all_visible_scores():
    """Their mean and variance over pairs, within rows and between them, causal and masked."""
    q, k, _ = inputs(dtype=torch.float64)
    stats = stats_of(q, k, is_causal="bottom_right", attn_mask=Mask(lengths=[9, 13]))
    t = trace(q, k, attn_mask=Mask(lengths=[9, 13]), is_causal="bottom_right", scale=0.25,
              enable_gqa=True)  # fmt: skip
    for head in range(6):
        visible = t.visible[:, head]
        for pairs, stage in ((stats.scaled, t.scaled), (stats.raw, t.scores)):
            scores = stage[:, head][visible]
            n = visible.sum(-1)
            row_mean = (stage[:, head] * visible).sum(-1) / n
            within = ((stage[:, head] - row_mean[..., None]).square() * visible).sum() / n.sum()
            assert pairs.count[head] == len(scores)
            assert pairs.mean[head].item() == pytest.approx(scores.mean().item(), rel=1e-12)
            assert pairs.var[head].item() == pytest.approx(
                scores.var(correction=0).item(), rel=1e-12
            )
            assert pairs.var_within[head].item() == pytest.approx(within.item(), rel=1e-12)
            assert pairs.row_shift[head].item() == pytest.approx(
                ((row_mean - scores.mean()).square() * n).sum().item() / len(scores), rel=1e-12
            )


def test_one_padded_batch_is_its_texts_alone():
    q, k, _ = inputs(queries=13)
    real = torch.tensor([[False] * 4 + [True] * 9, [True] * 11 + [False] * 2])
    padded = stats_of(q, k.masked_fill(~real[:, None, :, None], math.nan), Mask(keys=real), real)
    alone = [stats_of(q[b : b + 1, :, keep], k[b : b + 1, :, keep]) for b, keep in enumerate(real)]
    assert (padded.counts["padding"] == 6).all()
    both = merge(*alone)
    assert all(torch.equal(padded.counts[n], both.counts[n]) for n in COUNTS if n != "padding")
    assert torch.equal(padded.scaled.count, both.scaled.count)
    torch.testing.assert_close(padded.scaled.var, both.scaled.var, rtol=1e-5, atol=0)
    for name, one in padded.measures.items():
        other = both.measures[name]
        assert torch.equal(one.count, other.count), name
        for part in ("mean", "m2", "minimum", "maximum"):
            torch.testing.assert_close(
                getattr(one, part), getattr(other, part), rtol=1e-5, atol=1e-6, msg=name
            )


def test_normalised_entropy_is_of_every_outcome():
    """1 for equal weights, whether or not a sink is one of the outcomes."""
    q, k = torch.zeros(1, 3, 5, 7), torch.zeros(1, 3, 13, 7)
    for sinks in (None, torch.zeros(3)):
        measure = stats_of(q, k, is_causal="bottom_right", sinks=sinks).measures[
            "normalised_entropy"
        ]
        torch.testing.assert_close(measure.average, torch.ones(3).double(), rtol=1e-6, atol=0)


def test_histograms_count_each_value_between_its_edges():
    values = torch.tensor([[-1.0, 0.0, 1 / 128, 0.5, 1.0, 7.0, math.nan]])
    histogram = Measure.of("collision", values).histogram[0]
    assert len(histogram) == len(EDGES["collision"]) + 1
    assert histogram.nonzero()[:, 0].tolist() == [0, 1, 2, 65, 129]
    assert histogram[[0, 1, 2, 65, 129]].tolist() == [1, 1, 1, 1, 2]
    assert Measure.of("no such measure", values).histogram.shape == (1, 0)


def test_nothing_measured_is_nan_and_not_zero():
    nothing = Measure.of("entropy", torch.full((2, 3), math.nan))
    none = Measure.of("entropy", torch.zeros(2, 0))
    for measure in (nothing, none):
        assert measure.average.isnan().all()
        assert measure.var.isnan().all()
        assert measure.count.tolist() == [0, 0]
        assert measure.minimum.tolist() == [math.inf] * 2
    pairs = Pairs.of(torch.zeros(2, 3, dtype=torch.int64), *torch.full((2, 2, 3), math.nan))
    assert pairs.var.isnan().all()
    assert pairs.count.tolist() == [0, 0]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_any_merge_order_is_one_pass(seed, sizes, order):
    torch.manual_seed(seed)
    q, k, _ = inputs(batch=sum(sizes), queries=5)
    rows = rows_of(q, k, Mask(lengths=torch.randint(0, 5, (sum(sizes),))))
    real, norm = torch.rand(sum(sizes), 5) < 0.8, k.norm(dim=-1)

    def stats(cut):
        return HeadStats.of(rows.map(lambda x: x[cut]), real=real[cut], key_norm=norm[cut], **ABOUT)

    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    pieces = [stats(slice(*cut)) for cut in pairwise(ends)]
    pieces.append(HeadStats.identity(6, 3, 7))
    while len(pieces) > 1:
        order.shuffle(pieces)
        pieces.append(merge(pieces.pop(), pieces.pop()))
    assert_same(pieces[0], stats(slice(None)))


def test_merge_is_associative_and_commutative_with_identity():
    a, b, c = (stats_of(*inputs()[:2], is_causal="bottom_right") for _ in range(3))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    none = HeadStats.identity(6, 3, 7)
    assert_same(merge(a, none), a, tolerance=0)
    assert_same(merge(none, a), a, tolerance=0)
    assert_same(merge(none, none), none, tolerance=0)


def test_a_merge_keeps_both_scales_and_either_ones_measures():
    q, k, _ = inputs()
    rows = rows_of(q, k)
    a = HeadStats.of(rows, scale=0.5, d_k=7, kv_heads=3)
    b = HeadStats.of(rows, scale=0.25, d_k=7, kv_heads=3, extra={"first": rows.collision})
    both = merge(a, b)
    assert both.scale == (0.25, 0.5)
    assert torch.equal(both.measures["first"].count, b.measures["first"].count)
    assert torch.equal(both.measures["entropy"].count, 2 * b.measures["entropy"].count)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ((5, 3, 7), "cannot merge: heads is 6 in one, 5 in the other"),
        ((6, 2, 7), "cannot merge: kv_heads is 3 in one, 2 in the other"),
        ((6, 3, 11), "cannot merge: d_k is 7 in one, 11 in the other"),
    ],
)
def test_different_heads_do_not_merge(other, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        merge(HeadStats.identity(6, 3, 7), HeadStats.identity(*other))


def test_keys_are_measured_per_kv_head_and_bound_every_score():
    q, k, _ = inputs()
    stats = stats_of(q, k)
    assert stats.measures["key_norm"].count.tolist() == [26] * 3
    assert stats.measures["query_norm"].count.tolist() == [22] * 6
    largest = trace(q, k, enable_gqa=True).scores.abs().amax((0, 2, 3))
    assert (stats.score_bound >= largest * (1 - 1e-6)).all()
    assert (stats.score_bound <= largest * 10).all()


@pytest.mark.parametrize("name", ["entropy", "score_var", "top_margin", "lse", "jacobian_trace"])
@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.7, 0.99, 1.0])
def test_the_true_quantile_lies_within_the_stated_half_width(name, q):
    scores = torch.randn(3, 1010, dtype=torch.float64) * torch.tensor([[0.3], [4.0], [1e6]])
    values = scores.abs() if name != "lse" else scores
    stats = HeadStats.identity(3, 3, 7)
    stats.measures[name] = Measure.of(name, values)
    middle, half = stats.quantile(name, q)
    # The smallest value that at least q of the rows do not exceed.
    rank = max(math.ceil(round(q * 1010, 9)), 1)
    true = values.sort(1).values[:, rank - 1].contiguous()
    assert ((true - middle).abs() <= half * (1 + 1e-9) + 1e-12).all()
    edges = EDGES[name]
    width = edges.diff()[(torch.bucketize(true, edges, right=True) - 1).clamp(0, len(edges) - 2)]
    inside = (true >= edges[0]) & (true < edges[-1])
    assert (half <= width / 2 * (1 + 1e-9))[inside].all()


def test_a_quantile_at_a_whole_number_of_rows_is_that_rows():
    """0.07 · 100 is 7.000000000000001 in floating point, and the seventh row is meant."""
    values = torch.arange(100, dtype=torch.float64)[None] / 16 + 1 / 32
    stats = HeadStats.identity(1, 1, 7)
    stats.measures["entropy"] = Measure.of("entropy", values)
    middle, half = stats.quantile("entropy", 0.07)
    assert abs(values[0, 6] - middle) <= half


def test_quantiles_of_more_rows_than_float32_can_count():
    count = (1 << 24) + 1
    histogram = torch.zeros(1, len(EDGES["entropy"]) + 1, dtype=torch.int64)
    histogram[0, 1], histogram[0, 17] = count - 1, 1
    stats = HeadStats.identity(1, 1, 7)
    zero, most = torch.zeros(1).double(), torch.full((1,), 1.01).double()
    stats.measures["entropy"] = Measure(torch.tensor([count]), zero, zero, zero, most, histogram)
    middle, half = stats.quantile("entropy", 1.0)
    assert middle - half == 1.0
    share = stats.share_at_least("entropy", 1.0)
    assert share.item() == 1 / count


def test_shares_are_exact_at_edges_and_refused_between():
    stats = stats_of(*inputs()[:2])
    values = rows_of(*inputs()[:2])
    stats.measures["collision"] = Measure.of("collision", values.collision[0].double())
    for edge in (0.0, 1 / 128, 0.25, 0.5, 1.0):
        share = (values.collision[0] >= edge).double().mean(1)
        assert torch.equal(stats.share_at_least("collision", edge), share)
    with pytest.raises(ValueError, match=r"^0\.3 is not an edge of collision: only there is a sh"):
        stats.share_at_least("collision", 0.3)
    tiny = 2.0**-60
    assert (stats.share_at_least("jacobian_trace", tiny) == 1).all()
    assert (stats.share_at_least("jacobian_trace", tiny * 2**0.25) == 1).all()
    stats.measures["entropy"] = Measure.of("entropy", torch.full((6, 2), math.nan))
    assert stats.share_at_least("entropy", 1.0).isnan().all()


def test_saturation_is_at_edges_where_a_dtype_rounds_to_one():
    """Half a unit in the last place below 1, for each dtype, and an edge of the histogram."""
    for name, margin in SATURATED.items():
        eps = torch.finfo(getattr(torch, name)).eps
        assert margin == pytest.approx(-math.log(eps / 4), rel=1e-15)
        below = torch.tensor([[margin * (1 - 1e-12), margin * (1 + 1e-12)]])
        stats = HeadStats.identity(1, 1, 7)
        stats.measures["top_margin"] = Measure.of("top_margin", below.double())
        assert stats.share_at_least("top_margin", margin).item() in (0.5, 1.0)
    spread = torch.tensor([[1.0, 7.0, 9.0, 18.0]])
    stats.measures["top_margin"] = Measure.of("top_margin", spread)
    shares = [stats.share_at_least("top_margin", x).item() for x in SATURATED.values()]
    assert shares == [0.75, 0.5, 0.25]


# On disk


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    path = tmp_path / "heads.safetensors"
    modules = {
        "model.layers.0.attn": stats_of(*inputs()[:2]),
        "albert.attention[1]": merge(stats_of(*inputs()[:2]), stats_of(*inputs()[:2])),
        "": HeadStats.identity(6, 3, 7),
    }
    save(path, modules)
    loaded = load(path)
    assert list(loaded) == list(modules)
    for name, stats in modules.items():
        assert_same(loaded[name], stats, tolerance=0)
    assert_same(
        merge(loaded["albert.attention[1]"], modules[""]), modules["albert.attention[1]"], 0
    )
    save(path, {})
    assert load(path) == {}
    assert os.listdir(tmp_path) == ["heads.safetensors"]


def test_what_is_no_such_file_is_one_line(tmp_path):
    from safetensors.torch import save_file

    whole, path = tmp_path / "whole", tmp_path / "other"
    save(whole, {"m": stats_of(*inputs()[:2])})
    assert one_line(load, path) == f"no file {path}"
    data = whole.read_bytes()
    for cut in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        assert one_line(load, path).startswith(f"cannot read {path}: ")
    path.write_text("not a tensor in sight")
    assert one_line(load, path).startswith(f"cannot read {path}: ")
    assert one_line(load, tmp_path).startswith(f"cannot read {tmp_path}: ")
    foreign = f"{path} holds no head statistics of this version"
    save_file({"weight": torch.zeros(3)}, path)
    assert one_line(load, path) == foreign
    save_file({"weight": torch.zeros(3)}, path, {"format": "scaledot/heads 99", "modules": "{}"})
    assert one_line(load, path) == foreign
    damaged = f"{path} is damaged: some of its head statistics are missing"
    for modules in (
        '{"m": {"kv_heads": 3, "d_k": 7, "scale": ["1", "1"]}}',
        '{"m": {}}',
        "[",
        "[]",
    ):
        save_file({"x": torch.zeros(3)}, path, {"format": "scaledot/heads 1", "modules": modules})
        assert one_line(load, path) == damaged
    save_file({"x": torch.zeros(3)}, path, {"format": "scaledot/heads 1"})
    assert one_line(load, path) == damaged

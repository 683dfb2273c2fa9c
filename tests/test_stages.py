"""The definition, held against numbers worked out by hand."""

import math

import pytest
import torch

from oracle import inputs
from scaledot.masks import Mask
from scaledot.stages import trace

LN2, LN3 = math.log(2), math.log(3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# ⟨q,k⟩ is (ln 2, 0, 0) and (0, ln 3, 0): weights are halves, quarters and fifths.
Q = tensor([1, 0], [0, 1])
K = tensor([LN2, 0], [0, LN3], [0, 0])
V = tensor([1, 0, 0, 2], [0, 1, 0, 2], [0, 0, 1, 2])


def assert_equal(actual, *rows):
    torch.testing.assert_close(actual, tensor(*rows), rtol=1e-14, atol=1e-15)


def test_every_stage_by_hand():
    t = trace(Q, K, V, scale=0.5)
    assert_equal(t.scores, [LN2, 0, 0], [0, LN3, 0])
    assert_equal(t.scaled, [LN2 / 2, 0, 0], [0, LN3 / 2, 0])
    assert torch.equal(t.masked, t.scaled)
    root2, root3 = math.sqrt(2), math.sqrt(3)
    top, middle = 2 + root2, 2 + root3
    assert_equal(
        t.weights, [root2 / top, 1 / top, 1 / top], [1 / middle, root3 / middle, 1 / middle]
    )
    assert_equal(
        t.output, [root2 / top, 1 / top, 1 / top, 2], [1 / middle, root3 / middle, 1 / middle, 2]
    )
    assert (t.capped, t.dropped, t.tokens, t.sinks) == (None, None, None, None)
    assert t.scale == 0.5
    assert trace(Q, K).scale == 1 / math.sqrt(2)


def test_every_statistic_by_hand():
    """Of a row of weights 1/2, 1/4, 1/4."""
    rows = trace(Q[:1], K, scale=1.0).rows
    expected = {
        "score_mean": LN2 / 3,
        "score_var": 2 / 9 * LN2**2,
        "max_score": LN2,
        "lse": 2 * LN2,
        "entropy": 1.5 * LN2,
        "top_margin": 0.0,
        "collision": 3 / 8,
        "jacobian_trace": 5 / 8,
        "mean_key": 0.75,
    }
    for name, value in expected.items():
        assert getattr(rows, name).item() == pytest.approx(value, rel=1e-14, abs=1e-15), name
    assert (rows.visible.item(), rows.top_key.item(), rows.nonfinite.item()) == (3, 0, False)
    assert rows.sink_mass is None
    assert rows.kernel == "trace"


def test_a_sink_is_one_more_outcome_with_no_value():
    """Logit ln 4 beside (ln 2, 0, 0): eighths."""
    t = trace(Q[:1][None], K[None], V[None], scale=1.0, sinks=tensor(2 * LN2))
    assert_equal(t.weights[0], [2 / 8, 1 / 8, 1 / 8])
    assert_equal(t.output[0], [2 / 8, 1 / 8, 1 / 8, 1])
    rows = t.rows
    assert rows.sink_mass.item() == pytest.approx(0.5)
    assert rows.lse.item() == pytest.approx(3 * LN2)
    assert rows.entropy.item() == pytest.approx(1.75 * LN2)
    assert rows.collision.item() == pytest.approx(22 / 64)
    assert rows.jacobian_trace.item() == pytest.approx(42 / 64)
    assert rows.top_margin.item() == pytest.approx(-LN3)
    assert rows.top_key.item() == 0
    assert rows.mean_key.item() == pytest.approx(0.75)
    # The entropy over keys alone follows: (H − h(p_s)) / (1 − p_s).
    assert (rows.entropy.item() - LN2) / 0.5 == pytest.approx(1.5 * LN2)
    flat = trace(Q[:1], K, V, scale=1.0, sinks=tensor(2 * LN2))
    assert torch.equal(flat.weights, t.weights[0])
    assert torch.equal(flat.rows.sink_mass, rows.sink_mass[0])


def test_the_soft_cap_comes_before_bias_and_mask():
    bias = tensor([10, 0, -math.inf])
    t = trace(Q[:1], K, attn_mask=bias, scale=3.0, softcap=2.0)
    capped = 2 * math.tanh(3 * LN2 / 2)
    assert_equal(t.scaled, [3 * LN2, 0, 0])
    assert_equal(t.capped, [capped, 0, 0])
    assert_equal(t.masked, [capped + 10, 0, -math.inf])
    assert t.rows.max_score.item() == pytest.approx(3 * LN2)
    assert t.rows.score_mean.item() == pytest.approx(1.5 * LN2)
    assert t.rows.lse.item() == pytest.approx(math.log(math.exp(capped + 10) + 1))


def test_head_h_reads_kv_head_h_over_g():
    q, k, _ = inputs(heads=6, kv_heads=3)
    v = torch.arange(3.0)[None, :, None, None].expand(2, 3, 13, 5)
    t = trace(q, k, v, enable_gqa=True)
    assert torch.allclose(
        t.output[..., 0], torch.tensor([0.0, 0, 1, 1, 2, 2])[:, None].expand(6, 11)
    )
    for head in range(6):
        alone = trace(q[:, head], k[:, head // 2])
        torch.testing.assert_close(t.scores[:, head], alone.scores)
    assert t.key.shape == (2, 3, 13, 7)


def test_values_may_be_of_another_width():
    q, k, v = inputs(d_k=2, d_v=17)
    assert trace(q, k, v, enable_gqa=True).output.shape == (2, 6, 11, 17)
    assert trace(q, k, v[..., :0], enable_gqa=True).output.shape == (2, 6, 11, 0)


@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_any_number_of_axes_gives_the_same_rows(axes):
    q, k, v = inputs(heads=3)
    whole = trace(q, k, v, is_causal="bottom_right")
    views = {
        2: lambda x: x[1, 2],
        3: lambda x: x[1],
        4: lambda x: x,
        5: lambda x: x[None].expand(5, -1, -1, -1, -1),
    }
    view = views[axes]
    t = trace(view(q), view(k), view(v), is_causal="bottom_right")
    for name in ("scores", "scaled", "masked", "weights", "output"):
        torch.testing.assert_close(getattr(t, name), view(getattr(whole, name)))
    torch.testing.assert_close(t.rows.entropy, view(whole.rows.entropy[..., None])[..., 0])
    assert t.rows.visible.shape == t.scores.shape[:-1]


def test_axes_of_one_broadcast():
    q, k, v = inputs(heads=3)
    for broadcast in ((q[:1], k, v), (q, k[:1], v[:1]), (q[:, :1], k, v), (q, k[:, :1], v[:, :1])):
        full = [x.expand(2, 3, -1, -1) for x in broadcast]
        torch.testing.assert_close(trace(*broadcast).output, trace(*full).output)
    for one_head in ((q, k, v[:, :1]), (q, k[:, :1], v), (q[:, :1], k[:, :1], v)):
        full = [x.expand(2, 3, -1, -1) for x in one_head]
        torch.testing.assert_close(trace(*one_head).output, trace(*full).output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stages_are_in_the_inputs_dtype_and_statistics_in_float32_or_better(dtype):
    q, k, v = inputs(dtype=dtype)
    t = trace(q, k, v, softcap=5.0, enable_gqa=True)
    for name in ("scores", "scaled", "capped", "masked", "weights", "output"):
        assert getattr(t, name).dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in vars(t.rows).values() if torch.is_tensor(x)} == {
        wide, torch.int32, torch.bool,
    }  # fmt: skip
    assert t.weights.double().sum(-1).sub(1).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize("keys", [0, 1, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_no_queries_and_no_keys_are_shapes_like_any_other(queries, keys, sink):
    q, k, v = inputs(queries=queries, keys=keys)
    t = trace(q, k, v, enable_gqa=True, sinks=torch.arange(6.0) if sink else None)
    assert t.weights.shape == (2, 6, queries, keys)
    assert t.output.shape == (2, 6, queries, 5)
    assert t.rows.lse.shape == (2, 6, queries)
    if keys == 0:
        assert (t.output == 0).all()
        assert t.rows.empty.all()
        lse = torch.arange(6.0)[:, None].expand(6, queries) if sink else torch.tensor(-math.inf)
        assert torch.equal(t.rows.lse, lse.expand(2, 6, queries))


NAMES = ("score_mean", "score_var", "max_score", "entropy", "top_margin", "collision",
         "jacobian_trace", "mean_key")  # fmt: skip


@pytest.mark.parametrize("how", ["bool", "−∞", "alignment"])
def test_a_row_that_sees_nothing_is_zero_and_counted(how):
    q, k, v = inputs(heads=3, queries=5, keys=4)
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[0] = False
    arguments = {
        "bool": {"attn_mask": mask},
        "−∞": {"attn_mask": mask.float().log()},
        "alignment": {"is_causal": "bottom_right"},
    }[how]
    t = trace(q, k, v, **arguments)
    rows = t.rows
    assert rows.empty[..., 0].all()
    assert not rows.empty[..., 1:].any()
    assert (t.weights[:, :, 0] == 0).all()
    assert (t.output[:, :, 0] == 0).all()
    assert (rows.lse[..., 0] == -math.inf).all()
    assert (rows.top_key[..., 0] == -1).all()
    assert all(getattr(rows, name)[..., 0].isnan().all() for name in NAMES)
    assert not rows.nonfinite.any()
    assert all(x[..., 1:, :].isfinite().all() for x in (t.weights, t.output))
    sunk = trace(q, k, v, **arguments, sinks=torch.arange(3.0))
    assert torch.equal(sunk.rows.lse[..., 0], torch.arange(3.0).expand(2, 3))
    assert sunk.rows.sink_mass[..., 0].isnan().all()
    assert (sunk.output[:, :, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_of_finfo_min_is_uniform_as_in_torch_and_counted_as_empty(dtype):
    q, k, v = inputs(heads=3, dtype=torch.float64)
    mask = torch.zeros(11, 13, dtype=dtype)
    mask[4] = torch.finfo(dtype).min
    t = trace(q, k, v, mask)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.double())
    torch.testing.assert_close(t.output, torchs)
    if dtype != torch.float16:  # beside 65504 a score still shows
        torch.testing.assert_close(t.weights[:, :, 4], torch.full((2, 3, 13), 1 / 13).double())
    assert torch.equal(t.rows.empty[0, 0], torch.arange(11) == 4)
    assert (t.rows.lse[..., 4] == -math.inf).all()


def test_a_bias_of_minus_1e4_is_an_ordinary_number():
    q, k, _ = inputs(heads=3)
    t = trace(q, k, attn_mask=torch.full((11, 13), -1e4))
    assert (t.rows.visible == 13).all()
    assert (t.rows.lse < -9000).all()


@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
def test_what_is_no_number_matters_where_it_is_seen_and_only_there(what, where):
    q, k, v = inputs(heads=3, queries=13)
    bias = torch.zeros(13, 13)
    {"query": q[:, :, 9], "key": k[:, :, 9], "value": v[:, :, 9], "bias": bias[9:, 2]}[where].fill_(
        what
    )
    t = trace(q, k, v, bias, is_causal=True, softcap=3.0)
    spoilt = t.output.isnan().all(-1)
    if where != "query":
        assert spoilt[:, :, 9:].all()
    assert spoilt[:, :, 9].all()
    assert not t.output[:, :, :9].isnan().any()
    assert torch.equal(t.rows.nonfinite, spoilt & (where != "value"))
    hidden = ~t.visible
    assert (t.weights[hidden] == 0).all()
    if where != "value":
        assert all(getattr(t.rows, name)[:, :, 9].isnan().all() for name in ("lse", *NAMES))
        assert (t.rows.top_key[:, :, 9] == -1).all()
        assert (t.rows.visible[:, :, 9] == 10).all()


@pytest.mark.parametrize("sink", [math.nan, math.inf])
def test_a_sink_that_is_no_number_spoils_its_head(sink):
    q, k, v = inputs(heads=3)
    t = trace(q, k, v, sinks=torch.tensor([0.0, sink, -math.inf]))
    assert torch.equal(t.rows.nonfinite[0, :, 0], torch.tensor([False, True, False]))
    assert torch.equal(t.output.isnan().any(-1), t.rows.nonfinite)
    plain = trace(q, k, v)
    torch.testing.assert_close(t.output[:, 2], plain.output[:, 2])
    torch.testing.assert_close(t.rows.entropy[:, 2], plain.rows.entropy[:, 2])


def test_dropout_has_a_stage_of_its_own():
    q, k, v = inputs(heads=3, dtype=torch.float64)
    t = trace(q, k, v, dropout_p=0.25)
    assert torch.equal(t.weights, trace(q, k, v).weights)
    kept = t.dropped != 0
    assert 0 < kept.double().mean() < 1
    torch.testing.assert_close(t.dropped[kept], t.weights[kept] / 0.75)
    torch.testing.assert_close(t.output, t.dropped @ v)


def test_masks_of_symbols_and_of_tensors_show_the_same():
    q, k, v = inputs(heads=3)
    symbols = Mask(causal="bottom_right", window=4, lengths=[9, 13])
    dense = trace(q, k, v, symbols).visible
    for one, other in ((dense, symbols), (dense.float().log(), symbols)):
        a, b = trace(q, k, v, one), trace(q, k, v, other)
        assert torch.equal(a.visible, b.visible)
        torch.testing.assert_close(a.weights, b.weights)


def test_labels_stay_with_the_trace():
    t = trace(Q, K, tokens=["猫", "sat", "."])
    assert t.tokens == ("猫", "sat", ".")
    assert trace(Q, K).label("abc").tokens == ("a", "b", "c")


def test_every_stage_is_differentiable():
    q, k, v = (x[:1, :1, :3].clone().requires_grad_() for x in inputs(dtype=torch.float64))

    def call(q, k, v):
        t = trace(q, k, v, is_causal="top_left", softcap=2.0)
        return t.scores, t.scaled, t.capped, t.weights, t.output, t.rows.lse, t.rows.entropy

    assert torch.autograd.gradcheck(call, (q, k, v))

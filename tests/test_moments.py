"""score_moments is the n² computation, on every mask and shape, and its parts add up."""

import doctest
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scaledot
from oracle import inputs
from scaledot import Mask, checks, intervals, moments, row_stats, score_moments, trace
from scaledot.heads import HeadStats
from scaledot.heads import merge as merge_heads
from scaledot.kernels import native
from scaledot.masks import resolve
from scaledot.moments import ERROR, merge, row_budget, width_factors


def structured(batch, queries, keys):
    """Every form of mask that has structure, and combinations: name → arguments."""
    lengths = torch.arange(batch) * (keys - 1) // max(batch - 1, 1) + 1
    left = torch.arange(keys) >= (keys - lengths)[:, None]
    holes = torch.rand(batch, keys) < 0.6
    both = max(queries, keys)
    runs = torch.stack([torch.arange(both) // (4 + b) for b in range(batch)])
    one = runs[0, :queries], runs[0, :keys]
    runs = runs[:, :queries], runs[:, :keys]
    mixed = torch.randint(-2, 3, (batch, queries)), torch.randint(-2, 2, (batch, keys))
    turned = runs[0].flip(1), runs[1]
    corner = Mask(causal="bottom_right")
    return {
        "none": {},
        "top left": {"is_causal": "top_left"},
        "bottom right": {"is_causal": "bottom_right"},
        "window": {"is_causal": "bottom_right", "window": 3},
        "window, top left": {"is_causal": "top_left", "window": 5},
        "window of one": {"is_causal": "top_left", "window": 1},
        "window to both sides": {"window": (2, 3)},
        "window to the left": {"window": (1, -1)},
        "window to the right": {"window": (-1, 2)},
        "window wider than all": {"window": (1000, 1000)},
        "lengths": {"attn_mask": Mask(lengths=lengths)},
        "no key at all": {"attn_mask": Mask(lengths=lengths * 0)},
        "left padding": {"attn_mask": Mask(keys=left)},
        "holes": {"attn_mask": Mask(keys=holes)},
        "dense, one a key": {"attn_mask": holes[:, None, None]},
        "causal with holes": {"attn_mask": Mask(keys=holes) & corner},
        "causal, dense padding": {"attn_mask": left[:, None, None], "is_causal": "bottom_right"},
        "window with holes": {"attn_mask": Mask(keys=holes) & corner, "window": 4},
        "documents": {"attn_mask": Mask(segments=runs)},
        "the same documents": {"attn_mask": Mask(segments=one)},
        "documents elsewhere": {"attn_mask": Mask(segments=turned)},
        "causal documents": {"attn_mask": Mask(segments=runs) & corner},
        "causal same documents": {"attn_mask": Mask(segments=one) & corner},
        "interleaved documents": {"attn_mask": Mask(segments=mixed)},
        "causal interleaved documents": {"attn_mask": Mask(segments=mixed) & corner},
        "interleaved documents in a window": {"attn_mask": Mask(segments=mixed), "window": (3, 1)},
        "documents in a window": {"attn_mask": Mask(segments=runs) & corner, "window": 3},
        "documents and a side": {"attn_mask": Mask(segments=runs), "window": (2, -1)},
        "all at once": {
            "attn_mask": Mask(lengths=lengths, segments=runs, keys=holes) & corner,
            "window": 5,
        },
    }  # fmt: skip


MASKS = tuple(structured(2, 2, 2))


def squared(q, k, **arguments):
    """The n² computation, in float64: what each field of ScoreMoments must be."""
    t = trace(q.double(), k.double(), **arguments)
    rows, visible, s = t.rows, t.visible, t.scaled
    count = visible.sum((-2, -1))

    def pairs(x):
        return x.masked_fill(~visible, 0.0).sum((-2, -1)) / count

    mean = pairs(s)
    away = s - rows.score_mean[..., None]
    two = rows.visible > 1
    # The mean query's own scores, along each row's keys.
    by_row = rows.visible.double()
    mean_query = (by_row[..., None] * t.query).sum(-2) / count[..., None]
    k = t.key
    if k.dim() > 2:
        k = k.repeat_interleave(max(t.query.shape[-3] // max(k.shape[-3], 1), 1), -3)
    of_mean = (mean_query[..., None, :] @ k.mT) * t.scale
    centre = of_mean.masked_fill(~visible, 0.0).sum(-1) / by_row
    return {
        "count": count,
        "visible": rows.visible,
        "mean": mean,
        "var": pairs((s - mean[..., None, None]).square()),
        "var_within": pairs(away.square()),
        "row_var_mean": rows.score_var.masked_fill(~two, 0.0).sum(-1) / two.sum(-1),
        "row_mean": rows.score_mean,
        "row_var": rows.score_var,
        "row_shift": pairs((rows.score_mean - mean[..., None])[..., None].square() + 0 * s),
        "key_bias": pairs((of_mean - centre[..., None]).square()),
    }


def close(name, actual, expected, bound, scale=0.0):
    """Relative error at most bound, or bound·scale where that is larger; NaN where NaN is due."""
    assert actual.shape == expected.shape, name
    assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: NaN elsewhere"
    there = ~expected.isnan()
    error = (actual - expected).abs()[there]
    allowed = bound * torch.maximum(
        expected.abs(), torch.as_tensor(scale, dtype=torch.float64).expand(expected.shape)
    )
    worst = (error - allowed[there]).max() if error.numel() else torch.tensor(0.0)
    assert worst <= 0, f"{name}: {float(worst):.3g} above the bound"


KERNELS = ("tiled", "native") if native.available() is None else ("tiled",)
here = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def variant(request, force_variant):
    """Each variant that this processor runs; SCALEDOT_ISA forces it."""
    force_variant(request.param)
    return request.param


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def assert_as_squared(q, k, *, kernels=KERNELS, **arguments):
    """Every moment of q and k is the one of the n² computation, by every kernel."""
    want = squared(q, k, **arguments)
    for kernel in kernels:
        m = score_moments(q, k, kernel=kernel, **arguments)
        assert m.kernel == kernel
        assert_moments(m, want, q, k)
    return m


def assert_moments(m, want, q, k):
    # A variance of nearly equal scores is of rounding errors: held against the width of the rest.
    total = want["var"].nan_to_num()
    size = (
        m.scale * q.double().norm(dim=-1).amax().item() * k.double().norm(dim=-1).amax().item()
        if q.numel() and k.numel()
        else 0.0
    )
    for name in ("count", "visible"):
        assert torch.equal(getattr(m, name).long(), want[name].long()), name
    close("mean", m.mean, want["mean"], ERROR, 1e-3 * size)
    for name in ("var", "var_within", "row_var_mean"):
        close(name, getattr(m, name), want[name], ERROR, 1e-3 * total)
    close("row_mean", m.row_mean, want["row_mean"], ERROR, 1e-3 * size)
    close("row_var", m.row_var, want["row_var"], ERROR, 1e-2 * total[..., None])
    for name in ("row_shift", "key_bias"):
        close(name, getattr(m.budget, name), want[name], ERROR, 1e-2 * total)
    b = m.budget
    close("sum of the parts", b.interaction + b.row_shift + b.key_bias, b.total, ERROR)
    width = b.scale * b.norms * b.alignment
    close("product of the factors", width, m.ratio, ERROR, 1e-6)
    unit = m.unit_scale * m.ratio
    close("unit scale", unit.nan_to_num(abs(m.scale)), torch.full_like(unit, abs(m.scale)), ERROR)


def shifted(x, size):
    return x + size * torch.randn(x.shape[-1], dtype=torch.float64).to(x.dtype)


def correlated(x):
    """The same vectors, squeezed towards a plane by a factor of a thousand."""
    d = x.shape[-1]
    q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q
    squeeze = torch.logspace(0, -3, d, dtype=torch.float64)
    return (x.double() @ (q * squeeze) @ q.mT).to(x.dtype)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_the_squared_computation(mask):
    q, k, _ = inputs(dtype=torch.float64)
    assert_as_squared(q, k, enable_gqa=True, **structured(2, 11, 13)[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_over_many_chunks(mask):
    """Chunks are 32 keys here: 5 and 7 of them, the last ones not whole."""
    q, k, _ = inputs(
        batch=3, heads=2, kv_heads=1, queries=211, keys=157, d_k=5, dtype=torch.float64
    )
    arguments = structured(3, 211, 157)[mask]
    assert_as_squared(q, k, enable_gqa=True, **arguments)
    assert_as_squared(shifted(q, 30), shifted(k, 1e4), enable_gqa=True, **arguments)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["random", "shifted", "correlated"])
def test_float32_inputs(mask, kind):
    q, k, _ = inputs(queries=67, keys=73, d_k=17)
    if kind == "shifted":
        q, k = shifted(q, 3), shifted(k, 100)
    if kind == "correlated":
        q, k = correlated(q), correlated(k)
    assert_as_squared(q, k, enable_gqa=True, **structured(2, 67, 73)[mask])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_exact_from_there_on(dtype):
    q, k, _ = inputs(queries=67, keys=73, d_k=17, dtype=dtype)
    assert_as_squared(q, k, is_causal="bottom_right", enable_gqa=True)
    assert_as_squared(q * 200, k * 200, enable_gqa=True)


@pytest.mark.parametrize("mask", ["none", "bottom right", "window", "documents"])
@pytest.mark.parametrize("kind", ["outlier", "trend", "step", "documents apart"])
def test_nothing_cancels(mask, kind):
    """Keys that leave the others far behind, once, slowly, at a step, from document to document."""
    q, k, _ = inputs(batch=1, heads=1, kv_heads=1, queries=499, keys=499, dtype=torch.float64)
    direction = torch.randn(7, dtype=torch.float64)
    place = torch.arange(499.0, dtype=torch.float64)[:, None]
    how = {
        "outlier": 1e5 * (place == 100),
        "trend": 10 * place,
        "step": 1e4 * (place > 250),
        "documents apart": 1e3 * (place // 4 % 7),
    }
    assert_as_squared(q, k + how[kind] * direction, **structured(1, 499, 499)[mask])


@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    queries=st.integers(0, 80),
    keys=st.integers(0, 80),
    d_k=st.sampled_from([1, 2, 3, 7, 31, 37]),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 1000),
)
def test_any_shape(batch, kv_heads, group, queries, keys, d_k, mask, seed):
    torch.manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, queries, d_k, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, keys, d_k, dtype=torch.float64)
    if keys or mask not in ("lengths", "all at once", "left padding", "causal, dense padding"):
        arguments = structured(batch, queries, keys)[mask]
        assert_as_squared(q, k, enable_gqa=True, **arguments)


@given(
    left=st.integers(-1, 70),
    right=st.integers(-1, 70),
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    documents=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_window_and_documents(left, right, queries, keys, documents, seed):
    torch.manual_seed(seed)
    q = torch.randn(1, queries, 3, dtype=torch.float64)
    k = torch.randn(1, keys, 3, dtype=torch.float64) + 10
    ids = torch.randint(documents, (queries,)), torch.randint(documents, (keys,))
    mask = Mask(window=(left, right), segments=ids if documents > 1 else None)
    if right == 0:
        mask = mask & Mask(causal="bottom_right")
    assert_as_squared(q, k, attn_mask=mask)


@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (3, 2, 5)], ids=["2-D", "3-D", "4-D", "5-D"])
@pytest.mark.parametrize("mask", [{}, {"is_causal": "top_left"}])
def test_any_number_of_axes(lead, mask):
    q = torch.randn(*lead, 41, 3, dtype=torch.float64)
    k = torch.randn(*lead, 37, 3, dtype=torch.float64)
    m = assert_as_squared(q, k, **mask)
    assert m.mean.shape == lead
    assert m.row_var.shape == (*lead, 41)


@pytest.mark.parametrize("mask", [{}, {"is_causal": "top_left"}, {"window": (2, 2)}])
def test_axes_of_one_broadcast(mask):
    q = torch.randn(2, 1, 6, 41, 3, dtype=torch.float64)
    k = torch.randn(1, 5, 1, 37, 3, dtype=torch.float64)
    assert score_moments(q, k, **mask).mean.shape == (2, 5, 6)
    assert_as_squared(q, k, **mask)
    assert_as_squared(q[:, :, :1], k.expand(1, 5, 6, 37, 3), **mask)


@pytest.mark.parametrize("mask", [{}, {"is_causal": "top_left"}, {"attn_mask": Mask(window=4)}])
def test_any_strides(mask):
    q = torch.randn(2, 41, 6, 8, dtype=torch.float64).transpose(1, 2)[..., ::2]
    k = torch.randn(2, 41, 2, 4, dtype=torch.float64).transpose(1, 2).flip(-2)
    assert_as_squared(q, k, enable_gqa=True, **mask)


@pytest.mark.parametrize("mask", [{}, {"is_causal": "top_left"}, {"window": (2, 2)}])
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)])
def test_axes_of_length_zero(mask, shape):
    batch, heads, queries, keys = shape
    q, k = torch.randn(batch, heads, queries, 3), torch.randn(batch, heads, keys, 3)
    third = {} if mask else {"skewness": True, "singular_values": True}
    m = score_moments(q, k, **mask, **third)
    assert m.row_mean.shape == (batch, heads, queries)
    assert m.row_mean.isnan().all()
    assert m.mean.shape == (batch, heads)
    assert m.mean.isnan().all()
    assert not m.count.any()
    assert m.unit_scale.isnan().all()
    if third:
        assert m.skewness.isnan().all()
        assert m.singular_values.shape == (batch, heads, min(queries, keys, 3))
        assert not m.spectral_norm.any()


def test_empty_rows_are_nan_and_enter_nothing():
    q, k = torch.randn(2, 1, 5, 3, dtype=torch.float64)
    # Of five queries and three keys the first two see nothing.
    m = assert_as_squared(q, k[:, :3], is_causal="bottom_right")
    assert m.visible.tolist() == [[0, 0, 1, 2, 3]]
    assert m.row_mean.isnan().tolist() == [[True, True, False, False, False]]
    alone = score_moments(q[:, 2:], k[:, :3], is_causal=True)
    for name in ("count", "mean", "var", "var_within", "row_var_mean"):
        assert torch.allclose(getattr(m, name), getattr(alone, name), rtol=1e-14), name


def test_a_row_of_one_key_has_variance_0_and_no_share_in_the_mean_over_rows():
    q, k = torch.randn(2, 1, 5, 3, dtype=torch.float64)
    m = score_moments(q, k, is_causal=True)
    assert m.row_var[0, 0] == 0
    assert torch.allclose(m.row_var_mean, m.row_var[:, 1:].mean(-1))
    one = score_moments(q, k, window=1, is_causal=True)
    assert (one.var_within == 0).all()
    assert (one.unit_scale == math.inf).all()
    assert one.row_var_mean.isnan().all()
    assert "constant in every row" in str(one.budget)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(bad):
    q, k = torch.randn(2, 1, 50, 3, dtype=torch.float64)
    spoilt = k.clone()
    spoilt[0, 40, 1] = bad
    m, clean = (score_moments(q, x, is_causal=True) for x in (spoilt, k))
    assert m.row_var[:, 40:].isnan().all()
    assert torch.allclose(m.row_var[:, :40], clean.row_var[:, :40])
    assert torch.allclose(m.row_mean[:, :40], clean.row_mean[:, :40])
    assert m.mean.isnan()
    assert m.var_within.isnan()
    assert "no width" in str(m.budget)
    # Hidden, it does not matter.
    real = torch.ones(1, 50, dtype=torch.bool)
    real[0, 40] = False
    for arguments in ({}, {"is_causal": True}, {"window": (9, 3)}):
        a, b = (score_moments(q, x, Mask(keys=real), **arguments) for x in (spoilt, k))
        assert torch.allclose(a.var, b.var, rtol=1e-13)
        assert torch.allclose(a.budget.key_bias, b.budget.key_bias, rtol=1e-13)
    # In a query, it spoils that one row.
    rows = q.clone()
    rows[0, 7, 0] = bad
    for arguments in ({}, {"is_causal": True}):
        m = score_moments(rows, k, **arguments)
        assert m.row_mean.isnan().nonzero().tolist() == [[0, 7]]
        assert m.var.isnan()
    # And its head, of those that share the key.
    group = torch.stack([rows, q], 1)
    for arguments in ({}, {"is_causal": True}):
        m, clean = (
            score_moments(x, k[:, None], enable_gqa=True, **arguments)
            for x in (group, torch.stack([q, q], 1))
        )
        assert m.var.isnan().tolist() == [[True, False]]
        for name in ("total", "key_bias", "norms", "gain"):
            a, b = (getattr(x.budget, name)[0, 1] for x in (m, clean))
            assert torch.equal(a, b) or (a.isnan() and b.isnan()), name
    # One that sees nothing does not matter.
    ids = torch.zeros(50, dtype=torch.int64)
    ids[7] = 1
    m = score_moments(rows, k, Mask(segments=(ids, torch.zeros_like(ids))))
    assert m.var.isfinite()
    assert m.budget.norms.isfinite()


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("n", [9, 301])
def test_skewness(kv_heads, n):
    """By the scores themselves and by third moments, whichever is shorter."""
    q, k, _ = inputs(queries=n, keys=n + 2, d_k=5, kv_heads=kv_heads, dtype=torch.float64)
    q, k = q.exp(), shifted(k.exp(), 10)
    for arguments in ({}, {"attn_mask": Mask(lengths=[n, n // 2])}, {"scale": -0.3}):
        m = score_moments(q, k, skewness=True, enable_gqa=True, **arguments)
        t = trace(q, k, enable_gqa=True, **arguments)
        away = (t.scaled - m.mean[..., None, None]).masked_fill(~t.visible, 0.0)
        want = away.pow(3).sum((-2, -1)) / m.count / m.var**1.5
        close("skewness", m.skewness, want, ERROR)
    assert score_moments(q, k, enable_gqa=True).skewness is None


@pytest.mark.parametrize(("queries", "keys", "d_k"), [(67, 73, 17), (5, 73, 17), (67, 3, 17)])
def test_singular_values(queries, keys, d_k):
    q, k, _ = inputs(queries=queries, keys=keys, d_k=d_k, dtype=torch.float64)
    q, k = correlated(q), shifted(k, 10)
    for arguments in ({}, {"attn_mask": Mask(lengths=[keys, 2])}, {"scale": -0.3}):
        m = score_moments(q, k, singular_values=True, enable_gqa=True, **arguments)
        t = trace(q, k, enable_gqa=True, **arguments)
        s = t.scaled.masked_fill(~t.visible, 0.0)
        want = torch.linalg.svdvals(s)[..., : min(queries, keys, d_k)]
        close("singular values", m.singular_values, want, ERROR, want[..., :1] * 1e-3)
        close("stable rank", m.stable_rank, want.square().sum(-1) / want[..., 0] ** 2, ERROR)
        close("spectral norm", m.spectral_norm, want[..., 0], ERROR)
    assert score_moments(q, k, enable_gqa=True).stable_rank is None


@pytest.mark.parametrize("asked", ["skewness", "singular_values"])
@pytest.mark.parametrize(
    "mask", [{"is_causal": True}, {"window": 3}, {"attn_mask": Mask(segments=torch.zeros(5).int())}]
)
def test_what_is_not_linear_is_refused(asked, mask):
    q = torch.randn(1, 5, 3)
    with pytest.raises(ValueError, match=f"{asked}=True needs every query to see the same keys"):
        score_moments(q, q, **mask, **{asked: True})


@pytest.mark.parametrize("dense", [torch.ones(5, 5) > 0, torch.zeros(5, 5), torch.zeros(5)])
def test_a_mask_without_structure_is_refused(dense):
    q = torch.randn(1, 5, 3)
    for mask in (dense, Mask(dense=dense) & Mask(causal="top_left")):
        with pytest.raises(ValueError, match=r"no structure .* pass scaledot\.Mask"):
            score_moments(q, q, mask)


def test_bad_arguments_are_named():
    q = torch.randn(1, 5, 3)
    with pytest.raises(ValueError, match="q has d_k 3, k has 2"):
        score_moments(q, q[..., :2])
    with pytest.raises(ValueError, match="two meanings"):
        score_moments(q, q[:, :4], is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        score_moments(torch.randn(4, 5, 3), torch.randn(2, 5, 3))


def test_the_budget_of_full_attention_is_the_formula():
    q, k = torch.randn(2, 1, 53, 7, dtype=torch.float64)
    q, k = shifted(correlated(q), 1), shifted(correlated(k), 2)
    b = score_moments(q, k, scale=0.5).budget
    cq, ck = (torch.cov(x[0].mT, correction=0) for x in (q, k))
    mq, mk = q.mean(1)[0], k.mean(1)[0]
    want = {
        "interaction": (cq * ck).sum() / 4,
        "row_shift": mk @ cq @ mk / 4,
        "key_bias": mq @ ck @ mq / 4,
        "gain": 7 * (cq * ck).sum() / (cq.trace() * ck.trace()),
        "query_norm": q.square().sum(-1).mean().sqrt(),
        "key_norm": k.square().sum(-1).mean().sqrt(),
        "key_spread": ck.trace().sqrt(),
        "query_mean": mq.norm(),
        "key_mean": mk.norm(),
        "norms": (q.square().sum(-1).mean() * ck.trace()).sqrt() / 7,
    }
    for name, x in want.items():
        close(name, getattr(b, name), x[None], ERROR)
    assert b.scale.item() == pytest.approx(0.5 * math.sqrt(7))
    within = (b.interaction + b.key_bias) * 4
    assert torch.allclose(b.effective_d_k, within / (b.norms**2))


def test_the_budget_under_the_articles_assumptions():
    q, k = torch.randn(2, 1, 20_000, 64)
    m = score_moments(q, k, is_causal=True)
    b = m.budget
    for x in (m.var, m.var_within, b.norms, b.alignment, b.total, m.ratio):
        assert x.item() == pytest.approx(1, abs=0.02)
    assert b.query_norm.item() == pytest.approx(8, abs=0.05)
    assert b.effective_d_k.item() == pytest.approx(64, abs=1)
    assert abs(b.row_shift.item()) + abs(b.key_bias.item()) < 0.01
    assert m.unit_scale.item() == pytest.approx(1 / 8, abs=0.003)


def test_gain_is_one_of_isotropic_keys_and_d_of_one_direction():
    q, k = torch.randn(2, 1, 4000, 8, dtype=torch.float64)
    assert score_moments(correlated(q), k).budget.gain.item() == pytest.approx(1, abs=0.1)
    line = torch.randn(8, dtype=torch.float64)
    b = score_moments(q[..., :1] * line, k[..., :1] * line).budget
    assert b.gain.item() == pytest.approx(8)
    assert b.effective_d_k.item() == pytest.approx(64, rel=0.01)


def test_the_line_that_a_human_reads():
    q = torch.tensor([[3.0, 0], [-3, 0]], dtype=torch.float64)
    k = torch.tensor([[2.0, 0], [-2, 0]], dtype=torch.float64)
    # ‖q‖ 3 and ‖k‖ 2 in one direction of two: norms 3·2/2, alignment √2, scale 1/√2.
    m = score_moments(q, k)
    assert str(m.budget) == "scores are 4.2 times too wide: norms ×3, alignment ×1.4"
    m = score_moments(q, k, scale=1.0)
    assert str(m.budget) == "scores are 6 times too wide: scale ×1.4, norms ×3, alignment ×1.4"
    m = score_moments(q / 6, k / 4)
    assert str(m.budget) == "scores are 5.7 times too narrow: norms ×0.12, alignment ×1.4"
    m = score_moments(torch.stack([q, q * 100]), torch.stack([k, k]))
    assert str(m.budget) == (
        "head 0: scores are 4.2 times too wide: norms ×3, alignment ×1.4\n"
        "head 1: scores are 424 times too wide: norms ×300, alignment ×1.4"
    )
    m = score_moments(q.expand(1, 2, 2, 2), k.expand(1, 2, 2, 2))
    assert str(m.budget).startswith("head 0.0: scores are 4.2")
    for width, line in ((0.97, "unit width"), (1.03, "unit width"), (0.93, "1.1 times too narrow"),
                        (99.7, "100 times"), (2e6, "2.0e+06 times")):  # fmt: skip
        factor = width / score_moments(q, k).ratio.item()
        assert line in str(score_moments(q * factor, k).budget)
    assert "before soft-cap and bias" in repr(m)
    assert "(1, 2)" in repr(m)


def test_merged_texts_are_the_pairs_of_both():
    texts = [inputs(batch=b, queries=n, keys=n, d_k=7, dtype=torch.float64) for b, n in
             ((1, 5), (2, 31), (1, 0))]  # fmt: skip
    each = [score_moments(q, k + 3, is_causal=True, enable_gqa=True) for q, k, _ in texts]
    together = merge(each)
    for head in range(6):
        scores, within = [], 0.0
        for q, k, _ in texts:
            t = trace(q, k + 3, is_causal=True, enable_gqa=True)
            scores.append(t.scaled[:, head][t.visible[:, head]])
            rows = t.rows
            within += float((rows.visible * rows.score_var)[:, head].nansum())
        scores = torch.cat(scores)
        assert together.count[head] == len(scores)
        assert together.mean[head].item() == pytest.approx(scores.mean().item(), rel=ERROR)
        assert together.var[head].item() == pytest.approx(
            scores.var(correction=0).item(), rel=ERROR
        )
        assert together.var_within[head].item() == pytest.approx(within / len(scores), rel=ERROR)
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    other = score_moments(*torch.randn(2, 3, 4, 8))
    with pytest.raises(ValueError, match="heads are"):
        merge([each[0], other])


def test_the_docstrings_examples_are_true():
    assert doctest.testmod(moments, extraglobs={"torch": torch}).failed == 0


def test_it_leaves_no_graph_and_minds_no_autocast():
    q = torch.randn(1, 40, 8, requires_grad=True)
    want = score_moments(q.detach(), q.detach(), is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        m = score_moments(q, q, is_causal=True)
    assert not m.var.requires_grad
    assert torch.equal(m.row_var, want.row_var)
    assert m.var.dtype == m.row_mean.dtype == torch.float64


def test_nothing_squared_is_allocated():
    """32,768 tokens: the scores alone would be 8 GB, the inputs are 8 MB."""
    from torch.profiler import ProfilerActivity, profile

    q, k = torch.randn(2, 1, 32_768, 32)
    for arguments in ({"is_causal": True}, {"window": 4096}, {}):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            score_moments(q, k, **arguments)
        largest = max(
            (e.cpu_memory_usage for e in seen.events() if e.cpu_memory_usage > 0), default=0
        )
        assert largest < 2**24


def test_real_heads_agree_with_the_statistics_of_observe():
    """The embedded model: the variances of its HeadStats, from q and k alone."""
    pytest.importorskip("transformers", minversion="5")
    from scaledot.loading import load, sample_text

    loaded = load()
    ids = loaded.tokenizer(sample_text(), return_tensors="pt")["input_ids"][:, :200]
    with scaledot.observe(loaded.model, keep="qk") as seen, torch.no_grad():
        loaded.model(input_ids=ids)
    assert len(seen.heads) == loaded.model.config.n_layer
    for path, stats in seen.heads.items():
        heads = [seen.trace(path, head=h) for h in range(stats.heads)]
        q, k = (torch.stack([getattr(t, name) for t in heads])[None] for name in ("query", "key"))
        m = assert_as_squared(q, k, is_causal=True, scale=heads[0].scale)
        assert_as_squared_budget(q, k, is_causal=True, scale=heads[0].scale)
        merged = merge([m])
        for name in ("var", "var_within", "row_shift"):
            want = getattr(stats.scaled, name)
            assert torch.allclose(getattr(merged, name), want, rtol=1e-5), name
        score_var = stats.measures["score_var"].average
        assert torch.allclose(m.row_var_mean[0], score_var, rtol=1e-5)
        assert torch.equal(m.count[0], stats.scaled.count)


# The native kernel


@here
@pytest.mark.parametrize("mask", MASKS)
def test_every_variant_is_the_squared_computation(variant, mask):
    """Several chunks and strips, none whole; keys whose mean is far beyond their spread."""
    q, k, _ = inputs(queries=103, keys=157, d_k=17)
    arguments = structured(2, 103, 157)[mask]
    assert_as_squared(q, shifted(k, 100), kernels=["native"], enable_gqa=True, **arguments)


@here
@pytest.mark.parametrize("d_k", [1, 8, 40, 130, 300])
@pytest.mark.parametrize("mask", ["none", "bottom right", "window with holes"])
def test_every_variant_at_any_width(variant, d_k, mask):
    q, k, _ = inputs(batch=1, heads=2, kv_heads=1, queries=211, keys=223, d_k=d_k)
    arguments = structured(1, 211, 223)[mask]
    assert_as_squared(q, shifted(k, 10), kernels=["native"], enable_gqa=True, **arguments)


@here
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("three_threads")
def test_keys_shared_among_threads_are_the_squared_computation(variant, mask):
    """One kv head cut along its keys into five pieces."""
    q, k, _ = inputs(batch=1, heads=2, kv_heads=1, queries=1000, keys=1013, dtype=torch.float64)
    arguments = structured(1, 1000, 1013)[mask]
    assert_as_squared(q, shifted(k, 100), kernels=["native"], enable_gqa=True, **arguments)


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("strides", ["contiguous", "heads inside", "columns", "expanded"])
def test_any_dtype_and_strides_natively(dtype, strides):
    q, k, _ = inputs(queries=67, keys=73, d_k=70, dtype=dtype)
    if strides == "heads inside":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    elif strides == "columns":
        q, k = (x.mT.contiguous().mT for x in (q, k))
    elif strides == "expanded":
        q, k = q[:, :1].expand_as(q), k[:1].expand_as(k)
    for mask in ({}, {"is_causal": "bottom_right"}, {"window": (30, 2)}):
        assert_as_squared(q, k, kernels=["native"], enable_gqa=True, **mask)


@here
def test_auto_is_native_where_it_is_there(monkeypatch):
    q = torch.randn(1, 9, 3)
    assert score_moments(q, q).kernel == "native"
    assert 'not on cuda: pass kernel="tiled"' in native.moments_reason("cuda")
    assert score_moments(q, q, kernel="tiled").kernel == "tiled"
    monkeypatch.setattr(native, "available", lambda: "it was not compiled")
    assert score_moments(q, q).kernel == "tiled"
    with pytest.raises(ValueError, match="'native' is not there: it was not compiled"):
        score_moments(q, q, kernel="native")
    with pytest.raises(ValueError, match="kernel is 'fast'"):
        score_moments(q, q, kernel="fast")


# The budget of a row


def tensor_masks(batch, heads, queries, keys):
    """Masks without structure, and padding and biases that hide nothing else, as tensors."""
    one = torch.rand(batch, 1, queries, keys) < 0.5
    apart = torch.rand(batch, heads, queries, keys) < 0.5
    padding = torch.where(torch.rand(batch, 1, 1, keys) < 0.7, 0.0, -math.inf).double()
    low = torch.finfo(torch.float64).min
    bias = torch.randn(1, heads, queries, keys, dtype=torch.float64)
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    triangle = triangle & (padding == 0)
    hole = triangle.clone()
    hole[:, :, queries // 2, keys // 3] ^= True
    return {
        "causal padding written out": {"attn_mask": triangle},
        "causal written out, additive": {"attn_mask": torch.where(triangle[:1], bias[:, :1], low)},
        "top left written out": {"attn_mask": torch.ones_like(one).tril()},
        "nothing hidden, written out": {"attn_mask": torch.ones_like(one)},
        "all but one written out": {"attn_mask": hole},
        "boolean": {"attn_mask": one},
        "boolean a head": {"attn_mask": apart},
        "boolean, causal": {"attn_mask": one, "is_causal": "bottom_right"},
        "boolean, one row for all": {"attn_mask": apart[:1, :, :1]},
        "additive": {"attn_mask": torch.where(apart, bias, low)},
        "additive, −inf": {"attn_mask": torch.where(one, bias[:, :1], -math.inf)},
        "additive padding": {"attn_mask": padding, "is_causal": "bottom_right"},
        "additive, nothing hidden": {"attn_mask": bias, "is_causal": "bottom_right"},
    }


ANY_MASK = MASKS + tuple(tensor_masks(1, 1, 1, 1))


def any_mask(batch, heads, queries, keys):
    return structured(batch, queries, keys) | tensor_masks(batch, heads, queries, keys)


def budget_of(q, k, real=None, **arguments):
    """`row_budget` of a call, and the rows that it had."""
    arguments = {"enable_gqa": True} | arguments
    p = checks.problem(q, k, None, enable_gqa=True, scale=arguments.get("scale"))
    mask = {x: arguments[x] for x in ("attn_mask", "is_causal", "window") if x in arguments}
    seen = resolve(p, **mask)
    rows = row_stats(q, k, **arguments)
    return row_budget(p, seen, rows, real=real), rows


def squared_budget(q, k, real=None, **arguments):
    """Both row measures by their definition."""
    t = trace(q.double(), k.double(), enable_gqa=True, **arguments)
    visible = t.visible.double()
    n = visible.sum(-1)
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    of = (n > 0) & ~t.rows.nonfinite
    of = (of if real is None else of & real[:, None])[..., None]
    mean_query = torch.where(of, q.double(), 0.0).sum(2) / of.sum(2)
    k = k.nan_to_num(0.0, 0.0, 0.0)
    along = (k @ mean_query[..., None])[..., 0][:, :, None] * t.scale
    centre = (visible * along).sum(-1) / n
    bias = (visible * (along - centre[..., None]).square()).sum(-1) / n
    mean_key = visible @ k / n[..., None]
    spread = torch.stack(
        [(visible[:, :, i] * (k - mean_key[:, :, i, None]).square().sum(-1)).sum(-1) / n[..., i]
         for i in range(q.shape[2])], -1
    )  # fmt: skip
    bad = t.rows.nonfinite
    return {"key_bias": bias.masked_fill(bad, math.nan),
            "key_spread": spread.masked_fill(bad, math.nan)}  # fmt: skip


def assert_as_squared_budget(q, k, real=None, **arguments):
    found, rows = budget_of(q, k, real, **arguments)
    want = squared_budget(q, k, real, **arguments)
    for name, x in found.items():
        # What is constant along a row but for rounding errors is held against other rows.
        size = want[name].nan_to_num().amax() * 1e-3
        close(name, x, want[name], ERROR, size)
        assert not x[rows.visible == 1].nan_to_num().any()
    return found


@pytest.mark.parametrize("mask", ANY_MASK)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rows_budget_is_the_squared_computation(mask, dtype):
    q, k, _ = inputs(queries=53, keys=61, dtype=dtype)
    arguments = any_mask(2, 6, 53, 61)[mask]
    if dtype == torch.float32 and "attn_mask" in arguments:
        bias = arguments["attn_mask"]
        if isinstance(bias, torch.Tensor) and bias.dtype == torch.float64:
            arguments["attn_mask"] = bias.clamp(min=torch.finfo(dtype).min).to(dtype)
    assert_as_squared_budget(q, k, **arguments)
    assert_as_squared_budget(shifted(q, 30), shifted(k, 1e3), **arguments)
    assert_as_squared_budget(correlated(q), shifted(correlated(k), 1), scale=-2.0, **arguments)
    real = torch.rand(2, 53) < 0.6
    assert_as_squared_budget(q, k, real, **arguments)


def test_a_tensor_that_is_causality_and_padding_is_recognised():
    q, k, _ = inputs(queries=53, keys=61)
    p = checks.problem(q, k, None, enable_gqa=True)
    for name, arguments in tensor_masks(2, 6, 53, 61).items():
        fit = intervals.recognised(resolve(p, **arguments))
        plain = "written out" in name and "but one" not in name
        assert (fit is not None) == (plain or "padding" in name or "nothing" in name), name


@pytest.mark.parametrize("mask", ["none", "bottom right", "window", "documents", "boolean"])
@pytest.mark.parametrize("kind", ["outlier", "trend", "step", "documents apart"])
def test_nothing_cancels_in_a_rows_budget(mask, kind):
    q, k, _ = inputs(batch=1, heads=2, kv_heads=1, queries=499, keys=499, dtype=torch.float64)
    direction = torch.randn(7, dtype=torch.float64)
    place = torch.arange(499.0, dtype=torch.float64)[:, None]
    how = {
        "outlier": 1e4 * (place == 100),
        "trend": 10 * place,
        "step": 1e4 * (place > 250),
        "documents apart": 1e3 * (place // 4 % 7),
    }
    assert_as_squared_budget(q, k + how[kind] * direction, **any_mask(1, 2, 499, 499)[mask])


@given(
    left=st.integers(-1, 70),
    right=st.integers(-1, 70),
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    documents=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_a_rows_budget_of_any_window_and_documents(left, right, queries, keys, documents, seed):
    torch.manual_seed(seed)
    q = torch.randn(1, 2, queries, 3, dtype=torch.float64)
    k = torch.randn(1, 1, keys, 3, dtype=torch.float64) + 10
    ids = torch.randint(documents, (queries,)), torch.randint(documents, (keys,))
    holes = torch.rand(1, keys) < 0.8
    mask = Mask(window=(left, right), segments=ids if documents > 1 else None, keys=holes)
    if right == 0:
        mask = mask & Mask(causal="bottom_right")
    assert_as_squared_budget(q, k, attn_mask=mask)


@pytest.mark.parametrize("mask", ["none", "bottom right", "window", "boolean"])
def test_what_is_not_a_number_spoils_only_the_budgets_of_rows_that_see_it(mask):
    q, k, _ = inputs(queries=40, keys=40, dtype=torch.float64)
    k[0, 1, 20, 3] = math.inf
    q[1, 2, 30, 1] = math.nan
    found = assert_as_squared_budget(q, k, **any_mask(2, 6, 40, 40)[mask])
    assert found["key_bias"].isnan().any()
    assert found["key_bias"].isfinite().any()
    # Hidden, it does not matter.
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, 20] = False
    hidden = {"attn_mask": Mask(keys=real), "is_causal": "bottom_right"}
    found = assert_as_squared_budget(q, k, **hidden)
    assert found["key_spread"][0].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (1, 2, 1, 9)])
@pytest.mark.parametrize("mask", [{}, {"window": (2, 2)}, "tensor"])
def test_a_rows_budget_of_axes_of_length_zero_and_one(mask, shape):
    batch, heads, queries, keys = shape
    q, k = torch.randn(batch, heads, queries, 3), torch.randn(batch, 1, keys, 3)
    tensor = {"attn_mask": torch.ones(batch, heads, queries, keys, dtype=torch.bool)}
    found, _ = budget_of(q, k, **(tensor if mask == "tensor" else mask))
    for x in found.values():
        assert x.shape == (batch, heads, queries)
        assert x.dtype == torch.float64
        assert x.isnan().all() == (keys == 0 or not x.numel())


def test_the_mean_query_is_of_each_text_alone():
    """A batch is its texts; what is padding or sees nothing is not in the mean."""
    q, k, _ = inputs(queries=20, keys=20, dtype=torch.float64)
    both, _ = budget_of(q, k, is_causal=True)
    for b in range(2):
        alone, _ = budget_of(q[b : b + 1], k[b : b + 1], is_causal=True)
        for name, x in both.items():
            torch.testing.assert_close(x[b : b + 1], alone[name], rtol=1e-12, atol=0)
    real = torch.zeros(2, 20, dtype=torch.bool)
    found, _ = budget_of(q, k, real, is_causal=True)
    assert found["key_bias"][:, :, 1:].isnan().all()
    assert torch.equal(found["key_spread"], both["key_spread"])


def stats_of(q, k, **arguments):
    extra, rows = budget_of(q, k, **arguments)
    extra["query_norm"] = q.norm(dim=-1)
    scale = arguments.get("scale", 1 / math.sqrt(q.shape[-1]))
    return HeadStats.of(rows, scale=scale, d_k=q.shape[-1], kv_heads=k.shape[1], extra=extra)


def test_the_width_of_a_module_is_the_mean_over_the_rows_of_all_texts():
    texts = [inputs(batch=b, queries=n, keys=n, dtype=torch.float64)[:2] for b, n in
             ((1, 40), (2, 7), (1, 1))]  # fmt: skip
    texts = [(shifted(q, 1), shifted(k, 2)) for q, k in texts]
    stats = None
    within, bias, spread, norm = [], [], [], []
    for q, k in texts:
        more = stats_of(q, k, is_causal=True)
        stats = more if stats is None else merge_heads(stats, more)
        t = trace(q, k, is_causal=True, enable_gqa=True)
        two = t.rows.visible[0, 0] > 1
        want = squared_budget(q, k, is_causal=True)
        columns = (t.rows.score_var, want["key_bias"], want["key_spread"])
        for total, x in zip((within, bias, spread), columns, strict=True):
            total.append(x[:, :, two].transpose(0, 1).flatten(1))
        norm.append(q.square().sum(-1).transpose(0, 1).flatten(1))
    within, bias, spread, norm = (torch.cat(x, 1).mean(1) for x in (within, bias, spread, norm))
    w = width_factors(stats)
    close("within", w.within, within, ERROR)
    close("key_bias", w.key_bias, bias, ERROR)
    close("interaction", w.interaction, within - bias, ERROR, within)
    close("query_norm", w.query_norm, norm.sqrt(), ERROR)
    close("key_spread", w.key_spread, spread.sqrt(), ERROR)
    close("norms", w.norms, (norm * spread).sqrt() / 7, ERROR)
    close("row_shift", w.row_shift, stats.scaled.row_shift, ERROR)
    close("total", w.total, w.interaction + w.key_bias + w.row_shift, ERROR)
    close("ratio", w.ratio, within.sqrt(), ERROR)
    close("unit_scale", w.unit_scale, within.rsqrt() / math.sqrt(7), ERROR)
    close("effective_d_k", w.effective_d_k, 7 * 7 * within * 7 / (norm * spread), ERROR)
    assert torch.allclose(w.scale, torch.ones_like(w.scale))


def test_in_full_attention_the_width_is_the_budgets():
    q, k, _ = inputs(batch=1, queries=31, keys=43, dtype=torch.float64)
    q, k = shifted(q, 2), shifted(k, 3)
    w = width_factors(stats_of(q, k, scale=0.7))
    b = score_moments(q, k, scale=0.7, enable_gqa=True).budget
    for name in ("total", "interaction", "row_shift", "key_bias", "scale", "norms", "alignment",
                 "query_norm", "key_spread", "effective_d_k", "ratio", "unit_scale"):  # fmt: skip
        close(name, getattr(w, name), getattr(b, name)[0], ERROR, 1e-2)
    assert str(w) == str(b).replace("head 0.", "head ")


def test_the_width_of_calls_with_different_scales_and_of_none():
    q, k, _ = inputs(batch=1, dtype=torch.float64)
    a, b = stats_of(q, k, scale=0.5), stats_of(q, k, scale=-1.0)
    w = width_factors(merge_heads(a, b))
    close("scale", w.scale, torch.full_like(w.scale, math.sqrt(7 * (0.25 + 1) / 2)), ERROR)
    close("ratio", w.ratio, w.within.sqrt(), ERROR)
    w = width_factors(stats_of(q, k[:, :, :1]))
    assert w.ratio.isnan().all()
    assert "no width" in str(w)
    with pytest.raises(ValueError, match="no key_bias and no key_spread"):
        width_factors(HeadStats.of(row_stats(q, k, enable_gqa=True), scale=1.0, d_k=7, kv_heads=3,
                                   extra={"query_norm": q.norm(dim=-1)}))  # fmt: skip

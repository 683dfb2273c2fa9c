"""The kernel in plain torch, held against the oracle."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from oracle import LOWEST, MASKS, double, inputs, masks
from scaledot import checks, dispatch
from scaledot.dispatch import mass_bound
from scaledot.kernels import tiled
from scaledot.masks import Mask, resolve
from scaledot.stages import trace

attention = partial(dispatch.attention, kernel="tiled")
assert_as_trace = partial(oracle.assert_as_trace, attend=attention)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPE = {"batch": 2, "heads": 6, "queries": 11, "keys": 13}
GROUPED = {"enable_gqa": True}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 5 keys and 13 rows, so that every row is merged from several."""
    monkeypatch.setattr(tiled, "BLOCK", 5 * 13)
    monkeypatch.setattr(tiled, "_keys_at_once", lambda _: 5)


# Forward


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_every_statistic_are_the_oracles(mask, dtype):
    assert_as_trace(*inputs(dtype=dtype), **GROUPED, **masks(**SHAPE)[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("softcap", "sink", "dtype"),
    [(None, 0, torch.float32), (1.5, 0, torch.float64), (None, 1, torch.float64),
     (1.5, 1, torch.float32)],
)  # fmt: skip
@pytest.mark.usefixtures("small_blocks")
def test_many_blocks_merge_to_the_oracle(mask, softcap, sink, dtype):
    extra = {"softcap": softcap, "sinks": torch.randn(6, dtype=dtype) if sink else None}
    assert_as_trace(*inputs(dtype=dtype), **GROUPED, **masks(**SHAPE)[mask], **extra)


@settings(max_examples=150)
@given(
    shape=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "kv_heads": st.integers(1, 3),
            "queries": st.sampled_from([0, 1, 2, 7, 19]),
            "keys": st.sampled_from([0, 1, 3, 11, 23]),
            "d_k": st.sampled_from([1, 2, 5, 17]),
            "d_v": st.sampled_from([1, 3, 8]),
        }
    ),
    group=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    names=st.lists(st.sampled_from(MASKS), max_size=2, unique=True),
    layout=st.sampled_from(["contiguous", "transposed", "expanded"]),
    stretch=st.sampled_from([0.0, 1.0, 8.0]),
    extra=st.fixed_dictionaries(
        {
            "softcap": st.sampled_from([None, 0.7, 50.0]),
            "scale": st.sampled_from([None, 0.0, -1.0, 0.3]),
        }
    ),
    sink=st.booleans(),
)
@pytest.mark.usefixtures("small_blocks")
def test_any_problem_is_the_oracles(shape, group, dtype, names, layout, stretch, extra, sink):
    """Any shape, dtype and layout, with up to two masks at once."""
    heads = shape["kv_heads"] * group
    q, k, v = inputs(heads=heads, dtype=dtype, **shape)
    if layout == "transposed":
        q, k, v = q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, v
    elif layout == "expanded":
        k, v = k[:1].expand_as(k), v[:, :1].expand_as(v)
    mask, window = Mask(), None
    if shape["queries"] and shape["keys"]:
        known = masks(shape["batch"], heads, shape["queries"], shape["keys"])
        for name in names:
            one = dict(known[name])
            window = one.pop("window", window)
            mask = together(mask, one.pop("attn_mask", None), one.pop("is_causal", None))
    if isinstance(window, int) and mask.causal is None:
        mask = Mask(causal="top_left") & mask
    sinks = torch.randn(heads) if sink else None
    assert_as_trace(q * stretch, k, v, mask, window=window, sinks=sinks, enable_gqa=True, **extra)


def together(mask, dense, causal):
    """Both masks where they can be combined, else the first."""
    try:
        mask = mask & Mask(causal=causal)
        return mask if dense is None else mask & dense
    except (TypeError, ValueError) as error:
        assert str(error).startswith("Mask & Mask")  # noqa: PT017
        return mask


@pytest.mark.parametrize("queries", [0, 1, 7, 17])
@pytest.mark.parametrize("keys", [0, 1, 7, 601])
def test_any_length_is_the_oracles(queries, keys):
    q, k, v = inputs(queries=queries, keys=keys)
    out, rows, _ = assert_as_trace(q, k, v, **GROUPED)
    assert out.shape == (2, 6, queries, 5)
    assert rows.entropy.shape == (2, 6, queries)
    if keys == 0:
        assert (out == 0).all()
        assert (rows.lse == -math.inf).all()


def test_a_long_row_is_the_oracles():
    q, k, v = inputs(batch=1, heads=2, kv_heads=1, queries=67, keys=4097)
    assert_as_trace(q, k, v, is_causal="bottom_right", **GROUPED)


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_extreme_scores_keep_the_bound(size, sink, dtype):
    """Scores of ±1e4: what is rounded at the size of a logit is a logit, once."""
    q, k, v = inputs(dtype=dtype)
    largest = (q @ k.repeat_interleave(2, 1).mT).abs().amax()
    sinks = torch.linspace(-size, size, 6, dtype=dtype) if sink else None
    assert_as_trace(q, k, v, scale=float(size / largest), sinks=sinks, **GROUPED)


@pytest.mark.usefixtures("small_blocks")
def test_one_dominant_key_leaves_its_exact_rest():
    """A row whose others weigh 1e-30 together: 1 − p_max would be 0 by subtraction."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.zeros(1, 1, 11, 1)
    k[0, 0, 3] = math.log(10 * 1e30)
    _, rows, _ = assert_as_trace(q, k, torch.randn(1, 1, 11, 2), scale=1.0, same_key=True)
    assert rows.jacobian_trace.item() == pytest.approx(2e-30, rel=1e-5)
    assert rows.top_margin.item() == pytest.approx(30 * math.log(10), rel=1e-6)
    assert rows.entropy.item() == pytest.approx(1e-30 * (1 + math.log(1e31)), rel=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_ties_go_to_the_first_key():
    q, k, v = inputs(keys=17)
    k = k[:, :, :1].expand(-1, -1, 17, -1).round()
    k[:, :, 0] -= 5 * q.sign().mean((1, 2))[:, None]
    _, rows, _ = assert_as_trace(q.round(), k.round(), v, scale=1.0, same_key=True, **GROUPED)
    equal = attention(torch.ones(3, 2), torch.ones(13, 2), torch.ones(13, 5), return_stats=True)[1]
    assert equal.top_key.tolist() == [0, 0, 0]
    assert equal.top_margin == pytest.approx(torch.full((3,), -math.log(12)))
    assert equal.entropy == pytest.approx(torch.full((3,), math.log(13)))
    assert rows.top_key.dtype == torch.int32


@pytest.mark.parametrize("layout", ["transposed", "permuted", "expanded", "sliced", "reversed"])
def test_strides_change_nothing(layout):
    q, k, v = inputs(heads=3)
    views = {
        "transposed": lambda x: x.mT.contiguous().mT,
        "permuted": lambda x: x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1),
        "expanded": lambda x: x[:1, :1].expand(2, 3, -1, -1),
        "sliced": lambda x: torch.randn(2, 3, 2 * x.shape[2], 3 * x.shape[3])[:, :, ::2, ::3],
        "reversed": lambda x: x.flip(2).transpose(0, 1).contiguous().transpose(0, 1),
    }
    q, k, v = map(views[layout], (q, k, v))
    out, rows = attention(q, k, v, return_stats=True)
    plain, same = attention(*(x.contiguous() for x in (q, k, v)), return_stats=True)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(rows.entropy, same.entropy, rtol=0, atol=1e-6)
    assert_as_trace(q, k, v)


@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("small_blocks")
def test_what_is_no_number_spoils_the_rows_that_see_it_and_no_other(where, what):
    q, k, v = inputs()
    bias = torch.zeros(1, 1, 11, 13)
    if where == "query":
        q[0, 1, 9] = what
    elif where == "key":
        k[0, 1, 9] = what
    elif where == "value":
        v[0, 1, 9] = what
    else:
        bias[0, 0, 9, 8] = what
    out, rows, exact = assert_as_trace(q, k, v, bias, is_causal="top_left", **GROUPED)
    spoilt = out.isnan().any(-1)
    assert spoilt.any() == (where != "bias" or what != -math.inf)
    assert not spoilt[:, :, :9].any()
    assert torch.equal(rows.nonfinite, spoilt & (where != "value"))
    assert torch.equal(exact.weights.isnan().any(-1), rows.nonfinite)


@pytest.mark.parametrize("hide", ["bool", "−∞", "finfo.min", "lengths", "causal"])
@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.usefixtures("small_blocks")
def test_what_is_masked_never_matters(hide, what):
    """Not in the output, the statistics or any gradient."""
    hidden = torch.arange(13) >= 9
    zero = torch.zeros(13)
    arguments = {
        "bool": {"attn_mask": ~hidden},
        "−∞": {"attn_mask": zero.masked_fill(hidden, -math.inf)},
        "finfo.min": {"attn_mask": zero.masked_fill(hidden, LOWEST)},
        "lengths": {"attn_mask": Mask(lengths=[9])},
        "causal": {"is_causal": "top_left"},
    }[hide]
    q, k, v = inputs(queries=9)
    spoilt_k, spoilt_v = k.clone(), v.clone()
    spoilt_k[:, :, 9:], spoilt_v[:, :, 9:] = what, what

    def run(k, v):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out, rows = attention(*tensors, **arguments, **GROUPED, return_stats=True)
        (out.square().sum() + rows.entropy.sum() + rows.lse.sum()).backward()
        return out, rows, [x.grad for x in tensors]

    out, rows, grads = run(spoilt_k, spoilt_v)
    plain, same, plain_grads = run(k, v)
    assert torch.equal(out, plain)
    assert not rows.nonfinite.any()
    assert torch.equal(rows.entropy, same.entropy)
    assert torch.equal(rows.score_var, same.score_var)
    for grad, want in zip(grads, plain_grads, strict=True):
        assert torch.equal(grad, want)


@pytest.mark.usefixtures("small_blocks")
def test_a_value_that_is_no_number_counts_however_little_it_weighs():
    q, k = torch.ones(1, 1), torch.zeros(11, 1)
    k[10] = 1000.0
    v = torch.zeros(11, 2)
    v[0, 1] = math.nan
    out, _, _ = assert_as_trace(q, k, v, scale=1.0)
    assert out.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.usefixtures("small_blocks")
def test_a_row_of_finfo_min_keeps_torchs_output_and_counts_as_empty(value):
    q, k, v = inputs(heads=3)
    v[0, 0, 0, 0] = value
    bias = torch.zeros(11, 13)
    bias[4] = LOWEST
    bias[5, :12] = LOWEST
    bias[6, 3:] = LOWEST
    out, rows, _ = assert_as_trace(q, k, v, bias)
    torch.testing.assert_close(
        out[:, :, 4].nan_to_num(), v.mean(2).nan_to_num() * (v == v).all(2), rtol=1e-5, atol=1e-6
    )
    assert rows.visible[0, 0].tolist() == [13] * 4 + [0, 1, 3] + [13] * 4
    assert (rows.lse[:, :, 4] == -math.inf).all()
    assert rows.top_margin[:, :, 5].eq(87).all()


@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_finfo_min_leave_no_trace_in_the_statistics():
    """13 keys hidden by finfo.min, more than one block of them, against two that are seen."""
    bias = torch.full((13,), LOWEST)
    bias[:2] = 0
    q, k, v = inputs(heads=3)
    _, rows, _ = assert_as_trace(q, k, v, bias)
    assert rows.entropy.isfinite().all()
    assert (rows.visible == 2).all()


def test_statistics_change_no_bit_of_the_output():
    q, k, v = inputs()
    for arguments in masks(**SHAPE).values():
        alone = attention(q, k, v, **GROUPED, **arguments)
        assert torch.equal(alone, attention(q, k, v, **GROUPED, **arguments, return_stats=True)[0])


# Backward


def gradients(function, tensors, *arguments, **named):
    tensors = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    result = function(*tensors, *arguments, **named)
    return torch.autograd.grad(result, [x for x in tensors if x is not None])


def loss(out, lse, entropy, visible):
    """One number that feels output, lse and entropy, each of its parts with its own weight."""
    weigh = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    seen = visible > 0
    weigh_rows = torch.linspace(1, 2, lse.numel(), dtype=out.dtype).view_as(lse)
    return (
        (out * weigh).sum()
        + (lse[seen] * weigh_rows[seen]).sum()
        + (entropy[seen] * weigh_rows[seen].square()).sum()
    )


def fused(q, k, v, bias=None, sinks=None, *, attn_mask=None, **arguments):
    if bias is not None:
        attn_mask = bias if attn_mask is None else attn_mask & bias
    out, rows = attention(q, k, v, attn_mask, sinks=sinks, return_stats=True, **arguments)
    return loss(out, rows.lse, rows.entropy, rows.visible)


@pytest.mark.parametrize(
    "mask", ["none", "bottom right", "window to both sides", "bool", "causal documents"]
)
@pytest.mark.parametrize("capped", [False, True])
def test_gradients_are_those_of_finite_differences(mask, capped, monkeypatch):
    """Of query, key, value, bias and sinks, through output, lse and entropy."""
    monkeypatch.setattr(tiled, "_keys_at_once", lambda _: 3)
    shape = {"batch": 1, "heads": 2, "queries": 3, "keys": 5}
    arguments = {**masks(**shape)[mask], "enable_gqa": True, "softcap": 2.0 if capped else None}
    tensors = inputs(**shape, kv_heads=1, d_k=2, d_v=2, dtype=torch.float64)
    bias, sinks = torch.randn(1, 2, 3, 1, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in (*tensors, bias, sinks)]
    given = arguments.pop("attn_mask", Mask())
    given = given if isinstance(given, Mask) else Mask(dense=given)

    def call(q, k, v, bias, sinks):
        return fused(q, k, v, bias, sinks, attn_mask=given, **arguments)

    assert torch.autograd.gradcheck(call, tensors)


def by_definition(q, k, v, bias=None, sinks=None, *, attn_mask=None, **arguments):
    if bias is not None:
        attn_mask = bias if attn_mask is None else attn_mask & bias
    t = trace(q, k, v, attn_mask, sinks=sinks, **arguments)
    rows = t.rows
    return loss(t.output, rows.lse, rows.entropy, rows.visible)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", ["plain", "soft-cap and sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_gradients_are_those_of_the_definition(mask, extra, dtype):
    arguments = {**GROUPED, **masks(**SHAPE)[mask]}
    tensors = inputs(dtype=dtype)
    if extra != "plain":
        arguments["softcap"] = 2.0
        tensors = (*tensors, None, torch.randn(6, dtype=dtype))
    ours = gradients(fused, tensors, **arguments)
    exact = gradients(by_definition, [double(x) for x in tensors], **arguments)
    tolerance = mass_bound(dtype, largest_bias(arguments.get("attn_mask")))
    for one, other in zip(ours, exact, strict=True):
        assert other.abs().amax() > 0
        torch.testing.assert_close(
            one.double(), other, rtol=0, atol=tolerance * float(other.abs().amax())
        )


def largest_bias(mask):
    """What a logit may be as large as; beside 1e30 nothing of a score is left to be rounded."""
    dense = mask.dense if isinstance(mask, Mask) else mask
    if dense is None or not dense.is_floating_point():
        return 1.0
    return float(dense[dense.abs() < 1e30].abs().max())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_torch(is_causal, masked):
    q, k, v = inputs(heads=3, keys=11)
    mask = torch.randn(2, 1, 11, 11) if masked and not is_causal else None

    def ours(q, k, v):
        return attention(q, k, v, mask, is_causal=is_causal).square().sum()

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal).square().sum()

    for one, other in zip(gradients(ours, [q, k, v]), gradients(torchs, [q, k, v]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 6, 11, 13), (6, 1, 13), (1, 1, 11, 1), (13,), (11, 1)])
def test_a_broadcast_bias_gets_its_summed_gradient(shape):
    q, k, v = inputs(dtype=torch.float64)
    bias = torch.randn(shape, dtype=torch.float64)
    ours = gradients(fused, [q, k, v, bias], **GROUPED)[3]
    exact = gradients(by_definition, [q, k, v, bias], **GROUPED)[3]
    assert ours.shape == shape
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_only_the_bias_may_need_a_gradient():
    q, k, v = inputs(heads=3)
    bias = torch.randn(11, 13, requires_grad=True)
    attention(q, k, v, bias).square().sum().backward()
    assert bias.grad.abs().amax() > 0


@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_extreme_scores_lose_nothing_to_the_size_of_lse():
    """Weights rebuilt from lse would be off by the rounding of 1e4, 5e-4."""
    q, k, v = inputs(heads=3, d_k=2)
    q, k = q.round() * 64, k.round()
    bias = torch.full((13,), 8192.0)
    sinks = torch.full((3,), 8192.0)
    scale = 1 / 64
    ours = gradients(fused, [q, k, v], bias, sinks, scale=scale)
    exact = gradients(
        by_definition, [q.double(), k.double(), v.double()], bias, sinks.double(), scale=scale
    )
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_empty_rows_pass_no_gradient():
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    mask = torch.ones(11, 13, dtype=torch.bool)
    mask[4] = False
    out, rows = attention(q, k, v, mask, return_stats=True)
    (out.sum() + rows.lse.sum() + rows.entropy.nansum()).backward()
    assert (q.grad[:, :, 4] == 0).all()
    assert q.grad[:, :, 5].abs().amax() > 0
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    alone = attention(q, k, v, mask[4:5].expand(11, -1), return_stats=True)
    grads = torch.autograd.grad(
        alone[0].sum() + alone[1].lse.sum() + alone[1].entropy.sum(), [q, k, v]
    )
    assert all((x == 0).all() for x in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_inputs_dtypes(dtype):
    q, k, v = (x.requires_grad_() for x in inputs(dtype=dtype))
    bias = torch.randn(11, 13, requires_grad=True)
    sinks = torch.randn(6, dtype=torch.bfloat16, requires_grad=True)
    attention(q, k, v, bias, sinks=sinks, **GROUPED).sum().backward()
    for x in (q, k, v, bias, sinks):
        assert x.grad.dtype == x.dtype
        assert x.grad.abs().amax() > 0


def test_every_other_statistic_is_marked_as_without_gradient():
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    rows = attention(q, k, v, sinks=torch.randn(3), return_stats=True)[1]
    with_gradient = {n for n, x in vars(rows).items() if getattr(x, "requires_grad", False)}
    assert with_gradient == {"lse", "entropy"}


def test_double_backward_raises():
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    (grad,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_no_way_around_attention_to_a_second_gradient():
    """A weight that both the loss and its gradient depend on, with attention between."""
    weight, x = torch.randn(7, 7, requires_grad=True), inputs(heads=3)[0].requires_grad_()
    q = x @ weight
    (grad,) = torch.autograd.grad(attention(q, q, q).sum(), x, create_graph=True)
    for end in (weight, x):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(grad.square().sum(), end, retain_graph=True)


# Dropout


def kept_weights(q, k, p, seed):
    """What dropout keeps, read off by giving each key a value of its own."""
    torch.manual_seed(seed)
    one_hot = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-1], k.shape[-2])
    return attention(q, k, one_hot, dropout_p=p, **GROUPED)


def test_dropout_keeps_the_stated_share_of_the_true_weights(monkeypatch):
    monkeypatch.setattr(tiled, "BLOCK", 5 * 499)
    monkeypatch.setattr(tiled, "_keys_at_once", lambda _: 5)
    q, k, _ = inputs(queries=101, keys=103, dtype=torch.float64)
    dropped = kept_weights(q, k, 0.3, seed=5)
    weights = trace(q, k, enable_gqa=True).weights
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.7, rtol=1e-10, atol=0)
    share = kept.double().mean()
    assert abs(share - 0.7) < 4 * math.sqrt(0.21 / kept.numel())
    # No block repeats another's draw: any two blocks of a row agree as chance has it.
    first, second = kept[..., :5], kept[..., 5:10]
    agree = (first == second).double().mean()
    assert abs(agree - 0.58) < 4 * math.sqrt(0.58 * 0.42 / first.numel())


@pytest.mark.usefixtures("small_blocks")
def test_no_two_blocks_share_a_draw():
    """Every block has a number of its own, and the number reaches the generator's seed, of which
    the CPU reads 32 bits."""
    q, k, _ = inputs(keys=17)
    seen = resolve(checks.problem(q, k, None, enable_gqa=True), is_causal="bottom_right")
    numbers = [n for tile in tiled._tiles(q, k) for n, *_ in tiled._key_blocks(seen, tile)]
    assert len(numbers) > 12
    assert len(set(numbers)) == len(numbers)
    terms = tiled.Terms(1.0, None, None, 0.5, seed=(1 << 61) + 3)
    like = torch.zeros(7, 11)
    draws = {tuple(tiled._kept(like, terms, n).flatten().tolist()) for n in range(1000)}
    assert len(draws) == 1000


@pytest.mark.usefixtures("small_blocks")
def test_dropout_follows_the_seed_and_leaves_statistics_alone():
    q, k, v = inputs()
    torch.manual_seed(3)
    out, rows = attention(q, k, v, dropout_p=0.5, return_stats=True, **GROUPED)
    other = attention(q, k, v, dropout_p=0.5, **GROUPED)
    torch.manual_seed(3)
    assert torch.equal(out, attention(q, k, v, dropout_p=0.5, **GROUPED))
    assert not torch.equal(out, other)
    plain = attention(q, k, v, return_stats=True, **GROUPED)[1]
    assert torch.equal(rows.entropy, plain.entropy)
    assert torch.equal(rows.collision, plain.collision)


@pytest.mark.usefixtures("small_blocks")
def test_dropout_is_replayed_in_backward():
    """Gradients of the definition, with the weights that the same seed keeps."""
    q, k, v = inputs(dtype=torch.float64)
    kept = (kept_weights(q, k, 0.4, seed=7) != 0).double() / 0.6

    def ours(q, k, v):
        torch.manual_seed(7)
        out, rows = attention(q, k, v, dropout_p=0.4, return_stats=True, **GROUPED)
        return loss(out, rows.lse, rows.entropy, rows.visible)

    def exact(q, k, v):
        t = trace(q, k, **GROUPED)
        out = (t.weights * kept) @ v.repeat_interleave(2, 1)
        return loss(out, t.rows.lse, t.rows.entropy, t.rows.visible)

    for one, other in zip(gradients(ours, [q, k, v]), gradients(exact, [q, k, v]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


# Memory


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor made inside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("mask", ["none", "causal", "window", "lengths", "documents"])
def test_nothing_quadratic_is_made_forward_or_backward(mask, monkeypatch):
    n, d = 1031, 3
    monkeypatch.setattr(tiled, "BLOCK", 1 << 14)
    arguments = {
        "none": {},
        "causal": {"is_causal": True},
        "window": {"window": 17},
        "lengths": {"attn_mask": Mask(lengths=[n - 5])},
        "documents": {"attn_mask": Mask(segments=torch.arange(n) // 100, causal="top_left")},
    }[mask]
    q, k, v = (torch.randn(1, 1, n, d, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        out, rows = attention(q, k, v, return_stats=True, **arguments)
        (out.sum() + rows.entropy.sum()).backward()
    assert largest.numel <= 1 << 14


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kernel", ["tiled", "auto"])
def test_statistics_of_32768_keys_fit_in_200_megabytes(kernel):
    """The peak of a process of its own, not ru_maxrss, which is inherited from this one."""
    script = """
import sys
import torch
from functools import partial
import scaledot
attention = partial(scaledot.attention, kernel=sys.argv[1])
torch.set_num_threads(1)

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

q, k, v = torch.randn(3, 1, 1, 32768, 64).unbind()
attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], is_causal=True, return_stats=True)
before = peak()
out, rows = attention(q, k, v, is_causal=True, return_stats=True)
print(peak() - before, int(rows.visible[0, 0, -1]))
"""
    result = subprocess.run(
        [sys.executable, "-c", script, kernel],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    megabytes, visible = result.stdout.split()
    assert 0 < float(megabytes) < 200
    assert int(visible) == 32768

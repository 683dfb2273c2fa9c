"""The native kernel, both variants, held against the oracle and against `tiled` in float64."""

import ctypes
import math
import mmap
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import LOWEST, MASKS, assert_as_trace, inputs, masks
from scaledot import checks
from scaledot.kernels import Terms, native, tiled
from scaledot.masks import Mask, resolve

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPED = {"enable_gqa": True}
# More than one strip of rows and one block of keys, and no multiple of anything.
SHAPE = {"batch": 2, "heads": 6, "queries": 53, "keys": 157}

here = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))


def test_it_is_there_where_a_compiler_is():
    assert native.available() is None or not shutil.which("c++"), native.available()


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def variant(request, force_variant):
    """Each variant that this processor runs; SCALEDOT_ISA forces it."""
    force_variant(request.param)
    return request.param


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def problem(q, k, v, attn_mask=None, *, is_causal=False, window=None, **arguments):
    p = checks.problem(q, k, v, **arguments)
    seen = resolve(p, attn_mask, is_causal, window)
    return p, seen, Terms(p.scale, p.softcap, p.sinks, 0.0, 0)


def attend(q, k, v, attn_mask=None, *, return_stats=False, **arguments):
    """`attention` on this kernel."""
    p, seen, terms = problem(q, k, v, attn_mask, **arguments)
    out, rows, _, _ = native.forward(p.query, p.key, p.value, seen, terms)
    out = p.restore(out.to(q.dtype))
    return (out, rows.map(p.restore)) if return_stats else out


def is_the_oracles(*args, answer=None, **arguments):
    """Of `attend`, or of row statistics that were computed before."""

    def answered(*args, **arguments):
        out, rows = attend(*args, **arguments)
        return (out, rows) if answer is None else (out, answer()[1])

    return assert_as_trace(*args, attend=answered, **GROUPED, **arguments)


# Forward


@here
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sink", [False, True])
def test_output_and_every_statistic_are_the_oracles(variant, mask, softcap, sink):
    q, k, v = inputs(**SHAPE, d_k=31, d_v=13)
    sinks = torch.linspace(-8, 8, 6) if sink else None
    is_the_oracles(q, k, v, **masks(**SHAPE)[mask], softcap=softcap, sinks=sinks)


@here
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "bottom right", "bool", "additive, finfo.min"])
def test_half_precision_is_widened_not_rounded(variant, dtype, mask):
    q, k, v = inputs(**SHAPE, d_k=32, d_v=24, dtype=dtype)
    is_the_oracles(q, k, v, **masks(**SHAPE)[mask])


@here
@settings(max_examples=200)
@given(
    shape=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            "kv_heads": st.integers(1, 3),
            "queries": st.sampled_from([0, 1, 2, 3, 7, 24, 25, 97]),
            "keys": st.sampled_from([0, 1, 3, 31, 128, 131, 300]),
            "d_k": st.sampled_from([1, 2, 5, 8, 17, 64, 129]),
            "d_v": st.sampled_from([1, 3, 8, 12, 33, 64]),
        }
    ),
    group=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(MASKS),
    layout=st.sampled_from(["contiguous", "heads inside", "columns", "expanded"]),
    stretch=st.sampled_from([0.0, 1.0, 4.0]),
    softcap=st.sampled_from([None, 0.7, 50.0]),
    scale=st.sampled_from([None, 0.0, -1.0, 0.3]),
    sink=st.booleans(),
)
def test_any_problem_is_the_oracles(
    shape, group, dtype, name, layout, stretch, softcap, scale, sink
):
    heads = shape["kv_heads"] * group
    q, k, v = inputs(heads=heads, dtype=dtype, **shape)
    if layout == "heads inside":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "columns":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    elif layout == "expanded":
        k, v = k[:1].expand_as(k), v[:, :1].expand_as(v)
    empty = 0 in (shape["queries"], shape["keys"])
    mask = {} if empty else masks(shape["batch"], heads, shape["queries"], shape["keys"])[name]
    sinks = torch.randn(heads) if sink else None
    is_the_oracles(q * stretch, k, v, **mask, softcap=softcap, scale=scale, sinks=sinks)


@here
@pytest.mark.parametrize("queries", [0, 1, 7, 200])
@pytest.mark.parametrize("keys", [0, 1, 7, 4097])
def test_any_length_is_the_oracles(variant, queries, keys):
    q, k, v = inputs(batch=1, heads=2, kv_heads=1, queries=queries, keys=keys, d_k=16)
    is_the_oracles(q, k, v)


@here
@pytest.mark.parametrize(("d_k", "d_v"), [(1, 512), (512, 1), (511, 65), (96, 100), (128, 128)])
def test_any_width_is_the_oracles(variant, d_k, d_v):
    q, k, v = inputs(queries=30, keys=140, d_k=d_k, d_v=d_v)
    is_the_oracles(q, k, v, is_causal="bottom_right")


@here
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("two_threads")
def test_few_queries_against_many_keys_are_the_oracles(variant, mask):
    """The decode path: keys cut into chunks, chunks joined."""
    shape = {"batch": 2, "heads": 6, "queries": 2, "keys": 1301}
    q, k, v = inputs(**shape, kv_heads=3, d_k=37, d_v=19)
    is_the_oracles(q, k, v, **masks(**shape)[mask], softcap=30.0, sinks=torch.randn(6))
    is_the_oracles(q, k, v, **masks(**shape)[mask])


@here
@pytest.mark.parametrize("queries", [2, 40])
def test_extreme_scores_keep_the_bound(variant, queries):
    q, k, v = inputs(queries=queries, keys=300)
    largest = (q @ k.repeat_interleave(2, 1).mT).abs().amax()
    is_the_oracles(q, k, v, scale=float(1e4 / largest), sinks=torch.linspace(-1e4, 1e4, 6))


@here
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("at", [0, 3, 260])
def test_one_dominant_key_leaves_its_exact_rest(variant, queries, at):
    q, k = torch.ones(1, 1, queries, 1), torch.zeros(1, 1, 261, 1)
    k[0, 0, at] = math.log(260 * 1e30)
    _, rows, _ = is_the_oracles(q, k, torch.randn(1, 1, 261, 2), scale=1.0, same_key=True)
    torch.testing.assert_close(
        rows.jacobian_trace, torch.full_like(rows.entropy, 2e-30), rtol=1e-5, atol=0
    )


@here
@pytest.mark.parametrize("queries", [1, 5])
def test_ties_go_to_the_first_key(variant, queries):
    q, k = torch.ones(1, 1, queries, 1), torch.zeros(1, 1, 300, 1)
    k[0, 0, 7::50] = 3.0
    _, rows, _ = is_the_oracles(q, k, torch.randn(1, 1, 300, 2), same_key=True)
    assert (rows.top_key == 7).all()
    _, rows, _ = is_the_oracles(q, 0 * k, torch.randn(1, 1, 300, 2), same_key=True)
    assert (rows.top_key == 0).all()


@here
def test_a_large_common_offset_leaves_the_variance(variant):
    """Scores of 4096 ± 1, all of them exact in float32."""
    q = torch.ones(1, 1, 40, 2)
    k = torch.stack([torch.full((300,), 4096.0), torch.randint(-64, 65, (300,)) / 64], -1)
    _, rows = attend(q, k[None, None], torch.randn(1, 1, 300, 2), scale=1.0, return_stats=True)
    want = k[:, 1].double().var(correction=0).expand_as(rows.score_var)
    torch.testing.assert_close(rows.score_var.double(), want, rtol=1e-4, atol=0)


@here
def test_threads_and_statistics_change_no_bit(variant):
    q, k, v = inputs(**SHAPE, d_k=40)
    p, seen, terms = problem(q, k, v, is_causal="bottom_right", **GROUPED)
    out, rows, top, mass = native.forward(p.query, p.key, p.value, seen, terms)
    torch.set_num_threads(2)
    try:
        other, same, _, _ = native.forward(p.query, p.key, p.value, seen, terms)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(out, other)
    assert torch.equal(rows.entropy, same.entropy)
    bare, few, top_bare, mass_bare = native.forward(
        p.query, p.key, p.value, seen, terms, statistics=False
    )
    assert torch.equal(out, bare)
    assert torch.equal(top, top_bare)
    assert torch.equal(mass, mass_bare)
    assert torch.equal(rows.lse, few.lse)
    none, alone, _, _ = native.forward(p.query, p.key, None, seen, terms)
    assert none is None
    assert torch.equal(alone.entropy, rows.entropy)


# Statistics alone, at several scales


@here
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sink", [False, True])
def test_a_scale_sweep_is_the_oracles_at_each_scale(variant, mask, sink):
    """Octaves by squaring, a factor of its own, one at 0, and one asked for twice."""
    factors = (2.0, 0.5, 4.0, 1.0, 3.0, 0.0, 8.0, 16.0, 2.0, -1.0)
    q, k, v = inputs(**SHAPE, d_k=9)
    sinks = torch.linspace(-3, 3, 6) if sink else None
    arguments = masks(**SHAPE)[mask]
    p, seen, terms = problem(q, k, v, sinks=sinks, scale=1 / 9, **arguments, **GROUPED)
    swept, _ = native.sweep(p.query, p.key, seen, terms, factors)
    assert len(swept) == len(factors)
    for factor, rows in zip(factors, swept, strict=True):
        is_the_oracles(
            q, k, v, **arguments, sinks=sinks, scale=factor / 9,
            answer=lambda found=rows: (None, found),
        )  # fmt: skip


# What is no number


@here
@pytest.mark.parametrize("queries", [2, 30])
@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_it_spoils_the_rows_that_see_it_and_no_other(variant, where, what, queries):
    q, k, v = inputs(queries=queries, keys=150)
    bias = torch.zeros(1, 1, queries, 150)
    {"query": q[0, 1, 1:2], "key": k[0, 1, 149:], "value": v[0, 1, 149:, :2],
     "bias": bias[0, 0, 1, :1]}[where].fill_(what)  # fmt: skip
    out, _, _ = is_the_oracles(q, k, v, bias, is_causal="bottom_right")
    assert not out[:, :, 0].isnan().any()


@here
@pytest.mark.parametrize("hide", ["bool", "−∞", "finfo.min", "lengths", "causal"])
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_is_masked_never_matters_forward_or_backward(variant, hide, what):
    hidden = torch.arange(150) >= 131
    zero = torch.zeros(150)
    arguments = {
        "bool": {"attn_mask": ~hidden},
        "−∞": {"attn_mask": zero.masked_fill(hidden, -math.inf)},
        "finfo.min": {"attn_mask": zero.masked_fill(hidden, LOWEST)},
        "lengths": {"attn_mask": Mask(lengths=[131])},
        "causal": {"is_causal": "top_left"},
    }[hide]
    q, k, v = inputs(queries=131, keys=150)
    spoilt_k, spoilt_v = k.clone(), v.clone()
    spoilt_k[:, :, 131:], spoilt_v[:, :, 131:] = what, what
    plain, spoilt = (both(q, *kv, **arguments) for kv in ((k, v), (spoilt_k, spoilt_v)))
    for one, other in zip(plain, spoilt, strict=True):
        assert torch.equal(one, other)


# Backward


def both(q, k, v, attn_mask=None, kernel=native, **arguments):
    """(output, lse, entropy, dQ, dK, dV, dbias, dsinks) on fixed random cotangents."""
    p, seen, terms = problem(q, k, v, attn_mask, **GROUPED, **arguments)
    out, rows, top, mass = kernel.forward(p.query, p.key, p.value, seen, terms)
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, top, top)]
    grads = kernel.backward(
        p.query, p.key, p.value, seen, terms, top, mass, rows.entropy, rows.visible > 0, out, *draw,
        bias_gradient=True,
    )  # fmt: skip
    found = (grads.query, grads.key, grads.value, grads.bias, grads.sinks)
    return [out, rows.lse, rows.entropy.nan_to_num(), *(x for x in found if x is not None)]


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def assert_gradients(q, k, v, attn_mask=None, **arguments):
    ours = both(q, k, v, attn_mask, **arguments)
    arguments = {name: wide(x) for name, x in arguments.items()}
    exact = both(wide(q), wide(k), wide(v), attn_mask, kernel=tiled, **arguments)
    size = 1 + largest(attn_mask) / 32
    for one, other in zip(ours[3:], exact[3:], strict=True):
        assert one.dtype == torch.float32
        error = float((one.double() - other).abs().amax())
        assert error <= 2e-5 * size * float(other.abs().amax()) + 1e-7


def largest(mask):
    """What a bias adds to a logit's size; beside 1e30 nothing of a score is left to be rounded."""
    dense = mask.dense if isinstance(mask, Mask) else mask
    if dense is None or not dense.is_floating_point():
        return 0.0
    return float(dense[dense.abs() < 1e30].abs().max())


@here
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", [False, True])
def test_gradients_are_those_of_tiled_in_float64(variant, mask, extra):
    q, k, v = inputs(**SHAPE, d_k=19, d_v=11)
    more = {"softcap": 2.0, "sinks": torch.linspace(-3, 3, 6)} if extra else {}
    assert_gradients(q, k, v, **masks(**SHAPE)[mask], **more)


@here
@settings(max_examples=60)
@given(
    shape=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            "kv_heads": st.integers(1, 2),
            "queries": st.sampled_from([1, 2, 23, 97, 130]),
            "keys": st.sampled_from([1, 5, 96, 131, 200]),
            "d_k": st.sampled_from([1, 7, 16, 40]),
            "d_v": st.sampled_from([1, 8, 33]),
        }
    ),
    group=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    causal=st.sampled_from([False, "top_left", "bottom_right"]),
    threads=st.integers(1, 3),
)
def test_gradients_of_any_shape(shape, group, dtype, causal, threads):
    q, k, v = inputs(heads=shape["kv_heads"] * group, dtype=dtype, **shape)
    torch.set_num_threads(threads)
    try:
        assert_gradients(q, k, v, is_causal=causal)
    finally:
        torch.set_num_threads(1)


@here
@pytest.mark.parametrize("shape", [(2, 6, 53, 157), (6, 1, 157), (1, 1, 53, 1), (157,), (53, 1)])
def test_a_broadcast_bias_gets_its_summed_gradient(shape):
    q, k, v = inputs(**SHAPE)
    assert_gradients(q, k, v, torch.randn(shape))


@here
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_are_the_same_every_time(variant, heads):
    """One head on two threads too, whose keys are then shared out."""
    q, k, v = inputs(batch=1, heads=heads, kv_heads=heads, queries=300, keys=400, d_k=24)
    first = both(q, k, v, is_causal="bottom_right")
    for _ in range(5):
        for one, other in zip(first, both(q, k, v, is_causal="bottom_right"), strict=True):
            assert torch.equal(one, other)


# Memory, machines, limits


@here
@pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called by its Linux name")
@pytest.mark.parametrize("queries", [1, 2, 29])
@pytest.mark.parametrize("d", [1, 7, 8, 33])
def test_nothing_past_the_end_of_an_input_is_read(variant, queries, d):
    """Each input ends where an unreadable page begins: a read past it would end the process."""
    libc = ctypes.CDLL(None)
    kept = []

    def guarded(x):
        page = mmap.PAGESIZE
        room = -(-x.numel() * x.element_size() // page) * page
        area = mmap.mmap(-1, room + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert libc.mprotect(ctypes.c_void_p(start + room), page, 0) == 0
        kept.append(area)
        offset = room - x.numel() * x.element_size()
        y = torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
        return y.copy_(x)

    q, k, v = inputs(batch=1, heads=2, kv_heads=2, queries=queries, keys=139, d_k=d, d_v=d)
    mask = torch.rand(queries, 139) < 0.7
    for dense in (None, mask, torch.randn(queries, 139), torch.randn(queries, 139).half()):
        for cast in DTYPES:
            tensors = [guarded(x.to(cast)) for x in (q, k, v)]
            both(*tensors, None if dense is None else guarded(dense))
    ids = guarded(torch.arange(139, dtype=torch.int32)[None] // 5)
    keep = guarded(torch.rand(1, 139) < 0.7)
    both(*(guarded(x) for x in (q, k, v)), Mask(keys=keep, segments=(ids[:, :queries], ids)))


@here
def test_what_it_cannot_do_it_says():
    p, seen, terms = problem(*inputs(dtype=torch.float64), **GROUPED)
    with pytest.raises(
        ValueError, match=r"takes float32, bfloat16 and float16, not torch\.float64"
    ):
        native.forward(p.query, p.key, p.value, seen, terms)
    p, seen, terms = problem(*inputs(), **GROUPED)
    with pytest.raises(ValueError, match="no dropout"):
        native.forward(p.query, p.key, p.value, seen, replace(terms, dropout_p=0.5))


@pytest.mark.parametrize(
    ("setting", "said"),
    [("avx1024", r"SCALEDOT_ISA is 'avx1024': pass one of avx512, avx2, baseline"),
     ("", r"it was not compiled")],
)  # fmt: skip
def test_a_machine_without_it_hears_why(monkeypatch, tmp_path, setting, said):
    monkeypatch.setenv("SCALEDOT_ISA", setting)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native._library.cache_clear()
    try:
        assert said in native.available()
    finally:
        monkeypatch.undo()
        native._library.cache_clear()


@here
def test_memory_is_linear():
    """32,768 × 32,768 scores would be 4 GB; the process may take 1 GB of address space more."""
    code = """
import resource, torch
from scaledot import checks
from scaledot.kernels import Terms, native
from scaledot.masks import resolve
torch.set_num_threads(1)
q = torch.randn(1, 1, 32768, 4)
p = checks.problem(q, q, q)
seen, terms = resolve(p, None, True), Terms(p.scale, None, None, 0.0, 0)
few = q[:, :, :64]
native.forward(few, few, few, resolve(checks.problem(few, few, few), None, True), terms)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
out, rows, top, mass = native.forward(q, q, q, seen, terms)
native.backward(q, q, q, seen, terms, top, mass, rows.entropy, rows.visible > 0, out, out, None,
                None, False)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@here
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_a_visible_score_of_minus_infinity_spoils_its_row(variant, queries):
    q, k, v = torch.ones(1, 1, queries, 4), torch.randn(1, 1, 40, 4), torch.randn(1, 1, 40, 4)
    k[0, 0, 5] = -math.inf
    p, seen, terms = problem(q, k, v)
    out, rows, _, _ = native.forward(p.query, p.key, p.value, seen, terms)
    assert out.isnan().all()
    assert rows.nonfinite.all()
    assert (rows.visible == 40).all()
    hidden = torch.ones(1, 1, queries, 40, dtype=torch.bool)
    hidden[..., 5] = False
    p, seen, terms = problem(q, k, v, hidden)
    out, rows, _, _ = native.forward(p.query, p.key, p.value, seen, terms)
    assert out.isfinite().all()
    assert (rows.visible == 39).all()

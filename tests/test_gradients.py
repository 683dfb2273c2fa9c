"""What rows pass on of the output's gradient, held against autograd on n² weights in float64."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

from oracle import MASKS, inputs, masks
from scaledot import ScaledotError, checks, observe
from scaledot.dispatch import compute, mass_bound
from scaledot.heads import HeadStats, joined, transmission_of
from scaledot.kernels import Terms, native, tiled
from scaledot.masks import Mask, resolve
from scaledot.stages import trace

SHAPE = {"batch": 2, "heads": 6, "queries": 53, "keys": 157}
NAMES = ("norm", "variance", "transmission")

here = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))
KERNELS = [
    *(pytest.param(x, marks=here) for x in ("avx512", "avx2", "baseline")), "tiled",
]  # fmt: skip


@pytest.fixture(params=KERNELS)
def kernel(request, force_variant):
    """tiled, and each variant of native that this processor runs."""
    if request.param == "tiled":
        return tiled
    force_variant(request.param)
    return native


def backward(
    kernel, q, k, v, d_out, attn_mask=None, *, d_rows=False, rows=True, is_causal=False,
    window=None, dropout_p=0.0, **arguments,
):  # fmt: skip
    """A kernel's `Gradients` for d_out, those of lse and entropy beside it where d_rows."""
    p = checks.problem(q, k, v, enable_gqa=True, **arguments)
    seen = resolve(p, attn_mask, is_causal, window)
    terms = Terms(p.scale, p.softcap, p.sinks, dropout_p, 7)
    out, stats, top, mass = kernel.forward(p.query, p.key, p.value, seen, terms)
    d_lse = torch.linspace(-1, 1, top.numel()).view(top.shape) if d_rows else None
    return kernel.backward(
        p.query, p.key, p.value, seen, terms, top, mass, stats.entropy, stats.visible > 0, out,
        d_out, d_lse, d_lse, bias_gradient=True, rows=rows,
    )  # fmt: skip


def oracle(q, k, v, d_out, attn_mask=None, **arguments):
    """(norm, variance, transmission) by autograd through softmax on every weight, in float64."""
    q, k, v, d_out = (x.double() for x in (q, k, v, d_out))
    sinks = arguments.get("sinks")
    if sinks is not None:
        arguments["sinks"] = sinks.double()
    t = trace(q, k, v, attn_mask, enable_gqa=True, **arguments)
    group = q.shape[1] // k.shape[1]
    logits, visible = t.masked.detach(), t.visible.expand_as(t.masked).clone()
    value = v.repeat_interleave(group, 1)
    if sinks is not None:  # one more outcome, whose value is 0
        sink = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits.masked_fill(~visible, -math.inf), sink], -1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
        keys = visible.sum(-1)
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
    else:
        keys = visible.sum(-1)
    logits = logits.masked_fill(~visible, -math.inf).requires_grad_()
    weights = logits.softmax(-1).nan_to_num(0.0)
    (d_s,) = torch.autograd.grad((weights @ value * d_out).sum(), logits)
    d_s = d_s.nan_to_num(0.0)
    d_p = (d_out @ value.mT).masked_fill(~visible, 0.0)
    n = visible.sum(-1).double()
    mean = d_p.sum(-1, keepdim=True) / n[..., None]
    spread = (d_p - mean).masked_fill(~visible, 0.0).square().sum(-1)
    norm, empty = d_s.norm(dim=-1), keys == 0
    transmission = (n * norm / spread.sqrt()).masked_fill(keys < 2, math.nan)
    found = {"norm": norm, "variance": (d_s * d_p).sum(-1), "transmission": transmission}
    return {name: x.masked_fill(empty, math.nan) for name, x in found.items()}


def assert_rows(found, want, relative):
    for name in NAMES:
        actual, exact = getattr(found, name).double(), want[name]
        assert torch.equal(actual.isnan(), exact.isnan()), name
        there = ~exact.isnan()
        # Beside a row's own size, that of rounding in a typical one.
        slack = relative * (exact[there].abs() + exact[there].abs().median())
        assert bool(((actual - exact)[there].abs() <= slack).all()), name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", [False, True])
def test_rows_are_those_of_autograd_on_every_weight(kernel, mask, extra):
    q, k, v = inputs(**SHAPE, d_k=19, d_v=11)
    d_out = torch.randn(2, 6, 53, 11)
    more = {"softcap": 2.0, "sinks": torch.linspace(-3, 8, 6)} if extra else {}
    arguments = masks(**SHAPE)[mask] | more
    found = backward(kernel, q, k, v, d_out, **arguments).rows
    # A weight is rounded as its logit is, whose size a bias of −1e4 decides.
    relative = 3e-5 * (1e4 / 32 if mask.endswith("−1e4") else 1)
    assert_rows(found, oracle(q, k, v, d_out, **arguments), relative)


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize(
    "mask", ["none", "bottom right", "window", "bool", "additive", "documents"]
)
def test_in_float64_to_nine_digits(mask, extra):
    """Values and keys with a large common part too: what is centred does not cancel."""
    q, k, v = inputs(**SHAPE, d_k=19, d_v=11, dtype=torch.float64)
    k, v = k + 3, v + 20
    d_out = torch.randn(2, 6, 53, 11, dtype=torch.float64)
    more = {"softcap": 2.0, "sinks": torch.linspace(-3, 8, 6).double()} if extra else {}
    arguments = masks(**SHAPE)[mask] | more
    found = backward(tiled, q, k, v, d_out, **arguments).rows
    assert_rows(found, oracle(q, k, v, d_out, **arguments), 1e-9)


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_widened(dtype):
    q, k, v = inputs(**SHAPE, d_k=32, d_v=24, dtype=dtype)
    d_out = torch.randn(2, 6, 53, 24).to(dtype)
    want = oracle(q, k, v, d_out, is_causal="bottom_right")
    for kernel in (native, tiled):
        found = backward(kernel, q, k, v, d_out, is_causal="bottom_right").rows
        assert_rows(found, want, 3e-5)


@pytest.mark.parametrize("mask", ["none", "bottom right", "bool", "additive, finfo.min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits_with_and_without(kernel, mask, dtype):
    q, k, v = inputs(**SHAPE, d_k=19, d_v=11, dtype=dtype)
    d_out = torch.randn(2, 6, 53, 11)
    arguments = masks(**SHAPE)[mask] | {"softcap": 2.0, "sinks": torch.linspace(-3, 3, 6)}
    for d_rows in (False, True):
        on, off = (
            backward(kernel, q, k, v, d_out, **arguments, d_rows=d_rows, rows=rows)
            for rows in (True, False)
        )
        assert off.rows is None
        for name in ("query", "key", "value", "bias", "sinks"):
            one, other = getattr(on, name), getattr(off, name)
            assert one is other is None or torch.equal(one, other), name


def test_they_are_of_the_outputs_gradient_alone(kernel):
    q, k, v = inputs(**SHAPE)
    d_out = torch.randn(2, 6, 53, 5)
    alone, beside = (backward(kernel, q, k, v, d_out, d_rows=x).rows for x in (False, True))
    for name in NAMES:
        assert torch.equal(getattr(alone, name), getattr(beside, name))


def test_dropout_counts_what_reaches_the_weights():
    """Equal weights transmit 1 with dropout too, which changes dP and not the Jacobian."""
    q, k, v = inputs(**SHAPE)
    rows = backward(tiled, q * 0, k, v, torch.randn(2, 6, 53, 5), dropout_p=0.4).rows
    torch.testing.assert_close(rows.transmission, torch.ones(2, 6, 53), rtol=1e-5, atol=0)


# Saturated rows


def exactly(logits, d_p, sink=None):
    """(norm, variance, transmission) of one row from the definition, in 80 digits."""
    with mpmath.workdps(80):
        s, g = ([mpmath.mpf(float(x)) for x in xs] for xs in (logits, d_p))
        if sink is not None:
            s, g = [*s, mpmath.mpf(sink)], [*g, mpmath.mpf(0)]
        total = mpmath.fsum(map(mpmath.exp, s))
        p = [mpmath.exp(x) / total for x in s]
        delta = mpmath.fsum(x * y for x, y in zip(p, g, strict=True))
        d_s = [x * (y - delta) for x, y in zip(p, g, strict=True)]
        n = len(g)
        mean = mpmath.fsum(g) / n
        spread = mpmath.fsum((y - mean) ** 2 for y in g)
        norm = mpmath.sqrt(mpmath.fsum(x * x for x in d_s))
        variance = mpmath.fsum(x * y for x, y in zip(d_s, g, strict=True))
        return [float(x) for x in (norm, variance, n * norm / mpmath.sqrt(spread))]


@pytest.mark.parametrize("margin", [0, 1, 2, 5, 10, 20, 40, 60, 80])
@pytest.mark.parametrize("who", ["key", "sink"])
def test_a_saturated_row_is_exact(kernel, margin, who):
    """The heaviest outcome stands `margin` nats above the rest, down to 1e-35 of transmission.

    Bound: a weight's own error, mass_bound of a logit as large as the margin, and that of
    dP − δ, whose terms are rounded to float32 at their own size: 2 · 30 roundings in all.
    """
    n = 137
    k = torch.randn(1, 1, n, 1).clamp(-2, 2)
    k[..., 5, :] = 2.0 + (margin if who == "key" else 0)
    q = torch.tensor([1.0, 0.75]).view(1, 1, 2, 1)
    v = torch.randn(1, 1, n, 3)
    d_out = torch.randn(1, 1, 2, 3)
    sinks = torch.tensor([2.0 + margin]) if who == "sink" else None
    rows = backward(kernel, q, k, v, d_out, scale=1.0, sinks=sinks).rows
    for i in range(2):
        logits = (q[0, 0, i].double() * k[0, 0].double())[:, 0]
        d_p = v[0, 0].double() @ d_out[0, 0, i].double()
        want = exactly(logits, d_p, None if sinks is None else float(sinks))
        bound = mass_bound(torch.float32, 2.0 + margin) + 60 * 6e-8
        for name, exact in zip(NAMES, want, strict=True):
            found = float(getattr(rows, name)[0, 0, i])
            assert abs(found - exact) <= bound * exact, (name, found, exact)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_the_size_of_the_gradient_does_not_matter(kernel, size):
    q, k, v = inputs(**SHAPE)
    d_out = torch.randn(2, 6, 53, 5)
    one, other = (backward(kernel, q, k, v, x).rows for x in (d_out, d_out * size))
    torch.testing.assert_close(one.transmission, other.transmission, rtol=1e-5, atol=0)
    torch.testing.assert_close(one.norm * size, other.norm, rtol=1e-5, atol=0)


# Edges


def test_equal_weights_transmit_one_and_two_halves_the_most(kernel):
    q, k, v = inputs(**SHAPE)
    d_out = torch.randn(2, 6, 53, 5)
    rows = backward(kernel, q * 0, k, v, d_out, is_causal="bottom_right").rows
    torch.testing.assert_close(rows.transmission, torch.ones(2, 6, 53), rtol=1e-5, atol=0)
    # The bound n/2 is reached where two keys share the weight and differ, and no other does.
    n = 64
    k = torch.full((1, 1, n, 1), -200.0)
    k[..., :2, :] = 0.0
    v = torch.zeros(1, 1, n, 1)
    v[..., 0, :], v[..., 1, :] = 1.0, -1.0
    ones = torch.ones(1, 1, 1, 1)
    rows = backward(kernel, ones, k, v, ones, scale=1.0).rows
    torch.testing.assert_close(rows.transmission[0, 0, 0], torch.tensor(n / 2), rtol=1e-6, atol=0)


def test_rows_that_have_nothing_to_transmit_are_nan(kernel):
    q, k, v = inputs(queries=13, keys=13)
    d_out = torch.randn(2, 6, 13, 5)
    d_out[0, 0, 3] = 0.0
    v[:, 1] = v[:, 1, :1] * 3.7 + 41  # heads 2 and 3: every value the same
    rows = backward(kernel, q, k, v, d_out, Mask(lengths=[13, 0]), is_causal=True).rows
    missing = torch.zeros(2, 6, 13, dtype=torch.bool)
    missing[1] = missing[0, :, 0] = missing[0, 0, 3] = missing[0, 2:4] = True
    assert torch.equal(rows.transmission.isnan(), missing)
    assert torch.equal(rows.norm.isnan()[0], torch.zeros(6, 13, dtype=torch.bool))
    assert rows.norm[1].isnan().all()


def test_a_nan_spoils_its_own_row_alone(kernel):
    q, k, v = inputs(**SHAPE)
    d_out = torch.randn(2, 6, 53, 5)
    clean = backward(kernel, q, k, v, d_out).rows
    q[0, 1, 7], d_out[1, 2, 3] = math.nan, math.nan
    rows = backward(kernel, q, k, v, d_out).rows
    bad = torch.zeros(2, 6, 53, dtype=torch.bool)
    bad[0, 1, 7] = bad[1, 2, 3] = True
    for name in NAMES:
        assert torch.equal(getattr(rows, name).isnan(), bad)
        torch.testing.assert_close(getattr(rows, name)[~bad], getattr(clean, name)[~bad])


@here
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_keys_shared_among_threads_are_joined(threads):
    q, k, v = inputs(batch=1, heads=1, kv_heads=1, queries=70, keys=900)
    d_out = torch.randn(1, 1, 70, 5)
    torch.set_num_threads(threads)
    try:
        found = backward(native, q, k, v, d_out, is_causal="bottom_right").rows
    finally:
        torch.set_num_threads(1)
    assert_rows(found, oracle(q, k, v, d_out, is_causal="bottom_right"), 3e-5)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0)])
def test_no_queries_or_no_keys(kernel, queries, keys):
    q, k, v = inputs(queries=queries, keys=keys)
    rows = backward(kernel, q, k, v, torch.randn(2, 6, queries, 5)).rows
    assert rows.transmission.shape == (2, 6, queries)
    assert rows.transmission.isnan().all()


# What the scale does to gradients: the table of expected ones


EXPECTED = {  # d_k: (RMS, median, 10th percentile) without a scale; RMS at 1/√d_k; at 1/d_k
    16: ((2.23, 1.66, 7.9e-1), 0.42, 0.255),
    64: ((2.47, 1.48, 7.9e-2), 0.425, 0.252),
    256: ((2.11, 0.405, 4.6e-4), 0.41, 0.249),
}
"""‖dS‖ per row for q, k, v, dO of independent N(0, 1), n = 1024, d_v = 64, each from one draw."""


@here
@pytest.mark.parametrize("d_k", EXPECTED)
def test_without_a_scale_the_typical_row_vanishes_and_the_mean_square_does_not(d_k):
    """Held against a printed draw, so within what one head differs from another (3 of its σ): the
    rows of a head share their keys, and a few unlikely ones carry the mean square."""
    n, heads = 1024, 24
    q, k = (torch.randn(1, heads, n, d_k) for _ in range(2))
    v, d_out = (torch.randn(1, heads, n, 64) for _ in range(2))
    q, d_out = q[:, :, :256], d_out[:, :, :256]

    def per_head(scale):
        norm = backward(native, q, k, v, d_out, scale=scale).rows.norm[0]
        return torch.stack(
            [norm.square().mean(-1).sqrt(), norm.median(-1).values, norm.quantile(0.1, dim=-1)]
        )

    bare, *scaled = (per_head(x) for x in (1.0, d_k**-0.5, 1 / d_k))
    printed, *with_a_scale = EXPECTED[d_k]
    error = bare.mean(1) - torch.tensor(printed)
    assert bool((error.abs() <= 3 * bare.std(1)).all())
    for found, value in zip(scaled, with_a_scale, strict=True):
        # The printed value is rounded to half a hundredth at worst.
        assert abs(float(found[0].mean()) - value) <= 3 * float(found[0].std()) + 0.005
    # √(exp(variance of the scores)·d_v/n), while the scores are far from condensing.
    for found, variance in zip(scaled, (1.0, 1 / d_k), strict=True):
        want = math.sqrt(math.exp(variance) * 64 / n)
        assert float(found[0].mean()) == pytest.approx(want, rel=0.05)


# Observed in training

transformers = pytest.importorskip("transformers", minversion="5")
WORDS = 61
MEASURES = ("transmission", "gradient_norm")


class Bare(nn.Module):
    """One attention of given query, key and value."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.options)


class Layer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.project, self.options = nn.Linear(12, 36), options

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, **self.options)
        return x + out.transpose(1, 2).flatten(2)


class Checkpointed(nn.Module):
    """`turns` passes through two layers, each pass of a layer a segment."""

    def __init__(self, reentrant, turns=1):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(is_causal=True)])
        self.reentrant, self.turns = reentrant, turns

    def forward(self, x):
        for layer in list(self.layers) * self.turns:
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return x


def llama(**settings):
    torch.manual_seed(0)
    options = {
        "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options | settings)).train()


def ids(*shape):
    return torch.randint(4, WORDS, shape)


def same_measures(a, b):
    assert list(a.heads) == list(b.heads)
    for path, stats in a.heads.items():
        for name in MEASURES:
            one, other = stats.measures[name], b.heads[path].measures[name]
            assert one.count.equal(other.count), (path, name)
            torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=0)
            torch.testing.assert_close(one.maximum, other.maximum, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_module_gets_the_transmission_of_its_rows(dtype):
    q, k, v = (x.requires_grad_() for x in inputs(queries=13, keys=13, dtype=dtype))
    d_out = torch.randn(2, 6, 13, 5).to(dtype)
    with observe(model := Bare(is_causal=True), gradients=True) as seen:
        model(q, k, v).backward(d_out)
    stats = seen.heads["Bare"]
    want = oracle(*(x.detach() for x in (q, k, v)), d_out, is_causal=True)["transmission"]
    assert stats.measures["transmission"].count.tolist() == [24] * 6
    found, rows = stats.measures["transmission"], want.transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.mean, rows.nanmean(1), rtol=1e-5, atol=0)
    health = transmission_of(stats)
    rms = rows.square().nanmean(1).sqrt()
    torch.testing.assert_close(health.rms, rms, rtol=1e-5, atol=0)
    for q_, value, error in ((0.5, health.median, health.median_error),
                             (0.1, health.p10, health.p10_error)):  # fmt: skip
        exact = rows.nanquantile(q_, 1, interpolation="lower")
        assert bool(((value - exact).abs() <= error * 1.001 + 1e-6).all())
    assert health.dead.tolist() == (rows < 1e-3).double().sum(1).div(24).tolist()
    norm = q.grad.double().norm(dim=-1).transpose(0, 1).flatten(1).mean(1)
    slack = 0.01 if dtype == torch.bfloat16 else 1e-5  # q.grad is rounded, the measure is not
    torch.testing.assert_close(stats.measures["gradient_norm"].mean, norm, rtol=slack, atol=0)


def test_the_share_of_dead_rows_is_exact_at_its_edge():
    rows = torch.tensor([[[1e-3, 0.99999e-3, 5e-4, 1.0]]], dtype=torch.float64)
    stats = joined(HeadStats.identity(1, 1, 4), {"transmission": rows}, None)
    assert transmission_of(stats).dead.tolist() == [0.5]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_looking_changes_no_bit_of_any_gradient(dtype, dropout):
    model = Checkpointed(None).to(dtype)
    for layer in model.layers:
        layer.options["dropout_p"] = dropout
    x, found = torch.randn(2, 37, 12).to(dtype), []
    for gradients in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        with observe(model, gradients=gradients) as seen:
            model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert ("transmission" in seen.heads["layers.0"].measures) == gradients
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_three_steps_with_accumulation_are_counted(attention):
    model = llama(attn_implementation=attention)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with observe(model, gradients=True) as seen:
        for _ in range(3):
            for _ in range(2):
                x = ids(2, 6)
                (model(input_ids=x, labels=x, use_cache=False).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(input_ids=ids(2, 6), use_cache=False)
    assert len(seen.heads) == 2
    for stats in seen.heads.values():
        assert stats.counts["rows"].tolist() == [7 * 12] * 4
        # The first row sees one key; nothing is predicted from the last, so it has no gradient.
        assert stats.measures["transmission"].count.tolist() == [6 * 2 * 4] * 4
        assert stats.measures["gradient_norm"].count.tolist() == [6 * 12] * 4


def test_every_backward_counts_and_a_forward_alone_adds_none():
    model, x = Layer(), torch.randn(1, 5, 12)
    with observe(model, gradients=True) as seen:
        out = model(x)
        assert "transmission" not in seen.heads["Layer"].measures
        assert transmission_of(seen.heads["Layer"]) is None
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
    assert seen.heads["Layer"].counts["rows"].tolist() == [5] * 3
    assert seen.heads["Layer"].measures["gradient_norm"].count.tolist() == [10] * 3
    model.requires_grad_(False)
    with observe(model, gradients=True) as seen:
        model(x)
    assert "transmission" not in seen.heads["Layer"].measures


def test_nested_observations_each_get_their_own():
    model, x = Checkpointed(None), torch.randn(1, 5, 12)
    with observe(model, gradients=True) as outer:
        model(x).sum().backward()
        with observe(model.layers[0], gradients=True) as inner, observe(model) as plain:
            model(x).sum().backward()
    assert outer.heads["layers.0"].measures["gradient_norm"].count.tolist() == [10] * 3
    assert inner.heads["Layer"].measures["gradient_norm"].count.tolist() == [5] * 3
    assert "gradient_norm" not in plain.heads["layers.0"].measures


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_padding_is_left_out_as_in_the_forward(side, reentrant):
    """One padded batch gives its texts' rows alone, checkpointed too."""
    model, texts = llama(), [ids(9), ids(4)]
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    gaps = [torch.zeros(9 - len(t), dtype=torch.long) for t in texts]
    order = slice(None) if side == "right" else slice(None, None, -1)
    x = torch.stack([torch.cat([t, g][order]) for t, g in zip(texts, gaps, strict=True)])
    real = torch.stack(
        [torch.cat([torch.ones_like(t), g][order]) for t, g in zip(texts, gaps, strict=True)]
    )
    with observe(model, gradients=True) as together:
        out = model(input_ids=x, attention_mask=real, use_cache=False).logits
        out[real.bool()].square().sum().backward()
    with observe(model, gradients=True) as alone:
        for text in texts:
            model(input_ids=text[None], use_cache=False).logits.square().sum().backward()
    same_measures(together, alone)
    assert together.heads["model.layers.0.self_attn"].measures["gradient_norm"].count[0] == 13


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_run_again_by_checkpointing_counts_once(reentrant, turns):
    """With layers that are called several times, each call under its own path."""
    model, x = Checkpointed(None, turns), torch.randn(2, 7, 12, requires_grad=True)
    with observe(model, gradients=True) as plain:
        for _ in range(2):
            model(x).square().sum().backward()
    model.reentrant = reentrant
    with observe(model, gradients=True) as seen:
        for _ in range(2):
            model(x).square().sum().backward()
    same_measures(seen, plain)
    assert len(seen.heads) == 2 * turns


def test_two_calls_in_one_reentrant_checkpoint_are_refused():
    layer = Layer()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint.checkpoint(lambda x: layer(layer(x)), x, use_reentrant=True)

    model, x = Twice(), torch.randn(1, 5, 12, requires_grad=True)
    with observe(model, gradients=True), pytest.raises(ScaledotError, match="use_reentrant=False"):
        model(x).sum().backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_inside_another_counts_once():
    class Nested(Checkpointed):
        def forward(self, x):
            inner = super().forward
            return checkpoint.checkpoint(lambda x: inner(x), x, use_reentrant=True)

    model, x = Checkpointed(None), torch.randn(2, 7, 12, requires_grad=True)
    nested = Nested(True)
    nested.load_state_dict(model.state_dict())
    with observe(model, gradients=True) as plain:
        model(x).square().sum().backward()
    with observe(nested, gradients=True) as seen:
        nested(x).square().sum().backward()
    same_measures(seen, plain)


def test_weights_that_make_the_output_themselves_are_refused():
    model, x = nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True), torch.randn(2, 7, 12)
    with observe(model, gradients=True) as seen:
        model(x, x, x, need_weights=False)[0].sum().backward()
        with pytest.raises(ScaledotError, match="need_weights=False"):
            model(x, x, x)
    assert seen.heads["MultiheadAttention"].measures["transmission"].count.tolist() == [14] * 3


def test_a_gradient_of_the_statistics_alone_adds_no_rows():
    q, k, v = (x.requires_grad_() for x in inputs())
    found = []
    out, rows = compute(
        q, k, v, None, 0.0, False, None, True, softcap=None, sinks=None, kernel="auto",
        return_stats=True, watch=found.append,
    )  # fmt: skip
    rows.entropy.sum().backward(retain_graph=True)
    assert not found
    out.sum().backward()
    assert len(found) == 1


def test_multihead_attention_and_encoders():
    model = nn.TransformerEncoderLayer(12, 3, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 7, 12), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    with observe(model, gradients=True) as seen:
        model(x, src_key_padding_mask=padding)[~padding].square().sum().backward()
    assert seen.heads["self_attn"].measures["transmission"].count.tolist() == [11] * 3
    model = nn.MultiheadAttention(12, 3, batch_first=True)
    with observe(model, gradients=True) as seen:
        out, weights = model(x, x, x, need_weights=True)
        (out.sum() + weights.square().sum()).backward()
    assert seen.heads["MultiheadAttention"].measures["transmission"].count.tolist() == [14] * 3


def test_autocast_and_grouped_heads():
    model, x = llama(), ids(2, 9)
    with observe(model, gradients=True) as plain:
        model(input_ids=x, use_cache=False).logits.square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16), observe(model, gradients=True) as seen:
        model(input_ids=x, use_cache=False).logits.square().sum().backward()
    for path, stats in seen.heads.items():
        one, other = (s.measures["transmission"] for s in (stats, plain.heads[path]))
        assert one.count.equal(other.count)
        torch.testing.assert_close(one.mean, other.mean, rtol=0.1, atol=0)


@pytest.mark.parametrize("how", ["queries", "values"])
def test_a_planted_dead_head_is_found_and_no_healthy_one(how):
    """Scores far too wide kill the typical row of one head; equal values leave it none."""
    model, x = llama(), ids(4, 40)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        if how == "queries":
            attention.q_proj.weight[12:18] *= 4e4  # head 2
        else:
            attention.v_proj.weight[6:12] = 0.0  # kv head 1: heads 2 and 3
    with observe(model, gradients=True) as seen:
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
    stats = seen.heads["model.layers.1.self_attn"]
    health, other = transmission_of(stats), transmission_of(seen.heads["model.layers.0.self_attn"])
    assert bool((other.median > 0.5).all())
    assert bool((other.dead == 0).all())
    if how == "values":
        # dP is 0 whatever the key: nothing to transmit, which is not the softmax's doing.
        assert stats.measures["transmission"].count.tolist() == [39 * 4 - 4] * 2 + [0, 0]
        assert health.median[2:].isnan().all()
        return
    assert float(health.median[2]) < 1e-3
    assert float(health.dead[2]) > 0.5
    assert bool((health.median[[0, 1, 3]] > 0.5).all())
    assert health.dead[[0, 1, 3]].tolist() == [0.0] * 3


def test_transformed_functions_say_that_they_are_not_seen():
    model, x = Layer(), torch.randn(1, 5, 12)
    with observe(model, gradients=True):
        model(x)
        with pytest.raises(ScaledotError, match=r"torch\.func"):
            torch.func.grad(lambda x: model(x).sum())(x)

"""MultiheadAttention against nn.MultiheadAttention, and what it adds against the definition."""

import copy
import doctest
import itertools
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_inputs_torch_nn_MultiheadAttention

import scaledot
from scaledot import MultiheadAttention, multihead, scales
from scaledot.dispatch import ERROR_FACTOR, ERROR_ULPS

HEADS, DIM = 3, 12
BATCH, QUERIES, KEYS = 2, 5, 7
KDIM, VDIM = 11, 13
nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def close(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def pair(*args: Any, **kwargs: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module and ours with its parameters, among them biases that are not 0."""
    theirs = nn.MultiheadAttention(*args, **kwargs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    ours = MultiheadAttention(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def masks(kind: str, batch: int, queries: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Masks of nn.MultiheadAttention in which every query sees the first key."""
    hide = torch.rand(queries, keys) > 0.5
    many = torch.rand(batch * HEADS, queries, keys) > 0.5
    padding = torch.rand(batch, keys) > 0.5
    for mask in (hide, many, padding):
        mask[..., 0] = False
    added, added_many, added_padding = (
        torch.where(mask, -torch.inf, torch.randn(mask.shape)).to(dtype)
        for mask in (hide, many, padding)
    )
    only = torch.where(padding, -torch.inf, 0.0).to(dtype)
    future = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "bool": {"attn_mask": hide},
        "bool per head": {"attn_mask": many},
        "float": {"attn_mask": added},
        "float per head": {"attn_mask": added_many},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": only},
        "added padding": {"key_padding_mask": added_padding},
        "bool both": {"attn_mask": hide, "key_padding_mask": padding},
        "per head both": {"attn_mask": many, "key_padding_mask": padding},
        "float both": {"attn_mask": added, "key_padding_mask": added_padding},
        "causal": {"attn_mask": future, "is_causal": True},
        "causal padding": {
            "attn_mask": torch.where(future, -torch.inf, 0.0).to(dtype), "key_padding_mask": only,
            "is_causal": True,
        },
    }[kind]  # fmt: skip


KINDS = (
    "none", "bool", "bool per head", "float", "float per head", "padding", "float padding",
    "added padding", "bool both", "per head both", "float both", "causal", "causal padding",
)  # fmt: skip
BUILDS: tuple[dict[str, Any], ...] = (
    {}, {"bias": False, "batch_first": True}, {"kdim": KDIM, "vdim": VDIM},
    {"add_bias_kv": True, "batch_first": True}, {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": KDIM, "bias": False},
)  # fmt: skip


def inputs(
    build: dict[str, Any], batch: int, queries: int, keys: int, dtype: torch.dtype
) -> list[Tensor]:
    shapes = (
        (batch, queries, DIM), (batch, keys, build.get("kdim", DIM)),
        (batch, keys, build.get("vdim", DIM)),
    )  # fmt: skip
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    return made if build.get("batch_first") else [x.transpose(0, 1).contiguous() for x in made]


def run(module: nn.Module, given: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Output, weights and every gradient of a loss that reads both."""
    given = [x.clone().requires_grad_() for x in given]
    out, weights = module(*given, **options, need_weights=True)
    loss = out.square().sum() + weights.square().sum()
    return [out, weights, *torch.autograd.grad(loss, (*given, *module.parameters()))]


# Equal to torch's


@pytest.mark.parametrize("build", BUILDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_in_output_weights_and_gradients(kind: str, build: dict[str, Any]) -> None:
    theirs, ours = pair(DIM, HEADS, dtype=torch.float64, **build)
    x = inputs(build, BATCH, QUERIES, KEYS, torch.float64)
    given = masks(kind, BATCH, QUERIES, KEYS, torch.float64)
    for average in (True, False):
        options = {**given, "average_attn_weights": average}
        found, expected = run(ours, x, options), run(theirs, x, options)
        for mine, torchs in zip(found, expected, strict=True):
            close(mine, torchs, 1e-10)
    # torch's hint would hide the keys that it appends, where it is not asked for weights.
    out, weights = ours(*x, **given)
    assert weights is None
    close(out, expected[0], 1e-10)


@given(
    build=st.sampled_from(BUILDS), kind=st.sampled_from(KINDS), batch=st.integers(1, 3),
    queries=st.integers(1, 17), keys=st.integers(1, 17), alone=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_as_near_as_torch_in_every_precision(
    build: dict[str, Any], kind: str, batch: int, queries: int, keys: int, alone: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    if alone:  # self-attention
        build = {k: v for k, v in build.items() if k not in ("kdim", "vdim")}
        keys = queries
    theirs, ours = pair(DIM, HEADS, **build)
    x = inputs(build, batch, queries, keys, dtype)
    x = [x[0]] * 3 if alone else x
    given = masks(kind, batch, queries, keys, dtype)
    plain, mine = theirs.to(dtype)(*x, **given)[0], ours.to(dtype)(*x, **given)[0]
    wide = {name: y.double() if isinstance(y, Tensor) and y.is_floating_point() else y
            for name, y in given.items()}  # fmt: skip
    reference = theirs.double()(*(y.double() for y in x), **wide)[0]
    bound = ERROR_FACTOR * (plain.double() - reference).abs().max()
    bound += ERROR_ULPS * torch.finfo(dtype).eps * reference.abs().max()
    assert (mine.double() - reference).abs().max() <= bound


def test_float_masks_have_gradients() -> None:
    theirs, ours = pair(DIM, HEADS, add_bias_kv=True, dtype=torch.float64)
    x = inputs({}, BATCH, QUERIES, KEYS, torch.float64)
    for shape in ((QUERIES, KEYS), (BATCH * HEADS, QUERIES, KEYS)):
        for value in (torch.zeros(shape), torch.randn(shape)):
            given = {
                "attn_mask": value.double().requires_grad_(),
                "key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.float64).requires_grad_(),
            }
            grads = (
                torch.autograd.grad(m(*x, **given)[0].square().sum(), list(given.values()))
                for m in (ours, theirs)
            )
            for mine, torchs in zip(*grads, strict=True):
                close(mine, torchs, 1e-10)


def test_causal_needs_no_mask() -> None:
    for build, keys in itertools.product(BUILDS, (KEYS, QUERIES)):
        theirs, ours = pair(DIM, HEADS, dtype=torch.float64, **build)
        x = inputs(build, BATCH, QUERIES, keys, torch.float64)
        given = masks("causal", BATCH, QUERIES, keys, torch.float64)
        close(ours(*x, is_causal=True)[0], theirs(*x, **given)[0], 1e-10)


def test_without_a_batch() -> None:
    for build, kind in itertools.product(BUILDS, ("none", "bool per head", "padding", "float")):
        theirs, ours = pair(DIM, HEADS, **build)
        x = [y.select(0 if build.get("batch_first") else 1, 0)
             for y in inputs(build, 1, QUERIES, KEYS, torch.float32)]  # fmt: skip
        given = masks(kind, 1, QUERIES, KEYS, torch.float32)
        if "key_padding_mask" in given:
            given["key_padding_mask"] = given["key_padding_mask"][0]
        out, weights, rows = ours(*x, **given, need_weights=True, return_stats=True)
        plain, plain_weights = theirs(*x, **given, average_attn_weights=False)
        close(out, plain)
        close(weights, plain_weights)
        assert rows.entropy.shape == (HEADS, QUERIES)


def test_dropped_weights_are_torchs_at_the_same_seed() -> None:
    theirs, ours = pair(DIM, HEADS, dropout=0.4, dtype=torch.float64)
    x = inputs({}, BATCH, QUERIES, KEYS, torch.float64)
    found = []
    for module in (theirs, ours):
        torch.manual_seed(3)
        found.append(run(module, x, {"average_attn_weights": False}))
    assert (found[0][1] == 0).any()
    for mine, torchs in zip(*found, strict=True):
        close(mine, torchs, 1e-10)


def test_dropout_averages_to_no_dropout_and_is_off_in_eval() -> None:
    ours = MultiheadAttention(DIM, HEADS, dropout=0.3, dtype=torch.float64)
    x = torch.randn(QUERIES, 1, DIM, dtype=torch.float64)
    many = x.expand(-1, 4000, -1)
    with torch.no_grad():
        drawn = ours(many, many, many)[0]
        error = drawn.std(1, keepdim=True) / 4000**0.5
        z = (drawn.mean(1, keepdim=True) - ours.eval()(x, x, x)[0]) / error
    assert drawn.std(1).min() > 0
    assert z.abs().max() < 5


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"add_bias_kv": True, "kdim": KDIM}])
def test_autocast(options: dict[str, Any]) -> None:
    ours = MultiheadAttention(DIM, HEADS, **options)
    x = inputs(options, BATCH, QUERIES, KEYS, torch.float32)
    exact = ours(*x, need_weights=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = ours(*x, need_weights=True)
        assert ours(*x)[0].equal(half[0])
    assert half[0].dtype == half[1].dtype == torch.bfloat16
    for a, b in zip(half, exact, strict=True):
        close(a.float(), b, 2e-2)


# torch's own test inputs


def test_module_inputs_of_torch() -> None:
    found = module_inputs_torch_nn_MultiheadAttention(
        None, device="cpu", dtype=torch.float64, requires_grad=True, training=True
    )
    assert len(found) == 64
    for sample in found:
        made, called = sample.constructor_input, sample.forward_input
        theirs, ours = pair(*made.args, **made.kwargs, dtype=torch.float64)
        options = {**called.kwargs, "need_weights": True, "average_attn_weights": True}
        mine = ours(*called.args, **options)
        torchs = theirs(*called.args, **options)
        # torch's test of the module: the same as with a batch of one.
        batched = sample.reference_fn(ours, *called.args, **options)
        for a, b, c in zip(mine, torchs, batched, strict=True):
            close(a, b, 1e-12)
            close(a, c, 1e-12)


def samples(name: str, *, requires_grad: bool) -> list[Any]:
    (op,) = [op for op in op_db if op.name == name]
    return list(op.sample_inputs("cpu", torch.float64, requires_grad=requires_grad))


def test_operator_samples_of_torch_for_multihead_attention() -> None:
    name = "nn.functional.multi_head_attention_forward"
    found = samples(name, requires_grad=False) + samples(name, requires_grad=True)
    assert len(found) == 193
    for sample in found:
        key, value, width, heads, packed, bias, bias_k, bias_v, _, dropout = sample.args[:10]
        ours = MultiheadAttention(width, heads, dropout, add_bias_kv=True, dtype=torch.float64)
        ours.in_proj_weight = None if packed is None else nn.Parameter(packed)
        for x in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if sample.kwargs[x] is not None:
                setattr(ours, x, nn.Parameter(sample.kwargs[x]))
        ours.in_proj_bias = nn.Parameter(bias)
        ours.bias_k, ours.bias_v = (nn.Parameter(x.view(1, 1, -1)) for x in (bias_k, bias_v))
        ours.out_proj.weight, ours.out_proj.bias = map(nn.Parameter, sample.args[10:])
        ours.train(sample.kwargs["training"])
        torch.manual_seed(1)
        plain, weights = F.multi_head_attention_forward(
            sample.input, *sample.args, **sample.kwargs, average_attn_weights=False
        )
        torch.manual_seed(1)
        mask = sample.kwargs["attn_mask"]
        out, shares = ours(sample.input, key, value, attn_mask=mask, need_weights=True)
        close(out, plain, 1e-12)
        close(shares, weights, 1e-12)


class Call(nn.Module):
    """Just torch's function."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def test_operator_samples_of_torch_for_scaled_dot_product_attention() -> None:
    model = Call()
    found = samples("nn.functional.scaled_dot_product_attention", requires_grad=True)
    assert len(found) == 25
    for sample in found:
        options = dict(sample.kwargs)
        dropout = options.pop("dropout_p")
        causal = options.pop("is_causal")
        args = [x.detach().requires_grad_() for x in (sample.input, *sample.args)]
        plain = model(*args, **options, is_causal=causal)
        with scaledot.observe(model):
            close(model(*args, **options, is_causal=causal), plain, 1e-12)
        options["is_causal"] = "top_left" if causal else False
        ours = scaledot.attention(*args, **options)
        close(ours, plain, 1e-12)
        grads = (torch.autograd.grad(x.square().sum(), args) for x in (ours, plain))
        for a, b in zip(*grads, strict=True):
            close(a, b, 1e-11)
        if dropout:
            assert not scaledot.attention(*args, dropout_p=dropout, **options).equal(ours)


# Parameters


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_one_seed_gives_the_same_parameters_and_names(build: dict[str, Any]) -> None:
    made = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(11)
        made.append((kind(DIM, HEADS, **build), torch.rand(())))
    (theirs, after), (ours, our_after) = made
    assert after.equal(our_after)
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    assert all(x.equal(expected[name]) for name, x in ours.state_dict().items())
    nn.MultiheadAttention(DIM, HEADS, **build).load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_of_takes_the_very_parameters(build: dict[str, Any]) -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, dropout=0.25, dtype=torch.float64, **build).eval()
    theirs.out_proj.weight.requires_grad_(False)
    state = torch.get_rng_state()
    ours = MultiheadAttention.of(theirs)
    assert torch.get_rng_state().equal(state)
    mine, torchs = ({n: id(p) for n, p in m.named_parameters()} for m in (ours, theirs))
    assert mine == torchs
    assert not ours.out_proj.weight.requires_grad
    assert ours.dropout == 0.25
    assert not ours.training
    x = inputs(build, BATCH, QUERIES, KEYS, torch.float64)
    close(ours(*x)[0], theirs(*x)[0], 1e-12)


def test_copies_pickles_and_moves() -> None:
    ours = MultiheadAttention(DIM, HEADS, add_bias_kv=True, qk_norm=True, scale="1/d_k")
    x = torch.randn(QUERIES, BATCH, DIM)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other(x, x, x)[0].equal(ours(x, x, x)[0])
    meta = MultiheadAttention(DIM, HEADS, device="meta", dtype=torch.float64)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    plain = MultiheadAttention(DIM, HEADS)
    filled = meta.to_empty(device="cpu")
    filled.load_state_dict(plain.state_dict())
    y = x.double()
    close(filled(y, y, y)[0].float(), plain(x, x, x)[0])


def test_shapes_alone_on_meta() -> None:
    ours = MultiheadAttention(DIM, HEADS, 0.1, add_bias_kv=True, qk_norm=True, device="meta")
    theirs = nn.MultiheadAttention(DIM, HEADS, 0.1, add_bias_kv=True, device="meta")
    x, y = (torch.empty(n, BATCH, DIM, device="meta") for n in (QUERIES, KEYS))
    for padding in (None, torch.bool, torch.float32):
        if padding is not None:
            padding = torch.empty(BATCH, KEYS, dtype=padding, device="meta")
        out, _, rows = ours(x, y, y, padding, return_stats=True)
        assert out.shape == theirs(x, y, y, padding, need_weights=False)[0].shape
        assert rows.entropy.shape == (BATCH, HEADS, QUERIES)
        assert {out.device.type, rows.entropy.device.type} == {"meta"}


# What is documented to differ


def test_what_is_hidden_does_not_matter_even_nan() -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS)
    ours, x = MultiheadAttention.of(theirs), torch.randn(KEYS, BATCH, DIM)
    padding = torch.arange(KEYS).expand(BATCH, -1) >= KEYS - 1
    spoilt = x.clone()
    spoilt[-1] = torch.nan
    query = x[:QUERIES]
    assert ours(query, spoilt, spoilt, padding)[0].equal(ours(query, x, x, padding)[0])
    assert theirs(query, spoilt, spoilt, padding)[0].isnan().all()


def test_causal_queries_see_appended_keys() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True)
    ours, x = MultiheadAttention.of(theirs), torch.randn(QUERIES, BATCH, DIM)
    later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    mine = ours(x, x, x, attn_mask=later, is_causal=True)[0]
    hint = {"attn_mask": later, "is_causal": True}
    close(mine, theirs(x, x, x, **hint)[0])
    # Without weights torch hides the appended key from all queries.
    hidden = theirs(x, x, x, **hint, need_weights=False)[0]
    assert (mine - hidden).abs().max() > 0.01


def test_a_mask_that_comes_with_causality_is_not_read() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS)
    ours, x = MultiheadAttention.of(theirs), torch.randn(QUERIES, BATCH, DIM)
    other = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    hint = {"attn_mask": other, "is_causal": True}
    causal = ours(x, x, x, is_causal=True)[0]
    assert ours(x, x, x, **hint, need_weights=True)[0].equal(causal)
    close(theirs(x, x, x, **hint, need_weights=False)[0], causal)
    assert (theirs(x, x, x, **hint)[0] - causal).abs().max() > 0.01


def test_a_query_that_sees_nothing_gives_the_output_bias_and_no_gradient() -> None:
    theirs, ours = pair(DIM, HEADS, batch_first=True)
    x = torch.randn(BATCH, QUERIES, DIM)
    hide = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    hide[2] = True
    everything = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    everything[1] = True
    for options in (
        {"attn_mask": hide}, {"attn_mask": torch.where(hide, -torch.inf, 0.0)},
        {"key_padding_mask": everything},
    ):  # fmt: skip
        plain = theirs(x, x, x, **options)[0]
        out, weights, rows = ours(x, x, x, **options, need_weights=True, return_stats=True)
        there = plain.isnan().all(-1)
        assert there.any()
        assert out[there].equal(ours.out_proj.bias.expand(int(there.sum()), -1))
        close(out[~there], plain[~there])
        assert weights.transpose(1, 2)[there].eq(0).all()
        assert rows.empty.transpose(1, 2)[there].all()
        q, k = (x.clone().requires_grad_() for _ in range(2))
        out = ours(q, k, k, **options)[0]
        grads = torch.autograd.grad(out[there].sum(), (q, k), retain_graph=True)
        assert all(g.eq(0).all() for g in grads)
        assert torch.autograd.grad(out.sum(), k)[0].isfinite().all()


def test_no_weights_unless_asked_and_then_per_head() -> None:
    ours = MultiheadAttention(DIM, HEADS)
    x = torch.randn(QUERIES, BATCH, DIM)
    assert ours(x, x, x)[1] is None
    assert ours(x, x, x, need_weights=True)[1].shape == (BATCH, HEADS, QUERIES, QUERIES)


# Options


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": KDIM, "vdim": VDIM}])
def test_grouped_heads_are_heads_repeated(bias: bool, widths: dict[str, int]) -> None:
    heads, kv_heads, size = 6, 2, 5
    width = heads * size
    options = {"bias": bias, "add_bias_kv": True, "dtype": torch.float64, **widths}
    grouped = MultiheadAttention(width, heads, num_kv_heads=kv_heads, **options)
    whole = MultiheadAttention(width, heads, **options)
    if bias:
        nn.init.normal_(grouped.in_proj_bias)

    def repeated(x: Tensor) -> Tensor:
        return x.unflatten(0, (kv_heads, size)).repeat_interleave(3, 0).flatten(0, 1)

    state = grouped.state_dict()
    for name, x in state.items():
        if name in ("in_proj_weight", "in_proj_bias"):
            q, k, v = x.split([width, kv_heads * size, kv_heads * size])
            state[name] = torch.cat([q, repeated(k), repeated(v)])
        elif name in ("k_proj_weight", "v_proj_weight"):
            state[name] = repeated(x)
        elif name in ("bias_k", "bias_v"):
            state[name] = repeated(x.flatten())[None, None]
    whole.load_state_dict(state)
    x = [torch.randn(n, BATCH, w, dtype=torch.float64)
         for n, w in ((5, width), (7, grouped.kdim), (7, grouped.vdim))]  # fmt: skip
    for a, b in zip(grouped(*x, need_weights=True), whole(*x, need_weights=True), strict=True):
        close(a, b, 1e-12)


def by_head(projected: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for x in projected]


def test_qk_norm_bounds_the_scores_and_its_gains_multiply_them() -> None:
    ours = MultiheadAttention(DIM, HEADS, qk_norm=True, add_bias_kv=True, dtype=torch.float64)
    x = torch.randn(QUERIES, BATCH, DIM, dtype=torch.float64) * 1e3
    t = ours.trace(x, x, x)
    assert t.heads.scores.abs().max() <= DIM // HEADS
    gain = torch.arange(1, 1 + DIM // HEADS)
    with torch.no_grad():
        ours.q_norm.weight.mul_(gain)
        ours.k_norm.weight.mul_(3)
    q, k = (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            for y in by_head(t.projected)[:2])  # fmt: skip
    close(ours.trace(x, x, x).heads.scores[..., :-1], q * gain @ k.mT * 3, 1e-12)


@pytest.mark.parametrize("rule", [*scales.RULES, 0.3, None])
def test_scale_rules(rule: str | float | None) -> None:
    ours = MultiheadAttention(DIM, HEADS, scale=rule, dtype=torch.float64)
    x = inputs({}, BATCH, QUERIES, KEYS, torch.float64)
    factor = scales.factor(
        "1/sqrt_d_k" if rule is None else rule, DIM // HEADS, d_model=DIM, keys=KEYS
    )
    out = F.scaled_dot_product_attention(*by_head(ours.trace(*x).projected), scale=factor)
    close(ours(*x)[0], ours.out_proj(out.permute(2, 0, 1, 3).flatten(-2)), 1e-12)


def test_softcap_and_scale_reach_every_way_to_look() -> None:
    ours = MultiheadAttention(DIM, HEADS, softcap=0.5, scale=2.0, dtype=torch.float64)
    x = inputs({}, BATCH, QUERIES, KEYS, torch.float64)
    t = ours.trace(*x)
    assert t.heads.capped.abs().max() < 0.5
    close(t.heads.capped, 0.5 * torch.tanh(t.heads.scores * 2 / 0.5), 1e-12)
    out, weights, rows = ours(*x, need_weights=True, return_stats=True)
    close(out, t.output, 1e-12)
    close(weights, t.heads.weights, 1e-12)
    close(rows.lse, t.heads.rows.lse, 1e-12)


# Looking


@pytest.mark.parametrize("build", BUILDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_looking_changes_no_bit_and_statistics_are_the_traces(
    kind: str, build: dict[str, Any]
) -> None:
    ours = MultiheadAttention(DIM, HEADS, **build)
    x = inputs(build, BATCH, QUERIES, KEYS, torch.float32)
    given = masks(kind, BATCH, QUERIES, KEYS, torch.float32)
    plain = ours(*x, **given)[0]
    out, _, rows = ours(*x, **given, return_stats=True)
    assert out.equal(plain)
    assert ours(*x, **given, need_weights=True)[0].equal(plain)
    t = ours.trace(*x, **given)
    with scaledot.observe(ours) as seen:
        assert ours(*x, **given)[0].equal(plain)
        looked, weights, seen_rows = ours(*x, **given, need_weights=True, return_stats=True)
    assert looked.equal(plain)
    close(t.output, plain)
    assert weights.equal(t.heads.weights)
    exact = t.heads.rows
    for name in ("visible", "top_key", "lse", "entropy", "score_mean", "score_var", "mean_key"):
        close(getattr(rows, name), getattr(exact, name), 1e-5)
        assert getattr(seen_rows, name).equal(getattr(rows, name))
    assert seen.calls["MultiheadAttention"].kind == "cross"


def test_gradients_with_statistics_are_the_same_bits_and_entropy_has_its_own() -> None:
    ours = MultiheadAttention(DIM, HEADS)
    x = torch.randn(QUERIES, BATCH, DIM)
    parameters = list(ours.parameters())
    grads = [
        torch.autograd.grad(ours(x, x, x, return_stats=look)[0].square().sum(), parameters)
        for look in (False, True)
    ]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))
    rows = ours(x, x, x, return_stats=True)[2]
    weights = ours(x, x, x, need_weights=True)[1]
    by_hand = -(weights * weights.log()).sum(-1)
    mine, plain = (
        torch.autograd.grad(h.sum(), ours.in_proj_weight) for h in (rows.entropy, by_hand)
    )
    close(mine[0], plain[0], 1e-5)


def test_observed_statistics_are_those_of_the_call() -> None:
    model = nn.Sequential(MultiheadAttention(DIM, HEADS, num_kv_heads=1, softcap=3.0))
    model.forward = lambda x, padding: model[0](x, x, x, padding)[0]
    x = torch.randn(QUERIES, BATCH, DIM)
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[1, 3:] = True
    _, shares, rows = model[0](x, x, x, padding, need_weights=True, return_stats=True)
    with scaledot.observe(model, keep="qk") as seen:
        model(x, padding)
    stats, call = seen.heads["0"], seen.calls["0"]
    for name in ("entropy", "lse", "score_var"):
        expected = getattr(rows, name).transpose(0, 1)[:, ~padding].double().mean(-1)
        close(stats.measures[name].mean, expected, 1e-6)
    assert stats.counts["padding"].tolist() == [2] * HEADS
    assert (call.heads, call.kv_heads, call.softcap, call.kind) == (HEADS, 1, 3.0, "self")
    close(seen.weights("0", head=1, batch=1), shares[1, 1])
    assert seen.unobserved == ()


def test_observed_gradients() -> None:
    ours = MultiheadAttention(DIM, HEADS, dropout=0.2)
    x = torch.randn(QUERIES, BATCH, DIM)
    with scaledot.observe(ours, gradients=True) as seen:
        ours(x, x, x)[0].square().sum().backward()
        with pytest.raises(scaledot.ScaledotError, match=r"^MultiheadAttention with need_weights"):
            ours(x, x, x, need_weights=True)
    assert seen.heads["MultiheadAttention"].measures["gradient_norm"].count.tolist() == [10] * HEADS


def test_trace_prints_every_step_in_order() -> None:
    ours = MultiheadAttention(
        12, 4, batch_first=True, num_kv_heads=2, softcap=4.0, add_zero_attn=True, dropout=0.5,
        kdim=5, scale="1/d_k",
    )  # fmt: skip
    t = ours.trace(torch.randn(2, 3, 12), torch.randn(2, 7, 5), torch.randn(2, 7, 12))
    assert repr(t) == str(t)
    assert str(t).splitlines() == [
        "query      input                 (2, 3, 12)",
        "key        input                 (2, 7, 5)",
        "value      input                 (2, 7, 12)",
        "Q          query·W_Qᵀ            (2, 3, 12)",
        "K          key·W_Kᵀ              (2, 7, 6)",
        "V          value·W_Vᵀ            (2, 7, 6)",
        "Q by head  Q split into 4        (2, 4, 3, 3)",
        "K by head  K split into 2        (2, 2, 8, 3)",
        "V by head  V split into 2        (2, 2, 8, 3)",
        "scores     Q·Kᵀ of each head     (2, 4, 3, 8)",
        "scaled     × 0.333333, 1/d_k     (2, 4, 3, 8)",
        "capped     soft-cap 4.0          (2, 4, 3, 8)",
        "masked     mask applied          (2, 4, 3, 8)",
        "weights    softmax over keys     (2, 4, 3, 8)",
        "dropped    dropout               (2, 4, 3, 8)",
        "heads      weights·V             (2, 4, 3, 3)",
        "concat     4 heads side by side  (2, 3, 12)",
        "output     concat·W_Oᵀ           (2, 3, 12)",
    ]
    close(t.heads.output, t.heads.dropped @ t.value.repeat_interleave(2, 1))
    close(t.concat, torch.cat(t.heads.output.unbind(1), -1))
    close(t.output, F.linear(t.concat, ours.out_proj.weight, ours.out_proj.bias))


# Inside torch's transformer


def counting(monkeypatch: pytest.MonkeyPatch) -> list[MultiheadAttention]:
    """The modules whose forward ran. No hook is used: torch's layers go slow where there is one."""
    calls: list[MultiheadAttention] = []
    forward = MultiheadAttention.forward

    def counted(self: MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not args[0].is_nested:  # which comes again, padded
            calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(MultiheadAttention, "forward", counted)
    return calls


def replaced(transformer: nn.Module) -> nn.Module:
    ours = copy.deepcopy(transformer)
    for layer in ours.layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.MultiheadAttention):
                setattr(layer, name, MultiheadAttention.of(module))
    return ours


@nested
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["none", "padding", "causal", "both"])
def test_an_encoder_always_calls_it(
    kind: str, batch_first: bool, training: bool, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).train(training)
    ours = replaced(theirs)
    calls = counting(monkeypatch)
    x = torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    options: dict[str, Any] = {
        "none": {}, "padding": {"src_key_padding_mask": padding},
        "causal": {"mask": causal, "is_causal": True},
        "both": {"mask": causal, "src_key_padding_mask": torch.where(padding, -torch.inf, 0.0)},
    }[kind]  # fmt: skip
    with context():
        plain = theirs(x, **options)
        close(ours(x, **options), plain, 1e-5)
        assert len(calls) == 2
        with scaledot.observe(ours) as seen:
            looked = ours(x, **options)
    assert len(calls) == 4
    # What torch leaves out of a nested tensor is 0, and observed there is none.
    real = ~padding if batch_first else ~padding.T
    real = real if "src_key_padding_mask" in options else torch.ones_like(real)
    close(looked[real], plain[real], 1e-5)
    assert list(seen.heads) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert {c.causal for c in seen.calls.values()} == {kind in ("causal", "both")}


def test_an_encoder_made_of_it_makes_no_nested_tensors_and_torch_says_so() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.self_attn = MultiheadAttention(16, 4, batch_first=True, num_kv_heads=2)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(5) > torch.tensor([[2], [4]])
    with torch.no_grad():
        assert encoder(torch.randn(2, 5, 16), src_key_padding_mask=padding)[0, 3:].ne(0).all()


def test_a_decoder_calls_it_for_both_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0), 2).eval()
    ours = replaced(theirs)
    calls = counting(monkeypatch)
    x, memory = torch.randn(5, 2, 16), torch.randn(7, 2, 16)
    options = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
               "memory_key_padding_mask": torch.arange(7) > torch.tensor([[4], [6]])}  # fmt: skip
    with torch.inference_mode():
        close(ours(x, memory, **options), theirs(x, memory, **options), 1e-5)
    assert len(calls) == 4
    with scaledot.observe(ours) as seen:
        ours(x, memory, **options)
    assert [c.kind for c in seen.calls.values()] == ["self", "cross"] * 2


@nested
def test_nested_tensors() -> None:
    ours = MultiheadAttention(DIM, HEADS, batch_first=True)
    texts = [torch.randn(n, DIM) for n in (3, 5)]
    x = torch.nested.nested_tensor(texts)
    out, weights, rows = ours(x, x, x, need_weights=True, return_stats=True, is_causal=True)
    for i, text in enumerate(texts):
        alone = ours(text, text, text, need_weights=True, is_causal=True)
        close(out[i], alone[0])
        close(weights[i, :, : len(text), : len(text)], alone[1])
    assert rows.visible[0, 0].tolist() == [1, 2, 3, 3, 3]
    jagged = torch.nested.nested_tensor(texts, layout=torch.jagged)
    late = MultiheadAttention(DIM, HEADS)
    for module, args in ((ours, (x, texts[0], texts[0])), (late, (x,) * 3), (ours, (jagged,) * 3)):
        with pytest.raises(ValueError, match="query is a nested tensor: pass the same one"):
            module(*args)


# Bad input


@pytest.mark.parametrize(("options", "message"), [
    ({"embed_dim": 13}, "embed_dim is 13 with 3 heads: pass a multiple of num_heads"),
    ({"embed_dim": 0}, "embed_dim is 0: pass at least 1"),
    ({"num_heads": 0}, "num_heads is 0: pass at least 1"),
    ({"num_kv_heads": 2}, "num_kv_heads is 2 with 3 heads: pass a divisor of num_heads"),
    ({"num_kv_heads": 0}, "num_kv_heads is 0: pass at least 1"),
    ({"dropout": 1.5}, "dropout_p is 1.5"),
    ({"scale": "1/sqrt(d)"}, r"scale is '1/sqrt\(d\)': pass one of 1/sqrt_d_k"),
    ({"scale": float("nan")}, "scale is nan: pass a finite number"),
    ({"softcap": 0.0}, "softcap is 0: pass a finite number above 0, or None for no cap"),
    ({"softcap": float("inf")}, "softcap is inf: pass a finite number above 0"),
])  # fmt: skip
def test_bad_constructors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": DIM, "num_heads": HEADS, **options})


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", ["embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim"])
def test_a_size_that_is_no_whole_number_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is '3': pass a whole number"):
        MultiheadAttention(**{"embed_dim": DIM, "num_heads": HEADS, name: "3"})


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_tensor_is_named(place: int) -> None:
    ours, x = MultiheadAttention(DIM, HEADS), torch.randn(5, DIM)
    given = [x, x, x]
    given[place] = "words"
    name = ("query", "key", "value")[place]
    for call in (ours, ours.trace):
        with pytest.raises(TypeError, match=f"{name} must be a torch tensor, got str"):
            call(*given)


@pytest.mark.usefixtures("unannotated")
def test_bad_calls() -> None:
    ours = MultiheadAttention(DIM, HEADS, batch_first=True, kdim=KDIM)
    q, k, v = inputs({"batch_first": True, "kdim": KDIM}, BATCH, QUERIES, KEYS, torch.float32)
    hide = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    meant = r'attn_mask is int64: pass bool \(True means "may NOT attend" here\) or float'
    for args, options, error, message in (
        ((q, v, v), {}, ValueError, r"key has shape \(2, 7, 12\): expected \(batch, length, 11\)"),
        ((q, k, v[0]), {}, ValueError, r"value has shape \(7, 12\): expected .* alike"),
        ((q[0, 0], k, v), {}, ValueError, r"query has shape \(12,\)"),
        ((q, k[:1], v), {}, ValueError, "batches of 2, 1 and 2, .* tokens: pass one batch"),
        ((q, k, v[:, 1:]), {}, ValueError, "key and value 7 and 6 tokens: pass one batch"),
        ((q, k, v), {"attn_mask": hide.long()}, TypeError, meant),
        ((q, k, v), {"attn_mask": hide.T}, ValueError,
         r"attn_mask has shape \(7, 5\): expected \(5, 7\) or \(6, 5, 7\)"),
        ((q, k, v), {"key_padding_mask": hide.T}, ValueError,
         r"key_padding_mask has shape \(7, 5\): expected \(2, 7\)"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            ours(*args, **options)
    with pytest.raises(TypeError, match=r"of\(\) takes an nn.MultiheadAttention, got Linear"):
        MultiheadAttention.of(nn.Linear(2, 2))


@pytest.mark.usefixtures("unannotated")
def test_a_soft_cap_is_a_number() -> None:
    with pytest.raises(TypeError, match="softcap must be a number, got str"):
        MultiheadAttention(DIM, HEADS, softcap="50")


def test_examples_run() -> None:
    names = {"torch": torch, "nn": nn}
    assert doctest.testmod(sys.modules[multihead.__name__], extraglobs=names) == (0, 9)

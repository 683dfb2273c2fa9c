"""`attention` and `observe` inside torch.compile: one graph, the same numbers."""

import inspect
import sys

import pytest
import torch
import torch.nn.functional as F

from oracle import inputs, masks
from scaledot import (
    MultiheadAttention,
    ScaledotError,
    dispatch,
    graph_route,
    multihead,
    observe,
    operators,
    torch_route,
)  # fmt: skip
from scaledot.checks import problem
from scaledot.dispatch import attention
from scaledot.kernels import Terms
from scaledot.masks import Mask, resolve

SHAPE = {"batch": 2, "heads": 6, "queries": 11, "keys": 13}
KERNELS = ("native", "tiled")
pytestmark = pytest.mark.usefixtures("unannotated")


@pytest.fixture(autouse=True)
def _traceable(monkeypatch):
    """No graphs left over, and no type checker, which dynamo cannot follow everywhere."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "scaledot":
            for kind in [module, *(x for x in vars(module).values() if inspect.isclass(x))]:
                if kind is module or kind.__module__.startswith("scaledot"):
                    _unchecked(monkeypatch, kind)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _unchecked(monkeypatch, owner):
    for name, x in list(vars(owner).items()):
        if _is_checked(x):
            monkeypatch.setattr(owner, name, inspect.unwrap(x))
        elif isinstance(x, (staticmethod, classmethod)) and _is_checked(x.__func__):
            monkeypatch.setattr(owner, name, type(x)(inspect.unwrap(x.__func__)))
        elif isinstance(x, property) and _is_checked(x.fget):
            monkeypatch.setattr(owner, name, property(inspect.unwrap(x.fget)))


def _is_checked(x):
    return (
        inspect.isfunction(x)
        and x.__globals__["__name__"].startswith("jaxtyping")
        and not hasattr(x, "_dynamo_marked_constant")
    )


def loss(out, rows):
    return out.sin().sum() + rows.lse.cos().sum() + rows.entropy.square().sum()


CASES = {
    "plain": {},
    "bottom right": {"is_causal": "bottom_right"},
    "window": {"window": (2, 3)},
    "soft-cap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
    "additive": {"attn_mask": torch.linspace(-1, 1, 13)},
    "bool": {"attn_mask": torch.arange(13) % 3 > 0},
    "lengths": {"attn_mask": Mask(lengths=torch.tensor([4, 13]))},
    "documents": {"attn_mask": Mask(segments=(torch.arange(11) // 4, torch.arange(13) // 4))},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_one_graph_gives_output_statistics_and_gradients(kernel, case):
    arguments = CASES[case]

    def attend(q, k, v):
        return attention(
            q, k, v, enable_gqa=True, kernel=kernel, return_stats=True, **arguments
        )  # fmt: skip

    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    q, k, v = (x.requires_grad_() for x in inputs(**SHAPE))
    for f in (attend, graph):
        out, rows = f(q, k, v)
        results.append((out, rows, torch.autograd.grad(loss(out, rows), (q, k, v))))
    (out, rows, grads), (compiled_out, compiled_rows, compiled_grads) = results
    assert torch.equal(out, compiled_out)
    assert compiled_rows.kernel == kernel
    for name, x in vars(rows).items():
        other = vars(compiled_rows)[name]
        if torch.is_tensor(x):
            assert torch.equal(x.nan_to_num(), other.nan_to_num()), name
            assert x.requires_grad == other.requires_grad, name
        else:
            assert x == other
    for grad, other in zip(grads, compiled_grads, strict=True):
        assert torch.equal(grad, other)


# inductor warns of what it imports itself.
inductor = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@inductor
def test_inductor_runs_a_training_step_of_a_module():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            out, rows = attention(q, k, v, is_causal=True, return_stats=True)
            return self.out(out.transpose(1, 2).flatten(2)), rows.entropy.mean()

    block, x = Block(), torch.randn(3, 7, 8)
    compiled = torch.compile(block, fullgraph=True)
    grads = []
    for module in (block, compiled):
        out, entropy = module(x)
        block.zero_grad()
        (out.square().sum() - entropy).backward()
        grads.append([p.grad.clone() for p in block.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


def test_lengths_may_be_dynamic_and_gradients_off():
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(q, k, v):
        return attention(q, k, v, is_causal="bottom_right", return_stats=True)

    for queries, keys in ((5, 5), (7, 9), (3, 30)):
        q, k, v = inputs(heads=3, queries=queries, keys=keys)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out, rows = attend(q, k, v)
                again, same = attention(q, k, v, is_causal="bottom_right", return_stats=True)
            assert torch.equal(out, again)
            assert torch.equal(rows.entropy, same.entropy)


def own(x):
    return x.detach().clone() if torch.is_tensor(x) else x


@pytest.mark.parametrize(
    ("dtype", "statistics", "mask"),
    [
        (torch.float32, True, "none"),
        (torch.float32, False, "additive"),
        (torch.bfloat16, True, "window"),
        (torch.float64, True, "lengths"),
        (torch.float64, False, "additive"),
    ],
    ids=str,
)
def test_operators_keep_torchs_contract(dtype, statistics, mask):
    """Schema, fake tensors, autograd registration and dynamic shapes, by torch's own checker."""
    kernel = "tiled" if dtype == torch.float64 else "native"
    arguments = masks(**SHAPE)[mask]
    p = problem(*inputs(**SHAPE, dtype=dtype), enable_gqa=True, sinks=torch.randn(6))
    seen = resolve(
        p, arguments.get("attn_mask"), arguments.get("is_causal", False), arguments.get("window")
    )
    flat = operators.arguments(seen, Terms(p.scale, 2.0, p.sinks, 0.0, 0), None, kernel)
    bias, sinks, *flat = (own(x) for x in flat)
    q, k, v = (own(x) for x in (p.query, p.key, p.value))
    wanted = [x.requires_grad_() for x in (q, k, v, sinks, bias) if x is not None]
    forward = torch.ops.scaledot.attention.default
    torch.library.opcheck(forward, (q, k, v, bias, sinks, *flat, statistics))
    for x in wanted:
        x.requires_grad_(False)
    out, lse, entropy, numbers, whole = forward(q, k, v, bias, sinks, *flat, True)
    torch.library.opcheck(
        torch.ops.scaledot.attention_backward.default,
        (out.sin(), lse.cos(), entropy.cos(), q, k, v, bias, sinks, *flat,
         out, entropy, numbers, whole, bias is not None),
    )  # fmt: skip


def test_the_operators_gradient_cannot_be_differentiated_again():
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    p = problem(q, k, v)
    flat = operators.arguments(resolve(p), Terms(p.scale, None, None, 0.0, 0), None, "tiled")
    out, *_ = torch.ops.scaledot.attention(p.query, p.key, p.value, *flat, True)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("mask", ["none", "bottom right", "additive", "bool, one a query"])
@pytest.mark.parametrize("statistics", [False, True])
def test_vmap_is_a_loop(mask, statistics):
    arguments = {**masks(**SHAPE)[mask], "enable_gqa": True, "return_stats": statistics}

    def attend(q, k):
        result = attention(q, k, v, **arguments)
        return (result[0], *(result[1].lse, result[1].mean_key)) if statistics else result

    (q, _, _), (q2, k, v) = inputs(**SHAPE), inputs(**SHAPE)
    mapped = torch.func.vmap(attend, in_dims=(2, None), out_dims=0)(torch.stack([q, q2], 2), k)
    for i, x in enumerate((q, q2)):
        torch.testing.assert_close(
            [y[i] for y in mapped] if statistics else mapped[i],
            list(attend(x, k)) if statistics else attend(x, k), equal_nan=True,
        )  # fmt: skip


# observe


class Layer(torch.nn.Module):
    """Calls torch's attention itself, as many a model does."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.once, self.twice = Layer(), Layer()
        self.mixed = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, padding=None):
        x = self.twice(self.twice(self.once(x)))
        return x + self.mixed(x, x, x, key_padding_mask=padding, need_weights=False)[0]


PATHS = ["once", "twice[0]", "twice[1]", "mixed"]


def compiled(model, way, **options):
    if way == "torch.compile(model)":
        return torch.compile(model, fullgraph=True, **options)
    if way == "model.compile()":
        model.compile(fullgraph=True, **options)
    elif way == "model.forward":
        model.forward = torch.compile(model.forward, fullgraph=True, **options)
    return model


WAYS = ("torch.compile(model)", "model.compile()", "model.forward")


def assert_same_statistics(ours, want):
    assert list(ours.heads) == list(want.heads)
    for path, stats in want.heads.items():
        other = ours.heads[path]
        for name, counted in stats.counts.items():
            assert torch.equal(other.counts[name], counted), (path, name)
        for name, measure in stats.measures.items():
            assert torch.equal(other.measures[name].count, measure.count), (path, name)
            torch.testing.assert_close(
                other.measures[name].mean, measure.mean, equal_nan=True, rtol=1e-4, atol=1e-5
            )
    assert ours.calls == want.calls


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_module_is_observed_as_it_was_before(way):
    model = Model().eval()
    x, padding = torch.randn(3, 9, 8), torch.arange(9) > torch.tensor([[8], [5], [8]])
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        with observe(model) as want:
            out = model(x, padding)
        plain = model(x, padding)
        run = compiled(model, way, backend=backend)
        torch.testing.assert_close(run(x, padding), plain)
        assert len(graphs) == 1
        before = int(graph_route.RECORDED)
        for times in (1, 2):
            with observe(run) as seen:
                for _ in range(times):
                    torch.testing.assert_close(run(x, padding), out)
            assert list(seen.heads) == PATHS
            assert all(call.calls == times for call in seen.calls.values())
            if times == 1:
                assert_same_statistics(seen, want)
        # Every observation shares one graph, and nothing of it stays behind.
        assert len(graphs) == 2
        assert int(graph_route.RECORDED) == before + 3 * len(PATHS)
        torch.testing.assert_close(run(x, padding), plain)
        assert len(graphs) == 2
        assert int(graph_route.RECORDED) == before + 3 * len(PATHS)


@inductor
def test_inductor_trains_while_it_is_observed():
    model, x = Model(), torch.randn(3, 9, 8)
    run = torch.compile(model, fullgraph=True)
    grads = []
    for module in (model, run):
        with observe(module, keep="qk") as seen:
            model.zero_grad()
            module(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        assert seen.heads["once"].counts["rows"].tolist() == [27, 27]
        assert not seen.heads["once"].measures["entropy"].mean.requires_grad
        torch.testing.assert_close(
            seen.weights("once", head=1).sum(-1), torch.ones(9), rtol=1e-5, atol=1e-5
        )
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


def test_weights_that_are_asked_for_break_the_graph_and_are_right():
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 9, 8)
    with torch.no_grad():
        out, weights = model(x, x, x)
        run = torch.compile(model, backend="eager")
        with observe(run) as seen:
            ours, shares = run(x, x, x)
    torch.testing.assert_close(ours, out)
    torch.testing.assert_close(shares, weights)
    assert seen.calls["MultiheadAttention"].calls == 1


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


BATCH = {
    "input_ids": torch.arange(18).view(2, 9),
    "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3]),
}


def assert_same_masks(seen, want):
    """Symbols or tensors, a mask shows the same: no later key and no padding."""
    for path, facts in want.masks.items():
        graph = seen.masks[path]
        assert graph.causal is facts.causal is True
        for name in ("rows", "visible_min", "visible_max"):
            assert getattr(graph, name).tolist() == getattr(facts, name).tolist()
        for name in ("later", "padding"):
            assert getattr(graph, name).pairs.tolist() == [0] * 4
        assert graph.padded == facts.padded > 0


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_compiled_transformers_model_is_observed_as_it_was_before(way):
    model, real = llama(), BATCH["attention_mask"].bool()
    with torch.no_grad():
        with observe(model) as want:
            out = model(**BATCH).logits
        plain = model(**BATCH).logits
        run = compiled(model, way, backend="aot_eager")
        with observe(run) as seen:
            torch.testing.assert_close(run(**BATCH).logits[real], out[real])
        assert_same_statistics(seen, want)
        assert_same_masks(seen, want)
        assert seen.heads["model.layers.1.self_attn"].counts["rows"].tolist() == [15] * 4
        torch.testing.assert_close(run(**BATCH).logits, plain)


def test_a_graph_of_more_than_the_model_is_seen_where_the_model_says_where_to_look():
    """transformers asks its configuration which attention to call; torch's own cannot be asked."""
    model = llama()

    @torch.compile(fullgraph=True, backend="eager")
    def step(batch):
        return model(**batch).logits.square().mean()

    with torch.no_grad():
        with observe(model) as want:
            model(**BATCH)
            model(**BATCH)
        with observe(model) as seen:
            step(BATCH)
            step(BATCH)
    assert_same_masks(seen, want)
    assert {p: call.calls for p, call in seen.calls.items()} == dict.fromkeys(want.heads, 2)

    layer, x = Layer(), torch.randn(1, 5, 8)
    whole = torch.compile(lambda x: layer(x) + 1, backend="eager")
    with pytest.raises(ScaledotError, match="compile the model itself"), observe(layer):
        whole(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_what_is_compiled_runs_uncompiled_where_gradients_are_observed(way, kind):
    model = Model() if kind == "torch" else llama()
    arguments = {"x": torch.randn(3, 9, 8)} if kind == "torch" else BATCH

    def step(module):
        out = module(**arguments)
        (out if kind == "torch" else out.logits).square().sum().backward()

    with observe(model, gradients=True) as want:
        step(model)
    run = compiled(model, way, backend="aot_eager")
    with observe(run) as seen:
        step(run)
    assert not any("transmission" in stats.measures for stats in seen.heads.values())
    whole = torch.compile(lambda: step(run), backend="aot_eager")
    with observe(run, gradients=True) as seen:
        step(run)
        whole()
    assert list(seen.heads) == list(want.heads)
    for path, stats in want.heads.items():
        for name in ("transmission", "gradient_norm"):
            one, other = seen.heads[path].measures[name], stats.measures[name]
            assert one.count.equal(2 * other.count)
            torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=0)


def test_a_graph_that_runs_all_the_same_says_that_it_is_not_seen():
    model = llama()
    run = torch.compile(model, backend="aot_eager")
    with observe(model, gradients=True):
        model(**BATCH)
        with (
            torch.compiler.set_stance("default"),
            pytest.raises(ScaledotError, match="no gradients are seen"),
        ):
            run(**BATCH)


@pytest.mark.parametrize("kind", ["causal", "padding", "float padding"])
def test_multihead_attention(kind, monkeypatch):
    # The one that `_traceable` put in place.
    monkeypatch.setitem(torch_route._REPLACEMENTS, multihead.attend, torch_route._multihead)
    ours = MultiheadAttention(12, 3, batch_first=True, num_kv_heads=1, qk_norm=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 12)
    padding = torch.arange(5) > torch.tensor([[2], [4]])
    given = {
        "causal": {"is_causal": True},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.where(padding, -torch.inf, 0.0)},
    }[kind]
    (out, _, rows), (plain, _, exact) = (
        m(x, x, x, **given, return_stats=True) for m in (compiled, ours)
    )
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(rows.entropy, exact.entropy)
    parameters = list(ours.parameters())
    grads = (torch.autograd.grad(y.square().sum(), parameters) for y in (out, plain))
    torch.testing.assert_close(*grads)
    measures = []
    for module in (compiled, ours):
        with observe(module) as seen:
            torch.testing.assert_close(module(x, x, x, **given)[0], plain)
        measures.append(seen.heads["MultiheadAttention"].measures["entropy"])
    assert measures[0].count.equal(measures[1].count)
    torch.testing.assert_close(measures[0].mean, measures[1].mean)


class Own(torch.nn.Module):
    """Calls scaledot.attention itself."""

    def __init__(self, **arguments):
        super().__init__()
        self.project, self.arguments = torch.nn.Linear(8, 24), arguments

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, **self.arguments).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arguments", [
    {"is_causal": True}, {"window": 3, "kernel": "tiled"},
    {"attn_mask": Mask(window=(2, -1)), "is_causal": "top_left", "window": (-1, 4), "softcap": 2.0},
], ids=str)  # fmt: skip
def test_attention_is_observed_inside_a_graph(way, arguments, monkeypatch):
    # The one that `_traceable` put in place.
    monkeypatch.setitem(torch_route._REPLACEMENTS, dispatch.attention, torch_route._attention)
    monkeypatch.setitem(globals(), "attention", dispatch.attention)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Own(**arguments), Own()

        def forward(self, x):
            return self.second(self.first(x))

    model = Two()
    x = torch.randn(3, 9, 8)
    plain = model(x)
    with observe(model) as want:
        assert model(x).equal(plain)
    run = compiled(model, way, backend="aot_eager")
    torch.testing.assert_close(run(x), plain)
    with observe(run) as seen:
        torch.testing.assert_close(run(x), plain)
    assert seen.calls == want.calls
    assert [call.calls for call in seen.calls.values()] == [1, 1]
    assert_same_statistics(seen, want)

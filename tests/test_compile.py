"""`attention` and `observe` inside torch.compile: one graph, the same numbers."""

import inspect
import sys

import pytest
import torch

from oracle import inputs, masks
from scaledot import operators
from scaledot.checks import problem
from scaledot.dispatch import attention
from scaledot.kernels import Terms
from scaledot.masks import Mask, resolve

SHAPE = {"batch": 2, "heads": 6, "queries": 11, "keys": 13}
KERNELS = ("native", "tiled")


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

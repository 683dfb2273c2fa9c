"""observe(): every route, every mask, and nothing changed. Families are in test_families.py."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import scaledot
from scaledot import frames, stages
from scaledot.heads import HeadStats, merge
from scaledot.observation import TOLERANCE

torch.set_num_threads(1)


def close(a: torch.Tensor, b: torch.Tensor, calls: int = 1) -> None:
    limit = TOLERANCE * calls * torch.finfo(b.dtype).eps * max(float(b.detach().abs().max()), 1.0)
    assert a.shape == b.shape
    assert float((a - b).detach().abs().max()) <= limit


OF_THE_WHOLE_ROW = ("key_bias", "bf16_cost_centred")
"""Measures about the mean query or key of a row of the batch, whatever is packed into it."""


def same_statistics(a: HeadStats, b: HeadStats, *, without: Sequence[str] = ()) -> None:
    """Counts exact, moments to 1e-5; padding apart."""
    assert (a.heads, a.kv_heads, a.d_k, a.scale) == (b.heads, b.kv_heads, b.d_k, b.scale)
    for name in ("rows", "empty", "nonfinite", "single"):
        assert a.counts[name].equal(b.counts[name]), name
    assert a.measures.keys() == b.measures.keys()
    for name, x in a.measures.items():
        y = b.measures[name]
        assert x.count.equal(y.count), name
        if name in without:
            continue
        size = 1e-5 * max(float(y.maximum.abs().max()), 1.0)
        for part in ("average", "minimum", "maximum"):
            got, want = getattr(x, part), getattr(y, part)
            torch.testing.assert_close(got, want, atol=size, rtol=1e-5, equal_nan=True, msg=name)
        torch.testing.assert_close(x.var, y.var, atol=10 * size, rtol=1e-4, equal_nan=True)
    for x, y in ((a.scaled, b.scaled), (a.raw, b.raw)):
        assert x.count.equal(y.count)
        torch.testing.assert_close(x.var, y.var, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(x.var_within, y.var_within, atol=1e-5, rtol=1e-5)


class Attention(nn.Module):
    """An attention as people write them, over F.scaled_dot_product_attention."""

    def __init__(self, width: int = 12, heads: int = 3, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(attentions or [Attention(), Attention(is_causal=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class BlindAttention(nn.Module):
    """Computes its own softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def observed(model: nn.Module, *inputs: Any, times: int = 1, **options: Any) -> Any:
    """The observation of some forwards."""
    with scaledot.observe(model, **options) as seen:
        for _ in range(times):
            model(*inputs)
    return seen


# F.scaled_dot_product_attention


def test_statistics_are_those_of_attention() -> None:
    layer = Attention(is_causal=True)
    x = torch.randn(2, 7, 12)
    plain = layer(x)
    with scaledot.observe(layer) as seen:
        looked = layer(x)
    close(looked, plain)
    q, k, v = layer.project(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    _, rows = scaledot.attention(q, k, v, is_causal=True, return_stats=True)
    stats = seen.heads["Attention"]
    want = HeadStats.of(rows, scale=0.5, d_k=4, kv_heads=3)
    for name, measure in want.measures.items():
        assert stats.measures[name].mean.equal(measure.mean), name
        assert stats.measures[name].histogram.equal(measure.histogram), name
    assert stats.measures["query_norm"].count.tolist() == [14] * 3
    assert stats.measures["key_norm"].count.tolist() == [14] * 3
    torch.testing.assert_close(
        stats.measures["key_norm"].maximum, k.norm(dim=-1).amax((0, 2)).double()
    )
    assert stats.measures["previous"].count.tolist() == [12] * 3


def test_calls_say_how_each_module_attends() -> None:
    model = Model()
    with scaledot.observe(model) as seen:
        model(torch.randn(2, 7, 12))
        model(torch.randn(1, 9, 12))
    assert list(seen.calls) == list(seen.heads) == ["layers.0", "layers.1"]
    first, second = seen.calls.values()
    assert (first.kind, first.causal, second.causal) == ("self", False, True)
    assert (first.heads, first.kv_heads, first.d_k, first.scale) == (3, 3, 4, 0.5)
    assert (first.module, first.path, first.index) == ("Attention", "layers.0", None)
    assert (first.calls, first.queries, first.keys) == (2, 9, 9)
    assert first.kernel in ("native", "tiled")
    assert (first.softcap, first.sinks, first.window) == (None, False, None)
    assert repr(seen) == "<Observation of 2 attentions, 6 heads, 4 calls>"
    assert seen.heads["layers.0"].counts["rows"].tolist() == [23] * 3


def test_causal_true_is_torchs_top_left() -> None:
    class Cross(nn.Module):
        def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, kv, kv, is_causal=True)

    model, q, kv = Cross(), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    plain = model(q, kv)
    with scaledot.observe(model) as seen:
        close(model(q, kv), plain)
    assert seen.heads["Cross"].measures["visible"].maximum.tolist() == [5] * 3


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_any_shape_and_mask_that_torch_takes(shape: tuple[int, ...], masked: str | None) -> None:
    class Any_(nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*args)

    q, k, v = torch.randn(3, *shape).unbind()
    mask = None
    if masked:
        mask = torch.rand(*shape[:-1], 5) > 0.3
        mask[..., 0] = True
        mask = mask if masked == "bool" else torch.where(mask, torch.randn(mask.shape), -torch.inf)
    model = Any_()
    plain = model(q, k, v, mask)
    with scaledot.observe(model) as seen:
        close(model(q, k, v, mask), plain)
    rows = seen.heads["Any_"].counts["rows"]
    assert int(rows.sum()) == q.shape[:-1].numel()


def test_grouped_heads() -> None:
    class Grouped(nn.Module):
        def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, kv, kv, scale=0.3, enable_gqa=True)

    model, q, kv = Grouped(), torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4)
    plain = model(q, kv)
    with scaledot.observe(model) as seen:
        close(model(q, kv), plain)
    assert (seen.calls["Grouped"].heads, seen.calls["Grouped"].kv_heads) == (6, 3)
    assert seen.heads["Grouped"].scale == (0.3, 0.3)


def test_a_module_called_twice_has_a_path_for_each_call() -> None:
    shared = Attention()
    model = Model(shared, Attention(), shared)
    with scaledot.observe(model) as seen:
        for _ in range(3):
            model(torch.randn(1, 5, 12))
    assert list(seen.heads) == ["layers.0[0]", "layers.1", "layers.0[1]"]
    assert [c.calls for c in seen.calls.values()] == [3, 3, 3]
    assert [c.index for c in seen.calls.values()] == [0, None, 1]
    assert seen.calls["layers.0[1]"].path == "layers.0"


def test_other_models_are_left_alone() -> None:
    model, other, x = Model(), Model(), torch.randn(1, 5, 12)
    plain = other(x)
    with scaledot.observe(model) as seen:
        assert other(x).equal(plain)
        model(x)
    assert [c.calls for c in seen.calls.values()] == [1, 1]


# scaledot.attention


class Own(Attention):
    """The same over scaledot.attention, with any of its arguments; `rows` where it gave them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = scaledot.attention(q, k, v, **self.options)
        out, self.rows = out if isinstance(out, tuple) else (out, None)
        return out.transpose(1, 2).flatten(2)


def test_attention_is_seen_as_torchs_in_its_place() -> None:
    mask = torch.rand(7, 7) > 0.3
    for options in ({}, {"is_causal": True}, {"attn_mask": mask, "scale": 0.3}):
        torch.manual_seed(0)
        ours, torchs = Model(Own(**options), Own()), Model(Attention(), Attention())
        torchs.load_state_dict(ours.state_dict())
        torchs.layers[0].options = dict(options)
        masks = [options["attn_mask"]] if "attn_mask" in options else []
        if masks:
            del torchs.layers[0].options["attn_mask"]
            torchs.layers[0].register_forward_pre_hook(lambda _, args: (*args, mask))
        x = torch.randn(2, 7, 12)
        mine, theirs = observed(ours, x), observed(torchs, x)
        assert list(mine.heads) == list(theirs.heads) == ["layers.0", "layers.1"]
        assert mine.unobserved == ()
        for path, stats in mine.heads.items():
            same_statistics(stats, theirs.heads[path])
            assert dataclasses.replace(mine.calls[path], module="Attention") == theirs.calls[path]


OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"causal": False, "window": None, "softcap": None, "sinks": False}),
    "causal": ({"is_causal": True}, {"causal": True}),
    "bottom right": ({"is_causal": "bottom_right", "scale": 0.3}, {"causal": True, "scale": 0.3}),
    "window": ({"window": 3}, {"causal": True, "window": 3}),
    "two-sided window": ({"window": (1, 2)}, {"causal": False, "window": (1, 2)}),
    "Mask": ({"attn_mask": scaledot.Mask(lengths=[5, 7])}, {"causal": False}),
    "Mask and all": (
        {"attn_mask": scaledot.Mask(window=4, segments=torch.tensor([0, 0, 1, 1, 1, 2, 2])),
         "is_causal": True, "window": (2, -1)},
        {"window": 3},
    ),
    "bool and window": ({"attn_mask": torch.ones(7, 7).bool(), "window": 2}, {"window": 2}),
    "float, one a head": ({"attn_mask": torch.linspace(-1, 1, 147).view(3, 7, 7)}, {}),
    "soft-cap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "sinks": ({"sinks": torch.tensor([0.5, -1, 2])}, {"sinks": True}),
    "tiled": ({"kernel": "tiled"}, {"kernel": "tiled"}),
    "statistics": ({"return_stats": True, "window": 2}, {"window": 2}),
    "dropout": ({"dropout_p": 0.3}, {"kernel": "tiled"}),
    "dropout and statistics": ({"dropout_p": 0.3, "return_stats": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"full": True}, {"gradients": True}], ids=str)
@pytest.mark.parametrize("case", OWN)
def test_every_argument_of_attention_and_no_bit_changed(case: str, how: dict[str, Any]) -> None:
    arguments, said = OWN[case]
    torch.manual_seed(0)
    layer, x = Own(**arguments), torch.randn(2, 7, 12)
    parameters = list(layer.parameters())

    def run() -> tuple[torch.Tensor, Any, Any]:
        torch.manual_seed(1)
        out = layer(x)
        loss = out.square().sum()
        if layer.rows is not None:
            loss = loss + layer.rows.entropy.square().sum()
        return out, layer.rows, torch.autograd.grad(loss, parameters)

    out, rows, grads = run()
    with scaledot.observe(layer, **how) as seen, scaledot.observe(layer) as outer:
        looked, given, ours = run()
    assert looked.equal(out)
    assert all(a.equal(b) for a, b in zip(ours, grads, strict=True))
    if rows is not None:
        assert given.kernel == rows.kernel
        for name in ("entropy", "lse", "top_margin", "visible"):
            assert getattr(given, name).equal(getattr(rows, name))
    with torch.no_grad(), scaledot.observe(layer, **how) as again:
        torch.manual_seed(1)
        assert layer(x).equal(out)
    for call in (*seen.calls.values(), *outer.calls.values(), *again.calls.values()):
        assert (call.path, call.calls, call.module) == ("Own", 1, "Own")
        assert {name: getattr(call, name) for name in said} == said
    stats = seen.heads["Own"]
    if "gradients" in how:
        assert stats.measures["transmission"].count.sum() > 0
    q, k, v = layer.project(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    plain = {**arguments, "dropout_p": 0.0, "return_stats": True, "kernel": "tiled"}
    expected = scaledot.attention(q, k, v, **plain)[1]
    keys = arguments.get("attn_mask")
    real = torch.ones(2, 7, dtype=torch.bool)
    if isinstance(keys, scaledot.Mask) and keys.lengths is not None:
        real[0, 5:] = False
    assert stats.counts["padding"].tolist() == [int((~real).sum())] * 3
    for name in ("entropy", "lse"):
        mean = getattr(expected, name).detach().transpose(0, 1)[:, real].double().mean(-1)
        torch.testing.assert_close(stats.measures[name].mean, mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)])
def test_attention_of_any_axes_and_grouped_heads(shape: tuple[int, ...]) -> None:
    class Bare(nn.Module):
        def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return scaledot.attention(q, kv, kv, is_causal=True, enable_gqa=True)

    q = torch.randn(shape)
    kv = torch.randn(shape) if len(shape) == 2 else torch.randn(*shape[:-3], 1, *shape[-2:])
    model = Bare()
    plain = model(q, kv)
    for full in (False, True):
        with scaledot.observe(model, full=full) as seen:
            assert model(q, kv).equal(plain)
        (call,) = seen.calls.values()
        heads = 1 if len(shape) == 2 else 3
        assert (call.heads, call.kv_heads, call.calls, call.causal) == (heads, 1, 1, True)
        (stats,) = seen.heads.values()
        assert stats.counts["rows"].tolist() == [q.numel() // 4 // heads] * heads


class Passing(TorchFunctionMode):
    """Somebody else's mode, which changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_attention_elsewhere_is_left_alone() -> None:
    model, x = Model(Own()), torch.randn(2, 7, 12)
    q = torch.randn(2, 3, 7, 4)
    plain = scaledot.attention(q, q, q)
    with scaledot.observe(model) as seen:
        assert scaledot.attention(q, q, q).equal(plain)
        model(x)
        assert scaledot.attention(q, q, q).equal(plain)
    assert [call.calls for call in seen.calls.values()] == [1]


def test_row_statistics_alone_are_no_attention() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaledot.row_stats(x, x).entropy

    with pytest.raises(scaledot.ScaledotError, match="no attention was observed"):
        observed(Rows(), torch.randn(2, 3, 7, 4))


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), Passing], ids=["device", "passing"])
def test_attention_under_the_modes_of_others(mode: Any) -> None:
    class Inside(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with mode():
                return super().forward(x)

    layer, x = Own(is_causal=True, return_stats=True), torch.randn(2, 7, 12)
    inside = Inside(is_causal=True, return_stats=True)
    inside.load_state_dict(layer.state_dict())
    out = layer(x)
    with mode():
        assert layer(x).equal(out)
        with scaledot.observe(layer) as around:
            assert layer(x).equal(out)
    with scaledot.observe(inside) as within:
        assert inside(x).equal(out)
    for seen in (around, within):
        assert [call.calls for call in seen.calls.values()] == [1]


def test_multihead_attention_of_ours_counts_once_beside_attention() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = scaledot.MultiheadAttention(12, 3, batch_first=True)
            self.own = Own()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.many(x, x, x, return_stats=True)[0])

    model, x = Both(), torch.randn(2, 7, 12)
    plain = model(x)
    with scaledot.observe(model) as seen, scaledot.observe(model.many) as part:
        assert model(x).equal(plain)
    assert {path: call.calls for path, call in seen.calls.items()} == {"many": 1, "own": 1}
    assert {path: call.calls for path, call in part.calls.items()} == {"MultiheadAttention": 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_run_again_by_a_checkpoint_counts_once(reentrant: bool) -> None:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model, x = Checkpointed(Own(), Own(window=2)), torch.randn(2, 7, 12, requires_grad=True)
    with scaledot.observe(model, gradients=True) as seen:
        model(x).square().sum().backward()
    assert [call.calls for call in seen.calls.values()] == [1, 1]
    for stats in seen.heads.values():
        assert stats.measures["gradient_norm"].count.tolist() == [14] * 3


# nn.MultiheadAttention and torch's transformer


def _attention_masks(kind: str, batch: int, heads: int, queries: int, keys: int) -> dict[str, Any]:
    hide = torch.rand(queries, keys) > 0.6
    hide[:, 0] = False
    many = torch.rand(batch * heads, queries, keys) > 0.6
    many[..., 0] = False
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, 3:] = True
    additive = torch.where(hide, -torch.inf, torch.randn(queries, keys))
    return {
        "none": {},
        "bool": {"attn_mask": hide},
        "float": {"attn_mask": additive},
        "per head": {"attn_mask": many},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.where(padding, -torch.inf, 0.0)},
        "added padding": {"key_padding_mask": torch.where(padding, -torch.inf, 0.25)},
        "both": {"key_padding_mask": padding, "attn_mask": hide},
        "both float": {
            "key_padding_mask": torch.where(padding, -torch.inf, 0.0), "attn_mask": additive,
        },
        "causal": {
            "attn_mask": nn.Transformer.generate_square_subsequent_mask(queries),
            "is_causal": queries == keys,
        },
    }[kind]  # fmt: skip


MHA_MASKS = ("none", "bool", "float", "per head", "padding", "float padding", "added padding",
             "both", "both float", "causal")  # fmt: skip


@pytest.mark.parametrize("kind", MHA_MASKS)
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_multihead_attention(kind: str, extra: dict[str, bool]) -> None:
    for training, weights, average in itertools.product((True, False), repeat=3):
        layer = nn.MultiheadAttention(12, 3, batch_first=True, **extra).train(training)
        x = torch.randn(2, 5, 12)
        given = _attention_masks(kind, 2, 3, 5, 5)
        options = {"need_weights": weights, "average_attn_weights": average}
        plain, plain_weights = layer(x, x, x, **given, **options)
        with scaledot.observe(layer) as seen:
            looked, looked_weights = layer(x, x, x, **given, **options)
        close(looked, plain)
        if weights:
            close(looked_weights, plain_weights)
        else:
            assert looked_weights is None
        stats = seen.heads["MultiheadAttention"]
        padded = 2
        if "padding" not in kind and "both" not in kind:
            # Keys that a tensor mask hides from every query.
            shown = seen.heads["MultiheadAttention"].counts["padding"]
            padded = int(shown[0]) if kind in ("bool", "float") else 0
        assert stats.counts["padding"].tolist() == [padded] * 3
        assert stats.counts["rows"].tolist() == [10 - padded] * 3
        assert seen.calls["MultiheadAttention"].causal is (kind == "causal")


def test_multihead_attention_across_widths_and_unbatched() -> None:
    layer = nn.MultiheadAttention(12, 3, kdim=7, vdim=5)
    q, k, v = torch.randn(4, 2, 12), torch.randn(6, 2, 7), torch.randn(6, 2, 5)
    plain = layer(q, k, v)
    with scaledot.observe(layer) as seen:
        looked = layer(q, k, v)
        close(layer(q[:, 0], k[:, 0], v[:, 0])[0], plain[0][:, 0])
        close(layer(q[:, 0], k[:, 0], v[:, 0])[1], plain[1][0])
    close(looked[0], plain[0])
    close(looked[1], plain[1])
    assert seen.calls["MultiheadAttention"].kind == "cross"


def test_weights_asked_of_multihead_attention_have_gradients() -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    grads = []
    x = torch.randn(2, 5, 12)
    for look in (False, True):
        layer.zero_grad()
        context = scaledot.observe(layer) if look else torch.enable_grad()
        with context:
            out, weights = layer(x, x, x)
        (out.square().sum() + weights.square().sum()).backward()
        grads.append(layer.in_proj_weight.grad.clone())
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_dropped_weights_are_what_torch_returns() -> None:
    layer = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 12)
    torch.manual_seed(3)
    plain, plain_weights = layer(x, x, x)
    torch.manual_seed(3)
    with scaledot.observe(layer):
        looked, looked_weights = layer(x, x, x)
    close(looked, plain)
    close(looked_weights, plain_weights)
    assert float((looked_weights.sum(-1) - 1).detach().abs().max()) > 0.01


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [False, True])
def test_transformer_encoder(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).train(training)
    x = torch.randn(2, 7, 12)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.set_grad_enabled(training):
        plain = encoder(x, src_key_padding_mask=padding)
        with scaledot.observe(encoder) as seen:
            assert not torch.backends.mha.get_fastpath_enabled()
            looked = encoder(x, src_key_padding_mask=padding)
    # The fused path that runs unobserved in eval sets padded positions to 0.
    close(looked[~padding], plain[~padding], 4)
    assert torch.backends.mha.get_fastpath_enabled()
    assert list(seen.heads) == ["layers.0.self_attn", "layers.1.self_attn"]
    for stats in seen.heads.values():
        assert stats.counts["rows"].tolist() == [11] * 4
        assert stats.counts["padding"].tolist() == [3] * 4


def test_transformer_decoder_layer_counts_its_own_padding() -> None:
    decoder = nn.TransformerDecoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    padding, memory_padding = torch.zeros(2, 5).bool(), torch.zeros(2, 7).bool()
    padding[0, 3:], memory_padding[1, 2:] = True, True
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    given = {
        "tgt_mask": causal.isinf(), "tgt_key_padding_mask": padding,
        "memory_key_padding_mask": memory_padding,
    }  # fmt: skip
    plain = decoder(x, memory, **given)
    with scaledot.observe(decoder) as seen:
        looked = decoder(x, memory, **given)
    close(looked, plain, 2)
    kinds = {path: (c.kind, c.causal) for path, c in seen.calls.items()}
    assert kinds == {"self_attn": ("self", True), "multihead_attn": ("cross", False)}
    alone = nn.TransformerDecoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    alone.load_state_dict(decoder.state_dict())
    with scaledot.observe(alone) as one_by_one:
        alone(x[:1, :3], memory[:1], tgt_mask=causal[:3, :3].isinf())
        alone(x[1:], memory[1:, :2], tgt_mask=causal.isinf())
    for path, stats in seen.heads.items():
        same_statistics(stats, one_by_one.heads[path])


# What nobody can see, and what must not be touched


def test_nothing_seen_is_an_error() -> None:
    model = Model(BlindAttention())
    with pytest.raises(scaledot.ScaledotError, match=r"no attention was observed: layers\.0 comp"):
        observed(model, torch.randn(1, 5, 12))
    with pytest.raises(scaledot.ScaledotError, match="did not run inside the context"):
        observed(model, times=0)


def test_what_was_not_seen_is_named() -> None:
    model = Model(Attention(), BlindAttention(), nn.TransformerEncoderLayer(12, 3, 16))
    with scaledot.observe(model) as seen:
        model(torch.randn(1, 5, 12))
    assert seen.unobserved == ("layers.1",)
    assert list(seen.heads) == ["layers.0", "layers.2.self_attn"]


def test_an_exception_passes_and_everything_is_restored() -> None:
    model = Model()
    with pytest.raises(KeyError, match="mine"), scaledot.observe(model):
        raise KeyError("mine")
    with pytest.raises(RuntimeError), scaledot.observe(model):
        model(torch.randn(1, 5, 13))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    with scaledot.observe(model) as seen:
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 5, 13))
        model(torch.randn(1, 5, 12))
    assert list(seen.heads) == ["layers.0", "layers.1"]


def test_nested_and_repeated_contexts_all_record() -> None:
    model, x = Model(), torch.randn(1, 5, 12)
    with scaledot.observe(model) as outer:
        model(x)
        with scaledot.observe(model.layers[0]) as part, scaledot.observe(model) as inner:
            model(x)
        model(x)
    assert [c.calls for c in outer.calls.values()] == [3, 3]
    assert [c.calls for c in inner.calls.values()] == [1, 1]
    assert list(part.heads) == ["Attention"]
    same_statistics(part.heads["Attention"], inner.heads["layers.0"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "kv"}, r'keep is \'kv\': pass "qk" or None'),
        ({"layers": [0]}, 'layers and last say what to keep: pass keep="qk" with them'),
        ({"keep": "qk", "last": 0}, "last is 0: pass at least 1 call"),
        ({"keep": "qk", "layers": ["layer"]}, "layers has 'layer', no module of this model; "
         r"attention modules: layers\.0, layers\.1"),
        ({"keep": "qk", "layers": [-1]}, "layers has -1: pass a position"),
    ],
)  # fmt: skip
def test_bad_arguments(options: dict[str, Any], message: str, unannotated: None) -> None:
    with pytest.raises(ValueError, match=message):
        observed(Model(), times=0, **options)
    with pytest.raises(TypeError, match=r"observe needs an nn\.Module, got str"):
        observed("model", times=0)


# Keeping query and key


def test_weights_and_trace_of_what_was_kept() -> None:
    model = Model()
    x = torch.randn(2, 7, 12)
    with scaledot.observe(model, keep="qk") as seen:
        model(torch.randn(1, 3, 12))
        model(x)
    hidden = x + model.layers[0](x)
    q, k, v = model.layers[1].project(hidden).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    want = scaledot.trace(q, k, v, is_causal=True)
    for batch, head in itertools.product(range(2), range(3)):
        at = {"head": head, "batch": batch}
        torch.testing.assert_close(seen.weights("layers.1", **at), want.weights[batch, head])
        tile = seen.weights("layers.1", rows=slice(2, 5), keys=slice(1, -1), **at)
        torch.testing.assert_close(tile, want.weights[batch, head, 2:5, 1:-1])
        assert seen.weights(1, rows=-1, keys=0, **at).shape == (1, 1)
        trace = seen.trace("layers.1", **at)
        torch.testing.assert_close(trace.output, want.output[batch, head])
        torch.testing.assert_close(trace.masked, want.masked[batch, head])
    assert seen.weights("layers.1", head=0, call=0).shape == (3, 3)
    assert seen.weights("layers.1", head=0, call=-2).shape == (3, 3)
    assert "query, key and value kept" in repr(seen)


def test_errors_name_what_exists() -> None:
    model = Model()
    with scaledot.observe(model, keep="qk", layers=["layers.1"]) as seen:
        model(torch.randn(2, 5, 12))
    with pytest.raises(scaledot.ScaledotError, match=r"'layers\.0' was not kept; kept: layers\.1"):
        seen.weights("layers.0", head=0)
    with pytest.raises(scaledot.ScaledotError, match="'x' was not observed; kept: layers"):
        seen.trace("x", head=0)
    with pytest.raises(scaledot.ScaledotError, match="no attention 2: 2 were observed"):
        seen.trace(2, head=0)
    with pytest.raises(IndexError, match=r"layers\.1 has head 0 to 2: head 3 does not exist"):
        seen.weights("layers.1", head=3)
    with pytest.raises(IndexError, match=r"layers\.1 has batch 0 to 1: batch 2 does not exist"):
        seen.weights("layers.1", head=0, batch=2)
    with pytest.raises(IndexError, match=r"layers\.1 has 1 kept calls: call 1 does not exist"):
        seen.weights("layers.1", head=0, call=1)
    with scaledot.observe(model) as seen:
        model(torch.randn(2, 5, 12))
    with pytest.raises(scaledot.ScaledotError, match=r'not kept: observe\(model, keep="qk"\)'):
        seen.weights("layers.0", head=0)


def test_keeping_stops_before_memory_is_gone() -> None:
    model = Model()
    x = torch.randn(2, 640, 12)
    one = 2 * (640 * 12 * 4 * 3 + 640 * 3 * 4)
    # Two modules to keep: the first call already says what the forward needs.
    with pytest.raises(
        scaledot.ScaledotError, match=r"needs about 0\.4 MiB or more, keep_bytes is"
    ):
        observed(model, x, keep="qk", keep_bytes=2 * one - 1)
    with pytest.raises(scaledot.ScaledotError, match=r"narrow it with layers=\[…\] or last=1"):
        observed(model, x, times=2, keep="qk", keep_bytes=2 * one)
    for narrow in ({"last": 1}, {"layers": [1]}, {"layers": ["layers.1"], "last": 2}):
        seen = observed(model, x, times=2, keep="qk", keep_bytes=2 * one, **narrow)
        assert seen.weights("layers.1", head=2).shape == (640, 640)
    seen = observed(model, x, keep="qk", layers=[1], keep_bytes=2 * one)
    with pytest.raises(scaledot.ScaledotError, match="the stages of 640 × 640 scores need"):
        seen.trace("layers.1", head=0)


def test_what_is_kept_cannot_be_overwritten() -> None:
    layer, x = Attention(), torch.randn(1, 5, 12)
    with scaledot.observe(layer, keep="qk") as seen, torch.no_grad():
        layer(x)
        before = seen.weights("Attention", head=0)
        layer.project.weight.zero_()
        x.zero_()
    assert seen.weights("Attention", head=0).equal(before)


def test_weights_of_rows_that_see_nothing() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(1, 2, 4, 3)
    low = torch.zeros(4, 4)
    low[1] = torch.finfo(torch.float32).min
    low[2] = -torch.inf
    low[3, :2] = -torch.inf
    model = Masked()
    with scaledot.observe(model, keep="qk") as seen:
        model(x, low)
    weights = seen.weights("Masked", head=1)
    torch.testing.assert_close(weights, seen.trace("Masked", head=1).weights)
    assert weights[1].tolist() == [0.25] * 4
    assert weights[2].tolist() == [0] * 4


# Training


def test_ctrl_c_leaves_nothing_behind() -> None:
    class Stopped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = Model(Attention(), Stopped())
    with pytest.raises(KeyboardInterrupt):
        observed(model, torch.randn(1, 5, 12))
    assert torch.overrides._get_current_function_mode() is None
    assert torch.backends.mha.get_fastpath_enabled()


def test_heads_that_do_not_group_are_an_error_as_in_torch() -> None:
    class Ungrouped(nn.Module):
        def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, kv, kv)

    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        observed(Ungrouped(), torch.randn(1, 4, 3, 2), torch.randn(1, 2, 3, 2))


def test_gradients_flow_and_are_the_same() -> None:
    model, x = Model(), torch.randn(2, 7, 12)
    grads = []
    for look in (False, True):
        model.zero_grad()
        with scaledot.observe(model) if look else torch.enable_grad():
            model(x).square().sum().backward()
        grads.append(model.layers[0].project.weight.grad.clone())
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_counted_once(reentrant: bool) -> None:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                step = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
                x = x + step
            return x

    model, x = Checkpointed(), torch.randn(2, 7, 12, requires_grad=True)
    with scaledot.observe(model) as seen:
        for _ in range(2):
            model(x).square().sum().backward()
    assert list(seen.heads) == ["layers.0", "layers.1"]
    assert [c.calls for c in seen.calls.values()] == [2, 2]
    assert seen.heads["layers.0"].counts["rows"].tolist() == [28] * 3


def test_autocast_and_half_precision() -> None:
    model, x = Model(), torch.randn(2, 7, 12)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with scaledot.observe(model) as seen:
            looked = model(x)
    assert float((looked - plain).detach().abs().max()) < 0.1
    assert seen.heads["layers.0"].measures["entropy"].mean.isfinite().all()
    half = Model().to(torch.bfloat16)
    with scaledot.observe(half) as seen:
        assert half(x.bfloat16()).dtype == torch.bfloat16


# Hugging Face


transformers = pytest.importorskip("transformers", minversion="5")

from transformers import masking_utils as hf  # noqa: E402

from scaledot import huggingface  # noqa: E402

WORDS = 61


def llama(**settings: Any) -> Any:
    options = {
        "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    kind = "Mistral" if "sliding_window" in settings else "Llama"
    config = getattr(transformers, f"{kind}Config")(**(options | settings))
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def bert(**settings: Any) -> Any:
    options = {
        "vocab_size": WORDS, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32, "max_position_embeddings": 4200,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**(options | settings))).eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(4, WORDS, shape)


def padded(texts: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention_mask) of one batch, padded on one side."""
    longest = max(len(t) for t in texts)
    rows, real = [], []
    for t in texts:
        gap = torch.zeros(longest - len(t), dtype=torch.long)
        parts = [t, gap] if side == "right" else [gap, t]
        ones = [torch.ones_like(t), gap] if side == "right" else [gap, torch.ones_like(t)]
        rows.append(torch.cat(parts))
        real.append(torch.cat(ones))
    return torch.stack(rows), torch.stack(real)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, bert, lambda: llama(sliding_window=3)])
@torch.no_grad()
def test_a_padded_batch_is_its_texts_alone(make: Any, implementation: str, side: str) -> None:
    model = make()
    model.set_attn_implementation(implementation)
    texts = [ids(n) for n in (9, 4, 7)]
    batch, real = padded(texts, side)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with scaledot.observe(model) as together:
        model(input_ids=batch, attention_mask=real, position_ids=positions)
    with scaledot.observe(model) as alone:
        for text in texts:
            model(input_ids=text[None], attention_mask=torch.ones(1, len(text)))
    assert list(together.heads) == list(alone.heads)
    for path, stats in together.heads.items():
        same_statistics(stats, alone.heads[path])
        assert stats.counts["padding"].tolist() == [3 * 9 - 20] * 4
        assert alone.heads[path].counts["padding"].tolist() == [0] * 4


def seq2seq(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=WORDS, d_model=20, d_kv=6, d_ff=32, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).eval()
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=20, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=4, decoder_attention_heads=4, pad_token_id=0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind", ["t5", "bart"])
@torch.no_grad()
def test_a_padded_pair_is_its_texts_alone(kind: str) -> None:
    model = seq2seq(kind)
    sources, targets = [ids(n) for n in (9, 4)], [ids(n) for n in (3, 6)]
    source, source_real = padded(sources, "right")
    target, target_real = padded(targets, "right")
    with scaledot.observe(model) as together:
        model(
            input_ids=source, attention_mask=source_real, decoder_input_ids=target,
            decoder_attention_mask=target_real,
        )  # fmt: skip
    with scaledot.observe(model) as alone:
        for s, t in zip(sources, targets, strict=True):
            model(input_ids=s[None], decoder_input_ids=t[None])
    kinds = [c.kind for c in together.calls.values()]
    assert kinds == ["self"] * 2 + ["self", "cross"] * 2
    for path, stats in together.heads.items():
        same_statistics(stats, alone.heads[path])
        padding = 5 if together.calls[path].queries == 9 else 3
        assert stats.counts["padding"].tolist() == [padding] * 4


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes with memory of its own."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                size = x.untyped_storage().nbytes() // x.element_size()
                self.numel = max(self.numel, size)
        return result


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["causal", "window", "encoder"])
@torch.no_grad()
def test_no_square_matrix_at_4096_tokens(kind: str, side: str | None) -> None:
    one_layer = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    if kind == "encoder":
        model = bert(**one_layer)
    else:
        window = {"sliding_window": 300} if kind == "window" else {}
        model = llama(**one_layer, num_key_value_heads=1, **window).model
    n = 4096
    given = {"input_ids": ids(1, n)}
    if side is not None:
        real = torch.ones(1, n, dtype=torch.long)
        real[:, slice(0, 900) if side == "left" else slice(-900, None)] = 0
        given["attention_mask"] = real
    with scaledot.observe(model) as seen, Largest() as largest:
        model(**given)
    stats = next(iter(seen.heads.values()))
    assert int(stats.counts["rows"][0]) == n - (900 if side else 0)
    assert int(stats.measures["visible"].maximum[0]) == (
        300 if kind == "window" else n - (900 if side else 0)
    )
    # tiled holds 2¹⁹ scores at once; the matrix would be 2²⁴.
    assert largest.numel <= n * n // 16


def _functions() -> dict[str, Any]:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 0, 1]])
    packed = hf.packed_sequence_mask_function(documents)
    window = hf.sliding_window_causal_mask_function(3)
    return {
        "causal": hf.causal_mask_function,
        "full": hf.bidirectional_mask_function,
        "window": window,
        "full window": hf.sliding_window_bidirectional_mask_function(2),
        "chunks": hf.chunked_causal_mask_function(3, torch.tensor([0, 2])),
        "packed": hf.and_masks(
            hf.remap_positions_for_packed_sequence(hf.causal_mask_function, positions), packed
        ),
        "packed window": hf.and_masks(
            hf.remap_positions_for_packed_sequence(window, positions), packed
        ),
    }


GEOMETRIES = {
    "plain": (8, 8, 0, 0),
    "decode": (1, 8, 7, 0),
    "chunked prefill": (3, 8, 5, 0),
    "static": (3, 8, 2, 0),
    "static prefill": (8, 12, 0, 0),
    "sliding": (2, 6, 9, 5),
    "sliding decode": (1, 3, 9, 7),
}


@pytest.mark.parametrize("padding", [None, "left", "right", "short"])
@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        (name, geometry)
        for name, geometry in itertools.product(_functions(), GEOMETRIES)
        if geometry == "plain" or "packed" not in name  # packing has no cache
    ],
)
def test_symbols_say_what_the_mask_function_says(
    name: str, padding: str | None, geometry: str
) -> None:
    """Each known form, padding and cache geometry, against transformers' own dense mask."""
    queries, keys, q_offset, kv_offset = GEOMETRIES[geometry]
    real = None
    if padding is not None:
        real = torch.ones(2, keys + kv_offset - (2 if padding == "short" else 0), dtype=torch.bool)
        real[1, slice(0, 2) if padding == "left" else slice(-2, None)] = False
    function = _functions()[name]
    given = (2, queries, keys, q_offset, kv_offset, function, real)
    mask = huggingface._mask_function(*given, torch.float32)
    want = hf.sdpa_mask(*given, allow_is_causal_skip=False)
    assert tuple(mask.shape) == (2, 1, queries, keys)
    known = isinstance(mask, huggingface.SymbolicMask)
    # A two-sided window with a cache is the only one that stays dense.
    assert known or (name == "full window" and geometry != "plain")
    if not known:
        assert (mask == 0).equal(want)
        return
    q, k = torch.randn(2, 1, queries, 3), torch.randn(2, 1, mask.keys, 3)
    visible = stages.trace(q, k, k, mask.mask).visible
    assert F.pad(visible, (0, keys - mask.keys)).equal(want)
    # Any operation on it finds the eager mask.
    dense = hf.eager_mask(*given, torch.float32)
    assert (mask + 0).equal(dense)
    assert mask[:, :, :, -2:].equal(dense[:, :, :, -2:])
    assert torch.cat([dense, mask]).equal(torch.cat([dense, dense]))
    assert mask.to(torch.float32) is mask
    assert mask.to(torch.float64).equal(dense.double())
    assert copy.deepcopy(mask).equal(dense)


def test_unknown_mask_functions_stay_dense() -> None:
    causal, full = hf.causal_mask_function, hf.bidirectional_mask_function
    documents = torch.zeros(2, 8, dtype=torch.long)
    for function in (
        hf.or_masks(causal, full),
        hf.and_masks(causal, lambda b, h, q, k: k != 3),
        hf.or_masks(causal, hf.blockwise_overlay(documents)),
        hf.remap_positions_for_packed_sequence(causal, documents),
    ):
        mask = huggingface._mask_function(2, 8, 8, mask_function=function)
        assert type(mask) is torch.Tensor
        assert mask.equal(hf.eager_mask(2, 8, 8, mask_function=function))


def test_hollow_numbers_of_a_symbolic_mask_are_nan() -> None:
    mask = huggingface._mask_function(1, 4, 4)
    with torch._C.DisableTorchFunctionSubclass():
        assert mask.isnan().all()
        assert mask.untyped_storage().nbytes() == 4


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model, texts = llama(), [ids(n) for n in (5, 3, 6)]
    with scaledot.observe(model) as together:
        model(
            input_ids=torch.cat(texts)[None],
            position_ids=torch.cat([torch.arange(len(t)) for t in texts])[None],
            use_cache=False,
        )
    with scaledot.observe(model) as alone:
        for text in texts:
            model(input_ids=text[None])
    for path, stats in together.heads.items():
        same_statistics(stats, alone.heads[path], without=OF_THE_WHOLE_ROW)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_generation_is_the_same_and_sees_every_row_once(cache: str, window: int | None) -> None:
    model = llama(sliding_window=window) if window else llama()
    texts = [ids(6), ids(4)]
    batch, real = padded(texts, "left")
    options = {
        "attention_mask": real, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False,
        "cache_implementation": None if cache == "dynamic" else "static",
    }  # fmt: skip
    plain = model.generate(batch, **options)
    with scaledot.observe(model) as seen:
        looked = model.generate(batch, **options)
    assert looked.equal(plain)
    whole = torch.cat([real, torch.ones(2, 4, dtype=torch.long)], 1)
    with scaledot.observe(model) as at_once:
        model(
            input_ids=looked[:, :-1], attention_mask=whole,
            position_ids=(whole.cumsum(-1) - 1).clamp(min=0), use_cache=False,
        )  # fmt: skip
    for path, stats in seen.heads.items():
        want = at_once.heads[path]
        for name in ("rows", "empty", "padding", "single"):
            assert stats.counts[name].equal(want.counts[name]), name
        for name in ("visible", "entropy", "score_var", "previous", "first", "current", "lse"):
            got = stats.measures[name]
            assert got.count.equal(want.measures[name].count), name
            torch.testing.assert_close(got.mean, want.measures[name].mean, atol=1e-5, rtol=1e-4)
        assert seen.calls[path].calls == 5


@pytest.mark.parametrize("kind", ["t5", "bart"])
@torch.no_grad()
def test_generation_with_cross_attention(kind: str) -> None:
    model = seq2seq(kind)
    source, real = padded([ids(7), ids(4)], "right")
    options = {"attention_mask": real, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    plain = model.generate(source, **options)
    with scaledot.observe(model) as seen:
        assert model.generate(source, **options).equal(plain)
    for path, call in seen.calls.items():
        if call.kind == "cross":
            visible = seen.heads[path].measures["visible"]
            assert (visible.minimum.tolist(), visible.maximum.tolist()) == ([4] * 4, [7] * 4)


@torch.no_grad()
def test_statistics_change_no_bit() -> None:
    model, x = llama(), ids(2, 9)
    with scaledot.observe(model):
        looked = model(input_ids=x).logits
    before = model.config._attn_implementation
    with huggingface.routed(model):
        unlooked = model(input_ids=x).logits
    assert looked.equal(unlooked)
    assert model.config._attn_implementation == before


def _names(model: Any) -> list[str | None]:
    found = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            found.append(config._attn_implementation)
            found += [getattr(config, name)._attn_implementation for name in config.sub_configs]
    return found


@torch.no_grad()
def test_attention_beside_a_transformers_model_counts_once() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.own = llama(), Own(24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.text(x, output_hidden_states=True).hidden_states[-1])

    model, x = Around(), ids(2, 7)
    layers = ["text.model.layers.0.self_attn", "text.model.layers.1.self_attn"]
    with torch.no_grad(), scaledot.observe(model) as seen:
        model(x)
    assert {path: call.calls for path, call in seen.calls.items()} == dict.fromkeys(
        [*layers, "own"], 1
    )


def test_settings_are_restored_whatever_happens() -> None:
    class Two(nn.Module):
        """Hugging Face models inside a module of one's own, with unlike settings."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = llama(), llama()
            self.two.set_attn_implementation("eager")
            self.own = Attention(24, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.one.model(input_ids=x).last_hidden_state
            return self.own(self.two.model(inputs_embeds=hidden).last_hidden_state)

    model, x = Two(), ids(1, 5)
    before = _names(model)
    assert {"sdpa", "eager"} <= set(before)
    plain = model(x)
    with scaledot.observe(model) as seen, scaledot.observe(model.two) as inner:
        close(model(x), plain, 5)
        assert set(_names(model)) == {"scaledot", "scaledot_eager"}
    assert _names(model) == before
    assert len(seen.heads) == 5
    assert list(inner.heads) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with pytest.raises(KeyError), scaledot.observe(model):
        raise KeyError
    assert _names(model) == before


def _stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def test_observations_may_end_in_any_order() -> None:
    model, x = llama(), ids(1, 5)
    encoder, y = nn.TransformerEncoderLayer(12, 2, batch_first=True).eval(), torch.randn(1, 5, 12)
    before = _names(model)
    first, second = (
        [scaledot.observe(model, gradients=True), scaledot.observe(encoder)] for _ in range(2)
    )
    seen = [one.__enter__() for one in (*first, *second)]
    for ending in (first, second):
        assert _stance() == "force_eager"
        with torch.no_grad():
            model(x), encoder(y)
        for context in ending:
            context.__exit__(None, None, None)
    assert [next(iter(one.calls.values())).calls for one in seen] == [1, 1, 2, 2]
    assert _names(model) == before
    assert torch.backends.mha.get_fastpath_enabled()
    assert _stance() == "default"


def test_a_model_that_shares_a_configuration_is_not_recorded() -> None:
    model = llama()
    other = type(model)(model.config)
    with scaledot.observe(model) as seen:
        other(input_ids=ids(1, 5))
        model(input_ids=ids(1, 5))
    assert {c.calls for c in seen.calls.values()} == {1}


def test_shared_layers_have_a_path_for_each_call() -> None:
    config = transformers.AlbertConfig(
        vocab_size=WORDS, hidden_size=20, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=32, embedding_size=12,
    )  # fmt: skip
    model = transformers.AlbertModel(config).eval()
    with scaledot.observe(model, keep="qk", layers=[2]) as seen:
        model(input_ids=ids(2, 5))
        model(input_ids=ids(2, 6))
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert list(seen.heads) == [f"{path}[{i}]" for i in range(3)]
    assert seen.weights(f"{path}[2]", head=3, call=0).shape == (5, 5)
    with pytest.raises(scaledot.ScaledotError, match=r"attention\[0\]' was not kept"):
        seen.weights(f"{path}[0]", head=3)


def test_weights_asked_by_the_configuration() -> None:
    model = bert(attn_implementation="eager")
    model.config.output_attentions = True
    x = ids(1, 5)
    plain = model(input_ids=x).attentions
    with scaledot.observe(model):
        looked = model(input_ids=x).attentions
    assert len(looked) == 2
    torch.testing.assert_close(looked, plain)
    model.config.output_attentions = False
    with scaledot.observe(model):
        assert model(input_ids=x).attentions is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_a_model(reentrant: bool) -> None:
    model = llama().train()
    x = ids(2, 6)
    model(input_ids=x, labels=x, use_cache=False).loss.backward()
    want = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    with scaledot.observe(model) as seen:
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
    assert {c.calls for c in seen.calls.values()} == {1}
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ["Bloom", "MPNet"])
def test_families_that_are_not_routed(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS, hidden_size=20, num_hidden_layers=1, num_attention_heads=4, n_layer=1,
        n_head=4, intermediate_size=32,
    )  # fmt: skip
    model = getattr(transformers, f"{family}Model")(config).eval()
    with pytest.raises(scaledot.ScaledotError, match="computes its softmax itself"):
        observed(model, ids(1, 5))


def test_falcon_is_seen_through_torch() -> None:
    """Falcon has no AttentionInterface, and calls torch's attention itself."""
    config = transformers.FalconConfig(
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    model, x = transformers.FalconModel(config).eval(), ids(2, 5)
    plain = model(input_ids=x).last_hidden_state
    with scaledot.observe(model) as seen:
        close(model(input_ids=x).last_hidden_state, plain, 2)
    assert {c.causal for c in seen.calls.values()} == {True}
    assert len(seen.heads) == 2


def test_block_sparse_kernels_are_refused() -> None:
    q = torch.randn(1, 2, 4, 3)
    with pytest.raises(scaledot.ScaledotError, match="selects blocks of keys inside its kernel"):
        huggingface._attention_forward(False, nn.Identity(), q, q, q, block_indices=q)


def test_chosen_keys_of_a_sparse_attention() -> None:
    q = torch.randn(2, 3, 4, 5)
    chosen = torch.tensor([[0, 1], [0, 1], [1, 2], [0, 3]]).expand(2, -1, -1)
    out, _ = huggingface._attention_forward(
        False, nn.Identity(), q, q, q, huggingface._mask_function(2, 4, 4), indices=chosen
    )
    allowed = torch.zeros(4, 4, dtype=torch.bool).scatter(1, chosen[0], True).tril()
    want = F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)
    close(out, want.transpose(1, 2))


def test_another_thread_is_counted() -> None:
    model = llama()
    with scaledot.observe(model) as seen:
        threads = [threading.Thread(target=model, args=(ids(1, 5),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {c.calls for c in seen.calls.values()} == {2}
    assert {int(s.counts["rows"][0]) for s in seen.heads.values()} == {10}


def test_merging_what_two_observations_saw() -> None:
    model = llama()
    a, b = ids(2, 5), ids(1, 7)
    with scaledot.observe(model) as both:
        model(input_ids=a)
        model(input_ids=b)
    with scaledot.observe(model) as first:
        model(input_ids=a)
    with scaledot.observe(model) as second:
        model(input_ids=b)
    for path, stats in both.heads.items():
        same_statistics(merge(first.heads[path], second.heads[path]), stats)


def test_summary_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    with scaledot.observe(model) as seen:
        model(torch.randn(2, 7, 12))
    seen.summary()
    assert capsys.readouterr().out.strip()


class Reader(nn.Module):
    """A module that reads a text as transformers' models do, around one that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
        self.table = nn.Embedding(16, 8)
        self.frames: list[Any] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.inner(self.table(input_ids))


def read(*args: Any, **kwargs: Any) -> Any:
    """What an observation says of the text that a `Reader` was given."""
    model, found = Reader(), []
    with scaledot.observe(model) as seen:
        inside = model.inner.register_forward_pre_hook(
            lambda *_: found.append(frames.reading(seen._frames))
        )
        model(*args, **kwargs)
        inside.remove()
    return found[0]


def test_a_frame_holds_the_tokens() -> None:
    ids = torch.arange(12).view(2, 6)
    frame = read(ids)
    assert frame.tokens.tolist() == ids.tolist()
    assert frame.documents is None
    assert frame.length == 6


@pytest.mark.parametrize(
    ("given", "documents"),
    [
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, [[0, 0, 0, 1, 1, 1]]),
        ({"position_ids": torch.tensor([[0, 1, 0, 0, 1, 2]])}, [[0, 0, 1, 2, 2, 2]]),
        ({"position_ids": torch.arange(6)[None]}, None),
        ({"position_ids": torch.tensor([[0, 1, 2, 2, 2, 3]])}, None),
        ({"position_ids": torch.arange(6).expand(3, 1, 6)}, None),
        # What generate() gives: padding's positions are 1, and no document.
        ({"position_ids": torch.tensor([[1, 1, 0, 1, 2, 3]]),
          "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}, None),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 3, 6], dtype=torch.int32)}, [[0, 0, 1, 2, 2, 2]]),
        ({"cu_seqlens": torch.tensor([0, 4, 6])}, [[0, 0, 0, 0, 1, 1]]),
        ({"cu_seqlens": torch.tensor([0, 6])}, None),
    ],
)  # fmt: skip
def test_a_frame_holds_the_documents(given: dict[str, Any], documents: Any) -> None:
    found = read(torch.arange(6)[None], **given).documents
    assert documents == (None if found is None else found.tolist())


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_looking_in_full_changes_no_bit(side: str | None, window: int | None) -> None:
    """What rides along in the attention's own pass leaves its output and statistics alone."""
    model = llama(sliding_window=window) if window else llama()
    texts = [ids(9), ids(6)]
    batch, real = padded(texts, side) if side else (torch.stack([ids(9), ids(9)]), None)
    given = {"input_ids": batch} | ({} if real is None else {"attention_mask": real})
    with scaledot.observe(model) as plain:
        want = model(**given)[0]
    marks = torch.unique(batch)[:5]
    with scaledot.observe(model, full=True, delimiters=marks) as full:
        got = model(**given)[0]
    assert got.equal(want)
    for path, stats in plain.heads.items():
        for name, x in stats.measures.items():
            y = full.heads[path].measures[name]
            assert y.count.equal(x.count), name
            torch.testing.assert_close(y.average, x.average, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert "delimiter" in full.heads[path].measures
        assert "whatif.entropy.3" in full.heads[path].measures


@torch.no_grad()
def test_what_rides_along_is_what_passes_of_their_own_give() -> None:
    """In float64 nothing rides along; both ways agree to float32's rounding."""
    model, text = llama(), ids(40)[None]
    marks = torch.unique(text)[:5]
    with scaledot.observe(model, full=True, delimiters=marks) as single:
        model(input_ids=text)
    with scaledot.observe(model.double(), full=True, delimiters=marks) as double:
        model(input_ids=text)
    for path, stats in double.heads.items():
        assert single.heads[path].measures.keys() == stats.measures.keys()
        for name, x in stats.measures.items():
            y = single.heads[path].measures[name]
            assert y.count.equal(x.count), name
            torch.testing.assert_close(y.average, x.average, rtol=1e-3, atol=1e-4, equal_nan=True)


@torch.no_grad()
def test_three_axes_are_looked_at_in_full() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model, x = Plain(), torch.randn(2, 7, 8)
    with scaledot.observe(model, full=True) as seen:
        out = model(x)
    with scaledot.observe(model):
        assert model(x).equal(out)
    (stats,) = seen.heads.values()
    assert stats.measures["value_spread"].count.tolist() == [14]

"""The oracle: `trace` on float64 copies, and the one way in which results are held against it."""

import math
from dataclasses import fields

import torch
from torch import Tensor

from scaledot.dispatch import attention, error_bound, mass_bound
from scaledot.masks import Mask
from scaledot.rows import RowStats
from scaledot.stages import trace

MASS = ("top_margin", "jacobian_trace")
FLOATS = tuple(f.name for f in fields(RowStats) if f.type.startswith("Float"))
LOWEST = torch.finfo(torch.float32).min


def inputs(*, batch=2, heads=6, kv_heads=3, queries=11, keys=13, d_k=7, d_v=5, dtype=torch.float32):
    """Random q, k, v; each axis has a length of its own, so that none can be mistaken."""
    q = torch.randn(batch, heads, queries, d_k, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, keys, d_k, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, keys, d_v, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def masks(batch, heads, queries, keys):
    """Every kind of mask, and combinations, for a shape: name → arguments of `attention`."""
    some = torch.rand(batch, heads, queries, keys) < 0.6
    some[0, 0, min(1, queries - 1) :] = False  # rows that see nothing
    bias = torch.randn(batch, heads, queries, keys) * 2
    floored = bias.masked_fill(~some, LOWEST)
    lengths = torch.arange(batch) * (keys - 1) // max(batch - 1, 1) + 1
    left = torch.arange(keys) >= (keys - lengths)[:, None]
    documents = torch.arange(max(queries, keys)) // 4
    documents = documents[:queries].expand(batch, -1), documents[:keys].expand(batch, -1)
    corner = Mask(causal="bottom_right")
    return {
        "none": {},
        "top left": {"is_causal": "top_left"},
        "bottom right": {"is_causal": "bottom_right"},
        "window": {"is_causal": "bottom_right", "window": 3},
        "window of one": {"is_causal": "top_left", "window": 1},
        "window to both sides": {"window": (2, 3)},
        "window to the left": {"window": (1, -1)},
        "window to the right": {"window": (-1, 2)},
        "bool": {"attn_mask": some},
        "bool, one a query": {"attn_mask": some[:1, :1]},
        "bool, one a batch": {"attn_mask": some[:, :1, -1:]},
        "bool, one a key": {"attn_mask": some[-1, -1, -1]},
        "additive": {"attn_mask": bias},
        "additive, one a head": {"attn_mask": bias[:1, :, :, :1]},
        "additive, half": {"attn_mask": bias[:1].half()},
        "additive, float64": {"attn_mask": bias[:, :1].double()},
        "additive, −∞": {"attn_mask": bias.masked_fill(~some, -math.inf)},
        "additive, finfo.min": {"attn_mask": floored},
        "additive, finfo.min of half": {
            "attn_mask": bias.half().masked_fill(~some, torch.finfo(torch.float16).min)
        },
        "additive, −1e4": {"attn_mask": bias.masked_fill(~some, -1e4)},
        "lengths": {"attn_mask": Mask(lengths=lengths)},
        "left padding": {"attn_mask": Mask(keys=left)},
        "documents": {"attn_mask": Mask(segments=documents)},
        "causal documents": {"attn_mask": Mask(segments=documents) & corner},
        "causal left padding and bias": {"attn_mask": Mask(keys=left) & corner & floored},
        "all at once": {
            "attn_mask": Mask(lengths=lengths, segments=documents) & some & corner,
            "window": 5,
        },
    }


MASKS = tuple(masks(2, 2, 2, 2))


def double(x):
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def size(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> float:
    """A bound of the terms that a logit is a sum of, those a mask removes aside."""
    norms = [x.double().norm(dim=-1) for x in (q, k)]
    size = scale * math.prod(float(x[x.isfinite()].max()) if x.numel() else 0.0 for x in norms)
    if bias is not None:
        real = bias[bias.isfinite() & (bias > torch.finfo(bias.dtype).min / 2)].double()
        size += float(real.abs().amax()) if real.numel() else 0.0
    return size


def assert_close(actual: Tensor, reference: Tensor, bound: float, name: str, slack: float = 0.0):
    """NaN and infinities in the same places, errors within bound (+ slack·|reference|)."""
    actual = actual.detach().double()
    assert actual.shape == reference.shape, name
    odd = ~reference.isfinite()
    assert torch.equal(actual[odd].isnan(), reference[odd].isnan()), f"{name}: NaN elsewhere"
    assert torch.equal(actual[odd].nan_to_num(), reference[odd].nan_to_num()), f"{name}: ±inf"
    error = ((actual - reference).abs() - slack * reference.abs())[~odd]
    worst = float(error.amax()) if error.numel() else 0.0
    assert worst <= bound, f"{name}: error {worst:.3g} above the bound {bound:.3g}"


def assert_as_trace(q, k, v, attn_mask=None, *, same_key=False, attend=attention, **arguments):
    """Output and every row statistic of `attend` are the oracle's, within the stated bounds.

    same_key: the heaviest key must be the very same, not only as heavy within rounding.
    """
    out, rows = attend(q, k, v, attn_mask, return_stats=True, **arguments)
    assert out.dtype == q.dtype
    arguments = {"attn_mask": attn_mask, **arguments}
    wide = {name: double(x) if name == "sinks" else x for name, x in arguments.items()}
    exact = trace(q.double(), k.double(), v.double(), **wide)
    accumulator = torch.promote_types(q.dtype, torch.float32)
    plain = trace(*(x.to(accumulator) for x in (q, k, v)), **arguments)
    stated = plain.output if q.dtype == accumulator else trace(q, k, v, **arguments).output
    bias = attn_mask.dense if isinstance(attn_mask, Mask) else attn_mask
    bias = bias if bias is not None and bias.is_floating_point() else None
    mass = mass_bound(accumulator, size(q, k, abs(exact.scale), bias))

    def bound(reference, plain):
        if accumulator == torch.float64:
            finite = reference[reference.isfinite()].abs()
            return mass * float(finite.amax()) if finite.numel() else 0.0
        return error_bound(reference, plain)

    assert_close(out, exact.output, bound(exact.output, stated.to(q.dtype)), "output")
    want, close = exact.rows, plain.rows
    tiny = torch.finfo(accumulator).tiny * k.shape[-2]
    for name in FLOATS:
        reference, actual = getattr(want, name), getattr(rows, name)
        if reference is None:
            assert actual is None
            continue
        assert actual.dtype == accumulator
        if name == "top_margin":
            assert_close(actual, reference, mass, name, slack=4 * torch.finfo(actual.dtype).eps)
        elif name == "jacobian_trace":
            assert_close(actual, reference, tiny, name, slack=mass)
        else:
            assert_close(actual, reference, bound(reference, getattr(close, name)), name)
    for name in ("visible", "nonfinite"):
        assert torch.equal(getattr(rows, name), getattr(want, name)), name
    there = want.top_key >= 0
    assert torch.equal(rows.top_key >= 0, there)
    if same_key:
        assert torch.equal(rows.top_key, want.top_key)
    elif there.any():
        logits = exact.masked.masked_fill(~exact.visible, -math.inf)
        chosen = logits.gather(-1, rows.top_key.clamp(min=0).long()[..., None])[..., 0]
        assert_close(chosen[there], logits.amax(-1)[there], mass, "top_key")
    return out, rows, exact

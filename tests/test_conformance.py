"""`check`: right functions pass; each wrong one is found with its cause, of nothing else accused.

``python tests/test_conformance.py`` writes the golden text anew: read the difference first.
"""

import inspect
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scaledot
from scaledot import document, terminal
from scaledot.cli import run
from scaledot.conformance import DTYPES, PROPERTIES, Report, check
from scaledot.masks import Mask
from scaledot.screen import Screen

GOLDEN = Path(__file__).parent / "golden" / "check-wrong.txt"
ALL = tuple(name for name, _ in PROPERTIES)


# Twenty lines of attention, right but for one mistake


def student(mistake=None):
    """Attention as one writes it by hand, with one mistake or none."""

    def attend(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        softcap=None,
    ):  # fmt: skip
        heads, queries, d_k = q.shape[1:]
        keys = k.shape[2]
        factors = {
            "scale √d_model": (heads * d_k) ** -0.5,
            "no scale": 1.0,
            "scale twice": 1 / d_k,
            "scale inverted": d_k**0.5,
            "scale of the length": keys**-0.5,
            "scale of the heads": heads**-0.5,
            "scale written in": 1 / 8,
        }
        default = factors.get(mistake, d_k**-0.5)
        if scale is None or mistake == "scale ignored":
            scale = default
        elif mistake == "scale as divisor":
            scale = 1 / scale
        elif mistake == "scale on top":
            scale = scale * default
        if enable_gqa:
            group = heads // k.shape[1]
            again = group if mistake != "broadcast group" else 1
            if mistake in ("tiled group", "broadcast group"):
                k = k.repeat(1, again, 1, 1) if again > 1 else k[:, :1].expand(-1, heads, -1, -1)
                v = v.repeat(1, again, 1, 1) if again > 1 else v[:, :1].expand(-1, heads, -1, -1)
            else:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                if mistake == "tiled values":
                    v = v[:, ::group].repeat(1, group, 1, 1)
        if mistake == "writes into q":
            q.mul_(1.0 if scale == 1 else 0.5)
            scale = scale * 2
        if mistake == "mixed heads":
            k = k.transpose(1, 2).reshape(k.shape)
        if mistake == "mixed batches":
            k = k - k.mean(0, keepdim=True) * (k.shape[0] > 1)
        s = q @ k.mT
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            if mistake == "mask ignored":
                attn_mask = torch.ones_like(attn_mask)
            if mistake == "boolean mask added before scale":
                s = s + attn_mask
            elif mistake != "boolean mask added":
                hidden = attn_mask if mistake == "mask inverted" else ~attn_mask
        elif attn_mask is not None and mistake == "float mask as boolean":
            hidden = attn_mask == 0
        elif attn_mask is not None and mistake == "float mask before scale":
            s = s + attn_mask
        elif attn_mask is not None and mistake == "float mask multiplies":
            s = torch.where(attn_mask == -math.inf, attn_mask, s * attn_mask)
        s = s * scale
        if mistake == "boolean mask added" and getattr(attn_mask, "dtype", None) == torch.bool:
            s = s + attn_mask
        if mistake == "distance":
            s = s - 0.1 * torch.arange(keys)
        if mistake == "always capped":
            s = torch.tanh(s)
        if softcap and mistake == "cap before scale":
            s = softcap * torch.tanh(s / scale / softcap) * scale
        elif softcap and mistake not in ("cap after mask", "cap ignored"):
            s = softcap * torch.tanh(s / softcap)
        floats = attn_mask is not None and attn_mask.dtype != torch.bool
        if floats and not str(mistake).startswith("float"):
            s = s + attn_mask
        if is_causal and mistake != "causal ignored":
            either = mistake == "mask replaces causal" and attn_mask is not None
            diagonal = {"causal off by one": 2, "causal hides itself": 0}.get(mistake, 1)
            if mistake == "bottom-right":
                diagonal += keys - queries
            future = torch.ones(queries, keys, dtype=torch.bool).triu(diagonal)
            if mistake == "causal inverted":
                future = ~future
            hidden = hidden if either else hidden | future
        if mistake == "mask multiplies scores":
            s = s * ~hidden
        elif mistake != "mask after softmax":
            s = s.masked_fill(hidden, -1e4 if mistake == "−1e4" else -math.inf)
        if softcap and mistake == "cap after mask":
            s = softcap * torch.tanh(s / softcap)
        if mistake == "softmax over queries":
            w = s.softmax(-2)
        elif mistake == "softmax over heads":
            w = s.softmax(1)
        elif mistake == "sigmoid":
            w = s.sigmoid()
        elif mistake == "a term too many":
            w = s.exp() / (1 + s.exp().sum(-1, keepdim=True))
        elif mistake == "no softmax":
            w = s
        elif mistake == "exp without maximum":
            w = s.exp() / s.exp().sum(-1, keepdim=True)
        elif mistake == "exp without sum":
            w = s.exp()
        elif mistake == "softmax in bfloat16":
            w = s.bfloat16().softmax(-1).to(q.dtype)
        else:
            w = s.softmax(-1)
        if mistake == "mask after softmax":
            w = w * ~hidden
        if mistake == "NaN to 0":
            w = w.nan_to_num()
        if mistake == "detached":
            w = w.detach()
        if dropout_p and mistake == "dropout unscaled":
            w = w * (torch.rand_like(w) > dropout_p)
        elif dropout_p and mistake == "dropout keeps p":
            w = F.dropout(w, 1 - dropout_p) * dropout_p / (1 - dropout_p)
        elif dropout_p and mistake not in ("dropout ignored", "dropout of the output"):
            w = F.dropout(w, dropout_p)
        if mistake == "dropout always":
            w = F.dropout(w, 0.1)
        if mistake == "sums in bfloat16":
            return summed_in_bfloat16(w, v)
        out = w @ v
        if dropout_p and mistake == "dropout of the output":
            out = F.dropout(out, dropout_p)
        return out

    return attend


def summed_in_bfloat16(w, v):
    """Key by key, as a kernel does that keeps its accumulator in the type of the output."""
    if v.dtype != torch.bfloat16:
        return w @ v
    out = torch.zeros(*w.shape[:-1], v.shape[-1], dtype=v.dtype)
    total = torch.zeros(*w.shape[:-1], 1, dtype=v.dtype)
    top = w.amax(-1, keepdim=True)
    for j in range(v.shape[2]):
        p = w[..., j : j + 1] / top
        out, total = out + p * v[:, :, j : j + 1], total + p
    return out / total


WRONG = {
    "scale √d_model": ("scale", "divides by √(heads·d_k)", "d_model in place of d_k"),
    "no scale": ("scale", "no scale", "√d_k is missing"),
    "scale twice": ("scale", "divides by d_k", "scaled twice"),
    "scale inverted": ("scale", "multiplies by √d_k", "in place of ÷"),
    "scale of the length": ("scale", "divides by √keys", "size(-2)"),
    "scale of the heads": ("scale", "divides by √heads", "size(1)"),
    "scale written in": ("scale", "multiplies by 1/√64, whatever d_k is", "written into the code"),
    "distance": ("scale", "equal scores get unequal weights", "ALiBi"),
    "always capped": ("scale", "weights do not follow q·k", "soft-cap that is always on"),
    "scale ignored": ("custom scale", "scale is ignored", "never read"),
    "scale as divisor": ("custom scale", "divides by scale", "divisor"),
    "scale on top": ("custom scale", "on top of the default", "stays when scale is given"),
    "softmax over queries": ("rows sum to 1", "1.3333", "runs over queries"),
    "softmax over heads": ("rows sum to 1", "rows sum to 2", "runs over heads"),
    "sigmoid": ("rows sum to 1", "rows sum to 2", "sigmoid in place of softmax"),
    "a term too many": ("rows sum to 1", "rows sum to .7", "more than its terms"),
    "no softmax": ("rows sum to 1", "rows sum to 0", "softmax is missing"),
    "exp without sum": ("rows sum to 1", "rows sum to 4", "without the division"),
    "exp without maximum": ("large scores", "NaN", "subtracting the row's maximum"),
    "mask inverted": ("mask polarity", "inverted: True hides", "nn.MultiheadAttention"),
    "mask ignored": ("mask polarity", "ignored", "never applied"),
    "boolean mask added before scale": ("mask polarity", "added as 1 and 0", "masked_fill"),
    "boolean mask added": ("mask polarity", "added as 1 and 0", "masked_fill"),
    "float mask before scale": ("additive mask", "before the scale", "after the scale"),
    "float mask multiplies": ("additive mask", "multiplies the scores", "add it"),
    "mask after softmax": ("masked rows", "sum to .6667", "after softmax"),
    "causal off by one": ("future leak", "one key past its own", "triu(diagonal=1)"),
    "causal hides itself": ("future leak", "does not see its own key", "off by one"),
    "causal ignored": ("future leak", "changes nothing", "never read"),
    "causal inverted": ("future leak", "inverted", "inverted"),
    "mask replaces causal": ("mask and causal", "is_causal is ignored", "combine the two"),
    "tiled group": ("grouped heads", "tiled: 0 1 0 1", "repeat_interleave"),
    "tiled values": ("grouped heads", "of the values: tiled", "repeat_interleave"),
    "broadcast group": ("grouped heads", "heads read kv heads 0 0 0 0", "not repeated"),
    "mixed heads": ("heads apart", "head 0 sees head 1", "without transpose"),
    "mixed batches": ("batches apart", "batch 0 sees batch 1", "mixes the batch"),
    "cap after mask": ("soft-cap", "after the mask", "cap first"),
    "cap before scale": ("soft-cap", "caps before the scale", "after the scale"),
    "cap ignored": ("soft-cap", "softcap is ignored", "never read"),
    "dropout unscaled": ("dropout", "not divided by 1 − p", "1/(1 − p)"),
    "dropout keeps p": ("dropout", "drops 7", "share to keep"),
    "dropout of the output": ("dropout", "drops the output", "after the product"),
    "dropout always": ("dropout off", "the same input gives outputs", "stays on"),
    "writes into q": ("inputs", "writes into query", "in-place"),
    "softmax in bfloat16": ("accuracy", "max error", "bfloat16, float16 or TF32"),
    "sums in bfloat16": ("bfloat16", "max error", "accumulate in float32"),
    "detached": ("gradients", "no gradient reaches query", "detach"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_found_with_its_cause_and_of_nothing_else_accused(mistake):
    name, result, cause = WRONG[mistake]
    report = check(student(mistake))
    assert report.named("wrong") == (name,)
    assert not report.ok
    found = report[name]
    assert result in found.result
    assert cause in (found.cause or "")
    assert found.input
    assert found.expected is not None
    assert found.came is not None
    assert found.expected.value != found.came.value or name == "gradients"


def test_a_mask_that_multiplies_the_scores_is_named_wherever_it_hides_nothing():
    report = check(student("mask multiplies scores"))
    assert report.named("wrong") == ("mask polarity", "future leak")
    assert report["mask polarity"].result == "a boolean mask multiplies the scores"


NUMBERS = {"accuracy", "bfloat16", "float16", "gradients"}


def test_what_a_mistake_makes_meaningless_is_not_judged():
    report = check(student("softmax over queries"))
    assert {"scale", "mask polarity", "future leak", *NUMBERS} <= set(report.named("unjudged"))
    assert report["scale"].result == "see rows sum to 1"
    report = check(student("dropout always"))
    assert report.named("ok") == ("axes",)
    assert len(report.named("unjudged")) == len(ALL) - 2
    # A scale that follows a known rule is taken into account; one that does not leaves no reference
    assert not check(student("scale √d_model")).named("unjudged")
    assert set(check(student("always capped")).named("unjudged")) > NUMBERS


def test_the_smallest_input_of_the_specification():
    p = check(student("scale √d_model"))["scale"]
    assert p.input == "2 heads, d_k 4, 1 query, 2 keys, q·k = 4 and 0"
    assert (p.expected.value, p.expected.how) == (".8808 .1192", "softmax(4/√4, 0)")
    assert (p.came.value, p.came.how) == (".8044 .1956", "softmax(4/√8, 0)")
    assert p.cause == "d_model in place of d_k"


# Right ones


def test_ours():
    report = check(scaledot.attention)
    assert report.ok
    assert report.named("differs") == ()
    assert report.named("unsupported") == ("causal alignment",)
    assert "has two meanings" in report["causal alignment"].result
    assert report["hidden NaN"].result == "does not matter"
    assert report["soft-cap"].result == "after the scale, before the mask"
    assert report.function == "scaledot.dispatch:attention"


def test_the_definition_itself():
    def traced(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softcap=None):
        aligned = "bottom_right" if is_causal else False
        return scaledot.trace(q, k, v, attn_mask, dropout_p, aligned, scale, softcap=softcap).output

    report = check(traced)
    assert report.named("wrong") == ()
    assert report["0/1 float mask"].result.startswith("refused: ValueError: mask is float and")
    assert "bottom-right" in report["causal alignment"].result


def test_torch():
    report = check(F.scaled_dot_product_attention)
    assert report.ok
    assert report.named("differs") == ("causal alignment", "hidden NaN")
    assert report["causal alignment"].result.startswith("top-left, as torch")
    assert "from a hidden value" in report["hidden NaN"].result
    assert report.named("unsupported") == ("soft-cap",)
    assert report["soft-cap"].result == "no parameter softcap"
    assert report["empty rows"].result.startswith("0, as torch")


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_torchs_backends(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        assert check(F.scaled_dot_product_attention).named("wrong") == ()


def multihead(invert=True):
    """nn.MultiheadAttention with identity projections, whose boolean mask's True hides."""

    def attend(q, k, v, attn_mask=None, is_causal=False):
        batch, heads, queries, dim = q.shape
        keys, width = k.shape[2], heads * dim
        module = nn.MultiheadAttention(width, heads, bias=False, batch_first=True).to(q.dtype)
        with torch.no_grad():
            module.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
            module.out_proj.weight.copy_(torch.eye(width))
        if is_causal:
            causal = torch.ones(queries, keys, dtype=torch.bool).tril()
            attn_mask = causal if attn_mask is None else attn_mask & causal
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool and invert:
                attn_mask = ~attn_mask
            attn_mask = attn_mask.expand(batch, heads, queries, keys).flatten(0, 1)
        merged = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        out, _ = module(*merged, attn_mask=attn_mask, need_weights=False)
        return out.unflatten(-1, (heads, dim)).transpose(1, 2)

    return attend


def test_multihead_attention():
    report = check(multihead())
    assert report.ok
    assert {"grouped heads", "value dimension", "custom scale"} <= set(report.named("unsupported"))
    assert report["mask shapes"].status == "ok"
    report = check(multihead(invert=False))
    assert "mask polarity" in report.named("wrong")
    assert "nn.MultiheadAttention" in report["mask polarity"].cause


def einsum(q, k, v, mask=None):
    s = torch.einsum("bhqd,bhkd->bhqk", q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25)
    if mask is not None:
        s = s.masked_fill(mask.logical_not(), torch.finfo(s.dtype).min)
    return torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1, torch.float32).to(v.dtype), v)


def annotated_transformer(query, key, value, mask=None, dropout=None):
    """As its code has it; the mask there is 1 where a query may attend."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


def torchs_documentation(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """The code that torch's page of scaled_dot_product_attention shows."""
    L, S = query.size(-2), key.size(-2)
    scale_factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    attn_bias = torch.zeros(L, S, dtype=query.dtype)
    if is_causal:
        temp_mask = torch.ones(L, S, dtype=torch.bool).tril(diagonal=0)
        attn_bias.masked_fill_(temp_mask.logical_not(), float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_bias = attn_bias.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            attn_bias = attn_mask + attn_bias
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    weight = query @ key.transpose(-2, -1) * scale_factor
    weight = torch.softmax(weight + attn_bias, dim=-1)
    return torch.dropout(weight, dropout_p, train=True) @ value


def online(q, k, v):
    """One key after another, in float32: a kernel in slow motion."""
    wide = [x.float() for x in (q, k, v)]
    top = torch.full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    for j in range(0, k.shape[2], 16):
        s = wide[0] @ wide[1][:, :, j : j + 16].mT * q.shape[-1] ** -0.5
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p, shrink = (s - new).exp(), (top - new).exp()
        out, total = out * shrink + p @ wide[2][:, :, j : j + 16], total * shrink + p.sum(-1, True)
        top = new
    return (out / total).to(q.dtype)


def nothing_but_qkv(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def huggingface(query, key, value, attention_mask=None, scaling=None, dropout=0.0):
    """transformers' interface: grouped heads are repeated, the output is (batch, length, heads,
    dim), and the mask is four-dimensional."""
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ValueError("attention_mask must have four axes")
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = query @ key.mT * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1, torch.float32).to(query.dtype)
    weights = F.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


RIGHT = {
    "by hand": student(), "einsum": einsum, "The Annotated Transformer": annotated_transformer,
    "torch's documentation": torchs_documentation, "online": online, "bare": nothing_but_qkv,
    "by hand, bottom-right": student("bottom-right"), "by hand, −1e4": student("−1e4"),
    "by hand, NaN to 0": student("NaN to 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_wrong_with_a_right_function(name):
    assert check(RIGHT[name]).named("wrong") == ()


def test_a_float_mask_may_be_all_that_is_taken():
    report = check(huggingface)
    assert report.named("wrong") == ("mask polarity",)
    assert report["mask polarity"].result == "a boolean mask is added as 1 and 0"
    assert "returns (batch, length, heads, dim)" in report["axes"].result
    assert report["axes"].status == "differs"
    for name in ("additive mask", "custom scale", "grouped heads", "dropout", "empty rows"):
        assert report[name].status in ("ok", "differs"), name
    assert "(1, heads, queries, keys)" in report["mask shapes"].result


CONVENTIONS = {
    "causal alignment": {
        "by hand": "top-left, as torch", "by hand, bottom-right": "bottom-right, as FlashAttention",
    },
    "empty rows": {
        "by hand": "NaN, and in the gradients of every other row",
        "by hand, −1e4": "the mean of every value", "einsum": "the mean of every value",
    },
    "hidden NaN": {"by hand": "a hidden value, as in torch"},
    "visible NaN": {"by hand, NaN to 0": "a NaN that is seen disappears"},
    "additive mask": {"The Annotated Transformer": "read as a boolean, 0 hides"},
    "0/1 float mask": {"The Annotated Transformer": "1 shows, 0 hides"},
    "float16 range": {"by hand": "overflow"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_convention_is_no_mistake(name):
    for function, result in CONVENTIONS[name].items():
        p = check(RIGHT[function])[name]
        assert p.status == "differs", (function, p)
        assert result in p.result


def test_dropout_left_to_a_module_is_a_convention():
    assert check(student("dropout ignored"))["dropout"].status == "differs"


# Other shapes


def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """FlashAttention's call: (batch, length, heads, dim), bottom-right, grouped without asking."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    aligned = "bottom_right" if causal else False
    out = scaledot.attention(
        q, k, v, None, dropout_p, aligned, softmax_scale, q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def test_another_layout():
    report = check(flash, layout="bshd")
    assert report.ok
    assert report["axes"].result == "(batch, length, heads, dim) in and out"
    assert "bottom-right" in report["causal alignment"].result
    for name in ("grouped heads", "custom scale", "dropout", "strides", "gradients"):
        assert report[name].status == "ok", name
    assert report["mask polarity"].result == "no parameter attn_mask"


def test_the_wrong_layout_is_said_before_anything_else():
    report = check(flash)
    assert report.named("wrong") == ("axes",)
    assert "--layout bshd" in report["axes"].cause
    assert report.named("unjudged") == ALL[1:]


def test_heads_merged_in_the_output():
    def merged(q, k, v, is_causal=False):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return out.transpose(1, 2).flatten(2)

    report = check(merged)
    assert report.ok
    assert "returns (batch, length, heads·dim)" in report["axes"].result


def test_a_function_of_equal_lengths_only():
    def square(q, k, v, attn_mask=None, is_causal=False):
        assert q.shape == k.shape, "self-attention only"
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)

    report = check(square)
    assert report.ok
    assert report["causal alignment"].result == "as many queries as keys are needed"
    for name in ("scale", "mask polarity", "mask and causal", "empty rows", "accuracy"):
        assert report[name].status == "ok", name


def test_masks_along_the_wrong_axis():
    def swapped(q, k, v, attn_mask=None):
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[2] == 1:
            attn_mask = attn_mask.expand(-1, q.shape[1], -1, -1)[:1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask)

    report = check(swapped)
    assert report.named("wrong") == ("mask shapes",)
    assert report["mask shapes"].came.value.startswith("batch 1, head 0, query 0 sees key")


def test_strides_taken_for_contiguous():
    def flat(q, k, v):
        q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    report = check(flat)
    assert report.named("wrong") == ("strides",)
    assert "contiguous" in report["strides"].cause


def test_a_value_dimension_taken_for_d_k():
    def confused(q, k, v):
        scale = v.shape[-1] ** -0.5
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    assert check(confused).named("wrong") == ("value dimension",)


def test_a_statistic_over_hidden_keys_leaks():
    def leaky(q, k, v, is_causal=False):
        s = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            s = s * (1 + s.std(-1, keepdim=True).tanh())
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return s.softmax(-1) @ v

    report = check(leaky)
    assert report.named("wrong") == ("future leak",)
    assert report["future leak"].result == "a later key moves earlier rows"


def test_masked_outputs_are_compared_in_full():
    def blurred(q, k, v, is_causal=False):
        w = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        if is_causal:
            w = w.tril() ** 1.1
        return w / w.sum(-1, keepdim=True) @ v

    report = check(blurred)
    assert report.named("wrong") == ("accuracy",)
    assert "is_causal=True" in report["accuracy"].input


def test_query_and_key_exchanged():
    def exchanged(q, k, v):
        return F.scaled_dot_product_attention(k, q, v)

    report = check(exchanged)
    assert "scale" in report.named("wrong")
    assert report["scale"].result == "weights do not depend on q·k"


def test_always_causal():
    def gpt(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    report = check(gpt)
    assert report.named("wrong") == ("every key",)
    assert "always causal" in report["every key"].cause


class Scaled(torch.autograd.Function):
    """A backward without the scale."""

    @staticmethod
    def forward(ctx, q, k, v):
        p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, p = ctx.saved_tensors
        dp = d_out @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ d_out


def test_a_backward_without_the_scale():
    def attend(q, k, v):
        return Scaled.apply(q, k, v)

    report = check(attend)
    assert report.named("wrong") == ("gradients",)
    assert report["gradients"].result == "of query: 4 times what it is"
    assert "scale is missing" in report["gradients"].cause


def test_no_gradient_at_all_is_not_supported():
    report = check(torch.no_grad()(student()))
    assert report.ok
    assert report["gradients"].status == "unsupported"


# Exceptions


def test_a_refusal_is_not_supported_and_shown_in_one_line():
    def picky(q, k, v, attn_mask=None, is_causal=False):
        if attn_mask is not None:
            raise NotImplementedError("no masks yet,\nsorry")
        if q.dtype != torch.float32:
            raise RuntimeError(f"expected float32, got {q.dtype}")
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    report = check(picky)
    assert report.ok
    assert report["mask polarity"].result == "raises NotImplementedError: no masks yet, sorry"
    assert report["empty rows"].result == "no mask is taken: see mask polarity"
    assert "expected float32" in report["bfloat16"].result
    assert report["future leak"].status == "ok"


def test_a_name_that_does_not_exist_is_wrong():
    def slip(q, k, v, is_causal=False):
        if is_causal:
            q = undefined(q)  # noqa: F821
        return F.scaled_dot_product_attention(q, k, v)

    report = check(slip)
    assert "future leak" in report.named("wrong")
    assert report["future leak"].result == "raises NameError: name 'undefined' is not defined"
    assert "is_causal=True" in report["future leak"].input


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda q, k, v: 1 / 0, "raises ZeroDivisionError: division by zero"),
        (lambda q, k, v: None, "raises TypeError: returned NoneType, not a tensor"),
        (lambda q, k, v: sys.exit(3), "raises SystemExit: 3"),
        (lambda q, k, v: torch.zeros(2), "returns shape (2,)"),
        (lambda q, k, v: (), "raises TypeError: returned tuple, not a tensor"),
    ],
)
def test_what_cannot_be_called_is_wrong_at_once(fn, said):
    report = check(fn)
    assert report.named("wrong") == ("axes",)
    assert report["axes"].result == said
    assert report.named("unjudged") == ALL[1:]


@pytest.mark.parametrize(
    ("fn", "options", "error", "said"),
    [
        (3, {}, TypeError, "fn is int: pass a function"),
        (lambda q, k: q, {}, TypeError, "takes 2 positional arguments: expected query, key and"),
        (lambda q, k, v, w: q, {}, TypeError, "needs 'w', which check cannot give"),
        (einsum, {"layout": "sbhd"}, ValueError, "layout is 'sbhd': pass one of bhsd, bshd"),
        (einsum, {"dtype": "int8"}, ValueError, "unknown dtype 'int8': pass one of float32"),
        (einsum, {"dtype": torch.int8}, ValueError, "unknown dtype 'int8'"),
        (einsum, {"device": "moon"}, ValueError, "device 'moon' cannot be used"),
    ],
)
def test_what_check_cannot_use_raises(unannotated, fn, options, error, said):
    with pytest.raises(error, match=r"^[^\n]*$") as caught:
        check(fn, **options)
    assert said in str(caught.value)


def test_parameters_by_other_names_or_none():
    def required(query, key, value, mask, causal):
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)

    report = check(required)
    assert report.ok
    for name in ("mask polarity", "future leak", "mask and causal"):
        assert report[name].status == "ok", name

    def anything(*args, **arguments):
        return F.scaled_dot_product_attention(*args, **arguments)

    assert check(anything).named("unsupported") == ("soft-cap",)


def test_a_module_is_checked_as_it_stands():
    class Attend(nn.Module):
        def forward(self, q, k, v, is_causal=False):
            p = 0.1 if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=is_causal)

    assert check(Attend().eval()).ok
    assert check(Attend()).named("wrong") == ("dropout off",)


# What a report is


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes(dtype):
    for fn in (scaledot.attention, F.scaled_dot_product_attention):
        report = check(fn, dtype=dtype)
        assert report.named("wrong") == ()
        assert report["accuracy"].status == "ok"
        assert report.dtype == dtype
    for mistake in (
        "scale √d_model", "scale of the length", "exp without maximum", "mask inverted",
        "float mask multiplies", "causal off by one", "tiled group", "cap after mask", "detached",
    ):  # fmt: skip
        report = check(student(mistake), dtype=getattr(torch, dtype))
        assert report.named("wrong") == WRONG[mistake][:1], mistake
        assert WRONG[mistake][1] in report[WRONG[mistake][0]].result


def test_the_same_twice_and_nothing_left_behind():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = check(student("cap after mask")), check(student("cap after mask"))
    assert first == again
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_it_takes_a_moment():
    check(scaledot.attention)
    start = time.process_time()
    for fn in (scaledot.attention, F.scaled_dot_product_attention, online):
        check(fn)
    assert time.process_time() - start < 9


def test_every_property_is_documented():
    page = (Path(__file__).parents[1] / "docs" / "check.md").read_text("utf-8")
    for name in ALL:
        assert re.search(rf"^\|[^|]*\b{re.escape(name)}\b[^|]*\|", page, re.M), name


def test_every_property_has_a_verdict_in_the_stated_order():
    assert tuple(p.name for p in check(einsum).properties) == ALL
    assert len(set(ALL)) == len(ALL) >= 20
    with pytest.raises(KeyError):
        check(einsum)["beauty"]
    assert all(len(name) <= 16 for name in ALL)


def test_a_report_is_public_and_prints_itself():
    report = scaledot.check(student("no scale"), name="mine:attend")
    assert isinstance(report, Report)
    assert repr(report).startswith(
        "scaledot check  mine:attend   as torch's sdpa · cpu · float32\n"
    )
    assert repr(report) == terminal.check_text(document.check_document(report))


# What people see


def shown(report, width=100, **options):
    file = io.StringIO()
    color = options.pop("color", False)
    console = Screen(
        file=file, width=width, force_terminal=color,
        color_system="standard" if color else None, **options,
    )  # fmt: skip
    terminal.print_check(console, document.check_document(report))
    return file.getvalue()


def wrong_example():
    return shown(check(student("scale √d_model"), name="my_attention:attend"))


def test_golden():
    """But for the errors' digits: what rounding makes of them is each processor's own."""
    measured = re.compile(r"(?<=max error )\S+(?=,)")
    text, count = measured.subn("…", wrong_example())
    assert count == 4
    assert text == measured.sub("…", GOLDEN.read_text("utf-8"))


SPECIFICATION = """\
scaledot check  my_attention:attend   as torch's sdpa · cpu · float32

  wrong    scale             divides by √(heads·d_k), not √d_k
             input           2 heads, d_k 4, 1 query, 2 keys, q·k = 4 and 0
             expected        .8808 .1192    softmax(4/√4, 0)
             came            .8044 .1956    softmax(4/√8, 0)
             usual cause     d_model in place of d_k
  differs  causal alignment  top-left, as torch; FlashAttention: bottom-right
"""


def test_it_prints_as_the_specification_shows():
    text = wrong_example()
    assert text.startswith(SPECIFICATION)
    assert '\n  ok       mask polarity     True means "may attend"\n' in text
    last = text.splitlines()[-1]
    assert last.startswith(f"{len(ALL)} properties: 1 wrong, 4 differ by convention, ")
    one = shown(check(student("scale √d_model"), name="m:f"))
    assert one.index("  wrong  ") < one.index("  differs  ") < one.index("  ok  ")


@pytest.fixture(scope="module")
def reports():
    name = "a.very.long.package.name.of.attention:attend_to_everything"
    mistakes = (None, "no scale", "cap after mask", "softmax over queries")
    return [check(student(mistake), name=name) for mistake in mistakes]


@pytest.mark.parametrize("width", [40, 59, 60, 80, 100, 160])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_the_terminal(reports, width, ascii):
    from rich.cells import cell_len

    for report in reports:
        text = shown(report, width, ascii=ascii)
        assert max(map(cell_len, text.splitlines())) <= width
        assert not ascii or text.isascii()
        for p in report.properties:
            assert p.status != "wrong" or p.name in text


@pytest.mark.parametrize("mistake", WRONG)
def test_every_mistake_prints_in_ascii(mistake):
    assert shown(check(student(mistake)), ascii=True).isascii()


def test_only_labels_and_kinds_are_coloured():
    text = shown(check(student("no scale")), color=True)
    assert "\x1b[31m  wrong    \x1b[0mscale" in text
    assert "\x1b[33m  differs  \x1b[0m" in text
    assert "\x1b[32m  ok       \x1b[0m" in text
    plain = shown(check(student("no scale")), color=True, no_color=True)
    assert "\x1b[3" not in plain


def test_hostile_text_of_an_exception_is_shown():
    def hostile(q, k, v):
        raise ValueError("\x1b[31m[bold]red\u202e")

    text = shown(check(hostile))
    assert "\x1b" not in text
    assert "[bold]red⟨U+202E⟩" in text


def test_the_document_is_strict_json():
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    report = check(lambda q, k, v: torch.full_like(q, math.nan))
    doc = json.loads(document.dump(document.check_document(report)), parse_constant=refuse)
    assert (doc["format"], doc["version"], doc["ok"]) == ("scaledot/check", 1, False)
    assert [p["name"] for p in doc["properties"]] == list(ALL)
    assert {p["status"] for p in doc["properties"]} <= {
        "wrong", "differs", "ok", "unsupported", "unjudged",
    }  # fmt: skip


# The command line


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of one's own with a right and a wrong function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "mine.py").write_text(MINE, "utf-8")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("mine", "broken", "needy", "quits", "pack"):
            del sys.modules[name]


MINE = """\
import torch
from torch.nn.functional import scaled_dot_product_attention as right

print("imported")
number = 3


def wrong(q, k, v):
    print("called")
    return (q @ k.mT).softmax(-1) @ v


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return right(q, k, v)


module = Module()
"""


def command(capfd, *args):
    code = run(["check", *args])
    out, err = capfd.readouterr()
    return code, out, err


def test_a_right_function_exits_with_0(capfd, here):
    code, out, err = command(capfd, "mine:right")
    assert code == 0
    assert out.startswith("scaledot check  mine:right   as torch's sdpa · cpu · float32\n")
    assert err == "imported\n"


def test_a_wrong_function_exits_with_1_and_its_own_output_stays_out(capfd, here):
    code, out, err = command(capfd, "mine:wrong")
    assert code == 1
    assert "called" not in out
    assert "called" in err
    assert "  wrong    scale             no scale: q·k enters softmax as it is\n" in out


@pytest.mark.parametrize("name", ["mine:module", "mine:module.forward", "scaledot:attention"])
def test_whatever_can_be_called(capfd, here, name):
    assert command(capfd, name)[0] == 0


def test_json(capfd, here):
    code, out, err = command(capfd, "mine:wrong", "--json", "-")
    assert code == 1
    assert json.loads(out)["function"] == "mine:wrong"
    assert "properties: 1 wrong" in err
    code, out, _ = command(capfd, "mine:right", "--json", "check.json", "--dtype", "float64")
    assert code == 0
    assert "Wrote check.json" in out
    assert json.loads((here / "check.json").read_text("utf-8"))["dtype"] == "float64"


def test_a_layout(capfd, here):
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").touch()
    (here / "pack" / "flash.py").write_text(
        "from mine import right\n\n"
        "def attend(q, k, v):\n"
        "    return right(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)\n"
    )
    code, out, _ = command(capfd, "pack.flash:attend", "--layout", "bshd")
    assert code == 0
    assert "as torch's sdpa but (batch, length, heads, dim) · cpu" in out
    assert command(capfd, "pack.flash:attend")[0] == 1


MISTAKES = {
    (): "check needs MODULE:FUNCTION: as my_attention:attend",
    ("mine",): "check needs MODULE:FUNCTION, got 'mine': as my_attention:attend",
    (":right",): "check needs MODULE:FUNCTION, got ':right': as my_attention:attend",
    ("mine:",): "check needs MODULE:FUNCTION, got 'mine:': as my_attention:attend",
    ("mine:rihgt",): "mine has no 'rihgt': it has right",
    ("mine:number",): "mine:number is a int: pass a function",
    ("mine:Module",): "mine:Module is a class: pass a function, or an instance of it",
    ("mine.py:right",): "mine.py is a file: run it in its folder as mine:right",
    ("nowhere:f",): "no module 'nowhere': no such file in this folder, and not installed",
    ("mine.sub:f",): None,
    (".mine:f",): None,
    ("broken:f",): "cannot import broken: SyntaxError: '(' was never closed (broken.py, line 1)",
    ("needy:f",): "cannot import needy: No module named 'no_such_package'",
    ("quits:f",): "cannot import quits: SystemExit: 1",
    ("mine:wrong", "--layout", "sbhd"): "layout is 'sbhd': pass one of bhsd, bshd",
    ("mine:wrong", "--dtype", "int8"): (
        "unknown dtype 'int8': pass one of float32, bfloat16, float16, float64"
    ),
    ("mine:wrong", "--device", "moon"): None,
    ("mine:wrong", "--json", "no/x.json"): "cannot write no/x.json: no folder no; nothing was run",
    ("mine:wrong", "--color", "blue"): "--color is 'blue': pass auto, always or never",
    ("mine:wrong", "extra"): None,
    ("mine:wrong", "--nope"): None,
    ("math:pow",): None,
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_on_the_command_line_is_one_line(capfd, here, args):
    (here / "broken.py").write_text("f = (\n")
    (here / "needy.py").write_text("import no_such_package\n")
    (here / "quits.py").write_text("import sys\nsys.exit(1)\n")
    code, out, err = command(capfd, *args)
    err = err.removeprefix("imported\n")
    assert code == 2
    assert out == ""
    assert err.startswith("scaledot: ")
    assert err.count("\n") == 1
    if MISTAKES[args] is not None:
        assert err == f"scaledot: {MISTAKES[args]}\n"


def test_help_lists_every_option(capfd):
    from scaledot import cli_check

    code, out, _ = command(capfd, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for name in inspect.signature(cli_check.check).parameters:
        assert (name.upper() if name == "function" else f"--{name}") in out


def test_the_command_finds_the_folder_it_runs_in_and_help_loads_no_torch(here):
    env = os.environ | {"PYTHONPATH": str(Path(scaledot.__file__).parents[1])}
    script = (
        "import sys; from scaledot.cli import run; sys.path[0] = '/'; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "check", "mine:wrong"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("scaledot check  mine:wrong")
    script = (
        "import sys; from scaledot.cli import run; assert run(['check', '--help']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True)


def test_masks_of_our_own_are_not_asked_for():
    """Mask is ours; what is checked is what torch's signature takes."""

    def tensors_only(q, k, v, attn_mask=None):
        assert not isinstance(attn_mask, Mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask)

    assert check(tensors_only).ok


if __name__ == "__main__":
    GOLDEN.write_text(wrong_example(), "utf-8")

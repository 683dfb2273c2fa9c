"""What a head looks at, from lse alone, is what its weights say."""

import math

import pytest
import torch

from oracle import MASKS, inputs, masks
from scaledot import checks
from scaledot.dispatch import attention
from scaledot.masks import Mask, resolve
from scaledot.roles import OFFSETS, positions, weight_at
from scaledot.stages import trace


def looked_at(q, k, attn_mask=None, is_causal=False, self_attention=True, **arguments):
    rows = attention(q, k, k, attn_mask, is_causal=is_causal, enable_gqa=True, return_stats=True,
                     **arguments)[1]  # fmt: skip
    window = arguments.pop("window", None)
    problem = checks.problem(q, k, None, enable_gqa=True, **arguments)
    seen = resolve(problem, attn_mask, is_causal, window)
    return positions(problem, seen, rows, self_attention=self_attention)


def mean(x):
    """Over batch and the rows where it was measured, for each head."""
    return x.nanmean((0, 2))


def test_planted_heads_are_found():
    """Four heads whose query is the key of the previous, own, next or first token."""
    n = 11
    k = torch.eye(n).expand(1, 4, n, n)
    moved = [torch.roll(torch.eye(n), 1, 0), torch.eye(n), torch.roll(torch.eye(n), -1, 0)]
    q = 40 * torch.stack([*moved, torch.eye(n)[:1].expand(n, n)])[None]
    found = looked_at(q, k, scale=1.0)
    for head, name in enumerate(("previous", "current", "next", "first")):
        assert mean(found[name])[head] > 0.999, name
        others = [x for x in ("previous", "current", "next") if x != name and name != "first"]
        assert all(mean(found[x])[head] < 0.001 for x in others)


def harmonic(n):
    return sum(1 / i for i in range(1, n + 1))


@pytest.mark.parametrize("n", [2, 13])
def test_chance_is_what_equal_weights_give(n):
    """Uniform heads are at chance, whose closed forms are harmonic numbers."""
    q, k = torch.zeros(2, 3, n, 5), torch.randn(2, 3, n, 5)
    causal, full = looked_at(q, k, is_causal=True), looked_at(q, k)
    closed = (harmonic(n) - 1) / (n - 1)
    for name in ("first", "previous", "current"):
        assert mean(causal[f"chance.{name}"]).tolist() == pytest.approx([closed] * 3)
        assert mean(full[f"chance.{name}"]).tolist() == pytest.approx([1 / n] * 3)
    assert full["first"][..., 0].isnan().all()  # the first key's own row is no sign of a sink
    assert not full["first"][..., 1:].isnan().any()
    assert causal["next"].isnan().all()
    assert causal["chance.next"].isnan().all()
    for found in (causal, full):
        for name in ("first", *OFFSETS):
            torch.testing.assert_close(found[name], found[f"chance.{name}"], equal_nan=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", ["plain", "soft-cap and sinks"])
def test_masses_are_the_weights_of_the_definition(mask, extra):
    arguments = masks(2, 6, 13, 13)[mask]
    if extra != "plain":
        arguments |= {"softcap": 1.5, "sinks": torch.randn(6)}
    q, k, _ = inputs(queries=13, dtype=torch.float64)
    found = looked_at(q, k, **arguments)
    t = trace(q, k, enable_gqa=True, **arguments)
    for name, offset in OFFSETS.items():
        measured = found[name]
        for i in range(13):
            j = i + offset
            if not 0 <= j < 13:
                assert measured[:, :, i].isnan().all()
                continue
            choice = t.visible[:, :, i, j] & (t.rows.visible[:, :, i] > 1)
            assert torch.equal(~measured[:, :, i].isnan(), choice)
            torch.testing.assert_close(
                measured[:, :, i][choice], t.weights[:, :, i, j][choice], rtol=1e-9, atol=1e-12
            )


def test_one_key_a_query_is_any_weight_asked_for():
    q, k, v = inputs(queries=5)
    bias = torch.randn(2, 6, 5, 13)
    bias[0, 0, 0, :6] = -math.inf
    problem = checks.problem(q, k, None, enable_gqa=True)
    seen = resolve(problem, bias, "bottom_right")
    rows = attention(q, k, v, bias, is_causal="bottom_right", enable_gqa=True, return_stats=True)[1]
    t = trace(q, k, v, bias, is_causal="bottom_right", enable_gqa=True)
    index = torch.tensor([[0, 4, 12, -1, 13], [3, 5, 7, 11, 12]])
    weight, visible = weight_at(problem, seen, rows.lse, index)
    inside = (index >= 0) & (index < 13)
    at = index.clamp(0, 12)[:, None, :, None].expand(2, 6, 5, 1)
    assert torch.equal(visible, t.visible.gather(3, at)[..., 0] & inside[:, None])
    want = t.weights.gather(3, at)[..., 0] * inside[:, None]
    torch.testing.assert_close(weight, want, rtol=1e-5, atol=1e-7)


def test_padding_and_documents_have_first_keys_of_their_own():
    q, k, _ = inputs(queries=13)
    left = torch.tensor([[False] * 4 + [True] * 9, [True] * 13])
    padded = looked_at(q, k, Mask(keys=left), is_causal=True)
    alone = looked_at(q[:1, :, 4:], k[:1, :, 4:], is_causal=True)
    for name, x in alone.items():
        torch.testing.assert_close(padded[name][:1, :, 4:], x, equal_nan=True, rtol=1e-5, atol=1e-6)
    assert padded["first"][0, :, :5].isnan().all()
    ids = torch.arange(13) // 7
    packed = looked_at(q, k, Mask(segments=ids), is_causal=True)
    second = looked_at(q[:, :, 7:], k[:, :, 7:], is_causal=True)
    for name, x in second.items():
        torch.testing.assert_close(packed[name][:, :, 7:], x, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_cross_attention_has_a_first_key_only():
    q, k, _ = inputs()
    found = looked_at(q, k, self_attention=False)
    assert set(found) == {"first", "chance.first"}
    t = trace(q, k, enable_gqa=True)
    torch.testing.assert_close(found["first"], t.weights[..., 0], rtol=1e-5, atol=1e-7)
    nothing = looked_at(q, k[:, :, :0], self_attention=False)
    assert nothing == {}


def test_a_cached_query_stands_at_the_end_of_its_keys():
    q, k, _ = inputs(queries=1)
    found = looked_at(q, k)
    t = trace(q, k, enable_gqa=True)
    torch.testing.assert_close(found["current"][..., 0], t.weights[..., 0, 12])
    torch.testing.assert_close(found["previous"][..., 0], t.weights[..., 0, 11])


def test_no_weight_is_above_one():
    """At scores of 1e5 the rounding of lse would make it so."""
    q, k = torch.randn(2, 3, 13, 7) * 3e4, torch.randn(2, 3, 13, 7)
    found = looked_at(q, k)
    assert all(found[name].nan_to_num(nan=0.0).amax() <= 1 for name in ("first", *OFFSETS))

"""What a mask shows: counts and weights against n×n ones, planted faults, and healthy models."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scaledot
from scaledot import leakage, mask_check
from scaledot.calls import Attended, four_axes
from scaledot.checks import problem
from scaledot.dispatch import row_stats
from scaledot.frames import Frame
from scaledot.mask_check import MaskFacts, facts, merge
from scaledot.masks import Mask, resolve

torch.set_num_threads(1)

HEADS, KV, LENGTH, DIM = 4, 2, 13, 6


class Causal(nn.Module):
    """A module whose own word is that it is causal."""

    is_causal = True


def frame(**said: Any) -> Frame:
    return Frame(
        "", nn.Module(), False, True, said.pop("query_mask", None), said.pop("length", LENGTH),
        False, **said,
    )  # fmt: skip


def attend(
    mask: Mask | Tensor | None, *, queries: int = LENGTH, keys: int = LENGTH, batch: int = 2,
    dtype: torch.dtype = torch.float64, shift: float = 0.0, softcap: float | None = None,
    sinks: bool = False, causal: Any = False,
) -> Attended:  # fmt: skip
    torch.manual_seed(3)
    q = torch.randn(batch, HEADS, queries, DIM, dtype=dtype) * 2 + shift
    k = torch.randn(batch, KV, keys, DIM, dtype=dtype) * 2 + shift
    extra = torch.randn(HEADS, dtype=dtype) if sinks else None
    rows = row_stats(q, k, mask, causal, enable_gqa=True, softcap=softcap, sinks=extra)
    p = problem(q, k, None, enable_gqa=True, softcap=softcap, sinks=extra)
    return four_axes(Attended(p, resolve(p, mask, causal), rows))


def dense(a: Attended) -> tuple[Tensor, Tensor]:
    """(weights, visible) of every pair, n×n and in float64."""
    p, seen = a.problem, a.seen
    k = p.key.double().repeat_interleave(p.group, 1)
    logits = p.query.double() @ k.mT * p.scale
    if p.softcap:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    hidden, bias = seen.block(0, seen.shape[2], 0, seen.shape[3])
    shown = torch.ones_like(logits, dtype=torch.bool)
    if hidden is not None:
        shown = shown & ~hidden
    if bias is not None:
        shown = shown & (bias > seen.floor)
        logits = logits + bias.double()
    logits = logits.masked_fill(~shown, -math.inf)
    top = logits.amax(-1, keepdim=True)
    if p.sinks is not None:
        top = torch.maximum(top, p.sinks.double()[:, None, None])
    e = (logits - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = e.sum(-1, keepdim=True)
    if p.sinks is not None:
        total = total + (p.sinks.double()[:, None, None] - top).exp()
    return (e / total).nan_to_num(0.0), shown


def compare(shown: mask_check.Shown | None, a: Attended, pairs: Tensor, real: Tensor) -> None:
    """A `Shown` against the pairs (…, queries, keys) that are not to be seen."""
    assert shown is not None
    weights, visible = dense(a)
    wrong = visible & pairs & real[:, None, :, None]
    assert shown.pairs.tolist() == wrong.sum((0, 2, 3)).tolist()
    by_row = (weights * wrong).sum(-1)
    close = 1e-9 if a.problem.query.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(shown.mass, by_row.sum((0, 2)), rtol=close, atol=0)
    torch.testing.assert_close(shown.most, by_row.amax((0, 2)), rtol=close, atol=0)


def later(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


SEGMENTS = torch.tensor([[0] * 5 + [1] * 8, [2] * 3 + [0] * 3 + [1] * 7])
KEEP = torch.ones(2, LENGTH, dtype=torch.bool)
KEEP[0, :3] = False
KEEP[1, -4:] = False
MASKS: dict[str, Callable[[], Mask | Tensor | None]] = {
    "none": lambda: None,
    "causal": lambda: Mask(causal="bottom_right"),
    "window": lambda: Mask(causal="bottom_right", window=4),
    "two sides": lambda: Mask(window=(3, 2)),
    "one later": lambda: Mask(window=(-1, 1)),
    "padding": lambda: Mask(keys=KEEP),
    "causal padding": lambda: Mask(causal="bottom_right", keys=KEEP),
    "packed": lambda: Mask(segments=SEGMENTS),
    "packed padded": lambda: Mask(segments=SEGMENTS, keys=KEEP, window=(4, 5)),
    "packed causal": lambda: Mask(causal="bottom_right", segments=SEGMENTS),
    "boolean": lambda: torch.rand(2, HEADS, LENGTH, LENGTH) > 0.4,
    "one head": lambda: torch.rand(1, 1, LENGTH, LENGTH) > 0.4,
    "by key": lambda: torch.rand(2, HEADS, 1, LENGTH) > 0.4,
    "bias": lambda: torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64),
    "bias by key": lambda: torch.randn(1, HEADS, 1, LENGTH, dtype=torch.float64),
    "hiding bias": lambda: torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(
        torch.rand(LENGTH, LENGTH) > 0.6, torch.finfo(torch.float64).min
    ),
    "both": lambda: (
        Mask(window=(4, 3), keys=KEEP, segments=SEGMENTS)
        & (torch.rand(2, 1, LENGTH, LENGTH) > 0.3)
    ),
}  # fmt: skip


def made(name: str) -> Mask | Tensor | None:
    torch.manual_seed(7)
    return MASKS[name]()


@pytest.mark.parametrize("block", [1 << 20, 40])
@pytest.mark.parametrize("name", MASKS)
def test_counts_are_those_of_the_mask(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_check, "_BLOCK", block)
    a = attend(made(name))
    _, visible = dense(a)
    counted = mask_check._visible(a.seen).expand(2, HEADS, -1)
    assert counted.tolist() == visible.sum(-1).tolist() == a.rows.visible.tolist()


@pytest.mark.parametrize(
    "about",
    [{}, {"shift": 9.0}, {"softcap": 3.0}, {"sinks": True}, {"dtype": torch.float32}],
    ids=["plain", "shifted", "softcap", "sinks", "float32"],
)
@pytest.mark.parametrize("name", MASKS)
def test_weight_on_later_keys_is_that_of_the_matrix(name: str, about: dict[str, Any]) -> None:
    mask = made(name)
    if isinstance(mask, Tensor) and mask.is_floating_point() and about.get("dtype"):
        mask = mask.float().clamp(min=torch.finfo(torch.float32).min)
    a = attend(mask, **about)
    found = facts(a, [], Causal(), kind="self", window=None)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    if a.seen.keep is not None:
        real = a.seen.keep.expand(2, -1)
    compare(found.later, a, later(LENGTH, LENGTH), real)


@pytest.mark.parametrize("name", MASKS)
def test_weight_on_padding_and_other_documents(name: str) -> None:
    a = attend(made(name))
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 6, [0] * 2 + [1] * 9 + [2] * 2])
    said = frame(query_mask=KEEP, documents=documents)
    found = facts(a, [said], Causal(), kind="self", window=None)
    compare(found.padding, a, ~KEEP[:, None, None, :], KEEP)
    assert found.padded == 7
    other = documents[:, :, None] != documents[:, None, :]
    compare(found.across, a, other[:, None], KEEP)
    assert found.documents == 6


def test_seventeen_documents_are_told_apart() -> None:
    documents = torch.arange(17).repeat_interleave(torch.tensor([1, 3, 2] * 5 + [4, 1]))[None]
    n = documents.shape[1]
    a = attend(Mask(causal="bottom_right"), queries=n, keys=n, batch=1)
    found = facts(a, [frame(documents=documents, length=n)], Causal(), kind="self", window=None)
    real = torch.ones(1, n, dtype=torch.bool)
    compare(found.across, a, (documents[0, :, None] != documents[0])[None, None], real)
    packed = attend(Mask(causal="bottom_right", segments=documents * 5), queries=n, keys=n, batch=1)
    found = facts(
        packed, [frame(documents=documents, length=n)], Causal(), kind="self", window=None
    )
    assert found.across is not None
    assert found.across.pairs.tolist() == found.across.mass.tolist() == [0] * HEADS


def test_nothing_is_computed_where_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pass over the scores nor an n×n mask."""
    a = attend(Mask(causal="bottom_right", keys=KEEP, window=4))

    def fail(*_: Any) -> Any:
        raise AssertionError("the scores were read")

    monkeypatch.setattr(mask_check.operators, "implementation", fail)
    monkeypatch.setattr(mask_check, "_read", fail)
    found = facts(a, [frame(query_mask=KEEP)], Causal(), kind="self", window=4)
    assert found.later is not None
    assert found.padding is not None
    assert int(found.later.pairs.sum()) == int(found.padding.pairs.sum()) == 0
    assert found.full_max.tolist() == [4] * HEADS


def test_more_queries_or_no_keys_are_no_trouble() -> None:
    for queries, keys in ((5, 3), (0, 4), (4, 0), (0, 0)):
        a = attend(None, queries=queries, keys=keys)
        found = facts(a, [], Causal(), kind="self", window=4)
        assert found.rows.tolist() == [2 * queries if keys else 0] * HEADS
        assert found.visible_max.tolist() == [keys if queries else 0] * HEADS


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_facts_of_parts_merge_to_those_of_the_whole(cut: int) -> None:
    whole = attend(Mask(window=(3, 1)))
    documents = torch.tensor([[0] * 4 + [1] * 9, [0] * 13])
    parts = []
    for b in (slice(0, 1), slice(1, 2)):
        p = replace(whole.problem, query=whole.problem.query[b], key=whole.problem.key[b])
        part = Attended(p, whole.seen.part(b, slice(None)), whole.rows.map(lambda x, b=b: x[b]))
        said = frame(query_mask=KEEP[b], documents=documents[b])
        parts.append(facts(part, [said], Causal(), kind="self", window=cut))
    said = frame(query_mask=KEEP, documents=documents)
    once = facts(whole, [said], Causal(), kind="self", window=cut)
    both = merge(*parts)
    assert both.calls == 2
    same(both, once)
    same(merge(parts[1], parts[0]), once)


def same(a: MaskFacts, b: MaskFacts) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if isinstance(x, mask_check.Shown):
            assert x.pairs.tolist() == y.pairs.tolist()
            torch.testing.assert_close(x.mass, y.mass)
            torch.testing.assert_close(x.most, y.most)
        elif isinstance(x, Tensor):
            assert x.tolist() == y.tolist(), name
        elif name == "finite":
            assert math.isnan(x) == math.isnan(y)
        elif name != "calls":
            assert x == y, name


# The form of a mask


def alone(mask: Mask | Tensor | None, module: nn.Module | None = None, **about: Any) -> MaskFacts:
    return facts(attend(mask, **about), [], module or nn.Module(), kind="self", window=None)


def test_an_inverted_causal_mask_is_named() -> None:
    hides = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for module in (nn.Module(), Causal()):
        assert alone(hides, module).inverted == "causal"
        assert alone(torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(
            ~hides, -math.inf), module).inverted == "causal"  # fmt: skip
        assert alone(~hides, module).inverted is None
        # A text read backwards, its own key with it, is no mistake of this kind.
        assert alone((~hides).T, module).inverted is None
        assert alone(None, module).inverted is None
    few = hides.expand(2, HEADS, -1, -1).clone()
    few[1, 2, 4, 1] = True
    assert alone(few).inverted is None


def test_an_inverted_padding_mask_is_named() -> None:
    found = facts(attend(Mask(keys=~KEEP)), [frame(query_mask=KEEP)], nn.Module(),
                  kind="self", window=None)  # fmt: skip
    assert found.inverted == "padding"
    found = facts(attend(Mask(keys=KEEP)), [frame(query_mask=KEEP)], nn.Module(),
                  kind="self", window=None)  # fmt: skip
    assert found.inverted is None


def test_an_additive_mask_of_zeros_and_ones_is_named() -> None:
    shows = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    assert alone(shows).zero_one
    assert alone(shows.expand(2, HEADS, -1, -1)).zero_one
    assert not alone(shows * 0).zero_one
    assert not alone(shows * 2).zero_one
    assert not alone(shows.bool()).zero_one
    shows[5, 2] = 0.5  # not in the rows that are looked at first
    assert not alone(shows).zero_one


@pytest.mark.parametrize("low", [-1e4, -65504.0, -1e9])
def test_a_finite_mask_is_named_and_weighs_nothing(low: float) -> None:
    bias = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(later(LENGTH, LENGTH), low)
    found = alone(bias, Causal())
    assert found.finite == low
    assert found.later is not None
    assert found.later.pairs.tolist() == [2 * LENGTH * (LENGTH - 1) // 2] * HEADS
    assert found.later.most.tolist() == [0.0] * HEADS
    assert found.inverted is None
    assert math.isnan(alone(bias.masked_fill(bias < 0, -math.inf)).finite)


def test_a_bias_that_grows_with_distance_is_no_mask() -> None:
    n = 3000
    position = torch.arange(n, dtype=torch.float64)
    bias = (position[None] - position[:, None])[None, None, :1] * torch.ones(1, HEADS, 1, 1)
    bias = -bias.abs()
    a = attend(bias, queries=1, keys=n)
    assert math.isnan(facts(a, [], nn.Module(), kind="self", window=None).finite)


@pytest.mark.parametrize(
    ("mask", "causal", "where"),
    [
        (None, "top_left", "top_left"),
        (None, "bottom_right", "bottom_right"),
        (None, False, "neither"),
        (Mask(causal="top_left"), False, "top_left"),
        (Mask(causal="bottom_right", window=3), False, "bottom_right"),
        (torch.ones(4, 9, dtype=torch.bool).tril(), False, "top_left"),
        (torch.ones(4, 9, dtype=torch.bool).tril(5), False, "bottom_right"),
        (torch.ones(4, 9, dtype=torch.bool).tril(2), False, "neither"),
    ],
)
def test_alignment(mask: Any, causal: Any, where: str) -> None:
    found = alone(mask, queries=4, keys=9, causal=causal)
    assert found.cached == 1
    assert found.alignment == {where}


def test_a_cache_of_fixed_size_is_filled_from_the_left() -> None:
    a = attend(None, queries=4, keys=9, causal="top_left")
    key = a.problem.key.clone()
    key[:, :, 4:] = 0
    a = replace(a, problem=replace(a.problem, key=key))
    assert facts(a, [], Causal(), kind="self", window=None).alignment == {"neither"}


def test_a_mask_of_three_axes_that_could_be_a_text_s() -> None:
    by_head = torch.rand(1, HEADS, LENGTH, LENGTH) > 0.5
    assert alone(by_head, batch=HEADS).ambiguous
    assert not alone(by_head[:, :1].expand(-1, HEADS, -1, -1), batch=HEADS).ambiguous
    assert not alone(by_head, batch=2).ambiguous
    assert not alone(by_head.expand(HEADS, -1, -1, -1).contiguous(), batch=HEADS).ambiguous


@pytest.mark.parametrize("kept", [3, 4, 5])
def test_a_window_is_counted_exactly(kept: int) -> None:
    mask = Mask(causal="bottom_right", window=kept, keys=KEEP)
    found = facts(attend(mask), [frame(query_mask=KEEP)], Causal(), kind="self", window=4)
    assert found.window == 4
    assert found.full.tolist() == [(LENGTH - 3 - 3) + (LENGTH - 4 - 3)] * HEADS
    assert found.full_max.tolist() == [kept] * HEADS
    # A row with 4 keys before it sees 4 of a window of 5.
    assert found.full_min.tolist() == [min(kept, 4)] * HEADS


def test_the_examples_run() -> None:
    for module in (mask_check, leakage):
        names = {"scaledot": scaledot, "torch": torch, "nn": nn}
        result = doctest.testmod(module, extraglobs=names)
        assert result.failed == 0
        assert result.attempted > 0

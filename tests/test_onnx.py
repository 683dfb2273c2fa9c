"""ONNX's own cases for its Attention operator, through `attention` and `trace`.

The adapter here only says a case in our words: heads on their own axis, the past before the new
keys and values, a mask, a stage. The cases come with `pip install "onnx>=1.23,<1.24"`; without it
the module is skipped, and fails where SCALEDOT_REQUIRE_MODELS=1.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scaledot import Mask, attention, trace
from scaledot.stages import Trace

CASES = 93
STAGES = ("scaled", "capped", "masked", "weights")  # by qk_matmul_output_mode


@dataclass(frozen=True, eq=False)
class Case:
    """One Attention node with the tensors it takes and must give, by ONNX's names."""

    name: str
    attributes: dict[str, Any]
    given: dict[str, Tensor]
    expected: dict[str, Tensor]


def attention_cases() -> list[Case]:
    """Every case of the operator itself, without those of its expansion into elementary ones."""
    if importlib.util.find_spec("onnx") is None:
        message = 'the attention cases of ONNX are missing: pip install "onnx>=1.23,<1.24"'
        if os.environ.get("SCALEDOT_REQUIRE_MODELS") == "1":
            pytest.fail(message, pytrace=False)
        pytest.skip(message, allow_module_level=True)
    # Importing a module of cases lists them. collect_testcases("Attention") would import those of
    # every other operator too: eight times as long, with warnings.
    importlib.import_module("onnx.backend.test.case.node.attention")
    from onnx.backend.test.case.node import _NodeTestCases
    from onnx.helper import get_attribute_value

    cases = []
    for listed in _NodeTestCases:
        node = listed.model.graph.node[0]
        if node.op_type == "Attention":
            ((inputs, outputs),) = listed.data_sets
            name = listed.name.removeprefix("test_attention_")
            attributes = {a.name: get_attribute_value(a) for a in node.attribute}
            cases.append(
                Case(name, attributes, named(node.input, inputs), named(node.output, outputs))
            )
    return cases


def named(names: Iterable[str], arrays: Iterable[np.ndarray]) -> dict[str, Tensor]:
    """The tensors by name; an empty name stands for one that is left out."""
    return dict(zip(filter(None, names), map(tensor, arrays), strict=True))


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # not one of numpy's own
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def arguments(case: Case) -> dict[str, Any]:
    """What to call `attention` and `trace` with."""
    given, attributes = case.given, case.attributes
    query = split_heads(given["Q"], attributes.get("q_num_heads"))
    key = split_heads(given["K"], attributes.get("kv_num_heads"))
    value = split_heads(given["V"], attributes.get("kv_num_heads"))
    if "past_key" in given:
        key = torch.cat([given["past_key"], key], 2)
        value = torch.cat([given["past_value"], value], 2)
    return {
        "query": query,
        "key": key,
        "value": value,
        "scale": attributes.get("scale"),
        "enable_gqa": True,
        "softcap": attributes.get("softcap") or None,  # 0 is none
        **visibility(case, query.shape[2], key.shape[2]),
    }


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """(batch, length, heads · dim), where it is that, as (batch, heads, length, dim)."""
    return x if x.dim() == 4 else x.unflatten(2, (heads, -1)).transpose(1, 2)


def like_query(case: Case, output: Tensor) -> Tensor:
    """An output in the axes that the case's Q came in."""
    return output if case.given["Q"].dim() == 4 else output.transpose(1, 2).flatten(2)


def visibility(case: Case, queries: int, keys: int) -> dict[str, Any]:
    """attn_mask, is_causal and window, in symbols where we have them.

    For ONNX, query 0 stands at the key after the past; with nonpad_kv_seqlen, the last query at
    the last real key of its sequence. Elsewhere than "top_left" and "bottom_right" a boolean mask
    says what that leaves to see.
    """
    causal = case.attributes.get("is_causal") == 1
    left, right = (case.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    window = None if left == right == -1 else (left, right)
    lengths = case.given.get("nonpad_kv_seqlen")
    past = case.given["past_key"].shape[2] if "past_key" in case.given else 0
    first = torch.tensor([past]) if lengths is None else lengths - queries

    masks: list[Any] = [] if lengths is None else [Mask(lengths=lengths)]
    alignment = "bottom_right" if (first == keys - queries).all() else None
    if causal and (first == 0).all():
        alignment = "top_left"
    if alignment is None and (causal or window):
        away = torch.arange(keys) - torch.arange(queries)[:, None] - first[:, None, None, None]
        left, right = (math.inf if w == -1 else w for w in (left, 0 if causal else right))
        masks.append(Mask(dense=(-left <= away) & (away <= right)))
        causal, window = False, None
    if "attn_mask" in case.given:
        mask = case.given["attn_mask"]
        hidden = False if mask.dtype == torch.bool else -math.inf
        masks.append(torch.nn.functional.pad(mask, (0, keys - mask.shape[-1]), value=hidden))
    return {
        "attn_mask": reduce(and_, masks) if masks else None,
        "is_causal": alignment if causal else False,
        "window": window,
    }


def largest_logit(t: Trace) -> float:
    return max(1.0, t.masked[t.masked.isfinite()].abs().max().item())


def assert_close(result: Tensor, expected: Tensor, growth: float = 1.0) -> None:
    """result is expected but for rounding, and exactly 0 where that is 0."""
    # The two sides together round a logit about 12 times (factors, their sum, scale, cap, mask),
    # each time by up to eps/2 either way, which is eps/√12 in standard deviation: eps of its size
    # in all, and 4 of these are allowed. Through the softmax a logit's absolute error becomes a
    # weight's relative one: what follows it has the logits' largest size, at least 1, as growth.
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    size = expected[expected.isfinite()].abs().max().item()
    atol = 4 * torch.finfo(expected.dtype).eps * growth * size
    torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=atol)
    assert not result[expected == 0].any()


ALL = attention_cases()
each_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


def test_every_case_is_here():
    assert len(ALL) == CASES
    staged = [case.attributes for case in ALL if "qk_matmul_output" in case.expected]
    assert {a.get("qk_matmul_output_mode", 0) for a in staged} == {0, 1, 2, 3}
    assert {c.given["Q"].dtype for c in ALL} == {torch.float32, torch.float16, torch.bfloat16}


@each_case
@pytest.mark.parametrize("kernel", ["auto", "tiled"])
def test_attention_gives_the_output_of(case, kernel):
    call = arguments(case)
    output = attention(**call, kernel=kernel)
    assert_close(like_query(case, output), case.expected["Y"], largest_logit(trace(**call)))


@each_case
def test_trace_gives_the_stages_of(case):
    call = arguments(case)
    t = trace(**call)
    assert t.output is not None
    assert_close(like_query(case, t.output), case.expected["Y"], largest_logit(t))
    if "qk_matmul_output" in case.expected:
        stage = STAGES[case.attributes.get("qk_matmul_output_mode", 0)]
        growth = largest_logit(t) if stage == "weights" else 1.0
        assert_close(getattr(t, stage), case.expected["qk_matmul_output"], growth)
    for name in ("key", "value"):
        if f"present_{name}" in case.expected:
            assert torch.equal(call[name], case.expected[f"present_{name}"])

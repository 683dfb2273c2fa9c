"""Every argument error, by its exact text: what, what came, what to pass."""

import math
import re

import numpy as np
import pytest
import torch

from scaledot import checks
from scaledot.dispatch import attention
from scaledot.masks import Mask, resolve
from scaledot.stages import trace

pytestmark = pytest.mark.usefixtures("unannotated")


def q(*shape, **options):
    return torch.zeros(*(shape or (2, 3, 5, 7)), **options)


CALLS = {
    "no tensor": (
        ([1.0], q(), q()),
        {},
        "query must be a torch tensor, got list",
    ),
    "no value": (
        (q(), q(), None),
        {},
        "value must be a torch tensor, got NoneType",
    ),
    "integers": (
        (q(), q(dtype=torch.int64), q()),
        {},
        "key is int64: attention needs float tensors",
    ),
    "complex numbers": (
        (q(dtype=torch.complex64), q(), q()),
        {},
        "query is complex64: attention needs float tensors",
    ),
    "a vector": (
        (q(5), q(5), q(5)),
        {},
        "query has shape (5,): expected (…, heads, length, dim), at least 2 dimensions",
    ),
    "two dtypes": (
        (q(), q(), q(dtype=torch.bfloat16)),
        {},
        "query is float32, value is bfloat16: they must have one dtype outside autocast",
    ),
    "two devices": (
        (q(), q(device="meta"), q()),
        {},
        "query is on cpu, key on meta: move them to one device",
    ),
    "two numbers of axes": (
        (q(), q(5, 7), q(5, 7)),
        {},
        "query has 4 dimensions, key has 2: they must be equal, or each at least 3",
    ),
    "two d_k": (
        (q(2, 3, 5, 64), q(2, 3, 5, 32), q()),
        {},
        "q has d_k 64, k has 32: they must be equal",
    ),
    "no component": (
        (q(2, 3, 5, 0), q(2, 3, 5, 0), q()),
        {},
        "d_k is 0: q and k need at least one component",
    ),
    "keys without value": (
        (q(), q(2, 3, 11, 7), q()),
        {},
        "k has 11 keys, v has 5: they must be equal",
    ),
    "k and v of different heads": (
        (q(2, 6, 5, 7), q(), q(2, 2, 5, 7)),
        {"enable_gqa": True},
        "k has 3 heads, v has 2: they must be equal",
    ),
    "heads not grouped": (
        (q(2, 6, 5, 7), q(), q()),
        {},
        "q has 6 heads, k has 3: pass enable_gqa=True to let 2 query heads share a kv head",
    ),
    "heads that do not divide": (
        (q(2, 5, 5, 7), q(), q()),
        {"enable_gqa": True},
        "q has 5 heads, k has 3: the first must be a multiple of the second",
    ),
    "batches that do not fit": (
        (q(), q(4, 3, 5, 7), q()),
        {},
        "batch axes do not fit: q (2, 3, 5, 7), k (4, 3, 5, 7), v (2, 3, 5, 7); "
        "each must be equal or 1",
    ),
    "scale, a word": ((q(), q(), q()), {"scale": "1"}, "scale must be a number, got str"),
    "scale, infinite": (
        (q(), q(), q()),
        {"scale": math.inf},
        "scale is inf: pass a finite number, or None for 1/√d_k",
    ),
    "scale, a parameter": (
        (q(), q(), q()),
        {"scale": torch.ones((), requires_grad=True)},
        "scale requires grad, and its gradient would be lost: pass a number",
    ),
    "soft-cap 0": (
        (q(), q(), q()),
        {"softcap": 0.0},
        "softcap is 0: pass a finite number above 0, or None for no cap",
    ),
    "soft-cap below 0": (
        (q(), q(), q()),
        {"softcap": -30.0},
        "softcap is -30: pass a finite number above 0, or None for no cap",
    ),
    "soft-cap without end": (
        (q(), q(), q()),
        {"softcap": math.nan},
        "softcap is nan: pass a finite number above 0, or None for no cap",
    ),
    "dropout 1": (
        (q(), q(), q()),
        {"dropout_p": 1.0},
        "dropout_p is 1: pass a probability in [0, 1)",
    ),
    "dropout below 0": (
        (q(), q(), q()),
        {"dropout_p": -0.1},
        "dropout_p is -0.1: pass a probability in [0, 1)",
    ),
    "dropout, not a number": (
        (q(), q(), q()),
        {"dropout_p": math.nan},
        "dropout_p is nan: pass a probability in [0, 1)",
    ),
    "sinks, a list": (
        (q(), q(), q()),
        {"sinks": [0.0]},
        "sinks must be a float tensor with one logit a head",
    ),
    "sinks of another number": (
        (q(), q(), q()),
        {"sinks": q(2)},
        "sinks has shape (2,): expected (3,), one logit a head",
    ),
    "sinks elsewhere": (
        (q(), q(), q()),
        {"sinks": q(3, device="meta")},
        "query is on cpu, sinks on meta: move them together",
    ),
    "window, a bool": (
        (q(), q(), q()),
        {"window": True},
        "window must be an integer or a pair (left, right), got bool",
    ),
    "window, a fraction": (
        (q(), q(), q()),
        {"window": 2.5},
        "window must be an integer or a pair (left, right), got 2.5",
    ),
    "window, a triple": (
        (q(), q(), q()),
        {"window": (1, 2, 3)},
        "window must be an integer or a pair (left, right), got (1, 2, 3)",
    ),
    "window of nothing": (
        (q(), q(), q()),
        {"window": -1},
        "window is -1: pass at least 1, the query's own key; "
        "a pair (left, right) counts the keys besides it",
    ),
    "window, a negative side": (
        (q(), q(), q()),
        {"window": (3, -2)},
        "window is (3, -2): each side must be at least 0, or −1 for unbounded",
    ),
    "window of two meanings": (
        (q(), q(2, 3, 11, 7), q(2, 3, 11, 7)),
        {"window": 3},
        "window=(2, 0) with 5 queries and 11 keys has two meanings: add "
        'is_causal="top_left" or "bottom_right"',
    ),
    "causal of two meanings": (
        (q(), q(2, 3, 11, 7), q(2, 3, 11, 7)),
        {"is_causal": True},
        "is_causal=True with 5 queries and 11 keys has two meanings: pass "
        'is_causal="top_left" (query i sees keys 0…i, as PyTorch) or "bottom_right" '
        "(the last query sees every key, as FlashAttention and every KV cache)",
    ),
    "causal, another word": (
        (q(), q(), q()),
        {"is_causal": "lower"},
        'is_causal is \'lower\': pass True, False, "top_left" or "bottom_right"',
    ),
    "mask, a list": (
        (q(), q(), q()),
        {"attn_mask": [[True]]},
        "attn_mask must be a bool or float tensor or scaledot.Mask, got list",
    ),
    "mask, integers": (
        (q(), q(), q()),
        {"attn_mask": q(5, 5, dtype=torch.int32)},
        'attn_mask is int32: pass bool (True means "may attend") or float (added to the scores)',
    ),
    "mask that does not broadcast": (
        (q(), q(), q()),
        {"attn_mask": q(2, 5)},
        "attn_mask has shape (2, 5): expected (2, 3, 5, 5) or axes of 1 "
        "(batch, heads, queries, keys)",
    ),
    "mask of too many axes": (
        (q(5, 7), q(5, 7), q(5, 7)),
        {"attn_mask": q(1, 5, 5)},
        "attn_mask has shape (1, 5, 5): expected (5, 5) or axes of 1 (queries, keys)",
    ),
    "mask of five axes": (
        (q(2, 2, 3, 5, 7),) * 3,
        {"attn_mask": q(3, 1, 1, 5, 5)},
        "attn_mask has shape (3, 1, 1, 5, 5): expected (2, 2, 3, 5, 5) or axes of 1 "
        "(…, batch, heads, queries, keys)",
    ),
    "mask elsewhere": (
        (q(), q(), q()),
        {"attn_mask": q(5, 5, device="meta")},
        "query is on cpu, attn_mask on meta: move them together",
    ),
}
AMBIGUOUS = (
    "attn_mask (3, 5, 5) with 3 batches and 3 heads has two meanings: "
    "pass mask[None] for one mask a head or mask[:, None] for one a batch"
)
CALLS |= {
    "mask of two meanings": ((q(3, 3, 5, 7),) * 3, {"attn_mask": q(3, 5, 5)}, AMBIGUOUS),
    "the same inside a Mask": (
        (q(3, 3, 5, 7),) * 3,
        {"attn_mask": Mask(causal="top_left", dense=q(3, 5, 5))},
        AMBIGUOUS,
    ),
}
TYPE_ERRORS = (
    "must be a torch tensor", "must be a number", "must be a float tensor", "must be a bool",
    "must be an integer", "attention needs", "requires grad", "one dtype", "pass bool",
)  # fmt: skip


@pytest.mark.parametrize("function", [attention, trace])
@pytest.mark.parametrize("name", CALLS)
def test_bad_input_is_an_error_that_says_what_to_pass(function, name):
    tensors, arguments, text = CALLS[name]
    if name == "no value" and function is trace:
        assert trace(*tensors).output is None  # a trace needs no value
        return
    with pytest.raises((TypeError, ValueError)) as error:
        function(*tensors, **arguments)
    assert str(error.value) == text
    assert error.type is (TypeError if any(x in text for x in TYPE_ERRORS) else ValueError)


def test_an_unknown_kernel_is_named_with_what_there_is():
    message = r'^kernel is \'flash\': pass "auto" or one of native, tiled$'
    with pytest.raises(ValueError, match=message):
        attention(q(), q(), q(), kernel="flash")


def mask_error(**fields):
    with pytest.raises((TypeError, ValueError)) as error:
        resolve(checks.problem(q(), q(2, 3, 11, 7), None), Mask(**fields))
    return str(error.value)


def test_bad_masks_are_errors_that_name_the_field():
    assert mask_error(causal="left") == (
        'Mask causal is \'left\': pass "top_left", "bottom_right" or None'
    )
    assert mask_error(lengths=[1.5, 2.0]) == "Mask lengths must be integers"
    assert mask_error(lengths=[1, 2, 3]) == "Mask lengths has 3 entries: expected 2, the batch"
    assert mask_error(keys=q(2, 11)) == "Mask keys must be bool, True for a real key"
    assert mask_error(keys=q(2, 5, dtype=torch.bool)) == (
        "Mask keys has shape (2, 5): expected (2, 11), batch and keys"
    )
    assert mask_error(segments=(q(5), q(11))) == (
        "Mask segments must be integers, one document id a token"
    )
    assert mask_error(segments=torch.zeros(11, dtype=torch.int64)) == (
        "Mask segments has shape (1, 11) for the query axis: expected (2, 5)"
    )
    assert mask_error(dense=q(5, 11, dtype=torch.int64)) == (
        'Mask dense is int64: pass bool (True means "may attend") or float (added to the scores)'
    )


def test_masks_that_do_not_combine_say_why():
    with pytest.raises(ValueError, match=r"^Mask & Mask: one is top_left, the other bottom_right$"):
        Mask(causal="top_left") & Mask(causal="bottom_right")
    with pytest.raises(TypeError, match=r"^Mask & Mask: dense is torch.float16 in one, torch.flo"):
        Mask(dense=q(5, 11).half()) & q(5, 11)


@pytest.mark.parametrize("ones", [torch.ones(5, 5), torch.eye(5, dtype=torch.float16)])
def test_a_trace_of_a_float_mask_of_0_and_1_asks_for_bool(ones):
    """attention does not read values, so the same mask is added there."""
    for mask in (ones, Mask(causal="top_left") & ones):
        text = "mask is float and holds only 0 and 1, like a boolean mask: pass mask.bool()"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            trace(q(), q(), attn_mask=mask)
    assert attention(q(), q(), q(), ones).shape == (2, 3, 5, 7)
    assert trace(q(), q(), attn_mask=torch.zeros(5, 5)).visible.all()
    assert trace(q(), q(), attn_mask=ones + 1).visible.all()


def test_a_trace_of_an_inverted_causal_mask_asks_for_its_inverse():
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    text = (
        "mask shows every query later keys only, like a causal mask inverted: "
        'True means "may attend", pass ~mask'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        trace(q(), q(), attn_mask=~causal)
    assert trace(q(), q(), attn_mask=causal).visible.any()
    assert trace(q(), q(), attn_mask=torch.zeros_like(causal)).rows.empty.all()


def test_labels_must_be_one_a_key():
    with pytest.raises(ValueError, match=r"^tokens has 2 labels: expected 5, one a key$"):
        trace(q(), q(), tokens=["a", "b"])


def test_checked_views_copy_nothing():
    """Batches and heads broadcast, grouped heads are not repeated, two axes become four."""
    query, key = q(2, 6, 5, 7), q(1, 3, 11, 7)
    p = checks.problem(query, key, key, enable_gqa=True)
    assert p.group == 2
    assert p.key.shape == (2, 3, 11, 7)
    assert p.key.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    flat = checks.problem(q(5, 7), q(11, 7), q(11, 3))
    assert flat.query.shape == (1, 1, 5, 7)
    assert flat.restore(flat.query).shape == (5, 7)
    deep = checks.problem(q(2, 13, 6, 5, 7), q(2, 1, 3, 11, 7), None, enable_gqa=True)
    assert deep.query.shape == (26, 6, 5, 7)
    assert deep.key.shape == (26, 3, 11, 7)
    assert deep.restore(deep.query).shape == (2, 13, 6, 5, 7)


def test_numbers_of_other_kinds_are_numbers():
    """NumPy's, and a tensor of one element without a gradient."""
    scale = checks.problem(q(), q(), None, scale=torch.tensor(0.25)).scale
    assert scale == 0.25
    assert isinstance(scale, float)
    assert checks.problem(q(), q(), None).scale == 1 / math.sqrt(7)


@pytest.mark.parametrize("value", [1, np.int64(7), 10**9])
def test_whole_numbers_of_any_kind(value):
    assert checks.whole("trials", value) == int(value)


@pytest.mark.parametrize("value", [True, 2.0, "3", None, [1]])
def test_what_is_no_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"trials is .*: pass a whole number"):
        checks.whole("trials", value)


def test_too_small_says_the_least():
    with pytest.raises(ValueError, match="d_k is 0: pass at least 1"):
        checks.whole("d_k", 0)
    with pytest.raises(ValueError, match="trials is 1: pass at least 2"):
        checks.whole("trials", 1, least=2)

"""Findings about masks: what they say of given facts, and when they say wrong."""

import math
import re
from dataclasses import replace

import pytest
import torch

from scaledot.diagnose import findings
from scaledot.leakage import Leak
from scaledot.mask_check import MaskFacts, Shown
from test_diagnose import heads, layers

FOUR = torch.full((4,), 40)
NONE = FOUR * 0
CLEAN = Shown(NONE, NONE.double(), NONE.double())
FACTS = MaskFacts(
    calls=2, rows=FOUR, causal=True, own_mask=False, visible_min=FOUR // 40, visible_max=FOUR,
    later=CLEAN, padding=None, padded=0, across=None, documents=0, window=None, full=NONE,
    full_min=NONE, full_max=NONE, cached=0, alignment=frozenset(), inverted=None, zero_one=False,
    finite=math.nan, ambiguous=False,
)  # fmt: skip
SOME = Shown(
    torch.tensor([0, 30, 0, 7]),
    torch.tensor([0.0, 10.0, 0.0, 2.0], dtype=torch.float64),
    torch.tensor([0.0, 0.5, 0.0, 1e-9], dtype=torch.float64),
)
LEAK = Leak("future", False, 0.0, 9.5e-7, 0.0, True, 9, None, (3, 9), "logits")


def found(*changes, leaks=()):
    """(findings about masks, lines) of two layers whose facts are changed one by one."""
    facts = [replace(FACTS, **x) for x in (*changes, *[{}] * 2)][:2]
    where = layers(0.125, 0.125)
    masks = {x.path: f for x, f in zip(where, facts, strict=True)}
    result, clear = findings(heads(), where, 256, masks, leaks)
    for f in result:
        text = f"{f.title} {f.seen} {f.means}"
        assert not re.search(r"healthy|dead|broken|dangerous|should|!", text)
        assert f.source == "docs/maths.md#masks"
        assert f.next.startswith("{audit}")
    return {f.id: f for f in result}, dict(clear)


def test_clean_masks_are_reported_with_their_numbers():
    result, clear = found()
    assert result == {}
    assert clear["later keys"] == "none visible in 2 of 2 layers"
    assert clear["mask form"] == "none inverted, none of 0 and 1"
    assert "padding" not in clear
    assert "window" not in clear


def test_without_masks_nothing_is_said_of_them():
    _, clear = findings(heads(), layers(0.125, 0.125), 256)
    assert "mask form" not in clear
    assert "later keys" not in clear


def test_later_keys_name_the_heads_that_weigh_them():
    f = found({"later": SOME})[0]["future"]
    assert (f.kind, f.title) == ("wrong", "Queries see later keys in 1 of 2 layers")
    assert (f.where, f.heads) == ("0.1", ((0, 1),))
    assert f.seen == (
        "30 (query, key) pairs; their weight in a row is .25 on average, .50 at most; "
        "causal gives 0."
    )
    assert f.next == "{audit} --layers 0"


@pytest.mark.parametrize("causal", [None, False])
def test_later_keys_are_no_fault_where_nobody_promised_otherwise(causal):
    both = {"later": None if causal is False else SOME, "causal": causal}
    result, clear = found(both, both)
    assert "future" not in result
    assert "later keys" not in clear


def test_keys_that_weigh_nothing_are_not_accused():
    tiny = replace(SOME, most=SOME.most * 1e-7)
    result, clear = found({"later": tiny, "finite": -1e4})
    assert set(result) == {"finite"}
    assert result["finite"].kind == "note"
    assert "−10,000" in result["finite"].seen
    assert clear["later keys"] == "37 visible pairs, of weight under 1e-6 in 2 of 2 layers"


@pytest.mark.parametrize(
    ("fact", "id_", "change", "kind"),
    [
        ("padding", "padding", {"padded": 3}, "wrong"),
        ("padding", "padding", {"padded": 3, "causal": False, "later": None}, "wrong"),
        ("padding", "padding", {"padded": 3, "causal": None}, "look"),
        ("padding", "padding", {"padded": 3, "own_mask": True}, "look"),
        ("across", "documents", {"documents": 3}, "wrong"),
        ("across", "documents", {"documents": 3, "causal": None}, "look"),
    ],
)
def test_padding_and_documents(fact, id_, change, kind):
    result, _ = found({fact: SOME, **change}, change)
    assert result[id_].kind == kind
    result, clear = found({fact: CLEAN, **change}, change)
    assert result == {}
    line = clear["padding" if fact == "padding" else "other documents"]
    assert line.startswith("none visible; 3 ")


def test_a_window_is_compared_where_texts_are_long_enough():
    kept = {"window": 4, "full": FOUR, "full_min": NONE + 4, "full_max": NONE + 4}
    assert found(kept, kept)[1]["window"] == "4 keys as configured in 2 of 2 layers"
    assert found({"window": 4})[1]["window"] == "4 keys configured; no text is that long"
    f = found(kept | {"full_max": NONE + 5})[0]["window"]
    assert (f.kind, f.seen) == ("wrong", "5 keys, the query's own included; 4 configured.")
    assert "W and W + 1" in f.means
    f = found(kept | {"full_max": NONE + 3, "full_min": NONE + 2})[0]["window"]
    assert f.seen == "3 keys, the query's own included (2 at least); 4 configured."
    # Rows that see fewer for another reason are no reason to doubt the window.
    assert "window" not in found(kept | {"full_min": NONE + 2})[0]
    assert found(kept | {"full_max": NONE + 5, "own_mask": True})[0]["window"].kind == "look"
    assert "window" not in found(kept | {"full_max": NONE + 5, "finite": -1e4})[0]


def test_alignment_with_a_cache():
    left = {"cached": 1, "alignment": frozenset({"top_left", "bottom_right"})}
    assert found(left)[0]["alignment"].kind == "wrong"
    assert found(left | {"causal": None})[0]["alignment"].kind == "look"
    right = {"cached": 1, "alignment": frozenset({"bottom_right"})}
    assert found(right)[1]["cache"] == "the last query sees the last key in 1 of 2 layers"
    other = {"cached": 1, "alignment": frozenset({"neither"})}
    assert found(other)[1]["cache"].startswith("no query is held to the first keys")


def test_the_form_of_a_mask():
    for causal in (True, None, False):
        kind = {"causal": causal, "later": None}
        f = found(kind | {"inverted": "causal"})[0]["inverted"]
        assert (f.kind, "never the query's own" in f.title) == ("wrong", True)
        f = found(kind | {"inverted": "padding"})[0]["inverted"]
        assert f.title == "A mask shows padding and no token in 1 of 2 layers"
        assert found(kind | {"zero_one": True})[0]["zero_one"].kind == "wrong"
        assert found(kind | {"ambiguous": True})[0]["axes"].kind == "look"


def test_leaks_of_a_whole_model():
    assert found(leaks=[LEAK])[1]["a token changed"] == "earlier outputs stay the same to the bit"
    moved = replace(LEAK, movement=3e-7)
    assert found(leaks=[moved])[1]["a token changed"] == (
        "earlier outputs move by 3.0e−7 of the largest output; rounding explains 9.5e−7"
    )
    leak = replace(LEAK, found=True, movement=0.31, changed=9, first=4)
    f = found(leaks=[leak])[0]["future_leak"]
    assert f.kind == "wrong"
    assert f.seen == (
        "Token 9 was changed, and the output 5 tokens before it moved; the largest movement is "
        "0.31 of the largest output; rounding explains 9.5e−7."
    )
    open_ = {"causal": False, "later": None}
    result, clear = found(open_, open_, leaks=[leak])
    assert result == {}
    assert clear["a token changed"].endswith("not a causal model")
    pair = replace(leak, kind="documents", changed=0, first=2)
    assert found(leaks=[pair])[0]["document_leak"].kind == "note"
    assert found(open_, open_, leaks=[pair])[0]["document_leak"].kind == "note"
    assert "a document changed" in found(leaks=[replace(pair, found=False, first=None)])[1]
    random = replace(LEAK, deterministic=False, repeat=0.2)
    assert found(leaks=[random])[0]["repeat"].kind == "look"

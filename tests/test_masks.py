"""Masks, drawn. ■ may attend, · may not."""

import math

import pytest
import torch

from scaledot import checks
from scaledot.dispatch import attention
from scaledot.masks import Mask, Visibility, resolve
from scaledot.stages import trace


def seen(queries, keys, attn_mask=None, batch=1, heads=1, **arguments):
    """What the definition lets a query see, drawn, one picture a batch."""
    q, k = torch.zeros(batch, heads, queries, 2), torch.zeros(batch, heads, keys, 2)
    visible = trace(q, k, attn_mask=attn_mask, **arguments).visible[:, 0]
    return ["\n".join("".join("·■"[x] for x in row) for row in one) for one in visible.tolist()]


def drawing(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


DRAWN = {
    "top left": (3, 5, {"is_causal": "top_left"}, "■····\n■■···\n■■■··"),
    "bottom right": (3, 5, {"is_causal": "bottom_right"}, "■■■··\n■■■■·\n■■■■■"),
    "more queries, top left": (4, 2, {"is_causal": "top_left"}, "■·\n■■\n■■\n■■"),
    "more queries, bottom right": (4, 2, {"is_causal": "bottom_right"}, "··\n··\n■·\n■■"),
    "causal, equal lengths": (3, 3, {"is_causal": True}, "■··\n■■·\n■■■"),
    "window of 2, its own key included": (4, 4, {"window": 2}, "■···\n■■··\n·■■·\n··■■"),
    "window and bottom right": (
        3, 5, {"is_causal": "bottom_right", "window": 2}, "·■■··\n··■■·\n···■■",
    ),
    "one key to each side": (4, 4, {"window": (1, 1)}, "■■··\n■■■·\n·■■■\n··■■"),
    "two sides align as FlashAttention": (2, 4, {"window": (1, 0), "is_causal": "bottom_right"},
                                          "·■■·\n··■■"),
    "two sides, fewer queries": (2, 4, {"window": (1, 1)}, "·■■■\n··■■"),
    "unbounded to the left": (3, 3, {"window": (-1, 0)}, "■··\n■■·\n■■■"),
    "unbounded to the right": (3, 3, {"window": (0, -1)}, "■■■\n·■■\n··■"),
    "unbounded": (2, 3, {"window": (-1, -1)}, "■■■\n■■■"),
    "causal cuts the right of a window": (3, 3, {"window": (1, 5), "is_causal": True},
                                          "■··\n■■·\n·■■"),
    "True means may attend": (2, 2, {"attn_mask": torch.tensor([[True, False], [True, True]])},
                              "■·\n■■"),
    "−∞ hides": (1, 3, {"attn_mask": torch.tensor([0.0, -math.inf, -1e4])}, "■·■"),
    "finfo.min hides": (
        1, 3, {"attn_mask": torch.tensor([0.0, torch.finfo(torch.float32).min, 3.0])}, "■·■",
    ),
    "finfo.min of a half hides": (
        1, 3, {"attn_mask": torch.tensor([0.0, -65504.0, -3e4], dtype=torch.half)}, "■·■",
    ),
    "a mask and causality both apply": (
        3, 3, {"attn_mask": torch.tensor([False, True, True]), "is_causal": True},
        "···\n·■·\n·■■",
    ),
    "documents": (4, 4, {"attn_mask": Mask(segments=torch.tensor([7, 7, 3, 3]))},
                  "■■··\n■■··\n··■■\n··■■"),
    "documents of queries and keys": (
        2, 3, {"attn_mask": Mask(segments=(torch.tensor([1, 2]), torch.tensor([2, 1, 1])))},
        "·■■\n■··",
    ),
    "no queries": (0, 3, {"is_causal": "bottom_right"}, ""),
    "no keys": (2, 0, {"is_causal": "top_left"}, "\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_each_mask_shows_what_is_drawn(name):
    queries, keys, arguments, picture = DRAWN[name]
    assert seen(queries, keys, **arguments) == [picture]


def test_each_sequence_has_its_own_padding():
    lengths = Mask(lengths=[1, 3])
    assert seen(2, 3, lengths, batch=2) == ["■··\n■··", "■■■\n■■■"]
    left = Mask(keys=torch.tensor([[False, False, True], [True, True, True]]))
    assert seen(2, 3, left, batch=2) == ["··■\n··■", "■■■\n■■■"]
    assert seen(2, 3, lengths & left, batch=2) == ["···\n···", "■■■\n■■■"]


def test_each_sequence_has_its_own_documents():
    ids = torch.tensor([[0, 1], [5, 5]])
    assert seen(2, 2, Mask(segments=ids), batch=2) == ["■·\n·■", "■■\n■■"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_document_ids_may_be_of_any_size_and_combine(dtype):
    """Two sets of documents combine to their intersections, whatever the integers."""
    large = torch.iinfo(dtype).max
    a = Mask(segments=torch.tensor([0, 0, large, large], dtype=dtype))
    b = Mask(segments=torch.tensor([large, 1, 1, 1], dtype=dtype))
    assert seen(4, 4, a & b) == [
        drawing("""
        ■···
        ·■··
        ··■■
        ··■■
    """)
    ]


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ({"window": 3}, {"window": (1, -1)}, "■···\n■■··\n·■■·\n··■■"),
        ({"causal": "top_left"}, {"window": (1, 1)}, "■···\n■■··\n·■■·\n··■■"),
        ({"lengths": [3]}, {"lengths": [2]}, "■■··\n■■··\n■■··\n■■··"),
        ({"causal": "top_left"}, {"segments": torch.tensor([0, 0, 1, 1])},
         "■···\n■■··\n··■·\n··■■"),
    ],
)  # fmt: skip
def test_masks_combine_to_what_both_show(a, b, both):
    assert seen(4, 4, Mask(**a) & Mask(**b)) == [both]
    assert seen(4, 4, Mask(**b) & Mask(**a)) == [both]


def test_dense_masks_combine_in_either_order():
    allowed = torch.tensor([True, False, True])
    bias = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.tensor([[[[1.0, -math.inf, 3.0]]]])
    q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2)
    for mask in (
        Mask(dense=allowed) & bias,
        bias & Mask(dense=allowed),
        Mask(dense=bias) & allowed,
    ):
        assert torch.equal(trace(q, k, attn_mask=mask).masked, expected)
    assert torch.equal((Mask(dense=bias) & bias).dense, 2 * bias)
    assert torch.equal((Mask(dense=allowed) & ~allowed).dense, allowed & ~allowed)


def test_equal_lengths_never_raise_about_alignment():
    """Both alignments are one there, so any two of them combine."""
    both = Mask(causal="bottom_right")
    assert seen(3, 3, both, is_causal=True) == ["■··\n■■·\n■■■"]
    assert seen(3, 3, both, is_causal="top_left", window=2) == ["■··\n■■·\n·■■"]
    with pytest.raises(ValueError, match="one is top_left, the other bottom_right"):
        seen(3, 4, both, is_causal="top_left")


def test_a_mask_prints_its_fields():
    assert repr(Mask()) == "Mask()"
    mask = Mask(causal="bottom_right", lengths=[1, 2]) & Mask(window=512)
    assert repr(mask) == "Mask(causal='bottom_right', window=(511, 0), lengths=(2,))"


def full(visibility):
    """(hidden, bias) of the whole, from blocks of one size or another."""
    queries, keys = visibility.shape[2:]
    return visibility.block(0, queries, 0, keys)


def everything(batch=2, heads=3, queries=5, keys=7):
    """A visibility in which every field says something."""
    problem = checks.problem(
        torch.zeros(batch, heads, queries, 2), torch.zeros(1, 1, keys, 2), None
    )
    bias = torch.randn(batch, heads, queries, keys)
    bias[0, 0, 0, 0] = -math.inf
    mask = Mask(
        lengths=[6, 7],
        keys=torch.rand(batch, keys) < 0.9,
        segments=(torch.arange(queries) // 3, torch.arange(keys) // 4),
        dense=bias,
    )
    return resolve(problem, mask, "bottom_right", 4)


def test_any_block_is_a_cut_of_the_whole():
    visibility = everything()
    hidden, bias = full(visibility)
    hidden = hidden.expand(visibility.shape)
    for q0, q1, k0, k1 in [(0, 2, 0, 3), (2, 5, 3, 7), (4, 5, 0, 7), (0, 5, 6, 7)]:
        part, part_bias = visibility.block(q0, q1, k0, k1)
        part = torch.zeros((), dtype=torch.bool) if part is None else part
        want = hidden[:, :, q0:q1, k0:k1]
        assert torch.equal(part.expand(want.shape), want)
        assert torch.equal(part_bias, bias[:, :, q0:q1, k0:k1])


def test_a_part_is_the_same_for_some_batches_and_heads():
    visibility = everything()
    hidden = full(visibility)[0].expand(visibility.shape)
    part = visibility.part(slice(1, 2), slice(1, 3))
    assert part.shape == (1, 2, 5, 7)
    assert torch.equal(full(part)[0].expand(part.shape), hidden[1:2, 1:3])


def test_a_span_holds_every_key_that_causality_and_window_leave():
    for arguments in ({"is_causal": "top_left"}, {"is_causal": "bottom_right", "window": 2},
                      {"window": (1, 2)}, {}):  # fmt: skip
        q, k = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 7, 2)
        visibility = resolve(checks.problem(q, k, None), **arguments)
        visible = trace(q, k, **arguments).visible[0, 0]
        for q0 in range(5):
            for q1 in range(q0 + 1, 6):
                columns = visible[q0:q1].any(0).nonzero()[:, 0].tolist()
                k0, k1 = visibility.span(q0, q1)
                assert (k0, k1) == (columns[0], columns[-1] + 1)


def test_one_key_a_query_is_a_cut_of_the_whole():
    visibility = everything()
    hidden, bias = full(visibility)
    index = torch.randint(0, 7, (2, 5))
    visible, added = visibility.at(index)
    pick = index[:, None, :, None].expand(2, 3, 5, 1)
    assert torch.equal(visible.expand(2, 3, 5), ~hidden.expand(2, 3, 5, 7).gather(3, pick)[..., 0])
    assert torch.equal(added, bias.gather(3, pick)[..., 0])


def first(queries, keys, mask=None, **arguments):
    problem = checks.problem(torch.zeros(2, 1, queries, 2), torch.zeros(2, 1, keys, 2), None)
    return resolve(problem, mask, **arguments).first().expand(2, -1).tolist()


def test_the_first_key_is_the_first_of_the_querys_own_text():
    assert first(3, 3, is_causal=True) == [[0, 0, 0], [0, 0, 0]]
    assert first(3, 3, window=1) == [[0, 0, 0], [0, 0, 0]]
    left = torch.tensor([[False, False, True], [True, True, True]])
    for padded in (Mask(keys=left), left[:, None, None], left[:, None, None].float().log()):
        assert first(3, 3, padded) == [[2, 2, 2], [0, 0, 0]]
    ids = torch.tensor([4, 4, 9, 9], dtype=torch.int8)
    assert first(4, 4, Mask(segments=ids)) == [[0, 0, 2, 2], [0, 0, 2, 2]]
    padded = Mask(segments=ids, keys=torch.tensor([[False, True, True, True], [True] * 4]))
    assert first(4, 4, padded) == [[1, 1, 2, 2], [0, 0, 2, 2]]


def test_a_mask_of_symbols_lies_where_the_query_does():
    """Positions are made on the problem's device, not on the processor's."""
    problem = checks.problem(*(torch.zeros(1, 1, n, 2, device="meta") for n in (5, 7)), None)
    visibility = resolve(problem, is_causal="bottom_right", window=3)
    assert full(visibility)[0].device.type == "meta"
    assert visibility.first().device.type == "meta"


def test_a_symbolic_mask_is_linear_in_length():
    n = 1 << 20
    problem = checks.problem(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1), None)
    mask = Mask(lengths=[n - 1], segments=torch.arange(n) // 100, causal="top_left", window=5)
    visibility = resolve(problem, mask)
    held = [visibility.keep, *visibility.segments]
    assert sum(x.numel() for x in held) == 3 * n
    assert (visibility.allowed, visibility.bias) == (None, None)
    assert Visibility(visibility.shape).block(0, 1, 0, 1) == (None, None)


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (3, 1, 7), (1, 5, 7), (2, 1, 5, 7), (1, 3, 1, 1)]
)  # fmt: skip
@pytest.mark.parametrize("additive", [False, True])
def test_tensor_masks_broadcast_as_in_torch(shape, additive):
    q, k, v = torch.randn(2, 3, 5, 2), torch.randn(2, 3, 7, 2), torch.randn(2, 3, 7, 4)
    mask = torch.randn(shape) if additive else torch.rand(shape) < 0.7
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(attention(q, k, v, mask), torchs)
    torch.testing.assert_close(trace(q, k, v, mask).output, torchs)

"""What a head looks at, from lse alone, is what its weights say."""

import math

import pytest
import torch

from oracle import MASKS, inputs, masks
from scaledot import checks
from scaledot.dispatch import attention, row_stats
from scaledot.heads import HeadStats
from scaledot.kernels import native
from scaledot.masks import Mask, resolve
from scaledot.roles import (
    BROAD,
    BY_CHANCE,
    OFFSETS,
    THRESHOLDS,
    WINDOWS,
    delimiters,
    is_broad,
    positions,
    prefix_matching,
    repeated,
    role_of,
    roles,
    roles_of,
    sums,
    vocabulary,
    weight_at,
    weighted,
)
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


# The full set: what takes passes of its own.

TOKENS = torch.tensor(
    [[3, 5, 3, 3, 7, 5, 3, 9, 7, 7, 5, 3, 9], [1, 2, 1, 4, 1, 2, 1, 4, 4, 4, 2, 6, 1]]
)
DELIMITERS = torch.tensor([5, 2])


def full(q, k, attn_mask=None, is_causal=False, self_attention=True, tokens=TOKENS,
         marks=DELIMITERS, columns=None, kernel="auto", **arguments):  # fmt: skip
    rows = attention(q, k, k, attn_mask, is_causal=is_causal, enable_gqa=True, return_stats=True,
                     kernel=kernel, **arguments)[1]  # fmt: skip
    window = arguments.pop("window", None)
    problem = checks.problem(q, k, None, enable_gqa=True, **arguments)
    seen = resolve(problem, attn_mask, is_causal, window)
    found = roles(problem, seen, rows, self_attention=self_attention, tokens=tokens,
                  delimiters=marks)  # fmt: skip
    with torch.autocast("cpu", enabled=False):
        for name, column in (columns or {}).items():
            column = column[..., None].to(rows.lse.dtype)
            mean = weighted(problem, seen, column, kernel=rows.kernel)[..., 0]
            found[name] = mean.masked_fill(rows.empty, float("nan"))
    return found


def oracle(t, tokens, real, text, columns=None):
    """Every measure and its chance from all n² weights of the definition, key by key."""
    batch, heads, n, _ = t.weights.shape
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    same = tokens[:, :, None] == tokens[:, None]
    before = torch.full((batch, n, n), False)
    for b in range(batch):
        for key in range(1, n):
            if real[b, key - 1] and text[b, key - 1] == text[b, key]:
                before[b, :, key] = tokens[b] == tokens[b, key - 1]
    marked = torch.isin(tokens, DELIMITERS)[:, None].expand(batch, n, n)
    counted = {f"local.{w}": ((i - j).abs() < w).expand(batch, n, n) for w in WINDOWS}
    counted |= {"delimiter": marked, "duplicate": same & (j < i), "induction": before & (j < i)}
    result, nan = {}, float("nan")
    visible = t.rows.visible.double()
    for name, pattern in counted.items():
        those = pattern[:, None] & t.visible
        count = those.sum(-1)
        could = (count > 0) & (count < t.rows.visible)
        result[name] = torch.where(could, (t.weights * those).sum(-1), nan)
        result[f"chance.{name}"] = torch.where(could, count / visible, nan)
    real_weights = t.masked.masked_fill(~t.visible, -math.inf).softmax(-1)
    away = (i - j).abs().double()
    could = t.rows.visible > 1
    result["distance"] = torch.where(could, (real_weights * away).sum(-1), nan)
    result["chance.distance"] = torch.where(could, (t.visible * away).sum(-1) / visible, nan)
    for name, column in (columns or {}).items():
        seen = torch.where(t.rows.visible > 0, 0.0, nan)
        column = column.repeat_interleave(heads // column.shape[1], 1).double()
        result[name] = (t.weights * t.visible * column[:, :, None]).sum(-1) + seen
    return result


def texts(arguments, n):
    """(which keys are real, which text they are of), as the arguments of a mask say."""
    real, text = torch.ones(2, n, dtype=torch.bool), torch.zeros(2, n, dtype=torch.int64)
    mask = arguments.get("attn_mask")
    dense = mask.dense if isinstance(mask, Mask) else mask
    if isinstance(mask, Mask):
        if mask.lengths is not None:
            real = torch.arange(n)[None] < mask.lengths[:, None]
        if mask.keys is not None:
            real = mask.keys
        if mask.segments is not None:
            text = mask.segments[1]
    if isinstance(dense, torch.Tensor) and not (
        isinstance(mask, Mask) and (mask.lengths is not None or mask.keys is not None)
    ):
        shown = dense if dense.dtype == torch.bool else dense > torch.finfo(dense.dtype).min / 2
        real = torch.broadcast_to(shown, (2, 6, n, n)).any(2).any(1)
    return real, text.expand(2, n)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", ["plain", "soft-cap and sinks"])
def test_every_measure_is_what_all_weights_say(mask, extra):
    """float64, on n² weights of the definition, under every kind of mask."""
    n = 13
    arguments = masks(2, 6, n, n)[mask]
    if extra != "plain":
        arguments |= {"softcap": 1.5, "sinks": torch.randn(6)}
    q, k, _ = inputs(queries=n, dtype=torch.float64)
    columns = {"own": torch.randn(2, 3, n).double(), "shared": torch.randn(2, 1, n).double()}
    found = full(q, k, columns=columns, **arguments)
    t = trace(q, k, enable_gqa=True, **arguments)
    want = oracle(t, TOKENS, *texts(arguments, n), columns)
    assert set(found) == set(want)
    for name, x in want.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=1e-12, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
    measured = [name for name, x in want.items() if not x.isnan().all()]
    # local.16 and local.64 hold all of 13 keys.
    assert "local.16" not in measured
    if mask != "window of one":
        assert {"distance", "delimiter"} <= {*measured}
    if mask not in NARROW:
        assert "local.4" in measured


NARROW = (
    "window", "window of one", "window to both sides", "documents", "causal documents",
    "all at once",
)  # fmt: skip
"""Masks that leave no key four places away."""


@pytest.mark.parametrize("kernel", ["native", "tiled"])
@pytest.mark.parametrize("kind", ["random", "shifted", "correlated"])
@pytest.mark.parametrize("mask", ["causal", "full", "documents", "left padding", "window"])
def test_float32_is_as_near_as_a_logit_is(kernel, kind, mask):
    """A mass is e^(lse − lse): relative 1e-6 and the rounding of two logarithms of that size."""
    if kernel == "native" and native.available():
        pytest.skip(native.available())
    n, d = 131, 16
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, h, n, d, generator=g, dtype=torch.float64) for h in (6, 3))
    if kind == "shifted":
        q, k = q + 3, k + 3
    elif kind == "correlated":
        k = k + 0.5 * q[:, ::2]
        k[:, :, 1:] += 0.7 * q[:, ::2, :-1]
    q, k = q.float(), k.float()
    tokens = torch.randint(0, 20, (2, n), generator=g)
    documents = (torch.arange(n) // 37).expand(2, n)
    real = torch.arange(n)[None] >= torch.tensor([[0], [29]])
    arguments = {
        "causal": {"is_causal": True},
        "full": {},
        "documents": {"attn_mask": Mask(segments=documents), "is_causal": True},
        "left padding": {"attn_mask": Mask(keys=real), "is_causal": True},
        "window": {"window": 40},
    }[mask]
    found = full(q, k, tokens=tokens, kernel=kernel, **arguments)
    t = trace(q.double(), k.double(), enable_gqa=True, **arguments)
    text = documents if mask == "documents" else torch.zeros(2, n)
    real = real if mask == "left padding" else torch.ones(2, n, dtype=torch.bool)
    want = oracle(t, tokens, real, text)
    size = float(t.rows.lse[t.rows.visible > 0].abs().max())
    size = max(size, 0.25 * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()))
    error = 1e-6 + 2 * size * torch.finfo(torch.float32).eps
    for name, x in want.items():
        scale = n if name == "distance" else 1
        torch.testing.assert_close(
            found[name].double(), x, rtol=error, atol=error * scale / 2, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
        assert not x.isnan().all() or (
            name.endswith("local.64") and mask in ("window", "documents")
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_it_is(dtype):
    """Also under autocast, whose products would round."""
    q, k, _ = inputs(queries=13, dtype=dtype)
    columns = {"spread": torch.rand(2, 3, 13)}
    with torch.autocast("cpu", dtype=dtype):
        found = full(q, k, is_causal=True, columns=columns)
    for name, x in full(q.float(), k.float(), is_causal=True, columns=columns).items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_documents_need_not_be_neighbours():
    """Texts in turn, one batch with documents of its own, one key in each text before the other."""
    n = 13
    ids = torch.stack(
        [torch.arange(n) % 2, torch.tensor([7, 7, 7, -2, -2, 7, 7, 9, 9, 9, 9, -2, 7])]
    )
    q, k, _ = inputs(queries=n, dtype=torch.float64)
    for causal in (True, False):
        arguments = {"attn_mask": Mask(segments=ids), "is_causal": causal}
        found = full(q, k, **arguments)
        t = trace(q, k, enable_gqa=True, **arguments)
        for name, x in oracle(t, TOKENS, torch.ones(2, n, dtype=torch.bool), ids).items():
            torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_the_sorted_way_and_the_pairs_agree_on_any_tokens():
    """From all different to all the same, and a window that hides nothing is none."""
    q, k, _ = inputs(queries=13, dtype=torch.float64)
    for tokens in (torch.zeros(1, 13).long(), torch.arange(13)[None], TOKENS):
        tokens = tokens.expand(2, -1)
        sorted_way = full(q, k, is_causal=True, tokens=tokens)
        pairs = full(q, k, torch.ones(13, 13, dtype=torch.bool).tril(), tokens=tokens)
        wide = full(q, k, window=13, tokens=tokens)
        for name in ("duplicate", "induction", "chance.duplicate", "chance.induction"):
            for other in (pairs, wide):
                torch.testing.assert_close(
                    sorted_way[name], other[name], rtol=1e-9, atol=1e-12, equal_nan=True
                )
    assert sorted_way["duplicate"].isfinite().any()


@pytest.mark.parametrize("start", [1, 5, 12])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_the_last_queries_of_a_text_are_those_of_the_whole(start, window, padded):
    """A cache holds the keys of before, whose tokens are known: rows, bit by bit of meaning."""
    q, k, _ = inputs(queries=13, dtype=torch.float64)
    mask = Mask(keys=torch.arange(13)[None] >= torch.tensor([[2], [0]])) if padded else None
    for tokens in (TOKENS, torch.zeros_like(TOKENS), torch.arange(13).expand(2, -1) // 2):
        arguments = {"window": window, "tokens": tokens}
        whole = full(q, k, mask, is_causal=True, **arguments)
        found = full(q[:, :, start:], k, mask, is_causal="bottom_right", **arguments)
        assert set(found) == set(whole)
        for name, x in found.items():
            torch.testing.assert_close(
                x, whole[name][:, :, start:], rtol=1e-9, atol=1e-12, equal_nan=True
            )
        if tokens is TOKENS:
            assert whole["duplicate"].isfinite().any()
            assert whole["induction"].isfinite().any()


def test_the_first_of_its_kind_has_no_row():
    """No earlier key of the token: NaN, not a 0 that would pull the mean."""
    q, k, _ = inputs(queries=13)
    found = full(q, k, is_causal=True, tokens=torch.arange(13)[None].expand(2, -1))
    for name in ("duplicate", "induction", "delimiter"):
        rows = slice(None) if name != "delimiter" else slice(0, 2)
        assert found[name][..., rows].isnan().all(), name


def test_cross_attention_and_a_cache_have_no_tokens():
    q, k, _ = inputs()
    columns = {"spread": torch.rand(2, 1, 13)}
    assert set(full(q, k, self_attention=False, columns=columns)) == {"spread"}
    assert full(q, k, self_attention=False) == {}
    q, k, _ = inputs(queries=2, dtype=torch.float64)
    found = full(
        q, k, is_causal="bottom_right", tokens=TOKENS[:, 11:],
        columns={"spread": torch.rand(2, 3, 13)},
    )  # fmt: skip
    away = ("local.4", "local.16", "local.64", "distance")
    assert set(found) == {"spread", *away, *(f"chance.{name}" for name in away)}
    t = trace(q, k, enable_gqa=True, is_causal="bottom_right")
    for i in range(2):
        places = (torch.arange(13) - 11 - i).abs().double()
        torch.testing.assert_close(found["distance"][:, :, i], t.weights[:, :, i] @ places)
        torch.testing.assert_close(
            found["local.4"][:, :, i], (t.weights[:, :, i] * (places < 4)).sum(-1)
        )


def test_one_token_and_none():
    q, k, _ = inputs(queries=1, keys=1)
    for name, x in full(q, k, is_causal=True, tokens=TOKENS[:, :1]).items():
        assert x.shape == (2, 6, 1)
        assert x.isnan().all(), name
    q, k, _ = inputs(queries=0, keys=0)
    assert full(q, k, tokens=TOKENS[:, :0]) == {}
    q, k, _ = inputs(queries=0)
    assert full(q, k, tokens=TOKENS) == {}


def test_what_is_no_number_spoils_its_rows_only():
    q, k, _ = inputs(queries=13)
    k[0, 0, 7] = math.nan
    found = full(q, k, is_causal=True)
    clean = full(*inputs(queries=13)[:2], is_causal=True)
    for name in ("local.4", "distance", "duplicate", "induction", "delimiter"):
        assert found[name][0, :2, 7:].isnan().all(), name
        assert torch.equal(found[name].isnan()[:, 2:], clean[name].isnan()[:, 2:]), name
        assert torch.equal(found[name].isnan()[0, :2, :7], clean[name].isnan()[0, :2, :7]), name


@pytest.mark.parametrize("mask", MASKS)
def test_sums_over_visible_keys_are_exact(mask):
    for queries, keys in ((11, 13), (13, 13), (13, 11)):
        arguments = masks(2, 6, queries, keys)[mask]
        if "window" in arguments and "causal" not in str(arguments) and queries != keys:
            continue
        q, k, _ = inputs(queries=queries, keys=keys)
        problem = checks.problem(q, k, None, enable_gqa=True)
        arguments = {"attn_mask": None, "is_causal": False, "window": None} | arguments
        seen = resolve(problem, *(arguments[x] for x in ("attn_mask", "is_causal", "window")))
        columns = torch.randint(-9, 9, (2, keys, 3)).double()
        t = trace(q, k, enable_gqa=True, **arguments)
        want = t.visible.double() @ columns[:, None]
        assert torch.equal(sums(seen, columns).expand_as(want), want)


# What a head is called.


def named(q, k, tokens=None, marks=None, **arguments):
    """The roles of each head of one call."""
    rows = attention(q, k, k, return_stats=True, **arguments)[1]
    problem = checks.problem(q, k, None, scale=arguments.get("scale"))
    seen = resolve(problem, None, arguments.get("is_causal", False))
    extra = positions(problem, seen, rows, self_attention=True)
    extra |= roles(problem, seen, rows, self_attention=True, tokens=tokens, delimiters=marks)
    stats = HeadStats.of(
        rows, scale=problem.scale, d_k=q.shape[3], kv_heads=q.shape[1], extra=extra
    )
    return roles_of(stats)


def test_planted_roles_are_found():
    """Each head's query is the key of what it looks at; nobody is called anything else."""
    n = 96
    tokens = torch.cat([torch.randperm(32) + 10] * 3)[None]
    tokens[0, 5] = 3
    eye = torch.eye(n)
    chosen = torch.zeros(5, n, dtype=torch.long)
    for i in range(n):
        earlier = [j for j in range(i) if tokens[0, j] == tokens[0, i]]
        after = [j + 1 for j in earlier if j + 1 < i]
        marks = [j for j in range(i + 1) if tokens[0, j] == 3]
        chosen[:, i] = torch.tensor([
            max(i - 1, 0), 0, earlier[-1] if earlier else i, after[-1] if after else i,
            marks[-1] if marks else i,
        ])  # fmt: skip
    q = 40 * eye[chosen][None]
    k = eye.expand(1, 5, n, n)
    wanted = ["previous", "first", "duplicate", "induction", "delimiter"]
    found = named(q, k, tokens, torch.tensor([3]), is_causal=True, scale=1.0)
    assert [head[0].name for head in found] == wanted
    assert [len(head) for head in found] == [1] * 5
    assert all(head[0].mass > 0.95 for head in found)
    assert found[0][0].chance == pytest.approx((harmonic(n) - 1) / (n - 1))
    index = torch.arange(n)
    both = torch.stack([index, (index + 1).clamp(max=n - 1)])
    found = named(40 * eye[both][None], eye.expand(1, 2, n, n), tokens, scale=1.0)
    assert [[role.name for role in head] for head in found] == [["current"], ["next"]]
    # Scores that fall by a fifth a place: over many neighbours, on none of them most.
    away = -(index[:, None] - index).abs().float()
    found = named((0.2 * away)[None, None], eye[None, None], tokens, is_causal=True, scale=1.0)
    assert [role.name for role in found[0]] == ["local.16"]


def test_a_sink_hides_what_the_rest_does():
    """Half on the first key, four fifths of the other half on the previous one."""
    found = role_of(
        {"first": 0.5, "previous": 0.4, "local.4": 0.42, "induction": 0.01},
        {"first": 0.02, "previous": 0.02, "local.4": 0.08, "induction": 0.01},
        dict.fromkeys(("first", "previous", "local.4", "induction"), 500),
    )
    assert [role.name for role in found] == ["previous", "first"]
    assert found[0].beside_first == pytest.approx(0.8)
    assert found[0].strength == pytest.approx((0.8 - 0.02 / 0.98) / (1 - 0.02 / 0.98))
    assert found[1].beside_first is None
    assert found[1].strength == pytest.approx(0.48 / 0.98)


@pytest.mark.parametrize("width", [0.0, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_at_chance_are_called_nothing(width, causal):
    """Random heads, from uniform to nearly one-hot, in texts of one token to 200, many times."""
    heads = 0
    for n in (1, 2, 3, 5, 9, 10, 12, 16, 24, 40, 70, 200):
        for seed in range(12 if n < 70 else 2):
            g = torch.Generator().manual_seed(1000 * n + seed)
            q, k = (torch.randn(1, 24, n, 64, generator=g) for _ in range(2))
            tokens = torch.randint(0, 1 + n // 3, (1, n), generator=g)
            found = named(width * q, k, tokens, torch.tensor([0]), is_causal=causal)
            assert not any(found), (n, seed, [head for head in found if head])
            heads += 24
    assert heads > 2000


def test_equal_weights_are_broad_and_nothing_else():
    assert is_broad(1.0)
    assert not is_broad(0.78)
    assert pytest.approx(0.783, abs=5e-4) == BROAD
    tokens = torch.zeros(1, 20, dtype=torch.long)
    zero = torch.zeros(1, 2, 20, 4)
    assert named(zero, zero, tokens, torch.tensor([0]), is_causal=True) == [(), ()]


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_a_role_needs_its_threshold_its_distance_from_chance_and_rows(name):
    limit = THRESHOLDS[name]

    def called(mass, chance, rows):
        return [r.name for r in role_of({name: mass}, {name: chance}, {name: rows})]

    assert called(limit + 0.02, 0.01, 1000) == [name]
    assert called(limit - 0.001, 1e-9, 1000) == []
    assert called(limit + 0.02, 0.2, 1000) == []  # of what chance leaves, less than the threshold
    assert called(0.95, 0.6, 10) == []  # it may happen
    assert called(0.95, 0.6, 100) == [name]
    assert called(0.99, 0.1, 4) == []
    assert called(0.99, 0.1, 6) == [name]
    assert called(1.0, 1.0, 1000) == []
    assert called(0.1, 0.2, 1000) == []
    assert called(1.0, 0.0, 1) == [name]


def test_the_bound_of_chance_is_one():
    """Coins of .2: where .7 heads are a role, they come less often than the bound says."""
    least = 0
    for rows in range(10, 40):
        if role_of({"previous": 0.7}, {"previous": 0.2}, {"previous": rows}):
            tail = sum(math.comb(rows, i) * 0.2**i * 0.8 ** (rows - i)
                       for i in range(math.ceil(0.7 * rows), rows + 1))  # fmt: skip
            assert tail < BY_CHANCE
            least = least or rows
    assert 10 < least < 30


class Pieces:
    """A tokenizer of SentencePiece's and WordPiece's disguises, as far as roles ask."""

    texts = (
        "<s>",
        "\n",
        ".",
        " ,",
        "##!",
        "。",
        "a",
        ".a",
        " ",
        "…?",
        "5",
        "-",
        "[SEP]",
        "猫",
        "b",
    )
    all_special_ids = (0,)

    @property
    def added_tokens_decoder(self):
        return {12: type("Added", (), {"special": True})}

    def get_vocab(self):
        disguised = [x.replace(" ", "▁").replace("\n", "<0x0A>") for x in self.texts]
        return {token: i for i, token in enumerate(disguised)}

    def batch_decode(self, ids):
        return [self.texts[i] for (i,) in ids]


def test_delimiters_are_special_or_marks_alone():
    assert delimiters(Pieces()).tolist() == [0, 1, 2, 3, 4, 5, 9, 12]
    # Of a, .a, space, 5, -, 猫, b the middle half.
    assert vocabulary(Pieces()).tolist() == [7, 8, 10, 11, 13]


def test_repeated_tokens_are_drawn_once_and_said_again():
    ids = torch.arange(100, 180)
    said = repeated(ids, length=20, times=4, seed=3)
    assert said.shape == (1, 80)
    first = said[0, :20]
    assert len(first.unique()) == 20
    assert torch.isin(first, ids).all()
    assert torch.equal(said[0], first.repeat(4))
    assert torch.equal(said, repeated(ids, length=20, times=4, seed=3))
    assert not torch.equal(said, repeated(ids, length=20, times=4, seed=4))
    with pytest.raises(ValueError, match="length is 81: expected 1 … 80"):
        repeated(ids, length=81)
    with pytest.raises(ValueError, match="times is 1"):
        repeated(ids, length=2, times=1)


def test_prefix_matching_is_the_mass_after_earlier_occurrences():
    """A planted induction head scores 1, an even one its chance; the first repetition is no row."""
    n, times = 12, 4
    tokens = repeated(torch.arange(50), length=n, times=times)
    total = n * times
    eye = torch.eye(total)
    target = [i - n + 1 if i >= n else i for i in range(total)]
    q = torch.stack([40 * eye[target], torch.zeros(total, total)])[None]
    rows = attention(q, eye.expand_as(q), eye.expand_as(q), is_causal=True, scale=1.0,
                     return_stats=True)[1]  # fmt: skip
    problem = checks.problem(q, eye.expand_as(q), None, scale=1.0)
    extra = roles(problem, resolve(problem, None, True), rows, self_attention=True, tokens=tokens)
    stats = HeadStats.of(rows, scale=1.0, d_k=total, kv_heads=2, extra=extra)
    assert stats.measures["induction"].count.tolist() == [total - n] * 2
    score, chance = prefix_matching(stats)
    want = sum(i // n / (i + 1) for i in range(n, total)) / (total - n)
    assert score.tolist() == pytest.approx([1.0, want], abs=1e-6)
    assert chance.tolist() == pytest.approx([want] * 2)


def test_more_queries_than_keys_are_measured_locally():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 33, 8).double(), torch.randn(1, 1, 3, 8).double()
    problem = checks.problem(q, k, None)
    seen, rows = resolve(problem, is_causal="top_left"), row_stats(q, k, is_causal="top_left")
    found = roles(problem, seen, rows, self_attention=True)["local.4"][0, 0]
    weights = trace(q, k, torch.zeros(1, 1, 3, 1).double(), is_causal="top_left").weights[0, 0]
    for i in (4, 5):
        near = sum(float(weights[i, j]) for j in range(3) if abs(i - j) < 4)
        assert float(found[i]) == pytest.approx(near)


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 0, 5), (1, 2, 0)])
def test_axes_of_length_0_have_no_roles(shape):
    batch, heads, length = shape
    q = torch.zeros(batch, heads, length, 4)
    problem = checks.problem(q, q, None)
    seen, rows = resolve(problem), row_stats(q, q)
    tokens = torch.zeros(max(batch, 1), length, dtype=torch.int64)
    assert positions(problem, seen, rows, self_attention=True) == {}
    assert roles(problem, seen, rows, self_attention=True, tokens=tokens) == {}

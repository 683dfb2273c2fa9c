"""Rows at another scale are the definition's at that scale; a head's curve is made of them."""

import doctest
import math

import pytest
import torch

from oracle import MASKS, double, inputs, masks
from scaledot import checks, whatif
from scaledot import masks as masks_module
from scaledot.dispatch import row_stats
from scaledot.heads import EDGES, SATURATED, SWEPT, HeadStats, merge
from scaledot.masks import resolve
from scaledot.roles import weighted
from scaledot.stages import trace


def understood(q, k, attn_mask=None, is_causal=False, window=None, **arguments):
    problem = checks.problem(q, k, None, enable_gqa=True, **arguments)
    seen = resolve(problem, attn_mask, is_causal, window)
    rows = row_stats(q, k, attn_mask, is_causal, enable_gqa=True, window=window, **arguments)
    return problem, seen, rows


def summed(problem, rows, extra):
    return HeadStats.of(
        rows, scale=problem.scale, d_k=problem.query.shape[-1], kv_heads=problem.key.shape[1],
        extra=extra,
    )  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", ["plain", "soft-cap and sinks"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_octave_is_the_definition_at_that_scale(mask, extra, dtype):
    arguments = masks(2, 6, 11, 13)[mask]
    if extra != "plain":
        arguments |= {"softcap": 1.5, "sinks": torch.randn(6)}
    q, k, _ = inputs(dtype=dtype)
    problem, seen, rows = understood(q, k, **arguments)
    found = whatif.sweep(problem, seen, rows)
    wide = {name: double(x) for name, x in arguments.items() if name == "sinks"}
    close = (
        {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    )
    if dtype == torch.float32 and "−1e4" in mask:
        close["atol"] = 2e-3  # a logit of −1e4 is rounded to 1e-3
    for e in whatif.exponents(7, problem.scale):
        t = trace(q.double(), k.double(), enable_gqa=True, scale=problem.scale * 2.0**e,
                  **arguments | wide).rows  # fmt: skip
        several = t.visible > 1
        outcomes = t.visible.clamp(min=2).double() + (t.sink_mass is not None)
        want = {
            "entropy": t.entropy,
            "normalised_entropy": (t.entropy / outcomes.log()).where(several, math.nan),
            "top_margin": t.top_margin.where(several, math.nan),
        }
        for name, x in want.items():
            actual = found[f"whatif.{name}.{e}"].double()
            torch.testing.assert_close(actual, x, equal_nan=True, **close)
    assert found["whatif.entropy.0"] is rows.entropy


def test_non_finite_rows_stay_so_and_nothing_is_nothing():
    q, k, _ = inputs(queries=13)
    q[0, 0, 4] = math.nan
    problem, seen, rows = understood(q, k, is_causal=True)
    found = whatif.sweep(problem, seen, rows)
    for e in range(-3, 4):
        assert found[f"whatif.entropy.{e}"].isnan().sum() == 1
        assert found[f"whatif.top_margin.{e}"].isnan().sum() == 1 + 12  # and rows of one key
    problem, seen, rows = understood(q[:, :, :0], k)
    assert whatif.sweep(problem, seen, rows)["whatif.entropy.1"].shape == (2, 6, 0)
    problem, seen, rows = understood(q, k[:, :, :0])
    assert whatif.sweep(problem, seen, rows)["whatif.entropy.1"].isnan().all()


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_columns_are_weighed_in_the_same_passes_and_change_nothing(kernel, softcap):
    q, k, _ = inputs(queries=40, keys=40)
    arguments = {"is_causal": True, "softcap": softcap, "enable_gqa": True, "kernel": kernel}
    problem = checks.problem(q, k, None, enable_gqa=True, softcap=softcap)
    seen, rows = resolve(problem, is_causal=True), row_stats(q, k, **arguments)
    columns = torch.randn(*k.shape[:3], 3, dtype=rows.lse.dtype)
    found, means = whatif.sweep_and_weigh(problem, seen, rows, columns)
    alone = whatif.sweep(problem, seen, rows)
    assert list(found) == list(alone)
    for name, x in alone.items():
        torch.testing.assert_close(found[name], x, rtol=1e-5, atol=2e-5, equal_nan=True)
    expected = weighted(problem, seen, columns, kernel=rows.kernel)
    torch.testing.assert_close(means, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
def test_autocast_does_not_round_what_is_measured(kernel):
    q, k, _ = inputs(dtype=torch.bfloat16)
    problem = checks.problem(q, k, None, enable_gqa=True)
    seen, rows = resolve(problem), row_stats(q, k, enable_gqa=True, kernel=kernel)
    plain = whatif.sweep(problem, seen, rows)
    with torch.autocast("cpu", torch.bfloat16):
        again = whatif.sweep(problem, seen, rows)
    for name, x in plain.items():
        torch.testing.assert_close(again[name], x, rtol=0, atol=0)


def test_the_usual_scales_lie_among_the_octaves():
    for d_k in (1, 16, 64, 80, 128, 192, 256):
        for scale in (d_k**-0.5, 1.0, 1 / d_k, -(d_k**-0.5), 1 / d_k / 12):
            octaves = whatif.exponents(d_k, scale)
            assert set(octaves) <= set(SWEPT)
            assert octaves[0] <= -3
            assert octaves[-1] >= 3
            for factor in (1 / abs(scale), d_k**-0.5 / abs(scale), 1 / d_k / abs(scale)):
                inside = octaves[0] <= math.log2(factor) <= octaves[-1]
                assert inside or abs(math.log2(factor)) > 8
    assert list(whatif.exponents(64, 0.125)) == list(range(-3, 4))
    assert list(whatif.exponents(256, 1 / 16)) == list(range(-4, 5))
    assert whatif.exponents(64, 0.0) == range(-3, 4)
    for e in SWEPT:
        assert torch.isclose(
            EDGES[f"whatif.top_margin.{e}"],
            torch.tensor(list(SATURATED.values()), dtype=torch.float64)[:, None],
        ).any(1).all()  # fmt: skip


@pytest.mark.parametrize("spread", [2.0, 4.0, 8.0])
def test_a_heads_curve_is_that_of_its_rows(spread):
    q, k, _ = inputs(batch=2, queries=64, keys=64, d_k=16, dtype=torch.float64)
    problem, seen, rows = understood(q * spread, k, is_causal=True)
    table = whatif.table(summed(problem, rows, whatif.sweep(problem, seen, rows)), 4)
    assert table.marks == pytest.approx({"none": 4.0, "1/√d_k": 1.0, "1/d_k": 0.25})
    assert table.factors == whatif.FACTORS
    assert table.scales == pytest.approx([0.25 * f for f in whatif.FACTORS])

    def at(factor):
        found = row_stats(q * spread, k, is_causal=True, enable_gqa=True, factors=(factor,))
        return found.map(lambda x: x[0, :, 4])

    for i, factor in enumerate(table.factors):
        there = at(factor)
        several = there.visible > 1
        margin = there.top_margin[several]
        h = there.entropy[several]
        assert table.entropy[i] == pytest.approx(float(there.entropy.mean()), rel=1e-9)
        assert table.keys[i] == pytest.approx(math.exp(table.entropy[i]))
        normalised = (h / there.visible[several].double().log()).mean()
        assert table.normalised_entropy[i] == pytest.approx(float(normalised), rel=1e-9)
        saturated = (margin >= SATURATED["bfloat16"]).double().mean()
        assert table.saturated[i] == pytest.approx(float(saturated))
        assert abs(table.margin[i] - float(margin.median())) <= table.margin_error[i] + 1e-9
        assert table.headroom[i] == pytest.approx(SATURATED["bfloat16"] - table.margin[i])
    # The factor found is where the median weight really is .9, to a tenth of an octave.
    early, late = (at(table.largest * 2**o) for o in (-0.1, 0.1))
    p = [float(x.top_margin[x.visible > 1].median().sigmoid()) for x in (early, late)]
    assert p[0] < 0.9 < p[1]
    assert 0 < table.largest_error < 0.1
    early, late = (at(table.largest_by_entropy * 2**o) for o in (-0.1, 0.1))
    h = [float((x.entropy / x.visible.double().log())[x.visible > 1].mean()) for x in (early, late)]
    assert h[0] > 0.1 > h[1]


def test_flat_and_sharp_heads_have_no_crossing():
    q, k, _ = inputs(queries=13)
    problem, seen, rows = understood(q * 1e-4, k)
    flat = whatif.table(summed(problem, rows, whatif.sweep(problem, seen, rows)), 0)
    assert flat.largest == flat.largest_by_entropy == math.inf
    assert math.isnan(flat.largest_error)
    problem, seen, rows = understood(q * 1e4, k)
    sharp = whatif.table(summed(problem, rows, whatif.sweep(problem, seen, rows)), 0)
    assert sharp.largest == sharp.largest_by_entropy == 0
    problem, seen, rows = understood(q[:, :, :0], k)
    none = whatif.table(summed(problem, rows, whatif.sweep(problem, seen, rows)), 0)
    assert math.isnan(none.largest)
    assert all(map(math.isnan, none.entropy))


def test_curves_merge_over_texts():
    q, k, _ = inputs(queries=13, dtype=torch.float64)
    problem, seen, rows = understood(q, k, is_causal=True)
    whole = summed(problem, rows, whatif.sweep(problem, seen, rows))
    parts = []
    for b in range(2):
        problem, seen, rows = understood(q[b : b + 1], k[b : b + 1], is_causal=True)
        parts.append(summed(problem, rows, whatif.sweep(problem, seen, rows)))
    one, other = whatif.table(whole, 2), whatif.table(merge(*parts), 2)
    assert one.margin == other.margin
    assert one.entropy == pytest.approx(other.entropy, rel=1e-12)
    assert one.largest == other.largest
    twice = understood(q, k, is_causal=True, scale=0.5)
    twice = summed(twice[0], twice[2], whatif.sweep(*twice))
    several = whatif.table(merge(whole, twice), 2)
    assert several.marks == {}
    assert all(map(math.isnan, several.scales))


def test_errors_and_examples():
    q, k, _ = inputs()
    problem, _, rows = understood(q, k)
    bare = summed(problem, rows, {})
    with pytest.raises(ValueError, match="hold no sweep of the scale"):
        whatif.table(bare, 0)
    with pytest.raises(IndexError, match="head 6 of 6 does not exist"):
        whatif.table(bare, 6)
    names = {"torch": torch, "checks": checks, "masks": masks_module, "row_stats": row_stats}
    assert doctest.testmod(whatif, extraglobs=names) == (0, 4)

"""Findings: each says what, where, how much; none accuses a head of being itself."""

import math
import re
from dataclasses import replace

import pytest

from scaledot.diagnose import Head, Layer, findings
from scaledot.scales import Configured

CHANCE = {"first": 0.1, "previous": 0.1, "current": 0.1, "next": math.nan}
ROWS = {"rows": 53, "empty": 0, "nonfinite": 0, "padding": 0, "single": 1}
PLAIN = Head(
    layer=0, head=0, kv_head=0, scale=0.125, before=64.0, after=1.0, within=1.0, row_shift=0.0,
    keys=9.0, entropy=2.2, normalised_entropy=0.9, saturated=0.0, gradient=0.9, largest=3.0,
    margin_median=-1.0, margin_max=2.0, bound=120.0, first=0.1, previous=0.1, current=0.1,
    next=math.nan, chance=CHANCE, rows=ROWS,
)  # fmt: skip
GIVEN = Configured(0.125, "head size 64", explicit=False)
LAYER = Layer(0, "h.0.attn", "self", True, 64, 4, 4, 0.125, None, False, None, GIVEN)


def heads(*changes):
    """Four heads a layer, the first of them changed one by one."""
    found = [replace(PLAIN, layer=i // 4, head=i % 4) for i in range(8)]
    return [replace(h, **change) for h, change in zip(found, [*changes, *[{}] * 8], strict=False)]


def layers(*scales, **fields):
    return [replace(LAYER, index=i, path=f"h.{i}", scale=s, **fields) for i, s in enumerate(scales)]


def found(some, where=None, d_model=256):
    result, clear = findings(some, where or layers(0.125, 0.125), d_model)
    return {f.id: f for f in result}, dict(clear)


def test_by_theory_nothing_is_found_and_everything_checked():
    result, clear = found(heads())
    assert result == {}
    assert set(clear) == {
        "scale", "non-finite rows", "empty rows", "score variance", "saturated rows",
        "first-token sink", "near-uniform head", "fp16 range",
    }  # fmt: skip
    assert clear["fp16 range"] == "raw scores at most 120 (bound ‖q‖·‖k‖) of 65,504"


def test_wide_scores_are_a_look_and_never_a_fault():
    result, _ = found(heads({"within": 130.0, "after": 140.0}, {"within": 3.0}))
    f = result["variance"]
    assert f.kind == "look"
    assert f.title == "Scores are wider than theory in 2 of 8 heads"
    assert f.where == "within-row variance above 2; ½ to 2 in 6 heads"
    assert "130 (0.0)" in f.seen
    assert f.heads == ((0, 0), (0, 1))
    assert f.next == "{trace} --layer 0 --head 0"


def test_narrow_scores_are_named_as_narrow():
    f = found(heads(*[{"within": 0.25}] * 8))[0]["variance"]
    assert f.title == "Scores are narrower than theory in 8 of 8 heads"
    assert f.where == "within-row variance below ½, layers 0–1"


def test_where_nothing_is_unit_the_other_side_is_named_with_its_bound():
    some = heads({"within": 0.25}, *[{"within": 9.0}] * 7)
    assert found(some)[0]["variance"].where == "within-row variance above 2; below ½ in 0.0"


def test_a_variance_of_130_is_no_reason_to_doubt_the_scale():
    result, clear = found(heads({"within": 130.0}))
    assert "scale" not in result
    assert clear["scale"] == "as configured in 2 of 2 layers"


@pytest.mark.parametrize(
    ("scales", "fields", "said"),
    [
        ((0.125, 0.125, 256**-0.5), {}, "1/√d_model"),
        ((0.125, 0.125, 1.0), {}, "none"),
        ((0.0625, 0.0625, 0.0625), {"configured": Configured(0.125, "field", True)}, "narrower"),
    ],
)
def test_a_factor_unlike_the_configuration_is_wrong(scales, fields, said):
    result, _ = found(heads(), layers(*scales, **fields))
    f = result["scale"]
    assert f.kind == "wrong"
    assert said in f.seen + f.means


def test_a_family_that_applies_no_factor_is_not_accused():
    none = Configured(1.0, "t5 applies none", explicit=False)
    assert "scale" not in found(heads(), layers(1.0, 1.0, configured=none))[0]
    # A whole model at 1, where the configuration only implies 1/√d_k: it may scale q beforehand.
    assert "scale" not in found(heads(), layers(1.0, 1.0))[0]
    assert "scale" not in found(heads(), layers(0.3, 0.3, configured=None))[0]


def test_saturation_is_a_description():
    f = found(heads({"saturated": 0.47, "margin_median": 4.83, "margin_max": 12.6},
                    {"saturated": 0.07}))[0]["saturation"]  # fmt: skip
    assert f.kind == "note"
    assert f.title == "Head 0.0 saturates 47 % of its rows"
    assert "a description, not a fault" in f.means
    assert "4.83 nats at the median (0.0), 12.6 at most" in f.seen


def test_below_a_quarter_saturation_is_only_reported():
    result, clear = found(heads({"saturated": 0.07}))
    assert "saturation" not in result
    assert clear["saturated rows"] == "at most 7 % (0.0)"


def test_sinks_are_counted_with_the_chance_level():
    f = found(heads({"first": 0.99}, {"first": 0.4}))[0]["sink"]
    assert f.title == "The first token holds more than .3 of the weight in 2 of 8 heads"
    assert "chance" not in f.title
    assert "all keys alike would give .10" in f.seen
    assert f.next == "{audit} --show first"


def test_in_a_text_of_three_tokens_a_sink_is_not_claimed():
    some = [replace(h, chance=CHANCE | {"first": 0.42}, first=0.5) for h in heads()]
    assert "sink" not in found(some)[0]


def test_near_uniform_heads_are_named():
    f = found(heads({"within": 0.004}))[0]["uniform"]
    assert f.title == "1 of 8 heads holds nearly equal weights"
    assert f.where == "0.0"


def test_non_finite_rows_come_first():
    bad = {"rows": ROWS | {"nonfinite": 7}, "within": 9.0}
    result, _ = findings(heads(bad), layers(0.125, 0.125), 256)
    assert [f.id for f in result] == ["nonfinite", "variance"]
    assert result[0].kind == "wrong"
    assert result[0].seen.startswith("7 of 53 rows")


def test_empty_rows_are_counted():
    f = found(heads({"rows": ROWS | {"empty": 5}}))[0]["empty"]
    assert f.title == "1 of 8 heads holds queries that see no key"
    assert f.seen.startswith("5 of 53 rows")


def test_the_float16_bound_says_that_it_is_one():
    f = found(heads({"bound": 80000.0, "largest": 90.0}))[0]["range"]
    assert f.kind == "look"
    assert f.title == "Raw scores may exceed float16's 65,504 in 1 of 8 heads"
    assert "upper bound" in f.means


def test_heads_without_numbers_are_passed_over():
    names = "before after within saturated gradient bound first margin_median margin_max"
    nothing = dict.fromkeys([*names.split(), "keys", "entropy", "largest"], math.nan)
    result, clear = found(heads(*[nothing] * 8))
    assert result == {}
    assert "score variance" not in clear


def test_no_finding_uses_a_word_of_judgement():
    everything = {
        "within": 200.0, "saturated": 0.9, "first": 0.99, "bound": 1e6,
        "rows": ROWS | {"empty": 1, "nonfinite": 1},
    }  # fmt: skip
    result, _ = findings(heads(everything, {"within": 0.001}), layers(1.0, 0.125, 0.125), 256)
    assert len(result) == 8
    banned = r"\b(healthy|dead|broken|dangerous|should|unscaled)\b|!"
    for f in result:
        assert not re.search(banned, " ".join((f.title, f.where, f.seen, f.means)), re.I), f
        assert f.source
        assert f.next.startswith(("{audit}", "{trace}"))
        for part in (f.title, f.seen, f.means):
            assert part[0].isupper() or part[0] in "×‖0123456789"

"""Findings: each says what, where, how much; none accuses a head of being itself."""

import math
import re
from dataclasses import replace

import pytest

from scaledot.diagnose import findings
from scaledot.findings import Head, Layer
from scaledot.profiles import Passed, Precision, Profile, Roles, Room, Width
from scaledot.roles import Role
from scaledot.scales import Configured
from scaledot.whatif import WhatIf

CHANCE = {"first": 0.1, "previous": 0.1, "current": 0.1, "next": math.nan}
ROWS = {"rows": 53, "empty": 0, "nonfinite": 0, "padding": 0, "single": 1}
WIDTH = Width(
    d_k=64, within=1.0, interaction=0.9, key_bias=0.1, row_shift=0.0, scale=1.0, norms=1.0,
    alignment=1.0, ratio=1.0, unit_scale=0.125, effective_d_k=64.0, query_norm=8.0, key_spread=8.0,
    sentence="scores have unit width: norms ×1, alignment ×1", relative=0.4, excess=0.1,
    verdict="unit",
)  # fmt: skip
SWEPT = WhatIf(
    0, (0.5, 1.0, 2.0), (0.0625, 0.125, 0.25), (2.3, 2.2, 1.5), (10.0, 9.0, 4.5), (0.95, 0.9, 0.6),
    (0.0, 0.0, 0.1), (-2.0, -1.0, 0.5), (0.01, 0.01, 0.01), (8.2, 7.2, 5.7), {"none": 8.0},
    math.inf, math.nan, math.inf,
)  # fmt: skip
LOOKS = Roles((), (), True, 9.0, 9.5)
PASSED = Passed(0.9, 1.0, 0.8, math.nan, math.nan, math.nan, math.nan)
STORED = Precision((Room("bfloat16", 6.24, 7.2, 4.0, 0.0),), 24.0, 120.0, 0.004, 0.003)
PROFILE = Profile(WIDTH, SWEPT, LOOKS, PASSED, STORED)
PLAIN = Head(
    layer=0, head=0, kv_head=0, scale=0.125, before=64.0, after=1.0, within=1.0, row_shift=0.0,
    keys=9.0, entropy=2.2, normalised_entropy=0.9, saturated=0.0, gradient=0.9, largest=3.0,
    margin_median=-1.0, margin_max=2.0, bound=120.0, first=0.1, previous=0.1, current=0.1,
    next=math.nan, chance=CHANCE, rows=ROWS,
    profile=PROFILE,
)  # fmt: skip
GIVEN = Configured(0.125, "head size 64", explicit=False)
LAYER = Layer(0, "h.0.attn", "self", True, 64, 4, 4, 0.125, None, False, None, GIVEN)


def heads(*changes):
    """Four heads a layer, the first of them changed one by one."""
    found = [replace(PLAIN, layer=i // 4, head=i % 4) for i in range(8)]
    return [replace(h, **change) for h, change in zip(found, [*changes, *[{}] * 8], strict=False)]


def changed(part, **fields):
    """The change that gives a head another part of its profile."""
    return {"profile": replace(PROFILE, **{part: replace(getattr(PROFILE, part), **fields)})}


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
        "first-token sink", "near-uniform head", "fp16 range", "entropy for its width",
        "room for scale", "roles", "values attended", "bfloat16 scores",
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
    assert found(heads(), layers(1.0, 1.0))[0]["scale"].kind == "note"
    assert found(heads(), layers(0.3, 0.3, configured=None))[0]["scale"].kind == "note"


def test_without_a_configuration_the_usual_factor_is_only_reported():
    result, clear = found(heads(), layers(0.125, 0.125, configured=None))
    assert "scale" not in result
    assert clear["scale"] == "1/√d_k in 2 of 2 layers; no configuration"


def test_a_prescaled_query_is_recognised_by_name():
    opt = Configured(1.0, "opt scales q beforehand", explicit=True, carried=0.125)
    assert found(heads(), layers(1.0, 1.0, configured=opt))[1]["scale"] == (
        "as configured in 2 of 2 layers; opt scales q beforehand"
    )


def test_unlike_layers_are_shown_first_and_last():
    f = found(heads(), layers(1.0, 0.125, 1 / 64, configured=replace(GIVEN, explicit=True)))[0][
        "scale"
    ]
    assert f.title == "A scale other than the configuration's is applied in layers 0, 2"
    assert f.seen == (
        "Layer 0: × 1; config gives 0.125 = 1/√64 (head size 64). "
        "Layer 2: × 0.0156 = 1/64; config gives 0.125 = 1/√64."
    )
    assert f.means == (
        "1 is none: no factor is applied. 0.0156 is the configured factor twice, or 1/d_k, d_k in "
        "place of √d_k. Scores are 8.00 times wider. Scores are 8.00 times narrower."
    )


def test_a_soft_cap_unlike_the_configuration_is_wrong():
    capped = replace(GIVEN, explicit=True, softcap=50.0)
    f = found(heads({"largest": 61.0}), layers(0.125, 0.125, configured=capped))[0]["softcap"]
    assert (f.kind, f.where) == ("wrong", "layers 0–1")
    assert f.title == "The configuration's soft-cap is missing in layers 0–1"
    assert f.seen == (
        "No cap; config gives 50 (attn_logit_softcapping). The largest scaled score is 61.0."
    )
    clear = found(heads(), layers(0.125, 0.125, configured=capped, softcap=50.0))[1]
    assert clear["soft-cap"] == "50, as configured in 2 of 2 layers"


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
    one, other = (
        {"first": mass} | changed("roles", called=(Role("first", mass, 0.1, mass),))
        for mass in (0.99, 0.4)
    )
    f = found(heads(one, other))[0]["sink"]
    assert f.title == "The first token holds more than .3 of the weight in 2 of 8 heads"
    assert "chance" not in f.title
    assert "all keys alike would give .10" in f.seen
    assert f.next == "{audit} --show first"


def test_in_a_text_of_three_tokens_a_sink_is_not_claimed():
    some = [replace(h, chance=CHANCE | {"first": 0.42}, first=0.5) for h in heads()]
    result, clear = found(some)
    assert "sink" not in result
    assert clear["first-token sink"] == "none: .50 at most, chance .42"


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
    } | changed("roles", called=(Role("first", 0.99, 0.1, 0.99),))  # fmt: skip
    result, _ = findings(heads(everything, {"within": 0.001}), layers(1.0, 0.125, 0.125), 256)
    assert len(result) == 8
    banned = r"\b(healthy|dead|broken|dangerous|should|unscaled)\b|!"
    for f in result:
        assert not re.search(banned, " ".join((f.title, f.where, f.seen, f.means)), re.I), f
        assert f.source
        assert f.next.startswith(("{audit}", "{trace}"))
        for part in (f.title, f.seen, f.means):
            assert part[0].isupper() or part[0] in "×‖0123456789"


# What a profile adds


def test_structure_is_named_apart_from_scale():
    sharp = changed("width", excess=-1.2, verdict="condensed", relative=1.3)
    f = found(heads(sharp, changed("width", excess=1.1)))[0]["structure"]
    assert f.kind == "note"
    assert f.title == "2 of 8 heads are sharper or flatter than width explains"
    assert "−1.20 nats (0.0) to +1.10 (0.1), median +0.10" in f.seen
    assert "1 head of these would condense on few keys by width alone" in f.seen
    assert f.heads == ((0, 0), (0, 1))
    assert f.next == "{audit} --head 0.0"


def test_a_nat_beyond_width_is_no_structure():
    result, clear = found(heads(changed("width", excess=-1.0)))
    assert "structure" not in result
    assert clear["entropy for its width"] == "within 1.00 nats of Gaussian scores as wide"


def test_heads_past_the_sharp_scale_are_named_and_only_for_these_q_and_k():
    f = found(heads(changed("whatif", largest=0.4), changed("whatif", largest=2.0)))[0]["sharp"]
    assert f.title == "Half the rows give one key .9 or more in 1 of 8 heads"
    assert f.seen.startswith("0.0 already does with its scale ÷2.50; the median head ")
    assert "fixed q and k only" in f.means
    _, clear = found(heads(changed("whatif", largest=2.0)))
    assert clear["room for scale"].startswith("×2.00 (0.0) or more")


def test_roles_are_named_with_their_chance_and_the_sink_is_left_to_its_finding():
    previous = Role("previous", 0.8, 0.05, 0.79)
    induction = Role("induction", 0.6, 0.02, 0.59)
    sink = Role("first", 0.9, 0.1, 0.89)
    some = heads(
        changed("roles", called=(previous,)), changed("roles", called=(induction,)),
        changed("roles", called=(sink,)),
    )  # fmt: skip
    f = found(some)[0]["roles"]
    assert f.title == "2 of 8 heads look mostly at one kind of token"
    assert f.where == "previous token: 0.0; after the same token: 0.1"
    assert "previous token .80, chance .05 (0.0)" in f.seen
    assert f.heads == ((0, 0), (0, 1))


def test_heads_that_match_prefixes_are_named_apart_from_what_they_do_on_the_text():
    some = heads()
    tried = [replace(h, prefix_matching=(0.05, 0.02)) for h in some]
    result, clear = found(tried)
    assert "induction" not in result
    assert clear["prefix matching"] == "none: .05 at most (0.0), chance .02"
    tried[5] = replace(tried[5], prefix_matching=(0.93, 0.02))
    f = found(tried)[0]["induction"]
    assert f.title == "1 of 8 heads finds what followed the same token before"
    assert f.where == "1.1 .93"
    assert "chance .02" in f.seen
    assert "prefix matching" not in found(some)[1]


def test_scores_in_bfloat16_name_a_gain_only_where_there_is_one():
    dear = changed("precision", bf16_cost=0.12, bf16_cost_centred=0.03)
    assert "3 % if the keys' mean" in found(heads(dear))[0]["storage"].seen
    worse = changed("precision", bf16_cost=0.12, bf16_cost_centred=0.2)
    assert "if the keys' mean" not in found(heads(worse))[0]["storage"].seen


def test_soft_weights_on_equal_values_are_a_note_and_sharp_ones_are_not():
    alike = changed("gradients", relative_value_spread=0.001)
    assert found(heads(alike))[0]["values"].heads == ((0, 0),)
    assert "values" not in found(heads(alike | {"gradient": 0.01}))[0]


def test_without_further_passes_nothing_is_said_of_them():
    nothing = Profile(None, None, replace(LOOKS, distance=math.nan), PASSED, None)
    quick = replace(nothing, gradients=replace(PASSED, relative_value_spread=math.nan))
    result, clear = found([replace(h, profile=quick) for h in heads()])
    assert result == {}
    assert not {"entropy for its width", "room for scale", "values attended"} & set(clear)

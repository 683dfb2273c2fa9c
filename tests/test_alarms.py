"""Alarms: which step and head breaks a rule, and whether the reason is the reason."""

import math
import re

import pytest
import torch

import scaledot
from scaledot.alarms import Alarm, Watch, causes, factors, numbers, why
from scaledot.heads import merge


def stats_of(q, k, scale=None):
    """What an observation sees of these q and k, causal."""

    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, torch.zeros_like(k), is_causal=True, scale=scale, enable_gqa=True
            )

    model = Attention()
    with scaledot.observe(model) as seen:
        model(q, k)
    return {f"layer{i}": x for i, x in enumerate(seen.heads.values())}


def gaussian(seed, heads=3, kv_heads=None, n=37, d=16):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, heads, n, d, generator=generator).double(),
        torch.randn(2, kv_heads or heads, n, d, generator=generator).double(),
    )


def test_the_numbers_are_those_of_the_scores():
    q, k = gaussian(0)
    scores = (q @ k.mT) / 4
    visible = torch.ones(37, 37, dtype=torch.bool).tril()
    stats = stats_of(q, k)["layer0"]
    largest = scores.masked_fill(~visible, -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(numbers(stats)["max_score"], largest, rtol=1e-12, atol=0)
    p = scores.masked_fill(~visible, -math.inf).softmax(-1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(numbers(stats)["entropy"], entropy, rtol=1e-12, atol=0)
    gradient = (1 - p.square().sum(-1)).mean((0, 2))
    torch.testing.assert_close(numbers(stats)["gradient"], gradient, rtol=1e-12, atol=0)
    rows = [scores[:, :, i, : i + 1].var(-1, correction=0) for i in range(1, 37)]
    within = torch.stack(rows).mean((0, 1))
    torch.testing.assert_close(numbers(stats)["score_var_within"], within, rtol=1e-12, atol=0)


def test_the_worst_head_is_named_and_the_others_are_counted():
    q, k = gaussian(1)
    q[:, 1] *= 6
    q[:, 2] *= 5
    watch = Watch([Alarm("max_score", above=8), Alarm("entropy", below=0.1)])
    (event,) = watch.check(
        7, {"a": stats_of(*gaussian(2))["layer0"], "b": stats_of(q, k)["layer0"]}
    )
    assert (event.step, event.path, event.layer, event.head) == (7, "b", 1, 1)
    assert (event.rule, event.threshold) == ("max_score above 8", 8)
    assert event.also == 1
    assert event.value == float(numbers(stats_of(q, k)["layer0"])["max_score"][1])
    assert str(event).startswith("step 7: max_score above 8: ")
    assert event.document().keys() == {
        "rule", "measure", "value", "threshold", "layer", "head", "path", "why", "action", "also",
        "cause",
    }  # fmt: skip
    assert event.why == why(event.cause)


def test_a_line_is_crossed_not_touched():
    stats = stats_of(*gaussian(3))
    largest = float(numbers(stats["layer0"])["max_score"].max())
    assert not Watch([Alarm("max_score", above=largest)]).check(0, stats)
    assert Watch([Alarm("max_score", above=largest * (1 - 1e-6))]).check(0, stats)
    smallest = float(numbers(stats["layer0"])["entropy"].min())
    assert not Watch([Alarm("entropy", below=smallest)]).check(0, stats)
    assert Watch([Alarm("entropy", below=smallest * (1 + 1e-6))]).check(0, stats)


def test_a_doubling_looks_back_so_many_steps_and_no_further():
    q, k = gaussian(4)
    grown = [stats_of(q * 1.2**i, k) for i in range(8)]  # the variance grows by 1.44 a step
    watch = Watch([Alarm("score_var_within", doubles_within=2)])
    fired = [bool(watch.check(step, x)) for step, x in enumerate(grown)]
    assert fired == [False, False] + [True] * 6  # 1.44² is above 2
    watch = Watch([Alarm("score_var_within", doubles_within=1)])
    assert not any(watch.check(step, x) for step, x in enumerate(grown))
    watch = Watch([Alarm("score_var_within", doubles_within=10)])
    assert not any(watch.check(11 * step, x) for step, x in enumerate(grown))
    watch = Watch([Alarm("score_var_within", doubles_within=1)])
    watch.check(0, grown[0])
    (event,) = watch.check(1, grown[3])
    line = 2 * numbers(grown[0]["layer0"])["score_var_within"][event.head]
    assert event.value >= event.threshold == float(line)


def test_rows_that_are_not_finite_are_an_alarm_of_their_own():
    q, k = gaussian(5)
    watch = Watch([Alarm("nonfinite", above=0), Alarm("max_score", above=1e6)])
    assert not watch.check(0, stats_of(q, k))
    before = float(numbers(stats_of(q, k)["layer0"])["max_score"][2])
    q = q.clone()
    q[0, 2, 5] = math.inf
    (event,) = watch.check(1, stats_of(q, k))
    assert (event.measure, event.head, event.value) == ("nonfinite", 2, 1)
    assert event.why == f"of 74 rows; the largest score of the step before was {before:.4g}"
    assert event.cause == {"rows": 74, "before": before}


def test_a_head_without_rows_breaks_nothing():
    q, k = gaussian(6)
    empty = scaledot.heads.HeadStats.identity(3, 3, 16)
    stats = stats_of(q, k)["layer0"]
    none = scaledot.heads.replace(
        empty, measures={x: scaledot.heads.Measure.of(x, torch.full((3, 1), math.nan).double())
                         for x in stats.measures}
    )  # fmt: skip
    rules = [Alarm("max_score", above=-1e9), Alarm("entropy", below=1e9),
             Alarm("score_var_within", doubles_within=3)]  # fmt: skip
    assert not Watch(rules).check(0, {"a": none})
    assert merge(none, stats).counts["rows"].equal(stats.counts["rows"])


def test_the_reason_names_what_grew():
    """Of q, k and scale one is changed at a time; their product is the width of the scores."""

    def of(*inputs, **options):
        return factors(stats_of(*inputs, **options)["layer0"])

    q, k = gaussian(7, heads=4, kv_heads=2, n=400)

    def reason(*given):
        return why(causes(*given))

    first = of(q, k)
    assert reason(of(3 * q, k), 1, first, 0).startswith(
        "since step 0: ‖q‖ 3 times, ‖k‖ 1 times, alignment 1 times; now ‖q‖ 11.9"
    )
    assert "‖q‖ 1 times, ‖k‖ 2.5 times, alignment 1 times" in reason(of(q, 2.5 * k), 3, first, 0)
    assert reason(of(q, k, scale=1.0), 0).startswith("the scale is 4 times 1/√d_k; now ‖q‖ ")
    assert "; since step 0: scale 4 times, ‖q‖ 1 times, ‖k‖ 1 times, alignment 1 times; now" in (
        reason(of(q, k, scale=1.0), 0, first, 0)
    )
    # Every query along one direction: no wider than independent ones until keys differ in it alone.
    line = torch.zeros_like(q)
    line[..., 0] = q.norm(dim=-1)
    told = reason(of(line, k), 0, first, 12)
    grown = float(re.search(r"alignment ([\d.]+) times", told)[1])
    assert told.startswith("since step 12: ‖q‖ 1 times, ‖k‖ 1 times, alignment ")
    # A row's scores are ‖q‖k₀: about as wide as ‖q‖·1, as those of independent q are.
    assert 0.8 < grown < 1.25
    along = of(line, k * torch.tensor([4.0] + [0.0] * 15).double())
    told = reason(along, 0, first, 12)
    assert 3.2 < float(re.search(r"alignment ([\d.]+) times", told)[1]) < 5  # √d_k = 4


def test_a_factor_that_is_no_number_is_left_out():
    """Queries of zeros have scores of no width: how they point to the keys is not defined."""
    q, k = gaussian(9)
    now, before = (factors(stats_of(x, k)["layer0"]) for x in (0 * q, q))
    told = causes(now, 0, before, 1)
    assert told["now"].keys() == {"query", "key"}
    assert told["grown"] == {"query": 0.0, "key": 1.0}
    assert why({}) == "its norms were not measured"


def test_a_doubling_is_explained_by_the_steps_it_looked_back_on():
    """Queries grow first, keys later: what doubled within three steps is due to the keys."""
    q, k = gaussian(9)
    steps = [(1, 1), (4, 1), (4, 1), (4, 1), (4, 1.2), (4, 1.5)]
    looks = [stats_of(a * q, b * k) for a, b in steps]
    watch = Watch([Alarm("score_var_within", doubles_within=3), Alarm("max_score", above=1)])
    told = [watch.check(step, x) for step, x in enumerate(looks)]
    assert [len(events) for events in told] == [1, 2, 2, 2, 1, 2]
    doubled, above = told[5]  # 1.5² is above 2, 1.2² is not
    # The last of equals: nothing changed from step 2 to step 3.
    assert doubled.why.startswith("since step 3: ‖q‖ 1 times, ‖k‖ 1.5 times, alignment 1 times; ")
    assert above.why.startswith("since step 0: ‖q‖ 4 times, ‖k‖ 1.5 times, alignment 1 times; ")
    assert told[1][0].why.startswith("since step 0: ‖q‖ 4 times, ‖k‖ 1 times, ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"measure": "loss", "above": 1}, "measure is 'loss': pass one of max_score, entropy"),
        ({"measure": "entropy"}, "no line given: pass one of above, below and doubles_within"),
        ({"measure": "entropy", "above": 1, "below": 0}, "above and below given: pass one of"),
        ({"measure": "entropy", "below": math.nan}, "below is nan: pass a number"),
        ({"measure": "entropy", "doubles_within": 0}, "doubles_within is 0: pass at least 1"),
        ({"measure": "entropy", "below": 1, "then": "panic"}, "then is 'panic': pass log, stop"),
    ],
)
def test_a_rule_that_is_none_is_refused(arguments, said):
    measure = arguments.pop("measure")
    with pytest.raises(ValueError, match=said.split(":")[0]) as error:
        Alarm(measure, **arguments)
    assert str(error.value).startswith(said)


@pytest.mark.usefixtures("unannotated")
def test_what_is_no_rule_and_what_was_not_measured_are_named():
    from dataclasses import replace

    with pytest.raises(TypeError, match=r"alarms hold 'x': pass scaledot\.Alarm"):
        Watch(["x"])
    stats = stats_of(*gaussian(8))["layer0"]
    with pytest.raises(scaledot.ScaledotError, match="a has no entropy that 'entropy below 1'"):
        Watch([Alarm("entropy", below=1)]).check(0, {"a": replace(stats, measures={})})

"""Profiles repeat what each part of the package says of a head, and say None where it cannot."""

import dataclasses
import math

import pytest
import torch

import scaledot
from scaledot import moments, precision, profiles, reference, roles, whatif
from scaledot.dispatch import row_stats
from scaledot.heads import SATURATED, HeadStats, merge, transmission_of
from scaledot.loading import load

TEXT = "In the beginning was the Word, and the Word was with God, and the Word was God. "


@pytest.fixture(scope="module")
def modules():
    sample = load()
    audit = scaledot.audit(sample.model, sample.tokenizer, TEXT * 6)
    return list(audit.stats.values())


def bare(**extra):
    """Statistics of rows alone, 3 heads of 5 queries, and what is added."""
    q, k = torch.randn(2, 1, 3, 5, 7, dtype=torch.float64)
    rows = row_stats(q, k, is_causal=True)
    return HeadStats.of(rows, scale=7**-0.5, d_k=7, kv_heads=3, extra=extra)


def test_width_is_that_of_the_moments_and_the_reference(modules):
    for stats in modules:
        width = moments.width_factors(stats)
        for h, profile in enumerate(profiles.profiles(stats)):
            found = profile.width
            for name in (
                "interaction", "key_bias", "row_shift", "scale", "norms", "alignment",
                "query_norm", "key_spread", "within", "ratio", "unit_scale", "effective_d_k",
            ):  # fmt: skip
                assert getattr(found, name) == float(getattr(width, name)[h]), name
            assert found.sentence == width.sentences()[h]
            assert found.verdict == reference.verdict(stats, h)
            assert found.excess == float(stats.measures["excess_entropy"].average[h])
            assert found.relative == float(stats.measures["relative_width"].average[h])
            assert found.d_k == stats.d_k


def test_parts_add_up_to_the_variance_within_rows(modules):
    for stats in modules:
        for h, profile in enumerate(profiles.profiles(stats)):
            within = float(stats.measures["score_var"].average[h])
            assert profile.width.within == pytest.approx(within, rel=1e-6)
            assert profile.width.ratio**2 == pytest.approx(within, rel=1e-5)


def test_other_scales_are_those_of_whatif(modules):
    for stats in modules:
        for h, profile in enumerate(profiles.profiles(stats)):
            assert profile.whatif == whatif.table(stats, h)
            one = profile.whatif.factors.index(1.0)
            entropy = float(stats.measures["entropy"].average[h])
            assert profile.whatif.entropy[one] == pytest.approx(entropy, rel=1e-5)


def test_roles_and_masses_are_those_measured(modules):
    seen = set()
    for stats in modules:
        called = roles.roles_of(stats)
        for h, profile in enumerate(profiles.profiles(stats)):
            assert profile.roles.called == called[h]
            for mass in profile.roles.masses:
                measure = stats.measures[mass.name]
                assert mass.label == profiles.LABELS[mass.name]
                assert mass.mass == float(measure.average[h])
                assert mass.chance == float(stats.measures[f"chance.{mass.name}"].average[h])
                assert mass.rows == int(measure.count[h]) > 0
                seen.add(mass.name)
            named = {role.name for role in profile.roles.called}
            assert named <= {mass.name for mass in profile.roles.masses}
            assert profile.roles.distance == float(stats.measures["distance"].average[h])
    # A decoder has no next token to look at.
    assert seen == set(profiles.LABELS) - {"next"}


def test_precision_is_headroom_and_storage(modules):
    for stats in modules:
        for h, profile in enumerate(profiles.profiles(stats)):
            found, room = profile.precision, precision.headroom(stats, h)
            assert [r.dtype for r in found.rooms] == list(SATURATED)
            for r in found.rooms:
                assert (r.median, r.p99) == room.nats[r.dtype]
                assert r.limit == SATURATED[r.dtype]
                past = stats.share_at_least("top_margin", r.limit)[h]
                assert r.past == float(past)
            assert (found.largest, found.bound) == (room.largest, room.bound)
            assert found.largest <= found.bound
            assert found.bf16_cost == float(stats.measures["bf16_cost"].average[h])


def test_what_passes_back_without_and_with_a_backward(modules):
    for stats in modules:
        for h, profile in enumerate(profiles.profiles(stats)):
            assert profile.gradients.trace == float(stats.measures["jacobian_trace"].average[h])
            spread = float(stats.measures["relative_value_spread"].average[h])
            assert profile.gradients.relative_value_spread == spread
            assert math.isnan(profile.gradients.median)
            assert math.isnan(profile.gradients.dead)
    stats = bare(transmission=torch.rand(1, 3, 5, dtype=torch.float64))
    known = transmission_of(stats)
    for h, profile in enumerate(profiles.profiles(stats)):
        for name in ("median", "p10", "rms", "dead"):
            assert getattr(profile.gradients, name) == float(getattr(known, name)[h])


def test_what_was_not_measured_is_none_or_nan():
    for profile in profiles.profiles(bare()):
        assert profile.width is None
        assert profile.whatif is None
        assert profile.precision is None
        assert profile.roles.called == profile.roles.masses == ()
        assert math.isnan(profile.roles.distance)
        assert math.isfinite(profile.gradients.trace)
        assert math.isnan(profile.gradients.value_spread)


def test_no_rows_are_profiles_without_numbers():
    q = torch.full((1, 3, 5, 7), math.nan, dtype=torch.float64)
    stats = HeadStats.of(row_stats(q, q), scale=7**-0.5, d_k=7, kv_heads=3)
    for profile in profiles.profiles(stats):
        assert not profile.roles.broad
        assert profile.roles.masses == profile.roles.called == ()
        assert math.isnan(profile.gradients.trace)


def test_a_share_of_what_the_first_key_leaves_needs_enough_of_it():
    """Of 40 rows at .8 the first key leaves 8 rows' weight, of 80 it leaves 16."""
    for rows, said in ((40, False), (80, True)):
        q = torch.zeros(1, 2, rows, 7, dtype=torch.float64)
        full = torch.ones(1, 2, rows, dtype=torch.float64)
        first = torch.stack([0.8 * full[0, 0], 0.25 * full[0, 0]])[None]
        extra = {
            "first": first, "previous": 0.05 * full, "local.4": 0.1 * full,
            **{f"chance.{n}": 0.02 * full for n in ("first", "previous", "local.4")},
        }  # fmt: skip
        stats = HeadStats.of(row_stats(q, q), scale=7**-0.5, d_k=7, kv_heads=2, extra=extra)
        sink, other = profiles.profiles(stats)
        beside = {mass.name: mass.without_first for mass in sink.roles.masses}
        assert beside["first"] is beside["local.4"] is None
        assert beside["previous"] == (pytest.approx(0.25) if said else None)
        # A first key that holds less than .3 hides nothing.
        assert all(mass.without_first is None for mass in other.roles.masses)


def test_profiles_of_texts_merge(modules):
    first, *_ = modules
    for one, two in zip(
        profiles.profiles(first), profiles.profiles(merge(first, first)), strict=True
    ):
        for part in ("width", "gradients"):
            a, b = (dataclasses.asdict(getattr(x, part)) for x in (one, two))
            for name, value in a.items():
                if isinstance(value, float):
                    assert b[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
                else:
                    assert b[name] == value, name
        assert [m.rows * 2 for m in one.roles.masses] == [m.rows for m in two.roles.masses]

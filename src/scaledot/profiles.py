"""What one head's measures add up to: its width, other scales, roles, gradient, precision.

`profiles` reads the merged statistics of a module and gives a `Profile` for each head, plain
numbers that documents hold and findings judge. A part is None where its measures are not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scaledot import moments, precision, reference, roles, whatif
from scaledot.heads import SATURATED, HeadStats, transmission_of

LABELS: Mapping[str, str] = {
    "first": "first token", "previous": "previous token", "current": "itself",
    "next": "next token", **{f"local.{w}": f"under {w} tokens away" for w in roles.WINDOWS},
    "delimiter": "delimiters", "duplicate": "same token earlier",
    "induction": "after the same token",
}  # fmt: skip
"""What people call the masses that a head is measured by."""

FEWEST_REST = 10
"""Rows' weight beside the first key from which shares of it mean something."""


@dataclass(frozen=True)
class Width:
    """One head's entry of `moments.width_factors`, and its entropy against what width explains.

    relative: mean standard deviation within rows ÷ √(2 ln n). verdict: `reference.verdict`. excess:
    mean of entropy less that of Gaussian scores as wide over as many keys, nats. NaN, "unknown" for
    rows of few keys.
    """

    d_k: int
    within: float
    interaction: float
    key_bias: float
    row_shift: float
    scale: float
    norms: float
    alignment: float
    ratio: float
    unit_scale: float
    effective_d_k: float
    query_norm: float
    key_spread: float
    sentence: str
    relative: float
    excess: float
    verdict: str


@dataclass(frozen=True)
class Mass:
    """Mean weight on one kind of key, and what equal weights would give, over so many rows.

    without_first: of another position, as a share of what does not go to the first key, where more
    than .3 does and the rest adds up to ten rows' weight or more: the second row, whose previous
    key is the first, counts as one.
    """

    name: str
    label: str
    mass: float
    chance: float
    rows: int
    without_first: float | None


@dataclass(frozen=True)
class Roles:
    """What a head looks at: its roles, strongest first, and every mass; broad: `roles.is_broad`.

    distance: mean of Σp·|i − j|, and what equal weights would give; NaN where not measured.
    """

    called: tuple[roles.Role, ...]
    masses: tuple[Mass, ...]
    broad: bool
    distance: float
    distance_chance: float


@dataclass(frozen=True)
class Passed:
    """What a head passes back. trace: mean Σp(1−p). value_spread, relative_value_spread: means of
    `spread.value_spread`, NaN where not measured. The rest as `heads.Transmission`, from backwards;
    NaN without."""

    trace: float
    value_spread: float
    relative_value_spread: float
    median: float
    p10: float
    rms: float
    dead: float


@dataclass(frozen=True)
class Room:
    """Nats left in one dtype at the median row and the 99th percentile; past: share of rows whose
    heaviest weight it stores as 1, the limit at `limit` nats of lead."""

    dtype: str
    limit: float
    median: float
    p99: float
    past: float


@dataclass(frozen=True)
class Precision:
    """What low precision costs: `precision.headroom` and the means of `precision.storage`."""

    rooms: tuple[Room, ...]
    largest: float
    bound: float
    bf16_cost: float
    bf16_cost_centred: float


@dataclass(frozen=True)
class Profile:
    """One head in full; width, whatif and precision are None where they were not measured."""

    width: Width | None
    whatif: whatif.WhatIf | None
    roles: Roles
    gradients: Passed
    precision: Precision | None


def profiles(stats: HeadStats) -> list[Profile]:
    """One `Profile` a head. Cost: small; reads sums and histograms only."""
    called = roles.roles_of(stats)
    width = moments.width_factors(stats) if "key_bias" in stats.measures else None
    lines = [] if width is None else width.sentences()
    transmitted = transmission_of(stats)

    def mean(name: str, head: int) -> float:
        m = stats.measures.get(name)
        return math.nan if m is None else m.of_head(head)

    past = {d: stats.share_at_least("top_margin", limit) for d, limit in SATURATED.items()}
    result = []
    for h in range(stats.heads):
        of_width = None
        if width is not None:
            numbers = {
                name: float(getattr(width, name)[h])
                for name in ("within", "interaction", "key_bias", "row_shift", "scale", "norms",
                             "alignment", "ratio", "unit_scale", "effective_d_k", "query_norm",
                             "key_spread")
            }  # fmt: skip
            of_width = Width(
                d_k=width.d_k, **numbers, sentence=lines[h],
                relative=mean("relative_width", h), excess=mean("excess_entropy", h),
                verdict=reference.verdict(stats, h),
            )  # fmt: skip
        swept = any(name.startswith("whatif.") for name in stats.measures)
        of_gradient = {
            name: math.nan if transmitted is None else float(getattr(transmitted, name)[h])
            for name in ("median", "p10", "rms", "dead")
        }
        of_precision = None
        if "bf16_cost" in stats.measures:
            found = precision.headroom(stats, h)
            rooms = tuple(
                Room(d, SATURATED[d], *found.nats[d], float(past[d][h])) for d in SATURATED
            )
            of_precision = Precision(
                rooms, found.largest, found.bound, mean("bf16_cost", h),
                mean("bf16_cost_centred", h),
            )  # fmt: skip
        result.append(
            Profile(
                of_width,
                whatif.table(stats, h) if swept else None,
                Roles(
                    called[h], _masses(stats, h), roles.is_broad(mean("normalised_entropy", h)),
                    mean("distance", h), mean("chance.distance", h),
                ),
                Passed(
                    mean("jacobian_trace", h), mean("value_spread", h),
                    mean("relative_value_spread", h), **of_gradient,
                ),
                of_precision,
            )
        )  # fmt: skip
    return result


def _masses(stats: HeadStats, head: int) -> tuple[Mass, ...]:
    first, rest = math.nan, math.nan
    result = []
    for name, label in LABELS.items():
        m = stats.measures.get(name)
        if m is None or not m.count[head]:
            continue
        mass = m.of_head(head)
        if name == "first":
            first, rest = mass, (1 - mass) * float(m.count[head])
        beside = None
        if name in roles.OFFSETS and first > roles.THRESHOLDS["first"] and rest >= FEWEST_REST:
            beside = min(mass / (1 - first), 1.0)
        chance = stats.measures[f"chance.{name}"].of_head(head)
        result.append(Mass(name, label, mass, chance, int(m.count[head]), beside))
    return tuple(result)

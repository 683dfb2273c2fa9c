"""A text in parts: which part a forward is, and what the parts leave for the last one.

A row of a causal model sees nothing later than itself, so that sums over the rows of all parts are
those of the text (prefill.py runs them). What needs more than rows is gathered here, or left out
and named. Source: docs/long.md.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot import moments

if TYPE_CHECKING:
    from scaledot.calls import Attended


@dataclass(frozen=True, eq=False)
class Part:
    """Which part of a text runs, its earlier keys in a cache (prefill.py): queries start … stop − 1
    of `tokens`, the ids of all of it."""

    tokens: Int[Tensor, "batch tokens"]
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.tokens.shape[1]


PART: ContextVar[Part | None] = ContextVar("part", default=None)
"""The part of a text that runs; None where forwards are of whole texts."""

NOT_IN_PARTS = ("bf16_cost_centred",)
"""Measures that need every query beside every key: of a text that runs in parts they are left
out."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """What the parts of a text leave for the last one, with which come the measures that need the
    text's mean query.

    total: Σq over the rows that count, float64, and count: how many. visible, nonfinite, real: of
    each row so far. whole: False once a mask has no form that holds for all parts together.
    """

    total: Float[Tensor, "batch heads d_k"]
    count: Int[Tensor, "batch heads"]
    visible: Int[Tensor, "batch heads rows"]
    nonfinite: Bool[Tensor, "batch heads rows"]
    real: Bool[Tensor, "batch rows"]
    whole: bool


def entered(ledger: Ledger | None, attended: Attended, real: Tensor | None, part: Part) -> Ledger:
    """The ledger after one more part, `attended`; None before the first."""
    p, seen, rows = attended.problem, attended.seen, attended.rows
    batch, _, queries, _ = p.query.shape
    if real is None:
        real = torch.ones(batch, queries, dtype=torch.bool, device=p.query.device)
    counted = (rows.visible > 0) & ~rows.nonfinite & real[:, None]
    new = Ledger(
        torch.where(counted[..., None], p.query.double(), 0.0).sum(2),
        counted.sum(2),
        rows.visible,
        rows.nonfinite,
        real,
        seen.segments is None and seen.allowed is None and seen.bias is None
        and p.key.shape[2] == part.stop,
    )  # fmt: skip
    if ledger is None:
        return new
    return Ledger(
        ledger.total + new.total,
        ledger.count + new.count,
        torch.cat([ledger.visible, new.visible], 2),
        torch.cat([ledger.nonfinite, new.nonfinite], 2),
        torch.cat([ledger.real, new.real], 1),
        ledger.whole and new.whole,
    )


def key_bias(ledger: Ledger, attended: Attended) -> Float[Tensor, "batch heads rows"] | None:
    """`moments.row_budget`'s key_bias of every row of a text, with the ledger after its last part;
    NaN where a row has none. None where the parts' masks do not make one mask of a known form."""
    if not ledger.whole:
        return None
    p, seen = attended.problem, attended.seen
    batch, heads, queries = p.query.shape[:3]
    length = ledger.visible.shape[2]
    everything = replace(
        seen, shape=(batch, heads, length, length), offset=seen.offset - (length - queries)
    )
    mean = ledger.total / ledger.count[..., None]
    found = moments.key_bias(p, everything, mean, ledger.visible, ledger.nonfinite)
    return found.masked_fill(ledger.visible < 2, float("nan"))

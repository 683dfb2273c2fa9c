"""`check`: is this attention function right?

Three verdicts are kept apart: *wrong* (not what softmax(QKᵀ·scale + mask)·V gives), *differs* (good
functions disagree here) and *ok*. What a function does not take, or refuses with an error, is not
supported; what an earlier mistake makes meaningless is not judged. `properties` holds what is
asked, `probe` how; docs/check.md lists both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scaledot.probe import DTYPES as DTYPES
from scaledot.probe import MISTAKES, SEED, Property, Raised, Skip, Status, Subject, name_of, wrong
from scaledot.probe import Reading as Reading
from scaledot.properties import PROPERTIES, Judge


@dataclass(frozen=True)
class Report:
    """What `check` found; prints itself. `report["scale"]` is one `Property`."""

    function: str
    layout: str
    device: str
    dtype: str
    properties: tuple[Property, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong: a difference by convention is no mistake."""
        return not self.named("wrong")

    def named(self, status: Status) -> tuple[str, ...]:
        """The names of the properties with that status."""
        return tuple(p.name for p in self.properties if p.status == status)

    def __getitem__(self, name: str) -> Property:
        for p in self.properties:
            if p.name == name:
                return p
        raise KeyError(name)

    def __repr__(self) -> str:
        from scaledot.document import check_document
        from scaledot.terminal import check_text

        return check_text(check_document(self))


def check(
    fn: Callable[..., Any],
    *,
    layout: str = "bhsd",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    name: str | None = None,
) -> Report:
    """Which properties of attention a function has: scale, masks, causality, grouped heads, edges,
    accuracy, gradients and more, each with the smallest input that shows it.

    fn takes query, key, value and as many as it has of `F.scaled_dot_product_attention`'s
    attn_mask, dropout_p, is_causal, scale, enable_gqa, and softcap; a boolean mask's True means
    "may attend". It returns the output, or a tuple that starts with it. layout "bshd" for
    (batch, length, heads, dim); masks stay (batch, heads, queries, keys). device and dtype are
    those of the inputs; accuracy is asked in bfloat16 and float16 as well.

    Seeded; the global random state, warnings and fn's arguments are left as they were.

    Raises: TypeError if fn cannot be called with three tensors, ValueError for an unknown layout
    or dtype.
    Source: docs/check.md.

    >>> check(torch.nn.functional.scaled_dot_product_attention)["scale"].result
    'divides by √d_k'
    """
    f = Subject(fn, layout, device, dtype)
    devices = [f.device] if f.device.type == "cuda" else []
    found: list[Property] = []
    with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        for label, judge in PROPERTIES:
            found.append(_judged(f, label, judge, found))
    title = name or name_of(fn)
    return Report(title, layout, str(f.device), str(f.dtype).removeprefix("torch."), tuple(found))


_FIRST = ("axes", "dropout off", "every key")
"""What every function must do: here an exception is a mistake."""

_GROUND = (*_FIRST, "heads apart")
"""Where one of these is wrong, nothing asked after it means anything."""


def _judged(f: Subject, name: str, judge: Judge, found: Sequence[Property]) -> Property:
    """The verdict of one property, whatever the function does."""
    f.input = None
    f.wrong = {p.name for p in found if p.status == "wrong"}
    lost = [x for x in _GROUND if x in f.wrong]
    if lost:
        return Property(name, "unjudged", f"see {lost[0]}")
    try:
        p = judge(f)
    except Skip as skip:
        return Property(name, skip.status, str(skip))
    except Raised as raised:
        if name not in _FIRST and not isinstance(raised.error, MISTAKES):
            return Property(name, "unsupported", f"raises {raised}", input=f.input)
        hint = (
            "it takes other axes, another dtype or device: --layout, --dtype, --device, a wrapper"
        )
        p = wrong(f"raises {raised}", cause=hint if name in _FIRST else None)
    return replace(p, name=name, input=None if p.status == "ok" else p.input or f.input)

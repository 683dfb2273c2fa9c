"""A training run as the page draws it: a page document, and what is added to it as a run goes on.

Sentences go as ids and numbers: the page words them in its reader's language.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from scaledot import __version__
from scaledot.alarms import Event
from scaledot.page_document import packed_array
from scaledot.timeline import Run, plain
from scaledot.tracking import LOW_IS_BAD, NAMES

_RULE = re.compile(
    r"\w+ (above|below|doubles within) (-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|inf))(?: steps)?"
)
"""What `Alarm.rule` says."""


def page_document(run: Run) -> dict[str, Any]:
    """A run for the page: a page document without texts, and "timeline" with every head's value of
    every step as arrays (steps, heads), float32."""
    first = run.layers[0]
    return {
        "format": "scaledot/page",
        "version": 1,
        "scaledot": __version__,
        "model": {
            "name": run.model, "kind": None, "d_model": None, "layers": len(run.layers),
            "heads": max(x.heads for x in run.layers), "kv_heads": first.kv_heads,
            "d_k": first.d_k, "causal": None, "embedded": False, "context": None,
        },
        "texts": [],
        "heads": {},
        "contributions": {},
        "timeline": {
            "every": run.every,
            "measures": [{"name": x, "low": x in LOW_IS_BAD} for x in NAMES],
            "layers": [vars(x) for x in run.layers],
            **steps_document(run),
        },
    }  # fmt: skip


def steps_document(run: Run) -> dict[str, Any]:
    """What "timeline" holds of these steps, and all notes: as an addition too, in which a step that
    was there before takes its place."""
    return {
        "steps": list(run.steps),
        "losses": packed_array(
            torch.tensor([math.nan if x is None else x for x in run.losses]).reshape(-1, 1)
        ),
        "nonfinite": list(run.nonfinite),
        "values": {name: packed_array(torch.from_numpy(x)) for name, x in run.values.items()},
        "alarms": [_alarm(x) for x in run.alarms],
        "notes": [vars(x) for x in run.notes],
    }


def _alarm(event: Event) -> dict[str, Any]:
    """An event, with its rule as a kind and a number: {"above": 100}; None for a rule of another
    form. The sentence `why` goes along where the numbers of it are not known."""
    found = _RULE.fullmatch(event.rule)
    told = {k: plain(x) for k, x in vars(event).items()}
    told["line"] = found and {found[1].partition(" ")[0]: plain(float(found[2]))}
    if event.cause:
        del told["why"]
    return told

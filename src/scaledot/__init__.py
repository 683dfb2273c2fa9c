"""scaledot: scaled dot-product attention that shows its work.

Every stage for inputs you can look at, exact per-head statistics for inputs you cannot. Importing
this loads nothing heavy; each name below loads its own module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


class ScaledotError(Exception):
    """A model, text or file could not be used. Its message is the one line that a user sees."""


_WHERE = {
    "attention": "dispatch",
    "row_stats": "dispatch",
    "attention_received": "received",
    "MultiheadAttention": "multihead",
    "Mask": "masks",
    "trace": "stages",
    "Trace": "stages",
    "RowStats": "rows",
    "HeadStats": "heads",
    "score_moments": "moments",
    "ScoreMoments": "moments",
    "observe": "observation",
    "Observation": "observation",
    "Monitor": "training",
    "Alarm": "alarms",
    "Event": "alarms",
    "qk_clip": "clipping",
    "audit": "auditing",
    "Audit": "gathered",
    "check": "conformance",
    "future_leak": "leakage",
    "document_leak": "leakage",
    "Leak": "leakage",
}
_MODULES = ("lab", "losses")
"""Public names that are modules."""

if TYPE_CHECKING:
    from scaledot import lab as lab
    from scaledot import losses as losses
    from scaledot.alarms import Alarm as Alarm
    from scaledot.alarms import Event as Event
    from scaledot.auditing import audit as audit
    from scaledot.clipping import qk_clip as qk_clip
    from scaledot.conformance import check as check
    from scaledot.dispatch import attention as attention
    from scaledot.dispatch import row_stats as row_stats
    from scaledot.gathered import Audit as Audit
    from scaledot.heads import HeadStats as HeadStats
    from scaledot.leakage import Leak as Leak
    from scaledot.leakage import document_leak as document_leak
    from scaledot.leakage import future_leak as future_leak
    from scaledot.masks import Mask as Mask
    from scaledot.moments import ScoreMoments as ScoreMoments
    from scaledot.moments import score_moments as score_moments
    from scaledot.multihead import MultiheadAttention as MultiheadAttention
    from scaledot.observation import Observation as Observation
    from scaledot.observation import observe as observe
    from scaledot.received import attention_received as attention_received
    from scaledot.rows import RowStats as RowStats
    from scaledot.stages import Trace as Trace
    from scaledot.stages import trace as trace
    from scaledot.training import Monitor as Monitor

__all__ = ["ScaledotError", "__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"scaledot.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'scaledot' has no attribute {name!r}")
    value = getattr(import_module(f"scaledot.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES})

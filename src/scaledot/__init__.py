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
    "Mask": "masks",
    "trace": "stages",
    "Trace": "stages",
    "RowStats": "rows",
    "HeadStats": "heads",
    "observe": "observation",
    "Observation": "observation",
    "audit": "auditing",
    "Audit": "auditing",
}

if TYPE_CHECKING:
    from scaledot.auditing import Audit as Audit
    from scaledot.auditing import audit as audit
    from scaledot.dispatch import attention as attention
    from scaledot.dispatch import row_stats as row_stats
    from scaledot.heads import HeadStats as HeadStats
    from scaledot.masks import Mask as Mask
    from scaledot.observation import Observation as Observation
    from scaledot.observation import observe as observe
    from scaledot.rows import RowStats as RowStats
    from scaledot.stages import Trace as Trace
    from scaledot.stages import trace as trace

__all__ = ["ScaledotError", "__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'scaledot' has no attribute {name!r}")
    value = getattr(import_module(f"scaledot.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})

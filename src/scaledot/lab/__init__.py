"""The laboratory: seeded experiments that put theory, estimate and standard error side by side.

Each function gives a `Result`, which prints as a table, saves as JSON or CSV, and plots. Loading
this loads nothing heavy; each name loads its own module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Result": "results",
    "Estimate": "results",
    "variance": "draws",
    "saturation": "softmaxes",
    "scales": "softmaxes",
    "gradient": "slopes",
    "multihead": "splitting",
    "cost": "costs",
    "models": "published",
    "train": "learning",
    "article": "articles",
}

if TYPE_CHECKING:
    from scaledot.lab.articles import article as article
    from scaledot.lab.costs import cost as cost
    from scaledot.lab.draws import variance as variance
    from scaledot.lab.learning import train as train
    from scaledot.lab.published import models as models
    from scaledot.lab.results import Estimate as Estimate
    from scaledot.lab.results import Result as Result
    from scaledot.lab.slopes import gradient as gradient
    from scaledot.lab.softmaxes import saturation as saturation
    from scaledot.lab.softmaxes import scales as scales
    from scaledot.lab.splitting import multihead as multihead

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'scaledot.lab' has no attribute {name!r}")
    value = getattr(import_module(f"scaledot.lab.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

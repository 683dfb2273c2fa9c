"""Modules that are running, and what their arguments say of the text that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Bool, Int
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Frame:
    """A module that is running, and what its arguments say.

    stops: it reads a text, so what modules around it were given is about another one, or no more.
    own_mask: it was given an attention mask of more axes than (batch, length).
    tokens: the ids of that text. documents: a number for each document of a packed batch, None
    where there is one a row or nothing says so. Inside a graph of torch.compile both are None.
    """

    path: str
    module: nn.Module
    cross: bool
    stops: bool
    query_mask: Bool[Tensor, "batch length"] | None
    length: int
    wants_weights: bool
    tokens: Int[Tensor, "batch tokens"] | None = None
    documents: Int[Tensor, "rows positions"] | None = None
    own_mask: bool = False


def reading(frames: Sequence[Frame]) -> Frame | None:
    """The innermost module that reads the text a call is about, the one around it instead where
    only that was given the tokens; None where none reads a text."""
    found: Frame | None = None
    for frame in reversed(frames):
        if not frame.stops:
            continue
        if found is None:
            found = frame
        elif frame.length != found.length or _two_texts(frame.module):
            break  # it reads another text
        if found.tokens is None and frame.tokens is not None:
            found = replace(found, tokens=frame.tokens)
        if found.documents is None and frame.documents is not None:
            found = replace(found, documents=frame.documents)
        if found.query_mask is None and frame.query_mask is not None:
            found = replace(found, query_mask=frame.query_mask)
    return found


def _two_texts(module: nn.Module) -> bool:
    """Whether a module reads two texts, an encoder's and a decoder's."""
    return getattr(getattr(module, "config", None), "is_encoder_decoder", False) is True


@dataclass(frozen=True)
class Where:
    """Which attention is being called: its module, and the modules it runs in."""

    path: str
    module: nn.Module
    frames: Sequence[Frame]

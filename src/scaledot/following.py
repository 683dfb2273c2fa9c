"""A training run's time line, served for the page: read anew at each asking, while the run goes on.

No model is there, so nothing can be asked of one; everything else is the explorer's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaledot import ScaledotError, timeline
from scaledot.server import Refused, Shelf


class Followed(Shelf):
    """What the server answers for a time-line file.

    Raises: as `timeline.read`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._known: tuple[tuple[int, int], dict[str, Any]] | None = None
        self.document()

    def document(self, *ids: str) -> dict[str, Any]:  # noqa: ARG002
        """The page's document of the file as it is now."""
        try:
            state = Path(self.path).stat()
            mark = state.st_size, state.st_mtime_ns
            if self._known is None or self._known[0] != mark:
                self._known = mark, timeline.page_document(timeline.read(self.path))
        except (OSError, ScaledotError) as error:
            if self._known is None:
                raise (
                    error
                    if isinstance(error, ScaledotError)
                    else ScaledotError(
                        f"cannot read {self.path}: {(error.strerror or str(error)).lower()}"
                    )
                ) from None
            raise Refused(410, f"the time line cannot be read any more: {error}") from None
        return self._known[1]

    def put(self, text: str) -> str:  # noqa: ARG002
        raise ScaledotError("a time line holds no model: run scaledot explore MODEL for texts")

    def get(self, id: str) -> Any:  # noqa: ARG002
        raise Refused(404, "a time line holds no texts")

    def stop(self, *, keep: bool = True) -> None:
        pass

    def progress(self, first: int = 0) -> dict[str, Any]:  # noqa: ARG002
        return {"layers": None, "of": 0, "seconds": 0.0, "measured": []}

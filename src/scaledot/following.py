"""A training run's time line, served for the page: read on at each asking, while the run goes on.

No model is there, so nothing can be asked of one; everything else is the explorer's.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from scaledot import ScaledotError
from scaledot.server import Refused, Shelf
from scaledot.timeline import Reader, UnreadableError
from scaledot.timeline_page import page_document, steps_document


class Followed(Shelf):
    """What the server answers for a time-line file.

    Raises: UnreadableError, a ScaledotError, as `Reader.look`.
    """

    def __init__(self, path: str | Path) -> None:
        self._reader = Reader(path)
        self._reading = threading.Lock()  # two requests may come at once
        self._reader.look()

    def document(self, *ids: str) -> dict[str, Any]:  # noqa: ARG002
        """The page's document of the file as it is now."""
        with self._reading:
            self._look()
            return self._whole()

    def news(self, after: str) -> dict[str, Any]:
        """What the file holds that a page lacks whose "mark" is `after`: steps, all of the document
        where they cannot be added to those it has, or nothing but the mark and the notes."""
        with self._reading:
            self._look()
            life, count = self._reader.mark
            known, _, had = after.partition(".")
            if known != life or not had.isdecimal() or int(had) > count:
                return {"document": self._whole()}
            run = self._reader.run(int(had))
            told = steps_document(run)
            return {"mark": f"{life}.{count}"} | (told if run.steps else {"notes": told["notes"]})

    def _whole(self) -> dict[str, Any]:
        document = page_document(self._reader.run())
        document["timeline"]["mark"] = "{}.{}".format(*self._reader.mark)
        return document

    def _look(self) -> None:
        try:
            self._reader.look()
        except UnreadableError as error:
            raise Refused(
                410, f"the time line cannot be read any more: {error}", id=error.id,
                line=error.line,
            ) from None  # fmt: skip

    def put(self, text: str) -> str:  # noqa: ARG002
        raise ScaledotError("a time line holds no model: run scaledot explore MODEL for texts")

    def get(self, id: str) -> Any:  # noqa: ARG002
        raise Refused(404, "a time line holds no texts")

    def stop(self, *, keep: bool = True) -> None:
        pass

    def progress(self, first: int = 0) -> dict[str, Any]:  # noqa: ARG002
        return {"layers": None, "of": 0, "seconds": 0.0, "measured": []}

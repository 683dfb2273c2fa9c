"""The processes of one run: this one alone, or those that torchrun started.

What the first decides holds on all, its errors too; what the others found comes to it at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from scaledot import ScaledotError

PATIENCE = timedelta(days=30)
"""How long the first process waits for the last: their shares may take hours more or less."""


@dataclass(frozen=True)
class Processes:
    """rank: this process's number. world: how many there are. local: its number on its machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """What the first process makes, on each; where it fails it says why, and the others end.

        Raises: on the first, whatever `make` raises; SystemExit on the others then.
        """
        if self.world == 1:
            return make()
        said: list[bytes | None] = [None]
        if not self.first:
            self._call("broadcast_object_list", said)
            if said[0] is None:
                raise SystemExit(2)
            return said[0]
        try:
            said[0] = make()
        finally:
            self._call("broadcast_object_list", said)
        assert said[0] is not None  # or it has raised
        return said[0]

    def to_first(self, data: bytes) -> list[bytes]:
        """Everybody's bytes in the order of ranks, on the first process; nothing on the others."""
        if self.world == 1:
            return [data]
        parts: list[bytes] | None = [b""] * self.world if self.first else None
        self._call("gather_object", data, parts)
        return parts or []

    def _call(self, name: str, *args: object) -> None:
        from torch import distributed

        try:
            getattr(distributed, name)(*args)
        except RuntimeError:
            raise ScaledotError(
                "another process of this run is gone: run it again, what is saved is not lost"
            ) from None


def started() -> int:
    """How many processes the environment says there are, by torchrun's variables."""
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdecimal() and {"RANK", "MASTER_ADDR"} <= os.environ.keys() else 1


@contextmanager
def processes() -> Iterator[Processes]:
    """This process among those that `started` counts, able to talk to them inside."""
    if (world := started()) == 1:
        yield Processes()
        return
    # The defaults of its functions hold the group that is there when it is imported, which then
    # outlives its end, and a thread of it may end the process with SIGABRT: so it comes before.
    import torch.distributed.nn.functional  # noqa: F401
    from torch import distributed

    distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        yield Processes(distributed.get_rank(), world, local)
    finally:
        distributed.destroy_process_group()

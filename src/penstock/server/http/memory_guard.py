"""The guard that refuses new work while the host has hardly any memory left, so that running work can end.

Used by the generating routes (`generation.require_ready`) and by `health`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import UnavailableError
from penstock.process.host_memory import host_available_bytes
from penstock.server.http.keep_alive import Clock

LOOK_S = 1.0  # between two looks at the host's memory


class MemoryGuard:
    """Knows whether the host has too little memory for new work.

    Args:
        min_free_bytes: while the host has fewer bytes of free memory, new work is refused; 0: never.
        clock: monotonic seconds.
        available: returns how many bytes the host can still give.
    """

    def __init__(
        self, min_free_bytes: int, clock: Clock, available: Callable[[], int] = host_available_bytes
    ) -> None:
        self._min_free_bytes = min_free_bytes
        self._available = available
        self._clock = clock
        self._shortage = ""
        self._look_at = clock()

    @property
    def shortage(self) -> str:
        """The words that say how little memory is free; empty while there is enough."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._shortage = self._look()
        return self._shortage

    def refuse_new(self) -> None:
        """Raise `UnavailableError` while memory is short."""
        if self.shortage:
            raise UnavailableError(
                f"This server accepts no new requests: {self.shortage}.",
                remedy="Try again when other requests have ended.",
                code="low_memory",
            )

    def _look(self) -> str:
        try:
            free = self._available() if self._min_free_bytes else 0
        except OSError:  # this host does not report its memory: no work is refused
            return ""
        if free >= self._min_free_bytes:
            return ""
        return f"the host has {free >> 20} MiB of free memory, less than {self._min_free_bytes >> 20} MiB"

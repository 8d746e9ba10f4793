"""Something to wait for that a program rings itself."""

from __future__ import annotations

import contextlib
import os


class Bell:
    """Readable while it rings. Any thread may ring it."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._event

    def ring(self) -> None:
        os.eventfd_write(self._event, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        """Give the descriptor back. May be called twice."""
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

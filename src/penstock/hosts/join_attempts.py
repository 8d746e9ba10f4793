"""Joins the head in a thread, so that the ranks of this host and its signals do not wait for the network.

    worker ── begin() ──▶ a thread: look the name up, connect, handshake, join
           ◀── bell, take(): the head, or why it could not be joined ──┘

The thread ends with its attempt. `close` ends an attempt at once wherever it waits, but for looking a name
up: a resolver cannot be interrupted, and the thread then ends with the process. Used by `hosts.worker`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.hosts.bell import Bell
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.joining import JoinedHead

CLOSE_S = 1.0  # for a thread that is cancelled


class JoinAttempts:
    """A worker's attempts to join the head, one at a time, each in a thread of its own.

    It can be polled (`fileno`): it is readable when an attempt has ended and was not taken yet.

    Args:
        join: joins and returns the head, or raises; called in the thread, with what cancels it.
    """

    def __init__(self, join: Callable[[Cancellation], JoinedHead]) -> None:
        self._join = join
        self._bell = Bell()
        self._cancellation = Cancellation()
        self._results: list[JoinedHead | Exception] = []  # none, or one that was not taken yet
        self._thread = threading.Thread()  # of no attempt yet

    def fileno(self) -> int:
        return self._bell.fileno()

    def begin(self) -> None:
        """Begin an attempt in a thread, and return at once; the result of the one before must be taken."""
        assert not self._results, "the previous attempt was not used"
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="join", daemon=True)
        self._thread.start()

    def take(self) -> JoinedHead:
        """Return the head that the ended attempt has joined; raise the error with which it has failed."""
        self._thread.join()
        self._bell.hush()
        result = self._results.pop()
        if isinstance(result, Exception):
            raise result
        self._cancellation = Cancellation()  # the connection is the worker's from now on
        return result

    def close(self) -> None:
        """End a running attempt, and close the connection of one that has succeeded and was not taken."""
        self._cancellation.cancel()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            return  # it looks a name up, and would ring what is closed
        for result in self._results:
            if isinstance(result, JoinedHead):
                result.connection.close()
        self._bell.close()

    def _run(self) -> None:
        try:
            self._results.append(self._join(self._cancellation))
        except CancelledError:
            return
        except Exception as error:  # ours, or of the system: the worker raises it
            self._results.append(error)
        self._bell.ring()

"""Joins the head in a thread, so that the worker serves its ranks and obeys signals meanwhile.

    worker ── begin() ──▶ a thread: look the name up, connect, handshake, join
           ◀── bell, take(): the head, or why it could not be joined ──┘

The thread ends with its attempt. `close` ends an attempt at once wherever it waits, except while it looks up
a name: a resolver cannot be interrupted, so that thread ends with the process. Used by `hosts.worker`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.errors import JoinError
from penstock.hosts.bell import Bell
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.joining import JoinedHead

CLOSE_S = 1.0  # so long `close` waits for a thread that was cancelled


class JoinAttempts:
    """A worker's attempts to join the head, one at a time, each in a thread of its own.

    It can be polled (`fileno`): it is readable when an attempt has ended and was not taken yet.

    Args:
        join: joins and returns the head, or raises; called in the thread, with a `Cancellation` that ends it.
    """

    def __init__(self, join: Callable[[Cancellation], JoinedHead]) -> None:
        self._join = join
        self._bell = Bell()
        self._cancellation = Cancellation()
        self._results: list[JoinedHead | Exception] = []  # none, or one that was not taken yet
        self._thread = threading.Thread()  # never started; the first attempt's replaces it

    def fileno(self) -> int:
        return self._bell.fileno()

    def begin(self) -> None:
        """Begin an attempt in a thread, and return at once; the last result must have been taken."""
        assert not self._results, "the previous attempt was not used"
        self._cancellation = Cancellation()
        thread = threading.Thread(target=self._run, name="join", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as this user or container may have
            self._results.append(JoinError(f"this host cannot join at the moment: {error}."))
            self._bell.ring()
        else:
            self._thread = thread

    def take(self) -> JoinedHead:
        """Return the head that the ended attempt has joined; raise the error with which it has failed."""
        if self._thread.ident is not None:
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
            return  # it still looks up a name, and will ring the bell, which must stay open
        for result in self._results:
            if isinstance(result, JoinedHead):
                result.connection.close()
        self._bell.close()

    def _run(self) -> None:
        try:
            self._results.append(self._join(self._cancellation))
        except CancelledError:
            return
        except Exception as error:  # of any kind: `take` raises it in the worker's thread
            self._results.append(error)
        self._bell.ring()

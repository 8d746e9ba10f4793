"""Writes to standard output and error from a thread: a stopped terminal or a full disk holds up nobody [R16].

    say ──▶ [ what waits, bounded ] ──one after the other──▶ thread ──▶ descriptor
                   │ full, or the write fails
                   └──▶ counted, and said once something can be written again

`penstock worker` and `penstock serve` speak in this way: their loops have heartbeats to send. The thread
holds no lock of Python's streams, so that a program can end while the thread is held up.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TextIO, cast

from penstock.cli.terminal import Invocation

MAX_WAITING = 1000
CLOSE_S = 1.0  # for what is left to be written


class _Text(NamedTuple):
    stream: TextIO
    text: str


class OutputThread:
    """Writes texts in their order, without ever keeping anybody waiting.

    Args:
        invocation: has the streams to write to.
        say_dropped: writes to a stream how many texts were not written; by default a line.
        max_waiting: texts that wait at most.

    Attributes:
        invocation: the one given, but its output and errors are written by the thread.
    """

    def __init__(
        self,
        invocation: Invocation,
        say_dropped: Callable[[TextIO, int], None] | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._stdout = PlainStream.of(invocation.stdout)
        self._say_dropped = say_dropped or _say_dropped
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[_Text] = deque()
        self._num_dropped = 0  # behind all that wait
        self._is_idle, self._is_closed = True, False
        self._num_unsaid = 0  # dropped before what is written now; of the thread alone
        self.invocation = replace(
            invocation,
            stdout=cast(TextIO, _QueuedStream(self._stdout, self._show)),
            stderr=cast(TextIO, _QueuedStream(PlainStream.of(invocation.stderr), self._show)),
        )
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all is written, for so long at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Give what waits so long to be written, and end. A thread that is held up ends with the process."""
        is_settled = self.settle(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if is_settled:
            self._thread.join(timeout_s)  # others may have spoken meanwhile, and hold it up

    def _show(self, text: _Text) -> None:
        """Have it written; where too many wait it is dropped, and counted."""
        with self._changed:
            if len(self._waiting) < self._max_waiting and not self._num_dropped:
                self._waiting.append(text)
            else:
                self._num_dropped += 1
            self._is_idle = False
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._is_closed:
            texts, num_dropped = self._await_texts()
            for each in texts:
                self._put(each)
            self._num_unsaid += num_dropped
            self._make_up()
        self._note_idle()

    def _note_idle(self) -> None:
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()

    def _await_texts(self) -> tuple[deque[_Text], int]:
        """Return what waits, once something does, and how many were dropped behind it."""
        with self._changed:
            if not self._waiting and not self._num_dropped:
                self._note_idle()
            self._changed.wait_for(lambda: self._waiting or self._num_dropped or self._is_closed)
            texts, self._waiting = self._waiting, deque()
            num_dropped, self._num_dropped = self._num_dropped, 0
            return texts, num_dropped

    def _put(self, each: _Text) -> None:
        """Write a text behind the word of those that were dropped before it."""
        try:
            if self._make_up():
                each.stream.write(each.text)
                each.stream.flush()
                return
        except OSError:
            pass  # as where a word cannot be written
        self._num_unsaid += 1

    def _make_up(self) -> bool:
        """Say what was dropped, if anything was; whether nothing is left to be said."""
        try:
            if self._num_unsaid:
                self._say_dropped(self._stdout, self._num_unsaid)
                self._num_unsaid = 0
        except OSError:  # with the next text perhaps
            return False
        return True


def _say_dropped(stream: TextIO, count: int) -> None:
    stream.write(f"lines lost because the output was blocked: {count}\n")
    stream.flush()


class _QueuedStream(io.TextIOBase):
    """A stream whose texts are written later.

    Args:
        stream: where they are written in the end.
        show: takes them.
    """

    def __init__(self, stream: TextIO, show: Callable[[_Text], None]) -> None:
        self._stream = stream
        self._show = show

    def write(self, text: str) -> int:
        """Have the text written."""
        self._show(_Text(self._stream, text))
        return len(text)

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream.isatty()


class PlainStream(io.TextIOBase):
    """A text stream that writes to a descriptor at once and has no buffer: nothing of it is left at the end.

    Args:
        stream: whose descriptor it is; stays the caller's.
    """

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"

    @classmethod
    def of(cls, stream: TextIO) -> TextIO:
        """Return one for the stream, or the stream itself where it has no descriptor."""
        try:
            return cast(TextIO, cls(stream))  # of files it has the methods that are used here
        except (OSError, AttributeError, ValueError):
            return stream

    def write(self, text: str) -> int:
        """Write all of it; raises OSError where that cannot be."""
        left = memoryview(text.encode(self._encoding, "backslashreplace"))
        while left:
            left = left[os.write(self._fd, left) :]
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Return True."""
        return True

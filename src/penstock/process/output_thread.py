"""Writes output and errors from a thread: a stopped terminal or a full disk blocks no other thread [R16].

    say ──▶ [ texts that wait, bounded ] ──one after the other──▶ thread ──▶ descriptor
                   │ full, or the write fails
                   └──▶ the text is dropped; a line says how many were, once something can be written again

`penstock worker`, `penstock serve` and its API process write in this way, since their loops must send
heartbeats, or answers, in time. The thread holds no lock of Python's streams, so that a program can end while
the thread is blocked.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TextIO, cast

MAX_WAITING = 1000
CLOSE_S = 1.0  # most time to write at the end what still waits
DROPPED = "lines lost because the output was blocked"


class _Text(NamedTuple):
    stream: TextIO
    text: str


def dropped_text(count: int) -> str:
    """Return the line that says how many texts were not written, as plain text."""
    return f"{DROPPED}: {count}\n"


class OutputThread:
    """Writes texts in their order; a caller never waits for a text to be written.

    Args:
        stdout, stderr: the streams to write to.
        dropped_line: returns the line that says on `stdout` how many texts were not written.
        max_waiting: most texts that wait; further texts are dropped.

    Attributes:
        stdout, stderr: streams in place of those given; the thread writes what they take.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        dropped_line: Callable[[int], str] = dropped_text,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._stdout = PlainStream.of(stdout)
        self._dropped_line = dropped_line
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[_Text] = deque()
        self._num_dropped = 0  # texts that were dropped after all that wait
        self._is_idle, self._is_closed = True, False
        self._num_unsaid = 0  # texts dropped before the one that is written now; only the thread uses this
        self.stdout = cast(TextIO, _QueuedStream(self._stdout, self._show))
        self.stderr = cast(TextIO, _QueuedStream(PlainStream.of(stderr), self._show))
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all texts are written, for `timeout_s` at most; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let the thread write what waits, for `timeout_s` at most, and end it.

        A thread that is still blocked then ends with the process.
        """
        is_settled = self.settle(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if is_settled:
            self._thread.join(timeout_s)  # with a limit: a text that came meanwhile may block the thread

    def _show(self, text: _Text) -> None:
        """Let a text wait to be written; drop it if too many wait, or the one before was dropped."""
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
        """Wait for texts, and return those that wait and how many were dropped after them."""
        with self._changed:
            if not self._waiting and not self._num_dropped:
                self._note_idle()
            self._changed.wait_for(lambda: self._waiting or self._num_dropped or self._is_closed)
            texts, self._waiting = self._waiting, deque()
            num_dropped, self._num_dropped = self._num_dropped, 0
            return texts, num_dropped

    def _put(self, each: _Text) -> None:
        """Write a text, after a line about texts that were dropped before it. Drop it if that fails."""
        try:
            if self._make_up():
                each.stream.write(each.text)
                each.stream.flush()
                return
        except OSError:
            pass  # the text is dropped, as it is if the line cannot be written
        self._num_unsaid += 1

    def _make_up(self) -> bool:
        """Write how many texts were dropped, if any were. Return False if that cannot be written now."""
        try:
            if self._num_unsaid:
                self._stdout.write(self._dropped_line(self._num_unsaid))
                self._stdout.flush()
                self._num_unsaid = 0
        except OSError:  # tried again before the next text
            return False
        return True


class _QueuedStream(io.TextIOBase):
    """A stream whose texts are written later.

    Args:
        stream: the stream to which the texts are written in the end.
        show: takes each text, with that stream.
    """

    def __init__(self, stream: TextIO, show: Callable[[_Text], None]) -> None:
        self._stream = stream
        self._show = show

    def write(self, text: str) -> int:
        """Pass the text on without waiting until it is written."""
        self._show(_Text(self._stream, text))
        return len(text)

    def isatty(self) -> bool:
        """Return whether texts are written to a terminal."""
        return self._stream.isatty()


class PlainStream(io.TextIOBase):
    """A text stream that writes to a descriptor at once. It has no buffer, so nothing is left at the end.

    Args:
        stream: the stream whose descriptor is used; the caller keeps it open.
    """

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"

    @classmethod
    def of(cls, stream: TextIO) -> TextIO:
        """Return a plain stream for the stream, or the stream itself if it has no descriptor."""
        try:
            return cast(TextIO, cls(stream))  # it has those methods of files that are used here
        except (OSError, AttributeError, ValueError):
            return stream

    def write(self, text: str) -> int:
        """Write the whole text. Raises `OSError` if it cannot be written."""
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

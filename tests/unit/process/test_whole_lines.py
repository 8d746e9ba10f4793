"""Lines through a pipe that takes few bytes at once: none is cut, and none goes into another."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator

import pytest

from penstock.process.whole_lines import WholeLines

PIPE_BYTES = os.sysconf("SC_PAGE_SIZE")  # the least that a pipe holds
LONG = b"x" * (3 * PIPE_BYTES) + b"\n"
WAIT_S = 10.0  # a bound for hangs, never waited for


class Pipe:
    """A pipe of one page. `reading` is closed by the test where that is needed."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.is_read = True

    def read(self) -> bytes:
        """What the pipe holds now."""
        return os.read(self.reading, PIPE_BYTES)

    def leave(self) -> None:
        os.close(self.reading)
        self.is_read = False

    def rest(self) -> bytes:
        """All that comes until the writing end is closed, which this closes."""
        os.close(self.writing)
        self.writing = -1
        with os.fdopen(self.reading, "rb") as pipe:
            self.is_read = False
            return pipe.read()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    if pipe.is_read:
        os.close(pipe.reading)
    if pipe.writing >= 0:
        os.close(pipe.writing)


def test_the_rest_of_a_long_line_goes_before_the_next_line(pipe: Pipe) -> None:
    lines = WholeLines(pipe.writing)
    lines.write(LONG)
    received = pipe.read()
    assert len(received) == PIPE_BYTES, "all that the pipe holds"
    for _ in range(3):
        lines.write(b"a\n")  # writes what fits of the rest
        received += pipe.read()
    lines.write(b"b\n")
    assert received + pipe.rest() == LONG + b"a\nb\n"


def test_a_line_of_which_the_pipe_takes_nothing_is_dropped_whole(pipe: Pipe) -> None:
    lines = WholeLines(pipe.writing)
    full = b"x" * (PIPE_BYTES - 1) + b"\n"
    lines.write(full)
    lines.write(b"dropped\n")
    lines.write(LONG, limit_s=0.001)
    assert pipe.read() == full
    lines.write(b"next\n")
    assert pipe.rest() == b"next\n"


def test_a_line_that_is_waited_for_comes_whole_to_a_reader_that_comes_late(pipe: Pipe) -> None:
    lines = WholeLines(pipe.writing)
    lines.write(b"x" * (PIPE_BYTES - 1) + b"\n")
    writer = threading.Thread(target=lines.write, args=(LONG, WAIT_S))
    writer.start()
    received = b""
    while not received.endswith(LONG):
        received += pipe.read()
    writer.join()
    assert pipe.rest() == b""


def test_no_thread_writes_into_the_line_of_another(pipe: Pipe) -> None:
    lines = WholeLines(pipe.writing)
    texts = [bytes([letter]) * (PIPE_BYTES + 7) + b"\n" for letter in b"abcd"]
    writers = [
        threading.Thread(target=lambda text=text: [lines.write(text, WAIT_S) for _ in range(5)])
        for text in texts
    ]
    for writer in writers:
        writer.start()
    received = b""
    while len(received) < sum(5 * len(text) for text in texts):
        received += pipe.read()
    for writer in writers:
        writer.join()
    assert sorted(received.splitlines(keepends=True)) == sorted(5 * texts)


def test_a_reader_that_leaves_ends_the_wait(pipe: Pipe) -> None:
    lines = WholeLines(pipe.writing)
    writer = threading.Thread(target=lines.write, args=(LONG, WAIT_S))
    writer.start()
    assert len(pipe.read()) == PIPE_BYTES
    pipe.leave()
    writer.join(WAIT_S / 2)
    assert not writer.is_alive()
    lines.write(b"nobody reads this\n")


def test_another_pipe_begins_with_a_whole_line(pipe: Pipe) -> None:
    lines = WholeLines(pipe.writing)
    lines.write(LONG)
    other = Pipe()
    lines.move_to(other.writing)
    lines.write(b"first\n")
    assert other.read() == b"first\n"
    for fd in (other.reading, other.writing):
        os.close(fd)

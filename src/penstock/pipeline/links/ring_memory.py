"""A ring of frames in memory that two processes share, and the two semaphores that say which frames are full.

The module owns bytes and waiting; what a frame holds is the business of `pipeline.links.ring` and
`pipeline.links.ring_channel`. The host makes a ring with `create_ring` and hands its file descriptors to two
processes. The memory has no name in the file system, so that nothing is left behind however the processes
end. A ring has one writer and one reader. No torch here.

    word 0: magic   word 1: frames written so far   word 2: closed      then the frames
    data_fd  counts frames that are written and not yet taken;  the reader takes, the writer gives
    space_fd counts frames that are free;                       the writer takes, the reader gives

A wait first looks, then spins for some microseconds without the interpreter lock, then sleeps in poll(2). The
side that leaves sets `closed` and wakes the waiters of both semaphores. If a process dies, its host does the
same from outside (`end_ring`), so that the process at the other end returns at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack

from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.frame import padded
from penstock.process.endpoints import RingHandle

_MAGIC = 0x50454E53544F434B
_WORDS_BYTES = 4096  # the words have a page of their own, so frames begin on a page
_WORD_MAGIC, _WORD_WRITTEN, _WORD_CLOSED = 0, 8, 16  # one cache line each
_SPIN_NS = 20_000  # a sleeping wait costs 40 us more than a spinning one, so that spinning must be shorter


def create_ring(frame_bytes: int, num_frames: int) -> RingHandle:
    """Create a ring: its memory, and the two semaphores that count full and free frames.

    Args:
        frame_bytes: largest frame (`frame.frame_bytes`).
        num_frames: most frames under way at once, at least 1.

    Returns:
        The ring's file descriptors, inheritable. The caller closes them with `close_handle` once the two
        processes have them.
    """
    assert min(frame_bytes, num_frames) > 0, (frame_bytes, num_frames)
    frame_bytes = padded(frame_bytes)
    with ExitStack() as undo:  # closes what was made, if there are no more descriptors or there is no memory
        memory_fd = os.memfd_create("penstock-link", os.MFD_ALLOW_SEALING)
        undo.callback(os.close, memory_fd)
        os.ftruncate(memory_fd, _WORDS_BYTES + frame_bytes * num_frames)
        # Sealed in size: no peer can shrink the memory under the other's feet (SIGBUS).
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, seals)
        os.pwrite(memory_fd, _MAGIC.to_bytes(8, "little"), _WORD_MAGIC * 8)
        data_fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
        undo.callback(os.close, data_fd)
        space_fd = os.eventfd(num_frames, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
        undo.pop_all()
    return RingHandle(
        memory_fd=memory_fd,
        data_fd=data_fd,
        space_fd=space_fd,
        frame_bytes=frame_bytes,
        num_frames=num_frames,
    )


def close_handle(handle: RingHandle) -> None:
    """Close this process's descriptors of a ring; a `Ring` that was made of them has its own copies."""
    for fd in handle.fds:
        os.close(fd)


def end_ring(handle: RingHandle) -> None:
    """Close a ring from outside, so that both ends stop waiting.

    Only the maker of the ring, which still has its descriptors, may call it.
    """
    # The word `closed` before the wake-up, as in `Ring.close`.
    os.pwrite(handle.memory_fd, (1).to_bytes(8, "little"), _WORD_CLOSED * 8)
    for fd in (handle.data_fd, handle.space_fd):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(fd, 1)


class Ring:
    """One end of a ring of frames in shared memory: either its writer or its reader.

    Args:
        handle: from `create_ring`, with the descriptors that this process has got. They are duplicated.
        name: for error messages, such as "stage 0 -> stage 1".
    """

    def __init__(self, handle: RingHandle, name: str) -> None:
        self.name = name
        self.frame_bytes = handle.frame_bytes
        self.num_frames = handle.num_frames
        self._memory = memoryview(_map(handle, name))
        self._words = self._memory[:_WORDS_BYTES].cast("Q")
        self._data = _Semaphore(handle.data_fd)
        self._space = _Semaphore(handle.space_fd)
        self._num_passed = 0  # frames that this end has written or read

    @property
    def frames(self) -> memoryview:
        """The memory of all frames: frame i begins at `i * frame_bytes`."""
        return self._memory[_WORDS_BYTES:]

    @property
    def data_fd(self) -> int:
        """The descriptor that is readable while there is a frame to read, or the writer has gone."""
        return self._data.fd

    @property
    def closed(self) -> bool:
        return self._words[_WORD_CLOSED] != 0

    def reserve(self, timeout_s: float, purpose: str) -> int:
        """Wait until the next frame is free to be written, and return its index.

        The reader has then released the frame that was in this place before, so that its memory may be
        written over [C6] [C8].

        Args:
            timeout_s: deadline, from now.
            purpose: what is waited for, for the error, such as "step 7".

        Raises:
            LinkClosedError: the reader has gone.
            WaitTimeoutError: the reader has not made room in time.
        """
        if not self._space.take(timeout_s, self._must_stop_writing):
            raise self._timed_out(timeout_s, f"room for {purpose}")
        self._raise_if(self._must_stop_writing(), purpose)
        return self._num_passed % self.num_frames

    def await_room(self, timeout_s: float, purpose: str) -> None:
        """Wait until `reserve` would return at once; raise as it does."""
        self.reserve(timeout_s, purpose)
        self._space.give()  # this end is the only writer, so that the room stays

    def publish(self) -> None:
        """Give the frame that was reserved, and has been filled, to the reader."""
        self._num_passed += 1
        # The count before the semaphore: a reader that finds the ring closed knows by this count whether a
        # frame is left. If it were woken first, it could miss this frame.
        self._words[_WORD_WRITTEN] = self._num_passed
        self._data.give()

    def take(self, timeout_s: float, purpose: str) -> int:
        """Wait for the next frame to read, and return its index; frames written before a close still come.

        Raises:
            LinkClosedError: the writer has gone and no frame is left.
            WaitTimeoutError: no frame came in time.
        """
        index = self.take_if_any(timeout_s, purpose)
        if index is None:
            raise self._timed_out(timeout_s, purpose)
        return index

    def take_if_any(self, timeout_s: float, purpose: str) -> int | None:
        """Return the index of the next frame to read, or None when none came in time; 0 s only looks.

        Raises `LinkClosedError` as `take` does.
        """
        if not self._data.take(timeout_s, self._must_stop_reading):
            return None
        self._raise_if(self._must_stop_reading(), purpose)
        return self._num_passed % self.num_frames

    def release(self) -> None:
        """Give the frame that was read last back to the writer, which may fill it again."""
        self._num_passed += 1
        self._space.give()

    def write(self, data: bytes, timeout_s: float, purpose: str) -> None:
        """Write `data`, at most `frame_bytes` long, as one frame; wait and raise as `reserve` does."""
        begin = self.reserve(timeout_s, purpose) * self.frame_bytes
        self.frames[begin : begin + len(data)] = data
        self.publish()

    def read(self, timeout_s: float, purpose: str) -> bytes:
        """Return a copy of the next frame, all `frame_bytes` of it; wait and raise as `take` does."""
        begin = self.take(timeout_s, purpose) * self.frame_bytes
        # Copied before the release: from then on the writer may fill the frame again.
        data = bytes(self.frames[begin : begin + self.frame_bytes])
        self.release()
        return data

    def close(self) -> None:
        """Tell both ends that no frame follows, and wake any that waits. May be called twice."""
        if self._data.is_closed:
            return
        # The word `closed` before the wake-up: an end that is woken, and does not see the word, takes the
        # wake-up for a frame.
        self._words[_WORD_CLOSED] = 1
        for semaphore in (self._data, self._space):
            semaphore.give()
            semaphore.close()

    def _must_stop_writing(self) -> bool:
        return self.closed

    def _must_stop_reading(self) -> bool:
        nothing_left = self._words[_WORD_WRITTEN] == self._num_passed
        return self._data.is_closed or (self.closed and nothing_left)

    def _raise_if(self, gone: bool, purpose: str) -> None:
        if gone:
            raise LinkClosedError(f"link {self.name} was closed by the other end before {purpose}.")

    def _timed_out(self, timeout_s: float, purpose: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"link {self.name}: waited {timeout_s:g} s for {purpose} in vain.")


class _Semaphore:
    """An eventfd in semaphore mode, waited for with a deadline."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def give(self) -> None:
        os.eventfd_write(self._fd, 1)

    def take(self, timeout_s: float, must_stop: Callable[[], bool]) -> bool:
        """Wait until the semaphore can be counted down, and do so, or until `must_stop` returns True.

        Returns:
            Whether one of the two came within `timeout_s` seconds.
        """
        started = time.monotonic_ns()
        deadline = started + int(timeout_s * 1e9)
        while not must_stop():
            try:
                os.eventfd_read(self._fd)
                return True
            except BlockingIOError:
                pass
            now = time.monotonic_ns()
            if now >= deadline:
                return False
            spinning = now - started < _SPIN_NS
            self._poll.poll(0 if spinning else (deadline - now) / 1e6 + 1)
        return True

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def _map(handle: RingHandle, name: str) -> mmap.mmap:
    expected = _WORDS_BYTES + handle.frame_bytes * handle.num_frames
    size = os.fstat(handle.memory_fd).st_size
    if size != expected:
        raise ProtocolError(f"memory of link {name} has {size} bytes, expected {expected}.")
    memory = mmap.mmap(handle.memory_fd, expected)
    if int.from_bytes(memory[_WORD_MAGIC * 8 : _WORD_MAGIC * 8 + 8], "little") != _MAGIC:
        raise ProtocolError(f"memory of link {name} does not hold a ring of frames.")
    return memory

"""The carrier between hosts: a link over a stream; a stage computes on while its frames are under way.

    stage 0 ─copies─▶ free frame ─writes─▶ TCP ─thread reads─▶ free frame ─copies─▶ stage 1

Each end has memory for `num_frames` frames, made once and used again.

- At the sending end, the stage writes a short frame itself, as far as the kernel takes it without waiting. On
  a host whose CPU cores all compute, a thread that was woken would get its turn milliseconds later. A thread
  of the link writes long frames, and the rest of short ones. So the stage goes on at once, and waits only
  while all frames are under way.
- At the receiving end, a thread reads ahead into free frames, so that a frame is there when the stage comes
  to it. Nothing is sent back to say that frames are free: a full receiver stops reading, and TCP's own window
  stops the sender. So the link holds the frames of both ends, and what the kernels buffer between them.

A frame on the wire is the frame of `pipeline.links.frame_memory`, with nothing around it: its header says
how long it is. Headers are compared as soon as they have come. If the stream ends within a frame, the link
counts as closed, and the part of the frame that has come is not used.

Several streams for one link (striping) would go below `_write` and `_read`, the only functions that read and
write the stream in a thread.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final

from torch import Tensor

from penstock.errors import LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.frame import ALIGNMENT, FrameHeader
from penstock.pipeline.links.frame_memory import FrameMemory
from penstock.pipeline.links.link import Carrier
from penstock.pipeline.links.stream import Stream
from penstock.pipeline.links.stream_opening import StreamThread
from penstock.process.endpoints import StreamLinkHandle
from penstock.trace.phases import NOBODYS, Phase, PhaseClock

_OVER: Final = -1  # in place of the index of a frame: no more frames come
DIRECT_BYTES: Final = 1 << 18  # the longest frame that the stage writes itself: it takes 0.2 ms to encrypt
Indices = SimpleQueue[int]


def open_stream_link(handle: StreamLinkHandle, name: str, timeout_s: float) -> StreamSender | StreamReceiver:
    """Return the end of a link that the handle describes: a sender or a receiver.

    Args:
        name, timeout_s: as for `link_carriers.open_link`.

    Raises:
        ProtocolError: the credentials or names that make the stream safe cannot be used.
    """
    return _ENDS[handle.direction](handle, name, timeout_s)


class _StreamLink(Carrier):
    """The base of both ends of a link: the memory of frames, and the reason why the link has ended."""

    def __init__(self, handle: StreamLinkHandle, name: str, timeout_s: float) -> None:
        self._name = f"link {name}"
        self._timeout_s = timeout_s
        self._num_frames = handle.num_frames
        memory = mmap.mmap(-1, handle.frame_bytes * handle.num_frames)
        self._memory = FrameMemory(memoryview(memory), handle.frame_bytes, name)
        self._error: PeerError | None = None  # why nothing follows

    def _take(self, queue: Indices, deadline: float, purpose: str) -> int:
        """Return the next index of a queue; raise `Link`'s errors at the deadline or when the link ends."""
        try:
            index = queue.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            raise WaitTimeoutError(
                f"{self._name}: waited {self._timeout_s:g} s for {purpose} in vain."
            ) from None
        if index == _OVER:
            queue.put(_OVER)  # put back, so that the next call finds the end, too
            raise self._ended(purpose)
        return index

    def _ended(self, purpose: str) -> PeerError:
        """Return the reason why the link has ended, and add what was being waited for."""
        error = self._error or LinkClosedError(f"{self._name} has ended.")
        return type(error)(
            f"{error.message} It ended before {purpose}.", remedy=error.remedy, code=error.code
        )


class StreamSender(_StreamLink):
    """The sending end of a link between hosts, over a stream.

    Args:
        handle: as the host has handed it over; its descriptors stay the caller's.
        name: for error messages, such as "stage 0 -> stage 1".
        timeout_s: deadline of every wait for a free frame.
    """

    def __init__(self, handle: StreamLinkHandle, name: str, timeout_s: float) -> None:
        super().__init__(handle, name, timeout_s)
        self._free: Indices = SimpleQueue()
        self._filled: Indices = SimpleQueue()
        self._unsent = [memoryview(b"")] * self._num_frames  # by index: what is left to write of the frame
        self._stream: Stream | None = None  # once there is one
        self._num_handed = 0  # frames that the thread was given: counted by the stage alone
        self._num_written = 0  # of those: counted by the thread alone
        for index in range(self._num_frames):
            self._free.put(index)
        self._thread = StreamThread(handle.path, self._name, self._write, self._end)

    @property
    def is_sending(self) -> bool:
        """Whether a frame has not been given to the kernel whole. Implements `Link.is_sending`."""
        return self._free.qsize() < self._num_frames

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        """Copy the tensors into a free frame; write it if it is short, else leave it to the link's thread.

        Implements `Link.send_frame`.
        """
        self._memory.check_size(header, tensors)
        clock.await_device()  # else the copy below would wait for the GPU, which would count as copying
        before = clock.begin(Phase.WAIT_NEXT)
        purpose = f"room for {header.purpose}"
        self._raise_if_over(purpose)
        index = self._take(self._free, monotonic() + self._timeout_s, purpose)
        clock.begin(Phase.COMM)
        self._memory.fill(index, header, tensors)
        self._unsent[index] = self._memory.frame(index)[: ALIGNMENT + header.payload_bytes]
        if self._is_written_at_once(index):
            self._free.put(index)
        else:
            self._num_handed += 1
            self._filled.put(index)
        clock.begin(before)

    def close(self) -> None:
        """Stop the thread and close the stream; frames sent before leave if the kernel takes them at once."""
        self._filled.put(_OVER)
        self._thread.close()

    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        raise AssertionError(f"{self._name} only sends at this end")

    def _raise_if_over(self, purpose: str) -> None:
        if self._error is not None:
            raise self._ended(purpose)
        if self._thread.has_lost_peer():  # the thread itself sleeps until it has a frame
            raise LinkClosedError(f"{self._name} was closed before {purpose}.")

    def _is_written_at_once(self, index: int) -> bool:
        """Write a short frame if the thread has no earlier one to write; return whether all of it went.

        While the thread has frames, it alone may write. Otherwise this frame could overtake them, and two
        threads would use the stream at the same time.
        """
        unsent, stream = self._unsent[index], self._stream
        is_threads = self._num_handed != self._num_written
        if stream is None or is_threads or len(unsent) > DIRECT_BYTES:
            return False
        with contextlib.suppress(OSError):  # the thread gets the same error, and keeps it as the reason
            while unsent and (count := stream.try_write(unsent)) is not None:
                unsent = unsent[count:]
        self._unsent[index] = unsent
        return not unsent

    def _write(self, stream: Stream) -> None:
        self._stream = stream
        while (index := self._filled.get()) != _OVER:
            stream.write(self._unsent[index])
            # Counted only once the whole frame is written: from then on the stage may use the stream itself.
            # The frame is free only after that, so that the stage does not fill it while it is being sent.
            self._num_written += 1
            self._free.put(index)

    def _end(self, error: PeerError) -> None:
        # The reason before the wake-up: the stage reads it as soon as it is woken.
        self._error = error
        self._free.put(_OVER)


class StreamReceiver(_StreamLink):
    """The receiving end of a link between hosts, over a stream; its thread reads frames ahead.

    Args:
        handle, name: as for `StreamSender`.
        timeout_s: deadline of every wait for a frame.
    """

    def __init__(self, handle: StreamLinkHandle, name: str, timeout_s: float) -> None:
        super().__init__(handle, name, timeout_s)
        self._is_closed = False
        self._free: Indices = SimpleQueue()
        self._announced: Indices = SimpleQueue()  # frames whose header is there
        self._whole: Indices = SimpleQueue()  # the same frames, once their payload is there, too
        for index in range(self._num_frames):
            self._free.put(index)
        self._thread = StreamThread(handle.path, self._name, self._read, self._end)

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        raise AssertionError(f"{self._name} only receives at this end")

    def close(self) -> None:
        """Stop the thread and close the stream; frames that the stage has not taken are dropped."""
        self._is_closed = True
        self._free.put(_OVER)
        self._thread.close()

    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        self._memory.check_size(header, out)
        before, deadline = clock.begin(Phase.WAIT_PREV), monotonic() + self._timeout_s
        if self._is_closed:
            raise self._ended(header.purpose)
        index = self._take(self._announced, deadline, header.purpose)
        self._memory.check_header(index, header, requests)
        # The queues are taken from in pairs: each frame is announced once, and is whole once, in the same
        # order.
        self._take(self._whole, deadline, header.purpose)
        clock.await_device()  # as for a send; a last stage that sampled nothing has not waited for its GPU
        clock.begin(Phase.COMM)
        try:
            self._memory.empty(index, header, out, requests)
        finally:  # a step that has failed is not the end of the link
            self._free.put(index)
            clock.begin(before)

    def _read(self, stream: Stream) -> None:
        while (index := self._free.get()) != _OVER:
            frame = self._memory.frame(index)
            if not stream.read(frame[:ALIGNMENT]):
                return
            try:
                payload, done = frame[ALIGNMENT : self._frame_end(frame)], 0
                if payload:  # a short one has mostly come with its header: then the stage need not wait twice
                    done = stream.try_read(payload) or 0
            finally:
                self._announced.put(index)
            if not stream.read(payload[done:]):
                return
            self._whole.put(index)

    def _frame_end(self, frame: memoryview) -> int:
        """Return where a frame ends, by its header; the stage checks everything else in the header."""
        end = ALIGNMENT + FrameHeader.unpack(frame).payload_bytes
        if end > len(frame):
            raise ProtocolError(
                f"{self._name} received a frame of {end} bytes, but its frames hold {len(frame)}.",
                remedy="Start all processes with the same max_num_batched_tokens.",
            )
        return end

    def _end(self, error: PeerError) -> None:
        # The reason before the wake-up: the stage reads it as soon as it is woken.
        self._error = error
        self._whole.put(_OVER)
        self._announced.put(_OVER)


_ENDS: Final[Mapping[str, type[StreamSender | StreamReceiver]]] = {"out": StreamSender, "in": StreamReceiver}

"""The carrier between processes of one host: a link through a ring of frames in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.pipeline.links.frame import FrameHeader
from penstock.pipeline.links.frame_memory import FrameMemory
from penstock.pipeline.links.link import Carrier
from penstock.pipeline.links.ring_memory import Ring
from penstock.process.endpoints import RingHandle
from penstock.trace.phases import NOBODYS, Phase, PhaseClock


class SharedMemoryLink(Carrier):
    """A link between two processes of a host, through a ring of frames in memory that both map.

    Args:
        handle: as the host has handed it over.
        name: for error messages, such as "stage 0 -> stage 1".
        timeout_s: deadline of every wait for a frame or for room.
    """

    def __init__(self, handle: RingHandle, name: str, timeout_s: float) -> None:
        self._ring = Ring(handle, name)
        self._timeout_s = timeout_s
        self._memory = FrameMemory(self._ring.frames, self._ring.frame_bytes, name)

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        self._memory.check_size(header, tensors)
        clock.await_device()  # else the copy below would wait for the GPU, which would count as copying
        ring, before = self._ring, clock.begin(Phase.WAIT_NEXT)
        index = ring.reserve(self._timeout_s, header.purpose)
        clock.begin(Phase.COMM)
        self._memory.fill(index, header, tensors)
        ring.publish()
        clock.begin(before)

    def close(self) -> None:
        self._ring.close()

    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        self._memory.check_size(header, out)
        ring, before = self._ring, clock.begin(Phase.WAIT_PREV)
        index = ring.take(self._timeout_s, header.purpose)
        clock.await_device()  # as for a send; a last stage that sampled nothing has not waited for its GPU
        clock.begin(Phase.COMM)
        self._memory.check_header(index, header, requests)
        try:
            self._memory.empty(index, header, out, requests)
        finally:  # a step that has failed is not the end of the link
            ring.release()
            clock.begin(before)

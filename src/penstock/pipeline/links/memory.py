"""The carrier between threads of one process: a link in memory, the twin of `pipeline.links.ring`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition
from weakref import WeakValueDictionary

from torch import Tensor

from penstock.errors import LinkClosedError, WaitTimeoutError
from penstock.pipeline.links.frame import FrameHeader, FrameKind, check_header, failed_step
from penstock.pipeline.links.link import Carrier, check_shapes, stage_in
from penstock.process.endpoints import MemoryHandle
from penstock.trace.phases import NOBODYS, Phase, PhaseClock

_numbers = itertools.count()
_links: WeakValueDictionary[int, MemoryLink] = WeakValueDictionary()


class MemoryLink(Carrier):
    """A link in memory between two threads, which both hold this one object.

    Args:
        name, timeout_s: as for `SharedMemoryLink`.
        num_frames: most frames under way at once.

    Attributes:
        handle: identifies the link in this process, as long as any thread refers to the link.
    """

    def __init__(self, name: str, timeout_s: float, num_frames: int = 1) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._num_frames = num_frames
        self._frames: deque[tuple[FrameHeader, list[Tensor]]] = deque()
        self._changed = Condition()
        self._closed = False
        self.handle = MemoryHandle(number=next(_numbers))
        _links[self.handle.number] = self

    @classmethod
    def known_by(cls, handle: MemoryHandle, name: str, timeout_s: float) -> MemoryLink:
        """Return the link that a thread of this process has made: both ends are this one object.

        Args:
            handle: `handle` of the link.
            name, timeout_s: given by `open_link`, as to every carrier; the link keeps those it was made with.

        Raises:
            LinkClosedError: no thread of this process holds such a link any more.
        """
        link = _links.get(handle.number)
        if link is None:
            raise LinkClosedError(f"link {name}: its memory is closed or belongs to another process.")
        return link

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        check_shapes(header, tensors)
        purpose = f"room for {header.purpose}"
        before = clock.begin(Phase.WAIT_NEXT)
        with self._changed:
            self._wait(lambda: self._closed or len(self._frames) < self._num_frames, purpose)
            self._raise_if(self._closed, purpose)
            clock.begin(Phase.COMM)
            self._frames.append((header, [tensor.clone() for tensor in tensors]))
            self._changed.notify_all()
        clock.begin(before)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        check_shapes(header, out)
        purpose = header.purpose
        before = clock.begin(Phase.WAIT_PREV)
        with self._changed:
            self._wait(lambda: bool(self._frames) or self._closed, purpose)
            self._raise_if(not self._frames, purpose)
            received, tensors = self._frames.popleft()
            self._changed.notify_all()
        clock.begin(Phase.COMM)
        check_header(header, received, self._name, requests)
        if received.kind is FrameKind.FAILED:
            raise failed_step(header, stage_in(tensors[0]))
        for target, tensor in zip(out, tensors, strict=True):
            target.copy_(tensor)
        clock.begin(before)

    def _wait(self, ready: Callable[[], bool], purpose: str) -> None:
        if not self._changed.wait_for(ready, self._timeout_s):
            raise WaitTimeoutError(f"link {self._name}: waited {self._timeout_s:g} s for {purpose} in vain.")

    def _raise_if(self, gone: bool, purpose: str) -> None:
        if gone:
            raise LinkClosedError(f"link {self._name} was closed by the other end before {purpose}.")

"""Links: how the hidden states of a step get from one stage to the next.

`pipeline.ports` sends and receives through the `Link` seam. Two carriers: `SharedMemoryLink` between
processes of one host, `MemoryLink` between threads (ranks in one process, tests). Both copy on `send`, so the
caller may write over its tensors at once (row C6), and both check the header of a frame before they touch its
payload.

There is no metadata message: header, shapes and dtype follow from the plan on both ends. Tensors without
elements are not copied (row C3); their frame still crosses, because an empty plan visits every stage. A link
of n frames is n receives posted ahead: the sender runs n steps ahead of a busy receiver and then waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.child_config import LinkHandle
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.kernels.views import KeptViews
from penstock.models.intermediate import IntermediateTensors
from penstock.pipeline.frame import ALIGNMENT, FrameHeader, check_header, check_packed, padded
from penstock.pipeline.ring_memory import Ring
from penstock.trace.phases import NOBODYS, Phase, PhaseClock


class RecvHandle:
    """A receive that has been posted; `wait` does it, once, however often it is called (row DR9)."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        self._fetch = fetch
        self._outcome: Exception | bool = False  # False: not waited yet; True: here; else the failure

    @property
    def is_done(self) -> bool:
        return self._outcome is not False

    def wait(self) -> None:
        """Block until the tensors given to `recv` are filled; raises what the link raised, each time."""
        if self._outcome is False:
            try:
                self._fetch()
                self._outcome = True
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome


class Link(Protocol):
    """One direction between two neighbouring stages; frames arrive in the order in which they were sent."""

    def send(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        """Copy the tensors into the link; they may be written over when this returns.

        Args:
            clock: is told what is waiting and what is copying.

        Raises:
            WaitTimeoutError: the receiver has not made room before the deadline.
            LinkClosedError: the receiver has gone.
        """
        ...

    def recv(
        self,
        header: FrameHeader,
        out: Sequence[Tensor],
        requests: Sequence[str] = (),
        clock: PhaseClock = NOBODYS,
    ) -> RecvHandle:
        """Post the receive of the frame that `header` describes into `out`. Does not block.

        Args:
            header: what the frame must carry.
            out: contiguous tensors [header.num_tokens, header.width] to fill.
            requests: ids named in the error if another frame comes.
            clock: as for `send`.

        The handle's `wait` raises `ProtocolError`, `WaitTimeoutError` or `LinkClosedError`.
        """
        ...

    def close(self) -> None:
        """Tell the other end that nothing follows, and wake it if it waits. May be called twice."""
        ...


class AsyncIntermediateTensors(IntermediateTensors):
    """Intermediate tensors still under way: the first access to `tensors` waits, no other does (row C4).

    Args:
        tensors: the buffers that the receive fills.
        handle: of the receive.
        postprocess: run once, after the wait, in order.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        handle: RecvHandle,
        postprocess: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._buffers = tensors
        self._handle = handle
        self._pending = list(postprocess)

    @property
    def tensors(self) -> dict[str, Tensor]:  # type: ignore[override]
        self._handle.wait()
        while self._pending:
            self._pending.pop(0)()
        return self._buffers


class _Carrier(ABC):
    """What all carriers share: a receive that is posted is done when it is waited for."""

    def recv(
        self,
        header: FrameHeader,
        out: Sequence[Tensor],
        requests: Sequence[str] = (),
        clock: PhaseClock = NOBODYS,
    ) -> RecvHandle:
        return RecvHandle(lambda: self._fetch(header, out, requests, clock))

    @abstractmethod
    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        """Wait for the frame and copy it into `out`, as `Link.recv` says."""


class _Place(NamedTuple):
    """Which tensors in which frame of a ring."""

    frame: int
    num_tokens: int
    width: int
    dtype: torch.dtype
    num_tensors: int


class SharedMemoryLink(_Carrier):
    """A link through a ring of frames that two processes map.

    Args:
        handle: as inherited from the supervisor.
        name: for messages, such as "stage 0 -> stage 1".
        timeout_s: deadline of every wait.
    """

    def __init__(self, handle: LinkHandle, name: str, timeout_s: float) -> None:
        self._ring = Ring(handle, name)
        self._frames = self._ring.frames
        self._timeout_s = timeout_s
        self._bytes = torch.frombuffer(self._frames, dtype=torch.uint8)
        self._places: KeptViews[_Place, list[Tensor]] = KeptViews(self._view)

    def send(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        _check_size(header, tensors, self._ring.frame_bytes)
        ring, before = self._ring, clock.begin(Phase.WAIT_NEXT)
        index = ring.reserve(self._timeout_s, header.purpose)
        clock.begin(Phase.COMM)
        begin = index * ring.frame_bytes
        self._frames[begin : begin + ALIGNMENT] = header.pack()
        if header.num_tokens:
            for place, tensor in zip(self._places_of(index, header, tensors), tensors, strict=True):
                place.copy_(tensor)
        ring.publish()
        clock.begin(before)

    def close(self) -> None:
        self._ring.close()

    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        _check_size(header, out, self._ring.frame_bytes)
        ring, before = self._ring, clock.begin(Phase.WAIT_PREV)
        index = ring.take(self._timeout_s, header.purpose)
        clock.begin(Phase.COMM)
        begin = index * ring.frame_bytes
        found = self._frames[begin : begin + ALIGNMENT]
        check_packed(header, found, ring.name, requests)
        if header.num_tokens:
            for tensor, place in zip(out, self._places_of(index, header, out), strict=True):
                tensor.copy_(place)
        ring.release()
        clock.begin(before)

    def _places_of(self, index: int, header: FrameHeader, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Where the tensors lie in the frame, behind its header."""
        return self._places.of(
            _Place(index, header.num_tokens, header.width, tensors[0].dtype, header.num_tensors)
        )

    def _view(self, at: _Place) -> list[Tensor]:
        places = []
        begin = at.frame * self._ring.frame_bytes + ALIGNMENT
        num_bytes = at.num_tokens * at.width * at.dtype.itemsize
        for _ in range(at.num_tensors):
            raw = self._bytes[begin : begin + num_bytes]
            places.append(raw.view(at.dtype).view(at.num_tokens, at.width))
            begin += padded(num_bytes)
        return places


class MemoryLink(_Carrier):
    """The in-memory twin: one object that both threads hold.

    Args:
        name, timeout_s: as for `SharedMemoryLink`.
        num_frames: frames that may be under way at once.
    """

    def __init__(self, name: str, timeout_s: float, num_frames: int = 1) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._num_frames = num_frames
        self._frames: deque[tuple[FrameHeader, list[Tensor]]] = deque()
        self._changed = Condition()
        self._closed = False

    def send(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        _check_shapes(header, tensors)
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
        _check_shapes(header, out)
        purpose = header.purpose
        before = clock.begin(Phase.WAIT_PREV)
        with self._changed:
            self._wait(lambda: bool(self._frames) or self._closed, purpose)
            self._raise_if(not self._frames, purpose)
            found, tensors = self._frames.popleft()
            self._changed.notify_all()
        clock.begin(Phase.COMM)
        check_header(header, found, self._name, requests)
        for target, tensor in zip(out, tensors, strict=True):
            target.copy_(tensor)
        clock.begin(before)

    def _wait(self, ready: Callable[[], bool], purpose: str) -> None:
        if not self._changed.wait_for(ready, self._timeout_s):
            raise WaitTimeoutError(
                f"link {self._name}: waited {self._timeout_s:g} s for {purpose}, and it did not come."
            )

    def _raise_if(self, gone: bool, purpose: str) -> None:
        if gone:
            raise LinkClosedError(f"link {self._name} was closed by the other end before {purpose}.")


def _check_shapes(header: FrameHeader, tensors: Sequence[Tensor]) -> None:
    """Own tensors must be what the own header says, else the other end would believe a lie (row DR2)."""
    shape, dtype = (header.num_tokens, header.width), getattr(torch, header.dtype)
    assert len(tensors) == header.num_tensors, (len(tensors), header)
    for tensor in tensors:
        assert tensor.shape == shape, (tensor.shape, header)
        assert tensor.dtype == dtype, (tensor.dtype, header)


def _check_size(header: FrameHeader, tensors: Sequence[Tensor], capacity: int) -> None:
    _check_shapes(header, tensors)
    needed = ALIGNMENT + len(tensors) * padded(tensors[0].nbytes)
    if needed > capacity:
        raise ProtocolError(
            f"step {header.step_id} needs a frame of {needed} bytes, but the link's frames hold {capacity}.",
            remedy="Start all processes with the same max_num_batched_tokens.",
        )

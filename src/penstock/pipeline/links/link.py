"""The interface of links, which carry the hidden states of a step from one stage to the next.

`pipeline.ports` sends and receives through `Link`. The carriers: `SharedMemoryLink` between
processes of one host, `StreamSender` and `StreamReceiver` between hosts, `MemoryLink` between threads
(ranks in one process, tests). All copy on `send_frame`, so the caller may write over its tensors at once
[C6], and all check the header of a frame before they touch its payload. A payload that leaves its
process bears a checksum (`frame.payload_checksum`), which the receiver checks before it fills a tensor.

There is no metadata message: header, shapes and dtype follow from the plan on both ends. Tensors without
elements are not copied [C3]; their frame still crosses, because an empty plan visits every stage. A
link has memory for n frames: the sender can run n steps ahead of a busy receiver, and then waits. A stream
between hosts has n frames at each end, and holds some more bytes in the kernels' buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.models.intermediate import IntermediateTensors
from penstock.pipeline.links.frame import FrameHeader
from penstock.trace.phases import NOBODYS, PhaseClock


class RecvHandle:
    """A receive that was prepared: the first `wait` does it, and later ones repeat its outcome [DR9]."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        self._fetch = fetch
        self._outcome: Exception | bool = False  # False: not waited yet; True: here; else the failure

    def wait(self) -> None:
        """Block until the tensors of the receive are filled; raise what the link raised, each time."""
        if self._outcome is False:
            try:
                self._fetch()
                self._outcome = True
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome


class Link(Protocol):
    """A one-way link between a rank and one of the next stage; frames (a step's tensors) arrive in order."""

    @property
    def is_sending(self) -> bool:
        """Whether a frame that was sent here has not left this process yet; any thread may read it."""
        ...

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        """Wait for room in the link, and copy the tensors into it; the caller may then write over them.

        Args:
            header: what the frame carries, by the plan.
            tensors: [header.num_tokens, header.width] each.
            clock: measures waiting and copying.

        Raises:
            WaitTimeoutError: the receiver has not made room before the deadline.
            LinkClosedError: the receiver has gone.
        """
        ...

    def receive_frame(
        self,
        header: FrameHeader,
        out: Sequence[Tensor],
        requests: Sequence[str] = (),
        clock: PhaseClock = NOBODYS,
    ) -> RecvHandle:
        """Prepare to receive the frame that `header` describes into `out`; the handle's `wait` does it.

        Args:
            header: what the frame must carry, by the plan.
            out: contiguous tensors [header.num_tokens, header.width] to fill.
            requests: ids named in the error if another frame comes.
            clock: as for `send_frame`.

        This call does not block. The handle's `wait` leaves `out` as it was when it raises an error:

        - `ProtocolError`: another frame came, or the payload of this one has changed on its way
        - `WaitTimeoutError`, `LinkClosedError`: no frame came in time, or the sender has gone
        - `PlanMemoryError`: a stage before has not computed the step; the link can be used further
        """
        ...

    def close(self) -> None:
        """Tell the other end that nothing follows, and wake it if it waits. May be called twice."""
        ...


class AsyncIntermediateTensors(IntermediateTensors):
    """The tensors of a step that may not have arrived yet: the first access to `tensors` waits [C4].

    Args:
        tensors: the buffers that the receive fills.
        handle: handle of the receive.
        postprocess: functions to run once after the wait, in this order.
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


class Carrier(ABC):
    """The base class of all carriers, which implement `Link`; a frame is received when its handle waits."""

    @property
    def is_sending(self) -> bool:
        """Always False here, since shared memory has no wire to leave by; see `Link.is_sending`."""
        return False

    def receive_frame(
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
        """Wait for the frame and copy it into `out`, as `Link.receive_frame` says."""


def check_shapes(header: FrameHeader, tensors: Sequence[Tensor]) -> None:
    """Assert that the tensors at this end have the number, the shape and the dtype that the header says.

    Otherwise the other end would trust a header that is wrong [DR2].
    """
    shape, dtype = (header.num_tokens, header.width), getattr(torch, header.dtype)
    assert len(tensors) == header.num_tensors, (len(tensors), header)
    for tensor in tensors:
        assert tensor.shape == shape, (tensor.shape, header)
        assert tensor.dtype == dtype, (tensor.dtype, header)


def stage_in(payload: Tensor) -> int | None:
    """Return the number of the stage that has failed, which a frame of kind `FAILED` carries.

    Args:
        payload: the frame's first tensor; if it has no elements, None is returned.
    """
    return int(payload.flatten()[0]) if payload.numel() else None

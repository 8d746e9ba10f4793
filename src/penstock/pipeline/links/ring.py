"""The carrier between processes of one host: a link through a ring of frames in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ProtocolError
from penstock.kernels.views import KeptViews
from penstock.pipeline.links.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    FrameHeader,
    check_packed,
    check_payload,
    padded,
    payload_checksum,
)
from penstock.pipeline.links.link import Carrier, check_shapes
from penstock.pipeline.links.ring_memory import Ring
from penstock.process.endpoints import RingHandle
from penstock.trace.phases import NOBODYS, Phase, PhaseClock


class FrameSlot(NamedTuple):
    """Which tensors in which frame of a ring."""

    frame: int
    num_tokens: int
    width: int
    dtype: torch.dtype
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the tensors of a frame lie, behind its header: as tensors and as bytes."""

    tensors: list[Tensor]
    parts: list[memoryview]


class SharedMemoryLink(Carrier):
    """A link through a ring of frames that two processes map.

    Args:
        handle: as the host has handed it over.
        name: for messages, such as "stage 0 -> stage 1".
        timeout_s: deadline of every wait.
    """

    def __init__(self, handle: RingHandle, name: str, timeout_s: float) -> None:
        self._ring = Ring(handle, name)
        self._frames = self._ring.frames
        self._timeout_s = timeout_s
        self._bytes = torch.frombuffer(self._frames, dtype=torch.uint8)
        self._payloads: KeptViews[FrameSlot, Payload] = KeptViews(self._view)

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        _check_size(header, tensors, self._ring.frame_bytes)
        clock.await_device()  # else a copy from a GPU would wait for it, and that would count as copying
        ring, before = self._ring, clock.begin(Phase.WAIT_NEXT)
        index = ring.reserve(self._timeout_s, header.purpose)
        clock.begin(Phase.COMM)
        begin = index * ring.frame_bytes
        payload = self._payload_of(index, header, tensors)
        if header.num_tokens:
            for slot, tensor in zip(payload.tensors, tensors, strict=True):
                slot.copy_(tensor)
        self._frames[begin : begin + ALIGNMENT] = header.pack() + payload_checksum(payload.parts)
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
        clock.await_device()  # as for a send; a last stage that has sampled nothing has not waited yet
        clock.begin(Phase.COMM)
        begin = index * ring.frame_bytes
        check_packed(header, self._frames[begin : begin + HEADER_BYTES], ring.name, requests)
        payload = self._payload_of(index, header, out)
        checksum = self._frames[begin + HEADER_BYTES : begin + ALIGNMENT]
        check_payload(header, checksum, payload.parts, ring.name, requests)
        if header.num_tokens:
            for tensor, slot in zip(out, payload.tensors, strict=True):
                tensor.copy_(slot)
        ring.release()
        clock.begin(before)

    def _payload_of(self, index: int, header: FrameHeader, tensors: Sequence[Tensor]) -> Payload:
        return self._payloads.of(
            FrameSlot(index, header.num_tokens, header.width, tensors[0].dtype, header.num_tensors)
        )

    def _view(self, at: FrameSlot) -> Payload:
        views, parts = [], []
        begin = at.frame * self._ring.frame_bytes + ALIGNMENT
        num_bytes = at.num_tokens * at.width * at.dtype.itemsize
        for _ in range(at.num_tensors):
            raw = self._bytes[begin : begin + num_bytes]
            views.append(raw.view(at.dtype).view(at.num_tokens, at.width))
            parts.append(self._frames[begin : begin + num_bytes])
            begin += padded(num_bytes)
        return Payload(views, parts)


def _check_size(header: FrameHeader, tensors: Sequence[Tensor], capacity: int) -> None:
    check_shapes(header, tensors)
    needed = ALIGNMENT + len(tensors) * padded(tensors[0].nbytes)
    if needed > capacity:
        raise ProtocolError(
            f"step {header.step_id} needs a frame of {needed} bytes, but the link's frames hold {capacity}.",
            remedy="Start all processes with the same max_num_batched_tokens.",
        )

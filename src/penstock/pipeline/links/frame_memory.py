"""The frames of a link in memory: tensors are copied in behind a header, and out once they are checked.

All carriers whose payloads leave a process share this module (`pipeline.links.ring`,
`pipeline.links.stream_link`), so that a frame is the same bytes in shared memory and on a wire. Nothing here
waits.
"""

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
    failed_step,
    is_failed,
    padded,
    payload_checksum,
)
from penstock.pipeline.links.link import check_shapes, stage_in


class FrameSlot(NamedTuple):
    """Names the views of the tensors in a frame, so that later steps find these views and make no new ones.

    A frame is the memory in a link that holds the tensors of one step, each [num_tokens, width].

    Attributes:
        frame: index of the frame in its link.
    """

    frame: int
    num_tokens: int
    width: int
    dtype: torch.dtype
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Payload:
    """The views of a frame's payload, which comes behind its header: each tensor, and its bytes."""

    tensors: list[Tensor]
    parts: list[memoryview]


class FrameMemory:
    """The memory of a link's frames, one after the other; tensors are copied into it and out of it.

    Args:
        frames: the memory; frame i begins at `i * frame_bytes`.
        name: name of the link, for error messages.
    """

    def __init__(self, frames: memoryview, frame_bytes: int, name: str) -> None:
        self._frames, self._frame_bytes, self._name = frames, frame_bytes, name
        self._bytes = torch.frombuffer(frames, dtype=torch.uint8)
        self._payloads: KeptViews[FrameSlot, Payload] = KeptViews(self._view)

    def frame(self, index: int) -> memoryview:
        """Return the memory of one frame, all `frame_bytes` of it."""
        begin = index * self._frame_bytes
        return self._frames[begin : begin + self._frame_bytes]

    def check_size(self, header: FrameHeader, tensors: Sequence[Tensor]) -> None:
        """Raise `ProtocolError` if a frame of this memory is too small for the tensors."""
        check_shapes(header, tensors)
        needed = ALIGNMENT + len(tensors) * padded(tensors[0].nbytes)
        if needed > self._frame_bytes:
            raise ProtocolError(
                f"step {header.step_id} needs a frame of {needed} bytes, but the link's frames hold "
                f"{self._frame_bytes}.",
                remedy="Start all processes with the same max_num_batched_tokens.",
            )

    def fill(self, index: int, header: FrameHeader, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into a frame, and write header and checksum before them."""
        payload = self._payload_of(index, header, tensors)
        if header.num_tokens:
            for slot, tensor in zip(payload.tensors, tensors, strict=True):
                slot.copy_(tensor)
        begin = index * self._frame_bytes
        # After the payload is in its place: the checksum is that of the copied bytes.
        self._frames[begin : begin + ALIGNMENT] = header.pack() + payload_checksum(payload.parts)

    def check_header(self, index: int, header: FrameHeader, requests: Sequence[str]) -> None:
        """Raise `ProtocolError` unless frame `index` has this header, or says that the step has failed.

        The frame's payload may still be under way.
        """
        begin = index * self._frame_bytes
        check_packed(header, self._frames[begin : begin + HEADER_BYTES], self._name, requests)

    def empty(self, index: int, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str]) -> None:
        """Check the payload of a frame and copy it into the tensors `out`; an error leaves `out` as it was.

        Raises:
            ProtocolError: the payload has changed on its way.
            PlanMemoryError: the frame says that a stage before has not computed the step.
        """
        payload = self._payload_of(index, header, out)
        begin = index * self._frame_bytes
        checksum = self._frames[begin + HEADER_BYTES : begin + ALIGNMENT]
        # All checks come before the first copy, so that an error leaves `out` as it was.
        check_payload(header, checksum, payload.parts, self._name, requests)
        if is_failed(self._frames[begin : begin + HEADER_BYTES]):
            raise failed_step(header, stage_in(payload.tensors[0]))
        if header.num_tokens:
            for tensor, slot in zip(out, payload.tensors, strict=True):
                tensor.copy_(slot)

    def _payload_of(self, index: int, header: FrameHeader, tensors: Sequence[Tensor]) -> Payload:
        return self._payloads.of(
            FrameSlot(index, header.num_tokens, header.width, tensors[0].dtype, header.num_tensors)
        )

    def _view(self, at: FrameSlot) -> Payload:
        views, parts = [], []
        begin = at.frame * self._frame_bytes + ALIGNMENT
        num_bytes = at.num_tokens * at.width * at.dtype.itemsize
        for _ in range(at.num_tensors):
            raw = self._bytes[begin : begin + num_bytes]
            views.append(raw.view(at.dtype).view(at.num_tokens, at.width))
            parts.append(self._frames[begin : begin + num_bytes])
            begin += padded(num_bytes)
        return Payload(views, parts)

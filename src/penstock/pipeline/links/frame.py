"""The header and the checksum that go before the tensors of every frame, and the size of a frame.

Both ends of a link compute the header: of hidden states from the plan, of weights from what is to be sent.
Before it reads a byte of the payload, the receiver compares its header with the one that has come [DR1] [DR2]
[d1]. If the frame comes from another process, the receiver also computes the payload's checksum, and compares
it with the one in the frame, before it copies the payload out. Called by the carriers of links (`link` has
their interface) and, for the size of a link's frames, by `engine.supervisor.launch`. No torch here.

    0       4     6      8       12       16     24           28      32      34        36      56         64
    | magic | ver | kind | epoch | digest | step | num_tokens | width | dtype | tensors | zeros | checksum |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import xxhash

from penstock.errors import MEMORY_REMEDY, PlanMemoryError, ProtocolError, concerned

ALIGNMENT = 64  # of the payload and of every tensor in a frame: one cache line
HEADER_BYTES = 56  # the checksum follows, and then, at offset `ALIGNMENT`, the payload
CHANGED_REMEDY = "The request runs again; if the error repeats, test the memory of the host."
NUM_CARRIED = 1  # tensors in a frame: hidden states, to which the stage has added the residual stream

_MAGIC = b"PSTK"
_VERSION = 3
_LAYOUT = struct.Struct("<4sHHIIQIIHH")
_KIND = struct.Struct("<H")
_CHECKSUM = struct.Struct("<Q")
_DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3}
_DTYPE_NAMES = {code: name for name, code in _DTYPES.items()}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class FrameKind(IntEnum):
    """The kinds of contents of a frame: hidden states, weights, or word that the step was not computed."""

    HIDDEN = 1  # hidden states with the residual stream added, [num_tokens, width]
    WEIGHT = 2  # rows of an embedding, before the first plan; `step_id` is the frame's number
    # The step was not computed; in place of hidden states the frame has the number of the stage that failed.
    # The value differs from the others in five bits, so one or two flipped bits cannot turn it into another.
    FAILED = 60


_KINDS = {kind.value for kind in FrameKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """The header of a frame: which step the frame belongs to, and which tensors it has.

    Both ends make the header of hidden states from their own plans. If the plans differ, the headers do.
    """

    epoch: int
    step_id: int
    kind: FrameKind
    num_tokens: int
    width: int  # elements of one token in one tensor
    dtype: str
    num_tensors: int
    digest: int  # of the plan and all plans before it in the epoch (`pipeline.decision_log`)

    def pack(self) -> bytes:
        """Return the header as it stands at the beginning of a frame, `HEADER_BYTES` bytes."""
        packed = _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            self.epoch,
            self.digest,
            self.step_id,
            self.num_tokens,
            self.width,
            _DTYPES[self.dtype],
            self.num_tensors,
        )
        return packed.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, frame: bytes | memoryview) -> FrameHeader:
        """Read the header of a frame.

        Raises:
            ProtocolError: this build writes no such magic number, version, kind or dtype.
        """
        magic, version, kind, epoch, digest, step_id, num_tokens, width, dtype, num_tensors = (
            _LAYOUT.unpack_from(frame)
        )
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError(
                f"frame starts with {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}.",
                remedy="Run the same Penstock version on both ends.",
            )
        if kind not in _KINDS or dtype not in _DTYPE_NAMES:
            raise ProtocolError(f"frame of unknown kind {kind} or dtype {dtype}.")
        return cls(
            epoch=epoch,
            step_id=step_id,
            kind=FrameKind(kind),
            num_tokens=num_tokens,
            width=width,
            dtype=_DTYPE_NAMES[dtype],
            num_tensors=num_tensors,
            digest=digest,
        )

    @property
    def as_failed(self) -> FrameHeader:
        """The header of the frame that is sent if the step's hidden states were not computed.

        The header of a frame of weights stays as it is.
        """
        return replace(self, kind=FrameKind.FAILED) if self.kind is FrameKind.HIDDEN else self

    @property
    def purpose(self) -> str:
        """The contents of the frame in words, for messages."""
        is_weight = self.kind is FrameKind.WEIGHT
        return f"weight block {self.step_id}" if is_weight else f"the hidden states of step {self.step_id}"

    @property
    def payload_bytes(self) -> int:
        """The size in bytes of all tensors that the header names, each padded to `ALIGNMENT`."""
        return self.num_tensors * padded(self.num_tokens * self.width * _ITEM_BYTES[self.dtype])

    def differences(self, received: FrameHeader) -> list[str]:
        """Return, as text, the fields in which `received` differs from what this header promised."""
        return [
            f"{field.name} expected {getattr(self, field.name)}, found {getattr(received, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(received, field.name)
        ]


def check_header(expected: FrameHeader, received: FrameHeader, link: str, requests: Sequence[str]) -> None:
    """Raise `ProtocolError` naming link, step and requests unless `received` is the expected header.

    A header that says that the same step has failed passes too.
    """
    if received not in (expected, expected.as_failed):
        raise _not_of_this_step(expected, "; ".join(expected.differences(received)), link, requests)


def check_packed(
    expected: FrameHeader, received: bytes | memoryview, link: str, requests: Sequence[str]
) -> None:
    """Check a header in its packed form (`FrameHeader.pack`).

    Raises in the same cases as `check_header`, and if bytes that must be zero are not.
    """
    if received == expected.pack() or received == expected.as_failed.pack():
        return
    try:
        unpacked = FrameHeader.unpack(received)
    except ProtocolError as error:
        why = error.message.rstrip(".")
        raise _not_of_this_step(expected, why, link, requests, error.remedy) from error
    check_header(expected, unpacked, link, requests)
    raise _not_of_this_step(expected, "the bytes after the header are not zeros", link, requests)


def is_failed(received: bytes | memoryview) -> bool:
    """Return whether a packed header says that the step was not computed."""
    return bool(_KIND.unpack_from(received, len(_MAGIC) + 2)[0] == FrameKind.FAILED)


def failed_step(header: FrameHeader, stage: int | None) -> PlanMemoryError:
    """Return the error of a step that an earlier stage has not computed, because it had no memory left.

    Args:
        stage: number of that stage, as the frame says; None if the frame is too small to say it.
    """
    who = "a stage" if stage is None else f"stage {stage}"
    return PlanMemoryError(
        f"{who} had no memory left for step {header.step_id}.", remedy=MEMORY_REMEDY, stage=stage
    )


def payload_checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the 8 bytes of a payload's checksum (XXH3-64).

    The checksum of each part is the seed for that of the next one.

    Args:
        parts: the bytes of the tensors, without padding.
    """
    checksum = 0
    for part in parts:
        checksum = xxhash.xxh3_64_intdigest(part, checksum)
    return _CHECKSUM.pack(checksum)


def check_payload(
    expected: FrameHeader,
    received: bytes | memoryview,
    parts: Iterable[bytes | memoryview],
    link: str,
    requests: Sequence[str],
) -> None:
    """Raise `ProtocolError` naming link, step and requests if the payload has changed on its way.

    Args:
        received: the checksum that came with the frame.
        parts: as for `payload_checksum`.
    """
    if received != payload_checksum(parts):
        raise ProtocolError(
            f"link {link} delivered {expected.purpose}, but its bytes were changed in transit: the checksum "
            f"does not match.{concerned(requests)}",
            remedy=CHANGED_REMEDY,
        )


def _not_of_this_step(
    expected: FrameHeader, why: str, link: str, requests: Sequence[str], remedy: str = ""
) -> ProtocolError:
    return ProtocolError(
        f"link {link} delivered a wrong frame for step {expected.step_id}: {why}.{concerned(requests)}",
        remedy=remedy,
    )


def padded(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to the alignment of a frame."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def frame_bytes(*, max_num_tokens: int, width: int, itemsize: int, num_tensors: int = NUM_CARRIED) -> int:
    """Return the bytes of the largest frame of a link, if steps have up to `max_num_tokens` tokens."""
    return ALIGNMENT + num_tensors * padded(max_num_tokens * width * itemsize)

"""Cuts the payloads of bulk channels into chunks, each with a checksum.

A chunk bears the payload's name, its own offset in the payload, and a checksum (XXH3-64) of the payload's
bytes from the beginning to the end of the chunk. So a chunk that is changed, lost, repeated or out of order
is noticed at once, and not at the end of a long payload. A chunk is one message of a channel, and fits one
frame of a ring.

    0      4     6      8         16       24         32       32 + n
    | mark | ver | n    | bytes   | offset | checksum | name   | data of the chunk ...
                        of the payload
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from penstock.errors import ProtocolError
from penstock.pipeline.links.ring_channel import ONE_FRAME_BYTES

Bytes: TypeAlias = bytes | bytearray | memoryview
MAX_NAME_BYTES = 255

_MARK = b"PSTB"
_VERSION = 1
_LAYOUT = struct.Struct("<4sHHQQQ")
_REMEDY = "Run the same Penstock version on both ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk: a part of a bulk channel's payload, which is sent as one message.

    Attributes:
        name, payload_bytes: name and length of the whole payload.
        offset: where the chunk's data begin in the payload.
        checksum: of the payload's bytes up to the end of this chunk.
        data: the payload's bytes from `offset` on that are in this chunk.
    """

    name: str
    payload_bytes: int
    offset: int
    checksum: int
    data: Bytes

    @property
    def end(self) -> int:
        """The offset in the payload at which the chunk's data end."""
        return self.offset + len(self.data)

    def pack(self) -> bytes:
        """Return the chunk in its wire format."""
        name = self.name.encode()
        head = _LAYOUT.pack(_MARK, _VERSION, len(name), self.payload_bytes, self.offset, self.checksum)
        return b"".join((head, name, self.data))

    @classmethod
    def unpack(cls, message: bytes) -> Chunk:
        """Return the chunk that a message holds; raise `ProtocolError` for what this build does not write."""
        if len(message) < _LAYOUT.size:
            raise ProtocolError(f"a chunk of {len(message)} bytes has no head.", remedy=_REMEDY)
        mark, version, name_bytes, payload_bytes, offset, checksum = _LAYOUT.unpack_from(message)
        begin = _LAYOUT.size + name_bytes
        if (mark, version) != (_MARK, _VERSION) or begin > len(message):
            raise ProtocolError(
                f"a chunk begins with {mark!r} version {version}, expected {_MARK!r} version {_VERSION}.",
                remedy=_REMEDY,
            )
        try:
            name = message[_LAYOUT.size : begin].decode()
        except UnicodeDecodeError:
            raise ProtocolError("the name of a payload is not text.", remedy=_REMEDY) from None
        data = memoryview(message)[begin:]
        return cls(name=name, payload_bytes=payload_bytes, offset=offset, checksum=checksum, data=data)


def chunks_of(name: str, payload: Bytes) -> Iterator[Chunk]:
    """Yield the chunks of a payload, in order; an empty payload is one chunk without data.

    Args:
        name: at most `MAX_NAME_BYTES` in UTF-8.
        payload: is not copied before a chunk is packed.
    """
    room = max_data_bytes(name)
    view = memoryview(payload).cast("B")
    checksum = xxhash.xxh3_64()
    for offset in range(0, max(1, len(view)), room):
        data = view[offset : offset + room]
        checksum.update(data)
        yield Chunk(
            name=name, payload_bytes=len(view), offset=offset, checksum=checksum.intdigest(), data=data
        )


def max_data_bytes(name: str) -> int:
    """Return the most bytes of a payload of this name that one chunk holds."""
    name_bytes = len(name.encode())
    assert 0 < name_bytes <= MAX_NAME_BYTES, name
    return ONE_FRAME_BYTES - _LAYOUT.size - name_bytes

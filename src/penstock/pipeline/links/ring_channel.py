"""A one-way channel of messages over a ring: samples and results on their way back, on one host.

It implements `MessageChannel` in one direction. Unlike a zmq socket it needs no thread, and it touches little
memory. That matters right after a forward pass, when nothing of it is in the CPU's caches. A message begins
with its length and its checksum (XXH3-64); if it is longer than a frame, it goes on in the frames behind. The
channel does not notice that the other end was killed. The supervisor does, and ends the ring from outside
(`ring_memory.end_ring`), so that this end raises `LinkClosedError`.
"""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from penstock.errors import ProtocolError
from penstock.pipeline.links.channel import SEND_TIMEOUT_S
from penstock.pipeline.links.frame import CHANGED_REMEDY
from penstock.pipeline.links.ring_memory import Ring, create_ring
from penstock.process.endpoints import RingHandle

FRAME_BYTES = 16 * 1024  # the samples of a thousand rows; log-probabilities take several
_LEAST_FRAMES = 16
_ROW_BYTES = 16  # most bytes of a sampled row in a message
_HEAD = struct.Struct("<QQ")  # length and checksum
ONE_FRAME_BYTES = FRAME_BYTES - _HEAD.size  # length of the longest message that fits one frame
_LONG_S = 3600.0  # of one wait in a `recv` without limit, which then waits again


def create_channel_ring(num_messages: int, num_rows: int) -> RingHandle:
    """Create the shared memory of one channel, for the two processes that are to get its descriptors.

    Args:
        num_messages: most messages that may wait in the ring unread. An earlier stage takes samples only when
            a plan consumes them, and the last stage must not have to wait for that.
        num_rows: most sampled rows of a message.
    """
    frames_each = -(-(_HEAD.size + num_rows * _ROW_BYTES) // FRAME_BYTES) + 1
    return create_ring(FRAME_BYTES, max(_LEAST_FRAMES, num_messages * frames_each))


class RingChannel:
    """One end of a one-way channel over a ring: its writer only sends, its reader only receives.

    Args:
        handle: from `create_channel_ring`, with the descriptors that this process has got.
        name: for error messages, such as "stage 1 -> stage 0, samples".
    """

    def __init__(self, handle: RingHandle, name: str) -> None:
        self._ring = Ring(handle, name)
        self._frames = self._ring.frames
        self._purpose = f"a message of {name}"
        self._parts = bytearray()  # of the message that is coming

    def fileno(self) -> int:
        """Return a descriptor, readable while there is a message to receive or the writer has gone."""
        return self._ring.data_fd

    def pollables(self) -> list[Any]:
        """Return the descriptor of `fileno` alone. Implements `PolledChannel.pollables`."""
        return [self.fileno()]

    def filenos(self) -> list[int]:
        """Return the descriptor of `fileno` alone. Implements `PolledChannel.filenos`."""
        return [self.fileno()]

    def await_room(self, timeout_s: float) -> None:
        """Wait until a message of one frame could be sent at once; raise as `send` does."""
        self._ring.await_room(timeout_s, self._purpose)

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Write one message into the ring; a long one takes several frames, and may wait for each.

        Implements `MessageChannel.send`.
        """
        message = _HEAD.pack(len(frame), xxhash.xxh3_64_intdigest(frame)) + frame
        for begin in range(0, len(message), FRAME_BYTES):
            self._ring.write(message[begin : begin + FRAME_BYTES], timeout_s, self._purpose)

    def recv(self, timeout_s: float | None) -> bytes | None:
        """Return the next message, or None when it was not whole in time; the next call then goes on with it.

        Implements `MessageChannel.recv`. Raises `ProtocolError`, too, if the message has changed on its way.
        """
        while not self._is_whole():
            index = self._ring.take_if_any(_LONG_S if timeout_s is None else timeout_s, self._purpose)
            if index is not None:
                begin = index * self._ring.frame_bytes
                # Copied before the release: from then on the writer may fill the frame again.
                self._parts += self._frames[begin : begin + FRAME_BYTES]
                self._ring.release()
            elif timeout_s is not None:
                return None
        length, checksum = _HEAD.unpack_from(self._parts)
        message = bytes(self._parts[_HEAD.size : _HEAD.size + length])
        self._parts.clear()
        if xxhash.xxh3_64_intdigest(message) != checksum:
            raise ProtocolError(
                f"{self._purpose} was changed in transit: its checksum does not match.", remedy=CHANGED_REMEDY
            )
        return message

    def _is_whole(self) -> bool:
        """Return whether all of a message has come; its first frame has the whole head."""
        return len(self._parts) > 0 and len(self._parts) >= _HEAD.size + _HEAD.unpack_from(self._parts)[0]

    def close(self) -> None:
        """Close the ring, which wakes the other end; messages written before can still be read there."""
        self._ring.close()

"""Messages of any length over a ring: samples and results on their way back, on one host.

One direction of a `MessageChannel`. Needs no thread of its own, unlike a socket of zmq, and touches little
memory, which counts behind a forward pass that has emptied the caches. A message begins with its length; a
long one goes on in the frames behind. That the other end was killed is not noticed here: the supervisor is.
"""

from __future__ import annotations

from typing import Any

from penstock.pipeline.links.channel import SEND_TIMEOUT_S
from penstock.pipeline.links.ring_memory import Ring, create_ring
from penstock.process.endpoints import RingHandle

FRAME_BYTES = 16 * 1024  # the samples of a thousand rows; log-probabilities take several
_LEAST_FRAMES = 16
_ROW_BYTES = 16  # of a sampled row in a message, at most
_LENGTH_BYTES = 8
_LONG_S = 3600.0


def create_channel_ring(num_messages: int, num_rows: int) -> RingHandle:
    """The memory of one channel, for the two ends that inherit it.

    Args:
        num_messages: that may be under way while nobody reads: an earlier stage takes samples only when a
            plan consumes them, and the last stage must not wait for that.
        num_rows: sampled rows of a message.
    """
    frames_each = -(-(_LENGTH_BYTES + num_rows * _ROW_BYTES) // FRAME_BYTES) + 1
    return create_ring(FRAME_BYTES, max(_LEAST_FRAMES, num_messages * frames_each))


class RingChannel:
    """One end of a one-way path: its writer only sends, its reader only receives.

    Args:
        handle: from `create_channel_ring`, as inherited.
        name: for messages, such as "stage 1 -> stage 0, samples".
    """

    def __init__(self, handle: RingHandle, name: str) -> None:
        self._ring = Ring(handle, name)
        self._frames = self._ring.frames
        self._purpose = f"a message of {name}"
        self._parts = bytearray()  # of the message that is coming

    def fileno(self) -> int:
        """Readable while there is a message to receive, or the writer has gone."""
        return self._ring.data_fd

    def pollables(self) -> list[Any]:
        """See `PolledChannel`."""
        return [self.fileno()]

    def filenos(self) -> list[int]:
        """See `PolledChannel`."""
        return [self.fileno()]

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """See `MessageChannel.send`."""
        message = len(frame).to_bytes(_LENGTH_BYTES, "little") + frame
        for begin in range(0, len(message), FRAME_BYTES):
            self._ring.write(message[begin : begin + FRAME_BYTES], timeout_s, self._purpose)

    def recv(self, timeout_s: float | None) -> bytes | None:
        """See `MessageChannel.recv`. What has come of a message is kept until the rest is there."""
        while not self._is_whole():
            index = self._ring.take_if_any(_LONG_S if timeout_s is None else timeout_s, self._purpose)
            if index is not None:
                begin = index * self._ring.frame_bytes
                self._parts += self._frames[begin : begin + FRAME_BYTES]
                self._ring.release()
            elif timeout_s is not None:
                return None
        message = bytes(self._parts[_LENGTH_BYTES : _LENGTH_BYTES + self._length()])
        self._parts.clear()
        return message

    def _length(self) -> int:
        return int.from_bytes(self._parts[:_LENGTH_BYTES], "little")

    def _is_whole(self) -> bool:
        return len(self._parts) > 0 and len(self._parts) >= _LENGTH_BYTES + self._length()

    def close(self) -> None:
        """See `MessageChannel.close`."""
        self._ring.close()

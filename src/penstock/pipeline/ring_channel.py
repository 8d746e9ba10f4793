"""Messages of any length over a ring: samples and results on their way back, on one host.

One direction of a `MessageChannel`. Needs no thread of its own, unlike a socket of zmq, and touches little
memory, which counts behind a forward pass that has emptied the caches. A message begins with its length; a
long one goes on in the frames behind. That the other end was killed is not noticed here: the supervisor is.
"""

from __future__ import annotations

from penstock.config import LinkHandle
from penstock.pipeline.channel import SEND_TIMEOUT_S
from penstock.pipeline.ring_memory import Ring, create_ring

FRAME_BYTES = 16 * 1024  # the samples of a thousand rows; log-probabilities take several
NUM_FRAMES = 16
_LENGTH_BYTES = 8
_LONG_S = 3600.0


def create_channel_ring() -> LinkHandle:
    """The memory of one channel, for the two ends that inherit it."""
    return create_ring(FRAME_BYTES, NUM_FRAMES)


class RingChannel:
    """One end of a one-way path: its writer only sends, its reader only receives.

    Args:
        handle: from `create_channel_ring`, as inherited.
        name: for messages, such as "stage 1 -> stage 0, samples".
    """

    def __init__(self, handle: LinkHandle, name: str) -> None:
        self._ring = Ring(handle, name)
        self._frames = self._ring.frames
        self._purpose = f"a message of {name}"

    def fileno(self) -> int:
        """Readable while there is a message to receive, or the writer has gone."""
        return self._ring.data_fd

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """See `MessageChannel.send`."""
        message = len(frame).to_bytes(_LENGTH_BYTES, "little") + frame
        for begin in range(0, len(message), FRAME_BYTES):
            self._ring.write(message[begin : begin + FRAME_BYTES], timeout_s, self._purpose)

    def recv(self, timeout_s: float | None) -> bytes | None:
        """See `MessageChannel.recv`."""
        index = self._ring.take_if_any(_LONG_S if timeout_s is None else timeout_s, self._purpose)
        while index is None:
            if timeout_s is not None:
                return None
            index = self._ring.take_if_any(_LONG_S, self._purpose)
        begin = index * self._ring.frame_bytes
        length = int.from_bytes(self._frames[begin : begin + _LENGTH_BYTES], "little")
        end = min(_LENGTH_BYTES + length, FRAME_BYTES)
        message = bytes(self._frames[begin + _LENGTH_BYTES : begin + end])
        self._ring.release()
        while len(message) < length:
            message += self._ring.read(SEND_TIMEOUT_S, self._purpose)[: length - len(message)]
        return message

    def close(self) -> None:
        """See `MessageChannel.close`."""
        self._ring.close()

"""The messages between the core and the process of a draft model, and the socket between them.

    core ── Asked: tokens that are new, and how many to guess ──▶ drafting process
         ◀── Guessed: what may follow them ──────────────────────

Each message is one packet of a socket pair, which no other process can reach. Torch-free.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from penstock.batch import RowSampling
from penstock.errors import LinkClosedError

MOST_IDS = 8192  # ids of one message: with five bytes each they fit a socket's buffer several times
MOST_GUESSES = 256  # texts of one message
MOST_SAMPLING_BYTES = 1 << 14  # of what a request says of its tokens; one that says more is not guessed
_PACKET_BYTES = 1 << 18
_MOST_QUEUED = 256  # packets, if the other end does not read


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a request that the drafter does not know yet.

    Attributes:
        start: position of the first of them. Guesses from there on are replaced by them.
        wanted: tokens to guess behind them.
        prompt_len, sampling: with the first tokens of a request; how it chooses its tokens.
    """

    request: int
    start: int
    token_ids: Sequence[int]
    wanted: int
    prompt_len: int = 0
    sampling: RowSampling | None = None


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A message of the core. `forgotten`: requests that have ended."""

    asks: list[Ask] = []
    forgotten: list[int] = []


class Guess(msgspec.Struct, frozen=True, array_like=True):
    """All tokens that are guessed to follow the first `num_known` tokens of a request.

    Attributes:
        is_all: no more will be guessed, whatever was asked for: the text is too long, or has no room.
    """

    request: int
    num_known: int
    token_ids: list[int]
    is_all: bool = False


class Guessed(msgspec.Struct, frozen=True, array_like=True):
    """A message of the drafting process, after each of its steps; without guesses it says that it goes on.

    Attributes:
        token_s: seconds that one more token of each takes.
        is_idle: there was nothing left to do.
    """

    guesses: list[Guess] = []
    token_s: float = 0.0
    is_idle: bool = True


Received = TypeVar("Received", Asked, Guessed)


def draft_sockets() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection: the core's and the drafting process'."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class DraftSocket(Generic[Received]):
    """One end of the connection.

    Args:
        end: the socket, which belongs to this object from now on.
        received: type of the messages that come.
    """

    def __init__(self, end: socket.socket, received: type[Received]) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._queue: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Asked | Guessed) -> None:
        """Send a message now, or keep it until `flush`.

        Raises:
            LinkClosedError: the other end is gone, or reads nothing.
        """
        self._queue.append(msgspec.msgpack.encode(message))
        self.flush()
        if len(self._queue) > _MOST_QUEUED:
            raise LinkClosedError("the other end reads no messages.")

    def flush(self) -> None:
        """Send what was kept. Raises as `send` does."""
        try:
            while self._queue:
                self._end.send(self._queue[0])
                self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkClosedError(f"the other end has closed the connection ({error}).") from None

    def receive(self, *, wait: bool = False) -> Iterator[Received]:
        """Yield the messages that have come.

        Args:
            wait: wait for the first, as long as it takes.

        Raises:
            LinkClosedError: the other end is gone.
        """
        self._end.setblocking(wait)
        with contextlib.suppress(BlockingIOError):
            while packet := self._packet():
                self._end.setblocking(False)
                yield self._decoder.decode(packet)
            raise LinkClosedError("the other end has closed the connection.")

    def _packet(self) -> bytes:
        try:
            return self._end.recv(_PACKET_BYTES)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._end.close()

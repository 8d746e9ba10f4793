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
MOST_GUESSES = 256  # guesses of one message, each for one text
MOST_SAMPLING_BYTES = 1 << 14  # of a request's encoded sampling; if it has more, nothing is guessed for it
_PACKET_BYTES = 1 << 18
_MOST_QUEUED = 256  # packets that wait while the other end does not read; with more the connection fails


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a request that the drafting process does not know yet, and how many to guess behind them.

    Attributes:
        request: its arrival number.
        start: position of the first of `token_ids`. They take the place of guesses from there on.
        wanted: how many tokens to guess behind them; 0: more tokens of the request follow.
        prompt_len, sampling: how many tokens the prompt has, and how the request's tokens are chosen. They
            come with the first tokens of a request only.
    """

    request: int
    start: int
    token_ids: Sequence[int]
    wanted: int
    prompt_len: int = 0
    sampling: RowSampling | None = None


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A message of the core.

    Attributes:
        asks: questions, in the order in which they came up.
        forgotten: arrival numbers of requests that have ended.
    """

    asks: list[Ask] = []
    forgotten: list[int] = []


class Guess(msgspec.Struct, frozen=True, array_like=True):
    """All tokens that are guessed to follow the first `num_known` tokens of a request.

    Attributes:
        is_all: no more will be guessed for these tokens, whatever was asked for: the text is too long, has
            ids that the draft model does not have, or found no room, or no token could be sampled.
    """

    request: int
    num_known: int
    token_ids: list[int]
    is_all: bool = False


class Guessed(msgspec.Struct, frozen=True, array_like=True):
    """A message of the drafting process.

    It is sent when the model is loaded, after each step of the model, and when a question leaves the process
    nothing to do. It may have no guesses.

    Attributes:
        token_s: seconds that a step takes in which texts guess one token more.
        is_idle: the process has nothing left to do.
    """

    guesses: list[Guess] = []
    token_s: float = 0.0
    is_idle: bool = True


Received = TypeVar("Received", Asked, Guessed)


def draft_sockets() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection: the core's and the drafting process'."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class DraftSocket(Generic[Received]):
    """One end of the connection between the core and the drafting process.

    Args:
        end: the socket, which belongs to this object from now on.
        received: type of the messages that this end receives.
    """

    def __init__(self, end: socket.socket, received: type[Received]) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._queue: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Asked | Guessed) -> None:
        """Send a message, or, if the socket is full, keep it until the next `flush` or `send`.

        Raises:
            LinkClosedError: the other end is closed, or has not read for so long that too many are kept.
        """
        self._queue.append(msgspec.msgpack.encode(message))
        self.flush()
        if len(self._queue) > _MOST_QUEUED:
            raise LinkClosedError("the other end reads no messages.")

    def flush(self) -> None:
        """Send the kept messages, as far as the socket takes them. Raises as `send` if the end is closed."""
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

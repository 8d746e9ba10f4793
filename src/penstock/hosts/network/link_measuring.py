"""Measures a way (network path) between two hosts: its round trip, and bytes per second of both directions.

Both functions get a stream that is connected, with or without TLS: the host that measures calls
`measure_stream` and the other `answer_measuring`. After an error the stream is of no more use.

    request                        answer
    ECHO n, n bytes                n bytes
    TAKE n, n bytes                8 bytes: the clock of the answering host when the last of them came, in ns
    GIVE n                         n bytes
    END 0                          none: the stream is free for something else

The round trip is the median time of some small echoes.

For bytes per second, pieces are sent or requested before earlier ones are answered. As many bytes are under
way as twice what has come so far, so that they grow from round trip to round trip, as TCP's window does. They
are never more than could come in time at the speed so far. The speed is that of the best `WINDOW_S` at the
receiver. An average would count the beginning, in which TCP's window is small and a long path mostly silent.

A fast path with a long round trip is still measured as too slow (100 Mbit/s at 50 ms: as a sixth), since TCP
does not open its window in so short a time. Measuring takes about `MEASURING_S`, and longer on a busy host.
After `LIMIT_S` it is given up: such a path carries less than about 0.2 Mbit/s. A TCP socket should have
TCP_NODELAY, as links have.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import monotonic
from typing import Protocol

import msgspec

from penstock.bounds import Seconds, Speed
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError

MEASURING_S = 1.0
LIMIT_S = 2.0  # longer, since a thread of a busy host may have to wait for a core
ANSWERING_S = LIMIT_S + 1.0  # then the other host has given up; its next path needs this thread
WINDOW_S = 0.02  # long enough that a process which is woken a little late does not matter

_ECHO, _TAKE, _GIVE, _END = 1, 2, 3, 4
_REQUEST = struct.Struct("!BI")
_TIME = struct.Struct("!Q")
_ECHO_BYTES = 64
_MAX_ECHO = 1024
_MAX_ECHOES = 9
_FIRST_PIECE, _MAX_PIECE = 1 << 12, 1 << 18
_PIECES_OF_A_SIZE = 8  # after so many pieces the size doubles
_MAX_AHEAD = 32
_ECHOES_UNTIL, _OUT_UNTIL, _IN_UNTIL = 0.1, 0.5, 0.9  # as shares of the time that measuring should take

Clock = Callable[[], float]
Start = Callable[[int], None]
Finish = Callable[[int], float]
Arrival = tuple[float, int]  # when a piece had arrived, in seconds, and a number of bytes


class Stream(Protocol):
    """The interface of a connected socket, with TLS or without."""

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def settimeout(self, seconds: float, /) -> None: ...


class StreamSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed that was measured on a stream; `out` is away from the host that has measured."""

    round_trip_s: Seconds
    bytes_per_s_out: Speed
    bytes_per_s_in: Speed

    @property
    def bytes_per_s(self) -> float:
        """The speed of the slower direction, since it is not known yet in which one hidden states cross."""
        return min(self.bytes_per_s_out, self.bytes_per_s_in)

    @property
    def flipped(self) -> StreamSpeed:
        """The speed as the other host would have measured it."""
        return StreamSpeed(
            round_trip_s=self.round_trip_s,
            bytes_per_s_out=self.bytes_per_s_in,
            bytes_per_s_in=self.bytes_per_s_out,
        )


def measure_stream(stream: Stream, clock: Clock = monotonic, seconds: float = MEASURING_S) -> StreamSpeed:
    """Measure a connected stream whose other end runs `answer_measuring`.

    Args:
        seconds: how long it should take. With 0, one round trip and some kilobytes show whether the stream
            carries anything; the bytes per second then mean nothing.

    Raises:
        WaitTimeoutError: a few kilobytes need longer than `LIMIT_S`, so that the path is of no use.
        LinkClosedError: the other host has closed the stream.
    """
    began = clock()
    wire = _Wire(stream, clock, LIMIT_S)

    def send_piece(size: int) -> None:
        wire.send(_REQUEST.pack(_TAKE, size))
        wire.send(wire.zeros[:size])

    def piece_taken(_: int) -> float:
        (nanoseconds,) = _TIME.unpack(wire.receive(_TIME.size))
        return float(nanoseconds) / 1e9

    def request_piece(size: int) -> None:
        wire.send(_REQUEST.pack(_GIVE, size))

    def receive_piece(size: int) -> float:
        wire.skip(size)
        return clock()

    speed = StreamSpeed(
        round_trip_s=_round_trip(wire, began + seconds * _ECHOES_UNTIL, clock),
        bytes_per_s_out=flood(send_piece, piece_taken, began + seconds * _OUT_UNTIL, clock),
        bytes_per_s_in=flood(request_piece, receive_piece, began + seconds * _IN_UNTIL, clock),
    )
    wire.send(_REQUEST.pack(_END, 0))
    return speed


def answer_measuring(stream: Stream, clock: Clock = monotonic) -> None:
    """Answer the requests of the host that measures a stream, until that host ends or closes it.

    Raises:
        ProtocolError: a request is not one of ours, or too large.
        WaitTimeoutError: the measuring has not ended within `ANSWERING_S`.
        LinkClosedError: the stream has ended within a request.
    """
    wire = _Wire(stream, clock, ANSWERING_S)
    while request := wire.receive_request():
        kind, size = _REQUEST.unpack(request)
        if kind == _END:
            return
        if not 0 < size <= (_MAX_ECHO if kind == _ECHO else _MAX_PIECE):
            raise ProtocolError(
                f"The other host requests {size} bytes at once to measure the connection, which is too much."
            )
        if kind == _ECHO:
            wire.send(wire.receive(size))
        elif kind == _TAKE:
            wire.skip(size)
            wire.send(_TIME.pack(int(clock() * 1e9)))
        elif kind == _GIVE:
            wire.send(wire.zeros[:size])
        else:
            raise ProtocolError(f"The other host sends {kind}, which is not a measuring request.")


def flood(start: Start, finish: Finish, until: float, clock: Clock) -> float:
    """Send pieces ahead of their answers; return the bytes per second of the best stretch of `WINDOW_S`.

    Args:
        start: sends a piece of a given size, or the request for one.
        finish: waits until the oldest piece has arrived; returns when, by the clock of its receiver.
        until: when all pieces should have arrived, by `clock`.
    """
    began = clock()
    ahead: deque[int] = deque()
    arrivals: list[Arrival] = []
    come: list[Arrival] = [(began, 0)]  # times by our own clock, each with all bytes until then
    while not arrivals or ahead:
        while len(ahead) < _MAX_AHEAD and sum(ahead) < 2 * (_FIRST_PIECE + come[-1][1]):
            size = min(_FIRST_PIECE << ((len(arrivals) + len(ahead)) // _PIECES_OF_A_SIZE), _MAX_PIECE)
            now = clock()
            if arrivals and sum(ahead) + size > _careful_speed(come, now) * (until - now):
                break
            start(size)
            ahead.append(size)
        size = ahead.popleft()
        arrivals.append((finish(size), size))
        come.append((clock(), come[-1][1] + size))
    return best_speed(arrivals)


def _careful_speed(come: Sequence[Arrival], now: float) -> float:
    """Return the bytes per second of all pieces so far, or of their later half if that was slower.

    The later half counts because many slow lines let the first bytes pass at once.
    """
    bytes_so_far = come[-1][1]
    return min(
        (bytes_so_far - num_bytes) / max(now - time, 1e-9)
        for time, num_bytes in (come[0], come[(len(come) - 1) // 2])
    )


def best_speed(arrivals: Sequence[Arrival]) -> float:
    """Return the bytes per second of the fastest stretch that lasted `WINDOW_S` or more.

    If all arrivals together lasted less, their average is returned.

    Args:
        arrivals: for each piece, when it had arrived, and its number of bytes.
    """
    best, first, num_bytes = 0.0, 0, 0
    for time, size in arrivals[1:]:  # how long the first piece took is not known
        num_bytes += size
        while time - arrivals[first + 1][0] >= WINDOW_S:
            first += 1
            num_bytes -= arrivals[first][1]
        if time - arrivals[first][0] >= WINDOW_S:
            best = max(best, num_bytes / (time - arrivals[first][0]))
    total = sum(size for _, size in arrivals[1:])
    return best or total / max(arrivals[-1][0] - arrivals[0][0], 1e-9)


def _round_trip(wire: _Wire, until: float, clock: Clock) -> float:
    """Return the median time of small echoes, without the first, which is slower as caches are empty."""
    times: list[float] = []
    while len(times) < 1 or (len(times) < _MAX_ECHOES and clock() < until):
        began = clock()
        wire.send(_REQUEST.pack(_ECHO, _ECHO_BYTES) + bytes(_ECHO_BYTES))
        wire.receive(_ECHO_BYTES)
        times.append(clock() - began)
    return median(times[1:] or times)


class _Wire:
    """A stream at which all waits end at one deadline.

    Args:
        limit_s: seconds from now to the deadline.

    Attributes:
        zeros: bytes without meaning, as many as the largest piece has.
    """

    def __init__(self, stream: Stream, clock: Clock, limit_s: float) -> None:
        self._stream = stream
        self.zeros = memoryview(bytes(_MAX_PIECE))
        self._clock = clock
        self._limit_s = limit_s
        self._deadline = clock() + limit_s
        self._buffer = memoryview(bytearray(_MAX_PIECE))

    def send(self, data: bytes | memoryview) -> None:
        with self._waiting():
            self._stream.sendall(data)

    def receive(self, size: int) -> bytes:
        """Return exactly so many bytes."""
        received = bytearray()
        while len(received) < size:
            count = self._receive_piece(size - len(received))
            received += self._buffer[:count]
        return bytes(received)

    def receive_request(self) -> bytes:
        """Return the header of the next request; empty if the stream ends before one."""
        with self._waiting():
            count = self._stream.recv_into(self._buffer[: _REQUEST.size])
        first = bytes(self._buffer[:count])
        return first + self.receive(_REQUEST.size - count) if count else b""

    def skip(self, size: int) -> None:
        """Receive so many bytes, and drop them."""
        while size:
            size -= self._receive_piece(size)

    def _receive_piece(self, limit: int) -> int:
        with self._waiting():
            count = self._stream.recv_into(self._buffer[: min(limit, _MAX_PIECE)])
        if not count:
            raise LinkClosedError("The other host closed the connection while it was measured.")
        return count

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let a wait in the `with` block end at the deadline, and turn its failure into an error of ours."""
        try:
            left = self._deadline - self._clock()
            if left <= 0:
                raise TimeoutError
            self._stream.settimeout(left)
            yield
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"Measuring the connection to the other host did not end within {self._limit_s:g} s.",
                remedy="The path between the two addresses is too slow or loses packets; choose another "
                "--address.",
            ) from error
        except OSError as error:
            raise LinkClosedError(f"The connection broke while it was measured: {error}.") from error

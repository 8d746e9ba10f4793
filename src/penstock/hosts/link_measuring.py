"""Measures a way between two hosts: its round trip, and the bytes per second of each direction.

Both functions get a stream that is connected, with or without TLS: the host that measures calls
`measure_stream` and the other `answer_measuring`. After an error the stream is of no more use.

    request                        answer
    ECHO n, n bytes                n bytes
    TAKE n, n bytes                8 bytes: the nanoseconds in which they came
    GIVE n                         n bytes
    END 0                          none: the stream is free for something else

The round trip is the median of some small echoes. Bytes per second are those of a burst at its receiver,
from the first byte to the last. Bursts double until the next would not fit into the time; of those that
lasted at least `_MIN_BURST_S` the fastest counts, since disturbances only slow a burst down, and a shorter
one says more about when a process was woken. A long path with a wide bottleneck is measured low: in the
time that there is, TCP does not open its window so far. All of it ends within `MEASURING_S`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import monotonic
from typing import Protocol

import msgspec

from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError

MEASURING_S = 1.0
ANSWERING_S = 5.0
MAX_BURST = 1 << 25

_ECHO, _TAKE, _GIVE, _END = 1, 2, 3, 4
_REQUEST = struct.Struct("!BI")
_TIME = struct.Struct("!Q")
_ECHO_BYTES = 64
_MAX_ECHO = 1024
_MAX_ECHOES = 9
_FIRST_BURST = 1 << 13
_MIN_BURST_S = 0.01
_PIECE = 1 << 18
_ECHOES_UNTIL_S, _OUT_UNTIL_S, _IN_UNTIL_S = 0.15, 0.55, 0.95  # after the beginning

Clock = Callable[[], float]


class Stream(Protocol):
    """What a connected socket can do, with TLS or without."""

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def settimeout(self, seconds: float, /) -> None: ...


class StreamSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on a stream; `out` is away from the host that has measured."""

    round_trip_s: float
    bytes_per_s_out: float
    bytes_per_s_in: float

    @property
    def bytes_per_s(self) -> float:
        """The slower direction: which way hidden states cross is decided later."""
        return min(self.bytes_per_s_out, self.bytes_per_s_in)


def measure_stream(stream: Stream, clock: Clock = monotonic) -> StreamSpeed:
    """Measure a connected stream whose other end runs `answer_measuring`.

    Raises:
        WaitTimeoutError: a few kilobytes need longer than `MEASURING_S`, so that the way is of no use.
        LinkClosedError: the other host has closed the stream.
    """
    began = clock()
    wire = _Wire(stream, clock, MEASURING_S)

    def give_out(size: int) -> float:
        wire.send(_REQUEST.pack(_TAKE, size))
        wire.send_burst(size)
        (nanoseconds,) = _TIME.unpack(wire.receive(_TIME.size))
        return float(nanoseconds) / 1e9

    def take_in(size: int) -> float:
        wire.send(_REQUEST.pack(_GIVE, size))
        wire.receive(1)
        return wire.time_burst(size - 1)

    speed = StreamSpeed(
        round_trip_s=_round_trip(wire, began + _ECHOES_UNTIL_S, clock),
        bytes_per_s_out=fastest_burst(give_out, began + _OUT_UNTIL_S, clock),
        bytes_per_s_in=fastest_burst(take_in, began + _IN_UNTIL_S, clock),
    )
    wire.send(_REQUEST.pack(_END, 0))
    return speed


def answer_measuring(stream: Stream, clock: Clock = monotonic) -> None:
    """Answer until the measuring host has what it wants, or closes the stream.

    Raises:
        ProtocolError: a request is not one of ours, or too large.
        WaitTimeoutError: it has not ended within `ANSWERING_S`.
        LinkClosedError: the stream has ended within a request.
    """
    wire = _Wire(stream, clock, ANSWERING_S)
    while request := wire.receive_request():
        kind, size = _REQUEST.unpack(request)
        if kind == _END:
            return
        if not 0 < size <= (_MAX_ECHO if kind == _ECHO else MAX_BURST):
            raise ProtocolError(
                f"The other host asks for {size} bytes at once while it measures the connection."
            )
        if kind == _ECHO:
            wire.send(wire.receive(size))
        elif kind == _TAKE:
            wire.send(_TIME.pack(int(wire.time_burst(size) * 1e9)))
        elif kind == _GIVE:
            wire.send_burst(size)
        else:
            raise ProtocolError(
                f"The other host sends {kind}, which is not a request that measures a connection."
            )


def fastest_burst(transfer: Callable[[int], float], until: float, clock: Clock) -> float:
    """Return the bytes per second of the fastest burst that counts, or of the last where none does.

    Args:
        transfer: carries so many bytes and returns the seconds that their receiver has needed.
        until: when the last burst is to have ended, by the clock.
    """
    size, fastest = _FIRST_BURST, 0.0
    while True:
        began = clock()
        seconds = transfer(size)
        speed = size / max(seconds, 1e-9)
        if seconds >= _MIN_BURST_S:
            fastest = max(fastest, speed)
        now = clock()
        if size >= MAX_BURST or now + 2 * (now - began) > until:
            return fastest or speed
        size *= 2


def _round_trip(wire: _Wire, until: float, clock: Clock) -> float:
    """Return the median time of small echoes, without the first, which fills caches on its way."""
    times: list[float] = []
    while len(times) < 1 or (len(times) < _MAX_ECHOES and clock() < until):
        began = clock()
        wire.send(_REQUEST.pack(_ECHO, _ECHO_BYTES) + bytes(_ECHO_BYTES))
        wire.receive(_ECHO_BYTES)
        times.append(clock() - began)
    return median(times[1:] or times)


class _Wire:
    """A stream of which all waits end at one deadline.

    Args:
        limit_s: how long after now the deadline is.
    """

    def __init__(self, stream: Stream, clock: Clock, limit_s: float) -> None:
        self._stream = stream
        self._clock = clock
        self._limit_s = limit_s
        self._deadline = clock() + limit_s
        self._buffer = memoryview(bytearray(_PIECE))
        self._zeros = memoryview(bytes(_PIECE))

    def send(self, data: bytes | memoryview) -> None:
        with self._waiting():
            self._stream.sendall(data)

    def send_burst(self, size: int) -> None:
        """Send so many bytes that mean nothing."""
        for sent in range(0, size, _PIECE):
            self.send(self._zeros[: min(size - sent, _PIECE)])

    def receive(self, size: int) -> bytes:
        """Return exactly so many bytes."""
        received = bytearray()
        while len(received) < size:
            count = self._receive_piece(size - len(received))
            received += self._buffer[:count]
        return bytes(received)

    def receive_request(self) -> bytes:
        """Return the beginning of a request; nothing where the stream ends before one."""
        with self._waiting():
            count = self._stream.recv_into(self._buffer[: _REQUEST.size])
        first = bytes(self._buffer[:count])
        return first + self.receive(_REQUEST.size - count) if count else b""

    def time_burst(self, size: int) -> float:
        """Receive so many bytes and return the seconds that they took."""
        began = self._clock()
        while size:
            size -= self._receive_piece(size)
        return self._clock() - began

    def _receive_piece(self, limit: int) -> int:
        with self._waiting():
            count = self._stream.recv_into(self._buffer[: min(limit, _PIECE)])
        if not count:
            raise LinkClosedError("The other host has closed the connection while it was measured.")
        return count

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let what is done here end at the deadline, and name its failure."""
        try:
            left = self._deadline - self._clock()
            if left <= 0:
                raise TimeoutError
            self._stream.settimeout(left)
            yield
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"Measuring the connection to the other host has not ended within {self._limit_s:g} s.",
                remedy="The way between the two addresses is too slow or loses packets; "
                "choose another with --address.",
            ) from error
        except OSError as error:
            raise LinkClosedError(f"The connection broke while it was measured: {error}.") from error

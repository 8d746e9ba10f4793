"""A stream is measured in time, by bursts that grow; whatever the other side does wrong is an error."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trustme

from fakes import FakeClock
from penstock.errors import LinkClosedError, PenstockError, ProtocolError, WaitTimeoutError
from penstock.hosts import link_measuring
from penstock.hosts.link_measuring import MAX_BURST, answer_measuring, fastest_burst, measure_stream


class Line:
    """A line of known speed, in a time of its own; `fastest_burst` sends on it.

    Args:
        overhead_s: what each burst needs besides.
    """

    def __init__(self, bytes_per_s: float, overhead_s: float = 0.0) -> None:
        self.clock = FakeClock()
        self.bursts: list[int] = []
        self._bytes_per_s = bytes_per_s
        self._overhead_s = overhead_s

    def transfer(self, size: int) -> float:
        self.bursts.append(size)
        self.clock.advance(size / self._bytes_per_s + self._overhead_s)
        return size / self._bytes_per_s

    def measure(self, seconds: float = 0.4) -> float:
        return fastest_burst(self.transfer, self.clock.now + seconds, self.clock)


@pytest.mark.parametrize("bytes_per_s", [50e3, 125e3, 12.5e6, 125e6, 1.25e9, 1e12])
def test_a_line_is_measured_in_time(bytes_per_s: float) -> None:
    line = Line(bytes_per_s, overhead_s=1e-4)
    assert line.measure() == pytest.approx(bytes_per_s)
    assert line.clock.now <= 100.4
    assert line.bursts[-1] <= MAX_BURST


def test_bursts_double_as_long_as_the_next_fits() -> None:
    line = Line(125e6)
    line.measure()
    assert line.bursts == [1 << power for power in range(13, 13 + len(line.bursts))]
    assert line.clock.now > 100.1


def test_short_bursts_do_not_count_and_disturbed_ones_lose() -> None:
    clock = FakeClock()
    seconds = iter([1e-6, 0.02, 0.016, 0.2])  # 8, 16, 32 and 64 KiB
    speeds = [8192 / 1e-6, 16384 / 0.02, 32768 / 0.016, 65536 / 0.2]

    def transfer(size: int) -> float:
        spent = next(seconds)
        clock.advance(spent)
        return spent

    assert fastest_burst(transfer, clock.now + 0.25, clock) == speeds[2]


@contextmanager
def answering(stream: Any, errors: list[PenstockError]) -> Iterator[None]:
    def run() -> None:
        try:
            answer_measuring(stream)
        except PenstockError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_measuring, "MAX_BURST", 1 << 16)


@pytest.mark.usefixtures("few_bytes")
def test_a_socket_is_measured_both_ways_and_can_be_used_afterwards() -> None:
    ours, theirs = socket.socketpair()
    errors: list[PenstockError] = []
    with ours, theirs:
        with answering(theirs, errors):
            speed = measure_stream(ours)
        ours.sendall(b"next")
        assert theirs.recv(9) == b"next"
    assert speed.round_trip_s > 0
    assert speed.bytes_per_s == min(speed.bytes_per_s_out, speed.bytes_per_s_in) > 0
    assert errors == []


@pytest.mark.usefixtures("few_bytes")
def test_a_stream_with_tls_is_measured() -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("other.host").configure_cert(server)
    authority.configure_trust(client)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with server.wrap_socket(theirs, server_side=True) as stream:
            answer_measuring(stream)

    thread = threading.Thread(target=answer)
    thread.start()
    with client.wrap_socket(ours, server_hostname="other.host") as stream:
        assert measure_stream(stream).bytes_per_s > 0
    thread.join()


class SilentStream:
    """A stream on which nothing comes; time passes while one waits."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._seconds = 0.0

    def sendall(self, data: bytes | memoryview) -> None: ...

    def recv_into(self, buffer: memoryview) -> int:
        self._clock.advance(self._seconds)
        raise TimeoutError

    def settimeout(self, seconds: float) -> None:
        self._seconds = seconds


def test_a_silent_host_is_given_up_in_time() -> None:
    clock = FakeClock()
    with pytest.raises(WaitTimeoutError, match=r"within 1 s\. .*--address"):
        measure_stream(SilentStream(clock), clock)
    assert clock.now == pytest.approx(101.0)
    with pytest.raises(WaitTimeoutError, match="within 5 s"):
        answer_measuring(SilentStream(clock), clock)


def test_a_host_that_closes_the_stream_between_requests_is_done() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        answer_measuring(theirs)


def test_a_host_that_leaves_is_named() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(LinkClosedError):
        measure_stream(ours)


@pytest.mark.parametrize(
    ("request_bytes", "error"),
    [
        (b"\x01\x00", LinkClosedError),
        (b"\x02\x00\x00\x10\x00abc", LinkClosedError),
        (b"\x01\x00\x01\x00\x00", ProtocolError),
        (b"\x03\xff\xff\xff\xff", ProtocolError),
        (b"\x03\x00\x00\x00\x00", ProtocolError),
        (b"\x09\x00\x00\x00\x01", ProtocolError),
        (b"GET / HTTP/1.1\r\n", ProtocolError),
    ],
)
def test_what_is_not_a_request_ends_the_answers(request_bytes: bytes, error: type[PenstockError]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(request_bytes)
        with pytest.raises(error):
            answer_measuring(theirs)

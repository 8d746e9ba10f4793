"""A stream is measured in time, by more and more bytes; whatever the other side does wrong is an error."""

from __future__ import annotations

import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trustme

from fakes import FakeClock
from penstock.errors import LinkClosedError, PenstockError, ProtocolError, WaitTimeoutError
from penstock.hosts.network import link_measuring
from penstock.hosts.network.link_measuring import answer_measuring, best_speed, flood, measure_stream


class Line:
    """A line of known speed, in a time of its own, on which `flood` asks for pieces.

    Args:
        round_trip_s: what an answer needs besides the time of its bytes on the line.
    """

    def __init__(self, bytes_per_s: float, round_trip_s: float = 1e-4) -> None:
        self.clock = FakeClock()
        self.most_under_way = 0
        self._bytes_per_s = bytes_per_s
        self._round_trip_s = round_trip_s
        self._arrivals: deque[float] = deque()
        self._free_at = 0.0

    def start(self, size: int) -> None:
        self._free_at = max(self._free_at, self.clock.now + self._round_trip_s) + size / self._bytes_per_s
        self._arrivals.append(self._free_at)
        self.most_under_way = max(self.most_under_way, len(self._arrivals))

    def finish(self, _: int) -> float:
        self.clock.now = max(self.clock.now, self._arrivals.popleft())
        return self.clock.now

    def measure(self, seconds: float = 0.4) -> float:
        return flood(self.start, self.finish, self.clock.now + seconds, self.clock)


@pytest.mark.parametrize("bytes_per_s", [50e3, 125e3, 1.25e6, 12.5e6, 125e6, 1.25e9, 12.5e9])
def test_a_line_is_measured_in_time(bytes_per_s: float) -> None:
    line = Line(bytes_per_s)
    assert line.measure() == pytest.approx(bytes_per_s, rel=0.02)
    assert line.clock.now <= 100.46


def test_a_long_line_is_measured_by_its_best_moment() -> None:
    line = Line(12.5e6, round_trip_s=0.05)
    assert 12.5e6 / 6 < line.measure() < 12.5e6
    assert line.clock.now <= 100.45


@pytest.mark.parametrize(("bytes_per_s", "pieces"), [(50e3, 6), (125e6, 32)])
def test_what_is_under_way_grows_with_what_has_come(bytes_per_s: float, pieces: int) -> None:
    line = Line(bytes_per_s)
    line.measure()
    assert line.most_under_way <= pieces


def test_one_piece_at_least_is_measured_though_the_time_is_over() -> None:
    assert Line(1e6).measure(seconds=-1.0) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.0, 0.011, 0.022, 0.033], 100 / 0.011),  # steady
        ([0.0, 0.03, 0.06, 0.071, 0.082], 200 / 0.022),  # faster at the end
        ([0.0, 0.001, 0.002], 100 / 0.001),  # shorter than a window
        ([0.0, 0.001, 0.5, 0.501], 200 / 0.5),  # two groups: never one group alone
    ],
)
def test_the_best_window_counts(times: list[float], expected: float) -> None:
    assert best_speed([(time, 100) for time in times]) == pytest.approx(expected)


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
    """Let measuring end early: what it finds does not matter here, nor how busy the machine is."""
    monkeypatch.setattr(link_measuring, "LIMIT_S", 60.0)
    monkeypatch.setattr(link_measuring, "_OUT_UNTIL", 0.0)
    monkeypatch.setattr(link_measuring, "_IN_UNTIL", 0.0)


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


@pytest.mark.usefixtures("few_bytes")
def test_a_stream_is_tried_in_passing() -> None:
    ours, theirs = socket.socketpair()
    errors: list[PenstockError] = []
    with ours, theirs, answering(theirs, errors):
        assert measure_stream(ours, seconds=0.0).round_trip_s > 0
    assert errors == []


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
    with pytest.raises(WaitTimeoutError, match=r"within 2 s\. .*--address"):
        measure_stream(SilentStream(clock), clock)
    assert clock.now == pytest.approx(102.0)
    with pytest.raises(WaitTimeoutError, match="within 3 s"):
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

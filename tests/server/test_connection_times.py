"""Times and rates of one connection, by a clock that the test turns; the defaults of `ConnectionLimits`.

The protocol object is driven as an event loop would drive it, without a socket. `test_api_connections` has
the same bounds with real sockets.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from penstock.config.limits import ConnectionLimits
from penstock.server.http.half_closed import PROBE_KEY
from penstock.server.http.http_protocol import LimitedHttpProtocol, with_limits

LIMITS = ConnectionLimits()
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


class HandLoop:
    """What the protocol uses of an event loop; time passes by `advance`."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, work: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(work, arguments)
        heapq.heappush(self._timers, (self.now + delay, id(timer), timer))
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            timer.run()
        self.now = end

    def create_task(self, work: Coroutine[Any, Any, None]) -> Timer:
        work.close()  # what the routes do with a request is not asked here
        return Timer(lambda: None, ())


class Timer:
    """Also stands for a task."""

    def __init__(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._work, self._arguments = work, arguments
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def add_done_callback(self, _work: Callable[..., None]) -> None:
        pass

    def run(self) -> None:
        if not self._is_cancelled:
            self._work(*self._arguments)


class HandSocket:
    """Attributes:
    error: of the connection, as the system notes it.
    """

    def __init__(self) -> None:
        self.error = 0

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8000

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 50_000

    def getsockopt(self, _level: int, _name: int) -> int:
        return self.error


class HandTransport:
    """Attributes:
    waiting: bytes that the client has not taken.
    """

    def __init__(self) -> None:
        self.is_tls = False
        self.end = ""
        self.written = b""
        self.waiting = 0
        self.socket = HandSocket()

    def get_extra_info(self, name: str) -> HandSocket | None:
        return self.socket if name == "socket" else None

    def is_closing(self) -> bool:
        return bool(self.end)

    def abort(self) -> None:
        self.end = self.end or "abort"

    def close(self) -> None:
        self.end = self.end or "close"

    def write(self, data: bytes) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return not self.is_tls

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.waiting


class Connection:
    """One connection and its clock."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.loop = HandLoop()
        self.transport = HandTransport()
        config = Config(_no_app, timeout_keep_alive=limits.keep_alive_timeout_s)  # type: ignore[arg-type]
        config.load()
        self.protocol: LimitedHttpProtocol = with_limits(limits)(config, ServerState(), {}, self.loop)  # type: ignore[arg-type]
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    def begin_answer(self) -> None:
        """As the route would: the head of the answer is out."""
        assert self.protocol._due is not None
        self.protocol._due.response_started = True

    def answer(self) -> None:
        """As the route would: the answer is complete."""
        assert self.protocol._due is not None
        self.protocol._due.response_complete = True
        self.protocol.on_response_complete()

    def check_late(self) -> None:
        """The client has been told that its request came too late, and the connection ends soon after."""
        written = self.transport.written
        assert written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"connection: close" in written
        assert written.endswith(b'"type":"invalid_request_error","param":null,"code":"request_timeout"}}')
        assert self.transport.end == ""
        self.loop.advance(2.1)
        assert (self.transport.end, self.transport.written) == ("abort", written)

    def seconds_until_end(self, limit: float = 1e6) -> float:
        began = self.loop.now
        while not self.transport.end and self.loop.now - began < limit:
            self.loop.advance(1.0)
        return self.loop.now - began


async def _no_app(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.mark.parametrize("start", [b"G", HEAD[:-1]])
def test_a_head_has_ten_seconds_and_is_told_when_they_are_over(start: bytes) -> None:
    """Issue 25, point 17. A slow head ended without a word, so that its client could not know whether to send
    it again."""
    connection = Connection()
    connection.send(start)
    connection.loop.advance(LIMITS.header_timeout_s - 0.1)
    assert connection.transport.written == b""
    connection.loop.advance(0.2)
    connection.check_late()


def test_a_connection_on_which_nothing_comes_ends_without_a_word() -> None:
    """Issue 25, point 17. A browser opens some ahead of time; what is written would pass for the answer to
    its next request."""
    connection = Connection()
    connection.loop.advance(LIMITS.header_timeout_s - 0.1)
    assert connection.transport.end == ""
    connection.loop.advance(0.2)
    assert (connection.transport.end, connection.transport.written) == ("abort", b"")


def test_a_head_that_drips_has_no_more() -> None:
    connection = Connection()
    for byte in HEAD[:9]:
        connection.send(bytes([byte]))
        connection.loop.advance(1.0)
    assert connection.transport.written == b""
    connection.send(HEAD[9:10])
    connection.loop.advance(1.0)
    connection.check_late()


def test_the_next_head_has_its_own_ten_seconds_from_its_first_byte() -> None:
    connection = Connection()
    connection.send(HEAD)
    connection.answer()
    connection.loop.advance(LIMITS.keep_alive_timeout_s - 1)
    connection.send(HEAD[:5])
    connection.loop.advance(LIMITS.header_timeout_s - 0.1)
    assert connection.transport.written == b""
    connection.loop.advance(0.2)
    connection.check_late()


@pytest.mark.parametrize("before", [HEAD, POST + b"Content-Length: 1\r\n\r\n{"])
def test_a_head_that_begins_in_one_piece_with_the_request_before_has_ten_seconds(before: bytes) -> None:
    """It had none: the connection was open for as long as that answer took, and 75 s more."""
    connection = Connection()
    connection.send(before + HEAD[:5])
    connection.answer()
    connection.loop.advance(LIMITS.header_timeout_s - 0.1)
    assert (connection.transport.end, connection.transport.written) == ("", b"")
    connection.loop.advance(0.2)
    connection.check_late()


def test_requests_that_come_in_one_piece_leave_no_time_limit_behind() -> None:
    connection = Connection()
    connection.send(HEAD + POST + b"Content-Length: 1\r\n\r\n{" + HEAD)
    connection.loop.advance(100_000)
    assert (connection.transport.end, connection.transport.written) == ("", b"")


@pytest.mark.parametrize("pieces", [[HEAD, HEAD[:5]], [HEAD + HEAD[:5]]])
def test_a_head_behind_a_request_whose_answer_is_not_complete_ends_without_a_word(
    pieces: list[bytes],
) -> None:
    """What is written there would pass for a part of that answer."""
    connection = Connection()
    for piece in pieces:
        connection.send(piece)
    connection.begin_answer()
    connection.loop.advance(LIMITS.header_timeout_s + 0.1)
    assert (connection.transport.end, connection.transport.written) == ("abort", b"")


def test_an_idle_connection_is_closed_after_75_seconds_and_a_busy_one_is_not() -> None:
    idle, busy = Connection(), Connection()
    for connection in (idle, busy):
        connection.send(HEAD)
    busy.loop.advance(100_000)
    assert busy.transport.end == ""  # its answer takes long
    idle.answer()
    idle.loop.advance(LIMITS.keep_alive_timeout_s - 0.1)
    assert idle.transport.end == ""
    idle.loop.advance(0.2)
    assert idle.transport.end == "close"


def test_a_body_that_stops_is_given_up() -> None:
    connection = Connection()
    connection.send(POST + b"Content-Length: 1000\r\n\r\n{")
    connection.loop.advance(LIMITS.body_timeout_s - 0.1)
    assert connection.transport.written == b""
    connection.loop.advance(0.2)
    assert connection.protocol.cycle.disconnected, "its route writes nothing behind the refusal"
    connection.check_late()


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_body_whose_answer_has_begun_ends_without_a_word(is_complete: bool) -> None:
    """Issue 25, point 17."""
    connection = Connection()
    connection.send(POST + b"Content-Length: 1000\r\n\r\n{")
    connection.begin_answer()
    if is_complete:
        connection.answer()
    connection.loop.advance(LIMITS.body_timeout_s + 0.1)
    assert (connection.transport.end, connection.transport.written) in (("abort", b""), ("close", b""))


@pytest.mark.parametrize("head", [b"Content-Length: 10000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_body_that_drips_ends_though_it_never_stops(head: bytes) -> None:
    """One byte a second would keep a connection for months; the whole must come at the least rate."""
    connection = Connection()
    connection.send(POST + head)
    piece = b"x" if b"Length" in head else b"1\r\nx\r\n"
    for _ in range(int(LIMITS.body_timeout_s) + 1):
        assert connection.transport.written == b""
        connection.send(piece)
        connection.loop.advance(1.0)
    connection.check_late()


def test_a_body_at_the_least_rate_is_taken_however_long_it_is() -> None:
    connection = Connection()
    connection.send(POST + b"Content-Length: 2000000\r\n\r\n")
    for _ in range(1900):
        connection.send(b"x" * LIMITS.min_body_rate)
        connection.loop.advance(1.0)
    assert connection.transport.end == ""


def test_a_body_that_we_do_not_read_is_not_the_clients_delay() -> None:
    """It waits behind the answer to the request before it, which takes as long as it takes."""
    connection = Connection()
    connection.send(HEAD + POST + b"Content-Length: 200000\r\n\r\n" + b"x" * 100_000)
    connection.loop.advance(1000)
    assert connection.transport.end == ""
    connection.answer()
    connection.send(b"x" * 50_000)
    connection.loop.advance(1)
    connection.protocol.flow.resume_reading()  # as the route does when it takes the body
    assert connection.transport.written == b""
    connection.loop.advance(LIMITS.body_timeout_s)
    connection.check_late()


def test_a_reader_that_takes_nothing_is_given_up_and_a_slow_one_is_not() -> None:
    stuck, slow = Connection(), Connection()
    for connection in (stuck, slow):
        connection.send(HEAD)
        connection.transport.waiting = 100_000
        connection.protocol.pause_writing()
    for _ in range(100):
        slow.transport.waiting -= 1
        slow.loop.advance(LIMITS.write_timeout_s - 1)
    assert slow.transport.end == ""
    stuck.loop.advance(LIMITS.write_timeout_s + 0.1)
    assert stuck.transport.end == "abort"
    slow.protocol.resume_writing()
    slow.loop.advance(1000)
    assert slow.transport.end == ""


@pytest.mark.parametrize(
    "body",
    [
        b"1;" + b"x" * 60_000,
        b"1;x\r\n" * 1 + b"a\r\n" + (b"1;" + b"y" * 200 + b"\r\na\r\n") * 500,
        b"0" * 60_000 + b"1\r\na\r\n",
    ],
)
def test_bytes_around_a_body_are_bounded(body: bytes) -> None:
    """CVE-2024-22019: extensions of chunks are no body, so that no bound of bodies counts them."""
    connection = Connection()
    connection.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for at in range(0, len(body), 4096):
        if not connection.transport.end and not connection.transport.written:
            connection.send(body[at : at + 4096])
    assert connection.transport.written.startswith(b"HTTP/1.1 400")
    assert b"bad_http" in connection.transport.written


def test_what_is_no_http_is_told_so_in_one_sentence() -> None:
    connection = Connection()
    connection.send(b"GET / HTTP/1.1\r\nhost: a\x7f\r\n\r\n")
    assert b'"Refused: Invalid HTTP request received."' in connection.transport.written


def test_small_chunks_are_a_body_as_any_other() -> None:
    connection = Connection()
    connection.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(20_000):
        connection.send(b"1\r\nx\r\n")
    assert (connection.transport.end, connection.transport.written) == ("", b"")


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Content-Length : 5\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHo\x00st: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 100,
    ],
)
def test_http_that_two_readers_could_take_in_two_ways_is_refused(head: bytes) -> None:
    connection = Connection()
    connection.send(head)
    assert connection.transport.written.startswith(b"HTTP/1.1 400"), connection.transport.written


def test_more_pipelined_requests_than_allowed_end_the_connection() -> None:
    connection = Connection()
    connection.send(HEAD * (LIMITS.max_pipelined + 1))
    assert connection.transport.end == ""
    connection.send(HEAD)
    assert connection.transport.end == "abort"


def test_trailers_are_no_headers() -> None:
    connection = Connection()
    connection.send(
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nAuthorization: Bearer x\r\nOrigin: http://a\r\n\r\n"
    )
    names = [name for name, _ in connection.protocol.scope["headers"]]
    assert names == [b"host", b"transfer-encoding"]
    assert connection.transport.end == ""


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: localhost\r\n", "host: a\r\nHOST: b\r\n"])
def test_a_request_has_one_host(hosts: str) -> None:
    """Issue 25, point 17. RFC 9112, section 3.2: without one, or with two, a request is refused, and no route
    sees it."""
    connection = Connection()
    connection.send(f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode())
    assert connection.transport.written.startswith(b"HTTP/1.1 400 ")
    assert b'"Refused: a request must have one Host header."' in connection.transport.written
    assert connection.protocol.cycle is None


def test_http_1_0_needs_no_host_and_has_no_two() -> None:
    """Issue 25, point 17."""
    old = Connection()
    old.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert old.protocol.cycle is not None
    assert old.transport.written == b""
    twice = Connection()
    twice.send(b"GET /health HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n")
    assert twice.transport.written.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_has_closed_its_side_keeps_the_connection_until_its_answer_is_out() -> None:
    """Issue 25, point 17."""
    connection = Connection()
    connection.send(HEAD)
    assert connection.protocol.eof_received()
    assert connection.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n", "one that has left resets"
    assert not connection.protocol.cycle.keep_alive, "nothing can come behind it"
    connection.loop.advance(100_000)
    assert connection.transport.end == ""


def test_one_that_has_left_altogether_is_noticed_within_half_a_second() -> None:
    """Issue 25, point 17."""
    connection = Connection()
    connection.send(HEAD)
    connection.protocol.eof_received()
    connection.loop.advance(1000)
    connection.transport.socket.error = 32  # its host has answered what was written by a reset
    connection.loop.advance(0.6)
    assert connection.transport.end == "abort"


def test_nobody_looks_after_a_connection_that_has_ended() -> None:
    connection = Connection()
    connection.send(HEAD)
    connection.protocol.eof_received()
    connection.transport.close()
    connection.protocol.connection_lost(None)
    connection.transport.socket.error = 32
    connection.loop.advance(10)
    assert connection.transport.end == "close"


def test_a_stream_that_has_begun_is_probed_by_its_route() -> None:
    """Issue 25, point 17."""
    probes: list[str] = []
    connection = Connection()
    connection.send(HEAD)
    connection.protocol.cycle.scope[PROBE_KEY] = lambda: probes.append("ping")  # type: ignore[typeddict-unknown-key]
    connection.begin_answer()
    assert connection.protocol.eof_received()
    assert (probes, connection.transport.written) == (["ping"], b"")


@pytest.mark.parametrize(
    "sent", [b"", HEAD[:-1], POST + b"Content-Length: 5\r\n\r\n{", b"GET /health HTTP/1.0\r\n\r\n"]
)
def test_the_end_of_what_will_never_be_complete_or_cannot_be_probed_ends_the_connection(sent: bytes) -> None:
    """In HTTP/1.0 there is no interim answer, and a proxy in between may speak it to us: whoever closes there
    has left, until the answer has begun."""
    connection = Connection()
    if sent:
        connection.send(sent)
    assert not connection.protocol.eof_received()
    assert connection.transport.written == b""


def test_over_tls_the_end_of_one_side_ends_the_requests_at_once() -> None:
    """The event loop drops what is written from then on, and may tell of the connection's end much later."""
    connection = Connection()
    connection.send(HEAD)
    first = connection.protocol.cycle
    connection.send(HEAD)
    connection.begin_answer()
    connection.transport.is_tls = True
    assert not connection.protocol.eof_received()
    assert (first.disconnected, connection.protocol.cycle.disconnected) == (True, True)
    assert connection.transport.written == b""


def test_the_end_between_two_requests_ends_the_connection() -> None:
    connection = Connection()
    connection.send(HEAD)
    connection.answer()
    assert not connection.protocol.eof_received()


def test_no_refusal_is_written_into_an_answer_that_has_begun() -> None:
    connection = Connection()
    connection.send(HEAD)
    connection.begin_answer()
    connection.send(b"NONSENSE\r\n\r\n")
    assert (connection.transport.end, connection.transport.written) == ("abort", b"")


@pytest.mark.parametrize("how", ["leaves", "sends nonsense"])
def test_the_routes_of_all_pipelined_requests_learn_that_nobody_waits(how: str) -> None:
    """The first one's went on, and its write to a connection that had ended was logged as a bug."""
    connection = Connection()
    connection.send(HEAD)
    first = connection.protocol.cycle
    connection.send(HEAD * 2)
    assert connection.protocol.cycle is not first
    if how == "leaves":
        connection.protocol.connection_lost(None)
    else:
        connection.send(b"NONSENSE\r\n\r\n")
        assert connection.transport.written.startswith(b"HTTP/1.1 400 ")
    assert (first.disconnected, connection.protocol.cycle.disconnected) == (True, True)
    assert first.message_event.is_set()

"""One TCP connection: uvicorn's httptools protocol with bounds on size, time and number.

| bound (default of `config.limits.ConnectionLimits`) | answer |
| --- | --- |
| 4,096 connections | 503 and close |
| request line 8 KiB | 414 and close |
| headers 16 KiB, 64 of them | 431 and close |
| a head not complete 10 s after the connect, or after the first byte of a later request | 408 and close |
| 75 s without a byte of a body, or a body that is 75 s behind a rate of 1 KiB/s | 408 and close |
| 10 s from the connect without a byte; 75 s idle between requests | close |
| bytes around a body (sizes of chunks, extensions): 16 KiB, and 16 for each byte of it | 400 and close |
| trailers, added to the headers: 16 KiB | 431 and close |
| 60 s in which a client takes nothing of what is written | close |
| 16 requests that wait behind one another | close |
| 64 MiB that are still sent of a body whose request is answered | close |

Here the *head* of a request is its request line with its headers. In the middle of an answer a client gets no
refusal, since it would read it as a part of the answer: the connection is only closed. Refusals carry an
OpenAI error object.

A request has one `Host` header (RFC 9112, section 3.2); in HTTP/1.0 it may have none. A client that has
closed its sending side still gets the answers that are due (`half_closed`), except over TLS, and except in
HTTP/1.0 before the answer begins. Answers to HTTP/1.0 have no chunks (`unframed`). A request that offers
another protocol is answered in this one (`offered_upgrade`).

The protocol knows nothing of routes; `api_process` gives it to uvicorn.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.config.limits import ConnectionLimits
from penstock.server.http.errors import RETRY_AFTER_S, ErrorBody, ErrorObject
from penstock.server.http.half_closed import INTERIM, PROBE_KEY, ResetWatch
from penstock.server.http.offered_upgrade import HttpOnlyParser
from penstock.server.http.tls_ending import TlsTransport
from penstock.server.http.unframed import UnframedSend


class LimitedHttpProtocol(HttpToolsProtocol):
    """The protocol of one connection, made by uvicorn; `with_limits` makes subclasses with other `limits`."""

    limits = ConnectionLimits()
    parser: HttpOnlyParser  # type: ignore[assignment]  # in place of httptools' own

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = HttpOnlyParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0  # bytes received of the head; of those that came with the request before, one
        self._header_bytes = 0  # of headers and trailers
        self._body_began = 0.0  # loop time
        self._body_bytes = 0  # bytes of the body itself
        self._received_bytes = 0  # bytes received since the body began, also those around it
        self._discarded_bytes = 0  # bytes received of a body whose request is answered already
        self._refusal = 0  # status of a refusal that is due
        self._is_refused = False
        self._running: RequestResponseCycle | None = None  # the request whose answer was begun last
        self._reset_watch = ResetWatch(self.loop)

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not transport.can_write_eof():  # TLS
            transport = TlsTransport(transport, self.loop)  # type: ignore[assignment]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, f"more than {self.limits.max_connections} connections are open")
            return
        self._arm(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_stall_timer()
        self._reset_watch.end()
        self._disconnect_all()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _due(self) -> RequestResponseCycle | None:
        """The request whose answer the client expects next; None if it expects no answer."""
        return None if self._running is None or self._running.response_complete else self._running

    def _disconnect_all(self) -> None:
        """Let the routes of all requests whose answer is due write nothing more.

        When a connection is lost, uvicorn does so for the newest request alone.
        """
        if self._due is not None:
            for cycle in (self._due, *(waiting for waiting, _ in self.pipeline)):
                cycle.disconnected = True
                cycle.message_event.set()
            self.pipeline.clear()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers that are due to a client that has closed its sending side."""
        due = self._due
        if due is None or self._in_body or self._is_refused:
            return False
        if not self.transport.can_write_eof():  # TLS: one side cannot be closed alone
            self._disconnect_all()  # the event loop sends nothing more
            return False
        if due.response_started:
            due.scope.get(PROBE_KEY, _nothing)()  # type: ignore[operator]
        elif due.scope["http_version"] in _OLD:  # no interim answer can show whether this client has left
            return False
        else:
            self.transport.write(INTERIM)
        self.cycle.keep_alive = False
        self._disarm()
        self._reset_watch.begin(self.transport)
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._arm(self.limits.header_timeout_s)
        elif self._in_body:
            self._note_body(len(data))
        super().data_received(data)
        if self._in_head:
            self._check_unfinished_head()
        elif self._in_body:
            self._check_unfinished_body()
        if self._refusal and not self._is_refused:
            self._refuse(self._refusal, _REASONS[self._refusal])

    def _note_body(self, size: int) -> None:
        self._received_bytes += size
        patience = self.limits.body_timeout_s
        spare = self._received_bytes / self.limits.min_body_rate - (self.loop.time() - self._body_began)
        self._arm(patience + min(0.0, spare))
        if self.cycle is not None and self.cycle.response_complete:
            self._discarded_bytes += size
            if self._discarded_bytes > self.limits.max_discarded_bytes:
                self.transport.abort()

    def _check_unfinished_body(self) -> None:
        """Refuse a body with too many bytes around it; the parser drops them, so no other limit counts."""
        around = self._received_bytes - self._body_bytes
        if around > self.limits.max_header_bytes + _BYTES_AROUND_ONE * self._body_bytes:
            self.send_400_response("the body has too many framing bytes")

    def _check_unfinished_head(self) -> None:
        """Note the refusal of a head that is too long already: the parser reports no unfinished header."""
        most = self.limits.max_request_line + self.limits.max_header_bytes
        if not self._refusal and self._head_bytes > most:
            self._refusal = 431 if self.headers else 414

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._header_bytes = 0
        if self._timer is None:  # it has come in one piece with the end of the request before
            self._head_bytes = 1  # or more
            self._arm(self.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_request_line:
            self._refusal = 414

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer: routes have checked the headers, and must not get others
            super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        too_long = self._header_bytes > self.limits.max_header_bytes
        if too_long or len(self.headers) > self.limits.max_headers:
            self._refusal = self._refusal or 431

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        is_old = self.parser.get_http_version() in _OLD
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and not is_old):
            self._refusal = self._refusal or 400
        if self._refusal:
            return  # before any route sees it
        self._in_body = True
        self._body_began = self.loop.time()
        self._body_bytes = self._received_bytes = self._discarded_bytes = 0
        self._arm(self.limits.body_timeout_s)
        super().on_headers_complete()
        if is_old:
            self.cycle.keep_alive = self.cycle.waiting_for_100_continue = False
            self.cycle.send = UnframedSend(self.cycle)  # type: ignore[assignment,method-assign]
        if len(self.pipeline) > self.limits.max_pipelined:
            self.transport.abort()
        elif self.pipeline:
            self.flow.resume_reading()  # uvicorn has stopped it; without it no client's leaving is noticed

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._refusal:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal or self.parser.is_body_due:
            return
        self._in_body = False
        self._in_head = True
        self._disarm()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_next_request()

    def _wait_for_next_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    # Refusals and time

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, reason: str) -> None:
        self._refusal = status
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self._due is not None and self._due.response_started:  # it would pass for a part of that answer
            self.transport.abort()
            return
        self._disconnect_all()
        self.transport.write(_refusal_bytes(status, reason))
        if status == 503:
            self._disarm()
            self.transport.close()
        else:  # to close with unread data would reset the connection, and the client might lose the answer
            if self.transport.can_write_eof():  # TLS: one side cannot be closed alone
                self.transport.write_eof()
            self._arm(_LINGER_S)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._time_is_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self._in_body and self.flow.read_paused and not self._is_refused:  # not the client's delay
            self._body_began = self.loop.time() - self._received_bytes / self.limits.min_body_rate
            self._arm(self.limits.body_timeout_s)
        elif self._may_tell_of_delay():
            self._refuse(408, _REASONS[408])
        else:
            self.transport.abort()

    def _may_tell_of_delay(self) -> bool:
        """Whether a request has begun, and the next bytes that its client expects are the answer to it."""
        if self._is_refused:
            return False
        if self._in_body:
            return self._due is self.cycle and not self.cycle.response_started
        return self._head_bytes > 0 and self._due is None

    # Slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _watch_writes(self, waiting: int) -> None:
        self._stall_timer = self.loop.call_later(self.limits.write_timeout_s, self._check_writes, waiting)

    def _check_writes(self, waiting_before: int) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < waiting_before:
            self._watch_writes(waiting)
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _nothing() -> None:
    pass


_OLD = frozenset({"0.9", "1.0"})  # versions without chunks and interim answers; they need no Host
_LINGER_S = 2.0  # for the client to read a refusal
_BYTES_AROUND_ONE = 16  # a chunk of one byte has a size and two line ends around it; with room for more
_REASONS = {
    400: "a request must have one Host header",
    408: "the request was not complete in time",
    414: "the request line is too long",
    431: "the headers are too many or too long",
}


def _refusal_bytes(status: int, reason: str) -> bytes:
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    message = f"Refused: {reason.rstrip('.')}."
    body = msgspec.json.encode(
        ErrorBody(error=ErrorObject(message=message, type=kind, code=_CODES.get(status)))
    )
    retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


_CODES = {
    400: "bad_http",
    408: "request_timeout",
    414: "request_line_too_long",
    431: "headers_too_large",
    503: "too_many_connections",
}


def with_limits(limits: ConnectionLimits) -> type[LimitedHttpProtocol]:
    """Return the protocol class with these limits; uvicorn makes the instances itself."""
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), {"limits": limits})

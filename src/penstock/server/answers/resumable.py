"""Streams that outlive their connection: events of an answer are kept, and a client can come back for them.

    request ──▶ response ──events──▶ kept stream ──▶ reader: the connection that has asked
                                          └────────▶ reader: a later connection, from its last event on

A stream is kept only if its request asks for it by the header `x-penstock-resumable`. All other answers are
written to their connection alone (`outlet.DIRECT`). Each event has a number, which it carries as its `id`;
comments have none. A stream is found by the id of its request and the key that the request had.

- An answer that nobody reads continues for `PATIENCE_S`, and then ends as if its client had left,
  with an error for clients that come later.
- A stream is kept for `KEPT_S` after the end of its answer.
- An answer waits for the reader that has read the most, while it is more than `MAX_LAG` events behind.
- Beyond `MAX_STREAM_BYTES` the oldest events of a stream are forgotten, when all readers have them. It does
  not wait for a reader that takes nothing for `STALL_S` while another one has them: that one gets an error.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import NotFoundError, PenstockError
from penstock.server.answers.generation import wait_for_disconnect
from penstock.server.answers.outlet import DIRECT, Outlet, Respond
from penstock.server.answers.sse import STREAM_HEADERS, error_event
from penstock.server.http.access import key_digest
from penstock.server.http.errors import error_bytes
from penstock.server.http.keep_alive import Clock
from penstock.server.http.request_record import record_of

RESUMABLE_HEADER = "x-penstock-resumable"
PATIENCE_S = 30.0
KEPT_S = 120.0
MAX_STREAM_BYTES = 1 << 20
MAX_LAG = 256  # events that the foremost reader may be behind before the answer waits for it
STALL_S = 5.0  # seconds in which a reader takes nothing, before an answer that others read goes on without it

Sleep = Callable[[float], Awaitable[None]]


class EventsGoneError(PenstockError):
    """Some of the events after the one that a client names are no longer kept."""

    http_status = 410
    error_type = "invalid_request_error"
    default_code = "events_gone"


class StreamName(NamedTuple):
    """The name under which a stream is kept.

    Attributes:
        key: a digest of the key that the request had.
    """

    key: bytes
    request_id: str


class _Bell:
    """Wakes all tasks that wait for it, again and again.

    Attributes:
        next: is set when the bell rings next. A task takes it before it checks whether it must wait, so that
            it misses no ring.
    """

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def ring(self) -> None:
        rung, self.next = self.next, asyncio.Event()
        rung.set()


class _Reader:
    """A connection that reads the stream.

    Attributes:
        last: the number of the last event that was sent to it.
        busy_since: when it began to send what it sends now; clock seconds; infinite: it waits for news.
        num_comments: number of comments of the stream when something was last sent to it.
    """

    def __init__(self, last: int, now: float) -> None:
        self.last = last
        self.busy_since = now
        self.num_comments = 0


class KeptStream:
    """The events of one answer, and their readers.

    Args:
        clock: monotonic seconds.
        sleep: as `asyncio.sleep`; tests give their own.
    """

    def __init__(self, clock: Clock, sleep: Sleep = asyncio.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._head: Message | None = None
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._last = 0  # the number of the newest event
        self._comment, self._num_comments = b"", 0  # the newest comment, and how many there were
        self._readers: set[_Reader] = set()
        self._left_at = clock()  # when the last reader left; at first, when the stream was made
        self._is_stopped = False
        self._news, self._progress, self._readers_changed = _Bell(), _Bell(), _Bell()
        self.ended_at: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._head is not None

    # The side of the answer

    async def send(self, message: Message) -> None:
        """Keep what the response sends, and wait while readers are too far behind."""
        if message["type"] == "http.response.start":
            self._head = message
        else:
            for block in message.get("body", b"").split(b"\n\n"):
                self._add(block)
        self._news.ring()
        await self._wait_for_readers()
        self._forget_oldest()

    async def receive(self) -> Message:
        """Report that the client has left, once nobody has read for `PATIENCE_S` or `stop` was called.

        The reason goes with it: the answer tells its readers, and clients that come back, why it breaks off.
        """
        while not self._is_stopped:
            changed = self._readers_changed.next
            if self._readers:
                await changed.wait()
                continue
            left_s = self._left_at + PATIENCE_S - self._clock()
            if left_s <= 0:
                return _gone(f"The server ended this answer, because no client read it for {PATIENCE_S:g} s.")
            await _first_of(changed.wait(), self._sleep(left_s))
        return _gone("A client stopped this answer.")

    def end(self) -> None:
        """End the stream: the answer sends nothing more."""
        self.ended_at = self._clock()
        self._news.ring()

    def stop(self) -> None:
        """Let the answer end: the rest of it is not wanted."""
        self._is_stopped = True
        self._readers_changed.ring()

    def _add(self, block: bytes) -> None:
        if block.startswith(b":"):
            self._comment, self._num_comments = block + b"\n\n", self._num_comments + 1
        elif block:
            self._last += 1
            self._events.append(b"id: %d\n%b\n\n" % (self._last, block))
            self._num_bytes += len(self._events[-1])

    async def _wait_for_readers(self) -> None:
        """Wait for the foremost reader, and for all that still take the events that are to be forgotten."""
        while self._readers:
            progress, surplus, now = self._progress.next, self._surplus, self._clock()
            if max(reader.last for reader in self._readers) < max(surplus, self._last - MAX_LAG):
                await progress.wait()
                continue
            busy_since = [min(reader.busy_since, now) for reader in self._readers if reader.last < surplus]
            left_s = max(busy_since, default=-math.inf) + STALL_S - now
            if left_s <= 0:
                break
            await _first_of(progress.wait(), self._sleep(left_s))

    @property
    def _surplus(self) -> int:
        """The number of the last event that is to be forgotten."""
        number, excess = self._last - len(self._events), self._num_bytes - MAX_STREAM_BYTES
        for event in self._events:
            if excess <= 0:
                break
            number, excess = number + 1, excess - len(event)
        return number

    def _forget_oldest(self) -> None:
        """Forget the events beyond `MAX_STREAM_BYTES`, and the readers that have not got them."""
        while self._num_bytes > MAX_STREAM_BYTES:
            self._num_bytes -= len(self._events.popleft())
        forgotten = self._last - len(self._events)
        self._readers = {reader for reader in self._readers if reader.last >= forgotten}

    # The side of the readers

    def require(self, last: int) -> None:
        """Raise `PenstockError` unless event `last` exists, or is 0, and all events after it are kept."""
        first = self._last - len(self._events) + 1
        if last + 1 < first:
            raise EventsGoneError(
                f"The events {last + 1} to {first - 1} of this answer are no longer kept.",
                remedy="Send the request again.",
            )
        if last > self._last:
            raise NotFoundError(f"This answer has {self._last} events so far.", code="stream_not_found")

    async def read(self, last: int, receive: Receive, send: Send, *, is_first: bool = False) -> None:
        """Send a client the events after one, until the stream ends or the client leaves.

        Args:
            last: number of the event after which the client reads on; 0: it reads all.
            is_first: the connection is that of the request itself, and gets the answer's own headers.
        """
        reader = _Reader(last, self._clock())
        reader.num_comments = self._num_comments
        self._readers.add(reader)
        self._readers_changed.ring()
        try:
            await _first_of(self._write(reader, send, is_first), wait_for_disconnect(receive))
        finally:
            self._leave(reader)

    def _leave(self, reader: _Reader) -> None:
        if reader in self._readers:  # else the stream has gone on without it
            self._readers.discard(reader)
            self._left_at = self._clock()
            self._readers_changed.ring()
            self._progress.ring()

    async def _write(self, reader: _Reader, send: Send, is_first: bool) -> None:
        is_started = False
        while True:
            news, is_over = self._news.next, self.ended_at is not None
            if not is_started and self._head is not None:
                headers = [*self._head["headers"], _MARK] if is_first else [*STREAM_HEADERS, _MARK]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                is_started = True
            if reader not in self._readers:
                await send({"type": "http.response.body", "body": _TOO_SLOW, "more_body": False})
                return
            piece = self._piece(reader)
            reader.busy_since = self._clock() if piece else math.inf
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._progress.ring()
            elif is_over:
                break
            else:
                await news.wait()
        if is_started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _piece(self, reader: _Reader) -> bytes:
        """Return the events that a reader does not have yet, and the newest comment if it is new."""
        num_new = min(self._last - reader.last, len(self._events))
        events = [self._events[index] for index in range(-num_new, 0)]
        comment = self._comment if reader.num_comments < self._num_comments else b""
        reader.last, reader.num_comments = self._last, self._num_comments
        return b"".join(events) + comment


def _gone(reason: str) -> Message:
    return {"type": "http.disconnect", "reason": reason}


_MARK = (RESUMABLE_HEADER.encode(), b"true")
# The last event of a reader that was too slow, on every route: clients of `/v1/messages` look for its name.
_TOO_SLOW = b"event: error\n" + error_event(
    error_bytes(
        EventsGoneError(
            "This client read too slowly, and the answer has gone on without it.",
            remedy="Send the request again, and read its answer without a pause.",
        )
    )
)


class _Kept:
    """The outlet of an answer that is to be kept; it goes to its connection alone if there is no room."""

    def __init__(self, streams: ResumableStreams, name: StreamName) -> None:
        self._streams = streams
        self._name = name

    async def carry(self, respond: Respond, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._streams.open(self._name)
        if stream is None:
            await respond(scope, receive, send)
            return
        reading = asyncio.create_task(stream.read(0, receive, send, is_first=True))
        try:
            await respond(scope, stream.receive, stream.send)
        finally:
            self._streams.end(self._name, stream)
            await asyncio.gather(reading, return_exceptions=True)


class ResumableStreams:
    """The streams of this server that can be resumed.

    Args:
        max_streams: streams kept at once, those that have ended included. For a further one the stream that
            ended first is forgotten; if none has ended, the further one is not kept. 0: none is kept.
        clock: monotonic seconds.
        sleep: as `asyncio.sleep`; tests give their own.
    """

    def __init__(self, max_streams: int, clock: Clock, sleep: Sleep = asyncio.sleep) -> None:
        self._max_streams = max_streams
        self._clock = clock
        self._sleep = sleep
        self._streams: dict[StreamName, KeptStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def outlet(self, request: Request) -> Outlet:
        """Return the outlet for the answer to a request."""
        if self._max_streams == 0 or request.headers.get(RESUMABLE_HEADER, "").lower() != "true":
            return DIRECT
        return _Kept(self, self.name_of(request, record_of(request.scope).request_id))

    @staticmethod
    def name_of(request: Request, request_id: str) -> StreamName:
        """Return the name of the stream with this id that belongs to the key of `request`."""
        return StreamName(key_digest(request.scope["headers"]), request_id)

    def open(self, name: StreamName) -> KeptStream | None:
        """Return a new stream; None if there is no room, or a stream of that name has not ended."""
        self.forget_old()
        known = self._streams.get(name)
        if known is not None and known.ended_at is None:
            return None
        self._streams.pop(name, None)
        while len(self._streams) >= self._max_streams:
            ended = [
                (stream.ended_at, of) for of, stream in self._streams.items() if stream.ended_at is not None
            ]
            if not ended:
                return None
            del self._streams[min(ended)[1]]
        stream = self._streams[name] = KeptStream(self._clock, self._sleep)
        return stream

    def end(self, name: StreamName, stream: KeptStream) -> None:
        """End a stream whose answer is complete or has failed. If it has no event or comment, forget it."""
        stream.end()
        if not stream.has_begun:
            del self._streams[name]
            return
        asyncio.get_running_loop().call_later(KEPT_S + 1, self.forget_old)

    def find(self, name: StreamName) -> KeptStream:
        """Return a stream that has begun. Raises `NotFoundError` if there is none of that name."""
        self.forget_old()
        stream = self._streams.get(name)
        if stream is None or not stream.has_begun:
            raise NotFoundError(
                "No answer with this request id and key can be resumed.",
                remedy=f"Send `{RESUMABLE_HEADER}: true` with a request; its answer is kept for "
                f"{KEPT_S:g} s after its end.",
                code="stream_not_found",
            )
        return stream

    def forget_old(self) -> None:
        """Forget the streams that have ended long ago."""
        oldest = self._clock() - KEPT_S
        self._streams = {
            name: stream
            for name, stream in self._streams.items()
            if stream.ended_at is None or stream.ended_at >= oldest
        }


class ResumedResponse(Response):
    """The response that sends the events of a kept stream after the one with number `last`."""

    def __init__(self, stream: KeptStream, last: int) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = []
        self._stream = stream
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream.read(self._last, receive, send)


async def _first_of(*works: Awaitable[object]) -> None:
    """Wait until one of them is done, and end the others. Raises what the one that is done has raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()

"""One HTTP request's sequences from start to end: streamed or as a whole.

A route makes a `GenerationJob` and returns a `StreamedResponse` or a `WholeResponse`; running that response
adds the sequences to the engine, follows them, and watches the connection. Whatever ends the response (the
end of its sequences, an error, a client that leaves, the server's shutdown), the sequences are cancelled in
the engine before it returns. The job's `make_body` writes the body of a whole answer, and an `EventText` the
events of a stream, each in the shape of its route.

`routes.intake` enters the response into the lifecycle as soon as the response is made, so that no request is
running without being counted. The response leaves the lifecycle by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.engine.client.outputs import TextDelta, merge_deltas, total_drafts
from penstock.errors import AbortedError, PenstockError, StageLostError, UnavailableError
from penstock.request import SamplingParams
from penstock.server.answers.echo import Echo
from penstock.server.answers.outlet import DIRECT, Outlet
from penstock.server.answers.sse import STREAM_HEADERS
from penstock.server.engine_port import EngineLike, RequestStream
from penstock.server.http.errors import json_response
from penstock.server.http.half_closed import PROBE_KEY
from penstock.server.http.keep_alive import Clock, KeepAlive
from penstock.server.http.lifecycle import Interruptible, Lifecycle
from penstock.server.http.memory_guard import MemoryGuard
from penstock.server.http.metrics import Metrics
from penstock.server.http.request_log import RequestLog
from penstock.server.http.request_record import RequestRecord
from penstock.server.openai.openai_types import CompletionTokensDetails, PromptTokensDetails, Usage

T = TypeVar("T")
_LONG_EVENTS = 64 << 10  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A prompt, and how its `sampling.n` continuations are sampled; each is a choice of the answer."""

    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    echo: Echo | None = None  # the prompt at the beginning of each choice's text


def choices_of(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Return the `Sequence` of each choice: each entry `n` times, one after the other."""
    return [sequence for sequence in sequences for _ in range(sequence.sampling.n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """The work that one request asks for.

    Attributes:
        headers: headers of the answer besides the usual ones.
        make_body: makes the body of a whole answer from the output of each choice; in a thread, if that takes
            long.
    """

    sequences: list[Sequence]
    record: RequestRecord
    headers: Mapping[str, str] = field(default_factory=dict)
    make_body: Callable[[list[TextDelta], Usage], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationContext:
    """The objects that every generating response uses; there is one of each for the server."""

    engine: EngineLike
    lifecycle: Lifecycle
    memory: MemoryGuard
    keep_alive: KeepAlive
    metrics: Metrics
    log: RequestLog
    clock: Clock


class EventWriter(Protocol):
    """Writes the events of one choice of a stream."""

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens of the choice's reasoning so far; None if they are not counted."""

    def opening(self) -> bytes:
        """Return the events that come before all others, at the first call; later calls return nothing.

        `chunk` does so itself; only a stream that pings before its first token calls this.
        """

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        """Return the events for a delta in pieces, which are sent one by one.

        A piece has whole events, or is empty.
        """


class EventText(Protocol):
    """The bytes of one event stream, in the shape of its route.

    Attributes:
        ping: the bytes that are sent when nothing else was sent for long.
    """

    @property
    def ping(self) -> bytes: ...
    @property
    def writers(self) -> list[EventWriter]:
        """The writer of each choice."""

    def end(self, usage: Usage) -> bytes:
        """Return the bytes that end the stream after all choices have ended."""

    def failure(self, error: Exception, request_id: str) -> bytes:
        """Return the bytes that end the stream after a failure."""


class GenerationResponse(Response):
    """The response that runs a job; subclasses say how the answer is written."""

    def __init__(self, job: GenerationJob, context: GenerationContext) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = []
        self._job = job
        self._context = context
        self._streams: list[RequestStream] = []
        self._work = Interruptible()
        self._is_client_gone = False

    @property
    def record(self) -> RequestRecord:
        return self._job.record

    def interrupt(self, reason: PenstockError) -> None:
        self._work.interrupt(reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(wait_for_disconnect(receive))
        watcher.add_done_callback(self._client_left)
        try:
            await self._work.run(self._generate(send))
        except Exception as error:
            self._note_error(error)
            self._cancel_streams()  # telling a slow client may take long
            if not self._is_client_gone:
                await self._fail(error, send)
        finally:
            watcher.remove_done_callback(self._client_left)
            watcher.cancel()
            self._cancel_streams()
            self._note_streams()
            self._context.lifecycle.leave(self)

    async def _generate(self, send: Send) -> None:
        raise NotImplementedError

    async def _send_whole(self, send: Send, outcomes: list[TextDelta]) -> None:
        """Answer with one body, made of the whole output of each sequence."""
        body = await self._job.make_body(outcomes, self._usage())
        response = json_response(body, headers=self._job.headers)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": body})

    async def _fail(self, error: Exception, send: Send) -> None:
        """Report the failure to the client: raise the error if no byte of the answer has been sent."""
        raise error

    def _cancel_streams(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def _add_sequences(self) -> None:
        record = self._job.record
        for index, sequence in enumerate(self._job.sequences):
            self._streams += self._context.engine.add_all(
                f"{record.unique_id}-{index}", sequence.prompt_token_ids, sequence.sampling
            )
        record.prompt_tokens = sum(len(sequence.prompt_token_ids) for sequence in self._job.sequences)

    async def _next(self, stream: RequestStream) -> TextDelta:
        """Return the stream's next delta, and note when its tokens came.

        Raises `StageLostError` if the engine has given the sequence up, which is never shown as a finish.
        """
        delta = await stream.next()
        if delta.token_ids:
            self._note_tokens()
        if delta.finish_reason in ("abort", "error"):
            raise StageLostError("The engine aborted this request before it was complete.", code="aborted")
        return delta

    def _usage(self) -> Usage:
        prompt = sum(stream.prompt_tokens for stream in self._streams)
        completion = sum(stream.completion_tokens for stream in self._streams)
        cached = sum(stream.cached_tokens for stream in self._streams)
        drafts = total_drafts(stream.drafts for stream in self._streams)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(**drafts._asdict())
            if any(drafts)
            else msgspec.UNSET,
        )

    def _client_left(self, watcher: asyncio.Task[str]) -> None:
        if not watcher.cancelled():
            reason = watcher.result()
            self._is_client_gone = not reason
            self._job.record.status = AbortedError.http_status
            self.interrupt(AbortedError(reason or "The client closed the connection.", code="client_left"))

    def _note_tokens(self) -> None:
        now = self._context.clock()
        record = self._job.record
        if record.last_token_at is None:
            record.first_token_at = now
        else:
            self._context.metrics.inter_token.observe(now - record.last_token_at)
        record.last_token_at = now

    def _note_streams(self) -> None:
        record = self._job.record
        record.output_tokens = sum(stream.completion_tokens for stream in self._streams)
        record.cached_tokens = sum(stream.cached_tokens for stream in self._streams)
        waits = [wait for stream in self._streams if (wait := stream.queue_seconds) is not None]
        record.queue_seconds = max(waits, default=None)

    def _note_error(self, error: Exception) -> None:
        record = self._job.record
        record.error_code = (
            (error.code or type(error).__name__) if isinstance(error, PenstockError) else "bug"
        )
        record.finish_reason = "abort" if isinstance(error, AbortedError) else "error"


class WholeResponse(GenerationResponse):
    """Waits for all sequences, then answers with one JSON body."""

    async def _generate(self, send: Send) -> None:
        self._add_sequences()
        outcomes = await all_of([self._collect(stream) for stream in self._streams])
        self._job.record.finish_reason = _finish_reason(outcomes)
        await self._send_whole(send, outcomes)

    async def _collect(self, stream: RequestStream) -> TextDelta:
        deltas = [await self._next(stream)]
        while deltas[-1].finish_reason is None:
            deltas.append(await self._next(stream))
        return merge_deltas(deltas)


class StreamedResponse(GenerationResponse):
    """The response that sends events as they come.

    Its status and headers go out with the first event or the first ping, so that a request that fails before
    has the status code of its error.

    Args:
        text: writes the events.
        outlet: where the events go.
    """

    def __init__(
        self, job: GenerationJob, context: GenerationContext, text: EventText, outlet: Outlet = DIRECT
    ) -> None:
        super().__init__(job, context)
        self._text = text
        self._outlet = outlet
        self._writers = text.writers
        self._is_started = False
        self._is_followed = False
        self._sending = asyncio.Lock()  # one piece at a time, so that headers and opening events come first
        self._pings: set[asyncio.Task[None]] = set()
        self._send: Send
        self.last_sent_at = context.clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PROBE_KEY] = self.ping
        await self._outlet.carry(super().__call__, scope, receive, send)

    async def _generate(self, send: Send) -> None:
        self._send = send
        self._add_sequences()
        self._context.keep_alive.enter(self)
        self._is_followed = True
        try:
            pairs = zip(self._streams, self._writers, strict=True)
            finishes = await all_of([self._follow(stream, writer) for stream, writer in pairs])
        finally:
            self._context.keep_alive.leave(self)
            self._is_followed = False
        self._job.record.finish_reason = _finish_reason(finishes)
        counted = with_reasoning_tokens(self._usage(), [writer.reasoning_tokens for writer in self._writers])
        await self._write(self._text.end(counted), more=False)

    async def _follow(self, stream: RequestStream, writer: EventWriter) -> TextDelta:
        """Send the events of one sequence, and return its last delta."""
        while True:
            delta = await self._next(stream)
            for events in writer.chunk(delta):
                if events:
                    await self._write(events)
                if len(events) > _LONG_EVENTS:
                    await asyncio.sleep(0)  # other tasks have their turn before the next piece is made
            if delta.finish_reason is not None:
                return delta

    async def _write(self, events: bytes, *, more: bool = True) -> None:
        async with self._sending:
            await self._write_alone(events, more=more)

    async def _write_alone(self, events: bytes, *, more: bool = True) -> None:
        if not self._is_started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": more})
        self.last_sent_at = self._context.clock()

    async def _start(self) -> None:
        extra = [(name.encode(), value.encode()) for name, value in self._job.headers.items()]
        start: Message = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + extra}
        await self._send(start)
        self._is_started = True

    def ping(self) -> None:
        if not self._sending.locked():
            task = asyncio.create_task(self._write_ping())
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)

    async def _write_ping(self) -> None:
        """Send a ping, after the opening events if nothing was sent yet.

        The task is never cancelled: opening events that it has taken must be sent before anything else.
        """
        async with self._sending:
            if self._is_followed:
                opening = b"" if self._is_started else b"".join(writer.opening() for writer in self._writers)
                await self._write_alone(opening + self._text.ping)

    async def _fail(self, error: Exception, send: Send) -> None:
        if not self._is_started:
            raise error
        if not isinstance(error, PenstockError):
            self._context.log.bug(self._job.record, error)
        await self._write(self._text.failure(error, self._job.record.request_id), more=False)


async def all_of(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of the coroutines, in order; a failure ends the others.

    A single coroutine runs in this task, several in tasks of their own.
    """
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _finish_reason(finishes: list[TextDelta]) -> str:
    reasons = {delta.finish_reason or "stop" for delta in finishes}
    return reasons.pop() if len(reasons) == 1 else "mixed"


def with_reasoning_tokens(usage: Usage, counts: list[int | None]) -> Usage:
    """Return the usage with the reasoning tokens of all choices together, as far as they could be counted."""
    known = [count for count in counts if count is not None]
    if not known:
        return usage
    details = usage.completion_tokens_details
    if details is msgspec.UNSET:
        details = CompletionTokensDetails()
    details = msgspec.structs.replace(details, reasoning_tokens=sum(known))
    return msgspec.structs.replace(usage, completion_tokens_details=details)


async def wait_for_disconnect(receive: Receive) -> str:
    """Return when the client has closed the connection.

    Returns:
        Why the answer is to end, for clients that come back for it; empty: none can.
    """
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return str(message.get("reason", ""))


def require_ready(context: GenerationContext) -> None:
    """Raise `UnavailableError` unless this server can take a request now."""
    context.lifecycle.refuse_new()
    context.memory.refuse_new()
    status = context.engine.status()
    if not (status.ready or status.is_recovering):
        raise UnavailableError(f"The model is not ready: {status.reason or 'starting'}.", stage=status.stage)

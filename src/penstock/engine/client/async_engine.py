"""The asynchronous face of the engine, in the API process: requests go in, streams of text come out.

One zmq client, read by the event loop; each step's message is decoded once and its updates go to the streams
they belong to. What came between two `next` calls of a slow reader is merged, so a stream never holds more
than its own request's output. When the core is lost, streams pause; the next core is asked for the rest of
each. Detokenising and stop strings are `engine.client.outputs`'; HTTP is the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection

import msgspec

from penstock.batch import StageSpans
from penstock.engine.client.asked_operations import AskedOperations
from penstock.engine.client.core_health import CORE_AWAY, CoreHealth, EngineInfo, EngineStatus
from penstock.engine.client.live_requests import LiveRequests
from penstock.engine.client.outputs import Assembler, output_assembler
from penstock.engine.client.request_check import RequestLimits
from penstock.engine.client.routing import DECODE_TOKENS
from penstock.engine.client.seeds import Seeds
from penstock.engine.client.siblings import with_siblings
from penstock.engine.client.streams import RequestStream
from penstock.engine.client.vectors import VectorAssembler
from penstock.engine.ipc import (
    HEARTBEAT_S,
    SILENCE_S,
    AbortRequests,
    AddRequest,
    ClientSocket,
    ClientToCore,
    CoreGone,
    GetTrace,
    Hello,
    Operated,
    SessionsChanged,
    StepUpdates,
    Trace,
    Welcome,
)
from penstock.errors import (
    ErrorInfo,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    WaitTimeoutError,
    error_from_info,
)
from penstock.operations import Operation, OperationDone
from penstock.request import (
    GenerationRequest,
    PoolingParams,
    RequestUpdate,
    SamplingParams,
)
from penstock.tokenizer.tokenizer import Tokenizer


class AsyncEngine:
    """Client of one engine core, on the running event loop.

    Args:
        client_address: where the core listens.
        tokenizer: makes the text of streams.
        clock, wall_clock: monotonic seconds, Unix time.
    """

    def __init__(
        self,
        client_address: str,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = RequestLimits(
            max_model_len=info.max_model_len, vocab_size=info.vocab_size, vector=info.vector
        )
        self._pooling = info.pooling
        self._max_alive = info.max_num_seqs + info.max_waiting_requests
        self._streams: dict[str, RequestStream] = {}
        self._live = LiveRequests()
        self._seeds: Seeds | None = None  # from the first welcome on
        self._socket = ClientSocket(client_address)
        self._health = CoreHealth(info, clock, wall_clock)
        self._welcome: asyncio.Future[Welcome] | None = None
        self._traces: deque[asyncio.Future[list[StageSpans]]] = deque()  # asked for, oldest first
        self._operations = AskedOperations()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, timeout_s: float | None = None) -> None:
        """Wait until the pipeline stands. Raises `WaitTimeoutError` when it does not within `timeout_s`."""
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        self._greet(loop)
        self._timer = loop.call_later(HEARTBEAT_S, self._watch, loop)
        try:
            await asyncio.wait_for(self._welcome, timeout_s)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the engine core did not answer in {timeout_s} s.") from error

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output: the model's, or from `start` on what the KV pool holds if that is less."""
        return self._limits.max_model_len

    @property
    def tokens_ahead(self) -> int:
        """Estimate the tokens that this front asked for before a new request (`engine.client.routing`)."""
        prompts = sum(
            stream.prompt_tokens for stream in self._streams.values() if not stream.completion_tokens
        )
        return prompts + DECODE_TOKENS * len(self._streams)

    @property
    def sessions(self) -> Collection[str] | None:
        """Ids of those that are open, as far as the core has said; None before its first word."""
        return self._operations.sessions if self._operations.knows_sessions else None

    @property
    def sessions_asked(self) -> Collection[str]:
        """Ids of those whose opening or closing is under way, perhaps for the next core."""
        return self._operations.sessions_asked

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        """Start one sequence; as `add_all`."""
        (stream,) = self.add_all(request_id, prompt_token_ids, sampling)
        return stream

    def add_all(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> list[RequestStream]:
        """Start `sampling.n` sequences of a prompt, all or none; the first counts the prompt's tokens.

        Raises:
            InvalidRequestError: the request is out of bounds; names the field.
            OverloadedError: too many requests are alive.
            UnavailableError: the core is not there yet, or another one is to come.
        """
        request = with_siblings(request_id, prompt_token_ids, sampling)
        self._require_room(request)
        self._limits.check(prompt_token_ids, sampling)
        self._limits.check_length(prompt_token_ids, sampling)
        return self._start(
            request, lambda one: output_assembler(self._tokenizer, prompt_token_ids, one.sampling)
        )

    def embed(self, request_id: str, prompt_token_ids: list[int], params: PoolingParams) -> RequestStream:
        """Have a prompt pooled; the stream has one delta, with the vector. Raises what `add_all` does."""
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            pooling=params.pooling or self._pooling,
        )
        self._require_room(request)
        self._limits.check_pooled(prompt_token_ids, params)
        (stream,) = self._start(request, lambda _: VectorAssembler(params))
        return stream

    def _require_room(self, request: GenerationRequest) -> None:
        self._health.require_core()
        count = 1 + len(request.followers)
        if count <= self._max_alive < len(self._streams) + count:  # more than that the core refuses
            raise OverloadedError(
                f"{len(self._streams)} requests are running or waiting, which is the limit.",
                remedy="Try again later.",
            )
        in_use = {
            request.request_id,
            *(other.request_id for other in request.followers),
        } & self._streams.keys()
        if in_use:
            raise InvalidRequestError(f"request id {min(in_use)!r} is in use.", param="request_id")

    def _start(
        self, request: GenerationRequest, make: Callable[[GenerationRequest], Assembler]
    ) -> list[RequestStream]:
        streams = []
        for one in request.alone():
            num_counted = 0 if one.follows else len(one.prompt_token_ids)
            streams.append(RequestStream(one.request_id, num_counted, make(one), self._abort))
        self._streams |= {stream.request_id: stream for stream in streams}
        assert self._seeds is not None, "nobody asks before a core is there"
        request = self._seeds.given(request)
        self._live.add(request)
        self._send(AddRequest(request))
        return streams

    def status(self) -> EngineStatus:
        return self._health.status()

    def statuses(self) -> list[EngineStatus]:
        """Its own: it is the only replica."""
        return [self.status()]

    async def trace(self) -> list[StageSpans]:
        """What each stage did in the last seconds. Raises `PenstockError` when there is no core."""
        self._health.require_core()
        answer: asyncio.Future[list[StageSpans]] = asyncio.get_running_loop().create_future()
        self._traces.append(answer)
        self._send(GetTrace())
        try:
            return await asyncio.wait_for(answer, SILENCE_S)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the engine core gave no trace in {SILENCE_S:g} s.") from error

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        """Have the core do it, this one or, when it is lost meanwhile, the next.

        Raises:
            WaitTimeoutError: it is not complete after `timeout_s`; it stays in force, or will be.
            PenstockError: it came to nothing.
        """
        asked = self._operations.ask(operation, self._live.num_asked)
        if self._health.has_core:
            self._send(asked.message)
        try:
            done = await asyncio.wait_for(asked.answer, timeout_s)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the operation is not complete after {timeout_s:g} s; it stays in force, or will be.",
                remedy="Ask for it once more to wait longer.",
            ) from error
        if done.error is not None:
            raise error_from_info(done.error)
        return [done]

    def check_core(self) -> None:
        """End the streams of a core that has been silent or away for too long; it may come back for new ones.

        Called every second by the event loop.
        """
        self._read()  # it may be this process that was stopped: what came meanwhile counts
        if not self._health.has_core:
            self._send(Hello())  # once more: a connection may have failed without a word
        error = self._health.gave_up()
        if error is not None and self._streams:
            self._send(AbortRequests(self._live.ids))
            self._fail_all(error.info())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self.check_core()
        self._timer = loop.call_later(HEARTBEAT_S, self._watch, loop)

    def lose(self, error: PenstockError) -> None:
        """Nobody will start another core: streams that are open end with the error."""
        self._fail_all(error.info())

    def close(self) -> None:
        """Leave the core; streams that are open end with an error."""
        if self._timer is not None:
            self._timer.cancel()
        if self._welcome is not None:
            self._unwatch(self._welcome.get_loop())
        self._socket.close()
        self._fail_all(ErrorInfo(kind="UnavailableError", message="the engine client was closed."))

    def _greet(self, loop: asyncio.AbstractEventLoop) -> None:
        for fd in self._socket.filenos():
            loop.add_reader(fd, self._read)
        self._send(Hello())

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        for fd in self._socket.filenos():
            loop.remove_reader(fd)

    def _abort(self, request_id: str) -> None:
        del self._streams[request_id]
        if self._live.forget(request_id):
            self._send(AbortRequests([request_id]))

    def _send(self, message: ClientToCore) -> None:
        self._socket.send(message)
        # The descriptor is edge-triggered and sending may use up the edge: look once more.
        asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        for message in self._socket.drain():
            if isinstance(message, StepUpdates):
                self._health.beat(message.stats)
                self._operations.note(message.stats)
                self._deliver(message.updates)
            elif isinstance(message, Welcome):
                self._welcomed(message)
            elif isinstance(message, Trace):
                self._answer_trace(message.spans)
            elif isinstance(message, Operated):
                self._operations.close(message)
            elif isinstance(message, SessionsChanged):
                self._operations.note_sessions(message)
            elif isinstance(message, CoreGone):
                self._core_gone()

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        streams, live = self._streams, self._live
        for update in updates:
            live.note(update)
            stream = streams.get(update.request_id)
            if stream is not None and stream.receive(update):
                streams.pop(update.request_id, None)

    def _answer_trace(self, spans: list[StageSpans]) -> None:
        """Answers come in the order of the questions; whoever asked may have given up, or been told that no
        answer would come."""
        answer = self._traces.popleft() if self._traces else None
        if answer is not None and not answer.done():
            answer.set_result(spans)

    def _welcomed(self, message: Welcome) -> None:
        """A core is there, the first one or another: it is asked for what is not done."""
        self._limits = msgspec.structs.replace(self._limits, max_model_len=message.max_model_len)
        self._health.heard_from_core()
        self._seeds = self._seeds or Seeds(message)
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(message)
        for asked in (*self._operations.first(), *self._operations.again(self._live.again())):
            self._send(asked)

    def _core_gone(self) -> None:
        self._health.core_gone()
        self._deliver(self._live.core_lost())
        self._fail_traces(CORE_AWAY.info())
        loop = asyncio.get_running_loop()
        self._unwatch(loop)
        self._socket.reconnect()
        self._greet(loop)

    def _fail_all(self, error: ErrorInfo) -> None:
        streams, self._streams = self._streams, {}
        self._live.forget_all()
        for stream in streams.values():
            stream.fail(error_from_info(error))
        self._fail_traces(error)

    def _fail_traces(self, error: ErrorInfo) -> None:
        traces, self._traces = self._traces, deque()
        for answer in traces:
            if not answer.done():
                answer.set_exception(error_from_info(error))

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
from penstock.config.engine import Pooling
from penstock.engine.client.asked_operations import AskedOperations
from penstock.engine.client.live_requests import LiveRequests
from penstock.engine.client.outputs import Assembler, TextDelta, merge_deltas, output_assembler
from penstock.engine.client.request_check import RequestLimits
from penstock.engine.client.routing import DECODE_TOKENS
from penstock.engine.client.seeds import Seeds
from penstock.engine.client.siblings import with_siblings
from penstock.engine.client.vectors import VectorAssembler
from penstock.engine.ipc import (
    AWAY_S,
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
    silence_limit_s,
)
from penstock.engine.stats import CoreStats
from penstock.errors import (
    AbortedError,
    ErrorInfo,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    UnavailableError,
    WaitTimeoutError,
    error_from_info,
)
from penstock.operations import Operation, OperationDone
from penstock.process.config import ApiProcessConfig
from penstock.request import (
    GenerationRequest,
    PoolingParams,
    RequestUpdate,
    SamplingParams,
    VectorShape,
)
from penstock.tokenizer.tokenizer import Tokenizer


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What this front must know of the engine beforehand.

    Attributes:
        vector: what vectors the model gives.
        pooling: of what, where a request does not say.
        max_num_seqs, max_waiting_requests: together, how many requests may be alive at once.
        stale_after_s: without a word from the core for this long (heartbeats included) it is not ready.
        silence_limit_s: after it, its streams end.
    """

    max_model_len: int
    vocab_size: int
    vector: VectorShape = VectorShape(size=0)
    pooling: Pooling = "last"
    max_num_seqs: int = 64
    max_waiting_requests: int = 1024
    stale_after_s: float = 5.0
    silence_limit_s: float = SILENCE_S

    @classmethod
    def from_config(cls, config: ApiProcessConfig, vector: VectorShape) -> EngineInfo:
        return cls(
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            vector=vector,
            pooling=config.pooling,
            max_num_seqs=config.max_num_seqs,
            max_waiting_requests=config.max_waiting_requests,
            silence_limit_s=silence_limit_s(config.heartbeat_limit_s),
        )


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tokens come through the pipe.

    Attributes:
        stage: the stage at fault, when one is known.
        reason: why it is not ready; "" when it is.
        since: Unix time of the last change of `ready`.
        stats: the core's numbers as of its last message; None before the first.
        is_full: as many requests wait as may: one more would be refused.
    """

    ready: bool
    stage: int | None
    reason: str
    since: float
    stats: CoreStats | None
    is_full: bool = False


class RequestStream:
    """One sequence, or one vector, in the engine. Made by `AsyncEngine.add_all` or `embed`; one reader at a
    time.

    Attributes:
        prompt_tokens: of its prompt; 0 where the prompt is that of a sequence before, and is counted there.
        cached_tokens: of these, that were found in a cache.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, assembler: Assembler, abort: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self._assembler = assembler
        self._abort = abort
        self._deltas: list[TextDelta] = []
        self._error: PenstockError | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, up to the stop."""
        return self._assembler.num_tokens

    async def next(self) -> TextDelta:
        """Wait for news: everything that came since the last call, as one delta.

        Raises:
            PenstockError: the request failed, or was cancelled. Deltas that came before are given first.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise AbortedError(f"request {self.request_id} has ended.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    def cancel(self) -> None:
        """Abort in the core at once. Harmless after the end and when called twice."""
        if not self._closed:
            self._closed = True
            self._abort(self.request_id)
            self._wake()

    def receive(self, update: RequestUpdate) -> bool:
        """Take an update from the core; whether the request has ended. For `AsyncEngine`."""
        if update.error is not None:
            self.fail(error_from_info(update.error))
            return True
        if update.queue_seconds is not None:
            self.queue_seconds = update.queue_seconds
            self.cached_tokens = min(update.num_cached_tokens, self.prompt_tokens)
        delta = self._assembler.append(update)
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._closed = True
            if update.finish_reason is None:  # a stop string: the core does not know
                self._abort(self.request_id)
        self._wake()
        return self._closed

    def fail(self, error: PenstockError) -> None:
        """End the stream with this error. For `AsyncEngine`."""
        self._error = error
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
        self._health = _Health(info, clock, wall_clock)
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
        self._fail_traces(_CORE_AWAY.info())
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


_CORE_AWAY = UnavailableError(
    "the engine core went away; another one starts.", remedy="Try again in a second."
)


class _Health:
    """Readiness from what the core says and from how long it has said nothing.

    The core says how long its stages have owed it a result, and how long is too long for what they compute.
    It probes every stage once a second when idle, so a stage that does not answer shows at once.
    """

    def __init__(self, info: EngineInfo, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._info = info
        self._clock = clock
        self._wall_clock = wall_clock
        self._heard_at: float | None = None
        self._gone_at: float | None = None  # when the core went; None while it is there, and before the first
        self._stats: CoreStats | None = None
        self._was_ready = False
        self._since = wall_clock()

    def heard_from_core(self) -> None:
        self._heard_at, self._gone_at = self._clock(), None

    def beat(self, stats: CoreStats) -> None:
        self._heard_at = self._clock()
        self._stats = stats

    def core_gone(self) -> None:
        if self._gone_at is None and self._heard_at is not None:
            self._gone_at, self._stats = self._clock(), None

    @property
    def has_core(self) -> bool:
        """A core has welcomed this client, and has not gone since."""
        return self._heard_at is not None and self._gone_at is None

    def silence_s(self) -> float:
        """Seconds since the core was last heard; 0 before the first word."""
        return 0.0 if self._heard_at is None else self._clock() - self._heard_at

    def gave_up(self) -> PenstockError | None:
        """Why nobody should go on waiting for the core, if so."""
        if self._gone_at is not None:
            away_s = self._clock() - self._gone_at
            if away_s < AWAY_S:
                return None
            return UnavailableError(f"the engine core has been away for {away_s:.0f} s.")
        if self.silence_s() < self._info.silence_limit_s:
            return None
        return WaitTimeoutError(f"the engine core has said nothing for {self.silence_s():.0f} s.")

    def require_core(self) -> None:
        """Raise the error that a new request must get, if any."""
        if self._gone_at is not None:
            raise error_from_info(_CORE_AWAY.info())
        if self._heard_at is None:
            raise UnavailableError("the engine is still loading.", remedy="Try again in some seconds.")

    def status(self) -> EngineStatus:
        reason = self._reason()
        ready = not reason
        if ready != self._was_ready:
            self._was_ready, self._since = ready, self._wall_clock()
        stats = self._stats
        cause = stats.loss if stats is not None else None
        return EngineStatus(
            ready=ready,
            stage=cause.stage if cause is not None else None,
            reason=reason,
            since=self._since,
            stats=stats,
            is_full=stats is not None and stats.scheduler.num_waiting >= self._info.max_waiting_requests,
        )

    def _reason(self) -> str:
        if self._gone_at is not None:
            return _CORE_AWAY.message
        if self._heard_at is None:
            return "the engine is loading"
        if self.silence_s() > self._info.stale_after_s:
            return f"the engine core has been silent for {self.silence_s():.1f} s"
        if self._stats is not None and self._stats.loss is not None:
            return self._stats.loss.message
        if self._stats is not None and self._stats.stalled_s > self._stats.stall_limit_s:
            return f"no result has crossed the stages for {self._stats.stalled_s:.1f} s"
        return ""

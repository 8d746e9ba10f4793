"""The asynchronous face of the engine, in the API process: requests go in, streams of text come out.

One zmq client, read by the event loop; each step's message is decoded once and its updates go to the streams
they belong to. What came between two `next` calls of a slow reader is merged, so a stream never holds more
than its own request's output. Detokenising and stop strings are `engine.outputs`'; HTTP is the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.batch import StageSpans
from penstock.config import ApiProcessConfig
from penstock.engine.ipc import (
    HEARTBEAT_S,
    SILENCE_S,
    AbortRequests,
    AddRequest,
    ClientSocket,
    ClientToCore,
    EngineFailed,
    GetTrace,
    Hello,
    StepUpdates,
    Trace,
    Welcome,
)
from penstock.engine.outputs import OutputAssembler, TextDelta, merge_deltas, output_assembler
from penstock.engine.request_check import RequestLimits
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
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What this front must know of the engine beforehand.

    Attributes:
        max_num_seqs, max_waiting_requests: together, how many requests may be alive at once.
        stale_after_s: without a word from the core for this long (heartbeats included) it is not ready.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 64
    max_waiting_requests: int = 1024
    stale_after_s: float = 5.0

    @classmethod
    def from_config(cls, config: ApiProcessConfig) -> EngineInfo:
        return cls(
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_waiting_requests=config.max_waiting_requests,
        )


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tokens come through the pipe.

    Attributes:
        stage: the stage at fault, when one is known.
        reason: why it is not ready; "" when it is.
        since: Unix time of the last change of `ready`.
        stats: the core's numbers as of its last message; None before the first.
    """

    ready: bool
    stage: int | None
    reason: str
    since: float
    stats: CoreStats | None


class RequestStream:
    """One sequence in the engine. Made by `AsyncEngine.add`; one reader at a time."""

    def __init__(
        self, request_id: str, prompt_tokens: int, assembler: OutputAssembler, abort: Callable[[str], None]
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
            self.cached_tokens = update.num_cached_tokens
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
        self._limits = RequestLimits(max_model_len=info.max_model_len, vocab_size=info.vocab_size)
        self._max_alive = info.max_num_seqs + info.max_waiting_requests
        self._streams: dict[str, RequestStream] = {}
        self._socket = ClientSocket(client_address)
        self._health = _Health(info.stale_after_s, clock, wall_clock)
        self._welcome: asyncio.Future[Welcome] | None = None
        self._traces: deque[asyncio.Future[list[StageSpans]]] = deque()  # asked for, oldest first
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, timeout_s: float | None = None) -> None:
        """Wait until the pipeline stands.

        Raises:
            PenstockError: it never will; the error is the first cause.
            WaitTimeoutError: not within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        for fd in self._socket.filenos():
            loop.add_reader(fd, self._read)
        self._send(Hello())
        try:
            welcome = await asyncio.wait_for(self._welcome, timeout_s)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the engine core did not answer in {timeout_s} s.") from error
        self._limits = msgspec.structs.replace(self._limits, max_model_len=welcome.max_model_len)
        self._health.heard_from_core()
        self._watch(loop)

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output: the model's, or from `start` on what the KV pool holds if that is less."""
        return self._limits.max_model_len

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        """Start a sequence.

        Raises:
            InvalidRequestError: the request is out of bounds; names the field.
            OverloadedError: too many requests are alive.
            PeerError, UnavailableError: the engine is lost, or not there yet.
        """
        self._health.require_core()
        if len(self._streams) >= self._max_alive:
            raise OverloadedError(
                f"{len(self._streams)} requests are running or waiting, which is the limit.",
                remedy="Try again later.",
            )
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use.", param="request_id")
        self._limits.check(prompt_token_ids, sampling)
        self._limits.check_length(prompt_token_ids, sampling)
        assembler = output_assembler(self._tokenizer, prompt_token_ids, sampling)
        stream = RequestStream(request_id, len(prompt_token_ids), assembler, self._abort)
        self._streams[request_id] = stream
        request = GenerationRequest(
            request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=sampling
        )
        self._send(AddRequest(request))
        return stream

    def status(self) -> EngineStatus:
        return self._health.status()

    async def trace(self) -> list[StageSpans]:
        """What each stage did in the last seconds. Raises the first cause when the engine is lost."""
        self._health.require_core()
        answer: asyncio.Future[list[StageSpans]] = asyncio.get_running_loop().create_future()
        self._traces.append(answer)
        self._send(GetTrace())
        try:
            return await asyncio.wait_for(answer, SILENCE_S)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the engine core gave no trace in {SILENCE_S:g} s.") from error

    def check_core(self) -> None:
        """End the streams of a core that has been silent for too long; it may come back for new ones.

        Called every second by the event loop.
        """
        self._read()  # it may be this process that was stopped: what came meanwhile counts
        silence_s = self._health.silence_s()
        if silence_s >= SILENCE_S and self._streams:
            error = WaitTimeoutError(f"the engine core has said nothing for {silence_s:.0f} s.")
            self._send(AbortRequests(list(self._streams)))
            self._fail_all(error.info())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self.check_core()
        self._timer = loop.call_later(HEARTBEAT_S, self._watch, loop)

    def close(self) -> None:
        """Leave the core; streams that are open end with an error."""
        if self._timer is not None:
            self._timer.cancel()
        if self._welcome is not None:
            loop = self._welcome.get_loop()
            for fd in self._socket.filenos():
                loop.remove_reader(fd)
        self._socket.close()
        self._fail_all(ErrorInfo(kind="UnavailableError", message="the engine client was closed."))

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None and self._health.failure is None:
            self._send(AbortRequests([request_id]))

    def _send(self, message: ClientToCore) -> None:
        self._socket.send(message)
        # The descriptor is edge-triggered and sending may use up the edge: look once more.
        asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        for message in self._socket.drain():
            if isinstance(message, StepUpdates):
                self._health.beat(message.stats)
                self._deliver(message.updates)
            elif isinstance(message, Welcome):
                self._welcomed(message)
            elif isinstance(message, Trace):
                self._answer_trace(message.spans)
            elif isinstance(message, EngineFailed):
                self._lost(message.error)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        streams = self._streams
        for update in updates:
            stream = streams.get(update.request_id)
            if stream is not None and stream.receive(update):
                streams.pop(update.request_id, None)

    def _answer_trace(self, spans: list[StageSpans]) -> None:
        """Answers come in the order of the questions; whoever asked may have given up."""
        answer = self._traces.popleft()
        if not answer.done():
            answer.set_result(spans)

    def _welcomed(self, message: Welcome) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(message)

    def _lost(self, error: ErrorInfo) -> None:
        if self._health.failure is not None:
            return
        self._health.fail(error)
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error_from_info(error))
        self._fail_all(error)

    def _fail_all(self, error: ErrorInfo) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error_from_info(error))
        for answer in self._traces:
            if not answer.done():
                answer.set_exception(error_from_info(error))


class _Health:
    """Readiness from what the core says and from how long it has said nothing.

    The core says how long its stages have owed it a result, and how long is too long for what they compute.
    It probes every stage once a second when idle, so a stage that does not answer shows at once.
    """

    def __init__(
        self, stale_after_s: float, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._heard_at: float | None = None
        self._stats: CoreStats | None = None
        self._was_ready = False
        self._since = wall_clock()
        self.failure: ErrorInfo | None = None

    def heard_from_core(self) -> None:
        self._heard_at = self._clock()

    def beat(self, stats: CoreStats) -> None:
        self._heard_at = self._clock()
        self._stats = stats

    def fail(self, error: ErrorInfo) -> None:
        self.failure = error

    def silence_s(self) -> float:
        """Seconds since the core was last heard; 0 before the first word and after the last."""
        if self._heard_at is None or self.failure is not None:
            return 0.0
        return self._clock() - self._heard_at

    def require_core(self) -> None:
        """Raise the error that a new request must get, if any."""
        if self.failure is not None:
            raise error_from_info(self.failure)
        if self._heard_at is None:
            raise UnavailableError("the engine is still loading.", remedy="Try again in some seconds.")

    def status(self) -> EngineStatus:
        reason = self._reason()
        ready = not reason
        if ready != self._was_ready:
            self._was_ready, self._since = ready, self._wall_clock()
        cause = self.failure or (self._stats.loss if self._stats is not None else None)
        stage = cause.stage if cause is not None else None
        return EngineStatus(ready=ready, stage=stage, reason=reason, since=self._since, stats=self._stats)

    def _reason(self) -> str:
        if self.failure is not None:
            return self.failure.message
        if self._heard_at is None:
            return "the engine is loading"
        if self.silence_s() > self._stale_after_s:
            return f"the engine core has been silent for {self.silence_s():.1f} s"
        if self._stats is not None and self._stats.loss is not None:
            return self._stats.loss.message
        if self._stats is not None and self._stats.stalled_s > self._stats.stall_limit_s:
            return f"no result has crossed the stages for {self._stats.stalled_s:.1f} s"
        return ""

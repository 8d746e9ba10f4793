"""The client of one engine core, on an event loop: requests go in, streams of text come out.

The API process of the server, `AsyncLLM` and `LLM` (`llm.process_client`) all speak through it to their core,
the process that schedules. Each step's message is decoded once, and its updates go to the streams of their
requests. When the core is lost, streams pause; the next core is asked for the rest of each. Text and stop
strings are made in `engine.client.outputs`; HTTP is the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import msgspec

from penstock.batch import StageSpans
from penstock.engine.client.asked_operations import AskedOperations
from penstock.engine.client.asked_traces import AskedTraces
from penstock.engine.client.core_health import CORE_AWAY, CoreHealth, EngineInfo, EngineStatus
from penstock.engine.client.core_link import CoreLink
from penstock.engine.client.live_requests import LiveRequests
from penstock.engine.client.outputs import output_assembler
from penstock.engine.client.request_check import RequestLimits
from penstock.engine.client.seeds import Seeds
from penstock.engine.client.siblings import with_siblings
from penstock.engine.client.streams import MakeAssembler, OpenStreams, RequestStream
from penstock.engine.client.vectors import VectorAssembler
from penstock.engine.ipc import (
    HEARTBEAT_S,
    SILENCE_S,
    AbortRequests,
    AddRequest,
    CoreGone,
    CoreToClient,
    GetTrace,
    Hello,
    Operated,
    SessionsChanged,
    StepUpdates,
    Trace,
    Welcome,
)
from penstock.engine.stats import CoreStats, SteadyStats
from penstock.errors import (
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    UnavailableError,
    WaitTimeoutError,
    error_from_info,
)
from penstock.operations import Operation, OperationDone
from penstock.process.pipe_hosts import PipeHosts
from penstock.process.rhythm import next_beat
from penstock.request import (
    GenerationRequest,
    PoolingParams,
    RequestUpdate,
    SamplingParams,
)
from penstock.tokenizer.tokenizer import Tokenizer


class AsyncEngine:
    """The client of one engine core, on the running event loop.

    Args:
        client_address: address of the socket on which the core listens.
        tokenizer: makes the text of streams.
        info: facts about the engine that must be known before the core answers.
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
        self._streams = OpenStreams(self._abort)
        self._live = LiveRequests()
        self._seeds: Seeds | None = None  # from the first welcome on
        self._link = CoreLink(client_address, self._take)
        self._health = CoreHealth(info, clock, wall_clock)
        self._steady = SteadyStats()
        self._change = asyncio.Event()  # a core has come, or none will come any more; another event follows
        self._traces = AskedTraces()
        self._operations = AskedOperations()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, timeout_s: float | None = None) -> None:
        """Connect to the core, and wait until the pipeline is ready. Raises what `wait_for_core` does."""
        loop = asyncio.get_running_loop()
        self._link.open()
        self._timer = self._watch_later(loop)
        await self.wait_for_core(timeout_s)

    async def wait_for_core(self, timeout_s: float | None = None) -> None:
        """Wait until there is a core that takes requests; return at once if there is.

        Only until the caller next waits for something else is the core certain to be there.

        Raises:
            WaitTimeoutError: no core has come within `timeout_s`.
            PenstockError: no core will come any more.
        """
        while not self._health.has_core:
            self._health.require_hope()
            try:
                await asyncio.wait_for(self._change.wait(), timeout_s)
            except TimeoutError as error:
                raise WaitTimeoutError(f"the engine core did not answer in {timeout_s:g} s.") from error

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together that the model, or a smaller KV cache, allows."""
        return self._limits.max_model_len

    @property
    def tokens_ahead(self) -> int:
        """The estimated tokens that the core computes for this client before it comes to a new request."""
        return self._streams.tokens_ahead

    @property
    def stats(self) -> CoreStats | None:
        """The core's statistics as of its last message, for any thread; None while there is no core."""
        return self._health.stats

    @property
    def sessions(self) -> Collection[str] | None:
        """The ids of the open cache sessions, as the core has reported them; None before its first report."""
        return self._operations.sessions if self._operations.knows_sessions else None

    @property
    def sessions_asked(self) -> Collection[str]:
        """The ids of the sessions whose opening or closing was asked for and is not answered by a core."""
        return self._operations.sessions_asked

    def add(self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        """Start one sequence, and return its stream; `sampling.n` must be 1. Otherwise as `add_all`."""
        (stream,) = self.add_all(request_id, prompt_token_ids, sampling)
        return stream

    def add_all(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> list[RequestStream]:
        """Start `sampling.n` sequences of a prompt, all or none, and return the stream of each one's output.

        Only the first stream counts the prompt's tokens. If the core is being replaced, the next one gets
        them.

        Raises:
            InvalidRequestError: the request is out of bounds, or its id is in use; names the field.
            OverloadedError: too many requests are alive.
            UnavailableError: no core has come yet, or the engine has been broken for long.
        """
        request = with_siblings(request_id, prompt_token_ids, sampling)
        self._require_room(request)
        self._limits.check(prompt_token_ids, sampling)
        self._limits.check_length(prompt_token_ids, sampling)
        return self._send_request(
            request, lambda sequence: output_assembler(self._tokenizer, prompt_token_ids, sequence.sampling)
        )

    def embed(self, request_id: str, prompt_token_ids: list[int], params: PoolingParams) -> RequestStream:
        """Start to pool a prompt into a vector, and return its stream, whose only delta has the vector.

        Raises what `add_all` does.
        """
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            pooling=params.pooling or self._pooling,
        )
        self._require_room(request)
        self._limits.check_pooled(prompt_token_ids, params)
        (stream,) = self._send_request(request, lambda _: VectorAssembler(params))
        return stream

    def submit(self, request: GenerationRequest, make: MakeAssembler) -> list[RequestStream]:
        """Start the sequences of a request that the caller has checked, all or none; return their streams.

        Raises what `add_all` does, except for values that are out of bounds.

        Args:
            make: returns what makes the text or the vector of one sequence.
        """
        self._require_room(request)
        return self._send_request(request, make)

    def _require_room(self, request: GenerationRequest) -> None:
        self._health.require_prospects()
        count = 1 + len(request.followers)
        if count <= self._max_alive < len(self._streams) + count:  # more than that the core refuses
            raise OverloadedError(
                f"{len(self._streams)} requests are running or waiting, which is the limit.",
                remedy="Try again later.",
            )
        if in_use := self._streams.ids_in_use(request):
            raise InvalidRequestError(f"request id {min(in_use)!r} is in use.", param="request_id")

    def _send_request(self, request: GenerationRequest, make: MakeAssembler) -> list[RequestStream]:
        streams = self._streams.open(request, make)
        assert self._seeds is not None, "the core is not connected yet"
        request = self._seeds.given(request)
        if self._health.has_core:
            self._live.add(request)
            self._link.send(AddRequest(request))
        else:
            self._live.hold(request)  # for the core that comes
        return streams

    def status(self) -> EngineStatus:
        """Return whether the engine is ready, and statistics whose totals outlive a core that is replaced."""
        status = self._health.status()
        return msgspec.structs.replace(status, stats=self._steady.shown(is_away=status.stats is None))

    def statuses(self) -> list[EngineStatus]:
        """Return this engine's status as a list of one; without statistics while there is no core."""
        return [self._health.status()]

    async def trace(self) -> list[StageSpans]:
        """Return the timed work of each stage in the last seconds. Raises `PenstockError` without a core."""
        return await self._trace(GetTrace())

    async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
        """Return each rank's timed work since its last report in `seen`. Asks and raises as `trace` does."""
        return await self._trace(GetTrace(seen=[report.key for report in seen]))

    async def _trace(self, question: GetTrace) -> list[StageSpans]:
        self._health.require_core()
        answer = self._traces.ask()
        self._link.send(question)
        try:
            return await asyncio.wait_for(answer, SILENCE_S)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the engine core sent no trace in {SILENCE_S:g} s.") from error

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        """Ask the core to carry out an administrator's operation, and wait for its result.

        If there is no core, or it is lost meanwhile, the next one is asked. Returns a list of one. The
        operation is not withdrawn when its caller waits no longer, because the call was cancelled or
        `timeout_s` is over: each core is asked for it until one reports its result.

        Raises:
            WaitTimeoutError: the operation is not complete after `timeout_s`.
            PenstockError: the operation failed, or no core will come any more.
        """
        self._health.require_hope()
        pending = self._operations.ask(operation, self._live.num_asked)
        if self._health.has_core:
            self._link.send(pending.message)
        try:
            done = await asyncio.wait_for(pending.answer, timeout_s)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the operation is not complete after {timeout_s:g} s; it remains in force.",
                remedy="Repeat the request to wait longer.",
            ) from error
        if done.error is not None:
            raise error_from_info(done.error)
        return [done]

    def check_core(self) -> None:
        """End all streams with an error if the core has been silent or away for too long.

        If it comes back, it serves new requests. A timer of the event loop calls this every second.
        """
        self._link.read()  # it may be this process that was stopped: what came meanwhile counts
        if not self._health.has_core:
            self._link.send(Hello())  # once more: a connection may have failed without a word
        error = self._health.gave_up()
        if error is not None and len(self._streams):
            self._link.send(AbortRequests(self._live.ids))
            self._end_all(error)

    def lose(self, error: PenstockError) -> None:
        """End all streams and waits with this error, as no other core will be started.

        Requests and operations that come later get it at once; the first error counts.
        """
        self._health.end(error)
        self._end_all(error)
        self._operations.fail_all(error.info())
        self._tell_waiting()

    def close(self) -> None:
        """Close the connection to the core; streams and waits that are open end with an error."""
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()
        self.lose(UnavailableError("the engine client was closed."))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = self._watch_later(loop)  # also when the check raises
        self.check_core()

    def _watch_later(self, loop: asyncio.AbstractEventLoop) -> asyncio.TimerHandle:
        return loop.call_at(next_beat(loop.time(), HEARTBEAT_S), self._watch, loop)

    def _abort(self, request_id: str) -> None:
        if self._live.forget(request_id):
            self._link.send(AbortRequests([request_id]))

    def _take(self, message: CoreToClient | CoreGone) -> None:
        if isinstance(message, StepUpdates):
            self._health.beat(message.stats)
            self._steady.note(message.stats)
            self._operations.note(message.stats)
            self._deliver(message.updates)
        elif isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Trace):
            self._traces.answer(message.spans)
        elif isinstance(message, Operated):
            self._operations.close(message)
        elif isinstance(message, SessionsChanged):
            self._operations.note_sessions(message)
        elif isinstance(message, PipeHosts):
            self._health.hosts = message
        elif isinstance(message, CoreGone):
            self._core_gone()

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self._live.note(update)
        self._streams.deliver(updates)

    def _welcomed(self, message: Welcome) -> None:
        """Send a core, the first or a later one, the operations and requests that have not ended."""
        self._limits = msgspec.structs.replace(self._limits, max_model_len=message.max_model_len)
        self._health.heard_from_core()
        self._seeds = self._seeds or Seeds(message)
        self._tell_waiting()
        for outgoing in (*self._operations.first(), *self._operations.again(self._live.again())):
            self._link.send(outgoing)

    def _tell_waiting(self) -> None:
        """Wake the callers of `wait_for_core`."""
        self._change.set()
        self._change = asyncio.Event()

    def _core_gone(self) -> None:
        self._health.core_gone()
        self._deliver(self._live.core_lost())
        self._traces.fail_all(CORE_AWAY.info())
        self._link.reopen()

    def _end_all(self, error: PenstockError) -> None:
        self._live.forget_all()
        self._streams.fail_all(error.info())
        self._traces.fail_all(error.info())

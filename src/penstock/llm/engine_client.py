"""The engine as `LLM` uses it: an interface that takes many requests at once and waits for all results.

`InprocessClient` has the engine core and its ranks in this process. `llm.process_client` is the client of an
engine in other processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from penstock.decisions.recorder import open_recorder
from penstock.engine.client.outputs import DraftCounts, TextDelta, total_drafts
from penstock.engine.client.streams import MakeAssembler, OpenStreams, RequestStream
from penstock.engine.core.core_assembly import build_core, prove_stages
from penstock.engine.core.core_clients import refusals
from penstock.engine.stats import CoreStats
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.errors import PenstockError, error_from_info
from penstock.executor.base import Executor
from penstock.llm.progress import ProgressDisplay
from penstock.request import GenerationRequest, RequestUpdate

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A request with checked values, and the function that makes a text or vector of each sequence."""

    request: GenerationRequest
    make_assembler: MakeAssembler


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one request.

    Attributes:
        sequences: the whole output of each sequence.
        num_cached_tokens: prompt tokens whose KV was found in the cache.
        drafts: accepted and rejected drafts, summed over all sequences.
    """

    sequences: list[TextDelta]
    num_cached_tokens: int
    drafts: DraftCounts

    @property
    def whole(self) -> TextDelta:
        """The output of the only sequence."""
        (only,) = self.sequences
        return only

    @classmethod
    def of(cls, sequences: list[TextDelta], streams: Sequence[RequestStream]) -> RequestResult:
        """Return the result of a request. The first stream counts the cached tokens of the prompt.

        Args:
            sequences: the whole output of each sequence.
            streams: the streams of these sequences.
        """
        return cls(sequences, streams[0].cached_tokens, total_drafts(stream.drafts for stream in streams))


class EngineClient(Protocol):
    """The only client of one engine."""

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output that the engine serves."""
        ...

    def run(self, requests: Sequence[OfflineRequest], progress: ProgressDisplay) -> list[RequestResult]:
        """Send all requests, wait until all have ended, and return their results in the same order.

        Raises:
            PenstockError: a request failed, or the engine is lost; the error is the first cause. The other
                requests are then aborted, as they are at a KeyboardInterrupt.
        """
        ...

    def stats(self) -> CoreStats | None:
        """Return the numbers that the core reported last; None while there is no core."""
        ...

    def close(self) -> None:
        """End the engine and wait until nothing of it is left."""
        ...


class InprocessClient:
    """The engine core and its ranks in this process. Only the thread that made it may use it.

    Args:
        plan: the plan of the engine's launch.
        executor: starts the ranks; it has not been started yet.
    """

    def __init__(self, plan: LaunchPlan, executor: Executor) -> None:
        self._executor = executor
        with ExitStack() as undone:
            undone.callback(executor.shutdown)
            recorder = open_recorder(plan.core)
            undone.callback(recorder.close)
            kv_plan = executor.start()
            self._core, scheduler = build_core(
                plan.core, executor, kv_plan, time.monotonic, recorder=recorder
            )
            undone.callback(self._core.close)
            prove_stages(self._core)
            undone.pop_all()
        self.max_model_len = scheduler.max_len
        self._refused: list[RequestUpdate] = []
        self._closed = False

    def run(self, requests: Sequence[OfflineRequest], progress: ProgressDisplay) -> list[RequestResult]:
        """Run the requests; see `EngineClient.run`."""
        streams = OpenStreams(self.abort)
        opened = [streams.open(request.request, request.make_assembler) for request in requests]
        siblings = {stream.request_id: own for own in opened for stream in own}
        try:
            for request in requests:
                self.add(request.request)
            while len(streams):
                for stream in streams.deliver(self.poll(POLL_S)):
                    if stream.error is not None:
                        raise stream.error
                    if all(sibling.has_ended for sibling in siblings[stream.request_id]):
                        progress.advance()
        finally:
            streams.cancel_all()  # after an error or an interrupt no request may run on
        return [RequestResult.of([stream.result() for stream in own], own) for own in opened]

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. If it is refused, `poll` returns one update for each sequence, with the error."""
        try:
            self._core.add_request(request)
        except PenstockError as error:
            self._refused += refusals(request, error)

    def abort(self, request_id: str) -> None:
        """End a sequence; an unknown id is ignored."""
        self._core.abort(request_id)

    def poll(self, timeout_s: float) -> list[RequestUpdate]:
        """Return updates that came within this time. Raises the first cause when the engine is lost."""
        if self._core.failure is not None:
            raise error_from_info(self._core.failure)
        refused, self._refused = self._refused, []
        return refused + self._core.step(0.0 if refused else timeout_s)

    def stats(self) -> CoreStats:
        """Return the core's numbers."""
        return self._core.stats()

    def close(self) -> None:
        """End the engine. May be called twice."""
        if not self._closed:
            self._closed = True
            self._executor.shutdown()
            self._core.close()

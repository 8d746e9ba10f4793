"""Runs a simulation: requests arrive at simulated engines, and the clock jumps from event to event.

    arrivals ──router──▶ replica 0 … R-1 (core, scheduler, flow) ──updates──▶ accounts of the requests

An event is an arrival, a result, a time for which a core asked to be woken, the loss of a stage, or the end
of a loss. If at most N requests may be open at once, a request that has arrived waits until another has
ended. The same run with the same seed gives the same numbers to the last bit: nothing here reads a real
clock, and all random numbers have seeds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.batch import ScheduledBatch
from penstock.engine.client.routing import DECODE_TOKENS, Load, Router
from penstock.errors import ErrorInfo, InvalidRequestError, OverloadedError
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams
from penstock.simulator.clock import SimulatedClock
from penstock.simulator.executor import no_record
from penstock.simulator.pipe import SimulatedPipe, StageLoss
from penstock.simulator.replica import EngineSettings, SimulatedReplica
from penstock.workloads.requests import BenchRequest


@dataclass(slots=True, kw_only=True)
class RequestAccount:
    """The account of one request; times are readings of the simulation's clock, in seconds.

    Attributes:
        sent_s: when it was given to an engine.
        num_tokens: output tokens that have come.
        num_cached: tokens of its prompt that were found in the cache.
        error: why it ended without all its output; None: it still runs, or ended with all its output.
    """

    index: int
    prompt_len: int
    sent_s: float
    replica: int = 0
    first_token_s: float = math.nan
    ended_s: float = math.nan
    num_tokens: int = 0
    num_cached: int = 0
    error: ErrorInfo | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended without an error."""
        return self.error is None and self.ended_s >= self.sent_s


@dataclass(slots=True)
class KVUse:
    """The use of the KV blocks of one replica, over time.

    Attributes:
        since: clock time of the last note.
        peak: most blocks in use at any time.
        block_seconds: the number of blocks in use, summed over time.
    """

    since: float = 0.0
    peak: int = 0
    block_seconds: float = 0.0
    _now: int = 0

    def note(self, now: float, num_used: int) -> None:
        """Note that so many blocks are in use from now on."""
        self.block_seconds += (now - self.since) * self._now
        self.since, self._now = now, num_used
        self.peak = max(self.peak, num_used)


@dataclass(slots=True, kw_only=True)
class FinishedRun:
    """All that is known of a run that has ended.

    Attributes:
        kv_use: the use of KV blocks, for each replica.
        began_s, ended_s: clock times of the start, from which arrivals count, and of the last request's end.
    """

    accounts: list[RequestAccount]
    replicas: Sequence[SimulatedReplica]
    kv_use: list[KVUse]
    began_s: float
    ended_s: float


@dataclass(slots=True)
class _Open:
    """The requests of a replica that have not ended."""

    prompts: dict[str, int] = field(default_factory=dict)  # tokens, until the first token has come
    count: int = 0

    @property
    def tokens_ahead(self) -> int:
        """The tokens that the core computes before a new request's turn, estimated as in `OpenStreams`."""
        return sum(self.prompts.values()) + DECODE_TOKENS * self.count


class Simulation:
    """One simulation of requests to replicas of a pipe.

    Args:
        pipeline: the pipe; all replicas have equal ones.
        num_replicas: number of replicas.
        max_concurrency: most requests that are open at once; None: each request is sent when it arrives.
        losses: losses of stages, in any order.
        max_kept: number of plans of each replica whose times are kept for a timeline.
        record: called with every plan of the first replica; returns the plan's digest.
    """

    def __init__(
        self,
        pipeline: SimulatedPipe,
        settings: EngineSettings,
        *,
        num_replicas: int = 1,
        max_concurrency: int | None = None,
        losses: Iterable[StageLoss] = (),
        max_kept: int = 0,
        record: Callable[[ScheduledBatch], int] = no_record,
    ) -> None:
        self.clock = SimulatedClock()
        self._replicas = [
            SimulatedReplica(
                pipeline,
                settings,
                self.clock,
                number=number,
                max_kept=max_kept,
                record=no_record if number else record,
            )
            for number in range(num_replicas)
        ]
        self._router = Router[int](has_cache=settings.cache.enable_prefix_caching)
        self._open = [_Open() for _ in self._replicas]
        self._kv_use = [KVUse() for _ in self._replicas]
        self._next_at = [0.0] * num_replicas
        self._max_concurrency = max_concurrency or math.inf
        self._num_open = 0
        self._accounts: dict[str, RequestAccount] = {}
        self._losses = list(losses)
        self._changes: list[tuple[float, int, StageLoss]] = []  # losses to come, by clock time
        self._back: list[tuple[float, int]] = []  # clock time at which a replica has all stages again

    def run(self, requests: Sequence[BenchRequest]) -> FinishedRun:
        """Send all requests, and run until all have ended.

        Args:
            requests: in the order of their arrival.
        """
        self._prove_stages()
        offset_s, waiting = self.clock.now, 0
        self._changes = [(offset_s + loss.at_s, number, loss) for number, loss in enumerate(self._losses)]
        heapq.heapify(self._changes)
        ended_s = offset_s
        while waiting < len(requests) or self._num_open:
            now = self.clock.now
            while waiting < len(requests) and self._num_open < self._max_concurrency:
                if requests[waiting].arrival_s + offset_s > now:
                    break
                self._send(requests[waiting])
                waiting += 1
            self._change_stages()
            for number, due in enumerate(self._next_at):
                if due <= now and self._step(number):
                    ended_s = now
            next_arrival = math.inf
            if waiting < len(requests) and self._num_open < self._max_concurrency:
                next_arrival = requests[waiting].arrival_s + offset_s
            self.clock.now = max(now, min(next_arrival, self._next_change(), *self._next_at))
            assert self.clock.now < math.inf, "requests wait, and nothing will happen"
        for replica, use in zip(self._replicas, self._kv_use, strict=True):
            use.note(self.clock.now, self._num_used(replica))
            if replica.core.is_idle:  # else steps in flight hold rows and blocks
                replica.core.check_invariants()
        return FinishedRun(
            accounts=list(self._accounts.values()),
            replicas=self._replicas,
            kv_use=self._kv_use,
            began_s=offset_s,
            ended_s=max(ended_s, offset_s),
        )

    def _prove_stages(self) -> None:
        """Let a plan without tokens cross all stages, as at every start, and begin the accounts after it."""
        for number, replica in enumerate(self._replicas):
            self._step(number)
            self.clock.now = max(self.clock.now, replica.next_at if replica.core.num_inflight else 0.0)
        for number, replica in enumerate(self._replicas):
            self._step(number)
            replica.flow.begin(self.clock.now)
            self._kv_use[number] = KVUse(since=self.clock.now)

    def _send(self, request: BenchRequest) -> None:
        name, now = f"r{request.index}", self.clock.now
        account = RequestAccount(index=request.index, prompt_len=len(request.prompt_token_ids), sent_s=now)
        self._accounts[name] = account
        sampling = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        asked = GenerationRequest(
            request_id=name, prompt_token_ids=request.prompt_token_ids, sampling=sampling
        )
        number = self._choose(request.prompt_token_ids)
        account.replica = number
        try:
            self._replicas[number].add(asked)
        except (OverloadedError, InvalidRequestError) as error:
            account.error, account.ended_s = error.info(), now
            return
        self._router.routed(request.prompt_token_ids, number)
        self._open[number].prompts[name] = account.prompt_len
        self._open[number].count += 1
        self._num_open += 1
        self._next_at[number] = now

    def _choose(self, prompt: Sequence[int]) -> int:
        if len(self._replicas) == 1:
            return 0
        loads = {
            number: Load(own.tokens_ahead, replica.core.has_pipe)
            for number, (own, replica) in enumerate(zip(self._open, self._replicas, strict=True))
        }
        return self._router.order(prompt, loads)[0]

    def _step(self, number: int) -> bool:
        """Let the core of a replica do what is due, and book its updates.

        Returns:
            Whether a request has ended.
        """
        replica = self._replicas[number]
        has_ended = self._book(number, replica.core.step())
        self._kv_use[number].note(self.clock.now, self._num_used(replica))
        self._next_at[number] = replica.next_at
        return has_ended

    def _book(self, number: int, updates: Iterable[RequestUpdate]) -> bool:
        now, own, has_ended = self.clock.now, self._open[number], False
        for update in updates:
            account = self._accounts[update.request_id]
            if update.token_ids:
                if not account.num_tokens:
                    account.first_token_s, account.num_cached = now, update.num_cached_tokens
                    del own.prompts[update.request_id]
                account.num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                account.ended_s, account.error = now, update.error
                own.prompts.pop(update.request_id, None)
                own.count -= 1
                self._num_open -= 1
                has_ended = True
        return has_ended

    def _change_stages(self) -> None:
        """Carry out the losses that are due, and let replicas recover whose lost stage is due back."""
        now = self.clock.now
        while self._back and self._back[0][0] <= now:
            _, number = heapq.heappop(self._back)
            self._replicas[number].recover()
            self._next_at[number] = now
        while self._changes and self._changes[0][0] <= now:
            _, _, loss = heapq.heappop(self._changes)
            replica = self._replicas[loss.replica]
            if not replica.core.has_pipe:
                continue  # the replica has no pipe already: an earlier loss is not over
            self._book(loss.replica, replica.lose(loss))
            heapq.heappush(self._back, (now + loss.away_s, loss.replica))
            self._next_at[loss.replica] = replica.next_at

    def _next_change(self) -> float:
        return min(
            self._changes[0][0] if self._changes else math.inf, self._back[0][0] if self._back else math.inf
        )

    @staticmethod
    def _num_used(replica: SimulatedReplica) -> int:
        return replica.allocator.num_blocks - replica.allocator.num_free_blocks

"""The engine core: keeps the pipe full, and turns results into updates.

One object between a `Scheduler` and an `Executor`. A process loop (`engine.core.core_process`), a thread or a
test calls `step` after any event (a result came, a request came, `next_wakeup` passed); every call first
settles the results that have come and then submits plans until the pipe is full or nobody may run. Never
sleeps on its own, starts nothing, and reads only the injected clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.batch import ScheduledBatch, StageSpans, StepResult
from penstock.config.engine import ParallelConfig
from penstock.engine.core.calibration import Calibration
from penstock.engine.core.operations_in_force import OperationsInForce
from penstock.engine.core.pace import Pace
from penstock.engine.stats import CoreStats
from penstock.errors import ErrorInfo, PeerError, ProtocolError, WaitTimeoutError, concerned, error_from_info
from penstock.executor.base import Executor
from penstock.pipeline.inflight import InflightQueue
from penstock.process.config import NO_RESTARTS, Restarts
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.scheduler import Scheduler

PROBE_INTERVAL_S = 1.0
STALL_BASE_S = 5.0
STALL_PER_TOKEN_S = 0.05


@dataclass(slots=True)
class StepInFlight:
    """A plan on its way through the stages."""

    plan: ScheduledBatch
    num_sampled: int
    submitted_at: float  # clock seconds
    digest: int = 0  # as sealed


class EngineCore:
    """Drives one pipeline.

    Args:
        scheduler: decides; this core is its only caller.
        executor: has been started; runs plans in order and returns one result per plan, in order.
        parallel: gives the largest depth, `P + async_depth` plans in flight (rows D1, S8).
        clock: monotonic seconds.
        calibration: where steps begin, how many plans are issued ahead, and what goes on learning.
        recovers: somebody will join a broken pipe again (`enter_epoch`); else its loss is the end.
        stall_timeout_s: the pipeline is lost when plans are in flight and nothing has come for this long.
        epoch: that the executor was started for.
        restarts: of all processes before that epoch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        parallel: ParallelConfig,
        clock: Callable[[], float],
        *,
        calibration: Calibration | None = None,
        recovers: bool = False,
        stall_timeout_s: float = math.inf,
        epoch: int = 0,
        restarts: Restarts = NO_RESTARTS,
    ) -> None:
        self._calibration = calibration = calibration or Calibration.none(parallel)
        self._scheduler = scheduler
        self.operations = OperationsInForce(scheduler, Pace(clock))  # in force from the next plan on
        self._executor: Executor | None = executor
        self._recovers = recovers
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._inflight: InflightQueue[StepInFlight] = InflightQueue(
            parallel.depth,
            num_stages=parallel.pipeline_parallel_size,
            first_step=calibration.next_step,
        )
        self._results: deque[StepResult] = deque()  # that have come, and are not settled
        self._epoch = epoch
        self._restarts = restarts
        self._last_result_at = -math.inf  # the first probe is due at once: it proves the stages
        self._failure: ErrorInfo | None = None
        self._loss: ErrorInfo | None = None
        self._late = {"starved": True}  # why the next plan is not issued now: fields of `ScheduledBatch`

    @property
    def failure(self) -> ErrorInfo | None:
        """The first cause, once the pipeline is lost; nothing is accepted or submitted from then on."""
        return self._failure

    @property
    def loss(self) -> ErrorInfo | None:
        """Why the pipe is broken; until a step has crossed it again. Requests wait meanwhile."""
        return self._loss

    @property
    def epoch(self) -> int:
        """The present one, or between two the one that is over."""
        return self._epoch

    @property
    def has_pipe(self) -> bool:
        """Whether there is an epoch to submit plans in."""
        return self._executor is not None

    @property
    def is_idle(self) -> bool:
        """No request is alive and every slot is empty (row F8): only then may an engine check itself."""
        return not self._scheduler.has_requests and len(self._inflight) == 0

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def steps_in_flight(self) -> tuple[int, int]:
        """Half-open range of the steps in flight; it changes just when something is settled or submitted.

        A loop over edge-triggered descriptors calls `step` until this stays the same.
        """
        return self._inflight.oldest_step, self._inflight.next_step

    def add_request(
        self, request: GenerationRequest, output_ids: Sequence[int] | None = None, num_scores: int = 0
    ) -> None:
        """Queue a request; the next `step` may run it, on from what another core that had it has given it.

        Raises:
            InvalidRequestError, OverloadedError: it is refused, as `Scheduler.add` says.
            PenstockError: the pipeline is lost; the error is its first cause.
        """
        if self._failure is not None:
            raise error_from_info(self._failure)
        self._scheduler.add(request, output_ids, num_scores)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state; no update of it follows (row D13). False: there is none."""
        return self._scheduler.abort(request_id)

    def step(self, timeout_s: float = 0.0) -> list[RequestUpdate]:
        """Settle the results that have come, then fill the pipe (row D2).

        Args:
            timeout_s: when nothing has come and plans are in flight, wait this long for a result at most.

        Returns:
            Updates in the order of their steps; empty when nothing has come. When the pipeline is lost, one
            last update for each request, with `finish_reason` "error"; afterwards always empty.
        """
        updates: list[RequestUpdate] = []
        if self._failure is not None:
            return updates
        if self._executor is None:
            return self._scheduler.expire()
        try:
            self._turn(self._executor, updates)
            if timeout_s > 0 and not updates:
                self._wait(self._executor, timeout_s, updates)
        except PeerError as error:
            if self._recovers:
                updates += self.lose_epoch(error.info())
            else:
                updates += self.fail(error.info())
        return updates

    def lose_epoch(self, error: ErrorInfo, *, is_final: bool = False) -> list[RequestUpdate]:
        """Give up the steps in flight, `error` being the cause; requests keep their tokens and wait.

        Args:
            is_final: it may be long until there is a pipe again: who has started ends with the error.

        Returns:
            The last update of each request that ends.
        """
        self._loss = error
        updates: list[RequestUpdate] = []
        if self._executor is not None:
            self._executor.abandon()
            self._executor = None
            self._give_up_steps()
            updates += self._scheduler.requeue()
        if is_final:
            updates += self._scheduler.fail_started(error)
        return updates

    def enter_epoch(self, epoch: int, executor: Executor, restarts: Restarts = NO_RESTARTS) -> None:
        """Go on over a pipe that was joined again; the probe that proves it is due at once.

        Args:
            executor: has been started, for plans from `steps_in_flight[1]` of this epoch.
            restarts: up to this epoch.
        """
        assert self._executor is None, "the epoch before is not over"
        self._epoch, self._executor, self._restarts = epoch, executor, restarts
        self._last_result_at = self._clock() - PROBE_INTERVAL_S

    def fail(self, error: ErrorInfo) -> list[RequestUpdate]:
        """Give the pipeline up, `error` being the first cause: one last update for each request."""
        self._failure = error
        self._give_up_steps()
        return self._scheduler.fail_all(error)

    def _give_up_steps(self) -> None:
        self._inflight.clear()
        self._results.clear()

    def close(self) -> None:
        """Let go of the store; the executor is its owner's."""
        self._scheduler.prefixes.close()

    def next_wakeup(self) -> float:
        """Clock time at which `step` has work even if no event comes; infinite if there is none."""
        expiry = self._scheduler.next_expiry()
        has_pipe = self._failure is None and self._executor is not None
        wakeups = self._due(), self._scheduler.prefixes.next_look(), self.operations.pace.next_wakeup()
        due = min(wakeups) if has_pipe else math.inf
        return due if expiry is None else min(due, expiry)

    def stats(self) -> CoreStats:
        return CoreStats(
            **msgspec.structs.asdict(self._scheduler.stats()),
            step_id=self._inflight.next_step,
            inflight=len(self._inflight),
            last_result_age_s=self._clock() - self._last_result_at,
            stalled_s=self.stalled_s(),
            stall_limit_s=self.stall_limit_s(),
            plan_interval_ms=self.operations.pace.interval_ms,
            open_operations=self.operations.num_open,
            epoch=self._epoch,
            loss=self._loss,
            restarts=self._restarts,
            stage_times=[] if self._executor is None else self._executor.stage_times(),
        )

    def spans(self) -> list[StageSpans]:
        """What each stage did lately, for a trace."""
        return [] if self._executor is None else self._executor.spans()

    def stalled_s(self) -> float:
        """Seconds since a result came or the oldest step in flight was submitted; 0 when there is none."""
        return self._clock() - self._waiting_since() if len(self._inflight) else 0.0

    def stall_limit_s(self) -> float:
        """How long a healthy pipe may be silent now: an empty plan crosses at once, a large one does not."""
        num_tokens = self._inflight.oldest().plan.total_tokens if len(self._inflight) else 0
        return STALL_BASE_S + STALL_PER_TOKEN_S * num_tokens

    def check_invariants(self) -> None:
        """Assert that the parts agree. For tests, and when idle."""
        self._inflight.check_invariants()
        self._scheduler.check_invariants()

    def _turn(self, executor: Executor, updates: list[RequestUpdate]) -> None:
        self._take(executor, 0.0, updates)
        self._check_progress()
        updates += self._scheduler.expire()
        self._fill(executor)
        if self._calibration.costs is not None:
            self._calibration.costs.follow(self._clock(), executor.spans)
        if len(self._inflight) == 0 and (self._clock() >= self._due() or self.operations.wants_plan):
            self._submit(self._scheduler.probe(self._inflight.next_step))

    def _wait(self, executor: Executor, timeout_s: float, updates: list[RequestUpdate]) -> None:
        """For a result, for blocks from the store, or for a grammar."""
        look_s = self._scheduler.prefixes.next_look() - self._clock()
        if len(self._inflight) or look_s < math.inf or self._scheduler.grammars.is_any_awaited:
            self._take(executor, max(0.0, min(timeout_s, look_s)), updates)
            self._fill(executor)

    def _check_progress(self) -> None:
        stalled_s = self.stalled_s()
        if stalled_s > self._stall_timeout_s:
            raise WaitTimeoutError(
                f"step {self._inflight.oldest_step} has been in the stages for {stalled_s:.0f} s."
                f"{self._concerned()}",
                remedy="Raise --step-timeout if the model is that slow.",
            )

    def _waiting_since(self) -> float:
        return max(self._last_result_at, self._inflight.oldest().submitted_at)

    def _due(self) -> float:
        """When the pipe counts as lost, or if it is empty when it is probed."""
        if len(self._inflight):
            return self._waiting_since() + self._stall_timeout_s
        return self._last_result_at + PROBE_INTERVAL_S

    def _take(self, executor: Executor, timeout_s: float, updates: list[RequestUpdate]) -> None:
        """Settle what has come. The result of a step that read blocks while they were being loaded waits
        until all ranks have said whether they were."""
        self._results += executor.poll(timeout_s)
        self._scheduler.settle_orders(executor.finished_orders(), executor.store_use())
        updates += self._scheduler.settle_grammars(executor.built_grammars())
        while self._results and self._are_loads_answered():
            result = self._results.popleft()
            _check_result(result, self._inflight, self._epoch, self._concerned)
            step = self._inflight.pop()
            updates += self._scheduler.update(step.plan, result)
            self.operations.settled(result.step_id, self._inflight.next_step)
            self._last_result_at = self._clock()
            self._loss = None

    def _are_loads_answered(self) -> bool:
        awaited = self._inflight.oldest().plan.awaited if len(self._inflight) else []
        return self._scheduler.prefixes.are_answered(awaited)

    def _concerned(self) -> str:
        """Whose the oldest step in flight is, for a message."""
        return concerned(self._scheduler.requests_of(self._inflight.oldest_step))

    def _fill(self, executor: Executor) -> None:
        while len(self._inflight) < self._scheduler.useful_depth + self._calibration.async_depth:
            if not self.operations.pace.allows_plan:
                self._late = {}  # ranks wait for a plan
                return
            plan = self._scheduler.schedule(self._inflight.next_step)
            if plan is None:
                self._late = {"starved": True}
                return
            self.operations.pace.planned()
            self._submit(plan)
        self._late = {"held": True}

    def _submit(self, plan: ScheduledBatch) -> None:
        assert self._executor is not None
        told = self.operations.wants_times
        plan = msgspec.structs.replace(plan, epoch=self._epoch, wants_times=told, **self._late)
        self._late = {}
        if self._calibration.costs is not None:
            self._calibration.costs.submitted(plan, alone=self._scheduler.is_one_alone)
        step = StepInFlight(plan, plan.need_sampled.count(True), self._clock())
        self._inflight.push(step)
        step.digest = self._executor.submit(plan)


def _check_result(
    result: StepResult, inflight: InflightQueue[StepInFlight], epoch: int, concerned_by: Callable[[], str]
) -> None:
    """Results come in step order, one list entry per sampled or pooled row, and a score for each token that
    the plan names, or none of those of a row; anything else is not ours.

    Args:
        concerned_by: says whose the oldest step in flight is.
    """
    due, stage = inflight.oldest_step, inflight.num_stages - 1
    if len(inflight) == 0 or result.step_id != due:
        raise ProtocolError(
            f"the result of step {result.step_id} came, but step {due} is due "
            f"({len(inflight)} in flight).{concerned_by()}",
            stage=stage,
        )
    step = inflight.oldest()
    expected = (epoch, step.digest, step.num_sampled)
    found = (result.epoch, result.digest, len(result.token_ids))
    if found != expected:
        raise ProtocolError(
            f"the result of step {result.step_id}: expected (epoch, digest, rows) {expected}, found "
            f"{found}.{concerned_by()}",
            stage=stage,
        )
    scored, scores = [tokens.count for tokens in step.plan.scored], [len(own) for own in result.scores]
    if len(scores) != len(scored) or any(map(lambda has, due: has not in (0, due), scores, scored)):
        raise ProtocolError(
            f"the result of step {result.step_id}: expected scores of {scored} tokens, found {scores}."
            f"{concerned_by()}",
            stage=stage,
        )
    if len(result.pooled) != len(step.plan.pooled):
        raise ProtocolError(
            f"the result of step {result.step_id} has {len(result.pooled)} vectors, the plan pools "
            f"{len(step.plan.pooled)} rows.{concerned_by()}",
            stage=stage,
        )

"""The engine core: keeps the stages busy with plans, and turns their results into updates for clients.

The core stands between a `Scheduler`, which makes plans, and an `Executor`, which runs them on the ranks. The
loop of the core's process (`engine.core.core_server`), a thread or a test calls `step` after any event: a
result or a request has come, or the time of `next_wakeup`. While ranks are connected, every call first
settles the results that have come. It then submits plans until the pipe is full or no request may run. It
waits only if the caller gives a timeout. The core starts no process and no thread, and takes the time only
from the clock that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from penstock.batch import RankLoaded, SpansKey, StageSpans, StageTimes
from penstock.config.engine import ParallelConfig
from penstock.engine.core.calibration import Calibration
from penstock.engine.core.operations_in_force import OperationsInForce, Ticket
from penstock.engine.core.pace import Pace
from penstock.engine.core.plan_feed import PlanFeed
from penstock.engine.core.result_sense import MAX_VOCAB_SIZE
from penstock.engine.core.stall_limits import NO_LIMIT, StallLimit
from penstock.engine.core.steps_in_flight import StepsInFlight
from penstock.engine.core.wire_times import NO_WIRE_TIMES, AnyWireTimes
from penstock.engine.stats import CoreStats, stage_memory, with_peaks_of
from penstock.errors import ErrorInfo, PeerError, concerned, error_from_info
from penstock.executor.base import NO_EXECUTOR, Executor
from penstock.kvcache.store_sites import store_sites
from penstock.operations import Operation
from penstock.process.control import EndedRequests
from penstock.process.endpoints import NO_RESTARTS, Restarts
from penstock.process.numeric_class import class_of_pipe
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.scheduler import Scheduler

_DRAFT_POLL_S = 0.002  # `step` can wait only for results: it looks for the drafter's guesses this often


class EngineCore:
    """The core of one pipeline, which submits plans and settles results whenever `step` is called.

    Args:
        scheduler: makes the plans; this core is its only caller.
        executor: a started executor, which runs plans in order and returns one result per plan, in order.
        parallel: gives the largest number of plans in flight [D1] [S8].
        clock: monotonic seconds.
        calibration: step id of the first plan, how many plans wait at stage 0, and what learns plans' costs.
        recovers: whether a broken pipe will be connected anew (`enter_epoch`); if not, its loss is final.
        stall_limit: how long a plan may be in the stages until the pipeline counts as lost.
        wire: measures the time of plans between the stages.
        epoch, restarts: the executor's epoch (one set of connections), and process restarts before it.
        ranks: what each rank reported when it had loaded, stage by stage.
        vocab_size: token ids in results are below this.

    Attributes:
        leave_s: seconds that stages may need to finish what was in flight when the last epoch was lost.
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
        stall_limit: StallLimit = NO_LIMIT,
        wire: AnyWireTimes = NO_WIRE_TIMES,
        epoch: int = 0,
        restarts: Restarts = NO_RESTARTS,
        ranks: Sequence[RankLoaded] = (),
        vocab_size: int = MAX_VOCAB_SIZE,
    ) -> None:
        calibration = calibration or Calibration.none(parallel)
        self._scheduler = scheduler
        pace = Pace(clock)
        self.operations = OperationsInForce(scheduler, pace)  # in force from the next plan on
        self._executor = executor
        self._recovers = recovers
        self._clock = clock
        self._steps = StepsInFlight(
            parallel,
            calibration.next_step,
            clock,
            stall_limit=stall_limit,
            wire=wire,
            concerned_by=lambda step_id: concerned(scheduler.requests_of(step_id)),
            vocab_size=vocab_size,
        )
        self._feed = PlanFeed(scheduler, self._steps, pace, self.operations, calibration, wire)
        self._epoch = epoch
        self._restarts = restarts
        self._failure: ErrorInfo | None = None
        self._loss: ErrorInfo | None = None
        self._is_loss_lasting = False
        self.leave_s = math.inf
        self._ranks: list[RankLoaded] = []
        self._meet(ranks)

    @property
    def failure(self) -> ErrorInfo | None:
        """The error that ended the pipeline for good: no request is accepted. None if it has not ended."""
        return self._failure

    @property
    def loss(self) -> ErrorInfo | None:
        """The reason why the pipe is broken; None once a step has crossed it again."""
        return self._loss

    @property
    def epoch(self) -> int:
        """The number of the present epoch; between two epochs, the number of the last one."""
        return self._epoch

    @property
    def numeric_classes(self) -> list[str]:
        """The numeric class of each rank, stage by stage; ranks of one class compute the same bits."""
        return [rank.numeric_class for rank in self._ranks]

    @property
    def has_pipe(self) -> bool:
        """Whether the core has ranks: not so between two epochs; after `fail` it still has them."""
        return self._executor is not NO_EXECUTOR

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests and no plans in flight [F8]; invariants can then be checked."""
        return not self._scheduler.has_requests and len(self._steps) == 0

    @property
    def num_inflight(self) -> int:
        return len(self._steps)

    @property
    def steps_in_flight(self) -> tuple[int, int]:
        """The ids of the oldest step in flight and of the next one to submit.

        A loop over edge-triggered descriptors calls `step` until this pair stays the same.
        """
        return self._steps.oldest_step, self._steps.next_step

    def add_request(
        self, request: GenerationRequest, output_ids: Sequence[int] | None = None, num_scores: int = 0
    ) -> None:
        """Queue a request; the next `step` may run it.

        A client sends requests of a lost core again: with `output_ids`, the tokens that the core returned,
        and `num_scores`, the number of prompt log-probabilities. Raises `InvalidRequestError` or
        `OverloadedError` to refuse the request, or `failure` if the pipeline was lost for good.
        """
        if self._failure is not None:
            raise error_from_info(self._failure)
        self._scheduler.add_request(request, output_ids, num_scores)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; no update of it follows [D13]. Returns False if it does not exist."""
        return self._scheduler.abort_request(request_id)

    def operate(self, ticket: Ticket, operation: Operation) -> list[RequestUpdate]:
        """Put an admin operation into force, and return the last update of each request that it ends."""
        return self.operations.accept(ticket, operation, self._steps.next_step)

    def step(self, timeout_s: float = 0.0) -> list[RequestUpdate]:
        """Settle the results that have come, then submit plans until the pipe is full [D2].

        Args:
            timeout_s: the longest wait for a result, if there is no update yet.

        Returns:
            Updates in the order of their steps, and of requests that waited too long. When the pipeline is
            lost for good, a last one for each request, with `finish_reason` "error"; then always empty.
        """
        updates: list[RequestUpdate] = []
        if self._failure is not None:
            return updates
        if not self.has_pipe:
            self._scheduler.windows.refresh()
            return self._scheduler.expire_requests()
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

    def lose_epoch(self, error: ErrorInfo, *, ends: EndedRequests = "none") -> list[RequestUpdate]:
        """Give up connections and steps in flight because of this error; requests keep their tokens and wait.

        Args:
            ends: which requests (none, started or all) end with the error instead of waiting.

        Returns:
            The last update of each request that ends.
        """
        self._loss, self._is_loss_lasting = error, ends != "none"
        updates: list[RequestUpdate] = []
        if self.has_pipe:
            self._executor.abandon()
            self._executor = NO_EXECUTOR
            # Before `give_up` forgets the steps: `leave_s` depends on how large they are.
            self.leave_s = self._steps.leave_s()
            self._steps.give_up()
            updates += self._scheduler.requeue()
        if ends == "started":
            updates += self._scheduler.fail_started(error)
        elif ends == "all":
            updates += self._scheduler.fail_all(error)
        return updates

    def enter_epoch(
        self,
        epoch: int,
        executor: Executor,
        restarts: Restarts = NO_RESTARTS,
        ranks: Sequence[RankLoaded] = (),
    ) -> None:
        """Go on over ranks that are connected anew; a probe (a plan without requests) is due at once.

        Args:
            executor: a started executor of this epoch; its first plan is step `steps_in_flight[1]`.
            restarts: how often processes were started again up to this epoch.
            ranks: what each rank has reported in this epoch, stage by stage.
        """
        assert not self.has_pipe, "the previous epoch has not ended"
        self._epoch, self._executor, self._restarts = epoch, executor, restarts
        self._meet(ranks)
        self._steps.expect_probe()

    def fail(self, error: ErrorInfo) -> list[RequestUpdate]:
        """End the pipeline for good with this error, and return one last update for each request."""
        self._failure = error
        self._steps.give_up()
        return self._scheduler.fail_all(error)

    def close(self) -> None:
        """Close the KV store and the drafters, which guess tokens ahead. The caller closes the executor."""
        self._scheduler.prefixes.close()
        self._scheduler.windows.close()

    def wait_sources(self) -> Sequence[int]:
        """Return the drafters' file descriptors, readable when `step` has work; the executor has its own."""
        return self._scheduler.windows.wait_sources() if self._failure is None else ()

    def next_wakeup(self) -> float:
        """Return the clock time at which `step` has work even without an event; infinite if there is none."""
        expiry = self._scheduler.next_expiry()
        scheduler = self._scheduler
        looks = scheduler.prefixes.next_look(), scheduler.windows.next_due()
        is_alive = self.has_pipe and self._failure is None
        due = min(self._steps.due(), self._feed.next_wakeup(), *looks) if is_alive else math.inf
        return due if expiry is None else min(due, expiry)

    def stats(self) -> CoreStats:
        prefixes = self._scheduler.prefixes
        cache = prefixes.cache_stats()
        return CoreStats(
            scheduler=self._scheduler.stats(),
            cache=cache,
            store=prefixes.store_stats(),
            sessions=prefixes.sessions.stats(),
            step_id=self._steps.next_step,
            inflight=len(self._steps),
            last_result_age_s=self._steps.last_result_age_s(),
            stalled_s=self._steps.stalled_s(),
            stall_limit_s=self._steps.stall_limit_s(),
            plan_interval_ms=self._feed.interval_ms,
            open_operations=self.operations.num_open,
            epoch=self._epoch,
            loss=self._loss,
            is_loss_lasting=self._is_loss_lasting,
            restarts=self._restarts,
            stage_times=self.stage_times(),
            stage_memory=stage_memory(self._ranks, cache.num_blocks),
            numeric_classes=self.numeric_classes,
        )

    def stage_times(self) -> list[StageTimes]:
        """Return the newest report of each stage's use of time; empty between two epochs."""
        return self._executor.reports.stage_times()

    def spans(self) -> list[StageSpans]:
        """Return the timed work of each stage's first rank in the last seconds, for a trace."""
        return self._executor.reports.spans()

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """Return the timed work of each rank that is not in `seen`, the keys of known reports."""
        return self._executor.reports.rank_spans(seen)

    def check_invariants(self) -> None:
        """Assert that the parts agree: in tests, and at the end of a simulation."""
        self._steps.check_invariants()
        self._scheduler.check_invariants()

    def _meet(self, ranks: Sequence[RankLoaded]) -> None:
        """Adopt an epoch's ranks: blocks' names get their numeric class, and their stores are used."""
        self._ranks = with_peaks_of(ranks, self._ranks)
        self._scheduler.prefixes.name_for(class_of_pipe(ranks))
        self._scheduler.prefixes.meet_stores(store_sites(ranks), self._executor)

    def _turn(self, executor: Executor, updates: list[RequestUpdate]) -> None:
        # Results are taken before the clock is read: a step whose result has come is not late.
        self._take(executor, 0.0, updates)
        self._steps.check_progress()
        updates += self._scheduler.expire_requests()
        self._scheduler.windows.refresh()
        self._feed.fill(executor, self._epoch)
        self._feed.learn(self._clock(), executor)
        if len(self._steps) == 0 and (self._clock() >= self._steps.due() or self.operations.wants_plan):
            self._feed.probe(executor, self._epoch)

    def _wait(self, executor: Executor, timeout_s: float, updates: list[RequestUpdate]) -> None:
        """Wait for a result, for blocks from the store, for a grammar, or for guesses."""
        look_s = self._scheduler.prefixes.next_look() - self._clock()
        if self._scheduler.windows.next_due() < math.inf:
            look_s = min(look_s, _DRAFT_POLL_S)
        if len(self._steps) or look_s < math.inf or self._scheduler.grammars.is_any_awaited:
            self._take(executor, max(0.0, min(timeout_s, look_s)), updates)
            self._scheduler.windows.refresh()
            self._feed.fill(executor, self._epoch)

    def _take(self, executor: Executor, timeout_s: float, updates: list[RequestUpdate]) -> None:
        """Settle the results that have come; a step that loads KV blocks waits for all ranks' answers."""
        self._steps.add_results(executor.poll_results(timeout_s))
        reports = executor.reports
        self._scheduler.settle_orders(reports.finished_orders(), reports.store_use())
        updates += self._scheduler.settle_grammars(reports.built_grammars())
        while self._steps.has_results and self._scheduler.prefixes.are_answered(self._steps.awaited):
            plan, result = self._steps.settle(self._epoch)
            updates += self._scheduler.settle_result(plan, result)
            self.operations.settled(result.step_id, self._steps.next_step)
            self._steps.note_result()
            self._loss, self._is_loss_lasting = None, False

"""The core's table of steps: those in the stages, the results that have come, and how long steps take.

    submitted ──▶ [ plans in flight ] ──a result has come──▶ [ results ] ──in step order──▶ settled

A result that may not be settled yet waits here. This module finds out when no result has come for too long,
when a probe is due, and whether a result belongs to its step. Owned by `engine.core.core`, which acts on it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.batch import GUESSED, ScheduledBatch, StepResult
from penstock.config.engine import ParallelConfig
from penstock.engine.core.result_sense import require_sense
from penstock.engine.core.stall_limits import StallLimit
from penstock.engine.core.wire_times import AnyWireTimes
from penstock.errors import ProtocolError, WaitTimeoutError
from penstock.pipeline.inflight import InflightQueue
from penstock.process.rhythm import next_beat

PROBE_INTERVAL_S = 1.0
STALL_BASE_S = 5.0
STALL_PER_TOKEN_S = 0.05


@dataclass(slots=True)
class StepInFlight:
    """A plan on its way through the stages.

    Attributes:
        num_sampled: number of rows of which a token is sampled in this step.
        digest: digest of the plan, which its result must have too.
    """

    plan: ScheduledBatch
    num_sampled: int
    submitted_at: float  # clock seconds
    digest: int = 0  # 0 until the executor has sealed the plan


class StepsInFlight:
    """The steps that were submitted and are not settled: their results have not come, or are not handled yet.

    Args:
        parallel: gives the largest number of plans in flight [D1] [S8].
        first_step: step id of the first plan.
        clock: monotonic seconds.
        stall_limit: how long a plan may take until the pipeline counts as lost.
        wire: measures the time of plans between the stages; it is told of all plans and results.
        concerned_by: returns a text that names the requests of a step, for messages.
        vocab_size: token ids in results are below this.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        first_step: int,
        clock: Callable[[], float],
        *,
        stall_limit: StallLimit,
        wire: AnyWireTimes,
        concerned_by: Callable[[int], str],
        vocab_size: int,
    ) -> None:
        self._inflight: InflightQueue[StepInFlight] = InflightQueue(
            parallel.depth, num_stages=parallel.pipeline_parallel_size, first_step=first_step
        )
        self._results: deque[StepResult] = deque()  # results that have come and are not settled
        self._clock = clock
        self._stall_limit = stall_limit
        self._wire = wire
        self._concerned_by = concerned_by
        self._vocab_size = vocab_size
        self._last_result_at = -math.inf  # the first probe is due at once: it proves the stages

    def __len__(self) -> int:
        return len(self._inflight)

    @property
    def oldest_step(self) -> int:
        return self._inflight.oldest_step

    @property
    def next_step(self) -> int:
        return self._inflight.next_step

    @property
    def awaited(self) -> list[int]:
        """The numbers of orders to load KV blocks that must be answered before the oldest step can settle."""
        return self._inflight.oldest().plan.awaited if len(self._inflight) else []

    def push(self, plan: ScheduledBatch) -> StepInFlight:
        """Add the step of a plan that is submitted now, and return it; the caller fills in its digest."""
        step = StepInFlight(plan, plan.need_sampled.count(True), self._clock())
        self._inflight.push(step)
        self._wire.submitted(plan)
        return step

    def add_results(self, results: Iterable[StepResult]) -> None:
        """Keep results that have come, in step order, until `settle` takes them."""
        self._results += results

    @property
    def has_results(self) -> bool:
        """Whether results have come that are not settled."""
        return bool(self._results)

    def settle(self, epoch: int) -> tuple[ScheduledBatch, StepResult]:
        """Remove the oldest step, and return its plan and its result, which must have come.

        Raises:
            ProtocolError: the result does not belong to this step, or is not valid.
        """
        result = self._results.popleft()
        # Checked before the step is removed: errors name the requests of the oldest step in flight.
        _check_result(result, self._inflight, epoch, self._concerned)
        require_sense(result, self._vocab_size, self._inflight.num_stages - 1)
        step, now = self._inflight.pop(), self._clock()
        self._wire.crossed(step.plan, now - step.submitted_at)
        if not step.plan.awaited:  # otherwise its result may have waited for the store
            self._stall_limit.crossed(step.plan.total_tokens, step.submitted_at, now)
        return step.plan, result

    def note_result(self) -> None:
        """Record that a result was settled now."""
        self._last_result_at = self._clock()

    def give_up(self) -> None:
        """Forget all steps and results, since no more results will come; step ids are not used again."""
        self._inflight.clear()
        self._results.clear()
        self._wire.forget()

    def expect_probe(self) -> None:
        """Make a probe, an empty plan that tests the stages, due at once."""
        self._last_result_at = self._clock() - PROBE_INTERVAL_S

    def last_result_age_s(self) -> float:
        """Return the seconds since a result was settled; infinite before the first."""
        return self._clock() - self._last_result_at

    def stalled_s(self) -> float:
        """Return the seconds for which a result has been due; 0 if no step is in flight.

        They count from the last settled result, or from the submission of the oldest step if that was later.
        """
        return self._clock() - self._waiting_since() if len(self._inflight) else 0.0

    def stall_limit_s(self) -> float:
        """Return the seconds without a result after which the engine is shown as not ready.

        They grow with the tokens of the oldest step: an empty plan crosses at once, a large one does not.
        """
        return STALL_BASE_S + STALL_PER_TOKEN_S * self._oldest_tokens()

    def check_progress(self) -> None:
        """Raise `WaitTimeoutError` if the oldest step has taken so long that the pipeline counts as lost."""
        counts_from = self._stall_limit.look(self._clock())
        if self._has_lost(counts_from):
            stalled_s = self.stalled_s()
            self._stall_limit.exceeded(self._oldest_tokens())
            raise WaitTimeoutError(
                f"step {self._inflight.oldest_step} has been in the stages for {stalled_s:.0f} s."
                f"{self._concerned()}",
                remedy="Raise --step-timeout if the model needs longer.",
            )

    def due(self) -> float:
        """Return the clock time at which to look again whether the steps are stalled, or a probe is due."""
        if len(self._inflight) == 0:
            return next_beat(self._last_result_at, PROBE_INTERVAL_S)
        return min(self._waiting_since() + self.loss_limit_s(), self._stall_limit.next_look(self._clock()))

    def loss_limit_s(self) -> float:
        """Return how many seconds the oldest step may take until the pipe counts as lost.

        Without a step in flight, it is the limit of an empty plan.
        """
        return self._stall_limit.seconds(self._oldest_tokens())

    def leave_s(self) -> float:
        """Return how many seconds stages may go on with the steps in flight, if these are given up now.

        It is the longest limit of all plans in flight: a stage may already work on a step behind the oldest.
        """
        sizes = {step.plan.total_tokens for step in self._inflight.entries()} or {0}
        return max(self._stall_limit.leave_s(num_tokens) for num_tokens in sizes)

    def check_invariants(self) -> None:
        self._inflight.check_invariants()

    def _has_lost(self, counts_from: float) -> bool:
        """Return whether the oldest step has been in the stages for too long.

        If results have come and are not settled, the oldest step waits for the store, and not for the stages.
        """
        if len(self._inflight) == 0 or self.has_results:
            return False
        return self._clock() - max(self._waiting_since(), counts_from) > self.loss_limit_s()

    def _oldest_tokens(self) -> int:
        return self._inflight.oldest().plan.total_tokens if len(self._inflight) else 0

    def _waiting_since(self) -> float:
        return max(self._last_result_at, self._inflight.oldest().submitted_at)

    def _concerned(self) -> str:
        """Return a text that names the requests of the oldest step in flight, for a message."""
        return self._concerned_by(self._inflight.oldest_step)


def _check_result(
    result: StepResult, inflight: InflightQueue[StepInFlight], epoch: int, concerned_by: Callable[[], str]
) -> None:
    """Raise `ProtocolError` unless the result is that of the oldest step in flight, and is complete.

    Results come in step order, with one list entry per sampled or pooled row. A row has a score for each
    token that the plan names, or no score at all.

    Args:
        concerned_by: returns a text that names the requests of the oldest step in flight.
    """
    due, stage = inflight.oldest_step, inflight.num_stages - 1
    if len(inflight) == 0 or result.step_id != due:
        raise ProtocolError(
            f"expected the result of step {due}, received that of step {result.step_id} ({len(inflight)} in "
            f"flight).{concerned_by()}",
            stage=stage,
        )
    step = inflight.oldest()
    expected = (epoch, step.digest, step.num_sampled)
    actual = (result.epoch, result.digest, len(result.token_ids))
    if actual != expected:
        raise ProtocolError(
            f"the result of step {result.step_id}: expected (epoch, digest, rows) {expected}, found "
            f"{actual}.{concerned_by()}",
            stage=stage,
        )
    widths, rejected = [len(ids) for ids in result.token_ids], result.num_rejected
    if step.plan.drafts and min(rejected, default=0) >= 0:
        widths = [sum(pair) for pair in zip(widths, rejected, strict=False)]
    if widths != step.plan.window_sizes:
        raise ProtocolError(
            f"the result of step {result.step_id}: expected {step.plan.window_sizes} ids and rejected "
            f"drafts, found {widths}.{concerned_by()}",
            stage=stage,
        )
    if not all(result.token_ids) and GUESSED not in step.plan.token_from:
        raise ProtocolError(
            f"the result of step {result.step_id} has no ids for a row.{concerned_by()}", stage=stage
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
            f"the result of step {result.step_id} has {len(result.pooled)} vectors, but the plan pools "
            f"{len(step.plan.pooled)} rows.{concerned_by()}",
            stage=stage,
        )

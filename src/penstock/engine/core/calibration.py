"""Measures, before the first request, what stages cost and how many plans should wait at stage 0.

It sends plans of made-up requests through the real pipe: decodes and prompt chunks of several sizes. Each
size is tried with one plan in flight (*alone*) and with a full pipe (*shared*). The stages' reports teach the
cost model. If `async_depth` (the plans issued beyond those that fill the pipe) is `auto`, the time from one
result to the next decides it. The trials also touch memory and run code for the first time, so that the first
request does not pay for that.

Afterwards the made-up requests are removed. Their steps count, so that the engine core goes on from
`next_step`. The first trial alone and the first with a full pipe always run, since nothing would be known
without them; no other trial begins after `BUDGET_S` seconds. Called by `engine.core.core_assembly`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock.batch import GREEDY, KNOWN, MADE_UP, NewRow, PlanMeta, ScheduledBatch
from penstock.config.engine import ParallelConfig
from penstock.engine.core.cost_learning import NO_COSTS, CostLearner, NoCosts
from penstock.errors import WaitTimeoutError
from penstock.executor.base import Executor, KVPlan
from penstock.process.config import CoreConfig
from penstock.scheduler.cost_model import CostModel

BUDGET_S = 3.0
_NUM_FOR_DEPTH = 2  # only so many cases are tried with each `async_depth`, to choose one
_POLL_S = 0.02
_CONTEXT = 64  # tokens before a decode
_CHUNK = 32  # tokens of a prompt chunk: enough that arithmetic sets the time, and few enough to be quick
_LATE = 448  # tokens before a decode or chunk with a long context
_AHEAD_GAIN = 0.02  # a plan is issued ahead if it saves at least this share of the time between results


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of the calibration at start, with which the engine core begins.

    Attributes:
        next_step: step id of the core's first plan.
        async_depth: plans to issue beyond those that fill the pipe.
        costs: learns the costs of plans; `NO_COSTS` if plans are not sized by time.
    """

    next_step: int = 0
    async_depth: int = 0
    costs: CostLearner | NoCosts = NO_COSTS

    @classmethod
    def none(cls, parallel: ParallelConfig) -> Calibration:
        """Return the result without a measurement: no costs, and an `async_depth` of 0 where it is `auto`."""
        return cls(async_depth=0 if parallel.async_depth == "auto" else parallel.async_depth)


@dataclass(frozen=True, slots=True)
class _Case:
    """The rows of a trial's plans, which are all alike: `num_tokens` tokens from position `start` on."""

    num_rows: int
    num_tokens: int
    start: int


def calibrate(
    executor: Executor, config: CoreConfig, kv_plan: KVPlan, clock: Callable[[], float], *, epoch: int = 0
) -> Calibration:
    """Measure the stages with made-up plans, and return the result.

    Nothing is measured if the bits that some rank computes for a row depend on the other rows of a plan.
    Sizing plans by time could then change tokens.

    Args:
        executor: a started executor; no plan has been submitted yet.
        kv_plan: what the ranks reported at start, and the number of KV blocks.
        clock: monotonic seconds.
        epoch: the epoch that the executor was started for.

    Raises:
        StageLostError, WaitTimeoutError: a stage failed, or did not answer.
    """
    if not all(rank.is_invariant for rank in kv_plan.ranks):
        return Calibration.none(config.parallel)
    configured_depth = config.parallel.async_depth
    trials = _Trials(executor, config, clock, epoch)
    ends_at = clock() + BUDGET_S
    depths = (0, 1) if configured_depth == "auto" else (configured_depth,)
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    for number, case in enumerate(_cases(config, kv_plan.num_blocks * config.cache.block_size)):
        if number and clock() >= ends_at:
            break
        trials.run_alone(case)
        # In alternating order, so that no depth is always the one that is tried first.
        for depth in depths[:: 1 if number % 2 == 0 else -1] if number < _NUM_FOR_DEPTH else depths[:1]:
            if seconds[depths[0]] and clock() >= ends_at:
                break
            seconds[depth].append(trials.run_full(case, depth))
    trials.finish()
    return Calibration(next_step=trials.next_step, async_depth=_best_depth(seconds), costs=trials.costs)


def _cases(config: CoreConfig, capacity: int) -> Iterator[_Case]:
    """Yield the cases to try, the most telling first.

    Contexts differ from case to case. Otherwise the cost of a context could not be separated from the cost of
    the tokens.
    """
    longest = min(capacity, config.max_model_len)
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    chunk = min(_CHUNK, config.scheduler.max_num_batched_tokens, longest)
    yield _Case(1, 1, min(_CONTEXT, longest - 1))
    yield _Case(1, chunk, 0)
    yield _Case(min(8, most), 1, min(_LATE, longest - 1))
    yield _Case(min(16, most), 1, min(_CONTEXT, longest - 1))
    yield _Case(1, chunk, min(_LATE, longest - chunk))


def _best_depth(seconds: dict[int, list[float]]) -> int:
    """Return the `async_depth` with the least time between results, by the cases that were tried with all.

    1 is chosen only if it saves `_AHEAD_GAIN` of the time at 0.
    """
    if len(seconds) == 1:
        return next(iter(seconds))
    pairs = list(zip(seconds[0], seconds[1], strict=False))
    none, one_ahead = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    return 1 if one_ahead < (1.0 - _AHEAD_GAIN) * none else 0


class _Trials:
    """Sends the made-up plans, in order, through an executor that nothing else uses."""

    def __init__(
        self, executor: Executor, config: CoreConfig, clock: Callable[[], float], epoch: int
    ) -> None:
        self.costs = CostLearner(CostModel(config.parallel.pipeline_parallel_size))
        self.num_stages = config.parallel.pipeline_parallel_size
        self.next_step = 0
        self._executor = executor
        self._config = config
        self._clock = clock
        self._epoch = epoch
        self._rows: list[int] = []  # the rows of the last plan, which the next one frees
        self._num_back = 0  # results that have come
        self._came_at: list[float] = []  # clock seconds at which each of them came

    def run_alone(self, case: _Case) -> None:
        """Run two plans, one after the other, and learn from the second.

        The first finds caches cold and memory untouched.
        """
        self._run(case, in_flight=1, before=1, count=1, alone=True)

    def run_full(self, case: _Case, async_depth: int) -> float:
        """Run P plans through a full pipe, where P is the number of stages.

        P more plans before them fill the pipe, and P after them keep it full.

        Returns:
            Seconds from the result before those of the P plans to the last of theirs.
        """
        return self._run(
            case,
            in_flight=self.num_stages + async_depth,
            before=self.num_stages,
            count=self.num_stages,
            alone=False,
        )

    def _run(self, case: _Case, *, in_flight: int, before: int, count: int, alone: bool) -> float:
        """Send plans, of which up to `in_flight` are under way; learn from `count` after `before`.

        Args:
            alone: no plan meets another; then none is sent after those that are learnt from.
        """
        first = self.next_step + before
        after = 0 if alone else self.num_stages
        for _ in range(before + count + after):
            self._await(self.next_step - in_flight + 1)
            plan = self._plan(case)
            if first <= plan.step_id < first + count:
                self.costs.submitted(plan, alone=alone)
            self._submit(plan)
        self._await(self.next_step)
        self.costs.learn(self._executor.reports.spans())
        return self._came_at[first + count - 1] - self._came_at[first - 1]

    def finish(self) -> None:
        """Send a plan that frees the rows and asks for the stages' reports, wait for these, and learn."""
        self._submit(
            ScheduledBatch(
                step_id=self.next_step,
                freed_rows=self._rows,
                consume_through=self.next_step - 1,
                meta=PlanMeta(wants_times=True),
            )
        )
        self._await(self.next_step)
        deadline = self._clock() + self._config.stall_timeout_s
        while not all(self._has_reported(stage) for stage in range(self.num_stages)):
            self._poll(deadline)
        self.costs.learn(self._executor.reports.spans())

    def _plan(self, case: _Case) -> ScheduledBatch:
        """Return the next plan, whose rows take the place of the rows of the plan before.

        All rows write to the same blocks, which no other request reads later.
        """
        step, rows = self.next_step, list(range(case.num_rows))
        freed, self._rows = self._rows, rows
        end = case.start + case.num_tokens
        ids = [position % self._config.vocab_size for position in range(end)]
        blocks = list(range(-(-end // self._config.cache.block_size)))
        new_rows = [
            NewRow(
                row=row,
                generation=step,
                request_id=f"{MADE_UP}{step}-{row}",
                prompt_len=end,
                token_ids=ids,
                sampling=GREEDY,
            )
            for row in rows
        ]
        return ScheduledBatch(
            step_id=step,
            rows=rows,
            num_tokens=[case.num_tokens] * case.num_rows,
            start_positions=[case.start] * case.num_rows,
            new_blocks=[blocks] * case.num_rows,
            need_sampled=[True] * case.num_rows,
            token_from=[KNOWN] * case.num_rows,
            consume_through=max(step - self.num_stages, -1),  # as decodes of a full pipe do
            freed_rows=freed,
            new_rows=new_rows,
        )

    def _submit(self, plan: ScheduledBatch) -> None:
        self._executor.submit_plan(msgspec.structs.replace(plan, epoch=self._epoch))
        self.next_step += 1

    def _await(self, num_back: int) -> None:
        """Wait until `num_back` results have come, counted from the first plan."""
        deadline = self._clock() + self._config.stall_timeout_s
        while self._num_back < num_back:
            self._poll(deadline)

    def _poll(self, deadline: float) -> None:
        now = self._clock()
        if now >= deadline:
            raise WaitTimeoutError(
                f"step {self._num_back} of the measurements at start did not return within "
                f"{self._config.stall_timeout_s:.0f} s.",
                remedy="Raise --step-timeout if the model needs longer.",
            )
        results = self._executor.poll_results(min(_POLL_S, deadline - now))
        self._num_back += len(results)
        self._came_at += [self._clock()] * len(results)

    def _has_reported(self, stage: int) -> bool:
        """Return whether the report of a stage that the last plan has asked for has come."""
        last = self.next_step - 1
        reports = [spans for spans in self._executor.reports.spans() if spans.stage == stage]
        return bool(reports) and any(step == last for _, step, _ in reports[-1].steps)

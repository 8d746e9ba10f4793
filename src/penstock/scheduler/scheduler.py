"""The scheduler: the one place that decides who runs, when, and in which blocks (row S3).

The engine core calls `schedule` for a plan whenever the pipe has room, and `update` with each step's result,
in step order. Plans are pure data; ranks replay them in order, so what is freed here may be given out again
by the next plan although steps that use it are still in flight.

No torch, no I/O, no clock but the injected one, no chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.batch import BuiltGrammar, Outcome, ScheduledBatch, StepResult, StoreUse
from penstock.config.engine import SchedulerConfig
from penstock.errors import ErrorInfo, UnavailableError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.sessions import Sessions
from penstock.kvcache.storage_tier import StorageTier
from penstock.request import GenerationRequest, RequestUpdate, TokenLogprobs
from penstock.scheduler.admission import Admission
from penstock.scheduler.chunking import TokenBudget
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.invariants import check_consistency
from penstock.scheduler.pacing import Pacing
from penstock.scheduler.placement import Placement
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.pooled import returned_vectors
from penstock.scheduler.preemption import preempt_youngest, release
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.prompt_scores import returned_scores
from penstock.scheduler.queues import NO_STEP, RequestPhase, RequestQueues, RequestState
from penstock.scheduler.residency_ledger import ResidencyLedger
from penstock.scheduler.rows import RowPool
from penstock.scheduler.stopping import finish_reason
from penstock.scheduler.updates import (
    ended_without_tokens,
    failed,
    grammar_error,
    numerical_error,
    quarantined,
    row_error,
    scores_came,
    token_came,
)


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now, and totals since the start; by the names that `engine.stats.CoreStats` has for them."""

    paused: bool
    num_running: int
    num_waiting: int  # preempted ones included
    num_blocks: int
    free_blocks: int
    num_preemptions: int
    prompt_tokens: int  # of requests that have yielded their first token, or ended without one
    generated_tokens: int
    micro_batches: int  # that the decoding requests were split into for the last plan
    prefix_tokens: int  # of requests that have started, or started again
    prefix_hit_tokens: int  # of these, found in the prefix cache
    cached_blocks: int  # that a request could find, held ones included
    evicted_blocks: int
    stored_blocks: int
    loaded_blocks: int
    failed_blocks: int  # that could not be stored or loaded
    store_bytes_read: int
    store_bytes_written: int
    store_records_read: int
    store_verify_failures: int
    store_call_failures: int
    host_bytes_read: int
    host_records_read: int
    host_bytes_written: int
    host_bytes_used: int
    store_switched_off: int
    store_failure: str
    num_sessions: int
    session_blocks: int
    reaped_sessions: int


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Scheduler:
    """Continuous batching with chunked prefill over `num_stages` stages.

    Args:
        allocator: of KV blocks; this scheduler is its only user.
        max_model_len: longest prompt + output, in tokens. A smaller KV pool lowers it: see `max_len`.
        eos_token_ids: the model's own end-of-sequence ids.
        seed: of the engine, for requests that bring none.
        clock: monotonic seconds.
        costs: of the stages, if plans may be sized by time (`scheduler.pacing`).
        tier: of the blocks in a store, over the same allocator.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: BlockAllocator,
        *,
        num_stages: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
        clock: Callable[[], float],
        costs: CostModel | None = None,
        tier: StorageTier | None = None,
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._clock = clock
        self._admission = Admission(
            config, allocator, max_model_len=max_model_len, eos_token_ids=eos_token_ids, seed=seed
        )
        self._queues = RequestQueues()
        self._rows = RowPool(config.max_num_seqs)
        budget = TokenBudget.from_config(config, num_stages)
        target_s = config.inter_token_target_ms / 1000
        pacing = None if costs is None else Pacing(costs, budget, inter_token_target_s=target_s)
        ledger = ResidencyLedger(allocator, self._rows)
        sessions = Sessions(allocator, config.max_sessions, clock)
        self.prefixes = PrefixReuse(allocator, self._queues, sessions, tier, ledger)  # and orders to ranks
        self.grammars = GrammarBuilds(config.built_grammar_bytes)
        self._placement = Placement(
            budget,
            pacing,
            None if config.micro_batches == "auto" else config.micro_batches,
            self._queues,
            self._rows,
            allocator,
            self._admission,
            self.prefixes,
            self.grammars,
            clock,
        )
        self._issued: dict[int, PlanBuilder] = {}  # by step in flight
        self._returned_step = NO_STEP  # the last step whose result has come
        self._consume_through = NO_STEP
        self._totals = _Totals()
        self.paused: Literal["keep", "wait"] | None = None  # nobody runs, or only who has started
        self.num_requeued = 0  # requests that a loss has interrupted, counted once for each

    @property
    def max_len(self) -> int:
        """Longest prompt + output served: the model's, or what the KV pool holds, whichever is less."""
        return self._admission.max_len

    @property
    def useful_depth(self) -> int:
        """Plans in flight that keep the pipe busy: P; with fewer micro-batches, one more than those, so that
        the next plan lies at the first stage when the token comes."""
        groups, num_stages = self._placement.num_groups, self._placement.num_stages
        return num_stages if self._placement.has_prompts or groups == num_stages else groups + 1

    @property
    def is_one_alone(self) -> bool:
        """Whether the last plan is the only micro-batch, so that one stage computes at a time."""
        return self._placement.num_groups == 1 and not self._placement.has_prompts

    @property
    def has_requests(self) -> bool:
        return len(self._queues) > 0

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is left whom a pause still lets run."""
        return self.paused != "wait" or not any(request.has_started for request in self._queues)

    def add(
        self, request: GenerationRequest, output_ids: Sequence[int] | None = None, num_scores: int = 0
    ) -> None:
        """Queue a request, and those that follow it.

        Args:
            output_ids, num_scores: what another core gave it, for one that was admitted there: it goes on
                after them, and no bound on the queue holds for it.

        Raises:
            InvalidRequestError: it can never come to its end here, or its id is in use.
            NotFoundError: it is new here and everywhere, and its session is not open.
            OverloadedError: as many requests, or tokens, wait already as may.
        """
        if output_ids is None:
            self.prefixes.sessions.require(request.sampling.session_id)
        for state in self._admission.accept(request, self._queues, self._clock(), output_ids, num_scores):
            self._queues.add(state)
            self.prefixes.enter(state)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is, in any slot (rows D13, DR7). No update of it follows.

        Its row and blocks are free at once; results in flight for it are dropped when they come.

        Returns:
            Whether there was such a request.
        """
        request = self._queues.get(request_id)
        if request is None:
            return False
        self._remove(request)
        return True

    def expire(self) -> list[RequestUpdate]:
        """End requests that have waited longer than `queue_timeout_s` without starting, and idle sessions."""
        now = self._clock()
        limit = self._config.queue_timeout_s
        updates = []
        self.prefixes.sessions.expire()
        while (request := self._queues.first_new()) is not None and now - request.arrival_time >= limit:
            request.queue_seconds = now - request.arrival_time
            error = UnavailableError(
                f"the request waited {request.queue_seconds:.1f} s to start; the limit is {limit:g} s.",
                remedy="Try again later.",
                code="queue_timeout",
            )
            updates.append(self._fail(request, error.info()))
        return updates

    def next_expiry(self) -> float | None:
        """Clock time at which `expire` has something to do; None while nobody waits for a first start."""
        request = self._queues.first_new()
        return None if request is None else request.arrival_time + self._config.queue_timeout_s

    def settle_orders(self, finished: list[Outcome], use: StoreUse) -> None:
        """See `Placement.settle_orders`."""
        self._placement.settle_orders(finished, use)

    def settle_grammars(self, told: Sequence[BuiltGrammar]) -> list[RequestUpdate]:
        """Take what the last stage has told of grammars; whose cannot be built ends."""
        return [self._fail(one, grammar_error(one, what)) for one, what in self.grammars.settle(told)]

    def schedule(self, step_id: int) -> ScheduledBatch | None:
        """The plan of step `step_id`, or None when nobody may run now.

        Decode rows come first, then prompt chunks. `step_id` grows by one per plan issued. None is never
        returned while there are requests and no step is in flight, unless the first waits for the store, all
        who run wait for their grammars, or there is a pause.
        """
        draft = PlanBuilder(step_id)
        prefill_in_flight = sum(issued.prefill_tokens for issued in self._issued.values())
        if self.paused != "keep":
            may_start = self.paused is None
            self._placement.fill(draft, self._returned_step, prefill_in_flight, newcomers=may_start)
        return self._issue(draft) if draft.rows or draft.new_rows or self.prefixes.has_orders else None

    def probe(self, step_id: int) -> ScheduledBatch:
        """An empty plan, which crosses every stage and proves them alive. Freed rows ride on it too."""
        return self._issue(PlanBuilder(step_id))

    def requests_of(self, step_id: int) -> list[str]:
        """Whose tokens a step in flight computes; nobody's when it is a probe, or in flight no more."""
        issued = self._issued.get(step_id)
        return [] if issued is None else [request.request_id for request in issued.requests]

    def update(self, plan: ScheduledBatch, result: StepResult) -> list[RequestUpdate]:
        """Settle a step: append its tokens, end the requests that they end.

        Results of requests that have finished or been aborted in the meantime are dropped (row D11).
        Call it in step order, once per plan, for plans without samples too.
        """
        assert result.step_id == plan.step_id > self._returned_step, "results are settled in step order"
        self._returned_step = plan.step_id
        logprobs = result.logprobs or [None] * len(result.token_ids)
        issued = self._issued.pop(plan.step_id)
        updates = self._take_scores(issued, result)
        for index, (request, ids) in enumerate(zip(issued.sampling, result.token_ids, strict=True)):
            request.num_pending -= 1
            if request.num_void:
                request.num_void -= 1
                continue
            if index in result.failed and index not in result.unmet:
                self.prefixes.distrust(request)
            if request.phase is RequestPhase.FINISHED:
                continue
            if index in result.failed:
                updates.append(self._fail(request, row_error(request, plan.step_id, result.unmet.get(index))))
            else:
                updates.append(self._accept(request, ids[0], logprobs[index]))
        updates += [self._end(done, vector) for done, vector in returned_vectors(issued.ending, result)]
        return updates

    def fail_all(
        self, error: ErrorInfo, concerns: Callable[[str], bool] = lambda _: True
    ) -> list[RequestUpdate]:
        """End requests, by their ids, with `error`; results of steps in flight for them are dropped."""
        return [self._fail(request, error) for request in list(self._queues) if concerns(request.request_id)]

    def requeue(self) -> list[RequestUpdate]:
        """The ranks have forgotten all rows and blocks, and no step in flight will return.

        Whoever runs goes back to the head of the line, with the tokens that it has; but a request that was in
        the steps in flight, or had its grammar built, now and at the loss before, and has gained nothing
        between, may be the reason, and ends with an error.
        """
        updates = []
        in_flight = {row for issued in self._issued.values() for row in issued.all_rows}
        for request in [one for one in self._queues.running if one.awaits_grammar or one.row in in_flight]:
            if request.lost_at == request.progress:
                updates.append(self._fail(request, quarantined(request)))
            request.lost_at = request.progress
        self.num_requeued += len(self._queues.running)
        while self._queues.running:
            preempt_youngest(self._queues, self._rows, self._allocator)
        for request in self._queues:
            request.num_pending, request.num_void, request.last_sampled_step = 0, 0, NO_STEP
            request.num_scores_planned = request.num_scores
        self._returned_step = max(self._issued, default=self._returned_step)
        self._issued.clear()
        self._rows.announce_freed()  # there is nobody to tell
        self.grammars.forget_all()
        self.prefixes.lose_all()  # who takes a lost rank's place has an empty cache
        return updates

    def fail_started(self, error: ErrorInfo) -> list[RequestUpdate]:
        """End all that have had a row, here or in another core."""
        return [self._fail(request, error) for request in list(self._queues) if request.has_started]

    def stats(self) -> SchedulerStats:
        return _stats(
            self.paused, self._totals, self._queues, self._allocator, self._placement, self.prefixes
        )

    def check_invariants(self) -> None:
        """Assert that rows, blocks, clocks and queues agree. For tests, and for an idle engine."""
        pending = [request for issued in self._issued.values() for request in issued.sampling]
        check_consistency(self._queues, self._rows, self._allocator, pending)
        self.grammars.check_invariants(self._queues.running)

    def _issue(self, draft: PlanBuilder) -> ScheduledBatch:
        self._issued[draft.step_id] = draft
        orders, residency = self.prefixes.issued([*draft.requests, *draft.entering])
        self._consume_through = max(self._consume_through, self._returned_step, *draft.token_from, NO_STEP)
        return draft.finish(
            consume_through=self._consume_through,
            freed_rows=self._rows.announce_freed(),
            dropped_grammars=self.grammars.take_dropped(),
            orders=orders,
            residency=residency,
        )

    def _accept(
        self, request: RequestState, token_id: int, logprobs: list[TokenLogprobs] | None
    ) -> RequestUpdate:
        if request.num_outputs == 0:
            self._totals.prompt_tokens += request.prompt_len
        self._totals.generated_tokens += 1
        self._queues.note_token(request, token_id)
        if request.phase is RequestPhase.RUNNING:
            self.prefixes.note(request)
        reason = finish_reason(request)
        if reason is not None:
            self._remove(request)
        return token_came(request, logprobs, reason)

    def _take_scores(self, issued: PlanBuilder, result: StepResult) -> list[RequestUpdate]:
        updates = []
        for request, scores in returned_scores(issued.scoring, result, self._queues):
            if scores:
                updates.append(scores_came(request, scores))
            else:
                self.prefixes.distrust(request)
                updates.append(self._fail(request, numerical_error(request, result.step_id)))
        return updates

    def _end(self, request: RequestState, vector: bytes) -> RequestUpdate:
        if request.pooling is not None and not vector:
            return self._fail(request, numerical_error(request, self._returned_step))
        self._totals.prompt_tokens += request.prompt_len
        self._remove(request)
        return ended_without_tokens(request, vector)

    def _fail(self, request: RequestState, error: ErrorInfo) -> RequestUpdate:
        self._remove(request)
        return failed(request, error)

    def _remove(self, request: RequestState) -> None:
        self.prefixes.leave(request)
        if request.phase is RequestPhase.RUNNING:
            self.grammars.leave(request)
            release(request, self._rows, self._allocator)
        self._queues.remove(request)


def _stats(
    paused: str | None,
    totals: _Totals,
    queues: RequestQueues,
    allocator: BlockAllocator,
    placement: Placement,
    prefixes: PrefixReuse,
) -> SchedulerStats:
    return SchedulerStats(
        paused=paused is not None,
        num_running=len(queues.running),
        num_waiting=len(queues.waiting) + len(queues.preempted),
        num_blocks=allocator.num_blocks,
        free_blocks=allocator.num_free_blocks,
        num_preemptions=placement.num_preemptions,
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=totals.generated_tokens,
        micro_batches=placement.num_groups,
        **prefixes.counts(),
    )

"""The scheduler: the one place that decides which requests run, when, and in which blocks [S3].

The engine core calls `plan_step` whenever the pipe has room, and `settle_result` with each step's result, in
step order. Plans are pure data, and ranks carry them out strictly in order. A row (the index of a running
request in the tables of every rank) or a KV block that is freed here can therefore be used again in the next
plan, even while steps that use it are still in flight.

No torch, no I/O, no clock but the injected one, no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from penstock.batch import BuiltGrammar, OrderResult, ScheduledBatch, StepResult, StoreUse
from penstock.config.engine import SchedulerConfig
from penstock.errors import ErrorInfo
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.sessions import Sessions
from penstock.kvcache.storage_tier import AnyStorageTier, NoStorageTier
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.admission import Admission
from penstock.scheduler.chunking import TokenBudget
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.intake import Intake
from penstock.scheduler.issued_steps import IssuedSteps
from penstock.scheduler.pacing import FixedDepth, Pacing, PlainPacing, PlanDepth
from penstock.scheduler.placement import Placement
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import RequestQueues
from penstock.scheduler.recovery import Recovery
from penstock.scheduler.request_endings import RequestEndings
from penstock.scheduler.residency_ledger import ResidencyLedger
from penstock.scheduler.result_settlement import ResultSettlement
from penstock.scheduler.rows import RowPool
from penstock.scheduler.start_order import ALWAYS_OPEN, StartGate
from penstock.scheduler.stats import SchedulerStats
from penstock.scheduler.updates import grammar_error
from penstock.scheduler.windows import NoWindows


class SchedulerParts(NamedTuple):
    """The parts of a scheduler, for code that only reads them."""

    placement: Placement
    queues: RequestQueues
    rows: RowPool
    allocator: BlockAllocator
    admission: Admission
    prefixes: PrefixReuse
    grammars: GrammarBuilds
    issued: IssuedSteps
    paused: Literal["keep", "wait"] | None = None
    held_back: str = ""  # why the start gate keeps new requests from starting; empty: it is open


class Scheduler:
    """A scheduler over `num_stages` stages: requests join and leave at any step, and prompts run in chunks.

    Each phase of a request's life has a class: `Intake` takes it in, `Placement` puts it into plans,
    `ResultSettlement` takes its results, `Recovery` puts it back after a loss, `RequestEndings` ends it.

    Args:
        allocator: gives out KV blocks; this scheduler is its only user.
        max_model_len: the model's longest prompt + output, in tokens. The limit in force is `max_len`.
        eos_token_ids: the model's own end-of-sequence ids.
        seed: the engine's, for requests without a seed; mostly clients draw one (`engine.client.seeds`).
        clock: monotonic seconds.
        costs: measured costs of the stages, by which plans are sized; None: fixed rules (`scheduler.pacing`).
        tier: storage outside the devices, from which KV blocks can be loaded again; None: there is none.
        depth: tells how many plans fill the pipe; None: always one for each stage.
        windows: adds drafts (guessed tokens) to plans, where speculative decoding is on; None: it is off.
        gate: while it is closed no new request starts; running requests go on.

    Attributes:
        prefixes: the prefix cache, and the orders to ranks to copy its blocks to and from the store.
        grammars: the grammars of running requests, and which of them the last stage has compiled.
        windows: as given, or a stand-in that adds no drafts.
        paused: "keep": all requests stop where they are; "wait": started requests finish, and no new one
            starts; None: there is no pause.
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
        tier: AnyStorageTier | None = None,
        depth: PlanDepth | None = None,
        windows: NoWindows | None = None,
        gate: StartGate = ALWAYS_OPEN,
    ) -> None:
        admission = Admission(
            config, allocator, max_model_len=max_model_len, eos_token_ids=eos_token_ids, seed=seed
        )
        budget = TokenBudget.from_config(config, num_stages)
        self._depth = depth = depth or FixedDepth(num_stages)
        pacing = (
            PlainPacing(budget, depth)
            if costs is None
            else Pacing(costs, budget, depth, inter_token_target_s=config.inter_token_target_ms / 1000)
        )
        micro_batches = None if config.micro_batches == "auto" else config.micro_batches
        sessions = Sessions(allocator, config.max_sessions, clock)
        self._queues = queues = RequestQueues()
        self._rows = rows = RowPool(config.max_num_seqs)
        ledger = ResidencyLedger(allocator, rows)
        self.prefixes = prefixes = PrefixReuse(allocator, queues, sessions, tier or NoStorageTier(), ledger)
        self.grammars = grammars = GrammarBuilds(config.built_grammar_bytes)
        self.windows = windows = windows or NoWindows()
        self._endings = endings = RequestEndings(queues, rows, allocator, prefixes, grammars, windows)
        self._intake = Intake(admission, queues, prefixes, endings, config.queue_timeout_s, clock)
        self._placement = Placement(
            budget,
            pacing,
            depth,
            micro_batches,
            queues,
            rows,
            allocator,
            admission,
            prefixes,
            grammars,
            clock,
        )
        self._issued = IssuedSteps()
        self._settlement = ResultSettlement(queues, prefixes, endings, windows)
        self._recovery = Recovery(queues, rows, allocator, prefixes, grammars, endings)
        self._gate = gate
        self.paused: Literal["keep", "wait"] | None = None
        self._parts = SchedulerParts(
            placement=self._placement,
            queues=queues,
            rows=rows,
            allocator=allocator,
            admission=admission,
            prefixes=prefixes,
            grammars=grammars,
            issued=self._issued,
        )

    @property
    def max_len(self) -> int:
        """The most tokens (prompt + output) of a request: the model's limit or the KV pool's, if smaller."""
        return self._intake.max_len

    def num_useful(self, ahead: int, num_probes: int = 0) -> int:
        """Return how many plans in flight are worth having: as many as fill the pipe, and `ahead` of them.

        More micro-batches than that fill the pipe instead. With fewer, unless prompts run or windows of
        guesses follow each other, one more plan waits at the first stage for its token; but over long wires
        none does, nor for a probe (`num_probes` are in flight), since prompts would wait behind it.
        """
        number, full = self._placement.num_micro_batches, self._depth.number
        if number >= full or self._placement.may_prefill or self.windows.is_streaming:
            return max(full, number) + ahead
        if self._depth.wire.is_long:
            return min(full, self._placement.num_covering + num_probes)
        return number + 1 + ahead

    @property
    def is_one_alone(self) -> bool:
        """Whether all decoding requests are in one micro-batch, so that only one stage computes at a time.

        False while prompts run, or windows of guessed tokens follow each other through the pipe.
        """
        placement = self._placement
        return placement.num_micro_batches == 1 and not (placement.has_prompts or self.windows.is_streaming)

    @property
    def has_requests(self) -> bool:
        return len(self._queues) > 0

    @property
    def is_quiet(self) -> bool:
        """Whether a "wait" pause has let all started requests finish; true if there is no such pause."""
        return self.paused != "wait" or not any(request.has_started for request in self._queues)

    def add_request(
        self, request: GenerationRequest, output_ids: Sequence[int] | None = None, num_scores: int = 0
    ) -> None:
        """Queue a request and its followers (further sequences of the same prompt).

        Args:
            output_ids: its tokens from before a core was lost, behind which it goes on even if the queue is
                full; None: it is new.
            num_scores: how many prompt tokens had their log-probabilities returned by then.

        Raises:
            InvalidRequestError: the request can never run here, as when it is too long; or its id is in use.
            NotFoundError: it is new and names a session that is not open.
            OverloadedError: it is new and the queue is full, in requests or in tokens.
        """
        self._intake.add_request(request, output_ids, num_scores)

    def abort_request(self, request_id: str) -> bool:
        """End a request at once, whether it waits or runs, and return whether there was one [D13] [DR7].

        Its row and blocks are free at once. No update follows, and results in flight for it are dropped.
        """
        request = self._queues.get(request_id)
        if request is None:
            return False
        self._endings.remove(request)
        return True

    def expire_requests(self) -> list[RequestUpdate]:
        """End requests that have waited longer than `queue_timeout_s` to start, and close idle sessions.

        A session is idle when no request has used it for a while. Returns the last updates of these requests,
        with the error.
        """
        return self._intake.expire_requests()

    def next_expiry(self) -> float | None:
        """Return the clock time at which the next waiting request times out; None if no new request waits."""
        return self._intake.next_expiry()

    def settle_orders(self, finished: list[OrderResult], use: StoreUse) -> None:
        """Apply the ranks' answers to orders to copy KV blocks between the cache and the store.

        If blocks that a running request awaited failed to load, it goes back in line and is computed again.
        All running requests that arrived after it do so too, which keeps their order.

        Args:
            finished: orders that all ranks have answered, each with its outcome.
            use: how the ranks have used the store since the last call.
        """
        self._placement.settle_orders(finished, use)

    def settle_grammars(self, reports: Sequence[BuiltGrammar]) -> list[RequestUpdate]:
        """Apply the last stage's reports on compiled grammars; end requests whose grammar it cannot compile.

        Returns the last updates of these requests.
        """
        return [
            self._endings.fail(request, grammar_error(request, what))
            for request, what in self.grammars.settle(reports)
        ]

    def plan_step(self, step_id: int) -> ScheduledBatch | None:
        """Return the plan of step `step_id`, or None when no request may run and no order waits to be sent.

        Decodes come first, then chunks of running prompts, then new requests. `step_id` grows by one per plan
        issued. While there are requests and no step is in flight, only four things lead to None: the first in
        line waits for blocks from the store, each running request waits for its grammar or for guesses of a
        drafter, the start gate is closed, or there is a pause.
        """
        plan = PlanBuilder(step_id)
        if self.paused != "keep":
            may_start = self.paused is None and self._gate.is_open()
            self._placement.fill(
                plan, self._issued.returned_step, self._issued.prefill_tokens, newcomers=may_start
            )
            if not self._placement.has_prompts:
                self._speculate(plan)
            self._depth.planned(plan)
        return self._issue(plan) if plan.rows or plan.new_rows or self.prefixes.has_orders else None

    def plan_probe(self, step_id: int) -> ScheduledBatch:
        """Return a plan without tokens: it shows that all stages respond, and names the rows now free."""
        return self._issue(PlanBuilder(step_id))

    def requests_of(self, step_id: int) -> list[str]:
        """Return the ids of the requests in a step; an empty list if it is a probe or not in flight."""
        return self._issued.requests_of(step_id)

    def settle_result(self, plan: ScheduledBatch, result: StepResult) -> list[RequestUpdate]:
        """Apply a step's result: append its tokens, and end requests that are done; return their updates.

        Results of requests that have finished or been aborted in the meantime are dropped [D11]. Call it
        once for each plan, in step order, also if the plan samples nothing.
        """
        is_next = result.step_id == plan.step_id > self._issued.returned_step
        assert is_next, "results are settled in step order"
        return self._settlement.settle(self._issued.settle(plan.step_id), result)

    def fail_all(
        self, error: ErrorInfo, concerns: Callable[[str], bool] = lambda _: True
    ) -> list[RequestUpdate]:
        """End with `error` the requests whose id satisfies `concerns` (default: all); return updates."""
        return self._endings.fail_each(error, lambda request: concerns(request.request_id))

    def requeue(self) -> list[RequestUpdate]:
        """Put running requests back in line after a loss of ranks; the steps in flight never return.

        The ranks have forgotten all rows, and what their KV blocks held. Requests keep their tokens and their
        order. One that was under way at the last loss too, and has gained no token since, may be the reason
        for both (`scheduler.recovery`): it ends with an error, in an update that is returned.
        """
        return self._recovery.requeue(self._issued)

    def fail_started(self, error: ErrorInfo) -> list[RequestUpdate]:
        """End with `error` all requests that ever started, here or in a lost core; return their updates."""
        return self._endings.fail_each(error, lambda request: request.has_started)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            paused=self.paused is not None,
            held_back=self._gate.reason,
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.waiting) + len(self._queues.preempted),
            num_preemptions=self._placement.num_preemptions,
            failed_steps=self._endings.num_failed_steps,
            recovered_requests=self._recovery.num_requeued,
            prompt_tokens=self._settlement.prompt_tokens,
            generated_tokens=self._settlement.generated_tokens,
            micro_batches=self._placement.num_micro_batches,
            fill_plans=self._depth.number,
            wire_s=self._depth.wire.latency,
            speculation=self.windows.stats(),
        )

    def parts(self) -> SchedulerParts:
        """Return the scheduler's parts, for `replay.explanation`, which explains a plan."""
        return self._parts._replace(paused=self.paused, held_back=self._gate.reason)

    def check_invariants(self) -> None:
        """Assert that rows, KV blocks, token counts and queues agree. For tests, and for an idle engine."""
        self._placement.check_invariants(self._issued.pending())
        self._issued.check_invariants()

    def _speculate(self, plan: PlanBuilder) -> None:
        """Add drafts (guessed tokens) to a plan's decodes.

        If the plan is empty, let requests go on from guesses that no result has verified yet.
        """
        running = self._queues.running
        self.windows.widen(plan, num_running=len(running), is_alone=self.is_one_alone)
        if not plan.rows and not plan.new_rows:
            self.windows.go_ahead(plan, running, is_full=len(self._issued) >= self._depth.number)
        if plan.drafts:
            self._queues.turns_changed()

    def _issue(self, plan: PlanBuilder) -> ScheduledBatch:
        mtp = self.windows.wanted_guesses(plan, len(self._queues.running))
        rewound = self.windows.take_rewound()
        moved = [*plan.requests, *plan.entering, *(request for request, _ in rewound)]
        orders, residency = self.prefixes.issued(moved)
        return plan.finish(
            consume_through=self._issued.issue(plan),
            freed_rows=self._rows.announce_freed(),
            rewound=[row for _, row in rewound],
            mtp=mtp,
            dropped_grammars=self.grammars.take_dropped(),
            given_up=self.prefixes.take_given_up(),
            orders=orders,
            residency=residency,
        )

"""Chooses the requests of a plan: decodes first, then prompt chunks, then newcomers.

How often a request decodes [E8]: its next decode may go into step n when the result of the step s that
sampled it last has returned, or when n - s >= P, the number of stages. So in a full pipe a request decodes
once per trip, with at most one sample per trip not yet returned. (Where the number of micro-batches is not
that of stages, see `scheduler.pacing`, it stands for P.) Three requests, two stages, `async_depth` 0; a plan
takes ceil(3 / 2) decodes:

    step        0     1     2     3     4
    stage 0    [ab]  [c ]  [ab]  [c ]  [ab]
    stage 1          [ab]  [c ]  [ab]  [c ]
    result of                0     1     2        a's id of step 0 is input of step 2: token_from = 0

A plan takes the requests that were not sampled for longest, so that one left out of a plan leads the next.
Called by `scheduler.scheduler`, which issues the plan and settles its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from penstock.batch import NewRow, OrderResult, StoreUse
from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler.admission import Admission
from penstock.scheduler.chunking import PromptBudget, TokenBudget
from penstock.scheduler.cost_model import StepShape
from penstock.scheduler.grammars import GrammarBuilds
from penstock.scheduler.invariants import check_consistency
from penstock.scheduler.pacing import Pacing, PlainPacing, PlanDepth
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.preemption import choose_victim, preempt_youngest
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState
from penstock.scheduler.rows import RowPool
from penstock.scheduler.start_order import StartOrder


class Placement:
    """Fills plans with requests; gives out rows and KV blocks, and takes them back by preemption.

    Args:
        budget: the token limits of a plan.
        pacing: sizes plans, by time where times are known and cannot change tokens.
        depth: tells how many plans fill the pipe.
        micro_batches: micro-batches that the decoding requests are split into; None: `pacing` decides.
        queues: all live requests.
        rows, allocator: give out the rows and the KV blocks.
        admission: decides whether the free blocks suffice for a request to start.
        prefixes: finds the blocks with which a request can begin.
        grammars: the grammars of running requests; records which requests get and lose a row.
        clock: monotonic seconds.

    Attributes:
        num_preemptions: how often a request has been preempted since the start.
        num_micro_batches: micro-batches that the decoding requests were split into for the last plan.
        has_prompts: whether there were prompts to run for the last plan.
    """

    def __init__(
        self,
        budget: TokenBudget,
        pacing: Pacing | PlainPacing,
        depth: PlanDepth,
        micro_batches: int | None,
        queues: RequestQueues,
        rows: RowPool,
        allocator: BlockAllocator,
        admission: Admission,
        prefixes: PrefixReuse,
        grammars: GrammarBuilds,
        clock: Callable[[], float],
    ) -> None:
        self._budget = budget
        self._pacing = pacing
        self._depth = depth
        self._micro_batches = micro_batches
        self._queues = queues
        self._rows = rows
        self._allocator = allocator
        self._admission = admission
        self._prefixes = prefixes
        self._grammars = grammars
        self._order = StartOrder(queues, grammars)
        self._clock = clock
        self.num_preemptions = 0
        self.num_micro_batches = depth.number
        self.has_prompts = False

    def fill(
        self, plan: PlanBuilder, returned_step: int, prefill_in_flight: int, *, newcomers: bool = True
    ) -> None:
        """Fill a plan with all requests that may run in its step.

        Decodes go first, then chunks of prompts, then waiting requests, which start. Where KV blocks run out
        for a decode, the youngest running request is preempted, unless `choose_victim` spares it.

        Args:
            plan: the plan to be filled; it is empty.
            returned_step: the last step whose result is settled.
            prefill_in_flight: prompt tokens of the steps issued since then.
            newcomers: whether requests may start that have never run.
        """
        prefill_tokens = self._count_prefill_tokens()
        self.has_prompts = prefill_tokens > 0
        decoding = self._queues.decoding()
        num_decoding = len(decoding)  # kept: those that get their last token here leave `decoding`
        self.num_micro_batches = self._choose_micro_batches(num_decoding, prefill_tokens)
        self._place_decodes(plan, decoding, prefill_tokens, returned_step)
        if prefill_tokens:
            budget = self._prompt_budget(plan, num_decoding > 0, prefill_tokens + prefill_in_flight)
            self._place_chunks(plan, budget)
            self._admit(plan, budget, newcomers)

    def settle_orders(self, finished: list[OrderResult], use: StoreUse) -> None:
        """Apply the ranks' answers to orders to copy KV blocks between the cache and the store.

        If blocks that a running request awaited failed to load, it goes back in line, to start again, with
        every running request that arrived after it.

        Args:
            finished: the orders that all ranks have answered, each with its outcome.
            use: how the ranks have used the store since the last call.
        """
        request = self._prefixes.settle_orders(finished, use)
        while request is not None and request.phase is RequestPhase.RUNNING:
            self._preempt_youngest()

    def check_invariants(self, pending: Sequence[RequestState]) -> None:
        """Assert that rows, KV blocks, token counts and queues agree.

        Args:
            pending: for each sampled token that is still in flight, the request that it is for.
        """
        check_consistency(self._queues, self._rows, self._allocator, pending)
        self._grammars.check_invariants(self._queues.running)

    @property
    def may_prefill(self) -> bool:
        """Whether a plan made now might run prompts; one may have come since the last plan."""
        return self._count_prefill_tokens() > 0

    @property
    def num_covering(self) -> int:
        """The plans that decode each request once: the micro-batches, or more where plans take few tokens."""
        number = len(self._queues.decoding())
        quota = self._budget.decode_quota(number, 0, self.num_micro_batches)
        return max(self.num_micro_batches, -(-number // quota)) if number else self.num_micro_batches

    def _count_prefill_tokens(self) -> int:
        """Return how many prompt tokens could run now; if a row is free, those of the line count, too."""
        running = sum(request.num_runnable for request in self._queues.prefilling())
        return running + (self._queues.backlog_tokens if self._rows.num_free else 0)

    def _choose_micro_batches(self, num_decoding: int, prefill_tokens: int) -> int:
        """Return the configured number of micro-batches, or else the best by time.

        The best by time is at least the number of stages while prompts run.
        """
        num_stages, largest = self._budget.num_stages, self._depth.largest
        if self._micro_batches is not None:
            return min(self._micro_batches, largest)
        if largest == 1 or (prefill_tokens and largest == num_stages):
            return num_stages
        chosen = self._pacing.num_micro_batches(num_decoding, self._queues.attended)
        return max(chosen, num_stages) if prefill_tokens else chosen

    @property
    def lag(self) -> int:
        """The number of plans after which a request may decode again although its last result is not back.

        It is the number of micro-batches. Where slow wires lie between stages and prompts run, it is at least
        what fills the pipe: a decode that came earlier would wait for its token at the first stage, and hold
        up the chunks of prompts behind it.
        """
        fills = self._depth.number
        has_more = self.has_prompts and fills > self._budget.num_stages
        return max(self.num_micro_batches, fills) if has_more else self.num_micro_batches

    def _place_decodes(
        self, plan: PlanBuilder, decoding: Collection[RequestState], prefill_tokens: int, returned_step: int
    ) -> None:
        """Place this plan's share of the decoding requests: longest unsampled first, then oldest first."""
        newest = max(returned_step, plan.step_id - self.lag)
        quota = self._budget.decode_quota(len(decoding), prefill_tokens, self.num_micro_batches)
        for request in decoding:
            if len(plan.rows) == quota or request.last_sampled_step > newest:
                break
            if self._must_wait(request, request.last_sampled_step <= returned_step):
                continue
            if request.phase is RequestPhase.RUNNING:  # not preempted by one placed just before
                blocks = self._grow_by_one(request, plan.step_id)
                if blocks is not None:
                    plan.add_decode(request, blocks)
        self._queues.decoded(plan.requests)

    def _must_wait(self, request: RequestState, has_returned: bool) -> bool:
        """Return whether a request may not go on yet; `has_returned`: its newest result is settled.

        It waits for its result if its next tokens are worth guessing, or if a window ahead of it may turn out
        void; and it waits for a drafter that guesses them. While prompts run, it waits for no guesses.
        """
        if not has_returned and request.num_windows_ahead > 0:
            return True
        waits = request.awaits_drafts or (request.awaits_result and not has_returned)
        return waits and not self.has_prompts

    def _grow_by_one(self, request: RequestState, step_id: int) -> list[int] | None:
        """Return blocks for one more token, preempting younger requests; None: skip this plan."""
        while (blocks := self._allocator.grow(request.arrival, request.num_scheduled + 1)) is None:
            if choose_victim(self._queues.running, request, step_id) is None:
                return None
            self._preempt_youngest()
        return blocks

    def _preempt_youngest(self) -> None:
        self._grammars.leave(self._queues.running[-1])
        preempt_youngest(self._queues, self._rows, self._allocator)
        self.num_preemptions += 1

    def _prompt_budget(self, plan: PlanBuilder, anybody_decodes: bool, backlog: int) -> PromptBudget:
        """Return the room for prompts in a plan that has its decodes."""
        decodes = StepShape(plan.num_decodes, plan.attended, plan.num_decodes)
        return self._pacing.prompt_budget(decodes, anybody_decodes=anybody_decodes, backlog=backlog)

    def _place_chunks(self, plan: PlanBuilder, budget: PromptBudget) -> None:
        for request in self._queues.prefilling():
            num_tokens = budget.take(request.num_scheduled, request.num_runnable)
            if num_tokens:
                plan.add_chunk(request, num_tokens, [])
                if not request.is_prefilling:
                    self._queues.turns_changed()
                plan.awaited += self._prefixes.awaited(request)

    def _admit(self, plan: PlanBuilder, budget: PromptBudget, newcomers: bool) -> None:
        """Start requests in their order; the first that does not fit holds up those behind it."""
        while self._rows.num_free and (request := self._order.next_request(newcomers=newcomers)) is not None:
            # Called before `find`, since it may end the wait and make the blocks that have come findable.
            must_wait = self._prefixes.must_wait(request)
            cached_blocks = self._prefixes.find(request)
            coming = self._prefixes.on_the_way(request, len(cached_blocks))
            if must_wait and not coming:
                return
            if self._prefixes.must_follow(request, len(cached_blocks)):
                return
            beginning = [*cached_blocks, *coming]
            if not self._admission.may_start(request, len(self._queues.running), beginning):
                return
            num_cached = len(beginning) * self._allocator.block_size
            runnable = request.num_to_prefill - num_cached - (not self._grammars.is_built(request))
            num_tokens = budget.take(num_cached, runnable)
            if num_tokens == 0 and runnable:
                return
            self._start(plan, request, cached_blocks, coming, num_tokens)

    def _start(
        self,
        plan: PlanBuilder,
        request: RequestState,
        cached_blocks: list[int],
        coming: list[int],
        num_tokens: int,
    ) -> None:
        """Give a request of the line its row, blocks for all its tokens, and its first chunk.

        Args:
            cached_blocks: blocks of its beginning that are in the cache.
            coming: the blocks behind them, which are being loaded.
            num_tokens: of the chunk; 0: the request enters, and waits for its grammar.
        """
        row, generation = self._rows.take()
        self._queues.admit(request, row)
        self._prefixes.attach(request, cached_blocks, coming)
        if request.queue_seconds is None:
            request.queue_seconds = self._clock() - request.arrival_time
            request.num_cached_tokens = min(request.num_scheduled, request.prompt_len)
        blocks = self._allocator.grow(request.arrival, request.prefill_len)
        assert blocks is not None, "admission promised room"
        table = [*cached_blocks, *coming, *blocks]
        plan.new_rows.append(
            NewRow(
                row=row,
                generation=generation,
                request_id=request.request_id,
                prompt_len=request.prompt_len,
                token_ids=list(request.token_ids),
                sampling=request.sampling,
                pooling=request.pooling,
                grammar=self._grammars.enter(request),
                blocks=[] if num_tokens else table,
                start=0 if num_tokens else request.num_scheduled,
            )
        )
        if num_tokens == 0:
            plan.entering.append(request)
            return
        plan.add_chunk(request, num_tokens, table)
        plan.awaited += self._prefixes.awaited(request)

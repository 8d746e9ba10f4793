"""Windows in plans: rows of which all tokens are known here bring drafts, where these are worth their time.

    plan without drafts   row 3: position 70, one token            sampled once
    widened               row 3: position 70, token and 3 drafts   sampled four times, yields 1 to 4 tokens

The decodes of a plan are placed first. Then drafts are added to what is there: they take blocks that are free
and nobody else's, and no row leaves the plan for them. A request whose sample is on its way decodes one token
as ever, for its newest token is not known here. So a request that has a draft worth sending waits for its
result (`RequestState.awaits_result`), though the pipe may have room before. While prompts are computed, steps
are bound by computing, and nobody drafts.

Called by `scheduler.placement` when a plan is made, and by `scheduler.result_settlement` when its result has
come. What to guess is the drafter's affair (`speculation.drafter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler.cost_model import CostModel, StepShape
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.queues import RequestState
from penstock.scheduler.stats import SpeculationStats
from penstock.speculation.drafter import NO_DRAFT, Draft, Drafter
from penstock.speculation.window_sizes import window_sizes

_WORTH_WAITING = 0.5  # chance of a draft, from which on the next plan of its request waits for its result
_FREE_TOKENS = 8  # of a step whose cost is not known: so many cost little more than one on most devices


class NoWindows:
    """Nobody drafts."""

    def widen(self, plan: PlanBuilder, *, num_running: int, is_alone: bool) -> None:
        """Add drafts to the decodes of a plan, which has nothing else.

        Args:
            num_running: requests that have a row, in this plan or in others.
            is_alone: no other plan is in the pipe with it, so that its time is that of all stages.
        """

    def settle(self, request: RequestState, num_drafted: int, num_accepted: int) -> None:
        """Tokens of a request have come. So many drafts were sampled, and so many of these became tokens."""

    def forget(self, request: RequestState) -> None:
        """The request has ended."""

    def stats(self) -> SpeculationStats:
        return SpeculationStats()


class DraftWindows(NoWindows):
    """Asks a drafter for each request.

    Args:
        most: drafts of a row in one step.
        max_tokens: of a plan.
        with_grammars: requests with a grammar draft too.
        costs: of the stages; None: they are not known, and do not become known.
    """

    def __init__(
        self,
        drafter: Drafter,
        allocator: BlockAllocator,
        costs: CostModel | None,
        *,
        most: int,
        max_tokens: int,
        with_grammars: bool = True,
    ) -> None:
        self._drafter = drafter
        self._allocator = allocator
        self._costs = costs
        self._most = most
        self._max_tokens = max_tokens
        self._with_grammars = with_grammars
        self._drafts: dict[int, Draft] = {}  # by request, of those that know all their tokens
        self._num_rows = 1  # of the newest plan
        self._seconds: Callable[[int], float] = _where_costs_are_unknown  # that it takes with so many tokens
        self._num_drafted = self._num_accepted = 0

    def widen(self, plan: PlanBuilder, *, num_running: int, is_alone: bool) -> None:
        if not plan.rows:
            return
        self._num_rows, self._seconds = len(plan.rows), self._seconds_of(plan, is_alone=is_alone)
        indices = [
            index
            for index, request in enumerate(plan.requests)
            if request.num_pending == 1 and request.arrival in self._drafts
        ]
        drafts = [self._drafts.pop(plan.requests[index].arrival) for index in indices]
        room = self._max_tokens - self._num_rows
        for index, draft, size in zip(indices, drafts, self._sizes(drafts), strict=True):
            if 0 < size <= room and self._add(plan, index, draft.token_ids[:size], num_running):
                room -= size
        plan.put_windows_last()

    def _sizes(self, drafts: Sequence[Draft]) -> list[int]:
        return window_sizes(drafts, self._num_rows, self._seconds) if drafts else []

    def _add(self, plan: PlanBuilder, index: int, draft_ids: Sequence[int], num_running: int) -> bool:
        """Whether there were blocks to spare for the drafts of a row, which takes them then."""
        request = plan.requests[index]
        num_tokens = request.num_scheduled + len(draft_ids)
        # What a draft takes must not be what another row's next token needs.
        blocks = self._allocator.grow(request.arrival, num_tokens, num_spare=num_running)
        if blocks is None:
            return False
        plan.add_drafts(index, draft_ids, blocks)
        return True

    def _seconds_of(self, plan: PlanBuilder, *, is_alone: bool) -> Callable[[int], float]:
        costs = None if self._costs is None else self._costs.costs(alone=is_alone)
        if costs is None:
            return _where_costs_are_unknown
        combine = sum if is_alone else max
        attended = plan.attended // len(plan.rows)  # of one token, on average

        def seconds(tokens: int) -> float:
            shape = StepShape(tokens, tokens * attended, tokens)
            return combine([cost.seconds(shape) for cost in costs])

        return seconds

    def settle(self, request: RequestState, num_drafted: int, num_accepted: int) -> None:
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        if num_drafted:
            self._drafter.accept(request.arrival, num_drafted, num_accepted)
        draft = self._propose(request)
        request.awaits_result = draft.chance >= _WORTH_WAITING and self._sizes([draft])[0] > 0
        self._drafts.pop(request.arrival, None)
        if request.num_pending == 0 and draft.token_ids:
            self._drafts[request.arrival] = draft

    def _propose(self, request: RequestState) -> Draft:
        most = min(self._most, request.max_len - len(request.token_ids) - 1)  # one is sampled behind them
        is_held = request.sampling.structured is not None and not self._with_grammars
        if most <= 0 or is_held or not request.may_draft:
            return NO_DRAFT
        return self._drafter.propose(request.arrival, request.token_ids, most)

    def forget(self, request: RequestState) -> None:
        self._drafts.pop(request.arrival, None)
        self._drafter.forget(request.arrival)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._drafter.name, self._num_drafted, self._num_accepted)


def _where_costs_are_unknown(tokens: int) -> float:
    return float(max(tokens, _FREE_TOKENS))

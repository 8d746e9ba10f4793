"""Adds drafts (guessed tokens) to plans, and makes further plans that build on drafts not verified yet.

    plan without drafts   row 3: position 70, one token            sampled once
    widened               row 3: position 70, token and 3 drafts   sampled four times, yields 1 to 4 tokens
    guessed window        row 3: position 74, 4 drafts             as if the window before were all right

The decodes of a plan are placed first. Then drafts (guessed tokens) are added to them. Drafts take only
free blocks that no other row needs, and no row leaves the plan for them. A request whose sample is on its
way decodes one token as usual, since its newest token is not known here yet. So a request that has a draft
worth sending waits for its result (`RequestState.awaits_result`), even if the pipe has room before. A plan
with chunks of prompts is limited by computing, not by reading weights: it gets no drafts.

If fewer requests run than the pipe needs plans, stages would wait. Then a window may follow one whose result
is not back: its first token is a guess at the token that the step before samples behind its last draft. Such
a window is a plan of its own, and only made when no other request may run. When a guess was wrong, all
windows behind it are void: the last stage drops their results. The next plan, whichever requests it has,
rewinds the row to its newest token. No step then waits for a void one.

A drafter may compute elsewhere, and have its guesses some time later than the result. If they are worth it
the request waits for them (`RequestState.awaits_drafts`), but at most about twice as long as they should
take.

Called by `scheduler.scheduler` when a plan is made, and by `scheduler.result_settlement` when its result has
come. The drafter chooses what to guess (`speculation.drafter`). How many guesses a plan takes follows from
`speculation.window_sizes` and `speculation.streaming`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.batch import KNOWN, RewoundRow
from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler.cost_model import CostModel, StageCost, StepShape
from penstock.scheduler.pacing import PlanDepth
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.queues import RequestPhase, RequestState
from penstock.scheduler.stats import SpeculationStats
from penstock.speculation.awaiting import Waits, guesses_worth_waiting
from penstock.speculation.drafter import NO_DRAFT, Draft, Drafter, Question
from penstock.speculation.grammar_guides import NO_GUIDES, NoGuides
from penstock.speculation.streaming import (
    LEAST_CHANCE_AHEAD,
    LEAST_CHANCE_QUEUED,
    KeptSizes,
    PipeTimes,
    streamed_size,
)
from penstock.speculation.window_sizes import least_chance, window_sizes

_WORTH_WAITING = 0.5  # a request waits for its result if its draft is right with at least this chance
_PATIENCE = 2.0  # a request waits for guesses this many times as long as they should take,
_LEAST_PATIENCE_S = 0.005  # and these seconds longer
_NEWEST_WEIGHT = 0.2  # of the newest plan in the average time of plans
_LEAST_STAGE_S = 1e-6
_CHANCE_STEPS = 50  # chances are rounded to 1/50, so that the sizes of windows can be kept and found again
_FREE_TOKENS = 8  # where costs are not known, up to this many tokens are taken to cost as much as one


class NoWindows:
    """Adds no drafts (guessed tokens) to plans; also the interface of `DraftWindows`, which does.

    A window is what a plan computes of one row: a token (known or guessed), and the drafts behind it.

    Attributes:
        is_streaming: windows of some request follow each other through the pipe.
    """

    is_streaming = False

    def widen(self, plan: PlanBuilder, *, num_running: int, is_alone: bool) -> None:
        """Do nothing; `DraftWindows` adds drafts (guessed tokens) to a plan that has only decodes.

        Args:
            num_running: requests that have a row, in this plan or in others.
            is_alone: no other plan is in the pipe; the time of this one is that of all stages added up.
        """

    def go_ahead(self, plan: PlanBuilder, running: Sequence[RequestState], *, is_full: bool) -> None:
        """Do nothing; `DraftWindows` fills an empty plan with a window that continues one in flight.

        Args:
            is_full: so many plans are in flight that a further one would wait at the first stage.
        """

    def wanted_guesses(self, plan: PlanBuilder, num_running: int) -> dict[int, int]:
        """Return how many tokens the last stage is to guess, by a request's place in the plan: here for none.

        The plan carries the answer as `ScheduledBatch.mtp`.

        Args:
            num_running: requests that have a row.
        """
        return {}

    def hear(self, request: RequestState, accepted: Sequence[int], guessed: Sequence[int]) -> None:
        """Do nothing; `DraftWindows` passes the last stage's guesses on to the drafter.

        Args:
            accepted: tokens that the request gets next.
            guessed: tokens guessed to follow them.
        """

    def follow(
        self, request: RequestState, token_ids: Sequence[int], size: int, step_id: int
    ) -> tuple[int, int]:
        """Return how many drafts a step has decided on, and how many of these were right.

        Call it before the request gets the tokens. `DraftWindows` also voids windows behind a wrong guess.

        Args:
            token_ids: tokens that the step has yielded for the request.
            size: tokens of its window; the first one is not counted here.
        """
        return size - 1, len(token_ids) - 1

    def settle(self, request: RequestState, num_drafted: int, num_accepted: int) -> None:
        """Do nothing; `DraftWindows` counts drafts tried and accepted, and gets the next ones."""

    def take_rewound(self) -> list[tuple[RequestState, RewoundRow]]:
        """Return the requests that go on behind a wrong guess, with what ranks must be told; here none."""
        return []

    def refresh(self) -> None:
        """Do nothing; `DraftWindows` takes new guesses, and releases requests that waited long enough."""

    def next_due(self) -> float:
        """Return the clock time at which `refresh` has work even if no drafter has news; here infinite."""
        return math.inf

    def wait_sources(self) -> Sequence[int]:
        """Return file descriptors that become readable when a drafter has news: none here."""
        return ()

    def forget(self, request: RequestState) -> None:
        """Do nothing; `DraftWindows` forgets a request that has ended."""

    def close(self) -> None:
        """Do nothing; `DraftWindows` closes its drafter."""

    def stats(self) -> SpeculationStats:
        return SpeculationStats()


class DraftWindows(NoWindows):
    """Adds the guesses of a drafter (drafts) to plans, as far as verifying them is worth the time.

    Args:
        drafter: guesses the next tokens of requests.
        allocator: gives blocks for drafts, of those that no other row needs.
        costs: the stages' costs; None: they are not known, and times of plans are measured in place of them.
        most: most drafts of a row in one step.
        max_tokens: most tokens of a plan.
        depth: tells how many plans fill the pipe.
        clock: monotonic seconds.
        with_grammars: requests with a grammar (structured output) get drafts too.
        guides: know which tokens grammars force and forbid.
        is_exact: drafts change no token (`SpeculationStats`).
    """

    def __init__(
        self,
        drafter: Drafter,
        allocator: BlockAllocator,
        costs: CostModel | None,
        *,
        most: int,
        max_tokens: int,
        depth: PlanDepth,
        clock: Callable[[], float],
        with_grammars: bool = True,
        guides: NoGuides = NO_GUIDES,
        is_exact: bool = True,
    ) -> None:
        self._drafter = drafter
        self._allocator = allocator
        self._prices = _Prices(costs, depth, most)
        self._max_tokens = max_tokens
        self._clock = clock
        self._with_grammars = with_grammars
        self._guides = guides
        # The next four have the arrival number of a request as the key.
        self._drafts: dict[int, Draft] = {}  # guesses that follow the tokens that it has
        self._streamed: dict[int, int] = {}  # tokens of each window, where windows follow each other
        self._hopeful: dict[int, RequestState] = {}  # requests that a drafter still guesses for
        self._waits = Waits()  # how long the hopeful ones have waited
        self._forced: set[int] = set()  # requests whose drafts in flight a grammar has forced
        self._rewound: list[tuple[RequestState, RewoundRow]] = []  # since the last plan
        self._stats = SpeculationStats(drafter.name, is_exact=is_exact)

    @property
    def is_streaming(self) -> bool:  # type: ignore[override]
        return bool(self._streamed)

    # --- when a plan is made --------------------------------------------------------------------

    def widen(self, plan: PlanBuilder, *, num_running: int, is_alone: bool) -> None:
        self._prices.note_running(num_running)
        if not plan.rows:
            return
        shape = _Shape(len(plan.rows), plan.attended // len(plan.rows), is_alone=is_alone)
        self._prices.planned(shape, plan.step_id, self._clock())
        places = [
            (index, self._drafts[request.arrival])
            for index, request in enumerate(plan.requests)
            if request.num_awaited == 1 and request.arrival in self._drafts
        ]
        room = self._max_tokens - len(plan.rows)
        sizes = self._prices.sizes([draft for _, draft in places])
        for (index, draft), size in zip(places, sizes, strict=True):
            streamed = self._streamed.get(plan.requests[index].arrival)
            size = size if streamed is None else min(streamed - 1, len(draft.token_ids))
            if 0 < size <= room and self._add(plan, index, draft.token_ids[:size]):
                room -= size
                self._note_source(plan.requests[index], draft)
        plan.put_windows_last()

    def _add(self, plan: PlanBuilder, index: int, draft_ids: Sequence[int]) -> bool:
        """Add drafts to a row if there are blocks to spare for them, and return whether there were."""
        blocks = self._spare_blocks(plan.requests[index], len(draft_ids), self._prices.num_running)
        if blocks is None:
            return False
        plan.add_drafts(index, draft_ids, blocks)
        return True

    def _spare_blocks(self, request: RequestState, num_guesses: int, num_running: int) -> list[int] | None:
        """Return new blocks for guesses, or None if other rows may need them for their next token."""
        num_tokens = request.num_scheduled + num_guesses
        return self._allocator.grow(request.arrival, num_tokens, num_spare=num_running)

    def go_ahead(self, plan: PlanBuilder, running: Sequence[RequestState], *, is_full: bool) -> None:
        least = LEAST_CHANCE_QUEUED if is_full else LEAST_CHANCE_AHEAD
        ready = [request for request in running if request.arrival in self._streamed]
        for request in sorted(ready, key=lambda request: request.last_sampled_step):
            draft_ids = self._next_ids(request, least)
            if not draft_ids:
                continue
            blocks = self._spare_blocks(request, len(draft_ids), self._prices.num_running)
            if blocks is not None:
                plan.add_guessed_window(request, draft_ids, blocks)
                self._note_source(request, self._drafts[request.arrival])
                return

    def _note_source(self, request: RequestState, draft: Draft) -> None:
        """Record whether a grammar forced the drafts that are on their way."""
        (self._forced.add if draft.is_forced else self._forced.discard)(request.arrival)

    def _next_ids(self, request: RequestState, least_chance: float) -> Sequence[int]:
        """Return the ids of a window behind the tokens in flight.

        It is empty if the tokens in flight were not all guessed, or the drafter now guesses others. It is
        also empty if these guesses and the next one are right with a chance below `least_chance`.
        """
        draft, ahead = self._drafts.get(request.arrival, NO_DRAFT), len(request.guessed_ids)
        if not request.is_guessed or list(draft.token_ids[:ahead]) != request.guessed_ids:
            return ()
        if draft.chance ** (ahead + 1) < least_chance:
            return ()
        room = request.max_len - len(request.token_ids) - request.num_awaited
        size = min(self._streamed[request.arrival], self._max_tokens, room)
        return draft.token_ids[ahead : ahead + size]

    def wanted_guesses(self, plan: PlanBuilder, num_running: int) -> dict[int, int]:
        if not self._drafter.is_at_tail:
            return {}
        counts, has_prompts = {}, plan.prefill_tokens > 0
        for index, request in enumerate(plan.requests):
            question = self._question(request)
            left = request.max_len - len(request.token_ids) - 1  # tokens to guess; one more is sampled behind
            if question is None or left < 2:
                continue
            room = left - request.num_awaited  # if all drafts in flight are right
            least_chance = question.least_chance
            # While other steps of the request are in flight, only a good guess is worth their results' wait.
            if request.num_awaited > plan.num_tokens[index]:
                least_chance = max(least_chance, _WORTH_WAITING)
            most = min(question.most, max(1, room))
            question = question._replace(most=most, least_chance=least_chance)
            wanted = self._drafter.wants(question, self._prices.num_busy)
            if wanted is None:
                continue
            is_decode = plan.token_from[index] != KNOWN
            if not plan.need_sampled[index] or (is_decode and has_prompts) or room < 1:
                counts[index] = 0
                continue
            if is_decode and not self._prices.has_gaps:  # at most one more than the drafts worth sending now
                wanted = min(wanted, 1 + len(plan.drafts.get(index, ())))
            counts[index] = self._with_blocks(plan, index, wanted, num_running)
        return counts

    def _with_blocks(self, plan: PlanBuilder, index: int, wanted: int, num_running: int) -> int:
        """Return how many tokens the last stage may guess of a row, and add blocks to the row for them.

        The last stage keeps keys and values of each guess but the last. So one guess needs no block, and is
        made even if no block can be spared.
        """
        wanted = min(wanted, self._prices.most)
        blocks = self._spare_blocks(plan.requests[index], wanted - 1, num_running)
        plan.add_blocks(index, blocks or ())
        return 1 if blocks is None else wanted

    def take_rewound(self) -> list[tuple[RequestState, RewoundRow]]:
        taken, self._rewound = self._rewound, []
        rewound = [(request, row) for request, row in taken if request.is_rewound]
        for request, _ in rewound:
            request.is_rewound = False
        return rewound

    # --- when a result has come -----------------------------------------------------------------

    def hear(self, request: RequestState, accepted: Sequence[int], guessed: Sequence[int]) -> None:
        if guessed:
            self._drafter.hear(request.arrival, len(request.token_ids) + len(accepted), guessed)

    def follow(
        self, request: RequestState, token_ids: Sequence[int], size: int, step_id: int
    ) -> tuple[int, int]:
        if self._prices.is_timing:
            self._prices.returned(step_id, self._clock())
        num_drafts, num_right = size - 1, len(token_ids) - 1
        if not request.guessed_ids:  # no guessed window of the request is in flight
            return num_drafts, num_right
        # 1 if the step's samples also decide on the first guess of the next window; else 0.
        reaches_next = int(request.num_windows_ahead > 0 and num_right == num_drafts)
        num_void = request.follow(token_ids, step_id)
        if num_void:
            self._stats = self._stats.plus(num_cancelled=max(0, num_void - reaches_next))
        return num_drafts + reaches_next, num_right + (reaches_next and not num_void)

    def settle(self, request: RequestState, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            is_forced = request.arrival in self._forced
            self._stats = self._stats.plus(num_drafted, num_accepted, is_forced=is_forced)
            if not is_forced:
                self._drafter.accept(request.arrival, num_drafted, num_accepted)
        if request.is_rewound:
            self._rewound.append((request, _rewound_row(request)))
        self._waits.end(request.arrival)
        self._consider(request)

    def _consider(self, request: RequestState) -> None:
        """Decide what the request does with the guesses that the drafter has now.

        It goes on with them, in one window or in several that follow each other, or waits for more.
        """
        arrival, draft = request.arrival, self._propose(request)
        self._drop_guesses(arrival)
        if draft is NO_DRAFT:
            request.awaits_result = request.awaits_drafts = False
            return
        is_running = request.phase is RequestPhase.RUNNING
        streamed = self._prices.streamed_size(draft) if draft.token_ids and is_running else 0
        if streamed:
            self._streamed[arrival] = streamed
        if draft.token_ids and (streamed or request.num_awaited == 0):
            self._drafts[arrival] = draft
        is_worth_it = draft.chance >= max(_WORTH_WAITING, self._prices.least_chance)
        has_more = draft.more_s < math.inf and is_running
        if has_more:
            self._hopeful[arrival] = request
        request.awaits_result = streamed > 0 or (is_worth_it and bool(draft.token_ids or has_more))
        request.awaits_drafts = has_more and not streamed and self._should_hold(request, draft)

    def _drop_guesses(self, arrival: int) -> None:
        self._drafts.pop(arrival, None)
        self._streamed.pop(arrival, None)
        self._hopeful.pop(arrival, None)

    def _should_hold(self, request: RequestState, draft: Draft) -> bool:
        """Return whether more guesses are worth the wait, and are not overdue."""
        if request.num_awaited > 0 or self._waits.are_vain(request.arrival):
            return False
        num_there, now = len(draft.token_ids), self._clock()
        wanted = self._prices.worth_waiting(draft, self._waits.waited_s(request.arrival, now))
        if wanted <= num_there:
            return False
        longest = _PATIENCE * (wanted - num_there) * draft.more_s + _LEAST_PATIENCE_S
        return self._waits.goes_on(request.arrival, now, longest)

    # --- when a drafter has news ----------------------------------------------------------------

    def refresh(self) -> None:
        news, now = self._drafter.poll(), self._clock()
        if not self._hopeful:
            return
        for arrival in news:
            self._waits.heard(arrival)
        late = [arrival for arrival in self._hopeful if self._due(arrival) <= now]
        for arrival in {*news, *late}:
            if (request := self._hopeful.get(arrival)) is not None:
                self._consider(request)

    def next_due(self) -> float:
        return min(map(self._due, self._hopeful), default=math.inf)

    def _due(self, arrival: int) -> float:
        """Return the clock time until which a request waits for guesses; infinite if it does not wait."""
        return self._waits.until(arrival) if self._hopeful[arrival].awaits_drafts else math.inf

    def wait_sources(self) -> Sequence[int]:
        return self._drafter.wait_sources()

    def close(self) -> None:
        self._drafter.close()

    # --- what there is to guess -----------------------------------------------------------------

    def _propose(self, request: RequestState) -> Draft:
        question = self._question(request)
        if question is None:
            return NO_DRAFT
        draft, structured = self._drafter.propose(question), request.sampling.structured
        if structured is None:
            return draft
        return self._guides.guided(
            request.arrival, structured, request.prompt_len, request.token_ids, draft, question.most
        )

    def _question(self, request: RequestState) -> Question | None:
        """Return what to ask the drafter, or None where drafts are not allowed or not worth it."""
        prices, token_ids, sampling = self._prices, request.token_ids, request.sampling
        if not request.may_draft or prices.is_pointless:
            return None
        most = min(prices.reach, request.max_len - len(token_ids) - 1)  # one token is sampled behind drafts
        if most <= 0 or (sampling.structured is not None and not self._with_grammars):
            return None
        least_chance = 0.0 if prices.has_gaps else prices.least_chance
        return Question(request.arrival, token_ids, most, least_chance, request.prompt_len, sampling)

    def forget(self, request: RequestState) -> None:
        self._drop_guesses(request.arrival)
        self._waits.forget(request.arrival)
        self._forced.discard(request.arrival)
        self._drafter.forget(request.arrival)
        self._guides.forget(request.arrival)

    def stats(self) -> SpeculationStats:
        return self._stats


class _Prices:
    """The costs of windows, from which it follows how large a window is worth its time.

    Args:
        costs, depth, most: as for `DraftWindows`.

    Attributes:
        most: most drafts of a row in one step.
        num_running: requests that have a row.
        has_gaps: fewer requests run than the pipe needs plans, so stages wait if each has one plan in it.
        num_busy: how many plans are computed at once, as the drafter is told; 1 where there are gaps.
        reach: most tokens to guess ahead: of one window; where stages wait, of all that may follow it, too.
        least_chance: chance from which on one draft is worth its time in a plan like the newest; > 1: never.
    """

    def __init__(self, costs: CostModel | None, depth: PlanDepth, most: int) -> None:
        self._costs = costs
        self._depth = depth
        self.most = most
        self._shape = _Shape(1, 0, is_alone=True)  # of the newest plan
        self._made_at: dict[int, float] = {}  # when each step was planned; only without a cost model
        # Average seconds from a plan to its result, there. Only ratios count until the first result comes.
        self._trip_s = float(_FREE_TOKENS * depth.number)
        self._has_trips = False
        self._streamed_sizes = KeptSizes()
        self.least_chance = 0.0
        self.note_running(1)

    def note_running(self, num_running: int) -> None:
        """Record the number of requests that have a row."""
        self.num_running = num_running
        self.has_gaps = num_running < self._depth.number
        self.num_busy = 1 if self.has_gaps else self._depth.number
        self.reach = self.most if not self.has_gaps else (self.most + 1) * (self._depth.number + 1)

    @property
    def is_pointless(self) -> bool:
        """Whether even a certain guess would cost more time than it saves."""
        return self.least_chance > 1.0 and not self.has_gaps

    def planned(self, shape: _Shape, step_id: int, now: float) -> None:
        """Record a plan that has no drafts yet."""
        self._shape = shape
        self._streamed_sizes.planned(step_id)
        if self._costs is None:
            self._made_at[step_id] = now
        self.least_chance = least_chance(self._num_rows, self._step_seconds())

    @property
    def is_timing(self) -> bool:
        """Whether `returned` needs the results of steps."""
        return bool(self._made_at)

    def returned(self, step_id: int, now: float) -> None:
        """Record when the result of a step has come."""
        if (made_at := self._made_at.pop(step_id, None)) is None:
            return
        self._trip_s += (_NEWEST_WEIGHT if self._has_trips else 1.0) * (now - made_at - self._trip_s)
        self._has_trips = True
        # Results come in step order: earlier steps still noted will not come, as their requests had ended.
        self._made_at = {step: at for step, at in self._made_at.items() if step > step_id}

    def sizes(self, drafts: Sequence[Draft]) -> list[int]:
        """Return how many tokens of each draft to add to a plan like the newest."""
        if all(draft.chance < self.least_chance for draft in drafts):
            return [0] * len(drafts)
        cut = [Draft(draft.token_ids[: self.most], draft.chance) for draft in drafts]
        return window_sizes(cut, self._num_rows, self._step_seconds())

    @property
    def _num_rows(self) -> int:
        """The rows of the newest plan; where no stage waits, at least as many as plans have on average.

        Without this bound, drafts would look cheap in a plan that has few rows by chance, and would fill it.
        The rows without a place in it would go into further small plans, which drafts fill too. In the end
        more plans than stages would circulate, with drafts in the place of rows.
        """
        share = 0 if self.has_gaps else self.num_running // self._depth.number
        return max(self._shape.num_rows, share)

    def _step_seconds(self) -> Callable[[int], float]:
        """Return a function from a number of tokens to the seconds of a plan like the newest."""
        combine = sum if self._shape.is_alone else max
        stages = self._stage_seconds(alone=self._shape.is_alone)
        return lambda tokens: combine(stages(tokens))

    def streamed_size(self, draft: Draft) -> int:
        """Return the tokens of each window of a request that streams; 0: it should not."""
        if not self.has_gaps:
            return 0
        if math.isfinite(draft.more_s):
            return streamed_size(draft.chance, self.most + 1, self._pipe_times(draft.more_s))
        chance, most = round(draft.chance * _CHANCE_STEPS), min(self.most + 1, len(draft.token_ids))
        return self._streamed_sizes.of(
            (chance, most, self.num_running),
            self._window_prices,
            lambda: streamed_size(chance / _CHANCE_STEPS, most, self._pipe_times(0.0)),
        )

    def _window_prices(self) -> list[float]:
        """Return the seconds of the smallest and largest window, on all stages and on the slowest."""
        alone, shared = self._stage_seconds(alone=True), self._stage_seconds(alone=False)
        sizes = (1, self.most + 1)
        return [*(sum(alone(size)) for size in sizes), *(max(shared(size)) for size in sizes)]

    def _pipe_times(self, guess_s: float) -> PipeTimes:
        return PipeTimes(
            self._stage_seconds(alone=True),
            self._stage_seconds(alone=False),
            self._depth.wire.latency,
            self.num_running,
            guess=guess_s,
        )

    def _stage_seconds(self, *, alone: bool) -> Callable[[int], list[float]]:
        """Return a function from a number of tokens to each stage's seconds, with the newest contexts."""
        costs = None if self._costs is None else self._costs.costs(alone=alone)
        if costs is None:
            stage_s = max(self._trip_s / self._depth.number, _LEAST_STAGE_S)
            return lambda tokens: [stage_s * max(1.0, tokens / _FREE_TOKENS)] * self._depth.number
        known: list[StageCost] = costs

        def seconds(tokens: int) -> list[float]:
            shape = StepShape(tokens, tokens * self._shape.attended, tokens)
            return [cost.seconds(shape) for cost in known]

        return seconds

    def worth_waiting(self, draft: Draft, waited_s: float) -> int:
        """Return the number of guesses for which a request should wait.

        If it is not more than the draft has, the request should go on at once.
        """
        rows, seconds = self._num_rows, self._step_seconds()
        return guesses_worth_waiting(draft, self.most, rows, seconds, waited_s)


class _Shape(NamedTuple):
    """The shape of a plan, as far as it decides the price of drafts.

    Attributes:
        attended: positions that one of its tokens attends to, on average.
        is_alone: no other plan was in the pipe with it.
    """

    num_rows: int
    attended: int
    is_alone: bool


def _rewound_row(request: RequestState) -> RewoundRow:
    return RewoundRow(
        row=request.row,
        step=request.last_sampled_step,
        num_tokens=len(request.token_ids),
        newest_ids=request.token_ids[request.num_told :],
    )

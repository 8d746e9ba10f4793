"""The answers that a recorded core has read, given again in the same order; its plans are compared.

    record ──▶ readings of the clock, results, reports, guesses ──▶ core and scheduler ──▶ plans
                                          the plans of the record ──compared──────────────┘

One record at a time: `begin` takes it up, and whatever the core asks until the next is answered from it. A
core that decides otherwise may ask for more than there is; then nothing has come, and the clock stands still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from penstock.batch import BuiltGrammar, ScheduledBatch, StageSpans, StageTimes, StepResult
from penstock.decisions.records import Assembled, Guess, Record, Turned, unpacked_times, without_tokens
from penstock.errors import ErrorInfo, error_from_info
from penstock.speculation.drafter import NO_DRAFT, Draft

PlanHook = Callable[[ScheduledBatch], None]


class PlansDifferError(Exception):
    """A plan is not the recorded one.

    Args:
        recorded: None: none was recorded.
        made: None: none was made.
    """

    def __init__(self, recorded: ScheduledBatch | None, made: ScheduledBatch | None) -> None:
        super().__init__("the plans differ")
        self.recorded, self.made = recorded, made


class RecordedAnswers:
    """Answers a core, and compares its plans.

    Args:
        on_plan: called with each plan that equals the recorded one, when it is made.

    Attributes:
        num_plans: plans that were equal.
    """

    def __init__(self, on_plan: PlanHook) -> None:
        self.num_plans = 0
        self._on_plan = on_plan
        self._now, self._now_ns = 0.0, 0
        self.begin(Record(call=Turned()))

    def begin(self, record: Record) -> None:
        """Take up the next record."""
        if isinstance(record.call, Assembled):
            self._now_ns = 0
        times, self._now_ns = unpacked_times(record.times, self._now_ns)
        self._times: Iterator[float] = iter(times)
        self._polls = deque(record.polls)
        self._plans, self._unsent, self._num_submitted = deque(record.plans), record.unsent, 0
        self._grammars, self._num_looks = record.grammars, 0
        self._spans, self._stage_times = deque(record.spans), deque(record.stage_times)
        self._drafts, self._guided = deque(record.drafts), deque(record.guided)
        self._wants, self._news = deque(record.wants), deque(record.news)

    def end(self) -> None:
        """End the call of the record. Raises `PlansDifferError` if it has made fewer plans."""
        if self._plans:
            raise PlansDifferError(self._plans[0], None)

    def read_clock(self) -> float:
        """Return the next reading."""
        self._now = next(self._times, self._now)
        return self._now

    def poll(self) -> list[StepResult]:
        """Return the next results, or raise the error that was raised in their place."""
        results = self._polls.popleft() if self._polls else []
        if isinstance(results, ErrorInfo):
            raise error_from_info(results)
        return results

    def submit(self, plan: ScheduledBatch) -> None:
        """Compare a plan with the recorded one. Raises `PlansDifferError`, or the error raised then."""
        made = without_tokens(plan)
        recorded = self._plans.popleft() if self._plans else None
        if made != recorded:
            raise PlansDifferError(recorded, made)
        self.num_plans += 1
        self._on_plan(made)
        error = self._unsent.get(self._num_submitted)
        self._num_submitted += 1
        if error is not None:
            raise error_from_info(error)

    def grammars(self) -> list[BuiltGrammar]:
        """Return the reports that the next look for grammars has found."""
        self._num_looks += 1
        return self._grammars.get(self._num_looks - 1, [])

    def spans(self) -> list[StageSpans]:
        """Return the reports that the next look at them has found for the first time."""
        return self._spans.popleft() if self._spans else []

    def stage_times(self) -> list[StageTimes]:
        """Return the times that the next look at the stages' times has found."""
        return self._stage_times.popleft() if self._stage_times else []

    def draft(self) -> Draft:
        """Return the drafter's next guess."""
        return _draft(self._drafts)

    def guided(self) -> Draft:
        """Return the next guess of the guides."""
        return _draft(self._guided)

    def wanted(self) -> int | None:
        """Return how many tokens the drafter wants next of the last stage."""
        return self._wants.popleft() if self._wants else None

    def news(self) -> Collection[int]:
        """Return the requests that the next look at the drafter has found."""
        return self._news.popleft() if self._news else ()


def _draft(guesses: deque[Guess | None]) -> Draft:
    guess = guesses.popleft() if guesses else None
    if guess is None:
        return NO_DRAFT
    if guess.chance < 0:
        raise RuntimeError("the drafter had failed when this was recorded")
    return Draft(guess.token_ids, guess.chance, guess.more_s, guess.is_forced)

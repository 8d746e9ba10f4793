"""Gives a replayed core the answers that the recorded core read, in the same order, and compares its plans.

    record ──▶ readings of the clock, results, reports, guesses ──▶ core and scheduler ──▶ plans
                                          the plans of the record ──compared──────────────┘

There is one record at a time: `begin` takes it up, and all that the core reads until the next `begin` comes
from it. A core that decides differently may read more often than the recorded core did. Then it gets no
results, reports or guesses, and the clock stands still.
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
    """A plan of the replayed core differs from the recorded plan.

    Args:
        recorded: the recorded plan; None: the record has no further plan.
        made: the plan of the replayed core; None: the core made no further plan.
    """

    def __init__(self, recorded: ScheduledBatch | None, made: ScheduledBatch | None) -> None:
        super().__init__("the plans differ")
        self.recorded, self.made = recorded, made


class RecordedAnswers:
    """Answers a core, and compares its plans.

    Args:
        on_plan: called with each plan that the core submits, once it is found equal to the recorded one.

    Attributes:
        num_plans: number of plans that were equal.
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
        self._free_bytes = deque(record.free_bytes)
        self._drafts, self._guided = deque(record.drafts), deque(record.guided)
        self._wants, self._news = deque(record.wants), deque(record.news)

    def end(self) -> None:
        """End the call of the record. Raises `PlansDifferError` if a recorded plan was not made."""
        if self._plans:
            raise PlansDifferError(self._plans[0], None)

    def read_clock(self) -> float:
        """Return the next recorded reading of the clock; if there is none, the last one again."""
        self._now = next(self._times, self._now)
        return self._now

    def poll(self) -> list[StepResult]:
        """Return the results of the next recorded poll, or raise the error that it raised."""
        results = self._polls.popleft() if self._polls else []
        if isinstance(results, ErrorInfo):
            raise error_from_info(results)
        return results

    def submit(self, plan: ScheduledBatch) -> None:
        """Compare a plan with the next recorded one.

        Raises:
            PlansDifferError: the plans differ, or none is left.
            PenstockError: the recorded plan could not be submitted, for this reason.
        """
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
        """Return the outcomes that the next recorded look for grammars found."""
        self._num_looks += 1
        return self._grammars.get(self._num_looks - 1, [])

    def spans(self) -> list[StageSpans]:
        """Return the reports of timed work that were new at the next recorded look for them."""
        return self._spans.popleft() if self._spans else []

    def stage_times(self) -> list[StageTimes]:
        """Return the reports that the next recorded look at the stages' times found."""
        return self._stage_times.popleft() if self._stage_times else []

    def free_bytes(self) -> int:
        """Return the free memory that the next look has found; raise `OSError` if it could not be read."""
        free = self._free_bytes.popleft() if self._free_bytes else None
        if free is None:
            raise OSError("the free memory could not be read when this was recorded")
        return free

    def draft(self) -> Draft:
        """Return the drafter's next recorded guess. Raises `RuntimeError` if the drafter failed there."""
        return _draft(self._drafts)

    def guided(self) -> Draft:
        """Return the next recorded guess of the guides."""
        return _draft(self._guided)

    def wanted(self) -> int | None:
        """Return the drafter's next recorded answer to how many tokens the last stage is to guess."""
        return self._wants.popleft() if self._wants else None

    def news(self) -> Collection[int]:
        """Return the requests for which the next recorded poll of the drafter found more guesses."""
        return self._news.popleft() if self._news else ()


def _draft(guesses: deque[Guess | None]) -> Draft:
    guess = guesses.popleft() if guesses else None
    if guess is None:
        return NO_DRAFT
    if guess.chance < 0:
        raise RuntimeError("the drafter had failed when this was recorded")
    return Draft(guess.token_ids, guess.chance, guess.more_s, guess.is_forced)

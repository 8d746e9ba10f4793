"""Takes the recorder's place in a replay: gives the core the clock times and the guesses of a recording.

A drafter makes the guesses, and guides apply the grammar of a request to them (`speculation.grammar_guides`);
both repeat their answers. The scheduler's own rules about guesses (how many are worth sending, which requests
wait for them) run as in a live engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from penstock.decisions.recorder import NoRecorder
from penstock.decisions.records import Assembled
from penstock.executor.base import Executor
from penstock.replay.recorded_answers import RecordedAnswers
from penstock.request import StructuredOutputs
from penstock.speculation.drafter import Draft, Drafter, Question
from penstock.speculation.grammar_guides import NoGuides


class Playback(NoRecorder):
    """Gives a replayed core a clock, a drafter and guides that repeat recorded answers.

    The executor is left as it is: it repeats recorded answers itself (`replay.replayed_executor`).

    Args:
        assembled: the record of the call in which the core was made; it names the drafter that the core had.
        answers: the recorded answers; the replayer moves them on from record to record.
    """

    def __init__(self, assembled: Assembled, answers: RecordedAnswers) -> None:
        self._assembled, self._answers = assembled, answers

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        return self._answers.read_clock

    def free_memory(self, available: Callable[[], int]) -> Callable[[], int]:
        return self._answers.free_bytes

    def executor(self, executor: Executor) -> Executor:
        return executor

    def drafter(self, drafter: Drafter) -> Drafter:
        return ReplayedDrafter(self._answers, self._assembled.drafter, is_at_tail=self._assembled.is_at_tail)

    def guides(self, guides: NoGuides) -> NoGuides:
        return ReplayedGuides(self._answers)


class ReplayedDrafter:
    """A drafter that repeats the recorded guesses.

    Args:
        answers: the recorded answers; the replayer moves them on from record to record.
        name: name of the recorded drafter.
        is_at_tail: whether its guesses were made on the last stage.
    """

    def __init__(self, answers: RecordedAnswers, name: str, *, is_at_tail: bool) -> None:
        self.name = name
        self._answers, self._is_at_tail = answers, is_at_tail

    @property
    def is_at_tail(self) -> bool:
        return self._is_at_tail

    def propose(self, question: Question) -> Draft:
        """Return the recorded guess, or no draft if no further guess is recorded.

        Raises:
            RuntimeError: the recorded drafter failed here.
        """
        return self._answers.draft()

    def wants(self, question: Question, num_busy: int) -> int | None:
        """Return how many tokens the last stage is to guess, as recorded; None: none, or not recorded."""
        return self._answers.wanted()

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        """Do nothing: the guesses that followed from these tokens are recorded."""

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the later guesses, which depended on this, are recorded."""

    def forget(self, request: int) -> None:
        """Do nothing: nothing is kept of a request."""

    def poll(self) -> Collection[int]:
        """Return the requests for which the recorded drafter had guessed more since it was last asked."""
        return self._answers.news()

    def wait_sources(self) -> Sequence[int]:
        """Return nothing: a replay never waits."""
        return ()

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class ReplayedGuides(NoGuides):
    """The guides of a replayed core, which repeat the recorded answers."""

    def __init__(self, answers: RecordedAnswers) -> None:
        self._answers = answers

    def guided(
        self,
        request: int,
        structured: StructuredOutputs,
        prompt_len: int,
        token_ids: Sequence[int],
        draft: Draft,
        most: int,
    ) -> Draft:
        """Return the draft that the recorded guides made, whatever `draft` is."""
        return self._answers.guided()

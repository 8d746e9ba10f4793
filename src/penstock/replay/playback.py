"""The stand-in for a recorder: a replayed core reads from a record what it would read of its machine.

Drafter and guides of a replayed core answer what was recorded. The scheduler's own rules about guesses (how
many are worth sending, which requests wait for them) run as ever.
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
    """The sources that a replayed core reads.

    Args:
        assembled: the core, in the recording.
        answers: answers of the record that is replayed now.
    """

    def __init__(self, assembled: Assembled, answers: RecordedAnswers) -> None:
        self._assembled, self._answers = assembled, answers

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        return self._answers.read_clock

    def executor(self, executor: Executor) -> Executor:
        return executor

    def drafter(self, drafter: Drafter) -> Drafter:
        return ReplayedDrafter(self._answers, self._assembled.drafter, is_at_tail=self._assembled.is_at_tail)

    def guides(self, guides: NoGuides) -> NoGuides:
        return ReplayedGuides(self._answers)


class ReplayedDrafter:
    """A drafter that repeats the recorded guesses.

    Args:
        name, is_at_tail: those of the recorded drafter.
    """

    def __init__(self, answers: RecordedAnswers, name: str, *, is_at_tail: bool) -> None:
        self.name = name
        self._answers, self._is_at_tail = answers, is_at_tail

    @property
    def is_at_tail(self) -> bool:
        return self._is_at_tail

    def propose(self, question: Question) -> Draft:
        """Return the recorded guess. Raises `RuntimeError` if the recorded drafter failed here."""
        return self._answers.draft()

    def wants(self, question: Question, num_busy: int) -> int | None:
        """Return the recorded number of tokens that the last stage is to guess."""
        return self._answers.wanted()

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        """Do nothing: what it would have guessed from it is recorded."""

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: what it has learnt from it is recorded."""

    def forget(self, request: int) -> None:
        """Do nothing: it keeps nothing of a request."""

    def poll(self) -> Collection[int]:
        """Return the recorded requests of which more was guessed."""
        return self._answers.news()

    def wait_sources(self) -> Sequence[int]:
        """Return nothing: a replay never waits."""
        return ()

    def close(self) -> None:
        """Do nothing: it holds nothing that is to be closed."""


class ReplayedGuides(NoGuides):
    """Guides that repeat what was recorded."""

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

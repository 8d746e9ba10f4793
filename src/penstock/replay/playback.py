"""The stand-in for a recorder in a replay: through it, the core reads the recording in place of its machine.

It gives the core a clock, a drafter and guides that answer what was recorded. The scheduler's own rules about
guesses (how many are worth sending, which requests wait for them) run as in service.
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
    """Gives a replayed core its clock, executor, drafter and guides.

    Args:
        assembled: the recorded call in which the core was made.
        answers: the answers of the record that is being replayed.
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
        answers: the answers of the record that is being replayed.
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
        """Do nothing: the guesses that the drafter made after it heard these are recorded."""

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the guesses that the drafter made after it learnt this are recorded."""

    def forget(self, request: int) -> None:
        """Do nothing: nothing is kept of a request."""

    def poll(self) -> Collection[int]:
        """Return the requests for which more was guessed, as recorded."""
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

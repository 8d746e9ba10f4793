"""Lets an agent answer the head about ways (network paths) to other hosts, and go on with its work.

The questions are answered one after the other in a thread, which ends with `close`, or soon after it if a
question is being answered. The agent waits for the bell and sends the answers, since its wire belongs to its
own thread.
"""

from __future__ import annotations

import queue
import threading
from contextlib import closing
from typing import Protocol

from penstock.errors import PeerError, PenstockError
from penstock.hosts.bell import Bell
from penstock.hosts.network.scout import Scout
from penstock.hosts.network.scout_messages import (
    FromScout,
    ListenForHost,
    ListensForHost,
    RestScout,
    ScoutFailed,
    Surveyed,
    SurveyHost,
    ToScout,
)

CLOSE_S = 0.5  # so long `close` waits for the thread: the head must hear from the agent meanwhile


class ScoutAnswers(Protocol):
    """The interface of what answers the head's questions about network paths to other hosts, for an agent."""

    def fileno(self) -> int:
        """Return a descriptor, readable when there is an answer."""
        ...

    def ask(self, question: ToScout) -> None:
        """Take a question, and return at once; its answer comes with a later `take`."""
        ...

    def take(self) -> list[FromScout]:
        """Return the answers that were found since the last call."""
        ...

    def close(self) -> None:
        """End the work, without a long wait; questions that have no answer yet get none."""
        ...


class ScoutingAgent:
    """Answers a head's questions about network paths from this host; a scout measures them in a thread.

    Implements `ScoutAnswers`.

    Args:
        scout: belongs to the thread from now on.
    """

    def __init__(self, scout: Scout) -> None:
        self._scout = scout
        self._bell = Bell()
        self._questions: queue.SimpleQueue[ToScout | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[FromScout] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scout", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def ask(self, question: ToScout) -> None:
        self._questions.put(question)

    def take(self) -> list[FromScout]:
        self._bell.hush()
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def close(self) -> None:
        """End the thread, or let it end by itself after the question that it is answering.

        To measure a bad path takes many seconds, and the head would take this host as lost meanwhile.
        """
        self._is_over.set()
        self._questions.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with closing(self._bell):
            while (question := self._questions.get()) is not None and not self._is_over.is_set():
                for answer in self._answered(question):
                    self._answers.put(answer)
                    self._bell.ring()
            self._scout.rest()

    def _answered(self, question: ToScout) -> list[FromScout]:
        if isinstance(question, RestScout):
            self._scout.rest()
            return []
        try:
            if isinstance(question, ListenForHost):
                listening = self._scout.listen(question.peer)
                return [ListensForHost(number=question.number, listening=listening)]
            assert isinstance(question, SurveyHost), question
            survey = self._scout.survey(question.peer, question.ways)
            return [Surveyed(number=question.number, survey=survey)]
        except PenstockError as error:
            return [ScoutFailed(number=question.number, error=error.info())]
        except Exception as error:  # no descriptors, no thread: the head waits for this answer and the next
            why = (isinstance(error, OSError) and error.strerror) or error
            failure = PeerError(f"the host cannot search for paths: {why}.")
            return [ScoutFailed(number=question.number, error=failure.info())]


class NoScout:
    """The answers of a host that cannot look for network paths: every question fails.

    Implements `ScoutAnswers`.
    """

    def __init__(self) -> None:
        self._bell = Bell()
        self._answers: list[FromScout] = []

    def fileno(self) -> int:
        return self._bell.fileno()

    def ask(self, question: ToScout) -> None:
        if not isinstance(question, RestScout):
            error = PeerError("this host does not search for paths to others.").info()
            self._answers.append(ScoutFailed(number=question.number, error=error))
            self._bell.ring()

    def take(self) -> list[FromScout]:
        self._bell.hush()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        self._bell.close()

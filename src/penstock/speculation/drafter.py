"""The interface of drafters, which guess the next tokens of a request.

The scheduler asks a drafter for tokens when a result of a request has come, and reports how many of the last
ones were right. A drafter decides nothing. How many of its tokens are used follows from their chance and from
what a step costs (`speculation.window_sizes`). Whether they are right is decided on the last stage.

A drafter that computes elsewhere (`drafting.model_drafter`) answers with the guesses that it has by then, and
says how long further ones take. The scheduler asks again when the drafter has news.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.batch import RowSampling


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens that a request might say next.

    Attributes:
        token_ids: in order; empty where the drafter has no guess.
        chance: the chance that a token is right if all before it were, between 0 and 1.
        more_s: seconds until one more token is guessed, and again for each further one; infinite: no more
            will be guessed.
        is_forced: a grammar allows no other tokens than these.
    """

    token_ids: Sequence[int] = ()
    chance: float = 0.0
    more_s: float = math.inf
    is_forced: bool = False


NO_DRAFT = Draft()


class Question(NamedTuple):
    """A request whose next tokens are to be guessed.

    Attributes:
        request: its arrival number, which is never used again.
        token_ids: all of its tokens, prompt and output. Between two questions they only grow.
        most: the most tokens to guess.
        least_chance: a guess that is right with less than this chance is of no use now.
        prompt_len: tokens of the prompt.
        sampling: how its tokens are chosen.
    """

    request: int
    token_ids: Sequence[int]
    most: int
    least_chance: float
    prompt_len: int
    sampling: RowSampling


class Drafter(Protocol):
    """Guesses tokens of many requests.

    Attributes:
        name: its name in metrics and logs.
        is_at_tail: the last stage guesses, as `wants` says. If false, neither `wants` nor `hear` is called.
    """

    name: str

    @property
    def is_at_tail(self) -> bool: ...

    def propose(self, question: Question) -> Draft:
        """Guess the next tokens, without waiting: the core's only thread calls this.

        Returns:
            At most `question.most` ids of the vocabulary. `speculation.guard` switches off a drafter that
            returns anything else, raises, or needs more than half a second.
        """
        ...

    def wants(self, question: Question, num_busy: int) -> int | None:
        """Return how many tokens the last stage is to guess of a request in the plan that is made.

        Args:
            num_busy: how many stages compute at once; the last stage's part of a step is one of so many.

        Returns:
            1 to `question.most`; None: the stage guesses none and need not read the request's tokens.
        """
        ...

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        """Take the last stage's guesses behind the first `num_known` tokens of the request.

        Called before `propose` is called with the newest of these tokens.
        """
        ...

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Learn how many drafts a step decided on, and how many of these were right.

        Drafts that a grammar forced are left out. A drafter that compares its guesses with the tokens of the
        next question need not use this.
        """
        ...

    def forget(self, request: int) -> None:
        """Forget a request, which has ended; the drafter may never have seen it."""
        ...

    def poll(self) -> Collection[int]:
        """Return the requests for which more has been guessed since the last call.

        For these `propose` has news.
        """
        ...

    def wait_sources(self) -> Sequence[int]:
        """Return descriptors that become readable when `poll` has something to do."""
        ...

    def close(self) -> None:
        """Close the drafter, which is not asked any more."""
        ...


class OwnGuesses:
    """The defaults of a drafter that guesses itself; one that lets the last stage guess overrides them."""

    @property
    def is_at_tail(self) -> bool:
        return False

    def wants(self, question: Question, num_busy: int) -> int | None:
        return None

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        """Do nothing: the last stage is not asked."""


class LocalDrafter(OwnGuesses):
    """The defaults of a drafter that has its guesses at each call, and holds nothing that must be closed."""

    def poll(self) -> Collection[int]:
        return ()

    def wait_sources(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """Do nothing: this drafter holds nothing that must be closed."""

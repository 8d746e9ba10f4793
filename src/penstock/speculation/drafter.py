"""The seam for drafters, which guess the next tokens of a request.

The scheduler asks a drafter for tokens when a result of a request has come, and tells it what became of the
last ones. A drafter decides nothing: how many of its tokens are used follows from their chance and from what
a step costs (`speculation.window_sizes`), and whether they are right is decided on the last stage.

A drafter that computes elsewhere (`drafting.model_drafter`) answers with what is there, and says how long
more takes; the scheduler looks again when it has news.
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
        more_s: seconds until one more token is guessed, and again for each that follows; infinite: none
            will be.
        is_forced: a grammar leaves no other choice.
    """

    token_ids: Sequence[int] = ()
    chance: float = 0.0
    more_s: float = math.inf
    is_forced: bool = False


NO_DRAFT = Draft()


class Question(NamedTuple):
    """A request whose next tokens are to be guessed.

    Attributes:
        request: its number, which is never used again.
        token_ids: all of its tokens, prompt and output. Between two questions they only grow.
        most: tokens to guess.
        least_chance: a guess that is less likely is of no use now.
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
        name: for metrics and logs.
        is_at_tail: the last stage guesses, as `wants` says; else neither `wants` nor `hear` is called.
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
            num_busy: stages that compute at once, each of which has an equal share of the time.

        Returns:
            At most `question.most`; None: the stage need not even read the request's tokens.
        """
        ...

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        """Take the last stage's guesses behind the first `num_known` tokens of the request.

        Called before the newest of these tokens are asked about.
        """
        ...

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Learn how many tokens of the last guess were tried, and how many of these were right.

        A drafter that compares its guesses with the tokens of the next question need not use this.
        """
        ...

    def forget(self, request: int) -> None:
        """Forget a request, which has ended; the drafter may never have seen it."""
        ...

    def poll(self) -> Collection[int]:
        """Return the requests of which more has been guessed since the last call.

        It is worth asking about these again.
        """
        ...

    def wait_sources(self) -> Sequence[int]:
        """Return descriptors that become readable when `poll` has something to do."""
        ...

    def close(self) -> None:
        """Close the drafter, which is not asked any more."""
        ...


class OwnGuesses:
    """The defaults of a drafter that guesses by itself; one that lets the last stage guess overrides all."""

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
        """Do nothing: it holds nothing that is to be closed."""

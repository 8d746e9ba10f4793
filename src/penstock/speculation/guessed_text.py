"""The guesses of a drafter for one request, compared with its tokens as they come.

A guess is compared even if it was not sent. So the chance that a guess is right is measured at no cost. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIRST_CHANCE = 0.7  # of a guess, until something is measured
_NEWEST_WEIGHT = 0.05  # the least weight of a new token in the measured chance
_FIRST_COUNTS_AS = 4  # the chance to begin with weighs as much as so many tokens
LEAST_USE = 0.15  # the last guess that is asked for is right, with all before it, with this chance or more
LEAST_CHANCE = 0.2  # where a guess is right with less chance, none is asked for, but for trials


class Chance:
    """The measured chance that a guess is right.

    Args:
        value: to begin with.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self._count = _FIRST_COUNTS_AS

    def note(self, is_right: bool) -> None:
        """Note whether a guessed token was right, now that the true one has come."""
        self._count += 1
        self.value += max(_NEWEST_WEIGHT, 1.0 / self._count) * (is_right - self.value)


class GuessedText:
    """The guesses of one request.

    Args:
        chance: the chance that a guess is right, to begin with.
    """

    def __init__(self, chance: float) -> None:
        self.chance = Chance(chance)
        self._num_read = 0
        self._num_known = 0  # tokens that the newest guess follows; there may be more of them now
        self._guessed: Sequence[int] = ()

    @property
    def num_behind(self) -> int:
        """The number of tokens that were read behind those that the newest guess follows."""
        return self._num_read - self._num_known

    def hear(self, num_known: int, token_ids: Sequence[int]) -> None:
        """Take the tokens that are guessed to follow the first `num_known` of the request."""
        self._num_known, self._guessed = num_known, token_ids

    def read(self, token_ids: Sequence[int]) -> list[bool]:
        """Return whether each guess in the place of a new token was right, up to the first wrong one."""
        first, known = max(self._num_read, self._num_known), len(token_ids)
        self._num_read = known
        outcome = []
        for guessed, said in zip(self._behind(token_ids, first), token_ids[first:], strict=False):
            outcome.append(guessed == said)
            self.chance.note(outcome[-1])
            if not outcome[-1]:
                self.hear(known, ())
                break
        return outcome

    def following(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are guessed to follow these."""
        return self._behind(token_ids, len(token_ids))

    def _behind(self, token_ids: Sequence[int], position: int) -> Sequence[int]:
        """Return the guesses from a position on; none if they follow other tokens than those that came."""
        start, guessed = self._num_known, self._guessed
        size = position - start
        if not 0 <= size < len(guessed) or guessed[:size] != token_ids[start:position]:
            return ()
        return guessed[size:]


def useful(chance: float, least: float = LEAST_USE) -> int:
    """Return how many guesses in a row are of use: the most that are all right with chance `least`.

    One is always of use.

    Args:
        chance: the chance that a guess is right if all before it were.
    """
    return max(1, int(math.log(least) / math.log(min(chance, 0.99))))

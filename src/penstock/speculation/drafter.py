"""The seam for whatever guesses the next tokens of a request.

The scheduler asks a drafter for tokens when a request is placed, and tells it what became of them. A drafter
decides nothing: how many of its tokens are used follows from their chance and from what a step costs
(`speculation.window_sizes`), and whether they are right is decided on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """What a request might say next.

    Attributes:
        token_ids: in order; none where the drafter has no idea.
        chance: that a token is right if all before it were, between 0 and 1.
    """

    token_ids: Sequence[int] = ()
    chance: float = 0.0


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses tokens of many requests, which it tells apart by numbers that are never used again.

    Attributes:
        name: in metrics and logs.
    """

    name: str

    def propose(self, request: int, token_ids: Sequence[int], most: int) -> Draft:
        """Guess what follows.

        Args:
            token_ids: all tokens of the request, prompt and output. Between two calls for the same request
                they only grow.
            most: tokens to guess.
        """
        ...

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """So many tokens of the last guess were tried, and so many of these were right."""
        ...

    def forget(self, request: int) -> None:
        """The request has ended; it may never have been seen."""
        ...

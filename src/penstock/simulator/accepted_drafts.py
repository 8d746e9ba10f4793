"""A drafter whose guesses are right with a given chance: it shows what speculation would bring."""

from __future__ import annotations

from random import Random

from penstock.simulator.sampled import TOKEN, WRONG_TOKEN
from penstock.speculation.drafter import Draft, LocalDrafter, Question


class AcceptedDrafts(LocalDrafter):
    """Guesses the tokens that `simulator.sampled` yields.

    Args:
        chance: that a guess is right if all before it were; it claims just that.
        seed: each position of each request has dice of its own.
    """

    name = "simulated"

    def __init__(self, chance: float, *, seed: int = 0) -> None:
        self._chance, self._seed = chance, seed

    def propose(self, question: Question) -> Draft:
        known = len(question.token_ids)
        positions = range(known, known + question.most)
        return Draft([self._guess(question.request, position) for position in positions], self._chance)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the chance is known."""

    def forget(self, request: int) -> None:
        """Do nothing: nothing is kept of a request."""

    def _guess(self, request: int, position: int) -> int:
        is_right = Random(f"{self._seed} {request} {position}").random() < self._chance
        return TOKEN if is_right else WRONG_TOKEN

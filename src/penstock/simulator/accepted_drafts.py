"""A drafter for simulations, whose guesses are right with a given chance, to see what drafts would bring."""

from __future__ import annotations

from random import Random

from penstock.simulator.sampled import TOKEN, WRONG_TOKEN
from penstock.speculation.drafter import Draft, LocalDrafter, Question


class AcceptedDrafts(LocalDrafter):
    """Guesses tokens with a given chance: the one that `simulator.sampled` samples, or another one.

    Args:
        chance: the chance that a guess is right, if all guesses before it are. The drafts state this chance.
        seed: seed of the random numbers. Whether a guess is right follows from the seed, the request and the
            position alone.
    """

    name = "simulated"

    def __init__(self, chance: float, *, seed: int = 0) -> None:
        self._chance, self._seed = chance, seed

    def propose(self, question: Question) -> Draft:
        known = len(question.token_ids)
        positions = range(known, known + question.most)
        return Draft([self._guess(question.request, position) for position in positions], self._chance)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the chance is given, and need not be learnt."""

    def forget(self, request: int) -> None:
        """Do nothing: nothing is kept of a request."""

    def _guess(self, request: int, position: int) -> int:
        is_right = Random(f"{self._seed} {request} {position}").random() < self._chance
        return TOKEN if is_right else WRONG_TOKEN

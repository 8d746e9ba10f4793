"""A drafter that knows what requests will say, and guesses each token right with the same chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest import mock

from penstock.engine.core import core_assembly
from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question


class KnowingDrafter(LocalDrafter):
    """Guesses texts that it was given.

    Attributes:
        texts: prompt and answer of each request, by the first token of the prompt.
        chance: that a guess is right.
        seed: of the dice. Each position of each text has its own.
    """

    name = "knowing"

    def __init__(self, vocab_size: int) -> None:
        self.texts: dict[int, Sequence[int]] = {}
        self.chance = 0.0
        self.seed = 0
        self._vocab_size = vocab_size

    def propose(self, question: Question) -> Draft:
        first, known = question.token_ids[0], len(question.token_ids)
        text = self.texts.get(first)
        if text is None:
            return NO_DRAFT
        positions = range(known, min(known + question.most, len(text)))
        return Draft([self._guess(first, text[position], position) for position in positions], self.chance)

    def _guess(self, first: int, right: int, position: int) -> int:
        is_right = Random(f"{self.seed} {first} {position}").random() < self.chance
        return right if is_right else (right + 1) % self._vocab_size

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """It knows."""

    def forget(self, request: int) -> None:
        """Nothing is kept."""

    @contextmanager
    def in_place_of_suffixes(self) -> Iterator[None]:
        """Engines whose core is in this process have this drafter where they would draft by suffixes."""
        with mock.patch.object(core_assembly, "SuffixDrafter", return_value=self):
            yield

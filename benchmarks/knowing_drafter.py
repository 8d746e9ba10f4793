"""A drafter that knows what requests will say, and guesses each token right with the same chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest import mock

from penstock.engine.core import core_assembly
from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question


class KnowingDrafter(LocalDrafter):
    """Guesses texts that it was given. A text's guesses are drawn once, and then cost next to nothing.

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
        self._drawn: dict[tuple[int, float, int], tuple[Sequence[int], list[int]]] = {}  # texts, guesses

    def propose(self, question: Question) -> Draft:
        first, known = question.token_ids[0], len(question.token_ids)
        text = self.texts.get(first)
        if text is None:
            return NO_DRAFT
        return Draft(self._guesses(first, text)[known : known + question.most], self.chance)

    def _guesses(self, first: int, text: Sequence[int]) -> list[int]:
        """For each position of a text, whether a request is there yet or not."""
        key = (self.seed, self.chance, first)
        of_text, guesses = self._drawn.get(key, (None, []))
        if of_text is not text:
            guesses = [self._guess(first, right, position) for position, right in enumerate(text)]
            self._drawn[key] = (text, guesses)
        return guesses

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

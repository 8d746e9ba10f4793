"""The core's side of multi-token prediction (MTP): a layer of the model guesses tokens on the last stage.

The MTP layer (multi-token prediction) is a layer of the checkpoint that was trained to guess the next tokens.
Plans say for which rows the layer reads the tokens, and how many it guesses (`wants`); results bring its
guesses (`hear`). Where guesses are right too seldom to be of use, the layer is left out. It is then tried on
stretches of some texts, to see whether that has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question
from penstock.speculation.guessed_text import (
    FIRST_CHANCE,
    LEAST_CHANCE,
    LEAST_USE,
    Chance,
    GuessedText,
    useful,
)

# A trial: where guesses are of no use, one token is guessed behind each of so many tokens.
_TRIAL_TOKENS = 24
_TRIAL_REQUESTS = 8  # one in so many requests begins with a trial, for which the layer reads the prompt too
_TRIAL_EVERY = 256  # every request has a trial each time its answer has got so many tokens more


class MTPDrafter(LocalDrafter):
    """A drafter whose guesses come from the last stage.

    Args:
        guess_share: the cost of a guess, as a share of the cost of a step of the whole model.
    """

    name = "mtp"

    def __init__(self, guess_share: float) -> None:
        self._guess_share = guess_share
        self._texts: dict[int, _Text] = {}
        self._chance = Chance(FIRST_CHANCE)  # measured on all requests

    @property
    def is_at_tail(self) -> bool:
        return True

    def wants(self, question: Question, num_busy: int) -> int | None:
        chance = self._text(question.request).chance.value
        least_use = max(LEAST_USE, self._guess_share * num_busy)
        if chance >= max(question.least_chance, LEAST_CHANCE, least_use):
            return min(question.most, useful(chance, least_use))
        return 1 if _is_tried(question) else None

    def hear(self, request: int, num_known: int, token_ids: Sequence[int]) -> None:
        self._text(request).heard = num_known, token_ids

    def propose(self, question: Question) -> Draft:
        text = self._text(question.request)
        for is_right in text.read(question.token_ids):
            self._chance.note(is_right)
        text.take_heard()
        guessed = text.following(question.token_ids)
        return Draft(guessed[: question.most], text.chance.value) if guessed else NO_DRAFT

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the next tokens show how many guesses were right."""

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)

    def _text(self, request: int) -> _Text:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(self._chance.value)
        return text


class _Text(GuessedText):
    """The guesses of one request.

    Attributes:
        heard: the newest guess as `hear` brought it. It is taken up only after the new tokens were compared
            with the guess before it.
    """

    heard: tuple[int, Sequence[int]] | None = None

    def take_heard(self) -> None:
        """Take up the newest guess, now that the tokens before it were read."""
        if self.heard is not None:
            self.hear(*self.heard)
            self.heard = None


def _is_tried(question: Question) -> bool:
    num_outputs = len(question.token_ids) - question.prompt_len
    is_begun = num_outputs >= _TRIAL_EVERY or question.request % _TRIAL_REQUESTS == 0
    return is_begun and num_outputs % _TRIAL_EVERY < _TRIAL_TOKENS

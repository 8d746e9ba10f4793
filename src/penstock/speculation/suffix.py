"""A drafter that reads the request's own text: it guesses what followed the same tokens earlier.

    text      ... the quick brown fox ... the quick brown
                  ^^^^^^^^^^^^^^^          ^^^^^^^^^^^^^^^   the same three tokens
                                  ^ cursor                  so "fox" is the guess

Code that is edited, answers that quote and lists whose items look alike repeat long pieces. For each request
the drafter keeps the place where each token, each sequence of three tokens and each of eight was seen last.
While the text goes on as it did there, the cursor moves with it, and a guess costs no search. Where the text
departs from the old one, a new place is looked up. The longest sequence is tried first, as its guess is right
most often. The guess behind a single token is right so seldom that it is worth sending only where it costs
next to nothing.

Each token that comes shows whether the cursor was right, even if the guess was not sent. So the chance of a
draft is measured at no cost, for each class of how many tokens before the cursor agree with the end of the
text. A request begins with the chances measured on all requests, and then measures its own.

Prompt lookup is the idea of Saxena (2023); suffix trees over more texts are arXiv 2411.04975. Memory is
linear in the text, and time is linear in the tokens that came since the last call, of which each call takes a
bounded number. Plain Python on one thread: the core's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import cycle, islice

from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question

LENGTHS = (8, 3, 1)  # tokens of a sequence that is looked up
MOST_READ = 4096  # tokens that one call takes in; the rest of a long prompt follows with the next
_FEW = 128  # so many new tokens are followed one by one; more, as of a prompt, are noted all at once
_RUN_BOUNDS = (2, 3, 8, 20)  # of the classes: how many tokens in a row agree before the cursor
_NEWEST_WEIGHT = 0.1  # of a token in the measured chance
_FIRST_CHANCES = (0.2, 0.4, 0.4, 0.7, 0.9)  # by class, until something is measured
_NOWHERE = -1


class SuffixDrafter(LocalDrafter):
    """Guesses the next tokens of a request from its own text."""

    name = "suffix"

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._chances = list(_FIRST_CHANCES)  # by class, measured on all requests

    def propose(self, question: Question) -> Draft:
        token_ids, most = question.token_ids, question.most
        text = self._texts.get(question.request)
        if text is None:
            text = self._texts[question.request] = _Text(list(self._chances))
        text.read(token_ids, self._chances)
        if text.cursor == _NOWHERE or text.num_read < len(token_ids):
            return NO_DRAFT
        chance = text.chances[text.run_class]
        if chance < question.least_chance:
            return NO_DRAFT
        found = list(token_ids[text.cursor : text.cursor + most])
        if len(found) < most:  # the old text reaches up to the newest token: what follows repeats it
            found = list(islice(cycle(found), most))
        return Draft(found, chance)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the next tokens show how many guesses were right."""

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)


class _Text:
    """The index of one request's text.

    Args:
        chances: the chance of a guess by class, to begin with; this object changes the list.

    Attributes:
        num_read: tokens that were taken in.
        cursor: position of the next token's guess, or `_NOWHERE`.
    """

    def __init__(self, chances: list[float]) -> None:
        self.chances = chances
        self.num_read = 0
        self.cursor = _NOWHERE
        self._run = 0  # tokens in a row that are the same before the cursor and at the end of the text
        # Hash of a sequence -> position behind the place where it was seen last. If two sequences have one
        # hash, the guess may be wrong, which does no harm.
        self._ends: dict[int, int] = {}

    @property
    def run_class(self) -> int:
        """The index of the chance that holds for the next token."""
        return bisect_right(_RUN_BOUNDS, self._run)

    def read(self, token_ids: Sequence[int], all_chances: list[float]) -> None:
        """Take in the tokens that are new, in order."""
        if self.num_read == len(token_ids) - 1:
            self._follow(token_ids, self.num_read, all_chances)
            self.num_read += 1
            return
        end = min(len(token_ids), self.num_read + MOST_READ)
        if end - self.num_read > _FEW:
            self._skip(token_ids, end - 1)
        for position in range(self.num_read, end):
            self._follow(token_ids, position, all_chances)
        self.num_read = end

    def _skip(self, token_ids: Sequence[int], end: int) -> None:
        """Note all sequences of new tokens up to `end` at once; no guess is compared with these tokens."""
        for length in LENGTHS:
            first = max(0, self.num_read - length + 1)  # where the first new sequence begins
            shifted = (token_ids[first + offset : end] for offset in range(length))
            keys = map(hash, zip(*shifted, strict=False))
            self._ends.update(zip(keys, range(first + length, end + 1), strict=False))
        self.num_read, self.cursor, self._run = end, _NOWHERE, 0

    def _follow(self, token_ids: Sequence[int], position: int, all_chances: list[float]) -> None:
        """Move the cursor over one token, and note the sequences that it ends."""
        end, found = position + 1, _NOWHERE
        if self.cursor != _NOWHERE:
            is_right = token_ids[self.cursor] == token_ids[position]
            self._note(is_right, all_chances)
            found, self._run = (self.cursor + 1, self._run + 1) if is_right else (_NOWHERE, 0)
        ends = self._ends
        for length in LENGTHS:
            if end < length:
                continue
            key = hash(tuple(token_ids[end - length : end]))
            if found == _NOWHERE:
                found, self._run = ends.get(key, _NOWHERE), length
            ends[key] = end
        self.cursor = found

    def _note(self, is_right: bool, all_chances: list[float]) -> None:
        """Learn from whether the token at the cursor was right."""
        run_class = self.run_class
        for chances in (self.chances, all_chances):
            chances[run_class] += _NEWEST_WEIGHT * (is_right - chances[run_class])

"""Drafters of tests: they know what the fake ranks will say, and are right as often as they are told.

`IN_SERVICE` has those of the package that the contract tests hold to what a drafter promises
(docs/adding-a-drafter.md): a new drafter is a new line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from fakes import VOCAB_SIZE, next_token
from penstock.batch import GREEDY
from penstock.engine.core import core_assembly
from penstock.kvcache.allocator import BlockAllocator
from penstock.scheduler import windows
from penstock.scheduler.queues import RequestState
from penstock.scheduler.windows import DraftWindows
from penstock.speculation.drafter import NO_DRAFT, Draft, Drafter, LocalDrafter, OwnGuesses, Question
from penstock.speculation.mtp import MTPDrafter
from penstock.speculation.suffix import SuffixDrafter

# By the name of the method that chooses it; one whose guesses come from elsewhere gets none in these tests.
IN_SERVICE: Mapping[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "mtp": lambda: MTPDrafter(guess_share=0.1),
}


def asked(token_ids: Sequence[int], most: int, request: int = 0, **given: Any) -> Question:
    """What a drafter is asked; the request has no output yet, and is greedy."""
    fields: dict[str, Any] = {"least_chance": 0.0, "prompt_len": len(token_ids), "sampling": GREEDY}
    return Question(request, token_ids, most, **(fields | given))


def without_costs(drafter: Drafter, allocator: BlockAllocator, costs: object, **given: Any) -> DraftWindows:
    """Windows that do not shrink where this machine happens to be slow; in place of `DraftWindows`."""
    return DraftWindows(drafter, allocator, None, **given)


def wait_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are waited for, however little a step of a small model costs, and all of them are sent."""
    monkeypatch.setattr(windows, "guesses_worth_waiting", lambda draft, most, *_: most)
    monkeypatch.setattr(windows, "_LEAST_PATIENCE_S", 60.0)
    monkeypatch.setattr(core_assembly, "DraftWindows", without_costs)


class KnowingDrafter(LocalDrafter):
    """Guesses the tokens of `fakes.next_token`.

    Args:
        request_of: a live request by its arrival.
        chance: that a guess is right.
        claimed: chance that it claims; None: the true one.

    Attributes:
        asked, forgotten: requests by their arrival.
    """

    name = "knowing"

    def __init__(
        self,
        request_of: Callable[[int], RequestState],
        chance: float,
        *,
        claimed: float | None = None,
        seed: int = 0,
    ) -> None:
        self._request_of, self._chance, self._seed = request_of, chance, seed
        self._claimed = chance if claimed is None else claimed
        self.asked: set[int] = set()
        self.forgotten: set[int] = set()
        self.told: list[tuple[int, int]] = []  # drafts that were tried, and how many were right

    def propose(self, question: Question) -> Draft:
        request, token_ids, most, *_ = question
        assert request not in self.forgotten, "the request has ended"
        assert most > 0
        self.asked.add(request)
        state, random = self._request_of(request), Random(f"{self._seed} {request} {len(token_ids)}")
        assert token_ids == state.token_ids
        if random.random() < 0.2:
            return NO_DRAFT
        context = list(token_ids)
        for _ in range(random.randint(1, most)):
            right = next_token(context, state.sampling, len(context) - state.prompt_len)
            context.append(right if random.random() < self._chance else (right + 1) % VOCAB_SIZE)
        return Draft(context[len(token_ids) :], self._claimed)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        assert num_drafted > 0
        self.told.append((num_drafted, num_accepted))

    def forget(self, request: int) -> None:
        assert request not in self.forgotten, "it is forgotten once"
        self.forgotten.add(request)


class SteadyDrafter(LocalDrafter):
    """Guesses the tokens of `fakes.next_token`, each right with the same chance, whenever it is asked.

    Args:
        request_of: a live request by its arrival.
        chance: that a guess is right if all before it were; it claims just that.
    """

    name = "steady"

    def __init__(self, request_of: Callable[[int], RequestState], chance: float, seed: int = 0) -> None:
        self._request_of, self._chance, self._seed = request_of, chance, seed
        self._texts: dict[int, list[int]] = {}  # what each request will have said

    def propose(self, question: Question) -> Draft:
        request, token_ids, most, *_ = question
        state, known = self._request_of(request), len(token_ids)
        text = self._texts.setdefault(request, list(token_ids))
        while len(text) < known + most:
            text.append(next_token(text, state.sampling, len(text) - state.prompt_len))
        assert text[:known] == token_ids, "its tokens are the right ones"
        return Draft(
            [self._guess(request, text, position) for position in range(known, known + most)], self._chance
        )

    def _guess(self, request: int, text: Sequence[int], position: int) -> int:
        is_right = Random(f"{self._seed} {request} {position}").random() < self._chance
        return text[position] if is_right else (text[position] + 1) % VOCAB_SIZE

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)


class SlowDrafter(OwnGuesses):
    """Guesses the tokens of `fakes.next_token`, all right, one after the other as a clock goes on.

    Args:
        request_of: a live request by its arrival.
        clock: that the core has.

    Attributes:
        token_s: that it takes for each token; it says so.
        is_stuck: it guesses nothing more, and goes on promising.
    """

    name = "slow"

    def __init__(self, request_of: Callable[[int], RequestState], clock: Callable[[], float]) -> None:
        self._request_of, self._clock = request_of, clock
        self._asked: dict[int, tuple[int, float]] = {}  # by request: tokens that it had, and when
        self._told: dict[int, int] = {}  # guesses that it was told
        self.token_s = 0.01
        self.is_stuck = False
        self.is_closed = False

    def propose(self, question: Question) -> Draft:
        request, token_ids = question.request, question.token_ids
        if self._asked.get(request, (0, 0.0))[0] != len(token_ids):
            self._asked[request] = len(token_ids), self._clock()
        count = self._told[request] = min(question.most, self._num_guessed(request))
        state, text = self._request_of(request), list(token_ids)
        for _ in range(count):
            text.append(next_token(text, state.sampling, len(text) - state.prompt_len))
        more_s = self.token_s if count < question.most else math.inf
        return Draft(text[len(token_ids) :], 0.95, more_s)

    def _num_guessed(self, request: int) -> int:
        return 0 if self.is_stuck else int((self._clock() - self._asked[request][1] + 1e-9) / self.token_s)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        assert num_drafted == num_accepted

    def forget(self, request: int) -> None:
        self._asked.pop(request, None)

    def poll(self) -> set[int]:
        return {request for request in self._asked if self._num_guessed(request) > self._told[request]}

    def wait_sources(self) -> list[int]:
        return []

    def close(self) -> None:
        self.is_closed = True

"""What a draft model computes: a fake one that is checked for every token and block it is given."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from penstock.batch import GREEDY, KNOWN, LogitChanges, ScheduledBatch
from penstock.drafting.draft_turns import DraftTurns
from penstock.drafting.draft_wire import Ask, Asked, Guess
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool

VOCAB_SIZE = 50


def next_token(context: Sequence[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(context[-7:])) % VOCAB_SIZE


def continued(context: Sequence[int], count: int) -> list[int]:
    text = list(context)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(context) :]


class FakeModel:
    """Reads each token back from the block that it was written to, as attention would."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cache: dict[tuple[int, int], int] = {}  # (block, offset): token
        self._rows: dict[int, list[int]] = {}  # by row: its tokens
        self._blocks: dict[int, list[int]] = {}
        self.plans: list[ScheduledBatch] = []

    def __call__(self, plan: ScheduledBatch) -> list[int]:
        self.plans.append(plan)
        for new in plan.new_rows:
            self._rows[new.row], self._blocks[new.row] = list(new.token_ids), list(new.blocks)
        sampled = []
        for index, row in enumerate(plan.rows):
            assert plan.token_from[index] == KNOWN
            self._blocks[row] += plan.new_blocks[index]
            start, text = plan.start_positions[index], self._rows[row]
            end = start + plan.num_tokens[index]
            for position in range(start, end):
                self._cache[self._place(row, position)] = text[position]
            if plan.need_sampled[index]:
                seen = [self._cache[self._place(row, position)] for position in range(end)]
                assert seen == text[:end], "keys and values are those of the text"
                text.append(next_token(seen))
                sampled.append(text[-1])
        return sampled

    def _place(self, row: int, position: int) -> tuple[int, int]:
        return self._blocks[row][position // self._block_size], position % self._block_size


class Rig:
    """Turns over a fake model, and the core that tells them tokens."""

    def __init__(self, *, num_rows: int = 4, num_blocks: int = 64, max_len: int = 200, max_tokens: int = 32):
        self.model = FakeModel(4)
        self.allocator = BlockAllocator(BlockPool(num_blocks), 4)
        self.turns = DraftTurns(
            self.model,
            self.allocator,
            num_rows=num_rows,
            max_len=max_len,
            max_tokens=max_tokens,
            vocab_size=VOCAB_SIZE,
        )
        self._texts: dict[int, list[int]] = {}

    def tell(self, request: int, token_ids: list[int], wanted: int) -> None:
        text = self._texts.setdefault(request, [])
        first = {"prompt_len": len(token_ids), "sampling": GREEDY} if not text else {}
        self.turns.take(Asked([Ask(request, len(text), token_ids, wanted, **first)]))
        text += token_ids

    def forget(self, request: int) -> None:
        del self._texts[request]
        self.turns.take(Asked(forgotten=[request]))

    def text(self, request: int) -> list[int]:
        return self._texts[request]

    def run(self) -> dict[int, list[int]]:
        """The newest guess of each request, once there is nothing left to do. All guesses are right ones."""
        newest: dict[int, list[int]] = {}
        for _ in range(500):
            if not self.turns.has_work:
                return newest
            guesses, _ = self.turns.turn()
            for request, num_known, token_ids in map(fields_of, guesses):
                text = self._texts[request]
                assert num_known == len(text)
                assert token_ids == continued(text, len(token_ids))
                newest[request] = token_ids
        raise AssertionError("it never comes to an end")


def fields_of(guess: Guess) -> tuple[int, int, list[int]]:
    return guess.request, guess.num_known, guess.token_ids


def test_a_text_is_guessed_on_token_by_token() -> None:
    rig = Rig()
    rig.tell(7, [1, 2, 3, 4, 5], 3)
    assert rig.run() == {7: continued([1, 2, 3, 4, 5], 3)}
    assert [plan.num_tokens for plan in rig.model.plans] == [[5], [1], [1]]


def test_right_guesses_cost_nothing_more() -> None:
    rig = Rig()
    rig.tell(0, [1, 2, 3], 3)
    rig.run()
    rig.tell(0, continued([1, 2, 3], 2), 3)  # two of the three were right, and one is left
    rig.run()
    assert [plan.num_tokens for plan in rig.model.plans] == [[3], [1], [1], [1], [1]]
    assert all(not plan.new_rows for plan in rig.model.plans[1:])


def test_what_follows_a_wrong_guess_is_guessed_anew() -> None:
    rig = Rig()
    rig.tell(0, [1, 2, 3], 4)
    rig.run()
    right, other = continued([1, 2, 3], 2)
    rig.tell(0, [right, (other + 1) % VOCAB_SIZE], 2)
    assert rig.run() == {0: continued(rig.text(0), 2)}
    last = rig.model.plans[-2]
    assert (last.start_positions, last.num_tokens) == ([4], [1])  # `right` was computed before


def test_a_long_text_is_computed_in_pieces_beside_those_who_guess() -> None:
    rig = Rig(max_tokens=8)
    rig.tell(0, [1, 2], 20)
    rig.turns.turn()
    rig.tell(1, list(range(30)), 1)
    rig.run()
    assert [1, 7] in [plan.num_tokens for plan in rig.model.plans]


def test_who_was_asked_about_longest_ago_makes_room() -> None:
    rig = Rig(num_rows=2)
    for request in range(3):
        rig.tell(request, [request, 1, 2], 1)
        rig.run()
    rig.tell(0, continued([0, 1, 2], 1), 1)  # its keys and values are gone
    assert rig.run() == {0: continued(rig.text(0), 1)}
    assert rig.model.plans[-1].num_tokens == [4]


def test_a_text_for_which_there_are_no_blocks_is_left_alone() -> None:
    rig = Rig(num_blocks=3, max_len=200)
    rig.tell(0, list(range(20)), 4)
    assert rig.run() == {}
    rig.tell(1, [1, 2, 3], 4)
    assert rig.run() == {1: continued([1, 2, 3], 4)}
    rig.tell(1, continued([1, 2, 3], 7), 4)  # 12 tokens fit, guesses included
    assert rig.run() == {1: continued(rig.text(1), 1)}


def test_of_a_text_that_is_too_long_it_is_said_that_no_more_comes() -> None:
    rig = Rig(max_len=8)
    rig.tell(0, [1, 2, 3, 4, 5, 6], 4)
    ((guess,), _) = rig.turns.turn()
    assert guess == Guess(0, 6, continued(rig.text(0), 1), is_all=True)
    assert not rig.turns.has_work
    rig.tell(0, [9], 4)
    assert not rig.turns.has_work
    assert rig.turns.take_refused() == [Guess(0, 7, [], is_all=True)]
    assert rig.turns.take_refused() == []
    small = Rig(num_blocks=3, max_len=200)
    small.tell(0, list(range(20)), 4)
    small.run()
    assert small.turns.take_refused() == [Guess(0, 20, [], is_all=True)]


def test_all_is_given_back() -> None:
    rig = Rig()
    for request in range(4):
        rig.tell(request, [request] * 9, 2)
    rig.run()
    for request in range(4):
        rig.forget(request)
    rig.turns.take(Asked(forgotten=[77]))
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks
    assert not rig.turns.has_work


def test_an_id_beyond_the_vocabulary_ends_a_guess() -> None:
    turns = DraftTurns(
        lambda plan: [VOCAB_SIZE + 3],
        BlockAllocator(BlockPool(8), 4),
        num_rows=1,
        max_len=20,
        max_tokens=8,
        vocab_size=VOCAB_SIZE,
    )
    turns.take(Asked([Ask(0, 0, [1, 2], 4, 2, GREEDY)]))
    assert turns.turn() == ([], 2)
    assert not turns.has_work
    assert turns.take_refused() == [Guess(0, 2, [], is_all=True)]


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_tokens_gives_right_guesses(seed: int) -> None:
    """Requests come and go, are guessed well and badly, and have too few rows and blocks."""
    random = Random(seed)
    rig = Rig(
        num_rows=random.randint(1, 4), num_blocks=random.randint(12, 40), max_tokens=random.randint(2, 16)
    )
    live: list[int] = []
    for number in range(120):
        if not live or (len(live) < 6 and random.random() < 0.2):
            live.append(number)
            rig.tell(
                number,
                [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 12))],
                random.randint(0, 5),
            )
        elif random.random() < 0.1:
            rig.forget(live.pop(random.randrange(len(live))))
        else:
            request = random.choice(live)
            said = continued(rig.text(request), random.randint(1, 5))
            if random.random() < 0.5:
                said[-1] = random.randrange(VOCAB_SIZE)
            rig.tell(request, said, random.randint(0, 6))
        for _ in range(random.randint(0, 3)):
            if rig.turns.has_work:
                rig.turns.turn()
    rig.run()


@pytest.mark.parametrize(
    ("token_ids", "changes"),
    [
        ([1, 45], None),
        ([1, 2], LogitChanges(bias={45: 1.0})),
        ([1, 2], LogitChanges(allowed_ids=[3, 45])),
        ([1, 2], LogitChanges(bad_words=[[3, 45]])),
    ],
)
def test_a_text_with_ids_that_this_model_has_not_is_left_alone(
    token_ids: list[int], changes: LogitChanges | None
) -> None:
    turns = DraftTurns(
        lambda plan: [7] * len(plan.rows),
        BlockAllocator(BlockPool(8), 4),
        num_rows=2,
        max_len=20,
        max_tokens=8,
        vocab_size=VOCAB_SIZE,
        own_vocab_size=45,
    )
    sampling = msgspec.structs.replace(GREEDY, changes=changes)
    turns.take(Asked([Ask(0, 0, token_ids, 4, 2, sampling), Ask(1, 0, [1, 44], 1, 2, GREEDY)]))
    assert turns.take_refused() == [Guess(0, 2, [], is_all=True)]
    assert turns.turn() == ([Guess(1, 2, [7])], 2)
    turns.take(Asked([Ask(0, 2, [3], 4)]))
    assert turns.take_refused() == [Guess(0, 3, [], is_all=True)]

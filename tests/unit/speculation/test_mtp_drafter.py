"""The core's side of the MTP layer: what it asks for, and what it makes of the guesses."""

from __future__ import annotations

import pytest

from drafters import asked
from penstock.speculation.drafter import NO_DRAFT
from penstock.speculation.mtp import MTPDrafter


@pytest.fixture
def drafter() -> MTPDrafter:
    return MTPDrafter(0.02)


def test_the_newest_guess_is_the_draft(drafter: MTPDrafter) -> None:
    assert drafter.is_at_tail
    assert drafter.propose(asked([1, 2], 4)) == NO_DRAFT
    drafter.hear(0, 3, [4, 5, 6])
    draft = drafter.propose(asked([1, 2, 3], 4))
    assert list(draft.token_ids) == [4, 5, 6]
    assert draft.chance == pytest.approx(0.7)
    assert list(drafter.propose(asked([1, 2, 3], 2)).token_ids) == [4, 5]


def test_a_guess_is_tried_before_the_next_one_is_taken(drafter: MTPDrafter) -> None:
    drafter.hear(0, 2, [3, 4, 9])
    drafter.propose(asked([1, 2], 4))
    drafter.hear(0, 5, [6])  # behind 3 and 4, which were right, and 5, which was not guessed
    draft = drafter.propose(asked([1, 2, 3, 4, 5], 4))
    assert list(draft.token_ids) == [6]
    chance = 0.7
    for count, is_right in ((5, 1), (6, 1), (7, 0)):
        chance += (is_right - chance) / count
    assert draft.chance == pytest.approx(chance)


def test_a_guess_behind_other_tokens_is_none(drafter: MTPDrafter) -> None:
    drafter.hear(0, 2, [3, 4])
    drafter.propose(asked([1, 2], 4))
    assert drafter.propose(asked([1, 2, 7], 4)) == NO_DRAFT


def test_good_guesses_are_asked_for_in_numbers(drafter: MTPDrafter) -> None:
    assert drafter.wants(asked([1, 2], 8), 1) == 5  # 0.7 to the fifth is 0.17
    assert drafter.wants(asked([1, 2], 2), 1) == 2
    text = [1]
    for token in range(2, 80):
        drafter.hear(0, len(text), [token])
        drafter.propose(asked(text, 8))
        text.append(token)
    drafter.propose(asked(text, 8))
    assert drafter.wants(asked(text, 8), 1) == 8


def test_dear_guesses_are_asked_for_in_smaller_numbers() -> None:
    assert MTPDrafter(0.4).wants(asked([1, 2], 8), 1) == 2  # 0.7 squared is 0.49
    assert MTPDrafter(0.8).wants(asked(list(range(100)), 8, prompt_len=10), 1) is None


def test_a_guess_costs_more_where_all_stages_compute() -> None:
    drafter = MTPDrafter(0.1)
    assert [drafter.wants(asked([1, 2], 8, request=1), num_busy) for num_busy in (1, 4, 8)] == [5, 2, None]


def test_what_is_of_no_use_now_is_not_asked_for(drafter: MTPDrafter) -> None:
    assert drafter.wants(asked(list(range(100)), 8, least_chance=0.9, prompt_len=10), 1) is None


def test_bad_guesses_are_asked_for_in_a_stretch_now_and_then(drafter: MTPDrafter) -> None:
    text = list(range(24))
    for _ in range(40):
        drafter.hear(0, len(text), [999])
        drafter.propose(asked(text, 8))
        text.append(1)
    drafter.propose(asked(text, 8))

    def tried(request: int) -> set[int]:
        questions = {count: asked([1] * (50 + count), 8, request, prompt_len=50) for count in range(600)}
        wanted = {count: drafter.wants(question, 1) for count, question in questions.items()}
        assert set(wanted.values()) == {1, None}
        return {count for count, each in wanted.items() if each == 1}

    later = {*range(256, 280), *range(512, 536)}
    assert tried(0) == tried(8) == later | {*range(24)}
    assert tried(7) == later, "the next request knows of it"


def test_nothing_is_kept_of_a_request_that_has_ended(drafter: MTPDrafter) -> None:
    drafter.hear(0, 2, [3])
    drafter.forget(0)
    drafter.forget(1)  # was never seen
    assert drafter.propose(asked([1, 2], 4)) == NO_DRAFT

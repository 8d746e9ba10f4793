"""The suffix drafter against a search through the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from drafters import asked
from penstock.speculation.drafter import NO_DRAFT
from penstock.speculation.suffix import LENGTHS, MOST_READ, SuffixDrafter


class Oracle:
    """Follows the old text while the new one does, and looks the newest sequences up where it does not."""

    def __init__(self) -> None:
        self.cursor: int | None = None

    def see(self, text: Sequence[int]) -> None:
        """One token has come to the end of the text."""
        if self.cursor is not None and text[self.cursor] == text[-1]:
            self.cursor += 1
            return
        self.cursor = None
        for length in LENGTHS:
            places = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
            if places and len(text) >= length:
                self.cursor = places[-1]
                return


def repeated(piece: Sequence[int], count: int) -> list[int]:
    """What has been said since goes on and on: the old text may reach up to the newest token."""
    return [piece[index % len(piece)] for index in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_what_followed_the_last_time(seed: int) -> None:
    chance = random.Random(seed)
    vocabulary = chance.choice([2, 4, 9])
    drafter, oracle, text = SuffixDrafter(), Oracle(), []
    for _ in range(300):
        text.append(chance.randrange(vocabulary))
        oracle.see(text)
        most = chance.randint(1, 8)
        draft = drafter.propose(asked(text, most, 7))
        expected = [] if oracle.cursor is None else repeated(text[oracle.cursor :], most)
        assert list(draft.token_ids) == expected
        assert 0.0 <= draft.chance <= 1.0


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_that_comes_at_once_is_known_as_well_as_one_that_came_token_by_token(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(5) for _ in range(200)]
    at_once, slowly = SuffixDrafter(), SuffixDrafter()
    for end in range(1, len(text) + 1):
        slowly.propose(asked(text[:end], 4, 1))
    at_once.propose(asked(text, 4, 1))
    assert at_once._texts[1]._ends == slowly._texts[1]._ends
    found = at_once.propose(asked(text, 4, 1)).token_ids
    known = [text[end:] for end in range(min(LENGTHS), len(text))]
    if found:  # what followed one of the places where the text said the same
        assert any(repeated(rest, len(found)) == list(found) for rest in known if rest)


def test_a_repeated_text_is_drafted_with_a_growing_chance() -> None:
    drafter, piece = SuffixDrafter(), list(range(50))
    chances = []
    for end in range(1, 150):
        text = (piece * 3)[:end]
        draft = drafter.propose(asked(text, 5))
        if end > 50:
            assert list(draft.token_ids) == (piece * 4)[end : end + 5]
            chances.append(draft.chance)
    assert chances[0] < 0.5 < 0.9 < chances[-1]


def test_the_chance_falls_where_the_cursor_is_wrong() -> None:
    """Three tokens come again and again, and something else follows each time."""
    drafter, text = SuffixDrafter(), [1, 2, 3, 100]
    drafter.propose(asked(text, 3))
    chances = []
    for other in range(101, 140):
        for token in (1, 2, 3):
            text.append(token)
            draft = drafter.propose(asked(text, 3))
        chances.append(draft.chance)
        text.append(other)
        drafter.propose(asked(text, 3))
    assert chances[-1] < chances[0] / 4


def test_a_guess_from_one_token_is_thought_less_likely_than_one_from_three() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3]
    from_one = SuffixDrafter().propose(asked(text, 2))
    from_three = SuffixDrafter().propose(asked([*text[:-1], 1, 2, 3], 2))
    assert (list(from_one.token_ids), list(from_three.token_ids)) == ([4, 5], [4, 5])
    assert from_one.chance < from_three.chance


def test_a_guess_that_is_too_unlikely_is_not_made() -> None:
    drafter, question = SuffixDrafter(), asked([1, 2, 3, 4, 1, 2, 3], 2)
    chance = drafter.propose(question).chance
    assert drafter.propose(question._replace(least_chance=chance)).token_ids
    assert drafter.propose(question._replace(least_chance=chance + 0.01)) is NO_DRAFT


def test_what_others_taught_is_where_a_new_request_begins() -> None:
    drafter, piece = SuffixDrafter(), list(range(30))
    for end in range(1, 200):
        drafter.propose(asked((piece * 8)[:end], 2))
    text = [*piece, *piece[:3]]
    fresh = SuffixDrafter().propose(asked(text, 2, 1))
    assert drafter.propose(asked(text, 2, 1)).token_ids == fresh.token_ids
    assert drafter._texts[1].chances[3] > SuffixDrafter()._chances[3]


def test_a_long_prompt_is_read_in_parts() -> None:
    drafter = SuffixDrafter()
    text = [*range(MOST_READ + 5), 1, 2, 3]
    assert drafter.propose(asked(text, 2)) is NO_DRAFT
    assert list(drafter.propose(asked(text, 2)).token_ids) == [4, 5]


def test_a_request_that_has_ended_is_forgotten() -> None:
    drafter = SuffixDrafter()
    drafter.propose(asked([1, 2, 3, 4, 1, 2, 3], 2))
    drafter.forget(0)
    drafter.forget(1)
    assert not drafter._texts
    assert not drafter.propose(asked([1, 2, 3], 2)).token_ids

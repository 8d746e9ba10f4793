"""What every drafter promises, on texts that repeat themselves and on noise (docs/adding-a-drafter.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from drafters import IN_SERVICE, asked
from fakes import FakeClock
from penstock.speculation.drafter import Drafter, Question
from penstock.speculation.guard import GuardedDrafter

VOCAB_SIZE = 300
MOST = 6


@pytest.fixture(params=IN_SERVICE)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return IN_SERVICE[request.param]()


def texts(seed: int) -> list[list[int]]:
    """Noise, a text that says the same again and again, and one that does so with faults."""
    random = Random(seed)
    piece = [random.randrange(VOCAB_SIZE) for _ in range(23)]
    noise = [random.randrange(VOCAB_SIZE) for _ in range(200)]
    again = piece * 9
    faulty = [random.randrange(VOCAB_SIZE) if random.random() < 0.2 else token for token in again]
    return [noise, again, faulty]


def growing(request: int, text: Sequence[int], seed: int) -> Iterator[Question]:
    """Questions about a text that grows by some tokens at a time, from a prompt on."""
    random, known = Random(seed), 40
    while known < len(text):
        yield asked(text[:known], random.randint(1, MOST), request, prompt_len=40)
        known += random.randint(1, 7)


@pytest.mark.parametrize("seed", range(4))
def test_guesses_are_token_ids_no_more_than_asked_with_a_chance(
    drafter: Drafter, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests take turns; the guard around the drafter in service finds nothing."""
    guarded = GuardedDrafter(drafter, VOCAB_SIZE, FakeClock())
    turns = [growing(request, text, seed) for request, text in enumerate(texts(seed))]
    with caplog.at_level(logging.WARNING):
        for questions in zip(*turns, strict=False):
            for question in questions:
                draft = guarded.propose(question)
                guarded.accept(question.request, len(draft.token_ids), 0)
                guarded.hear(question.request, len(question.token_ids), [1, 2])
    assert not caplog.records


@pytest.mark.parametrize("seed", range(4))
def test_the_chance_is_about_how_often_the_first_guess_is_right(drafter: Drafter, seed: int) -> None:
    claimed, right = [], []
    for request, text in enumerate(texts(seed)):
        for question in growing(request, text, seed):
            draft = drafter.propose(question)
            if draft.token_ids:
                claimed.append(draft.chance)
                right.append(draft.token_ids[0] == text[len(question.token_ids)])
    if claimed:
        assert abs(sum(claimed) - sum(right)) < 0.2 * len(claimed)


def test_what_it_kept_of_a_request_goes_with_it(drafter: Drafter) -> None:
    for request, text in enumerate(texts(5)):
        for question in growing(request, text, 5):
            drafter.propose(question)
            drafter.hear(request, len(question.token_ids), [3])
    for request in (0, 1, 2, 7):  # of the last one it has never heard
        drafter.forget(request)
    kept = [value for value in vars(drafter).values() if isinstance(value, dict | set)]
    assert not any(request in value for value in kept for request in range(3))


def test_the_text_of_a_question_is_not_changed(drafter: Drafter) -> None:
    _, again, _ = texts(6)
    known = list(again)
    drafter.propose(asked(known, MOST))
    assert known == again

"""A drafter that misbehaves is switched off with one line, and nobody is touched."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from drafters import asked
from fakes import CoreRig, FakeClock
from penstock.scheduler.queues import RequestState
from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question
from penstock.speculation.guard import LONGEST_CALL_S, GuardedDrafter


class Drafting(LocalDrafter):
    """Behaves as it is told."""

    name = "drafting"

    def __init__(self, propose: Callable[[int], Draft]) -> None:
        self._propose = propose
        self.num_calls = 0
        self.forgets = 0

    def propose(self, question: Question) -> Draft:
        self.num_calls += 1
        return self._propose(question.most)

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        self.num_calls += 1

    def forget(self, request: int) -> None:
        self.forgets += 1


def fails(most: int) -> Draft:
    raise ZeroDivisionError("by zero")


BAD: dict[str, tuple[Callable[[int], Draft], str]] = {
    "fails": (fails, "ZeroDivisionError: by zero"),
    "guesses beyond the vocabulary": (
        lambda most: Draft([3, 40], 0.5),
        "[3, 40], not all of which are token ids",
    ),
    "guesses below it": (lambda most: Draft([-1], 0.5), "[-1], not all of which are token ids"),
    "guesses too many": (lambda most: Draft([1] * (most + 1), 0.5), "tokens at 0.5"),
    "is too sure": (lambda most: Draft([1], 1.5), "1 of 4 tokens at 1.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_misbehaves_is_switched_off_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    propose, why = BAD[case]
    drafter = Drafting(propose)
    guarded = GuardedDrafter(drafter, 40, FakeClock())
    with caplog.at_level(logging.WARNING):
        assert guarded.propose(asked([1, 2], 4)) is NO_DRAFT
        assert guarded.propose(asked([1, 2], 4, 1)) is NO_DRAFT
        guarded.accept(0, 1, 0)
        guarded.forget(0)
    assert drafter.num_calls == 1
    assert len(caplog.records) == 1
    assert "'drafting' is switched off" in caplog.text
    assert why in caplog.text


def test_one_that_fails_and_cannot_be_closed_is_switched_off_too(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Drafting):
        def close(self) -> None:
            raise RuntimeError("can't start new thread")

    guarded = GuardedDrafter(Stuck(fails), 40, FakeClock())
    with caplog.at_level(logging.WARNING):
        assert guarded.propose(asked([1, 2], 4)) is NO_DRAFT
    assert 'could not be closed: RuntimeError("can\'t start new thread")' in caplog.text
    assert "is switched off" in caplog.text
    guarded.close()


def test_a_call_that_takes_too_long_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()

    def slow(most: int) -> Draft:
        clock.advance(LONGEST_CALL_S * 2)
        return Draft([1], 0.5)

    drafter = Drafting(slow)
    guarded = GuardedDrafter(drafter, 40, clock)
    assert guarded.propose(asked([1], 4)) is NO_DRAFT
    assert guarded.propose(asked([1], 4)) is NO_DRAFT
    assert drafter.num_calls == 1
    assert "a call took 1.0 s" in caplog.text


def test_a_good_drafter_is_handed_on() -> None:
    drafter = Drafting(lambda most: Draft([1] * most, 0.5))
    guarded = GuardedDrafter(drafter, 40, FakeClock())
    assert guarded.name == "drafting"
    assert list(guarded.propose(asked([1], 3)).token_ids) == [1, 1, 1]
    guarded.accept(0, 3, 1)
    guarded.forget(0)
    assert (drafter.num_calls, drafter.forgets) == (2, 1)


@pytest.mark.parametrize("case", BAD)
def test_no_request_notices(case: str) -> None:
    def guarded(request_of: Callable[[int], RequestState]) -> GuardedDrafter:
        return GuardedDrafter(Drafting(BAD[case][0]), 40, FakeClock())

    rig = CoreRig(drafter=guarded, eos_token_ids=())
    for number in range(3):
        rig.add(f"r{number}", 3, max_tokens=9)
    rig.run_until_idle()
    for number in range(3):
        assert rig.result(f"r{number}") == rig.expected(f"r{number}", number)


class Promising(Drafting):
    """More will come, it says; and then it fails."""

    def poll(self) -> set[int]:
        raise RuntimeError("it has ended")


def test_who_was_promised_more_hears_that_nothing_will_come() -> None:
    guarded = GuardedDrafter(Promising(lambda most: Draft([1], 0.5, 0.01)), 40, FakeClock())
    for request in range(3):
        guarded.propose(asked([1], 3, request))
    guarded.forget(1)
    assert set(guarded.poll()) == {0, 2}
    assert set(guarded.poll()) == set()
    assert guarded.propose(asked([1], 3)) is NO_DRAFT

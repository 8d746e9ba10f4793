"""Clocks of other hosts, estimated over ways that are slow, lopsided and changing."""

from __future__ import annotations

import random

import pytest

from penstock.trace.host_clock import DRIFT, ClockAnswer, ClockEstimate

SECOND = 1_000_000_000


class FarClock:
    """A host whose clock shows something else, and a way to it.

    Args:
        ahead_ns: of the own clock, at the own instant 0.
        drift: share by which it runs faster.
    """

    def __init__(self, ahead_ns: int, drift: float = 0.0) -> None:
        self.ahead_ns, self.drift = ahead_ns, drift

    def shows(self, own_ns: int) -> int:
        return round(own_ns * (1 + self.drift)) + self.ahead_ns

    def answer(self, asked_ns: int, there_ns: int, back_ns: int, held_ns: int = 0) -> ClockAnswer:
        """What is seen of a question that takes so long there, and whose answer so long back."""
        heard_ns = asked_ns + there_ns
        replied_ns = heard_ns + held_ns
        return ClockAnswer(asked_ns, self.shows(heard_ns), self.shows(replied_ns), replied_ns + back_ns)

    def true_offset_ns(self, own_ns: int) -> int:
        return own_ns - self.shows(own_ns)


def offset_and_error(estimate: ClockEstimate, now_ns: int) -> tuple[int, int]:
    best = estimate.best()
    assert best is not None
    return best.offset_ns, best.error_at_ns(now_ns)


@pytest.mark.parametrize("ahead_ns", [0, 77 * SECOND, -(10**15)])
@pytest.mark.parametrize("held_ns", [0, 5_000_000])
def test_with_equal_ways_it_is_exact_however_long_it_was_held(ahead_ns: int, held_ns: int) -> None:
    answer = FarClock(ahead_ns).answer(10 * SECOND, 400_000, 400_000, held_ns)
    assert answer.is_possible
    assert abs(answer.offset_ns + ahead_ns) <= 1
    assert answer.error_ns == 400_001


@pytest.mark.parametrize(("there_ns", "back_ns"), [(0, 900_000), (900_000, 0), (100_000, 800_000)])
def test_however_a_round_trip_is_divided_the_truth_is_within_the_bound(there_ns: int, back_ns: int) -> None:
    far = FarClock(3 * SECOND)
    answer = far.answer(SECOND, there_ns, back_ns)
    assert abs(answer.offset_ns - far.true_offset_ns(SECOND)) <= answer.error_ns == 450_001


def test_the_shortest_round_trip_wins() -> None:
    estimate, far = ClockEstimate(), FarClock(-5 * SECOND)
    for asked_ns, way_ns in ((0, 3_000_000), (SECOND, 50_000), (2 * SECOND, 9_000_000)):
        estimate.add(far.answer(asked_ns, way_ns, 2 * way_ns))
    offset_ns, error_ns = offset_and_error(estimate, 2 * SECOND)
    assert error_ns < 75_001 + 1.01 * DRIFT * SECOND
    assert abs(offset_ns - far.true_offset_ns(0)) <= error_ns


def test_it_follows_a_drift_and_stays_within_its_bound() -> None:
    """Seeded jitter on both ways, and crystals as unlike as they may be, for ten minutes."""
    jitter = random.Random(26)
    estimate, far = ClockEstimate(), FarClock(123 * SECOND, drift=0.99 * DRIFT)
    for asked_ns in range(0, 600 * SECOND, SECOND):
        ways = [round(100_000 + jitter.expovariate(1 / 2e6)) for _ in range(2)]
        estimate.add(far.answer(asked_ns, *ways))
        now_ns = asked_ns + SECOND
        offset_ns, error_ns = offset_and_error(estimate, now_ns)
        assert abs(offset_ns - far.true_offset_ns(now_ns)) <= error_ns
        assert error_ns < 20_000_000
    drifted_ns = abs(far.true_offset_ns(600 * SECOND) - far.true_offset_ns(0))
    assert drifted_ns > 10 * error_ns, "it would be far off by now, had it not followed"


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    estimate, far = ClockEstimate(), FarClock(SECOND)
    estimate.add(far.answer(0, 1000, 1000))
    far.ahead_ns -= 40_000_000  # the host has slept, and its clock stood still
    estimate.add(far.answer(SECOND, 3_000_000, 1_000_000))
    offset_ns, error_ns = offset_and_error(estimate, SECOND)
    assert abs(offset_ns - far.true_offset_ns(SECOND)) <= error_ns


@pytest.mark.parametrize(
    "answer",
    [
        ClockAnswer(100, 500, 400, 200),  # it has replied before it has heard
        ClockAnswer(100, 500, 700, 200),  # it has held the question for longer than everything took
    ],
)
def test_what_cannot_be_is_left_out(answer: ClockAnswer) -> None:
    estimate = ClockEstimate()
    estimate.add(answer)
    assert estimate.best() is None


def test_what_follows_from_something_else_is_shown_behind_it_within_the_bound() -> None:
    """Frames go there and back between two hosts for a minute; the far one begins anew in the midst."""
    chance = random.Random(9)
    estimate, far = ClockEstimate(), FarClock(-9 * SECOND, drift=-0.5 * DRIFT)
    for asked_ns in range(0, 60 * SECOND, SECOND):
        if asked_ns == 30 * SECOND:
            far.ahead_ns += 1000 * SECOND
        estimate.add(far.answer(asked_ns, chance.randrange(10**6), chance.randrange(10**6)))
        offset_ns, error_ns = offset_and_error(estimate, asked_ns + SECOND)
        sent_ns = asked_ns + 500_000_000
        for way_ns in (0, chance.randrange(10**6)):
            received_ns = far.shows(sent_ns + way_ns) + offset_ns
            returned_ns = sent_ns + 2 * way_ns
            assert sent_ns - error_ns <= received_ns <= returned_ns + error_ns

"""When chunks of bulk channels may go, by a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.errors import WaitTimeoutError
from penstock.pipeline.bulk.turns import LOOK_S, ByteRate, NoRateLimit, Turns

LONG_S = 1e6


@dataclass
class PausedClock:
    """Time passes while somebody pauses, and at no other time."""

    now: float = 100.0
    pauses: list[float] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.meanwhile()


@dataclass
class PlayedLink:
    """A link whose frames a test sends."""

    is_sending: bool = False


def test_g1_bytes_a_second_hold_over_any_time_and_a_burst_at_its_begin() -> None:
    clock = PausedClock()
    turns = Turns([], ByteRate(1000.0, 500, clock), clock=clock, pause=clock.pause)
    sent_at: list[float] = []
    for _ in range(50):
        turns.await_turn(100, LONG_S)
        sent_at.append(clock.now - 100.0)
    assert sent_at[:5] == [0.0] * 5, "the burst"
    assert sent_at[5:] == pytest.approx([0.1 * number for number in range(1, 46)])


def test_g1_what_was_not_sent_in_a_pause_is_not_made_up_for_beyond_the_burst() -> None:
    clock = PausedClock()
    rate = ByteRate(1000.0, 500, clock)
    clock.now += 3600.0
    assert [rate.take(250) for _ in range(2)] == [0.0, 0.0]
    assert rate.take(250) == pytest.approx(0.25)


def test_g1_a_chunk_longer_than_the_burst_goes_and_those_behind_it_pay() -> None:
    clock = PausedClock()
    rate = ByteRate(1000.0, 100, clock)
    assert rate.take(1000) == 0.0
    assert rate.take(1) == pytest.approx(0.901)
    clock.now += 0.901
    assert rate.take(1) == 0.0


def test_g1_no_chunk_has_its_turn_while_any_link_sends() -> None:
    clock, first, second = PausedClock(), PlayedLink(), PlayedLink(is_sending=True)

    def look() -> None:
        if len(clock.pauses) == 3:
            first.is_sending, second.is_sending = True, False
        if len(clock.pauses) == 5:
            first.is_sending = False

    clock.meanwhile = look
    Turns([first, second], NoRateLimit(), clock=clock, pause=clock.pause).await_turn(1, LONG_S)
    assert clock.pauses == [LOOK_S] * 5


def test_g1_a_link_that_sends_while_the_rate_is_waited_for_goes_first() -> None:
    """And the right to send that had been earned meanwhile is kept, not spent."""
    clock, link = PausedClock(), PlayedLink()
    rate = ByteRate(1000.0, 10, clock)
    rate.take(10)

    def look() -> None:
        link.is_sending = len(clock.pauses) == 1

    clock.meanwhile = look
    Turns([link], rate, clock=clock, pause=clock.pause).await_turn(10, LONG_S)
    assert clock.pauses == [pytest.approx(0.01), LOOK_S]


def test_g1_a_chunk_that_gets_no_turn_says_so() -> None:
    clock = PausedClock()
    turns = Turns([PlayedLink(is_sending=True)], clock=clock, pause=clock.pause)
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for its turn") as caught:
        turns.await_turn(10, 0.5)
    assert caught.value.remedy
    assert clock.now == pytest.approx(100.5, abs=2 * LOOK_S)

"""Which epoch it is and who counts as lost, by numbers alone."""

from __future__ import annotations

import pytest

from penstock.engine.supervisor.losses import CORE, LONG_LOOK_S, MAX_LOSSES, MAX_RETRY_S, Heartbeats, Losses
from penstock.errors import ErrorInfo

CAUSE = ErrorInfo(kind="LinkClosedError", message="stage 0 has gone.")


@pytest.fixture
def losses() -> Losses:
    return Losses(leave_s=60.0)


@pytest.fixture
def heartbeats() -> Heartbeats[int]:
    return Heartbeats(limit_s=5.0)


def test_the_next_epoch_begins_at_once_and_later_with_growing_pauses(losses: Losses) -> None:
    pauses = []
    for _ in range(MAX_LOSSES + 8):
        pauses.append(losses.end({1}, 100.0))
        assert losses.is_due(100.0 + pauses[-1])
        assert losses.is_due(100.0) == (pauses[-1] == 0.0)
        assert losses.begin() == [1]
        assert not losses.is_due(1e9)
    assert pauses == [0.0] * MAX_LOSSES + [2.0, 4.0, 8.0, 16.0, 32.0, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]
    assert losses.epoch == MAX_LOSSES + 8
    assert losses.is_repeated


def test_a_step_that_crosses_ends_the_count_and_tells_the_time_since_the_first(losses: Losses) -> None:
    for second in (10.0, 12.0, 14.0, 16.0):
        losses.end({0}, second)
        losses.begin()
    assert losses.recovered(21.0) == 11.0
    assert not losses.is_repeated
    assert losses.end({0}, 50.0) == 0.0


def test_members_that_are_lost_one_after_the_other_start_together(losses: Losses) -> None:
    losses.end({2}, 0.0)
    losses.end({0, CORE}, 0.0)
    assert losses.begin() == [CORE, 0, 2]


def test_r15_members_that_are_lost_before_the_next_epoch_belong_to_the_same_loss(losses: Losses) -> None:
    """Else two hosts that are killed would count as four losses, after which running requests end."""
    for _ in range(MAX_LOSSES):
        assert losses.end(set(), 0.0) == 0.0
        assert losses.end({1}, 3.0) == 0.0
        assert losses.begin() == [1]
    assert not losses.is_repeated
    assert losses.end(set(), 10.0) == 2.0
    assert losses.end({1}, 11.0) == 1.0, "what is left of the pause"
    assert losses.is_repeated


def test_r15_members_that_are_ended_for_another_place_start_with_those_that_are_lost(losses: Losses) -> None:
    losses.end({2}, 0.0)
    losses.give_up({0, 1})
    assert losses.begin() == [0, 1, 2]
    assert losses.hung({0, 1, 2}, 1e9) == set(), "none of them was in the epoch that is over"


def test_only_who_leaves_the_present_epoch_ends_it(losses: Losses) -> None:
    losses.leave(0, CAUSE, 1)
    assert losses.causes == [CAUSE]
    losses.end(set(), 0.0)
    losses.leave(0, CAUSE, 0)
    assert losses.causes == [], "it is over already"
    losses.begin()
    losses.leave(0, CAUSE, CORE)
    assert losses.causes == [], "late news of the epoch before"
    losses.leave(1, CAUSE, CORE)
    assert losses.causes == [CAUSE]


def test_r2_who_says_nothing_for_longer_than_the_limit_is_silent(heartbeats: Heartbeats[int]) -> None:
    assert heartbeats.silent({0: 10.0}, 10.0) == {}
    assert heartbeats.silent({0: 10.0, 1: 4.9}, 11.0) == {1: 6.1}


def test_r2_the_supervisor_wakes_up_when_a_silence_becomes_too_long(heartbeats: Heartbeats[int]) -> None:
    """Else it would find out at its next look, up to a second later."""
    assert heartbeats.due_in(0.0) > 1e9, "nobody is known"
    heartbeats.silent({0: 10.0, 1: 9.4}, 10.0)
    due_s = heartbeats.due_in(10.0)
    assert 4.4 < due_s < 4.41
    for second in (11.5, 13.0, 14.3):
        assert heartbeats.silent({0: 13.0, 1: 9.4}, second) == {}
    assert heartbeats.silent({0: 13.0, 1: 9.4}, 10.0 + due_s).keys() == {1}
    assert 3.5 < heartbeats.due_in(10.0 + due_s) < 3.7, "who is silent is dealt with, and the others count"
    assert heartbeats.due_in(99.0) < 0.01


def test_who_could_not_be_heard_is_not_silent(heartbeats: Heartbeats[int]) -> None:
    heartbeats.silent({}, 0.0)
    assert heartbeats.silent({0: 0.0}, 2 * LONG_LOOK_S + 5.0) == {}, "it was the supervisor that slept"
    assert heartbeats.silent({0: 0.0}, 2 * LONG_LOOK_S + 5.1) == {}, "nor has anybody had time to speak since"
    for second in range(1, 6):
        assert heartbeats.silent({0: 0.0}, 2 * LONG_LOOK_S + 5.0 + second) == {}
    assert heartbeats.silent({0: 0.0}, 2 * LONG_LOOK_S + 11.0) == {0: 6.0}


def test_r2_who_loads_may_be_silent_for_longer_but_not_for_ever(heartbeats: Heartbeats[int]) -> None:
    for second in range(61):
        assert heartbeats.silent({0: 0.0}, float(second), loading={0}) == {}
    assert heartbeats.silent({0: 0.0}, 61.0, loading={0}) == {0: 61.0}


def test_g1_silence_of_a_process_elsewhere_begins_when_its_host_is_back(heartbeats: Heartbeats[int]) -> None:
    for second in range(10):
        assert heartbeats.silent({0: 0.0}, float(second), elsewhere={0}, away={0}) == {}
    for second in range(10, 15):
        assert heartbeats.silent({0: 0.0}, float(second), elsewhere={0}) == {}
    assert heartbeats.silent({0: 0.0}, 15.0, elsewhere={0}) == {0: 6.0}


def test_g1_a_short_limit_leaves_a_host_time_to_be_found_away() -> None:
    """A host counts as away after 3 s of silence or a little later. Its processes are not silent before."""
    heartbeats: Heartbeats[int] = Heartbeats(limit_s=2.0)
    silent = [heartbeats.silent({0: 0.0, 1: 0.0}, float(second), elsewhere={1}) for second in range(7)]
    assert silent == [{}, {}, {}, {0: 3.0}, {0: 4.0}, {0: 5.0}, {0: 6.0, 1: 6.0}]


def test_who_does_not_leave_an_epoch_that_is_over_hangs(losses: Losses) -> None:
    losses.end({2}, 0.0)
    losses.begin()
    losses.leave(0, CAUSE, 1)
    assert losses.hung({0, 1, 2}, 59.0) == set()
    assert losses.hung({0, 1, 2}, 60.0) == {0}, "1 has left, 2 has been started again"
    assert losses.hung({0, 1, 2}, 61.0) == set(), "told once"


def test_r2_who_finds_the_loss_says_how_long_others_may_take_to_leave(losses: Losses) -> None:
    losses.leave(0, CAUSE, CORE, leave_s=5.0)
    losses.leave(0, CAUSE, 0)
    losses.end(set(), 100.0)
    losses.begin()
    assert losses.hung({0, 1}, 104.9) == set()
    assert losses.hung({0, 1}, 105.0) == {1}
    losses.leave(1, CAUSE, 0)
    losses.end(set(), 200.0)
    assert losses.hung({1}, 259.0) == set(), "of another epoch it may be otherwise"
    assert losses.hung({1}, 260.0) == {1}


def test_g1_a_member_whose_host_is_away_may_leave_as_long_again_when_the_host_is_back(losses: Losses) -> None:
    losses.leave(0, CAUSE, CORE, leave_s=2.0)
    losses.end(set(), 100.0)
    losses.begin()
    assert losses.hung({0, 1}, 101.0, away={1}) == set()
    assert losses.hung({0, 1}, 102.0, away={1}) == {0}
    assert losses.hung({0, 1}, 104.0, away={1}) == set()
    assert losses.hung({0, 1}, 105.9) == set()
    assert losses.hung({0, 1}, 106.0) == {1}
    assert losses.hung({0, 1}, 107.0) == set(), "each is told once"


def test_g1_a_member_that_has_left_while_its_host_was_away_is_well(losses: Losses) -> None:
    losses.end(set(), 0.0)
    losses.begin()
    assert losses.hung({1}, 61.0, away={1}) == set()
    losses.leave(0, CAUSE, 1)
    assert losses.hung({1}, 1e9) == set()

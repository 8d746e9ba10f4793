"""Which hosts the next epoch is laid over, and who is waited for: names and seconds only."""

from __future__ import annotations

from penstock.engine.supervisor.host_choice import RETURN_S, HostChoice

TOWER, DESK, SHELF = "tower", "desk", "shelf"
LIMIT_S = 30.0


def choice(*names: str) -> HostChoice:
    return HostChoice(names or (TOWER, DESK, SHELF), LIMIT_S)


def test_r15_a_lost_host_is_waited_for_as_long_as_it_has() -> None:
    hosts = choice()
    hosts.look([TOWER, DESK, SHELF], 0.0)
    hosts.look([TOWER, SHELF], 5.0)
    assert hosts.next_hosts([TOWER, SHELF], 34.0) == ()
    assert hosts.missing == (DESK,)
    assert hosts.next_hosts([TOWER, SHELF], 35.0) == (TOWER, SHELF)


def test_r15_a_host_that_is_back_in_time_is_part_of_the_pipeline_as_before() -> None:
    hosts = choice()
    assert hosts.next_hosts([TOWER, SHELF], 0.0) == ()
    assert hosts.next_hosts([TOWER, DESK, SHELF], 29.0) == (TOWER, DESK, SHELF)
    assert hosts.next_hosts([TOWER, SHELF], 31.0) == (), "its time begins anew"


def test_r15_each_of_two_lost_hosts_has_its_own_time() -> None:
    hosts = choice()
    hosts.look([TOWER, SHELF], 0.0)
    hosts.look([TOWER], 20.0)
    assert hosts.next_hosts([TOWER], 30.0) == ()
    assert hosts.next_hosts([TOWER], 50.0) == (TOWER,)


def test_r15_a_host_that_is_no_part_of_the_pipeline_is_not_waited_for() -> None:
    hosts = choice()
    hosts.look([TOWER, SHELF], 0.0)
    hosts.lay_over(hosts.next_hosts([TOWER, SHELF], LIMIT_S))
    assert hosts.next_hosts([TOWER, SHELF], 31.0) == (TOWER, SHELF)
    hosts.look([TOWER, DESK, SHELF], 40.0)
    assert hosts.next_hosts([TOWER, SHELF], 41.0) == (TOWER, SHELF), "it came back, and was lost again"
    assert hosts.missing == ()


def test_r15_the_next_epoch_takes_in_a_host_that_came_back() -> None:
    hosts = choice()
    hosts.look([TOWER, SHELF], 0.0)
    hosts.lay_over([TOWER, SHELF])
    assert hosts.next_hosts([TOWER, DESK, SHELF], 60.0) == (TOWER, DESK, SHELF)


def test_r15_another_host_takes_the_place_of_one_that_is_not_back_at_once() -> None:
    """What has lost its connection alone is back in less, and has its weights."""
    hosts = choice(TOWER, DESK)
    assert hosts.next_hosts([TOWER], 0.0) == ()
    assert hosts.next_hosts([TOWER, SHELF], RETURN_S - 0.1) == ()
    assert hosts.next_hosts([TOWER, DESK, SHELF], RETURN_S - 0.1) == (TOWER, DESK)
    assert hosts.next_hosts([TOWER, SHELF], 10.0) == ()
    assert hosts.next_hosts([TOWER, SHELF], 10.0 + RETURN_S) == (TOWER, SHELF)


def test_r15_of_more_hosts_than_are_to_serve_those_of_the_pipeline_stay() -> None:
    hosts = choice(TOWER, DESK)
    hosts.look([TOWER], 0.0)
    hosts.lay_over([TOWER, SHELF])
    assert hosts.next_hosts([TOWER, DESK, SHELF], 5.0) == (TOWER, SHELF)
    assert hosts.next_hosts([TOWER, DESK], 6.0) == ()
    assert hosts.next_hosts([TOWER, DESK], 6.0 + RETURN_S) == (TOWER, DESK)


def test_one_host_alone_is_always_there() -> None:
    hosts = choice(TOWER)
    assert hosts.next_hosts([TOWER], 0.0) == (TOWER,)


def test_r15_hosts_of_other_replicas_take_over_only_where_no_other_is_left() -> None:
    hosts = HostChoice([DESK, SHELF], LIMIT_S, of_others=[TOWER])
    assert hosts.next_hosts([TOWER, DESK, SHELF], 0.0) == (DESK, SHELF)
    assert hosts.next_hosts([TOWER, DESK], 0.0) == ()
    assert hosts.next_hosts([TOWER, DESK], RETURN_S) == (), "the other replica's host is no stand-by"
    assert hosts.next_hosts([TOWER, DESK], LIMIT_S) == (DESK,)
    assert hosts.next_hosts([TOWER, DESK, "cellar"], LIMIT_S) == (DESK, "cellar")
    hosts.look([TOWER], LIMIT_S)
    assert hosts.next_hosts([TOWER], 2 * LIMIT_S) == (TOWER,)
    hosts.lay_over([TOWER])
    assert hosts.next_hosts([TOWER, SHELF], 99.0) == (SHELF,), "its own is back"

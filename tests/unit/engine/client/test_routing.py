"""Which replica gets a request."""

from __future__ import annotations

from penstock.engine.client.routing import Load, Router

LONG = list(range(300))
IDLE = {0: Load(0), 1: Load(0)}


def test_i4_the_replica_with_least_to_do_gets_the_next_request() -> None:
    router = Router[int](has_cache=False)
    assert router.order([1], {0: Load(50), 1: Load(10), 2: Load(20)}) == [1, 2, 0]


def test_i4_equal_replicas_take_turns() -> None:
    router = Router[int](has_cache=False)
    found = []
    for _ in range(6):
        best = router.order([1], {0: Load(0), 1: Load(0), 2: Load(0)})[0]
        router.routed([1], best)
        found.append(best)
    assert found == [0, 1, 2, 0, 1, 2]


def test_a_replica_that_is_not_ready_comes_last_whatever_the_others_have_to_do() -> None:
    router = Router[int](has_cache=False)
    assert router.order([1], {0: Load(0, has_room=False), 1: Load(9000)}) == [1, 0]
    assert router.order([1], {0: Load(0, has_room=False), 1: Load(9000, has_room=False)}) == [0, 1]


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_costs_more_than_it_saves() -> None:
    router = Router[int](has_cache=True)
    router.routed(LONG, 1)
    alike = LONG[:200] + [7] * 100  # three chunks of 64 are the same
    assert router.order(alike, IDLE)[0] == 1
    assert router.order(alike, {0: Load(0), 1: Load(191)})[0] == 1
    assert router.order(alike, {0: Load(0), 1: Load(193)})[0] == 0
    assert router.order([7, *LONG], IDLE)[0] == 0, "another beginning, and 1 has had one more"


def test_what_is_not_cached_is_not_looked_for() -> None:
    router = Router[int](has_cache=False)
    router.routed(LONG, 1)
    assert router.order(LONG, IDLE)[0] == 0


def test_a_replica_that_has_ended_is_forgotten_with_its_cache() -> None:
    router = Router[int](has_cache=True)
    router.routed(LONG, 1)
    router.forget_others({0, 1})
    assert router.order(LONG, IDLE)[0] == 1
    router.forget_others({0})
    assert router.order(LONG, IDLE) == [0, 1], "one that comes with its name begins with nothing"

"""What the shaped network of the tests does to packets, with times that the tests give."""

from __future__ import annotations

import math

from packet_paths import Conditions, Direction, Paths, mixed

A, B, C = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2)), bytes((10, 0, 0, 3))
A6 = bytes(15) + b"\x01"


def packet(to: bytes, text: bytes = b"") -> bytes:
    """Return an IP packet of which only version and destination are filled in."""
    return (bytes((0x60,)) + bytes(23) if len(to) == 16 else bytes((0x45,)) + bytes(15)) + to + text


def survivors(seed: int, loss: float, count: int = 500, times: float = 0.0) -> list[int]:
    direction = Direction(seed)
    direction.conditions = Conditions(loss=loss)
    for number in range(count):
        direction.enter(number.to_bytes(2, "big"), number * times)
    return [int.from_bytes(left, "big") for _, left in direction.leave(math.inf)]


def test_numbers_are_those_of_splitmix64() -> None:
    assert mixed(0) == 0xE220A8397B1DCDAF  # the first of the generator with seed 0
    assert mixed(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # and its second


def test_one_seed_loses_the_same_packets_at_any_time() -> None:
    assert survivors(3, 0.25) == survivors(3, 0.25, times=0.7)
    assert survivors(3, 0.25) != survivors(4, 0.25)


def test_the_share_of_lost_packets_is_about_that_asked_for() -> None:
    assert 330 < len(survivors(1, 0.25)) < 420
    assert survivors(1, 1.0) == []
    assert len(survivors(1, 0.0)) == 500


def test_a_packet_waits_for_the_delay_and_at_most_the_jitter_more() -> None:
    direction = Direction(5)
    direction.conditions = Conditions(delay_s=0.05, jitter_s=0.02)
    for number in range(200):
        direction.enter(bytes((number,)), now=number * 1.0)
    waits = [due - number for number, (due, _) in enumerate(direction.leave(math.inf))]
    assert all(0.05 <= wait <= 0.0701 for wait in waits)
    assert max(waits) - min(waits) > 0.015


def test_jitter_and_a_smaller_delay_keep_the_order() -> None:
    direction = Direction(5)
    direction.conditions = Conditions(delay_s=0.05, jitter_s=0.2)
    for number in range(200):
        if number == 100:
            direction.conditions = Conditions()
        direction.enter(bytes((number,)), now=number * 1e-4)
    left = direction.leave(math.inf)
    assert [data[0] for _, data in left] == list(range(200))
    assert [due for due, _ in left] == sorted(due for due, _ in left)


def test_reordering_lets_some_packets_overtake_the_delayed() -> None:
    direction = Direction(5)
    direction.conditions = Conditions(delay_s=1.0, reordering=0.3)
    for number in range(100):
        direction.enter(bytes((number,)), now=0.0)
    early = direction.leave(0.0)
    assert 15 < len(early) < 45
    assert len(direction.leave(1.0)) == 100 - len(early)


def test_nothing_leaves_before_it_is_due() -> None:
    direction = Direction(0)
    assert direction.due() == math.inf
    direction.conditions = Conditions(delay_s=2.0)
    direction.enter(b"x", now=1.0)
    assert direction.due() == 3.0
    assert direction.leave(2.9) == []
    assert direction.leave(3.0) == [(3.0, b"x")]


def test_a_stall_holds_packets_and_loses_none() -> None:
    direction = Direction(0)
    direction.enter(b"x", now=0.0)
    direction.hold(until=1.0)
    direction.enter(b"y", now=0.5)
    assert direction.due() == 1.0
    assert direction.leave(0.9) == []
    assert direction.leave(1.0) == [(1.0, b"x"), (1.0, b"y")]
    assert direction.counts.lost == 0


def test_a_cut_loses_what_is_under_way_and_what_comes() -> None:
    direction = Direction(0)
    direction.enter(b"x", now=0.0)
    direction.cut()
    direction.enter(b"y", now=0.0)
    assert direction.leave(1.0) == []
    assert (direction.counts.came, direction.counts.lost) == (2, 2)
    direction.mend()
    direction.enter(b"z", now=2.0)
    assert direction.leave(2.0) == [(2.0, b"z")]


def test_a_packet_passes_the_link_of_each_of_its_hosts() -> None:
    paths = Paths(0, {A: 0, B: 1, C: 2, A6: 0}, 3)
    paths.links[0].out.conditions = Conditions(delay_s=1.0)
    paths.links[1].into.conditions = Conditions(delay_s=0.5)
    for to in (B, C):
        paths.enter(0, packet(to), now=0.0)
    paths.enter(1, packet(A6), now=0.0)
    assert paths.leave(0.0) == [(0, packet(A6))]
    assert paths.due() == 1.0
    assert paths.leave(1.0) == [(2, packet(C))]
    assert paths.due() == 1.5
    assert paths.leave(1.5) == [(1, packet(B))]
    assert paths.due() == math.inf


def test_a_delay_counts_from_when_a_packet_left_the_first_link_and_not_from_when_somebody_looked() -> None:
    paths = Paths(0, {A: 0, B: 1}, 2)
    paths.links[0].out.conditions = paths.links[1].into.conditions = Conditions(delay_s=1.0)
    paths.enter(0, packet(B), now=0.0)
    assert paths.leave(5.0) == [(1, packet(B))]


def test_a_loss_in_one_direction_is_none_in_the_other() -> None:
    paths = Paths(0, {A: 0, B: 1}, 2)
    for direction in paths.links[1].directions("in"):
        direction.conditions = Conditions(loss=1.0)
    paths.enter(0, packet(B), now=0.0)
    paths.enter(1, packet(A), now=0.0)
    assert paths.leave(0.0) == [(0, packet(A))]


def test_packets_to_nobody_are_not_counted_and_shift_no_decision() -> None:
    paths = Paths(0, {A: 0, B: 1}, 2)
    paths.enter(0, packet(bytes((224, 0, 0, 22))), now=0.0)
    assert paths.links[0].out.counts.came == 0
    assert paths.due() == math.inf


def test_links_lose_different_packets() -> None:
    paths = Paths(9, {A: 0, B: 1}, 2)
    lost = []
    for direction in (*paths.links[0].directions("both"), *paths.links[1].directions("both")):
        direction.conditions = Conditions(loss=0.5)
        for number in range(64):
            direction.enter(bytes((number,)), now=0.0)
        lost.append(bytes(left[0] for _, left in direction.leave(0.0)))
    assert len(set(lost)) == 4

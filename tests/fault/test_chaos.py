"""A server of which something is always being broken, for a while (R1 to R8), by `tests/support/chaos.py`."""

from __future__ import annotations

import random

import pytest

import chaos


@pytest.mark.soak
def test_r1_r4_r6_r8_half_a_minute_of_chaos() -> None:
    found = chaos.run(seed=20261122, seconds=30.0)
    assert found.ledger.outcomes["complete"] > 20
    assert sum(found.done.values()) > 4


@pytest.mark.soak
@pytest.mark.parametrize("seed", [20261122, 20261123])
def test_r1_r4_r6_r8_two_minutes_of_chaos(seed: int) -> None:
    found = chaos.run(seed=seed, seconds=60.0)
    assert found.ledger.outcomes["complete"] > 20
    assert sum(found.done.values()) > 4


@pytest.mark.soak
def test_r1_r4_r6_r8_half_an_hour_of_chaos() -> None:
    found = chaos.run(seed=7, seconds=1800.0)
    assert found.ledger.outcomes["complete"] > 500
    assert sum(found.done.values()) > 150


def test_the_ledger_sees_what_is_wrong() -> None:
    request = next(chaos.all_requests()) | {"max_tokens": 3}
    ledger = chaos.Ledger()
    ledger.golden[chaos.key_of(request)] = [1, 2, 3, 4]
    for ids, outcome in (([1, 2, 3], "complete"), ([1], "cut"), ([], "refused"), ([1, 2], "error")):
        ledger.close(chaos.Attempt(request, ids, outcome))
    assert not ledger.faults
    for ids, outcome in (
        ([1, 2], "complete"),
        ([1, 3], "cut"),
        ([1, 2, 3, 4], "complete"),
        ([1, 2, 3], "hangs"),
        ([], "wrong error"),
        ([], "rejected"),
    ):
        ledger.close(chaos.Attempt(request, ids, outcome))
    assert len(ledger.faults) == 6


def test_a_seed_says_what_is_done() -> None:
    def first(seed: int) -> list[chaos.Blow]:
        source = chaos.blows(seed)
        return [next(source) for _ in range(50)]

    assert first(3) == first(3)
    assert first(3) != first(4)
    assert {blow.kind for blow in first(3)} == set(chaos.BLOWS)
    assert chaos.random_request(random.Random(1)) == chaos.random_request(random.Random(1))

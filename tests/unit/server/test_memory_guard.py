"""New work is refused while the host is short of memory."""

from __future__ import annotations

import pytest

from fakes import FakeClock
from penstock.errors import UnavailableError
from penstock.server.http.memory_guard import MemoryGuard

MIB = 1 << 20


def test_it_refuses_from_the_bound_on_and_looks_once_a_second() -> None:
    clock, free, looks = FakeClock(), [200 * MIB], []

    def available() -> int:
        looks.append(clock())
        return free[0]

    guard = MemoryGuard(128 * MIB, clock, available)
    guard.refuse_new()
    free[0] = 128 * MIB - 1
    clock.advance(0.9)
    guard.refuse_new()
    clock.advance(0.1)
    with pytest.raises(UnavailableError, match="127 MiB of free memory, less than 128 MiB") as no:
        guard.refuse_new()
    assert no.value.code == "low_memory"
    free[0] = 128 * MIB
    assert guard.shortage
    clock.advance(1.0)
    assert not guard.shortage
    assert len(looks) == 3


def test_zero_refuses_nothing_and_does_not_look() -> None:
    def available() -> int:
        pytest.fail("it has looked")

    assert MemoryGuard(0, FakeClock(), available).shortage == ""


def test_a_host_that_does_not_say_is_no_reason_to_refuse() -> None:
    def available() -> int:
        raise OSError("no /proc")

    assert MemoryGuard(1, FakeClock(), available).shortage == ""

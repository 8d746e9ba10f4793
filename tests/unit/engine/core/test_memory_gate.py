"""F9: on a host that is short of memory no waiting request starts, and whoever runs goes on."""

from __future__ import annotations

import logging

import pytest

from fakes import CoreRig, FakeClock
from penstock.batch import StageTimes
from penstock.config.engine import SchedulerConfig
from penstock.engine.core.memory_gate import LOOK_S, MemoryGate, memory_gate
from penstock.scheduler.start_order import ALWAYS_OPEN
from penstock.trace.phases import Phase

MIB = 1 << 20


class Host:
    """Says how much memory is free, or that it does not know."""

    def __init__(self, free: int | None = 1000 * MIB) -> None:
        self.free = free
        self.num_looks = 0

    def __call__(self) -> int:
        self.num_looks += 1
        if self.free is None:
            raise OSError("no meminfo")
        return self.free


def made(clock: FakeClock, host: Host) -> MemoryGate:
    gate = memory_gate(100 * MIB, clock, host)
    assert gate is not None
    return gate


def told(stage: int, free_bytes: int | None) -> StageTimes:
    return StageTimes(
        stage=stage,
        num_steps=0,
        wall_ns=0,
        busy_ns=0,
        phase_ns=[0] * len(Phase),
        busy_ratio=0.0,
        free_bytes=free_bytes,
    )


def test_f9_the_gate_shuts_below_the_limit_and_opens_a_quarter_above(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, clock = Host(), FakeClock()
    gate = made(clock, host)
    seen = []
    with caplog.at_level(logging.WARNING):
        for free in (100, 99, 50, 100, 124, 125, 110):
            host.free = free * MIB
            seen.append(gate.is_open())
            clock.advance(LOOK_S)
    assert seen == [True, False, False, False, False, True, True]
    first, last = (record.getMessage() for record in caplog.records)
    assert first == (
        "the host has 99 MiB of free memory, less than 100 MiB: no waiting request starts until more is free."
    )
    assert last == "the host has 125 MiB of free memory: waiting requests start again."


def test_f9_the_host_is_looked_at_once_a_second_however_many_plans_there_are() -> None:
    host, clock = Host(), FakeClock()
    gate = made(clock, host)
    for _ in range(100):
        assert gate.is_open()
        clock.advance(LOOK_S / 50)
    assert host.num_looks == 2


def test_f9_a_host_that_does_not_say_and_a_limit_of_0_hold_nobody_back() -> None:
    assert made(FakeClock(), Host(None)).is_open()
    assert memory_gate(0, FakeClock(), Host(0)) is None
    assert ALWAYS_OPEN.is_open()


def test_f9_the_memory_of_each_host_with_a_stage_on_a_cpu_counts() -> None:
    clock = FakeClock()
    gate = made(clock, Host())
    free: list[int | None] = [None, 500 * MIB]
    gate.told = lambda: [told(stage, own) for stage, own in enumerate(free)]
    assert gate.is_open()
    free[1] = 50 * MIB
    clock.advance(LOOK_S)
    assert not gate.is_open()
    assert gate.reason == "the host of stage 1 has 50 MiB of free memory, less than 100 MiB"


def test_f9_requests_wait_while_memory_is_short_and_start_when_it_is_back() -> None:
    host, clock = Host(), FakeClock()
    rig = CoreRig(clock=clock, gate=made(clock, host))
    rig.add("runs", 3, max_tokens=20, ignore_eos=True)
    rig.step()
    host.free = 0
    clock.advance(LOOK_S)
    rig.add("waits", 3, max_tokens=4, ignore_eos=True)
    for _ in range(10):
        rig.step()
    assert len(rig.tokens("runs")) >= 9, "it goes on"
    stats = rig.core.stats().scheduler
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.held_back == "the host has 0 MiB of free memory, less than 100 MiB"
    host.free = 1000 * MIB
    clock.advance(LOOK_S)
    rig.run_until_idle()
    assert rig.result("runs") == rig.expected("runs", 0)
    assert rig.result("waits") == rig.expected("waits", 1)
    assert rig.core.stats().scheduler.held_back == ""


def test_f9_who_waits_for_memory_too_long_ends_as_who_waits_for_a_row() -> None:
    host, clock = Host(0), FakeClock()
    config = SchedulerConfig(queue_timeout_s=10.0)
    rig = CoreRig(clock=clock, scheduler=config, gate=made(clock, host))
    rig.add("waits", 3)
    assert rig.step() == []
    clock.advance(10.0)
    (update,) = rig.step()
    assert update.error is not None
    assert (update.error.kind, update.error.code) == ("UnavailableError", "queue_timeout")
    assert rig.core.stats().scheduler.held_back, "memory is still short"

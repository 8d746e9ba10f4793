"""Busy time of a stage whose device computes while its thread goes on: issue 25, point 6."""

from __future__ import annotations

import pytest

from penstock.batch import StageSpans, StageTimes
from penstock.trace.device_clock import DeviceClock
from penstock.trace.phases import REPORT_INTERVAL_NS, Phase, StageReporter

MS = 1_000_000


class Device:
    """Computes what was launched in order, while wall time passes that a test lets pass."""

    def __init__(self) -> None:
        self.now_ns = 1000
        self.free_at_ns = 0  # when all that was launched is done
        self.num_waits = 0
        self.num_kept = 0  # marks that somebody holds

    def launch(self, ns: int, *, host_ns: int = 0) -> None:
        self.free_at_ns = max(self.free_at_ns, self.now_ns) + ns
        self.now_ns += host_ns

    def mark(self) -> Mark:
        return Mark(self, max(self.free_at_ns, self.now_ns))


class Mark:
    def __init__(self, device: Device, at_ns: int) -> None:
        self._device, self._at_ns = device, at_ns
        device.num_kept += 1

    def __del__(self) -> None:
        self._device.num_kept -= 1

    def query(self) -> bool:
        return self._device.now_ns >= self._at_ns

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self._device.now_ns = max(self._device.now_ns, self._at_ns)

    def elapsed_time(self, end: Mark, /) -> float:
        assert self.query()
        assert end.query(), "CUDA would raise"
        return (end._at_ns - self._at_ns) / MS


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def clock(device: Device) -> DeviceClock:
    return DeviceClock(device.mark, lambda: device.now_ns)


def seconds_of(clock: DeviceClock, *phases: Phase) -> list[int]:
    totals = clock.totals()[2]
    return [totals[phase] for phase in phases]


def send(clock: DeviceClock, device: Device, copy_ns: int) -> None:
    """As a link does: a copy waits for the device."""
    clock.await_device()
    before = clock.begin(Phase.COMM)
    device.now_ns = max(device.now_ns, device.free_at_ns) + copy_ns
    clock.begin(before)


def test_d6_busy_time_is_the_devices_and_not_that_of_the_launches(device: Device, clock: DeviceClock) -> None:
    for _ in range(3):
        clock.begin(Phase.FORWARD)
        device.launch(40 * MS, host_ns=1 * MS)
        clock.begin(Phase.PUT)
        send(clock, device, 2 * MS)
        clock.begin(Phase.WAIT_PLAN)
        device.now_ns += 5 * MS
    wall_ns, busy_ns, phase_ns = clock.totals()
    assert busy_ns == 3 * 40 * MS
    assert seconds_of(clock, Phase.FORWARD, Phase.COMM, Phase.WAIT_PLAN) == [120 * MS, 6 * MS, 15 * MS]
    assert wall_ns == sum(phase_ns) == 3 * 47 * MS


def test_d6_sampling_behind_a_forward_pass_counts_once(device: Device, clock: DeviceClock) -> None:
    """The last stage launches both before it waits for the samples."""
    clock.begin(Phase.FORWARD)
    device.launch(30 * MS)
    clock.begin(Phase.PUT)
    clock.begin(Phase.SAMPLE)
    device.launch(10 * MS)
    device.now_ns = device.free_at_ns
    clock.begin(Phase.PUT)
    assert clock.totals()[1] == 40 * MS
    assert seconds_of(clock, Phase.FORWARD, Phase.SAMPLE) == [0, 40 * MS]


def test_what_the_device_has_not_finished_counts_later(device: Device, clock: DeviceClock) -> None:
    clock.begin(Phase.FORWARD)
    device.launch(30 * MS)
    clock.begin(Phase.WAIT_PLAN)
    device.now_ns += 10 * MS
    assert clock.totals()[1] == 0
    device.now_ns += 20 * MS
    assert clock.totals()[1] == 30 * MS


def test_waits_inside_a_forward_pass_are_not_busy(device: Device, clock: DeviceClock) -> None:
    clock.begin(Phase.FORWARD)
    device.launch(3 * MS, host_ns=3 * MS)
    before = clock.begin(Phase.WAIT_PREV)
    device.now_ns += 50 * MS
    clock.begin(before)
    device.launch(4 * MS)
    clock.begin(Phase.PUT)
    clock.await_device()
    assert clock.totals()[1] == 7 * MS


def test_only_work_under_way_is_waited_for_once(device: Device, clock: DeviceClock) -> None:
    clock.await_device()
    clock.begin(Phase.FORWARD)
    device.launch(3 * MS)
    clock.begin(Phase.PUT)
    for _ in range(4):  # links to four ranks
        clock.await_device()
    assert device.num_waits == 1
    assert seconds_of(clock, Phase.FORWARD, Phase.PUT) == [3 * MS, 0]


def test_marks_are_let_go_when_they_have_counted(device: Device, clock: DeviceClock) -> None:
    for _ in range(100):
        clock.begin(Phase.FORWARD)
        device.launch(3 * MS)
        clock.begin(Phase.PUT)
        clock.await_device()
    assert device.num_kept < 10


def test_d6_a_report_has_the_devices_share(device: Device, clock: DeviceClock) -> None:
    sent: list[StageTimes | StageSpans] = []
    reporter = StageReporter(1, clock, sent.append)
    clock.begin(Phase.FORWARD)
    device.launch(REPORT_INTERVAL_NS // 2, host_ns=10)
    clock.begin(Phase.PUT)
    send(clock, device, REPORT_INTERVAL_NS // 2)
    reporter.step_done()
    (times,) = (report for report in sent if isinstance(report, StageTimes))
    assert (times.busy_ns, times.busy_ratio) == (REPORT_INTERVAL_NS // 2, 0.5)
    assert times.phase_ns[Phase.FORWARD] == times.phase_ns[Phase.COMM] == REPORT_INTERVAL_NS // 2

"""What a rank is made of where it lives on a GPU; there is none: torch's names are played."""

from __future__ import annotations

import pytest
import torch

from penstock.rank.rank import phase_clock
from penstock.trace.device_clock import DeviceClock
from penstock.trace.phases import Phase, PhaseClock

MS = 1_000_000


class Stream:
    """Of a GPU on which each mark is 5 ms after the one before, and passed at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.now_ms = device, 0.0


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None

    def record(self, stream: Stream) -> None:
        stream.now_ms += 5.0
        self.at_ms = stream.now_ms

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert self.at_ms is not None
        assert end_event.at_ms is not None
        return end_event.at_ms - self.at_ms


def test_d6_the_clock_of_a_rank_on_a_gpu_goes_by_cuda_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 25, point 6. Events go on the stream of the rank's device, which need not be the first."""
    streams: dict[torch.device, Stream] = {}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: streams.setdefault(device, Stream(device))
    )
    clock = phase_clock(torch.device("cuda", 1))
    assert clock.keeps_spans
    for _ in range(3):
        clock.begin(Phase.FORWARD)
        clock.begin(Phase.PUT)
    assert clock.totals()[1] == 3 * 5 * MS
    assert [(device.index, stream.now_ms) for device, stream in streams.items()] == [(1, 30.0)]


def test_the_clock_of_a_rank_on_a_cpu_goes_by_its_thread() -> None:
    clock = phase_clock(torch.device("cpu"))
    assert isinstance(clock, PhaseClock)
    assert not isinstance(clock, DeviceClock)
    assert clock.keeps_spans

"""The clock of a rank whose device computes while its thread goes on: busy time by the device's own marks.

    thread   |launch|forward: awaits device|copy|      CPU time of the thread: launches only
    device    |forward ....................|           between the two marks: all of the forward
             mark                         mark

`rank.rank` makes a `DeviceClock` for a GPU, whose marks are CUDA events. This module imports no device
library.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

from penstock.trace.phases import Phase, PhaseClock

NS_PER_MS = 1e6


class DeviceMark(Protocol):
    """A mark among the work of a device, such as a CUDA event that was recorded."""

    def query(self) -> bool:
        """Return whether the device has reached this mark."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached this mark."""
        ...

    def elapsed_time(self, end: Self, /) -> float:
        """Return the milliseconds from this mark to a later one. The device must have reached both."""
        ...


class DeviceClock(PhaseClock):
    """A phase clock whose busy time is the device's: from the begin to the end of what a busy phase launches.

    Time in which the device waits for other ranks of the stage is included. Work that the device has not
    finished when the busy time is read is counted at a later reading.

    Args:
        mark: puts a mark behind the work that was launched so far, and returns it.
        wall, keeps_spans: as for `PhaseClock`.
    """

    def __init__(
        self,
        mark: Callable[[], DeviceMark],
        wall: Callable[[], int] = time.monotonic_ns,
        *,
        keeps_spans: bool = False,
    ) -> None:
        super().__init__(wall, keeps_spans=keeps_spans)
        self._mark = mark
        self._began: DeviceMark | None = None
        self._unfinished: deque[tuple[DeviceMark, DeviceMark]] = deque()

    def await_device(self) -> None:
        last = self._unfinished[-1][1] if self._unfinished else None
        if last is None or last.query():
            return
        before = self.begin(Phase.FORWARD)
        last.synchronize()
        self.begin(before)

    def _begin_busy(self) -> None:
        self._count_finished()
        self._began = self._mark()

    def _end_busy(self) -> None:
        assert self._began is not None, "a busy phase ends before it began"
        self._unfinished.append((self._began, self._mark()))

    def _counted_busy_ns(self) -> int:
        self._count_finished()
        return self._busy_ns

    def _count_finished(self) -> None:
        """Add the time of work that the device has finished, and drop the marks around that work."""
        while self._unfinished and self._unfinished[0][1].query():
            begin, end = self._unfinished.popleft()
            self._busy_ns += round(begin.elapsed_time(end) * NS_PER_MS)

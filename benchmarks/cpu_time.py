"""CPU time of processes, to the nanosecond, while they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the seconds that the living threads of these processes have run (`schedstat`, first field).

    Unlike the times of `/proc/PID/stat`, which count ticks of 10 ms, and without threads that have ended.
    """
    nanoseconds = 0
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")):
        try:
            nanoseconds += int(path.read_text(encoding="utf-8").split()[0])
        except OSError:
            continue  # the thread has just ended
    return nanoseconds * 1e-9


class CpuTime(NamedTuple):
    """What a process has run.

    Attributes:
        own: seconds of its own threads.
        libraries: seconds of threads to which a library has given a name.
    """

    own: float
    libraries: float

    @property
    def together(self) -> float:
        return self.own + self.libraries


def split_cpu_time(pid: int) -> CpuTime:
    """Return the CPU time of the living threads of a process.

    A thread has the name of the one that has started it, until somebody gives it another.
    """
    seconds = [0.0, 0.0]
    name = Path(f"/proc/{pid}/comm").read_bytes()
    for path in Path(f"/proc/{pid}/task").iterdir():
        try:
            is_named = (path / "comm").read_bytes() != name
            seconds[is_named] += int((path / "schedstat").read_text(encoding="utf-8").split()[0]) * 1e-9
        except OSError:
            continue  # the thread has just ended
    return CpuTime(*seconds)

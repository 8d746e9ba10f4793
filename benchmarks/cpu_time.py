"""CPU time of processes, to the nanosecond, while they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


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

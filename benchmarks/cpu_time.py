"""CPU time of processes, to the nanosecond, while they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


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


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the seconds that the living threads of these processes have run (`schedstat`, first field).

    Unlike the times of `/proc/PID/stat`, which count ticks of 10 ms, and without threads that have ended.
    """
    return sum(_seconds(thread) for pid in pids for thread in _threads(pid))


def split_cpu_time(pid: int) -> CpuTime:
    """Return the CPU time of the living threads of a process, as `cpu_seconds` does.

    A thread has the name of the one that has started it, until somebody gives it another.
    """
    own_name = _name(Path(f"/proc/{pid}"))
    seconds = [0.0, 0.0]
    for thread in _threads(pid):
        seconds[_name(thread) != own_name] += _seconds(thread)
    return CpuTime(*seconds)


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*"))


def _seconds(thread: Path) -> float:
    """Return what a thread has run; nothing if it has just ended."""
    try:
        return int((thread / "schedstat").read_text(encoding="utf-8").split()[0]) * 1e-9
    except OSError:
        return 0.0


def _name(task: Path) -> bytes:
    """Return the name of a process or thread; nothing if it has just ended."""
    try:
        return (task / "comm").read_bytes()
    except OSError:
        return b""

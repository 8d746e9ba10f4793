"""The memory of this host that a process may still take, and how much the host has. Torch-free.

Read by `engine.supervisor.launch` before anything is started, by `rank.rank` once the weights are loaded, and
by the front while it serves.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_PROCESS = Path("/proc/self")
_FORGET_PEAK = "5"  # what clears VmHWM, in clear_refs
_CGROUP = Path("/sys/fs/cgroup")


def host_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that could be allocated now: the kernel's, bounded by the container's limit."""
    host = _host_available(meminfo)
    return min(host, _cgroup_available(cgroup, host))


def _host_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line MemAvailable")


def _cgroup_available(cgroup: Path, unlimited: int) -> int:
    """Return what a container's limit leaves, or `unlimited` without one (control groups version 2).

    Files that were read count as used there, and are given up when memory is wanted, as in `MemAvailable`.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return unlimited
        used = int((cgroup / "memory.current").read_text())
        details = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return unlimited
    files = sum(int(details.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, int(limit) - max(0, used - files))


def peak_resident_bytes(process: Path = _PROCESS) -> int:
    """Return the most bytes that were resident in this process at once since the last `forget_peak`."""
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{process / 'status'} has no line VmHWM")


def forget_peak(process: Path = _PROCESS) -> None:
    """Let the peak of resident memory count from now on, where the kernel lets a process do so."""
    with contextlib.suppress(OSError):
        (process / "clear_refs").write_text(_FORGET_PEAK)


def give_back_freed_pages() -> None:
    """Return freed memory to the system; the C library keeps up to 64 MiB of it for the next allocation."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)

"""The memory of this host that a process may still take, and how much the host has. Torch-free.

`hosts.resources` reads it before ranks are started, and a rank when it has loaded its weights. While the
engine serves, the core (`engine.core.memory_gate`) and the HTTP server read it.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_PROCESS = Path("/proc/self")
_FORGET_PEAK = "5"  # written to clear_refs, it resets VmHWM, the peak of resident memory
_CGROUP = Path("/sys/fs/cgroup")


def host_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that could be allocated now, by the kernel's estimate and the container's limit."""
    host = _host_available(meminfo)
    return min(host, _cgroup_available(cgroup, host))


def _host_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line MemAvailable")


def _cgroup_available(cgroup: Path, unlimited: int) -> int:
    """Return the bytes that a container's limit leaves, or `unlimited` if there is none (cgroups version 2).

    The control group counts cached files as used memory. The kernel gives them up when memory is wanted, so
    they count as available here, as in `MemAvailable`.
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
    """Let the peak of resident memory count from now on; does nothing where the kernel does not allow it."""
    with contextlib.suppress(OSError):
        (process / "clear_refs").write_text(_FORGET_PEAK)


def give_back_freed_pages() -> None:
    """Return freed memory to the system: otherwise the C library keeps some of it for later allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)

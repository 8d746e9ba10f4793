"""How much memory of this host a process may still take. Torch-free; decides nothing.

Read by `engine.launch` before anything is started, and by `executor.rank` once the weights are loaded.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that could be allocated now: what the kernel can give, bounded by the container's limit."""
    host = _host_available(meminfo)
    return min(host, _cgroup_available(cgroup, host))


def _host_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line MemAvailable")


def _cgroup_available(cgroup: Path, unlimited: int) -> int:
    """What a container's limit leaves, or `unlimited` without one (control groups version 2)."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return unlimited
    return unlimited if limit == "max" else max(0, int(limit) - used)

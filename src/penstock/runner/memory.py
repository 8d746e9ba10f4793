"""How much memory a rank may still take. Read by `runner.kv_storage`; decides nothing."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that this process could allocate on `device` now, other processes' use deducted."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    host = _host_available(Path("/proc/meminfo"))
    return min(host, _cgroup_available(_CGROUP, host))


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

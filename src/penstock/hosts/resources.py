"""What a host can give: cores, free memory, GPUs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.process.host_memory import host_available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """What this machine can give.

    Attributes:
        cpus: numbers of the cores that we may run on; empty where threads cannot be bound to cores.
    """

    num_cpus: int
    free_bytes: int
    num_gpus: int
    cpus: tuple[int, ...] = ()

    @classmethod
    def detect(cls) -> HostResources:
        """Ask the kernel: CPUs we may run on, memory (the control group's limit counted), GPU devices."""
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        return cls(
            num_cpus=len(cpus),
            free_bytes=host_available_bytes(),
            num_gpus=_num_gpus(Path("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES")),
            cpus=cpus,
        )


def _num_gpus(devices: Path, visible: str | None) -> int:
    """NVIDIA devices that torch may see; `visible` is CUDA_VISIBLE_DEVICES."""
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    if visible is None:
        return present
    return min(present, sum(name.strip() not in ("", "-1") for name in visible.split(",")))

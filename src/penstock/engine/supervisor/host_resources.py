"""What this machine can give, and which of it each rank gets: device, threads, cores.

Asked by `engine.supervisor.launch`. Ranks come stage by stage, those of one stage side by side.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.config.engine import ParallelConfig
from penstock.errors import UsageError
from penstock.process.config import RankConfig
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


def devices_of_ranks(asked: list[str], host: HostResources) -> list[str]:
    """`cpu` or `cuda:N` for each rank: those that leave it open take the GPUs in turn.

    A GPU that is not there is for the rank to refuse, which knows why torch does not see it.
    """
    in_turn = itertools.count()
    automatic = "cuda" if host.num_gpus else "cpu"
    wanted = [automatic if device == "auto" else device for device in asked]
    return [f"cuda:{next(in_turn) % max(1, host.num_gpus)}" if one == "cuda" else one for one in wanted]


def shared_threads(devices: list[str], num_cpus: int) -> list[int]:
    """Threads of each rank: the cores go to the ranks on the CPU, but for one to drive each GPU."""
    num_on_cpu = devices.count("cpu")
    if not num_on_cpu:
        return [max(1, num_cpus // len(devices))] * len(devices)
    own = max(1, (num_cpus - (len(devices) - num_on_cpu)) // num_on_cpu)
    return [own if device == "cpu" else 1 for device in devices]


def cpus_of_ranks(
    parallel: ParallelConfig, threads: list[int], devices: list[str], host: HostResources
) -> list[tuple[int, ...]]:
    """Cores of each rank's threads, rank by rank in the order of the cores; all empty: not pinned.

    A rank on a GPU is never bound; but the cores that its threads need are left to it.
    """
    ends = list(itertools.accumulate(threads))
    reason = _why_not_pinned(parallel, ends[-1], devices, host)
    if parallel.pin_threads == "on" and reason:
        raise UsageError(
            f"--pin-threads is on; {reason}.",
            remedy="Use fewer --threads-per-rank, or --pin-threads auto.",
            param="pin_threads",
        )
    # Left to themselves, threads find free cores if there are any; and of two engines one need not wait.
    fills_the_machine = ends[-1] == len(host.cpus)
    if parallel.pin_threads == "off" or reason or not (fills_the_machine or parallel.pin_threads == "on"):
        return [()] * len(threads)
    return [
        host.cpus[end - count : end] if device == "cpu" else ()
        for device, count, end in zip(devices, threads, ends, strict=True)
    ]


def cpus_of_core(ranks: list[RankConfig], host: HostResources) -> tuple[int, ...]:
    """Any but those that output ranks are bound to: a result wakes the core up where it was sent, and there
    it would push the sender aside, which has the next micro-batch to run. One stage has none.

    Args:
        ranks: of all replicas.
    """
    outputs = [rank for rank in ranks if rank.is_output]
    theirs = {cpu for rank in outputs for cpu in rank.cpus}
    return tuple(cpu for cpu in host.cpus if cpu not in theirs) if theirs and not outputs[0].is_first else ()


def _why_not_pinned(
    parallel: ParallelConfig, num_threads: int, devices: list[str], host: HostResources
) -> str:
    """Why threads cannot be bound to cores of their own; "" if they can."""
    if "cpu" not in devices:
        return "the stages run on a GPU"
    if parallel.backend == "inprocess":
        return "the stages are threads of the caller's process, which share its compute threads"
    if num_threads > len(host.cpus):
        return f"all stages together have {num_threads} threads for {len(host.cpus)} usable cores"
    return ""

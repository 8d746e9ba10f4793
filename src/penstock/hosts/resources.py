"""The resources of a host: cores, free memory, GPUs."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.bounds import Count, Word
from penstock.kernels.cpu.compiler import Machine
from penstock.kernels.cpu.targets import targets_of
from penstock.process.config import THIS_HOST
from penstock.process.host_memory import host_available_bytes

_MOST_CPUS = 1 << 16
_MOST_CHARS = 256  # the most characters of a `Word`
_Cpu = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_CPUS)]


class HostResources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a host can give to the processes of an engine.

    Attributes:
        num_cpus: number of CPU cores that the processes may run on.
        free_bytes: bytes of host memory that they may still take; memory of GPUs does not count.
        name: name of the host, as in `RankConfig.host`.
        cpus: numbers of these cores; empty if threads cannot be bound to cores.
        numeric_classes: those of `config.engine.NUMERIC_CLASSES` that its CPU can compute in, least first.
        cpu_model: name of its CPU, or the numbers of maker and model; empty if the kernel reports neither.
        gpu_models: names of its GPUs, in the order of their addresses.
    """

    num_cpus: Annotated[int, msgspec.Meta(ge=1, le=_MOST_CPUS)]
    free_bytes: Count
    num_gpus: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    cpus: Annotated[tuple[_Cpu, ...], msgspec.Meta(max_length=_MOST_CPUS)] = ()
    name: Word = THIS_HOST
    numeric_classes: Annotated[tuple[Word, ...], msgspec.Meta(max_length=64)] = ()
    cpu_model: Word = ""
    gpu_models: Annotated[tuple[Word, ...], msgspec.Meta(max_length=1024)] = ()

    @classmethod
    def detect(cls) -> HostResources:
        """Return the resources of this machine, as its kernel reports them now.

        Only cores on which this process may run count. A container's limit bounds the free memory.
        """
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        return cls(
            num_cpus=len(cpus),
            free_bytes=host_available_bytes(),
            num_gpus=_num_gpus(Path("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES")),
            cpus=cpus,
            numeric_classes=_numeric_classes(),
            cpu_model=_cpu_model(Path("/proc/cpuinfo")),
            gpu_models=_gpu_models(Path("/proc/driver/nvidia/gpus")),
        )

    @property
    def hardware(self) -> tuple[object, ...]:
        """The numbers and models of CPU and GPUs, which decide how long a step takes here.

        Two hosts with equal values take equally long.
        """
        return self.num_cpus, self.cpu_model, self.numeric_classes, self.num_gpus, self.gpu_models


@functools.cache
def _numeric_classes() -> tuple[str, ...]:
    """Return the numeric classes of the CPU, which are found out only once."""
    machine = Machine.detect()
    return tuple(targets_of(machine.architecture, machine.cpu_flags))


@functools.cache
def _cpu_model(cpuinfo: Path) -> str:
    """Return the name of the first CPU; if it has no name, as on Arm, the numbers of maker and model."""
    match = re.search(r"^model name\s*:(.*)$", _text(cpuinfo), re.MULTILINE)
    named = match[1].strip() if match else Machine.detect(cpuinfo).cpu_model
    return named[:_MOST_CHARS]


@functools.cache
def _gpu_models(driver: Path) -> tuple[str, ...]:
    """Return the names of the GPUs that NVIDIA's driver shows."""
    texts = [_text(path) for path in sorted(driver.glob("*/information"))]
    found = [re.search(r"^Model:(.*)$", text, re.MULTILINE) for text in texts]
    return tuple(match[1].strip()[:_MOST_CHARS] for match in found if match)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _num_gpus(devices: Path, visible: str | None) -> int:
    """Return the number of NVIDIA devices that torch may see; `visible` is CUDA_VISIBLE_DEVICES."""
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    if visible is None:
        return present
    return min(present, sum(name.strip() not in ("", "-1") for name in visible.split(",")))

"""Devices of hosts that are there, from what the hosts say they have: for `--devices joined`.

The figures of a GPU are looked up by its name; a CPU is taken as a usual one with so many cores. Links are
as they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from penstock.errors import UsageError
from penstock.hosts.resources import HostResources
from penstock.layouts.devices import Device, DeviceHost, DeviceSet, Link
from penstock.layouts.known_devices import (
    CPU_BYTES_PER_S,
    FLOPS_PER_CORE,
    KNOWN_NAMES,
    MEMORY,
    NETWORK,
    known_device,
    nvlink_of,
    pcie_of,
)
from penstock.process.config import HostLink


def devices_of_hosts(hosts: Sequence[HostResources], links: Sequence[HostLink]) -> DeviceSet:
    """Return the devices of hosts: the GPUs of each, or its CPU where it has none.

    Raises:
        UsageError: a GPU is not known by its name.
    """
    return DeviceSet(
        hosts=tuple(map(_host, hosts)),
        links={
            frozenset(link.hosts): Link(
                kind="network",
                bytes_per_s=max(1.0, min(link.bytes_per_s_out, link.bytes_per_s_in)),
                latency_s=link.round_trip_s / 2,
            )
            for link in links
        },
    )


def cpu_device(host: HostResources) -> Device:
    """Return the CPU of a host, with what is free of its memory."""
    return Device(
        kind="cpu",
        memory_bytes=host.free_bytes,
        read_bytes_per_s=CPU_BYTES_PER_S,
        flops_per_s=host.num_cpus * FLOPS_PER_CORE,
        cores=host.num_cpus,
    )


def _host(host: HostResources) -> DeviceHost:
    if not host.gpu_models:
        return DeviceHost(name=host.name, devices=(cpu_device(host),), link=MEMORY, network=NETWORK)
    devices = tuple(_gpu(host.name, model) for model in host.gpu_models)
    first = devices[0].kind
    return DeviceHost(
        name=host.name, devices=devices, link=nvlink_of(first) or pcie_of(first), network=NETWORK
    )


def _gpu(host: str, model: str) -> Device:
    name = known_name(model)
    device = None if name is None else known_device(name)
    if device is None:
        raise UsageError(
            f"devices: the GPU {model!r} of {host} is not a known device.",
            remedy="Describe the devices, such as gpu:24g@1000GB/s:160tflops.",
            param="devices",
        )
    return device


def known_name(model: str) -> str | None:
    """Return the known device that a driver calls such as "NVIDIA A100-SXM4-80GB"; None if it is unknown."""
    words = re.split(r"[^a-z0-9]+", model.lower())
    joined = {*words, *("".join(pair) for pair in pairwise(words))}
    matching = [name for name in KNOWN_NAMES if all({part, f"{part}b"} & joined for part in name.split("-"))]
    return max(matching, key=len, default=None)

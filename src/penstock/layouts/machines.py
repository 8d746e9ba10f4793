"""Makes devices of real hosts from the resources that they report, for `--devices joined` and `here`.

The figures of a GPU are those of the known device with its name. A CPU gets usual figures for its number of
cores. Links between hosts have the figures that were measured.
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
    """Return the devices of hosts: the GPUs of each host, or its CPU if it has no GPU.

    Raises:
        UsageError: no known device has the name of a GPU.
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
    """Return the CPU of a host as a device; its memory is what is free on the host now."""
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
    """Return the name in `KNOWN_NAMES` of a GPU, or None if it is unknown.

    Args:
        model: the GPU's name as its driver reports it, such as "NVIDIA A100-SXM4-80GB".
    """
    words = re.split(r"[^a-z0-9]+", model.lower())
    joined = {*words, *("".join(pair) for pair in pairwise(words))}
    matching = [name for name in KNOWN_NAMES if all({part, f"{part}b"} & joined for part in name.split("-"))]
    return max(matching, key=len, default=None)

"""The devices that a layout is planned for: their memory, their speed and the links between them.

`layouts.device_text` reads them from `--devices`, `layouts.device_file` from a file, and `layouts.machines`
makes them from what real hosts report. The module has values alone: it knows no model, and touches no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between two devices, or between two hosts.

    Attributes:
        kind: "nvlink", "pcie", "memory" (between ranks of one CPU) or "network".
        bytes_per_s: rate in one direction; for nvlink and pcie the rates of both directions together, as data
            sheets give them.
        latency_s: seconds that the smallest message takes, one way.
    """

    kind: str
    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that one message of so many bytes takes."""
        return self.latency_s + num_bytes / self.bytes_per_s

    @property
    def is_nvlink(self) -> bool:
        return self.kind == "nvlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank.

    Attributes:
        kind: its name in the table of known devices; "gpu" for a GPU that is described by its figures, "cpu"
            for a CPU.
        memory_bytes: memory of the device; for a CPU, of the host.
        read_bytes_per_s: memory bandwidth.
        flops_per_s: operations a second in dense matrix products in bfloat16.
        cores: cores of a CPU; 0 for a GPU.
    """

    kind: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    cores: int = 0

    @property
    def is_cpu(self) -> bool:
        return self.cores > 0

    @property
    def type(self) -> str:
        """The type of device as in the config of ranks: "cpu" or "cuda"."""
        return "cpu" if self.is_cpu else "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHost:
    """A machine with devices.

    Attributes:
        link: the link between its devices.
        network: the link to other hosts.
    """

    name: str
    devices: tuple[Device, ...]
    link: Link
    network: Link

    @property
    def is_uniform(self) -> bool:
        """Whether all its devices are alike."""
        return len(set(self.devices)) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSet:
    """All devices that a layout may use.

    Attributes:
        hosts: at least one host. Each has a device, and no two have the same name.
        links: the link between two hosts, by their names, for pairs whose figures are known. Other pairs are
            joined by the slower of their networks (`DeviceHost.network`).
    """

    hosts: tuple[DeviceHost, ...]
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are alike, and all hosts have as many of them, joined by the same link."""
        first = self.hosts[0]
        return all(
            (host.devices, host.link, host.is_uniform) == (first.devices, first.link, True)
            for host in self.hosts
        )

    def link_between(self, one: str, other: str) -> Link:
        """Return the link between two hosts; for a host and itself, the link between its devices.

        If `links` has none for the two hosts, it is made of their networks (`slower_link`).
        """
        by_name = {host.name: host for host in self.hosts}
        if one == other:
            return by_name[one].link
        own = self.links.get(frozenset((one, other)))
        return own or slower_link(by_name[one].network, by_name[other].network)


def slower_link(one: Link, other: Link) -> Link:
    """Return two links in a row as one link: it has the lower of their rates and the longer latency."""
    return Link(
        kind=one.kind if one.bytes_per_s <= other.bytes_per_s else other.kind,
        bytes_per_s=min(one.bytes_per_s, other.bytes_per_s),
        latency_s=max(one.latency_s, other.latency_s),
    )

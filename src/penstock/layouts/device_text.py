"""Reads the text of `--devices`: names of devices with numbers, sizes and speeds, such as `a100-80g:4`.

Further examples are `h100:8x2@100Gbit` and `rtx4090+cpu:16c:64g@40GB/s`:

    --devices HOST,HOST,...        hosts; or one word: `here`, `joined`, or FILE.toml (`layouts.device_file`)
    HOST    = DEVICES+DEVICES...   the devices of one host
    DEVICES = KIND:NOTE:NOTE...    KIND is a known device, `gpu` or `cpu`
    NOTE    = 4                    the host has so many of these devices
              8x2                  there are two such hosts, and each has 8 of these devices
              16c  64g             cores of a CPU; memory of each device in GiB
              @40GB/s              memory bandwidth of each device
              160tflops            dense bfloat16 rate of each device
              nvlink pcie          how the devices of the host are joined; with a rate: nvlink=600GB/s
              @10Gbit  @2ms        rate and latency of the host's network

Each note may stand after `:` or after `@`. A note about the link or the network of a host may stand at any of
its devices; if several give one, the last counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.errors import UsageError
from penstock.layouts.devices import GIB, Device, DeviceHost, DeviceSet, Link
from penstock.layouts.known_devices import (
    CPU_BYTES_PER_S,
    FLOPS_PER_CORE,
    KNOWN_NAMES,
    MEMORY,
    NETWORK,
    known_device,
    nvlink,
    nvlink_of,
    pcie_of,
)

HERE, JOINED = "here", "joined"  # this machine, whose stages are measured; the hosts that join a head
EXAMPLES = "a100-80g:4, h100:8x2@100Gbit, rtx4090:2 or cpu:16c:64g@40GB/s"

_MAX_DEVICES = 4096
_GPU, _CPU = "gpu", "cpu"
_DEFAULT_NVLINK = 600e9  # for a device whose data sheet names no NVLink; real bridges between two are slower

_NUMBER = r"([0-9]{1,7}(?:\.[0-9]{1,6})?)"
_COUNT = re.compile(r"([0-9]{1,4})(?:x([0-9]{1,4}))?")
_CORES = re.compile(r"([0-9]{1,4})c(?:ores)?")
_MEMORY = re.compile(_NUMBER + r"g(?:b|ib)?")
_BYTES_RATE = re.compile(_NUMBER + r"(m|g|t)b/s")
_BITS_RATE = re.compile(_NUMBER + r"(m|g)bit(?:/s)?")
_FLOPS = re.compile(_NUMBER + r"(g|t)flops")
_LATENCY = re.compile(_NUMBER + r"(us|ms|s)")
_SCALES = {"m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_devices(text: str) -> DeviceSet:
    """Return the devices that a text describes; it may not name a file (see `layouts.device_file`).

    Raises:
        UsageError: the text cannot be read; the error lists the known devices.
    """
    hosts = [host for item in text.split(",") for host in hosts_of_item(item.strip())]
    return require_countable(DeviceSet(hosts=tuple(_named(hosts))))


def require_countable(devices: DeviceSet) -> DeviceSet:
    """Return the devices. Raises `UsageError` for more than layouts can be tried on."""
    if devices.num_devices > _MAX_DEVICES:
        raise bad_devices(f"{devices.num_devices} devices are more than {_MAX_DEVICES}")
    return devices


def _named(hosts: Sequence[DeviceHost]) -> list[DeviceHost]:
    """Return the hosts with the names host0, host1, and so on."""
    return [replace(host, name=f"host{number}") for number, host in enumerate(hosts)]


def hosts_of_item(item: str, name: str = "host") -> list[DeviceHost]:
    """Return the hosts that one item between commas describes: one, or as many as `8x2` says.

    Args:
        name: the name that each of them gets.

    Raises:
        UsageError: the item cannot be read.
    """
    if not item:
        raise bad_devices("a host between two commas is empty")
    if item.lower() in (HERE, JOINED):
        raise bad_devices(f"{item.lower()!r} cannot be combined with other devices")
    groups = [_Notes.parse(part.strip()) for part in item.split("+")]
    num_hosts = {group.num_hosts for group in groups}
    if len(num_hosts) > 1:
        raise bad_devices(f"the parts of {item!r} have different numbers of hosts")
    devices = tuple(device for group in groups for device in [group.device()] * group.count)
    joins = [group.join for group in groups if group.join is not None]
    network = _with_notes(NETWORK, [group.rate for group in groups], [group.latency for group in groups])
    link = joins[-1] if joins else _own_link(devices)
    host = DeviceHost(name=name, devices=devices, link=link, network=network)
    return [host] * num_hosts.pop()


def _with_notes(link: Link, rates: Sequence[float | None], latencies: Sequence[float | None]) -> Link:
    for rate in rates:
        link = link if rate is None else replace(link, bytes_per_s=rate)
    for latency in latencies:
        link = link if latency is None else replace(link, latency_s=latency)
    return link


def _own_link(devices: Sequence[Device]) -> Link:
    """Return the link between a host's devices if no note gives one.

    - CPUs: memory.
    - GPUs of one kind: their NVLink, if the table of known devices has one for them.
    - Others: the slowest PCIe among the GPUs.
    """
    if all(device.is_cpu for device in devices):
        return MEMORY
    first = devices[0].kind
    own = nvlink_of(first)
    if own is not None and all(device.kind == first for device in devices):
        return own
    slowest = (pcie_of(device.kind) for device in devices if not device.is_cpu)
    return min(slowest, key=lambda link: link.bytes_per_s)


@dataclass(slots=True, kw_only=True)
class _Notes:
    """The notes about some devices of a host; None: the note is missing.

    Attributes:
        text: kind and notes as the user wrote them, for errors.
        count: number of these devices in a host.
        num_hosts: number of hosts like this one.
        join: how the devices are joined.
        rate, latency: bytes a second and seconds of the host's network.
        said: names of the notes that were given, to find one that is given twice.
    """

    kind: str
    text: str
    count: int = 1
    num_hosts: int = 1
    cores: int | None = None
    memory_bytes: int | None = None
    read_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    join: Link | None = None
    rate: float | None = None
    latency: float | None = None
    said: set[str] = field(default_factory=set)

    @classmethod
    def parse(cls, text: str) -> _Notes:
        kind, *notes = re.split(r"[:@]", text.lower())
        if kind not in (_GPU, _CPU) and known_device(kind) is None:
            raise bad_devices(f"{kind!r} is not a known device")
        own = cls(kind=kind, text=text)
        for note in notes:
            own._take(note.strip())
        return own

    def _take(self, note: str) -> None:
        if match := _COUNT.fullmatch(note):
            self._say("number", note)
            self.count, self.num_hosts = int(match[1]), int(match[2] or 1)
            if self.count < 1 or self.num_hosts < 1:
                raise bad_devices(f"{self.text!r} does not name a device")
        elif match := _CORES.fullmatch(note):
            self._say("cores", note)
            self.cores = int(match[1])
        elif match := _MEMORY.fullmatch(note):
            self._say("memory", note)
            self.memory_bytes = int(float(match[1]) * GIB)
        elif match := _BYTES_RATE.fullmatch(note):
            self._say("memory bandwidth", note)
            self.read_bytes_per_s = _positive(note, float(match[1]) * _SCALES[match[2]])
        elif match := _FLOPS.fullmatch(note):
            self._say("flops", note)
            self.flops_per_s = _positive(note, float(match[1]) * _SCALES[match[2]])
        else:
            self._take_way(note)

    def _take_way(self, note: str) -> None:
        """Take a note about a link."""
        name, equals, rate = note.partition("=")
        if name in ("nvlink", "pcie"):
            self._say("link", note)
            self.join = self._join(name, bytes_per_s(rate) if equals else None)
        elif _BITS_RATE.fullmatch(note):
            self._say("network", note)
            self.rate = bytes_per_s(note)
        elif _LATENCY.fullmatch(note):
            self._say("latency", note)
            self.latency = seconds(note)
        else:
            raise bad_devices(f"{note!r} in {self.text!r} is not a known property")

    def _join(self, name: str, rate: float | None) -> Link:
        if self.kind == _CPU:
            raise bad_devices(f"{self.text!r} is a CPU, which has no {name}")
        usual = (nvlink_of(self.kind) or nvlink(_DEFAULT_NVLINK)) if name == "nvlink" else pcie_of(self.kind)
        return usual if rate is None else replace(usual, bytes_per_s=rate)

    def _say(self, what: str, note: str) -> None:
        if what in self.said:
            raise bad_devices(f"{self.text!r} gives its {what} twice, the second time as {note!r}")
        self.said.add(what)

    def device(self) -> Device:
        """Return the device with its known figures, except those that a note gives."""
        known = self._cpu() if self.kind == _CPU else self._gpu()
        if self.kind != _CPU and self.cores is not None:
            raise bad_devices(f"{self.text!r} gives cores to a GPU")
        return replace(
            known,
            memory_bytes=known.memory_bytes if self.memory_bytes is None else self.memory_bytes,
            read_bytes_per_s=self.read_bytes_per_s or known.read_bytes_per_s,
            flops_per_s=self.flops_per_s or known.flops_per_s,
        )

    def _cpu(self) -> Device:
        if not self.cores or not self.memory_bytes:
            raise bad_devices(f"{self.text!r} needs its cores and its memory, as in cpu:16c:64g@40GB/s")
        return Device(
            kind=_CPU,
            memory_bytes=self.memory_bytes,
            read_bytes_per_s=CPU_BYTES_PER_S,
            flops_per_s=self.cores * FLOPS_PER_CORE,
            cores=self.cores,
        )

    def _gpu(self) -> Device:
        known = known_device(self.kind)
        if known is not None:
            return known
        if not (self.memory_bytes and self.read_bytes_per_s and self.flops_per_s):
            raise bad_devices(
                f"{self.text!r} needs its memory, bandwidth and rate, as in gpu:24g@1000GB/s:160tflops"
            )
        return Device(kind=_GPU, memory_bytes=0, read_bytes_per_s=1.0, flops_per_s=1.0)


def bytes_per_s(text: str) -> float:
    """Return the bytes a second of a text such as `10Gbit` or `40GB/s`. Raises `UsageError`."""
    note = text.strip().lower()
    if match := _BITS_RATE.fullmatch(note):
        return _positive(note, float(match[1]) * _SCALES[match[2]] / 8)
    if match := _BYTES_RATE.fullmatch(note):
        return _positive(note, float(match[1]) * _SCALES[match[2]])
    raise bad_devices(f"{text!r} is not a rate such as 10Gbit or 40GB/s")


def seconds(text: str) -> float:
    """Return the seconds of a text such as `200us` or `5ms`. Raises `UsageError`."""
    match = _LATENCY.fullmatch(text.strip().lower())
    if match is None:
        raise bad_devices(f"{text!r} is not a time such as 200us or 5ms")
    return float(match[1]) * _SECONDS[match[2]]


def _positive(note: str, value: float) -> float:
    if value <= 0:
        raise bad_devices(f"{note!r} is zero")
    return value


def bad_devices(what: str) -> UsageError:
    """Return the error for devices that cannot be read."""
    return UsageError(
        f"devices: {what}.",
        remedy=f"Write for example {EXAMPLES}; or here, joined, or a file such as hosts.toml. "
        f"Known: {', '.join(KNOWN_NAMES)}; others as gpu:24g@1000GB/s:160tflops.",
        param="devices",
    )

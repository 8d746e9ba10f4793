"""Reads a file of hosts, their devices, and the links between the hosts, for `--devices FILE.toml`.

[[host]]
name = "desk"
devices = "rtx4090:2"             # as in `layouts.device_text`, without commas

[[host]]
name = "attic"
devices = "cpu:16c:64g@40GB/s"

[[link]]                           # between two hosts; a pair without one has the slower of their networks
hosts = ["desk", "attic"]
rate = "1Gbit"
latency = "5ms"
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.errors import UsageError
from penstock.layouts.device_text import bytes_per_s, hosts_of_item, parse_devices, require_countable, seconds
from penstock.layouts.devices import DeviceHost, DeviceSet, Link

SUFFIX = ".toml"
_MAX_BYTES = 1 << 20


class _Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    devices: str


class _Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: tuple[str, str]
    rate: str
    latency: str = "100us"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: list[_Host]
    link: list[_Link] = []


def devices_of(text: str) -> DeviceSet:
    """Return the devices that the text of `--devices` describes, or that the file it names describes.

    Args:
        text: not `device_text.HERE` or `device_text.JOINED`: for these the caller asks the hosts.

    Raises:
        UsageError: the text or the file cannot be read; the error lists the known devices.
    """
    named = text.strip()
    return read_device_file(Path(named)) if named.lower().endswith(SUFFIX) else parse_devices(named)


def read_device_file(path: Path) -> DeviceSet:
    """Return the devices that a file describes.

    Raises:
        UsageError: the file cannot be read, two hosts have one name, or a link does not join two hosts.
    """
    read = _read(path)
    hosts = tuple(_host(path, each) for each in read.host)
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise _bad(path, "two hosts have the same name", "Name each host once.")
    links = {}
    for link in read.link:
        if len(set(link.hosts)) < 2 or not set(link.hosts) <= set(names):
            raise _bad(
                path,
                f"a link joins {' and '.join(link.hosts)}, not two hosts of the file",
                f"Join two of {', '.join(sorted(names))}.",
            )
        links[frozenset(link.hosts)] = Link(
            kind="network", bytes_per_s=bytes_per_s(link.rate), latency_s=seconds(link.latency)
        )
    return require_countable(DeviceSet(hosts=hosts, links=links))


def _host(path: Path, host: _Host) -> DeviceHost:
    if "," in host.devices:
        raise _bad(
            path, f"host {host.name} has a comma in its devices", "Separate the devices of a host with +."
        )
    hosts = hosts_of_item(host.devices.strip(), host.name)
    if len(hosts) > 1:
        raise _bad(path, f"host {host.name} is several hosts", "Write a [[host]] for each.")
    return hosts[0]


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            read = msgspec.toml.decode(file.read(_MAX_BYTES).decode("utf-8-sig"), type=_File)
    except OSError as error:
        raise _bad(path, f"it cannot be read: {error.strerror}", "Give a readable TOML file.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = "Write a table [[host]] with name and devices for each host, and [[link]] for links."
        raise _bad(path, str(error), remedy) from error
    if not read.host:
        raise _bad(path, "it has no host", "Write a table [[host]] for each host.")
    return read


def _bad(path: Path, what: str, remedy: str) -> UsageError:
    return UsageError(f"devices in {path}: {what}.", remedy=remedy, param="devices")

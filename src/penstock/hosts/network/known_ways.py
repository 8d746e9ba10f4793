"""Keeps the measured network paths between hosts in the head's state directory: a file for each pair.

A way (network path) is known by the names of its two interfaces, since addresses change more often than
cables. A pair of hosts is measured anew when the list of ways between them has changed.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.errors import UsageError
from penstock.hosts.network.link_measuring import StreamSpeed
from penstock.trust.private_files import make_private_directory, replace_private


class Wire(msgspec.Struct, frozen=True):
    """The names of the two interfaces, one of each host, between which a network path leads."""

    one: str
    other: str


class KnownWay(msgspec.Struct, frozen=True, kw_only=True):
    """A network path between two hosts with what was measured on it.

    Attributes:
        wire: the interfaces at its ends.
        speed: the measured speed; `out` is away from the first host.
        mtu: largest packet of the path, in bytes; 0: unknown.
        measured_at: when it was measured, in seconds since 1970.
    """

    wire: Wire
    speed: StreamSpeed
    mtu: int
    measured_at: float


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file: `wires` has all paths that were tried, and `ways` those that led somewhere."""

    wires: list[Wire]
    ways: list[KnownWay]


class KnownWays:
    """The files in which a head keeps what was measured on the ways between hosts.

    Args:
        directory: directory of the files, which is made if it does not exist.

    Raises:
        UsageError: the directory cannot be used, or other users may enter it.
    """

    def __init__(self, directory: Path) -> None:
        make_private_directory(directory)
        self._directory = directory

    def find(self, one: str, other: str, wires: Collection[Wire]) -> dict[Wire, KnownWay]:
        """Return the known network paths between two hosts, by their interfaces.

        The result is empty if other `wires` were tried when the paths were measured.
        """
        record = self._read(one, other)
        return {way.wire: way for way in record.ways} if set(record.wires) == set(wires) else {}

    def find_older(self, one: str, other: str) -> dict[Wire, KnownWay]:
        """Return the network paths between two hosts as measured last, by their interfaces.

        Interfaces that the hosts have now do not matter. The result is empty if nothing is known.
        """
        return {way.wire: way for way in self._read(one, other).ways}

    def keep(self, one: str, other: str, wires: Collection[Wire], ways: Collection[KnownWay]) -> None:
        """Write what was measured between two hosts, in place of what was known. A full disk is not an error.

        Args:
            wires: all network paths that were tried.
            ways: those that led somewhere, with what was measured.
        """
        record = _Record(wires=list(wires), ways=list(ways))
        with suppress(UsageError):
            replace_private(self._path(one, other), msgspec.json.encode(record))

    def _read(self, one: str, other: str) -> _Record:
        """Return the record of two hosts; an empty one if the file is missing or damaged."""
        try:
            return msgspec.json.decode(self._path(one, other).read_bytes(), type=_Record)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return _Record(wires=[], ways=[])

    def _path(self, one: str, other: str) -> Path:
        return self._directory / f"{one}+{other}.json"  # no name of a host has a "+"

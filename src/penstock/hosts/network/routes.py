"""The routes of streams: the host that accepts, and the addresses between which a stream runs.

`hosts.connections` asks for a route whenever it joins processes of two hosts. `way_search.WaySearch` knows
the routes that were measured; `DEFAULT_ROUTES` are for hosts between which nothing was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

import msgspec

from penstock.process.config import HostLink


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which a stream between two hosts is opened.

    Attributes:
        listener: name of the host that listens; the other one dials.
        listen_address: address at which the listening host listens; empty: it chooses one itself.
        dial_address: the same address in the form in which the other host dials it; empty: the listening
            host's invitation has it.
        dial_from: address from which the other host dials; empty: any.
    """

    listener: str
    listen_address: str = ""
    dial_address: str = ""
    dial_from: str = ""


class Routes(Protocol):
    """The interface of the knowledge about network paths between the hosts of an engine."""

    def between(self, accepting: str, joining: str) -> Route:
        """Return the route of a connection that the host `accepting` should accept if it can be reached."""
        ...

    def links(self) -> Sequence[HostLink]:
        """Return what was measured of the network paths in use, one for each pair of hosts."""
        ...

    def is_settled(self, names: Collection[str]) -> bool:
        """Return whether no search for a network path between these hosts goes on, unless for too long.

        Until it returns True, nothing should be connected between these hosts.
        """
        ...

    def review(self, occasion: Hashable, names: Collection[str]) -> bool:
        """Begin to check whether the network paths in use still work, and to choose others if not.

        Args:
            occasion: a key for the reason, such as an epoch; for each occasion the paths are checked once.
            names: names of the hosts between which paths are checked.

        Returns:
            Whether the check has ended; the caller calls again until it has.
        """
        ...


class DefaultRoutes:
    """The routes without measurements: the accepting host listens at its own address. Implements `Routes`."""

    def between(self, accepting: str, joining: str) -> Route:
        return Route(listener=accepting)

    def links(self) -> Sequence[HostLink]:
        return []

    def is_settled(self, names: Collection[str]) -> bool:
        """Return True, since no network path is searched for."""
        return True

    def review(self, occasion: Hashable, names: Collection[str]) -> bool:
        """Do nothing and return True, since there are no chosen network paths to check."""
        return True


DEFAULT_ROUTES = DefaultRoutes()

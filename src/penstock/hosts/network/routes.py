"""The routes of streams: the host that accepts, and the addresses between which a stream runs.

`hosts.connections` asks for a route whenever it joins processes of two hosts. `way_search.WaySearch` knows
the routes that were measured; `DEFAULT_ROUTES` stands for hosts between which nothing was.
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
        listen_address: of the listening host; empty: the one that it uses by itself.
        dial_address: the same one as the other host dials it; empty: as the invitation says.
        dial_from: address of the dialling host; empty: any.
    """

    listener: str
    listen_address: str = ""
    dial_address: str = ""
    dial_from: str = ""


class Routes(Protocol):
    """The interface of what is known about the ways between the hosts of an engine."""

    def between(self, accepting: str, joining: str) -> Route:
        """Return the route of a connection that the host `accepting` should accept if it can be reached."""
        ...

    def links(self) -> Sequence[HostLink]:
        """Return what was measured of the ways in use, one for each pair of hosts."""
        ...

    def is_settled(self, names: Collection[str]) -> bool:
        """Return whether no way between these hosts is being looked for, or has been for too long.

        Until then nothing should be connected there; after that what is known is used.
        """
        ...

    def review(self, occasion: Hashable, names: Collection[str]) -> bool:
        """Look whether the ways in use still lead to their hosts; choose others where they do not.

        Args:
            occasion: each is a reason to look once.
            names: of the hosts between which it is looked.

        Returns:
            Whether that is done: ask again until it is.
        """
        ...


class DefaultRoutes:
    """The routes without measurements: the accepting host listens at its own address. Implements `Routes`."""

    def between(self, accepting: str, joining: str) -> Route:
        return Route(listener=accepting)

    def links(self) -> Sequence[HostLink]:
        return []

    def is_settled(self, names: Collection[str]) -> bool:
        """Return True, since nothing is looked for."""
        return True

    def review(self, occasion: Hashable, names: Collection[str]) -> bool:
        """Return True, since nothing was chosen."""
        return True


DEFAULT_ROUTES = DefaultRoutes()

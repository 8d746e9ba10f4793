"""Connects processes by a kind of connection that the hosts at all of its ends offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.errors import PeerError
from penstock.hosts.network.routes import DEFAULT_ROUTES, Route, Routes
from penstock.hosts.rank_host import HostEnd, Need, Parties, RankHost


class Connection:
    """A connection of two or more processes for one epoch, as the supervisor holds it.

    For each process, its host holds an end (`HostEnd`). One process accepts, and the others join it. If the
    hosts are swapped (`connect`), the end of the accepting process dials, and the other one listens.
    """

    def __init__(self, accepted: HostEnd, joined: Sequence[HostEnd]) -> None:
        self._accepted = accepted
        self._joined = joined

    @property
    def accepting(self) -> Any:
        """The endpoint for the accepting process: a value by which it opens its end (`process.endpoints`)."""
        return self._accepted.endpoint

    @property
    def joining(self) -> list[Any]:
        """The endpoints for the joining processes, in the order in which `connect` was given them."""
        return [end.endpoint for end in self._joined]

    def delivered(self) -> None:
        """Record that all processes have their endpoints; hosts then close their own listening sockets.

        What ends the connection stays open.
        """
        for end in (self._accepted, *self._joined):
            end.delivered()

    def end(self) -> None:
        """End and close the connection: all processes that wait at it stop waiting."""
        for end in (*self._joined, self._accepted):
            end.end()

    def close(self) -> None:
        """Close what the hosts hold of the connection; processes that have their endpoints can go on."""
        for end in (*self._joined, self._accepted):
            end.close()


class Place(NamedTuple):
    """A process that is to be connected: its host, and its role, such as "rank-3" (`trust.peer_names`)."""

    host: RankHost
    role: str


def connect(
    need: Need, epoch: int, accepting: Place, *joining: Place, routes: Routes = DEFAULT_ROUTES
) -> Connection:
    """Make a connection between a process that accepts and others that join it, for one epoch.

    Args:
        need: what the connection is for, with the sizes of its buffers or messages.
        epoch: the epoch that the connection is for.
        accepting, joining: the processes to connect. Several join only if they are the ranks of a stage,
            which meet in shared memory (`MeetingNeed`).
        routes: say between which addresses of two hosts the connection runs, and which host listens. If the
            accepting host cannot be reached, the joining host listens. That changes neither which process
            sends nor which one receives.

    Raises:
        PeerError: the hosts have no kind of connection in common, or one of them is lost.
        OSError: descriptors or memory are short, perhaps only for now; no end is left open.
    """
    kind = _common_kind(need, accepting.host, [place.host for place in joining])
    route = routes.between(accepting.host.name, joining[0].host.name)
    if len(joining) == 1 and route.listener == joining[0].host.name != accepting.host.name:
        return _swapped(need, epoch, kind, accepting, joining[0], route)
    accepted = accepting.host.accept(kind, need, _parties(epoch, accepting, joining[0], route))
    joined: list[HostEnd] = []
    try:
        for place in joining:
            parties = _parties(epoch, place, accepting, route)
            joined.append(place.host.join(kind, need, parties, accepted.invitation))
    except BaseException:
        Connection(accepted, joined).close()
        raise
    return Connection(accepted, joined)


def _swapped(need: Need, epoch: int, kind: str, accepting: Place, joining: Place, route: Route) -> Connection:
    """Make a connection for which the host of the joining process listens."""
    listening = msgspec.structs.replace(_parties(epoch, joining, accepting, route), is_swapped=True)
    listens = joining.host.accept(kind, need, listening)
    dialling = msgspec.structs.replace(_parties(epoch, accepting, joining, route), is_swapped=True)
    try:
        dials = accepting.host.join(kind, need, dialling, listens.invitation)
    except BaseException:
        listens.close()
        raise
    return Connection(dials, [listens])


def _parties(epoch: int, own: Place, peer: Place, route: Route) -> Parties:
    parties = Parties(epoch=epoch, own=own.role, peer=peer.role, peer_host=peer.host.name)
    if own.host.name == peer.host.name:
        return parties
    if own.host.name == route.listener:
        return msgspec.structs.replace(parties, address=route.listen_address)
    return msgspec.structs.replace(parties, address=route.dial_from, peer_address=route.dial_address)


def _common_kind(need: Need, accepting: RankHost, joining: Sequence[RankHost]) -> str:
    """Return, of the kinds that all hosts offer, the one that the accepting host names first."""
    offers = {(accepting.name, host.name): accepting.offers(need, host.name) for host in joining}
    offers |= {(host.name, accepting.name): host.offers(need, accepting.name) for host in joining}
    first, *others = offers.values()
    kind = next((kind for kind in first if all(kind in kinds for kinds in others)), None)
    if kind is None:
        said = "; ".join(
            f"{host} offers {', '.join(kinds) or 'none'} to {peer}" for (host, peer), kinds in offers.items()
        )
        raise PeerError(
            f"no connection for a {type(need).__name__} is possible between {accepting.name} and "
            f"{', '.join(dict.fromkeys(host.name for host in joining))}: {said}.",
            remedy="Keep the ranks of a stage on one host, and run the same Penstock version on all hosts.",
        )
    return kind

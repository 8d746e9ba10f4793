"""Finds the best way (network path) between any two hosts, for the head, and tells the user which it is.

    both hosts listen     each dials the other on every way, which shows which ways lead there, and which
                          host can be reached
    one host measures     the ways that lead there, one after the other

What was measured is kept (`known_ways`). At the next start, and when a host is back, the ways are only tried.
They are measured anew when the interfaces of a host have changed. The fastest way is used (`link_choice`),
unless a user has fixed the address of a host. Warnings say when a faster way is idle, when the best way does
not work any more, and when a way has become much slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.errors import PenstockError
from penstock.hosts.network.interfaces import (
    AddressPair,
    HostAddress,
    pair_addresses,
    wires_of,
    without_detours,
)
from penstock.hosts.network.known_ways import KnownWay, KnownWays, Wire
from penstock.hosts.network.link_choice import (
    MeasuredPair,
    best_pair,
    degraded_warning,
    fallback_warning,
    idle_warning,
    speed_text,
)
from penstock.hosts.network.link_measuring import MEASURING_S
from penstock.hosts.network.routes import Route
from penstock.hosts.network.scout import Dead, Listening, Scout, Survey, Target, WayToTry
from penstock.process.config import HostLink

MOST_WAYS = 6  # between two hosts, the most promising ones
MOST_TARGETS = 3  # addresses that are tried for one way

Tell = Callable[[str], None]


def pairs_to_connect(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of hosts between which a pipeline may have connections: all pairs.

    Hosts whose stages are not neighbours at the start may become neighbours after a loss.
    """
    return list(combinations(names, 2))


class FoundWay(msgspec.Struct, frozen=True, kw_only=True):
    """A network path between two hosts that works; `own` in its pair is an address of the first host.

    Attributes:
        measured: the path and its speed.
        listeners: names of those of the two hosts that the other one can reach on this path.
    """

    measured: MeasuredPair
    listeners: tuple[str, ...]


def wires_between(own: Listening, other: Listening) -> list[list[AddressPair]]:
    """Return the network paths to try between two hosts, each as the pairs of addresses to dial.

    A path joins an interface of one host to one of the other, which may have several addresses each. The most
    promising paths and pairs come first, and only a few of them are returned. Nothing is dialled here.

    Args:
        own, other: where the two hosts listen.
    """
    addresses = ([place.address for place in one.places] for one in (own, other))
    groups = wires_of(without_detours(pair_addresses(*addresses)))
    return [group[:MOST_TARGETS] for group in groups[:MOST_WAYS]]


class _Ends(NamedTuple):
    """The two hosts of a way, in the order of their names, and where they listen."""

    scouts: tuple[Scout, Scout]
    listening: tuple[Listening, Listening]

    @property
    def names(self) -> tuple[str, str]:
        return self.scouts[0].peer.host, self.scouts[1].peer.host

    @property
    def wires(self) -> list[list[AddressPair]]:
        """The ways that may lead from the first to the second, each as pairs of addresses."""
        return wires_between(*self.listening)

    def port(self, number: int, address: HostAddress) -> int:
        """Return the port at which the first (0) or second (1) host listens at an address of its own."""
        return next(place.port for place in self.listening[number].places if place.address == address)


class PathFinder:
    """Finds the best network path between two hosts by their scouts, and knows which paths are in use.

    Args:
        directory: where what was measured is kept.
        tell: shows the user a line of text.
        warn: shows the user a warning; each is given once.

    Raises:
        UsageError: the directory cannot be used.
    """

    def __init__(self, directory: Path, tell: Tell, warn: Tell) -> None:
        self._known = KnownWays(directory)
        self._tell = tell
        self._warn_user = warn
        self._pairs: dict[frozenset[str], tuple[Scout, Scout]] = {}
        self._used: dict[frozenset[str], FoundWay] = {}
        self._said: set[str] = set()

    def find(self, one: Scout, other: Scout) -> None:
        """Find the network paths between two hosts, measure them if need be, and choose the best.

        The choice is reported to the user. So are errors; none is raised.
        """
        scouts = (one, other) if one.peer.host < other.peer.host else (other, one)
        names = frozenset((one.peer.host, other.peer.host))
        self._pairs[names] = scouts
        try:
            self._find(scouts, names)
        except (PenstockError, OSError) as error:
            why = error.message if isinstance(error, PenstockError) else f"{error.strerror or error}."
            self._tell(f"the paths between {_both(scouts)} were not searched: {why}")

    def review(self, names: Collection[str]) -> None:
        """Repeat `find` for those pairs of these hosts for which it was called before."""
        for pair, scouts in list(self._pairs.items()):
            if pair.issubset(names):
                self.find(*scouts)

    def between(self, accepting: str, joining: str) -> Route:
        """Return the route of a connection between two hosts, over the network path in use if there is one.

        If the accepting host cannot be reached, the other host listens. Implements `Routes.between`.
        """
        names = frozenset((accepting, joining))
        way = self._used.get(names)
        if way is None:
            return Route(listener=accepting)
        listener = accepting if accepting in way.listeners else joining
        first = min(accepting, joining)
        pair = way.measured.pair if listener != first else way.measured.pair.flipped  # seen by the dialler
        return Route(
            listener=listener,
            listen_address=pair.other.bind_address,
            dial_address=pair.dial_address,
            dial_from=pair.bind_address,
        )

    def links(self) -> Sequence[HostLink]:
        """Return what was measured of the network paths in use, one for each pair of hosts.

        Implements `Routes.links`.
        """
        return [
            _link(min(names), max(names), way.measured)
            for names, way in sorted(self._used.items(), key=lambda item: sorted(item[0]))
        ]

    def _find(self, scouts: tuple[Scout, Scout], names: frozenset[str]) -> None:
        try:
            ends = _Ends(scouts, (scouts[0].listen(scouts[1].peer), scouts[1].listen(scouts[0].peer)))
            ways, dead = self._ways(ends)
        finally:
            for scout in scouts:
                scout.rest()
        before = [self._used[names]] if names in self._used else []
        allowed = _allowed(ends, ways)
        if not allowed:
            self._used.pop(names, None)
            self._say(_nothing(ends, ways, dead))
            return
        used = _best(allowed)
        self._used[names] = used
        if [_wire(way.measured.pair) for way in before] != [_wire(used.measured.pair)]:
            self._tell(_line(ends, used))
        self._say(idle_warning(used.measured, [way.measured for way in ways]))
        self._say(self._fallback(ends, used, before, dead))
        self._say(_one_way_warning(ends, used))

    def _ways(self, ends: _Ends) -> tuple[list[FoundWay], list[Dead]]:
        """Return the ways that lead to the other host, with known or new speeds, and those that do not."""
        groups = ends.wires
        wires = [_wire(group[0]) for group in groups]
        ways, dead = _tried(ends, groups)
        known = self._known.find(*ends.names, wires)
        if all(_wire(way.measured.pair) in known for way in ways):
            return [_as_known(way, known) for way in ways], dead
        older = self._known.find_older(*ends.names)
        ways = _measured_anew(ends, ways)
        self._known.keep(*ends.names, wires, [_known(way) for way in ways])
        for way in ways:
            self._compare(way, older)
        return ways, dead

    def _compare(self, way: FoundWay, older: dict[Wire, KnownWay]) -> None:
        """Warn if a way has become much slower since it was measured last."""
        before = older.get(_wire(way.measured.pair))
        if before is not None:
            measured = msgspec.structs.replace(way.measured, speed=before.speed)
            self._say(degraded_warning(measured, way.measured.speed.bytes_per_s))

    def _fallback(self, ends: _Ends, used: FoundWay, before: Sequence[FoundWay], dead: Sequence[Dead]) -> str:
        """Return a warning if a better way than the used one has gone or leads nowhere now; else ""."""
        known = self._known.find_older(*ends.names)
        wires = {_wire(group[0]) for group in ends.wires}
        gone = [
            (_measured(known[_wire(one.pair)], one.pair), one.why) for one in dead if _wire(one.pair) in known
        ]
        gone += [
            (way.measured, "an interface has lost its address or carrier")
            for way in before
            if _wire(way.measured.pair) not in wires
        ]
        wanted = best_pair([used.measured, *(measured for measured, _ in gone)])
        why = next((why for measured, why in gone if measured is wanted), "")
        return fallback_warning(wanted, used.measured, why) if why else ""

    def _say(self, warning: str) -> None:
        if warning and warning not in self._said:
            self._said.add(warning)
            self._warn_user(warning)


def _tried(ends: _Ends, groups: Sequence[Sequence[AddressPair]]) -> tuple[list[FoundWay], list[Dead]]:
    """Try all ways in both directions without measuring; return those that lead somewhere, and the rest."""
    one, other = ends.scouts
    there = other.survey(one.peer, [_back(ends, group, 0.0) for group in groups])
    back = one.survey(other.peer, [_forth(ends, group, 0.0) for group in groups])
    from_other = {_wire(measured.pair.flipped): measured.flipped for measured in there.open}
    from_one = {_wire(measured.pair): measured for measured in back.open}
    reached = [(ends.names[0], from_other), (ends.names[1], from_one)]
    ways = []
    for wire in (_wire(group[0]) for group in groups):
        measured = from_other.get(wire) or from_one.get(wire)
        if measured is not None:
            listeners = tuple(name for name, found in reached if wire in found)
            ways.append(FoundWay(measured=measured, listeners=listeners))
    return ways, _dead_both_ways(there, back)


def _measured_anew(ends: _Ends, ways: Sequence[FoundWay]) -> list[FoundWay]:
    """Measure ways that lead somewhere, one after the other; one that carries next to nothing is left out."""
    one, other = ends.scouts
    seconds = MEASURING_S / max(1, len(ways))
    to_one = [way for way in ways if ends.names[0] in way.listeners]
    to_other = [way for way in ways if ends.names[0] not in way.listeners]
    there = other.survey(one.peer, [_back(ends, [way.measured.pair], seconds) for way in to_one])
    back = one.survey(other.peer, [_forth(ends, [way.measured.pair], seconds) for way in to_other])
    found = {_wire(measured.pair): measured for measured in back.open}
    found |= {_wire(measured.pair.flipped): measured.flipped for measured in there.open}
    return [
        msgspec.structs.replace(way, measured=found[_wire(way.measured.pair)])
        for way in ways
        if _wire(way.measured.pair) in found
    ]


def _one_way_warning(ends: _Ends, used: FoundWay) -> str:
    """Return a warning if one of the two hosts cannot be reached by the other; else an empty text."""
    unreached = [name for name in ends.names if name not in used.listeners]
    if not unreached:
        return ""
    return (
        f"{unreached[0]} cannot be reached on this path, so it opens the links itself. To allow links to "
        "it, open its --link-ports in its firewall."
    )


def _dead_both_ways(there: Survey, back: Survey) -> list[Dead]:
    """Return the ways that lead neither there nor back, as the first host sees them."""
    of_other = {_wire(one.pair.flipped) for one in there.dead}
    return [one for one in back.dead if _wire(one.pair) in of_other]


def _back(ends: _Ends, group: Sequence[AddressPair], seconds: float) -> WayToTry:
    """Return a way as the second host dials it."""
    targets = [Target(pair.flipped, ends.port(0, pair.own)) for pair in group]
    return WayToTry(targets=targets, seconds=seconds)


def _forth(ends: _Ends, group: Sequence[AddressPair], seconds: float) -> WayToTry:
    """Return a way as the first host dials it."""
    targets = [Target(pair, ends.port(1, pair.other)) for pair in group]
    return WayToTry(targets=targets, seconds=seconds)


def _allowed(ends: _Ends, ways: Sequence[FoundWay]) -> list[FoundWay]:
    """Return the ways that are over the fixed addresses of both hosts; a host may have fixed none."""
    own, other = (listening.only for listening in ends.listening)
    return [
        way
        for way in ways
        if own in ("", way.measured.pair.own.address) and other in ("", way.measured.pair.other.address)
    ]


def _best(ways: Sequence[FoundWay]) -> FoundWay:
    best = best_pair([way.measured for way in ways])
    return next(way for way in ways if way.measured is best)


def _wire(pair: AddressPair) -> Wire:
    return Wire(pair.own.interface, pair.other.interface)


def _known(way: FoundWay) -> KnownWay:
    measured = way.measured
    return KnownWay(
        wire=_wire(measured.pair), speed=measured.speed, mtu=measured.mtu, measured_at=measured.measured_at
    )


def _measured(known: KnownWay, pair: AddressPair) -> MeasuredPair:
    return MeasuredPair(pair=pair, speed=known.speed, mtu=known.mtu, measured_at=known.measured_at)


def _as_known(way: FoundWay, known: dict[Wire, KnownWay]) -> FoundWay:
    """Return the way with the speed that was measured earlier; trying it has shown no useful speed."""
    pair = way.measured.pair
    return msgspec.structs.replace(way, measured=_measured(known[_wire(pair)], pair))


def _link(one: str, other: str, measured: MeasuredPair) -> HostLink:
    return HostLink(
        hosts=(one, other),
        interfaces=(measured.pair.own.interface, measured.pair.other.interface),
        round_trip_s=measured.speed.round_trip_s,
        bytes_per_s_out=measured.speed.bytes_per_s_out,
        bytes_per_s_in=measured.speed.bytes_per_s_in,
    )


def _line(ends: _Ends, way: FoundWay) -> str:
    speed = way.measured.speed
    return (
        f"links between {ends.names[0]} and {ends.names[1]} use {way.measured.pair}: "
        f"{speed_text(speed.bytes_per_s_out)} there, {speed_text(speed.bytes_per_s_in)} back, round trip "
        f"{1e3 * speed.round_trip_s:.2f} ms"
    )


def _nothing(ends: _Ends, ways: Sequence[FoundWay], dead: Sequence[Dead]) -> str:
    """Return the warning that no allowed way leads from either host to the other."""
    tried = "; ".join(f"{one.pair}: {one.why}" for one in dead) or (
        "they have no addresses in a common network"
    )
    what = f"no path for links between {ends.names[0]} and {ends.names[1]} was found ({tried})."
    if ways:
        return f"{what} --address rules out {_best(ways).measured}. Leave it out, or give another address."
    return f"{what} Open the --link-ports of at least one of them in its firewall."


def _both(scouts: Sequence[Scout]) -> str:
    return " and ".join(scout.peer.host for scout in scouts)

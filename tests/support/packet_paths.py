"""Decides what a bad network does to each packet: when it arrives, or that it is lost.

Everything here is pure: times come as arguments, and a decision depends on the seed and the number of the
packet in its direction alone. `packet_shaper` moves real packets by it, and `network` starts that program.

A packet from host A to host B passes the link of A outwards and then the link of B inwards; each of these
two directions keeps the packet for `delay_s`, and `jitter_s` times a number in [0, 1) more. A later packet
never overtakes an earlier one, as on one path of a real network, unless `reordering` picks it: then it does
not wait at all. Numbers in [0, 1) are the upper 53 bits of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014), so that two runs with one seed treat packet n of a
direction alike, at whatever time it comes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_LOSS, _JITTER, _REORDERING = range(3)  # what a number is drawn for


def mixed(value: int) -> int:
    """Return the next number of SplitMix64 after the state `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How one direction of a link behaves.

    Attributes:
        delay_s: what each packet waits.
        jitter_s: what a packet waits at most besides.
        loss: the share of packets that is lost.
        reordering: the share of packets that does not wait, and so overtakes others.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    reordering: float = 0.0


@dataclass(slots=True)
class Counts:
    """Packets of one direction so far; `came` counts those that were lost as well."""

    came: int = 0
    lost: int = 0


class Direction:
    """One direction of a link: a queue that packets leave when their time has come.

    Args:
        seed: two directions with one seed lose the same packets.
    """

    def __init__(self, seed: int) -> None:
        self.conditions = Conditions()
        self.counts = Counts()
        self._seed = mixed(seed)
        self._order = itertools.count()
        self._queue: list[tuple[float, int, bytes]] = []
        self._latest = -math.inf  # when the last packet that keeps the order leaves
        self._held_until = -math.inf
        self._is_cut = False

    def enter(self, packet: bytes, now: float) -> None:
        """Take a packet, or lose it."""
        number = self.counts.came
        self.counts.came += 1
        conditions = self.conditions
        if self._is_cut or (conditions.loss and self._draw(number, _LOSS) < conditions.loss):
            self.counts.lost += 1
            return
        if conditions.reordering and self._draw(number, _REORDERING) < conditions.reordering:
            due = now
        else:
            jitter = conditions.jitter_s * self._draw(number, _JITTER) if conditions.jitter_s else 0.0
            due = self._latest = max(self._latest, now + conditions.delay_s + jitter)
        heapq.heappush(self._queue, (due, next(self._order), packet))

    def due(self) -> float:
        """Return when the next packet leaves; infinity where there is none."""
        return max(self._queue[0][0], self._held_until) if self._queue else math.inf

    def leave(self, now: float) -> list[tuple[float, bytes]]:
        """Remove the packets whose time has come, each with that time, in their order."""
        left = []
        while self._queue and self.due() <= now:
            due, _, packet = heapq.heappop(self._queue)
            left.append((max(due, self._held_until), packet))
        return left

    def hold(self, until: float) -> None:
        """Let nothing leave before `until`; nothing is lost, and all of it leaves then."""
        self._held_until = until

    def cut(self) -> None:
        """Lose all packets, those under way too, until `mend`."""
        self.counts.lost += len(self._queue)
        self._queue.clear()
        self._is_cut = True

    def mend(self) -> None:
        """Take packets again after a `cut`."""
        self._is_cut = False

    def _draw(self, number: int, purpose: int) -> float:
        return (mixed(self._seed ^ (number * 4 + purpose)) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one host with the others: packets go `out` of the host, and `into` it."""

    out: Direction
    into: Direction

    def directions(self, which: str) -> tuple[Direction, ...]:
        """Return the directions that are meant by "out", "in" or "both"."""
        return {"out": (self.out,), "in": (self.into,), "both": (self.out, self.into)}[which]


class Paths:
    """All links of one network, and the packets on them.

    Args:
        seed: decides on losses, jitter and reordering of all links, each in its own way.
        places: of each address, packed as it stands in a packet, the number of its host.
        num_hosts: how many links there are.
    """

    def __init__(self, seed: int, places: Mapping[bytes, int], num_hosts: int) -> None:
        numbers = itertools.count(mixed(seed))
        self.links: Sequence[Link] = [
            Link(Direction(next(numbers)), Direction(next(numbers))) for _ in range(num_hosts)
        ]
        self._places = places

    def enter(self, host: int, packet: bytes, now: float) -> None:
        """Take a packet that `host` sends; one to nobody we know is not counted either."""
        if _destination(packet) in self._places:
            self.links[host].out.enter(packet, now)

    def leave(self, now: float) -> list[tuple[int, bytes]]:
        """Move packets on, and return those that arrive, each with the number of its host."""
        for link in self.links:
            for due, packet in link.out.leave(now):
                self.links[self._places[_destination(packet)]].into.enter(packet, due)
        return [(host, packet) for host, link in enumerate(self.links) for _, packet in link.into.leave(now)]

    def due(self) -> float:
        """Return when something moves next; infinity where nothing is under way."""
        return min(min(link.out.due(), link.into.due()) for link in self.links)


def _destination(packet: bytes) -> bytes:
    """Return the address, packed, that an IPv4 or IPv6 packet goes to."""
    return packet[24:40] if packet[0] >> 4 == 6 else packet[16:20]

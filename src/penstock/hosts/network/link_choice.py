"""Chooses the way (network path) between two hosts by measurements, and warns if a faster one is not used.

Bytes per second in the slower direction decide, since hidden states have to cross. Ways with at least
`_ALIKE` times the speed of the fastest count as equally fast. Of those, a cable is chosen before Wi-Fi, Wi-Fi
before a tunnel, and so on; of ways over one medium, the one with the shortest round trip. So Wi-Fi is chosen
beside a cable only if it is clearly faster. All functions here are pure; `known_ways` keeps measured speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.bounds import Seconds, Small
from penstock.hosts.network.interfaces import AddressPair, Medium
from penstock.hosts.network.link_measuring import StreamSpeed

DEGRADED_SHARE = 0.5
_ALIKE = 0.9
_IDLE_FACTOR = 1.25


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of addresses of two hosts with what was measured between them.

    Attributes:
        mtu: largest packet of the network path (`interfaces.path_mtu`); 0: unknown.
        measured_at: when it was measured, in seconds since 1970.
    """

    pair: AddressPair
    speed: StreamSpeed
    mtu: Small = 0
    measured_at: Seconds = 0.0

    @property
    def flipped(self) -> MeasuredPair:
        """The pair as the other host would have measured it."""
        return msgspec.structs.replace(self, pair=self.pair.flipped, speed=self.speed.flipped)

    @property
    def medium(self) -> Medium:
        """The less promising medium of the two ends."""
        return max(self.pair.own.medium, self.pair.other.medium)

    def __str__(self) -> str:
        """Return addresses and speed, as messages name them."""
        return f"{self.pair}, {speed_text(self.speed.bytes_per_s)}"


def best_pair(measured: Sequence[MeasuredPair]) -> MeasuredPair:
    """Return the pair that is to be used, of at least one measured pair.

    Of the fastest pairs, it is the one with the best medium, and then with the shortest round trip.
    """
    enough = _ALIKE * max(one.speed.bytes_per_s for one in measured)
    alike = [one for one in measured if one.speed.bytes_per_s >= enough]
    return min(alike, key=lambda one: (one.medium, one.speed.round_trip_s))


def idle_warning(used: MeasuredPair, measured: Sequence[MeasuredPair]) -> str:
    """Return a warning if a pair that is much faster than the used one is idle; else an empty text."""
    best = best_pair([used, *measured])
    if best.speed.bytes_per_s < _IDLE_FACTOR * used.speed.bytes_per_s:
        return ""
    return (
        f"A faster path to the other host is idle: {best}. In use: {used}. To use the faster path, leave "
        "--address out, or give one of its addresses."
    )


def fallback_warning(wanted: MeasuredPair, used: MeasuredPair, reason: str) -> str:
    """Return the warning that the best network path fails, for this reason, and another one is used."""
    return (
        f"The best path to the other host fails ({reason.rstrip('.')}): {wanted}. In use: {used}. Check "
        f"cable, switch and firewall of {wanted.pair.own.interface}."
    )


def degraded_warning(measured: MeasuredPair, bytes_per_s: float) -> str:
    """Return a warning if a network path has become much slower than measured; else an empty text.

    Args:
        measured: the path, as it was measured before.
        bytes_per_s: its speed now.
    """
    before = measured.speed.bytes_per_s
    if bytes_per_s >= DEGRADED_SHARE * before:
        return ""
    return (
        f"The path from {measured.pair} carries {speed_text(bytes_per_s)} instead of the measured "
        f"{speed_text(before)}. Look for other traffic, a damaged cable or a weak signal."
    )


def speed_text(bytes_per_s: float) -> str:
    """Return a speed as text in Mbit/s or Gbit/s, the units in which networks are sold."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"

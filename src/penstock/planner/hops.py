"""The time for which a typical request occupies a link between two hosts.

Links within a host are part of the steps that are timed (`planner.step_timing`). A link between hosts is
another matter: its bytes are sent beside the computing, and what bounds it is the measured wire. All tokens
of a request cross it, however the layers are split: it bounds the speed of every split, and changes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.pipeline.links.frame import NUM_CARRIED
from penstock.planner.mix import Mix
from penstock.process.config import HostLink, RankConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A link from one stage to the next that leaves its host.

    Attributes:
        stage: the stage that sends.
        sender, receiver: names of the two hosts.
        token_bytes: bytes that cross for each token.
        bytes_per_s, round_trip_s: figures of the wire, as measured.
    """

    stage: int
    sender: str
    receiver: str
    token_bytes: int
    bytes_per_s: float
    round_trip_s: float

    def request_s(self, mix: Mix) -> float:
        """Return the seconds for which a typical request occupies the wire."""
        return (mix.prompt + mix.output) * self.token_bytes / max(self.bytes_per_s, 1.0)


def hops_between(
    stages: Sequence[RankConfig], links: Sequence[HostLink], hidden_size: int, item_bytes: int
) -> list[Hop]:
    """Return the hops of a pipeline whose wires were measured.

    Args:
        stages: the first rank of each.
        links: links between hosts, as measured.
        item_bytes: bytes of a number that crosses.
    """
    by_hosts = {frozenset(link.hosts): link for link in links}
    hops = []
    for one, other in pairwise(stages):
        link = by_hosts.get(frozenset((one.host, other.host)))
        if link is None or one.host == other.host:
            continue
        hops.append(
            Hop(
                stage=one.stage,
                sender=one.host,
                receiver=other.host,
                token_bytes=NUM_CARRIED * hidden_size * item_bytes,
                bytes_per_s=link.bytes_per_s(one.host),
                round_trip_s=link.round_trip_s,
            )
        )
    return hops

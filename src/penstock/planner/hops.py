"""The time for which a typical request occupies a link between two hosts.

Links within a host are part of the steps that are timed (`planner.step_timing`). A link between hosts carries
its bytes while stages compute, and is as fast as it was measured. However the layers are split, all tokens of
a request cross it. So it limits the speed of all splits alike, and does not decide which split is best.
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
    """A link from one stage to the next, which is on another host.

    Attributes:
        stage: number of the stage that sends.
        sender, receiver: names of the hosts of the two stages.
        token_bytes: bytes that cross for each token.
        bytes_per_s, round_trip_s: the measured figures of the link.
    """

    stage: int
    sender: str
    receiver: str
    token_bytes: int
    bytes_per_s: float
    round_trip_s: float

    def request_s(self, mix: Mix) -> float:
        """Return the seconds for which a typical request occupies the link."""
        return (mix.prompt + mix.output) * self.token_bytes / max(self.bytes_per_s, 1.0)


def hops_between(
    stages: Sequence[RankConfig], links: Sequence[HostLink], hidden_size: int, item_bytes: int
) -> list[Hop]:
    """Return the hops of a pipeline between hosts whose link was measured.

    Args:
        stages: the config of the first rank of each stage.
        links: links between hosts, as measured.
        item_bytes: bytes of one number of the hidden states.
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

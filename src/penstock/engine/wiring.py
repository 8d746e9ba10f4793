"""Who is connected to whom: rings between stages, sockets between stages, core and front.

All of it is made by the supervisor before the first child starts and has no name; a child gets the
descriptors of its own ends and no others.

    front ──client── core ══plan[s]══ stage s         stage s ──ring[s]──▶ stage s + 1
                                                      last stage ══token[s]══ every earlier stage s
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import CoreProcessConfig, LinkHandle, RankProcessConfig
from penstock.engine.endpoints import Endpoint
from penstock.engine.launch import LaunchPlan
from penstock.pipeline.ring_memory import close_handle, create_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnds:
    """What a rank is told, and the descriptors that it must inherit."""

    config: RankProcessConfig
    inherit: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreEnds:
    """What the core is told, and the descriptors that it must inherit."""

    config: CoreProcessConfig
    inherit: list[int]


class Wiring:
    """The connections of one pipeline."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        num_links = plan.num_stages - 1
        self.client = Endpoint()
        self._plan_endpoints = [Endpoint() for _ in plan.ranks]
        self._token_endpoints = [Endpoint() for _ in range(num_links)]
        frames = plan.ranks[0].link_frames
        self._rings = [create_ring(plan.frame_bytes, frames) for _ in range(num_links)]

    def core(self) -> CoreEnds:
        config = CoreProcessConfig(
            core=self._plan.core,
            parent_pid=os.getpid(),
            plan_addresses=[endpoint.bind_address for endpoint in self._plan_endpoints],
            client_address=self.client.bind_address,
        )
        listeners = [endpoint.listen_fd for endpoint in (*self._plan_endpoints, self.client)]
        return CoreEnds(config=config, inherit=listeners)

    def rank(self, stage: int) -> RankEnds:
        incoming = self._rings[stage - 1] if stage > 0 else None
        outgoing = self._rings[stage] if stage < len(self._rings) else None
        addresses, descriptors = self._token_ends(stage)
        config = RankProcessConfig(
            rank=self._plan.ranks[stage],
            parent_pid=os.getpid(),
            plan_address=self._plan_endpoints[stage].connect_address,
            token_addresses=addresses,
            incoming=incoming,
            outgoing=outgoing,
        )
        rings = [fd for ring in (incoming, outgoing) if ring is not None for fd in _descriptors(ring)]
        inherit = [self._plan_endpoints[stage].handle_fd, *descriptors, *rings]
        return RankEnds(config=config, inherit=inherit)

    def close_children_ends(self) -> None:
        """Once all children have been started: keep only what new clients need."""
        self.client.close_listener()
        for endpoint in (*self._plan_endpoints, *self._token_endpoints):
            endpoint.close()
        rings, self._rings = self._rings, []
        for ring in rings:
            close_handle(ring)

    def close(self) -> None:
        self.close_children_ends()
        self.client.close()

    def _token_ends(self, stage: int) -> tuple[list[str], Sequence[int]]:
        """(addresses, descriptors) of a stage's token paths: the last stage binds, the others connect."""
        endpoints = self._token_endpoints
        if stage == len(endpoints):
            return [endpoint.bind_address for endpoint in endpoints], [e.listen_fd for e in endpoints]
        return [endpoints[stage].connect_address], [endpoints[stage].handle_fd]


def _descriptors(ring: LinkHandle) -> tuple[int, int, int]:
    return ring.memory_fd, ring.data_fd, ring.space_fd

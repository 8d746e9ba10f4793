"""Who is connected to whom: rings between stages, sockets between stages, core and front.

All of it is made by the supervisor before the first child starts and has no name; a child gets the
descriptors of its own ends and no others.

    front ──client── core ══plan[s]══ stage s         stage s ──link[s]──▶ stage s + 1
               last stage ──results──▶ core           last stage ──tokens[s]──▶ every earlier stage s

`══` is a socket, `──▶` a ring.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.config import CoreProcessConfig, LinkHandle, RankProcessConfig
from penstock.engine.endpoints import Endpoint
from penstock.engine.launch import LaunchPlan
from penstock.pipeline.ring_channel import create_channel_ring
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
        frames = plan.ranks[0].link_frames
        self._links = [create_ring(plan.frame_bytes, frames) for _ in range(num_links)]
        self._tokens = [self._channel_ring() for _ in range(num_links)]
        self._results = self._channel_ring()
        self._rings = [*self._links, *self._tokens, self._results]

    def _channel_ring(self) -> LinkHandle:
        """Holds what all steps in flight sample, and those of the trip before, which no plan has consumed."""
        rank = self._plan.ranks[0]
        return create_channel_ring(2 * rank.depth, rank.max_num_seqs)

    def core(self) -> CoreEnds:
        config = CoreProcessConfig(
            core=self._plan.core,
            parent_pid=os.getpid(),
            plan_addresses=[endpoint.bind_address for endpoint in self._plan_endpoints],
            results=self._results,
            client_address=self.client.bind_address,
        )
        listeners = [endpoint.listen_fd for endpoint in (*self._plan_endpoints, self.client)]
        return CoreEnds(config=config, inherit=[*listeners, *self._results.fds])

    def rank(self, stage: int) -> RankEnds:
        is_last = stage == len(self._links)
        incoming = self._links[stage - 1] if stage > 0 else None
        outgoing = None if is_last else self._links[stage]
        tokens = self._tokens if is_last else [self._tokens[stage]]
        results = self._results if is_last else None
        config = RankProcessConfig(
            rank=self._plan.ranks[stage],
            parent_pid=os.getpid(),
            plan_address=self._plan_endpoints[stage].connect_address,
            tokens=tokens,
            results=results,
            incoming=incoming,
            outgoing=outgoing,
        )
        rings = [ring for ring in (incoming, outgoing, results, *tokens) if ring is not None]
        descriptors = [fd for ring in rings for fd in ring.fds]
        return RankEnds(config=config, inherit=[self._plan_endpoints[stage].handle_fd, *descriptors])

    def close_children_ends(self) -> None:
        """Once all children have been started: keep only what new clients need."""
        self.client.close_listener()
        for endpoint in self._plan_endpoints:
            endpoint.close()
        rings, self._rings = self._rings, []
        for ring in rings:
            close_handle(ring)

    def close(self) -> None:
        self.close_children_ends()
        self.client.close()

"""Who is connected to whom: rings between stages, sockets between stages and core.

All of it is made by the supervisor, for one epoch, and has no name; a child gets the descriptors of its own
ends and no others (`executor.control`).

    core ══plan[s]══ stage s                          stage s ──link[s]──▶ stage s + 1
               last stage ──results──▶ core           last stage ──tokens[s]──▶ every earlier stage s

`══` is a socket, `──▶` a ring.
"""

from __future__ import annotations

from penstock.config import CoreEnds, LinkHandle, RankEnds
from penstock.engine.endpoints import Endpoint
from penstock.engine.launch import LaunchPlan
from penstock.pipeline.ring_channel import create_channel_ring
from penstock.pipeline.ring_memory import close_handle, create_ring, end_ring


class Wiring:
    """The connections of one pipeline in one epoch."""

    def __init__(self, plan: LaunchPlan, epoch: int = 0) -> None:
        self._epoch = epoch
        self._plan_endpoints: list[Endpoint] = []
        self._rings: list[LinkHandle] = []
        first, num_links = plan.ranks[0], plan.num_stages - 1
        try:
            for _ in plan.ranks:
                self._plan_endpoints.append(Endpoint())
            for _ in range(num_links):
                self._rings.append(create_ring(plan.frame_bytes, first.link_frames))
            for _ in range(num_links + 1):
                # What all steps in flight sample, and those of the trip before, which no plan has consumed.
                self._rings.append(create_channel_ring(2 * first.depth, first.max_num_seqs))
        except BaseException:  # no more descriptors: those made so far are for whoever tries again
            self.close()
            raise
        self._links, self._tokens = self._rings[:num_links], self._rings[num_links:-1]
        self._results = self._rings[-1]

    def core(self) -> CoreEnds:
        """What the core is told."""
        listeners = [endpoint.listen_fd for endpoint in self._plan_endpoints]
        return CoreEnds(epoch=self._epoch, plan_fds=listeners, results=self._results)

    def rank(self, stage: int) -> RankEnds:
        """What a rank is told."""
        is_last = stage == len(self._links)
        return RankEnds(
            epoch=self._epoch,
            plan_fd=self._plan_endpoints[stage].handle_fd,
            tokens=self._tokens if is_last else [self._tokens[stage]],
            results=self._results if is_last else None,
            incoming=self._links[stage - 1] if stage > 0 else None,
            outgoing=None if is_last else self._links[stage],
        )

    def close_sockets(self) -> None:
        """Once all children have been told: a dead binder must refuse connections, not queue them."""
        for endpoint in self._plan_endpoints:
            endpoint.close()

    def end(self) -> None:
        """The epoch is over: whoever waits at a ring stops."""
        for ring in self._rings:
            end_ring(ring)
        self.close()

    def close(self) -> None:
        """Let go of everything; what children have goes on. May be called twice."""
        self.close_sockets()
        rings, self._rings = self._rings, []
        for ring in rings:
            close_handle(ring)

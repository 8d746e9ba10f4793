"""Who is connected to whom: rings between ranks, sockets between ranks and core, memory that a stage shares.

All of it is made by the supervisor, for one epoch, and has no name; a child gets the descriptors of its own
ends and no others (`process.control`).

    core ══plan══ every rank                       rank ──link──▶ each of its receivers in the next stage
             output rank ──results──▶ core         output rank ──tokens──▶ every rank of earlier stages
    ranks of one stage share a meeting

`══` is a socket, `──▶` a ring.
"""

from __future__ import annotations

from penstock.distributed.meeting import close_meeting, create_meeting, end_meeting
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.hosts.local_socket import LocalSocket
from penstock.pipeline.links.ring_channel import create_channel_ring
from penstock.pipeline.links.ring_memory import close_handle, create_ring, end_ring
from penstock.process.config import RankConfig
from penstock.process.endpoints import (
    ChannelEndpoint,
    CoreEndpoints,
    MeetingHandle,
    RankEndpoints,
    RingHandle,
    SocketHandle,
    SocketListener,
)

RankAddress = tuple[int, int]  # stage, rank in the stage


class Wiring:
    """The connections of one pipeline in one epoch."""

    def __init__(self, plan: LaunchPlan, epoch: int = 0) -> None:
        self._ranks = {(rank.stage, rank.tp_rank): rank for rank in plan.ranks}
        self._epoch = epoch
        self._plan_endpoints: dict[RankAddress, LocalSocket] = {}
        self._links: dict[tuple[RankAddress, RankAddress], RingHandle] = {}
        self._tokens: dict[RankAddress, RingHandle] = {}
        self._results: list[RingHandle] = []
        self._meetings: dict[int, MeetingHandle] = {}
        try:
            self._create(plan)
        except BaseException:  # no more descriptors: those made so far are for whoever tries again
            self.close()
            raise

    def _create(self, plan: LaunchPlan) -> None:
        for place, rank in self._ranks.items():
            self._plan_endpoints[place] = LocalSocket()
            for receiver in _receivers(rank):
                self._links[place, receiver] = create_ring(plan.frame_bytes, rank.link_frames)
            if rank.is_output:
                self._results.append(_samples_ring(rank))
            if not rank.is_last:
                self._tokens[place] = _samples_ring(rank)
            if rank.tp_size > 1 and rank.stage not in self._meetings:
                self._meetings[rank.stage] = create_meeting(rank.tp_size)

    @property
    def _rings(self) -> list[RingHandle]:
        return [*self._links.values(), *self._tokens.values(), *self._results]

    def core(self) -> CoreEndpoints:
        """What the core is told."""
        listeners: list[ChannelEndpoint] = [
            SocketListener(listen_fd=at.listen_fd) for at in self._plan_endpoints.values()
        ]
        stages = [stage for stage, _ in self._ranks]
        return CoreEndpoints(epoch=self._epoch, plans=listeners, stages=stages, results=self._results[0])

    def rank(self, stage: int, tp_rank: int = 0) -> RankEndpoints:
        """What a rank is told."""
        place = stage, tp_rank
        rank = self._ranks[place]
        every_token: list[ChannelEndpoint] = list(self._tokens.values())
        own_token: list[ChannelEndpoint] = [] if rank.is_last else [self._tokens[place]]
        incoming = [link for (_, receiver), link in self._links.items() if receiver == place]
        return RankEndpoints(
            epoch=self._epoch,
            plans=SocketHandle(handle_fd=self._plan_endpoints[place].handle_fd),
            tokens=every_token if rank.is_output else own_token,
            results=self._results[0] if rank.is_output else None,
            incoming=incoming[0] if incoming else None,
            outgoing=[self._links[place, receiver] for receiver in _receivers(rank)],
            meeting=self._meetings.get(stage),
        )

    def close_sockets(self) -> None:
        """Once all children have been told: a dead binder must refuse connections, not queue them."""
        for endpoint in self._plan_endpoints.values():
            endpoint.close()

    def end(self) -> None:
        """The epoch is over: whoever waits at a ring or a meeting stops."""
        for ring in self._rings:
            end_ring(ring)
        for meeting in self._meetings.values():
            end_meeting(meeting)
        self.close()

    def close(self) -> None:
        """Let go of everything; what children have goes on. May be called twice."""
        self.close_sockets()
        rings, meetings = self._rings, list(self._meetings.values())
        for kept in (self._links, self._tokens, self._results, self._meetings):
            kept.clear()
        for ring in rings:
            close_handle(ring)
        for meeting in meetings:
            close_meeting(meeting)


def _receivers(rank: RankConfig) -> list[RankAddress]:
    return [(rank.stage + 1, receiver) for receiver in rank.receivers]


def _samples_ring(rank: RankConfig) -> RingHandle:
    """For what all steps in flight sample, and those of the trip before, which no plan has consumed."""
    return create_channel_ring(2 * rank.depth, rank.max_num_seqs)

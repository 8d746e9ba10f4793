"""Who is connected to whom in one epoch: links, channels of messages, and the meetings of stages.

What a connection is made of is up to the hosts of its ends (`hosts.connections`). A process gets the
endpoints of its own ends and no others.

    core ══plan══ every rank                       rank ──link──▶ each of its receivers in the next stage
             output rank ──results──▶ core         output rank ──tokens──▶ every rank of earlier stages
    ranks of one stage share a meeting

`══` goes both ways, `──▶` one way. Who receives accepts, and of a plan channel the core.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.supervisor.launch import LaunchPlan
from penstock.hosts.connections import Connection, Place, connect
from penstock.hosts.rank_host import ChannelNeed, Hosts, LinkNeed, MeetingNeed, Need, PlanNeed
from penstock.process.config import RankConfig
from penstock.process.endpoints import ChannelEndpoint, CoreEndpoints, MeetingEndpoint, RankEndpoints
from penstock.trust.peer_names import core_role, rank_role

RankAddress = tuple[int, int]  # stage, rank in the stage


class Wiring:
    """The connections of one pipeline in one epoch.

    Raises what `hosts.connections.connect` does; then nothing is left of it.
    """

    def __init__(self, plan: LaunchPlan, hosts: Hosts, epoch: int = 0) -> None:
        self._ranks = {(rank.stage, rank.tp_rank): rank for rank in plan.ranks}
        self._hosts = hosts
        self._epoch = epoch
        self._plans: dict[RankAddress, Connection] = {}
        self._links: dict[tuple[RankAddress, RankAddress], Connection] = {}  # by sender and receiver
        self._tokens: dict[RankAddress, Connection] = {}  # by receiver
        self._results: list[Connection] = []
        self._meetings: dict[int, Connection] = {}
        try:
            self._create(plan)
        except BaseException:  # no more descriptors: those made so far are for whoever tries again
            self.close()
            raise

    def _create(self, plan: LaunchPlan) -> None:
        core = Place(self._hosts.head, core_role(plan.core.replica))
        places = {
            address: Place(self._hosts[rank.host], rank_role(number, rank.replica))
            for number, (address, rank) in enumerate(self._ranks.items())
        }
        output = places[self._output.stage, self._output.tp_rank]

        def joined(need: Need, accepting: Place, *joining: Place) -> Connection:
            return connect(need, self._epoch, accepting, *joining, routes=self._hosts.routes)

        for address, rank in self._ranks.items():
            own = places[address]
            self._plans[address] = joined(PlanNeed(), core, own)
            for receiver in _receivers(rank):
                need = LinkNeed(frame_bytes=plan.frame_bytes, num_frames=rank.link_frames)
                self._links[address, receiver] = joined(need, places[receiver], own)
            if rank.is_output:
                self._results.append(joined(_samples(rank), core, own))
            if not rank.is_last:
                self._tokens[address] = joined(_samples(rank), own, output)
            if rank.tp_size > 1 and rank.tp_rank == 0:
                others = [places[rank.stage, other] for other in range(1, rank.tp_size)]
                self._meetings[rank.stage] = joined(MeetingNeed(num_ranks=rank.tp_size), own, *others)

    @property
    def _output(self) -> RankConfig:
        return next(rank for rank in self._ranks.values() if rank.is_output)

    @property
    def _connections(self) -> Iterator[Connection]:
        for some in (self._plans, self._links, self._tokens, self._meetings):
            yield from some.values()
        yield from self._results

    def core(self) -> CoreEndpoints:
        """What the core is told."""
        return CoreEndpoints(
            epoch=self._epoch,
            plans=[connection.accepting for connection in self._plans.values()],
            stages=[stage for stage, _ in self._ranks],
            results=self._results[0].accepting,
        )

    def rank(self, stage: int, tp_rank: int = 0) -> RankEndpoints:
        """Return the endpoints of a rank."""
        address = stage, tp_rank
        rank = self._ranks[address]
        incoming = [link.accepting for (_, receiver), link in self._links.items() if receiver == address]
        return RankEndpoints(
            epoch=self._epoch,
            plans=self._plans[address].joining[0],
            tokens=self._token_endpoints(rank),
            results=self._results[0].joining[0] if rank.is_output else None,
            incoming=incoming[0] if incoming else None,
            outgoing=[self._links[address, receiver].joining[0] for receiver in _receivers(rank)],
            meeting=self._meeting(rank),
        )

    def _token_endpoints(self, rank: RankConfig) -> list[ChannelEndpoint]:
        if rank.is_output:
            return [connection.joining[0] for connection in self._tokens.values()]
        return [] if rank.is_last else [self._tokens[rank.stage, rank.tp_rank].accepting]

    def _meeting(self, rank: RankConfig) -> MeetingEndpoint | None:
        if rank.tp_size == 1:
            return None
        meeting = self._meetings[rank.stage]
        endpoint: MeetingEndpoint = [meeting.accepting, *meeting.joining][rank.tp_rank]
        return endpoint

    def delivered(self) -> None:
        """All processes have been told where they meet."""
        for connection in self._connections:
            connection.delivered()

    def end(self) -> None:
        """The epoch is over: whoever waits at a connection stops."""
        for connection in self._connections:
            connection.end()
        self._forget()

    def close(self) -> None:
        """Let go of everything; what processes have goes on. May be called twice."""
        for connection in self._connections:
            connection.close()
        self._forget()

    def _forget(self) -> None:
        for kept in (self._plans, self._links, self._tokens, self._results, self._meetings):
            kept.clear()


def _receivers(rank: RankConfig) -> list[RankAddress]:
    return [(rank.stage + 1, receiver) for receiver in rank.receivers]


def _samples(rank: RankConfig) -> ChannelNeed:
    """For what all steps in flight sample, and those of the trip before, which no plan has consumed."""
    return ChannelNeed(num_messages=2 * rank.depth, num_rows=rank.max_num_seqs)

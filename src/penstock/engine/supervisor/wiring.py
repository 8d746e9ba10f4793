"""Connects the processes of one epoch: links, channels of messages, and memory that a stage's ranks share.

The hosts of both ends decide what a connection is made of (`hosts.connections`). A process gets the
endpoints of its own ends and no others.

    core ══plan══ every rank                       rank ──link──▶ each of its receivers in the next stage
             output rank ──results──▶ core         output rank ──tokens──▶ every rank of earlier stages
    ranks of one stage share a meeting

`══` goes both ways, `──▶` one way. The receiver accepts a connection, and the core accepts a plan channel. At
a meeting, ranks of one stage add up their partial results. Within an epoch a link may be replaced by a new
one (`Wiring.exchange_link`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.batch import LinkOrder
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.hosts.connections import Connection, Place, connect
from penstock.hosts.rank_host import ChannelNeed, Hosts, LinkNeed, MeetingNeed, Need, PlanNeed
from penstock.process.config import RankConfig
from penstock.process.control import AttachLink
from penstock.process.endpoints import ChannelEndpoint, CoreEndpoints, MeetingEndpoint, RankEndpoints
from penstock.trust.peer_names import core_role, rank_role

RankAddress = tuple[int, int]  # stage, rank in the stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkExchange:
    """A link that is to take the place of another one between two ranks, within an epoch.

    Attributes:
        order: the order for the core, to be sent once the ends are handed over; it names the first step of
            the new link.
        ends: for each of the two ranks, the message with its end of the new link.
        connection: connection of the new link; `delivered` is to be called once the ends are handed over.
    """

    order: LinkOrder
    ends: Mapping[RankAddress, AttachLink]
    connection: Connection


class Wiring:
    """The connections between the processes of one pipeline in one epoch, which are made here.

    Raises what `hosts.connections.connect` does; then no connection is left open.
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
        self._replaced: dict[int, Connection] = {}  # old links, by the number of the new link
        self._numbers = itertools.count(1)
        self._frame_bytes = plan.frame_bytes
        self._places = {
            address: Place(hosts[rank.host], rank_role(number, rank.replica))
            for number, (address, rank) in enumerate(self._ranks.items())
        }
        try:
            self._create(plan)
        except BaseException:  # such as no more descriptors: those used so far are freed for the next try
            self.close()
            raise

    def _create(self, plan: LaunchPlan) -> None:
        core = Place(self._hosts.head, core_role(plan.core.replica))
        places, joined = self._places, self._joined
        output = places[self._output.stage, self._output.tp_rank]
        for address, rank in self._ranks.items():
            own = places[address]
            self._plans[address] = joined(PlanNeed(), core, own)
            for receiver in _receivers(rank):
                self._links[address, receiver] = self._new_link(address, receiver)
            if rank.is_output:
                self._results.append(joined(_samples(rank), core, own))
            if not rank.is_last:
                self._tokens[address] = joined(_samples(rank), own, output)
            if rank.tp_size > 1 and rank.tp_rank == 0:
                others = [places[rank.stage, other] for other in range(1, rank.tp_size)]
                self._meetings[rank.stage] = joined(MeetingNeed(num_ranks=rank.tp_size), own, *others)

    def _joined(self, need: Need, accepting: Place, *joining: Place) -> Connection:
        return connect(need, self._epoch, accepting, *joining, routes=self._hosts.routes)

    def _new_link(self, sender: RankAddress, receiver: RankAddress) -> Connection:
        need = LinkNeed(frame_bytes=self._frame_bytes, num_frames=self._ranks[sender].link_frames)
        return self._joined(need, self._places[receiver], self._places[sender])

    @property
    def _output(self) -> RankConfig:
        return next(rank for rank in self._ranks.values() if rank.is_output)

    @property
    def _connections(self) -> Iterator[Connection]:
        for some in (self._plans, self._links, self._replaced, self._tokens, self._meetings):
            yield from some.values()
        yield from self._results

    def core(self) -> CoreEndpoints:
        """Return the core's ends of its connections, for the core's process."""
        return CoreEndpoints(
            epoch=self._epoch,
            plans=[connection.accepting for connection in self._plans.values()],
            stages=[stage for stage, _ in self._ranks],
            results=self._results[0].accepting,
        )

    def rank(self, stage: int, tp_rank: int = 0) -> RankEndpoints:
        """Return a rank's ends of its connections, for the rank's process."""
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

    def exchange_link(self, sender: RankAddress, receiver: RankAddress, first_step: int = 0) -> LinkExchange:
        """Make a new link between two ranks of neighbouring stages; the old one is kept until `release_link`.

        Args:
            first_step: the first step that is to cross the new link; if it is too late for that, a later one.

        Raises what `hosts.connections.connect` does; then the old link stays.
        """
        replaced, number = self._links[sender, receiver], next(self._numbers)
        connection = self._links[sender, receiver] = self._new_link(sender, receiver)
        self._replaced[number] = replaced
        return LinkExchange(
            order=LinkOrder(
                number=number,
                first_step=first_step,
                stage=sender[0],
                sender=sender[1],
                receiver=receiver[1],
            ),
            ends={
                sender: AttachLink(number=number, endpoint=connection.joining[0]),
                receiver: AttachLink(number=number, endpoint=connection.accepting),
            },
            connection=connection,
        )

    def release_link(self, epoch: int, number: int) -> None:
        """Close the old link that the new link `number` has replaced: no frame is in it any more.

        If the epoch is another one, nothing is done.
        """
        if epoch == self._epoch and number in self._replaced:  # otherwise it has ended with its epoch
            self._replaced.pop(number).end()

    def delivered(self) -> None:
        """Record that all processes have their ends; copies that may not stay open here are closed."""
        for connection in self._connections:
            connection.delivered()

    def end(self) -> None:
        """End all connections with their epoch, so that processes that wait at one stop waiting."""
        for connection in self._connections:
            connection.end()
        self._forget()

    def close(self) -> None:
        """Close the supervisor's copies of all ends; processes go on with their own.

        May be called twice.
        """
        for connection in self._connections:
            connection.close()
        self._forget()

    def _forget(self) -> None:
        for kept in (
            self._plans,
            self._links,
            self._replaced,
            self._tokens,
            self._results,
            self._meetings,
        ):
            kept.clear()


def _receivers(rank: RankConfig) -> list[RankAddress]:
    return [(rank.stage + 1, receiver) for receiver in rank.receivers]


def _samples(rank: RankConfig) -> ChannelNeed:
    """Return the need of a channel for the samples of all steps in flight, and of the trip before."""
    return ChannelNeed(num_messages=2 * rank.depth, num_rows=rank.max_num_samples)

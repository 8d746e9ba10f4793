"""The agent of a host that is not the head's: starts, watches and reaps the ranks there, and decides nothing.

It has a host of its own (`hosts.local`) and does there what the head asks for over a wire
(`hosts.agent_messages`), as the supervisor does on the head. It is torch-free.

What it takes from the head are numbers and names. A model is looked up by its identity (`hosts.weights`),
faults and stores are not taken at all, and links are proved as its own command line says, not as the head
likes (`hosts.link_streams`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import ErrorInfo, PeerError, PenstockError, ProtocolError
from penstock.hosts.agent_messages import (
    Accept,
    Accepted,
    AgentHello,
    AllowEpoch,
    AskClock,
    AskResources,
    Ended,
    EndFailed,
    Hand,
    Heartbeat,
    Join,
    KeepSpare,
    Resources,
    Said,
    SpareKept,
    Started,
    StartMeasuring,
    StartRank,
    ToAgent,
    ToldClock,
    TouchEnd,
    TouchMember,
)
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.logs.worker_log import AgentLog, NoLog
from penstock.hosts.member import Member, Waitable
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.network.scout_messages import ToScout
from penstock.hosts.network.scouting_agent import NoScout, ScoutAnswers
from penstock.hosts.rank_host import HostEnd, PlanNeed, RankHost
from penstock.hosts.weights.model_supply import Delivery, Models
from penstock.process.child import StatusEvent
from penstock.process.config import RankConfig
from penstock.process.control import ControlMessage, UseModel
from penstock.process.endpoints import HeldEnd
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName

HEARTBEAT_S = 1.0
HEAD_LIMIT_S = (
    30.0  # of silence: the supervisor may be busy for a while, and a head that died is seen at once
)


NO_LOG = NoLog()


class AllowedNames:
    """Credentials that the head has sent for processes of this host. `issue` is for `ProvedStreams`."""

    def __init__(self) -> None:
        self._by_name: dict[PeerName, Credentials] = {}

    def allow(self, name: PeerName, credentials: Credentials) -> None:
        """Keep them; those of older epochs are forgotten."""
        self._by_name = {each: kept for each, kept in self._by_name.items() if each.epoch >= name.epoch}
        self._by_name[name] = credentials

    def issue(self, name: PeerName) -> Credentials:
        """Return the credentials of a process; raises `ProtocolError` if the head has sent none."""
        if name not in self._by_name:
            raise ProtocolError(f"there are no credentials for {name.role} in epoch {name.epoch}.")
        return self._by_name[name]


class Agent:
    """What the head asks of a host, done there.

    Args:
        host: the own one.
        wire: to the head. Belongs to the agent, as the members do.
        models: gets ranks their weights; belongs to the agent.
        allowed: takes the credentials that the head sends.
        clock: monotonic seconds.
        log: what is printed here, for the head.
        scout: answers questions about ways to other hosts. Belongs to the agent.
    """

    def __init__(
        self,
        host: RankHost,
        wire: AgentWire[ToAgent],
        models: Models,
        allowed: AllowedNames,
        clock: Callable[[], float] = time.monotonic,
        log: AgentLog = NO_LOG,
        scout: ScoutAnswers | None = None,
    ) -> None:
        self._scout = scout or NoScout()
        self._host = host
        self._wire = wire
        self._models = models
        self._allowed = allowed
        self._watch = MemberWatch(self._tell_event)
        self._log = log
        own: list[Waitable] = [wire, models, self._scout, *log.sources]
        for source in own:
            self._watch.watch(source)
        self._members: dict[int, Member] = {}
        self._ends: dict[int, HostEnd] = {}
        self._spare_bytes = -1
        self._clock = clock
        self._heard_at = self._said_at = clock()
        self._wire.send(AgentHello(resources=host.resources(), kinds=list(host.offers(PlanNeed(), ""))))

    @property
    def failure(self) -> PeerError | None:
        """Why the head can ask for nothing more; None while it is there."""
        return self._wire.failure

    def watch(self, source: Waitable) -> None:
        """Let `serve` return too when this one is readable, and say so."""
        self._watch.watch(source)

    def unwatch(self, source: Waitable) -> None:
        """Wait for it no longer."""
        self._watch.unwatch(source)

    def serve(self) -> set[Waitable]:
        """Wait for something to do, for a heartbeat at most, and do it.

        Returns:
            The watched sources that are readable.
        """
        members, sources = self._watch.wait(max(0.0, self._said_at + HEARTBEAT_S - self._clock()))
        for message in self._wire.receive():
            self._heard_at = self._clock()
            self._obey(message)
        for member in members:
            self._hear(member)
        for delivery in self._models.take():
            self._deliver(delivery)
        for answer in self._scout.take():
            self._wire.send(answer)
        for lines in self._log.take():
            self._wire.send(lines)
        self._keep_alive()
        return sources - {self._wire, self._models, self._scout, *self._log.sources}

    def _keep_alive(self) -> None:
        now = self._clock()
        if now - self._said_at >= HEARTBEAT_S:
            self._said_at = now
            self._wire.send(Heartbeat())
        if now - self._heard_at > HEAD_LIMIT_S:
            self._wire.give_up(f"the head has given no sign of life for {now - self._heard_at:.0f} s.")

    def close(self) -> None:
        """End all members, and let go of all ends."""
        for end in self._ends.values():
            end.end()
        self._ends.clear()
        self._watch.close()
        self._members.clear()
        self._models.close()
        self._host.close()
        self._wire.close()
        self._scout.close()

    def _obey(self, message: ToAgent) -> None:
        if isinstance(message, StartRank):
            self._start(message, message.rank, lambda rank: self._start_rank(message, rank))
        elif isinstance(message, StartMeasuring):
            self._start(message, message.config.rank, lambda rank: self._start_measuring(message, rank))
        elif isinstance(message, Hand):
            self._hand(message)
        elif isinstance(message, TouchMember):
            self._touch_member(message)
        elif isinstance(message, Accept | Join):
            self._make_end(message)
        elif isinstance(message, TouchEnd):
            self._touch_end(message)
        elif isinstance(message, AllowEpoch):
            self._allowed.allow(message.name, message.credentials)
        elif isinstance(message, KeepSpare):
            self._keep_spare(message.threads)
        elif isinstance(message, ToScout):
            self._scout.ask(message)
        elif isinstance(message, AskResources):
            self._wire.send(Resources(resources=self._host.resources()))
        elif isinstance(message, AskClock):
            self._tell_clock(message)
        else:
            assert isinstance(message, Heartbeat), message

    def _tell_clock(self, question: AskClock) -> None:
        """Answer at once. That the question waited behind other messages counts as time on its way."""
        now_ns = round(self._clock() * 1e9)
        self._wire.send(ToldClock(asked_ns=question.asked_ns, heard_ns=now_ns, replied_ns=now_ns))

    def _start(
        self, message: StartRank | StartMeasuring, rank: RankConfig, start: Callable[[RankConfig], Member]
    ) -> None:
        """Start a process with what this host takes of a rank's config, or say why not. It imports what it
        needs while its weights are sought, and then waits for them."""
        number = message.number
        own = msgspec.structs.replace(
            rank, model_path="", model_identity=b"", faults=[], store=None, host=self._host.name
        )
        try:
            member = self._members[number] = self._watch.add(start(own))
        except (PenstockError, OSError) as error:
            self._wire.send(Ended(number=number, exit_code=1, error=_info(error)))
            return
        self._wire.send(Started(number=number, identity=member.identity))
        self._models.seek(number, message.model, own)

    def _deliver(self, delivery: Delivery) -> None:
        """Give a rank its weights, or end it where they cannot be had."""
        member, news = self._members.get(delivery.number), delivery.news
        if member is None:
            return  # it has ended meanwhile
        if isinstance(news, PenstockError):
            self._end_member(delivery.number, member, news)
        elif isinstance(news, UseModel):
            member.hand(news)
        else:
            self._wire.send(Said(number=delivery.number, event=news))

    def _start_rank(self, message: StartRank, rank: RankConfig) -> Member:
        return self._host.start_rank(rank, message.name, message.number)

    def _start_measuring(self, message: StartMeasuring, rank: RankConfig) -> Member:
        member = self._host.start_measuring(msgspec.structs.replace(message.config, rank=rank), message.name)
        member.member_index = message.number
        return member

    def _tell_event(self, member: Member, event: StatusEvent) -> None:
        self._wire.send(Said(number=member.member_index, event=event))

    def _hear(self, member: Member) -> None:
        """Tell what a member has said, and its end behind all that."""
        exit_code = member.exit_code  # first: then all that it said is there
        self._watch.hear(member)
        if exit_code is not None and member.member_index in self._members:
            self._forget(member.member_index)
            self._wire.send(Ended(number=member.member_index, exit_code=exit_code))

    def _hand(self, message: Hand) -> None:
        member = self._members.get(message.number)
        if member is None:
            return  # it has ended, which the head learns, or knows
        try:
            member.hand(self._resolved(message.message))
        except PenstockError as error:
            self._end_member(message.number, member, error)

    def _touch_member(self, message: TouchMember) -> None:
        member = self._members.get(message.number)
        if member is None:
            return
        if message.what == "forget":
            member.kill_now()
            member.await_end()
            self._forget(message.number)
        elif message.what == "show_threads":
            member.show_threads()
        elif message.what == "ask_to_leave":
            member.ask_to_leave()
        else:
            member.kill_now()

    def _end_member(self, number: int, member: Member, error: PenstockError) -> None:
        """End a member that cannot have what it needs, and tell why."""
        member.kill_now()
        member.await_end()
        self._forget(number)
        self._wire.send(Ended(number=number, exit_code=1, error=error.info()))

    def _forget(self, number: int) -> None:
        self._models.forget(number)
        self._watch.reap(self._members.pop(number))

    def _make_end(self, message: Accept | Join) -> None:
        try:
            if isinstance(message, Accept):
                end = self._host.accept(message.kind, message.need, message.parties)
            else:
                invitation = self._resolved_invitation(message.invitation)
                end = self._host.join(message.kind, message.need, message.parties, invitation)
        except (PenstockError, OSError) as error:
            self._wire.send(EndFailed(number=message.number, error=_info(error)))
            return
        self._ends[message.number] = end
        if isinstance(message, Accept):
            is_for_another = message.parties.peer_host != self._host.name
            self._wire.send(
                Accepted(number=message.number, invitation=end.invitation if is_for_another else None)
            )

    def _touch_end(self, message: TouchEnd) -> None:
        end = self._ends.get(message.number)
        if end is None:
            return
        if message.what == "delivered":
            end.delivered()
            return
        del self._ends[message.number]
        if message.what == "end":
            end.end()
        else:
            end.close()

    def _keep_spare(self, threads: int) -> None:
        own_bytes = self._host.keep_spare(threads)
        if own_bytes != self._spare_bytes:
            self._spare_bytes = own_bytes
            self._wire.send(SpareKept(own_bytes=own_bytes))

    def _resolved_invitation(self, invitation: Any) -> Any:
        """Of an end that was accepted here it is what that end says; of others where they listen."""
        return self._end(invitation).invitation if isinstance(invitation, HeldEnd) else invitation

    def _resolved(self, message: ControlMessage) -> ControlMessage:
        """The message with the endpoints of ends that are held here."""
        fields = {name: self._resolved_value(getattr(message, name)) for name in message.__struct_fields__}
        return type(message)(**fields)

    def _resolved_value(self, value: Any) -> Any:
        if isinstance(value, HeldEnd):
            return self._end(value).endpoint
        if isinstance(value, list):
            return [self._resolved_value(entry) for entry in value]
        return value

    def _end(self, held: HeldEnd) -> HostEnd:
        """Raises `ProtocolError` if there is none; the head has heard why it could not be made."""
        end = self._ends.get(held.number)
        if end is None:
            raise ProtocolError(f"end {held.number} of a connection was not made, or is closed.")
        return end


def _info(error: PenstockError | OSError) -> ErrorInfo:
    if isinstance(error, PenstockError):
        return error.info()
    return PeerError(f"the host cannot do it: {error.strerror or error}.").info()

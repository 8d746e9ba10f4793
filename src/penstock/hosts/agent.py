"""The agent of a host other than the head's: starts, watches and reaps the ranks there, and decides nothing.

The head is the host of the supervisor. It sends requests over a wire (`hosts.agent_messages`), and the agent
carries them out on its own host (`hosts.local`), as the supervisor does on the head. It is torch-free.

The agent takes only numbers and names from the head. It looks a model up by its identity (`hosts.weights`),
and ignores the faults that tests arm. Its own command line, not the head, says where KV blocks are kept
(`kvstore.own_store`) and how links are protected (`hosts.link_streams`).

When the connection to the head breaks, the processes here keep running for `KEEP_RANKS_S`. In that time the
worker joins again, and the head continues where it was (`hosts.lasting_wire`). If the head does not come
back, or does not know this agent any more, the agent ends all ranks. A spare process stays in any case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import ErrorInfo, PeerError, PenstockError, ProtocolError, error_from_info
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
    Leaving,
    NotNeeded,
    Resources,
    Said,
    SpareKept,
    Started,
    StartMeasuring,
    StartRank,
    TalkBegins,
    TalkGoesOn,
    ToAgent,
    ToldClock,
    TouchEnd,
    TouchMember,
)
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.lasting_wire import LastingWire, Reception, new_talk
from penstock.hosts.logs.worker_log import AgentLog, NoLog
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.network.scout_messages import ToScout
from penstock.hosts.network.scouting_agent import NoScout, ScoutAnswers
from penstock.hosts.rank_host import HostEnd, PlanNeed, WorkerHost
from penstock.hosts.resources import HostResources
from penstock.hosts.weights.model_supply import Delivery, Models
from penstock.kvstore.own_store import NoOwnStore, OwnStore
from penstock.process.child import StatusEvent
from penstock.process.config import RankConfig
from penstock.process.control import ControlMessage, UseModel, descriptors_of
from penstock.process.endpoints import HeldEnd
from penstock.process.readiness import Waitable
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName

HEARTBEAT_S = 1.25  # a sign of life after so long without one: normally answers to the head, each second, do
HEAD_LIMIT_S = (
    30.0  # the longest silence of the head: its supervisor may be busy; the death of its host shows at once
)
KEEP_RANKS_S = 5.0  # so long ranks run without a connection: longer than the head waits (`SILENCE_LIMIT_S`)


NO_LOG = NoLog()
NO_OWN_STORE = NoOwnStore()


class AllowedNames:
    """The credentials that the head, which directs this host, has sent for processes here, by their names.

    A process proves itself with them on links to other hosts (`ProvedStreams`, which calls `issue`).

    Attributes:
        run_of_head: name of the head's run, from its start to its end, as last received; "" before.
    """

    def __init__(self) -> None:
        self.run_of_head = ""
        self._by_name: dict[PeerName, Credentials] = {}

    def allow(self, name: PeerName, credentials: Credentials) -> None:
        """Keep the credentials by which the process `name` of this host proves itself to other hosts.

        The head has sent them, for one epoch: until a process of the pipeline is lost. The credentials of all
        processes of older epochs are forgotten.
        """
        self._by_name = {each: kept for each, kept in self._by_name.items() if each.epoch >= name.epoch}
        self._by_name[name] = credentials
        self.run_of_head = name.run

    def forget(self) -> None:
        """Forget all credentials, because the head begins anew and may use numbers of epochs again."""
        self._by_name.clear()

    def issue(self, name: PeerName) -> Credentials:
        """Return the credentials that the head has sent for the process `name`.

        Raises:
            ProtocolError: the head has sent none.
        """
        if name not in self._by_name:
            raise ProtocolError(f"this host has no credentials for {name.role} in epoch {name.epoch}.")
        return self._by_name[name]


class HeldEnds:
    """The ends of connections that an agent holds for processes of its host, by their numbers at the head."""

    def __init__(self) -> None:
        self._ends: dict[int, HostEnd] = {}
        self._errors: dict[int, ErrorInfo] = {}  # by number, why an end could not be made; until its `touch`

    def add(self, number: int, end: HostEnd) -> None:
        self._ends[number] = end

    def note_failure(self, number: int, error: ErrorInfo) -> None:
        """Remember why the end `number` could not be made.

        The error is raised where a process is to get that end. The next `touch` of the end forgets it.
        """
        self._errors[number] = error

    def end_all(self) -> None:
        """End the connections of all ends that are held, so that waits at them stop, and forget the ends."""
        for end in self._ends.values():
            end.end()
        self._ends.clear()
        self._errors.clear()

    def touch(self, message: TouchEnd) -> None:
        """Record the delivery of an end, end its connection or close it, as the message says.

        Do nothing if the end is not held. An end that was ended or closed is not held any more.
        """
        self._errors.pop(message.number, None)
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

    def resolved_invitation(self, invitation: Any) -> Any:
        """Return the facts by which a new end of a connection can join an accepted end: its invitation.

        A `HeldEnd` names an end that was accepted on this host: the result is the invitation of that end.
        Any other invitation is returned as it is.

        Raises:
            PenstockError: the end that a `HeldEnd` names could not be made, or does not exist.
        """
        return self._end(invitation).invitation if isinstance(invitation, HeldEnd) else invitation

    def resolved(self, message: ControlMessage) -> ControlMessage:
        """Return a copy of a message to a process, with a real endpoint in place of each `HeldEnd`.

        A `HeldEnd` names an end of a connection by the number under which it is held here.

        Raises:
            ProtocolError: such an end does not exist here, or the message has descriptors of this host.
            PenstockError: such an end could not be made.
        """
        if descriptors_of(message):
            raise ProtocolError(
                "the head named descriptors of this host instead of connection ends that it holds."
            )
        fields = {name: self._resolved_value(getattr(message, name)) for name in message.__struct_fields__}
        return type(message)(**fields)

    def _resolved_value(self, value: Any) -> Any:
        if isinstance(value, HeldEnd):
            return self._end(value).endpoint
        if isinstance(value, list):
            return [self._resolved_value(entry) for entry in value]
        return value

    def _end(self, held: HeldEnd) -> HostEnd:
        """Return an end; raise why it was not made, or `ProtocolError` if the head never asked for it."""
        if (error := self._errors.get(held.number)) is not None:
            raise error_from_info(error)
        end = self._ends.get(held.number)
        if end is None:
            raise ProtocolError(f"end {held.number} of a connection does not exist or is closed.")
        return end


class _AskedHost:
    """Asks this host what no rank depends on: its resources, and a spare process.

    If that fails, for example because descriptors are short, the ranks go on without an answer.
    """

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._resources: HostResources | None = None
        self._spare_bytes = -1  # the bytes of the spare process that the head was told; -1: none yet

    def resources(self) -> HostResources:
        """Return what the host can give now, or could when last asked; the first call may raise OSError."""
        try:
            self._resources = self._host.resources()
        except OSError:
            if self._resources is None:
                raise
        return self._resources

    def keep_spare(self, threads: int) -> list[SpareKept]:
        """Keep a spare process, as `RankHost.keep_spare` does; return a message if its bytes have changed."""
        try:
            own_bytes = self._host.keep_spare(threads)
        except OSError:  # there are no descriptors or no memory; a later try may work
            own_bytes = 0
        is_new, self._spare_bytes = own_bytes != self._spare_bytes, own_bytes
        return [SpareKept(own_bytes=own_bytes)] if is_new else []

    def begin_anew(self) -> None:
        """Forget what the head was told about the spare process, since the next head was told nothing."""
        self._spare_bytes = -1


@dataclass(slots=True)
class _Times:
    """The times of the head's last message, of our last sign of life, and of the end of the connection."""

    heard_at: float = -math.inf
    said_at: float = -math.inf
    broken_at: float = math.inf

    def answer(self, question: AskClock, now: float) -> ToldClock:
        """Return the answer to a question about the clock.

        The time that the question waited behind other messages counts as time spent at this host.
        """
        heard_ns, replied_ns = round(self.heard_at * 1e9), round(now * 1e9)
        return ToldClock(asked_ns=question.asked_ns, heard_ns=heard_ns, replied_ns=replied_ns)


class Agent:
    """The agent of a host: it starts processes and makes ends of connections there, as the head requests.

    Args:
        host: this machine, which starts the processes (members) and makes the ends; closed by the agent.
        wire: the first connection to the head. The agent closes it, and all later ones.
        models: finds or fetches the weights of ranks; closed by the agent.
        allowed: keeps the credentials that the head sends.
        clock: returns monotonic seconds.
        log: the lines that are printed on this host; the agent sends them to the head.
        make_scout: for each new talk, makes the object that answers questions about network paths.
        store: says where ranks of this host keep KV blocks besides their KV cache.
    """

    def __init__(
        self,
        host: WorkerHost,
        wire: AgentWire[ToAgent],
        models: Models,
        allowed: AllowedNames,
        clock: Callable[[], float] = time.monotonic,
        log: AgentLog = NO_LOG,
        make_scout: Callable[[], ScoutAnswers] = NoScout,
        store: OwnStore = NO_OWN_STORE,
    ) -> None:
        self._make_scout, self._scout = make_scout, make_scout()
        self._store = store
        self._host, self._asked = host, _AskedHost(host)
        self._wire: LastingWire[ToAgent] = LastingWire(wire, new_talk())
        self._models = models
        self._allowed = allowed
        self._watch = MemberWatch(self._tell_event)
        self._log = log
        own: list[Waitable] = [models, self._scout, *log.sources]
        for source in own:
            self._watch.watch(source)
        self._members: dict[int, Member] = {}
        self._ends = HeldEnds()
        self._clock, self._times = clock, _Times()
        self._begin_connection()

    @property
    def failure(self) -> PeerError | None:
        """The error that broke the connection to the head; None while the head is connected."""
        return self._wire.failure

    @property
    def reception(self) -> Reception:
        """The head's answer to the last hello of this host: "welcome", "not_needed", or still "awaited"."""
        return self._wire.reception

    @property
    def has_members(self) -> bool:
        """Whether processes run here that the head has requested."""
        return bool(self._members)

    def watch(self, source: Waitable) -> None:
        """Let `serve` also return when `source` is readable, and name it in its result."""
        self._watch.watch(source)

    def reconnect(self, wire: AgentWire[ToAgent]) -> None:
        """Use another connection to the head, since the last one is broken, and send the hello over it."""
        assert self._wire.failure is not None, "the head is connected"
        self._wire.reconnect(wire)
        self._begin_connection()

    def serve(self, timeout_s: float = HEARTBEAT_S) -> set[Waitable]:
        """Wait until there is work or a heartbeat is due, for `timeout_s` at most, and do all that is due.

        Returns:
            The objects given to `watch` that are readable.
        """
        if self._wire.failure is None:
            timeout_s = min(timeout_s, max(0.0, self._times.said_at + HEARTBEAT_S - self._clock()))
        members, sources = self._watch.wait(timeout_s)
        own = {self._wire.connection, self._models, self._scout, *self._log.sources}
        with self._wire.together():
            self._attend(members)
        return sources - own

    def _attend(self, members: Set[Member]) -> None:
        messages = self._wire.receive() if self._wire.failure is None else []
        self._times.heard_at = self._clock() if messages else self._times.heard_at
        for message in messages:
            self._obey(message)
        for member in members & set(self._members.values()):  # not those that were reaped just now
            self._hear(member)
        for delivery in self._models.take():
            self._deliver(delivery)
        for told in [*self._scout.take(), *self._log.take()]:
            self._wire.send(told)
        self._keep_alive()

    def _keep_alive(self) -> None:
        now = self._clock()
        if self._wire.failure is None and now - self._times.said_at >= HEARTBEAT_S:
            self._say_alive(now)
        if self._wire.failure is None and now - self._times.heard_at > HEAD_LIMIT_S:
            silence_s = now - self._times.heard_at
            self._wire.connection.give_up(f"the head has sent nothing for {silence_s:.0f} s.")
        if self._wire.failure is not None:
            self._bear_break(now)

    def _say_alive(self, now: float, *news: msgspec.Struct) -> None:
        self._times.said_at = now
        self._wire.send_heartbeat(*news)

    def _begin_connection(self) -> None:
        """Send the hello over a new connection, and watch the connection."""
        self._times = _Times(heard_at=self._clock(), said_at=self._clock())
        self._watch.watch(self._wire.connection)
        self._wire.connection.send(
            AgentHello(
                resources=self._asked.resources(),
                kinds=list(self._host.offers(PlanNeed(), "")),
                talk=self._wire.talk,
                num_received=self._wire.num_received,
            )
        )

    def _bear_break(self, now: float) -> None:
        """Leave a broken connection; when it broke more than `KEEP_RANKS_S` ago, end all processes here."""
        if self._times.broken_at == math.inf:
            self._times.broken_at = now
            self._watch.unwatch(self._wire.connection)
            self._wire.close()
        if now - self._times.broken_at > KEEP_RANKS_S and not self._wire.is_over:
            self._begin_anew()
            self._wire.forget()

    def _begin_anew(self) -> None:
        """End all that the head has requested, since the head is gone or a new talk has begun."""
        self._end_all()
        self._allowed.forget()
        self._host.forget_credentials()
        self._asked.begin_anew()
        self._watch.unwatch(self._scout)
        self._scout.close()  # its answers would be to questions of the last head
        self._scout = self._make_scout()
        self._watch.watch(self._scout)

    def _end_all(self) -> None:
        """End all members and connections."""
        self._ends.end_all()
        for number in self._members:
            self._models.forget(number)
        self._members.clear()
        self._watch.kill()

    def close(self) -> None:
        """Send the head a farewell if it is connected; kill its processes here, and close host and agent."""
        self._wire.connection.send(Leaving())
        self._end_all()
        self._watch.close()
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
            self._ends.touch(message)
        elif isinstance(message, AllowEpoch):
            self._allowed.allow(message.name, message.credentials)
        else:
            self._obey_of_host(message)

    def _obey_of_host(self, message: ToAgent) -> None:
        """Carry out a message that is about neither a member nor an end."""
        if isinstance(message, KeepSpare):
            for news in self._asked.keep_spare(message.threads):
                self._wire.send(news)
        elif isinstance(message, ToScout):
            self._scout.ask(message)
        elif isinstance(message, AskResources):
            self._wire.send(Resources(resources=self._asked.resources()))
        elif isinstance(message, TalkBegins):
            self._begin_anew()
        elif isinstance(message, AskClock):
            self._say_alive(self._clock(), self._times.answer(message, self._clock()))
        else:
            assert isinstance(message, Heartbeat | TalkGoesOn | NotNeeded), message

    def _start(
        self, message: StartRank | StartMeasuring, rank: RankConfig, start: Callable[[RankConfig], Member]
    ) -> None:
        """Start a process with the parts of a rank's config that this host accepts, or report why it failed.
        The process imports what it needs while its weights are sought, and then waits for them."""
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
        """Give a rank its weights, or end it if it cannot get them; or report how far they have come."""
        member, news = self._members.get(delivery.number), delivery.news
        if member is None:
            return  # it has ended meanwhile
        if isinstance(news, PenstockError):
            self._end_member(delivery.number, member, news)
        elif isinstance(news, UseModel):
            self._hand_over(delivery.number, member, lambda: news)
        else:
            self._wire.send(Said(number=delivery.number, event=news))

    def _start_rank(self, message: StartRank, rank: RankConfig) -> Member:
        if message.tier is not None:
            rank = msgspec.structs.replace(rank, store=self._store.config(message.tier))
        return self._host.start_rank(rank, message.name, message.number)

    def _start_measuring(self, message: StartMeasuring, rank: RankConfig) -> Member:
        member = self._host.start_measuring(msgspec.structs.replace(message.config, rank=rank), message.name)
        member.member_index = message.number
        return member

    def _tell_event(self, member: Member, event: StatusEvent) -> None:
        self._wire.send(Said(number=member.member_index, event=event))

    def _hear(self, member: Member) -> None:
        """Report the events of a member and, after all of them, its end."""
        exit_code = member.exit_code  # asked first: then all its reports can be read
        self._watch.hear(member)
        if exit_code is not None and member.member_index in self._members:
            self._forget(member.member_index)
            self._wire.send(Ended(number=member.member_index, exit_code=exit_code))

    def _hand(self, message: Hand) -> None:
        member = self._members.get(message.number)
        if member is not None:  # otherwise it has ended, which the head knows or is about to be told
            self._hand_over(message.number, member, lambda: self._ends.resolved(message.message))

    def _hand_over(self, number: int, member: Member, message: Callable[[], ControlMessage]) -> None:
        """Hand a message to a member; end the member if the message cannot be made or handed."""
        try:
            member.hand(message())
        except (PenstockError, OSError) as error:
            self._end_member(number, member, error)

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

    def _end_member(self, number: int, member: Member, error: PenstockError | OSError) -> None:
        """End a member that cannot get what it needs, and report why."""
        member.kill_now()
        member.await_end()
        self._forget(number)
        self._wire.send(Ended(number=number, exit_code=1, error=_info(error)))

    def _forget(self, number: int) -> None:
        self._models.forget(number)
        self._watch.reap(self._members.pop(number))

    def _make_end(self, message: Accept | Join) -> None:
        try:
            if isinstance(message, Accept):
                end = self._host.accept(message.kind, message.need, message.parties)
            else:
                invitation = self._ends.resolved_invitation(message.invitation)
                end = self._host.join(message.kind, message.need, message.parties, invitation)
        except (PenstockError, OSError) as error:
            why = _info(error)
            self._ends.note_failure(message.number, why)
            self._wire.send(EndFailed(number=message.number, error=why))
            return
        self._ends.add(message.number, end)
        if isinstance(message, Accept):
            is_for_another = message.parties.peer_host != self._host.name
            self._wire.send(
                Accepted(number=message.number, invitation=end.invitation if is_for_another else None)
            )


def _info(error: PenstockError | OSError) -> ErrorInfo:
    if isinstance(error, PenstockError):
        return error.info()
    return PeerError(f"the host failed: {error.strerror or error}.").info()

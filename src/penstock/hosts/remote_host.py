"""A machine elsewhere as a host: the supervisor's requests go to the agent there.

The agent decides nothing (`hosts.agent`). It holds the processes (members) and the ends of connections, which
are known here by numbers. The supervisor waits for the agent only if its host is to listen for a stream: one
round trip for each stream.

    connected ──the connection breaks──▶ away ──the worker joins again──▶ connected, and all goes on
        │                                  │
        └──silent for too long────────────▶└──not back in time, or its worker has restarted──▶ lost

Requests to a host that is away are sent when it is back (`hosts.lasting_wire`). When the host is lost, all
its members count as lost, since no request reaches them any more; the agent ends them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from penstock.config.hosts import SAME_VERSION
from penstock.errors import (
    ErrorInfo,
    LinkClosedError,
    PeerError,
    ProtocolError,
    StageLostError,
    WaitTimeoutError,
    describe,
    error_from_info,
)
from penstock.hosts.agent_messages import (
    Accept,
    Accepted,
    AgentHello,
    AllowEpoch,
    AskClock,
    AskResources,
    AtEnd,
    AtMember,
    Ended,
    EndFailed,
    Hand,
    Join,
    KeepSpare,
    Leaving,
    LogLines,
    Resources,
    Said,
    SpareKept,
    Started,
    StartMeasuring,
    StartRank,
    ToHead,
    ToldClock,
    TouchEnd,
    TouchMember,
)
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.bell import Bell, LastingSource
from penstock.hosts.lasting_wire import LastingWire
from penstock.hosts.local_connections import KINDS
from penstock.hosts.member import Member
from penstock.hosts.network.scout_messages import FromScout, ListenForHost, SurveyHost
from penstock.hosts.rank_host import HostEnd, Need, Parties
from penstock.hosts.resources import HostResources
from penstock.hosts.stream_ends import StreamInvitation
from penstock.kvstore.own_store import TierNeed
from penstock.process.child import Ready, StatusEvent
from penstock.process.config import MeasureConfig, RankConfig
from penstock.process.control import ControlMessage
from penstock.process.endpoints import HeldEnd
from penstock.process.pipe_hosts import HostClock
from penstock.process.readiness import Waitable, await_readable
from penstock.process.rhythm import next_beat
from penstock.told_text import cleaned, shown_line
from penstock.trace.host_clock import ClockAnswer, ClockEstimate
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName

ANSWER_S = 5.0  # for an answer: longer than any useful path needs, and short enough for running requests
TEND_EVERY_S = 1.0
SILENCE_LIMIT_S = 3.0  # then a host is lost, connected or not; members have limits of their own
DOUBT_S = 2.0  # after so long a silence nothing is begun on a host before it sends something
HALF_BEAT_S = TEND_EVERY_S / 2  # silence is checked each second; limits lie halfway between two checks
LONG_LOOK_S = 2.0  # if two checks are further apart, the supervisor itself had no time
LEAVE_S = 5.0  # for the end of a member that was killed
MOST_UNREAD = 10_000  # events of a member: far more than a rank reports while it loads


class RemoteMember(Member):
    """A process on another host, which the agent there has started and watches. Made by `RemoteHost`."""

    is_elsewhere = True

    def __init__(
        self, host: RemoteHost, number: int, name: str, stage: int | None, member_index: int
    ) -> None:
        super().__init__(name, stage, member_index)
        self.number = number
        self._host = host
        self._identity = ""
        self._said: deque[StatusEvent] = deque()
        self._exit_code: int | None = None

    @property
    def identity(self) -> str:
        return f"{self._identity} on {self._host.name}".strip()

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    @property
    def sources(self) -> Collection[Waitable]:
        return self._host.sources if self._exit_code is None else [self._host.bell]

    @property
    def is_away(self) -> bool:
        return not self._host.is_there

    @property
    def has_news(self) -> bool:
        """Whether the process has reported an event that was not read yet."""
        return bool(self._said)

    def hand(self, message: ControlMessage) -> None:
        self._host.tell(Hand(number=self.number, message=message))  # type: ignore[arg-type]  # none with files

    def show_threads(self) -> None:
        self._touch("show_threads")

    def ask_to_leave(self) -> None:
        self._touch("ask_to_leave")

    def kill_now(self) -> None:
        self._touch("kill_now")

    def await_end(self) -> int:
        """Wait until the agent reports the end of the process, and return its exit code.

        If the agent does not report it within `LEAVE_S`, the process counts as killed. Implements
        `Member.await_end`.
        """
        if not self._host.pump_until(lambda: self._exit_code is not None, LEAVE_S):
            self._exit_code = -9
        assert self._exit_code is not None
        return self._exit_code

    def close(self) -> None:
        self.await_end()
        self._touch("forget")
        self._host.forget(self)

    def note(self, message: Started | Said | Ended) -> None:
        """Take in a message of the agent about this process: its start, an event that it reports, or its end.

        Raises:
            ProtocolError: too many events are unread, or such a process cannot report this one.
        """
        if isinstance(message, Started):
            self._identity = message.identity
        elif isinstance(message, Said):
            self.require_sense(message.event)
            if len(self._said) >= MOST_UNREAD:
                raise ProtocolError(f"{self.name} has more than {MOST_UNREAD} unread messages.")
            self._said.append(message.event)
        else:
            self.note_end(message.exit_code, message.error)

    def disown(self, error: Exception) -> None:
        """Give the whole host up as lost, for an error to which a report of the process has led."""
        self._host.distrust(error)

    def require_sense(self, event: StatusEvent) -> None:
        """Do nothing; a subclass raises `ProtocolError` for an event that its process cannot report."""

    def note_end(self, exit_code: int, error: ErrorInfo | None) -> None:
        """Record that the process has ended, with its failure if there is one; only the first end counts."""
        if self._exit_code is None:
            self._exit_code = exit_code
            self.failure = self.failure or error

    def lose(self, why: str) -> None:
        """Take the process as ended with code 1, since its host is lost; `why` is its failure."""
        self.note_end(1, StageLostError(why, stage=self.stage).info())

    def _receive(self) -> list[StatusEvent]:
        self._host.pump()
        events = list(self._said)
        self._said.clear()
        self._host.hush()
        return events

    def _touch(self, what: AtMember) -> None:
        self._host.tell(TouchMember(number=self.number, what=what))


class RemoteRank(RemoteMember):
    """A process of a rank on another host: when it is ready, it must report what it has loaded."""

    def require_sense(self, event: StatusEvent) -> None:
        """Raise `ProtocolError` if the rank reports that it is ready, but not what it has loaded."""
        if isinstance(event, Ready) and event.rank is None:
            raise ProtocolError(
                f"{self.name} is ready but does not report what it has loaded.", remedy=SAME_VERSION
            )


class RemoteEnd:
    """An end of a connection that the agent of another host holds, which gets the calls; a `HostEnd`."""

    def __init__(self, host: RemoteHost, number: int, invitation: StreamInvitation | HeldEnd) -> None:
        self.endpoint: Any = HeldEnd(number=number)
        self.invitation = invitation
        self._host = host

    def delivered(self) -> None:
        self._touch("delivered")

    def end(self) -> None:
        self._touch("end")

    def close(self) -> None:
        self._touch("close")

    def _touch(self, what: AtEnd) -> None:
        self._host.tell(TouchEnd(number=self.endpoint.number, what=what))


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the cluster that the head needs to start processes of workers.

    Attributes:
        name: name of the cluster.
        run: name of the head's run, from its start to its end (`trust.peer_names`).
        issue: makes the credentials with which a process proves itself in one epoch.
        identify: returns the identity of the model in a directory of the head (`kvstore.names`).
    """

    name: str
    run: str
    issue: Callable[[PeerName], Credentials]
    identify: Callable[[str], bytes]

    def name_of(self, host: str, role: str, epoch: int) -> PeerName:
        """Return the name that the credentials of a process on a host have, in this run of the head."""
        return PeerName(cluster=self.name, host=host, role=role, run=self.run, epoch=epoch)


class RemoteHost:
    """A machine elsewhere, whose agent carries out what is requested here. Implements `RankHost`.

    Args:
        wire: the connection to the host's agent, which has sent `hello` over it; this object closes it.
        name: name of the host, as in its certificate.
        on_lost: called with the reason when the host is lost.
        on_log: called with lines that were printed there.
        clock: returns monotonic seconds, as `tend` is given.
        on_broken: called when the connection to the agent breaks; the agent may join again over another one.

    Attributes:
        bell: readable when a process (member) has news, though no message waits at the connection.
        numbers: counts up; gives each process, end of a connection and question a number of its own.
        scout_answers: answers of the agent to questions about network routes, by number of the question.
    """

    def __init__(
        self,
        wire: AgentWire[ToHead],
        name: str,
        hello: AgentHello,
        cluster: Cluster,
        on_lost: Callable[[PeerError], None] = lambda error: None,
        on_log: Callable[[LogLines], None] = lambda lines: None,
        clock: Callable[[], float] = time.monotonic,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._on_lost, self._on_log, self._on_broken = on_lost, on_log, on_broken
        self._clock = clock
        self.numbers = itertools.count(1)
        self._members: dict[int, RemoteMember] = {}
        self._awaited, self._answers = 0, list[Accepted | EndFailed]()  # the awaited end, its answer
        self._scout_asked = 0  # number of the last question about network paths
        self.scout_answers: dict[int, FromScout] = {}
        self._clock_estimate, self._line, self.bell = ClockEstimate(), LastingSource(), Bell()
        self._begin(wire, hello)

    def attach(self, wire: AgentWire[ToHead], hello: AgentHello) -> bool:
        """Use this wire to the agent from now on, as the host is back and has sent `hello` over it.

        Returns:
            Whether its processes still run, since only the connection was broken. If not, they count as lost.
        """
        if self._is_lost or not self._wire.knows(hello):
            self._lose(LinkClosedError("its worker has restarted."))
            self._begin(wire, hello)
            return False
        self._line.use(wire)
        self._wire.go_on(wire, hello.num_received)
        self._note_hello(hello)
        for member in self._members.values():
            member.heard_at = time.monotonic()  # the member was silent only because its host was away
        return True

    def _begin(self, wire: AgentWire[ToHead], hello: AgentHello) -> None:
        """Begin a talk."""
        self._wire: LastingWire[ToHead] = LastingWire(wire, hello.talk)
        self._line.use(wire)
        self._allowed: set[PeerName] = set()
        self._spare_bytes, self._is_lost = 0, False
        self._note_hello(hello)
        self._wire.begin()

    def _note_hello(self, hello: AgentHello) -> None:
        hello = cleaned(hello)
        self._resources = msgspec.structs.replace(hello.resources, name=self.name)
        self._kinds = hello.kinds
        self._is_broken = self._is_doubtful = False
        self._heard_at = self._tended_at = -math.inf

    @property
    def is_there(self) -> bool:
        """Whether the host is connected and not silent, and so can take requests (`RankHost.is_there`)."""
        # A silent host may be lost: if a cable is pulled, links break first. Nothing is begun on it then.
        return self._wire.failure is None and not self._is_doubtful

    @property
    def sources(self) -> Collection[Waitable]:
        """The objects to poll: one is readable when a process of the host may have news."""
        return [self.bell, self._line]

    @property
    def wires(self) -> Collection[Waitable]:
        """The connection to poll for messages of the agent; empty while it is broken."""
        return [] if self._wire.failure else [self._wire.connection]

    def attend(self) -> None:
        """Take in the messages of the agent that have come; ring `bell` if a process has unread events."""
        self.pump()
        if any(member.has_news for member in self._members.values()):
            self.bell.ring()

    def tend(self, now: float) -> None:
        """Send the agent a sign of life, at most once a second; implements `RankHost.tend`.

        A host that is silent or away for too long is lost, with its processes.
        """
        if now < next_beat(self._tended_at, TEND_EVERY_S) or self._is_lost:
            return
        if now - self._tended_at > LONG_LOOK_S:
            self._heard_at = now  # the supervisor stood still, and has not read the agent's messages yet
        self._tended_at = now
        self.pump()
        silence_s = now - self._heard_at
        self._is_doubtful |= silence_s > DOUBT_S - HALF_BEAT_S
        if silence_s > SILENCE_LIMIT_S - (HALF_BEAT_S if self._wire.failure is None else 0.0):
            broken = "" if self._wire.failure is None else f"{self._wire.failure.message} Since then "
            self._lose(LinkClosedError(f"{broken}it has sent nothing for {silence_s:.1f} s."))
        if self._wire.failure is None:
            self._wire.send_heartbeat(AskResources(), AskClock(asked_ns=self._now_ns()))

    def clocks(self) -> Sequence[HostClock]:
        """Return the offset of the host's clock as estimated from the agent's answers (`RankHost.clocks`)."""
        best, now_ns = self._clock_estimate.best(), self._now_ns()
        if best is None:
            return []
        return [HostClock(host=self.name, offset_ns=best.offset_ns, error_ns=best.error_at_ns(now_ns))]

    def resources(self) -> HostResources:
        """Return the agent's last answer about what its host can give, and ask again, without waiting."""
        self.pump()
        self.tell(AskResources())
        return self._resources

    def start_rank(self, rank: RankConfig, name: str, member_index: int) -> Member:
        member = self._made(RemoteRank, name, rank.stage, member_index)
        model = self._cluster.identify(rank.model_path)
        sent = msgspec.structs.replace(rank, model_path="", store=None)
        tier = None if rank.store is None else TierNeed.of(rank.store)
        self.tell(StartRank(number=member.number, rank=sent, name=name, model=model, tier=tier))
        return member

    def start_measuring(self, config: MeasureConfig, name: str) -> Member:
        member = self._made(RemoteMember, name, config.rank.stage, 0)
        model = self._cluster.identify(config.rank.model_path)
        rank = msgspec.structs.replace(config.rank, model_path="", store=None)
        sent = msgspec.structs.replace(config, rank=rank)
        self.tell(StartMeasuring(number=member.number, config=sent, name=name, model=model))
        return member

    def keep_spare(self, threads: int) -> int:
        self.tell(KeepSpare(threads=threads))
        return self._spare_bytes

    def offers(self, need: Need, peer: str) -> Sequence[str]:
        return list(KINDS[type(need)]) if peer == self.name else self._kinds

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        number = self._begin_end(parties)
        self.tell(Accept(number=number, kind=kind, need=need, parties=parties))
        if parties.peer_host == self.name:
            return RemoteEnd(self, number, HeldEnd(number=number))
        try:
            invitation = self._invitation(number)
        except BaseException:  # if the agent makes the end after all, nothing else closes it
            self.tell(TouchEnd(number=number, what="close"))
            raise
        return RemoteEnd(self, number, invitation)

    def join(self, kind: str, need: Need, parties: Parties, invitation: Any) -> HostEnd:
        number = self._begin_end(parties)
        self.tell(Join(number=number, kind=kind, need=need, parties=parties, invitation=invitation))
        return RemoteEnd(self, number, invitation)

    def close(self) -> None:
        self._wire.close()
        self._line.close()
        self.bell.close()

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message to the agent now, or when it has joined again; drop it if the host is lost."""
        if self._is_lost:
            return
        if isinstance(message, ListenForHost | SurveyHost):
            self._scout_asked = message.number
        self._wire.send(message)

    def pump(self) -> None:
        """Take in the messages of the agent that have come, without waiting."""
        for message in self._wire.receive():
            self._heard_at = self._clock()
            self._is_doubtful = False
            try:
                self._take(message if isinstance(message, LogLines) else cleaned(message))
            except Exception as error:  # whatever one host sends, the other hosts and the engine go on
                self.distrust(error)
                break
        if self._wire.failure is not None:
            self._break_off()

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Take in messages until the condition holds, the connection breaks or `timeout_s` has passed.

        Return whether the condition holds.
        """
        deadline = time.monotonic() + timeout_s
        self.pump()
        while not condition() and self._wire.failure is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await_readable([self._wire.connection], left_s)
            self.pump()
        self.bell.ring()  # events of other members have been taken in too, and must be read
        return condition()

    def distrust(self, error: Exception) -> None:
        """Give up the host as lost because of an error, such as one that its messages have caused here."""
        self._lose(error if isinstance(error, PeerError) else _of_nonsense(error))

    def hush(self) -> None:
        """Stop `bell`, which wakes the supervisor, if all events of the host's processes have been read."""
        if not any(member.has_news for member in self._members.values()):
            self.bell.hush()

    def forget(self, member: RemoteMember) -> None:
        """Forget a process that has been reaped: further messages about it are dropped."""
        self._members.pop(member.number, None)

    def _made(self, kind: type[RemoteMember], name: str, stage: int | None, index: int) -> RemoteMember:
        if self._wire.failure is not None:
            raise OSError(f"the host {self.name} is lost")
        member = kind(self, next(self.numbers), name, stage, index)
        self._members[member.number] = member
        return member

    def _begin_end(self, parties: Parties) -> int:
        """Return a number for a new end, whose process gets the credentials for its links."""
        if parties.peer_host != self.name:
            name = self._cluster.name_of(self.name, parties.own, parties.epoch)
            if name not in self._allowed:
                self._allowed = {each for each in self._allowed if each.epoch >= name.epoch} | {name}
                self.tell(AllowEpoch(name=name, credentials=self._cluster.issue(name)))
        return next(self.numbers)

    def _invitation(self, number: int) -> StreamInvitation:
        """Wait for where the end can be dialled; raise `PeerError` if the agent does not answer or listen."""
        self._awaited = number
        self._answers.clear()
        if not self.pump_until(lambda: bool(self._answers), ANSWER_S):
            self._is_doubtful |= self._wire.failure is None
            raise _no_answer(self.name, self._wire.failure)
        return _invitation_in(self._answers.pop(), self.name)

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)

    def _take(self, message: ToHead) -> None:
        if isinstance(message, Started | Said | Ended):
            member = self._members.get(message.number)
            if member is not None:
                member.note(message)
        elif isinstance(message, Accepted | EndFailed):
            if message.number == self._awaited:
                self._answers.append(message)
        elif isinstance(message, Resources):
            self._resources = msgspec.structs.replace(message.resources, name=self.name)
        elif isinstance(message, SpareKept):
            self._spare_bytes = message.own_bytes
        elif isinstance(message, ToldClock):
            answer = ClockAnswer(message.asked_ns, message.heard_ns, message.replied_ns, self._now_ns())
            self._clock_estimate.add(answer)
        elif isinstance(message, FromScout) and message.number == self._scout_asked:
            self.scout_answers[message.number] = message
        elif isinstance(message, LogLines):
            self._on_log(message)
        elif isinstance(message, Leaving):
            self._lose(LinkClosedError("its worker has ended."))

    def shut_out(self, error: PeerError) -> None:
        """Give a connected host, which is not let in any more, up as lost for this error; else do nothing."""
        if self._wire.failure is None:
            self._lose(error)

    def _break_off(self) -> None:
        """Leave the broken connection; it is closed when another one comes, or the host is lost."""
        if not self._is_broken:
            self._is_broken = True
            self._heard_at = self._clock()
            self._line.leave()
            self._wire.connection.hang_up()  # the agent may not know yet
            self.bell.ring()  # so that what came last is heard
            self._on_broken()

    def _lose(self, failure: PeerError) -> None:
        """Lose the host, and with it all its members."""
        if self._is_lost:
            return
        self._is_lost = True
        self._break_off()
        self._wire.close()
        self._on_lost(failure)
        for member in self._members.values():
            if member.exit_code is None:
                member.lose(f"the host {self.name} is lost: {failure.message}")
                self.bell.ring()


def _no_answer(host: str, failure: PeerError | None) -> PeerError:
    """Return why a host does not answer: its connection has failed, or it is silent."""
    if failure is None:
        return WaitTimeoutError(f"the host {host} has not answered for {ANSWER_S:g} s.")
    return LinkClosedError(f"the host {host} cannot be reached: {failure.message}", remedy=failure.remedy)


def _invitation_in(answer: Accepted | EndFailed, host: str) -> StreamInvitation:
    """Return where a new end can be dialled; raises what has kept the agent from making it."""
    if isinstance(answer, EndFailed):
        raise error_from_info(answer.error)
    if answer.invitation is None:
        raise ProtocolError(f"the host {host} does not report where it listens.")
    return answer.invitation


def _of_nonsense(error: Exception) -> ProtocolError:
    """Return the error of a host whose message has caused an error that is not a `PeerError`."""
    what = shown_line(describe(error).message).rstrip(".")
    return ProtocolError(f"the head cannot use its message ({what}).", remedy=SAME_VERSION)

"""The messages between the head and the agent of another host, once the agent has been let in.

The head sends requests; the agent carries them out and reports what happens. A member is a process that the
agent has started. Members and ends of connections have numbers that the head gives, so that the head need not
wait for an answer. It waits only for the address where a stream can be dialled.

    head                                             agent
                                                     AgentHello(what the host can give)
    TalkBegins(), or TalkGoesOn()            ──▶     (`hosts.lasting_wire`)
      or NotNeeded(), and the end            ──▶     joins again later
    Heartbeat(), AskResources(), AskClock()  ──▶     Resources(…), Heartbeat(), ToldClock(…)
      each second, together                            together; Heartbeat() also if the head asks nothing
                                                     LogLines(what was printed there), within bounds
    AllowEpoch(credentials)                  ──▶
    StartRank(7, config)                     ──▶     Started(7, "pid 4711"), Said(7, Alive), … Ended(7, 0)
    Accept(12, "tls", need, parties)         ──▶     Accepted(12, host and port)
    Join(13, "ring", need, parties, …)       ──▶
    Hand(7, RankEndpoints(… HeldEnd(12) …))  ──▶     the rank gets what 12 stands for
    questions about ways to other hosts      ──▶     answers (`hosts.network.scout_messages`)

The head sends no path, address to fetch from, environment variable or program, since an agent accepts none
of these. For KV blocks the head sends only the kind of the store; each host knows by itself where its store
is.

What the agent sends has bounds (`penstock.bounds`), so that none of its values harms the head. A message that
is beyond the bounds is refused, and the host counts as lost.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.bounds import Count, Nanoseconds, Small, Word
from penstock.errors import ErrorInfo
from penstock.hosts.network.scout_messages import FromScout, ToScout
from penstock.hosts.rank_host import Need, Parties
from penstock.hosts.resources import HostResources
from penstock.hosts.stream_ends import StreamInvitation
from penstock.kvstore.own_store import TierNeed
from penstock.process.child import StatusEvent
from penstock.process.config import MeasureConfig, RankConfig
from penstock.process.control import AttachLink, BeginMeasuring, EpochLost, Stop
from penstock.process.endpoints import HeldEnd, RankEndpoints
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName

ExitCode = Annotated[int, msgspec.Meta(ge=-255, le=255)]  # as `subprocess` gives it
MOST_LINES = 10_000  # in one message: far more than a worker may send at once (`hosts.logs.line_ration`)

AtMember = Literal["show_threads", "ask_to_leave", "kill_now", "forget"]
AtEnd = Literal["delivered", "end", "close"]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A sign of life; head and agent send one to each other about each second.

    Attributes:
        num_received: how many messages of the talk the sender has received; heartbeats and messages about
            the talk itself do not count. The other side need not keep these messages any longer.
    """

    num_received: Count = 0


class TalkBegins(msgspec.Struct, frozen=True, tag="talk_begins"):
    """The head's answer to an `AgentHello` whose talk it does not know: a new talk begins.

    A talk is all that a head and an agent send to each other, over any number of connections. At this answer
    the agent ends all processes and connections that it has made before.
    """


class TalkGoesOn(msgspec.Struct, frozen=True, kw_only=True, tag="talk_goes_on"):
    """The head's answer to an `AgentHello` whose talk it knows: it continues where the connection broke.

    A talk is all that a head and an agent send to each other, over any number of connections.

    Attributes:
        num_received: how many messages of the talk the head has received; the agent sends the others again.
    """

    num_received: int


class NotNeeded(msgspec.Struct, frozen=True, tag="not_needed"):
    """The head's answer to an `AgentHello` when it has all the hosts that it waits for.

    The head then closes the connection. The worker may try to join again later.
    """


class AllowEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="allow_epoch"):
    """The credentials with which a process of the agent's host proves itself on links, for one epoch.

    Attributes:
        name: name of that process, which contains the epoch.
    """

    name: PeerName
    credentials: Credentials


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag="start_rank"):
    """A request to start the process of a rank.

    Attributes:
        number: the head's number for the process, by which later messages name it.
        rank: config of the rank, without the path of the model and without the store.
        name: name of the process in texts, such as "stage 1".
        model: identity of the rank's model, a hash (`kvstore.names.model_identity`), in place of the path.
        tier: where KV blocks are kept besides the KV cache, such as the kind of a store; None: nowhere.
    """

    number: int
    rank: RankConfig
    name: str
    model: bytes
    tier: TierNeed | None = None


class StartMeasuring(msgspec.Struct, frozen=True, kw_only=True, tag="start_measuring"):
    """A request to start a process that times the steps of a rank and reports their costs.

    `number`, `name` and `model` are as in `StartRank`.
    """

    number: int
    config: MeasureConfig
    name: str
    model: bytes


class KeepSpare(msgspec.Struct, frozen=True, kw_only=True, tag="keep_spare"):
    """A request to keep a spare process ready, in which a lost rank can start again sooner.

    Attributes:
        threads: the most threads that a rank of this host has.
    """

    threads: int


class Hand(msgspec.Struct, frozen=True, kw_only=True, tag="hand"):
    """A request to hand a message to the process `number` of the agent's host.

    Each `HeldEnd` in it names an end of a connection by its number; the agent puts the endpoint in its place.
    """

    number: int
    message: Stop | EpochLost | BeginMeasuring | AttachLink | RankEndpoints


class TouchMember(msgspec.Struct, frozen=True, kw_only=True, tag="touch_member"):
    """A request to make the process `number` print its threads or end.

    Attributes:
        what: `show_threads`, `ask_to_leave`, `kill_now`, or `forget`, which kills and reaps the process.
    """

    number: int
    what: AtMember


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag="accept"):
    """Asks an agent to make an end of a connection, which the end of another process then joins.

    `Accepted` or `EndFailed` answers it.

    Attributes:
        number: the head's number for the end, by which later messages name it.
        kind: kind of the connection, which the host has offered, such as "ring" (a ring in shared memory, to
            a process of the same host) or "tls" (to another host).
        need: what the connection is for, such as a link that carries hidden states.
        parties: the processes at both ends; if several join, the first of them.
    """

    number: int
    kind: str
    need: Need
    parties: Parties


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A request to make an end of a connection that joins an accepted end.

    Only a failure is answered, with `EndFailed`.

    Attributes:
        number, kind, need, parties: as in `Accept`.
        invitation: the number of the accepted end, if it is on the same host; else where its host listens.
    """

    number: int
    kind: str
    need: Need
    parties: Parties
    invitation: StreamInvitation | HeldEnd


class TouchEnd(msgspec.Struct, frozen=True, kw_only=True, tag="touch_end"):
    """A request about the end `number` of a connection, which the agent holds.

    Attributes:
        what: `delivered`, `end` or `close`, the methods of `HostEnd` that the agent is to call.
    """

    number: int
    what: AtEnd


class AskResources(msgspec.Struct, frozen=True, tag="ask_resources"):
    """Asks an agent which CPU cores, memory and GPUs its host can give now; `Resources` answers it.

    Of the memory only what is free counts; cores and GPUs count even while they are in use.
    """


class AskClock(msgspec.Struct, frozen=True, kw_only=True, tag="ask_clock"):
    """A question about the host's monotonic clock; `ToldClock` answers it.

    Attributes:
        asked_ns: nanoseconds on the head's own clock; the answer repeats them.
    """

    asked_ns: int


ToAgent = (
    AllowEpoch
    | StartRank
    | StartMeasuring
    | KeepSpare
    | Hand
    | TouchMember
    | Accept
    | Join
    | TouchEnd
    | AskResources
    | AskClock
    | Heartbeat
    | TalkBegins
    | TalkGoesOn
    | NotNeeded
    | ToScout
)


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="agent_hello"):
    """The first message of an agent over each connection: what its host can give, and how far it has got.

    A talk is all that a head and an agent send to each other, over this connection and earlier ones.

    Attributes:
        kinds: kinds of connections to other hosts that the host offers, best first.
        talk: name of the talk.
        num_received: how many messages of the talk the agent has received.
    """

    resources: HostResources
    kinds: Annotated[list[Word], msgspec.Meta(max_length=64)]
    talk: Word = ""
    num_received: Count = 0


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The last message of an agent: its worker ends on purpose, and does not come back by itself."""


class Resources(msgspec.Struct, frozen=True, kw_only=True, tag="resources"):
    """The answer to `AskResources`: the cores, memory and GPUs that the host can give now."""

    resources: HostResources


class ToldClock(msgspec.Struct, frozen=True, kw_only=True, tag="told_clock"):
    """The answer to `AskClock`, in nanoseconds.

    Attributes:
        asked_ns: as in the question.
        heard_ns: what the host's monotonic clock showed when the agent read the question.
        replied_ns: what it showed when the agent answered.
    """

    asked_ns: Nanoseconds
    heard_ns: Nanoseconds
    replied_ns: Nanoseconds


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A message that the process `number` has been started.

    Attributes:
        identity: words by which people find the process, such as "pid 4711".
    """

    number: Small
    identity: Word


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """A message that the process `number` has reported a status event, such as that it is ready."""

    number: Small
    event: StatusEvent


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A message that the process `number` has ended; all that it has reported was sent before.

    Attributes:
        exit_code: as `subprocess` gives it; 1 where there is an `error`.
        error: why the agent could not start the process, or had to kill it; None in all other cases.
    """

    number: Small
    exit_code: ExitCode
    error: ErrorInfo | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """The answer to `Accept`: the end `number` of a connection is made and waits to be joined.

    Attributes:
        invitation: where the host listens, for the host that joins; None if this same host joins.
    """

    number: Small
    invitation: StreamInvitation | None = None


class EndFailed(msgspec.Struct, frozen=True, kw_only=True, tag="end_failed"):
    """The answer to `Accept` or `Join` where the end `number` of a connection could not be made."""

    number: Small
    error: ErrorInfo


class SpareKept(msgspec.Struct, frozen=True, kw_only=True, tag="spare_kept"):
    """A report about the spare process, which waits to become a rank; sent when `own_bytes` changes.

    Attributes:
        own_bytes: bytes of memory that it holds; 0: no spare process is ready.
    """

    own_bytes: Count


class LogLines(msgspec.Struct, frozen=True, kw_only=True, tag="log_lines"):
    """The lines that the processes of a worker's host have printed, for the head to show.

    Attributes:
        lines: pairs of the name of a process and a line; the name "" is the worker itself.
        num_dropped: how many lines were left out since the message before.
    """

    lines: Annotated[list[tuple[str, str]], msgspec.Meta(max_length=MOST_LINES)]
    num_dropped: Count = 0


ToHead = (
    AgentHello
    | Heartbeat
    | Leaving
    | Resources
    | ToldClock
    | Started
    | Said
    | Ended
    | Accepted
    | EndFailed
    | SpareKept
    | LogLines
    | FromScout
)

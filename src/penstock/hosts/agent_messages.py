"""The messages between the head and the agent of another host, once the agent has been let in.

The head asks; the agent carries it out and tells what happens. Members and ends of connections have numbers
that the head gives, so that it need not wait for an answer, except for where a stream can be dialled.

    head                                             agent
                                                     AgentHello(what the host can give)
    TalkBegins(), or TalkGoesOn()            ──▶     (`hosts.lasting_wire`)
      or NotNeeded(), and the end            ──▶     joins again later
    Heartbeat(), AskResources(), AskClock()  ──▶     Resources(…), Heartbeat(), ToldClock(…)
      each second, in one record                       in one record; Heartbeat() too where nothing is asked
                                                     LogLines(what was printed there), within bounds
    AllowEpoch(credentials)                  ──▶
    StartRank(7, config)                     ──▶     Started(7, "pid 4711"), Said(7, Alive), … Ended(7, 0)
    Accept(12, "tls", need, parties)         ──▶     Accepted(12, host and port)
    Join(13, "ring", need, parties, …)       ──▶
    Hand(7, RankEndpoints(… HeldEnd(12) …))  ──▶     the rank gets what 12 stands for
    questions about ways to other hosts      ──▶     answers (`hosts.network.scout_messages`)

Nothing here is a path, an address to fetch from, an environment variable or a program: an agent takes none.
Of tiers of KV blocks only what they are is said: where its store is a host knows by itself.

What the agent sends has bounds (`penstock.bounds`), so that no value of it harms the head: a message that is
beyond them is refused, and loses the host.
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
MOST_LINES = 10_000  # of a message: far above what a worker's ration lets pass

AtMember = Literal["show_threads", "ask_to_leave", "kill_now", "forget"]
AtEnd = Literal["delivered", "end", "close"]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A sign of life; both sides send one each second.

    Attributes:
        num_received: messages of the talk that have come.
    """

    num_received: Count = 0


class TalkBegins(msgspec.Struct, frozen=True, tag="talk_begins"):
    """A message that the head does not know this agent's talk: nothing said or started before holds."""


class TalkGoesOn(msgspec.Struct, frozen=True, kw_only=True, tag="talk_goes_on"):
    """A message that the head goes on where the connection broke, with `num_received` messages received."""

    num_received: int


class NotNeeded(msgspec.Struct, frozen=True, tag="not_needed"):
    """A message that the head has all the hosts it waits for. It hangs up; the worker may try again."""


class AllowEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="allow_epoch"):
    """The credentials of a process of the agent's host, for one epoch."""

    name: PeerName
    credentials: Credentials


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag="start_rank"):
    """A request to start the process of a rank as this member.

    Attributes:
        model: identity of its model (`kvstore.names.model_identity`), in place of a path.
        tier: where blocks are kept beyond its KV cache, in place of `RankConfig.store`; None: nowhere.
    """

    number: int
    rank: RankConfig
    name: str
    model: bytes
    tier: TierNeed | None = None


class StartMeasuring(msgspec.Struct, frozen=True, kw_only=True, tag="start_measuring"):
    """A request to start, as this member, a process that times a rank's steps; `model` as in `StartRank`."""

    number: int
    config: MeasureConfig
    name: str
    model: bytes


class KeepSpare(msgspec.Struct, frozen=True, kw_only=True, tag="keep_spare"):
    """A request to keep a process ready for a rank that is lost."""

    threads: int


class Hand(msgspec.Struct, frozen=True, kw_only=True, tag="hand"):
    """A request to hand a message to a member; `HeldEnd` stands for an end."""

    number: int
    message: Stop | EpochLost | BeginMeasuring | AttachLink | RankEndpoints


class TouchMember(msgspec.Struct, frozen=True, kw_only=True, tag="touch_member"):
    """A request to do something to a member."""

    number: int
    what: AtMember


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag="accept"):
    """A request to make the end that others join."""

    number: int
    kind: str
    need: Need
    parties: Parties


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A request to make an end that joins an accepted one, here by number or elsewhere where it listens."""

    number: int
    kind: str
    need: Need
    parties: Parties
    invitation: StreamInvitation | HeldEnd


class TouchEnd(msgspec.Struct, frozen=True, kw_only=True, tag="touch_end"):
    """A request to do something to an end."""

    number: int
    what: AtEnd


class AskResources(msgspec.Struct, frozen=True, tag="ask_resources"):
    """A question about what the host can give now."""


class AskClock(msgspec.Struct, frozen=True, kw_only=True, tag="ask_clock"):
    """A question about the host's monotonic clock. `asked_ns`: what the head's shows; it comes back."""

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
    """The first message of an agent over each connection.

    It says what its host can give, and where their talk is.

    Attributes:
        kinds: of connections to other hosts, best first.
        talk: name of what head and agent say to each other, over this connection and earlier ones.
        num_received: messages of it that have come.
    """

    resources: HostResources
    kinds: Annotated[list[Word], msgspec.Meta(max_length=64)]
    talk: Word = ""
    num_received: Count = 0


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A message that the worker ends, because a user has ended it; it does not come back by itself."""


class Resources(msgspec.Struct, frozen=True, kw_only=True, tag="resources"):
    """An answer with what the host can give now."""

    resources: HostResources


class ToldClock(msgspec.Struct, frozen=True, kw_only=True, tag="told_clock"):
    """An answer with the host's monotonic clock when it read an `AskClock`, and when it answered."""

    asked_ns: Nanoseconds
    heard_ns: Nanoseconds
    replied_ns: Nanoseconds


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A message that the process of a member runs; `identity` as in `Member`."""

    number: Small
    identity: Word


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """A status event of a member."""

    number: Small
    event: StatusEvent


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A message that a member has ended; all that it said has been sent.

    Attributes:
        error: why it was never started, where it was not.
    """

    number: Small
    exit_code: ExitCode
    error: ErrorInfo | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """A message that an end waits to be joined; `invitation` is for another host."""

    number: Small
    invitation: StreamInvitation | None = None


class EndFailed(msgspec.Struct, frozen=True, kw_only=True, tag="end_failed"):
    """A message that an end could not be made."""

    number: Small
    error: ErrorInfo


class SpareKept(msgspec.Struct, frozen=True, kw_only=True, tag="spare_kept"):
    """The memory of the process that waits; 0: there is none."""

    own_bytes: Count


class LogLines(msgspec.Struct, frozen=True, kw_only=True, tag="log_lines"):
    """The lines that the processes of a worker's host have printed, for the head to show.

    Attributes:
        lines: pairs of the name of a process and a line; the name "" is the worker itself.
        num_dropped: lines that were left out since the last of these messages.
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

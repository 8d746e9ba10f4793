"""A host elsewhere as the head has it, and the agent that serves it: both ends of a wire, served by hand."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fakes import FakeClock
from penstock.errors import PeerError
from penstock.families.registry import resolve_model_directory
from penstock.hosts.agent import Agent, AllowedNames
from penstock.hosts.agent_messages import AgentHello, LogLines, ToAgent, ToHead
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.bell import Bell
from penstock.hosts.rank_host import LinkNeed, Parties
from penstock.hosts.remote_host import Cluster, RemoteHost
from penstock.hosts.weights.model_supply import Delivery
from penstock.kvstore.own_store import OwnStore
from penstock.process.config import RankConfig
from penstock.process.readiness import Waitable
from penstock.trust.credentials import Credentials
from rank_configs import make_rank_configs
from stand_in_hosts import StandInHost, StandInMember

MODEL, IDENTITY = "/models/on/the/head", b"identity"
RUN = "0123456789abcdef"  # of the head
LINK = LinkNeed(frame_bytes=64, num_frames=2)
SECRET = Credentials(key_pem=b"key", certificate_pem=b"certificate", authority_pem=b"authority")


def rank_config(stage: int = 1, **changed: Any) -> RankConfig:
    """Of two stages, as the head has it."""
    return make_rank_configs(resolve_model_directory("demo"), 2, model_path=MODEL, **changed)[stage]


class StandInModels:
    """What gets ranks their weights, as a test plays it.

    Attributes:
        sought: number and identity of each search.
        deliveries: that the agent takes next.
        ended: what else was asked of it, in order.
    """

    def __init__(self) -> None:
        self.sought: list[tuple[int, bytes, RankConfig]] = []
        self.deliveries: list[Delivery] = []
        self.ended: list[object] = []
        self._bell = Bell()

    def fileno(self) -> int:
        return self._bell.fileno()

    def seek(self, number: int, identity: bytes, rank: RankConfig) -> None:
        self.sought.append((number, identity, rank))

    def take(self) -> list[Delivery]:
        taken, self.deliveries = self.deliveries, []
        return taken

    def forget(self, number: int) -> None:
        self.ended.append(number)

    def close(self) -> None:
        self.ended.append("close")
        self._bell.close()


class StandInLog:
    """Lines that a test has given."""

    sources: Sequence[Waitable] = ()

    def __init__(self) -> None:
        self.lines: list[LogLines] = []

    def take(self) -> list[LogLines]:
        lines, self.lines = self.lines, []
        return lines


class Pair:
    """A remote host at the head and the agent that serves it, each served by hand."""

    def __init__(self) -> None:
        ends = socket.socketpair()
        self.own = StandInHost("desk", "ring", "tls")
        self.clock, self.head_clock = FakeClock(), FakeClock()
        self.allowed = AllowedNames()
        self.models = StandInModels()
        self.lost: list[PeerError] = []
        self.num_broken = 0
        self.logged: list[LogLines] = []
        self.log = StandInLog()
        self.agent_wire: AgentWire[ToAgent] = AgentWire(ends[1], ToAgent)  # the first one
        self.head_wire: AgentWire[ToHead] = AgentWire(ends[0], ToHead)
        store = OwnStore("desk", None, Path("/kv/of/desk"))
        self.agent = Agent(
            self.own, self.agent_wire, self.models, self.allowed, self.clock, self.log, store=store
        )
        hello = hello_at(self.head_wire)
        cluster = Cluster(
            name="0" * 32, run=RUN, issue=lambda name: SECRET, identify=lambda path: path.encode()
        )
        cluster = msgspec.structs.replace(cluster, identify={MODEL: IDENTITY}.__getitem__)
        self.host = RemoteHost(
            self.head_wire,
            "desk",
            hello,
            cluster,
            self.lost.append,
            self.logged.append,
            self.head_clock,
            self._note_break,
        )

    def _note_break(self) -> None:
        self.num_broken += 1

    def break_connection(self) -> None:
        """Break it as an RST does: both sides know at once, and what was under way is lost."""
        self.head_wire.give_up("it was reset.")
        self.host.pump()
        self.agent.serve(0.0)
        assert self.agent.failure is not None

    def join_again(self) -> bool:
        """The worker joins again; whether all goes on."""
        ends = socket.socketpair()
        self.agent.reconnect(AgentWire(ends[1], ToAgent))
        return self.attach(AgentWire(ends[0], ToHead))

    def attach(self, wire: AgentWire[ToHead]) -> bool:
        self.head_wire = wire
        goes_on = self.host.attach(wire, hello_at(wire))
        self.serve()
        return goes_on

    def serve(self) -> None:
        """Let the agent do all that it was asked for."""
        self.clock.advance(1.0)
        self.agent.serve(0.0)

    def tend(self, now: float) -> None:
        """The supervisor looks after the host."""
        self.head_clock.now = now
        self.host.tend(now)

    def serve_who_asks(self) -> None:
        """Let the agent wait for another thread, which asks. Time stands still: no silence is too long."""
        self.agent.serve()

    def start(self, **changed: Any) -> tuple[Any, StandInMember]:
        """A rank, as the head and as the agent's own host have it."""
        config = rank_config(**changed)
        member = self.host.start_rank(config, "stage 1", 1)
        self.serve()
        return member, self.own.members[-1]

    def close(self) -> None:
        self.host.close()
        self.agent.close()


def hello_at(wire: AgentWire[ToHead]) -> AgentHello:
    """What the agent at the other end has said first."""
    (hello,) = wire.receive()
    assert isinstance(hello, AgentHello)
    return hello


def parties(peer_host: str, own: str = "rank-1", epoch: int = 3) -> Parties:
    return Parties(epoch=epoch, own=own, peer="rank-0", peer_host=peer_host)

"""The parts of a worker that outlast its connection to a head: its processes, its log and the agent.

    serve(head)       serves until the connection breaks; the agent goes on where it was, if the head knows it
    await_attempt()   waits while the worker joins; ranks go on for a while (`agent.KEEP_RANKS_S`)
    wait(seconds)     waits between two tries to join; ranks go on in the same way

Used by `hosts.worker`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.hosts.agent import KEEP_RANKS_S, Agent, AllowedNames
from penstock.hosts.agent_messages import ToAgent
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.link_streams import ProvedStreams
from penstock.hosts.local import LocalHost
from penstock.hosts.logs.child_outputs import PipedOutputs
from penstock.hosts.logs.worker_log import WorkerLog
from penstock.hosts.model_shelf import ModelShelf
from penstock.hosts.network.interfaces import addresses_beside
from penstock.hosts.network.scout import OwnScout
from penstock.hosts.network.scouting_agent import ScoutingAgent
from penstock.hosts.weights.model_finder import ModelFinder
from penstock.hosts.weights.model_supply import ModelSupply
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.kvstore.own_store import OwnStore
from penstock.process.link_ports import PortRange
from penstock.process.readiness import Waitable, await_readable
from penstock.trust.joining import Address, JoinedHead, connect_for_weights
from penstock.trust.peer_names import AGENT_ROLE, PeerName

LOOK_EVERY_S = 1.0  # between two looks at the processes of this host while no head is connected

Tell = Callable[[str], None]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings on a worker's own command line.

    Attributes:
        head: address and port at which the head listens when the worker starts.
        name: name of this host.
        state: directory in which the worker's credentials are kept.
        address: address at which other hosts reach this host; "": the best one that is found, and until then
            that of its connection to the head.
        ports: ports at which this host may listen for links.
        models: directories that are searched for models.
        weights: directory in which fetched weights are kept; None: one below `state`.
        store: address of the store of KV blocks; None: if the head's store is a directory, one below `state`.
        is_plain: links are not encrypted.
        patience_s: seconds to wait for the head to start, before this host has joined it for the first time.
        away_limit_s: after the first join, the worker ends if the head is away for longer than this.
        threads_ahead: threads of the spare process that is started ahead, for the first rank that the head
            requests; 0: none is started.
    """

    head: Address
    name: str
    state: Path
    address: str = ""
    ports: PortRange
    models: Sequence[Path] = ()
    weights: Path | None = None
    store: str | None = None
    is_plain: bool = False
    patience_s: float = 0.0
    away_limit_s: float = math.inf
    threads_ahead: int = 0


class _NoAgent:
    """A stand-in for the agent before the first head has been joined: it serves nothing.

    Args:
        watched: objects to poll; `serve` returns when one is readable.
    """

    has_members = False

    def __init__(self, watched: Sequence[Waitable]) -> None:
        self._watched = watched

    def serve(self, timeout_s: float) -> set[Waitable]:
        return set(await_readable(self._watched, timeout_s))

    def close(self) -> None:
        """Do nothing."""


class Station:
    """Holds what a worker keeps from one connection to the next: its host, its log and its agent.

    The agent carries out on this host what the head requests. A head of another cluster gets a new agent.

    Args:
        spare_path: path of the socket of a spare process, which waits to become a rank. If this worker is
            killed, the next worker on this machine connects there and takes the spare process over.
        cache: fetched weights on the disk of this host.
        tell: takes lines for the user.
        stop: object to poll: readable when the worker is to end.
        attempts: object to poll: readable when an attempt to join the head has ended (`JoinAttempts`).
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        spare_path: Path,
        cache: WeightCache,
        tell: Tell,
        stop: Waitable,
        attempts: Waitable,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._tell = tell
        self._stop = stop
        self._attempts = attempts
        self._clock = clock
        outputs = PipedOutputs()
        self._log = WorkerLog(tell, outputs, clock)
        self._host = LocalHost(name=settings.name, outputs=outputs, successor_path=str(spare_path))
        if settings.threads_ahead:
            with contextlib.suppress(OSError):  # no descriptors, no memory: ranks start when they are needed
                self._host.start_ahead(settings.threads_ahead)
        self._cluster = ""
        self._was_needed = True  # whether the last head that was joined had a place for this host
        self._agent: Agent | _NoAgent = _NoAgent((stop, attempts))

    @property
    def has_members(self) -> bool:
        """Whether ranks, or other processes that the head has requested, run on this host."""
        return self._agent.has_members

    def serve(self, head: JoinedHead) -> bool:
        """Serve the head until the connection breaks or the worker is to stop; return whether to stop."""
        agent = self._join(head)
        had_members, is_welcome = agent.has_members, False
        while agent.failure is None:
            had_members = agent.has_members
            is_told = self._stop in agent.serve()
            if agent.reception == "welcome" and not is_welcome:
                is_welcome = self._was_needed = True
                self._say_joined(head)
            if is_told:
                return True
        self._say_end(agent, agent.failure.message, had_members)
        return False

    def _say_joined(self, head: JoinedHead) -> None:
        self._log.say(
            f"{self._settings.name} has joined {head.name.host}; links from other hosts use "
            f"{self._own_address}, ports {self._settings.ports}"
        )

    def _say_end(self, agent: Agent, why: str, had_members: bool) -> None:
        """Tell the user why a connection to the head has ended, and what becomes of the ranks here."""
        if agent.has_members:
            self._tell(
                f"the connection to the head is broken: {why} Its ranks keep running for {KEEP_RANKS_S:g} s, "
                "in which this host can reconnect."
            )
        elif agent.reception == "not_needed":
            if self._was_needed:
                self._tell(
                    f"{self._settings.name} is not needed yet: all hosts have joined. This host tries again."
                )
            self._was_needed = False
        else:
            ranks = " The ranks of this host are ended." if had_members else ""
            self._tell(f"the head is lost: {why}{ranks}")

    def await_attempt(self) -> bool:
        """Wait until the attempt to join the head has ended, or the worker is to stop.

        Ranks of this host are served meanwhile.

        Returns:
            Whether the worker is to stop.
        """
        readable: set[Waitable] = set()
        while readable.isdisjoint((self._stop, self._attempts)):
            readable = self._serve_without_head(LOOK_EVERY_S)
        return self._stop in readable

    def wait(self, seconds: float) -> bool:
        """Wait before the next attempt to join, while ranks of this host are served.

        Returns:
            Whether the worker is to stop: then the wait ends at once.
        """
        deadline = self._clock() + seconds
        while (left_s := deadline - self._clock()) > 0:
            if self._stop in self._serve_without_head(min(left_s, LOOK_EVERY_S)):
                return True
        return False

    def close(self) -> None:
        """End all processes of this host that the worker has started, and close its log."""
        self._agent.close()
        self._host.close()
        self._log.close()

    def _serve_without_head(self, timeout_s: float) -> set[Waitable]:
        """Serve the processes of this host, and return the sources that are readable."""
        had_members = self._agent.has_members
        readable = self._agent.serve(timeout_s)
        if had_members and not self._agent.has_members:
            self._tell("the head has ended or refuses this host. Its ranks are ended.")
        return readable

    def _join(self, head: JoinedHead) -> Agent:
        """Connect the agent to this head; a head of another cluster gets a new agent."""
        settings = self._settings
        self._head, self._own_address = head, settings.address or str(head.connection.getsockname()[0])
        wire: AgentWire[ToAgent] = AgentWire(head.connection, ToAgent)
        if isinstance(self._agent, Agent) and self._cluster == head.name.cluster:
            self._agent.reconnect(wire)
            agent = self._agent
        else:
            self._agent.close()
            agent = self._agent = self._new_agent(wire)
            self._cluster = head.name.cluster
        return agent

    def _new_agent(self, wire: AgentWire[ToAgent]) -> Agent:
        settings = self._settings
        allowed = AllowedNames()
        self._host.use_streams(
            ProvedStreams(
                settings.name,
                self._head.name.cluster,
                lambda: allowed.run_of_head,
                lambda peer: self._own_address,
                settings.ports,
                allowed.issue,
                is_plain=settings.is_plain,
                fixed_address=settings.address,
            )
        )
        models = ModelSupply(self._finder().find, self._log.say)
        agent = Agent(
            self._host,
            wire,
            models,
            allowed,
            self._clock,
            log=self._log,
            make_scout=self._make_scout,
            store=self._own_store(),
        )
        for source in (self._stop, self._attempts):
            agent.watch(source)
        return agent

    def _own_store(self) -> OwnStore:
        """Return where this host keeps KV blocks if the head asks for it."""
        settings = self._settings
        return OwnStore(
            settings.name, settings.store, settings.state / "kv-store" / settings.name, self._log.say
        )

    def _finder(self) -> ModelFinder:
        """Return the finder of weights for ranks: on this host, or at the head that it has joined."""
        return ModelFinder(
            ModelShelf(self._settings.models),
            self._cache,
            lambda cancellation: connect_for_weights(
                self._head.address, self._head.credentials, self._head.name, hold=cancellation.add
            ),
        )

    def _make_scout(self) -> ScoutingAgent:
        """Return the scout that finds network paths from this host to others of the head's cluster."""
        settings = self._settings
        peer = PeerName(cluster=self._head.name.cluster, host=settings.name, role=AGENT_ROLE)
        return ScoutingAgent(
            OwnScout(
                peer,
                lambda: self._head.credentials,
                settings.ports,
                lambda _: addresses_beside(self._own_address),
                settings.address,
            )
        )

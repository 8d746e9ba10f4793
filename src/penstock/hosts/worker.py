"""The life of a worker: it joins the head, serves it as an agent, and comes back when the head is gone.

    joining ──certificate──▶ connecting ──▶ serving ──the head is gone──▶ its ranks are ended
                                 ▲                                             │
                                 └──────────── after a pause ◀─────────────────┘

Called by `penstock worker`. Ends when it is told to, or when the head will never let it in.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.config.hosts import own_version
from penstock.errors import CertificateError, JoinError, NameTakenError, PeerError, WrongClusterError
from penstock.hosts.agent import Agent, AllowedNames
from penstock.hosts.agent_messages import ToAgent
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.link_streams import ProvedStreams
from penstock.hosts.local import LocalHost
from penstock.hosts.logs.child_outputs import PipedOutputs
from penstock.hosts.logs.worker_log import WorkerLog
from penstock.hosts.member import Waitable
from penstock.hosts.model_shelf import ModelShelf
from penstock.hosts.network.interfaces import addresses_beside
from penstock.hosts.network.scout import OwnScout
from penstock.hosts.network.scouting_agent import ScoutingAgent
from penstock.hosts.weights.model_finder import ModelFinder
from penstock.hosts.weights.model_supply import ModelSupply
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.kvstore.own_store import OwnStore
from penstock.process.link_ports import PortRange
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address, JoinedHead, connect_for_weights, join_with_token, rejoin
from penstock.trust.peer_names import AGENT_ROLE, PeerName

FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 10.0  # between two tries to reach the head

Tell = Callable[[str], None]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's own command line says.

    Attributes:
        name: of this host.
        address: under which other hosts reach it; "": the best one that is found, and until then that of its
            connection to the head.
        models: directories with models.
        weights: where fetched weights are kept; None: below `state`.
        state: where its credentials are kept.
        store: address of the store of KV blocks; None: if the head's is a directory, one below `state`.
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


def credentials_path(state: Path, head: Address, name: str) -> Path:
    """Return the file in which the host `name` keeps its certificate for a head."""
    host, port = head
    return state / "worker" / f"{host.replace('/', '_')}_{port}_{name}"


class Worker:
    """Args:
    settings: of this host.
    token: asks for the join token; called where this host has no certificate of the head yet.
    tell: takes lines for the user.
    stop: readable when the worker is to end.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        token: Callable[[], JoinToken],
        tell: Tell,
        stop: Waitable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._token = token
        self._tell = tell
        self._stop = stop
        self._clock = clock
        self._path = credentials_path(settings.state, settings.head, settings.name)
        self._weights = settings.weights or settings.state / "weights"

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            JoinError: the head does not let this host in, and never will.
            PeerError: it cannot be reached for the first join.
            UsageError: the token, the state directory or that of the weights cannot be used.
        """
        with contextlib.closing(WeightCache(self._weights)) as cache:
            self._live(cache)

    def _live(self, cache: WeightCache) -> None:
        credentials = self._credentials()
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock()
            try:
                head = self._connect(credentials)
                credentials = head.credentials
                if self._serve(head, cache):
                    return
            except (NameTakenError, PeerError) as error:
                if isinstance(error, JoinError) and not isinstance(error, NameTakenError):
                    raise
                self._tell(error.message)
            if self._clock() - began > MOST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._tell(f"the next try to join the head is in {pause_s:g} s")
            if self._waited(pause_s):
                return
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _credentials(self) -> Credentials:
        """Those of before, or new ones for a token."""
        try:
            return Credentials.load(self._path)
        except FileNotFoundError:
            return self._join()

    def _join(self) -> Credentials:
        settings = self._settings
        return join_with_token(
            settings.head, self._token(), host=settings.name, version=own_version(), path=self._path
        )

    def _connect(self, credentials: Credentials) -> JoinedHead:
        try:
            return rejoin(self._settings.head, credentials, version=own_version(), path=self._path)
        except (CertificateError, WrongClusterError) as error:  # or a head with a new identity
            self._tell(f"{error.message} A token is needed once more.")
            return rejoin(self._settings.head, self._join(), version=own_version(), path=self._path)

    def _serve(self, head: JoinedHead, cache: WeightCache) -> bool:
        """Serve the head until it is gone, or the worker is to stop; whether it is."""
        settings = self._settings
        own_address = settings.address or str(head.connection.getsockname()[0])
        allowed = AllowedNames()
        streams = ProvedStreams(
            settings.name,
            head.name.cluster,
            lambda peer: own_address,
            settings.ports,
            allowed.issue,
            is_plain=settings.is_plain,
            fixed_address=settings.address,
        )
        wire: AgentWire[ToAgent] = AgentWire(head.connection, ToAgent)
        outputs = PipedOutputs()
        log = WorkerLog(self._tell, outputs, self._clock)
        models = ModelSupply(self._finder(head, cache).find, log.say)
        host = LocalHost(name=settings.name, streams=streams, outputs=outputs)
        store = OwnStore(settings.name, settings.store, settings.state / "kv-store" / settings.name, log.say)
        agent = Agent(host, wire, models, allowed, log=log, scout=self._scout(head, own_address), store=store)
        agent.watch(self._stop)
        log.say(
            f"{settings.name} has joined {head.name.host}; links from other hosts come to {own_address}, "
            f"ports {settings.ports}"
        )
        try:
            while agent.failure is None:
                if agent.serve():
                    return True
            self._tell(f"the head is gone: {agent.failure.message} The ranks of this host are ended.")
            return False
        finally:
            agent.unwatch(self._stop)
            agent.close()
            log.close()

    def _finder(self, head: JoinedHead, cache: WeightCache) -> ModelFinder:
        """What gets ranks their weights: from this host, or from the head that it has joined."""
        address, credentials, name = self._settings.head, head.credentials, head.name
        return ModelFinder(
            ModelShelf(self._settings.models),
            cache,
            lambda: connect_for_weights(address, credentials, name),
        )

    def _scout(self, head: JoinedHead, own_address: str) -> ScoutingAgent:
        """Who looks for ways from this host to others of the head's cluster."""
        settings = self._settings
        peer = PeerName(cluster=head.name.cluster, host=settings.name, role=AGENT_ROLE)
        return ScoutingAgent(
            OwnScout(
                peer,
                head.credentials,
                settings.ports,
                lambda _: addresses_beside(own_address),
                settings.address,
            )
        )

    def _waited(self, seconds: float) -> bool:
        """Wait; whether the worker is to stop."""
        ready, _, _ = select.select([self._stop], [], [], seconds)
        return bool(ready)

"""Gathers the hosts of an engine: the head, which is this host, and the workers that join it.

The head listens, and a starter (`hosts.launchers.starter`) gets the workers started: it shows the command
that a user is to type on the other hosts, or has a launcher do it.

`--hosts` says how many hosts the engine has, the head counted. Once the engine has begun, more workers are
let in and stand by: when a worker is lost, one of them takes its place. The lost worker may come back.

Made by `hosts.launchers.backends`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.config.hosts import HostsConfig, head_directory, own_host_name, own_version, parse_address
from penstock.errors import JoinTokenError, LinkClosedError, PeerError, PenstockError, UnavailableError
from penstock.hosts.agent_messages import NotNeeded
from penstock.hosts.launchers.engine_hosts import Tell, Voices
from penstock.hosts.launchers.starter import TypedByUser, WantedWorkers, WorkerStarter
from penstock.hosts.link_streams import ProvedStreams
from penstock.hosts.local import LocalHost
from penstock.hosts.logs.head_log import HeadLog
from penstock.hosts.network.interfaces import addresses_beside, unmapped
from penstock.hosts.network.joining_address import listen_for_workers, loopback_warning
from penstock.hosts.network.path_finding import pairs_to_connect
from penstock.hosts.network.scout import OwnScout, Scout
from penstock.hosts.network.visits import Visits
from penstock.hosts.network.way_search import WaySearch
from penstock.hosts.rank_host import Hosts
from penstock.hosts.remote_host import Cluster, RemoteHost
from penstock.hosts.revocations import Revocations
from penstock.hosts.weights.served_models import ServedModels
from penstock.hosts.weights.tensor_digests import TensorDigests
from penstock.hosts.weights.weight_server import WeightServer
from penstock.hosts.worker_gate import JoinedWorker, WorkerGate
from penstock.process.link_ports import PortRange
from penstock.process.readiness import Waitable, await_readable
from penstock.told_text import shown_line
from penstock.trust.admission import AdmissionBook
from penstock.trust.door import Door
from penstock.trust.head_join import ConnectedHosts, HeadConversation
from penstock.trust.identity import ClusterIdentity
from penstock.trust.join_token import head_token
from penstock.trust.peer_names import AGENT_ROLE, HEAD_ROLE, PeerName
from penstock.trust.private_files import make_private_directory
from penstock.trust.worker_door import worker_door


class GatheredHosts:
    """The hosts of an engine: this one and the workers that join it. Implements `EngineHosts`.

    It listens for workers from the start; `gather` waits for them.

    Args:
        settings: the number of hosts, the address to listen at, the file of the join token, and more.
        voices: functions that show lines and warnings to the user.
        starter: gets the workers started; None: a user starts them with a command that is shown.
        max_joins: how often the join token may be used; 0: once for each worker. More are needed if new
            workers are to replace lost ones.

    Raises:
        UsageError: the token file or the state directory cannot be used, or `cryptography` is missing.
        PortInUseError: the address cannot be listened at.
    """

    def __init__(
        self,
        settings: HostsConfig,
        voices: Voices,
        starter: WorkerStarter | None = None,
        max_joins: int = 0,
    ) -> None:
        assert settings.listen_workers is not None
        assert settings.join_token_file is not None
        tell, warn = voices.tell, voices.warn
        self._voices = voices
        self._starter = starter or TypedByUser(tell)
        self._num_workers = settings.hosts - 1
        self._name = own_host_name(settings.host_name)
        self._addresses: dict[str, str] = {}  # by worker: the address at which it reaches this host
        directory = head_directory(settings.state_dir)
        identity = ClusterIdentity.open(directory, time.time)
        served = ServedModels(TensorDigests(_private(directory / "digests")))
        self._weights = WeightServer(served)
        book = AdmissionBook(directory, time.time)
        self._revocations = Revocations(book, self._weights, warn)
        self._cluster = Cluster(
            name=identity.name,
            run=identity.run,
            issue=identity.link_credentials,
            identify=served.identify,
        )
        ports = PortRange.parse(settings.link_ports)
        streams = ProvedStreams(
            self._name,
            identity.name,
            lambda: identity.run,
            lambda peer: self._addresses[peer],
            ports,
            identity.link_credentials,
            is_plain=settings.insecure_links,
        )
        self._head = LocalHost(name=self._name, streams=streams)
        self._workers: dict[str, RemoteHost] = {}  # workers that were let in, by the names of their hosts
        self._not_needed: set[str] = set()  # names of workers that were turned away
        address = parse_address(settings.listen_workers, "--listen-workers")
        with contextlib.ExitStack() as undone:
            self._search = WaySearch(directory / "ways", tell, warn)
            undone.callback(self._search.close)
            self._scout = self._own_scout(identity, ports, self._addresses.__getitem__)
            visits = Visits(lambda address: self._own_scout(identity, ports, lambda _: address), ports)
            _allow_token(settings, identity, book, warn, max_joins)
            listener = undone.enter_context(listen_for_workers(*address))
            self._gate = self._open_gate(identity, book, listener, visits)
            undone.callback(self._gate.close)
            if warning := loopback_warning(*address):
                warn(warning)
            undone.pop_all()
        self.hosts = Hosts(self._head)
        wanted = WantedWorkers(
            number=self._num_workers,
            host_name=self._name,
            cluster=identity.name,
            host=address[0],
            port=listener.getsockname()[1],
            token_file=settings.join_token_file,
            link_ports=str(ports),
            is_plain=settings.insecure_links,
        )
        try:
            self._starter.start(wanted)
        except BaseException:
            self.close()
            raise

    @property
    def sources(self) -> Sequence[Waitable]:
        """The objects to poll: one is readable when `admit` has something to do."""
        return self._gate, self._search, *self._starter.sources

    def gather(self, lifelines: Sequence[Waitable]) -> None:
        """Wait until all workers have joined and the network routes between all hosts are known.

        If a connection breaks or another worker takes the place of a lost one meanwhile, routes are looked
        for again; known ones are only tried. Afterwards `hosts` has all hosts.

        Args:
            lifelines: objects to poll; one is readable when the program that started the engine has ended.

        Raises:
            UnavailableError: a lifeline is readable.
            PenstockError: the starter reports that no more workers will come.
        """
        is_known = False
        while not is_known:
            self._wait_until(lambda: len(self._workers_there) >= self._num_workers, lifelines)
            connected = self._connected
            for one, other in pairs_to_connect([self._name, *connected]):
                self._search.find(self._scout_of(one), self._scout_of(other))
            self._wait_until(lambda: self._search.is_idle, lifelines)
            is_known = connected == self._connected
        workers = [self._workers[name] for name in connected]
        self.hosts = Hosts(self._head, *workers, routes=self._search, readmit=self._readmit)

    def admit(self) -> None:
        """Take in the workers that have joined since the last call, new ones and those that are back.

        Also begin to look for the network routes to them, and turn away workers that are not needed yet.
        """
        self._starter.attend()
        for name in self._starter.take_lost():
            if name in self._workers and not self._workers[name].is_there:
                self._workers[name].distrust(LinkClosedError("its launcher reports it lost."))
        self._admit(self._has_place)
        self._let_stand_by()

    def tend(self, now: float) -> None:
        """Send each worker a sign of life, and give up workers that are silent or whose access is revoked.

        Args:
            now: monotonic seconds.
        """
        self._revocations.apply(now, self._workers)
        for host in self._workers.values():
            host.tend(now)
        self._search.attend()
        self._let_stand_by()

    def close(self) -> None:
        """Let no more workers in, close all hosts, and end the workers that the starter has started."""
        self._gate.close()
        self._weights.close()
        self._search.close()
        for host in self._workers.values():
            host.close()
        self._starter.close()
        self._head.close()

    def _admit(self, has_place: Callable[[str], bool]) -> None:
        self._search.attend()
        for address, error in self._gate.take_refused():
            self._voices.tell(f"a connection from {address} was refused: {shown_line(error.message)}")
        if num_left_out := self._gate.take_left_out():
            self._voices.tell(f"also refused: {_counted(num_left_out, 'more connection')}")
        for worker in self._gate.take():
            if not has_place(worker.host):
                self._turn_away(worker)
                continue
            try:
                self._let_in(worker)
            except OSError as error:  # such as no descriptor; the worker comes back
                self._voices.tell(
                    f"the worker {worker.host} cannot be let in at the moment: {error.strerror or error}"
                )
                self._gate.send_away(worker)

    def _has_place(self, host: str) -> bool:
        is_missing = len(self._workers_there) < self._num_workers
        return self._has_gathered or host in self._workers or is_missing

    def _readmit(self, now: float) -> None:
        """Take in workers that are back before the engine begins, and shut out revoked ones.

        Other workers are turned away: they would change the hosts for which a plan is being made.
        """
        self._admit(self.hosts.__contains__)
        self._revocations.apply(now, self._workers)

    def _let_stand_by(self) -> None:
        """Add to the engine's hosts each worker that was away, or was not needed, when all had gathered."""
        for host in self._workers_there if self._has_gathered else []:
            if host.name not in self.hosts:
                self.hosts.add(host)
                self._find_ways(host.name)

    def _wait_until(self, condition: Callable[[], bool], lifelines: Sequence[Waitable]) -> None:
        """Wait for workers or for their answers, as `gather` does."""
        while not condition():
            ready = await_readable([*self.sources, *lifelines], 1.0)
            if any(lifeline in ready for lifeline in lifelines):
                raise UnavailableError("the program that started the engine has ended.")
            self.admit()
            if self._starter.failure is not None:
                raise self._starter.failure
            self.tend(time.monotonic())

    def _own_scout(
        self, identity: ClusterIdentity, ports: PortRange, address_for: Callable[[str], str]
    ) -> OwnScout:
        """Return the scout of this host, which finds network paths; `address_for` says how peers reach it."""
        return OwnScout(
            PeerName(cluster=identity.name, host=self._name, role=HEAD_ROLE),
            lambda: identity.head_credentials(self._name),
            ports,
            lambda peer: addresses_beside(address_for(peer)),
        )

    def _open_gate(
        self,
        identity: ClusterIdentity,
        book: AdmissionBook,
        listener: socket.socket,
        visits: Visits,
    ) -> WorkerGate:
        connected = ConnectedHosts(self._name)

        def make_door(on_refused: Callable[[str, PenstockError], None]) -> Door[HeadConversation]:
            return worker_door(listener, identity, book, connected, self._name, own_version(), on_refused)

        return WorkerGate(make_door, connected, self._weights.serve, visits.receive)

    def _scout_of(self, host: str) -> Scout:
        if host == self._name:
            return self._scout
        peer = PeerName(cluster=self._cluster.name, host=host, role=AGENT_ROLE)
        return self._search.scout_of(self._workers[host], peer)

    def _find_ways(self, host: str) -> None:
        """Search for the network paths to a host that has joined late, or is back.

        Paths to all hosts are searched for, since any stage may become its neighbour. Its ranks can start
        meanwhile.
        """
        others = [self._name, *(worker.name for worker in self._workers_there if worker.name != host)]
        for other in others:
            self._search.find(self._scout_of(other), self._scout_of(host))

    @property
    def _has_gathered(self) -> bool:
        """Whether `gather` has ended: all hosts have joined, and the engine runs on them."""
        return self.hosts.routes is self._search

    @property
    def _connected(self) -> dict[str, list[Waitable]]:
        """The connections to the workers on which the engine is to run, by the names of their hosts."""
        return {host.name: list(host.wires) for host in self._workers_there[: self._num_workers]}

    @property
    def _workers_there(self) -> list[RemoteHost]:
        return [host for host in self._workers.values() if host.is_there]

    def _let_in(self, worker: JoinedWorker) -> None:
        self._addresses[worker.host] = unmapped(worker.local_address)
        self._revocations.note(worker.host, worker.serial)
        known = self._workers.get(worker.host)
        if known is None:
            known = self._workers[worker.host] = self._new_host(worker)
        elif known.attach(worker.wire, worker.hello):
            self._voices.tell(f"{worker.host} is back after a broken connection; its ranks kept running")
            return
        given = worker.hello.resources
        self._voices.tell(
            f"{worker.host} has joined from {worker.address}: {_counted(given.num_cpus, 'core')}, "
            f"{given.free_bytes / 1e9:.1f} GB free" + (f", {given.num_gpus} GPUs" * bool(given.num_gpus))
        )
        if self._has_gathered and worker.host in self.hosts:  # else `gather` or `_let_stand_by` searches
            self._find_ways(worker.host)

    def _turn_away(self, worker: JoinedWorker) -> None:
        """Turn away a worker for which there is no place.

        It tries again every few seconds; once the engine has begun it stands by.
        """
        if worker.host not in self._not_needed:
            self._not_needed.add(worker.host)
            self._voices.tell(
                f"the worker {worker.host} is not needed: --hosts is reached. It can stand by once the "
                "engine runs."
            )
        worker.wire.send(NotNeeded())
        self._gate.send_away(worker)

    def _new_host(self, worker: JoinedWorker) -> RemoteHost:
        return RemoteHost(
            worker.wire,
            worker.host,
            worker.hello,
            self._cluster,
            lambda error: self._lose(worker.host, error),
            HeadLog(worker.host, self._voices.show, time.monotonic).take,
            on_broken=lambda: self._gate.leave(worker.host),
        )

    def _lose(self, host: str, error: PeerError) -> None:
        self._voices.tell(f"lost: the host {host}: {error.message}")


def _allow_token(
    settings: HostsConfig, identity: ClusterIdentity, book: AdmissionBook, warn: Tell, max_joins: int
) -> None:
    """Let workers join with the token in the file; warn if they need it and nobody can join with it."""
    assert settings.join_token_file is not None
    token = head_token(Path(settings.join_token_file), identity.public_key)
    num_workers = settings.hosts - 1
    book.allow(token, max_joins or num_workers, settings.join_token_ttl_s)
    num_known = len(book.hosts())
    if num_known >= num_workers:
        return  # they come back with their certificates
    try:
        book.require_usable(token)
    except JoinTokenError as error:
        warn(
            f"{error.message} No worker can join with {settings.join_token_file}; {num_known} of "
            f"{_counted(num_workers, 'worker')} can return with a certificate. {error.remedy}"
        )


def _private(directory: Path) -> Path:
    make_private_directory(directory)
    return directory


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)

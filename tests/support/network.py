"""Hosts for tests, on one machine, with links that can be slow, lossy, stalled or pulled.

    loopback_network()   127.0.0.2, 127.0.0.3, …: everywhere on Linux, without root; links as they are
    cable_network()      namespaces, joined by virtual cables and a bridge: full speed, a rate, pulling
    shaped_network()     namespaces, joined by a program: delay, jitter, loss, stalls, a rate, pulling

Each is a context manager. On leaving it, after a failure too, all processes of its hosts are killed and
reaped and its interfaces are gone; with namespaces that is so even where the process of the tests is killed.
Where a machine cannot make the network the call raises `NetworkUnavailableError`, which the tests in
`tests/doors` turn into a skip with that reason. IPv6 has one loopback address alone, ::1, and no others to
give to hosts; in namespaces each host has addresses of both kinds.

    with shaped_network(seed=7) as network:
        one, other = network.hosts
        other.link.set_delay(0.05)                      # 50 ms each way
        server = other.popen([sys.executable, "server.py", "--host", other.address])
        with one.socket() as client:                    # a socket of this process in the other's network
            client.connect((other.address, 7701))
        other.link.pull()                               # and .plug()

docs/test-bed.md says what the links can and cannot do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import psutil

from namespaces import CommandFailedError, Namespace, NetworkUnavailableError, why_no_programs
from served import wait_until

Which = Literal["out", "in", "both"]  # of a link, seen from its host
L = TypeVar("L", covariant=True)

_SHAPER = Path(__file__).with_name("packet_shaper.py")
_TAIL_S = 0.02  # how long what waits for its turn at a rate limit may need at that rate
_BURST_S = 0.001
_REAP_LIMIT_S = 10.0


class LoopbackHost:
    """A host that is but an address of this machine.

    Attributes:
        name: `host0` is the first.
    """

    def __init__(self, number: int) -> None:
        self.name = f"host{number}"
        self.address = f"127.0.0.{number + 2}"
        self._children: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program, in a session of its own; `options` are those of `subprocess.Popen`."""
        child = subprocess.Popen(list(command), start_new_session=True, **options)
        self._children.append(child)
        return child

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a new socket, which is to be bound to `address` by the caller."""
        return socket.socket(family, kind)

    def kill_all(self) -> None:
        """Kill what was started here, with its descendants and their sessions, and reap it.

        A process is missed whose parent has ended and that has begun a session of its own.
        """
        for child in self._children:
            _kill_session(child)


class Link:
    """What joins a host of namespaces with a network.

    Attributes:
        address, address6: of the host on this link.
        interface: the name of the host's interface.
    """

    def __init__(self, host: Namespace, address: str, address6: str, interface: str) -> None:
        self.address = address
        self.address6 = address6
        self.interface = interface
        self._host = host

    def set_rate(self, bits_per_s: int) -> None:
        """Let no more than this leave the host; `tc tbf` does it, and repeated calls replace each other."""
        _set_rate(self._host, self.interface, bits_per_s)


class CableLink(Link):
    """A virtual cable from a host to a port of a bridge."""

    def __init__(self, host: Namespace, center: Namespace, port: str, link: Link) -> None:
        super().__init__(host, link.address, link.address6, link.interface)
        self._center = center
        self._port = port

    def set_rate(self, bits_per_s: int) -> None:
        """Let no more than this pass, in each direction."""
        super().set_rate(bits_per_s)
        _set_rate(self._center, self._port, bits_per_s)

    def pull(self) -> None:
        """Pull the cable: the host keeps its addresses and has no carrier; nobody gets an RST."""
        self._center.run("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        """Plug the cable in again."""
        self._center.run("ip", "link", "set", self._port, "up")


class ShapedLink(Link):
    """A link whose packets a program carries; every call is in force when it returns."""

    def __init__(self, host: Namespace, shaper: _Shaper, number: int, link: Link) -> None:
        super().__init__(host, link.address, link.address6, link.interface)
        self._shaper = shaper
        self._number = number

    def set_delay(self, seconds: float, jitter: float = 0.0, which: Which = "both") -> None:
        """Keep each packet for `seconds`, and up to `jitter` more; the order stays."""
        self._order("shape", which, delay_s=seconds, jitter_s=jitter)

    def set_loss(self, share: float, which: Which = "both") -> None:
        """Lose this share of packets; 1.0 in one direction is a one-way loss."""
        self._order("shape", which, loss=share)

    def set_reordering(self, share: float, which: Which = "both") -> None:
        """Let this share of packets overtake those that are delayed."""
        self._order("shape", which, reordering=share)

    def stall(self, seconds: float, which: Which = "both") -> None:
        """Let nothing pass for that long, and then all of it; nothing is lost."""
        self._order("hold", which, seconds=seconds)

    def pull(self) -> None:
        """Pull the cable: the host keeps its addresses and has no carrier; nobody gets an RST."""
        self._order("pull", "both")

    def plug(self) -> None:
        """Plug the cable in again."""
        self._order("plug", "both")

    def counts(self) -> dict[Which, dict[str, int]]:
        """Return how many packets `came` and how many were `lost`, by direction."""
        return self._order("count", "both")

    def _order(self, order: str, which: Which, **values: float) -> dict[Which, dict[str, int]]:
        counts: dict[Which, dict[str, int]] = self._shaper.order(
            order=order, host=self._number, direction=which, **values
        )
        return counts


class Host(Generic[L]):
    """A host with a network of its own.

    Attributes:
        name: `host0` is the first.
        links: one for each network that the host is in.
    """

    def __init__(self, number: int, namespace: Namespace, links: Sequence[L]) -> None:
        self.name = f"host{number}"
        self.links = links
        self._namespace = namespace
        self._children: list[subprocess.Popen[Any]] = []

    @property
    def link(self) -> L:
        """The first link."""
        return self.links[0]

    @property
    def address(self) -> str:
        """The address, of IPv4, on the first link."""
        assert isinstance(self.link, Link)
        return self.link.address

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command here; it stays one process."""
        return self._namespace.command(*words)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program here, in a session of its own; `options` are those of `subprocess.Popen`."""
        child = subprocess.Popen(self.command(*command), start_new_session=True, **options)
        self._children.append(child)
        return child

    def run(self, *command: str) -> str:
        """Run a program on this host to its end and return what it printed."""
        return self._namespace.run(*command)

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a new socket of this process, whose network is that of the host."""
        return self._namespace.socket(family, kind)

    def processes(self) -> list[int]:
        """Return the processes that run on this host, whoever has started them."""
        return self._namespace.processes()

    def kill_all(self) -> None:
        """Kill all processes of this host, and reap those that `popen` has started."""
        for child in self._children:  # one that has begun just now may not be in the namespace yet
            child.kill()
        self._namespace.kill_all()
        for child in self._children:
            _reap(child)


H = TypeVar("H", covariant=True)


class Network(Generic[H]):
    """The hosts that can reach each other."""

    def __init__(self, hosts: Sequence[H]) -> None:
        self.hosts = hosts


@contextmanager
def loopback_network(num_hosts: int = 2) -> Iterator[Network[LoopbackHost]]:
    """Make hosts that are addresses of this machine's loopback interface."""
    with ExitStack() as stack:
        hosts = [LoopbackHost(number) for number in range(num_hosts)]
        for host in hosts:
            stack.callback(host.kill_all)
            with socket.socket() as probe:
                try:
                    probe.bind((host.address, 0))
                except OSError as error:  # other systems than Linux have 127.0.0.1 alone
                    raise NetworkUnavailableError(
                        f"this machine has no address {host.address}: {error}"
                    ) from error
        yield Network(hosts)


@contextmanager
def cable_network(
    num_hosts: int = 2, num_links: int = 1, mtu: int = 1500
) -> Iterator[Network[Host[CableLink]]]:
    """Make hosts in namespaces, joined by cables; with several links each host has one in each network."""
    with ExitStack() as stack:
        with _unavailable_where_it_fails():
            center, spaces = _namespaces(stack, num_hosts)
            wires = [_lay_cables(center, spaces, number, mtu) for number in range(num_links)]
        yield Network(_hosts(stack, spaces, wires))


@contextmanager
def shaped_network(
    num_hosts: int = 2, num_links: int = 1, seed: int = 0, mtu: int = 1500
) -> Iterator[Network[Host[ShapedLink]]]:
    """Make hosts in namespaces whose packets a program carries; `seed` decides which are lost."""
    with ExitStack() as stack:
        with _unavailable_where_it_fails():
            center, spaces = _namespaces(stack, num_hosts)
            wires = [_shape(stack, center, spaces, number, seed + number, mtu) for number in range(num_links)]
        yield Network(_hosts(stack, spaces, wires))


class _Shaper:
    """The program that carries the packets of one network."""

    def __init__(
        self, center: Namespace, links: Sequence[Link], spaces: Sequence[Namespace], seed: int
    ) -> None:
        hosts = [
            {"namespace": space.path, "addresses": [link.address, link.address6]}
            for link, space in zip(links, spaces, strict=True)
        ]
        plan = json.dumps({"seed": seed, "device": links[0].interface, "hosts": hosts})
        self._process = subprocess.Popen(
            center.command(sys.executable, str(_SHAPER), plan),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer()
        except CommandFailedError:
            self.close()
            raise

    def order(self, **order: Any) -> Any:
        """Send an order, and return the answer to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the program, and with it its devices."""
        self._process.kill()
        _reap(self._process)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not (line := self._process.stdout.readline()):
            said = self._process.stderr.read().strip().splitlines() or ["it gives no reason"]
            raise CommandFailedError(f"packets cannot be carried through a TUN device: {said[-1]}")
        return json.loads(line)


@contextmanager
def _unavailable_where_it_fails() -> Iterator[None]:
    """Take a failure here for a lack of the machine; later ones are failures of the test."""
    try:
        yield
    except CommandFailedError as error:
        raise NetworkUnavailableError(str(error)) from error


def _namespaces(stack: ExitStack, num_hosts: int) -> tuple[Namespace, list[Namespace]]:
    """Make the namespace in the middle and those of the hosts."""
    if reason := why_no_programs():
        raise NetworkUnavailableError(reason)
    center = Namespace.first()
    stack.callback(center.close)
    spaces = []
    for _ in range(num_hosts):
        space = center.beside()
        stack.callback(space.close)
        space.run("ip", "link", "set", "lo", "up")
        spaces.append(space)
    return center, spaces


def _hosts(stack: ExitStack, spaces: Sequence[Namespace], wires: Sequence[Sequence[L]]) -> list[Host[L]]:
    hosts = [Host(number, space, [links[number] for links in wires]) for number, space in enumerate(spaces)]
    for host in hosts:
        stack.callback(host.kill_all)
    return hosts


def _plain_link(space: Namespace, number: int, host: int) -> Link:
    """Return the names and addresses of a host in network `number`."""
    return Link(space, f"10.77.{number}.{host + 1}", f"fd00:77:{number:x}::{host + 1:x}", f"eth{number}")


def _set_up(space: Namespace, link: Link, mtu: int) -> None:
    """Give an interface its addresses; it makes none by itself, and sends nothing about them."""
    script = f"""
        link set {link.interface} addrgenmode none mtu {mtu} txqueuelen 10000 up
        address add {link.address}/24 dev {link.interface}
        address add {link.address6}/64 dev {link.interface} nodad
    """
    space.run("ip", "-batch", "-", script=script)


def _lay_cables(center: Namespace, spaces: Sequence[Namespace], number: int, mtu: int) -> list[CableLink]:
    """Make a bridge with a cable to each host."""
    bridge, links = f"br{number}", []
    center.run("ip", "link", "add", bridge, "mtu", str(mtu), "type", "bridge", "forward_delay", "0")
    center.run("ip", "link", "set", bridge, "up")
    for host, space in enumerate(spaces):
        plain, port = _plain_link(space, number, host), f"p{number}h{host}"
        script = f"""
            link add {port} mtu {mtu} type veth peer name {plain.interface} netns {space.pid}
            link set {port} master {bridge} addrgenmode none up
        """
        center.run("ip", "-batch", "-", script=script)
        _set_up(space, plain, mtu)
        links.append(CableLink(space, center, port, plain))
    return links


def _shape(
    stack: ExitStack, center: Namespace, spaces: Sequence[Namespace], number: int, seed: int, mtu: int
) -> list[ShapedLink]:
    """Start a program that joins the hosts."""
    plain = [_plain_link(space, number, host) for host, space in enumerate(spaces)]
    shaper = _Shaper(center, plain, spaces, seed)
    stack.callback(shaper.close)
    for link, space in zip(plain, spaces, strict=True):
        _set_up(space, link, mtu)
    return [ShapedLink(spaces[host], shaper, host, link) for host, link in enumerate(plain)]


def _set_rate(space: Namespace, interface: str, bits_per_s: int) -> None:
    """Put a token bucket before an interface.

    It holds `_BURST_S` of the rate, or a dozen packets where that is more; what finds no room in `_TAIL_S`
    of the rate, or in 128 KiB, is lost, as in a switch.
    """
    per_s = bits_per_s // 8
    burst, queue = max(18_000, int(per_s * _BURST_S)), max(1 << 17, int(per_s * _TAIL_S))
    words = f"qdisc replace dev {interface} root tbf rate {bits_per_s}bit burst {burst} limit {queue + burst}"
    try:
        space.run("tc", *words.split())
    except CommandFailedError as error:
        if "kind is unknown" in str(error):
            raise NetworkUnavailableError(f"this kernel has no token buckets: {error}") from error
        raise


def _kill_session(child: subprocess.Popen[Any]) -> None:
    """Kill and reap a child that leads a session, with its descendants, and wait until all are gone."""
    descendants = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(child.pid).children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    _reap(child)
    wait_until(lambda: not any(map(_is_running, descendants)), _REAP_LIMIT_S)


def _is_running(process: psutil.Process) -> bool:
    """Whether a process, which is not ours to reap, still does something."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _reap(child: subprocess.Popen[Any]) -> None:
    child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()

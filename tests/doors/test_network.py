"""The network of the tests itself: what a link is set to do is what programs on its hosts meet.

Times are asserted from below only: a busy machine makes everything slower and nothing faster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import psutil
import pytest

from namespaces import CommandFailedError
from network import Host, Network, ShapedLink, cable_network, shaped_network
from paths import REPOSITORY
from served import wait_until

pytestmark = pytest.mark.doors

HANG_S = 60.0
ABSENT_S = 0.4  # for what must not come
Made = Callable[[], AbstractContextManager[Network[Host[Any]]]]
both_kinds = pytest.mark.parametrize("make", [cable_network, shaped_network], ids=["cable", "shaped"])


@contextlib.contextmanager
def connected(
    one: Host[Any], other: Host[Any], family: int = socket.AF_INET
) -> Iterator[tuple[socket.socket, ...]]:
    """Connect `one` with `other` and yield the ends of the connection."""
    address = other.address if family == socket.AF_INET else other.link.address6
    with other.socket(family) as listener, one.socket(family) as client:
        listener.settimeout(HANG_S)
        client.settimeout(HANG_S)
        listener.bind((address, 0))
        listener.listen()
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.settimeout(HANG_S)
            yield client, server


@contextlib.contextmanager
def datagrams(one: Host[Any], other: Host[Any]) -> Iterator[tuple[socket.socket, ...]]:
    """Yield a UDP socket of each host, connected with the other."""
    with one.socket(kind=socket.SOCK_DGRAM) as here, other.socket(kind=socket.SOCK_DGRAM) as there:
        for end, host in ((here, one), (there, other)):
            end.bind((host.address, 0))
            end.settimeout(HANG_S)
        here.connect(there.getsockname())
        there.connect(here.getsockname())
        yield here, there


def round_trip(client: socket.socket, server: socket.socket) -> float:
    began = monotonic()
    client.sendall(b"?")
    assert server.recv(1) == b"?"
    server.sendall(b"!")
    assert client.recv(1) == b"!"
    return monotonic() - began


def transfer(client: socket.socket, server: socket.socket, num_bytes: int) -> float:
    """Send so many bytes and return how long they took."""

    def send() -> None:
        client.sendall(bytes(num_bytes))

    sender = threading.Thread(target=send)
    began = monotonic()
    sender.start()
    left = num_bytes
    while left:
        left -= len(server.recv(1 << 16))
    sender.join()
    return monotonic() - began


@both_kinds
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def test_hosts_reach_each_other(make: Made, family: int) -> None:
    with make() as network, connected(*network.hosts, family) as (client, server):
        assert round_trip(client, server) < HANG_S


def test_three_hosts_on_two_networks_reach_each_other() -> None:
    with shaped_network(num_hosts=3, num_links=2) as network:
        assert [[link.address for link in host.links] for host in network.hosts] == [
            [f"10.77.{number}.{host}" for number in range(2)] for host in range(1, 4)
        ]
        for other in (1, 2):
            with connected(network.hosts[0], network.hosts[other]) as ends:
                round_trip(*ends)


@pytest.mark.parametrize("which", ["out", "in", "both"])
def test_a_delay_is_there_in_the_direction_asked_for(which: str) -> None:
    with shaped_network() as network, connected(*network.hosts) as ends:
        network.hosts[0].link.set_delay(0.04, which=which)
        assert round_trip(*ends) >= (0.08 if which == "both" else 0.04)


@both_kinds
def test_a_rate_bounds_a_transfer(make: Made) -> None:
    with make() as network, connected(*network.hosts) as ends:
        network.hosts[0].link.set_rate(10_000_000)
        assert transfer(*ends, 400_000) >= 0.8 * 400_000 * 8 / 10_000_000


def test_a_rate_of_a_cable_bounds_what_comes_in() -> None:
    with cable_network() as network, connected(*network.hosts) as ends:
        network.hosts[1].link.set_rate(10_000_000)
        assert transfer(*ends, 400_000) >= 0.8 * 400_000 * 8 / 10_000_000


def counted(host: Host[ShapedLink], came: int) -> dict[str, int]:
    """Wait until so many packets have left the host, and return their counts."""
    wait_until(lambda: host.link.counts()["out"]["came"] == came, HANG_S)
    return host.link.counts()["out"]


def test_a_one_way_loss_is_one_way() -> None:
    with shaped_network() as network, datagrams(*network.hosts) as (here, there):
        network.hosts[0].link.set_loss(1.0, "out")
        here.send(b"lost")
        assert counted(network.hosts[0], 1) == {"came": 1, "lost": 1}
        there.send(b"back")
        assert here.recv(9) == b"back"
        network.hosts[0].link.set_loss(0.0, "out")
        here.send(b"on")
        assert there.recv(9) == b"on"


def arrivals(seed: int) -> list[int]:
    """Send numbered datagrams over a lossy link, and return those that arrive."""
    with shaped_network(seed=seed) as network, datagrams(*network.hosts) as (here, there):
        network.hosts[0].link.set_loss(0.3, "out")
        for number in range(100):
            here.send(bytes((number,)))
        lost = counted(network.hosts[0], 100)["lost"]
        return [there.recv(9)[0] for _ in range(100 - lost)]


def test_two_runs_with_one_seed_lose_the_same_packets() -> None:
    first = arrivals(11)
    assert 50 < len(first) < 90
    assert arrivals(11) == first
    assert arrivals(12) != first


def test_a_stall_delays_and_loses_nothing() -> None:
    with shaped_network() as network, connected(*network.hosts) as ends:
        round_trip(*ends)
        began = monotonic()
        network.hosts[0].link.stall(0.3)
        round_trip(*ends)
        assert monotonic() - began >= 0.3
        assert network.hosts[0].link.counts()["out"]["lost"] == 0


@both_kinds
def test_a_connection_outlives_a_pulled_cable(make: Made) -> None:
    with make() as network, connected(*network.hosts) as (client, server):
        round_trip(client, server)
        host = network.hosts[1]
        host.link.pull()
        assert "NO-CARRIER" in host.run("ip", "-o", "link", "show", host.link.interface)
        client.sendall(b"held")
        server.settimeout(ABSENT_S)
        with pytest.raises(TimeoutError):  # and not a reset or an end
            server.recv(9)
        host.link.plug()
        server.settimeout(HANG_S)
        assert server.recv(9) == b"held"
        round_trip(client, server)


def test_a_failure_of_a_program_is_a_failure_and_no_lack_of_the_machine() -> None:
    with cable_network() as network, pytest.raises(CommandFailedError, match="ls"):
        network.hosts[0].run("ls", "/nonexistent")


ESCAPED = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fail_with_a_process(make: Made, pids: list[int]) -> None:
    with make() as network:
        host = network.hosts[0]
        child = host.popen([sys.executable, "-S", "-c", ESCAPED], stdout=subprocess.PIPE, text=True)
        pids.append(int(child.stdout.readline()))
        child.wait(HANG_S)  # its own child may print before it has ended
        assert host.processes() == pids
        raise KeyError


@both_kinds
def test_no_process_is_left_after_a_failure(make: Made) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    pids: list[int] = []
    with pytest.raises(KeyError):
        fail_with_a_process(make, pids)
    assert len(pids) == 1
    assert not any(map(is_running, pids))
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_a_keeper_outside_of_a_namespace_refuses_to_run() -> None:
    keeper = str(REPOSITORY / "tests" / "support" / "namespace_keeper.py")
    outside = str(os.stat("/proc/self/ns/net").st_ino)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, keeper, str(theirs.fileno()), outside]
        done = subprocess.run(
            command,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "the keeper of a namespace was started outside of one\n")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from network import cable_network

with cable_network() as network:
    child = network.hosts[0].popen(["sleep", "600"])
    while not network.hosts[0].processes():
        pass
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_is_left_when_the_tests_are_killed() -> None:
    with cable_network():  # skips where there can be none
        support = str(REPOSITORY / "tests" / "support")
    command = [sys.executable, "-c", KILLED, support]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until(lambda: not is_running(int(killed.stdout)), HANG_S)

"""What can happen to a server over two hosts of a test network.

A *crash* is seen at once by whoever is connected with what crashed; *silence* only by its heartbeats.
Whatever a person or another program would undo, such as a pulled cable, is undone when the head has noticed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from network import Host
from served import title_of
from served_hosts import PairServer

NOTICED_LIMIT_S = 60.0
LOST_HOST = "lost: the host"

Hosts = Sequence[Host[Any]]
Strike = Callable[[PairServer, Hosts], None]


class Fault(NamedTuple):
    """One thing that can happen.

    Attributes:
        strike: makes it happen; returns when it is undone, if it is.
        is_silent: nobody is told of it by the network or the kernel.
    """

    name: str
    strike: Strike
    is_silent: bool = False


def kill_stage(stage: int) -> Strike:
    """Return what kills the process of a stage, on its host."""
    return lambda server, hosts: processes(hosts[stage], f"penstock stage {stage}")[0].kill()


def stop_stage(server: PairServer, hosts: Hosts) -> None:
    """Stop the worker's stage; nobody ever continues it."""
    processes(hosts[1], "penstock stage 1")[0].suspend()


def kill_worker(server: PairServer, hosts: Hosts) -> None:
    """Kill the worker, and start it again at once."""
    server.worker.kill()
    server.start_worker()


def reset(server: PairServer, hosts: Hosts) -> None:
    """Have the kernel of the worker's host end all connections to the head, with an RST to the other side."""
    hosts[1].run("ss", "--kill", "--tcp", "dst", hosts[0].address)


def stop_worker(server: PairServer, hosts: Hosts) -> None:
    """Stop the worker alone, and continue it when the head has noticed."""
    _hold(server, [psutil.Process(server.worker.process.pid)])


def stop_host(server: PairServer, hosts: Hosts) -> None:
    """Stop all that runs on the worker's host, and continue it when the head has noticed."""
    _hold(server, processes(hosts[1]))


def pull_cable(server: PairServer, hosts: Hosts) -> None:
    """Pull the worker's cable, and plug it in when the head has noticed."""
    link, first = hosts[1].link, len(server.head.lines)
    link.pull()
    try:
        server.head.await_line(LOST_HOST, NOTICED_LIMIT_S, first)
    finally:
        link.plug()


def lose_one_way(server: PairServer, hosts: Hosts) -> None:
    """Lose all packets to the worker, and none of its own, until the head has noticed; of a shaped link."""
    link, first = hosts[1].link, len(server.head.lines)
    link.set_loss(1.0, "in")
    try:
        server.head.await_line(LOST_HOST, NOTICED_LIMIT_S, first)
    finally:
        link.set_loss(0.0, "in")


FAULTS = (
    Fault("kill -9 of the head's stage", kill_stage(0)),
    Fault("kill -9 of the worker's stage", kill_stage(1)),
    Fault("kill -9 of the worker", kill_worker),
    Fault("RST of all connections", reset),
    Fault("SIGSTOP of the worker's stage", stop_stage, is_silent=True),
    Fault("SIGSTOP of the worker", stop_worker, is_silent=True),
    Fault("SIGSTOP of the worker's host", stop_host, is_silent=True),
    Fault("pulled cable", pull_cable, is_silent=True),
    Fault("one-way loss", lose_one_way, is_silent=True),
)


def processes(host: Host[Any], title: str = "") -> list[psutil.Process]:
    """Return the processes of a host whose title, or command line, begins so."""
    return [process for process in _living(host) if title_of(process).startswith(title)]


def _living(host: Host[Any]) -> Iterator[psutil.Process]:
    for pid in host.processes():
        try:
            yield psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue


def _hold(server: PairServer, held: Sequence[psutil.Process]) -> None:
    """Stop processes until the head says that it has lost their host."""
    first = len(server.head.lines)
    for process in held:
        process.send_signal(signal.SIGSTOP)
    try:
        server.head.await_line(LOST_HOST, NOTICED_LIMIT_S, first)
    finally:
        for process in held:
            process.send_signal(signal.SIGCONT)

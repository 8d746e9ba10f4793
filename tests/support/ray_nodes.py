"""Nodes of a real Ray cluster, each on a host of its own."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from host_faults import processes
from network import Host, Network, cable_network
from served import title_of
from served_hosts import Program, SoleServer

_PORT = 6379
_START_LIMIT_S = 120.0
_RAY = str(Path(sys.executable).parent / "ray")


class RayNodes:
    """A node of Ray on each host of a network.

    Attributes:
        address: of the cluster.

    Args:
        directory: of sockets, whose names must be short, and logs.
        num_cpus: that Ray believes each node to have.
        cores: of the processes of each node; empty: all.
    """

    def __init__(
        self,
        network: Network[Host[Any]],
        directory: Path,
        num_cpus: int,
        cores: Sequence[Sequence[int]] = ((), ()),
    ) -> None:
        self.hosts = network.hosts
        self._directory = directory
        self._num_cpus = num_cpus
        self._cores = cores
        self.address = f"{self.hosts[0].address}:{_PORT}"
        for number in range(len(self.hosts)):
            self.start(number)

    def start(self, number: int) -> None:
        """Start the node of a host, which has none or has lost it; the cluster's own parts are on host 0."""
        host = self.hosts[number]
        command = [_RAY, "start", f"--node-ip-address={host.address}", f"--num-cpus={self._num_cpus}"]
        command += ["--disable-usage-stats", "--object-store-memory=80000000"]
        if number == 0:
            command += ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        else:
            command.append(f"--address={self.address}")
        command.append(f"--temp-dir={self._directory / str(number)}")  # by which a driver finds its node
        start = Program(host, command, self._cores[number])  # ends when those of the node run
        assert start.process.wait(_START_LIMIT_S) == 0, start.output

    def kill(self, part: str, host: int) -> None:
        """Kill what has this in its command line on a host."""
        (found,) = self.processes(part, host)
        found.kill()

    def processes(self, part: str, host: int) -> list[psutil.Process]:
        return [process for process in processes(self.hosts[host]) if part in title_of(process)]

    def printed(self) -> dict[str, str]:
        """Return what each process that Ray has started has printed, by the name of its log."""
        logs = self._directory.glob("*/session_2*/logs/worker-*")
        return {log.name: log.read_text(errors="replace") for log in logs}


class RayServer(SoleServer):
    """A server on the first node, whose last stages run at a worker that Ray starts on the other one.

    Attributes:
        nodes: on which its hosts are.

    Args:
        directory: for the token.
        flags: of `penstock serve`, such as the number of stages.
        cores: of the head's processes; empty: all. The worker's are its node's.
    """

    def __init__(
        self,
        nodes: RayNodes,
        model: str,
        directory: Path,
        flags: Sequence[str] = (),
        *,
        cores: Sequence[int] = (),
    ) -> None:
        words = ["--hosts", "2", "--distributed-executor-backend", "ray"]
        words += ["--join-token-file", str(directory / "ray-token"), *flags]
        self.nodes = nodes
        address = {"RAY_ADDRESS": nodes.address}
        super().__init__(nodes.hosts[0], model, words, cores=cores, environment=address)


@contextmanager
def ray_nodes(num_cpus: int = 1, cores: Sequence[Sequence[int]] = ((), ())) -> Iterator[RayNodes]:
    """Start two nodes, as `RayNodes` says; their processes have ended and their files are gone at the end."""
    directory = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
    try:
        with cable_network() as network:
            nodes = RayNodes(network, Path(directory), num_cpus, cores)
            try:
                yield nodes
            except BaseException:
                for name, printed in nodes.printed().items():
                    print(f"{name}:\n{printed[-4000:]}")  # shown of tests that fail
                raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)

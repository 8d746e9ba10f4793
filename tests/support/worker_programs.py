"""A head and its workers as programs of this machine, for tests that end, stop and start them.

Hosts differ in their names alone: all of them meet at 127.0.0.2.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from real_servers import free_ports
from served import Served, title_of, wait_until
from tcp_way import Way

HEAD_ADDRESS = "127.0.0.2"
LINK_PORTS = "27701-27999"
JOIN_LIMIT_S = 60.0


class WorkerProgram:
    """`penstock worker` on a host of this name."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as out:
            self.process = psutil.Popen(list(command), stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        """What it and its predecessors of this name have printed."""
        return self._log.read_text("utf-8")

    @property
    def stages(self) -> list[psutil.Process]:
        """The processes of its stages."""
        return stages_below(self.process)

    @property
    def spares(self) -> list[psutil.Process]:
        """The spare processes that it has, at most one."""
        return processes_below(self.process, "penstock spare")

    def kill(self) -> None:
        """End it by SIGKILL, and its stages with it. May be called twice."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait(30)


class WorkerPrograms:
    """The settings of a head over several hosts, and the workers that join it.

    Args:
        directory: for tokens, states and logs.
        models: with the model that the head serves, in it or below.
    """

    def __init__(self, directory: Path, models: Path, num_hosts: int) -> None:
        self._directory, self._models = directory, models
        (self._port,) = free_ports(1)
        self._token = directory / "token"
        self._num_hosts = num_hosts
        self.running: list[WorkerProgram] = []

    def settings(self) -> dict[str, object]:
        """Return the arguments of the `LLM` that is the head."""
        return {
            "hosts": self._num_hosts,
            "listen_workers": f"{HEAD_ADDRESS}:{self._port}",
            "join_token_file": str(self._token),
            "link_ports": LINK_PORTS,
            "state_dir": str(self._directory / "tower"),
        }

    def start_head(self, model: str, *arguments: str) -> Served:
        """Start `penstock serve`, up to where it waits for workers."""
        words = [model, "--hosts", str(self._num_hosts), "--listen-workers", f"{HEAD_ADDRESS}:{self._port}"]
        words += ["--join-token-file", str(self._token), "--link-ports", LINK_PORTS]
        head = Served(*words, "--state-dir", str(self._directory / "tower"), *arguments)
        wait_until(lambda: "waiting for" in head.output or head.process.poll() is not None, JOIN_LIMIT_S)
        return head

    def await_token(self) -> None:
        """Wait until the head has written it."""
        wait_until(self._token.exists, JOIN_LIMIT_S)

    def way(self) -> Way:
        """Return a way to the head, over which workers can join it; links between stages do not take it."""
        return Way(self._port, HEAD_ADDRESS)

    def start(self, name: str, *arguments: str, port: int | None = None) -> WorkerProgram:
        """Start a worker; of a name that was there before it needs no token.

        Args:
            port: where it joins the head.
        """
        place = f"{HEAD_ADDRESS}:{port or self._port}"
        words = ["worker", "--join", place, "--join-token-file", str(self._token)]
        words += ["--name", name, "--models-dir", str(self._models), "--link-ports", LINK_PORTS]
        words += ["--state-dir", str(self._directory / name)]
        command = [sys.executable, "-m", "penstock", *words, *arguments]
        worker = WorkerProgram(name, command, self._directory / f"{name}.log")
        self.running.append(worker)
        return worker

    def close(self) -> None:
        """End all workers, stopped ones too, and the spare processes that would outlive them for a while."""
        spares = [spare for worker in self.running for spare in worker.spares]
        for worker in self.running:
            worker.kill()
        for spare in spares:
            with contextlib.suppress(psutil.NoSuchProcess):
                spare.kill()


def stages_below(parent: psutil.Process) -> list[psutil.Process]:
    """Return the processes of stages that a supervisor or a worker has started."""
    return processes_below(parent, "penstock stage")


def processes_below(parent: psutil.Process, title: str) -> list[psutil.Process]:
    """Return the processes with this title that another one has started; none of one that is gone."""
    try:
        return [child for child in parent.children() if title in title_of(child)]
    except psutil.NoSuchProcess:
        return []

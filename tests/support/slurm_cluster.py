"""A SLURM cluster whose nodes are hosts of a network on this machine; the programs are Debian's."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from network import Host
from served_hosts import Program

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}  # of Debian
_START_LIMIT_S, _LOOK_S = 60.0, 0.1

_CONFIGURATION = """
ClusterName=pipes
SlurmctldHost={names[0]}({addresses[0]})
AuthType=auth/munge
AuthInfo=socket={socket}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_no_slurm() -> str:
    """Return which programs are missing, with the Debian packages that bring them; empty when none is."""
    absent = [program for program in PACKAGES if shutil.which(program) is None]
    packages = ", ".join(PACKAGES[program] for program in absent)
    if absent:
        return f"{', '.join(absent)} is not installed (on Debian: {packages})"
    return "" if os.geteuid() == 0 else "daemons of SLURM change users, which needs root"


class SlurmCluster:
    """Nodes that run jobs.

    Args:
        hosts: one for each node; the first one has the controller, too.
        names: of the nodes, by which they reach each other.
        directory: for all files of the cluster; its path must be short, since sockets are in it.
        ending: stops the daemons.
    """

    def __init__(
        self, hosts: Sequence[Host[Any]], names: Sequence[str], directory: Path, ending: ExitStack
    ) -> None:
        self._hosts, self._names, self._directory = hosts, names, directory
        self._programs: list[Program] = []
        self._socket = directory / "munge"
        self._configure([host.address for host in hosts])
        ending.callback(self._stop)
        self._start_munge()
        self._start(0, "slurmctld", "-D")
        for number, name in enumerate(names):
            self._start(number, "slurmd", "-D", "-N", name)
        self._await(self._has_all_nodes)

    def srun(self, words: Sequence[str], environment: Mapping[str, str]) -> Program:
        """Type `srun` and these words on the first node."""
        return Program(self._hosts[0], self._placed(0, ["srun", *words], environment))

    def run(self, *words: str) -> str:
        """Return what a command of SLURM prints on the first node."""
        command = self._hosts[0].command(*self._placed(0, words, {}))
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout

    def _configure(self, addresses: Sequence[str]) -> None:
        places = list(zip(self._names, addresses, strict=True))
        text = _CONFIGURATION.format(
            names=self._names, addresses=addresses, socket=self._socket, directory=self._directory
        )
        text += "".join(f"NodeName={name} NodeAddr={address} State=UNKNOWN\n" for name, address in places)
        (self._directory / "slurm.conf").write_text(text)
        known = "".join(f"{address} {name}\n" for name, address in places)
        (self._directory / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        (self._directory / "state").mkdir()

    def _start_munge(self) -> None:
        """Start what all daemons know each other by."""
        key = self._directory / "key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        places = {"key-file": key, "socket": self._socket}
        places |= {f"{kind}-file": Path(f"{self._socket}.{kind}") for kind in ("pid", "seed", "log")}
        self._start(
            0, "munged", "--foreground", "--force", *(f"--{name}={at}" for name, at in places.items())
        )
        self._await(self._socket.exists)

    def _start(self, number: int, *command: str) -> None:
        self._programs.append(Program(self._hosts[number], self._placed(number, command, {})))

    def _placed(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return what runs a command where its host has its name, and knows those of the others."""
        variables = {"SLURM_CONF": f"{self._directory}/slurm.conf"} | dict(environment)
        script = (
            f'hostname {self._names[number]} && mount --bind {self._directory}/hosts /etc/hosts && exec "$@"'
        )
        named = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        return [*named, "env", *(f"{name}={value}" for name, value in variables.items()), *command]

    def _has_all_nodes(self) -> bool:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(self._names)

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not condition():
            said = "\n".join(program.output[-2000:] for program in self._programs)
            assert time.monotonic() < deadline, said
            assert all(program.process.poll() is None for program in self._programs), said
            time.sleep(_LOOK_S)

    def _stop(self) -> None:
        for program in reversed(self._programs):
            program.stop()


@contextmanager
def slurm_cluster(hosts: Sequence[Host[Any]], names: Sequence[str]) -> Iterator[SlurmCluster]:
    """Start a cluster, as `SlurmCluster` says; its daemons have ended and its files are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as directory, ExitStack() as ending:
        yield SlurmCluster(hosts, names, Path(directory), ending)

"""An executor backend of one's own: it starts the workers over ssh, and ends them with the engine.

    PYTHONPATH=examples PENSTOCK_SSH_HOSTS=10.0.0.2,10.0.0.3 \\
      penstock serve MODEL --pp 3 --hosts 3 --distributed-executor-backend ssh_hosts:SshHosts \\
      --listen-workers 10.0.0.1:7700 --join-token-file token

A backend is a class, or a function, that makes the hosts of an engine
(`penstock.hosts.launchers.engine_hosts`). This one takes those that workers join, and only replaces the user
who types `penstock worker` on each of them. The join token crosses ssh's standard input, so that no argument
list and no file of the other host has it.
"""

from __future__ import annotations

import os
import select
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from penstock.config.engine import EngineConfig
from penstock.errors import PenstockError, UnavailableError, UsageError
from penstock.hosts.bell import LastingSource
from penstock.hosts.gathering import GatheredHosts
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.launchers.starter import WantedWorkers
from penstock.hosts.network.joining_address import join_address
from penstock.process.readiness import Waitable

HOSTS_VARIABLE = "PENSTOCK_SSH_HOSTS"
SSH = ("ssh", "-o", "BatchMode=yes")
END_S = 10.0  # for a worker to end its ranks

# On the other host, for its shell: the worker runs until it ends, or until the input does.
REMOTE = """
read -r PENSTOCK_JOIN_TOKEN && export PENSTOCK_JOIN_TOKEN
exec 3<&0
penstock worker --join {join} & worker=$!
(read -r _ <&3; kill $worker) & reader=$!
wait $worker; code=$?
kill $reader; exit $code
"""


class SshHosts(GatheredHosts):
    """This host, and workers on those of `PENSTOCK_SSH_HOSTS`."""

    supports_pp = True

    def __init__(self, engine: EngineConfig, voices: Voices) -> None:
        engine.cluster.require_joining()
        names = [name for name in os.environ.get(HOSTS_VARIABLE, "").split(",") if name]
        if len(names) != engine.cluster.hosts - 1:
            raise UsageError(
                f"{HOSTS_VARIABLE} names {len(names)} hosts, and --hosts is {engine.cluster.hosts}.",
                remedy=f"Name {engine.cluster.hosts - 1} hosts for ssh, with commas.",
            )
        super().__init__(engine.cluster, voices, SshStarter(names, voices))


class SshStarter:
    """Runs `penstock worker` on some hosts. Implements `WorkerStarter`.

    Args:
        names: of the hosts, as ssh knows them.
    """

    def __init__(self, names: Sequence[str], voices: Voices) -> None:
        self._names = names
        self._voices = voices
        self._sessions: dict[str, subprocess.Popen[bytes]] = {}
        self._lines = {name: LastingSource() for name in names}
        self.failure: PenstockError | None = None

    @property
    def sources(self) -> Sequence[Waitable]:
        """Readable when a worker has printed something, or has ended; the same ones to the end."""
        return list(self._lines.values())

    def start(self, wanted: WantedWorkers) -> None:
        token = Path(wanted.token_file).read_bytes()
        join = shlex.quote(join_address(wanted.host, wanted.port))
        for name in self._names:
            session = subprocess.Popen(
                [*SSH, name, REMOTE.format(join=join)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a terminal's interrupt is for the head, which ends in order
            )
            assert session.stdin is not None
            session.stdin.write(token.strip() + b"\n")
            session.stdin.flush()
            assert session.stdout is not None
            self._lines[name].use(session.stdout)
            self._sessions[name] = session
            self._voices.tell(f"ssh starts a worker on {name}")

    def attend(self) -> None:
        """Read what workers print, which the head's log has anyhow, and note those that end."""
        for name, session in list(self._sessions.items()):
            assert session.stdout is not None
            if is_readable(session.stdout) and not os.read(session.stdout.fileno(), 1 << 16):
                code = self._end(name)
                self.failure = UnavailableError(f"the worker on {name} has ended: ssh says {code}")
                self._voices.warn(self.failure.message)

    def take_lost(self) -> Sequence[str]:
        """Return nothing: the head sees for itself that a connection is gone."""
        return ()

    def close(self) -> None:
        for name in list(self._sessions):
            self._end(name)
        for line in self._lines.values():
            line.close()

    def _end(self, name: str) -> int:
        self._lines[name].leave()  # before its descriptor is closed
        return end(self._sessions.pop(name))


def is_readable(stream: IO[bytes]) -> bool:
    """Return whether something, or the end, can be read now."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    return bool(poller.poll(0))


def end(session: subprocess.Popen[bytes]) -> int:
    """End an ssh and its worker; return its exit code."""
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.close()
    try:
        code = session.wait(END_S)
    except subprocess.TimeoutExpired:
        session.kill()
        code = session.wait()
    session.stdout.close()
    return code

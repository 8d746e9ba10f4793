"""Network namespaces: a host's own interfaces, addresses and routes, on a machine that has but one network.

As root, `unshare` makes them directly. Without root it makes a user namespace first, whose root we are; the
kernel and its settings may forbid both. Interfaces are made by `ip` and `tc`. `NetworkUnavailableError`
names what is missing.
"""

from __future__ import annotations

import array
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}  # of Debian
_KEEPER = Path(__file__).with_name("namespace_keeper.py")
_REAP_LIMIT_S = 10.0


class NetworkUnavailableError(Exception):
    """This machine cannot make the network that was asked for; the message says why."""


class CommandFailedError(Exception):
    """A command in a namespace has failed; the message has what it said."""


def why_no_programs() -> str:
    """Return which programs are missing, with the Debian packages that bring them; empty when none is."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    absent = [program for program in PACKAGES if shutil.which(program) is None]
    packages = ", ".join(sorted({PACKAGES[program] for program in absent}))
    return f"{', '.join(absent)} is not installed (on Debian: {packages})" if absent else ""


class Namespace:
    """A network namespace, and the process that keeps it alive.

    Args:
        prefix: the words of a command line before the command, which then runs in a namespace of its own.
        rights: the words with which a command gets the rights that the namespace was made with.
    """

    def __init__(self, prefix: Sequence[str], rights: Sequence[str]) -> None:
        self._rights = rights
        self._asked, theirs = socket.socketpair()
        outside = str(os.stat("/proc/self/ns/net").st_ino)
        with theirs:
            self._keeper = subprocess.Popen(
                [*prefix, sys.executable, "-I", "-S", str(_KEEPER), str(theirs.fileno()), outside],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        if self._asked.recv(1) != b"+":
            assert self._keeper.stderr is not None
            said = self._keeper.stderr.read().strip().splitlines() or ["it gives no reason"]
            self.close()
            raise NetworkUnavailableError(f"this machine lets us make no network namespace: {said[-1]}")
        self.path = f"/proc/{self._keeper.pid}/ns/net"
        self.pid = self._keeper.pid
        self._name = os.readlink(self.path)

    @classmethod
    def first(cls) -> Namespace:
        """Make a namespace with the rights of root in it: our own, or those of a user namespace."""
        try:
            return cls(["unshare", "--net", "--"], [])
        except NetworkUnavailableError:
            user = ["--user", "--preserve-credentials"]
            return cls(["unshare", "--user", "--map-root-user", "--net", "--"], user)

    def beside(self) -> Namespace:
        """Make another namespace, with the same rights."""
        return Namespace(self.command("unshare", "--net", "--"), self._rights)

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command here; it stays one process."""
        return ["nsenter", f"--target={self.pid}", *self._rights, "--net", "--", *words]

    def run(self, *words: str, script: str = "") -> str:
        """Run a command here to its end and return what it printed.

        Raises:
            CommandFailedError: it has failed.
        """
        done = subprocess.run(
            self.command(*words), input=script, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise CommandFailedError(f"`{' '.join(words)}` has failed: {done.stderr.strip()}")
        return done.stdout

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a new socket of this process whose network is the namespace."""
        self._asked.sendall(bytes((family, kind)))
        descriptors = array.array("i")
        _, ancillary, _, _ = self._asked.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
        descriptors.frombytes(ancillary[0][2][: descriptors.itemsize])
        return socket.socket(fileno=descriptors[0])

    def processes(self) -> list[int]:
        """Return the processes that are here, whoever has started them, without the keeper."""
        return [pid for pid in _pids() if pid != self.pid and _link(f"/proc/{pid}/ns/net") == self._name]

    def kill_all(self) -> None:
        """Kill all processes that are here, and wait until they are gone; a zombie is gone."""
        end = time.monotonic() + _REAP_LIMIT_S
        while left := self.processes():
            assert time.monotonic() < end, f"processes {left} do not end"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def close(self) -> None:
        """End the keeper; the namespace and its interfaces vanish with its last process."""
        self._asked.close()
        self._keeper.wait()
        assert self._keeper.stderr is not None
        self._keeper.stderr.close()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _link(path: str) -> str:
    """Return what a link leads to; empty for a process that is gone, or a zombie, or not ours."""
    try:
        return os.readlink(path)
    except OSError:
        return ""

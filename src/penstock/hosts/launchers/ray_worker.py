"""The actor on a node of Ray that starts `penstock worker` and waits for its end.

The worker is a process of its own, which ends with its actor. When Ray ends, restarts or moves the actor, it
thereby ends, restarts or moves a host of the engine. `ray_driver` makes the actors.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.config.hosts import own_host_name, state_directory
from penstock.errors import PenstockError
from penstock.hosts.launchers.own_directory import own_directory
from penstock.hosts.launchers.tied_process import environment_for_ranks, tied_command
from penstock.trust.held_directories import HeldDirectory
from penstock.trust.token_prompt import JOIN_TOKEN

LAST_LINES = 12  # so many lines that a worker has printed last are kept for the message about its end
UNUSED_S = 60.0  # if no driver has called an actor without a worker for so long, none will


class WorkerOrder(NamedTuple):
    """The order to a Ray actor to start a worker.

    Attributes:
        join: address where workers join the head.
        token_file: path of a file with the join token; not read if the environment of the node has the token.
        words: further words of the worker's command line.
    """

    join: str
    token_file: str
    words: Sequence[str]


class RayWorker:
    """A Ray actor that runs one worker; after a loss Ray makes the actor anew, perhaps on another node.

    The actor starts the worker's process when it is made, since Ray tells the driver only a second later that
    an actor has restarted. It does so in the main thread, with which the process ends.

    Args:
        engine: a name that no other engine has.
        number: number of the worker, 1 for the first.
        order: how the worker is started.
        give_back: called, in a thread, when no driver has wanted the worker for `UNUSED_S`: it is gone.
    """

    def __init__(self, engine: str, number: int, order: WorkerOrder, give_back: Callable[[], None]) -> None:
        self._engine = engine
        self._number = number
        self._order = order
        self._give_back = give_back
        self._state: HeldDirectory | None = None  # held until this process ends; a later one uses it again
        self._process: subprocess.Popen[str] | None = None
        self._await_call()
        with contextlib.suppress(OSError, PenstockError):  # `run` tries again, and says why
            self._process = self._started()

    def host_name(self) -> str:
        """Return the name of the worker's host in the engine, which has the worker's number in it."""
        return f"{own_host_name('')}-{self._number}"[-64:].lstrip("-._")

    def run(self) -> tuple[int, str]:
        """Wait until the worker ends; start another one first if it has ended before.

        Returns:
            The worker's exit code, and the last lines that it has printed.
        """
        self._unused.cancel()
        lines: deque[str] = deque(maxlen=LAST_LINES)
        with self._process or self._started() as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)  # into Ray's log of the worker
                lines.append(line)
        self._process = None
        self._await_call()
        return process.returncode, "".join(lines)

    def _started(self) -> subprocess.Popen[str]:
        join, token_file, words = self._order
        command = tied_command("penstock", "worker", "--join", join, "--name", self.host_name())
        command += [*self._places(), *words]
        command += [] if JOIN_TOKEN in os.environ else ["--join-token-file", token_file]
        return subprocess.Popen(
            command,
            env=environment_for_ranks(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def _places(self) -> list[str]:
        """Return the words that say where the worker keeps its certificate, for this engine, and weights."""
        if self._state is None:
            self._state = own_directory(self._engine)
        weights = state_directory(None) / "weights"
        return ["--state-dir", str(self._state.path), "--weights-cache", str(weights)]

    def _await_call(self) -> None:
        self._unused = threading.Timer(UNUSED_S, self._give_back)
        self._unused.daemon = True
        self._unused.start()

"""HTTP servers of engines as processes: on a free port, stopped while others run, and ended for certain."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.engine_process import EngineError, ProcessTree

_PAUSE_S = 0.2
_ANSWER_S = 10.0


class ServerProcess(ProcessTree):
    """A server with `/health`.

    Args:
        name: for messages.
        command: the program and its arguments; `--port N` is added.
        log: file for all that it prints.
        environment: its own; None takes this process'.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, [*command, "--port", str(port)], log, environment=environment)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it is healthy. Raises `EngineError` when it has ended or is not in time."""
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            if self.has_ended:
                raise EngineError(self.end_message())
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} is not ready after {timeout_s:.0f} s.\n{self.log_tail()}")
            time.sleep(_PAUSE_S)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=_ANSWER_S) as answer:
            text: str = answer.read().decode()
            return text

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, urllib.error.URLError):
            self.get("/health")
            return True
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port

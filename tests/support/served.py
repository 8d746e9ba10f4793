"""`penstock serve` as users start it: a process, watched through what it prints and what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import psutil

_READY = re.compile(r"ready in .*?(https?://\S+)")
_START_LIMIT_S = 120.0


class Served:
    """A running server. Use as a context manager; leaving kills whatever is left of it.

    Args:
        arguments: after `penstock serve`.
        port: 0 lets the system choose.
        program: what Python is to run, as its own arguments say it.
        python: the Python of another environment, in place of this one.
        folder: the working directory; None: that of this process.
    """

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        port: int = 0,
        program: Sequence[str] = ("-m", "penstock"),
        python: str = sys.executable,
        folder: Path | None = None,
    ) -> None:
        command = [python, *program, "serve", *arguments, "--port", str(port)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (env or {}),
            cwd=folder,
        )
        self.lines: list[str] = []
        self._reader = Thread(target=self._read)
        self._reader.start()
        self.url = ""

    def __enter__(self) -> Served:
        wait_until(lambda: self._ready() or self.process.poll() is not None, _START_LIMIT_S)
        assert self.url, self.output
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.family():
            process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def num_recoveries(self) -> int:
        return self.output.count("recovered in")

    def family(self) -> list[psutil.Process]:
        """The supervisor and its children, as far as they live."""
        try:
            supervisor = psutil.Process(self.process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        """The value of a gauge or counter, summed over its labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the supervisor; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def _ready(self) -> bool:
        found = _READY.search(self.output)
        self.url = found.group(1) if found else ""
        return bool(found)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title_of(process: psutil.Process) -> str:
    """Its command line; empty when it has just ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def wait_until(condition: Callable[[], object], limit_s: float) -> None:
    """Return as soon as the condition holds; fail when it does not in time."""
    deadline = monotonic() + limit_s
    while not condition():
        assert monotonic() < deadline, f"not in {limit_s} s"
        sleep(0.02)


def named_leftovers() -> set[Path]:
    """Everything with a name that an engine could leave on this machine."""
    places = (Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp")))
    found = {path for place in places for path in place.glob("*penstock*")}
    return found | {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch_", "psm_"))}

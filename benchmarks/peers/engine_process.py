"""Engines as processes: started, asked, stopped while others run, and ended for certain.

Unless it is let run, every process of an engine is stopped (SIGSTOP), so that no spinning thread of an idle
engine takes time from the one that is measured. `EngineProcess` is a script of `peer_protocol`;
`server_process` has the engines that speak HTTP.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_LOG_TAIL_LINES = 12
_END_S = 30.0  # for an engine to end by itself
_KILLED_S = 10.0  # for the kernel to end what was killed

Identity = tuple[int, str]  # pid and start time: a pid alone may be another process by now


class EngineError(Exception):
    """An engine did not start, ended, said nothing in time, or answered with an error."""


class ProcessTree:
    """A program and all its descendants, whatever process groups they have made.

    Args:
        name: for messages.
        command: the program and its arguments.
        log: file for its standard error, and for its standard output unless it talks.
        talks: its standard input and output are pipes to this process.
        environment: its own; None takes this process'.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        talks: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            # A group of its own, in this session: if this process is killed while the group is stopped, the
            # kernel hangs up the orphaned group and wakes it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else errors,
                stderr=errors,
                env=environment,
                process_group=0,
            )
        self._seen: list[Identity] = []

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run in the body of a `with`, and stop it then."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send all its processes a signal."""
        _send(self._processes(), number)

    def close(self) -> None:
        """End all its processes and wait until they are gone. May be called twice."""
        processes = self._processes()
        _send(processes, signal.SIGCONT)
        self._ask_to_end()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            processes = list(dict.fromkeys([*processes, *self._processes()]))
            _send(processes, signal.SIGKILL)
            self._process.wait()
            _reap(processes)

    def end_message(self) -> str:
        """How it has ended, with the last lines of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return f"{self.name} ended with code {self._process.returncode}.\n{self.log_tail()}"

    def log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)

    def _ask_to_end(self) -> None:
        self._process.terminate()

    def _processes(self) -> list[Identity]:
        """The program's process and its descendants, parents first; those last seen if it has ended."""
        if not self.has_ended:
            self._seen = family(self._process.pid)
        return self._seen


class EngineProcess(ProcessTree):
    """A script of `peer_protocol`: stopped once it is ready, but for the time spent in `running`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        super().__init__(name, command, log, talks=True)
        self._received = b""

    def introduction(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the engine is ready; what it says of itself."""
        try:
            return self._read_answer(timeout_s)
        finally:
            self.signal(signal.SIGSTOP)

    def ask(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """The answer to one request; the engine must be running.

        Raises:
            EngineError: it has ended, was silent for `timeout_s`, or answered with an error.
        """
        self._write(json.dumps(request).encode() + b"\n")
        answer = self._read_answer(timeout_s)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer

    def _ask_to_end(self) -> None:
        """The script ends with its input."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(self.end_message()) from error

    def _read_answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineError(f"{self.name} said nothing for {timeout_s:.0f} s.\n{self.log_tail()}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise EngineError(self.end_message())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `close` can wait for them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def family(root: int) -> list[Identity]:
    """A process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        fields = _stat_fields(entry) if entry.name.isdigit() else []
        if fields:
            started[int(entry.name)] = fields[19]  # field 22 of proc(5): starttime
            children.setdefault(int(fields[1]), []).append(int(entry.name))  # field 4: ppid
    found = [root] if root in started else []
    for pid in found:
        found.extend(children.get(pid, []))
    return [(pid, started[pid]) for pid in found]


def _stat_fields(entry: Path) -> list[str]:
    """Fields of /proc/PID/stat from the third on; the second, a name, may hold anything."""
    try:
        return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _is_alive(identity: Identity) -> bool:
    fields = _stat_fields(Path("/proc", str(identity[0])))
    return len(fields) > 19 and fields[19] == identity[1] and fields[0] not in "ZX"


def _send(processes: Iterable[Identity], number: signal.Signals) -> None:
    for identity in processes:
        if _is_alive(identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity[0], number)


def _reap(processes: Iterable[Identity]) -> None:
    """Wait until killed processes are gone, and collect those that have become children of this one."""
    deadline = time.monotonic() + _KILLED_S
    for identity in processes:
        while _is_alive(identity) and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(identity[0], os.WNOHANG)

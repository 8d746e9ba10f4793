"""Runs a handful of compilers side by side, within a time limit, and says how the first bad one failed.

Called by `compiler`. Each process leads a session of its own, so that a driver that hangs is ended together
with the passes that it started. Knows nothing of kernels. Never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 400


class JobFailedError(Exception):
    """A process could not be started, failed, or was not done in time. The text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to run: `name` for messages; what it prints goes into `log`, a new file."""

    name: str
    command: Sequence[str]
    log: Path


class _Running:
    """A started job: `pidfd` becomes readable when it ends."""

    def __init__(self, job: Job, environ: Mapping[str, str]) -> None:
        with job.log.open("wb") as log:
            self._process = start(job.command, environ, log.fileno())
        self._job = job
        self.pidfd = os.pidfd_open(self._process.pid)

    def finish(self) -> None:
        """Take the exit status. Raises `JobFailedError` unless it is 0."""
        os.close(self.pidfd)
        status = self._process.wait()
        if status:
            how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
            raise JobFailedError(f"{self._job.name} failed ({how}): {last_lines(self._job.log.read_bytes())}")

    def kill(self) -> None:
        os.close(self.pidfd)
        end_session(self._process)


def run_jobs(jobs: Sequence[Job], *, at_once: int, seconds: float, environ: Mapping[str, str]) -> None:
    """Run all jobs, at most `at_once` at a time. Whatever happens, none is left running.

    Raises `JobFailedError` for the first that fails, or when they are not all done after `seconds`.
    """
    deadline = time.monotonic() + seconds
    waiting = list(reversed(jobs))
    running: dict[int, _Running] = {}
    poller = select.poll()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                started = _Running(waiting.pop(), environ)
                running[started.pidfd] = started
                poller.register(started.pidfd, select.POLLIN)
            ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ended:
                raise JobFailedError(f"not done after {seconds:g} s")
            for pidfd, _ in ended:
                poller.unregister(pidfd)
                running.pop(pidfd).finish()
    finally:
        for left in running.values():
            left.kill()


def answer_of(command: Sequence[str], *, seconds: float, environ: Mapping[str, str]) -> str:
    """Return what a short command prints on its standard output. Raises `JobFailedError`."""
    process = start(command, environ, subprocess.PIPE)
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        end_session(process)
        raise JobFailedError(f"{command[0]} gave no answer within {seconds:g} s") from error
    if process.returncode:
        raise JobFailedError(
            f"{' '.join(command)} failed (exit status {process.returncode}): {last_lines(out)}"
        )
    return out.decode(errors="replace")


def start(command: Sequence[str], environ: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start a process with messages in English. Raises `JobFailedError`.

    What is preloaded into this process (an allocator, a sanitizer) is not preloaded into the compiler.
    """
    passed_on = {name: value for name, value in environ.items() if name != "LD_PRELOAD"}
    try:
        return subprocess.Popen(
            command,
            env={**passed_on, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise JobFailedError(f"{command[0]} cannot be started: {error}") from error


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def last_lines(output: bytes) -> str:
    """Return the end of what a compiler printed, on one line."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:] or "it printed nothing"

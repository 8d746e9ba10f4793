"""Child processes of the supervisor: start, hear, end.

A child is `python -m penstock...` with its config on an inherited pipe and a status pipe that it writes JSON
lines to. Its end is seen on a pidfd, so nothing depends on what a dying process says. Children are in process
groups of their own: a terminal's Ctrl-C reaches the supervisor alone, which then ends them in order.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from penstock.errors import ErrorInfo, StageLostError
from penstock.executor.base import first_cause
from penstock.process.child import ChildFailed, Ready, StatusEvent, WeightsLoaded, decode_status

CAUSE_GRACE_S = 0.5  # for the stage behind another one's end to say why
POLL_S = 0.01


class Child:
    """A running child process. Made by `spawn`.

    Attributes:
        name: for messages, such as "stage 1".
        stage: its stage, or None.
        member_index: where its parent finds it among the members of an epoch; whatever the parent likes.
        failure: the error that it reported before its end, if it did; `trace` is the end of its stack trace.
        has_spoken: it has set itself up.
        has_loaded: a stage, its weights.
        is_ready: it has served.
        started_at, heard_at: monotonic seconds of its start and of its last word.
        status_ended: it has closed its status pipe, which is then readable for ever.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status_fd: int,
        name: str,
        stage: int | None,
        member_index: int,
    ) -> None:
        self.name = name
        self.stage = stage
        self.member_index = member_index
        self.failure: ErrorInfo | None = None
        self.trace = ""
        self.has_spoken = False
        self.has_loaded = False
        self.is_ready = False
        self.pidfd = os.pidfd_open(process.pid)
        self.status_fd = status_fd
        self.status_ended = False
        self.started_at = self.heard_at = time.monotonic()
        self._process = process
        self._partial = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As `subprocess` gives it (negative: a signal); None while it runs."""
        return self._process.poll()

    def read_status(self) -> list[StatusEvent]:
        """What it has said since the last call."""
        lines = (self._partial + self._read_pipe()).split(b"\n")
        self._partial = lines.pop()
        self.heard_at = time.monotonic() if lines else self.heard_at
        events = [decode_status(line) for line in lines if line]
        for event in events:
            if isinstance(event, ChildFailed) and self.failure is None:
                self.failure, self.trace = event.error, event.trace
            self.has_loaded |= isinstance(event, WeightsLoaded)
            self.is_ready |= isinstance(event, Ready)
        self.has_spoken |= bool(events)
        return events

    def send_signal(self, number: int) -> None:
        """Signal it, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self, reason: str) -> None:
        """End it, as it cannot be asked to."""
        if self.failure is None:
            self.failure = self._lost(f"{reason}, and was killed")
        self.send_signal(signal.SIGKILL)

    def end(self) -> ErrorInfo:
        """Why it has ended: its own words, or how."""
        if self.failure is not None:
            return self.failure
        code = self._process.wait()
        if code >= 0:
            return self._lost(f"ended with code {code}")
        return self._lost(f"was killed by signal {-code} ({signal.Signals(-code).name})")

    @property
    def has_failed(self) -> bool:
        """It has not merely left."""
        return self.failure is not None or bool(self.exit_code)

    @property
    def is_cause(self) -> bool:
        """It has failed by itself, and not because another one has."""
        if self.failure is not None:
            some_failure = ErrorInfo(kind="PenstockError", message="")  # goes before what is a consequence
            return first_cause([self.failure, some_failure]) is self.failure
        return (self.exit_code or 0) < 0

    def _lost(self, how: str) -> ErrorInfo:
        return StageLostError(f"{self.name} (pid {self.pid}) {how}.", stage=self.stage).info()

    def close(self) -> None:
        """Reap it; it must have ended."""
        self._process.wait()
        for fd in (self.pidfd, self.status_fd):
            os.close(fd)

    def _read_pipe(self) -> bytes:
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.status_fd, 65536):
                chunks.append(chunk)
            self.status_ended = True
        return b"".join(chunks)


def spawn(
    module: str,
    config: bytes,
    *,
    name: str,
    stage: int | None = None,
    member_index: int = 0,
    inherit: Sequence[int] = (),
    arguments: Sequence[str] = (),
) -> Child:
    """Start `python -m module` as a child of the calling thread.

    Args:
        config: what it reads from its config pipe, to the end.
        inherit: further descriptors that it keeps, under the same numbers.
        arguments: beside `--config-fd` and `--status-fd`.
    """
    with ExitStack() as theirs, ExitStack() as ours:  # where descriptors run out, none of them is left
        config_read, config_write = _pipe(theirs, ours)
        status_read, status_write = _pipe(ours, theirs)
        os.set_blocking(status_read, False)
        command = [sys.executable, "-P", "-m", module, "--config-fd", str(config_read)]
        command += ["--status-fd", str(status_write), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[config_read, status_write, *inherit],
            process_group=0,
        )
        try:
            child = Child(process, status_read, name, stage, member_index)
        except BaseException:
            process.kill()
            process.wait()
            raise
        ours.pop_all()
    with os.fdopen(config_write, "wb") as pipe, contextlib.suppress(BrokenPipeError):
        pipe.write(config)
    return child


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    """A pipe, each end of which is closed with its stack."""
    reader, writer = os.pipe()
    reading.callback(os.close, reader)
    writing.callback(os.close, writer)
    return reader, writer


class ChildProcesses:
    """All children, and one place to wait for anything that happens to them or to other descriptors.

    Args:
        take: is given each event of a child, when it is heard.
    """

    def __init__(self, take: Callable[[Child, StatusEvent], None]) -> None:
        self._take = take
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []

    @property
    def children(self) -> list[Child]:
        """Those that have not been reaped."""
        return list(self._children)

    def add(self, child: Child) -> Child:
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)
        return child

    def watch(self, fd: int) -> None:
        """Let `wait` return too when this descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, None)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def wait(self, timeout_s: float | None) -> tuple[set[Child], set[int]]:
        """Children with news, and watched descriptors that are readable, after at most this time."""
        children, descriptors = set(), set()
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                descriptors.add(key.fd)
            else:
                children.add(key.data)
        return children, descriptors

    def hear(self, child: Child) -> None:
        """Take what it has said."""
        events = child.read_status()
        if child.status_ended:
            self._silence(child)
        for event in events:
            self._take(child, event)

    def hear_until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Hear everybody until the condition holds; for this long at most."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            for child in self.children:
                self.hear(child)

    def first_cause(self, ended: Child, suspects: Sequence[Child]) -> ErrorInfo:
        """What explains the end of this child: its own words, or those of a stage that brought it down.

        Args:
            suspects: those that can have, itself among them.
        """
        if not ended.is_cause or (ended.stage is None and ended.failure is not None):
            stages = [child for child in suspects if child.stage is not None]
            self.hear_until(lambda: any(stage.is_cause for stage in stages), CAUSE_GRACE_S)
        guilty = [child for child in suspects if child.has_failed]
        guilty = [child for child in guilty if child is ended or child.stage is not None]
        return first_cause([child.end() for child in guilty or [ended]])

    def _silence(self, child: Child) -> None:
        """Stop listening to a status pipe that has reached its end."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.status_fd)

    def reap(self, child: Child) -> None:
        """Take out a child that has ended."""
        self._selector.unregister(child.pidfd)
        self._silence(child)
        child.close()
        self._children.remove(child)

    def kill(self) -> None:
        """End everybody at once and reap them."""
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        for child in self.children:
            child.read_status()
            self.reap(child)

    def close(self) -> None:
        self.kill()
        self._selector.close()

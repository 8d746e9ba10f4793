"""The supervisor of an engine as a child of the program that uses `LLM` or `AsyncLLM`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.supervisor.reports import EngineFailed, EngineReady, Event, Reporter
from penstock.engine.supervisor.supervisor import CallerConfig
from penstock.errors import PenstockError, StageLostError, WaitTimeoutError, error_from_info
from penstock.process import entry_points
from penstock.process.readiness import await_readable

START_TIMEOUT_S = 3600.0  # the longest silence while the engine starts; a slow disk may take long
CAUSE_TIMEOUT_S = 2.0
END_TIMEOUT_S = 10.0

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class SupervisorProcess:
    """A supervisor that this process has started. It ends when the config pipe, its lifeline, is closed.

    Any thread may call `end`, also while another thread waits for the supervisor's next event.
    """

    def __init__(self, config: EngineConfig, reporter: Reporter) -> None:
        self._reporter = reporter
        self._hearing = threading.Lock()  # held while the status pipe is waited for, read or closed
        config_read, self._lifeline = os.pipe()
        self._status_fd, status_write = os.pipe()
        command = [sys.executable, "-P", "-m", entry_points.SUPERVISOR]
        command += ["--config-fd", str(config_read), "--status-fd", str(status_write)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[config_read, status_write], process_group=0
            )
        except BaseException:
            os.close(self._lifeline)
            os.close(self._status_fd)
            raise
        finally:
            os.close(config_read)
            os.close(status_write)
        message = CallerConfig(engine=config, caller_pid=os.getpid())
        # A file object writes all, however little the pipe takes at once. A child that has ended already is
        # noticed when its status pipe is read.
        with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(self._lifeline), "wb") as pipe:
            pipe.write(msgspec.json.encode(message) + b"\n")
        self._partial = b""
        self._failed: EngineFailed | None = None
        self.has_ended = False  # the supervisor will say nothing more

    def wait_until_ready(self) -> str:
        """Return the core's address once the engine is ready. Raises the first cause if it cannot start."""
        while not self.has_ended:
            for event in self._hear(time.monotonic() + START_TIMEOUT_S):
                if isinstance(event, EngineFailed):
                    raise _error_of(event)
                if isinstance(event, EngineReady):
                    return event.address
        code = self._process.wait()
        raise StageLostError(f"the supervisor ended with code {code} before the engine was ready.")

    def fileno(self) -> int:
        """Return the descriptor that is readable when an event has come, or the supervisor has ended."""
        return self._status_fd

    def pass_on_news(self) -> None:
        """Report the events that the supervisor has sent since the last call, without waiting for more."""
        with contextlib.suppress(WaitTimeoutError):
            while not self.has_ended:
                self._hear(time.monotonic())

    def first_cause(self, error: PenstockError, timeout_s: float = CAUSE_TIMEOUT_S) -> PenstockError:
        """Return the cause of a loss that the supervisor reports, or `error` if it reports none in time."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(WaitTimeoutError):
            while self._failed is None and not self.has_ended:
                self._hear(deadline)
        return error if self._failed is None else _error_of(self._failed)

    def _hear(self, deadline: float) -> list[Event]:
        """Report and return the next events; an empty list means that the supervisor has ended.

        Raises what `_read_events` does.
        """
        with self._hearing:
            events = [] if self.has_ended else self._read_events(deadline)
            self.has_ended = not events
        for event in events:
            self._reporter.report(event)
            if isinstance(event, EngineFailed) and self._failed is None:
                self._failed = event
        return events

    def end(self) -> None:
        """Cut the lifeline and wait for the end of the process. May be called twice."""
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        # The pipe is closed only now: the end of the process has woken any thread that waits for the pipe. If
        # the pipe were closed under such a thread, another file might get its number, and the thread would
        # read that file.
        with self._hearing:
            self.has_ended = True
            os.close(self._status_fd)

    def _read_events(self, deadline: float) -> list[Event]:
        """Return at least one event, unless the pipe has ended. Raises `WaitTimeoutError` at the deadline."""
        events: list[Event] = []
        while not events:
            if not await_readable([self._status_fd], deadline - time.monotonic()):
                raise WaitTimeoutError("the supervisor did not answer in time.")
            chunk = os.read(self._status_fd, 65536)
            if not chunk:
                break
            lines = (self._partial + chunk).split(b"\n")
            self._partial = lines.pop()
            events = [_events.decode(line) for line in lines]
        return events


def _error_of(event: EngineFailed) -> PenstockError:
    """Return the error of the event, with the stack trace of the process that failed as a note."""
    error = error_from_info(event.error)
    if event.trace:
        error.add_note(event.trace)
    return error

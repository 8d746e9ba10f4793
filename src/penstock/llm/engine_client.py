"""The synchronous face of the engine, for `llm`: add requests, poll for updates.

`ProcessClient` starts a supervisor, which starts core and ranks, and speaks to the core over zmq;
`InprocessClient` is its twin around an `EngineCore` in the same process. Text is not their business.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.client.live_requests import LiveRequests
from penstock.engine.client.seeds import Seeds
from penstock.engine.core.core_assembly import build_core, prove_stages
from penstock.engine.core.core_clients import refusals
from penstock.engine.ipc import (
    AWAY_S,
    SILENCE_S,
    AbortRequests,
    AddRequest,
    ClientSocket,
    CoreGone,
    CoreToClient,
    Hello,
    StepUpdates,
    Welcome,
    silence_limit_s,
)
from penstock.engine.stats import CoreStats
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.reports import EngineFailed, EngineReady, Event, Reporter
from penstock.engine.supervisor.supervisor import CallerConfig
from penstock.errors import PenstockError, StageLostError, WaitTimeoutError, error_from_info
from penstock.executor.base import Executor
from penstock.process import entry_points
from penstock.request import GenerationRequest, RequestUpdate

START_TIMEOUT_S = 3600.0  # without a word; a slow disk may take long
HELLO_WAIT_S = 1.0
CONFIRM_S = 0.1  # for words that wait in the socket when this process itself was stopped
CAUSE_TIMEOUT_S = 2.0
END_TIMEOUT_S = 10.0

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EngineClient(Protocol):
    """One user of one engine. Belongs to one thread."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output that the engine serves."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. A refusal is the only update of each sequence, with `finish_reason` "error"."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        ...

    def poll(self, timeout_s: float) -> list[RequestUpdate]:
        """Updates that have come, after at most this time. Raises the first cause when the engine is lost."""
        ...

    def stats(self) -> CoreStats | None:
        """The core's numbers, as of its last message."""
        ...

    def close(self) -> None:
        """End the engine and wait until nothing of it is left. May be called twice."""
        ...


class InprocessClient:
    """The engine core and its ranks in this process.

    Args:
        executor: not started yet.
    """

    def __init__(self, plan: LaunchPlan, executor: Executor) -> None:
        self._executor = executor
        try:
            kv_plan = executor.start()
            self._core, scheduler = build_core(plan.core, executor, kv_plan, time.monotonic)
            prove_stages(self._core)
        except BaseException:
            executor.shutdown()
            raise
        self.max_model_len = scheduler.max_len
        self._refused: list[RequestUpdate] = []
        self._closed = False

    def add(self, request: GenerationRequest) -> None:
        try:
            self._core.add_request(request)
        except PenstockError as error:
            self._refused += refusals(request, error)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)

    def poll(self, timeout_s: float) -> list[RequestUpdate]:
        if self._core.failure is not None:
            raise error_from_info(self._core.failure)
        refused, self._refused = self._refused, []
        return refused + self._core.step(0.0 if refused else timeout_s)

    def stats(self) -> CoreStats:
        return self._core.stats()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._executor.shutdown()
            self._core.close()


class ProcessClient:
    """An engine in processes of its own, which end with this object or with this process, however it ends.

    Args:
        reporter: gets the supervisor's events: while it loads, and later on whenever there is a `poll`.
        clock: monotonic seconds.

    Raises:
        PenstockError: the engine could not be started; the first cause.
    """

    def __init__(
        self, config: EngineConfig, reporter: Reporter, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._silence_limit_s = silence_limit_s(config.parallel.heartbeat_limit_s)
        self._supervisor = SupervisorProcess(config, reporter)
        try:
            address = self._supervisor.wait_until_ready()
            self._socket = ClientSocket(address)
        except BaseException:
            self._supervisor.end()
            raise
        self._stats: CoreStats | None = None
        self._updates: list[RequestUpdate] = []
        self._live = LiveRequests()
        self._failure: PenstockError | None = None
        self._is_away = False  # the core; another one is to come
        self._greeted_at = clock()
        self._heard_at = clock()
        try:
            welcome = self._say_hello()
        except BaseException:
            self.close()
            raise
        self.max_model_len, self._seeds = welcome.max_model_len, Seeds(welcome)

    def add(self, request: GenerationRequest) -> None:
        """As in the protocol; raises the first cause once the engine is lost."""
        self._require_engine()
        request = self._seeds.given(request)
        self._live.add(request, is_sent=not self._is_away)
        if not self._is_away:
            self._socket.send(AddRequest(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._live.forget(request_id)
        if self._failure is None:
            self._socket.send(AbortRequests(list(request_ids)))

    def poll(self, timeout_s: float) -> list[RequestUpdate]:
        self._require_engine()
        self._supervisor.pass_on_news()
        if self._supervisor.has_ended:
            self._lose(StageLostError("the supervisor of the engine has ended."))
        if self._socket.wait(min(timeout_s, SILENCE_S)):
            for message in self._socket.drain():
                self._take(message)
        elif len(self._live):
            self._require_word()
        if self._is_away and self._clock() - self._greeted_at >= HELLO_WAIT_S:
            self._greet()  # once more: a connection may have failed without a word
        updates, self._updates = self._updates, []
        return updates

    def stats(self) -> CoreStats | None:
        return self._stats

    def close(self) -> None:
        self._socket.close()
        self._supervisor.end()

    def _say_hello(self) -> Welcome:
        self._greet()
        deadline = self._clock() + START_TIMEOUT_S
        while self._clock() < deadline:
            self._socket.wait(HELLO_WAIT_S)
            for message in self._socket.drain():
                self._take(message)
                if isinstance(message, Welcome):
                    return message
        raise WaitTimeoutError(f"the engine core did not answer in {START_TIMEOUT_S:g} s.")

    def _greet(self) -> None:
        self._socket.send(Hello())
        self._greeted_at = self._clock()

    def _take(self, message: CoreToClient | CoreGone) -> None:
        self._heard_at = self._clock()
        if isinstance(message, StepUpdates):
            self._stats = message.stats
            self._deliver(message.updates)
        elif isinstance(message, CoreGone):
            self._deliver(self._live.core_lost())
            self._socket.reconnect()
            self._greet()
            self._is_away = True
        elif isinstance(message, Welcome):
            self._is_away = False
            for _, request in self._live.again():  # of another core
                self._socket.send(request)

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        self._updates += updates
        for update in updates:
            self._live.note(update)

    def _require_word(self) -> None:
        """Raise once the core, which sends at least its heartbeats, has been silent for too long."""
        silent_s, limit_s = self._clock() - self._heard_at, AWAY_S if self._is_away else self._silence_limit_s
        if silent_s >= limit_s and not self._socket.wait(CONFIRM_S):
            self._lose(WaitTimeoutError(f"the engine core has said nothing for {silent_s:.0f} s."))

    def _lose(self, error: PenstockError) -> None:
        self._failure = self._supervisor.first_cause(error)
        self._require_engine()

    def _require_engine(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)


class SupervisorProcess:
    """The supervisor that this process has started. It ends when the config pipe, its lifeline, is closed."""

    def __init__(self, config: EngineConfig, reporter: Reporter) -> None:
        self._reporter = reporter
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
        os.write(self._lifeline, msgspec.json.encode(message) + b"\n")
        self._partial = b""
        self._failed: EngineFailed | None = None
        self.has_ended = False  # it will say nothing more

    def wait_until_ready(self) -> str:
        """Address of the core. Raises the first cause when the engine cannot be started."""
        while not self.has_ended:
            for event in self._hear(time.monotonic() + START_TIMEOUT_S):
                if isinstance(event, EngineFailed):
                    raise _error_of(event)
                if isinstance(event, EngineReady):
                    return event.address
        code = self._process.wait()
        raise StageLostError(f"the supervisor ended with code {code} before the engine was ready.")

    def fileno(self) -> int:
        """Readable when it has something to say, or has ended."""
        return self._status_fd

    def pass_on_news(self) -> None:
        """Report what it has said since it was ready, without waiting."""
        with contextlib.suppress(WaitTimeoutError):
            while not self.has_ended:
                self._hear(time.monotonic())

    def first_cause(self, error: PenstockError, timeout_s: float = CAUSE_TIMEOUT_S) -> PenstockError:
        """What the supervisor gives as the cause of a loss, or `error` if it does not say in this time."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(WaitTimeoutError):
            while self._failed is None and not self.has_ended:
                self._hear(deadline)
        return error if self._failed is None else _error_of(self._failed)

    def _hear(self, deadline: float) -> list[Event]:
        """Report the next events; none means that it has ended. Raises `WaitTimeoutError` at the deadline."""
        events = self._read_events(deadline)
        self.has_ended = not events
        for event in events:
            self._reporter.report(event)
            if isinstance(event, EngineFailed) and self._failed is None:
                self._failed = event
        return events

    def end(self) -> None:
        """Cut the lifeline and wait for the end. May be called twice."""
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        os.close(self._status_fd)
        self._lifeline = -1
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()

    def _read_events(self, deadline: float) -> list[Event]:
        """At least one event, unless the pipe has ended. Raises `WaitTimeoutError` at the deadline."""
        events: list[Event] = []
        poller = select.poll()
        poller.register(self._status_fd, select.POLLIN)
        while not events:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise WaitTimeoutError("the supervisor has said nothing in time.")
            chunk = os.read(self._status_fd, 65536)
            if not chunk:
                break
            lines = (self._partial + chunk).split(b"\n")
            self._partial = lines.pop()
            events = [_events.decode(line) for line in lines]
        return events


def _error_of(event: EngineFailed) -> PenstockError:
    """The error, with the trace of the process where it happened as a note."""
    error = error_from_info(event.error)
    if event.trace:
        error.add_note(event.trace)
    return error

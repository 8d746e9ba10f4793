"""The synchronous face of the engine, for `llm`: add requests, poll for updates.

`ProcessClient` starts a supervisor, which starts core and ranks, and speaks to the core over zmq;
`InprocessClient` is its twin around an `EngineCore` in the same process. Text is not their business.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.config import EngineConfig
from penstock.engine.core_process import build_core, prove_stages, refusal
from penstock.engine.ipc import (
    AbortRequests,
    AddRequest,
    ClientSocket,
    CoreToClient,
    EngineFailed,
    Hello,
    StepUpdates,
    Welcome,
)
from penstock.engine.launch import LaunchPlan
from penstock.engine.reports import EngineReady, Event, Failed, Reporter
from penstock.engine.stats import CoreStats
from penstock.engine.supervisor import CallerConfig
from penstock.errors import PenstockError, StageLostError, error_from_info
from penstock.executor.base import Executor
from penstock.request import GenerationRequest, RequestUpdate

END_TIMEOUT_S = 10.0

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EngineClient(Protocol):
    """One user of one engine. Belongs to one thread."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output that the engine serves."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. A refusal comes as its only update, with `finish_reason` "error"."""
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
        except BaseException:
            executor.shutdown()
            raise
        self._core, scheduler = build_core(plan.core, executor, kv_plan.num_blocks, time.monotonic)
        prove_stages(self._core)
        self.max_model_len = scheduler.max_len
        self._refused: list[RequestUpdate] = []
        self._closed = False

    def add(self, request: GenerationRequest) -> None:
        try:
            self._core.add_request(request)
        except PenstockError as error:
            self._refused.append(refusal(request, error))

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


class ProcessClient:
    """An engine in processes of its own, which end with this object or with this process, however it ends.

    Args:
        reporter: gets the supervisor's events while it loads.

    Raises:
        PenstockError: the engine could not be started; the first cause.
    """

    def __init__(self, config: EngineConfig, reporter: Reporter) -> None:
        self._supervisor = _SupervisorProcess(config)
        try:
            address = self._supervisor.wait_until_ready(reporter)
            self._socket = ClientSocket(address)
        except BaseException:
            self._supervisor.end()
            raise
        self._stats: CoreStats | None = None
        self._updates: list[RequestUpdate] = []
        try:
            self.max_model_len = self._say_hello().max_model_len
        except BaseException:
            self.close()
            raise

    def add(self, request: GenerationRequest) -> None:
        self._socket.send(AddRequest(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._socket.send(AbortRequests(list(request_ids)))

    def poll(self, timeout_s: float) -> list[RequestUpdate]:
        if self._socket.wait(timeout_s):
            for message in self._socket.drain():
                self._take(message)
        updates, self._updates = self._updates, []
        return updates

    def stats(self) -> CoreStats | None:
        return self._stats

    def close(self) -> None:
        self._socket.close()
        self._supervisor.end()

    def _say_hello(self) -> Welcome:
        self._socket.send(Hello())
        while True:
            self._socket.wait(1.0)
            for message in self._socket.drain():
                if isinstance(message, Welcome):
                    return message
                self._take(message)

    def _take(self, message: CoreToClient) -> None:
        if isinstance(message, StepUpdates):
            self._stats = message.stats
            self._updates += message.updates
        elif isinstance(message, EngineFailed):
            raise self._supervisor.first_cause(error_from_info(message.error))


class _SupervisorProcess:
    """The supervisor that this process has started. It ends when the config pipe, its lifeline, is closed."""

    def __init__(self, config: EngineConfig) -> None:
        config_read, self._lifeline = os.pipe()
        self._status_fd, status_write = os.pipe()
        command = [sys.executable, "-P", "-m", "penstock.engine.supervisor"]
        command += ["--config-fd", str(config_read), "--status-fd", str(status_write)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[config_read, status_write], process_group=0
            )
        finally:
            os.close(config_read)
            os.close(status_write)
        message = CallerConfig(engine=config, caller_pid=os.getpid())
        os.write(self._lifeline, msgspec.json.encode(message) + b"\n")
        self._partial = b""

    def wait_until_ready(self, reporter: Reporter) -> str:
        """Address of the core. Raises the first cause when the engine cannot be started."""
        while True:
            events = self._read_events()
            for event in events:
                reporter.report(event)
                if isinstance(event, Failed):
                    raise _error_of(event)
                if isinstance(event, EngineReady):
                    return event.address
            if not events:
                code = self._process.wait()
                raise StageLostError(f"the supervisor ended with code {code} before the engine was ready.")

    def first_cause(self, error: PenstockError) -> PenstockError:
        """What the supervisor gives as the cause of a loss, or `error` if it says nothing."""
        while events := self._read_events():
            for event in events:
                if isinstance(event, Failed):
                    return _error_of(event)
        return error

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

    def _read_events(self) -> list[Event]:
        """At least one event, unless the pipe has ended."""
        events: list[Event] = []
        while not events:
            chunk = os.read(self._status_fd, 65536)
            if not chunk:
                break
            lines = (self._partial + chunk).split(b"\n")
            self._partial = lines.pop()
            events = [_events.decode(line) for line in lines]
        return events


def _error_of(event: Failed) -> PenstockError:
    """The error, with the trace of the process where it happened as a note."""
    error = error_from_info(event.error)
    if event.trace:
        error.add_note(event.trace)
    return error

"""The supervisor as a child: what it says, and what is left when it cannot be started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.engine import EngineConfig, ModelConfig
from penstock.engine.supervisor.reports import EngineFailed, Event, LogReporter, Recovered
from penstock.errors import ErrorInfo, StageLostError
from penstock.llm import supervisor_process
from penstock.llm.supervisor_process import SupervisorProcess
from penstock.process.readiness import await_readable

WAIT_S = 30.0  # a bound for hangs, never waited for
CONFIG = EngineConfig(model=ModelConfig(model="demo"))
LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed by signal 9", stage=1)


class FakeChild:
    """In place of a supervisor's process: its end of the status pipe is the test's."""

    def __init__(self, _command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        self.config_fd, self.status_fd = self._fds = [os.dup(fd) for fd in pass_fds]

    def wait(self, _timeout_s: float = 0.0) -> int:
        while self._fds:
            os.close(self._fds.pop())
        return 0


class GoneChild:
    """In place of a supervisor's process that has ended before it could read its config."""

    def __init__(self, _command: list[str], **_: Any) -> None: ...

    def wait(self, _timeout_s: float = 0.0) -> int:
        return 3


@pytest.mark.parametrize("said", [b"", b'{"event":"failed"'])
def test_a_supervisor_that_says_no_cause_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeChild)
    supervisor = SupervisorProcess(CONFIG, LogReporter())
    os.write(supervisor._process.status_fd, said)
    noticed = StageLostError("noticed")
    assert supervisor.first_cause(noticed, timeout_s=0.01) is noticed
    supervisor.end()


def test_the_supervisors_cause_goes_before_what_was_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeChild)
    supervisor = SupervisorProcess(CONFIG, LogReporter())
    os.write(supervisor._process.status_fd, msgspec.json.encode(EngineFailed(error=LOST, trace="")) + b"\n")
    assert supervisor.first_cause(StageLostError("noticed")).message == LOST.message
    supervisor.end()


def test_what_the_supervisor_says_while_it_serves_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeChild)
    told: list[Event] = []
    reporter = LogReporter()
    monkeypatch.setattr(reporter, "report", told.append)
    supervisor = SupervisorProcess(CONFIG, reporter)
    supervisor.pass_on_news()
    events = [Recovered(epoch=1, seconds=1.0), Recovered(epoch=2, seconds=2.0), EngineFailed(error=LOST)]
    for event in events:
        os.write(supervisor._process.status_fd, msgspec.json.encode(event) + b"\n")
    supervisor.pass_on_news()
    assert told == events
    assert supervisor.first_cause(StageLostError("noticed")).message == LOST.message, "it has been heard"
    supervisor.end()


def test_a_supervisor_that_cannot_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        SupervisorProcess(CONFIG, LogReporter())
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_supervisor_that_ends_before_it_reads_its_config_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", GoneChild)
    before = set(os.listdir("/proc/self/fd"))
    supervisor = SupervisorProcess(CONFIG, LogReporter())
    with pytest.raises(StageLostError, match="ended with code 3 before the engine was ready"):
        supervisor.wait_until_ready()
    supervisor.end()
    supervisor.end()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_thread_that_waits_for_a_supervisor_reads_nothing_of_another_file_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when an `AsyncLLM` is closed while it starts."""
    monkeypatch.setattr(subprocess, "Popen", FakeChild)
    supervisor = SupervisorProcess(CONFIG, LogReporter())
    waits = threading.Event()

    def wait(sources: Sequence[int], timeout_s: float) -> Sequence[int]:
        waits.set()
        return await_readable(sources, timeout_s)

    monkeypatch.setattr(supervisor_process, "await_readable", wait)
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(supervisor.wait_until_ready)
        assert waits.wait(WAIT_S)
        supervisor.end()
        with pytest.raises(StageLostError, match="ended with code 0"):
            waiting.result(WAIT_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(supervisor.fileno())
    supervisor.pass_on_news()
    noticed = StageLostError("noticed")
    assert supervisor.first_cause(noticed) is noticed, "nothing is read any more"

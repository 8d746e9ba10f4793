"""The supervisor as a child: what it says, and what is left when it cannot be started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.engine import EngineConfig, ModelConfig
from penstock.engine.supervisor.reports import EngineFailed, Event, LogReporter, Recovered
from penstock.errors import ErrorInfo, StageLostError
from penstock.llm.supervisor_process import SupervisorProcess

CONFIG = EngineConfig(model=ModelConfig(model="demo"))
LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed by signal 9", stage=1)


class FakeChild:
    """In place of a supervisor's process: its end of the status pipe is the test's."""

    def __init__(self, _command: list[str], *, pass_fds: list[int], **_: Any) -> None:
        self.config_fd, self.status_fd = map(os.dup, pass_fds)

    def wait(self, _timeout_s: float = 0.0) -> int:
        for fd in (self.config_fd, self.status_fd):
            os.close(fd)
        return 0


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

"""The synchronous clients where the engine is lost, silent, or does not come up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from core_numbers import core_stats
from fakes import FakeClock, FakeExecutor
from penstock.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.engine.ipc import AbortRequests, AddRequest, CoreGone, Hello, StepUpdates, Welcome
from penstock.engine.supervisor.reports import EngineFailed, Event, LogReporter, Recovered
from penstock.errors import ErrorInfo, PeerError, PenstockError, StageLostError, WaitTimeoutError
from penstock.llm import engine_client as client_module
from penstock.llm.engine_client import InprocessClient, ProcessClient
from penstock.process.config import CoreConfig
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams, TokenLogprobs
from penstock.scheduler.admission import derive_seed

CONFIG = EngineConfig(model=ModelConfig(model="demo"))
WELCOME = Welcome(num_blocks=64, block_size=4, max_model_len=64, stages=[])
LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed by signal 9", stage=1)


class FakeSocket:
    """A core that says what a test gives it; a wait without news takes its time on the clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.inbox: deque[Any] = deque([WELCOME])
        self.sent: list[Any] = []
        self._clock = clock

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def wait(self, timeout_s: float) -> bool:
        if not self.inbox:
            self._clock.advance(timeout_s)
        return bool(self.inbox)

    def drain(self) -> list[Any]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeSupervisor:
    def __init__(self) -> None:
        self.ended = False
        self.has_ended = False

    def wait_until_ready(self) -> str:
        return "fake"

    def pass_on_news(self) -> None:
        pass

    def first_cause(self, error: PenstockError) -> PenstockError:
        return error

    def end(self) -> None:
        self.ended = True


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.socket = FakeSocket(self.clock)
        self.supervisor = FakeSupervisor()
        monkeypatch.setattr(client_module, "ClientSocket", lambda _address: self.socket)
        monkeypatch.setattr(client_module, "SupervisorProcess", lambda _config, _reporter: self.supervisor)

    def client(self) -> ProcessClient:
        return ProcessClient(CONFIG, LogReporter(), clock=self.clock)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def _request(name: str = "a", *, seed: int | None = None) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=[1], sampling=SamplingParams(seed=seed))


def _beat(*updates: RequestUpdate) -> StepUpdates:
    return StepUpdates(list(updates), core_stats())


def _poll_for(client: ProcessClient, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        client.poll(0.1)


def test_r1_a_lost_engine_is_remembered(rig: Rig) -> None:
    client = rig.client()
    client.add(_request())
    rig.supervisor.has_ended = True
    with pytest.raises(StageLostError) as first:
        client.poll(0.1)
    client.abort(["a"])
    for call in (lambda: client.add(_request("b")), lambda: client.poll(0.1)):
        with pytest.raises(StageLostError) as again:
            call()
        assert again.value is first.value
    assert [type(message) for message in rig.socket.sent] == [Hello, AddRequest]


def test_r4_requests_go_on_with_another_core(rig: Rig) -> None:
    client = rig.client()
    for name in "abc":
        client.add(_request(name, seed=8))
    rig.socket.inbox += [
        _beat(
            RequestUpdate(request_id="a", token_ids=[4, 5]),
            RequestUpdate(request_id="b", token_ids=[6], finish_reason="stop"),
        ),
        CoreGone(),
    ]
    assert len(client.poll(0.1)) == 2
    for _ in range(59):
        assert client.poll(1.0) == []
    client.abort(["c"])
    client.add(_request("d", seed=9))
    rig.socket.sent.clear()
    rig.socket.inbox.append(WELCOME)
    assert client.poll(0.1) == []
    again = [AddRequest(_request("a", seed=8), [4, 5]), AddRequest(_request("d", seed=9), [])]
    assert rig.socket.sent == again


def test_r4_a_request_without_a_seed_goes_on_by_the_one_that_it_had(rig: Rig) -> None:
    client = rig.client()
    for name in "ab":
        client.add(_request(name))
    first = [message.request.sampling.seed for message in rig.socket.sent if isinstance(message, AddRequest)]
    rig.socket.inbox += [
        _beat(RequestUpdate(request_id="a", token_ids=[4], finish_reason="stop")),
        CoreGone(),
    ]
    client.poll(0.1)
    rig.socket.sent.clear()
    rig.socket.inbox.append(WELCOME)
    client.poll(0.1)
    client.add(_request("c"))
    again = [message.request.sampling.seed for message in rig.socket.sent if isinstance(message, AddRequest)]
    assert first == [derive_seed(0, 0), derive_seed(0, 1)]
    assert again == [derive_seed(0, 1), derive_seed(0, 2)]


def test_g8_r4_another_core_hears_of_the_scores_that_have_come_and_they_are_progress(rig: Rig) -> None:
    client = rig.client()
    client.add(_request("a", seed=8))
    score = TokenLogprobs(-1.0, 1, [], [])
    for count in (2, 3):
        rig.socket.inbox += [
            _beat(RequestUpdate(request_id="a", prompt_logprobs=[score] * count)),
            CoreGone(),
        ]
        (update,) = client.poll(0.1)
        assert update.error is None
        rig.socket.sent.clear()
        rig.socket.inbox.append(WELCOME)
        assert client.poll(0.1) == []
    assert rig.socket.sent == [AddRequest(_request("a", seed=8), [], 5)]
    rig.socket.inbox.append(CoreGone())
    (update,) = client.poll(0.1)
    assert update.error is not None
    assert update.error.code == "quarantined"


def test_r4_another_core_is_greeted_until_it_answers(rig: Rig) -> None:
    client = rig.client()
    rig.socket.inbox.append(CoreGone())
    rig.socket.sent.clear()
    for _ in range(7):
        client.poll(0.5)
    assert rig.socket.sent == [Hello()] * 4
    rig.socket.inbox.append(WELCOME)
    for _ in range(7):
        client.poll(0.5)
    assert rig.socket.sent == [Hello()] * 4


def test_r4_it_waits_a_minute_for_another_core(rig: Rig) -> None:
    client = rig.client()
    client.add(_request())
    rig.socket.inbox.append(CoreGone())
    with pytest.raises(WaitTimeoutError, match="said nothing for 60 s"):
        _poll_for(client, 60.3)


def test_a_core_that_is_silent_for_ten_heartbeats_is_lost(rig: Rig) -> None:
    client = rig.client()
    client.add(_request())
    for _ in range(99):
        assert client.poll(0.1) == []
    with pytest.raises(PeerError, match="engine core has said nothing for 10 s"):
        _poll_for(client, 0.3)
    with pytest.raises(PeerError):
        client.add(_request("b"))


def test_a_core_that_beats_is_not_lost(rig: Rig) -> None:
    client = rig.client()
    client.add(_request())
    for _ in range(5):
        assert client.poll(9.0) == []
        rig.socket.inbox.append(_beat())
        assert client.poll(9.0) == []


@pytest.mark.parametrize("ending", ["finish", "abort"])
def test_silence_without_requests_is_no_loss(rig: Rig, ending: str) -> None:
    client = rig.client()
    client.add(_request())
    if ending == "finish":
        rig.socket.inbox.append(_beat(RequestUpdate(request_id="a", finish_reason="stop")))
        assert len(client.poll(0.1)) == 1
    else:
        client.abort(["a"])
        assert rig.socket.sent[-1] == AbortRequests(["a"])
    for _ in range(30):
        assert client.poll(1.0) == []


def test_words_that_waited_while_this_process_was_stopped_count(rig: Rig) -> None:
    client = rig.client()
    client.add(_request())
    waits = []
    plain_wait = rig.socket.wait

    def late(timeout_s: float) -> bool:
        """The first wait sees nothing yet, as before the transport's thread has run."""
        waits.append(timeout_s)
        if len(waits) == 2:
            rig.socket.inbox.append(_beat())
        return plain_wait(timeout_s)

    rig.socket.wait = late  # type: ignore[method-assign]
    rig.clock.advance(100.0)
    assert client.poll(0.0) == []
    assert client.poll(0.0) == []
    assert len(waits) == 3


def test_a_core_that_never_answers_hello_is_given_up_and_ended(rig: Rig) -> None:
    rig.socket.inbox.clear()
    started = rig.clock()
    with pytest.raises(WaitTimeoutError, match="engine core did not answer in 3600 s"):
        rig.client()
    assert rig.clock() - started == pytest.approx(3600.0)
    assert rig.supervisor.ended


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
    supervisor = client_module.SupervisorProcess(CONFIG, LogReporter())
    os.write(supervisor._process.status_fd, said)
    noticed = StageLostError("noticed")
    assert supervisor.first_cause(noticed, timeout_s=0.01) is noticed
    supervisor.end()


def test_the_supervisors_cause_goes_before_what_was_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeChild)
    supervisor = client_module.SupervisorProcess(CONFIG, LogReporter())
    os.write(supervisor._process.status_fd, msgspec.json.encode(EngineFailed(error=LOST, trace="")) + b"\n")
    assert supervisor.first_cause(StageLostError("noticed")).message == LOST.message
    supervisor.end()


def test_what_the_supervisor_says_while_it_serves_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeChild)
    told: list[Event] = []
    reporter = LogReporter()
    monkeypatch.setattr(reporter, "report", told.append)
    supervisor = client_module.SupervisorProcess(CONFIG, reporter)
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
        ProcessClient(CONFIG, LogReporter())
    assert set(os.listdir("/proc/self/fd")) == before


class DyingExecutor(FakeExecutor):
    """Comes up, and is lost at the first probe."""

    def __init__(self) -> None:
        super().__init__(depth=2, latency=0)
        self.lose_stage(1, "it fell silent")
        self.shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1


def test_an_executor_that_fails_the_first_probe_is_shut_down() -> None:
    executor = DyingExecutor()
    core = CoreConfig(
        parallel=ParallelConfig(),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(),
        seed=0,
        max_model_len=64,
        vocab_size=40,
        eos_token_ids=[1],
    )
    plan: Any = SimpleNamespace(core=core)
    with pytest.raises(StageLostError, match="it fell silent"):
        InprocessClient(plan, executor)
    assert executor.shutdowns == 1

"""The synchronous client of an engine in other processes: its core and its supervisor do what a test says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from core_client import WAIT_S, greeting_client, heard
from core_numbers import core_stats
from penstock.config.engine import EngineConfig, ModelConfig
from penstock.engine.client.outputs import output_assembler
from penstock.engine.client.siblings import with_siblings
from penstock.engine.ipc import AbortRequests, AddRequest, CoreSocket, StepUpdates, Welcome
from penstock.engine.supervisor.reports import LogReporter
from penstock.errors import ErrorInfo, NumericalError, PenstockError, StageLostError, WaitTimeoutError
from penstock.hosts.local_socket import LocalSocket
from penstock.llm import process_client, supervised_engine
from penstock.llm.engine_client import OfflineRequest, RequestResult
from penstock.llm.process_client import ProcessClient
from penstock.llm.progress import ProgressDisplay
from penstock.request import FinishReason, RequestUpdate, SamplingParams, VectorShape
from penstock.tokenizer.tokenizer import AbsentTokenizer

CONFIG = EngineConfig(model=ModelConfig(model="demo"))
PLAN: Any = SimpleNamespace(core=SimpleNamespace(max_model_len=64, vocab_size=256))
TEXT: Any = SimpleNamespace(tokenizer=AbsentTokenizer(), vector=VectorShape(size=0), pooling="last")
STATS = core_stats()
WELCOME = Welcome(num_blocks=8, block_size=4, max_model_len=32, stages=[])


class HandCore:
    """The core's end of the socket, in a thread that follows a script of the test."""

    def __init__(self) -> None:
        self.endpoint = LocalSocket()
        self.client = b""
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=lambda: None)
        self.open()

    def open(self) -> None:
        """Another core at the same address."""
        self.socket = CoreSocket(f"fd:{os.dup(self.endpoint.listen_fd)}")

    def play(self, script: Callable[[], None]) -> None:
        """Follow the script from now on; `joined` says what went wrong."""

        def follow() -> None:
            try:
                script()
            except BaseException as error:
                self.errors.append(error)

        self.joined()
        self._thread = threading.Thread(target=follow)
        self._thread.start()

    def joined(self) -> None:
        """The script has come to its end."""
        if self._thread.ident is not None:
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive()
        assert not self.errors, self.errors

    def hear(self, count: int) -> list[object]:
        """The next messages of a client that has said hello."""
        self.client, messages = heard(self.socket, count, greeted=True)
        return messages

    def hear_greeting(self) -> None:
        self.client = greeting_client(self.socket)

    def welcome(self) -> None:
        self.hear_greeting()
        self.socket.send(self.client, WELCOME)

    def tell(self, *updates: RequestUpdate) -> None:
        self.socket.send(self.client, StepUpdates(list(updates), STATS))

    def close(self) -> None:
        self.joined()
        self.socket.close()
        self.endpoint.close()


class HandSupervisor:
    """Says that it has ended when a test wants it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.has_ended = False
        self.was_ended = False
        self._reader, self._writer = os.pipe()

    def wait_until_ready(self) -> str:
        return self.address

    def fileno(self) -> int:
        return self._reader

    def die(self) -> None:
        self.has_ended = True
        os.write(self._writer, b".")

    def pass_on_news(self) -> None:
        pass

    def first_cause(self, error: PenstockError) -> PenstockError:
        return error

    def end(self) -> None:
        if not self.was_ended:
            self.was_ended = True
            os.close(self._reader)
            os.close(self._writer)


class CountedProgress(ProgressDisplay):
    def __init__(self) -> None:
        self.num_done = 0

    def advance(self) -> None:
        self.num_done += 1


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.core = HandCore()
        self.supervisor = HandSupervisor(self.core.endpoint.connect_address)
        self.progress = CountedProgress()
        monkeypatch.setattr(process_client, "SupervisorProcess", lambda _config, _reporter: self.supervisor)

    def client(self) -> ProcessClient:
        """Connected to a core that welcomes it."""
        self.core.play(self.core.welcome)
        client = self.unwelcome_client()
        self.core.joined()
        return client

    def unwelcome_client(self) -> ProcessClient:
        return ProcessClient(CONFIG, PLAN, TEXT, LogReporter())

    def run(self, client: ProcessClient, requests: Sequence[OfflineRequest]) -> list[RequestResult]:
        return client.run(requests, self.progress)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """After each test the client's thread and all descriptors are gone; what others have left may be, too."""
    before = {*os.listdir("/proc/self/fd"), *threading.enumerate()}
    rig = Rig(monkeypatch)
    yield rig
    rig.core.close()
    assert rig.supervisor.was_ended
    assert {*os.listdir("/proc/self/fd"), *threading.enumerate()} <= before


def _request(name: str, n: int = 1) -> OfflineRequest:
    request = with_siblings(name, [1, 2, 3], SamplingParams(n=n, max_tokens=20))
    return OfflineRequest(request, lambda one: output_assembler(AbsentTokenizer(), [1, 2, 3], one.sampling))


def _update(name: str, *tokens: int, finish: FinishReason | None = None, **more: Any) -> RequestUpdate:
    return RequestUpdate(request_id=name, token_ids=list(tokens), finish_reason=finish, **more)


def test_results_come_in_the_order_of_the_requests(rig: Rig) -> None:
    client = rig.client()
    assert client.max_model_len == 32

    def script() -> None:
        first, second = rig.core.hear(2)
        assert isinstance(first, AddRequest)
        assert isinstance(second, AddRequest)
        assert (first.request.request_id, second.request.request_id) == ("0", "1")
        rig.core.tell(_update("1", 7, queue_seconds=0.5, num_cached_tokens=2), _update("0", 4))
        rig.core.tell(_update("1", 8, finish="length"), _update("0/1", 6, finish="stop"))
        rig.core.tell(_update("0", 5, finish="length"))

    rig.core.play(script)
    two, one = rig.run(client, [_request("0", n=2), _request("1")])
    assert [whole.token_ids for whole in two.sequences] == [[4, 5], [6]]
    assert (one.whole.token_ids, one.whole.finish_reason) == ([7, 8], "length")
    assert (two.num_cached_tokens, one.num_cached_tokens) == (0, 2)
    assert rig.progress.num_done == 2
    assert client.stats() == STATS
    assert rig.run(client, []) == []
    client.close()
    client.close()


def test_r8_the_error_of_one_aborts_the_others(rig: Rig) -> None:
    client = rig.client()

    def script() -> None:
        rig.core.hear(3)
        error = ErrorInfo(kind="NumericalError", message="NaN in the logits", code="numerical")
        rig.core.tell(_update("0", 5, finish="length"), _update("1", finish="error", error=error))
        assert rig.core.hear(1) == [AbortRequests(["2"])]

    rig.core.play(script)
    with pytest.raises(NumericalError, match="NaN"):
        rig.run(client, [_request("0"), _request("1"), _request("2")])
    rig.core.joined()
    client.close()


def test_r13_an_interrupt_aborts_what_runs(rig: Rig) -> None:
    client = rig.client()
    caller = threading.get_ident()

    def script() -> None:
        rig.core.hear(2)
        signal.pthread_kill(caller, signal.SIGINT)
        aborted = rig.core.hear(2)
        assert aborted == [AbortRequests(["0"]), AbortRequests(["1"])]

    rig.core.play(script)
    with pytest.raises(KeyboardInterrupt):
        rig.run(client, [_request("0"), _request("1")])
    rig.core.joined()
    client.close()


def test_r4_requests_outlive_the_core_and_wait_for_one_that_is_away(rig: Rig) -> None:
    client = rig.client()

    def lose_core() -> None:
        (message,) = rig.core.hear(1)
        assert isinstance(message, AddRequest)
        rig.core.tell(_update("0", 4))
        rig.core.socket.close()
        rig.core.open()
        rig.core.welcome()
        (again,) = rig.core.hear(1)
        assert isinstance(again, AddRequest)
        assert again.request.sampling.seed == message.request.sampling.seed is not None
        output = again.output_ids or []  # the last word of a core may be lost with it
        rig.core.tell(_update("0", *[4, 5][len(output) :], finish="length"))

    rig.core.play(lose_core)
    (result,) = rig.run(client, [_request("0")])
    assert result.whole.token_ids == [4, 5]
    rig.core.joined()
    rig.core.socket.close()

    def come_back() -> None:
        rig.core.open()
        rig.core.welcome()
        rig.core.hear(1)
        rig.core.tell(_update("1", 6, finish="length"))

    rig.core.play(come_back)
    (result,) = rig.run(client, [_request("1")])
    assert result.whole.token_ids == [6]
    client.close()


def test_r1_a_lost_engine_is_remembered(rig: Rig) -> None:
    client = rig.client()

    def script() -> None:
        rig.core.hear(1)
        rig.supervisor.die()

    rig.core.play(script)
    for _ in range(2):
        with pytest.raises(StageLostError, match="the supervisor of the engine has ended"):
            rig.run(client, [_request("0")])
    client.close()


def test_a_core_that_never_answers_is_given_up_and_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_engine, "START_TIMEOUT_S", 0.01)
    with pytest.raises(WaitTimeoutError, match=r"engine core did not answer in 0\.01 s"):
        rig.unwelcome_client()


def test_r1_an_engine_that_is_lost_before_it_answers_is_not_waited_for(rig: Rig) -> None:
    def script() -> None:
        rig.core.hear_greeting()
        rig.supervisor.die()

    rig.core.play(script)
    with pytest.raises(StageLostError, match="the supervisor of the engine has ended"):
        rig.unwelcome_client()

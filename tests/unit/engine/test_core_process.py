"""The core's loop over real sockets and a fake pipeline."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from fakes import CoreRig, oracle_tokens
from penstock.config import CacheConfig, CoreConfig, ParallelConfig, SchedulerConfig
from penstock.engine.control import ControlPipe, PipelineLost, Stop, read_control
from penstock.engine.core_process import CoreServer, build_core, prove_stages
from penstock.engine.endpoints import Endpoint
from penstock.engine.ipc import (
    AbortRequests,
    AddRequest,
    ClientSocket,
    CoreSocket,
    EngineFailed,
    Hello,
    StepUpdates,
    Welcome,
)
from penstock.errors import ErrorInfo, PenstockError, StageLostError
from penstock.executor.base import KVPlan
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams

WAIT_S = 10.0  # a bound for hangs, never waited for
WELCOME = Welcome(num_blocks=64, block_size=4, max_model_len=64, stages=[])


class ServedCore:
    """A core on fakes, run by a `CoreServer` in a thread, and one client of it."""

    def __init__(self) -> None:
        self.endpoint = Endpoint()
        self.rig = CoreRig(num_stages=2, async_depth=1)
        self.control = ControlPipe()
        sockets = CoreSocket(f"fd:{os.dup(self.endpoint.listen_fd)}")
        self.endpoint.close_listener()
        self.server = CoreServer(
            self.rig.core,
            sockets,
            WELCOME,
            rank_fds=[],
            control_fd=self.control.read_fd,
            clock=self.rig.clock,
        )
        self.error: PenstockError | None = None
        self.thread = threading.Thread(target=self._run, args=(sockets,))
        self.client = self.connect()
        self.thread.start()

    def connect(self) -> ClientSocket:
        return ClientSocket(self.endpoint.connect_address)

    def end(self) -> None:
        self.control.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.client.close()
        self.control.close()
        self.endpoint.close()

    def _run(self, sockets: CoreSocket) -> None:
        try:
            self.server.run()
        except PenstockError as error:
            self.error = error
        finally:
            sockets.close()


@pytest.fixture
def served() -> Iterator[ServedCore]:
    made = ServedCore()
    yield made
    made.end()


def receive(client: ClientSocket, count: int = 1) -> list[object]:
    """The next messages; heartbeats, which carry nothing, are left out."""
    received: list[object] = []
    while len(received) < count:
        assert client.wait(WAIT_S), "the core has said nothing"
        messages = client.drain()
        received += [m for m in messages if not (isinstance(m, StepUpdates) and not m.updates)]
    return received


def request(name: str, **sampling: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
    return GenerationRequest(request_id=name, prompt_token_ids=[5, 6, 7], sampling=params)


def collect(client: ClientSocket, names: set[str]) -> dict[str, list[RequestUpdate]]:
    """All updates of these requests, until each has ended."""
    updates: dict[str, list[RequestUpdate]] = {name: [] for name in names}
    while any(not entries or entries[-1].finish_reason is None for entries in updates.values()):
        for message in receive(client):
            assert isinstance(message, StepUpdates)
            for update in message.updates:
                updates[update.request_id].append(update)
    return updates


def ids_of(updates: list[RequestUpdate]) -> list[int]:
    return [token_id for update in updates for token_id in update.token_ids]


def test_d2_requests_run_to_their_end_and_hello_is_answered(served: ServedCore) -> None:
    served.client.send(Hello())
    assert receive(served.client) == [WELCOME]
    for name, count in (("a", 9), ("b", 3)):
        served.client.send(AddRequest(request(name, max_tokens=count)))
    updates = collect(served.client, {"a", "b"})
    for name, count in (("a", 9), ("b", 3)):
        params = request(name, max_tokens=count).sampling
        expected, _ = oracle_tokens([5, 6, 7], params, seed=0, eos_token_ids=[1], max_len=64)
        assert ids_of(updates[name]) == expected
        assert updates[name][-1].finish_reason == "length"


def test_each_client_gets_its_own_updates_only(served: ServedCore) -> None:
    other = served.connect()
    served.client.send(AddRequest(request("a", max_tokens=2)))
    other.send(AddRequest(request("b", max_tokens=2)))
    assert set(collect(served.client, {"a"})) == {"a"}
    assert set(collect(other, {"b"})) == {"b"}
    other.close()


def test_r8_a_refusal_is_the_requests_only_update(served: ServedCore) -> None:
    long = GenerationRequest(request_id="long", prompt_token_ids=[3] * 64, sampling=SamplingParams())
    served.client.send(AddRequest(long))
    served.client.send(AddRequest(request("good", max_tokens=1)))
    updates = collect(served.client, {"long", "good"})
    (refusal,) = updates["long"]
    assert refusal.finish_reason == "error"
    assert refusal.error is not None
    assert refusal.error.kind == "InvalidRequestError"
    assert len(ids_of(updates["good"])) == 1


def test_d13_nothing_follows_an_abort(served: ServedCore) -> None:
    served.client.send(AddRequest(request("a", max_tokens=50)))
    served.client.send(AbortRequests(["a", "unknown"]))
    served.client.send(AddRequest(request("b", max_tokens=3)))
    updates: list[RequestUpdate] = []
    while not any(update.request_id == "b" and update.finish_reason for update in updates):
        for message in receive(served.client):
            assert isinstance(message, StepUpdates)
            updates += message.updates
    names = [update.request_id for update in updates]
    assert "a" not in names[names.index("b") :], "b was added after the abort of a"


def test_r1_the_loss_that_the_supervisor_tells_reaches_every_client(served: ServedCore) -> None:
    served.client.send(Hello())
    receive(served.client)
    error = ErrorInfo(kind="StageLostError", message="stage 1 was killed", stage=1)
    served.control.tell_loss(error)
    assert receive(served.client)[0] == EngineFailed(error)
    served.thread.join(WAIT_S)
    assert isinstance(served.error, StageLostError)
    assert served.error.stage == 1


def test_r1_the_loss_that_the_core_sees_ends_requests_and_clients(served: ServedCore) -> None:
    served.client.send(Hello())
    receive(served.client)
    served.rig.executor.lose_stage(1, "it fell silent")
    served.client.send(AddRequest(request("a", max_tokens=4)))
    messages: list[object] = []
    while not any(isinstance(message, EngineFailed) for message in messages):
        messages += receive(served.client)
    failed = next(message for message in messages if isinstance(message, EngineFailed))
    assert failed.error.stage == 1
    served.thread.join(WAIT_S)
    assert isinstance(served.error, StageLostError)


def test_the_supervisors_word_on_a_loss_goes_before_what_the_core_noticed(served: ServedCore) -> None:
    served.client.send(Hello())
    receive(served.client)
    served.rig.executor.lose_stage(1, "it fell silent")
    served.client.send(AddRequest(request("a", max_tokens=4)))
    cause = ErrorInfo(kind="StageLostError", message="stage 1 was killed by signal 9", stage=1)
    served.control.tell_loss(cause)
    messages = receive(served.client)
    assert messages[0] == EngineFailed(cause), "once for all requests, not once for each"


def test_a_stop_lets_the_steps_in_flight_come_back(served: ServedCore) -> None:
    served.client.send(AddRequest(request("a", max_tokens=60)))
    receive(served.client)
    served.control.stop()
    served.thread.join(WAIT_S)
    assert served.error is None
    assert served.rig.core.num_inflight == 0
    assert served.rig.core.is_idle


def test_the_end_of_the_supervisor_is_a_stop(served: ServedCore) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    assert read_control(reader) == Stop()
    os.close(reader)


def test_control_messages_survive_the_pipe() -> None:
    control = ControlPipe()
    error = ErrorInfo(kind="StageLostError", message="x", stage=0)
    control.tell_loss(error)
    assert read_control(control.read_fd) == PipelineLost(error)
    control.close_read_end()
    control.stop()  # the core has gone: harmless
    control.close()


def core_config() -> CoreConfig:
    return CoreConfig(
        parallel=ParallelConfig(pipeline_parallel_size=2),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=4),
        seed=0,
        max_model_len=64,
        vocab_size=40,
        eos_token_ids=[1],
    )


def eight_blocks(rig: CoreRig) -> KVPlan:
    return KVPlan(num_blocks=8, ranks=rig.executor.start().ranks)


def test_d9_a_probe_must_cross_before_the_core_is_ready() -> None:
    rig = CoreRig(num_stages=2)
    core, scheduler = build_core(
        core_config(), rig.executor, KVPlan(num_blocks=8, ranks=rig.executor.start().ranks), rig.clock
    )
    prove_stages(core)
    assert rig.executor.events[:2] == [("submit", 0), ("result", 0)]
    assert core.stats().last_result_age_s == 0.0
    assert scheduler.max_len == 33, "8 blocks of 4 tokens, and the last token needs no block"


def test_d9_a_stage_that_fails_the_probe_is_the_cause() -> None:
    rig = CoreRig(num_stages=2)
    core, _ = build_core(
        core_config(), rig.executor, KVPlan(num_blocks=8, ranks=rig.executor.start().ranks), rig.clock
    )
    rig.executor.lose_stage(0, "no answer")
    with pytest.raises(StageLostError, match="no answer"):
        prove_stages(core)

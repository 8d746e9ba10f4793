"""The core's loop over real sockets and a fake pipeline."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from fakes import CoreRig, FakeExecutor, oracle_scores, oracle_tokens
from penstock.batch import AllocateKV, LinkOrder, StageSpans
from penstock.config.engine import CacheConfig, EvictionPolicy, ParallelConfig, SchedulerConfig
from penstock.engine.core.core_assembly import build_core, prove_stages
from penstock.engine.core.core_server import CoreServer
from penstock.engine.core.link_watch import LinkWatch
from penstock.engine.ipc import (
    AbortRequests,
    AddRequest,
    ClientSocket,
    CoreSocket,
    GetTrace,
    Hello,
    Operate,
    Operated,
    SessionsChanged,
    StepUpdates,
    Trace,
    Welcome,
)
from penstock.engine.stats import CoreStats
from penstock.errors import ErrorInfo, PenstockError, StageLostError
from penstock.executor.base import KVPlan
from penstock.hosts.local_socket import LocalSocket
from penstock.operations import CloseSession, OpenSession, Pause, Resume
from penstock.process.child import Abandoned, LinkJudged, Ready, StatusEvent
from penstock.process.config import CoreConfig, HostLink
from penstock.process.control import ControlReader, ControlSocket, EpochLost, ExchangeLink, Stop
from penstock.process.endpoints import CoreEndpoints, Restarts, RingHandle
from penstock.process.pipe_hosts import HostClock, PipeHosts
from penstock.request import Follower, GenerationRequest, RequestUpdate, SamplingParams

WAIT_S = 10.0  # a bound for hangs, never waited for
CAUSE = ErrorInfo(kind="StageLostError", message="stage 1 was killed by signal 9", stage=1)
WELCOME = Welcome(num_blocks=64, block_size=4, max_model_len=64, stages=[])


class ServedCore:
    """A core on fakes, run by a `CoreServer` in a thread, and one client of it."""

    def __init__(
        self,
        *,
        lose_at: int | None = None,
        eviction: EvictionPolicy | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = LocalSocket()
        self.rig = CoreRig(num_stages=2, async_depth=1, recovers=True, eviction=eviction)
        self.rig.executor.lose_at = lose_at
        self.control = ControlSocket()
        sockets = CoreSocket(f"fd:{os.dup(self.endpoint.listen_fd)}")
        self.endpoint.close_listener()
        self.reader = ControlReader(os.dup(self.control.child_fd))
        self.joined: list[AllocateKV] = []
        self.reported: queue.Queue[StatusEvent] = queue.Queue()
        self.server = CoreServer(
            self.rig.core,
            self.rig.executor,
            sockets,
            WELCOME,
            self.reader,
            join=self._join,
            report=self.reported.put,
            beat=beat,
            clock=self.rig.clock,
        )
        self.control.close_child_end()
        self.error: PenstockError | None = None
        self.thread = threading.Thread(target=self._run, args=(sockets,))
        self.client = self.connect()
        self.thread.start()

    def _join(self, ends: CoreEndpoints, start: AllocateKV) -> FakeExecutor:
        self.joined.append(start)
        return self.rig.make_executor(epoch=start.epoch, first_step=start.first_step)

    def connect(self) -> ClientSocket:
        return ClientSocket(self.endpoint.connect_address)

    def end(self) -> None:
        self.control.send(Stop())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.client.close()
        self.control.close()
        self.reader.close()
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


def test_another_client_is_told_how_many_sequences_were_asked_for(served: ServedCore) -> None:
    asked = msgspec.structs.replace(request("a", max_tokens=2), followers=[Follower("a/1", 4)])
    served.client.send(AddRequest(asked))
    served.client.send(AddRequest(request("b", max_tokens=2)))
    collect(served.client, {"a", "a/1", "b"})
    other = served.connect()
    other.send(Hello())
    assert receive(other) == [msgspec.structs.replace(WELCOME, num_sequences=3)]
    other.close()


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


def test_r13_an_abort_is_heard_although_there_is_always_another_result() -> None:
    """The ranks of `fakes` answer at once, as those of a tiny model may before the core asks again."""
    aborting: list[ClientSocket] = []

    def abort_once() -> None:
        if aborting and made.rig.core.stats().scheduler.num_running:
            aborting.pop().send(AbortRequests(["a"]))
            made.server._socket.wait([], WAIT_S)  # until it has come

    with serving(beat=abort_once) as made:
        other = made.connect()
        aborting.append(other)
        made.client.send(AddRequest(request("a", max_tokens=60)))
        made.client.send(AddRequest(request("b", max_tokens=60)))
        updates: list[RequestUpdate] = []
        while not any(update.request_id == "b" and update.finish_reason for update in updates):
            for message in receive(made.client):
                assert isinstance(message, StepUpdates)
                updates += message.updates
    other.close()
    assert sum(update.request_id == "a" for update in updates) < 60


def test_r13_what_a_client_asked_for_ends_with_the_client(served: ServedCore) -> None:
    other = served.connect()
    for client in (other, served.client):
        client.send(Hello())
        receive(client)
    other.send(AddRequest(request("orphan", max_tokens=60)))
    receive(other)
    other.close()
    deadline = time.monotonic() + WAIT_S
    known = served.server._clients._known
    while len(known) > 1:  # noticed when it is next told something, a heartbeat at the latest
        assert time.monotonic() < deadline
        served.rig.clock.advance(1.0)
        served.client.send(Hello())
        receive(served.client)
    served.control.send(Stop())
    served.thread.join(WAIT_S)
    assert served.rig.core.stats().cache.free_blocks == served.rig.core.stats().cache.num_blocks
    assert served.server._clients.live_requests == []


def test_g4_an_operation_is_answered_when_it_is_complete(served: ServedCore) -> None:
    served.client.send(Hello())
    receive(served.client)
    served.client.send(Operate(6, Pause("keep")))
    receive(served.client)
    served.client.send(AddRequest(request("a", max_tokens=40)))
    served.client.send(Operate(7, Pause("abort")))
    ended, answer = receive(served.client, 2)
    assert isinstance(ended, StepUpdates)
    assert [(u.request_id, u.error and u.error.code) for u in ended.updates] == [("a", "paused")]
    assert ended.stats.scheduler.paused
    assert isinstance(answer, Operated)
    assert answer.number == 7
    assert answer.done.completed_step is not None
    served.client.send(AddRequest(request("b", max_tokens=3)))
    served.client.send(Operate(8, Resume()))
    assert Operated in {type(message) for message in receive(served.client, 4)}


def test_r4_a_request_goes_on_from_what_another_core_gave_it(served: ServedCore) -> None:
    params = request("a", max_tokens=9).sampling
    expected, _ = oracle_tokens([5, 6, 7], params, seed=0, eos_token_ids=[1], max_len=64)
    served.client.send(AddRequest(request("a", max_tokens=9), output_ids=expected[:4]))
    updates = collect(served.client, {"a"})["a"]
    assert ids_of(updates) == expected[4:]
    assert updates[-1].finish_reason == "length"


def test_g8_r4_a_request_goes_on_behind_the_scores_that_another_core_gave_it(served: ServedCore) -> None:
    wanted = request("a", max_tokens=2, prompt_logprobs=1)
    served.client.send(AddRequest(wanted, output_ids=[], num_scores=1))
    updates = collect(served.client, {"a"})["a"]
    scores = [score for update in updates for score in update.prompt_logprobs]
    assert scores == oracle_scores([5, 6, 7], 1)[1:]
    assert len(ids_of(updates)) == 2


def test_a_stop_lets_the_steps_in_flight_come_back(served: ServedCore) -> None:
    served.client.send(AddRequest(request("a", max_tokens=60)))
    receive(served.client)
    served.control.send(Stop())
    served.thread.join(WAIT_S)
    assert served.error is None
    assert served.rig.core.num_inflight == 0
    assert served.rig.core.is_idle


def ends(epoch: int) -> CoreEndpoints:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    ring = RingHandle(memory_fd=fds[0], data_fd=fds[1], space_fd=fds[2], frame_bytes=64, num_frames=1)
    return CoreEndpoints(epoch=epoch, plans=[], stages=[], results=ring, restarts=Restarts(stages=[0, epoch]))


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[ServedCore]:
    made = ServedCore(**options)
    try:
        yield made
    finally:
        made.end()


def test_g4_every_client_hears_which_sessions_are_open() -> None:
    """Before whoever asked hears that it is done; and a client that comes later, when it is welcomed."""
    with serving(eviction="lru") as served:
        other, late = served.connect(), served.connect()
        for client in (served.client, other):
            client.send(Hello())
            assert receive(client) == [WELCOME]
        asked = OpenSession("s", 40, 20.0)
        served.client.send(Operate(3, asked))
        told, answer = receive(served.client, 2)
        assert told == SessionsChanged([asked], [])
        assert isinstance(answer, Operated)
        assert receive(other) == [told]
        late.send(Hello())
        assert receive(late, 2) == [WELCOME, told]
        other.send(AddRequest(request("a", max_tokens=3, session_id="s")))
        assert len(ids_of(collect(other, {"a"})["a"])) == 3
        other.send(AddRequest(request("b", max_tokens=3, session_id="t")))
        (refusal,) = collect(other, {"b"})["b"]
        assert refusal.error is not None
        assert (refusal.error.kind, refusal.error.param) == ("NotFoundError", "session_id")
        late.send(Operate(4, CloseSession("s")))
        assert receive(late)[0] == receive(other)[0] == SessionsChanged([], ["s"])
        other.close()
        late.close()


def test_clients_hear_where_the_stages_are_and_get_traces_on_one_clock() -> None:
    hosts = PipeHosts(
        stages=["tower", "desk"], clocks=[HostClock(host="desk", offset_ns=-4_000, error_ns=20)]
    )
    spans = [
        StageSpans(stage=stage, began_ns=5_000, phases=b"", durations_ns=[], steps=[]) for stage in (0, 1)
    ]
    with serving() as served:
        served.rig.executor.told_spans = spans
        other = served.connect()
        served.client.send(Hello())
        assert receive(served.client) == [WELCOME]
        served.client.send(GetTrace())
        assert receive(served.client) == [Trace(spans)]
        served.client.send(GetTrace(seen=[spans[0].key]))
        assert receive(served.client) == [Trace(spans[1:])]
        served.control.send(hosts)
        assert receive(served.client) == [hosts]
        other.send(Hello())
        assert receive(other, 2) == [WELCOME, hosts]
        served.client.send(GetTrace())
        (trace,) = receive(served.client)
        assert isinstance(trace, Trace)
        assert [report.start_ns for report in trace.spans] == [5_000, 1_000]
        other.close()


def test_r15_a_slow_link_is_told_to_the_supervisor_and_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    link = HostLink(
        hosts=("desk", "tower"),
        interfaces=("eth0", "eth0"),
        round_trip_s=0.001,
        bytes_per_s_out=1e8,
        bytes_per_s_in=1e8,
    )
    slow = LinkJudged(
        sender="tower", receiver="desk", is_slow=True, bytes_per_s=1e7, measured_bytes_per_s=1e8
    )
    verdicts = [[slow]]
    monkeypatch.setattr(LinkWatch, "follow", lambda *_: verdicts.pop() if verdicts else [])
    monkeypatch.setattr(
        LinkWatch, "slow", property(lambda _: {} if verdicts else {("tower", "desk"): slow.bytes_per_s})
    )
    with serving() as served:
        served.client.send(Hello())
        served.control.send(PipeHosts(stages=["tower", "desk"], links=[link]))
        receive(served.client, 2)
        served.rig.clock.advance(1.0)
        served.client.send(GetTrace())  # wakes the core
        assert served.reported.get(timeout=WAIT_S) == slow
        shown = [hosts for hosts in receive(served.client, 2) if isinstance(hosts, PipeHosts)]
        assert [hosts.links for hosts in shown] == [
            [msgspec.structs.replace(link, reduced_bytes_per_s_in=1e7)]
        ]


def test_g4_every_client_hears_that_a_session_was_idle_for_too_long() -> None:
    with serving(eviction="lru") as served:
        served.client.send(Hello())
        served.client.send(Operate(3, OpenSession("s", idle_s=20.0)))
        receive(served.client, 3)
        served.rig.clock.advance(20.0)
        served.client.send(AddRequest(request("a", max_tokens=1)))  # wakes the core
        assert SessionsChanged([], ["s"]) in receive(served.client, 2)


@pytest.mark.parametrize("lose_at", range(1, 10, 2))
def test_r4_clients_notice_nothing_of_another_epoch_but_a_pause(lose_at: int) -> None:
    with serving(lose_at=lose_at) as served:
        served.client.send(AddRequest(request("a", max_tokens=10)))
        assert isinstance(served.reported.get(timeout=WAIT_S), Abandoned)
        served.control.send(EpochLost(CAUSE))
        served.control.send(ends(1))
        assert served.reported.get(timeout=WAIT_S) == Ready(epoch=1, numeric_classes=[""])
        params = request("a", max_tokens=10).sampling
        expected, _ = oracle_tokens([5, 6, 7], params, seed=0, eos_token_ids=[1], max_len=64)
        assert ids_of(collect(served.client, {"a"})["a"]) == expected
        assert served.joined == [AllocateKV(num_blocks=64, epoch=1, first_step=lose_at + 1)]


def test_r5_clients_hear_of_a_loss_and_of_its_end() -> None:
    with serving() as served:
        served.client.send(Hello())
        receive(served.client)
        told = all_stats(served.client)
        served.control.send(EpochLost(CAUSE))
        next(stats for stats in told if stats.loss == CAUSE)
        served.control.send(ends(1))
        stats = next(stats for stats in told if stats.loss is None)
        assert (stats.epoch, stats.restarts) == (1, Restarts(stages=[0, 1]))


def all_stats(client: ClientSocket) -> Iterator[CoreStats]:
    """As they come; several may come at once, and with this clock none is said again."""
    while True:
        assert client.wait(WAIT_S), "the core has said nothing"
        for message in client.drain():
            if isinstance(message, StepUpdates):
                yield message.stats


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


def test_g1_an_exchange_of_a_link_goes_to_the_ranks_of_the_epoch(served: ServedCore) -> None:
    order = LinkOrder(number=7, first_step=40, stage=0, sender=0, receiver=0)
    served.control.send(ExchangeLink(order))
    assert served.rig.executor.link_orders.get(timeout=WAIT_S) == order
    served.client.send(AddRequest(request("a", max_tokens=3)))
    assert len(ids_of(collect(served.client, {"a"})["a"])) == 3
    assert served.rig.executor.link_orders.empty()
    assert served.rig.core.epoch == 0

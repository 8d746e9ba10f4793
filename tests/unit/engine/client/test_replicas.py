"""Several engines as one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from core_numbers import core_stats
from penstock.batch import StageSpans, StageTimes
from penstock.engine.client.core_health import EngineStatus
from penstock.engine.client.replicas import Replicas, merged_stats
from penstock.engine.stats import StageMemory
from penstock.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    WaitTimeoutError,
)
from penstock.operations import CloseSession, OpenSession, Operation, OperationDone, Pause
from penstock.process.config import HostLink
from penstock.process.endpoints import Restarts
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, HostClock, PipeHosts
from penstock.request import PoolingParams, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
STATS = core_stats(
    num_running=2,
    num_waiting=1,
    num_blocks=100,
    free_blocks=40,
    num_preemptions=3,
    step_id=10,
    inflight=2,
    last_result_age_s=0.5,
    stalled_s=0.1,
    stall_limit_s=60.0,
    epoch=1,
    restarts=Restarts(stages=[1, 0], core=1),
    generated_tokens=500,
    prompt_tokens=70,
    micro_batches=2,
    fill_plans=3,
    wire_s=0.25,
    stage_times=[StageTimes(stage=1, num_steps=1, wall_ns=1, busy_ns=1, phase_ns=[], busy_ratio=0.5)],
    stage_memory=[StageMemory(stage=1, kv_bytes=8, stranded_bytes=3)],
)


class OneEngine:
    """Stands for an `AsyncEngine`."""

    def __init__(self, ready: bool = True, refusal: Exception | None = None, ahead: int = 0) -> None:
        self.tokens_ahead, self.max_model_len = ahead, 100 + ahead
        self.is_ready, self.refusal = ready, refusal
        self.asked: list[str] = []
        self.is_closed = self.is_full = False
        self.held_back = ""
        self.hosts = NO_PIPE_HOSTS
        self.sessions: set[str] | None = set()
        self.sessions_asked: set[str] = set()
        self.named: list[str] = []  # sessions that its requests name
        self.seen: list[StageSpans] | None = None

    async def start(self, timeout_s: float | None = None) -> None:
        if self.refusal is not None:
            raise self.refusal

    def status(self) -> EngineStatus:
        reason = "" if self.is_ready else "stage 1 is lost"
        stage = None if self.is_ready else 1
        stats = core_stats(STATS, held_back=self.held_back) if self.is_ready else None
        return EngineStatus(
            ready=self.is_ready,
            stage=stage,
            reason=reason,
            since=5.0,
            stats=stats,
            is_full=self.is_full,
            hosts=self.hosts,
        )

    def statuses(self) -> list[EngineStatus]:
        return [self.status()]

    def add_all(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> list[Any]:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(request_id)
        self.named.append(sampling.session_id)
        return [self] * sampling.n

    def embed(self, request_id: str, prompt: list[int], params: PoolingParams) -> Any:
        (stream,) = self.add_all(f"vector {request_id}", prompt, GREEDY)
        return stream

    async def trace(self) -> list[StageSpans]:
        if self.refusal is not None:
            raise self.refusal
        return [StageSpans(stage=1, began_ns=1, phases=b"", durations_ns=[], steps=[])]

    async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
        self.seen = list(seen)
        return await self.trace()

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(type(operation).__name__)
        return [OperationDone(accepted_step=self.tokens_ahead, completed_step=9)]

    def close(self) -> None:
        self.is_closed = True


def replicas(*engines: OneEngine) -> Replicas:
    return Replicas(engines)  # type: ignore[arg-type]


def test_i4_a_request_goes_to_one_replica_by_its_work() -> None:
    busy, idle = OneEngine(ahead=40), OneEngine()
    both = replicas(busy, idle)
    assert both.add("a", [1, 2], GREEDY) is idle
    assert (busy.asked, idle.asked) == ([], ["a"])
    assert both.max_model_len == 100


def test_i4_all_sequences_of_a_prompt_go_to_one_replica() -> None:
    idle, other = OneEngine(), OneEngine(ahead=1)
    assert replicas(other, idle).add_all("a", [1, 2], SamplingParams(n=3)) == [idle] * 3
    assert (idle.asked, other.asked) == (["a"], [])


def test_i4_a_vector_is_made_by_one_replica_and_by_the_next_where_one_refuses() -> None:
    busy, idle, full = OneEngine(ahead=40), OneEngine(ahead=9), OneEngine(refusal=OverloadedError("full"))
    three = replicas(busy, idle, full)
    assert three.embed("a", [1, 2], PoolingParams()) is idle
    assert (busy.asked, idle.asked) == ([], ["vector a"])


@pytest.mark.parametrize("refusal", [OverloadedError("full"), UnavailableError("away")])
def test_a_replica_that_refuses_is_passed_over(refusal: Exception) -> None:
    full, other = OneEngine(refusal=refusal), OneEngine(ahead=40)
    assert replicas(full, other).add("a", [1], GREEDY) is other
    with pytest.raises(type(refusal)):
        replicas(full, OneEngine(refusal=UnavailableError("later"), ahead=9)).add("a", [1], GREEDY)


def test_a_full_queue_is_passed_over_and_the_engine_is_full_when_all_that_are_there_are() -> None:
    """A core refuses by an update, which is final: whoever asks must not come to a full one."""
    full, other, away = OneEngine(), OneEngine(ahead=40), OneEngine(ready=False)
    full.is_full = True
    three = replicas(full, other, away)
    assert three.add("a", [1], GREEDY) is other
    assert not three.status().is_full
    other.is_full = True
    assert three.status().is_full
    full.is_ready = other.is_ready = False
    assert not three.status().is_full, "it is not ready"


def test_a_replica_whose_host_is_short_of_memory_is_passed_over() -> None:
    """Its requests would wait until memory is free there, or their time is over."""
    short, other = OneEngine(), OneEngine(ahead=40)
    short.held_back, short.sessions = "the host of stage 1 has 9 MiB of free memory", {"s"}
    both = replicas(short, other)
    assert both.add("a", [1], GREEDY) is other
    assert both.add("b", [1], SamplingParams(session_id="s")) is other
    other.held_back = "the host has 9 MiB of free memory"
    assert both.add("c", [1], GREEDY) is short, "it has the least work of those that are alike"


def test_a_bad_request_is_bad_for_all() -> None:
    other = OneEngine(ahead=9)
    with pytest.raises(InvalidRequestError):
        replicas(OneEngine(refusal=InvalidRequestError("no", param="prompt")), other).add("a", [], GREEDY)
    assert not other.asked


def test_each_replica_is_told_what_was_seen_of_it() -> None:
    first, away, third = OneEngine(), OneEngine(refusal=UnavailableError("away")), OneEngine()
    known = [StageSpans(stage=1, began_ns=1, phases=b"", durations_ns=[], steps=[], replica=2)]
    found = asyncio.run(replicas(first, away, third).news(known))
    assert [report.replica for report in found] == [0, 2]
    assert (first.seen, third.seen) == ([], known)


def test_r5_ready_while_one_is() -> None:
    status = replicas(OneEngine(ready=False), OneEngine()).status()
    assert (status.ready, status.reason, status.stage) == (True, "replica 0: stage 1 is lost", None)
    status = replicas(OneEngine(ready=False), OneEngine(ready=False)).status()
    assert (status.ready, status.stage, status.stats) == (False, 1, None)
    assert status.reason == "replica 0: stage 1 is lost; replica 1: stage 1 is lost"


def test_reasons_of_several_replicas_are_one_sentence() -> None:
    """Issue 25, point 18."""
    away = OneEngine(ready=False)
    whole = msgspec.structs.replace(away.status(), reason="stage 1 was lost.")
    away.statuses = lambda: [whole]  # type: ignore[method-assign]
    assert replicas(away, away).status().reason == "replica 0: stage 1 was lost; replica 1: stage 1 was lost"


def test_r5_one_pipeline_is_enough_to_start_and_none_is_told() -> None:
    away = OneEngine(refusal=UnavailableError("away"))
    asyncio.run(replicas(away, OneEngine()).start())
    with pytest.raises(UnavailableError):
        asyncio.run(replicas(away, away).start())


def test_traces_of_all_that_are_there() -> None:
    both = replicas(OneEngine(refusal=UnavailableError("away")), OneEngine())
    assert [(spans.replica, spans.stage) for spans in asyncio.run(both.trace())] == [(1, 1)]
    with pytest.raises(UnavailableError):
        asyncio.run(replicas(OneEngine(refusal=UnavailableError("away"))).trace())


def test_numbers_of_all_together() -> None:
    both = merged_stats([STATS, None, core_stats(STATS, num_running=5, epoch=4)])
    assert both is not None
    assert (
        both.scheduler.num_running,
        both.cache.free_blocks,
        both.scheduler.generated_tokens,
        both.epoch,
    ) == (7, 80, 1000, 4)
    assert both.restarts == Restarts(stages=[2, 0], core=2)
    assert [(times.replica, times.stage) for times in both.stage_times] == [(0, 1), (2, 1)]
    assert [(stage.replica, stage.stage, stage.stranded_bytes) for stage in both.stage_memory] == [
        (0, 1, 3),
        (2, 1, 3),
    ]
    assert merged_stats([None, None]) is None


def test_no_number_of_a_replica_is_left_out() -> None:
    quiet = core_stats()
    alone = core_stats(
        STATS,
        paused=True,
        stored_blocks=4,
        sessions_num_open=1,
        plan_interval_ms=7,
        open_operations=1,
        loss=UnavailableError("away").info(),
        is_loss_lasting=True,
        numeric_classes=["avx512", "avx2"],
    )
    same = [name for name in alone.__struct_fields__ if getattr(alone, name) == getattr(quiet, name)]
    assert not same, "these numbers would not be missed"
    assert merged_stats([alone]) == alone


def test_g4_every_replica_does_what_is_asked() -> None:
    async def run() -> None:
        engines = [OneEngine(ahead=3), OneEngine(ahead=5)]
        done = await replicas(*engines).operate(Pause("keep"), 1.0)
        assert [(found.replica, found.accepted_step) for found in done] == [(0, 3), (1, 5)]
        late = [OneEngine(refusal=WaitTimeoutError("not yet")), OneEngine()]
        with pytest.raises(WaitTimeoutError):
            await replicas(*late).operate(Pause("keep"), 1.0)
        assert late[1].asked == ["Pause"], "one that is late keeps no other from it"

    asyncio.run(run())
    paused = core_stats(STATS, paused=True)
    both, neither = merged_stats([STATS, paused]), merged_stats([STATS, STATS])
    assert both is not None
    assert neither is not None
    assert (both.scheduler.paused, neither.scheduler.paused) == (True, False)


def test_r15_a_link_that_any_replica_finds_slow_is_slow() -> None:
    """Each replica watches the links of its own stages, and is told of all."""
    near, far = (
        HostLink(
            hosts=hosts, interfaces=("a", "b"), round_trip_s=0.1, bytes_per_s_out=9.0, bytes_per_s_in=9.0
        )
        for hosts in (("head", "desk"), ("tower", "shelf"))
    )
    slow = msgspec.structs.replace(far, reduced_bytes_per_s_in=2.0)
    clocks = [
        HostClock(host=host, offset_ns=offset_ns, error_ns=1) for host, offset_ns in (("a", 3), ("b", 4))
    ]
    later = msgspec.structs.replace(clocks[0], offset_ns=5)
    new, first, second = OneEngine(), OneEngine(), OneEngine()
    first.hosts = PipeHosts(stages=["head", "desk"], links=[near, far], clocks=clocks[:1])
    second.hosts = PipeHosts(stages=["tower", "shelf"], links=[near, slow], clocks=[later, clocks[1]])
    hosts = replicas(new, first, second).status().hosts
    assert (hosts.stages, hosts.links) == (["head", "desk"], [near, slow])
    assert sorted(clock.offset_ns for clock in hosts.clocks) == [3, 4]


def test_all_are_left() -> None:
    engines = [OneEngine(), OneEngine()]
    replicas(*engines).close()
    assert all(engine.is_closed for engine in engines)


def test_g4_a_session_is_opened_in_one_replica_and_closed_there() -> None:
    async def run() -> None:
        away, one, other = OneEngine(ready=False), OneEngine(ahead=3), OneEngine(ahead=5)
        one.sessions = {"x", "y"}
        other.sessions = {"z"}
        three = replicas(away, one, other)
        (done,) = await three.operate(OpenSession("new"), 1.0)
        assert (done.replica, done.accepted_step) == (2, 5), "it has fewest of those that are there"
        (done,) = await three.operate(OpenSession("x"), 1.0)
        assert done.replica == 1, "it has it"
        (done,) = await three.operate(CloseSession("z"), 1.0)
        assert done.replica == 2
        with pytest.raises(NotFoundError):
            await three.operate(CloseSession("new"), 1.0)
        assert (away.asked, one.asked) == ([], ["OpenSession"])
        assert other.asked == ["OpenSession", "CloseSession"]

    asyncio.run(run())


def test_g4_a_session_that_was_asked_of_a_replica_that_went_away_is_opened_nowhere_else() -> None:
    async def run() -> None:
        here, away = OneEngine(ahead=3), OneEngine(ready=False, ahead=5)
        here.sessions = {"x", "y"}
        away.sessions_asked = {"s"}
        both = replicas(here, away)
        for operation in (OpenSession("s"), CloseSession("s")):
            (done,) = await both.operate(operation, 1.0)
            assert done.replica == 1
        away.sessions = None
        (done,) = await both.operate(OpenSession("s"), 1.0)
        assert done.replica == 1
        (done,) = await both.operate(OpenSession("t", is_new=True), 1.0)
        assert (done.replica, here.asked) == (0, ["OpenSession"])

    asyncio.run(run())


def test_g4_requests_of_a_session_go_to_the_replica_that_has_it_whatever_it_has_to_do() -> None:
    home, idle = OneEngine(ahead=4000), OneEngine()
    home.sessions = {"s"}
    both = replicas(home, idle)
    turn = SamplingParams(session_id="s")
    assert both.add("a", [1, 2], turn) is home
    assert both.add("b", [1, 2], GREEDY) is idle
    with pytest.raises(NotFoundError) as raised:
        both.add("c", [1, 2], SamplingParams(session_id="t"))
    assert raised.value.param == "session_id"
    assert (home.named, idle.named) == (["s"], [""])


@pytest.mark.parametrize("why", ["full", "away", "refusing"])
def test_g4_another_replica_takes_them_as_any_others_where_that_one_cannot(why: str) -> None:
    home, idle = OneEngine(refusal=OverloadedError("full") if why == "refusing" else None), OneEngine(ahead=9)
    home.is_ready, home.is_full = why != "away", why == "full"
    home.sessions = {"s"}
    assert replicas(home, idle).add("a", [1, 2], SamplingParams(session_id="s")) is idle
    assert (home.named, idle.named) == ([], [""])


def test_g4_a_replica_that_has_not_come_yet_may_have_the_session() -> None:
    here, late = OneEngine(), OneEngine(ready=False)
    late.sessions = None
    both = replicas(here, late)
    with pytest.raises(UnavailableError, match="replica 1"):
        both.add("a", [1, 2], SamplingParams(session_id="s"))
    with pytest.raises(UnavailableError):
        asyncio.run(both.operate(CloseSession("s"), 1.0))
    (done,) = asyncio.run(both.operate(OpenSession("made-up", is_new=True), 1.0))
    assert done.replica == 0, "nobody can have it"
    assert both.add("b", [1, 2], GREEDY) is here


def test_g4_a_session_is_not_opened_twice_when_a_front_was_started_again() -> None:
    """Issue 25, point 18. The new front has heard from one replica, and the session is open in the other
    one."""
    heard, silent = OneEngine(), OneEngine()
    silent.sessions = None
    both = replicas(heard, silent)
    with pytest.raises(UnavailableError, match="replica 1 has not reported yet"):
        asyncio.run(both.operate(OpenSession("s"), 1.0))
    assert (heard.asked, silent.asked) == ([], [])
    silent.sessions = {"s"}
    (done,) = asyncio.run(both.operate(OpenSession("s"), 1.0))
    assert (done.replica, heard.asked) == (1, [])

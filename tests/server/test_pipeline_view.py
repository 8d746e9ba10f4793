"""`/debug/pipeline`, its feed, and `/server_info`: what a page or an operator sees of the pipeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, Status, fake_model, stats
from fakes import FakeClock
from live_server import LiveServer
from penstock.batch import StageSpans, StageTimes
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.engine.stats import StageMemory
from penstock.process.config import HostLink, StageShape
from penstock.process.endpoints import Restarts
from penstock.process.pipe_hosts import HostClock, PipeHosts
from penstock.scheduler.stats import SchedulerStats, SpeculationStats
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.http.metrics import Metrics
from penstock.server.routes.pipeline_view import FEED_VERSION, FRAME_S, PipelineRoute
from penstock.trace.phases import Phase

SHAPES = [
    StageShape(start_layer=0, end_layer=5),
    StageShape(start_layer=5, end_layer=8, num_ranks=2, host="desk"),
]
LINK = HostLink(
    hosts=("desk", "tower"),
    interfaces=("eth0", "enp3"),
    round_trip_s=0.002,
    bytes_per_s_out=1e6,
    bytes_per_s_in=4e6,
)
SPENT_NS = {Phase.WAIT_PREV: 500_000_000, Phase.FORWARD: 900_000_000, Phase.SAMPLE: 100_000_000}
TIMES = StageTimes(
    stage=1,
    num_steps=7,
    wall_ns=4_000_000_000,
    busy_ns=1_000_000_000,
    phase_ns=[SPENT_NS.get(phase, 0) for phase in Phase],
    busy_ratio=0.25,
)
MEMORY = StageMemory(stage=1, kv_bytes=48, stranded_bytes=16, weight_bytes=320)


class TwoReplicas(FakeEngine):
    """The first is there; the core of the other has not been heard."""

    def statuses(self) -> list[Status]:
        return [self.state, Status(ready=False, reason="the engine is loading")]


def told() -> Status:
    return Status(
        stats=stats(
            num_running=3,
            num_waiting=2,
            inflight=4,
            step_id=99,
            epoch=6,
            free_blocks=60,
            cached_blocks=11,
            host_bytes_used=5,
            store_bytes_read=8,
            stage_times=[TIMES],
            stage_memory=[MEMORY],
            restarts=Restarts(stages=[0, 2], core=1),
        )
    )


def model() -> Any:
    return fake_model(stages=SHAPES, num_stages=2, host_links=[LINK], token_bytes=384)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(TwoReplicas(state=told()), model=model()) as made:
        yield made


def snapshot(live: LiveServer) -> Any:
    response, raw = live.request("GET", "/debug/pipeline")
    assert response.status == 200
    return json.loads(raw)


def test_the_pipeline_as_it_is_now(server: LiveServer) -> None:
    view = snapshot(server)
    assert (view["model"], view["draining"]) == ("fake", False)
    first, second = view["replicas"]
    counts = {name: first[name] for name in ("running", "waiting", "inflight", "step", "epoch", "ready")}
    assert counts == {"running": 3, "waiting": 2, "inflight": 4, "step": 99, "epoch": 6, "ready": True}
    assert (first["core_restarts"], first["paused"]) == (1, 0)
    assert first["kv"]["l1"]["used_blocks"] == 40
    assert first["kv"]["l1"]["cached_blocks"] == 11
    assert first["kv"]["l2"]["bytes_used"] == 5
    assert first["kv"]["l3"]["bytes_read"] == 8
    silent, busy = first["stages"]
    assert (silent["layers"], silent["num_ranks"], silent["num_steps"]) == ([0, 5], 1, 0)
    assert (busy["layers"], busy["num_ranks"], busy["restarts"]) == ([5, 8], 2, 2)
    assert (busy["busy_ratio"], busy["wall_s"], busy["busy_s"]) == (0.25, 4.0, 1.0)
    assert (busy["forward_s"], busy["sample_s"]) == (0.9, 0.1)
    assert (busy["weight_bytes"], busy["kv_bytes"], busy["stranded_bytes"]) == (320, 48, 16)
    assert silent["kv_bytes"] is None
    assert busy["bubble_s"]["wait_prev"] == 0.5
    assert sum(busy["bubble_s"].values()) == 0.5
    assert (second["ready"], second["reason"], second["kv"]) == (False, "the engine is loading", None)
    assert [stage["layers"] for stage in second["stages"]] == [[0, 5], [5, 8]]


def route(engine: FakeEngine, lifecycle: Lifecycle, clock: FakeClock, sleep: Any) -> PipelineRoute:
    metrics = Metrics(model(), engine)
    return PipelineRoute(
        model(), engine, lifecycle, metrics, max_streams=2, clock=clock, wall_clock=clock, sleep=sleep
    )


def test_frames_come_when_something_changes_and_once_a_second() -> None:
    engine, lifecycle, clock = FakeEngine(state=told()), Lifecycle(), FakeClock()
    frames: list[tuple[float, int]] = []
    begin = clock.now

    async def sleep(seconds: float) -> None:
        assert seconds == FRAME_S
        clock.advance(seconds)
        ticks = round((clock.now - begin) / FRAME_S)
        if ticks in (3, 4):
            engine.state = Status(stats=stats(step_id=100 + ticks))
        if ticks == 30:
            lifecycle.begin_drain()

    async def send(frame: bytes) -> None:
        assert frame.startswith(b"data: ")
        assert frame.endswith(b"\n\n")
        step = json.loads(frame[6:])["replicas"][0]["step"]
        frames.append((round(clock.now - begin, 1), step))

    asyncio.run(route(engine, lifecycle, clock, sleep).feed(send))
    assert frames == [(0.0, 99), (0.3, 103), (0.4, 104), (1.4, 104), (2.4, 104)]


def test_the_feed_has_a_version_latencies_hosts_and_drafts() -> None:
    drafting = SchedulerStats(speculation=SpeculationStats("suffix", 9, 6, 2), recovered_requests=4)
    status = Status(
        ready=False,
        stage=1,
        reason="stage 1 is lost",
        stats=msgspec.structs.replace(stats(), scheduler=drafting),
        hosts=PipeHosts(stages=["tower", "shelf"], links=[LINK]),
    )
    engine = FakeEngine(state=status)
    shown = route(engine, Lifecycle(), FakeClock(), None)
    shown._metrics.inter_token.observe(0.25)
    shown._metrics.inter_token.observe(0.5)
    view = json.loads(msgspec.json.encode(shown.view()))
    assert view["feed_version"] == FEED_VERSION
    assert view["token_bytes"] == 384
    assert view["latency"] == {
        "first_tokens": 0,
        "first_token_s": 0.0,
        "next_tokens": 2,
        "next_token_s": 0.75,
    }
    (replica,) = view["replicas"]
    assert (replica["failed_stage"], replica["recovered_requests"]) == (1, 4)
    assert replica["drafts"] == {"drafter": "suffix", "drafted": 9, "accepted": 6, "cancelled": 2}
    assert [stage["host"] for stage in replica["stages"]] == ["tower", "shelf"]
    assert replica["links"] == [json.loads(msgspec.json.encode(LINK))]


def test_lanes_come_with_the_frames_of_those_who_ask_and_are_fetched_for_nobody_else() -> None:
    spans = StageSpans(stage=0, began_ns=1, phases=b"\x06", durations_ns=[5], steps=[(0, 3, 1)])
    engine, lifecycle, clock = FakeEngine(state=told(), spans=[spans]), Lifecycle(), FakeClock()
    frames: list[bytes] = []

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        if clock.now - begin > 2.05:
            lifecycle.begin_drain()

    async def send(frame: bytes) -> None:
        frames.append(frame)

    begin = clock.now
    asyncio.run(route(engine, lifecycle, clock, sleep).feed(send))
    assert engine.num_looks == 0
    assert not any(b"event: lanes" in frame for frame in frames)
    begin, lifecycle = clock.now, Lifecycle()
    frames.clear()
    asyncio.run(route(engine, lifecycle, clock, sleep).feed(send, with_lanes=True))
    assert [b"event: lanes" in frame for frame in frames] == [True, False, False]
    assert frames[0].startswith(b"data: ")
    assert 4 <= engine.num_looks <= 8, "a few times a second, whatever the frames are"


def test_who_reads_slowly_gets_the_newest_and_nothing_is_kept_for_him() -> None:
    engine, lifecycle, clock = FakeEngine(state=told()), Lifecycle(), FakeClock()
    seen: list[int] = []

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        engine.state = Status(stats=stats(step_id=engine.state.stats.step_id + 1))  # type: ignore[union-attr]

    async def send(frame: bytes) -> None:
        seen.append(json.loads(frame[6:])["replicas"][0]["step"])
        for _ in range(50):  # the socket takes nothing for five seconds
            await sleep(FRAME_S)
        if len(seen) == 4:
            lifecycle.begin_drain()

    asyncio.run(route(engine, lifecycle, clock, sleep).feed(send))
    assert seen == [99, 150, 201, 252]


def read_frame(connection: Any, buffer: bytearray) -> Any:
    while b"\n\n" not in buffer or b"data: " not in buffer:
        received = connection.recv(65536)
        assert received, "the feed has ended"
        buffer += received
    start = buffer.index(b"data: ") + 6
    end = buffer.index(b"\n\n", start)
    frame = json.loads(bytes(buffer[start:end]))
    del buffer[: end + 2]
    return frame


def open_feed(live: LiveServer) -> tuple[Any, bytearray]:
    connection = live.connect()
    connection.sendall(b"GET /debug/pipeline/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection, bytearray()


def test_the_feed_ends_with_its_reader_and_as_many_may_read_as_the_limit_says() -> None:
    engine = FakeEngine(state=told())
    config = ServerConfig(drain_s=5.0, limits=Limits(max_event_streams=2))
    with LiveServer(engine, config=config, model=model()) as live:
        feeds = [open_feed(live) for _ in range(2)]
        for connection, buffer in feeds:
            assert read_frame(connection, buffer)["replicas"][0]["step"] == 99
        live.call(lambda: setattr(engine, "state", Status(stats=stats(step_id=100))))
        for connection, buffer in feeds:
            assert read_frame(connection, buffer)["replicas"][0]["step"] == 100
        response, raw = live.request("GET", "/debug/pipeline/events")
        assert response.status == 429
        assert json.loads(raw)["error"]["code"] == "too_many_streams"
        feeds[0][0].close()
        live.wait_for(lambda: len(live.server.server_state.tasks) == 1)
        connection, buffer = open_feed(live)
        assert read_frame(connection, buffer)["replicas"][0]["step"] == 100
        for kept, _ in (feeds[1], (connection, buffer)):
            kept.close()


def test_no_drain_waits_for_the_feed() -> None:
    with LiveServer(FakeEngine(state=told()), model=model()) as live:
        connection, buffer = open_feed(live)
        read_frame(connection, buffer)
        assert live.app.context.lifecycle.num_running == 0
        live.stop()
        while connection.recv(65536):
            pass
        live.join()
        connection.close()
    assert "ended_early=0" in live.log.getvalue()


def test_other_methods_are_refused(live: LiveServer) -> None:
    for path in ("/debug/pipeline", "/debug/pipeline/events", "/server_info"):
        for method in ("POST", "HEAD", "DELETE"):
            response, raw = live.request(method, path)
            assert response.status == 405
            assert method == "HEAD" or json.loads(raw)["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(("last", "is_mixed"), [("avx512 1f", False), ("avx2 99", True)])
def test_g1_server_info_says_in_which_class_each_rank_computes(last: str, is_mixed: bool) -> None:
    classes = ["avx512 1f", "avx512 1f", last]
    state = Status(stats=stats(numeric_classes=classes))
    with LiveServer(TwoReplicas(state=state), model=model()) as live:
        info = json.loads(live.request("GET", "/server_info")[1])
    assert info["are_classes_mixed"] == is_mixed
    names = ["stage 0", "stage 1 tp 0", "stage 1 tp 1"]
    assert info["numeric_classes"] == [dict(zip(names, classes, strict=True)), {}]


def test_server_info_says_who_guesses_and_whether_that_changes_tokens() -> None:
    drafting = SchedulerStats(speculation=SpeculationStats("suffix", is_exact=False))
    state = Status(stats=msgspec.structs.replace(stats(), scheduler=drafting))
    with LiveServer(TwoReplicas(state=state), model=model()) as live:
        info = json.loads(live.request("GET", "/server_info")[1])
    assert info["speculation"] == {"drafter": "suffix", "is_exact": False}


def test_r15_server_info_follows_a_pipe_that_is_laid_over_other_hosts() -> None:
    link = msgspec.structs.replace(LINK, hosts=("shelf", "tower"))
    clock = HostClock(host="shelf", offset_ns=-5, error_ns=70)
    hosts = PipeHosts(stages=["tower", "shelf"], links=[link], clocks=[clock])
    with LiveServer(TwoReplicas(state=Status(stats=stats(), hosts=hosts)), model=model()) as live:
        info = json.loads(live.request("GET", "/server_info")[1])
        metrics = live.request("GET", "/metrics")[1]
    assert [stage["host"] for stage in info["stages"]] == ["tower", "shelf"]
    assert [stage["end_layer"] for stage in info["stages"]] == [5, 8]
    assert info["links"] == [json.loads(msgspec.json.encode(link))]
    assert info["clocks"] == [{"host": "shelf", "offset_ns": -5, "error_ns": 70}]
    assert b'penstock_host_clock_error_seconds{host="shelf",model_name="fake"} 7e-08' in metrics


def test_r15_server_info_has_the_first_replicas_stages_and_what_any_replica_found_of_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Status(stats=stats(), hosts=PipeHosts(stages=["tower", "shelf"], links=[LINK]))
    slow = msgspec.structs.replace(LINK, reduced_bytes_per_s_in=7.0)
    both = Status(stats=stats(), hosts=PipeHosts(stages=["tower", "shelf"], links=[slow]))
    with LiveServer(FakeEngine(state=both), model=model()) as live:
        monkeypatch.setattr(live.engine, "statuses", lambda: [own, Status(stats=stats())])
        info = json.loads(live.request("GET", "/server_info")[1])
    assert [stage["host"] for stage in info["stages"]] == ["tower", "shelf"]
    assert [link["reduced_bytes_per_s_in"] for link in info["links"]] == [7.0]


def test_rule_4_server_info_shows_settings_and_no_secret() -> None:
    config = ServerConfig(
        api_keys=["key-1"], admin_keys=["admin-1"], settings={"port": 8000, "api-key": "set"}
    )
    as_client = {"Authorization": "Bearer key-1"}
    with LiveServer(TwoReplicas(max_model_len=100), config=config, model=model()) as live:
        assert live.request("GET", "/server_info")[0].status == 401
        response, raw = live.request("GET", "/server_info", None, as_client)
        assert response.status == 200
        info = json.loads(raw)
        assert (info["model"], info["max_model_len"], info["num_replicas"]) == ("fake", 100, 2)
        assert info["settings"] == {"port": 8000, "api-key": "set"}
        assert [stage["num_ranks"] for stage in info["stages"]] == [1, 2]
        assert [stage["host"] for stage in info["stages"]] == ["this host", "desk"]
        assert info["links"] == [json.loads(msgspec.json.encode(LINK))]
        for path in ("/server_info", "/debug/pipeline"):
            shown = live.request("GET", path, None, as_client)[1]
            assert b"key-1" not in shown
            assert b"admin-1" not in shown

"""Clients that leave, health, metrics, and the drain at the end."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from fake_engine import FakeEngine, Status, stats
from fakes import FakeClock
from live_server import LiveServer, events, post_bytes
from penstock.batch import StageSpans, StageTimes
from penstock.config.server import ServerConfig
from penstock.engine.stats import CoreStats, StageMemory
from penstock.errors import ModelChangedError, UnavailableError
from penstock.scheduler.stats import SpeculationStats
from penstock.server import api_process
from penstock.server.http.lifecycle import Interruptible
from penstock.server.routes import health
from penstock.trace.phases import Phase
from slow_clients import (
    SIX_MB,
    noted_at_shutdown,
    slow_client,
    stop_and_let_drain,
    take_all,
    wait_until_written,
)

TEXT = "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_after", [0, 2])
def test_client_that_leaves_cancels_its_sequences_at_once(stream: bool, hold_after: int) -> None:
    engine = FakeEngine(hold_after=hold_after)
    with LiveServer(engine) as live:
        connection = live.connect()
        connection.sendall(post_bytes(TEXT, {"prompt": ["abc", "def"], "stream": stream}))
        live.wait_for(lambda: len(engine.alive) == 2)
        connection.close()
        live.wait_for(lambda: not engine.alive)
        assert sorted(engine.cancelled) == sorted(request_id for request_id, _, _ in engine.added)
        live.wait_for(lambda: "status=499" in live.log.getvalue())
        live.call(engine.released.set)
        assert live.post(TEXT, {"prompt": "next"})[1]["choices"][0]["text"] == "next"
        assert "ERROR" not in live.log.getvalue()
        assert 'request_success_total{finished_reason="abort",model_name="fake"} 1.0' in _metrics(live)


def test_client_that_leaves_in_the_middle_of_its_body_starts_nothing() -> None:
    with LiveServer() as live:
        with live.connect() as connection:
            connection.sendall(post_bytes(TEXT, {"prompt": "abc"})[:-3])
            live.wait_for(lambda: len(live.server.server_state.tasks) == 1)
        live.wait_for(lambda: "client closed" in live.log.getvalue() or "status=499" in live.log.getvalue())
        assert live.engine.added == []


def test_finished_sequences_are_not_cancelled(live: LiveServer) -> None:
    for stream in (True, False):
        live.request("POST", TEXT, {"prompt": "abc", "stream": stream})
    assert live.engine.cancelled == []
    assert live.engine.alive == set()


def test_overload_of_a_later_prompt_cancels_the_earlier_ones() -> None:
    with LiveServer(FakeEngine(max_alive=2, hold_after=0)) as live:
        status, _ = live.post(TEXT, {"prompt": ["a", "b", "c"]})
        assert status == 429
        assert live.engine.alive == set()
        assert len(live.engine.cancelled) == 2


def test_a_reason_that_is_a_sentence_is_told_with_one_full_stop() -> None:
    """Issue 25, point 18."""
    engine = FakeEngine(state=Status(ready=False, stage=1, reason="stage 1 was lost: its process ended."))
    with LiveServer(engine) as live:
        error = live.post(TEXT, {"prompt": "a"})[1]["error"]
    assert error["message"] == "The model is not ready: stage 1 was lost: its process ended."


def test_health_tells_state_stage_reason_and_since() -> None:
    engine = FakeEngine(state=Status(ready=False, stage=1, reason="no answer for 6 s", since=123.0))
    with LiveServer(engine) as live:
        for path in ("/health", "/health/ready"):
            response, raw = live.request("GET", path)
            assert response.status == 503
            assert response.getheader("retry-after") == "1"
            assert json.loads(raw) == {
                "state": "not_ready",
                "stage": 1,
                "reason": "no answer for 6 s",
                "since": 123.0,
            }
        assert live.request("GET", "/health/live")[0].status == 200
        status, answer = live.post(TEXT, {"prompt": "a"})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable")
        engine.state = Status(ready=False, stage=1, is_recovering=True)
        assert live.request("GET", "/health")[0].status == 503, "other servers should be asked first"
        assert live.post(TEXT, {"prompt": "a"})[0] == 200, "who asks this one waits"
        engine.state = Status(stats=stats(num_waiting=4))
        assert live.request("GET", "/health")[0].status == 200
        assert live.request("HEAD", "/health")[0].status == 200
        engine.state = Status(stats=stats(num_waiting=5), is_full=True)
        response, raw = live.request("GET", "/health")
        assert (response.status, json.loads(raw)["state"]) == (503, "overloaded")


def test_health_has_the_code_of_the_error_that_a_stage_was_lost_with() -> None:
    loss = ModelChangedError(file="model.safetensors", tensor="model.norm.weight").info()
    state = Status(ready=False, stage=1, reason=loss.message, stats=stats(loss=loss))
    with LiveServer(FakeEngine(state=state)) as live:
        body = json.loads(live.request("GET", "/health")[1])
    assert (body["state"], body["code"]) == ("not_ready", "model_changed")
    assert body["reason"].startswith("model.safetensors: tensor model.norm.weight: ")


def test_r10_a_host_without_memory_gets_no_new_work() -> None:
    config = ServerConfig(drain_s=5.0, min_free_bytes=1 << 60)
    with LiveServer(config=config) as live:
        status, answer = live.post(TEXT, {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, "low_memory")
        response, raw = live.request("GET", "/health")
        assert (response.status, json.loads(raw)["state"]) == (503, "overloaded")
        assert live.request("GET", "/health/live")[0].status == 200
        assert live.engine.added == []


def test_f9_a_core_that_starts_nobody_for_want_of_memory_is_overloaded_and_still_takes_requests() -> None:
    why = "the host has 9 MiB of free memory, less than 256 MiB"
    state = Status(stats=stats(held_back=why))
    with LiveServer(FakeEngine(state=state)) as live:
        response, raw = live.request("GET", "/health")
        assert (response.status, json.loads(raw)["reason"], json.loads(raw)["code"]) == (
            503,
            why,
            "low_memory",
        )
        assert live.post(TEXT, {"prompt": "a", "max_tokens": 1})[0] == 200
        assert 'penstock_starts_held_back{model_name="fake"} 1.0' in _metrics(live)
        (replica,) = json.loads(live.request("GET", "/debug/pipeline")[1])["replicas"]
        assert replica["held_back"] == why


def test_r5_it_is_ready_while_requests_start_in_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Status(stats=stats(held_back="the host of stage 1 has 9 MiB of free memory"))
    away, well = Status(ready=False, stats=stats()), Status(stats=stats())
    with LiveServer(FakeEngine(state=short)) as live:
        monkeypatch.setattr(live.engine, "statuses", lambda: [short, well])
        assert live.request("GET", "/health")[0].status == 200
        monkeypatch.setattr(live.engine, "statuses", lambda: [short, away])
        response, raw = live.request("GET", "/health")
        assert (response.status, json.loads(raw)["code"]) == (503, "low_memory")


def _probe(live: LiveServer) -> tuple[int, str]:
    response, raw = live.request("GET", "/health/generate")
    return response.status, json.loads(raw)["state"]


def test_r5_d9_a_probe_is_a_token_that_comes_out_of_the_pipe() -> None:
    clock = FakeClock()
    with LiveServer(clock=clock) as live:
        assert _probe(live) == (200, "ready")
        assert _probe(live) == (200, "ready")
        assert len(live.engine.added) == 1, "it counts for a second"
        clock.advance(1.0)
        live.engine.failure = UnavailableError("stage 1 is gone", stage=1)
        assert _probe(live) == (503, "not_ready")
        live.engine.failure = None
        assert _probe(live) == (503, "not_ready")
        clock.advance(1.0)
        live.engine.max_alive = 0
        assert _probe(live) == (503, "overloaded")
        clock.advance(1.0)
        live.engine.state = Status(ready=False, reason="loading")
        assert _probe(live) == (503, "not_ready")
        assert len(live.engine.added) == 2
        assert not live.engine.alive


def test_g6_a_busy_engine_is_not_probed_with_a_request_of_its_own() -> None:
    engine = FakeEngine(state=Status(stats=stats(num_running=3, generated_tokens=70)))
    with LiveServer(engine) as live, live.connect() as connection:
        connection.sendall(b"GET /health/generate HTTP/1.1\r\nHost: localhost\r\n\r\n")
        live.wait_for(lambda: len(live.server.server_state.tasks) == 1)
        live.call(lambda: setattr(engine, "state", Status(stats=stats(num_running=3, generated_tokens=71))))
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert engine.added == []


@pytest.mark.parametrize("later", [stats(num_running=3, generated_tokens=70), stats(), None])
def test_g6_one_that_yields_nothing_is_probed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, later: CoreStats | None
) -> None:
    """It is busy with long prompts, or its requests have ended meanwhile."""
    monkeypatch.setattr(health, "LOOK_S", 0.0)
    engine = FakeEngine(state=Status(stats=stats(num_running=3, generated_tokens=70)))
    looks = iter([engine.state] * 3)

    def status() -> Status:
        return next(looks, Status(stats=later))

    monkeypatch.setattr(engine, "status", status)
    with LiveServer(engine) as live:
        assert _probe(live) == (200, "ready")
        assert len(engine.added) == 1


def test_g4_an_engine_that_was_slowed_down_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_LIMIT_S", 0.0)
    engine = FakeEngine(state=Status(stats=stats(plan_interval_ms=10_000)))
    with LiveServer(engine) as live:
        assert _probe(live) == (200, "ready")


def test_r5_d9_probes_at_the_same_time_share_one_request_and_have_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LiveServer(FakeEngine(hold_after=0)) as live, ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(live.connect())
            connection.sendall(b"GET /health/generate HTTP/1.1\r\nHost: localhost\r\n\r\n")
        live.wait_for(lambda: len(live.server.server_state.tasks) == 3)
        assert len(live.engine.added) == 1
        live.call(live.engine.released.set)
        live.wait_for(lambda: not live.server.server_state.tasks and not live.engine.alive)
    monkeypatch.setattr(health, "PROBE_LIMIT_S", 0.0)
    with LiveServer(FakeEngine(hold_after=0)) as live:
        assert _probe(live) == (503, "stuck")
        live.wait_for(lambda: not live.engine.alive)


def _metrics(live: LiveServer) -> str:
    response, raw = live.request("GET", "/metrics")
    assert response.status == 200
    assert (response.getheader("content-type") or "").startswith("text/plain")
    return raw.decode()


def test_metrics_carry_the_core_set() -> None:
    numbers = stats(
        num_running=3,
        num_waiting=2,
        num_preemptions=7,
        generated_tokens=99,
        prompt_tokens=55,
        inflight=2,
        micro_batches=4,
        fill_plans=12,
        wire_s=0.125,
        store_bytes_read=1000,
        store_bytes_written=2000,
        store_records_read=11,
        host_records_read=12,
        host_bytes_read=13,
        host_bytes_written=14,
        host_bytes_used=15,
        store_verify_failures=3,
        store_call_failures=4,
        store_switched_off=1,
    )
    with LiveServer(FakeEngine(state=Status(stats=numbers))) as live:
        live.post(TEXT, {"prompt": "abcd", "max_tokens": 3})
        live.post(TEXT, {"prompt": "abcd", "temperature": 9})
        text = _metrics(live)
        for line in (
            'penstock_num_requests_running{model_name="fake"} 3.0',
            'penstock_num_requests_waiting{model_name="fake"} 2.0',
            'penstock_kv_cache_usage_perc{model_name="fake",tier="l1"} 0.25',
            'penstock_num_preemptions_total{model_name="fake"} 7.0',
            'penstock_kv_store_bytes_total{direction="read",model_name="fake"} 1000.0',
            'penstock_kv_store_bytes_total{direction="written",model_name="fake"} 2000.0',
            'penstock_kv_store_read_records_total{model_name="fake"} 11.0',
            'penstock_kv_host_read_records_total{model_name="fake"} 12.0',
            'penstock_kv_host_read_bytes_total{model_name="fake"} 13.0',
            'penstock_kv_host_written_bytes_total{model_name="fake"} 14.0',
            'penstock_kv_host_bytes{model_name="fake"} 15.0',
            'penstock_kv_store_verify_failures_total{model_name="fake"} 3.0',
            'penstock_kv_store_call_failures_total{model_name="fake"} 4.0',
            'penstock_kv_store_switched_off{model_name="fake"} 1.0',
            'penstock_prompt_tokens_total{model_name="fake"} 55.0',
            'penstock_generation_tokens_total{model_name="fake"} 99.0',
            'penstock_pipeline_inflight_batches{model_name="fake"} 2.0',
            'penstock_pipeline_micro_batches{model_name="fake"} 4.0',
            'penstock_pipeline_fill_batches{model_name="fake"} 12.0',
            'penstock_pipeline_wire_seconds{model_name="fake"} 0.125',
            'penstock_request_success_total{finished_reason="length",model_name="fake"} 1.0',
            'penstock_requests_rejected_total{model_name="fake",status="400"} 1.0',
            'penstock_time_to_first_token_seconds_count{model_name="fake"} 1.0',
            'penstock_inter_token_latency_seconds_count{model_name="fake"} 2.0',
            'penstock_e2e_request_latency_seconds_count{model_name="fake"} 1.0',
            'penstock_request_queue_time_seconds_bucket{le="0.1",model_name="fake"} 0.0',
            'penstock_request_queue_time_seconds_bucket{le="0.3",model_name="fake"} 1.0',
        ):
            assert line in text, line
        names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert all(name.startswith("penstock_") for name in names)


def test_metrics_say_who_guessed() -> None:
    drafts = SpeculationStats("suffix", 90, 60, 5, num_forced_drafted=20, num_forced_accepted=19)
    with LiveServer(FakeEngine(state=Status(stats=stats(speculation=drafts)))) as live:
        text = _metrics(live)
    for line in (
        'penstock_spec_drafted_tokens_total{drafter="suffix",model_name="fake"} 70.0',
        'penstock_spec_drafted_tokens_total{drafter="grammar",model_name="fake"} 20.0',
        'penstock_spec_accepted_tokens_total{drafter="suffix",model_name="fake"} 41.0',
        'penstock_spec_accepted_tokens_total{drafter="grammar",model_name="fake"} 19.0',
        'penstock_spec_cancelled_tokens_total{drafter="suffix",model_name="fake"} 5.0',
    ):
        assert line in text, line
    with LiveServer(FakeEngine(state=Status(stats=stats()))) as live:
        assert "penstock_spec" not in _metrics(live)


def test_d6_metrics_say_where_the_time_of_each_stage_went() -> None:
    phase_ns = [(phase + 1) * 10**9 for phase in Phase]
    times = StageTimes(
        stage=1,
        num_steps=4,
        wall_ns=sum(phase_ns),
        busy_ns=2 * 10**9,
        phase_ns=phase_ns,
        busy_ratio=0.75,
        exchange_ns=5 * 10**8,
    )
    with LiveServer(FakeEngine(state=Status(stats=stats(stage_times=[times])))) as live:
        text = _metrics(live)
    bubbles = "penstock_pipeline_bubble_seconds_total"
    for line in (
        'penstock_pipeline_stage_busy_ratio{model_name="fake",replica="0",stage="1"} 0.75',
        bubbles + '{cause="no_work",model_name="fake",replica="0",stage="1"} 1.0',
        bubbles + '{cause="wait_next",model_name="fake",replica="0",stage="1"} 10.0',
        'penstock_stage_step_seconds_sum{model_name="fake",phase="forward",replica="0",stage="1"} 7.0',
        'penstock_stage_step_seconds_count{model_name="fake",phase="sample",replica="0",stage="1"} 4.0',
        'penstock_stage_exchange_seconds_sum{model_name="fake",replica="0",stage="1"} 0.5',
    ):
        assert line in text, line
    assert 'bubble_seconds_total{cause="forward"' not in text
    assert 'stage_step_seconds_sum{model_name="fake",phase="no_work"' not in text


def test_d16_metrics_say_which_memory_is_stranded() -> None:
    memory = [
        StageMemory(stage=0, weight_bytes=9, kv_bytes=64, peak_bytes=7, margin_bytes=5, stranded_bytes=0)
    ]
    memory.append(StageMemory(stage=1, kv_bytes=48, stranded_bytes=16, replica=1))
    with LiveServer(FakeEngine(state=Status(stats=stats(stage_memory=memory)))) as live:
        text = _metrics(live)
    for line in (
        'penstock_stage_weight_bytes{model_name="fake",replica="0",stage="0"} 9.0',
        'penstock_stage_kv_bytes{model_name="fake",replica="0",stage="0"} 64.0',
        'penstock_stage_peak_bytes{model_name="fake",replica="0",stage="0"} 7.0',
        'penstock_stage_margin_bytes{model_name="fake",replica="0",stage="0"} 5.0',
        'penstock_stage_stranded_bytes{model_name="fake",replica="0",stage="0"} 0.0',
        'penstock_stage_stranded_bytes{model_name="fake",replica="1",stage="1"} 16.0',
    ):
        assert line in text, line


def test_d6_a_trace_is_served_with_its_report() -> None:
    spans = StageSpans(
        stage=0, began_ns=5000, phases=bytes([Phase.FORWARD]), durations_ns=[2000], steps=[(0, 3, 8)]
    )
    with LiveServer(FakeEngine(spans=[spans])) as live:
        answer, body = live.request("GET", "/debug/trace")
    found = json.loads(body)
    (event,) = (event for event in found["traceEvents"] if event["ph"] == "X")
    assert (answer.status, event["name"], event["ts"], event["dur"]) == (200, "forward 3", 5.0, 2.0)
    assert found["otherData"]["bubbles"] == ["stage 0: 0.0 s, computing 100.0%, bubble 0.0%, overhead 0.0%"]


def test_version(live: LiveServer) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", json.loads(live.request("GET", "/version")[1])["version"])


def test_openapi_names_the_request_fields(live: LiveServer) -> None:
    document = json.loads(live.request("GET", "/openapi.json")[1])
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][name]["properties"]
    assert {"prompt", "stop_token_ids", "return_token_ids", "logprobs"} <= set(fields)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


def _start_stream(live: LiveServer, prompt: str) -> Any:
    connection = live.connect()
    connection.sendall(post_bytes(TEXT, {"prompt": prompt, "stream": True}))
    return connection


def _read_all(connection: Any) -> bytes:
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def _body(raw: bytes) -> bytes:
    """Undo the chunked transfer encoding."""
    rest, body = raw.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def test_drain_turns_readiness_off_finishes_running_work_and_refuses_new() -> None:
    engine = FakeEngine(hold_after=1)
    with LiveServer(engine, config=ServerConfig(drain_s=20.0)) as live, ExitStack() as stack:
        running = stack.enter_context(_start_stream(live, "abc"))
        live.wait_for(lambda: len(engine.alive) == 1)
        live.stop()
        live.wait_for(lambda: live.app.context.lifecycle.is_draining)
        response, raw = live.request("GET", "/health")
        assert (response.status, json.loads(raw)["state"]) == (503, "draining")
        response, raw = live.request("POST", TEXT, {"prompt": "new"})
        assert response.status == 503
        assert response.getheader("retry-after") == "1"
        assert json.loads(raw)["error"]["code"] == "draining"
        live.call(engine.released.set)
        got = events(_body(_read_all(running)))
        assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == "abc"
        assert got[-1] == "[DONE]"
        live.join()
        assert "ended_early=0" in live.log.getvalue()


@pytest.mark.parametrize("signals", [1, 2])
def test_drain_ends_what_is_too_slow_with_an_in_stream_error(signals: int) -> None:
    engine = FakeEngine(hold_after=1)
    drain_s = 0.05 if signals == 1 else 3600.0
    with LiveServer(engine, config=ServerConfig(drain_s=drain_s)) as live, ExitStack() as stack:
        running = stack.enter_context(_start_stream(live, "abc"))
        live.wait_for(lambda: len(engine.alive) == 1)
        for _ in range(signals):
            live.stop()
        got = events(_body(_read_all(running)))
        assert got[0]["choices"][0]["text"] == "a"
        assert got[-1]["error"]["code"] == "shutting_down"
        assert "[DONE]" not in got
        live.join()
        assert engine.alive == set()


def test_a_request_accepted_before_the_signal_is_served_though_its_body_comes_after() -> None:
    with LiveServer(config=ServerConfig(drain_s=20.0)) as live, live.connect() as connection:
        raw = post_bytes(TEXT, {"prompt": "abc", "stream": True})
        connection.sendall(raw[:-3])
        live.wait_for(lambda: live.app.context.lifecycle.num_running == 1)
        live.stop()
        live.wait_for(lambda: live.app.context.lifecycle.is_draining)
        connection.sendall(raw[-3:])
        got = events(_body(_read_all(connection)))
        assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == "abc"
        assert got[-1] == "[DONE]"
        live.join()
        assert "draining running=1" in live.log.getvalue()
        assert "ended_early=0" in live.log.getvalue()


@contextmanager
def _unread_answer(live: LiveServer) -> Iterator[socket.socket]:
    """A client whose answer of 6 MB is complete, and who has taken none of it."""
    with slow_client(live) as slow:
        slow.sendall(post_bytes(TEXT, SIX_MB, "Connection: close\r\n"))
        wait_until_written(live)
        yield slow


def test_r11_drain_lets_a_slow_client_take_the_rest_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is written, and the request has ended, when the server is told to."""
    unsent = noted_at_shutdown(monkeypatch, lambda transport: transport.get_write_buffer_size())
    with LiveServer(config=ServerConfig(drain_s=20.0)) as live, _unread_answer(live) as slow:
        stop_and_let_drain(live)
        body = take_all(slow)
        live.join()
    choices = json.loads(body)["choices"]
    assert {choice["text"] for choice in choices} == {"\0" * 4000}
    assert (len(choices), list(map(sum, unsent))) == (256, [0])


def test_drain_gives_a_client_up_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(config=ServerConfig(drain_s=3600.0)) as live, _unread_answer(live):
        monkeypatch.setattr(api_process, "CLOSE_S", 0.2)
        live.stop()
        live.wait_for(lambda: "drained ended_early=0" in live.log.getvalue())


def test_a_second_signal_waits_for_no_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(config=ServerConfig(drain_s=3600.0)) as live, _unread_answer(live):
        monkeypatch.setattr(api_process, "CLOSE_S", 3600.0)
        stop_and_let_drain(live)
        assert "drained" not in live.log.getvalue()
        live.stop()
        live.wait_for(lambda: "drained ended_early=0" in live.log.getvalue())


def test_a_request_whose_body_is_too_slow_for_the_drain_gets_a_typed_503() -> None:
    with LiveServer(config=ServerConfig(drain_s=0.05)) as live, live.connect() as connection:
        connection.sendall(post_bytes(TEXT, {"prompt": "abc"})[:-3])
        live.wait_for(lambda: live.app.context.lifecycle.num_running == 1)
        live.stop()
        head, _, body = _read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "shutting_down"
        live.join()
        assert live.engine.added == []


@pytest.mark.parametrize("body", [b"{", {"prompt": "a", "model": "other"}, {"prompt": "abc"}])
def test_no_request_stays_counted_after_its_answer(live: LiveServer, body: Any) -> None:
    live.request("POST", TEXT, body)
    live.wait_for(lambda: live.app.context.lifecycle.num_running == 0)


def test_work_that_was_interrupted_before_it_ran_does_not_run() -> None:
    async def work() -> None:
        pytest.fail("it has run")

    reason = UnavailableError("over")
    interruptible = Interruptible()
    interruptible.interrupt(reason)
    with pytest.raises(UnavailableError) as raised:
        asyncio.run(interruptible.run(work()))
    assert raised.value is reason


def test_health_probes_are_silent_whatever_they_answer() -> None:
    engine = FakeEngine(state=Status(ready=False, reason="loading"))
    with LiveServer(engine) as live:
        for path in ("/health", "/health/ready", "/health/live", "/health/generate"):
            live.request("GET", path)
        live.post(TEXT, {"prompt": "a"})
        live.wait_for(lambda: "path=/v1/completions" in live.log.getvalue())
        assert "/health" not in live.log.getvalue()


def test_idle_server_stops_quickly() -> None:
    with LiveServer(config=ServerConfig(drain_s=3600.0)) as live, live.connect() as idle:
        live.wait_for(lambda: len(live.server.server_state.connections) == 1)
        live.stop()
        live.join()
        assert idle.recv(10) == b""

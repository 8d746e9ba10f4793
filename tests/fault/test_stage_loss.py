"""Stages of a running server are killed or stopped while they decode: streams pause, and go on (R2 to R6)."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import psutil
import pytest

from checkpoints import change_one_element, make_checkpoint
from depth import sampled, soaked
from disturbed import REQUESTS, Server, Stream, StreamFailedError, health, named
from served import Served, is_alive, title_of, wait_until

LAST_STEP = 64  # of those at which a stage is lost
STILL_TO_COME = 150  # tokens of each stream behind that step: none ends before the signal comes


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.soak)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == 2:
        yield request.getfixturevalue("demo_server")
        return
    with Server(request.param) as served:
        yield served


def disturb(server: Server, stage: int, after: int, number: int) -> None:
    """Send a signal to a stage when the first stream has had so many tokens; all must be as ever."""
    count = after + STILL_TO_COME
    others = {index: server.stage(index).pid for index in range(server.num_stages) if index != stage}
    victim, before = server.stage(stage), server.num_recoveries
    streams = [iter(Stream(server, request | {"max_tokens": count})) for request in REQUESTS]
    found = [[next(streams[0]) for _ in range(after)], [], []]
    victim.send_signal(number)
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == [ids[:count] for ids in server.golden]
    wait_until(lambda: server.num_recoveries == before + 1, 30)
    assert {index: server.stage(index).pid for index in others} == others, "only the lost one starts again"
    assert server.stage(stage).pid != victim.pid
    assert server.get("/health")


_chosen = random.Random(20261121)


@pytest.mark.parametrize("after", sampled(sorted(_chosen.sample(range(1, LAST_STEP), 2)), 1))
@pytest.mark.parametrize("stage", ["last", *soaked("first")])
def test_r4_streams_go_on_when_a_stage_is_killed(server: Server, stage: str, after: int) -> None:
    disturb(server, 0 if stage == "first" else server.num_stages - 1, after, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("after", range(1, LAST_STEP + 1))
def test_r4_streams_go_on_whichever_stage_is_killed_at_whichever_step(server: Server, after: int) -> None:
    for stage in range(server.num_stages):
        disturb(server, stage, after, signal.SIGKILL)


def test_r2_a_stopped_stage_counts_as_lost() -> None:
    with Server(2, "--heartbeat-limit", "2") as served:
        disturb(served, 1, 9, signal.SIGSTOP)
        assert re.search(
            r"stage 1 \(pid \d+\) has given no sign of life for (?:[2-9]|\d\d)\.\d s", served.output
        )


def test_r5_not_ready_while_a_stage_is_lost_and_ready_when_a_token_has_come_through(
    demo_server: Server,
) -> None:
    epoch, found = demo_server.metric("penstock_epoch"), list[list[int]]()
    demo_server.stage(1).kill()
    wait_until(lambda: health(demo_server)[0] == 503, 10)
    code, body = health(demo_server)
    asked = Thread(target=lambda: found.append([*Stream(demo_server, REQUESTS[0])]))
    asked.start()
    while code == 503:
        assert (body["state"], body["stage"]) == ("not_ready", 1)
        assert "stage 1" in body["reason"]
        code, body = health(demo_server)
    assert body["state"] == "ready"
    asked.join(60)
    assert found == [demo_server.golden[0]], "who comes meanwhile waits"
    assert demo_server.metric("penstock_epoch") == epoch + 1


@pytest.mark.soak
def test_r11_a_signal_while_a_stage_is_lost_ends_the_server_in_order() -> None:
    with Server(2) as served:
        family = served.family()
        served.stage(1).kill()
        wait_until(lambda: "lost: stage 1" in served.output, 10)
        family += served.family()
        assert served.stop() == 0
        assert not any(map(is_alive, family))


@pytest.mark.soak
def test_r4_r11_a_stage_that_is_lost_while_the_server_drains_is_started_again() -> None:
    with Server(2) as served:
        stream = iter(Stream(served, REQUESTS[0]))
        found = [next(stream)]
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in served.output, 10)
        served.stage(1).kill()
        found += stream
        assert found == served.golden[0]
        assert served.process.wait(30) == 0
        assert "recovered" in served.output


@pytest.mark.soak
def test_r6_nothing_is_left_of_what_was_lost(server: Server) -> None:
    def resources() -> dict[str, tuple[int, int]]:
        return server.resources("penstock api")  # whose clients come and go

    def lose_each() -> None:
        for stage in range(server.num_stages):
            disturb(server, stage, 3, signal.SIGKILL)

    lose_each()  # whatever is made once has been made
    before = resources()
    lose_each()
    assert resources() == before
    assert server.metric("penstock_kv_cache_usage_perc") == 0


@pytest.mark.soak
def test_r3_a_lost_stage_starts_again_in_the_process_that_waits() -> None:
    """Issue 25, point 3."""
    with Server(2) as served:
        wait_until(lambda: "a spare process is ready on this host; it holds " in served.output, 60)
        spare = served.await_spare()
        disturb(served, 1, 9, signal.SIGKILL)
        assert served.stage(1).pid == spare.pid
        assert served.await_spare().pid != spare.pid


@pytest.mark.soak
def test_it_goes_on_trying_with_pauses_and_running_requests_end_with_the_cause(tmp_path: Path) -> None:
    """The weights are away for a while."""
    model = make_checkpoint(tmp_path / "model")
    weights = model / "model.safetensors"
    with Served(str(model), "--pp", "2", "--threads-per-rank", "1") as served:
        stream = iter(Stream(served, {"model": model.name, "prompt": [5], "max_tokens": 250}))
        next(stream)
        weights.rename(tmp_path / "away")
        named(served, "penstock stage 0 tp 0").kill()
        with pytest.raises(StreamFailedError, match="Give a directory with safetensors, or a GGUF file"):
            list(stream)
        assert health(served)[0] == 503
        (tmp_path / "away").rename(weights)
        wait_until(lambda: "recovered in" in served.output, 60)
        assert len(served.post("/v1/completions", prompt=[5], max_tokens=4, model=model.name)["choices"]) == 1
        assert served.metric("penstock_stage_restarts_total") >= 4


@pytest.mark.soak
def test_r3_a_stage_whose_weights_have_changed_is_refused_until_they_are_back(tmp_path: Path) -> None:
    """Issue 25, point 1: no token comes from a mix of two models."""
    tensor = "model.layers.3.mlp.down_proj.weight"  # its middle is in none of the samples
    model = make_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=512)
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    request = {"prompt": [5], "max_tokens": 20, "temperature": 0, "model": model.name}
    with Served(str(model), "--pp", "2", "--threads-per-rank", "1") as served:
        expected = served.post("/v1/completions", **request)["choices"]
        change_one_element(model, tensor)
        named(served, "penstock stage 1 tp 0").kill()
        wait_until(lambda: health(served)[1].get("code") == "model_changed", 60)
        code, body = health(served)
        assert (code, body["state"], body["stage"]) == (503, "not_ready", 1)
        assert f"model.safetensors: tensor {tensor}: expected the bytes" in body["reason"]
        weights.write_bytes(content)
        wait_until(lambda: "recovered in" in served.output, 60)
        assert served.post("/v1/completions", **request)["choices"] == expected


@pytest.mark.soak
def test_both_stages_at_once_and_the_new_one_while_it_loads(server: Server) -> None:
    before = server.num_recoveries
    stream = iter(Stream(server, REQUESTS[0]))
    found = [next(stream)]
    victims = [server.stage(stage) for stage in range(server.num_stages)]
    for victim in victims:
        victim.kill()
    wait_until(lambda: any_new(server, victims), 10)
    any_new(server, victims)[0].kill()
    found += stream
    assert found == server.golden[0]
    wait_until(lambda: server.num_recoveries == before + 1, 30)


def any_new(server: Server, old: list[psutil.Process]) -> list[psutil.Process]:
    """Stages that have been started in place of these."""
    known = {process.pid for process in old}
    stages = [process for process in server.family() if "penstock.rank.process" in title_of(process)]
    return [process for process in stages if process.pid not in known]

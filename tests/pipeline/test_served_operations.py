"""Every operation on a real server under load, with a rank late or killed in its middle: all ranks have done
it at the same step, and no token changes (rows G4, d18)."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from disturbed import REQUESTS, Server, Stream, StreamFailedError, named
from served import wait_until

ADMIN_KEY = "key-of-an-administrator"
NUM_TOKENS = 300


class Operated(Server):
    """Attributes:
    replicas: their number.
    folder: of profiles.
    """

    def __init__(self, replicas: int, folder: Path) -> None:
        self.replicas = replicas
        self.folder = folder
        words = ["--dp", str(replicas)] if replicas > 1 else []
        super().__init__(2, *words, "--admin-key", ADMIN_KEY, "--profile-dir", str(folder))

    def operate(self, path: str) -> Any:
        asked = urllib.request.Request(
            self.url + path, headers={"authorization": f"Bearer {ADMIN_KEY}"}, method="POST"
        )
        with urllib.request.urlopen(asked, timeout=90) as answer:
            return json.load(answer)

    def rank(self, stage: int) -> psutil.Process:
        """Of the last replica."""
        replica = f"replica {self.replicas - 1} " if self.replicas > 1 else ""
        return named(self, f"penstock {replica}stage {stage} tp 0")

    def core(self) -> psutil.Process:
        replica = f"replica {self.replicas - 1} " if self.replicas > 1 else ""
        return named(self, f"penstock {replica}core")


@pytest.fixture(scope="module", params=[1, 2])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Operated(request.param, tmp_path_factory.mktemp("profiles")) as served:
        yield served


class Load:
    """Streams that have begun."""

    def __init__(self, server: Server, count: int = 6, num_tokens: int = NUM_TOKENS) -> None:
        self._server = server
        self._num_tokens = num_tokens
        requests = [REQUESTS[number % 3] | {"max_tokens": num_tokens} for number in range(count)]
        self.streams = [iter(Stream(server, request)) for request in requests]
        self.found = [[next(stream)] for stream in self.streams]

    def assert_exact(self) -> None:
        for ids, stream in zip(self.found, self.streams, strict=True):
            ids.extend(stream)
        assert self.found == [
            self._server.golden[number % 3][: self._num_tokens] for number in range(len(self.found))
        ]


def assert_complete(server: Operated, done: list[dict[str, Any]]) -> None:
    assert [one["replica"] for one in done] == [*range(server.replicas)]
    for one in done:
        assert one["error"] is None
        assert one["completed_step"] >= one["accepted_step"]


def disturb(server: Operated, how: str) -> None:
    """A rank that is late, or one that is no more; or the core."""
    if how == "late":
        rank = server.rank(1)
        rank.suspend()
        time.sleep(0.5)  # well below the heartbeat's limit; how long it is matters to no assertion
        rank.resume()
    elif how == "core":
        server.core().send_signal(signal.SIGKILL)
    else:
        server.rank(0).send_signal(signal.SIGKILL)


OPERATIONS = (
    "/slow_down?interval_ms=5",
    "/slow_down?interval_ms=0",
    "/abort?request_id=nobody",
    "/flush_cache",
)


@pytest.mark.parametrize("how", ["late", "killed", pytest.param("core", marks=pytest.mark.soak)])
def test_d18_g4_operations_while_a_rank_is_late_or_lost(server: Operated, how: str) -> None:
    before = server.num_recoveries
    load = Load(server)
    with ThreadPoolExecutor(len(OPERATIONS) + 1) as pool:
        disturbing = pool.submit(disturb, server, how)
        answers = [pool.submit(server.operate, path) for path in OPERATIONS]
        disturbing.result()
        for answer in answers:
            assert_complete(server, answer.result()["replicas"])
    server.operate("/slow_down?interval_ms=0")
    load.assert_exact()
    if how != "late":
        wait_until(lambda: server.num_recoveries == before + 1, 60)
    assert [*Stream(server, REQUESTS[0] | {"max_tokens": 16})] == server.golden[0][:16]


def test_g4_a_pace_is_kept_and_outlives_the_core(server: Operated) -> None:
    load = Load(server, count=2, num_tokens=40)
    before = server.num_recoveries
    assert server.operate("/slow_down?interval_ms=50")["interval_ms"] == 50
    server.core().send_signal(signal.SIGKILL)
    wait_until(lambda: server.num_recoveries == before + 1, 60)
    wait_until(lambda: server.metric("penstock_plan_interval_seconds") == 0.05, 30)
    server.operate("/slow_down?interval_ms=0")
    load.assert_exact()


def test_g4_those_who_are_aborted_end_with_an_error_and_the_others_do_not_notice(server: Operated) -> None:
    server.operate("/slow_down?interval_ms=20")
    load = Load(server)
    name = {"x-request-id": "the-one"}
    asked = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(
            {"model": "demo", "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        ).encode(),
        {"content-type": "application/json", **name},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.readline()
        done = server.operate("/abort?request_id=the-one")["replicas"]
        rest = answer.read()
    assert_complete(server, done)
    assert sum(len(one["aborted"]) for one in done) == 1
    assert b"aborted_by_administrator" in rest
    assert b"[DONE]" not in rest
    server.operate("/slow_down?interval_ms=0")
    load.assert_exact()


def test_g4_all_can_be_aborted_while_a_rank_is_late(server: Operated) -> None:
    load = Load(server, num_tokens=600)
    rank = server.rank(1)
    rank.suspend()
    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(server.operate, "/abort?all=true")
        told = []
        for number, (ids, stream) in enumerate(zip(load.found, load.streams, strict=True)):
            try:
                ids.extend(stream)
            except StreamFailedError as error:
                told.append(str(error))
            assert ids == server.golden[number % 3][: len(ids)]
        rank.resume()
        assert_complete(server, aborted.result()["replicas"])
    assert told, "where a rank stands still nobody can have come to the end"
    assert all("administrator" in text for text in told)
    wait_until(lambda: server.metric("penstock_num_requests_running") == 0, 30)
    assert [*Stream(server, REQUESTS[0] | {"max_tokens": 16})] == server.golden[0][:16]


@pytest.mark.parametrize(
    "how", ["", "killed", *(pytest.param(how, marks=pytest.mark.soak) for how in ("late", "core"))]
)
def test_g4_a_profile_has_the_same_steps_of_every_stage(server: Operated, how: str) -> None:
    before = server.num_recoveries
    load = Load(server, num_tokens=600)
    started = server.operate("/start_profile")["replicas"]
    assert_complete(server, started)
    if how:
        disturb(server, how)
    load.assert_exact()
    if how in ("killed", "core"):
        wait_until(lambda: server.num_recoveries == before + 1, 60)
    answer = server.operate("/stop_profile")
    path = server.folder / answer["file"]
    trace = json.loads(path.read_text())
    path.unlink()
    assert answer["complete"] == (how in ("", "late"))
    assert answer["ended_by"] == ("core_lost" if how == "core" else "stop")
    if not answer["complete"]:
        return
    steps: dict[int, set[int]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            steps.setdefault(event["pid"], set()).add(event["args"]["step"])
    for replica, (first, end) in enumerate(zip(started, answer["stopped"], strict=True)):
        wanted = set(range(first["accepted_step"], end["accepted_step"]))
        for stage in (0, 1):
            assert steps.get(1000 * replica + stage, set()) == wanted
    assert any(steps.values())


def test_the_pipeline_and_its_texts_are_seen_as_they_are(server: Operated) -> None:
    asked = urllib.request.Request(
        server.url + "/tokenize",
        json.dumps({"prompt": "Once upon a time"}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        tokens = json.load(answer)["tokens"]
    by_ids = {"prompt": tokens, "temperature": 0, "max_tokens": 40}
    assert [*Stream(server, by_ids)] == server.golden[0][:40], "the ids are those that the text runs with"
    view = json.loads(server.get("/debug/pipeline"))
    assert [replica["ready"] for replica in view["replicas"]] == [True] * server.replicas
    for replica in view["replicas"]:
        first, second = (stage["layers"] for stage in replica["stages"])
        assert first[0] == 0
        assert first[1] == second[0] < second[1]
    assert sum(replica["generated_tokens"] for replica in view["replicas"]) >= 40
    assert any(stage["bubble_s"]["no_work"] for stage in view["replicas"][0]["stages"])
    with urllib.request.urlopen(server.url + "/debug/pipeline/events", timeout=60) as feed:
        frames = [json.loads(line[6:]) for line in (feed.readline() for _ in range(4)) if line.strip()]
    assert len(frames) == 2
    assert frames[0]["time"] < frames[1]["time"]
    info = json.loads(server.get("/server_info"))
    assert info["num_replicas"] == server.replicas
    assert info["settings"]["pipeline-parallel-size"] == 2
    assert info["settings"]["admin-key"] == "set"
    assert ADMIN_KEY not in json.dumps(info)

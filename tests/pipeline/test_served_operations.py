"""Every operation on a real server under load, with a rank late or killed in its middle: all ranks have done
it at the same step, and no token changes (rows G4, d18).

A rank stands still before an operation is asked for, and goes on or dies once the cores have it and it is not
complete: whatever becomes of the rank then happens in the operation's middle.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from depth import soaked
from disturbed import ADMIN_KEY, REQUESTS, Server, Stream, StreamFailedError, administer, named
from served import wait_until

NUM_TOKENS = 300


class Operated(Server):
    """Attributes:
    replicas: their number.
    tp: ranks of each stage.
    folder: of profiles.
    told: steps that the stages were heard to tell since the last disturbance, by replica and stage. A new
        core counts its steps from the start: what the one before has told proves nothing of them.
    """

    def __init__(self, replicas: int, tp: int, folder: Path) -> None:
        self.replicas = replicas
        self.tp = tp
        self.folder = folder / "profiles"
        self.told: dict[tuple[int, int], set[int]] = {}
        self.folder.mkdir()
        words = ["--dp", str(replicas)] if replicas > 1 else []
        # Who stands still must not be taken for lost; how long a test needs is the machine's affair.
        words += ["--tp", str(tp), "--heartbeat-limit", "120", "--kv-store", str(folder / "store")]
        super().__init__(2, *words, "--admin-key", ADMIN_KEY, "--profile-dir", str(self.folder))

    def operate(self, path: str) -> Any:
        return administer(self, path)

    def rank(self, stage: int, replica: int = -1) -> psutil.Process:
        """The last one of the stage; of the last replica."""
        return named(self, f"{self._prefix(replica)}stage {stage} tp {self.tp - 1}")

    def core(self, replica: int = -1) -> psutil.Process:
        return named(self, f"{self._prefix(replica)}core")

    def _prefix(self, replica: int) -> str:
        return f"penstock replica {range(self.replicas)[replica]} " if self.replicas > 1 else "penstock "

    def listen(self) -> None:
        """Note the steps that each stage has told that it ran lately. Nobody tells of them for long."""
        for event in json.loads(self.get("/debug/trace"))["traceEvents"]:
            if event["ph"] == "X" and event["cat"] == "forward":
                place = divmod(event["pid"], 1000)
                self.told.setdefault(place, set()).add(event["args"]["step"])


LAYOUTS = [(1, 1), *soaked((2, 1), (1, 2))]  # replicas, ranks of a stage


@pytest.fixture(scope="module", params=LAYOUTS, ids=["one", "dp2", "tp2"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    with Operated(*request.param, tmp_path_factory.mktemp("operated")) as served:
        yield served


@pytest.fixture
def server(running: Operated) -> Iterator[Operated]:
    """It goes on at full speed afterwards, though a test has ended in the middle of a pause."""
    yield running
    running.operate("/resume")
    running.operate("/slow_down?interval_ms=0")


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


def assert_complete(server: Operated, done: list[dict[str, Any]], *, everywhere: bool = True) -> None:
    replicas = [one["replica"] for one in done]
    assert replicas == [*range(server.replicas)] if everywhere else len(replicas) == 1
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


# What becomes of the rank that stands still, and of which stage it is. Or the core is lost meanwhile.
LATE, KILLED = ("late", 1), ("killed", 0)
LATE_FIRST, KILLED_LAST, CORE = ("late", 0), ("killed", 1), ("core", 1)
OPERATIONS = (  # whether every replica does it, or one
    ("/abort?request_id=the-one", True),
    ("/slow_down?interval_ms=1", True),
    ("/flush_cache", True),
    ("/flush_cache?store=true", True),
    ("/open_session?session_id=opened", False),
    ("/close_session?session_id=closed", False),
    ("/start_profile", True),
)


def disturbed_while_open(
    server: Operated, how: tuple[str, int], *asked: tuple[str, bool]
) -> list[dict[str, Any]]:
    """The answers to these operations.

    A rank of each replica stands still before they are asked for, and until every core has accepted its own
    and none is complete; then all go on but that of the last replica, which may be killed; or its core is.
    Until all is well again the server is listened to: one replica may be done long before the other.
    """
    fate, stage = how
    before, replicas = server.num_recoveries, range(server.replicas)
    ranks = [server.rank(stage, replica) for replica in replicas]
    victim = {"late": None, "killed": ranks[-1], "core": server.core()}[fate]
    server.told.clear()
    with ThreadPoolExecutor(len(asked)) as pool:
        try:
            for rank in ranks:
                rank.suspend()
            wait_until(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks), 30)
            answers = [pool.submit(server.operate, path) for path, _ in asked]
            due = sum(server.replicas if everywhere else 1 for _, everywhere in asked)
            wait_until(lambda: server.metric("penstock_operations_open") == due, 50)
            assert not any(answer.done() for answer in answers)
        finally:
            if victim is not None:
                victim.kill()
            for rank in ranks:
                if rank is not victim:
                    rank.resume()
        until_heard(server, lambda: all(answer.done() for answer in answers), 90)
    if victim is not None:
        until_heard(server, lambda: server.num_recoveries == before + 1, 60)
    return [answer.result() for answer in answers]


def until_heard(server: Operated, condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until the condition holds, and listen to the server meanwhile; its core may be away."""

    def is_met() -> bool:
        try:
            server.listen()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        return condition()

    wait_until(is_met, limit_s)


def assert_ranks_tell_the_same(server: Operated, done: list[dict[str, Any]]) -> None:
    """Each stage by itself tells that it has run the steps that completed the operations."""
    proofs = [((one["replica"], stage), one["completed_step"]) for one in done for stage in (0, 1)]

    def are_told() -> bool:
        server.listen()
        return all(step in server.told.get(place, ()) for place, step in proofs)

    wait_until(are_told, 60)


@pytest.mark.parametrize("how", [LATE, *soaked(KILLED, LATE_FIRST, KILLED_LAST, CORE)], ids=str)
def test_d18_g4_what_is_open_while_a_rank_is_late_or_lost(server: Operated, how: tuple[str, int]) -> None:
    server.operate("/open_session?session_id=closed")
    server.operate("/slow_down?interval_ms=20")
    load = Load(server)
    doomed = iter(Stream(server, REQUESTS[0], name="the-one"))
    ids = [next(doomed)]
    answers = disturbed_while_open(server, how, *OPERATIONS)
    for (_, everywhere), answer in zip(OPERATIONS, answers, strict=True):
        assert_complete(server, answer["replicas"], everywhere=everywhere)
    assert_ranks_tell_the_same(server, [one for answer in answers for one in answer["replicas"]])
    with pytest.raises(StreamFailedError, match="administrator"):
        ids.extend(doomed)
    assert ids == server.golden[0][: len(ids)]
    if how[0] != "core":  # the next one may find that the one before has ended it
        assert sum(len(one["aborted"]) for one in answers[0]["replicas"]) == 1
    server.operate("/slow_down?interval_ms=0")
    load.assert_exact()
    server.operate("/stop_profile")
    wait_until(lambda: server.metric("penstock_sessions{") == 1, 30)
    server.operate("/close_session?session_id=opened")
    assert server.metric("penstock_operations_open") == 0
    assert [*Stream(server, REQUESTS[0] | {"max_tokens": 16})] == server.golden[0][:16]


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["keep", *soaked("wait", "abort")])
@pytest.mark.parametrize(
    "hows",  # a request in which a stage is lost twice ends
    [
        (KILLED, LATE),
        *soaked((LATE, KILLED), (LATE_FIRST, KILLED_LAST), (KILLED_LAST, LATE_FIRST)),
        *soaked((CORE, LATE), (LATE, CORE)),
    ],
    ids=str,
)
def test_d18_g4_a_pause_and_its_end_while_a_rank_is_late_or_lost(
    server: Operated, mode: str, hows: tuple[tuple[str, int], tuple[str, int]]
) -> None:
    server.operate("/slow_down?interval_ms=20")
    # What a pause aborts must not end before it, however busy the machine is.
    load = Load(server, num_tokens=NUM_TOKENS if mode == "abort" else 60)
    (paused,) = disturbed_while_open(server, hows[0], (f"/pause?mode={mode}", True))
    assert paused["is_paused"]
    assert_complete(server, paused["replicas"])
    generated = server.metric("penstock_generation_tokens_total")
    assert_ranks_tell_the_same(server, paused["replicas"])
    assert server.metric("penstock_generation_tokens_total") == generated
    if mode == "wait":
        load.assert_exact()
    elif mode == "abort":
        for number, (ids, stream) in enumerate(zip(load.found, load.streams, strict=True)):
            with pytest.raises(StreamFailedError, match="paused"):
                ids.extend(stream)
            assert ids == server.golden[number % 3][: len(ids)]
    (resumed,) = disturbed_while_open(server, hows[1], ("/resume", True))
    assert not resumed["is_paused"]
    assert_complete(server, resumed["replicas"])
    server.operate("/slow_down?interval_ms=0")
    if mode == "keep":
        load.assert_exact()
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


# What becomes of a rank while it begins, between, and while it ends.
PROFILED = [
    ("late", "", "late"),
    *soaked(("killed", "", "")),
    *soaked(("", "late", ""), ("", "killed", ""), ("", "", "killed")),
    *soaked(("core", "", ""), ("", "core", ""), ("", "", "core")),
]


@pytest.mark.parametrize("fates", PROFILED, ids="-".join)
def test_d18_g4_a_profile_has_the_same_steps_of_every_stage(
    server: Operated, fates: tuple[str, str, str]
) -> None:
    at_begin, between, at_end = fates

    def operate(path: str, fate: str) -> Any:
        return disturbed_while_open(server, (fate, 1), (path, True))[0] if fate else server.operate(path)

    server.operate("/slow_down?interval_ms=4")
    load = Load(server)
    started = operate("/start_profile", at_begin)["replicas"]
    assert_complete(server, started)
    before = server.num_recoveries
    if between:
        disturb(server, between)
    if between in ("killed", "core"):
        wait_until(lambda: server.num_recoveries == before + 1, 60)
    answer = operate("/stop_profile", at_end)
    server.operate("/slow_down?interval_ms=0")
    load.assert_exact()
    path = server.folder / answer["file"]
    trace = json.loads(path.read_text())
    path.unlink()
    is_whole = at_begin in ("", "late", "core") and {between, at_end} <= {"", "late"}
    assert answer["complete"] == is_whole
    assert answer["ended_by"] == ("core_lost" if "core" in (between, at_end) else "stop")
    if not is_whole:
        return
    steps: dict[int, set[int]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            steps.setdefault(event["pid"], set()).add(event["args"]["step"])
    for replica, (first, end) in enumerate(zip(started, answer["stopped"], strict=True)):
        wanted = set(range(first["accepted_step"], end["accepted_step"]))
        assert wanted
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

"""Pipelines side by side behind one server: the scenarios of row E12, with every token as one pipeline's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from depth import sampled
from disturbed import (
    ADMIN_KEY,
    NUM_TOKENS,
    REQUESTS,
    Server,
    Stream,
    StreamFailedError,
    administer,
    health,
    named,
)
from served import title_of, wait_until


@pytest.fixture(scope="module", params=sampled(["0", "2"], 1))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """With as many plans issued ahead of the pipe; row E12 asks for both."""
    words = ("--dp", "2", "--async-depth", request.param, "--admin-key", ADMIN_KEY)
    with Server(2, *words) as served:
        yield served


# What a loss takes: with plans issued ahead it is the soak's.
IN_ORDER = pytest.mark.parametrize(
    "server", ["0", pytest.param("2", marks=pytest.mark.soak)], indirect=True, scope="module"
)


def request(number: int, num_tokens: int) -> dict[str, Any]:
    return REQUESTS[number % len(REQUESTS)] | {"max_tokens": num_tokens}


def running(server: Server) -> float:
    return server.metric("penstock_num_requests_running")


def test_e12_one_request_after_the_other_leaves_the_other_replica_empty(server: Server) -> None:
    for number in range(4):
        assert [*Stream(server, request(number, 16))] == server.golden[number % 3][:16]


def num_steps(server: Server, replica: int) -> float:
    """Steps with tokens that the replica's stages have said they took; they say so now and then."""
    prefix, label = "penstock_stage_step_seconds_count{", f'replica="{replica}"'
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(prefix)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


def test_e12_i4_requests_that_come_staggered_share_the_replicas(server: Server) -> None:
    """Each comes when the one before has its first token; what is left of it comes meanwhile."""
    before = [num_steps(server, replica) for replica in (0, 1)]
    pool, rest, first = ThreadPoolExecutor(64), [], []
    for number in range(64):
        stream = iter(Stream(server, request(number, 64)))
        first.append(next(stream))
        rest.append(pool.submit(list[int], stream))
    found = [[token, *others.result()] for token, others in zip(first, rest, strict=True)]
    pool.shutdown()
    assert found == [server.golden[number % 3][:64] for number in range(64)]
    for replica in (0, 1):
        wait_until(lambda replica=replica: num_steps(server, replica) > before[replica], 30)


def test_e12_half_of_the_streams_are_left_and_the_rest_goes_on(server: Server) -> None:
    def take(number: int) -> list[int]:
        stream = Stream(server, request(number, 200))
        if number % 2:
            return [*stream]
        found = [*islice(iter(stream), 4)]
        stream.close()
        return found

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(take, range(32)))
    for number, ids in enumerate(found):
        expected = server.golden[number % 3]
        assert ids == (expected[:200] if number % 2 else expected[: len(ids)])
        assert len(ids) >= 4
    wait_until(lambda: running(server) == 0, 30)
    assert [*Stream(server, request(0, 16))] == server.golden[0][:16]


def test_e12_g4_a_pause_that_keeps_all_changes_no_token(server: Server) -> None:
    streams = [iter(Stream(server, request(number, 300))) for number in range(6)]
    found = [[next(stream)] for stream in streams]
    paused = administer(server, "/pause?mode=keep")
    assert paused["is_paused"]
    assert [replica["replica"] for replica in paused["replicas"]] == [0, 1]
    for replica in paused["replicas"]:
        assert replica["completed_step"] >= replica["accepted_step"]
    generated = server.metric("penstock_generation_tokens_total")
    status, answer = health(server)
    assert (status, answer["state"]) == (503, "paused")
    # In a thread: until there is a token, nothing comes before the first sign of life, after 15 seconds.
    pool = ThreadPoolExecutor(1)
    late = pool.submit(lambda: [*Stream(server, request(0, 16))])
    wait_until(lambda: server.metric("penstock_num_requests_waiting") == 1, 30)
    assert server.metric("penstock_generation_tokens_total") == generated
    assert administer(server, "/resume")["is_paused"] is False
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == [server.golden[number % 3][:300] for number in range(6)]
    assert late.result() == server.golden[0][:16]
    pool.shutdown()


def test_e12_g4_a_pause_can_end_all_and_requests_are_served_after_it(server: Server) -> None:
    streams = [iter(Stream(server, request(number, NUM_TOKENS))) for number in range(8)]
    found = [[next(stream)] for stream in streams]
    administer(server, "/pause?mode=abort")
    for number, (ids, stream) in enumerate(zip(found, streams, strict=True)):
        with pytest.raises(StreamFailedError, match="paused"):
            ids.extend(stream)
        assert ids == server.golden[number % 3][: len(ids)]
    administer(server, "/resume")
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda number: [*Stream(server, request(number, 64))], range(8)))
    assert again == [server.golden[number % 3][:64] for number in range(8)]


@pytest.mark.soak
@IN_ORDER
def test_e12_g4_a_pause_outlives_the_core_and_a_stage(server: Server) -> None:
    streams = [iter(Stream(server, request(number, 300))) for number in range(4)]
    found = [[next(stream)] for stream in streams]
    administer(server, "/pause?mode=keep")
    before = server.num_recoveries
    named(server, "penstock replica 0 core").send_signal(signal.SIGKILL)
    named(server, "penstock replica 1 stage 0 tp 0").send_signal(signal.SIGKILL)
    wait_until(lambda: server.num_recoveries == before + 2, 60)
    generated = server.metric("penstock_generation_tokens_total")
    again = administer(server, "/pause?mode=keep")
    assert len(again["replicas"]) == 2, "both are there, and both are paused"
    assert server.metric("penstock_generation_tokens_total") == generated
    administer(server, "/resume")
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == [server.golden[number % 3][:300] for number in range(4)]


@IN_ORDER
def test_r4_i4_the_loss_of_one_replica_is_not_the_others_affair(server: Server) -> None:
    before = server.num_recoveries
    streams = [iter(Stream(server, REQUESTS[number % 3])) for number in range(4)]
    found = [[next(stream)] for stream in streams]
    others = {
        title_of(process): process.pid for process in server.family() if "replica 0" in title_of(process)
    }
    named(server, "penstock replica 1 stage 1 tp 0").send_signal(signal.SIGKILL)
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == [server.golden[number % 3] for number in range(4)]
    wait_until(lambda: server.num_recoveries == before + 1, 30)
    assert {title_of(p): p.pid for p in server.family() if "replica 0" in title_of(p)} == others
    assert "lost: replica 1 stage 1" in server.output
    assert server.get("/health")


@pytest.mark.soak
def test_i1_two_replicas_of_two_stages_of_two_ranks() -> None:
    with Server(2, "--dp", "2", "--tp", "2") as served:
        titles = {title_of(process) for process in served.family()}
        ranks = {f"penstock replica {r} stage {s} tp {t}" for r in (0, 1) for s in (0, 1) for t in (0, 1)}
        assert ranks <= titles
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda number: [*Stream(served, request(number, 64))], range(6)))
        assert found == [served.golden[number % 3][:64] for number in range(6)]

"""The core and the API process of a running server are killed or stopped: others come (R1 to R7)."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import signal
from threading import Thread

import pytest

from depth import sampled
from disturbed import NUM_TOKENS, REQUESTS, SPARE, Server, Stream, health, named
from served import is_alive, title_of, wait_until

CORE, API = "penstock core", "penstock api"


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


def pids(server: Server, *but: str) -> dict[str, int]:
    """Of the children with titles, which a process has once it has set itself up. A spare comes and goes."""
    titles = {title_of(process): process.pid for process in server.family()}
    but += (SPARE,)
    return {title: pid for title, pid in titles.items() if title.startswith("penstock ") and title not in but}


_chosen = random.Random(20261122)


@pytest.mark.parametrize("after", sampled(sorted(_chosen.sample(range(1, 64), 2)), 1))
def test_r4_streams_go_on_when_the_core_is_killed(server: Server, after: int) -> None:
    lose_core(server, after, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("after", range(1, 65))
def test_r4_streams_go_on_whenever_the_core_is_killed(server: Server, after: int) -> None:
    lose_core(server, after, signal.SIGKILL)


def lose_core(server: Server, after: int, number: int) -> None:
    others, before = pids(server, CORE), server.num_recoveries
    streams = [iter(Stream(server, request)) for request in REQUESTS]
    found = [[next(streams[0]) for _ in range(after)], [], []]
    victim = named(server, CORE)
    victim.send_signal(number)
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == server.golden
    wait_until(lambda: server.num_recoveries == before + 1, 30)
    assert pids(server, CORE) == others, "stages keep their weights"
    assert named(server, CORE).pid != victim.pid
    assert f"core (pid {victim.pid})" in server.output
    assert server.get("/health")


@pytest.mark.soak
def test_r2_a_stopped_core_counts_as_lost_and_all_say_where_they_are() -> None:
    with Server(2, "--heartbeat-limit", "2") as served:
        lose_core(served, 9, signal.SIGSTOP)
        assert re.search(
            r"core \(pid \d+\) has given no sign of life for (?:[2-9]|\d\d)\.\d s", served.output
        )
        assert len(re.findall(r"^(?:Current thread|Thread) 0x", served.output, re.MULTILINE)) >= 2


def test_r5_not_ready_while_there_is_no_core(server: Server) -> None:
    before = server.metric("penstock_core_restarts_total")
    named(server, CORE).kill()
    wait_until(lambda: health(server)[0] == 503, 10)
    code, body = health(server)
    found: list[list[int]] = []
    asked = Thread(target=lambda: found.append([*Stream(server, REQUESTS[0])]))
    asked.start()
    while code == 503:
        assert (body["state"], body["reason"]) == (
            "not_ready",
            "the engine core ended; another one starts.",
        )
        code, body = health(server)
    assert code == 200
    assert server.metric("penstock_core_restarts_total") == before + 1
    asked.join(60)
    assert found == [server.golden[0]], "who comes meanwhile waits"


@pytest.mark.soak
def test_r4_the_core_and_a_stage_at_once(server: Server) -> None:
    stream = iter(Stream(server, REQUESTS[2]))
    found = [next(stream)]
    for title in (CORE, "penstock stage 1 tp 0"):
        named(server, title).kill()
    found += stream
    assert found == server.golden[2]


@pytest.mark.soak
def test_r4_a_stage_that_is_lost_while_another_core_starts(server: Server) -> None:
    """That core waits for stages that will not come, until it hears that the epoch is over."""
    stream = iter(Stream(server, REQUESTS[0]))
    found = [next(stream)]
    victim = named(server, CORE)
    victim.kill()
    wait_until(lambda: f"core (pid {victim.pid}) was killed" in server.output, 10)
    named(server, "penstock stage 1 tp 0").kill()
    found += stream
    assert found == server.golden[0]


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGSTOP], 1))
def test_r1_r13_another_api_process_takes_the_next_connection_and_orphans_end(number: int) -> None:
    with Server(2, "--heartbeat-limit", "2") as server:
        others = pids(server, API)
        orphan = iter(Stream(server, REQUESTS[0]))
        next(orphan)
        victim = named(server, API)
        victim.send_signal(number)
        wait_until(lambda: not is_alive(victim), 30)
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert len(list(orphan)) < NUM_TOKENS - 1, "it was cut"
        assert [*Stream(server, REQUESTS[1])] == server.golden[1], "it waited in the socket that all inherit"
        wait_until(lambda: re.search(r"recovered in \d+\.\d s   API process", server.output), 30)
        assert pids(server, API) == others
        wait_until(lambda: server.metric("penstock_num_requests_running") == 0, 10)
        assert server.metric("penstock_kv_cache_usage_perc") == 0
        family = server.family()
        assert server.stop() == 0
        assert not any(map(is_alive, family))


@pytest.mark.soak
def test_r11_a_core_that_is_lost_while_the_server_drains_is_started_again() -> None:
    with Server(2) as server:
        stream = iter(Stream(server, REQUESTS[0]))
        found = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.output, 10)
        named(server, CORE).kill()
        found += stream
        assert found == server.golden[0]
        assert server.process.wait(30) == 0


def test_r6_nothing_is_left_of_lost_cores_and_fronts(server: Server) -> None:
    def lose_each() -> None:
        for title in (CORE, API):
            before = server.num_recoveries
            named(server, title).kill()
            wait_until(lambda before=before: server.num_recoveries == before + 1, 30)
        assert [*Stream(server, REQUESTS[0])] == server.golden[0]

    lose_each()  # whatever is made once has been made
    before = server.resources(CORE, API)
    lose_each()
    lose_each()
    assert server.resources(CORE, API) == before

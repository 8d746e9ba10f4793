"""Sessions on a running server, of one pipeline and of two: a turn of the `openai` client finds what was
before, through traffic and the loss of processes (row G4)."""

from __future__ import annotations

import itertools
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from depth import sampled, soaked
from disturbed import ADMIN_KEY, REQUESTS, Server, Stream, administer, named
from served import wait_until

BLOCK, NUM_BLOCKS = 16, 64
FIRST = [7 + number % 90 for number in range(150)]
_numbers = itertools.count()  # of prompts that nobody else sends


class Talks(Server):
    """Two stages with a pool that a few requests fill.

    Attributes:
        replicas: their number.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        words = ["--dp", str(replicas)] if replicas > 1 else []
        pool = ("--block-size", str(BLOCK), "--num-blocks", str(NUM_BLOCKS))
        super().__init__(2, *words, *pool, "--admin-key", ADMIN_KEY, "--max-sessions", "2")

    def operate(self, path: str) -> Any:
        return administer(self, path)

    def member(self, replica: int, name: str) -> Any:
        return named(self, f"penstock replica {replica} {name}" if self.replicas > 1 else f"penstock {name}")


@pytest.fixture(scope="module", params=sampled([1, 2], 1))
def server(request: pytest.FixtureRequest) -> Iterator[Talks]:
    with Talks(request.param) as served:
        yield served


@pytest.fixture
def client(server: Talks) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def session(server: Talks) -> Iterator[tuple[str, int]]:
    """A new one, with its replica."""
    opened = server.operate("/open_session?idle_s=600")
    (done,) = opened["replicas"]
    assert done["completed_step"] >= done["accepted_step"]
    yield opened["session_id"], done["replica"]
    server.operate(f"/close_session?session_id={opened['session_id']}")


def turn(client: openai.OpenAI, prompt: list[int], session_id: str = "") -> tuple[int, list[int]]:
    """Tokens of the prompt that were found, and those of the answer."""
    answer = client.completions.create(
        model="demo",
        prompt=prompt,
        temperature=0,
        max_tokens=40,
        extra_body={"session_id": session_id, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    ids = answer.choices[0].model_dump()["token_ids"]
    return answer.usage.prompt_tokens_details.cached_tokens or 0, ids


def traffic(client: openai.OpenAI) -> None:
    """More than the pools hold, of prompts that are all different."""
    for _ in range(8):
        number = next(_numbers)
        prompt = [5 + number // 90, 5 + number % 90, *range(10, 90)] * 5
        client.completions.create(model="demo", prompt=prompt, max_tokens=1)


def whole_blocks(*parts: list[int]) -> int:
    """Tokens of a turn that the next one finds: the last one that was sampled was never run."""
    return (sum(map(len, parts)) - 1) // BLOCK * BLOCK


def test_g4_the_next_turn_finds_the_one_before_with_a_session_and_not_without(
    server: Talks, client: openai.OpenAI, session: tuple[str, int]
) -> None:
    for name in (session[0], ""):
        server.operate("/flush_cache")
        found, answer = turn(client, FIRST, name)
        assert found == 0
        traffic(client)
        second = [*FIRST, *answer, 9, 8, 7]
        found, more = turn(client, second, name)
        assert found == (whole_blocks(FIRST, answer) if name else 0)
        traffic(client)
        third = [*second, *more, 6]
        found, last = turn(client, third, name)
        assert found == (whole_blocks(second, more) if name else 0)
        server.operate("/flush_cache")
        assert turn(client, third)[1] == last, "tokens do not depend on what was kept"


def test_g4_a_chat_of_the_openai_client_names_its_session(
    server: Talks, client: openai.OpenAI, session: tuple[str, int]
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Once upon a time there was a king. " * 4}]

    def ask(session_id: str) -> Any:
        return client.chat.completions.create(
            model="demo", messages=messages, max_tokens=8, extra_body={"session_id": session_id}
        )

    asked = ask(session[0])
    traffic(client)
    found = ask(session[0]).usage.prompt_tokens_details.cached_tokens
    assert found == (asked.usage.prompt_tokens - 1) // BLOCK * BLOCK
    with pytest.raises(openai.NotFoundError) as refused:
        ask("nobody")
    assert (refused.value.param, refused.value.code) == ("session_id", "session_not_found")


def test_g4_sessions_are_opened_and_closed_under_load(server: Talks, client: openai.OpenAI) -> None:
    streams = [iter(Stream(server, request | {"max_tokens": 200})) for request in REQUESTS]
    found = [[next(stream)] for stream in streams]
    names = [server.operate("/open_session")["session_id"] for _ in range(2 * server.replicas)]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.operate("/open_session")
    with refused.value as answer:
        assert (answer.code, json.load(answer)["error"]["code"]) == (429, "too_many_sessions")
    wait_until(lambda: server.metric("penstock_sessions{") == len(names), 30)
    for name in names:
        turn(client, [*FIRST, len(name)], name)
        server.operate(f"/close_session?session_id={name}")
        with pytest.raises(openai.NotFoundError):
            turn(client, FIRST, name)
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == [golden[:200] for golden in server.golden]
    wait_until(lambda: server.metric("penstock_sessions{") == 0, 30)
    assert server.metric("penstock_session_blocks") == 0


def test_g4_the_core_closes_a_session_that_nobody_uses(server: Talks, client: openai.OpenAI) -> None:
    before = server.metric("penstock_sessions_reaped_total")
    name = server.operate("/open_session?idle_s=0.05")["session_id"]
    wait_until(lambda: server.metric("penstock_sessions_reaped_total") == before + 1, 30)
    with pytest.raises(openai.NotFoundError):
        turn(client, FIRST, name)


@pytest.mark.parametrize("how", ["late", *soaked("killed")])
def test_d18_g4_a_session_is_open_when_all_ranks_have_what_was_before_it_behind_them(
    server: Talks, client: openai.OpenAI, how: str
) -> None:
    """One rank of the first replica, where it is opened, stands still meanwhile, or is killed there."""
    before = server.num_recoveries
    rank = server.member(0, "stage 1 tp 0")
    rank.suspend()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(server.operate, "/open_session?session_id=talk")
        wait_until(lambda: server.metric("penstock_sessions{") == 1, 30)
        assert not opening.done()
        if how == "late":
            rank.resume()
        else:
            rank.send_signal(signal.SIGKILL)
        (done,) = opening.result()["replicas"]
    assert (done["replica"], done["error"]) == (0, None)
    assert done["completed_step"] >= done["accepted_step"]
    if how == "killed":
        wait_until(lambda: server.num_recoveries == before + 1, 60)
    _, answer = turn(client, FIRST, "talk")
    traffic(client)
    assert turn(client, [*FIRST, *answer, 9], "talk")[0] == whole_blocks(FIRST, answer)
    server.operate("/close_session?session_id=talk")


@pytest.mark.parametrize("lost", sampled(["core", "stage 0 tp 0"], 1))
def test_g4_a_session_outlives_the_stage_and_the_core_that_are_lost_in_its_middle(
    server: Talks, client: openai.OpenAI, session: tuple[str, int], lost: str
) -> None:
    name, replica = session
    _, answer = turn(client, FIRST, name)
    before = server.num_recoveries
    second = [*FIRST, *answer, 9]
    stream = iter(Stream(server, {"prompt": second, "temperature": 0, "max_tokens": 200, "session_id": name}))
    ids = [next(stream)]
    server.member(replica, lost).send_signal(signal.SIGKILL)
    ids.extend(stream)
    assert len(ids) == 200
    wait_until(lambda: server.num_recoveries == before + 1, 60)
    wait_until(lambda: server.metric("penstock_sessions{") == 1, 30)
    traffic(client)
    third = [*second, *ids, 4]
    found, last = turn(client, third, name)
    assert found == whole_blocks(second, ids)
    server.operate("/flush_cache")
    assert turn(client, third)[1] == last


def test_g4_a_session_outlives_the_front(
    server: Talks, client: openai.OpenAI, session: tuple[str, int]
) -> None:
    _, answer = turn(client, FIRST, session[0])
    traffic(client)
    named(server, "penstock api").send_signal(signal.SIGKILL)
    wait_until(lambda: is_served(server), 60)
    found, _ = turn(client, [*FIRST, *answer, 9], session[0])
    assert found == whole_blocks(FIRST, answer)


def is_served(server: Server) -> bool:
    """By a front that knows all replicas."""
    try:
        view = json.loads(server.get("/debug/pipeline"))
    except OSError:
        return False
    return all(replica["ready"] and replica["step"] is not None for replica in view["replicas"])

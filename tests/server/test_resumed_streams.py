"""`/v1/streams/{request_id}` over sockets: clients that were cut off, come from elsewhere, or have enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fake_engine import FakeEngine
from live_server import LiveServer, events, post_bytes
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig

KEYS = ["key-1", "key-2"]
TEXT = "abcdefgh"
ASK = {"prompt": TEXT, "stream": True, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def held() -> Iterator[LiveServer]:
    """Two tokens come, and the rest when the engine is released."""
    engine = FakeEngine(hold_after=2)
    with LiveServer(engine, config=ServerConfig(api_keys=KEYS, drain_s=5.0)) as live:
        yield live


def headers(key: str = KEYS[0], **more: str) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return {"Authorization": f"Bearer {key}", **named}


def asked(live: LiveServer, request_id: str, extra: str = "X-Penstock-Resumable: true\r\n") -> Any:
    """The connection of a request whose first two tokens have come, and what has come."""
    connection = live.connect()
    lines = f"Authorization: Bearer {KEYS[0]}\r\nX-Request-Id: {request_id}\r\n{extra}"
    connection.sendall(post_bytes("/v1/completions", ASK, lines))
    received = b""
    while b'"text":"b"' not in received:
        received += connection.recv(65536)
    return connection, received


def texts(stream: bytes) -> tuple[str, list[int], bool]:
    """The text of a stream, the numbers of its events, and whether it is complete."""
    blocks = [block for block in stream.decode().split("\n\n") if block]
    numbers = [int(block.partition("\n")[0].removeprefix("id: ")) for block in blocks]
    found = events("".join(block.partition("\n")[2] + "\n\n" for block in blocks).encode())
    chunks = [chunk for chunk in found if chunk != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), numbers, found[-1] == "[DONE]"


def resume(live: LiveServer, request_id: str, sent: dict[str, str]) -> tuple[int, bytes]:
    connection = live._client()
    try:
        connection.request("GET", f"/v1/streams/{request_id}", headers=sent)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_client_that_was_cut_off_gets_the_rest_once(held: LiveServer) -> None:
    connection, received = asked(held, "cut")
    assert b"x-penstock-resumable: true" in received
    connection.close()
    held.call(held.engine.released.set)
    status, raw = resume(held, "cut", headers(last_event_id="1"))
    text, numbers, is_complete = texts(raw)
    assert (status, is_complete) == (200, True)
    assert numbers == list(range(2, 2 + len(numbers)))
    whole, all_numbers, _ = texts(resume(held, "cut", headers())[1])
    assert all_numbers == [1, *numbers]
    assert whole == TEXT
    assert whole.endswith(text)
    held.wait_for(lambda: "id=cut" in held.log.getvalue())
    (line,) = [line for line in held.log.getvalue().splitlines() if "id=cut " in line]
    assert "status=200" in line
    assert "finish=length" in line


def test_the_key_may_come_in_the_other_header(held: LiveServer) -> None:
    connection, _ = asked(held, "either")
    connection.close()
    held.call(held.engine.released.set)
    status, raw = resume(held, "either", {"x-api-key": KEYS[0]})
    assert (status, texts(raw)[0]) == (200, TEXT)
    assert resume(held, "either", {"x-api-key": KEYS[1]})[0] == 404


def test_other_keys_find_nothing_and_neither_does_a_request_that_has_not_asked(held: LiveServer) -> None:
    connection, _ = asked(held, "mine")
    other, received = asked(held, "plain", extra="")
    assert b"x-penstock-resumable" not in received
    assert b"\nid: 1" not in received
    for request_id, key in [("mine", KEYS[1]), ("plain", KEYS[0]), ("nobody", KEYS[0])]:
        status, raw = resume(held, request_id, headers(key))
        assert (status, json.loads(raw)["error"]["code"]) == (404, "stream_not_found")
        response, _ = held.request("DELETE", f"/v1/streams/{request_id}", None, headers(key))
        assert response.status == 404
    assert resume(held, "mine", {})[0] == 401
    for one in (connection, other):
        one.close()
    held.call(held.engine.released.set)


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "9999999999", "\u0662".encode().decode("latin-1")])
def test_a_number_that_is_none_is_refused(held: LiveServer, number: str) -> None:
    connection, _ = asked(held, "odd")
    status, raw = resume(held, "odd", headers(last_event_id=number))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "Last-Event-ID")
    assert resume(held, "odd", headers(last_event_id="99"))[0] == 404
    connection.close()
    held.call(held.engine.released.set)


def test_a_stream_that_is_stopped_ends_in_the_engine(held: LiveServer) -> None:
    connection, _ = asked(held, "enough")
    response, raw = held.request("DELETE", "/v1/streams/enough", None, headers())
    assert (response.status, json.loads(raw)) == (200, {"id": "enough", "was_running": True})
    held.wait_for(lambda: len(held.engine.cancelled) == 1)
    connection.close()


def test_who_reads_an_answer_that_another_client_stops_is_told(held: LiveServer) -> None:
    """So is who comes back later: else the end of what is there would look like that of a whole answer."""
    connection, received = asked(held, "told")
    assert held.request("DELETE", "/v1/streams/told", None, headers())[0].status == 200
    while not received.endswith(b"0\r\n\r\n"):
        chunk = connection.recv(65536)
        assert chunk
        received += chunk
    connection.close()
    _, raw = resume(held, "told", headers(last_event_id="2"))
    for got in (received, raw):
        assert b"[DONE]" not in got
        assert (
            b'"message":"A client stopped this answer.","type":"aborted","param":null,"code":"client_left"'
            in got
        )


def test_it_can_be_switched_off() -> None:
    config = ServerConfig(api_keys=KEYS, limits=Limits(max_resumable_streams=0), drain_s=5.0)
    with LiveServer(FakeEngine(), config=config) as live:
        connection, received = asked(live, "off")
        assert b"x-penstock-resumable" not in received
        connection.close()
        assert resume(live, "off", headers())[0] == 404

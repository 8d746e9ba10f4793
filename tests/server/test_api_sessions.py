"""Sessions over HTTP: opened and closed by administrators, named by requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fake_engine import FakeEngine, Status, stats
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.errors import NotFoundError, OverloadedError, UsageError, WaitTimeoutError
from penstock.kvcache.sessions import unknown_session
from penstock.operations import CloseSession, OpenSession

KEY, ADMIN_KEY = "key-of-a-client-71a2", "key-of-an-administrator-09b3"
AS_CLIENT, AS_ADMIN = ({"Authorization": f"Bearer {key}"} for key in (KEY, ADMIN_KEY))
DONE = {"accepted_step": 5, "completed_step": 7, "error": None, "replica": 0}
BODIES = (
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ("/v1/responses", {"input": "abc"}),
)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    limits = Limits(session_idle_s=90.0, max_session_idle_s=3600.0)
    config = ServerConfig(api_keys=[KEY], admin_keys=[ADMIN_KEY], limits=limits)
    with LiveServer(config=config) as made:
        yield made


def ask(server: LiveServer, path: str) -> tuple[int, Any]:
    response, raw = server.request("POST", path, None, AS_ADMIN)
    return response.status, json.loads(raw)


def test_g4_opening_and_closing_reach_the_engine(server: LiveServer) -> None:
    for query, operation, timeout_s in (
        ("?session_id=talk-1", OpenSession("talk-1", None, 90.0), 60.0),
        (
            "?session_id=A.z_0-9&capacity_tokens=2147483647&idle_s=3600&timeout_s=2.5",
            OpenSession("A.z_0-9", 2**31 - 1, 3600.0),
            2.5,
        ),
        ("?session_id=x&capacity_tokens=1&idle_s=0.5", OpenSession("x", 1, 0.5), 60.0),
    ):
        status, answer = ask(server, f"/open_session{query}")
        assert status == 200
        assert server.engine.operations[-1] == (operation, timeout_s)
        assert answer == {
            "session_id": operation.session_id,
            "capacity_tokens": operation.capacity_tokens,
            "idle_s": operation.idle_s,
            "replicas": [DONE],
        }
    assert ask(server, "/close_session?session_id=talk-1") == (
        200,
        {"session_id": "talk-1", "replicas": [DONE]},
    )
    assert server.engine.operations[-1] == (CloseSession("talk-1"), 60.0)


def test_g4_a_session_without_a_name_gets_one(server: LiveServer) -> None:
    names = {ask(server, "/open_session")[1]["session_id"] for _ in range(3)}
    assert len(names) == 3
    asked = [operation for operation, _ in server.engine.operations]
    assert all(isinstance(operation, OpenSession) and operation.is_new for operation in asked)
    assert {operation.session_id for operation in asked if isinstance(operation, OpenSession)} == names
    for name in names:
        path, body = BODIES[0]
        assert server.request("POST", path, body | {"session_id": name}, AS_CLIENT)[0].status == 200


def test_g4_whoever_waits_too_long_is_told_the_name(server: LiveServer) -> None:
    server.engine.failure = WaitTimeoutError("the operation is not complete after 1 s.")
    status, answer = ask(server, "/open_session")
    assert (status, answer["error"]["code"]) == (503, "peer_timeout")
    (operation,) = [asked for asked, _ in server.engine.operations]
    assert isinstance(operation, OpenSession)
    assert f"session {operation.session_id}: the operation is not complete" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("open_session?session_id=", "session_id"),
        ("open_session?session_id=a%20b", "session_id"),
        ("open_session?session_id=a%0A", "session_id"),
        ("open_session?session_id=%C3%A4", "session_id"),
        ("open_session?session_id=" + "x" * 65, "session_id"),
        ("open_session?capacity_tokens=0", "capacity_tokens"),
        ("open_session?capacity_tokens=2147483648", "capacity_tokens"),
        ("open_session?capacity_tokens=all", "capacity_tokens"),
        ("open_session?idle_s=0", "idle_s"),
        ("open_session?idle_s=-1", "idle_s"),
        ("open_session?idle_s=nan", "idle_s"),
        ("open_session?idle_s=inf", "idle_s"),
        ("open_session?idle_s=3600.5", "idle_s"),
        ("open_session?timeout_s=0", "timeout_s"),
        ("close_session", "session_id"),
        ("close_session?session_id=", "session_id"),
        ("close_session?session_id=a/b", "session_id"),
    ],
)
def test_g4_bad_words_are_refused_by_name(server: LiveServer, query: str, param: str) -> None:
    status, answer = ask(server, f"/{query}")
    assert status == 400
    assert answer["error"]["param"] == param
    assert server.engine.operations == []


@pytest.mark.parametrize(
    ("path", "failure", "status"),
    [
        ("/close_session?session_id=s", unknown_session("s"), 404),
        ("/open_session?session_id=s", OverloadedError("64 are open.", code="too_many_sessions"), 429),
    ],
)
def test_g4_what_the_core_refuses_is_a_typed_error(
    server: LiveServer, path: str, failure: NotFoundError | OverloadedError, status: int
) -> None:
    server.engine.failure = failure
    found, answer = ask(server, path)
    assert found == status
    assert answer["error"]["code"] == failure.code
    _, raw = server.request("GET", "/openapi.json", None, AS_ADMIN)
    operation = json.loads(raw)["paths"][path.partition("?")[0]]["post"]
    assert str(status) in operation["responses"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_g4_a_request_names_its_session(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    for given, expected in (("talk-1", "talk-1"), ("", ""), (None, "")):
        response, _ = server.request("POST", path, body | {"session_id": given}, AS_CLIENT)
        assert response.status == 200
        assert server.engine.added[-1][2].session_id == expected
    for bad in ("a b", "x" * 65, "ä", "a\n", 7, ["a"], True):
        response, raw = server.request("POST", path, body | {"session_id": bad}, AS_CLIENT)
        assert response.status == 400, bad
        assert json.loads(raw)["error"]["param"] == "session_id"


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_g4_a_session_that_is_not_open_is_404_before_anything_is_streamed(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    with LiveServer(FakeEngine(fail_after=0, failure=unknown_session("talk-1"))) as server:
        asked = body | {"session_id": "talk-1", "stream": stream}
        response, raw = server.request("POST", path, asked)
        assert response.status == 404
        error = json.loads(raw)["error"]
        assert (error["param"], error["code"]) == ("session_id", "session_not_found")
        assert "leave session_id out" in error["message"]


def test_g4_what_has_no_sessions_refuses_them_by_name(server: LiveServer) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "session_params": {"id": "s"}}, "session_params"),
        ("/v1/embeddings", {"input": "a", "session_id": "s"}, "session_id"),
    ):
        response, raw = server.request("POST", path, body, AS_CLIENT)
        assert response.status == 400
        error = json.loads(raw)["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_g4_how_many_are_open_is_shown(server: LiveServer) -> None:
    server.engine.state = Status(
        stats=stats(sessions_num_open=3, sessions_kept_blocks=41, sessions_num_reaped=2)
    )
    _, raw = server.request("GET", "/metrics", None, AS_CLIENT)
    for line in (
        b'penstock_sessions{model_name="fake"} 3.0',
        b'penstock_session_blocks{model_name="fake"} 41.0',
        b'penstock_sessions_reaped_total{model_name="fake"} 2.0',
    ):
        assert line in raw
    _, raw = server.request("GET", "/debug/pipeline", None, AS_CLIENT)
    (replica,) = json.loads(raw)["replicas"]
    assert (replica["sessions"], replica["kv"]["l1"]["session_blocks"]) == (3, 41)


@pytest.mark.parametrize(
    "bad",
    [
        {"session_idle_s": 0.0},
        {"session_idle_s": float("nan")},
        {"max_session_idle_s": float("inf")},
        {"session_idle_s": 100.0, "max_session_idle_s": 99.0},
    ],
)
def test_g4_bad_times_of_sessions_are_refused_and_named(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError) as raised:
        Limits(**bad)
    assert raised.value.param == next(iter(bad))

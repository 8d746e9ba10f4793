"""What administrators may ask over HTTP, and that nobody else may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fake_engine import FakeEngine, Status, fake_model, stats
from live_server import LiveServer, events, post_bytes
from penstock.config.server import ServerConfig
from penstock.errors import AbortedError, StoreError, UsageError, WaitTimeoutError
from penstock.operations import Abort, FlushCache, Pause, Resume, SlowDown
from penstock.server.app import create_app
from penstock.server.http.access import ADMIN_PATHS, ApiKeys

KEY, ADMIN_KEY = "key-of-a-client-11f0", "key-of-an-administrator-8c1d"
AS_CLIENT, AS_ADMIN = ({"Authorization": f"Bearer {key}"} for key in (KEY, ADMIN_KEY))


DONE = {"accepted_step": 5, "completed_step": 7, "error": None, "replica": 0}


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(config=ServerConfig(api_keys=[KEY], admin_keys=[ADMIN_KEY])) as made:
        yield made


def served_paths(config: ServerConfig) -> set[str]:
    return {
        getattr(route, "path", "") for route in create_app(FakeEngine(), config, fake_model()).routes.routes
    }


def test_rule_4_without_an_admin_key_there_are_no_admin_routes(live: LiveServer) -> None:
    assert ADMIN_PATHS.isdisjoint(served_paths(ServerConfig(api_keys=[KEY])))
    assert served_paths(ServerConfig(admin_keys=[KEY])) >= ADMIN_PATHS
    for path in ADMIN_PATHS:
        for method in ("GET", "POST"):
            assert live.request(method, path)[0].status == 404


def test_rule_4_only_an_admin_key_opens_them(server: LiveServer) -> None:
    for path in ADMIN_PATHS:
        for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
            for headers in ({}, AS_CLIENT, {"Authorization": "Bearer wrong"}):
                assert server.request(method, path, None, headers)[0].status == 401, (method, path)
    assert server.engine.operations == []
    assert server.request("GET", "/v1/models", None, AS_ADMIN)[0].status == 200, "it opens the rest as well"
    assert server.request("GET", "/v1/models", None, AS_CLIENT)[0].status == 200


@pytest.mark.parametrize("path", ["/pause%0A", "/pause%0a?mode=abort", "/resume%0D", "/is_paused%00"])
def test_rule_4_no_other_name_of_an_admin_route_leads_there(path: str) -> None:
    """A router's pattern that ends with `$` passes over a line feed."""
    for keys in ([], [KEY]):
        with LiveServer(config=ServerConfig(api_keys=keys, admin_keys=[ADMIN_KEY])) as server:
            for method in ("GET", "POST"):
                assert server.request(method, path, None, AS_CLIENT)[0].status == 404
            assert server.engine.operations == []


def test_rule_4_an_admin_key_alone_locks_nothing_else() -> None:
    with LiveServer(config=ServerConfig(admin_keys=[ADMIN_KEY])) as server:
        assert server.request("GET", "/v1/models")[0].status == 200
        assert server.request("POST", "/pause")[0].status == 401
        assert server.request("POST", "/pause", None, AS_ADMIN)[0].status == 200


@pytest.mark.parametrize(("keys", "admin_keys"), [([], [" "]), (["same"], ["same"])])
def test_an_admin_key_is_a_secret_of_its_own(keys: list[str], admin_keys: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        ApiKeys(keys, admin_keys)
    assert raised.value.param == "admin_keys"


def test_g4_pause_and_resume_reach_the_engine(server: LiveServer) -> None:
    for path, operation, timeout_s in (
        ("/pause", Pause("keep"), 60.0),
        ("/pause?mode=wait&timeout_s=1.5", Pause("wait"), 1.5),
        ("/pause?mode=abort", Pause("abort"), 60.0),
        ("/resume?timeout_s=3600", Resume(), 3600.0),
    ):
        response, raw = server.request("POST", path, None, AS_ADMIN)
        assert response.status == 200
        assert json.loads(raw) == {"is_paused": isinstance(operation, Pause), "replicas": [DONE]}
        assert server.engine.operations[-1] == (operation, timeout_s)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("mode=stop", "mode"),
        ("mode=", "mode"),
        ("timeout_s=0", "timeout_s"),
        ("timeout_s=3601", "timeout_s"),
        ("timeout_s=nan", "timeout_s"),
        ("timeout_s=x", "timeout_s"),
    ],
)
def test_a_bad_word_is_refused_by_name(server: LiveServer, query: str, param: str) -> None:
    response, raw = server.request("POST", f"/pause?{query}", None, AS_ADMIN)
    assert response.status == 400
    assert json.loads(raw)["error"]["param"] == param
    assert server.engine.operations == []


@pytest.mark.parametrize(
    ("method", "path", "query", "name", "known"),
    [
        ("POST", "/pause", "mod=abort", "mod", "It takes mode and timeout_s."),
        ("POST", "/pause", "mode=abort&Timeout_s=1", "Timeout_s", "It takes mode and timeout_s."),
        ("POST", "/abort", "request_id=a&every=true", "every", "It takes request_id and all and timeout_s."),
        ("POST", "/resume", "mode=keep", "mode", "It takes timeout_s."),
        ("POST", "/flush_cache", "stores=true", "stores", "It takes store and timeout_s."),
        ("GET", "/is_paused", "timeout_s=1", "timeout_s", "It takes no parameters."),
    ],
)
def test_a_name_that_a_route_does_not_have_is_refused_with_those_that_it_has(
    server: LiveServer, method: str, path: str, query: str, name: str, known: str
) -> None:
    response, raw = server.request(method, f"{path}?{query}", None, AS_ADMIN)
    assert response.status == 400
    error = json.loads(raw)["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert error["message"] == f"{name!r} is not a parameter of {path}. {known}"
    assert server.engine.operations == []


@pytest.mark.parametrize(
    ("path", "param", "code", "told"),
    [
        ("/pause?mode=keep&mode=wait", "mode", "invalid_value", "mode is given 2 times. Give it once."),
        ("/abort?all=true&all=false", "all", "invalid_value", "all is given 2 times. Give it once."),
        ("/abort?request_id=a&all=true", "request_id", "invalid_combination", "give either request_id"),
        ("/abort", "request_id", "missing_required_parameter", "give either request_id"),
        ("/slow_down", "interval_ms", "missing_required_parameter", "interval_ms is required."),
        ("/close_session", "session_id", "missing_required_parameter", "session_id is required."),
    ],
)
def test_what_is_given_twice_or_not_at_all_is_refused(
    server: LiveServer, path: str, param: str, code: str, told: str
) -> None:
    response, raw = server.request("POST", path, None, AS_ADMIN)
    error = json.loads(raw)["error"]
    assert (response.status, error["param"], error["code"]) == (400, param, code)
    assert error["message"].startswith(told)
    assert server.engine.operations == []


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_no_admin_route_takes_a_name_that_it_does_not_have(server: LiveServer, path: str) -> None:
    method = "GET" if path == "/is_paused" else "POST"
    response, raw = server.request(method, f"{path}?x%00{'y' * 900}=1", None, AS_ADMIN)
    assert response.status == 400
    assert json.loads(raw)["error"]["code"] == "unknown_parameter"
    assert server.engine.operations == []


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS - {"/is_paused"}))
def test_a_body_is_refused_for_what_it_asks_is_not_read(server: LiveServer, path: str) -> None:
    response, raw = server.request("POST", path, b'{"timeout_s": 5}', AS_ADMIN)
    assert response.status == 400
    error = json.loads(raw)["error"]
    assert (error["param"], error["code"]) == ("body", "unexpected_body")
    assert error["message"].startswith(f"{path} takes no body. Put the parameters into the query")
    assert server.engine.operations == []
    for nothing in (b"", b"{}"):
        assert server.request("POST", "/resume", nothing, AS_ADMIN)[0].status == 200


def test_g4_h16_a_flush_reaches_the_engine_and_says_nothing_of_pauses(server: LiveServer) -> None:
    for query, operation, timeout_s in (
        ("", FlushCache(), 60.0),
        ("?store=false", FlushCache(), 60.0),
        ("?store=true&timeout_s=300", FlushCache(store=True), 300.0),
    ):
        response, raw = server.request("POST", f"/flush_cache{query}", None, AS_ADMIN)
        assert response.status == 200
        assert json.loads(raw) == {"replicas": [DONE]}
        assert server.engine.operations[-1] == (operation, timeout_s)
    response, raw = server.request("POST", "/flush_cache?store=perhaps", None, AS_ADMIN)
    assert response.status == 400
    assert json.loads(raw)["error"]["param"] == "store"


def test_h16_a_store_that_could_not_be_emptied_is_a_typed_error(server: LiveServer) -> None:
    server.engine.failure = StoreError("KV store /kv: gone.", remedy="Check it.")
    response, raw = server.request("POST", "/flush_cache?store=true", None, AS_ADMIN)
    assert response.status == 503
    error = json.loads(raw)["error"]
    assert (error["code"], error["message"]) == ("store_failed", "KV store /kv: gone. Check it.")


def test_an_operation_that_takes_too_long_is_503(server: LiveServer) -> None:
    server.engine.failure = WaitTimeoutError("the operation is not complete after 1 s.")
    response, raw = server.request("POST", "/pause", None, AS_ADMIN)
    assert response.status == 503
    assert "not complete" in json.loads(raw)["error"]["message"]


def test_a_paused_engine_is_not_ready_and_says_so(server: LiveServer) -> None:
    for told, is_paused in ((None, False), (stats(paused=False), False), (stats(paused=True), True)):
        server.engine.state = Status(stats=told)
        response, raw = server.request("GET", "/health")
        assert response.status == (503 if is_paused else 200)
        assert json.loads(raw)["state"] == ("paused" if is_paused else "ready")
        _, raw = server.request("GET", "/is_paused", None, AS_ADMIN)
        assert json.loads(raw) == {"is_paused": is_paused}
    _, raw = server.request("GET", "/metrics", None, AS_ADMIN)
    assert b'penstock_paused{model_name="fake"} 1.0' in raw


def test_the_description_says_which_key_opens_what(server: LiveServer) -> None:
    _, raw = server.request("GET", "/openapi.json", None, AS_ADMIN)
    document = json.loads(raw)
    for path in ADMIN_PATHS:
        (operation,) = document["paths"][path].values()
        assert operation["security"] == [{"key": []}, {"key_header": []}]
        assert {"200", "400", "401", "503"} <= set(operation["responses"])
    assert "Applied" in document["components"]["schemas"]


def test_g4_an_abort_names_requests_as_logs_headers_and_answers_do() -> None:
    """The client's own id and the id of the answer lead to what the engine calls the sequences."""
    config = ServerConfig(admin_keys=[ADMIN_KEY])
    with LiveServer(FakeEngine(hold_after=1), config=config) as server:
        connection = server.connect()
        named = post_bytes("/v1/completions", {"prompt": ["a", "b"]}, "x-request-id: mine-7\r\n")
        connection.sendall(named)
        server.wait_for(lambda: len(server.engine.added) == 2)
        own = server.engine.added[0][0].removesuffix("-0")
        for asked, expected in (
            ("mine-7", {"mine-7", own}),
            (f"cmpl-{own}", {f"cmpl-{own}", own}),
            (f"{own}-1", {f"{own}-1"}),
            ("mine", {"mine"}),
        ):
            response, raw = server.request("POST", f"/abort?request_id={asked}", None, AS_ADMIN)
            assert response.status == 200
            assert json.loads(raw) == {"replicas": [DONE | {"aborted": []}]}
            operation, timeout_s = server.engine.operations[-1]
            assert isinstance(operation, Abort)
            assert (set(operation.request_ids or ()), timeout_s) == (expected, 60.0)
        server.request("POST", "/abort?request_id=a&request_id=b&timeout_s=2", None, AS_ADMIN)
        assert server.engine.operations[-1] == (Abort(["a", "b"]), 2.0)
        server.request("POST", "/abort?all=true", None, AS_ADMIN)
        assert server.engine.operations[-1] == (Abort(None), 60.0)
        connection.close()


@pytest.mark.parametrize(
    "query",
    [
        "",
        "all=false",
        "all=true&request_id=a",
        "request_id=",
        "request_id=" + "x" * 161,
        "&".join(["request_id=a"] * 65),
    ],
)
def test_g4_an_abort_without_clear_words_is_refused(server: LiveServer, query: str) -> None:
    response, raw = server.request("POST", f"/abort?{query}", None, AS_ADMIN)
    assert response.status == 400
    assert json.loads(raw)["error"]["param"] == "request_id"
    assert server.engine.operations == []


_TALK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", _TALK),
        ("completions", {"prompt": "a", "max_tokens": 1}),
        ("responses", {"input": "a"}),
        ("messages", _TALK),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_g4_an_abort_takes_the_id_of_any_answer(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    status, answer = server.post(f"/v1/{path}", {"model": "fake"} | body, AS_CLIENT)
    assert status == 200
    ((own, *_),) = server.engine.added
    server.request("POST", f"/abort?request_id={answer['id']}", None, AS_ADMIN)
    operation, _ = server.engine.operations[-1]
    assert isinstance(operation, Abort)
    assert own.removesuffix("-0") in (operation.request_ids or ())


@pytest.mark.parametrize("stream", [False, True])
def test_g4_whoever_is_aborted_is_told_once_and_not_to_come_again(stream: bool) -> None:
    """499, which clients do not repeat by themselves; in a stream an error in place of a finish."""
    failure = AbortedError("an administrator aborted this request.", code="aborted_by_administrator")
    with LiveServer(FakeEngine(fail_after=2, failure=failure)) as server:
        response, raw = server.request("POST", "/v1/completions", {"prompt": "abcdef", "stream": stream})
        assert response.status == (200 if stream else 499)
        found = events(raw)[-1] if stream else json.loads(raw)
        assert (found["error"]["type"], found["error"]["code"]) == ("aborted", "aborted_by_administrator")
        assert b"[DONE]" not in raw
        assert b'"finish_reason":"' not in raw


def test_g4_a_pace_reaches_the_engine_within_its_bounds(server: LiveServer) -> None:
    for interval_ms in (0, 1, 10_000):
        response, raw = server.request("POST", f"/slow_down?interval_ms={interval_ms}", None, AS_ADMIN)
        assert response.status == 200
        assert json.loads(raw) == {"interval_ms": interval_ms, "replicas": [DONE]}
        assert server.engine.operations[-1] == (SlowDown(interval_ms), 60.0)
    server.engine.operations.clear()
    for query in ("", "interval_ms=", "interval_ms=-1", "interval_ms=10001", "interval_ms=nan"):
        response, raw = server.request("POST", f"/slow_down?{query}", None, AS_ADMIN)
        assert response.status == 400
        assert json.loads(raw)["error"]["param"] == "interval_ms"
    assert server.engine.operations == []
    server.engine.state = Status(stats=stats(plan_interval_ms=250, open_operations=3))
    _, raw = server.request("GET", "/metrics", None, AS_ADMIN)
    assert b'penstock_plan_interval_seconds{model_name="fake"} 0.25' in raw
    assert b'penstock_operations_open{model_name="fake"} 3.0' in raw
    _, raw = server.request("GET", "/debug/pipeline", None, AS_ADMIN)
    assert json.loads(raw)["replicas"][0]["plan_interval_ms"] == 250

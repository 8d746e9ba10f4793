"""The security rules that concern the HTTP door of one host; each test is named by its rule.

Rules whose tests stand elsewhere: the Host and Origin policy, log lines (`test_api_access`), 500 bodies
(`test_api_stream_grammar`), open addresses (`test_listening`), headers of checkpoints (`test_checkpoint`),
dangerous calls (`test_project`), sockets and connections of real processes (`test_security_served`).
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fake_engine import FakeEngine, fake_model
from live_server import LiveServer
from penstock.config.server import ServerConfig
from penstock.errors import AuthenticationError
from penstock.server.app import create_app
from penstock.server.http.access import OPEN_PATHS, PAGE_PATHS, ApiKeys

KEYS = ["key-one-5f0c", "key-two-91ab"]
GOOD = {"Authorization": f"Bearer {KEYS[0]}"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer(config=ServerConfig(api_keys=KEYS)) as server:
        yield server


def served_paths() -> list[str]:
    app = create_app(FakeEngine(), ServerConfig(api_keys=KEYS), fake_model())
    paths = [getattr(route, "path", "") for route in app.routes.routes]
    return [path.replace("{model_id:path}", "fake").replace("{request_id}", "a") for path in paths]


# Rule 4: default deny


def test_rule_4_no_path_and_no_method_answers_without_a_key(locked: LiveServer) -> None:
    """GHSA-g9rw-rvrw-h747: no route has to take care of it, and paths that do not exist tell nothing."""
    paths = [*dict.fromkeys(served_paths()), "/page", "/docs", "/redoc", "/v1", "/v1/embeddings", "/pause"]
    assert {"/v1/chat/completions", "/openapi.json", "/metrics"} < set(paths)
    for path in paths:
        for method in METHODS:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEYS[0]}"}):
                response, raw = locked.request(method, path, None, headers)
                if path in OPEN_PATHS | PAGE_PATHS:
                    assert response.status == (200 if method in ("GET", "HEAD") else 405), (method, path)
                    continue
                assert response.status == 401, (method, path)
                assert response.getheader("allow") is None
                assert method == "HEAD" or json.loads(raw)["error"]["type"] == "authentication_error"
            assert locked.request(method, path, None, GOOD)[0].status != 401, (method, path)
    assert locked.request("GET", "/v1/models", None, {"Authorization": f"Bearer {KEYS[1]}"})[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/health/",
        "//health",
        "/HEALTH",
        "/health/ready/",
        "/health/../v1/models",
        "/health/live/..%2f..%2fv1/models",
        "/v1/models?/health",
        "/v1/models;/health",
        "/v1/models#/health",
        "/health%00",
        "/health%2Flive",
        "http://localhost/v1/models",
        "/metrics/../health",
    ],
)
def test_rule_4_no_spelling_of_an_open_path_opens_another(locked: LiveServer, path: str) -> None:
    response, raw = locked.request("GET", path)
    if path == "/health%2Flive":  # decoded before it is looked at, by the key check and by the router alike
        assert (response.status, json.loads(raw)["state"]) == (200, "ready")
    else:
        assert response.status == 401


@pytest.mark.parametrize(
    "value",
    [
        "",
        KEYS[0],
        f"Basic {KEYS[0]}",
        f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0][:-1]}",
        f"Bearer {KEYS[0].upper()}",
        f"Bearer {KEYS[0]},{KEYS[1]}",
        "Bearer",
        "Bearer None",
        "Bearer null",
        "Bearer *",
    ],
)
def test_rule_4_a_wrong_key_opens_nothing(locked: LiveServer, value: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/openapi.json")):
        assert locked.request(method, path, None, {"Authorization": value})[0].status == 401


def test_rule_4_of_two_keys_in_one_request_the_first_counts(locked: LiveServer) -> None:
    """So that whoever checks in front of us and we look at the same one."""
    for keys, status in ((["wrong", KEYS[0]], b"401"), ([KEYS[0], "wrong"], b"200")):
        lines = "".join(f"Authorization: Bearer {key}\r\n" for key in keys)
        with locked.connect() as connection:
            connection.sendall(f"GET /version HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
            assert connection.recv(12).split()[1] == status


def test_rule_4_a_key_behind_the_body_opens_nothing(locked: LiveServer) -> None:
    """Fields after a chunked body are no headers, though the same parser reads them."""
    body = f"Transfer-Encoding: chunked\r\n\r\n0\r\nAuthorization: Bearer {KEYS[0]}\r\n\r\n"
    with locked.connect() as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{body}".encode())
        assert connection.recv(12).split()[1] == b"401"


def test_rule_4_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-59425: every key is compared, whole, whichever fits."""
    compared = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = ApiKeys(["one", "two", "three"])
    keys.check("/metrics", [(b"authorization", b"Bearer one")])
    with pytest.raises(AuthenticationError):
        keys.check("/metrics", [(b"authorization", b"Bearer nothing")])
    keys.check("/metrics", [(b"authorization", b"Bearer nothing"), (b"x-api-key", b"three")])
    expected = [b"one", b"two", b"three"]
    given = [b"one", b"nothing", b"nothing", b"three"]
    assert compared == [(one, key) for one in given for key in expected]


def test_rule_4_keys_are_in_no_answer_and_in_no_log_line(locked: LiveServer) -> None:
    said = b""
    for path in [*served_paths(), "/nothing/" + KEYS[1], "/v1/models/" + KEYS[1]]:
        for method in ("GET", "POST"):
            if KEYS[1] not in path:
                said += locked.request(method, path, b"{}", GOOD)[1]
            else:
                locked.request(method, path, b"{}", GOOD)
    assert b"penstock" in said
    for key in KEYS:
        assert key.encode() not in said
    assert KEYS[0] not in locked.log.getvalue()
    assert KEYS[0] not in repr(ApiKeys(KEYS))


# Rule 5: browsers


def test_rule_5_every_method_of_a_foreign_page_is_refused_before_anything_else(locked: LiveServer) -> None:
    """Ray CVE-2026-27482: DELETE too. A preflight gets no permission, so that no page may send a key."""
    for path in dict.fromkeys(served_paths()):
        for method in METHODS:
            response, _ = locked.request(method, path, b"{}", GOOD | {"Origin": "http://evil.example"})
            assert response.status == 403, (method, path)
            names = {name.lower() for name, _ in response.getheaders()}
            assert not [name for name in names if name.startswith("access-control")]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_rule_5_a_form_of_a_foreign_page_starts_nothing(kind: str) -> None:
    """Bodies of these types are sent by pages without asking first; the origin tells."""
    with LiveServer() as live:
        for origin in ("http://evil.example", "null", "http://localhost.evil.example", "http://localhost:1"):
            headers = {"Content-Type": kind, "Origin": origin}
            assert live.request("POST", "/v1/completions", b'{"prompt": "a"}', headers)[0].status == 403
        assert live.engine.added == []


def test_rule_5_a_name_that_was_bound_to_this_machine_is_refused(live: LiveServer) -> None:
    """DNS rebinding (Ollama CVE-2024-28224): the page's own name is in Host, and Origin agrees with it."""
    for path in ("/v1/models", "/health", "/openapi.json"):
        headers = {"Host": "rebound.example", "Origin": "http://rebound.example"}
        assert live.request("GET", path, None, headers)[0].status == 403


def test_rule_5_answers_can_be_shown_nowhere_and_run_nothing(live: LiveServer) -> None:
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("GET", "/nothing", None),
        ("POST", "/v1/completions", {"prompt": "<script>alert(1)</script>"}),
        ("POST", "/v1/completions", {"prompt": "a", "stream": True}),
        ("POST", "/v1/completions", {}),
    ):
        response, _ = live.request(method, path, body)
        assert response.getheader("content-security-policy") == "default-src 'none'; frame-ancestors 'none'"
        assert response.getheader("x-content-type-options") == "nosniff"
        assert "html" not in (response.getheader("content-type") or "")
        assert response.getheader("set-cookie") is None
        assert response.getheader("server") is None


# Rules 7 and 8: URLs and paths mean nothing


def test_rule_7_no_url_of_a_request_is_fetched(live: LiveServer) -> None:
    """GHSA-6c43-jx72-v86v, CVE-2026-24779: wherever a URL stands, nobody calls it."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        part = {"type": "image_url", "image_url": {"url": url}}
        bodies: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": [part]}]},
            {"messages": [{"role": "user", "content": url, "name": url}]},
            {"messages": [{"role": "user", "content": "x"}], "model": url},
            {"messages": [{"role": "user", "content": "x"}], "user": url, "image_url": url, "$ref": url},
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"$ref": url}},
        ]
        statuses = [live.post("/v1/chat/completions", body)[0] for body in bodies]
        live.request("GET", "/v1/models/" + url)
        assert statuses == [400, 200, 404, 200, 400]
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..%2f..%2fetc/passwd",
        "%2e%2e/fake",
        "fake/",
        "fake%00",
        "file:///etc/passwd",
    ],
)
def test_rule_8_a_models_name_is_no_path(live: LiveServer, name: str) -> None:
    response, raw = live.request("GET", "/v1/models/" + name)
    assert response.status == 404
    assert b"root:" not in raw
    assert live.post("/v1/completions", {"prompt": "a", "model": name})[0] == 404


def test_rule_8_no_other_route_takes_a_name() -> None:
    app = create_app(FakeEngine(), ServerConfig(), fake_model())
    paths = [getattr(route, "path", "") for route in app.routes.routes]
    stream = "/v1/streams/{request_id}"  # which is looked up, and is a file of nobody
    assert [path for path in paths if "{" in path] == [stream, stream, "/v1/models/{model_id:path}"]

"""Keys, hosts and origins; request ids; error objects for what no route answers; log lines."""

from __future__ import annotations

import json

import pytest

from fake_engine import FakeEngine, fake_model
from live_server import LiveServer
from penstock.config.server import ServerConfig
from penstock.errors import AuthenticationError, UsageError
from penstock.process.listening import listen
from penstock.server.app import create_app
from penstock.server.http.access import ApiKeys, HostPolicy, is_loopback
from penstock.server.http.errors import ForbiddenError
from penstock.server.http.request_log import RequestLog, escape, json_line


def test_keys_compare_whole_and_in_any_case_of_the_scheme() -> None:
    keys = ApiKeys(["abc"])
    for value in (b"Bearer abc", b"bearer abc ", b"BEARER  abc"):
        keys.check("/metrics", [(b"authorization", value)])
    keys.check("/metrics", [(b"x-api-key", b"abc")])
    keys.check("/metrics", [(b"authorization", b"Bearer other"), (b"x-api-key", b"abc")])
    for value in (b"", b"ab", b"Bearer abc", b"abcd"):
        with pytest.raises(AuthenticationError):
            keys.check("/metrics", [(b"x-api-key", value)])
    for value in (b"", b"abc", b"Bearer ab", b"Bearer abcd", b"Bearer ABC", b"Bearer \xff"):
        with pytest.raises(AuthenticationError):
            keys.check("/metrics", [(b"authorization", value)])
    with pytest.raises(AuthenticationError):
        keys.check("/health/", [])
    ApiKeys([]).check("/metrics", [])


@pytest.mark.parametrize(
    ("bound", "headers", "allowed"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}, True),
        ("127.0.0.1", {"host": "127.0.0.1"}, True),
        ("127.0.0.1", {"host": "[::1]:8000"}, True),
        ("127.0.0.1", {}, True),
        ("127.0.0.1", {"host": "evil.example:8000"}, False),
        ("127.0.0.1", {"host": "localhost.evil.example"}, False),
        ("127.0.0.1", {"host": "127.0.0.1.nip.io"}, False),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "http://localhost:3000"}, False),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "https://evil.example"}, False),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "null"}, False),
        ("0.0.0.0", {"host": "box.example:8000"}, True),
        ("0.0.0.0", {"host": "box.example:8000", "origin": "https://box.example:8000"}, True),
        ("0.0.0.0", {"host": "box.example:8000", "origin": "https://evil.example"}, False),
    ],
)
def test_host_and_origin(bound: str, headers: dict[str, str], allowed: bool) -> None:
    policy = HostPolicy(bound)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    if allowed:
        policy.check(raw)
    else:
        with pytest.raises(ForbiddenError):
            policy.check(raw)


def test_a_name_that_the_operator_allows_is_a_host_and_others_are_refused_with_what_he_can_do() -> None:
    """Issue 25, point 17. Clients in containers call the machine `host.docker.internal`; the refusal told
    nobody of the flag."""
    policy = HostPolicy("127.0.0.1", allowed_hosts=["host.docker.internal", "Box"])
    for name in (
        "host.docker.internal",
        "host.docker.internal:8000",
        "HOST.docker.internal",
        "box",
        "localhost",
    ):
        policy.check([(b"host", name.encode())])
    for name in ("docker.internal", "host.docker.internal.evil.example", "evil.example"):
        with pytest.raises(ForbiddenError) as raised:
            policy.check([(b"host", name.encode())])
        assert raised.value.code == "host_not_allowed"
        assert raised.value.remedy.endswith(
            "The operator can allow another name, such as host.docker.internal, with --allowed-hosts."
        )


def test_allowed_hosts_reach_the_door_and_a_refusal_is_named_in_the_log() -> None:
    """Issue 25, point 17."""
    with LiveServer(config=ServerConfig(allowed_hosts=["host.docker.internal"])) as live:
        for host, status in (("host.docker.internal:8000", 200), ("other.docker.internal:8000", 403)):
            assert live.request("GET", "/v1/models", None, {"Host": host})[0].status == status
        live.wait_for(lambda: "status=403" in live.log.getvalue())
        assert "error=host_not_allowed" in live.log.getvalue()


@pytest.mark.parametrize(
    "name", ["", "*", "*.internal", "http://box", "box:8000", "a b", "box\n", "a,b", "-a"]
)
def test_what_is_no_host_name_is_refused_at_the_start(name: str) -> None:
    """Issue 25, point 17."""
    config = ServerConfig(port=0, allowed_hosts=["box", name])
    for start in (lambda: listen(config), lambda: create_app(FakeEngine(), config, fake_model())):
        with pytest.raises(UsageError, match=r"allowed_hosts\[1\] is ") as raised:
            start()
        assert raised.value.param == "allowed_hosts"
        assert "--allowed-hosts" in raised.value.remedy


def test_loopback_names() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "10.0.0.1", "localhost.", "::"))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/page", 404),
        ("GET", "/v1/rerank", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/" + "%2e%2e/" * 3, 404),
    ],
)
def test_what_no_route_answers_is_an_error_object(
    live: LiveServer, method: str, path: str, status: int
) -> None:
    response, raw = live.request(method, path)
    assert response.status == status
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if status == 405:
        assert response.getheader("allow")


def test_request_ids_go_in_and_out_and_into_the_log(live: LiveServer) -> None:
    response, _ = live.request("POST", "/v1/completions", {"prompt": "a"}, {"X-Request-ID": "abc.DEF-1:2"})
    assert response.getheader("x-request-id") == "abc.DEF-1:2"
    assert "id=abc.DEF-1:2 method=POST path=/v1/completions status=200" in live.log.getvalue()
    seen = set()
    for bad in ("", "x" * 129, "a b", "a;b", "ü"):
        response, _ = live.request(
            "GET", "/nowhere", None, {"X-Request-ID": bad.encode("utf-8").decode("latin-1")}
        )
        seen.add(response.getheader("x-request-id"))
    assert len(seen) == 5
    assert all(name is not None and len(name) == 24 and name.isalnum() for name in seen)


def test_log_line_tells_tokens_times_and_finish_but_never_text(live: LiveServer) -> None:
    live.request(
        "POST", "/v1/completions", {"prompt": "tell-nobody", "stop": ["hush"]}, {"x-request-id": "r1"}
    )
    line = next(line for line in live.log.getvalue().splitlines() if "id=r1 " in line)
    words = dict(word.split("=", 1) for word in line.split()[4:])
    assert words["prompt"] == "12"
    assert words["cached"] == "3"
    assert words["output"] == "12"
    assert words["queue"] == "0.25"
    assert words["finish"] == "stop"
    assert float(words["ttft"]) >= 0
    assert float(words["tpot"]) >= 0
    assert "tell-nobody" not in live.log.getvalue()


def test_log_lines_cannot_be_forged(live: LiveServer) -> None:
    live.request("GET", "/a%0AERROR%20api%20forged%20id=1%1b[31m")
    lines = live.log.getvalue().splitlines()
    assert not any(line.startswith("ERROR") for line in lines)
    assert "\\u{a}ERROR" in live.log.getvalue()
    assert "\x1b" not in live.log.getvalue()
    assert escape('x" status=200') == '"x\\" status=200"'
    assert escape("a" * 1000).endswith('a..."') is False
    assert len(escape("a" * 1000)) < 300


def test_json_log_lines_are_json() -> None:
    line = json_line("INFO", "request", {"id": 'a"b\n', "status": 200, "queue": 0.5})
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    decoded = json.loads(line)
    assert (decoded["status"], decoded["queue"], decoded["level"]) == (200, 0.5, "INFO")


def test_a_full_disk_does_not_stop_the_log() -> None:
    class Full:
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    RequestLog("text", Full()).event("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", [[""], ["good", " \t"]])
def test_a_blank_key_is_refused_and_its_field_named(keys: list[str]) -> None:
    with pytest.raises(UsageError, match=rf"api_keys\[{len(keys) - 1}\] is empty") as raised:
        ApiKeys(keys)
    assert raised.value.param == "api_keys"
    with pytest.raises(UsageError):
        create_app(FakeEngine(), ServerConfig(api_keys=keys), fake_model())

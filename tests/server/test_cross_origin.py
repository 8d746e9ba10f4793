"""Rule 5: pages of other origins, those on the list and all others, asking first and asking at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPResponse

import pytest

from fake_engine import FakeEngine, fake_model
from live_server import LiveServer, events
from penstock.config.server import ServerConfig
from penstock.errors import UsageError
from penstock.process.listening import listen, refuse_bad_origins
from penstock.server.app import create_app

KEY, PAGE = "key-of-a-client-77c2", "https://chat.example"
GOOD = {"Authorization": f"Bearer {KEY}"}
ORIGINS = [PAGE, "http://localhost:3000", "chrome-extension://abcdefgh"]
FOREIGN = (
    "null",
    "https://evil.example",
    "http://chat.example",
    "https://chat.example:8443",
    "https://chat.example.evil.example",
    "https://sub.chat.example",
    "https://CHAT.example",
    "https://chat.example/",
    f"{PAGE}, https://evil.example",
    "*",
)
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = ServerConfig(api_keys=[KEY], admin_keys=["admin-0b"], allowed_origins=ORIGINS)
    with LiveServer(config=config) as made:
        yield made


def told(response: HTTPResponse) -> dict[str, str]:
    """What an answer says to browsers of who may read it."""
    return {
        name.lower(): value
        for name, value in response.getheaders()
        if name.lower().startswith("access-control") or name.lower() == "vary"
    }


def preflight(origin: str, method: str = "POST", headers: str = "") -> dict[str, str]:
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    return asked | ({"Access-Control-Request-Headers": headers} if headers else {})


READABLE = {
    "access-control-expose-headers": "request-id, retry-after, x-penstock-resumable, x-penstock-warning, "
    "x-request-id",
    "vary": "Origin",
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_on_the_list_may_ask_and_read_the_answer(server: LiveServer, origin: str) -> None:
    headers = {**GOOD, "Origin": origin}
    readable = READABLE | {"access-control-allow-origin": origin}
    response, raw = server.request("POST", TEXT, {"prompt": "ab"}, headers)
    assert (response.status, told(response)) == (200, readable)
    assert json.loads(raw)["choices"][0]["text"] == "ab"
    response, raw = server.request("POST", TEXT, {"prompt": "ab", "stream": True}, headers)
    assert told(response) == readable
    assert events(raw)[-1] == "[DONE]"
    for path, given, status in (
        (TEXT, {"prompt": "ab", "n": 0}, 400),
        ("/nowhere", {}, 404),
        ("/health", {}, 405),
    ):
        response, _ = server.request("POST", path, given, headers)
        assert (response.status, told(response)) == (status, readable), "a page can read what is wrong"


def test_a_page_on_the_list_needs_the_key_as_everybody(server: LiveServer) -> None:
    before = len(server.engine.added)
    for path in (TEXT, "/v1/models", "/pause", "/nowhere"):
        response, _ = server.request("POST", path, {"prompt": "ab"}, {"Origin": PAGE})
        assert response.status == 401
        assert told(response)["access-control-allow-origin"] == PAGE
    assert server.request("POST", "/pause", None, {**GOOD, "Origin": PAGE})[0].status == 401
    assert len(server.engine.added) == before
    assert server.engine.operations == []


@pytest.mark.parametrize("path", [TEXT, "/v1/models", "/health", "/pause", "/nowhere"])
def test_a_preflight_is_answered_without_a_key_and_tells_nothing_of_the_path(
    server: LiveServer, path: str
) -> None:
    wanted = "authorization,content-type, x-stainless-os"
    response, raw = server.request("OPTIONS", path, None, preflight(PAGE, headers=wanted))
    assert (response.status, raw) == (204, b"")
    assert told(response) == READABLE | {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "DELETE, GET, HEAD, POST",
        "access-control-allow-headers": wanted,
        "access-control-max-age": "600",
    }


@pytest.mark.parametrize("headers", ["*", "", "a b", "a;b", "a,,b", "a,", 'x"y', "\u00fc"])
def test_a_preflight_allows_no_headers_but_names(server: LiveServer, headers: str) -> None:
    asked = preflight(PAGE, headers=headers)
    response, _ = server.request("OPTIONS", TEXT, None, asked)
    assert response.status == 204
    assert "access-control-allow-headers" not in told(response)


def test_options_that_are_no_preflight_need_the_key(server: LiveServer) -> None:
    assert server.request("OPTIONS", TEXT, None, {"Origin": PAGE})[0].status == 401
    assert server.request("OPTIONS", TEXT, None, {"Access-Control-Request-Method": "POST"})[0].status == 401
    assert server.request("GET", "/v1/models", None, preflight(PAGE))[0].status == 401


@pytest.mark.parametrize("origin", FOREIGN)
def test_every_other_page_is_refused_and_told_nothing(server: LiveServer, origin: str) -> None:
    before = len(server.engine.added)
    for method, headers in (("POST", {**GOOD, "Origin": origin}), ("OPTIONS", preflight(origin))):
        response, raw = server.request(method, TEXT, {"prompt": "ab"}, headers)
        assert (response.status, told(response)) == (403, {})
        assert json.loads(raw)["error"]["code"] == "origin_not_allowed"
    assert len(server.engine.added) == before


def test_pages_of_the_server_itself_and_programs_are_told_nothing(server: LiveServer) -> None:
    for headers in ({}, {"Origin": f"http://127.0.0.1:{server.port}"}):
        response, _ = server.request("GET", "/v1/models", None, GOOD | headers)
        assert (response.status, told(response)) == (200, {})


def test_a_listed_page_does_not_open_a_name_that_was_bound_to_this_machine(server: LiveServer) -> None:
    """DNS rebinding (Ollama CVE-2024-28224) is another door than the origin."""
    headers = {**GOOD, "Origin": PAGE, "Host": "chat.example"}
    assert server.request("GET", "/v1/models", None, headers)[0].status == 403
    assert server.request("OPTIONS", TEXT, None, preflight(PAGE) | {"Host": "chat.example"})[0].status == 403


def test_without_a_list_no_page_is_let_in(live: LiveServer) -> None:
    for origin in (*ORIGINS, *FOREIGN):
        for method, headers in (("POST", {"Origin": origin}), ("OPTIONS", preflight(origin))):
            response, _ = live.request(method, TEXT, {"prompt": "ab"}, headers)
            assert (response.status, told(response)) == (403, {})


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "",
        "null",
        "chat.example",
        "https://",
        "https://*.chat.example",
        "https://chat.example/",
        "https://chat.example/page",
        "https://Chat.example",
        "https://user@chat.example",
        "https://chat.example:",
        "https://chat.example:0",
        "https://chat.example:443",
        "http://chat.example:80",
        "https://a.example,https://b.example",
        "https://a.example https://b.example",
        "https://chat.example\n",
        "https://ch\u00e4t.example",
        "//chat.example",
    ],
)
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    config = ServerConfig(port=0, allowed_origins=[PAGE, origin])
    for start in (lambda: listen(config), lambda: create_app(FakeEngine(), config, fake_model())):
        with pytest.raises(UsageError, match=r"allowed_origins\[1\] is ") as raised:
            start()
        assert raised.value.param == "allowed_origins"
        assert raised.value.remedy


def test_origins_of_all_kinds_are_taken() -> None:
    refuse_bad_origins(
        [*ORIGINS, "http://[::1]:8080", "https://10.0.0.7", "http://box:443", "app://obsidian.md"]
    )

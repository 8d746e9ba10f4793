"""The private parts of uvicorn on which `server.http.http_protocol` builds: are they as it was written for?

`HttpToolsProtocol` is not a public class. When one of these tests fails after an update, read uvicorn's
`protocols/http/httptools_impl.py` beside our module before the cap in `pyproject.toml` is raised.
"""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any

import pytest
import uvicorn
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from paths import REPOSITORY
from penstock.server import api_process
from penstock.server.http import http_protocol
from penstock.server.http.http_protocol import LimitedHttpProtocol

# Of every method that ours overrides or calls: what uvicorn hands over, and takes.
SIGNATURES = {
    "__init__": ["config", "server_state", "app_state", "_loop"],
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "eof_received": [],
    "on_message_begin": [],
    "on_url": ["url"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "send_400_response": ["msg"],
    "pause_writing": [],
    "resume_writing": [],
    "shutdown": [],
    "timeout_keep_alive_handler": [],
    "_start_asgi_task": ["cycle", "app"],
    "_unset_keepalive_if_required": [],
}
# Attributes of what uvicorn puts into the protocol's own.
NESTED = {
    "flow": ["read_paused", "pause_reading", "resume_reading", "resume_writing"],
    "cycle": [
        *("response_started", "response_complete", "disconnected", "message_event", "keep_alive", "body"),
        *("scope", "send", "chunked_encoding", "expected_content_length"),  # for `unframed`
        "waiting_for_100_continue",
    ],
}


def advice(wrong: str) -> str:
    return (
        f"uvicorn {version('uvicorn')} is not the one that server/http/http_protocol.py was written for: "
        f"{wrong}. Adapt that module to its httptools_impl.py, or lower the cap of uvicorn in pyproject.toml."
    )


class Loop:
    """What the protocol uses of an event loop; nothing runs."""

    def time(self) -> float:
        return 0.0

    def call_later(self, _delay: float, _work: Callable[..., None], *_arguments: Any) -> Loop:
        return self

    def create_task(self, work: Coroutine[Any, Any, None]) -> Loop:
        work.close()
        return self

    def cancel(self) -> None:
        pass

    def add_done_callback(self, _work: Callable[..., None]) -> None:
        pass


class Transport:
    """Attributes:
    calls: names of the methods that were called.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return "close" in self.calls

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: self.calls.append(name)


async def answer_nothing(scope: Any, receive: Any, send: Any) -> None:
    pass


def connected() -> HttpToolsProtocol:
    """uvicorn's own protocol in the middle of a request."""
    config = Config(answer_nothing, http=HttpToolsProtocol, ws="none", log_config=None, access_log=False)
    protocol = HttpToolsProtocol(config, ServerState(), {}, Loop())  # type: ignore[arg-type]
    protocol.connection_made(Transport())  # type: ignore[arg-type]
    protocol.data_received(b"POST /a HTTP/1.1\r\nx-name: value\r\ncontent-length: 5\r\n\r\nab")
    return protocol


def used_names() -> set[str]:
    """Attributes of `self`, and methods of `super()`, in the class that builds on uvicorn's."""
    tree = ast.parse(inspect.getsource(LimitedHttpProtocol))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "self")
            or (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super")
        )
    }


def own_names() -> set[str]:
    """Names that the class brings itself and uvicorn need not know."""
    made = {name for name in vars(LimitedHttpProtocol) if not hasattr(HttpToolsProtocol, name)}
    (init,) = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(LimitedHttpProtocol)))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    stored = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return made | stored


def test_uvicorn_has_every_name_that_our_protocol_uses() -> None:
    protocol = connected()
    inherited = used_names() - own_names()
    assert len(inherited) > 20
    missing = sorted(name for name in inherited if not hasattr(protocol, name))
    assert missing == [], advice(f"HttpToolsProtocol has no {', '.join(missing)}")


@pytest.mark.parametrize("name", SIGNATURES)
def test_uvicorn_calls_our_methods_as_we_expect(name: str) -> None:
    method = getattr(HttpToolsProtocol, name, None)
    assert method is not None, advice(f"HttpToolsProtocol has no {name}")
    parameters = list(inspect.signature(method).parameters)[1:]
    assert parameters == SIGNATURES[name], advice(f"{name} takes {parameters}")


def test_every_method_that_ours_overrides_is_in_the_table() -> None:
    overridden = {
        name for name in vars(LimitedHttpProtocol) if callable(getattr(HttpToolsProtocol, name, None))
    }
    assert overridden - {"__module__", "__doc__"} <= SIGNATURES.keys()


@pytest.mark.parametrize("name", NESTED)
def test_uvicorn_has_what_our_protocol_uses_beyond_itself(name: str) -> None:
    holder = getattr(connected(), name)
    missing = [attribute for attribute in NESTED[name] if not hasattr(holder, attribute)]
    assert missing == [], advice(f"its {name} has no {', '.join(missing)}")


def test_uvicorn_counts_a_connection_when_it_is_made() -> None:
    """The limit of connections is compared with this set."""
    protocol = connected()
    assert protocol in protocol.connections, advice("connection_made does not enter the connection")
    protocol.connection_lost(None)
    assert protocol not in protocol.connections, advice("connection_lost does not take the connection out")


def test_uvicorn_gathers_headers_where_our_protocol_counts_them() -> None:
    protocol = connected()
    assert (b"x-name", b"value") in protocol.headers, advice("headers are not pairs of bytes any more")
    assert protocol.url == b"/a", advice("the target of a request is not in `url` any more")
    assert bytes(protocol.cycle.body) == b"ab", advice("a body is not gathered in the cycle any more")


def test_uvicorn_reports_bad_http_by_the_method_that_ours_replaces() -> None:
    refused = []

    class Reporting(HttpToolsProtocol):
        def send_400_response(self, msg: str) -> None:
            refused.append(msg)

    config = Config(answer_nothing, http=Reporting, ws="none", log_config=None)
    protocol = Reporting(config, ServerState(), {}, Loop())  # type: ignore[arg-type]
    protocol.connection_made(Transport())  # type: ignore[arg-type]
    protocol.data_received(b"\x00\x01\r\n\r\n")
    assert len(refused) == 1, advice("bad HTTP does not come to send_400_response")


def test_uvicorn_closes_an_idle_connection_at_shutdown() -> None:
    protocol = connected()
    protocol.cycle.response_complete = True
    protocol.shutdown()
    assert "close" in protocol.transport.calls, advice("shutdown leaves idle connections open")  # type: ignore[attr-defined]


def test_uvicorn_takes_the_protocol_class_and_leaves_signals_and_ends_to_us() -> None:
    """What `server.api_process.HttpServer` overrides and sets."""
    assert list(inspect.signature(uvicorn.Server.startup).parameters) == ["self", "sockets"], advice(
        "startup"
    )
    parameters = list(inspect.signature(uvicorn.Server.shutdown).parameters)
    assert parameters == ["self", "sockets"], advice("shutdown")
    assert hasattr(uvicorn.Server, "capture_signals"), advice("there is no capture_signals to override")
    assert list(inspect.signature(uvicorn.Server.main_loop).parameters) == ["self"], advice("main_loop")
    assert list(inspect.signature(uvicorn.Server.on_tick).parameters) == ["self", "counter"], advice(
        "on_tick"
    )
    server = uvicorn.Server(Config(answer_nothing, http=LimitedHttpProtocol))
    assert server.should_exit is False, advice("should_exit does not end the server")
    source = inspect.getsource(uvicorn.Server.startup)
    assert "http_protocol_class" in source, advice("startup does not use the given protocol class")
    assert "app_state=self.lifespan.state" in source, advice("protocols get another state")
    assert api_process.uvicorn is uvicorn
    assert http_protocol.HttpToolsProtocol is HttpToolsProtocol


def test_the_cap_of_uvicorn_is_the_minor_version_that_is_tested() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (declared,) = [one for one in project["dependencies"] if one.startswith("uvicorn")]
    major, minor, *_ = version("uvicorn").split(".")
    assert declared == f"uvicorn>={major}.{minor},<{major}.{int(minor) + 1}", (
        f"the tests run with uvicorn {version('uvicorn')}, and pyproject.toml says {declared}"
    )

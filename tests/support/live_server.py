"""The real HTTP server over a fake engine, on a thread, for tests that need sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar

import uvloop

from fake_engine import FakeEngine, fake_model
from penstock.config.limits import ConnectionLimits, Limits
from penstock.config.server import ServerConfig
from penstock.process import tls
from penstock.server.api_process import HttpServer
from penstock.server.app import App, create_app
from penstock.server.http.request_log import RequestLog

T = TypeVar("T")


class LiveServer:
    """Use as a context manager.

    Args:
        trusted: of clients, for a server with a certificate.
    """

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        config: ServerConfig | None = None,
        model: Any = None,
        connections: ConnectionLimits | None = None,
        limits: Limits | None = None,
        trusted: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.config = config or ServerConfig(drain_s=5.0, limits=limits or Limits())
        self.log = io.StringIO()
        self.app: App
        self.server: HttpServer
        self._options = options
        self._trusted = trusted
        self._model = model or fake_model()
        self._connections = connections or ConnectionLimits()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()))

    @property
    def url(self) -> str:
        return f"{self.config.scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.engine.released.set)
        self.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """As a SIGTERM would."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self.loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def call(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the server's loop and wait for it; None when the server has ended."""

        async def run() -> T:
            return work()

        coroutine = run()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)
        except RuntimeError:
            coroutine.close()
            return None
        except CancelledError:  # an ending loop cancels what is left on it
            return None
        except TimeoutError:
            if self._thread.is_alive():
                raise
            return None  # the loop ended before it took the call

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until a condition holds there."""

        async def poll() -> None:
            while not condition():  # noqa: ASYNC110 - conditions look at plain state
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(poll(), 10), self.loop).result(11)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[HTTPResponse, bytes]:
        """One request on a connection of its own; a body that is not bytes is sent as JSON. Of a feed, which
        has no end, the first event is read."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self._client()
        try:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            is_feed = method == "GET" and response.getheader("content-type", "").startswith("text/event")
            return response, response.readline() if is_feed else response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        response, raw = self.request("POST", path, body, headers)
        return response.status, json.loads(raw)

    def _client(self) -> HTTPConnection:
        if self._trusted is None:
            return HTTPConnection("127.0.0.1", self.port, timeout=20)
        return HTTPSConnection("127.0.0.1", self.port, timeout=20, context=self._trusted)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.app = create_app(
            self.engine,
            self.config,
            self._model,
            log=RequestLog(self.config.log_format, self.log),
            on_ready=self._up.set,
            **self._options,
        )
        context = tls.server_context(self.config)
        self.server = HttpServer(self.app, self._connections, self.config.drain_s, context=context)
        await self.server.serve(sockets=[self._socket])


def post_bytes(path: str, body: Any, extra: str = "") -> bytes:
    """A raw POST request."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n{extra}\r\n"
    return head.encode() + raw


def events(stream: bytes) -> list[Any]:
    """The data of a stream's events: decoded JSON, or the word [DONE]. Comments are skipped."""
    found = []
    for block in stream.decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert block == "" or block.startswith(":"), block
    return found

"""An HTTP server that streams made-up completions, in order or with chosen faults: for clients' tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


@dataclass
class Script:
    """What the server does. `events` makes the data of a stream from request body and number.

    None among the events cuts the connection there.
    """

    events: Callable[[dict[str, Any], int], Sequence[bytes | None]]
    status: int = 200
    error_body: bytes = b""
    card: dict[str, Any] = field(default_factory=lambda: {"id": MODEL, "vocab_size": 64})
    answer: Callable[[str], Any] = lambda path: None  # JSON for the path of a GET; None: the list of models
    health: list[int] = field(default_factory=list)  # answers of /health in turn; 200 when none is left
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        with self.lock:
            self.requests.append(body)
            self.headers.append(headers)
            return len(self.requests) - 1


def completion_events(body: dict[str, Any], number: int, per_chunk: int = 1) -> list[bytes | None]:
    """A stream in order: exactly `max_tokens` ids, one finish, usage, [DONE]."""
    count, stream_id = body["max_tokens"], f"cmpl-{number}"
    events: list[bytes | None] = []
    for start in range(0, count, per_chunk):
        ids = list(range(start, min(count, start + per_chunk)))
        choice = {"index": 0, "text": "x" * len(ids), "token_ids": ids, "finish_reason": None}
        events.append(json.dumps({"id": stream_id, "choices": [choice]}).encode())
    end = {"index": 0, "text": "", "finish_reason": "length"}
    events.append(json.dumps({"id": stream_id, "choices": [end]}).encode())
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    events.append(json.dumps({"id": stream_id, "choices": [], "usage": usage}).encode())
    return [*events, b"[DONE]"]


def chat_events(text: str, finish: str = "stop") -> list[bytes | None]:
    """A chat stream that says `text`, a word to a chunk."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in text.split(" ")]
    chunks: list[dict[str, Any]] = [
        {"id": "chat-0", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"id": "chat-0", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"id": "chat-0", "choices": [], "usage": {"completion_tokens": len(deltas) - 1}})
    return [*(json.dumps(chunk).encode() for chunk in chunks), b"[DONE]"]


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def do_GET(self) -> None:
        if self.path == "/health":
            status = self.script.health.pop(0) if self.script.health else 200
            self._answer(status, b'{"state":"loading"}')
            return
        listing = {"object": "list", "data": [self.script.card]}
        self._answer(200, json.dumps(self.script.answer(self.path) or listing).encode())

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(raw)
        number = self.script.take(body | {"path": self.path}, dict(self.headers))
        if self.script.status != 200:
            self._answer(self.script.status, self.script.error_body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.script.events(body, number):
            if event is None:  # cut the connection in the middle of the stream
                self.close_connection = True
                return
            self._chunk(b"data: " + event + b"\n\n")
        self._chunk(b"")
        self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        try:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        except OSError:  # the client has gone
            self.close_connection = True

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def completions_server(script: Script) -> Iterator[str]:
    """Runs the script on a free port; yields the URL."""
    handler = type("Handler", (_Handler,), {"script": script})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""The request that `./run` sends: it waits for its server, prints the answer, and says what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paths import REPOSITORY


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


class Server(BaseHTTPRequestHandler):
    """Not ready for the first two probes; then answers every request with `answer`."""

    probes = 0
    answer = b""
    received: dict[str, object]

    def do_GET(self) -> None:
        type(self).probes += 1
        self.send_response(503 if self.probes < 3 else 200)
        self.end_headers()

    def do_POST(self) -> None:
        type(self).received = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Server], str]]:
    handler = type("OneServer", (Server,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def first_request(url: str, pid: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/first_request.py", "--url", url, "--server-pid", str(pid)],
        cwd=REPOSITORY,
        env=os.environ | {"http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_prints_the_answer_once_the_server_is_ready(server: tuple[type[Server], str]) -> None:
    handler, url = server
    words = [event({"choices": [{"delta": {"content": text}}]}) for text in ("O,\n", "night")]
    handler.answer = b"".join(
        [*words, event({"choices": [], "usage": {"completion_tokens": 3}}), b"data: [DONE]\n\n"]
    )
    result = first_request(url, os.getpid())
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1:4] == ["> ROMEO:", "  O,", "  night"]
    assert lines[4].startswith("  3 tokens, first after ")
    assert handler.probes == 3
    assert handler.received["model"] == "demo"


def test_says_why_the_request_failed(server: tuple[type[Server], str]) -> None:
    handler, url = server
    handler.answer = event({"error": {"message": "stage 1 is gone"}})
    result = first_request(url, os.getpid())
    assert result.returncode == 1
    assert result.stderr == "run: the first request failed: stage 1 is gone\n"


def test_ends_quietly_when_the_server_ended_first() -> None:
    result = first_request("http://127.0.0.1:9", ended_pid())
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")

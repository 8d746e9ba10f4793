"""What happens around the server: a full disk, a clock that jumps [R16]."""

from __future__ import annotations

import ast
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import penstock
from served import title_of, wait_until


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def complete(port: int) -> int:
    """Tokens that came; 0 while nobody answers."""
    body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {"content-type": "application/json"}), timeout=60
        ) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])
    except OSError:
        return 0


@pytest.mark.soak
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("form", ["text", "json"])
def test_r16_a_full_disk_under_the_logs_stops_nothing(port: int, form: str) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--pp", "2", "--threads-per-rank", "1"]
    command += ["--port", str(port), "--log-format", form]
    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full, stderr=full) as server:
        try:
            wait_until(lambda: complete(port) == 3 or server.poll() is not None, 60)
            supervisor = psutil.Process(server.pid)
            (victim,) = [p for p in supervisor.children() if title_of(p) == "penstock stage 1 tp 0"]
            victim.kill()
            wait_until(lambda: complete(port) == 3 or server.poll() is not None, 60)
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()


# What shows a time to people, or gives one to a template; no wait and no deadline may.
WALL_CLOCK = {
    "server/routes/responder.py",  # `created` of an answer
    "server/routes/responses.py",  # `created_at`, and `completed_at`
    "server/answers/responses_output.py",
    "server/api_process.py",  # `created` of the model
    "server/http/lifecycle.py",  # since when it drains
    "server/http/request_log.py",
    "cli/reporter.py",
    "cli/hosts.py",  # which tokens can still be used
    "cli/bench/online.py",  # the date of a report
    "cli/bench/report_flags.py",
    "cli/bench/sweep.py",  # when a point was measured
    "tokenizer/chat_template.py",  # today, for templates that ask
    "engine/client/async_engine.py",  # since when it is ready
    "server/routes/pipeline_view.py",  # when a view was made
    "engine/supervisor/launch.py",  # when a store was opened, for `penstock cache`
    "hosts/network/scout.py",  # when a way was measured
    "hosts/network/visiting.py",  # whether a certificate is old
    "hosts/gathering.py",  # for certificates and tokens that it gives
    "trust/joining.py",  # whether a certificate is valid today
}


def test_r16_no_wait_depends_on_a_clock_that_can_jump() -> None:
    root = Path(penstock.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if any(wall_clocks(path))}
    assert found == WALL_CLOCK


def wall_clocks(path: Path) -> Iterator[str]:
    """Names of clocks that follow the date, where code speaks of them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) == ("time", "time") or (
                owner in ("datetime", "date") and node.attr in ("now", "utcnow", "today")
            ):
                yield node.attr

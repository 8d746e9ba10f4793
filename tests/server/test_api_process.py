"""The API process as the supervisor starts it: no torch, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest

from fake_engine import EOS
from paths import shared_data
from penstock.config.server import ServerConfig
from penstock.process.child import Alive, ChildFailed, TextSideLoaded, decode_status
from penstock.process.config import ApiProcessConfig
from penstock.server.api_process import allow_connections, notice_lost_clients
from served import wait_until

MODULES = """
import sys
import penstock.server.api_process
bad = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "transformers"))
print(",".join(bad))
"""


def test_api_process_never_imports_torch() -> None:
    found = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True)
    assert "torch" not in found.stdout
    assert "transformers" not in found.stdout


def _start(config: ApiProcessConfig, status_write: int) -> subprocess.Popen[bytes]:
    config_read, config_write = os.pipe()
    fds = ["--config-fd", str(config_read), "--status-fd", str(status_write)]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.server.api_process", *fds],
        pass_fds=[config_read, status_write, config.listen_fd],
        stderr=subprocess.PIPE,
    )
    os.close(config_read)
    with os.fdopen(config_write, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(config))
    return process


def _config(listen_fd: int, model_path: Path, tmp_path: Path) -> ApiProcessConfig:
    return ApiProcessConfig(
        server=ServerConfig(drain_s=5.0),
        parent_pid=os.getpid(),
        client_addresses=[f"ipc://{tmp_path}/core"],  # nobody listens: the engine is still loading
        listen_fd=listen_fd,
        model_path=str(model_path),
        model_names=["stories", "tales"],
        max_model_len=512,
        vocab_size=512,
        eos_token_ids=[EOS],
        max_num_seqs=4,
        max_waiting_requests=8,
        num_stages=2,
    )


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def _wait_until_probed(port: int) -> None:
    """Until the system asks for signs of life on the server's side of an idle connection."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/health/live")
        connection.getresponse().read()
        wait_until(lambda: _timers_of_connections(port) == {"02"}, 20)  # the kind of timer: keepalive


def _timers_of_connections(port: int) -> set[str]:
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {row[5].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"}


def test_accepted_sockets_notice_lost_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        notice_lost_clients(listener, 60.0)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = [accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
            assert found == [30, 8, 4, 60_000]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_with_code_0(tmp_path: Path, number: signal.Signals) -> None:
    model = shared_data("models", "stories260K")
    status_read, status_write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = _start(_config(listener.fileno(), model, tmp_path), status_write)
        try:
            os.close(status_write)
            port = listener.getsockname()[1]
            status, body = _get(port, "/health")  # answered while the engine loads
            assert (status, json.loads(body)["state"]) == (503, "not_ready")
            assert _get(port, "/health/live")[0] == 200
            status, body = _get(port, "/v1/models")
            assert (status, [card["id"] for card in json.loads(body)["data"]]) == (200, ["stories", "tales"])
            _wait_until_probed(port)
            with open(f"/proc/{process.pid}/cmdline", "rb") as title:
                assert title.read().startswith(b"penstock api")
            with open(f"/proc/{process.pid}/maps") as maps:
                assert "libtorch" not in maps.read()
            process.send_signal(number)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
            process.wait()
            with os.fdopen(status_read, "rb") as reported:
                lines = reported.read().splitlines()
    assert TextSideLoaded(prompt_form="text") in map(decode_status, lines), "it has no chat template"
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors


def _fill(pipe: int) -> None:
    """Write into a pipe, of which this is the end that is read, until it takes nothing more."""
    end = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"x")
    os.close(end)


def test_r16_output_that_is_blocked_holds_up_no_answer(tmp_path: Path) -> None:
    """As by Ctrl-S, a pager, or a collector of logs that stands still: each request has a line there.

    So has the end, in words of uvicorn, while a client does not take its answer.
    """
    model = shared_data("models", "stories260K")
    status_read, status_write = os.pipe()
    with ExitStack() as stack:
        listener, slow = stack.enter_context(socket.create_server(("127.0.0.1", 0))), socket.socket()
        stack.enter_context(os.fdopen(status_read, "rb"))
        stack.enter_context(slow)
        for end, option in ((listener, socket.SO_SNDBUF), (slow, socket.SO_RCVBUF)):
            end.setsockopt(socket.SOL_SOCKET, option, 4096)
        process = _start(_config(listener.fileno(), model, tmp_path), status_write)
        assert process.stderr is not None
        try:
            os.close(status_write)
            port = listener.getsockname()[1]
            assert _get(port, "/v1/models")[0] == 200
            _fill(process.stderr.fileno())
            assert [_get(port, "/v1/models")[0] for _ in range(3)] == [200] * 3
            slow.connect(("127.0.0.1", port))
            slow.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert slow.recv(1, socket.MSG_PEEK) == b"H"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


def test_broken_model_directory_is_reported_and_ends_with_code_3(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    status_read, status_write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = _start(_config(listener.fileno(), tmp_path, tmp_path), status_write)
        os.close(status_write)
        with os.fdopen(status_read, "rb") as status:
            lines = status.read().splitlines()
        process.communicate(timeout=20)
    (event,) = (event for event in map(decode_status, lines) if not isinstance(event, Alive))
    assert isinstance(event, ChildFailed)
    assert event.error.kind == "ModelConfigError"
    assert process.returncode == 3


def test_number_of_connections_fits_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert allow_connections(100) == 100
        fitting = allow_connections(10**9)
        assert fitting == 10**9 or fitting == hard - 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""The security rules that real processes must keep: sockets, connections, and where keys can be read."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from served import Served

ENV_KEY, FLAG_KEY = "key-of-the-environment-7d1e", "key-of-a-flag-20c4"
SERVE = ("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with Served(*SERVE, env={"PENSTOCK_API_KEY": ENV_KEY}) as served:
        yield served


def ask(served: Served, path: str, body: Any = None) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {ENV_KEY}", "content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(served.url + path, raw, headers), timeout=60)


def sockets(served: Served, kind: str) -> list[Any]:
    return [found for process in served.family() for found in process.net_connections(kind)]


def test_rule_2_nothing_but_the_http_port_can_be_reached(demo: Served) -> None:
    """CVE-2025-30202: no port for ourselves, on no address; internal sockets have no name to open."""
    port = int(demo.url.rsplit(":", 1)[1])
    inet = sockets(demo, "inet")
    assert {(found.laddr, found.status) for found in inet} == {(("127.0.0.1", port), psutil.CONN_LISTEN)}
    assert {found.type for found in inet} == {socket.SOCK_STREAM}
    num_unix = 0
    for process in demo.family():
        for found in process.net_connections("unix"):
            num_unix += 1
            assert not found.laddr.startswith(("@", "\0"))  # a name that any process may open
            bound = found.laddr.replace("/proc/self/", f"/proc/{process.pid}/")
            assert not bound or not Path(bound).exists()
    assert num_unix > 8


def test_rule_7_no_connection_is_opened_while_serving(demo: Served) -> None:
    port = int(demo.url.rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        messages = [{"role": "user", "content": f"![look]({url}) {url}"}]
        asked = {"messages": messages, "stream": True, "max_tokens": 200, "ignore_eos": True, "user": url}
        with ask(demo, "/v1/chat/completions", asked) as answer:
            for _ in range(20):
                answer.readline()
            during = sockets(demo, "inet")
            assert {found.status for found in during} == {psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED}
            assert {found.laddr for found in during} == {("127.0.0.1", port)}  # all are of clients that came
            answer.read()
        with pytest.raises(BlockingIOError):
            trap.accept()


def seen_of(process: psutil.Process) -> bytes:
    """What everybody, and the same user, can read of a process."""
    files = [Path(f"/proc/{process.pid}/{name}") for name in ("cmdline", "environ", "comm")]
    return b"".join(file.read_bytes() for file in files)


def test_rule_4_a_key_of_the_environment_is_in_no_process_and_in_no_output(demo: Served) -> None:
    for path in ("/version", "/metrics", "/openapi.json", "/v1/models", "/debug/trace"):
        with ask(demo, path) as answer:
            assert ENV_KEY not in answer.read().decode()
    family = demo.family()
    assert len(family) >= 5, "a spare process may be there, too"
    for process in family:
        seen = seen_of(process)
        assert ENV_KEY.encode() not in seen
        assert b"penstock" in seen
    assert ENV_KEY not in demo.output


def test_rule_4_a_key_of_a_flag_or_file_is_in_no_process(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-file-93aa\n")
    words = ("--api-key", FLAG_KEY, "--api-key-file", str(keys))
    with Served("demo", "--threads-per-rank", "1", "--dtype", "float32", *words) as served:
        for process in served.family():
            seen = seen_of(process)
            assert FLAG_KEY.encode() not in seen
            assert b"key-of-a-file" not in seen
        assert FLAG_KEY not in served.output

"""A host behind a cable that is pulled, or that loses all packets one way: the answer goes on without it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from network import Host, cable_network, shaped_network
from served import wait_until

pytestmark = pytest.mark.doors
WAIT_S = 120.0
PORT = 8000  # the head has a network of its own


class Served:
    """A head on one host and a worker on the other."""

    def __init__(self, head: Host[Any], worker: Host[Any], directory: Path) -> None:
        self._head = head
        self._directory = directory
        token, address = directory / "token", f"{head.address}:7700"
        joining = ["--join-token-file", str(token), "--state-dir", str(directory)]
        words = ["serve", "demo", "--pp", "2", "--dtype", "float32", "--threads-per-rank", "1"]
        words += ["--port", str(PORT), "--hosts", "2", "--listen-workers", address, "--rejoin-timeout", "1"]
        self._start(head, "head", [*words, *joining])
        wait_until(token.exists, WAIT_S)
        self._start(worker, "desk", ["worker", "--join", address, "--name", "desk", *joining])
        wait_until(lambda: "ready in" in self.log("head"), WAIT_S)

    def stage_hosts(self) -> list[str]:
        """Return the host of each stage, as `/server_info` has it."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        with self._head.socket() as connection.sock:
            connection.sock.settimeout(WAIT_S)
            connection.sock.connect(("127.0.0.1", PORT))
            connection.request("GET", "/server_info")
            return [stage["host"] for stage in json.loads(connection.getresponse().read())["stages"]]

    def log(self, name: str) -> str:
        """What a program has printed."""
        return (self._directory / f"{name}.log").read_text("utf-8")

    def answer(self, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Return the text of an answer; once it has begun, something may happen."""
        body = {
            "prompt": "once upon",
            "max_tokens": 400,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        with self._head.socket() as connection.sock:
            connection.sock.settimeout(WAIT_S)
            connection.sock.connect(("127.0.0.1", PORT))
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            lines = iter(connection.getresponse().readline, b"")
            events = (line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {"))
            texts = [_text(next(events))]
            meanwhile()
            return "".join([*texts, *map(_text, events)])

    def _start(self, host: Host[Any], name: str, words: list[str]) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "penstock", *words]
            host.popen(command, stdout=log, stderr=subprocess.STDOUT)


def _text(event: bytes) -> str:
    decoded = json.loads(event)
    assert "error" not in decoded, decoded
    return "".join(choice["text"] for choice in decoded["choices"])


def test_r15_a_pulled_cable_costs_a_pause_and_no_token_and_the_host_comes_back(tmp_path: Path) -> None:
    with cable_network() as network:
        one, other = network.hosts
        served = Served(one, other, tmp_path)
        expected = served.answer()
        assert served.answer(other.link.pull) == expected
        assert "without desk: stage 1 goes to" in served.log("head")
        wait_until(lambda: served.stage_hosts() == [served.stage_hosts()[0]] * 2, WAIT_S)
        other.link.plug()
        wait_until(lambda: "desk can take stages" in served.log("head"), WAIT_S)
        assert served.answer() == expected


@pytest.mark.parametrize("which", ["out", "in"])
def test_r15_packets_that_are_lost_one_way_cost_a_pause_and_no_token(tmp_path: Path, which: Any) -> None:
    with shaped_network() as network:
        one, other = network.hosts
        served = Served(one, other, tmp_path)
        expected = served.answer()
        assert served.answer(lambda: other.link.set_loss(1.0, which)) == expected
        assert "without desk: stage 1 goes to" in served.log("head")
        other.link.set_loss(0.0, which)
        wait_until(lambda: "desk can take stages" in served.log("head"), WAIT_S)
        assert served.answer() == expected

"""Two hosts with two cables: the faster one is found, used, and left when it is pulled; firewalls too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from network import CableLink, Host, cable_network
from served import wait_until

pytestmark = pytest.mark.doors

PORT, HTTP_PORT, WAIT_S = 7700, 8000, 120.0
ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "temperature": 0}).encode()
request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
with urllib.request.urlopen(request, timeout=100) as answer:
    print(json.load(answer)["usage"]["completion_tokens"])
"""

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=50).read().decode())"


class TwoHosts:
    """A head on the first host and a worker on the second, with what they have said.

    Attributes:
        listen_at, join_at: addresses that the head is given, and the worker.
    """

    def __init__(self, hosts: Any, directory: Path) -> None:
        self.head: Host[CableLink]
        self.desk: Host[CableLink]
        self.head, self.desk = hosts
        self.listen_at, self.join_at = "0.0.0.0", self.head.address
        self._directory = directory
        self._token = directory / "token"
        make_checkpoint(directory / "models" / "model", layers=3, vocab_size=150, seed=3)

    def start_head(self) -> None:
        self._start(
            self.head,
            "head",
            *("serve", str(self._directory / "models" / "model"), "--pp", "2", "--hosts", "2"),
            *(
                "--listen-workers",
                f"{self.listen_at}:{PORT}",
                "--host-name",
                "tower",
                "--port",
                str(HTTP_PORT),
            ),
            *("--join-token-file", str(self._token), "--state-dir", str(self._directory / "tower")),
        )
        wait_until(self._token.exists, WAIT_S)

    def start_worker(self, *more: str) -> None:
        self._start(self.desk, "desk", "worker", *self._joining(), *more)

    def doctor(self, *more: str) -> str:
        """Whatever it finds, the report of a host that has not joined yet."""
        child = self.desk.popen(
            [sys.executable, "-m", "penstock", "doctor", *self._joining(), *more],
            stdout=subprocess.PIPE,
            text=True,
        )
        return str(child.communicate(timeout=WAIT_S)[0])

    def said(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(encoding="utf-8")

    def await_said(self, name: str, words: str, count: int = 1) -> None:
        wait_until(lambda: self.said(name).count(words) >= count, WAIT_S)

    def ask(self) -> int:
        """Let the model say something; tokens that came."""
        return int(self.head.run(sys.executable, "-c", ASK, f"http://127.0.0.1:{HTTP_PORT}/v1/completions"))

    def info(self) -> Any:
        url = f"http://127.0.0.1:{HTTP_PORT}/server_info"
        return json.loads(self.head.run(sys.executable, "-c", FETCH, url))

    def _joining(self) -> list[str]:
        return [
            *("--join", f"{self.join_at}:{PORT}", "--join-token-file", str(self._token)),
            *("--name", "desk", "--state-dir", str(self._directory / "desk")),
        ]

    def _start(self, host: Host[CableLink], name: str, *words: str) -> None:
        models = ["--models-dir", str(self._directory / "models")] if words[0] == "worker" else []
        with (self._directory / f"{name}.log").open("w", encoding="utf-8") as log:
            host.popen([sys.executable, "-m", "penstock", *words, *models], stdout=log, stderr=log)


def close_link_ports(host: Host[CableLink]) -> None:
    """Let nothing come to the link ports of a host: a rule of routing drops it, as a firewall would."""
    for version in ("-4", "-6"):
        for link in host.links:
            rule = f"rule add pref 10 iif {link.interface} ipproto tcp dport 7701-7732 blackhole"
            host.run("ip", version, *rule.split())
        host.run("ip", version, "rule", "add", "pref", "100", "lookup", "local")
        host.run("ip", version, "rule", "del", "pref", "0")


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with cable_network(num_links=2) as network:
        network.hosts[0].links[0].set_rate(8_000_000)
        network.hosts[0].links[1].set_rate(200_000_000)
        yield TwoHosts(network.hosts, tmp_path)


def test_g1_the_faster_cable_is_used_and_left_when_it_is_pulled(two_hosts: TwoHosts) -> None:
    two_hosts.start_head()
    report = two_hosts.doctor()
    assert "lets this host join as desk" in report
    assert "eth1 (10.77.1.2) to eth1 (10.77.1.1)" in report
    assert "fail" not in report
    two_hosts.start_worker()  # with the same token
    two_hosts.await_said("head", "links between desk and tower use eth1 (10.77.1.2) to eth1 (10.77.1.1)")
    two_hosts.await_said("head", "ready in")
    assert two_hosts.ask() == 6
    (link,) = two_hosts.info()["links"]
    assert (link["hosts"], link["interfaces"]) == (["desk", "tower"], ["eth1", "eth1"])
    two_hosts.desk.links[1].pull()
    two_hosts.await_said("head", "links between desk and tower use eth0")
    two_hosts.await_said("head", "The best path to the other host fails (an interface has lost")
    assert two_hosts.ask() == 6
    wait_until(lambda: two_hosts.info()["links"][0]["interfaces"] == ["eth0", "eth0"], WAIT_S)
    wait_until(lambda: len(two_hosts.info()["clocks"]) == 2, WAIT_S)
    of_head, of_worker = two_hosts.info()["clocks"]
    assert of_head == {"host": "tower", "offset_ns": 0, "error_ns": 0}
    assert of_worker["host"] == "desk"
    assert abs(of_worker["offset_ns"]) <= of_worker["error_ns"], "it is the clock of the same machine"


def test_g1_a_worker_behind_a_firewall_dials(two_hosts: TwoHosts) -> None:
    close_link_ports(two_hosts.desk)
    two_hosts.start_head()
    report = two_hosts.doctor()
    assert "of desk (10.77.0.2) are not reached: no answer" in report
    assert "desk opens all links itself" in report
    two_hosts.start_worker()
    two_hosts.await_said("head", "desk cannot be reached on this path, so it opens the links itself")
    two_hosts.await_said("head", "ready in")
    assert two_hosts.ask() == 6


def test_g1_a_fixed_address_is_kept_and_the_faster_way_is_named(two_hosts: TwoHosts) -> None:
    """Over IPv6 all the way."""
    two_hosts.listen_at, two_hosts.join_at = "[::]", f"[{two_hosts.head.link.address6}]"
    two_hosts.start_head()
    two_hosts.start_worker("--address", two_hosts.desk.link.address6)
    two_hosts.await_said("head", "links between desk and tower use eth0 (fd00:77::2) to eth0 (fd00:77::1)")
    two_hosts.await_said("head", "is idle: eth1")
    two_hosts.await_said("head", "ready in")
    assert two_hosts.ask() == 6

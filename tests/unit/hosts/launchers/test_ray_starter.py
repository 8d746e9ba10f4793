"""The head's side of Ray: the order to the driver, what it says, and what follows when it ends (row I2)."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from penstock.config.hosts import HostsConfig
from penstock.config.ray import RayOptions
from penstock.errors import UnavailableError
from penstock.hosts.launchers import ray_hosts
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.launchers.ray_bundles import bundles, strategy_of, why_not_placed
from penstock.hosts.launchers.ray_messages import (
    CannotPlace,
    DriverReport,
    LostWorker,
    PlaceWorkers,
    Said,
    Warned,
)
from penstock.hosts.launchers.ray_starter import RAY_IS_GONE, RayStarter
from penstock.hosts.launchers.starter import WantedWorkers

WAIT_S = 30.0
WANTED = WantedWorkers(
    number=2,
    host_name="tower",
    cluster="ab" * 16,
    host="0.0.0.0",
    port=7744,
    token_file="/token",
    link_ports="7701-7732",
)
ORDER = PlaceWorkers(engine="e", number=2, host="", port=7744, token_file="/token", words=["--a"])

# A driver that says what its arguments are, and ends with its input unless it is to end before.
DRIVER = """
import sys
order = sys.stdin.buffer.readline()
for line in sys.argv[2:]:
    print(line.replace("ORDER", str(len(order) > 10)), flush=True)
if sys.argv[1] == "stay":
    sys.stdin.buffer.read()
    sys.exit(0)
"""


class Started:
    """A starter whose driver says these lines."""

    def __init__(self, lines: list[str], then: str = "stay") -> None:
        self.told: list[str] = []
        self.warned: list[str] = []
        command = [sys.executable, "-S", "-c", DRIVER, then, *lines]
        self.starter = RayStarter(lambda wanted: ORDER, Voices(self.told.append, self.warned.append), command)
        self.starter.start(WANTED)

    def attend_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            sources = self.starter.sources
            assert select.select(sources, [], [], WAIT_S)[0]
            self.starter.attend()


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(reports: list[DriverReport | str], then: str = "stay") -> Started:
        lines = [r if isinstance(r, str) else msgspec.json.encode(r).decode() for r in reports]
        started.append(Started(lines, then))
        return started[-1]

    yield begin
    for each in started:
        each.starter.close()


def test_i2_what_the_driver_says_reaches_the_user_and_the_head(start: Any) -> None:
    ray = start([Said("ORDER"), "a line of a library", Warned("beware"), LostWorker("desk-1", "lost")])
    ray.attend_until(lambda: len(ray.told) == 3)
    assert ray.told == ["Ray starts 2 workers", "True", "lost"]
    assert ray.warned == ["beware"]
    assert ray.starter.take_lost() == ["desk-1"]
    assert ray.starter.take_lost() == []
    assert ray.starter.failure is None


def test_i2_workers_that_cannot_be_placed_are_a_failure_with_its_remedy(start: Any) -> None:
    ray = start([CannotPlace("Ray cannot be reached: no", "Start it with `ray start`.")], then="end")
    ray.attend_until(lambda: ray.starter.failure is not None)
    failure = ray.starter.failure
    assert isinstance(failure, UnavailableError)
    assert failure.message == "Ray cannot be reached: no"
    assert failure.remedy == "Start it with `ray start`."
    ray.attend_until(lambda: ray.starter._driver is None)
    assert ray.starter.failure is failure, "the first cause stands"
    assert ray.warned == ["Ray cannot be reached: no"]


def test_i2_when_ray_is_gone_the_engine_is_told_that_it_goes_on(start: Any) -> None:
    ray = start([], then="end")
    sources = ray.starter.sources
    ray.attend_until(lambda: ray.starter.failure is not None)
    assert ray.warned == [RAY_IS_GONE]
    assert ray.starter.sources == sources, "a supervisor that waits for them never loses one"
    assert select.select(sources, [], [], 0.0)[0] == []
    ray.starter.attend()


def test_i2_text_of_ray_cannot_paint_the_terminal(start: Any) -> None:
    ray = start([Said("\\x1b[31m red\\x07 and \\u202e more")])
    ray.attend_until(lambda: len(ray.told) == 2)
    assert "\x1b" not in ray.told[1]
    assert "\x07" not in ray.told[1]


def test_i2_the_order_has_what_workers_need_and_no_token(tmp_path: Any) -> None:
    cluster = HostsConfig(hosts=3, ray='{"placement": "pack", "resources": {"CPU": 4}}', insecure_links=True)
    options = msgspec.json.decode(cluster.ray, type=RayOptions)
    order = ray_hosts._order(WANTED._replace(is_plain=True), options)
    assert (order.number, order.host, order.port, order.token_file) == (2, "", 7744, "/token")
    assert order.options == options
    assert "--insecure-links" in order.words
    assert "--away-limit" in order.words
    assert ray_hosts._order(WANTED._replace(host="10.0.0.1"), options).host == "10.0.0.1"
    assert ray_hosts._order(WANTED, options).engine != order.engine


# --- what Ray reserves ------------------------------------------------------------------------------

NODES = [
    {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 2.0}},
    {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 4.0, "GPU": 1.0}},
    {"Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": {}},
]


def test_i2_a_bundle_for_each_host_and_the_heads_is_bound_to_its_node() -> None:
    assert bundles(2, {}, NODES, "10.0.0.1") == [
        {"CPU": 1.0, "GPU": 1.0, "node:10.0.0.1": 0.001},
        {"CPU": 1.0, "GPU": 1.0},
        {"CPU": 1.0, "GPU": 1.0},
    ]
    without_gpus = [{"Alive": True, "Resources": {"CPU": 2.0}}, NODES[0]]
    assert bundles(1, {}, without_gpus, "x")[1] == {"CPU": 1.0}
    assert bundles(1, {"CPU": 4.0, "disk": 1.0}, NODES, "x")[1] == {"CPU": 4.0, "disk": 1.0}


def test_i2_while_hosts_are_not_placed_the_user_sees_which_nodes_there_are() -> None:
    told = why_not_placed(3, "spread", NODES)
    assert "3 hosts, each on its own node" in told
    assert "10.0.0.1 with 8 CPU and 2 GPU, 10.0.0.2 with 4 CPU and 1 GPU" in told
    assert "10.0.0.3" not in told
    assert "none" in why_not_placed(2, "pack", [])
    assert (strategy_of("spread"), strategy_of("pack")) == ("STRICT_SPREAD", "PACK")

"""What a core is told of the hosts of its pipe: where its stages are now, and what their clocks show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from fakes import FakeClock
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.launch import LaunchPlan, resolve
from penstock.engine.supervisor.told_hosts import CLOCKS_EVERY_S, MOVED_NS, ToldHosts
from penstock.hosts.network.routes import DefaultRoutes
from penstock.hosts.rank_host import Hosts
from penstock.process.config import HostLink
from penstock.process.pipe_hosts import HostClock, PipeHosts
from stand_in_hosts import StandInHost, StandInMember

LINK = HostLink(
    hosts=("desk", "tower"),
    interfaces=("eth0", "enp3"),
    round_trip_s=0.002,
    bytes_per_s_out=1e6,
    bytes_per_s_in=4e6,
)


class ChosenRoutes(DefaultRoutes):
    """Ways that a test chooses."""

    def __init__(self) -> None:
        self.chosen: list[HostLink] = []

    def links(self) -> Sequence[HostLink]:
        return self.chosen


class Told:
    """Two hosts, and a core that is told of them."""

    def __init__(self, *names: str) -> None:
        self.routes = ChosenRoutes()
        self.by_name = {name: StandInHost(name, "tcp") for name in names}
        head, *others = self.by_name.values()
        self.hosts = Hosts(head, *others, routes=self.routes)
        self.clock = FakeClock()
        self.plan = self.plan_over(*names)
        self.told = ToldHosts(self.hosts, self.clock)
        self.core = StandInMember(head, "core", None, -1)

    def plan_over(self, *names: str) -> LaunchPlan:
        config = EngineConfig(
            model=ModelConfig(model="demo"), parallel=ParallelConfig(pipeline_parallel_size=2)
        )
        return resolve(config, [self.by_name[name].resources() for name in names])

    def news(self) -> list[PipeHosts]:
        """Tell the core; what it has got."""
        self.core.handed.clear()
        self.told.tell(self.core, self.plan)
        return [message for message in self.core.handed if isinstance(message, PipeHosts)]

    def close(self) -> None:
        for host in self.by_name.values():
            host.close()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told("tower", "desk")
    yield made
    made.close()


def test_stages_and_ways_are_told_as_soon_as_they_change(told: Told) -> None:
    (first,) = told.news()
    assert (first.stages, first.links, first.clocks) == (["tower", "desk"], [], [])
    assert first.token_bytes == 2 * told.plan.spec.hidden_size, "in bfloat16"
    assert told.news() == []
    told.plan = told.plan_over("tower")
    (relaid,) = told.news()
    assert relaid.stages == ["tower", "tower"]
    told.routes.chosen = [LINK]
    (measured,) = told.news()
    assert measured.links == [LINK]
    assert told.news() == []


def test_a_clock_is_told_when_it_is_known_when_it_has_moved_and_now_and_then(told: Told) -> None:
    told.news()
    told.by_name["desk"].known_clocks = [HostClock(host="desk", offset_ns=-7, error_ns=50)]
    (known,) = told.news()
    assert known.clock_of(1) == HostClock(host="desk", offset_ns=-7, error_ns=50)
    assert known.clock_of(0).offset_ns == known.clock_of(9).offset_ns == 0
    told.by_name["desk"].known_clocks = [HostClock(host="desk", offset_ns=-7 + MOVED_NS, error_ns=50)]
    assert told.news() == [], "it may have drifted"
    told.clock.advance(CLOCKS_EVERY_S)
    (drifted,) = told.news()
    assert drifted.clock_of(1).offset_ns == -7 + MOVED_NS
    told.by_name["desk"].known_clocks = [HostClock(host="desk", offset_ns=-8, error_ns=50)]
    (moved,) = told.news()
    assert moved.clock_of(1).offset_ns == -8


def test_a_core_in_the_place_of_a_lost_one_is_told_at_once(told: Told) -> None:
    told.news()
    told.core = StandInMember(told.by_name["tower"], "core", None, -1)
    assert len(told.news()) == 1


def test_on_one_host_nothing_is_told() -> None:
    alone = Told("tower")
    assert alone.news() == []
    alone.close()

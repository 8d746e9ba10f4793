"""The spare process of a host: when there is one, who takes it, what is left of it (issue 25, point 3)."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checkpoints import make_checkpoint
from penstock.hosts.local import LocalHost
from penstock.hosts.local_process import LocalMember
from penstock.hosts.local_spare import KEEP_FREE_BYTES, LEAST_NICE, START_FREE_BYTES, SpareProcess
from penstock.hosts.member import Member
from penstock.hosts.resources import HostResources
from penstock.process.child import StatusEvent, Warm, WeightsLoaded
from penstock.process.config import RankConfig, SpareProcessConfig
from penstock.process.control import BecomeRank, ControlMessage
from penstock.process.successor import SpareSelf
from rank_configs import make_rank_configs
from served import title_of
from stand_in_hosts import StandInHost, StandInMember

LIMIT_S = 100.0  # imports with the lowest priority, beside other tests


class Spares:
    """A spare process that is none, and memory of which a test says how much is free."""

    def __init__(self, host: StandInHost) -> None:
        self.free_bytes = START_FREE_BYTES
        self.started: list[StandInMember] = []
        self.configs: list[SpareProcessConfig] = []
        self.process = SpareProcess(self._start, lambda: self.free_bytes)
        self._host = host

    def _start(self, config: SpareProcessConfig) -> Member:
        self.configs.append(config)
        self.started.append(StandInMember(self._host, "spare", None, 0))
        return self.started[-1]

    @property
    def newest(self) -> StandInMember:
        return self.started[-1]

    def warm_up(self, threads: int = 2) -> StandInMember:
        """Keep one, until it waits."""
        assert self.process.keep(threads) == 0, "it only starts"
        self.newest.say(Warm(own_bytes=70))
        assert self.process.keep(threads) == 70
        return self.newest


@pytest.fixture
def spares() -> Iterator[Spares]:
    host = StandInHost("attic")
    yield Spares(host)
    host.close()


def make_rank(**changes: object) -> RankConfig:
    return make_rank_configs(Path("src/penstock/assets/demo"), 2, **changes)[1]


def test_one_that_waits_becomes_the_rank(spares: Spares, monkeypatch: pytest.MonkeyPatch) -> None:
    member, rank = spares.warm_up(), make_rank()
    before = set(os.listdir("/proc/self/fd"))
    told: list[RankConfig] = []

    def hand(message: ControlMessage) -> None:
        assert isinstance(message, BecomeRank)
        told.append(BecomeRank(os.dup(message.config_fd)).read())

    monkeypatch.setattr(member, "hand", hand)
    assert spares.process.take(rank, "stage 1", 7) is member
    assert told == [rank]
    assert set(os.listdir("/proc/self/fd")) == before


def test_it_is_told_once_and_has_the_place_of_the_rank(spares: Spares) -> None:
    member, rank = spares.warm_up(), make_rank()
    started_at = member.started_at
    assert spares.process.take(rank, "stage 1", 7) is member
    assert [type(message) for message in member.handed] == [BecomeRank]
    assert (member.name, member.stage, member.member_index) == ("stage 1", 1, 7)
    assert member.started_at >= started_at, "it has as long to load as any"
    assert spares.process.take(rank, "stage 1", 7) is None
    assert spares.process.keep(2) == 0
    assert spares.newest is not member, "there is another one for the next"


def test_one_that_has_not_said_that_it_waits_is_not_taken(spares: Spares) -> None:
    spares.process.keep(2)
    assert spares.process.take(make_rank(), "stage 1", 1) is None
    spares.newest.say(Warm(own_bytes=70))
    assert spares.process.take(make_rank(), "stage 1", 1) is spares.newest


@pytest.mark.parametrize(("threads", "is_taken"), [(1, True), (2, True), (3, False)])
def test_a_rank_with_more_threads_does_not_take_it(spares: Spares, threads: int, is_taken: bool) -> None:
    """Its libraries may have made pools for two."""
    spares.warm_up(threads=2)
    assert spares.configs[0].threads == 2
    assert (spares.process.take(make_rank(threads=threads), "stage 1", 1) is not None) == is_taken


def test_one_that_was_started_ahead_is_taken_before_it_waits(spares: Spares) -> None:
    """A rank is about to need it: its imports do not give way to others, and nothing starts a second time."""
    spares.process.start_ahead(2)
    spares.process.start_ahead(2)
    assert [(config.threads, config.nice) for config in spares.configs] == [(2, 0)]
    assert spares.process.take(make_rank(threads=3), "stage 1", 1) is None
    assert spares.process.take(make_rank(), "stage 1", 1) is spares.newest
    spares.warm_up()
    assert spares.configs[1].nice == LEAST_NICE
    spares.process.start_ahead(2)
    assert len(spares.started) == 2


def test_one_that_a_worker_before_has_left_is_taken_like_any(spares: Spares) -> None:
    left = StandInMember(spares._host, "spare", None, 0)
    spares.process.adopt(left, SpareSelf(threads=2, own_bytes=70))
    assert spares.process.keep(2) == 70
    assert not spares.started
    assert spares.process.take(make_rank(threads=3), "stage 1", 1) is None
    assert spares.process.take(make_rank(), "stage 1", 1) is left
    assert spares.process.keep(2) == 0
    assert len(spares.started) == 1


def test_none_is_started_ahead_where_memory_is_short(spares: Spares) -> None:
    spares.free_bytes = START_FREE_BYTES - 1
    spares.process.start_ahead(2)
    assert not spares.started


def test_there_is_none_where_memory_is_short(spares: Spares) -> None:
    spares.free_bytes = START_FREE_BYTES - 1
    assert spares.process.keep(1) == 0
    assert not spares.started
    spares.free_bytes = START_FREE_BYTES
    member = spares.warm_up()
    spares.free_bytes = KEEP_FREE_BYTES
    assert spares.process.keep(1) == 70, "its own memory alone does not end it"
    spares.free_bytes = KEEP_FREE_BYTES - 1
    assert spares.process.keep(1) == 0
    assert member.done == ["kill_now", "close"]
    assert len(spares.started) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_has_ended_is_replaced(spares: Spares, waits: bool) -> None:
    spares.process.keep(1)
    if waits:
        spares.newest.say(Warm(own_bytes=70))
        spares.process.keep(1)
    spares.newest.leave(-9)
    assert spares.process.take(make_rank(), "stage 1", 1) is None
    assert spares.started[0].done == ["kill_now", "close"]
    assert spares.process.keep(1) == 0
    assert len(spares.started) == 2


def test_it_ends_with_its_host(spares: Spares) -> None:
    member = spares.warm_up()
    spares.process.close()
    assert member.done == ["kill_now", "close"]
    spares.process.close()


def test_a_real_one_has_no_weights_and_loads_those_of_the_rank_that_it_becomes(tmp_path: Path) -> None:
    rank = make_rank_configs(make_checkpoint(tmp_path / "model"), 2)[1]
    before = set(os.listdir("/proc/self/fd"))
    free = HostResources(num_cpus=2, free_bytes=START_FREE_BYTES, num_gpus=0)
    host = LocalHost(lambda: free)
    others = set(psutil.Process().children())
    assert host.keep_spare(2) == 0
    (child,) = set(psutil.Process().children()) - others
    while not (own_bytes := host.keep_spare(2)):
        assert child.is_running()
        select.select([], [], [], 0.05)
    assert 20e6 < own_bytes < child.memory_info().rss, "without the pages of libraries"
    assert title_of(child) == "penstock spare"

    member = host.start_rank(rank, "stage 1", 1)
    assert isinstance(member, LocalMember)
    assert member.pid == child.pid
    events: list[StatusEvent] = []
    while not any(isinstance(event, WeightsLoaded) for event in events):
        readable, _, _ = select.select(list(member.sources), [], [], LIMIT_S)
        assert readable
        events += member.read_status()
        assert member.exit_code is None, member.end()
    assert title_of(child) == "penstock stage 1 tp 0"
    assert not member.is_ready, "it waits for its endpoints like any rank"
    member.kill_now()
    member.close()
    host.close()
    assert set(os.listdir("/proc/self/fd")) == before

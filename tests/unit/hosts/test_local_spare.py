"""The spare process of a host: when there is one, who takes it, what is left of it (issue 25, point 3)."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from checkpoints import make_checkpoint
from penstock.hosts.local import LocalHost
from penstock.hosts.local_process import LocalMember
from penstock.hosts.local_spare import KEEP_FREE_BYTES, START_FREE_BYTES
from penstock.hosts.resources import HostResources
from penstock.process.child import WeightsLoaded
from penstock.process.config import RankConfig
from rank_configs import make_rank_configs
from served import title_of

LIMIT_S = 60.0


class Machine:
    """A local host whose free memory a test says."""

    def __init__(self) -> None:
        self.free_bytes = START_FREE_BYTES
        self.host = LocalHost(
            lambda: HostResources(num_cpus=2, free_bytes=self.free_bytes, num_gpus=0, cpus=())
        )

    @property
    def spare(self) -> LocalMember:
        member = self.host._spare._member
        assert member is not None, "there is none"
        return member

    def wait_for_spare(self) -> int:
        """Keep one until it waits; what it says that it holds."""
        while not (own_bytes := self.host.keep_spare(2)):
            _await_news(self.spare)
        return own_bytes


def _await_news(member: LocalMember) -> None:
    readable, _, _ = select.select(list(member.sources), [], [], LIMIT_S)
    assert readable, f"nothing from {member.name} in {LIMIT_S} s"


@pytest.fixture
def machine() -> Iterator[Machine]:
    before = set(os.listdir("/proc/self/fd"))
    made = Machine()
    yield made
    made.host.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> RankConfig:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "model")
    return make_rank_configs(model, 2)[1]


def test_a_rank_is_started_in_the_process_that_waits(machine: Machine, rank: RankConfig) -> None:
    own_bytes = machine.wait_for_spare()
    pid = machine.spare.pid
    assert 20e6 < own_bytes < psutil.Process(pid).memory_info().rss, "without the pages of the libraries"
    assert title_of(psutil.Process(pid)) == "penstock spare"

    member = machine.host.start_rank(rank, "stage 1", 1)
    assert (member.identity, member.name, member.stage) == (f"pid {pid}", "stage 1", 1)
    events = []
    while not any(isinstance(event, WeightsLoaded) for event in events):
        _await_news(member)
        events += member.read_status()
        assert member.exit_code is None, member.end()
    assert member.has_loaded
    assert title_of(psutil.Process(pid)) == "penstock stage 1 tp 0"
    assert not member.is_ready, "it waits for its endpoints like any rank"
    member.kill_now()
    member.close()


def test_what_fails_in_it_is_said_as_by_any_rank(machine: Machine, rank: RankConfig, tmp_path: Path) -> None:
    machine.wait_for_spare()
    broken = msgspec.structs.replace(rank, model_path=str(tmp_path))
    member = machine.host.start_rank(broken, "stage 1", 1)
    while member.failure is None:
        _await_news(member)
        member.read_status()
    assert member.failure.stage == 1
    assert member.await_end() == 3
    member.close()


def test_one_that_has_not_said_that_it_waits_is_not_taken(machine: Machine, rank: RankConfig) -> None:
    assert machine.host.keep_spare(2) == 0
    starting = machine.spare
    member = machine.host.start_rank(rank, "stage 1", 1)
    assert member.identity != f"pid {starting.pid}"
    assert machine.spare is starting
    member.kill_now()
    member.close()


def test_a_rank_with_more_threads_does_not_take_it(machine: Machine, rank: RankConfig) -> None:
    machine.wait_for_spare()
    member = machine.host.start_rank(msgspec.structs.replace(rank, threads=3), "stage 1", 1)
    assert member.identity != f"pid {machine.spare.pid}", "its libraries may have made pools for 2"
    member.kill_now()
    member.close()


def test_there_is_none_where_memory_is_short(machine: Machine) -> None:
    machine.free_bytes = START_FREE_BYTES - 1
    assert machine.host.keep_spare(1) == 0
    with pytest.raises(AssertionError, match="there is none"):
        _ = machine.spare
    machine.free_bytes = START_FREE_BYTES
    machine.host.keep_spare(1)
    process = psutil.Process(machine.spare.pid)
    machine.free_bytes = KEEP_FREE_BYTES
    machine.host.keep_spare(1)
    assert process.is_running(), "its own memory alone does not end it"
    machine.free_bytes = KEEP_FREE_BYTES - 1
    assert machine.host.keep_spare(1) == 0
    assert not process.is_running()


def test_one_that_was_killed_is_replaced(machine: Machine) -> None:
    machine.host.keep_spare(1)
    first = machine.spare
    first.kill_now()
    first.await_end()
    assert machine.host.keep_spare(1) == 0
    assert machine.spare is not first

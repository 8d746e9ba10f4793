"""When the hosts of an engine keep a spare process (issue 25, point 3)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.launch import resolve
from penstock.engine.supervisor.reports import Event, SpareReady
from penstock.engine.supervisor.spares import LOOK_EVERY_S, LOOK_READY_S, WHOLE_AGAIN_S, WHOLE_S, Spares
from penstock.hosts.resources import HostResources
from penstock.process.config import RankConfig
from stand_in_hosts import StandInHost


@pytest.fixture
def host() -> Iterator[StandInHost]:
    made = StandInHost("attic")
    yield made
    made.close()


class Rig:
    """Spares of one host, a clock and what was reported."""

    def __init__(self, host: StandInHost, *threads: int) -> None:
        self.given: list[Event] = []
        self.host, self.now = host, 1000.0
        self.hosts = {host.name: host}
        self.spares = Spares(self.hosts, _ranks(host.name, threads), self)

    def report(self, event: Event) -> None:
        self.given.append(event)

    def wait(self, seconds: float, *, is_whole: bool = True) -> int:
        """Let time pass, seen to at its end; how often the host has been asked in all."""
        self.now += seconds
        self.spares.tend(self.now, is_whole=is_whole)
        return len(self.host.spares_kept)


def _ranks(host: str, threads: tuple[int, ...]) -> list[RankConfig]:
    parallel = ParallelConfig(pipeline_parallel_size=2, threads_per_rank=1)
    config = EngineConfig(model=ModelConfig(model="demo"), parallel=parallel)
    first, _ = resolve(config, [HostResources(num_cpus=4, free_bytes=1 << 34, num_gpus=0)]).ranks
    return [msgspec.structs.replace(first, host=host, threads=count) for count in threads]


def test_one_is_kept_once_the_engine_has_been_whole_for_a_while(host: StandInHost) -> None:
    rig = Rig(host, 1, 3, 2)
    assert rig.wait(0) == 0
    assert rig.wait(WHOLE_S - 0.1) == 0
    assert rig.wait(0.1) == 1
    assert host.spares_kept == [3], "the most threads that a rank of the host has"
    assert rig.wait(LOOK_EVERY_S / 2) == 1, "the host is not asked with every event"
    assert rig.wait(LOOK_EVERY_S / 2) == 2


def test_after_a_loss_the_next_is_kept_as_soon_as_all_is_well_again(host: StandInHost) -> None:
    rig = Rig(host, 1)
    rig.wait(0)
    assert rig.wait(WHOLE_S) == 1
    assert rig.wait(20.0, is_whole=False) == 1, "what starts again should have the machine for itself"
    assert rig.wait(1.0) == 1
    assert rig.wait(WHOLE_AGAIN_S - 0.1) == 1
    assert rig.wait(0.1) == 2


def test_one_that_waits_is_looked_at_less_often_until_something_is_lost(host: StandInHost) -> None:
    rig = Rig(host, 1)
    host.spare_bytes = 70
    rig.wait(0)
    assert rig.wait(WHOLE_S) == 1
    assert rig.wait(LOOK_READY_S - 0.1) == 1
    assert rig.wait(0.1) == 2
    rig.wait(0, is_whole=False)
    rig.wait(0)
    assert rig.wait(WHOLE_AGAIN_S) == 3, "a rank may have taken its place"


def test_a_loss_before_the_first_puts_it_off_anew(host: StandInHost) -> None:
    rig = Rig(host, 1)
    rig.wait(0)
    rig.wait(WHOLE_S - 1.0)
    rig.wait(0, is_whole=False)
    rig.wait(0)
    assert rig.wait(WHOLE_S - 0.1) == 0
    assert rig.wait(0.1) == 1


def test_r15_a_host_that_stands_by_keeps_one_for_any_rank_and_a_lost_one_is_not_asked(
    host: StandInHost,
) -> None:
    """What takes the place of a lost host then starts where the imports are done."""
    rig, other = Rig(host, 1, 3), StandInHost("cellar")
    rig.wait(0)
    rig.hosts["cellar"] = other
    rig.wait(WHOLE_S)
    assert other.spares_kept == [3]
    other.is_there = False
    assert rig.wait(LOOK_EVERY_S) == 2
    assert other.spares_kept == [3]
    other.close()


def test_it_is_reported_once_it_is_ready_and_again_when_there_is_another(host: StandInHost) -> None:
    rig = Rig(host, 1)
    rig.wait(0)
    rig.wait(WHOLE_S)
    assert rig.given == [], "it only starts"
    for host.spare_bytes in (70, 71, 0, 72):
        rig.wait(LOOK_READY_S)
    assert rig.given == [SpareReady(host="attic", own_bytes=70), SpareReady(host="attic", own_bytes=72)]


def test_without_ranks_to_replace_there_is_none(host: StandInHost) -> None:
    rig = Rig(host)
    rig.wait(0)
    assert rig.wait(2 * WHOLE_S) == 0


def test_a_host_that_cannot_start_one_is_asked_again(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(threads: int) -> int:
        host.spares_kept.append(threads)
        raise OSError("no descriptors")

    rig = Rig(host, 1)
    monkeypatch.setattr(host, "keep_spare", fail)
    rig.wait(0)
    assert rig.wait(WHOLE_S) == 1
    assert rig.wait(LOOK_EVERY_S) == 2

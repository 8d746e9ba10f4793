"""Ranks beside a running pipe: when they are started, when they take over, and when they end."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.launch import resolve
from penstock.engine.supervisor.reports import Event, Notice
from penstock.engine.supervisor.standbys import KEEP_FREE_BYTES, NO_STANDBYS, WHOLE_S, Standbys
from penstock.hosts.resources import HostResources
from penstock.process.child import WeightsLoaded
from penstock.process.config import RankConfig
from stand_in_hosts import LOADED, StandInHost, StandInMember

HAS_LOADED = WeightsLoaded(bytes_read=2, seconds=0.1)


class Rig:
    """Two stages, of which the last one has a standby; each is on a host of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.given: list[Event] = []
        self.hosts = {name: StandInHost(name) for name in ("attic", "cellar")}
        parallel = ParallelConfig(pipeline_parallel_size=2, threads_per_rank=1)
        config = EngineConfig(model=ModelConfig(model="demo"), parallel=parallel)
        plan = resolve(config, [HostResources(num_cpus=4, free_bytes=1 << 34, num_gpus=0)])
        first, last = plan.ranks
        self.ranks = [
            msgspec.structs.replace(first, host="attic"),
            msgspec.structs.replace(last, host="cellar"),
        ]
        self.standbys = Standbys(self.hosts, {1}, self)

    def report(self, event: Event) -> None:
        self.given.append(event)

    @property
    def said(self) -> list[str]:
        return [event.text for event in self.given if isinstance(event, Notice)]

    @property
    def members(self) -> list[StandInMember]:
        return self.hosts["cellar"].members

    def replacement(self, index: int) -> RankConfig:
        """What the supervisor would start: the same, but for what others have settled."""
        return msgspec.structs.replace(self.ranks[index], num_blocks=7)

    def wait(self, seconds: float, *, is_whole: bool = True) -> int:
        """Let time pass, seen to at its end; how many standbys were started so far."""
        self.now += seconds
        ranks = self.ranks if is_whole else []
        self.standbys.tend(self.now, ranks, {0: LOADED, 1: LOADED}, self.replacement)
        return len(self.members)

    def let_load(self) -> StandInMember:
        """Have the standby that was started last load."""
        self.members[-1].say(HAS_LOADED)
        self.wait(1.0)
        return self.members[-1]

    def close(self) -> None:
        self.standbys.close()
        for host in self.hosts.values():
            host.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_g1_one_is_started_at_its_host_once_the_pipe_has_been_whole_for_a_while(rig: Rig) -> None:
    assert rig.wait(0) == 0
    assert rig.wait(WHOLE_S - 1) == 0
    assert rig.wait(0.5, is_whole=False) == 0
    assert rig.wait(1) == 0
    assert rig.wait(WHOLE_S) == 1
    assert rig.wait(WHOLE_S) == 1, "one is enough"
    assert rig.hosts["cellar"].ranks == [rig.replacement(1)]
    assert rig.members[0].name == "stage 1 standby"
    assert rig.hosts["attic"].members == [], "the other stage has none"
    assert rig.members[0].handed == []


def test_g1_a_standby_that_has_loaded_becomes_the_member(rig: Rig) -> None:
    rig.wait(0)
    rig.wait(WHOLE_S)
    standby = rig.let_load()
    assert rig.said == ["the standby of stage 1 on cellar has loaded its weights and is ready."]
    assert rig.standbys.take(rig.ranks[0], 0) is None
    assert rig.standbys.take(rig.ranks[1], 5) is standby
    assert (standby.name, standby.member_index, standby.has_loaded, standby.done) == ("stage 1", 5, True, [])
    assert rig.said[1:] == ["the standby of stage 1 on cellar takes over, with its weights in memory."]
    assert rig.standbys.take(rig.ranks[1], 5) is None, "it is one"
    rig.wait(1, is_whole=False)
    rig.wait(1)
    assert rig.wait(WHOLE_S) == 2, "and the next one follows"


def test_g1_what_it_has_said_since_it_was_last_heard_counts(rig: Rig) -> None:
    rig.wait(0)
    rig.wait(WHOLE_S)
    rig.members[0].say(HAS_LOADED)
    assert rig.standbys.take(rig.ranks[1], 1) is rig.members[0]


def test_g1_one_that_loads_still_is_not_waited_for(rig: Rig) -> None:
    rig.wait(0)
    rig.wait(WHOLE_S)
    assert rig.standbys.take(rig.ranks[1], 1) is None
    assert rig.members[0].done == []


def test_g1_one_that_has_ended_is_reaped_and_tried_again_after_a_while(rig: Rig) -> None:
    rig.wait(0)
    rig.wait(WHOLE_S)
    rig.let_load().leave(-9)
    assert rig.standbys.take(rig.ranks[1], 1) is None
    assert rig.wait(0.5) == 1
    assert rig.members[0].done == ["kill_now", "close"]
    assert "was killed by signal 9 (SIGKILL)" in rig.said[-1]
    assert rig.wait(WHOLE_S - 1) == 1
    assert rig.wait(1) == 2


def test_g1_one_whose_rank_has_another_place_now_ends(rig: Rig) -> None:
    rig.wait(0)
    rig.wait(WHOLE_S)
    standby = rig.let_load()
    rig.ranks[1] = msgspec.structs.replace(rig.ranks[1], host="attic")
    assert rig.standbys.take(rig.ranks[1], 1) is None
    rig.wait(1)
    assert standby.done == ["kill_now", "close"]
    assert len(rig.hosts["attic"].members) == 1


def test_g1_none_is_started_where_memory_is_short_or_the_host_is_not_there(rig: Rig) -> None:
    cellar = rig.hosts["cellar"]
    cellar.free_bytes = KEEP_FREE_BYTES + LOADED.tensor_bytes - 1
    rig.wait(0)
    assert rig.wait(WHOLE_S) == 0
    cellar.free_bytes += 1
    cellar.is_there = False
    assert rig.wait(1) == 0
    cellar.is_there = True
    assert rig.wait(1) == 1


def test_g1_a_host_that_cannot_start_it_now_is_asked_again_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise OSError("no descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(rig.hosts["cellar"], "start_rank", fail)
        rig.wait(0)
        assert rig.wait(WHOLE_S) == 0
    assert rig.wait(1) == 0
    assert rig.wait(WHOLE_S) == 1


def test_g1_r7_all_end_with_the_supervisor(rig: Rig) -> None:
    rig.wait(0)
    rig.wait(WHOLE_S)
    rig.standbys.close()
    assert rig.members[0].done == ["kill_now", "close"]
    rig.standbys.close()


def test_g1_without_standbys_nobody_takes_over(rig: Rig) -> None:
    NO_STANDBYS.tend(0.0, rig.ranks, {}, rig.replacement)
    assert NO_STANDBYS.take(rig.ranks[1], 1) is None
    NO_STANDBYS.close()

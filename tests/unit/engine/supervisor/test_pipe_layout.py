"""Where ranks run when hosts are lost or come back: the plan, and what the user is told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes import FakeClock
from model_stores import in_hub_cache
from penstock.batch import RankLoaded
from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from penstock.config.hosts import HostsConfig
from penstock.config.speculation import SpeculationConfig
from penstock.engine.supervisor import pipe_layout
from penstock.engine.supervisor.host_blocks import host_tier_bytes
from penstock.engine.supervisor.host_choice import RETURN_S
from penstock.engine.supervisor.launch import resolve_replicas
from penstock.engine.supervisor.pipe_layout import PipeLayout, Settlement
from penstock.families.registry import resolve_model_directory
from penstock.families.spec import ITEM_SIZES
from penstock.hosts.rank_host import Hosts
from stand_in_hosts import LOADED, StandInHost

LIMIT_S = 30.0
MIB = 1 << 20


class Laid:
    """A pipeline of three stages over hosts that a test plays."""

    def __init__(
        self,
        *names: str,
        cache: CacheConfig | None = None,
        model: str = "demo",
        draft: str | None = None,
        **parallel: Any,
    ) -> None:
        self.by_name = {name: StandInHost(name, "tcp") for name in names}
        head, *others = self.by_name.values()
        self.hosts = Hosts(head, *others)
        self.clock = FakeClock()
        config = EngineConfig(
            model=ModelConfig(model=model),
            parallel=ParallelConfig(**{"pipeline_parallel_size": 3} | parallel),
            cache=cache or CacheConfig(),
            speculation=SpeculationConfig(speculative_model=draft),
            cluster=HostsConfig(rejoin_timeout_s=LIMIT_S),
        )
        *_, plan = resolve_replicas(config, self.hosts.resources())  # of the last replica
        self.layout = PipeLayout(plan, self.hosts, config, self.clock)
        self.loaded: dict[int, RankLoaded] = {
            number: msgspec.structs.replace(
                LOADED, stage=number, tensor_bytes=100 * MIB, block_bytes=2 * MIB, max_blocks=10 + number
            )
            for number in range(len(plan.ranks))
        }
        self.living = set(self.loaded)

    @property
    def homes(self) -> list[str]:
        return [rank.host for rank in self.layout.plan.ranks]

    @property
    def threads(self) -> list[int]:
        return [rank.threads for rank in self.layout.plan.ranks]

    def lose(self, name: str) -> None:
        self.by_name[name].is_there = False
        self.living -= {number for number, host in enumerate(self.homes) if host == name}

    def settle(self) -> Settlement:
        self.layout.look()
        return self.layout.settle(self.loaded, self.living)

    def close(self) -> None:
        for host in self.by_name.values():
            host.close()


@pytest.fixture
def parallel() -> dict[str, Any]:
    """Settings that a test may override by parameters of its own."""
    return {}


@pytest.fixture
def laid(parallel: dict[str, Any]) -> Iterator[Laid]:
    made = Laid("tower", "desk", "shelf", **parallel)
    yield made
    made.close()


def test_an_epoch_over_the_hosts_of_before_changes_nothing(laid: Laid) -> None:
    plan = laid.layout.plan
    assert laid.settle() == Settlement(is_settled=True)
    assert laid.layout.plan is plan


def test_r15_of_three_hosts_one_is_lost_and_the_others_take_its_stage(laid: Laid) -> None:
    laid.lose("desk")
    waits = laid.settle()
    assert not waits.is_settled
    assert waits.notes == [
        "waiting for the host desk (stage 1), 30 s at most (--rejoin-timeout); then the other hosts take "
        "over if they have the memory."
    ]
    assert laid.settle() == Settlement(is_settled=False), "said once"
    laid.clock.advance(LIMIT_S)
    assert laid.settle() == Settlement(is_settled=True, notes=["without desk: stage 1 goes to tower."])
    assert laid.homes == ["tower", "tower", "shelf"]
    assert laid.threads == [2, 2, 4], "the cores of a host are shared among those that are there now"


def test_r15_a_rank_that_stays_keeps_all_but_its_share_of_the_cores(laid: Laid) -> None:
    before = laid.layout.plan
    laid.lose("shelf")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    laid.settle()
    first, second, third = laid.layout.plan.ranks
    assert first == before.ranks[0], "the head has no more to do"
    frames = third.link_frames  # the link from the second one to the third leaves the host no more
    assert second == msgspec.structs.replace(before.ranks[1], threads=2, link_frames=frames)
    assert third == msgspec.structs.replace(before.ranks[2], threads=2, host="desk")


@pytest.mark.parametrize("which", ["model", "draft"])
def test_r15_a_name_that_means_other_files_by_now_does_not_stop_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Meanwhile `penstock pull` has brought a commit with two files, of which the name means neither."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    demo = resolve_model_directory("demo")
    in_hub_cache(tmp_path, "org/some", {path.name: path.read_bytes() for path in demo.iterdir()})
    laid = Laid("tower", "desk", "shelf", **{which: "org/some"})
    before = laid.layout.plan
    in_hub_cache(tmp_path, "org/some", {"a-Q4_0.gguf": b"4", "a-Q8_0.gguf": b"8"}, commit="f" * 40)
    laid.lose("desk")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    assert laid.settle().notes == ["without desk: stage 1 goes to tower."]
    assert (laid.layout.plan.model_path, laid.layout.plan.core.drafter) == (
        before.model_path,
        before.core.drafter,
    )
    laid.close()


@pytest.mark.parametrize("parallel", [{"threads_per_rank": 1}], ids=str)
def test_r15_two_lost_hosts_of_three_leave_all_to_the_head(laid: Laid) -> None:
    before, *_, last = laid.layout.plan.ranks
    laid.lose("desk")
    laid.settle()
    laid.clock.advance(10.0)
    laid.lose("shelf")
    laid.settle()
    laid.clock.advance(LIMIT_S - 10.0)
    assert not laid.settle().is_settled, "the other host still has time"
    laid.clock.advance(10.0)
    assert laid.settle().notes == ["without desk and shelf: stage 1 goes to tower, stage 2 goes to tower."]
    assert laid.homes == ["tower"] * 3
    assert laid.layout.plan.ranks[0] == msgspec.structs.replace(before, link_frames=last.link_frames)


def test_r15_a_link_that_leads_to_another_host_after_a_takeover_holds_the_plans_on_that_wire() -> None:
    laid = Laid("tower", "desk", "shelf", pipeline_parallel_size=6)
    try:
        assert laid.homes == ["tower", "tower", "desk", "desk", "shelf", "shelf"]
        near, far, *_ = before = [rank.link_frames for rank in laid.layout.plan.ranks]
        assert before == [near, far, near, far, near, near]
        assert far > near
        laid.lose("desk")
        laid.settle()
        laid.clock.advance(LIMIT_S)
        assert laid.settle().is_settled
        assert laid.homes == ["tower", "tower", "tower", "shelf", "shelf", "shelf"]
        assert [rank.link_frames for rank in laid.layout.plan.ranks] == [near, near, far, near, near, near]
    finally:
        laid.close()


def test_r15_where_memory_is_short_the_missing_host_is_named_and_waited_for(laid: Laid) -> None:
    laid.lose("desk")
    laid.by_name["tower"].free_bytes = 119 * MIB
    laid.by_name["shelf"].free_bytes = 30 * MIB
    laid.settle()
    laid.clock.advance(LIMIT_S)
    refused = laid.settle()
    refusal = refused.refusal
    assert refusal is not None
    assert refused.notes == [f"{refusal.message} {refusal.remedy}"]
    assert (refusal.kind, refusal.code, refusal.stage) == ("HostMissingError", "host_missing", 1)
    assert refusal.message == (
        "the pipeline waits for the host desk (stage 1); tower and shelf cannot take over: weights and KV "
        "cache of the lost stages need 120 MiB; 119 MiB on tower, 30 MiB on shelf are free."
    )
    assert "Start `penstock worker` on desk again" in refusal.remedy
    assert laid.settle() == Settlement(is_settled=False, notes=[], refusal=refusal), "the user is told once"
    laid.by_name["desk"].is_there = True
    assert laid.settle() == Settlement(is_settled=True)
    assert laid.homes == ["tower", "desk", "shelf"]
    laid.lose("desk")
    assert laid.settle().notes, "a new loss is said again"


def test_r15_memory_that_is_freed_lets_the_others_take_over(laid: Laid) -> None:
    laid.lose("desk")
    for name in ("tower", "shelf"):
        laid.by_name[name].free_bytes = 0
    laid.settle()
    laid.clock.advance(LIMIT_S)
    assert laid.settle().refusal is not None
    laid.by_name["shelf"].free_bytes = 120 * MIB
    assert laid.settle().is_settled
    assert laid.homes == ["tower", "shelf", "shelf"]


def test_r15_a_model_that_the_head_cannot_read_any_more_is_said_like_a_lack_of_memory(
    laid: Laid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise OSError(5, "Input/output error")

    laid.lose("desk")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(pipe_layout, "resolve_replicas", fail)
        refusal = laid.settle().refusal
    assert refusal is not None
    assert "cannot take over: OSError: [Errno 5] Input/output error" in refusal.message
    assert laid.settle().is_settled


def test_r15_a_host_that_comes_back_later_takes_part_in_the_next_epoch(laid: Laid) -> None:
    laid.lose("shelf")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    laid.settle()
    laid.living = {0, 1, 2}
    laid.by_name["shelf"].is_there = True
    assert laid.layout.look() == ["shelf can take stages from the next epoch on."]
    assert laid.layout.look() == [], "said once"
    assert laid.homes == ["tower", "desk", "desk"], "a healthy pipeline is not disturbed"
    assert laid.settle().notes == ["stage 2 goes to shelf."]
    assert laid.homes == ["tower", "desk", "shelf"]
    assert laid.threads == [4, 4, 4]


@pytest.mark.parametrize("free_mib", [200, 0])
def test_r15_a_host_that_comes_back_too_small_changes_nothing(laid: Laid, free_mib: int) -> None:
    laid.lose("shelf")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    laid.settle()
    laid.living = {0, 1}
    laid.by_name["desk"].free_bytes = free_mib * MIB
    laid.by_name["shelf"].is_there = True
    laid.by_name["shelf"].free_bytes = laid.by_name["tower"].free_bytes = 0
    assert laid.settle() == Settlement(is_settled=True, notes=[] if free_mib else ())
    assert laid.homes == ["tower", "desk", "desk"]


def test_r15_a_host_that_was_not_there_before_takes_the_place_of_a_lost_one(laid: Laid) -> None:
    laid.lose("desk")
    assert not laid.settle().is_settled
    attic = laid.by_name["attic"] = StandInHost("attic", "tcp")
    laid.hosts.add(attic)
    assert not laid.settle().is_settled, "desk may be back in a moment"
    laid.clock.advance(RETURN_S)
    assert laid.settle().notes == ["without desk: stage 1 goes to attic."]
    laid.by_name["desk"].is_there = True
    assert laid.layout.look() == ["desk can take stages from the next epoch on."]
    assert laid.settle() == Settlement(is_settled=True), "so many serve together as at the start"


@pytest.mark.parametrize("parallel", [{"numeric_class": "avx2"}], ids=str)
def test_r15_a_host_without_the_numeric_class_keeps_no_other_from_taking_over(laid: Laid) -> None:
    laid.lose("desk")
    attic = laid.by_name["attic"] = StandInHost("attic", "tcp")
    attic.numeric_classes = ("neon",)
    laid.hosts.add(attic)
    assert laid.layout.look() == ["attic can take no stages: it does not support --numeric-class avx2."]
    assert laid.layout.look() == [], "said once"
    laid.settle()
    laid.clock.advance(LIMIT_S)
    assert laid.settle() == Settlement(is_settled=True, notes=["without desk: stage 1 goes to tower."])


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": "1,2,1"}], ids=str)
def test_r15_ranks_that_share_a_stage_go_to_the_same_host(laid: Laid) -> None:
    laid.lose("desk")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    laid.by_name["tower"].free_bytes = 239 * MIB  # of which each rank needs 120
    assert laid.settle().notes == ["without desk: stage 1 goes to shelf."]
    assert laid.homes == ["tower", "shelf", "shelf", "shelf"]
    assert laid.threads == [4, 1, 1, 1]


@pytest.mark.parametrize("parallel", [{"data_parallel_size": 6}], ids=str)
def test_r15_a_replica_leaves_room_for_the_others_that_lose_the_same_host(laid: Laid) -> None:
    """Two replicas on each of three hosts: this one and another lose theirs."""
    assert laid.homes == ["shelf"] * 3
    laid.lose("shelf")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    for host in laid.by_name.values():
        host.free_bytes = 719 * MIB  # both need 3 times 120
    assert laid.settle().refusal is not None
    laid.by_name["tower"].free_bytes = 720 * MIB
    assert laid.settle().is_settled
    assert laid.homes == ["tower"] * 3
    assert {rank.replica for rank in laid.layout.plan.ranks} == {5}


@pytest.mark.parametrize("parallel", [{"data_parallel_size": 3}], ids=str)
def test_r15_a_replica_goes_to_the_host_of_another_only_when_its_own_is_not_back_in_time(laid: Laid) -> None:
    assert laid.homes == ["shelf"] * 3
    laid.lose("shelf")
    assert not laid.settle().is_settled
    laid.clock.advance(LIMIT_S - 1.0)
    assert not laid.settle().is_settled, "two hosts are there, and both have work of their own"
    laid.clock.advance(1.0)
    assert laid.settle().is_settled
    assert laid.homes == ["tower"] * 3
    assert laid.layout.plan.core.cpus == (), "the core is bound to no core of its stages"
    laid.by_name["shelf"].is_there = True
    assert laid.settle().is_settled
    assert laid.homes == ["shelf"] * 3, "the next epoch is on its own host again"


@pytest.mark.parametrize("parallel", [{"device": "auto"}], ids=str)
def test_r15_what_computes_a_stage_stays_what_it_was(laid: Laid) -> None:
    """Tokens would else differ; and what is free on a GPU is not known."""
    laid.by_name["tower"].num_gpus = 1
    laid.lose("desk")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    assert laid.settle().is_settled
    assert [rank.device for rank in laid.layout.plan.ranks] == ["cpu"] * 3


@pytest.mark.parametrize(
    "parallel",
    [{"data_parallel_size": 3, "threads_per_rank": "1,1,1,2,2,2,1,2,3", "device": ",".join(["cpu"] * 9)}],
    ids=["nine ranks"],
)
def test_r15_settings_of_each_rank_of_all_replicas_are_those_of_its_replica_after_a_takeover(
    laid: Laid,
) -> None:
    laid.lose("shelf")
    laid.settle()
    laid.clock.advance(LIMIT_S)
    assert laid.settle().is_settled
    assert (laid.homes, laid.threads) == (["tower"] * 3, [1, 2, 3])


def test_r15_a_draft_model_that_runs_already_needs_no_memory_a_second_time() -> None:
    laid = Laid("tower", "desk", "shelf", draft="demo")
    try:
        drafter = laid.layout.plan.core.drafter
        assert drafter is not None
        laid.lose("desk")
        laid.by_name["tower"].free_bytes = 0  # the weights of its stage and of the draft model are there
        laid.settle()
        laid.clock.advance(LIMIT_S)
        assert laid.settle() == Settlement(is_settled=True, notes=["without desk: stage 1 goes to shelf."])
        assert laid.layout.plan.core.drafter == drafter, "a core that is started again takes it along"
    finally:
        laid.close()


def test_r15_g1_who_takes_over_needs_room_for_kv_blocks_in_host_memory_too() -> None:
    laid = Laid("tower", "desk", "shelf", cache=CacheConfig(kv_host_bytes=64 * MIB))
    try:
        before = laid.layout.plan.ranks
        assert before[0].store is not None
        tiers = [host_tier_bytes(laid.layout.plan.spec, rank, ITEM_SIZES[rank.dtype]) for rank in before]
        laid.lose("desk")
        laid.settle()
        laid.clock.advance(LIMIT_S)
        for host in laid.by_name.values():
            host.free_bytes = 120 * MIB + tiers[1] - 1
        laid.by_name["shelf"].free_bytes += tiers[2]  # of its own stage, which may not be full
        assert laid.settle().refusal is not None
        laid.by_name["shelf"].free_bytes += 1
        assert laid.settle().is_settled
        assert [rank.store for rank in laid.layout.plan.ranks] == [rank.store for rank in before]
    finally:
        laid.close()


def test_r9_a_store_that_has_gone_does_not_keep_others_from_taking_over(tmp_path: Path) -> None:
    laid = Laid("tower", "desk", "shelf", cache=CacheConfig(kv_store=str(tmp_path / "store")))
    try:
        before = laid.layout.plan.ranks
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").write_text("in its place")
        laid.lose("desk")
        laid.settle()
        laid.clock.advance(LIMIT_S)
        assert laid.settle().is_settled
        assert [rank.store for rank in laid.layout.plan.ranks] == [rank.store for rank in before]
    finally:
        laid.close()

"""Room for plans in flight: on one host as ever, on several for those on the wires (row R15)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.engine.core.core_assembly import depth_and_wire
from penstock.engine.core.plan_depth import WireDepth
from penstock.engine.core.wire_times import NO_WIRE_TIMES, WireTimes
from penstock.engine.supervisor import flight_room
from penstock.engine.supervisor.launch import LaunchPlan, resolve, resolve_replicas
from penstock.errors import UsageError
from penstock.hosts.resources import HostResources
from penstock.scheduler.pacing import FixedDepth

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return str(tmp_path)


def hosts(number: int) -> list[HostResources]:
    return [
        HostResources(num_cpus=8, free_bytes=1 << 30, num_gpus=0, name=f"host{host}")
        for host in range(number)
    ]


def plan_for(model: str, num_hosts: int, *, num_tokens: int = 2048, **parallel: Any) -> LaunchPlan:
    config = EngineConfig(
        model=ModelConfig(model=model),
        parallel=ParallelConfig(**parallel),
        scheduler=SchedulerConfig(max_num_batched_tokens=num_tokens),
    )
    return resolve(config, hosts(num_hosts))


@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (2, "auto"), (3, 2)])
def test_on_one_host_there_is_room_for_the_stages_and_what_is_issued_ahead(
    model: str, num_stages: int, async_depth: Any
) -> None:
    plan = plan_for(model, 1, pipeline_parallel_size=num_stages, async_depth=async_depth)
    ahead = 1 if async_depth == "auto" else async_depth
    assert {rank.depth for rank in plan.ranks} == {num_stages + ahead} == {plan.core.parallel.depth}
    assert {rank.link_frames for rank in plan.ranks} == {ahead + 1}
    assert plan.core.num_links == 0
    depth, wire = depth_and_wire(plan.core.parallel, None, num_links=0)
    assert isinstance(depth, FixedDepth)
    assert depth.number == num_stages
    assert wire is NO_WIRE_TIMES


def test_r15_over_hosts_there_is_room_for_plans_on_the_wires(model: str) -> None:
    plan = plan_for(model, 2, pipeline_parallel_size=4)
    assert {rank.depth for rank in plan.ranks} == {4 + 1 + 30} == {plan.core.parallel.depth}
    assert [rank.link_frames for rank in plan.ranks] == [2, 32, 2, 2], "only one link leaves its host"
    assert plan.core.num_links == 1
    depth, wire = depth_and_wire(plan.core.parallel, None, num_links=1)
    assert isinstance(depth, WireDepth)
    assert isinstance(wire, WireTimes)
    assert (depth.number, depth.largest) == (4, 34)


def test_r15_the_links_of_each_replica_are_counted_for_itself(model: str) -> None:
    config = EngineConfig(
        model=ModelConfig(model=model),
        parallel=ParallelConfig(pipeline_parallel_size=3, data_parallel_size=2, tensor_parallel_size=2),
    )
    replicas = resolve_replicas(config, hosts(3))
    assert [replica.core.num_links for replica in replicas] == [0, 1], "on one host, and on two others"
    assert [rank.link_frames for rank in replicas[0].ranks] == [2] * 6
    assert [rank.link_frames for rank in replicas[1].ranks] == [2, 2, 32, 32, 2, 2]


def test_r15_frames_of_links_between_hosts_are_bounded_by_memory_and_that_is_told(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = plan_for(model, 2, pipeline_parallel_size=2).frame_bytes
    monkeypatch.setattr(flight_room, "LINK_BYTES", 5 * size + 1)
    plan = plan_for(model, 2, pipeline_parallel_size=2)
    assert plan.ranks[0].link_frames == 5
    assert plan.notes == ()
    plan = plan_for(model, 2, pipeline_parallel_size=2, max_plans_in_flight=12)
    (note,) = plan.notes
    assert "room for 5 frames" in note
    assert "11 plans" in note
    monkeypatch.setattr(flight_room, "LINK_BYTES", size // 2)
    plan = plan_for(model, 2, pipeline_parallel_size=2)
    assert plan.ranks[0].link_frames == 2, "as many as on one host"


def test_the_largest_number_of_plans_in_flight_can_be_given(model: str) -> None:
    for num_hosts in (1, 2):
        plan = plan_for(model, num_hosts, pipeline_parallel_size=2, async_depth=1, max_plans_in_flight=9)
        assert {rank.depth for rank in plan.ranks} == {9} == {plan.core.parallel.depth}
        assert [rank.link_frames for rank in plan.ranks] == [2 if num_hosts == 1 else 8, 2]


@pytest.mark.parametrize(
    ("most", "message"), [(3, "have 4 in flight"), (0, "between 1 and"), (5000, "between 1 and")]
)
def test_a_number_that_cannot_be_is_refused(most: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelConfig(pipeline_parallel_size=3, async_depth=1, max_plans_in_flight=most)

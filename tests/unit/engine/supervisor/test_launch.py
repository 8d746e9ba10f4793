"""From a configuration to what each process is told."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import QuantizedLayout, quantization_config
from penstock.config.checks import MAX_TIMEOUT_S
from penstock.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.distributed.group import open_shared_memory
from penstock.engine.supervisor.launch import LaunchPlan, _widths, replica_seed, resolve, resolve_replicas
from penstock.engine.supervisor.placement import hosts_of_replica, replicas_beside
from penstock.engine.supervisor.wiring import Wiring
from penstock.errors import (
    LinkClosedError,
    ModelConfigError,
    NotEnoughMemoryError,
    PartitionError,
    UsageError,
)
from penstock.hosts import resources
from penstock.hosts.local import LocalHost
from penstock.hosts.rank_host import Hosts
from penstock.hosts.resources import HostResources
from penstock.pipeline.links.ring_memory import Ring
from penstock.process.control import descriptors_of

HOSTS = Hosts(LocalHost())
HOST = HostResources(num_cpus=6, free_bytes=1 << 30, num_gpus=0)
FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
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


def plan_for(
    model: str,
    host: HostResources = HOST,
    *,
    dtype: str = "auto",
    length: int | None = None,
    quantization: str = "none",
    **parts: object,
):
    settings = ModelConfig(model=model, dtype=dtype, max_model_len=length, quantization=quantization)
    return resolve(EngineConfig(model=settings, **parts), [host])


def test_g1_a_numeric_class_is_for_all_ranks_and_for_hosts_that_have_it(model: str) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2, numeric_class="avx2")
    able = msgspec.structs.replace(HOST, numeric_classes=("portable", "avx2"))
    assert {rank.numeric_class for rank in plan_for(model, able, parallel=parallel).ranks} == {"avx2"}
    with pytest.raises(UsageError, match="this host supports none"):
        plan_for(model, parallel=parallel)


def test_ranks_tile_the_layers_and_know_their_place(model: str) -> None:
    plan = plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=3, async_depth=2))
    assert [(rank.start_layer, rank.end_layer) for rank in plan.ranks] == [(0, 2), (2, 4), (4, 5)]
    assert [rank.stage for rank in plan.ranks] == [0, 1, 2]
    assert {rank.num_stages for rank in plan.ranks} == {3}
    assert {rank.depth for rank in plan.ranks} == {5}
    assert {rank.link_frames for rank in plan.ranks} == {3}
    assert plan.ranks[0].is_first
    assert plan.ranks[2].is_last


def test_auto_values_come_from_model_and_host(model: str) -> None:
    plan = plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=2, device="auto"))
    assert {rank.dtype for rank in plan.ranks} == {"bfloat16"}
    assert {rank.threads for rank in plan.ranks} == {3}
    assert {rank.device for rank in plan.ranks} == {"cpu"}
    assert {rank.max_model_len for rank in plan.ranks} == {256}
    assert plan.core.eos_token_ids == [2]
    assert plan.core.vocab_size == 96


def test_explicit_values_win(model: str) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2, threads_per_rank=1, device="auto", partition="4,1")
    host = HostResources(num_cpus=6, free_bytes=1 << 30, num_gpus=1)
    cache = CacheConfig(num_blocks=7, block_size=8)
    plan = plan_for(model, host, dtype="float32", length=100, parallel=parallel, cache=cache)
    assert [(rank.start_layer, rank.end_layer) for rank in plan.ranks] == [(0, 4), (4, 5)]
    first = plan.ranks[0]
    assert (first.dtype, first.threads, first.device, first.max_model_len) == ("float32", 1, "cuda:0", 100)
    assert (first.num_blocks, first.block_size, first.kv_cache_bytes) == (7, 8, None)
    assert plan.core.max_model_len == 100


@pytest.mark.parametrize(
    ("given", "threads"), [(2, [2, 2]), ("2", [2, 2]), ("1,3", [1, 3]), ([3, 1], [3, 1])]
)
def test_i13_threads_are_the_same_for_all_stages_or_each_ones_own(
    model: str, given: int | str | list[int], threads: list[int]
) -> None:
    plan = plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=2, threads_per_rank=given))
    assert [rank.threads for rank in plan.ranks] == threads


def test_all_stages_together_wait_no_longer_than_a_system_can(model: str) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=5, step_timeout_s=MAX_TIMEOUT_S)
    assert {rank.wait_timeout_s for rank in plan_for(model, parallel=parallel).ranks} == {MAX_TIMEOUT_S}


def test_more_stages_than_cores_still_get_a_thread(model: str) -> None:
    host = HostResources(num_cpus=2, free_bytes=1 << 30, num_gpus=0)
    plan = plan_for(model, host, parallel=ParallelConfig(pipeline_parallel_size=5))
    assert {rank.threads for rank in plan.ranks} == {1}


def test_a_link_frame_holds_the_largest_step(model: str) -> None:
    plan = plan_for(model, dtype="float32", scheduler=SchedulerConfig(max_num_batched_tokens=100))
    assert plan.frame_bytes >= 100 * 32 * 4
    assert plan.frame_bytes < 100 * 32 * 4 + 4096


def test_more_stages_than_layers_are_refused_with_both_numbers(model: str) -> None:
    with pytest.raises(PartitionError, match="`--pp 8` is more than the model's 5 layers"):
        plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=8))


@pytest.mark.parametrize("length", [0, 1, 257, -3])
def test_a_length_that_the_model_does_not_have_is_refused(model: str, length: int) -> None:
    with pytest.raises(UsageError, match="allows 2 to 256 tokens"):
        plan_for(model, length=length)


def test_weights_that_do_not_fit_are_refused_before_loading(model: str) -> None:
    host = HostResources(num_cpus=1, free_bytes=1000, num_gpus=0)
    with pytest.raises(NotEnoughMemoryError, match="0 MiB are free") as raised:
        plan_for(model, host)
    assert raised.value.exit_code == 4


def test_a_missing_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError):
        plan_for(str(tmp_path / "none"))


def test_the_host_is_asked_for_what_is_there() -> None:
    host = HostResources.detect()
    assert host.num_cpus == len(os.sched_getaffinity(0))
    assert host.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert 0 < host.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("visible", "number"), [(None, 3), ("", 0), ("-1", 0), ("1", 1), ("0,2", 2), ("0,1,2,3,4", 3)]
)
def test_hidden_gpus_are_no_gpus(visible: str | None, number: int, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert resources._num_gpus(tmp_path, visible) == number


# --- Devices -------------------------------------------------------------------------------------------


def gpus(count: int, *cpus: int) -> HostResources:
    return HostResources(num_cpus=len(cpus), free_bytes=1 << 30, num_gpus=count, cpus=cpus)


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected", "sharers"),
    [
        ("cpu", 2, ["cpu"] * 4, [4] * 4),
        ("auto", 0, ["cpu"] * 4, [4] * 4),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"], [2, 1, 1, 2]),
        ("cuda", 0, ["cuda:0"] * 4, [4] * 4),
        ("cuda:1", 3, ["cuda:1"] * 4, [4] * 4),
        ("cpu,cuda,cpu,cuda", 2, ["cpu", "cuda:0", "cpu", "cuda:1"], [2, 1, 2, 1]),
        ("cuda, cuda:1, cpu, cuda:0", 2, ["cuda:0", "cuda:1", "cpu", "cuda:0"], [2, 1, 1, 2]),
    ],
)
def test_i13_each_stage_has_a_device_and_knows_who_shares_it(
    model: str, device: str, num_gpus: int, expected: list[str], sharers: list[int]
) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=4, device=device)
    ranks = plan_for(model, gpus(num_gpus, 0, 1), parallel=parallel).ranks
    assert [rank.device for rank in ranks] == expected
    assert [rank.num_sharers for rank in ranks] == sharers


def test_i13_cores_go_to_the_stages_on_the_cpu(model: str) -> None:
    def shares(device: str, *cpus: int, **parallel: object) -> list[tuple[int, tuple[int, ...]]]:
        config = ParallelConfig(pipeline_parallel_size=len(device.split(",")), device=device, **parallel)
        return [(rank.threads, rank.cpus) for rank in plan_for(model, gpus(2, *cpus), parallel=config).ranks]

    assert shares("cpu,cuda", 0, 1, 2, 3) == [(3, (0, 1, 2)), (1, ())]
    assert shares("cuda,cpu", 0, 1, 2, 3) == [(1, ()), (3, (1, 2, 3))]
    assert shares("cpu,cuda,cpu,cuda", 0, 1, 2, 3, 4, 5) == [(2, (0, 1)), (1, ()), (2, (3, 4)), (1, ())]
    assert shares("cpu,cuda", 0) == [(1, ()), (1, ())]
    assert shares("cuda,cuda", 0, 1, 2, 3) == [(2, ()), (2, ())]
    assert shares("cpu,cuda", 0, 1, 2, 3, threads_per_rank="2,1", pin_threads="on") == [(2, (0, 1)), (1, ())]


def test_only_weights_of_stages_on_the_cpu_need_its_memory(model: str) -> None:
    spec = plan_for(model).spec
    half = spec.stage_parameters(0, 3) * 2
    host = HostResources(num_cpus=2, free_bytes=half, num_gpus=1)
    mixed = ParallelConfig(pipeline_parallel_size=2, partition="3,2", device="cpu,cuda")
    plan_for(model, host, parallel=mixed)
    with pytest.raises(NotEnoughMemoryError):
        plan_for(model, host, parallel=msgspec.structs.replace(mixed, device="cpu"))


# --- Quantised weights ---------------------------------------------------------------------------------


def quantised(
    directory: Path, layout: QuantizedLayout = "gptq", dtype: str = "float16", bits: int = 4
) -> str:
    """A directory with the config.json of a quantised checkpoint, and nothing else."""
    section = quantization_config(layout, bits=bits, group_size=16, symmetric=True)
    fields = FIELDS | {"torch_dtype": dtype, "quantization_config": section}
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def test_weights_are_left_alone_without_a_word(model: str) -> None:
    plan = plan_for(model)
    assert {rank.quantization for rank in plan.ranks} == {"none"}
    assert plan.notes == ()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_rank_is_told_to_quantise(model: str, quantization: str) -> None:
    plan = plan_for(model, quantization=quantization, parallel=ParallelConfig(pipeline_parallel_size=2))
    assert {(rank.quantization, rank.dtype) for rank in plan.ranks} == {(quantization, "bfloat16")}
    assert plan.notes == (f"weights are quantised to {quantization} at load.",)


@pytest.mark.parametrize("asked", ["none", "int4"])
def test_a_quantised_checkpoint_is_taken_as_it_is(tmp_path: Path, asked: str) -> None:
    plan = plan_for(quantised(tmp_path, dtype="bfloat16"), quantization=asked)
    assert plan.spec.quantization is not None
    assert {rank.quantization for rank in plan.ranks} == {"none"}
    assert plan.notes == ("weights keep the checkpoint's quantisation, gptq: int4 in groups of 16.",)


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is int8, but the checkpoint is quantised already: gptq") as caught:
        plan_for(quantised(tmp_path), quantization="int8")
    assert caught.value.param == "quantization"
    assert caught.value.remedy


def test_float16_becomes_bfloat16_where_the_kernels_have_none(tmp_path: Path) -> None:
    plan = plan_for(quantised(tmp_path))
    assert {rank.dtype for rank in plan.ranks} == {"bfloat16"}
    assert "dtype is bfloat16, not the checkpoint's float16" in plan.notes[-1]
    assert plan.frame_bytes < 2 * 2048 * 32 * 4
    assert plan_for(quantised(tmp_path), dtype="float32").ranks[0].dtype == "float32"
    with pytest.raises(UsageError, match="have no float16") as caught:
        plan_for(quantised(tmp_path), dtype="float16")
    assert caught.value.param == "dtype"


def test_a_float16_checkpoint_is_quantised_for_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"torch_dtype": "float16"}))
    assert plan_for(str(tmp_path)).ranks[0].dtype == "float16"
    plan = plan_for(str(tmp_path), quantization="int8")
    assert plan.ranks[0].dtype == "bfloat16"
    assert len(plan.notes) == 2


def test_quantised_weights_are_for_the_cpu(tmp_path: Path, model: str) -> None:
    host = HostResources(num_cpus=6, free_bytes=1 << 30, num_gpus=1)
    parallel = ParallelConfig(device="cpu,cuda:1", pipeline_parallel_size=2)
    with pytest.raises(UsageError, match=r"is cpu,cuda:1, with --quantization int4: .* CPU") as caught:
        plan_for(model, host, quantization="int4", parallel=parallel)
    assert caught.value.param == "device"
    automatic = plan_for(model, host, quantization="int4", parallel=ParallelConfig(device="auto"))
    assert automatic.ranks[0].device == "cpu"
    assert any("not the GPU" in note for note in automatic.notes)
    with pytest.raises(UsageError, match="with a quantised checkpoint: "):
        plan_for(quantised(tmp_path), host, parallel=parallel)


def test_quantised_weights_need_less_room(tmp_path: Path, model: str) -> None:
    parameters = plan_for(model).spec.stage_parameters(0, 5)
    host = HostResources(num_cpus=1, free_bytes=parameters, num_gpus=0)
    with pytest.raises(NotEnoughMemoryError, match="--quantization int8 or int4"):
        plan_for(model, host)
    plan_for(model, host, quantization="int8")
    half = HostResources(num_cpus=1, free_bytes=parameters // 2, num_gpus=0)
    with pytest.raises(NotEnoughMemoryError):
        plan_for(model, half, quantization="int8")
    plan_for(model, half, quantization="int4")
    plan_for(quantised(tmp_path), half)


# --- Kernels and threads -------------------------------------------------------------------------------


def test_the_choice_of_kernels_is_checked_before_the_model_is_looked_for(model: str) -> None:
    plan = plan_for(model, parallel=ParallelConfig(kernels="-attention,-head"))
    assert {rank.kernels for rank in plan.ranks} == {"-attention,-head"}
    with pytest.raises(UsageError, match="kernels is '-fast'"):
        plan_for("/nowhere", parallel=ParallelConfig(kernels="-fast"))


def cores(*cpus: int) -> HostResources:
    return HostResources(num_cpus=len(cpus), free_bytes=1 << 30, num_gpus=1, cpus=cpus)


def test_the_core_keeps_off_the_last_stages_cores(model: str) -> None:
    def core_cpus(host: HostResources, **parallel: object) -> tuple[int, ...]:
        return plan_for(model, host, parallel=ParallelConfig(**parallel)).core.cpus

    assert core_cpus(cores(1, 2, 4, 6), pipeline_parallel_size=2) == (1, 2)
    assert core_cpus(cores(1, 2, 4), pipeline_parallel_size=3) == (1, 2)
    assert core_cpus(cores(1, 2), pipeline_parallel_size=1) == (), "there is nowhere else"
    assert core_cpus(cores(1, 2, 4), pipeline_parallel_size=2, threads_per_rank=1) == (), "nobody is bound"


def cpus_of(model: str, host: HostResources, **parallel: object) -> list[tuple[int, ...]]:
    return [rank.cpus for rank in plan_for(model, host, parallel=ParallelConfig(**parallel)).ranks]


def test_each_rank_gets_the_next_cores(model: str) -> None:
    host = cores(1, 2, 4, 6)
    assert cpus_of(model, host, pipeline_parallel_size=2) == [(1, 2), (4, 6)]
    assert cpus_of(model, host) == [(1, 2, 4, 6)]
    assert cpus_of(model, host, pipeline_parallel_size=2, threads_per_rank=1, pin_threads="on") == [
        (1,),
        (2,),
    ]


def test_i13_cores_follow_the_threads_of_each_rank(model: str) -> None:
    host = cores(1, 2, 4, 6)
    assert cpus_of(model, host, pipeline_parallel_size=2, threads_per_rank="1,3") == [(1,), (2, 4, 6)]
    assert cpus_of(model, host, pipeline_parallel_size=2, threads_per_rank="2,1") == [(), ()]
    pinned = cpus_of(model, host, pipeline_parallel_size=2, threads_per_rank="2,1", pin_threads="on")
    assert pinned == [(1, 2), (4,)]
    assert cpus_of(model, host, pipeline_parallel_size=2, threads_per_rank="2,3") == [(), ()]


def test_threads_that_leave_cores_free_are_not_pinned_unasked(model: str) -> None:
    assert cpus_of(model, cores(1, 2, 4), pipeline_parallel_size=2) == [(), ()]


def test_threads_are_not_pinned_where_they_do_not_fit(model: str) -> None:
    host = cores(0, 1)
    assert cpus_of(model, host, pipeline_parallel_size=3) == [(), (), ()]
    assert cpus_of(model, host, threads_per_rank=3) == [()]
    assert cpus_of(model, host, pin_threads="off") == [()]
    assert cpus_of(model, host, device="cuda") == [()]
    assert cpus_of(model, host, backend="inprocess") == [()]
    assert cpus_of(model, HOST) == [()], "a host that does not tell its cores"


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"threads_per_rank": 3}, "all stages together have 3 threads for 2 usable cores"),
        ({"device": "cuda"}, "run on a GPU"),
        ({"backend": "inprocess"}, "threads of the caller's process"),
    ],
)
def test_pinning_that_is_asked_for_and_impossible_is_refused(
    model: str, parallel: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError, match=f"--pin-threads is on, but .*{reason}") as caught:
        cpus_of(model, cores(0, 1), pin_threads="on", **parallel)
    assert caught.value.param == "pin_threads"


@pytest.fixture
def three_stages(model: str) -> LaunchPlan:
    return plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=3))


def test_each_child_inherits_its_own_ends_only(three_stages: LaunchPlan) -> None:
    wiring = Wiring(three_stages, HOSTS)
    ends = [wiring.rank(stage) for stage in range(3)]
    links = [{end.memory_fd for end in (e.incoming, *e.outgoing) if end} for e in ends]
    assert links[0] & links[1]
    assert links[1] & links[2]
    assert not links[0] & links[2]
    tokens = [[ring.memory_fd for ring in end.tokens] for end in ends]
    assert tokens == [tokens[2][:1], tokens[2][1:], tokens[2]]
    assert len(set(tokens[2])) == 2
    assert [end.results for end in ends] == [None, None, wiring.core().results]
    assert ends[0].incoming is None
    assert not ends[2].outgoing
    assert not any(end.meeting for end in ends)
    own = [set(descriptors_of(end)) for end in ends]
    assert own[0] & own[2] == set(ends[0].tokens[0].fds)
    assert len(descriptors_of(wiring.core())) == 6, "three plan channels, and the ring of results"
    assert len({end.plans for end in ends}) == 3
    wiring.close()


def test_the_ring_between_two_stages_is_one(three_stages: LaunchPlan) -> None:
    wiring = Wiring(three_stages, HOSTS)
    (sender,), receiver = wiring.rank(0).outgoing, wiring.rank(1).incoming
    assert receiver is not None
    writer, reader = Ring(sender, "a"), Ring(receiver, "b")
    writer.write(b"frame", 1.0, "step 0")
    assert reader.read(1.0, "step 0").startswith(b"frame")
    writer.close()
    reader.close()
    wiring.close()


def test_who_waits_at_a_ring_of_an_epoch_that_is_over_stops(three_stages: LaunchPlan) -> None:
    wiring = Wiring(three_stages, HOSTS, epoch=4)
    assert {wiring.core().epoch, *(wiring.rank(stage).epoch for stage in range(3))} == {4}
    (sender,), receiver = wiring.rank(0).outgoing, wiring.rank(1).incoming
    assert receiver is not None
    writer, reader = Ring(sender, "a"), Ring(receiver, "b")
    wiring.end()
    with pytest.raises(LinkClosedError):
        reader.read(60.0, "step 0")
    with pytest.raises(LinkClosedError):
        writer.write(b"frame", 60.0, "step 0")
    writer.close()
    reader.close()


def test_r6_no_descriptor_is_left_after_close(three_stages: LaunchPlan) -> None:
    before = len(os.listdir("/proc/self/fd"))
    wiring = Wiring(three_stages, HOSTS)
    wiring.delivered()
    assert len(os.listdir("/proc/self/fd")) == before + 15, "five rings, of which the supervisor can end each"
    wiring.close()
    wiring.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def wide_model(tmp_path: Path) -> str:
    """Return a model whose vocabulary four ranks can share."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"vocab_size": 256}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("tp_sizes", "pipelines", "stages"),
    [
        ("2,2,2,2", [(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("4,4", [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("1,1,1,1,1", [(0, 1, 2, 3, 4)], []),
        ("2", [(0,), (1,)], [(0, 1)]),
    ],
)
def test_c1_c2_ranks_are_joined_in_pipelines_and_in_stages(
    wide_model: str, tp_sizes: str, pipelines: list[tuple[int, ...]], stages: list[tuple[int, ...]]
) -> None:
    num_stages = tp_sizes.count(",") + 1
    parallel = ParallelConfig(pipeline_parallel_size=num_stages, tensor_parallel_size=tp_sizes)
    plan = plan_for(wide_model, parallel=parallel)
    wiring = Wiring(plan, HOSTS)
    ends = [wiring.rank(rank.stage, rank.tp_rank) for rank in plan.ranks]
    for pipeline in pipelines:
        ranks = [plan.ranks[number] for number in pipeline]
        assert [rank.stage for rank in ranks] == list(range(num_stages))
        assert [rank.is_first for rank in ranks] == [True] + [False] * (num_stages - 1)
        assert [rank.is_last for rank in ranks] == [False] * (num_stages - 1) + [True]
        assert ends[pipeline[0]].incoming is None
        assert not ends[pipeline[-1]].outgoing
        for sender, receiver in pairwise(pipeline):
            assert list(ends[sender].outgoing) == [ends[receiver].incoming]
    meetings = [end.meeting for end in ends if end.meeting is not None]
    met = {tuple(rank for rank, end in enumerate(ends) if end.meeting == meeting) for meeting in meetings}
    assert sorted(met) == stages
    for stage in stages:
        assert [plan.ranks[number].tp_rank for number in stage] == list(range(len(stage)))
    wiring.close()


@pytest.mark.parametrize(
    ("tp_sizes", "output"),
    [("1", 0), ("1,1", 1), ("1,1,1,1", 3), ("4,4", 4), ("2,2,2,2", 6), ("2", 0), ("2,1,4", 3)],
)
def test_d8_only_the_first_rank_of_the_last_stage_has_results(
    wide_model: str, tp_sizes: str, output: int
) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=tp_sizes.count(",") + 1, tensor_parallel_size=tp_sizes)
    plan = plan_for(wide_model, parallel=parallel)
    wiring = Wiring(plan, HOSTS)
    ends = [wiring.rank(rank.stage, rank.tp_rank) for rank in plan.ranks]
    assert [number for number, end in enumerate(ends) if end.results is not None] == [output]
    assert [number for number, rank in enumerate(plan.ranks) if rank.is_output] == [output]
    assert ends[output].results == wiring.core().results
    wiring.close()


def test_c9_no_ring_carries_two_kinds_of_messages_or_joins_more_than_two_ranks(ragged: LaunchPlan) -> None:
    wiring = Wiring(ragged, HOSTS)
    ends = [wiring.rank(rank.stage, rank.tp_rank) for rank in ragged.ranks]
    uses: dict[int, list[str]] = {}
    for end in ends:
        frames = [end.incoming, *end.outgoing]
        rings: dict[str, list[Any]] = {"frames": frames, "samples": end.tokens, "results": [end.results]}
        for kind, ring in ((kind, ring) for kind, of_kind in rings.items() for ring in of_kind if ring):
            uses.setdefault(min(descriptors_of(ring)), []).append(kind)
    assert sorted(uses.values()) == [["frames"] * 2] * 3 + [["results"]] + [["samples"] * 2] * 3
    wiring.close()


@pytest.fixture
def ragged(model: str) -> LaunchPlan:
    """Ranks 0 and 1 share stage 0, rank 2 is stage 1, ranks 3 and 4 share stage 2."""
    return plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=3, tensor_parallel_size="2,1,2"))


def test_d13_ranks_of_a_ragged_pipeline(ragged: LaunchPlan) -> None:
    assert [(rank.stage, rank.tp_rank, rank.tp_size) for rank in ragged.ranks] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 1),
        (2, 0, 2),
        (2, 1, 2),
    ]
    assert [list(rank.receivers) for rank in ragged.ranks] == [[0], [], [0, 1], [], []]
    assert {rank.first_tp_size for rank in ragged.ranks} == {2}
    assert [rank.threads for rank in ragged.ranks] == [1] * 5, "six cores for five ranks"
    assert {rank.num_sharers for rank in ragged.ranks} == {5}
    assert ragged.num_stages == 3


def test_c5_d13_who_meets_whom_in_a_ragged_pipeline(ragged: LaunchPlan) -> None:
    wiring = Wiring(ragged, HOSTS)
    ends = [wiring.rank(rank.stage, rank.tp_rank) for rank in ragged.ranks]
    assert [len(end.outgoing) for end in ends] == [1, 0, 2, 0, 0], "each rank of stage 2 gets its share"
    assert [end.incoming for end in ends] == [None, None, ends[0].outgoing[0], *ends[2].outgoing]
    assert [len(end.tokens) for end in ends] == [1, 1, 1, 3, 0]
    assert [end.tokens for end in ends[:3]] == [[ring] for ring in ends[3].tokens]
    assert [end.results is not None for end in ends] == [False, False, False, True, False]
    assert ends[0].meeting == ends[1].meeting != ends[3].meeting == ends[4].meeting
    assert ends[2].meeting is None
    assert wiring.core().stages == [0, 0, 1, 2, 2]
    wiring.close()


def test_r3_who_waits_for_a_rank_of_an_epoch_that_is_over_is_let_go(ragged: LaunchPlan) -> None:
    before = len(os.listdir("/proc/self/fd"))
    wiring = Wiring(ragged, HOSTS)
    handle = wiring.rank(0, 1).meeting
    assert handle is not None
    memory = open_shared_memory(handle).memory
    assert memory[0] == 0
    wiring.end()
    assert memory[0] == 1
    assert len(os.listdir("/proc/self/fd")) == before + 1, "the mapping's own"


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads, which 3 ranks cannot share"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be at least 1"),
        ({"tensor_parallel_size": "2,x"}, 'tensor_parallel_size is "2,x", which is not a number of ranks'),
        ({"tensor_parallel_size": "2,1", "pipeline_parallel_size": 3}, "2 entries for 3 stages"),
        (
            {"tensor_parallel_size": 2, "threads_per_rank": "1,1,1"},
            "threads_per_rank has 3 entries for 1 stages of 2 ranks",
        ),
    ],
)
def test_b9_ranks_that_cannot_share_a_stage_are_refused(
    model: str, parallel: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        plan_for(model, parallel=ParallelConfig(**parallel))


def test_a14_ranks_know_the_sizes_of_all_stages_that_a_tied_head_goes_through(model: str) -> None:
    """Issue 25, point 14."""
    (Path(model) / "config.json").write_text(json.dumps(FIELDS | {"tie_word_embeddings": True}))
    parallel = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size="1,2", tied_head="transfer")
    ranks = plan_for(model, parallel=parallel).ranks
    assert {(rank.tied_head, rank.tp_sizes) for rank in ranks} == {("transfer", (1, 2))}
    assert [(rank.next_tp_size, list(rank.receivers)) for rank in ranks[:1]] == [(2, [0, 1])]


def test_quantised_groups_that_straddle_a_shard_are_refused(model: str) -> None:
    tp = ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(UsageError, match=r"mlp.down_proj is quantised in groups: 24 of 48 inputs"):
        plan_for(model, parallel=tp, quantization="int8")
    wide = {"hidden_size": 1024, "intermediate_size": 1024 + 64}
    (Path(model) / "config.json").write_text(json.dumps(FIELDS | wide))
    with pytest.raises(UsageError, match=r"mlp.down_proj .*544 of 1088 inputs .*not a multiple of 64"):
        plan_for(model, parallel=tp, quantization="int4")
    (Path(model) / "config.json").write_text(json.dumps(FIELDS | wide | {"intermediate_size": 1024}))
    assert len(plan_for(model, parallel=tp, quantization="int4").ranks) == 2


def test_i13_one_setting_for_all_one_a_stage_or_one_a_rank() -> None:
    def threads(given: str) -> list[int] | None:
        return ParallelConfig(
            pipeline_parallel_size=2, tensor_parallel_size="2,1", threads_per_rank=given
        ).rank_threads

    assert [threads("2"), threads("2,3"), threads("1,2,3")] == [[2, 2, 2], [2, 2, 3], [1, 2, 3]]
    devices = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size="2,1", device="cuda,cpu")
    assert devices.rank_devices == ["cuda", "cuda", "cpu"]


def test_c2_i1_i4_replicas_follow_one_another_and_share_the_host(model: str) -> None:
    parallel = ParallelConfig(data_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size="1,2")
    host = HostResources(num_cpus=6, free_bytes=1 << 30, num_gpus=0, cpus=(0, 1, 2, 3, 4, 5))
    plans = resolve_replicas(EngineConfig(model=ModelConfig(model=model), parallel=parallel, seed=5), [host])
    assert [[(rank.replica, rank.stage, rank.tp_rank) for rank in plan.ranks] for plan in plans] == [
        [(0, 0, 0), (0, 1, 0), (0, 1, 1)],
        [(1, 0, 0), (1, 1, 0), (1, 1, 1)],
    ]
    assert [rank.cpus for plan in plans for rank in plan.ranks] == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert [plan.core.replica for plan in plans] == [0, 1]
    assert [plan.core.seed for plan in plans] == [replica_seed(5, 0), replica_seed(5, 1)]
    assert {rank.num_sharers for plan in plans for rank in plan.ranks} == {6}


def test_weights_of_all_replicas_must_fit(model: str) -> None:
    alone = plan_for(model).spec
    room = HostResources(num_cpus=6, free_bytes=int(1.5 * 2 * alone.stage_parameters(0, 5)), num_gpus=0)
    plan_for(model, room)
    with pytest.raises(NotEnoughMemoryError):
        plan_for(model, room, parallel=ParallelConfig(data_parallel_size=2))
    plan_for(model, room, parallel=ParallelConfig(tensor_parallel_size=2))


def named(name: str, **changes: object) -> HostResources:
    return msgspec.structs.replace(HOST, name=name, **changes)


def test_stages_go_to_the_hosts_in_order_and_their_ranks_together(model: str) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=3, tensor_parallel_size="2,1,1")
    config = EngineConfig(model=ModelConfig(model=model), parallel=parallel)
    plan = resolve(config, [named("attic"), named("cellar")])
    assert [rank.host for rank in plan.ranks] == ["attic", "attic", "attic", "cellar"]
    assert {rank.host for rank in resolve(config, [HOST]).ranks} == {"this host"}


def test_i1_replicas_have_hosts_of_their_own_where_there_are_enough(model: str) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2, data_parallel_size=2)
    config = EngineConfig(model=ModelConfig(model=model), parallel=parallel)
    plans = resolve_replicas(config, [named(name) for name in ("attic", "cellar", "shed", "yard")])
    homes = [[rank.host for rank in plan.ranks] for plan in plans]
    assert homes == [["attic", "cellar"], ["shed", "yard"]]
    pair = resolve_replicas(config, [named("attic", num_cpus=2), named("cellar", num_cpus=4)])
    assert [[rank.host for rank in plan.ranks] for plan in pair] == [["attic"] * 2, ["cellar"] * 2]
    assert [[rank.threads for rank in plan.ranks] for plan in pair] == [[1, 1], [2, 2]]
    assert [plan.core.num_links for plan in pair] == [0, 0]


@pytest.mark.parametrize(
    ("num_replicas", "num_hosts", "hosts"),
    [
        (1, 1, ["a"]),
        (1, 3, ["abc"]),
        (2, 1, ["a", "a"]),
        (2, 3, ["a", "bc"]),
        (2, 4, ["ab", "cd"]),
        (3, 2, ["a", "a", "b"]),
        (4, 2, ["a", "a", "b", "b"]),
    ],
)
def test_i1_every_host_is_some_replicas_and_replicas_share_only_where_hosts_are_few(
    num_replicas: int, num_hosts: int, hosts: list[str]
) -> None:
    names = "abcd"[:num_hosts]
    assert ["".join(hosts_of_replica(r, num_replicas, names)) for r in range(num_replicas)] == hosts
    for replica, own in enumerate(hosts):
        beside = replicas_beside(replica, num_replicas, num_hosts)
        assert beside == [other for other, theirs in enumerate(hosts) if theirs == own]


def test_each_host_shares_out_its_own_cores_and_gpus(model: str) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=3, device="auto")
    config = EngineConfig(model=ModelConfig(model=model), parallel=parallel)
    attic = named("attic", num_cpus=4, cpus=(0, 1, 2, 3))
    cellar = named("cellar", num_cpus=2, num_gpus=1, cpus=(0, 1))
    ranks = resolve(config, [attic, cellar]).ranks
    assert [rank.host for rank in ranks] == ["attic", "attic", "cellar"]
    assert [rank.device for rank in ranks] == ["cpu", "cpu", "cuda:0"]
    assert [rank.threads for rank in ranks] == [2, 2, 2]
    assert [rank.cpus for rank in ranks] == [(0, 1), (2, 3), ()]
    assert [rank.num_sharers for rank in ranks] == [2, 2, 1]


def test_weights_must_fit_on_each_host_and_the_error_names_it(model: str) -> None:
    config = EngineConfig(model=ModelConfig(model=model), parallel=ParallelConfig(pipeline_parallel_size=2))
    weights = 2 * plan_for(model).spec.stage_parameters(0, 5)
    resolve(config, [named("attic", free_bytes=weights), named("cellar", free_bytes=weights)])
    with pytest.raises(NotEnoughMemoryError, match=r"MiB on cellar, but 0 MiB are free there"):
        resolve(config, [named("attic", free_bytes=weights), named("cellar", free_bytes=1000)])


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cpu,cuda:0", "cpu, cuda:0: some are CPUs and some are GPUs"),
        ("cuda:1", "cuda:1, cuda:1: two ranks would share cuda:1"),
        ("cuda", "cuda:0, cuda:0: two ranks would share cuda:0"),
    ],
)
def test_d13_ranks_of_a_stage_are_on_devices_that_can_add(model: str, device: str, said: str) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, device=device)
    with pytest.raises(UsageError, match=said):
        plan_for(model, parallel=parallel)
    ragged = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size="2,1", device="cuda:0,cuda:1,cpu")
    assert [rank.device for rank in plan_for(model, parallel=ragged).ranks] == ["cuda:0", "cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([1, 1], ""),
        ([2, 2], ", layers 0 to 5 by 2"),
        ([2, 1], ", layers 0 to 3 by 2"),
        ([1, 4], ", layers 4 to 5 by 4"),
    ],
)
def test_d15_numbers_of_quantised_weights_depend_on_how_many_share_a_layer(
    sizes: list[int], text: str
) -> None:
    """Not on where stages are cut."""
    assert _widths([(0, 4), (4, 6)], sizes) == text
    assert _widths([(0, 1), (1, 4), (4, 6)], [sizes[0], *sizes]) == text


def notes_of(model: str, parallel: ParallelConfig, cache: CacheConfig) -> tuple[str, ...]:
    return resolve(EngineConfig(model=ModelConfig(model=model), parallel=parallel, cache=cache), [HOST]).notes


def test_settings_that_change_nothing_are_named(model: str) -> None:
    """Issue 25, point 13."""
    experts = ParallelConfig(enable_expert_parallel=True, tensor_parallel_size=2)
    (said,) = notes_of(model, experts, CacheConfig())
    assert said == "--enable-expert-parallel changes nothing: LlamaForCausalLM has no experts."
    (said,) = notes_of(model, ParallelConfig(), CacheConfig(num_blocks=77, kv_cache_bytes=1 << 20))
    assert said == "--kv-cache-bytes is not used: --num-blocks 77 sets the size of the KV cache."
    (said,) = notes_of(
        model, ParallelConfig(), CacheConfig(kv_prefetch_policy="wait-all", kv_store_patience_s=0.5)
    )
    assert said.startswith("--kv-store-patience 0.5 is not used: --kv-prefetch-policy is wait-all")
    for cache in (
        CacheConfig(num_blocks=77),
        CacheConfig(kv_cache_bytes=1 << 20),
        CacheConfig(kv_prefetch_policy="best-effort"),
        CacheConfig(kv_store_patience_s=0.5),
    ):
        assert notes_of(model, ParallelConfig(), cache) == ()


def test_whole_experts_of_one_rank_are_named_as_what_changes_nothing(tmp_path: Path) -> None:
    """Issue 25, point 13."""
    fields = FIELDS | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (said,) = notes_of(str(tmp_path), ParallelConfig(enable_expert_parallel=True), CacheConfig())
    assert "each stage has one rank" in said
    shared = ParallelConfig(enable_expert_parallel=True, tensor_parallel_size=2)
    assert notes_of(str(tmp_path), shared, CacheConfig()) == ()

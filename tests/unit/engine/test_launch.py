"""From a configuration to what each process is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.engine.launch import Host, LaunchPlan, resolve
from penstock.engine.wiring import Wiring
from penstock.errors import ModelConfigError, NotEnoughMemoryError, PartitionError, UsageError
from penstock.pipeline.ring_memory import Ring

HOST = Host(num_cpus=6, free_bytes=1 << 30, has_cuda=False)
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
    model: str, host: Host = HOST, *, dtype: str = "auto", length: int | None = None, **parts: object
):
    return resolve(
        EngineConfig(model=ModelConfig(model=model, dtype=dtype, max_model_len=length), **parts), host
    )


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
    host = Host(num_cpus=6, free_bytes=1 << 30, has_cuda=True)
    cache = CacheConfig(num_blocks=7, block_size=8)
    plan = plan_for(model, host, dtype="float32", length=100, parallel=parallel, cache=cache)
    assert [(rank.start_layer, rank.end_layer) for rank in plan.ranks] == [(0, 4), (4, 5)]
    first = plan.ranks[0]
    assert (first.dtype, first.threads, first.device, first.max_model_len) == ("float32", 1, "cuda", 100)
    assert (first.num_blocks, first.block_size, first.kv_cache_bytes) == (7, 8, None)
    assert plan.core.max_model_len == 100


def test_more_stages_than_cores_still_get_a_thread(model: str) -> None:
    host = Host(num_cpus=2, free_bytes=1 << 30, has_cuda=False)
    plan = plan_for(model, host, parallel=ParallelConfig(pipeline_parallel_size=5))
    assert {rank.threads for rank in plan.ranks} == {1}


def test_a_link_frame_holds_the_largest_step(model: str) -> None:
    plan = plan_for(model, dtype="float32", scheduler=SchedulerConfig(max_num_batched_tokens=100))
    assert plan.frame_bytes >= 2 * 100 * 32 * 4
    assert plan.frame_bytes < 2 * 100 * 32 * 4 + 4096


def test_more_stages_than_layers_are_refused_with_both_numbers(model: str) -> None:
    with pytest.raises(PartitionError, match="`--pp 8` is more than the model's 5 layers"):
        plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=8))


@pytest.mark.parametrize("length", [0, 1, 257, -3])
def test_a_length_that_the_model_does_not_have_is_refused(model: str, length: int) -> None:
    with pytest.raises(UsageError, match="takes 2 to 256 tokens"):
        plan_for(model, length=length)


def test_weights_that_do_not_fit_are_refused_before_loading(model: str) -> None:
    host = Host(num_cpus=1, free_bytes=1000, has_cuda=False)
    with pytest.raises(NotEnoughMemoryError, match="0 MiB are free") as raised:
        plan_for(model, host)
    assert raised.value.exit_code == 4


def test_a_missing_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError):
        plan_for(str(tmp_path / "none"))


def test_the_host_is_asked_for_what_is_there() -> None:
    host = Host.detect()
    assert host.num_cpus == len(os.sched_getaffinity(0))
    assert 0 < host.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_hidden_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Host.detect().has_cuda
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not Host.detect().has_cuda


@pytest.fixture
def three_stages(model: str) -> LaunchPlan:
    return plan_for(model, parallel=ParallelConfig(pipeline_parallel_size=3))


def test_each_child_inherits_its_own_ends_only(three_stages: LaunchPlan) -> None:
    wiring = Wiring(three_stages)
    ends = [wiring.rank(stage) for stage in range(3)]
    rings = [{end.memory_fd for end in (e.config.incoming, e.config.outgoing) if end} for e in ends]
    assert rings[0] & rings[1]
    assert rings[1] & rings[2]
    assert not rings[0] & rings[2]
    assert ends[0].config.incoming is None
    assert ends[2].config.outgoing is None
    assert [len(end.config.token_addresses) for end in ends] == [1, 1, 2]
    assert not set(ends[0].inherit) & set(ends[2].inherit)
    assert len(wiring.core().inherit) == 4, "three plan channels and the clients"
    assert len({end.config.plan_address for end in ends}) == 3
    wiring.close()


def test_the_ring_between_two_stages_is_one(three_stages: LaunchPlan) -> None:
    wiring = Wiring(three_stages)
    sender, receiver = wiring.rank(0).config.outgoing, wiring.rank(1).config.incoming
    assert sender is not None
    assert receiver is not None
    writer, reader = Ring(sender, "a"), Ring(receiver, "b")
    writer.write(b"frame", 1.0, "step 0")
    assert reader.read(1.0, "step 0").startswith(b"frame")
    writer.close()
    reader.close()
    wiring.close()


def test_r6_no_descriptor_is_left_after_close(three_stages: LaunchPlan) -> None:
    before = len(os.listdir("/proc/self/fd"))
    wiring = Wiring(three_stages)
    wiring.close_children_ends()
    assert len(os.listdir("/proc/self/fd")) == before + 1, "the handle for new clients"
    wiring.close()
    assert len(os.listdir("/proc/self/fd")) == before

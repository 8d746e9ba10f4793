"""Configuration values: ranges, derived numbers, and the wire to child processes."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest

from penstock.config.declared import configured_engine
from penstock.config.engine import (
    NUMERIC_CLASSES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.config.hosts import HostsConfig
from penstock.config.limits import ConnectionLimits, GrammarLimits
from penstock.config.server import ServerConfig
from penstock.errors import UsageError
from penstock.process.config import CoreConfig, RankConfig


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (ParallelConfig, "pipeline_parallel_size", 0),
        (ParallelConfig, "async_depth", -1),
        (ParallelConfig, "threads_per_rank", 0),
        (CacheConfig, "block_size", 0),
        (CacheConfig, "num_blocks", 0),
        (CacheConfig, "kv_cache_bytes", 0),
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "max_num_batched_tokens", 0),
        (SchedulerConfig, "prefill_chunk", 0),
        (SchedulerConfig, "max_waiting_requests", 0),
        (SchedulerConfig, "built_grammar_bytes", 0),
        (ServerConfig, "min_free_bytes", -1),
    ],
)
def test_a_number_that_is_too_low_is_named(cls: type[Any], field: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{field} is {value}; it must be at least {value + 1}") as caught:
        cls(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "out_of_range")


@pytest.mark.parametrize("value", [0.0, -1.0, 1e7, math.inf, math.nan])
@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (ParallelConfig, "load_timeout_s"),
        (ParallelConfig, "step_timeout_s"),
        (HostsConfig, "rejoin_timeout_s"),
        (GrammarLimits, "compile_timeout_s"),
        (ConnectionLimits, "write_timeout_s"),
    ],
)
def test_a_time_that_no_system_can_wait_is_refused(cls: type[Any], field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{field} is {value}; it must be above 0 and at most 1000000 s"):
        cls(**{field: value})


def test_what_lasts_longer_than_a_wait_is_no_error() -> None:
    assert HostsConfig(join_token_ttl_s=1e8).join_token_ttl_s == 1e8
    with pytest.raises(UsageError, match="join_token_ttl_s is inf; it must be above 0"):
        HostsConfig(join_token_ttl_s=math.inf)


@pytest.mark.parametrize("given", ["", "AVX512", "avx", "torch"])
def test_g1_an_unknown_numeric_class_is_refused_and_the_known_ones_are_listed(given: str) -> None:
    with pytest.raises(UsageError, match=f"numeric_class is '{given}'") as caught:
        ParallelConfig(numeric_class=given)
    assert caught.value.param == "numeric_class"
    assert all(name in caught.value.remedy for name in ("auto", *NUMERIC_CLASSES))
    assert ParallelConfig(numeric_class="avx512-bf16").numeric_class == "avx512-bf16"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", 'threads_per_rank is ""'),
        ("1,", 'threads_per_rank is "1,"'),
        ("two", "one per stage with commas between"),
        ("1,2,3", "has 3 entries for 2 stages"),
        ([1, 1, 1], "has 3 entries for 2 stages"),
        ("0,1", "threads_per_rank is 0; it must be at least 1"),
        ([2, -1], "threads_per_rank is -1; it must be at least 1"),
        ("1,1025", "threads_per_rank is 1025, more than 1024"),
    ],
)
def test_i13_threads_that_cannot_be_met_are_refused(given: str | list[int], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        ParallelConfig(pipeline_parallel_size=2, threads_per_rank=given)
    assert caught.value.param == "threads_per_rank"


@pytest.mark.parametrize(
    ("given", "threads"), [(None, None), (3, [3, 3]), (" 3 ", [3, 3]), ("1, 3", [1, 3]), ([1, 3], [1, 3])]
)
def test_i13_threads_of_each_rank(given: int | str | list[int] | None, threads: list[int] | None) -> None:
    assert ParallelConfig(pipeline_parallel_size=2, threads_per_rank=given).rank_threads == threads


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ("auto", ["auto", "auto"]),
        ("cuda", ["cuda", "cuda"]),
        ("cuda:1", ["cuda:1", "cuda:1"]),
        ("cpu, cuda:0", ["cpu", "cuda:0"]),
    ],
)
def test_i13_device_of_each_rank(given: str, devices: list[str]) -> None:
    assert ParallelConfig(pipeline_parallel_size=2, device=given).rank_devices == devices


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "'' is not a device"),
        ("gpu", "'gpu' is not a device"),
        ("cuda:", "device is 'cuda:'"),
        ("cuda:-1", "device is 'cuda:-1'"),
        ("cpu:0", "device is 'cpu:0'"),
        ("cpu,", "'' is not a device"),
        ("auto,cpu", "'auto' is not a device"),
        ("cpu,cuda,cpu", "device has 3 entries for 2 stages"),
    ],
)
def test_i13_devices_that_cannot_be_are_refused(given: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        ParallelConfig(pipeline_parallel_size=2, device=given)
    assert caught.value.param == "device"


def test_async_depth_has_a_ceiling() -> None:
    assert ParallelConfig(async_depth=64).depth == 65
    with pytest.raises(UsageError, match="async_depth is 65, more than 64"):
        ParallelConfig(async_depth=65)


@pytest.mark.parametrize(
    ("num_stages", "async_depth", "depth"), [(1, 0, 1), (1, 1, 2), (2, 0, 2), (2, 1, 3), (4, 2, 6)]
)
def test_d1_s8_depth(num_stages: int, async_depth: int, depth: int) -> None:
    assert ParallelConfig(pipeline_parallel_size=num_stages, async_depth=async_depth).depth == depth


def test_low_ends_that_are_allowed() -> None:
    ParallelConfig(pipeline_parallel_size=1, async_depth=0, threads_per_rank=1)
    CacheConfig(block_size=1, num_blocks=1, kv_cache_bytes=1)
    SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1, prefill_chunk=1, max_waiting_requests=1)


def rank(stage: int, num_stages: int) -> RankConfig:
    return RankConfig(
        model_path="/m",
        dtype="float32",
        max_model_len=64,
        stage=stage,
        num_stages=num_stages,
        start_layer=0,
        end_layer=2,
        device="cpu",
        threads=1,
        block_size=16,
        num_blocks=None,
        kv_cache_bytes=None,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        depth=num_stages,
        link_frames=1,
    )


@pytest.mark.parametrize(
    ("stage", "num_stages", "is_first", "is_last"),
    [(0, 1, True, True), (0, 3, True, False), (1, 3, False, False), (2, 3, False, True)],
)
def test_a_rank_knows_whether_it_is_an_end(
    stage: int, num_stages: int, is_first: bool, is_last: bool
) -> None:
    config = rank(stage, num_stages)
    assert (config.is_first, config.is_last) == (is_first, is_last)


def test_cores_of_a_rank_survive_the_wire() -> None:
    pinned = msgspec.structs.replace(rank(0, 1), cpus=(0, 2, 5), quantization="int4", kernels="-head")
    assert msgspec.json.decode(msgspec.json.encode(pinned), type=RankConfig) == pinned
    assert (rank(0, 1).cpus, rank(0, 1).quantization, rank(0, 1).kernels) == ((), "none", "auto")


@pytest.mark.parametrize(
    ("cls", "content"),
    [(ModelConfig, b'{"model": "m", "quantization": "fp8"}'), (ParallelConfig, b'{"pin_threads": "yes"}')],
)
def test_a_choice_that_does_not_exist_is_refused(cls: type[Any], content: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
        msgspec.json.decode(content, type=cls)


def test_configuration_survives_the_wire_and_is_checked_again_there() -> None:
    engine = EngineConfig(model=ModelConfig(model="demo"), parallel=ParallelConfig(async_depth=2))
    core = CoreConfig(
        parallel=engine.parallel,
        cache=engine.cache,
        scheduler=engine.scheduler,
        seed=1,
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=[2],
    )
    for value in (engine, core, rank(1, 2)):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    with pytest.raises(msgspec.ValidationError, match="block_size is 0"):
        msgspec.json.decode(b'{"block_size": 0}', type=CacheConfig)


@pytest.mark.parametrize("name", ["seed", "num_blocks", "max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_a_number_that_no_process_could_be_told_is_refused(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value}; it must be between") as refused:
        configured_engine({name: value}, "demo")
    assert refused.value.param == name

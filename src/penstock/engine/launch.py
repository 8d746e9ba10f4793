"""From an `EngineConfig` to what each process is told: pure, and the same for every backend.

`resolve` replaces every "auto" by a value: model directory, layer ranges, dtype, device, threads. Called by
the supervisor (processes) and by `llm` (ranks as threads). Starts nothing and opens no socket.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.config import CoreConfig, EngineConfig, RankConfig
from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.models.registry import load_spec, resolve_model_directory
from penstock.models.spec import ModelSpec
from penstock.pipeline.frame import frame_bytes
from penstock.pipeline.partition import partition_layers
from penstock.runner.memory import host_available_bytes

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

STALL_GRACE_S = 5.0  # the ranks, which know what they wait for, speak before the core does

FloatType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What this machine can give."""

    num_cpus: int
    free_bytes: int
    has_cuda: bool

    @classmethod
    def detect(cls) -> Host:
        """Ask the kernel: CPUs we may run on, memory (the control group's limit counted), a GPU device."""
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        return cls(
            num_cpus=len(os.sched_getaffinity(0)),
            free_bytes=host_available_bytes(),
            has_cuda=not hidden and os.path.exists("/dev/nvidia0"),
        )


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a process starts."""

    model_path: str
    spec: ModelSpec
    ranks: list[RankConfig]
    core: CoreConfig
    frame_bytes: int  # of a link between stages

    @property
    def num_stages(self) -> int:
        return len(self.ranks)


def resolve(config: EngineConfig, host: Host) -> LaunchPlan:
    """Decide everything that does not need a tensor.

    Raises:
        UsageError, PartitionError: a setting cannot be met by this model.
        ModelError: the directory or its config.json is bad.
        NotEnoughMemoryError: the weights do not fit into what is free on this host.
    """
    directory = resolve_model_directory(config.model.model)
    spec = load_spec(directory)
    dtype = _dtype(config.model.dtype, spec)
    max_model_len = _max_model_len(config.model.max_model_len, spec)
    stages = config.parallel.pipeline_parallel_size
    ranges = partition_layers(spec.num_layers, stages, config.parallel.partition)
    device = _device(config.parallel.device, host)
    wait_timeout_s = _step_timeout_s(config) * stages
    if device == "cpu":
        _check_weights_fit(spec, ranges, dtype, host)
    ranks = [
        RankConfig(
            model_path=str(directory),
            dtype=dtype,
            max_model_len=max_model_len,
            stage=stage,
            num_stages=stages,
            start_layer=start,
            end_layer=end,
            device=device,
            threads=config.parallel.threads_per_rank or max(1, host.num_cpus // stages),
            block_size=config.cache.block_size,
            num_blocks=config.cache.num_blocks,
            kv_cache_bytes=config.cache.kv_cache_bytes,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            depth=config.parallel.depth,
            link_frames=config.parallel.async_depth + 1,
            tied_head=config.parallel.tied_head,
            wait_timeout_s=wait_timeout_s,
        )
        for stage, (start, end) in enumerate(ranges)
    ]
    return LaunchPlan(
        model_path=str(directory),
        spec=spec,
        ranks=ranks,
        core=_core_config(config, spec, max_model_len, wait_timeout_s + STALL_GRACE_S),
        frame_bytes=frame_bytes(
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            width=spec.hidden_size,
            itemsize=ITEM_SIZES[dtype],
        ),
    )


def _core_config(
    config: EngineConfig, spec: ModelSpec, max_model_len: int, stall_timeout_s: float
) -> CoreConfig:
    return CoreConfig(
        parallel=config.parallel,
        cache=config.cache,
        scheduler=config.scheduler,
        seed=config.seed,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        stall_timeout_s=stall_timeout_s,
    )


def _step_timeout_s(config: EngineConfig) -> float:
    """The user's, or one that a slow machine does not reach with the largest plan."""
    asked = config.parallel.step_timeout_s
    return asked if asked is not None else 60.0 + 0.1 * config.scheduler.max_num_batched_tokens


def _dtype(asked: str, spec: ModelSpec) -> FloatType:
    name = spec.dtype if asked == "auto" else asked
    known: dict[str, FloatType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    return known.get(name, "float32")


def _device(asked: str, host: Host) -> Literal["cpu", "cuda"]:
    if asked == "auto":
        return "cuda" if host.has_cuda else "cpu"
    return "cuda" if asked == "cuda" else "cpu"


def _max_model_len(asked: int | None, spec: ModelSpec) -> int:
    own = spec.max_position_embeddings
    if asked is None:
        return own
    if not 2 <= asked <= own:
        raise UsageError(
            f"max_model_len is {asked}; this model takes 2 to {own} tokens.",
            remedy=f"Use at most {own}.",
            param="max_model_len",
            code="out_of_range",
        )
    return asked


def _check_weights_fit(spec: ModelSpec, ranges: list[tuple[int, int]], dtype: FloatType, host: Host) -> None:
    """Refuse at once what would fail after a long load; how much KV fits is for the ranks to measure."""
    weights = sum(spec.stage_parameters(start, end) for start, end in ranges) * ITEM_SIZES[dtype]
    if weights > host.free_bytes:
        raise NotEnoughMemoryError(
            f"the weights take {weights / 2**20:.0f} MiB; {host.free_bytes / 2**20:.0f} MiB are free.",
            remedy="Use a smaller model or dtype, or free memory.",
        )

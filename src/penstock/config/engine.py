"""The settings of an engine, as frozen values; each part of the engine gets only those that it uses.

The command line, the environment, TOML files and the arguments of `LLM` all become an `EngineConfig`. Each
struct checks its own values. Functions elsewhere, such as `engine.supervisor.launch.resolve`, replace "auto"
by numbers and return new values. `process.config` has what each child process is told of these settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from penstock.config.checks import above_zero, at_least, between, is_device
from penstock.config.executor_backend import require_backend
from penstock.config.hosts import HostsConfig
from penstock.config.setting import Setting
from penstock.config.speculation import SpeculationConfig
from penstock.errors import UsageError

DType = Literal["auto", "float32", "bfloat16", "float16"]
TiedHead = Literal["load", "transfer"]
Quantization = Literal["none", "int8", "int4"]
PinThreads = Literal["auto", "on", "off"]
EvictionPolicy = Literal["lru", "lfu", "priority"]
ModelImpl = Literal["auto", "penstock", "transformers"]
Pooling = Literal["last", "mean", "cls"]

StorePolicy = Literal["write-through", "write-back"]
PrefetchPolicy = Literal["timeout", "best-effort", "wait-all"]

# Instruction sets that our kernels can be held to (`kernels.cpu.targets`): for x86 the least first, then ARM.
NUMERIC_CLASSES = ("portable", "avx2", "avx512", "avx512-vnni", "avx512-bf16", "amx-bf16", "neon")

Value = TypeVar("Value")

PARTITION_VARIABLE = "PENSTOCK_PP_LAYER_PARTITION"


MAX_THREADS = 1024  # of a rank: more threads than the CPU has cores only wait for each other
MAX_PLANS_IN_FLIGHT = 1024  # a channel to a rank has room for four times as many
PLANS_ON_WIRES = 30  # between hosts: a round trip of 150 ms, in which a stage of 5 ms a plan computes 30


def _whole_numbers(name: str, given: int | str | list[int], of_what: str) -> list[int]:
    """Return the numbers of a setting that is given as 2, "2", "1,3" or [1, 3].

    Args:
        name: the setting, for errors.
        of_what: what the numbers count, for errors.

    Raises:
        UsageError: the setting is something else, or a number is below 1.
    """
    entries = given if isinstance(given, list) else [entry.strip() for entry in str(given).split(",")]
    if not all(re.fullmatch(r"-?[0-9]{1,9}", str(entry)) for entry in entries):
        raise UsageError(
            f'{name} is "{given}", which is not a number of {of_what}.',
            remedy='Write one number for all stages, or one per stage with commas between, such as "1,3".',
            param=name,
        )
    numbers = [int(entry) for entry in entries]
    for number in numbers:
        at_least(name, number, 1)
    return numbers


def _absolute(path: Path | str | None) -> str | None:
    """Return the absolute path of a file, which child processes can use too; None if no file is given."""
    return None if path is None else str(Path(path).absolute())


def _template_file(path: Path) -> str:
    """Return the absolute path of a template's file. Raises `UsageError` if it does not exist."""
    if not path.is_file():
        raise UsageError(
            f"--chat-template {path} is not a file.",
            remedy="Name a .jinja file, or a JSON file with chat_template.",
            param="--chat-template",
        )
    return str(path.absolute())


def _require_known_class(name: str) -> None:
    """Raise `UsageError` unless the name is one of `NUMERIC_CLASSES`, or `auto`."""
    if name not in ("auto", *NUMERIC_CLASSES):
        raise UsageError(
            f"numeric_class is {name!r}, which is not an instruction set of our kernels.",
            remedy=f"Use auto, {', '.join(NUMERIC_CLASSES[:-1])} or {NUMERIC_CLASSES[-1]}.",
            param="numeric_class",
        )


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the form in which it is computed.

    Attributes:
        model: directory of a Hugging Face style checkpoint, GGUF file, `demo`, or name of a model here.
        dtype: number format of weights and computation; `auto` uses the checkpoint's.
        max_model_len: longest prompt + output in tokens; None uses the model's own limit.
        quantization: format of the weights: `none` keeps the checkpoint's, `int8` is per channel, `int4` in
            groups (CPU). For a checkpoint that is already quantised, use `none` or its own format.
        gguf_dequantize: convert a GGUF file's weights to `dtype` at load; also reads IQ1-IQ3 (extra `gguf`).
        model_impl: layers to run: `penstock`, `transformers` (extra `hf`), or `auto`: ours if they exist.
        pooling: default token states for embeddings: the `last`, the `mean` of all, or `cls`, the first.
        chat_template: file of the chat template, Jinja or JSON with `chat_template`; None uses the model's.
    """

    model: str
    dtype: Annotated[DType, Setting("model", "number format of weights and computation")] = "auto"
    max_model_len: Annotated[int | None, Setting("model", "longest prompt + output")] = None
    quantization: Annotated[Quantization, Setting("model", "quantise weights at load (CPU)")] = "none"
    gguf_dequantize: Annotated[bool, Setting("model", "hold weights of a GGUF file as numbers of dtype")] = (
        False
    )
    model_impl: Annotated[ModelImpl, Setting("model", "layers to run: penstock, transformers, auto")] = "auto"
    pooling: Annotated[Pooling, Setting("model", "token states to embed: last, mean, cls")] = "last"
    chat_template: Annotated[
        str | None,
        Setting("model", "file of the chat template", text_type=Path | None, read=_template_file),
    ] = None


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cut of the model into stages and ranks, and the place of each.

    Attributes:
        pipeline_parallel_size: number of stages P.
        data_parallel_size: replicas of the pipeline, each with all weights of the model.
        tensor_parallel_size: ranks that share a stage's layers; "2,1" sets each stage.
        enable_expert_parallel: give each rank of a stage whole experts instead of a slice of every expert.
        backend: `mp` runs each rank as a process; `inprocess`, only from Python, as a thread.
        topology: TOML file with ranks, layers, device and threads of each stage (`config.topology`).
        partition: `even`, `last`, `auto` (measured at start), or layers per stage such as "5,6,5,6".
        partition_mix: tokens of a typical request, "PROMPT:OUTPUT"; `partition` `auto` optimises for it.
        async_depth: plans issued beyond those that fill the pipe; `auto` measures whether 1 is faster than 0.
        max_plans_in_flight: most plans in the pipe at once, including those issued ahead. `auto`: one for
            each stage; with several hosts up to 30 more, as many as are on the wires between them.
        threads_per_rank: CPU threads of a rank; a list sets each stage or rank: "1,3". None: by the cores.
        device: `cpu`, `cuda` (the host's GPUs in turn), a GPU such as `cuda:1`, or `auto` (`cuda` on a host
            with a GPU); a list such as "cpu,cuda:0" sets each stage or rank.
        tied_head: how the last stage gets a tied embedding: `load` from disk, `transfer` from the first.
        kernels: Penstock's CPU kernels: `auto` uses all, `off` none, "-attention,-head" all but these.
        numeric_class: instruction set of the CPU kernels, such as avx512; `auto`: the best of each host.
        pin_threads: bind each CPU thread to a core; `auto`: if all ranks together have a core per thread.
        heartbeat_limit_s: seconds without a sign of life after which a stage is restarted.
        warm_spare: keep a spare process ready for a lost stage, while all stages run and memory suffices.
        load_timeout_s: seconds in which a stage must load; after them it counts as lost.
        step_timeout_s: seconds for one plan after which a stage counts as lost; None: 60 + 0.1 per token.
    """

    pipeline_parallel_size: Annotated[
        int, Setting("pipeline", "stages of the pipeline", aliases=("--pp",))
    ] = 1
    data_parallel_size: Annotated[
        int,
        Setting(
            "pipeline",
            "replicas of the pipeline, each with all weights",
            aliases=("--dp",),
            is_argument=False,
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int | str | list[int],
        Setting(
            "pipeline",
            "ranks of a stage, or of each stage: 2,1",
            aliases=("--tp",),
            text_type=int | str,
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool, Setting("pipeline", "divide experts whole among the ranks of a stage", aliases=("--ep",))
    ] = False
    backend: Annotated[
        str,
        Setting(
            "pipeline",
            "mp: a process per rank; ray: Ray starts workers; or MODULE:CLASS",
            flag="--distributed-executor-backend",
            read=require_backend,
            is_argument=False,
        ),
    ] = "mp"
    topology: ClassVar[
        Annotated[
            Path | None,
            Setting("pipeline", "TOML file of different stages, instead of --pp, --tp, ..."),
        ]
    ] = None
    partition: Annotated[
        str,
        Setting(
            "pipeline",
            "layers per stage: even, last, auto (measured), or a list such as 5,6,5,6",
            env=PARTITION_VARIABLE,
        ),
    ] = "even"
    partition_mix: Annotated[str, Setting("pipeline", "tokens of a typical request: PROMPT:OUTPUT")] = (
        "512:128"
    )
    async_depth: Annotated[
        int | Literal["auto"], Setting("pipeline", "plans issued ahead of the pipe, or auto: measured")
    ] = "auto"
    max_plans_in_flight: Annotated[
        int | Literal["auto"],
        Setting("pipeline", "most plans in the pipe at once", is_argument=False),
    ] = "auto"
    threads_per_rank: Annotated[
        int | str | list[int] | None,
        Setting("pipeline", "CPU threads of a rank, or of each rank: 1,3", text_type=int | str | None),
    ] = None
    device: Annotated[str, Setting("pipeline", "cpu, cuda, auto, or one per stage: cpu,cuda:0")] = "cpu"
    tied_head: Annotated[TiedHead, Setting("pipeline", "how the last stage gets a tied embedding")] = "load"
    kernels: Annotated[
        str,
        Setting(
            "pipeline",
            "Penstock's CPU kernels: auto, off, or all but -attention,-head",
            may_look_like_flag=True,
        ),
    ] = "auto"
    numeric_class: Annotated[
        str, Setting("pipeline", "instruction set of the CPU kernels: avx512, ..., auto")
    ] = "auto"
    pin_threads: Annotated[PinThreads, Setting("pipeline", "bind CPU threads to cores")] = "auto"
    heartbeat_limit_s: Annotated[
        float, Setting("pipeline", "seconds of silence before a stage is restarted")
    ] = 5.0
    warm_spare: Annotated[
        bool,
        Setting("pipeline", "keep a spare process ready to replace a lost stage", off="--no-warm-spare"),
    ] = True
    load_timeout_s: Annotated[float, Setting("pipeline", "most seconds for a stage to load")] = 3600.0
    step_timeout_s: Annotated[float | None, Setting("pipeline", "most seconds for one plan on one stage")] = (
        None
    )

    def __post_init__(self) -> None:
        at_least("data_parallel_size", self.data_parallel_size, 1)
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        if self.async_depth != "auto":
            at_least("async_depth", self.async_depth, 0)
            if self.async_depth > 64:
                raise UsageError(f"async_depth is {self.async_depth}, more than 64.", remedy="Use 0, 1 or 2.")
        self._check_plans_in_flight()
        _ = self.rank_threads  # raises if the setting cannot be read
        self._check_devices()
        _require_known_class(self.numeric_class)
        if not 2 <= self.heartbeat_limit_s < math.inf:
            raise UsageError(
                f"heartbeat_limit_s is {self.heartbeat_limit_s}; it must be at least 2 seconds.",
                param="heartbeat_limit_s",
                code="out_of_range",
            )
        above_zero("load_timeout_s", self.load_timeout_s)
        if self.step_timeout_s is not None:
            above_zero("step_timeout_s", self.step_timeout_s)

    @property
    def max_async_depth(self) -> int:
        """The largest async depth that the engine must have room for; `auto` chooses 0 or 1."""
        return 1 if self.async_depth == "auto" else self.async_depth

    @property
    def least_plans_in_flight(self) -> int:
        """The number of plans that fill the pipe, one for each stage, and of those that are issued ahead."""
        return self.pipeline_parallel_size + self.max_async_depth

    def _check_plans_in_flight(self) -> None:
        name, given = "max_plans_in_flight", self.max_plans_in_flight
        if given == "auto":
            return
        between(name, given, 1, MAX_PLANS_IN_FLIGHT)
        if given < self.least_plans_in_flight:
            raise UsageError(
                f"max_plans_in_flight is {given}; {self.pipeline_parallel_size} stages with "
                f"{self.max_async_depth} plans issued ahead have {self.least_plans_in_flight} in flight.",
                remedy=f"Use {self.least_plans_in_flight} or more, or leave it out.",
                param=name,
                code="out_of_range",
            )

    @property
    def tp_sizes(self) -> list[int]:
        """`tensor_parallel_size` of each stage."""
        sizes = _whole_numbers("tensor_parallel_size", self.tensor_parallel_size, "ranks")
        stages = self.pipeline_parallel_size
        if len(sizes) not in (1, stages):
            raise UsageError(
                f"tensor_parallel_size has {len(sizes)} entries for {stages} stages.",
                remedy=f"Give one for all stages, or {stages}.",
                param="tensor_parallel_size",
            )
        return sizes * stages if len(sizes) == 1 else sizes

    @property
    def rank_threads(self) -> list[int] | None:
        """`threads_per_rank` as one number per rank, replica by replica, stage by stage."""
        given = self.threads_per_rank
        if given is None:
            return None
        numbers = _whole_numbers("threads_per_rank", given, "threads")
        if max(numbers) > MAX_THREADS:
            raise UsageError(
                f"threads_per_rank is {max(numbers)}, more than {MAX_THREADS}.",
                remedy="Use as many as the rank has cores, or leave it out.",
                param="threads_per_rank",
                code="out_of_range",
            )
        return self._for_each_rank("threads_per_rank", numbers)

    @property
    def rank_devices(self) -> list[str]:
        """`device` as one for each rank, replica by replica, stage by stage; all `auto` or none."""
        return self._for_each_rank("device", [part.strip() for part in self.device.split(",")])

    def _check_devices(self) -> None:
        for device in self.rank_devices:
            if self.device != "auto" and not is_device(device):
                raise UsageError(
                    f"device is '{self.device}'; '{device}' is not a device.",
                    remedy="Use auto, cpu, cuda, cuda:N, or cpu, cuda and cuda:N for each stage: cpu,cuda:0.",
                    param="device",
                    code="out_of_range",
                )

    def _for_each_rank(self, name: str, values: list[Value]) -> list[Value]:
        """Return a value for each rank, replica by replica.

        What the given values stand for follows from how many there are:

            1                             one value for all ranks
            as many as stages             one for all ranks of each stage
            as many as a replica's ranks  one for each rank of a replica, the same for every replica
            as many as ranks in all       one for each rank
        """
        sizes = self.tp_sizes
        num_ranks = sum(sizes)
        if len(values) == num_ranks * self.data_parallel_size:
            return values
        if len(values) == 1:
            values = values * num_ranks
        elif len(values) == len(sizes):
            values = [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]
        if len(values) != num_ranks:
            raise self._wrong_number(name, len(values))
        return values * self.data_parallel_size

    def _wrong_number(self, name: str, count: int) -> UsageError:
        stages, ranks = self.pipeline_parallel_size, sum(self.tp_sizes)
        text, numbers = f"{name} has {count} entries for {stages} stages", [stages]
        if ranks != stages:
            text, numbers = f"{text} of {ranks} ranks", [stages, ranks]
        if self.data_parallel_size > 1:
            numbers.append(ranks * self.data_parallel_size)
        choices = ", or ".join(map(str, numbers))
        return UsageError(f"{text}.", remedy=f"Give one for all stages, or {choices}.", param=name)

    @property
    def depth(self) -> int:
        """The most plans in flight [D1] [F2] [S8]; `auto` counts as on one host."""
        return self.least_plans_in_flight if self.max_plans_in_flight == "auto" else self.max_plans_in_flight


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks in the pool; None: as many as `kv_cache_bytes` or the free memory allows.
        kv_cache_bytes: KV cache bytes per rank, without `num_blocks`; None: a share of free memory.
        enable_prefix_caching: reuse KV blocks for later requests that begin with the same tokens.
        kv_store: directory or URL (`s3://...`) for blocks that outlive the pool and the process.
        kv_store_bytes: most bytes in a store on disk, on each host.
        kv_store_when_found: 0 stores each block when it is computed; n when n requests have found it.
        kv_store_patience_s: most seconds that a request waits for stored blocks under the policy `timeout`.
        kv_prefetch_policy: how long a request waits for stored blocks: `timeout` (`kv_store_patience_s`),
            `best-effort` (not at all), or `wait-all` (until each has loaded or failed).
        kv_host_bytes: bytes of memory on each host for blocks, with or without a store; its ranks share them.
        kv_write_bytes_per_s: most bytes a second that each rank copies out of the pool; 0: no limit.
        kv_store_policy: `write-through` stores a block at once, `write-back` only when host memory is full.
        eviction_policy: order in which the prefix cache evicts blocks (`kvcache.eviction`): `lru`, `lfu` or
            `priority`.
    """

    block_size: Annotated[int, Setting("kv", "tokens per KV block")] = 32
    num_blocks: Annotated[
        int | None, Setting("kv", "KV blocks per stage", aliases=("--num-gpu-blocks-override",))
    ] = None
    kv_cache_bytes: Annotated[
        int | None, Setting("kv", "bytes of KV cache per rank", aliases=("--kv-cache-memory-bytes",))
    ] = None
    enable_prefix_caching: Annotated[
        bool, Setting("kv", "reuse the KV cache of equal prompt beginnings", off="--no-enable-prefix-caching")
    ] = True
    kv_store: Annotated[str | None, Setting("kv", "directory or URL where KV blocks outlive the process")] = (
        None
    )
    kv_store_bytes: Annotated[int, Setting("kv", "most bytes in that directory")] = 16 << 30
    kv_store_when_found: Annotated[int, Setting("kv", "store a block at this many hits; 0: at once")] = 0
    kv_store_patience_s: Annotated[float, Setting("kv", "most seconds a request waits for stored blocks")] = (
        2.0
    )
    kv_prefetch_policy: Annotated[
        PrefetchPolicy, Setting("kv", "wait for stored blocks: timeout, never, or for all")
    ] = "timeout"
    kv_host_bytes: Annotated[int, Setting("kv", "bytes of host memory for KV blocks; for GPUs")] = 0
    kv_write_bytes_per_s: Annotated[
        int,
        Setting("kv", "most bytes a second copied out per rank; 0: no limit", flag="--kv-write-rate"),
    ] = 1 << 30
    kv_store_policy: Annotated[
        StorePolicy, Setting("kv", "store blocks at once, or when host memory is full")
    ] = "write-through"
    eviction_policy: Annotated[EvictionPolicy, Setting("kv", "blocks that the prefix cache evicts first")] = (
        "lru"
    )

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            at_least("num_blocks", self.num_blocks, 1)
        if self.kv_cache_bytes is not None:
            at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        at_least("kv_store_bytes", self.kv_store_bytes, 1 << 20)
        at_least("kv_store_when_found", self.kv_store_when_found, 0)
        if not self.kv_store_patience_s >= 0:
            raise UsageError(
                f"kv_store_patience_s is {self.kv_store_patience_s}; it must be at least 0 seconds.",
                param="kv_store_patience_s",
                code="out_of_range",
            )
        at_least("kv_host_bytes", self.kv_host_bytes, 0)
        at_least("kv_write_bytes_per_s", self.kv_write_bytes_per_s, 0)
        if (self.kv_store is not None or self.kv_host_bytes) and not self.enable_prefix_caching:
            raise UsageError(
                "a store or host memory for KV blocks is given, but the prefix cache is off.",
                remedy="Leave out --kv-store and --kv-host-bytes, or --no-enable-prefix-caching.",
                param="kv_store",
            )
        if self.kv_store_policy == "write-back" and (self.kv_store is None or not self.kv_host_bytes):
            raise UsageError(
                "kv_store_policy is write-back, which needs a store and host memory in front of it.",
                remedy="Give --kv-store and --kv-host-bytes, or leave it at write-through.",
                param="kv_store_policy",
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of what runs and waits, and of the size of plans.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens in one plan.
        prefill_chunk: most prompt tokens of one request in one plan.
        max_waiting_requests: most waiting requests; further requests get 429.
        max_waiting_tokens: most prompt tokens of all waiting requests together; further requests get 429.
            None allows 8 times the tokens of the KV pool.
        queue_timeout_s: seconds after which a waiting request gets 503.
        min_start_bytes: bytes; with less free host memory no waiting request starts. 0 switches it off.
        max_sessions: most open sessions of each replica (`kvcache.sessions`); opening another one gets
            429.
        micro_batches: micro-batches of the decoding requests; `auto`: by measured time, P until then.
        inter_token_target_ms: milliseconds between two tokens of a request that the prompts of others should
            not exceed; prompts may always lengthen the plan that they join by half.
        built_grammar_bytes: bytes of built grammars on a rank of the last stage, in use or kept for later, as
            `scheduler.grammars` estimates them; a larger grammar is held alone.
    """

    max_num_seqs: Annotated[int, Setting("scheduler", "most requests that run at once")] = 64
    max_num_batched_tokens: Annotated[int, Setting("scheduler", "most tokens in one plan")] = 2048
    prefill_chunk: Annotated[int, Setting("scheduler", "most prompt tokens of a request in one plan")] = 512
    max_waiting_requests: Annotated[
        int, Setting("scheduler", "waiting requests before a 429", is_argument=False)
    ] = 1024
    max_waiting_tokens: Annotated[
        int | None,
        Setting("scheduler", "waiting prompt tokens before a 429; default: 8 KV pools", is_argument=False),
    ] = None
    queue_timeout_s: Annotated[
        float, Setting("scheduler", "seconds a request may wait before a 503", is_argument=False)
    ] = 60.0
    min_start_bytes: Annotated[
        int, Setting("scheduler", "with less free host memory, no request starts", is_argument=False)
    ] = 256 << 20
    max_sessions: Annotated[
        int, Setting("scheduler", "open sessions of a replica before a 429", is_argument=False)
    ] = 64
    micro_batches: Annotated[
        int | Literal["auto"], Setting("scheduler", "micro-batches of decodes, or auto: by time")
    ] = "auto"
    inter_token_target_ms: Annotated[
        float, Setting("scheduler", "most ms between tokens while prompts run")
    ] = 100.0
    built_grammar_bytes: Annotated[
        int, Setting("scheduler", "bytes of built grammars on the last stage", is_argument=False)
    ] = 512 << 20

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk",
            "max_waiting_requests",
            "built_grammar_bytes",
        ):
            at_least(name, getattr(self, name), 1)
        if self.max_waiting_tokens is not None:
            at_least("max_waiting_tokens", self.max_waiting_tokens, 1)
        if not 0 < self.queue_timeout_s < math.inf:
            raise UsageError(
                f"queue_timeout_s is {self.queue_timeout_s}; it must be above 0.", param="queue_timeout_s"
            )
        at_least("min_start_bytes", self.min_start_bytes, 0)
        between("max_sessions", self.max_sessions, 0, 1 << 16)
        if self.micro_batches != "auto":
            at_least("micro_batches", self.micro_batches, 1)
        if not 0 < self.inter_token_target_ms < math.inf:
            raise UsageError(
                f"inter_token_target_ms is {self.inter_token_target_ms}; it must be above 0 milliseconds.",
                remedy="Use a large number, such as 1e9, to give prompts all the room.",
                param="inter_token_target_ms",
                code="out_of_range",
            )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration of an engine; each part goes to its owner.

    Attributes:
        cluster: the hosts that it runs on.
        seed: seed of requests that do not set one.
        record_decisions: file for a log of the scheduler's decisions, which `penstock replay` replays.
    """

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    cluster: HostsConfig = HostsConfig()
    seed: Annotated[int, Setting("model", "seed of requests without one")] = 0
    record_decisions: Annotated[
        str | None,
        Setting("scheduler", "file for the scheduler's decisions", text_type=Path | None, read=_absolute),
    ] = None

    def __post_init__(self) -> None:
        if self.parallel.backend == "mp":
            self.cluster.require_joining()

    def with_partition(self, partition: str) -> EngineConfig:
        """Return this config with other layers per stage."""
        parallel = msgspec.structs.replace(self.parallel, partition=partition)
        return msgspec.structs.replace(self, parallel=parallel)

    def with_partition_of(self, environ: Mapping[str, str]) -> EngineConfig:
        """Return this config with the layers per stage that the environment variable asks for, if it is set.

        The variable has no effect on a single stage, or where a setting or a topology file cuts the layers in
        another way than `even`.

        Args:
            environ: the environment, which may have `PARTITION_VARIABLE`.
        """
        layers = environ.get(PARTITION_VARIABLE, "")
        is_open = self.parallel.partition == "even" and self.parallel.pipeline_parallel_size > 1
        return self.with_partition(layers) if layers and is_open else self

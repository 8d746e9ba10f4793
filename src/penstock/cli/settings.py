"""The settings of `penstock serve` and of the offline benchmarks: flags, environment names, TOML keys, help.

The dataclasses here are the only list: `cli_serve` turns them into the configs of `penstock.config.engine`;
`cli_help` and `cli_sources` read the same fields. Names are vLLM's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from penstock.config.engine import (
    CacheConfig,
    DType,
    EngineConfig,
    EvictionPolicy,
    ModelConfig,
    ModelImpl,
    ParallelConfig,
    PinThreads,
    Pooling,
    Quantization,
    SchedulerConfig,
    StorePolicy,
    TiedHead,
)
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits
from penstock.config.refused_settings import require_backend
from penstock.config.server import ReasoningParser, ServerConfig, ToolParser
from penstock.config.topology import with_topology
from penstock.errors import UsageError

ENV_PREFIX = "PENSTOCK_"
SECRET_SETTINGS = frozenset({"api-key", "admin-key"})
SERVED_ENV = "PENSTOCK_MODEL_NAME"  # for clients; PENSTOCK_MODEL is the server's directory
KEY_ENVS = frozenset({"PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY"})
PARTITION_ENV = "PENSTOCK_PP_LAYER_PARTITION"


def flag(
    help_text: str,
    *names: str,
    group: str,
    env: str | None = None,
    leading_hyphen: bool = False,
    negative: str = "",
) -> Parameter:
    """A flag: one line of help, its names (the first is the key in TOML), and the help page it is on.

    Given twice, the last one counts. `env` replaces the environment names that follow from the names.
    With `leading_hyphen` a value may look like a flag; `negative` is the name that switches it off.
    """
    return Parameter(
        name=list(names),
        help=help_text,
        group=group,
        negative=negative,
        env_var=env,
        allow_repeating=True,
        allow_leading_hyphen=leading_hyphen,
    )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine can be told, by `serve` and by the offline benchmarks alike."""

    dtype: Annotated[DType, flag("of weights and computation", "--dtype", group="model")] = "auto"
    max_model_len: Annotated[
        int | None, flag("longest prompt + output", "--max-model-len", group="model")
    ] = None
    quantization: Annotated[
        Quantization, flag("of weights at load (CPU)", "--quantization", group="model")
    ] = "none"
    model_impl: Annotated[
        ModelImpl, flag("whose layers run: penstock, transformers, auto", "--model-impl", group="model")
    ] = "auto"
    pooling: Annotated[
        Pooling, flag("token states that embeddings are made of: last, mean, cls", "--pooling", group="model")
    ] = "last"
    seed: Annotated[int, flag("of requests without a seed", "--seed", group="model")] = 0

    pipeline_parallel_size: Annotated[
        int, flag("stages of the pipeline", "--pipeline-parallel-size", "--pp", group="pipeline")
    ] = 1
    data_parallel_size: Annotated[
        int,
        flag(
            "pipelines side by side, each with all weights", "--data-parallel-size", "--dp", group="pipeline"
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int | str,
        flag(
            "ranks that share a stage's layers, or of each: 2,1",
            "--tensor-parallel-size",
            "--tp",
            group="pipeline",
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        flag("ranks of a stage have whole experts", "--enable-expert-parallel", "--ep", group="pipeline"),
    ] = False
    distributed_executor_backend: Annotated[
        str, flag("mp: a process per rank", "--distributed-executor-backend", group="pipeline")
    ] = "mp"
    topology: Annotated[
        Path | None,
        flag("TOML file of unlike stages, in place of --pp, --tp and others", "--topology", group="pipeline"),
    ] = None
    partition: Annotated[
        str,
        flag(
            "layers per stage: even, last, auto (measured), or a list such as 5,6,5,6",
            "--partition",
            group="pipeline",
            env=PARTITION_ENV,
        ),
    ] = "even"
    partition_mix: Annotated[
        str, flag("for --partition auto: PROMPT:OUTPUT tokens", "--partition-mix", group="pipeline")
    ] = "512:128"
    async_depth: Annotated[
        int | Literal["auto"],
        flag("plans issued ahead of the pipe, or auto: measured", "--async-depth", group="pipeline"),
    ] = "auto"
    threads_per_rank: Annotated[
        int | str | None,
        flag("CPU threads of a rank, or of each: 1,3", "--threads-per-rank", group="pipeline"),
    ] = None
    device: Annotated[
        str,
        flag("cpu, cuda, auto, or one each: cpu,cuda:0", "--device", group="pipeline"),
    ] = "cpu"
    tied_head: Annotated[
        TiedHead, flag("how the last stage gets a tied embedding", "--tied-head", group="pipeline")
    ] = "load"

    kernels: Annotated[
        str,
        flag(
            "own CPU kernels: auto, off, or names switched off such as -attention,-head",
            "--kernels",
            group="pipeline",
            leading_hyphen=True,
        ),
    ] = "auto"
    pin_threads: Annotated[
        PinThreads, flag("bind CPU threads to cores", "--pin-threads", group="pipeline")
    ] = "auto"
    heartbeat_limit: Annotated[
        float,
        flag(
            "seconds without a sign of life after which a stage starts again",
            "--heartbeat-limit",
            group="pipeline",
        ),
    ] = 5.0
    load_timeout: Annotated[
        float, flag("seconds in which a stage must have loaded", "--load-timeout", group="pipeline")
    ] = 3600.0
    step_timeout: Annotated[
        float | None, flag("seconds of one stage for one plan at most", "--step-timeout", group="pipeline")
    ] = None

    block_size: Annotated[int, flag("tokens per KV block", "--block-size", group="kv")] = 32
    num_blocks: Annotated[
        int | None, flag("KV blocks per stage", "--num-blocks", "--num-gpu-blocks-override", group="kv")
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        flag("bytes of KV cache per rank", "--kv-cache-bytes", "--kv-cache-memory-bytes", group="kv"),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        flag(
            "keep what was computed, for prompts alike",
            "--enable-prefix-caching",
            negative="--no-enable-prefix-caching",
            group="kv",
        ),
    ] = True
    kv_store: Annotated[
        str | None,
        flag("directory or URL that keeps KV blocks beyond the process", "--kv-store", group="kv"),
    ] = None
    kv_store_bytes: Annotated[int, flag("of that directory at most", "--kv-store-bytes", group="kv")] = (
        16 << 30
    )
    kv_store_when_found: Annotated[
        int,
        flag("store a block when found so often; 0: at once", "--kv-store-when-found", group="kv"),
    ] = 0
    kv_store_patience: Annotated[
        float, flag("seconds a request may wait for its blocks", "--kv-store-patience", group="kv")
    ] = 2.0
    kv_host_bytes: Annotated[
        int,
        flag("host memory for KV blocks beyond the pool; for GPUs", "--kv-host-bytes", group="kv"),
    ] = 0
    kv_write_rate: Annotated[
        int,
        flag("that a rank copies out of the pool at most; 0: no bound", "--kv-write-rate", group="kv"),
    ] = 1 << 30
    kv_store_policy: Annotated[
        StorePolicy,
        flag(
            "write-through: stored at once; write-back: when host memory is full",
            "--kv-store-policy",
            group="kv",
        ),
    ] = "write-through"
    eviction_policy: Annotated[
        EvictionPolicy,
        flag("what the prefix cache gives up first", "--eviction-policy", group="kv"),
    ] = "lru"

    max_num_seqs: Annotated[int, flag("requests that run at once", "--max-num-seqs", group="scheduler")] = 64
    max_num_batched_tokens: Annotated[
        int, flag("tokens of one plan at most", "--max-num-batched-tokens", group="scheduler")
    ] = 2048
    prefill_chunk: Annotated[
        int, flag("prompt tokens of one request in one plan at most", "--prefill-chunk", group="scheduler")
    ] = 512
    max_waiting_requests: Annotated[
        int, flag("waiting requests before a 429", "--max-waiting-requests", group="scheduler")
    ] = 1024
    max_waiting_tokens: Annotated[
        int | None,
        flag("of waiting prompts before a 429; else 8 KV pools", "--max-waiting-tokens", group="scheduler"),
    ] = None
    queue_timeout: Annotated[
        float, flag("seconds a request may wait before a 503", "--queue-timeout", group="scheduler")
    ] = 60.0
    max_sessions: Annotated[
        int, flag("open sessions of a replica before a 429", "--max-sessions", group="scheduler")
    ] = 64
    micro_batches: Annotated[
        int | Literal["auto"],
        flag("that decodes are split into, or auto: by time", "--micro-batches", group="scheduler"),
    ] = "auto"
    inter_token_target: Annotated[
        float,
        flag(
            "milliseconds between tokens that others' prompts keep",
            "--inter-token-target",
            group="scheduler",
        ),
    ] = 100.0
    built_grammar_bytes: Annotated[
        int, flag("of built grammars on a last stage's rank", "--built-grammar-bytes", group="scheduler")
    ] = 512 << 20

    def engine_config(self, model: str) -> EngineConfig:
        """For the engine. Raises `UsageError` naming a setting that is out of range."""
        if not 0 < self.queue_timeout < float("inf"):
            raise UsageError(
                f"queue_timeout is {self.queue_timeout}; it must be above 0.", param="queue_timeout"
            )
        return EngineConfig(
            model=ModelConfig(
                model=model,
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                quantization=self.quantization,
                model_impl=self.model_impl,
                pooling=self.pooling,
            ),
            parallel=self._parallel_config(),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                kv_cache_bytes=self.kv_cache_bytes,
                enable_prefix_caching=self.enable_prefix_caching,
                eviction_policy=self.eviction_policy,
                kv_store=self.kv_store,
                kv_store_bytes=self.kv_store_bytes,
                kv_store_when_found=self.kv_store_when_found,
                kv_store_patience_s=self.kv_store_patience,
                kv_host_bytes=self.kv_host_bytes,
                kv_write_bytes_per_s=self.kv_write_rate,
                kv_store_policy=self.kv_store_policy,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                prefill_chunk=self.prefill_chunk,
                max_waiting_requests=self.max_waiting_requests,
                max_waiting_tokens=self.max_waiting_tokens,
                queue_timeout_s=self.queue_timeout,
                max_sessions=self.max_sessions,
                micro_batches=self.micro_batches,
                inter_token_target_ms=self.inter_token_target,
                built_grammar_bytes=self.built_grammar_bytes,
            ),
            seed=self.seed,
        )

    def _parallel_config(self) -> ParallelConfig:
        require_backend(self.distributed_executor_backend, ("mp",))
        parallel = ParallelConfig(
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            partition=self.partition,
            partition_mix=self.partition_mix,
            async_depth=self.async_depth,
            threads_per_rank=self.threads_per_rank,
            device=self.device,
            tied_head=self.tied_head,
            heartbeat_limit_s=self.heartbeat_limit,
            load_timeout_s=self.load_timeout,
            step_timeout_s=self.step_timeout,
            kernels=self.kernels,
            pin_threads=self.pin_threads,
        )
        return parallel if self.topology is None else with_topology(parallel, self.topology)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """What the HTTP front can be told."""

    host: Annotated[str, flag("address to listen on", "--host", group="server")] = "127.0.0.1"
    port: Annotated[int, flag("port to listen on", "--port", group="server")] = 8000
    reuse_port: Annotated[
        bool,
        flag("take the port over from a server that has it", "--reuse-port", group="server"),
    ] = False
    served_model_name: Annotated[
        str | None, flag("name that clients use", "--served-model-name", group="server")
    ] = None
    tool_parser: Annotated[
        ToolParser,
        flag(
            "how the model calls tools; auto: as its chat template shows",
            "--tool-parser",
            "--tool-call-parser",
            group="server",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        flag(
            "how it thinks aloud; auto: as its chat template shows",
            "--reasoning-parser",
            group="server",
        ),
    ] = "auto"
    api_key: Annotated[
        tuple[str, ...],
        flag("key that clients must send; prefer --api-key-file", "--api-key", group="server"),
    ] = ()
    api_key_file: Annotated[
        Path | None, flag("file of keys, one a line", "--api-key-file", group="server")
    ] = None
    admin_key: Annotated[
        tuple[str, ...],
        flag("key that opens /pause and the like; prefer --admin-key-file", "--admin-key", group="server"),
    ] = ()
    admin_key_file: Annotated[
        Path | None, flag("file of admin keys, one a line", "--admin-key-file", group="server")
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        flag("web page that may use the server: https://chat.example", "--allowed-origins", group="server"),
    ] = ()
    profile_dir: Annotated[
        Path | None, flag("directory for what /start_profile records", "--profile-dir", group="server")
    ] = None
    insecure: Annotated[bool, flag("allow an open address without a key", "--insecure", group="server")] = (
        False
    )
    drain_seconds: Annotated[
        float, flag("time for running work after SIGTERM", "--drain-seconds", group="server")
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"], flag("of the log on standard error", "--log-format", group="server")
    ] = "text"
    min_free_bytes: Annotated[
        int, flag("of the host's memory; with less left, a 503", "--min-free-bytes", group="limits")
    ] = ServerConfig().min_free_bytes

    def server_config(
        self, limits: Limits, connections: ConnectionLimits, grammars: GrammarLimits
    ) -> ServerConfig:
        """For the HTTP front, with the keys read. Raises `UsageError`."""
        self._check_server()
        return ServerConfig(
            host=self.host,
            port=self.port,
            reuse_port=self.reuse_port,
            api_keys=[*self.api_key, *read_keys(self.api_key_file)],
            admin_keys=[*self.admin_key, *read_keys(self.admin_key_file, "--admin-key-file")],
            allowed_origins=list(self.allowed_origins),
            served_model_name=self.served_model_name,
            insecure=self.insecure,
            drain_s=self.drain_seconds,
            limits=limits,
            connections=connections,
            grammars=grammars,
            min_free_bytes=self.min_free_bytes,
            profile_dir=None if self.profile_dir is None else str(self.profile_dir.absolute()),
            log_format=self.log_format,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
        )

    def _check_server(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(
                f"--port is {self.port}; it must be between 0 and 65535.", param="--port", code="out_of_range"
            )
        if not 0 <= self.drain_seconds < float("inf"):
            raise UsageError(
                f"drain_seconds is {self.drain_seconds}; it must be at least 0.", param="drain_seconds"
            )
        if self.profile_dir is not None and not self.profile_dir.is_dir():
            raise UsageError(
                f"--profile-dir {self.profile_dir} is no directory.", param="--profile-dir", remedy="Make it."
            )
        for name, keys in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if any(not key.strip() for key in keys):
                raise UsageError(f"{name} is empty.", param=name, remedy=f"Use {name}-file PATH.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """What this run of the program is to do beside serving."""

    config: Annotated[Path | None, flag("TOML file of settings", "--config", group="program")] = None
    print_config: Annotated[
        bool, flag("print every setting and its source, and stop", "--print-config", group="program")
    ] = False


def read_keys(path: Path | None, name: str = "--api-key-file") -> list[str]:
    """Keys of a file, one a line; blank lines and lines that start with `#` are left out.

    Args:
        name: of the flag, for errors.
    """
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"{name} {path} cannot be read: {reason}.",
            param=name,
            remedy="Give a readable text file with one key a line.",
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(
            f"{name} {path} holds no key.",
            param=name,
            remedy="Write one key a line, or leave the flag out to serve without keys.",
        )
    return keys

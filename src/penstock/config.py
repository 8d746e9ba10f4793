"""What can be set, as frozen values. One class per part; a constructor takes its own part, never the whole.

The command line, the environment, TOML and `LLM(...)` all end in an `EngineConfig`. Values are checked where
they are owned; `resolve` functions elsewhere replace "auto" by numbers and return new values.
What each child process is told of it is in `child_config`.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeVar

import msgspec

from penstock.errors import UsageError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["mp", "inprocess"]
TiedHead = Literal["load", "transfer"]
Quantization = Literal["none", "int8", "int4"]
PinThreads = Literal["auto", "on", "off"]
EvictionPolicy = Literal["lru", "lfu", "priority"]
ModelImpl = Literal["auto", "penstock", "transformers"]
ToolParser = Literal["auto", "none", "llama3_json", "hermes", "mistral", "mistral_args", "json"]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"]
Pooling = Literal["last", "mean", "cls"]

Value = TypeVar("Value")

# What one request may ask of the engine; `Limits` may only lower them.
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_SESSION_ID_CHARACTERS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 128
MAX_BAD_WORD_TOKENS = 256

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise UsageError(f"{name} is {value}; it must be at least {low}.", param=name, code="out_of_range")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(
            f"{name} is {value}; it must be between {low} and {high}.", param=name, code="out_of_range"
        )


def _above_zero(name: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is {seconds}; it must be above 0 seconds.", param=name, code="out_of_range")


MAX_THREADS = 1024  # of a rank; threads beyond the cores only wait for each other


def _whole_numbers(name: str, given: int | str | list[int], of_what: str) -> list[int]:
    """The numbers of a setting of stages or ranks: 2, "2", "1,3" or [1, 3]; all at least 1."""
    entries = given if isinstance(given, list) else [entry.strip() for entry in str(given).split(",")]
    if not all(re.fullmatch(r"-?[0-9]{1,9}", str(entry)) for entry in entries):
        raise UsageError(
            f'{name} is "{given}", which is no number of {of_what}.',
            remedy='Write one number for all stages, or one per stage with commas between, such as "1,3".',
            param=name,
        )
    numbers = [int(entry) for entry in entries]
    for number in numbers:
        _at_least(name, number, 1)
    return numbers


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and in which form.

    Attributes:
        model: directory of a Hugging Face style checkpoint, `demo`, or a hub name already downloaded.
        dtype: of weights and computation; "auto" takes the checkpoint's.
        max_model_len: longest prompt + output in tokens; None takes the model's own.
        quantization: how weights are held: "none" as the checkpoint has them, "int8" per channel, "int4" in
            groups. For a checkpoint that is quantised already, only "none" or the format that it has.
        model_impl: whose layers run: "penstock" ours, "transformers" those of the extra `penstock[hf]`;
            "auto" takes ours where there are any.
        pooling: what an embedding is made of where a request does not say: the hidden state of the "last"
            token, the "mean" over all, or "cls", that of the first.
    """

    model: str
    dtype: DType = "auto"
    max_model_len: int | None = None
    quantization: Quantization = "none"
    model_impl: ModelImpl = "auto"
    pooling: Pooling = "last"


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is cut, and where the parts run.

    Attributes:
        pipeline_parallel_size: number of stages P.
        data_parallel_size: pipelines that serve the same model side by side, each with all its weights.
        tensor_parallel_size: ranks that share each stage's layers, or of each stage, such as "2,1".
        enable_expert_parallel: the ranks of a stage have whole experts, and not each a part of all.
        partition: `even`, `last`, `auto` (measured at start), or layers per stage such as "5,6,5,6".
        partition_mix: tokens of a typical request, "PROMPT:OUTPUT", for which `auto` chooses.
        async_depth: plans issued ahead; P + async_depth plans are in flight. `auto` measures at start whether
            one ahead is faster than none.
        threads_per_rank: CPU threads of every rank, or of those of each stage, or of each, such as "1,3";
            None shares the cores among the ranks.
        device: `cpu`, `cuda` (the host's GPUs in turn), a GPU such as `cuda:1`, one of these for each stage
            or for each rank such as "cpu,cuda:0", or `auto` (`cuda` where there is a GPU).
        tied_head: the last stage gets a tied embedding by `load` from the checkpoint, as the first one does,
            or by `transfer` from the first.
        heartbeat_limit_s: a stage that has given no sign of life for this long is started again.
        load_timeout_s: a stage that has not loaded after this long counts as lost.
        step_timeout_s: longest time that one stage may take for one plan before it counts as lost; None
            allows a minute and a tenth of a second for each token that a plan can have.
        kernels: our own CPU kernels: `auto` takes all, `off` none, "-attention,-head" all but these.
        pin_threads: bind each compute thread of a rank to a core of its own; `auto` does so where all ranks'
            threads together are as many as the usable cores. CPU only.
        backend: `mp` = one process per rank; `inprocess` = ranks as threads (tests, notebooks).
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int | str | list[int] = 1
    enable_expert_parallel: bool = False
    partition: str = "even"
    partition_mix: str = "512:128"
    async_depth: int | Literal["auto"] = "auto"
    threads_per_rank: int | str | list[int] | None = None
    device: str = "cpu"
    tied_head: TiedHead = "load"
    heartbeat_limit_s: float = 5.0
    load_timeout_s: float = 3600.0
    step_timeout_s: float | None = None
    kernels: str = "auto"
    pin_threads: PinThreads = "auto"
    backend: Backend = "mp"

    def __post_init__(self) -> None:
        _at_least("data_parallel_size", self.data_parallel_size, 1)
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        if self.async_depth != "auto":
            _at_least("async_depth", self.async_depth, 0)
            if self.async_depth > 64:
                raise UsageError(f"async_depth is {self.async_depth}, more than 64.", remedy="Use 0, 1 or 2.")
        _ = self.rank_threads  # can be read
        self._check_devices()
        if not 2 <= self.heartbeat_limit_s < math.inf:
            raise UsageError(
                f"heartbeat_limit_s is {self.heartbeat_limit_s}; it must be at least 2 seconds.",
                param="heartbeat_limit_s",
                code="out_of_range",
            )
        _above_zero("load_timeout_s", self.load_timeout_s)
        if self.step_timeout_s is not None:
            _above_zero("step_timeout_s", self.step_timeout_s)

    @property
    def max_async_depth(self) -> int:
        """That there must be room for; `auto` takes 0 or 1."""
        return 1 if self.async_depth == "auto" else self.async_depth

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
            if self.device != "auto" and not _DEVICE.fullmatch(device):
                raise UsageError(
                    f"device is '{self.device}'; '{device}' is no device of a stage.",
                    remedy="Use auto, cpu, cuda, cuda:N, or cpu, cuda and cuda:N for each stage: cpu,cuda:0.",
                    param="device",
                    code="out_of_range",
                )

    def _for_each_rank(self, name: str, values: list[Value]) -> list[Value]:
        """One value is every rank's; as many as stages: each is that of all ranks of its stage; as many as
        ranks of a replica: those of each replica."""
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
        """Plans in flight at most (rows D1, F2; S8)."""
        return self.pipeline_parallel_size + self.max_async_depth


StorePolicy = Literal["write-through", "write-back"]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks of the pool; None sizes it by `kv_cache_bytes` or the free memory.
        kv_cache_bytes: bytes per rank to spend on KV; None takes a share of the free memory.
        enable_prefix_caching: keep keys and values of what was computed, for requests that begin the same.
        eviction_policy: which of them is given up first when blocks are wanted (`kvcache.eviction`).
        kv_store: where blocks are kept beyond the pool and the process: a directory, or a URL such as `s3://...`.
        kv_store_bytes: of a store on disk at most.
        kv_store_when_found: 0 stores each block when it is computed; n when it has been found n times.
        kv_store_patience_s: how long a request may wait for its blocks.
        kv_host_bytes: of host memory that keeps blocks in front of the store, or without one; all ranks share
            it. 0: none.
        kv_write_bytes_per_s: of each rank, that are copied out of the pool at most; 0: no bound.
        kv_store_policy: a block goes to the store at once, or when host memory must give it up.
    """

    block_size: int = 32
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    eviction_policy: EvictionPolicy = "lru"
    kv_store: str | None = None
    kv_store_bytes: int = 16 << 30
    kv_store_when_found: int = 0
    kv_store_patience_s: float = 2.0
    kv_host_bytes: int = 0
    kv_write_bytes_per_s: int = 1 << 30
    kv_store_policy: StorePolicy = "write-through"

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            _at_least("num_blocks", self.num_blocks, 1)
        if self.kv_cache_bytes is not None:
            _at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        _at_least("kv_store_bytes", self.kv_store_bytes, 1 << 20)
        _at_least("kv_store_when_found", self.kv_store_when_found, 0)
        if not self.kv_store_patience_s >= 0:
            raise UsageError(
                f"kv_store_patience_s is {self.kv_store_patience_s}; it must be at least 0 seconds.",
                param="kv_store_patience_s",
                code="out_of_range",
            )
        _at_least("kv_host_bytes", self.kv_host_bytes, 0)
        _at_least("kv_write_bytes_per_s", self.kv_write_bytes_per_s, 0)
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
    """Who runs, and how much at once.

    Attributes:
        max_num_seqs: requests that hold a row at once.
        max_num_batched_tokens: tokens of one plan at most.
        prefill_chunk: prompt tokens of one request in one plan at most.
        max_waiting_requests: requests that may wait; one more is answered 429.
        max_waiting_tokens: tokens that all waiting requests together may have to prefill, before one more is
            answered 429; None allows 8 times what the KV pool holds.
        queue_timeout_s: a request that has waited this long is answered 503.
        max_sessions: of each replica, that are open at once (`kvcache.sessions`); one more is answered 429.
        micro_batches: that the decoding requests are split into; `auto` chooses from 1 to P by the time of a
            cycle, where times are known, else P.
        inter_token_target_ms: milliseconds between two tokens of a request that prompts of others should
            keep; but they may always lengthen the plan that they join by half.
        built_grammar_bytes: of grammars on a rank of the last stage, those of rows and those kept for others,
            as `scheduler.grammars` estimates them; one that is larger is there alone.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    max_waiting_requests: int = 1024
    max_waiting_tokens: int | None = None
    queue_timeout_s: float = 60.0
    max_sessions: int = 64
    micro_batches: int | Literal["auto"] = "auto"
    inter_token_target_ms: float = 100.0
    built_grammar_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk",
            "max_waiting_requests",
            "built_grammar_bytes",
        ):
            _at_least(name, getattr(self, name), 1)
        if self.max_waiting_tokens is not None:
            _at_least("max_waiting_tokens", self.max_waiting_tokens, 1)
        _between("max_sessions", self.max_sessions, 0, 1 << 16)
        if self.micro_batches != "auto":
            _at_least("micro_batches", self.micro_batches, 1)
        if not 0 < self.inter_token_target_ms < math.inf:
            raise UsageError(
                f"inter_token_target_ms is {self.inter_token_target_ms}; it must be above 0 milliseconds.",
                remedy="Use a large number, such as 1e9, to give prompts all the room.",
                param="inter_token_target_ms",
                code="out_of_range",
            )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what one request may carry; what is beyond them is answered 413 (the body) or 400.

    Attributes:
        max_body_bytes: None allows 2 MiB and 8 bytes for each token of context.
        max_prompt_bytes: of text in one prompt or conversation; None allows 16 for each token of context.
        max_json_depth: brackets within brackets.
        max_messages: of a conversation.
        max_prompts: of one completions request.
        max_prompt_scores: log-probabilities of all prompts of one request, likeliest tokens included.
        max_embedding_inputs, max_embedding_tokens: of one embeddings request, all inputs together.
        max_tools: that a request names.
        max_tool_bytes: of all of them, as JSON.
        max_template_kwargs: variables for the chat template.
        max_profile_s, max_profile_bytes: of one profile, which then ends by itself.
        max_profiles: in the directory for them.
        max_event_streams: readers of `/debug/pipeline/events` at once; one more is answered 429.
        max_choices: of one request: prompts times `n`.
        session_idle_s, max_session_idle_s: after which a session that nobody uses is closed: where
            whoever opens it does not say, and at most.
        max_logprobs, max_stop_strings, max_stop_string_bytes, max_stop_token_ids, max_logit_bias,
        max_allowed_token_ids, max_bad_words, max_bad_word_bytes, max_n: no more than what `SamplingParams`
        takes, which is the default.
    """

    max_body_bytes: int | None = None
    max_prompt_bytes: int | None = None
    max_json_depth: int = 64
    max_messages: int = 4096
    max_prompts: int = 256
    max_prompt_scores: int = 1 << 19
    max_event_streams: int = 16
    max_profile_s: float = 60.0
    max_profile_bytes: int = 256 << 20
    max_profiles: int = 16
    max_tools: int = 128
    max_tool_bytes: int = 256 << 10
    max_template_kwargs: int = 16
    max_choices: int = 256
    max_embedding_inputs: int = 2048
    max_embedding_tokens: int = 300_000
    session_idle_s: float = 600.0
    max_session_idle_s: float = 86_400.0
    max_logprobs: int = MAX_LOGPROBS
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_string_bytes: int = MAX_STOP_STRING_BYTES
    max_stop_token_ids: int = MAX_STOP_TOKEN_IDS
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_allowed_token_ids: int = MAX_ALLOWED_TOKEN_IDS
    max_bad_words: int = MAX_BAD_WORDS
    max_bad_word_bytes: int = MAX_BAD_WORD_BYTES
    max_n: int = MAX_N

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_prompt_bytes",
            "max_json_depth",
            "max_messages",
            "max_prompts",
            "max_choices",
            "max_event_streams",
            "max_profiles",
            "max_embedding_inputs",
            "max_embedding_tokens",
        ):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        _at_least("max_prompt_scores", self.max_prompt_scores, 0)
        _above_zero("max_profile_s", self.max_profile_s)
        self._check_session_times()
        _at_least("max_profile_bytes", self.max_profile_bytes, 1 << 20)
        for name in ("max_tools", "max_tool_bytes", "max_template_kwargs"):
            _at_least(name, getattr(self, name), 0)
        _between("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        _between("max_stop_strings", self.max_stop_strings, 0, MAX_STOP_STRINGS)
        _between("max_stop_string_bytes", self.max_stop_string_bytes, 1, MAX_STOP_STRING_BYTES)
        _between("max_stop_token_ids", self.max_stop_token_ids, 0, MAX_STOP_TOKEN_IDS)
        _between("max_n", self.max_n, 1, MAX_N)
        _between("max_logit_bias", self.max_logit_bias, 0, MAX_LOGIT_BIAS)
        _between("max_allowed_token_ids", self.max_allowed_token_ids, 0, MAX_ALLOWED_TOKEN_IDS)
        _between("max_bad_words", self.max_bad_words, 0, MAX_BAD_WORDS)
        _between("max_bad_word_bytes", self.max_bad_word_bytes, 1, MAX_BAD_WORD_BYTES)

    def _check_session_times(self) -> None:
        _above_zero("session_idle_s", self.session_idle_s)
        _above_zero("max_session_idle_s", self.max_session_idle_s)
        if self.session_idle_s > self.max_session_idle_s:
            raise UsageError(
                f"session_idle_s is {self.session_idle_s:g}; max_session_idle_s allows "
                f"{self.max_session_idle_s:g}.",
                remedy="Lower the one, or raise the other.",
                param="session_idle_s",
                code="out_of_range",
            )


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of structured output, of one request and of the work that all of them make before they run.

    Attributes:
        max_schema_bytes: of a JSON schema, regular expression or grammar, or of all choices together.
        max_schema_depth: schemas within schemas.
        max_enum_items: of all `enum`s of a schema together, or choices.
        max_pattern_bytes: of one pattern in a schema.
        max_repeats: minItems, maxItems, minLength and their like in a schema.
        max_compiling: that are built at the same time; each takes a thread.
        max_compile_waiting: that wait to be built; one more is answered 429.
        compile_timeout_s: what takes longer to build is answered 400.
        grammar_cache_bytes: of what is known of grammars that were asked for lately.
    """

    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 32
    max_enum_items: int = 4096
    max_pattern_bytes: int = 512
    max_repeats: int = 10_000
    max_compiling: int = 2
    max_compile_waiting: int = 64
    compile_timeout_s: float = 1.0
    grammar_cache_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if name == "compile_timeout_s":
                _above_zero(name, value)
            else:
                _at_least(name, value, 0 if name == "grammar_cache_bytes" else 1)


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of connections, and of one of them; times in seconds.

    Attributes:
        max_connections: open at once; one more is answered 503.
        max_request_line: bytes, else 414.
        max_header_bytes, max_headers: else 431.
        header_timeout_s: from the first byte of a head (or the connect) to its end.
        body_timeout_s: without a byte of a body that is not complete.
        keep_alive_timeout_s: between two requests.
        write_timeout_s: in which the client takes nothing of what is written, or gives no sign of life.
        min_body_rate: bytes a second that a body must come at from its `body_timeout_s`-th second on.
        max_discarded_bytes: of a body whose request was already answered.
        max_pipelined: requests that wait behind one another.
    """

    max_connections: int = 4096
    max_request_line: int = 8 << 10
    max_header_bytes: int = 16 << 10
    max_headers: int = 64
    header_timeout_s: float = 10.0
    body_timeout_s: float = 75.0
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    min_body_rate: int = 1024
    max_discarded_bytes: int = 64 << 20
    max_pipelined: int = 16

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not name.endswith("_s"):
                _at_least(name, value, 1)
            else:
                _above_zero(name, value)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front. Keys are never logged nor shown.

    Attributes:
        admin_keys: for pausing and the like, which nobody may where there is none.
        allowed_origins: whose web pages may use the server, such as https://chat.example; none but its own.
        reuse_port: take the port over from a server that has the same, once everything is ready.
        min_free_bytes: of the host's memory; with less left new requests are answered 503. 0 never.
        profile_dir: where profiles are written; None refuses them.
        settings: what `/server_info` shows; without secrets.
        tool_parser: how the model calls tools (`tokenizer.tool_formats`); auto: as its chat template shows.
        reasoning_parser: where it thinks aloud; auto: as its chat template shows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False
    api_keys: list[str] = []
    admin_keys: list[str] = []
    allowed_origins: list[str] = []
    served_model_name: str | None = None
    insecure: bool = False  # allow a non-loopback address without a key
    drain_s: float = 30.0
    limits: Limits = Limits()
    connections: ConnectionLimits = ConnectionLimits()
    grammars: GrammarLimits = GrammarLimits()
    min_free_bytes: int = 128 << 20
    log_format: Literal["text", "json"] = "text"
    profile_dir: str | None = None
    settings: dict[str, Any] = {}
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"

    def __post_init__(self) -> None:
        _at_least("min_free_bytes", self.min_free_bytes, 0)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine needs; the parts go to their owners."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    seed: int = 0

    def with_partition(self, partition: str) -> EngineConfig:
        """The same with other layers per stage."""
        parallel = msgspec.structs.replace(self.parallel, partition=partition)
        return msgspec.structs.replace(self, parallel=parallel)

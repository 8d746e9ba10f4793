"""The configs that child processes are given at start, on their inherited pipes.

Frozen values, encoded by msgspec. `engine.supervisor.launch` makes them from the settings (`config`). Where a
process meets the others in an epoch it is told later (`process.endpoints`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.config.engine import (
    CacheConfig,
    ModelImpl,
    ParallelConfig,
    Pooling,
    Quantization,
    SchedulerConfig,
    TiedHead,
)
from penstock.config.server import ServerConfig
from penstock.config.speculation import SpeculationConfig
from penstock.faults import Fault

THIS_HOST = "this host"  # the name of the supervisor's own machine


def rank_name(stage: int, tp_rank: int, tp_size: int) -> str:
    """Return a rank's name for messages: "stage 1", or "stage 1 tp 0" where ranks share it."""
    return f"stage {stage}" + (f" tp {tp_rank}" if tp_size > 1 else "")


def rank_names(stages: Sequence[int]) -> list[str]:
    """Return the names of ranks, given the stage of each, stage by stage."""
    return [
        rank_name(stage, rank - stages.index(stage), stages.count(stage)) for rank, stage in enumerate(stages)
    ]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers of KV blocks beyond the pool, as core and ranks open them.

    Attributes:
        url: URL of the store; None: there is only the host tier.
        host_blocks: blocks that each rank has room for in the host tier; 0: there is none.
        writes_back: see `kvstore.host_tier`.
        write_bytes_per_s: see `runner.kv_transfer`.
        namespace: that of all records of this model, dtype, quantisation and block size (`kvstore.names`).
        description: that namespace, for people (`kvstore.description`).
        host: name of the host that has this store to itself; empty: the core uses the same one.
    """

    url: str | None
    quota_bytes: int | None
    namespace: bytes
    description: bytes = b""
    host_blocks: int = 0
    writes_back: bool = False
    write_bytes_per_s: int = 0
    host: str = ""


class FirstLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The record of what a rank read when its engine started, for the rank that takes its place.

    It is empty for a rank without a predecessor.

    Attributes:
        identity: identity of the sampled model (`kvstore.names.model_identity`).
        digests: a table of `weights.read_digests`, of samples and of every tensor.
    """

    identity: bytes = b""
    digests: bytes = b""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config of one rank, given at start. Its layers are `[start_layer, end_layer)`.

    Attributes:
        quantization: how to quantise weights at load. "none" for a checkpoint that is quantised already: its
            tensors are held as they are.
        gguf_dequantize: weights of a GGUF file become numbers of the dtype at load.
        device: `cpu`, or one GPU such as `cuda:0`.
        num_sharers: ranks in the same memory, this one counted.
        kernels: which of our CPU kernels to use, as in `ParallelConfig`.
        numeric_class: class in which they must compute, as there.
        cpus: cores of this rank's compute threads, one each and no other rank's; empty: not pinned.
        faults: faults that a test has armed; a rank that takes the place of another has none.
        tp_rank, tp_size: its place among the ranks that share the stage's layers, and how many they are.
        tp_sizes: number of ranks of each stage; empty: one rank each.
        expert_parallel: the ranks of a stage have experts whole, and not each a part of all.
        are_threads: the ranks are threads of one process.
        replica: which pipeline it belongs to; None where there is one.
        model_impl: whose layers run, as in `ModelConfig`.
        store: where KV blocks are kept beyond the cache; None: nowhere.
        host: name of the machine that it runs on.
        prefill_chunk: prompt tokens of one row in one plan at most; 0: as many as a plan has.
        mtp: the last stage guesses tokens with the MTP layer of the checkpoint.
        first_load: what must still be on the disk.
        model_identity: identity of the model whose tensors are in the directory, where the host knows it;
            empty: the rank takes samples of the files.
    """

    model_path: str  # resolved directory; empty: the rank is told later, by `UseModel`
    dtype: Literal["float32", "bfloat16", "float16"]
    max_model_len: int
    stage: int
    num_stages: int
    start_layer: int
    end_layer: int
    device: str
    threads: int
    block_size: int
    num_blocks: int | None
    kv_cache_bytes: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int  # plans in flight at most
    link_frames: int  # frames that a link holds, each end of it where it is between hosts
    max_drafts: int = 0  # of a row in one step
    prefill_chunk: int = 0
    mtp: bool = False
    tied_head: TiedHead = "load"
    quantization: Quantization = "none"
    gguf_dequantize: bool = False
    num_sharers: int = 1
    kernels: str = "auto"
    numeric_class: str = "auto"
    cpus: tuple[int, ...] = ()
    wait_timeout_s: float = (
        60.0  # deadline of every wait on a peer inside a step: all stages may be computing
    )
    faults: list[Fault] = []
    tp_rank: int = 0
    tp_size: int = 1
    tp_sizes: tuple[int, ...] = ()
    expert_parallel: bool = False
    are_threads: bool = False
    replica: int | None = None
    model_impl: ModelImpl = "auto"
    store: StoreConfig | None = None
    host: str = THIS_HOST
    first_load: FirstLoad = FirstLoad()
    model_identity: bytes = b""

    @property
    def device_type(self) -> str:
        """The type of the device, `cpu` or `cuda`."""
        return self.device.partition(":")[0]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def has_mtp(self) -> bool:
        """Whether this rank has the MTP layer, or its share of it."""
        return self.mtp and self.is_last

    @property
    def num_layers(self) -> int:
        """The number of its layers, without an MTP layer."""
        return self.end_layer - self.start_layer

    @property
    def is_between(self) -> bool:
        """Whether the stage neither embeds nor samples, so that it reads no token id."""
        return not (self.is_first or self.is_last)

    @property
    def name(self) -> str:
        """The name for messages within its pipeline."""
        return rank_name(self.stage, self.tp_rank, self.tp_size)

    @property
    def max_num_samples(self) -> int:
        """The most samples of one step."""
        return min(self.max_num_seqs * (1 + self.max_drafts), self.max_num_batched_tokens)

    @property
    def is_output(self) -> bool:
        """Whether this rank tells what was sampled: the first of the last stage [D8]."""
        return self.is_last and self.tp_rank == 0

    @property
    def next_tp_size(self) -> int:
        """The number of ranks that share the layers of the next stage."""
        return self.tp_sizes[self.stage + 1] if self.tp_sizes else 1

    @property
    def first_tp_size(self) -> int:
        """The number of ranks that share the layers of the first stage, which embeds."""
        return self.tp_sizes[0] if self.tp_sizes else 1

    @property
    def receivers(self) -> range:
        """The ranks of the next stage that this one sends to: each gets its share from one of the senders."""
        return range(0) if self.is_last else range(self.tp_rank, self.next_tp_size, self.tp_size)


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model that drafts, as its process loads it.

    Attributes:
        rank: config of a rank with all layers.
        vocab_size: ids of the model that is guessed.
    """

    rank: RankConfig
    vocab_size: int


class DrafterProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for the process of a draft model."""

    drafter: DrafterConfig
    parent_pid: int


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config of the engine core, given at start.

    Attributes:
        replica: which pipeline it is the core of; None where there is one.
        stall_timeout_s: with plans in flight and no result for this long, the pipeline counts as lost.
        is_stall_timeout_fixed: the user has chosen it; else it holds until a plan with tokens has crossed the
            stages, and from then on follows what plans take.
        cpus: cores that the core's process may use; empty: all.
        store: as for the ranks.
        model_path: resolved directory, whose tokenizer says what grammars mean; empty: it is not needed.
        num_links: links between hosts, on the way of a plan through the stages.
        drafter: the model that drafts; None: there is none.
        guess_share: cost of a guess of the MTP layer, as a share of a step of one token.
        record_decisions: file in which its decisions are recorded; empty: nowhere.
    """

    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculation: SpeculationConfig = SpeculationConfig()
    seed: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    model_path: str = ""
    stall_timeout_s: float = 65.0
    is_stall_timeout_fixed: bool = True
    replica: int | None = None
    cpus: tuple[int, ...] = ()
    store: StoreConfig | None = None
    num_links: int = 0
    drafter: DrafterConfig | None = None
    guess_share: float = 0.0
    record_decisions: str = ""


class RankProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for a rank; its neighbours come later, in `RankEndpoints`."""

    rank: RankConfig
    parent_pid: int


class MeasureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements to be made of a rank.

    Attributes:
        rank: the rank as in service, but for its layers: only as many as are timed.
        num_rows: rows of the decode steps, rising.
        context: tokens of each row, the one that it decodes included.
        prefill_tokens: tokens of the chunk of a prompt.
        case_s: seconds for each number of rows, and for the chunk; more if a step takes longer.
    """

    rank: RankConfig
    num_rows: list[int]
    context: int
    prefill_tokens: int
    case_s: float


class SpareProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for a spare; which rank it becomes comes later: `BecomeRank`.

    Attributes:
        threads: the most that the rank may have.
        nice: niceness of its imports; 0 where the rank waits for them.
        successor_path: path of a socket where the next worker may take it over (`process.successor`); empty:
            it ends with its parent.
    """

    threads: int
    nice: int
    parent_pid: int
    successor_path: str = ""


class MeasureProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for a process that measures; when to begin comes later."""

    measure: MeasureConfig
    parent_pid: int


class CoreProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for the core. Where the ranks are comes later: `CoreEndpoints`."""

    core: CoreConfig
    parent_pid: int
    client_address: str  # zmq ROUTER; the core binds


class StageShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a stage: layers `[start_layer, end_layer)`, on this many ranks of a host."""

    start_layer: int
    end_layer: int
    num_ranks: int = 1
    host: str = THIS_HOST


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """The measured way between two hosts that is in use.

    Attributes:
        hosts: their names.
        interfaces: interface of each of them, on this way.
        bytes_per_s_out: from the first host to the second.
        bytes_per_s_in: from the second host to the first.
        reduced_bytes_per_s_out, reduced_bytes_per_s_in: the most that it has carried since it was found to be
            slow, less than half as much; 0 where it was not.
    """

    hosts: tuple[str, str]
    interfaces: tuple[str, str]
    round_trip_s: float
    bytes_per_s_out: float
    bytes_per_s_in: float
    reduced_bytes_per_s_out: float = 0.0
    reduced_bytes_per_s_in: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether either direction was found to be slow."""
        return bool(self.reduced_bytes_per_s_out or self.reduced_bytes_per_s_in)

    def bytes_per_s(self, sender: str) -> float:
        """Return the bytes per second away from one of the two hosts."""
        return self.bytes_per_s_out if sender == self.hosts[0] else self.bytes_per_s_in


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for the API process. The listening socket comes as `listen_fd`.

    Attributes:
        model_names: names under which clients may ask for the model; the first is the one in answers.
        hold_s: connections wait this long for the engine, where one is there, before they are answered 503.
        has_prefix_cache: whether each replica keeps what it has computed.
        hidden_size: numbers of a token's hidden state, and of a whole vector.
        token_bytes: bytes that cross from stage to stage for each token.
        pooling, chat_template: as in `ModelConfig`.
    """

    server: ServerConfig
    parent_pid: int
    client_addresses: list[str]  # of the cores, one per replica
    listen_fd: int
    model_path: str
    model_names: list[str]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    max_num_seqs: int
    max_waiting_requests: int
    num_stages: int
    stages: list[StageShape] = []  # of each replica
    host_links: list[HostLink] = []  # between hosts
    has_prefix_cache: bool = False
    heartbeat_limit_s: float = 5.0
    hold_s: float = 0.0
    hidden_size: int = 0
    token_bytes: int = 0
    pooling: Pooling = "last"
    chat_template: str | None = None

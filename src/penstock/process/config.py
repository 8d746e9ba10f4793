"""The configs that child processes are given at start, on their inherited pipes.

They are frozen values, encoded by msgspec. `engine.supervisor.launch` makes most of them from the settings
(`config`). The endpoints at which a process meets the others in an epoch come later (`process.endpoints`).
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
    """Return the names of all ranks, from the stage of each rank; ranks of one stage stand side by side."""
    return [
        rank_name(stage, rank - stages.index(stage), stages.count(stage)) for rank, stage in enumerate(stages)
    ]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers where KV blocks are kept besides the devices, as core and ranks open them.

    Attributes:
        url: URL of the store; None: there is only the host tier, which is memory of the host.
        quota_bytes: the most bytes that the store may hold; None: the store keeps no quota.
        host_blocks: blocks that each rank has room for in the host tier; 0: there is no host tier.
        writes_back: see `kvstore.host_tier`.
        write_bytes_per_s: see `runner.kv_transfer`.
        namespace: name that all records of one model, dtype, quantisation and block size share
            (`kvstore.names`).
        description: what the namespace stands for, to be shown to people (`kvstore.description`).
        host: name of the host that has a store of its own; empty: the rank uses the core's store.
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

    The record is empty for a rank that replaces no other.

    Attributes:
        identity: hash over samples of the model's files (`kvstore.names.model_identity`).
        digests: checksums of samples and of every tensor, a table of `weights.read_digests`.
    """

    identity: bytes = b""
    digests: bytes = b""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config of one rank, given at start. The rank has the layers `[start_layer, end_layer)`.

    Attributes:
        quantization: how to quantise weights at load. It is "none" if the checkpoint is quantised already:
            its tensors are then held as they are.
        gguf_dequantize: the quantised weights of a GGUF file become numbers of `dtype` at load.
        device: `cpu`, or one GPU such as `cuda:0`.
        num_sharers: number of ranks that share the memory of the device, this one counted.
        kernels: which of our CPU kernels to use, as in `ParallelConfig`.
        numeric_class: class in which the kernels must compute, as in `ParallelConfig`.
        cpus: the CPU cores of this rank's compute threads: one core for each thread, shared with no other
            rank. Empty: the threads are not pinned.
        faults: faults that a test has armed; a rank that takes the place of another has none.
        tp_rank, tp_size: number of this rank among those that share the stage's layers, and how many share
            them.
        tp_sizes: number of ranks of each stage; empty: every stage has one.
        expert_parallel: each rank of a stage has some experts whole, instead of a part of every expert.
        are_threads: the ranks are threads of one process.
        replica: number of the pipeline that the rank belongs to; None: there is only one pipeline.
        model_impl: whose layers run, as in `ModelConfig`.
        store: where KV blocks are kept besides the device; None: nowhere.
        host: name of the machine that the rank runs on.
        prefill_chunk: the most prompt tokens of one row in one plan; 0: as many as a plan has room for.
        mtp: the last stage guesses tokens with the checkpoint's own layer for multi-token prediction (MTP).
        first_load: what the rank must find on the disk if it replaces another.
        model_identity: identity of the model whose tensors are in the directory, if the host knows it;
            empty: the rank computes it from samples of the files.
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
    depth: int  # the most plans in flight
    link_frames: int  # frames that a link holds; between hosts, each of its two ends holds as many
    max_drafts: int = 0  # the most guessed tokens of a row in one step
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
        """Whether this rank has the MTP layer, whole or in part."""
        return self.mtp and self.is_last

    @property
    def num_layers(self) -> int:
        """The number of the rank's layers, an MTP layer not counted."""
        return self.end_layer - self.start_layer

    @property
    def is_between(self) -> bool:
        """Whether the stage neither embeds nor samples, so that it reads no token id."""
        return not (self.is_first or self.is_last)

    @property
    def name(self) -> str:
        """The name of the rank in messages, without the number of its replica."""
        return rank_name(self.stage, self.tp_rank, self.tp_size)

    @property
    def max_num_samples(self) -> int:
        """The most tokens that one step can sample."""
        return min(self.max_num_seqs * (1 + self.max_drafts), self.max_num_batched_tokens)

    @property
    def is_output(self) -> bool:
        """Whether this is the output rank, the first of the last stage, which sends what was sampled [D8]."""
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
        """The numbers of the ranks of the next stage that this rank sends to.

        Each rank of the next stage receives from exactly one rank of this stage.
        """
        return range(0) if self.is_last else range(self.tp_rank, self.next_tp_size, self.tp_size)


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model, as its process loads it.

    Attributes:
        rank: config of a rank that has all layers of the draft model.
        vocab_size: number of token ids of the served model, whose tokens are guessed.
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
        replica: number of the core's pipeline; None: there is only one pipeline.
        stall_timeout_s: the pipeline counts as lost if plans are in flight and no result has come for so
            many seconds.
        is_stall_timeout_fixed: True: the user has chosen `stall_timeout_s`. False: it holds until a plan with
            tokens has crossed the stages; from then on the limit follows the time that plans take.
        cpus: CPU cores that the core's process may use; empty: all.
        store: as in `RankConfig`.
        model_path: directory of the model, whose tokenizer the core needs to follow grammars; empty: the
            core does not need it.
        num_links: number of links between hosts that a plan crosses on its way through the stages.
        drafter: the draft model; None: there is none.
        guess_share: cost of a guess of the MTP layer, as a share of the cost of a step of one token.
        record_decisions: file in which the core's decisions are recorded; empty: they are not recorded.
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
    """The config pipe's content for a rank; the ends of its connections come later (`RankEndpoints`)."""

    rank: RankConfig
    parent_pid: int


class MeasureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements to be made of a rank.

    Attributes:
        rank: config of the rank as in service, except that it has only the layers that are timed.
        num_rows: numbers of rows of the decode steps to time, in rising order.
        context: tokens of each row, with the one that it decodes.
        prefill_tokens: tokens of the prompt chunk to time.
        case_s: seconds to spend on each number of rows, and on the chunk. A step that takes longer is
            finished.
    """

    rank: RankConfig
    num_rows: list[int]
    context: int
    prefill_tokens: int
    case_s: float


class SpareProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for a spare; an order tells it later which rank it becomes (`BecomeRank`).

    Attributes:
        threads: the most threads that the rank may have.
        nice: niceness of the spare while it imports; 0 if a rank waits for the imports.
        successor_path: path of a socket where the next worker may take the spare over
            (`process.successor`); empty: the spare ends with its parent.
    """

    threads: int
    nice: int
    parent_pid: int
    successor_path: str = ""


class MeasureProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for a process that measures; `BeginMeasuring` tells it later to begin."""

    measure: MeasureConfig
    parent_pid: int


class CoreProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for the core; the ends of its connections come later (`CoreEndpoints`)."""

    core: CoreConfig
    parent_pid: int
    client_address: str  # zmq ROUTER; the core binds


class StageShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a stage: the layers `[start_layer, end_layer)` on `num_ranks` ranks of one host."""

    start_layer: int
    end_layer: int
    num_ranks: int = 1
    host: str = THIS_HOST


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """The network path between two hosts that is in use, as it was measured.

    Attributes:
        hosts: names of the two hosts.
        interfaces: network interface of each host on this path.
        bytes_per_s_out: speed from the first host to the second.
        bytes_per_s_in: speed from the second host to the first.
        reduced_bytes_per_s_out, reduced_bytes_per_s_in: if the path was found to be slow in this direction,
            the most that it has carried while it was becoming slow; else 0.
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
        """Return the speed from `sender`, one of the two hosts, to the other host."""
        return self.bytes_per_s_out if sender == self.hosts[0] else self.bytes_per_s_in


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config pipe's content for the API process, which inherits the listening socket as `listen_fd`.

    Attributes:
        model_names: names under which clients may ask for the model; answers have the first one.
        hold_s: the API process answers nothing before the engine has answered it, or so many seconds have
            passed since it started; connections wait meanwhile.
        has_prefix_cache: whether each replica keeps the KV blocks of earlier prompts for later ones.
        hidden_size: how many numbers a token's hidden state has, and so a vector that is not cut.
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

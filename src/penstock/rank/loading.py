"""Loads one rank's model and makes the runner over it: all that computes, without neighbours or messages.

Called by `rank.rank`, which serves requests with them, and by `planner.step_timing`, which measures their
times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.attention.metadata import AnyKV, kv_tensors
from penstock.distributed.group import SOLO, MemoryGroup, TensorGroup
from penstock.distributed.torch_group import TorchGroup
from penstock.errors import UsageError
from penstock.families.sharding import HeadShares
from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.ops import CpuKernels
from penstock.kvstore.catalogue import StoreCatalogue
from penstock.kvstore.entry_calls import NO_ENTRY_CALLS, EntryCalls, NoEntryCalls
from penstock.kvstore.host_tier import block_bytes
from penstock.kvstore.opening import open_guarded
from penstock.layers.compute import Compute
from penstock.models.decoder import EMBEDDING, Decoder
from penstock.models.interfaces import require_pp
from penstock.models.transformers_backend import TransformersModel
from penstock.process.config import RankConfig
from penstock.process.host_memory import give_back_freed_pages, host_available_bytes
from penstock.rank.compute_choice import (
    ChosenKernels,
    format_of,
    is_invariant,
    load_kernels,
    numeric_class,
    pin_threads,
)
from penstock.rank.model_samples import ModelSamples, sample_model
from penstock.rank.stored_weights import StoredWeights, read_model
from penstock.runner.buffers import BufferPool
from penstock.runner.device_kv import DeviceKV
from penstock.runner.guarded_runner import GuardedRunner
from penstock.runner.kv_transfer import KVTransfer
from penstock.runner.model_runner import ModelRunner
from penstock.runner.mtp_guesser import MTPGuesser
from penstock.runner.request_rows import KeptIds, NoIds, RequestRows
from penstock.sample.grammar_rows import GrammarRows, NoGrammars
from penstock.weights.loader import LoadReport

if TYPE_CHECKING:
    from penstock.grammar.matcher import Vocabulary

_NO_KERNELS = ChosenKernels(None, "none for transformers' layers: plain torch, which is slower")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """The weights of a rank in memory, with what was learnt while they were loaded.

    Attributes:
        samples: digests of samples of the model's files, taken before the weights were read.
        group: the ranks that share the stage's layers; the rank joins it in every epoch.
        storage: the KV cache of the rank's layers; nothing is allocated yet.
        report: how many bytes were read, and in what time.
        kernels: text for people: which of our kernels run, or why none do.
        has_kernels: whether any of our kernels run.
        is_invariant: whether a row's results do not depend on the other rows computed with it.
        numeric_class: a text that is equal for ranks that compute the same bits.
    """

    samples: ModelSamples
    spec: ModelSpec
    device: torch.device
    group: TensorGroup
    model: Decoder | TransformersModel
    storage: DeviceKV
    report: LoadReport
    kernels: str
    has_kernels: bool
    is_invariant: bool
    numeric_class: str


def load_rank(config: RankConfig, progress: Callable[[int, int], None]) -> LoadedRank:
    """Set up this process's (or thread's) compute threads, and load the rank's weights.

    Args:
        progress: called with (bytes done, bytes in all).

    Raises:
        ModelChangedError: the rank takes the place of a lost one, and the model's files are not those of the
            engine's first load.
    """
    torch.set_num_threads(config.threads)
    device = device_of(config)
    directory, first = Path(config.model_path), config.first_load
    samples = sample_model(
        directory, identity=first.identity, table=first.digests, known=config.model_identity
    )
    stored = read_model(directory, config.model_impl, dequantize=config.gguf_dequantize)
    spec = stored.spec
    is_quantized = config.quantization != "none" or spec.quantization is not None
    is_ours = spec.implementation == "penstock"
    chosen = load_kernels(config, is_quantized=is_quantized) if is_ours else _NO_KERNELS
    kernels = chosen.kernels
    pin_threads(config, kernels)
    require_pp(Decoder if is_ours else TransformersModel)
    weights = stored.open_weights(first.digests)
    group = tensor_group(config, kernels)
    model = (
        build_model(config, spec, kernels, weights, group)
        if is_ours
        else build_transformers(config, spec, weights.names)
    )
    is_sent_head = config.is_last and transfers_head(config, spec)
    left_out = frozenset({f"{EMBEDDING}.weight"} if is_sent_head else ())
    report = weights.load(model, progress, left_out)
    give_back_freed_pages()
    num_layers = config.num_layers + config.has_mtp
    storage = DeviceKV(model.attention, num_layers=num_layers, block_size=config.block_size, device=device)
    return LoadedRank(
        samples=samples,
        spec=spec,
        device=device,
        group=group,
        model=model,
        storage=storage,
        report=report,
        kernels=chosen.description,
        has_kernels=kernels is not None,
        is_invariant=is_invariant(kernels),
        numeric_class=numeric_class(chosen, spec, device),
    )


def tensor_group(config: RankConfig, kernels: CpuKernels | None) -> TensorGroup:
    """Return the group over which this rank exchanges tensors with the other ranks of its stage.

    Our kernels exchange tensors through shared memory. Without kernels, torch exchanges them between
    processes, and Python between threads. A rank that is alone gets a group that exchanges nothing.
    """
    if config.tp_size == 1:
        return SOLO
    name, timeout_s = f"stage {config.stage}", config.wait_timeout_s
    rank, size = config.tp_rank, config.tp_size
    if kernels is not None:
        return SharedGroup(
            kernels, rank, size, name=name, timeout_s=timeout_s, has_own_cores=bool(config.cpus)
        )
    if config.are_threads:
        return MemoryGroup(rank, size, name=name, timeout_s=timeout_s)
    return TorchGroup(rank, size, device=device_of(config), name=name, timeout_s=timeout_s)


def build_model(
    config: RankConfig,
    spec: ModelSpec,
    kernels: CpuKernels | None,
    weights: StoredWeights,
    group: TensorGroup = SOLO,
) -> Decoder:
    """Return a model of the rank's layers, whose weights are not loaded yet."""
    return Decoder(
        spec,
        (config.start_layer, config.end_layer),
        dtype=dtype_of(config),
        device=device_of(config),
        kernels=kernels,
        format_of=format_of(config, weights),
        block_size=config.block_size,
        group=group,
        expert_parallel=config.expert_parallel,
        with_mtp=config.mtp,
    )


def build_transformers(config: RankConfig, spec: ModelSpec, stored: frozenset[str]) -> TransformersModel:
    """Return a model of the rank's layers from the library transformers, whose weights are not loaded yet.

    Args:
        stored: names of the checkpoint's tensors.
    """
    return TransformersModel(
        spec,
        (config.start_layer, config.end_layer),
        directory=Path(config.model_path),
        stored=stored,
        compute=Compute(dtype=dtype_of(config), device=device_of(config)),
        max_model_len=config.max_model_len,
    )


def build_runner(
    config: RankConfig, loaded: LoadedRank, kv: Sequence[AnyKV], grammars: NoGrammars | None = None
) -> ModelRunner:
    """Return the runner that computes plans with a loaded model.

    Args:
        kv: the KV storage of each of the rank's layers, in order; that of an MTP layer, if there is one,
            comes last.
        grammars: constrains samples by grammars; None: nothing does.
    """
    model, num_layers = loaded.model, config.num_layers
    model.record(kv[:num_layers], config.max_num_batched_tokens)
    ids = NoIds if config.is_between else KeptIds
    rows = RequestRows(
        config.max_num_seqs, config.max_model_len, config.block_size, config.max_drafts, ids=ids
    )
    buffers = BufferPool(
        config.depth,
        max_num_tokens=config.max_num_batched_tokens,
        max_num_rows=config.max_num_seqs,
        max_num_samples=config.max_num_samples,
        max_blocks_per_row=rows.tables.width,
        device=device_of(config),
    )
    runner = GuardedRunner(
        model,
        kv[:num_layers],
        rows,
        buffers,
        loaded.spec.vocab_size,
        grammars,
        stage=config.stage,
        width=loaded.spec.hidden_size,
        dtype=dtype_of(config),
        is_alone=config.tp_size == 1,
    )
    if config.has_mtp:
        assert isinstance(model, Decoder), "refused at the start"
        num_bytes = sum(tensor.nbytes for tensor in kv_tensors(kv[-1]))
        num_blocks = num_bytes // model.attention.block_bytes(config.block_size)
        runner.guesser = MTPGuesser(
            model, kv[-1], num_blocks, rows, runner.sampling, is_shared=config.tp_size > 1
        )
    return runner


def grammar_rows(config: RankConfig, spec: ModelSpec) -> NoGrammars:
    """Return the object that constrains samples by the grammars of requests.

    It is a stand-in on stages that do not sample. A rank that is a process reads the vocabulary now, so that
    the first request with a grammar does not hold up the others; a rank that is a thread reads it then.
    """
    if not config.is_last:
        return NoGrammars()

    def open_vocabulary() -> Vocabulary:
        from penstock.grammar.matcher import load_vocabulary  # here: a thread may never need the library

        return load_vocabulary(Path(config.model_path), spec.eos_token_ids)

    grammars = GrammarRows(spec.vocab_size, open_vocabulary, timeout_s=config.wait_timeout_s)
    if not config.are_threads:
        grammars.open()
        give_back_freed_pages()  # reading a vocabulary takes up to 60 MB, which are free afterwards
    return grammars


def kv_transfer(config: RankConfig, loaded: LoadedRank, kv: Sequence[AnyKV]) -> KVTransfer | None:
    """Return the object that copies blocks between KV cache and store; None without a store."""
    if config.store is None:
        return None
    heads = HeadShares.of(loaded.spec, loaded.group)
    codec = loaded.model.attention.block_codec(config.block_size)
    kv = kv[: config.num_layers]  # without the MTP layer's: it only guesses, and can do without old entries
    return KVTransfer(
        open_guarded(
            config.store.url,
            quota_bytes=config.store.quota_bytes,
            host_bytes=config.store.host_blocks
            * block_bytes(len(kv) * codec.num_records, codec.record_bytes),
            writes_back=config.store.writes_back,
        ),
        codec,
        kv,
        first_layer=config.start_layer,
        first_head=heads.keys.start if loaded.spec.latent is None else 0,
        namespace=config.store.namespace,
        write_bytes_per_s=config.store.write_bytes_per_s,
    )


def entry_calls(config: RankConfig) -> EntryCalls | NoEntryCalls:
    """Return the object that answers the core's calls about the KV store of this host.

    It is a stand-in if there is no store, or if the core uses the same store and so makes no such calls.
    """
    store = config.store
    if store is None or not store.host:
        return NO_ENTRY_CALLS
    return EntryCalls(
        lambda: StoreCatalogue(
            open_guarded(store.url, quota_bytes=store.quota_bytes), store.namespace, store.description
        )
    )


def transfers_head(config: RankConfig, spec: ModelSpec) -> bool:
    """Return whether the last stage gets the weights of its output head from the first one, over the links.

    That is so if three things hold: the head is tied to the embedding (has the same weights), there are
    several stages, and the config says "transfer".
    """
    return config.tied_head == "transfer" and spec.tie_word_embeddings and config.num_stages > 1


def device_of(config: RankConfig) -> torch.device:
    """Return the device of the rank; raise `UsageError` if it is not there."""
    device, num_gpus = torch.device(config.device), torch.cuda.device_count()
    if device.type == "cpu" or device.index < num_gpus:
        return device
    seen = f"only {num_gpus}" if num_gpus else "no GPU"
    raise UsageError(
        f"stage {config.stage} needs {device}, but torch {torch.__version__} finds {seen}.",
        remedy="Use --device cpu or an existing GPU, or install a CUDA build of torch.",
        param="device",
    )


def available_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory that no process uses now; for a CPU, of the host's memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_available_bytes()


def dtype_of(config: RankConfig) -> torch.dtype:
    """Return the torch dtype in which a rank computes."""
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype

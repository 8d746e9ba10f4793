"""One rank from weights to the end of its stage loop.

`run_rank` is the whole life of a rank, the same in a process of its own (`executor.worker`) and in a thread
(`executor.inprocess`); they differ in the channels and links that they pass in.

    load weights ─▶ RankLoaded ─▶ (AllocateKV) ─▶ allocate ─▶ RankReady ─▶ stage loop until Shutdown
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV
from penstock.batch import (
    AllocateKV,
    RankFailed,
    RankLoaded,
    RankReady,
    Shutdown,
    StageSpans,
    StageTimes,
    decode_to_rank,
    encode,
)
from penstock.config import RankConfig
from penstock.errors import PenstockError, ProtocolError, UsageError
from penstock.executor.child import Failed, Loaded, Progress, Ready, StatusEvent, failure
from penstock.executor.compute_choice import (
    format_of,
    is_invariant,
    load_kernels,
    pin_threads,
    quantized_checkpoint,
)
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.matrix import PLAIN, Matrix
from penstock.models.decoder import EMBEDDING, Decoder
from penstock.models.interfaces import require_pp
from penstock.models.registry import load_spec
from penstock.models.spec import ModelSpec
from penstock.pipeline.channel import MessageChannel
from penstock.pipeline.link import Link
from penstock.pipeline.ports import EmbedSource, ForwardSink, LinkSource, SampleSink, Sink, Source
from penstock.pipeline.stage import Stage, blaming, plans_from
from penstock.pipeline.tied_head import relay_weight, transfer_tied_head
from penstock.pipeline.token_return import TokenReceiver, TokenSender
from penstock.runner.buffers import BufferPool
from penstock.runner.kv_storage import KVDemand, KVStorage
from penstock.runner.memory import host_available_bytes
from penstock.runner.model_runner import ModelRunner
from penstock.runner.request_rows import RequestRows
from penstock.trace.phases import PhaseClock, StageReporter
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import LoadReport, load_weights
from penstock.weights.quantized_formats import QuantizedCheckpoint

Report = Callable[[StatusEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConnections:
    """How a rank reaches the others.

    Attributes:
        plans: from the core, and what is told to it.
        results: last stage: of its steps, to the core.
        tokens: last stage: to each earlier stage, in order; any other: from the last stage.
        incoming: from the stage before; absent on the first stage.
        outgoing: to the next stage; absent on the last stage.
    """

    plans: MessageChannel
    results: MessageChannel
    tokens: Sequence[MessageChannel]
    incoming: Link | None
    outgoing: Link | None

    def close(self) -> None:
        """Let all neighbours know that this rank has ended."""
        for end in (self.incoming, self.outgoing, *self.tokens, self.results, self.plans):
            if end is not None:
                end.close()


def run_rank(config: RankConfig, connections: RankConnections, report: Report) -> Failed | None:
    """Live the life of a rank. Whatever ends it, core and supervisor learn the cause before the neighbours
    do.

    Args:
        report: takes status events; must not block.

    Returns:
        None after `Shutdown`, else the failure that was reported.
    """
    try:
        with blaming(config.stage, "while starting"):
            _serve(config, connections, report)
        return None
    except Exception as error:
        failed = failure(error)
        report(failed)
        _tell_core(config.stage, failed, connections.plans)
        return failed
    finally:
        connections.close()


def _serve(config: RankConfig, connections: RankConnections, report: Report) -> None:
    torch.set_num_threads(config.threads)
    device = _device(config)
    spec = load_spec(Path(config.model_path))
    is_quantized = config.quantization != "none" or spec.quantization is not None
    kernels, description = load_kernels(config, is_quantized=is_quantized)
    pin_threads(config, kernels)
    require_pp(Decoder)
    checkpoint = Checkpoint(Path(config.model_path))
    quantized = quantized_checkpoint(checkpoint, spec)
    model = _build_model(config, spec, device, kernels, quantized)
    loaded = load_weights(
        model,
        checkpoint,
        lambda done, total: report(Progress(done=done, total=total)),
        left_out=frozenset(
            {f"{EMBEDDING}.weight"} if config.is_last and _transfers_head(config, spec) else ()
        ),
        quantized=quantized,
    )
    storage = _storage(config, model, device)
    message = _loaded_message(
        config,
        loaded,
        storage,
        _available_bytes(device),
        kernels=description,
        is_invariant=is_invariant(kernels),
    )
    report(Loaded(rank=message))
    connections.plans.send(encode(message))
    num_blocks = _await_allocation(connections.plans)
    if num_blocks is None:
        return
    if _transfers_head(config, spec):
        _transfer_head(config, spec, model, connections)
    runner = _build_runner(config, model, storage.allocate(num_blocks), device)
    clock = PhaseClock(keeps_spans=True)
    source = _choose_source(config, spec, runner, connections, clock)
    sink = _choose_sink(config, runner, connections, clock)
    times = StageReporter(config.stage, clock, lambda told: _tell_times(told, connections.plans))
    stage = Stage(config.stage, runner, source, sink, times)
    report(Ready())
    connections.plans.send(encode(RankReady(stage=config.stage)))
    stage.run(plans_from(connections.plans, clock, is_last=config.is_last))


def _build_model(
    config: RankConfig,
    spec: ModelSpec,
    device: torch.device,
    kernels: CpuKernels | None,
    quantized: QuantizedCheckpoint | None,
) -> Decoder:
    return Decoder(
        spec,
        (config.start_layer, config.end_layer),
        dtype=_dtype(config),
        device=device,
        kernels=kernels,
        format_of=format_of(config, quantized),
        block_size=config.block_size,
    )


def _transfers_head(config: RankConfig, spec: ModelSpec) -> bool:
    return config.tied_head == "transfer" and spec.tie_word_embeddings and config.num_stages > 1


def _transfer_head(config: RankConfig, spec: ModelSpec, model: Decoder, connections: RankConnections) -> None:
    """Once all ranks have loaded, so that nobody waits for another's disk."""
    weight = relay_weight(spec.vocab_size, spec.hidden_size, dtype=_dtype(config), device=_device(config))
    embedding = model.get_submodule(EMBEDDING)
    matrix = embedding.weight if isinstance(embedding, VocabEmbedding) else None
    if isinstance(matrix, Tensor):
        weight = matrix.data
    packed = matrix if isinstance(matrix, Matrix) else None
    transfer_tied_head(
        weight,
        incoming=connections.incoming,
        outgoing=connections.outgoing,
        block_rows=config.max_num_batched_tokens,
        keep=None if packed is None else lambda first, rows: packed.put(first, rows, PLAIN),
    )
    if packed is not None:
        packed.finish()


def _storage(config: RankConfig, model: Decoder, device: torch.device) -> KVStorage:
    num_layers = config.end_layer - config.start_layer
    return KVStorage(model.attention, num_layers=num_layers, block_size=config.block_size, device=device)


def _loaded_message(
    config: RankConfig,
    loaded: LoadReport,
    storage: KVStorage,
    available: int,
    *,
    kernels: str,
    is_invariant: bool,
) -> RankLoaded:
    demand = KVDemand(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        num_sharers=_num_sharers(config),
    )
    return RankLoaded(
        stage=config.stage,
        max_blocks=storage.max_blocks(demand, available),
        block_bytes=storage.block_bytes,
        tensor_bytes=loaded.tensor_bytes,
        bytes_read=loaded.bytes_read,
        load_seconds=loaded.seconds,
        kernels=kernels,
        is_invariant=is_invariant,
    )


def _await_allocation(plans: MessageChannel) -> int | None:
    """The number of blocks that the core has decided on; None when it shuts down instead."""
    frame = plans.recv(None)  # without end: other ranks may load for as long as they need
    assert frame is not None
    message = decode_to_rank(frame)
    if isinstance(message, Shutdown):
        return None
    if not isinstance(message, AllocateKV):
        raise ProtocolError(f"expected AllocateKV from the core, found {type(message).__name__}.")
    return message.num_blocks


def _build_runner(config: RankConfig, model: Decoder, kv: list[AnyKV], device: torch.device) -> ModelRunner:
    model.record(kv, config.max_num_batched_tokens)
    rows = RequestRows(config.max_num_seqs, config.max_model_len, config.block_size)
    buffers = BufferPool(
        config.depth,
        max_num_tokens=config.max_num_batched_tokens,
        max_num_rows=config.max_num_seqs,
        max_blocks_per_row=rows.max_blocks_per_row,
        device=device,
    )
    return ModelRunner(model, kv, rows, buffers)


def _choose_source(
    config: RankConfig,
    spec: ModelSpec,
    runner: ModelRunner,
    connections: RankConnections,
    clock: PhaseClock,
) -> Source:
    if connections.incoming is None:
        return EmbedSource(runner)
    return LinkSource(
        connections.incoming,
        max_num_tokens=config.max_num_batched_tokens,
        width=spec.hidden_size,
        dtype=_dtype(config),
        device=_device(config),
        clock=clock,
    )


def _choose_sink(
    config: RankConfig, runner: ModelRunner, connections: RankConnections, clock: PhaseClock
) -> Sink:
    if connections.outgoing is None:
        return SampleSink(runner, TokenSender(connections.tokens), connections.results, clock)
    (channel,) = connections.tokens
    tokens = TokenReceiver(
        channel,
        runner.rows,
        name=f"stage {config.num_stages - 1} -> stage {config.stage}",
        timeout_s=config.wait_timeout_s,
    )
    return ForwardSink(connections.outgoing, tokens, clock)


def _tell_core(stage: int, failed: Failed, plans: MessageChannel) -> None:
    with contextlib.suppress(PenstockError):  # the core may have gone as well; the supervisor has heard
        plans.send(encode(RankFailed(stage=stage, error=failed.error)), timeout_s=1.0)


def _tell_times(told: StageTimes | StageSpans, plans: MessageChannel) -> None:
    with contextlib.suppress(PenstockError):  # the core may have taken its last result and gone
        plans.send(encode(told), timeout_s=0.0)


def _device(config: RankConfig) -> torch.device:
    """Stages take the GPUs of the host in turn."""
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() == 0:
        raise UsageError(
            f"stage {config.stage} is to run on cuda, but torch {torch.__version__} sees no GPU.",
            remedy="Use --device cpu, or install a CUDA build of torch.",
        )
    return torch.device(config.device, config.stage % torch.cuda.device_count())


def _available_bytes(device: torch.device) -> int:
    """What is free on the device now, other processes' use deducted."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_available_bytes()


def _num_sharers(config: RankConfig) -> int:
    """Ranks that live in the same memory."""
    num_memories = 1 if config.device == "cpu" else torch.cuda.device_count()
    return -(-config.num_stages // num_memories)


def _dtype(config: RankConfig) -> torch.dtype:
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype

"""One rank from weights to the end of its stage loop.

`run_rank` is the whole life of a rank, the same in a process of its own (`executor.worker`) and in a thread
(`executor.inprocess`); they differ in the channels and links that they pass in.

    load weights ─▶ RankLoaded ─▶ (AllocateKV) ─▶ allocate ─▶ RankReady ─▶ stage loop until Shutdown
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

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
from penstock.errors import PenstockError, ProtocolError
from penstock.executor.child import Failed, Loaded, Progress, Ready, StatusEvent, failure
from penstock.executor.loading import (
    LoadedRank,
    available_bytes,
    build_runner,
    dtype_of,
    load_rank,
    transfers_head,
)
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.matrix import PLAIN, Matrix
from penstock.models.decoder import EMBEDDING
from penstock.pipeline.channel import MessageChannel
from penstock.pipeline.link import Link
from penstock.pipeline.ports import EmbedSource, ForwardSink, LinkSource, SampleSink, Sink, Source
from penstock.pipeline.stage import Stage, blaming, plans_from
from penstock.pipeline.tied_head import relay_weight, transfer_tied_head
from penstock.pipeline.token_return import TokenReceiver, TokenSender
from penstock.runner.kv_demand import KVDemand
from penstock.runner.model_runner import ModelRunner
from penstock.trace.phases import PhaseClock, StageReporter

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
    loaded = load_rank(config, lambda done, total: report(Progress(done=done, total=total)))
    message = _loaded_message(config, loaded)
    report(Loaded(rank=message))
    connections.plans.send(encode(message))
    num_blocks = _await_allocation(connections.plans)
    if num_blocks is None:
        return
    if transfers_head(config, loaded.spec):
        _transfer_head(config, loaded, connections)
    runner = build_runner(config, loaded.model, loaded.storage.allocate(num_blocks))
    clock = PhaseClock(keeps_spans=True)
    source = _choose_source(config, loaded, runner, connections, clock)
    sink = _choose_sink(config, runner, connections, clock)
    times = StageReporter(config.stage, clock, lambda told: _tell_times(told, connections.plans))
    stage = Stage(config.stage, runner, source, sink, times)
    report(Ready())
    connections.plans.send(encode(RankReady(stage=config.stage)))
    stage.run(plans_from(connections.plans, clock, is_last=config.is_last))


def _transfer_head(config: RankConfig, loaded: LoadedRank, connections: RankConnections) -> None:
    """Once all ranks have loaded, so that nobody waits for another's disk."""
    spec = loaded.spec
    weight = relay_weight(spec.vocab_size, spec.hidden_size, dtype=dtype_of(config), device=loaded.device)
    embedding = loaded.model.get_submodule(EMBEDDING)
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


def _loaded_message(config: RankConfig, loaded: LoadedRank) -> RankLoaded:
    demand = KVDemand.of_rank(config, config.num_sharers)
    return RankLoaded(
        stage=config.stage,
        max_blocks=loaded.storage.max_blocks(demand, available_bytes(loaded.device)),
        block_bytes=loaded.storage.block_bytes,
        tensor_bytes=loaded.report.tensor_bytes,
        bytes_read=loaded.report.bytes_read,
        load_seconds=loaded.report.seconds,
        kernels=loaded.kernels,
        is_invariant=loaded.is_invariant,
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


def _choose_source(
    config: RankConfig,
    loaded: LoadedRank,
    runner: ModelRunner,
    connections: RankConnections,
    clock: PhaseClock,
) -> Source:
    if connections.incoming is None:
        return EmbedSource(runner)
    return LinkSource(
        connections.incoming,
        max_num_tokens=config.max_num_batched_tokens,
        width=loaded.spec.hidden_size,
        dtype=dtype_of(config),
        device=loaded.device,
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

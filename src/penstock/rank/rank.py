"""Runs one rank, from its weights to the end of its last stage loop.

`run_rank` is the whole life of a rank, the same in a process of its own (`rank.process`) and in a thread
(`executor.inprocess`); they differ in the channels and links that they pass in.

    load weights ─▶ RankLoaded ─▶ (AllocateKV) ─▶ allocate ─▶ RankReady ─▶ stage loop until Shutdown
                        ▲                                                     │
                        └──── new connections ◀── a neighbour or the core is gone: the epoch is over

Weights and KV storage outlive an epoch; requests do not, and the core sends them again. A process loads its
weights before it asks for its first connections. It gets these once all other ranks have loaded too, so that
the free memory from which `RankLoaded` is computed does not shrink any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from penstock.batch import (
    AllocateKV,
    RankFailed,
    RankLoaded,
    RankReady,
    ScheduledBatch,
    Shutdown,
    StageSpans,
    StageTimes,
    decode_to_rank,
    encode,
)
from penstock.distributed.group import MeetingPlace
from penstock.errors import (
    LinkClosedError,
    PenstockError,
    PlanMemoryError,
    ProtocolError,
    WaitTimeoutError,
)
from penstock.faults import armed
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.matrix import PLAIN, Matrix
from penstock.models.decoder import EMBEDDING
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.link_orders import NO_LINK_ORDERS, LinkOrders, NoLinkOrders
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.links.link import Link
from penstock.pipeline.ports import (
    EmbedSource,
    ForwardSink,
    LinkSource,
    SampleSink,
    Sink,
    Source,
    carried_share,
)
from penstock.pipeline.stage import Stage, blaming, plans_from
from penstock.pipeline.tied_head import HeadRoute, pass_head_on, send_head, take_head
from penstock.pipeline.token_return import CountReceiver, SampleReceiver, TokenReceiver, TokenSender
from penstock.pipeline.transfer_orders import NoTransfer, TransferOrders
from penstock.pipeline.void_steps import NOTHING_VOID, VoidSteps
from penstock.process.child import (
    Abandoned,
    ChildFailed,
    LoadProgressed,
    Ready,
    StatusEvent,
    TensorsRead,
    WeightsLoaded,
    failure,
)
from penstock.process.config import RankConfig
from penstock.process.host_memory import host_available_bytes
from penstock.rank.loading import (
    LoadedRank,
    available_bytes,
    build_runner,
    dtype_of,
    entry_calls,
    grammar_rows,
    kv_transfer,
    load_rank,
    transfers_head,
)
from penstock.rank.memory_probe import NoProbe, probe_of
from penstock.residency import Residency
from penstock.runner.kv_demand import KVDemand, margin_bytes
from penstock.runner.kv_transfer import KVTransfer
from penstock.runner.model_runner import ModelRunner
from penstock.trace.device_clock import DeviceClock, DeviceMark
from penstock.trace.phases import PhaseClock, StageReporter
from penstock.weights.read_digests import RECORD_BYTES

START_POLL_S = 0.2
DIGESTS_PER_LINE = 80  # of a report: a line of 3.5 kB, which a status pipe takes whole

# After these errors a rank keeps its weights and waits for the next epoch: other ranks have failed, or a rank
# of a shared stage had no memory for a step.
_LIVES_ON = LinkClosedError | WaitTimeoutError | PlanMemoryError

Report = Callable[[StatusEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConnections:
    """The connections of a rank to the core and to other ranks, for one epoch.

    The output rank is the first rank of the last stage.

    Attributes:
        epoch: epoch that the connections belong to.
        plans: channel that brings plans from the core; the rank's reports to the core go back over it.
        results: on the output rank, the channel that takes the results of steps to the core.
        tokens: channels for sampled tokens. On the output rank one to each rank of the earlier stages, in
            the order of stages; on a rank of an earlier stage the one that brings them; else none.
        incoming: link that brings hidden states from the stage before; None on the first stage.
        outgoing: links that take hidden states to ranks of the next stage (`RankConfig.receivers`).
        meeting: the place where the ranks of the stage meet to form their group, if there are several.
        link_orders: carries out the orders of plans to replace a link.
        is_over: returns whether the epoch has ended. It is called while the rank waits for the first message
            of the core, since a lost peer would not be noticed otherwise.
    """

    plans: MessageChannel
    results: MessageChannel
    tokens: Sequence[MessageChannel]
    incoming: Link | None
    outgoing: Sequence[Link] = ()
    meeting: MeetingPlace | None = None
    link_orders: LinkOrders | NoLinkOrders = NO_LINK_ORDERS
    epoch: int = 0
    is_over: Callable[[], bool] = lambda: False

    def close(self) -> None:
        """Close all connections, which shows all neighbours that this rank has left."""
        for end in (self.incoming, *self.outgoing, *self.tokens, self.results, self.plans):
            if end is not None:
                end.close()


def run_rank(
    config: RankConfig, epochs: Iterable[RankConnections], report: Report, *, loads_first: bool = False
) -> ChildFailed | None:
    """Run a rank to its end: through one epoch after the other, each over new connections.

    A rank that fails because others are lost leaves the epoch and goes on in the next. The cause of any
    failure is reported to core and supervisor before the connections close, which neighbours notice.

    Args:
        epochs: yields the connections of each epoch, and may wait for the next.
        report: takes status events for the supervisor; must not block.
        loads_first: load the weights before the first connections are asked for. If that fails, the reason
            goes to `report` alone, since there is no connection to the core yet.

    Returns:
        The rank's own failure, which has been reported and ended it; None after `Shutdown`, or when there is
        no further epoch.
    """
    with contextlib.closing(Rank(config, report)) as rank:
        if loads_first:
            try:
                with blaming(config.stage, "while starting"):
                    rank.load()
            except Exception as error:
                report(failed := failure(error))
                return failed
        return _live(config, rank, epochs, report)


def _live(
    config: RankConfig, rank: Rank, epochs: Iterable[RankConnections], report: Report
) -> ChildFailed | None:
    """Serve one epoch after the other, as `run_rank` says."""
    for connections in epochs:
        try:
            with blaming(config.stage, "while starting"):
                rank.serve(connections)
            return None
        except Exception as error:
            failed = failure(error)
            lives_on = isinstance(error, _LIVES_ON)
            report(Abandoned(epoch=connections.epoch, error=failed.error) if lives_on else failed)
            _tell_core(config.stage, failed, connections.plans)
            if not lives_on:
                return failed
        finally:
            connections.close()
            rank.leave()
        del connections  # frees the memory of their links before the next epoch is waited for
    return None


class Rank:
    """A rank, with all that it keeps from epoch to epoch: the weights, and the KV storage with its runner.

    Args:
        report: takes status events for the supervisor; must not block.
        probe: measures the memory that plans take; None: the one for this rank (`probe_of`).
    """

    def __init__(self, config: RankConfig, report: Report, probe: NoProbe | None = None) -> None:
        self._config = config
        self._probe = probe or probe_of(config)
        self._report = report
        self._loaded: LoadedRank | None = None
        self._message: RankLoaded | None = None
        self._runner: ModelRunner | None = None
        self._transfer: KVTransfer | None = None
        self._entries = entry_calls(config)

    def load(self) -> LoadedRank:
        """Load the weights, unless that was done before, and return them."""
        if self._loaded is None:
            report = self._report
            load = armed(self._config.faults, "rank.load", self._config.stage, load_rank)
            self._loaded = load(
                self._config, lambda done, total: report(LoadProgressed(done=done, total=total))
            )
            _report_loaded(self._loaded, report)
        return self._loaded

    def serve(self, connections: RankConnections) -> None:
        """Serve one epoch: report to the core, allocate the KV cache, and run plans until `Shutdown`.

        Weights and KV cache are made once, at the latest in the first epoch. The call raises an error if the
        connections fail.
        """
        config, plans = self._config, connections.plans
        loaded = self.load()
        if self._message is None:
            self._message = _loaded_message(config, loaded, self._probe.peak_bytes(config, loaded))
        plans.send(encode(self._message))
        start = _await_start(connections)
        if start is None:
            return
        if connections.meeting is not None:  # not before `start`: other ranks may load as long as they need
            loaded.group.join(connections.meeting)
        if transfers_head(config, loaded.spec):
            _transfer_head(config, loaded, connections, has_it=self._runner is not None)
        runner = self._runner_for(start.num_blocks, loaded)
        clock = phase_clock(loaded.device)
        source = _choose_source(config, loaded, runner, connections, clock)
        sink = _choose_sink(config, loaded, runner, connections, clock)
        times = StageReporter(
            config.stage, clock, _teller(config, plans), lambda: loaded.group.exchange_ns, config.tp_rank
        )
        orders = TransferOrders(self._transfer or NoTransfer(), plans, runner.grammars, self._entries)
        looks_ahead = config.max_drafts > 0 and loaded.group.size == 1
        void_steps = VoidSteps() if looks_ahead else NOTHING_VOID
        stage = Stage(
            config.stage, runner, source, sink, times, config.faults, orders, loaded.group, void_steps
        )
        self._report(Ready(epoch=start.epoch, rank=self._message))
        plans.send(encode(RankReady(stage=config.stage, tp_rank=config.tp_rank)))
        log = DecisionLog(start.epoch, start.first_step)
        with blaming(config.stage, "while it waited for a plan"):
            stage.run(
                plans_from(
                    plans,
                    clock,
                    is_last=config.is_last,
                    log=log,
                    names_of=runner.rows.names_of,
                    orders=orders,
                    check=_checking(Residency(config.block_size), connections),
                    void_steps=void_steps,
                )
            )

    def leave(self) -> None:
        """Leave the epoch that is over: drop open copies of blocks, and leave the group of the stage's ranks.

        Other ranks of the stage that wait for this one stop waiting.
        """
        if self._transfer is not None:
            self._transfer.reset()
        self._entries.reset()
        if self._loaded is not None:
            self._loaded.group.close()

    def close(self) -> None:
        """Close the runner, the transfer of KV blocks and the store's catalogue, since the rank ends."""
        if self._runner is not None:
            self._runner.close()
        if self._transfer is not None:
            self._transfer.close()
        self._entries.close()

    def _runner_for(self, num_blocks: int, loaded: LoadedRank) -> ModelRunner:
        """Return the runner over storage of `num_blocks` blocks; every epoch must have the same number.

        Raises:
            ProtocolError: the core asks for another number than in the epoch before.
        """
        if self._runner is None:
            allocate = armed(
                self._config.faults, "rank.allocate", self._config.stage, loaded.storage.allocate
            )
            kv = allocate(num_blocks)
            grammars = grammar_rows(self._config, loaded.spec)
            self._runner = build_runner(self._config, loaded, kv, grammars)
            self._transfer = kv_transfer(self._config, loaded, kv)
            self._num_blocks = num_blocks
        if num_blocks != self._num_blocks:
            raise ProtocolError(
                f"the core asks for {num_blocks} KV blocks, but this rank has {self._num_blocks}."
            )
        self._runner.reset()
        return self._runner


def _checking(residency: Residency, connections: RankConnections) -> Callable[[ScheduledBatch], None]:
    """Return a function that checks a plan before its step, and carries out its orders to replace links."""

    def check(plan: ScheduledBatch) -> None:
        residency.replay(plan)
        if plan.links:
            connections.link_orders.obey(plan.links)

    return check


def phase_clock(device: torch.device) -> PhaseClock:
    """Return a clock that measures how a rank on this device spends the time of one epoch."""
    if device.type != "cuda":
        return PhaseClock(keeps_spans=True)

    def mark() -> DeviceMark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(mark, keeps_spans=True)


def _transfer_head(
    config: RankConfig, loaded: LoadedRank, connections: RankConnections, *, has_it: bool
) -> None:
    """Send a tied head (an output head that is the embedding) down the pipe, pass it on or take it.

    All ranks have loaded by then, so that none waits for another's disk. It is done in every epoch, since a
    rank cannot know whether a rank of the last stage has been started anew.

    Args:
        has_it: a rank of the last stage has the head from an earlier epoch; it receives the rows and drops
            them.
    """
    spec = loaded.spec
    route = HeadRoute(
        tp_sizes=config.tp_sizes or (1,) * config.num_stages,
        stage=config.stage,
        tp_rank=config.tp_rank,
        vocab_size=spec.vocab_size,
        block_rows=config.max_num_batched_tokens,
        epoch=connections.epoch,
    )
    if connections.incoming is None:
        weight = _tied_embedding(loaded).weight
        assert isinstance(weight, Tensor), "a quantised head cannot be sent; it was refused at the start"
        send_head(route, weight.data, loaded.group, connections.outgoing)
        return
    shape = min(route.block_rows, spec.vocab_size), spec.hidden_size
    buffer = torch.empty(shape, dtype=dtype_of(config), device=loaded.device)
    if not config.is_last:
        pass_head_on(route, buffer, connections.incoming, connections.outgoing)
    elif has_it:
        take_head(route, buffer, connections.incoming, lambda first, rows: None)
    else:
        _fill_head(route, buffer, connections.incoming, _tied_embedding(loaded).weight)


def _tied_embedding(loaded: LoadedRank) -> VocabEmbedding:
    embedding = loaded.model.get_submodule(EMBEDDING)
    assert isinstance(embedding, VocabEmbedding), embedding
    return embedding


def _fill_head(route: HeadRoute, buffer: Tensor, incoming: Link, weight: Tensor | Matrix) -> None:
    """Receive the rows of this rank's share of the head into `weight`, in the form in which it is held."""
    if isinstance(weight, Matrix):
        take_head(route, buffer, incoming, lambda first, rows: weight.put(first, rows, PLAIN))
        weight.finish()
        return
    own = weight.data

    def put(first: int, rows: Tensor) -> None:
        own[first : first + len(rows)] = rows

    take_head(route, buffer, incoming, put)


def _report_loaded(loaded: LoadedRank, report: Report) -> None:
    """Report that the weights are loaded, and before that the digests of what was read.

    A line of digests is short enough for a status pipe to take it whole.
    """
    table = loaded.samples.table + loaded.report.digests
    for first in range(0, len(table), DIGESTS_PER_LINE * RECORD_BYTES):
        report(TensorsRead(digests=table[first : first + DIGESTS_PER_LINE * RECORD_BYTES]))
    report(
        WeightsLoaded(
            bytes_read=loaded.report.bytes_read,
            seconds=loaded.report.seconds,
            identity=loaded.samples.identity,
        )
    )


def _loaded_message(config: RankConfig, loaded: LoadedRank, peak_bytes: int) -> RankLoaded:
    demand = KVDemand.of_rank(config, config.num_sharers, peak_bytes)
    return RankLoaded(
        stage=config.stage,
        tp_rank=config.tp_rank,
        max_blocks=loaded.storage.max_blocks(demand, available_bytes(loaded.device)),
        block_bytes=loaded.storage.block_bytes,
        tensor_bytes=loaded.report.tensor_bytes,
        bytes_read=loaded.report.bytes_read,
        load_seconds=loaded.report.seconds,
        kernels=loaded.kernels,
        is_invariant=loaded.is_invariant,
        numeric_class=loaded.numeric_class,
        end_layer=config.end_layer,
        store_host="" if config.store is None else config.store.host,
        peak_bytes=peak_bytes,
        margin_bytes=margin_bytes(config.device_type, config.tp_size),
    )


def _await_start(connections: RankConnections) -> AllocateKV | None:
    """Return the core's decision on the KV blocks, or None when it shuts down instead."""
    while (frame := connections.plans.recv(START_POLL_S)) is None:  # no deadline: other ranks still load
        if connections.is_over():
            raise LinkClosedError(f"epoch {connections.epoch} ended before all stages had joined.")
    message = decode_to_rank(frame)
    if isinstance(message, Shutdown):
        return None
    if not isinstance(message, AllocateKV):
        raise ProtocolError(f"expected AllocateKV from the core, found {type(message).__name__}.")
    return message


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
        group=loaded.group,
        clock=clock,
    )


def _choose_sink(
    config: RankConfig,
    loaded: LoadedRank,
    runner: ModelRunner,
    connections: RankConnections,
    clock: PhaseClock,
) -> Sink:
    if config.is_last:
        results = connections.results if config.is_output else None
        embedding, others = _by_need(config, connections.tokens)
        return SampleSink(runner, TokenSender(embedding, others), results, clock)
    (channel,) = connections.tokens
    name, timeout_s = f"stage {config.num_stages - 1} -> stage {config.stage}", config.wait_timeout_s
    tokens: SampleReceiver = CountReceiver(channel, runner.rows, name=name, timeout_s=timeout_s)
    if config.is_first:
        vocab_size = loaded.spec.vocab_size
        tokens = TokenReceiver(channel, runner.rows, name=name, timeout_s=timeout_s, vocab_size=vocab_size)
    width, size = loaded.spec.hidden_size, config.next_tp_size
    shares = [carried_share(width, receiver, size) for receiver in config.receivers]
    return ForwardSink(list(zip(shares, connections.outgoing, strict=True)), tokens, clock)


def _by_need(
    config: RankConfig, channels: Sequence[MessageChannel]
) -> tuple[Sequence[MessageChannel], Sequence[MessageChannel]]:
    """Return the channels from the output rank to the first stage, and those to the stages between."""
    return channels[: config.first_tp_size], channels[config.first_tp_size :]


def _tell_core(stage: int, failed: ChildFailed, plans: MessageChannel) -> None:
    with contextlib.suppress(PenstockError):  # the core may have gone as well; the supervisor has heard
        plans.send(encode(RankFailed(stage=stage, error=failed.error)), timeout_s=1.0)


def _host_free_bytes(config: RankConfig) -> int | None:
    """Return the free memory of the host; None on a GPU, and where the host does not say."""
    if config.device_type != "cpu":
        return None
    with contextlib.suppress(OSError):
        return host_available_bytes()
    return None


def _teller(config: RankConfig, plans: MessageChannel) -> Callable[[StageTimes | StageSpans], None]:
    """Return a function that sends reports of a rank's time to the core.

    Totals (`StageTimes`) are sent by the first rank of a stage alone, because its ranks go in step. Spans are
    sent by every rank.
    """

    def tell(report: StageTimes | StageSpans) -> None:
        if isinstance(report, StageTimes):
            if config.tp_rank:
                return
            report = msgspec.structs.replace(report, free_bytes=_host_free_bytes(config))
        with contextlib.suppress(PenstockError):  # the core may have taken its last result and gone
            plans.send(encode(report), timeout_s=0.0)

    return tell

"""A real engine core over real ranks, as threads, that live through epochs while their links misbehave.

`FaultyPipe` does what the supervisor does: it joins the ranks with fresh links for each epoch, wrapped by
`faulty_links`, and starts ranks that have failed again. Whatever a rank or the core reports must be a typed
error that says where and in which step.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from faulty_links import (
    Change,
    Concerns,
    Faults,
    FaultyChannel,
    FaultyLink,
    change_plan,
    change_result,
    change_samples,
    is_plan,
    is_result,
)
from penstock.batch import (
    AllocateKV,
    ScheduledBatch,
    StepResult,
)
from penstock.config.engine import ParallelConfig, SchedulerConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.stall_limits import FixedLimit
from penstock.errors import ErrorInfo
from penstock.executor.base import KVPlan, RankChannels
from penstock.executor.inprocess import connect_ranks
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.links.frame import frame_bytes
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.links.ring import SharedMemoryLink
from penstock.pipeline.links.ring_memory import close_handle, create_ring, end_ring
from penstock.process.child import Abandoned, ChildFailed, StatusEvent
from penstock.process.config import RankConfig
from penstock.process.endpoints import RingHandle
from penstock.rank.rank import RankConnections, run_rank
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams
from penstock.scheduler.pacing import FixedDepth
from penstock.scheduler.scheduler import Scheduler

GUARD_S = 60.0  # against a hang; nothing takes nearly as long
STEP_S = 0.02
_SAYS_WHEN = r"step \d|\(epoch, step[^)]*\) \(\d|waited for a plan|epoch \d+ ended before"
TYPED = {"StageLostError", "WaitTimeoutError", "LinkClosedError", "ProtocolError"}
Inbox = queue.SimpleQueue[RankConnections | None]
Wrap = Callable[[int, int, RankConnections], RankConnections]  # epoch, stage, its connections


class Chains:
    """The digest of each party after each step, to be compared; `log_class` is what a rank uses then."""

    def __init__(self) -> None:
        self.of_ranks: dict[tuple[int, int], list[int]] = defaultdict(list)  # (epoch, step)
        self.of_core: dict[tuple[int, int], int] = {}

    def log_class(self) -> type[DecisionLog]:
        told = self.of_ranks

        class TellingLog(DecisionLog):
            def append(
                self, plan: ScheduledBatch, names_of: Callable[[ScheduledBatch], Sequence[str]]
            ) -> None:
                super().append(plan, names_of)
                told[plan.epoch, plan.step_id].append(self.digest)

        return TellingLog

    def check(self) -> None:
        for step, digests in list(self.of_ranks.items()):
            assert set(digests) == {self.of_core[step]}, f"histories differ in (epoch, step) {step}"


class EpochExecutor:
    """The core's end of one epoch."""

    def __init__(self, ranks: RankChannels, chains: Chains) -> None:
        self._ranks, self.reports = ranks, ranks.reports
        self._chains = chains

    def start(self) -> KVPlan:
        return self._ranks.handshake(GUARD_S)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        digest = self._chains.of_core[plan.epoch, plan.step_id] = self._ranks.submit_plan(plan)
        return digest

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        return self._ranks.poll_results(timeout_s)

    def abandon(self) -> None:
        self._ranks.close()

    def shutdown(self) -> None:
        self._ranks.shutdown()


class RankThreads:
    """The ranks, and what the supervisor does for them."""

    def __init__(self, configs: Sequence[RankConfig]) -> None:
        self.configs = list(configs)
        self.told: list[ChildFailed | Abandoned] = []
        self._inboxes: list[queue.SimpleQueue[RankConnections | None]] = [
            queue.SimpleQueue() for _ in configs
        ]
        self._left = threading.Semaphore(0)  # counts ranks that have left the epoch
        self._threads = [
            threading.Thread(
                target=self._live, args=(config,), name=f"stage {config.stage} tp 0", daemon=True
            )
            for config in configs
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, connections: Sequence[RankConnections]) -> None:
        for inbox, ends in zip(self._inboxes, connections, strict=True):
            inbox.put(ends)

    def await_leaving(self) -> None:
        for _ in self.configs:
            assert self._left.acquire(timeout=GUARD_S), "a rank does not leave an epoch that is over"

    def end(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(GUARD_S)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _live(self, config: RankConfig) -> None:
        while run_rank(config, self._epochs(config.stage), self._hear) is not None:
            self._left.release()  # it has failed, and starts again

    def _epochs(self, stage: int) -> Iterator[RankConnections]:
        while (ends := self._inboxes[stage].get()) is not None:
            yield ends
            self._left.release()

    def _hear(self, event: StatusEvent) -> None:
        if isinstance(event, ChildFailed | Abandoned):
            self.told.append(event)


class FaultyPipe:
    """A core with its ranks.

    Args:
        configs: of the ranks; their deadline is that of every wait.
        carrier: "memory" or "shared memory", of the hidden states.
        wire_plans: plans in flight beside one for each stage and those issued ahead, as over a wire.
        wrap: connections of a rank as it gets them; by default all of them suffer from `faults`.
    """

    def __init__(
        self,
        configs: Sequence[RankConfig],
        faults: Faults,
        chains: Chains,
        *,
        carrier: str = "memory",
        width: int = 32,
        async_depth: int = 0,
        wire_plans: int = 0,
        wrap: Wrap | None = None,
    ) -> None:
        self.faults = faults
        self.chains = chains
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.losses: list[ErrorInfo] = []
        self._carrier = carrier
        self._frame_bytes = frame_bytes(
            max_num_tokens=configs[0].max_num_batched_tokens, width=width, itemsize=4
        )
        self._wrap = wrap or self._all_suffer
        self._opened: list[Link | QueueChannel | RingHandle] = []
        self._epoch = 0
        self._moved_at = time.monotonic()
        self.ranks = RankThreads(configs)
        executor, plan = self._join(AllocateKV(num_blocks=0))
        self.allocator = BlockAllocator(BlockPool(plan.num_blocks), configs[0].block_size)
        self.core = self._make_core(executor, async_depth, wire_plans)

    def _make_core(self, executor: EpochExecutor, async_depth: int, wire_plans: int) -> EngineCore:
        config = self.ranks.configs[0]
        parallel = ParallelConfig(
            pipeline_parallel_size=config.num_stages,
            async_depth=async_depth,
            max_plans_in_flight=config.num_stages + async_depth + wire_plans,
        )
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=24, prefill_chunk=16),
            self.allocator,
            num_stages=config.num_stages,
            max_model_len=config.max_model_len,
            eos_token_ids=[2],
            seed=0,
            clock=time.monotonic,
            depth=FixedDepth(config.num_stages + wire_plans),
        )
        return EngineCore(
            scheduler,
            executor,
            parallel,
            time.monotonic,
            recovers=True,
            stall_limit=FixedLimit(2 * config.wait_timeout_s),
        )

    # What the supervisor does

    def _join(self, start: AllocateKV) -> tuple[EpochExecutor, KVPlan]:
        configs = self.ranks.configs
        core_endpoints, rank_endpoints = QueueChannel.star([config.name for config in configs])
        channels = RankChannels(
            core_endpoints,
            wait=lambda timeout_s: QueueChannel.wait_any(core_endpoints, timeout_s),
            start=start,
        )
        connections = self._carried(connect_ranks(configs, rank_endpoints))
        for ends in connections:
            self._opened += [end for end in (ends.incoming, *ends.outgoing, *ends.tokens) if end is not None]
        wrapped = [self._wrap(start.epoch, stage, ends) for stage, ends in enumerate(connections)]
        self.ranks.begin([replace(ends, epoch=start.epoch) for ends in wrapped])
        executor = EpochExecutor(channels, self.chains)
        return executor, executor.start()

    def _carried(self, connections: list[RankConnections]) -> list[RankConnections]:
        """The same, with links through shared memory if those are wanted."""
        if self._carrier == "memory":
            return connections
        for stage, config in enumerate(self.ranks.configs[:-1]):
            handle = create_ring(self._frame_bytes, config.link_frames)
            name = f"stage {stage} -> stage {stage + 1}"
            ends = [SharedMemoryLink(handle, name, config.wait_timeout_s) for _ in range(2)]
            connections[stage] = replace(connections[stage], outgoing=[ends[0]])
            connections[stage + 1] = replace(connections[stage + 1], incoming=ends[1])
            self._opened.append(handle)
        return connections

    def _all_suffer(self, epoch: int, stage: int, ends: RankConnections) -> RankConnections:
        faults, where = self.faults, f"epoch {epoch}, stage {stage}"
        last = self.ranks.configs[0].num_stages - 1

        def channel(
            inner: MessageChannel, name: str, change: Change, incoming: bool, concerns: Concerns = bool
        ) -> FaultyChannel:
            name = f"{where}, {name}"
            return FaultyChannel(inner, name, faults, concerns=concerns, change=change, incoming=incoming)

        return replace(
            ends,
            plans=channel(ends.plans, "plans", change_plan, True, is_plan),
            results=channel(ends.results, "results", change_result, False, is_result),
            tokens=[
                channel(end, f"samples {index}", change_samples, stage != last)
                for index, end in enumerate(ends.tokens)
            ],
            incoming=ends.incoming and FaultyLink(ends.incoming, f"{where}, in", faults),
            outgoing=[FaultyLink(link, f"{where}, out", faults) for link in ends.outgoing],
        )

    def _leave(self) -> None:
        """The epoch is over: nobody waits at its links any longer."""
        handles = [end for end in self._opened if isinstance(end, RingHandle)]
        for handle in handles:
            end_ring(handle)
        for end in self._opened:
            if not isinstance(end, RingHandle | SharedMemoryLink):
                end.close()  # those of rings are their ranks'
        self.ranks.await_leaving()
        for handle in handles:
            close_handle(handle)
        self._opened.clear()

    def _rejoin(self) -> None:
        assert self.core.loss is not None
        self.losses.append(self.core.loss)
        self._leave()
        self._epoch += 1
        _, first_step = self.core.steps_in_flight
        start = AllocateKV(num_blocks=self.allocator.num_blocks, epoch=self._epoch, first_step=first_step)
        executor, _ = self._join(start)
        self.core.enter_epoch(self._epoch, executor)

    # What clients do

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.updates[request_id] = []
        self.core.add_request(
            GenerationRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=params)
        )

    def step(self) -> list[RequestUpdate]:
        """Let the core work for a moment; join the pipe again when it is broken."""
        before = self.core.steps_in_flight
        updates = self.core.step(STEP_S)
        for update in updates:
            self.updates[update.request_id].append(update)
        self.core.check_invariants()
        if updates or self.core.steps_in_flight != before or not self.core.has_pipe:
            self._moved_at = time.monotonic()
        assert time.monotonic() - self._moved_at < GUARD_S, f"nothing moves: {self.core.stats()}"
        if not self.core.has_pipe:
            self._rejoin()
        return updates

    def run_until_idle(self) -> None:
        while not self.core.is_idle:
            self.step()

    def close(self) -> None:
        """End all; afterwards nothing is in use any more."""
        self.core._executor.shutdown()
        self._leave_in_order()
        self.ranks.end()

    def _leave_in_order(self) -> None:
        for end in self._opened:
            if isinstance(end, RingHandle):
                close_handle(end)
        self._opened.clear()

    def tokens(self, request_id: str) -> list[int]:
        return [token for update in self.updates[request_id] for token in update.token_ids]

    def end_of(self, request_id: str) -> RequestUpdate | None:
        last = self.updates[request_id][-1:]
        return last[0] if last and last[0].finish_reason is not None else None


def check_told(told: ChildFailed | Abandoned) -> None:
    """What a rank says of its end: a typed error, with the stage, and the step or why there is none."""
    error = told.error
    assert error.kind in TYPED, told
    assert error.kind != "StageLostError" or "InjectedError" in error.message, told
    assert re.search(_SAYS_WHEN, error.message), told
    assert error.stage is not None, told

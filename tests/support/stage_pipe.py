"""A pipe of stages as threads, with a model that is arithmetic; the test is the core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import torch

from hand_core import VOCAB, ArithmeticModel, Crew, arithmetic_kv
from penstock.batch import ScheduledBatch, Shutdown, StepResult, decode_to_core, encode
from penstock.distributed.share import Share
from penstock.errors import LinkClosedError
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.frame import frame_bytes
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.links.ring import SharedMemoryLink
from penstock.pipeline.links.ring_memory import close_handle, create_ring
from penstock.pipeline.ports import EmbedSource, ForwardSink, LinkSource, SampleSink
from penstock.pipeline.stage import Stage, plans_from
from penstock.pipeline.token_return import CountReceiver, TokenReceiver, TokenSender
from penstock.pipeline.void_steps import VoidSteps
from penstock.runner.buffers import BufferPool
from penstock.runner.guarded_runner import GuardedRunner
from penstock.runner.request_rows import KeptIds, NoIds, RequestRows
from penstock.trace.phases import PhaseClock, StageReporter

NUM_ROWS, NUM_BLOCKS, BLOCK, MAX_TOKENS, MAX_LEN = 4, 40, 4, 64, 48
CPU = torch.device("cpu")


class Closable(Protocol):
    def close(self) -> None: ...


class Pipe:
    """P stages as threads; the test is the core."""

    def __init__(
        self,
        num_stages: int,
        *,
        carrier: str = "memory",
        num_frames: int = 1,
        timeout_s: float = 20.0,
        models: Sequence[ArithmeticModel] | None = None,
    ) -> None:
        self.num_stages = num_stages
        self.log = DecisionLog()
        models = models or [ArithmeticModel() for _ in range(num_stages)]
        self.core_endpoints, rank_endpoints = QueueChannel.star(
            [f"stage {stage}" for stage in range(num_stages)]
        )
        links = [self._link(carrier, s, num_frames, timeout_s) for s in range(num_stages - 1)]
        tokens = [QueueChannel.pair() for _ in links]
        self.runners = [
            self._runner(stage, model, KeptIds if stage in (0, num_stages - 1) else NoIds)
            for stage, model in enumerate(models)
        ]
        self.stages: list[Stage] = []
        self.clocks = [PhaseClock(count().__next__, count().__next__) for _ in models]  # each look is a tick
        for stage, (runner, plans) in enumerate(zip(self.runners, rank_endpoints, strict=True)):
            source, clock = EmbedSource(runner), self.clocks[stage]
            if stage:
                source = LinkSource(
                    links[stage - 1][1],
                    max_num_tokens=MAX_TOKENS,
                    width=2,
                    dtype=torch.float32,
                    device=CPU,
                    clock=clock,
                )
            if stage < num_stages - 1:
                kind = CountReceiver if stage else TokenReceiver
                receiver = kind(tokens[stage][1], runner.rows, name=f"{stage}", timeout_s=timeout_s)
                sink = ForwardSink([(Share.all(2), links[stage][0])], receiver, clock)
            else:
                lasts = [last for last, _ in tokens]
                sink = SampleSink(runner, TokenSender(lasts[:1], lasts[1:]), plans, clock)
            void_steps = VoidSteps()
            self.stages.append(
                Stage(stage, runner, source, sink, StageReporter(stage, clock), void_steps=void_steps)
            )
        self.crew = Crew()
        for index, (stage, plans) in enumerate(zip(self.stages, rank_endpoints, strict=True)):
            own_links = [receiver for _, receiver in links[index - 1 : index]] if index else []
            own_links += [sender for sender, _ in links[index : index + 1]]
            own_tokens = [early for _, early in tokens[index : index + 1]] or [last for last, _ in tokens]
            self.crew.start(self._life(stage, plans, [*own_links, *own_tokens, plans], self.clocks[index]))

    def _life(
        self, stage: Stage, plans: QueueChannel, ends: Sequence[Closable], clock: PhaseClock
    ) -> Callable[[], None]:
        def live() -> None:
            try:
                names_of = stage._runner.rows.names_of
                stage.run(
                    plans_from(
                        plans,
                        clock,
                        is_last=stage is self.stages[-1],
                        names_of=names_of,
                        void_steps=stage._void_steps,
                    )
                )
            finally:
                for end in ends:
                    end.close()

        return live

    def _link(self, carrier: str, stage: int, num_frames: int, timeout_s: float) -> tuple[Link, Link]:
        name = f"stage {stage} -> stage {stage + 1}"
        if carrier == "memory":
            link = MemoryLink(name, timeout_s, num_frames)
            return link, link
        handle = create_ring(frame_bytes(max_num_tokens=MAX_TOKENS, width=2, itemsize=4), num_frames)
        ends = SharedMemoryLink(handle, name, timeout_s), SharedMemoryLink(handle, name, timeout_s)
        close_handle(handle)
        return ends

    def _runner(self, stage: int, model: ArithmeticModel, ids: type[KeptIds] | type[NoIds]) -> GuardedRunner:
        rows = RequestRows(NUM_ROWS, MAX_LEN, BLOCK, ids=ids)
        buffers = BufferPool(
            2,
            max_num_tokens=MAX_TOKENS,
            max_num_rows=NUM_ROWS,
            max_num_samples=4 * NUM_ROWS,
            max_blocks_per_row=rows.tables.width,
            device=CPU,
        )
        return GuardedRunner(
            model,
            arithmetic_kv(NUM_BLOCKS, BLOCK),
            rows,
            buffers,
            VOCAB,
            stage=stage,
            width=2,
            dtype=torch.float32,
            is_alone=True,
        )

    def submit_plan(self, plan: ScheduledBatch) -> None:
        frame = encode(self.log.seal(plan))
        for channel in self.core_endpoints:
            channel.send(frame)

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        frame = self.core_endpoints[-1].recv(timeout_s)
        assert frame is not None, "no result came"
        result = decode_to_core(frame)
        assert isinstance(result, StepResult)
        return [result]

    def leave_broken(self) -> list[BaseException]:
        """Have the stages that still listen leave behind their plans; return what all have raised."""
        for channel in self.core_endpoints:
            with contextlib.suppress(LinkClosedError):
                channel.send(encode(Shutdown()))
        self.crew.wait()
        return self.crew.errors

    def shutdown(self) -> None:
        for channel in self.core_endpoints:
            channel.send(encode(Shutdown()))
        self.crew.join()

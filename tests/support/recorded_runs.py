"""A core on fakes whose decisions are recorded, and what a test does with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fakes import VOCAB_SIZE, FakeClock, FakeExecutor
from penstock.config.engine import CacheConfig, ParallelConfig, SchedulerConfig
from penstock.config.speculation import SpeculationConfig
from penstock.decisions.recorder import open_recorder
from penstock.engine.client.siblings import with_siblings
from penstock.engine.core.core_assembly import build_core
from penstock.operations import Operation
from penstock.process.config import CoreConfig
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams

NUM_STAGES = 2
CONFIG = CoreConfig(
    parallel=ParallelConfig(pipeline_parallel_size=NUM_STAGES, async_depth=0),
    cache=CacheConfig(block_size=4),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk=8),
    speculation=SpeculationConfig(speculative_method="off"),
    seed=0,
    max_model_len=64,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=[1],
)
SPECULATING = SpeculationConfig(speculative_method="suffix", num_speculative_tokens=4)


class RecordedRun:
    """A recorded core. The clock goes on by some milliseconds with every step.

    Args:
        path: of the file.
        num_blocks: of the KV cache.
        changes: of the config.
    """

    def __init__(self, path: Path, num_blocks: int = 64, **changes: Any) -> None:
        config = msgspec.structs.replace(CONFIG, record_decisions=str(path), **changes)
        self.config = config
        self.clock = FakeClock()
        self._make_executor = partial(
            FakeExecutor,
            depth=config.parallel.depth,
            num_stages=NUM_STAGES,
            min_lag=1,
            num_rows=config.scheduler.max_num_seqs,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
        )
        self.executor = self._make_executor()
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.core, self.scheduler = build_core(
            config,
            self.executor,
            self.executor.start(),
            self.clock,
            recovers=True,
            recorder=open_recorder(config),
        )
        self.step()

    def add(self, request_id: str, prompt: list[int], *, n: int = 1, **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "n": n, **sampling})
        self.core.add_request(with_siblings(request_id, prompt, params))

    def embed(self, request_id: str, prompt: list[int]) -> None:
        self.core.add_request(
            GenerationRequest(request_id=request_id, prompt_token_ids=prompt, pooling="mean")
        )

    def operate(self, operation: Operation) -> None:
        self._keep(self.core.operate((b"", 0), operation))

    def step(self, count: int = 1) -> None:
        """Let a result come, and step, as often as this."""
        for _ in range(count):
            self.clock.advance(0.003)
            self.executor.release(1)
            self._keep(self.core.step())

    def lose_stage(self) -> None:
        """Lose a stage, and go on with ranks that know nothing."""
        self.executor.lose_stage(1, "killed")
        self._keep(self.core.step())
        assert not self.core.has_pipe
        self.rejoin()

    def rejoin(self) -> None:
        """Ranks that know nothing take the place of those that were lost."""
        epoch = self.core.epoch + 1
        self.executor = self._make_executor(epoch=epoch, first_step=self.core.steps_in_flight[1])
        self.core.enter_epoch(epoch, self.executor, ranks=self.executor.start().ranks)

    def finish(self) -> None:
        """Run until nobody is left, and end the engine."""
        for _ in range(500):
            if self.core.is_idle:
                break
            self.step()
        assert self.core.is_idle, self.core.stats()
        self.core.close()

    def tokens(self, request_id: str) -> list[int]:
        return [token for update in self.updates[request_id] for token in update.token_ids]

    def _keep(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.updates.setdefault(update.request_id, []).append(update)


@contextmanager
def recorded(path: Path, **settings: Any) -> Iterator[RecordedRun]:
    """A run that ends with the block."""
    run = RecordedRun(path, **settings)
    try:
        yield run
        run.finish()
    finally:
        run.core.close()


def prompt(length: int, start: int = 0) -> list[int]:
    """Ids that no other start shares."""
    return [2 + (start + 7 * place) % (VOCAB_SIZE - 2) for place in range(length)]

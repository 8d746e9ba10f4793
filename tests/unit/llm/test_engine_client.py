"""The engine in this process: requests through a core whose stages do what a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes import FakeExecutor
from penstock.config.engine import CacheConfig, ParallelConfig, SchedulerConfig
from penstock.errors import StageLostError
from penstock.llm.engine_client import InprocessClient
from penstock.process.config import CoreConfig


class DyingExecutor(FakeExecutor):
    """Comes up, and is lost at the first probe."""

    def __init__(self) -> None:
        super().__init__(depth=2, latency=0)
        self.lose_stage(1, "it fell silent")
        self.shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1


def test_an_executor_that_fails_the_first_probe_is_shut_down() -> None:
    executor = DyingExecutor()
    core = CoreConfig(
        parallel=ParallelConfig(),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(),
        seed=0,
        max_model_len=64,
        vocab_size=40,
        eos_token_ids=[1],
    )
    plan: Any = SimpleNamespace(core=core)
    with pytest.raises(StageLostError, match="it fell silent"):
        InprocessClient(plan, executor)
    assert executor.shutdowns == 1

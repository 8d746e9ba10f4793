"""Ranks as threads of this process: for tests, notebooks and debuggers.

The same `run_rank` as in a process of its own, joined by in-memory links and channels. `llm` and tests make
one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.batch import ScheduledBatch, StageSpans, StageTimes, StepResult
from penstock.config import RankConfig
from penstock.errors import WaitTimeoutError
from penstock.executor.base import KVPlan, RankChannels
from penstock.executor.child import StatusEvent
from penstock.executor.plan_channel import QueueChannel
from penstock.executor.rank import RankConnections, run_rank
from penstock.pipeline.link import MemoryLink

_LOAD_TIMEOUT_S = 3600.0


class InprocessExecutor:
    """Runs all ranks as threads.

    Args:
        rank_configs: one per stage, in order.
    """

    def __init__(self, rank_configs: Sequence[RankConfig]) -> None:
        self._configs = list(rank_configs)
        core_ends, rank_ends = QueueChannel.star(len(self._configs))
        self._ranks = RankChannels(
            core_ends, wait=lambda timeout_s: QueueChannel.wait_any(core_ends, timeout_s)
        )
        connections = connect_ranks(self._configs, rank_ends)
        self._threads = [
            threading.Thread(
                target=run_rank,
                args=(config, [ends], _ignore),
                name=f"stage {config.stage} tp 0",
                daemon=True,
            )
            for config, ends in zip(self._configs, connections, strict=True)
        ]

    def start(self) -> KVPlan:
        for thread in self._threads:
            thread.start()
        return self._ranks.handshake(_LOAD_TIMEOUT_S)

    def poll_start(self) -> KVPlan | None:
        return self._ranks.poll_start()

    def submit(self, plan: ScheduledBatch) -> int:
        return self._ranks.submit(plan)

    def poll(self, timeout_s: float) -> list[StepResult]:
        return self._ranks.poll(timeout_s)

    def stage_times(self) -> list[StageTimes]:
        return self._ranks.stage_times()

    def spans(self) -> list[StageSpans]:
        return self._ranks.spans()

    def wait_fds(self) -> list[int]:
        return []

    def abandon(self) -> None:
        self._ranks.close()

    def shutdown(self) -> None:
        self._ranks.shutdown()
        timeout_s = max(config.wait_timeout_s for config in self._configs)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)
            if thread.is_alive():
                raise WaitTimeoutError(f"{thread.name} has not ended {timeout_s:g} s after the shutdown.")


def connect_ranks(configs: Sequence[RankConfig], plan_ends: Sequence[QueueChannel]) -> list[RankConnections]:
    """In-memory links between neighbours and token paths from the last rank to the earlier ones."""
    links = [
        MemoryLink(
            f"stage {config.stage} -> stage {config.stage + 1}", config.wait_timeout_s, config.link_frames
        )
        for config in configs[:-1]
    ]
    last = len(links)
    token_pairs = [QueueChannel.pair(f"samples, stage {last} -> stage {stage}") for stage in range(last)]
    tokens = [[end] for _, end in token_pairs] + [[end for end, _ in token_pairs]]
    return [
        RankConnections(
            plans=plan_end, results=plan_end, tokens=token_ends, incoming=incoming, outgoing=outgoing
        )
        for plan_end, token_ends, incoming, outgoing in zip(
            plan_ends, tokens, [None, *links], [*links, None], strict=True
        )
    ]


def _ignore(event: StatusEvent) -> None:
    """Nobody watches the threads; the core hears of a failure over the plan channel."""

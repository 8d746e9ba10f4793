"""Runs ranks as threads of this process: for tests, notebooks and debuggers.

Each thread runs the same `run_rank` as a rank process does; links and channels between them are in memory.
`llm` and tests make an `InprocessExecutor`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from penstock.batch import (
    EntryCall,
    LinkOrder,
    ScheduledBatch,
    StepResult,
)
from penstock.distributed.group import memory_meeting
from penstock.errors import WaitTimeoutError
from penstock.executor.base import KVPlan, RankChannels
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.process.child import StatusEvent
from penstock.process.config import RankConfig
from penstock.rank.rank import RankConnections, run_rank

_LOAD_TIMEOUT_S = 3600.0


class InprocessExecutor:
    """An executor that runs each rank as a thread of this process.

    Args:
        rank_configs: of all ranks, stage by stage, the ranks of one stage side by side.
    """

    def __init__(self, rank_configs: Sequence[RankConfig]) -> None:
        self._configs = [msgspec.structs.replace(config, are_threads=True) for config in rank_configs]
        core_endpoints, rank_endpoints = QueueChannel.star([config.name for config in self._configs])
        self._ranks = RankChannels(
            core_endpoints,
            wait=lambda timeout_s: QueueChannel.wait_any(core_endpoints, timeout_s),
            stages=[config.stage for config in self._configs],
        )
        self.reports = self._ranks.reports
        connections = connect_ranks(self._configs, rank_endpoints)
        self._threads = [
            threading.Thread(
                target=run_rank,
                args=(config, [ends], _ignore),
                name=f"stage {config.stage} tp {config.tp_rank}",
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

    def exchange_link(self, order: LinkOrder) -> None:
        raise AssertionError("links within one process cannot be replaced")

    def submit_plan(self, plan: ScheduledBatch) -> int:
        return self._ranks.submit_plan(plan)

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return self._ranks.call_store(rank, call)

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        return self._ranks.poll_results(timeout_s)

    def wait_sources(self) -> list[int]:
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
    """Make the in-memory connections between ranks; return those of each rank, in the order of `configs`.

    They are links to the next stage, places at which the ranks of one stage meet to form their group, and
    channels for sampled tokens.

    Args:
        configs: of all ranks, stage by stage, the ranks of one stage side by side.
        plan_ends: each rank's end of its channel to the core.
    """
    names = [config.name for config in configs]
    places = {(config.stage, config.tp_rank): index for index, config in enumerate(configs)}
    incoming: dict[int, MemoryLink] = {}
    outgoing: list[list[MemoryLink]] = [[] for _ in configs]
    for index, config in enumerate(configs):
        for receiver in config.receivers:
            to = places[config.stage + 1, receiver]
            name = f"{names[index]} -> {names[to]}"
            incoming[to] = MemoryLink(name, config.wait_timeout_s, config.link_frames)
            outgoing[index].append(incoming[to])
    output = next(index for index, config in enumerate(configs) if config.is_output)
    earlier = [index for index, config in enumerate(configs) if not config.is_last]
    pairs = [QueueChannel.pair(f"samples, {names[output]} -> {names[index]}") for index in earlier]
    tokens: dict[int, list[QueueChannel]] = {
        index: [end] for index, (_, end) in zip(earlier, pairs, strict=True)
    }
    tokens[output] = [end for end, _ in pairs]
    meetings = {config.stage: memory_meeting(config.tp_size) for config in configs if config.tp_size > 1}
    return [
        RankConnections(
            plans=plan_end,
            results=plan_end,
            tokens=tokens.get(index, []),
            incoming=incoming.get(index),
            outgoing=outgoing[index],
            meeting=meetings.get(config.stage),
        )
        for index, (config, plan_end) in enumerate(zip(configs, plan_ends, strict=True))
    ]


def _ignore(event: StatusEvent) -> None:
    """Do nothing: threads are not watched, and the core hears of a failure over the plan channel."""

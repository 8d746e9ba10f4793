"""The core's side of ranks that are processes of their own.

The engine core makes an `MpExecutor` over the ends of connections that the supervisor gave it. It does not
start the rank processes (`python -m penstock.rank.process`), the supervisor does; it only talks to them.
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.batch import (
    AllocateKV,
    EntryCall,
    LinkOrder,
    ScheduledBatch,
    StepResult,
)
from penstock.executor.base import KVPlan, RankChannels
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.pipeline.links.plan_channel import wait_any
from penstock.process.config import rank_names
from penstock.process.control import close_descriptors
from penstock.process.endpoints import CoreEndpoints


class MpExecutor:
    """An executor over rank processes for one epoch, the time in which they stay connected.

    Args:
        ends: the core's ends of the connections to the ranks, and of the connection that brings results.
            Their descriptors are closed once the channels are open.
        start: the message that ranks get once all have loaded, as for `RankChannels`.
        load_timeout_s: seconds that `start` gives ranks to load, and as many again to allocate.
    """

    def __init__(
        self, ends: CoreEndpoints, start: AllocateKV | None = None, load_timeout_s: float = math.inf
    ) -> None:
        self._load_timeout_s = load_timeout_s
        self._channels = [
            open_channel(endpoint, f"core - {name}")
            for endpoint, name in zip(ends.plans, rank_names(ends.stages), strict=True)
        ]
        self._results = open_channel(ends.results, "results")
        self._all_channels = [self._results, *self._channels]
        close_descriptors(ends)
        start = start or AllocateKV(num_blocks=0, epoch=ends.epoch)
        self._ranks = RankChannels(
            self._channels, self._wait, results=self._results, start=start, stages=ends.stages
        )
        self.reports = self._ranks.reports

    def start(self, is_over: Callable[[], bool] = lambda: False) -> KVPlan:
        return self._ranks.handshake(self._load_timeout_s, is_over)

    def poll_start(self) -> KVPlan | None:
        return self._ranks.poll_start()

    def exchange_link(self, order: LinkOrder) -> None:
        self._ranks.exchange_link(order)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        return self._ranks.submit_plan(plan)

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return self._ranks.call_store(rank, call)

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        return self._ranks.poll_results(timeout_s)

    def wait_sources(self) -> list[int]:
        return [source for channel in self._all_channels for source in channel.filenos()]

    def shutdown(self) -> None:
        self._ranks.shutdown()

    def abandon(self) -> None:
        self._ranks.close()

    def _wait(self, timeout_s: float | None) -> None:
        wait_any(self._all_channels, timeout_s)

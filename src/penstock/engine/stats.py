"""The engine core's statistics for clients, metrics and the readiness check: plain data, and sums of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from penstock.batch import RankLoaded, StageTimes
from penstock.errors import ErrorInfo
from penstock.kvcache.stats import CacheStats, SessionStats, StoreStats
from penstock.process.endpoints import Restarts
from penstock.runner.kv_demand import stranded_bytes
from penstock.scheduler.stats import SchedulerStats

Part = TypeVar("Part", bound=msgspec.Struct)

_SCHEDULER_TOTALS = (
    "num_preemptions",
    "recovered_requests",
    "failed_steps",
    "prompt_tokens",
    "generated_tokens",
)
_SPECULATION_TOTALS = (
    "num_drafted",
    "num_accepted",
    "num_cancelled",
    "num_forced_drafted",
    "num_forced_accepted",
)
_CACHE_TOTALS = ("prefix_tokens", "prefix_hit_tokens", "evicted_blocks")
_STORE_TOTALS = ("stored_blocks", "loaded_blocks", "failed_blocks")
_USE_TOTALS = (
    "bytes_read",
    "bytes_written",
    "records_read",
    "verify_failures",
    "call_failures",
    "host_bytes_read",
    "host_records_read",
    "host_bytes_written",
)


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of memory that a stage uses for each purpose, summed over the stage's ranks.

    Attributes:
        weight_bytes: the weights, in the form in which they are held.
        kv_bytes: the KV cache.
        peak_bytes: what the largest plan was measured to take in addition.
        margin_bytes: what is left free on purpose.
        stranded_bytes: what is unused. It could be KV cache, but all ranks have as many blocks as the rank
            with the least memory.
    """

    stage: int
    weight_bytes: int = 0
    kv_bytes: int
    peak_bytes: int = 0
    margin_bytes: int = 0
    stranded_bytes: int
    replica: int = 0


def stage_memory(ranks: Sequence[RankLoaded], num_blocks: int) -> list[StageMemory]:
    """Return the use of each stage's memory, with `num_blocks` KV blocks on every rank.

    Args:
        ranks: what each rank reported when it had loaded.
    """
    of_stages: dict[int, StageMemory] = {}
    for rank in ranks:
        before = of_stages.get(rank.stage, StageMemory(stage=rank.stage, kv_bytes=0, stranded_bytes=0))
        of_stages[rank.stage] = StageMemory(
            stage=rank.stage,
            weight_bytes=before.weight_bytes + rank.tensor_bytes,
            kv_bytes=before.kv_bytes + num_blocks * rank.block_bytes,
            peak_bytes=before.peak_bytes + rank.peak_bytes,
            margin_bytes=before.margin_bytes + rank.margin_bytes,
            stranded_bytes=before.stranded_bytes
            + stranded_bytes(rank.max_blocks, num_blocks, rank.block_bytes),
        )
    return list(of_stages.values())


def with_peaks_of(ranks: Sequence[RankLoaded], before: Sequence[RankLoaded]) -> list[RankLoaded]:
    """Return the ranks' reports, with memory peaks from `before` if a rank has not measured its own peak.

    A rank that replaces another one measures nothing, and gets the peak of the rank that it replaces.
    """
    known = {(rank.stage, rank.tp_rank): rank.peak_bytes for rank in before}
    return [
        msgspec.structs.replace(rank, peak_bytes=known.get((rank.stage, rank.tp_rank), 0))
        if not rank.peak_bytes
        else rank
        for rank in ranks
    ]


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one engine core: gauges as of now, and totals since its start.

    Rates and histograms are made where they are shown.
    """

    scheduler: SchedulerStats = SchedulerStats()
    cache: CacheStats = CacheStats()
    store: StoreStats = StoreStats()
    sessions: SessionStats = SessionStats()
    plan_interval_ms: int = 0  # least time between plans if an administrator has slowed the engine down; or 0
    open_operations: int = 0  # operations of administrators that are accepted and not complete
    step_id: int  # id of the next step
    inflight: int  # number of plans that were submitted and whose results are not settled
    last_result_age_s: float  # seconds since the last result, infinite before the first; probes keep it low
    stalled_s: float  # seconds for which a result has been due; 0 if no plan is in flight
    stall_limit_s: float  # if `stalled_s` is more, the engine is not ready; it grows with a plan's tokens
    epoch: int
    loss: ErrorInfo | None = None  # why the pipe is broken, until a step has crossed it again
    is_loss_lasting: bool = False  # recovery has failed again and again: requests do not wait for the pipe
    restarts: Restarts = Restarts()
    stage_times: list[StageTimes] = []  # the newest report of each stage that has sent one
    stage_memory: list[StageMemory] = []
    numeric_classes: list[str] = []  # the class of each rank, stage by stage (`process.numeric_class`)


def without_requests(stats: CoreStats) -> CoreStats:
    """Return the last statistics of a lost core as they are shown while there is no core.

    Totals stay as they were. No request runs or waits, no plan is in flight, and all KV blocks are free.
    """
    return msgspec.structs.replace(
        stats,
        scheduler=msgspec.structs.replace(stats.scheduler, num_running=0, num_waiting=0),
        cache=msgspec.structs.replace(stats.cache, free_blocks=stats.cache.num_blocks),
        inflight=0,
        open_operations=0,
        stage_times=[],
    )


def with_totals_of(stats: CoreStats, before: CoreStats) -> CoreStats:
    """Return a core's statistics, with the totals in `before`, of the cores before it, added to its own."""
    scheduler = _added(stats.scheduler, before.scheduler, _SCHEDULER_TOTALS)
    speculation = _added(scheduler.speculation, before.scheduler.speculation, _SPECULATION_TOTALS)
    use = _added(stats.store.use, before.store.use, _USE_TOTALS)
    store = msgspec.structs.replace(stats.store, use=use)
    return msgspec.structs.replace(
        stats,
        scheduler=msgspec.structs.replace(scheduler, speculation=speculation),
        cache=_added(stats.cache, before.cache, _CACHE_TOTALS),
        store=_added(store, before.store, _STORE_TOTALS),
        sessions=_added(stats.sessions, before.sessions, ("num_reaped",)),
        step_id=stats.step_id + before.step_id,
    )


class SteadyStats:
    """The statistics of an engine whose core may be replaced: their totals never fall.

    The totals of a new core are added to those of all cores before it. While there is no core, the statistics
    are those of the last message of the last core.
    """

    def __init__(self) -> None:
        self._last: CoreStats | None = None
        self._before: CoreStats | None = None  # has the totals of all cores before the present one

    def note(self, stats: CoreStats) -> None:
        """Record the newest statistics of the core, which may be another core than the last time."""
        last = self._last
        if last is not None and stats.restarts.core != last.restarts.core:
            self._before = last if self._before is None else with_totals_of(last, self._before)
        self._last = stats

    def shown(self, *, is_away: bool) -> CoreStats | None:
        """Return the statistics to show; None before the first message of a core.

        Args:
            is_away: there is no core now, so that nothing runs.
        """
        if self._last is None:
            return None
        stats = without_requests(self._last) if is_away else self._last
        return stats if self._before is None else with_totals_of(stats, self._before)


def summed(parts: Sequence[Part], **others: Any) -> Part:
    """Return one struct for several of the same type; `others` has fields that are given and not summed."""
    names = (name for name in parts[0].__struct_fields__ if name not in others)
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return type(parts[0])(**sums, **others)


def _added(part: Part, before: Part, names: Sequence[str]) -> Part:
    return msgspec.structs.replace(
        part, **{name: getattr(part, name) + getattr(before, name) for name in names}
    )

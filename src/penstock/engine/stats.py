"""The engine core's numbers for clients, metrics and the readiness check, as plain data, and sums of them."""

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
    """The uses of a stage's memory, over its ranks.

    Attributes:
        weight_bytes: of the weights as they are held.
        kv_bytes: of the KV cache.
        peak_bytes: that the largest plan was measured to take besides.
        margin_bytes: that is left free besides.
        stranded_bytes: that could be KV cache, did the tightest rank not set the number of blocks.
    """

    stage: int
    weight_bytes: int = 0
    kv_bytes: int
    peak_bytes: int = 0
    margin_bytes: int = 0
    stranded_bytes: int
    replica: int = 0


def stage_memory(ranks: Sequence[RankLoaded], num_blocks: int) -> list[StageMemory]:
    """Return what each stage's memory is used for, with so many blocks on every rank."""
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
    """Return what ranks say of themselves, with the peaks that were measured in their places before.

    A rank that takes the place of another measures nothing itself.
    """
    known = {(rank.stage, rank.tp_rank): rank.peak_bytes for rank in before}
    return [
        msgspec.structs.replace(rank, peak_bytes=known.get((rank.stage, rank.tp_rank), 0))
        if not rank.peak_bytes
        else rank
        for rank in ranks
    ]


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The core's gauges of now, and totals since the start. Rates and histograms are made where shown."""

    scheduler: SchedulerStats = SchedulerStats()
    cache: CacheStats = CacheStats()
    store: StoreStats = StoreStats()
    sessions: SessionStats = SessionStats()
    plan_interval_ms: int = 0  # an administrator has slowed the engine down; 0: not
    open_operations: int = 0  # of administrators, accepted and not complete
    step_id: int  # of the next plan
    inflight: int  # plans submitted, result not settled
    last_result_age_s: float  # since a result last came, infinite before the first; probes keep it near 1
    stalled_s: (
        float  # since a result came or the oldest plan in flight was submitted; 0 when none is in flight
    )
    stall_limit_s: float  # beyond it the pipe is not ready: seconds, more for a plan of many tokens
    epoch: int
    loss: ErrorInfo | None = None  # why the pipe is broken, until a step has crossed it again
    is_loss_lasting: bool = False  # it has been tried again and again: no request should wait for the pipe
    restarts: Restarts = Restarts()
    stage_times: list[StageTimes] = []  # the newest report of each stage that has sent one
    stage_memory: list[StageMemory] = []
    numeric_classes: list[str] = []  # of each rank, stage by stage (`process.numeric_class`)


def without_requests(stats: CoreStats) -> CoreStats:
    """Return the last numbers of a core that has gone: its totals stay, without running requests."""
    return msgspec.structs.replace(
        stats,
        scheduler=msgspec.structs.replace(stats.scheduler, num_running=0, num_waiting=0),
        cache=msgspec.structs.replace(stats.cache, free_blocks=stats.cache.num_blocks),
        inflight=0,
        open_operations=0,
        stage_times=[],
    )


def with_totals_of(stats: CoreStats, before: CoreStats) -> CoreStats:
    """Return the numbers of a core, with the totals of the one before it added."""
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
    """The numbers of an engine, whose totals never fall.

    While its core is away they are those of the core's last message, and a core that takes its place goes on
    from them.
    """

    def __init__(self) -> None:
        self._last: CoreStats | None = None
        self._before: CoreStats | None = None  # with the totals of all cores before this one

    def note(self, stats: CoreStats) -> None:
        """Record what a core says, the first one or another that was started in its place."""
        last = self._last
        if last is not None and stats.restarts.core != last.restarts.core:
            self._before = last if self._before is None else with_totals_of(last, self._before)
        self._last = stats

    def shown(self, *, is_away: bool) -> CoreStats | None:
        """Return the numbers to show; None before the first message of a core."""
        if self._last is None:
            return None
        stats = without_requests(self._last) if is_away else self._last
        return stats if self._before is None else with_totals_of(stats, self._before)


def summed(parts: Sequence[Part], **others: Any) -> Part:
    """Return one part of several cores' numbers: the sums of all fields but `others`, which are given."""
    names = (name for name in parts[0].__struct_fields__ if name not in others)
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return type(parts[0])(**sums, **others)


def _added(part: Part, before: Part, names: Sequence[str]) -> Part:
    return msgspec.structs.replace(
        part, **{name: getattr(part, name) + getattr(before, name) for name in names}
    )

"""The use of the stages' time between two of their reports: busy, bubbles by cause, overhead.

Stages count from their start and report about once a second, also while no request runs. The time between a
report before a run and one after it therefore has some idle time besides the run. Stages count idle time as
`no_work`; this module leaves as much of it out as the two reports lie further apart than the run took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.engine.stats import CoreStats
from penstock.reports.figures import StageFigures
from penstock.trace.phases import Phase, bubble_seconds

StageKey = tuple[int, int]  # replica, stage
_IDLE = Phase.NO_WORK.name.lower()


class StageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a stage since its start, as `/debug/pipeline` names them."""

    stage: int
    replica: int = 0
    num_steps: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    bubble_s: dict[str, float] = {}
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    stranded_bytes: int | None = None

    @property
    def key(self) -> StageKey:
        return self.replica, self.stage


class _ReplicaView(msgspec.Struct, frozen=True):
    replica: int
    stages: list[StageCounts] = []


class _PipelineView(msgspec.Struct, frozen=True):
    replicas: list[_ReplicaView]


def counts_in_view(view: object) -> list[StageCounts]:
    """Return the counts of the stages from the answer of `/debug/pipeline`.

    Raises:
        msgspec.ValidationError: `view` is not such an answer.
    """
    replicas = msgspec.convert(view, _PipelineView).replicas
    return [
        msgspec.structs.replace(stage, replica=replica.replica)
        for replica in replicas
        for stage in replica.stages
    ]


def counts_of_core(stats: CoreStats | None) -> list[StageCounts]:
    """Return the counts of the stages that a core reports; an empty list while there is no core."""
    if stats is None:
        return []
    memory = {(each.replica, each.stage): each for each in stats.stage_memory}
    counts = []
    for times in stats.stage_times:
        own = memory.get((times.replica, times.stage))
        counts.append(
            StageCounts(
                stage=times.stage,
                replica=times.replica,
                num_steps=times.num_steps,
                wall_s=times.wall_ns / 1e9,
                busy_s=times.busy_ns / 1e9,
                forward_s=times.phase_ns[Phase.FORWARD] / 1e9,
                sample_s=times.phase_ns[Phase.SAMPLE] / 1e9,
                bubble_s=bubble_seconds(times.phase_ns),
                weight_bytes=None if own is None else own.weight_bytes,
                kv_bytes=None if own is None else own.kv_bytes,
                stranded_bytes=None if own is None else own.stranded_bytes,
            )
        )
    return counts


def have_all_reported_since(before: Sequence[StageCounts], now: Sequence[StageCounts]) -> bool:
    """Return whether every stage has sent a report since `before`."""
    walls = {counts.key: counts.wall_s for counts in before}
    return bool(now) and all(counts.wall_s != walls.get(counts.key, 0.0) for counts in now)


def stage_figures(
    before: Sequence[StageCounts],
    after: Sequence[StageCounts],
    run_s: float,
    resident_bytes: Mapping[StageKey, int] | None = None,
) -> list[StageFigures]:
    """Return the figures of the stages in a run, without the idle time around it.

    A stage that was started again during the run has its memory, and no shares of time.

    Args:
        before: counts of a report before the run.
        after: counts of a report after the run.
        run_s: seconds that the run took.
        resident_bytes: memory of each stage's processes; None: not known.
    """
    earlier, resident = {counts.key: counts for counts in before}, resident_bytes or {}
    return [_figures(earlier.get(counts.key), counts, run_s, resident.get(counts.key)) for counts in after]


def _figures(
    before: StageCounts | None, after: StageCounts, run_s: float, resident_bytes: int | None
) -> StageFigures:
    known = StageFigures(
        stage=after.stage,
        replica=after.replica,
        weight_bytes=after.weight_bytes,
        kv_bytes=after.kv_bytes,
        stranded_bytes=after.stranded_bytes,
        resident_bytes=resident_bytes,
    )
    if before is None or after.wall_s <= before.wall_s or after.busy_s < before.busy_s:
        return known
    causes = {
        cause: max(0.0, spent_s - before.bubble_s.get(cause, 0.0))
        for cause, spent_s in after.bubble_s.items()
    }
    enclosed_s = after.wall_s - before.wall_s
    idle_s = min(causes.get(_IDLE, 0.0), max(0.0, enclosed_s - run_s))
    causes[_IDLE] = causes.get(_IDLE, 0.0) - idle_s
    seconds = max(enclosed_s - idle_s, 1e-9)
    busy_s = after.busy_s - before.busy_s
    forward_s, sample_s = after.forward_s - before.forward_s, after.sample_s - before.sample_s
    steps = after.num_steps - before.num_steps
    bubble_s = sum(causes.values())
    return msgspec.structs.replace(
        known,
        busy=busy_s / seconds,
        causes={cause: spent_s / seconds for cause, spent_s in causes.items()},
        overhead=max(0.0, seconds - busy_s - bubble_s) / seconds,
        sampling=sample_s / (forward_s + sample_s) if forward_s + sample_s > 0 else 0.0,
        num_steps=steps,
        step_s=busy_s / steps if steps else 0.0,
    )

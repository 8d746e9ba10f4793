"""The timed work of simulated stages, in the form in which real stages report it, for `trace.chrome`.

The trips that a flow has kept become spans of each stage: waits with their causes, overhead, and computing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batch import StageSpans
from penstock.simulator.flow import PlanFlow, Trip, split_wait
from penstock.simulator.simulation import FinishedRun
from penstock.trace.phases import Phase

_NS = 1e9


def timeline(run: FinishedRun) -> list[StageSpans]:
    """Return the spans of each stage for the plans that were kept, replica by replica and stage by stage."""
    return [
        spans
        for number, replica in enumerate(run.replicas)
        for spans in stage_spans(replica.flow, replica=number)
    ]


def stage_spans(flow: PlanFlow, *, replica: int = 0) -> list[StageSpans]:
    """Return the spans of each stage, from the first plan that was kept to the last."""
    trips = flow.kept()
    if not trips:
        return []
    places = flow.stage_places
    free = np.array([trip.free[places] for trip in trips])
    starts = np.array([trip.starts[places] for trip in trips])
    works = np.array([trip.works[places] for trip in trips])
    comes_at = np.array([[trip.comes_at] for trip in trips])
    samples_at = np.array([[trip.samples_at] for trip in trips])
    waits = split_wait(free, starts, comes_at, samples_at)
    overhead = np.minimum(flow.overhead, works)
    columns = np.stack([*waits, overhead, works - overhead])  # [5, plans, stages]
    # Ends are rounded, and not lengths, so that spans follow one another without drifting apart.
    ends_ns = np.rint((free[None] + np.cumsum(columns, axis=0)) * _NS).astype(np.int64)
    begins_ns = np.rint(free * _NS).astype(np.int64)
    return [
        _of_stage(stage, replica, trips, begins_ns[:, stage], ends_ns[:, :, stage], free.shape[1])
        for stage in range(free.shape[1])
    ]


def _of_stage(
    stage: int,
    replica: int,
    trips: Sequence[Trip],
    begins_ns: np.ndarray[tuple[int], np.dtype[np.int64]],
    ends_ns: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    num_stages: int,
) -> StageSpans:
    """Return the spans of one stage.

    A time that belongs to no plan, as after a loss, becomes a span of `NO_WORK`.

    Args:
        begins_ns: [plans] when the plan before had left the stage.
        ends_ns: [phases, plans] when each phase of a plan ends on this stage.
    """
    phases, durations, steps = bytearray(), list[int](), list[tuple[int, int, int]]()
    began_ns = now = int(begins_ns[0])
    is_last = stage == num_stages - 1 and num_stages > 1
    for index, trip in enumerate(trips):
        begins = max(now, int(begins_ns[index]))
        cause = Phase.WAIT_PLAN if is_last and trip.cause is Phase.WAIT_NEXT else trip.cause
        ends = [(Phase.NO_WORK, begins)]
        kinds = (cause, Phase.WAIT_TOKEN, Phase.WAIT_PREV, Phase.TAKE, Phase.FORWARD)
        ends += zip(kinds, map(int, ends_ns[:, index]), strict=True)
        steps.append((len(phases), trip.step, trip.num_tokens))
        for phase, end in ends:
            if end > now:
                phases.append(phase)
                durations.append(end - now)
                now = end
        if steps[-1][0] == len(phases):  # all spans of this step are empty
            steps.pop()
    return StageSpans(
        stage=stage,
        replica=replica,
        began_ns=began_ns,
        phases=bytes(phases),
        durations_ns=durations,
        steps=steps,
    )

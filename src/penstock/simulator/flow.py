"""Computes when simulated stages work on a plan, by one scan over the stages for each plan.

    start at stage s  =  max(end at stage s - 1 + wire,  end of the plan before at stage s + ahead)

What a stage does for a plan before it needs hidden states ("ahead", as in `layouts.recurrence`) it does as
soon as it is free and has the plan. In the algebra of maximum and plus this is a product: if `c` is the time
that the plan takes to each stage when nothing waits, the starts are
`c + running maximum of (free + ahead - c)`. So a plan through a thousand stages
costs a handful of array operations. The plan passes *places* one after the other: the stages, and between
them the wires, if hidden states occupy these for some time.

For the time between two plans a stage waits. It waits first for the plan, then for the samples that the plan
consumes (the last of several stages does not), then for the stage before. These causes (`trace.phases`) are
added up for many plans at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.layouts.recurrence import log_normal
from penstock.layouts.stage_times import StageTimes, learnt_cost
from penstock.scheduler.cost_model import StageCost, StepShape
from penstock.simulator.pipe import NO_WIRE, SimulatedPipe, Wire
from penstock.trace.phases import Phase

Floats = NDArray[np.float64]

_AT_ONCE = 64  # trips whose times are added up together
_FEW = 12  # from so many different places on, the times of all are computed together


class Trip(NamedTuple):
    """The times of one plan on its way through the places; arrays have one entry for each place.

    Attributes:
        num_tokens: tokens of the plan.
        free: when the plan before had left each place.
        starts: when this plan begins at each place. Where a stage waits for hidden states between what it
            does ahead and the rest, the wait is taken to come before both.
        works: seconds for which it is at each place.
        comes_at: when the stages have the plan.
        samples_at: when the first stage has the samples that the plan consumes.
        cause: why stages waited for the plan, if they did. On the last stage `WAIT_PLAN` stands for
            `WAIT_NEXT`, since no stage comes after it.
        ends_at: when the last stage has computed it.
    """

    step: int
    num_tokens: int
    free: Floats
    starts: Floats
    works: Floats
    comes_at: float
    samples_at: float
    cause: Phase
    ends_at: float


@dataclass(slots=True)
class StageLedger:
    """The account of what the stages did with their time; each array has seconds by stage.

    Attributes:
        busy, overhead: computing, and the overhead of each step.
        causes: [phases, stages] waiting, by its cause, which is one of `trace.phases.BUBBLES`.
        lost: between the loss of a stage and the next epoch.
        num_steps: number of plans with tokens.
    """

    busy: Floats
    overhead: Floats
    causes: Floats
    lost: Floats
    num_steps: int = 0


def _new_ledger(num_stages: int) -> StageLedger:
    causes = np.zeros((len(Phase), num_stages))
    return StageLedger(np.zeros(num_stages), np.zeros(num_stages), causes, np.zeros(num_stages))


class PlanFlow:
    """Lets plans pass a pipe, in the order in which they are sent.

    Args:
        pipeline: the pipe.
        began_at: clock time from which on the stages can compute.
        seed: seed of what is random: the jitter of wires, and the times of stages if they spread.
        max_kept: number of trips that are kept for a timeline, the first ones of the run.
    """

    def __init__(self, pipeline: SimulatedPipe, *, began_at: float, seed: int = 0, max_kept: int = 0) -> None:
        wires = list(pipeline.wires) or [NO_WIRE] * (pipeline.num_stages - 1)
        self._has_wire_places = any(wire.per_token_s for wire in wires)
        self._shared = _PlaceTimes(self._line(pipeline.stages, wires))
        self._alone = _PlaceTimes(self._line(pipeline.stages_alone, wires))
        latencies = [0.0, *(wire.latency_s for wire in wires)]
        self._delays = self._spread(latencies)
        jitters = [0.0, *(wire.jitter_s for wire in wires)]
        self._jitters = self._spread(jitters) if any(jitters) else None
        self._chance = _Chance(seed, pipeline.spread)
        self._stage_places = slice(None, None, 2 if self._has_wire_places else 1)
        self._plan_s = pipeline.plan_s
        self._free = np.full(len(self._delays), began_at)
        self._in_flight: deque[Trip] = deque()
        self._arrived: list[Trip] = []  # trips that have ended and are not added up yet
        self._max_kept = max_kept
        self._kept: list[Trip] = []
        self._ledger = _new_ledger(pipeline.num_stages)
        self._wire_busy = np.zeros(len(self._delays))

    def begin(self, now: float) -> None:
        """Forget all times so far, since the run begins now. No plan may be in flight."""
        self._add_up()
        self._kept.clear()
        self._ledger = _new_ledger(len(self._ledger.busy))
        self._wire_busy[:] = 0.0
        self._free = np.full_like(self._free, now)

    def send(
        self, step: int, shape: StepShape, now: float, *, samples_at: float, alone: bool, cause: Phase
    ) -> float:
        """Send a plan behind all plans that were sent before.

        Args:
            shape: the size of the plan.
            now: clock time at which the core sends it.
            samples_at: when the first stage has the samples that the plan consumes.
            alone: only one stage computes at a time, so that the times `SimulatedPipe.alone` hold.
            cause: why stages had to wait for the plan, if they had to.

        Returns:
            When the last stage has computed the plan.
        """
        times = self._alone if alone else self._shared
        works = times.seconds(shape)
        works = self._chance.vary(works, self._stage_places)
        comes_at = now + self._plan_s
        ready = np.maximum(self._free, comes_at)
        if samples_at > ready[0]:
            ready[0] = samples_at
        after = works if times.ahead is None else works - np.minimum(times.ahead, works)
        since_first = np.empty_like(works)
        since_first[0] = 0.0
        np.cumsum(after[:-1] + self._waits()[1:], out=since_first[1:])
        if times.ahead is not None:
            since_first -= works - after
        starts = np.maximum.accumulate(ready - since_first)
        starts += since_first
        ends = starts + works
        ends_at = float(ends[-1])
        trip = Trip(step, shape.tokens, self._free, starts, works, comes_at, samples_at, cause, ends_at)
        self._in_flight.append(trip)
        self._free = ends
        return ends_at

    def arrived(self) -> None:
        """Note that the core has the result of the oldest plan in flight."""
        self._arrived.append(self._in_flight.popleft())
        if len(self._arrived) >= _AT_ONCE:
            self._add_up()

    def newest_works(self) -> Floats:
        """Return the seconds for which each stage computes the plan that was sent last."""
        return self._in_flight[-1].works[self._stage_places]

    def jitter(self, wire: Wire) -> float:
        """Return the seconds by which the next message on this wire is late, at random."""
        return float(self._chance.late(np.array([wire.jitter_s]))[0]) if wire.jitter_s else 0.0

    def busy_seconds(self) -> tuple[int, Floats]:
        """Return how many steps' results have arrived, and for how long each stage computed these steps."""
        self._add_up()
        return self._ledger.num_steps, self._ledger.busy

    def give_up(self, now: float) -> None:
        """Give up the plans in flight, since a stage is lost now; the time that they took so far counts."""
        self._arrived += [_cut(trip, now) for trip in self._in_flight]
        self._in_flight.clear()
        self._add_up()
        self._free = np.minimum(self._free, now)

    def resume(self, now: float) -> None:
        """Go on, since all stages are there again and no plan is in flight."""
        self._ledger.lost += now - self._free[self._stage_places]
        self._free = np.full_like(self._free, now)

    def ledger(self, now: float) -> StageLedger:
        """Return what the stages did with their time up to now; plans in flight do not count.

        The time since the last plan left a stage counts as `NO_WORK`.
        """
        self._add_up()
        idle = np.maximum(0.0, now - self._free[self._stage_places])
        causes = self._ledger.causes.copy()
        causes[Phase.NO_WORK] += idle
        own = self._ledger
        return StageLedger(own.busy.copy(), own.overhead.copy(), causes, own.lost.copy(), own.num_steps)

    def kept(self) -> list[Trip]:
        """Return the trips that were kept; one that a loss cut off ends at the time of the loss."""
        self._add_up()
        return self._kept

    def wire_busy(self) -> list[float]:
        """Return the seconds for which each wire was occupied; empty if wires are not places."""
        self._add_up()
        return self._wire_busy[1::2].tolist() if self._has_wire_places else []

    @property
    def stage_places(self) -> slice:
        """The places that are stages."""
        return self._stage_places

    @property
    def overhead(self) -> Floats:
        """The seconds of overhead that every step has on each stage."""
        return self._shared.overhead[self._stage_places]

    def _line(self, stages: Sequence[StageTimes], wires: Sequence[Wire]) -> list[StageTimes]:
        """Return the times of all places."""
        if not self._has_wire_places:
            return list(stages)
        line: list[StageTimes] = [stages[0]]
        for stage, wire in zip(stages[1:], wires, strict=True):
            line += [StageCost(read=0.0, per_token=wire.per_token_s), stage]
        return line

    def _spread(self, by_stage: Sequence[float]) -> Floats:
        """Return numbers by stage as numbers by place, with 0 for each wire."""
        if not self._has_wire_places:
            return np.array(by_stage)
        spread = np.zeros(2 * len(by_stage) - 1)
        spread[::2] = by_stage
        return spread

    def _waits(self) -> Floats:
        """Return the seconds that a plan takes from each place to the next, with this plan's jitter."""
        if self._jitters is None:
            return self._delays
        return self._delays + self._chance.late(self._jitters)

    def _add_up(self) -> None:
        trips, self._arrived = self._arrived, []
        if not trips:
            return
        self._kept += trips[: max(0, self._max_kept - len(self._kept))]
        places, ledger = self._stage_places, self._ledger
        free = np.array([trip.free[places] for trip in trips])
        starts = np.array([trip.starts[places] for trip in trips])
        works = np.array([trip.works for trip in trips])
        self._wire_busy += works.sum(axis=0)
        works = works[:, places]
        for_plan, for_samples, for_tensors = split_wait(
            free,
            starts,
            np.array([trip.comes_at for trip in trips])[:, None],
            np.array([trip.samples_at for trip in trips])[:, None],
        )
        causes = np.array([trip.cause for trip in trips])
        for cause in {trip.cause for trip in trips}:
            waited = for_plan[causes == cause].sum(axis=0)
            at_last = Phase.WAIT_PLAN if cause is Phase.WAIT_NEXT else cause
            ledger.causes[cause, :-1] += waited[:-1]
            ledger.causes[at_last, -1] += waited[-1]
        ledger.causes[Phase.WAIT_TOKEN] += for_samples.sum(axis=0)
        ledger.causes[Phase.WAIT_PREV] += for_tensors.sum(axis=0)
        overhead = np.minimum(self.overhead, works)
        ledger.overhead += overhead.sum(axis=0)
        ledger.busy += (works - overhead).sum(axis=0)
        ledger.num_steps += sum(trip.num_tokens > 0 for trip in trips)


class _Chance:
    """What is random in a run, the same for the same seed.

    Args:
        spread: `SimulatedPipe.spread`.
    """

    def __init__(self, seed: int, spread: float) -> None:
        self._random = np.random.Generator(np.random.PCG64(_whole(seed)))
        self._log_normal = log_normal(spread) if spread else None

    def late(self, jitters: Floats) -> Floats:
        """Return the seconds by which messages are late, each up to its jitter."""
        late: Floats = self._random.random(len(jitters)) * jitters
        return late

    def vary(self, works: Floats, stages: slice) -> Floats:
        """Return the seconds that a plan takes at each place, those of the stages varied at random."""
        if self._log_normal is None:
            return works
        varied = works.copy()
        varied[stages] *= self._random.lognormal(*self._log_normal, len(works[stages]))
        return varied


def _whole(seed: int) -> int:
    """Return a seed that numpy takes, which has none below 0; others stay as they are, and all differ."""
    return seed if seed >= 0 else (1 << 64) - seed


def split_wait(
    free: Floats, starts: Floats, comes_at: Floats, samples_at: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds that stages waited for the plan, for samples, and for the stage before.

    Args:
        free: [plans, stages] when the plan before had left the stage.
        starts: [plans, stages] when the stage began with the plan.
        comes_at, samples_at: [plans, 1] as in `Trip`.
    """
    whole = np.maximum(starts - free, 0.0)
    for_plan = np.minimum(np.maximum(comes_at - free, 0.0), whole)
    left = whole - for_plan
    for_samples = np.minimum(np.maximum(samples_at - free - for_plan, 0.0), left)
    if free.shape[1] > 1:
        for_samples[:, -1] = 0.0  # the last stage samples the tokens itself
    for_tensors = left - for_samples
    for_tensors[:, 0] = 0.0  # what is left there is rounding
    return for_plan, for_samples, for_tensors


def _cut(trip: Trip, now: float) -> Trip:
    """Return the part of a trip up to a time; places that it had not reached are left with no work."""
    ends = np.minimum(trip.starts + trip.works, now)
    starts = np.minimum(trip.starts, now)
    return trip._replace(free=np.minimum(trip.free, now), starts=starts, works=ends - starts)


class _PlaceTimes:
    """The times of all places.

    Places with equal times are computed once. If there are many different times, and all are `StageCost`s,
    all are computed together.

    Attributes:
        overhead: [places] seconds of overhead that each step has.
        ahead: [places] those of them that need no hidden states: all but the first stage's, which gets none.
            None: there are none.
    """

    def __init__(self, times: Sequence[StageTimes]) -> None:
        self._own = list(dict.fromkeys(times))
        numbers = {own: number for number, own in enumerate(self._own)}
        self._numbers = np.array([numbers[own] for own in times])
        costs = [own for own in self._own if isinstance(own, StageCost)]
        self._costs = _columns(costs) if len(costs) == len(self._own) >= _FEW else None
        learnt = map(learnt_cost, self._own)
        overheads = np.array([0.0 if cost is None else cost.overhead for cost in learnt])
        self.overhead: Floats = overheads[self._numbers]
        ahead = self.overhead.copy()
        ahead[0] = 0.0
        self.ahead: Floats | None = ahead if ahead.any() else None

    def seconds(self, shape: StepShape) -> Floats:
        """Return the seconds that a plan takes at each place; one without tokens takes only the overhead."""
        if not shape.tokens:
            return self.overhead
        if self._costs is None:
            seconds: Floats = np.array([own.seconds(shape) for own in self._own])
        else:
            seconds = _all_seconds(self._costs, shape)
        by_place: Floats = seconds[self._numbers]
        return by_place


def _columns(costs: Sequence[StageCost]) -> dict[str, Floats]:
    names = ("overhead", "read", "per_token", "per_attended", "head_read", "per_sample")
    return {name: np.array([getattr(cost, name) for cost in costs]) for name in names}


def _all_seconds(costs: dict[str, Floats], shape: StepShape) -> Floats:
    """Return `StageCost.seconds` of many costs at once.

    Args:
        costs: by the name of each coefficient, its values.
    """
    seconds: Floats = np.maximum(costs["read"], costs["per_token"] * shape.tokens)
    seconds += costs["overhead"]
    seconds += costs["per_attended"] * shape.attended
    if shape.samples:
        seconds += np.maximum(costs["head_read"], costs["per_sample"] * shape.samples)
    return seconds

"""What predictions need to know of a layout, learnt from measured loads: times of stages, and between steps.

The costs of stages are fitted to what they report, as the scheduler fits them. What is left of the measured
times is taken for what lies between steps. `measured_loads.py` measures; `layouts.prediction` predicts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from measured_loads import (
    MAX_LEN,
    ChunkSample,
    Measured,
    Point,
    scheduler_config,
    seconds_of,
    usual_tokens,
)

from penstock.config.engine import CacheConfig
from penstock.layouts.devices import Link
from penstock.layouts.model_sizes import ModelSizes
from penstock.layouts.prediction import NO_TURNS, Load, Prediction, Turns, TurnTime, predict
from penstock.layouts.stage_times import ObservedTimes, StageTimes
from penstock.planner.mix import Mix
from penstock.scheduler.cost_model import StageCost, StepSample, fit_roofline

STRETCH = 6  # measurements, one after the other, for which the machine is taken to be equally fast
FEW_STEPS = 5  # fewer like steps of a point say nothing
MOST_ATTENTION = 0.75  # of a step's time: what is left of a step that has more says little
FITS = 4  # times that what lies between steps is corrected by what is left of the measured times
NO_WAY = Link(kind="memory", bytes_per_s=1e18, latency_s=0.0)  # links are part of what stages report


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What predictions need to know of a layout."""

    shared: list[StageTimes]
    alone: list[StageTimes]
    turns: Turns = NO_TURNS
    plans_ahead: int = 0
    spread: float = 0.0

    @classmethod
    def of(cls, measured: Sequence[Measured], num_stages: int, sizes: ModelSizes) -> Calibrated:
        """Learn from the points of the calibration: first what stages take, then what lies between steps.

        Steps with all requests of a point are those of a single micro-batch, for which one stage after the
        other computes.
        """
        stages = [_stage_times(measured, stage, num_stages) for stage in range(num_stages)]
        shared, alone = ([times[is_alone] for times in stages] for is_alone in (False, True))
        known = cls(shared=shared, alone=alone, spread=statistics.mean(each.spread for each in measured))
        for _ in range(FITS):
            known = replace(known, turns=known._corrected_turns(measured, sizes))
        both_depths = [replace(known, plans_ahead=ahead)._with_ways(measured, sizes) for ahead in (0, 1)]
        return min(both_depths, key=lambda each: each._first_token_error(measured, sizes))

    def _corrected_turns(self, measured: Sequence[Measured], sizes: ModelSizes) -> Turns:
        """Return the turns with what is left of the measured cycles, as lines over a micro-batch's rows."""
        rests: dict[bool, list[tuple[float, float]]] = {False: [], True: []}  # by whether there is one plan
        for each in measured:
            predicted = self.predict(each.point, each.context, sizes)
            rows = -(-each.point.concurrency // predicted.micro_batches)
            rest_s = each.time_per_token_s - predicted.time_per_token_s
            rests[predicted.micro_batches == 1].append((rows, rest_s))
        shared = _corrected(self.turns.shared, rests[False])
        return replace(self.turns, shared=shared, alone=_corrected(self.turns.alone, rests[True]))

    def _with_ways(self, measured: Sequence[Measured], sizes: ModelSizes) -> Calibrated:
        """Learn what is left of first tokens: where nobody else runs, and where others do (`Turns.ways_s`).

        Relative errors are made least, as first tokens differ a hundredfold.
        """
        rests = []  # other requests, seconds that are left, and the measured ones
        for each in measured:
            rest_s = each.ttft_s - self.predict(each.point, each.context, sizes).ttft_s
            rests.append((each.point.concurrency - 1, rest_s, each.ttft_s))
        request_s = max(
            0.0, _weighted((1, rest_s, whole_s) for others, rest_s, whole_s in rests if not others)
        )
        others_s = max(
            0.0,
            _weighted((math.sqrt(others), rest_s, whole_s) for others, rest_s, whole_s in rests if others),
        )
        return replace(self, turns=replace(self.turns, request_s=request_s, others_s=others_s))

    def _first_token_error(self, measured: Sequence[Measured], sizes: ModelSizes) -> float:
        return statistics.mean(
            abs(self.predict(each.point, each.context, sizes).ttft_s / each.ttft_s - 1) for each in measured
        )

    def predict(self, point: Point, context: int, sizes: ModelSizes, link: Link = NO_WAY) -> Prediction:
        """Return what is predicted of a point, with the same link after each stage."""
        load = Load(
            concurrency=point.concurrency,
            mix=Mix(point.prompt, max(1, 2 * (context - point.prompt))),
            max_model_len=MAX_LEN,
            scheduler=scheduler_config(),
            cache=CacheConfig(),
            turns=self.turns,
            plans_ahead=self.plans_ahead,
            spread=self.spread,
        )
        links = [link] * len(self.shared)
        return predict(self.shared, links, 1 << 40, load, sizes, alone=self.alone)


def steadied(in_order: Sequence[Measured]) -> list[Measured]:
    """Return the measurements with the times of a machine that is always equally fast.

    The logarithm of a time is taken to be the sum of the point's and of the stretch's: a design of randomised
    blocks. Both are fitted in turns. Of the stretches' part only the share counts that chance does not
    explain (James and Stein, 1961): where measurements differ by chance alone, nothing changes.

    Args:
        in_order: all measurements, in the order in which they were made.
    """
    logs = [math.log(each.time_per_token_s) for each in in_order]
    stretches = [0.0] * -(-len(logs) // STRETCH)
    left: list[float] = []
    for _ in range(FITS * 5):
        of_points: dict[Point, list[float]] = {}
        for index, each in enumerate(in_order):
            of_points.setdefault(each.point, []).append(logs[index] - stretches[index // STRETCH])
        means = {point: statistics.mean(own) for point, own in of_points.items()}
        left = [logs[index] - means[each.point] for index, each in enumerate(in_order)]
        stretches = [statistics.mean(left[start : start + STRETCH]) for start in range(0, len(left), STRETCH)]
    free = max(1, len(logs) - len(of_points) - len(stretches))
    chance = (
        sum((rest - stretches[index // STRETCH]) ** 2 for index, rest in enumerate(left)) / free / STRETCH
    )
    seen = statistics.mean(stretch**2 for stretch in stretches)
    share = max(0.0, 1.0 - chance / seen) if seen else 0.0
    return [
        each.scaled(math.exp(-share * stretches[index // STRETCH])) for index, each in enumerate(in_order)
    ]


def means_of(measured: Sequence[Measured]) -> dict[Point, Measured]:
    """Return the means of the rounds of each point."""
    return {point: Measured.mean(own) for point, own in rounds_of(measured).items()}


def rounds_of(measured: Sequence[Measured]) -> dict[Point, list[Measured]]:
    """Return the measurements of each point."""
    rounds: dict[Point, list[Measured]] = {}
    for each in measured:
        rounds.setdefault(each.point, []).append(each)
    return rounds


def typical(samples: Sequence[StepSample], few: int = 0) -> list[StepSample]:
    """Of steps of as many tokens and samples, and about as much attention, return one with the mean times.

    Means, because a cycle is as long as its steps take together: where programs share the cores, some steps
    take twice the median.

    Args:
        few: where fewer steps are alike, they are left out, unless nothing would be left.
    """
    alike: dict[tuple[int, int, int], list[StepSample]] = {}
    for sample in samples:
        shape = sample.shape
        alike.setdefault((shape.tokens, shape.samples, shape.attended.bit_length()), []).append(sample)
    often = [own for own in alike.values() if len(own) >= few]
    return [
        StepSample(
            shape=own[0].shape._replace(
                attended=round(statistics.mean(sample.shape.attended for sample in own))
            ),
            forward_s=statistics.mean(sample.forward_s for sample in own),
            sample_s=statistics.mean(sample.sample_s or 0.0 for sample in own),
            overhead_s=statistics.mean(sample.overhead_s for sample in own),
        )
        for own in often or alike.values()
    ]


def fitted(decodes: Sequence[StepSample], chunks: Sequence[StepSample]) -> StageCost:
    """Return the cost that fits these steps of one stage best, as the scheduler fits it.

    That of the head is fitted to decodes alone.
    """
    samples = [*decodes, *chunks]
    steps = [(step.shape.tokens, step.shape.attended, step.forward_s) for step in samples]
    heads = [(step.shape.samples, 0, step.sample_s or 0.0) for step in decodes]
    read, per_token, per_attended = fit_roofline(steps, [1.0] * len(steps))
    head_read, per_sample, _ = fit_roofline(heads, [1.0] * len(heads)) if heads else (0.0, 0.0, 0.0)
    return StageCost(
        overhead=statistics.mean(step.overhead_s for step in samples),
        read=read,
        per_token=per_token,
        per_attended=per_attended,
        head_read=head_read,
        per_sample=per_sample,
    )


def observed(
    points: Sequence[Sequence[StepSample]],
    chunks: Sequence[Sequence[ChunkSample]],
    per_attended: float | None,
) -> StageTimes:
    """Return the times of a stage: the means by numbers of tokens, and a learnt cost for other numbers.

    The cost is fitted to plans with chunks of prompts, and to decodes, all without the attention of decodes.
    Decodes that are nearly all attention are left out of it. More rows never take less time: where they seem
    to, the mean stands for both.

    Args:
        points: the decodes of each.
        chunks: of each point, the plans with chunks of prompts.
        per_attended: seconds of attention for each position that a decode attends to; None: as in prompts.
    """
    decodes = [sample for own in points for sample in own]
    if per_attended is None:
        whole = [typical([*map(_with_decodes, own)], FEW_STEPS) for own in chunks]
        per_attended = fitted([], [step for own in whole for step in own]).per_attended
    plain = [
        _without(step, per_attended * step.shape.attended)._replace(shape=step.shape._replace(attended=0))
        for step in typical(decodes)
        if per_attended * step.shape.attended < MOST_ATTENTION * step.forward_s
    ]
    prompts = [
        step
        for own in chunks
        for step in typical([_without(each.step, per_attended * each.beside) for each in own], FEW_STEPS)
    ]
    cost = fitted(plain, prompts)
    means = [
        (rows, max(0.0, seconds - per_attended * attended)) for rows, attended, seconds in _means(points)
    ]
    per_chunk_attended = fitted([], prompts).per_attended
    chunk_s = [
        (step.shape.tokens, step.overhead_s + step.forward_s - per_chunk_attended * step.shape.attended)
        for step in prompts
    ]
    return ObservedTimes(
        cost=cost,
        per_attended=per_attended,
        decodes=rising(sorted(means)),
        per_chunk_attended=per_chunk_attended,
        chunks=rising(sorted((tokens, max(0.0, seconds)) for tokens, seconds in chunk_s)),
    )


def _without(step: StepSample, attention_s: float) -> StepSample:
    """Return a step without so many seconds of its attention; it keeps some time in any case."""
    kept_s = max(step.forward_s - attention_s, (1.0 - MOST_ATTENTION) * step.forward_s)
    return step._replace(forward_s=kept_s)


def _with_decodes(chunk: ChunkSample) -> StepSample:
    """Return the step of a chunk with the attention of the decodes beside it in its shape."""
    shape = chunk.step.shape
    return chunk.step._replace(shape=shape._replace(attended=shape.attended + chunk.beside))


def rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the values that nowhere fall and are nearest to the given ones, by least squares.

    One value for each abscissa, by pooling adjacent violators (Ayer et al., 1955).
    """
    pools: list[tuple[list[int], float]] = []
    for x, value in points:
        pools.append(([x], value))
        while len(pools) > 1 and (pools[-2][1] >= pools[-1][1] or pools[-2][0][-1] == pools[-1][0][0]):
            (left, low), (right, high) = pools[-2:]
            mean = (low * len(left) + high * len(right)) / (len(left) + len(right))
            pools[-2:] = [(left + right, mean)]
    return tuple(sorted({x: value for xs, value in pools for x in xs}.items()))


def _stage_times(measured: Sequence[Measured], stage: int, num_stages: int) -> dict[bool, StageTimes]:
    """Return the times of one stage: under True while no other stage computed, under False while others did.

    Where there are no such steps, those of the other kind stand for them. What attention takes in decodes is
    learnt from points with as many rows and other contexts.
    """
    chunks: dict[bool, list[list[ChunkSample]]] = {False: [], True: []}
    decodes: dict[bool, list[list[StepSample]]] = {False: [], True: []}
    for each in measured:
        count = each.point.concurrency
        chunks[count == 1].append(each.chunks[stage])
        for own in decodes.values():
            own.append([])
        for step in each.samples[stage]:
            decodes[num_stages > 1 and step.shape.tokens == count][-1].append(step)
    alike: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    for is_alone, points in decodes.items():
        for rows, attended, seconds in _means(points):
            alike.setdefault((is_alone, rows), []).append((attended, seconds))
    slope = _slope(list(alike.values()))
    per_attended = None if slope is None else max(0.0, slope)
    times = {}
    for alone in (False, True):
        known = alone if any(decodes[alone]) else not alone
        prompts = chunks[alone] if any(chunks[alone]) else chunks[True]
        times[alone] = observed(decodes[known], prompts, per_attended)
    return times


def _weighted(points: Iterable[tuple[float, float, float]]) -> float:
    """Return the slope of a line through the origin and points (x, y, scale of y), by least squares."""
    known = list(points)
    product = sum(x * y / scale**2 for x, y, scale in known)
    return product / sum((x / scale) ** 2 for x, _, scale in known)


def _corrected(turn: TurnTime, rests: Sequence[tuple[float, float]]) -> TurnTime:
    """Return the line with what is left, by rows, added to it; it nowhere falls below 0."""
    if not rests:
        return turn
    row_s = max(0.0, turn.row_s + (_slope([rests]) or 0.0))
    left = [rest_s - (row_s - turn.row_s) * rows for rows, rest_s in rests]
    return TurnTime(max(0.0, turn.step_s + statistics.mean(left)), row_s)


def _means(points: Sequence[Sequence[StepSample]]) -> Iterator[tuple[int, float, float]]:
    """The rows of the usual step of each point, and the means of what they attend to and of its seconds."""
    for own in points:
        rows = usual_tokens(own)
        usual = [sample for sample in own if sample.shape.tokens == rows]
        if len(usual) >= FEW_STEPS:
            attended = statistics.mean(sample.shape.attended for sample in usual)
            yield rows, attended, statistics.mean(map(seconds_of, usual))


def _slope(groups: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Return the slope of parallel lines, one through each group of points.

    None where no group has points with two abscissas.
    """
    spread = product = 0.0
    for points in groups:
        middle = statistics.mean(x for x, _ in points)
        height = statistics.mean(y for _, y in points)
        spread += sum((x - middle) ** 2 for x, _ in points)
        product += sum((x - middle) * (y - height) for x, y in points)
    return product / spread if spread else None

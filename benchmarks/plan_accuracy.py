"""How far predictions of a layout are from what the engine does here: time per token, first token, bubble.

    python benchmarks/plan_accuracy.py [--models demo,0.5B] [--layouts 1x1,2x1,3x1,1x2,2x2] [--points 6]
                                       [--seed 0] [--rounds 3] [--window-s 2] [--max-tokens 16384]
                                       [--record FILE]
    python benchmarks/plan_accuracy.py --recorded FILE

For each model and layout (stages x ranks) an engine is started. It is calibrated at a few fixed points: the
costs of stages are fitted to what they report there, as the scheduler fits them; what is left of the measured
times is taken for what lies between steps. Other points are drawn from the seed:
concurrency 1 to 64 and prompts of 16 to 1,024 tokens, both evenly on a scale of powers, none of them a point
of the calibration. At each point so many requests decode; the time per token and the bubble are those of a
window in which all of them do, and the first token is that of one more request, sent while all others
decode, the median of several. Predictions are those of `layouts.prediction`, which `penstock plan` uses.

The speed of a machine that others share drifts by 10 to 20 % from minute to minute. So points of both kinds
are measured in turns, in several rounds, each in an order that the seed draws. From how the points of a few
minutes differ from their own means follows the speed of the machine then, by which times are divided. The
means of the rounds are compared.

`--record` adds what was measured to a file, a line for each layout. `--recorded` predicts anew what such a
file holds, and starts no engine: so a change of the predictions is judged by the same measurements.

Engines do not speculate: how many guesses are right depends on the text, which no prediction knows.

Prints a row for each point, and for each model the mean absolute errors: of the time per token and of the
first token in per cent of what was measured, of the bubble in points. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import collections
import contextlib
import math
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from peers.checkpoint import FULL_SHAPE, make_checkpoint

from penstock import AsyncLLM, SamplingParams
from penstock.batch import StageSpans
from penstock.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from penstock.engine.core.cost_learning import OVERHEAD, step_times
from penstock.layouts.devices import Link
from penstock.layouts.model_sizes import ModelSizes, read_sizes
from penstock.layouts.prediction import NO_TURNS, Load, Prediction, Turns, TurnTime, predict
from penstock.layouts.stage_times import ObservedTimes, StageTimes
from penstock.planner.mix import Mix
from penstock.scheduler.cost_model import StageCost, StepSample, StepShape, attended_by, fit_roofline
from penstock.scheduler.pacing import MIN_CHUNK
from penstock.trace.phases import BUSY

MODELS = ("demo", "0.5B")
LAYOUTS = "1x1,2x1,3x1,1x2,2x2"
CALIBRATION = (
    *((1, 20), (1, 200), (1, 700), (2, 100), (3, 160), (6, 40), (6, 600)),
    *((12, 24), (12, 300), (24, 32), (24, 250), (48, 64), (64, 24)),
)  # (concurrency, prompt tokens)
MAX_CONCURRENCY, MAX_PROMPT, MIN_PROMPT = 64, 1024, 16
MAX_LEN = 2048
SETTLE_TOKENS = 4  # of each request, before a window begins
NEAR_THE_END = 64  # tokens: of a request that ends soon
REPORT_S = 1.6  # a stage reports about once a second
FIRST_TOKENS = 15  # requests whose first token is timed at a point, in each round
LOOK_S = 0.02  # between two looks at how long the requests are
STRETCH = 6  # measurements, one after the other, for which the machine is taken to be equally fast
FEW_STEPS = 5  # fewer like steps of a point say nothing
FITS = 4  # times that what lies between steps is corrected by what is left of the measured times
NO_WAY = Link(kind="memory", bytes_per_s=1e18, latency_s=0.0)  # links are part of what stages report
COUNTED = (*BUSY, *OVERHEAD)

Errors = tuple[float, float, float]  # of the time per token, the first token, the bubble
Length = tuple[int, float]  # nanoseconds, and tokens of a request then, prompt and answer
Ran = tuple[int, int, float]  # nanoseconds of a request's start and end, and tokens of the others then


@dataclass(frozen=True, slots=True)
class Point:
    """A load: requests that run at once, and tokens of their prompts."""

    concurrency: int
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the engine did at a point.

    Attributes:
        context: tokens that a request had behind it in the middle of the window.
        spread: the standard deviation of the times of the window's steps, as a share of their mean.
        samples: [stage] what the stages reported of the window's steps.
        chunks: [stage] the same of the plans with a chunk of the prompts whose first token was timed.
    """

    point: Point
    time_per_token_s: float
    ttft_s: float
    bubble: float
    context: int
    spread: float
    samples: list[list[StepSample]]
    chunks: list[list[StepSample]]

    def scaled(self, factor: float) -> Measured:
        """Return what a machine would have measured that takes so many times as long."""

        def slower(step: StepSample) -> StepSample:
            return step._replace(
                forward_s=factor * step.forward_s,
                sample_s=factor * (step.sample_s or 0.0),
                overhead_s=factor * step.overhead_s,
            )

        return replace(
            self,
            time_per_token_s=factor * self.time_per_token_s,
            ttft_s=factor * self.ttft_s,
            samples=[[*map(slower, own)] for own in self.samples],
            chunks=[[*map(slower, own)] for own in self.chunks],
        )

    @classmethod
    def mean(cls, rounds: Sequence[Measured]) -> Measured:
        """Return the means of several rounds at one point, with the steps of all.

        That of the time per token is the harmonic one: rounds are equally long, and in a slow one are fewer.
        """
        stages = range(len(rounds[0].samples))
        return cls(
            point=rounds[0].point,
            time_per_token_s=statistics.harmonic_mean([each.time_per_token_s for each in rounds]),
            ttft_s=statistics.mean(each.ttft_s for each in rounds),
            bubble=statistics.mean(each.bubble for each in rounds),
            context=round(statistics.mean(each.context for each in rounds)),
            spread=statistics.mean(each.spread for each in rounds),
            samples=[[step for each in rounds for step in each.samples[stage]] for stage in stages],
            chunks=[[step for each in rounds for step in each.chunks[stage]] for stage in stages],
        )


class Engine:
    """An engine that runs, and what is asked of it.

    Args:
        vocab_size: ids that prompts are drawn from.
    """

    def __init__(self, llm: AsyncLLM, num_stages: int, vocab_size: int, window_s: float) -> None:
        self._llm = llm
        self._num_stages = num_stages
        self._window_s = window_s
        self._random = random.Random(7)
        self._vocab_size = vocab_size
        self._num_tokens: dict[int, int] = {}  # by running request: generated, by those before it too
        self._lengths: dict[int, int] = {}  # by running request: tokens so far, its prompt's too
        self._arrivals: dict[int, list[tuple[int, int]]] = {}  # by running request: nanoseconds, and tokens

    async def measure(self, point: Point) -> Measured:
        """Measure one point."""
        self._num_tokens = dict.fromkeys(range(point.concurrency), 0)
        self._lengths = dict.fromkeys(range(point.concurrency), point.prompt)
        tasks = [asyncio.create_task(self._decode(i, point.prompt)) for i in range(point.concurrency)]
        try:
            while min(self._num_tokens.values()) < SETTLE_TOKENS:
                await asyncio.sleep(0.01)
                self._check(tasks)
            self._arrivals = {index: [] for index in self._num_tokens}
            began_ns = time.monotonic_ns()
            lengths = await self._pass_window()
            ended_ns = time.monotonic_ns()
            time_per_token_s = _time_per_token(self._arrivals.values())
            self._check(tasks)
            await asyncio.sleep(REPORT_S)
            spans = await self._spans()
            ttft_s, ran = await self._first_tokens(tasks, point)
            await asyncio.sleep(REPORT_S)
            later = await self._spans()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        samples = [
            _decodes(_of_stage(spans, stage), began_ns, ended_ns, lengths)
            for stage in range(self._num_stages)
        ]
        return Measured(
            point=point,
            time_per_token_s=time_per_token_s,
            ttft_s=ttft_s,
            bubble=_bubble(spans, self._num_stages, began_ns, ended_ns),
            context=round(statistics.mean(length for _, length in lengths)),
            spread=statistics.mean(map(_spread, samples)),
            samples=samples,
            chunks=[
                _chunks(_of_stage(later, stage), ran, point, max(1, _usual_tokens(samples[stage])))
                for stage in range(self._num_stages)
            ],
        )

    async def _pass_window(self) -> list[Length]:
        """Wait for the end of the window, and return the mean length of the requests at times in it.

        It ends early where a request is about to end, for the prompt of the next would be part of it.
        """
        lengths: list[Length] = []
        ends_at = time.monotonic() + self._window_s
        while time.monotonic() < ends_at and max(self._lengths.values()) < MAX_LEN - NEAR_THE_END:
            lengths.append((time.monotonic_ns(), statistics.mean(self._lengths.values())))
            await asyncio.sleep(LOOK_S)
        return lengths

    async def _first_tokens(self, tasks: list[asyncio.Task[None]], point: Point) -> tuple[float, list[Ran]]:
        """Seconds to the first token of one more request beside all others but one, and when such ran."""
        tasks.pop().cancel()
        del self._num_tokens[point.concurrency - 1], self._lengths[point.concurrency - 1]
        await asyncio.sleep(0.1)
        seconds, ran = [], []
        for _ in range(FIRST_TOKENS):
            began_ns = time.monotonic_ns()
            stream = self._llm.generate({"prompt_token_ids": self._prompt(point.prompt)}, _sampling(2))
            async with contextlib.aclosing(stream):
                await anext(stream)
                seconds.append((time.monotonic_ns() - began_ns) / 1e9)
                async for _output in stream:
                    pass
            length = statistics.mean(self._lengths.values()) if self._lengths else 0.0
            ran.append((began_ns, time.monotonic_ns(), length))
            await asyncio.sleep(self._random.uniform(0.02, 0.12))
        return statistics.median(seconds), ran

    async def _decode(self, index: int, num_prompt: int) -> None:
        """Decode until it is cancelled, again if need be."""
        while True:
            prompt = self._prompt(num_prompt)
            self._lengths[index] = num_prompt
            stream = self._llm.generate({"prompt_token_ids": prompt}, _sampling(MAX_LEN - num_prompt - 1))
            before = self._num_tokens[index]
            async with contextlib.aclosing(stream):
                async for output in stream:
                    num_generated = len(output.outputs[0].token_ids)
                    self._num_tokens[index] = before + num_generated
                    self._lengths[index] = num_prompt + num_generated
                    self._arrivals.setdefault(index, []).append(
                        (time.monotonic_ns(), self._num_tokens[index])
                    )

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, self._vocab_size) for _ in range(num_tokens)]

    async def _spans(self) -> list[StageSpans]:
        return await (await self._llm._running()).engine.trace()

    @staticmethod
    def _check(tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                task.result()


def _time_per_token(requests: Iterable[Sequence[tuple[int, int]]]) -> float:
    """Seconds from a token to the next, from the first to the last that each request got in a window."""
    spent_ns = num_tokens = 0
    for arrivals in requests:
        (first_ns, before), (last_ns, tokens) = arrivals[0], arrivals[-1]
        spent_ns += last_ns - first_ns
        num_tokens += tokens - before
    return spent_ns / 1e9 / num_tokens


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def _of_stage(spans: Sequence[StageSpans], stage: int) -> list[StageSpans]:
    return [report for report in spans if report.stage == stage]


def _bubble(spans: Sequence[StageSpans], num_stages: int, began_ns: int, ended_ns: int) -> float:
    """The share of the stages' time in a window in which they do not compute or carry."""
    busy_ns = 0
    for report in spans:
        at_ns = report.began_ns
        for phase, duration_ns in zip(report.phases, report.durations_ns, strict=True):
            if phase in COUNTED:
                busy_ns += max(0, min(at_ns + duration_ns, ended_ns) - max(at_ns, began_ns))
            at_ns += duration_ns
    return 1.0 - busy_ns / (num_stages * (ended_ns - began_ns))


def _steps(report: StageSpans) -> Iterator[tuple[int, int, StepSample]]:
    """(nanoseconds of its start, tokens, times) of the steps with tokens; of their shape only tokens."""
    starts, at_ns = [], report.began_ns
    for duration_ns in report.durations_ns:
        starts.append(at_ns)
        at_ns += duration_ns
    times = {each.step: each for each in step_times(report)}
    for index, step, num_tokens in report.steps:
        if step in times and index < len(starts):
            own = times[step]
            shape = StepShape(num_tokens, 0, 0)
            yield starts[index], num_tokens, StepSample(shape, own.forward_s, own.sample_s, own.overhead_s)


def _decodes(
    spans: Sequence[StageSpans], began_ns: int, ended_ns: int, lengths: Sequence[Length]
) -> list[StepSample]:
    """The steps of a window, each with the length that requests had then."""
    found = []
    for report in spans:
        for at_ns, num_tokens, sample in _steps(report):
            if began_ns <= at_ns < ended_ns:
                _, length = lengths[max(0, bisect.bisect_right(lengths, (at_ns, 0.0)) - 1)]
                shape = StepShape(num_tokens, round(num_tokens * length), num_tokens)
                found.append(sample._replace(shape=shape))
    return found


def _spread(samples: Sequence[StepSample]) -> float:
    """The standard deviation of the times of the steps with most tokens, as a share of their mean."""
    most = max((sample.shape.tokens for sample in samples), default=0)
    seconds = [_seconds(sample) for sample in samples if sample.shape.tokens == most]
    return statistics.stdev(seconds) / statistics.mean(seconds) if len(seconds) > 1 else 0.0


def _seconds(sample: StepSample) -> float:
    return sample.forward_s + (sample.sample_s or 0.0) + sample.overhead_s


def _usual_tokens(samples: Sequence[StepSample]) -> int:
    """The number of tokens that most steps have; 0 without steps."""
    numbers = collections.Counter(sample.shape.tokens for sample in samples)
    return numbers.most_common(1)[0][0] if numbers else 0


def _chunks(
    spans: Sequence[StageSpans], ran: Sequence[Ran], point: Point, usual_tokens: int
) -> list[StepSample]:
    """The plans with chunks of the requests that came one after the other, beside all others but one.

    Plans that are hardly larger than those of decodes are left out.

    Args:
        usual_tokens: tokens of a plan without prompts.
    """
    found = []
    micro_batches = max(1, round(point.concurrency / usual_tokens))
    rows = round((point.concurrency - 1) / micro_batches)
    least = rows + (MIN_CHUNK if rows else 1)
    steps = [each for report in spans for each in _steps(report)]
    for began_ns, ended_ns, length in ran:
        start = 0
        for at_ns, num_tokens, sample in steps:
            if began_ns <= at_ns < ended_ns and start < point.prompt and num_tokens >= least:
                count = num_tokens - rows
                is_last = start + count >= point.prompt
                attended = round(rows * length) + attended_by(start, count)
                found.append(sample._replace(shape=StepShape(num_tokens, attended, rows + is_last)))
                start += count
    return found


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


def typical(samples: Sequence[StepSample]) -> list[StepSample]:
    """Of steps of as many tokens and samples, and about as much attention, return one with the mean times.

    Means, because a cycle is as long as its steps take together: where programs share the cores, some steps
    take twice the median.
    """
    alike: dict[tuple[int, int, int], list[StepSample]] = {}
    for sample in samples:
        shape = sample.shape
        alike.setdefault((shape.tokens, shape.samples, shape.attended.bit_length()), []).append(sample)
    return [
        StepSample(
            shape=own[0].shape._replace(
                attended=round(statistics.mean(sample.shape.attended for sample in own))
            ),
            forward_s=statistics.mean(sample.forward_s for sample in own),
            sample_s=statistics.mean(sample.sample_s or 0.0 for sample in own),
            overhead_s=statistics.mean(sample.overhead_s for sample in own),
        )
        for own in alike.values()
    ]


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
        """Learn what is left of first tokens: where nobody else runs, and for each request that does.

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
            _weighted((others, rest_s - request_s, whole_s) for others, rest_s, whole_s in rests if others),
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


def _stage_times(measured: Sequence[Measured], stage: int, num_stages: int) -> dict[bool, StageTimes]:
    """Return the times of one stage: under True while no other stage computed, under False while others did.

    Where there are no such steps, those of the other kind stand for them. What attention takes in decodes is
    learnt from points with as many rows and other contexts.
    """
    chunks: dict[bool, list[StepSample]] = {False: [], True: []}
    decodes: dict[bool, list[list[StepSample]]] = {False: [], True: []}
    for each in measured:
        count = each.point.concurrency
        chunks[count == 1] += typical(each.chunks[stage])
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
        times[alone] = observed(decodes[known], chunks[alone] or chunks[True], per_attended)
    return times


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
    points: Sequence[Sequence[StepSample]], chunks: Sequence[StepSample], per_attended: float | None
) -> StageTimes:
    """Return the times of a stage: of decodes the means by rows without attention, of all else a learnt cost.

    The cost is fitted to plans with chunks of prompts, and to decodes without their attention. More rows
    never take less time: where they seem to, the mean stands for both.

    Args:
        points: the decodes of each.
        per_attended: seconds of attention for each position that a decode attends to; None: as in prompts.
    """
    decodes = [sample for own in points for sample in own]
    if per_attended is None:
        per_attended = fitted([], chunks).per_attended
    plain = [
        step._replace(
            shape=step.shape._replace(attended=0),
            forward_s=max(0.0, step.forward_s - per_attended * step.shape.attended),
        )
        for step in typical(decodes)
    ]
    cost = fitted(plain, chunks)
    means = [
        (rows, max(0.0, seconds - per_attended * attended)) for rows, attended, seconds in _means(points)
    ]
    return ObservedTimes(cost=cost, per_attended=per_attended, decodes=rising(sorted(means)))


def _means(points: Sequence[Sequence[StepSample]]) -> Iterator[tuple[int, float, float]]:
    """The rows of the usual step of each point, and the means of what they attend to and of its seconds."""
    for own in points:
        rows = _usual_tokens(own)
        usual = [sample for sample in own if sample.shape.tokens == rows]
        if len(usual) >= FEW_STEPS:
            attended = statistics.mean(sample.shape.attended for sample in usual)
            yield rows, attended, statistics.mean(map(_seconds, usual))


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


def scheduler_config() -> SchedulerConfig:
    return msgspec.structs.replace(SchedulerConfig(), max_num_seqs=MAX_CONCURRENCY)


def draw(seed: int, label: str, count: int, max_tokens: int) -> list[Point]:
    """Points of a grid, evenly on scales of powers; at most so many prompt tokens together."""
    source = random.Random(f"{seed} {label}")
    taken = {Point(*each) for each in CALIBRATION}
    points: list[Point] = []
    while len(points) < count:
        concurrency = round(2 ** source.uniform(0, 6))
        prompt = round(2 ** source.uniform(4, 10))
        point = Point(concurrency, prompt)
        if point not in taken and concurrency * prompt <= max_tokens:
            taken.add(point)
            points.append(point)
    return points


@contextlib.asynccontextmanager
async def running(model: str, pp: int, tp: int, **more: object) -> AsyncIterator[AsyncLLM]:
    settings: dict[str, Any] = {
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_CONCURRENCY,
        "inter_token_target_ms": scheduler_config().inter_token_target_ms,  # as a server has it
        "enable_prefix_caching": False,
        "speculative_method": "off",
        **more,
    }
    async with AsyncLLM(model, **settings) as llm:
        yield llm


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was measured of one model and layout.

    Attributes:
        label: the model's name in the tables.
        pp, tp: stages, and ranks of each.
        in_order: all measurements, in their order.
    """

    label: str
    pp: int
    tp: int
    in_order: list[Measured]

    def print_errors(self, model: str) -> list[Errors]:
        """Print a row for each point; returns their errors."""
        sizes = read_sizes(ModelConfig(model=model))
        calibrated, drawn = learn(steadied(self.in_order), self.pp, sizes)
        errors = []
        for measured in drawn:
            predicted = calibrated.predict(measured.point, measured.context, sizes)
            errors.append(errors_of(measured, predicted))
            print(row([self.label, f"{self.pp}x{self.tp}"], measured, predicted), flush=True)
        return errors


async def measure_layout(label: str, model: str, pp: int, tp: int, options: argparse.Namespace) -> Record:
    """Start an engine of this layout, and measure all points."""
    sizes = read_sizes(ModelConfig(model=model))
    points = draw(options.seed, f"{label} {pp}x{tp}", options.points, options.max_tokens)
    async with running(model, pp, tp) as llm:
        engine = Engine(llm, pp, sizes.spec.vocab_size, options.window_s)
        return Record(label=label, pp=pp, tp=tp, in_order=await in_rounds(engine, points, options))


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
    rounds: dict[Point, list[Measured]] = {}
    for each in measured:
        rounds.setdefault(each.point, []).append(each)
    return {point: Measured.mean(own) for point, own in rounds.items()}


async def ready(_: Point) -> None:
    """Prepare nothing: the engine is ready for the point."""


async def in_rounds(
    engine: Engine,
    points: Sequence[Point],
    options: argparse.Namespace,
    prepare: Callable[[Point], Awaitable[None]] = ready,
) -> list[Measured]:
    """Measure the calibration and other points in turns; returns all measurements, in their order.

    Args:
        prepare: is awaited before a point is measured.
    """
    every, source = [*calibration(options.max_tokens), *points], random.Random(f"{options.seed} order")
    in_order = []
    for _ in range(options.rounds):
        for point in source.sample(every, len(every)):
            await prepare(point)
            in_order.append(await engine.measure(point))
    return in_order


def calibration(max_tokens: int) -> list[Point]:
    """Return the points of the calibration with at most so many tokens of prompts."""
    return [Point(*each) for each in CALIBRATION if each[0] * each[1] <= max_tokens]


def learn(
    in_order: Sequence[Measured], num_stages: int, sizes: ModelSizes
) -> tuple[Calibrated, list[Measured]]:
    """Return what is learnt from the points of the calibration, and the means of the other points."""
    means = means_of(in_order)
    known = {Point(*each) for each in CALIBRATION}
    # In their own order, whatever the order of the measurements was.
    calibrated = Calibrated.of(
        [means[point] for each in CALIBRATION if (point := Point(*each)) in means], num_stages, sizes
    )
    return calibrated, [own for point, own in means.items() if point not in known]


def errors_of(measured: Measured, predicted: Prediction) -> Errors:
    """Return the relative errors of the time per token and of the first token, and that of the bubble."""
    return (
        predicted.time_per_token_s / measured.time_per_token_s - 1,
        predicted.ttft_s / measured.ttft_s - 1,
        predicted.bubble - measured.bubble,
    )


def row(labels: Sequence[str], measured: Measured, predicted: Prediction) -> str:
    """Return a row of the table; each cell has what was measured, and then what was predicted."""
    cells = (
        *labels,
        f"{measured.point.concurrency}",
        f"{measured.point.prompt}",
        f"{1e3 * measured.time_per_token_s:.3f} / {1e3 * predicted.time_per_token_s:.3f}",
        f"{1e3 * measured.ttft_s:.2f} / {1e3 * predicted.ttft_s:.2f}",
        f"{100 * measured.bubble:.1f} / {100 * predicted.bubble:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def mean_errors(errors: Sequence[Errors]) -> str:
    """The mean absolute errors, in words."""
    token, first, bubble = (100 * statistics.mean(map(abs, column)) for column in zip(*errors, strict=True))
    return f"time per token {token:.1f} %, first token {first:.1f} %, bubble {bubble:.1f} points"


def records(options: argparse.Namespace, models: Mapping[str, str]) -> Iterator[Record]:
    """Yield what was recorded, or else what is measured now; the latter is recorded if that is asked for."""
    if options.recorded:
        for line in Path(options.recorded).read_bytes().splitlines():
            yield msgspec.json.decode(line, type=Record)
        return
    for label in options.models.split(","):
        for layout in options.layouts.split(","):
            pp, tp = map(int, layout.split("x"))
            record = asyncio.run(measure_layout(label, models[label], pp, tp, options))
            if options.record:
                with Path(options.record).open("ab") as file:
                    file.write(msgspec.json.encode(record) + b"\n")
            yield record


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=LAYOUTS, help="stages x ranks of each")
    parser.add_argument("--points", type=int, default=6, help="of each model and layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="in which all points are measured once")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of all prompts of a point together")
    parser.add_argument("--record", default="", help="a file to which what was measured is added")
    parser.add_argument("--recorded", default="", help="such a file, which is predicted anew")
    options = parser.parse_args()
    print("| model | layout | at once | prompt | ms per token | first token, ms | bubble, % |")
    print("|---|---|---|---|---|---|---|", flush=True)
    of_models: dict[str, list[Errors]] = {}
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as scratch:
        half_b = Path(scratch, "0.5B")
        if "0.5B" in options.models:
            make_checkpoint(half_b, FULL_SHAPE)
        models = {"demo": "demo", "0.5B": str(half_b)}
        for record in records(options, models):
            of_models.setdefault(record.label, []).extend(record.print_errors(models[record.label]))
    print()
    for label, errors in of_models.items():
        print(f"{label}: mean absolute errors over {len(errors)} points: {mean_errors(errors)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

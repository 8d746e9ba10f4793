"""How far predictions of a layout are from what the engine does here: time per token, first token, bubble.

    python benchmarks/plan_accuracy.py [--models demo,0.5B] [--layouts 1x1,2x1,3x1,1x2,2x2] [--points 6]
                                       [--seed 0] [--window-s 4] [--max-tokens 16384]

For each model and layout (stages x ranks) an engine is started. It is calibrated at a few fixed points: what
the stages report there teaches the cost model of the scheduler, as the engine's own calibration does; what
is left of the measured times is taken for what lies between steps. Then points are drawn from the seed:
concurrency 1 to 64 and prompts of 16 to 1,024 tokens, both evenly on a scale of powers, none of them a point
of the calibration. At each point so many requests decode; the time per token and the bubble are those of a
window in which all of them do, and the first token is that of one more request, sent while all others
decode, the median of several. Predictions are those of `layouts.prediction`, which `penstock plan` uses.

Engines do not speculate: how many guesses are right depends on the text, which no prediction knows.

Prints a row for each point, and for each model the mean absolute errors: of the time per token and of the
first token in per cent of what was measured, of the bubble in points. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
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
from penstock.layouts.prediction import NO_TURNS, Load, Prediction, Turns, predict
from penstock.layouts.stage_times import ObservedTimes, StageTimes
from penstock.planner.mix import Mix
from penstock.scheduler.cost_model import CostModel, StageCost, StepSample, StepShape, attended_by
from penstock.trace.phases import BUSY

MODELS = ("demo", "0.5B")
LAYOUTS = "1x1,2x1,3x1,1x2,2x2"
CALIBRATION = (
    *((1, 48), (1, 700), (2, 100), (3, 160), (6, 40), (12, 24), (12, 400), (24, 32), (48, 64), (64, 24)),
)  # (concurrency, prompt tokens)
MAX_CONCURRENCY, MAX_PROMPT, MIN_PROMPT = 64, 1024, 16
MAX_LEN = 2048
SETTLE_TOKENS = 4  # of each request, before a window begins
NEAR_THE_END = 64  # tokens: of a request that ends soon
REPORT_S = 1.6  # a stage reports about once a second
FIRST_TOKENS = 15  # requests whose first token is timed at a point
NO_WAY = Link(kind="memory", bytes_per_s=1e18, latency_s=0.0)  # links are part of what stages report
COUNTED = (*BUSY, *OVERHEAD)

Errors = tuple[float, float, float]  # of the time per token, the first token, the bubble


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
        samples: [stage] what the stages reported of the window's steps.
        prefills: [stage] the same of the chunks of prompts that ran alone; only with one request.
    """

    point: Point
    time_per_token_s: float
    ttft_s: float
    bubble: float
    context: int
    samples: list[list[StepSample]]
    prefills: list[list[StepSample]]


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

    async def measure(self, point: Point) -> Measured:
        """Measure one point."""
        self._num_tokens = dict.fromkeys(range(point.concurrency), 0)
        self._lengths = dict.fromkeys(range(point.concurrency), point.prompt)
        tasks = [asyncio.create_task(self._decode(i, point.prompt)) for i in range(point.concurrency)]
        try:
            while min(self._num_tokens.values()) < SETTLE_TOKENS:
                await asyncio.sleep(0.01)
                self._check(tasks)
            tokens_before, began_ns = sum(self._num_tokens.values()), time.monotonic_ns()
            context = await self._pass_window()
            tokens, ended_ns = sum(self._num_tokens.values()), time.monotonic_ns()
            self._check(tasks)
            await asyncio.sleep(REPORT_S)
            spans = await self._spans()
            ttft_s, alone_ns = await self._first_tokens(tasks, point)
            await asyncio.sleep(REPORT_S if alone_ns else 0.0)
            later = await self._spans() if alone_ns else []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Measured(
            point=point,
            time_per_token_s=(ended_ns - began_ns) / 1e9 * point.concurrency / (tokens - tokens_before),
            ttft_s=ttft_s,
            bubble=_bubble(spans, self._num_stages, began_ns, ended_ns),
            context=context,
            samples=[
                _decodes(_of_stage(spans, stage), began_ns, ended_ns, context)
                for stage in range(self._num_stages)
            ],
            prefills=[
                _chunks(_of_stage(later, stage), alone_ns, point.prompt) for stage in range(self._num_stages)
            ],
        )

    async def _pass_window(self) -> int:
        """Wait for the end of the window, and return the mean length of the requests in it.

        It ends early where a request is about to end, for the prompt of the next would be part of it.
        """
        lengths, ends_at = [], time.monotonic() + self._window_s
        while time.monotonic() < ends_at and max(self._lengths.values()) < MAX_LEN - NEAR_THE_END:
            lengths.append(statistics.mean(self._lengths.values()))
            await asyncio.sleep(0.02)
        return round(statistics.mean(lengths))

    async def _first_tokens(
        self, tasks: list[asyncio.Task[None]], point: Point
    ) -> tuple[float, list[tuple[int, int]]]:
        """Seconds to the first token of one more request beside all others but one; and where nobody else
        runs, when each of these requests ran."""
        tasks.pop().cancel()
        del self._num_tokens[point.concurrency - 1], self._lengths[point.concurrency - 1]
        await asyncio.sleep(0.1)
        seconds, ran_ns = [], []
        for _ in range(FIRST_TOKENS):
            began_ns = time.monotonic_ns()
            stream = self._llm.generate({"prompt_token_ids": self._prompt(point.prompt)}, _sampling(2))
            async with contextlib.aclosing(stream):
                await anext(stream)
                seconds.append((time.monotonic_ns() - began_ns) / 1e9)
                async for _output in stream:
                    pass
            ran_ns.append((began_ns, time.monotonic_ns()))
            await asyncio.sleep(self._random.uniform(0.02, 0.12))
        return statistics.median(seconds), ran_ns if point.concurrency == 1 else []

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

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, self._vocab_size) for _ in range(num_tokens)]

    async def _spans(self) -> list[StageSpans]:
        return await (await self._llm._running()).engine.trace()

    @staticmethod
    def _check(tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                task.result()


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


def _decodes(spans: Sequence[StageSpans], began_ns: int, ended_ns: int, context: int) -> list[StepSample]:
    return [
        sample._replace(shape=StepShape(num_tokens, num_tokens * context, num_tokens))
        for report in spans
        for at_ns, num_tokens, sample in _steps(report)
        if began_ns <= at_ns < ended_ns
    ]


def _chunks(spans: Sequence[StageSpans], ran_ns: Sequence[tuple[int, int]], prompt: int) -> list[StepSample]:
    """The chunks of prompts of requests that ran one after the other; decodes between them are left out."""
    found = []
    steps = [each for report in spans for each in _steps(report)]
    for began_ns, ended_ns in ran_ns:
        start = 0
        for at_ns, num_tokens, sample in steps:
            if began_ns <= at_ns < ended_ns and start < prompt:
                is_last = start + num_tokens >= prompt
                shape = StepShape(num_tokens, attended_by(start, num_tokens), int(is_last))
                found.append(sample._replace(shape=shape))
                start += num_tokens
    return found


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
            shape=own[len(own) // 2].shape,
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

    @classmethod
    def of(cls, measured: Sequence[Measured], num_stages: int, sizes: ModelSizes) -> Calibrated:
        """Learn from the points of the calibration: first what stages take, then what lies between steps."""
        model = CostModel(num_stages)
        decodes: dict[bool, list[list[StepSample]]] = {}
        for alone in (False, True):
            decodes[alone] = [[] for _ in range(num_stages)]
        for stage in range(num_stages):
            for each in measured:
                is_alone = each.point.concurrency == 1
                decodes[is_alone][stage] += typical(each.samples[stage])
            chunks = [sample for each in measured for sample in typical(each.prefills[stage])]
            if num_stages == 1:
                both = decodes[True][stage] + decodes[False][stage]
                decodes[True][stage] = decodes[False][stage] = both
            model.learn(stage, decodes[True][stage] + chunks, alone=True)
            if num_stages > 1:
                model.learn(stage, decodes[False][stage] + chunks, alone=False)
        of_many, of_one = model.costs(), model.costs(alone=True)
        assert of_many is not None, "every stage reports"
        assert of_one is not None, "one request alone was measured"
        known = cls(
            shared=list(map(observed, of_many, decodes[False])),
            alone=list(map(observed, of_one, decodes[True])),
        )
        known = replace(known, turns=known._turns(measured, sizes))
        both_depths = [replace(known, plans_ahead=ahead) for ahead in (0, 1)]
        best = min(both_depths, key=lambda each: each._first_token_error(measured, sizes))
        return best

    def _turns(self, measured: Sequence[Measured], sizes: ModelSizes) -> Turns:
        """What is left of the measured cycles, as a line over the rows of a micro-batch; and what is left of
        first tokens where nobody else runs."""
        rests = []
        for each in measured:
            predicted = self.predict(each.point, each.context, sizes)
            rows = -(-each.point.concurrency // predicted.micro_batches)
            rests.append((rows, each.time_per_token_s - predicted.time_per_token_s))
        row_s = max(0.0, _slope([rests]) or 0.0)
        step_s = max(0.0, statistics.mean(rest - row_s * rows for rows, rest in rests))
        firsts = [
            each.ttft_s - self.predict(each.point, each.context, sizes).ttft_s
            for each in measured
            if each.point.concurrency == 1
        ]
        return Turns(step_s=step_s, row_s=row_s, request_s=max(0.0, statistics.mean(firsts)))

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
        )
        links = [link] * len(self.shared)
        return predict(self.shared, links, 1 << 40, load, sizes, alone=self.alone)


def observed(cost: StageCost, samples: Sequence[StepSample]) -> StageTimes:
    """Return the times of a stage: its learnt cost, and of decodes the means by rows, without attention.

    What attention takes in decodes is learnt from those of as many rows with other contexts. Without such it
    counts as in prompts, though a decode reads keys and values for a single token.
    """
    by_rows: dict[int, list[tuple[int, float]]] = {}
    for sample in samples:
        seconds = sample.forward_s + (sample.sample_s or 0.0) + sample.overhead_s
        by_rows.setdefault(sample.shape.tokens, []).append((sample.shape.attended, seconds))
    slope = _slope(list(by_rows.values()))
    per_attended = cost.per_attended if slope is None else max(0.0, slope)
    decodes = (
        (rows, statistics.mean(max(0.0, seconds - per_attended * attended) for attended, seconds in own))
        for rows, own in by_rows.items()
    )
    return ObservedTimes(cost=cost, per_attended=per_attended, decodes=tuple(sorted(decodes)))


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
        "enable_prefix_caching": False,
        "speculative_method": "off",
        **more,
    }
    async with AsyncLLM(model, **settings) as llm:
        yield llm


async def run_layout(label: str, model: str, pp: int, tp: int, options: argparse.Namespace) -> list[Errors]:
    """Print a row for each point; returns their errors."""
    sizes = read_sizes(ModelConfig(model=model))
    errors = []
    async with running(model, pp, tp) as llm:
        engine = Engine(llm, pp, sizes.spec.vocab_size, options.window_s)
        fixed = [Point(*each) for each in CALIBRATION if each[0] * each[1] <= options.max_tokens]
        calibrated = Calibrated.of([await engine.measure(point) for point in fixed], pp, sizes)
        for point in draw(options.seed, f"{label} {pp}x{tp}", options.points, options.max_tokens):
            measured = await engine.measure(point)
            predicted = calibrated.predict(point, measured.context, sizes)
            errors.append(errors_of(measured, predicted))
            print(row([label, f"{pp}x{tp}"], measured, predicted), flush=True)
    return errors


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


async def run(options: argparse.Namespace, half_b: Path) -> None:
    print("| model | layout | at once | prompt | ms per token | first token, ms | bubble, % |")
    print("|---|---|---|---|---|---|---|")
    of_models: dict[str, list[Errors]] = {}
    for label in options.models.split(","):
        model = label if label == "demo" else str(half_b)
        for layout in options.layouts.split(","):
            pp, tp = map(int, layout.split("x"))
            of_models.setdefault(label, []).extend(await run_layout(label, model, pp, tp, options))
    print()
    for label, errors in of_models.items():
        print(f"{label}: mean absolute errors over {len(errors)} points: {mean_errors(errors)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=LAYOUTS, help="stages x ranks of each")
    parser.add_argument("--points", type=int, default=6, help="of each model and layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of all prompts of a point together")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as scratch:
        half_b = Path(scratch, "0.5B")
        if "0.5B" in options.models:
            make_checkpoint(half_b, FULL_SHAPE)
        asyncio.run(run(options, half_b))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

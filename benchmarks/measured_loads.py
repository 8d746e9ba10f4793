"""An engine that runs, measured at a load: time per token, first token, bubble, and the steps of its stages.

So many requests decode at once. The time per token and the bubble are those of a window in which all of them
do. The first token is that of one more request, sent while all others decode, the median of several.
`plan_accuracy.py`, `plan_accuracy_hosts.py` and `simulate_accuracy.py` measure by it.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from penstock import AsyncLLM, SamplingParams
from penstock.batch import StageSpans
from penstock.config.engine import SchedulerConfig
from penstock.engine.core.cost_learning import OVERHEAD, step_times
from penstock.scheduler.cost_model import StepSample, StepShape, attended_by
from penstock.scheduler.pacing import MIN_CHUNK
from penstock.trace.phases import BUSY

MAX_CONCURRENCY = 64
MAX_LEN = 2048
SETTLE_TOKENS = 4  # of each request, before a window begins
NEAR_THE_END = 64  # tokens: of a request that ends soon
REPORT_S = 1.6  # a stage reports about once a second
FIRST_TOKENS = 15  # requests whose first token is timed at a point, in each round
LOOK_S = 0.02  # between two looks at how long the requests are
COUNTED = (*BUSY, *OVERHEAD)

Length = tuple[int, float]  # nanoseconds, and tokens of a request then, prompt and answer
Ran = tuple[int, int, float]  # nanoseconds of a request's start and end, and tokens of the others then


class ChunkSample(NamedTuple):
    """The times of a plan with a chunk of a prompt, and decodes beside it.

    Attributes:
        step: the times; the attention in its shape is that of the chunk alone.
        beside: positions that the decodes attended to.
    """

    step: StepSample
    beside: int

    def scaled(self, factor: float) -> ChunkSample:
        """Return what a machine would have reported that takes so many times as long."""
        return self._replace(step=_slower(self.step, factor))


def _slower(step: StepSample, factor: float) -> StepSample:
    return step._replace(
        forward_s=factor * step.forward_s,
        sample_s=factor * (step.sample_s or 0.0),
        overhead_s=factor * step.overhead_s,
    )


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
    chunks: list[list[ChunkSample]]

    def scaled(self, factor: float) -> Measured:
        """Return what a machine would have measured that takes so many times as long."""
        return replace(
            self,
            time_per_token_s=factor * self.time_per_token_s,
            ttft_s=factor * self.ttft_s,
            samples=[[_slower(step, factor) for step in own] for own in self.samples],
            chunks=[[chunk.scaled(factor) for chunk in own] for own in self.chunks],
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
                _chunks(_of_stage(later, stage), ran, point, max(1, usual_tokens(samples[stage])))
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


def scheduler_config() -> SchedulerConfig:
    return msgspec.structs.replace(SchedulerConfig(), max_num_seqs=MAX_CONCURRENCY)


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
    seconds = [seconds_of(sample) for sample in samples if sample.shape.tokens == most]
    return statistics.stdev(seconds) / statistics.mean(seconds) if len(seconds) > 1 else 0.0


def seconds_of(sample: StepSample) -> float:
    return sample.forward_s + (sample.sample_s or 0.0) + sample.overhead_s


def usual_tokens(samples: Sequence[StepSample]) -> int:
    """The number of tokens that most steps have; 0 without steps."""
    numbers = collections.Counter(sample.shape.tokens for sample in samples)
    return numbers.most_common(1)[0][0] if numbers else 0


def _chunks(spans: Sequence[StageSpans], ran: Sequence[Ran], point: Point, usual: int) -> list[ChunkSample]:
    """The plans with chunks of the requests that came one after the other, beside all others but one.

    Plans that are hardly larger than those of decodes are left out.

    Args:
        usual: tokens of a plan without prompts.
    """
    found = []
    micro_batches = max(1, round(point.concurrency / usual))
    rows = round((point.concurrency - 1) / micro_batches)
    least = rows + (MIN_CHUNK if rows else 1)
    steps = [each for report in spans for each in _steps(report)]
    for began_ns, ended_ns, length in ran:
        start = 0
        for at_ns, num_tokens, sample in steps:
            if began_ns <= at_ns < ended_ns and start < point.prompt and num_tokens >= least:
                count = num_tokens - rows
                is_last = start + count >= point.prompt
                shape = StepShape(num_tokens, attended_by(start, count), rows + is_last)
                found.append(ChunkSample(sample._replace(shape=shape), round(rows * length)))
                start += count
    return found

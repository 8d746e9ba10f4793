"""The predicted speed of a pipe by the times of its stages: first token, time per token, throughput, bubble.

The chunks of prompts and the number of micro-batches follow from the scheduler's own rules
(`scheduler.pacing`). When plans pass the stages then follows from `layouts.recurrence`. Requests are not
simulated (`simulator` does that). All running requests are taken to decode, and the time to the first token
is that of one more request which comes meanwhile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config.engine import PLANS_ON_WIRES, CacheConfig, SchedulerConfig
from penstock.layouts.devices import Link
from penstock.layouts.model_sizes import ModelSizes
from penstock.layouts.recurrence import SETTLE, Passage, SteadyState, pass_plans, steady_state, varied
from penstock.layouts.stage_times import StageTimes, learnt_cost
from penstock.pipeline.links.frame import NUM_CARRIED
from penstock.planner.mix import Mix
from penstock.scheduler.chunking import TokenBudget
from penstock.scheduler.cost_model import StageCost, StepShape, attended_by
from penstock.scheduler.pacing import FixedDepth, Pacing, PlainPacing, WireTime, cycle_seconds

NO_STEP = StepShape(0, 0, 0)

_TOKEN_BYTES = 64  # of the message that brings samples back from the last stage
_FEW = 16  # every number of micro-batches up to this one is tried; beyond it, every fourth
_DRAWS = 32  # of the times of a prompt's steps, for each moment at which it comes, where like steps differ
_MOMENTS = 8  # at which a prompt comes between two plans
_MIN_GAIN = 0.05  # the share by which another number of micro-batches must shorten the cycle to be taken


class TurnTime(NamedTuple):
    """The seconds from a result to the plan that needs it.

    Attributes:
        step_s: seconds for any plan.
        row_s: seconds besides, for each row of the plan.
    """

    step_s: float = 0.0
    row_s: float = 0.0


_NO_TIME = TurnTime()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The seconds for which the core and the API process hold up a request, and no stage computes for it.

    Attributes:
        shared: from a result to its plan, while other plans compute.
        alone: the same while no other plan computes: the core then finds a processor free.
        request_s: seconds that a request takes from the client to its first plan, and its first token from
            the core back to the client, if nobody else runs: all processes sleep when it comes.
        others_s: the same while another request decodes, which keeps the processes awake.
    """

    shared: TurnTime = _NO_TIME
    alone: TurnTime = _NO_TIME
    request_s: float = 0.0
    others_s: float = 0.0

    def ways_s(self, num_decoding: int) -> float:
        """Return the seconds that the ways of a request and of its first token take beside so many decodes.

        They grow like the root of the number. Of the curves that were tried on three recordings of five
        layouts, lines among them, it fitted best (benchmarks/plan_accuracy.py).
        """
        return self.others_s * math.sqrt(num_decoding) if num_decoding else self.request_s

    def seconds(self, num_rows: int, *, alone: bool = False) -> float:
        """Return the seconds from a result to the plan that needs it, if that plan has so many rows.

        Args:
            alone: no other plan computes.
        """
        own = self.alone if alone else self.shared
        return own.step_s + own.row_s * num_rows


NO_TURNS = Turns()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests and settings for which a layout is judged.

    Attributes:
        concurrency: requests that clients have open at once, over all replicas.
        mix: prompt tokens and output tokens of a typical request.
        max_model_len: tokens of the longest request.
        turns: seconds between and around the steps, as measured.
        plans_ahead: plans that wait at the first stage for their turn (`async_depth`).
        spread: the standard deviation of the times that a stage takes for like steps, as a share of their
            mean. Programs that share the cores with the stages make it large.
    """

    concurrency: int
    mix: Mix
    max_model_len: int
    scheduler: SchedulerConfig
    cache: CacheConfig
    turns: Turns = NO_TURNS
    plans_ahead: int = 0
    spread: float = 0.0

    def of_replica(self, dp: int) -> int:
        """Return how many of the requests at once go to the replica that gets most, if there are `dp`."""
        return -(-self.concurrency // dp)

    @property
    def context(self) -> int:
        """The number of tokens that a running request has in the KV cache, on average."""
        return self.mix.mean_length(self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted speed of a layout.

    Attributes:
        ttft_s: seconds from the arrival of a request to its first token, while all other requests decode.
        prefill_s: the same, on an idle pipe.
        time_per_token_s: seconds from one token of a request to its next, while all requests decode.
        tokens_per_s: output tokens a second of all requests and replicas, while all requests decode.
        requests_per_s: typical requests a second, prompt and output, that the slowest stage allows in a full
            pipe, over all replicas.
        bubble: the share of the stages' time in which they do not compute, while all requests decode.
        micro_batches: number of micro-batches of a replica.
        running: requests that run at once, over all replicas: as many as find KV memory and rows, and at most
            the concurrency.
        stage_s: for each stage, the seconds that it takes for one micro-batch.
    """

    ttft_s: float
    prefill_s: float
    time_per_token_s: float
    tokens_per_s: float
    requests_per_s: float
    bubble: float
    micro_batches: int
    running: int
    stage_s: tuple[float, ...]


def carried_bytes(sizes: ModelSizes, num_tokens: int) -> int:
    """Return the bytes that a link between stages carries for a step of so many tokens."""
    return NUM_CARRIED * sizes.hop_bytes(num_tokens) // 2


def predict(
    times: Sequence[StageTimes],
    links: Sequence[Link],
    capacity: int,
    load: Load,
    sizes: ModelSizes,
    dp: int = 1,
    alone: Sequence[StageTimes] | None = None,
) -> Prediction:
    """Return the predicted speed of a pipe.

    Args:
        times: times of each stage, while the other stages compute too.
        links: from each stage to the next, and from the last to the first.
        capacity: tokens of KV cache of the stage that has room for the fewest.
        dp: number of replicas.
        alone: times of each stage, while no other stage computes; None: they are equal to `times`.
    """
    pipeline = _Pipe(
        times=times,
        alone=times if alone is None else alone,
        links=links,
        load=load,
        hop_bytes=lambda tokens: carried_bytes(sizes, tokens),
    )
    running = min(load.of_replica(dp), load.scheduler.max_num_seqs, max(1, capacity // load.context))
    micro_batches = pipeline.num_micro_batches(running)
    decoding = pipeline.steady(running, micro_batches)
    shape = pipeline.micro_batch(running, micro_batches)
    prompt_s = pipeline.prefill_s(0)
    ttft_s = prompt_s if running == 1 else pipeline.prefill_s(running - 1)
    at_once = min(running * dp, load.concurrency)
    return Prediction(
        ttft_s=ttft_s,
        prefill_s=prompt_s,
        time_per_token_s=decoding.cycle_s,
        tokens_per_s=at_once / decoding.cycle_s,
        requests_per_s=dp * pipeline.requests_per_s(running, micro_batches),
        bubble=decoding.bubble,
        micro_batches=micro_batches,
        running=at_once,
        stage_s=tuple(stage.seconds(shape) for stage in times),
    )


@dataclass(frozen=True, slots=True)
class _KnownCosts:
    """The costs of stages, in the form that the scheduler's rules read; nothing is learnt.

    Attributes:
        shared: costs while the other stages compute too.
        alone: costs while no other stage computes.
    """

    shared: list[StageCost]
    alone: list[StageCost]

    def costs(self, *, alone: bool = False) -> list[StageCost]:
        return self.alone if alone else self.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipe:
    """The pipe of one replica.

    Attributes:
        times, alone: times of the stages, while the others compute too, and while no other stage does.
        links: from each stage to the next, and from the last to the first.
        hop_bytes: returns the bytes that a link between stages carries for a step of so many tokens.
    """

    times: Sequence[StageTimes]
    alone: Sequence[StageTimes]
    links: Sequence[Link]
    load: Load
    hop_bytes: Callable[[int], int]

    def micro_batch(self, running: int, micro_batches: int) -> StepShape:
        """Return the shape of the largest micro-batch, if so many running requests are split into so many."""
        rows = -(-running // micro_batches)
        return StepShape(rows, rows * self.load.context, rows)

    def num_micro_batches(self, running: int) -> int:
        """Return the number of micro-batches into which the scheduler splits so many decoding requests.

        More micro-batches than stages are taken if that makes the cycle shorter, which is tried if a link is
        between hosts. Else the scheduler keeps the number that it has, unless another makes the cycle shorter
        by more than `_MIN_GAIN`. It begins with as many as stages. Where it learns costs, it has come down to
        one by then, since requests come one after the other.
        """
        stages = len(self.times)
        most = min(running, stages + (PLANS_ON_WIRES if self._has_wire else 0))
        numbers = sorted({min(running, stages), *(n for n in range(1, most + 1) if n <= _FEW or n % 4 == 0)})
        cycles_s = {number: self._cycle_s(running, number) for number in numbers}
        best = min(cycles_s, key=lambda number: (round(cycles_s[number], 9), number))
        full = min(running, stages)
        kept = full if isinstance(self._pacing, PlainPacing) else 1
        return best if best > full or cycles_s[best] < (1.0 - _MIN_GAIN) * cycles_s[kept] else kept

    @property
    def _has_wire(self) -> bool:
        return any(link.kind == "network" for link in self.links)

    def _stage_s(self, shape: StepShape, *, alone: bool, as_learnt: bool = False) -> list[float]:
        """Return the seconds that each stage takes for a step; equal times are computed only once.

        Args:
            alone: no other stage computes.
            as_learnt: by the cost that the scheduler has learnt, where there is one.
        """
        times = self.alone if alone else self.times
        distinct = {id(own): own for own in times}
        known = {key: learnt_cost(own) or own for key, own in distinct.items()} if as_learnt else distinct
        seconds = {key: own.seconds(shape) for key, own in known.items()}
        return [seconds[id(stage)] for stage in times]

    def _attention_s(self, decodes: StepShape, *, alone: bool) -> list[float]:
        """Return the seconds by which what decodes attend to lengthens their plan, for each stage."""
        whole_s = self._stage_s(decodes, alone=alone)
        plain_s = self._stage_s(decodes._replace(attended=0), alone=alone)
        return [whole - plain for whole, plain in zip(whole_s, plain_s, strict=True)]

    def _mixed_s(
        self, chunks: Sequence[tuple[int, int]], besides: Sequence[StepShape], *, alone: bool
    ) -> list[list[float]]:
        """Return, for each plan with a chunk of a typical prompt and decodes, the seconds of each stage.

        What the decodes attend to takes as long as in a plan of decodes alone.

        Args:
            chunks: position and length of the chunk of each plan.
            besides: the decodes of each plan.
            alone: no other stage computes.
        """
        attention_s = {beside: self._attention_s(beside, alone=alone) for beside in set(besides)}
        mixed_s = []
        for (start, count), beside in zip(chunks, besides, strict=True):
            samples = beside.samples + (start + count == self.load.mix.prompt)
            shape = StepShape(count + beside.tokens, attended_by(start, count), samples)
            seconds = self._stage_s(shape, alone=alone)
            mixed_s.append([own + more for own, more in zip(seconds, attention_s[beside], strict=True)])
        return mixed_s

    def _cycle_s(self, running: int, micro_batches: int) -> float:
        """Return the cycle by which the scheduler chooses: it knows learnt costs alone, where there are any.

        It knows no `Turns`, nor that steps differ.
        """
        shape = self.micro_batch(running, micro_batches)
        latency_s = self._way_back_s + sum(self._hops_s(shape.tokens))
        seconds = self._stage_s(shape, alone=micro_batches == 1, as_learnt=True)
        return cycle_seconds(seconds, micro_batches, latency_s)

    def steady(self, running: int, micro_batches: int) -> SteadyState:
        """Return the steady state while so many requests decode."""
        share = -(-running // micro_batches)
        rows = [min(share, running - start) for start in range(0, running, share)]
        shapes = [StepShape(count, count * self.load.context, count) for count in rows]
        return steady_state(
            [self._stage_s(shape, alone=len(rows) == 1) for shape in shapes],
            [self._hops_s(shape.tokens) for shape in shapes],
            self._return_s(share, alone=len(rows) == 1),
            spread=self.load.spread,
            ahead_s=self._ahead_s,
        )

    @property
    def _ahead_s(self) -> list[float]:
        """The seconds of each stage that need no hidden states, where they are known.

        Nearly all that a learnt cost has as overhead (rows, inputs) comes before the wait for hidden states.
        """
        costs = map(learnt_cost, self.times)
        return [0.0 if cost is None else cost.overhead for cost in costs]

    def _hops_s(self, num_tokens: int) -> list[float]:
        num_bytes = self.hop_bytes(num_tokens)
        return [link.seconds(num_bytes) for link in self.links[: len(self.times) - 1]]

    def _return_s(self, num_rows: int, *, alone: bool) -> float:
        """Return the seconds from the end of a micro-batch's step to its next step, if no stage is busy."""
        return self._way_back_s + self.load.turns.seconds(num_rows, alone=alone)

    @property
    def _way_back_s(self) -> float:
        """The seconds from the last stage to the first stage, which stand for those to the core too."""
        return self.links[-1].seconds(_TOKEN_BYTES) if len(self.times) > 1 else 0.0

    def prefill_s(self, num_decoding: int) -> float:
        """Return the mean seconds from the arrival of a prompt to its first token, while others decode.

        The prompt comes at any moment between two plans of decodes, and waits for plans issued ahead, which
        wait for their tokens. The more plans differ, the more requests come while a long one runs. Its chunks
        pass the pipe one after the other. While it runs, the decodes are split into at least as many plans as
        there are stages, and each chunk shares a plan with one part. Where they were in fewer plans before
        than fill the pipe, all decodes are under way when it comes, and its first chunk goes alone. The time
        for which the sampled token is on its way back counts too, and so does `Turns.ways_s`.
        """
        stages = len(self.times)
        busy_s, wait_s = [[0.0] * stages], 0.0
        decodes = first = NO_STEP
        if num_decoding:
            number = self.num_micro_batches(num_decoding)
            decodes = self.micro_batch(num_decoding, min(num_decoding, max(number, stages)))
            is_full = number >= self._filling(num_decoding, number)
            first = decodes if is_full else NO_STEP
            # Unless the micro-batches fill the pipe, the scheduler issues one plan more, but over long wires
            # none (`Scheduler.num_useful`).
            may_wait = is_full or not WireTime(sum(link.latency_s for link in self.links)).is_long
            waiting = self.load.plans_ahead + (not is_full) if may_wait else 0
            busy_s, wait_s = self._met(num_decoding, number, waiting=waiting)
        chunks = self._chunks(decodes, first)
        besides = [first, *[decodes] * (len(chunks) - 1)]
        stage_s = self._mixed_s(chunks, besides, alone=not num_decoding and 1 in (len(chunks), stages))
        hops_s = [
            self._hops_s(count + beside.tokens) for (_, count), beside in zip(chunks, besides, strict=True)
        ]
        ahead_s = self._ahead_s
        spread = self.load.spread if stages > 1 else 0.0  # a single stage waits for no other
        drawn_s = varied(lambda plan, stage: stage_s[plan][stage], spread)
        passages = [
            pass_plans(
                len(chunks),
                drawn_s,
                lambda plan, stage: hops_s[plan][stage],
                stages,
                free_s=free_s,
                ahead_s=ahead_s,
            )
            for free_s in busy_s * (_DRAWS if spread else 1)
        ]
        ends_s = statistics.fmean(passage.ends[-1] for passage in passages)
        return wait_s + ends_s + self._way_back_s + self.load.turns.ways_s(num_decoding)

    def _met(self, num_decoding: int, micro_batches: int, *, waiting: int) -> tuple[list[list[float]], float]:
        """Return what a prompt meets that comes while others decode, in so many plans that go round.

        Args:
            waiting: plans that are issued, and wait at the first stage for their tokens.

        Returns:
            For each of some moments, evenly from the start of one plan to that of the next: for each stage,
            the seconds until it has done all plans that are under way, and those issued ahead. And the
            seconds that the prompt waits besides, since long plans are met more often than short ones.
        """
        stages = len(self.times)
        shape, is_alone = self.micro_batch(num_decoding, micro_batches), micro_batches == 1
        stage_s, hops_s = self._stage_s(shape, alone=is_alone), self._hops_s(shape.tokens)
        return_s = self._return_s(shape.tokens, alone=is_alone)

        def after(num_plans: int) -> Passage:
            return pass_plans(
                num_plans,
                lambda _, stage: stage_s[stage],
                lambda _, stage: hops_s[stage],
                stages,
                period=micro_batches,
                return_s=return_s,
                ahead_s=self._ahead_s,
            )

        passage = after(SETTLE * micro_batches)
        started_s = passage.left[0] - stage_s[0]
        gap_s = max(passage.left[0], passage.ends[-micro_batches] + return_s) - started_s
        left = after(SETTLE * micro_batches + waiting).left if waiting else passage.left
        moments = [started_s + gap_s * (index + 0.5) / _MOMENTS for index in range(_MOMENTS)]
        slowest_s = max(stage_s)
        # Of a random interval that is met, half is left on average, and spread^2 / 2 more (Cox, 1962).
        uneven_s = 0.5 * self.load.spread**2 * slowest_s * min(1.0, slowest_s / gap_s)
        met = [[max(0.0, left_s - moment) for left_s in left] for moment in moments]
        return met, uneven_s

    def _filling(self, num_decoding: int, micro_batches: int) -> int:
        """Return how many plans of decodes fill the pipe, by `engine.core.plan_depth`."""
        stages = len(self.times)
        if not self._has_wire:
            return stages
        shape = self.micro_batch(num_decoding, micro_batches)
        seconds = self._stage_s(shape, alone=False)
        trip_s = sum(seconds) + sum(self._hops_s(shape.tokens)) + self._way_back_s
        return min(max(stages, math.ceil(trip_s / max(seconds))), stages + PLANS_ON_WIRES)

    def _chunks(self, decodes: StepShape, first: StepShape = NO_STEP) -> list[tuple[int, int]]:
        """Return position and length of each chunk of a typical prompt, as the scheduler cuts it.

        Args:
            decodes: the decodes that share a plan with each chunk but the first.
            first: those that share the plan of the first chunk.
        """
        prompt, start = max(1, self.load.mix.prompt), 0
        chunks: list[tuple[int, int]] = []
        while start < prompt:
            in_flight = sum(count for _, count in chunks[len(chunks) - len(self.times) + 1 :])
            budget = self._pacing.prompt_budget(
                decodes if chunks else first,
                anybody_decodes=decodes.tokens > 0,
                backlog=prompt - start + in_flight,
            )
            count = max(1, budget.take(start, prompt - start))
            chunks.append((start, count))
            start += count
        return chunks

    @property
    def _pacing(self) -> Pacing | PlainPacing:
        """The rules by which the scheduler sizes chunks: by time if all costs are learnt ones, else plain."""
        scheduler, stages = self.load.scheduler, len(self.times)
        budget, depth = TokenBudget.from_config(scheduler, stages), FixedDepth(stages)
        shared = [cost for cost in map(learnt_cost, self.times) if cost is not None]
        alone = [cost for cost in map(learnt_cost, self.alone) if cost is not None]
        if len(shared) < stages or len(alone) < stages:
            return PlainPacing(budget, depth)
        target_s = scheduler.inter_token_target_ms / 1000
        return Pacing(_KnownCosts(shared, alone), budget, depth, inter_token_target_s=target_s)

    def requests_per_s(self, running: int, micro_batches: int) -> float:
        """Return how many typical requests a second the slowest stage allows, with prefill and decodes."""
        shape = self.micro_batch(running, micro_batches)
        slowest = max(self._request_s(stage, shape) for stage in self.times)
        return 1.0 / slowest

    def _request_s(self, stage: StageTimes, shape: StepShape) -> float:
        prompt_s = sum(
            stage.seconds(StepShape(count, attended_by(start, count), 0))
            for start, count in self._chunks(NO_STEP)
        )
        return (
            prompt_s * (self.load.mix.prompt > 0) + self.load.mix.output * stage.seconds(shape) / shape.tokens
        )

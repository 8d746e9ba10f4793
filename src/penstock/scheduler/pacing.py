"""Sizes plans by time: micro-batches of equal length, and none that delays other requests for long.

It answers three questions of `scheduler.placement` from the costs of the stages (`scheduler.cost_model`):

- Into how many micro-batches are the decoding requests split? Into as many as fill the pipe (`PlanDepth`),
  unless fewer give a shorter cycle (the time between two tokens of a request). Fewer can be faster, since
  each micro-batch reads the weights again [d10].
- How many prompt tokens may a plan take beside its decodes? As many as keep the cycle below the inter-token
  target, but at least as many as lengthen the plan by half, or a slow machine would never finish a prompt.
  Tokens that are multiplied while the weights are read cost nothing.
- How large are chunks where the target does not limit them? A prompt of N tokens in chunks of n passes P
  stages in (N / n + P - 1) (overhead + per_token n) seconds. This is least for n = sqrt(N overhead /
  ((P - 1) per_token)). Three rules change this n:

  - The chunk is at least so large that multiplying takes as long as reading the weights.
  - The prompt may take 3 % longer for larger chunks, because smaller ones lose if reading is slower than it
    was measured. Beside decodes the chunk is not enlarged so, and the time of the plan without prompts stands
    in place of the overhead.
  - Chunks late in a long context are smaller, so that they take as long as the first.

So sizes of chunks follow from measured times, and differ from run to run. With our kernels that changes no
token, because a number does not depend on what is computed together with it. torch does not promise that:
where a rank computes with torch there is no cost model, and `scheduler.chunking` cuts by plain rules.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from penstock.scheduler.chunking import PromptBudget, TokenBudget
from penstock.scheduler.cost_model import StageCost, StepShape, attended_by
from penstock.scheduler.plan_builder import PlanBuilder

MIN_CHUNK = 8  # tokens; fewer cost hardly less, since a stage reads all its weights for them
_GRAIN = 4  # chunks that do not end a prompt are whole multiples of it
_LENGTHEN = 1.5  # prompts may lengthen a plan to this many times its decodes' time, whatever the target
_MIN_GAIN = 0.05  # the part of the cycle that another number of micro-batches must save to be chosen
_LATE_CHUNK = 4  # a chunk late in the context has at least a quarter of the first one's tokens
_SLACK = 0.03  # the part of a prompt's least time that it may take longer for the sake of larger chunks
_NEGLIGIBLE_S = 1e-9
_LONG_WIRE_S = 0.01  # the core's 0.3 ms from a result to the next plan are next to nothing of such a round


class WireTime(NamedTuple):
    """The time that a plan takes between the stages and back, in seconds.

    Attributes:
        latency: seconds of all links together, whatever they carry.
        per_token: seconds that one link takes for the hidden states of a token.
        num_links: links between hosts. Each carries one plan at a time, as a stage computes one at a time.
    """

    latency: float = 0.0
    per_token: float = 0.0
    num_links: int = 0

    @property
    def is_long(self) -> bool:
        """Whether a round takes so long that next to nothing is gained by a plan that waits for its token."""
        return self.latency >= _LONG_WIRE_S

    def of_links(self, num_tokens: int) -> list[float]:
        """Return the seconds for which a plan of `num_tokens` tokens occupies each link, one entry a link."""
        return [self.per_token * num_tokens] * self.num_links


NO_WIRE_TIME = WireTime()


class PlanDepth(Protocol):
    """The number of plans in flight that keep all stages busy; it may change while the engine runs.

    Attributes:
        number: how many plans fill the pipe now.
        largest: largest value that `number` may take; memory for so many plans in flight is allocated.
        wire: the time that plans take between stages.
    """

    number: int
    largest: int
    wire: WireTime

    def planned(self, plan: PlanBuilder) -> None:
        """Record the size of a plan that has just been made, for the choice of `number`; it may be empty."""


class Costs(Protocol):
    """A source of the costs of the stages, in seconds; `CostModel` implements it."""

    def costs(self, *, alone: bool = False) -> list[StageCost] | None:
        """Return the cost of each stage, in their order; None while any stage's is unknown.

        Args:
            alone: return the costs while no other stage computes; else those while others compute as well.
        """
        ...


class FixedDepth:
    """A depth that never changes: one plan in flight for each stage, where no slow wires lie between.

    Args:
        num_stages: the stages of the pipeline.
    """

    wire = NO_WIRE_TIME

    def __init__(self, num_stages: int) -> None:
        self.number = self.largest = num_stages

    def planned(self, plan: PlanBuilder) -> None:
        """Do nothing, since the depth never changes."""


class Pacing:
    """Sizes plans by the seconds that they take: splits decoding requests, and limits prompts beside them.

    Args:
        model: the costs of the stages, which may change at any time.
        budget: the token limits of a plan, which hold in any case.
        depth: how many plans fill the pipe, and how long plans are on the wires between stages.
        inter_token_target_s: seconds that should pass at most between two tokens of a request while prompts
            run beside it.
    """

    def __init__(
        self, model: Costs, budget: TokenBudget, depth: PlanDepth, *, inter_token_target_s: float
    ) -> None:
        self._model = model
        self._budget = budget
        self._depth = depth
        self._target_s = inter_token_target_s
        self._num_micro_batches = depth.number

    def num_micro_batches(self, num_decoding: int, attended: int) -> int:
        """Return into how many micro-batches (plans that go round in turn) to split the decoding requests.

        The choice supposes that no prompts run, and has the shortest cycle by the stages' costs. It is at
        most `PlanDepth.largest`: more would lengthen the cycle, since the slowest stage runs all of them. The
        last choice is kept unless another is clearly better; a last choice above the number of stages is
        not kept. While the costs are unknown, or nothing decodes, the choice is what fills the pipe.

        Args:
            num_decoding: requests that decode.
            attended: positions that their next tokens attend to, all together.
        """
        shared, alone = self._model.costs(), self._model.costs(alone=True)
        if num_decoding == 0 or shared is None or alone is None:
            return self._depth.number
        wire = self._depth.wire

        def cycle_s(micro_batches: int) -> float:
            rows = -(-num_decoding // micro_batches)
            shape = StepShape(rows, attended // micro_batches, rows)
            seconds = [cost.seconds(shape) for cost in (alone if micro_batches == 1 else shared)]
            return cycle_seconds(seconds + wire.of_links(rows), micro_batches, wire.latency)

        cycles_s = {number: cycle_s(number) for number in self._splits(num_decoding)}
        best = min(cycles_s, key=cycles_s.__getitem__)
        current = min(self._num_micro_batches, num_decoding)
        if current > self._budget.num_stages or cycles_s[best] < (1.0 - _MIN_GAIN) * cycles_s[current]:
            current = best
        self._num_micro_batches = current
        return current

    def _splits(self, num_decoding: int) -> list[int]:
        """Return the numbers of micro-batches to choose from, in order.

        A number above that of stages is left out if micro-batches get no smaller than with one fewer.
        """
        few, most = self._budget.num_stages, min(self._depth.largest, num_decoding)
        splits = list(range(1, min(few, most) + 1))
        splits += [n for n in range(few + 1, most + 1) if -(-num_decoding // n) < -(-num_decoding // (n - 1))]
        return splits

    def prompt_budget(self, decodes: StepShape, *, anybody_decodes: bool, backlog: int) -> PromptBudget:
        """Return the room for chunks of prompts in one plan, by time; by tokens while costs are unknown.

        Args:
            decodes: the size of this plan's decodes.
            anybody_decodes: whether a request decodes in this plan or another, and so waits for the cycle.
            backlog: prompt tokens that wait or are in flight.
        """
        costs = self._model.costs()
        if costs is None:
            return self._budget.for_prompts(decodes.tokens, backlog)
        share = self._share(costs, backlog, decodes)
        first = min(share, self._budget.chunk)
        seconds = [
            self._seconds_beside(cost, decodes) if anybody_decodes else _multiplying(cost, 0, first)
            for cost in costs
        ]
        return TimedBudget(
            costs,
            seconds,
            num_tokens=min(share, self._budget.max_tokens - decodes.tokens),
            max_chunk=self._budget.chunk,
            min_chunk=MIN_CHUNK if anybody_decodes else max(MIN_CHUNK, share // _LATE_CHUNK),
        )

    def _share(self, costs: list[StageCost], backlog: int, decodes: StepShape) -> int:
        """Return how many prompt tokens one plan should take, so that all pass the pipe soonest.

        That is at most one part of the backlog for each stage, so that the plans in flight are alike, but at
        least `MIN_CHUNK`.
        """
        share = -(-backlog // self._budget.num_stages)
        if self._budget.num_stages > 1:
            share = min(share, max(self._soonest(cost, backlog, decodes) for cost in costs))
        return max(share, MIN_CHUNK)

    def _soonest(self, cost: StageCost, backlog: int, decodes: StepShape) -> int:
        """Return the chunk size, in tokens, with which the backlog passes the pipe about soonest."""
        per_token = max(cost.per_token, _NEGLIGIBLE_S)
        fixed_s = cost.seconds(decodes) if decodes.tokens else cost.overhead
        others = self._budget.num_stages - 1
        best = max(math.sqrt(backlog * fixed_s / (others * per_token)), cost.read / per_token)
        if decodes.tokens:
            return round(min(best, backlog))
        # The time is (N / n + P - 1) (fixed + per_token n). Of it N fixed / n + (P - 1) per_token n varies
        # with n. The largest n whose time is within the slack solves a quadratic equation.
        once_s, each_s = backlog * fixed_s, others * per_token
        varying_s = once_s / best + each_s * best
        whole_s = varying_s + backlog * per_token + others * fixed_s
        half = (varying_s + _SLACK * whole_s) / 2.0
        largest = (half + math.sqrt(half * half - each_s * once_s)) / each_s
        return round(min(largest, backlog))

    def _seconds_beside(self, cost: StageCost, decodes: StepShape) -> float:
        """Return the seconds that a stage may spend on prompts in a plan that decodes wait for."""
        alone_s = cost.seconds(decodes)
        until_s = max(self._target_s / self._depth.number, _LENGTHEN * alone_s)
        # Time left while the weights are read: prompt tokens can be multiplied in it for nothing.
        return until_s - alone_s + max(0.0, cost.read - cost.per_token * decodes.tokens)


class PlainPacing:
    """Sizes plans without times, where these are unknown or would change tokens.

    Decoding requests are split into as many plans as fill the pipe, and chunks of prompts have the configured
    size.

    Args:
        budget: the token limits of a plan.
        depth: how many plans fill the pipe.
    """

    def __init__(self, budget: TokenBudget, depth: PlanDepth) -> None:
        self._budget = budget
        self._depth = depth

    def num_micro_batches(self, num_decoding: int, attended: int) -> int:
        """Return into how many micro-batches the decoding requests are split: as many as fill the pipe.

        Where slow wires make more plans than stages fill the pipe, there may be some more micro-batches, so
        that all are about equally large. `attended` is not used.
        """
        number = self._depth.number
        if number <= self._budget.num_stages:
            return number
        rows = max(1, num_decoding // number)
        return max(number, min(-(-num_decoding // rows), self._depth.largest))

    def prompt_budget(self, decodes: StepShape, *, anybody_decodes: bool, backlog: int) -> PromptBudget:
        return self._budget.for_prompts(decodes.tokens, backlog)


class TimedBudget:
    """The room for prompt chunks that is left in a plan: seconds of each stage, and tokens.

    Args:
        costs: the cost of each stage.
        seconds: the seconds that each stage may still spend on prompts; the budget changes this list.
        num_tokens: prompt tokens that the plan may still take.
        max_chunk: most tokens of a chunk.
        min_chunk: tokens that the plan's first chunk may have, even if their time exceeds `seconds`.
    """

    def __init__(
        self, costs: list[StageCost], seconds: list[float], *, num_tokens: int, max_chunk: int, min_chunk: int
    ) -> None:
        self._costs = costs
        self._seconds = seconds
        self._num_tokens = num_tokens
        self._max_chunk = max_chunk
        self._min_chunk = min_chunk
        self._is_untouched = True

    def take(self, start: int, remaining: int) -> int:
        """Return how many tokens the next chunk of a prompt gets, and take them and their time from the room.

        The first chunk of a plan is never refused for lack of time, so that prompts advance whatever the
        target is.

        Args:
            start: the position of the chunk's first token.
            remaining: the tokens to prefill from there on.

        Returns:
            At most `remaining`; 0 if there is no room.
        """
        wanted = min(self._max_chunk, remaining, self._num_tokens)
        if wanted <= 0:
            return 0
        room = min(map(_tokens_in, self._costs, self._seconds, [start] * len(self._costs)))
        if self._is_untouched:
            room = max(room, self._min_chunk)
        num_tokens = min(wanted, room)
        if num_tokens < remaining:
            num_tokens -= num_tokens % _GRAIN
            if num_tokens == 0 and self._is_untouched:
                num_tokens = min(wanted, _GRAIN)
        if num_tokens:
            self._spend(start, num_tokens)
        return num_tokens

    def _spend(self, start: int, num_tokens: int) -> None:
        for stage, cost in enumerate(self._costs):
            self._seconds[stage] -= _multiplying(cost, start, num_tokens)
        self._num_tokens -= num_tokens
        self._is_untouched = False


def cycle_seconds(stage_seconds: list[float], micro_batches: int, latency: float = 0.0) -> float:
    """Return the seconds between two tokens of a request while `micro_batches` equal plans go round the pipe.

    A micro-batch passes all stages one after the other, and the slowest stage runs all micro-batches.

    Args:
        stage_seconds: what each stage, and each link between hosts, takes for one micro-batch.
        latency: seconds that a micro-batch is on all wires, there and back.
    """
    return max(sum(stage_seconds) + latency, micro_batches * max(stage_seconds))


def _multiplying(cost: StageCost, start: int, num_tokens: int) -> float:
    """Return the seconds that a chunk adds to a plan that is bound by arithmetic."""
    return cost.per_token * num_tokens + cost.per_attended * attended_by(start, num_tokens)


def _tokens_in(cost: StageCost, seconds: float, start: int) -> int:
    """Return the largest n with per_token n + per_attended (n start + n^2 / 2) <= seconds."""
    if seconds <= 0.0:
        return 0
    linear = cost.per_token + cost.per_attended * start
    root = math.sqrt(linear * linear + 2.0 * cost.per_attended * seconds)
    return int(2.0 * seconds / max(linear + root, _NEGLIGIBLE_S))

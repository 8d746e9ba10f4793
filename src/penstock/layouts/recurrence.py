"""Computes when micro-batches pass the stages of a pipe: a recurrence of maxima and sums, without a clock.

    start(k, s) = max( end(k, s-1) + hop(s-1),  end(k-1, s) )          k: plans in their order; s: stages
    start(k, 0) = max( token(k),  end(k-1, 0) )

`hop(s-1)` is the time from stage s-1 to stage s. What a stage does for a plan before it needs hidden states
("ahead"), it does as soon as it is free and has the plan, which all stages get together. `token(k)` is when
the first stage has the token that plan k continues from: the one of the same micro-batch's step before. It is
0 for a plan that waits for no token. If all P stages are equally fast, closed forms follow: a single
micro-batch leaves (P - 1) / P of the stages' time idle, and M micro-batches that pass once leave
(P - 1) / (M + P - 1) of it idle [I10].

Where the times of like steps differ, stages wait for each other more often: of a maximum of random times, the
mean is above the maximum of the means. The steady state then follows from times that are drawn at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The times of plans that have passed a pipe.

    Attributes:
        ends: [plan] seconds from the start of the first plan until this one left the last stage.
        left: [stage] the same for the last plan, until it left this stage.
        busy_s: [stage] seconds for which this stage computed.
    """

    ends: list[float]
    left: list[float]
    busy_s: list[float]

    @property
    def bubble(self) -> float:
        """The share of all stages' time, up to the end of the last plan, in which they do not compute."""
        whole = max(self.ends) * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / whole if whole else 0.0


def pass_plans(
    num_plans: int,
    stage_s: Callable[[int, int], float],
    hop_s: Callable[[int, int], float],
    num_stages: int,
    *,
    period: int | None = None,
    return_s: float = 0.0,
    free_s: Sequence[float] | None = None,
    ahead_s: Sequence[float] | None = None,
) -> Passage:
    """Return when the plans pass the stages of a pipe.

    Args:
        stage_s: (plan, stage) -> seconds for which the stage computes the plan.
        hop_s: (plan, stage that sends) -> seconds until the next stage has the hidden states.
        period: plan k needs the result of plan k - period; None: plans need no results.
        return_s: seconds that this result takes from the last stage to the first.
        free_s: [stage] seconds until this stage is free for the first plan; None: all are free.
        ahead_s: [stage] those of its seconds for which this stage needs no hidden states; None: 0 everywhere.
    """
    free = [0.0] * num_stages if free_s is None else list(free_s)
    ahead = [0.0] * num_stages if ahead_s is None else ahead_s
    busy = [0.0] * num_stages
    ends: list[float] = []
    for plan in range(num_plans):
        needs = period is not None and plan >= period
        known = ends[plan - period] + return_s if needs and period is not None else 0.0
        ready = known
        for stage in range(num_stages):
            seconds = stage_s(plan, stage)
            before = min(ahead[stage], seconds) if stage else 0.0
            free[stage] = max(ready, max(free[stage], known) + before) + seconds - before
            busy[stage] += seconds
            ready = free[stage] + (hop_s(plan, stage) if stage + 1 < num_stages else 0.0)
        ends.append(free[-1])
    return Passage(ends=ends, left=free, busy_s=busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """The steady state of a pipe.

    Attributes:
        cycle_s: seconds from one token of a micro-batch to its next token.
        bubble: the share of the stages' time in which they do not compute.
    """

    cycle_s: float
    bubble: float


SETTLE = 8  # cycles in which the pipe settles; the mean of those after them is the steady state
_MEASURED = 4  # cycles that are measured, if like steps take equal times
_DRAWN = 16384  # times that are drawn, if they differ: the error of the mean is below 1 %


def steady_state(
    stage_s: Sequence[Sequence[float]],
    hop_s: Sequence[Sequence[float]],
    return_s: float = 0.0,
    *,
    spread: float = 0.0,
    ahead_s: Sequence[float] | None = None,
) -> SteadyState:
    """Return the steady state of a pipe whose micro-batches each wait for their own token.

    Args:
        stage_s: for each micro-batch, the seconds that each stage computes.
        hop_s: for each micro-batch, the seconds from each stage but the last to the next stage.
        return_s: seconds from the last stage to the first, for the token that a micro-batch waits for.
        spread: the standard deviation of the times of like steps, as a share of their mean.
        ahead_s: [stage] as in `pass_plans`.
    """
    number, num_stages = len(stage_s), len(stage_s[0])
    measured = max(_MEASURED, _DRAWN // (number * num_stages)) if spread else _MEASURED
    passage = pass_plans(
        (SETTLE + measured) * number,
        varied(lambda plan, stage: stage_s[plan % number][stage], spread),
        lambda plan, stage: hop_s[plan % number][stage],
        num_stages,
        period=number,
        return_s=return_s,
        ahead_s=ahead_s,
    )
    cycle_s = (passage.ends[-1] - passage.ends[SETTLE * number - 1]) / measured
    busy_s = sum(map(sum, stage_s))
    return SteadyState(cycle_s=cycle_s, bubble=max(0.0, 1.0 - busy_s / (cycle_s * num_stages)))


def log_normal(spread: float) -> tuple[float, float]:
    """Return mu and sigma of the log-normal distribution with mean 1 and this standard deviation."""
    sigma = math.sqrt(math.log1p(spread * spread))
    return -sigma * sigma / 2, sigma


def varied(stage_s: Callable[[int, int], float], spread: float) -> Callable[[int, int], float]:
    """Return a function that draws times around those of `stage_s`, the same ones in each run.

    Args:
        spread: the standard deviation of the times, as a share of each; 0: `stage_s` is returned.
    """
    if not spread:
        return stage_s
    source, (mu, sigma) = random.Random(0), log_normal(spread)
    return lambda plan, stage: stage_s(plan, stage) * source.lognormvariate(mu, sigma)


def bubble_of_one_pass(num_stages: int, num_micro_batches: int) -> float:
    """Return the bubble if micro-batches pass equal stages once, and hops between stages take no time."""
    passage = pass_plans(num_micro_batches, lambda _, __: 1.0, lambda _, __: 0.0, num_stages)
    return passage.bubble

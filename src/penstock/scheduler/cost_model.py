"""Learns how long each stage takes for a plan, from what the stages report.

    seconds = overhead                             take, put, copying
            + max(read, per_token x tokens)        the layers: weights are read while rows are multiplied
            + per_attended x (tokens x context)    attention
            + max(head_read, per_sample x samples) the head and sampling, if the plan samples

The two maxima are rooflines (Williams, Waterman, Patterson, "Roofline", CACM 2009): up to `read / per_token`
tokens the layers take the same time, and beyond that a time that grows with the tokens. A stage has two
costs: *alone*, while no other stage computes, and *shared*. They differ where stages share memory bandwidth,
and their difference decides whether two half micro-batches are better than a whole one. Costs are fitted at
the start, from the steps of `engine.core.calibration`, and then again with every report of the stages.

Samples of similar shape are averaged into one. So a long time of equal steps does not outweigh the samples of
other steps, and the average follows a machine whose speed changes. The fit has the least relative error of
all with coefficients that are not negative. Pure arithmetic; no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from typing import NamedTuple

from penstock.batch import ScheduledBatch

_NEWEST_WEIGHT = 0.2  # of a new sample in the average of similar ones
_HALF_LIFE = 10  # reports after which the weight of an average without new samples has halved
_OLDEST_WEIGHT = 0.05  # the least weight of an average
_MAX_CLASSES = 32  # classes of similar samples
_NEAREST = 3  # sizes next to the last bend that are tried for the next
_AS_GOOD = 0.03  # relative error by which two fits may differ and count as equal
_NEGLIGIBLE = 1e-12


class StepShape(NamedTuple):
    """The size of a plan: its tokens, the positions that these attend to in all, and its sampled positions.

    These three decide how long a stage takes for it.
    """

    tokens: int
    attended: int  # sum over the tokens of the positions that each attends to
    samples: int

    @classmethod
    def of(cls, plan: ScheduledBatch) -> StepShape:
        attended = sum(map(attended_by, plan.start_positions, plan.num_tokens))
        return cls(plan.total_tokens, attended, plan.num_samples)


def attended_by(start: int, num_tokens: int) -> int:
    """Return how many positions the tokens `[start, start + num_tokens)` attend to in all.

    Each token attends to all positions before it and to its own.
    """
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The coefficients from which the seconds of one stage for one plan follow.

    Attributes:
        read, per_token: the layers take `read` seconds for reading their weights, or `per_token` seconds for
            each token, whichever is more.
        overhead: seconds that each plan takes besides.
        per_attended: seconds of attention for each position that a token attends to.
        head_read, per_sample: as `read` and `per_token`, for the output head and each sampled position.
    """

    read: float
    per_token: float
    overhead: float = 0.0
    per_attended: float = 0.0
    head_read: float = 0.0
    per_sample: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        seconds = self.overhead + max(self.read, self.per_token * shape.tokens)
        if shape.samples:
            seconds += max(self.head_read, self.per_sample * shape.samples)
        return seconds + self.per_attended * shape.attended


class StepSample(NamedTuple):
    """The seconds that a stage reported of one step, without its waits for other stages.

    Attributes:
        shape: the size of the step's plan.
        forward_s: the time of the layers.
        sample_s: the time of the output head and of sampling; None: it is not known, as it had other work in
            it.
        overhead_s: the time of all else.
    """

    shape: StepShape
    forward_s: float
    sample_s: float | None  # None: in that phase it did more than the head's work
    overhead_s: float


class CostModel:
    """The costs of all stages: the seconds that each takes for a plan, learnt from reported times.

    Args:
        num_stages: the stages of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._alone = [_StageSamples() for _ in range(num_stages)]
        self._shared = [_StageSamples() for _ in range(num_stages)] if num_stages > 1 else self._alone

    def learn(self, stage: int, samples: Iterable[StepSample], *, alone: bool) -> None:
        """Learn from the times that stage number `stage` reported: fit its costs to them and to earlier ones.

        Args:
            samples: one sample for each step that had tokens.
            alone: no other stage computed meanwhile. Costs alone and costs beside others are kept apart.
        """
        kept = (self._alone if alone else self._shared)[stage]
        for sample in samples:
            kept.add(sample)
        kept.fit()

    def costs(self, *, alone: bool = False) -> list[StageCost] | None:
        """Return the cost of each stage, in their order, or None while any stage has reported nothing.

        Args:
            alone: return the costs while no other stage computes; else those while others compute as well.
        """
        costs = [stage.cost for stage in (self._alone if alone else self._shared)]
        known = [cost for cost in costs if cost is not None]
        return known if len(known) == len(costs) else None


class _StageSamples:
    """Averages of like samples, and the cost fitted to them."""

    def __init__(self) -> None:
        self.cost: StageCost | None = None
        self._forward = _Averages()  # tokens, attended, seconds, overhead
        self._head = _Averages()  # samples, 0, seconds
        self._bends = [0.0, 0.0]  # where the rooflines of layers and head had their bends

    def add(self, sample: StepSample) -> None:
        shape = sample.shape
        key = (_size_class(shape.tokens), shape.attended.bit_length())
        self._forward.add(key, (shape.tokens, shape.attended, sample.forward_s, sample.overhead_s))
        if shape.samples and sample.sample_s is not None:
            self._head.add((_size_class(shape.samples), 0), (shape.samples, 0.0, sample.sample_s))

    def fit(self) -> None:
        forward, head = self._forward.rows(), self._head.rows()
        if not forward:
            return
        weights, (bend, head_bend) = self._forward.weights(), self._bends
        read, per_token, per_attended = fit_roofline([row[:3] for row in forward], weights, bend)
        head_read = per_sample = 0.0
        if head:
            head_read, per_sample, _ = fit_roofline(head, self._head.weights(), head_bend)
        self._bends = [read / max(per_token, _NEGLIGIBLE), head_read / max(per_sample, _NEGLIGIBLE)]
        self.cost = StageCost(
            overhead=sum(row[3] for row in forward) / len(forward),
            read=read,
            per_token=per_token,
            per_attended=per_attended,
            head_read=head_read,
            per_sample=per_sample,
        )
        self._forward.pass_time()
        self._head.pass_time()


class _Averages:
    """Moving averages of similar samples; the weight of old ones sinks until newer ones replace them."""

    def __init__(self) -> None:
        self._rows: dict[
            tuple[int, int], tuple[int, list[float]]
        ] = {}  # by class: when last seen, and the average; newest last
        self._time = 0

    def pass_time(self) -> None:
        self._time += 1

    def rows(self) -> list[list[float]]:
        return [row for _, row in self._rows.values()]

    def weights(self) -> list[float]:
        """Return the weight of each row: 1 if it was seen just now, less the older it is."""
        ages = [self._time - seen for seen, _ in self._rows.values()]
        return [max(0.5 ** (age / _HALF_LIFE), _OLDEST_WEIGHT) for age in ages]

    def add(self, key: tuple[int, int], row: Sequence[float]) -> None:
        _, old = self._rows.pop(key, (0, row))
        average = [before + _NEWEST_WEIGHT * (new - before) for before, new in zip(old, row, strict=True)]
        self._rows[key] = (self._time, average)
        if len(self._rows) > _MAX_CLASSES:
            del self._rows[next(iter(self._rows))]


def _size_class(number: int) -> int:
    """Return a class number that sizes within about a quarter of each other share."""
    bits = number.bit_length()
    return number if bits <= 2 else 4 * bits + ((number >> (bits - 3)) & 3)


def fit_roofline(
    rows: Sequence[Sequence[float]], weights: Sequence[float], bend: float = 0.0
) -> tuple[float, float, float]:
    """Return the fit of `seconds = max(read, per_token x n) + per_attended x attended`.

    The result is (read, per_token, per_attended), each >= 0. The bend is the largest n at which `read`
    decides. Several sizes are tried as the bend, and the one with the least error is taken. If a fit without
    a bend is about as good, the bend is taken to lie at twice the largest n, so that plans grow until samples
    show it. `per_attended` is 0 unless samples of about the same n differ much in what they attend to.

    Args:
        rows: (n, attended, seconds) of each sample; n counts tokens, or sampled positions.
        weights: the weight of each sample's relative error.
        bend: the bend of the last fit; only the sizes next to it are tried. 0: all sizes are tried.
    """
    sizes = sorted({row[0] for row in rows})
    limits = sorted(sizes, key=lambda size: abs(size - bend))[:_NEAREST] if bend else sizes
    scales = [weight / max(row[2], _NEGLIGIBLE) for row, weight in zip(rows, weights, strict=True)]
    if not _tell_attention(rows):
        rows = [(n, 0.0, seconds) for n, _, seconds in rows]
    fits = {limit: _fit_bent_at(limit, sizes[-1], rows, scales, weights) for limit in limits}

    def error(fit: tuple[float, float, float]) -> float:
        """Return the root mean square of the weighted relative errors."""
        read, per_token, per_attended = fit
        squares = (
            ((max(read, per_token * n) + per_attended * attended - seconds) * scale) ** 2
            for (n, attended, seconds), scale in zip(rows, scales, strict=True)
        )
        return math.sqrt(sum(squares) / len(rows))

    best = min(fits.values(), key=error)
    unbent = fits.get(sizes[-1])
    return unbent if unbent is not None and error(unbent) <= error(best) + _AS_GOOD else best


def _tell_attention(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether the samples can tell the cost of attention from that of multiplication."""
    pairs = combinations(sorted((row[0], row[1]) for row in rows), 2)
    return any(big <= 1.25 * small and 4.0 * min(a, b) <= max(a, b) for (small, a), (big, b) in pairs)


def _fit_bent_at(
    limit: float,
    largest: float,
    rows: Sequence[Sequence[float]],
    scales: Sequence[float],
    weights: Sequence[float],
) -> tuple[float, float, float]:
    system = [
        [value * scale for value in (n <= limit, n * (n > limit), attended)]
        for (n, attended, _), scale in zip(rows, scales, strict=True)
    ]
    read, per_token, per_attended = _non_negative(system, weights)
    return read, read / (2 * largest) if limit == largest else per_token, per_attended


def _non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the coefficients >= 0 for which `rows @ coefficients` is nearest to the targets.

    Tries every set of coefficients that are not zero, the smallest first: there are three, hence seven sets.
    """
    width = len(rows[0])
    best, best_error = [0.0] * width, sum(target * target for target in targets)
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            columns = [[row[i] for i in chosen] for row in rows]
            solution = _least_squares(columns, targets)
            if solution is None or min(solution) < 0.0:
                continue
            misses = (
                sum(map(mul, solution, row)) - target for row, target in zip(columns, targets, strict=True)
            )
            error = sum(miss * miss for miss in misses)
            if error < best_error - 1e-9:
                best, best_error = [0.0] * width, error
                for i, coefficient in zip(chosen, solution, strict=True):
                    best[i] = coefficient
    return best


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Return the coefficients that bring `rows @ coefficients` nearest to the targets, if determined."""
    width = len(rows[0])
    scale = [max(max(abs(row[i]) for row in rows), _NEGLIGIBLE) for i in range(width)]
    unit = [[row[i] / scale[i] for i in range(width)] for row in rows]
    system = [
        [sum(row[i] * row[j] for row in unit) for j in range(width)]
        + [sum(row[i] * target for row, target in zip(unit, targets, strict=True))]
        for i in range(width)
    ]
    for pivot in range(width):  # Gauss and Jordan; the matrix is symmetric and positive
        if system[pivot][pivot] < 1e-9:
            return None
        for other in range(width):
            if other != pivot:
                factor = system[other][pivot] / system[pivot][pivot]
                system[other] = [a - factor * b for a, b in zip(system[other], system[pivot], strict=True)]
    return [system[i][width] / system[i][i] / scale[i] for i in range(width)]

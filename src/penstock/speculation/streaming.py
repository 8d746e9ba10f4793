"""Decides whether drafts (guessed tokens) of a request go out before earlier results are back, and how many.

    waiting     | w0 |    |    | w1 |    |    |      a window enters when the result of the last is back
    streaming   | w0 | w1 | w2 | w3 | w4 | w5 |      it enters at once, and guesses what the last will yield

A window (the tokens of a request in one step, most of them drafts) takes the time of a *trip* through all
stages and back. When windows stream, one leaves the pipe every *beat*, which is the time of the slowest
stage. A guess is right with chance c if all before it were. So there are c / (1 - c) right guesses and one
token more before the first wrong guess, and c^n / (1 - c^n) windows of n tokens follow the first window
before one is void. Tokens a second are

    waiting     (1 - c^n) / (1 - c)  /  trip alone(n)
    streaming    1 / (1 - c)  /  (trip(n) + beat(n) c^n / (1 - c^n))

Where each guess takes time, a waiting request waits for n - 1 guesses too before its next window, and a beat
lasts at least as long as the guesses of a window. With n = 1, D = trip / beat and R = c / (1 - c), the rate
of streaming is (R + 1) / ((R + D) beat): the law of docs/speculative-decoding.md. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_CHANCE_AHEAD = 0.05  # a window is sent ahead if it is of use with this chance,
LEAST_CHANCE_QUEUED = 0.5  # and with this one if it would wait at the first stage, before the right one
KEPT_PLANS = 32  # a size is kept for so many plans at most,
_PRICE_STEP = 0.2  # and while the logarithm of each price, rounded to such steps, stays the same
_LEAST_S = 1e-6
_MOST_CHANCE = 0.99  # higher chances are not believed
_MARGIN = 0.05  # the part of the rate that streaming must gain


class PipeTimes(NamedTuple):
    """The times that windows take, in seconds.

    Attributes:
        alone: returns the time of each stage for a window of so many tokens, while no other stage computes.
        shared: returns the same while all stages compute.
        latency: time on all links between stages and back, added up.
        num_streams: requests whose windows take turns on the stages.
        guess: time of one guess, where the request has to wait for guesses; else 0.
    """

    alone: Callable[[int], Sequence[float]]
    shared: Callable[[int], Sequence[float]]
    latency: float = 0.0
    num_streams: int = 1
    guess: float = 0.0


def streamed_size(chance: float, most: int, times: PipeTimes) -> int:
    """Choose how many tokens each window of a request has if windows stream; 0: they should not stream.

    Args:
        chance: the chance that a guess is right if all before it were.
        most: most tokens of a window.
        times: the times that windows take.
    """
    chance = min(chance, _MOST_CHANCE)
    sizes = range(1, most + 1)
    best = max(sizes, key=lambda size: _streaming_rate(chance, size, times))
    waiting = max(_waiting_rate(chance, size, times) for size in sizes)
    return best if _streaming_rate(chance, best, times) > (1.0 + _MARGIN) * waiting else 0


def _waiting_rate(chance: float, size: int, times: PipeTimes) -> float:
    num_tokens = (1.0 - chance**size) / (1.0 - chance)
    return num_tokens / (sum(times.alone(size)) + times.latency + (size - 1) * times.guess)


def _streaming_rate(chance: float, size: int, times: PipeTimes) -> float:
    seconds = times.shared(size)
    beat = max(times.num_streams * max(seconds), size * times.guess)
    trip = max(sum(seconds) + times.latency, beat)
    num_followers = chance**size / (1.0 - chance**size)
    return 1.0 / (1.0 - chance) / (trip + beat * num_followers)


class KeptSizes:
    """The sizes of streamed windows, each worked out once while prices are about the same.

    Nearly every token of a text brings a guess, and to work a size out takes 100 us and more, so sizes are
    kept. But prices are compared for every plan: a size that was chosen because large windows seemed cheap
    must not outlive the first measurement of a large window.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int, int], int] = {}  # by chance, most and requests
        self._kept_from = 0  # the step since which these sizes are kept
        self._prices: list[int] = []  # the prices for which the sizes are right, in steps
        self._is_new_plan = True

    def planned(self, step_id: int) -> None:
        """Note that a plan is made."""
        self._is_new_plan = True
        if not self._kept_from <= step_id < self._kept_from + KEPT_PLANS:
            self._kept_from = step_id
            self._sizes.clear()

    def of(
        self, key: tuple[int, int, int], prices: Callable[[], list[float]], work_out: Callable[[], int]
    ) -> int:
        """Return the kept size; work it out if none is kept for these prices.

        Args:
            key: what the size depends on besides the prices.
            prices: returns the prices in seconds; called once for each plan.
            work_out: returns the size.
        """
        if self._is_new_plan:
            self._is_new_plan = False
            steps = [round(math.log(max(price, _LEAST_S)) / _PRICE_STEP) for price in prices()]
            if steps != self._prices:
                self._prices = steps
                self._sizes.clear()
        if key not in self._sizes:
            self._sizes[key] = work_out()
        return self._sizes[key]

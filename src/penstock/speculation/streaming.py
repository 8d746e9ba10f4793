"""The choice whether windows of one request follow each other through the pipe, and how large they are.

    waiting     | w0 |    |    | w1 |    |    |      a window enters when the result of the last is back
    streaming   | w0 | w1 | w2 | w3 | w4 | w5 |      it enters at once, and guesses what that will yield

A window takes the *trip* through all stages and back; streaming, one leaves the pipe every *beat*, which is
the time of the slowest stage. A guess is right with chance c if all before it were. So until the first wrong
guess there come c / (1 - c) right ones and one token more, and c^n / (1 - c^n) windows of n tokens follow
the first before one is void. Tokens a second are

    waiting     (1 - c^n) / (1 - c)  /  trip alone(n)
    streaming    1 / (1 - c)  /  (trip(n) + beat(n) c^n / (1 - c^n))

Where each guess takes time, a window that waits for its result waits for n - 1 of them too, and those that
stream leave no sooner than they come. With n = 1 and D = trip / beat the second is (R + 1) / ((R + D) beat),
R = c / (1 - c): the law of docs/speculative-decoding.md. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_CHANCE_AHEAD = 0.05  # that a window is of use, below which it is not sent ahead
LEAST_CHANCE_QUEUED = 0.5  # the same of one that waits at the first stage, where the right one may find it
KEPT_PLANS = 32  # for so many plans a size is kept at most,
_PRICE_STEP = 0.2  # and while no price has gone to another step of so much in its logarithm
_LEAST_S = 1e-6
_MOST_CHANCE = 0.99  # that is believed
_MARGIN = 0.05  # of the rate, that streaming must gain


class PipeTimes(NamedTuple):
    """The times that windows take, in seconds.

    Attributes:
        alone: times of each stage for a window of so many tokens, while no other stage computes.
        shared: the same, while all do.
        latency: sum over all ways between the stages and back.
        num_streams: requests that take turns on the stages.
        guess: time of one guess, where guesses have to be waited for.
    """

    alone: Callable[[int], Sequence[float]]
    shared: Callable[[int], Sequence[float]]
    latency: float = 0.0
    num_streams: int = 1
    guess: float = 0.0


def streamed_size(chance: float, most: int, times: PipeTimes) -> int:
    """Choose the tokens of each window of a request that streams; 0: it should not.

    Args:
        chance: the chance that a guess is right if all before it were.
        most: tokens of a window.
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

    Nearly every token of a text brings a guess, and to work a size out takes 100 us and more. A size that was
    chosen because large windows seemed cheap must not outlive the first measurement of one.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int, int], int] = {}  # by chance, most and requests
        self._kept_from = 0  # the plan since which these are kept
        self._prices: list[int] = []  # in steps, for which they are right
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
        """Return the kept size; work it out if there is none for these prices, in seconds."""
        if self._is_new_plan:
            self._is_new_plan = False
            steps = [round(math.log(max(price, _LEAST_S)) / _PRICE_STEP) for price in prices()]
            if steps != self._prices:
                self._prices = steps
                self._sizes.clear()
        if key not in self._sizes:
            self._sizes[key] = work_out()
        return self._sizes[key]

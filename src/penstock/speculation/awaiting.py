"""Computes how many guesses a request should wait for, if its drafter takes time for each.

With n guesses, each of which is right with chance c if all before it were, a step yields 1 + c + ... + c^n
tokens. The step takes C(rows (n + 1)) seconds if all rows of its plan bring n guesses. A request that has no
guess yet, and waits m seconds for each of n guesses, gets

    (1 - c^(n + 1)) / (1 - c)  /  (C(rows (n + 1)) + n m)      tokens a second

With n = 0 it goes on without guesses. Time that the request has waited already counts too, since what matters
is tokens a second from one step to the next. No clock here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.speculation.drafter import Draft

_MOST_CHANCE = 0.99  # higher chances are not believed
_MARGIN = 0.03  # the part of the rate that waiting must gain
_MOST_VAIN = 3  # a request that waited in vain so often does not wait again before guesses have come


def guesses_worth_waiting(
    draft: Draft, most: int, num_rows: int, seconds: Callable[[int], float], waited_s: float = 0.0
) -> int:
    """Choose how many guesses a request should have before it goes on.

    Where that is no more than it has, it should not wait.

    Args:
        draft: the guesses that it has, and how long further ones take.
        most: most guesses of the request in a step.
        num_rows: rows of the plan that it would be in.
        seconds: the time that a step of so many tokens takes.
        waited_s: seconds since the request could have gone on.
    """
    chance, num_there = min(draft.chance, _MOST_CHANCE), len(draft.token_ids)

    def rate(count: int) -> float:
        num_tokens = (1.0 - chance ** (count + 1)) / (1.0 - chance)
        wait_s = waited_s + max(0, count - num_there) * draft.more_s
        return num_tokens / (seconds(num_rows * (count + 1)) + wait_s)

    at_once = max(rate(count) for count in range(min(num_there, most) + 1))
    best = max(range(num_there, max(num_there, most) + 1), key=rate)
    return best if rate(best) > (1.0 + _MARGIN) * at_once else num_there


class Waits:
    """The times for which requests, by their arrival, wait for guesses, and how often they waited in vain."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._until: dict[int, float] = {}
        self._num_vain: dict[int, int] = {}  # vain waits since guesses last came

    def waited_s(self, arrival: int, now: float) -> float:
        """Return the seconds since the request could have gone on: since the first call after `end`."""
        return now - self._since.setdefault(arrival, now)

    def goes_on(self, arrival: int, now: float, longest: float) -> bool:
        """Return whether a request's wait goes on; if its time is over, count it as vain.

        Args:
            now: clock time.
            longest: seconds that the wait may last; the value of the first call after `end` counts.
        """
        if now < self._until.setdefault(arrival, now + longest):
            return True
        self._num_vain[arrival] = self._num_vain.get(arrival, 0) + 1
        return False

    def are_vain(self, arrival: int) -> bool:
        """Return whether a request should not wait again before guesses have come."""
        return self._num_vain.get(arrival, 0) >= _MOST_VAIN

    def until(self, arrival: int) -> float:
        return self._until.get(arrival, math.inf)

    def heard(self, arrival: int) -> None:
        """Note that guesses for the request have come."""
        self._num_vain.pop(arrival, None)

    def end(self, arrival: int) -> None:
        """End the request's wait, since the next token has come."""
        self._since.pop(arrival, None)
        self._until.pop(arrival, None)

    def forget(self, arrival: int) -> None:
        self.end(arrival)
        self.heard(arrival)

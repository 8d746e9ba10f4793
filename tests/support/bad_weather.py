"""What a network does to its hosts in one run, as a function of a seed: delay, jitter and stalls."""

from __future__ import annotations

import random
from dataclasses import dataclass

from network import ShapedLink, Which

WORST_JITTER_S, WORST_STALL_S = 0.2, 1.0  # that nobody may be given up for
_WAYS: tuple[Which, ...] = ("out", "in", "both")
_NUM_IDS = 24  # of each answer that is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Nothing passes for a while.

    Attributes:
        after: ids that have come before.
    """

    after: int
    seconds: float
    which: Which


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What the link of a host is like in a run."""

    delay_s: float
    jitter_s: float
    stalls: tuple[Stall, ...]

    def set_in(self, link: ShapedLink) -> None:
        """Give the link its delay and jitter."""
        link.set_delay(self.delay_s, self.jitter_s)

    def stall(self, link: ShapedLink, before: int, now: int) -> None:
        """Stall the link where one is due.

        Args:
            before, now: ids that had come before, and have come now.
        """
        for stall in self.stalls:
            if before < stall.after <= now:
                link.stall(stall.seconds, stall.which)


def weather(seed: int) -> Weather:
    """Return that of a seed: mostly a lively network, now and then a bad one, of every twenty the worst."""
    chosen = random.Random(f"weather {seed}")
    if seed % 20 == 0:
        most_s, jitter_s, stall_s = 0.0, WORST_JITTER_S, WORST_STALL_S
    elif seed % 7 == 0:
        most_s, jitter_s, stall_s = 0.05, 0.05, 0.5
    else:
        most_s, jitter_s, stall_s = 0.015, 0.015, 0.3
    stalls = tuple(
        Stall(
            after=chosen.randrange(1, _NUM_IDS),
            seconds=chosen.uniform(stall_s / 3, stall_s),
            which=chosen.choice(_WAYS),
        )
        for _ in range(chosen.choice((1, 1, 2)))
    )
    delay_s = chosen.uniform(0.0, most_s)
    return Weather(delay_s=delay_s, jitter_s=chosen.uniform(jitter_s / 3, jitter_s), stalls=stalls)

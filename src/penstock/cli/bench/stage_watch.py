"""Looks at what stages report before and after a run, so that a report can say where their time went.

A stage reports about once a second, also while no request runs. A look before the run waits until each has
reported; one behind it until each has reported once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from penstock.reports.figures import StageFigures
from penstock.reports.stage_use import StageCounts, StageKey, have_all_reported_since, stage_figures

PATIENCE_S = 5.0
_LOOK_S = 0.1

ReadCounts = Callable[[], Awaitable[Sequence[StageCounts]]]
Sleep = Callable[[float], Awaitable[None]]


class Watch(Protocol):
    """A watch over the use of the stages' time."""

    async def begin(self) -> None:
        """Return when a run may begin."""

    async def end(self, run_s: float) -> list[StageFigures]:
        """Return the figures of the stages in the run that has begun last, and took so many seconds."""


class StageWatch:
    """Reads what the stages have counted.

    Args:
        read: returns the newest counts, of stages that have reported.
        resident_bytes: returns the memory of each stage's processes, where it can be seen.
        num_stages: that will report.
        sleep: as `asyncio.sleep`; tests give their own.
    """

    def __init__(
        self,
        read: ReadCounts,
        resident_bytes: Callable[[], dict[StageKey, int]] = dict,
        *,
        num_stages: int = 1,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._read = read
        self._resident_bytes = resident_bytes
        self._num_stages = num_stages
        self._sleep = sleep
        self._before: Sequence[StageCounts] = []

    async def begin(self) -> None:
        self._before = await self._counts(lambda counts: all(stage.wall_s for stage in counts))

    async def end(self, run_s: float) -> list[StageFigures]:
        resident, last = self._resident_bytes(), await self._read()
        after = await self._counts(lambda counts: have_all_reported_since(last, counts))
        return stage_figures(self._before, after, run_s, resident)

    async def _counts(self, are_complete: Callable[[Sequence[StageCounts]], bool]) -> Sequence[StageCounts]:
        """The newest counts once they are complete, or at the end of our patience."""
        for _ in range(round(PATIENCE_S / _LOOK_S)):
            counts = await self._read()
            if len(counts) >= self._num_stages and are_complete(counts):
                return counts
            await self._sleep(_LOOK_S)
        return await self._read()


class NoWatch:
    """For a run of which no report is made, or of a server that does not tell."""

    async def begin(self) -> None:
        """Do nothing: nothing is watched."""

    async def end(self, run_s: float) -> list[StageFigures]:
        """Return nothing: nothing was watched."""
        return []

"""Reads what stages have counted before and after a run, so that a report can say where their time went.

A stage reports about once a second, also while no request runs. Before the run this waits until every stage
has reported, and after it until every stage has reported once more, but not longer than `PATIENCE_S`.
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
        """Return the figures of the stages in the run that followed `begin`, and took `run_s` seconds."""


class StageWatch:
    """A watch that reads the counts of the stages.

    Args:
        read: returns the newest counts of the stages that have reported.
        resident_bytes: returns the memory of each stage's processes, as far as it can be seen.
        num_stages: the least number of stages that must have reported.
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
        """Return the newest counts as soon as they are complete, or after `PATIENCE_S` as they are."""
        for _ in range(round(PATIENCE_S / _LOOK_S)):
            counts = await self._read()
            if len(counts) >= self._num_stages and are_complete(counts):
                return counts
            await self._sleep(_LOOK_S)
        return await self._read()


class NoWatch:
    """A watch that sees nothing: for a run without a report, or a server that does not report its stages."""

    async def begin(self) -> None:
        """Do nothing: nothing is watched."""

    async def end(self, run_s: float) -> list[StageFigures]:
        """Return nothing: nothing was watched."""
        return []

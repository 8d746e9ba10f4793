"""The recent spans of each rank's time, for pages that draw the pipeline as lanes.

    event: lanes
    data: {"now_ns", "reports": [{"replica", "stage", "rank", "age_ns", "phases", "durations_ns", "steps"}]}

Ranks report about once a second. The core keeps their reports for ten seconds and is asked for those that are
new, some times a second for all readers together, and not at all while there is none. A reader gets each
report once; what it is too slow for it misses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from penstock.batch import StageSpans
from penstock.errors import PenstockError
from penstock.server.engine_port import EngineLike
from penstock.server.http.keep_alive import Clock

LOOK_S = 0.25  # between two questions to the core
PATIENCE_S = 0.5  # for its answer: the rest of the feed must go on
KEPT_S = 10.0
MAX_SPANS = 200_000  # of one event; older reports are left out

NanosecondClock = Callable[[], int]


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of a rank, without gaps.

    Attributes:
        age_ns: nanoseconds from the begin of the first span to the time of the event.
        phases: base64; for each span a byte, the number of its `trace.phases.Phase`.
        durations_ns: nanoseconds of each span.
        steps: index of the step's first span, step id, tokens, and of these how many are of prompts.
    """

    replica: int
    stage: int
    rank: int
    age_ns: int
    phases: bytes
    durations_ns: list[int]
    steps: list[tuple[int, int, int, int]]


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """`now_ns`: of the head's monotonic clock."""

    now_ns: int
    reports: list[LaneReport]


class LaneReader(Protocol):
    """One reader of lanes."""

    async def event(self) -> bytes:
        """Return the event with what is new for it; empty where nothing is."""


class LaneNews:
    """Fetches what ranks have reported, for all readers at once.

    Args:
        clock: monotonic seconds.
        clock_ns: the monotonic clock of this host, in nanoseconds.
    """

    def __init__(
        self, engine: EngineLike, clock: Clock, clock_ns: NanosecondClock = time.monotonic_ns
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._clock_ns = clock_ns
        self._reports: deque[tuple[float, StageSpans]] = deque()  # and when it came
        self._newest: dict[tuple[int, int, int], StageSpans] = {}  # by replica, stage and rank
        self._num_seen = 0
        self._looked_at: float | None = None
        self._is_looking = False

    def reader(self) -> LaneReader:
        """Return a reader, which begins with what there is."""
        return _Reader(self)

    async def since(self, number: int) -> tuple[list[StageSpans], int]:
        """Return what has come behind the report of this number, and the number of the newest one."""
        if not self._is_looking and self._is_due():
            await self._look()
        num_known = max(0, len(self._reports) - (self._num_seen - number))
        return [report for _, report in islice(self._reports, num_known, None)], self._num_seen

    def encoded(self, reports: Sequence[StageSpans]) -> bytes:
        """Return the event that tells these reports, as of now."""
        now_ns, num_spans = self._clock_ns(), 0
        shown: list[LaneReport] = []
        for report in reversed(reports):
            num_spans += len(report.durations_ns)
            if num_spans > MAX_SPANS:
                break
            shown.append(_lane_report(report, now_ns))
        told = msgspec.json.encode(Lanes(now_ns=now_ns, reports=shown[::-1]))
        return b"event: lanes\ndata: " + told + b"\n\n"

    def _is_due(self) -> bool:
        return self._looked_at is None or self._clock() - self._looked_at > LOOK_S - 1e-6

    async def _look(self) -> None:
        """Ask the core. One that is away or slow has nothing new."""
        self._is_looking, self._looked_at = True, self._clock()
        try:
            with contextlib.suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    found = await self._engine.news(list(self._newest.values()))
                self._keep(found)
        finally:
            self._is_looking = False

    def _keep(self, found: Sequence[StageSpans]) -> None:
        now = self._clock()
        self._reports += [(now, report) for report in found]
        self._newest |= {(report.replica, report.stage, report.tp_rank): report for report in found}
        self._num_seen += len(found)
        while self._reports and self._reports[0][0] < now - KEPT_S:
            self._reports.popleft()


class _Reader:
    def __init__(self, news: LaneNews) -> None:
        self._news = news
        self._seen = 0

    async def event(self) -> bytes:
        reports, self._seen = await self._news.since(self._seen)
        return self._news.encoded(reports) if reports else b""


class _NoLanes:
    """For a reader that does not ask for lanes."""

    async def event(self) -> bytes:
        return b""


NO_LANES: LaneReader = _NoLanes()


def _lane_report(report: StageSpans, now_ns: int) -> LaneReport:
    prompts = report.prompt_tokens
    return LaneReport(
        replica=report.replica,
        stage=report.stage,
        rank=report.tp_rank,
        age_ns=now_ns - report.start_ns,
        phases=report.phases,
        durations_ns=report.durations_ns,
        steps=[(index, step, tokens, prompts.get(step, 0)) for index, step, tokens in report.steps],
    )

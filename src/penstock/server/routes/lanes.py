"""The recent spans of each rank's time, for pages that draw the pipeline as lanes.

    event: lanes
    data: {"now_ns", "reports": [{"replica", "stage", "rank", "age_ns", "phases", "durations_ns", "steps"}]}

A *lane* is the row of the picture that shows what one rank did. Ranks report about once a second, and the
core keeps their reports for ten seconds. While there are readers, the core is asked for new reports at most
four times a second, for all readers together. A reader gets each report once. It misses the reports that are
forgotten before it takes them.
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
PATIENCE_S = 0.5  # for the core's answer, since the rest of the feed waits meanwhile
KEPT_S = 10.0
MAX_SPANS = 200_000  # in one event; older reports are left out

NanosecondClock = Callable[[], int]


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of a rank, without gaps.

    Attributes:
        age_ns: nanoseconds from the beginning of the first span to the time of the event.
        phases: for each span a byte, the number of its `trace.phases.Phase`; base64 in the event.
        durations_ns: nanoseconds of each span.
        steps: for each step the index of its first span, its number, its tokens, and how many of these are
            tokens of prompts.
    """

    replica: int
    stage: int
    rank: int
    age_ns: int
    phases: bytes
    durations_ns: list[int]
    steps: list[tuple[int, int, int, int]]


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one event. `now_ns` is its time, by the monotonic clock of the host of this server."""

    now_ns: int
    reports: list[LaneReport]


class LaneReader(Protocol):
    """One reader of lanes."""

    async def event(self) -> bytes:
        """Return an event with the reports that are new for this reader; nothing if there are none."""


class LaneNews:
    """Fetches the reports of ranks from the core, for all readers together.

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
        self._reports: deque[tuple[float, StageSpans]] = deque()  # each with the time when it came
        self._newest: dict[tuple[int, int, int], StageSpans] = {}  # by replica, stage and rank
        self._num_seen = 0  # reports so far, which is the number of the newest one
        self._looked_at: float | None = None
        self._is_looking = False

    def reader(self) -> LaneReader:
        """Return a reader, which begins with the reports that are kept."""
        return _Reader(self)

    async def since(self, number: int) -> tuple[list[StageSpans], int]:
        """Return the kept reports that came after report `number`, and the number of the newest report."""
        if not self._is_looking and self._is_due():
            await self._look()
        num_known = max(0, len(self._reports) - (self._num_seen - number))
        return [report for _, report in islice(self._reports, num_known, None)], self._num_seen

    def encoded(self, reports: Sequence[StageSpans]) -> bytes:
        """Return an event with these reports, or the newest of them if they have too many spans."""
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
        """Ask the cores for new reports. If they are away or slow, none are added."""
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
    """The lanes of a reader that does not ask for any."""

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

"""What readers of the feed get of the ranks: news alone, fetched once for all of them, and only for them."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Collection
from typing import Any

from fake_engine import FakeEngine
from fakes import FakeClock
from penstock.batch import StageSpans
from penstock.errors import UnavailableError
from penstock.server.routes import lanes
from penstock.server.routes.lanes import LOOK_S, NO_LANES, LaneNews
from penstock.trace.phases import Phase

NOW_NS = 50_000_000_000


def report(began_s: float, stage: int = 0, rank: int = 0, replica: int = 0) -> StageSpans:
    return StageSpans(
        stage=stage,
        began_ns=round(began_s * 1e9),
        phases=bytes([Phase.NO_WORK, Phase.FORWARD]),
        durations_ns=[200_000_000, 300_000_000],
        steps=[(1, 7, 12)],
        prompt_tokens={7: 10},
        tp_rank=rank,
        replica=replica,
    )


def news(engine: FakeEngine, clock: FakeClock | None = None) -> LaneNews:
    return LaneNews(engine, clock or FakeClock(), lambda: NOW_NS)


def data(event: bytes) -> Any:
    assert event.startswith(b"event: lanes\ndata: ")
    assert event.endswith(b"\n\n")
    return json.loads(event.partition(b"data: ")[2])


def begins(event: bytes) -> list[float]:
    return [(NOW_NS - each["age_ns"]) / 1e9 for each in data(event)["reports"]] if event else []


def test_a_report_tells_spans_steps_and_how_long_ago_it_began() -> None:
    engine = FakeEngine(spans=[report(48.5, stage=2, rank=1, replica=3)])
    (told,) = data(asyncio.run(news(engine).reader().event()))["reports"]
    assert (told["replica"], told["stage"], told["rank"]) == (3, 2, 1)
    assert told["age_ns"] == 1_500_000_000
    assert list(b64decode(told["phases"])) == [Phase.NO_WORK, Phase.FORWARD]
    assert told["durations_ns"] == [200_000_000, 300_000_000]
    assert told["steps"] == [[1, 7, 12, 10]]


def test_each_reader_gets_each_report_once_and_the_core_is_asked_once_for_all() -> None:
    async def work() -> None:
        engine, clock = FakeEngine(spans=[report(40), report(40, stage=1)]), FakeClock()
        told = news(engine, clock)
        first, second = told.reader(), told.reader()
        assert begins(await first.event()) == [40, 40]
        assert begins(await second.event()) == [40, 40]
        assert await first.event() == b""
        assert engine.num_looks == 1
        engine.spans.append(report(41))
        clock.advance(LOOK_S / 2)
        assert await first.event() == b"", "too early for another question"
        clock.advance(LOOK_S / 2)
        assert begins(await first.event()) == [41]
        assert begins(await second.event()) == [41]
        assert begins(await told.reader().event()) == [40, 40, 41]
        assert engine.num_looks == 2

    asyncio.run(work())


def test_nobody_is_asked_while_nobody_looks() -> None:
    engine = FakeEngine(spans=[report(40)])
    news(engine)
    assert asyncio.run(NO_LANES.event()) == b""
    assert engine.num_looks == 0


def test_who_was_slow_gets_the_last_seconds_alone() -> None:
    async def work() -> None:
        engine, clock = FakeEngine(spans=[report(40)]), FakeClock()
        told = news(engine, clock)
        quick, slow = told.reader(), told.reader()
        for second in range(41, 60):
            await quick.event()
            clock.advance(1.0)
            engine.spans.append(report(second))
        assert begins(await slow.event()) == [float(second) for second in range(49, 60)]

    asyncio.run(work())


def test_an_event_has_so_many_spans_at_most(monkeypatch: Any) -> None:
    monkeypatch.setattr(lanes, "MAX_SPANS", 5)
    engine = FakeEngine(spans=[report(second) for second in (40, 41, 42)])
    assert begins(asyncio.run(news(engine).reader().event())) == [41, 42]


def test_a_core_that_is_away_or_hangs_holds_up_nobody(monkeypatch: Any) -> None:
    class Hanging(FakeEngine):
        async def news(self, seen: Collection[StageSpans]) -> list[StageSpans]:
            await asyncio.Event().wait()
            return []

    away = FakeEngine(spans=[report(40)], failure=UnavailableError("no core"))
    assert asyncio.run(news(away).reader().event()) == b""
    monkeypatch.setattr(lanes, "PATIENCE_S", 0.01)
    assert asyncio.run(asyncio.wait_for(news(Hanging()).reader().event(), 10)) == b""

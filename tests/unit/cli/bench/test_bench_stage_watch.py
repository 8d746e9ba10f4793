"""What is seen of stages around a run, and of a load that crosses no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench.engine_load import EngineSender
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.resident_memory import resident_bytes_below
from penstock.cli.bench.stage_watch import PATIENCE_S, StageWatch
from penstock.engine.client.outputs import CompletionOutput, RequestOutput
from penstock.errors import StageLostError
from penstock.reports.stage_use import StageCounts
from penstock.request import SamplingParams
from penstock.workloads.requests import BenchRequest


class Reports:
    """Two stages that report once a second of a clock which moves while one waits."""

    def __init__(self) -> None:
        self.now = 0.0

    async def read(self) -> Sequence[StageCounts]:
        reported_s = float(int(self.now))
        if not reported_s:
            return []
        return [StageCounts(stage=stage, wall_s=reported_s, busy_s=reported_s / 2) for stage in (0, 1)]

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_look_waits_for_reports_before_and_behind_the_run() -> None:
    reports = Reports()
    watch = StageWatch(reports.read, lambda: {(0, 1): 11}, sleep=reports.sleep)
    asyncio.run(watch.begin())
    assert reports.now == pytest.approx(1.0, abs=0.11)
    reports.now += 3.4
    first, second = asyncio.run(watch.end(3.4))
    assert reports.now == pytest.approx(5.0, abs=0.11)
    assert first.busy == pytest.approx(0.5)
    assert (first.resident_bytes, second.resident_bytes) == (None, 11)


def test_stages_that_do_not_report_are_not_waited_for_for_ever() -> None:
    reports = Reports()

    async def nothing() -> Sequence[StageCounts]:
        return []

    watch = StageWatch(nothing, sleep=reports.sleep)
    asyncio.run(watch.begin())
    assert reports.now == pytest.approx(PATIENCE_S)
    assert asyncio.run(watch.end(1.0)) == []


def test_memory_is_that_of_the_ranks_below_a_process(tmp_path: Path) -> None:
    def process(pid: int, parent: int, title: str, kib: int) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) 3) S {parent} 1 1")
        (folder / "cmdline").write_bytes(title.replace(" ", "\0").encode() + b"\0")
        (folder / "smaps_rollup").write_text(f"Rss: 999 kB\nPss:  {kib} kB\nPss_Dirty: 1 kB\n")

    process(10, 1, "penstock bench sweep", 7)
    process(11, 10, "penstock supervisor", 8)
    process(12, 11, "penstock stage 0 tp 0", 100)
    process(13, 11, "penstock stage 0 tp 1", 200)
    process(14, 11, "penstock replica 1 stage 3 tp 0", 400)
    process(20, 1, "penstock stage 0 tp 0", 5000)  # of another engine
    assert resident_bytes_below(10, tmp_path) == {(0, 0): 300 << 10, (1, 3): 400 << 10}
    assert resident_bytes_below(99, tmp_path) == {}


class MadeUpEngine:
    """Gives every request its tokens, two at once, and loses one of them."""

    def __init__(self, lost: int | None = None) -> None:
        self.now = 0.0
        self.sampling: list[SamplingParams] = []
        self._lost = lost

    def clock(self) -> float:
        return self.now

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        assert sampling_params is not None
        self.sampling.append(sampling_params)
        ids = prompt["prompt_token_ids"]
        for count in (2, 4, 5):
            if self._lost == ids[0]:
                raise StageLostError("stage 1 is lost")
            self.now += 0.5
            is_done = count == 5
            choice = CompletionOutput(
                token_ids=list(range(count)), finish_reason="length" if is_done else None
            )
            yield RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=ids, outputs=[choice], finished=is_done
            )


def requests(count: int) -> list[BenchRequest]:
    return [
        BenchRequest(index=number, arrival_s=0.0, prompt_token_ids=[number, 7], output_len=5)
        for number in range(count)
    ]


def test_streams_of_an_engine_are_booked_and_audited() -> None:
    engine = MadeUpEngine()
    result = asyncio.run(replay(EngineSender(engine, engine.clock), requests(3), 1))
    assert result.audit.violations == []
    assert result.totals()["total_output_tokens"] == 15
    assert result.latencies_s()["ttft"] == [0.5] * 3
    assert result.latencies_s()["tpot"] == [0.25] * 3
    assert result.latencies_s()["itl"] == [0.5] * 6
    assert [(each.max_tokens, each.ignore_eos, each.seed) for each in engine.sampling] == [
        (5, True, number) for number in range(3)
    ]


def test_a_request_that_an_engine_loses_is_booked_with_its_error() -> None:
    engine = MadeUpEngine(lost=1)
    result = asyncio.run(replay(EngineSender(engine, engine.clock), requests(3), 1))
    assert (result.audit.num_errors, result.audit.violations) == (1, [])
    (error,) = [account.error for account in result.accounts if account.error is not None]
    assert error.message == "stage 1 is lost"

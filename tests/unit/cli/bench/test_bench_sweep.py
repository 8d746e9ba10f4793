"""A sweep with engines made up: its order, its failures, and how it goes on after an interruption."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench import sweep as sweeping
from penstock.cli.bench.sweep import SweepAxes, sweep
from penstock.cli.bench.sweep_grid import (
    Grid,
    LayoutPoint,
    SweepFile,
    SweepHead,
    SweepRecord,
    swept_runs,
)
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.errors import PenstockError, UsageError
from penstock.reports.figures import RunFigures, latencies_of

HEAD = SweepHead(model="demo", settings={"input-len": "8"})
GRID = SweepAxes(pp="1,2", depth="0,auto", concurrency="4,1,2").grid


class MadeUpEngines:
    """Engines of which each point takes no time.

    Args:
        fails: raises for points and starts that are to fail.
    """

    def __init__(
        self, fails: Callable[[LayoutPoint, int | None], None] = lambda layout, number: None
    ) -> None:
        self.started: list[LayoutPoint] = []
        self.measured: list[tuple[LayoutPoint, int]] = []
        self.num_open = 0
        self._fails = fails

    @asynccontextmanager
    async def open(self, layout: LayoutPoint) -> AsyncIterator[Any]:
        self.started.append(layout)
        self._fails(layout, None)
        self.num_open += 1
        assert self.num_open == 1
        engines = self

        class Engine:
            async def measure(self, concurrency: int) -> RunFigures:
                engines._fails(layout, concurrency)
                engines.measured.append((layout, concurrency))
                return figures(layout, concurrency)

        try:
            yield Engine()
        finally:
            self.num_open -= 1


def figures(layout: LayoutPoint, concurrency: int) -> RunFigures:
    return RunFigures(
        series=layout.name,
        concurrency=concurrency,
        duration_s=1.0,
        completed=concurrency,
        prompt_tokens=8,
        output_tokens=10 * concurrency * layout.pp,
        latencies_ms=latencies_of({"ttft": [0.01]}),
    )


def swept(path: Path, engines: MadeUpEngines, seed: int = 3) -> tuple[list[SweepRecord], list[str]]:
    said: list[str] = []
    with SweepFile(path, HEAD) as file:
        asyncio.run(sweep(GRID.drawn(seed), engines.open, file, said.append, clock=lambda: 5.0))
        return file.records, said


def test_every_point_of_the_grid_is_measured_once_by_one_engine_a_layout(tmp_path: Path) -> None:
    engines = MadeUpEngines()
    records, said = swept(tmp_path / "s.jsonl", engines)
    assert sorted(engines.started, key=GRID.layouts.index) == GRID.layouts
    expected = set(itertools.product(GRID.layouts, [4, 1, 2]))
    assert set(engines.measured) == expected
    assert len(engines.measured) == len(records) == len(expected) == 12
    assert "PP 2 x TP 1, depth 0, 4 at once: 80.0 tokens/s, first token 10.00 ms" in said


def test_the_order_is_drawn_from_the_seed() -> None:
    assert GRID.drawn(3) == GRID.drawn(3)
    orders = {tuple(layout for layout, _ in GRID.drawn(seed)) for seed in range(40)}
    assert len(orders) > 10
    firsts = {numbers[0] for seed in range(40) for _, numbers in GRID.drawn(seed)}
    assert firsts == {1, 2, 4}  # no concurrency is always the last to run


def test_a_point_that_fails_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    bad = GRID.layouts[0]

    def fails(layout: LayoutPoint, concurrency: int | None) -> None:
        if layout == bad and concurrency == 2:
            raise PenstockError("request 3: stage 1 is lost")
        if layout == GRID.layouts[1] and concurrency is None:
            raise ValueError("five")

    records, said = swept(tmp_path / "s.jsonl", MadeUpEngines(fails))
    errors = {(record.layout, record.concurrency): record.error for record in records if record.run is None}
    assert errors == {(bad, 2): "request 3: stage 1 is lost"} | {
        (GRID.layouts[1], number): "ValueError: five" for number in (1, 2, 4)
    }
    assert len(records) == 12
    assert f"{bad.name}, 2 at once: failed: request 3: stage 1 is lost" in said
    runs, failed = swept_runs(GRID, records)
    assert (len(runs), len(failed)) == (8, 4)
    assert [run.series for run in runs[:2]] == ["PP 1 x TP 1, depth 0"] * 2  # in the order of the axes
    assert [run.concurrency for run in runs[:2]] == [1, 4]


def test_an_interrupted_sweep_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"

    def interrupt(layout: LayoutPoint, concurrency: int | None) -> None:
        if len(first.measured) == 5 and concurrency is not None:
            raise KeyboardInterrupt

    first = MadeUpEngines(interrupt)
    with pytest.raises(KeyboardInterrupt):
        swept(path, first)
    assert first.num_open == 0
    with path.open("ab") as file:
        file.write(b'{"type":"point","layout":{"pp":1')  # killed while it wrote
    second = MadeUpEngines()
    records, _ = swept(path, second)
    assert len(records) == 12
    assert len(second.measured) == 7
    assert set(first.measured).isdisjoint(second.measured)
    third = MadeUpEngines()
    assert len(swept(path, third)[0]) == 12
    assert third.started == []  # no engine is started for a layout that has all its points


def test_a_file_of_other_settings_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    swept(path, MadeUpEngines())
    content = path.read_bytes()
    with pytest.raises(UsageError, match="input-len was 8 and is 9"):
        SweepFile(path, SweepHead(model="demo", settings={"input-len": "9"}))
    with pytest.raises(UsageError, match="of the model demo"):
        SweepFile(path, SweepHead(model="other", settings=HEAD.settings))
    assert path.read_bytes() == content
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    with pytest.raises(UsageError, match="does not hold results of a sweep"):
        SweepFile(notes, HEAD)
    with pytest.raises(UsageError, match="cannot be used"):
        SweepFile(tmp_path, HEAD)


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    records, _ = swept(path, MadeUpEngines())
    with SweepFile(path, HEAD) as file:
        assert file.records == records


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"pp": "1,x"}, "--pp is '1,x'"),
        ({"concurrency": "0"}, "--concurrency is '0'"),
        ({"micro_batches": ""}, "--micro-batches is ''"),
        ({"depth": "-1"}, "--depth is '-1'"),
    ],
)
def test_axes_that_cannot_be_read_are_refused(axes: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        _ = SweepAxes(**axes).grid


def test_words_and_numbers_of_an_axis() -> None:
    grid: Grid = SweepAxes(depth="2,auto,0", micro_batches="auto", pp="3,1,3").grid
    assert (grid.depths, grid.micro_batches, grid.pp) == ([2, 0, "auto"], ["auto"], [3, 1])
    assert {layout.name for layout in grid.layouts} >= {"PP 3 x TP 1, depth 2", "PP 1 x TP 1"}


def bench(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={})
    return run(["bench", "sweep", *words], invocation), out.getvalue(), err.getvalue()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> MadeUpEngines:
    made = MadeUpEngines()
    monkeypatch.setattr(sweeping, "SweptEngines", lambda *arguments: made)
    return made


def test_the_command_writes_a_report_and_goes_on(engines: MadeUpEngines, tmp_path: Path) -> None:
    path, page = tmp_path / "s.jsonl", tmp_path / "r.html"
    words = ("demo", "--pp", "1,2", "--concurrency", "1,4", "--results", str(path), "--threads-per-rank", "1")
    code, out, err = bench(*words, "--html", str(page))
    assert (code, err) == (0, "")
    assert "PP 2 x TP 1, 4 at once: 80.0 tokens/s" in out
    assert (
        "The highest throughput was 80.0 output tokens/s, with PP 2 x TP 1 and 4 requests" in page.read_text()
    )
    assert len(engines.measured) == 4
    code, out, _ = bench(*words, "--json")
    assert (code, len(engines.measured)) == (0, 4)
    report = json.loads(out)
    assert [(each["series"], each["concurrency"]) for each in report["runs"]] == [
        *(("PP 1 x TP 1", 1), ("PP 1 x TP 1", 4), ("PP 2 x TP 1", 1), ("PP 2 x TP 1", 4)),
    ]
    assert report["settings"]["threads-per-rank"] == "1"
    assert report["settings"]["max-num-seqs"] == "64"
    code, _, err = bench(*words, "--input-len", "9")
    assert code == 2
    assert "input-len was 128 and is 9" in err


def test_the_command_fails_where_a_point_has(
    engines: MadeUpEngines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(layout: LayoutPoint, concurrency: int | None) -> None:
        if layout.pp == 2:
            raise PenstockError("too many stages")

    monkeypatch.setattr(engines, "_fails", fails)
    code, out, _ = bench("demo", "--concurrency", "1", "--results", str(tmp_path / "s.jsonl"), "--json")
    assert code == 1
    assert json.loads(out)["failed"] == [
        {"series": "PP 2 x TP 1", "concurrency": 1, "error": "too many stages"}
    ]

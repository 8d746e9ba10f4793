"""The page of a report: one file without a network, pictures with their numbers below, and safe names."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest

from penstock.reports.charts import Bar, Line, bar_chart, line_chart, ticks
from penstock.reports.figures import (
    FailedRun,
    PredictedFigures,
    Report,
    RunFigures,
    StageFigures,
    latencies_of,
    report_json,
)
from penstock.reports.markup import element, text
from penstock.reports.page import report_page

_EMPTY = {"meta", "br"}


def stage(number: int, busy: float, sampling: float = 0.0) -> StageFigures:
    return StageFigures(
        stage=number,
        busy=busy,
        causes={"no_work": 0.0, "wait_prev": 0.9 - busy},
        overhead=0.1,
        sampling=sampling,
        num_steps=40,
        step_s=0.002 * (1 + number),
        weight_bytes=3 << 20,
        kv_bytes=5 << 20,
        stranded_bytes=1 << 20,
        resident_bytes=17 << 20,
    )


def run(series: str, concurrency: int, *, predicted: bool = True) -> RunFigures:
    return RunFigures(
        series=series,
        concurrency=concurrency,
        duration_s=2.0,
        completed=concurrency,
        prompt_tokens=100,
        output_tokens=50 * concurrency,
        latencies_ms=latencies_of({"ttft": [0.010, 0.030], "tpot": [0.004]}),
        stages=[stage(0, 0.5), stage(1, 0.75, sampling=0.125)],
        predicted=PredictedFigures(
            basis="By figures.", ttft_s=0.022, time_per_token_s=0.005, tokens_per_s=30.0, bubble=0.25
        )
        if predicted
        else None,
    )


def report(*runs: RunFigures, failed: tuple[FailedRun, ...] = (), model: str = "demo") -> Report:
    return Report(
        title="Sweep over layouts",
        model=model,
        version="0.1.0",
        made_at="2026-01-02 03:04 UTC",
        settings={"input-len": "128"},
        runs=list(runs),
        failed=list(failed),
        notes=["A note."],
    )


class Outline(HTMLParser):
    """Checks that elements are nested, and collects what a reader without pictures gets."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.cells: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_page_is_one_file_that_names_no_host_and_runs_no_script() -> None:
    page = report_page(report(run("PP 1 x TP 1", 1), run("PP 2 x TP 1", 8)))
    assert not re.search(
        r"https?:|[\"'(=\s]//|<script|javascript:|@import|url\(|<link|<iframe|<img|\son\w+=", page
    )
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert " style=" not in page  # the policy names the one style by its digest


def test_every_picture_has_a_title_a_description_and_a_table_below() -> None:
    outline = Outline(report_page(report(run("PP 1 x TP 1", 1), run("PP 2 x TP 1", 8))))
    pictures = outline.seen.count("figure")
    assert pictures == 7  # throughput, two latencies, time of stages, memory, two predictions
    assert outline.seen.count("desc") == pictures
    assert len(outline.ids) == len(set(outline.ids)) == 2 * pictures
    behind_first = outline.seen[outline.seen.index("figure") :]
    assert behind_first.count("table") >= 7


def test_tables_have_the_numbers() -> None:
    cells = Outline(report_page(report(run("PP 2 x TP 1", 8)))).cells
    rows = " ".join(cells)
    assert "PP 2 x TP 1 8 200.0 250.0 4.00 8 0 2.00" in rows  # tokens/s, in all, requests/s, requests, failed
    assert "PP 2 x TP 1 8 20.00 20.00 28.00 29.80 30.00 2" in rows  # first token: mean, percentiles, longest
    assert (
        "PP 2 x TP 1 8 1 75.0 15.0 0.0 15.0 10.0 40 4.00" in rows
    )  # stage 1: busy, bubble, causes, overhead
    assert "PP 2 x TP 1 8 1 12.5 2.00 x" in rows  # head and sampling; its step against the other's
    assert "PP 2 x TP 1 8 0 3.0 5.0 1.0 17.0" in rows  # MiB
    measured = "PP 2 x TP 1 8 20.00 22.00 +10.0 % 4.00 5.00 +25.0 % 200.00 30.00 -85.0 % 37.5 25.0 -12.5"
    assert measured in rows


def test_layouts_stand_side_by_side() -> None:
    one, two = run("PP 1 x TP 1", 8), run("PP 2 x TP 1", 8)
    cells = " ".join(Outline(report_page(report(one, two))).cells)
    assert "PP 2 x TP 1 8 200.0 20.00 4.00 37.5 8.0 34.0" in cells
    assert "Layouts side by side" not in report_page(report(one))


def test_what_was_not_measured_has_no_section() -> None:
    bare = RunFigures(
        series="PP 1 x TP 1", concurrency=4, duration_s=1.0, completed=4, prompt_tokens=4, output_tokens=8
    )
    page = report_page(report(bare))
    assert "Throughput" in page
    for heading in ("<h2>Latency", "Memory", "Predicted", "The last stage", "failed</h2>"):
        assert heading not in page


def test_a_report_without_runs_says_why_its_points_failed() -> None:
    failed = FailedRun(series="PP 9 x TP 1", concurrency=8, error="5 layers cannot be cut into 9 stages.")
    outline = Outline(report_page(report(failed=(failed,))))
    assert "5 layers cannot be cut into 9 stages." in outline.cells
    assert "figure" not in outline.seen


def test_names_cannot_become_markup() -> None:
    page = report_page(report(run('<b onclick="x()">&', 1), model="</title><script>alert(1)</script>"))
    Outline(page)
    assert "<script" not in page
    assert "<b " not in page
    assert element("a", text("1 < 2"), name='"') == '<a name="&quot;">1 &lt; 2</a>'


def test_a_stage_that_was_lost_does_not_count_for_the_bubble() -> None:
    half = run("PP 2 x TP 1", 8)
    assert half.bubble == pytest.approx(1 - (0.5 + 0.75) / 2)
    lost = msgspec.structs.replace(half, stages=[half.stages[0], StageFigures(stage=1)])
    assert lost.bubble == pytest.approx(0.5)
    assert msgspec.structs.replace(half, stages=[]).bubble is None


def test_the_json_has_the_same_numbers_and_the_rates() -> None:
    (found,) = json.loads(report_json(report(run("PP 2 x TP 1", 8))))["runs"]
    assert (found["output_tokens_per_s"], found["requests_per_s"], found["bubble"]) == (200.0, 4.0, 0.375)
    assert found["stages"][1]["sampling"] == 0.125
    assert found["predicted"]["tokens_per_s"] == 30.0


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.0, [0, 0.25, 0.5, 0.75, 1]),
        (1.0, [0, 0.25, 0.5, 0.75, 1]),
        (97.0, [0, 25, 50, 75, 100]),
        (101.0, [0, 50, 100, 150]),
        (3e-4, [0, 1e-4, 2e-4, 3e-4]),
    ],
)
def test_axes_end_at_round_numbers(most: float, expected: list[float]) -> None:
    assert ticks(most) == pytest.approx(expected)


def test_points_lie_where_their_numbers_say() -> None:
    line = Line(name="a", points=[(1, 0.0), (4, 50.0), (16, 100.0)], colour=0)
    drawn = line_chart("t", "x", "y", [line], "k")
    (path,) = re.findall(r'points="([^"]+)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, place.split(",")) for place in path.split())
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.1)  # concurrency by powers of two
    assert y0 > y2


def test_parts_of_a_bar_stand_one_behind_the_other() -> None:
    bar = Bar(name="stage 0", parts=[("busy", 60.0), ("wait_prev", 30.0), ("overhead", 10.0)])
    drawn = bar_chart("t", "%", [bar], "k", whole=100.0)
    places = re.findall(r'<rect x="([\d.]+)" y="26" width="([\d.]+)"', drawn)
    (a, wide), (b, less), (c, least) = ((float(x), float(width)) for x, width in places)
    assert (a + wide, b + less) == pytest.approx((b, c), abs=0.02)
    assert wide / less == pytest.approx(2.0, rel=0.01)
    assert less / least == pytest.approx(3.0, rel=0.01)

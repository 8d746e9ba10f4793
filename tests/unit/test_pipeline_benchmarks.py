"""What the benchmarks of pipelines compute from times, traces and what other programs print."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from paths import REPOSITORY
from penstock.batch import StageSpans
from penstock.trace.chrome import Span, StageTrack, chrome_trace
from penstock.trace.phases import Phase
from penstock.workloads.traces import TraceRow

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks" / "peers"))
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    bars: Any = importlib.import_module("peers.bars")
    report: Any = importlib.import_module("peers.report")
    link_latency: Any = importlib.import_module("link_latency")
    mixed_load: Any = importlib.import_module("mixed_load")
    pipeline_fill: Any = importlib.import_module("pipeline_fill")
    pipeline_peers: Any = importlib.import_module("pipeline_peers")
    pipeline_scaling: Any = importlib.import_module("pipeline_scaling")
    trace_events: Any = importlib.import_module("trace_events")
    trace_picture: Any = importlib.import_module("trace_picture")
    vllm_peer: Any = importlib.import_module("vllm_peer")

MS = 1_000_000


def span(stage: int, phase: Phase, start_ms: float, end_ms: float, step: int = 0, tokens: int = 1) -> Span:
    return Span(StageTrack(0, stage), phase, round(start_ms * MS), round(end_ms * MS), step, tokens)


def filling(num_stages: int, count: int, step_ms: int = 10) -> list[Span]:
    """Steps that fill and drain a pipe of equal stages, without any loss."""
    return [
        span(stage, Phase.FORWARD, (stage + step) * step_ms, (stage + step + 1) * step_ms, step)
        for stage in range(num_stages)
        for step in range(count)
    ]


# --- link_latency -----------------------------------------------------------------------------------


def test_a_latency_is_from_send_to_receipt_and_the_first_frames_do_not_count() -> None:
    warm_up = link_latency.WARM_UP_FRAMES
    sent = [0] * warm_up + [1000, 5000]
    received = [10**9] * warm_up + [13_000, 25_000]
    assert link_latency.one_way_us(sent, received) == [12.0, 20.0]


@pytest.mark.parametrize(
    ("loaded", "latency_us", "met"), [(False, 15.0, True), (False, 25.0, False), (True, 25.0, True)]
)
def test_a_median_counts_only_where_nothing_runs_beside(loaded: bool, latency_us: float, met: bool) -> None:
    row, found = link_latency.table_row(1.0, loaded, False, [latency_us] * 10, 3.0)
    assert found == met
    assert row[3] == f"{latency_us:.1f}"


# --- pipeline_fill ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 16])
def test_the_bubble_of_a_fill_without_loss_is_the_formula(count: int) -> None:
    bubble, steps = pipeline_fill.fill_bubble(filling(4, count), 4)
    assert steps == count
    assert bubble == pytest.approx(pipeline_fill.ideal_bubble(4, count))


def test_probes_are_no_steps_of_a_fill() -> None:
    probe = span(0, Phase.FORWARD, 500, 501, step=9, tokens=0)
    assert pipeline_fill.fill_bubble([*filling(2, 3), probe], 2)[1] == 3


def test_shares_are_of_the_window_and_causes_are_named_longest_first() -> None:
    spans = [
        span(0, Phase.TAKE, 0, 1),
        span(0, Phase.FORWARD, 1, 8),
        span(0, Phase.WAIT_NEXT, 8, 10),
    ]
    shares = pipeline_fill.phase_shares(spans, 0, 10 * MS)
    found = shares[StageTrack(0, 0)]
    assert found[Phase.FORWARD] == pytest.approx(0.7)
    assert pipeline_fill.causes(found) == "wait_next 20.0%, take 10.0%"


# --- pipeline_peers, pipeline_scaling ---------------------------------------------------------------


def test_a_bar_takes_our_better_partition_unless_it_names_one() -> None:
    case = report.Case(kind="decode", batch=8, input=128, output=128)
    samples = {"penstock even": {case: [90.0]}, "penstock 16,8": {case: [100.0]}, "vllm": {case: [50.0]}}
    table, all_met = bars.bar_table(pipeline_peers.BARS, [case], samples)
    assert all_met
    assert table.splitlines()[2:] == ["| decode B=8, best / vllm | 1.7 | 2.00 | met |"]
    even = bars.Bar(ours="penstock even", peer="vllm", kind="decode", batch=8, wanted=1.7)
    assert bars.bar_ratio(even, case, {name: report.medians(s) for name, s in samples.items()}) == 1.8


@pytest.mark.parametrize(("threads", "stages", "bound"), [(2, 1, "0,1"), (1, 2, "0|1"), (2, 2, "0,1|4,5")])
def test_vllm_is_told_the_cores_of_each_stage(
    threads: int, stages: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5, 4, 1, 0})
    assert vllm_peer.bound_cores(threads, stages) == bound


def test_the_rate_of_a_prototype_is_read_from_its_line() -> None:
    output = "cpp B=8 ctx=256 pp2: 266.0 tok/s  stage0 busy 97% ; stage1 busy 99%\n"
    assert pipeline_scaling.parse_rate(output, "pp2", 8) == 266.0
    assert pipeline_scaling.parse_rate(output, "one1", 8) is None
    assert pipeline_scaling.parse_rate(output, "pp2", 80) is None


def test_scaling_is_our_ratio_over_the_prototypes() -> None:
    rates = {
        "one, 8": [100.0],
        "prototype one, 8": [100.0],
        "two engines, 8 each": [200.0],
        "two stages, 16": [180.0, 190.0, 200.0],
        "prototype two stages, 16": [200.0],
        "two threads, 64": [100.0],
        "two stages, 64": [95.0],
    }
    table, fine = pipeline_scaling.ratio_table([8], rates)
    assert not fine
    assert [line.split(" | ")[1:] for line in table.splitlines()[2:]] == [
        ["1.90", "2.00", "0.950", "2.00", "0.950", "0.97: missed |"],
        ["0.95", "-", "-", "-", "-", "0.92: met |"],
    ]


# --- mixed_load -------------------------------------------------------------------------------------


def test_arrivals_are_stretched_to_the_offered_rate() -> None:
    rows = [TraceRow(arrival_s=second, input_len=1, output_len=1) for second in (0.0, 1.0, 5.0, 10.0)]
    scale = mixed_load.time_scale(rows, 0.1)
    assert (len(rows) - 1) / (rows[-1].arrival_s * scale) == pytest.approx(0.1)


def test_busy_ratios_are_read_by_stage() -> None:
    text = """# TYPE penstock_pipeline_stage_busy_ratio gauge
penstock_pipeline_stage_busy_ratio{model_name="demo",stage="0"} 0.93
penstock_pipeline_stage_busy_ratio{model_name="demo",stage="1"} 9.5e-01
penstock_epoch{model_name="demo"} 0.0
"""
    assert mixed_load.busy_ratios(text) == {"0": 0.93, "1": 0.95}


def test_bars_of_mixed_load_are_of_the_same_offered_load() -> None:
    ours = {
        "itl p99, ms": 80.0,
        "ttft p50, ms": 100.0,
        "ttft p99, ms": 200.0,
        "stage 1 busy at saturation, %": 90.0,
    }
    peer = {"itl p99, ms": 300.0, "ttft p50, ms": 180.0, "ttft p99, ms": 260.0}
    rows = mixed_load.bar_rows({"penstock": ours, "vllm": peer})
    assert [row[2:] for row in rows] == [
        ["80.0", "met"],
        ["1.80", "met"],
        ["1.30", "missed"],
        ["90.0", "missed"],
    ]
    assert len(mixed_load.bar_rows({"penstock": ours})) == 2


# --- traces -----------------------------------------------------------------------------------------


def trace(num_replicas: int = 1) -> dict[str, Any]:
    """Two steps of two stages, as `/debug/trace` serves them."""
    phases = {
        0: [Phase.TAKE, Phase.FORWARD, Phase.COMM, Phase.TAKE, Phase.FORWARD, Phase.COMM],
        1: [Phase.WAIT_PREV, Phase.COMM, Phase.FORWARD, Phase.WAIT_PREV, Phase.COMM, Phase.FORWARD],
    }
    return chrome_trace(
        [
            StageSpans(
                stage=stage,
                began_ns=10**12,
                phases=bytes(found),
                durations_ns=[5 * MS] * len(found),
                steps=[(0, 7, 32), (3, 8, 32)],
                replica=replica,
            )
            for replica in range(num_replicas)
            for stage, found in phases.items()
        ]
    )


def test_spans_come_back_out_of_a_chrome_trace() -> None:
    spans = trace_events.read_spans(trace())
    assert [found.stage for found in spans] == [StageTrack(0, 0)] * 6 + [StageTrack(0, 1)] * 6
    assert spans[1] == Span(StageTrack(0, 0), Phase.FORWARD, 10**12 + 5 * MS, 10**12 + 10 * MS, 7, 32)


def test_spans_are_cut_at_the_window() -> None:
    cut = trace_events.within([span(0, Phase.FORWARD, 0, 10), span(0, Phase.PUT, 10, 20)], 4 * MS, 9 * MS)
    assert cut == [span(0, Phase.FORWARD, 4, 9)]


def test_short_spans_go_to_those_before_them_and_equal_neighbours_are_one() -> None:
    spans = [
        span(0, Phase.FORWARD, 0, 5),
        span(0, Phase.PUT, 5, 5.1),
        span(0, Phase.FORWARD, 5.1, 9),
        span(0, Phase.FORWARD, 9, 12, step=1),
    ]
    found = trace_picture.merged(spans, MS)
    assert found == [span(0, Phase.FORWARD, 0, 9), span(0, Phase.FORWARD, 9, 12, step=1)]


def test_the_window_is_in_the_middle_unless_it_is_given() -> None:
    spans = [span(0, Phase.FORWARD, 0, 100), span(1, Phase.FORWARD, 20, 110)]
    assert trace_picture.choose_window(spans, None, 40.0) == (40 * MS, 80 * MS)
    assert trace_picture.choose_window(spans, 5.0, 40.0) == (25 * MS, 65 * MS)


@pytest.mark.parametrize(
    ("num_replicas", "names"),
    [(1, {"stage 0", "stage 1"}), (2, {"dp 0 stage 0", "dp 0 stage 1", "dp 1 stage 0", "dp 1 stage 1"})],
)
def test_a_picture_is_well_formed_and_has_bands_steps_and_arrows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_replicas: int, names: set[str]
) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "picture.svg"
    source.write_text(json.dumps(trace(num_replicas)))
    words = ["trace_picture", str(source), str(target), "--length-ms", "30", "--title", "P < 3 & full"]
    monkeypatch.setattr("sys.argv", words)
    assert trace_picture.main() == 0
    root = ElementTree.fromstring(target.read_text())
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"P < 3 & full", "7", "8", "layers", "copying"} | names <= texts
    arrows = [element for element in root.iter() if element.get("class") == "a"]
    assert len(arrows) == 2 * num_replicas  # none from one replica to another

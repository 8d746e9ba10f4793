"""The numbers of a load run, against hand calculation and numpy."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.bench.ledger import Audit, StreamAccount
from penstock.cli.bench.results import (
    RunResult,
    as_json,
    ledger_lines,
    peak_concurrency,
    table,
    write_json,
)
from penstock.errors import UsageError
from penstock.workloads.requests import BenchRequest
from penstock.workloads.summaries import percentile, summary


def account(index: int, start: float, times: list[float]) -> StreamAccount:
    """One token at each of the times after the start."""
    moments = [start + time for time in times]
    return StreamAccount(
        index=index,
        started_s=start,
        first_token_s=moments[0],
        last_token_s=moments[-1],
        ended_s=moments[-1],
        token_ids=list(range(len(times))),
        chunk_gaps_s=[b - a for a, b in pairwise(moments)],
        dones=1,
    )


@pytest.fixture
def result() -> RunResult:
    requests = [
        BenchRequest(index=index, arrival_s=0.0, prompt_token_ids=[1] * 10, output_len=count)
        for index, count in enumerate((3, 1, 2))
    ]
    broken = StreamAccount(index=2, started_s=0.0, ended_s=1.0, broken="cut")
    accounts = [account(0, 0.0, [0.1, 0.2, 0.5]), account(1, 1.0, [0.3]), broken]
    audit = Audit(num_requests=3, num_tokens=4, num_errors=0, violations=["request 2: cut"])
    return RunResult(requests=requests, accounts=accounts, duration_s=2.0, audit=audit)


def test_latencies_are_those_of_the_definitions(result: RunResult) -> None:
    samples = result.latencies_s()
    assert samples["ttft"] == pytest.approx([0.1, 0.3])
    assert samples["tpot"] == pytest.approx([0.2])  # (0.5 - 0.1) / 2; a single token has none
    assert samples["itl"] == pytest.approx([0.1, 0.3])
    assert samples["e2el"] == pytest.approx([0.5, 0.3])


def test_totals_count_completed_requests_only(result: RunResult) -> None:
    totals = result.totals()
    assert (totals["completed"], totals["failed"]) == (2, 1)
    assert (totals["total_input_tokens"], totals["total_output_tokens"]) == (20, 4)
    assert totals["request_throughput"] == pytest.approx(1.0)
    assert totals["output_throughput"] == pytest.approx(2.0)
    assert totals["total_token_throughput"] == pytest.approx(12.0)


def test_percentile_follows_numpy() -> None:
    values = [5.0, 1.0, 9.0, 2.5, 7.0, 3.0]
    for percent in (0, 10, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile([4.0], 99) == 4.0
    assert percentile([], 50) == 0.0


def test_summary_is_in_milliseconds() -> None:
    numbers = summary([0.001, 0.003], (50, 99))
    assert numbers["mean"] == pytest.approx(2.0)
    assert numbers["median"] == numbers["p50"] == pytest.approx(2.0)
    assert numbers["std"] == pytest.approx(1.0)
    assert numbers["p99"] == pytest.approx(2.98)
    assert set(summary([]).values()) == {0.0}


def test_table_has_the_rows_that_people_look_for(result: RunResult) -> None:
    text = "\n".join(table(result))
    for name in (
        "Successful requests:",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
        *(
            f"{word} {key} (ms):"
            for key in ("TTFT", "TPOT", "ITL", "E2EL")
            for word in ("Mean", "Median", "P99")
        ),
    ):
        assert text.count(name) == 1
    rows = dict(line.rsplit(maxsplit=1) for line in table(result) if line[0] not in "=-")
    assert rows["Successful requests:"] == "2"
    assert rows["Mean TTFT (ms):"] == "200.00"
    assert rows["Mean E2EL (ms):"] == "400.00"


def test_json_has_vllm_names_and_the_ledger(result: RunResult) -> None:
    found = json.loads(json.dumps(as_json(result, {"model_id": "m", "request_rate": "inf"}, (90, 99))))
    for key in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{word}_{key}_ms" for word in ("mean", "median", "std", "p90", "p99")} <= set(found)
    assert found["output_lens"] == [3, 1, 0]
    assert found["input_lens"] == [10, 10, 10]
    assert found["errors"] == ["", "", "cut"]
    assert found["ledger"]["violations"] == ["request 2: cut"]
    assert found["model_id"] == "m"


def test_peak_concurrency_counts_overlap() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (1.5, 1.75)]
    accounts = [
        StreamAccount(index=index, started_s=start, ended_s=end) for index, (start, end) in enumerate(spans)
    ]
    assert peak_concurrency(accounts) == 3
    assert peak_concurrency([]) == 0


def test_ledger_lines_say_all_or_show_the_first_violations() -> None:
    fine = Audit(num_requests=5, num_tokens=70, num_errors=1, violations=[])
    assert ledger_lines(fine) == ["Ledger: 5 requests, 70 tokens, each exactly once, 1 ended with an error"]
    bad = Audit(num_requests=5, num_tokens=70, num_errors=0, violations=[f"v{n}" for n in range(5)])
    assert ledger_lines(bad, limit=2) == ["Ledger: 5 violations", "  v0", "  v1", "  and 3 more"]


def test_a_result_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_json(tmp_path / "no" / "file.json", {})

"""Loads: exact lengths, arrivals of the asked rate, trace files scaled and checked."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from paths import shared_data
from penstock.errors import UsageError
from penstock.workloads.requests import arrival_times, at_rate, check_fits, from_trace, synthetic
from penstock.workloads.traces import TraceRow, read_trace

RANDOM = {
    "num_prompts": 20,
    "input_len": 10,
    "output_len": 6,
    "range_ratio": 0.0,
    "request_rate": math.inf,
    "burstiness": 1.0,
    "vocab_size": 7,
    "seed": 3,
}


def test_synthetic_lengths_are_exact_and_ids_in_the_vocabulary() -> None:
    requests = synthetic(**RANDOM)
    assert [request.index for request in requests] == list(range(20))
    assert {len(request.prompt_token_ids) for request in requests} == {10}
    assert {request.output_len for request in requests} == {6}
    used = {token for request in requests for token in request.prompt_token_ids}
    assert used == set(range(7))
    assert {request.arrival_s for request in requests} == {0.0}


def test_a_seed_names_one_load() -> None:
    assert synthetic(**RANDOM) == synthetic(**RANDOM)
    assert synthetic(**RANDOM) != synthetic(**(RANDOM | {"seed": 4}))


def test_requests_of_a_trace_can_come_as_a_poisson_process() -> None:
    requests = synthetic(**RANDOM)
    timed = at_rate(requests, 8.0, 1.0, seed=3)
    assert [each.arrival_s for each in timed] == arrival_times(20, 8.0, 1.0, random.Random(3))
    assert [each.prompt_token_ids for each in timed] == [each.prompt_token_ids for each in requests]
    assert {each.arrival_s for each in at_rate(timed, math.inf, 1.0, seed=3)} == {0.0}


def test_range_ratio_spreads_lengths_within_its_bounds() -> None:
    requests = synthetic(**(RANDOM | {"num_prompts": 300, "range_ratio": 0.5}))
    lengths = {len(request.prompt_token_ids) for request in requests}
    assert lengths == set(range(5, 16))
    assert {request.output_len for request in requests} == set(range(3, 10))


def test_arrivals_have_the_asked_rate_and_burstiness() -> None:
    times = arrival_times(20_000, 8.0, 1.0, random.Random(1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # exponential: as wide as its mean
    even = arrival_times(20_000, 8.0, 100.0, random.Random(1))
    even_gaps = [later - earlier for earlier, later in pairwise(even)]
    assert statistics.fmean(even_gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.pstdev(even_gaps) == pytest.approx(1 / 80, rel=0.05)  # shape 100: a tenth of it


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"input_len": 0}, "--random-input-len"),
        ({"output_len": 0}, "--random-output-len"),
        ({"range_ratio": 1.0}, "--random-range-ratio"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
    ],
)
def test_bad_load_names_the_flag(change: dict[str, float], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        synthetic(**(RANDOM | change))


def test_trace_lengths_are_divided_and_at_least_one() -> None:
    rows = [
        TraceRow(arrival_s=0.0, input_len=1599, output_len=3),
        TraceRow(arrival_s=10.0, input_len=16, output_len=32),
    ]
    requests = from_trace(rows, length_scale=16, time_scale=0.5, vocab_size=9, seed=0)
    assert [len(request.prompt_token_ids) for request in requests] == [99, 1]
    assert [request.output_len for request in requests] == [1, 2]
    assert [request.arrival_s for request in requests] == [0.0, 5.0]


def write_trace(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_azure_trace_times_count_from_the_first_row(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.csv", "2023-11-16 18:15:59.6805900,374,44", "2023-11-16 18:16:01.1805900,396,109"
    )
    assert read_trace(trace, 2, kind="azure") == [
        TraceRow(arrival_s=0.0, input_len=374, output_len=44),
        TraceRow(arrival_s=1.5, input_len=396, output_len=109),
    ]
    assert len(read_trace(trace, 1, kind="azure")) == 1


def test_a_short_or_broken_trace_is_refused(tmp_path: Path) -> None:
    good = "2023-11-16 18:15:59.6805900,374,44"
    with pytest.raises(UsageError, match="has 1 requests, fewer than the 2 asked for"):
        read_trace(write_trace(tmp_path / "a.csv", good), 2, kind="azure")
    with pytest.raises(UsageError, match="not a trace of kind azure"):
        read_trace(write_trace(tmp_path / "b.csv", good, "2023-11-16 18:15:59,x,44"), 2, kind="azure")
    with pytest.raises(UsageError, match="line 3 has a negative length"):
        read_trace(write_trace(tmp_path / "c.csv", good, "2023-11-16 18:16:59,-5,44"), 2, kind="azure")
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", 2, kind="azure")
    (tmp_path / "d.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a trace of kind azure"):
        read_trace(tmp_path / "d.csv", 1, kind="azure")


def test_the_azure_conversation_trace_reads_whole() -> None:
    rows = read_trace(shared_data("traces", "azure_llm_2023_conv.csv"), 500, kind="azure")
    assert (rows[0].input_len, rows[0].output_len, rows[0].arrival_s) == (374, 44, 0.0)
    requests = from_trace(rows, length_scale=16, time_scale=0.1, vocab_size=512, seed=0)
    assert all(
        request.output_len == max(1, row.output_len // 16)
        for request, row in zip(requests, rows, strict=True)
    )
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)


def test_a_request_longer_than_the_model_is_refused_with_both_numbers() -> None:
    requests = synthetic(**RANDOM)
    check_fits(requests, 16)
    with pytest.raises(UsageError, match=r"needs 16 tokens \(10 \+ 6\), more than the model's 15"):
        check_fits(requests, 15)

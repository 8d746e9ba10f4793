"""The offline benchmarks' measuring, with an engine and a clock made up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.bench import offline
from penstock.cli.bench.offline import (
    LATENCY_PERCENTS,
    Generate,
    latency_numbers,
    llm_arguments,
    measure_throughput,
)
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.config.hosts import HostsConfig
from penstock.errors import PenstockError, UsageError
from penstock.llm.llm import LLM
from penstock.workloads.requests import BenchRequest


class TickingEngine:
    """Gives every request its tokens; each batch takes one second more than the one before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: list[int] = []

    def clock(self) -> float:
        return self.now

    def generate(self, requests: Sequence[BenchRequest]) -> list[int]:
        self.batches.append(len(requests))
        self.now += len(self.batches)
        return [request.output_len for request in requests]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TickingEngine:
    made = TickingEngine()

    @contextmanager
    def offline_engine(model: str, given: Mapping[str, Any]) -> Iterator[Generate]:
        yield made.generate

    monkeypatch.setattr(offline, "offline_engine", offline_engine)
    monkeypatch.setattr("penstock.cli.bench.offline.time.perf_counter", made.clock)
    return made


def bench(*words: str) -> tuple[int, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={})
    return run(["bench", *words], invocation), out.getvalue()


def test_throughput_is_tokens_by_time(engine: TickingEngine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    code, out = bench(
        *("throughput", "demo", "--num-prompts", "4", "--input-len", "10", "--output-len", "5"),
        *("--output-json", str(path)),
    )
    assert code == 0
    assert "Throughput: 4.00 requests/s, 60.00 total tokens/s, 20.00 output tokens/s" in out
    found = json.loads(path.read_text())
    assert (found["num_requests"], found["total_num_tokens"], found["elapsed_time"]) == (4, 60, 1.0)
    assert engine.batches == [4]


def test_latency_leaves_the_warm_up_out(engine: TickingEngine, tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    code, out = bench(
        *("latency", "demo", "--batch-size", "2", "--num-iters-warmup", "2", "--num-iters", "3"),
        *("--output-json", str(path)),
    )
    assert code == 0
    assert json.loads(path.read_text())["latencies"] == [3.0, 4.0, 5.0]
    assert "Avg latency: 4.000000 seconds" in out
    assert "50% percentile latency: 4.000000 seconds" in out
    assert engine.batches == [2] * 5


def test_latency_percentiles_follow_numpy() -> None:
    samples = [0.5, 0.1, 0.9, 0.3]
    found = latency_numbers(samples)["percentiles"]
    expected = {str(percent): float(np.percentile(samples, percent)) for percent in LATENCY_PERCENTS}
    assert found == pytest.approx(expected)


def test_missing_tokens_are_no_result() -> None:
    request = BenchRequest(index=3, arrival_s=0.0, prompt_token_ids=[1], output_len=4)
    with pytest.raises(PenstockError, match="request 3 got 2 tokens of 4"):
        measure_throughput([request], lambda requests: [2], lambda: 0.0)


def test_bad_iterations_and_a_missing_model_are_exit_2(engine: TickingEngine) -> None:
    assert bench("latency", "demo", "--num-iters", "0")[0] == 2
    assert bench("latency")[0] == 2
    assert engine.batches == []


def test_engine_settings_become_arguments_of_the_offline_engine() -> None:
    """Issue 25, point 9."""
    arguments = llm_arguments({"pipeline_parallel_size": 3, "num_blocks": 9, "dtype": "float32"})
    assert arguments["pipeline_parallel_size"] == 3
    assert arguments["num_blocks"] == 9
    assert arguments["dtype"] == "float32"
    assert arguments["inter_token_target_ms"] == 100.0  # that of a server
    own = {"model", "distributed_executor_backend", "unknown", *HostsConfig.__struct_fields__}
    assert set(arguments) == set(signature(LLM).parameters) - own


def test_i3_a_backend_that_is_not_built_is_refused_offline_too() -> None:
    with pytest.raises(UsageError, match="there is no executor of this name"):
        llm_arguments({"backend": "dask"})

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
    OfflineEngine,
    latency_numbers,
    llm_arguments,
    measure_throughput,
    vocab_size_of,
)
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.config.hosts import HostsConfig
from penstock.config.speculation import SpeculationConfig
from penstock.errors import ModelConfigError, PenstockError, UsageError
from penstock.llm.arguments import engine_config
from penstock.llm.llm import LLM
from penstock.reports.stage_use import StageCounts
from penstock.workloads.requests import BenchRequest
from small_shapes import write_small_llama


class TickingEngine:
    """Gives every request its tokens; each batch takes one second more than the one before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: list[int] = []
        self.looks = 0

    def clock(self) -> float:
        return self.now

    def counts(self) -> list[StageCounts]:
        """Two stages that report anew at every look; the second one is late."""
        self.looks += 1
        return [
            StageCounts(stage=stage, wall_s=self.looks, busy_s=self.looks / 2, kv_bytes=4096)
            for stage in range(min(2, self.looks))
        ]

    def generate(self, requests: Sequence[BenchRequest]) -> list[int]:
        self.batches.append(len(requests))
        self.now += len(self.batches)
        return [request.output_len for request in requests]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TickingEngine:
    made = TickingEngine()

    @contextmanager
    def offline_engine(model: str, given: Mapping[str, Any]) -> Iterator[OfflineEngine]:
        yield OfflineEngine(generate=made.generate, counts=made.counts)

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


def test_reports_of_offline_runs(engine: TickingEngine, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    words = ("--num-prompts", "4", "--input-len", "10", "--output-len", "5", "--pp", "2", "--predict", "off")
    code, out = bench("throughput", "demo", *words, "--html", str(page), "--json")
    (found,) = json.loads(out)["runs"]
    assert code == 0
    assert (found["series"], found["concurrency"]) == ("PP 2 x TP 1", 4)
    assert (found["output_tokens_per_s"], found["tokens_per_s"]) == (20.0, 60.0)
    assert [(stage["stage"], stage["busy"], stage["kv_bytes"]) for stage in found["stages"]] == [
        (0, pytest.approx(0.5), 4096),
        (1, pytest.approx(0.5), 4096),
    ]
    assert "Memory of the stages" in page.read_text()
    batch = ("--batch-size", "2", "--num-iters-warmup", "0", "--num-iters", "3", "--predict", "off")
    code, out = bench("latency", "demo", *batch, "--json")
    (found,) = json.loads(out)["runs"]
    assert code == 0
    assert (found["latencies_ms"]["e2el"]["p50"], found["latencies_ms"]["e2el"]["count"]) == (3000.0, 3)


def test_a_trace_is_generated_for_at_once(engine: TickingEngine, tmp_path: Path) -> None:
    trace, path = tmp_path / "own.jsonl", tmp_path / "t.json"
    rows = [{"input_len": 40 * number, "output_len": 8, "arrival_s": number} for number in (1, 2, 3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--dataset-name", "custom", "--dataset-path", str(trace), "--length-scale", "4")
    code, _ = bench("throughput", "demo", *words, "--num-prompts", "2", "--output-json", str(path))
    found = json.loads(path.read_text())
    assert (code, found["num_prompt_tokens"], found["num_output_tokens"]) == (0, 30, 4)
    assert bench("throughput", "demo", "--dataset-name", "custom")[0] == 2


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


@pytest.mark.parametrize("method", [{}, {"speculative_method": "draft_model"}])
def test_a_draft_model_that_flags_describe_drafts_in_the_offline_engine(method: dict[str, str]) -> None:
    """`LLM` has one argument for it, and the command line has a flag for each part."""
    flags = {"speculative_model": "small", "speculative_quantization": "int4", "speculative_device": "cpu"}
    arguments = llm_arguments({**flags, **method, "num_speculative_tokens": 5})
    config = engine_config({**arguments, "model": "large"}, "mp")
    wanted = flags | {"speculative_method": "draft_model"}
    assert config.speculation == SpeculationConfig(**wanted, num_speculative_tokens=5)  # type: ignore[arg-type]


def test_prompts_are_made_for_the_layers_that_are_asked_for(tmp_path: Path) -> None:
    """Ours do not compute this activation."""
    model = write_small_llama(tmp_path, hidden_act="relu")
    with pytest.raises(ModelConfigError, match="hidden_act"):
        vocab_size_of(model, {})
    assert vocab_size_of(model, {"model_impl": "transformers"}) == 512


def test_i3_a_backend_that_is_not_built_is_refused_offline_too() -> None:
    with pytest.raises(UsageError, match="no executor has this name"):
        llm_arguments({"backend": "dask"})

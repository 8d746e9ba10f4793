"""`penstock bench throughput` and `penstock bench latency`: the engine without HTTP, through `penstock.LLM`.

Called by `cli.program`. The functions that measure get an `OfflineEngine`, so that they are tested without a
model. Prompts are random token ids; outputs have exactly the length that is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli.bench.engine_load import sampling_of
from penstock.cli.bench.load_shape import DatasetName, trace_path
from penstock.cli.bench.report_flags import LocalReportFlags, ReportFlags, new_report
from penstock.cli.bench.resident_memory import resident_bytes_below
from penstock.cli.bench.results import write_json
from penstock.cli.bench.stage_watch import NoWatch, StageWatch, Watch
from penstock.cli.flags import flag, with_settings
from penstock.cli.terminal import Invocation
from penstock.config.declared import ENGINE, configured, configured_engine, declared
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.refused_settings import refuse_replicas
from penstock.config.speculation import SpeculationConfig, with_speculative_config
from penstock.errors import PenstockError, UsageError
from penstock.layouts.layout_name import layout_name
from penstock.reports.figures import PredictedFigures, RunFigures, latencies_of
from penstock.reports.stage_use import StageCounts, counts_of_core
from penstock.workloads.requests import BenchRequest, from_trace, mean_lengths, synthetic
from penstock.workloads.summaries import percentile
from penstock.workloads.traces import read_trace

Generate = Callable[[Sequence[BenchRequest]], list[int]]
"""Generates for all requests; returns the number of tokens of each."""

LATENCY_PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineEngine:
    """An engine without HTTP, as a benchmark sees it.

    Attributes:
        generate: generates for all requests at once.
        counts: returns what the stages have counted since their start.
    """

    generate: Generate
    counts: Callable[[], Sequence[StageCounts]] = tuple

    def watch(self, report: ReportFlags, config: EngineConfig) -> Watch:
        """Return the watch over the stages' time; one that watches nothing if no report is wanted."""

        async def read() -> Sequence[StageCounts]:
            return self.counts()

        num_stages = config.parallel.pipeline_parallel_size
        return (
            StageWatch(read, resident_bytes_below, num_stages=num_stages) if report.are_wanted else NoWatch()
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """The amount that `bench throughput` generates."""

    dataset_name: Annotated[DatasetName, flag("kind of load", "--dataset-name", group="load")] = "random"
    dataset_path: Annotated[Path | None, flag("trace file of the load", "--dataset-path", group="load")] = (
        None
    )
    length_scale: Annotated[
        float, flag("divide a trace's lengths by this", "--length-scale", group="load")
    ] = 1.0
    num_prompts: Annotated[int, flag("requests", "--num-prompts", group="load")] = 100
    input_len: Annotated[int, flag("tokens of a prompt", "--input-len", group="load")] = 128
    output_len: Annotated[int, flag("tokens to generate", "--output-len", group="load")] = 64
    output_json: Annotated[Path | None, flag("file for the numbers, JSON", "--output-json", group="load")] = (
        None
    )

    def requests(self, vocab_size: int, seed: int) -> list[BenchRequest]:
        """Return the load: random prompts, or the lengths of a trace; all at once. Raises `UsageError`."""
        if self.dataset_name == "random":
            return _random(self.num_prompts, self.input_len, self.output_len, vocab_size, seed)
        path = trace_path(self.dataset_name, self.dataset_path)
        rows = read_trace(path, self.num_prompts, kind=self.dataset_name)
        return from_trace(
            rows, length_scale=self.length_scale, time_scale=0.0, vocab_size=vocab_size, seed=seed
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """The batch that `bench latency` repeats."""

    input_len: Annotated[int, flag("tokens of a prompt", "--input-len", group="load")] = 32
    output_len: Annotated[int, flag("tokens to generate", "--output-len", group="load")] = 128
    batch_size: Annotated[int, flag("requests in a batch", "--batch-size", group="load")] = 8
    num_iters_warmup: Annotated[int, flag("batches before", "--num-iters-warmup", group="load")] = 3
    num_iters: Annotated[int, flag("batches to measure", "--num-iters", group="load")] = 10
    output_json: Annotated[Path | None, flag("file for the numbers, JSON", "--output-json", group="load")] = (
        None
    )


_THROUGHPUT, _LATENCY, _REPORT = ThroughputSettings(), LatencySettings(), LocalReportFlags()


@with_settings(*ENGINE)
def bench_throughput(
    model: str,
    /,
    *,
    load: ThroughputSettings = _THROUGHPUT,
    report: LocalReportFlags = _REPORT,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command `bench throughput`."""
    requests = load.requests(vocab_size_of(model, given), given.get("seed", 0))
    config = configured_engine(given, model)
    predicted = _predicted(report, config, requests, invocation)
    with offline_engine(model, given) as engine:
        watch = engine.watch(report, config)
        asyncio.run(watch.begin())
        numbers = measure_throughput(requests, engine.generate, time.perf_counter)
        stages = asyncio.run(watch.end(numbers["elapsed_time"]))
    _say(
        report,
        invocation,
        f"Throughput: {numbers['requests_per_second']:.2f} requests/s, "
        f"{numbers['tokens_per_second']:.2f} total tokens/s, "
        f"{numbers['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {numbers['num_prompt_tokens']}",
        f"Total num output tokens:  {numbers['num_output_tokens']}",
    )
    if load.output_json is not None:
        write_json(load.output_json, numbers)
    if report.are_wanted:
        run = RunFigures(
            series=series_of(config),
            concurrency=len(requests),
            duration_s=numbers["elapsed_time"],
            completed=len(requests),
            prompt_tokens=numbers["num_prompt_tokens"],
            output_tokens=numbers["num_output_tokens"],
            stages=stages,
            predicted=predicted,
        )
        settings = given | {"num_prompts": load.num_prompts, "input_len": load.input_len}
        settings["output_len"] = load.output_len
        report.deliver(new_report("Offline throughput", model, settings, [run]), invocation)
    return 0


@with_settings(*ENGINE)
def bench_latency(
    model: str,
    /,
    *,
    load: LatencySettings = _LATENCY,
    report: LocalReportFlags = _REPORT,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command `bench latency`."""
    if load.num_iters < 1 or load.num_iters_warmup < 0:
        raise UsageError(f"--num-iters is {load.num_iters}; it must be at least 1, and warm-up at least 0.")
    vocab_size, seed = vocab_size_of(model, given), given.get("seed", 0)
    batch = _random(load.batch_size, load.input_len, load.output_len, vocab_size, seed)
    config = configured_engine(given, model)
    predicted = _predicted(report, config, batch, invocation)
    with offline_engine(model, given) as engine:
        for _ in range(load.num_iters_warmup):
            _timed(batch, engine.generate, time.perf_counter)
        watch = engine.watch(report, config)
        asyncio.run(watch.begin())
        samples = [_timed(batch, engine.generate, time.perf_counter) for _ in range(load.num_iters)]
        stages = asyncio.run(watch.end(sum(samples)))
    numbers = latency_numbers(samples)
    percentiles = [
        f"{percent}% percentile latency: {value:.6f} seconds"
        for percent, value in numbers["percentiles"].items()
    ]
    _say(report, invocation, f"Avg latency: {numbers['avg_latency']:.6f} seconds", *percentiles)
    if load.output_json is not None:
        write_json(load.output_json, numbers)
    if report.are_wanted:
        run = RunFigures(
            series=series_of(config),
            concurrency=load.batch_size,
            duration_s=sum(samples),
            completed=load.batch_size * load.num_iters,
            prompt_tokens=load.num_iters * load.batch_size * load.input_len,
            output_tokens=load.num_iters * load.batch_size * load.output_len,
            latencies_ms=latencies_of({"e2el": samples}),
            stages=stages,
            predicted=predicted,
        )
        settings = given | {"batch_size": load.batch_size, "input_len": load.input_len}
        settings |= {"output_len": load.output_len, "num_iters": load.num_iters}
        report.deliver(new_report("Latency of a batch", model, settings, [run]), invocation)
    return 0


def series_of(config: EngineConfig) -> str:
    """Return the layout of an engine, such as "PP 2 x TP 1"."""
    parallel = config.parallel
    ranks = ",".join(dict.fromkeys(map(str, parallel.tp_sizes)))
    return layout_name(parallel.pipeline_parallel_size, ranks)


def _predicted(
    report: ReportFlags, config: EngineConfig, requests: Sequence[BenchRequest], invocation: Invocation
) -> PredictedFigures | None:
    if not report.are_wanted:
        return None
    count = len(requests)
    return report.predictions(lambda: config, [count], mean_lengths(requests), invocation).get(count)


def _say(report: ReportFlags, invocation: Invocation, *lines: str) -> None:
    say = report.say(invocation)
    for line in lines:
        say(line)


def measure_throughput(
    requests: Sequence[BenchRequest], generate: Generate, clock: Callable[[], float]
) -> dict[str, Any]:
    """Generate for all requests at once, and return rates and totals under vLLM's key names."""
    elapsed = max(_timed(requests, generate, clock), 1e-9)
    tokens_in = sum(len(request.prompt_token_ids) for request in requests)
    tokens_out = sum(request.output_len for request in requests)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "num_prompt_tokens": tokens_in,
        "num_output_tokens": tokens_out,
        "total_num_tokens": tokens_in + tokens_out,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (tokens_in + tokens_out) / elapsed,
        "output_tokens_per_second": tokens_out / elapsed,
    }


def latency_numbers(samples: Sequence[float]) -> dict[str, Any]:
    """Return mean and percentiles of the seconds that batches took, under vLLM's key names."""
    return {
        "avg_latency": sum(samples) / len(samples),
        "latencies": list(samples),
        "percentiles": {str(percent): percentile(samples, percent) for percent in LATENCY_PERCENTS},
    }


def _timed(requests: Sequence[BenchRequest], generate: Generate, clock: Callable[[], float]) -> float:
    """Return the seconds that generation took. Raises `PenstockError` if a request did not get its tokens."""
    started = clock()
    counts = generate(requests)
    elapsed = clock() - started
    for request, count in zip(requests, counts, strict=True):
        if count != request.output_len:
            raise PenstockError(
                f"request {request.index} got {count} tokens of {request.output_len}.",
                remedy="The numbers would be wrong. Run the same command with -v, and report the output.",
            )
    return elapsed


@contextmanager
def offline_engine(model: str, given: Mapping[str, Any]) -> Iterator[OfflineEngine]:
    """Start an `LLM`, and yield it as an `OfflineEngine`. It is shut down at the end."""
    from penstock import LLM

    with LLM(model, **llm_arguments(given)) as llm:

        def generate(requests: Sequence[BenchRequest]) -> list[int]:
            prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
            outputs = llm.generate(prompts, list(map(sampling_of, requests)), use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        yield OfflineEngine(generate=generate, counts=lambda: counts_of_core(llm.stats()))


def llm_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings as keyword arguments of `LLM`.

    Settings that the user has not given get the defaults of the command line, which for some are not those of
    `LLM`. Settings that `LLM` does not have are left out.

    Raises:
        UsageError: several replicas are asked for, which an `LLM` cannot have.
    """
    if configured(ParallelConfig, given).data_parallel_size > 1:
        refuse_replicas()
    arguments = {
        each.name: given.get(each.name, each.default)
        for each in declared(*ENGINE)
        if each.setting.is_argument
    }
    return arguments | _draft_model(given)


def _draft_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` for a draft model, which has flags of its own; empty without one."""
    speculation = configured(SpeculationConfig, given)
    if speculation.speculative_model is None:
        return {}
    asked = with_speculative_config(speculation, given.get("speculative_config"))
    draft = {
        "method": asked.method,
        "model": asked.speculative_model,
        "quantization": asked.speculative_quantization,
        "device": asked.speculative_device,
        "num_speculative_tokens": asked.num_speculative_tokens,
    }
    return {"speculative_method": "auto", "speculative_config": draft}


def vocab_size_of(model: str, given: Mapping[str, Any]) -> int:
    """Return the size of a model's vocabulary: random prompts use token ids below this."""
    from penstock.families.registry import load_spec, resolve_model_directory

    directory = resolve_model_directory(model)
    config = configured(ModelConfig, given, model=model)
    return load_spec(directory, config.model_impl, dequantize=config.gguf_dequantize).vocab_size


def _random(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    return synthetic(
        num_prompts=count,
        input_len=input_len,
        output_len=output_len,
        range_ratio=0.0,
        request_rate=float("inf"),
        burstiness=1.0,
        vocab_size=vocab_size,
        seed=seed,
    )

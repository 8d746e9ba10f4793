"""`penstock bench throughput` and `penstock bench latency`: the engine without HTTP, through `penstock.LLM`.

Called by `cli`. The engine is behind `Generate`, so that the measuring is tested without a model. Prompts are
random token ids; outputs have exactly the asked length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli.bench.results import write_json
from penstock.cli.flags import flag, with_settings
from penstock.cli.terminal import Invocation
from penstock.config.declared import ENGINE, configured, declared
from penstock.config.engine import ParallelConfig
from penstock.config.refused_settings import refuse_replicas
from penstock.errors import PenstockError, UsageError
from penstock.request import SamplingParams
from penstock.workloads.requests import BenchRequest, synthetic
from penstock.workloads.summaries import percentile

Generate = Callable[[Sequence[BenchRequest]], list[int]]
"""Generates for all requests; returns the number of tokens of each."""

LATENCY_PERCENTS = (10, 25, 50, 75, 90, 99)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """How much `bench throughput` generates."""

    num_prompts: Annotated[int, flag("requests", "--num-prompts", group="load")] = 100
    input_len: Annotated[int, flag("tokens of a prompt", "--input-len", group="load")] = 128
    output_len: Annotated[int, flag("tokens to generate", "--output-len", group="load")] = 64
    output_json: Annotated[Path | None, flag("JSON of the numbers", "--output-json", group="load")] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """What `bench latency` repeats."""

    input_len: Annotated[int, flag("tokens of a prompt", "--input-len", group="load")] = 32
    output_len: Annotated[int, flag("tokens to generate", "--output-len", group="load")] = 128
    batch_size: Annotated[int, flag("requests of a batch", "--batch-size", group="load")] = 8
    num_iters_warmup: Annotated[int, flag("batches before", "--num-iters-warmup", group="load")] = 3
    num_iters: Annotated[int, flag("batches that count", "--num-iters", group="load")] = 10
    output_json: Annotated[Path | None, flag("JSON of the numbers", "--output-json", group="load")] = None


_THROUGHPUT, _LATENCY = ThroughputSettings(), LatencySettings()


@with_settings(*ENGINE)
def bench_throughput(
    model: str,
    /,
    *,
    load: ThroughputSettings = _THROUGHPUT,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """The command `bench throughput`."""
    requests = _requests(model, load.num_prompts, load.input_len, load.output_len, given)
    with offline_engine(model, given) as generate:
        numbers = measure_throughput(requests, generate, time.perf_counter)
    invocation.say(
        f"Throughput: {numbers['requests_per_second']:.2f} requests/s, "
        f"{numbers['tokens_per_second']:.2f} total tokens/s, "
        f"{numbers['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {numbers['num_prompt_tokens']}",
        f"Total num output tokens:  {numbers['num_output_tokens']}",
    )
    if load.output_json is not None:
        write_json(load.output_json, numbers)
    return 0


@with_settings(*ENGINE)
def bench_latency(
    model: str,
    /,
    *,
    load: LatencySettings = _LATENCY,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """The command `bench latency`."""
    if load.num_iters < 1 or load.num_iters_warmup < 0:
        raise UsageError(f"--num-iters is {load.num_iters}; it must be at least 1, and warm-up at least 0.")
    batch = _requests(model, load.batch_size, load.input_len, load.output_len, given)
    with offline_engine(model, given) as generate:
        for _ in range(load.num_iters_warmup):
            _timed(batch, generate, time.perf_counter)
        samples = [_timed(batch, generate, time.perf_counter) for _ in range(load.num_iters)]
    numbers = latency_numbers(samples)
    invocation.say(f"Avg latency: {numbers['avg_latency']:.6f} seconds")
    for percent, value in numbers["percentiles"].items():
        invocation.say(f"{percent}% percentile latency: {value:.6f} seconds")
    if load.output_json is not None:
        write_json(load.output_json, numbers)
    return 0


def measure_throughput(
    requests: Sequence[BenchRequest], generate: Generate, clock: Callable[[], float]
) -> dict[str, Any]:
    """Generate for all requests at once; rates and totals under vLLM's key names."""
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
    """Mean and percentiles of the seconds that batches took, under vLLM's key names."""
    return {
        "avg_latency": sum(samples) / len(samples),
        "latencies": list(samples),
        "percentiles": {str(percent): percentile(samples, percent) for percent in LATENCY_PERCENTS},
    }


def _timed(requests: Sequence[BenchRequest], generate: Generate, clock: Callable[[], float]) -> float:
    """Seconds that generation took. Raises when a request did not get its tokens."""
    started = clock()
    counts = generate(requests)
    elapsed = clock() - started
    for request, count in zip(requests, counts, strict=True):
        if count != request.output_len:
            raise PenstockError(
                f"request {request.index} got {count} tokens of {request.output_len}.",
                remedy="The numbers would be wrong; report it with the same command and -v.",
            )
    return elapsed


@contextmanager
def offline_engine(model: str, given: Mapping[str, Any]) -> Iterator[Generate]:
    """An `LLM` as a `Generate`; shut down at the end."""
    from penstock import LLM

    with LLM(model, **llm_arguments(given)) as llm:

        def generate(requests: Sequence[BenchRequest]) -> list[int]:
            prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
            outputs = llm.generate(prompts, list(map(_sampling, requests)), use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        yield generate


def llm_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings as keyword arguments of `LLM`, which has other defaults for some.

    Raises:
        UsageError: an `LLM` has no such setting.
    """
    if configured(ParallelConfig, given).data_parallel_size > 1:
        refuse_replicas()
    return {
        each.name: given.get(each.name, each.default)
        for each in declared(*ENGINE)
        if each.setting.is_argument
    }


def _sampling(request: BenchRequest) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False, seed=request.index
    )


def _requests(
    model: str, count: int, input_len: int, output_len: int, given: Mapping[str, Any]
) -> list[BenchRequest]:
    from penstock.families.registry import load_spec, resolve_model_directory

    spec = load_spec(resolve_model_directory(model), dequantize=given.get("gguf_dequantize", False))
    return synthetic(
        num_prompts=count,
        input_len=input_len,
        output_len=output_len,
        range_ratio=0.0,
        request_rate=float("inf"),
        burstiness=1.0,
        vocab_size=spec.vocab_size,
        seed=given.get("seed", 0),
    )

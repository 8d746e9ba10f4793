"""Deferred against lock-step token return, and equal against unequal micro-batches, over processes [E13].

    python benchmarks/token_return.py MODEL [--batches 16,32] [--partition 16,8] [--rounds 3] [--arrivals 8]

Engines of two stages of one thread, each a process as in service, whose cores follow different rules
(`ruled_core.py`). *Lock-step* makes every stage wait for the samples of the step before, as engines do that
broadcast them within the step; *unequal* lets a plan take every decode that is ready. All are loaded first
and take turns, each time with fresh prompts.

A run is a closed loop: so many clients, each of which sends its next request when its last one has ended,
so that prompts come while others decode. Throughput is of output tokens over the whole run, the time to the
first token the median over its requests, and that of the slowest in a hundred. With `--arrivals` the same
requests come as a Poisson process of so many a second besides, where a queue shows in the first token.
Medians over the rounds, with the lowest and the highest. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from unittest import mock

from peers.report import markdown
from ruled_core import DEFERRED, LOCK_STEP, RULE_ENV, UNEQUAL
from stand_in import add_to_path

from penstock import AsyncLLM
from penstock.cli.bench.engine_load import EngineSender
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.results import RunResult
from penstock.process import entry_points
from penstock.workloads.requests import synthetic
from penstock.workloads.summaries import percentile

RULES = (DEFERRED, LOCK_STEP, UNEQUAL)
INPUT, OUTPUT = 128, 96
REQUESTS_OF_A_CLIENT = 3
VOCABULARY = 256  # prompts use ids below this, which every vocabulary has


@dataclass(frozen=True, slots=True)
class Load:
    """What a run sends.

    Attributes:
        clients: requests in flight at most.
        rate: requests a second; infinite: each client sends again at once.
    """

    clients: int
    rate: float

    @property
    def name(self) -> str:
        if self.rate == float("inf"):
            return f"{self.clients} clients"
        return f"{self.clients * REQUESTS_OF_A_CLIENT} requests, {self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class Sample:
    """What a run came to."""

    tokens_per_s: float
    ttft_ms: float
    slow_ttft_ms: float  # of the slowest in a hundred

    @classmethod
    def of(cls, result: RunResult) -> Sample:
        assert not result.audit.violations, result.audit.violations[0]
        first_s = result.latencies_s()["ttft"]
        return cls(
            float(result.totals()["output_throughput"]),
            1000 * percentile(first_s, 50),
            1000 * percentile(first_s, 99),
        )


Samples = Mapping[tuple[Load, str], Sequence[Sample]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batches", default="16,32", help="clients of a closed loop")
    parser.add_argument("--partition", default="16,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--arrivals", type=float, default=0.0, help="requests a second; 0: closed loops alone"
    )
    options = parser.parse_args()
    print(report(asyncio.run(measure(options))))


async def measure(options: argparse.Namespace) -> Samples:
    """Measure every load under every rule, in turns."""
    batches = [int(batch) for batch in options.batches.split(",")]
    loads = [Load(batch, float("inf")) for batch in batches]
    if options.arrivals > 0:
        loads += [Load(batch, options.arrivals) for batch in batches]
    samples: dict[tuple[Load, str], list[Sample]] = defaultdict(list)
    add_to_path()
    async with AsyncExitStack() as stack:
        engines = {
            rule: await stack.enter_async_context(engine(rule, options, max(batches))) for rule in RULES
        }
        for rule in RULES:
            await run(engines[rule], Load(2, float("inf")), seed=1)
        for number, load, rule in itertools.product(range(options.rounds), loads, RULES):
            result = await run(engines[rule], load, seed=1000 * number + load.clients)
            samples[load, rule].append(Sample.of(result))
    return samples


@asynccontextmanager
async def engine(rule: str, options: argparse.Namespace, max_num_seqs: int) -> AsyncIterator[AsyncLLM]:
    """Start an engine whose core follows a rule; it ends with the context."""
    llm = AsyncLLM(
        options.model,
        dtype="bfloat16",
        pipeline_parallel_size=2,
        threads_per_rank=1,
        partition=options.partition,
        micro_batches=2,
        max_num_seqs=max_num_seqs,
        max_model_len=INPUT + OUTPUT + 1,
        speculative_method="off",
        enable_prefix_caching=False,
        warm_spare=False,
    )
    try:
        with (
            mock.patch.object(entry_points, "SUPERVISOR", "ruled_supervisor"),
            mock.patch.dict(os.environ, {RULE_ENV: rule}),
        ):
            await llm.start()
        yield llm
    finally:
        await llm.close()


async def run(llm: AsyncLLM, load: Load, seed: int) -> RunResult:
    """Send one load and book what comes."""
    requests = synthetic(
        num_prompts=load.clients * REQUESTS_OF_A_CLIENT,
        input_len=INPUT,
        output_len=OUTPUT,
        range_ratio=0.0,
        request_rate=load.rate,
        burstiness=1.0,
        vocab_size=VOCABULARY,
        seed=seed,
    )
    bound = load.clients if load.rate == float("inf") else None
    return await replay(EngineSender(llm), requests, bound)


def report(samples: Samples) -> str:
    """Return a row for each load and rule: medians, their spread, and how they compare with lock-step."""
    rows = []
    for (load, rule), found in samples.items():
        base = samples[load, LOCK_STEP]
        rates, firsts = [each.tokens_per_s for each in found], [each.ttft_ms for each in found]
        gain = statistics.median(rates) / statistics.median(each.tokens_per_s for each in base)
        sooner = statistics.median(each.ttft_ms for each in base) / statistics.median(firsts)
        slow = statistics.median(each.slow_ttft_ms for each in found)
        rows.append(
            [
                load.name,
                rule,
                *_spread(rates),
                f"{gain:.2f} x",
                *_spread(firsts),
                f"{slow:.1f}",
                f"{sooner:.2f} x",
            ]
        )
    headings = ["load", "rule", "tokens/s", "spread", "of lock-step"]
    headings += ["first token ms", "spread", "p99", "sooner than lock-step"]
    return markdown(headings, rows)


def _spread(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.1f}", f"{min(values):.1f} to {max(values):.1f}"


if __name__ == "__main__":
    main()

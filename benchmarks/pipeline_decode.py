"""Steady decode through two stages, or two ranks of one stage, against one process: tokens/s, bubbles.

    python benchmarks/pipeline_decode.py MODEL --partitions "even;16,8" --micro-batches 2,auto
    python benchmarks/pipeline_decode.py MODEL --batches 8,32 --partitions "" --tensor-parallel 2
    python benchmarks/pipeline_decode.py MODEL --batches 64 --partitions "even;auto" --throttle 0

All engines are loaded first and take turns; the others are idle meanwhile. Decode is counted as in
`cpu_peers.py`, with more tokens: those after the first of each sequence, by the time of all less that of one.
With `--throttle N` two endless loops share core N, so that its stage gets a third of it; `auto` measures
under the same load, into a cache of its own. Where a stage's time went is the difference of two of its own
reports, of which there is one a second: those that were the newest 2.5 s after the last first token was due,
and at the end. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from link_latency import busy_processes

from penstock import LLM, SamplingParams
from penstock.batch import StageTimes
from penstock.trace.phases import BUBBLES, Phase

INPUT = 128
SETTLE_S = 2.5


@dataclass
class Layout:
    """One way to serve the model, and what was measured of it."""

    name: str
    llm: LLM
    rates: dict[int, list[float]] = field(default_factory=dict)  # by batch: tokens/s
    times: dict[int, list[list[StageTimes]]] = field(default_factory=dict)  # by batch: before and after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batches", default="8,16,32,64")
    parser.add_argument("--partitions", default="even", help="of two stages; empty: none")
    parser.add_argument("--tensor-parallel", default="", help="ranks of one thread that share one stage: 2")
    parser.add_argument("--async-depths", default="auto")
    parser.add_argument("--micro-batches", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=384, help="tokens of a sequence")
    parser.add_argument("--partition-mix", default="0:128", help="for the partition auto")
    parser.add_argument("--one-stage", default="1,2", help="threads of the engines with one stage")
    parser.add_argument("--throttle", type=int, help="core of which a stage is to get a third")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    with ExitStack() as stack:
        if options.throttle is not None:
            throttle(options.throttle, stack)
        layouts = [Layout(name, stack.enter_context(llm)) for name, llm in engines(options, max(batches))]
        for layout in layouts:
            generate(layout.llm, 2, 4)
        for _, batch in itertools.product(range(options.rounds), batches):
            for layout in layouts:
                measure(layout, batch, options.output)
        for batch in batches:
            print_table(batch, layouts)


def throttle(core: int, stack: ExitStack) -> None:
    """Two loops on a core, and a cache of measurements of their own."""
    os.environ["PENSTOCK_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(busy_processes([core, core]))


def engines(options: argparse.Namespace, max_num_seqs: int) -> list[tuple[str, LLM]]:
    common = {
        "dtype": "bfloat16",
        "max_model_len": INPUT + options.output + 1,
        "max_num_seqs": max_num_seqs,
        "speculative_method": "off",
    }
    found = [
        (f"P = 1, {threads} threads", LLM(options.model, threads_per_rank=int(threads), **common))
        for threads in filter(None, options.one_stage.split(","))
    ]
    found += [
        (
            f"TP = {size}, 1 thread each",
            LLM(options.model, tensor_parallel_size=int(size), threads_per_rank=1, **common),
        )
        for size in filter(None, options.tensor_parallel.split(","))
    ]
    layouts = itertools.product(
        filter(None, options.partitions.split(";")),
        options.async_depths.split(","),
        options.micro_batches.split(","),
    )
    for partition, depth, micro_batches in layouts:
        llm = LLM(
            options.model,
            pipeline_parallel_size=2,
            threads_per_rank=1,
            partition=partition,
            partition_mix=options.partition_mix,
            async_depth=number_or_auto(depth),
            micro_batches=number_or_auto(micro_batches),
            **common,
        )
        found.append((f"P = 2, {partition}, {depth} ahead, {micro_batches} micro-batches", llm))
    return found


def number_or_auto(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def generate(llm: LLM, batch: int, num_tokens: int) -> float:
    """Seconds for `batch` fresh prompts to their `num_tokens`-th token."""
    prompts = [{"prompt_token_ids": random.choices(range(1000, 90000), k=INPUT)} for _ in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def measure(layout: Layout, batch: int, output: int) -> None:
    first = generate(layout.llm, batch, 1)
    found: list[list[StageTimes]] = []
    note = threading.Timer(first + SETTLE_S, lambda: found.append(stage_times(layout.llm)))
    note.start()
    whole = generate(layout.llm, batch, output)
    note.cancel()
    if found:
        layout.times.setdefault(batch, []).extend([found[0], stage_times(layout.llm)])
    layout.rates.setdefault(batch, []).append(batch * (output - 1) / (whole - first))


def stage_times(llm: LLM) -> list[StageTimes]:
    stats = llm.stats()
    return [] if stats is None else stats.stage_times


def print_table(batch: int, layouts: Sequence[Layout]) -> None:
    print(f"\n| B = {batch} | tokens/s | spread | stage: busy, then bubbles |\n|---|---|---|---|")
    for layout in layouts:
        rates = layout.rates[batch]
        where, spread = (
            "; ".join(shares(layout.times.get(batch, []))),
            f"{min(rates):.1f} to {max(rates):.1f}",
        )
        print(f"| {layout.name} | {statistics.median(rates):.1f} | {spread} | {where} |")


def shares(times: Sequence[Sequence[StageTimes]]) -> list[str]:
    """For each stage: its busy share, and every bubble above half a percent; over all measured runs."""
    lines = []
    for of_stage in zip(*times, strict=False):  # a stage that has never reported is left out
        pairs = list(zip(of_stage[::2], of_stage[1::2], strict=True))
        wall = sum(after.wall_ns - before.wall_ns for before, after in pairs) or 1
        busy = sum(after.busy_ns - before.busy_ns for before, after in pairs) / wall
        parts = [f"{of_stage[0].stage}: {busy:.1%}"]
        exchange, wait = (
            sum(getattr(after, name) - getattr(before, name) for before, after in pairs) / wall
            for name in ("exchange_ns", "exchange_wait_ns")
        )
        if exchange:
            parts.append(f"in sums {exchange:.1%}, of it waiting {wait:.1%}")
        for phase in Phase:
            share = sum(after.phase_ns[phase] - before.phase_ns[phase] for before, after in pairs) / wall
            if share > 0.005 and (phase in BUBBLES or phase in (Phase.TAKE, Phase.PUT)):
                parts.append(f"{phase.name.lower()} {share:.1%}")
        lines.append(", ".join(parts))
    return lines


if __name__ == "__main__":
    main()

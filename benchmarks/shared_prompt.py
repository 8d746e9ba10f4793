"""Eight choices of one prompt beside one: time to the first tokens, and KV blocks.

    python benchmarks/shared_prompt.py MODEL [--prompt 2048] [--n 8] [--rounds 5] [--pp 1] [--output 16]

Each round asks an engine, in turns, for one choice and for n of a prompt that nobody has asked for before,
and takes the time to the first token of the first choice and of all of them: on the clock, and of this
process's CPUs, which says more where others use the machine. KV blocks are the most that were held at once.
The bars: the first token of n within 1.1 times that of one, and the whole blocks of the prompt counted once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from observed import run_observed

from penstock import LLM, SamplingParams
from penstock.engine.client.siblings import with_siblings
from penstock.request import RequestUpdate

BAR = 1.1


class Times(NamedTuple):
    """Seconds to the first token of the first choice, and of all: on the clock, and of CPUs."""

    first: float
    last: float
    first_cpu: float
    last_cpu: float
    num_blocks: int
    num_computed: int  # tokens of the prompt, by all choices


class Asker:
    """Asks an engine for choices and watches it."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._llm, self._options = llm, options
        self._numbers, self._ids = random.Random(1), 0

    def ask(self, n: int) -> Times:
        options = self._options
        prompt = [self._numbers.randrange(1000, 9000) for _ in range(options.prompt)]
        sampling = SamplingParams(n=n, temperature=1.0, seed=7, max_tokens=options.output, ignore_eos=True)
        self._ids += 1
        request = with_siblings(f"r{self._ids}", prompt, sampling)
        found: dict[str, tuple[float, float]] = {}
        num_blocks = num_cached = 0
        began, began_cpu = time.perf_counter(), time.process_time()

        def observe(update: RequestUpdate) -> None:
            nonlocal num_blocks, num_cached
            if update.token_ids and update.request_id not in found:
                now = time.perf_counter() - began, time.process_time() - began_cpu
                found[update.request_id] = now
                num_cached += update.num_cached_tokens
            stats = self._llm.stats()
            num_blocks = max(num_blocks, stats.cache.num_blocks - stats.cache.free_blocks if stats else 0)

        run_observed(self._llm, [request], observe)
        first, last = found[request.request_id], max(found.values())
        return Times(first[0], last[0], first[1], last[1], num_blocks, n * len(prompt) - num_cached)


def shown(times: Sequence[float]) -> str:
    low, middle, high = (1000 * of(times) for of in (min, statistics.median, max))
    return f"{middle:7.0f} ms ({low:.0f} to {high:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--threads", default=None)
    options = parser.parse_args()
    with LLM(
        options.model,
        pipeline_parallel_size=options.pp,
        threads_per_rank=options.threads,
        num_blocks=1024,
        max_model_len=options.prompt + options.output + 1,
        distributed_executor_backend="inprocess",
    ) as llm:
        asker = Asker(llm, options)
        asker.ask(2)  # warm
        rounds = []
        for turn in range(options.rounds):
            order = (1, options.n) if turn % 2 else (options.n, 1)
            asked = {n: asker.ask(n) for n in order}
            print(f"n = 1: {asked[1]}\nn = {options.n}: {asked[options.n]}", flush=True)
            rounds.append((asked[1], asked[options.n]))
    for part in ("first", "last", "first_cpu", "last_cpu"):
        one, many = ([getattr(pair[which], part) for pair in rounds] for which in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(one, many, strict=True))
        print(f"{part:10} n = 1: {shown(one)}  n = {options.n}: {shown(many)}  ratio {ratio:.3f}")
        if part == "first":
            missed = ratio > BAR
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

"""One engine that generates on demand, for `two_checkouts.py`: reads batch sizes, prints seconds, CPU time.

    python benchmarks/decode_turns.py MODEL [--stages 2] [--prompt 3] [--tokens 128]

Each line of its input is a number of sequences. The answer is a line of JSON: wall seconds of all of them,
and CPU seconds of this process and of all that it has started. No two prompts begin alike. The program uses
`penstock.LLM` alone, so that it runs with any checkout of the package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time

import psutil
from cpu_time import cpu_seconds

from penstock import LLM, SamplingParams


def prompt(number: int, num_tokens: int) -> list[int]:
    """Return the prompt of this number: its first two tokens name it."""
    begin = [5 + number % 200, 5 + number // 200 % 200]
    return (begin + [7 + 3 * place % 150 for place in range(num_tokens)])[:num_tokens]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=3, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    numbers = itertools.count()
    sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    # Fixed, not measured at the start: two engines of one checkout may choose differently.
    fixed = {
        "threads_per_rank": 1,
        "async_depth": 0,
        "micro_batches": options.stages,
        "speculative_method": "off",
    }
    with LLM(options.model, pipeline_parallel_size=options.stages, **fixed) as llm:
        engine = psutil.Process()
        pids = [process.pid for process in (engine, *engine.children(recursive=True))]
        print("ready", flush=True)
        for line in sys.stdin:
            prompts = [
                {"prompt_token_ids": prompt(number, options.prompt)}
                for number in itertools.islice(numbers, int(line))
            ]
            cpu, began = cpu_seconds(pids), time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "cpu_s": cpu_seconds(pids) - cpu}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

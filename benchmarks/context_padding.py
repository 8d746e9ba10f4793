"""What padding the contexts of a decode group to a multiple gains (`attention.metadata.CONTEXT_STEP`).

oneDNN compiles a kernel for every new shape of a bfloat16 product, and keeps it; without padding every
step of a growing context is a new shape. Each measurement is a process of its own, since those kernels live
as long as the process: the demo model, both variants in turns, medians and their ratio.

    python benchmarks/context_padding.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

from penstock import LLM, SamplingParams
from penstock.attention import metadata
from penstock.config.engine import DType

NUM_TOKENS = 256
STEPS = {"unpadded": 1, "padded": metadata.CONTEXT_STEP}


def measure(dtype: DType, num_stages: int, num_requests: int, step: int) -> float:
    """Milliseconds a token of the requests, all started together; contexts that the process meets anew."""
    metadata.CONTEXT_STEP = step
    prompts = [{"prompt_token_ids": [0, 5 + number]} for number in range(num_requests)]
    with LLM(
        "demo",
        dtype=dtype,
        pipeline_parallel_size=num_stages,
        threads_per_rank=1,
        kernels="off",  # it is about torch
        num_blocks=512,
        distributed_executor_backend="inprocess",
    ) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        started = time.perf_counter()
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.generate(prompts, greedy, use_tqdm=False)
        return (time.perf_counter() - started) / NUM_TOKENS * 1e3


def measure_apart(*case: object) -> float:
    command = [sys.executable, __file__, "--case", *map(str, case)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(dtype: str, num_stages: int, num_requests: int, rounds: int) -> str:
    found: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(rounds):
        for name, step in STEPS.items():
            found[name].append(measure_apart(dtype, num_stages, num_requests, step))
    unpadded, padded = (median(found[name]) for name in STEPS)
    case = f"{dtype:9} P={num_stages} {num_requests:2} rows"
    return f"{case}  {unpadded:6.2f} {padded:6.2f} {unpadded / padded:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs=4, help="one measurement: dtype, stages, requests, step")
    options = parser.parse_args()
    if options.case:
        dtype, *numbers = options.case
        print(measure(dtype, *map(int, numbers)))
        return
    print("ms a token              unpadded padded ratio")
    for dtype in ("float32", "bfloat16"):
        for num_stages, num_requests in ((1, 1), (1, 16), (2, 16)):
            print(compare(dtype, num_stages, num_requests, options.rounds), flush=True)


if __name__ == "__main__":
    main()

"""What padding the contexts of a decode group to a multiple of 64 gains (`attention.metadata.CONTEXT_STEP`).

oneDNN compiles a kernel for every new shape of a bfloat16 product; without padding every step of a growing
context is a new shape. Runs the demo model in one process, A and B in turns; prints medians and their ratio.

    python benchmarks/context_padding.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from penstock import LLM, SamplingParams
from penstock.attention import metadata

NUM_TOKENS = 128
VARIANTS = {"unpadded": 1, "padded": metadata.CONTEXT_STEP}


def seconds_per_token(llm: LLM, num_requests: int) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": [0, 5 + number]} for number in range(num_requests)]
    started = time.perf_counter()
    llm.generate(prompts, sampling)
    return (time.perf_counter() - started) / NUM_TOKENS


def compare(dtype: str, num_stages: int, num_requests: int, rounds: int) -> str:
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, step in VARIANTS.items():
            metadata.CONTEXT_STEP = step
            with LLM(
                "demo",
                dtype=dtype,
                pipeline_parallel_size=num_stages,
                threads_per_rank=1,
                num_blocks=512,
                distributed_executor_backend="inprocess",
            ) as llm:
                seconds_per_token(llm, num_requests)  # warm
                found[name].append(seconds_per_token(llm, num_requests))
    unpadded, padded = (median(found[name]) * 1e3 for name in VARIANTS)
    case = f"{dtype:9} P={num_stages} {num_requests:2} rows"
    return f"{case}  {unpadded:6.2f} {padded:6.2f} {unpadded / padded:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("ms a step                unpadded padded ratio")
    for dtype in ("float32", "bfloat16"):
        for num_stages, num_requests in ((1, 1), (1, 16), (2, 16)):
            print(compare(dtype, num_stages, num_requests, rounds), flush=True)


if __name__ == "__main__":
    main()

"""What the scores of a prompt cost: seconds for a long prompt with them and without, in turn.

    python benchmarks/prompt_scores.py MODEL [--tokens 2048] [--runs 5] [--stages 1 2]

Each run computes another prompt (the prefix cache is off) and generates nothing. The head then multiplies
every token of the prompt instead of none, so the cost is that of a wide matrix product; what lies beside it
(the logarithms, ranks, likeliest ids and the way to the caller) is told apart by asking for 0 likeliest ids
and for 20. Prints Markdown: the least wall and CPU seconds of each. Ranks are threads of this process, so its
CPU time is theirs.
"""

from __future__ import annotations

import argparse
import random
import time

from penstock import LLM, SamplingParams

KINDS: dict[str, int | None] = {"none": None, "prompt_logprobs 0": 0, "prompt_logprobs 20": 20}
Seconds = tuple[float, float]  # of wall and CPU


def measure(llm: LLM, num_tokens: int, runs: int, vocab_size: int) -> dict[str, list[Seconds]]:
    chance = random.Random(1)
    seconds: dict[str, list[Seconds]] = {kind: [] for kind in KINDS}
    for run in range(runs + 1):  # the first warms up
        for kind, count in KINDS.items():
            prompt = [chance.randrange(vocab_size) for _ in range(num_tokens)]
            params = SamplingParams(max_tokens=0, prompt_logprobs=count)
            wall, cpu = time.perf_counter(), time.process_time()
            (output,) = llm.generate({"prompt_token_ids": prompt}, params)
            if run:
                seconds[kind].append((time.perf_counter() - wall, time.process_time() - cpu))
            assert count is None or len(output.prompt_logprobs or []) == num_tokens
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vocab", type=int, default=1000, help="ids of prompts are below it")
    given = parser.parse_args()
    print("| stages | scores | wall, s | of none | CPU, s | of none |\n|---|---|---|---|---|---|")
    for stages in given.stages:
        with LLM(
            given.model,
            pipeline_parallel_size=stages,
            max_model_len=given.tokens,
            num_blocks=given.tokens // 32 + 1,
            enable_prefix_caching=False,
            distributed_executor_backend="inprocess",
        ) as llm:
            found = measure(llm, given.tokens, given.runs, given.vocab)
        least = {kind: [min(column) for column in zip(*runs, strict=True)] for kind, runs in found.items()}
        for kind, seconds in least.items():
            pairs = zip(seconds, least["none"], strict=True)
            cells = [f"{value:.2f} | {value / none:.2f}" for value, none in pairs]
            print(f"| {stages} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

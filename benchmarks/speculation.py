"""What speculation gains where text repeats, and what it costs where it does not.

    python benchmarks/speculation.py MODEL --stages 1,2 --rounds 5

An engine with and one without hold the model and generate the same requests in turns; a third is without,
too, and says how far two equal engines differ. Cases:

    repeats   one stream, greedy, behind a prompt that says the same again and again
    nothing   one stream, or 32, sampled at a temperature at which nothing repeats

It prints tokens/s, the median ratio to the engine without speculation with its bootstrap interval of 95 %,
and how many drafts were accepted. Tokens must be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratios import against_off, in_turns

from penstock import LLM, SamplingParams
from penstock.config.speculation import SpeculativeMethod

PIECE = [11, 97, 402, 33, 1500, 78, 640, 19, 2024, 51, 350, 912]


@dataclass(frozen=True)
class Case:
    name: str
    prompts: list[dict[str, Any]]
    sampling: SamplingParams


def cases(num_tokens: int, batches: Sequence[int]) -> list[Case]:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found = [Case("repeats, 1 stream", [{"prompt_token_ids": PIECE * 16}], greedy)]
    for batch in batches:
        hot = SamplingParams(temperature=1.5, seed=1, max_tokens=num_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": [5 + number, *PIECE]} for number in range(batch)]
        found.append(Case(f"nothing repeats, {batch} streams", prompts, hot))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--threads", type=int, default=2, help="of all stages together")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    print("| stages | case | off, tokens/s | suffix, tokens/s | suffix/off | control | accepted/drafted |")
    print("|---|---|---|---|---|---|---|")
    for stages in map(int, options.stages.split(",")):
        compare(options, stages, cases(options.tokens, batches))


def compare(options: argparse.Namespace, stages: int, wanted: Sequence[Case]) -> None:
    """Print a line for each case."""
    given = {
        "pipeline_parallel_size": stages,
        "threads_per_rank": max(1, options.threads // stages),
        "num_blocks": 400,
        "max_model_len": 2048,
    }
    with ExitStack() as stack:
        methods: tuple[SpeculativeMethod, ...] = ("off", "suffix", "off")
        engines = [
            stack.enter_context(LLM(str(options.model), speculative_method=method, **given))
            for method in methods
        ]
        for case in wanted:
            tokens: list[list[list[int]]] = [[] for _ in engines]

            def take(index: int, case: Case = case, tokens: list[list[list[int]]] = tokens) -> float:
                began = time.perf_counter()
                outputs = engines[index].generate(case.prompts, case.sampling, use_tqdm=False)
                seconds = time.perf_counter() - began
                tokens[index] = [output.outputs[0].token_ids for output in outputs]
                return sum(map(len, tokens[index])) / seconds

            before = drafts_of(engines[1])
            rounds = in_turns(range(len(engines)), take, options.rounds, warm_up=1)
            assert tokens[0] == tokens[1] == tokens[2], "speculation has changed tokens"
            accepted, drafted = (
                after - old for after, old in zip(drafts_of(engines[1]), before, strict=True)
            )
            cells = [str(stages), case.name, *against_off(rounds), f"{accepted}/{drafted}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def drafts_of(llm: LLM) -> tuple[int, int]:
    """Accepted and sent drafts so far."""
    stats = llm.stats()
    assert stats is not None
    return stats.scheduler.speculation.num_accepted, stats.scheduler.speculation.num_drafted


if __name__ == "__main__":
    main()

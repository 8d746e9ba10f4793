"""What speculation gains where text repeats, and what it costs where it does not.

    python benchmarks/speculation.py MODEL --stages 1,2 --rounds 5

An engine with and one without hold the model and generate the same requests in turns; a third is without,
too, and says how far two equal engines differ. Cases:

    repeats   one stream, greedy, behind a prompt that says the same again and again
    nothing   one stream, or 32, sampled at a temperature at which nothing repeats
    users     32 streams (the last of --batches), where every guess is right with a given chance (--chances)

With `--one-engine` it is one engine, whose requests ask for guesses in one turn and not in the other two
(`speculative`): two engines that have measured their stages at different moments cut their plans differently,
which is up to a fifth of the tokens a second with 32 streams over two stages.

It prints tokens/s, the median ratio to the engine without speculation with its bootstrap interval of 95 %,
and how many drafts were accepted. Tokens must be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from knowing_drafter import KnowingDrafter
from ratios import against_off, in_turns

from penstock import LLM, SamplingParams
from penstock.config.speculation import SpeculativeMethod

VOCAB_SIZE = 32_000  # wrong guesses are one of so many ids
PIECE = [11, 97, 402, 33, 1500, 78, 640, 19, 2024, 51, 350, 912]


@dataclass(frozen=True)
class Case:
    name: str
    prompts: list[dict[str, Any]]
    sampling: SamplingParams
    chance: float | None = None  # that a guess of somebody who knows the text is right; None: nobody does


def cases(num_tokens: int, batches: Sequence[int], chances: Sequence[float]) -> list[Case]:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    hot = SamplingParams(temperature=1.5, seed=1, max_tokens=num_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + number, *PIECE]} for number in range(max(batches))]
    if chances:
        name = f"{batches[-1]} streams, guesses right in"
        return [Case(f"{name} {chance:g}", prompts[: batches[-1]], hot, chance) for chance in chances]
    found = [Case("repeats, 1 stream", [{"prompt_token_ids": PIECE * 16}], greedy)]
    return found + [Case(f"nothing repeats, {batch} streams", prompts[:batch], hot) for batch in batches]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--chances", default="", help="such as 0,0.5,0.9,1: only the case of users")
    parser.add_argument("--threads", type=int, default=2, help="of all stages together")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-engine", action="store_true", help="asked with and without guesses")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    print("| stages | case | off, tokens/s | suffix, tokens/s | suffix/off | control | accepted/drafted |")
    print("|---|---|---|---|---|---|---|")
    chances = [float(chance) for chance in options.chances.split(",") if chance]
    drafter = KnowingDrafter(VOCAB_SIZE)
    with drafter.in_place_of_suffixes() if chances else nullcontext():
        for stages in map(int, options.stages.split(",")):
            compare(options, stages, cases(options.tokens, batches, chances), drafter)


def compare(
    options: argparse.Namespace, stages: int, wanted: Sequence[Case], drafter: KnowingDrafter
) -> None:
    """Print a line for each case."""
    given: dict[str, Any] = {
        "pipeline_parallel_size": stages,
        "threads_per_rank": max(1, options.threads // stages),
        "num_blocks": 400,
        "max_model_len": 2048,
    }
    if options.chances:  # who guesses is put into this process
        given["distributed_executor_backend"] = "inprocess"
    with ExitStack() as stack:
        methods: tuple[SpeculativeMethod, ...] = (
            ("suffix",) if options.one_engine else ("off", "suffix", "off")
        )
        loaded = [
            stack.enter_context(LLM(str(options.model), speculative_method=method, **given))
            for method in methods
        ]
        engines = loaded * 3 if options.one_engine else loaded
        for case in wanted:
            tokens: list[list[list[int]]] = [[] for _ in engines]

            def take(index: int, case: Case = case, tokens: list[list[list[int]]] = tokens) -> float:
                sampling = msgspec.structs.replace(case.sampling, speculative=index == 1)
                began = time.perf_counter()
                outputs = engines[index].generate(case.prompts, sampling, use_tqdm=False)
                seconds = time.perf_counter() - began
                tokens[index] = [output.outputs[0].token_ids for output in outputs]
                return sum(map(len, tokens[index])) / seconds

            if case.chance is not None:
                take(0)
                drafter.chance, prompts = case.chance, [prompt["prompt_token_ids"] for prompt in case.prompts]
                drafter.texts = {
                    prompt[0]: [*prompt, *answer] for prompt, answer in zip(prompts, tokens[0], strict=True)
                }
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

"""How good the cut is that `--partition auto` chooses: its throughput beside that of every other cut.

    python benchmarks/cut_choice.py [--model DIR|demo] [--stages 2] [--cases 4] [--seed 0] [--finalists 4]

Each case is a mix of requests that the seed draws: tokens of a prompt, tokens of an answer, and how many
requests there are at once. A server with `--partition auto --partition-mix PROMPT:OUTPUT` says which cut it
chose. Then an engine is started with each possible cut, and generates all answers once. The fastest of them
and the chosen one run again, in turns. Prints a row for each case, as Markdown; exits with 1 where the chosen
cut is more than 3 % slower than the best in more than one case of twenty. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.checkpoint import FULL_SHAPE, make_checkpoint

from penstock import LLM, SamplingParams
from penstock.config.engine import ModelConfig
from penstock.layouts.model_sizes import read_sizes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served import Served

TOLERANCE, MOST_MISSES = 0.03, 0.05
MAX_LEN = 2048

Cut = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A mix of requests: tokens of each prompt and of each answer, and how many run at once."""

    prompt: int
    output: int
    concurrency: int

    @classmethod
    def draw(cls, source: random.Random) -> Case:
        """Return a case, evenly on scales of powers."""
        prompt, output = (round(2 ** source.uniform(low, high)) for low, high in ((4, 9), (4, 7)))
        return cls(prompt, output, round(2 ** source.uniform(1, 5)))


def cuts(num_layers: int, num_stages: int) -> Iterator[Cut]:
    """Yield every way to share the layers, with at least one for each stage."""
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *ends, num_layers)
        yield tuple(end - start for start, end in itertools.pairwise(bounds))


def chosen_cut(model: str, num_stages: int, case: Case) -> Cut:
    """Return what `--partition auto` chooses for a case."""
    mix = f"{case.prompt}:{case.output}"
    flags = ["--pp", str(num_stages), "--partition", "auto", "--partition-mix", mix]
    flags += ["--threads-per-rank", "1"]
    with Served(model, *flags, "--max-model-len", str(MAX_LEN)) as server:
        stages = json.loads(server.get("/server_info"))["stages"]
    return tuple(stage["end_layer"] - stage["start_layer"] for stage in stages)


def seconds_of(model: str, cut: Cut, case: Case, rounds: int, seed: int) -> float:
    """Return the median time in which an engine with a cut answers all requests of a case."""
    source = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [source.randrange(3, 500) for _ in range(case.prompt)]}
        for _ in range(case.concurrency)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=case.output, ignore_eos=True)
    with LLM(
        model,
        pipeline_parallel_size=len(cut),
        partition=",".join(map(str, cut)),
        threads_per_rank=1,
        max_model_len=MAX_LEN,
        enable_prefix_caching=False,
        speculative_method="off",
    ) as llm:
        llm.generate(prompts, params)  # plans are sized by what stages report meanwhile
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            llm.generate(prompts, params)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def run_case(model: str, case: Case, options: argparse.Namespace, num_layers: int) -> tuple[list[str], float]:
    """Return a row of the table, and by how much the chosen cut is slower than the best."""
    chosen = chosen_cut(model, options.stages, case)
    once = {cut: seconds_of(model, cut, case, 1, options.seed) for cut in cuts(num_layers, options.stages)}
    fastest = sorted(once, key=once.__getitem__)[: options.finalists]
    finalists = list(dict.fromkeys([chosen, *fastest]))
    seconds: dict[Cut, list[float]] = {cut: [] for cut in finalists}
    for number in range(options.rounds):
        turn = number % len(finalists)
        for cut in finalists[turn:] + finalists[:turn]:
            seconds[cut].append(seconds_of(model, cut, case, 2, options.seed))
    medians = {cut: statistics.median(own) for cut, own in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    loss = medians[chosen] / medians[best] - 1
    tokens = case.concurrency * case.output
    cells = [
        f"{case.prompt}:{case.output}",
        str(case.concurrency),
        _shown(chosen),
        f"{tokens / medians[chosen]:.1f}",
        _shown(best),
        f"{tokens / medians[best]:.1f}",
        f"{100 * loss:.1f}",
    ]
    return cells, loss


def _shown(cut: Sequence[int]) -> str:
    return ",".join(map(str, cut))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="0.5B", help="a directory, demo, or 0.5B, which is made")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finalists", type=int, default=4, help="cuts that are measured again")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    source, losses = random.Random(options.seed), []
    print("| prompt:output | at once | chosen | tokens/s | best | tokens/s | loss, % |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="cut-choice-") as scratch:
        model = options.model
        if model == "0.5B":
            model = str(Path(scratch, "0.5B"))
            make_checkpoint(Path(model), FULL_SHAPE)
        num_layers = read_sizes(ModelConfig(model=model)).spec.num_layers
        for _ in range(options.cases):
            row, loss = run_case(model, Case.draw(source), options, num_layers)
            print(f"| {' | '.join(row)} |", flush=True)
            losses.append(loss)
    num_missed = sum(loss > TOLERANCE for loss in losses)
    return int(num_missed > MOST_MISSES * len(losses))


if __name__ == "__main__":
    raise SystemExit(main())

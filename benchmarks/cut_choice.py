"""How good the cut is that `--partition auto` chooses: its throughput beside that of every other cut.

    python benchmarks/cut_choice.py [--model DIR|demo|0.5B] [--stages 2] [--cases 20] [--seed 0] [--rounds 4]
                                    [--pairs 10] [--alive 8]

Each case is a mix of requests that the seed draws: tokens of a prompt, tokens of an answer, and how many
requests there are at once. A server with `--partition auto --partition-mix PROMPT:OUTPUT`, which runs so many
requests at once (`--max-num-seqs`), says which cut it chose. Then engines of all cuts generate all answers,
in turns; as many engines as `--alive` says stay alive at once. The fastest one and the chosen one do so
again, in pairs of engines that are started anew: so neither chance, which made the fastest one the fastest,
nor an engine that is slow for all its life has a part in the figure. Prints a row for each case, as Markdown;
exits with 1 where the chosen cut is more than 3 % slower than the best in more than one case of twenty. Run
it on a quiet machine.
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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from peers.checkpoint import FULL_SHAPE, make_checkpoint
from ratios import in_turns

from penstock import LLM, SamplingParams
from penstock.config.engine import ModelConfig
from penstock.layouts.model_sizes import read_sizes
from penstock.planner.report import comma_separated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served import Served

TOLERANCE, MOST_MISSES = 0.03, 0.05
MAX_LEN = 2048
LEAST_S = 0.4  # of a measurement

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
    flags += ["--threads-per-rank", "1", "--max-num-seqs", str(case.concurrency)]
    with Served(model, *flags, "--max-model-len", str(MAX_LEN)) as server:
        stages = json.loads(server.get("/server_info"))["stages"]
    return tuple(stage["end_layer"] - stage["start_layer"] for stage in stages)


class Engines:
    """The engines of the cuts; those that were used last stay alive.

    Args:
        num_alive: how many stay alive.
    """

    def __init__(self, model: str, num_alive: int) -> None:
        self._model = model
        self._num_alive = num_alive
        self._alive: dict[Cut, LLM] = {}  # least recently used first
        self._warm: dict[Cut, set[Case]] = {}  # of each engine alive, the cases that it has answered

    def is_warm(self, cut: Cut, case: Case) -> bool:
        """Return whether the engine of a cut has been asked this about a case before."""
        was_warm = case in self._warm[cut]
        self._warm[cut].add(case)
        return was_warm

    def of(self, cut: Cut) -> LLM:
        """Return the engine of a cut, which is started if need be."""
        engine = self._alive.pop(cut, None)
        if engine is None:
            while len(self._alive) >= self._num_alive:
                self.end(next(iter(self._alive)))
            engine = LLM(
                self._model,
                pipeline_parallel_size=len(cut),
                partition=comma_separated(cut),
                threads_per_rank=1,
                max_model_len=MAX_LEN,
                enable_prefix_caching=False,
                speculative_method="off",
            )
            self._warm[cut] = set()
        self._alive[cut] = engine
        return engine

    def end(self, cut: Cut) -> None:
        """End the engine of a cut, if it is alive, so that the next one is started anew."""
        engine = self._alive.pop(cut, None)
        if engine is not None:
            engine.shutdown()

    def close(self) -> None:
        for cut in list(self._alive):
            self.end(cut)


def seconds_of(engines: Engines, cut: Cut, case: Case, seed: int) -> float:
    """Return the seconds in which the engine of a cut answers all requests of a case."""
    source = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [source.randrange(3, 500) for _ in range(case.prompt)]}
        for _ in range(case.concurrency)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=case.output, ignore_eos=True)
    engine = engines.of(cut)
    if not engines.is_warm(cut, case):
        engine.generate(prompts, params)  # plans are sized by what stages report meanwhile
    began, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - began < LEAST_S:
        engine.generate(prompts, params)
        times += 1
    return (time.perf_counter() - began) / times


def run_case(
    engines: Engines, model: str, case: Case, options: argparse.Namespace, num_layers: int
) -> tuple[list[str], float]:
    """Return a row of the table, and by how much the chosen cut is slower than the best."""
    chosen, every = chosen_cut(model, options.stages, case), [*cuts(num_layers, options.stages)]

    def take(cut: Cut) -> float:
        return seconds_of(engines, cut, case, options.seed)

    def take_anew(cut: Cut) -> float:
        engines.end(cut)
        return take(cut)

    rounds = in_turns(every, take, options.rounds)
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    best = every[medians.index(min(medians))]
    pairs = in_turns([chosen, best], take_anew, options.pairs) if best != chosen else [[min(medians)] * 2]
    loss = statistics.median(own / other for own, other in pairs) - 1
    tokens = case.concurrency * case.output
    rates = [tokens / statistics.median(column) for column in zip(*pairs, strict=True)]
    cells = [
        f"{case.prompt}:{case.output}",
        str(case.concurrency),
        comma_separated(chosen),
        f"{rates[0]:.1f}",
        comma_separated(best),
        f"{rates[1]:.1f}",
        f"{100 * loss:.1f}",
    ]
    return cells, loss


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="0.5B", help="a directory, demo, or 0.5B, which is made")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4, help="in which all cuts are measured once")
    parser.add_argument("--pairs", type=int, default=10, help="of the chosen cut and the best")
    parser.add_argument("--alive", type=int, default=8, help="engines that stay alive at once")
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
        with closing(Engines(model, options.alive)) as engines:
            for _ in range(options.cases):
                row, loss = run_case(engines, model, Case.draw(source), options, num_layers)
                print(f"| {' | '.join(row)} |", flush=True)
                losses.append(loss)
    num_missed = sum(loss > TOLERANCE for loss in losses)
    return int(num_missed > MOST_MISSES * len(losses))


if __name__ == "__main__":
    raise SystemExit(main())

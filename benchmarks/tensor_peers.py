"""Two ranks of one thread that share a stage, against one process with two threads and vLLM's ranks.

    python benchmarks/tensor_peers.py --vllm-python DIR/bin/python

As `cpu_peers.py`, whose docstring says how the environment and the checkpoint are made and how decode is
counted; vLLM runs with tensor_parallel_size=2, each rank bound to a core, and once with both cores in one
process. The cases: decode of 8 and 32 sequences, 128 tokens in and out, all engines in turns; engines that
wait are stopped. Medians, ratios and bars as Markdown for docs/perf-log.md. Exit code 1 if an engine has
failed, the run was cut short, or a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from cpu_peers import Run, bandwidth_line, commit, end_engines_with_us, machine, make_cases, progress
from peers.bars import Bar, bar_table
from peers.checkpoint import FULL_SHAPE, TINY_SHAPE, make_checkpoint
from peers.report import results_table, versions_text

CORES = 2
ONE_PROCESS, RANKS = "one process", "ranks"
FULL_LENGTHS = {"inputs": (), "input": 128, "output": 128}
QUICK_LENGTHS = {"inputs": (), "input": 16, "output": 16}

BARS = (
    Bar(ours=f"penstock, {RANKS}", peer=f"penstock, {ONE_PROCESS}", kind="decode", batch=8, wanted=0.95),
    Bar(ours=f"penstock, {RANKS}", peer=f"penstock, {ONE_PROCESS}", kind="decode", batch=32, wanted=0.95),
    Bar(ours=f"penstock, {RANKS}", peer=f"vllm, {RANKS}", kind="decode", batch=8, wanted=1.4),
    Bar(ours=f"penstock, {RANKS}", peer=f"vllm, {RANKS}", kind="decode", batch=32, wanted=1.3),
)


def main() -> int:
    options = parse_options()
    end_engines_with_us()
    with tempfile.TemporaryDirectory(prefix="tensor-peers-") as scratch:
        model = options.model or Path(scratch, "model")
        make_checkpoint(model, TINY_SHAPE if options.quick else FULL_SHAPE)
        cases = make_cases(["decode"], options.batches, QUICK_LENGTHS if options.quick else FULL_LENGTHS)
        run = Run(cases, model, CORES, Path(scratch))
        with run.ending():
            measure(run, options)
    text, all_met = report(run)
    print(text)
    return 1 if run.results.failed or not all_met else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model and short runs: does it work?")
    parser.add_argument("--model", type=Path, help="directory of the checkpoint; made there if absent")
    parser.add_argument("--vllm-python", help="without it vLLM is left out")
    options = parser.parse_args()
    options.batches = options.batches or [8, 32]
    return options


def measure(run: Run, options: argparse.Namespace) -> None:
    """Start what was asked for and go round."""
    run.start_probe()
    shared = ["--ranks", str(CORES), "--threads", "1"]  # the last --threads counts
    for script, python in (("penstock", sys.executable), ("vllm", options.vllm_python)):
        if not python:
            run.results.tell(f"{script} is left out: give --{script}-python")
            continue
        run.start(f"{script}, {ONE_PROCESS}", python, script)
        run.start(f"{script}, {RANKS}", python, script, shared)
    run.warm_up()
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}")
        run.round(number)


def report(run: Run) -> tuple[str, bool]:
    """All that goes into the log, and whether every bar whose peer ran is met."""
    results, cases = run.results, run.cases
    bars, all_met = bar_table(BARS, cases, results.samples)
    parts = [
        f"machine: {machine()}; commit {commit()}\nversions: {versions_text(results.versions)}",
        results_table(cases, results.samples),
        bars,
        "\n".join([bandwidth_line(results.bandwidth), *(f"note: {note}" for note in results.notes)]),
    ]
    return "\n\n".join(parts), all_met


if __name__ == "__main__":
    sys.exit(main())

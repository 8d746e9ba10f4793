"""Two stages of one thread each against the pipelines of vLLM's CPU build and of llama.cpp.

    python benchmarks/pipeline_peers.py --llama-python DIR/bin/python --vllm-python DIR/bin/python

As `cpu_peers.py`, whose docstring says how the environments and the checkpoint are made and how decode is
counted; llama.cpp must be compiled with -DGGML_RPC=ON as well. vLLM runs with pipeline_parallel_size=2, each
stage bound to a core; llama.cpp over two RPC servers, each on a core of its own; Penstock once with each of
`--partitions`, and with chunks of a prompt short enough for a lone one to fill both stages. All cases in
turns: every case on every engine, then again; engines that wait are stopped. The cases: decode of 8 and 32
sequences, 128 tokens in and out, and the first token of a prompt of 512. Medians, ratios and bars as Markdown
for docs/perf-log.md. Exit code 1 if an engine has failed, the run was cut short, or a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from cpu_peers import Run, bandwidth_line, commit, end_engines_with_us, machine, make_cases, progress
from peers.bars import Bar, bar_table
from peers.checkpoint import FULL_SHAPE, TINY_SHAPE, make_checkpoint
from peers.report import ratio_table, results_table, versions_text

STAGES, THREADS = 2, 1
FULL_LENGTHS = {"inputs": (512,), "input": 128, "output": 128}
QUICK_LENGTHS = {"inputs": (64,), "input": 16, "output": 16}
PEER_ENGINES = ("vllm", "llama")


BARS = (
    Bar(ours="penstock ", called="best", peer="vllm", kind="decode", batch=8, wanted=1.7),
    Bar(ours="penstock ", called="best", peer="vllm", kind="decode", batch=32, wanted=1.45),
    Bar(ours="penstock ", called="best", peer="llama", kind="decode", batch=8, wanted=2.9),
    Bar(ours="penstock ", called="best", peer="llama", kind="decode", batch=32, wanted=3.7),
    Bar(ours="penstock even", called="even", peer="vllm", kind="prefill", batch=1, wanted=0.65),
)


def main() -> int:
    options = parse_options()
    end_engines_with_us()
    with tempfile.TemporaryDirectory(prefix="pipeline-peers-") as scratch:
        model = options.model or Path(scratch, "model")
        make_checkpoint(model, TINY_SHAPE if options.quick else FULL_SHAPE)
        lengths = QUICK_LENGTHS if options.quick else FULL_LENGTHS
        cases = make_cases(["prefill", "decode"], options.batches, lengths)
        run = Run(cases, model, THREADS, Path(scratch))
        with run.ending():
            measure(run, options)
    text, all_met = report(run, options.partitions)
    chunks = f"chunks: penstock {options.prefill_chunk}, vllm {options.vllm_chunk} (0: the default)"
    print(f"{chunks}\n{text}")
    return 1 if run.results.failed or not all_met else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--partitions", help="of Penstock's layers, default 16,8;even; empty: not Penstock")
    parser.add_argument("--prefill-chunk", default="128", help="of Penstock, tokens; 0: its default")
    parser.add_argument("--vllm-chunk", default="0", help="tokens of one of vLLM's steps; 0: 2048")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model and short runs: does it work?")
    parser.add_argument("--model", type=Path, help="directory of the checkpoint; made there if absent")
    parser.add_argument("--llama-python", help="without it llama.cpp is left out")
    parser.add_argument("--vllm-python", help="without it vLLM is left out")
    options = parser.parse_args()
    options.batches = options.batches or [8, 32]
    if options.partitions is None:
        options.partitions = "1,1;even" if options.quick else "16,8;even"
    options.partitions = [part for part in options.partitions.split(";") if part]
    return options


def measure(run: Run, options: argparse.Namespace) -> None:
    """Start what was asked for and go round."""
    run.start_probe()
    stages = ["--stages", str(STAGES)]
    for partition in options.partitions:
        more = [*stages, "--partition", partition, "--chunk", options.prefill_chunk]
        run.start(our_name(partition), sys.executable, "penstock", more)
    for name in PEER_ENGINES:
        python = getattr(options, f"{name}_python")
        if python:
            more = ["--chunk", options.vllm_chunk] if name == "vllm" else []
            run.start(name, python, more=[*stages, *more])
        else:
            run.results.tell(f"{name} is left out: give --{name}-python")
    run.warm_up()
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}")
        run.round(number)


def our_name(partition: str) -> str:
    return f"penstock {partition}"


def report(run: Run, partitions: list[str]) -> tuple[str, bool]:
    """All that goes into the log, and whether every bar whose peer ran is met."""
    results, cases = run.results, run.cases
    parts = [
        f"machine: {machine()}; {STAGES} stages of {THREADS} thread; commit {commit()}",
        f"versions: {versions_text(results.versions)}",
        results_table(cases, results.samples),
    ]
    for partition in partitions:
        names = {our_name(partition), *PEER_ENGINES}
        own = {name: values for name, values in results.samples.items() if name in names}
        parts.append(ratio_table(cases, own, our_name(partition)))
    bars, all_met = bar_table(BARS, cases, results.samples)
    notes = [f"note: {note}" for note in results.notes]
    parts += [bars, "\n".join([bandwidth_line(results.bandwidth), *notes])]
    return "\n\n".join(part for part in parts if part), all_met


if __name__ == "__main__":
    sys.exit(main())

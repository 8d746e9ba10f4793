"""How well two stages scale: our engine beside a bare prototype of the same kernels, in turns.

    python benchmarks/pipeline_scaling.py MODEL --prototype DIR/pp_proto.py [--rows 8,16,32] [--rounds 5]

MODEL has the shape of Qwen2.5-0.5B in bfloat16 (`cpu_peers.py --model` makes one). Two stages of one thread
(16 and 8 layers) decode 2m sequences, and one stage of one thread decodes m: the ratio of their tokens/s, 2.0
at best. The prototype is a script that is called as `pp_proto.py cpp kern.so one1|pp2 ROWS CONTEXT` and
prints tokens/s; `kern.cpp` beside it is compiled into a temporary folder. Our ratio over its own should be
0.97 at least: what is left is the engine's. At 64 sequences two stages should reach 0.92 of one stage with
two threads.

What two cores can give at all is measured beside it: two engines of one stage each, which share nothing but
the machine, decode m sequences at once. Their tokens/s together over those of one are the ceiling of the
pipe, which reads the same weights from the same memory.

Every round measures each of them once, so that all ratios are of the same minutes; ratios are of medians over
the rounds. The prototype's context is fixed; ours grows, and its mean is that. Engines are loaded first and
idle while another runs: they sleep. Prints Markdown for docs/perf-log.md; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from cpu_peers import commit, machine, progress
from observed import run_observed
from peers.report import format_samples, markdown

from penstock import LLM, SamplingParams
from penstock.request import GenerationRequest, RequestUpdate

COMPILE = ("g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
PROTOTYPE_S = 300.0
SCALING_BAR, THREADS_BAR = 0.97, 0.92
THREADS_BATCH = 64
PROMPT_IDS = range(1000, 90000)

Rates = Mapping[str, Sequence[float]]  # tokens/s by case


def main() -> int:
    options = parse_options()
    rows = [int(part) for part in options.rows.split(",")]
    with tempfile.TemporaryDirectory(prefix="pipeline-scaling-") as scratch, ExitStack() as stack:
        kernels = compile_kernels(options.prototype, Path(scratch)) if options.prototype else None
        engines = load_engines(options, rows, stack)
        cases = make_cases(options, rows, kernels, engines)
        for llm in engines.values():
            decode_rate(llm, max(2 * max(rows), THREADS_BATCH), 8, 4)  # touches all that the first steps make
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(options.rounds):
            for name, measure in cases.items():
                rates[name].append(measure())
                progress(f"round {number + 1} of {options.rounds}: {name}: {rates[name][-1]:.1f}")
    print(f"machine: {machine()}; commit {commit()}\n")
    print(rate_table(rates))
    text, fine = ratio_table(rows, rates)
    print(f"\n{text}")
    return 0 if fine else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prototype", type=Path, help="the script; without it only our own ratios are shown")
    parser.add_argument("--rows", default="8,16,32", help="sequences of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--partition", default="16,8", help="of our two stages; the prototype's is 16,8")
    parser.add_argument("--context", type=int, default=256, help="tokens: ours in the mean, the prototype's")
    parser.add_argument("--output", type=int, default=129, help="tokens of a sequence")
    options = parser.parse_args()
    if options.output // 2 >= options.context:
        parser.error("--output must be below twice --context")
    return options


def compile_kernels(prototype: Path, directory: Path) -> Path:
    target = directory / "kern.so"
    subprocess.run([*COMPILE, str(prototype.with_name("kern.cpp")), "-o", str(target)], check=True)
    return target


def load_engines(options: argparse.Namespace, rows: Sequence[int], stack: ExitStack) -> dict[str, LLM]:
    """One stage with one thread, twice, and with two; and two stages of one thread each."""
    common = {
        "dtype": "bfloat16",
        "max_model_len": options.context + options.output,
        "max_num_seqs": max(2 * max(rows), THREADS_BATCH),
        "speculative_method": "off",
    }
    shapes = {
        "one": {"threads_per_rank": 1},
        "two threads": {"threads_per_rank": 2},
        "two stages": {
            "threads_per_rank": 1,
            "pipeline_parallel_size": 2,
            "partition": options.partition,
        },
    }
    engines = {
        name: stack.enter_context(LLM(options.model, **common, **shape)) for name, shape in shapes.items()
    }
    with only_the_last_core():  # the two are to be beside each other, not after each other
        engines["beside"] = stack.enter_context(LLM(options.model, **common, **shapes["one"]))
    return engines


@contextmanager
def only_the_last_core() -> Iterator[None]:
    """Processes that are started inside run there."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def make_cases(
    options: argparse.Namespace, rows: Sequence[int], kernels: Path | None, engines: Mapping[str, LLM]
) -> dict[str, Callable[[], float]]:
    """What a round measures, in this order."""

    def ours(engine: str, batch: int) -> Callable[[], float]:
        return lambda: decode_rate(engines[engine], batch, options.context, options.output)

    def both(batch: int) -> float:
        with ThreadPoolExecutor() as pool:
            return sum(pool.map(lambda engine: ours(engine, batch)(), ["one", "beside"]))

    def prototype(mode: str, batch: int) -> Callable[[], float]:
        assert kernels is not None
        words = [sys.executable, str(options.prototype), "cpp", str(kernels), mode]
        return lambda: prototype_rate([*words, str(batch), str(options.context)], mode, batch)

    cases = {}
    for m in rows:
        cases[f"one, {m}"] = ours("one", m)
        if kernels:
            cases[f"prototype one, {m}"] = prototype("one1", m)
        cases[f"two engines, {m} each"] = partial(both, m)
        cases[f"two stages, {2 * m}"] = ours("two stages", 2 * m)
        if kernels:
            cases[f"prototype two stages, {2 * m}"] = prototype("pp2", 2 * m)
    for engine in ("two threads", "two stages"):
        cases.setdefault(f"{engine}, {THREADS_BATCH}", ours(engine, THREADS_BATCH))
    return cases


def decode_rate(llm: LLM, batch: int, context: int, output: int) -> float:
    """Tokens/s while all sequences decode, about `context` tokens long in the mean.

    The clock runs from the first token of the last sequence that starts to the first end of a sequence.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=random.choices(PROMPT_IDS, k=context - output // 2),
            sampling=sampling,
        )
        for index in range(batch)
    ]
    lengths = dict.fromkeys(map(str, range(batch)), 0)
    began, counted, rate = 0.0, 0, math.nan

    def observe(update: RequestUpdate) -> None:
        nonlocal began, counted, rate
        now = time.perf_counter()
        lengths[update.request_id] += len(update.token_ids)
        if began and math.isnan(rate):
            counted += 1
            if lengths[update.request_id] == output:
                rate = counted / (now - began)
        elif not began and min(lengths.values()):
            began = now

    run_observed(llm, requests, observe)
    return rate


def prototype_rate(command: Sequence[str], mode: str, batch: int) -> float:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROTOTYPE_S, check=False)
    rate = parse_rate(done.stdout, mode, batch)
    if rate is None:
        raise SystemExit(f"{' '.join(command)} gave no rate:\n{done.stdout}{done.stderr}")
    return rate


def parse_rate(output: str, mode: str, batch: int) -> float | None:
    """Tokens/s of a line such as `cpp B=32 ctx=256 pp2: 501.0 tok/s  stage0 busy 97% ...`."""
    found = re.search(rf"B={batch} ctx=\d+ {mode}: ([\d.]+) tok/s", output)
    return float(found.group(1)) if found else None


def rate_table(rates: Rates) -> str:
    return markdown(
        ["stages, sequences", "tokens/s"], [[name, format_samples(found)] for name, found in rates.items()]
    )


def ratio_table(rows: Sequence[int], rates: Rates) -> tuple[str, bool]:
    """Ratios of medians with their bars, and whether all bars are met."""
    lines, fine = [], True
    for m in rows:
        ours = ratio(rates, f"two stages, {2 * m}", f"one, {m}")
        bare = ratio(rates, f"prototype two stages, {2 * m}", f"prototype one, {m}")
        ceiling = ratio(rates, f"two engines, {m} each", f"one, {m}")
        assert ours is not None
        assert ceiling is not None
        line = [
            f"two stages at {2 * m} / one at {m}",
            f"{ours:.2f}",
            f"{ceiling:.2f}",
            f"{ours / ceiling:.3f}",
        ]
        line += ["-"] * 3
        if bare is not None:
            met = ours / bare >= SCALING_BAR
            line[4:] = [f"{bare:.2f}", f"{ours / bare:.3f}", f"{SCALING_BAR}: {'met' if met else 'missed'}"]
            fine &= met
        lines.append(line)
    batch = THREADS_BATCH
    ours = ratio(rates, f"two stages, {batch}", f"two threads, {batch}")
    assert ours is not None
    met = ours >= THREADS_BAR
    word = f"{THREADS_BAR}: {'met' if met else 'missed'}"
    lines.append([f"two stages / one with two threads, {batch}", f"{ours:.2f}", *["-"] * 4, word])
    columns = ["ratio", "ours", "two engines", "ours / that", "prototype", "ours / that", "bar"]
    return markdown(columns, lines), fine and met


def ratio(rates: Rates, above: str, below: str) -> float | None:
    if above not in rates or below not in rates:
        return None
    middles = [statistics.median(filter(math.isfinite, rates[name])) for name in (above, below)]
    return middles[0] / middles[1]


if __name__ == "__main__":
    sys.exit(main())

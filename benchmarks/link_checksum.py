"""What the checksums of links and samples cost, beside the CPU time of a step.

    python benchmarks/link_checksum.py [MODEL] [--tokens 128] [--rounds 5]

The engine runs with two stages, one thread each, and two micro-batches; a step's CPU time is that of all its
processes, over the steps. The checksum of a step is that of its frame, once by the sender, which has just
written it, and once by the receiver, and that of its samples and result, at both ends too. The receiver's is
taken over memory that no cache holds, which is the worst that can be: it usually finds the frame in the cache
that both cores share. A second table compares kinds of checksums. Prints Markdown for docs/perf-log.md, and
fails when the bar is missed.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import xxhash
from cpu_time import cpu_seconds
from peers.report import markdown

import penstock
from penstock import LLM, SamplingParams
from penstock.batch import SampledTokens, encode
from penstock.families.registry import load_spec
from penstock.pipeline.links.frame import NUM_CARRIED, payload_checksum

BAR = 0.005
DEMO = Path(penstock.__file__).parent / "assets" / "demo"
STAGES, ITEM_BYTES = 2, 2
PROMPT_TOKENS, NUM_PROMPTS = 256, 32
CANDIDATE_BYTES = (64, 8192, 114_688, 16 << 20)
CANDIDATES: dict[str, Callable[[bytes], int]] = {
    "XXH3-64": xxhash.xxh3_64_intdigest,
    "XXH3-128": xxhash.xxh3_128_intdigest,
    "crc32 (zlib)": zlib.crc32,
    "adler32 (zlib)": zlib.adler32,
}
COLD_BYTES = 256 << 20  # more than any cache holds


class Load(NamedTuple):
    """What the engine is given: the same number of rows in every step, or prompts."""

    name: str
    tokens_of_step: int
    prompts: list[list[int]]
    output_tokens: int
    num_steps: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(DEMO))
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    width = load_spec(Path(options.model)).hidden_size
    loads = [decoding(rows, options.tokens) for rows in (1, 8, 32)] + [prefilling()]
    rows, fine = [], True
    for load, step_s in zip(loads, step_seconds(options.model, loads, options.rounds), strict=True):
        num_bytes = NUM_CARRIED * load.tokens_of_step * width * ITEM_BYTES
        frame = frame_seconds(num_bytes)
        samples = message_seconds(load.tokens_of_step if load.output_tokens > 1 else 1)
        share = (frame + samples) / step_s
        fine &= share < BAR
        numbers = [f"{step_s * 1e6:.0f}", f"{num_bytes}", f"{frame * 1e6:.2f}", f"{samples * 1e6:.2f}"]
        rows.append([load.name, *numbers, f"{share:.3%}"])
    print(markdown(["load", "step CPU us", "frame bytes", "frame us", "samples us", "share"], rows))
    print()
    print(markdown(["bytes", *CANDIDATES], map(candidate_row, CANDIDATE_BYTES)))
    return 0 if fine else 1


def candidate_row(num_bytes: int) -> list[str]:
    """Microseconds of one call of each kind of checksum, with warm caches."""
    data = os.urandom(num_bytes)
    calls = max(3, min(2000, 50_000_000 // num_bytes))
    times = [seconds(functools.partial(checksum, data), calls) for checksum in CANDIDATES.values()]
    return [f"{num_bytes}", *(f"{time_s * 1e6:.2f}" for time_s in times)]


def decoding(rows: int, tokens: int) -> Load:
    """Rows in micro-batches, as many as there are stages where the rows suffice."""
    plans = min(rows, STAGES)
    prompts = [[5 + number, 7, 9] for number in range(rows)]
    return Load(f"decode, {rows} rows", rows // plans, prompts, tokens, tokens * plans)


def prefilling() -> Load:
    prompts = [[(7 * row + 3 * i) % 500 for i in range(PROMPT_TOKENS)] for row in range(NUM_PROMPTS)]
    return Load(f"prefill, {PROMPT_TOKENS} tokens", PROMPT_TOKENS, prompts, 1, NUM_PROMPTS)


def step_seconds(model: str, loads: list[Load], rounds: int) -> list[float]:
    """CPU time of a step of each load, the median of the rounds; the loads take turns."""
    found: list[list[float]] = [[] for _ in loads]
    with LLM(
        model,
        pipeline_parallel_size=STAGES,
        threads_per_rank=1,
        async_depth=0,
        micro_batches=STAGES,
        enable_prefix_caching=False,
        max_num_seqs=64,
        speculative_method="off",
    ) as llm:
        engine = psutil.Process()
        pids = [process.pid for process in (engine, *engine.children(recursive=True))]
        for number in range(rounds + 1):
            for load, steps in zip(loads, found, strict=True):
                sampling = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
                before = cpu_seconds(pids)
                llm.generate([{"prompt_token_ids": p} for p in load.prompts], sampling, use_tqdm=False)
                if number:
                    steps.append((cpu_seconds(pids) - before) / load.num_steps)
    return [statistics.median(steps) for steps in found]


def frame_seconds(num_bytes: int) -> float:
    """Of the checksum of a frame at both ends: of what was just written, and of what no cache holds."""
    memory = bytearray(max(COLD_BYTES, 4 * num_bytes))
    memory[::4096] = b"\1" * len(memory[::4096])
    stride = -(-num_bytes // 4096) * 4096
    whole, half = memoryview(memory), num_bytes // 2
    frames = [
        [whole[at : at + half], whole[at + half : at + num_bytes]]
        for at in range(0, len(memory) - stride, stride)
    ]
    warm = seconds(lambda: payload_checksum(frames[0]), 2000)
    calls = min(len(frames), 4000)
    cold = []
    for _ in range(5):
        memory[:] = bytes(len(memory))  # out of all caches, but for its end
        began = time.perf_counter()
        for parts in frames[:calls]:
            payload_checksum(parts)
        cold.append((time.perf_counter() - began) / calls)
    return warm + statistics.median(cold)


def message_seconds(num_rows: int) -> float:
    """Of the checksums of a step's samples and of its result, which is about as long, at both ends."""
    samples = SampledTokens(1000, 1, 1 << 31, [[30000]] * num_rows, [0] * num_rows)
    frame = encode(samples)
    return 4 * seconds(lambda: xxhash.xxh3_64_intdigest(frame), 2000)


def seconds(call: Callable[[], object], calls: int) -> float:
    """Of one call, the median of five runs."""
    runs = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        runs.append((time.perf_counter() - began) / calls)
    return statistics.median(runs)


if __name__ == "__main__":
    sys.exit(main())

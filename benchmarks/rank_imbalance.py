"""How long two ranks must wait for each other on this machine even if an engine cost nothing.

    python benchmarks/rank_imbalance.py

Two processes, each bound to a core, compute equal pieces of matrix products, as long as what a rank of the
0.5B shape computes between two sums at batch 32, and meet after each piece by two counters in shared memory.
What they wait there is the difference that the machine makes between two cores: whoever shares them, clocks,
interrupts. The sums of `--tp 2` cannot wait less. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

ROWS, HIDDEN, WIDTH = 32, 896, 2944  # a rank's share of half a layer
PIECES = 48  # of a step: two a layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    found = [measure(options.steps) for _ in range(options.rounds)]
    print("| of the time | median | spread |\n|---|---|---|")
    for rank in (0, 1):
        waited = [one[rank]["waited"] for one in found]
        middle, least, most = statistics.median(waited), min(waited), max(waited)
        print(f"| rank {rank} waits | {middle:.1%} | {least:.1%} to {most:.1%} |")
    pieces = [one[rank]["piece_ms"] for one in found for rank in (0, 1)]
    print(f"\na piece takes {statistics.median(pieces):.2f} ms")


def measure(num_steps: int) -> dict[int, dict[str, float]]:
    """What each rank has seen."""
    context = multiprocessing.get_context("spawn")
    memory = SharedMemory(create=True, size=1024)
    try:
        np.ndarray(128, dtype=np.int64, buffer=memory.buf)[:] = 0
        results = context.Queue()
        ranks = [
            context.Process(target=compute, args=(rank, memory.name, num_steps, results)) for rank in (0, 1)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get() for _ in ranks)
        for process in ranks:
            process.join()
        return found
    finally:
        memory.close()
        memory.unlink()


def compute(rank: int, name: str, num_steps: int, results: Any) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    memory = SharedMemory(name)
    lines = np.ndarray((2, 64), dtype=np.int64, buffer=memory.buf)  # a cache line or more for each rank
    own, other = lines[rank, :1], lines[1 - rank, :1]
    x = torch.randn(ROWS, HIDDEN).bfloat16()
    weights = [torch.randn(HIDDEN, WIDTH).bfloat16() for _ in range(PIECES)]

    def meet() -> None:
        own[0] += 1
        while other[0] < own[0]:
            pass

    for weight in weights:
        torch.mm(x, weight)
    meet()
    waited, pieces = 0.0, []
    began = time.perf_counter()
    for _ in range(num_steps):
        for weight in weights:
            start = time.perf_counter()
            torch.mm(x, weight)
            end = time.perf_counter()
            meet()
            pieces.append(end - start)
            waited += time.perf_counter() - end
    spent = time.perf_counter() - began
    meet()
    results.put((rank, {"waited": waited / spent, "piece_ms": 1000 * statistics.median(pieces)}))


if __name__ == "__main__":
    main()

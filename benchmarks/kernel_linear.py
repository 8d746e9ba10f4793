"""The packed product against torch's: ours, oneDNN prepacked, and `F.linear`, in turns, on a model's shapes.

Ours sums every number in one fixed order, whatever the number of rows; oneDNN's may not. So their ratio
is also the price of batch invariance. Weights are rotated, so that they come from memory, not from a cache.

    python benchmarks/kernel_linear.py --threads 1 --rows 1,8,32,128,512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu.library import KERNEL_NAMES, load
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.matrix import PLAIN, PackedMatrix

SHAPES = {
    "qkv": (1152, 896),
    "o": (896, 896),
    "gate+up": (9728, 896),
    "down": (896, 4864),
    "head": (151936, 896),
}
ROTATED_BYTES = 300_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load()
    assert loaded.library is not None, loaded.reason
    kernels = CpuKernels(loaded.library, frozenset(KERNEL_NAMES))
    print(f"threads {options.threads}, {loaded.isa}; us, median of {options.rounds} rounds, bfloat16")
    print("| shape | rows | ours | oneDNN prepacked | F.linear | GFLOP/s | GB/s | oneDNN / ours |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (out_size, in_size) in SHAPES.items():
        measure(name, out_size, in_size, kernels, options)


def measure(name: str, out_size: int, in_size: int, kernels: CpuKernels, options: argparse.Namespace) -> None:
    """Print a line for each number of rows."""
    copies = max(2, ROTATED_BYTES // (2 * out_size * in_size))
    plain = [(torch.randn(out_size, in_size) * 0.05).bfloat16() for _ in range(copies)]
    packed = [PackedMatrix(out_size, in_size, torch.bfloat16, kernels) for _ in plain]
    for matrix, weight in zip(packed, plain, strict=True):
        matrix.put(0, weight, PLAIN)
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain]
    for rows in map(int, options.rows.split(",")):
        x = torch.randn(rows, in_size).bfloat16()
        ways = {
            "ours": [_ours(matrix, x) for matrix in packed],
            "onednn": [_onednn(weight, x) for weight in onednn],
            "torch": [_torch(weight, x) for weight in plain],
        }
        ours, theirs, unpacked = in_turns(ways, options.rounds)
        work, size = 2 * rows * out_size * in_size, 2 * out_size * in_size
        print(
            f"| {name} | {rows} | {ours * 1e6:.0f} | {theirs * 1e6:.0f} | {unpacked * 1e6:.0f} | "
            f"{work / ours / 1e9:.0f} | {size / ours / 1e9:.1f} | {theirs / ours:.2f} |",
            flush=True,
        )


def _ours(matrix: PackedMatrix, x: Tensor) -> Callable[[], object]:
    return lambda: matrix.multiply(x, None)


def _onednn(weight: Tensor, x: Tensor) -> Callable[[], object]:
    return lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _torch(weight: Tensor, x: Tensor) -> Callable[[], object]:
    return lambda: F.linear(x, weight)


def in_turns(ways: dict[str, list[Callable[[], object]]], rounds: int) -> list[float]:
    """Median seconds of one call, for each way; one round of each after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, calls in ways.items():
            began = time.perf_counter()
            for call in calls:
                call()
            seconds[name].append((time.perf_counter() - began) / len(calls))
    return [statistics.median(values[1:]) for values in seconds.values()]


if __name__ == "__main__":
    main()

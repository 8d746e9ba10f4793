"""The packed product against torch's: ours and oneDNN prepacked, in turns, on the shapes of models.

Ours sums every number in one fixed order, whatever the number of rows; oneDNN's may not. So their ratio
is also the price of batch invariance. Weights are rotated, so that they come from memory, not from a cache.

    python benchmarks/kernel_linear.py [--model 0.5b,7b,30b-a3b] [--threads 1] [--rows 1,8,32,128,512]

The bar, from 128 rows on: at least 0.97 times as fast as oneDNN. Exit code 1 if it is missed. Without AVX-512
torch prepacks no bfloat16 for oneDNN: then ours is timed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from ratios import in_turns, shown
from torch import Tensor

from penstock.kernels.cpu.library import KERNEL_NAMES, load
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.matrix import PLAIN, PackedMatrix

ROTATED_BYTES = 300_000_000
BAR, BAR_ROWS = 0.97, 128


class Shape(NamedTuple):
    """A projection, [outputs, inputs]."""

    name: str
    out_size: int
    in_size: int


SHAPES = {
    "0.5b": [
        Shape("qkv", 1152, 896), Shape("o", 896, 896), Shape("gate+up", 9728, 896),
        Shape("down", 896, 4864), Shape("head", 151936, 896),
    ],
    "7b": [
        Shape("qkv", 4608, 3584), Shape("o", 3584, 3584), Shape("gate+up", 37888, 3584),
        Shape("down", 3584, 18944),
    ],
    "30b-a3b": [
        Shape("qkv", 5120, 2048), Shape("o", 2048, 4096), Shape("expert gate+up", 1536, 2048),
        Shape("expert down", 2048, 768),
    ],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--shape", default="", help="only this one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load()
    assert loaded.library is not None, loaded.reason
    kernels = CpuKernels(loaded.library, frozenset(KERNEL_NAMES))
    print(f"threads {options.threads}, {loaded.isa}; us, median of {options.rounds} rounds, bfloat16")
    print("| model | shape | rows | ours | oneDNN prepacked | GFLOP/s | GB/s | oneDNN / ours | bar |")
    print("|---|---|---|---|---|---|---|---|---|")
    shapes = [(model, shape) for model in options.model.split(",") for shape in SHAPES[model]]
    met = [
        is_met
        for model, shape in shapes
        if options.shape in ("", shape.name)
        for is_met in measure(model, shape, kernels, options)
    ]
    return 0 if all(met) else 1


def measure(model: str, shape: Shape, kernels: CpuKernels, options: argparse.Namespace) -> list[bool]:
    """Print a line for each number of rows; whether each is as fast as it should be."""
    _, out_size, in_size = shape
    copies = max(2, ROTATED_BYTES // (2 * out_size * in_size))
    packed = [PackedMatrix(out_size, in_size, torch.bfloat16, kernels) for _ in range(copies)]
    onednn = []
    for matrix in packed:
        weight = (torch.randn(out_size, in_size) * 0.05).bfloat16()
        matrix.put(0, weight, PLAIN)
        with contextlib.suppress(RuntimeError):
            onednn.append(torch.ops.mkldnn._reorder_linear_weight(weight))
    return [
        _line(f"| {model} | {shape.name}", rows, in_size, out_size, packed, onednn, options.rounds)
        for rows in map(int, options.rows.split(","))
    ]


def _line(
    title: str,
    rows: int,
    in_size: int,
    out_size: int,
    packed: list[PackedMatrix],
    onednn: list[Tensor],
    num_rounds: int,
) -> bool:
    x = torch.randn(rows, in_size).bfloat16()
    ways = [[_ours(matrix, x) for matrix in packed]]
    if onednn:
        ways.append([_onednn(weight, x) for weight in onednn])
    rounds = in_turns(ways, _seconds, num_rounds, warm_up=1)
    ours = statistics.median(found[0] for found in rounds)
    work, size = 2 * rows * out_size * in_size, 2 * out_size * in_size
    if not onednn:
        rates = f"{work / ours / 1e9:.0f} | {size / ours / 1e9:.1f}"
        print(f"{title} | {rows} | {ours * 1e6:.0f} | - | {rates} | - | |", flush=True)
        return True
    theirs = statistics.median(found[1] for found in rounds)
    ratios = [other / own for own, other in rounds]
    has_bar, is_met = rows >= BAR_ROWS, statistics.median(ratios) >= BAR
    word = f"{BAR}: {'met' if is_met else 'missed'}" if has_bar else ""
    print(
        f"{title} | {rows} | {ours * 1e6:.0f} | {theirs * 1e6:.0f} | {work / ours / 1e9:.0f} | "
        f"{size / ours / 1e9:.1f} | {shown(ratios)} | {word} |",
        flush=True,
    )
    return is_met or not has_bar


def _seconds(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def _ours(matrix: PackedMatrix, x: Tensor) -> Callable[[], object]:
    return lambda: matrix.multiply(x, None)


def _onednn(weight: Tensor, x: Tensor) -> Callable[[], object]:
    return lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


if __name__ == "__main__":
    sys.exit(main())

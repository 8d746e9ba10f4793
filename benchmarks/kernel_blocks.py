"""Products over GGUF's block formats against the bfloat16 kernel and plain reading, in turns.

    python benchmarks/kernel_blocks.py                                  # Qwen2.5-0.5B's shapes, one thread
    python benchmarks/kernel_blocks.py --formats Q4_K,Q6_K --hidden 1024 --inner 4864 --rows 1,8,512 --threads
    2

Weights are random, all layers together far larger than any cache. Each round runs bfloat16, every format and
a plain sum over as many bytes as each format holds. Printed are the medians, the rate at which weights were
read, its share of the plain sum's rate at that footprint, and the median of the rounds' ratios to bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.block_formats import BLOCK_FORMATS, BlockFormat
from penstock.kernels.cpu.library import KERNEL_NAMES, load
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.block_matrix import BlockForms, BlockMatrix
from penstock.layers.matrix import GATE, PLAIN, UP, Matrix, PackedMatrix
from penstock.weights.gguf_blocks import decode_rows

FINITE = 0x3F  # bytes up to here are no float16 that is not finite
PIECE = 1024  # outputs that are made at a time

Shape = tuple[int, int, bool]


def layer_shapes(hidden: int, inner: int) -> list[Shape]:
    """Outputs, inputs and whether it is gated, of a layer's matrices."""
    return [
        (hidden + 256, hidden, False),
        (hidden, hidden, False),
        (2 * inner, hidden, True),
        (hidden, inner, False),
    ]


def block_matrix(kernels: CpuKernels, block_format: BlockFormat, shape: Shape) -> Matrix:
    out_size, in_size, gated = shape
    matrix = BlockMatrix(out_size, in_size, torch.bfloat16, BlockForms((block_format,)), kernels, gated=gated)
    for role in (GATE, UP) if gated else (PLAIN,):
        outputs = out_size // 2 if gated else out_size
        for first in range(0, outputs, PIECE):
            count = min(PIECE, outputs - first)
            raw = torch.randint(0, FINITE, (count, block_format.row_bytes(in_size)), dtype=torch.uint8)
            matrix.put_blocks(first, decode_rows(block_format, raw, in_size), role)
    return matrix


def dense_matrix(kernels: CpuKernels, shape: Shape) -> Matrix:
    out_size, in_size, gated = shape
    matrix = PackedMatrix(out_size, in_size, torch.bfloat16, kernels, gated=gated)
    for role in (GATE, UP) if gated else (PLAIN,):
        outputs = out_size // 2 if gated else out_size
        matrix.put(0, torch.randn(outputs, in_size).bfloat16(), role)
    return matrix


class Stack:
    """The matrices of some layers in one format."""

    def __init__(self, name: str, matrices: list[Matrix], rows: int) -> None:
        self.name, self._matrices = name, matrices
        self.num_bytes = sum(matrix.nbytes for matrix in matrices)
        sizes = {matrix.in_size for matrix in matrices}
        self._inputs = {size: torch.randn(rows, size).bfloat16() for size in sizes}

    def seconds(self) -> float:
        start = time.perf_counter()
        for matrix in self._matrices:
            matrix.multiply(self._inputs[matrix.in_size], None)
        return time.perf_counter() - start


class Reading:
    """A plain sum over memory."""

    def __init__(self, num_bytes: int) -> None:
        self._memory: Tensor = torch.ones(num_bytes // 8, dtype=torch.int64)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._memory.sum()
        return time.perf_counter() - start


def compare(stacks: list[Stack], budget: float) -> None:
    """Print a line for each stack; the first is what the others are compared with."""
    readings = [Reading(stack.num_bytes) for stack in stacks]
    runs: list[Callable[[], float]] = [
        each.seconds for pair in zip(stacks, readings, strict=True) for each in pair
    ]
    for run in runs:
        run()
    rounds: list[list[float]] = []
    end = time.monotonic() + budget
    while len(rounds) < 5 or time.monotonic() < end:
        rounds.append([run() for run in runs])
    for index, stack in enumerate(stacks):
        own = [times[2 * index] for times in rounds]
        share = statistics.median(times[2 * index + 1] / times[2 * index] for times in rounds)
        ratio = statistics.median(times[0] / times[2 * index] for times in rounds)
        middle = statistics.median(own)
        print(
            f"  {stack.name:8} {middle * 1e3:9.2f} ms  {stack.num_bytes / middle / 1e9:6.1f} GB/s  "
            f"{share:5.2f} of reading  {ratio:5.2f} x bf16  ({len(rounds)} rounds)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="Q8_0,Q5_0,Q4_0")
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--inner", type=int, default=4864)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured for each number of rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load()
    if loaded.library is None:
        raise SystemExit(f"no kernels: {loaded.reason}")
    kernels = CpuKernels(loaded.library, frozenset(KERNEL_NAMES))
    shapes = layer_shapes(options.hidden, options.inner) * options.layers
    dense = [dense_matrix(kernels, shape) for shape in shapes]
    blocks = {
        name: [block_matrix(kernels, BLOCK_FORMATS[name], shape) for shape in shapes]
        for name in options.formats.split(",")
    }
    print(f"{loaded.isa}, {options.threads} thread(s), {options.layers} layers")
    for rows in map(int, options.rows.split(",")):
        print(f"{rows} rows")
        stacks = [Stack("bf16", dense, rows), *(Stack(name, own, rows) for name, own in blocks.items())]
        compare(stacks, options.seconds)


if __name__ == "__main__":
    main()

"""The vocabulary head with candidates beside the plain matrix product.

    python benchmarks/kernel_head.py [--vocab 151936] [--hidden 896] [--threads 2] [--repeats 30]

Times the bare product (`penstock_linear`, which writes its outputs) and the head in turns, each on the same
bfloat16 weight, and prints the median of the ratios of neighbouring runs. The bar: 3 % for the likeliest
token alone, 10 % for 50 and 128 candidates.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from penstock.kernels.candidates import HeadRequest, SparseBias
from penstock.kernels.cpu import library as kernel_library
from penstock.kernels.cpu.abi import BFLOAT16, Step
from penstock.kernels.cpu.head import Head, dense_product

BARS = {1: 1.03, 50: 1.10, 128: 1.10}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(
    head_work: Callable[[], object], product_work: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Median ratio of neighbouring runs, and the median time of the product in seconds."""
    ratios, times = [], []
    for turn in range(repeats + 3):
        order = [product_work, head_work] if turn % 2 else [head_work, product_work]
        taken = {work: seconds(work) for work in order}
        ratios.append(taken[head_work] / taken[product_work])
        times.append(taken[product_work])
    return statistics.median(ratios[3:]), statistics.median(times[3:])


def request(num_rows: int, num_candidates: int) -> HeadRequest:
    return HeadRequest(
        num_candidates=np.full(num_rows, num_candidates, dtype=np.int64),
        wants_logits=np.zeros(num_rows, dtype=np.bool_),
        bias=SparseBias.none(num_rows),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = kernel_library.load()
    if loaded.library is None:
        print(f"no kernels: {loaded.reason}", file=sys.stderr)
        return 1
    return measure(loaded.library, options)


def packed_vocabulary(
    library: ctypes.CDLL, vocab: int, hidden: int, numbers: torch.Generator
) -> torch.Tensor:
    """Panels of random rows [vocab, hidden]."""
    rows = torch.randn(vocab, hidden, generator=numbers).bfloat16()
    packed = torch.zeros((vocab + 31) // 32 * 32 * ((hidden + 1) // 2 * 2), dtype=torch.bfloat16)
    library.penstock_pack(rows.data_ptr(), packed.data_ptr(), 0, vocab, hidden, 0, BFLOAT16)
    return packed


def measure(library: ctypes.CDLL, options: argparse.Namespace) -> int:
    vocab, hidden = options.vocab, options.hidden
    numbers = torch.Generator().manual_seed(0)
    packed = packed_vocabulary(library, vocab, hidden, numbers)
    missed = 0
    for num_rows in (1, 8, 32):
        x = torch.randn(num_rows, hidden, generator=numbers).bfloat16()
        y = torch.empty(num_rows, vocab, dtype=torch.bfloat16)
        product = dense_product(packed.data_ptr(), x.shape[1], vocab, x.dtype)
        product.x, product.x_stride, product.y, product.y_stride = x.data_ptr(), hidden, y.data_ptr(), vocab
        step = Step(num_tokens=num_rows)
        linear = lambda: library.penstock_linear(ctypes.byref(product), ctypes.byref(step))  # noqa: B023, E731
        for count, bar in BARS.items():
            wanted = request(num_rows, count)
            found, taken = ratio(lambda: Head(library).answer(x, product, wanted), linear, options.repeats)  # noqa: B023
            missed += found > bar
            beside = f"{found:.3f} x the product's {1000 * taken:6.2f} ms"
            print(f"{num_rows:3} rows  k = {count:3}  {beside}  bar {bar}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

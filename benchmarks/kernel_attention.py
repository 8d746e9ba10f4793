"""Attention over KV blocks beside the memory's read bandwidth (decode) and the linear kernel (prefill).

    python benchmarks/kernel_attention.py [--threads 1] [--heads 14] [--kv-heads 2] [--head-dim 64]
                                          [--block-size 32] [--dtype bfloat16] [--memory-gib 1] [--repeats 15]

A run computes some layers, each with its own KV in huge pages, more than any cache holds; a row's blocks
lie in random order. In turns with it, as many bytes are read and summed (`penstock_read`). Printed is the
median of the ratios of neighbouring runs. The bar: 85 % of the bandwidth with 1 and 32 rows of 4,096 tokens
or more. Prefill is compared in the same way with a linear layer of 512 tokens (896 to 9,728); the bar is 60 %
of its rate.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu import library as kernel_library
from penstock.kernels.cpu.abi import AttentionArgs, LinearArgs, Step
from penstock.kernels.cpu.ops import DTYPES, HeadShape

MIN_BYTES = 384 << 20  # of KV that a run reads
BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024, 4096, 16384, 32768)
PROMPTS = (512, 4096, 16384)
READ_BAR, PREFILL_BAR = 0.85, 0.6
BAR_TOKENS = 4096  # from here on there are bars
HIDDEN, GATE_UP, LINEAR_TOKENS = 896, 9728, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The sizes of a layer, the library, and the memory for the KV of all layers."""

    library: ctypes.CDLL
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    memory: Tensor  # bytes
    repeats: int

    @property
    def block_bytes(self) -> int:
        sizes = (self.kv_heads, self.head_dim, self.block_size, DTYPES[self.dtype])
        return int(self.library.penstock_kv_block_bytes(*sizes))

    def layers(
        self, num_rows: int, num_tokens: int, context: int, *, max_layers: int = 1 << 20
    ) -> tuple[Callable[[], None], int]:
        """A function that computes one step of some layers, and their number."""
        per_row = -(-context // self.block_size)
        num_blocks = len(self.memory) // self.block_bytes
        layer_bytes = num_rows * per_row * self.block_bytes
        num_layers = min(-(-MIN_BYTES // layer_bytes), num_blocks // (num_rows * per_row), max_layers)
        if num_layers == 0:
            raise SystemExit(f"{num_rows} rows of {context} tokens need more --memory-gib")
        per_layer = num_blocks // num_layers
        tables = torch.randperm(per_layer)[: num_rows * per_row].view(num_rows, per_row).contiguous()
        shape = HeadShape(num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim)
        qkv = torch.randn(num_rows * num_tokens, shape.qkv_size).to(self.dtype)
        y = torch.empty(num_rows * num_tokens, shape.query_size, dtype=self.dtype)
        starts, lengths = torch.arange(num_rows + 1) * num_tokens, torch.full((num_rows,), context)
        step = Step(
            num_tokens=len(qkv), block_tables=tables.data_ptr(), block_table_stride=per_row,
            query_starts=starts.data_ptr(), seq_lens=lengths.data_ptr(), num_rows=num_rows,
        )  # fmt: skip
        first = self.memory.data_ptr()
        calls = [
            AttentionArgs(
                qkv=qkv.data_ptr(), kv=first + layer * per_layer * self.block_bytes, y=y.data_ptr(),
                num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
                block_size=self.block_size, scale=self.head_dim**-0.5, dtype=DTYPES[self.dtype],
            )
            for layer in range(num_layers)
        ]  # fmt: skip
        kept = (tables, qkv, y, starts, lengths)

        def work() -> None:
            assert kept
            for call in calls:
                self.library.penstock_attention(ctypes.byref(call), ctypes.byref(step))

        return work, num_layers

    def compare(self, work: Callable[[], None], other: Callable[[], None]) -> tuple[float, float]:
        """Medians of the seconds that `work` takes, and of its ratio to those of `other` beside it."""
        times, ratios = [], []
        for turn in range(self.repeats + 2):
            order = [work, other] if turn % 2 else [other, work]
            taken = {each: seconds(each) for each in order}
            times.append(taken[work])
            ratios.append(taken[work] / taken[other])
        return statistics.median(times[2:]), statistics.median(ratios[2:])


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def huge_pages(num_bytes: int) -> Tensor:
    """Bytes of small bfloat16 or float32 numbers, written so that every page is there."""
    mapped = mmap.mmap(-1, num_bytes)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory.view(torch.float32).fill_(0.25)
    return memory


def decode(bench: Bench) -> int:
    missed = 0
    element_size = torch.empty(0, dtype=bench.dtype).element_size()
    for num_rows in BATCHES:
        for context in CONTEXTS:
            work, num_layers = bench.layers(num_rows, 1, context)
            size = num_layers * num_rows * context * 2 * bench.kv_heads * bench.head_dim * element_size
            memory = bench.memory[: size // 64 * 64]

            def read(memory: Tensor = memory) -> None:
                bench.library.penstock_read(memory.data_ptr(), len(memory))

            taken, ratio = bench.compare(work, read)
            has_bar = num_rows in (BATCHES[0], BATCHES[-1]) and context >= BAR_TOKENS
            missed += has_bar and 1 / ratio < READ_BAR
            rate = f"{size / taken / 1e9:5.1f} GB/s, {100 / ratio:3.0f} % of reading"
            name = f"decode  {num_rows:2} rows  {context:5} tokens  {1e6 * taken / num_layers:7.0f} us"
            print(f"{name}  {rate}" + f"  bar {100 * READ_BAR:.0f} %" * has_bar)
    return missed


def linear(bench: Bench) -> Callable[[], None]:
    """A gate-up projection of `LINEAR_TOKENS` tokens."""
    x = torch.randn(LINEAR_TOKENS, HIDDEN).to(bench.dtype)
    y = torch.empty(LINEAR_TOKENS, GATE_UP, dtype=bench.dtype)
    weight = torch.randn(HIDDEN * GATE_UP).to(bench.dtype)
    args = LinearArgs(
        x=x.data_ptr(), x_stride=HIDDEN, weight=weight.data_ptr(), y=y.data_ptr(), y_stride=GATE_UP,
        in_size=HIDDEN, out_size=GATE_UP, dtype=DTYPES[bench.dtype],
    )  # fmt: skip
    kept, step = (x, y, weight), Step(num_tokens=LINEAR_TOKENS)

    def work() -> None:
        assert kept
        bench.library.penstock_linear(ctypes.byref(args), ctypes.byref(step))

    return work


def prefill(bench: Bench) -> int:
    missed = 0
    product, product_flop = linear(bench), 2 * LINEAR_TOKENS * HIDDEN * GATE_UP
    for prompt in PROMPTS:
        work, num_layers = bench.layers(1, prompt, prompt, max_layers=4)
        flop = num_layers * 4 * bench.heads * bench.head_dim * prompt * (prompt + 1) // 2
        taken, ratio = bench.compare(work, product)
        share = flop / product_flop / ratio
        has_bar = prompt >= BAR_TOKENS
        missed += has_bar and share < PREFILL_BAR
        rate = f"{flop / taken / 1e9:4.0f} GFLOP/s, {100 * share:3.0f} % of linear"
        name = f"prefill  1 row   {prompt:5} tokens  {1e6 * taken / num_layers:7.0f} us"
        print(f"{name}  {rate}" + f"  bar {100 * PREFILL_BAR:.0f} %" * has_bar)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loaded = kernel_library.load()
    if loaded.library is None:
        print(f"no kernels: {loaded.reason}", file=sys.stderr)
        return 1
    bench = Bench(
        library=loaded.library, heads=options.heads, kv_heads=options.kv_heads, head_dim=options.head_dim,
        block_size=options.block_size, dtype=getattr(torch, options.dtype), repeats=options.repeats,
        memory=huge_pages(int(options.memory_gib * 2**30)),
    )  # fmt: skip
    print(f"{loaded.isa}; {options.threads} threads; blocks of {options.block_size} tokens; {options.dtype}")
    return int(decode(bench) + prefill(bench) > 0)


if __name__ == "__main__":
    sys.exit(main())

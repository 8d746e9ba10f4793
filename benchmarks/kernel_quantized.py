"""int8 and int4 products against the bfloat16 kernel, in turns: the linear layers of a decoder and its head.

    python benchmarks/kernel_quantized.py                    # Qwen2.5-0.5B's shapes, one thread
    python benchmarks/kernel_quantized.py --rows 1,32 --group-size 64 --threads 2

Weights are random bytes, all layers together far larger than any cache. Each round runs the three formats
one after the other; printed are the medians of each and of the rounds' ratios, and the best rate at which
weights were read.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock.kernels.cpu.abi import BFLOAT16, LinearArgs, QuantizedLinearArgs, QuantizedSizes, Step
from penstock.kernels.cpu.library import load

LAYER = [(1152, 896, 0), (896, 896, 0), (9728, 896, 1), (896, 4864, 0)]  # outputs, inputs, gated
HEAD = (151936, 896, 0)
MAX_IN, MAX_OUT = 4864, 151936

Shape = tuple[int, int, int]


class Stack:
    """All products of a decoder in one format, called layer by layer on the same input."""

    def __init__(
        self, library: ctypes.CDLL, shapes: list[Shape], bits: int, group_size: int, rows: int
    ) -> None:
        self.library, self.bits, self.group_size, self.rows = library, bits, group_size, rows
        self.num_bytes = 0
        self._kept: list[Tensor] = []
        self._x = torch.randn(rows, MAX_IN).bfloat16()
        self._y = torch.empty(rows, max(out for out, _, _ in shapes), dtype=torch.bfloat16)
        self._scratch = torch.empty(rows * (8 * MAX_IN), dtype=torch.uint8)
        self._args = [self._dense(*shape) if bits == 16 else self._quantized(*shape) for shape in shapes]
        self._kernel = library.penstock_linear if bits == 16 else library.penstock_quantized_linear
        self._step = Step(num_tokens=rows)

    def _bytes(self, count: int, limit: int = 256) -> int:
        random = torch.randint(0, limit, (1 << 20,), dtype=torch.uint8)
        memory = random.repeat(count // random.numel() + 1)[:count].contiguous()
        self._kept.append(memory)
        self.num_bytes += count
        return memory.data_ptr()

    def _scales(self, num_bytes: int) -> int:
        scales = torch.full((num_bytes // 2,), 0.01, dtype=torch.bfloat16)
        self._kept.append(scales)
        self.num_bytes += num_bytes
        return scales.data_ptr()

    def _dense(self, out_size: int, in_size: int, gated: int) -> LinearArgs:
        return LinearArgs(
            x=self._x.data_ptr(),
            x_stride=MAX_IN,
            weight=self._bytes((out_size + 31) // 32 * 32 * in_size * 2, 60),  # no NaN, no huge number
            y=self._y.data_ptr(),
            y_stride=self._y.shape[1],
            in_size=in_size,
            out_size=out_size,
            dtype=BFLOAT16,
            gated=gated,
        )

    def _quantized(self, out_size: int, in_size: int, gated: int) -> QuantizedLinearArgs:
        group_size = self.group_size if self.bits == 4 else in_size
        sizes = QuantizedSizes()
        self.library.penstock_quantized_sizes(
            out_size, in_size, group_size, self.bits, gated, BFLOAT16, ctypes.addressof(sizes)
        )
        return QuantizedLinearArgs(
            x=self._x.data_ptr(),
            x_stride=MAX_IN,
            weight=self._bytes(sizes.weight_bytes),
            scales=self._scales(sizes.scale_bytes),
            y=self._y.data_ptr(),
            y_stride=self._y.shape[1],
            in_size=in_size,
            out_size=out_size,
            group_size=group_size,
            scratch=self._scratch.data_ptr(),
            bits=self.bits,
            dtype=BFLOAT16,
            gated=gated,
            scale_dtype=BFLOAT16,
        )

    def seconds(self) -> float:
        """One pass over all products."""
        start = time.perf_counter()
        for args in self._args:
            self._kernel(ctypes.addressof(args), ctypes.addressof(self._step))
        return time.perf_counter() - start


def in_turns(run: list[Callable[[], float]], budget: float) -> Iterator[list[float]]:
    """Rounds of one call each, after one that is not counted, for about `budget` seconds; at least 3."""
    for once in run:
        once()
    end, rounds = time.monotonic() + budget, 0
    while rounds < 3 or time.monotonic() < end:
        yield [once() for once in run]
        rounds += 1


def report(name: str, stacks: list[Stack], budget: float) -> None:
    """A line for each format."""
    rounds = list(in_turns([stack.seconds for stack in stacks], budget))
    for i, stack in enumerate(stacks):
        times = [times[i] for times in rounds]
        ratio = statistics.median(times[0] / times[i] for times in rounds)
        middle = statistics.median(times)
        rate = stack.num_bytes / min(times) / 1e9
        label = {16: "bf16", 8: "int8", 4: f"int4/{stack.group_size}"}[stack.bits]
        print(f"{name:24} {label:9} {middle * 1e3:9.2f} ms  best {min(times) * 1e3:9.2f} ms  "
              f"{rate:5.1f} GB/s  {ratio:5.2f} x bf16", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured for each line's group")
    parser.add_argument("--each", action="store_true", help="every shape by itself, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load()
    if loaded.library is None:
        raise SystemExit(f"no kernels: {loaded.reason}")
    print(f"{loaded.isa}, {options.threads} thread(s), {options.layers} layers and the head")
    for rows in map(int, options.rows.split(",")):
        layers = min(options.layers, 2) if rows > 64 else options.layers
        cases: dict[str, list[Shape]] = {"decoder" if rows > 64 else "decoder and head": LAYER * layers}
        if rows <= 64:
            cases["decoder and head"] = LAYER * layers + [HEAD] * max(1, layers // 24)
        if options.each:
            cases |= {f"{out} x {size}": [(out, size, gated)] * 8 for out, size, gated in LAYER}
            cases |= {"head": [HEAD]} if rows <= 64 else {}
        for name, shapes in cases.items():
            stacks = [Stack(loaded.library, shapes, bits, options.group_size, rows) for bits in (16, 8, 4)]
            report(f"{rows} rows, {name}", stacks, options.seconds)


if __name__ == "__main__":
    main()

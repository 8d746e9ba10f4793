"""A model of a billion parameters on one GPU: what share of the card decode and prefill reach.

    python benchmarks/gpu_baseline.py [--device cuda] [--batches 1,32] [--rounds 5]
    python benchmarks/gpu_baseline.py --device cpu --shape tiny --output 8 --prompt 64   # does it run at all

The checkpoint has random weights in bfloat16: hidden size 2,048, 16 layers, 32 heads of 64 over 8 KV heads,
intermediate size 8,192, vocabulary 128,256, tied head. Two ceilings of the card are measured first, with
torch's own calls: bytes a second of a copy, read and written counted, and operations a second of a bfloat16
product of 8,192 cubed. Then one stage and two stages on the same card take turns:

    decode     sequences that start together; all tokens but each one's first, by the time of all less that of
               the first. Share: the bytes that a step must read (weights, and keys and values) by its time,
               of the copy's bytes a second.
    prefill    one fresh prompt to its first token, waiting and sampling counted. Share: the operations of the
               layers and of one row of the head by that time, of the product's operations a second.

Last, one stage runs as a thread of this process under torch's profiler: how many kernels a step launches, and
how long the card computes of it. What is left of a step is the host's. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from peers.checkpoint import ITEM_BYTES, TINY_SHAPE, make_checkpoint, weight_bytes

from penstock import LLM, SamplingParams

SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": TINY_SHAPE,
}
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
DECODE_PROMPT = 128
PROFILED_STEPS = 32


class Ceilings(NamedTuple):
    """What the device does at most."""

    copy_bytes_per_s: float
    operations_per_s: float


class Engine(NamedTuple):
    """One layout, loaded."""

    name: str
    llm: LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="of every stage")
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--output", type=int, default=256, help="tokens of a decoding sequence")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    shape = SHAPES[options.shape]
    kind = torch.device(options.device).type
    found = ceilings(kind)
    print(f"{_device_name(kind)}, torch {torch.__version__}", end=": ")
    print(f"copy {found.copy_bytes_per_s / 1e12:.3f} TB/s", end=", ")
    print(f"product {found.operations_per_s / 1e12:.1f} TFLOP/s")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_checkpoint(directory, shape)
        with ExitStack() as stack:
            engines = [
                Engine(name, stack.enter_context(_engine(directory, options, max(batches), num_stages)))
                for num_stages, name in ((1, "one stage"), (2, "two stages"))
            ]
            decodes, prefills = measure(engines, batches, options, shape)
        print_decodes(decodes, batches, options, shape, weight_bytes(directory), found)
        print_prefills(prefills, prefill_operations(shape, options.prompt), found)
        if kind == "cuda":
            print_profile(directory, options, batches, shape)


def _engine(directory: Path, options: argparse.Namespace, max_num_seqs: int, num_stages: int) -> LLM:
    longest = max(options.prompt, DECODE_PROMPT + options.output) + 1
    return LLM(
        str(directory),
        device=options.device,
        pipeline_parallel_size=num_stages,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        num_blocks=-(-max_num_seqs * longest // 32),
        prefill_chunk=options.prompt,
    )


def ceilings(kind: str) -> Ceilings:
    """Measure the device: the best of several, each long enough for its clocks to rise."""
    source = torch.empty(COPY_BYTES[kind], dtype=torch.uint8, device=kind).random_()
    target = torch.empty_like(source)
    copy_s = _best_s(kind, lambda: target.copy_(source))
    size = PRODUCT_SIZE[kind]
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=kind) for _ in range(2))
    product = torch.empty_like(a)
    product_s = _best_s(kind, lambda: torch.mm(a, b, out=product))
    return Ceilings(2 * len(source) / copy_s, 2 * size**3 / product_s)


def _best_s(kind: str, work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one call: the median of several batches of calls, after some that warm up."""

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    found = []
    for _ in range(4):
        wait()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        found.append((time.perf_counter() - began) / repeats)
    return statistics.median(found[1:])


def measure(
    engines: Sequence[Engine], batches: Sequence[int], options: argparse.Namespace, shape: dict[str, int]
) -> tuple[dict[tuple[str, int], list[float]], dict[str, list[float]]]:
    """Seconds of a decode step by layout and batch, and of a prefill by layout; the first round warms up."""
    decodes: dict[tuple[str, int], list[float]] = {}
    prefills: dict[str, list[float]] = {}
    for number, engine in itertools.product(range(options.rounds + 1), engines):
        for batch in batches:
            step_s = decode_step_s(engine.llm, batch, options.output, shape["vocab_size"])
            if number:
                decodes.setdefault((engine.name, batch), []).append(step_s)
        prefill_s = generate_s(engine.llm, 1, options.prompt, 1, shape["vocab_size"])
        if number:
            prefills.setdefault(engine.name, []).append(prefill_s)
    return decodes, prefills


def decode_step_s(llm: LLM, batch: int, output: int, vocab_size: int) -> float:
    first_s = generate_s(llm, batch, DECODE_PROMPT, 1, vocab_size)
    return (generate_s(llm, batch, DECODE_PROMPT, output, vocab_size) - first_s) / (output - 1)


def generate_s(llm: LLM, batch: int, prompt: int, output: int, vocab_size: int) -> float:
    """Seconds for fresh prompts to their `output`-th token."""
    prompts = [{"prompt_token_ids": random.choices(range(1, vocab_size), k=prompt)} for _ in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def step_bytes(shape: dict[str, int], weights: int, batch: int, output: int) -> float:
    """What an average decode step must read: all weights, and the keys and values of all sequences."""
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    of_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * ITEM_BYTES
    return weights + batch * (DECODE_PROMPT + output / 2) * of_token


def prefill_operations(shape: dict[str, int], prompt: int) -> float:
    """Multiplications and additions: products of the layers, causal attention, one row of the head."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kv_size = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    of_layer = hidden * (2 * hidden + 2 * kv_size + 3 * shape["intermediate_size"])
    attention = 2 * hidden * prompt * (prompt + 1) / 2
    return 2 * (layers * (of_layer * prompt + attention) + hidden * shape["vocab_size"])


def print_decodes(
    found: dict[tuple[str, int], list[float]],
    batches: Sequence[int],
    options: argparse.Namespace,
    shape: dict[str, int],
    weights: int,
    most: Ceilings,
) -> None:
    print("\n| decode | tokens/s | ms a step (least to most) | share of the copy's bytes/s |")
    print("|---|---|---|---|")
    for batch, name in itertools.product(batches, ("one stage", "two stages")):
        times = found[name, batch]
        step_s = statistics.median(times)
        share = step_bytes(shape, weights, batch, options.output) / step_s / most.copy_bytes_per_s
        spread = f"{step_s * 1e3:.3f} ({min(times) * 1e3:.3f} to {max(times) * 1e3:.3f})"
        print(f"| B = {batch}, {name} | {batch / step_s:,.0f} | {spread} | {share:.1%} |")


def print_prefills(found: dict[str, list[float]], operations: float, most: Ceilings) -> None:
    print("\n| prefill | ms (least to most) | share of the product's operations/s |\n|---|---|---|")
    for name, times in found.items():
        prefill_s = statistics.median(times)
        share = operations / prefill_s / most.operations_per_s
        spread = f"{prefill_s * 1e3:.2f} ({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})"
        print(f"| {name} | {spread} | {share:.1%} |")


def print_profile(
    directory: Path, options: argparse.Namespace, batches: Sequence[int], shape: dict[str, int]
) -> None:
    """Print what the card does of a step, and the kernels that take most of it."""
    longest = max(options.prompt, DECODE_PROMPT + PROFILED_STEPS) + 1
    with LLM(
        str(directory),
        device=options.device,
        max_model_len=longest,
        max_num_seqs=max(batches),
        num_blocks=-(-max(batches) * longest // 32),
        prefill_chunk=options.prompt,
        distributed_executor_backend="inprocess",
    ) as llm:
        print("\n| profile of one stage | kernels a step | card computes, ms a step | the longest |")
        print("|---|---|---|---|")
        vocab_size = shape["vocab_size"]
        for name, batch, prompt, steps in (
            *((f"decode, B = {batch}", batch, 1, PROFILED_STEPS) for batch in batches),
            ("prefill", 1, options.prompt, 1),
        ):
            generate_s(llm, batch, prompt, steps, vocab_size)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                generate_s(llm, batch, prompt, steps, vocab_size)
            kernels = list(_kernels(profile))
            number, busy_us = sum(kernel[2] for kernel in kernels), sum(kernel[1] for kernel in kernels)
            longest_text = "; ".join(
                f"{key[:60]} {time_us / busy_us:.0%}"
                for key, time_us, _ in sorted(kernels, key=lambda kernel: -kernel[1])[:4]
            )
            print(f"| {name} | {number / steps:.0f} | {busy_us / steps / 1e3:.3f} | {longest_text} |")


def _kernels(profile: torch.profiler.profile) -> Iterator[tuple[str, float, int]]:
    """Name, microseconds and number of each."""
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            yield str(event.key), event.self_device_time_total, event.count


def _device_name(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else "CPU"


if __name__ == "__main__":
    main()

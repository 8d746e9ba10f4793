"""What the check that a stage's weights are those of the first load costs, as a share of loading.

    python benchmarks/digest_cost.py [--rounds 15] [--layers 12] [--directory DIR]

Makes a seeded random checkpoint of the shape of Qwen2.5-0.5B in bfloat16 and loads all of it as one rank with
one thread, again and again, in this process: from the disk, from the page cache, and from there quantised.
Counts the time that the samples and the digests (`rank.model_samples`, `weights.read_digests`) hold each load
up: to hand bytes to the thread that digests them, and to wait for it. Its share of the load's time (bar: 2 %)
is a median with the first and the third quartile, and so is the CPU time of all threads for the digests, as a
share of that of the load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from load_memory import write_checkpoint

from penstock.families.registry import load_spec
from penstock.process.config import RankConfig
from penstock.rank import loading
from penstock.rank.loading import load_rank
from penstock.weights.read_digests import ReadDigests

BAR = 0.02
CASES: list[tuple[str, Literal["none", "int8"]]] = [("disk", "none"), ("cache", "none"), ("cache", "int8")]


class Clock:
    """Adds up what calls take: of the thread that loads, and of the CPU in any thread.

    Attributes:
        held_up_s: wall seconds of the calls that the loading thread waits for.
        cpu_s: CPU seconds of the checks themselves.
    """

    def __init__(self) -> None:
        self.held_up_s = self.cpu_s = 0.0

    def holding_up(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call, whose time the loading thread loses."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.held_up_s += time.perf_counter() - started

        return run

    def working(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call, whose CPU time counts."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - started

        return run

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same context, of which the loading thread loses the beginning and the end."""

        @contextmanager
        def run(*args: Any, **kwargs: Any) -> Iterator[None]:
            context = call(*args, **kwargs)
            self.holding_up(context.__enter__)()
            try:
                yield
            finally:
                self.holding_up(context.__exit__)(None, None, None)

        return run


def rank_config(directory: Path, quantization: Literal["none", "int8"]) -> RankConfig:
    """Return a rank with all layers."""
    return RankConfig(
        model_path=str(directory),
        dtype="bfloat16",
        max_model_len=256,
        stage=0,
        num_stages=1,
        start_layer=0,
        end_layer=load_spec(directory).num_layers,
        device="cpu",
        threads=1,
        block_size=16,
        num_blocks=16,
        kv_cache_bytes=None,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        depth=1,
        link_frames=1,
        quantization=quantization,
    )


def forget(directory: Path) -> None:
    """Take the weights out of the page cache."""
    descriptor = os.open(directory / "model.safetensors", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure(config: RankConfig, clock: Clock) -> tuple[float, float, float, float]:
    """Load once; wall seconds that the checks hold it up and of all, CPU seconds of the checks and of all."""
    clock.held_up_s = clock.cpu_s = 0.0
    started, started_cpu = time.perf_counter(), time.process_time()
    load_rank(config, lambda done, total: None)
    return (
        clock.held_up_s,
        time.perf_counter() - started,
        clock.cpu_s,
        time.process_time() - started_cpu,
    )


def described(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--directory", type=Path, help="where the temporary checkpoint is written")
    options = parser.parse_args()
    clock, shares = Clock(), []
    vars(loading)["sample_model"] = clock.holding_up(clock.working(vars(loading)["sample_model"]))
    for name, wrap in (
        ("add", clock.working),
        ("finish", clock.working),
        ("finish", clock.holding_up),
        ("beside", clock.around),
    ):
        setattr(ReadDigests, name, wrap(getattr(ReadDigests, name)))
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        write_checkpoint(Path(name), options.layers)
        for source, quantization in CASES:
            config = rank_config(Path(name), quantization)
            measure(config, clock)  # builds the kernels, and fills the page cache
            loads = []
            for _ in range(options.rounds):
                if source == "disk":
                    forget(Path(name))
                loads.append(measure(config, clock))
            share = [100 * held_up / seconds for held_up, seconds, _, _ in loads]
            shares.append(statistics.median(share))
            print(
                f"{source:5} {quantization:5} load {described([seconds for _, seconds, _, _ in loads])} s, "
                f"held up {described([1000 * held_up for held_up, _, _, _ in loads])} ms, "
                f"share {described(share)} %, "
                f"of the CPU time {described([100 * checks / cpu for _, _, checks, cpu in loads])} %",
                flush=True,
            )
    return 0 if max(shares) < 100 * BAR else 1


if __name__ == "__main__":
    sys.exit(main())

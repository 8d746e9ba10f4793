"""What the check that a stage's weights are those of the first load costs, as a share of loading.

    python benchmarks/digest_cost.py [--rounds 15] [--layers 12] [--directory DIR]

Makes a seeded random checkpoint of the shape of Qwen2.5-0.5B in bfloat16 and loads all of it as one rank with
one thread, again and again, in this process: from the disk, from the page cache, and from there quantised.
Counts the CPU time of the samples and of the digests (`rank.model_samples`, `weights.read_digests`) within
each load. Its share of the load's time (bar: 2 %) and of the load's CPU time are medians with the first and
the third quartile. On a busy machine the first is too small, since a load waits for a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
    """Adds up the CPU time of calls in this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call with this clock around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

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


def measure(config: RankConfig, clock: Clock) -> tuple[float, float, float]:
    """Load once; CPU seconds of the checks and of all, and wall seconds."""
    clock.seconds = 0.0
    started, started_cpu = time.perf_counter(), time.thread_time()
    load_rank(config, lambda done, total: None)
    return clock.seconds, time.thread_time() - started_cpu, time.perf_counter() - started


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
    for name in ("add", "finish"):
        setattr(ReadDigests, name, clock.timed(getattr(ReadDigests, name)))
    vars(loading)["sample_model"] = clock.timed(vars(loading)["sample_model"])
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
            share = [100 * checks / seconds for checks, _, seconds in loads]
            shares.append(statistics.median(share))
            print(
                f"{source:5} {quantization:5} load {described([seconds for _, _, seconds in loads])} s, "
                f"checks {described([1000 * checks for checks, _, _ in loads])} ms, "
                f"share {described(share)} %, "
                f"of the CPU time {described([100 * checks / cpu for checks, cpu, _ in loads])} %",
                flush=True,
            )
    return 0 if max(shares) < 100 * BAR else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long a step of a stage takes outside the kernels: plan, rows, inputs, sampling, result.

One stage holds a whole model and carries out plans that this script wrote, as it would the core's: bytes in,
bytes out, digests checked. The time inside the kernel library is taken around its calls, so what ctypes and
the wrapper cost counts as outside.

    python benchmarks/stage_overhead.py MODEL --threads 1 --batches 1,32
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.batch import GREEDY, KNOWN, NewRow, ScheduledBatch, decode_to_rank, encode
from penstock.distributed.group import SOLO
from penstock.families.registry import load_spec
from penstock.kernels.cpu.ops import CpuKernels
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.ports import EmbedSource, SampleSink
from penstock.pipeline.stage import Stage
from penstock.pipeline.token_return import TokenSender
from penstock.process.config import RankConfig
from penstock.rank.compute_choice import load_kernels
from penstock.rank.loading import LoadedRank, build_model, build_runner
from penstock.rank.model_samples import ModelSamples
from penstock.rank.stored_weights import read_model
from penstock.runner.device_kv import DeviceKV


class TimedLibrary:
    """The kernel library with a clock around the calls that a step makes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.seconds = 0.0
        self.penstock_run = self._wrapped(library.penstock_run)
        self.penstock_head = self._wrapped(library.penstock_head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return call


class Discard:
    """A channel to nobody."""

    def send(self, frame: bytes, timeout_s: float | None = None) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| batch | step ms | outside the kernels us | share |\n|---|---|---|---|")
    for batch in map(int, options.batches.split(",")):
        steps, outside = measure(options.model, batch, options)
        step, lost = statistics.median(steps), statistics.median(outside)
        print(f"| {batch} | {step * 1e3:.2f} | {lost * 1e6:.0f} | {lost / step:.2%} |", flush=True)


def measure(model: Path, batch: int, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of each decode step, and of them outside the kernels."""
    config = rank_config(model, batch, options)
    kernels, reason, _ = load_kernels(config, is_quantized=False)
    assert kernels is not None, reason
    library = TimedLibrary(kernels.library)
    stage, sink = build_stage(config, CpuKernels(library, kernels.enabled))  # type: ignore[arg-type]
    steps: list[float] = []
    outside: list[float] = []

    log = DecisionLog()

    def timed() -> Iterator[ScheduledBatch]:
        for number, frame in enumerate(plan_frames(batch, options)):
            began, inside = time.perf_counter(), library.seconds
            message = decode_to_rank(frame)
            assert isinstance(message, ScheduledBatch)
            log.append(message, lambda plan: [])
            yield message
            if number > 3:
                steps.append(time.perf_counter() - began)
                outside.append(steps[-1] - (library.seconds - inside))

    stage.run(timed())
    del sink
    return steps, outside


def rank_config(model: Path, batch: int, options: argparse.Namespace) -> RankConfig:
    return RankConfig(
        model_path=str(model),
        dtype="bfloat16",
        max_model_len=options.context + options.steps + 64,
        stage=0,
        num_stages=1,
        start_layer=0,
        end_layer=load_spec(model).num_layers,
        device="cpu",
        threads=options.threads,
        block_size=32,
        num_blocks=batch * (options.context + options.steps + 64) // 32 + batch,
        kv_cache_bytes=None,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch * options.context),
        depth=1,
        link_frames=1,
    )


def build_stage(config: RankConfig, kernels: CpuKernels) -> tuple[Stage, SampleSink]:
    stored, device = read_model(Path(config.model_path)), torch.device("cpu")
    spec, weights = stored.spec, stored.open_weights(b"")
    model = build_model(config, spec, kernels, weights)
    report = weights.load(model, lambda done, total: None, frozenset())
    storage = DeviceKV(
        model.attention, num_layers=spec.num_layers, block_size=config.block_size, device=device
    )
    loaded = LoadedRank(
        samples=ModelSamples(identity=b"", table=b""),
        spec=spec,
        device=device,
        group=SOLO,
        model=model,
        storage=storage,
        report=report,
        kernels="timed",
        has_kernels=True,
        is_invariant=True,
        numeric_class="timed",
    )
    runner = build_runner(config, loaded, storage.allocate(config.num_blocks or 1))
    sink = SampleSink(runner, TokenSender([]), Discard())  # type: ignore[arg-type]
    return Stage(0, runner, EmbedSource(runner), sink), sink


def plan_frames(batch: int, options: argparse.Namespace) -> Iterator[bytes]:
    """A prefill of all rows, then decodes, each consuming the sample of the step before."""
    log = DecisionLog()
    per_row = (options.context + options.steps + 64) // 32
    blocks = [list(range(row * per_row, (row + 1) * per_row)) for row in range(batch)]
    rows = list(range(batch))
    prompts = [[(7 * row + 3 * i) % 500 for i in range(options.context)] for row in rows]
    new_rows = [
        NewRow(row, 0, f"r{row}", options.context, prompt, GREEDY)
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    yield encode(
        log.seal(
            ScheduledBatch(
                step_id=0,
                rows=rows,
                num_tokens=[options.context] * batch,
                start_positions=[0] * batch,
                new_blocks=blocks,
                need_sampled=[True] * batch,
                token_from=[KNOWN] * batch,
                new_rows=new_rows,
            )
        )
    )
    for step in range(1, options.steps):
        plan = ScheduledBatch(
            step_id=step,
            rows=rows,
            num_tokens=[1] * batch,
            start_positions=[options.context + step - 1] * batch,
            new_blocks=[[] for _ in rows],
            need_sampled=[True] * batch,
            token_from=[step - 1] * batch,
            consume_through=step - 1,
        )
        yield encode(log.seal(plan))


if __name__ == "__main__":
    main()

"""Steady decode through two stages with a long wire between them: plans in flight that follow it, or not.

    python benchmarks/delayed_links.py MODEL [--delays 0,5,50] [--batches 8,16,32,64] [--rounds 3]
                                       [--partition even] [--seconds 10]

The stages are threads of this process. What goes from a stage to the next, and what comes back, is held for
as many milliseconds as `--delays` says; the bytes take no time beside. *Bounded*: as many plans as stages,
as on one host. *Follows*: as many as the measured wire holds. Decode is counted once all requests decode,
over `--seconds` that include a look through the empty pipe. The share is of the bounded engine without a
delay, at the same number of requests. A delay costs each request its time on every token, so that the share
can reach one only where the requests together take the slowest stage that long: the table says for how long
the requests of a batch keep it busy in a trip ("work"), and how long the trip is.

Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import NamedTuple
from unittest import mock

import msgspec
from peers.report import markdown
from torch import Tensor

from penstock.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.config.speculation import SpeculationConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.core_assembly import build_core, prove_stages
from penstock.engine.supervisor.launch import resolve
from penstock.errors import LinkClosedError
from penstock.executor import inprocess
from penstock.executor.inprocess import InprocessExecutor
from penstock.hosts.resources import HostResources
from penstock.pipeline.links.channel import SEND_TIMEOUT_S, MessageChannel
from penstock.pipeline.links.frame import FrameHeader
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.process.config import RankConfig
from penstock.rank.rank import RankConnections
from penstock.request import GenerationRequest, SamplingParams
from penstock.trace.phases import NOBODYS, Phase, PhaseClock

STAGES, MOST = 2, 40
PROMPT = 32
BOUNDED, FOLLOWS = "bounded", "follows"
POLL_S = 0.5


class DelayedLink(MemoryLink):
    """A link whose frames arrive some time after they were sent; any number is on the way."""

    def __init__(self, name: str, timeout_s: float, delay_s: float) -> None:
        super().__init__(name, timeout_s, num_frames=1 << 16)
        self._delay_s = delay_s
        self._sent_at: deque[float] = deque()

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        with self._changed:
            self._sent_at.append(time.monotonic())
        super().send_frame(header, tensors, clock)

    def _fetch(
        self, header: FrameHeader, out: Sequence[Tensor], requests: Sequence[str], clock: PhaseClock
    ) -> None:
        before = clock.begin(Phase.WAIT_PREV)
        with self._changed:
            self._wait(lambda: bool(self._frames) or self._closed, header.purpose)
            due = self._sent_at.popleft() + self._delay_s if self._sent_at else 0.0
        time.sleep(max(0.0, due - time.monotonic()))
        super()._fetch(header, out, requests, clock)
        clock.begin(before)


class DelayedSender:
    """The sending end of a channel whose messages leave some time after they were sent."""

    def __init__(self, inner: MessageChannel, delay_s: float) -> None:
        self.recv = inner.recv
        self._inner = inner
        self._delay_s = delay_s
        self._queue: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._queue.put((time.monotonic() + self._delay_s, frame))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._inner.close()

    def _pass_on(self) -> None:
        while (message := self._queue.get()) is not None:
            due, frame = message
            time.sleep(max(0.0, due - time.monotonic()))
            with suppress(LinkClosedError):  # the engine has ended meanwhile
                self._inner.send(frame)


@contextmanager
def delayed(delay_s: float) -> Iterator[None]:
    """Ranks that are joined within have wires of this delay between them."""
    connect_ranks = inprocess.connect_ranks

    def connect(configs: Sequence[RankConfig], plan_ends: Sequence[QueueChannel]) -> list[RankConnections]:
        ranks = connect_ranks(configs, plan_ends)
        for stage in range(len(ranks) - 1):
            name = f"stage {stage} -> stage {stage + 1}"
            link = DelayedLink(name, configs[stage].wait_timeout_s, delay_s)
            ranks[stage] = replace(ranks[stage], outgoing=[link])
            ranks[stage + 1] = replace(ranks[stage + 1], incoming=link)
        last, results = ranks[-1], ranks[-1].results
        assert results is not None
        tokens: list[MessageChannel] = [DelayedSender(end, delay_s) for end in last.tokens]
        ranks[-1] = replace(last, tokens=tokens, results=DelayedSender(results, delay_s))
        return ranks

    with mock.patch.object(inprocess, "connect_ranks", connect):
        yield


@contextmanager
def running(config: EngineConfig, delay_s: float, *, num_links: int) -> Iterator[EngineCore]:
    """A core whose ranks are threads of this process, with wires of this delay; it has been proved to work.

    Args:
        num_links: that the core takes for wires, whose time it measures.
    """
    plan = resolve(config, [HostResources.detect()])
    core_config = msgspec.structs.replace(plan.core, num_links=num_links)
    with delayed(delay_s):
        executor = InprocessExecutor(plan.ranks)
    try:
        kv_plan = executor.start()
        core, _ = build_core(core_config, executor, kv_plan, time.monotonic)
        prove_stages(core)
        yield core
    finally:
        executor.shutdown()


class Measured(NamedTuple):
    """One run of one batch."""

    rate: float  # tokens/s
    micro_batches: int
    in_flight: int
    stage_s: float  # of the slowest stage for a plan
    trip_s: float


@contextmanager
def engine(options: argparse.Namespace, delay_s: float, kind: str) -> Iterator[EngineCore]:
    """An engine in this process; its ranks end with the block."""
    batches = max(options.batches)
    config = EngineConfig(
        model=ModelConfig(model=options.model, max_model_len=options.max_model_len),
        parallel=ParallelConfig(
            pipeline_parallel_size=STAGES,
            backend="inprocess",
            partition=options.partition,
            threads_per_rank=1,
            async_depth=1,
            max_plans_in_flight=MOST if kind == FOLLOWS else "auto",
        ),
        scheduler=SchedulerConfig(max_num_seqs=batches, inter_token_target_ms=1e9),
        speculation=SpeculationConfig(speculative_method="off"),
        cache=CacheConfig(
            enable_prefix_caching=False, num_blocks=batches * (options.max_model_len // 32 + 1)
        ),
    )
    with running(config, delay_s, num_links=STAGES - 1) as core:
        yield core


def measure(core: EngineCore, batch: int, options: argparse.Namespace, name: str) -> Measured:
    """Decode with so many requests for some seconds, and end them."""
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_model_len - PROMPT - 1, ignore_eos=True)
    names = [f"{name}-{number}" for number in range(batch)]
    for number, request_id in enumerate(names):
        prompt = [(5 * number + 3 * place) % 90 + 3 for place in range(PROMPT)]
        core.add_request(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    waiting = set(names)
    while waiting:
        waiting -= {update.request_id for update in core.step(timeout_s=POLL_S) if update.token_ids}
    count_tokens(core, options.settle)
    count, seconds = count_tokens(core, options.seconds)
    stats = core.stats()
    before = {times.stage: times for times in stats.stage_times}
    in_flight = stats.inflight
    count_tokens(core, 2.5)  # until stages have reported once more
    after = {times.stage: times for times in core.stats().stage_times}
    stage_s = [
        (after[stage].busy_ns - before[stage].busy_ns)
        / max(1, after[stage].num_steps - before[stage].num_steps)
        / 1e9
        for stage in after
    ]
    for request_id in names:
        core.abort(request_id)
    while not core.is_idle:
        core.step(timeout_s=POLL_S)
    delay_s = 2 * options.delay_s
    return Measured(
        count / seconds, stats.scheduler.micro_batches, in_flight, max(stage_s), sum(stage_s) + delay_s
    )


def count_tokens(core: EngineCore, at_least_s: float) -> tuple[int, float]:
    """Return how many tokens came, and in how many seconds."""
    count, began = 0, time.monotonic()
    while time.monotonic() - began < at_least_s:
        count += sum(len(update.token_ids) for update in core.step(timeout_s=POLL_S))
    return count, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--delays", default="0,5,50", help="milliseconds each way; the first is the base")
    parser.add_argument("--batches", default="8,16,32,64")
    parser.add_argument("--partition", default="even")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before it counts")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches.split(",")]
    delays = [float(delay) / 1000 for delay in options.delays.split(",")]
    found: dict[tuple[float, str, int], list[Measured]] = defaultdict(list)
    for number, delay_s, kind in itertools.product(range(options.rounds), delays, (BOUNDED, FOLLOWS)):
        options.delay_s = delay_s
        with engine(options, delay_s, kind) as core:
            for batch in options.batches:
                run = measure(core, batch, options, f"{number}-{batch}")
                found[delay_s, kind, batch].append(run)
    print(table(found, delays[0]))


def table(found: dict[tuple[float, str, int], list[Measured]], base_s: float) -> str:
    rows = []
    for (delay_s, kind, batch), runs in sorted(found.items(), key=lambda item: (item[0][2], item[0][:2])):
        rate = statistics.median(run.rate for run in runs)
        base = statistics.median(run.rate for run in found[base_s, BOUNDED, batch])
        last = runs[-1]
        work_s = last.micro_batches * last.stage_s
        rows.append(
            [
                str(batch),
                f"{1000 * delay_s:g} ms",
                kind,
                f"{rate:.1f}",
                f"{rate / base:.2f}",
                str(last.micro_batches),
                str(last.in_flight),
                f"{1000 * work_s:.0f} / {1000 * last.trip_s:.0f} ms",
            ]
        )
    header = ["requests", "each way", "plans", "tokens/s", "share", "parts", "in flight", "work / trip"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()

"""`penstock bench sweep`: measures each layout of a grid under each number of concurrent requests.

Called by `cli.program`. A point is a layout with a concurrency. Each layout runs in an engine of its own
(`penstock.AsyncLLM`), and each point as a closed loop of as many clients. `sweep` opens engines through an
`OpenEngine`, so that it is tested without a model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from cyclopts import Parameter

from penstock.cli.bench.engine_load import EngineSender
from penstock.cli.bench.load_shape import whole_numbers
from penstock.cli.bench.offline import llm_arguments, vocab_size_of
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.report_flags import LocalReportFlags, ReportFlags, new_report
from penstock.cli.bench.resident_memory import resident_bytes_below
from penstock.cli.bench.results import RunResult, figures
from penstock.cli.bench.stage_watch import StageWatch
from penstock.cli.bench.sweep_grid import (
    Choice,
    Grid,
    LayoutPoint,
    SweepFile,
    SweepHead,
    SweepRecord,
    swept_runs,
)
from penstock.cli.flags import flag, with_settings
from penstock.cli.terminal import Invocation, printable
from penstock.config.declared import ENGINE, configured_engine, declared
from penstock.errors import PenstockError, UsageError
from penstock.reports.figures import PredictedFigures, RunFigures
from penstock.reports.stage_use import StageCounts, counts_of_core
from penstock.workloads.requests import BenchRequest, check_fits, synthetic

_AXES = ("pipeline_parallel_size", "tensor_parallel_size", "async_depth", "micro_batches")
_WARM_UP_TOKENS = 8
_DEFAULT_ROWS = 64  # most requests that an engine runs at once, if neither the user nor the grid says more


class SweptEngine(Protocol):
    """An engine that runs in one layout of a sweep."""

    async def measure(self, concurrency: int) -> RunFigures:
        """Run one point, and return its figures. Raises `PenstockError` if a request failed."""


OpenEngine = Callable[[LayoutPoint], AbstractAsyncContextManager[SweptEngine]]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAxes:
    """The grid: lists of numbers."""

    pp: Annotated[str, flag("numbers of stages: 1,2", "--pp", group="sweep")] = "1,2"
    tp: Annotated[str, flag("ranks of each stage: 1,2", "--tp", group="sweep")] = "1"
    depth: Annotated[str, flag("plans ahead: 0,1,2 or auto", "--depth", "--async-depth", group="sweep")] = (
        "auto"
    )
    micro_batches: Annotated[
        str, flag("micro-batches of decodes: 1,2 or auto", "--micro-batches", group="sweep")
    ] = "auto"
    concurrency: Annotated[str, flag("requests at once: 1,8,32", "--concurrency", group="sweep")] = "1,8,32"

    @property
    def grid(self) -> Grid:
        """The grid of the axes. Raises `UsageError` for a list that cannot be read."""
        return Grid(
            pp=whole_numbers(self.pp, "--pp"),
            tp=whole_numbers(self.tp, "--tp"),
            depths=_choices(self.depth, "--depth", 0),
            micro_batches=_choices(self.micro_batches, "--micro-batches", 1),
            concurrencies=whole_numbers(self.concurrency, "--concurrency"),
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLoad:
    """The load of each point."""

    input_len: Annotated[int, flag("tokens of a prompt", "--input-len", group="load")] = 128
    output_len: Annotated[int, flag("tokens to generate", "--output-len", group="load")] = 64
    requests_per_client: Annotated[
        int, flag("requests that each client sends in turn", "--requests-per-client", group="load")
    ] = 4
    results: Annotated[
        Path, flag("file of results; a second start continues it", "--results", group="load")
    ] = Path("sweep.jsonl")

    def requests(self, concurrency: int, vocab_size: int, seed: int) -> list[BenchRequest]:
        """Return the load of a point. Points with another concurrency or seed have other prompts."""
        return synthetic(
            num_prompts=concurrency * self.requests_per_client,
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=0.0,
            request_rate=float("inf"),
            burstiness=1.0,
            vocab_size=vocab_size,
            seed=seed * 1_000_003 + concurrency,
        )


_DEFAULT_AXES, _LOAD, _REPORT = SweepAxes(), SweepLoad(), LocalReportFlags()


@with_settings(*ENGINE, without=_AXES)
def bench_sweep(
    model: str,
    /,
    *,
    axes: SweepAxes = _DEFAULT_AXES,
    load: SweepLoad = _LOAD,
    report: LocalReportFlags = _REPORT,
    invocation: Annotated[Invocation, Parameter(parse=False)],
    **given: Any,
) -> int:
    """Run the command. Returns 0 when every point of the grid has figures, else 1."""
    if load.requests_per_client < 1:
        raise UsageError(f"--requests-per-client is {load.requests_per_client}; it must be at least 1.")
    grid, seed = axes.grid, int(given.get("seed", 0))
    rows = max(_DEFAULT_ROWS, *grid.concurrencies)
    settings = {"max_num_seqs": rows, "warm_spare": False} | given  # a spare would start during the first run
    say = report.say(invocation)
    with SweepFile(load.results, SweepHead(model=model, settings=_shown(load, settings))) as file:
        if file.records:
            say(f"{len(file.records)} points are in {load.results} already.")
        engines = SweptEngines(model, settings, load, seed, grid, report, invocation)
        order = grid.drawn(seed)
        asyncio.run(sweep(order, engines.open, file, lambda line: say(printable(line))))
        runs, failed = swept_runs(grid, file.records)
    shown = _axes_shown(axes) | _shown(load, settings)
    note = f"Layouts and concurrencies ran in a random order, drawn from seed {seed}."
    made = new_report("Sweep over layouts", model, shown, runs, failed=failed, notes=[note])
    report.deliver(made, invocation)
    return 1 if failed else 0


async def sweep(
    order: Sequence[tuple[LayoutPoint, Sequence[int]]],
    open_engine: OpenEngine,
    file: SweepFile,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.time,
) -> None:
    """Measure every point that the file does not have, and add its result to the file.

    If a point fails, its error is added, and the next point is measured. If an engine cannot be opened, all
    its points that are missing fail.
    """
    for layout, concurrencies in order:
        missing = file.missing(layout, concurrencies)
        if not missing:
            continue
        say(f"{layout.name}: starting")
        try:
            async with open_engine(layout) as engine:
                for concurrency in missing:
                    record = await _measured(engine, layout, concurrency, clock)
                    file.add(record)
                    say(_line(record))
        except Exception as error:
            for concurrency in file.missing(layout, missing):
                record = _failed(layout, concurrency, error, clock)
                file.add(record)
                say(_line(record))


async def _measured(
    engine: SweptEngine, layout: LayoutPoint, concurrency: int, clock: Callable[[], float]
) -> SweepRecord:
    try:
        run = await engine.measure(concurrency)
    except Exception as error:
        return _failed(layout, concurrency, error, clock)
    return SweepRecord(layout=layout, concurrency=concurrency, at=clock(), run=run)


def _failed(
    layout: LayoutPoint, concurrency: int, error: Exception, clock: Callable[[], float]
) -> SweepRecord:
    text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    return SweepRecord(layout=layout, concurrency=concurrency, at=clock(), error=text or type(error).__name__)


def _line(record: SweepRecord) -> str:
    where, run = f"{record.layout.name}, {record.concurrency} at once", record.run
    if run is None:
        return f"{where}: failed: {record.error}"
    parts = [f"{run.output_tokens_per_s:.1f} tokens/s"]
    for name, words in (("ttft", "first token"), ("tpot", "time per token")):
        if name in run.latencies_ms:
            parts.append(f"{words} {run.latencies_ms[name].p50:.2f} ms")
    if run.bubble is not None:
        parts.append(f"bubble {100 * run.bubble:.1f} %")
    return f"{where}: {', '.join(parts)}"


class SweptEngines:
    """Starts the engines of a sweep.

    Args:
        given: settings of the engine that all layouts share.
        seed: seed of the prompts.
    """

    def __init__(
        self,
        model: str,
        given: Mapping[str, Any],
        load: SweepLoad,
        seed: int,
        grid: Grid,
        report: ReportFlags,
        invocation: Invocation,
    ) -> None:
        vocab_size = vocab_size_of(model, given)
        self._model = model
        self._given = given
        self._loads = {number: load.requests(number, vocab_size, seed) for number in grid.concurrencies}
        self._warm_up = load.requests(max(grid.concurrencies), vocab_size, seed + 1)
        self._lengths = (load.input_len, load.output_len)
        self._report = report
        self._invocation = invocation

    @asynccontextmanager
    async def open(self, layout: LayoutPoint) -> AsyncIterator[SweptEngine]:
        """Start the engine of a layout, and yield it. At the exit it is ended."""
        from penstock import AsyncLLM

        axes = (layout.pp, layout.tp, layout.depth, layout.micro_batches)
        given = {**self._given, **dict(zip(_AXES, axes, strict=True))}
        config = configured_engine(given, self._model)
        for requests in self._loads.values():
            if config.model.max_model_len is not None:
                check_fits(requests, config.model.max_model_len)
        predicted = await asyncio.to_thread(
            self._report.predictions, lambda: config, list(self._loads), self._lengths, self._invocation
        )
        async with AsyncLLM(self._model, **llm_arguments(given)) as llm:

            async def read() -> Sequence[StageCounts]:
                return counts_of_core((await llm.status()).stats)

            sender, watch = EngineSender(llm), StageWatch(read, resident_bytes_below, num_stages=layout.pp)
            _require_order(await replay(sender, _shortened(self._warm_up)))
            yield _RunningEngine(layout.name, self._loads, sender, watch, predicted)


class _RunningEngine:
    """An engine that was opened for one layout. Implements `SweptEngine`."""

    def __init__(
        self,
        series: str,
        loads: Mapping[int, Sequence[BenchRequest]],
        sender: EngineSender,
        watch: StageWatch,
        predicted: Mapping[int, PredictedFigures],
    ) -> None:
        self._series = series
        self._loads = loads
        self._sender = sender
        self._watch = watch
        self._predicted = predicted

    async def measure(self, concurrency: int) -> RunFigures:
        await self._watch.begin()
        result = await replay(self._sender, self._loads[concurrency], concurrency)
        _require_order(result)
        stages = await self._watch.end(result.duration_s)
        return figures(result, self._series, concurrency, stages, self._predicted.get(concurrency))


def _require_order(result: RunResult) -> None:
    """Raise `PenstockError` with the first fault if any request failed or lost a token."""
    for account in result.accounts:
        if account.error is not None:
            raise PenstockError(f"request {account.index}: {account.error.message}")
    if result.audit.violations:
        raise PenstockError(result.audit.violations[0])


def _shortened(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """Return the first quarter of the requests, each with few tokens, to warm up an engine."""
    few = requests[: max(1, len(requests) // 4)]
    return [replace(request, output_len=min(request.output_len, _WARM_UP_TOKENS)) for request in few]


def _choices(text: str, name: str, least: int) -> list[Choice]:
    """Return the numbers of a list such as "0,1,auto". The word "auto" comes last, wherever it stands."""
    words = [word.strip() for word in text.split(",")]
    numbers = [word for word in words if word != "auto"]
    found: list[Choice] = list(whole_numbers(",".join(numbers), name, least)) if numbers else []
    return [*found, "auto"] if "auto" in words else found


def _shown(load: SweepLoad, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that the results of all points depend on, besides their axes, as text."""
    keys = {each.name: each.key for each in declared(*ENGINE)}
    shown = {keys.get(name, name): str(value) for name, value in given.items()}
    return {
        "input-len": str(load.input_len),
        "output-len": str(load.output_len),
        "requests-per-client": str(load.requests_per_client),
    } | dict(sorted(shown.items()))


def _axes_shown(axes: SweepAxes) -> dict[str, str]:
    return {
        "pp": axes.pp,
        "tp": axes.tp,
        "depth": axes.depth,
        "micro-batches": axes.micro_batches,
        "concurrency": axes.concurrency,
    }

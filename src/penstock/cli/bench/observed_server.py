"""Reads the stages' time and memory, and the predicted speed, from a server, for a report of `bench serve`.

The data is read only if a report is wanted: the stages' from `/debug/pipeline`, and for predictions the
server's settings from `/server_info`. If a server does not have `/debug/pipeline`, the report has no stages
and no predictions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.cli.bench.http_stream import Target
from penstock.cli.bench.report_flags import ReportFlags, new_report
from penstock.cli.bench.results import RunResult, figures
from penstock.cli.bench.stage_watch import NoWatch, StageWatch, Watch
from penstock.cli.http_client import get_json
from penstock.cli.terminal import Invocation
from penstock.errors import PenstockError
from penstock.layouts.layout_name import layout_name
from penstock.reports.figures import PredictedFigures, Report, RunFigures
from penstock.reports.stage_use import StageCounts, counts_in_view
from penstock.workloads.requests import BenchRequest, mean_lengths

_TIMEOUT_S = 10.0
_NO_STAGES = "The server does not report what its stages do."


class ObservedServer:
    """A server under load, and the figures of the runs so far.

    Args:
        watch: reads what the stages report.
        series: name of the layout that the server runs.
        predicted: predictions by the number of requests at once.
        notes: sentences for the report.
    """

    def __init__(
        self,
        watch: Watch,
        series: str = "server",
        predicted: Mapping[int, PredictedFigures] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._watch = watch
        self._series = series
        self._predicted = predicted or {}
        self._notes = notes
        self._runs: list[RunFigures] = []

    async def measured(self, run: Awaitable[RunResult], level: int | None) -> RunResult:
        """Run a load, keep the figures of the run for the report, and return its result.

        Args:
            run: sends the load; it is awaited here.
            level: requests in flight at most; None: no bound.
        """
        await self._watch.begin()
        result = await run
        stages = await self._watch.end(result.duration_s)
        at_once = _at_once(result.requests, level)
        predicted = None if at_once is None else self._predicted.get(at_once)
        concurrency = int(result.totals()["max_concurrent_requests"]) if level is None else level
        self._runs.append(figures(result, self._series, concurrency, stages, predicted))
        return result

    def report(self, model: str, settings: Mapping[str, object]) -> Report:
        """Return the report of all runs."""
        return new_report("Serving benchmark", model, settings, self._runs, notes=self._notes)


def observed_server(
    server: Target,
    flags: ReportFlags,
    loads: Sequence[Sequence[BenchRequest]],
    levels: Sequence[int | None],
    model: str,
    invocation: Invocation,
) -> ObservedServer:
    """Look at a server before the first run, and return it for the runs.

    Args:
        loads: the requests of each run.
        levels: the most requests in flight of each run; None: no bound.
        model: directory or name of the model on this machine, for `--predict`.

    Raises:
        PenstockError: predictions are wanted, and the server does not give its settings.
    """
    if not flags.are_wanted:
        return ObservedServer(NoWatch())
    try:
        view = get_json(server, "/debug/pipeline", _TIMEOUT_S)
        counts_in_view(view)
    except (PenstockError, msgspec.ValidationError):
        return ObservedServer(NoWatch(), notes=[_NO_STAGES])

    async def read() -> Sequence[StageCounts]:
        return counts_in_view(await asyncio.to_thread(get_json, server, "/debug/pipeline", _TIMEOUT_S))

    predicted: dict[int, PredictedFigures] = {}
    if flags.wants_predictions:
        # Here and not above: a benchmark without predictions starts without the planner.
        from penstock.cli.bench.predicting import served_config, served_layers

        info = get_json(server, "/server_info", _TIMEOUT_S)
        numbers = [_at_once(load, level) for load, level in zip(loads, levels, strict=True)]
        predicted = flags.predictions(
            lambda: served_config(info, model),
            [number for number in numbers if number is not None],
            mean_lengths(loads[0]),
            invocation,
            layers=served_layers(info),
        )
    return ObservedServer(StageWatch(read), _series(view), predicted)


def _at_once(requests: Sequence[BenchRequest], level: int | None) -> int | None:
    """Return how many requests run at once; None if that depends on the times at which they arrive."""
    if level is not None:
        return min(level, len(requests))
    return None if any(request.arrival_s for request in requests) else len(requests)


def _series(view: Mapping[str, Any]) -> str:
    """Return the name of the layout that the server runs, such as "PP 2 x TP 1"."""
    stages = view["replicas"][0]["stages"] if view["replicas"] else []
    ranks = dict.fromkeys(str(stage.get("num_ranks") or 1) for stage in stages)
    return layout_name(len(stages), ",".join(ranks), len(view["replicas"]))

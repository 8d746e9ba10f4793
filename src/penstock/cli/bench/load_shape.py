"""Flags of loads that `bench serve` and `simulate` share: requests in flight, and how a trace is scaled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.errors import UsageError
from penstock.workloads.requests import BenchRequest, from_trace
from penstock.workloads.traces import TraceKind, read_trace


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Part of the settings of a load."""

    burstiness: Annotated[float, flag("1 = Poisson, below 1 = burstier", "--burstiness", group="load")] = 1.0
    max_concurrency: Annotated[
        int | None, flag("requests in flight at most", "--max-concurrency", group="load")
    ] = None
    length_scale: Annotated[
        float, flag("a trace's lengths are divided by this", "--length-scale", group="load")
    ] = 1.0
    time_scale: Annotated[
        float, flag("a trace's times are multiplied by this", "--time-scale", group="load")
    ] = 1.0

    def require_concurrency(self) -> None:
        """Raise `UsageError` if no request could ever be in flight."""
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"max_concurrency is {self.max_concurrency}; it must be at least 1.")

    def of_trace(
        self, path: Path, num_requests: int | None, kind: TraceKind, *, vocab_size: int, seed: int
    ) -> list[BenchRequest]:
        """Return the requests of a trace file, scaled. Raises `UsageError`."""
        return from_trace(
            read_trace(path, num_requests, kind=kind),
            length_scale=self.length_scale,
            time_scale=self.time_scale,
            vocab_size=vocab_size,
            seed=seed,
        )

"""The flags of loads (requests to send) that `bench serve` and `simulate` share, such as `--time-scale`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.errors import UsageError
from penstock.workloads.requests import BenchRequest, from_trace
from penstock.workloads.traces import TraceKind, read_trace

DatasetName = Literal["random", "azure", "mooncake", "sharegpt", "custom"]


def trace_path(name: DatasetName, path: Path | None) -> Path:
    """Return the trace file of a load that is not random. Raises `UsageError` if none is given."""
    if path is None:
        raise UsageError(f"--dataset-name {name} needs --dataset-path.", remedy="Give the trace file.")
    return path


def whole_numbers(text: str, name: str, least: int = 1) -> list[int]:
    """Return the numbers of a text such as "1,8,32" in their order, each one once.

    Args:
        name: the flag, for errors.

    Raises:
        UsageError: the text is not such a list, or a number is below `least`.
    """
    try:
        numbers = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(
            f"{name} is {text!r}; it must be whole numbers of at least {least}, such as {least},{least + 1}.",
            param=name,
        )
    return numbers


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """A part of the settings of a load."""

    burstiness: Annotated[float, flag("1 = Poisson, below 1 = burstier", "--burstiness", group="load")] = 1.0
    max_concurrency: Annotated[
        int | None, flag("requests in flight at most", "--max-concurrency", group="load")
    ] = None
    length_scale: Annotated[
        float, flag("divide a trace's lengths by this", "--length-scale", group="load")
    ] = 1.0
    time_scale: Annotated[float, flag("multiply a trace's times by this", "--time-scale", group="load")] = 1.0

    def require_concurrency(self) -> None:
        """Raise `UsageError` if no request could ever be in flight."""
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"max_concurrency is {self.max_concurrency}; it must be at least 1.")

    def of_trace(
        self, path: Path, num_requests: int | None, kind: TraceKind, *, vocab_size: int, seed: int
    ) -> list[BenchRequest]:
        """Return the requests of a trace file, scaled. Raises `UsageError` if the file or a scale is bad."""
        return from_trace(
            read_trace(path, num_requests, kind=kind),
            length_scale=self.length_scale,
            time_scale=self.time_scale,
            vocab_size=vocab_size,
            seed=seed,
        )

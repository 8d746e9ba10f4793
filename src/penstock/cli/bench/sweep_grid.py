"""The grid of a sweep, the order in which its points run, and the file that keeps their results.

Points of one layout share an engine, which is started once. The order of the layouts, and of the
concurrencies of each, is drawn from a seed. So if the machine becomes slower in the meantime, no axis of the
grid is worse off than another.

The file has JSON lines: first one with the settings, then a record for each point, which is written when the
point is done. A sweep that was interrupted continues after the last complete line.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import UsageError
from penstock.layouts.layout_name import layout_name
from penstock.reports.figures import FailedRun, RunFigures

FORMAT = 1
Choice = int | Literal["auto"]


class LayoutPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which an engine of a sweep is started."""

    pp: int
    tp: int
    depth: Choice
    micro_batches: Choice

    @property
    def name(self) -> str:
        """The name, such as "PP 2 x TP 1, depth 1". Settings that are `auto` are not in it."""
        parts = [layout_name(self.pp, str(self.tp))]
        parts += [] if self.depth == "auto" else [f"depth {self.depth}"]
        parts += [] if self.micro_batches == "auto" else [f"{self.micro_batches} micro-batches"]
        return ", ".join(parts)


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The values of each axis."""

    pp: list[int]
    tp: list[int]
    depths: list[Choice]
    micro_batches: list[Choice]
    concurrencies: list[int]

    @property
    def layouts(self) -> list[LayoutPoint]:
        """The layouts; the first axis, `pp`, changes slowest."""
        axes = itertools.product(self.pp, self.tp, self.depths, self.micro_batches)
        return [LayoutPoint(pp=pp, tp=tp, depth=depth, micro_batches=count) for pp, tp, depth, count in axes]

    def drawn(self, seed: int) -> list[tuple[LayoutPoint, list[int]]]:
        """Return the layouts in the order in which they run, each with its concurrencies in their order."""
        draw = random.Random(seed)
        layouts = draw.sample(self.layouts, len(self.layouts))
        return [(layout, draw.sample(self.concurrencies, len(self.concurrencies))) for layout in layouts]


class SweepHead(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """The first line of a file: what all points share. A sweep continues only a file with the same line."""

    model: str
    settings: dict[str, str]
    format: int = FORMAT


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="point"):
    """The result of a point.

    Attributes:
        at: Unix time at which the point was done.
        run: the figures; None if the point failed.
        error: why the point failed.
    """

    layout: LayoutPoint
    concurrency: int
    at: float
    run: RunFigures | None = None
    error: str = ""

    @property
    def key(self) -> tuple[LayoutPoint, int]:
        return self.layout, self.concurrency


_lines: msgspec.json.Decoder[SweepHead | SweepRecord] = msgspec.json.Decoder(SweepHead | SweepRecord)


class SweepFile:
    """The file of a sweep's records, which has those of an earlier start too.

    Args:
        head: the first line that the file must have; it is written if the file is new.

    Raises:
        UsageError: the file cannot be read or written, is not such a file, or has another first line.
    """

    def __init__(self, path: Path, head: SweepHead) -> None:
        self._path = path
        self.records: list[SweepRecord] = []
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole:
                self._take(whole, head)
            self._file = path.open("ab")
            if len(whole) < len(content):  # an earlier sweep ended while it wrote the last line
                self._file.truncate(len(whole))
            if not whole:
                self._append(head)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be used: {error.strerror}.", remedy="Give another path."
            ) from error

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def missing(self, layout: LayoutPoint, concurrencies: Sequence[int]) -> list[int]:
        """Return the concurrencies of which there is no record."""
        done = {record.key for record in self.records}
        return [number for number in concurrencies if (layout, number) not in done]

    def add(self, record: SweepRecord) -> None:
        """Keep a record, and write it to the file before this returns."""
        self.records.append(record)
        self._append(record)

    def _append(self, line: SweepHead | SweepRecord) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _take(self, content: bytes, head: SweepHead) -> None:
        try:
            first, *others = [_lines.decode(line) for line in content.splitlines()]
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{self._path} does not hold results of a sweep: {error}.",
                remedy="Give another path to --results.",
            ) from error
        if first != head:
            raise UsageError(
                f"{self._path} has the results of another sweep{_difference(first, head)}.",
                remedy="Give another path to --results, or the same settings.",
                param="results",
            )
        self.records = [record for record in others if isinstance(record, SweepRecord)]


def swept_runs(grid: Grid, records: Sequence[SweepRecord]) -> tuple[list[RunFigures], list[FailedRun]]:
    """Return the runs of a grid in the order of its axes, with rising concurrency, and the failed points."""
    by_key = {record.key: record for record in records}
    keys = itertools.product(grid.layouts, sorted(grid.concurrencies))
    found = [by_key[key] for key in keys if key in by_key]
    runs = [record.run for record in found if record.run is not None]
    failed = [
        FailedRun(series=record.layout.name, concurrency=record.concurrency, error=record.error)
        for record in found
        if record.run is None
    ]
    return runs, failed


def _difference(first: SweepHead | SweepRecord, head: SweepHead) -> str:
    """Return the first setting that differs, as the end of a sentence; "" if the file has no first line."""
    if isinstance(first, SweepRecord):
        return ""
    if first.model != head.model:
        return f", of the model {first.model}"
    for name in sorted({*first.settings, *head.settings}):
        before, now = first.settings.get(name), head.settings.get(name)
        if before != now:
            return f": {name} was {before or 'not set'} and is {now or 'not set'}"
    return ""

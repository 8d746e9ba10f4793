"""The work of the stages between two steps, collected from reports and cut at the same steps in all stages.

    reports   |····n-1|n ·····|·······|···m-1|m ····|
    profile           |n ·················m-1|          from the plan that began it to the one that ended it

To take little memory, spans stay in the form in which ranks have sent them until they are written. Used by
`server.routes.profiler`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from penstock.batch import StageSpans
from penstock.trace.chrome import Span, spans_of, trace_events

_PIECE_BYTES = 1 << 16
_END = b"]}"


class Profile:
    """The reports of the stages between the first and the last step of a profile.

    Args:
        first_steps: by replica: the first step that belongs to the profile.
    """

    def __init__(self, first_steps: Mapping[int, int]) -> None:
        self._first = dict(first_steps)
        self._end: dict[int, float] = {}  # by replica: the first step after the profile
        self._reports: dict[tuple[int, int, int], StageSpans] = {}  # by replica, stage and its host's time
        self.num_spans = 0

    def add(self, reports: Iterable[StageSpans]) -> None:
        """Add reports of stages. A report that was added before is ignored."""
        for report in reports:
            key = report.replica, report.stage, report.began_ns
            if key not in self._reports:
                self._reports[key] = report
                self.num_spans += len(report.durations_ns)

    def end(self, end_steps: Mapping[int, int]) -> None:
        """End the profile before these steps, one for each replica. Others end with their last report."""
        self._end = {replica: float(step) for replica, step in end_steps.items()}

    def is_covered(self, num_stages: int) -> bool:
        """Return whether each stage has reported the end step of its replica, if the replica has one."""
        newest: dict[tuple[int, int], int] = {}
        for (replica, stage, _), report in self._reports.items():
            last_step = report.steps[-1][1] if report.steps else -1
            newest[replica, stage] = max(last_step, newest.get((replica, stage), -1))
        return all(
            newest.get((replica, stage), -1) >= end
            for replica, end in self._end.items()
            for stage in range(num_stages)
        )

    def __iter__(self) -> Iterator[Span]:
        """Yield the spans of the profile, by stage and time."""
        ordered = sorted(
            self._reports.values(), key=lambda report: (report.replica, report.stage, report.start_ns)
        )
        for span in spans_of(ordered):
            replica = span.stage.replica
            if self._first.get(replica, 0) <= span.step < self._end.get(replica, math.inf):
                yield span


def encoded_trace(spans: Iterable[Span], about: Mapping[str, Any], max_bytes: int) -> Iterator[bytes]:
    """Yield a trace as JSON that Perfetto opens, in pieces.

    The trace ends before the first event that would make it longer than `max_bytes`.

    Args:
        spans: an iterable that can be gone through several times.
        about: facts about the trace, which are written beside the events as `otherData`.
    """
    head = b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about) + b',"traceEvents":['
    num_bytes = len(head) + len(_END)
    piece, separator = bytearray(head), b""
    for event in trace_events(spans):
        text = separator + msgspec.json.encode(event)
        if num_bytes + len(text) > max_bytes:
            break
        num_bytes += len(text)
        piece += text
        separator = b","
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece) + _END

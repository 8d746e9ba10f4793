"""Spans of the stages out of the Chrome trace that `/debug/trace` serves and `penstock trace` saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.trace.chrome import Span, StageTrack
from penstock.trace.phases import Phase

_NUM_PIDS = StageTrack(replica=1, number=0).pid  # of a replica


def read_spans(trace: Mapping[str, Any]) -> list[Span]:
    """All spans, by stage and time; times are nanoseconds of the host's monotonic clock."""
    slices = (event for event in trace["traceEvents"] if event["ph"] == "X")
    return sorted(
        (_span(event) for event in slices), key=lambda span: (span.stage, span.start_ns, span.end_ns)
    )


def _span(event: Mapping[str, Any]) -> Span:
    start_ns = round(event["ts"] * 1e3)
    return Span(
        stage=StageTrack(*divmod(event["pid"], _NUM_PIDS)),
        phase=Phase[event["cat"].upper()],
        start_ns=start_ns,
        end_ns=start_ns + round(event["dur"] * 1e3),
        step=event["args"]["step"],
        num_tokens=event["args"]["tokens"],
    )


def within(spans: Iterable[Span], begin_ns: int, end_ns: int) -> list[Span]:
    """The parts of the spans that lie in a window."""
    return [
        span._replace(start_ns=max(span.start_ns, begin_ns), end_ns=min(span.end_ns, end_ns))
        for span in spans
        if span.end_ns > begin_ns and span.start_ns < end_ns
    ]

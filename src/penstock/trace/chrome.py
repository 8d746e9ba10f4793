"""The stages' work as a Chrome trace that Perfetto opens, and as a table of bubbles.

    stage 0   compute   |forward 7 ..........|forward 8 ..........|
              transfer                       |7| --+              |8|
    stage 1   compute   |forward 6 ...|sample|     +->|forward 7 ...|sample|

Trace and table are made of reports of the stages (`batch.StageSpans`). `server.routes.debug` serves them, and
`penstock trace` saves the trace and prints the table. `penstock simulate` writes a trace of simulated stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.batch import StageSpans
from penstock.trace.phases import BUBBLES, BUSY, Phase

_COMPUTE, _TRANSFER, _WAIT = range(3)
_MAX_STAGES = 1000
_TRACKS = {_COMPUTE: "compute", _TRANSFER: "transfer", _WAIT: "waiting"}


class StageTrack(NamedTuple):
    """A stage of a replica."""

    replica: int
    number: int

    @property
    def pid(self) -> int:
        """The number by which the trace knows the stage as a process; in replica 0 the stage's own number."""
        return self.replica * _MAX_STAGES + self.number

    @property
    def next(self) -> StageTrack:
        return StageTrack(self.replica, self.number + 1)


class Span(NamedTuple):
    """One span of a stage. `step` is -1 before the stage's first known step."""

    stage: StageTrack
    phase: Phase
    start_ns: int
    end_ns: int
    step: int
    num_tokens: int


def spans_of(reports: Sequence[StageSpans]) -> Iterator[Span]:
    """Yield all spans, report by report.

    A span between the end of a step and the begin of the next one counts to the step before. The times of
    stages on other hosts are shifted to the head's clock. The estimate of the shift changes from report to
    report. If a report would therefore begin before the end of the one before it, its first spans are cut.

    Args:
        reports: those of one stage must be in the order of their times.
    """
    newest: dict[StageTrack, tuple[int, int]] = {}
    ended_ns: dict[StageTrack, int] = {}
    for report in reports:
        steps = {index: (step, tokens) for index, step, tokens in report.steps}
        start_ns, stage = report.start_ns, StageTrack(report.replica, report.stage)
        free_ns = ended_ns.get(stage, start_ns)
        pairs = zip(report.phases, report.durations_ns, strict=True)
        for index, (phase, duration_ns) in enumerate(pairs):
            step, num_tokens = newest[stage] = steps.get(index, newest.get(stage, (-1, 0)))
            end_ns = start_ns + duration_ns
            yield Span(stage, Phase(phase), max(start_ns, free_ns), max(end_ns, free_ns), step, num_tokens)
            start_ns = end_ns
        ended_ns[stage] = max(start_ns, free_ns)


def chrome_trace(reports: Sequence[StageSpans]) -> dict[str, Any]:
    """Return the trace as an object for JSON: a process per stage, with a thread for each of `_TRACKS`."""
    return {"traceEvents": [*trace_events(list(spans_of(reports)))], "displayTimeUnit": "ms"}


def trace_events(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace one by one, since it may be long.

    Args:
        spans: an iterable that can be gone through several times, since this does so.
    """
    stages = sorted({span.stage for span in spans})
    texts = _texts(stages)
    for stage in stages:
        yield from _names(stage, texts[stage])
    yield from map(_slice, spans)
    yield from _arrows(spans)


def bubble_report(reports: Sequence[StageSpans]) -> list[str]:
    """Return a line about the time of each stage.

    The line says how much of the time the stage computed, its bubbles by cause, and its overhead. It also
    says how many steps were void: the stage computed nothing for them, since a guess before them was wrong.
    """
    return bubbles_of(spans_of(reports))


def bubbles_of(spans: Iterable[Span]) -> list[str]:
    """Return the lines of `bubble_report` for these spans."""
    by_stage: dict[StageTrack, Counter[Phase]] = defaultdict(Counter)
    is_computed: dict[StageTrack, dict[int, bool]] = defaultdict(dict)  # by step with tokens
    for span in spans:
        by_stage[span.stage][span.phase] += span.end_ns - span.start_ns
        if span.num_tokens:
            steps = is_computed[span.stage]
            steps[span.step] = steps.get(span.step, False) or span.phase is Phase.FORWARD
    lines, texts = [], _texts(by_stage)
    for stage, spent in sorted(by_stage.items()):
        wall = sum(spent.values()) or 1
        computing = sum(spent[phase] for phase in BUSY) / wall
        bubbles = [(spent[phase] / wall, phase.name.lower()) for phase in BUBBLES if spent[phase]]
        bubble = sum(share for share, _ in bubbles)
        causes = ", ".join(f"{name} {share:.1%}" for share, name in sorted(bubbles, reverse=True))
        text = f"{texts[stage]}: {wall / 1e9:.1f} s, computing {computing:.1%}, bubble {bubble:.1%}"
        text += f" ({causes})" if causes else ""
        text += f", overhead {max(0.0, 1 - computing - bubble):.1%}"
        whole = list(is_computed[stage].values())[1:-1]  # the first and the last step may not be here in full
        num_void = whole.count(False)
        lines.append(text + (f", {num_void} of {len(whole)} steps void" if num_void else ""))
    return lines


def _texts(stages: Collection[StageTrack]) -> dict[StageTrack, str]:
    """Return the names of the stages; they begin with the replica if any is of another one than 0."""
    if all(stage.replica == 0 for stage in stages):
        return {stage: f"stage {stage.number}" for stage in stages}
    return {stage: f"replica {stage.replica} stage {stage.number}" for stage in stages}


def _names(stage: StageTrack, text: str) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": stage.pid}
    yield common | {"name": "process_name", "args": {"name": text}}
    yield common | {"name": "process_sort_index", "args": {"sort_index": stage.pid}}
    for track, name in _TRACKS.items():
        yield common | {"tid": track, "name": "thread_name", "args": {"name": name}}


def _slice(span: Span) -> dict[str, Any]:
    name = span.phase.name.lower()
    return {
        "ph": "X",
        "pid": span.stage.pid,
        "tid": _track(span.phase),
        "ts": span.start_ns / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "name": name if span.step < 0 else f"{name} {span.step}",
        "cat": name,
        "args": {"step": span.step, "tokens": span.num_tokens},
    }


def _track(phase: Phase) -> int:
    if phase is Phase.COMM:
        return _TRANSFER
    return _WAIT if phase in BUBBLES else _COMPUTE


def _arrows(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield, for each step, an arrow from a stage's last copy (into the link) to the next stage's first."""
    first: dict[tuple[StageTrack, int], Span] = {}
    last: dict[tuple[StageTrack, int], Span] = {}
    for span in spans:
        if span.phase is Phase.COMM:
            first.setdefault((span.stage, span.step), span)
            last[span.stage, span.step] = span
    for (stage, step), sent in last.items():
        received = first.get((stage.next, step))
        if received is not None:
            common = {
                "cat": "hidden states",
                "name": f"step {step}",
                "id": f"{stage.pid}.{step}",
                "tid": _TRANSFER,
            }
            yield common | {"ph": "s", "pid": stage.pid, "ts": sent.start_ns / 1e3}
            yield common | {"ph": "f", "bp": "e", "pid": stage.next.pid, "ts": received.start_ns / 1e3}

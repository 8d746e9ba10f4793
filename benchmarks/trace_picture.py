"""A window of a trace as a picture for the documentation: a band per stage, coloured by what the stage does.

    penstock trace --out trace.json
    python benchmarks/trace_picture.py trace.json picture.svg --length-ms 150 --title "A full pipe"

Takes the Chrome trace that `penstock trace` saves from a running server. Arrows are hidden states on their
way; the numbers are steps. A span below a third of a pixel goes to the one before it. The SVG has no script
and no font of its own, is below 60 KB, and fits light and dark pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from trace_events import read_spans, within

from penstock.trace.chrome import Span, StageTrack
from penstock.trace.phases import BUBBLES, BUSY, Phase

MAX_BYTES = 60_000
LEFT, RIGHT, TOP, WIDTH = 92, 12, 34, 1000
BAND, GAP, FOOT, LEGEND_ROW = 44, 30, 30, 20
LEAST_PX, DIGIT_PX, LEGEND_PX = 1 / 3, 7, 178

NAMES = {
    Phase.FORWARD: ("layers", "#3b7dd8"),
    Phase.SAMPLE: ("sampling", "#7d5bd0"),
    Phase.TAKE: ("inputs", "#2a9d8f"),
    Phase.PUT: ("results on their way", "#8d7648"),
    Phase.COMM: ("copying", "#e3b505"),
    Phase.WAIT_PREV: ("waits for stage before", "#e4572e"),
    Phase.WAIT_NEXT: ("waits for room", "#f29ca3"),
    Phase.WAIT_TOKEN: ("waits for a token", "#b5446e"),
    Phase.WAIT_PLAN: ("waits for a plan", "#9aa5b1"),
    Phase.NO_WORK: ("no work", "#c9d1d9"),
}
STYLE = """text{font:12px sans-serif;fill:#24292f}.n{font-size:11px;fill:#fff;text-anchor:middle}
.t{text-anchor:middle;fill:#57606a}.h{font-size:14px;font-weight:bold}.a{stroke:#57606a;fill:none}
.m{fill:#57606a}.g{stroke:#8c959f;stroke-opacity:.3}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.n{fill:#fff}.t{fill:#9da7b3}
.a{stroke:#9da7b3}.m{fill:#9da7b3}}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--length-ms", type=float, default=150.0)
    parser.add_argument("--start-ms", type=float, help="after the trace's begin; default: its middle")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    spans = read_spans(json.loads(options.trace.read_text()))
    if not spans:
        parser.error("the trace has no spans")
    window = choose_window(spans, options.start_ms, options.length_ms)
    text = Picture(within(spans, *window), *window).svg(options.title)
    if len(text.encode()) > MAX_BYTES:
        raise SystemExit(f"the picture would have {len(text.encode())} bytes: give a smaller --length-ms.")
    options.picture.write_text(text)
    return 0


def choose_window(spans: Sequence[Span], start_ms: float | None, length_ms: float) -> tuple[int, int]:
    """Begin and end in nanoseconds; by default in the middle of what all stages have reported."""
    stages = {span.stage for span in spans}
    own = [[span for span in spans if span.stage == stage] for stage in stages]
    begin = max(of_stage[0].start_ns for of_stage in own)
    end = min(of_stage[-1].end_ns for of_stage in own)
    length = round(length_ms * 1e6)
    start = begin + round(start_ms * 1e6) if start_ms is not None else (begin + end - length) // 2
    return max(start, begin), max(start, begin) + length


def merged(spans: Sequence[Span], least_ns: float) -> list[Span]:
    """One stage's spans, the short ones added to those before them and equal neighbours joined."""
    found: list[Span] = []
    for span in spans:
        if found and (
            span.end_ns - span.start_ns < least_ns
            or (span.phase, span.step) == (found[-1].phase, found[-1].step)
        ):
            found[-1] = found[-1]._replace(end_ns=span.end_ns)
        else:
            found.append(span)
    return found


class Picture:
    """Spans of a window, by stage and time, on a plane of pixels."""

    def __init__(self, spans: Sequence[Span], begin_ns: int, end_ns: int) -> None:
        self._begin_ns = begin_ns
        self._end_ns = end_ns
        self._px_per_ns = (WIDTH - LEFT - RIGHT) / (end_ns - begin_ns)
        stages = sorted({span.stage for span in spans})
        self._spans = {stage: [span for span in spans if span.stage == stage] for stage in stages}
        self._tops = {stage: TOP + index * (BAND + GAP) for index, stage in enumerate(stages)}
        self._bottom = TOP + len(stages) * (BAND + GAP) - GAP

    def svg(self, title: str) -> str:
        phases = [
            phase for phase in NAMES if any(s.phase is phase for ss in self._spans.values() for s in ss)
        ]
        per_row = (WIDTH - LEFT) // LEGEND_PX
        height = self._bottom + FOOT + -(-len(phases) // per_row) * LEGEND_ROW
        label = title or "What each stage of a pipeline does over time"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(label)}</title><style>{STYLE}</style>",
            '<defs><marker id="e" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto">'
            '<path class="m" d="M0 0L7 3L0 6z"/></marker></defs>',
            f'<text class="h" x="{LEFT}" y="18">{escape(title)}</text>',
            *self._axis(),
            *(part for stage in self._spans for part in self._band(stage)),
            *self._arrows(),
            *self._legend(phases, per_row),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _x(self, time_ns: int) -> float:
        return LEFT + (time_ns - self._begin_ns) * self._px_per_ns

    def _axis(self) -> Iterator[str]:
        length_ms = (self._end_ns - self._begin_ns) / 1e6
        step_ms = next((step for step in (1, 2, 5, 10, 25, 50, 100) if length_ms / step <= 12), 250)
        for tick in range(0, int(length_ms) + 1, step_ms):
            x = self._x(self._begin_ns + round(tick * 1e6))
            yield f'<path class="g" d="M{x:.1f} {TOP}V{self._bottom + 4}"/>'
            yield f'<text class="t" x="{x:.1f}" y="{self._bottom + 17}">{tick}{" ms" * (tick == 0)}</text>'

    def _band(self, stage: StageTrack) -> Iterator[str]:
        """A path for each phase, the numbers of the steps, and how busy the stage is."""
        top, spans = self._tops[stage], self._spans[stage]
        busy_ns = sum(span.end_ns - span.start_ns for span in spans if span.phase in BUSY)
        busy = busy_ns / (self._end_ns - self._begin_ns)
        yield f'<text x="4" y="{top + 19}">{self._name(stage)}</text>'
        yield f'<text class="t" style="text-anchor:start" x="4" y="{top + 35}">{busy:.0%} busy</text>'
        shown = merged(spans, LEAST_PX / self._px_per_ns)
        for phase in NAMES:
            boxes = [self._box(span, top) for span in shown if span.phase is phase]
            if boxes:
                yield f'<path {_fill(phase)} d="{"".join(boxes)}"/>'
        for span in shown:
            width = (span.end_ns - span.start_ns) * self._px_per_ns
            if (
                span.phase is Phase.FORWARD
                and span.step >= 0
                and width > DIGIT_PX * (len(str(span.step)) + 1)
            ):
                x = self._x((span.start_ns + span.end_ns) // 2)
                yield f'<text class="n" x="{x:.0f}" y="{top + BAND // 2 + 4}">{span.step}</text>'

    def _name(self, stage: StageTrack) -> str:
        """Replicas are named where there are several."""
        is_alone = all(other.replica == 0 for other in self._spans)
        return f"stage {stage.number}" if is_alone else f"dp {stage.replica} stage {stage.number}"

    def _box(self, span: Span, top: int) -> str:
        begin, end = self._x(span.start_ns), self._x(span.end_ns)
        return f"M{begin:.1f} {top}H{end:.1f}v{BAND}H{begin:.1f}z"

    def _arrows(self) -> Iterator[str]:
        """From a stage's last copying in a step to the next stage's first, as `trace.chrome` has them."""
        for earlier, later in pairwise(self._spans):
            if later != earlier.next:
                continue
            came: dict[int, int] = {}
            for span in self._spans[later]:
                if span.phase is Phase.COMM and span.num_tokens:
                    came.setdefault(span.step, span.start_ns)
            sent = {s.step: s.end_ns for s in self._spans[earlier] if s.phase is Phase.COMM and s.num_tokens}
            for step in sent.keys() & came.keys():
                ends = f"M{self._x(sent[step]):.1f} {self._tops[earlier] + BAND}"
                ends += f"L{self._x(max(sent[step], came[step])):.1f} {self._tops[later]}"
                yield f'<path class="a" marker-end="url(#e)" d="{ends}"/>'

    def _legend(self, phases: Sequence[Phase], per_row: int) -> Iterator[str]:
        for index, phase in enumerate(phases):
            x = LEFT + index % per_row * LEGEND_PX
            y = self._bottom + FOOT + index // per_row * LEGEND_ROW
            yield f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" {_fill(phase)}/>'
            yield f'<text x="{x + 17}" y="{y + 10}">{NAMES[phase][0]}</text>'


def _fill(phase: Phase) -> str:
    """Waiting is pale."""
    pale = ' fill-opacity=".5"' if phase in BUBBLES and phase is not Phase.COMM else ""
    return f'fill="{NAMES[phase][1]}"{pale}'


if __name__ == "__main__":
    sys.exit(main())

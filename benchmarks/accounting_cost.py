"""What counting the time by phase costs a step: calls per step times the cost of one, and the report's share.

    python benchmarks/accounting_cost.py --step-ms 20

A step of a middle stage changes its phase about a dozen times. Reports go out once a second; their cost is
spread over the steps of a second.
"""

from __future__ import annotations

import argparse
import statistics
import time

from penstock.batch import StageSpans, StageTimes, encode
from penstock.trace.phases import Phase, PhaseClock, StageReporter

CALLS = (
    Phase.TAKE, Phase.WAIT_TOKEN, Phase.TAKE, Phase.FORWARD, Phase.WAIT_PREV, Phase.COMM, Phase.FORWARD,
    Phase.PUT, Phase.WAIT_NEXT, Phase.COMM, Phase.PUT, Phase.WAIT_PLAN,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    per_step = statistics.median(step_seconds(2000) for _ in range(7))
    per_report = statistics.median(report_seconds(round(1000 / options.step_ms)) for _ in range(7))
    share = (per_step + per_report * options.step_ms / 1000) / (options.step_ms / 1000)
    print(f"{per_step * 1e6:.1f} us a step, {per_report * 1e6:.0f} us a report: {share:.3%} of a step")


def step_seconds(steps: int) -> float:
    """Of the calls of one step."""
    reporter = StageReporter(0, PhaseClock(keeps_spans=True))
    began = time.perf_counter()
    for step in range(steps):
        reporter.step_begun(step, 32)
        for phase in CALLS:
            reporter.clock.begin(phase)
        reporter.step_done()
    return (time.perf_counter() - began) / steps


def report_seconds(steps: int) -> float:
    """Of making and encoding a report over so many steps."""

    def send(report: StageTimes | StageSpans) -> None:
        encode(report)

    reporter = StageReporter(0, PhaseClock(keeps_spans=True), send)
    for step in range(steps):
        reporter.step_begun(step, 32)
        for phase in CALLS:
            reporter.clock.begin(phase)
    began = time.perf_counter()
    reporter._report()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

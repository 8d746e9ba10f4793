"""The figures in a report of measured runs: rates, latencies, and each stage's time and memory.

The structs hold what was measured, and predictions beside it. `penstock bench ... --json` prints them;
`reports.page` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.workloads.summaries import percentile, summary

FORMAT = 1  # raised when programs that read the JSON would misread it; new fields alone do not raise it
PERCENTS = (50, 90, 99)
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per token",
    "itl": "Inter-token latency",
    "e2el": "End to end",
}
"""Titles of the latencies by their short names, in the order of a report."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a latency: the number of samples, and the others in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A stage during a run.

    Shares are of the run's time. `busy`, the bubbles of `causes` and `overhead` together make 1.

    Attributes:
        busy: share in which the stage computed.
        causes: share of each bubble, by cause.
        overhead: share in which the stage prepared inputs, sent results, or had no CPU core.
        sampling: share of the computing time that the output layer and sampling took; only on the last stage
            it is not 0.
        step_s: mean seconds that the stage computed for a step.
        weight_bytes, kv_bytes: bytes in all ranks of the stage. None: not known.
        stranded_bytes: free bytes that are not used as KV cache, since the stage with the least memory sets
            the number of blocks for all. None: not known.
        resident_bytes: memory of the stage's processes at the end of the run; a page that several processes
            share counts in parts. None: not known.
    """

    stage: int
    replica: int = 0
    busy: float = 0.0
    causes: dict[str, float] = {}
    overhead: float = 0.0
    sampling: float = 0.0
    num_steps: int = 0
    step_s: float = 0.0
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    stranded_bytes: int | None = None
    resident_bytes: int | None = None

    @property
    def bubble(self) -> float:
        """The share of time in which the stage could have computed and did not."""
        return sum(self.causes.values())


class PredictedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's prediction for the layout that ran, under the same load.

    Attributes:
        basis: the source of the prediction, as a sentence.
        bubble: share of the stages' time in which they do not compute, while all requests decode.
    """

    basis: str
    ttft_s: float
    time_per_token_s: float
    tokens_per_s: float
    bubble: float


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load.

    Attributes:
        series: the layout, such as "PP 2 x TP 1"; runs of one series differ in their concurrency.
        concurrency: requests in flight at most.
        latencies_ms: the latencies that were measured, by the keys of `LATENCIES`.
        stages: the stages; empty if they did not report.
    """

    series: str
    concurrency: int
    duration_s: float
    completed: int
    failed: int = 0
    prompt_tokens: int
    output_tokens: int
    latencies_ms: dict[str, Latency] = {}
    stages: list[StageFigures] = []
    predicted: PredictedFigures | None = None

    @property
    def requests_per_s(self) -> float:
        return self.completed / max(self.duration_s, 1e-9)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / max(self.duration_s, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """The prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / max(self.duration_s, 1e-9)

    @property
    def bubble(self) -> float | None:
        """The mean share of the stages' time in which they did not compute. None: not known."""
        busy = [stage.busy for stage in self.stages if stage.num_steps]
        return 1.0 - sum(busy) / len(busy) if busy else None


class FailedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that failed, and its error."""

    series: str
    concurrency: int
    error: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one benchmark.

    Attributes:
        made_at: day and time, in UTC.
        settings: settings of the benchmark, as text to show.
        notes: sentences about the numbers for the reader.
        format: version of the JSON.
    """

    title: str
    model: str
    version: str
    made_at: str
    settings: dict[str, str]
    runs: list[RunFigures]
    failed: list[FailedRun] = []
    notes: list[str] = []
    format: int = FORMAT


def latency_of(seconds: Sequence[float]) -> Latency:
    """Return the summary of measured times."""
    numbers = summary(seconds, PERCENTS)
    return Latency(
        count=len(seconds),
        mean=numbers["mean"],
        p50=numbers["p50"],
        p90=numbers["p90"],
        p99=numbers["p99"],
        max=1000 * percentile(seconds, 100),
    )


def latencies_of(samples_s: Mapping[str, Sequence[float]]) -> dict[str, Latency]:
    """Return a summary of each latency that has samples, in the order of a report."""
    return {name: latency_of(samples_s[name]) for name in LATENCIES if samples_s.get(name)}


def report_json(report: Report) -> str:
    """Return the report as JSON, with the rates that follow from its counts."""
    fields = msgspec.to_builtins(report)
    for run, shown in zip(report.runs, fields["runs"], strict=True):
        shown |= {
            "requests_per_s": run.requests_per_s,
            "output_tokens_per_s": run.output_tokens_per_s,
            "tokens_per_s": run.tokens_per_s,
            "bubble": run.bubble,
        }
    return msgspec.json.encode(fields).decode()

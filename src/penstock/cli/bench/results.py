"""The numbers of a load run: table and result file, with the names of `vllm bench serve`.

The functions compute from the accounts of `cli.bench.ledger`; `cli.bench.online` prints and writes what they
return.

    TTFT   from the sending of the request to the first token
    TPOT   (last token - first token) / (tokens - 1)
    ITL    time between two events with tokens
    E2EL   from the sending of the request to the last token
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.bench.ledger import Audit, StreamAccount
from penstock.errors import UsageError
from penstock.reports.figures import PredictedFigures, RunFigures, StageFigures, latencies_of
from penstock.workloads.requests import BenchRequest
from penstock.workloads.summaries import summary

_WIDTH = 50
_SECTIONS = (
    ("ttft", "Time to First Token"),
    ("tpot", "Time per Output Token (excl. 1st token)"),
    ("itl", "Inter-token Latency"),
    ("e2el", "End-to-end Latency"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run: its requests, their accounts, the seconds that it took, and the ledger's audit."""

    requests: Sequence[BenchRequest]
    accounts: Sequence[StreamAccount]
    duration_s: float
    audit: Audit

    @property
    def completed(self) -> list[StreamAccount]:
        return [account for account in self.accounts if account.ok]

    def latencies_s(self) -> dict[str, list[float]]:
        """Return the samples of each latency in seconds, by the latency's short name (see the module)."""
        done = [account for account in self.completed if account.token_ids]
        return {
            "ttft": [account.first_token_s - account.started_s for account in done],
            "tpot": [
                (account.last_token_s - account.first_token_s) / (len(account.token_ids) - 1)
                for account in done
                if len(account.token_ids) > 1
            ],
            "itl": [gap for account in done for gap in account.chunk_gaps_s],
            "e2el": [account.last_token_s - account.started_s for account in done],
        }

    def totals(self) -> dict[str, float | int]:
        """Return counts and rates under vLLM's key names."""
        done = self.completed
        lengths = {request.index: len(request.prompt_token_ids) for request in self.requests}
        tokens_in = sum(lengths[account.index] for account in done)
        tokens_out = sum(len(account.token_ids) for account in done)
        seconds = max(self.duration_s, 1e-9)
        return {
            "duration": self.duration_s,
            "completed": len(done),
            "failed": len(self.requests) - len(done),
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": len(done) / seconds,
            "output_throughput": tokens_out / seconds,
            "total_token_throughput": (tokens_in + tokens_out) / seconds,
            "max_concurrent_requests": peak_concurrency(self.accounts),
        }


def peak_concurrency(accounts: Sequence[StreamAccount]) -> int:
    """Return the largest number of requests in flight at one moment.

    A request that ends at the moment at which another one starts does not overlap it.
    """
    moments = [(account.started_s, 1) for account in accounts] + [
        (account.ended_s, -1) for account in accounts
    ]
    now = peak = 0
    for _, change in sorted(moments):
        now += change
        peak = max(peak, now)
    return peak


def table(result: RunResult) -> list[str]:
    """Return the table of a run as lines to print."""
    totals = result.totals()
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [
        _row("Successful requests:", totals["completed"]),
        _row("Failed requests:", totals["failed"]),
        _row("Benchmark duration (s):", totals["duration"]),
        _row("Total input tokens:", totals["total_input_tokens"]),
        _row("Total generated tokens:", totals["total_output_tokens"]),
        _row("Request throughput (req/s):", totals["request_throughput"]),
        _row("Output token throughput (tok/s):", totals["output_throughput"]),
        _row("Total token throughput (tok/s):", totals["total_token_throughput"]),
        _row("Peak concurrent requests:", totals["max_concurrent_requests"]),
    ]
    for key, title in _SECTIONS:
        lines.append(title.center(_WIDTH, "-"))
        numbers = summary(result.latencies_s()[key])
        lines += [
            _row(f"{word} {key.upper()} (ms):", numbers[word.lower()]) for word in ("Mean", "Median", "P99")
        ]
    return [*lines, "=" * _WIDTH]


def _row(name: str, value: float | int) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name:<40} {shown:<10}".rstrip()


def ledger_lines(audit: Audit, limit: int = 20) -> list[str]:
    """Return the ledger's findings as lines: one line if there are no violations, else the first of them."""
    if not audit.violations:
        errors = f", {audit.num_errors} ended with an error" if audit.num_errors else ""
        return [
            f"Ledger: {audit.num_requests} requests, {audit.num_tokens} tokens, each exactly once{errors}"
        ]
    more = len(audit.violations) - limit
    lines = [
        f"Ledger: {len(audit.violations)} violations",
        *(f"  {text}" for text in audit.violations[:limit]),
    ]
    return [*lines, f"  and {more} more"] if more > 0 else lines


def error_lines(accounts: Sequence[StreamAccount], limit: int = 5) -> list[str]:
    """Return the different errors of requests, the most frequent first, with their number."""
    counted = Counter(account.error.message for account in accounts if account.error is not None)
    return [f"  {count} x {message}" for message, count in counted.most_common(limit)]


def as_json(result: RunResult, settings: Mapping[str, Any], percents: Sequence[float]) -> dict[str, Any]:
    """Return the result file's content: vLLM's key names, with the ledger's outcome under `ledger`.

    Args:
        settings: fields such as `date`, `model_id` and `request_rate`, which are copied into the file.
        percents: percentiles of each latency.
    """
    fields: dict[str, Any] = dict(settings) | result.totals()
    for key, values in result.latencies_s().items():
        fields |= {f"{word}_{key}_ms": number for word, number in summary(values, percents).items()}
    accounts = sorted(result.accounts, key=lambda account: account.index)
    return fields | {
        "input_lens": [len(request.prompt_token_ids) for request in result.requests],
        "output_lens": [len(account.token_ids) for account in accounts],
        "ttfts": [max(0.0, account.first_token_s - account.started_s) for account in accounts],
        "itls": [account.chunk_gaps_s for account in accounts],
        "errors": [account.error.message if account.error else account.broken for account in accounts],
        "ledger": {
            "requests": result.audit.num_requests,
            "tokens": result.audit.num_tokens,
            "errors": result.audit.num_errors,
            "violations": result.audit.violations,
        },
    }


def figures(
    result: RunResult,
    series: str,
    concurrency: int,
    stages: Sequence[StageFigures] = (),
    predicted: PredictedFigures | None = None,
) -> RunFigures:
    """Return the figures of a run for a report.

    Args:
        series: name of the layout that ran, such as "PP 2 x TP 1".
        concurrency: requests in flight at most.
    """
    totals = result.totals()
    return RunFigures(
        series=series,
        concurrency=concurrency,
        duration_s=result.duration_s,
        completed=int(totals["completed"]),
        failed=int(totals["failed"]),
        prompt_tokens=int(totals["total_input_tokens"]),
        output_tokens=int(totals["total_output_tokens"]),
        latencies_ms=latencies_of(result.latencies_s()),
        stages=list(stages),
        predicted=predicted,
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file. Raises `UsageError` when it cannot be written."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a file. Raises `UsageError` when it cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", remedy="Give another path."
        ) from error

"""The report of a simulated run: rates, latencies, and what each stage did with its time.

`as_json` makes the JSON object of `penstock simulate --json`, and `lines` makes the text of it. Numbers that
`penstock bench serve` has too have the same names there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.simulator.replica import SimulatedReplica
from penstock.simulator.simulation import FinishedRun, RequestAccount
from penstock.trace.phases import BUBBLES
from penstock.workloads.summaries import summary

PERCENTS = (50, 90, 99)

_MAX_ROWS = 16  # if there are more stages, only the first and last of them are shown
_LATENCIES = {"ttft": "first token", "tpot": "time per token", "e2el": "whole request"}


def as_json(run: FinishedRun) -> dict[str, Any]:
    """Return all numbers of a run.

    Times are in seconds; those whose name ends with `_ms` are in milliseconds. Shares of time are shares of
    the run's duration.
    """
    seconds = max(run.ended_s - run.began_s, 1e-12)
    done = [account for account in run.accounts if account.is_done]
    tokens_in, tokens_out = (sum(numbers) for numbers in _token_counts(done))
    numbers: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(run.accounts) - len(done),
        "errors": dict(sorted(_errors(run.accounts).items())),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "cached_input_tokens": sum(account.num_cached for account in done),
        "request_throughput": len(done) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
    }
    for name, values in latencies_s(done).items():
        numbers |= {f"{word}_{name}_ms": value for word, value in summary(values, PERCENTS).items()}
    replicas = [_replica(run, number, seconds) for number in range(len(run.replicas))]
    stages = [stage for replica in replicas for stage in replica["stages"]]
    return numbers | {
        "busy": _mean([stage["busy"] for stage in stages]),
        "bubble": _mean([stage["bubble"] for stage in stages]),
        "preemptions": sum(replica["preemptions"] for replica in replicas),
        "recovered_requests": sum(replica["recovered_requests"] for replica in replicas),
        "replicas": replicas,
    }


def latencies_s(accounts: Sequence[RequestAccount]) -> dict[str, list[float]]:
    """Return samples in seconds by the short names that `penstock bench` uses.

    `ttft` is the time to the first token, `tpot` the time per token after it, `e2el` the whole request's.
    """
    return {
        "ttft": [account.first_token_s - account.sent_s for account in accounts if account.num_tokens],
        "tpot": [
            (account.ended_s - account.first_token_s) / (account.num_tokens - 1)
            for account in accounts
            if account.num_tokens > 1
        ],
        "e2el": [account.ended_s - account.sent_s for account in accounts],
    }


def lines(numbers: dict[str, Any]) -> list[str]:
    """Return the report as lines of text.

    Args:
        numbers: the object that `as_json` returned.
    """
    shown = [
        f"{numbers['completed']} requests in {numbers['duration']:.2f} s of simulated time"
        + (f", {numbers['failed']} failed" if numbers["failed"] else ""),
        *(f"  {count} x {message}" for message, count in numbers["errors"].items()),
        f"throughput: {numbers['request_throughput']:.2f} requests/s, "
        f"{numbers['output_throughput']:.1f} output tokens/s, "
        f"{numbers['total_token_throughput']:.1f} tokens/s in all",
    ]
    for name, title in _LATENCIES.items():
        values = ", ".join(f"p{percent} {numbers[f'p{percent}_{name}_ms']:.2f}" for percent in PERCENTS)
        shown.append(f"{title} (ms): mean {numbers[f'mean_{name}_ms']:.2f}, {values}")
    for replica in numbers["replicas"]:
        shown += _replica_lines(replica, are_several=len(numbers["replicas"]) > 1)
    return shown


def _replica_lines(replica: dict[str, Any], *, are_several: bool) -> list[str]:
    prefix = f"replica {replica['replica']} " if are_several else ""
    stages = replica["stages"]
    shown = stages if len(stages) <= _MAX_ROWS else [*stages[: _MAX_ROWS // 2], *stages[-_MAX_ROWS // 2 :]]
    rows = []
    for stage in shown:
        if len(stages) > _MAX_ROWS and stage["stage"] == len(stages) - _MAX_ROWS // 2:
            rows.append(f"  ... {len(stages) - _MAX_ROWS} more, which --json has")
        causes = sorted(((share, name) for name, share in stage["causes"].items() if share), reverse=True)
        text = ", ".join(f"{name} {share:.1%}" for share, name in causes)
        rows.append(
            f"{prefix}stage {stage['stage']}: busy {stage['busy']:.1%}, bubble {stage['bubble']:.1%}"
            + (f" ({text})" if text else "")
            + (f", overhead {stage['overhead']:.1%}" if stage["overhead"] >= 0.0005 else "")
            + (f", lost {stage['lost']:.1%}" if stage["lost"] else "")
        )
    kv = replica["kv"]
    return [
        *rows,
        f"{prefix}plans: {replica['steps']}, preemptions: {replica['preemptions']}, KV blocks: mean "
        f"{kv['mean_use']:.1%}, peak {kv['peak_use']:.1%} of {kv['num_blocks']}",
    ]


def _replica(run: FinishedRun, number: int, seconds: float) -> dict[str, Any]:
    replica, use = run.replicas[number], run.kv_use[number]
    stats = replica.scheduler.stats()
    num_blocks = replica.allocator.num_blocks
    speculation = stats.speculation
    return {
        "replica": number,
        "requests": sum(account.replica == number for account in run.accounts),
        "steps": replica.num_steps,
        "preemptions": stats.num_preemptions,
        "recovered_requests": stats.recovered_requests,
        "epoch": replica.core.epoch,
        "plans_that_fill": stats.fill_plans,
        "micro_batches": stats.micro_batches,
        "drafts": {"accepted": speculation.num_accepted, "tried": speculation.num_drafted},
        "kv": {
            "num_blocks": num_blocks,
            "block_size": replica.allocator.block_size,
            "peak_use": use.peak / num_blocks,
            "mean_use": use.block_seconds / num_blocks / seconds,
        },
        "wires_busy": [busy / seconds for busy in replica.flow.wire_busy()],
        "stages": _stages(replica, run, seconds),
    }


def _stages(replica: SimulatedReplica, run: FinishedRun, seconds: float) -> list[dict[str, Any]]:
    """Return, for each stage, the shares of the run's duration that it was busy, waited, or was lost."""
    ledger = replica.flow.ledger(run.ended_s)
    causes = {phase.name.lower(): (ledger.causes[phase] / seconds).tolist() for phase in BUBBLES}
    busy, overhead, lost = (
        (values / seconds).tolist() for values in (ledger.busy, ledger.overhead, ledger.lost)
    )
    return [
        {
            "stage": stage,
            "busy": busy[stage],
            "overhead": overhead[stage],
            "lost": lost[stage],
            "bubble": sum(shares[stage] for shares in causes.values()),
            "causes": {name: shares[stage] for name, shares in causes.items()},
        }
        for stage in range(replica.pipeline.num_stages)
    ]


def _errors(accounts: Sequence[RequestAccount]) -> Counter[str]:
    return Counter(account.error.code or account.error.kind for account in accounts if account.error)


def _token_counts(accounts: Sequence[RequestAccount]) -> tuple[list[int], list[int]]:
    """Return the number of prompt tokens of each request, and the number of its output tokens."""
    return [account.prompt_len for account in accounts], [account.num_tokens for account in accounts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

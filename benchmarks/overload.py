"""What overload does to the requests that were admitted, and how fast the rest is refused [R10].

    python benchmarks/overload.py MODEL [--rounds 3] [--seconds 20]

Two stages with one thread each serve MODEL, such as that of `cpu_peers.py`. The first server, with a queue
without end, tells the rate: as many requests as run at once, and as many again, always under way. The second
has a queue of two seconds of that work. In turns it gets just as much as fills rows and queue (saturation),
and Poisson arrivals at ten times the rate. The p99 of the time between tokens of admitted requests should be
within 1.3 of that at saturation; the others should get their 429 within 50 ms at the 99th percentile, as this
process sees it, which shares the cores with the server. Prints Markdown for docs/perf-log.md; exit code 1 if
a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from cpu_peers import START_S, commit, machine, progress
from peers.engine_process import adopt_orphans
from peers.report import format_samples, markdown
from peers.server_process import ServerProcess

from penstock.cli.bench.http_stream import Target
from penstock.cli.bench.online import Sender
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.results import RunResult
from penstock.cli.http_client import served_model
from penstock.workloads.requests import BenchRequest, synthetic
from penstock.workloads.summaries import percentile

STAGES, INPUT, OUTPUT, STALL_S = 2, 64, 64, 600.0
TIMES, QUEUE_S = 10.0, 2.0
ITL_BAR, REFUSAL_BAR_MS = 1.3, 50.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=32, help="requests that run at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each round")
    parser.add_argument("--flags", default="", help="further ones of `penstock serve`")
    options = parser.parse_args()
    adopt_orphans()
    figures: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="overload-") as scratch:
        with ExitStack() as stack:
            server = start(options, Path(scratch), stack, 100_000)
            closed_loop(server, options, options.rows, 2 * options.rows)  # warms up
            rate = closed_loop(server, options, 4 * options.rows, 2 * options.rows).totals()[
                "request_throughput"
            ]
        queue = math.ceil(QUEUE_S * rate)
        progress(f"{rate:.2f} requests/s; a queue of {queue}")
        with ExitStack() as stack:
            server = start(options, Path(scratch), stack, queue)
            closed_loop(server, options, options.rows, options.rows)
            for _ in range(options.rounds):
                count = round(rate * options.seconds) + options.rows
                saturated = closed_loop(server, options, count, options.rows + queue)
                flooded = send(server, requests(options, round(TIMES * rate * options.seconds), TIMES * rate))
                note(figures, saturated, flooded)
    ratio = statistics.median(figures["p99 between tokens, ratio"])
    refusal_ms = statistics.median(figures["p99 of a 429, ms"])
    print(
        f"machine: {machine()}; {STAGES} stages of 1 thread; commit {commit()}; flags: {options.flags or '-'}"
    )
    print(f"{rate:.2f} requests/s of {INPUT} + {OUTPUT} tokens, {options.rows} at once, a queue of {queue}\n")
    print(markdown(["", "median (each round)"], [[n, format_samples(v)] for n, v in figures.items()]))
    rows = [
        ["p99 between tokens, overload / saturation", f"<= {ITL_BAR:g}", f"{ratio:.2f}"],
        ["p99 of a 429, ms", f"<= {REFUSAL_BAR_MS:g}", f"{refusal_ms:.1f}"],
    ]
    print("\n" + markdown(["bar", "wanted", "found"], rows))
    return 0 if ratio <= ITL_BAR and refusal_ms <= REFUSAL_BAR_MS else 1


def start(options: argparse.Namespace, scratch: Path, stack: ExitStack, queue: int) -> ServerProcess:
    command = [sys.executable, "-m", "penstock", "serve", str(options.model), "--pp", str(STAGES)]
    command += ["--dtype", "bfloat16", "--threads-per-rank", "1", "--max-num-seqs", str(options.rows)]
    command += ["--max-model-len", "2048", "--max-waiting-requests", str(queue), "--queue-timeout", "3600"]
    server = ServerProcess("penstock", [*command, *shlex.split(options.flags)], scratch / f"{queue}.log")
    stack.callback(server.close)
    server.wait_ready(START_S)
    return server


def requests(options: argparse.Namespace, count: int, rate: float) -> list[BenchRequest]:
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    return synthetic(
        num_prompts=count,
        input_len=INPUT,
        output_len=OUTPUT,
        range_ratio=0.0,
        request_rate=rate,
        burstiness=1.0,
        vocab_size=vocab_size,
        seed=0,
    )


def closed_loop(
    server: ServerProcess, options: argparse.Namespace, count: int, concurrency: int
) -> RunResult:
    """So many requests, so many of them always under way; none is refused."""
    result = send(server, requests(options, count, math.inf), concurrency)
    assert len(result.completed) == count, result.audit
    return result


def send(server: ServerProcess, load: list[BenchRequest], concurrency: int | None = None) -> RunResult:
    target = Target.parse(server.url)
    sender = Sender(target, model=served_model(target, None).id, temperature=0.0, stall_s=STALL_S)
    result = asyncio.run(replay(sender, load, concurrency))
    assert not result.audit.violations, result.audit.violations[:3]
    return result


def note(figures: dict[str, list[float]], saturated: RunResult, flooded: RunResult) -> None:
    refused = [account for account in flooded.accounts if account.error is not None]
    assert all(account.error.kind == "HTTP 429" for account in refused if account.error), refused[:3]
    between = {
        name: 1000 * percentile(result.latencies_s()["itl"], 99)
        for name, result in (("saturation", saturated), ("overload", flooded))
    }
    figures["p99 between tokens at saturation, ms"].append(between["saturation"])
    figures["p99 between tokens under overload, ms"].append(between["overload"])
    figures["p99 between tokens, ratio"].append(between["overload"] / between["saturation"])
    waits = [1000 * (account.ended_s - account.started_s) for account in refused]
    figures["p50 of a 429, ms"].append(percentile(waits, 50))
    figures["p99 of a 429, ms"].append(percentile(waits, 99))
    figures["refused, %"].append(100 * len(refused) / len(flooded.accounts))
    figures["tokens/s at saturation"].append(saturated.totals()["output_throughput"])
    figures["tokens/s under overload"].append(flooded.totals()["output_throughput"])


if __name__ == "__main__":
    sys.exit(main())

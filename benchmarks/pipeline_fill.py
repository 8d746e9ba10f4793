"""Bubbles of the real engine around stages that sleep equally long: filling and draining, and steady decode.

    python benchmarks/pipeline_fill.py [--stages 4] [--sleep-ms 20] [--micro-batches 1,4,8,16] [--rounds 5]

Starts `penstock serve` on a tiny checkpoint with ranks whose layers sleep (`sleeping_rank.py`): core,
scheduler, links, token return and accounting are the real ones, in processes of their own. What the stages
did comes from `/debug/trace`. Sleep counts as busy here, so a stage's busy time is the wall time of its
FORWARD phase and not CPU time; everything else is bubble.

Filling: M requests of one chunk and one token come into an empty pipe, each a micro-batch of its own. The
bubble between the first stage's start and the last one's end should be (P - 1) / (M + P - 1), within two
percentage points. Steady: requests that decode together, two a micro-batch, in P micro-batches; the bubble of
each stage over the middle of the run should be below 2 %. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from peers.checkpoint import TINY_SHAPE, make_checkpoint
from peers.report import markdown
from peers.server_process import ServerProcess
from trace_events import read_spans, within

from penstock.cli.bench.http_stream import Target
from penstock.cli.bench.online import Sender
from penstock.cli.bench.replaying import replay
from penstock.trace.chrome import Span, StageTrack
from penstock.trace.phases import Phase
from penstock.workloads.requests import BenchRequest

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 32
BESIDE_TOKENS = 16  # a plan holds one prompt and this, so that every prompt gets a plan of its own
MAX_SEQS = 16
START_S, STALL_S = 120.0, 60.0
REPORT_S = 3.0  # a stage reports once a second, when a step or a probe ends
PAUSE_S = 0.3
STEADY_S = 6.0  # the core keeps the spans of the last ten seconds
FILL_BAR, STEADY_BAR = 0.02, 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--sleep-ms", type=float, default=20.0)
    parser.add_argument("--micro-batches", default="1,4,8,16", help=f"of the fills, {MAX_SEQS} at most")
    parser.add_argument("--async-depths", default="0,1", help="plans ahead of the pipe")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    counts = [int(count) for count in options.micro_batches.split(",")]
    fine = True
    with tempfile.TemporaryDirectory(prefix="pipeline-fill-") as scratch:
        model = Path(scratch, "model")
        make_checkpoint(model, TINY_SHAPE | {"num_hidden_layers": options.stages})
        for depth in map(int, options.async_depths.split(",")):
            server = start(model, options, depth)
            try:
                server.wait_ready(START_S)
                run(server, 1, 2)  # whatever is made at the first step
                fine &= report_fills(server, counts, options, depth)
                fine &= report_steady(server, options, depth)
            finally:
                server.close()
    return 0 if fine else 1


def start(model: Path, options: argparse.Namespace, async_depth: int) -> ServerProcess:
    command = [sys.executable, str(HERE / "stand_in.py"), "sleeping_rank", "serve", str(model)]
    flags = {
        "--pp": options.stages,
        "--threads-per-rank": 1,
        "--dtype": "bfloat16",
        "--async-depth": async_depth,
        "--max-num-seqs": MAX_SEQS,
        "--prefill-chunk": PROMPT_TOKENS,
        "--kernels": "off",  # so that prompts are cut by rule and not by time
        "--max-num-batched-tokens": PROMPT_TOKENS + BESIDE_TOKENS,
        "--max-model-len": 4096,
    }
    command += [str(word) for pair in flags.items() for word in pair]
    environment = os.environ | {"SLEEPING_RANK_MS": str(options.sleep_ms)}
    return ServerProcess("sleeping stages", command, model.parent / "server.log", environment=environment)


def run(server: ServerProcess, num_requests: int, num_tokens: int) -> tuple[int, int]:
    """Send requests at once and wait for the last; when they began and ended, in monotonic nanoseconds."""
    sender = Sender(Target.parse(server.url), model="model", temperature=0.0, stall_s=STALL_S)
    requests = [
        BenchRequest(index=i, arrival_s=0.0, prompt_token_ids=[7] * PROMPT_TOKENS, output_len=num_tokens)
        for i in range(num_requests)
    ]
    began = time.monotonic_ns()
    result = asyncio.run(replay(sender, requests))
    ended = time.monotonic_ns()
    assert not result.audit.violations, result.audit.violations
    assert not result.audit.num_errors, "a request failed"
    return began, ended


def spans_of(server: ServerProcess) -> list[Span]:
    """What the stages did, once their reports of it have come."""
    time.sleep(REPORT_S)
    return read_spans(json.loads(server.get("/debug/trace")))


def report_fills(
    server: ServerProcess, counts: Sequence[int], options: argparse.Namespace, depth: int
) -> bool:
    """Print the table of fills; whether all are within the bar."""
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(options.rounds):
        windows = {}
        for count in counts:
            windows[count] = run(server, count, 1)
            time.sleep(PAUSE_S)
        spans = spans_of(server)
        for count, window in windows.items():
            bubble, steps = fill_bubble(within(spans, *window), options.stages)
            if steps != count:
                raise SystemExit(f"{count} requests went through in {steps} micro-batches.")
            found[count].append(bubble)
    rows, fine = [], True
    for count, bubbles in found.items():
        ideal, middle = ideal_bubble(options.stages, count), statistics.median(bubbles)
        met = abs(middle - ideal) <= FILL_BAR
        spread = f"{min(bubbles):.1%} to {max(bubbles):.1%}"
        rows.append([str(count), f"{ideal:.1%}", f"{middle:.1%}", spread, "met" if met else "missed"])
        fine &= met
    print(f"\nP = {options.stages}, {options.sleep_ms:g} ms a stage, async depth {depth}\n")
    print(markdown(["M", "(P-1)/(M+P-1)", "bubble", "spread", f"within {FILL_BAR:.0%}"], rows), flush=True)
    return fine


def report_steady(server: ServerProcess, options: argparse.Namespace, depth: int) -> bool:
    """Print the bubbles of a steady run; whether all are below the bar."""
    batch = 2 * options.stages
    trip_s = options.stages * options.sleep_ms / 1000
    began, ended = run(server, batch, max(8, round(STEADY_S / trip_s)))
    fifth = (ended - began) // 5
    window = (began + fifth, ended - fifth)
    shares = phase_shares(within(spans_of(server), *window), *window)
    bubbles = {stage: 1 - of_stage[Phase.FORWARD] for stage, of_stage in shares.items()}
    fine = max(bubbles.values()) < STEADY_BAR
    rows = [[str(stage.number), f"{bubble:.2%}", causes(shares[stage])] for stage, bubble in bubbles.items()]
    print(f"\nsteady decode, {batch} requests, {(window[1] - window[0]) / 1e9:.1f} s, async depth {depth}\n")
    word = "met" if fine else "missed"
    print(markdown(["stage", f"bubble (below {STEADY_BAR:.0%}: {word})", "of it"], rows), flush=True)
    return fine


def ideal_bubble(num_stages: int, num_micro_batches: int) -> float:
    """The share of all stages' time that nobody can use while a pipe fills and drains."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def fill_bubble(spans: Sequence[Span], num_stages: int) -> tuple[float, int]:
    """The share of all stages' time between the first step's start and the last one's end in which no layers
    ran, and how many steps there were."""
    forward = [span for span in spans if span.phase is Phase.FORWARD and span.num_tokens]
    wall_ns = max(span.end_ns for span in forward) - min(span.start_ns for span in forward)
    busy_ns = sum(span.end_ns - span.start_ns for span in forward)
    return 1 - busy_ns / (num_stages * wall_ns), len({span.step for span in forward})


def phase_shares(spans: Sequence[Span], begin_ns: int, end_ns: int) -> dict[StageTrack, Counter[Phase]]:
    """By stage, the share of the window that it spent in each phase."""
    shares: dict[StageTrack, Counter[Phase]] = {}
    for span in spans:
        of_stage = shares.setdefault(span.stage, Counter())
        of_stage[span.phase] += (span.end_ns - span.start_ns) / (end_ns - begin_ns)  # type: ignore[assignment]
    return shares


def causes(shares: Counter[Phase]) -> str:
    """What a stage does but run its layers, the longest first; below a thousandth is left out."""
    shown = [(phase, share) for phase, share in shares.most_common() if share >= 0.001]
    return ", ".join(f"{phase.name.lower()} {share:.1%}" for phase, share in shown if phase != Phase.FORWARD)


if __name__ == "__main__":
    sys.exit(main())

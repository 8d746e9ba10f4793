"""What it costs to be able to recover while nothing fails: calls per step times the cost of one.

    python benchmarks/recovery_cost.py --step-ms 20 --rows 8 --stages 2

On the way of a step: the core seals the plan, every stage carries its log on, every link packs and
compares a header, and the API process notes the tokens of every request. Each second: every child says
that it is alive and the supervisor hears it. All of it is added up, as if nothing ran side by side, and
should be at most 0.5 % of a step. Prints Markdown for docs/perf-log.md; exit code 1 if it is more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

from peers.report import markdown

from penstock.batch import ScheduledBatch
from penstock.engine.client.live_requests import LiveRequests
from penstock.engine.supervisor.losses import Heartbeats
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.frame import FrameHeader, FrameKind
from penstock.process.child import Alive, StatusWriter, decode_status
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams

BAR = 0.005
CALLS, ROUNDS = 2000, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    rows, stages = options.rows, options.stages
    seal_s, append_s = log_seconds(rows)
    per_second = options.step_ms / 1000  # how much of it falls on a step
    children = stages + 2
    parts = [
        ("plan sealed, core", 1, seal_s),
        ("log carried on, stage", stages, append_s),
        ("header packed and compared, link", stages - 1, header_seconds()),
        ("tokens noted, API process", rows, note_seconds(rows)),
        ("sign of life, child and supervisor", children * per_second, alive_seconds()),
        ("look for the silent, supervisor", children * per_second, look_seconds(children)),
    ]
    lines = [
        [name, f"{count:.2f}", f"{1e6 * cost:.2f}", f"{1e6 * count * cost:.1f}"]
        for name, count, cost in parts
    ]
    share = sum(count * cost for _, count, cost in parts) / (options.step_ms / 1000)
    print(markdown(["", "calls per step", "us each", "us per step"], lines))
    print(
        f"\n{share:.3%} of a step of {options.step_ms:g} ms with {rows} rows and {stages} stages; bar 0.5 %"
    )
    return 0 if share <= BAR else 1


def seconds(body: Callable[[], object], calls: int = CALLS) -> float:
    """Of one call, the median of some rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            body()
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


def log_seconds(rows: int) -> tuple[float, float]:
    """Of sealing a plan of decodes, and of carrying the log on with it."""
    plans = [
        ScheduledBatch(
            step_id=step,
            rows=list(range(rows)),
            num_tokens=[1] * rows,
            start_positions=[500 + step] * rows,
            new_blocks=[[] for _ in range(rows)],
            need_sampled=[True] * rows,
            token_from=[step - 2] * rows,
            consume_through=step - 2,
        )
        for step in range(2, CALLS + 2)
    ]
    sealing, appending = [], []
    for _ in range(ROUNDS):
        log = DecisionLog(first_step=2)
        began = time.perf_counter()
        sealed = [log.seal(plan) for plan in plans]
        sealing.append((time.perf_counter() - began) / CALLS)
        log = DecisionLog(first_step=2)
        began = time.perf_counter()
        for plan in sealed:
            log.append(plan, lambda _: [])
        appending.append((time.perf_counter() - began) / CALLS)
    return statistics.median(sealing), statistics.median(appending)


def header_seconds() -> float:
    """Of what both ends of a link do for the header of one frame."""
    header = FrameHeader(
        epoch=3,
        step_id=1000,
        kind=FrameKind.HIDDEN,
        num_tokens=8,
        width=896,
        dtype="bfloat16",
        num_tensors=2,
        digest=12345,
    )
    frame = memoryview(header.pack())
    return seconds(lambda: (header.pack(), frame != header.pack()))


def note_seconds(rows: int) -> float:
    """Of the tokens of one request in one step."""
    live = LiveRequests()
    for row in range(rows):
        live.add(GenerationRequest(request_id=str(row), prompt_token_ids=[1], sampling=SamplingParams()))
    update = RequestUpdate(request_id="0", token_ids=[7])
    return seconds(lambda: live.note(update))


def alive_seconds() -> float:
    """Of one sign of life, written, read and decoded."""
    reader, writer = os.pipe()
    status = StatusWriter(writer)

    def once() -> None:
        status.write(Alive())
        decode_status(os.read(reader, 4096).strip())

    found = seconds(once)
    os.close(reader)
    os.close(writer)
    return found


def look_seconds(children: int) -> float:
    """Of looking at one child."""
    heartbeats: Heartbeats[int] = Heartbeats(limit_s=5.0)
    heard_at = dict.fromkeys(range(children), time.monotonic())
    return seconds(lambda: heartbeats.silent(heard_at, time.monotonic())) / children


if __name__ == "__main__":
    sys.exit(main())

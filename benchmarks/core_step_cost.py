"""CPU time of the engine core and of the API process per step, with streaming requests and a stub stage.

    python benchmarks/core_step_cost.py [--requests 32] [--steps 600] [--cadence-ms 10]

Starts the real supervisor, core and API process on the embedded model; `stub_rank.py` stands in for the only
stage. All requests decode in every step of the measured window. Every token must leave as a chunk of its own:
merged chunks would make the API process look cheaper than it is. Reports the CPU time of all threads of each
process, and fails when a bar is missed or the ledger is not in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cpu_time import cpu_seconds
from stand_in import use_rank
from stub_rank import COUNTER_BYTES, StepCounter

from penstock.cli.bench.http_stream import Target
from penstock.cli.bench.online import Sender
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.results import RunResult, ledger_lines
from penstock.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor import supervisor
from penstock.engine.supervisor.reports import EngineFailed, EngineReady, Event
from penstock.workloads.requests import BenchRequest

CORE_BAR_MS = 1.0
API_BAR_MS = 2.5
WARM_UP_STEPS = 100
PROMPT_TOKENS = 8


@dataclass(kw_only=True)
class Measurement:
    """What the load thread finds out while the supervisor runs in the main thread."""

    num_requests: int
    num_steps: int
    counter: StepCounter
    ready: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    failure: str = ""
    steps: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)
    result: RunResult | None = None

    def report(self, event: Event) -> None:
        """The supervisor's reporter."""
        if isinstance(event, EngineReady):
            self.address = event.address
            self.ready.set()
        elif isinstance(event, EngineFailed):
            self.failure = event.error.message
            self.ready.set()

    def run(self) -> None:
        """Load the server, measure the window, then end the supervisor."""
        self.ready.wait()
        if not self.address:
            return
        load = threading.Thread(target=self._load)
        load.start()
        self._measure(load)
        load.join()
        os.kill(os.getpid(), signal.SIGTERM)

    def _load(self) -> None:
        sender = Sender(Target.parse(self.address), model="demo", temperature=0.0, stall_s=60.0)
        length = self.num_steps + 2 * WARM_UP_STEPS
        requests = [
            BenchRequest(index=index, arrival_s=0.0, prompt_token_ids=[5] * PROMPT_TOKENS, output_len=length)
            for index in range(self.num_requests)
        ]
        self.result = asyncio.run(replay(sender, requests))

    def _measure(self, load: threading.Thread) -> None:
        pids = {name: child_pid(name) for name in ("penstock core", "penstock api")}
        before_steps, before = self._sample_at(WARM_UP_STEPS, pids, load)
        after_steps, after = self._sample_at(WARM_UP_STEPS + self.num_steps, pids, load)
        self.steps = after_steps - before_steps
        self.cpu_s = {name: after[name] - before[name] for name in pids}

    def _sample_at(
        self, step: int, pids: dict[str, int], load: threading.Thread
    ) -> tuple[int, dict[str, float]]:
        while self.counter.read() < step and load.is_alive():
            time.sleep(0.005)
        return self.counter.read(), {name: cpu_seconds([pid]) for name, pid in pids.items()}


def child_pid(title: str) -> int:
    """The child of this process that has this title."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            name = (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if parent == os.getpid() and name.startswith(title):
            return int(entry.name)
    raise LookupError(f"no child process is called {title!r}")


def numbers(measured: Measurement) -> dict[str, float]:
    """Milliseconds per step, and the share of tokens that left as a chunk of their own."""
    assert measured.result is not None
    accounts = measured.result.accounts
    tokens = sum(len(account.token_ids) for account in accounts)
    chunks = sum(len(account.chunk_gaps_s) + 1 for account in accounts)
    return {
        "requests": measured.num_requests,
        "steps": measured.steps,
        "core_ms_per_step": 1000 * measured.cpu_s["penstock core"] / measured.steps,
        "api_ms_per_step": 1000 * measured.cpu_s["penstock api"] / measured.steps,
        "chunks_per_token": chunks / tokens,
    }


def verdict(found: dict[str, float], result: RunResult) -> bool:
    """Print the outcome; whether every bar is met."""
    for name, bar in (("core", CORE_BAR_MS), ("api", API_BAR_MS)):
        value = found[f"{name}_ms_per_step"]
        word = "ok" if value < bar else "MISSED"
        print(f"{name:<5} {value:6.3f} ms of CPU a step   bar {bar} ms   {word}")
    print(f"      {found['steps']:.0f} steps, {found['chunks_per_token']:.3f} chunks a token")
    print(*ledger_lines(result.audit), sep="\n")
    in_time = found["core_ms_per_step"] < CORE_BAR_MS and found["api_ms_per_step"] < API_BAR_MS
    return in_time and not result.audit.violations and found["chunks_per_token"] > 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--cadence-ms", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    use_rank("stub_rank")
    os.environ["STUB_RANK_CADENCE_MS"] = str(options.cadence_ms)
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(COUNTER_BYTES))
        file.flush()
        os.environ["STUB_RANK_COUNTER"] = file.name
        measured = Measurement(
            num_requests=options.requests, num_steps=options.steps, counter=StepCounter(file.name)
        )
        driver = threading.Thread(target=measured.run)
        driver.start()
        code = run_server(measured, options.requests)
        measured.ready.set()
        driver.join()
    if code or not measured.steps or measured.result is None:
        print(f"the server ended with code {code} {measured.failure}", file=sys.stderr)
        return code or 1
    found = numbers(measured)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if verdict(found, measured.result) else 1


def run_server(measured: Measurement, num_requests: int) -> int:
    """Serve in this, the main, thread until the measurement ends it."""
    engine = EngineConfig(
        model=ModelConfig(model="demo"), scheduler=SchedulerConfig(max_num_seqs=num_requests)
    )
    return supervisor.Supervisor.for_server(engine, ServerConfig(port=0, drain_s=1.0), measured).run()


if __name__ == "__main__":
    sys.exit(main())

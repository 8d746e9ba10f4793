"""A trace of conversations, open loop over HTTP, against two stages of ours and two of vLLM's CPU build.

    python benchmarks/mixed_load.py MODEL --trace azure_llm_2023_conv.csv --vllm-python DIR/bin/python

MODEL and vLLM's environment are those of `cpu_peers.py`. The first `--requests` of the trace, lengths divided
by 16 and at least 1, with random ids and exact output lengths. Saturation: all of them are sent at once, and
the rate is requests by the time of all. Then each engine gets them at 70 % of vLLM's rate: the trace's own
arrival times, stretched or squeezed. Each stage has one thread on a core of its own; the client is this
process, which shares the cores with whichever engine runs. Engines take turns in each round and are stopped
while they wait.

TTFT and inter-token time are those of `penstock bench serve`; a figure is the median over the rounds. How
busy our stages are at saturation is CPU time: the mean of /metrics' `pipeline_stage_busy_ratio`, read once a
second in the middle of the run. Prints Markdown for docs/perf-log.md; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import signal
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from cpu_peers import PEERS, START_S, commit, machine, progress
from peers.engine_process import adopt_orphans
from peers.report import format_samples, markdown
from peers.server_process import ServerProcess

from penstock.cli.bench.http_stream import Target
from penstock.cli.bench.online import Sender
from penstock.cli.bench.replaying import replay
from penstock.cli.bench.results import RunResult
from penstock.cli.http_client import served_model
from penstock.workloads.requests import BenchRequest, from_trace
from penstock.workloads.summaries import percentile
from penstock.workloads.traces import TraceRow, read_trace

STAGES, THREADS, MAX_SEQS, MAX_LEN = 2, 1, 64, 2048
STALL_S, POLL_S, AWAKE_S = 600.0, 1.0, 60.0
WARM_UP_REQUESTS = 8
MEASURES = (("ttft", 50), ("ttft", 99), ("itl", 50), ("itl", 99))
ITL_BAR_MS, TTFT_BAR, BUSY_BAR_PERCENT = 100.0, 1.5, 92.0
OURS, PEER = "penstock", "vllm"

Figures = dict[str, dict[str, list[float]]]  # by engine and name: one of each round


def main() -> int:
    options = parse_options()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda received, _: sys.exit(128 + received))  # so that engines are ended
    rows = read_trace(options.trace, options.requests, kind="azure")
    figures: Figures = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="mixed-load-") as scratch, ExitStack() as stack:
        servers = start(options, Path(scratch), stack)
        at_once = make_requests(options, rows, 0.0)
        for server in servers.values():
            run(server, at_once[:WARM_UP_REQUESTS])
        for _ in range(options.rounds):
            for name, server in servers.items():
                saturate(server, at_once, figures[name])
        reference = PEER if PEER in servers else OURS
        rate = options.share * statistics.median(figures[reference]["saturation, requests/s"])
        offered = make_requests(options, rows, time_scale(rows, rate))
        for _ in range(options.rounds):
            for name, server in servers.items():
                note_latencies(run(server, offered), figures[name])
                progress(f"{name}: offered {rate:.2f} requests/s")
    text, fine = report(figures)
    print(f"machine: {machine()}; {STAGES} stages of {THREADS} thread; commit {commit()}")
    print(f"flags: {OURS} {options.our_flags}; {PEER} {options.vllm_flags or '-'}")
    print(
        f"{options.requests} requests, lengths / {options.length_scale:g}; offered: {rate:.2f} requests/s, "
    )
    print(f"{options.share:.0%} of what {reference} does at saturation\n\n{text}")
    return 0 if fine else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--vllm-python", help="without it our own saturation is the reference")
    parser.add_argument("--our-flags", default="--partition 16,8", help="further ones of `penstock serve`")
    parser.add_argument("--vllm-flags", default="", help="further ones of vLLM's server")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--length-scale", type=float, default=16.0)
    parser.add_argument("--share", type=float, default=0.7, help="of the saturation rate, offered")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def start(options: argparse.Namespace, scratch: Path, stack: ExitStack) -> dict[str, ServerProcess]:
    """The engines, one after the other; all are stopped."""
    common = ["--dtype", "bfloat16", "--max-num-seqs", str(MAX_SEQS), "--max-model-len", str(MAX_LEN)]
    ours = [sys.executable, "-m", "penstock", "serve", str(options.model), "--pp", str(STAGES), *common]
    ours += ["--threads-per-rank", str(THREADS), *shlex.split(options.our_flags)]
    ours += ["--queue-timeout", "3600", "--max-waiting-requests", "100000"]
    commands = {OURS: ours}
    if options.vllm_python:
        peer = [options.vllm_python, str(PEERS / "vllm_server.py"), str(THREADS), str(STAGES), *common]
        commands[PEER] = [*peer, "--model", str(options.model), "--no-enable-prefix-caching"]
        commands[PEER] += shlex.split(options.vllm_flags)
    servers = {}
    for name, command in commands.items():
        progress(f"{name}: loading")
        servers[name] = server = ServerProcess(name, command, scratch / f"{name}.log")
        stack.callback(server.close)
        server.wait_ready(START_S)
        server.signal(signal.SIGSTOP)
    return servers


def make_requests(options: argparse.Namespace, rows: Sequence[TraceRow], times: float) -> list[BenchRequest]:
    """The trace's requests; `times` multiplies the arrival times."""
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    return from_trace(
        rows, length_scale=options.length_scale, time_scale=times, vocab_size=vocab_size, seed=0
    )


def time_scale(rows: Sequence[TraceRow], rate: float) -> float:
    """What arrival times must be multiplied by so that they offer `rate` requests a second."""
    span_s = rows[-1].arrival_s - rows[0].arrival_s
    return (len(rows) - 1) / span_s / rate


def run(server: ServerProcess, requests: Sequence[BenchRequest]) -> RunResult:
    """Wake the server, send the load, and let it stop again."""
    with server.running():
        return send(server, requests)


def send(server: ServerProcess, requests: Sequence[BenchRequest]) -> RunResult:
    server.wait_ready(AWAKE_S)
    target = Target.parse(server.url)
    sender = Sender(target, model=served_model(target, None).id, temperature=0.0, stall_s=STALL_S)
    result = asyncio.run(replay(sender, requests))
    if result.audit.violations or result.audit.num_errors:
        progress(f"{server.name}: {result.audit.num_errors} errors; {result.audit.violations[:3]}")
    return result


def saturate(
    server: ServerProcess, requests: Sequence[BenchRequest], figures: dict[str, list[float]]
) -> None:
    """Send all at once; note the rate, and how busy the stages were if the server tells."""
    with server.running(), BusySampler(server) as sampler:
        totals = send(server, requests).totals()
    figures["saturation, requests/s"].append(totals["request_throughput"])
    figures["saturation, tokens out/s"].append(totals["output_throughput"])
    for stage, share in sampler.shares().items():
        figures[f"stage {stage} busy at saturation, %"].append(100 * share)
    progress(f"{server.name}: saturated at {totals['request_throughput']:.2f} requests/s")


class BusySampler:
    """Reads how busy the stages are, once a second in the body of a `with`."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._samples: list[dict[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> BusySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def shares(self) -> dict[str, float]:
        """By stage, the mean over the middle of the run; empty for a server that tells nothing."""
        fifth = len(self._samples) // 5
        middle = self._samples[fifth : len(self._samples) - fifth]
        stages = sorted(middle[0]) if middle else []
        return {stage: statistics.fmean(sample[stage] for sample in middle) for stage in stages}

    def _read(self) -> None:
        while not self._over.wait(POLL_S):
            sample = busy_ratios(self._server.get("/metrics"))
            if sample:
                self._samples.append(sample)


def busy_ratios(exposition: str) -> dict[str, float]:
    """By stage, out of the text of `/metrics`."""
    found = re.findall(r'^penstock_pipeline_stage_busy_ratio{.*stage="(\d+)".*} (\S+)$', exposition, re.M)
    return {stage: float(value) for stage, value in found}


def note_latencies(result: RunResult, figures: dict[str, list[float]]) -> None:
    latencies = result.latencies_s()
    for measure, percent in MEASURES:
        figures[f"{measure} p{percent}, ms"].append(1000 * percentile(latencies[measure], percent))


def report(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[str, bool]:
    """A table of all figures and one of the bars, and whether all bars are met."""
    names = dict.fromkeys(name for found in figures.values() for name in found)
    rows = [[name, *(format_samples(found.get(name, ())) for found in figures.values())] for name in names]
    middles = {
        engine: {name: statistics.median(values) for name, values in found.items()}
        for engine, found in figures.items()
    }
    bars = bar_rows(middles)
    text = f"{markdown(['', *figures], rows)}\n\n{markdown(['bar', 'wanted', 'found', ''], bars)}"
    return text, all(row[-1] == "met" for row in bars)


def bar_rows(middles: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Each bar that could be measured: what it is of, what is wanted, what was found, and the verdict."""
    ours, peer = middles[OURS], middles.get(PEER)
    itl = ours["itl p99, ms"]
    rows = [["inter-token p99, ms", f"< {ITL_BAR_MS:g}", f"{itl:.1f}", verdict(itl < ITL_BAR_MS)]]
    for name in ("ttft p50, ms", "ttft p99, ms") if peer else ():
        assert peer is not None
        ratio = peer[name] / ours[name]
        rows.append([f"{name}: vLLM's / ours", f"{TTFT_BAR:g}", f"{ratio:.2f}", verdict(ratio >= TTFT_BAR)])
    busy = [value for name, value in ours.items() if "busy" in name]
    if busy:
        met = max(busy) >= BUSY_BAR_PERCENT
        rows.append(["busiest stage, %", f"{BUSY_BAR_PERCENT:g}", f"{max(busy):.1f}", verdict(met)])
    return rows


def verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    sys.exit(main())

"""The bars for one model over two hosts, measured between two network namespaces of this machine.

    python benchmarks/two_hosts.py
        [--bars throughput,delay,stream,one-core,llama,tls,chunk,crash,trace,idle,start]
        [--model 0.5b] [--partition 15,9] [--rounds 5] [--requests 8,16,32]
        [--llama-python DIR/bin/python] [--trace FILE] [--quick]

A head (`penstock serve`) runs on one host, a worker on the other, each with its stage on a core of its own.
`0.5b` is a seeded random checkpoint of the shape of Qwen2.5-0.5B in bfloat16, made in a temporary directory;
a directory or `demo` may stand in its place. Two cores and what docs/test-bed.md names are needed. The bars:

- throughput: at 1 Gbit/s against the same stages over shared memory on the same cores; share of busy time.
- delay: 50 ms each way, with as many plans in flight as fill the pipe, against no delay.
- stream: time per token of one request against stage times measured alone and hops of a TLS ping-pong.
- one-core: against one host that runs the whole model on one core.
- llama: against llama.cpp over two RPC servers, one on each host (`cpu_peers.py` says how it is installed).
- tls: against links in plain text at 1 Gbit/s.
- chunk: a chunk of 512 tokens against line rate, and after an idle time at a round trip of 50 ms.
- crash: the longest pause of running requests when something is killed, stopped or cut off; same tokens.
- trace: requests of a real trace while a host is lost every 20 s: none lost, and the tokens of an undisturbed
  run. The file is `AzureLLMInferenceTrace_conv.csv` of 2023 from AzurePublicDataset, or one of its form.
- idle: CPU time of all processes of each host, of an engine without requests.
- start: from the start of a worker to serving, against the same start on one host.

What is compared takes turns, and who comes first changes. A ratio is the median of the ratios of the rounds,
with its interval of 95 % by bootstrap; the control is what it is compared with, against itself. `--quick`
makes everything small, to see that it works. Prints Markdown for docs/perf-log.md; exit code 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from cpu_peers import end_engines_with_us, progress
from host_bed import (
    GIGABIT,
    MAX_ROWS,
    NO_SPARE,
    OWN_MODEL,
    OWN_PARTITION,
    QUICK,
    Bed,
    Found,
    Sizes,
    cpu_shares,
    gigabit_hosts,
    in_rounds,
    open_bed,
    place_stages,
    print_bars,
    rate_ratios,
    share_text,
    word,
)
from host_load import Decoded, differing, median_gap_s, median_of, plans_to_fill
from host_pauses import FaultRuns, Outcome, fault_table
from host_stages import StageAlone, stages_step_s
from host_trace import trace
from host_wire import hidden_bytes, ping_pong, send_chunks
from peers.engine_process import EngineProcess
from peers.report import format_samples, markdown
from ratios import in_turns, shown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from host_faults import FAULTS
from network import Host, ShapedLink, shaped_network
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.launch import LaunchPlan, resolve
from penstock.hosts.resources import HostResources
from served import title_of
from served_hosts import SoleServer

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = REPOSITORY.parent / "shared" / "data" / "traces" / "azure_llm_2023_conv.csv"
JUMBO = 9000  # bytes of a packet where a program carries them
RPC_PORT = 50052
START_S, ANSWER_S = 300.0, 900.0
SETTLE_S = 3.0  # after a change of the network, for what is chosen by measured times

THROUGHPUT_BAR, BUSY_BAR, DELAY_BAR, STREAM_BAR = 0.97, 0.92, 0.95, 1.03
ONE_CORE_BAR, ONE_CORE_BATCH = 1.42, 32
LLAMA_BARS = {8: 2.8, 32: 5.5}
TLS_BAR, CHUNK_BAR, IDLE_BAR, START_BAR_S = 0.98, 0.90, 0.01, 2.0


def main() -> int:
    options = parse_options()
    end_engines_with_us()
    sizes = QUICK if options.quick else Sizes()
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds, fault_rounds=options.rounds)
    if options.requests:
        sizes = replace(sizes, batches=[int(count) for count in options.requests.split(",")])
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as scratch:
        bed = open_bed(
            options.model,
            Path(scratch),
            sizes,
            options.cores,
            options.partition or "",
            llama_python=options.llama_python,
            trace=options.trace,
        )
        return 0 if print_bars(BARS, options.bars, bed) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bars", default=",".join(BARS), help="of these, in this order")
    parser.add_argument("--model", default=OWN_MODEL)
    parser.add_argument(
        "--partition", help=f"layers of the stages; {OWN_PARTITION} of {OWN_MODEL}, else even"
    )
    parser.add_argument("--rounds", type=int, default=0, help="of each comparison, and of each fault")
    parser.add_argument("--requests", help="that decode at once, such as 8,16,32, at most 128")
    parser.add_argument("--cores", help="of the head and of the worker, such as 0,1")
    parser.add_argument("--llama-python", default="", help="without it that bar is left out")
    parser.add_argument("--trace", type=Path, default=TRACE, help="without the file that bar is left out")
    parser.add_argument("--quick", action="store_true", help="short runs: does it work?")
    options = parser.parse_args()
    own = sorted(os.sched_getaffinity(0))
    cores = [int(core) for core in options.cores.split(",")] if options.cores else [own[0], own[-1]]
    options.cores = cores[0], cores[1]
    options.bars = options.bars.split(",")
    if unknown := set(options.bars) - set(BARS):
        parser.error(f"--bars: {', '.join(sorted(unknown))} is none of {', '.join(BARS)}")
    if not options.llama_python and "llama" in options.bars:
        progress("llama is left out: give --llama-python")
        options.bars.remove("llama")
    if not options.trace.is_file() and "trace" in options.bars:
        progress(f"trace is left out: {options.trace} is not there")
        options.bars.remove("trace")
    return options


# --- Throughput ---------------------------------------------------------------------------------------


def throughput(bed: Bed) -> Found:
    """Over a cable of 1 Gbit/s against shared memory."""
    with gigabit_hosts() as hosts, ExitStack() as stack:
        pair = stack.enter_context(bed.pair(hosts, NO_SPARE))
        ring = stack.enter_context(bed.sole(hosts[0], sorted(set(bed.cores)), *bed.stages, NO_SPARE))
        place_stages(hosts[0], bed.cores, but=pair.head.process.pid)
        runs = {batch: in_rounds(bed, [pair, ring, ring], batch) for batch in bed.sizes.batches}
    rows, is_met = [], True
    for batch, rounds in runs.items():
        ratio, control = rate_ratios(rounds, 0), rate_ratios(rounds, 2)
        busy = median_of([own[0] for own in rounds], lambda run: run.slowest_busy)
        other = sum(map(differing, rounds))
        met = statistics.median(ratio) >= THROUGHPUT_BAR and not busy < BUSY_BAR and not other
        is_met &= met
        rows.append(
            [
                f"{batch}",
                *(format_samples([own[place].tokens_per_s for own in rounds]) for place in (0, 1)),
                shown(ratio),
                shown(control),
                share_text(busy),
                f"{other}",
                word(met),
            ]
        )
    columns = ["requests", "two hosts, tokens/s", "shared memory", "ratio", "control"]
    columns += ["slowest stage busy", "other tokens", f"bars {THROUGHPUT_BAR}, {BUSY_BAR:.0%}, 0"]
    return Found(markdown(columns, rows), is_met)


def delay(bed: Bed) -> Found:
    """With a delay each way, and so many requests that as many plans as fill the pipe are as large."""
    sizes, batch = bed.sizes, 2 * bed.sizes.micro_batch
    with shaped_network(mtu=JUMBO) as network, bed.pair(network.hosts, NO_SPARE) as server:
        bed.decode(server, batch, seed=0)
        near = bed.decode(server, batch, seed=1)
        stage_s = {stage: use.step_s for stage, use in near.stages.items()} or {0: near.token_s / 2}
        plans = min(plans_to_fill(stage_s, 2 * sizes.delay_s), MAX_ROWS // sizes.micro_batch)
        cases = ((sizes.delay_s, plans * sizes.micro_batch), (0.0, batch))
        take = partial(delayed, bed, server, network.hosts[1].link)
        rounds = in_turns(cases, take, sizes.rounds)
    ratios = rate_ratios(rounds, 0)
    is_met = statistics.median(ratios) >= DELAY_BAR
    rows = []
    for which, (delay_s, count) in enumerate(cases):
        runs = [own[which] for own in rounds]
        rates = format_samples([run.tokens_per_s for run in runs])
        in_flight = max(run.in_flight for run in runs)
        busy = share_text(median_of(runs, lambda run: run.slowest_busy))
        rows.append([f"{1000 * delay_s:g}", f"{count}", rates, f"{in_flight}", busy])
    columns = ["ms each way", "requests", "tokens/s", "plans in flight, most seen", "slowest stage busy"]
    steps = ", ".join(f"{1000 * seconds:.1f} ms" for seconds in stage_s.values())
    text = f"A step of {sizes.micro_batch} rows takes the stages {steps}: {plans} plans fill the pipe."
    return Found(f"{text}\n\n{markdown(columns, rows)}\n\nratio {shown(ratios)}, bar {DELAY_BAR}", is_met)


def delayed(bed: Bed, server: SoleServer, link: ShapedLink, case: tuple[float, int]) -> Decoded:
    """Decode so many requests behind a delay each way, once the engine has seen it."""
    delay_s, batch = case
    link.set_delay(delay_s)
    time.sleep(SETTLE_S)
    bed.decode(server, batch, seed=2)
    return bed.decode(server, batch, seed=3)


# --- One stream ---------------------------------------------------------------------------------------


def stream(bed: Bed) -> Found:
    """Time per token of one request against the sum of its parts, medians all.

    The stages are timed before and after each answer; their first sum by their second one is the control.
    """
    sizes, rows, ratios, control = bed.sizes, [], [], []
    plan = own_plan(bed)
    ranks = [msgspec.structs.replace(rank, tied_head="load", depth=1, link_frames=1) for rank in plan.ranks]
    context = sizes.num_input + sizes.num_output // 2
    with gigabit_hosts() as hosts, bed.pair(hosts, NO_SPARE) as server, ExitStack() as stack:
        stages = [StageAlone(rank, core, context) for rank, core in zip(ranks, bed.cores, strict=True)]
        for stage in stages:
            stack.callback(stage.close)
        trips_of = partial(ping_pong, width=plan.spec.hidden_size, trips=sizes.trips, think_s=sizes.think_s)
        rests_s = stages_step_s(stages, sizes.alone_steps, [0.0, 0.0])[::-1]  # as the other one computes
        median_gap_s(server.client, sizes.num_input, sizes.num_output, seed=0)
        before = stages_step_s(stages, sizes.alone_steps, rests_s)
        for number in range(sizes.rounds):
            token_s = median_gap_s(server.client, sizes.num_input, sizes.num_output, seed=1 + number)
            after = stages_step_s(stages, sizes.alone_steps, rests_s)
            hops_s = statistics.median(trips_of(hosts, bed.cores, bed.scratch))
            stage_s = [statistics.mean(times) for times in zip(before, after, strict=True)]
            ratios.append(token_s / (sum(stage_s) + hops_s))
            control.append(sum(before) / sum(after))
            rows.append([f"{1000 * token_s:.2f}", *(f"{1000 * part:.2f}" for part in (*stage_s, hops_s))])
            before = after
    columns = ["time per token, ms", "stage 0 alone", "stage 1 alone", "hops there and back"]
    is_met = statistics.median(ratios) <= STREAM_BAR
    found = f"time per token by the sum: {shown(ratios)}, bar {STREAM_BAR}; control {shown(control)}"
    return Found(f"{markdown(columns, rows)}\n\n{found}", is_met)


def own_plan(bed: Bed) -> LaunchPlan:
    """Return what is decided for the stages of the pair."""
    sizes = bed.sizes
    config = EngineConfig(
        model=ModelConfig(model=bed.model, max_model_len=sizes.num_input + sizes.num_output + 1),
        parallel=ParallelConfig(pipeline_parallel_size=2, threads_per_rank="1", partition=bed.partition),
    )
    return resolve(config, [HostResources.detect()])


# --- Against others -----------------------------------------------------------------------------------


def one_core(bed: Bed) -> Found:
    """Against one host with one core and the whole model."""
    batches = [batch for batch in bed.sizes.batches if batch != min(bed.sizes.batches)]
    with gigabit_hosts() as hosts, ExitStack() as stack:
        pair = stack.enter_context(bed.pair(hosts, NO_SPARE))
        sole = stack.enter_context(bed.sole(hosts[1], bed.cores[1:], NO_SPARE))
        runs = {batch: in_rounds(bed, [pair, sole, sole], batch) for batch in batches}
    is_met, rows = True, []
    for batch, rounds in runs.items():
        ratio, control = rate_ratios(rounds, 0), rate_ratios(rounds, 2)
        bar = ONE_CORE_BAR if batch == ONE_CORE_BATCH else 0.0
        met = statistics.median(ratio) >= bar
        is_met &= met
        rates = [format_samples([own[place].tokens_per_s for own in rounds]) for place in (0, 1)]
        rows.append([f"{batch}", *rates, shown(ratio), shown(control), f"{bar}: {word(met)}" if bar else ""])
    columns = ["requests", "two hosts, tokens/s", "one host, one core", "ratio", "control", "bar"]
    return Found(markdown(columns, rows), is_met)


def llama(bed: Bed) -> Found:
    """Against llama.cpp over an RPC server on each host."""
    sizes = bed.sizes
    with gigabit_hosts() as hosts, ExitStack() as stack:
        peer = start_llama(bed, hosts, stack)
        server = stack.enter_context(bed.pair(hosts, NO_SPARE))
        ratios: dict[int, list[float]] = {batch: [] for batch in LLAMA_BARS}
        rates: dict[int, list[tuple[float, float]]] = {batch: [] for batch in LLAMA_BARS}
        for number in range(sizes.rounds + 1):
            for batch in LLAMA_BARS:
                ours = bed.decode(server, batch, seed=number).tokens_per_s
                theirs = llama_rate(bed, peer, batch, number)
                if number:  # the first round warms up
                    ratios[batch].append(ours / theirs)
                    rates[batch].append((ours, theirs))
    is_met, rows = True, []
    for batch, bar in LLAMA_BARS.items():
        met = statistics.median(ratios[batch]) >= bar
        is_met &= met
        found = [format_samples([rate[place] for rate in rates[batch]]) for place in (0, 1)]
        rows.append([f"{batch}", *found, shown(ratios[batch]), f"{bar}: {word(met)}"])
    return Found(markdown(["requests", "two hosts, tokens/s", "llama.cpp RPC", "ratio", "bar"], rows), is_met)


def start_llama(bed: Bed, hosts: Sequence[Host[Any]], stack: ExitStack) -> EngineProcess:
    """Start an RPC server on each host and llama.cpp on the first one, each on the core of its host."""
    peers = Path(__file__).resolve().parent / "peers"
    places = [f"{host.address}:{RPC_PORT}" for host in hosts]
    for host, place, core in zip(hosts, places, bed.cores, strict=True):
        host.popen([bed.llama_python, str(peers / "llama_rpc.py"), str(core), place, "1"])
    sizes = bed.sizes
    words = ["--model", bed.model, "--threads", "1", "--max-batch", str(max(LLAMA_BARS)), "--stages", "2"]
    words += ["--max-len", str(sizes.num_input + sizes.num_output), "--rpc-servers", ",".join(places)]
    bound = ["taskset", "--cpu-list", str(bed.cores[0])]
    command = hosts[0].command(*bound, bed.llama_python, str(peers / "llama_peer.py"), *words)
    peer = EngineProcess("llama", command, bed.scratch / "llama.log")
    stack.callback(peer.close)
    peer.introduction(START_S)
    return peer


def llama_rate(bed: Bed, peer: EngineProcess, batch: int, seed: int) -> float:
    """Return its tokens/s, counted as ours."""
    sizes = bed.sizes
    seconds: list[float] = []
    with peer.running():
        for output in (1, sizes.num_output):
            request = {
                "batch": batch,
                "input": sizes.num_input,
                "output": output,
                "seed": 2 * seed + len(seconds),
            }
            seconds.append(float(peer.ask(request, ANSWER_S)["seconds"]))
    first_s, all_s = seconds
    return batch * (sizes.num_output - 1) / (all_s - first_s)


# --- The wire -----------------------------------------------------------------------------------------


def tls(bed: Bed) -> Found:
    """TLS against plain text."""
    batch = max(bed.sizes.batches)
    with gigabit_hosts() as hosts, ExitStack() as stack:
        safe = stack.enter_context(bed.pair(hosts, NO_SPARE))
        plain = stack.enter_context(
            bed.pair(hosts, NO_SPARE, "--insecure-links", number=1, worker_flags=["--insecure-links"])
        )
        rounds = in_rounds(bed, [safe, plain, plain], batch)
    ratio = rate_ratios(rounds, 0)
    is_met = statistics.median(ratio) >= TLS_BAR
    rates = [format_samples([own[place].tokens_per_s for own in rounds]) for place in (0, 1)]
    rows = [[f"{batch}", *rates, shown(ratio), shown(rate_ratios(rounds, 2)), f"{TLS_BAR}: {word(is_met)}"]]
    return Found(markdown(["requests", "TLS, tokens/s", "plain", "ratio", "control", "bar"], rows), is_met)


def chunk(bed: Bed) -> Found:
    """A chunk of a prompt over an idle connection, and behind a delay."""
    num_tokens, width = 512, 896
    sizes = bed.sizes
    line_s = 8 * hidden_bytes(num_tokens, width) / GIGABIT
    send = partial(send_chunks, cores=bed.cores, num_tokens=num_tokens, width=width)
    with gigabit_hosts() as hosts:
        sent_at, came_at = send(hosts, pauses_s=[0.2] * (sizes.chunks + 2))
    near = [line_s / (came - sent) for sent, came in zip(sent_at, came_at, strict=True)][2:]
    with shaped_network(mtu=JUMBO) as network:
        network.hosts[0].link.set_rate(GIGABIT)
        network.hosts[1].link.set_delay(0.025)
        bursts = [[3.0, 0.0, 0.0, 0.0] for _ in range(sizes.rounds)]
        pauses_s = [1.0, *(0.0 for _ in range(20)), *(pause for burst in bursts for pause in burst)]
        _, came_at = send(network.hosts, pauses_s=pauses_s)
    thirds = range(len(pauses_s) - 4 * len(bursts) + 2, len(pauses_s), 4)
    far = [line_s / (came_at[third] - came_at[third - 1]) for third in thirds]
    rows = []
    for name, shares in (("idle, round trip under 1 ms", near), ("third of an idle connection, 50 ms", far)):
        met = statistics.median(shares) >= CHUNK_BAR
        rows.append([name, shown(shares), f"{CHUNK_BAR:.0%}: {word(met)}"])
    text = f"{hidden_bytes(num_tokens, width) / 1e6:.2f} MB, {1000 * line_s:.1f} ms at 1 Gbit/s."
    is_met = all(statistics.median(shares) >= CHUNK_BAR for shares in (near, far))
    return Found(f"{text}\n\n{markdown(['chunk', 'share of line rate', 'bar'], rows)}", is_met)


# --- Losses, rest and start ---------------------------------------------------------------------------


def crash(bed: Bed) -> Found:
    """Everything that can happen, one after the other, again and again."""
    sizes = bed.sizes
    with (
        shaped_network(mtu=JUMBO) as network,
        bed.pair(network.hosts, "--heartbeat-limit", "3") as server,
    ):
        runs = FaultRuns(
            server,
            network.hosts,
            num_requests=8,
            num_input=sizes.num_input,
            num_output=sizes.fault_output,
            settle_s=sizes.settle_s,
        )
        outcomes: list[Outcome] = []
        for number in range(sizes.fault_rounds):
            for fault in FAULTS:
                outcomes.append(runs.run(fault))
                progress(f"round {number + 1}: {fault.name}: {outcomes[-1].pause_s:.1f} s")
    text, is_met = fault_table(FAULTS, outcomes, runs.reading_s)
    return Found(f"Reading the weights of a stage took {runs.reading_s:.1f} s.\n\n{text}", is_met)


def idle(bed: Bed) -> Found:
    """CPU time of processes that have nothing to do."""
    sizes = bed.sizes
    with gigabit_hosts() as hosts, bed.pair(hosts) as server:
        bed.decode(server, min(sizes.batches), seed=0)
        time.sleep(sizes.settle_s)
        is_met, rows = True, []
        for name, shares in zip(("head", "worker"), cpu_shares(hosts, sizes.idle_s), strict=True):
            together = sum(share.together for share in shares.values())
            met = together <= IDLE_BAR
            is_met &= met
            rows += [
                [name, title_of(each)[-60:], f"{share.together:.2%}", ""] for each, share in shares.items()
            ]
            rows.append([name, "together", f"{together:.2%}", f"{IDLE_BAR:.0%}: {word(met)}"])
    return Found(markdown(["host", "process", "of a core", "bar"], rows), is_met)


def start(bed: Bed) -> Found:
    """From the start of a worker, for which the head waits, to serving; and the same on one host."""
    times: dict[str, list[float]] = {"two hosts": [], "one host": []}
    with gigabit_hosts() as hosts:
        for number in range(bed.sizes.rounds + 1):
            for name, took_s in (("two hosts", joined_s(bed, hosts)), ("one host", started_s(bed, hosts[0]))):
                if number:  # in the first round kernels are built, and files come into memory
                    times[name].append(took_s)
    more_s = [two - one for two, one in zip(*times.values(), strict=True)]
    is_met = statistics.median(more_s) <= START_BAR_S
    rows = [[name, format_samples(found)] for name, found in times.items()]
    rows.append(["more", format_samples(more_s)])
    return Found(f"{markdown(['start', 'seconds'], rows)}\n\nbar: {START_BAR_S:g} s more", is_met)


def joined_s(bed: Bed, hosts: Sequence[Host[Any]]) -> float:
    server = bed.pair(hosts, NO_SPARE)
    try:
        server.await_worker_wanted()
        time.sleep(1.0)
        began = server.start_worker().started_at
        return server.await_event("engine_ready") - began
    finally:
        server.close()


def started_s(bed: Bed, host: Host[Any]) -> float:
    server = bed.sole(host, sorted(set(bed.cores)), *bed.stages, NO_SPARE)
    try:
        return server.await_event("engine_ready") - server.head.started_at
    finally:
        server.close()


BARS: Mapping[str, Callable[[Bed], Found]] = {
    "throughput": throughput,
    "delay": delay,
    "stream": stream,
    "one-core": one_core,
    "llama": llama,
    "tls": tls,
    "chunk": chunk,
    "crash": crash,
    "trace": trace,
    "idle": idle,
    "start": start,
}


if __name__ == "__main__":
    sys.exit(main())

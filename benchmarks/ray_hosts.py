"""An engine over two hosts whose worker Ray starts, against the same engine with the plain agent.

    python benchmarks/ray_hosts.py [--bars throughput,idle,losses] [--model 0.5b] [--rounds 30] [--quick]

Two network namespaces of this machine are the hosts, each with a core and a node of a real Ray cluster; the
model and its stages are as in `two_hosts.py`. The bars:

- throughput: tokens/s with Ray, at least 99 % of those with the plain agent; engines take turns, and the
  plain one against itself is the control.
- idle: CPU time of our processes on each host, of an engine without requests; what Ray takes is reported,
  with the threads of its library in our driver and actor, which wake up by themselves.
- losses: the longest pause of running requests when a stage, the worker, its actor or all of the worker's
  host is killed, with both engines. The host stays away, and the head takes over its stage.

`--quick` makes everything small, to see that it works. Needs `penstock[ray]`. Prints Markdown for
docs/perf-log.md; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cpu_peers import end_engines_with_us, progress
from cpu_time import CpuTime
from host_bed import (
    GIGABIT,
    NO_SPARE,
    OWN_MODEL,
    QUICK,
    Bed,
    Found,
    Sizes,
    cpu_shares,
    gigabit_hosts,
    in_rounds,
    open_bed,
    print_bars,
    rate_ratios,
    word,
)
from host_load import Ids, decode_disturbed, differing, prompts
from peers.report import format_samples, markdown
from ratios import bootstrap, shown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from host_faults import NOTICED_LIMIT_S, Hosts, Strike, kill_stage, kill_worker, processes
from ray_nodes import RayNodes, RayServer, ray_nodes
from served import title_of
from served_hosts import SoleServer

THROUGHPUT_BAR, IDLE_BAR = 0.99, 0.01
PAUSE_BAR = 1.1  # of the plain agent's pause
REJOIN_S = 2.0  # for which a lost host may come back
OURS = ("penstock", "ray::RayWorker")  # in titles
RAYS_CLIENTS = ("ray_driver", "ray::RayWorker")  # in titles of those that hold Ray's library


def main() -> int:
    options = parse_options()
    end_engines_with_us()
    sizes = QUICK if options.quick else Sizes(batches=(16,), num_output=65, rounds=30)
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="ray-hosts-") as scratch:
        bed = open_bed(options.model, Path(scratch), sizes)
        return 0 if print_bars(BARS, options.bars.split(","), bed) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bars", default=",".join(BARS), help="of these, in this order")
    parser.add_argument("--model", default=OWN_MODEL)
    parser.add_argument("--rounds", type=int, default=0, help="of the comparison of tokens/s")
    parser.add_argument("--quick", action="store_true", help="short runs: does it work?")
    return parser.parse_args()


def started_by_ray(bed: Bed, nodes: RayNodes, *flags: str) -> RayServer:
    own = Path(tempfile.mkdtemp(dir=bed.scratch))
    return RayServer(nodes, bed.model, own, bed.flags(*bed.stages, *flags), cores=bed.cores[:1])


def throughput(bed: Bed) -> Found:
    """Tokens/s of both engines, whose processes share the same two cores."""
    rows, is_met = [], True
    with ray_nodes(cores=[[core] for core in bed.cores]) as nodes, ExitStack() as stack:
        for host in nodes.hosts:
            host.link.set_rate(GIGABIT)
        ray = stack.enter_context(started_by_ray(bed, nodes, NO_SPARE))
        plain = stack.enter_context(bed.pair(nodes.hosts, NO_SPARE, number=1))
        runs = {batch: in_rounds(bed, [ray, plain, plain], batch) for batch in bed.sizes.batches}
    for batch, rounds in runs.items():
        ratio, control = rate_ratios(rounds, 0), rate_ratios(rounds, 2)
        other = sum(map(differing, rounds))
        met = bootstrap(ratio, seed=7)[1] >= THROUGHPUT_BAR and not other
        is_met &= met
        rates = [format_samples([own[place].tokens_per_s for own in rounds]) for place in (0, 1)]
        rows.append([f"{batch}", *rates, shown(ratio), shown(control), f"{other}", word(met)])
    columns = ["requests", "Ray, tokens/s", "plain agent", "ratio", "control", "other tokens"]
    return Found(markdown([*columns, f"bars {THROUGHPUT_BAR}, 0"], rows), is_met)


def idle(bed: Bed) -> Found:
    """CPU time of processes that have nothing to do: ours, and Ray's."""
    sizes, is_met, rows = bed.sizes, True, []
    with ray_nodes(cores=[[core] for core in bed.cores]) as nodes, started_by_ray(bed, nodes) as server:
        bed.decode(server, min(sizes.batches), seed=0)
        time.sleep(sizes.settle_s)
        for name, shares in zip(("head", "worker"), cpu_shares(nodes.hosts, sizes.idle_s), strict=True):
            own = library = nodes_own = 0.0
            for process, share in shares.items():
                title = title_of(process)
                if not is_ours(title):
                    nodes_own += share.together
                    continue
                ours = own_share(title, share)
                own += ours
                library += share.together - ours
                rows.append([name, title[-60:], f"{ours:.2%}", ""])
            met = own <= IDLE_BAR
            is_met &= met
            rows.append([name, "ours together", f"{own:.2%}", f"{IDLE_BAR:.0%}: {word(met)}"])
            rows.append([name, "threads of Ray's library in ours", f"{library:.2%}", ""])
            rows.append([name, "Ray's own processes", f"{nodes_own:.2%}", ""])
    return Found(markdown(["host", "process", "of a core", "bar"], rows), is_met)


def is_ours(title: str) -> bool:
    """Return whether a process is there because of the engine."""
    return any(part in title for part in OURS)


def own_share(title: str, share: CpuTime) -> float:
    """Return what our code takes of a core: without the threads of Ray's library, where it is."""
    return share.own if any(part in title for part in RAYS_CLIENTS) else share.together


# --- Losses -------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """What is killed.

    Attributes:
        with_ray, plain: kill it, and start again by hand the worker of a plain agent.
    """

    name: str
    with_ray: Callable[[RayServer, Hosts], None]
    plain: Strike


def kill_titled(part: str) -> Callable[[RayServer, Hosts], None]:
    """Return what kills the process on the worker's host that has this in its title."""
    return lambda server, hosts: server.nodes.kill(part, 1)


def kill_host(_: SoleServer, hosts: Hosts) -> None:
    """Kill all that runs on the worker's host; nobody starts it again."""
    for process in processes(hosts[1]):
        process.kill()


LOSSES = (
    Loss("kill -9 of the worker's stage", kill_titled("penstock stage 1"), kill_stage(1)),
    Loss("kill -9 of the worker", kill_titled("tied_process"), kill_worker),
    Loss("kill -9 of its actor; of the worker", kill_titled("ray::RayWorker"), kill_worker),
    Loss("kill -9 of all on the worker's host", kill_host, kill_host),
)


class Pause(NamedTuple):
    """What a loss did to running requests."""

    seconds: float
    is_same: bool


def losses(bed: Bed) -> Found:
    """Pauses with both engines, one after the other, again and again."""
    found: dict[tuple[str, bool], list[Pause]] = {}
    expected = undisturbed(bed)
    for number in range(bed.sizes.fault_rounds):
        for by_ray in (True, False) if number % 2 == 0 else (False, True):
            with ray_nodes(cores=[[core] for core in bed.cores]) as nodes:
                for loss in LOSSES:
                    pause = paused(bed, nodes, loss, expected, by_ray=by_ray)
                    found.setdefault((loss.name, by_ray), []).append(pause)
                    progress(f"{'Ray' if by_ray else 'plain'}: {loss.name}: {pause.seconds:.1f} s")
    rows, is_met = [], True
    for loss in LOSSES:
        ray, plain = found[loss.name, True], found[loss.name, False]
        seconds = [[pause.seconds for pause in each] for each in (ray, plain)]
        by_ray_s, by_plain_s = map(statistics.median, seconds)
        num_other = sum(not pause.is_same for pause in (*ray, *plain))
        met = not num_other and by_ray_s <= PAUSE_BAR * by_plain_s
        is_met &= met
        samples = map(format_samples, seconds)
        rows.append([loss.name, *samples, f"{by_ray_s / by_plain_s:.2f}", f"{num_other}", word(met)])
    columns = ["what happened", "Ray, longest pause, s", "plain agent", "by medians", "other tokens"]
    columns.append(f"bars {PAUSE_BAR}, 0")
    return Found(markdown(columns, rows), is_met)


def undisturbed(bed: Bed) -> Ids:
    """Return what the requests of `paused` are answered when nothing happens."""
    with gigabit_hosts() as hosts, bed.pair(hosts) as server:
        return server.client.complete(asked_in_losses(bed), bed.sizes.fault_output)


def asked_in_losses(bed: Bed) -> Ids:
    return prompts(8, bed.sizes.num_input, seed=17)


def paused(bed: Bed, nodes: RayNodes, loss: Loss, expected: Ids, *, by_ray: bool) -> Pause:
    """Let something happen to a new engine, whose stages are on both hosts."""
    sizes, hosts = bed.sizes, nodes.hosts
    flags = ["--rejoin-timeout", f"{REJOIN_S:g}"]
    with started_by_ray(bed, nodes, *flags) if by_ray else bed.pair(hosts, *flags) as server:
        time.sleep(sizes.settle_s)  # for a process that waits to take the place of what is lost
        strike: Callable[[Any, Hosts], None] = loss.with_ray if by_ray else loss.plain
        first = len(server.head.lines)
        run = decode_disturbed(
            server.client,
            asked_in_losses(bed),
            sizes.fault_output,
            partial(strike, server, hosts),
            after=sizes.fault_output // 6,
        )
        server.await_event("recovered", NOTICED_LIMIT_S, first)
    return Pause(run.pause_s, run.ids == expected)


BARS: Mapping[str, Callable[[Bed], Found]] = {"throughput": throughput, "idle": idle, "losses": losses}


if __name__ == "__main__":
    sys.exit(main())

"""Where the bars of `two_hosts.py` are measured: servers, networks and sizes; and how it is written down."""

from __future__ import annotations

import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from cpu_peers import commit, machine, progress
from cpu_time import CpuTime, split_cpu_time
from host_load import Decoded, decode
from peers.checkpoint import FULL_SHAPE, make_checkpoint
from ratios import in_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from host_faults import processes
from network import CableLink, Host, cable_network
from served import title_of
from served_hosts import PairServer, SoleServer

GIGABIT = 1_000_000_000
MAX_ROWS = 128
OWN_MODEL = "0.5b"
OWN_PARTITION = "15,9"  # the head is worth eight layers, and core and API, on the first core, one
NO_SPARE = "--no-warm-spare"  # it would start beside what is measured


class Found(NamedTuple):
    """What was measured for a bar, as Markdown, and whether it is met."""

    text: str
    is_met: bool


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    batches: Sequence[int] = (8, 16, 32)
    num_input: int = 32
    num_output: int = 129
    rounds: int = 5
    fault_rounds: int = 3
    fault_output: int = 192
    settle_s: float = 15.0  # of an engine, until its spare processes wait
    idle_s: float = 30.0
    delay_s: float = 0.05
    micro_batch: int = 8
    trips: int = 200
    think_s: float = 0.01
    alone_steps: int = 40  # of a stage that is timed alone
    chunks: int = 20
    trace_requests: int = 500
    trace_stretch: float = 4.0
    lose_every_s: float = 20.0


QUICK = Sizes(
    batches=(2, 4),
    num_input=8,
    num_output=24,
    rounds=2,
    fault_rounds=1,
    fault_output=1200,
    settle_s=2.0,
    idle_s=3.0,
    delay_s=0.01,
    micro_batch=2,
    trips=20,
    think_s=0.001,
    alone_steps=3,
    chunks=3,
    trace_requests=40,
    trace_stretch=3.0,
    lose_every_s=8.0,
)


@dataclass(frozen=True, kw_only=True)
class Bed:
    """What all bars share.

    Attributes:
        models: directory of the model; "" for the embedded one.
        cores: of the head, of the worker.
        scratch: directory for what the programs keep.
        partition: layers of the two stages.
        llama_python: interpreter with llama.cpp; "": there is none.
        trace: file of a trace; "." where none is played.
    """

    model: str
    models: str
    cores: tuple[int, int]
    scratch: Path
    sizes: Sizes
    partition: str = "even"
    llama_python: str = ""
    trace: Path = Path()

    @property
    def stages(self) -> list[str]:
        """The settings of two stages."""
        return ["--pp", "2", "--partition", self.partition]

    def flags(self, *more: str) -> list[str]:
        """The settings that all servers of a comparison have."""
        sizes = self.sizes
        length = max(sizes.num_input + sizes.num_output, sizes.fault_output + sizes.num_input)
        words = {
            "--threads-per-rank": 1,
            "--max-model-len": length,
            "--max-num-seqs": MAX_ROWS,
            "--kv-cache-bytes": 1 << 29,
        }
        flags = [str(word) for pair in words.items() for word in pair]
        return [*flags, "--no-enable-prefix-caching", "--speculative-method", "off", *more]

    def pair(
        self, hosts: Sequence[Host[Any]], *flags: str, number: int = 0, worker_flags: Sequence[str] = ()
    ) -> PairServer:
        """A server over two hosts, each of which has one core."""
        return PairServer(
            hosts,
            self.model,
            Path(tempfile.mkdtemp(dir=self.scratch)),
            self.flags(*self.stages, *flags),
            models=self.models,
            worker_flags=worker_flags,
            cores=[[core] for core in self.cores],
            number=number,
        )

    def sole(self, host: Host[Any], cores: Sequence[int], *flags: str, number: int = 1) -> SoleServer:
        """A server on one host."""
        return SoleServer(host, self.model, self.flags(*flags), cores=cores, number=number)

    def decode(self, server: SoleServer, batch: int, seed: int) -> Decoded:
        """Decode a batch; the same prompts for the same seed."""
        return decode(server.client, batch, self.sizes.num_input, self.sizes.num_output, seed)


def open_bed(
    model: str,
    scratch: Path,
    sizes: Sizes,
    cores: tuple[int, int] | None = None,
    partition: str = "",
    **more: Any,
) -> Bed:
    """Return the bed of a model, which is made if it is our own, and print what is measured where.

    Args:
        model: `OWN_MODEL`, a directory, or the embedded one.
        cores: None: the first and the last one of this process.
        partition: empty: what fits the model.
        more: further attributes of the bed.
    """
    own, is_ours = sorted(os.sched_getaffinity(0)), model == OWN_MODEL
    print(f"machine: {machine()}; commit {commit()}; model {model}", flush=True)
    if is_ours:
        model = str(scratch / "model")
        make_checkpoint(Path(model), FULL_SHAPE)
    return Bed(
        model=model,
        models=model if os.path.isdir(model) else "",
        cores=cores or (own[0], own[-1]),
        scratch=scratch,
        sizes=sizes,
        partition=partition or (OWN_PARTITION if is_ours else "even"),
        **more,
    )


def print_bars(bars: Mapping[str, Callable[[Bed], Found]], names: Sequence[str], bed: Bed) -> bool:
    """Measure and print these bars, in this order; return whether all are met."""
    all_met = True
    for name in names:
        progress(name)
        found = bars[name](bed)
        print(f"\n**{name}**\n\n{found.text}\n\n{name}: {word(found.is_met)}", flush=True)
        all_met &= found.is_met
    return all_met


@contextmanager
def gigabit_hosts() -> Iterator[Sequence[Host[CableLink]]]:
    """Two hosts with a cable of 1 Gbit/s."""
    with cable_network() as network:
        for host in network.hosts:
            host.link.set_rate(GIGABIT)
        yield network.hosts


def in_rounds(bed: Bed, servers: Sequence[SoleServer], batch: int) -> list[list[Decoded]]:
    """Decode with each server in turns, a warm-up before; the runs of each, round by round."""
    turns = itertools.count()

    def take(which: int) -> Decoded:
        seed = next(turns) // len(servers)  # all are asked the same in a round
        return bed.decode(servers[which], batch, seed)

    return in_turns(range(len(servers)), take, bed.sizes.rounds, warm_up=1)


def rate_ratios(rounds: Sequence[Sequence[Decoded]], which: int, below: int = 1) -> list[float]:
    """Return the ratios of tokens/s, round by round."""
    return [runs[which].tokens_per_s / runs[below].tokens_per_s for runs in rounds]


def place_stages(host: Host[Any], cores: Sequence[int], but: int) -> None:
    """Bind the processes of a server of two stages as those of two hosts are: the last stage to the second
    core, and all others to the first.

    Args:
        but: head of another server on this host, whose processes stay as they are.
    """
    others = {but, *(child.pid for child in processes(host) if child.ppid() == but)}
    for process in processes(host):
        if process.pid in others:
            continue
        core = cores[title_of(process).startswith("penstock stage 1")]
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def cpu_shares(hosts: Sequence[Host[Any]], seconds: float) -> list[dict[psutil.Process, CpuTime]]:
    """Return what the processes of each host take of a core, in so many seconds from now."""
    before = {process.pid: split_cpu_time(process.pid) for host in hosts for process in processes(host)}
    time.sleep(seconds)
    return [
        {process: _share(before.get(process.pid), process.pid, seconds) for process in processes(host)}
        for host in hosts
    ]


def _share(before: CpuTime | None, pid: int, seconds: float) -> CpuTime:
    own, libraries = before or CpuTime(0.0, 0.0)
    now = split_cpu_time(pid)
    return CpuTime((now.own - own) / seconds, (now.libraries - libraries) / seconds)


def word(is_met: bool) -> str:
    return "met" if is_met else "missed"


def share_text(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"

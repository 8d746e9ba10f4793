"""Round trips and bytes a second of links: a ring on one host, TCP, and TCP with TLS, in turns.

    python benchmarks/stream_link.py [--kib 1,4,16,64,256,1024,4096] [--rounds 5] [--trips 200] [--mib 64]
                                     [--host 127.0.0.1] [--cores 0,1]

Two processes, each on a core of its own, have a link in each direction over every carrier. For each size of
a frame the carriers take turns: first frames go there and back one at a time, then as many as make up `--mib`
go one way without a pause, until one small frame says that all have come. Both copies, the checksums and the
threads of the links are in the figures. Over loopback there is no wire: what is measured is what the carrier
itself costs, and `share of a core` says how much processor time both ends took for a second of sending.

Prints Markdown, the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from peers.report import markdown
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from carriers import local, plain_text, stream, tls
from penstock.hosts.rank_host import LinkNeed
from penstock.pipeline.links.frame import FrameHeader, FrameKind, frame_bytes
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.link_carriers import open_link
from penstock.process.control import descriptors_of
from penstock.process.endpoints import LinkEndpoint, RankEndpoints, SocketHandle
from penstock.workloads.summaries import percentile

WIDTH, NUM_TENSORS = 256, 2  # bfloat16: a token is 1 KiB
NUM_FRAMES = 4
WARM_UP_TRIPS = 5  # of each turn; not counted
TIMEOUT_S = 60.0
CARRIERS = ("ring", "tcp", "tls")
Ends = tuple[LinkEndpoint, LinkEndpoint]  # of the sender; of the receiver


class Task(msgspec.Struct):
    """What both processes do, in the same order."""

    kib: list[int]
    rounds: int
    trips: int
    mib: int

    def turns(self) -> Iterator[tuple[int, str]]:
        """Size and carrier of each turn."""
        for _ in range(self.rounds):
            for kib in self.kib:
                for carrier in CARRIERS:
                    yield kib, carrier

    def num_streamed(self, kib: int) -> int:
        """Frames of this size that go one way without a pause."""
        return max(NUM_FRAMES, self.mib * 1024 // kib)


class Told(msgspec.Struct):
    """What the second process is told."""

    task: Task
    core: int
    incoming: dict[str, LinkEndpoint]
    outgoing: dict[str, LinkEndpoint]


class Turn(msgspec.Struct):
    """What one turn found."""

    trips_us: list[float]
    bytes_per_s: float
    core_share: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kib", default="1,4,16,64,256,1024,4096", help="sizes of frames")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trips", type=int, default=200, help="there and back, of each turn")
    parser.add_argument("--mib", type=int, default=64, help="that go one way, in each turn")
    parser.add_argument("--host", default="127.0.0.1", help="address at which streams are accepted")
    parser.add_argument("--cores", default="0,1", help="of the two ends")
    parser.add_argument("--told", help=argparse.SUPPRESS)  # of the second process
    options = parser.parse_args()
    if options.told:
        answer(msgspec.json.decode(options.told, type=Told))
        return 0
    kib = [int(size) for size in options.kib.split(",")]
    task = Task(kib, options.rounds, options.trips, options.mib)
    cores = [int(core) for core in options.cores.split(",")]
    print(markdown(*table(kib, measure(task, options.host, cores))))
    return 0


def table(
    kib: Sequence[int], found: Mapping[tuple[int, str], Sequence[Turn]]
) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: medians of the rounds."""
    rows = []
    for size in kib:
        for carrier in CARRIERS:
            turns = found[size, carrier]
            trips = [statistics.median(percentile(turn.trips_us, q) for turn in turns) for q in (50, 99)]
            rate = statistics.median(turn.bytes_per_s for turn in turns)
            share = statistics.median(turn.core_share for turn in turns)
            figures = [*(f"{trip:.0f}" for trip in trips), f"{rate / 1e6:.0f}", f"{share:.2f}"]
            rows.append([f"{size}", carrier, *figures])
    return ["KiB", "carrier", "round trip us", "p99 us", "MB/s", "share of a core"], rows


def measure(task: Task, host: str, cores: Sequence[int]) -> dict[tuple[int, str], list[Turn]]:
    """Turns of each size and carrier."""
    need = LinkNeed(
        frame_bytes=frame_bytes(
            max_num_tokens=max(task.kib), width=WIDTH, itemsize=2, num_tensors=NUM_TENSORS
        ),
        num_frames=NUM_FRAMES,
    )
    found: dict[tuple[int, str], list[Turn]] = {}
    with ExitStack() as closing:
        there, back = ({name: make_ends(name, need, closing, host) for name in CARRIERS} for _ in range(2))
        told = Told(
            task,
            cores[1],
            incoming={name: receiver for name, (_, receiver) in there.items()},
            outgoing={name: sender for name, (sender, _) in back.items()},
        )
        other = start(told)
        closing.callback(other.wait)
        closing.callback(other.kill)
        os.sched_setaffinity(0, {cores[0]})
        outgoing = opened({name: sender for name, (sender, _) in there.items()}, closing)
        incoming = opened({name: receiver for name, (_, receiver) in back.items()}, closing)
        for kib, name in task.turns():
            turn = take_turn(task, kib, outgoing[name], incoming[name], other.pid)
            found.setdefault((kib, name), []).append(turn)
    return found


def make_ends(name: str, need: LinkNeed, closing: ExitStack, host: str) -> Ends:
    if name == "ring":
        joining, accepting = local("ring")(need, closing)
        return joining, accepting
    ends = stream(need, closing, tls if name == "tls" else plain_text, host=host)
    sender, receiver = (msgspec.convert(msgspec.to_builtins(end.endpoint), LinkEndpoint) for end in ends)
    return sender, receiver


def start(told: Told) -> subprocess.Popen[bytes]:
    """The second process, which inherits its ends."""
    nobody = SocketHandle(handle_fd=0)
    endpoints = [*told.incoming.values(), *told.outgoing.values()]
    carried = RankEndpoints(epoch=0, plans=nobody, tokens=[], outgoing=endpoints)
    inherited = [fd for fd in descriptors_of(carried) if fd != nobody.handle_fd]
    text = msgspec.json.encode(told).decode()
    return subprocess.Popen([sys.executable, __file__, "--told", text], pass_fds=inherited)


def opened(endpoints: Mapping[str, LinkEndpoint], closing: ExitStack) -> dict[str, Link]:
    links = {name: open_link(endpoint, name, TIMEOUT_S) for name, endpoint in endpoints.items()}
    for link in links.values():
        closing.callback(link.close)
    return links


def take_turn(task: Task, kib: int, outgoing: Link, incoming: Link, other_pid: int) -> Turn:
    """Of the first process."""
    header, tensors = frame_of(kib)
    small, answer_tensors = frame_of(1)
    trips_us = []
    for _ in range(task.trips + WARM_UP_TRIPS):
        began = time.perf_counter_ns()
        outgoing.send_frame(header, tensors)
        incoming.receive_frame(header, tensors).wait()
        trips_us.append((time.perf_counter_ns() - began) / 1e3)
    began_s, cpu_s, num_frames = time.perf_counter(), both_cpu_s(other_pid), task.num_streamed(kib)
    for _ in range(num_frames):
        outgoing.send_frame(header, tensors)
    incoming.receive_frame(small, answer_tensors).wait()
    wall_s = time.perf_counter() - began_s
    return Turn(
        trips_us[WARM_UP_TRIPS:], num_frames * kib * 1024 / wall_s, (both_cpu_s(other_pid) - cpu_s) / wall_s
    )


def answer(told: Told) -> None:
    """Take part in all turns as the second process."""
    os.sched_setaffinity(0, {told.core})
    with ExitStack() as closing:
        incoming, outgoing = opened(told.incoming, closing), opened(told.outgoing, closing)
        small, answer_tensors = frame_of(1)
        for kib, name in told.task.turns():
            header, tensors = frame_of(kib)
            for _ in range(told.task.trips + WARM_UP_TRIPS):
                incoming[name].receive_frame(header, tensors).wait()
                outgoing[name].send_frame(header, tensors)
            for _ in range(told.task.num_streamed(kib)):
                incoming[name].receive_frame(header, tensors).wait()
            outgoing[name].send_frame(small, answer_tensors)


def frame_of(kib: int) -> tuple[FrameHeader, list[Tensor]]:
    header = FrameHeader(
        epoch=0,
        step_id=0,
        kind=FrameKind.HIDDEN,
        num_tokens=kib,
        width=WIDTH,
        dtype="bfloat16",
        num_tensors=NUM_TENSORS,
        digest=0,
    )
    return header, [torch.ones(kib, WIDTH, dtype=torch.bfloat16) for _ in range(NUM_TENSORS)]


def both_cpu_s(other_pid: int) -> float:
    """Processor time of both processes so far."""
    fields = Path(f"/proc/{other_pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())

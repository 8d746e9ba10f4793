"""One-way latency of a link between two stages: 32 rows of two tensors, width 896, bfloat16, shared memory.

    python benchmarks/link_latency.py [--pauses-ms 0,1,10] [--frames 2000] [--cores 0,1]

Two processes, each on a core of its own, in turns: one sends a frame, the other answers on a link of its own.
A frame's latency runs from the call of `send` until the tensors of the receiver are filled, both copies
included, by the clock that all processes share. The receiver posts its receive and waits as a stage does: it
spins for 20 us and then sleeps. With a pause before each frame it therefore sleeps; without one it is caught
spinning, or nearly so. `copying` is the mean of what the two ends count as such. Under load two further
processes spin, one on each core.

What the machine itself takes is measured by the same exchange without a link: two plain copies into shared
memory and out of it, and a counter that the receiver never stops looking at. Prints Markdown for
docs/perf-log.md, and fails when a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from peers.report import markdown

from penstock.pipeline.links.frame import FrameHeader, FrameKind, frame_bytes
from penstock.pipeline.links.ring import SharedMemoryLink
from penstock.pipeline.links.ring_memory import create_ring
from penstock.process.endpoints import RingHandle
from penstock.trace.phases import Phase, PhaseClock
from penstock.workloads.summaries import percentile

ROWS, WIDTH, NUM_TENSORS = 32, 896, 2
HEAD_BYTES = 64
TIMEOUT_S = 30.0
WARM_UP_FRAMES = 100
MEDIAN_BAR_US, P99_BAR_US, LOADED_P99_BAR_US = 20.0, 60.0, 2000.0
BUSY = "while True: pass"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--pauses-ms", default="0,1,10", help="before each frame; the receiver waits meanwhile"
    )
    parser.add_argument("--frames", type=int, default=2000, help="each way")
    parser.add_argument("--cores", default="0,1", help="of the two ends")
    parser.add_argument("--end", help=argparse.SUPPRESS)  # of the second process: what it is told, as JSON
    options = parser.parse_args()
    if options.end:
        answer_frames(**json.loads(options.end))
        return 0
    cores = [int(core) for core in options.cores.split(",")]
    rows, fine = [], True
    for pause_ms in map(float, options.pauses_ms.split(",")):
        for loaded in (False, True):
            for plain in (False, True):
                with busy_processes(cores if loaded else []):
                    found, copying = latencies_us(options.frames, pause_ms / 1000, cores, plain)
                row, met = table_row(pause_ms, loaded, plain, found, copying)
                rows.append(row)
                fine &= met
    columns = ["pause ms", "beside it", "through", "median us", "p99 us", "longest us", "copying us", "bars"]
    print(markdown(columns, rows))
    return 0 if fine else 1


def table_row(
    pause_ms: float, loaded: bool, plain: bool, found: Sequence[float], copying_us: float
) -> tuple[list[str], bool]:
    """A line of the table, and whether its bars are met; plain copies have none."""
    median, p99 = percentile(found, 50), percentile(found, 99)
    load = "a busy process on each core" if loaded else "nothing"
    begin, numbers = [f"{pause_ms:g}", load], [f"{median:.1f}", f"{p99:.1f}", f"{max(found):.0f}"]
    if plain:
        return [*begin, "plain copies", *numbers, "-", "-"], True
    bars = (math.inf, LOADED_P99_BAR_US) if loaded else (MEDIAN_BAR_US, P99_BAR_US)
    met = median < bars[0] and p99 < bars[1]
    wanted = f"p99 {bars[1]:g}" if loaded else f"median {bars[0]:g}, p99 {bars[1]:g}"
    word = f"{wanted}: {'met' if met else 'missed'}"
    return [*begin, "link", *numbers, f"{copying_us:.1f}", word], met


@contextlib.contextmanager
def busy_processes(cores: Sequence[int]) -> Iterator[None]:
    """A process that spins, on each of the cores."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in cores]
    try:
        for process, core in zip(processes, cores, strict=True):
            os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def latencies_us(
    num_frames: int, pause_s: float, cores: Sequence[int], plain: bool
) -> tuple[list[float], float]:
    """Of all frames of both directions, but for the first; and the mean of the copying into and out."""
    size = frame_bytes(
        max_num_tokens=ROWS, width=WIDTH, itemsize=torch.bfloat16.itemsize, num_tensors=NUM_TENSORS
    )
    there, back = create_ring(size, 1), create_ring(size, 1)
    rings = (there, back)
    told = {
        "core": cores[1],
        "incoming": as_numbers(there),
        "outgoing": as_numbers(back),
        "num_frames": num_frames,
        "pause_s": pause_s,
        "plain": plain,
    }
    descriptors = [fd for ring in rings for fd in (ring.memory_fd, ring.data_fd, ring.space_fd)]
    command = [sys.executable, __file__, "--end", json.dumps(told)]
    process = subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, {cores[0]})
    try:
        end = make_end(there, back, plain)
        sent, received, copying_ns = exchange(end, num_frames, pause_s, begins=True)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        os.sched_setaffinity(0, set(cores))
        process.kill()
        process.wait()
        for fd in descriptors:
            os.close(fd)
    their_sent, their_received, their_copying_ns = json.loads(output)
    copying_us = (copying_ns + their_copying_ns) / (len(sent) + len(received)) / 1e3
    return one_way_us(sent, their_received) + one_way_us(their_sent, received), copying_us


def one_way_us(sent_ns: Sequence[int], received_ns: Sequence[int]) -> list[float]:
    pairs = list(zip(sent_ns, received_ns, strict=True))[WARM_UP_FRAMES:]
    return [(received - sent) / 1e3 for sent, received in pairs]


def answer_frames(
    core: int,
    incoming: dict[str, int],
    outgoing: dict[str, int],
    num_frames: int,
    pause_s: float,
    plain: bool,
) -> None:
    """The second process: answers each frame; writes when it sent and received as JSON."""
    os.sched_setaffinity(0, {core})
    end = make_end(RingHandle(**outgoing), RingHandle(**incoming), plain)
    print(json.dumps(exchange(end, num_frames, pause_s, begins=False)))


def make_end(outgoing: RingHandle, incoming: RingHandle, plain: bool) -> LinkEnd | PlainEnd:
    torch.set_num_threads(1)
    return PlainEnd(outgoing, incoming) if plain else LinkEnd(outgoing, incoming)


class LinkEnd:
    """A link to the other process, and one from it."""

    def __init__(self, outgoing: RingHandle, incoming: RingHandle) -> None:
        self._outgoing = SharedMemoryLink(outgoing, "out", TIMEOUT_S)
        self._incoming = SharedMemoryLink(incoming, "in", TIMEOUT_S)
        self._tensors = [torch.randn(ROWS, WIDTH).to(torch.bfloat16) for _ in range(NUM_TENSORS)]
        self._buffers = [torch.empty_like(tensor) for tensor in self._tensors]
        self.clock = PhaseClock()  # as a stage has one

    def send(self, step: int) -> int:
        """When it began, in nanoseconds."""
        header, now = make_header(step), time.monotonic_ns()
        self._outgoing.send_frame(header, self._tensors, self.clock)
        return now

    def receive(self, step: int) -> int:
        """When the tensors were there, in nanoseconds."""
        self._incoming.receive_frame(make_header(step), self._buffers, (), self.clock).wait()
        return time.monotonic_ns()


class PlainEnd:
    """Memory that both processes map: a counter of frames, then the tensors."""

    def __init__(self, outgoing: RingHandle, incoming: RingHandle) -> None:
        self._own = torch.randn(NUM_TENSORS, ROWS, WIDTH).to(torch.bfloat16)
        self._outgoing, self._incoming = (
            torch.frombuffer(mmap.mmap(ring.memory_fd, 0), dtype=torch.uint8)[: HEAD_BYTES + self._own.nbytes]
            for ring in (outgoing, incoming)
        )
        self._written, self._there = (
            end[:HEAD_BYTES].numpy().data.cast("Q") for end in (self._outgoing, self._incoming)
        )
        self.clock = PhaseClock()

    def send(self, step: int) -> int:
        now = time.monotonic_ns()
        ctypes.memmove(self._outgoing.data_ptr() + HEAD_BYTES, self._own.data_ptr(), self._own.nbytes)
        self._written[0] = step + 1
        return now

    def receive(self, step: int) -> int:
        while self._there[0] != step + 1:
            pass
        ctypes.memmove(self._own.data_ptr(), self._incoming.data_ptr() + HEAD_BYTES, self._own.nbytes)
        return time.monotonic_ns()


@torch.inference_mode()  # as a stage runs
def exchange(
    end: LinkEnd | PlainEnd, num_frames: int, pause_s: float, *, begins: bool
) -> tuple[list[int], list[int], int]:
    """When each frame began to be sent, when each had come, and nanoseconds of copying; ends take turns."""
    sent, received = [], []
    for step in range(num_frames + WARM_UP_FRAMES):
        if not begins:
            received.append(end.receive(step))
        if pause_s:
            time.sleep(pause_s)
        sent.append(end.send(step))
        if begins:
            received.append(end.receive(step))
    _, _, phases = end.clock.totals()
    return sent, received, phases[Phase.COMM]


def make_header(step: int) -> FrameHeader:
    return FrameHeader(
        epoch=0,
        step_id=step,
        kind=FrameKind.HIDDEN,
        num_tokens=ROWS,
        width=WIDTH,
        dtype="bfloat16",
        num_tensors=NUM_TENSORS,
        digest=0,
    )


def as_numbers(handle: RingHandle) -> dict[str, int]:
    return {name: getattr(handle, name) for name in RingHandle.__struct_fields__}


if __name__ == "__main__":
    sys.exit(main())

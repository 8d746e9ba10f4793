"""How fast a worker fetches weights from its head, beside a plain copy of the same bytes over TLS, in turns.

    python benchmarks/fetch_weights.py [--layers 12] [--rounds 7] [--cores 0,1] [--directory DIR]

Two processes over loopback, each on a core of its own. In a round a worker with an empty cache fetches all
tensors of a stage; a copy sends the same bytes in pieces of the same size over one connection, into a file
that is synced; and `bytes alone` does so without a file. A fetch digests every tensor at both ends, cuts them
into files by layer and verifies them. Then a second start is timed, which must find everything in the cache.
`--directory` is where files are written: on a disk that is slower than the network the disk is measured.

Prints Markdown, medians of the rounds, and fails when the bar is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from peers.report import markdown
from ratios import in_turns, shown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from checkpoints import make_checkpoint
from clusters import Cluster
from penstock.hosts.model_shelf import ModelShelf
from penstock.hosts.weights.model_finder import ModelFinder
from penstock.hosts.weights.served_models import ServedModels
from penstock.hosts.weights.tensor_digests import TensorDigests
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.hosts.weights.weight_server import WeightServer
from penstock.hosts.weights.weight_wire import PIECE_BYTES
from penstock.process.config import RankConfig
from penstock.trust.cancellation import Cancellation
from penstock.trust.credentials import Credentials
from penstock.trust.tls import link_client_context, link_server_context
from rank_configs import make_rank_configs

BAR = 0.9  # of the copy
SUBJECTS = ("fetch", "copy", "bytes alone")
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "heads": 16,
    "kv_heads": 16,
    "vocab_size": 4096,
}


class Served(msgspec.Struct):
    """What the process of the head prints: where it listens, and what it serves."""

    weights_port: int
    copy_port: int
    identity: bytes


class Notes:
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def say(self, line: str) -> None:
        """It is for a user."""

    def begin(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def add(self, num_bytes: int) -> None:
        """It is under way."""


class Measured:
    """The worker's side."""

    def __init__(self, directory: Path, rank: RankConfig, served: Served, credentials: Credentials) -> None:
        self._directory = directory
        self._rank = rank
        self._served = served
        self._context = link_client_context(credentials)
        self.num_bytes = 0

    def rate(self, subject: str) -> float:
        """Bytes per second of one turn."""
        turns: dict[str, Callable[[], None]] = {
            "fetch": self._fetch,
            "copy": lambda: self._copy(self._directory / "copy"),
            "bytes alone": lambda: self._copy(Path(os.devnull)),
        }
        shutil.rmtree(self._directory / "cache", ignore_errors=True)
        began = time.perf_counter()
        turns[subject]()
        return self.num_bytes / (time.perf_counter() - began)

    def second_start_s(self) -> float:
        """Seconds of a start that finds everything in the cache."""
        self._fetch()
        began = time.perf_counter()
        assert self._find() == 0, "a second start has fetched something"
        return time.perf_counter() - began

    def _fetch(self) -> None:
        self.num_bytes = self._find() or self.num_bytes

    def _find(self) -> int:
        notes = Notes()
        with closing(WeightCache(self._directory / "cache")) as cache:
            finder = ModelFinder(ModelShelf([]), cache, lambda _: self._connect(self._served.weights_port))
            finder.find(self._served.identity, self._rank, notes, Cancellation())
        return notes.num_bytes

    def _copy(self, path: Path) -> None:
        with self._connect(self._served.copy_port) as connection, path.open("wb", buffering=0) as file:
            connection.sendall(self.num_bytes.to_bytes(8, "big"))
            memory, left = memoryview(bytearray(PIECE_BYTES)), self.num_bytes
            while left:
                filled = _receive(connection, memory[:left])
                file.write(memory[:filled])
                left -= filled
            if path.name != "null":
                os.fsync(file.fileno())

    def _connect(self, port: int) -> ssl.SSLSocket:
        return self._context.wrap_socket(socket.create_connection(("127.0.0.1", port)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="of the stage, 34 MB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", default="0,1", help="of the worker and of the head")
    parser.add_argument("--directory", type=Path, help="for files; by default one of the system's")
    parser.add_argument("--head", type=Path, help=argparse.SUPPRESS)  # of the process of the head
    options = parser.parse_args()
    if options.head:
        serve(options.head)
        return 0
    cores = [int(core) for core in options.cores.split(",")]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        return measure(Path(directory), options.layers, options.rounds, cores)


def measure(directory: Path, layers: int, rounds: int, cores: list[int]) -> int:
    """Print the table; the exit code."""
    model = make_checkpoint(directory / "model", layers=layers + 1, dtype=torch.bfloat16, **SIZES)
    rank = make_rank_configs(model, 2)[1]
    rank = msgspec.structs.replace(rank, start_layer=1)
    credentials = Cluster(directory / "cluster").link_credentials("desk", "rank-1", 1)
    with started_head(directory, cores[1]) as served:
        os.sched_setaffinity(0, {cores[0]})
        measured = Measured(directory, rank, served, credentials)
        measured.rate("fetch")  # which says how many bytes there are
        found = in_turns(SUBJECTS, measured.rate, rounds, warm_up=1)
        second_s = statistics.median(measured.second_start_s() for _ in range(3))
    ratios = [fetch / copy for fetch, copy, _ in found]
    rows = [
        [name, f"{statistics.median(rates) / 1e6:.0f}"]
        for name, rates in zip(SUBJECTS, zip(*found, strict=True), strict=True)
    ]
    print(markdown(["of " + f"{measured.num_bytes / 1e6:.0f} MB", "MB/s"], rows))
    print(f"\nfetch/copy {shown(ratios)}; a second start takes {second_s:.2f} s and fetches nothing")
    return int(statistics.median(ratios) < BAR)


@contextmanager
def started_head(directory: Path, core: int) -> Iterator[Served]:
    """Start the process of the head, on a core."""
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--head", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=Served)
        finally:
            process.stdin.close()  # it ends with it
            process.wait()


def serve(directory: Path) -> None:
    """Be the head, until the standard input ends."""
    models = ServedModels(TensorDigests(directory))
    identity = models.identify(str(directory / "model"))
    server = WeightServer(models)
    context = link_server_context(Cluster(directory / "cluster").link_credentials("tower", "rank-0", 1))
    weights, copies = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    def serve_weights() -> None:
        while True:
            server.serve(context.wrap_socket(weights.accept()[0], server_side=True), "desk")

    def serve_copies() -> None:
        while True:
            with context.wrap_socket(copies.accept()[0], server_side=True) as connection:
                _send_copy(connection, directory / "model" / "model.safetensors")

    for work in (serve_weights, serve_copies):
        threading.Thread(target=work, daemon=True).start()
    served = Served(weights.getsockname()[1], copies.getsockname()[1], identity)
    print(msgspec.json.encode(served).decode(), flush=True)
    sys.stdin.read()
    os._exit(0)


def _send_copy(connection: ssl.SSLSocket, path: Path) -> None:
    left = int.from_bytes(connection.recv(8), "big")
    memory = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while left:
            count = file.readinto(memory[:left])
            connection.sendall(memory[:count])
            left -= count


def _receive(connection: ssl.SSLSocket, memory: memoryview) -> int:
    """Fill the memory."""
    filled = 0
    while filled < len(memory):
        filled += connection.recv_into(memory[filled:])
    return filled


if __name__ == "__main__":
    sys.exit(main())

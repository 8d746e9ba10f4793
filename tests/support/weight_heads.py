"""A head that gives weights over socket pairs, whose connections a test counts and tears."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.hosts.model_shelf import ModelShelf
from penstock.hosts.weights.model_finder import ModelFinder
from penstock.hosts.weights.served_models import ServedModels
from penstock.hosts.weights.tensor_digests import TensorDigests
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.hosts.weights.weight_server import WeightServer
from penstock.process.config import RankConfig
from penstock.rank.loading import load_rank
from penstock.trust.cancellation import Cancellation
from penstock.weights.loader import LoadReport
from penstock.weights.read_digests import parse_table
from rank_configs import make_rank_configs


class CountedSocket(socket.socket):
    """A socket that counts what comes, for its head, and is torn when the head says so."""

    head: WeightHead

    def recv_into(self, *given: object) -> int:  # type: ignore[override]
        self.head.require_whole()
        count = super().recv_into(*given)  # type: ignore[arg-type]
        self.head.count(count)
        return count


class WeightHead:
    """The head's side of all connections for weights.

    Args:
        directory: for what the head keeps.
        model: that it serves.

    Attributes:
        identity: of the model.
        num_connections: that were opened.
        num_bytes: that came over all of them.
        tears: after how many further bytes connections are torn, one after the other.
    """

    def __init__(self, directory: Path, model: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.served = ServedModels(TensorDigests(directory))
        self.identity = self.served.identify(str(model))
        self.num_connections = self.num_bytes = 0
        self.tears: list[int] = []
        self._mutex = threading.Lock()
        self.server = WeightServer(self.served)

    def connect(self, cancellation: Cancellation | None = None, host: str = "desk") -> socket.socket:
        ours, theirs = socket.socketpair()
        self.server.serve(theirs, host)
        self.num_connections += 1
        counted = CountedSocket(fileno=ours.detach())
        counted.head = self
        return counted

    def count(self, num_bytes: int) -> None:
        with self._mutex:
            self.num_bytes += num_bytes
            if self.tears:
                self.tears[0] -= num_bytes

    def require_whole(self) -> None:
        with self._mutex:
            if self.tears and self.tears[0] <= 0:
                self.tears.pop(0)
                raise ConnectionResetError(104, "Connection reset by peer")

    def close(self) -> None:
        self.server.close()


class HeardNotes:
    """What a finder says of its work.

    Attributes:
        lines: for the user.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = self.done = 0
        self._mutex = threading.Lock()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def begin(self, num_bytes: int) -> None:
        self.total = num_bytes

    def add(self, num_bytes: int) -> None:
        with self._mutex:
            self.done += num_bytes


class WeightWorker:
    """A worker's side: a cache in a directory, and what is found for ranks.

    Attributes:
        notes: of the last search.
    """

    def __init__(self, directory: Path, head: WeightHead, *models: Path) -> None:
        self.directory = directory
        self.cache = WeightCache(directory)
        self._finder = ModelFinder(ModelShelf(models), self.cache, head.connect)
        self._head = head
        self.notes = HeardNotes()

    def find(self, rank: RankConfig, cancellation: Cancellation | None = None) -> Path:
        self.notes = HeardNotes()
        return self._finder.find(self._head.identity, rank, self.notes, cancellation or Cancellation())

    @property
    def tensor_files(self) -> list[Path]:
        return sorted((self.directory / "tensors").iterdir())

    @property
    def leftovers(self) -> list[Path]:
        """What is in the cache and is not a whole file with a name of its own."""
        return [path for path in (self.directory / "partial").rglob("*") if path.is_file()]

    def close(self) -> None:
        self.cache.close()


def loaded(rank: RankConfig) -> LoadReport:
    """What a rank says of its load."""
    threads = torch.get_num_threads()
    try:
        return load_rank(rank, lambda done, total: None).report
    finally:
        torch.set_num_threads(threads)


def what_was_read(rank: RankConfig) -> dict[bytes, bytes]:
    """Digests of all that the rank reads when it loads, by what it is."""
    return parse_table(loaded(rank).digests)


def at(path: Path, rank: RankConfig, identity: bytes) -> RankConfig:
    """The rank, on a host where its model is in this path."""
    return msgspec.structs.replace(rank, model_path=str(path), model_identity=identity)


def assert_loads_alike(tmp_path: Path, model: Path, layout: dict[str, Any]) -> None:
    """All ranks read the same bytes from the model and from what a worker fetches for them."""
    head = WeightHead(tmp_path / "head", model)
    worker = WeightWorker(tmp_path / "cache", head)
    try:
        for rank in make_rank_configs(model, 2, are_threads=True, kernels="off", **layout):
            found = at(worker.find(rank), rank, head.identity)
            assert what_was_read(found) == what_was_read(rank)
    finally:
        worker.close()
        head.close()

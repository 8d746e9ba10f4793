"""Finds the weights of a rank for a worker: in a copy on its own disk, in its cache, or at the head.

    the head describes the model ──▶ what the rank needs ──▶ in a copy here, with the same digests?
                                                         └──▶ in the cache, undamaged?
                                                         └──▶ fetched into the cache, over several connections
    ──▶ a directory with links to all of it, which looks to the rank like a checkpoint, or like a GGUF file

Called by `hosts.weights.model_supply`, in a thread of its own. It uses no path from the head: the model is
named by its identity, and every file by its content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Protocol

from penstock.errors import ModelError
from penstock.families.registry import load_spec
from penstock.hosts.model_shelf import ModelShelf
from penstock.hosts.weights.local_copy import LocalCopy, ModelCopy, NoCopy
from penstock.hosts.weights.needed_tensors import (
    TensorGroup,
    config_groups,
    num_bytes,
    tensor_groups,
    total_bytes,
)
from penstock.hosts.weights.side_threads import SideThreads
from penstock.hosts.weights.small_files import known_files
from penstock.hosts.weights.tensor_digests import TensorDigests
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.hosts.weights.weight_client import Connect, Part, Sink, WeightClient
from penstock.hosts.weights.weight_wire import Description, SmallFile
from penstock.process.config import RankConfig
from penstock.trust.cancellation import Cancellation
from penstock.weights.checkpoint import TensorEntry
from penstock.weights.tensor_files import open_tensors

NUM_CONNECTIONS = 2  # beyond about 10 Gbit/s, the TLS of one connection keeps a whole CPU core busy


class Notes(Protocol):
    """Takes the progress of getting one rank its weights, for the user. Several threads call its methods."""

    def say(self, line: str) -> None:
        """Take a line for the user."""
        ...

    def begin(self, num_bytes: int) -> None:
        """Note that `num_bytes` bytes are to be fetched from the head."""
        ...

    def add(self, num_bytes: int) -> None:
        """Note that `num_bytes` more bytes have come; negative: so many that came will be sent again."""
        ...


class _Unheard:
    """Drops the notes about tensors that are too small to be worth a line. Implements `Notes`."""

    def say(self, line: str) -> None:
        pass

    def begin(self, num_bytes: int) -> None:
        pass

    def add(self, num_bytes: int) -> None:
        pass


class ModelFinder:
    """Finds the weights of ranks: in a copy on this host, in its cache, or at the head.

    Args:
        shelf: models on this host's own disks.
        cache: keeps tensors and files that were fetched from the head.
        connect: opens a connection to the head, for weights.
    """

    def __init__(self, shelf: ModelShelf, cache: WeightCache, connect: Connect) -> None:
        self._shelf = shelf
        self._cache = cache
        self._connect = connect
        self._digests = TensorDigests(cache.digests)
        self._without_copy: set[bytes] = set()  # models; the user was told that no copy of them is here

    def find(self, identity: bytes, rank: RankConfig, notes: Notes, cancellation: Cancellation) -> Path:
        """Find or fetch all that a rank reads, and return its path.

        The path is a directory that looks like a checkpoint, or a GGUF file in one.

        Args:
            identity: identity of the head's model (`kvstore.names.model_identity`).
            rank: configuration of the rank, which says what the rank needs.
            notes: takes the progress.
            cancellation: ends the work when it is cancelled.

        Raises:
            PeerError: the head cannot be reached, or the disk is full.
            ModelError: the head does not serve the model, or its files are bad.
            CancelledError: the work was cancelled.
        """
        with closing(WeightClient(self._connect, cancellation)) as client:
            description = client.describe(identity)
            small = {file.name: file.digest for file in self._small_files(client, identity, description)}
            copy = self._copy(identity, notes, cancellation)
            of_config = config_groups(description.tensors)
            configured = self._all_of(client, identity, of_config, copy, cancellation)
            view = self._cache.view(small, configured)
            spec = load_spec(view, rank.model_impl, dequantize=rank.gguf_dequantize)
            groups = tensor_groups(description.tensors, spec, rank)
            found = self._found(client, identity, groups, copy, notes, cancellation)
        missing = [group for group in groups if group.names[0] not in found]
        if missing:
            self._cache.require_room(total_bytes(missing))
            notes.begin(total_bytes(missing))
            found |= self._fetched(identity, missing, notes, cancellation)
        self._digests.keep()
        return self._cache.view(small, found)

    def _small_files(
        self, client: WeightClient, identity: bytes, description: Description
    ) -> list[SmallFile]:
        """Fetch the small files that are not in the cache, and return all of them."""
        files = known_files(description.files)
        missing = [file for file in files if self._cache.small_file(file.digest) is None]
        parts = [Part(file.name, file.num_bytes, is_file=True) for file in missing]
        client.fetch(identity, parts, _SmallFileSink(self._cache))
        return files

    def _all_of(
        self,
        client: WeightClient,
        identity: bytes,
        groups: Sequence[TensorGroup],
        copy: LocalCopy,
        cancellation: Cancellation,
    ) -> dict[str, TensorEntry]:
        """Fetch the tensors of small groups that are not here, and return where all of them are."""
        if not groups:
            return {}
        found = self._found(client, identity, groups, copy, _Unheard(), cancellation)
        missing = [group for group in groups if group.names[0] not in found]
        self._cache.require_room(total_bytes(missing))
        for group in missing:
            found |= self._fetch_group(client, identity, group, _Unheard())
        return found

    def _found(
        self,
        client: WeightClient,
        identity: bytes,
        groups: Sequence[TensorGroup],
        copy: LocalCopy,
        notes: Notes,
        cancellation: Cancellation,
    ) -> dict[str, TensorEntry]:
        """Return where the tensors of those groups are that are here as a whole.

        The head is asked only for digests of tensors that may be here, since it may have to read them.
        """
        candidates = [group for group in groups if copy.has(group) or self._cache.has_candidate(group)]
        names = [name for group in candidates for name in group.names]
        _note_comparing(notes, sum(map(copy.unread_bytes, candidates)), "a copy on this host")
        with SideThreads("digests") as threads:
            asked = threads.begin(partial(client.digests, identity, names))
            own = [copy.digests(group) for group in candidates]
            digests = dict(zip(names, asked.result(), strict=True))
        found: dict[str, TensorEntry] = {}
        others: list[tuple[TensorGroup, list[bytes]]] = []
        for group, of_copy in zip(candidates, own, strict=True):
            wanted = [digests[name] for name in group.names]
            if of_copy == wanted:
                found |= copy.entries(group)
            else:
                others.append((group, wanted))
        return found | self._cached(others, notes, cancellation)

    def _cached(
        self,
        groups: Sequence[tuple[TensorGroup, list[bytes]]],
        notes: Notes,
        cancellation: Cancellation,
    ) -> dict[str, TensorEntry]:
        """Return where the cache has tensors of these digests."""
        _note_comparing(notes, sum(starmap(self._cache.unread_bytes, groups)), "the cache")
        found: dict[str, TensorEntry] = {}
        for group, wanted in groups:
            if (path := self._cache.find(group, wanted, cancellation.check)) is not None:
                found |= group.entries(path)
        return found

    def _copy(self, identity: bytes, notes: Notes, cancellation: Cancellation) -> LocalCopy:
        try:
            tensors = open_tensors(self._shelf.locate(identity))
            return ModelCopy(tensors, self._digests, cancellation.check)
        except ModelError:
            self._note_no_copy(identity, notes)
            return NoCopy()

    def _note_no_copy(self, identity: bytes, notes: Notes) -> None:
        """Tell the user, once for each model, that no copy of it is here, and what a copy would be."""
        if self._shelf.places and identity not in self._without_copy:
            self._without_copy.add(identity)
            notes.say(
                f"there is no copy of the head's model below {self._shelf.places}: its config.json and "
                "*.safetensors files, or its GGUF files, must equal the head's in name and content"
            )

    def _fetched(
        self, identity: bytes, groups: Sequence[TensorGroup], notes: Notes, cancellation: Cancellation
    ) -> dict[str, TensorEntry]:
        """Fetch groups over several connections at once; after an error, no further group is begun."""
        queue = deque(groups)
        found: dict[str, TensorEntry] = {}

        def work() -> None:
            with closing(WeightClient(self._connect, cancellation)) as client:
                while (group := _taken(queue)) is not None:
                    try:
                        found.update(self._fetch_group(client, identity, group, notes))
                    except BaseException:
                        queue.clear()
                        raise

        count = min(NUM_CONNECTIONS, len(groups))
        with SideThreads("weights") as threads:
            futures = [threads.begin(work) for _ in range(count)]
        for future in futures:
            future.result()
        return found

    def _fetch_group(
        self, client: WeightClient, identity: bytes, group: TensorGroup, notes: Notes
    ) -> dict[str, TensorEntry]:
        parts = [Part(tensor.name, num_bytes(tensor)) for tensor in group.tensors]
        with self._cache.writer(group) as writer:
            client.fetch(identity, parts, _NotedSink(writer, notes))
            return group.entries(writer.keep())


def _note_comparing(notes: Notes, num_bytes: int, where: str) -> None:
    """Tell the user how many bytes are read to compare them, if any are."""
    if num_bytes:
        notes.say(f"comparing {num_bytes / 1e6:.1f} MB of {where} with the head's weights")


def _taken(queue: deque[TensorGroup]) -> TensorGroup | None:
    try:
        return queue.popleft()
    except IndexError:
        return None


class _NotedSink:
    """A sink that counts the bytes for another sink. Implements `Sink`."""

    def __init__(self, sink: Sink, notes: Notes) -> None:
        self._sink = sink
        self._notes = notes
        self._of_part = 0

    def begin(self, number: int) -> None:
        self._notes.add(-self._of_part)  # if the connection broke within the part, it is sent again
        self._of_part = 0
        self._sink.begin(number)

    def write(self, memory: memoryview) -> None:
        self._sink.write(memory)
        self._of_part += len(memory)
        self._notes.add(len(memory))

    def end(self, digest: bytes) -> None:
        self._of_part = 0
        self._sink.end(digest)


class _SmallFileSink:
    """A sink that puts small files into the cache. Implements `Sink`."""

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        self._content = bytearray()

    def begin(self, number: int) -> None:
        self._content.clear()

    def write(self, memory: memoryview) -> None:
        self._content += memory

    def end(self, digest: bytes) -> None:
        self._cache.put_small_file(bytes(self._content))

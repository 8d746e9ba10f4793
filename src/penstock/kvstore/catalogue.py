"""The catalogue of a store: the names of complete blocks, of which every rank has stored its part.

An entry is a record of its own beside the records of the parts. It says of which layers the parts are stored
(`kvstore.layer_share`). A thread reads and writes entries, because a store may be slow; its answers are kept
until `answers` is called. If the store does not work, no entry is found. The core has a catalogue of its own
store (`kvcache.hosts_catalogue`). Of each store that another host has to itself, one rank of that host has
the catalogue (`kvstore.entry_calls`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from penstock.batch import StoreUse
from penstock.errors import ErrorInfo
from penstock.kvstore.description import description_key
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.layer_share import NO_LAYERS, WHOLE, LayerShare
from penstock.kvstore.names import ENTRY_LAYER, record_key

LEAVE_S = 2.0  # seconds that `close` waits for the thread to end
EMPTY_S = 300.0  # seconds to delete all records of a model
AT_ONCE = 64  # names that are looked up together; the stored part of a chain often ends long before its last


class StoreEmptying:
    """The deletion of all records of a model in one store.

    One thread runs it, another looks whether it is done.

    Args:
        store: the store.
        namespace: with which the keys of the model's records begin.

    Attributes:
        error: why records may be left, once it is done; None if there is no such reason.
    """

    def __init__(self, store: GuardedStore, namespace: bytes) -> None:
        self._store, self._namespace = store, namespace
        self.error: ErrorInfo | None = None
        self.is_done = False

    def run(self) -> None:
        self.error = self._store.clear(self._namespace, EMPTY_S)
        self.is_done = True


class StoreCatalogue:
    """The entries in one store.

    Args:
        store: the store; closed with the catalogue.
        namespace: the namespace of all entries.
        description: description of the namespace (`kvstore.description`), kept beside the entries; empty:
            none.
    """

    def __init__(self, store: GuardedStore, namespace: bytes, description: bytes = b"") -> None:
        self._store, self._namespace = store, namespace
        self._beside = {description_key(namespace): description} if description else {}
        self._answers: deque[tuple[int, int]] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv catalogue", daemon=True)
        self._thread.start()

    def look_up(self, ticket: int, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        """Ask how many of these blocks, from the first on, have entries; `answers` returns it later.

        Args:
            ticket: a number that the answer has, too.
            share: the layers that each entry must name.
        """
        self._jobs.put(lambda: self._answers.append((ticket, self._count(names, share))))

    def answers(self) -> list[tuple[int, int]]:
        """Return (ticket, number of leading blocks) of the questions answered since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def enter(self, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        """Make entries for these blocks, which are stored now; does not wait.

        Args:
            share: the layers of which all parts are stored here now.
        """
        self._jobs.put(lambda: self._enter(names, share))

    def strike(self, names: Sequence[bytes]) -> None:
        """Delete the entries of these blocks, so that they are not found any more; does not wait."""
        self._jobs.put(lambda: self._store.delete([self._key(name) for name in names]))

    def use(self) -> StoreUse:
        """Return what the catalogue has done with the store since the start."""
        return msgspec.structs.replace(self._store.use(), records_read=0)  # entries are not parts of blocks

    def empty(self) -> StoreEmptying:
        """Begin to delete the parts of all blocks of this model, and the entries; return the deletion."""
        emptying = StoreEmptying(self._store, self._namespace)
        self._jobs.put(emptying.run)
        return emptying

    def close(self) -> None:
        """End the thread, and close the store; if a call of the store hangs, leave both as they are."""
        self._jobs.put(None)
        self._thread.join(LEAVE_S)
        if not self._thread.is_alive():
            self._store.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _count(self, names: Sequence[bytes], share: LayerShare) -> int:
        if share.is_empty:
            return len(names)
        for first in range(0, len(names), AT_ONCE):
            # Read with `get`, which counts as use: an entry in use must not be the next that the store drops.
            entries = self._store.get([self._key(name) for name in names[first : first + AT_ONCE]])
            for number, entry in enumerate(entries):
                if not _layers_of(entry).includes(share):
                    return first + number
        return len(names)

    def _enter(self, names: Sequence[bytes], share: LayerShare) -> None:
        if share.is_empty:
            return
        keys = [self._key(name) for name in names]
        # Joined with the old entry, so that what another layout has stored here stays findable. A share of
        # all layers includes the old one.
        before = [None] * len(keys) if share.is_whole else self._store.get(keys)
        payloads = [_layers_of(entry).joined(share).encoded() for entry in before]
        self._store.put(self._beside | dict(zip(keys, payloads, strict=True)))

    def _key(self, name: bytes) -> bytes:
        return record_key(self._namespace, name, ENTRY_LAYER, 0)


def _layers_of(entry: bytes | None) -> LayerShare:
    return NO_LAYERS if entry is None else LayerShare.decoded(entry)

"""The catalogue of a store: the names of blocks of which all ranks that keep parts there have stored them.

An entry is a record of its own beside those of the parts. It says of which layers the parts are there
(`kvstore.layer_share`). Entries are asked for and made in a thread, because a store may take its time;
answers wait to be fetched. A store that does not work has none. The core has a catalogue of its own store
(`kvcache.hosts_catalogue`), and one rank of each host with a store to itself has one of that
(`kvstore.entry_calls`).
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

LEAVE_S = 2.0  # for the thread to end
EMPTY_S = 300.0  # to delete all records of a model
AT_ONCE = 64  # names that are asked for together; a chain often ends long before its last


class StoreEmptying:
    """The deletion of all records of a model in one store.

    One thread runs it, another looks whether it is done.
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
        store: the store; closed with this.
        namespace: namespace of all entries.
        description: that of the namespace (`kvstore.description`), kept beside the entries; empty: none.
    """

    def __init__(self, store: GuardedStore, namespace: bytes, description: bytes = b"") -> None:
        self._store, self._namespace = store, namespace
        self._beside = {description_key(namespace): description} if description else {}
        self._answers: deque[tuple[int, int]] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv catalogue", daemon=True)
        self._thread.start()

    def look_up(self, ticket: int, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        """Ask how many of the first of these are there.

        Args:
            share: layers that are wanted of each.
        """
        self._jobs.put(lambda: self._answers.append((ticket, self._count(names, share))))

    def answers(self) -> list[tuple[int, int]]:
        """Return (ticket, number) of what was answered since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def enter(self, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        """Note that these blocks are there.

        Args:
            share: layers of which all parts are stored here now.
        """
        self._jobs.put(lambda: self._enter(names, share))

    def strike(self, names: Sequence[bytes]) -> None:
        """Make sure that these are not found any more."""
        self._jobs.put(lambda: self._store.delete([self._key(name) for name in names]))

    def use(self) -> StoreUse:
        """Return what was done with the store since the start."""
        return msgspec.structs.replace(self._store.use(), records_read=0)  # entries are parts of no block

    def empty(self) -> StoreEmptying:
        """Delete the parts of all blocks of this model, and the entries."""
        emptying = StoreEmptying(self._store, self._namespace)
        self._jobs.put(emptying.run)
        return emptying

    def close(self) -> None:
        """Close the store; one that does not answer is left alone."""
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
            # Got, and not only asked for: an entry that is used must not be the oldest one in the store.
            entries = self._store.get([self._key(name) for name in names[first : first + AT_ONCE]])
            for number, entry in enumerate(entries):
                if not _layers_of(entry).includes(share):
                    return first + number
        return len(names)

    def _enter(self, names: Sequence[bytes], share: LayerShare) -> None:
        if share.is_empty:
            return
        keys = [self._key(name) for name in names]
        # What another layout has stored here stays findable. All layers need not be joined with others.
        before = [None] * len(keys) if share.is_whole else self._store.get(keys)
        payloads = [_layers_of(entry).joined(share).encoded() for entry in before]
        self._store.put(self._beside | dict(zip(keys, payloads, strict=True)))

    def _key(self, name: bytes) -> bytes:
        return record_key(self._namespace, name, ENTRY_LAYER, 0)


def _layers_of(entry: bytes | None) -> LayerShare:
    return NO_LAYERS if entry is None else LayerShare.decoded(entry)

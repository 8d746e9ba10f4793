"""The names of blocks that the core knows to be in the store, and the interface of the catalogue.

A name is the content hash of a KV block. The scheduler asks the catalogue about names that are not known
here. To look them up may take long, so questions are answered later. `kvcache.hosts_catalogue` implements
`Catalogue`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from penstock.batch import EntryAnswers, EntryCall, StoreUse
from penstock.errors import ErrorInfo
from penstock.kvcache.store_sites import StoreSites


class Emptying(Protocol):
    """The deletion of a model's blocks in a store, which another thread carries out until `is_done`."""

    @property
    def is_done(self) -> bool: ...

    @property
    def error(self) -> ErrorInfo | None:
        """The reason why blocks may be left in the store; None if there is none."""


class EntryReports(Protocol):
    """A collection of what ranks have answered about the catalogues of their hosts' stores."""

    def entry_answers(self) -> list[EntryAnswers]:
        """Return the ranks' answers that have come since the last call."""


class StoreCalls(Protocol):
    """The connection to the ranks that answer for the stores of other hosts (`executor.base.Executor`)."""

    @property
    def reports(self) -> EntryReports:
        """The collection in which the ranks' answers arrive."""

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Send a call about a host's store to a rank there, without waiting; return whether it was sent.

        Args:
            rank: the number of the rank, counted over all stages.
        """


class NoStoreCalls:
    """A stand-in for the connection to other hosts' stores, if they have none, or while the pipe is lost."""

    @property
    def reports(self) -> NoStoreCalls:
        return self

    def entry_answers(self) -> list[EntryAnswers]:
        return []

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return False


NO_STORE_CALLS = NoStoreCalls()


class CataloguedStore(Protocol):
    """The two requests to a catalogue's stores: how the core has used its own, and to empty all of them."""

    def use(self) -> StoreUse:
        """Return how the core has used its own store since the start."""

    def empty(self) -> Emptying:
        """Begin to delete this model's blocks and their entries, after all calls so far.

        Returns:
            The deletion under way.
        """


class Catalogue(CataloguedStore, Protocol):
    """A catalogue of the names (hashes) of blocks that are in the store; questions are answered later."""

    def meet(self, sites: StoreSites, calls: StoreCalls) -> bool:
        """Use these stores from now on; those of other hosts are reached through the ranks of the new epoch.

        Call it only while no block is being copied.

        Args:
            sites: the stores, and the layers whose parts of blocks each has.
            calls: carries questions to the ranks of other hosts.

        Returns:
            Whether the stores may differ from those before. Then what is known of them is void, and open
            questions are not answered any more.
        """

    def lose_all(self) -> None:
        """Forget open questions to other hosts, since the ranks that would answer are lost."""

    def look_up(self, ticket: int, names: Sequence[bytes]) -> None:
        """Ask how many of these names are stored, up to the first that is not; `answers` returns it later.

        Args:
            ticket: a number by which the answer is known.
        """

    def answers(self) -> list[tuple[int, int]]:
        """Return (ticket, number of leading names stored) of the questions answered since the last call."""

    def enter(self, names: Sequence[bytes]) -> None:
        """Record that all parts of these blocks are stored, so that they are found."""

    def strike(self, names: Sequence[bytes]) -> None:
        """Remove these names, so that their blocks are not found in the store any more."""

    def close(self) -> None:
        """Close the catalogue. No call may follow."""


class StoredNames:
    """The names (hashes) of blocks that this core knows to be stored; it tells the catalogue of changes.

    A store holds more blocks than a core could list over the years. So the names learnt longest ago are
    forgotten, and at worst their blocks are stored once more.

    Args:
        catalogue: lists the blocks in the store, for all cores that use it.
        max_names: names that are kept here.
    """

    def __init__(self, catalogue: Catalogue, max_names: int) -> None:
        self._catalogue = catalogue
        self._max_names = max_names
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # the name learnt longest ago is first

    def __contains__(self, name: bytes) -> bool:
        return name in self._stored

    def learn(self, there: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """Apply an answer of the catalogue: the names `there` are stored, `gone` are not any more."""
        self._remove(gone)
        self._add(there)

    def enter(self, names: Sequence[bytes]) -> None:
        """Record, here and in the catalogue, that all parts of these blocks are stored now."""
        if names:
            self._add(names)
            self._catalogue.enter(names)

    def distrust(self, names: Sequence[bytes]) -> None:
        """Remove these names, here and in the catalogue, so that their blocks are not found in the store."""
        self._remove(names)
        self._catalogue.strike(names)

    def forget(self) -> None:
        """Forget all names here, because other stores are used from now on; the catalogue stays."""
        self._stored.clear()

    def empty(self) -> Emptying:
        """Begin to delete all blocks of this model in the store, and return the deletion under way."""
        self._stored.clear()
        return self._catalogue.empty()

    def _add(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._stored[name] = None
            self._stored.move_to_end(name)
        while len(self._stored) > self._max_names:
            self._stored.popitem(last=False)

    def _remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._stored.pop(name, None)

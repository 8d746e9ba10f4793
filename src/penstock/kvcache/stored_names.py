"""The names in the store, as far as the core knows, and the catalogue that is asked for the rest.

Looking things up in the catalogue may take long: it is done beside, by `kvcache.hosts_catalogue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.batch import EntryAnswers, EntryCall, StoreUse
from penstock.errors import ErrorInfo
from penstock.kvcache.store_sites import StoreSites


class Emptying(Protocol):
    """The emptying of a store, done in another thread; `is_done` in the end."""

    @property
    def is_done(self) -> bool: ...

    @property
    def error(self) -> ErrorInfo | None:
        """The reason why blocks may be left."""


class EntryReports(Protocol):
    """The answers of ranks about the catalogues of their hosts' stores."""

    def entry_answers(self) -> list[EntryAnswers]:
        """Return the answers since the last call."""


class StoreCalls(Protocol):
    """The connection to the ranks that answer for the stores of other hosts (`executor.base.Executor`)."""

    @property
    def reports(self) -> EntryReports:
        """The place at which the answers arrive."""

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Send a call to a rank, without waiting; return whether it was sent."""


class NoStoreCalls:
    """A connection to no rank: no other host has a store, or the pipe is lost."""

    @property
    def reports(self) -> NoStoreCalls:
        return self

    def entry_answers(self) -> list[EntryAnswers]:
        return []

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return False


NO_STORE_CALLS = NoStoreCalls()


class CataloguedStore(Protocol):
    """The stores that a catalogue covers."""

    def use(self) -> StoreUse:
        """Return how the core has used its own store since the start."""

    def empty(self) -> Emptying:
        """Delete this model's blocks and their entries, once all calls before are done."""


class Catalogue(CataloguedStore, Protocol):
    """A catalogue of the names in the store; questions are answered later."""

    def meet(self, sites: StoreSites, calls: StoreCalls) -> bool:
        """Use these stores from now on, over the ranks of a new epoch, while no copy is under way.

        Returns:
            Whether the stores may differ from those before. Then what is known of them is void, and open
            questions are not answered any more.
        """

    def lose_all(self) -> None:
        """Forget open questions to other hosts, since the ranks that would answer are lost."""

    def look_up(self, ticket: int, names: Sequence[bytes]) -> None:
        """Ask how many of the first of these names are stored; `answers` returns it."""

    def answers(self) -> list[tuple[int, int]]:
        """Return the (ticket, number) answered since the last call."""

    def enter(self, names: Sequence[bytes]) -> None:
        """Record that all parts of these blocks are stored."""

    def strike(self, names: Sequence[bytes]) -> None:
        """Remove these names, so that they are not found any more."""

    def close(self) -> None:
        """Close the catalogue. No call may follow."""


class StoredNames:
    """The names that this core knows to be stored; it keeps the catalogue informed of changes.

    Args:
        catalogue: covers the store, for all cores that use it.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._stored: set[bytes] = set()  # that this core knows of

    def __contains__(self, name: bytes) -> bool:
        return name in self._stored

    def learn(self, there: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """Apply an answer of the catalogue: `there` are stored, `gone` are not any more."""
        self._stored.difference_update(gone)
        self._stored.update(there)

    def enter(self, names: Sequence[bytes]) -> None:
        """Record that all parts of these blocks are stored now."""
        if names:
            self._stored.update(names)
            self._catalogue.enter(names)

    def distrust(self, names: Sequence[bytes]) -> None:
        """Remove these names, so that their blocks in the store are not found any more."""
        self._stored.difference_update(names)
        self._catalogue.strike(names)

    def forget(self) -> None:
        """Forget all names, since the stores are different ones."""
        self._stored.clear()

    def empty(self) -> Emptying:
        """Delete all blocks of this model in the store."""
        self._stored.clear()
        return self._catalogue.empty()

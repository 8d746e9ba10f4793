"""Which names are in the store, as far as the core knows, and the catalogue that is asked for the rest.

Looking things up in the catalogue may take long: it is done beside, by `kvcache.hosts_catalogue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.batch import EntryAnswers, EntryCall, StoreUse
from penstock.errors import ErrorInfo
from penstock.kvcache.store_sites import StoreSites


class Emptying(Protocol):
    """Done beside; `is_done` in the end."""

    @property
    def is_done(self) -> bool: ...

    @property
    def error(self) -> ErrorInfo | None:
        """Why something may be left."""


class EntryReports(Protocol):
    """What ranks have said of the catalogues of their hosts' stores."""

    def entry_answers(self) -> list[EntryAnswers]:
        """Answers since the last call."""


class StoreCalls(Protocol):
    """The way to the ranks that answer for the stores of other hosts (`executor.base.Executor`)."""

    @property
    def reports(self) -> EntryReports:
        """Where their answers come."""

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Send a call to a rank, without waiting; whether it was sent."""


class NoStoreCalls:
    """The way to nobody: no other host has a store, or the pipe is lost."""

    @property
    def reports(self) -> NoStoreCalls:
        return self

    def entry_answers(self) -> list[EntryAnswers]:
        return []

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return False


NO_STORE_CALLS = NoStoreCalls()


class CataloguedStore(Protocol):
    """The stores that a catalogue is in."""

    def use(self) -> StoreUse:
        """What the core has done with its own, since the start."""

    def empty(self) -> Emptying:
        """Delete the parts of all blocks of this model, and the entries, once all before it is done."""


class Catalogue(CataloguedStore, Protocol):
    """Which names are in the store; asked now, answered later."""

    def meet(self, sites: StoreSites, calls: StoreCalls) -> bool:
        """Use these stores from now on, over the ranks of a new epoch; nothing is under way.

        Returns:
            Whether they may be others than before: then what is known of them is so no longer, and what was
            asked is not answered any more.
        """

    def lose_all(self) -> None:
        """The ranks are lost: other hosts answer nothing any more."""

    def look_up(self, ticket: int, names: Sequence[bytes]) -> None:
        """How many of the first of these are there?"""

    def answers(self) -> list[tuple[int, int]]:
        """(ticket, number) of what was answered since the last call."""

    def enter(self, names: Sequence[bytes]) -> None:
        """All parts of these are stored."""

    def strike(self, names: Sequence[bytes]) -> None:
        """These are not to be found any more."""

    def close(self) -> None:
        """The last call."""


class StoredNames:
    """What this core knows to be stored; each change of it is told to the catalogue where that must know.

    Args:
        catalogue: of what is in the store, for all cores that use it.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._stored: set[bytes] = set()  # that this core knows of

    def __contains__(self, name: bytes) -> bool:
        return name in self._stored

    def learn(self, there: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """Take what the catalogue has answered: these are there, and the store has given those up."""
        self._stored.difference_update(gone)
        self._stored.update(there)

    def enter(self, names: Sequence[bytes]) -> None:
        """All parts of these are stored now."""
        if names:
            self._stored.update(names)
            self._catalogue.enter(names)

    def distrust(self, names: Sequence[bytes]) -> None:
        """What the store has under these names is not to be found any more."""
        self._stored.difference_update(names)
        self._catalogue.strike(names)

    def forget(self) -> None:
        """Know of nothing any more: the stores are others."""
        self._stored.clear()

    def empty(self) -> Emptying:
        """Delete all that is in the store of this model."""
        self._stored.clear()
        return self._catalogue.empty()

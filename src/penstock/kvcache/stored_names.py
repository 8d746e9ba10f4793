"""Which names are in the store, as far as the core knows, and the catalogue that is asked for the rest.

Looking things up in the catalogue may take long: it is done by `kvcache.catalogue`, beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.batch import StoreUse
from penstock.errors import ErrorInfo


class Emptying(Protocol):
    """Done beside; `is_done` in the end."""

    @property
    def is_done(self) -> bool: ...

    @property
    def error(self) -> ErrorInfo | None:
        """Why something may be left."""


class CataloguedStore(Protocol):
    """The store that a catalogue is in."""

    def use(self) -> StoreUse:
        """What the core has done with it, since the start."""

    def empty(self) -> Emptying:
        """Delete the parts of all blocks of this model, and the entries, once all before it is done."""


class Catalogue(CataloguedStore, Protocol):
    """Which names are in the store; asked now, answered later."""

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

    def empty(self) -> Emptying:
        """Delete all that is in the store of this model."""
        self._stored.clear()
        return self._catalogue.empty()

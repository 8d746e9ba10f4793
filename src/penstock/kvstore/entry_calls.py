"""Carries out the core's calls about a host's store in a thread: asks for entries, makes and deletes them.

Where hosts have a store each, the core calls one rank of each host: to ask about the entries of blocks in its
store, and to make and delete entries. The rank hands the calls on, and never waits: a thread of the catalogue
carries them out. Answers to calls of an epoch that is over are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from penstock.batch import EntryAnswers, EntryCall
from penstock.errors import ErrorInfo, ProtocolError
from penstock.kvstore.catalogue import StoreCatalogue, StoreEmptying
from penstock.kvstore.layer_share import LayerShare


class EntryCalls:
    """Carries out calls of the core at the catalogue of a store. Belongs to one thread.

    Args:
        open_catalogue: opens the catalogue; called at the core's first call, as most ranks never get one.
    """

    def __init__(self, open_catalogue: Callable[[], StoreCatalogue]) -> None:
        self._open_catalogue = open_catalogue
        self._catalogues: list[StoreCatalogue] = []  # empty until the first call, then one
        self._tickets = itertools.count()
        self._counting: dict[int, int] = {}  # number of the call, by the ticket of the question
        self._emptyings: dict[int, StoreEmptying] = {}  # by the number of the call

    @property
    def is_busy(self) -> bool:
        """Whether answers are still to come, or to be collected."""
        return bool(self._counting or self._emptyings)

    def carry_out(self, call: EntryCall) -> None:
        """Begin to carry out a call of the core."""
        catalogue = self._catalogue()
        if call.what == "count":
            ticket = next(self._tickets)
            self._counting[ticket] = call.number
            catalogue.look_up(ticket, call.names, LayerShare.decoded(call.share))
        elif call.what == "enter":
            catalogue.enter(call.names, LayerShare.decoded(call.share))
        elif call.what == "strike":
            catalogue.strike(call.names)
        else:
            self._emptyings[call.number] = catalogue.empty()

    def collect(self) -> EntryAnswers | None:
        """Return the answers to the core that are ready now; None: none is."""
        if not self.is_busy:
            return None
        counts = {
            self._counting.pop(ticket): count
            for ticket, count in self._catalogue().answers()
            if ticket in self._counting  # else the core asked in an epoch that is over
        }
        emptied: dict[int, ErrorInfo | None] = {
            number: emptying.error for number, emptying in self._emptyings.items() if emptying.is_done
        }
        for number in emptied:
            del self._emptyings[number]
        return EntryAnswers(counts=counts, emptied=emptied) if counts or emptied else None

    def reset(self) -> None:
        """Forget all calls, since the core does not wait for their answers any more."""
        self._counting.clear()
        self._emptyings.clear()

    def close(self) -> None:
        """Close the catalogue; calls that were begun are carried out first, if the store is not too slow."""
        for catalogue in self._catalogues:
            catalogue.close()

    def _catalogue(self) -> StoreCatalogue:
        if not self._catalogues:
            self._catalogues.append(self._open_catalogue())
        return self._catalogues[0]


class NoEntryCalls:
    """A stand-in for a rank that uses the core's store or none: the core never calls it."""

    is_busy = False

    def carry_out(self, call: EntryCall) -> None:
        raise ProtocolError(f"the core asks to {call.what} entries of a store that this host does not have.")

    def collect(self) -> EntryAnswers | None:
        return None

    def reset(self) -> None:
        """Do nothing: there are no calls."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


NO_ENTRY_CALLS = NoEntryCalls()

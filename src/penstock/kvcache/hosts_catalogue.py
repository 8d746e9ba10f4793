"""The catalogue over the stores of all hosts: a block is there when it is on every host that has ranks.

    look up ──▶ own store: the first n are there ──▶ all other hosts: how many of these n? ──▶ the least
    enter, strike, empty ──▶ own store and all others

The core reads the store of its own host. Where one store serves all hosts, that is the only one. Where each
host has a store to itself (on its disk), one rank of the host answers for the layers of all ranks there. So a
block counts as stored if every host can load its part. Questions go over the channels that carry plans, and
the core never waits for the answers. When an epoch ends its open questions are lost; they are asked again in
the next one (`kvcache.prefetching`).

Implements `kvcache.stored_names.Catalogue`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.batch import EntryCall, StoreUse
from penstock.errors import ErrorInfo, StageLostError
from penstock.kvcache.store_sites import ONE_STORE, HostStore, StoreSites
from penstock.kvcache.stored_names import NO_STORE_CALLS, Emptying, StoreCalls
from penstock.kvstore.catalogue import StoreCatalogue

_NOT_EMPTIED = StageLostError(
    "the KV store of another host was not emptied: the host is lost.",
    remedy="Repeat the request when the host is back.",
).info()


class HostsEmptying:
    """The deletion of a model's blocks in the stores of all hosts, while it is under way.

    Implements `kvcache.stored_names.Emptying`.

    Args:
        own: the deletion in the core's own store.
        num_others: other hosts that are to empty their stores.
    """

    def __init__(self, own: Emptying, num_others: int) -> None:
        self._own, self._num_awaited = own, num_others
        self._error: ErrorInfo | None = None

    @property
    def is_done(self) -> bool:
        return self._own.is_done and not self._num_awaited

    @property
    def error(self) -> ErrorInfo | None:
        return self._own.error or self._error

    def note(self, error: ErrorInfo | None) -> None:
        """Record that one more host's store has been emptied, or, with an error, that it cannot be."""
        self._num_awaited -= 1
        self._error = self._error or error


@dataclass(slots=True)
class _Question:
    """A question to other hosts.

    Attributes:
        count: how many leading blocks the hosts have that have answered so far: the least of their counts.
        num_awaited: hosts that have not answered.
    """

    count: int
    num_awaited: int


class HostsCatalogue:
    """The catalogue of the KV blocks that are in the stores of all hosts.

    Args:
        own: the catalogue of the core's store; closed with this one.
    """

    def __init__(self, own: StoreCatalogue) -> None:
        self._own = own
        self._sites = ONE_STORE
        self._calls: StoreCalls = NO_STORE_CALLS
        self._asked: dict[int, Sequence[bytes]] = {}  # names by ticket: the own store is asked
        self._questions: dict[int, _Question] = {}  # by ticket: other hosts are asked
        self._answered: list[tuple[int, int]] = []
        self._numbers = itertools.count()  # of deletions in other hosts' stores
        self._emptyings: dict[int, HostsEmptying] = {}

    def meet(self, sites: StoreSites, calls: StoreCalls) -> bool:
        """Use these stores from now on, over the ranks of a new epoch; return whether they may be others.

        They may not if one store serves all hosts, before and after. Else open questions are forgotten.
        Implements `Catalogue.meet`.
        """
        if sites == self._sites == ONE_STORE:
            return False
        # While the old sites are still set: whether questions were open depends on these.
        self.lose_all()
        self._sites, self._calls = sites, calls if sites.others else NO_STORE_CALLS
        return True

    def lose_all(self) -> None:
        """Forget the questions to other hosts, since the ranks that would answer are lost.

        Deletions that are under way in stores of other hosts count as failed.
        """
        self._calls = NO_STORE_CALLS
        if self._sites.others:
            self._asked.clear()
            self._questions.clear()
            self._answered.clear()
        for emptying in self._emptyings.values():
            emptying.note(_NOT_EMPTIED)
        self._emptyings.clear()

    def look_up(self, ticket: int, names: Sequence[bytes]) -> None:
        """Ask how many of the first of these names are in the stores of all hosts; does not wait.

        The core's own store is asked first, and the other hosts when that one has answered. `answers` returns
        the result.
        Implements `Catalogue.look_up`.

        Args:
            ticket: a number by which the answer is known.
        """
        self._asked[ticket] = names
        self._own.look_up(ticket, names, self._sites.own)

    def answers(self) -> list[tuple[int, int]]:
        """Return (ticket, number of leading names stored) of the questions answered since the last call.

        When the core's own store has answered, the other hosts are asked about the names that it has.
        Implements `Catalogue.answers`.
        """
        for ticket, count in self._own.answers():
            if (names := self._asked.pop(ticket, None)) is not None:
                self._ask_others(ticket, names[:count])
        for answers in self._calls.reports.entry_answers():
            for ticket, count in answers.counts.items():
                self._note_count(ticket, count)
            for number, error in answers.emptied.items():
                self._note_emptied(number, error)
        answered, self._answered = self._answered, []
        return answered

    def enter(self, names: Sequence[bytes]) -> None:
        """Record in the catalogues of all hosts that all parts of these blocks are stored.

        Implements `Catalogue.enter`.
        """
        self._own.enter(names, self._sites.own)
        for site in self._sites.others:
            self._call(site, EntryCall(number=0, what="enter", names=list(names), share=site.share.encoded()))

    def strike(self, names: Sequence[bytes]) -> None:
        """Remove these names from the catalogues of all hosts, so that the blocks are not found any more.

        Implements `Catalogue.strike`.
        """
        self._own.strike(names)
        for site in self._sites.others:
            self._call(site, EntryCall(number=0, what="strike", names=list(names)))

    def use(self) -> StoreUse:
        """Return how the core has used its own store since the start; ranks report how others are used."""
        return self._own.use()

    def empty(self) -> Emptying:
        """Begin to delete this model's blocks in the stores of all hosts; return the deletion under way.

        Implements `CataloguedStore.empty`.
        """
        emptying = HostsEmptying(self._own.empty(), len(self._sites.others))
        for site in self._sites.others:
            number = next(self._numbers)
            self._emptyings[number] = emptying
            if not self._call(site, EntryCall(number=number, what="empty")):
                self._note_emptied(number, _NOT_EMPTIED)
        return emptying

    def close(self) -> None:
        """Close the catalogue of the core's store. No call may follow. Implements `Catalogue.close`."""
        self._own.close()

    def _ask_others(self, ticket: int, names: Sequence[bytes]) -> None:
        """Ask the other hosts about the blocks that the core's own store has."""
        others = self._sites.others if names else ()
        if not others:
            self._answered.append((ticket, len(names)))
            return
        self._questions[ticket] = _Question(len(names), len(others))
        for site in others:
            call = EntryCall(number=ticket, what="count", names=list(names), share=site.share.encoded())
            if not self._call(site, call):
                self._note_count(ticket, 0)

    def _call(self, site: HostStore, call: EntryCall) -> bool:
        return self._calls.call_store(site.rank, call)

    def _note_count(self, ticket: int, count: int) -> None:
        question = self._questions.get(ticket)
        if question is None:
            return
        question.count = max(0, min(question.count, count))
        question.num_awaited -= 1
        if not question.num_awaited:
            del self._questions[ticket]
            self._answered.append((ticket, question.count))

    def _note_emptied(self, number: int, error: ErrorInfo | None) -> None:
        emptying = self._emptyings.pop(number, None)
        if emptying is not None:
            emptying.note(error)

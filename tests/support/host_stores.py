"""Stores that hosts have to themselves, for cores of tests: who answers for them, and what they hold."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fakes import FakeExecutor
from penstock.batch import EntryAnswers, EntryCall
from penstock.kvstore.catalogue import StoreCatalogue
from penstock.kvstore.entry_calls import EntryCalls
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.layer_share import WHOLE, LayerShare
from penstock.kvstore.store import MemoryStore

SPACE = bytes(16)


class PunctualCatalogue(StoreCatalogue):
    """Has done what it is asked for when a call returns, so that no test waits for a thread."""

    def look_up(self, ticket: int, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        super().look_up(ticket, names, share)
        self._wait()

    def enter(self, names: Sequence[bytes], share: LayerShare = WHOLE) -> None:
        super().enter(names, share)
        self._wait()

    def strike(self, names: Sequence[bytes]) -> None:
        super().strike(names)
        self._wait()

    def _wait(self) -> None:
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()


def catalogue_of(store: MemoryStore) -> PunctualCatalogue:
    """The catalogue in a store."""
    return PunctualCatalogue(GuardedStore(store), SPACE)


class AnsweringRanks:
    """The ranks that answer for other hosts; `kvcache.stored_names.StoreCalls`.

    Args:
        stores: of the hosts, by the rank that answers.

    Attributes:
        calls: that were sent, in order, each with its rank.
        deaf: ranks to which nothing can be sent.
        silent: ranks that carry out what they are told, and answer nothing.
    """

    def __init__(self, stores: dict[int, MemoryStore]) -> None:
        self.calls: list[tuple[int, EntryCall]] = []
        self.deaf: set[int] = set()
        self.silent: set[int] = set()
        self._ranks = {
            rank: EntryCalls(lambda store=store: catalogue_of(store)) for rank, store in stores.items()
        }

    @property
    def reports(self) -> AnsweringRanks:
        return self

    def call_store(self, rank: int, call: EntryCall) -> bool:
        if rank in self.deaf:
            return False
        self.calls.append((rank, call))
        self._ranks[rank].carry_out(call)
        return True

    def entry_answers(self) -> list[EntryAnswers]:
        collected = [entries.collect() for rank, entries in self._ranks.items() if rank not in self.silent]
        return [answers for answers in collected if answers is not None]

    def close(self) -> None:
        for entries in self._ranks.values():
            entries.close()


class HostsExecutor(FakeExecutor):
    """An executor some of whose ranks answer for the stores of their hosts."""

    def __init__(self, *, ranks: AnsweringRanks, **settings: Any) -> None:
        super().__init__(**settings)
        self._ranks = ranks

    def call_store(self, rank: int, call: EntryCall) -> bool:
        return self._ranks.call_store(rank, call)

    def entry_answers(self) -> list[EntryAnswers]:
        return self._ranks.entry_answers()

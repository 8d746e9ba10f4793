"""A catalogue of a store for cores of tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.batch import NO_STORE_USE, StoreUse
from penstock.errors import ErrorInfo
from penstock.kvcache.host_names import HostNames
from penstock.kvcache.storage_tier import StorageTier
from penstock.kvcache.store_sites import StoreSites
from penstock.kvcache.stored_names import StoreCalls


@dataclass
class FakeEmptying:
    is_done: bool
    error: ErrorInfo | None = None


@dataclass
class FakeCatalogue:
    """Answers at once, or when it is told to."""

    names: set[bytes] = field(default_factory=set)
    is_slow: bool = False
    asked: list[tuple[int, list[bytes]]] = field(default_factory=list)
    own_use: StoreUse = NO_STORE_USE
    emptyings: list[FakeEmptying] = field(default_factory=list)

    def meet(self, sites: StoreSites, calls: StoreCalls) -> bool:
        """One store serves all hosts."""
        return False

    def lose_all(self) -> None:
        """No other host is asked."""

    def look_up(self, ticket: int, names: Sequence[bytes]) -> None:
        self.asked.append((ticket, list(names)))

    def answers(self) -> list[tuple[int, int]]:
        if self.is_slow:
            return []
        asked, self.asked = self.asked, []
        return [(ticket, self._count(names)) for ticket, names in asked]

    def _count(self, names: Sequence[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in self.names), len(names))

    def enter(self, names: Sequence[bytes]) -> None:
        self.names.update(names)

    def strike(self, names: Sequence[bytes]) -> None:
        self.names.difference_update(names)

    def use(self) -> StoreUse:
        return self.own_use

    def empty(self) -> FakeEmptying:
        self.emptyings.append(emptying := FakeEmptying(is_done=not self.is_slow))
        self.names.clear()
        return emptying

    def close(self) -> None:
        pass


def names_in_memory(tier: StorageTier) -> frozenset[bytes]:
    """Return the names of all blocks of which ranks may have parts in host memory."""
    memory = tier._memory
    return frozenset(memory._names) if isinstance(memory, HostNames) else frozenset()

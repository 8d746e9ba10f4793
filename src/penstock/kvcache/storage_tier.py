"""The storage tier (L3): which blocks are in the store, and what is on its way there and back.

    named in the pool ──order──▶ every rank stores its part ──all have answered──▶ in the catalogue
    in the catalogue ──a request that begins so waits──▶ blocks reserved ──order──▶ every rank loads its part
                                    ──all have answered──▶ named in the pool, idle: found as any other block

The core decides, ranks carry out, and no copy counts before all ranks have answered. So a block is stored or
loaded on all stages or on none, even if a copy fails on one of them [H5] [H6] [H13]. The catalogue says
that all parts of a block were stored once. It is a hint: a part that is gone or bad only makes a load fail.

A request whose blocks are being loaded may begin before they are there, where no other runs. Ranks then wait
for each layer before they run it, and the core waits with the result until all have answered. If some blocks
do not come, the core drops the result, and the request begins again behind the blocks that have come.

A block that is being copied is pinned in the pool. The tier has four parts: `kvcache.write_back` stores
blocks, `kvcache.prefetching` loads them, `kvcache.stored_names` records which blocks the store has, and
`kvcache.host_names` records which blocks ranks keep in host memory in front of the store. Called by the
scheduler, in the core's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.batch import NO_STORE_USE, OrderResult, StoreUse, TierOrder
from penstock.errors import ErrorInfo
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.host_names import AnyHostNames, HostNames, NoHostNames, OnlyHostNames
from penstock.kvcache.prefetching import LoadedBlocks, Prefetching, PrefetchPatience
from penstock.kvcache.store_sites import StoreSites
from penstock.kvcache.stored_names import Catalogue, Emptying, StoreCalls, StoredNames
from penstock.kvcache.tier_orders import TierOrders
from penstock.kvcache.write_back import WriteBack

MOST_NAMES = 1 << 18  # of stored blocks that a core keeps, or twice its pool's blocks if more; some 40 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """The settings of the storage tier.

    Attributes:
        store_when_found: 0: a block is stored as soon as requests can find it; n: when n requests have found
            it.
        host_blocks: blocks that each rank has room for in host memory; 0: none is kept there.
        has_store: a store is behind host memory.
        patience: seconds that a request may wait for its blocks from the store (`PrefetchPatience`).
    """

    store_when_found: int = 0
    host_blocks: int = 0
    has_store: bool = True
    patience: PrefetchPatience = PrefetchPatience(2.0, 2.0)  # noqa: RUF009  a frozen value


@dataclass(slots=True, kw_only=True)
class TierTotals:
    """The counts of KV blocks stored and loaded since the start, and of copies that failed."""

    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0  # stores and loads


class StorageTier:
    """The KV store behind the pool, as the scheduler uses it: decides what ranks store and load.

    A name is the content hash of a block. Requests are known by their arrival numbers.

    Args:
        allocator: gives the blocks of the pool.
        catalogue: says which names are in the store.
        clock: monotonic seconds.
        policy: the settings.
    """

    is_there = True

    def __init__(
        self,
        allocator: BlockAllocator,
        catalogue: Catalogue,
        clock: Callable[[], float],
        policy: TierPolicy,
    ) -> None:
        self._catalogue = catalogue
        self._orders = TierOrders()
        self._stored = StoredNames(catalogue, max(MOST_NAMES, 2 * allocator.num_blocks))
        self._memory = memory = _host_names(policy, self._stored)
        self._write_back = WriteBack(allocator, self._stored, self._orders, memory, policy.store_when_found)
        self._prefetching = Prefetching(
            allocator, catalogue, self._stored, self._orders, memory, clock, policy.patience
        )
        self.totals = TierTotals()

    @property
    def has_orders(self) -> bool:
        """Whether orders to copy blocks wait for a plan to carry them to the ranks."""
        return len(self._orders) > 0

    def next_look(self) -> float:
        """Return the clock time at which to look for news even if no rank has answered.

        By then the catalogue may have answered, or a request has waited long enough. Infinite if there is
        nothing to wait for.
        """
        return self._prefetching.next_look()

    def take_orders(self) -> list[TierOrder]:
        """Remove and return the orders to copy blocks that no plan carries yet, for the plan being issued."""
        return self._orders.take_orders()

    def take_given_up(self) -> list[bytes]:
        """Remove and return the names of blocks that ranks are to drop from host memory.

        The plan being issued carries them; ranks forget them before they carry out its orders.
        """
        return self._memory.take_given_up()

    def store_named(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Order ranks to store blocks that have just been named (are findable now), if the policy says so.

        Args:
            blocks: ids of the blocks.
            names: their names, in the same order.
        """
        self._write_back.store_named(blocks, names)

    def store_found(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Order ranks to store blocks that a starting request has found, if they were found often enough.

        Args:
            blocks: ids of the blocks.
            names: their names, in the same order.
        """
        self._write_back.store_found(blocks, names)

    def fetch_blocks(self, arrival: int, names: Sequence[bytes], first: int) -> None:
        """Ask the catalogue which blocks of a waiting request are in the store; nothing is loaded yet.

        `take_answers` orders the loads once the answer has come. Nothing is asked if the pool has all blocks.

        Args:
            arrival: the request's number.
            names: names of all blocks with which the request could begin.
            first: the index of the first of these that the pool lacks. All from it on are looked up, even
                those that the pool has.
        """
        self._prefetching.fetch_blocks(arrival, names, first)

    def must_wait(self, arrival: int) -> bool:
        """Return whether blocks of this request are on their way from the store, and are worth the wait.

        If the store is too slow, the leading blocks that have come are made findable.
        """
        return self._prefetching.must_wait(arrival)

    def on_the_way(self, arrival: int) -> tuple[int, list[int]]:
        """Return which blocks of a request are being loaded, if the request may start before they have come.

        Returns:
            The place of the first of them among the request's blocks, and their ids; no ids if it may not
            start (`Prefetching.on_the_way` says when).
        """
        return self._prefetching.on_the_way(arrival)

    def is_any_open(self, orders: Sequence[int]) -> bool:
        """Return whether the ranks have yet to answer any of these orders, which are all to load blocks."""
        return any(map(self._prefetching.has_ordered, orders))

    def open_orders(self, arrival: int) -> list[int]:
        """Return the numbers of the orders to load blocks of this request that are not answered."""
        return self._prefetching.open_orders(arrival)

    def forget_request(self, arrival: int) -> None:
        """Forget a request that starts or has ended, unless ranks load blocks of it.

        Blocks being loaded become findable all the same, and the request is forgotten when they have come.
        """
        self._prefetching.forget_request(arrival)

    def take_answers(self, num_spare: int) -> None:
        """Take the catalogue's answers; reserve blocks of the pool for what is stored, and order the loads.

        Args:
            num_spare: free blocks that must be left for running requests.
        """
        self._prefetching.take_answers(num_spare)

    def settle_orders(self, finished: Sequence[OrderResult]) -> list[LoadedBlocks]:
        """Record the outcomes of orders that all ranks have answered, and order more blocks to be stored.

        Args:
            finished: the orders, to load or to store; unknown ones are ignored.

        Returns:
            The outcome of each request's load that is over.
        """
        entered, loaded = [], []
        for order, status in finished:
            if self._prefetching.has_ordered(order):
                loaded += self._prefetching.settle_order(order, status)
                self.totals.num_loaded += status == "done"
            elif self._write_back.has_ordered(order):
                entered += self._write_back.settle_order(order, status)
                self.totals.num_stored += status == "done"
            else:
                continue
            self.totals.num_failed += status != "done"
        self._stored.enter(entered)
        # After all answers are taken: how many more copies may begin depends on the orders still open.
        self._write_back.order_more()
        return loaded

    def distrust(self, names: Sequence[bytes]) -> None:
        """Make the blocks of these names unfindable in the store and in host memory: they may be wrong."""
        self._stored.distrust(names)
        self._write_back.disown(names)
        self._memory.drop(names)

    def meet(self, sites: StoreSites, calls: StoreCalls) -> None:
        """Use the stores in which the ranks of a new epoch (after a loss, or at the start) keep blocks.

        Waiting requests have their whole patience before them again. If the stores may be others than before,
        all names known to be stored are forgotten, and the catalogue is asked again for these requests.

        Args:
            sites: which stores these are, and which layers' parts of blocks each has.
            calls: carries questions to the ranks of other hosts.
        """
        self._prefetching.restart_waits()
        if self._catalogue.meet(sites, calls):
            self._stored.forget()
            self._prefetching.ask_again()

    def lose_all(self) -> None:
        """Forget all open orders, since the ranks are lost and will not answer."""
        self._catalogue.lose_all()
        self._write_back.lose_all()
        self._prefetching.lose_all()
        self._memory.lose_all()
        self._orders.clear()

    def flush_orders(self) -> frozenset[int]:
        """Hide blocks that are being loaded from the store, and order no more of the present ones stored.

        Returns:
            The numbers of the orders, to load or to store, that the ranks have not answered.
        """
        self._write_back.flush_orders()
        self._prefetching.flush_orders()
        return frozenset((*self._write_back.open_orders, *self._prefetching.all_open_orders))

    def has_open(self, orders: Iterable[int]) -> bool:
        """Return whether the ranks have yet to answer any of these orders, to load or to store."""
        return any(
            self._write_back.has_ordered(order) or self._prefetching.has_ordered(order) for order in orders
        )

    def own_use(self) -> StoreUse:
        """Return how the core itself has used the store since the start."""
        return self._catalogue.use()

    def empty_store(self) -> Emptying:
        """Begin to delete all blocks of this model in the store and in host memory; return the deletion.

        No copy to or from the store may be under way.
        """
        self._memory.drop_all()
        return self._stored.empty()

    def close(self) -> None:
        """Close the catalogue of the store. No call may follow."""
        self._catalogue.close()


def _host_names(policy: TierPolicy, stored: StoredNames) -> AnyHostNames:
    if not policy.host_blocks:
        return NoHostNames()
    return HostNames(policy.host_blocks) if policy.has_store else OnlyHostNames(policy.host_blocks, stored)


class _NothingToEmpty:
    """The emptying of a store that does not exist."""

    is_done = True
    error: ErrorInfo | None = None


class NoStorageTier:
    """A stand-in where there is no store: it holds no block and orders no copy."""

    is_there = False
    has_orders = False

    def __init__(self) -> None:
        self.totals = TierTotals()

    def next_look(self) -> float:
        return math.inf

    def take_orders(self) -> list[TierOrder]:
        return []

    def take_given_up(self) -> list[bytes]:
        return []

    def store_named(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Do nothing: there is no store."""

    def store_found(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Do nothing: there is no store."""

    def fetch_blocks(self, arrival: int, names: Sequence[bytes], first: int) -> None:
        """Do nothing: there is no store."""

    def must_wait(self, arrival: int) -> bool:
        return False

    def on_the_way(self, arrival: int) -> tuple[int, list[int]]:
        return 0, []

    def is_any_open(self, orders: Sequence[int]) -> bool:
        return False

    def open_orders(self, arrival: int) -> list[int]:
        return []

    def forget_request(self, arrival: int) -> None:
        """Do nothing: there is no store."""

    def take_answers(self, num_spare: int) -> None:
        """Do nothing: there is no store."""

    def settle_orders(self, finished: Sequence[OrderResult]) -> list[LoadedBlocks]:
        return []

    def distrust(self, names: Sequence[bytes]) -> None:
        """Do nothing: there is no store."""

    def meet(self, sites: StoreSites, calls: StoreCalls) -> None:
        """Do nothing: there is no store."""

    def lose_all(self) -> None:
        """Do nothing: there is no store."""

    def flush_orders(self) -> frozenset[int]:
        return frozenset()

    def has_open(self, orders: Iterable[int]) -> bool:
        return False

    def own_use(self) -> StoreUse:
        return NO_STORE_USE

    def empty_store(self) -> Emptying:
        return _NothingToEmpty()

    def close(self) -> None:
        """Do nothing: there is no store."""


AnyStorageTier = StorageTier | NoStorageTier

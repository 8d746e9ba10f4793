"""The storage tier (L3): which blocks are in the store, and what is on its way there and back.

    named in the pool ──order──▶ every rank stores its part ──all have answered──▶ in the catalogue
    in the catalogue ──a request that begins so waits──▶ blocks reserved ──order──▶ every rank loads its part
                                    ──all have answered──▶ named in the pool, idle: found as any other block

The core decides, ranks carry out, and nothing counts before all of them have answered: so a block is stored
or loaded on all stages or on none, whatever each of them met with (rows H5, H6, H13). The catalogue says that
all parts of a block were stored once; it is a hint: a part that is gone or bad only makes a load fail.

A request whose blocks are being loaded may begin before they are there, where no other runs: ranks wait
for each layer before they run it, and the core waits with the result until all have answered. If some blocks
do not come it drops that, and the request begins again behind those that have.

A block that is being copied is pinned in the pool. Three parts: `kvcache.write_back` is the way there,
`kvcache.prefetching` the way back, `kvcache.stored_names` what is known of the store; `kvcache.host_names`
knows which blocks ranks keep in host memory in front of it. Called by the scheduler, in the core's thread.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """The settings of the storage tier.

    Attributes:
        store_when_found: 0 stores a block when it is named; n when it has been found n times.
        host_blocks: blocks that each rank has room for in host memory; 0: none is kept there.
        has_store: a store is behind host memory.
        patience: how long a request may wait for its blocks.
    """

    store_when_found: int = 0
    host_blocks: int = 0
    has_store: bool = True
    patience: PrefetchPatience = PrefetchPatience(2.0, 2.0)  # noqa: RUF009  a frozen value


@dataclass(slots=True, kw_only=True)
class TierTotals:
    """The numbers of blocks copied since the start."""

    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0  # stores and loads


class StorageTier:
    """The store as the scheduler sees it.

    Args:
        allocator: the pool's blocks.
        catalogue: says what is in the store.
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
        self._stored = StoredNames(catalogue)
        self._memory = memory = _host_names(policy, self._stored)
        self._write_back = WriteBack(allocator, self._stored, self._orders, memory, policy.store_when_found)
        self._prefetching = Prefetching(
            allocator, catalogue, self._stored, self._orders, memory, clock, policy.patience
        )
        self.totals = TierTotals()

    @property
    def has_orders(self) -> bool:
        """Whether a plan should go out to carry orders to the ranks."""
        return len(self._orders) > 0

    def next_look(self) -> float:
        """Return the clock time at which there may be something new though no rank has answered."""
        return self._prefetching.next_look()

    def take_orders(self) -> list[TierOrder]:
        """Return the orders for the plan that is issued now."""
        return self._orders.take_orders()

    @property
    def names_in_memory(self) -> frozenset[bytes]:
        """The names of all blocks of which ranks may have parts in host memory."""
        return self._memory.names

    def take_given_up(self) -> list[bytes]:
        """Return the names that ranks forget before the orders of the plan being issued."""
        return self._memory.take_given_up()

    def store_named(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Store blocks that have just been named, if the policy says so."""
        self._write_back.store_named(blocks, names)

    def store_found(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Store blocks that a starting request has found, if they were found often enough."""
        self._write_back.store_found(blocks, names)

    def fetch_blocks(self, arrival: int, names: Sequence[bytes], first: int) -> None:
        """Look up a waiting request's blocks from its `first` on in the store, to load them."""
        self._prefetching.fetch_blocks(arrival, names, first)

    def must_wait(self, arrival: int) -> bool:
        """See `Prefetching.must_wait`."""
        return self._prefetching.must_wait(arrival)

    def on_the_way(self, arrival: int) -> tuple[int, list[int]]:
        """See `Prefetching.on_the_way`."""
        return self._prefetching.on_the_way(arrival)

    def is_any_open(self, orders: Sequence[int]) -> bool:
        """Return whether one of these orders, all to load, is not answered."""
        return any(map(self._prefetching.has_ordered, orders))

    def open_orders(self, arrival: int) -> list[int]:
        """Return the open orders to load blocks of this request."""
        return self._prefetching.open_orders(arrival)

    def forget_request(self, arrival: int) -> None:
        """Forget a request that starts or has gone; blocks under way become findable all the same."""
        self._prefetching.forget_request(arrival)

    def take_answers(self, num_spare: int) -> None:
        """Take the catalogue's answers, and begin to load.

        Args:
            num_spare: blocks that must stay for others.
        """
        self._prefetching.take_answers(num_spare)

    def settle_orders(self, finished: Sequence[OrderResult]) -> list[LoadedBlocks]:
        """Settle orders that all ranks have answered.

        Returns:
            The outcome of each load that is over.
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
        # Only when all answers are taken: how many more begin depends on the orders that are still open.
        self._write_back.order_more()
        return loaded

    def distrust(self, names: Sequence[bytes]) -> None:
        """Remove what the store has under these names, so that no request finds it."""
        self._stored.distrust(names)
        self._write_back.disown(names)
        self._memory.drop(names)

    def meet(self, sites: StoreSites, calls: StoreCalls) -> None:
        """Use the stores at which the ranks of a new epoch keep blocks.

        Args:
            sites: where the ranks keep their parts of blocks.
            calls: the way to the ranks.
        """
        if self._catalogue.meet(sites, calls):
            self._stored.forget()
            self._prefetching.ask_again()

    def lose_all(self) -> None:
        """Forget all open orders, which will not be answered any more."""
        self._catalogue.lose_all()
        self._write_back.lose_all()
        self._prefetching.lose_all()
        self._memory.lose_all()
        self._orders.clear()

    def flush_orders(self) -> frozenset[int]:
        """Hide what is on its way from the store, and store no more of what the pool has now.

        Returns:
            The orders that are open.
        """
        self._write_back.flush_orders()
        self._prefetching.flush_orders()
        return frozenset((*self._write_back.open_orders, *self._prefetching.all_open_orders))

    def has_open(self, orders: Iterable[int]) -> bool:
        """Return whether any of these orders is still to be answered."""
        return any(
            self._write_back.has_ordered(order) or self._prefetching.has_ordered(order) for order in orders
        )

    def own_use(self) -> StoreUse:
        """Return how the core itself has used the store since the start."""
        return self._catalogue.use()

    def empty_store(self) -> Emptying:
        """Delete all blocks of this model in the store; no copy may be under way there."""
        self._memory.drop_all()
        return self._stored.empty()

    def close(self) -> None:
        """Close the catalogue. No call may follow."""
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
    """A tier that holds nothing and orders nothing: what is not in the pool is nowhere."""

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
        """Do nothing."""

    def store_found(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Do nothing."""

    def fetch_blocks(self, arrival: int, names: Sequence[bytes], first: int) -> None:
        """Do nothing."""

    def must_wait(self, arrival: int) -> bool:
        return False

    def on_the_way(self, arrival: int) -> tuple[int, list[int]]:
        return 0, []

    def is_any_open(self, orders: Sequence[int]) -> bool:
        return False

    def open_orders(self, arrival: int) -> list[int]:
        return []

    def forget_request(self, arrival: int) -> None:
        """Do nothing."""

    def take_answers(self, num_spare: int) -> None:
        """Do nothing."""

    def settle_orders(self, finished: Sequence[OrderResult]) -> list[LoadedBlocks]:
        return []

    def distrust(self, names: Sequence[bytes]) -> None:
        """Do nothing."""

    def meet(self, sites: StoreSites, calls: StoreCalls) -> None:
        """Do nothing."""

    def lose_all(self) -> None:
        """Do nothing."""

    def flush_orders(self) -> frozenset[int]:
        return frozenset()

    def has_open(self, orders: Iterable[int]) -> bool:
        return False

    def own_use(self) -> StoreUse:
        return NO_STORE_USE

    def empty_store(self) -> Emptying:
        return _NothingToEmpty()

    def close(self) -> None:
        """Do nothing."""


AnyStorageTier = StorageTier | NoStorageTier

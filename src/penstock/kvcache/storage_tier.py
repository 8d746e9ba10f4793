"""The storage tier (L3): which blocks are in the store, and what is on its way there and back.

    named in the pool ──order──▶ every rank stores its part ──all have answered──▶ in the catalogue
    in the catalogue ──a request that begins so waits──▶ blocks reserved ──order──▶ every rank loads its part
                                    ──all have answered──▶ named in the pool, idle: found as any other block

The core decides, ranks carry out, and nothing counts before all of them have answered: so a block is stored
or loaded on all stages or on none, whatever each of them met with (rows H5, H6, H13). The catalogue says that
all parts of a block were stored once; it is a hint: a part that is gone or bad only makes a load fail.

    LOOKED_UP ──found──▶ LOADING ──▶ (no longer waits)
        └──────nothing found, no room, or too late──▶ (no longer waits)

A request whose blocks are being loaded may begin before they are there, where nobody else runs: ranks wait
for each layer before they run it, and the core waits with the result until all have answered. If some blocks
do not come it drops that, and the request begins again behind those that have.

A block that is being copied is pinned in the pool. Looking things up in the catalogue may take long: it is
done by `kvcache.catalogue`, beside. Pure otherwise; called by the scheduler, in the core's thread.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.batch import Outcome, StoreUse, TierOrder
from penstock.errors import ErrorInfo
from penstock.kvcache.allocator import BlockAllocator

EARLY_S = 0.5  # that a load may take, by how long the last one took, for somebody to begin before it is done
LOOK_S = 0.001  # between two looks for what the catalogue has answered
MAX_OPEN_STORES = 256  # blocks that are being copied at once, or a quarter of the pool
MAX_WAITING_STORES = 1 << 16  # blocks that are to be stored when others have been


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """Attributes:
    store_when_found: 0 stores a block when it is named; n when it has been found n times.
    patience_s: how long a request may wait for its blocks.
    """

    store_when_found: int = 0
    patience_s: float = 2.0


@dataclass(slots=True)
class Prefetch:
    """What a waiting request is waiting for.

    Attributes:
        before: names of its blocks that are in the pool; `names` are of those behind.
        open_orders: not answered yet.
        good: of the blocks that were to be loaded, those that were.
        held: blocks of `before`, while others are loaded: without them nobody finds those.
        ordered_at: when the orders to load were made.
    """

    before: list[bytes]
    names: list[bytes]
    give_up_at: float
    blocks: list[int] = field(default_factory=list)
    open_orders: dict[int, int] = field(default_factory=dict)  # order: place in `blocks`
    is_flushed: bool = False  # what comes is not to be found any more
    good: set[int] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    ordered_at: float = -math.inf

    def num_come(self) -> int:
        """Blocks from the first on that were loaded, up to one that was not, or not yet."""
        return next((place for place in range(len(self.blocks)) if place not in self.good), len(self.blocks))

    def take_first(self, count: int) -> list[int]:
        """The first blocks, which are among those `before` from now on."""
        taken, self.blocks = self.blocks[:count], self.blocks[count:]
        self.before, self.names = [*self.before, *self.names[:count]], self.names[count:]
        self.good = {place - count for place in self.good if place >= count}
        self.open_orders = {order: place - count for order, place in self.open_orders.items()}
        return taken


@dataclass(slots=True)
class _Manner:
    """How the store has been of late.

    Attributes:
        is_slow: it did not answer in time: nobody waits for it until it has.
        block_s: what each block of the last load took; infinite if one failed, and before the first load.
    """

    is_slow: bool = False
    block_s: float = math.inf


class LoadedBlocks(NamedTuple):
    """The blocks of a request, or as many of them as have come, from its `first` on."""

    arrival: int
    first: int
    num_wanted: int
    num_come: int


@dataclass(slots=True, kw_only=True)
class TierTotals:
    """Blocks since the start."""

    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0  # stores and loads


class StorageTier:
    """Args:
    allocator: of the pool's blocks.
    catalogue: of what is in the store.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        catalogue: Catalogue,
        clock: Callable[[], float],
        policy: TierPolicy,
    ) -> None:
        self._allocator, self._catalogue, self._clock = allocator, catalogue, clock
        self._policy = policy
        self._new_orders: list[TierOrder] = []
        self._numbers = itertools.count()  # of orders, and of questions to the catalogue
        self._stores: dict[int, tuple[int, bytes]] = {}  # open: block and name
        self._to_store: deque[tuple[int, bytes]] = deque()
        self._pending: set[bytes] = set()  # names of both
        self._stored: set[bytes] = set()  # that this core knows of
        self._prefetches: dict[int, Prefetch] = {}  # by the arrival number of the request
        self._tickets: dict[int, tuple[int, float]] = {}  # of open questions: whose, and asked when
        self._manner = _Manner()
        self._loads: dict[int, int] = {}  # order: whose
        self.totals = TierTotals()

    @property
    def has_orders(self) -> bool:
        """Whether a plan should go out for their sake."""
        return bool(self._new_orders)

    def next_look(self) -> float:
        """Clock time at which `look` or `must_wait` may tell something new though no rank has answered."""
        now = self._clock()
        prefetches = [found for found in self._prefetches.values() if not found.is_flushed]
        waiting = [prefetch for prefetch in prefetches if now < prefetch.give_up_at]
        if any(not prefetch.open_orders for prefetch in waiting):
            return now + LOOK_S
        return min((prefetch.give_up_at for prefetch in waiting), default=math.inf)

    def take_orders(self) -> list[TierOrder]:
        """For the plan that is issued now."""
        orders, self._new_orders = self._new_orders, []
        return orders

    # --- to the store ---------------------------------------------------------------------------

    def named(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """These blocks can be found from now on."""
        if not self._policy.store_when_found:
            self._store(zip(blocks, names, strict=True))

    def found(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """These were found by a request that starts."""
        cache = self._allocator.pool.cache
        assert cache is not None
        self._store(
            (block, name)
            for block, name in zip(blocks, names, strict=True)
            if cache.num_uses(block) >= self._policy.store_when_found
        )

    def _store(self, candidates: Iterable[tuple[int, bytes]]) -> None:
        for block, name in candidates:
            is_known = name in self._stored or name in self._pending
            if not is_known and len(self._to_store) < MAX_WAITING_STORES:
                self._pending.add(name)
                self._to_store.append((block, name))
        self._order_stores()

    def _order_stores(self) -> None:
        most = min(MAX_OPEN_STORES, max(1, self._allocator.num_blocks // 4))
        while self._to_store and len(self._stores) < most:
            block, name = self._to_store.popleft()
            if self._allocator.find([name]) == [block]:
                self._allocator.pin([block])
                self._stores[self._order(False, block, name)] = block, name
            else:  # it was given up meanwhile
                self._pending.discard(name)

    # --- from the store -------------------------------------------------------------------------

    def fetch(self, arrival: int, names: Sequence[bytes], first: int) -> None:
        """A request waits: are its blocks from its `first` on in the store?"""
        if len(names) > first:
            wanted, now = list(names[first:]), self._clock()
            give_up_at = now + self._policy.patience_s
            self._prefetches[arrival] = Prefetch(list(names[:first]), wanted, give_up_at)
            ticket = next(self._numbers)
            self._tickets[ticket] = arrival, now
            self._catalogue.look_up(ticket, wanted)

    def must_wait(self, arrival: int) -> bool:
        """Whether blocks of this request are on their way, and it is worth while to wait. If not, those that
        have come are findable: as many as nothing is missing before."""
        prefetch = self._prefetches.get(arrival)
        if prefetch is None or prefetch.is_flushed:
            return False
        self._manner.is_slow = self._manner.is_slow or self._clock() >= prefetch.give_up_at
        if self._manner.is_slow and (count := prefetch.num_come()):
            first, names = len(prefetch.before), prefetch.names[:count]
            self._allocator.release_reserved(prefetch.take_first(count), first, names)
        return not self._manner.is_slow

    def on_the_way(self, arrival: int) -> tuple[int, list[int]]:
        """The blocks of a waiting request that are being loaded, and which of its own the first of them is;
        none where one has not come, or where the store is not as quick as a step."""
        prefetch = self._prefetches.get(arrival)
        if prefetch is None or prefetch.is_flushed or not prefetch.blocks:
            return 0, []
        if len(prefetch.blocks) * self._manner.block_s > EARLY_S:
            return 0, []
        is_whole = len(prefetch.open_orders) + len(prefetch.good) == len(prefetch.blocks)
        return len(prefetch.before), prefetch.blocks if is_whole else []

    def is_any_open(self, orders: Sequence[int]) -> bool:
        """Whether one of these, all to load, is not answered."""
        return any(order in self._loads for order in orders)

    def open_orders(self, arrival: int) -> list[int]:
        """To load blocks of this request."""
        prefetch = self._prefetches.get(arrival)
        return [] if prefetch is None else list(prefetch.open_orders)

    def forget(self, arrival: int) -> None:
        """The request starts, or has gone: what is on its way becomes findable all the same."""
        prefetch = self._prefetches.get(arrival)
        if prefetch is not None and not prefetch.open_orders:
            del self._prefetches[arrival]

    def look(self, num_spare: int) -> None:
        """Take the catalogue's answers, and begin to load.

        Args:
            num_spare: blocks that must stay for others.
        """
        for ticket, count in self._catalogue.answers():
            arrival, asked_at = self._tickets.pop(ticket, (-1, -math.inf))
            if self._clock() - asked_at < self._policy.patience_s:
                self._manner.is_slow = False
            prefetch = self._prefetches.get(arrival)
            if prefetch is None:  # it has started, or gone, or the ranks were lost since it was asked
                continue
            self._stored.difference_update(prefetch.names[count:])  # the store has given them up
            self._reserve(prefetch, count, num_spare)
            self._stored.update(prefetch.names[:count])
            prefetch.ordered_at = self._clock()
            for place, block in enumerate(prefetch.blocks):
                order = self._order(True, block, prefetch.names[place])
                prefetch.open_orders[order] = place
                self._loads[order] = arrival
            if not prefetch.blocks:
                self._release(self._prefetches.pop(arrival), 0)

    def _reserve(self, prefetch: Prefetch, count: int, num_spare: int) -> None:
        """Blocks for what is loaded, and none that it would be found behind is given up for them."""
        prefetch.held = self._allocator.find(prefetch.before)
        self._allocator.pin(prefetch.held)
        room = max(0, self._allocator.num_free_blocks - num_spare)
        prefetch.blocks = self._allocator.reserve(min(count, room))

    def _release(self, prefetch: Prefetch, count: int) -> None:
        """What was reserved; the first `count` blocks are findable, and given up before what is in front."""
        first = len(prefetch.before)
        self._allocator.release_reserved(prefetch.blocks, first, prefetch.names[:count])
        self._allocator.unpin(prefetch.held)

    # --- answers --------------------------------------------------------------------------------

    def settle(self, finished: Sequence[Outcome]) -> list[LoadedBlocks]:
        """All ranks have answered these orders.

        Returns:
            What has become of the loads that are over.
        """
        entered, loaded = [], []
        for order, is_done in finished:
            if order in self._loads:
                loaded += self._settle_load(order, is_done)
            elif order in self._stores:
                block, name = self._stores.pop(order)
                self._allocator.unpin([block])
                self._pending.discard(name)
                if is_done:
                    entered.append(name)
                    self.totals.num_stored += 1
                else:
                    self.totals.num_failed += 1
        if entered:
            self._stored.update(entered)
            self._catalogue.enter(entered)
        self._order_stores()
        return loaded

    def _settle_load(self, order: int, is_done: bool | None) -> list[LoadedBlocks]:
        arrival = self._loads.pop(order)
        prefetch = self._prefetches[arrival]
        place = prefetch.open_orders.pop(order)
        if is_done:
            prefetch.good.add(place)
            self.totals.num_loaded += 1
        else:
            self.totals.num_failed += 1
            if is_done is not None:
                self.distrust([prefetch.names[place]])
        if prefetch.open_orders:
            return []
        del self._prefetches[arrival]
        wanted = len(prefetch.blocks)
        come = prefetch.num_come()
        took_s = self._clock() - prefetch.ordered_at if come == wanted else math.inf
        self._manner.block_s = took_s / wanted
        self._release(prefetch, 0 if prefetch.is_flushed else come)
        return [LoadedBlocks(arrival, len(prefetch.before), wanted, come)]

    def distrust(self, names: Sequence[bytes]) -> None:
        """What the store has under these names is not to be found any more."""
        self._stored.difference_update(names)
        self._catalogue.strike(names)

    def lose_all(self) -> None:
        """No order will be answered any more."""
        for block, _ in self._stores.values():
            self._allocator.unpin([block])
        self._to_store.clear()
        self._pending.clear()
        for prefetch in self._prefetches.values():
            self._release(prefetch, 0)
        self._new_orders.clear()
        self._stores.clear()
        self._prefetches.clear()
        self._tickets.clear()
        self._loads.clear()

    # --- flushes --------------------------------------------------------------------------------

    def flush(self) -> frozenset[int]:
        """What is on its way from the store becomes findable for nobody, and no more of what the pool has now
        is stored. Returns the orders that are open."""
        self._pending.difference_update(name for _, name in self._to_store)
        self._to_store.clear()
        self._prefetches = {found: one for found, one in self._prefetches.items() if one.open_orders}
        for prefetch in self._prefetches.values():
            prefetch.is_flushed = True
        return frozenset((*self._stores, *self._loads))

    def has_open(self, orders: Iterable[int]) -> bool:
        """Whether any of these is still to be answered."""
        return any(order in self._stores or order in self._loads for order in orders)

    def own_use(self) -> StoreUse:
        """Of the store by the core itself, since the start."""
        return self._catalogue.use()

    def empty_store(self) -> Emptying:
        """Delete all that is in it of this model; nothing may be on its way there."""
        self._stored.clear()
        return self._catalogue.empty()

    def close(self) -> None:
        """The last call."""
        self._catalogue.close()

    def _order(self, is_load: bool, block: int, name: bytes) -> int:
        order = next(self._numbers)
        self._new_orders.append(TierOrder(order, is_load, block, name))
        return order

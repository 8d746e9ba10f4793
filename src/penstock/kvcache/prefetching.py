"""Loads blocks from the store for requests that wait for them.

    LOOKED_UP ──found──▶ LOADING ──▶ (no longer waits)
        └──────nothing found, no room, or too late──▶ (no longer waits)

Blocks are reserved in the pool before their loads are ordered. Other requests find them once all ranks have
answered. How long a request waits is a policy [H3]: for a time, not at all, or until each block has come or
failed. Called by `kvcache.storage_tier`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.batch import OrderStatus
from penstock.config.engine import PrefetchPolicy
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.host_names import AnyHostNames
from penstock.kvcache.stored_names import Catalogue, StoredNames
from penstock.kvcache.tier_orders import TierOrders

EARLY_S = 0.5  # a request may begin before its load is done if that should take no more, by the last load
LOOK_S = 0.001  # seconds between two looks for what the catalogue has answered
ANSWER_S = 10.0  # seconds for the catalogue's answer, where a request waits for all of its blocks


@dataclass(frozen=True, slots=True)
class PrefetchPatience:
    """The times that a request waits for blocks from the store, in seconds since it asked for them.

    Attributes:
        answer_s: until the catalogue must have said which of them are stored.
        load_s: until the stored ones must be loaded; an order that a rank cannot carry out fails by itself.
    """

    answer_s: float
    load_s: float


def prefetch_patience(policy: PrefetchPolicy, timeout_s: float) -> PrefetchPatience:
    """Return how long requests wait for blocks from the store, by this policy.

    Args:
        policy: `timeout`; `best-effort`, not at all; or `wait-all`, until each block has come or failed.
        timeout_s: seconds that a request waits with the policy `timeout`.
    """
    return {
        "timeout": PrefetchPatience(timeout_s, timeout_s),
        "best-effort": PrefetchPatience(0.0, 0.0),
        "wait-all": PrefetchPatience(ANSWER_S, math.inf),
    }[policy]


@dataclass(slots=True)
class Prefetch:
    """The blocks that a waiting request wants from the store, and how far their load is.

    Attributes:
        before: names (hashes) of its leading blocks that are in the pool.
        names: names of the blocks behind those, which are looked up in the store.
        give_up_at: clock time until which the request waits.
        blocks: ids of the pool's blocks that are reserved for the leading `names`.
        open_orders: orders to load that are not answered, each with its index in `blocks`.
        is_flushed: the cache was flushed, so the blocks that come are not made findable.
        good: indices in `blocks` of those that were loaded.
        held: ids of the blocks of `before`. They are pinned until the loads are over: if one of them were
            evicted, the loaded blocks behind it could not be found.
        ordered_at: clock time at which the loads were ordered.
    """

    before: list[bytes]
    names: list[bytes]
    give_up_at: float
    blocks: list[int] = field(default_factory=list)
    open_orders: dict[int, int] = field(default_factory=dict)  # order: index in `blocks`
    is_flushed: bool = False
    good: set[int] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    ordered_at: float = -math.inf

    def num_come(self) -> int:
        """Return how many of the leading blocks were loaded, up to the first that has failed or is open."""
        return next((index for index in range(len(self.blocks)) if index not in self.good), len(self.blocks))

    def take_first(self, count: int) -> list[int]:
        """Remove and return the ids of the first `count` reserved blocks; their names move to `before`."""
        taken, self.blocks = self.blocks[:count], self.blocks[count:]
        self.before, self.names = [*self.before, *self.names[:count]], self.names[count:]
        self.good = {index - count for index in self.good if index >= count}
        self.open_orders = {order: index - count for order, index in self.open_orders.items()}
        return taken


@dataclass(slots=True)
class _Manner:
    """The recent behaviour of the store.

    Attributes:
        is_slow: an answer or a load was too late. No request waits until the catalogue answers in time again.
        block_s: seconds for each block of the last load; infinite if one failed, and before the first load.
    """

    is_slow: bool = False
    block_s: float = math.inf


class LoadedBlocks(NamedTuple):
    """The outcome of a load from the store for one request.

    Attributes:
        arrival: the request's number.
        first: the place of the first block that was to be loaded among the request's blocks.
        num_wanted: blocks that were to be loaded.
        num_come: leading blocks of these that were loaded.
    """

    arrival: int
    first: int
    num_wanted: int
    num_come: int


class Prefetching:
    """Orders ranks to load blocks with which waiting requests begin, from the KV store into the KV pool.

    The catalogue says which of these blocks are stored. A request that has waited too long starts with the
    blocks that have come, and computes the others. A name is the content hash of a block. Requests are known
    by their arrival numbers.

    Args:
        allocator: gives blocks of the pool to load into.
        catalogue: asked which names the store has; answers come later.
        stored: the names that this core knows to be stored; learns from each answer.
        orders: takes the orders to the ranks.
        memory: the record of the blocks that ranks keep in host memory; what they load is kept there, too.
        clock: monotonic seconds.
        patience: the longest waits of a request for the catalogue's answer and for its blocks.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        catalogue: Catalogue,
        stored: StoredNames,
        orders: TierOrders,
        memory: AnyHostNames,
        clock: Callable[[], float],
        patience: PrefetchPatience,
    ) -> None:
        self._allocator, self._catalogue, self._stored = allocator, catalogue, stored
        self._orders, self._memory = orders, memory
        self._clock = clock
        self._patience = patience
        self._prefetches: dict[int, Prefetch] = {}  # by the arrival number of the request
        self._tickets: dict[int, tuple[int, float]] = {}  # of open questions: the request, and asked when
        self._manner = _Manner()
        self._loads: dict[int, int] = {}  # by open order: the request

    @property
    def all_open_orders(self) -> list[int]:
        """The numbers of all orders to load that the ranks have not answered."""
        return list(self._loads)

    def has_ordered(self, order: int) -> bool:
        """Return whether `order` is the number of an order to load that the ranks have not answered."""
        return order in self._loads

    def next_look(self) -> float:
        """Return the clock time at which to look for news even if no rank has answered.

        By then the catalogue may have answered, or a request has waited long enough. Infinite if there is
        nothing to wait for.
        """
        now = self._clock()
        prefetches = [prefetch for prefetch in self._prefetches.values() if not prefetch.is_flushed]
        waiting = [prefetch for prefetch in prefetches if now < prefetch.give_up_at]
        if any(not prefetch.open_orders for prefetch in waiting):
            return now + LOOK_S
        return min((prefetch.give_up_at for prefetch in waiting), default=math.inf)

    def fetch_blocks(self, arrival: int, names: Sequence[bytes], first: int) -> None:
        """Ask the catalogue which blocks of a waiting request are in the store, to load them later.

        `take_answers` orders the loads. Nothing is done if the pool has all blocks.

        Args:
            arrival: the request's number.
            names: names of all blocks with which the request could begin.
            first: the index of the first of these that the pool lacks; those from it on are looked up.
        """
        if len(names) > first:
            wanted, now = list(names[first:]), self._clock()
            give_up_at = now + self._patience.answer_s
            self._prefetches[arrival] = Prefetch(list(names[:first]), wanted, give_up_at)
            self._ask(arrival, wanted, now)

    def restart_waits(self) -> None:
        """Let requests wait for their blocks from now on as long as they might at first.

        A new epoch calls this: before it, no rank could have loaded a block.
        """
        now = self._clock()
        self._tickets = {ticket: (arrival, now) for ticket, (arrival, _) in self._tickets.items()}
        for prefetch in self._prefetches.values():
            prefetch.give_up_at = now + self._patience.answer_s

    def ask_again(self) -> None:
        """Repeat all open questions to the catalogue, which will not answer the old ones."""
        asked, self._tickets = self._tickets, {}
        for arrival, asked_at in asked.values():
            if (prefetch := self._prefetches.get(arrival)) is not None:
                self._ask(arrival, prefetch.names, asked_at)

    def _ask(self, arrival: int, names: Sequence[bytes], now: float) -> None:
        ticket = self._orders.next_number()
        self._tickets[ticket] = arrival, now
        self._catalogue.look_up(ticket, names)

    def must_wait(self, arrival: int) -> bool:
        """Return whether blocks of this request are on their way from the store, and are worth the wait.

        If the store is too slow, the leading blocks that have come are made findable.
        """
        prefetch = self._prefetches.get(arrival)
        if prefetch is None or prefetch.is_flushed:
            return False
        self._manner.is_slow = self._manner.is_slow or self._clock() >= prefetch.give_up_at
        if self._manner.is_slow and (count := prefetch.num_come()):
            first, names = len(prefetch.before), prefetch.names[:count]
            self._allocator.release_reserved(prefetch.take_first(count), first, names)
        return not self._manner.is_slow

    def on_the_way(self, arrival: int) -> tuple[int, list[int]]:
        """Return which blocks of a request are being loaded, if the request may start before they have come.

        It may not start in three cases:

        - one of the blocks has failed;
        - the load should take longer than `EARLY_S`, judged by the last load;
        - the time is over for which the request may wait, since its step would wait for the blocks too.

        Returns:
            The place of the first of these blocks among the request's blocks, and their ids; no ids if the
            request may not start.
        """
        prefetch = self._prefetches.get(arrival)
        if prefetch is None or prefetch.is_flushed or not prefetch.blocks:
            return 0, []
        is_slow = len(prefetch.blocks) * self._manner.block_s > EARLY_S
        if is_slow or self._clock() >= prefetch.give_up_at:
            return 0, []
        is_whole = len(prefetch.open_orders) + len(prefetch.good) == len(prefetch.blocks)
        return len(prefetch.before), prefetch.blocks if is_whole else []

    def open_orders(self, arrival: int) -> list[int]:
        """Return the numbers of the orders to load blocks of this request that are not answered."""
        prefetch = self._prefetches.get(arrival)
        return [] if prefetch is None else list(prefetch.open_orders)

    def forget_request(self, arrival: int) -> None:
        """Forget a request that starts or has ended, unless ranks load blocks of it.

        Blocks being loaded become findable all the same, and the request is forgotten when they have come.
        """
        prefetch = self._prefetches.get(arrival)
        if prefetch is not None and not prefetch.open_orders:
            del self._prefetches[arrival]

    def take_answers(self, num_spare: int) -> None:
        """Take the catalogue's answers; reserve blocks of the pool for what is stored, and order the loads.

        Args:
            num_spare: free blocks that must be left for running requests.
        """
        for ticket, count in self._catalogue.answers():
            arrival, asked_at = self._tickets.pop(ticket, (-1, -math.inf))
            if self._clock() - asked_at < self._patience.answer_s:
                self._manner.is_slow = False
            prefetch = self._prefetches.get(arrival)
            if prefetch is None:  # the request has started or ended since, or the ranks were lost
                continue
            count = self._memory.count_there(prefetch.names[:count])
            self._reserve(prefetch, count, num_spare)
            self._stored.learn(prefetch.names[:count], gone=prefetch.names[count:])
            prefetch.ordered_at, prefetch.give_up_at = self._clock(), asked_at + self._patience.load_s
            for index, block in enumerate(prefetch.blocks):
                self._memory.begin_copy(prefetch.names[index])
                order = self._orders.order_copy(True, block, prefetch.names[index])
                prefetch.open_orders[order] = index
                self._loads[order] = arrival
            if not prefetch.blocks:
                self._release(self._prefetches.pop(arrival), 0)

    def _reserve(self, prefetch: Prefetch, count: int, num_spare: int) -> None:
        """Reserve blocks for the load, and pin the cached blocks before them, so that none is evicted."""
        prefetch.held = self._allocator.find(prefetch.before)
        # Pinned first, since these may be idle: idle blocks count as room, and taking blocks may evict them.
        self._allocator.pin(prefetch.held)
        room = max(0, self._allocator.num_free_blocks - num_spare)
        prefetch.blocks = self._allocator.reserve(min(count, room))

    def _release(self, prefetch: Prefetch, count: int) -> None:
        """Release the reserved and the held blocks; the first `count` reserved ones become findable."""
        first = len(prefetch.before)
        self._allocator.release_reserved(prefetch.blocks, first, prefetch.names[:count])
        self._allocator.unpin(prefetch.held)

    def settle_order(self, order: int, status: OrderStatus) -> list[LoadedBlocks]:
        """Record the outcome of an order to load, which all ranks have answered.

        Returns:
            The outcome of the request's load in a list, if this was its last open order; else an empty list.
            The leading blocks that have come are findable then, unless the cache was flushed meanwhile.
        """
        arrival = self._loads.pop(order)
        prefetch = self._prefetches[arrival]
        index = prefetch.open_orders.pop(order)
        name = prefetch.names[index]
        self._memory.end_load(name, status)
        if status == "done":
            prefetch.good.add(index)
        elif status == "failed":
            self._stored.distrust([name])
        if prefetch.open_orders:
            return []
        del self._prefetches[arrival]
        wanted = len(prefetch.blocks)
        come = prefetch.num_come()
        took_s = self._clock() - prefetch.ordered_at if come == wanted else math.inf
        self._manner.block_s = took_s / wanted
        self._memory.use([*prefetch.before, *prefetch.names[:come]])
        self._release(prefetch, 0 if prefetch.is_flushed else come)
        return [LoadedBlocks(arrival, len(prefetch.before), wanted, come)]

    def lose_all(self) -> None:
        """Forget all loads, since the ranks are lost; the blocks reserved for them are free again."""
        for prefetch in self._prefetches.values():
            # The ranks that were to fill these blocks are gone: nothing in them may be found.
            self._release(prefetch, 0)
        self._prefetches.clear()
        self._tickets.clear()
        self._loads.clear()

    def flush_orders(self) -> None:
        """Mark the loads that ranks carry out as flushed, so that no request finds the blocks that come.

        Requests whose loads are not ordered yet are forgotten: they wait no longer.
        """
        self._prefetches = {
            arrival: prefetch for arrival, prefetch in self._prefetches.items() if prefetch.open_orders
        }
        for prefetch in self._prefetches.values():
            prefetch.is_flushed = True

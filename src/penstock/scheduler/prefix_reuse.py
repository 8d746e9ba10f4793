"""Reuses the prefixes that the cache or the store holds, and names blocks so that they can be found.

    positions       0 . . . . . . . . . . . . . . .
    found           [ block ][ block ]                 computed before, by any request; not computed again
    first chunk                       [ . . . . . ]    at least the newest known token: its logits are wanted
    findable        [ block ][ block ][ block ]        whole blocks of known tokens whose plan is issued

Blocks become findable when the plan is issued that fills them. Where a sampled token ends a block, that is
when the token is known. Called by `scheduler.scheduler` and its parts; decides nothing else.
"""

from __future__ import annotations

import sys

import msgspec

from penstock.batch import NO_STORE_USE, OrderResult, StoreUse, TierOrder
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_in_class
from penstock.kvcache.cache_flush import CacheFlush
from penstock.kvcache.prefetching import LoadedBlocks
from penstock.kvcache.sessions import Sessions
from penstock.kvcache.stats import CacheStats, StoreStats
from penstock.kvcache.storage_tier import AnyStorageTier
from penstock.kvcache.store_sites import StoreSites
from penstock.kvcache.stored_names import StoreCalls
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState
from penstock.scheduler.residency_ledger import NoLedger, ResidencyLedger

NO_MORE_NAMES = sys.maxsize  # as `RequestState.num_named`: no further block of the request gets its name


class PrefixReuse:
    """Finds computed prefixes of requests in the cache or the KV store, and makes new blocks findable.

    Blocks are found by their names. The name of a KV block is a hash of its tokens and of all tokens before.

    Args:
        allocator: gives blocks out; without a prefix cache nothing is ever found.
        queues: all requests.
        sessions: keep the blocks that their requests leave.
        tier: the store behind the pool; a request waits while its prefix is loaded from there.
        ledger: records which blocks each row has; a `NoLedger` suffices where no plan is issued.

    Attributes:
        sessions: as given; administrators open and close them.
        num_queried, num_found: tokens of requests, counted at each start, and those of them that were found.
            Embedding requests are left out.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        queues: RequestQueues,
        sessions: Sessions,
        tier: AnyStorageTier,
        ledger: ResidencyLedger | NoLedger,
    ) -> None:
        self._allocator, self._queues, self._tier, self._ledger = allocator, queues, tier, ledger
        self.sessions = sessions
        self._is_on, self._block_size = allocator.pool.cache.is_on, allocator.block_size
        self._flushes: list[CacheFlush] = []  # the newest, and those that still empty the store
        self._rank_use = NO_STORE_USE
        self.num_queried = self.num_found = 0
        self._unproven: RequestState | None = None  # the request that has begun before its blocks were loaded
        self._numeric_class = ""  # of the ranks (`name_for`)

    def enter(self, request: RequestState) -> None:
        """Register a waiting request, and begin to look in the store for blocks of it that the pool lacks.

        A follower (of a leader with the same prompt) looks for nothing: it finds what the leader has loaded.
        """
        self.sessions.enter(request.session_id, request.arrival)
        if self._may_use_store and not _is_led(request):
            names = self._wanted(request)
            self._tier.fetch_blocks(request.arrival, names, len(self._allocator.find(names)))

    def must_wait(self, request: RequestState) -> bool:
        """Return whether a request should not start yet because blocks of its prefix come from the store."""
        return self._tier.must_wait(request.arrival)

    def must_follow(self, request: RequestState, num_found: int) -> bool:
        """Return whether a request should wait for its leader, which still computes or scores their prompt.

        Args:
            num_found: blocks that the request could begin with now.
        """
        leader = request.leader
        if leader is None or leader.phase is not RequestPhase.RUNNING:
            return False
        if request.wants_scores:  # the leader's scores are its own, if they follow on those that it has
            return leader.num_scores <= request.num_scores
        return max(num_found, leader.num_named) < request.num_shared // self._block_size

    def leave(self, request: RequestState) -> None:
        """Forget a request that ends; its session, if it has one, keeps its cached leading blocks."""
        if request.session_id:
            names = request.block_hashes
            self.sessions.leave(
                request.session_id, request.arrival, names[: len(self._allocator.find(names))]
            )
        if request is self._unproven:
            self._unproven = None
        self._tier.forget_request(request.arrival)

    def find(self, request: RequestState) -> list[int]:
        """Return the ids of the cached KV blocks with which the request could begin now, in order."""
        return self._allocator.find(self._wanted(request)) if self._is_on else []

    def attach(
        self, request: RequestState, cached_blocks: list[int], coming: list[int] | None = None
    ) -> None:
        """Give a starting request its prefix: `cached_blocks`, and blocks `coming` from the store (ids)."""
        self._allocator.attach(request.arrival, cached_blocks, request.priority)
        if coming:
            self._allocator.attach_reserved(request.arrival, coming)
            self._unproven = request
        self._tier.forget_request(request.arrival)
        if self._may_use_store:
            self._tier.store_found(cached_blocks, request.block_hashes[: len(cached_blocks)])
        request.num_named, request.num_unproven = len(cached_blocks), len(coming or ())
        request.num_scheduled = (request.num_named + request.num_unproven) * self._block_size
        if self._is_on and request.pooling is None:
            self.num_queried += len(request.token_ids)
            self.num_found += request.num_scheduled

    def note(self, request: RequestState) -> None:
        """Make a request's whole blocks findable whose known tokens the plans issued so far compute.

        Call it when a plan for the request was issued, or when a token of it has become known.
        """
        if not self._is_on or request.num_unproven or request.pooling is not None:
            return
        whole = min(request.num_scheduled, len(request.token_ids)) // self._block_size
        if whole > request.num_named:
            first, request.num_named = request.num_named, whole
            hashes = self._hashes(request, whole)[first:whole]
            self._allocator.name(request.arrival, first, hashes, request.priority)
            if self._may_use_store:
                self._tier.store_named(self._allocator.table(request.arrival)[first:whole], hashes)

    def issued(self, requests: list[RequestState]) -> tuple[list[TierOrder], int]:
        """Make the blocks that a plan fills findable; return its orders to copy blocks, and its digest.

        The digest is that of the core's residency table, which says what blocks hold by the plans so far.

        Args:
            requests: the requests that the plan runs, or lets enter.
        """
        # Before `note`, which orders copies of the blocks that this plan fills: ranks carry orders out before
        # they run the plan, so those orders go with a later one.
        orders = self.take_orders()
        residency = self._ledger.digest_after(requests, orders)
        for request in requests:
            self.note(request)
        return orders, residency

    def distrust(self, request: RequestState) -> None:
        """Make a request's blocks unfindable, in pool and store, because they may hold wrong numbers."""
        self._allocator.forget(request.block_hashes)
        self._tier.distrust(request.block_hashes)

    def flush(self, *, with_store: bool) -> CacheFlush:
        """Hide all computed blocks of the pool from requests that start from now on; return the flush begun.

        Blocks in the store stay findable; with `with_store` they are deleted, too. Running requests go on
        with the blocks that they have. What they compute depends on what was computed before, so none of it
        becomes findable until they start again.
        """
        self._flushes = [flush for flush in self._flushes if flush.withholds]
        self._flushes.append(flush := CacheFlush(self._tier, with_store=with_store))
        self._forget_all()
        for request in self._queues.running:
            request.num_named = NO_MORE_NAMES
        return flush

    @property
    def _may_use_store(self) -> bool:
        return self._tier.is_there and not any(flush.withholds for flush in self._flushes)

    # --- the store ------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether orders to copy blocks wait for a plan, so that one should go out even without requests."""
        return self._tier.has_orders

    def take_orders(self) -> list[TierOrder]:
        """Remove and return the new orders to copy blocks to or from the store, for the plan being issued."""
        return self._tier.take_orders()

    def take_given_up(self) -> list[bytes]:
        """Remove and return the names of blocks that the plan being issued drops from host memory."""
        return self._tier.take_given_up()

    def settle_orders(self, finished: list[OrderResult], use: StoreUse = NO_STORE_USE) -> RequestState | None:
        """Apply the ranks' answers to orders to copy KV blocks to or from the store, and order more.

        Args:
            finished: the orders that all ranks have answered, each with its outcome.
            use: how the ranks have used the store since the last call.

        Returns:
            The request that started before its blocks were loaded and must restart, as some failed; or None.
        """
        if use is not NO_STORE_USE:
            self._rank_use = self._rank_use.plus(use)
        failed = [self._prove(loaded) for loaded in self._tier.settle_orders(finished)]
        self._tier.take_answers(num_spare=len(self._queues.running))  # each may need another block
        return next((request for request in failed if request is not None), None)

    def on_the_way(self, request: RequestState, num_found: int) -> list[int]:
        """Return the ids of the blocks being loaded behind the `num_found` cached ones, if it may start now.

        It may only where no other request runs, since a step that awaits blocks would delay the others too.
        """
        if self._queues.running:
            return []
        first, coming = self._tier.on_the_way(request.arrival)
        return coming if first == num_found else []

    def awaited(self, request: RequestState) -> list[int]:
        """Return the numbers of the load orders that a step of this request must wait for, layer by layer."""
        return self._tier.open_orders(request.arrival) if request.num_unproven else []

    def are_answered(self, orders: list[int]) -> bool:
        """Return whether all ranks have answered these orders to load blocks from the store."""
        return not orders or not self._tier.is_any_open(orders)

    def _prove(self, loaded: LoadedBlocks) -> RequestState | None:
        """Return the request that began with these blocks if it must restart, since not all have come."""
        request = self._unproven
        if request is None or request.arrival != loaded.arrival:
            return None
        self._unproven = None
        if not request.num_unproven:  # it was preempted meanwhile
            return None
        num_there, request.num_unproven = loaded.first + loaded.num_come, 0
        self._queues.turns_changed()
        if request.num_named != NO_MORE_NAMES:
            request.num_named = num_there
        if loaded.num_come == loaded.num_wanted:
            self.note(request)
            return None
        request.num_void = request.num_pending
        request.num_cached_tokens = min(num_there * self._block_size, request.prompt_len)
        self.num_queried -= len(request.token_ids)  # both are counted when it begins again
        self.num_found -= (loaded.first + loaded.num_wanted) * self._block_size
        return request

    def next_look(self) -> float:
        """Return the clock time at which to call `settle_orders` even if no rank has answered; or inf."""
        return self._tier.next_look()

    def lose_all(self) -> None:
        """Forget what the blocks of lost ranks held, and their orders; requests look in the store again."""
        self._unproven = None
        self._tier.lose_all()
        # Not counts since the start: the ranks of the next epoch report these two again.
        self._rank_use = msgspec.structs.replace(self._rank_use, switched_off=0, host_bytes_used=0)
        self._forget_all()
        self._ledger.forget_all()
        for request in self._queues:
            self.enter(request)

    def name_for(self, numeric_class: str) -> None:
        """Set the numeric class (of ranks that compute the same bits), which block names contain from now on.

        Blocks of another class are not found any more. Nothing may be in flight.
        """
        if numeric_class == self._numeric_class:
            return
        self._numeric_class = numeric_class
        for request in self._queues:
            request.block_hashes.clear()
        self.lose_all()

    def meet_stores(self, sites: StoreSites, calls: StoreCalls) -> None:
        """Use the stores in which the ranks of a new epoch keep blocks; `calls` asks other hosts' ranks."""
        self._tier.meet(sites, calls)

    def _forget_all(self) -> None:
        self._allocator.forget_all()
        self.sessions.forget()

    def close(self) -> None:
        """Close the storage tier. No call may follow."""
        self._tier.close()

    def cache_stats(self) -> CacheStats:
        """Return the counts of the pool's blocks, and of tokens that were found in the prefix cache."""
        cache = self._allocator.pool.cache
        return CacheStats(
            num_blocks=self._allocator.num_blocks,
            free_blocks=self._allocator.num_free_blocks,
            prefix_tokens=self.num_queried,
            prefix_hit_tokens=self.num_found,
            cached_blocks=cache.num_cached,
            evicted_blocks=cache.num_evicted,
        )

    def store_stats(self) -> StoreStats:
        """Return the counts of blocks copied to the store and from it, and how the store was used."""
        totals = self._tier.totals
        return StoreStats(
            stored_blocks=totals.num_stored,
            loaded_blocks=totals.num_loaded,
            failed_blocks=totals.num_failed,
            use=self._rank_use.plus(self._tier.own_use()),
        )

    def _wanted(self, request: RequestState) -> list[bytes]:
        """Return the names of all blocks that the request could begin with.

        These are all whole blocks before the last token that it must run. There are none while tokens of its
        prompt are to be scored, or where the hidden states of all tokens are wanted.
        """
        if request.wants_scores or request.pooling is not None:
            return []
        most = (request.num_to_prefill - 1) // self._block_size
        return self._hashes(request, most)[:most]

    def _hashes(self, request: RequestState, count: int) -> list[bytes]:
        """Return the names of at least the first `count` blocks of the request."""
        known = request.block_hashes
        if len(known) < count:
            start = len(known) * self._block_size
            parent = known[-1] if known else root_in_class(request.cache_root, self._numeric_class)
            end = count * self._block_size
            known += block_hashes(parent, request.token_ids[start:end], self._block_size)
        return known


def _is_led(request: RequestState) -> bool:
    """Return whether the request follows one that lives."""
    return request.leader is not None and request.leader.phase is not RequestPhase.FINISHED

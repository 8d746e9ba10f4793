"""Between requests and the prefix cache: whose beginning is there already, and what becomes findable.

    positions       0 . . . . . . . . . . . . . . .
    found           [ block ][ block ]                 computed before, by whomever; not computed again
    first chunk                       [ . . . . . ]    at least the newest known token: its logits are wanted
    findable        [ block ][ block ][ block ]        whole blocks of known tokens whose plan is issued

Blocks become findable when the plan is issued that fills them, or, where a sampled token ends them, when that
token is known. Called by `scheduler.scheduler` and `scheduler.placement`; decides nothing else.
"""

from __future__ import annotations

from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes
from penstock.scheduler.queues import RequestState


class PrefixReuse:
    """Args:
    allocator: gives blocks out; without a cache nothing is ever found.

    Attributes:
        num_queried, num_found: tokens of requests that have started, and those of them that were found.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._is_on = allocator.pool.cache is not None
        self._block_size = allocator.block_size
        self.num_queried = self.num_found = 0

    def find(self, request: RequestState) -> list[int]:
        """Blocks that the request could begin with now."""
        if not self._is_on:
            return []
        most = (len(request.token_ids) - 1) // self._block_size
        return self._allocator.find(self._hashes(request, most)[:most])

    def attach(self, request: RequestState, found: list[int]) -> None:
        """A request that starts, or starts again, begins with these."""
        self._allocator.attach(request.arrival, found, request.priority)
        request.num_named = len(found)
        request.num_scheduled = len(found) * self._block_size
        if self._is_on:
            self.num_queried += len(request.token_ids)
            self.num_found += request.num_scheduled

    def note(self, request: RequestState) -> None:
        """A plan for it was issued, or a token of it has become known: whole blocks are findable now."""
        if not self._is_on:
            return
        whole = min(request.num_scheduled, len(request.token_ids)) // self._block_size
        if whole > request.num_named:
            first, request.num_named = request.num_named, whole
            hashes = self._hashes(request, whole)[first:whole]
            self._allocator.name(request.arrival, first, hashes, request.priority)

    def distrust(self, request: RequestState) -> None:
        """Its numbers are no good: nobody is to begin with them, nor with those that it began with."""
        self._allocator.forget(request.block_hashes)

    def _hashes(self, request: RequestState, count: int) -> list[bytes]:
        """Those of its first `count` blocks at least."""
        known = request.block_hashes
        if len(known) < count:
            start = len(known) * self._block_size
            parent = known[-1] if known else request.cache_root
            end = count * self._block_size
            known += block_hashes(parent, request.token_ids[start:end], self._block_size)
        return known

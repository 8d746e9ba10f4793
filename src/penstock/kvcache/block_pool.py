"""The pool of KV blocks: which ids are free, and how many references each of the others has.

A block id means the same slots on every stage, so one pool in the engine core serves the whole pipe. It knows
no requests (`kvcache.allocator` does) and no bytes (`runner.device_kv` does). What blocks hold, and what is
given up when no block is free, is the affair of a `PrefixCache`, if there is one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from penstock.kvcache.prefix_cache import NoPrefixCache, PrefixCache


class BlockPool:
    """The block ids `0 .. num_blocks - 1`, each free, held, or cached and idle.

    A block is held while it has references, of requests or of copies to and from the store. Without
    references it is idle if the cache knows what it holds, and free otherwise. Free blocks are given out
    first, the one freed last before the others, since it may still be in the CPU's caches; then idle ones are
    evicted.

    Args:
        cache: knows what blocks hold; without one a block is free as soon as its last reference goes.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.cache = cache or NoPrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = array("i", [0]) * num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that `take` could give out: the free and the idle ones."""
        return len(self._free) + self.cache.num_idle

    def take(self, count: int) -> list[int] | None:
        """Give out `count` blocks, and return their ids; None, with nothing changed, when there are fewer.

        Idle blocks are evicted if too few are free.
        """
        if count > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int], priority: int = 0) -> None:
        """Add a reference to each of these cached blocks, and count it as a use for the eviction order.

        Args:
            priority: the least priority that the blocks get; the cache evicts those of lower priority first.
        """
        for block in blocks:
            self.cache.use(block, priority)
            self._holders[block] += 1

    def pin(self, block: int) -> None:
        """Add a reference to a held or idle block, so that it is not given out or evicted."""
        self.cache.hold(block)
        self._holders[block] += 1

    def name(self, block: int, depth: int, content: bytes, priority: int = 0) -> None:
        """Give a held block the name (hash) of what it is being filled with, so that requests find it.

        If an idle block had the name, that one becomes free. If a held block has it, nothing changes.

        Args:
            depth: the block's place in the chain of its prompt's blocks.
            content: the hash that is the name.
            priority: of the block; the cache evicts those of lower priority first.
        """
        freed = self.cache.name(block, depth, content, priority)
        if freed is not None:
            self._free.append(freed)

    def give_back(self, blocks: list[int]) -> None:
        """Drop a reference to each block of a chain of blocks; cached blocks stay findable.

        A block that loses its last reference becomes idle if it is cached, and free otherwise.
        """
        cache = self.cache
        cache.tick()
        # The last block first: the end of a chain is evicted before its beginning, which more prompts share.
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is freed twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if cache.is_cached(block):
                    cache.let_go(block)
                else:
                    self._free.append(block)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Remove these names (hashes), so that no request finds their blocks; idle ones become free."""
        self._free += self.cache.forget(hashes)

    def forget_all(self) -> None:
        self._free += self.cache.forget(self.cache.names())

    def num_idle_of(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are idle."""
        return sum(map(self.cache.is_idle, blocks))

    def _evict(self) -> int:
        return self.cache.evict()

    def check_holders(self, owners: Mapping[int, int]) -> None:
        """Assert all invariants, and that each block has as many references as `owners` says.

        Args:
            owners: the expected number of references by block id; blocks that are not in it have none.
        """
        self.check_invariants()
        for block, count in enumerate(self._holders):
            num_owners = owners.get(block, 0)
            assert count == num_owners, f"block {block} has {count} holders and {num_owners} owners"

    def check_invariants(self) -> None:
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert not any(self._holders[block] for block in self._free), "a taken block is in the free list"
        held = sum(count > 0 for count in self._holders)
        self.cache.check_invariants()
        assert not any(self._holders[block] for block in self.cache.idle_blocks()), "held, but idle"
        assert len(self._free) + held + self.cache.num_idle == self.num_blocks, "a block is lost"

"""The pool of KV blocks: which ids are free, and how many hold each of the others.

A block id means the same slots on every stage, so one pool in the engine core serves the whole pipe. Knows
nothing of requests (`kvcache.allocator`) nor of bytes (`runner.device_kv`). What blocks hold, and what is
given up when no block is free, is the affair of a `PrefixCache`, if there is one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from penstock.kvcache.prefix_cache import NoPrefixCache, PrefixCache


class BlockPool:
    """Ids `0 .. num_blocks - 1`, each free, held, or cached and idle: idle ones are taken when none is free.

    The block freed last is taken first: it is warm.

    Args:
        cache: knows what blocks hold; without one nothing is kept that nobody holds.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.cache = cache or NoPrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = array("i", [0]) * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + self.cache.num_idle

    def take(self, count: int) -> list[int] | None:
        """`count` ids, or None (and nothing changed) when there are fewer."""
        if count > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int], priority: int = 0) -> None:
        """One more holds these cached blocks."""
        for block in blocks:
            self.cache.use(block, priority)
            self._holders[block] += 1

    def pin(self, block: int) -> None:
        """One more holds this block, whatever it holds."""
        self.cache.hold(block)
        self._holders[block] += 1

    def name(self, block: int, depth: int, content: bytes, priority: int = 0) -> None:
        """This held block is being filled with what that names (`PrefixCache.name`)."""
        freed = self.cache.name(block, depth, content, priority)
        if freed is not None:
            self._free.append(freed)

    def give_back(self, blocks: list[int]) -> None:
        """One less holds each of them, in the order of a chain; what is cached stays findable."""
        cache = self.cache
        cache.tick()
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is freed twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if cache.is_cached(block):
                    cache.let_go(block)
                else:
                    self._free.append(block)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Nothing is found under these names any more."""
        self._free += self.cache.forget(hashes)

    def forget_all(self) -> None:
        self._free += self.cache.forget(self.cache.names())

    def num_idle_of(self, blocks: Iterable[int]) -> int:
        """How many of these are cached and held by nobody."""
        return sum(map(self.cache.is_idle, blocks))

    def _evict(self) -> int:
        return self.cache.evict()

    def check_holders(self, owners: Mapping[int, int]) -> None:
        """Assert all invariants, and that blocks are held by as many as have them in their tables."""
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

"""Assigns KV blocks to requests, in a block table for each.

The scheduler asks for enough blocks to hold a number of tokens; the answer is the ids to append to the
request's block table on every rank. The owner of a table is a request, by its arrival number, which unlike
request ids and rows is never used again. Blocks given back may be given out by the very next plan: ranks run
plans in order.

A table may begin with blocks that other owners hold too, or have held (`attach`): these are full, and never
written again. Other requests find the owner's own blocks once they have names (`name`), which are hashes of
their content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.kvcache.block_pool import BlockPool


class BlockAllocator:
    """The block tables of all requests: the KV blocks that each holds, in order, out of one pool.

    A request is an `owner`, by its arrival number.

    Args:
        pool: the pool that all owners share.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        assert block_size >= 1, f"blocks of {block_size} tokens"
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[int, list[int]] = {}
        self._pinned: Counter[int] = Counter()  # blocks that are being copied

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def capacity_tokens(self) -> int:
        """The number of tokens whose keys and values the whole pool of KV blocks holds."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of KV blocks that `num_tokens` tokens need, the last perhaps partly filled."""
        return -(-num_tokens // self.block_size)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of the cached blocks with these hashes, up to the first that is not cached.

        Nothing is held: without `attach` or `pin` the blocks may be evicted when blocks are taken next.

        Args:
            hashes: names of a request's blocks, from its first on (`kvcache.block_hash`).
        """
        return self.pool.cache.find(hashes)

    def has_room(self, num_tokens: int, matched_blocks: Sequence[int], num_spare: int) -> bool:
        """Return whether the pool has the blocks for a new owner with `num_tokens` tokens, and some to spare.

        Args:
            matched_blocks: ids of cached blocks, which hold the first of the tokens and need no new ones.
            num_spare: blocks that must stay free besides.
        """
        missing = self.blocks_for(num_tokens) - len(matched_blocks)
        return missing + num_spare <= self.pool.num_free - self.pool.num_idle_of(matched_blocks)

    def attach(self, owner: int, matched_blocks: Sequence[int], priority: int = 0) -> None:
        """Begin the block table of an owner that has none with blocks just found in the cache.

        Args:
            matched_blocks: ids of these blocks; if there are none, nothing is done.
            priority: the least priority that the blocks get; the cache evicts those of lower priority first.
        """
        assert owner not in self._tables
        if matched_blocks:
            self.pool.share(matched_blocks, priority)
            self._tables[owner] = list(matched_blocks)

    def attach_reserved(self, owner: int, blocks: Sequence[int]) -> None:
        """Append reserved blocks, which are still being loaded from the store, to the owner's table."""
        for block in blocks:
            self.pool.pin(block)
        self._tables.setdefault(owner, []).extend(blocks)

    def name(self, owner: int, first: int, hashes: Sequence[bytes], priority: int = 0) -> None:
        """Give the owner's blocks, from index `first` of its table on, their names, so that others find them.

        Args:
            hashes: the names: hashes of what the blocks are being filled with, one for each block.
            priority: of the blocks; the cache evicts those of lower priority first.
        """
        table = self._tables[owner]
        for depth, content in enumerate(hashes, first):
            self.pool.name(table[depth], depth, content, priority)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove these names (hashes), so that no request finds their blocks; those in use stay in use."""
        self.pool.forget(hashes)

    def forget_all(self) -> None:
        """Remove all names of blocks, so that no request finds one; requests keep the blocks they hold."""
        self.pool.forget_all()

    def pin(self, blocks: Sequence[int]) -> None:
        """Hold these blocks, so that they are not given out until `unpin` is called for each as often."""
        for block in blocks:
            self.pool.pin(block)
            self._pinned[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pinned.subtract(blocks)
        self.pool.give_back(list(blocks))

    def reserve(self, count: int) -> list[int]:
        """Take `count` blocks from the pool, pinned, and return their ids.

        The caller has checked that there are so many. `release_reserved` ends the reservation.
        """
        blocks = self.pool.take(count)
        assert blocks is not None
        self._pinned.update(blocks)
        return blocks

    def release_reserved(self, blocks: Sequence[int], first: int, hashes: Sequence[bytes]) -> None:
        """Name the leading ones of these reserved blocks, one for each hash, and release all of them.

        Named blocks become findable; the others become free unless an owner holds them.

        Args:
            blocks: ids of the reserved blocks, which follow each other in a prompt.
            first: the place of the first of them in the chain of the prompt's blocks.
            hashes: names of the leading blocks, which were loaded.
        """
        # Named while they are still pinned: a block without a name would go back to the free list.
        for depth, (block, content) in enumerate(zip(blocks, hashes, strict=False), first):
            self.pool.name(block, depth, content)
        self.unpin(blocks)

    def grow(self, owner: int, num_tokens: int, num_spare: int = 0) -> list[int] | None:
        """Make the owner's block table long enough for `num_tokens` tokens.

        Args:
            num_spare: blocks that must be free afterwards, if any are added.

        Returns:
            The ids of the blocks added (often none), or None, with nothing changed, when the pool has too
            few.
        """
        table = self._tables.get(owner)
        held = len(table) if table else 0
        missing = self.blocks_for(num_tokens) - held
        if missing <= 0:
            return []
        added = self.pool.take(missing) if missing + num_spare <= self.pool.num_free else None
        if added is not None:
            self._tables.setdefault(owner, []).extend(added)
        return added

    def free(self, owner: int) -> None:
        """Give back all blocks of the owner (a request's arrival number), which must hold some."""
        self.pool.give_back(self._tables.pop(owner))

    def table(self, owner: int) -> list[int]:
        """Return a copy of the owner's block table: ids in position order; empty if it holds none."""
        return list(self._tables.get(owner, ()))

    def tail(self, owner: int, first: int) -> list[int]:
        """Return the ids of the owner's blocks from index `first` of its table on; it must have a table."""
        return self._tables[owner][first:]

    def owners(self) -> set[int]:
        return set(self._tables)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        holders = Counter(block for table in self._tables.values() for block in table)
        self.pool.check_holders(holders + self._pinned)

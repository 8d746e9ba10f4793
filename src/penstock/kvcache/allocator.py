"""Assigns KV blocks to requests, in a block table for each.

The scheduler asks for enough blocks to hold a number of tokens; the answer is the ids to append to the
request's block table on every rank. Owners are the scheduler's arrival numbers, which are never used again,
unlike request ids and rows. Blocks given back may be named by the very next plan: ranks run plans in order.

A table may begin with blocks that others hold too, or have held (`attach`): they are whole, and never written
again. Its own blocks are found by others once they are named (`name`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.kvcache.block_pool import BlockPool


class BlockAllocator:
    """The block tables of all requests, over one pool.

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
        """The number of tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of a chain of hashes (`kvcache.block_hash`)."""
        return self.pool.cache.find(hashes)

    def has_room(self, num_tokens: int, matched_blocks: Sequence[int], num_spare: int) -> bool:
        """Return whether a new owner could hold `num_tokens` tokens and leave `num_spare` blocks.

        The first of the tokens are in `matched_blocks`.
        """
        missing = self.blocks_for(num_tokens) - len(matched_blocks)
        return missing + num_spare <= self.pool.num_free - self.pool.num_idle_of(matched_blocks)

    def attach(self, owner: int, matched_blocks: Sequence[int], priority: int = 0) -> None:
        """Start the table of an owner that has none, with blocks just found in the cache."""
        assert owner not in self._tables
        if matched_blocks:
            self.pool.share(matched_blocks, priority)
            self._tables[owner] = list(matched_blocks)

    def attach_reserved(self, owner: int, blocks: Sequence[int]) -> None:
        """Append reserved blocks, which are still being loaded, to the owner's table."""
        for block in blocks:
            self.pool.pin(block)
        self._tables.setdefault(owner, []).extend(blocks)

    def name(self, owner: int, first: int, hashes: Sequence[bytes], priority: int = 0) -> None:
        """Name the owner's blocks from its `first` on, which are being filled with what the hashes name."""
        table = self._tables[owner]
        for depth, content in enumerate(hashes, first):
            self.pool.name(table[depth], depth, content, priority)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove these names, so that no request finds their blocks; requests that hold them keep them."""
        self.pool.forget(hashes)

    def forget_all(self) -> None:
        """Remove all names, so that no request finds a block; requests keep the blocks they hold."""
        self.pool.forget_all()

    def pin(self, blocks: Sequence[int]) -> None:
        """Hold these blocks, so that they are not given out until they are unpinned."""
        for block in blocks:
            self.pool.pin(block)
            self._pinned[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pinned.subtract(blocks)
        self.pool.give_back(list(blocks))

    def reserve(self, count: int) -> list[int]:
        """Return `count` free blocks, pinned; the caller has checked that there are so many."""
        blocks = self.pool.take(count)
        assert blocks is not None
        self._pinned.update(blocks)
        return blocks

    def release_reserved(self, blocks: Sequence[int], first: int, hashes: Sequence[bytes]) -> None:
        """Name as many blocks of a chain, from its `first` on, as there are hashes; unpin all blocks."""
        # Named while they are still pinned: a block without a name would go back to the free list.
        for depth, (block, content) in enumerate(zip(blocks, hashes, strict=False), first):
            self.pool.name(block, depth, content)
        self.unpin(blocks)

    def grow(self, owner: int, num_tokens: int, num_spare: int = 0) -> list[int] | None:
        """Make the owner's table hold `num_tokens` tokens.

        Args:
            num_spare: blocks that must be free afterwards, if any are added.

        Returns:
            The blocks added (often none), or None, with nothing changed, when the pool has too few.
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
        """Give back all blocks of the owner, which must hold some."""
        self.pool.give_back(self._tables.pop(owner))

    def table(self, owner: int) -> list[int]:
        """Return a copy of the owner's blocks in position order; empty if it holds none."""
        return list(self._tables.get(owner, ()))

    def tail(self, owner: int, first: int) -> list[int]:
        """Return the owner's blocks from its `first` on."""
        return self._tables[owner][first:]

    def owners(self) -> set[int]:
        return set(self._tables)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        holders = Counter(block for table in self._tables.values() for block in table)
        self.pool.check_holders(holders + self._pinned)

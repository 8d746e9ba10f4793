"""The pool of KV blocks: which ids are free.

A block id means the same slots on every stage, so one pool in the engine core serves the whole pipe.
Knows nothing of requests (`kvcache.allocator`) nor of bytes (`runner.kv_storage`).
"""

from __future__ import annotations


class BlockPool:
    """Ids `0 .. num_blocks - 1`, each free or taken. The block freed last is taken first: it is warm."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` ids, or None (and nothing changed) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._taken[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self._taken[block], f"block {block} is freed twice"
            self._taken[block] = 0
        self._free.extend(reversed(blocks))

    def check_invariants(self) -> None:
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert not any(self._taken[block] for block in self._free), "a taken block is in the free list"
        assert len(self._free) + sum(self._taken) == self.num_blocks, "a block is lost"

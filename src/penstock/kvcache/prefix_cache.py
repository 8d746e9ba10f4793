"""Knows what KV blocks hold, and which unused ones to evict first; one index serves the whole pipe.

A block id means the same slots on every stage, so a block that is found here is there on all stages. A block
gets its name, a hash of its content, when the plan that fills it is issued: ranks run plans in order, so the
next plan may already read the block.

    taken ──named──▶ cached, held ──let go by all──▶ idle ──evicted──▶ taken for something else
                          ▲                            │
                          └─────────found again────────┘

Two requests may compute the same block side by side. Then the block of the first gets the name, and the block
of the other stays without one. If a prompt is found as a whole, its last block is computed again, since the
logits of the last token are wanted; the new block takes the name from the old one if that is idle. Owned by
`kvcache.block_pool`, which counts the holders. Pure: no clock, no randomness.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from penstock.kvcache.eviction import KeptLast, Worth

_NO_HASH = b""


class NoPrefixCache:
    """A stand-in for a prefix cache where no block is kept: none has a name, and none is ever found."""

    is_on = False
    num_cached = 0
    num_idle = 0
    num_evicted = 0

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        return []

    def is_idle(self, block: int) -> bool:
        return False

    def is_cached(self, block: int) -> bool:
        return False

    def name(self, block: int, depth: int, content: bytes, priority: int = 0) -> int | None:
        return None

    def use(self, block: int, priority: int = 0) -> None:
        raise AssertionError(f"block {block} was found where nothing is kept")

    def hold(self, block: int) -> None:
        """Do nothing: no block is cached."""

    def num_uses(self, block: int) -> int:
        return 0

    def tick(self) -> None:
        """Do nothing: no block is cached."""

    def let_go(self, block: int) -> None:
        raise AssertionError(f"block {block} holds nothing to keep")

    def keep(self, content: bytes) -> None:
        """Do nothing: no block is cached."""

    def release(self, content: bytes) -> None:
        """Do nothing: no block is cached."""

    def evict(self) -> int:
        raise AssertionError("no block is idle")

    def forget(self, hashes: Iterable[bytes]) -> list[int]:
        return []

    def names(self) -> list[bytes]:
        return []

    def idle_blocks(self) -> list[int]:
        return []

    def check_invariants(self) -> None:
        """Do nothing: no block is cached."""


class PrefixCache:
    """The contents of KV blocks, by name (hash), and the order in which idle blocks are evicted.

    A block is idle if it has a name and no request or copy holds it.

    Args:
        num_blocks: blocks of the pool.
        order: the eviction order of idle blocks.
    """

    is_on = True

    def __init__(self, num_blocks: int, order: KeptLast) -> None:
        self._order = order
        self._blocks: dict[bytes, int] = {}
        self._hashes = [_NO_HASH] * num_blocks
        self._depths = array("i", [0]) * num_blocks
        self._uses = array("i", [0]) * num_blocks
        self._priorities = array("i", [0]) * num_blocks
        self._freed_at = array("q", [0]) * num_blocks
        self._now = 0
        self.num_evicted = 0

    @property
    def num_cached(self) -> int:
        """The number of blocks that have a name, and so can be found, held or idle."""
        return len(self._blocks)

    @property
    def num_idle(self) -> int:
        """The number of cached blocks that no request or copy holds."""
        return len(self._order)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of the cached blocks with these hashes, up to the first that is not cached.

        Args:
            hashes: names of a request's blocks, from its first on.
        """
        matched_blocks, blocks = [], self._blocks
        for name in hashes:
            block = blocks.get(name)
            if block is None:
                break
            matched_blocks.append(block)
        return matched_blocks

    def is_idle(self, block: int) -> bool:
        return block in self._order

    def is_cached(self, block: int) -> bool:
        return self._hashes[block] is not _NO_HASH

    def name(self, block: int, depth: int, content: bytes, priority: int = 0) -> int | None:
        """Give a held block the name (hash) of what it is being filled with.

        If another block has the name already, it keeps the name while it is held; an idle one loses it.

        Args:
            depth: the block's place in the chain of its prompt's blocks.
            content: the hash that is the name.
            priority: of the block; the policy "priority" evicts blocks of lower priority first.

        Returns:
            The id of the idle block that has lost the name, and is free now; None if there was none.
        """
        assert self._hashes[block] is _NO_HASH, f"block {block} holds something else"
        other, uses = self._blocks.get(content), 0
        if other is not None:
            if other not in self._order:
                return None
            uses, priority = self._uses[other] + 1, max(priority, self._priorities[other])
            self.forget([content])
        self._blocks[content] = block
        self._hashes[block] = content
        self._depths[block] = depth
        self._uses[block] = uses
        self._priorities[block] = priority
        return other

    def use(self, block: int, priority: int = 0) -> None:
        """Record that a request has found a block and holds it: an idle block leaves the eviction order.

        Args:
            priority: of the request; the block keeps the highest priority of all requests that used it.
        """
        self.hold(block)
        self._uses[block] += 1
        self._priorities[block] = max(self._priorities[block], priority)

    def hold(self, block: int) -> None:
        """Take a block that is held again out of the eviction order, without counting it as found."""
        if block in self._order:
            self._order.discard(block)

    def num_uses(self, block: int) -> int:
        """Return how often requests have found the block's present content."""
        return self._uses[block]

    def tick(self) -> None:
        """Begin another event: blocks let go from now on count as let go later than all before.

        The eviction order counts events in place of time.
        """
        self._now += 1

    def let_go(self, block: int) -> None:
        """Put a cached block that has lost its last holder into the eviction order."""
        self._freed_at[block] = self._now
        self._order.add(block, self._worth(block))

    def keep(self, content: bytes) -> None:
        """Keep the block of this name (hash): when idle, it is evicted after all blocks that are not kept."""
        idle = self._taken_out(content)
        self._order.keep(content)
        self._put_back(idle)

    def release(self, content: bytes) -> None:
        """Treat the block of this name (hash) as an ordinary one again, at its place in the order."""
        idle = self._taken_out(content)
        self._order.release(content)
        self._put_back(idle)

    def evict(self) -> int:
        """Choose the idle block to give up, take its name away, and return its id; there must be one."""
        # The block leaves the order before it loses its name, because its place there depends on the name.
        block = self._order.pop(self._worth)
        self._unname(block)
        self.num_evicted += 1
        return block

    def forget(self, hashes: Iterable[bytes]) -> list[int]:
        """Remove these names (hashes); return the ids of their blocks that were idle, which are free now."""
        freed = []
        for content in hashes:
            block = self._blocks.get(content)
            if block is None:
                continue
            self._unname(block)
            if block in self._order:
                self._order.discard(block)
                freed.append(block)
        return freed

    def names(self) -> list[bytes]:
        """Return the names of all cached blocks."""
        return list(self._blocks)

    def idle_blocks(self) -> list[int]:
        """Return the ids of the idle blocks (cached, held by nothing), for checks."""
        return [block for block in self._blocks.values() if block in self._order]

    def _worth(self, block: int) -> Worth:
        return Worth(
            uses=self._uses[block],
            priority=self._priorities[block],
            freed_at=self._freed_at[block],
            depth=self._depths[block],
            hash=self._hashes[block],
        )

    def _taken_out(self, content: bytes) -> list[int]:
        """Take the idle block of this name, if there is one, out of the eviction order, and return it."""
        block = self._blocks.get(content)
        if block is None or block not in self._order:
            return []
        self._order.discard(block)
        return [block]

    def _put_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._order.restore(block, self._worth(block))

    def _unname(self, block: int) -> None:
        del self._blocks[self._hashes[block]]
        self._hashes[block] = _NO_HASH

    def check_invariants(self) -> None:
        for content, block in self._blocks.items():
            assert self._hashes[block] == content, f"block {block} has two names"
        assert sum(name is not _NO_HASH for name in self._hashes) == len(self._blocks), "a name is lost"
        assert len(self.idle_blocks()) == len(self._order), "an idle block has no name"

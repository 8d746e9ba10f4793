"""Chooses the blocks that lie in host memory (L2): the same ones on every rank.

    store or load ordered ──▶ in memory on every rank ──memory is full, or a copy failed──▶ given up by all

Every rank has room for an equal number of blocks, however many bytes its own part of a block takes
(`engine.supervisor.host_blocks`). So the core alone can choose which block memory gives up: the one used
longest ago. A plan tells all ranks, which forget given-up blocks before they carry out the orders of that
plan. Without a store behind memory, the catalogue lists blocks in memory. A block given up is then removed
from the catalogue at once, so that no request waits for a block that only some ranks still have.

A block counts as in memory from the order to copy it there, so that memory is never fuller than it seems.
Called by `kvcache.storage_tier` and its parts; nothing here handles bytes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from penstock.batch import ALL_BLOCKS, OrderStatus
from penstock.kvcache.stored_names import StoredNames

# So many of the given-up names last announced are remembered: the plans that carry them may be lost with an
# epoch, and then they are announced again.
MOST_UNHEARD = 4096


class HostNames:
    """The names (content hashes) of the KV blocks that all ranks keep in host memory, in front of a store.

    Args:
        max_blocks: blocks that each rank has room for, at least one.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._names: OrderedDict[bytes, None] = OrderedDict()  # what was used longest ago comes first
        self._copying: Counter[bytes] = Counter()  # open orders by name; such a block is not given up
        self._doomed: set[bytes] = set()  # names in `_copying` that are to be given up when the copy ends
        self._given_up: list[bytes] = []  # names that no plan has announced yet
        self._told: OrderedDict[bytes, None] = OrderedDict()  # names that the last plans have announced

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def make_room(self, name: bytes) -> bool:
        """Make room for a block that is to be stored, and count its copy as begun.

        If memory is full, the block used longest ago is given up. If all blocks are being copied, nothing
        changes, and False is returned.
        """
        if name not in self._names and len(self._names) >= self._max_blocks:
            oldest = self._oldest_idle()
            if oldest is None:
                return False
            self._give_up(oldest)
        self.begin_copy(name)
        return True

    def begin_copy(self, name: bytes) -> None:
        """Count an order to ranks to copy this block as begun; the block is in host memory from now on.

        If memory is too full, the blocks used longest ago that are not being copied are given up.
        """
        self._names[name] = None
        self._names.move_to_end(name)
        self._copying[name] += 1
        self._shrink()

    def end_store(self, name: bytes, status: OrderStatus) -> None:
        """Count an order to store this block as ended.

        Unless its status is "done", the block is given up: only some ranks may have their parts.
        """
        if status == "done":
            self._doomed.discard(name)
        else:
            self._doomed.add(name)
        self._end_copy(name)

    def end_load(self, name: bytes, status: OrderStatus) -> None:
        """Count an order to load this block as ended.

        If its status is "failed", the block is given up: a part of it is missing.
        """
        if status == "failed":
            self._doomed.add(name)
        self._end_copy(name)

    def _end_copy(self, name: bytes) -> None:
        # All ranks have answered this order, so all have heard the plans before it, and that all blocks or an
        # older copy of this one are given up. Told again after a loss, they would forget what they have anew.
        self._told.pop(name, None)
        self._told.pop(ALL_BLOCKS, None)
        self._copying[name] -= 1
        if not self._copying[name]:
            del self._copying[name]
            if name in self._doomed:
                self._give_up(name)
        self._shrink()

    def use(self, names: Sequence[bytes]) -> None:
        """Mark a chain of blocks as used now, the first as the newest, since without it none can be found."""
        for name in reversed(names):
            if name in self._names:
                self._names.move_to_end(name)

    def drop(self, names: Iterable[bytes]) -> None:
        """Give up the blocks of these names that are in memory.

        A block that is being copied is given up when the copy ends, unless that copy stores it again.
        """
        for name in names:
            if name in self._copying:
                self._doomed.add(name)
            elif name in self._names:
                self._give_up(name)

    def drop_all(self) -> None:
        """Give up all blocks, which ranks are to drop without storing them; no copy may be under way."""
        self.drop(list(self._names))
        self._given_up = [ALL_BLOCKS]

    def count_there(self, names: Sequence[bytes]) -> int:
        """Return how many of these `names`, from the first on, can be loaded; the catalogue has listed them.

        With a store behind memory all of them can.
        """
        return len(names)

    def take_given_up(self) -> list[bytes]:
        """Remove and return the names that ranks are to forget; the plan being issued carries them."""
        names, self._given_up = self._given_up, []
        for name in names:
            self._told[name] = None
            self._told.move_to_end(name)
        while len(self._told) > MOST_UNHEARD:
            self._told.popitem(last=False)
        return names

    def lose_all(self) -> None:
        """Forget open orders, since the ranks are lost, and announce the last given-up names again.

        Plans in flight that carried these names may not have arrived, nor have orders to copy these blocks
        anew.
        """
        self._copying.clear()
        must_drop_all = ALL_BLOCKS in (*self._told, *self._given_up)
        doomed = list(self._names) if must_drop_all else self._doomed & self._names.keys()
        self.drop([*doomed, *self._told, *self._given_up])
        self._given_up = [*dict.fromkeys([*self._told, *self._given_up])]
        self._told.clear()
        self._shrink()

    def _shrink(self) -> None:
        while len(self._names) > self._max_blocks and (oldest := self._oldest_idle()) is not None:
            self._give_up(oldest)

    def _oldest_idle(self) -> bytes | None:
        return next((name for name in self._names if name not in self._copying), None)

    def _give_up(self, name: bytes) -> None:
        del self._names[name]
        self._doomed.discard(name)
        self._given_up.append(name)


class OnlyHostNames(HostNames):
    """The names of the KV blocks in host memory without a store behind: a block given up is gone.

    Args:
        max_blocks: blocks that each rank has room for, at least one.
        stored: each block that is given up is removed from these names.
    """

    def __init__(self, max_blocks: int, stored: StoredNames) -> None:
        super().__init__(max_blocks)
        self._stored = stored

    def count_there(self, names: Sequence[bytes]) -> int:
        """Return how many of these `names`, from the first on, are still in memory.

        The catalogue has listed them, but blocks may have been given up since.
        """
        return next((index for index, name in enumerate(names) if name not in self), len(names))

    def _give_up(self, name: bytes) -> None:
        super()._give_up(name)
        self._stored.distrust([name])


class NoHostNames:
    """A stand-in for ranks that keep no blocks in host memory: it records nothing."""

    def make_room(self, name: bytes) -> bool:
        return True

    def begin_copy(self, name: bytes) -> None:
        """Do nothing: no block is kept in host memory."""

    def end_store(self, name: bytes, status: OrderStatus) -> None:
        """Do nothing: no block is kept in host memory."""

    def end_load(self, name: bytes, status: OrderStatus) -> None:
        """Do nothing: no block is kept in host memory."""

    def use(self, names: Sequence[bytes]) -> None:
        """Do nothing: no block is kept in host memory."""

    def drop(self, names: Iterable[bytes]) -> None:
        """Do nothing: no block is kept in host memory."""

    def drop_all(self) -> None:
        """Do nothing: no block is kept in host memory."""

    def count_there(self, names: Sequence[bytes]) -> int:
        return len(names)

    def take_given_up(self) -> list[bytes]:
        return []

    def lose_all(self) -> None:
        """Do nothing: no block is kept in host memory."""


AnyHostNames = HostNames | NoHostNames

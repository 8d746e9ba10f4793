"""A flush of the cache, which ends when all copies that were under way at its beginning have ended [H16].

    asked ── pool: nothing is found any more ──▶ all open orders answered, or lost ──▶ done
                                                         └── store emptied as well ──▶ done

Blocks that are being copied are held until all ranks have answered, so a flush frees them no earlier. The
store is emptied after that, since a block that is still being copied there would stay. A flush is made by
`scheduler.prefix_reuse`, for `engine.core.operations_in_force`, which looks now and then whether it is done.
No clock here.
"""

from __future__ import annotations

from penstock.errors import ErrorInfo
from penstock.kvcache.storage_tier import AnyStorageTier
from penstock.kvcache.stored_names import Emptying


class CacheFlush:
    """A flush of the KV cache, which begins when it is made and is done some time later.

    It is done when all copies of blocks that were under way have ended and, if asked for, the store is empty.

    Args:
        tier: the storage tier behind the pool.
        with_store: whether to delete the blocks of this model in the store too.
    """

    def __init__(self, tier: AnyStorageTier, *, with_store: bool) -> None:
        self._tier = tier
        self._orders = tier.flush_orders()
        self._to_empty = tier if with_store else None
        self._emptying: Emptying | None = None

    @property
    def withholds(self) -> bool:
        """Whether the store must not be used now, because its blocks are to be deleted."""
        return self._to_empty is not None and not (self._emptying is not None and self._emptying.is_done)

    def is_done(self) -> bool:
        """Return whether the flush is done; start to empty the store once no copy is open."""
        if self._tier.has_open(self._orders):
            return False
        self._orders = frozenset()
        # Only now, since a copy still under way would put its block into the store that was emptied.
        if self._to_empty is not None and self._emptying is None:
            self._emptying = self._to_empty.empty_store()
        return self._emptying is None or self._emptying.is_done

    @property
    def error(self) -> ErrorInfo | None:
        """The reason why blocks may be left in the store, once the flush is done; None if there is none."""
        return None if self._emptying is None else self._emptying.error

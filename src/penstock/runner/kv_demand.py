"""Decides how many KV blocks a rank offers, from numbers of bytes alone.

    memory that is free once the weights are loaded, a rank's part of it if ranks share the memory
    |  KV cache (on a CPU at most a quarter)  |  measured peak of the largest plan  |  margin  |

On a CPU at most nine tenths of the rank's part are reserved for plans, even if the peak is larger: the
largest plan may never come, and no request starts while memory is short. If the user gives the size of the
cache, it must fit the free memory; on a CPU nothing is reserved then, on a GPU peak and margin are.

Called by `runner.device_kv` once the weights are in memory, and by `planner.memory` beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import NotEnoughMemoryError
from penstock.process.config import RankConfig

# The largest share of the free memory that the caches of all ranks there take by default. It is small on a
# CPU, where other programs need memory too; a GPU is ours.
_DEFAULT_SHARE = {"cpu": 0.25, "cuda": 1.0}
_MOST_KEPT = {"cpu": 0.9, "cuda": math.inf}  # the largest part of a rank's free memory reserved for plans
# What a rank leaves free beside the measured peak: for gaps between allocations, and for libraries.
_MARGIN = {"cpu": 64 << 20, "cuda": 512 << 20}
_GROUP_MARGIN = {"cpu": 0, "cuda": 512 << 20}  # for buffers that ranks of one stage make when they meet


def margin_bytes(device: str, num_ranks: int) -> int:
    """Return the bytes that a rank leaves free beside weights, KV cache and the peak of its plans.

    Args:
        device: "cpu" or "cuda".
        num_ranks: number of ranks of its stage.
    """
    return _MARGIN[device] + (num_ranks > 1) * _GROUP_MARGIN[device]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDemand:
    """The demands on the size of a rank's KV cache: what requests may need, and what the user has set."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int | None  # the user's number of blocks
    kv_cache_bytes: int | None  # or the user's number of bytes
    num_sharers: int  # ranks that share this memory
    reserved_bytes: int = 0  # memory of one rank that is not for the cache: peak of its plans, and margin

    @classmethod
    def of_rank(cls, config: RankConfig, num_sharers: int, peak_bytes: int | None = None) -> KVDemand:
        """Return the demand of one rank, by its config.

        Args:
            num_sharers: ranks that share its memory, this one counted.
            peak_bytes: bytes that its largest plan takes; a margin is reserved beside them. None: reserve
                neither.
        """
        return cls(
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            num_blocks=config.num_blocks,
            kv_cache_bytes=config.kv_cache_bytes,
            num_sharers=num_sharers,
            reserved_bytes=0
            if peak_bytes is None
            else peak_bytes + margin_bytes(config.device_type, config.tp_size),
        )

    def max_blocks(self, *, block_bytes: int, block_size: int, available: int, device: str) -> int:
        """Return how many KV blocks a rank can offer.

        - If the user has set a number of blocks, it is that number.
        - If the user has set a number of bytes, it is as many blocks as these hold.
        - Otherwise it is as many as fit the memory that is free and not reserved, on a CPU at most a share of
          the free memory; but no more than all requests at full length could use.

        Args:
            block_bytes: bytes of one block over all of the rank's layers.
            block_size: tokens of a block.
            available: free bytes of the device; for a CPU, of the host.
            device: "cpu" or "cuda".

        Raises:
            NotEnoughMemoryError: what the user has set does not fit the memory; or, unless the user has set
                a number of blocks, they are too few for one request of full length.
        """
        if self.num_blocks is not None:
            self._check_fits(self.num_blocks, block_bytes, available, device)
            return self.num_blocks
        per_sequence = -(-self.max_model_len // block_size)
        if self.kv_cache_bytes is not None:
            budget, most = self.kv_cache_bytes, None
            self._check_fits(budget // block_bytes, block_bytes, available, device)
        else:
            share = int(available * _DEFAULT_SHARE[device] / self.num_sharers)
            budget = max(0, min(share, self._own(available, self._kept(available, device))))
            most = per_sequence * self.max_num_seqs
        fitting = budget // block_bytes
        if fitting < per_sequence:
            raise NotEnoughMemoryError(
                f"a request of {self.max_model_len} tokens needs {_mib(per_sequence * block_bytes)} of KV "
                f"cache on this stage, which has {_mib(budget)} ({_mib(available)} are "
                f"free{_kept_text(self._kept(available, device))}).",
                remedy="Lower --max-model-len, raise --kv-cache-bytes, or use more stages.",
            )
        return fitting if most is None else min(fitting, most)

    def _check_fits(self, num_blocks: int, block_bytes: int, available: int, device: str) -> None:
        kept = 0 if device == "cpu" else self.reserved_bytes
        needed, own = num_blocks * block_bytes, max(0, self._own(available, kept))
        if needed > own:
            raise NotEnoughMemoryError(
                f"{num_blocks} KV blocks need {_mib(needed)} on this stage, but {_mib(own)} are free"
                f"{_kept_text(kept)}.",
                remedy=f"Use --num-blocks {own // block_bytes} or fewer.",
            )

    def _kept(self, available: int, device: str) -> int:
        """Return the bytes reserved for plans and margin where the user has not set the size of the cache."""
        return int(min(self.reserved_bytes, _MOST_KEPT[device] * available / self.num_sharers))

    def _own(self, available: int, kept: int) -> int:
        """Return how many free bytes this rank may use for KV; negative if more are reserved than free."""
        return available // self.num_sharers - kept


def _kept_text(kept: int) -> str:
    return f"; {_mib(kept)} are reserved for plans" if kept else ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def stranded_bytes(max_blocks: int, num_blocks: int, block_bytes: int) -> int:
    """Return the bytes of memory that a rank could use for KV blocks but does not, because others have less.

    Args:
        max_blocks: the blocks that it could hold.
        num_blocks: the blocks that it has, which are as many as the tightest rank can hold.
        block_bytes: bytes of one of its blocks.
    """
    return (max_blocks - num_blocks) * block_bytes

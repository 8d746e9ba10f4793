"""How many KV blocks host memory has room for: its bytes, divided by what a block takes over all ranks.

Ranks have unequal parts of a block: other numbers of layers and heads. With equal bytes for each, the rank
with the largest part would keep the fewest blocks, and nobody could use what the others have: so every rank
gets room for the same number of blocks. Torch-free; called by `engine.supervisor.launch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.distributed.share import head_share
from penstock.errors import UsageError
from penstock.families.spec import ModelSpec
from penstock.kvstore.host_tier import block_bytes
from penstock.process.config import RankConfig


def rank_block_bytes(spec: ModelSpec, rank: RankConfig, itemsize: int) -> int:
    """Return the bytes that a rank's part of a block takes in host memory.

    Args:
        itemsize: bytes of a number of the KV cache.
    """
    record_bytes = rank.block_size * spec.kv_bytes_per_token(1, itemsize) // spec.num_kv_heads
    num_heads = head_share(spec.num_kv_heads, rank.tp_rank, rank.tp_size).size
    return block_bytes((rank.end_layer - rank.start_layer) * num_heads, record_bytes)


def host_blocks(host_bytes: int, spec: ModelSpec, ranks: Sequence[RankConfig], itemsize: int) -> int:
    """Return how many blocks each rank can keep, of all replicas in so many bytes together.

    Raises:
        UsageError: there is not even room for one.
    """
    each_bytes = sum(rank_block_bytes(spec, rank, itemsize) for rank in ranks)
    if 0 < host_bytes < each_bytes:
        raise UsageError(
            f"kv_host_bytes is {host_bytes:,}; one block takes {each_bytes:,} bytes of host memory.",
            remedy=f"Give --kv-host-bytes {each_bytes} or more, a smaller --block-size, or leave it out.",
            param="kv_host_bytes",
            code="out_of_range",
        )
    return host_bytes // each_bytes

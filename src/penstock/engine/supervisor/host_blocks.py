"""Computes how many KV blocks host memory has room for on each rank.

It is the host's bytes, divided by what a block takes over its ranks.
Ranks have unequal parts of a block: other numbers of layers and heads. With equal bytes for each, the rank
with the largest part would keep the fewest blocks, and the others' rest would be of no use: so every rank
gets room for the same number of blocks. Each host has as many bytes, and the one whose ranks have the largest
part of a block decides. Torch-free; called by `engine.supervisor.launch`.
"""

from __future__ import annotations

from collections import Counter
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
    return block_bytes(rank.num_layers * num_heads, record_bytes)


def host_blocks(host_bytes: int, spec: ModelSpec, ranks: Sequence[RankConfig], itemsize: int) -> int:
    """Return how many blocks each rank can keep.

    Args:
        host_bytes: of each host, for the ranks of all replicas there.

    Raises:
        UsageError: on some host there is not even room for one.
    """
    each_bytes: Counter[str] = Counter()
    for rank in ranks:
        each_bytes[rank.host] += rank_block_bytes(spec, rank, itemsize)
    ((host, most_bytes),) = each_bytes.most_common(1)
    if 0 < host_bytes < most_bytes:
        where = f" on {host}" if len(each_bytes) > 1 else ""
        raise UsageError(
            f"kv_host_bytes is {host_bytes:,}; one block takes {most_bytes:,} bytes of host memory{where}.",
            remedy=f"Give --kv-host-bytes {most_bytes} or more, a smaller --block-size, or leave "
            "--kv-host-bytes out.",
            param="kv_host_bytes",
            code="out_of_range",
        )
    return host_bytes // most_bytes


def host_tier_bytes(spec: ModelSpec, rank: RankConfig, itemsize: int) -> int:
    """Return the bytes of host memory that a rank fills with KV blocks."""
    num_blocks = 0 if rank.store is None else rank.store.host_blocks
    return num_blocks * rank_block_bytes(spec, rank, itemsize)

"""Computes how many KV blocks each rank may keep in host memory.

A block is of use only if all ranks have their part of it, so every rank gets room for the same number of
blocks. Ranks have different numbers of layers and heads, and so parts of a block of different sizes. With
equal bytes for each rank, some memory could not be used. Every host gives the same number of bytes; the
number of blocks is these bytes divided by the bytes of one block over all ranks of a host. The host whose
ranks need the most for a block decides. Torch-free; called by `engine.supervisor.launch`.
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
    """Return the bytes that a rank's part of a KV block takes in host memory.

    Args:
        itemsize: bytes of a number of the KV cache.
    """
    record_bytes = rank.block_size * spec.kv_bytes_per_token(1, itemsize) // spec.num_kv_heads
    num_heads = head_share(spec.num_kv_heads, rank.tp_rank, rank.tp_size).size
    return block_bytes(rank.num_layers * num_heads, record_bytes)


def host_blocks(host_bytes: int, spec: ModelSpec, ranks: Sequence[RankConfig], itemsize: int) -> int:
    """Return how many KV blocks each rank can keep in host memory; the number is the same for all ranks.

    Args:
        host_bytes: bytes of memory for blocks on each host, for all ranks there.
        ranks: of all replicas.
        itemsize: bytes of a number of the KV cache.

    Raises:
        UsageError: `host_bytes` is not 0, but is too little for one block on some host.
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
    """Return the bytes of host memory that a rank may fill with KV blocks.

    Args:
        itemsize: bytes of a number of the KV cache.
    """
    num_blocks = 0 if rank.store is None else rank.store.host_blocks
    return num_blocks * rank_block_bytes(spec, rank, itemsize)

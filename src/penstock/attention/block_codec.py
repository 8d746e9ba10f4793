"""Blocks of the KV cache in canonical order: bytes that do not depend on kernels, stages or ranks [d15].

The bytes of one block of one layer are *records*, one for each KV head of the rank, in order:

    record   keys [block_size, head_dim], then values [block_size, head_dim]

If one latent vector of a token serves all heads, a block of a layer is a single record instead, the same on
every rank of the stage:

    record   latent vectors, each with its rotated key [block_size, rank + rotary_dim]

Numbers are those of the cache, in its dtype, little-endian. A rank with half of the heads has half of the
records: so a block that was written by two ranks of a stage can be read by one, and the other way round.
Called to keep blocks outside of a rank's memory. This module does not know where blocks are kept, nor which
blocks are full: slots that no token has written are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, LatentKV, LayerKV

LayerBlock = tuple[AnyKV, int]  # a layer's storage (`AttentionBackend.layer_kv`), and a block's number in it


class BlockCodec(Protocol):
    """Copies blocks of `block_size` tokens of a rank's layers out of its memory and back.

    A copy is complete when the call returns. It may run on another thread beside steps that do not touch its
    blocks. An export may also run beside steps that read them.
    """

    @property
    def num_records(self) -> int:
        """The number of records of one block of one layer."""
        ...

    @property
    def record_bytes(self) -> int: ...

    def export_blocks(self, layer_blocks: Sequence[LayerBlock]) -> list[bytes]:
        """Return the records of each block, one block after the other."""
        ...

    def import_blocks(self, layer_blocks: Sequence[LayerBlock], records: Sequence[bytes]) -> None:
        """Write `records`, in the order of `export_blocks`, into the blocks, and into no other slots."""
        ...


class SlotCodec:
    """Implements `BlockCodec` where keys and values lie slot by slot, in host memory or on a device.

    Args:
        num_heads, num_parts, width: there is a record for each head, [num_parts, block_size, width]. Its
            parts are keys and values, or latent vectors alone.
    """

    def __init__(
        self, *, num_heads: int, num_parts: int, width: int, dtype: torch.dtype, block_size: int
    ) -> None:
        self._shape = (num_heads, num_parts, block_size, width)
        self._dtype = dtype

    @property
    def num_records(self) -> int:
        return self._shape[0]

    @property
    def record_bytes(self) -> int:
        _, num_parts, block_size, width = self._shape
        return num_parts * block_size * width * self._dtype.itemsize

    def export_blocks(self, layer_blocks: Sequence[LayerBlock]) -> list[bytes]:
        # The records are put in order on the device, so that it sends each block in one piece.
        blocks = [
            torch.stack(self._slots(*layer_block)).permute(2, 0, 1, 3).contiguous()
            for layer_block in layer_blocks
        ]
        return [_bytes(record) for block in blocks for record in block.cpu()]

    def import_blocks(self, layer_blocks: Sequence[LayerBlock], records: Sequence[bytes]) -> None:
        check_records(self, len(layer_blocks), records)
        count = self.num_records
        for index, layer_block in enumerate(layer_blocks):
            slots = self._slots(*layer_block)
            content = self._seen(records[index * count : (index + 1) * count]).to(slots[0].device)
            for part, stored in enumerate(slots):
                stored.copy_(content[:, part].transpose(0, 1))

    def _seen(self, records: Sequence[bytes]) -> Tensor:
        """Return records as [num_heads, num_parts, block_size, width] in the dtype of the cache."""
        whole = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8)
        return whole.view(self._dtype).view(self._shape)

    def _slots(self, kv: AnyKV, block: int) -> list[Tensor]:
        """Return each part of a block where it is stored: [block_size, num_heads, width]."""
        block_size = self._shape[2]
        parts = _parts(kv)
        assert 0 <= block < len(parts[0]) // block_size, block
        return [part[block * block_size : (block + 1) * block_size] for part in parts]


def check_records(codec: BlockCodec, num_blocks: int, records: Sequence[bytes]) -> None:
    """Assert that number and size of the records are right; otherwise kernels would read beyond their end."""
    assert len(records) == num_blocks * codec.num_records, len(records)
    assert {len(record) for record in records} <= {codec.record_bytes}, "a record of another size"


def _bytes(record: Tensor) -> bytes:
    return record.contiguous().view(torch.uint8).numpy().tobytes()


def _parts(kv: AnyKV) -> list[Tensor]:
    """Return the parts that are kept of a token: each [num_slots, num_heads, width]."""
    if isinstance(kv, LayerKV):
        return [kv.key, kv.value]
    assert isinstance(kv, LatentKV)
    return [kv.latent[:, None]]

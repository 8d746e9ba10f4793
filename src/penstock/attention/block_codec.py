"""Blocks of the KV cache in canonical order: bytes that do not depend on kernels, stages or ranks (row d15).

The bytes of one block of one layer are *records*, one for each KV head of the rank, in order:

    record   keys [block_size, head_dim], then values [block_size, head_dim]

or, where a token keeps one latent vector for all heads, the same one record on every rank of the stage:

    record   latent vectors, each with its rotated key [block_size, rank + rotary_dim]

Numbers are those of the cache, in its dtype, little-endian. A rank with half of the heads has half of the
records: so a block that was written by two ranks of a stage can be read by one, and the other way round.
Whoever keeps blocks outside of a rank's memory calls this. It knows nothing of where they are kept, nor of
which blocks are whole: slots that no token has written are copied as they are.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, LatentKV, LayerKV


class BlockCodec(Protocol):
    """Copies blocks of `block_size` tokens of any layer of a rank out of its memory and back.

    Both copies are done when the call returns. They may run on a thread of their own beside steps that leave
    the block alone, and for export beside those that read it.
    """

    @property
    def num_records(self) -> int:
        """Of one block of one layer."""
        ...

    @property
    def record_bytes(self) -> int: ...

    def export_block(self, kv: AnyKV, block: int, into: Tensor) -> None:
        """Write the records of a block.

        Args:
            kv: of the layer, from `AttentionBackend.layer_kv`.
            into: uint8 [num_records, record_bytes], contiguous, in host memory, aligned for the dtype.
        """
        ...

    def import_block(self, kv: AnyKV, block: int, source: Tensor) -> None:
        """The way back: `source` as `into` above. Nothing but the block's own slots is written."""
        ...


class SlotCodec:
    """Implements `BlockCodec` where keys and values lie slot by slot, in host memory or on a device.

    Args:
        num_heads, num_parts, width: a record is [num_parts, block_size, width], one for each head.
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

    def export_block(self, kv: AnyKV, block: int, into: Tensor) -> None:
        check_records(self, into, self._dtype)
        # Put in order where they lie, so that a device sends them in one piece.
        block_parts = torch.stack(self._slots(kv, block)).permute(2, 0, 1, 3)
        self._seen(into).copy_(block_parts)

    def import_block(self, kv: AnyKV, block: int, source: Tensor) -> None:
        check_records(self, source, self._dtype)
        slots = self._slots(kv, block)
        records = self._seen(source).to(slots[0].device)
        for part, stored in enumerate(slots):
            stored.copy_(records[:, part].transpose(0, 1))

    def _seen(self, records: Tensor) -> Tensor:
        """[num_heads, num_parts, block_size, width] in the dtype of the cache."""
        return records.view(self._dtype).view(self._shape)

    def _slots(self, kv: AnyKV, block: int) -> list[Tensor]:
        """Each part of a block where it is stored: [block_size, num_heads, width]."""
        block_size = self._shape[2]
        parts = _parts(kv)
        assert 0 <= block < len(parts[0]) // block_size, block
        return [part[block * block_size : (block + 1) * block_size] for part in parts]


def check_records(codec: BlockCodec, records: Tensor, dtype: torch.dtype) -> None:
    """Memory of another form than the codec's would be written over its end."""
    assert records.dtype == torch.uint8, records.dtype
    assert records.shape == (codec.num_records, codec.record_bytes), records.shape
    assert records.is_contiguous()
    assert records.device.type == "cpu", records.device
    assert records.data_ptr() % dtype.itemsize == 0, "records must be aligned for their dtype"


def _parts(kv: AnyKV) -> list[Tensor]:
    """What is kept of a token: each [num_slots, num_heads, width]."""
    if isinstance(kv, LayerKV):
        return [kv.key, kv.value]
    assert isinstance(kv, LatentKV)
    return [kv.latent[:, None]]

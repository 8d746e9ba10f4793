"""Where a rank keeps the keys and values of its own layers.

Works out how many blocks the memory holds (the core takes the minimum over the stages, row D9) and allocates
them, for the rank's own attention layers only (row A17). Which block belongs to whom is decided in the core.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.attention.metadata import LayerKV
from penstock.errors import NotEnoughMemoryError

# Of the memory that is free once the weights are loaded, over all ranks of the host. Modest on a CPU, where
# the memory belongs to everybody; a GPU is ours, but activations need their room.
_DEFAULT_SHARE = {"cpu": 0.25, "cuda": 0.85}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDemand:
    """What the storage is wanted for, and what the user said about its size."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int | None  # the user's number of blocks
    kv_cache_bytes: int | None  # or the user's number of bytes
    num_sharers: int  # ranks that share this memory


class KVStorage:
    """Keys and values of `num_layers` layers in blocks of `block_size` tokens."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_layers = num_layers
        self._slot_shape = (num_kv_heads, head_dim)
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        num_kv_heads, head_dim = self._slot_shape
        return 2 * self._num_layers * self._block_size * num_kv_heads * head_dim * self._dtype.itemsize

    def max_blocks(self, demand: KVDemand, available: int) -> int:
        """How many blocks this rank can offer.

        The user's number of blocks, or what fits the user's bytes. By default a share of the memory that is
        free, but no more than all requests at full length could use.

        Args:
            available: free bytes of the device (for a CPU: `memory.host_available_bytes`).

        Raises:
            NotEnoughMemoryError: not one request of full length fits, or the user's number does not.
        """
        if demand.num_blocks is not None:
            self._check_fits(demand.num_blocks, available // demand.num_sharers)
            return demand.num_blocks
        per_sequence = -(-demand.max_model_len // self._block_size)
        if demand.kv_cache_bytes is not None:
            budget, most = demand.kv_cache_bytes, None
            self._check_fits(budget // self.block_bytes, available // demand.num_sharers)
        else:
            budget = int(available * _DEFAULT_SHARE[self._device.type] / demand.num_sharers)
            most = per_sequence * demand.max_num_seqs
        fitting = budget // self.block_bytes
        if fitting < per_sequence:
            raise NotEnoughMemoryError(
                f"a request of {demand.max_model_len} tokens needs {_mib(per_sequence * self.block_bytes)} "
                f"of KV cache on this stage, which is given {_mib(budget)} ({_mib(available)} are free).",
                remedy="Lower --max-model-len, raise --kv-cache-bytes, or use more stages.",
            )
        return fitting if most is None else min(fitting, most)

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        """Storage of the own layers, in order. All zeros, and not resident before it is written."""
        return [
            LayerKV(key=self._zeros(num_blocks), value=self._zeros(num_blocks))
            for _ in range(self._num_layers)
        ]

    def _zeros(self, num_blocks: int) -> Tensor:
        shape = (num_blocks * self._block_size, *self._slot_shape)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # Fresh anonymous pages: zero by the kernel's promise, and no memory is spent on the unused ones.
        num_bytes = num_blocks * self.block_bytes // (2 * self._num_layers)
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise NotEnoughMemoryError(
                f"the system refused {_mib(num_bytes)} for the KV cache of one layer: {error}.",
                remedy="Lower --num-blocks.",
            ) from error
        return torch.frombuffer(pages, dtype=self._dtype).view(shape)

    def _check_fits(self, num_blocks: int, available: int) -> None:
        needed = num_blocks * self.block_bytes
        if needed > available:
            raise NotEnoughMemoryError(
                f"{num_blocks} KV blocks need {_mib(needed)} on this stage, but {_mib(available)} are free.",
                remedy=f"Use --num-blocks {available // self.block_bytes} or fewer.",
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"

"""Allocates a rank's memory for the keys and values of its own layers.

It works out how many blocks the memory can hold (`runner.kv_demand`), and reports that to the core, which
takes the minimum over all ranks [D9]. It allocates so many blocks, for the rank's own attention layers only
[A17]. The core decides which request has a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV
from penstock.kernels.pages import shared_pages
from penstock.runner.kv_demand import KVDemand


class DeviceKV:
    """A rank's KV cache, in blocks, for its `num_layers` layers: how large a block is, and how many fit.

    Args:
        backend: the attention backend, which decides how a layer's keys and values lie in memory.
        block_size: tokens per block.
        device: where `allocate` makes the cache.
    """

    def __init__(
        self, backend: AttentionBackend, *, num_layers: int, block_size: int, device: torch.device
    ) -> None:
        self._backend = backend
        self.num_layers = num_layers
        self._block_size = block_size
        self._device = device

    @property
    def block_bytes(self) -> int:
        """The bytes of one KV block over all layers of the rank, keys and values."""
        return self.num_layers * self._backend.block_bytes(self._block_size)

    def max_blocks(self, demand: KVDemand, available: int) -> int:
        """Return how many KV blocks this rank can offer out of `available` free bytes.

        Args:
            demand: what requests need, what the user has set, and what is reserved.

        Raises:
            NotEnoughMemoryError: too few for one request of full length, or for what the user asks for.
        """
        return demand.max_blocks(
            block_bytes=self.block_bytes,
            block_size=self._block_size,
            available=available,
            device=self._device.type,
        )

    def allocate(self, num_blocks: int) -> list[AnyKV]:
        """Build the KV storage of `num_blocks` blocks; return that of each of the rank's layers, in order.

        It is all zeros; on a CPU its pages take no memory before they are written.
        """
        num_bytes = num_blocks * self._backend.block_bytes(self._block_size)
        return [self._backend.layer_kv(self._zeros(num_bytes)) for _ in range(self.num_layers)]

    def _zeros(self, num_bytes: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return shared_pages(num_bytes, "the KV cache of one layer", "Lower --num-blocks.")

"""Allocates a rank's memory for the keys and values of its own layers.

It works out how many blocks the memory holds (`runner.kv_demand`; the core takes the minimum over the stages,
row D9) and allocates them, for the rank's own attention layers only (row A17). The owner of each block is
decided in the core.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV
from penstock.kernels.pages import shared_pages
from penstock.runner.kv_demand import KVDemand


class DeviceKV:
    """The keys and values of `num_layers` layers in blocks, laid out by the attention backend."""

    def __init__(
        self, backend: AttentionBackend, *, num_layers: int, block_size: int, device: torch.device
    ) -> None:
        self._backend = backend
        self.num_layers = num_layers
        self._block_size = block_size
        self._device = device

    @property
    def block_bytes(self) -> int:
        """The bytes of one block over all layers, keys and values."""
        return self.num_layers * self._backend.block_bytes(self._block_size)

    def max_blocks(self, demand: KVDemand, available: int) -> int:
        """Return how many blocks this rank can offer of `available` free bytes.

        Raises what `KVDemand.max_blocks` does.
        """
        return demand.max_blocks(
            block_bytes=self.block_bytes,
            block_size=self._block_size,
            available=available,
            device=self._device.type,
        )

    def allocate(self, num_blocks: int) -> list[AnyKV]:
        """Return storage of the own layers, in order: all zeros, and not resident before it is written."""
        num_bytes = num_blocks * self._backend.block_bytes(self._block_size)
        return [self._backend.layer_kv(self._zeros(num_bytes)) for _ in range(self.num_layers)]

    def _zeros(self, num_bytes: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return shared_pages(num_bytes, "the KV cache of one layer", "Lower --num-blocks.")

"""Where a rank keeps the keys and values of its own layers.

Works out how many blocks the memory holds (the core takes the minimum over the stages, row D9) and allocates
them, for the rank's own attention layers only (row A17). Which block belongs to whom is decided in the core.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV
from penstock.errors import NotEnoughMemoryError
from penstock.kernels.pages import shared_pages

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
    """Keys and values of `num_layers` layers in blocks of `block_size` tokens, laid out by the backend."""

    def __init__(
        self, backend: AttentionBackend, *, num_layers: int, block_size: int, device: torch.device
    ) -> None:
        self._backend = backend
        self._num_layers = num_layers
        self._block_size = block_size
        self._device = device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self._num_layers * self._backend.block_bytes(self._block_size)

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

    def allocate(self, num_blocks: int) -> list[AnyKV]:
        """Storage of the own layers, in order. All zeros, and not resident before it is written."""
        num_bytes = num_blocks * self._backend.block_bytes(self._block_size)
        return [self._backend.layer_kv(self._zeros(num_bytes)) for _ in range(self._num_layers)]

    def _zeros(self, num_bytes: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return shared_pages(num_bytes, "the KV cache of one layer", "Lower --num-blocks.")

    def _check_fits(self, num_blocks: int, available: int) -> None:
        needed = num_blocks * self.block_bytes
        if needed > available:
            raise NotEnoughMemoryError(
                f"{num_blocks} KV blocks need {_mib(needed)} on this stage, but {_mib(available)} are free.",
                remedy=f"Use --num-blocks {available // self.block_bytes} or fewer.",
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"

"""A model on one rank of this process, for benchmarks that look at logits and not at time.

Used by `quantized_perplexity.py` and `gguf_divergence.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata
from penstock.config.engine import Quantization
from penstock.families.registry import load_spec
from penstock.process.config import RankConfig
from penstock.rank.loading import load_rank


class WholeRank:
    """All layers with their head, loaded as a rank loads them, with the threads that torch has.

    Args:
        length: tokens of each prompt.
    """

    def __init__(
        self,
        path: Path,
        length: int,
        *,
        dtype: Literal["float32", "bfloat16"],
        quantization: Quantization = "none",
    ) -> None:
        config = RankConfig(
            model_path=str(path),
            dtype=dtype,
            max_model_len=length,
            stage=0,
            num_stages=1,
            start_layer=0,
            end_layer=load_spec(path).num_layers,
            device="cpu",
            threads=torch.get_num_threads(),
            block_size=length,
            num_blocks=1,
            kv_cache_bytes=None,
            max_num_seqs=1,
            max_num_batched_tokens=length,
            depth=1,
            link_frames=1,
            quantization=quantization,
        )
        loaded = load_rank(config, lambda done, total: None)
        self.kernels = loaded.kernels
        self._model, self._kv = loaded.model, loaded.storage.allocate(1)
        self._length = length

    def logits(self, ids: Tensor) -> Tensor:
        """[tokens, vocabulary] of a prompt, computed at once."""
        positions = torch.arange(self._length)
        metadata = AttentionMetadata(
            query_starts=[0, self._length],
            seq_lens=[self._length],
            block_tables=torch.zeros(1, 1, dtype=torch.int64),
            slot_mapping=positions,
            num_decodes=0,
            block_size=self._length,
        )
        tensors = self._model(self._model.embed(ids), positions, self._kv, metadata)
        return self._model.compute_logits(tensors, positions)

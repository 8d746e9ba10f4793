"""Rank configs for tests that run whole ranks on a real checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.families.registry import load_spec
from penstock.pipeline.partition import partition_layers
from penstock.process.config import RankConfig


def make_rank_configs(
    model: Path,
    num_stages: int,
    async_depth: int = 0,
    *,
    tp: Sequence[int] = (),
    gguf_dequantize: bool = False,
    **changes: object,
) -> list[RankConfig]:
    """One config per rank in float32, small, with short deadlines.

    Args:
        tp: ranks of each stage; one each if nothing is said.
    """
    spec = load_spec(model, dequantize=gguf_dequantize)
    ranges = partition_layers(spec.num_layers, num_stages, "even")
    sizes = tuple(tp or [1] * num_stages)
    return [
        msgspec.structs.replace(
            RankConfig(
                model_path=str(model),
                dtype="float32",
                max_model_len=256,
                stage=stage,
                num_stages=num_stages,
                start_layer=start,
                end_layer=end,
                device="cpu",
                threads=1,
                block_size=16,
                num_blocks=64,
                kv_cache_bytes=None,
                max_num_seqs=4,
                max_num_batched_tokens=256,
                depth=num_stages + async_depth,
                link_frames=async_depth + 1,
                wait_timeout_s=30.0,
                tp_rank=tp_rank,
                tp_size=sizes[stage],
                tp_sizes=sizes,
                gguf_dequantize=gguf_dequantize,
            ),
            **changes,
        )
        for stage, (start, end) in enumerate(ranges)
        for tp_rank in range(sizes[stage])
    ]

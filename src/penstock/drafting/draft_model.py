"""A draft model in memory: a rank that has all layers, and runs the plans of `drafting.draft_turns`."""

from __future__ import annotations

import torch

from penstock.batch import ScheduledBatch
from penstock.drafting.draft_turns import DraftTurns
from penstock.errors import NotEnoughMemoryError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.process.config import DrafterConfig
from penstock.rank.loading import available_bytes, build_runner, load_rank

KV_SHARE = 0.1  # the part of the memory that is free once the weights are loaded that the KV cache may take


def open_turns(config: DrafterConfig) -> DraftTurns:
    """Load the draft model, and return turns that run it.

    Raises:
        NotEnoughMemoryError: not a single block of keys and values fits.
        PenstockError: loading the rank failed.
    """
    rank = config.rank
    loaded = load_rank(rank, lambda done, total: None)
    num_blocks = _num_blocks(config, loaded.storage.block_bytes, available_bytes(loaded.device))
    runner = build_runner(rank, loaded, loaded.storage.allocate(num_blocks))

    @torch.inference_mode()
    def forward(plan: ScheduledBatch) -> list[int]:
        runner.admit(plan)
        batch = runner.complete(runner.begin(plan))
        result = runner.sample(runner.forward(runner.embed(batch), batch), batch)
        return [ids[0] for ids in result.token_ids]

    return DraftTurns(
        forward,
        BlockAllocator(BlockPool(num_blocks), rank.block_size),
        num_rows=rank.max_num_seqs,
        max_len=rank.max_model_len,
        max_tokens=rank.max_num_batched_tokens,
        vocab_size=config.vocab_size,
        own_vocab_size=loaded.spec.vocab_size,
    )


def _num_blocks(config: DrafterConfig, block_bytes: int, available: int) -> int:
    """Return as many blocks as all requests at full length could use, or as many as fit."""
    rank = config.rank
    wanted = rank.max_num_seqs * -(-rank.max_model_len // rank.block_size)
    fitting = int(KV_SHARE * available) // block_bytes
    if fitting == 0:
        raise NotEnoughMemoryError(
            f"the draft model has no memory for its KV cache: {available / 2**20:.0f} MiB are free.",
            remedy="Use a smaller draft model, or --speculative-quantization int8 or int4, or free memory.",
        )
    return min(wanted, fitting)

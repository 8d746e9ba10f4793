"""Whole engines in this process for tests of what is cached; blocks are small, so that prompts have many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.kvcache.block_hash import block_hashes, root_hash

BLOCK, CHUNK = 8, 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

# Stages and ranks, as the settings of an engine.
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 1": {},
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 3, a plan ahead": {"pipeline_parallel_size": 3, "async_depth": 1},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2, tp 2,1": {"pipeline_parallel_size": 2, "tensor_parallel_size": "2,1"},
}
# The grid of exactness; where four ranks share a stage, each of two KV heads is held twice.
GRID: dict[str, dict[str, Any]] = {
    f"pp {pp}, tp {tp}": {"pipeline_parallel_size": pp, "tensor_parallel_size": tp}
    for pp in (1, 2, 3)
    for tp in (1, 2, 4)
}


def small_engine(model: Path, store: Path | None = None, **settings: Any) -> LLM:
    """An engine whose requests wait for what is in the store as long as a test may take."""
    common: dict[str, Any] = {
        "distributed_executor_backend": "inprocess",
        "threads_per_rank": 1,
        "block_size": BLOCK,
        "num_blocks": 200,
        "max_num_seqs": 4,
        "async_depth": 0,
        "kv_store": None if store is None else str(store),
        "kv_store_patience_s": 60.0,
    }
    return LLM(str(model), **common | settings)


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> tuple[list[list[int]], int]:
    """Tokens, and how many of the prompts' were found."""
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs], sum(o.num_cached_tokens for o in outputs)


def findable(prompt: Sequence[int]) -> int:
    """Tokens of a prompt that can be found: whole blocks before that of the last one."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def wait_until_stored(llm: LLM, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> None:
    """Until all whole blocks of what was run are in the store; other short requests keep plans going."""
    wanted = {
        name
        for prompt, answer in zip(prompts, tokens, strict=True)
        for name in block_hashes(root_hash(), [*prompt, *answer[:-1]], BLOCK)
    }
    filler = [[5, number % 90] for number in range(400)]
    while (stats := llm.stats()) is None or stats.store.stored_blocks < len(wanted):
        assert filler, f"{stats} after 400 requests, and {len(wanted)} blocks are to be stored"
        run(llm, [filler.pop()])

"""Prompts that begin alike yield with a prefix cache what they yield without, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from depth import soaked
from penstock import LLM, SamplingParams
from penstock.config.engine import EvictionPolicy
from small_engines import BLOCK, CHUNK, GREEDY, findable, run, small_engine

SHARED = [(11 * index + index // 7) % 90 for index in range(64)]
# Ends on a block, before and behind it, on a chunk and behind it, and a branch inside of a block.
PROMPTS = [
    [*SHARED[:length], *tail]
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 40, 41, 64)
    for tail in ([], [5], [6] * 9)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=150)


def engine(model: Path, **settings: Any) -> LLM:
    return small_engine(model, prefill_chunk=CHUNK, **settings)


def outputs(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    return run(llm, prompts)[0]


@pytest.fixture(scope="module")
def cold(model: Path) -> list[list[int]]:
    """Each prompt by itself in an engine that keeps nothing."""
    with engine(model, enable_prefix_caching=False, kernels="off") as llm:
        return [ids for prompt in PROMPTS for ids in outputs(llm, [prompt])]


@pytest.mark.parametrize("kernels", ["auto", *soaked("off")])
@pytest.mark.parametrize(
    ("pp", "tp", "depth"),
    [
        *((1, 1, 0), (2, 1, 0), (3, 1, 1), (1, 2, 0), (2, 2, 1), (2, "2,1", 0)),
        *(pytest.param(pp, tp, 0, marks=pytest.mark.soak) for pp, tp in ((3, 2), (1, 4), (2, 4), (3, 4))),
    ],
    ids=str,
)
def test_a10_cached_prefixes_give_the_tokens_of_a_cold_run(
    model: Path, cold: list[list[int]], pp: int, tp: int | str, depth: int, kernels: str
) -> None:
    settings: dict[str, Any] = {"pipeline_parallel_size": pp, "tensor_parallel_size": tp}
    with engine(model, async_depth=depth, kernels=kernels, **settings) as llm:
        assert outputs(llm) == cold, "side by side, some beginning with what others are computing"
        assert outputs(llm) == cold, "all from the cache"
        stats = llm.stats()
        assert stats is not None
        assert stats.cache.prefix_hit_tokens >= sum(map(findable, PROMPTS))


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_a10_a_cache_that_must_give_up_blocks_all_the_time(
    model: Path, cold: list[list[int]], policy: EvictionPolicy
) -> None:
    with engine(model, pipeline_parallel_size=2, num_blocks=24, eviction_policy=policy) as llm:
        for _ in range(3):
            assert outputs(llm) == cold
        stats = llm.stats()
        assert stats is not None
        assert stats.cache.evicted_blocks
        assert stats.cache.prefix_hit_tokens


@pytest.mark.parametrize(("policy", "is_kept"), [("priority", True), ("lru", False)])
def test_h9_what_was_asked_for_with_priority_outlives_what_came_later(
    model: Path, policy: EvictionPolicy, is_kept: bool
) -> None:
    worthy, rest = SHARED[:33], [[number, *SHARED[1:33]] for number in range(91, 99)]
    urgent = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, priority=3)
    with engine(model, pipeline_parallel_size=2, num_blocks=24, eviction_policy=policy) as llm:
        first = run(llm, [worthy], urgent)
        for prompt in rest:
            run(llm, [prompt])
        assert run(llm, [worthy], urgent) == (first[0], findable(worthy) if is_kept else 0)


def test_usage_says_what_was_found(model: Path) -> None:
    with engine(model) as llm:
        prompt = {"prompt_token_ids": SHARED[:33]}
        first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
        salted = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, cache_salt="mine")
        assert llm.generate(prompt, salted)[0].num_cached_tokens == 0
    with engine(model, enable_prefix_caching=False) as llm:
        assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]

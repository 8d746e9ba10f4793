"""Blocks that the pool has given up come back from host memory, and go on from there to a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import checkpoints
from depth import soaked
from penstock.errors import UsageError
from small_engines import BLOCK, GRID, LAYOUTS, findable, run, small_engine, wait_until_stored

PROMPTS = [[(11 * index + 5 * number) % 90 for index in range(41)] for number in range(4)]
NUM_FOUND = findable(PROMPTS[0])
POOL = 2 * (len(PROMPTS[0]) + 6) // BLOCK + 2  # for one prompt and a half
HOST_BYTES = 64 << 20
SIX_LAYER_BLOCK = 6 * 2 * (BLOCK * 2 * 8 * 4 + 52 + 200)  # two heads of eight numbers, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    checkpoints.make_checkpoint(directory, layers=3, vocab_size=150, seed=2)
    return directory


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("six")
    checkpoints.make_checkpoint(directory, layers=6, vocab_size=150, max_positions=1024, seed=3)
    return directory


@pytest.fixture(scope="module")
def cold(model: Path) -> list[list[int]]:
    with small_engine(model, enable_prefix_caching=False) as llm:
        return [run(llm, [prompt])[0][0] for prompt in PROMPTS]


@pytest.mark.parametrize("layout", [*LAYOUTS, *soaked(*GRID)])
def test_h1_what_the_pool_has_given_up_is_found_in_host_memory(
    model: Path, cold: list[list[int]], layout: str
) -> None:
    small = {"num_blocks": POOL, "kv_host_bytes": HOST_BYTES, "dtype": "float32"}
    with small_engine(model, **small | (LAYOUTS | GRID)[layout]) as llm:
        for turn in range(3):
            for prompt, wanted in zip(PROMPTS, cold, strict=True):
                (tokens,), num_found = run(llm, [prompt])
                assert tokens == wanted
                assert num_found == (NUM_FOUND if turn else 0)
        stats = llm.stats()
        assert stats is not None
        assert stats.cache.evicted_blocks
        assert stats.store.use.host_bytes_read > stats.store.use.host_records_read > 0
        assert stats.store.use.host_bytes_written
        assert stats.store.use.host_bytes_used <= HOST_BYTES, "of all ranks"
        assert not stats.store.failed_blocks
        assert (stats.store.use.records_read, stats.store.use.bytes_read) == (0, 0)


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2, "partition": "3,3"},
        {"pipeline_parallel_size": 2, "partition": "5,1"},
        {"pipeline_parallel_size": 2, "partition": "1,5", "tensor_parallel_size": "1,2"},
    ],
    ids=["3,3", "5,1", "1,5, tp 1,2"],
)
def test_h1_h9_unequal_stages_find_what_equal_ones_find(six_layers: Path, layout: dict[str, Any]) -> None:
    """Issue 25, point 7: host memory has room for 165 blocks of all layers, whoever has which of them, and
    the pool for one prompt and a little."""
    prompt, other = [(11 * index) % 90 for index in range(641)], [(7 * index) % 90 for index in range(601)]
    settings = {"num_blocks": 90, "kv_host_bytes": 165 * SIX_LAYER_BLOCK, "dtype": "float32"}
    with small_engine(six_layers, **settings | layout) as llm:
        cold, num_found = run(llm, [prompt])
        assert num_found == 0
        wait_until_stored(llm, [prompt], cold)
        wait_until_stored(llm, [prompt, other], [*cold, *run(llm, [other])[0]])
        warm, num_found = run(llm, [prompt])
        assert num_found == findable(prompt)
        assert warm == cold
        stats = llm.stats()
        assert stats is not None
        assert stats.store.use.host_bytes_used <= 165 * SIX_LAYER_BLOCK


def test_h8_write_back_stores_what_host_memory_gives_up_and_the_rest_at_the_end(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    settings = {"dtype": "float32", "kv_host_bytes": HOST_BYTES, "kv_store_policy": "write-back"}
    with small_engine(model, tmp_path / "store", **settings) as llm:
        for prompt, wanted in zip(PROMPTS, cold, strict=True):
            assert run(llm, [prompt])[0] == [wanted]
        run(llm, [PROMPTS[0]])
        stats = llm.stats()
        assert stats is not None
        assert stats.store.use.bytes_written < 1000, "what the catalogue says of the model, and no block"
    with small_engine(model, tmp_path / "store", pipeline_parallel_size=2, dtype="float32") as llm:
        found = [run(llm, [prompt]) for prompt in PROMPTS]
        assert [tokens for (tokens,), _ in found] == cold
        assert sum(count for _, count in found) >= (len(PROMPTS) - 1) * NUM_FOUND


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"kv_host_bytes": -1}, "kv_host_bytes"),
        ({"kv_host_bytes": 1, "enable_prefix_caching": False}, "kv_store"),
        ({"kv_store_policy": "write-back"}, "kv_store_policy"),
        ({"kv_store_policy": "write-back", "kv_host_bytes": 1}, "kv_store_policy"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    model: Path, settings: dict[str, object], param: str
) -> None:
    with pytest.raises(UsageError) as raised:
        small_engine(model, **settings)
    assert raised.value.param == param

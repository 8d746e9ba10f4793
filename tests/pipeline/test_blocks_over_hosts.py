"""Whole engines whose last stages keep their KV blocks in a store of another host (rows G1, d15).

The ranks are threads of this process; to the core they are on two hosts, of which each has a store to itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import checkpoints
import small_engines
from depth import sampled
from penstock import LLM
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.executor.inprocess import InprocessExecutor
from penstock.kvstore.own_store import OwnStore, TierNeed
from penstock.process.config import RankConfig
from small_engines import findable, small_engine, wait_until_stored

PROMPTS = [[(11 * index + number) % 90 for index in range(17 + 24 * number)] for number in range(3)]
NUM_FOUND = sum(map(findable, PROMPTS))


class Layout(NamedTuple):
    """Settings of an engine of a model with three layers, and the first stage that is not on the head."""

    settings: dict[str, Any]
    first_remote: int


LAYOUTS = {
    "1 + 2 layers": Layout({"pipeline_parallel_size": 2, "partition": "1,2"}, 1),
    "2 + 1 layers": Layout({"pipeline_parallel_size": 2, "partition": "2,1"}, 1),
    "1 + 1, 1 layers": Layout({"pipeline_parallel_size": 3}, 1),
    "1 + 2 layers, tp 1,2": Layout(
        {"pipeline_parallel_size": 2, "partition": "1,2", "tensor_parallel_size": "1,2"}, 1
    ),
    "1, 1 + 1 layers, a plan ahead": Layout({"pipeline_parallel_size": 3, "async_depth": 1}, 2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=96)


@pytest.fixture(scope="module")
def cold(model: Path) -> list[list[int]]:
    with small_engine(model, enable_prefix_caching=False) as llm:
        return [run(llm, [prompt])[0][0] for prompt in PROMPTS]


def run(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[list[list[int]], int]:
    return small_engines.run(llm, prompts)


def fill(llm: LLM) -> list[list[int]]:
    """Run all, and wait until what can be stored is."""
    tokens, _ = run(llm)
    wait_until_stored(llm, PROMPTS, tokens)
    return tokens


def with_desk(first_remote: int, directory: Path) -> Callable[[LaunchPlan], InprocessExecutor]:
    """What makes the ranks: from one stage on they are those of a host that keeps blocks in `directory`."""
    desk = OwnStore("desk", None, directory)

    def placed(rank: RankConfig) -> RankConfig:
        assert rank.store is not None
        if rank.stage < first_remote:
            return rank
        return msgspec.structs.replace(rank, store=desk.config(TierNeed.of(rank.store)))

    return lambda plan: InprocessExecutor([placed(rank) for rank in plan.ranks])


def over_hosts(model: Path, directory: Path, layout: str, **settings: Any) -> LLM:
    """An engine over two hosts, whose stores are `head` and `desk` of a directory."""
    chosen = LAYOUTS[layout]
    make = with_desk(chosen.first_remote, directory / "desk")
    return small_engine(
        model, directory / "head", distributed_executor_backend=make, **chosen.settings | settings
    )


def failures(llm: LLM) -> tuple[int, int]:
    stats = llm.stats()
    assert stats is not None
    return stats.store.failed_blocks, stats.store.use.call_failures


@pytest.mark.parametrize("layout", sampled(LAYOUTS, 2))
def test_g1_d15_warm_at_two_hosts_hit_at_two_hosts(
    model: Path, cold: list[list[int]], tmp_path: Path, layout: str
) -> None:
    with over_hosts(model, tmp_path, layout) as llm:
        assert fill(llm) == cold
    with over_hosts(model, tmp_path, layout) as llm:
        assert run(llm) == (cold, NUM_FOUND)
        assert failures(llm) == (0, 0)


def test_g1_d15_what_only_the_other_host_has_is_a_miss_at_one_host(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    """The head alone is never told to load what it does not have, and has it from then on."""
    with over_hosts(model, tmp_path, "1 + 2 layers") as llm:
        fill(llm)
    with small_engine(model, tmp_path / "head") as llm:
        assert run(llm) == (cold, 0)
        assert failures(llm) == (0, 0)
        wait_until_stored(llm, PROMPTS, cold)
    with small_engine(model, tmp_path / "head", pipeline_parallel_size=2) as llm:
        assert run(llm) == (cold, NUM_FOUND)
    with over_hosts(model, tmp_path, "1 + 2 layers") as llm:
        assert run(llm) == (cold, NUM_FOUND)


def test_g1_d15_warm_at_one_host_hit_at_two_that_both_have_it(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    with small_engine(model, tmp_path / "head") as llm:
        fill(llm)
    shutil.copytree(tmp_path / "head", tmp_path / "apart" / "head")
    with over_hosts(model, tmp_path / "apart", "1 + 2 layers") as llm:
        assert run(llm) == (cold, 0), "the other one has nothing"
        assert failures(llm) == (0, 0)
    shutil.copytree(tmp_path / "head", tmp_path / "desk")
    for layout in LAYOUTS:
        with over_hosts(model, tmp_path, layout) as llm:
            assert run(llm) == (cold, NUM_FOUND), layout


def test_g1_d15_another_cut_finds_what_each_host_has_of_both(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    """A layer that went to the other host is there once that one has stored it, too."""
    for layout in ("1 + 2 layers", "2 + 1 layers"):
        with over_hosts(model, tmp_path, layout) as llm:
            _, num_found = run(llm)
            assert num_found == 0
            assert failures(llm) == (0, 0)
            wait_until_stored(llm, PROMPTS, cold)
    for layout in LAYOUTS:
        with over_hosts(model, tmp_path, layout) as llm:
            assert run(llm) == (cold, NUM_FOUND), layout


def test_r9_a_host_whose_store_does_not_work_costs_time_and_no_token(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "desk").write_text("no directory")
    with over_hosts(model, tmp_path, "1 + 2 layers") as llm:
        assert run(llm)[0] == cold
        assert run(llm, [[90 - token for token in prompt] for prompt in PROMPTS])[1] == 0
        assert failures(llm) != (0, 0)


def test_h1_g1_host_memory_in_front_of_the_stores_of_two_hosts(
    model: Path, cold: list[list[int]], tmp_path: Path
) -> None:
    memory = {"kv_host_bytes": 64 << 20, "kv_store_policy": "write-back"}
    with over_hosts(model, tmp_path, "1 + 2 layers", **memory) as llm:
        assert fill(llm) == cold
    with over_hosts(model, tmp_path, "1 + 2 layers") as llm:
        assert run(llm) == (cold, NUM_FOUND)

"""Stages of unlike numeric classes: the same tokens where nothing is close, and no KV blocks in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import small_engines
from checkpoints import make_checkpoint
from hf_reference import MIN_MARGIN
from margins import smallest_margin
from penstock import LLM, SamplingParams
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.executor.inprocess import InprocessExecutor
from penstock.kernels.cpu import library
from penstock.kernels.cpu.compiler import Machine
from penstock.kernels.cpu.targets import AUTO, targets_of
from small_engines import findable, small_engine, wait_until_stored

OTHER = "avx2"
PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)

machine = Machine.detect()
pytestmark = pytest.mark.skipif(
    OTHER not in targets_of(machine.architecture, machine.cpu_flags), reason="this CPU has one class"
)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Without a compiler there is one class: torch's."""
    loaded = library.load("auto", OTHER)
    if loaded.library is None:
        pytest.skip(loaded.reason)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=96, seed=3)


def in_classes(*classes: str) -> Callable[[LaunchPlan], InprocessExecutor]:
    """Ranks as threads, each in its class."""

    def make(plan: LaunchPlan) -> InprocessExecutor:
        return InprocessExecutor(
            [
                msgspec.structs.replace(rank, numeric_class=name)
                for rank, name in zip(plan.ranks, classes, strict=True)
            ]
        )

    return make


def answers(
    model: Path, classes: tuple[str, ...], **layout: Any
) -> tuple[list[list[int]], list[Any], list[str]]:
    """Greedy tokens, their log-probabilities, and the class of each rank."""
    with LLM(
        str(model),
        dtype="float32",
        threads_per_rank=1,
        num_blocks=64,
        distributed_executor_backend=in_classes(*classes),
        **layout,
    ) as llm:
        outputs = [
            output.outputs[0]
            for output in llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], GREEDY)
        ]
        stats = llm.stats()
        assert stats is not None
    return [one.token_ids for one in outputs], [one.logprobs for one in outputs], stats.numeric_classes


def test_g1_d15_stages_of_unlike_classes_give_the_tokens_of_one_where_none_is_close(model: Path) -> None:
    whole, _, (own,) = answers(model, (AUTO,))
    assert smallest_margin(model, PROMPTS, whole) > MIN_MARGIN
    for classes in ((AUTO, OTHER), (OTHER, AUTO), (AUTO, OTHER, AUTO)):
        found, _, told = answers(model, classes, pipeline_parallel_size=len(classes))
        assert found == whole, classes
        assert len(set(told)) == 2
        assert own in told


def test_g1_d15_ranks_of_one_class_give_the_same_bits_however_they_are_cut(model: Path) -> None:
    whole = answers(model, (OTHER,))
    cut = answers(model, (OTHER, OTHER), pipeline_parallel_size=2)
    assert cut[:2] == whole[:2]
    assert cut[2] == whole[2] * 2
    assert whole[2][0].startswith(f"{OTHER} ")


def test_g1_h17_what_one_class_stores_another_does_not_find(model: Path, tmp_path: Path) -> None:
    prompts = [list(range(2 + number, 40 + number)) for number in range(2)]
    num_found = sum(map(findable, prompts))
    with small_engine(model, tmp_path) as llm:
        cold, _ = small_engines.run(llm, prompts)
        wait_until_stored(llm, prompts, cold)
    mixed = {"pipeline_parallel_size": 2, "distributed_executor_backend": in_classes(AUTO, OTHER)}
    with small_engine(model, tmp_path, **mixed) as llm:
        assert small_engines.run(llm, prompts)[1] == 0
        wait_until_stored(llm, prompts, cold)
    with small_engine(model, tmp_path, numeric_class=OTHER) as llm:
        assert small_engines.run(llm, prompts)[1] == 0
    for same in ({"pipeline_parallel_size": 3}, mixed):
        with small_engine(model, tmp_path, **same) as llm:
            assert small_engines.run(llm, prompts)[1] == num_found, same

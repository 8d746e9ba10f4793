"""Ranks as threads on real checkpoints: exact tokens, honest numbers, typed failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from checkpoints import make_checkpoint
from hand_core import Part, Wanted, make_plan, new_row, small_core
from paths import shared_data
from penstock.engine.stats import stage_memory
from penstock.errors import CheckpointError, ProtocolError, StageLostError
from penstock.executor.inprocess import InprocessExecutor
from penstock.families.registry import load_spec
from rank_configs import make_rank_configs


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("stage ")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), layers=5, tied=True)


@pytest.mark.parametrize(
    ("num_stages", "async_depth", "chunk"), [(1, 0, 64), (2, 0, 7), (3, 1, 16), (5, 2, 64)]
)
def test_d4_golden_tokens_alone_and_in_company(num_stages: int, async_depth: int, chunk: int) -> None:
    model = shared_data("models", "stories260K")
    golden = json.loads((model / "golden.json").read_text())["greedy_ids"]
    executor = InprocessExecutor(make_rank_configs(model, num_stages, async_depth))
    executor.start()
    wanted = [
        Wanted([1, *golden[:known]], min(60, len(golden) - known)) for known in (0, 63, 129, 7, 21, 180)
    ]
    small_core(num_stages, async_depth, chunk).generate(executor, wanted)
    executor.shutdown()
    for request in wanted:
        known = len(request.prompt) - 1
        assert request.output == golden[known : known + request.count]


@pytest.mark.parametrize("kernels", ["auto", "-attention", "off"])
def test_ranks_say_whether_company_changes_their_numbers(kernels: str, tiny: Path) -> None:
    """All kernels there: plans are sized by time, and the core measures before it serves."""
    configs = [msgspec.structs.replace(config, kernels=kernels) for config in make_rank_configs(tiny, 2)]
    executor = InprocessExecutor(configs)
    ranks = executor.start().ranks
    executor.shutdown()
    has_library = not any(rank.kernels.startswith("none") for rank in ranks)
    assert [rank.is_invariant for rank in ranks] == [kernels == "auto" and has_library] * 2


def test_a10_d5_all_stage_counts_give_the_same_tokens(tiny: Path) -> None:
    prompts = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(5)]
    outputs = []
    for num_stages in range(1, 6):
        executor = InprocessExecutor(make_rank_configs(tiny, num_stages))
        executor.start()
        wanted = [Wanted(list(prompt), 12) for prompt in prompts]
        small_core(num_stages, 0, 8).generate(executor, wanted)
        executor.shutdown()
        outputs.append([request.output for request in wanted])
    assert all(len(output) == 12 for output in outputs[0])
    assert outputs[1:] == outputs[:1] * 4


def test_d9_a17_uneven_stages_agree_on_the_minimum(tiny: Path) -> None:
    spec = load_spec(tiny)
    per_layer = spec.kv_bytes_per_token(1, 4) * 16
    configs = make_rank_configs(tiny, 2, num_blocks=None, kv_cache_bytes=120 * per_layer, kernels="off")
    executor = InprocessExecutor(configs)
    plan = executor.start()
    executor.shutdown()
    layers = [config.end_layer - config.start_layer for config in configs]
    assert layers == [3, 2]
    assert [rank.block_bytes for rank in plan.ranks] == [n * per_layer for n in layers]
    assert plan.num_blocks == 40
    memory = stage_memory(plan.ranks, plan.num_blocks)
    assert [stage.stranded_bytes for stage in memory] == [0, 20 * 2 * per_layer]
    for config, rank in zip(configs, plan.ranks, strict=True):
        assert rank.tensor_bytes == 4 * spec.stage_parameters(config.start_layer, config.end_layer)
        assert rank.bytes_read == rank.tensor_bytes


def test_a_checkpoint_that_cannot_be_read_is_raised_from_start(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, layers=3)
    file = next(model.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    executor = InprocessExecutor(make_rank_configs(model, 2))
    with pytest.raises(CheckpointError, match=file.name):
        executor.start()
    executor.shutdown()


def test_a_plan_that_a_rank_refuses_loses_the_stage_with_its_cause(tiny: Path) -> None:
    executor = InprocessExecutor(make_rank_configs(tiny, 3))
    executor.start()
    part = Part(row=1, num_tokens=3, start=0, blocks=[])
    executor.submit_plan(make_plan(0, [part], new_rows=[new_row(1, [4, 5, 6], name="the-request")]))
    with pytest.raises(StageLostError, match=r"step 0.*'the-request' has no KV block") as caught:
        executor.poll_results(30.0)
    assert caught.value.stage is not None
    executor.shutdown()


def test_shutdown_before_start_after_start_and_twice(tiny: Path) -> None:
    InprocessExecutor(make_rank_configs(tiny, 2)).shutdown()
    executor = InprocessExecutor(make_rank_configs(tiny, 2))
    executor.start()
    assert executor.wait_sources() == []
    assert executor.poll_results(0.0) == []
    executor.shutdown()
    executor.shutdown()


def test_submitted_plans_are_finished_before_a_shutdown(tiny: Path) -> None:
    executor = InprocessExecutor(make_rank_configs(tiny, 3, async_depth=2))
    executor.start()
    for step in range(4):
        executor.submit_plan(make_plan(step))
    results = []
    while len(results) < 4:
        results += executor.poll_results(30.0)
    assert [result.step_id for result in results] == [0, 1, 2, 3]
    executor.shutdown()


def test_a_failed_rank_reports_the_protocol_error_kind(tiny: Path) -> None:
    executor = InprocessExecutor(make_rank_configs(tiny, 1))
    executor.start()
    executor.submit_plan(make_plan(5))
    with pytest.raises(StageLostError, match=r"expected the plan of \(epoch, step\) \(0, 0\)") as caught:
        executor.poll_results(30.0)
    assert not isinstance(caught.value, ProtocolError)
    executor.shutdown()

"""Experts that the checkpoint holds quantised, or that are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from hand_core import Wanted, small_core
from penstock.executor.inprocess import InprocessExecutor
from penstock.layers.experts import RoutedExperts
from penstock.rank import rank
from penstock.rank.loading import LoadedRank, load_rank
from rank_configs import make_rank_configs

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]
SIZES = {"layers": 2, "vocab_size": 152, "hidden_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "intermediate_size": 64},
    "qwen2_moe": {
        "family": "qwen2_moe",
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def outputs(model: Path, tp: Sequence[int], **changes: object) -> list[list[int]]:
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 8) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LoadedRank]:
    """Ranks that are loaded from here on."""
    found: list[LoadedRank] = []

    def load(*args: Any) -> LoadedRank:
        found.append(load_rank(*args))
        return found[-1]

    monkeypatch.setattr(rank, "load_rank", load)
    return found


def all_grouped(ranks: list[LoadedRank]) -> bool:
    blocks = [block for each in ranks for block in each.model.modules() if isinstance(block, RoutedExperts)]
    return bool(blocks) and all(block.is_grouped for block in blocks)


@pytest.mark.parametrize("layout", ["gptq", "awq"])
@EACH_MODEL
def test_quantised_experts_of_a_checkpoint_run_in_the_grouped_kernel_in_every_layout(
    tmp_path: Path, loaded: list[LoadedRank], name: str, layout: checkpoints.QuantizedLayout
) -> None:
    model = {**SIZES, **MODELS[name], "symmetric": layout == "gptq"}
    checkpoints.make_quantized_checkpoint(tmp_path, layout, **model)
    one = outputs(tmp_path, (1,), kernels="off")
    loaded.clear()
    for tp in ((1,), (2,), (2, 1)):
        assert outputs(tmp_path, tp) == one, tp
    assert all_grouped(loaded)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@EACH_MODEL
def test_experts_quantised_while_loaded_run_in_the_grouped_kernel(
    tmp_path: Path, loaded: list[LoadedRank], name: str, quantization: str
) -> None:
    checkpoints.make_checkpoint(tmp_path, **SIZES, **MODELS[name])
    one = outputs(tmp_path, (1,), kernels="off", quantization=quantization)
    loaded.clear()
    for tp in ((1,), (1, 1)):
        assert outputs(tmp_path, tp, quantization=quantization) == one
    assert all_grouped(loaded)

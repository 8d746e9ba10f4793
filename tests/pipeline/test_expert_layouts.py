"""Every layout of stages and ranks gives the tokens of one rank, for models with experts too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import checkpoints
from depth import soaked
from hand_core import Wanted, small_core
from hf_reference import MIN_MARGIN
from margins import smallest_margin
from penstock.executor.inprocess import InprocessExecutor
from rank_configs import make_rank_configs

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]
LAYOUTS = [(1,), (1, 1), (2,), (4,), (2, 2, 2), (2, 1)]
WHOLE_EXPERTS = [(4,), (2, 2, 2), (2, 1)]
MORE_LAYOUTS = [(1, 1, 1), (2, 2), (4, 4), (4, 4, 4), (4, 2, 1)]
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "num_local_experts": 5},
    "qwen2_moe": {"family": "qwen2_moe", "mlp_only_layers": [1]},
    "qwen3_moe": {"family": "qwen3_moe", "mlp_only_layers": [1], "head_dim": 16},
}


def outputs(model: Path, tp: tuple[int, ...], **changes: object) -> list[list[int]]:
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 8) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return checkpoints.make_checkpoint(directory, layers=3, vocab_size=150, seed=5, **MODELS[request.param])


@pytest.mark.parametrize("kernels", ["auto", *soaked("off")])
@pytest.mark.parametrize("whole_experts", [False, *soaked(True)])
def test_every_layout_of_experts_gives_the_tokens_of_one_rank(
    checkpoint: Path, whole_experts: bool, kernels: str
) -> None:
    one = outputs(checkpoint, (1,), kernels="off")
    assert smallest_margin(checkpoint, PROMPTS, one) > MIN_MARGIN
    for tp in LAYOUTS if not whole_experts else WHOLE_EXPERTS:
        assert outputs(checkpoint, tp, kernels=kernels, expert_parallel=whole_experts) == one, tp


@pytest.mark.soak
@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_many_more_layouts_of_experts_give_the_tokens_of_one_rank(
    checkpoint: Path, whole_experts: bool, kernels: str
) -> None:
    one = outputs(checkpoint, (1,), kernels="off")
    for tp in MORE_LAYOUTS:
        assert outputs(checkpoint, tp, kernels=kernels, expert_parallel=whole_experts) == one, tp

"""Every layout of stages and ranks gives the tokens of one rank, for models with experts too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import checkpoints
from hand_core import Wanted, small_core
from penstock.executor.inprocess import InprocessExecutor
from rank_configs import make_rank_configs

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]
LAYOUTS = [(1,), (1, 1), (1, 1, 1), (2,), (2, 2), (2, 2, 2), (2, 1)]
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "num_local_experts": 5},
    "qwen2_moe": {"family": "qwen2_moe", "mlp_only_layers": [1]},
}


def outputs(model: Path, tp: tuple[int, ...], **changes: object) -> list[list[int]]:
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 8) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_of_experts_gives_the_tokens_of_one_rank(
    tmp_path: Path, name: str, whole_experts: bool, kernels: str
) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=3, vocab_size=150, seed=3, **MODELS[name])
    one = outputs(tmp_path, (1,), kernels="off")
    for tp in LAYOUTS if not whole_experts else [tp for tp in LAYOUTS if 2 in tp]:
        assert outputs(tmp_path, tp, kernels=kernels, expert_parallel=whole_experts) == one, tp

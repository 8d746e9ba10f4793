"""Who guesses where a stage runs on a CUDA device. Needs a GPU; makes its own checkpoints.

In float32 the likeliest tokens of these models are far enough apart for them to be those without guesses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_models import make_with_mtp
from penstock import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

PROMPTS = [{"prompt_token_ids": [1, 5 + 3 * index, 7, *([20, 21, 22] * 4)]} for index in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_with_mtp(tmp_path_factory.mktemp("model"), is_right=True))


def generated(model: str, device: str, **given: Any) -> tuple[list[object], int]:
    """Greedy tokens of each prompt, and how many guesses were right."""
    with LLM(
        model,
        dtype="float32",
        device=device,
        pipeline_parallel_size=len(device.split(",")),
        num_blocks=64,
        distributed_executor_backend="inprocess",
        **given,
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        stats = llm.stats()
    assert stats is not None
    return [output.outputs[0].token_ids for output in outputs], stats.scheduler.speculation.num_accepted


@pytest.mark.parametrize("device", ["cuda", "cuda,cuda", "cpu,cuda", "cuda,cpu"])
@pytest.mark.parametrize("who", ["suffix", "mtp", "draft_model"])
def test_guesses_change_no_token_of_these(who: str, device: str, model: str) -> None:
    how: dict[str, Any] = {"speculative_method": who}
    if who == "draft_model":
        how = {"speculative_config": {"model": model, "device": "cuda"}}
    expected, _ = generated(model, device, speculative_method="off")
    found, num_accepted = generated(model, device, **how)
    assert found == expected
    assert num_accepted > 0 or who == "draft_model", "it may load until the texts are over"


def test_by_default_nobody_guesses_there(model: str) -> None:
    _, num_accepted = generated(model, "cuda")
    assert num_accepted == 0

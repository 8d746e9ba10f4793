"""The same stages on a CUDA device: same tokens as on the CPU. Needs a GPU; makes its own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_reference import MODELS, NUM_TOKENS, PROMPT, reference_greedy
from penstock import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("device", ["cuda", "cuda,cuda", "cpu,cuda", "cuda:0,cpu", "cpu,cuda,cpu"])
@pytest.mark.parametrize("backend", ["inprocess", "mp"])
def test_a10_i13_greedy_tokens_equal_the_reference(device: str, backend: str, tmp_path: Path) -> None:
    MODELS[1].make(tmp_path)
    expected, _ = reference_greedy(tmp_path)
    with LLM(
        str(tmp_path),
        dtype="float32",
        device=device,
        pipeline_parallel_size=len(device.split(",")),
        num_blocks=64,
        distributed_executor_backend=backend,
    ) as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": PROMPT},
            SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
    assert output.outputs[0].token_ids == expected

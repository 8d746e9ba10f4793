"""The same stages on a CUDA device: same tokens as on the CPU. Needs a GPU; makes its own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_reference import MODELS, NUM_TOKENS, PROMPT, reference_greedy
from penstock import LLM, SamplingParams
from penstock.rank.rank import phase_clock
from penstock.trace.phases import Phase, PhaseClock

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


def test_d6_busy_time_of_a_gpu_is_its_own() -> None:
    """Issue 25, point 6: longer than the launches, and waited for as computing."""
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    torch.mm(x, x)
    torch.cuda.synchronize(device)
    clock, launched = phase_clock(device), PhaseClock()
    for each in (clock, launched):
        each.begin(Phase.FORWARD)
    for _ in range(200):
        torch.mm(x, x)
    for each in (clock, launched):
        each.begin(Phase.PUT)
    clock.await_device()
    _, busy_ns, phase_ns = clock.totals()
    assert busy_ns > 2 * launched.totals()[1]
    assert phase_ns[Phase.FORWARD] > 0.9 * busy_ns

"""The trained stories260K checkpoint must say its published words under every layout (float32, greedy).

`golden.json` comes from an independent float64 run; its smallest top-two margin is 0.0042. The prompt is BOS
and the first n golden ids; the rest must follow exactly, whatever the number of stages, chunk size, depth and
company. `./run test` takes some of a pairwise subset of the grid, `./run soak` the whole.
"""

from __future__ import annotations

import json
from itertools import product

import pytest

from depth import sampled
from pairwise import Case, pairwise
from paths import shared_data
from penstock import LLM, SamplingParams

AXES = {
    "num_stages": (1, 2, 3, 4, 5),
    "chunk": (1, 7, 16, 64, 512),
    "async_depth": (0, 1, 2),
    "num_known": (0, 63, 129, 200),
    "num_others": (0, 16),
}
BOS = 1
SUBSET = pairwise(AXES)
REST = [case for case in product(*AXES.values()) if case not in set(SUBSET)]


def check_golden(num_stages: int, chunk: int, async_depth: int, num_known: int, num_others: int) -> None:
    model = shared_data("models", "stories260K")
    golden = json.loads((model / "golden.json").read_text())["greedy_ids"]
    prompts = [{"prompt_token_ids": [BOS, *golden[:num_known]]}]
    sampling = [_greedy(len(golden) - num_known)]
    for other in range(num_others):  # unlike lengths, so that prefills and decodes mix in one plan
        prompts.append({"prompt_token_ids": [BOS, *golden[other : 5 * other + 3]]})
        sampling.append(_greedy(3 + 7 * other))
    with LLM(
        str(model),
        dtype="float32",
        pipeline_parallel_size=num_stages,
        async_depth=async_depth,
        prefill_chunk=chunk,
        num_blocks=256,
        distributed_executor_backend="inprocess",
        threads_per_rank=1,
    ) as llm:
        outputs = llm.generate(prompts, sampling)
    assert outputs[0].outputs[0].token_ids == golden[num_known:]
    assert outputs[0].outputs[0].finish_reason == "length"
    assert [len(o.outputs[0].token_ids) for o in outputs[1:]] == [p.max_tokens for p in sampling[1:]]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("case", sampled(SUBSET, 8), ids=str)
def test_a10_d4_golden_ids_pairwise(case: Case) -> None:
    check_golden(*case)


@pytest.mark.soak
@pytest.mark.parametrize(AXES, REST)
def test_a10_d4_golden_ids_whole_grid(
    num_stages: int, chunk: int, async_depth: int, num_known: int, num_others: int
) -> None:
    check_golden(num_stages, chunk, async_depth, num_known, num_others)

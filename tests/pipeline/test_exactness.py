"""Seeded random checkpoints through the whole engine: `transformers` judges, one stage is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from depth import sampled, soaked
from hf_reference import (
    MIN_MARGIN,
    MODELS,
    NUM_TOKENS,
    PROMPT,
    RandomModel,
    reference_greedy,
    reference_logits,
)
from penstock import LLM, SamplingParams
from penstock.engine.client.outputs import RequestOutput

LAYERS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)


def run(model: Path, prompt: list[int], sampling: SamplingParams = GREEDY, **layout: Any) -> RequestOutput:
    with LLM(
        str(model),
        dtype=layout.pop("dtype", "float32"),
        distributed_executor_backend="inprocess",
        num_blocks=64,
        threads_per_rank=1,
        **layout,
    ) as llm:
        return llm.generate({"prompt_token_ids": prompt}, sampling)[0]


@pytest.mark.parametrize("model", sampled(MODELS, 6), ids=str)
def test_a18_engine_equals_transformers(model: RandomModel, tmp_path: Path) -> None:
    model.make(tmp_path)
    expected, margins = reference_greedy(tmp_path)
    assert margins.min() > MIN_MARGIN
    logprobs = reference_logits(tmp_path, PROMPT + expected).log_softmax(-1)[len(PROMPT) - 1 : -1]
    completion = run(tmp_path, PROMPT, pipeline_parallel_size=3, async_depth=1, prefill_chunk=3).outputs[0]
    assert completion.token_ids == expected
    for row, entry in zip(logprobs, completion.logprobs, strict=True):
        found = torch.tensor([entry[token_id].logprob for token_id in entry])
        torch.testing.assert_close(found, row[list(entry)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [5, *soaked(512)])
@pytest.mark.parametrize("model", [MODELS[1], MODELS[9]], ids=str)
def test_a10_s3_every_stage_count_equals_one_stage_bit_for_bit(
    model: RandomModel, chunk: int, dtype: str, tmp_path: Path
) -> None:
    """Log-probabilities are floats of the logits: equal bits there are equal bits everywhere before."""
    model.make(tmp_path)
    prompt = PROMPT * 5
    expected = run(tmp_path, prompt, prefill_chunk=chunk, dtype=dtype).outputs[0]
    for num_stages in range(2, LAYERS + 1):
        found = run(tmp_path, prompt, prefill_chunk=chunk, dtype=dtype, pipeline_parallel_size=num_stages)
        assert found.outputs[0].token_ids == expected.token_ids
        assert found.outputs[0].logprobs == expected.logprobs


@pytest.mark.parametrize("partition", sampled(["even", "last", "1,3", "3,1"], 2))
def test_a3_s7_partition_policy_changes_no_bit(partition: str, tmp_path: Path) -> None:
    MODELS[4].make(tmp_path)
    expected = run(tmp_path, PROMPT).outputs[0]
    found = run(tmp_path, PROMPT, pipeline_parallel_size=2, partition=partition).outputs[0]
    assert found.logprobs == expected.logprobs


@pytest.mark.parametrize(("num_stages", "async_depth"), [(2, 0), (3, 1), (4, 2)])
def test_g8_seeded_sampling_is_a_function_of_seed_and_position(
    num_stages: int, async_depth: int, tmp_path: Path
) -> None:
    MODELS[0].make(tmp_path)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=48, ignore_eos=True)
    expected = run(tmp_path, PROMPT, sampling).outputs[0].token_ids
    found = run(tmp_path, PROMPT, sampling, pipeline_parallel_size=num_stages, async_depth=async_depth)
    assert found.outputs[0].token_ids == expected
    other = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=12, max_tokens=48, ignore_eos=True)
    assert run(tmp_path, PROMPT, other).outputs[0].token_ids != expected


@pytest.mark.parametrize("num_stages", sampled([2, 1, 4], 1))
@pytest.mark.parametrize("model", [m for m in MODELS if m.tied][::2], ids=str)
def test_s2_a14_tied_head_by_load_or_by_transfer(model: RandomModel, num_stages: int, tmp_path: Path) -> None:
    """Blocks of 40 rows cut the vocabulary of 96 unevenly."""
    model.make(tmp_path)
    layout: dict[str, Any] = {"pipeline_parallel_size": num_stages, "max_num_batched_tokens": 40}
    expected = run(tmp_path, PROMPT, max_num_seqs=8, **layout).outputs[0]
    found = run(tmp_path, PROMPT, max_num_seqs=8, tied_head="transfer", **layout).outputs[0]
    assert found.logprobs == expected.logprobs


@pytest.mark.parametrize("kernels", ["auto", *soaked("off")])
@pytest.mark.parametrize(
    ("tp", "dtype"),
    [
        *[("2,2", "float32"), ("4,4", "bfloat16"), ("2,4", "float32"), ("4,2", "bfloat16")],
        *[pytest.param(tp, "float32", marks=pytest.mark.soak) for tp in ("1,2", "4,1", "1,4,2", "2,1,4")],
    ],
)
def test_s2_a14_a_tied_head_that_ranks_share_gives_the_logits_of_a_loaded_one(
    tp: str, dtype: str, kernels: str, tmp_path: Path
) -> None:
    """Issue 25, point 14. Blocks of 40 rows cut the shares of the 150 ids unevenly."""
    make_checkpoint(tmp_path, tied=True, layers=3, vocab_size=150, seed=4)
    layout: dict[str, Any] = {
        "pipeline_parallel_size": len(tp.split(",")),
        "tensor_parallel_size": tp,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 8,
        "dtype": dtype,
        "kernels": kernels,
    }
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    expected = run(tmp_path, PROMPT, sampling, **layout).outputs[0]
    found = run(tmp_path, PROMPT, sampling, tied_head="transfer", **layout).outputs[0]
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs

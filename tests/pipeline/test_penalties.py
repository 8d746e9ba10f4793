"""Penalties, biases, allowed ids, bad words through whole engines (rows D6, G8): the same in every layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from checkpoints import make_checkpoint
from depth import sampled
from hf_reference import MIN_MARGIN, MODELS, NUM_TOKENS, PROMPT, reference
from pairwise import Case, pairwise
from penstock import LLM, SamplingParams
from penstock.engine.client.outputs import CompletionOutput
from small_engines import small_engine

VOCAB = 96
AXES = {
    "pp": (1, 2, 3),
    "tp": (1, 2),
    "depth": (0, 1, 2),
    "chunk": (3, 512),
    "kernels": ("auto", "off"),
    "num_blocks": (12, 200),  # of 8 tokens: with 12, whoever is youngest gives way again and again
}
CASES = [case for case in pairwise(AXES) if case != (1, 1, 0, 512, "auto", 200)]
PROMPTS = [[(7 * i + 3 * j) % 20 for j in range(3 + 6 * i)] for i in (*range(5), 1, 2)]
COMMON: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "logprobs": 3}
PAIRS = [[i, j] for i in range(16) for j in range(16)]
SAMPLING = [
    SamplingParams(temperature=0.0, repetition_penalty=1.7, **COMMON),
    SamplingParams(temperature=1.0, seed=3, frequency_penalty=1.5, presence_penalty=-0.5, **COMMON),
    SamplingParams(temperature=0.8, top_k=20, seed=4, repetition_penalty=0.8, presence_penalty=2.0, **COMMON),
    SamplingParams(
        temperature=0.0,
        logit_bias={5: 3.0, 17: -100.0, 95: 1.5},
        allowed_token_ids=[*range(40), 95],
        frequency_penalty=2.0,
        min_tokens=4,
        stop_token_ids=[5],
        **COMMON,
    ),
    SamplingParams(temperature=0.7, seed=6, **COMMON),
    SamplingParams(temperature=0.0, bad_word_ids=[[17], *([i, i] for i in range(VOCAB))], **COMMON),
    SamplingParams(temperature=1.0, seed=8, bad_word_ids=PAIRS, **COMMON),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=VOCAB)


def outputs(llm: LLM) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0] for output in llm.generate(prompts, SAMPLING)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[CompletionOutput]:
    with small_engine(model, dtype="float32") as llm:
        return outputs(llm)


def test_the_reference_shows_each_change(model: Path, expected: list[CompletionOutput]) -> None:
    """Without it a wrong engine could agree with itself on what nothing has changed."""
    kept = ("temperature", "top_k", "seed")
    plain = [SamplingParams(**{name: getattr(p, name) for name in kept}, **COMMON) for p in SAMPLING]
    with small_engine(model, dtype="float32") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        unchanged = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
    assert [found.token_ids != plain for found, plain in zip(expected, unchanged, strict=True)] == [
        True, True, True, True, False, True, True
    ]  # fmt: skip
    assert len(set(expected[0].token_ids)) > len(set(unchanged[0])), "what was said is not said again"
    assert set(expected[3].token_ids) <= {*range(40), 95} - {17}
    assert not any(one == next_one for one, next_one in itertools.pairwise(expected[5].token_ids))
    assert 17 not in expected[5].token_ids
    assert not any(max(pair) < 16 for pair in itertools.pairwise(expected[6].token_ids))
    assert min(expected[6].token_ids) < 16, "one alone may come"


@pytest.mark.parametrize("case", sampled(CASES, 3), ids=str)
def test_d6_g8_tokens_and_logprobs_are_those_of_one_stage(
    model: Path, expected: list[CompletionOutput], case: Case
) -> None:
    pp, tp, depth, chunk, kernels, num_blocks = case
    with small_engine(
        model,
        dtype="float32",
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        async_depth=depth,
        prefill_chunk=chunk,
        kernels=kernels,
        num_blocks=num_blocks,
    ) as llm:
        found = outputs(llm)
        stats = llm.stats()
        assert stats is not None
        assert (stats.scheduler.num_preemptions > 0) == (num_blocks == 12)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        for entry, wanted in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert entry.keys() == wanted.keys()
            for token_id, logprob in entry.items():
                assert logprob.logprob == pytest.approx(wanted[token_id].logprob, abs=1e-5)


@torch.no_grad()
def test_g8_repetition_penalty_is_that_of_transformers(tmp_path: Path) -> None:
    MODELS[7].make(tmp_path)
    judge, ids, penalty = reference(tmp_path), list(PROMPT), RepetitionPenaltyLogitsProcessor(1.4)
    for _ in range(NUM_TOKENS):
        context = torch.tensor([ids])
        top = penalty(context, judge(context).logits[:, -1]).topk(2)
        assert top.values[0, 0] - top.values[0, 1] > MIN_MARGIN
        ids.append(int(top.indices[0, 0]))
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=NUM_TOKENS, ignore_eos=True)
    with small_engine(tmp_path, dtype="float32", pipeline_parallel_size=2, async_depth=1) as llm:
        found = llm.generate({"prompt_token_ids": PROMPT}, sampling)[0].outputs[0].token_ids
    assert found == ids[len(PROMPT) :]

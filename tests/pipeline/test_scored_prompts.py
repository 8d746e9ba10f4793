"""Scores of prompts through the whole engine: `transformers` judges, one stage is the reference (row G8)."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from depth import soaked
from families import FAMILIES
from hf_reference import MODELS, RandomModel, reference_logits
from penstock import LLM, SamplingParams
from penstock.engine.client.outputs import RequestOutput
from penstock.engine.client.siblings import with_siblings
from penstock.request import RequestUpdate
from small_engines import small_engine

DEMO = Path(__file__).resolve().parents[2] / "src" / "penstock" / "assets" / "demo"
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=3)
Scores = list[dict[int, float] | None]

chance = random.Random(5)
PROMPTS = [[chance.randrange(96) for _ in range(length)] for length in (1, 2, 23, 41)]


def scores_of(output: RequestOutput) -> Scores:
    assert output.prompt_logprobs is not None
    return [
        None if entry is None else {token_id: found.logprob for token_id, found in entry.items()}
        for entry in output.prompt_logprobs
    ]


def score(
    model: Path,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams] = SCORED,
    **settings: Any,
) -> list[Scores]:
    with small_engine(model, **({"dtype": "float32"} | settings)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [scores_of(output) for output in outputs]


def assert_near(found: list[Scores], expected: list[Scores], most: float) -> None:
    for own, other in zip(found, expected, strict=True):
        assert len(own) == len(other)
        for at, there in zip(own, other, strict=True):
            assert (at is None) == (there is None)
            for token_id in set(at or {}) & set(there or {}):
                assert at is not None
                assert there is not None
                assert math.isclose(at[token_id], there[token_id], rel_tol=0, abs_tol=most)


def assert_as_transformers(model: Path, prompts: list[list[int]], found: list[Scores]) -> None:
    for prompt, scores in zip(prompts, found, strict=True):
        expected = reference_logits(model, prompt).log_softmax(-1)
        assert (scores[0], len(scores)) == (None, len(prompt))
        for place, entry in enumerate(scores[1:], 1):
            assert entry is not None
            row = expected[place - 1]
            assert next(iter(entry)) == prompt[place], "the prompt's own comes first"
            likeliest = sorted(row.topk(3).values.tolist())
            assert sorted(entry.values())[-3:] == pytest.approx(likeliest, abs=1e-4)
            for token_id, value in entry.items():
                assert value == pytest.approx(row[token_id].item(), abs=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("model", [MODELS[1], MODELS[9]], ids=str)
def test_g8_scores_equal_transformers(model: RandomModel, kernels: str, tmp_path: Path) -> None:
    model.make(tmp_path)
    settings = {"pipeline_parallel_size": 3, "async_depth": 1, "prefill_chunk": 7, "kernels": kernels}
    assert_as_transformers(tmp_path, PROMPTS, score(tmp_path, PROMPTS, **settings))


@pytest.mark.parametrize("name", ["gemma2", "granite", "qwen3", "olmo2"])
def test_g8_scores_of_other_families_equal_transformers(name: str, tmp_path: Path) -> None:
    FAMILIES[name].make(tmp_path)
    prompts = PROMPTS[2:3]
    assert_as_transformers(tmp_path, prompts, score(tmp_path, prompts, pipeline_parallel_size=2))


def test_g8_scores_by_transformers_own_layers_equal_transformers(tmp_path: Path) -> None:
    MODELS[1].make(tmp_path)
    settings = {"pipeline_parallel_size": 2, "model_impl": "transformers", "prefill_chunk": 7}
    assert_as_transformers(tmp_path, PROMPTS, score(tmp_path, PROMPTS, **settings))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_g8_scores_of_quantised_weights_are_the_same_bits_for_stages_and_chunks(
    quantization: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    make_checkpoint(tmp_path, layers=3, vocab_size=150, seed=3, **sizes)
    expected = score(tmp_path, PROMPTS, quantization=quantization)
    layout = {"pipeline_parallel_size": 3, "prefill_chunk": 5, "async_depth": 1}
    assert score(tmp_path, PROMPTS, quantization=quantization, **layout) == expected


def test_g8_scores_of_the_demo_model_equal_transformers() -> None:
    with LLM("demo", dtype="float32", distributed_executor_backend="inprocess", num_blocks=64) as llm:
        text = "ROMEO:\nBut soft, what light through yonder window breaks? é世"
        (output,) = llm.generate([text], SCORED)
    assert_as_transformers(DEMO, [output.prompt_token_ids], [scores_of(output)])
    assert output.outputs[0].token_ids == []
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")


@pytest.mark.parametrize(
    "layout",
    [
        {"prefill_chunk": 3},
        {"pipeline_parallel_size": 3, "async_depth": 1, "prefill_chunk": 7},
        {"pipeline_parallel_size": 2, "enable_prefix_caching": False},
    ],
    ids=["pp 1", "pp 3", "pp 2 without a cache"],
)
def test_g8_every_choice_has_the_scores_of_the_prompt(layout: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, layers=3, seed=3)
    params = SamplingParams(n=3, max_tokens=3, seed=4, ignore_eos=True, prompt_logprobs=2)
    with small_engine(tmp_path, dtype="float32", **layout) as llm:
        asked = with_siblings("r", PROMPTS[3], params)
        found: dict[str, list[RequestUpdate]] = {one.request_id: [] for one in asked.alone()}
        llm._client.add(asked)
        while any(not updates or updates[-1].finish_reason is None for updates in found.values()):
            for update in llm._client.poll(1.0):
                found[update.request_id].append(update)
        (alone,) = llm.generate([{"prompt_token_ids": PROMPTS[3]}], SCORED)
    scores = [[score for update in own for score in update.prompt_logprobs] for own in found.values()]
    assert scores[0] == scores[1] == scores[2]
    assert [score.logprob for score in scores[0]] == [
        entry[token_id].logprob
        for token_id, entry in zip(PROMPTS[3][1:], (alone.prompt_logprobs or [])[1:], strict=True)
        if entry is not None
    ]
    assert [sum(len(update.token_ids) for update in own) for own in found.values()] == [3, 3, 3]


LAYOUTS: list[dict[str, Any]] = [
    {"prefill_chunk": 3},
    {"prefill_chunk": 41, "threads_per_rank": 2},
    {"pipeline_parallel_size": 2, "prefill_chunk": 7},
    {"pipeline_parallel_size": 4, "async_depth": 2, "prefill_chunk": 5, "max_num_batched_tokens": 12},
    {"pipeline_parallel_size": 3, "num_blocks": 8},  # some must give way
]


@pytest.mark.parametrize("dtype", ["bfloat16", *soaked("float32")])
def test_g8_scores_are_the_same_bits_for_stages_chunks_depths_and_company(dtype: str, tmp_path: Path) -> None:
    MODELS[4].make(tmp_path)
    params = [SamplingParams(max_tokens=count, prompt_logprobs=3, temperature=0) for count in (4, 0, 3, 0)]
    expected = [score(tmp_path, [prompt], dtype=dtype)[0] for prompt in PROMPTS]
    for layout in LAYOUTS:
        assert score(tmp_path, PROMPTS, params, dtype=dtype, **layout) == expected, layout


@pytest.mark.parametrize("kernels", ["auto", "-head", "off"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "prefill_chunk": 6},
        {"tensor_parallel_size": "1,2", "pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 3, "prefill_chunk": 9, "async_depth": 1},
    ],
    ids=str,
)
def test_g8_scores_are_near_where_sums_have_another_order(
    layout: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    MODELS[4].make(tmp_path)
    expected = score(tmp_path, PROMPTS, kernels=kernels)
    most = 2e-5 if kernels == "off" else 1e-5  # torch's products differ with their shapes; logits reach 14
    assert_near(score(tmp_path, PROMPTS, kernels=kernels, **layout), expected, most)


def test_g8_a_token_has_the_same_score_in_a_prompt_as_when_it_was_generated(tmp_path: Path) -> None:
    MODELS[1].make(tmp_path)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
    with small_engine(tmp_path, dtype="float32", pipeline_parallel_size=2) as llm:
        (first,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], params)
        generated = first.outputs[0]
        whole = PROMPTS[2] + generated.token_ids
        (second,) = llm.generate(
            [{"prompt_token_ids": whole}], SamplingParams(max_tokens=0, prompt_logprobs=2)
        )
    assert second.prompt_logprobs is not None
    assert generated.logprobs == second.prompt_logprobs[len(PROMPTS[2]) :]
    assert second.num_cached_tokens == 0


def test_g8_scoring_changes_no_token_of_anybody(tmp_path: Path) -> None:
    MODELS[1].make(tmp_path)
    plain = SamplingParams(temperature=1.0, seed=9, max_tokens=10, ignore_eos=True)
    scoring = SamplingParams(temperature=1.0, seed=9, max_tokens=10, ignore_eos=True, prompt_logprobs=0)
    settings = {"dtype": "float32", "pipeline_parallel_size": 2, "prefill_chunk": 5}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[1:]]
    with small_engine(tmp_path, **settings) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
    with small_engine(tmp_path, **settings) as llm:
        found = llm.generate(prompts, [plain, scoring, scoring])
    assert [output.outputs[0].token_ids for output in found] == expected
    assert [output.prompt_logprobs is None for output in found] == [True, False, False]


def test_a_prompt_that_fills_the_context_is_scored_and_may_not_want_a_token(tmp_path: Path) -> None:
    MODELS[1].make(tmp_path)
    with small_engine(tmp_path, dtype="float32", max_model_len=23) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], SCORED)
        with pytest.raises(Exception, match="23 tokens"):
            llm.generate([{"prompt_token_ids": PROMPTS[2]}], SamplingParams(max_tokens=1))
    assert_as_transformers(tmp_path, [PROMPTS[2]], [scores_of(output)])
    assert torch.isfinite(torch.tensor(sum(list(scores_of(output)[-1].values()))))  # type: ignore[union-attr]

"""Several sequences of one prompt through whole engines: each is what it would be alone, and the prompt is
computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from penstock import SamplingParams
from penstock.engine.client.siblings import sibling_seed
from penstock.errors import InvalidRequestError
from small_engines import LAYOUTS, findable, small_engine

PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((5, 41, 64))]
PARAMS = SamplingParams(
    n=4, temperature=1.0, seed=8, max_tokens=9, ignore_eos=True, logprobs=1, presence_penalty=0.5
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=96)


def alone(model: Path) -> list[list[list[int]]]:
    """Each sequence as a request of its own, in an engine that keeps nothing."""
    with small_engine(model, dtype="float32", enable_prefix_caching=False) as llm:
        return [
            [
                llm.generate({"prompt_token_ids": prompt}, _of_choice(index))[0].outputs[0].token_ids
                for index in range(PARAMS.n)
            ]
            for prompt in PROMPTS
        ]


def _of_choice(index: int) -> SamplingParams:
    values = {name: getattr(PARAMS, name) for name in PARAMS.__struct_fields__}
    return SamplingParams(**values | {"n": 1, "seed": sibling_seed(PARAMS.seed, index)})


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    return alone(model)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_g8_each_choice_is_what_it_would_be_alone(
    model: Path, expected: list[list[list[int]]], layout: str, cached: bool
) -> None:
    settings: dict[str, Any] = LAYOUTS[layout] | {"enable_prefix_caching": cached, "prefill_chunk": 20}
    with small_engine(model, dtype="float32", **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
        stats = llm.stats()
    found = [[one.token_ids for one in output.outputs] for output in outputs]
    assert found == expected
    assert [one.index for one in outputs[1].outputs] == [0, 1, 2, 3]
    assert all(len(one.logprobs or []) == 9 for output in outputs for one in output.outputs)
    assert stats is not None
    # Prompts are unlike from the first token on, so that followers alone find anything.
    shared = sum(findable(prompt) for prompt in PROMPTS) * (PARAMS.n - 1)
    assert stats.cache.prefix_hit_tokens == (shared if cached else 0)
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS), "nobody had them before"


def test_too_few_blocks_for_all_change_no_token(model: Path) -> None:
    long = SamplingParams(n=4, temperature=1.0, seed=8, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found, preempted = [], []
    for num_blocks in (200, 14):
        with small_engine(model, dtype="float32", num_blocks=num_blocks, pipeline_parallel_size=2) as llm:
            outputs = llm.generate(prompts, long)
            found.append([[one.token_ids for one in output.outputs] for output in outputs])
            preempted.append(
                (llm.stats() or pytest.fail("no word from the core")).scheduler.num_preemptions > 0
            )
    assert found[0] == found[1]
    assert preempted == [False, True]


def test_params_of_each_prompt_and_text(model: Path) -> None:
    with small_engine(model, dtype="float32") as llm:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=3, ignore_eos=True) for n in (2, 1, 3)]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        assert [len(output.outputs) for output in outputs] == [2, 1, 3]
        assert outputs[2].outputs[0].token_ids == outputs[2].outputs[2].token_ids, "the likeliest alike"
        with pytest.raises(InvalidRequestError, match="n must be between 1 and 128, got 129"):
            llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(n=129))

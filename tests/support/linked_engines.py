"""A small engine and what is asked of it, to compare its tokens however its ranks are joined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)]} for i in range(4)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True),
]


def make_llm(model: Path, backend: str = "mp", **settings: Any) -> LLM:
    return LLM(
        str(model),
        dtype="float32",
        threads_per_rank=1,
        distributed_executor_backend=backend,  # type: ignore[arg-type]
        **settings,
    )


def greedy_ids(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The likeliest ids after prompts of ids, so many for each."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def tokens(llm: LLM) -> list[list[int]]:
    """The ids of all answers, greedy and drawn."""
    return [
        output.outputs[0].token_ids for sampling in SAMPLINGS for output in llm.generate(PROMPTS, sampling)
    ]

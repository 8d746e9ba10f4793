"""Whatever joins the ranks, rings or streams as between hosts, the bits are those of ranks in one memory.

The golden grid and the seeded families once more, with the carrier as an axis: links, samples, plans and
results cross it, and ranks of a stage meet in shared memory as they do inside a host. Tokens and
log-probabilities are compared; the latter are floats of the logits, and equal there means equal everywhere
before. Cases are a seeded draw with every pair of values; each value is in at least `LEAST` of them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from depth import soaked
from families import FAMILIES
from linked_ranks import over
from pairwise import Case, drawn
from paths import shared_data
from penstock import LLM, SamplingParams

LEAST = 20
GOLDEN_AXES = {
    "carrier": ("ring", "tcp", "tls"),
    "num_stages": (2, 3),
    "tp": (1, 2),
    "chunk": (1, 7, 64),
    "async_depth": (0, 1, 2),
    "num_known": (0, 63, 200),
    "num_others": (0, 16),
}
FAMILY_AXES = {
    "family": tuple(FAMILIES),
    "carrier": ("tcp", "tls"),
    "num_stages": (2, 3),
    "tp": (1, 2),
    "dtype": ("float32", "bfloat16"),
    "async_depth": (0, 1),
}
# Of a moment each, for `./run test`.
QUICK = [("tcp", 2, 2, 64, 1, 200, 0), ("tls", 3, 1, 64, 2, 200, 0), ("ring", 2, 1, 64, 0, 200, 0)]
QUICK_FAMILIES = [("gemma2", "tcp", 3, 2, "bfloat16", 1), ("qwen3", "tls", 2, 1, "float32", 0)]
BOS = 1
Answers = list[tuple[list[int], Any]]


def answers(
    model: Path, carrier: str, prompts: list[list[int]], num_tokens: list[int], **layout: Any
) -> Answers:
    """Tokens and log-probabilities of each prompt's greedy continuation."""
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=3) for count in num_tokens
    ]
    with LLM(
        str(model), num_blocks=256, distributed_executor_backend=over(carrier), threads_per_rank=1, **layout
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@functools.cache
def golden_answers(
    carrier: str, num_stages: int, tp: int, chunk: int, async_depth: int, num_known: int, num_others: int
) -> Answers:
    model = shared_data("models", "stories260K")
    golden = json.loads((model / "golden.json").read_text())["greedy_ids"]
    others = range(num_others)  # unlike lengths, so that prefills and decodes mix in one plan
    return answers(
        model,
        carrier,
        [[BOS, *golden[:num_known]], *([BOS, *golden[other : 5 * other + 3]] for other in others)],
        [len(golden) - num_known, *(3 + 7 * other for other in others)],
        dtype="float32",
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=tp,
        async_depth=async_depth,
        prefill_chunk=chunk,
    )


def quick_and_soaked(quick: list[Case], axes: dict[str, tuple[Any, ...]]) -> list[Any]:
    """The quick cases, and for the soak a draw of the others."""
    return [*quick, *soaked(*(case for case in drawn(axes, LEAST) if case not in quick))]


@pytest.mark.parametrize("case", quick_and_soaked(QUICK, GOLDEN_AXES), ids=str)
def test_g1_a10_d13_golden_ids_over_every_carrier_bit_for_bit(case: Case) -> None:
    carrier, *layout = case
    found = golden_answers(carrier, *layout)
    assert found == golden_answers("memory", *layout)
    golden = json.loads((shared_data("models", "stories260K") / "golden.json").read_text())["greedy_ids"]
    num_known = layout[4]
    assert found[0][0] == golden[num_known:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the checkpoint of a family, once."""
    directory = tmp_path_factory.mktemp("families")

    @functools.cache
    def make(family: str) -> Path:
        return FAMILIES[family].make(directory / family.replace(" ", "-"))

    return make


@pytest.fixture(scope="module")
def in_one_memory(checkpoints: Any) -> Any:
    """Answers by ranks in one memory, asked once for all carriers and depths: a depth changes no bit."""

    @functools.cache
    def ask(family: str, num_stages: int, tp: int, dtype: str) -> Answers:
        return family_answers(checkpoints(family), "memory", num_stages, tp, dtype, async_depth=1)

    return ask


PROMPTS = [[(7 * i + 3 * j) % 150 for j in range(5 + 14 * i)] for i in range(3)]


def family_answers(
    model: Path, carrier: str, num_stages: int, tp: int, dtype: str, async_depth: int
) -> Answers:
    return answers(
        model,
        carrier,
        PROMPTS,
        [12] * len(PROMPTS),
        dtype=dtype,
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=tp,
        async_depth=async_depth,
        prefill_chunk=8,
    )


@pytest.mark.parametrize("case", quick_and_soaked(QUICK_FAMILIES, FAMILY_AXES), ids=str)
def test_g1_a10_d13_families_over_streams_bit_for_bit(
    case: Case, checkpoints: Any, in_one_memory: Any
) -> None:
    family, carrier, num_stages, tp, dtype, async_depth = case
    found = family_answers(checkpoints(family), carrier, num_stages, tp, dtype, async_depth)
    assert found == in_one_memory(family, num_stages, tp, dtype)

"""Every family gives with hits in the pool, and in a store that another layout wrote, what it gives cold.

Not bits, but tokens in float32 are compared, as some families have no kernels of ours: greedy ones, and of
one request those that are sampled with a seed. Where activations are rounded to 8 bits, the order of a sum
over ranks may move one to the next number: with ranks a model that is quantised is compared with itself in
the same layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import deepseek_models
from depth import sampled
from families import FAMILIES
from foreign_families import FOREIGN
from penstock import SamplingParams
from small_engines import BLOCK, CHUNK, GREEDY, GRID, LAYOUTS, findable, run, small_engine, wait_until_stored

SHARED = [(11 * index + index // 7) % 90 for index in range(64)]
# Ends on a block, behind it, on a chunk, behind it; branches inside of a block; all longer than any window.
PROMPTS = [
    SHARED[: 2 * BLOCK],
    SHARED[: 2 * BLOCK + 1],
    SHARED[:CHUNK],
    SHARED[: 2 * CHUNK + 1],
    [*SHARED[: 3 * BLOCK + 3], *[6] * 9],
    SHARED[: 5 * BLOCK + 2],
]
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=6, ignore_eos=True)
PARAMS = [*[GREEDY] * (len(PROMPTS) - 1), SEEDED]
NUM_FOUND = sum(map(findable, PROMPTS))
ENGINES = LAYOUTS | GRID


@dataclass(frozen=True)
class Case:
    """A model, the settings of its engines, and layouts that give the same tokens."""

    make: Callable[[Path], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    layouts: Sequence[str] = tuple(LAYOUTS)


SIZES: dict[str, Any] = {"layers": 3, "vocab_size": 150}
WHOLE_GROUPS = SIZES | {"hidden_size": 256, "intermediate_size": 256}  # of quantised weights, on two ranks
STAGES = tuple(name for name in LAYOUTS if "tp" not in name)
make = checkpoints.make_checkpoint
CASES: dict[str, Case] = {
    **{name: Case(family.make) for name, family in FAMILIES.items()},
    **{f"deepseek {name}": Case(model.make) for name, model in deepseek_models.MODELS.items()},
    "mixtral": Case(partial(make, family="mixtral", num_local_experts=5, seed=3, **SIZES)),
    "qwen2_moe": Case(partial(make, family="qwen2_moe", mlp_only_layers=[1], seed=3, **SIZES)),
    **{f"transformers {name}": Case(family.make, layouts=STAGES) for name, family in FOREIGN.items()},
    "transformers gemma3": Case(FAMILIES["gemma3"].make, {"model_impl": "transformers"}, STAGES),
    **{
        f"{bits}, {where}": Case(partial(make, **WHOLE_GROUPS), {"quantization": bits}, layouts)
        for bits in ("int8", "int4")
        for where, layouts in (("stages", STAGES), ("ranks", ["pp 2, tp 2,1"]))
    },
    **{
        f"{layout} {bits}": Case(
            partial(checkpoints.make_quantized_checkpoint, layout=layout, bits=bits, **WHOLE_GROUPS),
            layouts=STAGES,
        )
        for layout, bits in (("gptq", 4), ("gptq", 8), ("awq", 4), ("packed", 4), ("int8", 8))
    },
    "qwen3_moe": Case(partial(make, family="qwen3_moe", head_dim=16, mlp_only_layers=[1], seed=5, **SIZES)),
}
# Differ from others in what a cache does not see: how weights lie in files, how they are routed and rotated.
SOAK_ONLY = {
    *("gptq 8", "awq 4", "packed 4", "deepseek v2", "deepseek v3 yarn", "deepseek v3 halves", "qwen3_moe"),
    *("deepseek glm", "gemma", "glm", "glm4", "ernie4_5", "seed_oss", "smollm3", "exaone4", "ministral3"),
    *(f"transformers {name}" for name in ("gpt_neox", "phi", "cohere", "stablelm", "ctrl")),
}


def finds_what_it_computes(case: Case, model: Path, store: Path, writer: str, readers: list[str]) -> None:
    common = {"dtype": "float32", "prefill_chunk": CHUNK} | case.settings
    with small_engine(model, enable_prefix_caching=False, **common, **ENGINES[case.layouts[0]]) as llm:
        cold = [run(llm, [prompt], [each])[0][0] for prompt, each in zip(PROMPTS, PARAMS, strict=True)]
    with small_engine(model, store, **common, **ENGINES[writer]) as llm:
        assert run(llm, PROMPTS, PARAMS)[0] == cold, f"{writer}, side by side"
        assert run(llm, PROMPTS, PARAMS) == (cold, NUM_FOUND), f"{writer}, found in the pool"
        wait_until_stored(llm, PROMPTS, cold)
    for reader in readers:
        with small_engine(model, store, **common, **ENGINES[reader]) as llm:
            assert run(llm, PROMPTS, PARAMS) == (cold, NUM_FOUND), f"{reader}, stored by {writer}"
            stats = llm.stats()
            assert stats is not None
            assert stats.store.loaded_blocks >= NUM_FOUND // BLOCK // len(PROMPTS)
            assert not stats.store.failed_blocks


def turn(number: int, case: Case) -> tuple[str, str]:
    """A pair of layouts, another one for each case, so that all occur."""
    pairs = list(itertools.permutations(case.layouts, 2)) or [(case.layouts[0],) * 2]
    return pairs[7 * number % len(pairs)]


@pytest.mark.parametrize("name", sampled([name for name in CASES if name not in SOAK_ONLY], 6))
def test_h1_d15_every_family_gives_with_hits_in_pool_and_store_the_tokens_of_a_cold_run(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    case.make(tmp_path / "model")
    writer, reader = turn(list(CASES).index(name), case)
    finds_what_it_computes(case, tmp_path / "model", tmp_path / "store", writer, [reader])


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_h1_d15_every_family_finds_in_every_layout_what_every_other_stored(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.make(tmp_path / "model")
    for number, writer in enumerate(case.layouts):
        store = tmp_path / f"store {number}"
        finds_what_it_computes(case, tmp_path / "model", store, writer, case.layouts)


# One that holds keys and values, one with experts beside them, and one with latent vectors.
OF_THE_GRID = {name: CASES[name] for name in ("small tied llama", "mixtral", "deepseek v3")}


def test_h1_h18_what_four_ranks_of_a_stage_store_another_layout_of_the_grid_finds(tmp_path: Path) -> None:
    """Each of two KV heads is held by two of the four."""
    case = OF_THE_GRID["small tied llama"]
    case.make(tmp_path / "model")
    finds_what_it_computes(case, tmp_path / "model", tmp_path / "store", "pp 1, tp 4", ["pp 3, tp 2"])


@pytest.mark.soak
@pytest.mark.parametrize("writer", GRID)
@pytest.mark.parametrize("name", OF_THE_GRID)
def test_h1_every_layout_of_the_grid_finds_what_every_other_stored(
    name: str, writer: str, tmp_path: Path
) -> None:
    case = OF_THE_GRID[name]
    case.make(tmp_path / "model")
    finds_what_it_computes(case, tmp_path / "model", tmp_path / "store", writer, list(GRID))

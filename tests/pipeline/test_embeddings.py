"""Vectors through the whole engine: `transformers` judges, for any layout, chunks and depth (row G3)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from families import FAMILIES
from pairwise import pairwise
from penstock import LLM, PoolingParams, SamplingParams
from penstock.config.engine import Pooling
from penstock.llm.engine_client import OfflineRequest
from penstock.llm.progress import ProgressDisplay
from penstock.llm.prompt_preparer import PreparedPrompt

PROMPTS = [[(7 * i + 3 * j) % 140 for j in range(length)] for i, length in enumerate((1, 6, 23, 40))]
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")
TOLERANCE = 1e-5
AXES = {
    "family": ("qwen3", "gemma2"),
    "num_stages": (1, 2, 3),
    "tp": (1, 2),
    "chunk": (3, 16, 512),
    "async_depth": (0, 1),
}
SUBSET = pairwise(AXES)
REST = [case for case in product(*AXES.values()) if case not in set(SUBSET)]

Expected = Mapping[Pooling, list[NDArray[np.float32]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Expected]]:
    """Each family's checkpoint, and the vectors of the prompts."""
    made = {}
    for name in AXES["family"]:
        directory = FAMILIES[name].make(tmp_path_factory.mktemp("model"))
        made[name] = directory, reference(directory)
    return made


@torch.no_grad()
def reference(directory: Path) -> Expected:
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    states = [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]
    return {
        "last": [rows[-1] for rows in states],
        "mean": [rows.mean(0) for rows in states],
        "cls": [rows[0] for rows in states],
    }


def engine(model: Path, **settings: Any) -> LLM:
    common = {
        "dtype": "float32",
        "distributed_executor_backend": "inprocess",
        "threads_per_rank": 1,
        "num_blocks": 64,
    }
    return LLM(str(model), **common | settings)


def vectors(llm: LLM, pooling: Pooling) -> list[NDArray[np.float32]]:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [output.outputs.data for output in llm.encode(prompts, pooling=pooling)]


def check(llm: LLM, expected: Expected) -> None:
    for pooling in POOLINGS:
        for found, wanted in zip(vectors(llm, pooling), expected[pooling], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def check_layout(made: tuple[Path, Expected], num_stages: int, tp: int, chunk: int, async_depth: int) -> None:
    with engine(
        made[0],
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=tp,
        prefill_chunk=chunk,
        async_depth=async_depth,
    ) as llm:
        check(llm, made[1])


@pytest.mark.parametrize(AXES, SUBSET)
def test_g3_vectors_are_transformers_pairwise(
    models: dict[str, tuple[Path, Expected]],
    family: str,
    num_stages: int,
    tp: int,
    chunk: int,
    async_depth: int,
) -> None:
    check_layout(models[family], num_stages, tp, chunk, async_depth)


@pytest.mark.soak
@pytest.mark.parametrize(AXES, REST)
def test_g3_vectors_are_transformers_whole_grid(
    models: dict[str, tuple[Path, Expected]],
    family: str,
    num_stages: int,
    tp: int,
    chunk: int,
    async_depth: int,
) -> None:
    check_layout(models[family], num_stages, tp, chunk, async_depth)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernels": "off", "pipeline_parallel_size": 2},
        {"kernels": "-attention", "pipeline_parallel_size": 2},
        {"model_impl": "transformers", "pipeline_parallel_size": 2, "prefill_chunk": 5},
        {"tensor_parallel_size": "1,2", "pipeline_parallel_size": 2, "prefill_chunk": 5},
    ],
    ids=str,
)
def test_g3_whatever_computes(models: dict[str, tuple[Path, Expected]], settings: dict[str, Any]) -> None:
    directory, expected = models["qwen3"]
    with engine(directory, **settings) as llm:
        check(llm, expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a10_s3_stages_chunks_and_depth_change_no_bit(
    models: dict[str, tuple[Path, Expected]], pooling: Pooling
) -> None:
    found = []
    for settings in (
        {},
        {"prefill_chunk": 3},
        {"pipeline_parallel_size": 2, "prefill_chunk": 7, "async_depth": 1},
        {"pipeline_parallel_size": 3, "prefill_chunk": 512, "max_num_seqs": 2},
    ):
        with engine(models["gemma2"][0], **settings) as llm:
            found.append([vector.tobytes() for vector in vectors(llm, pooling)])
    assert all(one == found[0] for one in found)


def mixed(llm: LLM, *, with_vectors: bool) -> tuple[list[list[int]], list[bytes]]:
    """Tokens of some requests, and vectors that were made beside them."""
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
    prompts = [PreparedPrompt(text=None, token_ids=ids) for ids in PROMPTS]
    tokens = [llm._requests.for_text(prompt, sampling) for prompt in prompts]
    pooled = [llm._requests.for_vector(prompt, PoolingParams(pooling="mean")) for prompt in prompts]
    requests: list[OfflineRequest] = tokens
    if with_vectors:
        requests = [one for pair in zip(tokens, pooled, strict=True) for one in pair]
    results = [result.whole for result in llm._client.run(requests, ProgressDisplay())]
    if not with_vectors:
        return [result.token_ids for result in results], []
    return [result.token_ids for result in results[::2]], [result.vector for result in results[1::2]]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tokens_and_vectors_do_not_change_each_other(
    models: dict[str, tuple[Path, Expected]], num_stages: int
) -> None:
    settings = {"pipeline_parallel_size": num_stages, "prefill_chunk": 5, "enable_prefix_caching": False}
    with engine(models["qwen3"][0], **settings) as llm:
        alone, _ = mixed(llm, with_vectors=False)
        beside, found = mixed(llm, with_vectors=True)
        assert beside == alone
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], PoolingParams(pooling="mean"))
        assert [np.array(one.outputs.embedding, np.float32).tobytes() for one in outputs] == found


@pytest.mark.parametrize("num_stages", [1, 2])
def test_d10_vectors_are_whole_after_preemption(
    models: dict[str, tuple[Path, Expected]], num_stages: int
) -> None:
    """The youngest's 20 chunks take longer than the others take to want its blocks."""
    directory, expected = models["gemma2"]
    small = {"num_blocks": 33, "block_size": 2, "prefill_chunk": 2, "max_num_batched_tokens": 16}
    with engine(directory, pipeline_parallel_size=num_stages, max_num_seqs=8, **small) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        old = [
            llm._requests.for_text(PreparedPrompt(text=None, token_ids=PROMPTS[1]), greedy) for _ in range(3)
        ]
        raw = PoolingParams(pooling="mean", normalize=False)
        young = llm._requests.for_vector(PreparedPrompt(text=None, token_ids=PROMPTS[3]), raw)
        *_, last = llm._client.run([*old, young], ProgressDisplay())
        stats = llm.stats()
        assert stats is not None
        assert stats.scheduler.num_preemptions > 0
        found = np.frombuffer(last.whole.vector, dtype=np.float32)
        np.testing.assert_allclose(found, expected["mean"][3], rtol=0, atol=TOLERANCE)


def test_vectors_have_length_one_and_only_models_trained_for_it_are_cut(
    models: dict[str, tuple[Path, Expected]], tmp_path: Path
) -> None:
    directory, expected = models["qwen3"]
    with engine(directory, pooling="cls") as llm:
        (output,) = llm.embed({"prompt_token_ids": PROMPTS[2]})
        wanted = expected["cls"][2] / np.linalg.norm(expected["cls"][2])
        np.testing.assert_allclose(output.outputs.embedding, wanted, rtol=0, atol=TOLERANCE)
        assert output.outputs.hidden_size == 32
        with pytest.raises(ValueError, match=r"prompts\[0\]: dimensions is 8; this model gives 32 numbers"):
            llm.embed({"prompt_token_ids": PROMPTS[2]}, PoolingParams(dimensions=8))
    FAMILIES["qwen3"].make(tmp_path, matryoshka_dimensions=[8, 16])
    with engine(tmp_path, pooling="cls") as llm:
        (output,) = llm.embed({"prompt_token_ids": PROMPTS[2]}, PoolingParams(dimensions=8))
        wanted = expected["cls"][2][:8] / np.linalg.norm(expected["cls"][2][:8])
        np.testing.assert_allclose(output.outputs.embedding, wanted, rtol=0, atol=TOLERANCE)
        with pytest.raises(ValueError, match=r"dimensions is 9; it may be one of 8, 16, 32"):
            llm.embed({"prompt_token_ids": PROMPTS[2]}, PoolingParams(dimensions=9))

"""The MTP layer of a checkpoint guesses: what it says, that it changes no token, and that it does no harm.

The reference of guesses is transformers' layer over the whole text at once (`mtp_reference`), whatever
chunks, windows and caches the text came through; that of tokens is an engine without speculation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepseek_models import MODELS, make_with_mtp
from depth import sampled
from drafters import without_costs
from gguf_models import as_gguf
from mtp_reference import MTPReference
from pairwise import Case, drawn
from penstock import LLM, SamplingParams
from penstock.engine.core import core_assembly
from penstock.errors import UsageError
from penstock.models.mtp_layer import MTPLayer
from penstock.scheduler.stats import SpeculationStats
from penstock.speculation.drafter import Draft, Question
from penstock.speculation.mtp import MTPDrafter

PROMPTS = [[1, 5 + 3 * index, 7, 9 + index, *([20, 21] * (3 * index))] for index in range(6)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "top_p": 0.8, "min_tokens": 9},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.0, "frequency_penalty": 0.2, "logit_bias": {40: 1.5, 26: -2.0}},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "stop_token_ids": [41, 64]},
]
AXES = {
    "num_stages": (1, 2, 3),
    "async_depth": (0, 1, 2),
    "chunk": (1, 7, 512),
    "num_drafts": (1, 2, 4, 8),
    "is_right": (False, True),
    "tensor_parallel": (1, 2),
    "block_size": (4, 32),
    "prefix_hits": (False, True),
    "max_num_seqs": (1, 3, 16),
    "dtype": ("float32", "bfloat16"),
}
CASES = drawn(AXES, least=20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether guesses are right as a rule."""
    return {
        is_right: make_with_mtp(tmp_path_factory.mktemp("mtp"), is_right=is_right)
        for is_right in (False, True)
    }


@pytest.fixture(scope="module")
def references(models: dict[bool, Path]) -> dict[bool, MTPReference]:
    return {is_right: MTPReference(model) for is_right, model in models.items()}


@pytest.fixture(scope="module")
def without_the_layer(models: dict[bool, Path]) -> Any:
    """What `generate` finds without speculation, asked once for all cases of a shape."""

    @functools.cache
    def ask(is_right: bool, block_size: int, tensor_parallel: int, dtype: str) -> Any:
        shape = {"block_size": block_size, "tensor_parallel_size": tensor_parallel, "dtype": dtype}
        with engine(models[is_right], **shape) as llm:
            return generate(llm)

    return ask


def engine(model: Path, **given: Any) -> LLM:
    options = {
        "dtype": "float32",
        "num_blocks": 400,
        "threads_per_rank": 1,
        "distributed_executor_backend": "inprocess",
    }
    return LLM(str(model), **(options | given))


def generate(llm: LLM) -> list[tuple[Sequence[int], object]]:
    samplings = [SamplingParams(max_tokens=20 + 3 * index, **given) for index, given in enumerate(SAMPLINGS)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], samplings, use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            [
                {token_id: entry.logprob for token_id, entry in position.items()}
                for position in output.outputs[0].logprobs or ()
            ],
        )
        for output in outputs
    ]


def told(llm: LLM) -> SpeculationStats:
    stats = llm.stats()
    assert stats is not None
    return stats.scheduler.speculation


@pytest.fixture
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are wanted and sent, however wrong they were."""
    propose = MTPDrafter.propose

    def proposing(drafter: MTPDrafter, question: Question) -> Draft:
        draft = propose(drafter, question)
        return dataclasses.replace(draft, chance=max(draft.chance, 0.6))

    monkeypatch.setattr(MTPDrafter, "wants", lambda drafter, question, num_busy: min(question.most, 4))
    monkeypatch.setattr(MTPDrafter, "propose", proposing)
    monkeypatch.setattr(core_assembly, "DraftWindows", without_costs)


class Heard:
    """What the last stage has guessed: request, tokens that it knew, guesses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.guesses: list[tuple[int, int, list[int]]] = []
        self.texts: dict[int, list[int]] = {}
        hear, propose = MTPDrafter.hear, MTPDrafter.propose

        def hearing(drafter: MTPDrafter, request: int, num_known: int, token_ids: Sequence[int]) -> None:
            self.guesses.append((request, num_known, list(token_ids)))
            hear(drafter, request, num_known, token_ids)

        def proposing(drafter: MTPDrafter, question: Question) -> Any:
            self.texts[question.request] = list(question.token_ids)
            return propose(drafter, question)

        monkeypatch.setattr(MTPDrafter, "hear", hearing)
        monkeypatch.setattr(MTPDrafter, "propose", proposing)

    def check(self, reference: MTPReference) -> int:
        """Assert that all are what the layer says of the whole text; return how many there were."""
        count = 0
        for request, num_known, guesses in self.guesses:
            text = self.texts[request]
            if guesses and num_known <= len(text):
                assert guesses == reference.guesses(text[:num_known], len(guesses)), (request, num_known)
                count += len(guesses)
        return count


@pytest.mark.usefixtures("bold")
@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize(("num_stages", "is_right"), [(1, False), (2, True), (3, False)])
def test_guesses_are_those_of_the_layer_over_the_whole_text(
    num_stages: int,
    is_right: bool,
    chunk: int,
    models: dict[bool, Path],
    references: dict[bool, MTPReference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks, windows with wrong guesses, and more requests than rows."""
    heard = Heard(monkeypatch)
    with engine(
        models[is_right],
        pipeline_parallel_size=num_stages,
        prefill_chunk=chunk,
        max_num_seqs=3,
        speculative_method="mtp",
        num_speculative_tokens=4,
        enable_prefix_caching=False,
    ) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
        stats = told(llm)
    assert heard.check(references[is_right]) > 60  # how many more depends on when results come
    assert stats.drafter == "mtp"
    if is_right:
        assert stats.num_accepted > 0.6 * stats.num_drafted > 0


@pytest.mark.usefixtures("bold")
@pytest.mark.parametrize("shape", [{"tensor_parallel_size": 2}, {"prefill_chunk": 8}], ids=str)
def test_guesses_are_the_same_by_several_ranks_and_behind_a_prefix_that_is_found(
    shape: dict[str, Any],
    models: dict[bool, Path],
    references: dict[bool, MTPReference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Heard(monkeypatch)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt + [3, 4] * 8} for prompt in PROMPTS[:3]]
    with engine(
        models[False], block_size=4, speculative_method="mtp", num_speculative_tokens=3, **shape
    ) as llm:
        rounds = [llm.generate(prompts, sampling, use_tqdm=False) for _ in range(2)]
    found = [[output.outputs[0].token_ids for output in outputs] for outputs in rounds]
    assert found[0] == found[1]
    assert all(output.num_cached_tokens for output in rounds[1])
    assert heard.check(references[False]) > 60


@pytest.mark.usefixtures("bold")
def test_requests_that_lose_their_place_go_on_with_the_same_tokens(models: dict[bool, Path]) -> None:
    with engine(models[True], block_size=4) as llm:
        expected = generate(llm)
    with engine(models[True], speculative_method="mtp", num_blocks=34, block_size=4, max_model_len=96) as llm:
        assert generate(llm) == expected
        stats = llm.stats()
    assert stats is not None
    assert stats.scheduler.num_preemptions > 0
    assert stats.scheduler.speculation.num_accepted > 0


@pytest.mark.usefixtures("bold")
def test_blocks_that_come_from_a_store_bring_nothing_for_the_layer(
    models: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same, and what is guessed behind them is guessed from what the layer has read since."""
    kept = {"kv_store": str(tmp_path), "block_size": 4, "kv_store_patience_s": 60.0}
    prompt = {"prompt_token_ids": list(range(1, 41))}
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    texts = []
    for _ in range(2):
        with engine(models[True], speculative_method="mtp", **kept) as llm:
            (output,) = llm.generate([prompt], sampling, use_tqdm=False)
            texts.append(output.outputs[0].token_ids)
            stats = llm.stats()
    assert texts[0] == texts[1]
    assert stats is not None
    assert stats.store.loaded_blocks > 0
    assert stats.scheduler.speculation.num_accepted > 0, "the guess follows from the next token alone"


@pytest.mark.deep
@pytest.mark.usefixtures("bold")
@pytest.mark.parametrize("case", sampled(CASES, 8), ids=str)
def test_d5_d7_the_layer_changes_no_token(
    case: Case, models: dict[bool, Path], without_the_layer: Any
) -> None:
    given = dict(zip(AXES, case, strict=True))
    shape = {name: given[name] for name in ("is_right", "block_size", "tensor_parallel", "dtype")}
    expected = without_the_layer(**shape)
    with engine(
        models[given["is_right"]],
        block_size=given["block_size"],
        tensor_parallel_size=given["tensor_parallel"],
        dtype=given["dtype"],
        pipeline_parallel_size=given["num_stages"],
        async_depth=given["async_depth"],
        prefill_chunk=given["chunk"],
        enable_prefix_caching=given["prefix_hits"],
        max_num_seqs=given["max_num_seqs"],
        speculative_method="mtp",
        num_speculative_tokens=given["num_drafts"],
    ) as llm:
        rounds = [generate(llm) for _ in range(1 + given["prefix_hits"])]
        stats = told(llm)
    assert all(outputs == expected for outputs in rounds)
    assert stats.num_drafted > 0 or given["chunk"] == 1, "nobody drafted: the case shows nothing"
    if given["is_right"]:
        assert stats.num_accepted > 0.05 * stats.num_drafted, "of sampled and penalised texts, too"


def test_it_stops_where_guesses_are_wrong_and_looks_again(
    models: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_assembly, "DraftWindows", without_costs)
    heard = Heard(monkeypatch)
    with engine(models[False], speculative_method="mtp", max_model_len=256) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)
        for prompt in PROMPTS[:3]:
            llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        stats = told(llm)
    assert stats.num_drafted < 100, "of 720 tokens"
    asked = [num_known for _, num_known, guesses in heard.guesses if guesses]
    assert max(asked) < 200


@pytest.mark.usefixtures("bold")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_layer_that_fails_is_switched_off_and_no_request_is_touched(
    num_stages: int,
    models: dict[bool, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine(models[True]) as llm:
        expected = generate(llm)
    guess, num_calls = MTPLayer.guess, 0

    def failing(layer: MTPLayer, *given: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 40:
            raise RuntimeError("no memory for the guess")
        return guess(layer, *given, **named)

    monkeypatch.setattr(MTPLayer, "guess", failing)
    shape = {"pipeline_parallel_size": num_stages, "speculative_method": "mtp"}
    with engine(models[True], **shape) as llm, caplog.at_level(logging.WARNING):
        assert [generate(llm) for _ in range(2)] == [expected, expected]
        assert told(llm).num_accepted > 0, "before it failed"
    lines = [record.message for record in caplog.records if "MTP layer" in record.message]
    why = "RuntimeError: no memory for the guess"
    assert lines == [f"the MTP layer is switched off until the engine restarts: {why}."]
    assert num_calls == 40


def test_a_request_may_do_without(models: dict[bool, Path]) -> None:
    with engine(models[True], speculative_method="mtp") as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculative=False)
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], sampling, use_tqdm=False)
        assert told(llm).num_drafted == 0


def test_the_layer_of_a_gguf_file_guesses_too(models: dict[bool, Path], tmp_path: Path) -> None:
    path = as_gguf(models[True], tmp_path).path
    with engine(path) as llm:
        expected = generate(llm)
    with engine(path, speculative_method="mtp", pipeline_parallel_size=2) as llm:
        assert generate(llm) == expected
        stats = told(llm)
        assert stats.drafter == "mtp"
        assert stats.num_accepted > 0


def test_a_model_without_the_layer_is_refused_by_name(tmp_path: Path) -> None:
    model = MODELS["v2"].make(tmp_path)
    with pytest.raises(UsageError, match="DeepseekV2ForCausalLM has no MTP layer") as caught:
        engine(model, speculative_method="mtp")
    assert caught.value.param == "speculative_method"


def test_a_checkpoint_that_lacks_what_its_config_names(tmp_path: Path) -> None:
    """`num_nextn_predict_layers` is there, and the tensors are not."""
    model = MODELS["v3"].make(tmp_path)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    with engine(model) as llm:
        assert llm.generate([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
    with pytest.raises(UsageError, match=r"no tensor model\.layers\.3\.eh_proj\.weight, which") as caught:
        engine(model, speculative_method="mtp")
    assert caught.value.param == "speculative_method"

"""Models that run through transformers' layers: in any number of stages as in transformers (row A16)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from depth import sampled
from families import FAMILIES
from foreign_families import FOREIGN, greedy, logits_of
from hand_core import Wanted, small_core
from hf_reference import MIN_MARGIN
from penstock import LLM, SamplingParams
from penstock.executor.inprocess import InprocessExecutor
from penstock.families.registry import load_spec
from penstock.models.transformers_backend import TransformersModel
from penstock.rank.loading import build_transformers, load_rank
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights
from rank_configs import make_rank_configs
from stage_driver import StageDriver

PROMPTS = [[(7 * i + 3 * j) % 150 for j in range(5 + 14 * i)] for i in range(3)]
NUM_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=sampled(FOREIGN, 4))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FOREIGN[request.param].make(tmp_path_factory.mktemp("checkpoint"))


def tokens(model: Path, num_stages: int, **changes: object) -> list[list[int]]:
    """What the prompts become together, eight tokens of a prompt at a time."""
    executor = InprocessExecutor(make_rank_configs(model, num_stages, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), NUM_TOKENS) for prompt in PROMPTS]
    small_core(num_stages, 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


def loaded_stages(model: Path, cuts: Sequence[int], dtype: str = "float32") -> list[TransformersModel]:
    spec, stages = load_spec(model), []
    (config,) = make_rank_configs(model, 1, dtype=dtype)
    for start, end in pairwise([0, *cuts, spec.num_layers]):
        own = msgspec.structs.replace(config, start_layer=start, end_layer=end)
        stage = build_transformers(own, spec, Checkpoint(model).names)
        load_weights(stage, Checkpoint(model), lambda done, total: None)
        stages.append(stage)
    return stages


def test_a16_every_number_of_stages_gives_the_tokens_of_transformers(checkpoint: Path) -> None:
    expected, margin = greedy(checkpoint, PROMPTS, NUM_TOKENS)
    assert margin > MIN_MARGIN
    assert len({token for ids in expected for token in ids}) > 4
    for num_stages in (1, 2, 3):
        assert tokens(checkpoint, num_stages) == expected, num_stages


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2)])
def test_a16_logits_of_chunks_and_decodes_are_those_of_transformers(
    checkpoint: Path, cuts: Sequence[int]
) -> None:
    first, second = PROMPTS[2], PROMPTS[1]
    driver = StageDriver(checkpoint, cuts, stages=loaded_stages(checkpoint, cuts))
    with torch.inference_mode():
        found = {0: [driver.step({0: first[:20]})], 1: []}
        for start in (0, 7):  # prefill beside a decode
            step = driver.step({0: [first[20 + start // 7]], 1: second[start : start + 7]})
            found[0].append(step[:1])
            found[1].append(step[1:])
        for offset in range(5):  # two decodes
            step = driver.step({0: [first[22 + offset]], 1: [second[14 + offset]]})
            found[0].append(step[:1])
            found[1].append(step[1:])
    for row, ids in ((0, first[:27]), (1, second[:19])):
        torch.testing.assert_close(torch.cat(found[row]), logits_of(checkpoint, ids), atol=1e-4, rtol=0)


def test_bfloat16_rounds_where_transformers_rounds(checkpoint: Path) -> None:
    """Nearer to transformers in bfloat16 than that is to float32."""
    ids, stages = PROMPTS[2], loaded_stages(checkpoint, (1,), "bfloat16")
    with torch.inference_mode():
        found = StageDriver(checkpoint, (1,), dtype=torch.bfloat16, stages=stages).prefill(0, ids, 7)
    expected = logits_of(checkpoint, ids, torch.bfloat16)
    assert (found - expected).abs().max() < (logits_of(checkpoint, ids) - expected).abs().max()


def test_a12_a_stage_reads_and_holds_its_own_share(checkpoint: Path) -> None:
    """What stands before the layers is the first stage's, what comes after them the last one's."""
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    reports = [
        load_rank(config, lambda done, total: None).report for config in make_rank_configs(checkpoint, 3)
    ]
    ends = {name: weight.nbytes for name, weight in whole.named_parameters() if not is_of_layer(name)}
    layers = sum(weight.nbytes for weight in whole.parameters()) - sum(ends.values())
    first = sum(size for name, size in ends.items() if is_before(name))
    last = sum(size for name, size in ends.items() if not is_before(name))
    if whole.config.tie_word_embeddings:
        last += whole.get_input_embeddings().weight.nbytes
    assert [report.tensor_bytes for report in reports] == [
        first + layers // 3,
        layers // 3,
        last + layers // 3,
    ]
    assert all(report.bytes_read == report.tensor_bytes for report in reports)


def is_of_layer(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


def is_before(name: str) -> bool:
    return any(part in name for part in ("embed", "wte", "wpe", "transformer.w.", "project_in"))


@pytest.mark.parametrize("name", sampled(sorted(FAMILIES.keys() - {"phi3 longrope"}), 5))
def test_a_known_family_can_be_forced_and_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Windows, caps, scales and two rotations at once, as transformers tells them and as we read them."""
    model = FAMILIES[name].make(tmp_path)
    assert tokens(model, 2, model_impl="transformers") == tokens(model, 1, kernels="off")


@pytest.mark.soak
def test_processes_serve_it_too() -> None:
    """The rank processes import transformers themselves; the settings reach them."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = []
    for model_impl, backend in (("penstock", "inprocess"), ("transformers", "mp")):
        with LLM(
            "demo",
            pipeline_parallel_size=2,
            dtype="float32",
            threads_per_rank=1,
            model_impl=model_impl,
            distributed_executor_backend=backend,
        ) as llm:
            outputs.append([result.outputs[0].text for result in llm.generate(["ROMEO:\n", "I"], params)])
    assert outputs[0] == outputs[1]

"""Parts, cuts and steps of the decoder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import checkpoints
from paths import shared_data
from penstock.layers.missing import MissingLayer
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.intermediate import IntermediateTensors
from stage_driver import StageDriver, load_stage

NUM_LAYERS = 4
CUTS = [cut for size in range(NUM_LAYERS) for cut in itertools.combinations(range(1, NUM_LAYERS), size)]
PROMPT = [1, 40, 7, 7, 90, 3, 22, 5, 61, 11, 2]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama tied", "llama", "qwen2 tied", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, tied = request.param.partition(" ")
    return checkpoints.make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), family=family, tied=bool(tied), layers=NUM_LAYERS, seed=3
    )


def components(stage: Decoder) -> set[str]:
    """Parts that hold parameters: `embed_tokens`, `layers.<i>`, `norm`, `lm_head`."""
    names = (name.removeprefix("model.") for name, _ in stage.named_parameters())
    return {".".join(name.split(".")[: 2 if name.startswith("layers") else 1]) for name in names}


def test_a4_placeholders_fill_the_list_and_hold_nothing(checkpoint: Path) -> None:
    stage = load_stage(checkpoint, 1, 3)
    assert len(stage.layers) == NUM_LAYERS
    assert [isinstance(layer, DecoderLayer) for layer in stage.layers] == [False, True, True, False]
    assert [isinstance(layer, MissingLayer) for layer in stage.layers] == [True, False, False, True]
    assert sum(p.nbytes for i in (0, 3) for p in stage.layers[i].parameters()) == 0


def test_a6_ends_hold_embedding_norm_and_head(checkpoint: Path) -> None:
    tied = json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"]
    head = "embed_tokens" if tied else "lm_head"
    assert components(load_stage(checkpoint, 0, 2)) == {"embed_tokens", "layers.0", "layers.1"}
    assert components(load_stage(checkpoint, 2, 3)) == {"layers.2"}
    assert components(load_stage(checkpoint, 3, 4)) == {"layers.3", "norm", head}
    whole = {f"layers.{i}" for i in range(NUM_LAYERS)} | {"embed_tokens", "norm", head}
    assert components(load_stage(checkpoint, 0, 4)) == whole


@pytest.mark.parametrize("cuts", CUTS)
def test_s5_a_stage_builds_only_its_own_parameters(checkpoint: Path, cuts: tuple[int, ...]) -> None:
    driver = StageDriver(checkpoint, cuts)
    for stage in driver.stages:
        held = sum(parameter.numel() for parameter in stage.parameters())
        assert held == driver.spec.stage_parameters(stage.start_layer, stage.end_layer)


def test_a17_kv_goes_with_the_own_layers(checkpoint: Path) -> None:
    driver = StageDriver(checkpoint, (3,))
    assert [len(kv) for kv in driver.kv] == [3, 1]
    metadata, positions = driver.metadata([0], [2])
    tensors = driver.stages[0].embed(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="zip"):
        driver.stages[0](tensors, positions, driver.kv[1], metadata)


def mixed_trace(driver: StageDriver) -> torch.Tensor:
    """Chunked prefill of one row among decodes of two others; logits of all tokens."""
    logits = [driver.step({0: PROMPT[:4], 1: PROMPT[3:10]})]
    logits.append(driver.step({0: [5], 1: [17], 2: PROMPT[:6]}))
    logits.append(driver.step({1: [8], 0: [60], 2: PROMPT[6:]}))
    logits += [driver.step({0: [n], 1: [n + 1], 2: [n + 2]}) for n in range(20, 26)]
    return torch.cat(logits)


def test_a10_every_cut_equals_one_stage_bit_for_bit(checkpoint: Path) -> None:
    whole = mixed_trace(StageDriver(checkpoint))
    assert whole.isfinite().all()
    for cuts in CUTS:
        assert torch.equal(mixed_trace(StageDriver(checkpoint, cuts)), whole), cuts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a10_every_cut_is_exact_in_half_precision(checkpoint: Path, dtype: torch.dtype) -> None:
    whole = mixed_trace(StageDriver(checkpoint, dtype=dtype))
    assert whole.dtype == torch.float32
    assert whole.isfinite().all()
    assert torch.equal(mixed_trace(StageDriver(checkpoint, (1, 2, 3), dtype=dtype)), whole)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a11_hidden_states_and_residual_at_a_cut_are_those_of_the_whole(checkpoint: Path, cut: int) -> None:
    """Stage by stage their sum is that of one stage that ends at the same layer; the stream is nothing."""
    driver = StageDriver(checkpoint, tuple(range(1, cut + 1)))
    single = StageDriver(checkpoint, (cut,))
    metadata, positions = driver.metadata([0], [len(PROMPT)])
    stepwise = driver.stages[0].embed(torch.tensor(PROMPT))
    for stage, kv in zip(driver.stages[:cut], driver.kv, strict=False):
        stepwise = stage(stepwise, positions, kv, metadata)
    at_once = single.stages[0].embed(torch.tensor(PROMPT))
    at_once = single.stages[0](at_once, positions, single.kv[0], metadata)
    assert torch.equal(stepwise["hidden_states"], at_once["hidden_states"])
    assert stepwise["hidden_states"].any()
    for tensors in (stepwise, at_once):
        assert not tensors["residual"].any()
        assert tensors["residual"].signbit().all(), "plus zero would change a minus zero"


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 3)])
def test_a14_the_last_stages_tied_head_is_the_embedding(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    checkpoints.make_checkpoint(tmp_path, tied=True, layers=NUM_LAYERS)
    stages = StageDriver(tmp_path, cuts).stages
    first, last = stages[0].model.embed_tokens, stages[-1].model.embed_tokens
    assert torch.equal(first.weight, last.weight)
    assert isinstance(stages[-1].lm_head, MissingLayer)
    names = [name for name, _ in stages[-1].named_parameters()]
    assert names.count("model.embed_tokens.weight") == 1
    assert not any("lm_head" in name for name in names)


def test_s2_loaded_tied_head_gives_the_logits_of_one_stage(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, tied=True, layers=NUM_LAYERS)
    logits = [StageDriver(tmp_path, cuts).prefill(0, PROMPT, 5) for cuts in ((), (1, 2, 3))]
    assert torch.equal(*logits)


def test_rows_do_not_disturb_each_other(checkpoint: Path) -> None:
    together = mixed_trace(StageDriver(checkpoint))
    alone = StageDriver(checkpoint, num_rows=8)
    alone.prefill(2, PROMPT[:6], 6)
    alone.prefill(2, PROMPT[6:], 5)
    last = torch.cat([alone.step({2: [n + 2]}) for n in range(20, 26)])
    torch.testing.assert_close(together[-18:][2::3], last, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(checkpoint: Path, chunk: int) -> None:
    whole = StageDriver(checkpoint).prefill(0, PROMPT, len(PROMPT))
    torch.testing.assert_close(StageDriver(checkpoint).prefill(0, PROMPT, chunk), whole, atol=1e-4, rtol=1e-5)


def test_an_empty_step_crosses_every_stage(checkpoint: Path) -> None:
    assert StageDriver(checkpoint, (1, 2)).step({}).shape == (0, 96)


def test_logits_of_chosen_tokens_only(checkpoint: Path) -> None:
    stage = load_stage(checkpoint, 3, 4)
    generator = torch.Generator().manual_seed(0)
    tensors = IntermediateTensors(
        {name: torch.randn((5, 32), generator=generator) for name in ("hidden_states", "residual")}
    )
    chosen = stage.compute_logits(tensors, torch.tensor([4, 1]))
    every = stage.compute_logits(tensors, torch.arange(5))
    torch.testing.assert_close(chosen, every[[4, 1]])
    assert stage.compute_logits(tensors, torch.empty(0, dtype=torch.int64)).shape == (0, 96)


def test_forward_leaves_its_input_alone(checkpoint: Path) -> None:
    driver = StageDriver(checkpoint, (2,))
    metadata, positions = driver.metadata([0], [3])
    tensors = driver.stages[0].embed(torch.tensor([1, 2, 3]))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    driver.stages[0](tensors, positions, driver.kv[0], metadata)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("cuts", "prompt_len", "chunk"),
    [((), 0, 512), ((3,), 63, 16), ((2, 4), 129, 7), ((1, 2, 4), 200, 64), ((1, 2, 3, 4), 63, 1)],
)
def test_a18_stories260k_follows_the_golden_ids(cuts: tuple[int, ...], prompt_len: int, chunk: int) -> None:
    directory = shared_data("models", "stories260K")
    golden = json.loads((directory / "golden.json").read_text())["greedy_ids"]
    driver = StageDriver(directory, cuts, block_size=16, num_rows=2, max_len=512)
    count = len(golden) - prompt_len
    assert driver.greedy(1, [1, *golden[:prompt_len]], count, chunk=chunk) == golden[prompt_len:]

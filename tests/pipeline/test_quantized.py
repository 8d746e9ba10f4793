"""Quantised weights through stages: from each layout, and quantised at load; with and without kernels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import checkpoints
from hand_core import Wanted, small_core
from penstock.errors import ModelChangedError
from penstock.executor.inprocess import InprocessExecutor
from penstock.kvstore import names
from penstock.models.decoder import Decoder
from penstock.process.config import FirstLoad, RankConfig
from penstock.rank.compute_choice import load_kernels
from penstock.rank.loading import load_rank
from penstock.weights.mapping import tensor_targets
from rank_configs import make_rank_configs
from stage_driver import StageDriver

SIZES = {"layers": 3, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]
SUFFIXES = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight"}
LAYOUTS = [("gptq", 4), ("gptq", 8), ("awq", 4), ("packed", 4), ("int8", 8)]


def loaded(config: RankConfig) -> Decoder:
    """The model of a rank, as the rank loads it."""
    return load_rank(config, lambda done, total: None).model


def outputs(model: Path, num_stages: int, **changes: object) -> list[list[int]]:
    executor = InprocessExecutor(make_rank_configs(model, num_stages, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(num_stages, 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


def logits(stage: Decoder, model: Path) -> torch.Tensor:
    driver = StageDriver(model, [], block_size=16, stages=[stage])
    return driver.prefill(0, PROMPTS[2], 16)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_a_quantised_checkpoint_computes_like_its_dequantised_weights(
    tmp_path: Path, layout: checkpoints.QuantizedLayout, bits: int, kernels: str
) -> None:
    plain = tmp_path / "plain"
    group_size = None if layout == "int8" else 16
    checkpoints.make_quantized_checkpoint(
        tmp_path / "packed", layout, bits=bits, group_size=group_size, plain=plain, **SIZES
    )
    (config,) = make_rank_configs(tmp_path / "packed", 1, kernels=kernels)
    found = logits(loaded(config), tmp_path / "packed")
    expected = StageDriver(plain, [], block_size=16).prefill(0, PROMPTS[2], 16)
    # Activations are rounded to 8 bits, weights are the same.
    assert (found - expected).square().mean().sqrt() < 0.06 * expected.square().mean().sqrt()


@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_a_quantised_checkpoint_gives_the_same_tokens_with_any_number_of_stages(
    tmp_path: Path, layout: checkpoints.QuantizedLayout, bits: int
) -> None:
    checkpoints.make_quantized_checkpoint(tmp_path, layout, bits=bits, symmetric=layout == "int8", **SIZES)
    one = outputs(tmp_path, 1)
    assert all(len(output) == 12 for output in one)
    assert outputs(tmp_path, 2) == one
    assert outputs(tmp_path, 3) == one


@pytest.mark.parametrize(("layout", "bits"), LAYOUTS)
def test_r3_a_changed_element_of_a_quantised_checkpoint_is_refused_in_a_later_load(
    tmp_path: Path, layout: checkpoints.QuantizedLayout, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SAMPLE_BYTES", 16)
    group_size = None if layout == "int8" else 16
    checkpoints.make_quantized_checkpoint(tmp_path, layout, bits=bits, group_size=group_size, **SIZES)
    (config,) = make_rank_configs(tmp_path, 1)
    first = load_rank(config, lambda done, total: None)
    table = FirstLoad(identity=first.samples.identity, digests=first.samples.table + first.report.digests)
    again = msgspec.structs.replace(config, first_load=table)
    assert load_rank(again, lambda done, total: None).report.digests == first.report.digests
    tensor = f"model.layers.1.mlp.up_proj.{SUFFIXES[layout]}"
    checkpoints.change_one_element(tmp_path, tensor)
    with pytest.raises(ModelChangedError, match=f"tensor {tensor}"):
        load_rank(again, lambda done, total: None)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_quantised_at_load_give_the_same_tokens_with_any_number_of_stages(
    tmp_path: Path, quantization: str, tied: bool
) -> None:
    checkpoints.make_checkpoint(tmp_path, tied=tied, **SIZES)
    one = outputs(tmp_path, 1, quantization=quantization)
    assert outputs(tmp_path, 2, quantization=quantization) == one
    assert outputs(tmp_path, 3, quantization=quantization) == one


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantising_without_kernels_gives_the_same_numbers(tmp_path: Path, quantization: str) -> None:
    checkpoints.make_checkpoint(tmp_path, **SIZES)
    found = [
        logits(
            loaded(make_rank_configs(tmp_path, 1, quantization=quantization, kernels=kernels)[0]), tmp_path
        )
        for kernels in ("auto", "off")
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-2)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_projection_that_is_not_quantised_stands_beside_those_that_are(
    tmp_path: Path, num_stages: int
) -> None:
    dense = ["model.layers.0.mlp.down_proj", "model.layers.2.self_attn.k_proj"]
    dequantized = checkpoints.make_quantized_checkpoint(tmp_path, "packed", **SIZES)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if name.rpartition(".")[0] not in dense}
    plain = {f"{name}.weight": dequantized[f"{name}.weight"].half() for name in dense}
    checkpoints.write_weights(tmp_path, kept | plain)
    assert all(len(output) == 12 for output in outputs(tmp_path, num_stages))


def test_packed_weights_take_a_quarter_of_the_memory(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, tied=True, **SIZES)
    sizes = {}
    for quantization in ("none", "int8", "int4"):
        (config,) = make_rank_configs(tmp_path, 1, quantization=quantization, dtype="bfloat16")
        model = loaded(config)
        if config.kernels == "auto" and not load_kernels(config, is_quantized=False)[0]:
            pytest.skip("without kernels they do not")
        targets = tensor_targets(model)
        sizes[quantization] = sum({id(s.sink): s.sink.nbytes for s in targets if hasattr(s, "sink")}.values())
    assert sizes["int8"] < 0.6 * sizes["none"]
    assert sizes["int4"] < 0.35 * sizes["none"]

"""Row H4: a model asks before each of its layers, once and in order, and reads no layer's cache before.

Of a prompt's first half each layer's keys and values lie beside until that layer is asked for; before that
its storage is full of NaN, which no layer that reads too early gets out of its numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import checkpoints
import deepseek_models
from foreign_families import FOREIGN
from penstock.kernels.cpu.library import KERNEL_NAMES, load
from penstock.kernels.cpu.ops import CpuKernels
from penstock.rank.loading import load_rank
from rank_configs import make_rank_configs
from stage_driver import StageDriver, is_recorded

IDS = [(7 * index + index // 5) % 90 for index in range(40)]
FIRST = 24  # tokens: whole blocks, which come from a store
CUT = [1]


def make(directory: Path) -> Path:
    return checkpoints.make_checkpoint(directory, layers=3, vocab_size=96)


def by_torch(directory: Path) -> StageDriver:
    return StageDriver(make(directory), CUT)


def by_kernels(directory: Path) -> StageDriver:
    loaded = load()
    if loaded.library is None:
        pytest.skip(f"no kernels: {loaded.reason}")
    kernels = CpuKernels(loaded.library, frozenset(KERNEL_NAMES))
    return StageDriver(make(directory), CUT, kernels=kernels)


def recorded(directory: Path) -> StageDriver:
    driver = by_kernels(directory)
    for stage, kv in zip(driver.stages, driver.kv, strict=True):
        stage.record(kv, 64)
        assert is_recorded(stage)
    return driver


def latent(directory: Path) -> StageDriver:
    return StageDriver(deepseek_models.MODELS["v3"].make(directory), CUT)


def by_transformers(directory: Path) -> StageDriver:
    FOREIGN["gpt2"].make(directory)
    ranks = [load_rank(config, lambda done, total: None) for config in make_rank_configs(directory, 2)]
    return StageDriver(directory, stages=[rank.model for rank in ranks])


MODELS = [by_torch, by_kernels, recorded, latent, by_transformers]


@pytest.mark.parametrize("make_driver", MODELS)
def test_h4_a_model_reads_a_layer_when_it_has_asked_for_it_and_asks_once_in_order(
    tmp_path: Path, make_driver: Callable[[Path], StageDriver]
) -> None:
    driver = make_driver(tmp_path)
    driver.step({0: IDS[:FIRST]})
    whole = [layer.clone() for layer in driver.memory]
    expected = driver.step({0: IDS[FIRST:]})
    assert expected.isfinite().all()

    def second_step(come: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """With nothing in the caches, but what is put there before each layer."""
        for layer in driver.memory:
            layer.fill_(0xFF)
        asked: list[int] = []

        def before_layer(stage: int, index: int) -> None:
            layer = driver.stages[stage].start_layer + index
            driver.memory[layer].copy_(come[layer])
            asked.append(layer)

        driver.lengths[0] = FIRST
        metadata, positions = driver.metadata([0], [len(IDS) - FIRST])
        tensors = driver.stages[0].embed(torch.tensor(IDS[FIRST:]))
        for number, (stage, kv) in enumerate(zip(driver.stages, driver.kv, strict=True)):
            tensors = stage(
                tensors, positions, kv, metadata, lambda index, number=number: before_layer(number, index)
            )
        return driver.stages[-1].compute_logits(tensors, torch.arange(len(positions))), asked

    found, asked = second_step(whole)
    assert asked == list(range(driver.spec.num_layers))
    assert torch.equal(found, expected)
    for late in range(driver.spec.num_layers):  # what comes too late is seen: this test can fail
        empty = torch.full_like(whole[late], 0xFF)
        assert not torch.equal(second_step([*whole[:late], empty, *whole[late + 1 :]])[0], expected)
